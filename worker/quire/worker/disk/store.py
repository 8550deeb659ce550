"""The directory of the disk: files of a fixed size, with a place for each disk block.

    blocks-000000.kv     headers of the file's blocks, HEADER_BYTES each; then their content, from a whole page on
    lock                 of the one process that uses the directory

A file is made, with all its bytes reserved, when the first of its blocks is written. Contents are not checked at the
start, but when they are read. Files are flushed to the disk when content is erased, and only then: a copy that did not
reach the disk fails its checksum. A process that dies while it writes leaves a header that is none: at the start the
content behind it is removed, for it may be of two tenants, and no header names them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import os
import zlib
from collections.abc import Collection, Iterator
from hashlib import sha256
from pathlib import Path

from quire.worker.disk.records import (
    BEING_WRITTEN,
    HEADER_BYTES,
    MAX_TENANT_BYTES,
    Record,
    Refused,
    decode_header,
    decode_headers,
)

FILE_BYTES = 256 << 20
"""About, of a file."""
MAX_BLOCKS_PER_FILE = 65_536
PAGE_BYTES = 4_096
PUNCH_HOLE = 0x02 | 0x01
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE."""
FILE_NAME = "blocks-{:06d}.kv"


class DirectoryInUseError(ValueError):
    """Another process uses the directory."""


