"""Log-probabilities of a prompt's tokens, while they come and as callers get them. Pure."""

from __future__ import annotations

from array import array
from collections import abc
from dataclasses import dataclass
from typing import overload

from quire.client.errors import ProtocolViolation


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one token, natural logarithm, of the model's own distribution.

    `top` are the most probable tokens with theirs, most probable first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprobs(abc.Sequence[TokenLogprobs | None]):
    """Log-probabilities of a prompt's tokens; None for the first one, which has no token before it. Packed.

    A step has those of some tokens, in any order of steps, perhaps more than once. Shared by a prompt's samples.
    """

    def __init__(self, token_ids: abc.Sequence[int], *, num_top: int) -> None:
        """num_top is how many of the most probable tokens are asked for."""
        self.num_top = num_top
        self._token_ids = array("i", token_ids)
        self._has = bytearray(len(token_ids))
        self._has[0] = True
        self._logprobs = array("f", bytes(4 * len(token_ids)))
        self._top: dict[int, tuple[array[int], array[float]]] = {}

    @property
    def is_complete(self) -> bool:
        """True if those of all tokens have come."""
        return 0 not in self._has

    def missing_after(self, start: int, count: int) -> array[int]:
        """The tokens that follow each of a run's, as far as the prompt goes; none if those of all of them have come."""
        first, end = start + 1, min(start + count + 1, len(self))
        return self._token_ids[first:end] if 0 in self._has[first:end] else array("i")

    def put(
        self,
        first: int,
        logprobs: abc.Sequence[float],
        top_token_ids: abc.Sequence[int],
        top_logprobs: abc.Sequence[float],
        *,
        top_count: int,
    ) -> None:
        """Take those of the tokens from position `first` on. Raises ProtocolViolation if the lists don't fit."""
        end = first + len(logprobs)
        is_whole = len(top_token_ids) == len(top_logprobs) == top_count * len(logprobs)
        if not is_whole or not 1 <= first <= end <= len(self) or not 0 <= top_count <= self.num_top:
            raise ProtocolViolation(f"log-probabilities of tokens {first} to {end - 1} of a prompt of {len(self)}")
        self._logprobs[first:end] = array("f", logprobs)
        self._has[first:end] = b"\1" * (end - first)
        for index in range(end - first):
            part = slice(index * top_count, (index + 1) * top_count)
            self._top[first + index] = array("i", top_token_ids[part]), array("f", top_logprobs[part])

    def __len__(self) -> int:
        """Return the number of the prompt's tokens."""
        return len(self._token_ids)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs | None: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TokenLogprobs | None, ...]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | tuple[TokenLogprobs | None, ...] | None:
        """Return the log-probabilities of one token or of several, by position."""
        positions = range(len(self))[index]
        if isinstance(positions, range):
            return tuple(map(self._of, positions))
        return self._of(positions)

    def _of(self, position: int) -> TokenLogprobs | None:
        if position == 0:
            return None
        token_ids, logprobs = self._top.get(position, ((), ()))
        top = tuple(zip(token_ids, logprobs, strict=True))
        return TokenLogprobs(self._token_ids[position], self._logprobs[position], top)
