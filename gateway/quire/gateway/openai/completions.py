"""POST /v1/completions, as OpenAI and vLLM have it. docs/reference/http.md lists its fields."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import Response
from starlette.routing import BaseRoute

from quire.client.engine.caching import NO_CACHE_PARAMS, Breakpoint, CacheParams
from quire.client.engine.outputs import Chunk
from quire.client.engine.prompt_logprobs import PromptLogprobs, TokenLogprobs
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.tokenizer import Tokenizer
from quire.client.errors import InvalidRequest
from quire.gateway.callers import Caller
from quire.gateway.chat.cache_fields import KeptEnds, read_cache_options
from quire.gateway.chat.prefix_ends import PrefixEnd
from quire.gateway.errors import http_error_of, invalid
from quire.gateway.fields import Fields, text_of, token_ids_of
from quire.gateway.gateway import Gateway
from quire.gateway.http.endpoint import PostRequest, json_response, post
from quire.gateway.http.streams import begin_stream, collected, merged
from quire.gateway.openai.answers import (
    ChoiceEvents,
    CompletionLogprobs,
    TokenUsage,
    diagnostics_of,
    prompt_logprobs_of,
)
from quire.gateway.openai.parameters import StreamUsage, cache_of, ignore_bookkeeping, sampling_of, stream_usage_of
from quire.gateway.prompt_cache import CacheReport, Diagnosis, prompt_of_tokens
from quire.gateway.routing.backend import Backend, Chunks
from quire.gateway.texts import check_length, decode_tokens, encode_texts, tokenizer_for
from quire.gateway.token_texts import PromptToken, TokenTexts

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: its tokens, and its text if the answer repeats it."""

    token_ids: Sequence[int]
    text: str = ""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request as it was read.

    echo               the answer begins with the prompt
    generates          False for max_tokens 0: one token is generated all the same, and not shown
    kept               ends of prefixes to keep in the cache: a prompt of completions has its own end alone
    compared_with      the id of an earlier answer that a diagnosis of the cache compares with; None: none is asked for
    stores             False if the caller wants nothing of the request kept
    """

    backend: Backend
    prompts: Sequence[Prompt]
    params: SamplingParams
    cache: CacheParams | None
    kept: Sequence[PrefixEnd]
    compared_with: str | None
    stores: bool
    echo: bool
    generates: bool
    stream: bool
    usage: StreamUsage
    return_token_ids: bool
    has_prompt_logprobs: bool


def routes(gateway: Gateway) -> list[BaseRoute]:
    """Return the endpoint."""
    return [post(gateway, "/v1/completions", create_completion)]


async def create_completion(gateway: Gateway, request: PostRequest) -> Response:
    """Answer a request, as a whole or as a stream."""
    asked = await read_completion(gateway, request.fields, request.caller)
    streams, reports = zip(*start(gateway, request.caller, asked), strict=True)
    answer = _CompletionAnswer(asked, request, gateway.token_texts(asked.backend), reports)
    if asked.stream:
        if len(streams) == 1:
            return await begin_stream(streams[0], answer, gateway.limits)
        return await begin_stream(merged(streams), answer, gateway.limits)
    return json_response(answer.whole(await collected(streams)))


def start(gateway: Gateway, caller: Caller, asked: CompletionRequest) -> list[tuple[Chunks, CacheReport]]:
    """Return the chunks of each prompt's answers, and the report on it.

    Raises HttpError that names the prompt if one can't be served.
    """
    started = []
    for index, prompt in enumerate(asked.prompts):
        try:
            started.append(_start_one(gateway, caller, asked, prompt))
        except InvalidRequest as error:
            found = http_error_of(error)
            if not asked.generates and found.param == "allowed_token_ids":  # the prompt's last token
                found.message = found.message.replace("allowed_token_ids", "prompt", 1)
                found.param = "prompt"
            if found.param == "prompt" and len(asked.prompts) > 1:
                found.param = f"prompt[{index}]"
            raise found from None
    return started


def _start_one(
    gateway: Gateway, caller: Caller, asked: CompletionRequest, prompt: Prompt
) -> tuple[Chunks, CacheReport]:
    token_ids, params = _sent(prompt, asked)
    params = gateway.within_room(asked.backend, params, len(token_ids))
    cache = asked.cache
    for end in asked.kept:
        cache = replace(cache or NO_CACHE_PARAMS, breakpoints=(Breakpoint(len(token_ids), end.ttl_s),))
    chunks = gateway.generate(caller, asked.backend, token_ids, params, cache=cache, is_whole=not asked.stream)
    report = gateway.cache_report(
        caller,
        asked.backend,
        cache,
        lambda: prompt_of_tokens(asked.backend.model_names[0], token_ids),
        compared_with=asked.compared_with,
        stores=asked.stores and len(asked.prompts) == 1,  # an id is one prompt's
    )
    return chunks, report


def _sent(prompt: Prompt, asked: CompletionRequest) -> tuple[Sequence[int], SamplingParams]:
    """Return the tokens and parameters for the engine. Raises InvalidRequest.

    A prompt that is scored, and not continued, may be as long as the model's context. Its last token is sent as the
    only one that can be generated: its log-probabilities are those that it has in the prompt.
    """
    token_ids, params, limit = prompt.token_ids, asked.params, asked.backend.max_model_len
    if asked.generates or not asked.echo or len(token_ids) < 2:
        return token_ids, params
    if len(token_ids) > limit:
        raise InvalidRequest.of_field("prompt", len(token_ids), f"at most {limit} tokens", reason="SEQUENCE_TOO_LONG")
    scoring = SamplingParams(
        max_tokens=1,
        allowed_token_ids=(token_ids[-1],),
        ignore_eos=True,
        logprobs=params.prompt_logprobs,
        prompt_logprobs=params.prompt_logprobs,
        n=params.n,
        priority=params.priority,
    )
    return token_ids[:-1], scoring


# Reading.


async def read_completion(gateway: Gateway, fields: Fields, caller: Caller) -> CompletionRequest:
    """Return the request that a body makes. Raises HttpError."""
    backend = gateway.backend_of(fields.string("model"), caller)
    stream, echo = fields.boolean("stream"), fields.boolean("echo")
    fields.refuse("suffix", "text can't be inserted, only continued", unless=("",))
    fields.refuse("best_of", "give n, and choose among the answers", unless=(1,))
    fields.refuse("use_beam_search", "the gateway has no beam search", unless=(False,))
    ignore_bookkeeping(fields)
    max_tokens = fields.integer("max_tokens", DEFAULT_MAX_TOKENS, low=0)
    logprobs = fields.integer("logprobs", low=0, high=backend.max_logprobs)
    params = sampling_of(fields, max_tokens=max_tokens or 1, logprobs=logprobs)
    has_prompt_logprobs = params.prompt_logprobs is not None
    if echo and logprobs is not None and not has_prompt_logprobs:
        params = replace(params, prompt_logprobs=logprobs)
    usage = stream_usage_of(fields, is_stream=stream)
    kept = KeptEnds(read_cache_options(fields))
    if kept.options.only_warms:
        max_tokens = 0
    cache, return_token_ids = cache_of(fields, kept), fields.boolean("return_token_ids")
    add_special_tokens = fields.boolean("add_special_tokens", True)
    given, stores = fields.require("prompt"), fields.boolean("store", True)
    fields.end()
    prompts = await _read_prompts(gateway, given, backend, echo=echo, add_special_tokens=add_special_tokens)
    if len(prompts) * params.n > gateway.limits.max_samples:
        limit = f"at most {gateway.limits.max_samples} samples of all prompts together"
        raise invalid("n", params.n, limit)
    if kept.options.compared_with is not None and len(prompts) > 1:
        limit = "left out with several prompts"
        raise invalid("prompt_cache_options.comparison_response_id", kept.options.compared_with, limit)
    return CompletionRequest(
        backend=backend,
        prompts=prompts,
        params=params,
        cache=cache,
        kept=kept.ends,
        compared_with=kept.options.compared_with,
        stores=stores,
        echo=echo,
        generates=max_tokens > 0,
        stream=stream,
        usage=usage,
        return_token_ids=return_token_ids,
        has_prompt_logprobs=has_prompt_logprobs,
    )


async def _read_prompts(
    gateway: Gateway, given: Any, backend: Backend, *, echo: bool, add_special_tokens: bool
) -> list[Prompt]:
    """Return one prompt, or several: a text, token ids, a list of texts, or a list of lists of token ids."""
    tokenizer = backend.tokenizer
    if not isinstance(given, list):
        given, is_list = [given], False
    else:
        is_list = not (given and _is_integer(given[0]))
        given = given if is_list else [given]
    if not given:
        raise invalid("prompt", given, "text, token ids, or a list of these with at least one")
    if len(given) > gateway.limits.max_prompts:
        raise invalid("prompt", f"{len(given)} prompts", f"at most {gateway.limits.max_prompts} prompts")
    prompts: list[Prompt | None] = []
    texts: dict[int, str] = {}
    for index, each in enumerate(given):
        path = f"prompt[{index}]" if is_list else "prompt"
        if isinstance(each, list):
            token_ids = token_ids_of(path, each)
            prompts.append(Prompt(token_ids, await _decoded(path, token_ids, tokenizer) if echo else ""))
        elif isinstance(each, str):
            texts[index] = text_of(path, each)
            check_length(path, len(each), tokenizer_for(path, tokenizer), max_tokens=backend.max_model_len)
            prompts.append(None)
        else:
            raise invalid(path, each, "text or a list of token ids")
    if texts and tokenizer is not None:
        encoded = await encode_texts(tokenizer, list(texts.values()), add_special_tokens=add_special_tokens)
        for (index, text), token_ids in zip(texts.items(), encoded, strict=True):
            prompts[index] = Prompt(token_ids, text)
    return [prompt for prompt in prompts if prompt is not None]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


async def _decoded(path: str, token_ids: Sequence[int], tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        raise invalid("echo", True, f"false for {path} of token ids, since there is no tokenizer")
    return await decode_tokens(tokenizer, token_ids, skip_special_tokens=True)


# Answering.


@dataclass(slots=True)
class _Choice:
    """One choice, as far as it has come: its log-probabilities, if asked for, and the length of its text."""

    logprobs: CompletionLogprobs | None
    num_characters: int = 0


class _CompletionAnswer:
    """The answer to one request, as a whole or event by event."""

    def __init__(
        self, asked: CompletionRequest, request: PostRequest, texts: TokenTexts, reports: Sequence[CacheReport]
    ) -> None:
        """Begin an answer; reports are of the request's prompts."""
        self._asked = asked
        self._texts = texts
        self._reports = reports
        self._usage = TokenUsage(sum(len(prompt.token_ids) for prompt in asked.prompts), reports)
        self._choices: dict[int, _Choice] = {}
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._id = f"cmpl-{request.id}"
        self._head = {
            "id": self._id,
            "object": "text_completion",
            "created": request.began_s,
            "model": asked.backend.model_names[0],
        }
        self._events = ChoiceEvents(self._head, asked.usage, self._usage)

    def push(self, item: Chunk | tuple[int, Chunk]) -> bytes:
        """Return the event of a chunk, which comes with the index of its prompt if there are several."""
        index, chunk = (0, item) if isinstance(item, Chunk) else item
        self._take(index, chunk)
        return self._events.of(self._choice(index, chunk))

    def finish(self) -> bytes:
        """Return the last events: the diagnosis and the usage if they were asked for."""
        return self._events.last(self._diagnosis)

    @property
    def _diagnosis(self) -> Diagnosis | None:
        """Return the diagnosis of the only prompt; None if none was asked for."""
        return self._reports[0].diagnosis

    def whole(self, chunks: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
        """The answer as one object."""
        for index, of_prompt in enumerate(chunks):
            for chunk in of_prompt:
                self._take(index, chunk)
        choices = [
            self._choice(index, _joined([chunk for chunk in of_prompt if chunk.index == sample]))
            for index, of_prompt in enumerate(chunks)
            for sample in range(self._asked.params.n)
        ]
        body = {**self._head, "choices": choices, "usage": self._usage.body}
        if self._diagnosis is not None:
            body["prompt_cache_diagnostics"] = diagnostics_of(self._diagnosis)
        return body

    def _take(self, prompt_index: int, chunk: Chunk) -> None:
        """Count a chunk, and keep what it has of the prompt: it has this for all samples."""
        self._usage.count(chunk, generates=self._asked.generates)
        self._reports[prompt_index].take(chunk.cache_outcome, self._id)
        if chunk.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = chunk.prompt_logprobs

    def _choice(self, prompt_index: int, chunk: Chunk) -> dict[str, Any]:
        """Return a choice with the text of a sample's chunk."""
        asked, prompt = self._asked, self._asked.prompts[prompt_index]
        index = prompt_index * asked.params.n + chunk.index
        is_first = index not in self._choices
        if is_first:
            self._choices[index] = self._begin(prompt)
        text = chunk.text if asked.generates else ""
        if asked.echo and is_first:
            text = prompt.text + text
        scored = self._scored(prompt_index, chunk) if is_first else None
        state = self._choices[index]
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None if state.logprobs is None else self._logprobs_of(state, prompt, chunk, scored, text),
            "finish_reason": None if chunk.finish_reason is None else chunk.finish_reason.value,
        }
        if asked.return_token_ids:
            choice["prompt_token_ids"] = list(prompt.token_ids) if is_first else None
            choice["token_ids"] = list(chunk.token_ids) if asked.generates else []
        if asked.has_prompt_logprobs and is_first:
            choice["prompt_logprobs"] = None if scored is None else prompt_logprobs_of(scored, self._texts)
        return choice

    def _begin(self, prompt: Prompt) -> _Choice:
        if self._asked.params.logprobs is None:
            return _Choice(None)
        tokens = self._texts.after(
            prompt.token_ids,
            skip_special_tokens=self._asked.params.skip_special_tokens,
            num_characters=len(prompt.text) if self._asked.echo else 0,
        )
        return _Choice(CompletionLogprobs(self._texts, tokens))

    def _scored(self, prompt_index: int, chunk: Chunk) -> Sequence[TokenLogprobs | None] | None:
        """Return the log-probabilities of all tokens of a prompt; None if there are none."""
        found, num_tokens = self._prompt_logprobs.get(prompt_index), len(self._asked.prompts[prompt_index].token_ids)
        if found is None or len(found) == num_tokens:
            return found
        scored = [*found, *(chunk.logprobs or ())]  # its last one is generated
        return scored if len(scored) == num_tokens else None

    def _logprobs_of(
        self,
        choice: _Choice,
        prompt: Prompt,
        chunk: Chunk,
        scored: Sequence[TokenLogprobs | None] | None,
        text: str,
    ) -> dict[str, Any]:
        assert choice.logprobs is not None
        choice.num_characters += len(text)
        of_prompt: Iterable[tuple[PromptToken, TokenLogprobs | None]] = ()
        if self._asked.echo and scored is not None:
            of_prompt = zip(self._texts.of_prompt(prompt.text, prompt.token_ids), scored, strict=True)
        return choice.logprobs.part(
            (chunk.logprobs or ()) if self._asked.generates else (),
            prompt=of_prompt,
            num_characters=None if chunk.finish_reason is None else choice.num_characters,
        )


def _joined(chunks: Sequence[Chunk]) -> Chunk:
    """Return all chunks of a sample as one."""
    return replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs or ()),
    )
