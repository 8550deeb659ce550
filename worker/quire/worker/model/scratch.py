"""Sequences of random tokens with a pool of their own, for runs of a model at load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.sequence_table import SequenceTable
from quire.worker.memory.step_batch import build_step_batch
from quire.worker.model.paged_model import PagedModel, RunsForward, run_at_once

BLOCK_SIZE = 4


@dataclass(slots=True)
class ScratchSequences:
    """A pool, and sequences of random tokens, with blocks of their own. block_ids are by layer group."""

    model: PagedModel
    pool: KVPool
    table: SequenceTable
    tokens: list[list[int]]
    block_ids: list[list[int]]
    adapter: int | None = None
    """The adapter of some of the sequences, the first two among them."""
    submit: RunsForward = run_at_once
    """Runs each forward."""

    @classmethod
    def make(
        cls, model: PagedModel, num_seqs: int, *, length: int, kv_dtype: torch.dtype | None = None
    ) -> ScratchSequences:
        """Make sequences of `length` tokens, or of the model's longest. The tokens are the same in each call.

        kv_dtype None: the model's.
        """
        length = min(length, model.max_model_len)
        block_size = max(BLOCK_SIZE, model.min_block_size)
        per_seq = -(-length // block_size)
        num_groups = len(model.layer_groups)
        pool = model.make_pool(num_blocks=1 + num_seqs * per_seq * num_groups, block_size=block_size, dtype=kv_dtype)
        table = SequenceTable(
            max_num_seqs=num_seqs, max_blocks_per_seq=per_seq, device=model.device, windowed=pool.windowed
        )
        free = iter(range(1, pool.num_blocks))
        block_ids: list[list[int]] = [[] for _ in range(num_groups)]
        for _ in range(num_seqs):
            row = table.add()
            for group in range(num_groups):
                taken = [next(free) for _ in range(per_seq)]
                table.stage_blocks(row, 0, taken, group=group)
                block_ids[group] += taken
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, model.vocab_size, (num_seqs, length), generator=generator).tolist()
        if model.has_recurrent_state:
            model.allocate_states(num_seqs)
        return cls(model, pool, table, tokens, block_ids)

    def run(self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Run counts[i] tokens of each row from position starts[i]; return the logits of their last ones."""
        token_ids = [self.tokens[row][start : start + n] for row, start, n in zip(rows, starts, counts, strict=True)]
        batch = build_step_batch(
            self.table, block_size=self.pool.block_size, rows=rows, starts=starts, counts=counts, token_ids=token_ids
        )
        if self.adapter is not None:
            adapters = [self.adapter if row < 2 or row % 3 == 0 else None for row in rows]
            batch = self.model.adapters.assign(batch, adapters)
        return self.submit(lambda: self.model.forward(batch, self.pool))
