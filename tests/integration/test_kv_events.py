"""`quire events`: consumers know what LookupPrefix finds, late ones too, and hear of every end."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import msgspec
import pages
import pytest
from deadlines import DEADLINE_S
from integration.kv_events import EventsProcess, Index, draw_prompt, replay
from integration.lone_cachemgr import (
    BLOCK_SIZE,
    ROOMY_POOL,
    SMALL_POOL,
    Bookkeeper,
    LoneCachemgr,
    Tenant,
    cached,
    call,
    prompt,
)
from integration.protocol_client import await_that
from samples import others_at_night

from quire.cache.v1 import attach_pb2, cache_service_pb2

TENANTS = ("alice", "bob")
SALTS = (b"", b"blue")
MAX_BLOCKS = 6
NUM_QUERIES = 100
LOCAL = ("--listen", "127.0.0.1:0", "--replay-listen", "127.0.0.1:0")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        yield Path(name)


@pytest.fixture
def cachemgr(folder: Path) -> Iterator[LoneCachemgr]:
    cachemgr = LoneCachemgr(folder).start()
    yield cachemgr
    cachemgr.close()


Publish = Callable[..., EventsProcess]
Subscribe = Callable[..., Index]


@pytest.fixture
def publish(cachemgr: LoneCachemgr, folder: Path) -> Iterator[Publish]:
    begun: list[EventsProcess] = []

    def publish(*arguments: str, caller: str = "oscar") -> EventsProcess:
        (folder / "token").write_text(caller)
        address = ("--cachemgr", cachemgr.process.address, "--cachemgr-token-file", str(folder / "token"))
        begun.append(EventsProcess(folder, *address, *LOCAL, *arguments))
        return begun[-1]

    yield publish
    for each in begun:
        each.kill()


@pytest.fixture
def subscribe() -> Iterator[Subscribe]:
    begun: list[Index] = []

    def subscribe(address: str, **options: bytes) -> Index:
        begun.append(Index(address, **options))
        return begun[-1]

    yield subscribe
    for each in begun:
        each.close()


def mismatches(cachemgr: LoneCachemgr, pool: str, index: Index, *, seed: int) -> list[str]:
    """Queries that the consumer answers otherwise than LookupPrefix, which leaves a token of the prompt to compute."""
    draw, found = random.Random(seed), []
    for _ in range(NUM_QUERIES):
        tenant, salt = draw.choice(TENANTS), draw.choice(SALTS)
        tokens = draw_prompt(draw, block_size=BLOCK_SIZE, max_blocks=MAX_BLOCKS)
        (match,) = call(cachemgr, tenant, "LookupPrefix", pool=pool, token_ids=[*tokens, 1], salt=salt).matches
        answered = index.match(tokens, namespace=f"{tenant}:{salt.decode()}", block_size=BLOCK_SIZE)
        if answered != match.cached_token_count:
            found.append(f"{tenant} {salt!r} {tokens}: {answered}, not {match.cached_token_count}")
    return found


def await_equal(cachemgr: LoneCachemgr, pool: str, *indexes: Index, seed: int) -> None:
    for index in indexes:
        try:
            await_that("equal", lambda index=index: not mismatches(cachemgr, pool, index, seed=seed), timeout_s=20)
        except AssertionError:
            raise AssertionError(mismatches(cachemgr, pool, index, seed=seed)) from None
        assert index.wrong == []


class Schedule:
    """Changes of one pool, drawn by seed: prompts of two tenants, held for a while; resets; new epochs."""

    def __init__(self, cachemgr: LoneCachemgr, *, seed: int) -> None:
        self.draw = random.Random(seed)
        self.cachemgr = cachemgr
        self.epoch = 0
        self.num_sequences = 0
        self.begin_epoch()

    def begin_epoch(self) -> None:
        if self.epoch:
            self.worker.detach()
            pool = self.worker.pool
            await_that("detached", lambda: not call(self.cachemgr, "olga", "GetPool", pool=pool).pool.attached)
        self.epoch += 1
        self.worker = Bookkeeper(self.cachemgr, "one", epoch=self.epoch, **SMALL_POOL)
        self.tenants = [Tenant.begin(self.cachemgr, self.worker, name) for name in TENANTS]
        self.held: dict[int, list[int]] = {number: [] for number in range(len(self.tenants))}

    def step(self) -> None:
        match self.draw.choices(["prompt", "release", "reset", "epoch"], [20, 12, 1, 1])[0]:
            case "prompt":
                self.prompt()
            case "release":
                self.release()
            case "reset":
                self.reset()
            case "epoch":
                self.begin_epoch()

    def prompt(self) -> None:
        number = self.draw.randrange(len(self.tenants))
        self.num_sequences += 1
        tokens = draw_prompt(self.draw, block_size=BLOCK_SIZE, max_blocks=MAX_BLOCKS)
        admission = {"sequence_id": self.num_sequences, "token_ids": tokens, "salt": self.draw.choice(SALTS)}
        plan = self.tenants[number].plan(admissions=[admission])
        self.tenants[number].settle()
        if not plan.refusals:
            self.held[number].append(self.num_sequences)

    def release(self) -> None:
        number = self.draw.randrange(len(self.tenants))
        if self.held[number]:
            self.tenants[number].release(self.held[number].pop(self.draw.randrange(len(self.held[number]))))

    def reset(self) -> None:
        tokens = draw_prompt(self.draw, block_size=BLOCK_SIZE, max_blocks=2)
        what = self.draw.choice([{}, {"tenant": "bob"}, {"tenant": "alice", "token_ids": [*tokens, *[1] * BLOCK_SIZE]}])
        call(self.cachemgr, "olga", "ResetPrefixCache", pool=self.worker.pool, **what)


@pytest.mark.parametrize("seed", others_at_night(range(1, 5), [1]))
def test_consumers_know_what_can_be_found(
    cachemgr: LoneCachemgr, publish: Publish, subscribe: Subscribe, seed: int
) -> None:
    schedule = Schedule(cachemgr, seed=seed)
    address, _ = publish().await_pool("one")
    indexes = [subscribe(address)]
    for number in range(4):
        for _ in range(15):
            schedule.step()
        await_equal(cachemgr, "one", *indexes, seed=number)
        indexes.append(subscribe(address))
    await_equal(cachemgr, "one", *indexes, seed=9)


CACHED = cache_service_pb2.BLOCK_STATE_CACHED
WINDOW = attach_pb2.LayerGroup(
    kind=attach_pb2.LAYER_GROUP_KIND_SLIDING, window_token_count=2 * BLOCK_SIZE, layer_count=1
)


def test_a_pool_whose_only_group_has_a_window(cachemgr: LoneCachemgr, publish: Publish, subscribe: Subscribe) -> None:
    """Evicted blocks behind the window hide nothing. A process that begins later says which blocks it leaves out."""
    worker = Bookkeeper(cachemgr, "one", epoch=1, **SMALL_POOL, layer_groups=[WINDOW])
    alice = Tenant.begin(cachemgr, worker, "alice")
    events = publish()
    index = subscribe(events.await_pool("one")[0])
    alice.admit(1, prompt(1, 6))
    alice.settle()
    alice.plan()  # the blocks behind the window are let go before the others, and are evicted before them
    alice.settle()
    alice.release(1)
    await_that("it is told", lambda: index.num_blocks == 6)
    alice.cache(2, prompt(2, 8))
    await_that("both are found", lambda: [matched(index, number) for number in (1, 2)] == [6, 8])
    assert [cached(cachemgr, worker, prompt(*each)) for each in ((1, 6), (2, 8))] == [6, 8]
    assert len(call(cachemgr, "olga", "ListBlocks", pool="one", state=CACHED).blocks) < 6 + 8, "some were evicted"
    assert "inside of a published prefix a prompt can find less pool=one" in events.log()
    assert "the tokens before them are not known" not in events.log()
    events.kill()
    late = publish()
    await_that("it says so", lambda: "the tokens before them are not known pool=one" in late.log())
    assert index.wrong == []


def matched(index: Index, number: int) -> int:
    return index.match(prompt(number, 9), namespace="alice:", block_size=BLOCK_SIZE) // BLOCK_SIZE


def test_missed_batches_are_replayed(cachemgr: LoneCachemgr, publish: Publish, subscribe: Subscribe) -> None:
    worker = Bookkeeper(cachemgr, "one", epoch=1, **SMALL_POOL)
    alice = Tenant.begin(cachemgr, worker, "alice")
    address, replay_address = publish("--topic", "kv").await_pool("one")
    index = subscribe(address, topic=b"kv")
    for number in range(3):
        alice.cache(number + 1, prompt(number, 2))
        await_that("it is told", lambda number=number: index.num_blocks == 2 * number + 2)
    assert index.topics == {b"kv"}
    last = index.sequences[-1]
    missed = replay(replay_address, last - 1)
    assert [sequence for sequence, _ in missed] == [last - 1, last]
    assert [msgspec.msgpack.decode(batch)[1] for _, batch in missed] == index.batches[-2:]
    everything = replay(replay_address, 0)
    assert msgspec.msgpack.decode(everything[0][1])[1][0] == ["AllBlocksCleared"]
    assert replay(replay_address, last + 1) == []


def test_what_ends_is_cleared(cachemgr: LoneCachemgr, publish: Publish, subscribe: Subscribe) -> None:
    """A worker that dies and one that comes, cachemgr's death and return, the end of the process."""
    worker = Bookkeeper(cachemgr, "one", epoch=1, **SMALL_POOL)
    Tenant.begin(cachemgr, worker, "alice").cache(1, prompt(1, 3))
    events = publish()
    index = subscribe(events.await_pool("one")[0])

    def await_blocks(number: int) -> None:
        await_that(f"{number} blocks are known", lambda: index.num_blocks == number)

    await_blocks(3)
    worker.detach()
    await_blocks(0)
    worker = Bookkeeper(cachemgr, "one", epoch=2, **SMALL_POOL)
    Tenant.begin(cachemgr, worker, "alice").cache(1, prompt(1, 2))
    await_blocks(2)
    cachemgr.process.kill()
    await_blocks(0)
    cachemgr.start()
    worker = Bookkeeper(cachemgr, "one", epoch=3, **SMALL_POOL)
    Tenant.begin(cachemgr, worker, "alice").cache(1, prompt(1, 4))
    await_blocks(4)
    assert events.stop() == 0
    await_blocks(0)
    assert index.wrong == []


