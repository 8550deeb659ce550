"""Requests of the engine's callers: taken and checked, handed to the scheduler, and delivered as texts."""

import asyncio
import contextlib
import logging
import random
import time
from collections import abc
from dataclasses import replace
from numbers import Integral
from typing import Any

from quire.client.engine.backlog import Backlog
from quire.client.engine.caching import CacheParams
from quire.client.engine.config import EngineConfig
from quire.client.engine.grammar import Grammar
from quire.client.engine.metrics import Measured, RequestTimes
from quire.client.engine.outputs import Chunk, Completion, Mailbox, SampleText, complete
from quire.client.engine.plans import Failed, Sampled, Step
from quire.client.engine.prompt_logprobs import PromptLogprobs, TokenLogprobs
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.scheduler import Scheduler
from quire.client.engine.sequence import FinishReason, Sequence
from quire.client.engine.tokenizer import Tokenizer
from quire.client.engine.tracing import RequestSpan, Tracing
from quire.client.errors import (
    EngineStopped,
    InvalidRequest,
    ProtocolViolation,
    QuireError,
    RequestFailed,
    after_delivery,
)
from quire.compute.v1 import worker_service_pb2
from quire.compute.v1.sampling_ranges import leaves_token

Prompt = str | abc.Sequence[int]

_log = logging.getLogger(__name__)


class Request:
    """A caller's request: its samples' texts, and what the caller has not read."""

    __slots__ = (
        *("error", "mailbox", "news", "open", "prompt_logprobs", "sequences", "span"),
        *("texts", "timer", "times", "waits"),
    )

    def __init__(
        self,
        sequences: list[Sequence],
        texts: list[SampleText],
        times: RequestTimes,
        span: RequestSpan | None,
        *,
        has_logprobs: bool,
    ) -> None:
        self.sequences = sequences
        self.span = span
        self.texts = texts
        self.times = times
        self.mailbox = Mailbox(has_logprobs=has_logprobs)
        self.news = asyncio.Event()
        self.open = set(range(len(sequences)))  # indexes of samples without a finish_reason
        self.waits = True  # for its first token
        self.timer: asyncio.TimerHandle | None = None
        self.error: QuireError | None = None
        # Until they are delivered, with the first token.
        self.prompt_logprobs: PromptLogprobs | None = None

    def fail(self, error: QuireError) -> None:
        self.error = self.error or error
        self.news.set()

    async def chunks(self) -> abc.AsyncGenerator[Chunk, None]:
        delivered = [0] * len(self.sequences)
        while self.open or self.news.is_set():
            await self.news.wait()
            self.news.clear()
            for chunk in self.mailbox.take():
                delivered[chunk.index] += len(chunk.token_ids)
                yield chunk
            if self.error is not None:
                raise after_delivery(self.error, delivered)


