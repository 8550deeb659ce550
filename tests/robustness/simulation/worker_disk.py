"""The disk of a worker's machine: a file system in memory, its faults, and what a loss of power leaves of it.

    SimulatedFiles   the files of a machine: what processes see, and what is on the disk for certain
    FileCalls        the calls of the machine, as `quire.worker.disk.store` makes them: they take time, and can fail
    Copies           what was written by which worker: no other content may ever be read, and none that was erased

What was not flushed by fsync reaches the disk in any order, in part or not at all, when power is lost. A process that
is killed leaves a part of what it was writing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from robustness.simulation.schedule import DiskFeatures
from robustness.simulation.threads import ThreadEnded, Threads
from robustness.simulation.world import Process, World

from quire.worker.disk import disk_tier, store
from quire.worker.disk.records import Record
from quire.worker.disk.store import FILE_NAME, Store
from quire.worker.service import steps

CALL_S = 50e-6
"""The mean time of a call to the file system."""
SHORT_SHARE = 0.05
"""Of writes, those that write only a part of what they were given."""
WRITTEN_BACK_SHARE = 0.05
"""Of writes, those behind which the kernel writes back some of the file's changes, the oldest ones, and
all names."""
ERROR_SHARE = 0.4
"""Of calls, while the disk has errors."""


@dataclass(slots=True)
class File:
    """A file: its bytes as processes see them, those on the disk, and the changes that may not be there yet.

    A change is an offset and bytes.
    """

    data: bytearray = field(default_factory=bytearray)
    flushed: bytes = b""
    changes: list[tuple[int, bytes]] = field(default_factory=list)

    def write(self, offset: int, data: bytes) -> None:
        put(self.data, offset, data)
        self.changes.append((offset, data))

    def resize(self, size: int) -> None:
        del self.data[size:]
        self.data.extend(bytes(size - len(self.data)))

    def write_back(self, count: int) -> None:
        """The first so many changes reach the disk."""
        flushed = bytearray(self.flushed)
        for offset, data in self.changes[:count]:
            put(flushed, offset, data)
        self.flushed = bytes(flushed)
        del self.changes[:count]

    def flush(self) -> None:
        self.flushed = bytes(self.data)
        self.changes.clear()


class SimulatedFiles:
    """The files of one machine. Its one directory is there for certain."""

    def __init__(self, numbers: random.Random, happened: Counter[str]) -> None:
        """`happened` counts what faults have done."""
        self._numbers = numbers
        self.happened = happened
        self.names: dict[str, File] = {}
        self.flushed_names: dict[str, File] = {}
        self.owner: Process | None = None
        """The process that has locked the directory."""
        self.is_full = self.has_errors = False
        self.slowness = 1.0
        self.num_calls_left: int | None = None
        """Until `on_last_call` is called: before the next call if it is 0."""
        self.on_last_call: Callable[[], None] = lambda: None

    def flush_names(self) -> None:
        self.flushed_names = dict(self.names)

    def lose_power(self) -> None:
        """Of what was not flushed, each change is on the disk, or a part of it is, or nothing."""
        for name in sorted(self.names.keys() | self.flushed_names.keys()):
            if self.names.get(name) is not self.flushed_names.get(name) and self._numbers.random() < 0.5:
                self.happened["names of files lost with the power"] += 1
                self._set(self.names, name, self.flushed_names.get(name))
        for file in self.names.values():
            self._lose_changes(file)
        self.flush_names()

    def _lose_changes(self, file: File) -> None:
        left = bytearray(file.flushed)
        if len(left) < len(file.data) and self._numbers.random() < 0.8:
            left.extend(bytes(len(file.data) - len(left)))
        for offset, data in file.changes:
            fate, cut = self._numbers.random(), self._numbers.randint(0, len(data))
            if fate < 0.4:
                put(left, offset, data)
            elif fate < 0.55:
                put(left, offset, data[:cut])
            elif fate < 0.7:
                put(left, offset + cut, data[cut:])
            self.happened["writes torn by a loss of power"] += 0.4 <= fate < 0.7
            self.happened["writes lost with the power"] += fate >= 0.7
        file.data = left
        file.flush()

    @staticmethod
    def _set(names: dict[str, File], name: str, file: File | None) -> None:
        if file is None:
            del names[name]
        else:
            names[name] = file

    def rot(self) -> None:
        """A byte changes on the disk."""
        files = [file for _, file in sorted(self.names.items()) if any(file.data)]
        if files:
            file = self._numbers.choice(files)
            place = self._numbers.choice([place for place, byte in enumerate(file.data) if byte])
            file.data[place] ^= 1 << self._numbers.randrange(8)
            if not file.changes:
                file.flush()
            self.happened["bytes changed on the disk"] += 1


@dataclass(frozen=True, slots=True)
class Opened:
    """An open file, or the directory: None."""

    process: Process
    files: SimulatedFiles
    file: File | None


class FilePath:
    """The directory of a machine, or a file in it: as much of a Path as the store asks for."""

    def __init__(self, calls: FileCalls, files: SimulatedFiles, name: str = "") -> None:
        self._calls = calls
        self.files = files
        self.name = name

    def __truediv__(self, name: str) -> FilePath:
        return FilePath(self._calls, self.files, name)

    def __str__(self) -> str:
        return f"/disk/{self.name}"

    @property
    def stem(self) -> str:
        return self.name.split(".")[0]

    def mkdir(self, **_: Any) -> None:
        """The directory is there."""

    def chmod(self, _: int) -> None:
        """Users are not simulated."""

    def glob(self, pattern: str) -> list[FilePath]:
        start, end = pattern.split("*")
        names = sorted(name for name in self.files.names if name.startswith(start) and name.endswith(end))
        return [self / name for name in names]

    def exists(self) -> bool:
        return self.name in self.files.names

    def stat(self) -> SimpleNamespace:
        return SimpleNamespace(st_size=len(self.file.data))

    @property
    def file(self) -> File:
        if self.name not in self.files.names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return self.files.names[self.name]

    def unlink(self, *, missing_ok: bool = False) -> None:
        self._calls.begin(self.files)
        if self.name in self.files.names or not missing_ok:
            del self.files.names[self.name]

    @contextlib.contextmanager
    def open(self, _: str) -> Iterator[SimpleNamespace]:
        self._calls.begin(self.files)
        file = self.file
        yield SimpleNamespace(read=lambda count: bytes(file.data[:count]))


class FileCalls:
    """Stands for the module `os`, and for the other calls of the store, in all processes of a world."""

    O_RDWR, O_CREAT, O_EXCL = os.O_RDWR, os.O_CREAT, os.O_EXCL
    O_CLOEXEC, O_RDONLY, O_DIRECTORY = os.O_CLOEXEC, os.O_RDONLY, os.O_DIRECTORY
    LOCK_EX, LOCK_NB = fcntl.LOCK_EX, fcntl.LOCK_NB

    def __init__(self, threads: Threads, numbers: random.Random) -> None:
        self._threads = threads
        self._numbers = numbers
        self._opened: dict[int, Opened] = {}
        self._last = 0

    def begin(self, files: SimulatedFiles) -> None:
        """A call takes its time, and may fail: with OSError, or because its process is killed."""
        process = self._threads.process
        if files.num_calls_left == 0:
            files.num_calls_left = None
            files.on_last_call()
        elif files.num_calls_left is not None:
            files.num_calls_left -= 1
        if not process.is_alive:
            raise ThreadEnded
        self._threads.sleep(CALL_S * files.slowness)
        if files.has_errors and self._numbers.random() < ERROR_SHARE:
            files.happened["calls of the disk that failed"] += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def open(self, path: FilePath, flags: int, mode: int = 0) -> int:
        files = path.files
        self.begin(files)
        if flags & os.O_DIRECTORY:
            return self._open(files, None)
        if flags & os.O_CREAT:
            if flags & os.O_EXCL and path.name in files.names:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            files.names.setdefault(path.name, File())
        return self._open(files, path.file)

    def _open(self, files: SimulatedFiles, file: File | None) -> int:
        self._last += 1
        self._opened[self._last] = Opened(self._threads.process, files, file)
        return self._last

    def close(self, number: int) -> None:
        self._opened.pop(number, None)  # the kernel has closed it, if the process has ended

    def close_all(self, process: Process) -> None:
        """The process has ended."""
        self._opened = {number: each for number, each in self._opened.items() if each.process is not process}

    def _file(self, number: int) -> tuple[SimulatedFiles, File]:
        opened = self._opened[number]
        assert opened.file is not None, "the directory has no bytes"
        return opened.files, opened.file

    def flock(self, number: int, _: int) -> None:
        opened = self._opened[number]
        if opened.files.owner is not None and opened.files.owner.is_alive:
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
        opened.files.owner = opened.process

    def pread(self, number: int, count: int, offset: int) -> bytes:
        files, file = self._file(number)
        self.begin(files)
        return bytes(file.data[offset : offset + count])

    def pwrite(self, number: int, data: bytes | memoryview, offset: int) -> int:
        files, file = self._file(number)
        part = bytes(data[: self._numbers.randint(1, len(data))])
        try:
            self.begin(files)
        except (OSError, ThreadEnded):
            if self._numbers.random() < 0.5:
                file.write(offset, part)
            files.happened["writes torn by an error or a kill"] += 1
            raise
        if files.is_full and self._numbers.random() < 0.5:
            self._refuse_room(files)
        if self._numbers.random() < SHORT_SHARE:
            data = part
        file.write(offset, bytes(data))
        if self._numbers.random() < WRITTEN_BACK_SHARE:
            file.write_back(self._numbers.randint(1, len(file.changes)))
            files.flush_names()
        return len(data)

    def posix_fallocate(self, number: int, offset: int, count: int) -> None:
        files, file = self._file(number)
        self.begin(files)
        if files.is_full:
            self._refuse_room(files)
        file.resize(max(len(file.data), offset + count))

    def _refuse_room(self, files: SimulatedFiles) -> None:
        files.happened["writes for which there was no room"] += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fsync(self, number: int) -> None:
        opened = self._opened[number]
        self.begin(opened.files)
        if opened.file is None:
            opened.files.flush_names()
        else:
            opened.file.flush()

    def truncate(self, path: FilePath, size: int) -> None:
        self.begin(path.files)
        path.file.resize(size)

    def punch_hole(self, number: int, offset: int, count: int) -> None:
        files, file = self._file(number)
        self.begin(files)
        file.write(offset, bytes(count))


class Copies:
    """All copies that the workers of a machine have written, and which of them must not be found again."""

    def __init__(self, world: World, name: str, happened: Counter[str]) -> None:
        """`name` is the worker's."""
        self._world = world
        self._name = name
        self._happened = happened
        self._written: dict[tuple[int, Record], tuple[int, bytes]] = {}
        """By disk block and header: when, and the content."""
        self._erased: set[tuple[int, Record]] = set()
        self._present: dict[int, Record] = {}
        """The present worker's."""
        self.num_writes = 0

    def found(self, records: dict[int, Record]) -> None:
        """A worker has found these when it started."""
        self._present = records
        self._happened["copies found on the disk at a start"] += len(records)
        for block, record in records.items():
            self._require_known(block, record)

    def write(self, block: int, record: Record, content: bytes) -> None:
        """A copy is about to be written."""
        self.num_writes += 1
        self._written[block, record] = self.num_writes, content
        self._erased.discard((block, record))

    def read(self, block: int, record: Record, content: bytes) -> None:
        """A copy was read, as it seems."""
        self._happened["copies read from the disk"] += 1
        self._require_known(block, record)
        written = self._written.get((block, record))
        if written is not None and written[1] != content:
            self.fail(f"disk block {block} is read with other content than was written")

    def erase(self, tenant: str | None, before: int | None = None) -> list[tuple[int, bytes]]:
        """A tenant's copies were erased; None: those of all. `before`: if they are among the first so many writes.

        Returns the disk blocks and contents.
        """
        gone = [
            key
            for key, (number, _) in self._written.items()
            if (tenant is None or key[1].tenant == tenant) and (before is None or number <= before)
        ]
        if found := [block for block, record in gone if self._present.get(block) == record]:
            self.fail(f"disk blocks {sorted(found)} are there after a reset")
        self._erased.update(gone)
        return [(key[0], self._written.pop(key)[1]) for key in gone]

    def fail(self, what: str) -> None:
        self._world.fail(f"{self._name}: {what}")

    def content_of(self, block: int, record: Record | None) -> bytes | None:
        """Return what was written with a header; None if that was nothing."""
        written = None if record is None else self._written.get((block, record))
        return None if written is None else written[1]

    def _require_known(self, block: int, record: Record) -> None:
        key = block, record
        if key in self._erased:
            self.fail(f"disk block {block} is found again after a reset")
        elif key not in self._written:
            self.fail(f"disk block {block} is found, and nobody has written it")


