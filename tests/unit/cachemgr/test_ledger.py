"""The ledger, one behaviour at a time: every operation, every reason to refuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest
from planning import (
    Admission,
    BlockCounts,
    Fork,
    HostBlockCounts,
    PlanItem,
    Planned,
    Restore,
    StepOutcome,
    StepRequest,
    Trim,
    counts_of,
    host_block_counts,
    host_counts_of,
    lease_numbers_of,
    plan_step,
    report_of,
    sequence_of,
)

from quire.cachemgr._core import MAX_STEPS_IN_FLIGHT, NUM_CANDIDATES, Ledger, root_hash
from quire.cachemgr.blocks import BlockState
from quire.cachemgr.errors import CallRefused, Reason
from quire.cachemgr.geometry import Geometry
from quire.cachemgr.service.messages import statistics_of

EPOCH = 3
VOCAB = 100


def pack(*tokens: int) -> bytes:
    return b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)


def geometry(
    num_usable: int = 8, *, block_size: int = 2, max_sequences: int = 16, max_tokens: int = 64, vocab_size: int = VOCAB
) -> Geometry:
    return Geometry(
        block_size=block_size,
        num_blocks=num_usable + 1,
        block_bytes=1,
        max_sequences=max_sequences,
        max_sequence_tokens=max_tokens,
        vocab_size=vocab_size,
        model="m",
        model_fingerprint="f",
    )


def report_to(ledger: Ledger, lease_id: str, number: int, outcome: StepOutcome, *, computed, sampled) -> None:
    """Reports (sequence, tokens computed) and the token sampled by sequence."""
    ledger.settle(
        report_of(
            lease_id,
            number,
            outcome,
            seq_ids=[seq_id for seq_id, _ in computed],
            token_counts=[count for _, count in computed],
            sampled_ids=list(sampled),
            sampled_tokens=list(sampled.values()),
        )
    )


class Bench:
    """A ledger with leases "a" and "b", and a worker that samples the test's tokens, 9 if there are none."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.plans: dict[tuple[str, int], Planned] = {}
        for lease_id in ("a", "b"):
            ledger.open_lease(lease_id, ttl_s=10.0, now=0.0)

    def plan(self, lease_id: str = "a", *, now: float = 1.0, request_id: str = "", **items) -> Planned:
        request = StepRequest(**items)
        plan = plan_step(self.ledger, lease_id, request, now=now, request_id=request_id)
        self.plans[lease_id, plan.step_number] = plan
        return plan

    def admit(self, seq_id: int, *tokens: int, lease_id: str = "a", **fields) -> Planned:
        return self.plan(lease_id, admissions=[Admission(seq_id, pack(*tokens), **fields)])

    def extend(self, *seq_ids: int, count: int = 1, append: tuple[int, ...] = (), lease_id: str = "a") -> Planned:
        appends = {seq_id: pack(*append) for seq_id in seq_ids} if append else {}
        return self.plan(lease_id, extend_ids=seq_ids, extend_token_counts=[count] * len(seq_ids), appends=appends)

    def settle(self, step_number: int | None = None, lease_id: str = "a", *, samples: dict[int, int] | None = None):
        """The next step was computed."""
        number = step_number or lease_numbers_of(self.ledger, lease_id)[1] + 1
        plan = self.plans[lease_id, number]
        ends = [s + n for s, n in zip(plan.run_starts, plan.run_token_counts, strict=True)]
        sampled = {i: 9 for i, is_sampled in zip(plan.run_seq_ids, plan.run_samples, strict=True) if is_sampled}
        computed = list(zip(plan.run_seq_ids, ends, strict=True))
        self.report(number, StepOutcome.COMPUTED, lease_id, computed=computed, sampled=sampled | (samples or {}))

    def report(self, number: int, outcome: StepOutcome, lease_id: str = "a", *, computed=(), sampled=None) -> None:
        report_to(self.ledger, lease_id, number, outcome, computed=computed, sampled=sampled or {})

    def table(self, seq_id: int, lease_id: str = "a") -> list[int]:
        return list(self.sequence(seq_id, lease_id).block_table)

    def sequence(self, seq_id: int, lease_id: str = "a"):
        sequence = self.ledger.inspector.sequence(lease_id, seq_id)
        assert sequence is not None
        return sequence

    def tokens(self, seq_id: int) -> list[int]:
        return list(np.frombuffer(self.ledger.probe.tokens("a", seq_id), dtype="<i4"))

    def state(self, block: int) -> BlockState:
        return BlockState(self.ledger.probe.block(block)[0])

    def counts(self) -> tuple[int, int, int, int]:
        counts = counts_of(self.ledger)
        return counts.free, counts.cached, counts.active, counts.retired


def bench_of(**sizes) -> Bench:
    return Bench(Ledger("pool", EPOCH, geometry(**sizes), verify=True))


@pytest.fixture
def bench() -> Bench:
    return bench_of()


def reasons(plan: Planned) -> list[tuple[PlanItem, int, Reason]]:
    return [(refused.item, refused.seq_id, refused.refusal.reason) for refused in plan.refusals]


def metadata(plan: Planned) -> dict[str, str]:
    [refused] = plan.refusals
    return refused.refusal.metadata


def refusal_of(call) -> Reason:
    with pytest.raises(CallRefused) as refused:
        call()
    return refused.value.refusal.reason


# -- admissions -----------------------------------------------------------------------------------------------------


def test_a_plan_is_refused_an_adapter_that_its_tenant_may_not_use() -> None:
    """By the tenant of the lease, or by the one that a gateway names for a sequence."""
    ledger = Ledger("pool", EPOCH, geometry())
    ledger.set_adapters([(b"s" * 32, "sql"), (b"t" * 32, "text")])
    ledger.set_adapter_rights(frozenset(), {"alice": frozenset({"sql"}), "bob": None})

    def plan(seq_id: int, adapter: bytes, *, lease: str = "alice", tenant: str | None = None) -> str | None:
        if seq_id == 1:
            ledger.open_lease(lease, ttl_s=1.0, now=0.0, tenant=lease)
        admissions = [Admission(100 + seq_id, pack(1)), Admission(seq_id, pack(1, 2), adapter=adapter, tenant=tenant)]
        try:
            plan_step(ledger, lease, StepRequest(admissions=admissions), now=0.0, names_tenants=True)
        except CallRefused as refused:
            return str(refused.refusal.metadata["limit"])
        return None

    assert plan(1, b"s" * 32) is None
    assert plan(2, b"t" * 32) == f"one of the 1 adapters of the pool's worker, like sql ({'73' * 32})"
    assert plan(3, b"s" * 32) is None
    assert plan(1, b"t" * 32, lease="bob") is None
    assert plan(2, b"t" * 32, lease="bob", tenant="alice") is not None
    assert plan(1, b"s" * 32, lease="carol") == "empty: the pool's worker has no adapters"
    ledger.check_adapter("alice", b"s" * 32, "adapter")
    with pytest.raises(CallRefused, match=r"adapter is (74){32}; must be one of the 1 adapters"):
        ledger.check_adapter("alice", b"t" * 32, "adapter")


