"""The engine's connection to the two services: the session, a new one after a failure, and the present outage."""

import asyncio
from collections import abc
from dataclasses import dataclass

from quire.client.cache_client import CacheApi
from quire.client.channel import RetryPolicy
from quire.client.engine.config import EngineConfig
from quire.client.engine.session import ConnectWorker, Session
from quire.client.errors import (
    AccessDenied,
    EpochChanged,
    LeaseLost,
    NotFound,
    OutOfRoom,
    QuireError,
    Unavailable,
    WorkerUnavailable,
)
from quire.client.worker_client import WorkerApi

# Errors that a retry may cure; reopen raises one of these when it gives up.
TEMPORARY_ERRORS = (Unavailable, NotFound, LeaseLost, EpochChanged, OutOfRoom, AccessDenied)
# A session that could not be opened in the time left may have this long all the same.
_MIN_OPENING_S = 1.0


@dataclass(frozen=True, slots=True)
class Outage:
    """The engine waits for a service; requests continue when the service is back.

    waiting_for   "cachemgr" or "the worker"
    error         the last answer, or the reason why there was none
    gives_up_s    the event loop's time at which requests fail
    """

    waiting_for: str
    error: QuireError
    gives_up_s: float


class Connection:
    """Owns both clients and at most one session. session is None while there is none."""

    def __init__(self, cache: CacheApi, connect_worker: ConnectWorker, config: EngineConfig) -> None:
        """connect_worker gets the address that the lease names."""
        self.session: Session | None = None
        self._cache = cache
        self._connect_worker = connect_worker
        self._config = config
        self._worker: tuple[str, WorkerApi] | None = None
        self._failing_since: float | None = None  # the loop's time; None while the services can be used
        self._outage: Outage | None = None
        self._outage_changed = asyncio.Event()

    @property
    def outage(self) -> Outage | None:
        """The service that requests wait for, or did until they failed; None while the services can be used."""
        return self._outage

    async def next_outage(self, seen: Outage | None) -> Outage | None:
        """Wait until there is another outage than the one seen, or none any more; return it."""
        while self._outage is seen:
            await self._outage_changed.wait()
        return self._outage

    def _set_outage(self, outage: Outage | None) -> None:
        if outage != self._outage:
            self._outage = outage
            self._outage_changed.set()
            self._outage_changed = asyncio.Event()

    def begin_outage(self, error: Unavailable) -> float:
        """Say that a plan gets no answer; returns the loop's time at which to give up."""
        deadline = self._deadline()
        self._set_outage(Outage(_waiting_for(error), error, deadline))
        return deadline

    def end_outage(self) -> None:
        """Say that the services can be used."""
        self._failing_since = None
        self._set_outage(None)

    def _deadline(self) -> float:
        """The loop's time at which requests fail if the services can't be used before."""
        if self._failing_since is None:
            self._failing_since = asyncio.get_running_loop().time()
        return self._failing_since + self._config.recovery_timeout_s

    async def open(self) -> Session:
        """A new session. Raises NotFound, OutOfRoom, Unavailable and what else Session.open raises."""
        config = self._config
        session = await Session.open(self._cache, self._worker_at, pool=config.pool, ttl_s=config.lease_ttl_s)
        self._use(session)
        return session

    async def reopen(self, *, while_needed: abc.Callable[[], bool]) -> Session | None:
        """A new session as soon as the services let us; None when it is needed no longer.

        Raises one of TEMPORARY_ERRORS, the last, when the services could not be used for recovery_timeout_s.
        """
        deadline = self._deadline()
        try:
            return await self._reopen_by(deadline, while_needed)
        finally:
            self._failing_since = None

    async def _reopen_by(self, deadline: float, while_needed: abc.Callable[[], bool]) -> Session | None:
        delays_s = RetryPolicy(max_attempts=2**31).delays_s()
        while while_needed():
            try:
                return await self._open_by(deadline)
            except TEMPORARY_ERRORS as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                self._set_outage(Outage(_waiting_for(error), error, deadline))
                await asyncio.sleep(max(next(delays_s), error.retry_after_s or 0.0))
        return None

    async def _open_by(self, deadline: float) -> Session:
        now = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(max(deadline, now + _MIN_OPENING_S)):
                return await self.open()
        except TimeoutError:
            raise Unavailable("no new session in time") from None

    async def follow_epoch(self) -> bool:
        """Continue in the pool's new epoch, under the same lease. Returns False if there is no new epoch."""
        if self.session is None or not await self.session.follow_epoch():
            return False
        self._use(self.session)
        return True

    def _use(self, session: Session) -> None:
        self.session = session
        self.end_outage()

    def _worker_at(self, address: str) -> WorkerApi:
        if self._worker is None or self._worker[0] != address:
            self._worker = (address, self._connect_worker(address))
        return self._worker[1]

    async def hang_up(self) -> None:
        """End the streams to both services; the next call opens them again."""
        await self._cache.hang_up()
        if self._worker is not None:
            await self._worker[1].hang_up()

    async def end_session(self) -> None:
        """Give the lease back."""
        session, self.session = self.session, None
        if session is not None:
            await session.close()

    async def close(self) -> None:
        """Give the lease back and close both clients."""
        await self.end_session()
        await self._cache.close()
        if self._worker is not None:
            await self._worker[1].close()


def _waiting_for(error: QuireError) -> str:
    is_detached = error.reason in ("POOL_DETACHED", "POOL_NOT_FOUND")
    return "the worker" if is_detached or isinstance(error, WorkerUnavailable) else "cachemgr"
