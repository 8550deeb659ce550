"""The files of the disk: what is written is read again, and nothing else."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from quire.worker.disk import store as store_module
from quire.worker.disk.records import HEADER_BYTES, MAX_TENANT_BYTES, VERSION, Record, decode_header, decode_headers
from quire.worker.disk.store import DirectoryInUseError, Store

CONTENT_BYTES = 1_000
MARK, OTHER_MARK = bytes(range(32)), bytes(32)
OpenStore = Callable[..., Store]


@pytest.fixture
def open_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenStore]:
    """Opens the store of one directory, with four blocks in a file; an open one is closed before."""
    monkeypatch.setattr(store_module, "FILE_BYTES", 4 * (HEADER_BYTES + CONTENT_BYTES))
    opened: list[Store] = []

    def close() -> None:
        while opened:
            opened.pop().close()

    def open_one(*, mark: bytes = MARK, num_blocks: int = 10, content_bytes: int = CONTENT_BYTES) -> Store:
        close()
        memory_bytes = num_blocks * (HEADER_BYTES + content_bytes)
        directory = tmp_path / "disk"
        opened.append(Store(directory, content_bytes=content_bytes, memory_bytes=memory_bytes, mark=mark))
        return opened[0]

    yield open_one
    close()


def content_of(number: int) -> bytes:
    return Random(number).randbytes(CONTENT_BYTES)


def hash_of(number: int) -> bytes:
    return bytes([number]) * 32


def group_of(number: int) -> int:
    return number % 64


def write(store: Store, block: int, number: int, tenant: str = "acme") -> None:
    store.write(block, content_of(number), prefix_hash=hash_of(number), group=group_of(number), tenant=tenant)


def found(store: Store) -> dict[int, int]:
    """The numbers of the copies that can be read, by disk block."""
    for block, record in store.records.items():
        number = record.prefix_hash[0]
        assert record.group == group_of(number)
        assert store.read(block, prefix_hash=hash_of(number), group=record.group) == content_of(number)
    return {block: record.prefix_hash[0] for block, record in store.records.items()}


def test_what_was_written_is_found_by_the_next_process_in_the_order_of_writing(open_store: OpenStore) -> None:
    store = open_store()
    for block, number in ((9, 1), (0, 2), (5, 3), (0, 4)):
        write(store, block, number)
    assert (store.num_blocks, found(store)) == (10, {9: 1, 5: 3, 0: 4})
    store = open_store()
    assert (list(found(store)), found(store), bool(store.refused)) == ([9, 5, 0], {9: 1, 5: 3, 0: 4}, False)
    write(store, 9, 5)
    assert list(found(open_store())) == [5, 0, 9]


def test_the_directory_is_this_users_and_one_processes(open_store: OpenStore, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o755)
    store = open_store()
    write(store, 0, 1)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "disk", *store.directory.iterdir())}
    assert modes == {"disk": 0o700, "lock": 0o600, "blocks-000000.kv": 0o600}
    with pytest.raises(DirectoryInUseError, match=r"--disk-dir: .*disk is in use by another process"):
        Store(store.directory, content_bytes=CONTENT_BYTES, memory_bytes=1 << 20, mark=MARK)
    with pytest.raises(ValueError, match="--disk-memory: 1255 bytes have no room for a copy of 1256 bytes"):
        Store(tmp_path / "other", content_bytes=CONTENT_BYTES, memory_bytes=1_255, mark=MARK)


def test_a_copy_is_read_by_its_own_hash_and_group_alone(open_store: OpenStore) -> None:
    store = open_store()
    write(store, 3, 1)
    for block, number, group in ((3, 2, 1), (4, 1, 1), (3, 1, 2), (3, 1, 0)):
        with pytest.raises(OSError, match=f"disk block {block} has other content"):
            store.read(block, prefix_hash=hash_of(number), group=group)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_a_changed_byte_costs_the_copy_that_has_it_and_no_other(open_store: OpenStore) -> None:
    """Of the header, wherever it is, at the start; of the content when it is read."""
    for position in range(0, HEADER_BYTES, 5):
        store = open_store()
        for block in range(2):
            write(store, block, block)
        flip(store.directory / "blocks-000000.kv", position)
        store = open_store()
        assert (found(store), store.refused.other_version + store.refused.other_pool + store.refused.damaged) == (
            {1: 1},
            1,
        )
        assert not open_store().refused, "it was removed"
    store = open_store()
    write(store, 0, 0)
    flip(store.directory / "blocks-000000.kv", 4_096 + 500)
    store = open_store()
    assert list(store.records) == [1, 0]
    with pytest.raises(OSError, match="disk block 0 is not as it was written"):
        store.read(0, prefix_hash=hash_of(0), group=0)


def test_what_is_cut_off_is_refused_and_the_rest_is_found(open_store: OpenStore) -> None:
    store = open_store()
    for block in range(4):
        write(store, block, block)
    path = store.directory / "blocks-000000.kv"
    size = path.stat().st_size
    os.truncate(path, 4_096 + 2 * CONTENT_BYTES + 1)
    store = open_store()
    assert (found(store), store.refused.damaged, path.stat().st_size) == ({0: 0, 1: 1}, 2, size)
    os.truncate(path, 3)
    assert (found(open_store()), path.exists()) == ({}, False)


def test_copies_of_another_pool_or_version_are_refused_and_removed(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    write(store, 0, 1)
    write(store, 4, 2)
    store = open_store(mark=OTHER_MARK)
    assert (found(store), store.refused.other_pool, list(store.directory.glob("*.kv"))) == ({}, 2, [])
    write(store, 0, 1)
    with monkeypatch.context() as older:
        older.setattr("quire.worker.disk.records.VERSION", VERSION - 1)
        write(store, 1, 2)
    store = open_store(mark=OTHER_MARK)
    assert (found(store), store.refused.other_version) == ({0: 1}, 1)
    assert found(open_store(mark=OTHER_MARK, content_bytes=CONTENT_BYTES + 8)) == {}


def test_a_file_that_cant_be_read_costs_its_copies(open_store: OpenStore) -> None:
    store = open_store()
    write(store, 0, 1)
    write(store, 4, 2)
    path = store.directory / "blocks-000000.kv"
    path.unlink()
    path.mkdir()
    store = open_store()
    assert (found(store), store.refused.unreadable) == ({4: 2}, [f"{path}: Is a directory"])
    with pytest.raises(IsADirectoryError):
        write(store, 1, 3)
    with pytest.raises(IsADirectoryError):
        store.erase("acme")
    path.rmdir()
    store.erase("acme")
    assert (found(store), found(open_store())) == ({}, {})


def test_a_smaller_disk_keeps_what_fits(open_store: OpenStore) -> None:
    store = open_store()
    for block in (0, 5, 6, 9):
        write(store, block, block)
    store = open_store(num_blocks=6)
    assert found(store) == {0: 0, 5: 5}
    assert found(open_store(num_blocks=10)) == {0: 0, 5: 5}


def bytes_of(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(directory.glob("*.kv")))


@pytest.mark.parametrize("tenant", ["acme", None])
def test_an_erased_copy_is_not_on_the_disk_any_more(open_store: OpenStore, tenant: str | None) -> None:
    store = open_store()
    for block, number in ((0, 1), (1, 2), (4, 3)):
        write(store, block, number)
    write(store, 5, 4, tenant="other")
    assert store.erase(tenant) == (4 if tenant is None else 3)
    left = {} if tenant is None else {5: 4}
    assert found(store) == left
    assert found(open_store()) == left
    there = bytes_of(store.directory)
    assert [content_of(number) in there for number in (1, 2, 3, 4)] == [False, False, False, tenant is not None]
    assert not any(hash_of(number) in there for number in (1, 2, 3))


def test_a_copy_that_could_not_be_overwritten_is_erased_with_its_tenants(open_store: OpenStore) -> None:
    """The old content may be left where the new one should be."""
    store = open_store()
    write(store, 0, 1)
    write(store, 1, 2, tenant="other")
    path = store.directory / "blocks-000000.kv"
    aside = path.rename(store.directory / "aside")
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        write(store, 0, 3, tenant="other")
    path.rmdir()
    aside.rename(path)
    assert found(store) == {1: 2}
    store.erase("acme")
    assert (found(open_store()), content_of(1) in bytes_of(store.directory)) == ({1: 2}, False)


def test_a_file_that_could_not_be_flushed_goes(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux takes pages that it could not write for written: a second flush succeeds, and says nothing of the disk."""
    store = open_store()
    write(store, 0, 1)
    write(store, 1, 2, tenant="other")

    def fail(file: int) -> None:
        raise OSError(errno.EIO, "it can't be written")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="it can't be written"):
            store.erase("acme")
    assert (found(store), bytes_of(store.directory)) == ({}, b"")
    write(store, 1, 3, tenant="other")
    assert (store.erase("acme"), found(open_store())) == (0, {1: 3})


