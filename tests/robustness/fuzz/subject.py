"""The two processes under test, their state that must not change, and their other ends.

Canary      a lease of the worker's pool: sequences with known tokens, all of which must stay as it is
OwnPool     a pool without tensors: opens and fences leases as ordered, reports what was planned as computed
Grants      signed steps of the worker that may run, have run, and steps of an ended lease
Subject     all of it, with the values of the stand-ins in messages
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
import psutil
from integration.protocol_client import CHANNEL_OPTIONS, LeaseHolder, Pair, ask, await_that
from robustness.fuzz import names
from robustness.fuzz.names import CANARY_POOL, OWN_POOL, Bindings
from robustness.fuzz.surface import CACHEMGR, WORKER

from quire.cache.v1 import attach_pb2, cache_service_pb2, cache_service_pb2_grpc, grant_pb2
from quire.cli.launch import LocalServices
from quire.compute.v1 import worker_service_pb2, worker_service_pb2_grpc

MODEL = Path(__file__).parents[3] / "deploy/demo/model"
NUM_BLOCKS = 64
DEADLINE_S = 120.0
"""The deadline of every call: on a busy machine all of them are slow. One without an answer by then hangs."""
TTL = {"seconds": 3600}
OWN_GEOMETRY = {
    "block_size_tokens": 4,
    "block_count": 97,
    "block_bytes": 1024,
    "max_sequence_count": 24,
    "max_sequence_tokens": 64,
    "vocabulary_size": names.VOCABULARY,
    "model": "none",
    "model_fingerprint": "none",
}
MAX_PLANS_OF_A_LEASE = 200
CANARY_PROMPTS = {1: [5, 6, 7, 8, 9, 10, 11] * 5, 2: list(range(20, 60))}
OPTIONS = (*CHANNEL_OPTIONS, ("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


class Changed(AssertionError):
    """Something is not as it was."""


@dataclass
class Canary:
    """Sequences of a lease, in the books and in memory, and the tokens that they go on with."""

    pair: Pair
    lease: LeaseHolder
    expected: dict[int, list[int]]
    state: Any = None

    @classmethod
    def admit(cls, pair: Pair) -> Self:
        """Learns from one lease how the sequences go on, and stops at half of that with another one."""
        expected = generated(LeaseHolder.create(pair, ttl_s=60), num_tokens=8)
        canary = cls(pair, LeaseHolder.create(pair, ttl_s=3600), {})
        for seq_id, tokens in CANARY_PROMPTS.items():
            canary.lease.run(canary.lease.admit((seq_id, tokens)))
        canary.lease.go_on(*CANARY_PROMPTS, num_steps=3)
        canary.lease.await_settled()
        canary.expected = expected
        canary.state = canary.look()
        return canary

    def look(self) -> Any:
        """All that is known of it."""
        lease, pair = self.lease, self.pair
        lease.renew()
        sequences = [lease.sequence(seq_id) for seq_id in CANARY_PROMPTS]
        blocks = pair.blocks(CANARY_POOL, lease_id=lease.lease_id)
        block_ids = [block.block_id for block in blocks]
        checksums = ask(pair.worker.ChecksumBlocks, worker_service_pb2.ChecksumBlocksRequest(block_ids=block_ids))
        (listed,) = [each for each in pair.leases(CANARY_POOL) if lease.lease_id.startswith(each.lease_id_prefix)]
        listed.ClearField("expire_time")
        return sequences, blocks, list(checksums.checksums), listed, pair.pool(CANARY_POOL).epoch

    def check(self) -> None:
        """Raises Changed."""
        found = self.look()
        if found != self.state:
            raise Changed(f"the canary has changed:\n{difference(self.state, found)}")
        for pool in (CANARY_POOL, OWN_POOL):
            if violations := self.pair.violations(pool):
                raise Changed(f"AuditPool {pool}: {violations}")

    def sing(self) -> None:
        """Goes on to the end. Raises Changed if a token is another one."""
        self.lease.go_on(*CANARY_PROMPTS, num_steps=4)
        tokens = {seq_id: self.lease.tokens[seq_id] for seq_id in CANARY_PROMPTS}
        if tokens != self.expected:
            raise Changed(f"the canary's tokens are {tokens}, not {self.expected}")


def generated(lease: LeaseHolder, *, num_tokens: int) -> dict[int, list[int]]:
    """The canary's sequences with so many tokens more, as an undisturbed lease has them."""
    for seq_id, tokens in CANARY_PROMPTS.items():
        lease.run(lease.admit((seq_id, tokens), salt=b"undisturbed"))
    lease.go_on(*CANARY_PROMPTS, num_steps=num_tokens - 1)
    lease.delete()
    return lease.tokens


