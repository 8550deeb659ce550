"""The begin and the end of a step that is one graph, against the host's own tables and tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.ring_layout import LAST_SAMPLED, LENGTH, POSITION, ROW, TOKEN, RingLayout
from quire.kernels.step_ring import StepMemory, begin_step, end_step
from quire.worker.memory.sequence_table import Int64s, SequenceTable
from quire.worker.memory.step_ring import RingOutOfStep, StepRing

NUM_SLOTS, MAX_NUM_SEQS, MAX_BLOCKS, BLOCK_SIZE = 3, 6, 150, 16
TEMPERATURE, FIRST_SLOT = 4, 5
WINDOWED = (False, True)
LAYOUT = RingLayout(
    num_slots=NUM_SLOTS,
    max_num_seqs=MAX_NUM_SEQS,
    num_inputs=FIRST_SLOT + len(WINDOWED),
    temperature=TEMPERATURE,
    first_slot=FIRST_SLOT,
    max_changes=400,
)
NO_BLOCK = -7
"""In the block tables of a step before it begins."""


class Ring:
    """A table, a ring, and the memory of steps; tokens are drawn here in place of a sampler."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.table = SequenceTable(
            max_num_seqs=MAX_NUM_SEQS, max_blocks_per_seq=MAX_BLOCKS, device=device, windowed=WINDOWED
        )
        self.ring = StepRing(LAYOUT, device)

        def ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(shape, NO_BLOCK, dtype=dtype, device=device)

        self.memory = StepMemory(
            inputs=ints(LAYOUT.num_inputs, MAX_NUM_SEQS),
            token_ids=ints(MAX_NUM_SEQS),
            block_tables=ints(len(WINDOWED), MAX_NUM_SEQS, MAX_BLOCKS, dtype=torch.int32),
            seq_lens=ints(MAX_NUM_SEQS, dtype=torch.int32),
            temperature=ints(MAX_NUM_SEQS, dtype=torch.float32),
            sampled=ints(MAX_NUM_SEQS),
            tables=self.table.block_tables,
            last_token=self.table.last_token,
            state=self.ring.state,
        )
        self.random = random.Random(seed)
        self.lengths: dict[int, int] = {}
        self.tokens: dict[int, int] = {}
        self._next_block = 1

    def add(self, length: int) -> int:
        row = self.table.add()
        self.lengths[row] = 0
        self._grow(row, length)
        self.tokens[row] = LAST_SAMPLED
        return row

    def _grow(self, row: int, length: int) -> None:
        held, needed = -(-self.lengths[row] // BLOCK_SIZE), -(-length // BLOCK_SIZE)
        for group in range(len(WINDOWED)) if needed > held else ():
            block_ids = list(range(self._next_block, self._next_block + needed - held))
            self._next_block += len(block_ids)
            self.table.stage_blocks(row, held, block_ids, group=group)
        self.lengths[row] = length

    def fork(self, row: int) -> int:
        child = self.table.fork(row)
        num_blocks = self.table.num_blocks(row)
        for group in range(len(WINDOWED)):
            first = self.table.num_passed(row, group=group)
            self.table.stage_blocks(child, first, self.table.block_ids(row, group=group)[first:], group=group)
        assert self.table.num_blocks(child) == num_blocks
        self.lengths[child], self.tokens[child] = self.lengths[row], self.tokens[row]
        return child

    def remove(self, row: int) -> None:
        self.table.remove(row)
        del self.lengths[row], self.tokens[row]

    def inputs(self, rows: Sequence[int]) -> Int64s:
        """One more token for each row; a row without a sampled token is given one."""
        inputs = np.zeros((LAYOUT.num_inputs, len(rows)), dtype=np.int64)
        for index, row in enumerate(rows):
            self._grow(row, self.lengths[row] + 1)
            given = 100 + row if self.tokens[row] == LAST_SAMPLED else LAST_SAMPLED
            inputs[[ROW, TOKEN, POSITION, LENGTH], index] = row, given, self.lengths[row] - 1, self.lengths[row]
        inputs[TEMPERATURE] = np.arange(len(rows), dtype=np.float64).view(np.int64)
        inputs[FIRST_SLOT:] = self.table.slots(list(rows), inputs[POSITION], block_size=BLOCK_SIZE)
        return inputs

    def launch(self, inputs: Int64s, *, bucket: int = MAX_NUM_SEQS, fill: bool = True) -> None:
        """Run a step, and hold what it began with against the host."""
        rows = inputs[ROW].tolist()
        if fill:
            self.ring.fill(inputs, self.table, rows)
        self.memory.block_tables.fill_(NO_BLOCK)
        begin_step(self.ring.slots, self.memory, layout=LAYOUT, num_seqs=bucket, block_size=BLOCK_SIZE)
        if fill:
            self._check_begin(inputs, rows, bucket)
            self.table.note_sent()
            self.table.note_sampled(rows, inputs[LENGTH])
        drawn = [self.random.randrange(1000) for _ in range(bucket)]
        self.memory.sampled[:bucket] = torch.tensor(drawn)
        end_step(self.ring.words, self.memory, layout=LAYOUT, num_seqs=bucket)
        if fill:
            self.tokens.update(zip(rows, drawn, strict=False))

    def _check_begin(self, inputs: Int64s, rows: list[int], bucket: int) -> None:
        num_seqs, memory = len(rows), self.memory
        padding = [[self.table.padding_row]] + [[0]] * (FIRST_SLOT - 1) + [[-1]] * len(WINDOWED)
        expected = np.concatenate([inputs, np.repeat(padding, bucket - num_seqs, axis=1)], axis=1)
        assert memory.inputs[:, :bucket].tolist() == expected.tolist()
        assert memory.seq_lens[:bucket].tolist() == expected[LENGTH].tolist()
        assert memory.temperature[:bucket].tolist() == [*range(num_seqs)] + [0] * (bucket - num_seqs)
        tokens = [
            self.tokens[row] if given == LAST_SAMPLED else given for row, given in zip(rows, inputs[TOKEN], strict=True)
        ]
        assert memory.token_ids[:bucket].tolist() == tokens + [0] * (bucket - num_seqs)
        assert self.table.is_on_device()
        for group in range(len(WINDOWED)):
            for index, row in enumerate(rows):
                own = self.table.block_ids(row, group=group)
                filled = own + [NO_BLOCK] * (MAX_BLOCKS - len(own))
                assert memory.block_tables[group, index].tolist() == filled
            assert (memory.block_tables[group, num_seqs:] == NO_BLOCK).all()


@pytest.fixture
def ring(device: torch.device) -> Ring:
    return Ring(device)


@pytest.mark.sample
@pytest.mark.parametrize("seed", range(2))
def test_steps_of_random_schedules_begin_with_the_hosts_numbers_and_end_with_their_tokens(
    seed: int, device: torch.device
) -> None:
    """Sequences begin, grow over the borders of blocks, fork and end; their tokens are read up to NUM_SLOTS behind."""
    run, launched, expected = Ring(device, seed), [], []
    for number in range(25):
        if len(run.lengths) < MAX_NUM_SEQS and run.random.random() < 0.6:
            run.add(run.random.choice([0, 14, 15, 16, 130 * BLOCK_SIZE]))
        sampled = [row for row, token in run.tokens.items() if token != LAST_SAMPLED]
        if sampled and len(run.lengths) < MAX_NUM_SEQS and run.random.random() < 0.2:
            run.fork(run.random.choice(sampled))
        if len(run.lengths) > 2 and run.random.random() < 0.3:
            run.remove(run.random.choice(list(run.lengths)))
        for row, length in run.lengths.items():
            if length > 3 * BLOCK_SIZE and run.table.num_passed(row, group=1) == 0 and run.random.random() < 0.3:
                run.table.pass_blocks(row, 2, group=1)
        if not run.lengths:
            continue
        rows = run.random.sample(list(run.lengths), run.random.randint(1, len(run.lengths)))
        run.launch(run.inputs(rows), bucket=run.random.randint(len(rows), MAX_NUM_SEQS))
        launched.append(run.ring.launched(len(rows)))
        expected.append([run.tokens[row] for row in rows])
        if len(launched) - number % NUM_SLOTS > 0 or not run.ring.has_room:
            assert _tokens(launched.pop(0)) == expected.pop(0)
    assert [_tokens(each) for each in launched] == expected
    run.table.check_invariants()
    last_tokens = run.table.last_token.tolist()
    sampled_rows = {row: token for row, token in run.tokens.items() if token != LAST_SAMPLED}
    assert {row: last_tokens[row] for row in sampled_rows} == sampled_rows


def _tokens(launched: object) -> list[int]:
    tokens, *others = launched.wait()  # type: ignore[attr-defined]
    assert others == [None] * 4
    result: list[int] = tokens.tolist()
    return result


def test_a_slot_is_written_again_only_when_its_tokens_were_read(ring: Ring) -> None:
    row = ring.add(3)
    launched = []
    for _ in range(NUM_SLOTS):
        assert ring.ring.has_room
        ring.launch(ring.inputs([row]))
        launched.append(ring.ring.launched(1))
    assert not ring.ring.has_room
    with pytest.raises(ValueError, match="slot 1 of the ring is taken"):
        ring.ring.fill(ring.inputs([row]), ring.table, [row])
    _tokens(launched[1])
    assert not ring.ring.has_room, "the device takes the slots in turn"
    _tokens(launched[0])
    assert ring.ring.has_room


def test_a_device_that_is_at_another_turn_runs_padding_and_is_found_out(ring: Ring) -> None:
    row = ring.add(3)
    inputs = ring.inputs([row])
    ring.launch(inputs, fill=False)  # a step that the host does not know of
    assert ring.memory.seq_lens.tolist() == [0] * MAX_NUM_SEQS
    assert (ring.memory.inputs[FIRST_SLOT:] == -1).all()
    assert not ring.table.is_on_device(), "nothing was written"
    ring.ring.fill(inputs, ring.table, [row])
    launched = ring.ring.launched(1)
    with pytest.raises(RingOutOfStep, match="slot 1 of the ring does not have the tokens of turn 1"):
        launched.wait()
    ring.ring.begin_anew()
    ring.launch(inputs)
    assert _tokens(ring.ring.launched(1)) == [ring.tokens[row]]


def test_more_changes_than_a_slot_has_room_for_are_sent_before(ring: Ring) -> None:
    rows = [ring.add(MAX_BLOCKS * BLOCK_SIZE - 1) for _ in range(2)]
    assert ring.table.num_staged > LAYOUT.max_changes
    inputs = ring.inputs(rows)
    ring.ring.fill(inputs, ring.table, rows)
    assert ring.table.num_staged == 0
    ring.launch(inputs)


def test_arguments_that_do_not_fit_are_refused(ring: Ring) -> None:
    slots, words, memory = ring.ring.slots, ring.ring.words, ring.memory
    with pytest.raises(ValueError, match="num_seqs=7 is above 6"):
        begin_step(slots, memory, layout=LAYOUT, num_seqs=7, block_size=BLOCK_SIZE)
    with pytest.raises(ValueError, match="slots has shape"):
        begin_step(words, memory, layout=LAYOUT, num_seqs=1, block_size=BLOCK_SIZE)
    with pytest.raises(ValueError, match=r"words is torch\.int32"):
        end_step(words.to(torch.int32), memory, layout=LAYOUT, num_seqs=1)
    with pytest.raises(ValueError, match="num_seqs=0 is below 1"):
        end_step(words, memory, layout=LAYOUT, num_seqs=0)
