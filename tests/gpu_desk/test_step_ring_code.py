"""The machine code of the begin and the end of a step that is one graph, for five GPUs."""

from __future__ import annotations

import pytest
import torch
from machine_code import GPU, GPUS, Launch, compile_launch, recorded

from quire.kernels.ring_layout import RingLayout
from quire.kernels.step_ring import StepMemory, begin_step, end_step

MAX_NUM_SEQS = 256


def launches(
    gpu: GPU, *, num_seqs: int, num_groups: int = 1, max_blocks: int = 2048, num_rows: int = 257
) -> list[Launch]:
    layout = RingLayout(
        num_slots=4,
        max_num_seqs=MAX_NUM_SEQS,
        num_inputs=9 + num_groups,
        temperature=8,
        first_slot=9,
        max_changes=1024,
    )

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    memory = StepMemory(
        inputs=empty(layout.num_inputs, MAX_NUM_SEQS),
        token_ids=empty(MAX_NUM_SEQS),
        block_tables=empty(num_groups, MAX_NUM_SEQS, max_blocks, dtype=torch.int32),
        seq_lens=empty(MAX_NUM_SEQS, dtype=torch.int32),
        temperature=empty(MAX_NUM_SEQS, dtype=torch.float32),
        sampled=empty(MAX_NUM_SEQS),
        tables=empty(num_groups, num_rows, max_blocks, dtype=torch.int32),
        last_token=empty(num_rows),
        state=empty(2),
    )
    slots, words = empty(4, layout.slot_words), empty(4, MAX_NUM_SEQS)

    def run() -> None:
        begin_step(slots, memory, layout=layout, num_seqs=num_seqs, block_size=16)
        end_step(words, memory, layout=layout, num_seqs=num_seqs)

    return recorded(run, gpu)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.arch)
def test_the_inputs_are_asked_for_before_any_is_waited_for(gpu: GPU) -> None:
    """A load from the host's memory takes a microsecond or more: the header and the row are under way together."""
    begin, end = launches(gpu, num_seqs=32)
    code = compile_launch(begin)
    print(code.summary())
    assert code.spills == 0
    assert code.registers <= 64
    assert compile_launch(end).spills == 0
    loads = [index for index, each in enumerate(code.instructions) if each.opcode.startswith("LDG")]
    slot = loads[1:6]  # behind the turn
    between = code.instructions[slot[0] : slot[4]]
    assert not [each for each in between if each.opcode.startswith(("BAR", "BRA", "STG", "SHFL"))]
    assert code.count("BAR") > 0, "changes of a row are written before the row is read"
    end_code = compile_launch(end)
    assert end_code.count(r"STG\.E\.64") >= 2, "a token and its tag are one store"


def test_batches_tables_and_rows_of_any_size_compile_once() -> None:
    gpu = GPUS[2]
    keys = {
        launch.key
        for num_seqs, max_blocks, num_rows in ((1, 2048, 257), (8, 17, 9), (256, 100, 1025))
        for launch in launches(gpu, num_seqs=num_seqs, max_blocks=max_blocks, num_rows=num_rows)
    }
    assert len(keys) == 2
