"""`quire stats`: the content of a cachemgr's pools, once or repeatedly."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from quire.cli.render import StatsScreen, pool_view
from quire.cli.signals import run_until_signal
from quire.cli.snapshot import (
    REACH_TIMEOUT_S,
    Snapshot,
    UnreachableError,
    answering,
    as_dict,
    check_reachable,
    describe_trouble,
    take_snapshot,
)
from quire.client.cache_client import CacheClient
from quire.client.channel import ONCE
from quire.client.credentials import NO_CREDENTIALS, Credentials
from quire.client.errors import NotFound, QuireError
from quire.client.worker_client import WorkerClient

_WORKER_TIMEOUT_S = 1.0


def run_stats(
    cachemgr: str,
    pool: str,
    *,
    as_json: bool,
    interval_s: float | None,
    credentials: Credentials = NO_CREDENTIALS,
) -> None:
    """Prints every pool, or the one named; with an interval until Ctrl-C. Raises UnreachableError, QuireError."""
    console = Console(highlight=False)
    if interval_s is None:
        snapshots = asyncio.run(_look_once(cachemgr, pool, credentials))
        _print_json(console, snapshots, indent=2) if as_json else console.print(_view(snapshots, cachemgr))
        return
    watch = _watch(cachemgr, pool, console, as_json=as_json, interval_s=interval_s, credentials=credentials)
    with contextlib.suppress(KeyboardInterrupt):  # the way to end it
        run_until_signal(watch)


async def _look_once(cachemgr: str, pool: str, credentials: Credentials) -> list[Snapshot]:
    async with _reached(cachemgr, credentials) as cache:
        with answering(cachemgr):
            return await _look(cache, pool, cachemgr, _Workers(credentials))


class _Workers:
    """Asks workers how the parts of their steps run. One that does not answer is not asked again in its epoch."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._silent: set[tuple[str, int]] = set()

    async def add_parts(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with its worker's answer, if there is one."""
        pool = snapshot.pool
        key = (pool.worker_address, pool.epoch)
        if not pool.attached or key in self._silent:
            return snapshot
        try:
            worker = WorkerClient(
                pool.worker_address, credentials=self._credentials, timeout_s=_WORKER_TIMEOUT_S, retry=ONCE
            )
            try:
                return replace(snapshot, step_parts=tuple((await worker.get_statistics()).step_parts))
            finally:
                await worker.close()
        except (QuireError, ValueError):  # also an address that is none here
            self._silent.add(key)
            return snapshot


@contextlib.asynccontextmanager
async def _reached(cachemgr: str, credentials: Credentials) -> AsyncIterator[CacheClient]:
    """A client of a cachemgr that answers. Each call is made once: the next look is the retry."""
    await check_reachable(cachemgr, credentials)
    cache = CacheClient(cachemgr, credentials=credentials, timeout_s=REACH_TIMEOUT_S, retry=ONCE)
    try:
        yield cache
    finally:
        await cache.close()


async def _watch(
    cachemgr: str, pool: str, console: Console, *, as_json: bool, interval_s: float, credentials: Credentials
) -> None:
    """Looks until it is cancelled. A look that fails is reported; the last result stays."""
    workers = _Workers(credentials)
    async with _reached(cachemgr, credentials) as cache:
        with answering(cachemgr):
            snapshots = await _look(cache, pool, cachemgr, workers)
        with _watching(console, cachemgr, as_json=as_json) as watching:
            seen_s = time.monotonic()
            watching.show(snapshots)
            while True:
                await asyncio.sleep(interval_s)
                try:
                    snapshots = await _look(cache, pool, cachemgr, workers)
                except QuireError as error:
                    watching.tell(describe_trouble(cachemgr, error, time.monotonic() - seen_s))
                else:
                    seen_s = time.monotonic()
                    watching.show(snapshots)


@contextlib.contextmanager
def _watching(console: Console, cachemgr: str, *, as_json: bool) -> Iterator["_Printed | _Drawn"]:
    if as_json or not console.is_terminal:
        yield _Printed(console, cachemgr, as_json=as_json)
        return
    with Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as live:
        yield _Drawn(live, cachemgr)


class _Drawn:
    """Snapshots on a screen: each takes the place of the one before."""

    def __init__(self, live: Live, cachemgr: str) -> None:
        self._live = live
        self._cachemgr = cachemgr
        self._snapshots: Sequence[Snapshot] = ()

    def show(self, snapshots: Sequence[Snapshot]) -> None:
        """Draw the present state."""
        self._snapshots = snapshots
        self._draw("")

    def tell(self, trouble: str) -> None:
        """Draw the last known state, below the error."""
        self._draw(trouble)

    def _draw(self, trouble: str) -> None:
        height = self._live.console.height
        if self._snapshots:
            drawn: RenderableType = StatsScreen(self._snapshots, height=height, trouble=trouble)
        else:
            drawn = Group(*([Text(trouble, style="bold red")] if trouble else []), _view((), self._cachemgr))
        self._live.update(drawn, refresh=True)


class _Printed:
    """Prints snapshots one after the other, or as JSON; an error goes to standard error, once until it is over."""

    def __init__(self, console: Console, cachemgr: str, *, as_json: bool) -> None:
        self._console = console
        self._cachemgr = cachemgr
        self._as_json = as_json
        self._is_in_trouble = False

    def show(self, snapshots: Sequence[Snapshot]) -> None:
        """Print the present state."""
        if self._is_in_trouble:
            self._is_in_trouble = False
            print(f"cachemgr answers again: {self._cachemgr}", file=sys.stderr)
        if self._as_json:
            _print_json(self._console, snapshots, indent=None)
        else:
            self._console.print(_view(snapshots, self._cachemgr))

    def tell(self, trouble: str) -> None:
        """Print the error."""
        if not self._is_in_trouble:
            self._is_in_trouble = True
            print(trouble, file=sys.stderr, flush=True)


async def _look(cache: CacheClient, pool: str, cachemgr: str, workers: _Workers) -> list[Snapshot]:
    """A snapshot of each pool, by name."""
    names = sorted(found.name for found in await cache.list_pools())
    if pool and pool not in names:
        raise UnreachableError(
            f"the cachemgr at {cachemgr} has no pool {pool!r}; it has: {', '.join(names) or 'none'}."
        )
    snapshots = []
    for name in [pool] if pool else names:
        with contextlib.suppress(NotFound):  # gone since it was listed
            snapshots.append(await workers.add_parts(await take_snapshot(cache, name)))
    return snapshots


def _view(snapshots: Sequence[Snapshot], cachemgr: str) -> RenderableType:
    if not snapshots:
        return Text(f"The cachemgr at {cachemgr} has no pool: no worker is attached to it.")
    return Group(*(pool_view(snapshot) for snapshot in snapshots))


def _print_json(console: Console, snapshots: Sequence[Snapshot], *, indent: int | None) -> None:
    text = json.dumps({"pools": [_as_json(snapshot) for snapshot in snapshots]}, indent=indent)
    console.out(text, highlight=False)
    console.file.flush()


def _as_json(snapshot: Snapshot) -> dict[str, Any]:
    return {
        **as_dict(snapshot.pool),
        "statistics": as_dict(snapshot.statistics),
        "hit_ratio": snapshot.hit_ratio,
        "used_slots_ratio": snapshot.used_slots_ratio,
        "step_parts": [as_dict(part) for part in snapshot.step_parts],
    }
