# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""The begin and the end of a decode step that is one CUDA graph: inputs from a ring in host memory, tokens to one.

A graph has no arguments. So the device counts its steps itself, its turns. A step reads the slot of its turn:

    host    writes slot `turn % slots`, and launches the graph; both count one on
    device  begin_step  slot -> inputs, token ids, lengths, temperatures, entries of block tables that have changed
            ...         forward, sampler
            end_step    tokens -> last tokens of the rows, and with the step's tag to the ring of tokens; one turn on

No copy is made. The host's memory is pinned, so both kernels read and write it as they do their own: a slot crosses the
bus in one round trip, because no load depends on what another one brought. The host writes a slot again when the tokens
of the step that had it were read.

A slot has the number of its turn. If that is not the device's, one of them has missed a step: the kernel then takes the
step for padding alone, which reads and writes no block, and its tokens have no tag.

A token and the tag of its step are one word of 8 bytes, which a GPU writes at once. So a token that has the right tag
is the right token, whatever else has arrived. (NCCL's low-latency protocol sends 4 bytes with 4 bytes of flag for the
same reason.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.dependent_launch import dependent_options, wait_for_earlier_kernels
from quire.kernels.launching import (
    next_power_of_2,
    require_at_least,
    require_contiguous,
    require_dtype,
    require_same_device,
    require_shape,
)
from quire.kernels.ring_layout import HEADER_WORDS, LAST_SAMPLED, LENGTH, ROW, TAGS, TOKEN, RingLayout

_LANES = tl.constexpr(128)
_HEADER = tl.constexpr(HEADER_WORDS)
_TAGS = tl.constexpr(TAGS)
_ROW = tl.constexpr(ROW)
_TOKEN = tl.constexpr(TOKEN)
_LENGTH = tl.constexpr(LENGTH)
_LAST_SAMPLED = tl.constexpr(LAST_SAMPLED)


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory of a step on the device. Sizes: L sequences, I inputs, G layer groups, R rows, M blocks.

    inputs          [I, L]      int64
    token_ids       [L]         int64
    block_tables    [G, L, M]   int32, of the step's sequences
    seq_lens        [L]         int32
    temperature     [L]         float32
    sampled         [L]         int64
    tables          [G, R, M]   int32, of all rows; the last row is the padding's
    last_token      [R]         int64
    state           [2]         int64, the device's turn, and the tag of the step that runs
    """

    inputs: Tensor
    token_ids: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    temperature: Tensor
    sampled: Tensor
    tables: Tensor
    last_token: Tensor
    state: Tensor


def begin_step(slots: Tensor, memory: StepMemory, *, layout: RingLayout, num_seqs: int, block_size: int) -> None:
    """Take the inputs of the device's turn from its slot: those of up to num_seqs sequences, the others are padding.

        slots   [num_slots, slot_words]     int64, pinned memory of the host, or on the device

    Afterwards `inputs` has the columns of num_seqs sequences, and the other tensors what follows from them. Of block
    tables only the entries of a sequence's length are written. Padding has the last row, length 0, slot -1, and zeros.
    Raises ValueError if a shape, dtype or device is another. No sync.
    Cost: one launch of num_seqs programs. Each reads row_words words of the host's memory, and its changes.
    """
    _check(memory, layout, num_seqs)
    require_shape("slots", slots, (layout.num_slots, layout.slot_words))
    _check_on_host("slots", slots, memory.state)
    num_groups, num_rows, max_blocks = memory.tables.shape
    begin_step_kernel[(num_seqs,)](
        slots,
        memory.state,
        memory.inputs,
        memory.token_ids,
        memory.block_tables,
        memory.seq_lens,
        memory.temperature,
        memory.tables,
        memory.last_token,
        num_rows,
        max_blocks,
        layout.max_num_seqs,
        NUM_SLOTS=layout.num_slots,
        SLOT_WORDS=layout.slot_words,
        ROW_WORDS=layout.row_words,
        FIRST_CHANGE=layout.first_change,
        NUM_INPUTS=layout.num_inputs,
        FIRST_SLOT=layout.first_slot,
        TEMPERATURE=layout.temperature,
        NUM_GROUPS=num_groups,
        BLOCK_SIZE=block_size,
        **dependent_options(begin_step_kernel, memory.state.device),
        num_warps=4,
    )


def end_step(words: Tensor, memory: StepMemory, *, layout: RingLayout, num_seqs: int) -> None:
    """Give out the step's tokens, those of num_seqs sequences, and begin the next turn.

        words   [num_slots, max_num_seqs]   int64, pinned memory of the host, or on the device: tag << 32 | token

    Raises ValueError if a shape, dtype or device is another. No sync. Cost: one launch of one program.
    """
    _check(memory, layout, num_seqs)
    require_shape("words", words, (layout.num_slots, layout.max_num_seqs))
    _check_on_host("words", words, memory.state)
    end_step_kernel[(1,)](
        words,
        memory.state,
        memory.inputs,
        memory.sampled,
        memory.last_token,
        num_seqs,
        layout.max_num_seqs,
        NUM_SLOTS=layout.num_slots,
        SEQS=next_power_of_2(layout.max_num_seqs),
        **dependent_options(end_step_kernel, memory.state.device),
        num_warps=4,
    )


def _check(memory: StepMemory, layout: RingLayout, num_seqs: int) -> None:
    num_groups, num_rows, max_blocks = memory.tables.shape
    most, num_inputs = layout.max_num_seqs, layout.num_inputs
    expected = {
        "inputs": ((num_inputs, most), torch.int64),
        "token_ids": ((most,), torch.int64),
        "block_tables": ((num_groups, most, max_blocks), torch.int32),
        "seq_lens": ((most,), torch.int32),
        "temperature": ((most,), torch.float32),
        "sampled": ((most,), torch.int64),
        "tables": ((num_groups, num_rows, max_blocks), torch.int32),
        "last_token": ((num_rows,), torch.int64),
        "state": ((2,), torch.int64),
    }
    tensors = {name: getattr(memory, name) for name in expected}
    for name, (shape, dtype) in expected.items():
        require_shape(name, tensors[name], shape)
        require_dtype(name, tensors[name], dtype)
        require_contiguous(name, tensors[name])
    require_same_device(**tensors)
    require_at_least("num_seqs", num_seqs, 1)
    if num_seqs > most:
        raise ValueError(f"num_seqs={num_seqs} is above {most}, the most of the ring's layout")
    if layout.first_slot + num_groups != num_inputs:
        raise ValueError(f"num_inputs={num_inputs}, but slots of {num_groups} groups begin at {layout.first_slot}")


def _check_on_host(name: str, tensor: Tensor, beside: Tensor) -> None:
    require_dtype(name, tensor, torch.int64)
    require_contiguous(name, tensor)
    if tensor.device != beside.device and tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}, neither on the host nor on {beside.device}")


@triton.jit
def _column(values, columns, COLUMN: tl.constexpr):
    """One of a sequence's values, which a program has in its registers."""
    return tl.sum(tl.where(columns == COLUMN, values, 0), 0)


@triton.jit
def _apply(tables_ptr, changes_ptr, first, end, step):
    """Write changes first .. end - 1 into the tables, _LANES of them, and so many from `step` changes further on."""
    lanes = tl.arange(0, _LANES)
    for base in range(first, end, step):
        mine = base + lanes < end
        change = tl.load(changes_ptr + base + lanes, mask=mine, other=0)
        tl.store(tables_ptr + (change >> 32), (change & 0xFFFFFFFF).to(tl.int32), mask=mine)


@triton.jit(
    do_not_specialize=["num_rows", "max_blocks", "max_num_seqs"],
    do_not_specialize_on_alignment=["slots_ptr", "state_ptr"],
)
def begin_step_kernel(
    slots_ptr,  # [NUM_SLOTS, SLOT_WORDS]
    state_ptr,  # [2]
    inputs_ptr,  # [I, L]
    token_ids_ptr,  # [L]
    block_tables_ptr,  # [G, L, M]
    seq_lens_ptr,  # [L]
    temperature_ptr,  # [L]
    tables_ptr,  # [G, R, M]
    last_token_ptr,  # [R]
    num_rows,
    max_blocks,
    max_num_seqs,
    NUM_SLOTS: tl.constexpr,
    SLOT_WORDS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    FIRST_CHANGE: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    FIRST_SLOT: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier_kernels(PDL)
    seq = tl.program_id(0)
    columns = tl.arange(0, ROW_WORDS)
    turn = tl.load(state_ptr)
    slot_ptr = slots_ptr + (turn % NUM_SLOTS) * SLOT_WORDS
    slot_turn = tl.load(slot_ptr)
    num_seqs = tl.load(slot_ptr + 1)
    first_loose = tl.load(slot_ptr + 2)
    num_loose = tl.load(slot_ptr + 3)
    values = tl.load(slot_ptr + _HEADER + seq * ROW_WORDS + columns)

    is_turn = slot_turn == turn
    is_slot = (columns >= FIRST_SLOT) & (columns < NUM_INPUTS)
    padding = tl.where(is_slot, -1, tl.where(columns == _ROW, num_rows - 1, 0)).to(tl.int64)
    values = tl.where(is_turn & (seq < num_seqs), values, padding)
    tl.store(inputs_ptr + columns * max_num_seqs + seq, values, mask=columns < NUM_INPUTS)
    if seq == 0:
        tl.store(state_ptr + 1, tl.where(is_turn, turn % _TAGS + 1, 0))

    row = _column(values, columns, _ROW)
    token = _column(values, columns, _TOKEN)
    length = _column(values, columns, _LENGTH)
    temperature = _column(values, columns, TEMPERATURE).to(tl.float64, bitcast=True).to(tl.float32)
    last_sampled = tl.load(last_token_ptr + row)
    tl.store(token_ids_ptr + seq, tl.where(token == _LAST_SAMPLED, last_sampled, token))
    tl.store(seq_lens_ptr + seq, length.to(tl.int32))
    tl.store(temperature_ptr + seq, temperature)

    # A program changes the rows that no other one reads: its own, and some of those that are not in the step.
    changes_ptr = slot_ptr + FIRST_CHANGE
    first = _column(values, columns, NUM_INPUTS)
    _apply(tables_ptr, changes_ptr, first, first + _column(values, columns, NUM_INPUTS + 1), _LANES)
    num_loose = tl.where(is_turn, num_loose, 0)
    begin = first_loose + seq * _LANES
    _apply(tables_ptr, changes_ptr, begin, first_loose + num_loose, tl.num_programs(0) * _LANES)
    tl.debug_barrier()

    lanes = tl.arange(0, _LANES)
    num_blocks = tl.cdiv(length, BLOCK_SIZE)
    for group in range(NUM_GROUPS):
        source_ptr = tables_ptr + (group * num_rows + row) * max_blocks
        target_ptr = block_tables_ptr + (group * max_num_seqs + seq).to(tl.int64) * max_blocks
        for base in range(0, num_blocks, _LANES):
            mine = base + lanes < num_blocks
            tl.store(target_ptr + base + lanes, tl.load(source_ptr + base + lanes, mask=mine, other=0), mask=mine)


@triton.jit(
    do_not_specialize=["num_seqs", "max_num_seqs"],
    do_not_specialize_on_alignment=["words_ptr", "state_ptr"],
)
def end_step_kernel(
    words_ptr,  # [NUM_SLOTS, L]
    state_ptr,  # [2]
    inputs_ptr,  # [I, L]
    sampled_ptr,  # [L]
    last_token_ptr,  # [R]
    num_seqs,
    max_num_seqs,
    NUM_SLOTS: tl.constexpr,
    SEQS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier_kernels(PDL)
    seqs = tl.arange(0, SEQS)
    mine = seqs < num_seqs
    turn = tl.load(state_ptr)
    tag = tl.load(state_ptr + 1)
    row = tl.load(inputs_ptr + _ROW * max_num_seqs + seqs, mask=mine, other=0)
    length = tl.load(inputs_ptr + _LENGTH * max_num_seqs + seqs, mask=mine, other=0)
    token = tl.load(sampled_ptr + seqs, mask=mine, other=0)
    tl.store(last_token_ptr + row, token, mask=length > 0)
    tl.store(words_ptr + (turn % NUM_SLOTS) * max_num_seqs + seqs, (tag << 32) | token, mask=mine)
    tl.debug_barrier()  # each warp has its turn before one of them writes the next
    tl.store(state_ptr, turn + 1)
