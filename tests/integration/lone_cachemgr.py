"""A cachemgr process with authentication, pools without tensors, and tenants that plan steps on them.

LoneCachemgr   the process, and its stubs by token
Bookkeeper     a worker that computes nothing: obeys orders, reports steps as the test says
Tenant         a client with a lease: its steps are computed when it says so
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
from certificates import sha256
from integration.protocol_client import (
    CHANNEL_OPTIONS,
    DEADLINE_S,
    GEOMETRY,
    RefusedError,
    await_that,
    seconds,
    unsigned,
)

from quire.cache.v1 import attach_pb2, cache_service_pb2, cache_service_pb2_grpc
from quire.cli.service_process import ServiceProcess

BLOCK_SIZE = GEOMETRY["block_size_tokens"]
NUM_USABLE = 12
SMALL_POOL = {"block_count": NUM_USABLE + 1, "max_sequence_count": 16, "max_sequence_tokens": 60}
ROOMY_POOL = {"max_sequence_count": 512, "max_sequence_tokens": 1 << 20}
SAMPLED_TOKEN = 7
COMPUTED = attach_pb2.STEP_OUTCOME_COMPUTED
SKIPPED = attach_pb2.STEP_OUTCOME_SKIPPED
CALLERS = {
    "alice": "client",
    "bob": "client",
    "carla": "client,content",
    "gina": "client,gateway",
    "olga": "operator",
    "oscar": "operator,content",
    "wanda": "worker",
}
"""Names of callers, which are their tenants and their tokens, and their roles."""


class WithToken(
    grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor, grpc.StreamStreamClientInterceptor
):
    """Shows a token with every call."""

    def __init__(self, token: str) -> None:
        self._metadata = [("authorization", f"Bearer {token}")]

    def _call(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(details._replace(metadata=self._metadata), request)

    intercept_unary_unary = intercept_unary_stream = intercept_stream_stream = _call


class LoneCachemgr:
    """A process, from `start` to `close`."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        tokens = folder / "tokens"
        tokens.write_text("".join(f"{name} {roles} {sha256(name)}\n" for name, roles in CALLERS.items()))
        address = f"unix:{folder}/cachemgr.sock"
        flags = ("--listen", address, "--token-file", str(tokens), "--eviction-policy", "lru", *arguments)
        self.process = ServiceProcess(
            "cachemgr",
            target="quire.cachemgr",
            arguments=flags,
            address=address,
            log_path=folder / "cachemgr.log",
        )
        self._channels: dict[str, grpc.Channel] = {}

    def start(self) -> Self:
        self.process.start()
        self.process.wait_serving(DEADLINE_S)
        return self

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self.process.kill()

    def stub(self, caller: str) -> Any:
        """The service as this caller reaches it."""
        channel = self._channels.get(caller)
        if channel is None:
            channel = self._channels[caller] = grpc.insecure_channel(self.process.address, options=CHANNEL_OPTIONS)
        return cache_service_pb2_grpc.CacheServiceStub(grpc.intercept_channel(channel, WithToken(caller)))

    def log(self) -> str:
        assert self.process.log_path is not None
        return self.process.log_path.read_text()


class Bookkeeper:
    """One epoch of a pool. Accepts leases and fences them; from `detach` on it is gone."""

    def __init__(
        self,
        cachemgr: LoneCachemgr,
        pool: str,
        *,
        epoch: int,
        adapters: Mapping[str, bytes] | None = None,
        **geometry: Any,
    ) -> None:
        self.pool, self.epoch = pool, epoch
        self.block_size = {**GEOMETRY, **geometry}["block_size_tokens"]
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._outbox: list[attach_pb2.AttachPoolRequest | None] = []
        self._num_reports = 0
        self._registration = attach_pb2.RegisterPool(
            pool=pool, epoch=epoch, geometry=attach_pb2.PoolGeometry(**GEOMETRY | geometry), worker_address="nowhere:1"
        )
        if adapters is not None:
            named = [attach_pb2.PoolAdapter(name=name, identity=identity) for name, identity in adapters.items()]
            self._registration.adapters.adapters.extend(named)
        self._is_attached = threading.Event()
        self._say(register_pool=self._registration)
        self._call = cachemgr.stub("wanda").AttachPool(self._said())
        self._thread = threading.Thread(target=self._obey, daemon=True)
        self._thread.start()
        assert self._is_attached.wait(DEADLINE_S)

    def report(self, plan: cache_service_pb2.PlanStepResponse, outcome: int = COMPUTED) -> None:
        """A planned step has ended. Every run that samples samples SAMPLED_TOKEN."""
        grant = unsigned(plan.grant)
        report = attach_pb2.StepReport(lease_id=grant.lease_id, step_number=grant.step_number, outcome=outcome)
        if outcome == COMPUTED:
            runs = zip(grant.run_sequence_ids, grant.run_starts, grant.run_token_counts, grant.run_samples, strict=True)
            for seq_id, start, count, samples in runs:
                report.sequence_ids.append(seq_id)
                report.computed_token_counts.append(start + count)
                if samples:
                    report.sampled_sequence_ids.append(seq_id)
                    report.sampled_token_ids.append(SAMPLED_TOKEN)
        with self._lock:
            self._num_reports += 1
            report.report_number = self._num_reports
            self._put(step_report=report)

    def detach(self) -> None:
        """Breaks the stream off."""
        with self._lock:
            self._outbox.append(None)
            self._ready.notify()
        self._call.cancel()
        self._thread.join(DEADLINE_S)

    def _say(self, **message: Any) -> None:
        with self._lock:
            self._put(**message)

    def _put(self, **message: Any) -> None:
        self._outbox.append(attach_pb2.AttachPoolRequest(**message))
        self._ready.notify()

    def _said(self) -> Any:
        while True:
            with self._lock:
                while not self._outbox:
                    self._ready.wait()
                message = self._outbox.pop(0)
            if message is None:
                return
            yield message

    def _obey(self) -> None:
        try:
            for order in self._call:
                kind = order.WhichOneof("message")
                if kind == "attached":
                    self._is_attached.set()
                elif kind == "open_lease":
                    self._say(lease_opened=attach_pb2.LeaseOpened(lease_id=order.open_lease.lease_id))
                elif kind == "fence_lease":
                    self._say(lease_fenced=attach_pb2.LeaseFenced(lease_id=order.fence_lease.lease_id))
        except grpc.RpcError:
            return  # detached, or cachemgr has ended


