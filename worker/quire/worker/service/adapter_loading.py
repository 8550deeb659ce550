"""Loads and unloads adapters while steps run.

    read, compare with the model, convert       on a thread of its own
    put into the layers, one by one             on the model thread, between two steps
    each forward of the self-check              likewise: a step waits for one of them at most
    evict for it, serve its name                on the event loop, at once

Until its name is served no step can have it, and nothing is evicted for it. So what is refused hurts no other.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from quire.cache.v1.admission_bounds import ADAPTER_NAME, ADAPTER_NAME_LIMIT
from quire.worker.adapters.adapted_model import PreparedAdapter
from quire.worker.adapters.adapter import UnsupportedAdapter
from quire.worker.adapters.adapter_table import NoAdapterRoomError
from quire.worker.adapters.peft_checkpoint import read_adapter
from quire.worker.grant.errors import Reason, Refused, invalid
from quire.worker.model.adapter_check import check_adapter
from quire.worker.model.paged_model import PagedModel
from quire.worker.run.model_thread import ModelThread
from quire.worker.service.steps import Steps

log = logging.getLogger(__name__)

MAX_PATH_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that is served. `is_new`: its name did not have this content before; `evicted` went for it."""

    identity: bytes
    is_new: bool
    evicted: tuple[str, ...] = ()


def check_name(name: str) -> None:
    """Raises Refused (INVALID_ARGUMENT) for a name that no adapter can have."""
    if not re.fullmatch(ADAPTER_NAME, name):
        raise invalid("name", repr(name[:129]), ADAPTER_NAME_LIMIT)


def check_path(path: str) -> None:
    """Raises Refused (INVALID_ARGUMENT) for a path that is empty or too long."""
    if not 1 <= len(path) <= MAX_PATH_LENGTH:
        raise invalid("path", f"{len(path)} characters", f"1 to {MAX_PATH_LENGTH} characters")


class AdapterLoader:
    """Changes the adapters of a worker that serves. One load runs at a time."""

    def __init__(
        self, model: PagedModel, steps: Steps, thread: ModelThread, *, model_name: str, excluded: str | None = None
    ) -> None:
        """excluded is the reason why this worker takes no adapters, for people; None if it does."""
        self._model = model
        self._steps = steps
        self._thread = thread
        self._model_name = model_name
        self._excluded = excluded
        self._turn = asyncio.Lock()

    @property
    def max_adapters(self) -> int:
        """Most adapters at a time; 0 if this worker takes none."""
        return 0 if self._excluded is not None else self._steps.adapters.bounds.max_adapters

    async def load(self, name: str, path: str) -> LoadedAdapter:
        """Load the adapter in a folder. Raises Refused (INVALID_ARGUMENT, ADAPTERS_IN_USE), nothing changed."""
        if self._excluded is not None:
            raise invalid("path", path, f"empty: this worker takes no adapters. {self._excluded}")
        check_name(name)
        check_path(path)
        if name == self._model_name:
            raise invalid("name", name, "another name: this is the model's")
        async with self._turn:
            return await self._load(name, path)

    async def unload(self, name: str) -> bool:
        """Unload an adapter; False if there is none. Raises Refused (INVALID_ARGUMENT, ADAPTERS_IN_USE)."""
        check_name(name)
        async with self._turn:
            table = self._steps.adapters
            identity = table.names.get(name)
            if identity is None:
                return False
            is_shared = list(table.names.values()).count(identity) > 1
            if not is_shared and (count := self._steps.adapter_users.counts().get(identity, 0)):
                message = f"adapter {name} is in use by {count} sequences"
                raise Refused(Reason.ADAPTERS_IN_USE, message, value=name, limit="no sequences")
            self._remove(name)
            log.info("adapter unloaded name=%s", name)
            return True

    async def _load(self, name: str, path: str) -> LoadedAdapter:
        table = self._steps.adapters
        try:
            adapter = await asyncio.to_thread(self._read, name, path)
            if name in table.names:
                if table.names[name] == adapter.identity:
                    return LoadedAdapter(adapter.identity, is_new=False)
                raise invalid("name", name, "another name, or unloaded before: it has other content")
            self._find_room(adapter)
            if not table.has(adapter.identity):
                await self._check(adapter)
        except UnsupportedAdapter as error:
            raise invalid("path", path, f"the folder of an adapter for this model: {error.reason}") from None
        try:
            evicted = self._find_room(adapter)  # sequences may have come meanwhile
        except Refused:
            if not table.has(adapter.identity):
                self._take_out(adapter.identity)
            raise
        for each in evicted:
            self._remove(each)
            log.info("adapter evicted name=%s for=%s", each, name)
        table.add(name, adapter.identity, adapter.num_bytes)
        log.info("adapter loaded name=%s identity=%s bytes=%d", name, adapter.identity.hex(), adapter.num_bytes)
        return LoadedAdapter(adapter.identity, is_new=True, evicted=tuple(evicted))

    def _read(self, name: str, path: str) -> PreparedAdapter:
        bounds = self._steps.adapters.bounds
        return self._model.adapters.prepare(read_adapter(name, Path(path), bounds), bounds)

    def _find_room(self, adapter: PreparedAdapter) -> list[str]:
        used = self._steps.adapter_users.counts()
        try:
            return self._steps.adapters.find_room(
                adapter.identity, adapter.num_bytes, is_used=lambda identity: identity in used
            )
        except NoAdapterRoomError as error:
            raise Refused(Reason.ADAPTERS_IN_USE, str(error), value=adapter.name, limit=error.limit) from None

    async def _check(self, adapter: PreparedAdapter) -> None:
        """Put an adapter into the layers, and check it there. Raises UnsupportedAdapter; then it is out again."""
        loop = asyncio.get_running_loop()

        def between_steps(forward: Callable[[], Tensor]) -> Tensor:
            async def submitted() -> Tensor:
                return await self._thread.submit(forward)

            return asyncio.run_coroutine_threadsafe(submitted(), loop).result()

        placing = [self._thread.submit(part) for part in self._model.adapters.adding(adapter)]
        try:
            await asyncio.gather(*placing)
            await asyncio.to_thread(check_adapter, self._model, adapter, run=between_steps)
        except BaseException:
            self._take_out(adapter.identity)
            raise

    def _remove(self, name: str) -> None:
        """Serve a name no longer."""
        identity = self._steps.adapters.remove(name)
        if identity is not None:
            self._take_out(identity)

    def _take_out(self, identity: bytes) -> None:
        """Take an adapter out of its layers, behind all steps and forwards that were submitted."""
        for part in self._model.adapters.removing(identity):
            self._thread.submit(part)
