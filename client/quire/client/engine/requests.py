"""Requests of the engine's callers: checked, counted, and submitted; and their ends by a caller or a timeout.

The tasks of callers run this. So it never touches the scheduler: calls for it go through the inbox. The results of
steps come by delivery.py, from the engine's task.
"""

import asyncio
import contextlib
import itertools
import random
import time
from collections import abc
from dataclasses import replace
from numbers import Integral
from typing import Any, TypeVar

from quire.client.engine.adapters import adapters_of, check_identity
from quire.client.engine.backlog import Backlog
from quire.client.engine.caching import CacheParams
from quire.client.engine.config import EngineConfig
from quire.client.engine.grammar import Grammar
from quire.client.engine.inbox import Inbox
from quire.client.engine.metrics import Measured, RequestTimes
from quire.client.engine.outputs import (
    Beam,
    BeamCompletion,
    Chunk,
    Completion,
    SampleText,
    best_of,
    complete,
)
from quire.client.engine.request import BeamRequest, Request, undeliverable
from quire.client.engine.sample_output import SampleOutput
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.scheduling.beam_search import BeamSearch, BeamSearchParams
from quire.client.engine.scheduling.new_sequences import new_beam_group, new_samples
from quire.client.engine.scheduling.plans import SchedulerLimits
from quire.client.engine.scheduling.request_limits import check_beam_search, check_request
from quire.client.engine.scheduling.sequence import Delivered, FinishReason, Sequence
from quire.client.engine.tenant_places import TenantPlaces
from quire.client.engine.tokenizer import Tokenizer
from quire.client.engine.tracing import RequestSpan, Tracing
from quire.client.errors import EngineStopped, InvalidRequest, QuireError, after_delivery
from quire.compute.v1 import worker_service_pb2
from quire.compute.v1.sampling_ranges import leaves_token

MAX_COMPILING_PER_TENANT = 2
"""Grammars of a named tenant that the worker is asked to compile at a time: as many as it compiles at once. Others find
places then."""

Prompt = str | abc.Sequence[int]
Params = TypeVar("Params", SamplingParams, BeamSearchParams)


