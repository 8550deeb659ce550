"""An eviction policy, judged: its hits relative to LRU's, on many loads, pool sizes and sets of hashes.

Hashes differ by set, so a policy that samples by hash is judged on several samples. LRU's hits don't depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from quire.cachemgr._core import WrongVictims
from quire.cachemgr.eviction_interface import EvictionPolicy
from quire.lab.eviction_loads import BLOCK_SIZE, Kind, Load, Recipe
from quire.lab.policy_files import errors_of, eviction_policies, wrong_result
from quire.lab.processes import run_in_processes
from quire.lab.replay import Replay
from quire.lab.requests import Prompt

FIELD = "--policy"
MOST_RATIO = 2.0
"""The highest ratio that counts, for pools where LRU finds next to nothing."""
FITS_RATIO = 0.5
TURNOVERS = (2, 3, 4)


@dataclass(frozen=True, slots=True)
class Hits:
    """Hits among so many blocks: LRU's, and the policy's by set of hashes."""

    num_blocks: int
    lru: int
    own: tuple[int, ...]

    @property
    def ratios(self) -> list[float]:
        """Relative to LRU's, at most MOST_RATIO; 1 where neither finds anything."""
        return [_ratio(hits, self.lru) for hits in self.own]

    @property
    def mean(self) -> float:
        """The mean ratio over the sets of hashes."""
        return fmean(self.ratios)


@dataclass(frozen=True, slots=True)
class Pair:
    """A load in a pool. turnovers: after a change of phase, by number from 1 on; empty in loads without one.

    A turnover is a run of prompts that have, together, as many blocks as the pool.
    """

    load: str
    kind: Kind
    is_held_out: bool
    capacity: int
    hits: Hits
    turnovers: tuple[Hits, ...] = ()

    @property
    def title(self) -> str:
        """The load and the pool's size."""
        return f"{self.load}, in {self.capacity:,} blocks"


@dataclass(frozen=True, slots=True)
class Summary:
    """Of several pairs: the mean of their means, their lowest mean, and the lowest ratio of any set of hashes."""

    title: str
    num_pairs: int
    mean: float
    lowest_mean: float
    lowest: float

    @classmethod
    def of(cls, title: str, hits: Sequence[Hits]) -> Summary:
        """The summary of at least one pair."""
        means = [each.mean for each in hits]
        return cls(title, len(hits), fmean(means), min(means), min(min(each.ratios) for each in hits))


def _ratio(hits: int, lru: int) -> float:
    if lru == 0:
        return MOST_RATIO if hits else 1.0
    return min(MOST_RATIO, hits / lru)


# -- measured ---------------------------------------------------------------------------------------------------------


def judge(
    recipes: Sequence[Recipe],
    policy: str,
    folder: Path,
    *,
    num_hashes: int,
    jobs: int = 1,
    on_end: Callable[[], None] = lambda: None,
) -> list[Pair]:
    """Judge a policy, a name or "FILE.py:CLASS" relative to `folder`, on loads in all of their capacities.

    on_end is called after each load. Raises ConfigError.
    """
    eviction_policies(policy, folder, field=FIELD)
    if jobs == 1 or len(recipes) == 1:
        judged = []
        for recipe in recipes:
            judged.append(judge_load(recipe, policy, folder, num_hashes))
            on_end()
    else:
        tasks = [(recipe, policy, folder, num_hashes) for recipe in recipes]
        judged = run_in_processes(judge_load, tasks, jobs, lambda _: on_end())
    return [pair for pairs in judged for pair in pairs]


def judge_load(recipe: Recipe, policy: str, folder: Path, num_hashes: int) -> list[Pair]:
    """A load in each of its capacities. Raises ConfigError."""
    load, make = recipe.load(), eviction_policies(policy, folder, field=FIELD)
    pairs = []
    for capacity in load.capacities():
        lru = _replay(load.prompts, capacity, "lru")
        own = [_replay_own(load.prompts, capacity, make, policy, folder, number) for number in range(num_hashes)]
        pairs.append(_pair_of(recipe, load, capacity, lru, own))
    return pairs


def _replay_own(
    prompts: list[Prompt],
    capacity: int,
    make: Callable[[int], str | EvictionPolicy],
    choice: str,
    folder: Path,
    number: int,
) -> list[int]:
    policy = make(capacity + 1)
    with errors_of(choice, folder):
        try:
            return _replay(prompts, capacity, policy, b"%d" % number)
        except WrongVictims as error:
            raise wrong_result(choice, folder, policy, "evict", str(error)) from None


def _replay(prompts: list[Prompt], capacity: int, policy: str | EvictionPolicy, salt: bytes = b"") -> list[int]:
    """Hits by prompt."""
    replay = Replay(capacity, block_size=BLOCK_SIZE, policy=policy, salt=salt)
    return [replay.serve(prompt) for prompt in prompts]


def _pair_of(recipe: Recipe, load: Load, capacity: int, lru: list[int], own: list[list[int]]) -> Pair:
    sizes = [min(capacity, len(prompt.block_ids)) for prompt in load.prompts]

    def hits(part: slice) -> Hits:
        return Hits(sum(sizes[part]), sum(lru[part]), tuple(sum(each[part]) for each in own))

    parts = [] if load.change is None else turnovers_of(sizes, load.change, capacity)
    after = tuple(hits(part) for part in parts[: TURNOVERS[-1]])
    return Pair(recipe.name, recipe.kind, recipe.is_held_out, capacity, hits(slice(None)), after)


def turnovers_of(sizes: Sequence[int], first: int, capacity: int) -> list[slice]:
    """The whole turnovers from prompt `first` on: prompts that have at least `capacity` blocks together."""
    ends, num_blocks = [first], 0
    for index in range(first, len(sizes)):
        num_blocks += sizes[index]
        if num_blocks >= capacity:
            ends.append(index + 1)
            num_blocks = 0
    return [slice(begin, end) for begin, end in pairwise(ends)]


# -- summaries --------------------------------------------------------------------------------------------------------


def by_kind(pairs: Iterable[Pair]) -> list[Summary]:
    """A summary for each kind of load, and one of all."""
    pairs = list(pairs)
    titled = [(kind.value, [pair.hits for pair in pairs if pair.kind is kind]) for kind in Kind]
    titled.append(("all", [pair.hits for pair in pairs]))
    return [Summary.of(title, hits) for title, hits in titled if hits]


def worst(pairs: Iterable[Pair], count: int) -> list[Pair]:
    """Return the pairs with the lowest means."""
    return sorted(pairs, key=lambda pair: pair.hits.mean)[:count]


def after_changes(pairs: Iterable[Pair]) -> list[Summary]:
    """By turnover after a change of phase: of all pairs, and of those where LRU finds half, because the phase fits."""
    pairs = list(pairs)
    summaries = []
    for number in TURNOVERS:
        hits = [pair.turnovers[number - 1] for pair in pairs if len(pair.turnovers) >= number]
        fit = [each for each in hits if each.lru >= FITS_RATIO * each.num_blocks]
        titled = ((f"turnover {number}", hits), (f"turnover {number}, where LRU finds half", fit))
        summaries += [Summary.of(title, each) for title, each in titled if each]
    return summaries
