"""The conversation with one worker: registration, its reports, orders to it. See attach.proto."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable

from quire.cache.v1 import attach_pb2
from quire.cachemgr import messages
from quire.cachemgr.catalog import AttachedPool, Catalog
from quire.cachemgr.errors import CallRefused, Reason, invalid, refuse
from quire.cachemgr.leases import LeaseState

log = logging.getLogger(__name__)

SIGNING_KEY_BYTES = 32
ACKNOWLEDGE_AFTER_S = 0.02
"""Reports that come within this time are acknowledged together."""

Requests = AsyncIterator[attach_pb2.AttachPoolRequest]
Write = Callable[[attach_pb2.AttachPoolResponse], Awaitable[None]]
Orders = asyncio.Queue[attach_pb2.AttachPoolResponse | None]
"""What to write to a stream; None ends it."""


class Attachments:
    """The open streams, one per attached pool, and who waits for an order to be obeyed."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._streams: dict[str, Orders] = {}
        self._opening: dict[str, asyncio.Future[None]] = {}

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

    async def converse(self, requests: Requests, write: Write) -> None:
        """Talks to one worker until its stream ends. Raises CallRefused if it says what can't be accepted."""
        orders: Orders = asyncio.Queue()
        writer = asyncio.create_task(write_all(orders, write))
        pool = None
        try:
            pool = await self._register(requests, orders)
            if pool is None:
                return
            self._streams[pool.ledger.pool] = orders
            self._attached(pool, orders)
            async for request in requests:
                self._hear(pool, request)
        finally:
            # The same worker may have come back on another stream before this one was found dead.
            if pool is not None and self._streams.get(pool.ledger.pool) is orders:
                pool.is_attached = False
                del self._streams[pool.ledger.pool]
                log.info("worker detached pool=%s epoch=%d", pool.ledger.pool, pool.ledger.epoch)
            orders.put_nowait(None)  # a write that is cancelled would keep gRPC from ending the stream
            await asyncio.gather(writer, return_exceptions=True)

    async def _register(self, requests: Requests, orders: Orders) -> AttachedPool | None:
        """The pool, once it is acceptable; None if the stream ends before."""
        async for request in requests:
            if request.WhichOneof("message") != "register_pool":
                kind = request.WhichOneof("message") or "empty"
                raise CallRefused(invalid("message", kind, "register_pool, the first on a stream"))
            registration = messages.decode_registration(request.register_pool)
            pool = self._catalog.register(registration, signing_key=secrets.token_bytes(SIGNING_KEY_BYTES))
            if pool is not None:
                return pool
            log.info("new epoch required pool=%s epoch=%d", registration.pool, registration.epoch)
            required = attach_pb2.NewEpochRequired(term=self._catalog.term)
            orders.put_nowait(attach_pb2.AttachPoolResponse(new_epoch_required=required))
        return None

    def _attached(self, pool: AttachedPool, orders: Orders) -> None:
        ledger = pool.ledger
        leases = ledger.leases()
        attached = attach_pb2.Attached(
            term=self._catalog.term,
            signing_key=pool.signing_key,
            open_lease_ids=[lease.lease_id for lease in leases if lease.state is LeaseState.OPEN],
            acknowledged_report_number=pool.acknowledged_report,
        )
        orders.put_nowait(attach_pb2.AttachPoolResponse(attached=attached))
        for lease in leases:
            if lease.state is LeaseState.FENCING:
                self.fence_lease(pool, lease.lease_id)
            elif lease.lease_id in self._opening:
                order = attach_pb2.OpenLease(lease_id=lease.lease_id)
                orders.put_nowait(attach_pb2.AttachPoolResponse(open_lease=order))
        log.info("worker attached pool=%s epoch=%d blocks=%d", ledger.pool, ledger.epoch, ledger.geometry.num_blocks)

    def _hear(self, pool: AttachedPool, request: attach_pb2.AttachPoolRequest) -> None:
        kind = request.WhichOneof("message")
        if kind == "step_report":
            self._settle(pool, request.step_report)
        elif kind == "lease_opened":
            opening = self._opening.get(request.lease_opened.lease_id)
            if opening is not None and not opening.done():
                opening.set_result(None)
        elif kind == "lease_fenced":
            self._catalog.lease_fenced(pool, request.lease_fenced.lease_id)
        else:
            raise CallRefused(invalid("message", kind or "empty", "step_report, lease_opened or lease_fenced"))

    def _settle(self, pool: AttachedPool, report: attach_pb2.StepReport) -> None:
        if report.report_number <= pool.acknowledged_report:
            return
        if report.report_number != pool.acknowledged_report + 1:
            raise CallRefused(invalid("step_report.report_number", report.report_number, "the next one"))
        pool.ledger.settle(
            report.lease_id,
            report.step_number,
            messages.decode_outcome(report, pool.ledger.geometry),
            seq_ids=report.sequence_ids,
            token_counts=report.computed_token_counts,
            sampled_ids=report.sampled_sequence_ids,
            sampled_tokens=report.sampled_token_ids,
            report_number=report.report_number,
        )
        pool.acknowledged_report = report.report_number
        if not pool.is_acknowledging:
            pool.is_acknowledging = True
            asyncio.get_running_loop().call_later(ACKNOWLEDGE_AFTER_S, self._acknowledge, pool)

    def _acknowledge(self, pool: AttachedPool) -> None:
        """Tells the worker which reports it need not keep; without a stream it is told when it is attached again."""
        pool.is_acknowledging = False
        if self._catalog.pool(pool.ledger.pool) is not pool:
            return  # a new epoch has begun, with numbers of its own
        acknowledged = attach_pb2.ReportsAcknowledged(report_number=pool.acknowledged_report)
        self._order(pool, attach_pb2.AttachPoolResponse(reports_acknowledged=acknowledged))

    def _order(self, pool: AttachedPool, order: attach_pb2.AttachPoolResponse) -> None:
        stream = self._streams.get(pool.ledger.pool)
        if stream is not None:
            stream.put_nowait(order)


async def write_all(orders: Orders, write: Write) -> None:
    """Writes orders to the stream as they come, until the last."""
    while (order := await orders.get()) is not None:
        await write(order)


def pool_detached(pool: AttachedPool) -> CallRefused:
    """The pool's worker does not answer."""
    name = pool.ledger.pool
    return CallRefused(refuse(Reason.POOL_DETACHED, f"the worker of pool {name!r} is not attached", pool=name))
