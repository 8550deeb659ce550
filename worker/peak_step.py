"""What the largest step takes of a GPU's memory, found by running it before there is a pool."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.worker.kv_pool import KVPool
from quire.worker.model import PagedModel
from quire.worker.sampler import Sampler, SamplingParams
from quire.worker.sequence_table import SequenceTable
from quire.worker.step_batch import build_step_batch

# Of the sampler's ways the one that takes most: it sorts all logits.
COSTLY_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9)


def run_largest_step(
    model: PagedModel, *, max_step_tokens: int, max_num_seqs: int, block_size: int, kv_dtype: torch.dtype
) -> None:
    """Run a step of max_step_tokens tokens and of as many sequences as fit them, and sample for every one.

    Its tokens are as few prompts as max_model_len allows, and one token of each other sequence. All of them write to
    one block of a pool that has no other: what they compute is of no interest.
    """
    counts = largest_counts(max_step_tokens, max_num_seqs=max_num_seqs, max_model_len=model.max_model_len)
    device, num_seqs = model.device, len(counts)
    pool = KVPool(model.specs, num_blocks=2, block_size=block_size, dtype=kv_dtype, device=device)
    table = SequenceTable(
        max_num_seqs=num_seqs, max_blocks_per_seq=-(-model.max_model_len // block_size), device=device
    )
    sampler = Sampler(max_num_seqs=num_seqs, vocab_size=model.vocab_size, device=device)
    for count in counts:
        row = table.add()
        table.stage_blocks(row, 0, [1] * -(-count // block_size))
        sampler.set_params(row, COSTLY_SAMPLING)
    rows = list(range(num_seqs))
    batch = build_step_batch(
        table,
        block_size=block_size,
        rows=rows,
        starts=[0] * num_seqs,
        counts=counts,
        token_ids=[[0] * count for count in counts],
    )
    logits = model.forward(batch, pool)
    sampler.sample(logits, rows, positions=counts)
    for row in rows:
        model.states.clear(row)


def largest_counts(max_step_tokens: int, *, max_num_seqs: int, max_model_len: int) -> list[int]:
    """Tokens of each sequence in the step that takes most: max_step_tokens in all, or as many as sequences can have."""
    num_seqs = min(max_num_seqs, max_step_tokens)
    counts = [1] * num_seqs
    left = max_step_tokens - num_seqs
    for index in range(num_seqs):
        added = min(left, max_model_len - 1)
        counts[index] += added
        left -= added
    return counts


def peak_memory_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """How much more of a GPU's memory is in use at the peak of `work` than before it. Waits for the device."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return peak - before
