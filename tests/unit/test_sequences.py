"""Sequences and the table of their bounds, beside lists of tokens with everything computed anew each time."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from hashlib import sha256
from itertools import count

import numpy as np
import pytest

from quire.cachemgr.prefix import PrefixIndex, chain_hashes
from quire.cachemgr.sequences import FIRST_ROWS, NOBODY, NOWHERE, NUM_BOUNDS, Sequence, SequenceTable

BLOCK_SIZES = [1, 2, 3, 16]
NUM_BLOCKS = 3000
ROOT = b"root"


def pack(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def prefix_hashes(root: bytes, tokens: list[int], size: int) -> list[bytes]:
    """Hashes of all full blocks."""
    hashes, parent = [], root
    for start in range(0, len(tokens) - len(tokens) % size, size):
        parent = sha256(parent + pack(tokens[start : start + size])).digest()
        hashes.append(parent)
    return hashes


def sequence_of(table: SequenceTable, tokens: list[int], *, seq_id: int = 1, num_blocks: int = 40) -> Sequence:
    """A sequence with these tokens, none of them computed."""
    sequence = Sequence(table, seq_id, ROOT, array("q", range(1, num_blocks + 1)))
    sequence.begin(pack(tokens), [], num_cached_blocks=0, num_published=0)
    return sequence


def check_tokens(sequence: Sequence, tokens: list[int]) -> None:
    size, data = sequence.table.block_size, pack(tokens)
    assert sequence.num_known == len(tokens)
    assert sequence.tokens == data
    assert bytes(sequence.full_tokens) == pack(tokens[: len(tokens) - len(tokens) % size])
    assert sequence.table.tails[sequence.row, : len(tokens) % size].tobytes() == data[len(sequence.full_tokens) :]


@pytest.fixture(params=BLOCK_SIZES)
def table(request: pytest.FixtureRequest) -> SequenceTable:
    return SequenceTable(request.param)


# -- tokens ---------------------------------------------------------------------------------------------------------


def lengths(table: SequenceTable) -> range:
    """All lengths with up to two full blocks and a tail."""
    return range(3 * table.block_size)


def test_any_part_of_the_tokens_is_read(table: SequenceTable) -> None:
    for num_tokens in lengths(table):
        tokens = list(range(100, 100 + num_tokens))
        sequence = sequence_of(table, tokens)
        check_tokens(sequence, tokens)
        for start in range(num_tokens + 1):
            for end in range(start, num_tokens + 1):
                assert sequence.token_bytes(start, end) == pack(tokens[start:end])


def test_tokens_are_appended_at_any_length(table: SequenceTable) -> None:
    for num_tokens in lengths(table):
        for num_more in range(1, 2 * table.block_size + 1):
            tokens = list(range(num_tokens + num_more))
            sequence = sequence_of(table, tokens[:num_tokens])
            sequence.append(pack(tokens[num_tokens:]))
            check_tokens(sequence, tokens)
            assert sequence.num_tokens == len(tokens)


def test_promised_tokens_become_known_one_by_one(table: SequenceTable) -> None:
    one, many = sequence_of(table, [7]), sequence_of(table, [7], seq_id=2)
    rows = np.array([many.row])
    num_more = 3 * table.block_size
    one.num_tokens = many.num_tokens = 1 + num_more
    tokens = [7]
    for token in range(num_more):
        tokens.append(token)
        one.append_promised(token)
        table.append(rows, np.array([token], np.int32))
        for sequence in (one, many):
            check_tokens(sequence, tokens)
            assert (sequence.num_tokens, sequence.num_promised) == (1 + num_more, num_more - token - 1)


def test_a_token_for_each_of_many_sequences_wherever_their_tails_end(table: SequenceTable) -> None:
    tokens = [list(range(num_tokens)) for num_tokens in lengths(table)]
    sequences = [sequence_of(table, known, seq_id=i) for i, known in enumerate(tokens)]
    order = np.array([sequence.row for sequence in sequences])[::-1]
    bystander = sequence_of(table, [5])
    table.append(order, np.arange(1000, 1000 + len(order), dtype=np.int32))
    for token, known, sequence in zip(range(999 + len(order), 999, -1), tokens, sequences, strict=True):
        check_tokens(sequence, [*known, token])
    check_tokens(bystander, [5])


def test_the_first_tokens_are_kept_of_any_length_and_others_follow(table: SequenceTable) -> None:
    tokens = list(range(3 * table.block_size))
    for num_kept in range(1, len(tokens) + 1):
        sequence = sequence_of(table, tokens)
        sequence.truncate(num_kept)
        check_tokens(sequence, tokens[:num_kept])
        assert sequence.num_tokens == num_kept
        sequence.append(pack([77, 78]))
        check_tokens(sequence, [*tokens[:num_kept], 77, 78])


def test_promised_tokens_are_cut_off_first(table: SequenceTable) -> None:
    sequence = sequence_of(table, [1, 2, 3])
    sequence.num_tokens = 6
    sequence.truncate(4)
    assert (sequence.num_known, sequence.num_tokens, sequence.num_promised) == (3, 4, 1)
    sequence.truncate(3)
    assert (sequence.num_known, sequence.num_tokens) == (3, 3)
    sequence.truncate(2)
    check_tokens(sequence, [1, 2])


# -- the table ------------------------------------------------------------------------------------------------------


def test_rows_are_given_out_once_and_again_after_they_were_left() -> None:
    table = SequenceTable(2)
    sequences = [sequence_of(table, [1, 2, 3], seq_id=i) for i in range(5)]
    rows = [sequence.row for sequence in sequences]
    assert len(set(rows)) == 5
    assert NOBODY not in rows
    for row, sequence in zip(rows, sequences, strict=True):
        sequence.num_writable = sequence.num_published = sequence.sampled_position = 5
        assert (table.at(row), table.seq_ids[row]) == (sequence, sequence.seq_id)
    table.leave([rows[1], rows[3]])
    assert table.seq_ids[rows].tolist() == [0, -1, 2, -1, 4]
    assert (table.sequences[rows[1]], table.sequences[rows[3]]) == (None, None)
    fresh = [Sequence(table, seq_id, ROOT, array("q")) for seq_id in (8, 9)]
    assert {sequence.row for sequence in fresh} == {rows[1], rows[3]}
    for sequence in fresh:
        assert (sequence.num_known, sequence.num_tokens, sequence.num_computed, sequence.num_scheduled) == (0, 0, 0, 0)
        assert (sequence.num_published, sequence.num_writable, sequence.sampled_position) == (0, 0, NOWHERE)
        assert sequence.tokens == b""
    for index in (0, 2, 4):
        check_tokens(sequences[index], [1, 2, 3])


def test_the_row_of_nobody_stays_as_it_was() -> None:
    table = SequenceTable(2)
    for seq_id in range(3 * FIRST_ROWS):
        sequence_of(table, [1], seq_id=seq_id)
    assert [cells[NOBODY] for cells in table.cells] == [0, 0, 0, 0, NOWHERE, 0, 0]
    assert (table.seq_ids[NOBODY], table.sequences[NOBODY]) == (-1, None)


def test_bounds_and_tails_outlive_the_growth_of_the_table_while_someone_looks_at_it() -> None:
    table = SequenceTable(4)
    early = [sequence_of(table, [i, i + 1, i + 2, i + 3, i + 4, i + 5], seq_id=i) for i in range(FIRST_ROWS - 1)]
    views = [np.frombuffer(cells, np.int64) for cells in table.cells]
    before = [view.copy() for view in views]
    late = [sequence_of(table, [i], seq_id=i) for i in range(FIRST_ROWS, 5 * FIRST_ROWS)]
    assert len(table.sequences) >= 5 * FIRST_ROWS
    assert len({sequence.row for sequence in early + late}) == len(early + late)
    for column, cells in enumerate(table.cells):
        assert list(cells[:FIRST_ROWS]) == before[column].tolist()
    for i, sequence in enumerate(early):
        check_tokens(sequence, [i, i + 1, i + 2, i + 3, i + 4, i + 5])
    rows = np.array([sequence.row for sequence in (early[0], late[-1])])
    table.append(rows, np.array([50, 51], np.int32))
    check_tokens(early[0], [0, 1, 2, 3, 4, 5, 50])
    check_tokens(late[-1], [5 * FIRST_ROWS - 1, 51])


def test_a_bound_of_a_sequence_is_a_cell_of_the_table() -> None:
    table = SequenceTable(4)
    sequence_of(table, [])
    sequence = sequence_of(table, [])
    names = ["num_known", "num_tokens", "num_computed", "num_scheduled", "sampled_position", "num_published"]
    names.append("num_writable")
    for value, name in enumerate(names, 10):
        setattr(sequence, name, value)
    columns = (table.known, table.tokens, table.computed, table.scheduled, table.sampled, table.published)
    assert [column[sequence.row] for column in (*columns, table.writable)] == list(range(10, 10 + NUM_BOUNDS))
    table.scheduled[sequence.row] = 99
    assert sequence.num_scheduled == 99


# -- beginnings -----------------------------------------------------------------------------------------------------


def test_a_prompt_begins_behind_what_was_found(table: SequenceTable) -> None:
    size, tokens = table.block_size, list(range(3 * table.block_size + 1))
    hashes = prefix_hashes(ROOT, tokens, size)
    sequence = Sequence(table, 1, ROOT, array("q", range(1, 5)))
    sequence.begin(pack(tokens), hashes, num_cached_blocks=2, num_published=1)
    check_tokens(sequence, tokens)
    assert (sequence.num_tokens, sequence.num_cached, sequence.num_scheduled) == (len(tokens), 2 * size, 2 * size)
    assert (sequence.num_computed, sequence.num_published) == (size, 1)
    assert (sequence.last_hash, sequence.hashes) == (hashes[0], hashes[1:])
    assert sequence.take_hashes(1, 3) == hashes[1:3]


def test_a_copy_of_any_length_has_the_first_tokens_and_what_was_computed_of_them(table: SequenceTable) -> None:
    size, index = table.block_size, PrefixIndex(NUM_BLOCKS)
    tokens = list(range(3 * size + 1))
    hashes = prefix_hashes(ROOT, tokens, size)
    for num_computed in (0, size, 2 * size, 3 * size + 1):
        parent = sequence_of(table, tokens)
        parent.num_tokens = len(tokens) + 2
        parent.num_scheduled, parent.num_computed, parent.num_cached = len(tokens) + 1, num_computed, size
        parent.sampled_position = len(tokens) + 1
        if num_computed >= size:
            parent.take_hashes(0, num_computed // size)
            parent.num_published = num_computed // size
        parent.hash_up_to(3)
        for num_tokens in range(1, len(tokens) + 3):
            child = Sequence(table, 2, ROOT, parent.block_table[: -(-num_tokens // size)])
            child.copy_beginning(parent, num_tokens, index)
            check_tokens(child, tokens[:num_tokens])
            assert child.num_tokens == num_tokens
            assert child.num_scheduled == min(num_tokens - 1, len(tokens) + 1)
            assert child.num_computed == min(num_computed, num_tokens - 1)
            assert child.num_cached == min(size, num_tokens - 1)
            assert child.sampled_position == (len(tokens) + 1 if num_tokens == len(tokens) + 2 else NOWHERE)
            assert child.num_published == min(num_computed, num_tokens - 1) // size
            assert child.last_hash == (hashes[child.num_published - 1] if child.num_published else ROOT)
            num_full = min(num_tokens, len(tokens)) // size
            assert child.hash_up_to(num_full) == hashes[child.num_published : num_full]
            check_tokens(parent, tokens)
            table.leave([child.row])


def test_a_copy_goes_its_own_way(table: SequenceTable) -> None:
    size = table.block_size
    for num_tokens in range(1, 2 * size + 1):
        tokens = list(range(2 * size + 1))
        parent, child = sequence_of(table, tokens), Sequence(table, 2, ROOT, array("q"))
        child.copy_beginning(parent, num_tokens, PrefixIndex(4))
        child.append(pack([91, 92]))
        parent.append(pack([81]))
        check_tokens(child, [*tokens[:num_tokens], 91, 92])
        check_tokens(parent, [*tokens, 81])


def test_what_will_not_come_is_forgotten(table: SequenceTable) -> None:
    for sampled_position, left in ((3, NOWHERE), (5, NOWHERE), (2, 2), (NOWHERE, NOWHERE)):
        sequence = sequence_of(table, [1, 2, 3])
        sequence.num_tokens, sequence.num_scheduled, sequence.num_computed, sequence.num_writable = 6, 5, 2, 16
        sequence.sampled_position = sampled_position
        sequence.forget_uncomputed()
        assert (sequence.num_tokens, sequence.num_scheduled, sequence.num_computed) == (3, 2, 2)
        assert (sequence.num_writable, sequence.sampled_position) == (0, left)


def test_blocks_are_told_tail_first() -> None:
    sequence = sequence_of(SequenceTable(2), [], num_blocks=4)
    assert sequence.blocks_tail_first().tolist() == [4, 3, 2, 1]
    assert sequence.blocks_tail_first(2).tolist() == [4, 3]
    assert sequence.blocks_tail_first(4).tolist() == []


# -- hashes ---------------------------------------------------------------------------------------------------------


def test_hashes_are_taken_in_any_pieces(table: SequenceTable) -> None:
    size = table.block_size
    tokens = list(range(5 * size + size // 2))
    hashes = prefix_hashes(ROOT, tokens, size)
    for first in range(1, 6):
        for ahead in range(6):
            sequence = sequence_of(table, tokens)
            if ahead:
                assert sequence.hash_up_to(ahead) == hashes[:ahead]
            assert sequence.take_hashes(0, first) == hashes[:first]
            sequence.num_published = first
            assert sequence.last_hash == hashes[first - 1]
            assert sequence.hashes == hashes[first : max(first, ahead)]
            if first < 5:
                assert sequence.take_hashes(first, 5) == hashes[first:]
                assert sequence.last_hash == hashes[4]


@pytest.mark.parametrize("is_known", ["found", "dropped", "duplicate"])
def test_the_hash_of_any_published_prefix_is_known_or_computed_again(table: SequenceTable, is_known: str) -> None:
    size, index = table.block_size, PrefixIndex(NUM_BLOCKS)
    tokens = list(range(4 * size + 1))
    hashes = prefix_hashes(ROOT, tokens, size)
    sequence = sequence_of(table, tokens)
    taken = sequence.take_hashes(0, 4)
    sequence.num_published = 4
    index.publish(taken, [91, 92, 93, 94] if is_known == "duplicate" else sequence.block_table[:4].tolist())
    if is_known == "dropped":
        for block_id in sequence.block_table[:4]:
            index.drop(block_id)
    for num_full in range(5):
        assert sequence.prefix_hash(num_full, index) == [ROOT, *hashes][num_full]
    for num_full in (4, 2, 0):
        sequence.unpublish(num_full, index)
        assert (sequence.num_published, sequence.last_hash) == (num_full, [ROOT, *hashes][num_full])
        assert sequence.hash_up_to(4) == hashes[num_full:4]


def test_hashes_reach_no_further_than_the_tokens_that_are_kept(table: SequenceTable) -> None:
    size, index = table.block_size, PrefixIndex(NUM_BLOCKS)
    tokens = list(range(4 * size))
    for num_full in range(1, 5):
        sequence = sequence_of(table, tokens)
        sequence.take_hashes(0, 1)
        sequence.num_published = 1
        sequence.hash_up_to(4)
        sequence.unpublish(num_full, index)
        assert sequence.hashes == prefix_hashes(ROOT, tokens, size)[1:num_full]
        assert sequence.num_published == 1


# -- everything at once, beside a plain model -----------------------------------------------------------------------

OPERATIONS = ["begin", "begin", "append", "promise", "keep", "keep_all", "keep_all", "cut", "copy", "publish", "hash"]
OPERATIONS += ["look", "drop", "leave"]


class Plain:
    """One sequence as lists."""

    def __init__(self, sequence: Sequence, tokens: list[int], num_published: int) -> None:
        self.sequence = sequence
        self.tokens = tokens
        self.num_tokens = len(tokens)
        self.num_published = num_published


class Model:
    """Sequences of one table, of two-letter tokens, so that many begin alike; each block has one content for ever."""

    def __init__(self, block_size: int) -> None:
        self.size = block_size
        self.table = SequenceTable(block_size)
        self.index = PrefixIndex(NUM_BLOCKS)
        self.block_ids = count(1)
        self.seq_ids = count(1)
        self.plains: list[Plain] = []

    def fresh(self, num_blocks: int) -> array[int]:
        return array("q", [next(self.block_ids) for _ in range(num_blocks)])

    def some(self, rng: random.Random) -> list[int]:
        return [rng.randrange(2) for _ in range(rng.randint(1, 2 * self.size + 1))]

    def pick(self, rng: random.Random) -> Iterator[Plain]:
        if self.plains:
            yield rng.choice(self.plains)

    def fill(self, plain: Plain) -> None:
        """A table for all tokens."""
        table = plain.sequence.block_table
        table.extend(self.fresh(-(-plain.num_tokens // self.size) - len(table)))

    def begin(self, rng: random.Random) -> None:
        tokens = self.some(rng) + self.some(rng)
        hashes = prefix_hashes(ROOT, tokens, self.size)
        found = self.index.find(hashes[: (len(tokens) - 1) // self.size])
        cached = min(len(found) + rng.randint(0, 1), (len(tokens) - 1) // self.size)
        sequence = Sequence(self.table, next(self.seq_ids), ROOT, array("q", found))
        sequence.begin(pack(tokens), hashes, num_cached_blocks=cached, num_published=len(found))
        assert (sequence.num_cached, sequence.num_computed) == (cached * self.size, len(found) * self.size)
        self.plains.append(Plain(sequence, tokens, len(found)))
        self.fill(self.plains[-1])

    def append(self, rng: random.Random) -> None:
        for plain in self.pick(rng):
            if plain.num_tokens == len(plain.tokens):
                more = self.some(rng)
                plain.sequence.append(pack(more))
                plain.tokens = plain.tokens + more
                plain.num_tokens = len(plain.tokens)
                self.fill(plain)

    def promise(self, rng: random.Random) -> None:
        for plain in self.plains:
            plain.num_tokens += rng.randint(0, 2)
            plain.sequence.num_tokens = plain.num_tokens
            self.fill(plain)

    def keep(self, rng: random.Random) -> None:
        for plain in self.pick(rng):
            if plain.num_tokens > len(plain.tokens):
                plain.tokens = [*plain.tokens, rng.randrange(2)]
                plain.sequence.append_promised(plain.tokens[-1])

    def keep_all(self, rng: random.Random) -> None:
        waiting = [plain for plain in self.plains if plain.num_tokens > len(plain.tokens)]
        rng.shuffle(waiting)
        for plain in waiting:
            plain.tokens = [*plain.tokens, rng.randrange(2)]
        if waiting:
            rows = np.array([plain.sequence.row for plain in waiting])
            self.table.append(rows, np.array([plain.tokens[-1] for plain in waiting], np.int32))

    def cut(self, rng: random.Random) -> None:
        for plain in self.pick(rng):
            sequence, num_tokens = plain.sequence, rng.randint(1, plain.num_tokens)
            sequence.unpublish(num_tokens // self.size, self.index)
            sequence.truncate(num_tokens)
            sequence.num_scheduled = min(sequence.num_scheduled, num_tokens)
            plain.tokens, plain.num_tokens = plain.tokens[:num_tokens], num_tokens
            plain.num_published = min(plain.num_published, num_tokens // self.size)
            del sequence.block_table[num_tokens // self.size :]  # what is in the last one is not its own
            self.fill(plain)

    def copy(self, rng: random.Random) -> None:
        for plain in self.pick(rng):
            num_tokens = rng.randint(1, plain.num_tokens)
            sequence = Sequence(self.table, next(self.seq_ids), ROOT, array("q"))
            sequence.copy_beginning(plain.sequence, num_tokens, self.index)
            published = min(plain.num_published, (num_tokens - 1) // self.size)
            sequence.block_table = plain.sequence.block_table[:published]
            child = Plain(sequence, plain.tokens[:num_tokens], published)
            child.num_tokens = num_tokens
            self.plains.append(child)
            self.fill(child)

    def publish(self, rng: random.Random) -> None:
        for plain in self.pick(rng):
            first, most = plain.num_published, len(plain.tokens) // self.size
            if first < most:
                end = rng.randint(first + 1, most)
                hashes = plain.sequence.take_hashes(first, end)
                assert hashes == prefix_hashes(ROOT, plain.tokens, self.size)[first:end]
                plain.num_published = plain.sequence.num_published = end
                plain.sequence.num_scheduled = max(plain.sequence.num_scheduled, end * self.size)
                table = plain.sequence.block_table
                standing = self.index.publish(hashes, table[first:end])
                if rng.random() < 0.5:
                    table[first:end] = array("q", standing)

    def hash(self, rng: random.Random) -> None:
        for plain in self.pick(rng):
            num_full = rng.randint(plain.num_published, len(plain.tokens) // self.size)
            hashes = prefix_hashes(ROOT, plain.tokens, self.size)
            assert plain.sequence.hash_up_to(num_full) == hashes[plain.num_published : num_full]

    def look(self, rng: random.Random) -> None:
        for plain in self.pick(rng):
            num_full = rng.randint(0, plain.num_published)
            hashes = [ROOT, *prefix_hashes(ROOT, plain.tokens, self.size)]
            assert plain.sequence.prefix_hash(num_full, self.index) == hashes[num_full]

    def drop(self, rng: random.Random) -> None:
        findable = self.index.findable.nonzero()[0].tolist()
        for block_id in findable if rng.random() < 0.3 else findable[:1]:
            self.index.drop(block_id)

    def leave(self, rng: random.Random) -> None:
        for plain in self.pick(rng):
            self.table.leave([plain.sequence.row])
            self.plains.remove(plain)

    def check(self) -> None:
        rows = [plain.sequence.row for plain in self.plains]
        assert len(set(rows)) == len(rows)
        assert self.table.seq_ids[rows].tolist() == [plain.sequence.seq_id for plain in self.plains]
        for plain in self.plains:
            sequence, hashes = plain.sequence, prefix_hashes(ROOT, plain.tokens, self.size)
            check_tokens(sequence, plain.tokens)
            assert (sequence.num_tokens, sequence.num_published) == (plain.num_tokens, plain.num_published)
            assert sequence.last_hash == [ROOT, *hashes][plain.num_published]
            known = sequence.hashes
            assert known == hashes[plain.num_published : plain.num_published + len(known)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_any_calls_leave_sequences_as_plain_lists_have_them(block_size: int, seed: int) -> None:
    rng, model = random.Random(seed), Model(block_size)
    for _ in range(100):
        getattr(model, rng.choice(OPERATIONS))(rng)
        model.check()


def test_the_plain_hashes_are_those_of_the_index() -> None:
    assert prefix_hashes(ROOT, [1, 2, 3, 4, 5], 2) == chain_hashes(ROOT, pack([1, 2, 3, 4, 5]), block_bytes=8)
