"""One request of a load, or only the blocks of its prompt. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from quire.lab.tokens import Content

TRACE_STREAMS = 2**31
"""Streams below are blocks of traces."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and its answer.

    content      the tokens of the prompt, then those of the answer
    at_s         the arrival; with `after`, seconds from the end of that request
    after        the number of the request before it in its conversation, if it is sent when that one has ended
    session      requests of one conversation have the same number
    """

    content: Content
    num_prompt: int
    num_output: int
    at_s: float
    session: int
    tenant: str = ""
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as blocks: its tokens, and the ids of its full blocks; an id stands for the prefix up to its block."""

    num_tokens: int
    block_ids: list[int]
