"""Carries out cachemgr's orders about the disk, beside the steps.

One thread writes and erases, in the order of the orders; another one reads, so that a prompt that waits does not wait
for writes. Neither touches the device. A host block is touched for the time of a copy in memory, and only in the epoch
of the order: a disk that hangs holds up nothing but its own orders.

A disk that fails loses copies and nothing else. While it fails the mode of the part `disk` is degraded, and after a
failed write, writes fail at once for a while.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from quire.cache.v1 import attach_pb2
from quire.worker.disk.store import Store
from quire.worker.model.modes import Modes, Part

log = logging.getLogger(__name__)

PAUSE_S = 10.0
"""Without writes, after one that failed."""
CONTENT_COPIES = 8_192
"""Of a message about the disk's content."""

Report = Callable[[int, bool], None]


class HostBlocks(Protocol):
    """The host blocks' contents; with QUIRE_VERIFY=1, with what is known of them."""

    def read_host_block(self, block_id: int) -> bytes: ...
    def write_host_block(self, block_id: int, content: bytes) -> None: ...


@dataclass(slots=True)
class DiskCounters:
    """Since the process started: copies and bytes written and read, orders that failed, and the time of each kind."""

    written: int = 0
    read: int = 0
    erased: int = 0
    failed_writes: int = 0
    failed_reads: int = 0
    write_s: float = 0.0
    read_s: float = 0.0


