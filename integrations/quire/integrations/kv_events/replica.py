"""A copy of the findable blocks of a pool, which turns the answers of WatchBlocks into ordered changes. Pure.

A prompt finds the longest chain of blocks from its beginning on. A block behind a missing one is in the cache, but no
prompt finds it. So a block is published only while all blocks before it are: it is stored after them and removed before
them. A consumer that applies the changes in order has exactly the prefixes that LookupPrefix finds.

In a pool with several layer groups the copy has the blocks of group 0 only: consumers know one block table per
sequence. A prefix of it can then be longer than the one that LookupPrefix finds.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire.cache.v1 import cache_service_pb2 as pb

ROOT = b""
"""The parent of a first block."""


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A block by its content.

    prefix_hash   32 bytes, of its tokens and of all before them, its tenant, its salt and its model
    token_ids     the tokens of the block alone, as many as the pool's block size
    """

    prefix_hash: bytes
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks that can be found now, in the order of their prefix: each is the parent of the next one.

    parent_hash   the prefix hash of the block before the first one; ROOT if there is none
    tenant, salt  a prompt finds the blocks only under these
    """

    parent_hash: bytes
    blocks: tuple[CachedBlock, ...]
    tenant: str
    salt: bytes


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Prefix hashes that can't be found any more; a block comes before its parent."""

    prefix_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class AllCleared:
    """Nothing can be found any more."""


Change = BlocksStored | BlocksRemoved | AllCleared


@dataclass(frozen=True, slots=True)
class ReplicaStatistics:
    """Numbers of blocks.

    num_published     those that a prompt can find
    num_stranded      those behind a missing block
    num_unknown       those without tokens: they were stored while cachemgr kept none
    """

    num_published: int
    num_stranded: int
    num_unknown: int


@dataclass(slots=True, eq=False)
class _Node:
    """A prefix hash that at least one block has. Two blocks have it while it moves from one to the other."""

    block: CachedBlock
    parent_hash: bytes
    tenant: str
    salt: bytes
    num_holders: int = 1
    is_published: bool = False


class _Changes:
    """Changes that are being made: blocks of one chain become one BlocksStored, removals one BlocksRemoved."""

    def __init__(self) -> None:
        self._done: list[Change] = []
        self._stored: list[_Node] = []
        self._removed: list[bytes] = []

    def cleared(self) -> None:
        self._end()
        self._done.append(AllCleared())

    def stored(self, node: _Node) -> None:
        if self._removed or (self._stored and self._stored[-1].block.prefix_hash != node.parent_hash):
            self._end()
        self._stored.append(node)

    def removed(self, prefix_hashes: list[bytes]) -> None:
        if self._stored:
            self._end()
        self._removed += prefix_hashes

    def take(self) -> list[Change]:
        """Return the changes, and begin anew."""
        self._end()
        done, self._done = self._done, []
        return done

    def _end(self) -> None:
        if self._stored:
            first = self._stored[0]
            blocks = tuple(node.block for node in self._stored)
            self._done.append(BlocksStored(first.parent_hash, blocks, first.tenant, first.salt))
        if self._removed:
            self._done.append(BlocksRemoved(tuple(self._removed)))
        self._stored, self._removed = [], []


class PrefixReplica:
    """The copy. Every method that changes it returns the changes for consumers, in order."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, _Node] = {}
        self._hash_of: dict[int, bytes] = {}
        self._unknown: set[int] = set()
        # Prefix hashes by parent, in the order they came.
        self._children: dict[bytes, dict[bytes, None]] = {}
        self._num_published = 0

    def statistics(self) -> ReplicaStatistics:
        """Return the numbers of blocks."""
        num_stranded = len(self._nodes) - self._num_published
        return ReplicaStatistics(self._num_published, num_stranded, len(self._unknown))

    def apply(self, answer: pb.WatchBlocksResponse) -> list[Change]:
        """Apply an answer of a watch with content."""
        changes = _Changes()
        if answer.cleared:
            self._forget()
            changes.cleared()
        # New content first: a prefix hash that moved to another block is not removed and stored again.
        left = [hash_before for event in answer.events if (hash_before := self._enter(event, changes))]
        for prefix_hash in left:
            self._leave(prefix_hash, changes)
        return changes.take()

    def clear(self) -> list[Change]:
        """Forget every block. Consumers get the event in any case: they may know blocks of an earlier copy."""
        self._forget()
        return [AllCleared()]

    def chains(self) -> Iterator[BlocksStored]:
        """Yield all published blocks, for a consumer that has none. The copy must not change meanwhile."""
        changes = _Changes()
        for root in self._children.get(ROOT, ()):
            for prefix_hash in self._descendants(root):
                changes.stored(self._nodes[prefix_hash])
            yield from (change for change in changes.take() if isinstance(change, BlocksStored))

    def _forget(self) -> None:
        self._nodes.clear()
        self._hash_of.clear()
        self._unknown.clear()
        self._children.clear()
        self._num_published = 0

    def _enter(self, event: pb.BlockEvent, changes: _Changes) -> bytes:
        """Enter the block's content. Return the prefix hash that it had before, empty if it is the same."""
        block_id = event.block.block_id
        prefix_hash = b"" if event.block.layer_group else event.block.prefix_hash
        hash_before = self._hash_of.get(block_id, b"")
        if prefix_hash and prefix_hash == hash_before:
            return b""
        self._unknown.discard(block_id)
        self._hash_of.pop(block_id, None)
        if prefix_hash and event.token_ids:
            self._hash_of[block_id] = prefix_hash
            self._hold(event, changes)
        elif prefix_hash:
            self._unknown.add(block_id)
        return hash_before

    def _hold(self, event: pb.BlockEvent, changes: _Changes) -> None:
        """Count a further block with this prefix hash."""
        prefix_hash, parent_hash = event.block.prefix_hash, event.parent_prefix_hash
        if (known := self._nodes.get(prefix_hash)) is not None:
            known.num_holders += 1
            return
        block = CachedBlock(prefix_hash, array("i", event.token_ids))
        self._nodes[prefix_hash] = _Node(block, parent_hash, event.block.tenant, event.salt)
        self._children.setdefault(parent_hash, {})[prefix_hash] = None
        parent = self._nodes.get(parent_hash)
        if parent_hash == ROOT or (parent is not None and parent.is_published):
            for each in self._descendants(prefix_hash):
                node = self._nodes[each]
                node.is_published = True
                self._num_published += 1
                changes.stored(node)

    def _leave(self, prefix_hash: bytes, changes: _Changes) -> None:
        """Count one block less with this prefix hash."""
        node = self._nodes[prefix_hash]
        node.num_holders -= 1
        if node.num_holders:
            return
        if node.is_published:
            hidden = list(self._descendants(prefix_hash))
            for each in hidden:
                self._nodes[each].is_published = False
            self._num_published -= len(hidden)
            changes.removed(hidden[::-1])
        del self._nodes[prefix_hash]
        siblings = self._children[node.parent_hash]
        del siblings[prefix_hash]
        if not siblings:
            del self._children[node.parent_hash]

    def _descendants(self, prefix_hash: bytes) -> Iterator[bytes]:
        """Yield a prefix hash and all that continue it, each after its parent."""
        waiting = [prefix_hash]
        while waiting:
            yield (each := waiting.pop())
            waiting.extend(reversed(self._children.get(each, {})))
