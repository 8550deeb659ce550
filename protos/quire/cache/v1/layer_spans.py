"""The positions that a token sees in the layers of a group. No gRPC: any side may import this."""

from enum import StrEnum


class LayerGroupKind(StrEnum):
    """A LayerGroupKind of attach.proto."""

    FULL = "full"
    """All positions before."""
    SLIDING = "sliding"
    """The last `window` positions, the token's own included."""
    CHUNKED = "chunked"
    """The positions of the token's own chunk of `window` positions."""


def first_seen(kind: LayerGroupKind, window: int, position: int) -> int:
    """Return the first position that a token at a position sees. The core has the same in groups.rs."""
    match kind:
        case LayerGroupKind.SLIDING:
            return max(0, position + 1 - window)
        case LayerGroupKind.CHUNKED:
            return position - position % window
    return 0
