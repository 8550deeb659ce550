"""The conversation with one worker: registration, its reports, orders to it. See attach.proto."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from quire.cache.v1 import attach_pb2
from quire.cachemgr._core import StepReport
from quire.cachemgr.bounds import MAX_ATTACHMENTS, Places
from quire.cachemgr.catalog import (
    MAX_TERM_STEP,
    SIGNING_KEY_BYTES,
    AttachedPool,
    BegunEmpty,
    CarriedOver,
    Catalog,
)
from quire.cachemgr.errors import CallRefused, Reason, invalid, refuse
from quire.cachemgr.service import messages
from quire.cachemgr.service.statuses import to_error_status
from quire.serving.errors import CallEnded

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

ACKNOWLEDGE_AFTER_S = 0.02
"""Reports that arrive within this time are acknowledged together."""

Request = attach_pb2.AttachPoolRequest | StepReport
Requests = AsyncIterator[Request]
Write = Callable[[attach_pb2.AttachPoolResponse], Awaitable[None]]
Orders = asyncio.Queue[attach_pb2.AttachPoolResponse | None]
"""Messages to write to a stream; None ends it."""


@dataclass(slots=True, eq=False)
class Stream:
    """A worker's stream. `task` reads it, and is cancelled when another stream takes its place."""

    task: asyncio.Task[None]
    orders: Orders = field(default_factory=asyncio.Queue)
    is_replaced: bool = False
    last_disk_order: int = 0
    """Orders about the disk up to this one were sent."""
    looks_at_disk: bool = False
    """The books have changed: there may be orders to send."""

    def replace(self) -> None:
        """Ends the stream: its worker has registered the same epoch on a newer stream."""
        self.is_replaced = True
        self.task.cancel()


