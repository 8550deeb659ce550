"""Sizes and identity of a pool."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from quire.cache.v1.layer_spans import LayerGroupKind
from quire.cachemgr import _core


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep the same positions."""

    kind: LayerGroupKind
    window: int
    """Tokens of a window or of a chunk; 0 for FULL."""
    num_layers: int


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
    layer_groups: tuple[LayerGroup, ...] = ()
    """The full ones first. Empty: one full group with all layers."""
    max_drafts: int = 0
    """The limit of drafts of a sequence in a step; 0: the worker verifies none."""
    host_cached_limit: int = 0
    """The limit of host blocks with copies of evicted blocks; 0: none are made."""
    num_disk_blocks: int = 0
    """Blocks of the disk below the host tier; 0: there is none."""

    @property
    def max_tokens(self) -> int:
        """The longest sequence: the lesser of the model's context and the pool's blocks."""
        return _longest_sequence(self)


@lru_cache(maxsize=64)
def _longest_sequence(geometry: Geometry) -> int:
    return _core.longest_sequence(geometry)