def test_an_admission_gets_blocks_for_all_its_tokens_and_samples_the_next(bench: Bench) -> None:
    plan = bench.admit(1, 5, 6, 7)
    assert (plan.step_number, plan.known_step, plan.refusals) == (1, 0, [])
    assert (plan.write_seq_ids, plan.write_first_indexes, plan.write_block_counts) == ([1], [0], [2])
    assert plan.write_block_ids == bench.table(1)
    assert (plan.run_seq_ids, plan.run_starts, plan.run_token_counts, plan.run_samples) == ([1], [0], [3], [True])
    assert plan.given_run_indexes == [0]
    assert bytes(plan.given_digests) == sha256(pack(5, 6, 7)).digest()[:16]
    assert (plan.admitted_ids, plan.admitted_cached_counts) == ([1], [0])
    assert plan.counts == BlockCounts(free=6, cached=0, active=2, retired=0)


def test_blocks_are_found_by_others_only_once_they_were_reported_computed(bench: Bench) -> None:
    bench.admit(1, 5, 6, 7)
    assert bench.ledger.inspector.num_cached_tokens(pack(5, 6, 7), salt=b"") == 0
    assert bench.admit(1, 5, 6, 7, lease_id="b").admitted_cached_counts == [0]
    bench.settle()
    assert bench.ledger.inspector.num_cached_tokens(pack(5, 6, 7), salt=b"") == 2
    plan = bench.admit(2, 5, 6, 8, lease_id="b")
    assert plan.admitted_cached_counts == [2]
    assert (plan.run_starts, plan.run_token_counts) == ([2], [1])
    assert bench.table(2, "b")[0] == bench.table(1)[0]


def test_at_least_one_token_is_left_to_compute(bench: Bench) -> None:
    bench.admit(1, 5, 6, 7, 8)
    bench.settle()
    plan = bench.admit(2, 5, 6, 7, 8)
    assert plan.admitted_cached_counts == [2]
    assert (plan.run_starts, plan.run_token_counts) == ([2], [2])


def test_equal_prompts_of_one_lease_share_what_is_being_computed(bench: Bench) -> None:
    plan = bench.plan(admissions=[Admission(1, pack(5, 6, 7)), Admission(2, pack(5, 6, 8))])
    assert plan.admitted_cached_counts == [0, 2]
    assert bench.table(1)[0] == bench.table(2)[0]
    assert bench.sequence(2).num_computed == 0
    bench.settle()
    assert bench.sequence(2).num_computed == 3
    assert statistics_of(bench.ledger).published_block_count == 1


def test_what_follows_a_shared_block_is_found_behind_it(bench: Bench) -> None:
    bench.plan(admissions=[Admission(1, pack(1, 2, 3)), Admission(2, pack(1, 2, 4, 5, 6))])
    bench.settle()
    assert bench.ledger.inspector.num_cached_tokens(pack(1, 2, 4, 5, 0), salt=b"") == 4
    bench.admit(3, 1, 2, 7)
    bench.extend(3)
    bench.settle()
    bench.settle()
    assert bench.ledger.inspector.num_cached_tokens(pack(1, 2, 7, 9, 0), salt=b"") == 4


@pytest.mark.parametrize("difference", ["salt", "tenant"])
def test_sequences_of_another_salt_or_tenant_share_nothing(bench: Bench, difference: str) -> None:
    bench.ledger.open_lease("c", ttl_s=10.0, now=0.0, tenant="acme" if difference == "tenant" else "")
    salt = b"s" if difference == "salt" else b""
    bench.admit(1, 5, 6, 7)
    bench.settle()
    assert bench.admit(1, 5, 6, 7, lease_id="c", salt=salt).admitted_cached_counts == [0]
    tenant = "acme" if difference == "tenant" else ""
    assert bench.ledger.inspector.num_cached_tokens(pack(5, 6, 7), salt=salt, tenant=tenant) == 0
    bench.settle(lease_id="c")
    assert bench.ledger.inspector.num_cached_tokens(pack(5, 6, 7), salt=salt, tenant=tenant) == 2
    assert bench.table(1)[0] != bench.table(1, "c")[0]


def test_a_root_is_of_tenant_salt_and_model_with_their_lengths() -> None:
    parts = (b"acme", b"s", b"model-1")
    expected = sha256(b"quire prefix v1" + b"".join(len(part).to_bytes(8, "little") + part for part in parts))
    assert root_hash("acme", b"s", "model-1") == expected.digest()


def test_a_long_prefix_is_found_up_to_its_first_hole() -> None:
    bench = bench_of(num_usable=160, max_tokens=200)
    prompt = [token % VOCAB for token in range(180)]
    bench.admit(1, *prompt)
    bench.settle()
    assert bench.ledger.inspector.num_cached_tokens(pack(*prompt), salt=b"") == 178
    assert bench.admit(2, *prompt).admitted_cached_counts == [178]
    hole = bench.table(1)[10]
    bench.ledger.reset_prefix_cache(hole, hole + 1)
    assert bench.ledger.inspector.num_cached_tokens(pack(*prompt), salt=b"") == 20


def test_a_long_prompt_is_computed_in_chunks(bench: Bench) -> None:
    plan = bench.admit(1, 1, 2, 3, 4, 5, max_compute=2)
    assert (plan.run_token_counts, plan.run_samples) == ([2], [False])
    assert bench.extend(1, count=2).run_samples == [False]
    last = bench.extend(1)
    assert (last.run_starts, last.run_samples) == ([4], [True])
    for _ in range(3):
        bench.settle()
    assert bench.tokens(1) == [1, 2, 3, 4, 5, 9]


def test_where_the_last_token_was_sampled_is_known(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3, max_compute=2)
    assert bench.sequence(1).sampled_position == -1
    bench.extend(1)
    assert bench.sequence(1).sampled_position == 3


