"""Places of each tenant: it has a limited number of things under way, and so it delays no other tenant for long."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TenantPlaces:
    """So many places for each named tenant. A tenant without a name has no limit: it is all callers, or one script."""

    def __init__(self, num_each: int) -> None:
        self._num_each = num_each
        self._places: dict[str, asyncio.Semaphore] = {}
        self._num_users: Counter[str] = Counter()

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Hold a place of the tenant within the block, as soon as it has one."""
        if not tenant:
            yield
            return
        places = self._places.setdefault(tenant, asyncio.Semaphore(self._num_each))
        self._num_users[tenant] += 1
        try:
            async with places:
                yield
        finally:
            self._num_users[tenant] -= 1
            if not self._num_users[tenant]:
                del self._num_users[tenant], self._places[tenant]
