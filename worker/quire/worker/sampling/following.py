"""A compiled grammar, and a sequence that follows it token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

import numpy as np
from llguidance import LLMatcher

from quire.worker.sampling.grammar_trial import describe
from quire.worker.sampling.threads import Work

Bits = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
"""A mask, [W] or [n, W]: bit i of byte j is token 8 j + i."""


class Aside(Protocol):
    """Takes masks that are late for their steps."""

    def adopt(self, following: Following, bits: Bits, work: Work, *, tokens: Sequence[int]) -> None:
        """Keep the mask behind these tokens when it is made."""


@dataclass(slots=True, eq=False)
class Compiled:
    """A grammar's matcher at the beginning of a text, to be copied.

    aside       takes the grammar's late masks; None: they are lost
    is_slow     True if a token took too long to check
    aside_s     seconds of a processor that masks made aside have taken
    """

    matcher: LLMatcher
    end_token_ids: frozenset[int]
    aside: Aside | None = None
    is_slow: bool = False
    aside_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class ReadyMask:
    """The mask of the token at a position, made before the step that samples it."""

    position: int
    bits: Bits


@dataclass(slots=True)
class Following:
    """A sequence that follows a grammar.

    begins_at   position of its first generated token
    tokens      generated tokens as far as they are known, from there on
    consumed    how many of these the matcher has taken; it takes no end token, nor tokens after one
    has_ended   True if an end token is among those of the last advance()
    error       the reason why it can't be followed any more; "" if it can
    ready       a mask that need not be made
    is_costly   True if its last mask took longer than a step waits: the next one is made aside
    """

    compiled: Compiled
    matcher: LLMatcher
    begins_at: int
    tokens: list[int] = field(default_factory=list)
    consumed: int = 0
    has_ended: bool = False
    error: str = ""
    ready: ReadyMask | None = None
    is_costly: bool = False

    @classmethod
    def begin(cls, compiled: Compiled, *, begins_at: int, tokens: Sequence[int] = ()) -> Following:
        """Return one that has taken none of these tokens yet."""
        return cls(compiled, compiled.matcher.deep_copy(), begins_at, list(tokens))

    def fork(self, *, begins_at: int | None = None) -> Following:
        """Return a copy for another sequence, which may continue from an earlier token, or begin elsewhere."""
        return Following(
            self.compiled,
            self.matcher.deep_copy(),
            self.begins_at if begins_at is None else begins_at,
            list(self.tokens),
            self.consumed,
            error=self.error,
            ready=self.ready if begins_at is None else None,
            is_costly=self.is_costly,
        )

    def tokens_with(self, start: int, token_ids: Sequence[int]) -> list[int]:
        """Return the generated tokens up to the end of a run from position `start` on; changes nothing."""
        return self.tokens[: max(0, start - self.begins_at)] + list(token_ids[max(0, self.begins_at - start) :])

    def run(self, start: int, token_ids: Sequence[int]) -> None:
        """Record tokens that run from position `start` on."""
        new = list(token_ids[max(0, self.begins_at - start) :])
        offset = max(0, start - self.begins_at)
        if new and offset <= len(self.tokens) and self.tokens[offset : offset + len(new)] != new:
            self._truncate(offset)
            self.tokens += new

    def advance(self, position: int) -> bool:
        """Let the matcher take the tokens before a position. Returns True if the grammar restricts the next token."""
        num_tokens = position - self.begins_at
        if num_tokens < 0:
            return False
        if num_tokens > len(self.tokens):
            self.error = self.error or f"not all generated tokens before position {position} are known"
            return True
        self._truncate(num_tokens)
        if not self.error:
            self._consume(self.tokens[self.consumed :])
        return True

    def has_ready(self, position: int) -> bool:
        """True if the mask of the token at this position need not be made."""
        return self.ready is not None and self.ready.position == position

    def write_mask(self, position: int, bits: Bits) -> None:
        """Write the tokens that are allowed at a position, after advance(), into bits [W], which is all 0.

        Nothing is written if the text has ended, or for an error, which is then in `error`.
        """
        if self.error or self.has_ended:
            return
        if self.ready is not None and self.ready.position == position:
            bits[:] = self.ready.bits
            return
        self.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self.matcher.is_error():
            self.error = describe(self.matcher.get_error())
        elif not bits.any():
            self.error = "no token can continue the text"

    def _consume(self, new: list[int]) -> None:
        text = list(takewhile(lambda token: token not in self.compiled.end_token_ids, new))
        num_taken = self.matcher.try_consume_tokens(text)
        self.consumed += num_taken
        self.has_ended = len(text) < len(new)
        if num_taken < len(text) or (self.has_ended and not self.matcher.is_accepting()):
            at = self.begins_at + self.consumed
            self.error = describe(self.matcher.get_error()) or f"the token at position {at} does not match"

    def _truncate(self, num_tokens: int) -> None:
        """Forget all generated tokens but the first num_tokens."""
        if self.ready is not None and self.ready.position > self.begins_at + num_tokens:
            self.ready = None
        if self.consumed > num_tokens:
            if not self.matcher.rollback(self.consumed - num_tokens):
                self.error = self.error or describe(self.matcher.get_error())
            self.consumed = num_tokens
        del self.tokens[num_tokens:]
