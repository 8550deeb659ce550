"""Keeps the copy of one pool's findable blocks up to date, through outages, new epochs and gaps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import NoReturn

from quire.cache.v1 import cache_service_pb2 as pb
from quire.client.cache_client import CacheClient
from quire.client.channel import is_being_cancelled
from quire.client.errors import CursorExpired, NotFound, OutOfRoom, Unavailable
from quire.integrations.kv_events.copies import CopyReplica
from quire.integrations.kv_events.layout import Layout
from quire.integrations.kv_events.replica import AllCleared, Change, PrefixReplica

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
"""Between two looks at the pool's attachment; also the pause after a watch that failed."""
MAX_MISSED_LOOKS = 2
"""After so many looks in a row without a worker, or without an answer, no prompt finds a block of the pool."""
_LOOK_TIMEOUT_S = 1.0

# Errors that a retry may cure: services are started in any order, and a restarted cachemgr knows no pool at first.
_TEMPORARY = (NotFound, OutOfRoom, Unavailable)


class PoolFollower:
    """The copy of one pool, and its changes, in order, from `run` on.

    The first change is AllCleared. It comes again when the copy begins anew: with the pool's new epoch, after a gap in
    the changes, and after MAX_MISSED_LOOKS without a worker or an answer. Then come the pool's blocks.

    cache must be an operator with the role content where cachemgr authenticates callers.
    """

    def __init__(
        self,
        cache: CacheClient,
        pool: str,
        on_changes: Callable[[list[Change]], None],
        *,
        copies: CopyReplica | None = None,
    ) -> None:
        """on_changes is called on the event loop, with an empty list only if copies have changed. It must not wait."""
        self.replica = PrefixReplica()
        self._copies = copies or CopyReplica()
        self._cache = cache
        self._pool = pool
        self._on_changes = on_changes

    async def run(self) -> NoReturn:
        """Follow the pool until it is cancelled.

        Raises AccessDenied, and InvalidRequest where cachemgr keeps no tokens. Consumers then know no block.
        """
        self._clear()
        watch: asyncio.Task[NoReturn] | None = None
        num_missed = 0
        try:
            while True:
                num_missed = 0 if await self._is_attached() else num_missed + 1
                if num_missed == 0:
                    watch = watch or asyncio.create_task(self._watch())
                elif watch is not None and num_missed >= MAX_MISSED_LOOKS:
                    log.warning("no worker, blocks cleared pool=%s", self._pool)
                    await _cancelled(watch)
                    watch = None
                    self._clear()
                if watch is None:
                    await asyncio.sleep(POLL_INTERVAL_S)
                elif (await asyncio.wait([watch], timeout=POLL_INTERVAL_S))[0]:
                    watch.result()
        finally:
            if watch is not None:
                await _cancelled(watch)
            self._clear()

    def _clear(self) -> None:
        self._copies.clear()
        self._on_changes(self.replica.clear())

    async def _is_attached(self) -> bool:
        """Return True if cachemgr answers in time, and the pool has a worker. Raises QuireError."""
        with contextlib.suppress(TimeoutError, *_TEMPORARY):
            async with asyncio.timeout(_LOOK_TIMEOUT_S):
                return (await self._cache.get_pool(self._pool)).attached
        return False

    async def _watch(self) -> NoReturn:
        """Apply all answers. Raises QuireError."""
        cursor = ""
        while True:
            try:
                watch = self._cache.watch_blocks(
                    self._pool, cursor=cursor, include_content=True, copy_media=self._copies.media
                )
                async with contextlib.aclosing(watch) as answers:
                    async for answer in answers:
                        if answer.cleared and not await self._has_layout_of(answer.epoch):
                            cursor = ""
                            break
                        cursor = answer.cursor or cursor
                        changes = self._apply(answer)
                        if changes or (answer.cursor and self._copies.has_changed):
                            self._on_changes(changes)
                            self._warn_of_unconnected(changes)
            except CursorExpired as error:
                log.warning("watch begins anew pool=%s reason=%s", self._pool, error.reason)
                cursor = ""
                continue
            except _TEMPORARY as error:
                log.info("watch ended pool=%s reason=%s", self._pool, error.reason)
            except asyncio.CancelledError:
                if is_being_cancelled():
                    raise
            await asyncio.sleep(POLL_INTERVAL_S)

    def _apply(self, answer: pb.WatchBlocksResponse) -> list[Change]:
        """Apply an answer to both copies. Return the changes of the pool's blocks."""
        if answer.cleared:
            self._copies.clear()
        for event in answer.events:
            if event.medium:
                self._copies.enter(event)
        return self.replica.apply(answer)

    async def _has_layout_of(self, epoch: int) -> bool:
        """Give the copy the layer groups of an epoch. Return False if the pool has a later epoch. Raises QuireError."""
        pool = await self._cache.get_pool(self._pool)
        if pool.epoch != epoch:
            return False
        self.replica.layout = Layout.of(pool.geometry)
        if self.replica.layout.has_windows:
            log.warning(
                "layer groups with windows: inside of a published prefix a prompt can find less pool=%s", self._pool
            )
        return True

    def _warn_of_unconnected(self, changes: list[Change]) -> None:
        """After a snapshot, say how many blocks can't be published: the tokens before them are not known."""
        if changes and isinstance(changes[0], AllCleared) and (num_blocks := self.replica.statistics().num_unconnected):
            log.warning(
                "blocks not published, the tokens before them are not known pool=%s blocks=%d", self._pool, num_blocks
            )


async def _cancelled(task: asyncio.Task[NoReturn]) -> None:
    """Cancel a task, and wait until it has ended."""
    task.cancel()
    await asyncio.wait([task])
