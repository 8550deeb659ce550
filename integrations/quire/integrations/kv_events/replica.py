"""A copy of the findable blocks of a pool, which turns the answers of WatchBlocks into ordered changes. Pure.

A prompt finds the longest prefix with all the blocks that its next token sees. In a full layer group these are all of
its blocks, in a windowed group the last ones. A block is published while it is in a prefix that a prompt can find: it
is stored after the blocks before it, and removed before them. Blocks behind a missing one of a full group are in the
cache, but no prompt finds them, and they are not published.

In a pool with windows, the first blocks of a prefix are published too when they are evicted: a consumer finds the rest
through them. So inside of a published prefix a consumer can find more than LookupPrefix, at its end the same. The copy
keeps the tokens of evicted blocks while blocks behind them are cached. If it never had them, because it began later, it
can't publish what follows: these blocks are unconnected.

Changes are made at the end of a moment, with an answer that has a cursor: consumers see no block that moved, and no
half of a snapshot.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire.cache.v1 import cache_service_pb2 as pb
from quire.integrations.kv_events.layout import ONE_FULL_GROUP, Layout

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
    """Numbers of blocks with different content.

    num_published     those in a prefix that a prompt can find
    num_stranded      those that no prompt finds: a block that they need is missing
    num_unknown       those without tokens: they were stored while cachemgr kept none
    num_unconnected   those that a prompt may find, in a pool without full groups: the tokens before them are not known
    """

    num_published: int
    num_stranded: int
    num_unknown: int
    num_unconnected: int = 0


_UNPLACED = -1


@dataclass(slots=True, eq=False)
class _Node:
    """A prefix hash that blocks have. Without full groups also one that blocks had, and that others go on from.

    num_holders   by layer group, the blocks with this hash
    num_blocks    of the prefix; 0 if a block before it is not known
    runs          by layer group, the blocks of the prefix that are cached without a gap, counted from its end
    is_end        a prompt finds the prefix up to here
    num_ends      1 if it is an end, and 1 for each child that is published. It is published while this is above 0
    """

    block: CachedBlock
    parent_hash: bytes
    tenant: str
    salt: bytes
    num_holders: list[int]
    num_blocks: int = _UNPLACED
    runs: tuple[int, ...] = ()
    is_end: bool = False
    num_ends: int = 0


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
    """The copy. Every method that changes it returns the changes for consumers, in order.

    layout is that of the pool's epoch. It changes only before an answer with `cleared`.
    """

    def __init__(self, layout: Layout = ONE_FULL_GROUP) -> None:
        self.layout = layout
        self._nodes: dict[bytes, _Node] = {}
        self._content_of: dict[int, tuple[int, bytes]] = {}
        """By block: its layer group and prefix hash."""
        self._unknown: set[int] = set()
        # Prefix hashes by parent, in the order they came.
        self._children: dict[bytes, dict[bytes, None]] = {}
        self._touched: dict[bytes, None] = {}
        """Prefix hashes with another number of blocks than at the last moment."""
        self._is_cleared = False
        self._num_published = 0

    @property
    def num_published(self) -> int:
        """The blocks that consumers know."""
        return self._num_published

    def statistics(self) -> ReplicaStatistics:
        """Return the numbers of blocks. Cost: O(blocks) in a pool without full groups."""
        num_unknown = len(self._unknown)
        if self.layout.has_full:
            return ReplicaStatistics(self._num_published, len(self._nodes) - self._num_published, num_unknown)
        lone = [node for node in self._nodes.values() if any(node.num_holders) and not node.num_ends]
        num_unconnected = sum(node.num_blocks == 0 for node in lone)
        return ReplicaStatistics(self._num_published, len(lone) - num_unconnected, num_unknown, num_unconnected)

    def apply(self, answer: pb.WatchBlocksResponse) -> list[Change]:
        """Apply an answer of a watch with content. No changes before the moment's last answer, which has a cursor.

        Events about copies below the pool have no effect.
        """
        if answer.cleared:
            self._forget()
            self._is_cleared = True
        for event in answer.events:
            if not event.medium:
                self._enter(event)
        return self._end_moment() if answer.cursor else []

    def clear(self) -> list[Change]:
        """Forget every block. Consumers get the event in any case: they may know blocks of an earlier copy."""
        self._forget()
        self._is_cleared = False
        return [AllCleared()]

    def chains(self) -> Iterator[BlocksStored]:
        """Yield all published blocks, for a consumer that has none. The copy must not change meanwhile."""
        changes = _Changes()
        for root in self._children.get(ROOT, ()):
            for prefix_hash in self._published_from(root):
                changes.stored(self._nodes[prefix_hash])
            yield from (change for change in changes.take() if isinstance(change, BlocksStored))

    def _forget(self) -> None:
        for each in (self._nodes, self._content_of, self._unknown, self._children, self._touched):
            each.clear()
        self._num_published = 0

    # -- what blocks hold ---------------------------------------------------------------------------------------------

    def _enter(self, event: pb.BlockEvent) -> None:
        """Enter the block's content."""
        block = event.block
        content, before = (block.layer_group, block.prefix_hash), self._content_of.get(block.block_id)
        if content == before:
            return
        self._unknown.discard(block.block_id)
        if before is not None:
            del self._content_of[block.block_id]
            self._count(*before, -1)
        if event.adapter:
            return  # a router's prompts are for the base model
        if block.prefix_hash and event.token_ids:
            if block.prefix_hash not in self._nodes:
                self._add(event)
            self._content_of[block.block_id] = content
            self._count(*content, 1)
        elif block.prefix_hash:
            self._unknown.add(block.block_id)

    def _add(self, event: pb.BlockEvent) -> None:
        block = CachedBlock(event.block.prefix_hash, array("i", event.token_ids))
        num_holders = [0] * len(self.layout.groups)
        parent_hash = event.parent_prefix_hash
        node = _Node(block, parent_hash, event.block.tenant, event.salt, num_holders)
        self._nodes[block.prefix_hash] = node
        self._children.setdefault(parent_hash, {})[block.prefix_hash] = None

    def _count(self, group: int, prefix_hash: bytes, change: int) -> None:
        """Count one block more or less with this prefix hash."""
        self._nodes[prefix_hash].num_holders[group] += change
        self._touched[prefix_hash] = None

    # -- what a prompt finds ------------------------------------------------------------------------------------------

    def _end_moment(self) -> list[Change]:
        """Return the changes since the last moment."""
        changes, turned, withdrawn = _Changes(), dict[bytes, bool](), list[bytes]()
        if self._is_cleared:
            changes.cleared()
            self._is_cleared = False
        for prefix_hash in self._touched:
            self._place(prefix_hash, turned)
        for prefix_hash, was_end in turned.items():
            if not was_end and self._nodes[prefix_hash].is_end:
                self._publish(prefix_hash, changes)
        for prefix_hash, was_end in turned.items():
            if was_end and not self._nodes[prefix_hash].is_end:
                withdrawn += self._withdraw(prefix_hash)
        if withdrawn:
            changes.removed(withdrawn)
        for prefix_hash in (*withdrawn, *self._touched):
            self._drop_if_needless(prefix_hash)
        self._touched.clear()
        return changes.take()

    def _place(self, prefix_hash: bytes, turned: dict[bytes, bool]) -> None:
        """Compute the place of a node in its prefix, and of those behind it.

        turned gets those that begin or cease to be an end, with what they were at the last moment. Cost: O(nodes behind
        it), in a windowed group as far as its window.
        """
        waiting = [prefix_hash]
        while waiting:
            each = waiting.pop()
            node = self._nodes[each]
            num_blocks, runs = self._place_of(node)
            if num_blocks == node.num_blocks and runs == node.runs:
                continue
            node.num_blocks, node.runs = num_blocks, runs
            is_end = num_blocks > 0 and self.layout.is_found(num_blocks, runs)
            if is_end != node.is_end:
                turned.setdefault(each, node.is_end)
                node.is_end = is_end
            waiting.extend(reversed(self._children.get(each, {})))

    def _place_of(self, node: _Node) -> tuple[int, tuple[int, ...]]:
        """Return its `num_blocks` and `runs`."""
        limits, holders = self.layout.limits, node.num_holders
        if node.parent_hash == ROOT:
            return 1, tuple([1 if held else 0 for held in holders])
        parent = self._nodes.get(node.parent_hash)
        if parent is None or parent.num_blocks <= 0:
            return 0, ()
        runs = [
            min(run + 1, limit) if held else 0 for run, limit, held in zip(parent.runs, limits, holders, strict=True)
        ]
        return parent.num_blocks + 1, tuple(runs)

    def _publish(self, prefix_hash: bytes, changes: _Changes) -> None:
        """A prompt finds the prefix up to a node: publish the blocks of it that are not."""
        path = []
        while prefix_hash != ROOT:
            node = self._nodes[prefix_hash]
            node.num_ends += 1
            if node.num_ends > 1:
                break
            path.append(node)
            prefix_hash = node.parent_hash
        self._num_published += len(path)
        for node in reversed(path):
            changes.stored(node)

    def _withdraw(self, prefix_hash: bytes) -> list[bytes]:
        """No prompt finds the prefix up to a node any more: return the blocks that were published for it alone."""
        path = []
        while prefix_hash != ROOT:
            node = self._nodes[prefix_hash]
            node.num_ends -= 1
            if node.num_ends:
                break
            path.append(prefix_hash)
            prefix_hash = node.parent_hash
        self._num_published -= len(path)
        return path

    def _drop_if_needless(self, prefix_hash: bytes) -> None:
        """Forget a node without a block. In a pool without full groups it stays while a block follows it."""
        while (node := self._nodes.get(prefix_hash)) is not None:
            children = self._children.get(prefix_hash, {})
            if node.num_ends or any(node.num_holders) or (children and not self.layout.has_full):
                return
            del self._nodes[prefix_hash]
            siblings = self._children[node.parent_hash]
            del siblings[prefix_hash]
            if not siblings:
                del self._children[node.parent_hash]
            for child in children:
                self._place(child, {})
            prefix_hash = node.parent_hash

    def _published_from(self, prefix_hash: bytes) -> Iterator[bytes]:
        """Yield a prefix hash and all published ones that continue it, each after its parent."""
        waiting = [prefix_hash]
        while waiting:
            if self._nodes[each := waiting.pop()].num_ends:
                yield each
                waiting.extend(reversed(self._children.get(each, {})))