class OwnPool:
    """The pool that messages may change, from `attach` to `close`."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._outbox: asyncio.Queue[attach_pb2.AttachPoolRequest | None] = asyncio.Queue()
        self._attached = asyncio.Event()
        self._open: dict[str, int] = {}  # the next step to report, by lease
        self._early: dict[tuple[str, int], grant_pb2.StepGrant] = {}
        self._num_reports = 0
        self._task: asyncio.Task[None] | None = None

    async def attach(self) -> None:
        self._say(
            register_pool={
                "pool": OWN_POOL,
                "epoch": names.OWN_EPOCH,
                "geometry": OWN_GEOMETRY,
                "worker_address": "nowhere:1",
            }
        )
        self._task = asyncio.create_task(self._obey())
        await asyncio.wait_for(self._attached.wait(), DEADLINE_S)

    async def close(self) -> None:
        """Raises what ended the conversation, if it was not this."""
        self._outbox.put_nowait(None)
        assert self._task is not None
        await self._task

    def report(self, grant_bytes: bytes) -> None:
        """A step was planned: it and those behind it have been computed, as soon as none before them is missing."""
        grant = grant_pb2.StepGrant.FromString(grant_bytes)
        lease_id = grant.lease_id
        if grant.step_number < self._open.get(lease_id, 2**63):
            return  # the first answer, once more; or the lease has ended
        self._early[lease_id, grant.step_number] = grant
        while (ready := self._early.pop((lease_id, self._open[lease_id]), None)) is not None:
            self._open[lease_id] += 1
            self._num_reports += 1
            self._say(step_report=computed(ready, self._num_reports))

    @property
    def num_reported(self) -> dict[str, int]:
        """Steps, by lease."""
        return {lease_id: step - 1 for lease_id, step in self._open.items()}

    def _say(self, **message: Any) -> None:
        self._outbox.put_nowait(attach_pb2.AttachPoolRequest(**message))

    async def _said(self) -> AsyncIterator[attach_pb2.AttachPoolRequest]:
        while (message := await self._outbox.get()) is not None:
            yield message

    async def _obey(self) -> None:
        async for order in self._cache.AttachPool(self._said()):
            kind = order.WhichOneof("message")
            if kind == "attached":
                self._attached.set()
            elif kind == "open_lease":
                self._open.setdefault(order.open_lease.lease_id, 1)
                self._say(lease_opened={"lease_id": order.open_lease.lease_id})
            elif kind == "fence_lease":
                self._forget(order.fence_lease.lease_id)
                self._say(lease_fenced={"lease_id": order.fence_lease.lease_id})

    def _forget(self, lease_id: str) -> None:
        self._open.pop(lease_id, None)
        for key in [key for key in self._early if key[0] == lease_id]:
            del self._early[key]


def computed(grant: grant_pb2.StepGrant, report_number: int) -> attach_pb2.StepReport:
    """A report of the whole step; a sampled token is the sequence's id."""
    report = attach_pb2.StepReport(
        report_number=report_number,
        lease_id=grant.lease_id,
        step_number=grant.step_number,
        outcome=attach_pb2.STEP_OUTCOME_COMPUTED,
        sequence_ids=grant.run_sequence_ids,
    )
    runs = zip(grant.run_sequence_ids, grant.run_starts, grant.run_token_counts, grant.run_samples, strict=True)
    for seq_id, start, count, samples in runs:
        report.computed_token_counts.append(start + count)
        if samples:
            report.sampled_sequence_ids.append(seq_id)
            report.sampled_token_ids.append(seq_id % names.VOCABULARY)
    return report


