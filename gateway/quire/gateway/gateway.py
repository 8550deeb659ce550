"""The state that all endpoints share: models, callers, limits, measurements. All generate through Gateway.generate."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from prometheus_client import Metric

from quire.client.engine.caching import NO_CACHE_PARAMS, CacheParams, CacheUse
from quire.client.engine.outputs import Chunk
from quire.client.engine.sampling import SamplingParams
from quire.client.errors import QuireError
from quire.gateway.adapters import AdapterRequest, AdapterRequests
from quire.gateway.callers import Admission, Caller, Keys, NoKeys, NoRateLimits, RateLimiter
from quire.gateway.chat.models import ChatModels
from quire.gateway.errors import HttpError, http_error_of, invalid
from quire.gateway.kept_responses import Kept, KeptResponses
from quire.gateway.limits import OpenBodies, RequestLimits
from quire.gateway.metrics import GatewayMetrics, RequestMeasure, kept_families
from quire.gateway.prompt_cache import CacheReport, KeptPrompt
from quire.gateway.routing.backend import AdaptedBackend, Backend, Chunks, base_of
from quire.gateway.token_texts import TokenTexts

if TYPE_CHECKING:
    from quire.client.cache_client import CacheClient

_log = logging.getLogger(__name__)


def kept_nothing() -> Kept[Any]:
    """Return a store that keeps nothing."""
    return Kept(keep_s=0, max_tenant_bytes=0, clock=time.monotonic)


@dataclass(slots=True)
class Gateway:
    """The state of one gateway process.

    backends     by each of their names
    is_draining  new requests are refused
    failure      the reason why no request can be computed any more: the process ends; "": there is none
    addresses    the URLs at which it serves
    began_s      when it began, seconds since 1970
    chat_models  templates and tool formats of the models; set before the first request
    cache        cachemgr, for the page; None: there is no page
    bodies       of the requests over HTTP
    responses    that callers can fetch and continue
    prompts      that later ones are compared with
    adapters     their open requests
    names_tenants    the backends name the tenant to cachemgr, which keeps tenants' prefixes apart
    """

    backends: Mapping[str, Backend]
    metrics: GatewayMetrics
    limits: RequestLimits = field(default_factory=RequestLimits)
    keys: Keys = field(default_factory=NoKeys)
    rate_limiter: RateLimiter = field(default_factory=NoRateLimits)
    is_draining: bool = False
    failure: str = ""
    addresses: list[str] = field(default_factory=list)
    began_s: int = field(default_factory=lambda: int(time.time()))
    chat_models: ChatModels | None = None
    cache: "CacheClient | None" = None
    names_tenants: bool = False
    responses: KeptResponses = field(default_factory=kept_nothing)
    prompts: Kept[KeptPrompt] = field(default_factory=kept_nothing)
    bodies: OpenBodies = field(init=False)
    adapters: AdapterRequests = field(default_factory=AdapterRequests)
    _token_texts: dict[int, TokenTexts] = field(default_factory=dict)
    _hidden: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Begin without open bodies."""
        self.bodies = OpenBodies(self.limits)

    def token_texts(self, backend: Backend) -> TokenTexts:
        """Return the texts of single tokens of a backend's vocabulary."""
        base = base_of(backend)
        texts = self._token_texts.get(id(base))
        if texts is None:
            texts = self._token_texts[id(base)] = TokenTexts(base.tokenizer)
        return texts

    @property
    def models(self) -> list[Backend]:
        """Return each backend once."""
        return list({id(backend): backend for backend in self.backends.values()}.values())

    def served(self, caller: Caller) -> dict[str, Backend]:
        """Return a backend by each name that a caller can have for a model: the models' own, and their adapters'.

        A model's name hides an adapter's, and the log says so.
        """
        allowed = self.rate_limiter.adapters_of(caller)
        served = dict(self.backends)
        for backend in self.models:
            for name, identity in backend.adapters.items():
                if name in self.backends:
                    self._note_hidden(name)
                elif name not in self.adapters.leaving and (allowed is None or name in allowed):
                    served[name] = AdaptedBackend(backend, name, identity)
        return served

    def _note_hidden(self, name: str) -> None:
        if name not in self._hidden:
            self._hidden.add(name)
            _log.warning("no request can name the adapter %s: it is the name of a model here", name)

    def find(self, name: str, caller: Caller) -> Backend | None:
        """Return the backend of a name in served(), without making those of all adapters for a model's own name."""
        return self.backends.get(name) or self.served(caller).get(name)

    def families(self, caller: Caller | None = None) -> Iterator[Metric]:
        """The metrics, as a caller may read them; None: all of them."""
        models, shown = self.models, None if caller is None else self.rate_limiter.adapters_of(caller)
        yield from self.metrics.families(models, tenant=None if caller is None else caller.tenant)
        yield from self.adapters.families(models, shown=shown)
        yield from kept_families(self.responses.statistics())

    def caller_of(self, authorization: str | None) -> Caller:
        """Return the caller with this Authorization header. Raises HttpError: 401, 403."""
        scheme, _, key = (authorization or "").partition(" ")
        return self.keys.caller_of(key.strip() if scheme.lower() == "bearer" and key.strip() else None)

    def backend_of(self, model: str | None, caller: Caller) -> Backend:
        """Return the backend of a name that is served to a caller; None: the only one. Raises HttpError: 404."""
        if not self.backends:
            raise HttpError(503, "no model is served yet: no worker has been found", code="unavailable")
        if model is None and len(self.models) == 1:
            return self.models[0]
        if model is None:
            raise HttpError(400, "model is missing, and several are served", code="missing_field", param="model")
        backend = self.find(model, caller)
        if backend is None:
            shown, names = model if len(model) <= 100 else f"{model[:99]}…", ", ".join(map(repr, self.served(caller)))
            raise HttpError(
                404, f"model {shown!r} is not served here; {names} is", code="model_not_found", param="model"
            )
        return backend

    def within_room(self, backend: Backend, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Return parameters with max_tokens as a ceiling: no more than the room that the prompt leaves.

        Returns them as they are with --strict-max-tokens, and for a prompt that does not fit. Raises HttpError, 400,
        for min_tokens beyond the room.
        """
        room = backend.max_model_len - num_prompt_tokens
        if self.limits.strict_max_tokens or params.max_tokens is None or not 0 < room < params.max_tokens:
            return params
        if params.min_tokens > room:
            raise invalid("min_tokens", params.min_tokens, f"at most {room}, the room after {num_prompt_tokens} tokens")
        return replace(params, max_tokens=room)

    def generate(
        self,
        caller: Caller,
        backend: Backend,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        cache: CacheParams | None = None,
        names: Mapping[str, str] | None = None,
        is_whole: bool = False,
    ) -> Chunks:
        """Chunks of a request of a caller, as Engine.generate gives them.

        The tenant and the priority become the caller's, and so does the salt where cachemgr does not know tenants.
        names are the caller's for fields of the engine: then each QuireError is raised as the HttpError that says so.
        Raises InvalidRequest and HttpError at once; HttpError, 429, and what the backend raises also while it is
        iterated. Work begins with the first item asked for; closing the iterator frees everything.
        """
        if self.is_draining:
            raise HttpError(503, "this server is about to end", code="shutting_down")
        if params.tenant != caller.tenant or caller.priority:  # a new SamplingParams is checked again: 0.1 ms
            params = replace(params, tenant=caller.tenant, priority=_added(params.priority, caller.priority))
        try:
            caching = cache if self.names_tenants else _salted(caller, cache)
            # A whole request that its caller leaves does not say how many tokens it had.
            is_whole = is_whole and not self.rate_limiter.counts_tokens(caller)
            chunks = backend.generate(prompt_token_ids, params, cache=caching, is_whole=is_whole)
        except QuireError as error:
            if names is None:
                raise
            raise http_error_of(error, names) from error
        num_prompt_tokens = len(prompt_token_ids)
        admit = partial(self.rate_limiter.admit, caller, num_prompt_tokens=num_prompt_tokens, params=params)
        measure = partial(self.metrics.request, backend.model_names[0], num_prompt_tokens, tenant=caller.tenant)
        opens = self.adapters.open(backend.name) if isinstance(backend, AdaptedBackend) else None
        return _MeasuredChunks(chunks, admit, measure, names, opens)

    def cache_report(
        self,
        caller: Caller,
        backend: Backend,
        cache: CacheParams | None,
        describe: Callable[[], KeptPrompt],
        *,
        compared_with: str | None,
        stores: bool,
        unplaced: Sequence[str] = (),
    ) -> CacheReport:
        """Return the report on the cache for a request with these parameters.

        describe       returns its prompt; called only if the prompt is kept or compared
        compared_with  the id of an earlier answer; None: the prompt is not compared
        stores         False if the caller wants nothing of the request kept
        unplaced       as in CacheReport
        """
        cache = cache or NO_CACHE_PARAMS
        keeps = self.prompts.keep_s > 0 and stores and cache.cache_use is not CacheUse.NONE
        return CacheReport(
            self.prompts,
            caller.tenant,
            describe() if keeps or compared_with is not None else None,
            breakpoints=cache.breakpoints,
            unplaced=unplaced,
            compared_with=compared_with,
            block_size=min((use.block_size for use in backend.pool_uses), default=1),
            keeps=keeps,
        )


class _MeasuredChunks:
    """The chunks of a request from its admission on, counted as they come."""

    __slots__ = (
        *("_admission", "_admit", "_chunks", "_is_begun", "_measure", "_measured", "_names", "_open", "_opens"),
        "_with_adapter",
    )

    def __init__(
        self,
        chunks: Chunks,
        admit: Callable[[], AbstractContextManager[Admission]],
        measure: Callable[[], AbstractContextManager[RequestMeasure]],
        names: Mapping[str, str] | None,
        opens: AbstractContextManager[AdapterRequest] | None,
    ) -> None:
        self._chunks = chunks
        self._opens = opens
        self._with_adapter: AdapterRequest | None = None
        self._admit = admit
        self._measure = measure
        self._names = names
        self._open: ExitStack | None = None
        self._is_begun = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._open is None:
            self._begin()
        try:
            chunk = await anext(self._chunks)
        except BaseException as error:
            await self._end(error)
            if self._names is None or not isinstance(error, QuireError):
                raise
            raise http_error_of(error, self._names) from error
        self._measured.chunk(chunk, time.perf_counter())
        self._admission.generated(len(chunk.token_ids))
        if self._with_adapter is not None and chunk.token_ids:
            self._with_adapter.generated()
        return chunk

    async def aclose(self) -> None:
        """End a request. Its caller wants no more chunks."""
        self._is_begun = True
        if self._open is not None:
            await self._end(asyncio.CancelledError())

    def _begin(self) -> None:
        if self._is_begun:
            raise StopAsyncIteration
        self._is_begun = True
        with ExitStack() as opened:
            self._admission = opened.enter_context(self._admit())
            self._measured = opened.enter_context(self._measure())
            if self._opens is not None:
                self._with_adapter = opened.enter_context(self._opens)
            self._open = opened.pop_all()

    async def _end(self, error: BaseException) -> None:
        opened, self._open = self._open or ExitStack(), None
        if isinstance(error, StopAsyncIteration):
            opened.close()
        else:
            opened.__exit__(type(error), error, error.__traceback__)
        await self._chunks.aclose()


def _added(priority: int, more: int) -> int:
    return max(-(2**31), min(2**31 - 1, priority + more))


def _salted(caller: Caller, cache: CacheParams | None) -> CacheParams | None:
    """Return the parameters with a salt of tenant and salt, so that tenants with equal salts share no blocks."""
    asked = cache or NO_CACHE_PARAMS
    if not caller.tenant:
        return cache
    digest = hashlib.blake2b(asked.salt, key=hashlib.sha256(caller.tenant.encode()).digest(), digest_size=32)
    return replace(asked, salt=digest.digest())
