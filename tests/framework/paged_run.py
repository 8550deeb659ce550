"""Runs a PagedModel on a few ragged sequences, greedily or on given tokens, and keeps every step's logits."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.worker.memory.sequence_table import SequenceTable
from quire.worker.memory.step_batch import build_step_batch
from quire.worker.model.paged_model import PagedModel

MAX_LEN = 64


def run(
    model: PagedModel, prompts: list[list[int]], num_new: int, *, block_size: int, forced: list[list[int]] | None = None
) -> tuple[list[list[int]], Tensor]:
    """Prompts, of 4 tokens or more, in parts, the last half a prompt behind; then decodes. A pool full of NaN, with
    blocks of their own for each layer group.

    Returns each sequence's tokens, prompt included, and the logits [steps with all sequences, B, vocab]. With `forced`,
    whole sequences, their tokens are run for any logits.
    """
    per_seq = -(-MAX_LEN // block_size)
    num_blocks = len(prompts) * per_seq * len(model.layer_groups)
    pool = model.make_pool(num_blocks=num_blocks + 1, block_size=block_size)
    for tensor in pool.tensors():
        tensor[1:].fill_(float("nan"))
    table = SequenceTable(
        max_num_seqs=len(prompts), max_blocks_per_seq=per_seq, device=model.device, windowed=pool.windowed
    )
    order = (torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3)) + 1).tolist()
    rows = [table.add() for _ in prompts]
    for row in rows:
        for group in range(table.num_groups):
            table.stage_blocks(row, 0, [order.pop() for _ in range(per_seq)], group=group)
    tokens = [list(each) for each in forced or prompts]
    done = [0] * len(prompts)

    def step(counts: list[int]) -> Tensor:
        seqs = [i for i, count in enumerate(counts) if count]
        batch = build_step_batch(
            table,
            block_size=block_size,
            rows=[rows[i] for i in seqs],
            starts=[done[i] for i in seqs],
            counts=[counts[i] for i in seqs],
            token_ids=[tokens[i][done[i] : done[i] + counts[i]] for i in seqs],
        )
        for i in seqs:
            done[i] += counts[i]
        return model.forward(batch, pool)

    halves = [(len(prompt) + 1) // 2 for prompt in prompts]
    step([*halves[:-1], 0])
    step([*(1 for _ in prompts[:-1]), halves[-1]])
    everything = []
    for number in range(num_new):
        counts = [len(p) - d for p, d in zip(prompts, done, strict=True)] if number == 0 else [1] * len(prompts)
        logits = step(counts)
        everything.append(logits)
        if forced is None:
            for each, token in zip(tokens, logits.argmax(-1).tolist(), strict=True):
                each.append(token)
    pool.check_invariants()
    return tokens, torch.stack(everything)
