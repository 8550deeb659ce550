"""WatchBlocks: a snapshot of a pool's blocks, then their changes, for clients that keep a copy.

Events have the state of a block, not the operations on it. So several changes of a block are one event, and a slow
reader gets fewer and larger answers. The server keeps a reader's place in the journal of the pool. If a reader's place
was overwritten, the reader begins again.

An answer with a cursor completes a moment: a copy that has all answers up to it is equal to ListBlocks at that moment.
Answers without a cursor are parts of a moment, of a snapshot or of more than MAX_EVENTS changes. Other calls go on
between the parts, so a copy between them has blocks of several moments.

Each tier of a pool has a journal of its own, and a reader has a place in each that it asked for. A moment is one of all
of them: an answer has a cursor if nothing waits in any.
"""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from quire.cache.v1 import cache_service_pb2
from quire.cachemgr._core import Known, Ledger
from quire.cachemgr.catalog import Catalog
from quire.cachemgr.errors import CallRefused, Reason, invalid, refuse

MAX_EVENTS = 4_096
"""Events of one answer: a few milliseconds without other calls, and half a megabyte."""
INTERVAL_S = 0.02
"""Changes within this time are sent together."""
DEVICE = "device"
"""The medium of the pool's blocks; those of copies are in messages.COPY_MEDIA."""


