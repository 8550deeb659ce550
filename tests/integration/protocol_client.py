"""Both services by their raw stubs, as for a client without our library, and a stand-in for a worker.

    Pair            the two processes, their calls, and faults to inject into the worker
    LeaseHolder     one lease: plans steps, brings their tokens, keeps the sampled tokens
    StandInWorker   a pool of any geometry at cachemgr, without tensors

A call that is refused raises RefusedError, which has the content of the status and its ErrorInfo.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
from deadlines import DEADLINE_S
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from quire.cache.v1 import attach_pb2, cache_service_pb2, cache_service_pb2_grpc, error_pb2, grant_pb2
from quire.cli.launch import LocalServices
from quire.compute.v1 import worker_service_pb2, worker_service_pb2_grpc

CACHE_SERVICE = "quire.cache.v1.CacheService"
WORKER_SERVICE = "quire.compute.v1.WorkerService"
BLOCK_SIZE = 4
NUM_BLOCKS = 31  # 120 tokens and the null block; the model can do 128
MAX_SEQUENCES = 8
MAX_STEP_TOKENS = 92
WORKER_ARGS = (
    *("--dtype", "float32", "--threads", "1", "--block-size", str(BLOCK_SIZE)),
    *("--max-num-seqs", str(MAX_SEQUENCES), "--max-step-tokens", str(MAX_STEP_TOKENS)),
)
VOCAB_SIZE = 96
FAULTY_WORKER = str(Path(__file__).with_name("faulty_worker.py"))
CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 200),
)
CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


@dataclass
class RefusedError(Exception):
    """A call or an item was refused."""

    code: grpc.StatusCode
    reason: str
    domain: str
    metadata: dict[str, str]
    message: str
    retry_delay_s: float | None = None

    @classmethod
    def of_call(cls, error: grpc.RpcError) -> RefusedError:
        """The content of a failed call; a status without details has no reason."""
        status = rpc_status.from_call(error)
        info, delay_s = error_details_pb2.ErrorInfo(), None
        if status is not None:
            first, *others = status.details
            assert first.Unpack(info)
            delay_s = retry_delay_s(*others) if others else None
        return cls(error.code(), info.reason, info.domain, dict(info.metadata), error.details() or "", delay_s)

    @classmethod
    def of_message(cls, error: error_pb2.Error) -> RefusedError:
        """The content of an error inside an answer."""
        delay_s = error.retry_delay.ToNanoseconds() / 1e9 if error.HasField("retry_delay") else None
        return cls(CODES[error.code], error.reason, "", dict(error.metadata), error.message, delay_s)


def retry_delay_s(detail: Any) -> float:
    """The delay of a RetryInfo."""
    retry = error_details_pb2.RetryInfo()
    assert detail.Unpack(retry)
    return float(retry.retry_delay.ToNanoseconds() / 1e9)


def ask(method: Any, request: Any, *, wait_for_ready: bool = False) -> Any:
    """Calls a method with a deadline. Raises RefusedError."""
    try:
        return method(request, timeout=DEADLINE_S, wait_for_ready=wait_for_ready)
    except grpc.RpcError as error:
        raise RefusedError.of_call(error) from None


def await_that(what: str, condition: Callable[[], Any], *, timeout_s: float = DEADLINE_S) -> Any:
    """Asks again and again until the answer is true, and returns it; fails after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)
    return answer


