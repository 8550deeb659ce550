"""The disk of a simulated worker: its file system, its threads, and what must not be read from it."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable

import pytest
from robustness.simulation.schedule import DiskFeatures
from robustness.simulation.threads import ThreadEnded, Threads
from robustness.simulation.worker_disk import CALL_S, Copies, ObservedStore, SimulatedFiles, WorkerDisks
from robustness.simulation.world import Process, World, WorldFailed

from quire.worker.disk.records import Record
from quire.worker.disk.store import Store

NAME, CONTENT_BYTES = "worker-0", 100
FEATURES = DiskFeatures(num_blocks=8, file_bytes=1_000, write_rate=1e9)
"""Three files, the last one of two blocks."""
NUM_TRIES = 40


class Bench:
    """A world with one worker's disk; what is done is done by the loop of a process."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.disks = WorkerDisks(self.world, seed, FEATURES)
        self.process = self.begin()

    @property
    def files(self) -> SimulatedFiles:
        return self.disks.files(NAME)

    @property
    def happened(self) -> Counter[str]:
        return self.disks.happened

    def begin(self) -> Process:
        """The worker's process starts; an earlier one has ended."""
        process = self.world.running = self.world.start(NAME)
        return process

    def open(self) -> ObservedStore:
        memory_bytes = FEATURES.num_blocks * (256 + CONTENT_BYTES)
        store = Store(
            self.disks.directory(self.process), content_bytes=CONTENT_BYTES, memory_bytes=memory_bytes, mark=bytes(32)
        )
        return ObservedStore(store, self.files, self.disks.copies(NAME))

    def restart(self, *, loses_power: bool) -> ObservedStore:
        self.process.end()
        if loses_power:
            self.files.lose_power()
        self.process = self.begin()
        return self.open()


Check = Callable[[Bench], None]


def of_each_seed(check: Check) -> Callable[[], None]:
    """A test that does the same on many disks: what each of them loses is drawn."""

    def test() -> None:
        for bench in map(Bench, range(NUM_TRIES)):
            with bench.disks.present():
                check(bench)
            assert bench.world.failure is None

    test.__doc__ = check.__doc__
    return test


def content(number: int) -> bytes:
    return random.Random(number).randbytes(CONTENT_BYTES)


def write(store: ObservedStore, block: int, number: int, tenant: str) -> None:
    store.write(block, content(number), prefix_hash=bytes([number]) * 32, group=number % 2, tenant=tenant)


def read(store: ObservedStore, block: int, record: Record) -> bytes:
    return store.read(block, prefix_hash=record.prefix_hash, group=record.group)


def found(store: ObservedStore) -> dict[int, str]:
    return {block: record.tenant for block, record in sorted(store.records.items())}


@of_each_seed
def test_what_was_flushed_is_there_when_power_was_lost(bench: Bench) -> None:
    store = bench.open()
    for block in range(FEATURES.num_blocks):
        write(store, block, block, "alice")
    store.erase("nobody")
    store = bench.restart(loses_power=True)
    assert found(store) == dict.fromkeys(range(FEATURES.num_blocks), "alice")
    for block in range(FEATURES.num_blocks):
        assert store.read(block, prefix_hash=bytes([block]) * 32, group=block % 2) == content(block)


def read_all_that_is_left(bench: Bench) -> None:
    store = bench.open()
    for number in range(20):
        write(store, number % FEATURES.num_blocks, number, "alice")
    store = bench.restart(loses_power=True)
    for block, record in list(store.records.items()):
        try:
            assert read(store, block, record) == content(record.prefix_hash[0])
        except OSError:
            bench.happened["refused"] += 1


@of_each_seed
def test_no_copy_that_was_overwritten_is_there_when_its_tenant_was_reset_and_power_was_lost(bench: Bench) -> None:
    """Between the reset and the loss the tenant has no copies in any of the files."""
    store = bench.open()
    for block in range(FEATURES.num_blocks):
        write(store, block, block, "alice")
    store.erase("nobody")  # those are on the disk for certain
    for block in range(FEATURES.num_blocks):
        write(store, block, 100 + block, "bob")
    store.erase("alice")
    store = bench.restart(loses_power=True)
    assert found(store) == dict.fromkeys(range(FEATURES.num_blocks), "bob")


@of_each_seed
def test_nothing_is_there_when_all_was_erased_and_power_was_lost(bench: Bench) -> None:
    store = bench.open()
    for block in range(FEATURES.num_blocks):
        write(store, block, block, "alice")
    store.erase("nobody")
    store.erase(None)
    assert found(bench.restart(loses_power=True)) == {}


