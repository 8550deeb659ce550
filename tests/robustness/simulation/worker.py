"""The worker's process: its gate, executor, attachment and service are the real ones, over a model of digests.

Of what a real process has of its machine, the threads of the model and the sockets are simulated.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from robustness.simulation.digest_model import DigestFunction, DigestModel
from robustness.simulation.model_thread import SimulatedModelThread
from robustness.simulation.ranks import SimulatedFollower, SimulatedLeader
from robustness.simulation.reports import UnreliableReports
from robustness.simulation.schedule import DiskFeatures
from robustness.simulation.worker_disk import ObservedStore, WorkerDisks
from robustness.simulation.world import Process
from torch import Tensor

from quire.compute.v1 import worker_service_pb2_grpc
from quire.serving.addresses import Address
from quire.serving.dialing import Dialer, DialOptions
from quire.serving.interceptor import HandlerGuard
from quire.serving.options import ServerOptions
from quire.worker.config import WorkerConfig
from quire.worker.disk.records import HEADER_BYTES
from quire.worker.grant.errors import DOMAIN
from quire.worker.grant.gate import Gate
from quire.worker.memory.host_pool import make_host_pool
from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.layer_groups import LayerGroupChoice
from quire.worker.memory.step_batch import StepBatch
from quire.worker.run.executor import Executor
from quire.worker.run.loading import Loaded
from quire.worker.run.ranks import ONE_RANK, OneRank
from quire.worker.run.verify import VerifyingExecutor
from quire.worker.run.watchdog import StuckStepError, Watchdog, WatchdogActions
from quire.worker.sampling.grammars import NoGrammars
from quire.worker.sampling.parameters import MAX_LOGPROBS
from quire.worker.service.adapter_loading import AdapterLoader
from quire.worker.service.attachment import Attachment
from quire.worker.service.description import describe_model, describe_pool
from quire.worker.service.process import open_disk
from quire.worker.service.roles import MESSAGE_LIMITS
from quire.worker.service.servicer import WorkerServicer
from quire.worker.service.steps import StepLimits, Steps, new_epoch


async def nothing() -> None:
    """Take note of what the watchdog has found."""


HEALTH_IS_NOT_SIMULATED = WatchdogActions(nothing, nothing, lambda: "model:simulated")

NO_TOKENIZER = "/"
"""A folder that is there, so that clients find no tokenizer in it, and look nowhere else."""


@dataclass(frozen=True)
class WorkerSettings:
    """A worker's model, its sizes and its pace.

    step_timeout_s is the watchdog's; None: there is none, as on a CPU. verifies: with QUIRE_VERIFY's executor.
    runs_ahead: steps are launched before earlier ones are collected, as on a GPU, which clients are told there is, and
    not verified, as the verifier waits for each. num_ranks is 1 or 2.
    """

    function: DigestFunction = field(default_factory=DigestFunction)
    pool: str = "pool"
    block_size: int = 4
    num_blocks: int = 24
    num_host_blocks: int = 0
    host_cache_share: float = 0.0
    max_num_seqs: int = 8
    max_step_tokens: int = 64
    max_draft_tokens: int = 8
    eos_token_ids: tuple[int, ...] = ()
    layer_groups: LayerGroupChoice = "auto"
    mean_step_s: float = 0.01
    step_timeout_s: float | None = None
    verifies: bool = True
    runs_ahead: bool = False
    num_ranks: int = 1


class FaultyModel(DigestModel):
    """A model that can fail."""

    fails_next = False

    def forward(self, batch: StepBatch, pool: KVPool) -> Tensor:
        """See DigestModel.forward."""
        if self.fails_next:
            self.fails_next = False
            raise RuntimeError("the simulated model was to fail")
        return super().forward(batch, pool)


class FaultyPool(KVPool):
    """A pool in which the copies of a step can fail, when the step's block tables are changed already."""

    is_damaged_next = False

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See KVPool.copy_blocks. Every step calls it, with the copies that it has."""
        if self.is_damaged_next:
            self.is_damaged_next = False
            raise RuntimeError("the simulated pool was to be damaged")
        super().copy_blocks(pairs)


@dataclass(frozen=True)
class Rank:
    """One rank: what it has loaded, and what runs its steps."""

    model: FaultyModel
    pool: FaultyPool
    loaded: Loaded
    executor: Executor


class SimulatedWorker:
    """One start of a worker, in a process of its own; its epoch is a new one. Nothing runs before start().

    An error that ends a real worker ends its process. It is a finding, too, unless the worker has lied, or was to lose
    a rank.
    """

    def __init__(
        self,
        process: Process,
        settings: WorkerSettings,
        *,
        address: str,
        cachemgr: Address,
        disks: WorkerDisks | None = None,
    ) -> None:
        """`address` is where clients reach its service; `cachemgr` is dialed as all workers do.

        Raises CannotStartError if its disk can't be used.
        """
        self.process = process
        self.settings = settings
        self.reports = UnreliableReports(process)
        numbers = random.Random(process.world.random.getrandbits(64))
        self.thread = SimulatedModelThread(process, numbers, mean_step_s=settings.mean_step_s)
        self.leader: SimulatedLeader | None = None
        self.ranks: list[Rank] = []
        if settings.num_ranks == 2:
            follower = SimulatedFollower()
            self.ranks.append(make_rank(settings, follower))
            self.leader = SimulatedLeader(follower, self.ranks[0].executor)
        self.ranks.append(make_rank(settings, self.leader or ONE_RANK))
        loaded, self.executor = self.ranks[-1].loaded, self.ranks[-1].executor
        self._is_rank_lost = False
        config = make_config(settings, cachemgr)
        self.disk = None
        if disks is not None and disks.features is not None:
            config = with_disk(config, disks.features, disks.directory(process), self.executor.host_block_bytes)
            self.disk = open_disk(config, loaded, self.executor, process.loop)
            assert self.disk is not None, "the configuration has one"
            files, copies = disks.files(process.name), disks.copies(process.name)
            self.disk._store = ObservedStore(self.disk._store, files, copies)  # type: ignore[assignment]
        geometry = describe_pool(config, loaded, num_disk_blocks=0 if self.disk is None else self.disk.num_blocks)
        limits = StepLimits.of(geometry, max_step_tokens=config.max_step_tokens, max_logprobs=MAX_LOGPROBS)
        self.steps = Steps(Gate(config.pool, new_epoch()), self.executor, self.thread, limits, loaded.grammars)
        self.steps.reports = self.reports
        self.steps.on_violation = self._on_violation
        dialer = Dialer(cachemgr, config.cachemgr_dial)
        if self.disk is not None:
            self.steps.on_new_epoch = self.disk.begin_epoch
        self.attachment = Attachment(
            dialer, self.steps, geometry=geometry, worker_address=lambda: address, disk=self.disk
        )
        device = "cuda:0" if settings.runs_ahead else "cpu"
        model = replace(describe_model(config, loaded.model, loaded.pool), tokenizer=NO_TOKENIZER, device=device)
        loader = AdapterLoader(
            loaded.model, self.steps, self.thread, model_name="digests", excluded="The model computes digests."
        )
        self.servicer = WorkerServicer(self.steps, self.attachment, model, geometry, loader)

    def start(self, server: Any) -> None:
        """Serve WorkerService on a server of the process, which listens, and attach the pool."""
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(self.servicer, server)
        self.process.spawn(self.attachment.run())
        self.process.spawn(self.watch())

    async def terminate(self) -> None:
        """SIGTERM: it ends the steps that it has accepted, and then itself."""
        await self.servicer.drain()
        if self.disk is not None:
            self.disk.close()
        self.process.end()

    @property
    def is_honest(self) -> bool:
        """False if its reports have lied: then others may break rules that they don't know of."""
        return not self.reports.has_lied

    def fail_next_step(self) -> None:
        """Let the model fail in its next forward: that step computes nothing."""
        for rank in self.ranks:
            rank.model.fails_next = True

    def damage_next(self) -> None:
        """Let the next grant fail half applied: the worker begins a new epoch."""
        self.ranks[-1].pool.is_damaged_next = True

    def hang(self, seconds: float) -> None:
        """Let the next step take so much longer."""
        self.thread.hang(seconds)

    def late(self, seconds: float) -> None:
        """Let its reports of so many seconds wait."""
        self.reports.late(seconds)

    def detach(self) -> None:
        """Let its stream to cachemgr break."""
        self.attachment._break()

    def lose_rank(self) -> None:
        """Let the second rank end: the worker ends with the next step."""
        assert self.leader is not None, "a worker of one rank has no other to lose"
        self.leader.lose()
        self._is_rank_lost = True

    def check_invariants(self) -> None:
        """Raises AssertionError if the memory of a rank is not as it must be between two steps."""
        for rank in self.ranks:
            rank.pool.check_invariants()
            rank.model.states.check_invariants()
            rank.executor._table.check_invariants()
            rank.executor._sampler.check_invariants()

    def left(self, *, with_leases: bool = True) -> list[str]:
        """List what is left; when no client uses the pool any more, that should be nothing but leases that live."""
        gate, statistics = self.steps.gate.statistics(), self.executor.statistics()
        counts = {
            "leases": gate.num_open_leases if with_leases else 0,
            "sequences": statistics.num_sequences,
            "steps": self.steps.num_in_flight,
            "reports": len(self.reports),
        }
        return [f"{count} {what}" for what, count in counts.items() if count]

    async def watch(self) -> None:
        """End the process if a step does not end in twice its time."""
        if self.settings.step_timeout_s is None:
            return
        try:
            await Watchdog(self.steps.oldest, HEALTH_IS_NOT_SIMULATED, limit_s=self.settings.step_timeout_s).run()
        except StuckStepError:
            self.process.end()

    def _on_violation(self, error: BaseException) -> None:
        if self.is_honest and not self._is_rank_lost:
            self.process.world.fail(f"{self.process.name}: {error}", error)
        self.process.end()