def draw_tokens(count: int, *, seed: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Random tokens, the same for the same seed."""
    generator = random.Random(seed)
    return [generator.randrange(vocab_size) for _ in range(count)]


def seconds(value: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(value * 1e9))
    return duration


# -- the processes ------------------------------------------------------------------------------------------------


class Pair:
    """A cachemgr and a worker that run, with raw stubs of both."""

    def __init__(self, services: LocalServices) -> None:
        self.services = services
        self.folder = services.runtime_dir
        self.cache_channel = grpc.insecure_channel(services.cachemgr_address, options=CHANNEL_OPTIONS)
        self.worker_channel = grpc.insecure_channel(services.worker_address, options=CHANNEL_OPTIONS)
        self.cache: Any = cache_service_pb2_grpc.CacheServiceStub(self.cache_channel)
        self.worker: Any = worker_service_pb2_grpc.WorkerServiceStub(self.worker_channel)

    def close(self) -> None:
        self.cache_channel.close()
        self.worker_channel.close()

    # -- looking

    def await_attached(self) -> None:
        """Returns when the worker is attached, by both sides' word."""

        def is_attached() -> bool:
            try:
                pool = self.pool()
            except RefusedError:  # no worker has come yet
                return False
            statistics = self.worker_statistics()
            return pool.attached and (statistics.epoch, statistics.term) == (pool.epoch, pool.term)

        await_that("the worker is attached", is_attached)

    def pool(self, name: str = "default") -> cache_service_pb2.Pool:
        return ask(self.cache.GetPool, cache_service_pb2.GetPoolRequest(pool=name), wait_for_ready=True).pool

    def statistics(self, pool: str = "default") -> cache_service_pb2.PoolStatistics:
        (statistics,) = ask(self.cache.GetStatistics, cache_service_pb2.GetStatisticsRequest(pool=pool)).pools
        return statistics

    def worker_statistics(self) -> worker_service_pb2.GetStatisticsResponse:
        return ask(self.worker.GetStatistics, worker_service_pb2.GetStatisticsRequest(), wait_for_ready=True)

    def counts(self, pool: str = "default") -> cache_service_pb2.BlockCounts:
        return self.pool(pool).block_counts

    def blocks(self, pool: str = "default", **filters: Any) -> list[cache_service_pb2.Block]:
        request = cache_service_pb2.ListBlocksRequest(pool=pool, page_size=10_000, **filters)
        return list(ask(self.cache.ListBlocks, request).blocks)

    def leases(self, pool: str = "default") -> list[cache_service_pb2.Lease]:
        return list(ask(self.cache.ListLeases, cache_service_pb2.ListLeasesRequest(pool=pool)).leases)

    def has_lease(self, lease_id: str) -> bool:
        """True if it still holds or may hold blocks; a lease that is being fenced does."""
        return any(lease_id.startswith(lease.lease_id_prefix) for lease in self.leases())

    def violations(self, pool: str = "default") -> list[str]:
        return list(ask(self.cache.AuditPool, cache_service_pb2.AuditPoolRequest(pool=pool)).violations)

    def cached_tokens(self, token_ids: Sequence[int], **fields: Any) -> int:
        request = cache_service_pb2.LookupPrefixRequest(pool="default", token_ids=token_ids, **fields)
        (match,) = ask(self.cache.LookupPrefix, request).matches
        return match.cached_token_count

    def checksums(self) -> list[int]:
        """Checksums of every block, the null block, too."""
        block_ids = range(self.pool().geometry.block_count)
        request = worker_service_pb2.ChecksumBlocksRequest(block_ids=block_ids)
        return list(ask(self.worker.ChecksumBlocks, request).checksums)

    def books(self, pool: str = "default") -> tuple[Any, ...]:
        """The holders of all blocks: the state that a refusal must not change."""
        sequences = ask(self.cache.ListSequences, cache_service_pb2.ListSequencesRequest(pool=pool)).sequences
        leases = [(lease.lease_id_prefix, lease.state, lease.sequence_count) for lease in self.leases(pool)]
        counted = self.statistics(pool)
        for name in ("planned_step_count", "computed_step_count", "skipped_step_count", "refusal_counts"):
            counted.ClearField(name)
        return self.blocks(pool), list(sequences), leases, counted

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        """Within the block no KV block may change, neither in the books nor in memory."""
        before = self.books(), self.checksums()
        yield
        assert (self.books(), self.checksums()) == before

    def health(self, channel: grpc.Channel, service: str) -> Any:
        """A watch of a service's health."""
        request = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(channel).Watch(request, timeout=DEADLINE_S)

    # -- faults

    @contextlib.contextmanager
    def held(self) -> Iterator[Hold]:
        """Within the block the worker's steps do not end."""
        hold = Hold(self.folder / "hold")
        try:
            yield hold
        finally:
            hold.release()

    @contextlib.contextmanager
    def fault(self, name: str) -> Iterator[None]:
        """Within the block something breaks: "fail" or "damage"."""
        path = self.folder / name
        path.touch()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


class Hold:
    """Holds the worker's forwards from the next one on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: int | None = None
        os.mkfifo(path)

    def await_running(self) -> None:
        """Returns when a step is in the model, where it stays."""
        self._writer = await_that("a step runs", self._open)

    def release(self) -> None:
        """Lets all steps run. No effect the second time."""
        self._path.unlink(missing_ok=True)
        if self._writer is not None:
            os.close(self._writer)
            self._writer = None

    def _open(self) -> int | None:
        try:
            return os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # the reader has ended
            return None


class Wire:
    """A unix socket that passes everything on to another one, until it is cut; and again when it is healed."""

    def __init__(self, path: Path, target: Path) -> None:
        self._target = str(target)
        self._is_cut = False
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Ends open connections; nothing passes from here on."""
        with self._lock:
            self._is_cut = True
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._connections.clear()

    def heal(self) -> None:
        with self._lock:
            self._is_cut = False

    def close(self) -> None:
        """Ends everything."""
        self.cut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._connect(self._listener.accept()[0])

    def _connect(self, near: socket.socket) -> None:
        far = socket.socket(socket.AF_UNIX)
        with self._lock:
            try:
                if self._is_cut:
                    raise ConnectionRefusedError
                far.connect(self._target)
            except OSError:
                near.close()
                far.close()
                return
            self._connections += [near, far]
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=pump, args=(source, sink), daemon=True).start()