class Store:
    """The copies in a directory. `records` are those that can be read, by disk block, the first written in front.

    One thread may write while another one reads.
    """

    def __init__(self, directory: Path, *, content_bytes: int, memory_bytes: int, mark: bytes) -> None:
        """Takes at most memory_bytes of the directory, and makes it, for this user alone. A copy has content_bytes.

        Raises ValueError if there is no room for a copy, or if another process uses the directory, OSError if it can't
        be used.
        """
        self.directory = directory
        self.content_bytes = content_bytes
        self.num_blocks = memory_bytes // (HEADER_BYTES + content_bytes)
        if not self.num_blocks:
            raise ValueError(
                f"--disk-memory: {memory_bytes} bytes have no room for a copy of {HEADER_BYTES + content_bytes} bytes"
            )
        most = FILE_BYTES // (HEADER_BYTES + content_bytes)
        self._blocks_per_file = min(max(1, most), MAX_BLOCKS_PER_FILE, self.num_blocks)
        self._first_content = -(-self._blocks_per_file * HEADER_BYTES // PAGE_BYTES) * PAGE_BYTES
        self._file_bytes = self._first_content + self._blocks_per_file * content_bytes
        places = f"{content_bytes} {self._blocks_per_file}"
        self._mark = sha256(mark + places.encode()).digest()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
        self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise DirectoryInUseError(f"--disk-dir: {directory} is in use by another process") from None
        self._uncertain: set[int] = set()
        """Blocks that may have a copy which is not among the records: it could not be overwritten or removed."""
        self.refused = Refused()
        """The copies that were there and are not used."""
        with garbage_kept():
            self.records = self._scan()
        self._next_number = max((record.number for record in self.records.values()), default=0) + 1

    def close(self) -> None:
        """Let another process have the directory."""
        os.close(self._lock)

    # -- one copy

    def write(self, block: int, content: bytes | memoryview, *, prefix_hash: bytes, group: int, tenant: str) -> None:
        """Write a copy. Raises OSError: then the block has none."""
        if len(tenant.encode()) > MAX_TENANT_BYTES:
            raise OSError(errno.ENAMETOOLONG, f"a tenant's name has more than {MAX_TENANT_BYTES} bytes")
        self.records.pop(block, None)
        self._uncertain.add(block)
        record = Record(prefix_hash, group, tenant, self._next_number, zlib.crc32(content))
        self._next_number += 1
        index, offset = self._place(block)
        with self._opened(block // self._blocks_per_file, makes=True) as file:
            write_all(file, BEING_WRITTEN, index * HEADER_BYTES)
            write_all(file, content, offset)
            write_all(file, record.encode(self._mark), index * HEADER_BYTES)
        self.records[block] = record
        self._uncertain.discard(block)

    def read(self, block: int, *, prefix_hash: bytes, group: int) -> bytes:
        """Return the content of a copy. Raises OSError if it can't be read, or is not as it was written."""
        record = self.records.get(block)
        if record is None or (record.prefix_hash, record.group) != (prefix_hash, group):
            raise OSError(errno.ENODATA, f"disk block {block} has other content")
        index, offset = self._place(block)
        with self._opened(block // self._blocks_per_file) as file:
            header = os.pread(file, HEADER_BYTES, index * HEADER_BYTES)
            content = read_all(file, self.content_bytes, offset)
        if decode_header(header) != record or zlib.crc32(content) != record.content_checksum:
            raise OSError(errno.EIO, f"disk block {block} is not as it was written")
        return content

    def erase(self, tenant: str | None) -> int:
        """Remove the copies of a tenant, None: of all, from the disk; return how many there were.

        All is removed that the directory has of them, with content that is out of date. Raises OSError if some may be
        left.
        """
        erased = [block for block, record in self.records.items() if tenant is None or record.tenant == tenant]
        for block in erased:
            del self.records[block]
        self._uncertain.update(erased)
        by_file: dict[int, list[int]] = {}
        for block in self._uncertain:
            by_file.setdefault(block // self._blocks_per_file, []).append(block)
        kept = {block // self._blocks_per_file for block in self.records}
        for number, path in self._files():
            if number in kept:
                self._clear(number, by_file.get(number, ()))
            else:
                path.unlink(missing_ok=True)
        sync_directory(self.directory)
        self._uncertain.clear()
        return len(erased)

    def _clear(self, number: int, blocks: Collection[int]) -> None:
        """Remove copies from one file, and what was overwritten there: until it is flushed, the disk still has that.

        Raises OSError. A flush that failed once says nothing about the disk if it is repeated: the file goes, with the
        copies that were to stay.
        """
        with self._opened(number) as file:
            for block in blocks:
                index, offset = self._place(block)
                write_all(file, bytes(HEADER_BYTES), index * HEADER_BYTES)
                punch_hole(file, offset, self.content_bytes)
            try:
                os.fsync(file)
            except OSError:
                for block in [block for block in self.records if block // self._blocks_per_file == number]:
                    del self.records[block]
                    self._uncertain.add(block)
                self._path(number).unlink()
                raise

    # -- files

    def _place(self, block: int) -> tuple[int, int]:
        """The index of a block in its file, and the first byte of its content."""
        index = block % self._blocks_per_file
        return index, self._first_content + index * self.content_bytes

    def _path(self, number: int) -> Path:
        return self.directory / FILE_NAME.format(number)

    @contextlib.contextmanager
    def _opened(self, number: int, *, makes: bool = False) -> Iterator[int]:
        path = self._path(number)
        if makes and not path.exists():
            make_file(path, self._file_bytes)
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            yield file
        finally:
            os.close(file)

    def _files(self) -> list[tuple[int, Path]]:
        """The files of blocks, by their number."""
        found = []
        for path in self.directory.glob("blocks-*.kv"):
            with contextlib.suppress(ValueError):
                found.append((int(path.stem.removeprefix("blocks-")), path))
        return sorted(found)

    def _scan(self) -> dict[int, Record]:
        """Return the copies that are there, of this pool. All else is removed: nobody could find it to erase it."""
        found: dict[int, Record] = {}
        for number, path in self._files():
            try:
                found |= self._scan_file(number, path)
            except OSError as error:
                self.refused.unreadable.append(f"{path}: {error.strerror}")
                first = number * self._blocks_per_file
                self._uncertain.update(range(first, min(first + self._blocks_per_file, self.num_blocks)))
        return dict(sorted(found.items(), key=lambda each: each[1].number))

    def _scan_file(self, number: int, path: Path) -> dict[int, Record]:
        """Raises OSError."""
        first, size = number * self._blocks_per_file, path.stat().st_size
        with path.open("rb") as file:
            headers = decode_headers(file.read(self._blocks_per_file * HEADER_BYTES), self._mark)
        self.refused.add(headers.refused)
        records = {first + index: record for index, record in headers.records.items()}
        end = first + max(0, size - self._first_content) // self.content_bytes
        self.refused.damaged += sum(block >= end for block in records)
        left = {block: record for block, record in records.items() if block < min(end, self.num_blocks)}
        if not left:
            path.unlink()
            return {}
        if size != self._file_bytes:
            os.truncate(path, self._file_bytes)
        removed = [*(first + index for index in headers.unused), *(records.keys() - left.keys())]
        if removed:
            self._clear(number, removed)
        return left


@contextlib.contextmanager
def garbage_kept() -> Iterator[None]:
    """Stop the collection of garbage meanwhile: of a million records, half of the time went into looking for some."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def make_file(path: Path, num_bytes: int) -> None:
    """Make a file with all its bytes reserved. Raises OSError: then there is none."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(file)


def write_all(file: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count


def read_all(file: int, num_bytes: int, offset: int) -> bytes:
    """Raises OSError if the file ends before."""
    parts = []
    while num_bytes:
        part = os.pread(file, num_bytes, offset)
        if not part:
            raise OSError(errno.EIO, "the file ends too early")
        parts.append(part)
        num_bytes, offset = num_bytes - len(part), offset + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def punch_hole(file: int, offset: int, num_bytes: int) -> None:
    """Have bytes of a file removed from the disk: zeros are read there. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    is_punched = hasattr(libc, "fallocate") and not libc.fallocate(
        file, PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(num_bytes)
    )
    if not is_punched:  # not every file system can
        write_all(file, bytes(num_bytes), offset)


def sync_directory(directory: Path) -> None:
    """Have the removal of files reach the disk."""
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
