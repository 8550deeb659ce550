"""Listings of the ledger and the catalog: lists in order, blocks and changes as messages, reasons of misses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from hashlib import sha256
from typing import Any

import grpc
import pytest
from planning import Admission, StepOutcome, StepRequest, plan_step, report_of, sequence_of

from quire.cache.v1 import cache_service_pb2
from quire.cachemgr import _core
from quire.cachemgr._core import Ledger
from quire.cachemgr.blocks import BlockState
from quire.cachemgr.catalog import AttachedPool, Catalog, Registration, leases_from
from quire.cachemgr.errors import CallRefused, Reason
from quire.cachemgr.geometry import Geometry
from quire.cachemgr.metrics import layer_group_families
from quire.cachemgr.service import messages
from quire.cachemgr.service.messages import int32_bytes, statistics_of
from quire.cachemgr.service.servicer import CacheServicer
from quire.serving.access import Identity, Role, set_caller
from quire.serving.errors import CallEnded

EPOCH = 5
GEOMETRY = Geometry(
    block_size=2,
    num_blocks=9,
    block_bytes=64,
    max_sequences=64,
    max_sequence_tokens=16,
    vocab_size=100,
    model="m",
    model_fingerprint="f",
)


def make_ledger(**leases: str) -> Ledger:
    """With leases by their tenants."""
    ledger = Ledger("pool", EPOCH, GEOMETRY, policy="lru", verify=True)
    for lease_id, tenant in leases.items():
        ledger.open_lease(lease_id, ttl_s=10.0, now=0.0, tenant=tenant)
    return ledger


def admit(
    ledger: Ledger,
    lease_id: str,
    seq_id: int,
    *tokens: int,
    salt: bytes = b"",
    adapter: bytes = b"",
    now: float = 1.0,
) -> None:
    """A step in flight."""
    request = StepRequest(admissions=[Admission(seq_id, int32_bytes(tokens), salt=salt, adapter=adapter)])
    assert not plan_step(ledger, lease_id, request, now=now).has_refusals


def settle(ledger: Ledger, lease_id: str) -> None:
    """The lease's first step in flight is skipped if it runs nothing, else computed."""
    (step, *_) = ledger.probe.steps_in_flight(lease_id)
    if not step.run_seq_ids:
        ledger.settle(report_of(lease_id, step.step_number, StepOutcome.SKIPPED))
        return
    sequences = [sequence_of(ledger, lease_id, seq_id) for seq_id in step.run_seq_ids]
    ledger.settle(
        report_of(
            *(lease_id, step.step_number, StepOutcome.COMPUTED),
            seq_ids=step.run_seq_ids,
            token_counts=[sequence.num_scheduled for sequence in sequences],
            sampled_ids=step.run_seq_ids,
            sampled_tokens=[9] * len(sequences),
        )
    )


def cache(ledger: Ledger, lease_id: str, *tokens: int, salt: bytes = b"", adapter: bytes = b"") -> None:
    """Computed, and let go of."""
    admit(ledger, lease_id, 1, *tokens, salt=salt, adapter=adapter)
    settle(ledger, lease_id)
    plan_step(ledger, lease_id, StepRequest(releases=[1]), now=1.0)
    settle(ledger, lease_id)


# -- leases -------------------------------------------------------------------------------------------------------


def in_order(lease_ids: Iterable[str]) -> list[str]:
    return sorted(lease_ids, key=page_key)


def page_key(lease_id: str) -> str:
    return sha256(lease_id.encode()).hexdigest()[:24]


