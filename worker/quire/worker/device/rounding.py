"""The difference that rounding makes between two computations of one result, by dtype."""

from __future__ import annotations

import torch
from torch import Tensor

# Largest difference of logits, relative to the largest logit. Below float32 the median position counts and not the
# worst: rounding may send one token to another expert.
TOLERANCE = {torch.float32: 5e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def agree(found: Tensor, expected: Tensor, *, tolerance: float) -> bool:
    """True if two results differ by at most `tolerance` of the largest expected number. Waits for the device."""
    expected = expected.float()
    return bool((found.float() - expected).abs().max() <= tolerance * expected.abs().max().clamp_min(1e-6))
