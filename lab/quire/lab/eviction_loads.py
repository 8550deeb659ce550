"""The loads on which eviction policies are judged: recorded traces, whole and rearranged, and made ones.

A load is a list of prompts, each a list of block ids; an id stands for the whole prefix up to its block. The loads
are the same on every machine. A third of the loads is held out: the constants of `lineage` were chosen without them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import count
from pathlib import Path
from zlib import crc32

import numpy as np

from quire.lab.errors import ConfigError
from quire.lab.requests import Prompt
from quire.lab.sessions import KINDS, Sessions, make_sessions
from quire.lab.traces import read_prompts

LEAST_BLOCKS = 60
"""Of a pool: several prompts of most loads."""

LAB_BLOCK_SIZE = 16
MADE_PROMPTS = 2500
BLOCK_SIZE = 2
"""The least with which a replay's tail of one token is a partial block."""
_SIZES = (60, 150, 300, 600, 1000, 1800, 3000, 5000, 10_000, 20_000)
# Of the traces' numbers, when they are put one after another; every second one also beside each other.
_PAIRS = ((0, 1), (1, 0), (2, 3), (3, 2), (0, 3), (2, 0), (1, 2))


class Kind(StrEnum):
    """The way that a load is made."""

    WHOLE = "whole traces"
    PART = "parts of traces"
    SHUFFLED = "sessions shuffled"
    AFTER = "one after another"
    BESIDE = "beside each other"
    MADE = "made"
    CHANGE = "changes of phase"


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts with block size BLOCK_SIZE: full blocks, and a token more if all of them can be found.

    change    the index of the prompt with which another phase begins; None in a load without phases
    """

    name: str
    kind: Kind
    prompts: list[Prompt]
    change: int | None = None

    def capacities(self) -> list[int]:
        """Pools from LEAST_BLOCKS, or the longest tenth of the prompts, to about the load's different blocks."""
        num_unique = len({block for prompt in self.prompts for block in prompt.block_ids})
        lengths = sorted(len(prompt.block_ids) for prompt in self.prompts)
        least = lengths[len(lengths) * 9 // 10]
        return [size for size in _SIZES if least <= size < num_unique * 1.3]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A load that is not made yet. `make` returns its parts: the prompts of each phase, or all in one."""

    name: str
    kind: Kind
    make: Callable[[], list[list[Prompt]]]

    @property
    def is_held_out(self) -> bool:
        """True for about a third, by name."""
        return crc32(self.name.encode()) % 3 == 0

    def load(self) -> Load:
        """Make it. Raises ConfigError if a trace can't be read."""
        parts = self.make()
        change = len(parts[0]) if self.kind is Kind.CHANGE else None
        return Load(self.name, self.kind, [prompt for part in parts for prompt in part], change)


Prompts = Iterable[list[int]]


def recipes(traces: Sequence[Path]) -> list[Recipe]:
    """All loads of these traces, in this order, and the made ones."""
    return [*_recorded_recipes(traces), *_made_recipes()]


def choose_recipes(folder: Path | None, pattern: str) -> list[Recipe]:
    """The loads of the traces in a folder, if there is one, and made ones, by name. Raises ConfigError."""
    chosen = [each for each in recipes([] if folder is None else _traces_in(folder)) if fnmatchcase(each.name, pattern)]
    if not chosen:
        raise ConfigError.of_field("--loads", pattern, "the name of a load, with * for any characters, as 'lab *'")
    return chosen


def _traces_in(folder: Path) -> list[Path]:
    """Return the traces of a folder, those with large blocks first."""
    files = sorted(path for path in folder.iterdir() if path.name.endswith((".jsonl", ".jsonl.gz")))
    if not files:
        raise ConfigError.of_field("--traces", str(folder), "a folder with files *.jsonl or *.jsonl.gz")
    return sorted(files, key=lambda path: -read_prompts(path)[0])


def _recorded_recipes(traces: Sequence[Path]) -> Iterator[Recipe]:
    names = ["_".join(path.name.partition(".")[0].split("_")[:2]) for path in traces]
    if len(set(names)) < len(names):
        names = [path.name.partition(".")[0] for path in traces]
    for name, path in zip(names, traces, strict=True):
        yield Recipe(name, Kind.WHOLE, partial(_part, path, slice(None)))
        for half, part in (("first half", _first_half), ("second half", _second_half)):
            yield Recipe(f"{name}: {half}", Kind.PART, partial(part, path))
        yield Recipe(f"{name}: every second", Kind.PART, partial(_part, path, slice(None, None, 2)))
        yield Recipe(f"{name}: halves swapped", Kind.PART, partial(_halves_swapped, path))
        yield Recipe(f"{name}: sessions shuffled", Kind.SHUFFLED, partial(_shuffled_by_session, path))
    everyone = tuple(range(len(traces)))
    pairs = [pair for pair in _PAIRS if max(pair) < len(traces)]

    def of(kind: Kind, way: str, make: Callable[..., list[list[Prompt]]], numbers: Sequence[int]) -> Recipe:
        name = way.join(names[number] for number in numbers) + (", by quarters" if make is _by_quarters else "")
        return Recipe(name, kind, partial(make, *(traces[number] for number in numbers)))

    several = [everyone] if len(traces) > 2 else []
    for numbers in [*pairs, *several, *(each[::-1] for each in several)]:
        yield of(Kind.AFTER, " then ", _one_after_another, numbers)
    for numbers in [*pairs[::2], *several]:
        yield of(Kind.BESIDE, " beside ", _beside, numbers)
    for numbers in pairs[:6:2]:
        yield of(Kind.AFTER, " and ", _by_quarters, numbers)


def _made_recipes() -> Iterator[Recipe]:
    for name in MADE:
        for seed in (1, 2):
            yield Recipe(f"{name}, seed {seed}", Kind.MADE, partial(_made_alone, name, seed))
    kinds = ["scan and hot", "chats far", "chats near", "recent", "loop of 300", "lab agents", "uniform", "lab chat"]
    for place, first in enumerate(kinds):
        for step in (1, 3, 6):
            second = kinds[(place + step) % len(kinds)]
            yield Recipe(f"{first}, then {second}", Kind.CHANGE, partial(_change, first, second))


# -- rearranged -------------------------------------------------------------------------------------------------------


@cache
def _read(path: Path) -> list[Prompt]:
    """A trace's prompts, with block size BLOCK_SIZE."""
    size, prompts = read_prompts(path)
    return [Prompt((prompt.num_tokens - 1) // size * BLOCK_SIZE + 1, prompt.block_ids) for prompt in prompts]


def _part(path: Path, part: slice) -> list[list[Prompt]]:
    return [_read(path)[part]]


def _first_half(path: Path) -> list[list[Prompt]]:
    prompts = _read(path)
    return [prompts[: len(prompts) // 2]]


def _second_half(path: Path) -> list[list[Prompt]]:
    prompts = _read(path)
    return [prompts[len(prompts) // 2 :]]


def _halves_swapped(path: Path) -> list[list[Prompt]]:
    return [*_second_half(path), *_first_half(path)]


def _one_after_another(*paths: Path) -> list[list[Prompt]]:
    return _disjoint([_read(path) for path in paths])


def _beside(*paths: Path) -> list[list[Prompt]]:
    return [_interleaved(_one_after_another(*paths))]


def _by_quarters(*paths: Path) -> list[list[Prompt]]:
    parts = _one_after_another(*paths)
    return [part[len(part) * each // 4 : len(part) * (each + 1) // 4] for each in range(4) for part in parts]


def _disjoint(parts: list[list[Prompt]]) -> list[list[Prompt]]:
    """Return the parts with ids of their own, so that no two parts share a block."""
    moved, first = [], 0
    for part in parts:
        moved.append([Prompt(each.num_tokens, [block + first for block in each.block_ids]) for each in part])
        first += 1 + max(max(each.block_ids, default=0) for each in part)
    return moved


def _interleaved(parts: list[list[Prompt]]) -> list[Prompt]:
    """All of them, each spread evenly over the whole."""
    placed = [
        ((index + 0.5) / len(part), number, index) for number, part in enumerate(parts) for index in range(len(part))
    ]
    return [parts[number][index] for _, number, index in sorted(placed)]


def _shuffled_by_session(path: Path) -> list[list[Prompt]]:
    """Sessions begin at other times; within a session the order and the distances stay.

    A prompt belongs to the session of the prompt that has its longest common part, if that is more than half of the
    earlier one.
    """
    prompts = _read(path)
    generator = random.Random(5)
    owner: dict[int, tuple[int, int]] = {}
    starts: list[float] = []
    firsts: list[int] = []
    placed = []
    for number, prompt in enumerate(prompts):
        known = [block for block in prompt.block_ids if block in owner]
        session, num_before = owner[known[-1]] if known else (-1, 0)
        if len(known) * 2 <= num_before or len(known) < 2:
            session = len(starts)
            starts.append(generator.uniform(0, len(prompts)))
            firsts.append(number)
        for block in prompt.block_ids:
            owner[block] = (session, len(prompt.block_ids))
        placed.append((starts[session] + number - firsts[session], number))
    return [[prompts[number] for _, number in sorted(placed)]]


# -- made -------------------------------------------------------------------------------------------------------------


def _made(name: str, seed: int) -> list[Prompt]:
    """Prompts of named pieces, as chained ids."""
    ids: dict[tuple[int, int], int] = {}
    prompts = []
    for prompt in MADE[name](random.Random(seed)):
        parent, chain = 0, []
        for piece in prompt:
            parent = ids.setdefault((parent, piece), len(ids) + 1)
            chain.append(parent)
        prompts.append(Prompt(len(chain) * BLOCK_SIZE + 1, chain))
    return prompts


def _made_alone(name: str, seed: int) -> list[list[Prompt]]:
    return [_made(name, seed)]


def _change(first: str, second: str) -> list[list[Prompt]]:
    return _disjoint([_made(first, 3)[: MADE_PROMPTS // 2], _made(second, 4)])


def _pieces(name: int, length: int) -> list[int]:
    return [name * 1000 + index for index in range(length)]


def _scan_and_hot(generator: random.Random) -> Iterator[list[int]]:
    """One of 20 hot prompts each fourth time, else a new one."""
    for number in range(MADE_PROMPTS):
        name = generator.randrange(20) if generator.random() < 0.25 else 1000 + number
        yield _pieces(name, 12 + name % 9)


def _system_prompts(generator: random.Random) -> Iterator[list[int]]:
    """Forty system prompts by a Zipf distribution, each with a tail of its own."""
    for number in range(MADE_PROMPTS):
        name = min(39, int(generator.paretovariate(0.8)) - 1)
        yield _pieces(name, 8 + name % 7) + _pieces(1000 + number, generator.randrange(2, 12))


def _loop(generator: random.Random, *, num_prompts: int) -> Iterator[list[int]]:
    lengths = [generator.randrange(2, 9) for _ in range(num_prompts)]
    for number in range(MADE_PROMPTS):
        yield _pieces(number % num_prompts, lengths[number % num_prompts])


def _two_loops(_: random.Random) -> Iterator[list[int]]:
    """A loop of 400 prompts, then one of 30, four times."""
    for number in range(MADE_PROMPTS):
        is_small = number // (MADE_PROMPTS // 8) % 2
        yield _pieces(5000 + number % 30 if is_small else number % 400, 6)


def _uniform(generator: random.Random) -> Iterator[list[int]]:
    for _ in range(MADE_PROMPTS):
        name = generator.randrange(200)
        yield _pieces(name, 4 + name % 13)


def _zipf(generator: random.Random) -> Iterator[list[int]]:
    weights = [1 / (rank + 1) for rank in range(1000)]
    for name in generator.choices(range(1000), weights, k=MADE_PROMPTS):
        yield _pieces(name, 3 + name % 11)


def _recent(generator: random.Random) -> Iterator[list[int]]:
    """Again one of the latest ones, the latest most often; or new."""
    stack: list[int] = []
    for number in range(MADE_PROMPTS):
        place = int(generator.expovariate(1 / 12))
        name = stack.pop(-1 - place) if place < len(stack) and generator.random() < 0.8 else number
        stack.append(name)
        yield _pieces(name, 4 + name % 9)


def _chats(generator: random.Random, *, num_open: int, most_turns: int, return_ratio: float) -> Iterator[list[int]]:
    """Sessions that grow: any of those open goes on, or a new one begins and the oldest ends."""
    lengths: list[tuple[int, int]] = []
    names = count(1)
    turns: dict[int, int] = {}
    for _ in range(MADE_PROMPTS):
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
    for number in range(MADE_PROMPTS // 4):
        waiting += [(number + generator.expovariate(0.1), number) for _ in range(4)]
    for _, name in sorted(waiting):
        yield _pieces(name, 5 + name % 12)


def _documents(generator: random.Random) -> Iterator[list[int]]:
    """A document of 60, with one of its 10 parts and a question."""
    for number in range(MADE_PROMPTS):
        name = min(generator.randrange(60), generator.randrange(60))
        yield _pieces(name, 20) + _pieces(100 + generator.randrange(10), 5) + _pieces(1000 + number, 2)


def _lab(kind: str, generator: random.Random) -> Iterator[list[int]]:
    """The laboratory's sessions, without queueing: a request ends when it arrives."""
    sessions = make_sessions(Sessions(**KINDS[kind]), MADE_PROMPTS, np.random.default_rng(generator.randrange(2**32)))
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
