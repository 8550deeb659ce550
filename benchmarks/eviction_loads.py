"""The loads on which eviction policies are judged: recorded traces, whole and rearranged, and made ones.

A load is a list of prompts, each a list of block ids; an id stands for the whole prefix up to its block. The same on
every machine. A third of the loads is held out: the policy's constants were chosen without them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from zlib import crc32

import numpy as np
from replay import Request, expectations, load

from quire.client.lab.sessions import KINDS, Sessions, make_sessions

LEAST_BLOCKS = 60
"""Of a pool: several prompts of most loads."""

LAB_BLOCK_SIZE = 16
MADE_REQUESTS = 2500


@dataclass(frozen=True, slots=True)
class Load:
    """Requests with block size 1: a prompt has a token for each block, and one more if all of them can be found."""

    name: str
    requests: list[Request]

    @property
    def is_held_out(self) -> bool:
        """True for about a third, by name."""
        return crc32(self.name.encode()) % 3 == 0

    def capacities(self) -> list[int]:
        """Pools from LEAST_BLOCKS, or the longest tenth of the prompts, to about the load's different blocks."""
        num_unique = len({block for request in self.requests for block in request.block_ids})
        sizes = (60, 150, 300, 600, 1000, 1800, 3000, 5000, 10_000, 20_000)
        lengths = sorted(len(request.block_ids) for request in self.requests)
        least = lengths[len(lengths) * 9 // 10]
        return [size for size in sizes if least <= size < num_unique * 1.3]


Prompts = Iterable[list[int]]


def all_loads() -> Iterator[Load]:
    """Each of them, made when it is its turn."""
    recorded = {name.partition("_")[0] + "_" + name.split("_")[1].partition(".")[0]: name for name in expectations()}
    traces = {short: _recorded(name) for short, name in recorded.items()}
    for name, requests in traces.items():
        half = len(requests) // 2
        yield Load(name, requests)
        yield Load(f"{name}: first half", requests[:half])
        yield Load(f"{name}: second half", requests[half:])
        yield Load(f"{name}: every second", requests[::2])
        yield Load(f"{name}: halves swapped", requests[half:] + requests[:half])
        yield Load(f"{name}: sessions shuffled", _shuffled_by_session(requests))
    conversation, tools, agents, chats = list(traces)
    pairs = [(conversation, tools), (tools, conversation), (agents, chats), (chats, agents)]
    pairs += [(conversation, chats), (agents, conversation), (tools, agents)]
    for names in [*pairs, (conversation, tools, agents, chats), (chats, agents, tools, conversation)]:
        parts = _disjoint([traces[name] for name in names])
        yield Load(" then ".join(names), [request for part in parts for request in part])
    for names in [*pairs[::2], (conversation, tools, agents, chats)]:
        yield Load(" beside ".join(names), _interleaved(_disjoint([traces[name] for name in names])))
    for names in (pairs[0], pairs[2], pairs[4]):
        quarters = [
            [part[len(part) * each // 4 : len(part) * (each + 1) // 4] for each in range(4)]
            for part in _disjoint([traces[name] for name in names])
        ]
        yield Load(
            " and ".join(names) + ", by quarters",
            [request for each in range(4) for part in quarters for request in part[each]],
        )
    for (name, make), seed in ((made, seed) for made in MADE.items() for seed in (1, 2)):
        yield Load(f"{name}, seed {seed}", _made(make, seed))
    for first, second in _changes():
        parts = _disjoint([_made(MADE[first], 3)[: MADE_REQUESTS // 2], _made(MADE[second], 4)])
        yield Load(f"{first}, then {second}", [request for part in parts for request in part])


def _changes() -> Iterator[tuple[str, str]]:
    """Changes of phase between made loads of different kinds."""
    kinds = ["scan and hot", "chats far", "chats near", "recent", "loop of 300", "lab agents", "uniform", "lab chat"]
    for place, first in enumerate(kinds):
        for step in (1, 3, 6):
            yield first, kinds[(place + step) % len(kinds)]


# -- rearranged -------------------------------------------------------------------------------------------------------


def _recorded(name: str) -> list[Request]:
    size = expectations()[name]["block"]
    return [Request((request.num_tokens - 1) // size + 1, request.block_ids) for request in load(name)]


def _disjoint(parts: list[list[Request]]) -> list[list[Request]]:
    """The same with ids of their own."""
    moved, first = [], 0
    for part in parts:
        moved.append([Request(each.num_tokens, [block + first for block in each.block_ids]) for each in part])
        first += 1 + max(max(each.block_ids, default=0) for each in part)
    return moved


def _interleaved(parts: list[list[Request]]) -> list[Request]:
    """All of them, each spread evenly over the whole."""
    placed = [
        ((index + 0.5) / len(part), number, index) for number, part in enumerate(parts) for index in range(len(part))
    ]
    return [parts[number][index] for _, number, index in sorted(placed)]


def _shuffled_by_session(requests: list[Request]) -> list[Request]:
    """Sessions begin at other times; within a session the order and the distances stay.

    A prompt belongs to the session of the prompt that has its longest common part, if that is more than half of the
    earlier one.
    """
    generator = random.Random(5)
    owner: dict[int, tuple[int, int]] = {}
    starts: list[float] = []
    firsts: list[int] = []
    placed = []
    for number, request in enumerate(requests):
        known = [block for block in request.block_ids if block in owner]
        session, num_before = owner[known[-1]] if known else (-1, 0)
        if len(known) * 2 <= num_before or len(known) < 2:
            session = len(starts)
            starts.append(generator.uniform(0, len(requests)))
            firsts.append(number)
        for block in request.block_ids:
            owner[block] = (session, len(request.block_ids))
        placed.append((starts[session] + number - firsts[session], number))
    return [requests[number] for _, number in sorted(placed)]


# -- made -------------------------------------------------------------------------------------------------------------


def _made(make: Callable[[random.Random], Prompts], seed: int) -> list[Request]:
    """Prompts of named pieces, as chained ids."""
    ids: dict[tuple[int, int], int] = {}
    requests = []
    for prompt in make(random.Random(seed)):
        parent, chain = 0, []
        for piece in prompt:
            parent = ids.setdefault((parent, piece), len(ids) + 1)
            chain.append(parent)
        requests.append(Request(len(chain) + 1, chain))
    return requests


def _pieces(name: int, length: int) -> list[int]:
    return [name * 1000 + index for index in range(length)]


def _scan_and_hot(generator: random.Random) -> Iterator[list[int]]:
    """One of 20 hot prompts each fourth time, else a new one."""
    for number in range(MADE_REQUESTS):
        name = generator.randrange(20) if generator.random() < 0.25 else 1000 + number
        yield _pieces(name, 12 + name % 9)


def _system_prompts(generator: random.Random) -> Iterator[list[int]]:
    """Forty system prompts by a Zipf distribution, each with a tail of its own."""
    for number in range(MADE_REQUESTS):
        name = min(39, int(generator.paretovariate(0.8)) - 1)
        yield _pieces(name, 8 + name % 7) + _pieces(1000 + number, generator.randrange(2, 12))


def _loop(generator: random.Random, *, num_prompts: int) -> Iterator[list[int]]:
    lengths = [generator.randrange(2, 9) for _ in range(num_prompts)]
    for number in range(MADE_REQUESTS):
        yield _pieces(number % num_prompts, lengths[number % num_prompts])


def _two_loops(generator: random.Random) -> Iterator[list[int]]:
    """A loop of 400 prompts, then one of 30, four times."""
    for number in range(MADE_REQUESTS):
        is_small = number // (MADE_REQUESTS // 8) % 2
        yield _pieces(5000 + number % 30 if is_small else number % 400, 6)
    generator.random()


def _uniform(generator: random.Random) -> Iterator[list[int]]:
    for _ in range(MADE_REQUESTS):
        name = generator.randrange(200)
        yield _pieces(name, 4 + name % 13)


def _zipf(generator: random.Random) -> Iterator[list[int]]:
    weights = [1 / (rank + 1) for rank in range(1000)]
    for name in generator.choices(range(1000), weights, k=MADE_REQUESTS):
        yield _pieces(name, 3 + name % 11)


def _recent(generator: random.Random) -> Iterator[list[int]]:
    """Again one of the latest ones, the latest most often; or new."""
    stack: list[int] = []
    for number in range(MADE_REQUESTS):
        place = int(generator.expovariate(1 / 12))
        name = stack.pop(-1 - place) if place < len(stack) and generator.random() < 0.8 else number
        stack.append(name)
        yield _pieces(name, 4 + name % 9)


def _chats(generator: random.Random, *, num_open: int, most_turns: int, return_ratio: float) -> Iterator[list[int]]:
    """Sessions that grow: any of those open goes on, or a new one begins and the oldest ends."""
    lengths: list[tuple[int, int]] = []
    names = count(1)
    turns: dict[int, int] = {}
    for _ in range(MADE_REQUESTS):
        if lengths and generator.random() < return_ratio:
            name, length = lengths.pop(generator.randrange(len(lengths)))
        else:
            name, length = next(names), 0
        length += generator.randrange(2, 9)
        turns[name] = turns.get(name, 0) + 1
        if turns[name] < most_turns:
            lengths.append((name, length))
        if len(lengths) > num_open:
            lengths.pop(0)
        yield [1, 2, *_pieces(name, length)]


def _bursts(generator: random.Random) -> Iterator[list[int]]:
    """Each prompt several times in short distance, then never again."""
    waiting: list[tuple[float, int]] = []
    for number in range(MADE_REQUESTS // 4):
        waiting += [(number + generator.expovariate(0.1), number) for _ in range(4)]
    for _, name in sorted(waiting):
        yield _pieces(name, 5 + name % 12)


def _documents(generator: random.Random) -> Iterator[list[int]]:
    """A document of 60, with one of its 10 parts and a question."""
    for number in range(MADE_REQUESTS):
        name = min(generator.randrange(60), generator.randrange(60))
        yield _pieces(name, 20) + _pieces(100 + generator.randrange(10), 5) + _pieces(1000 + number, 2)


def _lab(kind: str, generator: random.Random) -> Iterator[list[int]]:
    """The laboratory's sessions, without queueing: a request ends when it arrives."""
    sessions = make_sessions(Sessions(**KINDS[kind]), MADE_REQUESTS, np.random.default_rng(generator.randrange(2**32)))
    times: list[float] = []
    for request in sessions:
        times.append(request.at_s + (0.0 if request.after is None else times[request.after]))
    names: dict[tuple[int, int], int] = {}
    for _, number in sorted(zip(times, range(len(times)), strict=True)):
        content = sessions[number].content
        prompt = content.cut(0, sessions[number].num_prompt // LAB_BLOCK_SIZE * LAB_BLOCK_SIZE)
        tokens = prompt.tokens().reshape(-1, LAB_BLOCK_SIZE)
        yield [names.setdefault((int(row[0]), int(row[-1])), len(names)) for row in tokens]


MADE: dict[str, Callable[[random.Random], Prompts]] = {
    "scan and hot": _scan_and_hot,
    "system prompts": _system_prompts,
    "loop of 12": partial(_loop, num_prompts=12),
    "loop of 60": partial(_loop, num_prompts=60),
    "loop of 300": partial(_loop, num_prompts=300),
    "two loops": _two_loops,
    "uniform": _uniform,
    "zipf": _zipf,
    "recent": _recent,
    "chats near": partial(_chats, num_open=8, most_turns=12, return_ratio=0.85),
    "chats middle": partial(_chats, num_open=60, most_turns=8, return_ratio=0.7),
    "chats far": partial(_chats, num_open=300, most_turns=8, return_ratio=0.5),
    "bursts": _bursts,
    "documents": _documents,
    "lab chat": partial(_lab, "chat"),
    "lab agents": partial(_lab, "agents"),
    "lab rag": partial(_lab, "rag"),
}
