"""Orders about the disk: carried out once each, in threads, and only in their epoch."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deadlines import DEADLINE_S

from quire.cache.v1 import attach_pb2
from quire.worker.disk.disk_tier import CONTENT_COPIES, DiskTier
from quire.worker.disk.records import HEADER_BYTES
from quire.worker.disk.store import Store
from quire.worker.model.modes import Modes, Part

CONTENT_BYTES = 64


class Host:
    """Host blocks with a byte each; `gate` holds up reads of them."""

    def __init__(self) -> None:
        self.blocks = {number: bytes([number]) * CONTENT_BYTES for number in range(8)}
        self.gate = threading.Event()
        self.gate.set()

    def read_host_block(self, block_id: int) -> bytes:
        assert self.gate.wait(DEADLINE_S)
        return self.blocks[block_id]

    def write_host_block(self, block_id: int, content: bytes) -> None:
        self.blocks[block_id] = content


class Begun(threading.Event):
    """The event that steps of the epochs before have ended: they end when somebody waits for it."""

    def wait(self, timeout: float | None = None) -> bool:
        self.set()
        return super().wait(timeout)


class Disk:
    """A disk tier, and what it reports."""

    def __init__(self, directory: Path, *, write_rate: float = 1e12) -> None:
        self.host, self.modes = Host(), Modes()
        memory_bytes = 8 * (HEADER_BYTES + CONTENT_BYTES)
        self.store = Store(directory, content_bytes=CONTENT_BYTES, memory_bytes=memory_bytes, mark=bytes(32))
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.tier = DiskTier(
            self.store,
            self.host,
            self.modes,
            call_soon=lambda call, *values: self._calls.put(lambda: call(*values)),
            write_rate=write_rate,
        )
        self.reports: list[tuple[int, bool]] = []
        self.tier.report = lambda number, is_done: self.reports.append((number, is_done))

    def obey(self, *orders: attach_pb2.DiskOrder, first_open: int = 1) -> None:
        self.tier.obey(attach_pb2.DiskOrders(orders=orders, first_open_order_number=first_open))

    def run(self, count: int) -> list[tuple[int, bool]]:
        """Return the reports when so many orders have ended."""
        for _ in range(count):
            self._calls.get(timeout=DEADLINE_S)()
        told, self.reports = self.reports, []
        return sorted(told)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "disk")
    yield disk
    disk.host.gate.set()
    disk.tier.close()


def hash_of(number: int) -> bytes:
    return bytes([number]) * 32


def write(number: int, host: int, disk: int, tenant: str = "acme") -> attach_pb2.DiskOrder:
    order = attach_pb2.DiskWrite(
        host_block_id=host, disk_block_id=disk, prefix_hash=hash_of(host), layer_group=host, tenant=tenant
    )
    return attach_pb2.DiskOrder(order_number=number, write=order)


def read(number: int, disk: int, host: int, content: int) -> attach_pb2.DiskOrder:
    order = attach_pb2.DiskRead(
        host_block_id=host, disk_block_id=disk, prefix_hash=hash_of(content), layer_group=content
    )
    return attach_pb2.DiskOrder(order_number=number, read=order)


def erase(number: int, **tenant: str) -> attach_pb2.DiskOrder:
    return attach_pb2.DiskOrder(order_number=number, erase=attach_pb2.DiskErase(**tenant))


def test_what_was_written_is_read_to_another_host_block(disk: Disk) -> None:
    disk.obey(write(1, 3, 0), write(2, 4, 1))
    assert disk.run(2) == [(1, True), (2, True)]
    disk.obey(read(3, 0, 7, 3), read(4, 1, 6, 5))
    assert disk.run(2) == [(3, True), (4, False)], "the second has other content"
    assert (disk.host.blocks[7], disk.host.blocks[6]) == (disk.host.blocks[3], bytes([6]) * CONTENT_BYTES)
    assert (disk.tier.counters.written, disk.tier.counters.read, disk.tier.counters.failed_reads) == (2, 1, 1)
    assert disk.tier.take_reads() == (1, disk.tier.counters.read_s)
    assert disk.tier.take_reads() == (0, 0.0)


def test_a_repeated_order_is_reported_again_and_not_carried_out(disk: Disk) -> None:
    disk.obey(write(1, 3, 0))
    assert disk.run(1) == [(1, True)]
    disk.host.blocks[3] = bytes(CONTENT_BYTES)
    disk.obey(write(1, 3, 0), write(2, 4, 1))
    disk.obey(write(2, 4, 1))
    assert disk.run(1) == [(1, True), (2, True)]
    assert (disk.store.read(0, prefix_hash=hash_of(3), group=3), disk.tier.last_order) == (
        bytes([3]) * CONTENT_BYTES,
        2,
    )
    disk.obey(erase(3, tenant="nobody"))
    assert (disk.run(1), disk.tier.counters.written) == ([(3, True)], 2)
    disk.obey(write(1, 3, 0), first_open=2)
    assert disk.run(0) == [], "cachemgr has had its report"


def test_an_erasure_removes_what_was_ordered_to_be_written_before(disk: Disk) -> None:
    disk.host.gate.clear()
    disk.obey(write(1, 3, 0), write(2, 4, 1, tenant="other"), erase(3, tenant="acme"))
    disk.host.gate.set()
    assert disk.run(3) == [(1, True), (2, True), (3, True)]
    assert [record.tenant for record in disk.store.records.values()] == ["other"]
    disk.obey(erase(4))
    assert (disk.run(1), disk.store.records) == ([(4, True)], {})


def test_an_order_of_an_epoch_that_is_over_touches_no_host_block_and_is_not_reported(disk: Disk) -> None:
    disk.obey(write(1, 3, 0))
    disk.run(1)
    disk.obey(read(2, 0, 7, 3), write(3, 4, 1), erase(4, tenant="nobody"))
    disk.tier.begin_epoch(Begun())
    before = dict(disk.host.blocks)
    disk.run(3)
    disk.obey(write(1, 5, 2))
    assert disk.run(1) == [(1, True)]
    assert disk.tier.last_order == 1
    assert disk.host.blocks in (before, before | {7: before[3]}), "it was done before the epoch began, or not at all"


def test_a_read_waits_until_no_step_of_the_epoch_before_copies_to_host_blocks(disk: Disk) -> None:
    disk.obey(write(1, 3, 0))
    disk.run(1)
    begun = Begun()
    disk.tier.begin_epoch(begun)
    disk.obey(read(1, 0, 7, 3))
    assert disk.run(1) == [(1, True)]
    assert begun.is_set()


def test_a_read_of_an_epoch_that_ends_meanwhile_writes_no_host_block(disk: Disk) -> None:
    class Next(Begun):
        def wait(self, timeout: float | None = None) -> bool:
            disk.tier.begin_epoch(Begun())
            return super().wait(timeout)

    disk.obey(write(1, 3, 0))
    disk.run(1)
    disk.tier.begin_epoch(Next())
    disk.obey(read(1, 0, 7, 3), read(2, 0, 6, 3))
    before = dict(disk.host.blocks)
    assert (disk.run(2), disk.host.blocks) == ([], before)


def test_an_order_that_waits_for_its_turn_when_the_epoch_ends_is_not_written(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "disk", write_rate=5 * CONTENT_BYTES)
    disk.obey(write(1, 3, 0), write(2, 4, 1))
    disk.run(1)
    disk.tier.begin_epoch(Begun())  # while the second one waits for its rate
    disk.obey(erase(1, tenant="nobody"))
    assert disk.run(2) == [(1, True)]
    assert list(disk.store.records) == [0]
    disk.tier.close()


def test_a_read_does_not_wait_for_writes_that_wait_for_their_rate(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "disk", write_rate=1e-3)
    disk.obey(write(1, 3, 0))
    assert disk.run(1) == [(1, True)]
    disk.obey(write(2, 4, 1), read(3, 0, 7, 3))
    assert disk.run(1) == [(3, True)]
    disk.tier.close()


def test_writes_fail_at_once_for_a_while_after_one_that_failed(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    path = disk.store.directory / "blocks-000000.kv"
    path.mkdir()
    disk.obey(write(1, 3, 0))
    assert disk.run(1) == [(1, False)]
    (mode,) = disk.modes.degraded()
    assert (mode.part, mode.degraded) == (Part.DISK, "write failed: Is a directory")
    path.rmdir()
    disk.obey(write(2, 3, 0))
    assert disk.run(1) == [(2, False)]
    monkeypatch.setattr("quire.worker.disk.disk_tier.time.monotonic", lambda: 1e9)
    disk.obey(write(3, 3, 0))
    assert (disk.run(1), disk.modes.degraded()) == ([(3, True)], [])
    assert disk.tier.counters.failed_writes == 2


def test_the_content_is_told_in_parts_with_the_tenants_of_each(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.worker.disk.disk_tier.CONTENT_COPIES", 2)
    disk.obey(write(1, 3, 0), write(2, 4, 5, tenant=""), write(3, 5, 2))
    disk.run(3)
    parts = list(disk.tier.content())
    told = [
        (block, part.prefix_hashes[32 * index], part.layer_groups[index], part.tenants[part.tenant_indexes[index]])
        for part in parts
        for index, block in enumerate(part.disk_block_ids)
    ]
    assert (len(parts), told) == (2, [(0, 3, 3, "acme"), (5, 4, 4, ""), (2, 5, 5, "acme")])
    assert CONTENT_COPIES == 8_192