@pytest.mark.parametrize("tenant", ["acme", "other"])
@pytest.mark.parametrize("num_writes", range(4))
def test_content_is_erased_with_its_tenants_though_a_process_has_ended_while_it_wrote(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, tenant: str, num_writes: int
) -> None:
    """The old content was of one tenant, the new one is of another: half of it is written, and no header after it."""
    store = open_store()
    write(store, 0, 1)
    write(store, 1, 4, tenant="third")
    numbers, write_all = itertools.count(), store_module.write_all

    def write_some(file: int, data: bytes, offset: int) -> None:
        number = next(numbers)
        if number > num_writes:
            raise SystemExit
        write_all(file, data[: len(data) // 2] if number == num_writes and len(data) > HEADER_BYTES else data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "write_all", write_some)
        with contextlib.suppress(SystemExit):
            write(store, 0, 2, tenant="other")
    store = open_store()
    store.erase(tenant)
    erased = content_of(1 if tenant == "acme" else 2)
    there = bytes_of(store.directory)
    assert (erased[:100] in there, erased[-100:] in there, found(store)[1]) == (False, False, 4)


def test_a_full_disk_costs_the_copy_that_has_no_room(open_store: OpenStore) -> None:
    store = open_store()
    write(store, 0, 1)
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write(store, 4, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (found(store), len(list(store.directory.glob("*.kv")))) == ({0: 1}, 1)
    write(store, 4, 2)
    assert found(open_store()) == {0: 1, 4: 2}


def test_a_write_that_stopped_anywhere_is_not_found(open_store: OpenStore) -> None:
    """The process dies, or the disk has written some of the bytes, in any order."""
    store = open_store()
    write(store, 0, 1)
    path = store.directory / "blocks-000000.kv"
    old = path.read_bytes()
    write(store, 0, 2)
    new = path.read_bytes()
    pieces = [(0, 128), (128, 256), (4_096, 4_600), (4_600, 5_096)]
    for taken in itertools.product([False, True], repeat=4):
        data = bytearray(old)
        for (first, end), is_new in zip(pieces, taken, strict=True):
            data[first:end] = (new if is_new else old)[first:end]

        path.write_bytes(data)
        store = open_store()
        numbers = []
        for block, record in store.records.items():
            try:
                content = store.read(block, prefix_hash=record.prefix_hash, group=record.group)
            except OSError:
                continue
            numbers.append(record.prefix_hash[0])
            assert content == content_of(numbers[0])
        assert numbers == ([1] if not any(taken) else [2] if all(taken) else []), taken


def test_headers() -> None:
    record = Record(hash_of(7), 63, "ä" * 64, 2**60, 2**32 - 1)
    header = record.encode(MARK)
    assert (len(header), decode_header(header), len(record.tenant.encode())) == (HEADER_BYTES, record, MAX_TENANT_BYTES)
    headers = decode_headers(bytes(HEADER_BYTES) + header + b"\1" * HEADER_BYTES + header[:100], MARK)
    assert (headers.records, headers.unused, headers.refused.damaged) == ({1: record}, [2], 1)


def test_a_tenant_with_a_long_name_is_not_kept(open_store: OpenStore) -> None:
    store = open_store()
    with pytest.raises(OSError, match="a tenant's name has more than 128 bytes"):
        write(store, 0, 1, tenant="x" * 129)
    assert found(open_store()) == {}
