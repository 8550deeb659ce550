"""WatchBlocks: a snapshot of a pool's blocks, then their changes, for clients that keep a copy.

Events have the state of a block, not the operations on it. So several changes of a block are one event, a repeated
event is harmless, and a slow reader gets fewer and larger answers. The server keeps only a reader's place in the
journal of the pool; if a reader's place was overwritten, it begins again.
"""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from quire.cache.v1 import cache_service_pb2
from quire.cachemgr._core import Ledger
from quire.cachemgr.catalog import Catalog
from quire.cachemgr.errors import CallRefused, Reason, invalid, refuse

MAX_EVENTS = 4_096
"""Events of one answer: a few milliseconds without other calls, and half a megabyte."""
INTERVAL_S = 0.02
"""Changes within this time are sent together."""
CURSOR = struct.Struct(">qQ")


@dataclass(frozen=True, slots=True)
class View:
    """The blocks that a watcher sees: those of its tenant, all if None; and whether it sees their content."""

    tenant: str | None
    with_content: bool


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the journal of one epoch: changes with smaller numbers are known."""

    epoch: int
    number: int

    @property
    def cursor(self) -> str:
        return CURSOR.pack(self.epoch, self.number).hex()

    @classmethod
    def of(cls, cursor: str) -> Place | None:
        """None if the cursor is empty. Raises CallRefused (INVALID_ARGUMENT)."""
        if not cursor:
            return None
        if not re.fullmatch("[0-9a-f]{32}", cursor):
            raise CallRefused(invalid("cursor", repr(cursor[:64]), "one from an earlier answer"))
        return cls(*CURSOR.unpack(bytes.fromhex(cursor)))


async def watch_blocks(
    catalog: Catalog, pool: str, view: View, *, cursor: str, clock: Callable[[], float]
) -> AsyncGenerator[cache_service_pb2.WatchBlocksResponse, None]:
    """Answers until it is closed. Raises CallRefused (INVALID_ARGUMENT, POOL_NOT_FOUND, CURSOR_EXPIRED).

    The end of a pin or of advice is a change, too: it is sent at its time, by the `clock` that set it.
    """
    place, name = Place.of(cursor), catalog.pool(pool).ledger.pool
    with listening(catalog, name) as changed:
        while True:
            ledger = catalog.pool(name).ledger
            if view.with_content and not ledger.inspector.contents_are_kept():
                raise CallRefused(
                    invalid("include_content", "true", "false, since this cachemgr runs with --no-keep-tokens")
                )
            if place is None or place.epoch != ledger.epoch:
                ledger.advance(clock())
                place = Place(ledger.epoch, ledger.inspector.num_changes())
                async for answer in snapshot(ledger, view, place):
                    yield answer
            changes = Changes(ledger, view, place.number)
            while catalog.pool(name).ledger is ledger:
                ledger.advance(clock())
                if (change := changes.next()) is not None:
                    yield change
                await changes.pause(changed, clock)


@contextmanager
def listening(catalog: Catalog, pool: str) -> Iterator[asyncio.Event]:
    """An event that is set with every change of a pool, and with its new epoch."""
    changed = asyncio.Event()
    listeners = catalog.listeners(pool)
    listeners.add(changed.set)
    try:
        yield changed
    finally:
        listeners.discard(changed.set)


async def snapshot(ledger: Ledger, view: View, place: Place) -> AsyncIterator[cache_service_pb2.WatchBlocksResponse]:
    """All blocks that are not free, page by page. Changes meanwhile are sent from `place` on."""
    response = cache_service_pb2.WatchBlocksResponse(epoch=ledger.epoch, cleared=True)
    following: int | None = 0
    while following is not None:
        events, following = ledger.inspector.snapshot(
            following, MAX_EVENTS, tenant=view.tenant, with_content=view.with_content
        )
        response.MergeFromString(events)
        if following is None:
            response.cursor = place.cursor
        if following is None or response.events:
            yield response
            response = cache_service_pb2.WatchBlocksResponse(epoch=ledger.epoch)
        await asyncio.sleep(0)  # others' calls go on


class Changes:
    """The changes in one epoch of a pool, from a number on."""

    def __init__(self, ledger: Ledger, view: View, number: int) -> None:
        self._ledger = ledger
        self._view = view
        self._number = number
        self._told_number = number
        self._looked_at = 0.0
        self._has_more = True

    def next(self) -> cache_service_pb2.WatchBlocksResponse | None:
        """The next changes; None if the watcher sees none of them. Raises CallRefused (CURSOR_EXPIRED)."""
        view, self._looked_at = self._view, asyncio.get_running_loop().time()
        found = self._ledger.inspector.changes(
            self._number, MAX_EVENTS, tenant=view.tenant, with_content=view.with_content
        )
        if found is None:
            raise cursor_expired(self._ledger)
        events, self._number = found
        self._has_more = self._number < self._ledger.inspector.num_changes()
        # A watcher without visible changes gets a new place before the old one is overwritten.
        if not events and self._number - self._told_number < self._ledger.inspector.num_changes_kept() // 4:
            return None
        self._told_number = self._number
        response = cache_service_pb2.WatchBlocksResponse(epoch=self._ledger.epoch)
        response.MergeFromString(events)
        response.cursor = Place(self._ledger.epoch, self._number).cursor
        return response

    async def pause(self, changed: asyncio.Event, clock: Callable[[], float]) -> None:
        """Returns when there are changes, at least INTERVAL_S after the last look unless more are known already."""
        if self._has_more:
            await asyncio.sleep(0)  # others' calls go on
            return
        next_end = self._ledger.inspector.next_end()
        with suppress(TimeoutError):
            async with asyncio.timeout(None if next_end is None else next_end - clock()):
                await changed.wait()
        await asyncio.sleep(self._looked_at + INTERVAL_S - asyncio.get_running_loop().time())
        changed.clear()


def cursor_expired(ledger: Ledger) -> CallRefused:
    """The changes after a watcher's place are not kept any more."""
    kept = ledger.inspector.num_changes_kept()
    message = f"more than {kept} changes in pool {ledger.pool!r} since the cursor; begin again without one"
    return CallRefused(refuse(Reason.CURSOR_EXPIRED, message, pool=ledger.pool, limit=kept))
