"""Sizes and identity of a pool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a pool and the model on it, as its worker registered them; constant for an epoch."""

    block_size: int
    """Tokens per block."""
    num_blocks: int
    """The null block included."""
    block_bytes: int
    max_sequences: int
    max_sequence_tokens: int
    vocab_size: int
    model: str
    model_fingerprint: str
    has_recurrent_state: bool = False
    """A state per sequence that no block holds: nothing is shared by prefix."""
    num_host_blocks: int = 0
    """Blocks of the host tier; 0: no host tier."""

    @property
    def max_tokens(self) -> int:
        """The longest sequence: the lesser of the model's context and the pool's blocks."""
        return min(self.max_sequence_tokens, (self.num_blocks - 1) * self.block_size)
