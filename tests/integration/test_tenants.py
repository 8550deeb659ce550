"""Tenants' shares through a real cachemgr: floors, quotas, limits, and who is told of whom."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
from integration.protocol_client import RefusedError, await_that

TENANTS = """
[tenants.bob]
floor = 3
quota = 4
limit = 6
pin_budget = 2
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
