"""Sampling in which a row's token and log-probabilities do not depend on the other rows of the batch.

The exponential of an element has other bits behind the last whole vector of the processor than within one, and where a
batch's last vector ends depends on its rows. The place of the greatest logit does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.worker.sampling.constraints import Positions
from quire.worker.sampling.grammar_masks import NO_MASKS, Masks
from quire.worker.sampling.sampler import Sampled, Sampler


def sample_rows(sampler: Sampler, logits: Tensor, rows: Sequence[int], positions: Positions, masks: Masks) -> Sampled:
    """Sample as Sampler.sample() does, and raise what it raises: each row by itself, unless all are greedy."""
    if all(_is_argmax(sampler, row) for row in rows):
        return sampler.sample(logits, rows, positions, masks)
    return _joined(
        [
            sampler.sample(logits[i : i + 1], [row], positions[i : i + 1], _mask_of(masks, row))
            for i, row in enumerate(rows)
        ]
    )


def _is_argmax(sampler: Sampler, row: int) -> bool:
    params = sampler.params(row)
    return params is not None and params.temperature == 0 and params.num_logprobs is None


def _mask_of(masks: Masks, row: int) -> Masks:
    if row not in masks.rows:
        return NO_MASKS
    place = masks.rows.index(row)
    return replace(masks, rows=(row,), bits=masks.bits[place : place + 1])


def _joined(parts: Sequence[Sampled]) -> Sampled:
    tokens = torch.cat([part.tokens for part in parts])
    if all(part.chosen_logprobs is None for part in parts):
        return Sampled(tokens)
    width = max(0 if part.top_ids is None else part.top_ids.shape[1] for part in parts)
    chosen = tokens.new_full(tokens.shape, math.nan, dtype=torch.float32)
    ids = tokens.new_full((len(parts), width), -1)
    values = chosen.new_full((len(parts), width), math.nan)
    for row, part in enumerate(parts):
        if part.chosen_logprobs is not None:
            chosen[row] = part.chosen_logprobs[0]
        if part.top_ids is not None and part.top_logprobs is not None:
            ids[row, : part.top_ids.shape[1]] = part.top_ids[0]
            values[row, : part.top_logprobs.shape[1]] = part.top_logprobs[0]
    return Sampled(tokens, chosen, ids if width else None, values if width else None)
