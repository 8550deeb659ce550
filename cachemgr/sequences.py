"""Sequences: their tokens, their block tables, and how far both have come.

    0            num_cached      num_computed     num_scheduled     num_known        num_tokens
    |-- found ------|-- reported -----|-- planned -----|-- waiting -----|-- promised -----|
      in the cache     by the worker     in steps         known tokens     being sampled
                                         in flight        not run yet      by steps in flight

Each bound is at most the next, but for num_scheduled and num_known: a promised token may be scheduled too.
The table has blocks for all of them, but perhaps for the token sampled last, which gets its slot when it is scheduled.

The bounds of all sequences of a pool lie in one `SequenceTable`, a row per sequence and an array per bound: a step that
extends hundreds of sequences is some operations on arrays. A `Sequence` is one row, to be read and written by name.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from quire.cachemgr.prefix import TOKEN_BYTES, PrefixIndex, chain_hashes

Rows: TypeAlias = npt.NDArray[np.int64]
Ids: TypeAlias = npt.NDArray[np.int32]

NOBODY = 0
"""The row of no sequence: what a search finds that finds nothing."""

NOWHERE = -1
"""A position that there is not."""

FIRST_ROWS = 64

NUM_BOUNDS = 7
KNOWN, TOKENS, COMPUTED, SCHEDULED, SAMPLED, PUBLISHED, WRITABLE = range(NUM_BOUNDS)


class SequenceTable:
    """Bounds of all sequences of a pool, by row. Row NOBODY belongs to none and never changes.

    known       tokens whose ids are here
    tokens      known ones, and those being sampled
    computed    tokens whose KV is valid, as reported
    scheduled   tokens that are computed or that a step in flight computes
    sampled     where the token stands that the worker sampled last, or is sampling: it can be run without being named;
                or NOWHERE
    published   leading blocks whose hash the index has seen
    writable    slots before this one, from the scheduled ones on, are known to be the sequence's own to write
    """

    known: Rows
    tokens: Rows
    computed: Rows
    scheduled: Rows
    sampled: Rows
    published: Rows
    writable: Rows

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.sequences: list[Sequence | None] = [None]
        self.cells: list[array[int]] = [array("q", [0]) for _ in range(NUM_BOUNDS)]
        self.cells[SAMPLED][NOBODY] = NOWHERE
        self.seq_ids: Ids = np.full(1, -1, np.int32)
        self.tails: npt.NDArray[np.int32] = np.zeros((1, block_size), np.int32)
        """Known tokens of the block that is not full of known ones yet."""
        self._free: list[int] = []
        self._grow(FIRST_ROWS)

    def enter(self, sequence: Sequence) -> int:
        """A row for a sequence that begins; its bounds are 0, nothing of it was sampled."""
        if not self._free:
            self._grow(2 * len(self.sequences))
        row = self._free.pop()
        for cells in self.cells:
            cells[row] = 0
        self.cells[SAMPLED][row] = NOWHERE
        self.sequences[row] = sequence
        self.seq_ids[row] = sequence.seq_id
        return row

    def leave(self, rows: Iterable[int]) -> None:
        """Nothing needs these rows any more."""
        for row in rows:
            self.sequences[row] = None
            self.seq_ids[row] = -1
            self._free.append(row)

    def append(self, rows: Rows, token_ids: Ids) -> None:
        """One more known token for each of these sequences, which was promised."""
        size = self.block_size
        ends = self.known[rows]
        slots = ends % size
        self._flat_tails[rows * size + slots] = token_ids
        self.known[rows] = ends + 1
        is_full = slots == size - 1
        if np.count_nonzero(is_full):
            full = rows[is_full]
            blocks = self.tails[full].tobytes()
            for index, row in enumerate(full.tolist()):
                self.at(row).full_tokens += blocks[index * size * TOKEN_BYTES : (index + 1) * size * TOKEN_BYTES]

    def at(self, row: int) -> Sequence:
        """The sequence of this row."""
        sequence = self.sequences[row]
        assert sequence is not None
        return sequence

    def _grow(self, num_rows: int) -> None:
        old = len(self.sequences)
        self.sequences += [None] * (num_rows - old)
        for index, cells in enumerate(self.cells):
            self.cells[index] = cells + array("q", bytes(8 * (num_rows - old)))
        views = [np.frombuffer(cells, np.int64) for cells in self.cells]
        self.known, self.tokens, self.computed, self.scheduled, self.sampled, self.published, self.writable = views
        self.seq_ids = np.concatenate([self.seq_ids, np.full(num_rows - old, -1, np.int32)])
        self.tails = np.concatenate([self.tails, np.zeros((num_rows - old, self.block_size), np.int32)])
        self._flat_tails = self.tails.reshape(-1)
        self._free += range(num_rows - 1, old - 1, -1)


class Bound(Protocol):
    """A bound as a property of sequences."""

    def __get__(self, sequence: Sequence, owner: type[Sequence]) -> int: ...
    def __set__(self, sequence: Sequence, value: int) -> None: ...


def bound(column: int) -> Bound:
    """A bound of a Sequence: one cell of its table."""

    def read(sequence: Sequence) -> int:
        return sequence.cells[column][sequence.row]

    def write(sequence: Sequence, value: int) -> None:
        sequence.cells[column][sequence.row] = value

    return cast(Bound, property(read, write))


class Sequence:
    """One stream of tokens whose KV lives in the pool; owned by one lease."""

    __slots__ = (
        "block_table",
        "cells",
        "full_tokens",
        "hashes",
        "last_hash",
        "num_cached",
        "released",
        "root",
        "row",
        "seq_id",
        "table",
    )

    num_known = bound(KNOWN)
    num_tokens = bound(TOKENS)
    num_computed = bound(COMPUTED)
    num_scheduled = bound(SCHEDULED)
    num_published = bound(PUBLISHED)
    sampled_position = bound(SAMPLED)
    num_writable = bound(WRITABLE)

    def __init__(self, table: SequenceTable, seq_id: int, root: bytes, block_table: array[int]) -> None:
        self.seq_id = seq_id
        self.root = root
        """Root of its prefix hashes: tenant, salt and model."""
        self.block_table = block_table
        """int64, so that NumPy can index by it."""
        self.full_tokens = bytearray()
        """Known tokens, TOKEN_BYTES each, as far as they fill blocks; the others are in the table's `tails`."""
        self.last_hash = root
        """Prefix hash of the last published block."""
        self.hashes: list[bytes] = []
        """Prefix hashes of the blocks after the published ones, as far as they were needed."""
        self.num_cached = 0
        self.released = False
        self.table = table
        self.cells = table.cells
        self.row = table.enter(self)

    def blocks_tail_first(self, first: int = 0) -> Rows:
        """Its blocks from index `first` of the table on, the last one first."""
        return np.array(self.block_table, np.int64)[first:][::-1]

    @property
    def num_promised(self) -> int:
        """Tokens after the known ones that steps in flight are sampling."""
        return self.num_tokens - self.num_known

    @property
    def tokens(self) -> bytes:
        """All known tokens, TOKEN_BYTES each."""
        return self.token_bytes(0, self.num_known)

    def token_bytes(self, start: int, end: int) -> bytes:
        """The known tokens from position start to end, TOKEN_BYTES each."""
        full = self.full_tokens
        num_full = len(full) // TOKEN_BYTES
        if end <= num_full:
            return bytes(full[start * TOKEN_BYTES : end * TOKEN_BYTES])
        tail = self.table.tails[self.row, max(0, start - num_full) : end - num_full].tobytes()
        return bytes(full[start * TOKEN_BYTES :]) + tail if start < num_full else tail

    def begin(self, tokens: bytes, hashes: list[bytes], *, num_cached_blocks: int, num_published: int) -> None:
        """A prompt, the hashes of its full blocks, and how many of them were found, and found published."""
        self._set_tail(tokens)
        size = self.table.block_size
        self.num_tokens = self.num_known
        self.num_cached = self.num_scheduled = num_cached_blocks * size
        self.num_computed = num_published * size
        self.num_published = num_published
        if num_published:
            self.last_hash = hashes[num_published - 1]
        self.hashes = hashes[num_published:]

    def copy_beginning(self, parent: Sequence, num_tokens: int, index: PrefixIndex) -> None:
        """The parent's first tokens, promised ones included, as far as they are computed but for the last."""
        size, num_known = self.table.block_size, min(num_tokens, parent.num_known)
        num_full, num_scheduled = num_known // size, min(parent.num_scheduled, num_tokens - 1)
        self.full_tokens = parent.full_tokens[: num_full * size * TOKEN_BYTES]
        if num_full == parent.num_known // size:
            self.table.tails[self.row] = self.table.tails[parent.row]
        else:
            self.table.tails[self.row] = np.frombuffer(parent.full_tokens, "<i4", size, num_full * size * TOKEN_BYTES)
        self.num_known = num_known
        self.num_tokens = num_tokens
        self.num_scheduled = num_scheduled
        self.num_computed = min(parent.num_computed, num_scheduled)
        self.num_cached = min(parent.num_cached, num_scheduled)
        if parent.sampled_position < num_tokens:
            self.sampled_position = parent.sampled_position
        published = parent.num_published
        self.num_published = min(published, num_scheduled // size)
        if self.num_published == published:
            self.last_hash = parent.last_hash
            self.hashes = parent.hashes[: num_full - published]
        else:
            self.last_hash = parent.prefix_hash(self.num_published, index)

    def append(self, tokens: bytes) -> None:
        """More known tokens, TOKEN_BYTES each; none is promised."""
        num_full = len(self.full_tokens) // TOKEN_BYTES
        self._set_tail(self.token_bytes(num_full, self.num_known) + tokens)
        self.num_tokens = self.num_known

    def append_promised(self, token_id: int) -> None:
        """The next of the promised tokens becomes known."""
        position = self.num_known
        slot = position % self.table.block_size
        self.table.tails[self.row, slot] = token_id
        self.num_known = position + 1
        if slot == self.table.block_size - 1:
            self.full_tokens += self.table.tails[self.row].tobytes()

    def truncate(self, num_tokens: int) -> None:
        """Keeps the first tokens; promised ones count."""
        if num_tokens < self.num_known:
            num_full = num_tokens - num_tokens % self.table.block_size
            tail = self.token_bytes(num_full, num_tokens)
            del self.full_tokens[num_full * TOKEN_BYTES :]
            self._set_tail(tail)
        self.num_tokens = num_tokens

    def _set_tail(self, tokens: bytes) -> None:
        """`tokens` follow the full ones; what fills blocks of them becomes full."""
        num_tail = len(tokens) // TOKEN_BYTES % self.table.block_size
        num_bytes = len(tokens) - num_tail * TOKEN_BYTES
        self.full_tokens += tokens[:num_bytes]
        if num_tail:
            self.table.tails[self.row, :num_tail] = np.frombuffer(tokens, "<i4", offset=num_bytes)
        self.num_known = len(self.full_tokens) // TOKEN_BYTES + num_tail

    # -- hashes ---------------------------------------------------------------------------------------------------

    def hash_up_to(self, num_full: int) -> list[bytes]:
        """Prefix hashes from the published blocks on up to the first `num_full` blocks, whose tokens are known."""
        published, size = self.num_published, self.table.block_size
        done = published + len(self.hashes)
        if num_full > done:
            parent = self.hashes[-1] if self.hashes else self.last_hash
            tokens = self.token_bytes(done * size, num_full * size)
            self.hashes += chain_hashes(parent, tokens, block_bytes=size * TOKEN_BYTES)
        return self.hashes[: num_full - published]

    def take_hashes(self, published: int, num_full: int) -> list[bytes]:
        """Prefix hashes of the blocks after the `published` ones up to the first `num_full`: published from now on."""
        hashes, count = self.hashes, num_full - published
        if not hashes:  # as it is while decoding
            block_bytes = self.table.block_size * TOKEN_BYTES
            tokens = self.full_tokens[published * block_bytes : num_full * block_bytes]
            hashes = chain_hashes(self.last_hash, tokens, block_bytes=block_bytes)
        elif len(hashes) < count:
            hashes = self.hash_up_to(num_full)
        self.hashes = hashes[count:]
        self.last_hash = hashes[count - 1]
        return hashes[:count]

    def prefix_hash(self, num_full: int, index: PrefixIndex) -> bytes:
        """Hash of the first `num_full` blocks, at most the published ones; the root's of none."""
        if num_full == 0:
            return self.root
        if num_full == self.num_published:
            return self.last_hash
        known = index.hashes[self.block_table[num_full - 1]]
        if known:
            return known
        tokens = self.full_tokens[: num_full * self.table.block_size * TOKEN_BYTES]
        return chain_hashes(self.root, tokens, block_bytes=self.table.block_size * TOKEN_BYTES)[-1]

    def unpublish(self, num_full: int, index: PrefixIndex) -> None:
        """Hashes and publication reach no further than the first `num_full` blocks."""
        if num_full < self.num_published:
            self.last_hash = self.prefix_hash(num_full, index)
            self.num_published = num_full
            self.hashes.clear()
        else:
            del self.hashes[num_full - self.num_published :]

    def forget_uncomputed(self) -> None:
        """What steps in flight were to compute and sample will not come: back to what was reported."""
        self.num_scheduled = self.num_computed
        self.num_tokens = self.num_known
        self.num_writable = 0
        if self.sampled_position >= self.num_known:
            self.sampled_position = NOWHERE
