"""The state that a restarted cachemgr continues with: a directory of its own.

    lock                     held by the process that uses the directory
    POOL@EPOCH/pool.json     its registration, the key of its grants, and the terms that have controlled it
    POOL@EPOCH/log-, books-  its books: see core/src/store

It protects against the end of the process, not of the machine: files are not forced to the disk, and files written
before the last boot of the machine are not used.

Folders are for their owner only (0700), files too (0600). A link, a fifo or another kind of file is not opened: the
pool then begins a new epoch, as without saved state.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from quire.cache.v1 import attach_pb2
from quire.cachemgr.catalog import MAX_TERM, SIGNING_KEY_BYTES, Catalog, SavedPool
from quire.cachemgr.errors import CallRefused
from quire.cachemgr.service import messages
from quire.serving.watched import read_bytes

log = logging.getLogger(__name__)

VERSION = 4
"""The version of pool.json."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
FOLDER_MODE, FILE_MODE = 0o700, 0o600
NO_LINK = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class StateUnusable(Exception):
    """A state directory that can't be used; the text is for people."""


class StateDirectory:
    """A directory with the state of one cachemgr at a time. Hold it as long as it is used; `close` lets go of it."""

    def __init__(self, path: Path) -> None:
        """Makes the directory if it is not there. Raises StateUnusable."""
        self._path = path
        try:
            with contextlib.suppress(FileExistsError):
                make_private(path, parents=True)
            require_private(path)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | NO_LINK, FILE_MODE)
        except OSError as error:
            raise StateUnusable(f"state directory {path} can't be used: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(self._lock).st_mode):
            os.close(self._lock)
            raise StateUnusable(f"state directory {path} can't be used: lock is not a regular file")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise StateUnusable(f"state directory {path} is used by another cachemgr") from error
        self._boot_id = read_boot_id()

    def close(self) -> None:
        """Another process may use it from here on."""
        os.close(self._lock)

    def folder(self, saved: SavedPool) -> Path:
        """The folder of the pool's epoch."""
        return self._path / f"{saved.pool}@{saved.epoch}"

    def begin(self, saved: SavedPool) -> Path | None:
        """A folder for a new epoch; earlier ones of the pool go. None, with a log line, if there can be none."""
        for folder in self._path.glob(f"{saved.pool}@*"):
            remove(folder)
        folder = self.folder(saved)
        try:
            make_private(folder)
            self._write(saved)
        except OSError as error:
            log.error("state not kept pool=%s error=%s", saved.pool, error)
            remove(folder)
            return None
        return folder

    def restore(self, catalog: Catalog, *, now: float) -> None:
        """Adds the saved pools to the catalog. Removes unusable state.

        A pool's term is the catalog's, or its last term plus one if the clock was set back.
        """
        for before in list(self._saved()):
            saved = replace(before, terms=(*before.terms, max(catalog.term, before.terms[-1] + 1)))
            try:
                self._write(saved)
                catalog.recover(saved, self.folder(saved), now=now)
                log.info("pool recovered pool=%s epoch=%d term=%d", saved.pool, saved.epoch, saved.terms[-1])
            except OSError as error:
                log.error("pool not recovered, it needs a new epoch pool=%s error=%s", saved.pool, error)
                remove(self.folder(saved))

    def _saved(self) -> Iterator[SavedPool]:
        for folder in sorted(self._path.glob("*@*")):
            try:
                if folder.is_symlink():
                    raise ValueError("it is a link")
                saved = self._read(folder / "pool.json")
                if folder != self.folder(saved):
                    raise ValueError("it is another pool's")
                yield saved
            except (OSError, ValueError, RecursionError) as error:
                log.warning("state not used folder=%s error=%r", folder, error)
                remove(folder)

    def _read(self, path: Path) -> SavedPool:
        """Raises ValueError if anything is not as `_write` has it."""
        content = unseal(read_bytes(path, os.O_NOFOLLOW))
        version = content.get("version")
        if version != VERSION:
            raise ValueError(f"it is of version {version}")
        if self._boot_id is None or content.get("boot_id") != self._boot_id:
            raise ValueError("the machine may have been rebooted since")
        return decode_saved(content)

    def _write(self, saved: SavedPool) -> None:
        content = {"version": VERSION, "boot_id": self._boot_id, **encode_saved(saved)}
        unfinished = self.folder(saved) / "pool.unfinished"
        remove(unfinished)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK
        with open(os.open(unfinished, flags, FILE_MODE), "w") as file:
            file.write(seal(content))
        unfinished.replace(unfinished.with_name("pool.json"))


# -- pool.json --------------------------------------------------------------------------------------------------------


def seal(content: dict[str, Any]) -> str:
    """The text of a file with this content and its checksum."""
    return json.dumps({"sha256": checksum(content), "content": content})


def unseal(text: bytes) -> dict[str, Any]:
    """The content of a file. Raises ValueError if it is not the content that was sealed."""
    sealed = json.loads(text)
    if not isinstance(sealed, dict) or not isinstance(sealed.get("content"), dict):
        raise ValueError("it is of another version")
    content: dict[str, Any] = sealed["content"]
    if sealed.get("sha256") != checksum(content):
        raise ValueError("it is damaged")
    return content


def checksum(content: dict[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def encode_saved(saved: SavedPool) -> dict[str, Any]:
    registration = attach_pb2.RegisterPool(
        pool=saved.pool,
        epoch=saved.epoch,
        geometry=messages.encode_geometry(saved.geometry),
        worker_address=saved.worker_address,
        memory_id=saved.memory_id,
    )
    return {
        "registration": json_format.MessageToDict(registration, preserving_proto_field_name=True),
        "signing_key": saved.signing_key.hex(),
        "terms": saved.terms,
    }


def decode_saved(content: dict[str, Any]) -> SavedPool:
    """Raises ValueError, which names the wrong value: bounds are those of a worker's registration."""
    try:
        message = json_format.ParseDict(dict(content["registration"]), attach_pb2.RegisterPool())
        registration = messages.decode_registration(message)
    except (json_format.ParseError, CallRefused, KeyError, TypeError) as error:
        raise ValueError(f"registration: {error}") from error
    return SavedPool(
        pool=registration.pool,
        epoch=registration.epoch,
        geometry=registration.geometry,
        worker_address=registration.worker_address,
        signing_key=decode_key(content.get("signing_key")),
        terms=decode_terms(content.get("terms")),
        memory_id=registration.memory_id,
    )


def decode_key(value: object) -> bytes:
    """Raises ValueError, which does not quote the key."""
    key = bytes.fromhex(value) if isinstance(value, str) else b""
    if len(key) != SIGNING_KEY_BYTES:
        raise ValueError(f"signing_key: must be {SIGNING_KEY_BYTES} bytes")
    return key


def decode_terms(value: object) -> tuple[int, ...]:
    """Raises ValueError unless they rise and another one can follow."""
    terms = value if isinstance(value, list) and all(type(term) is int for term in value) else []
    if not terms or terms != sorted(set(terms)) or not 0 < terms[0] <= terms[-1] < MAX_TERM:
        raise ValueError(f"terms: must be rising numbers, 1 to {MAX_TERM - 1}, at least one")
    return tuple(terms)


# -- files ------------------------------------------------------------------------------------------------------------


def make_private(folder: Path, *, parents: bool = False) -> None:
    """Make a folder that only its owner can use, with any umask. Raises OSError."""
    folder.mkdir(parents=parents)
    folder.chmod(FOLDER_MODE)


def require_private(folder: Path) -> None:
    """Raises StateUnusable if others may use the folder."""
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if found.st_uid != os.geteuid():
        raise StateUnusable(f"state directory {folder} belongs to user {found.st_uid}; must be this process's own")
    mode = stat.S_IMODE(found.st_mode)
    if mode & ~FOLDER_MODE:
        raise StateUnusable(f"state directory {folder} has mode {mode:04o}, so others can use it; must be 0700")


def remove(path: Path) -> None:
    """Removes a file, a link or a folder with all that is in it, as far as it can."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def read_boot_id() -> str | None:
    """The id of the machine's boot, another one after each; None if it can't be read."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return None
