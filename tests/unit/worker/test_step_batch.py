"""Block tables on the device, and the packed batch that is built from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.worker.memory.sequence_table import SequenceTable, SequenceTableFull, SequenceTableStatistics
from quire.worker.memory.step_batch import StepBatch, build_step_batch

BLOCK_SIZE = 4


def make_table(*tables: list[int], max_num_seqs: int = 5, max_blocks_per_seq: int = 6) -> SequenceTable:
    table = SequenceTable(max_num_seqs=max_num_seqs, max_blocks_per_seq=max_blocks_per_seq, device="cpu")
    for block_ids in tables:
        table.stage_blocks(table.add(), 0, block_ids)
    return table


def build(table: SequenceTable, *runs: tuple[int, int, list[int] | None]) -> StepBatch:
    """A batch of (row, start, token ids); None for the last sampled token."""
    return build_step_batch(
        table,
        block_size=BLOCK_SIZE,
        rows=[row for row, _, _ in runs],
        starts=[start for _, start, _ in runs],
        counts=[1 if ids is None else len(ids) for _, _, ids in runs],
        token_ids=[ids for _, _, ids in runs],
    )


class TestSequenceTable:
    def test_nothing_reaches_the_device_before_flush(self) -> None:
        table = make_table([3, 4], [9])
        assert not table.block_tables.any()
        table.check_invariants()
        table.flush()
        assert table.block_tables[0, :2, :3].tolist() == [[3, 4, 0], [9, 0, 0]]
        assert table.block_tables.dtype == torch.int32
        table.check_invariants()
        table.flush()
        assert table.statistics() == SequenceTableStatistics(
            max_num_seqs=5, max_blocks_per_seq=6, num_seqs=2, num_blocks=3, num_staged=0, num_flushes=1
        )

    def test_entries_are_appended_and_replaced(self) -> None:
        table = make_table([3, 4])
        table.stage_blocks(0, 2, [5, 6])
        table.stage_blocks(0, 1, [8])
        assert table.block_ids(0) == [3, 8, 5, 6]
        table.flush()
        table.stage_blocks(0, 3, [7])
        assert table.block_tables[0, 0].tolist() == [3, 8, 5, 6, 0, 0]
        table.flush()
        assert table.block_tables[0, 0].tolist() == [3, 8, 5, 7, 0, 0]
        table.check_invariants()

    def test_a_removed_row_points_nowhere(self) -> None:
        table = make_table([3, 4], [9, 8, 7])
        table.store_sampled([1], torch.tensor([5]), [2])
        table.flush()
        table.remove(1)
        assert table.add() == 1
        assert table.last_token_position(1) is None
        table.stage_blocks(1, 0, [6])
        table.flush()
        assert table.block_tables[0, 1].tolist() == [6, 0, 0, 0, 0, 0]
        table.check_invariants()

    def test_a_fork_has_its_own_blocks_and_a_copy_of_the_last_token(self) -> None:
        table = make_table([3, 4])
        table.store_sampled([0], torch.tensor([17]), [6])
        child = table.fork(0)
        assert table.num_blocks(child) == 0
        table.stage_blocks(child, 0, [3, 5])
        table.store_sampled([0], torch.tensor([18]), [7])
        table.flush()
        assert table.block_tables[0, :2, :2].tolist() == [[3, 4], [3, 5]]
        assert table.last_token[:2].tolist() == [18, 17]
        assert (table.last_token_position(0), table.last_token_position(child)) == (7, 6)
        table.check_invariants()

    def test_rows_run_out_and_come_back(self) -> None:
        table = make_table([1], [2], max_num_seqs=2)
        for take_row in (table.add, lambda: table.fork(0)):
            with pytest.raises(SequenceTableFull, match="all 2 rows are in use"):
                take_row()
        table.check_invariants()
        table.remove(0)
        assert table.add() == 0

    @pytest.mark.parametrize(
        ("first_index", "block_ids", "message"),
        [
            (3, [5], "first_index=3 leaves a hole after the 2 blocks of row 0"),
            (-1, [5], "first_index=-1"),
            (2, [5, 6, 7, 8, 9], "would hold 7 blocks; max_blocks_per_seq is 6"),
            (2, [5, 0], "above the null block 0"),
        ],
    )
    def test_what_cannot_be_staged_is_refused(self, first_index: int, block_ids: list[int], message: str) -> None:
        table = make_table([3, 4])
        with pytest.raises(ValueError, match=message):
            table.stage_blocks(0, first_index, block_ids)
        assert table.block_ids(0) == [3, 4]
        table.check_invariants()

    def test_a_free_row_is_no_row(self) -> None:
        table = make_table([3])
        actions: list[Any] = [
            lambda: table.remove(2),
            lambda: table.fork(2),
            lambda: table.stage_blocks(2, 0, [1]),
            lambda: table.stage_blocks(-1, 0, [1]),
            lambda: table.stage_blocks(5, 0, [1]),  # the padding row
            lambda: table.store_sampled([2], torch.tensor([1]), [0]),
            lambda: table.last_token_position(2),
            lambda: table.block_ids(2),
        ]
        for action in actions:
            with pytest.raises(KeyError):
                action()
        table.check_invariants()

    def test_invariants_notice_a_device_that_differs(self) -> None:
        table = make_table([3])
        table.flush()
        table.block_tables[0, 0, 0] = 4
        with pytest.raises(AssertionError, match="device differs"):
            table.check_invariants()


class TestLayerGroups:
    """A table of two groups, the second one with a window."""

    def make(self) -> SequenceTable:
        table = SequenceTable(max_num_seqs=3, max_blocks_per_seq=6, device="cpu", windowed=[False, True])
        row = table.add()
        table.stage_blocks(row, 0, [3, 4, 5])
        table.stage_blocks(row, 0, [7, 8, 9], group=1)
        return table

    def test_each_group_has_a_table_of_its_own(self) -> None:
        table = self.make()
        table.flush()
        assert table.block_tables[:, 0, :4].tolist() == [[3, 4, 5, 0], [7, 8, 9, 0]]
        assert table.statistics().num_blocks == 6
        table.stage_blocks(0, 3, [6])
        assert (table.num_blocks(0), table.num_blocks(0, group=1)) == (4, 3)
        table.check_invariants()

    def test_passed_blocks_become_the_null_block(self) -> None:
        table = self.make()
        table.flush()
        table.pass_blocks(0, 2, group=1)
        assert table.block_ids(0, group=1) == [0, 0, 9]
        assert (table.num_passed(0, group=1), table.num_blocks(0, group=1)) == (2, 3)
        assert table.statistics().num_blocks == 4
        table.stage_blocks(0, 3, [2], group=1)
        table.flush()
        assert table.block_tables[:, 0, :5].tolist() == [[3, 4, 5, 0, 0], [0, 0, 9, 2, 0]]
        table.check_invariants()

    @pytest.mark.parametrize(
        ("num_blocks", "group", "message"),
        [
            (1, 0, "layer group 0 has no window"),
            (1, 2, r"layer group 2 is not in 0 \.\. 1"),
            (1, -1, r"layer group -1 is not in 0 \.\. 1"),
            (2, 1, r"num_blocks=2 to pass is not in 3 \.\. 3"),
            (4, 1, r"num_blocks=4 to pass is not in 3 \.\. 3"),
        ],
    )
    def test_what_cannot_be_passed_is_refused(self, num_blocks: int, group: int, message: str) -> None:
        table = self.make()
        table.pass_blocks(0, 2, group=1)
        with pytest.raises(ValueError, match=message):
            table.pass_blocks(0, num_blocks, group=group)
        with pytest.raises(KeyError):
            table.pass_blocks(1, 1, group=1)
        assert table.block_ids(0, group=1) == [0, 0, 9]
        table.check_invariants()

    def test_a_windowed_group_may_begin_late_and_another_may_not(self) -> None:
        table = self.make()
        row = table.add()
        table.stage_blocks(row, 2, [6], group=1)
        assert table.block_ids(row, group=1) == [0, 0, 6]
        with pytest.raises(ValueError, match="first_index=2 leaves a hole after the 0 blocks of row 1"):
            table.stage_blocks(row, 2, [5])
        for first_index in (1, 4):
            with pytest.raises(ValueError, match=r"leaves a hole after entries 2 \.\. 2 of row 1"):
                table.stage_blocks(row, first_index, [5], group=1)
        with pytest.raises(ValueError, match=r"layer group 2 is not in 0 \.\. 1"):
            table.stage_blocks(row, 0, [5], group=2)
        table.check_invariants()

    def test_a_removed_row_points_nowhere_in_any_group(self) -> None:
        table = self.make()
        table.pass_blocks(0, 1, group=1)
        before = table.digest()
        table.flush()
        table.remove(0)
        table.flush()
        assert not table.block_tables.any()
        assert table.digest() != before
        assert table.statistics().num_blocks == 0
        table.check_invariants()
        row = table.add()
        table.stage_blocks(row, 0, [1], group=1)
        assert table.block_ids(row, group=1) == [1]
        table.check_invariants()

    def test_a_digest_tells_passed_blocks_and_groups_apart(self) -> None:
        tables = [self.make() for _ in range(3)]
        assert tables[0].digest() == tables[1].digest()
        tables[1].pass_blocks(0, 1, group=1)
        tables[2].stage_blocks(0, 0, [9], group=1)
        assert len({table.digest() for table in tables}) == 3

    def test_a_batch_has_tables_and_slots_of_each_group(self) -> None:
        table = self.make()
        table.pass_blocks(0, 1, group=1)
        table.stage_blocks(table.add(), 0, [1])
        table.stage_blocks(1, 0, [2], group=1)
        batch = build(table, (1, 0, [5, 6]), (0, 7, [1, 2, 3]))
        assert batch.block_tables.tolist() == [[[1, 0, 0], [3, 4, 5]], [[2, 0, 0], [0, 8, 9]]]
        assert batch.slot_mapping.tolist() == [[4, 5, 19, 20, 21], [8, 9, 35, 36, 37]]
        assert table.slots([0, 1], np.array([7, 1]), block_size=4).tolist() == [[19, 5], [35, 9]]

    def test_a_run_without_the_blocks_of_its_tokens_in_a_group_is_refused(self) -> None:
        table = self.make()
        table.pass_blocks(0, 2, group=1)
        with pytest.raises(ValueError, match=r"row 0: its blocks of layer group 1 hold positions 8 \.\. 11"):
            build(table, (0, 7, [1]))
        table.stage_blocks(0, 3, [6])
        with pytest.raises(ValueError, match=r"layer group 1 hold positions 8 \.\. 11, and the tokens take 12 \.\. 12"):
            build(table, (0, 12, [1]))


class TestStepBatch:
    def test_packs_prompts_and_decodes(self) -> None:
        table = make_table([7, 2, 5], [9], [4, 3])
        table.store_sampled([1], torch.tensor([31]), [2])
        batch = build(table, (2, 3, [60, 61, 62]), (1, 2, None), (0, 0, [1, 2, 3, 4, 5]))
        assert batch.input_ids.tolist() == [60, 61, 62, 31, 1, 2, 3, 4, 5]
        assert batch.positions.tolist() == [3, 4, 5, 2, 0, 1, 2, 3, 4]
        assert batch.slot_mapping.tolist() == [[19, 12, 13, 38, 28, 29, 30, 31, 8]]
        assert batch.block_tables.tolist() == [[[4, 3], [9, 0], [7, 2]]]
        assert batch.seq_lens.tolist() == [6, 3, 5]
        assert batch.cu_seqlens_q.tolist() == [0, 3, 4, 9]
        assert batch.last_indices.tolist() == [2, 3, 8]
        assert (batch.seq_lens_host, batch.counts_host) == ((6, 3, 5), (3, 1, 5))
        assert (batch.num_tokens, batch.num_seqs) == (9, 3)

    def test_dtypes_are_as_promised(self) -> None:
        batch = build(make_table([7]), (0, 0, [1]))
        int64 = (batch.input_ids, batch.positions, batch.slot_mapping, batch.last_indices)
        int32 = (batch.block_tables, batch.seq_lens, batch.cu_seqlens_q)
        assert all(tensor.dtype == torch.int64 for tensor in int64)
        assert all(tensor.dtype == torch.int32 for tensor in int32)

    def test_each_tensor_is_where_kernels_expect_it(self) -> None:
        """At a multiple of 16 bytes: kernels are compiled again for other addresses."""
        table = make_table([7, 2], [9], [4])
        for runs in ([(0, 0, [1])], [(0, 0, [1, 2, 3, 4, 5]), (1, 0, [1, 2])], [(row, 0, [1]) for row in range(3)]):
            batch = build(table, *runs)
            numbers = (batch.input_ids, batch.positions, batch.slot_mapping, batch.last_indices)
            for tensor in (*numbers, batch.block_tables, batch.seq_lens, batch.cu_seqlens_q):
                assert tensor.data_ptr() % 16 == 0
                assert tensor.is_contiguous()

    def test_takes_arrays_for_tokens(self) -> None:
        table = make_table([7])
        batch = build_step_batch(
            table, block_size=4, rows=[0], starts=[0], counts=[2], token_ids=[np.array([5, 6], dtype=np.int32)]
        )
        assert batch.input_ids.tolist() == [5, 6]

    def test_sampled_tokens_are_read_where_they_are(self) -> None:
        table = make_table([7], [8])
        table.store_sampled([1, 0], torch.tensor([41, 40]), [3, 1])
        batch = build(table, (0, 1, None), (1, 3, None))
        assert batch.input_ids.tolist() == [40, 41]

    def test_flushes_what_is_staged(self) -> None:
        table = make_table([7])
        table.flush()
        table.stage_blocks(0, 1, [3])
        batch = build(table, (0, 4, [9]))
        assert batch.slot_mapping.tolist() == [[12]]
        assert batch.block_tables.tolist() == [[[7, 3]]]

    @pytest.mark.parametrize(
        ("run", "message"),
        [
            ((0, 8, [1]), r"layer group 0 hold positions 0 \.\. 7, and the tokens take 8 \.\. 8"),
            ((0, 3, [1, 2, 3, 4, 5, 6]), r"row 0: .* the tokens take 3 \.\. 8"),
            ((0, -1, [1]), "start=-1"),
            ((0, 0, []), "count=0 with 0 tokens"),
            ((0, 5, None), "start=5, but its last sampled token takes position 6"),
            ((1, 0, None), "start=0, but its last sampled token takes position None"),
        ],
    )
    def test_what_cannot_run_is_refused(self, run: tuple[int, int, list[int] | None], message: str) -> None:
        table = make_table([7, 3], [8])
        table.store_sampled([0], torch.tensor([1]), [6])
        with pytest.raises(ValueError, match=message):
            build(table, run)
        assert table.statistics().num_staged == 3

    def test_a_count_that_is_not_the_number_of_tokens_is_refused(self) -> None:
        with pytest.raises(ValueError, match="count=3 with 2 tokens"):
            build_step_batch(make_table([7]), block_size=4, rows=[0], starts=[0], counts=[3], token_ids=[[1, 2]])
        with pytest.raises(ValueError, match="count=1 with 0 tokens"):
            build_step_batch(make_table([7]), block_size=4, rows=[0], starts=[0], counts=[1], token_ids=[[]])
        with pytest.raises(ValueError, match="count=2 with 1 tokens"):
            build_step_batch(make_table([7]), block_size=4, rows=[0], starts=[0], counts=[2], token_ids=[None])
        with pytest.raises(ValueError, match=r"have \[1, 1, 1, 0\] items"):
            build_step_batch(make_table([7]), block_size=4, rows=[0], starts=[0], counts=[1], token_ids=[])
        with pytest.raises(ValueError, match="a row occurs twice"):
            build(make_table([7]), (0, 0, [1]), (0, 1, [1]))
        with pytest.raises(KeyError):
            build(make_table([7]), (3, 0, [1]))