Serve = Callable[..., Bookkeeper]


@dataclass
class Tenant:
    """A lease of a caller on a bookkeeper's pool."""

    stub: Any
    worker: Bookkeeper
    lease_id: str
    epoch: int
    in_flight: list[cache_service_pb2.PlanStepResponse] = field(default_factory=list)

    @classmethod
    def begin(cls, cachemgr: LoneCachemgr, worker: Bookkeeper, caller: str, *, ttl_s: float = 60.0) -> Self:
        stub = cachemgr.stub(caller)
        request = cache_service_pb2.CreateLeaseRequest(pool=worker.pool, ttl=seconds(ttl_s))
        lease = stub.CreateLease(request, timeout=DEADLINE_S)
        return cls(stub, worker, lease.lease_id, lease.epoch)

    def plan(self, **fields: Any) -> cache_service_pb2.PlanStepResponse:
        """A step in flight."""
        request = cache_service_pb2.PlanStepRequest(lease_id=self.lease_id, epoch=self.epoch, **fields)
        plan = self.stub.PlanStep(request, timeout=DEADLINE_S)
        self.in_flight.append(plan)
        return plan

    def admit(self, seq_id: int, tokens: Sequence[int], *, salt: bytes = b"") -> cache_service_pb2.PlanStepResponse:
        """A step in flight that begins a sequence, which has to be accepted."""
        plan = self.plan(admissions=[{"sequence_id": seq_id, "token_ids": tokens, "salt": salt}])
        assert not plan.refusals
        return plan

    def settle(self, outcome: int = COMPUTED) -> None:
        """All steps in flight have ended; returns when cachemgr knows."""
        for plan in self.in_flight:
            self.worker.report(plan, outcome)
        self.in_flight.clear()
        await_that("all steps are reported", lambda: not self.lease().step_in_flight_count)

    def cache(self, seq_id: int, tokens: Sequence[int], *, salt: bytes = b"") -> None:
        """Computes tokens and lets go of them."""
        self.admit(seq_id, tokens, salt=salt)
        self.settle()
        self.release(seq_id)

    def release(self, *seq_ids: int) -> None:
        """Ends sequences without a step in flight."""
        self.plan(release_sequence_ids=seq_ids)
        self.settle()

    def lease(self) -> cache_service_pb2.Lease:
        listed = self.stub.ListLeases(
            cache_service_pb2.ListLeasesRequest(pool=self.worker.pool, page_size=1_000), timeout=DEADLINE_S
        )
        (lease,) = [each for each in listed.leases if self.lease_id.startswith(each.lease_id_prefix)]
        return lease

    def delete(self) -> None:
        """Ends the lease; returns when it is gone."""
        self.stub.DeleteLease(cache_service_pb2.DeleteLeaseRequest(lease_id=self.lease_id), timeout=DEADLINE_S)
        request = cache_service_pb2.ListLeasesRequest(pool=self.worker.pool, page_size=1_000)

        def is_gone() -> bool:
            leases = self.stub.ListLeases(request, timeout=DEADLINE_S).leases
            return not any(self.lease_id.startswith(lease.lease_id_prefix) for lease in leases)

        await_that("the lease is gone", is_gone)


Begin = Callable[..., Tenant]


# -- asking -------------------------------------------------------------------------------------------------------


def prompt(seed: int, num_blocks: int) -> list[int]:
    """Full blocks of tokens that no other seed's begin with."""
    return [seed, *([1] * (num_blocks * BLOCK_SIZE - 1))]


def call(cachemgr: LoneCachemgr, caller: str, method: str, **fields: Any) -> Any:
    """Raises RefusedError."""
    request = getattr(cache_service_pb2, f"{method}Request")(**fields)
    try:
        return getattr(cachemgr.stub(caller), method)(request, timeout=DEADLINE_S)
    except grpc.RpcError as error:
        raise RefusedError.of_call(error) from None


def refusals(plan: cache_service_pb2.PlanStepResponse) -> list[RefusedError]:
    return [RefusedError.of_message(refusal.error) for refusal in plan.refusals]


def reasons(plan: cache_service_pb2.PlanStepResponse) -> list[str]:
    return [refused.reason for refused in refusals(plan)]


def cached(cachemgr: LoneCachemgr, worker: Bookkeeper, tokens: list[int], caller: str = "alice") -> int:
    """Blocks of a prompt that are found."""
    (match,) = call(cachemgr, caller, "LookupPrefix", pool=worker.pool, token_ids=[*tokens, 1]).matches
    return match.cached_token_count // BLOCK_SIZE


def use(cachemgr: LoneCachemgr, worker: Bookkeeper, tenant: str) -> Any:
    (found,) = [each for each in call(cachemgr, "olga", "ListTenants", pool=worker.pool).tenants if each.name == tenant]
    return found