class Requests:
    """The open requests. Takes none before start, and none after stop."""

    def __init__(
        self,
        config: EngineConfig,
        measured: Measured,
        tracing: Tracing | None,
        *,
        inbox: Inbox,
        check_grammar: abc.Callable[[Grammar], abc.Awaitable[float]],
    ) -> None:
        """check_grammar raises for a wrong grammar."""
        self.tokenizer: Tokenizer | None = None
        self._backlog = Backlog(config)
        self._measured = measured
        self._tracing = tracing
        self._inbox = inbox
        self._check_grammar = check_grammar
        self._compiling = TenantPlaces(MAX_COMPILING_PER_TENANT)
        self._max_mask_s = config.max_mask_s
        self._open: dict[int, Request] = {}
        self._stopped: EngineStopped | None = EngineStopped("the engine was not started: use `async with` or start()")
        self._end_token_ids: tuple[int, ...] = ()
        self._max_logprobs = 0
        self._adapters: dict[str, bytes] = {}
        self._request_ids = itertools.count()

    def __len__(self) -> int:
        """Return the number of requests that are not read to their end."""
        return len(self._open)

    def start(self) -> None:
        """Take requests from now on, within the limits of use_model."""
        self._stopped = None

    def stop(self, error: EngineStopped) -> None:
        """Fail all requests, and those to come. The first error stays."""
        self._stopped = self._stopped or error
        for request in self._open.values():
            request.fail(error)

    def use_model(self, model: worker_service_pb2.GetModelResponse, limits: SchedulerLimits) -> None:
        """Set the limits of this model and of its pool."""
        self._limits = limits
        self._end_token_ids = tuple(model.end_token_ids)
        self._max_logprobs = model.max_logprob_count
        self.use_adapters(model)

    def use_adapters(self, model: worker_service_pb2.GetModelResponse) -> None:
        """Set the adapters that requests can have."""
        self._adapters = adapters_of(model)

    def find(self, request_id: int) -> Request | None:
        """Return a request that its caller still reads."""
        return self._open.get(request_id)

    def unfinished(self) -> abc.Iterator[Sequence]:
        """Yield the sequences of all requests that have not ended."""
        for request in self._open.values():
            yield from (sequence for sequence in request.sequences if sequence.finish_reason is None)

    def check(
        self,
        prompt: Prompt,
        params: SamplingParams,
        cache: CacheParams,
        delivered: abc.Sequence[Delivered] | None = None,
    ) -> tuple[list[int], SamplingParams]:
        """The prompt's tokens, and the parameters with bad words as token ids, if the request can be served.

        Raises InvalidRequest, or EngineStopped.
        """
        if self._stopped is not None:
            raise self._stopped
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(params, field)
            if value is not None and value > self._max_logprobs:
                raise InvalidRequest.of_field(field, value, f"at most {self._max_logprobs}")
        if params.stop and self.tokenizer is None:
            raise InvalidRequest.of_field("stop", params.stop, "empty, since there is no tokenizer")
        check_identity(self._adapters, cache.adapter)
        token_ids = self._token_ids(prompt)
        params = self._encode_bad_words(params)
        check_request(self._limits, token_ids, params, cache, delivered)
        self._check_choice(params)
        return token_ids, params

    def check_beams(self, prompt: Prompt, params: BeamSearchParams, cache: CacheParams) -> list[int]:
        """The prompt's tokens, if the beam search can be served. Raises InvalidRequest, or EngineStopped."""
        if self._stopped is not None:
            raise self._stopped
        num_ends = len(self._ends_of(params))
        if params.beam_width + num_ends > self._max_logprobs:
            most = self._max_logprobs - num_ends
            limit = f"at most {most}: the worker's max_logprob_count, {self._max_logprobs}, less {num_ends} end tokens"
            raise InvalidRequest.of_field("beam_width", params.beam_width, limit)
        check_identity(self._adapters, cache.adapter)
        token_ids = self._token_ids(prompt)
        check_beam_search(self._limits, token_ids, params, cache)
        return token_ids

    def _encode_bad_words(self, params: SamplingParams) -> SamplingParams:
        """Parameters with all bad words as token ids."""
        texts = [word for word in params.bad_words if isinstance(word, str)]
        if not texts:
            return params
        if self.tokenizer is None:
            raise InvalidRequest.of_field("bad_words", "text", "token ids, since there is no tokenizer")
        encoded = [token_ids for text in texts for token_ids in self.tokenizer.encode_word(text)]
        return replace(params, bad_words=(*params.bad_word_ids, *encoded))

    def _check_choice(self, params: SamplingParams) -> None:
        """Raises InvalidRequest if the parameters leave no token to choose."""
        ends = self._ends_of(params) if params.min_tokens else ()
        is_left = leaves_token(
            self._limits.vocabulary_size,
            allowed_token_ids=params.allowed_token_ids or (),
            bad_words=params.bad_word_ids,
            end_token_ids=ends,
        )
        if not is_left:
            field = "bad_words" if params.allowed_token_ids is None else "allowed_token_ids"
            raise InvalidRequest.of_field(field, "no token that can be chosen", "at least one that can")

    def _ends_of(self, params: SamplingParams | BeamSearchParams) -> frozenset[int]:
        """The tokens at which a sample ends."""
        ends = frozenset(params.stop_token_ids)
        return ends if params.ignore_eos else ends | frozenset(self._end_token_ids)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return _integers_of(prompt)
        if self.tokenizer is None:
            raise InvalidRequest.of_field("prompt", "text", "token ids, since there is no tokenizer")
        return self.tokenizer.encode(prompt)

    async def generate(
        self,
        token_ids: list[int],
        params: SamplingParams,
        cache: CacheParams,
        delivered: abc.Sequence[Delivered] | None = None,
        *,
        is_whole: bool = False,
    ) -> abc.AsyncGenerator[Chunk, None]:
        """Chunks of a checked request; closing the iterator cancels it. Its grammar is checked here.

        is_whole is as in Engine.generate.
        """
        if params.best_of is not None:
            for chunk in await self._generate_best(token_ids, params, cache):
                yield chunk
            return
        if params.grammar is not None:
            async with self._compiling.place(params.tenant):
                await self._check_grammar(params.grammar)
        texts = await self._texts_of(token_ids, params, delivered)
        request_id, request = self._submit(token_ids, params, cache, delivered, texts=texts, is_whole=is_whole)
        try:
            while request.has_more:
                await request.news()
                for output in request.unread():
                    is_long = output.is_long
                    unread = await asyncio.to_thread(request.read, output) if is_long else request.read(output)
                    if unread is not None:
                        yield unread
                if request.error is not None:
                    raise after_delivery(request.error, request.delivered)
        finally:
            self._close(request_id, request)

    async def _generate_best(self, token_ids: list[int], params: SamplingParams, cache: CacheParams) -> list[Chunk]:
        """The n best of best_of samples, which have ended."""
        logprobs = 0 if params.logprobs is None else params.logprobs
        every = replace(params, n=params.best_of or params.n, best_of=None, logprobs=logprobs)
        try:
            completion = await self.complete(token_ids, every, cache)
        except QuireError as error:
            raise after_delivery(error, [0] * params.n) from error.__cause__
        return best_of(completion, params.n, has_logprobs=params.logprobs is not None)

    async def search_beams(self, token_ids: list[int], params: BeamSearchParams, cache: CacheParams) -> BeamCompletion:
        """The best beams of a checked search; cancelling the task cancels it."""
        request_id, request = self._submit_beams(token_ids, params, cache)
        try:
            await request.wait(params.n)
        finally:
            self._close(request_id, request)
        beams = []
        for ended in request.search.best():
            try:
                text = self._text_of(token_ids, request.first.params)
                whole = await _made(text, ended.token_ids, ended.finish_reason)
            except Exception as error:  # the tokenizer's, about this text
                raise undeliverable(error) from error
            beams.append(Beam(whole, ended.token_ids, ended.score, ended.cumulative_logprob, ended.finish_reason))
            await asyncio.sleep(0)  # each text may take a millisecond, and the engine must run
        return BeamCompletion(tuple(token_ids), tuple(beams))

    def _close(self, request_id: int, request: Request) -> None:
        self._open.pop(request_id, None)
        self.wait_no_longer(request)
        if request.timer is not None:
            request.timer.cancel()
        self._end_measuring(request)
        if self._stopped is None and any(sequence.finish_reason is None for sequence in request.sequences):
            self._end(request, FinishReason.CANCELLED)

    def _end(self, request: Request, reason: FinishReason) -> None:
        self._inbox.end(request.first.request_id, request.sequences, reason)

    def wait_no_longer(self, request: Request) -> None:
        """Count a request that has its first token, or has ended, no longer among those that wait."""
        if request.waits:
            request.waits = False
            self._backlog.leave(request.first.tenant, request.first.num_prompt_tokens)

    def _time_out(self, request: Request) -> None:
        """End a request at its timeout; its caller gets the tokens generated so far."""
        if self._stopped is not None or request.error is not None:
            return
        try:
            request.time_out()
        except Exception as error:  # the tokenizer's, about this text
            self._fail(request, undeliverable(error))
            return
        self._end(request, FinishReason.TIMEOUT)
        request.times.close(FinishReason.TIMEOUT)

    def _end_measuring(self, request: Request) -> None:
        request.times.close(FinishReason.CANCELLED if request.error is None else FinishReason.FAILED)
        if request.span is not None:
            num_tokens, reasons = request.outcome()
            request.span.end(num_tokens=num_tokens, reasons=reasons, error=request.error)

    async def complete(self, token_ids: list[int], params: SamplingParams, cache: CacheParams) -> Completion:
        """All samples of a checked request."""
        async with contextlib.aclosing(self.generate(token_ids, params, cache, is_whole=True)) as stream:
            return complete(token_ids, [chunk async for chunk in stream])

    def _submit(
        self,
        token_ids: list[int],
        params: SamplingParams,
        cache: CacheParams,
        delivered: abc.Sequence[Delivered] | None,
        *,
        texts: abc.Sequence[SampleText],
        is_whole: bool,
    ) -> tuple[int, Request]:
        if self._stopped is not None:
            raise _copy_of(self._stopped)
        seed = random.getrandbits(62) if params.seed is None else params.seed
        with self._entering(params.tenant, len(token_ids), is_limited=delivered is None):
            sequences = new_samples(
                self._limits,
                next(self._request_ids),
                token_ids,
                params,
                end_token_ids=self._end_token_ids,
                seed=seed,
                cache=cache,
                delivered=delivered,
            )
        times, span = self._measure(params, num_prompt_tokens=len(token_ids), num_samples=len(sequences))
        has_logprobs = params.logprobs is not None
        outputs = [
            SampleOutput(sequence, texts[sequence.index], has_logprobs=has_logprobs, is_whole=is_whole)
            for sequence in sequences
        ]
        request = Request(sequences, outputs, times, span, num_samples=params.n, is_whole=is_whole, delivered=delivered)
        return self._begin(request, params.timeout_s), request

    def _submit_beams(
        self, token_ids: list[int], params: BeamSearchParams, cache: CacheParams
    ) -> tuple[int, BeamRequest]:
        if self._stopped is not None:
            raise _copy_of(self._stopped)
        ends = self._ends_of(params)
        with self._entering(params.tenant, len(token_ids)):
            group = new_beam_group(
                self._limits, next(self._request_ids), token_ids, params, end_token_ids=ends, cache=cache
            )
        sampling = group.members[0].params
        times, span = self._measure(sampling, num_prompt_tokens=len(token_ids), num_samples=1)
        search = BeamSearch(params, max_tokens=group.max_tokens, end_token_ids=ends)
        request = BeamRequest(group, search, times, span)
        return self._begin(request, params.timeout_s), request

    async def _texts_of(
        self, token_ids: list[int], params: SamplingParams, delivered: abc.Sequence[Delivered] | None
    ) -> list[SampleText]:
        """The texts of all samples behind the tokens that were delivered before."""
        texts = [self._text_of(token_ids, params) for _ in range(params.n)]
        for text, sample in zip(texts, delivered or (), strict=False):
            await _made(text, sample.token_ids, None)
        return texts

    def _text_of(self, token_ids: list[int], params: SamplingParams) -> SampleText:
        """The text that is to follow a prompt."""
        return SampleText(
            self.tokenizer.detokenizer(
                token_ids,
                skip_special_tokens=params.skip_special_tokens,
                kept_special_tokens=params.kept_special_tokens,
            )
            if self.tokenizer
            else None,
            params.stop,
            keep_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    @contextlib.contextmanager
    def _entering(self, tenant: str, num_tokens: int, *, is_limited: bool = True) -> abc.Iterator[None]:
        """Count a request that waits, unless it is refused."""
        self._backlog.enter(tenant, num_tokens, is_limited=is_limited)
        try:
            yield
        except BaseException:
            self._backlog.leave(tenant, num_tokens)
            raise

    def _measure(
        self, params: SamplingParams, *, num_prompt_tokens: int, num_samples: int
    ) -> tuple[RequestTimes, RequestSpan | None]:
        times = RequestTimes(
            self._measured,
            began_s=time.perf_counter(),
            num_prompt_tokens=num_prompt_tokens,
            num_samples=num_samples,
        )
        tracing = self._tracing
        return times, None if tracing is None else tracing.request(num_prompt_tokens=num_prompt_tokens, params=params)

    def _begin(self, request: Request, timeout_s: float | None) -> int:
        request_id = request.first.request_id
        self._open[request_id] = request
        if timeout_s is not None:
            request.timer = asyncio.get_running_loop().call_later(timeout_s, self._time_out, request)
        self._inbox.submit(request_id, request.sequences)
        return request_id

    def fail_all(self, error: QuireError) -> None:
        """Fail all open requests with one error."""
        for request in self._open.values():
            self._fail(request, error)

    def fail_ended(self, error: QuireError) -> None:
        """Fail the requests with a sequence that has ended, though its caller did not get its end."""
        for request in self._open.values():
            if request.lacks_end:
                self._fail(request, error)

    def fail_one(self, request_id: int, error: QuireError) -> None:
        """Fail an open request, if its caller still reads it."""
        request = self._open.get(request_id)
        if request is not None:
            self._fail(request, error)

    def count_masks(self, request_id: int, seconds: float) -> None:
        """Count seconds of a processor that a mask took. Raises InvalidRequest if the request's masks take too long."""
        request, limit = self._open.get(request_id), self._max_mask_s
        if request is None:
            return
        request.mask_s += seconds
        if request.mask_s > limit:
            message = f"its masks took {request.mask_s:.1f} s, at most {limit:g} s are allowed for a request"
            raise InvalidRequest(
                f"the grammar costs too much: {message}", metadata={"field": "grammar", "limit": message}
            )

    def _fail(self, request: Request, error: QuireError) -> None:
        self._end(request, FinishReason.CANCELLED)
        request.fail(error)


async def _made(text: SampleText, token_ids: abc.Sequence[int], finish_reason: FinishReason | None) -> str:
    """The text of more tokens. Another thread makes a long one: the engine must run."""
    if text.takes_long(len(token_ids)):
        return await asyncio.to_thread(text.push, token_ids, finish_reason)
    return text.push(token_ids, finish_reason)


def params_of(params: Params | None, fields: abc.Mapping[str, Any], kind: type[Params]) -> Params:
    """Parameters of this type with some fields replaced. Raises InvalidRequest for params of another type."""
    if params is None:
        return kind(**fields)
    if not isinstance(params, kind):
        limit = f"{kind.__name__}, or its fields as keywords: max_tokens=3"
        raise InvalidRequest.of_field("params", type(params).__name__, limit)
    return replace(params, **fields)


def one_for_each(params: Params | abc.Sequence[Params] | None, count: int) -> abc.Sequence[Params | None]:
    """Parameters for each of so many prompts. Raises InvalidRequest if their number differs."""
    if not isinstance(params, abc.Iterable):
        return [params] * count
    each = list(params)
    if len(each) != count:
        raise InvalidRequest.of_field("params", len(each), f"one for all or one per prompt, {count}")
    return each


def prompts_of(prompts: Prompt | abc.Iterable[Prompt]) -> abc.Sequence[Prompt]:
    """One prompt, or several, as a sequence of prompts. Raises InvalidRequest."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, abc.Iterable):
        limit = "text, token ids, or several of these"
        raise InvalidRequest.of_field("prompts", type(prompts).__name__, limit)
    several: list[Any] = list(prompts)
    return [several] if several and isinstance(several[0], Integral) else several


def _integers_of(prompt: abc.Sequence[int]) -> list[int]:
    """Token ids as int: NumPy's integers are taken too. Raises InvalidRequest."""
    limit = "text or a sequence of integers, the token ids"
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, abc.Iterable):
        raise InvalidRequest.of_field("prompt", type(prompt).__name__, limit)
    token_ids = list(prompt)
    for kind in {type(token_id) for token_id in token_ids}:
        if kind is bool or not issubclass(kind, Integral):
            raise InvalidRequest.of_field("prompt", f"{type(prompt).__name__} of {kind.__name__}", limit)
    return list(map(int, token_ids))


def _copy_of(error: QuireError) -> QuireError:
    """Each caller raises its own: an exception collects tracebacks."""
    copy = type(error)(error.message, reason=error.reason, metadata=error.metadata, retry_after_s=error.retry_after_s)
    copy.__cause__ = error.__cause__
    return copy