class Requests:
    """The open requests. Takes none before start, and none after stop."""

    def __init__(
        self,
        config: EngineConfig,
        measured: Measured,
        tracing: Tracing | None,
        *,
        on_request: abc.Callable[[], None],
        check_grammar: abc.Callable[[Grammar], abc.Awaitable[None]],
    ) -> None:
        """on_request is called when the scheduler has got a request; check_grammar raises for a wrong grammar."""
        self.tokenizer: Tokenizer | None = None
        self._backlog = Backlog(config)
        self._measured = measured
        self._tracing = tracing
        self._on_request = on_request
        self._check_grammar = check_grammar
        self._open: dict[int, Request] = {}
        self._stopped: EngineStopped | None = EngineStopped("the engine was not started: use `async with` or start()")
        self._end_token_ids: tuple[int, ...] = ()
        self._max_logprobs = 0

    def __len__(self) -> int:
        """Return the number of requests that are not read to their end."""
        return len(self._open)

    def start(self, scheduler: Scheduler) -> None:
        """Take requests from now on."""
        self._scheduler = scheduler
        self._stopped = None

    def stop(self, error: EngineStopped) -> None:
        """Fail all requests, and those to come. The first error stays."""
        self._stopped = self._stopped or error
        for request in self._open.values():
            request.fail(error)

    def use_model(self, model: worker_service_pb2.GetModelResponse) -> None:
        """Keep to what this model allows."""
        self._end_token_ids = tuple(model.end_token_ids)
        self._max_logprobs = model.max_logprob_count

    def check(self, prompt: Prompt, params: SamplingParams) -> tuple[list[int], SamplingParams]:
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
        token_ids = self._token_ids(prompt)
        params = self._encode_bad_words(params)
        self._scheduler.check(token_ids, params)
        self._check_choice(params)
        return token_ids, params

    def _encode_bad_words(self, params: SamplingParams) -> SamplingParams:
        """Parameters whose bad words are all token ids."""
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
            self._scheduler.limits.vocabulary_size,
            allowed_token_ids=params.allowed_token_ids or (),
            bad_words=params.bad_word_ids,
            end_token_ids=ends,
        )
        if not is_left:
            field = "bad_words" if params.allowed_token_ids is None else "allowed_token_ids"
            raise InvalidRequest.of_field(field, "no token that can be chosen", "at least one that can")

    def _ends_of(self, params: SamplingParams) -> frozenset[int]:
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
        self, token_ids: list[int], params: SamplingParams, cache: CacheParams
    ) -> abc.AsyncGenerator[Chunk, None]:
        """Chunks of a checked request; closing the iterator cancels it. Its grammar is checked here."""
        if params.grammar is not None:
            await self._check_grammar(params.grammar)
        request_id, request = self._submit(token_ids, params, cache)
        try:
            async with contextlib.aclosing(request.chunks()) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._open.pop(request_id, None)
            self._wait_no_longer(request)
            if request.timer is not None:
                request.timer.cancel()
            self._end_measuring(request)
            if self._stopped is None:
                self._scheduler.end(request.sequences, FinishReason.CANCELLED)

    def _wait_no_longer(self, request: Request) -> None:
        if request.waits:
            request.waits = False
            first = request.sequences[0]
            self._backlog.leave(first.tenant, first.num_prompt_tokens)

    def _time_out(self, request: Request) -> None:
        """End a request whose time is over; its caller gets what there is."""
        if self._stopped is not None or request.error is not None:
            return
        self._scheduler.end(request.sequences, FinishReason.TIMEOUT)
        request.times.close(FinishReason.TIMEOUT)
        for index in sorted(request.open):
            text = request.texts[index].flush()
            request.mailbox.put(index, text=text, token_ids=(), finish_reason=FinishReason.TIMEOUT)
        request.open.clear()
        request.news.set()

    def _end_measuring(self, request: Request) -> None:
        request.times.close(FinishReason.CANCELLED if request.error is None else FinishReason.FAILED)
        if request.span is not None:
            num_tokens = sum(len(sequence.token_ids) - sequence.num_prompt_tokens for sequence in request.sequences)
            reasons = [sequence.finish_reason for sequence in request.sequences]
            request.span.end(num_tokens=num_tokens, reasons=reasons, error=request.error)

    async def complete(self, token_ids: list[int], params: SamplingParams, cache: CacheParams) -> Completion:
        """All samples of a checked request."""
        async with contextlib.aclosing(self.generate(token_ids, params, cache)) as stream:
            return complete(token_ids, [chunk async for chunk in stream])

    def _submit(self, token_ids: list[int], params: SamplingParams, cache: CacheParams) -> tuple[int, Request]:
        if self._stopped is not None:
            raise _copy_of(self._stopped)
        seed = random.getrandbits(62) if params.seed is None else params.seed
        # Before the scheduler takes the request: what raises here leaves nothing behind.
        texts = [
            SampleText(
                self.tokenizer.detokenizer(token_ids, skip_special_tokens=params.skip_special_tokens)
                if self.tokenizer
                else None,
                params.stop,
                keep_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
            for _ in range(params.n)
        ]
        self._backlog.enter(params.tenant, len(token_ids))
        try:
            sequences = self._scheduler.add(
                token_ids, params, end_token_ids=self._end_token_ids, seed=seed, cache=cache
            )
        except BaseException:
            self._backlog.leave(params.tenant, len(token_ids))
            raise
        times = RequestTimes(
            self._measured,
            began_s=time.perf_counter(),
            num_prompt_tokens=len(token_ids),
            num_samples=len(sequences),
        )
        tracing = self._tracing
        span = None if tracing is None else tracing.request(num_prompt_tokens=len(token_ids), params=params)
        request = Request(sequences, texts, times, span, has_logprobs=params.logprobs is not None)
        request.prompt_logprobs = sequences[0].prompt_logprobs
        request_id = sequences[0].request_id
        self._open[request_id] = request
        if params.timeout_s is not None:
            request.timer = asyncio.get_running_loop().call_later(params.timeout_s, self._time_out, request)
        self._on_request()
        return request_id, request

    def fail_all(self, error: QuireError) -> None:
        """Fail all open requests with one error."""
        for request in self._open.values():
            self._scheduler.end(request.sequences, FinishReason.CANCELLED)
            request.fail(error)

    def fail(self, failed: abc.Iterable[Failed]) -> None:
        """Fail the requests of these sequences."""
        for sequence, error in ((entry.sequence, entry.error) for entry in failed):
            request = self._open.get(sequence.request_id)
            if request is not None:
                self._scheduler.end(request.sequences, FinishReason.CANCELLED)
                request.fail(error)

    def spans_of(self, sequences: abc.Iterable[Sequence]) -> list[RequestSpan | None]:
        """The spans of the open requests that these sequences belong to."""
        request_ids = dict.fromkeys(sequence.request_id for sequence in sequences)
        return [self._open[each].span for each in request_ids if each in self._open]

    def take_prompt_logprobs(self, step: Step, response: worker_service_pb2.RunStepResponse) -> None:
        """Take what a step says of prompts. Raises ProtocolViolation if it is not what was asked for."""
        runs = {seq_id: index for index, seq_id in enumerate(step.seq_ids)}
        for entry in response.prompt_logprobs:
            index = runs.get(entry.sequence_id)
            logprobs = None if index is None else step.sequences[index].prompt_logprobs
            if index is None or logprobs is None:
                raise ProtocolViolation("log-probabilities of a prompt that nobody asked for")
            logprobs.put(
                step.starts[index] + 1,
                entry.logprobs,
                entry.top_token_ids,
                entry.top_logprobs,
                top_count=entry.top_count,
            )

    def deliver(self, events: abc.Iterable[Sampled], response: worker_service_pb2.RunStepResponse, at_s: float) -> None:
        """Give the tokens of a step, which came at this time of time.perf_counter(), to their requests."""
        logprobs = {entry.sequence_id: entry for entry in response.logprobs}
        broken = {failure.sequence_id: failure.message for failure in response.grammar_failures}
        for event in events:
            if event.seq_id in broken:
                self.fail([Failed(event.sequence, _not_followed(broken[event.seq_id]))])
                continue
            try:
                self._deliver_one(event, logprobs.get(event.seq_id), at_s)
            except RequestFailed as error:
                self.fail([Failed(event.sequence, error)])
            except Exception as error:  # the tokenizer's, about this text: no other request has to do with it
                _log.exception("the text of a request can't be made")
                self.fail([Failed(event.sequence, _undeliverable(error))])

    def _deliver_one(self, event: Sampled, logprobs: worker_service_pb2.TokenLogprobs | None, at_s: float) -> None:
        sequence, reason = event.sequence, event.finish_reason
        request = self._open.get(sequence.request_id)
        if request is None:
            return
        if sequence.index not in request.open:
            return  # it was sampled before the sample's end was known: a stop string, or the request's time
        self._wait_no_longer(request)
        text = request.texts[sequence.index]
        piece = text.push(event.token_id, reason)
        if text.met_stop_string:
            reason = FinishReason.STOP
            self._scheduler.end([sequence], FinishReason.STOP)
        request.times.token(sequence.index, at_s, reason)
        if request.prompt_logprobs is not None:
            request.mailbox.put_prompt_logprobs(_whole(request.prompt_logprobs))
            request.prompt_logprobs = None
        request.mailbox.put(
            sequence.index,
            text=piece,
            token_ids=(event.token_id,),
            logprobs=() if logprobs is None else (_decode_logprobs(event.token_id, logprobs),),
            finish_reason=reason,
        )
        if reason is not None:
            request.open.discard(sequence.index)
        request.news.set()


def params_of(params: SamplingParams | None, fields: abc.Mapping[str, Any]) -> SamplingParams:
    """Parameters with some fields replaced. Raises InvalidRequest for params of another type."""
    if params is None:
        return SamplingParams(**fields)
    if not isinstance(params, SamplingParams):
        limit = "SamplingParams, or its fields as keywords: max_tokens=3"
        raise InvalidRequest.of_field("params", type(params).__name__, limit)
    return replace(params, **fields)


def one_for_each(
    params: SamplingParams | abc.Sequence[SamplingParams] | None, count: int
) -> abc.Sequence[SamplingParams | None]:
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


def _decode_logprobs(token_id: int, entry: worker_service_pb2.TokenLogprobs) -> TokenLogprobs:
    top = tuple(zip(entry.top_token_ids, entry.top_logprobs, strict=True))
    return TokenLogprobs(token_id, entry.sampled_logprob, top)


def _whole(logprobs: PromptLogprobs) -> PromptLogprobs:
    if not logprobs.is_complete:
        raise RequestFailed(
            "no log-probabilities of the prompt: a part of it was found in the cache, though not asked for"
        )
    return logprobs


def _not_followed(message: str) -> InvalidRequest:
    metadata = {"field": "grammar", "limit": message}
    return InvalidRequest(f"the grammar can't be followed any more: {message}", metadata=metadata)


def _undeliverable(error: Exception) -> RequestFailed:
    failed = RequestFailed(f"the tokens can't be made a text: {error!r}")
    failed.__cause__ = error
    return failed


def _copy_of(error: QuireError) -> QuireError:
    """Each caller raises its own: an exception collects tracebacks."""
    copy = type(error)(error.message, reason=error.reason, metadata=error.metadata, retry_after_s=error.retry_after_s)
    copy.__cause__ = error.__cause__
    return copy
