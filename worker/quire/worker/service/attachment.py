"""The worker's side of the attachment: connects to cachemgr, registers the pool, executes orders, sends reports;
reconnects after every break."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping

import grpc

from quire.cache.v1 import attach_pb2, cache_service_pb2_grpc
from quire.serving.dialing import Dialer
from quire.serving.server import SERVER_OPTIONS
from quire.worker.disk.disk_tier import DiskTier
from quire.worker.memory.kept_pool import KeptContent, KeptPool
from quire.worker.service.steps import Steps

log = logging.getLogger(__name__)

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.05, 2.0
CHANNEL_OPTIONS = (
    *((name, value) for name, value in SERVER_OPTIONS if name != "grpc.so_reuseport"),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)

Outbox = asyncio.Queue[attach_pb2.AttachPoolRequest]
AttachCall = grpc.aio.StreamStreamCall[attach_pb2.AttachPoolRequest, attach_pb2.AttachPoolResponse]


class Attachment:
    """Keeps the pool attached as long as `run` runs."""

    def __init__(
        self,
        dialer: Dialer,
        steps: Steps,
        *,
        geometry: attach_pb2.PoolGeometry,
        worker_address: Callable[[], str],
        kept: KeptPool | None = None,
        content: KeptContent | None = None,
        disk: DiskTier | None = None,
    ) -> None:
        """`kept` is the pool's memory, if a holder keeps it; `content` is what was found in it."""
        self._dialer = dialer
        self._address = str(dialer.address)
        self._steps = steps
        self._geometry = geometry
        self._worker_address = worker_address
        self._kept = kept
        self._content = content
        self._disk = disk
        self._is_attached = False
        self._first_attached = asyncio.Event()
        self._attached_at = 0.0
        self._highest_term, self._highest_term_since = 0, 0.0
        self._call: AttachCall | None = None
        self._registered: Mapping[str, bytes] = {}
        """The adapters that the cachemgr of this stream knows."""
        self._tell_adapters: Callable[[], None] = lambda: None
        steps.on_damage = self._break
        steps.adapters.on_change = lambda: self._tell_adapters()

    @property
    def is_attached(self) -> bool:
        return self._is_attached

    async def attached_once(self) -> None:
        """Returns when the pool has been attached for the first time."""
        await self._first_attached.wait()

    async def run(self) -> None:
        """Attaches, and attaches again after each break, until cancelled."""
        backoff_s, known_reason = FIRST_BACKOFF_S, ""
        while True:
            reason = await self._attach_once()
            if self._is_attached:
                self._is_attached = False
                # One that broke at once does not count: two workers with one epoch would end each other's streams.
                if time.monotonic() - self._attached_at >= LONGEST_BACKOFF_S:
                    backoff_s = FIRST_BACKOFF_S
            if reason != known_reason:
                log.info("not attached address=%s reason=%s", self._address, reason)
                known_reason = reason
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)

    async def _attach_once(self) -> str:
        """Serve one stream from its registration to its end. Returns the reason of the end."""
        outbox: Outbox = asyncio.Queue()
        try:
            async with self._dialer.open(CHANNEL_OPTIONS) as channel:
                stub = cache_service_pb2_grpc.CacheServiceStub(channel)
                self._call = stub.AttachPool(metadata=self._dialer.metadata())
                self._register(outbox)
                async with writing(outbox, self._call):
                    async for response in self._call:
                        self._obey(response, outbox)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                return "INVALID_ARGUMENT"  # its message may quote a token of a report
            if self._is_attached or error.code() is not grpc.StatusCode.UNAVAILABLE:
                return f"{error.code().name}: {error.details()}"
            return f"no answer ({error.details()})" if self._dialer.uses_tls else "no answer"
        except ValueError as error:  # FileError among them
            return str(error)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            return "the pool begins a new epoch"
        finally:
            self._steps.reports.send = lambda report: None
            self._tell_adapters = lambda: None
            if self._disk is not None:
                self._disk.report = lambda number, is_done: None
            self._call = None
        return "cachemgr ended the stream"

    def _break(self) -> None:
        """Ends the stream, if there is one, to register anew."""
        if self._call is not None:
            self._call.cancel()

    def _register(self, outbox: Outbox) -> None:
        gate = self._steps.gate
        registration = attach_pb2.RegisterPool(
            pool=gate.pool,
            epoch=gate.epoch,
            highest_term=gate.highest_term,
            attached_term=gate.attached_term,
            geometry=self._geometry,
            worker_address=self._worker_address(),
            open_leases=[
                attach_pb2.LeaseProgress(lease_id=lease_id, next_step_number=next_step)
                for lease_id, next_step in gate.next_steps.items()
            ],
            acknowledged_report_number=self._steps.reports.acknowledged,
            adapters=pool_adapters(self._steps.adapters.names),
        )
        self._registered = dict(self._steps.adapters.names)
        if self._disk is not None:
            registration.last_disk_order_number = self._disk.last_order
        if self._kept is not None:
            registration.memory_id = self._kept.memory_id
        if self._content is not None:
            registration.kept_memory.CopyFrom(kept_memory(self._content))
        registration.highest_term_age.FromNanoseconds(int((time.monotonic() - self._highest_term_since) * 1e9))
        outbox.put_nowait(attach_pb2.AttachPoolRequest(register_pool=registration))

    def _obey(self, response: attach_pb2.AttachPoolResponse, outbox: Outbox) -> None:
        """Raises ValueError if the cachemgr must not be obeyed."""
        kind = response.WhichOneof("message")
        if kind == "attached":
            self._attached(response.attached, outbox)
        elif kind == "new_epoch_required":
            self._steps.gate.obey(response.new_epoch_required.term)
            self._note_term()
            self._steps.begin_epoch()
            self._content = None
            log.info("new epoch epoch=%d", self._steps.gate.epoch)
            self._register(outbox)
        elif kind == "open_lease":
            lease_id = response.open_lease.lease_id
            self._steps.gate.open_lease(lease_id)
            opened = attach_pb2.LeaseOpened(lease_id=lease_id)
            outbox.put_nowait(attach_pb2.AttachPoolRequest(lease_opened=opened))
        elif kind == "fence_lease":
            self._fence(response.fence_lease.lease_id, outbox)
        elif kind == "reports_acknowledged":
            self._steps.reports.acknowledge(response.reports_acknowledged.report_number)
        elif kind == "disk_orders" and self._disk is not None:
            self._disk.obey(response.disk_orders)

    def _attached(self, attached: attach_pb2.Attached, outbox: Outbox) -> None:
        gate, reports = self._steps.gate, self._steps.reports
        is_new = not gate.attached_term
        for lease_id in gate.attach(attached.term, attached.signing_key, attached.open_lease_ids):
            self._fence(lease_id, outbox)
        self._content = None
        if self._kept is not None:
            self._kept.attached(gate.epoch, attached.term)
        self._note_term()
        reports.acknowledge(attached.acknowledged_report_number)
        for report in reports.kept():
            outbox.put_nowait(attach_pb2.AttachPoolRequest(step_report=report))
        reports.send = lambda report: outbox.put_nowait(attach_pb2.AttachPoolRequest(step_report=report))
        if self._disk is not None:
            self._use_disk(self._disk, outbox, is_new=is_new)
        self._tell_adapters = lambda: self._send_adapters(outbox)
        if self._registered != self._steps.adapters.names:
            self._tell_adapters()
        self._is_attached, self._attached_at = True, time.monotonic()
        self._first_attached.set()
        log.info("attached address=%s term=%d epoch=%d", self._address, attached.term, gate.epoch)

    def _use_disk(self, disk: DiskTier, outbox: Outbox, *, is_new: bool) -> None:
        """Report orders about the disk from here on; say what is there when an epoch is attached for the first time."""

        def report(number: int, is_done: bool) -> None:
            ended = attach_pb2.DiskReport(**{("done" if is_done else "failed") + "_order_numbers": [number]})
            outbox.put_nowait(attach_pb2.AttachPoolRequest(disk_report=ended))

        for content in disk.content() if is_new else ():
            outbox.put_nowait(attach_pb2.AttachPoolRequest(disk_content=content))
        disk.report = report

    def _send_adapters(self, outbox: Outbox) -> None:
        self._registered = dict(self._steps.adapters.names)
        changed = pool_adapters(self._registered)
        outbox.put_nowait(attach_pb2.AttachPoolRequest(adapters_changed=changed))

    def _note_term(self) -> None:
        """Keeps when the highest term was obeyed first."""
        if self._steps.gate.highest_term != self._highest_term:
            self._highest_term, self._highest_term_since = self._steps.gate.highest_term, time.monotonic()

    def _fence(self, lease_id: str, outbox: Outbox) -> None:
        fenced = attach_pb2.AttachPoolRequest(lease_fenced=attach_pb2.LeaseFenced(lease_id=lease_id))
        self._steps.fence_lease(lease_id).add_done_callback(lambda _: outbox.put_nowait(fenced))


def pool_adapters(names: Mapping[str, bytes]) -> attach_pb2.PoolAdapters:
    """Return adapters, given the identity of each name, for cachemgr."""
    adapters = [attach_pb2.PoolAdapter(name=name, identity=identity) for name, identity in sorted(names.items())]
    return attach_pb2.PoolAdapters(adapters=adapters)


def kept_memory(content: KeptContent) -> attach_pb2.KeptMemory:
    """Return what a worker has found, for cachemgr."""
    return attach_pb2.KeptMemory(
        epoch=content.epoch,
        attached_term=content.attached_term,
        accepted_step_count=content.num_accepted_steps,
        whole_blocks=content.whole_blocks,
    )


@contextlib.asynccontextmanager
async def writing(outbox: Outbox, call: AttachCall) -> AsyncIterator[None]:
    """Send messages as they come, as long as the block runs.

    gRPC would do it, given an iterator, but goes on waiting for its next message when the call has ended.
    """

    async def write_all() -> None:
        while True:
            await call.write(await outbox.get())

    writer = asyncio.create_task(write_all())
    try:
        yield
    finally:
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