class Attachments:
    """The open streams, one per attached pool, and the calls that wait for a worker's answer to an order."""

    def __init__(self, catalog: Catalog, clock: Callable[[], float] = time.monotonic) -> None:
        self._catalog = catalog
        self._clock = clock
        self._started_at = clock()
        self._streams: dict[str, Stream] = {}
        self._opening: dict[str, asyncio.Future[None]] = {}
        self._erasing: dict[str, asyncio.Future[None]] = {}
        """Done when nothing is to be erased from the disk of a pool any more."""
        self._places = Places(MAX_ATTACHMENTS, "attachments")

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Request, attach_pb2.AttachPoolResponse]]:
        """The handler of the method. The core decodes reports."""
        return {
            "AttachPool": grpc.stream_stream_rpc_method_handler(
                self.AttachPool,
                request_deserializer=messages.decode_from_worker,
                response_serializer=attach_pb2.AttachPoolResponse.SerializeToString,
            )
        }

    async def AttachPool(self, request_iterator: Requests, context: Context) -> None:  # noqa: N802
        try:
            with self._places.taken():
                await self.converse(request_iterator, context.write)
        except CallRefused as refused:
            # A value may be a token that was sampled.
            known = {name: value for name, value in refused.refusal.metadata.items() if name != "value"}
            details = ",".join(f"{name}:{value}" for name, value in known.items())
            log.warning("attachment refused reason=%s details=%s", refused.refusal.reason.value, details)
            raise CallEnded(to_error_status(refused.refusal)) from None

    async def open_lease(self, pool: AttachedPool, lease_id: str) -> None:
        """Tells the worker to accept the lease's steps and waits until it does. Cancel to give up."""
        opened = self._opening[lease_id] = asyncio.get_running_loop().create_future()
        try:
            self._order(pool, attach_pb2.AttachPoolResponse(open_lease=attach_pb2.OpenLease(lease_id=lease_id)))
            await opened
        finally:
            del self._opening[lease_id]

    def fence_lease(self, pool: AttachedPool, lease_id: str) -> None:
        """Tells the worker to refuse the lease's steps, now or when it is attached again."""
        self._order(pool, attach_pb2.AttachPoolResponse(fence_lease=attach_pb2.FenceLease(lease_id=lease_id)))

    async def erased(self, pool: AttachedPool) -> None:
        """Waits until the worker has carried out all orders to erase. Cancel to give up: they stay ordered.

        Raises CallRefused (POOL_DETACHED) if the worker goes before, or can't do it: some may be left on the disk.
        """
        if not pool.ledger.num_erasing:
            return
        if self._catalog.pool(pool.ledger.pool) is not pool or not pool.is_attached:
            raise not_erased(pool)
        name = pool.ledger.pool
        if name not in self._erasing:
            self._erasing[name] = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._erasing[name])

    async def converse(self, requests: Requests, write: Write) -> None:
        """Handles one worker's stream until it ends.

        Raises CallRefused if a message of the worker can't be accepted, or if another stream replaces this one.
        """
        task = asyncio.current_task()
        assert task is not None, "gRPC runs handlers in tasks"
        stream = Stream(task)
        writer = asyncio.create_task(write_all(stream.orders, write))
        pool = None

        def look_at_disk() -> None:
            """The books have changed. They can't be read now."""
            if pool is not None and not stream.looks_at_disk:
                stream.looks_at_disk = True
                asyncio.get_running_loop().call_soon(self._order_disk, pool, stream)

        try:
            pool = await self._register(requests, stream.orders)
            if pool is None:
                return
            self._take_over(pool, stream)
            if pool.ledger.geometry.num_disk_blocks:
                self._catalog.listeners(pool.ledger.pool)[look_at_disk] = None
                self._order_disk(pool, stream)
            async for request in requests:
                self._hear(pool, request)
                del request  # while the stream waits for the next one
        except asyncio.CancelledError:
            if pool is None or not stream.is_replaced:
                raise
            task.uncancel()
            raise pool_already_attached(pool) from None
        finally:
            if pool is not None:
                self._catalog.listeners(pool.ledger.pool).pop(look_at_disk, None)
            if pool is not None and self._streams.get(pool.ledger.pool) is stream:
                self._catalog.detach(pool)
                self._give_up_erasing(pool)
                del self._streams[pool.ledger.pool]
                log.info("worker detached pool=%s epoch=%d", pool.ledger.pool, pool.ledger.epoch)
            stream.orders.put_nowait(None)  # a write that is cancelled would keep gRPC from ending the stream
            await asyncio.gather(writer, return_exceptions=True)

    def _take_over(self, pool: AttachedPool, stream: Stream) -> None:
        """Makes it the pool's stream. An older one ends: its worker may not have noticed that the connection broke."""
        older = self._streams.get(pool.ledger.pool)
        self._streams[pool.ledger.pool] = stream
        self._attached(pool, stream.orders)
        if older is not None:
            older.replace()

    async def _register(self, requests: Requests, orders: Orders) -> AttachedPool | None:
        """The pool, once it is acceptable; None if the stream ends before."""
        async for request in requests:
            if isinstance(request, StepReport) or request.WhichOneof("message") != "register_pool":
                raise CallRefused(invalid("message", kind_of(request), "register_pool, the first on a stream"))
            registration = messages.decode_registration(request.register_pool)
            known = self._catalog.find(registration.pool, registration.epoch)
            if known is not None:
                messages.require_same_geometry(request.register_pool.geometry, known.ledger.geometry)
            registered = self._catalog.register(
                registration,
                signing_key=secrets.token_bytes(SIGNING_KEY_BYTES),
                uptime_s=self._clock() - self._started_at,
                term_step=1 + secrets.randbelow(MAX_TERM_STEP),
                now=self._clock(),
            )
            if isinstance(registered, AttachedPool):
                if known is None:
                    log_memory(registered)
                return registered
            told = (registration.pool, registration.epoch, registered.term)
            log.info("new epoch required pool=%s epoch=%d term=%d", *told)
            required = attach_pb2.NewEpochRequired(term=registered.term)
            orders.put_nowait(attach_pb2.AttachPoolResponse(new_epoch_required=required))
        return None

    def _attached(self, pool: AttachedPool, orders: Orders) -> None:
        ledger = pool.ledger
        leases = ledger.inspector.leases()
        attached = attach_pb2.Attached(
            term=pool.term,
            signing_key=pool.signing_key,
            open_lease_ids=[lease.lease_id for lease in leases if not lease.is_ending],
            acknowledged_report_number=pool.acknowledged_report,
        )
        orders.put_nowait(attach_pb2.AttachPoolResponse(attached=attached))
        for lease in leases:
            if lease.is_ending:
                self.fence_lease(pool, lease.lease_id)
            elif lease.lease_id in self._opening:
                order = attach_pb2.OpenLease(lease_id=lease.lease_id)
                orders.put_nowait(attach_pb2.AttachPoolResponse(open_lease=order))
        log.info("worker attached pool=%s epoch=%d blocks=%d", ledger.pool, ledger.epoch, ledger.geometry.num_blocks)

    def _hear(self, pool: AttachedPool, request: Request) -> None:
        if self._catalog.pool(pool.ledger.pool) is not pool:
            return  # a new epoch has begun, and its books may be those of the old one
        if isinstance(request, StepReport):
            self._settle(pool, request)
            return
        kind = request.WhichOneof("message")
        if kind == "lease_opened":
            opening = self._opening.get(request.lease_opened.lease_id)
            if opening is not None and not opening.done():
                opening.set_result(None)
        elif kind == "lease_fenced":
            self._catalog.lease_fenced(pool, request.lease_fenced.lease_id)
        elif kind == "disk_report":
            self._hear_of_disk(pool, request.disk_report)
        elif kind == "disk_content":
            pool.ledger.enter_disk_content(messages.disk_content(request.disk_content))
        elif kind == "adapters_changed":
            adapters = messages.decode_adapters("adapters_changed", request.adapters_changed)
            self._catalog.set_adapters(pool, adapters)
        else:
            limit = "step_report, lease_opened, lease_fenced, adapters_changed, disk_report or disk_content"
            raise CallRefused(invalid("message", kind_of(request), limit))

    # -- the disk -----------------------------------------------------------------------------------------------------

    def _order_disk(self, pool: AttachedPool, stream: Stream) -> None:
        """Sends the orders about the disk that the stream has not had. A new stream gets all that are not reported."""
        stream.looks_at_disk = False
        if self._catalog.pool(pool.ledger.pool) is not pool or self._streams.get(pool.ledger.pool) is not stream:
            return
        orders = pool.ledger.disk_orders(stream.last_disk_order)
        if orders is not None:
            stream.last_disk_order = pool.ledger.last_disk_order
            disk_orders = attach_pb2.DiskOrders.FromString(orders)
            stream.orders.put_nowait(attach_pb2.AttachPoolResponse(disk_orders=disk_orders))

    def _hear_of_disk(self, pool: AttachedPool, report: attach_pb2.DiskReport) -> None:
        num_erasing = pool.ledger.num_erasing
        pool.ledger.enter_disk_report(messages.disk_report(report))
        num_left = pool.ledger.num_erasing
        if num_left < num_erasing and report.failed_order_numbers:
            self._give_up_erasing(pool)
        elif not num_left and (erased := self._erasing.pop(pool.ledger.pool, None)) is not None:
            erased.set_result(None)

    def _give_up_erasing(self, pool: AttachedPool) -> None:
        """The worker has gone, or failed: nobody knows what is left on its disk."""
        erased = self._erasing.pop(pool.ledger.pool, None)
        if erased is not None:
            erased.set_exception(not_erased(pool))
            erased.exception()  # seen: its callers may have gone

    # -- reports ------------------------------------------------------------------------------------------------------

    def _settle(self, pool: AttachedPool, report: StepReport) -> None:
        if report.report_number <= pool.acknowledged_report:
            return
        pool.num_refused_reports += 1
        if report.report_number != pool.acknowledged_report + 1:
            raise CallRefused(invalid("step_report.report_number", report.report_number, "the next one"))
        pool.ledger.settle(report)
        pool.num_refused_reports = 0
        pool.acknowledged_report = report.report_number
        if not pool.is_acknowledging:
            pool.is_acknowledging = True
            asyncio.get_running_loop().call_later(ACKNOWLEDGE_AFTER_S, self._acknowledge, pool)

    def _acknowledge(self, pool: AttachedPool) -> None:
        """Acknowledges the worker's reports. Without a stream this is done at the next attachment."""
        pool.is_acknowledging = False
        if self._catalog.pool(pool.ledger.pool) is not pool:
            return  # a new epoch has begun, with its own numbers
        acknowledged = attach_pb2.ReportsAcknowledged(report_number=pool.acknowledged_report)
        self._order(pool, attach_pb2.AttachPoolResponse(reports_acknowledged=acknowledged))

    def _order(self, pool: AttachedPool, order: attach_pb2.AttachPoolResponse) -> None:
        stream = self._streams.get(pool.ledger.pool)
        if stream is not None:
            stream.orders.put_nowait(order)


