"""Decode steps to run on a model or on a layer: a token of each sequence, with blocks anywhere in a pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.worker.memory.sequence_table import SequenceTable
from quire.worker.memory.step_batch import StepBatch, build_step_batch


def decode_batch(
    lengths: Sequence[int], *, block_size: int, device: torch.device | str, seed: int = 0
) -> tuple[StepBatch, int]:
    """Return one token of each sequence that then has `lengths` tokens, and the blocks that a pool needs for it."""
    needed = [-(-length // block_size) for length in lengths]
    rows = SequenceTable(max_num_seqs=len(lengths), max_blocks_per_seq=max(needed), device=device)
    block_ids = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(seed)) + 1
    for ids in block_ids.split(needed):
        rows.stage_blocks(rows.add(), 0, ids.tolist())
    batch = build_step_batch(
        rows,
        block_size=block_size,
        rows=range(len(lengths)),
        starts=[length - 1 for length in lengths],
        counts=[1] * len(lengths),
        token_ids=[[1]] * len(lengths),
    )
    return batch, sum(needed) + 1