@dataclass(frozen=True, slots=True)
class View:
    """The blocks that a watcher sees: those of its tenant, all if None; whether it sees their content; and where."""

    tenant: str | None
    with_content: bool
    media: tuple[str, ...] = (DEVICE,)


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the journals of one epoch, one for each medium: changes with smaller numbers are known."""

    epoch: int
    numbers: tuple[int, ...]

    @property
    def cursor(self) -> str:
        return struct.pack(_format(len(self.numbers)), self.epoch, *self.numbers).hex()

    @classmethod
    def of(cls, cursor: str, *, num_media: int = 1) -> Place | None:
        """None if the cursor is empty. Raises CallRefused (INVALID_ARGUMENT)."""
        if not cursor:
            return None
        layout = _format(num_media)
        if not re.fullmatch(f"[0-9a-f]{{{2 * struct.calcsize(layout)}}}", cursor):
            raise CallRefused(invalid("cursor", repr(cursor[:64]), "one from an earlier answer to the same question"))
        epoch, *numbers = struct.unpack(layout, bytes.fromhex(cursor))
        return cls(epoch, tuple(numbers))


def _format(num_media: int) -> str:
    return f">q{num_media}Q"


async def watch_blocks(
    catalog: Catalog,
    pool: str,
    view: View,
    *,
    cursor: str,
    clock: Callable[[], float],
    max_events: int = MAX_EVENTS,
) -> AsyncGenerator[cache_service_pb2.WatchBlocksResponse, None]:
    """Answers of at most `max_events` events until it is closed.

    The end of a pin or of advice is a change, too: it is sent at its time, by the `clock` that set it.
    Raises CallRefused (INVALID_ARGUMENT, POOL_NOT_FOUND, CURSOR_EXPIRED).
    """
    place, name = Place.of(cursor, num_media=len(view.media)), catalog.pool(pool).ledger.pool
    with listening(catalog.listeners(name)) as changed:
        while True:
            ledger = catalog.pool(name).ledger
            if view.with_content and not ledger.inspector.contents_are_kept():
                raise CallRefused(
                    invalid("include_content", "true", "false, since this cachemgr runs with --no-keep-tokens")
                )
            if place is not None and place.epoch == ledger.epoch:
                changes = Changes(ledger, view, place.numbers, max_events=max_events)
            else:
                ledger.advance(clock())
                numbers = tuple(ledger.inspector.num_changes(medium) for medium in view.media)
                changes = Changes(ledger, view, numbers, max_events=max_events)
                async for answer in changes.snapshot():
                    yield answer
            while catalog.pool(name).ledger.epoch == changes.epoch:
                ledger.advance(clock())
                if (change := changes.next()) is not None:
                    yield change
                await changes.pause(changed, clock)


@contextmanager
def listening(listeners: dict[Callable[[], None], None]) -> Iterator[asyncio.Event]:
    """An event that is set with every change that these listeners are told of."""
    changed = asyncio.Event()
    listeners[changed.set] = None
    try:
        yield changed
    finally:
        del listeners[changed.set]


class Changes:
    """Answers about one epoch of a pool: the changes from a number on, after a snapshot or without one."""

    def __init__(self, ledger: Ledger, view: View, numbers: tuple[int, ...], *, max_events: int = MAX_EVENTS) -> None:
        self._ledger = ledger
        self.epoch = ledger.epoch
        self._view = view
        self._max_events = max_events
        self._known = {medium: Known(number) for medium, number in zip(view.media, numbers, strict=True)}
        self._told_numbers = numbers
        """The numbers of the last cursor."""
        self._is_in_part = False
        """An answer without a cursor was the last one."""
        self._looked_at = 0.0
        self._has_more = True

    async def snapshot(self) -> AsyncIterator[cache_service_pb2.WatchBlocksResponse]:
        """All blocks that are not free, page by page. `next` has the changes meanwhile."""
        response = cache_service_pb2.WatchBlocksResponse(epoch=self.epoch, cleared=True)
        for medium, known in self._known.items():
            following: int | None = 0
            while following is not None:
                events, following = self._ledger.inspector.snapshot(
                    following,
                    self._max_events,
                    known,
                    tenant=self._view.tenant,
                    with_content=self._view.with_content,
                    medium=medium,
                )
                response.MergeFromString(events)
                is_end = following is None and medium == self._view.media[-1]
                if is_end or response.events:
                    yield self._ended(response, is_whole=is_end and not self._num_waiting())
                    response = cache_service_pb2.WatchBlocksResponse(epoch=self.epoch)
                await asyncio.sleep(0)  # others' calls go on

    def next(self) -> cache_service_pb2.WatchBlocksResponse | None:
        """The next changes; None if the watcher sees none of them. Raises CallRefused (CURSOR_EXPIRED)."""
        view, self._looked_at = self._view, asyncio.get_running_loop().time()
        response = cache_service_pb2.WatchBlocksResponse(epoch=self.epoch)
        for medium, known in self._known.items():
            num_left = self._max_events - len(response.events)
            events = self._ledger.inspector.changes(
                known, num_left, tenant=view.tenant, with_content=view.with_content, medium=medium
            )
            if events is None:
                raise cursor_expired(self._ledger, medium)
            response.MergeFromString(events)
        self._has_more = self._num_waiting() > 0
        if not response.events and (self._has_more or not self._owes_cursor()):
            return None
        return self._ended(response, is_whole=not self._has_more)

    def _num_waiting(self) -> int:
        """Changes that the watcher was not told of."""
        return sum(self._ledger.inspector.num_changes(medium) - known.number for medium, known in self._known.items())

    def _owes_cursor(self) -> bool:
        """True after a part, and before the last cursor is overwritten while the watcher sees no changes."""
        return self._is_in_part or any(
            known.number - told > self._ledger.inspector.num_changes_kept(medium) // 4
            for (medium, known), told in zip(self._known.items(), self._told_numbers, strict=True)
        )

    def _ended(
        self, response: cache_service_pb2.WatchBlocksResponse, *, is_whole: bool
    ) -> cache_service_pb2.WatchBlocksResponse:
        """The answer, with a cursor if the watcher's copy is whole with it."""
        self._is_in_part = not is_whole
        if is_whole:
            self._told_numbers = tuple(known.number for known in self._known.values())
            response.cursor = Place(self.epoch, self._told_numbers).cursor
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


def cursor_expired(ledger: Ledger, medium: str) -> CallRefused:
    """The changes after a watcher's place are not kept any more."""
    kept = ledger.inspector.num_changes_kept(medium)
    message = f"more than {kept} changes in pool {ledger.pool!r} since the cursor; begin again without one"
    return CallRefused(refuse(Reason.CURSOR_EXPIRED, message, pool=ledger.pool, limit=kept))
