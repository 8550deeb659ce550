"""Requests of agents, recorded and made, with the breakpoints that a client would put into them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.lab.requests import Request
from quire.lab.sessions import KINDS, Sessions, make_sessions
from quire.lab.traces import read_trace

BLOCK_SIZE = 16
TRACES = Path(__file__).parents[1] / "traces"
COMMON_REQUESTS, COMMON_SESSIONS = 10, 2
"""A prefix that so many requests of so many sessions have is taken for a system prompt with its tools."""
FIVE_MINUTES_S = 300.0

Breakpoints = Sequence[tuple[int, float]]
"""Tokens and seconds, the shorter ones first."""


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """A prompt. num_common: the tokens of its beginning that are a system prompt with its tools; 0: none is known."""

    at_s: float
    tokens: NDArray[np.int32]
    num_common: int

    def system(self) -> Breakpoints:
        """One at the end of the system prompt."""
        return [(self.num_common, FIVE_MINUTES_S)] if self.num_common else []

    def turns(self) -> Breakpoints:
        """And one at the end of the prompt, for the next turn."""
        return [*(each for each in self.system() if each[0] < len(self.tokens)), (len(self.tokens), FIVE_MINUTES_S)]


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts by time. num_blocks: different full blocks of all, the working set; longest: blocks of a prompt."""

    name: str
    asks: list[Ask]
    num_blocks: int
    longest: int


def recorded(name: str, most: int | None = None) -> Load:
    """A trace of benchmarks/traces, with its own times."""
    return _load(name.partition(".")[0], read_trace(TRACES / name, most=most))


def made(kind: str, seed: int, count: int) -> Load:
    """Sessions of the laboratory. A request ends when it arrives; the next one comes after the time to think."""
    requests = make_sessions(Sessions(**KINDS[kind]), count, np.random.default_rng(seed))
    return _load(f"made {kind}, seed {seed}", requests)


def new_prompts(count: int, num_tokens: int, every_s: float) -> list[Ask]:
    """Prompts that come once."""
    generator = np.random.default_rng(9)
    return [
        Ask(every_s * number, generator.integers(1, 2**31 - 2, num_tokens, dtype=np.int32), 0)
        for number in range(count)
    ]


def _load(name: str, requests: Sequence[Request]) -> Load:
    times: list[float] = []
    for request in requests:
        times.append(request.at_s + (0.0 if request.after is None else times[request.after]))
    prompts = [request.content.cut(0, request.num_prompt).tokens() for request in requests]
    chains = [list(_chain(prompt)) for prompt in prompts]
    counts: dict[int, int] = defaultdict(int)
    sessions: dict[int, set[int]] = defaultdict(set)
    for request, chain in zip(requests, chains, strict=True):
        for block in chain:
            counts[block] += 1
            if len(sessions[block]) < COMMON_SESSIONS:
                sessions[block].add(request.session)

    def is_common(block: int) -> bool:
        return counts[block] >= COMMON_REQUESTS and len(sessions[block]) >= COMMON_SESSIONS

    commons = [BLOCK_SIZE * sum(map(is_common, chain)) for chain in chains]
    asks = sorted(map(Ask, times, prompts, commons), key=lambda ask: ask.at_s)
    return Load(name, asks, len(counts), 1 + max(map(len, chains)))


def _chain(prompt: NDArray[np.int32]) -> Iterator[int]:
    """A number for each full block, which stands for the whole prefix up to its end."""
    parent = 0
    for start in range(0, len(prompt) - BLOCK_SIZE + 1, BLOCK_SIZE):
        parent = hash((parent, prompt[start : start + BLOCK_SIZE].tobytes()))
        yield parent
