"""A conversation's answer, as chat completions and responses generate it: chunks, with what their text has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.client.engine.caching import CacheParams
from quire.client.engine.outputs import Chunk
from quire.client.engine.sampling import SamplingParams
from quire.gateway.callers import Caller
from quire.gateway.chat.conversation import Conversation
from quire.gateway.chat.models import ChatModel, tokenizer_of
from quire.gateway.chat.tools import Event
from quire.gateway.chat.tools.answers import AnswerParser
from quire.gateway.gateway import Gateway
from quire.gateway.routing.backend import Backend, Chunks


def chat_model_of(gateway: Gateway, backend: Backend) -> ChatModel:
    """Return the chat model of a backend."""
    assert gateway.chat_models is not None  # the gateway loads them before it listens
    return gateway.chat_models.of(backend)


@dataclass(frozen=True, slots=True)
class ConversationRequest:
    """A request for an answer to a conversation, as it was read."""

    backend: Backend
    conversation: Conversation
    params: SamplingParams
    cache: CacheParams | None
    stream: bool


@dataclass(frozen=True, slots=True)
class BegunConversation:
    """A conversation while its answers are generated.

    chunks    of the answers; they raise HttpError
    parsers   the one of each sample
    """

    prompt_token_ids: list[int]
    chunks: Chunks
    parsers: Sequence[AnswerParser]

    def events_of(self, chunk: Chunk) -> list[Event]:
        """Return the reasoning, content and calls that were found in the text up to this chunk, the sample's next."""
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
    params = model.params_of(asked.params, offer, prompt)
    params = gateway.within_room(asked.backend, params, len(prompt.token_ids))
    parsers = [model.parser_of(asked.params, offer, prompt) for _ in range(params.n)]
    if offer.is_forced:
        names = {**names, "grammar": "tools"}
    chunks = gateway.generate(
        caller, asked.backend, prompt.token_ids, params, cache=asked.cache, names=names, is_whole=not asked.stream
    )
    return BegunConversation(prompt.token_ids, chunks, parsers)