def worker_guard(process: Process) -> HandlerGuard:
    """The guard of a worker's server, as process.serve() has it."""
    return HandlerGuard(
        domain=DOMAIN,
        fatal=(),
        on_fatal=lambda error: process.world.fail(f"{process.name}: {error}", error),
        message_limits=MESSAGE_LIMITS,
    )


def make_rank(settings: WorkerSettings, ranks: OneRank) -> Rank:
    """Load one rank, as loading.load() and make_executor() do."""
    model = FaultyModel(settings.function, eos_token_ids=settings.eos_token_ids, layer_groups=settings.layer_groups)
    pool = FaultyPool(
        model.specs,
        groups=model.layer_groups,
        num_blocks=settings.num_blocks,
        block_size=settings.block_size,
        dtype=model.dtype,
        device=model.device,
    )
    host_pool = make_host_pool(pool, num_blocks=settings.num_host_blocks)
    grammars = NoGrammars("the simulated model has no tokenizer")
    kind = VerifyingExecutor if settings.verifies and not settings.runs_ahead else Executor
    executor = kind(model, pool, max_num_seqs=settings.max_num_seqs, host_pool=host_pool, ranks=ranks)
    executor.runs_ahead = settings.runs_ahead
    loaded = Loaded(grammars, model, pool, host_pool, None, pool.bytes_per_block * settings.num_ranks)
    return Rank(model, pool, loaded, executor)


