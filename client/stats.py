"""`quire stats`: what the pools of a cachemgr hold, once or again and again."""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from quire.client.cache_client import CacheClient
from quire.client.credentials import NO_CREDENTIALS, Credentials
from quire.client.errors import NotFound
from quire.client.render import pool_view
from quire.client.snapshot import Snapshot, UnreachableError, as_dict, check_reachable, take_snapshot


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
        asyncio.run(watch)


async def _look_once(cachemgr: str, pool: str, credentials: Credentials) -> list[Snapshot]:
    await check_reachable(cachemgr, credentials)
    cache = CacheClient(cachemgr, credentials=credentials)
    try:
        return await _look(cache, pool, cachemgr)
    finally:
        await cache.close()


async def _watch(
    cachemgr: str, pool: str, console: Console, *, as_json: bool, interval_s: float, credentials: Credentials
) -> None:
    await check_reachable(cachemgr, credentials)
    cache = CacheClient(cachemgr, credentials=credentials)
    live = Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop")
    try:
        with live if console.is_terminal and not as_json else contextlib.nullcontext():
            while True:
                snapshots = await _look(cache, pool, cachemgr)
                if as_json:
                    _print_json(console, snapshots, indent=None)
                elif console.is_terminal:
                    live.update(_view(snapshots, cachemgr), refresh=True)
                else:
                    console.print(_view(snapshots, cachemgr))
                await asyncio.sleep(interval_s)
    finally:
        await cache.close()


async def _look(cache: CacheClient, pool: str, cachemgr: str) -> list[Snapshot]:
    """A snapshot of each pool, by name."""
    names = sorted(found.name for found in await cache.list_pools())
    if pool and pool not in names:
        raise UnreachableError(
            f"the cachemgr at {cachemgr} has no pool {pool!r}; it has: {', '.join(names) or 'none'}."
        )
    snapshots = []
    for name in [pool] if pool else names:
        with contextlib.suppress(NotFound):  # gone since it was listed
            snapshots.append(await take_snapshot(cache, name))
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
    }