def pump(source: socket.socket, sink: socket.socket) -> None:
    """Passes bytes on until either side ends."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


# -- a client -----------------------------------------------------------------------------------------------------


@dataclass
class LeaseHolder:
    """A client with a lease. `tokens` are its sequences' known tokens."""

    pair: Pair
    lease_id: str
    epoch: int
    term: int
    tokens: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def create(cls, pair: Pair, *, pool: str = "default", ttl_s: float = 60.0, request_id: str = "") -> Self:
        request = cache_service_pb2.CreateLeaseRequest(pool=pool, ttl=seconds(ttl_s), request_id=request_id)
        lease = ask(pair.cache.CreateLease, request, wait_for_ready=True)
        return cls(pair, lease.lease_id, lease.epoch, lease.term)

    def delete(self) -> None:
        ask(self.pair.cache.DeleteLease, cache_service_pb2.DeleteLeaseRequest(lease_id=self.lease_id))

    def renew(self) -> None:
        ask(self.pair.cache.RenewLease, cache_service_pb2.RenewLeaseRequest(lease_id=self.lease_id))

    def plan_request(self, **fields: Any) -> cache_service_pb2.PlanStepRequest:
        return cache_service_pb2.PlanStepRequest(**{"lease_id": self.lease_id, "epoch": self.epoch} | fields)

    def plan(self, **fields: Any) -> cache_service_pb2.PlanStepResponse:
        """One step, as PlanStepRequest's fields say. Raises RefusedError if the call is refused."""
        return ask(self.pair.cache.PlanStep, self.plan_request(**fields))

    def admit(self, *prompts: tuple[int, Sequence[int]], **fields: Any) -> cache_service_pb2.PlanStepResponse:
        """Plans a step that begins sequences with these tokens; `fields` are those of each admission."""
        self.tokens |= {seq_id: list(tokens) for seq_id, tokens in prompts}
        admissions = [
            cache_service_pb2.Admission(sequence_id=seq_id, token_ids=tokens, **fields) for seq_id, tokens in prompts
        ]
        return self.accepted(self.plan(admissions=admissions))

    def extend(self, *seq_ids: int, counts: Sequence[int] = (), **fields: Any) -> cache_service_pb2.PlanStepResponse:
        """Plans a step that computes tokens of sequences, one each unless said otherwise."""
        extends = cache_service_pb2.Extends(sequence_ids=seq_ids, token_counts=counts or [1] * len(seq_ids))
        return self.accepted(self.plan(extends=extends, **fields))

    @staticmethod
    def accepted(plan: cache_service_pb2.PlanStepResponse) -> cache_service_pb2.PlanStepResponse:
        assert not plan.refusals
        return plan

    def refused(self, **fields: Any) -> RefusedError:
        """Plans a step with one refused item, skips it, and returns the refusal."""
        plan = self.plan(**fields)
        self.run(plan, skip=True)
        (refusal,) = plan.refusals
        assert not plan.run_sequence_ids
        return RefusedError.of_message(refusal.error)

    def inputs(self, plan: cache_service_pb2.PlanStepResponse, **sampling: Any) -> list[Any]:
        """The tokens that a plan needs, with the same sampling parameters for each sequence."""
        inputs = []
        for index in plan.given_run_indexes:
            seq_id, start = plan.run_sequence_ids[index], plan.run_starts[index]
            token_ids = self.tokens[seq_id][start : start + plan.run_token_counts[index]]
            inputs.append(worker_service_pb2.SequenceInput(sequence_id=seq_id, token_ids=token_ids, **sampling))
        return inputs

    def step(
        self, plan: cache_service_pb2.PlanStepResponse, *, inputs: Sequence[Any] | None = None, skip: bool = False
    ) -> worker_service_pb2.RunStepRequest:
        """The request for the worker; `inputs` other than the right ones if given."""
        inputs = self.inputs(plan) if inputs is None and not skip else inputs
        return worker_service_pb2.RunStepRequest(grant=plan.grant, inputs=inputs, skip=skip)

    def run(
        self, plan: cache_service_pb2.PlanStepResponse, *, inputs: Sequence[Any] | None = None, skip: bool = False
    ) -> worker_service_pb2.RunStepResponse:
        """Runs a planned step and keeps the tokens sampled. Raises RefusedError."""
        return self.keep(ask(self.pair.worker.RunStep, self.step(plan, inputs=inputs, skip=skip)))

    def start(self, plan: cache_service_pb2.PlanStepResponse) -> Any:
        """Sends a planned step and does not wait; `finish` does."""
        return self.pair.worker.RunStep.future(self.step(plan), timeout=DEADLINE_S)

    def finish(self, running: Any) -> worker_service_pb2.RunStepResponse:
        """Waits for a step that was started. Raises RefusedError."""
        try:
            return self.keep(running.result())
        except grpc.RpcError as error:
            raise RefusedError.of_call(error) from None

    def keep(self, answer: worker_service_pb2.RunStepResponse) -> worker_service_pb2.RunStepResponse:
        tokens = iter(answer.sampled_token_ids)
        counts = answer.sampled_token_counts or [1] * len(answer.sequence_ids)
        for seq_id, count in zip(answer.sequence_ids, counts, strict=True):
            self.tokens[seq_id] += itertools.islice(tokens, count)
        return answer

    def go_on(self, *seq_ids: int, num_steps: int) -> None:
        """So many more tokens of each sequence."""
        for _ in range(num_steps):
            self.run(self.extend(*seq_ids))

    def sequence(self, seq_id: int) -> cache_service_pb2.Sequence:
        request = cache_service_pb2.GetSequenceRequest(lease_id=self.lease_id, sequence_id=seq_id)
        return ask(self.pair.cache.GetSequence, request).sequence

    def await_settled(self) -> None:
        """Returns when cachemgr knows the outcome of every step."""
        await_that("all steps are reported", lambda: not self._num_in_flight())

    def _num_in_flight(self) -> int:
        (lease,) = [lease for lease in self.pair.leases("") if self.lease_id.startswith(lease.lease_id_prefix)]
        return lease.step_in_flight_count


