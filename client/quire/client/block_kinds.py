"""The kinds that a pool's blocks are drawn in, on a terminal and on the gateway's page. Pure."""

from enum import IntEnum

from quire.cache.v1 import cache_service_pb2 as pb


class BlockKind(IntEnum):
    """A block's state, those with several holders apart. Of two as common in a cell the higher is drawn."""

    FREE = 0
    CACHED = 1
    RETIRED = 2
    ACTIVE = 3
    SHARED = 4


_KIND_OF_STATE = {
    pb.BLOCK_STATE_FREE: BlockKind.FREE,
    pb.BLOCK_STATE_CACHED: BlockKind.CACHED,
    pb.BLOCK_STATE_ACTIVE: BlockKind.ACTIVE,
    pb.BLOCK_STATE_RETIRED: BlockKind.RETIRED,
}


def kind_of(block: pb.Block) -> BlockKind:
    """Return how a block is drawn. Raises KeyError for a state that the contract does not have."""
    kind = _KIND_OF_STATE[block.state]
    return BlockKind.SHARED if kind is BlockKind.ACTIVE and block.reference_count > 1 else kind
