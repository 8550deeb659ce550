"""The page at `/`: a playground, and the cache as it changes. Its files are in page/; this serves them and the cache.

    GET /, /page/...          the files
    GET /live?pool=           server-sent events: `pools` each second, `blocks` as they change, `away` if cachemgr is
    GET /live/sequence?...    the block table of one sequence

Of token ids, texts and salts nothing is sent. A caller that has a tenant sees that tenant's sequences and blocks; of
the others' blocks only that they are not free.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from quire.cache.v1 import cache_service_pb2 as pb
from quire.client.block_kinds import BlockKind, kind_of
from quire.client.cache_client import CacheClient
from quire.client.errors import QuireError
from quire.client.gateway.door import Caller, Door
from quire.client.gateway.errors import HttpError, invalid

FOLDER = Path(__file__).parent / "page"
MAX_VIEWERS = 32
"""Streams of one gateway; each is a watch at cachemgr."""
MAX_SEQUENCES = 100
"""Sequences that a viewer is shown of a pool, the first ones."""
MAX_BLOCKS = 1_000_000
"""Of a pool whose blocks are drawn."""
UNSEEN = max(BlockKind) + 1
_INTERVAL_S = 1.0
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def routes(door: Door) -> list[BaseRoute]:
    """Return the page's routes; without a cachemgr there is no page."""
    if door.cache is None:
        return []
    live = Live(door.cache, lambda request: door.caller_of(request.headers.get("authorization")))
    return [
        Route("/", _index),
        Mount("/page", _Files(directory=FOLDER)),
        Route("/live", live.follow),
        Route("/live/sequence", live.sequence),
    ]


async def _index(_: Request) -> Response:
    return FileResponse(FOLDER / "index.html", headers=_HEADERS)


class Live:
    """The cache as it changes, for those that look at the page."""

    def __init__(self, cache: CacheClient, caller_of: Callable[[Request], Caller]) -> None:
        self._cache = cache
        self._caller_of = caller_of
        self._num_viewers = 0

    def _tenant_of(self, request: Request) -> str | None:
        """Return a caller's tenant; None for one that may see all that the gateway sees. Raises HttpError."""
        return self._caller_of(request).tenant or None

    async def follow(self, request: Request) -> Response:
        """Return the stream of events of one viewer."""
        tenant = self._tenant_of(request)
        if self._num_viewers >= MAX_VIEWERS:
            raise HttpError(429, f"{MAX_VIEWERS} pages follow the cache, no more can", code="too_many_viewers")
        events = self._events(request.query_params.get("pool", ""), tenant)
        return StreamingResponse(events, media_type="text/event-stream", headers=_STREAM_HEADERS)

    async def sequence(self, request: Request) -> Response:
        """Return the block table of a sequence that the viewer is shown."""
        tenant = self._tenant_of(request)
        query = request.query_params
        lease, number = query.get("lease", ""), query.get("id", "")
        if not number.isdecimal() or len(number) > 10 or int(number) >= 2**31:
            raise invalid("id", number, "a sequence's number")
        try:
            sequences = await self._cache.first_sequences(query.get("pool", ""), count=MAX_SEQUENCES, tenant=tenant)
            if (lease, int(number)) not in {(each.lease_id_prefix, each.sequence_id) for each in sequences}:
                raise HttpError(404, "there is no such sequence", code="sequence_not_found")
            found = await self._cache.get_sequence(lease, int(number))
        except QuireError as error:
            raise HttpError(404, error.message, code=error.reason.lower()) from None
        return JSONResponse({"block_ids": list(found.block_ids)}, headers=_STREAM_HEADERS)

    async def _events(self, pool: str, tenant: str | None) -> AsyncGenerator[str, None]:
        """The events of one viewer, until it goes away. What it does not read is not asked for either."""
        self._num_viewers += 1
        ready: asyncio.Queue[str] = asyncio.Queue(maxsize=1)
        tasks = [asyncio.create_task(work(ready, pool, tenant)) for work in (self._follow_pools, self._follow_blocks)]
        try:
            while True:
                yield await ready.get()
        finally:
            self._num_viewers -= 1
            for task in tasks:
                task.cancel()

    async def _follow_pools(self, ready: asyncio.Queue[str], pool: str, tenant: str | None) -> None:
        while True:
            try:
                await ready.put(_event("pools", await self._look(pool, tenant)))
            except QuireError as error:
                await ready.put(_event("away", error.message))
            await asyncio.sleep(_INTERVAL_S)

    async def _look(self, chosen: str, tenant: str | None) -> list[dict[str, Any]]:
        """Return all pools with their counters, and the sequences of the chosen one, "" being the first."""
        pools = sorted(await self._cache.list_pools(), key=lambda pool: pool.name)
        statistics = {each.pool: each for each in await self._cache.get_statistics()}
        chosen = chosen or (pools[0].name if pools else "")
        looks = []
        for pool in pools:
            sequences = []
            if pool.name == chosen:
                sequences = await self._cache.first_sequences(chosen, count=MAX_SEQUENCES, tenant=tenant)
            looks.append(_describe_pool(pool, statistics.get(pool.name, pb.PoolStatistics()), sequences))
        return looks

    async def _follow_blocks(self, ready: asyncio.Queue[str], pool: str, tenant: str | None) -> None:
        while True:
            with contextlib.suppress(QuireError):  # _follow_pools says it
                chosen = await self._cache.get_pool(pool or await self._first_pool())
                num_blocks = chosen.geometry.block_count
                if num_blocks <= MAX_BLOCKS:
                    async with contextlib.aclosing(self._cache.watch_blocks(chosen.name)) as answers:
                        async for answer in answers:
                            await ready.put(_event("blocks", describe_changes(answer, num_blocks, tenant)))
            await asyncio.sleep(_INTERVAL_S)

    async def _first_pool(self) -> str:
        return min((pool.name for pool in await self._cache.list_pools()), default="")


