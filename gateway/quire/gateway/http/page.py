"""The page at `/`: a playground, and the cache as it changes. Its files are in page/; this serves them and the cache.

    GET /, /page/...          the files
    GET /live?pool=           server-sent events: `pools` each second, `blocks` as they change, `away` if cachemgr is
    GET /live/sequence?...    the block table of one sequence

Of token ids, texts and salts nothing is sent. A caller that has a tenant sees that tenant's sequences and blocks; of
the others' blocks only that they are not free, and that only if the gateway is an operator at cachemgr. Otherwise
cachemgr tells the gateway of the one tenant's blocks, and of no counters.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from quire.cache.v1 import cache_service_pb2 as pb
from quire.client.block_kinds import BlockKind, kind_of
from quire.client.cache_client import CacheClient
from quire.client.errors import AccessDenied, QuireError
from quire.gateway.callers import Caller
from quire.gateway.errors import HttpError, invalid
from quire.gateway.gateway import Gateway
from quire.gateway.http.endpoint import authorization_of, json_response
from quire.gateway.http.streams import PING, EventStream, event_of, merged, primed

Asked = ParamSpec("Asked")
Found = TypeVar("Found")

FOLDER = Path(__file__).parent / "page"
MAX_VIEWERS = 32
"""Streams of one caller; each is a watch at cachemgr."""
MAX_SEQUENCES = 100
"""Sequences that a viewer is shown of a pool, the first ones."""
MAX_BLOCKS = 1_000_000
"""The most blocks of a pool that is drawn."""
UNSEEN = max(BlockKind) + 1
_INTERVAL_S = 1.0
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_NOT_KEPT = {"Cache-Control": "no-store"}


def routes(gateway: Gateway) -> list[BaseRoute]:
    """Return the page's routes; without a cachemgr there is no page."""
    if gateway.cache is None:
        return []
    live = Live(gateway, gateway.cache)
    return [
        Route("/", _index),
        Mount("/page", _Files(directory=FOLDER)),
        Route("/live", live.follow),
        Route("/live/sequence", live.sequence),
    ]


async def _index(_: Request) -> Response:
    return FileResponse(FOLDER / "index.html", headers=HEADERS)


@dataclass(frozen=True, slots=True)
class _Look:
    """All pools by name, and their counters; counters None: the gateway is no operator at cachemgr."""

    pools: list[pb.Pool]
    counters: dict[str, pb.PoolStatistics] | None


class _Shared(Generic[Asked, Found]):
    """A call that many viewers need each second and that is sent to cachemgr once: its answers, by arguments."""

    def __init__(self, ask: Callable[Asked, Awaitable[Found]]) -> None:
        self._ask = ask
        self._answers: dict[tuple[Any, ...], tuple[float, asyncio.Future[Found]]] = {}

    async def __call__(self, *args: Asked.args, **kwargs: Asked.kwargs) -> Found:
        """Return an answer that is not older than the interval of looks. Raises the errors of the call."""
        loop, key = asyncio.get_running_loop(), (*args, *kwargs.items())
        now = loop.time()
        asked_at, answer = self._answers.get(key, (-_INTERVAL_S, None))
        if answer is None or now >= asked_at + _INTERVAL_S * 0.9:  # each viewer asks once an interval, or a little late
            self._answers = {each: kept for each, kept in self._answers.items() if now < kept[0] + _INTERVAL_S}
            answer = asyncio.ensure_future(self._ask(*args, **kwargs))
            self._answers[key] = (now, answer)
        return await asyncio.shield(answer)


class _AsTheyAre:
    """Sends events as they are, without one behind the last."""

    def push(self, event: bytes) -> bytes:
        return event

    def finish(self) -> bytes:
        return b""


