"""The sizes and the mask of a layer's attention: the values that pool, kernels, fusion and checks are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from quire.cache.v1.layer_spans import LayerGroupKind, first_seen


@dataclass(frozen=True, slots=True)
class Causal:
    """A query at position p sees positions 0 .. p."""

    def first_visible(self, position: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Sliding:
    """A query at position p sees positions p - window + 1 .. p."""

    window: int

    def first_visible(self, position: int) -> int:
        return first_seen(LayerGroupKind.SLIDING, self.window, position)


@dataclass(frozen=True, slots=True)
class Chunked:
    """A query at position p sees positions chunk * (p // chunk) .. p."""

    chunk: int

    def first_visible(self, position: int) -> int:
        return first_seen(LayerGroupKind.CHUNKED, self.chunk, position)


Mask = Causal | Sliding | Chunked


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The attention of one layer. Scores are q . k * scaling, then capped, then masked."""

    layer_idx: int
    num_query_heads: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    mask: Mask
    scaling: float
    softcap: float | None
    has_sinks: bool
    values_in_keys: bool = False
    """A token's value is the first v_head_dim of its key."""


class KeptPerToken(Protocol):
    """The tensors of one layer for a token: a key and a value per head, or a key that begins with the value."""

    @property
    def num_kv_heads(self) -> int: ...
    @property
    def k_head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...
    @property
    def values_in_keys(self) -> bool: ...
