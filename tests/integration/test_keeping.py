"""Retention and reservations through a real cachemgr: kept blocks, and errors for those that can't be kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from integration.lone_cachemgr import (
    SMALL_POOL,
    Begin,
    Bookkeeper,
    LoneCachemgr,
    Tenant,
    cached,
    call,
    prompt,
    reasons,
    refusals,
    use,
)
from integration.protocol_client import RefusedError, await_that, seconds

from quire.cache.v1 import cache_service_pb2

TENANTS = """
[default]
pin_budget = 6

[tenants.bob]
pin_budget = 2
"""


@pytest.fixture(scope="module")
def cachemgr(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoneCachemgr]:
    folder = tmp_path_factory.mktemp("keeping")
    (folder / "tenants.toml").write_text(TENANTS)
    cachemgr = LoneCachemgr(folder, "--tenants", str(folder / "tenants.toml")).start()
    yield cachemgr
    cachemgr.close()


# -- reservations -------------------------------------------------------------------------------------------------


def test_a_reserved_sequence_gets_all_it_said_however_full_the_pool(
    cachemgr: LoneCachemgr, worker: Bookkeeper, begin: Begin
) -> None:
    first, second = begin(), begin()
    admission = {"sequence_id": 1, "token_ids": [1, 2, 3], "reserved_token_count": 20}
    assert reasons(first.plan(admissions=[admission])) == []
    first.settle()
    alice = use(cachemgr, worker, "alice")
    assert (alice.held_block_count, alice.reserved_block_count) == (1, 4)
    for seq_id in range(7):
        second.plan(admissions=[{"sequence_id": seq_id, "token_ids": prompt(10 + seq_id, 1)}])
    (refused,) = refusals(second.plan(admissions=[{"sequence_id": 9, "token_ids": prompt(20, 1)}]))
    assert (refused.reason, refused.code) == ("OUT_OF_BLOCKS", grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert (refused.metadata["needed"], refused.metadata["free"]) == ("1", "0")
    assert refused.retry_delay_s is not None
    for num_tokens in range(4, 21):
        assert reasons(first.plan(extends={"sequence_ids": [1], "token_counts": [1]})) == [], num_tokens
        first.settle()
    (refused,) = refusals(first.plan(extends={"sequence_ids": [1], "token_counts": [1]}))
    assert (refused.reason, refused.code) == ("SEQUENCE_TOO_LONG", grpc.StatusCode.INVALID_ARGUMENT)
    assert (refused.metadata["value"], refused.metadata["limit"]) == ("21", "20")
    assert refused.metadata["limited_by"] == "reservation"
    sequence = call(cachemgr, "alice", "GetSequence", lease_id=first.lease_id, sequence_id=1).sequence
    assert sequence.reserved_token_count == 20
    first.settle()
    second.settle()
    first.delete()
    assert use(cachemgr, worker, "alice").reserved_block_count == 0
    second.delete()


def test_a_reservation_is_refused_for_now_or_for_ever(cachemgr: LoneCachemgr, worker: Bookkeeper, begin: Begin) -> None:
    tenant = begin()
    for reserved, reason, code in (
        (48, "OUT_OF_BLOCKS", grpc.StatusCode.RESOURCE_EXHAUSTED),
        (49, "SEQUENCE_TOO_LONG", grpc.StatusCode.INVALID_ARGUMENT),
        (2, "INVALID_ARGUMENT", grpc.StatusCode.INVALID_ARGUMENT),
        (-1, "INVALID_ARGUMENT", grpc.StatusCode.INVALID_ARGUMENT),
    ):
        admission = {"sequence_id": 1, "token_ids": [1, 2, 3], "reserved_token_count": reserved}
        if reserved == 48:
            tenant.admit(7, prompt(7, 1))
            tenant.settle()
        if reserved < 0:
            with pytest.raises(grpc.RpcError) as failed:
                tenant.plan(admissions=[admission])
            refused = RefusedError.of_call(failed.value)
            assert refused.metadata["field"] == "admissions.reserved_token_count"
        else:
            (refused,) = refusals(tenant.plan(admissions=[admission]))
            (check,) = call(cachemgr, "alice", "CheckAdmission", pool=worker.pool, admission=admission).checks
            assert not check.accepted
            assert (check.refusal.reason, check.refusal.metadata) == (refused.reason, refused.metadata)
        assert (refused.reason, refused.code) == (reason, code), reserved
    tenant.settle()
    tenant.delete()


# -- dry runs -----------------------------------------------------------------------------------------------------


def test_a_dry_run_over_all_pools_names_the_best_first_and_takes_nothing(cachemgr: LoneCachemgr) -> None:
    workers = [Bookkeeper(cachemgr, f"dry-{index}", epoch=1, **SMALL_POOL) for index in range(3)]
    holders = [Tenant.begin(cachemgr, worker, "alice") for worker in workers]
    tokens = prompt(5, 3)
    holders[1].cache(1, tokens)
    holders[2].admit(1, prompt(6, 10))
    before = [call(cachemgr, "olga", "GetPool", pool=worker.pool).pool.block_counts for worker in workers]
    checks = call(cachemgr, "alice", "CheckAdmission", admission={"token_ids": [*tokens, 9]}).checks
    checks = [check for check in checks if check.pool.startswith("dry-")]
    assert [check.pool for check in checks] == ["dry-1", "dry-0", "dry-2"]
    assert [(check.accepted, check.cached_token_count, check.needed_block_count) for check in checks] == [
        (True, 12, 1),
        (True, 0, 4),
        (False, 0, 4),
    ]
    assert [check.available_block_count for check in checks] == [9, 12, 2]
    assert checks[2].refusal.reason == "OUT_OF_BLOCKS"
    assert [call(cachemgr, "olga", "GetPool", pool=worker.pool).pool.block_counts for worker in workers] == before
    (check,) = call(
        cachemgr,
        "alice",
        "CheckAdmission",
        pool="dry-0",
        admission={"token_ids": tokens},
        admission_reserve_block_count=10,
    ).checks
    assert (check.accepted, check.refusal.metadata["needed"]) == (False, "13")
    workers[0].detach()
    await_that(
        "the pool is detached",
        lambda: not call(cachemgr, "alice", "GetPool", pool="dry-0").pool.attached,
    )
    (check,) = call(cachemgr, "alice", "CheckAdmission", pool="dry-0", admission={"token_ids": tokens}).checks
    assert (check.accepted, check.refusal.reason) == (False, "POOL_DETACHED")
    for holder in holders[1:]:
        holder.settle()
        holder.delete()
    for worker in workers[1:]:
        worker.detach()


# -- pins ---------------------------------------------------------------------------------------------------------


def test_what_is_pinned_survives_until_it_is_unpinned(cachemgr: LoneCachemgr, worker: Bookkeeper, begin: Begin) -> None:
    tenant, kept = begin(), prompt(1, 3)
    tenant.cache(1, kept)
    pinned = call(cachemgr, "alice", "PinPrefix", pool=worker.pool, token_ids=[*kept, 5, 6], ttl=seconds(60))
    assert (pinned.pinned_token_count, pinned.pinned_block_count, pinned.pin_budget_block_count) == (12, 3, 6)
    again = call(cachemgr, "alice", "PinPrefix", pool=worker.pool, token_ids=kept, ttl=seconds(120))
    assert (again.pin_id, again.pinned_block_count) == (pinned.pin_id, 3)
    assert again.expire_time.ToNanoseconds() > pinned.expire_time.ToNanoseconds() + 50e9
    tenant.cache(2, prompt(2, 9))
    tenant.cache(3, prompt(3, 9))
    assert cached(cachemgr, worker, kept) == 3
    (refused,) = refusals(tenant.plan(admissions=[{"sequence_id": 4, "token_ids": prompt(4, 10)}]))
    assert (refused.reason, refused.metadata["free"]) == ("OUT_OF_BLOCKS", "9")
    blocks = call(cachemgr, "alice", "ListBlocks", pool=worker.pool).blocks
    assert sorted(block.prefix_pin_count for block in blocks)[-4:] == [0, 1, 1, 1]
    assert [pin.pin_id for pin in call(cachemgr, "alice", "ListPins", pool=worker.pool).pins] == [pinned.pin_id]
    assert not call(cachemgr, "bob", "ListPins", pool=worker.pool).pins
    (pin,) = call(cachemgr, "olga", "ListPins", pool=worker.pool).pins
    assert (pin.tenant, pin.pinned_token_count) == ("alice", 12)
    call(cachemgr, "bob", "UnpinPrefix", pool=worker.pool, pin_id=pinned.pin_id)
    assert use(cachemgr, worker, "alice").pinned_block_count == 3
    for _ in range(2):
        call(cachemgr, "alice", "UnpinPrefix", pool=worker.pool, pin_id=pinned.pin_id)
    assert use(cachemgr, worker, "alice").pinned_block_count == 0
    tenant.settle()
    tenant.cache(5, prompt(5, 12))
    assert cached(cachemgr, worker, kept) == 0
    tenant.delete()


def test_a_pin_says_why_not(cachemgr: LoneCachemgr, worker: Bookkeeper, begin: Begin) -> None:
    alice, bob = begin(), begin("bob")
    alice.cache(1, prompt(1, 7))
    bob.cache(1, prompt(2, 3))

    def refused(caller: str, tokens: list[int], **fields: Any) -> RefusedError:
        with pytest.raises(RefusedError) as failed:
            call(cachemgr, caller, "PinPrefix", pool=worker.pool, token_ids=tokens, **fields)
        return failed.value

    missing = refused("bob", prompt(1, 7))
    assert (missing.code, missing.reason) == (grpc.StatusCode.NOT_FOUND, "PREFIX_NOT_CACHED")
    budget = refused("bob", prompt(2, 3))
    assert (budget.reason, budget.metadata) == ("PIN_BUDGET_SPENT", {"needed": "3", "pinned": "0", "limit": "2"})
    assert refused("alice", []).reason == "EMPTY_PROMPT"
    assert refused("alice", [1], ttl=seconds(0.5)).metadata["field"] == "ttl"
    assert refused("alice", [1], salt=b"x" * 65).metadata["field"] == "salt"
    admission = {"sequence_id": 2, "token_ids": [7], "reserved_token_count": 4 * 8}
    assert reasons(alice.plan(admissions=[admission])) == []
    assert refused("alice", prompt(1, 6)).reason == "OUT_OF_BLOCKS"
    assert use(cachemgr, worker, "alice").pinned_block_count == 0
    with pytest.raises(RefusedError) as failed:
        call(cachemgr, "alice", "UnpinPrefix", pool=worker.pool, pin_id="7")
    assert failed.value.metadata["field"] == "pin_id"
    for tenant in (alice, bob):
        tenant.settle()
        tenant.delete()


def test_a_pin_ends_with_its_time_and_with_a_reset(cachemgr: LoneCachemgr, worker: Bookkeeper, begin: Begin) -> None:
    tenant = begin()
    tenant.cache(1, prompt(1, 3))
    call(cachemgr, "alice", "PinPrefix", pool=worker.pool, token_ids=prompt(1, 2), ttl=seconds(1))
    call(cachemgr, "alice", "PinPrefix", pool=worker.pool, token_ids=prompt(1, 3), ttl=seconds(60))

    def pins() -> list[int]:
        listed = call(cachemgr, "alice", "ListPins", pool=worker.pool).pins
        return sorted(pin.pinned_token_count for pin in listed)

    assert pins() == [8, 12]
    await_that("the first pin has ended", lambda: pins() == [12])
    call(cachemgr, "olga", "ResetPrefixCache", pool=worker.pool)
    assert (pins(), cached(cachemgr, worker, prompt(1, 3))) == ([], 0)
    tenant.delete()


def test_a_tenant_resets_its_own_content_only(cachemgr: LoneCachemgr, worker: Bookkeeper, begin: Begin) -> None:
    tenant = begin()
    tenant.cache(1, prompt(1, 3))
    assert call(cachemgr, "bob", "ResetPrefixCache", pool=worker.pool, salt=b"").dropped_block_count == 0
    assert cached(cachemgr, worker, prompt(1, 3)) > 0
    assert call(cachemgr, "alice", "ResetPrefixCache", pool=worker.pool, salt=b"").dropped_block_count > 0
    assert cached(cachemgr, worker, prompt(1, 3)) == 0
    tenant.delete()


# -- advice -------------------------------------------------------------------------------------------------------


def cache_with(tenant: Tenant, seq_id: int, tokens: list[int], **fields: Any) -> None:
    """Computes a prompt and lets go of it."""
    assert not tenant.plan(admissions=[{"sequence_id": seq_id, "token_ids": tokens, **fields}]).refusals
    tenant.settle()
    tenant.release(seq_id)


def test_priorities_decide_what_is_evicted(cachemgr: LoneCachemgr, worker: Bookkeeper, begin: Begin) -> None:
    tenant = begin()
    cache_with(tenant, 1, prompt(1, 4), retention=[{"token_count": 8, "priority": 9}, {"priority": 2}])
    cache_with(tenant, 2, prompt(2, 4))
    cache_with(tenant, 3, prompt(3, 4), retention=[{"priority": 1}])
    blocks = call(cachemgr, "alice", "ListBlocks", pool=worker.pool).blocks
    assert sorted(block.priority for block in blocks) == [1] * 4 + [2] * 2 + [5] * 4 + [9] * 2

    def found() -> list[int]:
        return [cached(cachemgr, worker, prompt(seed, 4)) for seed in (1, 2, 3)]

    tenant.admit(4, prompt(4, 4))
    assert found() == [4, 4, 0]
    tenant.admit(5, prompt(5, 3))
    assert found() == [2, 3, 0]
    tenant.admit(6, prompt(6, 3))
    assert found() == [2, 0, 0]
    tenant.settle()
    tenant.delete()


def test_a_priority_ends_with_its_ttl(cachemgr: LoneCachemgr, worker: Bookkeeper, begin: Begin) -> None:
    tenant = begin()
    cache_with(tenant, 1, prompt(1, 2), retention=[{"priority": 9, "ttl": seconds(0.2)}])

    def priorities() -> set[int]:
        return {block.priority for block in call(cachemgr, "alice", "ListBlocks", pool=worker.pool).blocks}

    await_that("nothing is said any more", lambda: priorities() == {5})
    tenant.delete()


def test_who_is_expected_back_is_kept_and_who_is_not_goes_first(
    cachemgr: LoneCachemgr, worker: Bookkeeper, begin: Begin
) -> None:
    tenant = begin()
    for seq_id in (1, 2, 3):
        tenant.admit(seq_id, prompt(seq_id, 4))
    tenant.settle()
    hints = [{"sequence_id": 1, "expected_in": seconds(20)}, {"sequence_id": 3, "not_expected": True}]
    tenant.plan(release_sequence_ids=[1, 2, 3], return_hints=hints)
    tenant.settle()

    def found() -> list[int]:
        return [cached(cachemgr, worker, prompt(seed, 4)) for seed in (1, 2, 3)]

    tenant.admit(4, prompt(4, 4))
    assert found() == [4, 4, 0]
    tenant.admit(5, prompt(5, 4))
    assert found() == [4, 0, 0]
    tenant.settle()
    tenant.delete()


def test_what_a_waiting_prompt_would_find_goes_last_until_it_is_found(
    cachemgr: LoneCachemgr, worker: Bookkeeper, begin: Begin
) -> None:
    tenant = begin()
    for seq_id, retention in ((1, []), (2, [{"priority": 9}]), (3, [])):
        tenant.plan(admissions=[{"sequence_id": seq_id, "token_ids": prompt(seq_id, 4), "retention": retention}])
    tenant.settle()
    waiting = {"token_ids": [*prompt(1, 4), 1], "expected_in": seconds(20)}
    tenant.plan(release_sequence_ids=[1, 2, 3], expected_prompts=[waiting])
    tenant.settle()

    def found() -> list[int]:
        return [cached(cachemgr, worker, prompt(seed, 4)) for seed in (1, 2, 3)]

    def priorities() -> set[int]:
        return {block.priority for block in call(cachemgr, "alice", "ListBlocks", pool=worker.pool).blocks}

    tenant.admit(4, prompt(4, 4))
    tenant.admit(5, prompt(5, 4))
    assert (found(), priorities()) == ([4, 0, 0], {5, 10})
    tenant.settle()
    tenant.plan(release_sequence_ids=[4, 5], admissions=[{"sequence_id": 6, "token_ids": waiting["token_ids"]}])
    assert priorities() == {5}
    tenant.settle()
    tenant.delete()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"admissions": [{"token_ids": [1], "retention": [{"priority": 10}]}]}, "admissions.retention.priority"),
        ({"admissions": [{"token_ids": [1], "retention": [{"priority": 0}]}]}, "admissions.retention.priority"),
        ({"admissions": [{"token_ids": [1], "retention": [{"priority": 5}] * 2}]}, "admissions.retention.token_count"),
        (
            {"admissions": [{"token_ids": [1], "retention": [{"priority": 5, "token_count": -1}]}]},
            "admissions.retention.token_count",
        ),
        (
            {"admissions": [{"token_ids": [1], "retention": [{"priority": 5, "token_count": 1}] * 17}]},
            "admissions.retention",
        ),
        (
            {"admissions": [{"token_ids": [1], "retention": [{"priority": 5, "ttl": seconds(0)}]}]},
            "admissions.retention.ttl",
        ),
        (
            {"admissions": [{"token_ids": [1], "retention": [{"priority": 5, "ttl": seconds(86_401)}]}]},
            "admissions.retention.ttl",
        ),
        ({"return_hints": [{"sequence_id": 1}]}, "return_hints.hint"),
        ({"return_hints": [{"sequence_id": 1, "not_expected": False}]}, "return_hints.hint"),
        ({"return_hints": [{"sequence_id": 1, "expected_in": seconds(-1)}]}, "return_hints.expected_in"),
        ({"expected_prompts": [{"token_ids": [1]}]}, "expected_prompts.expected_in"),
        ({"expected_prompts": [{"expected_in": seconds(86_401)}]}, "expected_prompts.expected_in"),
        ({"expected_prompts": [{"tenant": "x" * 129, "expected_in": seconds(1)}]}, "expected_prompts.tenant"),
    ],
)
def test_advice_that_makes_no_sense_is_refused(begin: Begin, fields: dict[str, Any], field: str) -> None:
    tenant = begin()
    with pytest.raises(grpc.RpcError) as failed:
        tenant.plan(**fields)
    refused = RefusedError.of_call(failed.value)
    assert (refused.reason, refused.metadata["field"]) == ("INVALID_ARGUMENT", field)
    tenant.delete()


# -- counts -------------------------------------------------------------------------------------------------------


def test_who_came_back_is_counted_apart(cachemgr: LoneCachemgr, worker: Bookkeeper, begin: Begin) -> None:
    tenant = begin()
    tenant.cache(1, prompt(1, 3))
    tenant.plan(admissions=[{"sequence_id": 1, "token_ids": [*prompt(1, 3), 4, 5], "resumed": True}])
    (statistics,) = call(cachemgr, "olga", "GetStatistics", pool=worker.pool).pools
    assert (statistics.admission_count, statistics.admitted_token_count, statistics.cached_token_count) == (1, 12, 0)
    resumed = (statistics.resumed_token_count, statistics.resumed_cached_token_count)
    assert (statistics.resumed_admission_count, *resumed) == (1, 14, 12)
    tenant.settle()
    tenant.delete()


# -- kept prefixes ------------------------------------------------------------------------------------------------


def keeping(seq_id: int, tokens: list[int], *breakpoints: int, ttl_s: float = 60, **fields: Any) -> dict[str, Any]:
    kept = [{"token_count": count, "ttl": seconds(ttl_s)} for count in breakpoints]
    return {"sequence_id": seq_id, "token_ids": tokens, "breakpoints": kept, **fields}


def test_what_a_breakpoint_keeps_is_evicted_last_and_its_tenant_sees_how_much(
    cachemgr: LoneCachemgr, worker: Bookkeeper, begin: Begin
) -> None:
    tenant, kept = begin(), prompt(1, 3)
    answer = tenant.plan(admissions=[keeping(1, [*kept, 5], 6, 12)])
    assert (list(answer.admitted_written_token_counts), list(answer.admitted_kept_token_counts)) == ([12], [12])
    tenant.settle()
    tenant.plan(release_sequence_ids=[1])
    tenant.settle()
    shown = use(cachemgr, worker, "alice")
    assert (shown.kept_block_count, shown.keep_limit_block_count) == (3, 3), "a quarter of 12 blocks"
    assert (shown.admitted_token_count, shown.written_token_count, shown.cached_token_count) == (13, 12, 0)
    assert shown.next_keep_end_time.ToNanoseconds() > 0
    tenant.cache(2, prompt(2, 9))
    tenant.cache(3, prompt(3, 9))
    assert cached(cachemgr, worker, kept) == 3
    priorities = [block.priority for block in call(cachemgr, "alice", "ListBlocks", pool=worker.pool).blocks]
    assert priorities.count(11) == 3
    answer = tenant.plan(admissions=[keeping(4, prompt(4, 5), 20)])
    assert list(answer.admitted_kept_token_counts) == [12], "no more than the limit, from the beginning on"
    tenant.settle()
    assert use(cachemgr, worker, "alice").kept_block_count == 3
    tenant.delete()


def test_the_sums_of_answers_are_the_books_counters(cachemgr: LoneCachemgr, worker: Bookkeeper, begin: Begin) -> None:
    tenant, sums = begin(), [0, 0, 0]
    for seq_id, tokens in enumerate([prompt(1, 3), [*prompt(1, 3), 5], prompt(2, 2), [*prompt(1, 2), 6, 6]]):
        answer = tenant.plan(admissions=[keeping(seq_id, tokens, 4)], release_sequence_ids=[seq_id - 1])
        sums[0] += len(tokens)
        sums[1] += sum(answer.admitted_cached_token_counts)
        sums[2] += sum(answer.admitted_written_token_counts)
        tenant.settle()
    (refused,) = refusals(tenant.plan(admissions=[keeping(3, prompt(9, 3), 4)]))
    assert refused.reason == "SEQUENCE_EXISTS"
    tenant.plan(release_sequence_ids=[3], admissions=[keeping(5, prompt(9, 3), 4, resumed=True)])
    shown = use(cachemgr, worker, "alice")
    assert [shown.admitted_token_count, shown.cached_token_count, shown.written_token_count] == sums
    (statistics,) = call(cachemgr, "olga", "GetStatistics", pool=worker.pool).pools
    assert [statistics.admitted_token_count, statistics.cached_token_count, statistics.written_token_count] == sums
    for _ in range(2):
        tenant.settle()
    tenant.delete()


def test_a_breakpoint_that_cant_be_is_refused_by_its_field(
    cachemgr: LoneCachemgr, worker: Bookkeeper, begin: Begin
) -> None:
    tenant, tokens = begin(), prompt(1, 2)
    wrong: list[tuple[dict[str, Any], str, str]] = [
        (keeping(1, tokens, 0), "admissions.breakpoints.token_count", "1 to 8"),
        (keeping(1, tokens, 9), "admissions.breakpoints.token_count", "1 to 8"),
        (keeping(1, tokens, 4, 4), "admissions.breakpoints.token_count", "5 to 8"),
        (keeping(1, tokens, 1, 2, 3, 4, 5), "admissions.breakpoints", "at most 4 entries"),
        (keeping(1, tokens, 4, ttl_s=0.5), "admissions.breakpoints.ttl", "1 s to 86400 s"),
        (keeping(1, tokens, 4, ttl_s=86401), "admissions.breakpoints.ttl", "1 s to 86400 s"),
        ({**keeping(1, tokens), "breakpoints": [{"token_count": 4}]}, "admissions.breakpoints.ttl", "1 s to 86400 s"),
        (keeping(1, tokens, 4, cache_use="CACHE_USE_NONE"), "admissions.breakpoints", "empty with CACHE_USE_NONE"),
    ]
    for admission, field, limit in wrong:
        with pytest.raises(grpc.RpcError) as failed:
            tenant.plan(admissions=[admission])
        refused = RefusedError.of_call(failed.value)
        assert (refused.reason, refused.metadata["field"], refused.metadata["limit"]) == (
            "INVALID_ARGUMENT",
            field,
            limit,
        )
    tenant.delete()


def test_one_lease_waits_for_what_another_computes_and_is_told_why_it_found_no_more(
    cachemgr: LoneCachemgr, worker: Bookkeeper, begin: Begin
) -> None:
    first, second, other = begin(), begin(), begin("bob")
    tokens = [*prompt(1, 3), 5]
    first.plan(admissions=[keeping(1, tokens)])
    (refused,) = refusals(second.plan(admissions=[keeping(1, tokens, waits_for_prefix=True)]))
    assert (refused.reason, refused.code) == ("PREFIX_BEING_COMPUTED", grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert (refused.metadata, refused.retry_delay_s is not None) == ({"sequence_id": "1", "tokens": "0"}, True)
    second.settle()
    answer = other.plan(admissions=[keeping(1, tokens, waits_for_prefix=True, explains_miss=True)])
    (miss,) = answer.admitted_misses
    assert (miss.sequence_id, miss.missing_block_index) == (1, 0)
    assert miss.reason == cache_service_pb2.MISS_REASON_NEVER_COMPUTED, "nothing of another tenant"
    first.settle()
    answer = second.plan(admissions=[keeping(1, [*tokens, 5, 5, 5, 5], waits_for_prefix=True, explains_miss=True)])
    assert list(answer.admitted_cached_token_counts) == [12]
    assert [miss.missing_block_index for miss in answer.admitted_misses] == [3]
    for tenant in (second, other):
        tenant.settle()
        tenant.delete()
    first.delete()
    call(cachemgr, "alice", "ResetPrefixCache", pool=worker.pool, token_ids=prompt(1, 1))
    third = begin()
    (miss,) = third.plan(admissions=[keeping(1, tokens, explains_miss=True)]).admitted_misses
    assert (miss.reason, miss.HasField("lost_time")) == (cache_service_pb2.MISS_REASON_RESET, True)
    assert (miss.reset_by, miss.HasField("evicted_by_tenant")) == ("alice", False)
    third.settle()
    call(cachemgr, "olga", "ResetPrefixCache", pool=worker.pool, tenant="alice")
    (miss,) = third.plan(admissions=[keeping(2, tokens, explains_miss=True)]).admitted_misses
    assert (miss.reason, miss.HasField("reset_by")) == (cache_service_pb2.MISS_REASON_RESET, False)
    third.settle()
    third.delete()


def test_a_reset_ends_what_is_kept_and_its_tenant_is_told_by_whom(
    cachemgr: LoneCachemgr, worker: Bookkeeper, begin: Begin
) -> None:
    tenant, tokens = begin(), [*prompt(1, 2), 5]
    tenant.plan(admissions=[keeping(1, tokens, 8)])
    tenant.settle()
    call(cachemgr, "alice", "ResetPrefixCache", pool=worker.pool, tenant="alice")
    shown = use(cachemgr, worker, "alice")
    assert (shown.kept_block_count, shown.HasField("next_keep_end_time")) == (0, False)
    told = call(cachemgr, "alice", "ExplainPrefix", pool=worker.pool, token_ids=tokens)
    assert (told.reason, told.reset_by, told.epoch) == (cache_service_pb2.MISS_REASON_RESET, "alice", worker.epoch)
    assert 0 < told.epoch_time.ToNanoseconds() < told.lost_time.ToNanoseconds()
    tenant.plan(release_sequence_ids=[1])
    tenant.settle()
    tenant.plan(admissions=[keeping(2, tokens, 8)])
    tenant.settle()
    call(cachemgr, "olga", "ResetPrefixCache", pool=worker.pool)
    assert call(cachemgr, "alice", "ExplainPrefix", pool=worker.pool, token_ids=tokens).reset_by == ""
    by_operator = call(cachemgr, "olga", "ExplainPrefix", pool=worker.pool, token_ids=tokens, tenant="alice")
    assert by_operator.reset_by == "olga"
    tenant.delete()