def test_a_gap_in_the_watch_is_told(cachemgr: LoneCachemgr, publish: Publish, subscribe: Subscribe) -> None:
    """More changes than cachemgr keeps, while the process is stopped."""
    worker = Bookkeeper(cachemgr, "one", epoch=1, **ROOMY_POOL, block_count=16_001)
    alice = Tenant.begin(cachemgr, worker, "alice")
    events = publish()
    index = subscribe(events.await_pool("one")[0])
    alice.cache(1, prompt(1, 3))
    await_that("it is told", lambda: index.num_blocks == 3)
    events.process.send_signal(signal.SIGSTOP)
    for number in range(2, 12):
        alice.cache(number, prompt(number, 8_000))
    events.process.send_signal(signal.SIGCONT)
    await_that(
        "all is told", lambda: index.match(prompt(11, 8_000), namespace="alice:", block_size=BLOCK_SIZE) == 32_000
    )
    found = cached(cachemgr, worker, prompt(1, 3))
    assert index.match(prompt(1, 3), namespace="alice:", block_size=BLOCK_SIZE) == found * BLOCK_SIZE == 0
    assert "CURSOR_EXPIRED" in events.log()


def test_the_consumer_of_the_page(cachemgr: LoneCachemgr, publish: Publish, folder: Path) -> None:
    block = pages.block("docs/how-to/kv-events.md", test="tests/integration/test_kv_events.py")
    worker = Bookkeeper(cachemgr, "one", epoch=1, **SMALL_POOL)
    alice = Tenant.begin(cachemgr, worker, "alice")
    alice.cache(1, prompt(1, 2))
    address, replay_address = publish().await_pool("one")
    program = folder / "consumer.py"
    text = block.text.replace("tcp://127.0.0.1:5557", address).replace("tcp://127.0.0.1:6557", replay_address)
    program.write_text(text)
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as consumer:
        assert consumer.stdout is not None
        try:
            told = [consumer.stdout.readline().strip() for _ in range(2)]
            call(cachemgr, "olga", "ResetPrefixCache", pool="one")
            told.append(consumer.stdout.readline().strip())
        finally:
            consumer.kill()
    assert told[0] == "AllBlocksCleared"
    assert {"BlockStored"} <= set(told)


