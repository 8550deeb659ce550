"""Made requests: conversations, agents, and questions about documents. Pure.

docs/how-to/lab.md describes the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import numpy as np

from quire.lab.errors import ConfigError
from quire.lab.requests import Request
from quire.lab.tokens import Content

_SYSTEM_STREAMS, _DOCUMENT_STREAMS, _SESSION_STREAMS = 0, 2**20, 2**30


@dataclass(frozen=True, slots=True)
class Sessions:
    """The parameters. Lengths are means of log-normal distributions with the parameter `spread`.

    rate                   sessions a second, at random times (Poisson)
    turns                  mean number of requests of a session (geometric)
    think_s                mean time from an answer to the next request (exponential)
    system_prompts         different ones, chosen at random by session
    system_tokens          of each, at the beginning of a prompt
    documents              different ones; 0: none
    documents_per_request  after the system prompt, in the order in which they are drawn
    document_tokens        of each
    popularity             exponent of the Zipf distribution by which documents are drawn; 0: all alike
    first_tokens           of a session's first question
    turn_tokens            of each later one: a question, the results of a tool
    output_tokens          of an answer
    spread                 standard deviation of the logarithm of a length
    most_tokens            a session ends before a request that would have more, answer included
    """

    rate: float
    turns: float = 1.0
    think_s: float = 10.0
    system_prompts: int = 1
    system_tokens: int = 0
    documents: int = 0
    documents_per_request: int = 0
    document_tokens: int = 0
    popularity: float = 1.0
    first_tokens: float = 200.0
    turn_tokens: float = 100.0
    output_tokens: float = 200.0
    spread: float = 0.8
    most_tokens: int = 32_768

    def __post_init__(self) -> None:
        limits = {
            "rate": (1e-6, 1e6), "turns": (1, 1e4), "think_s": (0, 1e6), "system_prompts": (1, 2**20),
            "system_tokens": (0, 2**20), "documents": (0, 2**20), "documents_per_request": (0, 1000),
            "document_tokens": (0, 2**20), "popularity": (0, 10), "first_tokens": (1, 1e6), "turn_tokens": (1, 1e6),
            "output_tokens": (1, 1e6), "spread": (0, 3), "most_tokens": (16, 2**24),
        }  # fmt: skip
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise ConfigError.of_field(f"load.sessions.{name}", getattr(self, name), f"{low:.12g} to {high:.12g}")
        if bool(self.documents) != bool(self.documents_per_request):
            limit = "above 0 with documents, and 0 without"
            raise ConfigError.of_field("load.sessions.documents_per_request", self.documents_per_request, limit)


KINDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "chat": {
            "rate": 1.0, "turns": 5, "think_s": 30, "system_prompts": 4, "system_tokens": 600, "first_tokens": 200,
            "turn_tokens": 80, "output_tokens": 250,
        },
        "agents": {
            "rate": 0.2, "turns": 15, "think_s": 2, "system_prompts": 4, "system_tokens": 3000, "first_tokens": 800,
            "turn_tokens": 600, "output_tokens": 120,
        },
        "rag": {
            "rate": 2.0, "turns": 1, "system_tokens": 200, "documents": 1000, "documents_per_request": 4,
            "document_tokens": 500, "first_tokens": 40, "output_tokens": 150,
        },
    }
)  # fmt: skip
"""The defaults of each kind of load. They are chosen to be plausible, and are measured nowhere."""


def make_sessions(given: Sessions, count: int, generator: np.random.Generator) -> list[Request]:
    """At least one request, and `count` at most: sessions by arrival, each as long as it is."""
    requests: list[Request] = []
    at_s, session = 0.0, 0
    while len(requests) < count:
        at_s += float(generator.exponential(1 / given.rate))
        turns = list(_turns(given, session, generator))
        for turn, (content, num_prompt, num_output, think_s) in enumerate(turns[: count - len(requests)]):
            after = len(requests) - 1 if turn else None
            requests.append(Request(content, num_prompt, num_output, think_s if turn else at_s, session, after=after))
        session += 1
        if session > 100 * count + 1000:
            raise ConfigError.of_field("load.sessions.most_tokens", given.most_tokens, "room for a first request")
    return requests


def _turns(given: Sessions, session: int, generator: np.random.Generator) -> Iterator[tuple[Content, int, int, float]]:
    """Content, tokens of the prompt and of the answer, and time to think before, for each request of a session."""
    system = int(generator.integers(given.system_prompts))
    shared = [(_SYSTEM_STREAMS + system, 0, given.system_tokens)]
    shared += [(_DOCUMENT_STREAMS + each, 0, given.document_tokens) for each in _documents(given, generator)]
    num_shared, num_said = sum(count for *_, count in shared), 0
    for turn in range(int(generator.geometric(1 / given.turns))):
        num_asked = _length(given.turn_tokens if turn else given.first_tokens, given.spread, generator)
        num_output = _length(given.output_tokens, given.spread, generator)
        think_s = float(generator.exponential(given.think_s)) if given.think_s else 0.0
        num_own = num_said + num_asked + num_output
        if num_shared + num_own > given.most_tokens:
            return
        content = Content.of([*shared, (_SESSION_STREAMS + session, 0, num_own)])
        yield content, num_shared + num_said + num_asked, num_output, think_s
        num_said = num_own


def _documents(given: Sessions, generator: np.random.Generator) -> list[int]:
    if not given.documents:
        return []
    weights = np.arange(1, given.documents + 1, dtype=float) ** -given.popularity
    count = min(given.documents_per_request, given.documents)
    chosen: list[int] = generator.choice(given.documents, count, replace=False, p=weights / weights.sum()).tolist()
    return chosen


def _length(mean: float, spread: float, generator: np.random.Generator) -> int:
    return max(1, round(float(generator.lognormal(np.log(mean) - spread**2 / 2, spread))))


def fields_of_sessions() -> list[str]:
    """The names of the parameters."""
    return [field.name for field in fields(Sessions)]