def test_leases_are_in_the_order_of_their_keys_whatever_comes_and_goes() -> None:
    ledger, present, rng = make_ledger(), set(), random.Random(1)
    for number in range(300):
        if present and rng.random() < 0.4:
            gone = rng.choice(sorted(present))
            present.remove(gone)
            ledger.lease_fenced(gone)
        else:
            present.add(str(number))
            ledger.open_lease(str(number), ttl_s=1.0, now=1.0)
        key = page_key(str(rng.randrange(400)))
        expected = [lease_id for lease_id in in_order(present) if page_key(lease_id) >= key]
        assert [lease.lease_id for _, lease in leases_from(ledger, key)] == expected
        assert [lease.lease_id for _, lease in ledger.inspector.leases_from(key, 3)] == expected[:3]
    assert [key for key, _ in leases_from(ledger, "")] == [page_key(lease_id) for lease_id in in_order(present)]


def test_a_ledger_lists_its_leases_from_a_key_on_and_forgets_those_that_are_fenced() -> None:
    ledger = make_ledger(a="", b="", c="", d="")
    ordered = in_order("abcd")
    ledger.end_lease(ordered[1])
    listed = [lease.lease_id for _, lease in leases_from(ledger, page_key(ordered[1]))]
    assert listed == ordered[1:]
    ledger.lease_fenced(ordered[1])
    ledger.lease_fenced(ordered[1])
    assert [lease.lease_id for _, lease in leases_from(ledger, "")] == [ordered[0], *ordered[2:]]


def test_of_one_lease_a_ledger_lists_that_one() -> None:
    ledger = make_ledger(a="", b="", c="")
    first, second, _ = in_order("abc")
    listed = [[lease.lease_id for _, lease in leases_from(ledger, page_key(second), only=only)] for only in "abcd"]
    assert [only for only, found in zip("abcd", listed, strict=True) if found] == sorted({*"abc"} - {first})
    assert all(found in ([], [only]) for only, found in zip("abcd", listed, strict=True))


def attach(catalog: Catalog, pool: str, *, epoch: int = EPOCH) -> AttachedPool:
    registration = Registration(pool, epoch, 0, 0, GEOMETRY, "nowhere")
    attached = catalog.register(registration, signing_key=b"k")
    assert attached is not None
    return attached


def test_leases_of_several_pools_are_in_one_order_behind_a_key() -> None:
    catalog = Catalog(1, verify=True)
    pools = [attach(catalog, name) for name in "xy"]
    for number in range(12):
        catalog.open_lease(pools[number % 2], str(number), ttl_s=1.0, now=0.0)
    ordered = in_order(map(str, range(12)))
    ledgers = [pool.ledger for pool in pools]
    assert [lease.lease_id for _, lease in catalog.leases_after("", ledgers)] == ordered
    assert [lease.lease_id for _, lease in catalog.leases_after(page_key(ordered[4]), ledgers)] == ordered[5:]
    assert [lease.pool for _, lease in catalog.leases_after("", ledgers[:1])] == ["x"] * 6


@pytest.mark.parametrize(
    ("caller", "given", "num_tokens"),
    [("alice", "a", 3), ("bob", "a", 5), ("olga", "a", None), ("olga", "b", 7), ("alice", "b", None)],
)
def test_a_lease_is_known_by_its_beginning_if_the_caller_sees_no_other_like_it(
    caller: str, given: str, num_tokens: int | None
) -> None:
    catalog = Catalog(1, verify=True)
    leases = (("a", "alice", 3), ("a", "bob", 5), ("b", "bob", 7))
    for number, (beginning, tenant, length) in enumerate(leases):
        pool, lease_id = attach(catalog, f"pool-{number}"), beginning * 8 + f"{number:024x}"
        catalog.open_lease(pool, lease_id, ttl_s=10.0, now=0.0, tenant=tenant)
        admit(pool.ledger, lease_id, 1, *range(length - 1))
    roles = frozenset({Role.OPERATOR if caller == "olga" else Role.CLIENT})
    assert num_tokens_of(catalog, Identity(caller, roles), given * 8) == num_tokens