class ObservedStore:
    """A worker's store, of which `copies` gets to know what it does."""

    def __init__(self, kept: Store, files: SimulatedFiles, copies: Copies) -> None:
        self._store = kept
        self._files = files
        self._copies = copies
        copies.found(kept.records)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def write(self, block: int, content: bytes, *, prefix_hash: bytes, group: int, tenant: str) -> None:
        """See Store.write."""
        record = Record(prefix_hash, group, tenant, self._store._next_number, zlib.crc32(content))
        self._copies.write(block, record, content)
        self._store.write(block, content, prefix_hash=prefix_hash, group=group, tenant=tenant)

    def read(self, block: int, *, prefix_hash: bytes, group: int) -> bytes:
        """See Store.read."""
        record = self._store.records.get(block)
        content = self._store.read(block, prefix_hash=prefix_hash, group=group)
        assert record is not None, "else nothing was read"
        self._copies.read(block, record, content)
        return content

    def erase(self, tenant: str | None) -> int:
        """See Store.erase."""
        count = self._store.erase(tenant)
        for block, content in self._copies.erase(tenant):
            left = self._copies.content_of(block, self._store.records.get(block))
            if self._bytes_of(block) == content != left:
                self._copies.fail(f"the content of disk block {block} is there after it was erased")
        return count

    def _bytes_of(self, block: int) -> bytes:
        """Those in the place of a block's content."""
        _, offset = self._store._place(block)
        file = self._files.names.get(FILE_NAME.format(block // self._store._blocks_per_file))
        return b"" if file is None else bytes(file.data[offset : offset + self._store.content_bytes])


class WorkerDisks:
    """The disks of all workers of a world, by name, and the calls that reach them."""

    def __init__(self, world: World, seed: int, features: DiskFeatures | None) -> None:
        self.features = features
        self.happened: Counter[str] = Counter()
        self._world = world
        self._seed = seed
        self._threads = Threads(world, random.Random(f"threads {seed}"))
        self._calls = FileCalls(self._threads, random.Random(f"file calls {seed}"))
        self._files: dict[str, SimulatedFiles] = {}
        self._copies: dict[str, Copies] = {}

    def files(self, name: str) -> SimulatedFiles:
        """Those of a worker's machine."""
        if name not in self._files:
            self._files[name] = SimulatedFiles(random.Random(f"files {name} {self._seed}"), self.happened)
        return self._files[name]

    def copies(self, name: str) -> Copies:
        if name not in self._copies:
            self._copies[name] = Copies(self._world, name, self.happened)
        return self._copies[name]

    def directory(self, process: Process) -> Any:
        """Return the directory on the disk of a worker's machine, for one start of the worker."""
        process.at_end.append(lambda: self._calls.close_all(process))
        return FilePath(self._calls, self.files(process.name))

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Give the disk tiers in this context these disks and threads."""
        if self.features is None:
            yield
            return
        changes: list[tuple[Any, str, Any]] = [
            (store, "os", self._calls),
            (store, "fcntl", self._calls),
            (store, "punch_hole", self._calls.punch_hole),
            (store, "FILE_BYTES", self.features.file_bytes),
            (disk_tier, "threading", self._threads),
            (disk_tier, "SimpleQueue", self._threads.SimpleQueue),
            (steps, "threading", self._threads),
        ]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
        for owner, name, value in changes:
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)


def put(target: bytearray, offset: int, data: bytes) -> None:
    """Write data into bytes, which grow as far as they have to."""
    target.extend(bytes(max(0, offset + len(data) - len(target))))
    target[offset : offset + len(data)] = data
