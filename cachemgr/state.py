"""Where a cachemgr keeps what the next one goes on with, should its process end: a directory that is its own.

    lock                     held by the process that uses the directory
    POOL@EPOCH/pool.json     which pool it is, the key of its grants, and the terms that have ruled it
    POOL@EPOCH/log-, books-  its books: see core/src/store.rs

It guards against the end of the process, not of the machine: what is written is not forced to the disk, and what was
written before the machine was started anew is not used.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from quire.cachemgr.catalog import Catalog, SavedPool
from quire.cachemgr.geometry import Geometry

log = logging.getLogger(__name__)

VERSION = 2
"""Of pool.json."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class StateUnusable(Exception):
    """A state directory that can't be used; the text is for people."""


class StateDirectory:
    """A directory with the state of one cachemgr at a time. Hold it as long as it is used; `close` lets go of it."""

    def __init__(self, path: Path) -> None:
        """Makes the directory if it is not there. Raises StateUnusable."""
        self._path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StateUnusable(f"state directory {path} can't be used: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise StateUnusable(f"state directory {path} is used by another cachemgr") from error
        self._boot_id = read_boot_id()

    def close(self) -> None:
        """Another process may use it from here on."""
        os.close(self._lock)

    def last_term(self) -> int:
        """The highest term that any pool's state knows of, 0 if there is none."""
        return max((saved.terms[-1] for saved in self._saved()), default=0)

    def folder(self, saved: SavedPool) -> Path:
        """Where the pool's epoch is kept."""
        return self._path / f"{saved.pool}@{saved.epoch}"

    def begin(self, saved: SavedPool) -> Path | None:
        """A folder for a new epoch; earlier ones of the pool go. None, with a log line, if there can be none."""
        for folder in self._path.glob(f"{saved.pool}@*"):
            shutil.rmtree(folder, ignore_errors=True)
        folder = self.folder(saved)
        try:
            folder.mkdir(mode=0o700)
            self._write(saved)
        except OSError as error:
            log.error("state not kept pool=%s error=%s", saved.pool, error)
            shutil.rmtree(folder, ignore_errors=True)
            return None
        return folder

    def restore(self, catalog: Catalog, *, now: float) -> None:
        """Has the catalog go on with the pools that are kept, under its term. What can't be used is removed."""
        for before in list(self._saved()):
            saved = replace(before, terms=(*before.terms, catalog.term))
            try:
                self._write(saved)
                catalog.recover(saved, self.folder(saved), now=now)
                log.info("pool recovered pool=%s epoch=%d", saved.pool, saved.epoch)
            except OSError as error:
                log.error("pool not recovered, it needs a new epoch pool=%s error=%s", saved.pool, error)
                shutil.rmtree(self.folder(saved), ignore_errors=True)

    def _saved(self) -> Iterator[SavedPool]:
        for folder in sorted(self._path.glob("*@*")):
            try:
                content = json.loads((folder / "pool.json").read_text())
                if content["version"] != VERSION:
                    raise ValueError(f"it is of version {content['version']}")
                if self._boot_id is None or content["boot_id"] != self._boot_id:
                    raise ValueError("it is not known whether the machine was started anew since")
                saved = SavedPool(
                    pool=content["pool"],
                    epoch=content["epoch"],
                    geometry=Geometry(**content["geometry"]),
                    worker_address=content["worker_address"],
                    signing_key=bytes.fromhex(content["signing_key"]),
                    terms=tuple(content["terms"]),
                )
                if folder != self.folder(saved):
                    raise ValueError("it is another pool's")
                yield saved
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("state not used folder=%s error=%r", folder, error)
                shutil.rmtree(folder, ignore_errors=True)

    def _write(self, saved: SavedPool) -> None:
        content = {
            "version": VERSION,
            "boot_id": self._boot_id,
            "pool": saved.pool,
            "epoch": saved.epoch,
            "geometry": asdict(saved.geometry),
            "worker_address": saved.worker_address,
            "signing_key": saved.signing_key.hex(),
            "terms": saved.terms,
        }
        unfinished = self.folder(saved) / "pool.unfinished"
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(content, file)
        unfinished.replace(unfinished.with_name("pool.json"))


def read_boot_id() -> str | None:
    """Another one each time the machine is started; None if it can't be told."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return None