def num_tokens_of(catalog: Catalog, identity: Identity, lease_id: str) -> int | None:
    """Tokens of sequence 1, the one that is being sampled too; None if the lease is not found."""
    request = cache_service_pb2.GetSequenceRequest(lease_id=lease_id, sequence_id=1)

    async def ask() -> int | None:
        set_caller(identity)
        no_context: Any = None
        try:
            answer = await CacheServicer(catalog, clock=lambda: 1.0).GetSequence(request, no_context)
        except CallEnded as ended:
            if ended.error.code is not grpc.StatusCode.NOT_FOUND:
                raise
            return None
        return answer.sequence.token_count

    return asyncio.run(ask())


# -- sequences and blocks -----------------------------------------------------------------------------------------


def test_sequences_are_listed_by_id_with_their_size() -> None:
    ledger = make_ledger(a="")
    for seq_id in (7, 2**31 - 1, 3):
        admit(ledger, "a", seq_id, 1, 2, 3)
    listed = ledger.inspector.sequences_from("a", 4, 9)
    assert [(view.seq_id, view.num_blocks) for view in listed] == [(7, 2), (2**31 - 1, 2)]
    assert [view.seq_id for view in ledger.inspector.sequences_from("a", 0, 2)] == [3, 7]
    assert ledger.inspector.sequences_from("a", 2**31, 9) == ledger.inspector.sequences_from("b", 0, 9) == []


def listed(ledger: Ledger, first: int = 0, most: int = 99, **filters: object) -> tuple[list[int], int | None]:
    filters = {"state": None, "tenant": None, "lease_id": None} | filters
    blocks, following = ledger.inspector.list_blocks(first, most, **filters)  # type: ignore[arg-type]
    page = cache_service_pb2.ListBlocksResponse.FromString(blocks)
    return [block.block_id for block in page.blocks], following


def test_blocks_are_listed_as_the_message_that_the_proto_says() -> None:
    ledger = make_ledger(a="älice", b="bob")
    cache(ledger, "a", 1, 2, 3)
    admit(ledger, "b", 1, 4)
    response = cache_service_pb2.ListBlocksResponse()
    response.MergeFromString(ledger.inspector.list_blocks(1, 3, state=None, tenant=None, lease_id=None)[0])
    first, second, third = response.blocks
    cached, free = cache_service_pb2.BLOCK_STATE_CACHED, cache_service_pb2.BLOCK_STATE_FREE
    assert (first.block_id, first.state, first.tenant, first.priority) == (1, cached, "älice", 5)
    assert first.prefix_hash == ledger.probe.block(1)[3]
    assert (second.state, second.reference_count, second.tenant) == (cache_service_pb2.BLOCK_STATE_ACTIVE, 1, "bob")
    assert third == cache_service_pb2.Block(block_id=3, state=free)


def test_a_list_of_blocks_has_what_every_filter_lets_through() -> None:
    ledger = make_ledger(a="alice", b="bob")
    cache(ledger, "a", 1, 2, 3)
    admit(ledger, "b", 1, 4)
    assert listed(ledger, most=3) == ([1, 2, 3], 4)
    assert listed(ledger, first=4) == (list(range(4, 9)), None)
    assert listed(ledger, first=2**40) == ([], None)
    assert listed(ledger, state=BlockState.CACHED) == ([1], None)
    assert listed(ledger, state=BlockState.FREE)[0] == list(range(3, 9))
    assert listed(ledger, tenant="bob") == listed(ledger, lease_id="b") == ([2], None)
    assert listed(ledger, tenant="bob", state=BlockState.CACHED) == listed(ledger, lease_id="a") == ([], None)


def test_a_state_of_a_filter_has_to_be_one() -> None:
    assert messages.decode_block_state("state", 0) is None
    assert messages.decode_block_state("state", cache_service_pb2.BLOCK_STATE_RETIRED) is BlockState.RETIRED
    assert messages.decode_lease_state("state", 0) is None
    assert messages.decode_lease_state("state", cache_service_pb2.LEASE_STATE_FENCING) is True
    for decode in (messages.decode_block_state, messages.decode_lease_state):
        with pytest.raises(CallRefused) as refused:
            decode("state", 77)
        assert refused.value.refusal.reason is Reason.INVALID_ARGUMENT
        assert refused.value.refusal.metadata["field"] == "state"