class DiskTier:
    """The orders of one epoch at a time. Methods are for the event loop; `report` is called on it, too."""

    def __init__(
        self,
        store: Store,
        host: HostBlocks,
        modes: Modes,
        *,
        call_soon: Callable[..., object],
        write_rate: float,
    ) -> None:
        """`write_rate` is the limit of written bytes per second. `call_soon` is that of the event loop, for threads."""
        self._store = store
        self._host = host
        self._modes = modes
        self._call_soon = call_soon
        self._write_rate = write_rate
        self._lock = threading.Lock()
        """Held while a host block is touched, and while an epoch begins."""
        self._epoch = 0
        self._begun = threading.Event()
        """The epoch's: see begin_epoch."""
        self._begun.set()
        self._ended: dict[int, bool] = {}
        """Orders that have ended, and may be repeated: whether each is done."""
        self.last_order = 0
        self.counters = DiskCounters()
        self._told = (0, 0.0)
        """The copies that were read, and the time of it, at the last `take_reads`."""
        self.report: Report = lambda number, is_done: None
        self._paused_until = 0.0
        self._rest_s = 0.0
        """Before the next write, for the limit of bytes per second."""
        self._stopped = threading.Event()
        self._writes: SimpleQueue[tuple[int, attach_pb2.DiskOrder] | None] = SimpleQueue()
        self._reads: SimpleQueue[tuple[int, attach_pb2.DiskOrder] | None] = SimpleQueue()
        modes.note(Part.DISK, "written behind")
        self._threads = [
            threading.Thread(target=self._work, args=(orders,), name=name, daemon=True)
            for name, orders in (("disk writer", self._writes), ("disk reader", self._reads))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_blocks(self) -> int:
        return self._store.num_blocks

    def obey(self, orders: attach_pb2.DiskOrders) -> None:
        """Queue orders. One that has ended is reported again, one that is queued is left."""
        self._ended = {n: is_done for n, is_done in self._ended.items() if n >= orders.first_open_order_number}
        for order in orders.orders:
            number = order.order_number
            if number in self._ended:
                self.report(number, self._ended[number])
            elif number > self.last_order:
                self.last_order = number
                queue = self._reads if order.WhichOneof("order") == "read" else self._writes
                queue.put((self._epoch, order))

    def begin_epoch(self, begun: threading.Event) -> None:
        """Forget all orders but those to erase. From here on none of them touches a host block.

        `begun` is set when no step of the epochs before runs any more: such a step may still copy to any host block.
        Until then no order of the new epoch writes one.
        """
        with self._lock:
            self._epoch += 1
            self._begun = begun
        self._ended, self.last_order = {}, 0

    def content(self) -> Iterator[attach_pb2.DiskContent]:
        """Return the copies on the disk for cachemgr, in parts."""
        records = list(self._store.records.items())
        for start in range(0, len(records), CONTENT_COPIES):
            part = records[start : start + CONTENT_COPIES]
            indexes: dict[str, int] = {}
            tenant_indexes = [indexes.setdefault(record.tenant, len(indexes)) for _, record in part]
            yield attach_pb2.DiskContent(
                disk_block_ids=[block for block, _ in part],
                prefix_hashes=b"".join(record.prefix_hash for _, record in part),
                tenants=list(indexes),
                tenant_indexes=tenant_indexes,
                layer_groups=[record.group for _, record in part],
            )

    def take_reads(self) -> tuple[int, float]:
        """Return the copies that were read since the last call, and the time of these reads."""
        before, self._told = self._told, (self.counters.read, self.counters.read_s)
        return self._told[0] - before[0], self._told[1] - before[1]

    def close(self) -> None:
        """Let the threads end; one that hangs in the disk is left."""
        self._stopped.set()
        self._begun.set()
        for queue in (self._writes, self._reads):
            queue.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0)
        self._store.close()

    # -- in the threads

    def _work(self, orders: SimpleQueue[tuple[int, attach_pb2.DiskOrder] | None]) -> None:
        while (queued := orders.get()) is not None and not self._stopped.is_set():
            epoch, order = queued
            is_done = self._carry_out(epoch, order)
            self._call_soon(self._end, epoch, order.order_number, is_done)
            if orders is self._writes:
                self._stopped.wait(self._rest_s)

    def _end(self, epoch: int, number: int, is_done: bool) -> None:
        """On the event loop: an order of an epoch that is over is not reported."""
        if epoch == self._epoch:
            self._ended[number] = is_done
            self.report(number, is_done)

    def _carry_out(self, epoch: int, order: attach_pb2.DiskOrder) -> bool:
        kind = order.WhichOneof("order")
        try:
            if kind == "write":
                return self._write(epoch, order.write)
            if kind == "read":
                return self._read(epoch, order.read)
            tenant = order.erase.tenant if order.erase.HasField("tenant") else None
            self.counters.erased += self._store.erase(tenant)
            return True
        except OSError as error:
            self._failed(kind or "", error)
            return False

    def _write(self, epoch: int, order: attach_pb2.DiskWrite) -> bool:
        self._rest_s = 0.0
        if time.monotonic() < self._paused_until:
            self.counters.failed_writes += 1
            return False
        with self._lock:
            if epoch != self._epoch:
                return False
            content = self._host.read_host_block(order.host_block_id)
        started = time.monotonic()
        self._store.write(
            order.disk_block_id,
            content,
            prefix_hash=order.prefix_hash,
            group=order.layer_group,
            tenant=order.tenant,
        )
        took = time.monotonic() - started
        self.counters.written += 1
        self.counters.write_s += took
        if self._paused_until:
            self._paused_until = 0.0
            self._modes.note(Part.DISK, "written behind")
            log.info("the disk is written again directory=%s", self._store.directory)
        self._rest_s = max(0.0, len(content) / self._write_rate - took)
        return True

    def _read(self, epoch: int, order: attach_pb2.DiskRead) -> bool:
        started = time.monotonic()
        content = self._store.read(order.disk_block_id, prefix_hash=order.prefix_hash, group=order.layer_group)
        took = time.monotonic() - started
        self._begun.wait()
        with self._lock:
            if epoch != self._epoch:
                return False
            self._host.write_host_block(order.host_block_id, content)
        self.counters.read += 1
        self.counters.read_s += took
        return True

    def _failed(self, kind: str, error: OSError) -> None:
        why = os.strerror(error.errno) if error.errno else str(error)
        if kind == "read":
            self.counters.failed_reads += 1
            log.error("a copy on the disk is lost directory=%s error=%s", self._store.directory, error)
            return
        self.counters.failed_writes += kind == "write"
        if not self._paused_until or kind != "write":
            log.error("the disk fails directory=%s call=%s error=%s", self._store.directory, kind, error)
        self._paused_until = time.monotonic() + PAUSE_S
        self._modes.note(Part.DISK, "not written", degraded=f"{kind} failed: {why}")
