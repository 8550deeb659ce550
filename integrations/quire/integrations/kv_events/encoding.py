"""Changes as vLLM's KV events: batches in msgpack, as its ZMQ publisher sends them.

    batch          [time in seconds since 1970, events, data-parallel rank]
    BlockStored    [tag, block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name, extra_keys]
    BlockRemoved   [tag, block_hashes, medium]
    AllBlocksCleared  [tag]

A block's hash is the first 8 bytes of its prefix hash, an unsigned integer. extra_keys has an entry for each block; the
first block's has the namespace, tagged as Dynamo's own workers tag it. An untagged string would be ambiguous there.
Copies in the host tier and on the disk have no tokens and no parent, as vLLM's own of offloaded blocks: their hashes
say which blocks they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import msgspec

from quire.cache.v1 import cache_service_pb2 as pb
from quire.integrations.kv_events.copies import CopiesRemoved, CopiesStored, CopyChange
from quire.integrations.kv_events.replica import ROOT, AllCleared, BlocksRemoved, BlocksStored, Change

MEDIUM = "GPU"
"""The memory of the worker's pool, on any device."""
COPY_MEDIA = {pb.MEDIUM_HOST: "CPU", pb.MEDIUM_DISK: "STORAGE"}
"""vLLM's names of the places of copies."""
NAMESPACE_TAG = "dynamo-cache-salt:"

_RANK = 0
_encode = msgspec.msgpack.Encoder().encode

Event = list[Any]


def block_hash(prefix_hash: bytes) -> int:
    """Return the hash by which consumers know a block: 64 bits, unsigned."""
    return int.from_bytes(prefix_hash[:8], "big")


def namespace_of(tenant: str, salt: bytes) -> str:
    """Return the cache salt under which a router queries for the blocks. Empty: without one.

    The salt as text, or "hex:" and its digits if it is no UTF-8. Behind "TENANT:" where cachemgr authenticates callers.
    """
    try:
        text = salt.decode()
    except UnicodeDecodeError:
        text = f"hex:{salt.hex()}"
    return f"{tenant}:{text}" if tenant else text


def event_of(change: Change | CopyChange) -> Event:
    """Return a change as an event."""
    match change:
        case BlocksStored():
            return _stored(change)
        case BlocksRemoved(prefix_hashes):
            return ["BlockRemoved", [block_hash(each) for each in prefix_hashes], MEDIUM]
        case AllCleared():
            return ["AllBlocksCleared"]
        case CopiesStored(medium, prefix_hashes):
            hashes = [block_hash(each) for each in prefix_hashes]
            return ["BlockStored", hashes, None, [], 0, None, COPY_MEDIA[medium], None, None]
        case CopiesRemoved(medium, prefix_hashes):
            return ["BlockRemoved", [block_hash(each) for each in prefix_hashes], COPY_MEDIA[medium]]


def _stored(change: BlocksStored) -> Event:
    blocks = change.blocks
    hashes = [block_hash(block.prefix_hash) for block in blocks]
    parent = None if change.parent_hash == ROOT else block_hash(change.parent_hash)
    tokens = list(chain.from_iterable(block.token_ids for block in blocks))
    namespace, keys = namespace_of(change.tenant, change.salt), None
    if namespace:
        keys = [[NAMESPACE_TAG + namespace], *([None] * (len(blocks) - 1))]
    return ["BlockStored", hashes, parent, tokens, len(blocks[0].token_ids), None, MEDIUM, None, keys]


def encode_batch(changes: Iterable[Change | CopyChange], *, now: float) -> bytes:
    """Return a batch of these changes, in this order; now in seconds since 1970."""
    return _encode([now, [event_of(change) for change in changes], _RANK])


def parts_of(changes: Iterable[Change | CopyChange], *, max_blocks: int) -> Iterator[list[Change | CopyChange]]:
    """Divide many changes; a part ends with the change that brings it to max_blocks stored blocks."""
    part: list[Change | CopyChange] = []
    num_blocks = 0
    for change in changes:
        part.append(change)
        num_blocks += _num_stored(change)
        if num_blocks >= max_blocks:
            yield part
            part, num_blocks = [], 0
    if part:
        yield part


def _num_stored(change: Change | CopyChange) -> int:
    match change:
        case BlocksStored():
            return len(change.blocks)
        case CopiesStored():
            return len(change.prefix_hashes)
    return 0