def test_who_wants_to_know_is_told_of_every_change_and_of_a_new_epoch() -> None:
    catalog, told = Catalog(1, policy="lru", verify=True), []
    catalog.listeners("x")[lambda: told.append("x")] = None
    pool, other = attach(catalog, "x"), attach(catalog, "y")

    def num_told() -> int:
        count = len(told)
        told.clear()
        return count

    assert num_told() == 1
    for each in (pool, other):
        catalog.open_lease(each, each.ledger.pool, ttl_s=1.0, now=0.0)
    admit(other.ledger, "y", 1, 1, 2, 3)
    assert num_told() == 0
    admit(pool.ledger, "x", 1, 1, 2, 3)
    assert num_told() == 1
    settle(pool.ledger, "x")
    assert num_told() == 1
    pool.ledger.reset_prefix_cache()
    assert num_told() == 1
    catalog.lease_fenced(pool, "x")
    assert num_told() == 1
    pool.is_attached = False
    attach(catalog, "x", epoch=EPOCH + 1)
    assert num_told() == 1


# -- prefixes -----------------------------------------------------------------------------------------------------


def explained(
    ledger: Ledger,
    *tokens: int,
    tenant: str = "alice",
    with_other_tenants: bool = True,
    salt: bytes = b"",
    adapter: bytes = b"",
):
    return ledger.inspector.explain(
        int32_bytes(tokens), salt=salt, adapter=adapter, tenant=tenant, with_other_tenants=with_other_tenants
    )


def test_each_reason_has_a_name_and_what_belongs_to_it() -> None:
    ledger = make_ledger(a="alice", bbbbbbbbbb="bob")
    cache(ledger, "a", 1, 2, 3)
    told = explained(ledger, 1, 2)
    assert (told.reason, told.missing, told.num_blocks, told.num_found) == ("none", None, 1, 0)
    assert explained(ledger, 1, 2, salt=b"s").reason == "other_salt"
    assert explained(ledger, 1, 2, adapter=bytes(32)).reason == "other_adapter"
    other = explained(ledger, 1, 2, tenant="bob")
    assert (other.reason, other.other_tenant) == ("other_tenant", "alice")
    assert explained(ledger, 1, 2, tenant="bob", with_other_tenants=False).reason == "never_computed"
    admit(ledger, "bbbbbbbbbb", 1, *range(40, 56), now=7.0)
    lost = explained(ledger, 1, 2)
    assert (lost.reason, lost.lost_at, lost.evicted_by) == ("evicted", 7.0, ("bob", "bbbbbbbb"))
    assert (lost.other_tenant, lost.num_stranded) == (None, 0)
    assert explained(ledger, 40, 41, tenant="bob").reason == "being_computed"
    settle(ledger, "bbbbbbbbbb")
    ledger.reset_prefix_cache(now=8.0)
    reset = explained(ledger, 40, 41, tenant="bob")
    assert (reset.reason, reset.lost_at, reset.evicted_by) == ("reset", 8.0, None)
    assert set(messages.MISS_REASONS) == {
        *("none", "never_computed", "evicted", "reset", "being_computed", "other_salt", "other_tenant"),
        *("window_evicted", "unknown", "other_adapter"),
    }


def test_a_reset_of_one_adapter_leaves_the_blocks_of_others() -> None:
    ledger, adapters = make_ledger(a="alice"), (b"", b"s" * 32, b"t" * 32)
    for adapter in adapters:
        cache(ledger, "a", 1, 2, 3, adapter=adapter)
    reset = ledger.begin_reset("alice", salt=b"", adapter=adapters[1])
    assert list(iter(lambda: ledger.go_on_with_reset(reset, now=2.0), None))
    found = {each[:1]: explained(ledger, 1, 2, adapter=each).reason for each in adapters}
    assert found == {b"": "none", b"s": "reset", b"t": "none"}