def test_numbers_rise_over_restarts(cachemgr: LoneCachemgr, publish: Publish, subscribe: Subscribe) -> None:
    """Consumers skip what has a lower number than the last batch."""
    Bookkeeper(cachemgr, "one", epoch=1, **SMALL_POOL)
    lasts = []
    for _ in range(2):
        events = publish()
        index = subscribe(events.await_pool("one")[0])
        await_that("it is told", lambda index=index: index.sequences)
        lasts.append((index.sequences[0], index.sequences[-1]))
        events.kill()
    assert lasts[0][1] < lasts[1][0]


def test_pools_that_come_later_are_published_and_counted(
    cachemgr: LoneCachemgr, publish: Publish, subscribe: Subscribe
) -> None:
    one = Bookkeeper(cachemgr, "one", epoch=1, **ROOMY_POOL, block_count=64)
    events = publish("--metrics-listen", "127.0.0.1:0")
    first = subscribe(events.await_pool("one")[0])
    two = Bookkeeper(cachemgr, "two", epoch=1, **SMALL_POOL)
    second = subscribe(events.await_pool("two")[0])
    Tenant.begin(cachemgr, one, "alice").cache(1, prompt(1, 5))
    Tenant.begin(cachemgr, two, "bob").cache(1, prompt(1, 2))
    await_that("both are told", lambda: (first.num_blocks, second.num_blocks) == (5, 2))
    (line,) = [line for line in events.log().splitlines() if "metrics address=" in line]
    with urllib.request.urlopen(f"http://{line.rpartition('=')[2]}/metrics", timeout=DEADLINE_S) as answer:
        page = answer.read().decode()
    assert 'quire_kv_events_blocks{pool="one",state="published"} 5.0' in page
    assert 'quire_kv_events_blocks{pool="two",state="published"} 2.0' in page