@of_each_seed
def test_a_kill_in_any_call_leaves_copies_that_are_whole(bench: Bench) -> None:
    store = bench.open()
    write(store, 0, 1, "alice")
    bench.files.num_calls_left = bench.world.random.randint(0, 25)
    bench.files.on_last_call = bench.process.end
    with contextlib.suppress(ThreadEnded):
        for number in range(2, 20):
            write(store, number % 3, number, "alice")
    assert not bench.process.is_alive
    store = bench.restart(loses_power=False)
    for block, record in list(store.records.items()):
        assert read(store, block, record) == content(record.prefix_hash[0])


def test_no_wrong_content_is_read_when_power_was_lost() -> None:
    happened: Counter[str] = Counter()
    for bench in map(Bench, range(NUM_TRIES)):
        with bench.disks.present():
            read_all_that_is_left(bench)
        assert bench.world.failure is None
        happened += bench.happened
    assert happened.keys() >= {"writes lost with the power", "writes torn by a loss of power", "refused"}


RECORD = Record(bytes(32), 0, "alice", 1, 0)
WRONG: dict[str, Callable[[Copies], object]] = {
    "disk block 3 is found again after a reset": lambda copies: (
        copies.found({}),
        copies.erase("alice"),
        copies.found({3: RECORD}),
    ),
    "disk block 3 is read with other content than was written": lambda copies: copies.read(3, RECORD, b"other"),
    "disk block 4 is found, and nobody has written it": lambda copies: copies.found({4: RECORD}),
    "disk blocks [3] are there after a reset": lambda copies: (copies.found({3: RECORD}), copies.erase(None, 1)),
}


@pytest.mark.parametrize("what", WRONG)
def test_copies_that_must_not_be_there_are_found(what: str) -> None:
    world = World(0)
    copies = Copies(world, NAME, Counter())
    copies.write(3, RECORD, b"content")
    copies.found({3: RECORD})
    copies.erase("bob")
    copies.erase("alice", before=0)
    copies.read(3, RECORD, b"content")
    assert world.failure is None
    WRONG[what](copies)
    assert str(world.failure) == f"{NAME}: {what}"


# -- threads ---------------------------------------------------------------------------------------------------------


def run_threads(seed: int, work: Callable[[Threads, Callable[[str], None]], None]) -> list[tuple[float, str]]:
    """Run what `work` starts in a process; return what it said, and when."""
    world, said = World(seed), []
    threads = Threads(world, random.Random(seed))
    process = world.start("process")
    process.loop.call_soon(work, threads, lambda text: said.append((world.now, text)))
    world.run_until(lambda: False, limit_s=10.0)
    process.end()
    return said


def two_that_take_turns(threads: Threads, say: Callable[[str], None]) -> None:
    queue, event, lock = threads.SimpleQueue(), threads.Event(), threads.Lock()

    def give() -> None:
        for number in range(5):
            threads.sleep(CALL_S)
            queue.put(number)
        event.set()

    def take() -> None:
        for _ in range(5):
            number = queue.get()
            with lock:
                say(f"took {number}")
        say(f"the event is set: {event.wait(1.0)}")
        say(f"another one is: {threads.Event().wait(2.0)}")

    for work in (give, take):
        threads.Thread(target=work).start()


def test_threads_are_the_same_run_for_a_seed_and_let_time_pass() -> None:
    said = run_threads(1, two_that_take_turns)
    assert [text for _, text in said[:-2]] == [f"took {number}" for number in range(5)]
    assert [text for _, text in said[-2:]] == ["the event is set: True", "another one is: False"]
    assert said[-1][0] - said[-2][0] == pytest.approx(2.0, abs=0.1)
    assert run_threads(1, two_that_take_turns) == said
    assert run_threads(2, two_that_take_turns) != said


def test_an_event_loop_that_waits_for_a_thread_is_found() -> None:
    def wait(threads: Threads, _: Callable[[str], None]) -> None:
        threads.Event().wait()

    with pytest.raises(WorldFailed, match="the event loop waits for a thread: an event"):
        run_threads(1, wait)


def test_an_error_that_ends_a_thread_is_found() -> None:
    def fail(threads: Threads, _: Callable[[str], None]) -> None:
        threads.Thread(target=int, args=("none",)).start()

    with pytest.raises(WorldFailed, match="a thread ends by ValueError"):
        run_threads(1, fail)
