"""Prefix hashes and the index from them to blocks."""

from __future__ import annotations

from hashlib import sha256

import pytest

from quire.cachemgr.errors import BrokenInvariant
from quire.cachemgr.prefix import PrefixIndex, chain_hashes, root_hash

BLOCK_BYTES = 8  # two tokens


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


def test_the_first_block_published_stands_for_the_hash() -> None:
    index = PrefixIndex(4)
    assert index.publish(b"h", 2) == 2
    assert index.publish(b"h", 3) == 2
    assert index.lookup(b"h") == 2
    assert (index.hash_of(2), index.hash_of(3)) == (b"h", None)
    index.check_invariants()


def test_a_block_is_counted_as_published_once_however_many_sharers_report_it() -> None:
    index = PrefixIndex(4)
    index.publish(b"h", 2)
    index.publish(b"h", 2)
    assert (index.statistics().num_published, index.statistics().num_indexed) == (1, 1)


def test_what_is_forgotten_is_not_found_and_forgetting_twice_is_fine() -> None:
    index = PrefixIndex(4)
    index.publish(b"h", 2)
    index.forget(2)
    index.forget(2)
    index.forget(1)
    assert index.lookup(b"h") is None
    assert index.hash_of(2) is None
    assert index.publish(b"h", 3) == 3
    assert (index.statistics().num_published, index.statistics().num_indexed) == (2, 1)
    index.check_invariants()


def test_broken_books_are_noticed() -> None:
    index = PrefixIndex(4)
    index.publish(b"h", 2)
    index._hash_of[2] = b"other"
    with pytest.raises(BrokenInvariant, match="by a hash that the block does not have"):
        index.check_invariants()
    index._hash_of[2] = b"h"
    index._hash_of[3] = b"orphan"
    with pytest.raises(BrokenInvariant, match="2 blocks have a hash, the index finds 1"):
        index.check_invariants()
