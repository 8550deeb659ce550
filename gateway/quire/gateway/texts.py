"""Texts and token ids of requests, encoded and decoded without holding up the event loop."""

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from quire.client.engine.tokenizer import Tokenizer
from quire.client.errors import InvalidRequest
from quire.gateway.errors import invalid

LONG_TEXT = 4096
"""Characters, or tokens, of all texts of a call together. A thread takes more: the event loop must not be blocked."""
MAX_COUNTED_CHARACTERS = 2**20
_NUM_THREADS = 2

Result = TypeVar("Result")


class ShortestFirst:
    """Threads for long texts. The shortest is next: the long texts of one caller do not keep out those of others."""

    def __init__(self, num_threads: int) -> None:
        """Start the threads with the first call."""
        self._num_threads = num_threads
        self._numbers = itertools.count()
        self._waiting: queue.PriorityQueue[tuple[int, int, Callable[[], None]]] = queue.PriorityQueue()

    async def run(self, length: int, function: Callable[[], Result]) -> Result:
        """Return the function's result, or raise its exception."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def work() -> None:
            if future.cancelled():
                return
            try:
                found, error = function(), None
            except Exception as raised:
                found, error = None, raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, found, error)

        number = next(self._numbers)
        self._waiting.put((length, number, work))
        if number < self._num_threads:
            threading.Thread(target=self._work, name=f"quire-texts-{number}", daemon=True).start()
        return await future

    def _work(self) -> None:
        while True:
            self._waiting.get()[2]()


_threads = ShortestFirst(_NUM_THREADS)


async def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool = True
) -> list[list[int]]:
    """Return the tokens of each text."""
    length = sum(map(len, texts))
    if length <= LONG_TEXT:
        return tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
    return await _threads.run(length, lambda: tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens))


async def encode_text(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Return the text's tokens."""
    return (await encode_texts(tokenizer, [text], add_special_tokens=add_special_tokens))[0]


async def encode_ordinary(tokenizer: Tokenizer, parts: Sequence[str]) -> list[int]:
    """Return the tokens of a text in parts, of which every second one is ordinary: see Tokenizer.encode_parts."""
    return await _threads.run(sum(map(len, parts)), lambda: tokenizer.encode_parts(parts))


async def encode_to_places(
    tokenizer: Tokenizer, parts: Sequence[str], prefixes: Sequence[Sequence[str]]
) -> tuple[list[int], list[int]]:
    """Return the tokens of a text in parts, and of each prefix: see Tokenizer.encode_to_places."""
    return await _threads.run(sum(map(len, parts)), lambda: tokenizer.encode_to_places(parts, prefixes))


def tokenizer_for(path: str, tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer for a field's text. Raises HttpError if there is none."""
    if tokenizer is None:
        raise invalid(path, "text", "token ids, since there is no tokenizer")
    return tokenizer


def check_length(path: str, num_characters: int, tokenizer: Tokenizer, *, max_tokens: int) -> None:
    """Raise InvalidRequest for a text of a length that has more tokens than fit, whatever they are. Cost: none."""
    least = tokenizer.least_tokens(num_characters)
    if least > max_tokens:
        found = f"{num_characters} characters, which are at least {least} tokens"
        raise InvalidRequest.of_field(path, found, f"at most {max_tokens} tokens", reason="SEQUENCE_TOO_LONG")


def check_countable(path: str, text: str, tokenizer: Tokenizer, *, max_tokens: int) -> None:
    """Raise InvalidRequest for a text that is too long to be tokenized for its tokens alone.

    A text that surely does not fit into the model may have MAX_COUNTED_CHARACTERS.
    """
    if len(text) > MAX_COUNTED_CHARACTERS and tokenizer.least_tokens(len(text)) > max_tokens:
        limit = f"at most {MAX_COUNTED_CHARACTERS} characters, or a text that may fit into the model"
        raise InvalidRequest.of_field(path, f"{len(text)} characters", limit)


async def decode_tokens(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Return the tokens' text."""
    if len(token_ids) <= LONG_TEXT:
        return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    return await _threads.run(
        len(token_ids), lambda: tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    )
