"""WatchBlocks: a replayed copy is always equal to ListBlocks, and has no more than the caller may see."""

from __future__ import annotations

import itertools
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from integration.lone_cachemgr import BLOCK_SIZE, SAMPLED_TOKEN, SKIPPED, Bookkeeper, LoneCachemgr, Serve, Tenant
from integration.protocol_client import DEADLINE_S, RefusedError, ask, await_that, draw_tokens, seconds
from replica import BlockReplica

from quire.cache.v1 import cache_service_pb2

FREE = cache_service_pb2.BLOCK_STATE_FREE
CACHED = cache_service_pb2.BLOCK_STATE_CACHED
ACTIVE = cache_service_pb2.BLOCK_STATE_ACTIVE
RETIRED = cache_service_pb2.BLOCK_STATE_RETIRED
STORED = cache_service_pb2.BLOCK_EVENT_KIND_STORED
REMOVED = cache_service_pb2.BLOCK_EVENT_KIND_REMOVED
CHANGED = cache_service_pb2.BLOCK_EVENT_KIND_CHANGED
MAX_EVENTS = 4_096
KEPT_CHANGES = 65_536
NUM_LOAD_STEPS = 300


@pytest.fixture(scope="module")
def cachemgr() -> Iterator[LoneCachemgr]:
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        cachemgr = LoneCachemgr(Path(name)).start()
        yield cachemgr
        cachemgr.close()
        signs = ("handler failed", "Traceback", "never retrieved", "was destroyed")
        assert not [line for line in cachemgr.log().splitlines() if any(sign in line for sign in signs)]


