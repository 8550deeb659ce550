"""Both services inside the benchmark's process: the same engine, core and executor, without gRPC and second processes.

The difference to the two real services is the cost of the boundary.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence

from worker_flags import DEFAULTS, WorkerFlags

from quire.cache.v1 import attach_pb2, cache_service_pb2
from quire.cachemgr._core import PlanRequest, StepReport
from quire.cachemgr.catalog import AttachedPool, Catalog
from quire.cachemgr.errors import CallRefused
from quire.cachemgr.service import messages
from quire.cachemgr.service.servicer import CacheServicer
from quire.client.errors import QuireError, error_of_reason
from quire.compute.v1 import worker_service_pb2
from quire.serving.runtime import keep_freed_memory
from quire.worker.grant.errors import Refused
from quire.worker.grant.gate import Gate
from quire.worker.memory.kv_pool import KVPool
from quire.worker.model.paged_model import PagedModel
from quire.worker.run.executor import Executor
from quire.worker.run.graph_limit import limit_by_model
from quire.worker.run.graphs import capture_decode
from quire.worker.run.model_thread import ModelThread
from quire.worker.run.prompt_graphs import capture_prompts
from quire.worker.sampling.parameters import MAX_LOGPROBS
from quire.worker.service.servicer import encode_ended
from quire.worker.service.steps import EndedStep, StepLimits, Steps, new_epoch

POOL = "default"
LEASE_TTL_S = 3600.0
MAX_STEP_TOKENS = 8192
"""The default of the worker's --max-step-tokens."""


def refused_error(refused: CallRefused | Refused) -> QuireError:
    """The error as a client would have decoded it."""
    if isinstance(refused, CallRefused):
        refusal = refused.refusal
        return error_of_reason(refusal.reason.value, refusal.message, refusal.metadata)
    return error_of_reason(refused.reason.value, str(refused), refused.metadata)


def make_executor(
    model: PagedModel,
    pool: KVPool,
    *,
    max_num_seqs: int,
    flags: WorkerFlags = DEFAULTS,
) -> Executor:
    """An executor as a worker makes it: on a GPU with its steps as graphs, on a CPU with freed memory kept."""
    decode = prompts = None
    if model.device.type == "cuda":
        max_graph_tokens = flags.max_graph_tokens
        if max_graph_tokens is None:
            max_graph_tokens = limit_by_model(
                num_layers=model.num_layers,
                num_parameters=model.num_layer_parameters,
                max_step_tokens=MAX_STEP_TOKENS,
            ).num_tokens
        whole = flags.step_graph == "one"
        sizes = {"max_num_seqs": max_num_seqs, "max_graph_tokens": max_graph_tokens}
        decode = capture_decode(model, pool, whole=whole, **sizes)
        if decode is not None and flags.max_whole_graph_tokens:
            prompts = capture_prompts(model, pool, max_tokens=flags.max_whole_graph_tokens, memory=decode.memory)
    else:
        keep_freed_memory()
        model.modes.note_without_graphs("a CPU has none")
    model.note_attention()
    spins = flags.wait == "spin"
    return Executor(model, pool, max_num_seqs=max_num_seqs, decode=decode, prompts=prompts, spins=spins)


