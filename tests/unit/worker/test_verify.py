"""The worker's own check of ownership: it accepts all steps that the protocol allows, and reports others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from quire.cache.v1 import grant_pb2
from quire.worker.memory.layer_spec import Causal, Sliding
from quire.worker.run.executor import Outcome, StepResult
from quire.worker.run.verify import OwnershipVerifier, OwnershipViolation

SIZE = 4
NUM_BLOCKS = 9
NUM_HOST_BLOCKS = 4
Run = tuple[int, int, list[int]]
"""A sequence, where its run begins, and the tokens that are run."""


class Worker:
    """A verifier, and its inputs: device tables as the grants made them unless a test says otherwise."""

    def __init__(self) -> None:
        self.verifier = OwnershipVerifier(num_blocks=NUM_BLOCKS, block_size=SIZE, num_host_blocks=NUM_HOST_BLOCKS)
        self.tables: dict[tuple[str, int], list[int]] = {}
        self.step_numbers: dict[str, int] = {}

    def step(
        self,
        *runs: Run,
        lease: str = "lease-aa",
        writes: Sequence[tuple[int, int, list[int]]] = (),
        released: Sequence[int] = (),
        forks: Sequence[tuple[int, int]] = (),
        copies: Sequence[tuple[int, int]] = (),
        offloaded: Sequence[int] = (),
        offloads: Sequence[tuple[int, int]] = (),
        restores: Sequence[tuple[int, int]] = (),
        known: int | None = None,
        outcome: Outcome = Outcome.COMPUTED,
        sampled: dict[int, int] | None = None,
        going_on: Sequence[int] = (),
        accepted: dict[int, list[int]] | None = None,
        **lies: Any,
    ) -> None:
        """One step. Writes are (sequence, first index, blocks); `going_on` are runs of the token sampled last.

        accepted has the sequences with drafts, which all their tokens but the first are, and the tokens before sampled.
        """
        accepted = accepted or {}
        number = self.step_numbers[lease] = self.step_numbers.get(lease, 0) + 1
        grant = grant_pb2.StepGrant(
            lease_id=lease,
            step_number=number,
            known_step_number=number - 1 if known is None else known,
            released_sequence_ids=released,
            fork_parent_ids=[parent for parent, _ in forks],
            fork_child_ids=[child for _, child in forks],
            write_sequence_ids=[seq_id for seq_id, _, _ in writes],
            write_first_indexes=[first for _, first, _ in writes],
            write_block_counts=[len(ids) for _, _, ids in writes],
            write_block_ids=[block_id for _, _, ids in writes for block_id in ids],
            copy_source_block_ids=[source for source, _ in copies],
            copy_target_block_ids=[target for _, target in copies],
            offloaded_sequence_ids=offloaded,
            offload_source_block_ids=[block for block, _ in offloads],
            offload_target_host_block_ids=[host for _, host in offloads],
            restore_source_host_block_ids=[host for host, _ in restores],
            restore_target_block_ids=[block for _, block in restores],
            run_sequence_ids=[seq_id for seq_id, _, _ in runs],
            run_starts=[start for _, start, _ in runs],
            run_token_counts=[len(tokens) for _, _, tokens in runs],
            given_run_indexes=[index for index, (seq_id, _, _) in enumerate(runs) if seq_id not in going_on],
            run_draft_counts=[len(tokens) - 1 if seq_id in accepted else 0 for seq_id, _, tokens in runs],
        )
        for seq_id in offloaded:
            self.tables.pop((lease, seq_id))
        for seq_id, first, ids in writes:
            self.tables.setdefault((lease, seq_id), [])[first : first + len(ids)] = ids
        self.verifier.apply(grant)
        if runs and outcome in (Outcome.COMPUTED, Outcome.FAILED):
            tables = [self.tables[lease, seq_id] for seq_id, _, _ in runs]
            told = {
                "tokens": [token for _, _, tokens in runs for token in tokens],
                "slots": [[slot for run, table in zip(runs, tables, strict=True) for slot in slots_of(run, table)]],
                "tables": [tables],
            }
            self.verifier.begin_step(grant, **(told | lies))
        tokens_of = {seq_id: [*accepted.get(seq_id, []), token] for seq_id, token in (sampled or {}).items()}
        result = StepResult(
            number,
            outcome,
            sampled_ids=list(tokens_of),
            sampled_tokens=[token for tokens in tokens_of.values() for token in tokens],
            sampled_counts=[len(tokens) for tokens in tokens_of.values()],
        )
        self.verifier.end_step(grant, result)


def slots_of(run: Run, table: list[int]) -> list[int]:
    _, start, tokens = run
    padded = [*table, 0]  # as on the device
    return [padded[p // SIZE] * SIZE + p % SIZE for p in range(start, start + len(tokens))]


@pytest.fixture
def worker() -> Worker:
    """Sequence 1 has run the tokens 0 .. 5 in blocks 1 and 2."""
    worker = Worker()
    worker.step((1, 0, list(range(6))), writes=[(1, 0, [1, 2])], sampled={1: 6})
    return worker


def assert_violation(worker: Worker | GroupedWorker, invariant: str, block_id: int, what: str) -> None:
    """It was noticed and named."""
    violation = worker.verifier.violation
    assert violation is not None
    assert str(violation).startswith(f"{invariant} violated: block {block_id} ")
    assert what in str(violation)


WINDOW = 6
MASKS = (Causal(), Sliding(WINDOW))


class GroupedWorker:
    """A verifier of two layer groups, one without and one with a window. Tables are given by group."""

    def __init__(self) -> None:
        self.verifier = OwnershipVerifier(
            num_blocks=NUM_BLOCKS * 2, block_size=SIZE, num_host_blocks=NUM_HOST_BLOCKS, masks=MASKS
        )
        self.tables: dict[int, list[list[int]]] = {}
        self.number = 0

    def step(
        self,
        *runs: Run,
        writes: Sequence[tuple[int, int, int, list[int]]] = (),
        passed: Sequence[tuple[int, int, int]] = (),
        released: Sequence[int] = (),
        forks: Sequence[tuple[int, int]] = (),
        copies: Sequence[tuple[int, int]] = (),
        offloaded: Sequence[int] = (),
        offloads: Sequence[tuple[int, int]] = (),
        restores: Sequence[tuple[int, int]] = (),
        known: int | None = None,
        **lies: Any,
    ) -> None:
        """One step. Writes are (sequence, group, first index, blocks), passed (sequence, group, number)."""
        self.number += 1
        grant = grant_pb2.StepGrant(
            lease_id="lease-aa",
            step_number=self.number,
            known_step_number=self.number - 1 if known is None else known,
            released_sequence_ids=released,
            fork_parent_ids=[parent for parent, _ in forks],
            fork_child_ids=[child for _, child in forks],
            passed_sequence_ids=[seq_id for seq_id, _, _ in passed],
            passed_layer_groups=[group for _, group, _ in passed],
            passed_block_counts=[count for _, _, count in passed],
            write_sequence_ids=[seq_id for seq_id, _, _, _ in writes],
            write_layer_groups=[group for _, group, _, _ in writes],
            write_first_indexes=[first for _, _, first, _ in writes],
            write_block_counts=[len(ids) for _, _, _, ids in writes],
            write_block_ids=[block_id for _, _, _, ids in writes for block_id in ids],
            copy_source_block_ids=[source for source, _ in copies],
            copy_target_block_ids=[target for _, target in copies],
            offloaded_sequence_ids=offloaded,
            offload_source_block_ids=[block for block, _ in offloads],
            offload_target_host_block_ids=[host for _, host in offloads],
            restore_source_host_block_ids=[host for host, _ in restores],
            restore_target_block_ids=[block for _, block in restores],
            run_sequence_ids=[seq_id for seq_id, _, _ in runs],
            run_starts=[start for _, start, _ in runs],
            run_token_counts=[len(tokens) for _, _, tokens in runs],
            given_run_indexes=range(len(runs)),
        )
        for seq_id in offloaded:
            self.tables.pop(seq_id)
        for seq_id, group, count in passed:
            self.tables[seq_id][group][:count] = [0] * count
        for seq_id, group, first, ids in writes:
            table = self.tables.setdefault(seq_id, [[], []])[group]
            table += [0] * (first - len(table))
            table[first : first + len(ids)] = ids
        self.verifier.apply(grant)
        if runs:
            tables = [[self.tables[seq_id][group] for seq_id, _, _ in runs] for group in range(2)]
            told = {
                "tokens": [token for _, _, tokens in runs for token in tokens],
                "slots": [
                    [slot for run, table in zip(runs, each, strict=True) for slot in slots_of(run, table)]
                    for each in tables
                ],
                "tables": tables,
            }
            self.verifier.begin_step(grant, **(told | lies))
        self.verifier.end_step(grant, StepResult(self.number, Outcome.COMPUTED))


@pytest.fixture
def grouped() -> GroupedWorker:
    """Sequence 1 has run the tokens 0 .. 11 in blocks 1 to 3 without a window, and in blocks 4 to 6 with one."""
    worker = GroupedWorker()
    worker.step((1, 0, list(range(12))), writes=[(1, 0, 0, [1, 2, 3]), (1, 1, 0, [4, 5, 6])])
    return worker


class TestLayerGroups:
    """A window of 6: position 12 sees 7 .. 12, so that blocks of 0 .. 3 are passed."""

    def test_passed_blocks_are_another_sequences_of_any_group(self, grouped: GroupedWorker) -> None:
        grouped.step((1, 12, [12]), passed=[(1, 1, 1)], writes=[(1, 0, 3, [7]), (1, 1, 3, [8])])
        grouped.step((2, 0, [9, 9]), (1, 13, [13]), writes=[(2, 0, 0, [4]), (2, 1, 0, [9])])
        grouped.step((2, 2, [9]), (1, 14, [14]))

    def test_a_sequence_that_was_found_begins_at_its_window(self, grouped: GroupedWorker) -> None:
        grouped.step((2, 8, [8, 9]), writes=[(2, 0, 0, [1, 2, 7]), (2, 1, 0, [4, 5, 8])])
        grouped.step((3, 12, [12]), writes=[(3, 0, 0, [1, 2, 3, 9]), (3, 1, 1, [5, 6, 10])])
        grouped.step((3, 13, [13]), (2, 10, [10]))

    def test_a_fork_begins_at_its_window(self, grouped: GroupedWorker) -> None:
        writes = [(2, 0, 0, [1, 2, 7]), (2, 1, 1, [5, 8])]
        grouped.step((2, 11, [20]), forks=[(1, 2)], writes=writes, copies=[(3, 7), (6, 8)])
        grouped.step((1, 12, [12]), (2, 12, [12]), writes=[
            (1, 0, 3, [9]), (1, 1, 3, [10]), (2, 0, 3, [11]), (2, 1, 3, [12]),
        ])  # fmt: skip

    def test_a_sequence_goes_on_with_what_it_had_in_the_host_tier(self, grouped: GroupedWorker) -> None:
        grouped.step(offloaded=[1], passed=[], offloads=[(3, 0), (5, 1), (6, 2)])
        writes = [(1, 0, 0, [1, 2, 7, 8]), (1, 1, 1, [9, 10, 11])]
        grouped.step((1, 12, [12]), writes=writes, restores=[(0, 7), (1, 9), (2, 10)])

    def test_a_run_of_many_tokens_sees_the_window_of_its_first(self, grouped: GroupedWorker) -> None:
        writes = [(1, 0, 3, [7, 8]), (1, 1, 3, [9, 10])]
        grouped.step((1, 12, list(range(12, 20))), passed=[(1, 1, 1)], writes=writes)
        with pytest.raises(OwnershipViolation):
            grouped.step((1, 15, list(range(15, 20))), passed=[(1, 1, 3)])
        assert_violation(grouped, "I5", 0, "is read as block 2 of layer group 1, which was passed")

    def test_a_block_that_was_passed_too_early(self, grouped: GroupedWorker) -> None:
        with pytest.raises(OwnershipViolation):
            grouped.step((1, 12, [12]), passed=[(1, 1, 2)], writes=[(1, 0, 3, [7]), (1, 1, 3, [8])])
        assert_violation(grouped, "I5", 0, "is read as block 1 of layer group 1, which was passed")

    def test_a_device_that_still_has_a_passed_block(self, grouped: GroupedWorker) -> None:
        writes = [(1, 0, 3, [7]), (1, 1, 3, [8])]
        with pytest.raises(OwnershipViolation):
            grouped.step((1, 12, [12]), passed=[(1, 1, 1)], writes=writes, tables=[[[1, 2, 3, 7]], [[4, 5, 6, 8]]])
        assert_violation(grouped, "I5", 4, "is read as block 0, which is 0")

    def test_tables_of_the_wrong_groups(self, grouped: GroupedWorker) -> None:
        writes = [(1, 0, 3, [7]), (1, 1, 3, [8])]
        with pytest.raises(OwnershipViolation):
            grouped.step((1, 12, [12]), writes=writes, tables=[[[4, 5, 6, 8]], [[1, 2, 3, 7]]])
        assert_violation(grouped, "I5", 4, "is read as block 0, which is 1")

    def test_a_slot_of_the_wrong_group(self, grouped: GroupedWorker) -> None:
        with pytest.raises(OwnershipViolation):
            grouped.step((1, 12, [12]), writes=[(1, 0, 3, [7]), (1, 1, 3, [8])], slots=[[7 * SIZE], [7 * SIZE]])
        assert_violation(grouped, "I5", 7, "is written for position 12")

    def test_a_block_that_was_handed_to_another_group_is_not_read(self, grouped: GroupedWorker) -> None:
        with pytest.raises(OwnershipViolation):
            grouped.step((2, 0, [9]), (1, 12, [12]), writes=[
                (2, 0, 0, [5]), (2, 1, 0, [10]), (1, 0, 3, [7]), (1, 1, 3, [8]),
            ])  # fmt: skip
        assert_violation(grouped, "I5", 5, "was given to layer group 0 since, and is read in group 1 (position 7)")

    def test_a_block_that_was_handed_to_another_group_is_not_written(self, grouped: GroupedWorker) -> None:
        with pytest.raises(OwnershipViolation):
            grouped.step((1, 11, [11]), writes=[(2, 0, 0, [6])], known=0)
        assert_violation(grouped, "I5", 6, "was given to layer group 0 since, and would be written in group 1")

    def test_one_block_in_two_groups_of_a_sequence(self, grouped: GroupedWorker) -> None:
        with pytest.raises(OwnershipViolation):
            grouped.step((2, 0, [9]), writes=[(2, 0, 0, [7]), (2, 1, 0, [7])])
        assert_violation(grouped, "I5", 7, "was given to layer group 1 since, and would be written in group 0")

    def test_what_a_group_found_has_to_be_what_another_found(self, grouped: GroupedWorker) -> None:
        """Blocks of other tokens in the windowed group: each group by itself is a possible prefix."""
        grouped.step((2, 0, [7] * 8), writes=[(2, 0, 0, [7, 8]), (2, 1, 0, [9, 10])])
        with pytest.raises(OwnershipViolation):
            grouped.step((3, 8, [8]), writes=[(3, 0, 0, [1, 2, 11]), (3, 1, 0, [9, 10, 12])])
        assert_violation(grouped, "I5", 9, "does not have the content of the sequence (position 3)")

    def test_equal_tokens_of_another_group_are_other_content(self, grouped: GroupedWorker) -> None:
        grouped.step((2, 0, [0, 1, 2, 3]), writes=[(2, 0, 0, [9]), (2, 1, 0, [10])])
        with pytest.raises(OwnershipViolation):
            grouped.step((3, 8, [8]), released=[2], writes=[(3, 0, 0, [1, 2, 11]), (3, 1, 0, [9, 5, 12])])
        assert_violation(grouped, "I5", 9, "does not have the content of the sequence (position 3)")

    def test_a_copy_between_groups(self, grouped: GroupedWorker) -> None:
        with pytest.raises(OwnershipViolation):
            grouped.step((2, 11, [20]), forks=[(1, 2)], writes=[(2, 0, 0, [1, 2, 7]), (2, 1, 1, [5, 8])],
                         copies=[(6, 7), (3, 8)])  # fmt: skip
        assert_violation(grouped, "I5", 7, "is the target of a copy from layer group 1, and one of group 0")

    def test_a_restore_to_another_group(self, grouped: GroupedWorker) -> None:
        grouped.step(offloaded=[1], offloads=[(3, 0), (5, 1), (6, 2)])
        with pytest.raises(OwnershipViolation):
            grouped.step((1, 12, [12]), writes=[(1, 0, 0, [1, 2, 7, 8]), (1, 1, 1, [9, 10, 11])],
                         restores=[(1, 7), (0, 9), (2, 10)])  # fmt: skip
        assert_violation(grouped, "I5", 7, "is the target of a copy from layer group 1, and one of group 0")


class TestWhatIsAllowed:
    def test_a_sequence_goes_on_from_its_sampled_token(self, worker: Worker) -> None:
        worker.step((1, 6, [6]), going_on=[1], sampled={1: 7})
        worker.step((1, 7, [7]), going_on=[1], sampled={1: 8})

    def test_a_published_prefix_is_shared_across_leases(self, worker: Worker) -> None:
        worker.step((1, 4, [4, 5]), lease="lease-bb", writes=[(1, 0, [1, 3])])

    def test_a_burst_of_equal_prompts_shares_what_one_of_them_fills(self) -> None:
        worker = Worker()
        worker.step((2, 4, [4]), (1, 0, [0, 1, 2, 3, 4]), writes=[(1, 0, [1, 2]), (2, 0, [1, 3])])

    def test_a_released_block_is_another_sequences(self, worker: Worker) -> None:
        worker.step(released=[1])
        worker.step((1, 0, [9, 9, 9, 9, 9]), lease="lease-bb", writes=[(1, 0, [1, 2])])
        worker.step((1, 5, [9]), lease="lease-bb")

    def test_a_published_block_that_is_handed_out_anew_is_written_again(self, worker: Worker) -> None:
        worker.step((1, 6, [6]))
        worker.step(released=[1])
        worker.step((2, 0, [9, 9]), writes=[(2, 0, [1])])
        worker.step((2, 2, [9]))

    def test_a_trimmed_sequences_tail_is_another_sequences(self, worker: Worker) -> None:
        worker.step((1, 0, [9, 9]), lease="lease-bb", writes=[(1, 0, [2])])
        worker.step((1, 4, [8]), writes=[(1, 1, [3])])
        worker.step((1, 2, [9]), lease="lease-bb")

    def test_a_trimmed_sequence_writes_again_in_a_block_that_is_not_published(self, worker: Worker) -> None:
        worker.step((1, 6, [6, 7]), known=0)
        worker.step((1, 5, [9, 9, 9]), known=0)

    def test_a_fork_writes_in_a_copy(self, worker: Worker) -> None:
        worker.step((2, 5, [9]), forks=[(1, 2)], writes=[(2, 0, [1, 3])], copies=[(2, 3)])
        worker.step((1, 6, [6]), (2, 6, [9]))

    def test_a_fork_goes_on_from_its_parents_sampled_token(self, worker: Worker) -> None:
        worker.step((2, 6, [6]), forks=[(1, 2)], writes=[(2, 0, [1, 3])], copies=[(2, 3)], going_on=[2])

    def test_a_failed_step_is_run_again(self, worker: Worker) -> None:
        worker.step((1, 6, [6, 7]), outcome=Outcome.FAILED)
        worker.step((1, 6, [6, 7]))

    def test_a_skipped_step_leaves_everything(self, worker: Worker) -> None:
        worker.step((1, 6, [6]), outcome=Outcome.SKIPPED)
        worker.step((1, 6, [6]), going_on=[1])

    def test_an_equal_block_takes_the_place_of_ones_own(self, worker: Worker) -> None:
        worker.step((1, 0, [0, 1, 2, 3, 4]), lease="lease-bb", writes=[(1, 0, [3, 4])])
        worker.step((1, 5, [5]), lease="lease-bb", writes=[(1, 0, [1])])

    def test_a_sequence_goes_on_with_what_it_had_in_the_host_tier(self, worker: Worker) -> None:
        worker.step(offloaded=[1], offloads=[(1, 3), (2, 0)])
        worker.step((1, 0, [9] * 8), lease="lease-bb", writes=[(1, 0, [1, 2])])
        worker.step((1, 6, [6]), writes=[(1, 0, [4, 5])], restores=[(3, 4), (0, 5)])
        worker.step((1, 7, [7]))

    def test_a_restored_sequence_shares_what_is_still_published(self, worker: Worker) -> None:
        worker.step((1, 6, [6]))
        worker.step(offloaded=[1], offloads=[(1, 0), (2, 1)])
        worker.step((1, 7, [7]), writes=[(1, 0, [1, 5])], restores=[(1, 5)])

    def test_a_sequence_that_ends_in_the_host_tier_is_forgotten(self, worker: Worker) -> None:
        worker.step(offloaded=[1], offloads=[(1, 0), (2, 1)])
        worker.step(released=[1])
        worker.step((1, 0, [9]), writes=[(1, 0, [3])])

    def test_a_host_block_is_another_leases_when_it_came_back(self, worker: Worker) -> None:
        worker.step(offloaded=[1], offloads=[(1, 0), (2, 1)])
        worker.step((1, 6, [6]), writes=[(1, 0, [1, 2])], restores=[(0, 1), (1, 2)])
        worker.step((5, 0, [8, 8]), lease="lease-bb", writes=[(5, 0, [3])])
        worker.step(lease="lease-bb", offloaded=[5], offloads=[(3, 0)])
        worker.step((5, 2, [8]), lease="lease-bb", writes=[(5, 0, [4])], restores=[(0, 4)])

    def test_any_lease_reads_the_copy_of_a_block_that_was_evicted(self, worker: Worker) -> None:
        worker.step(released=[1])
        worker.step((2, 0, [9] * SIZE), writes=[(2, 0, [1])], offloads=[(1, 3)])
        worker.step((5, SIZE, [4]), lease="lease-bb", writes=[(5, 0, [3, 4])], restores=[(3, 3)])

    def test_a_chunk_that_failed_before_it_left_is_computed_again(self, worker: Worker) -> None:
        worker.step((1, 6, [6, 7]), outcome=Outcome.FAILED)
        worker.step(offloaded=[1], offloads=[(1, 0), (2, 1)])
        worker.step((1, 6, [6, 7]), writes=[(1, 0, [3, 4])], restores=[(0, 3), (1, 4)])

    def test_after_a_fence_or_in_a_new_epoch_blocks_are_anybodys(self, worker: Worker) -> None:
        worker.verifier.fence_lease("lease-aa")
        with pytest.raises(KeyError):
            worker.step((1, 6, [6]))
        worker.step((1, 0, [9]), lease="lease-bb", writes=[(1, 0, [2])])
        worker.verifier.begin_epoch()
        worker.step((1, 0, [9]), lease="lease-cc", writes=[(1, 0, [2])])


class TestDrafts:
    def test_the_slots_of_rejected_drafts_are_written_again(self, worker: Worker) -> None:
        worker.step((1, 6, [6, 50, 51]), writes=[(1, 2, [3])], sampled={1: 7}, accepted={1: []})
        worker.step((1, 7, [7, 8, 60]), sampled={1: 9}, accepted={1: [8]})
        worker.step((1, 9, [9]), sampled={1: 10}, going_on=[1])
        worker.step((1, 10, [10]), going_on=[1])

    def test_a_fork_copies_a_block_with_rejected_drafts(self, worker: Worker) -> None:
        worker.step((1, 6, [6, 50]), sampled={1: 7}, accepted={1: []})
        fork = {"forks": [(1, 2)], "writes": [(2, 0, [1, 4])], "copies": [(2, 4)]}
        worker.step((2, 6, [6]), (1, 7, [7]), **fork, sampled={1: 8}, going_on=[1])

    def test_a_read_of_a_rejected_draft(self, worker: Worker) -> None:
        worker.step((1, 6, [6, 50, 51]), writes=[(1, 2, [3])], sampled={1: 7}, accepted={1: []})
        with pytest.raises(OwnershipViolation):
            worker.step((1, 8, [8]))
        assert_violation(worker, "I6", 2, "is read, and was not computed")

    def test_an_accepted_draft_that_was_not_sampled(self, worker: Worker) -> None:
        with pytest.raises(OwnershipViolation):
            worker.step((1, 6, [6, 50, 51]), writes=[(1, 2, [3])], sampled={1: 7}, accepted={1: [49]})
        assert_violation(worker, "I6", 2, "has drafts accepted that are not the tokens sampled")

    def test_more_tokens_than_there_are_drafts(self, worker: Worker) -> None:
        with pytest.raises(OwnershipViolation):
            worker.step((1, 6, [6, 50]), sampled={1: 7}, accepted={1: [50, 51]})
        assert_violation(worker, "I6", 2, "has drafts accepted that are not the tokens sampled")

    def test_drafts_behind_another_token_than_the_one_sampled_last(self, worker: Worker) -> None:
        with pytest.raises(OwnershipViolation):
            worker.step((1, 6, [5, 50]), sampled={1: 7}, accepted={1: []})
        assert_violation(worker, "I5", 2, "would get a token that was not sampled last")

    def test_drafts_in_a_block_of_another_lease(self, worker: Worker) -> None:
        worker.step((1, 0, [9]), lease="lease-bb", writes=[(1, 0, [3])])
        with pytest.raises(OwnershipViolation):
            worker.step((1, 6, [6, 50, 51]), writes=[(1, 2, [3])], tables=[[[1, 2, 4]]], accepted={1: []})


class TestWhatIsNot:
    def test_a_write_after_the_block_was_handed_to_another_lease(self, worker: Worker) -> None:
        worker.step((1, 0, [9]), lease="lease-bb", writes=[(1, 0, [2])])
        with pytest.raises(OwnershipViolation, match="lease lease-aa sequence 1 step 2"):
            worker.step((1, 6, [6]))
        assert_violation(worker, "I5", 2, "was handed to lease lease-bb sequence 1 since")
        with pytest.raises(OwnershipViolation, match="step 2"):
            worker.step(lease="lease-bb")  # nothing may run any more

    def test_a_read_of_what_another_has_overwritten(self, worker: Worker) -> None:
        worker.step((1, 0, [9]), lease="lease-bb", writes=[(1, 0, [1])])
        with pytest.raises(OwnershipViolation):
            worker.step((1, 6, [6]))
        assert_violation(worker, "I5", 1, "does not have the content of the sequence (position 0)")

    def test_a_read_of_what_a_sequence_of_the_same_step_overwrites(self, worker: Worker) -> None:
        with pytest.raises(OwnershipViolation):
            worker.step((1, 6, [6]), (2, 0, [9]), writes=[(2, 0, [1])])
        assert_violation(worker, "I5", 1, "does not have the content of the sequence")

    def test_a_block_shared_by_a_sequence_with_other_tokens(self, worker: Worker) -> None:
        worker.step((2, 0, [7, 7, 7, 7, 7]), writes=[(2, 0, [3, 4])])
        with pytest.raises(OwnershipViolation):
            worker.step((3, 5, [5]), writes=[(3, 0, [3, 2])])
        assert_violation(worker, "I4", 2, "was computed behind other tokens (position 4)")

    def test_a_block_of_other_tokens_in_the_place_of_ones_own(self, worker: Worker) -> None:
        worker.step((2, 0, [7, 7, 7, 7, 7]), writes=[(2, 0, [3, 4])])
        with pytest.raises(OwnershipViolation):
            worker.step((1, 6, [6]), writes=[(1, 0, [3])])
        assert_violation(worker, "I5", 3, "does not have the content of the sequence")

    def test_a_read_of_what_was_never_computed(self, worker: Worker) -> None:
        with pytest.raises(OwnershipViolation):
            worker.step((2, 4, [4]), writes=[(2, 0, [3, 4])])
        assert_violation(worker, "I6", 3, "was not computed")

    def test_a_read_of_a_hole_before_what_was_computed(self, worker: Worker) -> None:
        with pytest.raises(OwnershipViolation):
            worker.step((2, 6, [6]), writes=[(2, 0, [3, 2])])
        assert_violation(worker, "I6", 3, "was not computed (position 0)")

    def test_a_read_of_what_an_earlier_epoch_computed(self, worker: Worker) -> None:
        worker.verifier.begin_epoch()
        with pytest.raises(OwnershipViolation):
            worker.step((1, 4, [4]), writes=[(1, 0, [1, 2])])
        assert_violation(worker, "I6", 1, "was not computed")

    def test_a_read_of_what_a_failed_step_wrote(self, worker: Worker) -> None:
        worker.step((1, 6, [6, 7]), outcome=Outcome.FAILED)
        with pytest.raises(OwnershipViolation):
            worker.step((1, 8, [8]), writes=[(1, 2, [3])])
        assert_violation(worker, "I6", 2, "was not computed")

    def test_a_read_of_what_was_computed_before_it_was_handed_out(self, worker: Worker) -> None:
        worker.step(released=[1])
        worker.step((2, 0, [9]), writes=[(2, 0, [1])])
        with pytest.raises(OwnershipViolation):
            worker.step((2, 2, [9]))
        assert_violation(worker, "I6", 1, "was not computed")

    def test_a_write_in_a_published_block(self, worker: Worker) -> None:
        worker.step((1, 6, [6]))
        with pytest.raises(OwnershipViolation):
            worker.step((1, 3, [9]))
        assert_violation(worker, "I3", 1, "is published, and would be written")

    def test_a_write_in_a_published_block_that_was_one_of_many(self, worker: Worker) -> None:
        worker.step((2, 0, [*range(8)]), writes=[(2, 0, [3, 4, 5])])
        worker.step((2, 8, [8]))
        with pytest.raises(OwnershipViolation):
            worker.step((2, 7, [9]))
        assert_violation(worker, "I3", 4, "is published, and would be written")

    def test_a_write_behind_what_another_lease_has_published(self, worker: Worker) -> None:
        worker.step(released=[1])
        with pytest.raises(OwnershipViolation):
            worker.step((1, 3, [3]), lease="lease-bb", writes=[(1, 0, [1])])
        assert_violation(worker, "I3", 1, "is published, and would be written")

    def test_two_runs_that_write_one_slot(self) -> None:
        worker = Worker()
        with pytest.raises(OwnershipViolation):
            worker.step((1, 0, [1]), (2, 0, [2]), writes=[(1, 0, [1]), (2, 0, [1])])
        assert_violation(worker, "I3", 1, "would be written by two runs")

    def test_a_copy_into_a_block_of_another_lease(self, worker: Worker) -> None:
        with pytest.raises(OwnershipViolation):
            worker.step(lease="lease-bb", copies=[(3, 2)])
        assert_violation(worker, "I5", 2, "is the target of a copy")

    def test_a_copy_into_a_published_block(self, worker: Worker) -> None:
        worker.step((1, 6, [6]))
        with pytest.raises(OwnershipViolation):
            worker.step(copies=[(2, 1)])
        assert_violation(worker, "I3", 1, "is the target of a copy, and published")

    def test_a_restore_from_a_host_block_of_another_lease(self, worker: Worker) -> None:
        worker.step(offloaded=[1], offloads=[(1, 0), (2, 1)])
        with pytest.raises(OwnershipViolation):
            worker.step((1, 6, [6]), lease="lease-bb", writes=[(1, 0, [3, 4])], restores=[(0, 3), (1, 4)])
        assert_violation(worker, "I5", 3, "would be copied from host block 0, which is not this lease's")

    def test_a_copy_of_an_evicted_block_that_was_not_whole(self, worker: Worker) -> None:
        worker.step(released=[1])
        worker.step((2, 0, [9] * SIZE), writes=[(2, 0, [2])], offloads=[(2, 3)])
        with pytest.raises(OwnershipViolation):
            worker.step((5, SIZE, [4]), lease="lease-bb", writes=[(5, 0, [3, 4])], restores=[(3, 3)])
        assert_violation(worker, "I5", 3, "would be copied from host block 3, which is not this lease's")

    def test_a_restore_of_what_was_overwritten_in_the_host_tier(self, worker: Worker) -> None:
        worker.step((2, 0, [7] * 6), writes=[(2, 0, [3, 4])])
        worker.step(offloaded=[1], offloads=[(1, 0), (2, 1)])
        worker.step(offloaded=[2], offloads=[(3, 0), (4, 2)])
        with pytest.raises(OwnershipViolation):
            worker.step((1, 6, [6]), writes=[(1, 0, [5, 6])], restores=[(0, 5), (1, 6)])
        assert_violation(worker, "I5", 5, "does not have the content of the sequence")

    def test_a_restore_of_another_sequences_blocks(self, worker: Worker) -> None:
        worker.step((2, 0, [7] * 6), writes=[(2, 0, [3, 4])])
        worker.step(offloaded=[1, 2], offloads=[(1, 0), (2, 1), (3, 2), (4, 3)])
        with pytest.raises(OwnershipViolation):
            worker.step((1, 6, [6]), writes=[(1, 0, [5, 6])], restores=[(2, 5), (3, 6)])
        assert_violation(worker, "I5", 5, "does not have the content of the sequence")

    def test_a_sequence_that_came_back_without_its_copies(self, worker: Worker) -> None:
        worker.step(offloaded=[1], offloads=[(1, 0), (2, 1)])
        with pytest.raises(OwnershipViolation):
            worker.step((1, 6, [6]), writes=[(1, 0, [5, 6])], restores=[(0, 5)])
        assert_violation(worker, "I6", 6, "is read, and was not computed")

    def test_a_host_block_that_is_not_there(self, worker: Worker) -> None:
        with pytest.raises(OwnershipViolation):
            worker.step(offloaded=[1], offloads=[(1, NUM_HOST_BLOCKS)])
        assert_violation(worker, "I5", NUM_HOST_BLOCKS, "is not one of the host tier")

    def test_a_copy_of_other_tokens(self, worker: Worker) -> None:
        worker.step((2, 0, [7, 7, 7, 7, 7]), writes=[(2, 0, [3, 4])])
        with pytest.raises(OwnershipViolation):
            worker.step((3, 5, [9]), forks=[(1, 3)], writes=[(3, 0, [1, 5])], copies=[(4, 5)])
        assert_violation(worker, "I5", 5, "does not have the content of the sequence")

    @pytest.mark.parametrize("block_id", [0, NUM_BLOCKS])
    def test_a_block_that_nobody_can_own(self, worker: Worker, block_id: int) -> None:
        with pytest.raises(OwnershipViolation):
            worker.step(writes=[(2, 0, [block_id])])
        assert_violation(worker, "I5", block_id, "is not one that can be owned")

    def test_a_token_that_was_not_sampled(self, worker: Worker) -> None:
        with pytest.raises(OwnershipViolation):
            worker.step((1, 6, [5]), going_on=[1])
        assert_violation(worker, "I5", 2, "was not sampled last")

    def test_a_forks_token_is_the_parents(self, worker: Worker) -> None:
        with pytest.raises(OwnershipViolation):
            worker.step((2, 6, [5]), forks=[(1, 2)], writes=[(2, 0, [1, 2])], going_on=[2])
        assert_violation(worker, "I5", 2, "was not sampled last")

    def test_a_run_beyond_the_blocks_granted(self, worker: Worker) -> None:
        with pytest.raises(OwnershipViolation):
            worker.step((1, 6, [6, 7, 8]), tables=[[[1, 2, 0]]])
        assert_violation(worker, "I5", 0, "is read beyond the 2 blocks granted")

    def test_a_device_table_that_is_not_what_was_granted(self, worker: Worker) -> None:
        with pytest.raises(OwnershipViolation):
            worker.step((1, 6, [6]), tables=[[[3, 2]]])
        assert_violation(worker, "I5", 3, "is read as block 0, which is 1")

    def test_a_slot_that_is_not_the_positions(self, worker: Worker) -> None:
        with pytest.raises(OwnershipViolation):
            worker.step((1, 6, [6]), slots=[[3 * SIZE + 2]])
        assert_violation(worker, "I5", 3, "is written for position 6")
