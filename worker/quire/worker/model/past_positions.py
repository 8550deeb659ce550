"""The stand-in of a cache, for models that take positions from their cache's length and not from the caller."""

from __future__ import annotations

import torch
from torch import Tensor


class PastPositions:
    """Stands in for a cache in one packed step: keeps nothing, and says how far each token lies behind its place.

    Llama 4 scales queries by arange(T) + get_seq_length(), which so becomes each token's own position.
    """

    is_compileable = False

    def __init__(self, positions: Tensor) -> None:
        """positions: [T] int64."""
        self._offsets = positions - torch.arange(positions.shape[0], device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """[T] int64."""
        return self._offsets

    def update(self, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Return the arguments."""
        return key, value