@dataclass
class Grants:
    """Steps of the worker's pool, all of one prompt, each of a lease of its own: so they are of one length."""

    cache: Any
    bindings: Bindings
    held: list[tuple[str, tuple[bytes, bytes]]] = field(default_factory=list)

    async def renew(self) -> None:
        """The next step has run: there is a new one. What had run before ends with its lease."""
        self.held.insert(0, await self._plan())
        if len(self.held) > 2:
            await self._end(self.held[2][0])
        kinds = (names.NEXT, names.RAN, names.FENCED)
        self.bindings.grants = {kind: grant for kind, (_, grant) in zip(kinds, self.held, strict=False)}
        self.bindings.grant_bytes = len(self.held[0][1][0])
        del self.held[3:]

    async def end(self) -> None:
        for lease_id, _ in self.held[:2]:
            await self._end(lease_id)

    async def _end(self, lease_id: str) -> None:
        await self.cache.DeleteLease(cache_service_pb2.DeleteLeaseRequest(lease_id=lease_id), timeout=DEADLINE_S)

    async def _plan(self) -> tuple[str, tuple[bytes, bytes]]:
        request = cache_service_pb2.CreateLeaseRequest(pool=CANARY_POOL, ttl=TTL)
        lease = await self.cache.CreateLease(request, timeout=DEADLINE_S)
        request = cache_service_pb2.PlanStepRequest(
            lease_id=lease.lease_id,
            epoch=lease.epoch,
            # A salt of its own: nothing of the prompt is found, all of it has to be given.
            admissions=[{"sequence_id": 1, "token_ids": names.TOKENS, "salt": lease.lease_id.encode()}],
        )
        plan = await self.cache.PlanStep(request, timeout=DEADLINE_S)
        assert plan.run_token_counts == [len(names.TOKENS)], plan
        return lease.lease_id, (plan.grant.grant, plan.grant.signature)


