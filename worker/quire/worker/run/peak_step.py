"""The GPU memory of the largest step, measured by running it before there is a pool."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from quire.worker.memory.sequence_table import SequenceTable
from quire.worker.memory.step_batch import DraftCounts, build_step_batch, max_logits
from quire.worker.model.paged_model import PagedModel
from quire.worker.sampling.constraints import Constraints
from quire.worker.sampling.drafts import DraftRows
from quire.worker.sampling.parameters import MAX_LOGPROBS, SamplingParams
from quire.worker.sampling.prompt_logprobs import score_tokens
from quire.worker.sampling.sampler import Sampler

# The parameters that take most: top_p sorts all logits, and the others keep copies of them meanwhile.
COSTLY_SAMPLING = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    num_logprobs=MAX_LOGPROBS,
    constraints=Constraints(bad_words=((0,), (0, 1)), logit_bias={0: 1.0}),
)


def run_largest_step(
    model: PagedModel,
    *,
    max_step_tokens: int,
    max_num_seqs: int,
    block_size: int,
    kv_dtype: torch.dtype,
    max_drafts: int = 0,
) -> None:
    """Run each step that may take most memory, and sample for every sequence of it; score all of its tokens.

    Prompts at their beginning, as few as max_model_len allows, beside one token of each other sequence: most logits
    and activations. The same prompts as last chunks, at the end of max_model_len: most keys to attend to. One token
    of max_num_seqs sequences of that length: most keys of a decode step. If these have less than max_logits(): as many
    drafts as there may be, which makes more logits.
    """
    counts = largest_counts(max_step_tokens, max_num_seqs=max_num_seqs, max_model_len=model.max_model_len)
    chunks = [min(count, max(1, model.max_model_len // 2)) for count in counts]
    decodes = [1] * min(max_num_seqs, max_step_tokens)
    for each, at_end in ((counts, False), (chunks, True), (decodes, True)):
        if at_end and model.has_recurrent_state:
            continue  # it can continue only from its last position
        starts = [model.max_model_len - count if at_end else 0 for count in each]
        _run_step(model, starts, each, block_size=block_size, kv_dtype=kv_dtype)
    num_drafts = min(max_drafts, max_step_tokens // len(decodes) - 1, model.max_model_len - 1)
    if num_drafts > 0 and len(decodes) < max_logits(max_num_seqs) and not model.has_recurrent_state:
        each, drafts = [1 + num_drafts] * len(decodes), np.full(len(decodes), num_drafts)
        verified = DraftCounts.fit(drafts, most_logits=max_logits(max_num_seqs))
        _run_step(model, [0] * len(decodes), each, block_size=block_size, kv_dtype=kv_dtype, drafts=verified)


def _run_step(
    model: PagedModel,
    starts: list[int],
    counts: list[int],
    *,
    block_size: int,
    kv_dtype: torch.dtype,
    drafts: DraftCounts | None = None,
) -> None:
    """Run counts[i] tokens from position starts[i] of each sequence; with drafts these are all but the first.

    All of them read and write one block of a pool that has no other: their results are not used.
    """
    device, num_seqs = model.device, len(counts)
    pool = model.make_pool(num_blocks=2, block_size=block_size, dtype=kv_dtype)
    table = SequenceTable(
        max_num_seqs=num_seqs,
        max_blocks_per_seq=-(-model.max_model_len // block_size),
        device=device,
        windowed=pool.windowed,
    )
    row_by_row = model.is_deterministic
    sampler = Sampler(max_num_seqs=num_seqs, vocab_size=model.vocab_size, device=device, row_by_row=row_by_row)
    for start, count in zip(starts, counts, strict=True):
        row = table.add()
        for group in range(len(pool.groups)):
            table.stage_blocks(row, 0, [1] * -(-(start + count) // block_size), group=group)
        sampler.set_params(row, COSTLY_SAMPLING)
    rows = list(range(num_seqs))
    if drafts is not None:
        table.note_sampled(rows, starts)
    num_given = counts if drafts is None else drafts.given.tolist()
    batch = build_step_batch(
        table,
        block_size=block_size,
        rows=rows,
        starts=starts,
        counts=counts,
        token_ids=[[0] * count for count in num_given],
        drafts=drafts,
        adapter_slots=[1] * num_seqs if model.adapters.has_slots else None,
    )
    with model.keeping_hidden_states(batch, pool) as kept:
        logits = model.forward(batch, pool)
    every = torch.arange(sum(counts), device=device)
    score_tokens(
        kept.reader(),
        every,
        batch.input_ids,
        num_top=MAX_LOGPROBS,
        vocab_size=model.vocab_size,
        row_by_row=row_by_row,
    )
    del kept
    draft_rows = None if drafts is None else DraftRows([[0] * count for count in drafts.verified], device)
    ends = np.add(starts, counts) if drafts is None else np.add(starts, 1)
    positions = ends if draft_rows is None else draft_rows.repeat(ends) + draft_rows.offsets
    sampled_rows = rows if draft_rows is None else draft_rows.repeat(rows).tolist()
    sampler.sample(logits, sampled_rows, positions, drafts=draft_rows)
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
    """The additional memory of a GPU in use at the peak of `work`. Waits for the device."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return peak - before
