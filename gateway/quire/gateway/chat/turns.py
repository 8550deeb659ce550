"""Places that tenants take in turn: the tenant with many requests delays those of others by one of its own at most."""

import asyncio
from collections import deque


class Turns:
    """A number of places. While none is free, requests wait in a line of their tenant, and the lines take turns."""

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}

    async def acquire(self, tenant: str) -> None:
        """Wait for a place; give it back with release()."""
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the place came at the same moment
                self.release()
            raise

    def release(self) -> None:
        """Give a place to the first of the tenant that has waited longest for a turn."""
        while self._lines:
            tenant = next(iter(self._lines))
            line = self._lines.pop(tenant)
            while line and line[0].done():  # cancelled
                line.popleft()
            if line:
                line.popleft().set_result(None)
                if line:
                    self._lines[tenant] = line  # behind those of other tenants
                return
        self._num_free += 1
