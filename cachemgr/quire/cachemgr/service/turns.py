"""Long work and waiting admissions in parts; other calls run between the parts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeVar

from quire.cachemgr.bounds import MAX_WAITING_ADMISSIONS, overloaded

Part = TypeVar("Part")


class Turns:
    """Admissions one by one, one per turn of the event loop, first come first served.

    A decode step or a report that becomes ready meanwhile runs between two of them instead of after them all.
    """

    def __init__(self, limit: int = MAX_WAITING_ADMISSIONS) -> None:
        self._limit = limit
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    async def turn(self) -> None:
        """Returns when it is the caller's turn, which lasts until its next await. Raises CallRefused (OVERLOADED)."""
        if len(self._waiting) >= self._limit:
            raise overloaded("admissions waiting for their turn", self._limit)
        await self.further_turn()

    async def further_turn(self) -> None:
        """As `turn`, for one who had a turn: is not refused."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            loop.call_soon(self._next)
        await turn

    def _next(self) -> None:
        turn = self._waiting.popleft()
        if not turn.done():
            turn.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)


async def in_turns(parts: Iterable[Callable[[], Part]]) -> AsyncIterator[Part]:
    """Long work in parts. Between two parts others have the loop for as long as the first took."""
    clock, took_s = asyncio.get_running_loop().time, 0.0
    for index, part in enumerate(parts):
        if index:
            await asyncio.sleep(took_s)
        begun_at = clock()
        done = part()
        took_s = clock() - begun_at
        yield done