class InProcessServices:
    """A catalog with one attached pool, and the steps of its worker. Make it on the event loop."""

    def __init__(
        self,
        model: PagedModel,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_step_tokens: int,
        make_executor: Callable[..., Executor] = make_executor,
    ) -> None:
        pool = KVPool(model.specs, num_blocks=num_blocks, block_size=block_size, dtype=model.dtype, device=model.device)
        self._thread = ModelThread(asyncio.get_running_loop())
        gate = Gate(POOL, new_epoch())
        executor = make_executor(model, pool, max_num_seqs=max_num_seqs)
        self.geometry = attach_pb2.PoolGeometry(
            block_size_tokens=block_size,
            block_count=num_blocks,
            block_bytes=pool.bytes_per_block,
            max_sequence_count=max_num_seqs,
            max_sequence_tokens=model.max_model_len,
            vocabulary_size=model.vocab_size,
            model=model.architecture,
            model_fingerprint=model.fingerprint,
        )
        limits = StepLimits.of(self.geometry, max_step_tokens=max_step_tokens, max_logprobs=MAX_LOGPROBS)
        self.steps = Steps(gate, executor, self._thread, limits)
        self.catalog = Catalog(term=time.time_ns())
        self.servicer = CacheServicer(self.catalog)
        self.pool = self._attach(gate)

    def _attach(self, gate: Gate) -> AttachedPool:
        registration = attach_pb2.RegisterPool(pool=POOL, epoch=gate.epoch, geometry=self.geometry, worker_address="-")
        pool = self.catalog.register(messages.decode_registration(registration), signing_key=secrets.token_bytes(32))
        if not isinstance(pool, AttachedPool):
            raise RuntimeError("a new epoch was not accepted")
        gate.attach(pool.term, pool.signing_key, [])
        self.steps.reports.send = self.settle
        return pool

    def settle(self, report: attach_pb2.StepReport) -> None:
        """Have cachemgr enter a report of the worker."""
        self.pool.ledger.settle(StepReport(report.SerializeToString()))
        self.steps.reports.acknowledge(report.report_number)

    def close(self) -> None:
        self._thread.stop()


class InProcessCache:
    """CacheApi by plain calls."""

    def __init__(self, services: InProcessServices) -> None:
        self._services = services

    async def create_lease(self, pool: str, *, ttl_s: float) -> cache_service_pb2.CreateLeaseResponse:
        lease_id = secrets.token_hex(16)
        services = self._services
        services.catalog.open_lease(services.pool, lease_id, ttl_s=LEASE_TTL_S, now=time.monotonic())
        services.steps.gate.open_lease(lease_id)
        return cache_service_pb2.CreateLeaseResponse(
            lease_id=lease_id,
            pool=POOL,
            epoch=services.pool.ledger.epoch,
            term=services.pool.term,
            geometry=services.geometry,
            worker_address="-",
        )

    async def renew_lease(self, lease_id: str) -> None:
        return None

    async def delete_lease(self, lease_id: str) -> None:
        services = self._services
        if services.pool.ledger.end_lease(lease_id):
            await services.steps.fence_lease(lease_id)
            services.catalog.lease_fenced(services.pool, lease_id)

    async def plan(self, request: cache_service_pb2.PlanStepRequest) -> cache_service_pb2.PlanStepResponse:
        try:
            answer = self._services.servicer.plan_step(PlanRequest(request.SerializeToString()))
            return cache_service_pb2.PlanStepResponse.FromString(answer)
        except CallRefused as refused:
            raise refused_error(refused) from None

    async def get_pool(self, pool: str) -> cache_service_pb2.Pool:
        return messages.encode_pool(self._services.pool)

    async def hang_up(self) -> None:
        return None

    async def close(self) -> None:
        return None


class InProcessAnswer:
    """StepAnswer of a step on the model thread."""

    def __init__(self, ended: Callable[[], asyncio.Future[EndedStep]]) -> None:
        self._ended = ended

    async def result(self) -> worker_service_pb2.RunStepResponse:
        try:
            return encode_ended(await self._ended())
        except Refused as refused:
            raise refused_error(refused) from None


class InProcessWorker:
    """WorkerApi by plain calls."""

    def __init__(self, services: InProcessServices) -> None:
        self._services = services

    async def get_model(self) -> worker_service_pb2.GetModelResponse:
        limits = self._services.steps.limits
        return worker_service_pb2.GetModelResponse(
            pool=POOL, max_step_tokens=limits.max_step_tokens, max_logprob_count=limits.max_logprobs
        )

    async def check_grammar(self, grammar: worker_service_pb2.Grammar, output_token_ids: Sequence[int] = ()) -> float:
        request = worker_service_pb2.CheckGrammarRequest(grammar=grammar, output_token_ids=output_token_ids)
        return await self._services.steps.check_grammar(request)

    async def run(self, request: worker_service_pb2.RunStepRequest) -> InProcessAnswer:
        try:
            ended = self._services.steps.accept(request)
        except Refused as refused:
            raise refused_error(refused) from None
        return InProcessAnswer(lambda: ended)

    async def hang_up(self) -> None:
        return None

    async def close(self) -> None:
        return None