class Live:
    """The cache as it changes, for the viewers of the page."""

    def __init__(self, gateway: Gateway, cache: CacheClient) -> None:
        self._gateway = gateway
        self._cache = cache
        self._num_viewers: Counter[str] = Counter()
        self._look = _Shared(self._look_at_pools)
        self._sequences = _Shared(self._look_at_sequences)
        self._tenants = _Shared(cache.list_tenants)

    def _tenant_of(self, request: Request) -> str | None:
        """Return a caller's tenant; None for one that may see all that the gateway sees. Raises HttpError."""
        return self._gateway.caller_of(authorization_of(request.headers)).tenant or None

    async def follow(self, request: Request) -> Response:
        """Return the stream of events of one viewer."""
        caller = self._gateway.caller_of(authorization_of(request.headers))
        events = await primed(self._events(request.query_params.get("pool", ""), caller))
        return EventStream(
            events,
            _AsTheyAre(),
            send_timeout_s=self._gateway.limits.send_timeout_s,
            ping_s=self._gateway.limits.stream_ping_s,
            headers=_NOT_KEPT,
        )

    async def sequence(self, request: Request) -> Response:
        """Return the block table of a sequence that the viewer is shown."""
        tenant = self._tenant_of(request)
        lease, number = (request.query_params.get(name, "") for name in ("lease", "id"))
        if not number.isdecimal() or len(number) > 10 or int(number) >= 2**31:
            raise invalid("id", number, "a sequence's number")
        try:
            found = await self._cache.get_sequence(lease, int(number))
        except QuireError as error:
            raise HttpError(404, error.message, code=error.reason.lower()) from None
        if tenant not in (None, found.tenant):
            raise HttpError(404, "there is no such sequence", code="sequence_not_found")
        return json_response({"block_ids": list(found.block_ids)}, headers=_NOT_KEPT)

    async def _events(self, pool: str, caller: Caller) -> AsyncGenerator[bytes, None]:
        """The events of one viewer, until it disconnects or the gateway drains. Raises HttpError, 429, at once."""
        tenant = caller.tenant or None
        if self._num_viewers[caller.name] >= MAX_VIEWERS:
            message = f"{MAX_VIEWERS} pages of this caller follow the cache, which is the limit"
            raise HttpError(429, message, code="too_many_viewers")
        self._num_viewers[caller.name] += 1
        try:
            yield PING
            async with contextlib.aclosing(merged([self._pools(pool, tenant), self._blocks(pool, tenant)])) as events:
                async for _, event in events:
                    yield event
                    if self._gateway.is_draining:
                        return
        finally:
            self._num_viewers[caller.name] -= 1
            if not self._num_viewers[caller.name]:
                del self._num_viewers[caller.name]

    async def _pools(self, pool: str, tenant: str | None) -> AsyncGenerator[bytes, None]:
        while True:
            try:
                yield event_of(await self._describe(pool, tenant), name="pools")
            except QuireError as error:
                yield event_of(error.message, name="away")
            await asyncio.sleep(_INTERVAL_S)

    async def _look_at_pools(self) -> _Look:
        pools = sorted(await self._cache.list_pools(), key=lambda pool: pool.name)
        try:
            return _Look(pools, {each.pool: each for each in await self._cache.get_statistics()})
        except AccessDenied:
            return _Look(pools, None)

    async def _look_at_sequences(self, pool: str, tenant: str | None) -> list[pb.Sequence]:
        return await self._cache.first_sequences(pool, count=MAX_SEQUENCES, tenant=tenant)

    async def _describe(self, chosen: str, tenant: str | None) -> list[dict[str, Any]]:
        """Return all pools with their counters, and the sequences of the chosen one, "" being the first."""
        look = await self._look()
        chosen = chosen or next((pool.name for pool in look.pools), "")
        counters = look.counters or {}
        described = []
        for pool in look.pools:
            is_chosen = pool.name == chosen
            sequences = await self._sequences(chosen, tenant) if is_chosen else []
            tenants = await self._tenants(chosen) if is_chosen else []
            seen = counters.get(pool.name, pb.PoolStatistics())
            described.append(_describe_pool(pool, seen, sequences) | {"keeping": describe_keeping(tenants, tenant)})
        return described

    async def _blocks(self, pool: str, tenant: str | None) -> AsyncGenerator[bytes, None]:
        while True:
            with contextlib.suppress(QuireError):  # _pools says it
                look = await self._look()
                chosen = await self._cache.get_pool(pool or next((each.name for each in look.pools), ""))
                watched = tenant if look.counters is None else None
                num_blocks = chosen.geometry.block_count
                if num_blocks <= MAX_BLOCKS:
                    async with contextlib.aclosing(self._cache.watch_blocks(chosen.name, tenant=watched)) as answers:
                        async for answer in answers:
                            yield event_of(describe_changes(answer, num_blocks, tenant), name="blocks")
            await asyncio.sleep(_INTERVAL_S)


class _Files(StaticFiles):
    """The page's style and script."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """Add the page's headers to each answer."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        return response


def _describe_pool(pool: pb.Pool, seen: pb.PoolStatistics, sequences: list[pb.Sequence]) -> dict[str, Any]:
    return {
        "name": pool.name,
        "attached": pool.attached,
        "epoch": str(pool.epoch),  # JavaScript has no integers of 64 bits
        "block_count": pool.geometry.block_count,
        "block_size": pool.geometry.block_size_tokens,
        "sequence_count": pool.sequence_count,
        "host_blocks": describe_host_blocks(pool),
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


def describe_host_blocks(pool: pb.Pool) -> dict[str, int] | None:
    """Return the blocks of the host tier by state; None without one."""
    counts = pool.host_block_counts
    if not pool.geometry.host_block_count:
        return None
    return {
        "cached": counts.cached_count,
        "held": counts.held_count,
        "retired": counts.retired_count,
        "free": counts.free_count,
    }


def describe_keeping(tenants: list[pb.Tenant], tenant: str | None) -> list[dict[str, Any]]:
    """Return what breakpoints keep, by tenant, in blocks, until seconds since 1970; tenant None: of all."""
    return [
        {
            "tenant": each.name,
            "blocks": each.kept_block_count,
            "limit": each.keep_limit_block_count,
            "until": each.next_keep_end_time.ToMilliseconds() / 1000,
        }
        for each in tenants
        if each.kept_block_count and tenant in (None, each.name)
    ]


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
