"""The chunks of one request, which may go on in another pool: see router.py."""

import asyncio
from dataclasses import dataclass, replace
from typing import Protocol, Self

from quire.client.engine.caching import CacheParams
from quire.client.engine.outputs import Chunk
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.scheduling.sequence import Delivered
from quire.client.errors import QuireError
from quire.gateway.routing.backend import Chunks
from quire.gateway.routing.choosing import OpenRequest
from quire.gateway.routing.members import Member

# Reasons for which another pool may still serve a refused request.
ELSEWHERE = frozenset({"QUEUE_FULL", "SEQUENCE_TOO_LONG"})


class Placing(Protocol):
    """The router, as a request knows it."""

    async def enter(
        self,
        token_ids: list[int],
        params: SamplingParams,
        cache: CacheParams,
        *,
        num_delivered: int,
        tried: set[Member],
    ) -> tuple[Member, OpenRequest]:
        """Choose another pool than those tried, and count the request there: num_delivered tokens are known."""

    def goes_on_elsewhere(self, error: QuireError, member: Member, *, tried: set[Member], num_moves: int) -> bool:
        """Return whether a request that this error ended in a pool goes on in another one than those tried."""

    def observe(self, num_tokens: int) -> None:
        """Learn from a sample that has ended how long answers are."""


@dataclass(slots=True)
class _Progress:
    """The tokens that the caller of a request has got, by sample."""

    token_ids: list[list[int]]
    ended: list[bool]

    @classmethod
    def of(cls, num_samples: int) -> "_Progress":
        return cls([[] for _ in range(num_samples)], [False] * num_samples)

    def take(self, chunk: Chunk) -> None:
        self.token_ids[chunk.index] += chunk.token_ids
        self.ended[chunk.index] = self.ended[chunk.index] or chunk.finish_reason is not None

    @property
    def has_ended(self) -> bool:
        return all(self.ended)

    @property
    def delivered(self) -> list[Delivered] | None:
        """None as long as there is nothing: then the request is like a new one."""
        if not any(self.token_ids):
            return None
        return [Delivered(tuple(ids), has_ended) for ids, has_ended in zip(self.token_ids, self.ended, strict=True)]


class RoutedChunks:
    """The chunks of one request, from one pool after another."""

    __slots__ = (
        *("_cache", "_chunks", "_ends_at", "_has_ended", "_is_whole", "_member", "_num_moves", "_opened"),
        *("_params", "_progress", "_router", "_token_ids", "_tried"),
    )

    def __init__(
        self, router: Placing, token_ids: list[int], params: SamplingParams, cache: CacheParams, *, is_whole: bool
    ) -> None:
        self._router = router
        self._token_ids = token_ids
        self._params = params
        self._cache = cache
        self._is_whole = is_whole
        self._progress = _Progress.of(params.n)
        self._tried: set[Member] = set()
        self._num_moves = 0
        self._ends_at: float | None = None
        self._has_ended = False
        self._chunks: Chunks | None = None  # of the present pool
        self._member: Member | None = None
        self._opened: OpenRequest | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while not self._has_ended:
            try:
                chunk = await anext(self._chunks or await self._begin())
            except StopAsyncIteration:
                await self.aclose()
                for token_ids in self._progress.token_ids:
                    self._router.observe(len(token_ids))
            except QuireError as error:
                await self.aclose()
                if not self._progress.has_ended:
                    self._move(error)
            except BaseException:
                await self.aclose()
                raise
            else:
                self._take(chunk)
                return chunk
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Leave the present pool."""
        self._has_ended = True
        chunks, self._chunks = self._chunks, None
        opened, self._opened = self._opened, None
        try:
            if chunks is not None:
                await chunks.aclose()
        finally:
            if opened is not None:
                opened.leave()

    async def _begin(self) -> Chunks:
        """Begin the request in a pool, or what is left of it."""
        loop, params, progress = asyncio.get_running_loop(), self._params, self._progress
        if self._ends_at is None and params.timeout_s is not None:
            self._ends_at = loop.time() + params.timeout_s
        num_delivered = sum(map(len, progress.token_ids))
        entering = self._router.enter(
            self._token_ids, params, self._cache, num_delivered=num_delivered, tried=self._tried
        )
        self._member, self._opened = await entering
        if self._ends_at is not None:
            params = replace(params, timeout_s=max(0.001, self._ends_at - loop.time()))
        self._chunks = self._member.engine.generate(
            self._token_ids, params, cache=self._cache, delivered=progress.delivered, is_whole=self._is_whole
        )
        return self._chunks

    def _take(self, chunk: Chunk) -> None:
        assert self._opened is not None
        self._opened.begin_output()
        self._progress.take(chunk)
        if self._tried:
            self._num_moves = 0
            self._tried.clear()

    def _move(self, error: QuireError) -> None:
        """Go on in another pool than the one that ended the request for this error. Raises it if there is none."""
        member = self._member
        if member is None:
            raise error
        if error.reason in ELSEWHERE:
            self._tried.add(member)
        else:
            self._tried = {member}
            self._num_moves += 1
        if not self._router.goes_on_elsewhere(error, member, tried=self._tried, num_moves=self._num_moves):
            raise error
        self._has_ended = False
