"""Random schedules of a PagedModel, and the logits of each run bit for bit against those of its sequence alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.sequence_table import SequenceTable
from quire.worker.memory.step_batch import StepBatch, build_step_batch
from quire.worker.model.paged_model import PagedModel


class Sequences:
    """Fixed tokens of a few sequences, each with blocks of its own, of which any run can be computed.

    A run may begin anywhere up to what is computed: tokens are then computed again.
    """

    def __init__(
        self, model: PagedModel, lengths: Sequence[int], *, block_size: int, adapters: Sequence[int | None] = ()
    ) -> None:
        """adapters are those of the sequences, by number in the model; () for none."""
        self._adapters = adapters
        self.model, self._block_size, self.lengths = model, block_size, tuple(lengths)
        generator = torch.Generator().manual_seed(0)
        self._tokens = [torch.randint(model.vocab_size, (n,), generator=generator).tolist() for n in lengths]
        per_seq, num_groups = -(-max(lengths) // block_size), len(model.layer_groups)
        num_blocks = 1 + len(lengths) * per_seq * num_groups
        self.pool: KVPool = model.make_pool(num_blocks=num_blocks, block_size=block_size)
        self._table = SequenceTable(
            max_num_seqs=len(lengths), max_blocks_per_seq=per_seq, device=model.device, windowed=self.pool.windowed
        )
        block_ids = iter(range(1, num_blocks))
        for _ in lengths:
            row = self._table.add()
            for group in range(num_groups):
                self._table.stage_blocks(row, 0, [next(block_ids) for _ in range(per_seq)], group=group)

    def run(self, runs: Sequence[tuple[int, int, int]]) -> Tensor:
        """Compute tokens start .. end - 1 of sequences; returns the logits of the last one of each, [n, vocab_size]."""
        return self.model.forward(self.batch(runs), self.pool)

    def batch(self, runs: Sequence[tuple[int, int, int]]) -> StepBatch:
        """Return the batch of such a step."""
        batch = build_step_batch(
            self._table,
            block_size=self._block_size,
            rows=[seq for seq, _, _ in runs],
            starts=[start for _, start, _ in runs],
            counts=[end - start for _, start, end in runs],
            token_ids=[self._tokens[seq][start:end] for seq, start, end in runs],
        )
        if not self._adapters:
            return batch
        return self.model.adapters.assign(batch, [self._adapters[seq] for seq, _, _ in runs])

    def decoded_alone(self) -> list[Tensor]:
        """Return the logits of every token [length, vocab_size] of each sequence, one token a step."""
        return [
            torch.cat([self.run([(seq, position, position + 1)]) for position in range(length)])
            for seq, length in enumerate(self.lengths)
        ]

    def find_difference(self, expected: Sequence[Tensor], *, seed: int, most_steps: int) -> str | None:
        """Run a random schedule: chunks, decodes, tokens computed again. Return the first run with other bits."""
        choose = random.Random(seed)
        done = [0] * len(self.lengths)
        for _ in range(most_steps):
            runs = []
            for seq in choose.sample(range(len(done)), choose.randint(1, len(done))):
                length = self.lengths[seq]
                start = done[seq] if done[seq] < length and choose.random() < 0.8 else choose.randint(0, done[seq])
                start = min(start, length - 1)
                end = start + choose.choice([1, choose.randint(1, length - start)])
                done[seq] = max(done[seq], end)
                runs.append((seq, start, end))
            for (seq, start, end), logits in zip(runs, self.run(runs), strict=True):
                if not torch.equal(logits, expected[seq][end - 1]):
                    return f"seed {seed}: sequence {seq}, tokens {start} .. {end - 1}, in a step of {runs}"
        return None
