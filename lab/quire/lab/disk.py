"""The disk of a simulated worker: cachemgr's orders, carried out one after the other, reads beside writes.

A read takes the time of a block, and so does a write; both are reported when they end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from quire.cache.v1 import attach_pb2
from quire.cachemgr._core import Ledger
from quire.lab.step_times import StepTime


@dataclass(slots=True)
class _Line:
    """Orders of one kind, with the times at which they end."""

    block_s: float
    orders: deque[tuple[float, int]] = field(default_factory=deque)
    free_at_s: float = 0.0

    def take(self, number: int, now_s: float) -> None:
        self.free_at_s = max(self.free_at_s, now_s) + self.block_s
        self.orders.append((self.free_at_s, number))

    def ended(self, now_s: float) -> list[int]:
        """Take out the orders that have ended."""
        numbers = []
        while self.orders and self.orders[0][0] <= now_s:
            numbers.append(self.orders.popleft()[1])
        return numbers


class SimulatedDisk:
    """It takes the orders of one pool's books, and reports them."""

    def __init__(self, ledger: Ledger, times: StepTime) -> None:
        self._ledger = ledger
        self._reads, self._writes = _Line(times.read_s), _Line(times.write_s)
        self._last_order = 0
        self._num_told = 0

    def turn(self, now_s: float) -> None:
        """Report what has ended until now, and take new orders."""
        reads = self._reads.ended(now_s)
        self._num_told += len(reads)
        if ended := [*reads, *self._writes.ended(now_s)]:
            report = attach_pb2.DiskReport(done_order_numbers=ended)
            self._ledger.enter_disk_report(report.SerializeToString())
        if (body := self._ledger.disk_orders(self._last_order)) is not None:
            for order in attach_pb2.DiskOrders.FromString(body).orders:
                self._last_order = order.order_number
                line = self._reads if order.WhichOneof("order") == "read" else self._writes
                line.take(order.order_number, now_s)

    def take_reads(self) -> tuple[int, float]:
        """Return the reads that have ended since the last call, and their time, as a worker tells it with a step."""
        num_told, self._num_told = self._num_told, 0
        return num_told, num_told * self._reads.block_s
