"""Which blocks of a prefix a prompt needs to find it, by the layer groups of the pool. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Self

from quire.cache.v1 import attach_pb2
from quire.cache.v1.layer_spans import LayerGroupKind, first_seen

_KINDS = {
    attach_pb2.LAYER_GROUP_KIND_FULL: LayerGroupKind.FULL,
    attach_pb2.LAYER_GROUP_KIND_SLIDING: LayerGroupKind.SLIDING,
    attach_pb2.LAYER_GROUP_KIND_CHUNKED: LayerGroupKind.CHUNKED,
}
UNLIMITED = 1 << 31


@dataclass(frozen=True)
class Layout:
    """The layer groups of a pool.

    block_size   tokens of a block
    groups       the kind of each group, and the tokens of its window or chunk, 0 for a full one
    """

    block_size: int
    groups: tuple[tuple[LayerGroupKind, int], ...]

    @classmethod
    def of(cls, geometry: attach_pb2.PoolGeometry) -> Self:
        """Return the layout of a pool. One without layer groups has a full one."""
        groups = tuple((_KINDS[group.kind], group.window_token_count) for group in geometry.layer_groups)
        return cls(geometry.block_size_tokens, groups or FULL_GROUP)

    @cached_property
    def has_full(self) -> bool:
        """True if every prefix needs its first block."""
        return any(kind is LayerGroupKind.FULL for kind, _ in self.groups)

    @cached_property
    def has_windows(self) -> bool:
        """True if a prefix can be found while a shorter one of it is not."""
        return any(kind is not LayerGroupKind.FULL for kind, _ in self.groups)

    @cached_property
    def limits(self) -> tuple[int, ...]:
        """By group: a prefix of any length needs at most so many blocks of its end."""
        return tuple(window // self.block_size + 2 if window else UNLIMITED for _, window in self.groups)

    def is_found(self, num_blocks: int, runs: tuple[int, ...]) -> bool:
        """Return True if a prompt finds a prefix of so many blocks because of blocks that are cached.

        With windows alone, the next token may see none of them, as behind a whole chunk. Every prompt finds such a
        prefix in every pool, so it is no reason to publish one.

        runs   by group, the blocks of the prefix that are cached without a gap, counted from its end
        """
        if not self.has_windows:
            return min(runs) == num_blocks
        position = num_blocks * self.block_size
        needed = [num_blocks - first_seen(kind, window, position) // self.block_size for kind, window in self.groups]
        return max(needed) > 0 and all(run >= number for run, number in zip(runs, needed, strict=True))


FULL_GROUP = ((LayerGroupKind.FULL, 0),)
ONE_FULL_GROUP = Layout(1, FULL_GROUP)
"""Of most models. Its blocks have any size."""
