"""The difference that rounding makes between two computations of one result, by dtype."""

from __future__ import annotations

import torch

# Largest difference of logits, relative to the largest logit. Below float32 the median position counts and not the
# worst: rounding may send one token to another expert.
TOLERANCE = {torch.float32: 5e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