def test_a_pool_is_shown_with_the_adapters_that_a_tenant_may_use_and_a_dry_run_takes_no_other() -> None:
    ledger = make_ledger()
    pool = AttachedPool(ledger, b"", "nowhere", (1,))
    pool.set_adapters({"sql": b"s" * 32, "text": b"t" * 32})
    ledger.set_adapter_rights(None, {"bob": frozenset({"sql"})})
    shown = {
        names: [each.name for each in messages.encode_pool(pool, shown_adapters=names).adapters.adapters]
        for names in (None, frozenset({"sql"}), frozenset())
    }
    assert shown == {None: ["sql", "text"], frozenset({"sql"}): ["sql"], frozenset(): []}
    asked = cache_service_pb2.Admission(sequence_id=7, token_ids=[1, 2], adapter=b"t" * 32)
    admission = _core.Admission(asked.SerializeToString(), 16)
    assert ledger.check_admission("alice", admission).refusal is None
    refusal = ledger.check_admission("bob", admission).refusal
    assert refusal is not None
    assert (refusal.metadata["field"], refusal.metadata["sequence_id"]) == ("admissions.adapter", "7")


def test_an_explanation_as_a_message() -> None:
    ledger = make_ledger(a="alice")
    cache(ledger, "a", 1, 2, 3, 4, 5)
    ledger.reset_prefix_cache(2, 3, now=8.5, by="olga")
    explanation = explained(ledger, 1, 2, 3, 4)
    assert explanation.reset_by == "olga"
    told = messages.encode_explanation(explanation, ledger, offset_s=100.0)
    assert (told.pool, told.epoch, told.epoch_time.ToNanoseconds()) == ("pool", EPOCH, 100_000_000_000)
    assert not told.reset_by, "the service decides who may see it"
    assert (told.cached_token_count, told.block_count, told.missing_block_index) == (2, 2, 1)
    assert told.lost_time.ToNanoseconds() == 108_500_000_000
    assert told.reason == cache_service_pb2.MISS_REASON_RESET
    whole = messages.encode_explanation(explained(ledger, 1, 2), ledger, offset_s=0.0)
    assert (whole.cached_token_count, whole.missing_block_index, whole.HasField("lost_time")) == (0, 1, False)


def test_tokens_that_were_evicted_and_come_again_are_counted() -> None:
    ledger = make_ledger(a="alice", b="bob")
    cache(ledger, "a", 1, 2, 3)
    cache(ledger, "b", *range(40, 56))
    cache(ledger, "a", 1, 2, 3)
    statistics = statistics_of(ledger)
    assert (statistics.recomputed_token_count, statistics.admitted_token_count) == (2, 22)


def test_metrics_are_labelled_by_layer_group() -> None:
    groups = [
        cache_service_pb2.LayerGroupStatistics(
            active_block_count=1 + i,
            findable_block_count=11 + i,
            found_block_count=21 + i,
            passed_block_count=31 + i,
            evicted_block_count=41 + i,
        )
        for i in range(2)
    ]
    statistics = {
        "several": cache_service_pb2.PoolStatistics(layer_groups=groups),
        "one": cache_service_pb2.PoolStatistics(),
    }
    samples = {
        (sample.name, sample.labels["layer_group"]): sample.value
        for family in layer_group_families(statistics)
        for sample in family.samples
        if sample.labels["pool"] == "several"
    }
    names = [
        "quire_kv_layer_group_active_blocks",
        "quire_kv_layer_group_findable_blocks",
        "quire_cache_layer_group_blocks_found_total",
        "quire_cache_layer_group_blocks_passed_total",
        "quire_cache_layer_group_blocks_evicted_total",
    ]
    assert samples == {(name, str(i)): 1 + 10 * k + i for k, name in enumerate(names) for i in range(2)}
    assert sum(len(family.samples) for family in layer_group_families(statistics)) == len(samples)
