"""Leases and their steps in flight by themselves: who is in which row, what a step computes, what it fills."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from quire.cachemgr.leases import (
    NO_RUNS,
    ExpiryQueue,
    Fill,
    Lease,
    LeaseState,
    Runs,
    StepInFlight,
)
from quire.cachemgr.plans import Admission, Fork, StepRequest, Trim
from quire.cachemgr.prefix import chain_hashes
from quire.cachemgr.sequences import NOBODY, Rows, Sequence, SequenceTable

ROOT = b"root"


def lease_of(lease_id: str = "a", *, expires_at: float = 10.0) -> Lease:
    return Lease(lease_id, "pool", 10.0, expires_at)


def pack(*tokens: int) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def enter(lease: Lease, table: SequenceTable, seq_id: int) -> Sequence:
    """As the planner does it."""
    sequence = lease.sequences[seq_id] = Sequence(table, seq_id, ROOT, array("q"))
    lease.rows.enter(sequence, lease.sequences)
    return sequence


def ids(*seq_ids: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(seq_ids, np.int32)


# -- rows -----------------------------------------------------------------------------------------------------------


def test_rows_are_found_by_id_and_nobody_by_others() -> None:
    lease, table = lease_of(), SequenceTable(2)
    rows = {seq_id: enter(lease, table, seq_id).row for seq_id in (0, 7, 2**31 - 1)}
    wanted = ids(7, 1, 2**31 - 1, 0, -1, -(2**31), 7 + 64)
    expected = [rows[7], NOBODY, rows[2**31 - 1], rows[0], NOBODY, NOBODY, NOBODY]
    assert lease.rows.find(wanted, table).tolist() == expected
    assert lease.find_rows(wanted, table).tolist() == expected


def test_dense_ids_are_found_in_the_map_itself_however_many() -> None:
    lease, table = lease_of(), SequenceTable(2)
    for start in (0, 1000):
        rows = [enter(lease, table, seq_id).row for seq_id in range(start, start + 200)]
        assert lease.rows.find(np.arange(start, start + 200, dtype=np.int32), table).tolist() == rows


def test_of_two_ids_in_one_slot_the_map_knows_the_last_and_the_lease_both() -> None:
    lease, table = lease_of(), SequenceTable(2)
    first, second = enter(lease, table, 1), enter(lease, table, 65)
    assert lease.rows.find(ids(1, 65), table).tolist() == [NOBODY, second.row]
    assert lease.find_rows(ids(1, 65, 129), table).tolist() == [first.row, second.row, NOBODY]
    lease.rows.leave(lease.sequences.pop(1))
    assert lease.find_rows(ids(1, 65), table).tolist() == [NOBODY, second.row]
    lease.rows.leave(lease.sequences.pop(65))
    assert lease.find_rows(ids(1, 65), table).tolist() == [NOBODY, NOBODY]


def test_a_sequence_that_left_is_not_found_though_the_row_is_still_its_own() -> None:
    lease, table = lease_of(), SequenceTable(2)
    old = enter(lease, table, 5)
    lease.rows.leave(lease.sequences.pop(5))
    assert table.seq_ids[old.row] == 5
    assert lease.find_rows(ids(5), table).tolist() == [NOBODY]
    new = enter(lease, table, 5)
    assert new.row != old.row
    table.leave([old.row])
    assert lease.find_rows(ids(5), table).tolist() == [new.row]


def test_a_row_that_another_lease_has_now_is_not_found() -> None:
    table = SequenceTable(2)
    one, other = lease_of("a"), lease_of("b")
    for seq_id in (5, 69):
        sequence = enter(one, table, seq_id)
        one.rows.leave(one.sequences.pop(seq_id))
        table.leave([sequence.row])
        assert enter(other, table, seq_id).row == sequence.row
        assert one.find_rows(ids(5, 69), table).tolist() == [NOBODY, NOBODY]


@pytest.mark.parametrize("seed", range(10))
def test_rows_are_found_whatever_came_and_went(seed: int) -> None:
    """Two leases with ids of their own and common ones, many in one slot, rows used again at once or later."""
    rng, table = random.Random(seed), SequenceTable(2)
    leases, left = [lease_of("a"), lease_of("b")], []
    numbers = [*range(8), *range(64, 72), *range(2**31 - 8, 2**31), *(rng.randrange(2**31) for _ in range(40))]
    for _ in range(400):
        lease, seq_id = rng.choice(leases), rng.choice(numbers)
        if seq_id not in lease.sequences:
            enter(lease, table, seq_id)
        elif rng.random() < 0.8:
            lease.rows.leave(lease.sequences[seq_id])
            left.append(lease.sequences.pop(seq_id).row)
        if rng.random() < 0.3:
            table.leave(left)
            left = []
        wanted = [*numbers, -1, -64, -(2**31)]
        for lease in leases:
            expected = [lease.sequences[i].row if i in lease.sequences else NOBODY for i in wanted]
            assert lease.find_rows(ids(*wanted), table).tolist() == expected
            found = lease.rows.find(ids(*wanted), table).tolist()
            assert all(row in (NOBODY, row_of) for row, row_of in zip(found, expected, strict=True))


def test_a_lease_that_starts_anew_finds_nobody() -> None:
    lease, table = lease_of(), SequenceTable(2)
    enter(lease, table, 5)
    lease.start_anew()
    assert lease.find_rows(ids(5), table).tolist() == [NOBODY]


# -- runs -----------------------------------------------------------------------------------------------------------


class Bench:
    """Sequences 1 to 3 of twelve known tokens in blocks of two, and a step that computes to 6, 7 and 12 of them."""

    def __init__(self) -> None:
        self.table = SequenceTable(2)
        self.sequences = [Sequence(self.table, seq_id, ROOT, array("q", range(1, 7))) for seq_id in (1, 2, 3)]
        for sequence in self.sequences:
            sequence.begin(pack(*range(12)), [], num_cached_blocks=0, num_published=0)
        self.runs = Runs(self.rows(), ids(1, 2, 3), np.array([6, 7, 12]), np.array([False, True, True]))

    def rows(self) -> Rows:
        return np.array([sequence.row for sequence in self.sequences])

    def fork(self, parent: Sequence, num_tokens: int) -> Sequence:
        child = Sequence(self.table, 9, ROOT, array("q"))
        self.runs.join(parent, child, num_tokens)
        return child

    def state(self) -> tuple[list[int], list[bool]]:
        """Ends and who receives."""
        return self.runs.ends.tolist(), self.runs.receives.tolist()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_runs_count_to_their_ends_and_those_that_sample_are_waited_for(bench: Bench) -> None:
    assert len(bench.runs) == 3
    assert bench.state() == ([6, 7, 12], [False, True, True])
    assert [bench.runs.find(sequence) for sequence in bench.sequences] == [0, 1, 2]
    assert bench.runs.find(Sequence(bench.table, 4, ROOT, array("q"))) is None
    assert (len(NO_RUNS), NO_RUNS.find(bench.sequences[0]), NO_RUNS.first_waiting({})) == (0, None, None)


@pytest.mark.parametrize(
    ("num_tokens", "end", "receives"), [(13, 7, True), (8, 7, True), (7, 7, False), (6, 6, False), (1, 1, False)]
)
def test_a_cut_limits_what_counts_and_takes_the_token_behind_it(
    bench: Bench, num_tokens: int, end: int, receives: bool
) -> None:
    bench.runs.cut(bench.sequences[1], num_tokens)
    assert bench.state() == ([6, end, 12], [False, receives, True])
    assert bench.runs.sampled_positions.tolist() == [6, 7, 12], "the report is of what was planned"
    assert bench.runs.samples.tolist() == [False, True, True]


def test_a_cut_that_keeps_more_than_the_one_before_gives_nothing_back(bench: Bench) -> None:
    bench.runs.cut(bench.sequences[1], 3)
    bench.runs.cut(bench.sequences[1], 10)
    assert bench.state() == ([6, 3, 12], [False, False, True])


def test_a_limit_leaves_the_sampled_token(bench: Bench) -> None:
    bench.runs.limit(bench.sequences[1], 4)
    bench.runs.limit(bench.sequences[1], 6)
    bench.runs.limit(Sequence(bench.table, 4, ROOT, array("q")), 0)
    assert bench.state() == ([6, 4, 12], [False, True, True])


@pytest.mark.parametrize(("num_tokens", "receives"), [(7, False), (8, True), (9, True)])
def test_a_fork_receives_the_token_if_it_begins_behind_it(bench: Bench, num_tokens: int, receives: bool) -> None:
    child = bench.fork(bench.sequences[1], num_tokens)
    assert bench.runs.also == ({1: [child]} if receives else {})


def test_a_fork_of_who_samples_nothing_or_was_cut_receives_nothing(bench: Bench) -> None:
    bench.fork(bench.sequences[0], 12)
    bench.runs.cut(bench.sequences[2], 12)
    bench.fork(bench.sequences[2], 13)
    assert bench.runs.also == {}


def test_a_fork_of_a_fork_receives_what_its_parent_does(bench: Bench) -> None:
    child = bench.fork(bench.sequences[1], 8)
    grandchild = bench.fork(child, 8)
    bench.fork(child, 7)
    assert bench.runs.also == {1: [child, grandchild]}
    bench.runs.cut(child, 7)
    assert bench.runs.also == {1: [grandchild]}
    bench.runs.cut(grandchild, 8)
    bench.runs.cut(bench.sequences[1], 2)
    assert bench.runs.also == {1: [grandchild]}, "the parent's trim is not the fork's"
    assert bench.runs.receives.tolist() == [False, False, True]


def test_the_first_that_waits_is_told_by_the_parents_id(bench: Bench) -> None:
    runs = bench.runs
    assert (runs.first_waiting({}), runs.first_waiting({2}), runs.first_waiting({2, 3})) == (2, 3, None)
    bench.fork(bench.sequences[1], 8)
    runs.cut(bench.sequences[1], 7)
    assert (runs.first_waiting({3}), runs.first_waiting({2, 3})) == (2, None)
    runs.disappoint()
    assert runs.first_waiting({}) is None


def test_when_nothing_is_sampled_nobody_waits(bench: Bench) -> None:
    bench.fork(bench.sequences[1], 8)
    bench.runs.disappoint()
    assert (bench.runs.receives.tolist(), bench.runs.also) == ([False] * 3, {})
    assert bench.runs.samples.tolist() == [False, True, True]


def test_runs_of_one_step_are_put_one_after_the_other(bench: Bench) -> None:
    more = Runs(np.array([40, 41]), ids(8, 7), np.array([3, 4]), np.array([True, False]))
    both = bench.runs.followed_by(more)
    assert (both.rows.tolist(), both.seq_ids.tolist()) == ([*bench.rows().tolist(), 40, 41], [1, 2, 3, 8, 7])
    assert both.ends.tolist() == both.sampled_positions.tolist() == [6, 7, 12, 3, 4]
    assert both.samples.tolist() == both.receives.tolist() == [False, True, True, True, False]
    assert both.seq_ids.dtype == np.int32


# -- what a step fills ----------------------------------------------------------------------------------------------


def hashes() -> list[bytes]:
    return chain_hashes(ROOT, pack(*range(12)), block_bytes=8)


def test_what_a_step_fills_is_found_by_its_hashes(bench: Bench) -> None:
    one, two, _ = bench.sequences
    two.block_table = array("q", range(11, 17))
    step = StepInFlight(1, fills=[Fill(one, 0, 2), Fill(two, 1, 4), Fill(one, 4, 4)])
    assert step.filled() == dict(zip(hashes(), [1, 2, 13, 14], strict=False)), "of equal ones the first"


def test_hashes_are_of_the_right_blocks_when_some_are_published(bench: Bench) -> None:
    one = bench.sequences[0]
    one.take_hashes(0, 1)
    one.num_published = 1
    assert StepInFlight(1, fills=[Fill(one, 1, 3)]).filled() == dict(zip(hashes()[1:], [2, 3], strict=False))
    assert StepInFlight(1, fills=[Fill(one, 3, 4)]).filled() == {hashes()[3]: 4}


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(12, 4), (8, 4), (7, 3), (3, 1), (2, 1), (1, 0)])
def test_a_cut_or_a_limit_leaves_the_full_blocks_before_it(bench: Bench, num_tokens: int, num_blocks: int) -> None:
    one, two, _ = bench.sequences
    two.block_table = array("q", range(11, 17))
    step = StepInFlight(1, bench.runs, fills=[Fill(one, 0, 2), Fill(one, 2, 4), Fill(two, 5, 6)])
    step.cut(one, num_tokens, block_size=2)
    expected = dict(zip(hashes()[:num_blocks], range(1, 5), strict=False)) | {hashes()[5]: 16}
    assert step.filled() == expected
    assert bench.runs.ends.tolist() == [min(num_tokens, 6), 7, 12]
    other = StepInFlight(1, Bench().runs, fills=[Fill(one, 0, 4), Fill(two, 5, 6)])
    other.limit(one, num_blocks, block_size=2)
    assert other.filled() == expected
    assert other.runs.ends.tolist() == [min(num_blocks * 2, 6), 7, 12]
    assert other.runs.receives.tolist() == [False, True, True]


# -- time -----------------------------------------------------------------------------------------------------------


def test_leases_expire_in_order_unless_they_were_renewed_ended_or_gone() -> None:
    queue = ExpiryQueue()
    assert queue.next_expiry() is None
    leases = {name: lease_of(name, expires_at=at) for name, at in [("c", 3.0), ("a", 1.0), ("b", 2.0), ("d", 4.0)]}
    for lease in leases.values():
        queue.add(lease)
    assert queue.next_expiry() == 1.0
    leases["b"].state = LeaseState.FENCING
    leases["a"].expires_at = 5.0
    del leases["c"]
    assert queue.pop_expired(leases, 0.9) == []
    assert queue.pop_expired(leases, 4.0) == [leases["d"]]
    assert queue.next_expiry() == 5.0
    assert queue.pop_expired(leases, 5.0) == [leases["a"]]
    assert queue.next_expiry() is None


# -- what a request is known by -------------------------------------------------------------------------------------


def some_request(rng: random.Random) -> StepRequest:
    def numbers(most: int = 3) -> list[int]:
        return [rng.randrange(3) for _ in range(rng.randint(0, most))]

    extend_ids = numbers()
    appended = {seq_id: pack(*numbers()) for seq_id in extend_ids if rng.random() < 0.5}
    return StepRequest(
        releases=numbers(),
        trims=[Trim(rng.randrange(3), rng.randrange(3)) for _ in range(rng.randint(0, 2))],
        forks=[Fork(rng.randrange(3), numbers(), rng.randrange(3)) for _ in range(rng.randint(0, 2))],
        extend_ids=extend_ids,
        extend_token_counts=[rng.randrange(3) for _ in extend_ids],
        appends=appended,
        admissions=[some_admission(rng) for _ in range(rng.randint(0, 2))],
        admission_token_budget=rng.randrange(3),
        admission_reserve=rng.randrange(3),
    )


def some_admission(rng: random.Random) -> Admission:
    tokens = pack(*(rng.randrange(2) for _ in range(rng.randint(0, 3))))
    return Admission(rng.randrange(3), tokens, rng.randrange(3), rng.choice([b"", b"s", tokens[:4]]))


def changed(request: StepRequest) -> Iterator[StepRequest]:
    """The request, different in one place."""
    yield replace(request, releases=[*request.releases, 0])
    yield replace(request, trims=[Trim(0, 0), *request.trims])
    yield replace(request, forks=[*request.forks, Fork(0, [], 0)])
    yield replace(request, extend_ids=[*request.extend_ids, 0])
    yield replace(request, extend_token_counts=[*request.extend_token_counts, 0])
    yield replace(request, appends={**request.appends, 77: b""})
    yield replace(request, admissions=[*request.admissions, Admission(0, b"")])
    yield replace(request, admission_token_budget=request.admission_token_budget + 1)
    yield replace(request, admission_reserve=request.admission_reserve + 1)
    for i, fork in enumerate(request.forks):
        for other in (
            replace(fork, child_ids=[*fork.child_ids, 0]),
            replace(fork, parent_id=fork.parent_id + 1),
            replace(fork, num_tokens=fork.num_tokens + 1),
        ):
            yield replace(request, forks=[*request.forks[:i], other, *request.forks[i + 1 :]])
    for i, trim in enumerate(request.trims):
        yield replace(request, trims=[*request.trims[:i], replace(trim, num_tokens=9), *request.trims[i + 1 :]])
    for i, admission in enumerate(request.admissions):
        for other_admission in (
            replace(admission, tokens=admission.tokens + pack(0)),
            replace(admission, salt=admission.salt + b"\0"),
            replace(admission, max_compute=admission.max_compute + 1),
            replace(admission, seq_id=admission.seq_id + 1),
            replace(admission, tokens=admission.tokens[4:], salt=admission.salt + admission.tokens[:4])
            if admission.tokens
            else replace(admission, seq_id=-1),
        ):
            yield replace(request, admissions=[*request.admissions[:i], other_admission, *request.admissions[i + 1 :]])
    for seq_id, tokens in request.appends.items():
        yield replace(request, appends={**request.appends, seq_id: tokens + pack(0)})
    if len(request.extend_ids):
        yield replace(request, extend_ids=[int(request.extend_ids[0]) + 1, *request.extend_ids[1:]])
        yield replace(request, extend_ids=request.extend_ids[1:])
        yield replace(request, extend_ids=request.extend_ids[1:], extend_token_counts=[0, *request.extend_token_counts])


def test_two_different_requests_have_different_digests() -> None:
    rng, seen = random.Random(1), dict[bytes, StepRequest]()
    for _ in range(300):
        request = some_request(rng)
        for other in (request, *changed(request)):
            assert (other is request) == (other == request)
            assert seen.setdefault(other.digest(), other) == other


def test_equal_requests_have_equal_digests_whether_of_lists_or_arrays() -> None:
    rng = random.Random(2)
    for _ in range(100):
        request = some_request(rng)
        arrays = replace(
            request,
            releases=tuple(request.releases),
            forks=[replace(fork, child_ids=tuple(fork.child_ids)) for fork in request.forks],
            extend_ids=ids(*request.extend_ids),
            extend_token_counts=ids(*request.extend_token_counts),
            appends=dict(request.appends),
            admissions=tuple(request.admissions),
        )
        assert arrays.digest() == request.digest() == replace(request).digest()


def test_a_request_of_nothing_has_the_digest_of_any_such() -> None:
    nothing = StepRequest(trims=[], extend_ids=np.zeros(0, np.int32), extend_token_counts=np.zeros(0, np.int32))
    assert nothing.digest() == StepRequest(releases=[], trims=[], forks=[], appends={}, admissions=[]).digest()
