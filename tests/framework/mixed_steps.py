"""Steps in which some sequence runs several tokens, for two layers of a tiny model on a pool full of NaN."""

from __future__ import annotations

from dataclasses import dataclass

import model_zoo as zoo
import torch

from quire.worker.attention.triton_attention import TritonAttentionStep
from quire.worker.fusion.steps import KernelSteps
from quire.worker.memory.kv_pool import NULL_BLOCK, KVPool
from quire.worker.memory.sequence_table import SequenceTable
from quire.worker.memory.step_batch import StepBatch, build_step_batch
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.preparing import prepare_model

BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS = 16, 48, 8
NUM_LAYERS = 2


@dataclass(frozen=True)
class MixedStep:
    """Rows, and of each the first position and the number of tokens."""

    rows: list[int]
    starts: list[int]
    counts: list[int]


# The second sequence shares the first block of the first one. Both buckets, with padding and without.
TABLES = ([3, 1], [3, 5], [2, 7, 6])
STEPS = {
    "a prompt": MixedStep([0], [0], [20]),
    "a decode, and a prompt behind a cached prefix": MixedStep([0, 1], [20, 16], [1, 4]),
    "a chunk between decodes": MixedStep([1, 2, 0], [20, 0, 21], [1, 10, 1]),
    "the next chunk, a full bucket": MixedStep([2, 0], [10, 22], [7, 1]),
    "decodes": MixedStep([0, 1, 2], [23, 21, 17], [1, 1, 1]),
}


def prepare(family: str, device: torch.device, *, fused: bool = True) -> PagedModel:
    model = zoo.build(family).to(device)
    model.model.layers = model.model.layers[:NUM_LAYERS]
    model.config.num_hidden_layers = NUM_LAYERS
    return prepare_model(
        model,
        max_model_len=MAX_MODEL_LEN,
        step_kind=TritonAttentionStep,
        fused_steps=KernelSteps() if fused else None,
    )


def make_pool(model: PagedModel) -> KVPool:
    """NaN in every block but the null block."""
    pool = model.make_pool(num_blocks=1 + NUM_BLOCKS * len(model.layer_groups), block_size=BLOCK_SIZE)
    for tensor in pool.tensors():
        tensor[NULL_BLOCK + 1 :].fill_(torch.nan)
    return pool


def make_batches(model: PagedModel) -> list[StepBatch]:
    """Batches of the steps; each layer group has NUM_BLOCKS blocks of its own."""
    table = SequenceTable(
        max_num_seqs=3,
        max_blocks_per_seq=MAX_MODEL_LEN // BLOCK_SIZE,
        device=model.device,
        windowed=[group.is_windowed for group in model.layer_groups],
    )
    for blocks in TABLES:
        row = table.add()
        for group in range(table.num_groups):
            table.stage_blocks(row, 0, [group * NUM_BLOCKS + block_id for block_id in blocks], group=group)
    generator = torch.Generator().manual_seed(4)
    return [
        build_step_batch(
            table,
            block_size=BLOCK_SIZE,
            rows=step.rows,
            starts=step.starts,
            counts=step.counts,
            token_ids=[
                torch.randint(0, zoo.VOCAB_SIZE, (count,), generator=generator).tolist() for count in step.counts
            ],
        )
        for step in STEPS.values()
    ]