def with_disk(config: WorkerConfig, disk: DiskFeatures, directory: Any, content_bytes: int) -> WorkerConfig:
    """The same configuration with a disk; a block's content has so many bytes."""
    num_bytes = disk.num_blocks * (HEADER_BYTES + content_bytes)
    return replace(config, disk_dir=directory, disk_memory_bytes=num_bytes, disk_write_rate=int(disk.write_rate))


def make_config(settings: WorkerSettings, cachemgr: Address) -> WorkerConfig:
    """The settings as a command line would give them. Flags of loading are left at what they have no effect with."""
    return WorkerConfig(
        server=ServerOptions(
            listen=(), metrics_listen=None, log_level="warning", log_format="text", drain_timeout_s=30.0
        ),
        cachemgr=cachemgr,
        cachemgr_dial=DialOptions(),
        advertise=None,
        model="digests",
        pool=settings.pool,
        dtype="auto",
        kv_dtype="auto",
        device="cpu",
        attention="torch",
        layer_groups=settings.layer_groups,
        cuda_graphs=False,
        dependent_launch=None,
        max_graph_tokens=0,
        step_graph="parts",
        wait="block",
        max_whole_graph_tokens=0,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        kv_cache_memory_bytes=None,
        host_memory_bytes=0,
        host_cache_share=settings.host_cache_share,
        holder=None,
        verify_kept_blocks=False,
        memory_share=None,
        max_model_len=settings.function.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_step_tokens=settings.max_step_tokens,
        max_draft_tokens=settings.max_draft_tokens,
        threads=1,
        step_timeout_s=None,
        profile=None,
        profile_steps=(0, 0),
        revision=None,
        trust_remote_code=False,
        fuse=None,
        deterministic=False,
        products="auto",
        tensor_parallel_size=settings.num_ranks,
    )
