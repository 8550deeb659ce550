"""Prefix hashes and the index from them to blocks."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest

from quire.cachemgr.errors import BrokenInvariant
from quire.cachemgr.prefix import DROPPED, PrefixIndex, chain_hashes, root_hash

BLOCK_BYTES = 8  # two tokens


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(6)


def tokens(*ids: int) -> bytes:
    return b"".join(i.to_bytes(4, "little") for i in ids)


def root(tenant: str = "", salt: bytes = b"", model: str = "m") -> bytes:
    return root_hash(tenant=tenant, salt=salt, model_fingerprint=model)


def test_a_hash_is_chained_on_its_parents() -> None:
    first, second = chain_hashes(root(), tokens(1, 2, 3, 4), block_bytes=BLOCK_BYTES)
    assert first == sha256(root() + tokens(1, 2)).digest()
    assert second == sha256(first + tokens(3, 4)).digest()
    assert chain_hashes(first, tokens(3, 4), block_bytes=BLOCK_BYTES) == [second]


@pytest.mark.parametrize(("num_tokens", "num_full"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)])
def test_a_partial_block_has_no_hash(num_tokens: int, num_full: int) -> None:
    assert len(chain_hashes(root(), tokens(*range(num_tokens)), block_bytes=BLOCK_BYTES)) == num_full


def test_hashes_of_a_bytearray_and_of_bytes_are_equal() -> None:
    data = tokens(1, 2, 3, 4)
    assert chain_hashes(root(), bytearray(data), block_bytes=BLOCK_BYTES) == chain_hashes(
        root(), data, block_bytes=BLOCK_BYTES
    )


def test_roots_differ_by_tenant_salt_and_model_and_by_where_one_ends() -> None:
    roots = [
        root(),
        root(tenant="a"),
        root(salt=b"a"),
        root(model="a"),
        root(tenant="ab"),
        root(tenant="a", salt=b"b"),
        root(salt=b"ab"),
        root(salt=b"a", model="bm"),
    ]
    assert len(set(roots)) == len(roots)


def test_the_longest_known_prefix_is_found(index: PrefixIndex) -> None:
    index.publish([b"a", b"b", b"d"], [5, 3, 4])
    assert index.find([b"a", b"b", b"c", b"d"]) == [5, 3]
    assert index.find([b"b", b"a"]) == [3, 5]
    assert index.find([b"c", b"a"]) == []
    assert index.find([]) == []


def test_hashes_with_the_same_first_byte_are_told_apart(index: PrefixIndex) -> None:
    index.publish([b"xa", b"xb", b"ya"], [1, 2, 3])
    assert index.find([b"ya", b"xb", b"xa", b"xc"]) == [3, 2, 1]
    assert (index.lookup(b"xb"), index.lookup(b"yb")) == (2, None)


def test_the_first_block_published_stands_for_the_hash(index: PrefixIndex) -> None:
    assert index.publish([b"h"], [2]) == [2]
    assert index.publish([b"g", b"h"], [3, 4]) == [3, 2]
    assert index.lookup(b"h") == 2
    assert index.hashes[2:5] == [b"h", b"g", None]
    assert index.findable.nonzero()[0].tolist() == [2, 3]
    index.check_invariants()


def test_of_two_blocks_published_at_once_the_first_stands(index: PrefixIndex) -> None:
    assert index.publish([b"h", b"h"], [3, 2]) == [3, 3]
    assert (index.hashes[3], index.hashes[2]) == (b"h", None)
    index.check_invariants()


def test_a_hash_for_each_block_is_needed(index: PrefixIndex) -> None:
    with pytest.raises(ValueError, match="zip"):
        index.publish([b"h"], [2, 3])


def test_a_block_is_counted_as_published_once_however_many_sharers_report_it(index: PrefixIndex) -> None:
    index.publish([b"h"], [2])
    index.publish([b"h"], [2])
    assert (index.statistics().num_published, index.statistics().num_indexed) == (1, 1)


def test_what_is_forgotten_is_not_found_and_may_be_published_again(index: PrefixIndex) -> None:
    index.publish([b"g", b"h"], [1, 2])
    index.forget([2])
    assert (index.lookup(b"g"), index.lookup(b"h")) == (1, None)
    assert (index.hashes[2], index.findable[2]) == (None, False)
    assert index.publish([b"h"], [3]) == [3]
    assert (index.statistics().num_published, index.statistics().num_indexed) == (3, 2)
    index.forget([1, 3])
    assert (index.statistics().num_published, index.statistics().num_indexed) == (3, 0)
    assert not index.findable.any()
    index.check_invariants()


def test_a_dropped_block_is_not_found_and_keeps_its_past_until_it_is_free(index: PrefixIndex) -> None:
    index.publish([b"g", b"h"], [1, 2])
    index.drop(2)
    assert (index.lookup(b"h"), index.hashes[2], index.findable[2]) == (None, DROPPED, False)
    assert index.hashes[2] is not None
    index.check_invariants()
    index.forget_dropped(np.array([2, 4]))
    assert index.hashes == [None, b"g", None, None, None, None]
    assert (index.statistics().num_published, index.statistics().num_indexed) == (2, 1)
    index.check_invariants()


def test_a_dropped_block_can_be_published_again_by_who_else_computed_it(index: PrefixIndex) -> None:
    index.publish([b"h"], [2])
    index.drop(2)
    assert index.publish([b"h"], [2]) == [2]
    assert (index.hashes[2], index.findable[2], index.lookup(b"h")) == (b"h", True, 2)
    index.check_invariants()


def test_entries_are_all_hashes_and_their_blocks(index: PrefixIndex) -> None:
    index.publish([b"a", b"b", b"ba"], [3, 1, 2])
    assert sorted(index.entries()) == [(b"a", 3), (b"b", 1), (b"ba", 2)]


def test_broken_books_are_noticed(index: PrefixIndex) -> None:
    index.publish([b"h"], [2])
    index.hashes[2] = b"other"
    with pytest.raises(BrokenInvariant, match="by a hash that the block does not have"):
        index.check_invariants()
    index.hashes[2] = b"h"
    index.hashes[3] = b"orphan"
    with pytest.raises(BrokenInvariant, match="2 blocks have a hash, 1 are marked findable"):
        index.check_invariants()
    index.findable[3] = True
    with pytest.raises(BrokenInvariant, match="2 blocks have a hash, the index finds 1"):
        index.check_invariants()