def test_a_caller_without_the_roles_is_told(cachemgr: LoneCachemgr, publish: Publish) -> None:
    Bookkeeper(cachemgr, "one", epoch=1, **SMALL_POOL)
    events = publish(caller="olga")
    assert events.process.wait(DEADLINE_S) == 1
    assert "ROLE_MISSING" in events.log()
    assert "Traceback" not in events.log()


def test_a_cachemgr_without_tokens_is_named(folder: Path) -> None:
    cachemgr = LoneCachemgr(folder, "--no-keep-tokens").start()
    (folder / "token").write_text("oscar")
    flags = ("--cachemgr", cachemgr.process.address, "--cachemgr-token-file", str(folder / "token"), *LOCAL)
    events = EventsProcess(folder, *flags)
    try:
        Bookkeeper(cachemgr, "one", epoch=1, **SMALL_POOL)
        assert events.process.wait(DEADLINE_S) == 1
        assert "--no-keep-tokens" in events.log()
    finally:
        events.kill()
        cachemgr.close()


def test_a_port_that_is_taken_is_named(cachemgr: LoneCachemgr, publish: Publish) -> None:
    address = publish("--pool", "one").await_pool("one")[0].removeprefix("tcp://")
    second = publish("--pool", "two", "--listen", address)
    assert second.process.wait(DEADLINE_S) == 1
    assert f"--listen {address}: Address already in use" in second.log()


def test_the_log_names_the_versions(cachemgr: LoneCachemgr, publish: Publish) -> None:
    """The consumers' own version is not known here: the log says which one was tested."""
    Bookkeeper(cachemgr, "one", epoch=1, **SMALL_POOL)
    events = publish()
    events.await_pool("one")
    installed = " ".join(f"{name}={metadata.version(name)}" for name in ("pyzmq", "msgspec"))
    assert f"events in vLLM's format, tested with ai-dynamo-runtime 1.6.1 {installed}" in events.log()


def test_a_missing_extra_is_named() -> None:
    program = (
        "import sys; sys.modules['zmq'] = None; sys.argv = ['quire', 'events']; from quire.cli import main; main()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 1
    assert "pip install 'quire-kv[events]'" in ended.stderr
