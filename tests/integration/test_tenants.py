"""Tenants' shares through a real cachemgr: floors, quotas, limits, and the visibility of other tenants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from integration.lone_cachemgr import (
    BLOCK_SIZE,
    Begin,
    Bookkeeper,
    LoneCachemgr,
    cached,
    call,
    prompt,
    reasons,
    refusals,
    use,
)
from integration.protocol_client import DEADLINE_S, RefusedError, await_that

from quire.cache.v1 import cache_service_pb2

TENANTS = """
[tenants.bob]
floor = 3
quota = 4
limit = 6
pin_budget = 2
adapters = ["sql"]
"""


@pytest.fixture(scope="module")
def tenants_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    path.write_text(TENANTS)
    return path


@pytest.fixture(scope="module")
def cachemgr(tmp_path_factory: pytest.TempPathFactory, tenants_file: Path) -> Iterator[LoneCachemgr]:
    cachemgr = LoneCachemgr(tmp_path_factory.mktemp("cachemgr"), "--tenants", str(tenants_file)).start()
    yield cachemgr
    cachemgr.close()


def test_a_floor_is_kept_free_and_a_limit_is_not_passed(
    cachemgr: LoneCachemgr, worker: Bookkeeper, begin: Begin
) -> None:
    alice, bob = begin(), begin("bob")
    share = use(cachemgr, worker, "bob")
    assert (share.floor_block_count, share.quota_block_count, share.limit_block_count) == (3, 4, 6)
    assert (share.pin_budget_block_count, share.lease_count) == (2, 1)
    (refused,) = refusals(alice.plan(admissions=[{"sequence_id": 1, "token_ids": prompt(1, 10)}]))
    assert (refused.reason, refused.metadata["limited_by"], refused.metadata["limit"]) == (
        "SEQUENCE_TOO_LONG",
        "tenant",
        str(9 * BLOCK_SIZE),
    )
    alice.admit(1, prompt(1, 6))
    assert reasons(alice.plan(admissions=[{"sequence_id": 2, "token_ids": prompt(2, 4)}])) == ["OUT_OF_BLOCKS"]
    alice.admit(2, prompt(2, 3))
    bob.admit(1, prompt(1, 3))
    (refused,) = refusals(bob.plan(admissions=[{"sequence_id": 2, "token_ids": prompt(2, 4)}]))
    assert (refused.reason, refused.code) == ("QUOTA_EXCEEDED", grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert (refused.metadata["held"], refused.metadata["limit"], refused.metadata["needed"]) == ("3", "6", "4")
    assert reasons(bob.plan(admissions=[{"sequence_id": 2, "token_ids": prompt(2, 2)}])) == ["OUT_OF_BLOCKS"]
    for tenant in (alice, bob):
        tenant.settle()
        tenant.delete()


def test_over_the_quota_ones_own_cached_blocks_go_first(
    cachemgr: LoneCachemgr, worker: Bookkeeper, begin: Begin
) -> None:
    alice, bob = begin(), begin("bob")
    alice.cache(1, prompt(1, 4))
    bob.cache(1, prompt(1, 5))
    assert use(cachemgr, worker, "bob").cached_block_count == 5, "nobody else needs them"
    alice.cache(2, prompt(2, 3))

    def found() -> tuple[int, int, int]:
        return (
            cached(cachemgr, worker, prompt(1, 4)),
            cached(cachemgr, worker, prompt(2, 3)),
            cached(cachemgr, worker, prompt(1, 5), "bob"),
        )

    assert found() == (4, 3, 5)
    bob.admit(2, prompt(2, 2))
    assert found() == (4, 3, 3), "though alice's are older"
    alice.admit(3, prompt(3, 1))
    assert found() == (4, 3, 2), "and for others too"
    alice.admit(4, prompt(4, 2))
    assert found() == (2, 3, 2), "within the quota all are alike"
    for tenant in (alice, bob):
        tenant.settle()
        tenant.delete()


def test_a_tenant_is_told_of_itself_alone(cachemgr: LoneCachemgr, worker: Bookkeeper, begin: Begin) -> None:
    alice = begin()
    alice.admit(1, prompt(1, 2))
    for caller, names in (("alice", ["alice"]), ("bob", ["bob"]), ("carla", []), ("olga", ["alice", "bob"])):
        listed = call(cachemgr, caller, "ListTenants", pool=worker.pool).tenants
        assert [tenant.name for tenant in listed] == names, caller
    first = call(cachemgr, "olga", "ListTenants", pool=worker.pool, page_size=1)
    second = call(cachemgr, "olga", "ListTenants", pool=worker.pool, page_size=1, page_token=first.next_page_token)
    assert [each.tenants[0].name for each in (first, second)] == ["alice", "bob"]
    assert not second.next_page_token
    with pytest.raises(RefusedError) as failed:
        call(cachemgr, "olga", "ListTenants", pool=worker.pool, page_token="nff")
    assert failed.value.metadata["field"] == "page_token"
    alice.settle()
    alice.delete()


def test_shares_are_read_again_while_it_runs(
    cachemgr: LoneCachemgr, worker: Bookkeeper, begin: Begin, tenants_file: Path
) -> None:
    bob = begin("bob")
    bob.admit(1, prompt(1, 5))
    try:
        tenants_file.write_text(TENANTS.replace("limit = 6", "limit = 5"))
        await_that("the new limit is known", lambda: use(cachemgr, worker, "bob").limit_block_count == 5)
        assert reasons(bob.plan(admissions=[{"sequence_id": 2, "token_ids": prompt(2, 1)}])) == ["QUOTA_EXCEEDED"]
        tenants_file.write_text("[tenants.bob]\nlimt = 7\n")
        await_that("the mistake is logged", lambda: "limt" in cachemgr.log())
        assert use(cachemgr, worker, "bob").limit_block_count == 5
    finally:
        tenants_file.write_text(TENANTS)
    await_that("the old limit is back", lambda: use(cachemgr, worker, "bob").limit_block_count == 6)
    assert reasons(bob.plan(admissions=[{"sequence_id": 2, "token_ids": prompt(2, 1)}])) == []
    bob.settle()
    bob.delete()


# -- tenants of one lease -------------------------------------------------------------------------------------------


def named(tenant: str, seq_id: int, tokens: list[int], **fields: Any) -> dict[str, Any]:
    return {"sequence_id": seq_id, "token_ids": tokens, "tenant": tenant, **fields}


def test_two_tenants_in_one_plan_share_nothing_and_each_is_held_to_its_own_share(
    cachemgr: LoneCachemgr, worker: Bookkeeper, begin: Begin
) -> None:
    gina = begin("gina")
    plan = gina.plan(admissions=[named("alice", 1, prompt(1, 2)), named("bob", 2, prompt(1, 2))])
    assert not plan.refusals
    tables = dict(zip(plan.admitted_sequence_ids, plan.admitted_cached_token_counts, strict=True))
    assert tables == {1: 0, 2: 0}, "neither finds what the other one computes"
    gina.settle()
    found = {name: cached(cachemgr, worker, prompt(1, 2), name) for name in ("alice", "bob", "gina")}
    assert found == {"alice": 2, "bob": 2, "gina": 0}
    held = {name: use(cachemgr, worker, name) for name in ("alice", "bob", "gina")}
    assert {name: (each.held_block_count, each.lease_count) for name, each in held.items()} == {
        "alice": (2, 0),
        "bob": (2, 0),
        "gina": (0, 1),
    }
    plan = gina.plan(
        admissions=[named("bob", 3, prompt(2, 5)), named("alice", 4, prompt(2, 5)), named("bob", 5, prompt(1, 2))]
    )
    (refused,) = refusals(plan)
    assert (refused.reason, refused.metadata["sequence_id"], refused.metadata["limit"]) == ("QUOTA_EXCEEDED", "3", "6")
    assert list(plan.admitted_sequence_ids) == [4, 5]
    gina.settle()
    forked = gina.plan(forks=[{"parent_sequence_id": 2, "child_sequence_ids": [6], "token_count": 3}])
    assert not forked.refusals
    gina.settle()
    tenants = {
        each.sequence_id: each.tenant for each in call(cachemgr, "gina", "ListSequences", pool=worker.pool).sequences
    }
    assert tenants == {1: "alice", 2: "bob", 4: "alice", 5: "bob", 6: "bob"}
    gina.release(1, 2, 4, 5, 6)
    assert [use(cachemgr, worker, name).held_block_count for name in ("alice", "bob", "gina")] == [0, 0, 0]
    assert not call(cachemgr, "olga", "AuditPool", pool=worker.pool).violations
    gina.delete()


def test_who_is_no_gateway_names_no_other_tenant_and_loses_that_admission_alone(
    cachemgr: LoneCachemgr, worker: Bookkeeper, begin: Begin
) -> None:
    alice = begin()
    plan = alice.plan(admissions=[named("bob", 1, prompt(1, 1)), named("alice", 2, prompt(1, 1))])
    (refused,) = refusals(plan)
    assert (refused.reason, refused.code) == ("ROLE_MISSING", grpc.StatusCode.PERMISSION_DENIED)
    assert refused.metadata == {"sequence_id": "1", "roles": "gateway", "name": "alice"}
    assert list(plan.admitted_sequence_ids) == [2]
    alice.settle()
    asked = {"pool": worker.pool, "token_ids": prompt(1, 1), "tenant": "alice"}
    check = {"pool": worker.pool, "admission": named("alice", 0, prompt(1, 1))}
    for method, fields in (
        ("LookupPrefix", asked),
        ("ExplainPrefix", asked),
        ("CheckAdmission", check),
        ("PinPrefix", asked),
        ("ListPins", {"pool": worker.pool, "tenant": "alice"}),
        ("UnpinPrefix", {"pool": worker.pool, "pin_id": "0" * 32, "tenant": "alice"}),
        ("ResetPrefixCache", asked),
    ):
        with pytest.raises(RefusedError) as failed:
            call(cachemgr, "bob", method, **fields)
        assert (failed.value.reason, failed.value.metadata["roles"]) == ("ROLE_MISSING", "gateway,operator"), method
        call(cachemgr, "gina", method, **fields)
    asked_to_watch = cache_service_pb2.WatchBlocksRequest(pool=worker.pool, tenant="alice")
    with pytest.raises(grpc.RpcError) as ended:
        next(cachemgr.stub("bob").WatchBlocks(asked_to_watch, timeout=DEADLINE_S))
    error = RefusedError.of_call(ended.value)
    assert (error.reason, error.metadata["roles"]) == ("ROLE_MISSING", "gateway,operator")
    assert cached(cachemgr, worker, prompt(1, 1)) == 0, "the gateway has reset it"
    with pytest.raises(grpc.RpcError) as refused_call:
        alice.plan(admissions=[named("b" * 129, 3, [1])])
    assert "admissions.tenant is 129 characters; must be at most 128" in refused_call.value.details()
    (found,) = call(cachemgr, "gina", "CheckAdmission", **check | {"admission": named("bob", 0, prompt(1, 7))}).checks
    assert found.refusal.reason == "SEQUENCE_TOO_LONG", "by bob's limit"
    alice.delete()


def test_a_tenant_sees_the_adapters_that_it_may_use_and_others_do_not_exist_for_it(cachemgr: LoneCachemgr) -> None:
    """In the pool, in lists and watches of pools, in a dry run and in what looks at prefixes: each as in a plan."""
    adapters = {"sql": b"s" * 32, "text": b"t" * 32}
    worker = Bookkeeper(cachemgr, "adapted", epoch=1, adapters=adapters)

    def shown(caller: str) -> set[tuple[str, ...]]:
        watch = cachemgr.stub(caller).WatchPools(cache_service_pb2.WatchPoolsRequest(), timeout=DEADLINE_S)
        pools = [call(cachemgr, caller, "GetPool", pool=worker.pool).pool]
        pools += [each for each in call(cachemgr, caller, "ListPools").pools if each.name == worker.pool]
        pools += [each for each in next(watch).pools if each.name == worker.pool]
        watch.cancel()
        assert len(pools) == 3
        return {tuple(adapter.name for adapter in pool.adapters.adapters) for pool in pools}

    both = {("sql", "text")}
    assert {name: shown(name) for name in ("olga", "gina", "alice", "bob")} == {
        **dict.fromkeys(("olga", "gina", "alice"), both),
        "bob": {("sql",)},
    }
    asked = {"pool": worker.pool, "token_ids": prompt(1, 1)}
    limits = set()
    for adapter in (adapters["text"], b"x" * 32):
        admission = {"token_ids": prompt(1, 1), "adapter": adapter}
        (check,) = call(cachemgr, "bob", "CheckAdmission", pool=worker.pool, admission=admission).checks
        assert (check.accepted, check.refusal.reason) == (False, "INVALID_ARGUMENT")
        limits.add(check.refusal.metadata["limit"])
        for method in ("LookupPrefix", "ExplainPrefix", "PinPrefix"):
            with pytest.raises(RefusedError) as refused:
                call(cachemgr, "bob", method, **asked, adapter=adapter)
            assert (refused.value.reason, refused.value.metadata["field"]) == ("INVALID_ARGUMENT", "adapter")
            limits.add(refused.value.metadata["limit"])
    assert limits == {f"one of the 1 adapters of the pool's worker, like sql ({adapters['sql'].hex()})"}
    for caller, adapter in (("alice", adapters["text"]), ("bob", adapters["sql"])):
        (match,) = call(cachemgr, caller, "LookupPrefix", **asked, adapter=adapter).matches
        assert match.pool == worker.pool
    call(cachemgr, "bob", "ResetPrefixCache", pool=worker.pool, adapter=adapters["text"])
    worker.detach()


def test_a_tenant_sees_its_own_sequences_and_blocks_in_the_lease_of_a_gateway(
    cachemgr: LoneCachemgr, worker: Bookkeeper, begin: Begin
) -> None:
    gina = begin("gina")
    gina.plan(
        admissions=[named("alice", 1, prompt(1, 2)), named("bob", 2, prompt(1, 1)), named("gina", 3, prompt(1, 3))]
    )
    gina.settle()

    def listed(caller: str, **fields: Any) -> list[tuple[str, int]]:
        sequences = call(cachemgr, caller, "ListSequences", pool=worker.pool, **fields).sequences
        return [(each.tenant, each.sequence_id) for each in sequences]

    everything = [("alice", 1), ("bob", 2), ("gina", 3)]
    assert (listed("alice"), listed("bob"), listed("carla")) == ([("alice", 1)], [("bob", 2)], [])
    assert (listed("gina"), listed("olga")) == (everything, everything)
    assert (listed("bob", tenant="alice"), listed("gina", tenant="alice")) == ([], [("alice", 1)])
    (shown,) = call(cachemgr, "bob", "ListSequences", pool=worker.pool).sequences
    for given in (shown.lease_id_prefix, gina.lease_id):
        sequence = call(cachemgr, "bob", "GetSequence", lease_id=given, sequence_id=2).sequence
        assert (sequence.tenant, len(sequence.block_ids)) == ("bob", 1)
        with pytest.raises(RefusedError) as failed:
            call(cachemgr, "bob", "GetSequence", lease_id=given, sequence_id=1)
        assert failed.value.reason == "SEQUENCE_NOT_FOUND"
        with pytest.raises(RefusedError) as failed:
            call(cachemgr, "carla", "GetSequence", lease_id=given, sequence_id=2)
        assert failed.value.reason == "LEASE_NOT_FOUND"
    blocks = {name: call(cachemgr, name, "ListBlocks", pool=worker.pool).blocks for name in ("alice", "bob", "carla")}
    assert {name: [each.tenant for each in shown] for name, shown in blocks.items()} == {
        "alice": ["alice"] * 2,
        "bob": ["bob"],
        "carla": [],
    }
    # The tenant itself, and a gateway and an operator that name it, are told of its blocks and of no other's.
    watches = [
        cachemgr.stub(caller).WatchBlocks(
            cache_service_pb2.WatchBlocksRequest(pool=worker.pool, tenant=tenant), timeout=DEADLINE_S
        )
        for caller, tenant in (("bob", None), ("gina", "bob"), ("olga", "bob"))
    ]
    for watch in watches:
        told = []
        while not (answer := next(watch)).cursor:
            told += [event.block.tenant for event in answer.events]
        assert set(told + [event.block.tenant for event in answer.events]) == {"bob"}
    gina.release(1)
    gina.release(2)
    for watch in watches:
        (event,) = next(watch).events
        assert (event.block.tenant, event.block.state) == ("bob", cache_service_pb2.BLOCK_STATE_CACHED)
        watch.cancel()
    assert call(cachemgr, "bob", "PinPrefix", pool=worker.pool, token_ids=prompt(1, 1)).pinned_token_count
    with pytest.raises(RefusedError) as failed:
        call(cachemgr, "carla", "PinPrefix", pool=worker.pool, token_ids=prompt(1, 1))
    assert failed.value.reason == "PREFIX_NOT_CACHED", "it is another tenant's"
    gina.settle()
    gina.delete()


def test_a_gateway_pins_for_the_tenants_that_it_serves(
    cachemgr: LoneCachemgr, worker: Bookkeeper, begin: Begin
) -> None:
    gina = begin("gina")
    gina.plan(admissions=[named("alice", 1, prompt(1, 2)), named("bob", 2, prompt(1, 3))])
    gina.settle()
    gina.release(1, 2)

    def pin(caller: str, num_blocks: int, **fields: Any) -> cache_service_pb2.PinPrefixResponse:
        return call(cachemgr, caller, "PinPrefix", pool=worker.pool, token_ids=prompt(1, num_blocks), **fields)

    def pinned(caller: str, **fields: Any) -> list[tuple[str, int]]:
        pins = call(cachemgr, caller, "ListPins", pool=worker.pool, **fields).pins
        return sorted((pin.tenant, pin.pinned_token_count // BLOCK_SIZE) for pin in pins)

    def refusal_of(caller: str, num_blocks: int, **fields: Any) -> str:
        with pytest.raises(RefusedError) as failed:
            pin(caller, num_blocks, **fields)
        return failed.value.reason

    assert refusal_of("gina", 1) == "PREFIX_NOT_CACHED", "nothing of this is its own"
    assert refusal_of("gina", 1, tenant="nobody") == "PREFIX_NOT_CACHED"
    assert refusal_of("gina", 3, tenant="bob") == "PIN_BUDGET_SPENT", "bob's budget is 2"
    of_bob, of_alice = pin("gina", 2, tenant="bob"), pin("olga", 1, tenant="alice")
    assert (of_bob.pinned_block_count, of_bob.pin_budget_block_count) == (2, 2)
    assert pin("bob", 2, tenant="bob").pin_id == of_bob.pin_id, "the tenant's own pin of the same prefix is the same"
    held = {name: use(cachemgr, worker, name) for name in ("alice", "bob", "gina")}
    counts = {name: (each.held_block_count, each.pinned_block_count) for name, each in held.items()}
    assert counts == {"alice": (1, 1), "bob": (2, 2), "gina": (0, 0)}
    everything = [("alice", 1), ("bob", 2)]
    assert (pinned("olga"), pinned("gina"), pinned("bob")) == (everything, [], everything[1:])
    assert (pinned("gina", tenant="bob"), pinned("olga", tenant="alice")) == (everything[1:], everything[:1])

    def unpin(caller: str, pin_id: str, **fields: Any) -> None:
        call(cachemgr, caller, "UnpinPrefix", pool=worker.pool, pin_id=pin_id, **fields)

    unpin("gina", of_bob.pin_id)
    unpin("gina", of_bob.pin_id, tenant="alice")
    assert pinned("olga") == everything, "it is neither gina's nor alice's"
    unpin("gina", of_bob.pin_id, tenant="bob")
    assert pinned("olga") == everything[:1]
    unpin("olga", of_alice.pin_id)
    assert pinned("olga") == []
    assert not call(cachemgr, "olga", "AuditPool", pool=worker.pool).violations
    gina.delete()