class _Files(StaticFiles):
    """The page's style and script."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """Add the page's headers to each answer."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(_HEADERS)
        return response


def _event(name: str, data: object) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def _describe_pool(pool: pb.Pool, seen: pb.PoolStatistics, sequences: list[pb.Sequence]) -> dict[str, Any]:
    return {
        "name": pool.name,
        "attached": pool.attached,
        "epoch": str(pool.epoch),  # JavaScript has no integers of 64 bits
        "block_count": pool.geometry.block_count,
        "block_size": pool.geometry.block_size_tokens,
        "sequence_count": pool.sequence_count,
        "counters": {
            "generated_tokens": seen.generated_token_count,
            "admitted_tokens": seen.admitted_token_count,
            "cached_tokens": seen.cached_token_count,
            "evicted_blocks": seen.evicted_block_count,
            "copied_blocks": seen.copied_block_count,
        },
        "sequences": [
            {
                "lease": each.lease_id_prefix,
                "id": each.sequence_id,
                "tokens": each.token_count,
                "cached": each.cached_token_count,
                "blocks": each.block_count,
                "offloaded": each.offloaded,
            }
            for each in sequences
        ],
    }


def describe_changes(answer: pb.WatchBlocksResponse, num_blocks: int, tenant: str | None) -> dict[str, Any]:
    """Return blocks that changed, each as its id, its kind and the number of its holders."""
    return {
        "block_count": num_blocks,
        "cleared": answer.cleared,
        "changes": [_describe_block(event.block, tenant) for event in answer.events],
    }


def _describe_block(block: pb.Block, tenant: str | None) -> tuple[int, int, int]:
    kind = kind_of(block)
    if tenant is not None and kind is not BlockKind.FREE and block.tenant != tenant:
        return block.block_id, UNSEEN, 0
    return block.block_id, kind, block.reference_count