def test_admissions_share_the_budget_and_what_is_cached_does_not_count(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.settle()
    prompts = [Admission(2, pack(1, 2, 3, 4)), Admission(3, pack(5, 6)), Admission(4, pack(7))]
    plan = bench.plan(admissions=prompts, admission_token_budget=3)
    assert (plan.run_seq_ids, plan.run_token_counts, plan.run_samples) == ([2, 3], [2, 1], [True, False])
    assert reasons(plan) == [(PlanItem.ADMISSION, 4, Reason.TOKEN_BUDGET_SPENT)]


def test_admissions_leave_the_reserve(bench: Bench) -> None:
    prompt = pack(*range(12))
    plan = bench.plan(admissions=[Admission(1, prompt)], admission_reserve=3)
    assert reasons(plan) == [(PlanItem.ADMISSION, 1, Reason.OUT_OF_BLOCKS)]
    assert metadata(plan) == {"sequence_id": "1", "needed": "9", "free": "8", "retired": "0"}
    assert bench.plan(admissions=[Admission(1, prompt)], admission_reserve=2).refusals == []


def test_a_cached_prefix_is_not_counted_as_room_for_its_own_tail() -> None:
    bench = bench_of(num_usable=2)
    bench.admit(1, 1, 2, 3)
    bench.settle()
    bench.plan(releases=[1])
    bench.settle()
    assert bench.counts() == (1, 1, 0, 0)
    plan = bench.plan(admissions=[Admission(2, pack(7)), Admission(3, pack(1, 2, 3))])
    assert reasons(plan) == [(PlanItem.ADMISSION, 3, Reason.OUT_OF_BLOCKS)]
    assert metadata(plan) == {"sequence_id": "3", "needed": "1", "free": "0", "retired": "0"}


def test_the_digest_of_an_admission_is_of_what_is_left_to_compute(bench: Bench) -> None:
    bench.admit(1, 5, 6, 7)
    bench.settle()
    plan = bench.admit(2, 5, 6, 8, 4)
    assert bytes(plan.given_digests) == sha256(pack(8, 4)).digest()[:16]


def test_what_was_published_goes_before_what_is_being_filled(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3, 4, 5)
    bench.admit(1, 1, 2, 3, 4, 5, lease_id="b")
    bench.settle(lease_id="b")
    filled, published = bench.table(1), bench.table(1, "b")
    bench.ledger.reset_prefix_cache(published[0], published[0] + 1)
    bench.admit(2, 1, 2, 3, 4, 6)
    assert bench.table(2)[:2] == [filled[0], published[1]]


def test_of_what_one_step_fills_alike_the_first_is_shared(bench: Bench) -> None:
    bench.plan(admissions=[Admission(1, pack(1)), Admission(2, pack(1))])
    bench.settle()
    bench.plan(
        trims=[Trim(1, 1), Trim(2, 1)], extend_ids=[1, 2], extend_token_counts=[1] * 2, appends={1: pack(2), 2: pack(2)}
    )
    bench.admit(3, 1, 2, 7)
    assert bench.table(3)[0] == bench.table(1)[0] != bench.table(2)[0]


def test_a_block_of_which_a_token_is_being_sampled_is_not_shared_yet(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.extend(1)
    assert bench.admit(2, 1, 2, 3, 9, 5).admitted_cached_counts == [2]


def test_what_is_being_filled_behind_a_hole_is_not_shared(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3, 4, 5, max_compute=2)
    bench.settle()
    bench.extend(1, count=3)
    bench.ledger.reset_prefix_cache()
    assert bench.admit(2, 1, 2, 3, 4, 6).admitted_cached_counts == [0]


def test_tokens_are_four_bytes_each(bench: Bench) -> None:
    with pytest.raises(ValueError, match="6 bytes"):
        bench.ledger.inspector.num_cached_tokens(pack(1, 2)[:6], salt=b"")


# -- decoding -------------------------------------------------------------------------------------------------------


def test_decoding_runs_ahead_of_the_reports(bench: Bench) -> None:
    bench.admit(1, 5, 6, 7)
    first, second = bench.extend(1), bench.extend(1)
    assert (first.run_starts, second.run_starts) == ([3], [4])
    assert first.given_run_indexes == second.given_run_indexes == []
    assert (first.write_seq_ids, second.write_first_indexes) == ([], [2])
    assert (bench.sequence(1).num_known, bench.sequence(1).num_tokens) == (3, 6)
    bench.settle(samples={1: 11})
    bench.settle(samples={1: 12})
    assert bench.tokens(1) == [5, 6, 7, 11, 12]
    assert bench.sequence(1).num_computed == 4
    assert bench.ledger.inspector.num_cached_tokens(pack(5, 6, 7, 11, 0), salt=b"") == 4


@pytest.mark.parametrize(
    ("limit", "num_prompt", "extends"),
    [(5, 5, []), (4, 4, []), (5, 3, [{}, {}]), (4, 2, [{}, {}]), (5, 3, [{"count": 2, "append": (4,)}])],
)
def test_a_decode_ends_at_the_longest_sequence(limit: int, num_prompt: int, extends: list[dict[str, object]]) -> None:
    bench = bench_of(max_tokens=limit)
    bench.admit(1, *range(num_prompt))
    for extend in extends:
        bench.settle()
        assert bench.extend(1, **extend).refusals == []
    plan = bench.extend(1)
    assert reasons(plan) == [(PlanItem.EXTEND, 1, Reason.SEQUENCE_TOO_LONG)]
    assert metadata(plan)["value"] == str(limit + 1)


def test_the_first_of_two_extends_gets_the_last_block() -> None:
    for order in ([1, 2], [2, 1]):
        bench = bench_of(num_usable=3)
        bench.plan(admissions=[Admission(1, pack(5, 6)), Admission(2, pack(7, 8))])
        bench.settle()
        plan = bench.plan(extend_ids=order, extend_token_counts=[1, 1], appends={1: pack(4)})
        assert reasons(plan) == [(PlanItem.EXTEND, order[1], Reason.OUT_OF_BLOCKS)]
        assert plan.run_seq_ids == order[:1]


def test_runs_of_extends_come_before_those_of_admissions_and_samples_go_to_whose_they_are(bench: Bench) -> None:
    bench.plan(admissions=[Admission(1, pack(1, 2, 3, 4), max_compute=1), Admission(2, pack(7))])
    bench.settle(samples={2: 50})
    assert (bench.tokens(1), bench.tokens(2)) == ([1, 2, 3, 4], [7, 50])
    prompts = [Admission(3, pack(5, 6), max_compute=1), Admission(4, pack(8))]
    plan = bench.plan(extend_ids=[2, 1], extend_token_counts=[1, 2], admissions=prompts)
    assert (plan.run_seq_ids, plan.run_samples) == ([2, 1, 3, 4], [True, False, False, True])
    bench.settle(samples={2: 51, 4: 60})
    assert [bench.tokens(i) for i in (1, 2, 3, 4)] == [[1, 2, 3, 4], [7, 50, 51], [5, 6], [8, 60]]


def test_runs_of_extends_come_in_the_order_of_the_request(bench: Bench) -> None:
    bench.plan(admissions=[Admission(1, pack(1, 2, 3, 4), max_compute=1), Admission(2, pack(7, 8, 9))])
    bench.settle()
    plan = bench.plan(extend_ids=[1, 2], extend_token_counts=[3, 1])
    assert (plan.run_seq_ids, plan.run_token_counts) == ([1, 2], [3, 1])


def test_appended_tokens_are_given_and_computed_with_the_one_sampled_last(bench: Bench) -> None:
    bench.admit(1, 5)
    bench.settle()
    plan = bench.extend(1, count=3, append=(7, 8))
    assert (plan.run_starts, plan.run_token_counts, plan.given_run_indexes) == ([1], [3], [0])
    assert bytes(plan.given_digests) == sha256(pack(9, 7, 8)).digest()[:16]


def test_there_are_blocks_for_appended_tokens_that_are_not_computed_yet(bench: Bench) -> None:
    bench.admit(1, 1)
    bench.settle()
    plan = bench.extend(1, append=(3, 4, 5, 6, 7))
    assert (plan.run_token_counts, plan.write_block_counts, len(bench.table(1))) == ([1], [3], 4)


def test_a_sequence_can_be_trimmed_and_go_on_with_other_tokens(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3, 4, 5)
    bench.settle()
    published = bench.table(1)[1]
    assert bench.plan(trims=[Trim(1, 3)]).refusals == []
    assert (bench.tokens(1), len(bench.table(1))) == ([1, 2, 3], 2)
    plan = bench.extend(1, append=(8,))
    assert plan.copy_sources == [published]
    assert plan.copy_targets == [bench.table(1)[1]]
    assert (plan.write_seq_ids, plan.write_first_indexes, plan.write_block_ids) == ([1], [1], plan.copy_targets)
    assert plan.given_run_indexes == [0]
    bench.settle()
    bench.settle()
    assert bench.ledger.inspector.num_cached_tokens(pack(1, 2, 3, 4, 0), salt=b"") == 4
    assert bench.ledger.inspector.num_cached_tokens(pack(1, 2, 3, 8, 0), salt=b"") == 4


def test_a_trim_with_steps_in_flight_takes_back_the_promise_and_retires_the_tail(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.extend(1)
    bench.extend(1)
    tail = bench.table(1)[1:]
    bench.plan(trims=[Trim(1, 2)])
    assert [bench.state(block) for block in tail] == [BlockState.RETIRED] * 2
    assert (bench.sequence(1).num_tokens, bench.sequence(1).num_promised) == (2, 0)
    for _ in range(2):
        bench.settle()
        assert [bench.state(block) for block in tail] == [BlockState.RETIRED] * 2
    bench.settle()
    assert [bench.state(block) for block in tail] == [BlockState.FREE] * 2
    assert bench.tokens(1) == [1, 2]
    assert bench.sequence(1).num_computed == 2


def test_a_token_put_in_the_place_of_the_sampled_one_is_given(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.settle()
    bench.plan(trims=[Trim(1, 3)])
    plan = bench.extend(1, append=(7,))
    assert (plan.run_starts, plan.given_run_indexes) == ([3], [0])


def test_a_promised_token_can_be_kept_while_later_ones_are_trimmed(bench: Bench) -> None:
    bench.admit(1, 1, 2)
    bench.extend(1)
    bench.plan(trims=[Trim(1, 3)])
    assert reasons(bench.extend(1)) == [(PlanItem.EXTEND, 1, Reason.NOTHING_TO_COMPUTE)]
    bench.settle(samples={1: 7})
    bench.settle(samples={1: 8})
    assert bench.tokens(1) == [1, 2, 7]
    assert bench.extend(1, append=(4,)).run_starts == [3]


def test_a_trimmed_block_is_not_shared_as_what_it_was_to_hold(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3, 4, 5)
    bench.plan(trims=[Trim(1, 3)])
    plan = bench.admit(2, 1, 2, 3, 4, 5)
    assert plan.admitted_cached_counts == [2]


def test_a_trim_may_keep_all_and_the_last_token_have_no_slot_yet(bench: Bench) -> None:
    bench.admit(1, 5, 6)
    bench.settle()
    assert bench.plan(trims=[Trim(1, 3)]).refusals == []
    assert (bench.tokens(1), len(bench.table(1))) == ([5, 6, 9], 1)


def test_nothing_is_said_of_trimmed_tokens(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.settle()
    bench.admit(2, 1, 2, 3)
    bench.settle()
    bench.plan(trims=[Trim(2, 1)])
    sequence = bench.sequence(2)
    assert (sequence.num_cached, sequence.num_computed, sequence.num_scheduled, sequence.num_published) == (1, 1, 1, 0)


@pytest.mark.parametrize("num_kept", [1, 3])
def test_what_follows_a_trim_is_found_by_its_own_tokens(bench: Bench, num_kept: int) -> None:
    bench.admit(1, 1, 2, 3, 4, 5, max_compute=2)
    bench.settle()
    prompt = [1, 2, 3, 4, 5][:num_kept]
    bench.plan(trims=[Trim(1, num_kept)])
    bench.extend(1, count=num_kept - bench.sequence(1).num_scheduled + 1, append=(8,))
    bench.settle()
    bench.settle()
    assert bench.ledger.inspector.num_cached_tokens(pack(*prompt, 8, 0), salt=b"") == num_kept + 1
    assert bench.ledger.inspector.num_cached_tokens(pack(1, 2, 3, 4, 5), salt=b"") == 2


def test_what_follows_a_trim_is_found_by_its_own_tokens_after_a_reset(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3, 4, 5)
    bench.settle()
    bench.ledger.reset_prefix_cache()
    bench.plan(trims=[Trim(1, 3)])
    bench.extend(1, append=(8,))
    bench.admit(2, 1, 2, 9)
    for _ in range(3):
        bench.settle()
    assert bench.ledger.inspector.num_cached_tokens(pack(1, 2, 3, 8, 0), salt=b"") == 4


# -- releases -------------------------------------------------------------------------------------------------------


def test_released_blocks_are_cached_leaf_first_and_partial_ones_are_free(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3, 4, 5)
    bench.settle()
    first, second, partial = bench.table(1)
    assert bench.plan(releases=[1, 1, 7]).released_ids == [1]
    assert [bench.state(block) for block in (first, second, partial)] == [
        BlockState.CACHED,
        BlockState.CACHED,
        BlockState.FREE,
    ]
    bench.settle()
    assert bench.admit(2, *range(20, 32)).counts == BlockCounts(free=0, cached=2, active=6, retired=0)
    assert bench.extend(2).write_block_ids == [second]
    assert bench.ledger.inspector.num_cached_tokens(pack(1, 2, 3, 4, 5), salt=b"") == 2


def test_a_prefix_outlives_what_continues_it_even_if_it_is_worth_less() -> None:
    bench = Bench(Ledger("pool", EPOCH, geometry(), policy="lineage", verify=True))
    for last in (3, 5):
        bench.plan(admissions=[Admission(1, pack(1, 2, last, 4, 6))])
        bench.settle()
        bench.plan(releases=[1])
        bench.settle()
    assert bench.counts() == (5, 3, 0, 0)
    bench.ledger.probe.follow(NUM_CANDIDATES - 1)
    bench.admit(2, *range(20, 34))
    assert bench.counts() == (0, 1, 7, 0)
    assert bench.ledger.inspector.num_cached_tokens(pack(1, 2, 9), salt=b"") == 2


def test_a_retired_block_without_hash_is_not_shared(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.plan(releases=[1])
    assert bench.admit(2, 1, 2, 3).admitted_cached_counts == [0]


def test_a_retired_block_that_is_found_takes_no_room() -> None:
    bench = bench_of(num_usable=3)
    bench.admit(1, 1, 2, 3)
    bench.settle()
    bench.extend(1)
    bench.plan(releases=[1])
    assert bench.counts() == (1, 0, 0, 2)
    assert bench.admit(2, 1, 2, 9, lease_id="b").refusals == []


def test_out_of_blocks_says_how_many_come_back_by_themselves() -> None:
    bench = bench_of(num_usable=2)
    bench.admit(1, 1, 2, 3)
    bench.plan(releases=[1])
    plan = bench.admit(2, 7, 8, 9)
    assert metadata(plan) == {"sequence_id": "2", "needed": "2", "free": "0", "retired": "2"}
    bench.settle()
    assert bench.admit(2, 7, 8, 9).refusals == []


def test_the_last_block_is_handed_out() -> None:
    bench = bench_of(num_usable=2)
    assert bench.admit(1, 1, 2, 3, 4).counts == BlockCounts(free=0, cached=0, active=2, retired=0)
    bench = bench_of(num_usable=2)
    bench.admit(1, 1, 2)
    assert bench.extend(1).counts == BlockCounts(free=0, cached=0, active=2, retired=0)
    bench = bench_of(num_usable=2)
    bench.admit(1, 1, 2)
    bench.settle()
    assert bench.extend(1, count=2, append=(4,)).counts == BlockCounts(free=0, cached=0, active=2, retired=0)


# -- forks ----------------------------------------------------------------------------------------------------------


def test_a_fork_shares_all_blocks_and_copies_the_one_it_writes(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.settle()
    parent = bench.table(1)
    plan = bench.plan(forks=[Fork(1, [2], 4)], extend_ids=[2, 1], extend_token_counts=[1, 1])
    assert (plan.fork_parent_ids, plan.fork_child_ids) == ([1], [2])
    assert plan.given_run_indexes == []
    assert (plan.run_starts, plan.copy_sources) == ([3, 3], [parent[1]])
    assert plan.copy_targets == [bench.table(2)[1]]
    assert (bench.table(2)[0], bench.table(1)) == (parent[0], parent)
    assert plan.write_block_ids == [*parent, bench.table(2)[1]]


def test_the_source_of_a_copy_stays_retired_until_the_copying_step_has_passed(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.settle()
    source = bench.table(1)[1]
    bench.plan(forks=[Fork(1, [2], 4)])
    bench.plan(extend_ids=[2, 1], extend_token_counts=[1, 1])
    bench.plan(releases=[1])
    assert bench.state(source) is BlockState.RETIRED
    bench.settle()
    bench.settle()
    bench.settle()
    assert bench.state(source) is not BlockState.RETIRED


def test_both_of_two_sharers_of_a_published_block_copy_it(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3, 4)
    bench.settle()
    block = bench.table(1)[1]
    bench.plan(trims=[Trim(1, 3)], releases=[])
    plan = bench.extend(1, append=(5,))
    assert plan.copy_sources == [block]
    assert bench.state(block) is BlockState.RETIRED
    bench.settle()
    assert bench.state(block) is BlockState.RETIRED
    bench.settle()
    assert bench.state(block) is BlockState.CACHED


def test_a_fork_takes_a_token_that_is_being_sampled(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.plan(forks=[Fork(1, [2], 4), Fork(1, [3], 3)])
    plan = bench.plan(extend_ids=[2, 3], extend_token_counts=[1, 1])
    assert (plan.run_starts, plan.given_run_indexes) == ([3, 2], [1])
    bench.settle(samples={1: 8})
    assert (bench.tokens(1), bench.tokens(2), bench.tokens(3)) == ([1, 2, 3, 8], [1, 2, 3, 8], [1, 2, 3])
    bench.settle()
    bench.settle(samples={2: 20, 3: 30})
    assert (bench.tokens(1), bench.tokens(2), bench.tokens(3)) == ([1, 2, 3, 8], [1, 2, 3, 8, 20], [1, 2, 3, 30])


def test_a_fork_of_a_fork_in_the_same_plan(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    plan = bench.plan(forks=[Fork(1, [2], 4), Fork(2, [3], 4)])
    assert (plan.fork_parent_ids, plan.fork_child_ids) == ([1, 2], [2, 3])
    bench.settle(samples={1: 8})
    assert bench.tokens(3) == [1, 2, 3, 8]


def test_a_fork_has_its_last_token_to_compute_and_knows_nothing_of_what_is_behind(bench: Bench) -> None:
    bench.admit(3, 1, 2, 4)
    bench.settle()
    bench.admit(1, 1, 2, 3)
    bench.settle()
    bench.plan(forks=[Fork(1, [2], 2)])
    sequence = bench.sequence(2)
    assert (sequence.num_cached, sequence.num_computed, sequence.num_scheduled) == (1, 1, 1)
    bench.plan(forks=[Fork(1, [4], 3)])
    bench.extend(4, append=(7,))
    plan = bench.extend(4)
    assert (plan.run_starts, plan.given_run_indexes) == ([3], [0])


def test_a_fork_at_the_end_of_a_published_block_gives_its_copy_back(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3, 4)
    bench.settle()
    parent = bench.table(1)
    bench.plan(forks=[Fork(1, [2], 4)], extend_ids=[2], extend_token_counts=[1])
    copy = bench.table(2)[1]
    assert copy != parent[1]
    bench.settle()
    assert bench.table(2) == parent
    assert bench.state(copy) is BlockState.FREE
    assert bench.plan().write_block_ids == [parent[1]]
    assert bench.plan().write_block_ids == []


# -- duplicates -----------------------------------------------------------------------------------------------------


def test_a_changed_entry_of_a_sequence_that_is_released_is_not_written(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.admit(1, 1, 2, 3, lease_id="b")
    bench.settle()
    bench.settle(lease_id="b")
    plan = bench.plan("b", releases=[1], admissions=[Admission(1, pack(7))])
    assert (plan.write_seq_ids, plan.write_first_indexes, plan.write_block_counts) == ([1], [0], [1])


# -- failures -------------------------------------------------------------------------------------------------------


def test_what_was_sampled_before_a_failure_need_not_be_given(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.settle()
    bench.admit(2, 5)
    bench.report(2, StepOutcome.FAILED)
    assert bench.extend(1).given_run_indexes == []


def test_what_is_known_of_doomed_steps_stays_known_while_they_are_reported(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.extend(1)
    bench.extend(1)
    bench.report(1, StepOutcome.FAILED)
    bench.report(2, StepOutcome.FAILED)
    assert bench.plan().known_step == 3


@pytest.mark.parametrize("outcome", [StepOutcome.FAILED, StepOutcome.SKIPPED])
def test_nothing_of_a_step_that_computed_nothing_counts(bench: Bench, outcome: StepOutcome) -> None:
    bench.admit(1, 1, 2, 3)
    bench.extend(1)
    bench.plan(forks=[Fork(1, [2], 5)])
    bench.report(1, outcome)
    for seq_id in (1, 2):
        sequence = bench.sequence(seq_id)
        assert (sequence.num_computed, sequence.num_scheduled, sequence.num_tokens) == (0, 0, 3)
    bench.report(2, StepOutcome.FAILED)
    bench.report(3, StepOutcome.FAILED)
    assert bench.ledger.inspector.num_cached_tokens(pack(1, 2, 3), salt=b"") == 0
    assert bench.admit(3, 1, 2, 3).admitted_cached_counts == [0]
    plan = bench.extend(1, count=3)
    assert (plan.run_starts, plan.given_run_indexes, plan.known_step) == ([0], [0], 3)
    bench.settle()
    bench.settle()
    assert bench.tokens(1) == [1, 2, 3, 9]


def test_a_failed_step_leaves_what_was_computed_before(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.settle()
    bench.extend(1)
    bench.report(2, StepOutcome.FAILED)
    assert (bench.tokens(1), bench.sequence(1).num_scheduled) == ([1, 2, 3, 9], 3)
    plan = bench.extend(1)
    assert (plan.run_starts, plan.run_samples, plan.given_run_indexes) == ([3], [True], [0])


def test_what_steps_behind_a_failed_one_were_to_fill_is_not_shared(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.admit(2, 4, 5, 6)
    bench.report(1, StepOutcome.FAILED)
    assert bench.admit(3, 4, 5, 6).admitted_cached_counts == [0]


def test_a_token_put_in_the_place_of_one_that_was_not_sampled_is_given(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.settle()
    bench.extend(1)
    bench.report(2, StepOutcome.FAILED)
    bench.extend(1, append=(7,))
    plan = bench.extend(1)
    assert (plan.run_starts, plan.given_run_indexes) == ([4], [0])


def test_an_empty_step_that_is_skipped_fails_nothing(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.plan()
    bench.extend(1)
    bench.settle()
    bench.report(2, StepOutcome.SKIPPED)
    assert (bench.sequence(1).num_scheduled, bench.sequence(1).num_promised) == (4, 1)


def test_the_sharer_of_a_failed_prefix_computes_it_in_blocks_of_its_own(bench: Bench) -> None:
    bench.plan(admissions=[Admission(1, pack(1, 2, 3)), Admission(2, pack(1, 2, 4))])
    bench.report(1, StepOutcome.FAILED)
    plan = bench.extend(1, 2, count=3)
    assert (plan.run_starts, plan.copy_sources) == ([0, 0], [])
    assert bench.table(1)[0] != bench.table(2)[0]
    bench.settle()
    assert bench.table(1)[0] == bench.table(2)[0]


def test_all_blocks_of_a_failed_prefix_are_the_sharers_own_then(bench: Bench) -> None:
    bench.plan(admissions=[Admission(1, pack(1, 2, 3, 4, 5)), Admission(2, pack(1, 2, 3, 4, 6))])
    bench.report(1, StepOutcome.FAILED)
    bench.extend(1, 2, count=5)
    assert not set(bench.table(1)) & set(bench.table(2))


def test_an_empty_step_behind_a_failed_one_can_be_reported_computed(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.plan()
    bench.report(1, StepOutcome.FAILED)
    bench.settle()
    assert lease_numbers_of(bench.ledger, "a")[2] == 0


# -- leases ---------------------------------------------------------------------------------------------------------


def test_an_ended_leases_blocks_come_back_when_it_is_fenced(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.plan(releases=[1], admissions=[Admission(2, pack(4, 5))])
    assert bench.ledger.end_lease("a")
    assert not bench.ledger.end_lease("a")
    assert bench.counts() == (5, 0, 1, 2)
    assert refusal_of(lambda: bench.plan()) is Reason.LEASE_NOT_FOUND
    assert refusal_of(lambda: bench.ledger.inspector.sequence("a", 1)) is Reason.LEASE_NOT_FOUND
    bench.ledger.lease_fenced("a")
    bench.ledger.lease_fenced("a")
    assert bench.counts() == (8, 0, 0, 0)
    assert [lease.lease_id for lease in bench.ledger.inspector.leases()] == ["b"]


def test_what_was_reported_before_the_fence_is_cached_after_it(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.extend(1)
    bench.ledger.end_lease("a")
    bench.settle(1)
    bench.ledger.lease_fenced("a")
    assert bench.counts() == (7, 1, 0, 0)


def test_a_fenced_leases_blocks_are_evicted_leaf_first_though_it_had_trimmed_the_leaf(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3, 4, 5)
    bench.settle()
    bench.extend(1)
    bench.plan(trims=[Trim(1, 2)])
    bench.ledger.end_lease("a")
    bench.ledger.lease_fenced("a")
    assert bench.admit(1, *range(20, 34), lease_id="b").counts == BlockCounts(free=0, cached=1, active=7, retired=0)
    assert bench.ledger.inspector.num_cached_tokens(pack(1, 2, 3, 4, 5), salt=b"") == 2


def test_a_lease_expires_unless_it_is_renewed(bench: Bench) -> None:
    assert bench.ledger.inspector.next_expiry() == 10.0
    bench.plan("a", now=4.0)
    assert bench.ledger.expire_leases(9.9) == []
    assert bench.ledger.expire_leases(10.0) == ["b"]
    assert refusal_of(lambda: bench.ledger.inspector.lease("b")) is Reason.LEASE_NOT_FOUND
    assert bench.ledger.inspector.next_expiry() == 14.0
    assert bench.ledger.expire_leases(14.0) == ["a"]
    assert bench.ledger.expire_leases(99.0) == []
    assert statistics_of(bench.ledger).expired_lease_count == 2
    assert bench.ledger.inspector.next_expiry() is None


def test_an_expired_leases_blocks_wait_for_the_fence(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.ledger.expire_leases(99.0)
    assert bench.counts() == (6, 0, 2, 0)
    bench.ledger.lease_fenced("a")
    assert bench.counts() == (8, 0, 0, 0)


def test_a_fenced_leases_rows_are_free_again() -> None:
    bench = bench_of(max_sequences=2)
    bench.admit(1, 1)
    bench.plan(releases=[1], admissions=[Admission(2, pack(2))])
    assert reasons(bench.admit(1, 1, lease_id="b")) == [(PlanItem.ADMISSION, 1, Reason.TOO_MANY_SEQUENCES)]
    bench.ledger.lease_fenced("a")
    assert bench.admit(1, 1, lease_id="b").refusals == []
    assert bench.admit(2, 1, lease_id="b").refusals == []


# -- idempotency ----------------------------------------------------------------------------------------------------


def test_a_repeated_plan_gets_the_first_answer_and_is_applied_once(bench: Bench) -> None:
    items = {"admissions": [Admission(1, pack(1, 2, 3))]}
    first = bench.plan(request_id="r", **items)
    again = bench.plan(request_id="r", **items)
    assert (again.step_number, again.grant, again.answer) == (1, first.grant, first.answer)
    assert statistics_of(bench.ledger).sequence_count == 1
    assert bench.plan().step_number == 2


def test_request_ids_of_two_leases_are_two(bench: Bench) -> None:
    bench.plan(request_id="r")
    assert bench.plan("b", request_id="r", releases=[1]).step_number == 1


# -- every reason to refuse -----------------------------------------------------------------------------------------


def call_reasons() -> Iterator[tuple[str, Reason]]:
    yield "request id reused", Reason.REQUEST_ID_REUSED
    yield "other epoch", Reason.EPOCH_CHANGED
    yield "no such lease", Reason.LEASE_NOT_FOUND
    yield "too many steps", Reason.TOO_MANY_STEPS
    yield "extended twice", Reason.INVALID_ARGUMENT
    yield "extended twice, not in succession", Reason.INVALID_ARGUMENT
    yield "counts missing", Reason.INVALID_ARGUMENT


@pytest.mark.parametrize(("case", "reason"), list(call_reasons()))
def test_a_call_is_refused(bench: Bench, case: str, reason: Reason) -> None:
    bench.admit(1, 1, 2, 3)
    bench.plan(request_id="r")
    ledger = bench.ledger
    if case == "too many steps":
        for _ in range(MAX_STEPS_IN_FLIGHT - 2):
            bench.plan()
    calls = {
        "request id reused": lambda: bench.plan(request_id="r", releases=[1]),
        "other epoch": lambda: plan_step(ledger, "a", StepRequest(releases=[1]), epoch=EPOCH + 1, now=1.0),
        "no such lease": lambda: bench.plan("c", releases=[1]),
        "too many steps": lambda: bench.plan(releases=[1]),
        "extended twice": lambda: bench.plan(releases=[1], extend_ids=[1, 1], extend_token_counts=[1, 1]),
        "extended twice, not in succession": lambda: bench.plan(extend_ids=[1, 2, 1], extend_token_counts=[1, 1, 1]),
        "counts missing": lambda: bench.plan(releases=[1], extend_ids=[1], extend_token_counts=[]),
    }
    before = lease_numbers_of(ledger, "a")
    assert refusal_of(calls[case]) is reason
    assert (lease_numbers_of(ledger, "a"), ledger.probe.sequence_ids("a")) == (before, [1])


def test_a_lease_may_have_as_many_steps_in_flight_as_allowed(bench: Bench) -> None:
    for _ in range(MAX_STEPS_IN_FLIGHT):
        bench.plan()
    bench.settle()
    assert bench.plan().step_number == MAX_STEPS_IN_FLIGHT + 1


def item_reasons() -> Iterator[tuple[dict[str, object], PlanItem, int, Reason]]:
    """Items that are refused where sequence 1 has three known tokens and one being sampled, sequence 2 one token."""
    trim, fork, extend, admission = PlanItem.TRIM, PlanItem.FORK, PlanItem.EXTEND, PlanItem.ADMISSION
    yield {"trims": [Trim(7, 1)]}, trim, 7, Reason.SEQUENCE_NOT_FOUND
    yield {"trims": [Trim(1, 0)]}, trim, 1, Reason.POSITION_OUT_OF_RANGE
    yield {"trims": [Trim(1, 5)]}, trim, 1, Reason.POSITION_OUT_OF_RANGE
    yield {"forks": [Fork(7, [8], 1)]}, fork, 8, Reason.SEQUENCE_NOT_FOUND
    yield {"forks": [Fork(1, [8], 0)]}, fork, 8, Reason.POSITION_OUT_OF_RANGE
    yield {"forks": [Fork(1, [8], 5)]}, fork, 8, Reason.POSITION_OUT_OF_RANGE
    yield {"forks": [Fork(1, [2], 1)]}, fork, 2, Reason.SEQUENCE_EXISTS
    yield {"forks": [Fork(1, [-1], 1)]}, fork, -1, Reason.INVALID_ARGUMENT
    yield {"extend_ids": [7], "extend_token_counts": [1]}, extend, 7, Reason.SEQUENCE_NOT_FOUND
    yield {"extend_ids": [1], "extend_token_counts": [0]}, extend, 1, Reason.INVALID_ARGUMENT
    yield {"extend_ids": [1], "extend_token_counts": [2]}, extend, 1, Reason.NOTHING_TO_COMPUTE
    appended = {"extend_ids": [1], "extend_token_counts": [1], "appends": {1: pack(5)}}
    yield appended, extend, 1, Reason.INVALID_ARGUMENT
    yield {"extend_ids": [2], "extend_token_counts": [1]}, extend, 2, Reason.OUT_OF_BLOCKS
    foreign = {"extend_ids": [3], "extend_token_counts": [1], "appends": {3: pack(5, VOCAB)}}
    yield foreign, extend, 3, Reason.TOKEN_OUT_OF_RANGE
    long = {"extend_ids": [3], "extend_token_counts": [1], "appends": {3: pack(*[5] * 12)}}
    yield long, extend, 3, Reason.SEQUENCE_TOO_LONG
    yield {"admissions": [Admission(1, pack(1))]}, admission, 1, Reason.SEQUENCE_EXISTS
    yield {"admissions": [Admission(-1, pack(1))]}, admission, -1, Reason.INVALID_ARGUMENT
    yield {"admissions": [Admission(8, b"")]}, admission, 8, Reason.EMPTY_PROMPT
    yield {"admissions": [Admission(8, pack(*[5] * 13))]}, admission, 8, Reason.SEQUENCE_TOO_LONG
    yield {"admissions": [Admission(8, pack(1, VOCAB))]}, admission, 8, Reason.TOKEN_OUT_OF_RANGE
    yield {"admissions": [Admission(8, pack(1, -1))]}, admission, 8, Reason.TOKEN_OUT_OF_RANGE
    yield {"admissions": [Admission(8, pack(1))]}, admission, 8, Reason.OUT_OF_BLOCKS


@pytest.mark.parametrize(("items", "item", "seq_id", "reason"), list(item_reasons()))
def test_an_item_is_refused_and_changes_nothing(items, item: PlanItem, seq_id: int, reason: Reason) -> None:
    bench = bench_of(num_usable=6, max_tokens=12)
    bench.plan(admissions=[Admission(2, pack(1, 2)), Admission(3, pack(3, 4, 5))])
    bench.settle()
    bench.plan(trims=[Trim(3, 3)])
    bench.settle()
    bench.admit(1, 11, 12, 13)
    bench.admit(6, 14, lease_id="b")
    before = (bench.counts(), bench.table(1), bench.table(2), bench.table(3), bench.sequence(1).num_tokens)
    plan = bench.plan(**items)
    assert reasons(plan) == [(item, seq_id, reason)]
    assert (plan.write_seq_ids, plan.run_seq_ids, plan.fork_child_ids, plan.admitted_ids) == ([], [], [], [])
    assert before == (bench.counts(), bench.table(1), bench.table(2), bench.table(3), bench.sequence(1).num_tokens)
    assert statistics_of(bench.ledger).refusal_counts == {reason: 1}


def test_too_long_for_the_pool_says_so() -> None:
    bench = bench_of(num_usable=2)
    plan = bench.admit(1, *range(5))
    assert metadata(plan) == {"sequence_id": "1", "value": "5", "limit": "4", "limited_by": "pool"}


def test_rows_are_limited_and_free_again_when_the_releasing_step_has_passed() -> None:
    bench = bench_of(max_sequences=2)
    bench.plan(admissions=[Admission(i, pack(i)) for i in range(2)])
    assert reasons(bench.admit(2, 2)) == [(PlanItem.ADMISSION, 2, Reason.TOO_MANY_SEQUENCES)]
    assert reasons(bench.plan(forks=[Fork(0, [5], 1)])) == [(PlanItem.FORK, 5, Reason.TOO_MANY_SEQUENCES)]
    bench.plan(releases=[0])
    assert reasons(bench.admit(2, 2)) == [(PlanItem.ADMISSION, 2, Reason.TOO_MANY_SEQUENCES)]
    for _ in range(4):
        bench.settle()
    assert bench.admit(2, 2).refusals == []


def test_a_refused_item_does_not_keep_others_from_being_applied(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    plan = bench.plan(extend_ids=[7, 1], extend_token_counts=[1, 1], admissions=[Admission(2, pack(5))])
    assert plan.run_seq_ids == [1, 2]
    assert reasons(plan) == [(PlanItem.EXTEND, 7, Reason.SEQUENCE_NOT_FOUND)]


# -- the cache and the numbers --------------------------------------------------------------------------------------


def test_a_reset_cache_finds_nothing_and_takes_nothing_from_anybody(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.settle()
    bench.admit(2, 7, 8, 9)
    bench.settle()
    bench.plan(releases=[2])
    bench.settle()
    held = bench.table(1)
    assert bench.ledger.reset_prefix_cache() == 2
    assert bench.ledger.reset_prefix_cache() == 0
    assert (bench.counts(), bench.table(1)) == ((6, 0, 2, 0), held)
    assert bench.admit(3, 1, 2, 3).admitted_cached_counts == [0]


def test_a_published_block_is_copied_on_write_even_after_a_reset(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.settle()
    bench.ledger.reset_prefix_cache()
    bench.plan(trims=[Trim(1, 1)])
    assert bench.extend(1, append=(5,)).copy_sources != []


def test_a_reset_leaves_retired_blocks_to_the_steps_in_flight(bench: Bench) -> None:
    bench.admit(1, 1, 2)
    bench.settle()
    bench.extend(1)
    bench.plan(releases=[1])
    assert (bench.ledger.reset_prefix_cache(), bench.counts()) == (1, (6, 0, 0, 2))
    bench.settle()
    assert bench.counts() == (8, 0, 0, 0)


def test_blocks_that_were_reset_are_free_like_any_other_when_they_are_released(bench: Bench) -> None:
    bench.admit(1, *range(15))
    bench.settle()
    bench.ledger.reset_prefix_cache()
    bench.plan(releases=[1])
    bench.settle()
    assert bench.counts() == (8, 0, 0, 0)
    bench.admit(2, *range(15))
    assert bench.extend(2).copy_sources == []


def test_sequences_are_listed_as_they_were_admitted(bench: Bench) -> None:
    ids = [5, 3, 8, 1, 7, 2]
    bench.plan(admissions=[Admission(seq_id, pack(seq_id)) for seq_id in ids])
    assert bench.ledger.probe.sequence_ids("a") == ids


def test_what_is_handed_out_and_evicted_is_counted(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3, 4, 5)
    bench.settle()
    bench.plan(releases=[1])
    bench.settle()
    bench.admit(2, *range(20, 34))
    statistics = statistics_of(bench.ledger)
    assert (statistics.allocated_block_count, statistics.evicted_block_count, statistics.published_block_count) == (
        10,
        1,
        2,
    )


def test_tokens_are_held_as_far_as_the_fullest_holder_has_them_known_or_scheduled() -> None:
    bench = bench_of(block_size=4)
    bench.admit(1, 1, 2, 3)
    assert statistics_of(bench.ledger).held_token_count == 3
    bench.extend(1)
    assert statistics_of(bench.ledger).held_token_count == 4
    bench.settle()
    bench.settle()
    bench.plan(forks=[Fork(1, [2], 1), Fork(1, [3], 2)])
    assert statistics_of(bench.ledger).held_token_count == 4
    bench.plan(releases=[1])
    assert statistics_of(bench.ledger).held_token_count == 2


def test_books_that_are_right_are_so_slice_by_slice(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3, 4, 5)
    bench.settle()
    bench.plan(forks=[Fork(1, [2], 5)], extend_ids=[2], extend_token_counts=[1])
    bench.plan(releases=[1])
    assert [bench.ledger.inspector.audit(first, first + 2) for first in range(0, 9, 2)] == [[]] * 5
    assert bench.ledger.inspector.audit_counts() == []


def test_statistics_count_what_happened(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.settle()
    before = statistics_of(bench.ledger)
    bench.plan(forks=[Fork(1, [2], 4)], extend_ids=[1, 2, 7], extend_token_counts=[1, 1, 1])
    bench.settle()
    bench.admit(3, 1, 2, 4)
    bench.report(3, StepOutcome.FAILED)
    bench.plan()
    bench.report(4, StepOutcome.SKIPPED)
    statistics = statistics_of(bench.ledger)
    outcomes = (statistics.computed_step_count, statistics.failed_step_count, statistics.skipped_step_count)
    assert (statistics.planned_step_count, outcomes) == (4, (2, 1, 1))
    assert (statistics.admission_count, statistics.admitted_token_count, statistics.cached_token_count) == (2, 6, 2)
    assert (statistics.fork_count, statistics.copied_block_count) == (1, 1)
    assert (statistics.computed_token_count, statistics.generated_token_count) == (5, 3)
    assert (statistics.lease_count, statistics.sequence_count) == (2, 3)
    assert (statistics.table_entry_count, statistics.shared_block_count) == (6, 2)
    assert statistics.held_token_count == 5
    assert statistics.refusal_counts == {Reason.SEQUENCE_NOT_FOUND: 1}
    assert before.planned_step_count == 1, "statistics are of one moment"


def test_tokens_are_counted_when_their_step_is_reported_computed(bench: Bench) -> None:
    def counted() -> tuple[int, int, int]:
        statistics = statistics_of(bench.ledger)
        return statistics.step_in_flight_count, statistics.computed_token_count, statistics.generated_token_count

    bench.admit(1, 1, 2, 3)
    bench.admit(2, 4, 5)
    assert counted() == (2, 0, 0)
    bench.settle()
    assert counted() == (1, 3, 1)
    bench.report(2, StepOutcome.FAILED)
    assert counted() == (0, 3, 1)


def test_a_found_prefix_is_not_computed(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.settle()
    bench.admit(2, 1, 2, 3)
    bench.settle()
    assert statistics_of(bench.ledger).cached_token_count == 2
    assert statistics_of(bench.ledger).computed_token_count == 3 + 1


def test_fenced_leases_and_their_steps_are_counted_until_they_are_gone(bench: Bench) -> None:
    bench.admit(1, 1, 2, 3)
    bench.ledger.end_lease("a")
    statistics = statistics_of(bench.ledger)
    assert (statistics.lease_count, statistics.fencing_lease_count, statistics.step_in_flight_count) == (2, 1, 1)


# -- the host tier --------------------------------------------------------------------------------------------------


def tiered(num_host_blocks: int) -> Bench:
    """Sequence 1 of four computed tokens and one to compute, in blocks that no other sequence finds."""
    bench = Bench(Ledger("pool", EPOCH, replace(geometry(), num_host_blocks=num_host_blocks), verify=True))
    bench.admit(1, 1, 2, 3, 4)
    bench.settle()
    bench.ledger.reset_prefix_cache()
    return bench


def test_both_tiers_are_counted() -> None:
    bench = tiered(5)
    assert host_counts_of(bench.ledger) == HostBlockCounts(5, 0, 0)
    bench.plan(offloads=[1])
    bench.settle()
    statistics = statistics_of(bench.ledger)
    assert host_block_counts(statistics) == HostBlockCounts(3, 2, 0)
    assert (statistics.offloaded_sequence_count, statistics.sequence_count, statistics.held_token_count) == (1, 1, 0)
    assert (statistics.offload_count, statistics.offloaded_block_count, statistics.restore_count) == (1, 2, 0)
    view = sequence_of(bench.ledger, "a", 1)
    assert (view.is_offloaded, view.host_blocks, view.block_table, view.num_computed) == (True, [0, 1], [], 4)
    plan = bench.plan(restores=[Restore(1)])
    assert (plan.restored_ids, plan.restored_counts, plan.host_counts) == ([1], [4], HostBlockCounts(3, 0, 2))
    bench.settle()
    statistics = statistics_of(bench.ledger)
    assert (statistics.restore_count, statistics.restored_block_count, statistics.offloaded_sequence_count) == (1, 2, 0)
    assert host_block_counts(statistics) == HostBlockCounts(5, 0, 0)


def test_a_pool_without_a_host_tier_says_so() -> None:
    bench = tiered(0)
    assert host_counts_of(bench.ledger) is None
    plan = bench.plan(offloads=[1])
    (refused,) = plan.refusals
    assert (refused.item, refused.refusal.reason) == (PlanItem.OFFLOAD, Reason.OUT_OF_HOST_BLOCKS)
    assert refused.refusal.metadata == {"sequence_id": "1", "needed": "2", "free": "0", "retired": "0", "limit": "0"}
    assert (plan.host_counts, statistics_of(bench.ledger).refusal_counts) == (None, {Reason.OUT_OF_HOST_BLOCKS: 1})


def test_what_is_in_the_host_tier_comes_back_with_its_lease() -> None:
    bench = tiered(5)
    bench.plan(offloads=[1])
    bench.ledger.end_lease("a")
    assert host_counts_of(bench.ledger) == HostBlockCounts(3, 2, 0)
    bench.ledger.lease_fenced("a")
    assert (host_counts_of(bench.ledger), counts_of(bench.ledger).free) == (HostBlockCounts(5, 0, 0), 8)
