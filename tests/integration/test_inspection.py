"""The services' inspection calls: complete, page by page, and consistent."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import pytest
from integration.lone_cachemgr import Bookkeeper, LoneCachemgr, Tenant
from integration.protocol_client import (
    BLOCK_SIZE,
    MAX_SEQUENCES,
    MAX_STEP_TOKENS,
    NUM_BLOCKS,
    VOCAB_SIZE,
    LeaseHolder,
    Pair,
    RefusedError,
    StandInWorker,
    ask,
    await_that,
    draw_tokens,
)

from quire.cache.v1 import cache_service_pb2
from quire.compute.v1 import worker_service_pb2

CreateLease = Callable[..., LeaseHolder]
FREE = cache_service_pb2.BLOCK_STATE_FREE
CACHED = cache_service_pb2.BLOCK_STATE_CACHED
ACTIVE = cache_service_pb2.BLOCK_STATE_ACTIVE
RETIRED = cache_service_pb2.BLOCK_STATE_RETIRED
PROMPT = draw_tokens(21, seed=1)


def all_pages(method: Any, request: Any, entries: str) -> list[list[Any]]:
    """Every page of a list, by following its tokens."""
    pages = []
    while True:
        answer = ask(method, request)
        pages.append(list(getattr(answer, entries)))
        assert len(pages) < 100
        if not answer.next_page_token:
            return pages
        request.page_token = answer.next_page_token


@pytest.fixture
def busy(pair: Pair, create_lease: CreateLease) -> tuple[LeaseHolder, LeaseHolder]:
    """Two leases: one with a sequence and a fork of it, one with two sequences; two cached blocks of one released."""
    first, second = create_lease(), create_lease(ttl_s=30)
    first.run(first.admit((1, PROMPT), (9, draw_tokens(9, seed=2))))
    first.go_on(1, num_steps=2)
    first.tokens[2] = first.tokens[1][:23]
    forks = [{"parent_sequence_id": 1, "child_sequence_ids": [2], "token_count": 23}]
    first.run(first.plan(forks=forks, extends={"sequence_ids": [2], "token_counts": [1]}, release_sequence_ids=[9]))
    second.run(second.admit((5, draw_tokens(5, seed=3)), (4, draw_tokens(8, seed=4))))
    for holder in (first, second):
        holder.await_settled()
    return first, second


def test_the_model(pair: Pair) -> None:
    model = ask(pair.worker.GetModel, worker_service_pb2.GetModelRequest())
    pool = pair.pool()
    assert model.geometry == pool.geometry
    assert (model.pool, model.epoch) == (pool.name, pool.epoch)
    assert (model.architecture, model.dtype, model.device) == ("LlamaForCausalLM", "float32", "cpu")
    assert model.max_step_tokens == MAX_STEP_TOKENS
    assert (model.geometry.block_size_tokens, model.geometry.block_count) == (BLOCK_SIZE, NUM_BLOCKS)
    assert (model.geometry.max_sequence_count, model.geometry.vocabulary_size) == (MAX_SEQUENCES, VOCAB_SIZE)


def test_a_lease_says_where_and_for_how_long(pair: Pair) -> None:
    request = cache_service_pb2.CreateLeaseRequest(pool="default", ttl={"seconds": 20})
    lease = ask(pair.cache.CreateLease, request)
    pool = pair.pool()
    assert (lease.pool, lease.epoch, lease.term) == ("default", pool.epoch, pool.term)
    assert lease.geometry == pool.geometry
    assert lease.worker_address == pair.services.worker_address
    (listed,) = pair.leases()
    assert listed.lease_id_prefix == lease.lease_id[:8]
    assert listed.ttl.seconds == 20
    assert abs(listed.expire_time.ToMilliseconds() - lease.expire_time.ToMilliseconds()) < 1000
    renewed = ask(pair.cache.RenewLease, cache_service_pb2.RenewLeaseRequest(lease_id=lease.lease_id))
    assert renewed.expire_time.ToNanoseconds() > lease.expire_time.ToNanoseconds()
    ask(pair.cache.DeleteLease, cache_service_pb2.DeleteLeaseRequest(lease_id=lease.lease_id))


def test_blocks_by_state_add_up(pair: Pair, busy: tuple[LeaseHolder, LeaseHolder]) -> None:
    counts = pair.counts()
    by_state = {state: pair.blocks(state=state) for state in (FREE, CACHED, ACTIVE, RETIRED)}
    expected = (counts.free_count, counts.cached_count, counts.active_count, counts.retired_count)
    assert tuple(map(len, by_state.values())) == expected == (17, 2, 11, 0)
    everything = pair.blocks()
    assert [block.block_id for block in everything] == list(range(1, NUM_BLOCKS))
    assert sorted(chain(*by_state.values()), key=lambda block: block.block_id) == everything
    assert all(len(block.prefix_hash) == 32 for block in by_state[CACHED])
    assert not any(block.prefix_hash or block.reference_count for block in by_state[FREE])


def test_blocks_of_a_lease(pair: Pair, busy: tuple[LeaseHolder, LeaseHolder]) -> None:
    first, second = busy
    tables = [list(first.sequence(1).block_ids), list(first.sequence(2).block_ids)]
    blocks = {block.block_id: block for block in pair.blocks(lease_id=first.lease_id)}
    assert sorted(blocks) == sorted(set(tables[0]) | set(tables[1]))
    assert {block_id for block_id, block in blocks.items() if block.reference_count == 2} == set(tables[0][:5])
    assert tables[0][:5] == tables[1][:5]
    assert tables[0][5] != tables[1][5]
    assert not blocks.keys() & {block.block_id for block in pair.blocks(lease_id=second.lease_id)}
    assert len(pair.blocks(lease_id=second.lease_id, state=ACTIVE)) == 4
    assert not pair.blocks(lease_id=second.lease_id, state=FREE)
    with pytest.raises(RefusedError, match="LEASE_NOT_FOUND"):
        pair.blocks(lease_id="none")


def test_sequences(pair: Pair, busy: tuple[LeaseHolder, LeaseHolder]) -> None:
    first, second = busy
    sequence = first.sequence(2)
    assert (sequence.token_count, sequence.computed_token_count, sequence.scheduled_token_count) == (24, 23, 23)
    assert sequence.block_count == len(sequence.block_ids) == 6
    request = cache_service_pb2.ListSequencesRequest(pool="default")
    listed = ask(pair.cache.ListSequences, request).sequences
    assert len(listed) == 4
    assert not any(entry.block_ids for entry in listed)
    keys = [(entry.lease_id_prefix, entry.sequence_id) for entry in listed]
    ids = {holder.lease_id[:8]: [seq for lease, seq in keys if lease == holder.lease_id[:8]] for holder in busy}
    assert ids == {first.lease_id[:8]: [1, 2], second.lease_id[:8]: [4, 5]}
    request.lease_id = second.lease_id
    assert [entry.sequence_id for entry in ask(pair.cache.ListSequences, request).sequences] == [4, 5]
    with pytest.raises(RefusedError, match="SEQUENCE_NOT_FOUND"):
        first.sequence(5)


def test_leases_do_not_give_their_ids_away(pair: Pair, busy: tuple[LeaseHolder, LeaseHolder]) -> None:
    answer = ask(pair.cache.ListLeases, cache_service_pb2.ListLeasesRequest(page_size=1))
    sequences = ask(pair.cache.ListSequences, cache_service_pb2.ListSequencesRequest(pool="default", page_size=1))
    assert answer.next_page_token
    for holder in busy:
        assert holder.lease_id.encode() not in answer.SerializeToString() + sequences.SerializeToString()
    assert {(lease.sequence_count, lease.last_step_number) for lease in pair.leases()} == {(2, 4), (2, 1)}


LISTS = {
    "blocks": ("ListBlocks", cache_service_pb2.ListBlocksRequest, NUM_BLOCKS - 1),
    "leases": ("ListLeases", cache_service_pb2.ListLeasesRequest, 2),
    "sequences": ("ListSequences", cache_service_pb2.ListSequencesRequest, 4),
}


def without_times(entries: Iterable[Any]) -> list[Any]:
    """Times are by the wall clock, which may be set while a test runs."""
    entries = list(entries)
    for entry in entries:
        if isinstance(entry, cache_service_pb2.Lease):
            entry.ClearField("expire_time")
    return entries


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 30])
@pytest.mark.parametrize(("method", "message", "length"), LISTS.values(), ids=LISTS)
def test_lists_come_in_pages(
    method: str, message: Any, length: int, page_size: int, pair: Pair, busy: tuple[LeaseHolder, LeaseHolder]
) -> None:
    entries = method.removeprefix("List").lower()
    (everything,) = all_pages(getattr(pair.cache, method), message(pool="default"), entries)
    pages = all_pages(getattr(pair.cache, method), message(pool="default", page_size=page_size), entries)
    assert without_times(chain(*pages)) == without_times(everything)
    assert len(everything) == length
    assert [len(page) for page in pages[:-1]] == [page_size] * (len(pages) - 1)
    assert 1 <= len(pages[-1]) <= page_size


def test_a_filter_and_pages_go_together(pair: Pair, busy: tuple[LeaseHolder, LeaseHolder]) -> None:
    request = cache_service_pb2.ListBlocksRequest(pool="default", state=ACTIVE, lease_id=busy[0].lease_id, page_size=3)
    pages = all_pages(pair.cache.ListBlocks, request, "blocks")
    assert list(chain(*pages)) == pair.blocks(state=ACTIVE, lease_id=busy[0].lease_id)
    assert [len(page) for page in pages] == [3, 3, 1]


@pytest.mark.parametrize("page_size", [1, 3])
@pytest.mark.parametrize("entries", ["leases", "sequences"])
def test_what_is_there_all_the_time_is_listed_once_whatever_comes_and_goes(
    entries: str, page_size: int, pair: Pair, create_lease: CreateLease
) -> None:
    staying = [create_lease() for _ in range(5)]
    first = staying[0]
    first.run(first.admit((3, [1]), (7, [2])))
    method, message, _ = LISTS[entries]
    request = message(pool="default", page_size=page_size)
    keys: list[tuple[str, int]] = []
    for number in range(100):
        answer = ask(getattr(pair.cache, method), request)
        keys += [(entry.lease_id_prefix, getattr(entry, "sequence_id", 0)) for entry in getattr(answer, entries)]
        if not answer.next_page_token:
            break
        request.page_token = answer.next_page_token
        going = create_lease()
        first.run(first.admit((4 + number % 3, [1])))
        first.run(first.plan(release_sequence_ids=[4 + number % 3]))
        if number % 2:
            going.delete()
    assert len(set(keys)) == len(keys)
    there = {(first.lease_id[:8], 3), (first.lease_id[:8], 7)}
    assert set(keys) >= (there if entries == "sequences" else {(holder.lease_id[:8], 0) for holder in staying})


def test_leases_by_state(pair: Pair, create_lease: CreateLease) -> None:
    open_lease, ended = create_lease(), create_lease()
    plan = ended.admit((1, PROMPT))
    with pair.held() as hold:
        running = ended.start(plan)
        hold.await_running()
        ended.delete()

        def listed(state: Any) -> list[str]:
            request = cache_service_pb2.ListLeasesRequest(pool="default", state=state)
            return [lease.lease_id_prefix for lease in ask(pair.cache.ListLeases, request).leases]

        assert listed(cache_service_pb2.LEASE_STATE_OPEN) == [open_lease.lease_id[:8]]
        assert listed(cache_service_pb2.LEASE_STATE_FENCING) == [ended.lease_id[:8]]
        assert len(listed(cache_service_pb2.LEASE_STATE_UNSPECIFIED)) == 2
    ended.finish(running)


@pytest.mark.parametrize("method", ["ListBlocks", "ListLeases"])
def test_a_state_that_is_none_is_refused(pair: Pair, method: str) -> None:
    request = getattr(cache_service_pb2, f"{method}Request")(pool="default", state=9)
    with pytest.raises(RefusedError) as refused:
        ask(getattr(pair.cache, method), request)
    assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert refused.value.metadata["field"] == "state"


@pytest.fixture(scope="module")
def lone() -> Iterator[LoneCachemgr]:
    """A cachemgr with authentication."""
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        cachemgr = LoneCachemgr(Path(name)).start()
        yield cachemgr
        cachemgr.close()


def test_each_sees_what_is_its_own_and_operators_whose_it_is(lone: LoneCachemgr) -> None:
    worker = Bookkeeper(lone, "shared", epoch=1)
    alice, bob = (Tenant.begin(lone, worker, caller) for caller in ("alice", "bob"))
    alice.cache(1, [1, 2, 3, 4, 5])
    alice.admit(2, [6, 7])
    bob.admit(1, [1, 2, 3, 4, 5])

    def names(caller: str, method: str, **fields: Any) -> list[Any]:
        """The tenants of blocks or leases; for sequences, of their leases."""
        request = getattr(cache_service_pb2, f"{method}Request")(pool="shared", **fields)
        answer = ask(getattr(lone.stub(caller), method), request)
        if method == "ListSequences":
            owners = {tenant.lease_id[:8]: name for tenant, name in ((alice, "alice"), (bob, "bob"))}
            return [owners[sequence.lease_id_prefix] for sequence in answer.sequences]
        return [entry.tenant for entry in (answer.blocks if method == "ListBlocks" else answer.leases)]

    own = {"ListLeases": {"alice": 1, "bob": 1}, "ListSequences": {"alice": 1, "bob": 1}}
    for method, counts in (own | {"ListBlocks": {"alice": 2, "bob": 2}}).items():
        for caller, other in (("alice", "bob"), ("bob", "alice")):
            mine = [caller] * counts[caller]
            assert names(caller, method) == names(caller, method, tenant=caller) == mine
            assert names("olga", method, tenant=caller) == mine
            assert names(caller, method, tenant=other) == names("olga", method, tenant="nobody") == []
    assert sorted(names("olga", "ListLeases")) == sorted(names("olga", "ListSequences")) == ["alice", "bob"]
    assert sorted(names("olga", "ListBlocks")) == [*[""] * 4, "alice", "alice", "bob", "bob"]
    assert names("alice", "ListBlocks", state=FREE) == names("olga", "ListBlocks", state=FREE, tenant="alice") == []
    assert names("alice", "ListBlocks", state=CACHED) == ["alice"]
    assert names("alice", "ListBlocks", lease_id=alice.lease_id) == ["alice"]
    for method in ("ListBlocks", "GetSequence"):
        fields = {"lease_id": bob.lease_id} | ({"sequence_id": 1} if method == "GetSequence" else {})
        with pytest.raises(RefusedError, match="LEASE_NOT_FOUND"):
            ask(getattr(lone.stub("alice"), method), getattr(cache_service_pb2, f"{method}Request")(**fields))
    alice.settle()
    bob.settle()
    worker.detach()


def test_a_sequence_is_found_by_what_lists_say_of_its_lease(lone: LoneCachemgr) -> None:
    worker = Bookkeeper(lone, "named", epoch=1)
    alice, bob = (Tenant.begin(lone, worker, caller) for caller in ("alice", "bob"))
    alice.admit(3, [1] * 9)
    (listed,) = ask(lone.stub("alice").ListSequences, cache_service_pb2.ListSequencesRequest(pool="named")).sequences

    def found(caller: str, lease_id: str, sequence_id: int = 3) -> cache_service_pb2.GetSequenceResponse:
        request = cache_service_pb2.GetSequenceRequest(lease_id=lease_id, sequence_id=sequence_id)
        return ask(lone.stub(caller).GetSequence, request)

    whole = found("alice", alice.lease_id)
    assert len(whole.sequence.block_ids) == whole.sequence.block_count == 3
    for caller in ("alice", "olga"):
        assert found(caller, listed.lease_id_prefix) == whole
    assert alice.lease_id.encode() not in whole.SerializeToString()
    with pytest.raises(RefusedError, match="SEQUENCE_NOT_FOUND"):
        found("alice", listed.lease_id_prefix, 4)
    for caller, given in (
        ("bob", alice.lease_id[:8]),
        ("carla", alice.lease_id[:8]),
        ("alice", bob.lease_id[:8]),
        ("olga", alice.lease_id[:7]),
        ("olga", alice.lease_id[:9]),
        ("olga", alice.lease_id[8:16]),
        ("olga", ""),
    ):
        with pytest.raises(RefusedError, match="LEASE_NOT_FOUND") as refused:
            found(caller, given)
        assert refused.value.metadata["lease_id"] == given[:8]
    worker.detach()
    ask(lone.stub("alice").DeleteLease, cache_service_pb2.DeleteLeaseRequest(lease_id=alice.lease_id))
    for given in (alice.lease_id, alice.lease_id[:8]):
        with pytest.raises(RefusedError, match="LEASE_NOT_FOUND") as refused:
            found("alice", given)
        assert alice.lease_id not in f"{refused.value} {refused.value.metadata}"


@pytest.mark.parametrize("method", ["RenewLease", "DeleteLease", "PlanStep", "ListBlocks", "ListSequences"])
def test_the_beginning_of_a_leases_id_is_good_for_nothing_else(lone: LoneCachemgr, method: str) -> None:
    worker = Bookkeeper(lone, f"useless-{method}", epoch=1)
    alice = Tenant.begin(lone, worker, "alice")
    alice.admit(1, [1, 2, 3])
    fields: dict[str, Any] = {"lease_id": alice.lease_id[:8]}
    fields |= {"epoch": 1} if method == "PlanStep" else {"pool": worker.pool} if method.startswith("List") else {}
    call = getattr(lone.stub("alice"), method)
    request = getattr(cache_service_pb2, f"{method}Request")(**fields)
    if method == "DeleteLease":
        ask(call, request)  # of one that is gone it is OK
    elif method == "ListSequences":
        assert not ask(call, request).sequences
    else:
        with pytest.raises(RefusedError, match="LEASE_NOT_FOUND"):
            ask(call, request)
    assert alice.lease().state == cache_service_pb2.LEASE_STATE_OPEN
    alice.settle()
    worker.detach()


def test_what_is_rare_in_a_large_pool_comes_in_pages_that_are_short(lone: LoneCachemgr) -> None:
    worker = Bookkeeper(lone, "large", epoch=1, block_count=150_001, max_sequence_tokens=1 << 20)
    alice = Tenant.begin(lone, worker, "alice")
    alice.admit(1, [1] * 4 * 100_000)
    alice.cache(2, [2, 2, 2, 2])
    alice.settle()
    request = cache_service_pb2.ListBlocksRequest(pool="large", state=CACHED)
    pages = all_pages(lone.stub("alice").ListBlocks, request, "blocks")
    assert [[block.block_id for block in page] for page in pages] == [[], [100_001], []]
    request = cache_service_pb2.ListBlocksRequest(pool="large", lease_id=alice.lease_id, page_size=10_000)
    pages = all_pages(lone.stub("alice").ListBlocks, request, "blocks")
    assert [block.block_id for block in chain(*pages)] == list(range(1, 100_001))
    request = cache_service_pb2.ListBlocksRequest(pool="large", page_token="9999999999")
    assert not ask(lone.stub("olga").ListBlocks, request).blocks
    alice.release(1)
    worker.detach()


def test_pools(pair: Pair, attach: Callable[[], StandInWorker]) -> None:
    for name in ("pool-b", "pool-a"):
        attach().register(name)
    pages = all_pages(pair.cache.ListPools, cache_service_pb2.ListPoolsRequest(page_size=1), "pools")
    names = [pool.name for (pool,) in pages]
    assert names == sorted(names)
    assert {"default", "pool-a", "pool-b"} <= set(names)
    assert pair.pool("pool-a").worker_address == "nowhere:1"
    with pytest.raises(RefusedError, match="POOL_NOT_FOUND"):
        pair.pool("")
    matches = ask(pair.cache.LookupPrefix, cache_service_pb2.LookupPrefixRequest(token_ids=PROMPT)).matches
    assert {match.pool for match in matches} == set(names)


def test_a_lookup_takes_nothing(pair: Pair, lease: LeaseHolder) -> None:
    lease.run(lease.admit((1, PROMPT)))
    lease.run(lease.plan(release_sequence_ids=[1]))
    lease.await_settled()
    before = pair.books()
    lookups = [PROMPT, PROMPT[:20], PROMPT[:5], PROMPT[:4], [*PROMPT[:9], PROMPT[9] ^ 1, *PROMPT[10:]]]
    assert [pair.cached_tokens(tokens) for tokens in lookups] == [20, 16, 4, 0, 8]
    assert pair.books() == before


def test_the_pool_that_holds_most_comes_first(
    pair: Pair, lease: LeaseHolder, attach: Callable[[], StandInWorker]
) -> None:
    attach().register("a-pool")
    lease.run(lease.admit((1, PROMPT)))
    lease.await_settled()
    matches = ask(pair.cache.LookupPrefix, cache_service_pb2.LookupPrefixRequest(token_ids=PROMPT)).matches
    assert (matches[0].pool, matches[0].cached_token_count) == ("default", 20)
    assert {match.cached_token_count for match in matches[1:]} == {0}


def test_a_reset_forgets_what_nobody_holds_and_hides_the_rest(
    pair: Pair, busy: tuple[LeaseHolder, LeaseHolder]
) -> None:
    first, _ = busy
    table = list(first.sequence(1).block_ids)
    findable = sum(bool(block.prefix_hash) for block in pair.blocks())
    request = cache_service_pb2.ResetPrefixCacheRequest(pool="default")
    assert ask(pair.cache.ResetPrefixCache, request).dropped_block_count == findable
    assert ask(pair.cache.ResetPrefixCache, request).dropped_block_count == 0
    assert pair.counts().cached_count == 0
    assert pair.cached_tokens(PROMPT) == 0
    assert list(first.sequence(1).block_ids) == table
    assert pair.violations() == []
    tokens = list(first.tokens[1])
    first.go_on(1, 2, num_steps=3)
    assert first.tokens[1][: len(tokens)] == tokens
    assert first.tokens[1][:24] == first.tokens[2][:24]


def test_statistics_agree_with_the_lists(pair: Pair, busy: tuple[LeaseHolder, LeaseHolder]) -> None:
    statistics, pool, blocks = pair.statistics(), pair.pool(), pair.blocks()
    assert statistics.block_counts == pool.block_counts
    assert statistics.epoch == pool.epoch
    assert (statistics.lease_count, statistics.sequence_count) == (pool.lease_count, pool.sequence_count) == (2, 4)
    assert statistics.table_entry_count == sum(block.reference_count for block in blocks) == 6 + 6 + 2 + 2
    assert statistics.shared_block_count == sum(block.reference_count > 1 for block in blocks) == 5
    # 20 tokens shared, 4 of the parent, 4 of the child, one sampled token among them; the last one finds no room
    assert statistics.held_token_count == 20 + 4 + 4 + 6 + 8
    audit = ask(pair.cache.AuditPool, cache_service_pb2.AuditPoolRequest(pool="default"))
    assert (list(audit.violations), audit.block_count, audit.sequence_count) == ([], NUM_BLOCKS - 1, 4)


def test_counters_count(pair: Pair, create_lease: CreateLease) -> None:
    before, worker_before = pair.statistics(), pair.worker_statistics()
    lease = create_lease()
    lease.run(lease.admit((1, PROMPT)))
    lease.await_settled()
    lease.run(lease.admit((2, PROMPT)))
    lease.run(lease.plan(), skip=True)
    assert lease.refused(extends={"sequence_ids": [3], "token_counts": [1]}).reason == "SEQUENCE_NOT_FOUND"
    other = create_lease()
    plan = other.plan()
    other.delete()
    await_that("the lease is gone", lambda: not pair.has_lease(other.lease_id))
    with pytest.raises(RefusedError, match="LEASE_FENCED"):
        other.run(plan)
    lease.await_settled()
    after, worker_after = pair.statistics(), pair.worker_statistics()

    def grown(name: str) -> int:
        return getattr(after, name) - getattr(before, name)

    def worker_grown(name: str) -> int:
        return getattr(worker_after, name) - getattr(worker_before, name)

    assert (grown("planned_step_count"), grown("computed_step_count"), grown("skipped_step_count")) == (5, 2, 2)
    assert (grown("admission_count"), grown("admitted_token_count"), grown("cached_token_count")) == (2, 42, 20)
    assert (grown("allocated_block_count"), grown("published_block_count")) == (7, 5)
    assert after.refusal_counts["SEQUENCE_NOT_FOUND"] == before.refusal_counts["SEQUENCE_NOT_FOUND"] + 1
    assert (worker_grown("computed_step_count"), worker_grown("skipped_step_count")) == (2, 2)
    assert (worker_grown("computed_token_count"), worker_grown("sampled_token_count")) == (22, 2)
    assert worker_after.refusal_counts["LEASE_FENCED"] == worker_before.refusal_counts["LEASE_FENCED"] + 1
    assert worker_after.forward_time.ToNanoseconds() > worker_before.forward_time.ToNanoseconds()
    await_that("all reports are acknowledged", lambda: not pair.worker_statistics().unacknowledged_report_count)


def test_the_worker_counts_what_it_keeps(pair: Pair, busy: tuple[LeaseHolder, LeaseHolder]) -> None:
    statistics = pair.worker_statistics()
    assert (statistics.open_lease_count, statistics.sequence_count, statistics.step_in_flight_count) == (2, 4, 0)
    assert (statistics.epoch, statistics.term, statistics.attached) == (busy[0].epoch, busy[0].term, True)


def test_equal_content_has_equal_checksums(pair: Pair, create_lease: CreateLease) -> None:
    """Two sequences of other salts with equal tokens: other blocks, the same bytes, of which only full ones count."""
    lease = create_lease()
    tables = []
    for seq_id, salt in enumerate((b"a", b"b")):
        lease.run(lease.admit((seq_id, PROMPT[:8]), salt=salt))
        tables.append(list(lease.sequence(seq_id).block_ids))
    assert not set(tables[0]) & set(tables[1])
    checksums = pair.checksums()
    assert [checksums[block_id] for block_id in tables[0]] == [checksums[block_id] for block_id in tables[1]]
    assert checksums[tables[0][0]] != checksums[tables[0][1]]
    assert not ask(pair.worker.ChecksumBlocks, worker_service_pb2.ChecksumBlocksRequest()).checksums
