"""Log-probabilities of given tokens of a prompt, from the logits of one forward, some rows at a time.

Logits of every token of a step would take step tokens * vocabulary * 4 bytes. So a function that the model gives makes
those of a few tokens at a time (quire.worker.model.hidden_states).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MAX_PIECE_LOGITS = 2**25
"""Logits that exist at a time, 4 bytes each: as many as those of 256 sequences with a vocabulary of 131,072."""

_Ints = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """The scored tokens of a run: the token that follows each of its tokens, and the number of the likeliest."""

    next_token_ids: _Ints
    num_top: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Natural logarithms of one run's next tokens: logprobs n, the likeliest tokens and theirs n * num_top."""

    seq_id: int
    num_top: int
    logprobs: list[float]
    top_token_ids: list[int]
    top: list[float]


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of n tokens, on the device: logprobs [n] float32, top_ids [n, K] int64, top_logprobs [n, K] float32."""

    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return self.logprobs, self.top_ids, self.top_logprobs


@torch.inference_mode()
def score_tokens(
    logits_of: Callable[[Tensor], Tensor],
    tokens: Tensor,
    next_token_ids: Tensor,
    *,
    num_top: int,
    vocab_size: int,
    row_by_row: bool = False,
) -> Scores:
    """Log-probabilities of what follows n tokens of a step, and the num_top likeliest. No sync.

        tokens          [n]     int64, indexes in the step
        next_token_ids  [n]     int64

    row_by_row: a token's bits do not depend on the other tokens (see Sampler).
    Cost: the output layer on n rows, at most MAX_PIECE_LOGITS logits at a time.
    """
    num_rows = max(1, MAX_PIECE_LOGITS // vocab_size)
    pieces: list[tuple[Tensor, ...]] = []
    for part, following in zip(torch.split(tokens, num_rows), torch.split(next_token_ids, num_rows), strict=True):
        logits = logits_of(part)
        rows = torch.split(logits, 1) if row_by_row else (logits,)
        normalizer = torch.cat([each.logsumexp(-1, keepdim=True) for each in rows])
        top = [each.topk(min(num_top, logits.shape[1]), -1) for each in rows]
        chosen = logits.gather(1, following[:, None]) - normalizer
        top_ids, values = torch.cat([each.indices for each in top]), torch.cat([each.values for each in top])
        pieces.append((chosen[:, 0], top_ids, values - normalizer))
        del logits
    return Scores(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))


def read_scores(scores: Scores, asked: Sequence[tuple[int, ScoredTokens]]) -> list[PromptLogprobs]:
    """The scores for each sequence, in this order, from the scores of all of them on the host."""
    found, start = [], 0
    for seq_id, tokens in asked:
        rows, start = slice(start, start + len(tokens.next_token_ids)), start + len(tokens.next_token_ids)
        num_top = min(tokens.num_top, scores.top_ids.shape[1])
        found.append(
            PromptLogprobs(
                seq_id,
                num_top,
                logprobs=scores.logprobs[rows].tolist(),
                top_token_ids=scores.top_ids[rows, :num_top].flatten().tolist(),
                top=scores.top_logprobs[rows, :num_top].flatten().tolist(),
            )
        )
    return found