def log_memory(pool: AttachedPool) -> None:
    """Write to the log what became of memory that outlived its worker."""
    told = (pool.ledger.pool, pool.ledger.epoch)
    match pool.memory:
        case CarriedOver(num_kept, num_dropped):
            log.info("memory kept pool=%s epoch=%d cached=%d dropped=%d", *told, num_kept, num_dropped)
        case BegunEmpty(reason):
            log.warning("memory not kept, the pool begins empty pool=%s epoch=%d reason=%s", *told, reason)


def kind_of(request: Request) -> str:
    """The name of the field that a worker's message has."""
    return "step_report" if isinstance(request, StepReport) else request.WhichOneof("message") or "empty"


def pool_already_attached(pool: AttachedPool) -> CallRefused:
    """Another stream has the pool now."""
    name, epoch = pool.ledger.pool, pool.ledger.epoch
    message = f"a newer stream has registered epoch {epoch} of pool {name!r}"
    return CallRefused(refuse(Reason.POOL_ALREADY_ATTACHED, message, pool=name, epoch=epoch))


def not_erased(pool: AttachedPool) -> CallRefused:
    """Content that a reset was about may still be on the worker's disk; it is not found any more."""
    name = pool.ledger.pool
    message = f"the worker of pool {name!r} has not removed all from its disk; what is left is not found"
    return CallRefused(refuse(Reason.POOL_DETACHED, message, pool=name))


async def write_all(orders: Orders, write: Write) -> None:
    """Writes orders to the stream as they are queued, until the last."""
    while (order := await orders.get()) is not None:
        await write(order)


def pool_detached(pool: AttachedPool) -> CallRefused:
    """The pool's worker does not answer."""
    name = pool.ledger.pool
    return CallRefused(refuse(Reason.POOL_DETACHED, f"the worker of pool {name!r} is not attached", pool=name))
