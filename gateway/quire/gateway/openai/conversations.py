"""A conversation's answer, as chat completions and responses generate it: chunks, with what their text has."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from quire.client.engine.caching import CacheParams
from quire.client.engine.outputs import Chunk
from quire.client.engine.sampling import SamplingParams
from quire.client.errors import QuireError
from quire.gateway.callers import Caller
from quire.gateway.chat.conversation import Conversation
from quire.gateway.chat.models import ChatModel, tokenizer_of
from quire.gateway.chat.tools import Event
from quire.gateway.chat.tools.answers import AnswerParser
from quire.gateway.errors import HttpError, http_error_of
from quire.gateway.gateway import Gateway
from quire.gateway.routing.backend import Backend


def chat_model_of(gateway: Gateway, backend: Backend) -> ChatModel:
    """Return the chat model of a backend."""
    assert gateway.chat_models is not None  # the gateway loads them before it listens
    return gateway.chat_models.of(backend)


@dataclass(frozen=True, slots=True)
class Piece:
    """The news of one sample: a chunk, and the reasoning, content and calls that were found in its text."""

    chunk: Chunk
    events: list[Event]


@dataclass(frozen=True, slots=True)
class ConversationRequest:
    """A request for an answer to a conversation, as it was read."""

    backend: Backend
    conversation: Conversation
    params: SamplingParams
    cache: CacheParams | None


async def begin(
    gateway: Gateway, caller: Caller, asked: ConversationRequest, *, names: Mapping[str, str]
) -> tuple[list[int], AsyncGenerator[Piece, None]]:
    """Return the tokens of a conversation, and the answers as they come. Raises HttpError.

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
    token_ids = prompt.token_ids
    return token_ids, _pieces(gateway, caller, asked, token_ids, params, parsers=parsers, names=names)


async def _pieces(
    gateway: Gateway,
    caller: Caller,
    asked: ConversationRequest,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    parsers: Sequence[AnswerParser],
    names: Mapping[str, str],
) -> AsyncGenerator[Piece, None]:
    """Answers as they come, sample i read by parser i. Raises HttpError."""
    try:
        chunks = gateway.generate(caller, asked.backend, prompt_token_ids, params, cache=asked.cache)
        async with aclosing(chunks):
            async for chunk in chunks:
                parser = parsers[chunk.index]
                events = parser.push(chunk.text)
                if chunk.finish_reason is not None:
                    events += parser.finish()
                yield Piece(chunk, events)
    except QuireError as error:
        raise _blaming(error, names) from error


def _blaming(error: QuireError, names: Mapping[str, str]) -> HttpError:
    """Return the HTTP answer for an error, with the field's name in the body."""
    answer = http_error_of(error)
    if answer.param is not None:
        answer.param = names.get(answer.param, answer.param)
    return answer