class Subject:
    """Made by `started`."""

    def __init__(self, services: LocalServices) -> None:
        self.services = services
        self.pair = Pair(services)
        self.bindings = Bindings()
        addresses = {CACHEMGR: services.cachemgr_address, WORKER: services.worker_address}
        self.channels = {
            process: grpc.aio.insecure_channel(address, options=OPTIONS) for process, address in addresses.items()
        }
        self._cache: Any = cache_service_pb2_grpc.CacheServiceStub(self.channels[CACHEMGR])
        self._worker: Any = worker_service_pb2_grpc.WorkerServiceStub(self.channels[WORKER])
        self._renewing = asyncio.Lock()
        self.own_pool = OwnPool(self._cache)
        self.grants = Grants(self._cache, self.bindings)
        self.canary = Canary.admit(self.pair)
        self.bindings.leases[names.CANARY_LEASE] = self.canary.lease.lease_id
        self.bindings.canary_epoch = self.canary.lease.epoch
        self.processes = {
            CACHEMGR: psutil.Process(services.cachemgr.pid),
            WORKER: psutil.Process(services.worker.pid),
        }

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls) -> AsyncIterator[Self]:
        """Both processes, from a canary that was admitted to one that still has to go on."""
        with LocalServices.start(
            model=MODEL,
            num_blocks=NUM_BLOCKS,
            extra_cachemgr_args=("--log-level", "warning"),
            extra_worker_args=("--log-level", "warning", "--threads", "1", "--block-size", "4", "--max-num-seqs", "16"),
        ) as services:
            subject = cls(services)
            try:
                await subject._prepare()
                yield subject
            finally:
                await subject._close()

    async def _prepare(self) -> None:
        await self.own_pool.attach()
        gone = await self._create_lease()
        await self.end_lease(gone)
        self.bindings.leases[names.GONE_LEASE] = gone
        for name in names.OWN_LEASES:
            self.bindings.leases[name] = await self._create_lease()
        for _ in range(3):
            await self.grants.renew()

    async def _close(self) -> None:
        self.pair.close()
        for channel in self.channels.values():
            await channel.close()

    # -- what has to be done about messages that were valid -------------------------------------------------------

    async def keep_up(self) -> None:
        """New leases for those that have ended or have planned much, so that there is room again."""
        async with self._renewing:
            for name in names.OWN_LEASES:
                lease_id = self.bindings.leases[name]
                if self.own_pool.num_reported.get(lease_id, 0) > MAX_PLANS_OF_A_LEASE or await self._is_gone(lease_id):
                    await self.end_lease(lease_id)
                    self.bindings.leases[name] = await self._create_lease()

    async def step_ran(self, grant: tuple[bytes, bytes]) -> None:
        """The worker accepted this step: a next one is planned, unless it exists already."""
        async with self._renewing:
            if grant == self.bindings.grants[names.NEXT]:
                await self.grants.renew()

    async def run_next(self) -> None:
        """The next step, as it was planned. Raises Changed if it is refused: no message can have used it up."""
        grant, signature = self.bindings.grants[names.NEXT]
        request = worker_service_pb2.RunStepRequest(
            grant={"grant": grant, "signature": signature}, inputs=[{"sequence_id": 1, "token_ids": names.TOKENS}]
        )
        try:
            await self._worker.RunStep(request, timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            raise Changed(f"a step that was never accepted can't run any more: {error.details()}") from None
        await self.grants.renew()

    async def end_lease(self, lease_id: str) -> None:
        request = cache_service_pb2.DeleteLeaseRequest(lease_id=lease_id)
        await self._cache.DeleteLease(request, timeout=DEADLINE_S)

    async def unpin(self, pin_id: str) -> None:
        request = cache_service_pb2.UnpinPrefixRequest(pool=OWN_POOL, pin_id=pin_id)
        await self._cache.UnpinPrefix(request, timeout=DEADLINE_S)

    async def _create_lease(self) -> str:
        request = cache_service_pb2.CreateLeaseRequest(pool=OWN_POOL, ttl=TTL)
        lease = await self._cache.CreateLease(request, timeout=DEADLINE_S)
        return str(lease.lease_id)

    async def _is_gone(self, lease_id: str) -> bool:
        try:
            await self._cache.RenewLease(cache_service_pb2.RenewLeaseRequest(lease_id=lease_id), timeout=DEADLINE_S)
        except grpc.aio.AioRpcError:
            return True
        return False

    # -- what must not change -------------------------------------------------------------------------------------

    def books(self) -> Any:
        """The books of both pools, without the parts that a refusal may change: leases' ends, counts of refusals."""
        return [self._books_of(pool) for pool in (CANARY_POOL, OWN_POOL)]

    def _books_of(self, pool: str) -> Any:
        pair = self.pair
        leases = pair.leases(pool)
        for lease in leases:
            lease.ClearField("expire_time")
        statistics = pair.statistics(pool)
        statistics.ClearField("refusal_counts")
        sequences = ask(pair.cache.ListSequences, cache_service_pb2.ListSequencesRequest(pool=pool)).sequences
        pins = ask(pair.cache.ListPins, cache_service_pb2.ListPinsRequest(pool=pool)).pins
        worker = pair.worker_statistics()
        worker.ClearField("refusal_counts")
        blocks = pair.blocks(pool)
        for block in blocks:
            block.ClearField("priority")  # advice ends when its time is over
        return blocks, leases, list(sequences), list(pins), statistics, worker

    async def settled(self) -> None:
        """Returns when no step is in flight and no lease is being fenced, in either pool."""
        await asyncio.to_thread(await_that, "all is settled", self._is_settled, timeout_s=DEADLINE_S)

    def _is_settled(self) -> bool:
        own = self.pair.leases(OWN_POOL)
        reported = [lease.last_step_number - lease.step_in_flight_count for lease in own]
        worker = self.pair.worker_statistics()
        return (
            all(lease.state == cache_service_pb2.LEASE_STATE_OPEN for lease in own + self.pair.leases(CANARY_POOL))
            and sum(reported) == sum(self.own_pool.num_reported.values())
            and not worker.step_in_flight_count
            and not worker.unacknowledged_report_count
        )

    def unexpected_lines(self) -> Iterator[str]:
        """Unexpected lines of the logs."""
        for service in (self.services.cachemgr, self.services.worker):
            assert service.log_path is not None
            with service.log_path.open(errors="replace") as lines:
                for line in lines:
                    if any(sign in line for sign in ("handler failed", "Traceback", "panicked", "never retrieved")):
                        yield f"{service.name}: {line.rstrip()}"


def difference(before: Any, after: Any) -> str:
    """Lines of what two looks saw that are not in both."""
    lines = difflib.unified_diff(str(before).splitlines(), str(after).splitlines(), lineterm="")
    return "\n".join(itertools.islice(lines, 60))