class Replica:
    """A copy of a pool's blocks, kept up by a watch on a thread of its own, from `follow` to `stop`."""

    def __init__(self, stub: Any, pool: str, *, include_content: bool = False) -> None:
        self._stub, self._pool, self._include_content = stub, pool, include_content
        self._lock = threading.Lock()
        self.copy = BlockReplica()
        self.answers: list[cache_service_pb2.WatchBlocksResponse] = []
        self.refused: RefusedError | None = None

    @property
    def blocks(self) -> dict[int, cache_service_pb2.Block]:
        return self.copy.blocks

    @property
    def cursor(self) -> str:
        return self.copy.cursor

    @property
    def epoch(self) -> int | None:
        return self.copy.epoch

    def follow(self) -> Replica:
        request = cache_service_pb2.WatchBlocksRequest(
            pool=self._pool, cursor=self.copy.begin(), include_content=self._include_content
        )
        self._call = self._stub.WatchBlocks(request)  # until `stop`, however long a test takes
        self._thread = threading.Thread(target=self._apply_all, daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        self._call.cancel()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def _apply_all(self) -> None:
        try:
            for answer in self._call:
                with self._lock:
                    self._apply(answer)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                self.refused = RefusedError.of_call(error)

    def _apply(self, answer: cache_service_pb2.WatchBlocksResponse) -> None:
        self.answers.append(answer)
        assert len(answer.events) <= MAX_EVENTS
        self.copy.apply(answer)

    def listed(self) -> dict[int, cache_service_pb2.Block]:
        """ListBlocks for the same caller."""
        request = cache_service_pb2.ListBlocksRequest(pool=self._pool, page_size=10_000)
        blocks: dict[int, cache_service_pb2.Block] = {}
        while True:
            answer = ask(self._stub.ListBlocks, request)
            blocks |= {block.block_id: block for block in answer.blocks if block.state != FREE}
            if not answer.next_page_token:
                return blocks
            request.page_token = answer.next_page_token

    def await_equal(self) -> None:
        """Return when the copy is equal to the list, every field of every block.

        No client may plan meanwhile. Priorities can still expire, so that the blocks are listed again each time.
        """

        def is_equal() -> bool:
            listed = self.listed()
            with self._lock:
                return self.blocks == listed

        try:
            await_that("the copy is complete", is_equal)
        except AssertionError:
            listed = self.listed()
            with self._lock:
                assert self.blocks == listed
            raise

    def events(self) -> list[tuple[int, int, int]]:
        """Kind, block and state of each event so far."""
        with self._lock:
            events = itertools.chain.from_iterable(answer.events for answer in self.answers)
            return [(event.kind, event.block.block_id, event.block.state) for event in events]


@pytest.fixture
def watch(cachemgr: LoneCachemgr) -> Iterator[Callable[..., Replica]]:
    """Begins copies, which end with the test."""
    begun: list[Replica] = []

    def watch(caller: str, pool: str, **options: Any) -> Replica:
        begun.append(Replica(cachemgr.stub(caller), pool, **options).follow())
        return begun[-1]

    yield watch
    for replica in begun:
        replica.stop()


Watch = Callable[..., Replica]


def end_of_watch(stub: Any, **fields: Any) -> RefusedError:
    """Why a watch that sends nothing ends."""
    with pytest.raises(grpc.RpcError) as failed:
        next(stub.WatchBlocks(cache_service_pb2.WatchBlocksRequest(**fields), timeout=DEADLINE_S))
    return RefusedError.of_call(failed.value)


# -- what is sent -------------------------------------------------------------------------------------------------


def test_a_block_is_told_of_through_all_its_life(cachemgr: LoneCachemgr, serve: Serve, watch: Watch) -> None:
    worker = serve()
    replica = watch("olga", worker.pool)
    alice = Tenant.begin(cachemgr, worker, "alice")
    await_that("the snapshot has come", lambda: replica.cursor)
    (snapshot,) = replica.answers
    assert (snapshot.cleared, list(snapshot.events), snapshot.epoch) == (True, [], 1)

    def told(*expected: tuple[int, int, int]) -> None:
        num_before = len(told_before)
        await_that("it is told", lambda: set(expected) <= set(replica.events()[num_before:]))
        replica.await_equal()
        told_before[:] = replica.events()

    told_before: list[tuple[int, int, int]] = []
    alice.admit(1, [1, 2, 3, 4, 5])
    told((CHANGED, 1, ACTIVE), (CHANGED, 2, ACTIVE))
    alice.settle()
    told((STORED, 1, ACTIVE))
    alice.plan(extends={"sequence_ids": [1], "token_counts": [1]})
    alice.plan(release_sequence_ids=[1])
    told((CHANGED, 1, RETIRED), (CHANGED, 2, RETIRED))
    alice.settle()
    told((CHANGED, 1, CACHED), (CHANGED, 2, FREE))
    bob = Tenant.begin(cachemgr, worker, "bob")
    bob.admit(1, list(range(32)))
    told((REMOVED, 1, ACTIVE))
    assert replica.blocks[1].tenant == "bob"
    bob.settle()
    ask(cachemgr.stub("olga").ResetPrefixCache, cache_service_pb2.ResetPrefixCacheRequest(pool=worker.pool))
    told(*((REMOVED, block_id, ACTIVE) for block_id in range(1, 9)))
    bob.release(1)
    told(*((CHANGED, block_id, FREE) for block_id in range(1, 9)))


def test_a_snapshot_comes_in_parts_and_has_a_cursor_at_its_end(
    cachemgr: LoneCachemgr, serve: Serve, watch: Watch
) -> None:
    worker = serve(num_blocks=70_001)
    alice = Tenant.begin(cachemgr, worker, "alice")
    alice.admit(1, list(range(90)))
    alice.plan(admissions=[{"sequence_id": 2, "token_ids": [7] * 40_000}])
    alice.settle()
    replica = watch("olga", worker.pool)
    replica.await_equal()
    num_blocks = 10_000 + 23
    assert [len(answer.events) for answer in replica.answers] == [MAX_EVENTS, MAX_EVENTS, num_blocks - 2 * MAX_EVENTS]
    assert [answer.cleared for answer in replica.answers] == [True, False, False]
    assert [bool(answer.cursor) for answer in replica.answers] == [False, False, True]
    assert {kind for kind, _, _ in replica.events()} == {STORED, CHANGED}
    assert sum(kind == STORED for kind, _, _ in replica.events()) == 10_000 + 22


def test_several_changes_of_a_block_are_one_event(cachemgr: LoneCachemgr, serve: Serve) -> None:
    worker = serve(num_blocks=65)
    alice = Tenant.begin(cachemgr, worker, "alice")
    replica = Replica(cachemgr.stub("olga"), worker.pool).follow()
    await_that("the snapshot has come", lambda: replica.cursor)
    replica.stop()
    for seq_id in range(20):
        alice.cache(seq_id, list(range(5)))
    alice.cache(100, [99, 98, 97, 96])
    num_answers = len(replica.answers)
    replica.follow()
    replica.await_equal()
    replica.stop()
    (answer,) = replica.answers[num_answers:]
    events = [(event.kind, event.block.block_id, event.block.state) for event in answer.events]
    assert events == [(STORED, 1, CACHED), (STORED, 2, CACHED)]


# -- a replayed copy is equal to the list --------------------------------------------------------------------------


class Load:
    """A tenant that plans at random, with up to three steps in flight, some of which are skipped."""

    def __init__(self, tenant: Tenant, seed: int) -> None:
        self.tenant = tenant
        self.random = random.Random(seed)
        self.running: set[int] = set()
        self.next_id = 0
        self.prompts: list[dict[str, Any]] = []
        self.pins: list[str] = []

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()
        self.tenant.settle()

    def step(self) -> None:
        tenant, draw = self.tenant, self.random
        released = [seq_id for seq_id in sorted(self.running) if draw.random() < 0.15]
        self.running.difference_update(released)
        extended = [seq_id for seq_id in sorted(self.running) if draw.random() < 0.7]
        fields: dict[str, Any] = {
            "release_sequence_ids": released,
            "extends": {"sequence_ids": extended, "token_counts": [1] * len(extended)},
        }
        if draw.random() < 0.5:
            fields["admissions"] = [self.admission(), self.admission()]
        if self.running and draw.random() < 0.3:
            parent = draw.choice(sorted(self.running))
            self.next_id += 1
            fields["forks"] = [{"parent_sequence_id": parent, "child_sequence_ids": [self.next_id], "token_count": 3}]
        hints = [{"expected_in": seconds(draw.random())}, {"not_expected": True}]
        fields["return_hints"] = [{"sequence_id": seq_id} | draw.choice(hints) for seq_id in released[::2]]
        if self.prompts and draw.random() < 0.3:
            fields["expected_prompts"] = [draw.choice(self.prompts) | {"expected_in": seconds(draw.random())}]
        plan = tenant.plan(**fields)
        if draw.random() < 0.2:
            self.pin_or_unpin()
        refused = {
            refusal.sequence_id for refusal in plan.refusals if refusal.item != cache_service_pb2.PLAN_ITEM_EXTEND
        }
        begun = {each["sequence_id"] for each in fields.get("admissions", ())}
        begun |= {seq_id for fork in fields.get("forks", ()) for seq_id in fork["child_sequence_ids"]}
        self.running |= begun - refused
        if draw.random() < 0.1:
            tenant.settle(SKIPPED)
        while len(tenant.in_flight) > draw.randrange(4):
            tenant.worker.report(tenant.in_flight.pop(0))

    def admission(self) -> dict[str, Any]:
        self.next_id += 1
        tokens = [self.random.randrange(2) for _ in range(self.random.randrange(1, 60))]
        prompt = {"token_ids": tokens, "salt": self.random.choice([b"", b"s"])}
        self.prompts.append(prompt)
        ranges = [{"token_count": 16, "priority": 9, "ttl": seconds(0.5)}, {"priority": self.random.randrange(1, 10)}]
        retention = self.random.choice([[], ranges])
        reserved = self.random.choice([0, len(tokens) + 8])
        return {"sequence_id": self.next_id, "retention": retention, "reserved_token_count": reserved} | prompt

    def pin_or_unpin(self) -> None:
        """A prefix that is not cached or too large can't be pinned: that is fine here."""
        pool = {"pool": self.tenant.worker.pool}
        if self.pins and self.random.random() < 0.5:
            pin_id = self.pins.pop(self.random.randrange(len(self.pins)))
            ask(self.tenant.stub.UnpinPrefix, cache_service_pb2.UnpinPrefixRequest(pin_id=pin_id, **pool))
        elif self.prompts:
            request = cache_service_pb2.PinPrefixRequest(**pool | self.random.choice(self.prompts[-20:]))
            with suppress(RefusedError):
                self.pins.append(ask(self.tenant.stub.PinPrefix, request).pin_id)


def test_under_load_every_copy_becomes_what_is_listed(cachemgr: LoneCachemgr, serve: Serve, watch: Watch) -> None:
    """Copies of an operator and of two tenants, one of them resuming all the time, while three clients plan."""
    worker = serve(num_blocks=220)
    tenants = [Tenant.begin(cachemgr, worker, caller) for caller in ("alice", "alice", "bob")]
    replicas = [watch(caller, worker.pool) for caller in ("olga", "alice", "bob", "oscar")]
    resuming, olga = replicas[3], cachemgr.stub("olga")
    reset = cache_service_pb2.ResetPrefixCacheRequest(pool=worker.pool)
    with ThreadPoolExecutor(len(tenants)) as pool:
        runs = [pool.submit(Load(tenant, seed).run, NUM_LOAD_STEPS) for seed, tenant in enumerate(tenants)]
        num_resumed = 0
        while not all(run.done() for run in runs):
            resuming.stop()
            resuming.follow()
            num_resumed += 1
            if num_resumed % 10 == 0:
                ask(olga.ResetPrefixCache, reset)
            await_that("something happens", lambda: resuming.answers or all(run.done() for run in runs))
        for run in runs:
            run.result()
    for replica in replicas:
        replica.await_equal()
        assert replica.refused is None
    assert num_resumed > 20
    (counted,) = ask(olga.GetStatistics, cache_service_pb2.GetStatisticsRequest(pool=worker.pool)).pools
    assert min(counted.evicted_block_count, counted.copied_block_count, counted.skipped_step_count) > 0
    states = {state for _, _, state in replicas[0].events()}
    assert states == {FREE, CACHED, ACTIVE, RETIRED}
    told = [event.block for answer in replicas[0].answers for event in answer.events]
    assert {block.priority for block in told} == set(range(11))
    assert any(block.prefix_pin_count for block in told)
    whole, alice, bob = (set(replica.blocks) for replica in replicas[:3])
    assert alice | bob == whole
    assert alice
    assert bob
    assert not alice & bob
    assert [answer.cleared for answer in resuming.answers].count(True) == 1
    for tenant in tenants:
        tenant.delete()
    for replica in replicas:
        replica.await_equal()
    assert not [block for block in replicas[0].blocks.values() if block.state != CACHED]


def test_a_new_epoch_clears_the_copy_and_the_watch_goes_on(cachemgr: LoneCachemgr, serve: Serve, watch: Watch) -> None:
    worker = serve()
    alice = Tenant.begin(cachemgr, worker, "alice")
    alice.admit(1, [1, 2, 3, 4, 5])
    alice.settle()
    replicas = [watch(caller, worker.pool) for caller in ("olga", "alice", "oscar")]
    for replica in replicas:
        replica.await_equal()
    late = replicas[2]
    late.stop()
    worker = serve()
    await_that("they know", lambda: [replica.epoch for replica in replicas[:2]] == [2, 2])
    assert replicas[0].answers[-1].cleared
    alice.worker, alice.epoch = worker, worker.epoch
    alice.admit(1, [5, 4, 3, 2, 1])
    alice.settle()
    late.follow()
    for replica in replicas:
        replica.await_equal()
        assert (replica.epoch, set(replica.blocks)) == (2, {1, 2})
    assert [answer.cleared for answer in late.answers].count(True) == 2


# -- cursors ------------------------------------------------------------------------------------------------------


def churn(alice: Tenant, num_blocks: int, *, num_changes: int) -> None:
    """At least so many changes of blocks."""
    for seq_id in range(num_changes // (3 * num_blocks) + 1):
        alice.admit(seq_id, [9] * (num_blocks * BLOCK_SIZE))
        alice.plan(release_sequence_ids=[seq_id])
        alice.settle(SKIPPED)


def test_who_falls_behind_what_is_kept_has_to_begin_again(cachemgr: LoneCachemgr, serve: Serve, watch: Watch) -> None:
    worker = serve(num_blocks=2_001)
    alice = Tenant.begin(cachemgr, worker, "alice")
    replica = watch("olga", worker.pool)
    await_that("the snapshot has come", lambda: replica.cursor)
    replica.stop()
    churn(alice, 2_000, num_changes=KEPT_CHANGES)
    replica.follow()
    refused = await_that("it ends", lambda: replica.refused)
    assert (refused.code, refused.reason) == (grpc.StatusCode.ABORTED, "CURSOR_EXPIRED")
    assert refused.metadata == {"pool": worker.pool, "limit": str(KEPT_CHANGES)}
    replica.stop()
    replica.copy.expire()
    replica.follow()
    replica.await_equal()


def test_a_reader_who_is_too_slow_is_told_so(cachemgr: LoneCachemgr, serve: Serve) -> None:
    """Unread changes are not queued: they are overwritten, and the stream ends with that."""
    worker = serve(num_blocks=4_001)
    alice = Tenant.begin(cachemgr, worker, "alice")
    request = cache_service_pb2.WatchBlocksRequest(pool=worker.pool)
    call = cachemgr.stub("olga").WatchBlocks(request)
    assert next(call).cleared
    churn(alice, 4_000, num_changes=40 * KEPT_CHANGES)
    given_up = threading.Timer(DEADLINE_S, call.cancel)  # from here on: the changes take as long as they take
    given_up.start()
    with pytest.raises(grpc.RpcError) as failed:
        for _ in call:
            pass
    given_up.cancel()
    assert RefusedError.of_call(failed.value).reason == "CURSOR_EXPIRED"


def test_a_tenant_who_sees_nothing_change_gets_a_new_cursor_before_its_own_is_too_old(
    cachemgr: LoneCachemgr, serve: Serve, watch: Watch
) -> None:
    worker = serve(num_blocks=2_001)
    alice = Tenant.begin(cachemgr, worker, "alice")
    replica = watch("bob", worker.pool)
    await_that("the snapshot has come", lambda: replica.cursor)
    churn(alice, 2_000, num_changes=KEPT_CHANGES)
    await_that("more cursors have come", lambda: len(replica.answers) > 2)
    assert not any(answer.events for answer in replica.answers)
    assert len({answer.cursor for answer in replica.answers}) == len(replica.answers) < 8
    replica.stop()
    num_answers = len(replica.answers)
    replica.follow()
    bob = Tenant.begin(cachemgr, worker, "bob")
    bob.admit(1, [1, 2, 3])
    await_that("the watch goes on", lambda: len(replica.answers) > num_answers)
    replica.await_equal()
    assert not any(answer.cleared for answer in replica.answers[num_answers:])
    bob.settle()


def test_a_cursor_that_is_none_is_refused(cachemgr: LoneCachemgr, serve: Serve) -> None:
    worker = serve()
    for cursor in ("1", "g" * 32, "0" * 31, "0" * 33, "00000000000000010000000000000000\n"):
        refused = end_of_watch(cachemgr.stub("olga"), pool=worker.pool, cursor=cursor)
        assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
        assert refused.metadata["field"] == "cursor"


def test_media_that_have_no_copies_are_refused(cachemgr: LoneCachemgr, serve: Serve) -> None:
    worker = serve()
    for media in ([0], [1], [2, 4], [2, 3, 3]):
        refused = end_of_watch(cachemgr.stub("olga"), pool=worker.pool, copy_media=media)
        assert (refused.reason, refused.metadata["field"]) == ("INVALID_ARGUMENT", "copy_media")


def test_a_cursor_beyond_what_has_happened_is_a_gap(cachemgr: LoneCachemgr, serve: Serve) -> None:
    worker = serve()
    cursor = f"{worker.epoch:016x}{1:016x}"
    assert end_of_watch(cachemgr.stub("olga"), pool=worker.pool, cursor=cursor).reason == "CURSOR_EXPIRED"


def test_a_pool_that_is_not_there_is_not_found(cachemgr: LoneCachemgr) -> None:
    assert end_of_watch(cachemgr.stub("olga"), pool="none").reason == "POOL_NOT_FOUND"


# -- visibility ---------------------------------------------------------------------------------------------------


def test_a_tenant_is_told_of_its_own_blocks_only(cachemgr: LoneCachemgr, serve: Serve, watch: Watch) -> None:
    worker = serve(num_blocks=17)
    alice, bob = (Tenant.begin(cachemgr, worker, caller) for caller in ("alice", "bob"))
    alice.cache(1, [1, 2, 3, 4])
    bob.cache(1, [1, 2, 3, 4])
    replica, other = watch("alice", worker.pool), watch("bob", worker.pool)
    replica.await_equal()
    bob.admit(2, list(range(20)))
    bob.settle()
    other.await_equal()
    bob.admit(3, list(range(30, 30 + 4 * BLOCK_SIZE)))
    bob.settle()
    bob.admit(4, list(range(60, 60 + 6 * BLOCK_SIZE)))
    await_that("alice's block was evicted", lambda: not replica.blocks)
    replica.await_equal()
    assert replica.events() == [(STORED, 1, CACHED), (REMOVED, 1, FREE)]
    assert not any("bob" in str(answer) for answer in replica.answers)
    bob.settle()
    other.await_equal()
    assert 1 in other.blocks


def test_content_is_for_who_may_ask(cachemgr: LoneCachemgr, serve: Serve, watch: Watch) -> None:
    worker = serve(num_blocks=17)
    carla, alice = (Tenant.begin(cachemgr, worker, caller) for caller in ("carla", "alice"))
    for caller in ("alice", "olga"):
        refused = end_of_watch(cachemgr.stub(caller), pool=worker.pool, include_content=True)
        assert (refused.code, refused.reason) == (grpc.StatusCode.PERMISSION_DENIED, "ROLE_MISSING")
        method = "/quire.cache.v1.CacheService/WatchBlocks"
        assert refused.metadata == {"method": method, "roles": "content", "name": caller}
    first_prompt = draw_tokens(BLOCK_SIZE, seed=1)
    carla.cache(1, first_prompt)
    seeing = [watch(caller, worker.pool, include_content=True) for caller in ("carla", "oscar")]
    blind = [watch(caller, worker.pool) for caller in ("carla", "oscar")]
    for replica in (*seeing, *blind):
        replica.await_equal()
    prompt = draw_tokens(3 * BLOCK_SIZE - 1, seed=2)
    carla.admit(2, prompt, salt=b"pepper")
    carla.settle()
    carla.plan(extends={"sequence_ids": [2], "token_counts": [1]})
    carla.settle()
    alice.admit(1, prompt[:BLOCK_SIZE])
    alice.settle()
    for replica in (*seeing, *blind):
        replica.await_equal()
    for replica in blind:
        assert not any(event.token_ids or event.salt or event.parent_prefix_hash for event in stored(replica))
    for replica, callers in zip(seeing, ({"carla"}, {"carla", "alice"}), strict=True):
        events = [event for event in stored(replica) if event.token_ids]
        assert {event.block.tenant for event in events} == callers
        before, first, second, third = [event for event in events if event.block.tenant == "carla"]
        assert (list(before.token_ids), before.salt, before.parent_prefix_hash) == (first_prompt, b"", b"")
        assert list(first.token_ids) == prompt[:BLOCK_SIZE]
        assert list(second.token_ids) == prompt[BLOCK_SIZE : 2 * BLOCK_SIZE]
        assert list(third.token_ids) == [*prompt[2 * BLOCK_SIZE :], SAMPLED_TOKEN]
        assert {event.salt for event in (first, second, third)} == {b"pepper"}
        parents = [event.parent_prefix_hash for event in (first, second, third)]
        assert parents == [b"", first.block.prefix_hash, second.block.prefix_hash]
    late = watch("oscar", worker.pool, include_content=True)
    late.await_equal()
    assert [len(event.token_ids) for event in stored(late)] == [BLOCK_SIZE] * 5


def test_contents_outlive_cachemgr_with_a_state_directory() -> None:
    """A cachemgr that keeps no tokens refuses to tell them."""
    with tempfile.TemporaryDirectory(prefix="q-") as name:

        def begin(*flags: str) -> LoneCachemgr:
            return LoneCachemgr(Path(name), "--state-dir", f"{name}/state", *flags).start()

        cachemgr, prompt = begin(), draw_tokens(BLOCK_SIZE, seed=1)
        worker = Bookkeeper(cachemgr, "a", epoch=1)
        Tenant.begin(cachemgr, worker, "carla").cache(1, prompt, salt=b"pepper")
        cachemgr.close()
        cachemgr = begin()
        (event,) = stored_in_snapshot(cachemgr)
        assert (list(event.token_ids), event.salt, event.parent_prefix_hash) == (prompt, b"pepper", b"")
        cachemgr.close()
        cachemgr = begin("--no-keep-tokens")
        refused = end_of_watch(cachemgr.stub("oscar"), pool="a", include_content=True)
        assert (refused.reason, refused.metadata["field"]) == ("INVALID_ARGUMENT", "include_content")
        cachemgr.close()


def stored_in_snapshot(cachemgr: LoneCachemgr) -> list[cache_service_pb2.BlockEvent]:
    request = cache_service_pb2.WatchBlocksRequest(pool="a", include_content=True)
    call = cachemgr.stub("oscar").WatchBlocks(request, timeout=DEADLINE_S)
    answer = next(call)
    call.cancel()
    return [event for event in answer.events if event.kind == STORED]


def stored(replica: Replica) -> list[cache_service_pb2.BlockEvent]:
    return [event for answer in replica.answers for event in answer.events if event.kind == STORED]


# -- ends ---------------------------------------------------------------------------------------------------------


def test_a_watch_that_is_broken_off_leaves_nothing(cachemgr: LoneCachemgr, serve: Serve) -> None:
    """More watches, one after the other, than there may be at a time."""
    worker = serve()
    request = cache_service_pb2.WatchBlocksRequest(pool=worker.pool)
    for _ in range(300):
        call = cachemgr.stub("olga").WatchBlocks(request, timeout=DEADLINE_S)
        assert next(call).cleared
        call.cancel()


def test_watches_end_with_the_server() -> None:
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        cachemgr = LoneCachemgr(Path(name)).start()
        worker = Bookkeeper(cachemgr, "a", epoch=1)
        replica = Replica(cachemgr.stub("olga"), "a").follow()
        await_that("the snapshot has come", lambda: replica.cursor)
        pools = cachemgr.stub("alice").WatchPools(cache_service_pb2.WatchPoolsRequest(), timeout=DEADLINE_S)
        told = next(pools)
        assert ([pool.name for pool in told.pools], told.cleared, told.complete) == (["a"], True, True)
        worker.detach()
        assert not next(pools).pools[0].attached
        assert cachemgr.process.terminate() == 0
        refused = await_that("it ends", lambda: replica.refused)
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
        with pytest.raises(grpc.RpcError) as ended:
            next(pools)
        assert RefusedError.of_call(ended.value).reason == "SHUTTING_DOWN"
        replica.stop()
        cachemgr.close()