def unsigned(grant: grant_pb2.SignedGrant) -> grant_pb2.StepGrant:
    """The content of a grant."""
    return grant_pb2.StepGrant.FromString(grant.grant)


# -- a worker that is none ----------------------------------------------------------------------------------------

GEOMETRY: dict[str, Any] = {
    "block_size_tokens": 4,
    "block_count": 9,
    "block_bytes": 1024,
    "max_sequence_count": 4,
    "max_sequence_tokens": 24,
    "vocabulary_size": 100,
    "model": "none",
    "model_fingerprint": "none",
}


class StandInWorker:
    """One attachment of a pool: sends the test's messages, keeps cachemgr's."""

    def __init__(self, pair: Pair) -> None:
        self._sent: queue.SimpleQueue[attach_pb2.AttachPoolRequest | None] = queue.SimpleQueue()
        self._call = pair.cache.AttachPool(iter(self._sent.get, None), timeout=DEADLINE_S)

    def say(self, **message: Any) -> None:
        self._sent.put(attach_pb2.AttachPoolRequest(**message))

    def register(
        self, pool: str, *, epoch: int = 1, worker_address: str = "nowhere:1", **told: Any
    ) -> attach_pb2.AttachPoolResponse:
        """Registers and returns the answer. Raises RefusedError. `told` are fields of RegisterPool or PoolGeometry."""
        geometry = {
            name: told.pop(name) for name in list(told) if name in attach_pb2.PoolGeometry.DESCRIPTOR.fields_by_name
        }
        registration = attach_pb2.RegisterPool(
            pool=pool,
            epoch=epoch,
            geometry=attach_pb2.PoolGeometry(**GEOMETRY | geometry),
            worker_address=worker_address,
            **told,
        )
        self.say(register_pool=registration)
        return self.hear()

    def hear(self) -> attach_pb2.AttachPoolResponse:
        """The next message of cachemgr. Raises RefusedError if the stream ends with a status."""
        try:
            return next(self._call)
        except grpc.RpcError as error:
            raise RefusedError.of_call(error) from None

    def create_lease(self, pair: Pair, pool: str, *, ttl_s: float = 60.0) -> LeaseHolder:
        """A client's lease on this pool: waits for the order and obeys it."""
        request = cache_service_pb2.CreateLeaseRequest(pool=pool, ttl=seconds(ttl_s))
        creating = pair.cache.CreateLease.future(request, timeout=DEADLINE_S)
        lease_id = self.hear().open_lease.lease_id
        self.say(lease_opened=attach_pb2.LeaseOpened(lease_id=lease_id))
        lease = creating.result()
        assert lease.lease_id == lease_id
        return LeaseHolder(pair, lease_id, lease.epoch, lease.term)

    def end(self) -> None:
        """Says nothing more."""
        self._sent.put(None)

    def close(self) -> None:
        """Breaks the stream off."""
        self.end()
        self._call.cancel()
