"""A conversation's answer, as chat completions and responses generate it: chunks, with what their text has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from quire.client.engine.caching import NO_CACHE_PARAMS, CacheParams
from quire.client.engine.outputs import Chunk
from quire.client.engine.sampling import SamplingParams
from quire.gateway.callers import Caller
from quire.gateway.chat.conversation import Conversation
from quire.gateway.chat.models import ChatModel, tokenizer_of
from quire.gateway.chat.tools import Event
from quire.gateway.chat.tools.answers import AnswerParser
from quire.gateway.gateway import Gateway
from quire.gateway.prompt_cache import CacheReport, prompt_of
from quire.gateway.routing.backend import Backend, Chunks

_WARMING = SamplingParams(max_tokens=1)
"""Of a request that only warms the cache: nothing else that it asks for has an effect."""


def chat_model_of(gateway: Gateway, backend: Backend) -> ChatModel:
    """Return the chat model of a backend."""
    assert gateway.chat_models is not None  # the gateway loads them before it listens
    return gateway.chat_models.of(backend)


@dataclass(frozen=True, slots=True)
class ConversationRequest:
    """A request for an answer to a conversation, as it was read.

    compared_with   the id of an earlier answer that a diagnosis of the cache compares with; None: none is asked for
    only_warms      the prompt is computed, and one token is sampled that the answer does not have
    stores          False if the caller wants nothing of the request kept
    """

    backend: Backend
    conversation: Conversation
    params: SamplingParams
    cache: CacheParams | None
    stream: bool
    compared_with: str | None = field(default=None, kw_only=True)
    only_warms: bool = field(default=False, kw_only=True)
    stores: bool = field(default=True, kw_only=True)


@dataclass(frozen=True, slots=True)
class BegunConversation:
    """A conversation while its answers are generated.

    chunks    of the answers; they raise HttpError
    parsers   the one of each sample
    report    what the cache did for the prompt
    """

    prompt_token_ids: list[int]
    chunks: Chunks
    parsers: Sequence[AnswerParser]
    report: CacheReport
    only_warms: bool = False

    def events_of(self, chunk: Chunk) -> list[Event]:
        """Return the reasoning, content and calls that were found in the text up to this chunk, the sample's next."""
        if self.only_warms:
            return []
        parser = self.parsers[chunk.index]
        events = parser.push(chunk.text)
        return events if chunk.finish_reason is None else events + parser.finish()


async def begin(
    gateway: Gateway, caller: Caller, asked: ConversationRequest, *, names: Mapping[str, str]
) -> BegunConversation:
    """Begin the answers to a conversation. Raises HttpError.

    names are the body's fields for those of the engine, in errors; of "grammar", for an answer that is no forced call.
    """
    model, offer = chat_model_of(gateway, asked.backend), asked.conversation.offer
    prompt = await model.prompt_of(
        tokenizer_of(asked.backend),
        asked.conversation,
        tenant=caller.tenant,
        param=names["prompt"],
        max_tokens=asked.backend.max_model_len,
    )
    params = model.params_of(asked.params if not asked.only_warms else _WARMING, offer, prompt)
    params = gateway.within_room(asked.backend, params, len(prompt.token_ids))
    parsers = [model.parser_of(asked.params, offer, prompt) for _ in range(params.n)]
    if offer.is_forced:
        names = {**names, "grammar": "tools"}
    cache = asked.cache
    if prompt.breakpoints:
        cache = replace(cache or NO_CACHE_PARAMS, breakpoints=prompt.breakpoints)
    chunks = gateway.generate(
        caller, asked.backend, prompt.token_ids, params, cache=cache, names=names, is_whole=not asked.stream
    )
    report = gateway.cache_report(
        caller,
        asked.backend,
        cache,
        lambda: prompt_of(asked.backend.model_names[0], asked.conversation, prompt.token_ids),
        compared_with=asked.compared_with,
        stores=asked.stores,
        unplaced=prompt.unplaced,
    )
    return BegunConversation(prompt.token_ids, chunks, parsers, report, asked.only_warms)
