"""What is given up first of the blocks that nobody holds but that could be found again.

`Lru` gives up what was used longest ago. `Lineage` learns how long each kind of prefix is worth keeping:

1. The cache is a tree of prefixes. A segment is a run of blocks that were always used together: a conversation is one
   segment that grows, and is cut in two where a prompt leaves it. Each use of a segment is an event; the gap to its
   next use is counted in blocks that were allocated meanwhile. Segments that were evicted stay known for a while by
   the hash of their first block, so that gaps longer than a stay in the cache are counted too.
2. Events fall into classes: how often the segment was used, and the last gap; for new ones the size, and whether they
   continue something. Each class has a histogram of gaps, and all of them fade.
3. Keeping a class for a time T brings F(T) hits per block and takes B(T) = integral of 1 - F block-times. Which T is
   best for each class, if all has to fit in the pool, is a fractional knapsack over the concave hulls of (B, F): take
   the steepest pieces until the pool is full. The last piece is taken for a fraction of the segments.
4. T is one of ten, each with an LRU list of its own; the victim is the list head whose time ends first. A segment's
   list is never one with a shorter time than a descendant's, and it is used no earlier; so its time ends no earlier,
   and chains go leaf first whatever was learned.
5. Where the plan is not clearly better, every segment gets the same T: that is LRU, exactly. Clearly: predicted to be,
   and shown to be on events that came after it was made.

Sources: TTL caches as utility maximisation (Dehghan et al., INFOCOM 2016), hit density (LHD, NSDI 2018), ghosts (ARC,
FAST 2003). Time is counted in blocks; nothing is random.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from quire.cachemgr.geometry import Blocks

NULL_BLOCK = 0
UNKNOWN = 0
"""The segment of a block without content, and the key of a segment whose first hash nobody told."""


class EvictionPolicy(Protocol):
    """Keeps the parked blocks: findable, and held by nobody. Each method's cost is O(1) per block it is given."""

    def admit(self, found: Sequence[int], fresh: Blocks, hashes: Sequence[bytes] = ()) -> None:
        """A sequence begins: `found` are its blocks with known content, in table order, `fresh` those that continue
        them. `hashes` are the prefix hashes of its full blocks, from the first one on."""

    def park(self, block_ids: Blocks) -> None:
        """Nobody holds these any more; they can be given up from now on. Children come before their parents."""

    def unpark(self, block_ids: Blocks) -> None:
        """In use again, or dropped: no longer to be given up."""

    def forget(self, block_ids: Blocks) -> None:
        """Free, and without content: released before they were computed, or dropped. They are not parked."""

    def evict(self, count: int) -> list[int]:
        """Gives up `count` of the parked blocks, children before their parents. There have to be as many."""

    def __len__(self) -> int:
        """How many blocks are parked."""

    def __iter__(self) -> Iterator[int]:
        """The parked blocks, each once."""


class Rings:
    """Doubly linked rings of blocks in two flat arrays, a ring for each sentinel: a node that stays."""

    def __init__(self, num_nodes: int) -> None:
        self._next = array("i", range(num_nodes))
        self._prev = array("i", range(num_nodes))
        self._all_next = np.frombuffer(self._next, np.int32)  # the same memory, for many nodes at once
        self._all_prev = np.frombuffer(self._prev, np.int32)

    def append(self, nodes: Blocks, sentinel: int) -> None:
        """Puts nodes that are in no ring at the end of one."""
        first, last, before = nodes.item(0), nodes.item(-1), self._prev[sentinel]
        self._all_next[nodes[:-1]] = nodes[1:]
        self._all_prev[nodes[1:]] = nodes[:-1]
        self._next[before], self._prev[first] = first, before
        self._next[last], self._prev[sentinel] = sentinel, last

    def remove(self, nodes: Blocks) -> None:
        """Takes nodes out, wherever they are. What was appended together, last one first, goes in one piece."""
        nodes = nodes[::-1]
        starts = (self._all_next[nodes[:-1]] != nodes[1:]).nonzero()[0] + 1
        after, before = self._next, self._prev
        firsts, lasts = nodes[[0, *starts]].tolist(), nodes[[*(starts - 1), -1]].tolist()
        for first, last in zip(firsts, lasts, strict=True):
            left, right = before[first], after[last]
            after[left], before[right] = right, left

    def take(self, sentinel: int, count: int) -> list[int]:
        """Takes out the first `count` nodes of a ring, which has as many."""
        after, taken = self._next, []
        node = after[sentinel]
        for _ in range(count):
            taken.append(node)
            node = after[node]
        after[sentinel], self._prev[node] = node, sentinel
        return taken

    def take_alike(self, sentinel: int, count: int, labels: array[int]) -> list[int]:
        """Takes out the first nodes of a ring as far as they have the first one's label, at most `count`."""
        after, taken = self._next, []
        node = after[sentinel]
        label = labels[node]
        for _ in range(count):
            if labels[node] != label:
                break
            taken.append(node)
            node = after[node]
        after[sentinel], self._prev[node] = node, sentinel
        return taken

    def first(self, sentinel: int) -> int:
        """The first node of a ring; the sentinel if there is none."""
        return self._next[sentinel]

    def nodes(self, sentinel: int) -> Iterator[int]:
        """The nodes of a ring; ends after as many as there can be, should the ring be broken."""
        node = self._next[sentinel]
        for _ in range(len(self._next)):
            if node == sentinel:
                return
            yield node
            node = self._next[node]


class Lru:
    """The least recently parked first. 8 bytes per block."""

    def __init__(self, num_blocks: int) -> None:
        self._ring = Rings(num_blocks)  # the null block is its sentinel
        self._num_parked = 0

    def admit(self, found: Sequence[int], fresh: Blocks, hashes: Sequence[bytes] = ()) -> None:
        """No effect."""

    def forget(self, block_ids: Blocks) -> None:
        """No effect."""

    def park(self, block_ids: Blocks) -> None:
        """Appends to the ring."""
        if len(block_ids):
            self._ring.append(block_ids, NULL_BLOCK)
            self._num_parked += len(block_ids)

    def unpark(self, block_ids: Blocks) -> None:
        """Takes out of the ring, wherever they are."""
        if len(block_ids):
            self._ring.remove(block_ids)
            self._num_parked -= len(block_ids)

    def evict(self, count: int) -> list[int]:
        """Takes the ring's head."""
        self._num_parked -= count
        return self._ring.take(NULL_BLOCK, count)

    def __len__(self) -> int:
        return self._num_parked

    def __iter__(self) -> Iterator[int]:
        """Least recently parked first."""
        return self._ring.nodes(NULL_BLOCK)


NUM_TIMES = 10
BASE_TIME = 5
"""The place of T = the pool's blocks among the times 0, 1/16, 1/8 ... 16 pools: what everybody gets under LRU."""

NUM_CLASSES = 19
FIRST_REUSED_CLASS = 4
MOST_USES = 5
SMALL_SEGMENT = 8  # blocks


def class_of_new(num_blocks: int, *, continues: bool) -> int:
    """The class of a segment's first use."""
    return 2 * continues + (num_blocks > SMALL_SEGMENT)


def class_of_reused(num_uses: int, gap_place: int) -> int:
    """The class of a later use: the second, third to fourth, or beyond; and the last gap."""
    return FIRST_REUSED_CLASS + 5 * ((num_uses > 2) + (num_uses >= MOST_USES)) + min(gap_place // 2, 4)


class Choice(NamedTuple):
    """The time that a class is kept: `low`, or `high` for `share` of its segments. Places in the list of times."""

    low: int
    high: int
    share: float


class Curve(NamedTuple):
    """A class: events per block of time, and for each T the hits F and the block-times B that an event brings."""

    rate: float
    hits: list[float]
    held: list[float]


class Piece(NamedTuple):
    """A step up a class's hull: hits per block-time, the class, the place it leads to, the blocks it takes."""

    density: float
    event_class: int
    place: int
    num_blocks: float


PRIOR_EVENTS = 8
"""Events of the mean class that each class starts with."""

FADE = 0.97
"""What is left of all counts from plan to plan."""

TRIAL_FADE = 0.9
"""The same for what the plan was shown to gain: a plan that has gone bad is to be left soon."""

LEAST_PERIOD, MOST_PERIOD = 32, 128  # admissions from plan to plan: the most, unless before that
POOL_SHARE_OF_PERIOD = 1 / 16  # of the pool's blocks were allocated

SHOWN_DEVIATIONS = 1.5
LEAST_PREDICTED_GAIN = 1.03
LEAST_SHOWN_GAIN = 0.02
REMEMBERED_ADMISSIONS = 1000


class RetentionPlanner:
    """Learns from the gaps how long each class is worth keeping. A plan takes some 0.2 ms, whatever the pool's size."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.times = [0.0] + [num_blocks * 2.0 ** (place - BASE_TIME) for place in range(1, NUM_TIMES)]
        self.is_trusted = False
        self.plan: list[Choice] | None = None
        self._returned = [[0.0] * (NUM_TIMES + 1) for _ in range(NUM_CLASSES)]  # blocks by class and place of the gap
        self._used = [0.0] * NUM_CLASSES  # blocks by class, when used
        self._elapsed = 0.0  # blocks allocated meanwhile
        self._evicted = 0.0
        self._parked_evicted = 0.0  # sum over evicted blocks of how many were parked
        self._lru_time = float(num_blocks)
        self._lru_hits = 0.0  # since there is a plan: blocks that LRU would have kept,
        self._gain = 0.0  # what the plan would have kept more,
        self._gain_squares = 0.0  # and the sum of that squared, by admission
        self._admission_gain = 0.0
        self._num_admissions = 0
        self._since_plan = 0
        self._last_clock = 0

    def place(self, gap: int) -> int:
        """The first of the times that is as long as the gap; NUM_TIMES if none is."""
        if gap <= 0:
            return 0
        return min(((gap * 16 - 1) // self.num_blocks).bit_length() + 1, NUM_TIMES)

    def enter_use(self, event_class: int, weight: int) -> None:
        """A segment of `weight` blocks was used."""
        self._used[event_class] += weight

    def enter_return(self, event_class: int, gap: int, weight: int, *, found: int, planned: int) -> int:
        """It was used again, with `found` of `weight` blocks still there. Returns the place of the gap.

        `planned` is the place of the time the plan had for it, -1 without a plan. A plan that is followed is judged by
        what was found, another by what it promised.
        """
        place = self.place(gap)
        self._returned[event_class][place] += weight
        if planned >= 0:
            lru_hits = weight if gap <= self._lru_time else 0
            self._lru_hits += lru_hits
            promised = weight if place <= planned else 0
            self._admission_gain += (found if self.is_trusted else promised) - lru_hits
        return place

    def enter_eviction(self, count: int, num_parked: int) -> None:
        """`count` blocks were evicted, `num_parked` stay."""
        self._evicted += count
        self._parked_evicted += count * num_parked

    def end_admission(self, clock: int) -> None:
        """Closes the books of an admission; makes a new plan when it is time to."""
        gain, self._admission_gain = self._admission_gain, 0.0
        self._gain += gain
        self._gain_squares += gain * gain
        self._num_admissions += 1
        self._since_plan += 1
        elapsed = clock - self._last_clock
        period = LEAST_PERIOD if elapsed >= self.num_blocks * POOL_SHARE_OF_PERIOD else MOST_PERIOD
        if self._since_plan >= period:
            self._since_plan = 0
            self._last_clock = clock
            self._elapsed += elapsed
            if self._elapsed >= self.num_blocks / 2:
                self._make_plan()
            else:
                self.is_trusted = False
            self._fade(FADE)

    def _make_plan(self) -> None:
        room = self._parked_evicted / self._evicted if self._evicted else float(self.num_blocks)
        curves = self._curves()
        self.plan = plan_retention(curves, room)
        planned = sum(map(planned_hits, curves, self.plan))
        lru_hits, self._lru_time = hits_of_one_time(curves, self.times, room)
        self.is_trusted = (
            planned >= LEAST_PREDICTED_GAIN * lru_hits
            and self._gain > SHOWN_DEVIATIONS * self._gain_squares**0.5
            and self._gain >= LEAST_SHOWN_GAIN * self._lru_hits
        )

    def _curves(self) -> list[Curve]:
        """Each class's gaps, drawn towards the mean of all classes by PRIOR_EVENTS events of mean size."""
        total = sum(self._used)
        mean = [sum(column) / total for column in zip(*self._returned, strict=True)]
        prior = PRIOR_EVENTS * total / min(self._num_admissions, REMEMBERED_ADMISSIONS)
        curves = []
        for used, returned in zip(self._used, self._returned, strict=True):
            hits, held = 0.0, 0.0
            curve = Curve(used / self._elapsed, [], [])
            for place in range(NUM_TIMES):
                more = min(1.0, hits + (returned[place] + prior * mean[place]) / (used + prior))
                if place:
                    held += (self.times[place] - self.times[place - 1]) * (1 - (hits + more) / 2)
                hits = more
                curve.hits.append(hits)
                curve.held.append(held)
            curves.append(curve)
        return curves

    def _fade(self, factor: float) -> None:
        for event_class, returned in enumerate(self._returned):
            self._used[event_class] *= factor
            self._returned[event_class] = [weight * factor for weight in returned]
        self._elapsed *= factor
        self._evicted *= factor
        self._parked_evicted *= factor
        self._lru_hits *= TRIAL_FADE
        self._gain *= TRIAL_FADE
        self._gain_squares *= TRIAL_FADE * TRIAL_FADE


def hull(curve: Curve) -> list[int]:
    """Places of the times that the concave hull of (held, hits) goes through, from the first on."""
    places: list[int] = []
    for place, (held, hits) in enumerate(zip(curve.held, curve.hits, strict=True)):
        while len(places) >= 2:
            a, b = places[-2], places[-1]
            rise, run = curve.hits[b] - curve.hits[a], curve.held[b] - curve.held[a]
            if (hits - curve.hits[b]) * run < rise * (held - curve.held[b]):
                break
            places.pop()
        if len(places) == 1 and held <= curve.held[places[0]]:
            places.pop()
        places.append(place)
    return places


def plan_retention(curves: list[Curve], room: float) -> list[Choice]:
    """The times that bring most hits, if `room` blocks can be kept."""
    plan, pieces = [], []
    for event_class, curve in enumerate(curves):
        places = hull(curve)
        plan.append(Choice(places[0], places[0], 0.0))
        for low, high in pairwise(places):
            hits, held = curve.hits[high] - curve.hits[low], curve.held[high] - curve.held[low]
            if hits > 0:
                pieces.append(Piece(hits / held, event_class, high, curve.rate * held))
    pieces.sort(key=lambda piece: (-piece.density, piece.event_class, piece.place))
    for piece in pieces:
        kept = plan[piece.event_class].low
        if piece.num_blocks > room:
            plan[piece.event_class] = Choice(kept, piece.place, room / piece.num_blocks)
            break
        plan[piece.event_class] = Choice(piece.place, piece.place, 0.0)
        room -= piece.num_blocks
    return plan


def planned_hits(curve: Curve, choice: Choice) -> float:
    """Hits per block of time that a choice brings."""
    return curve.rate * ((1 - choice.share) * curve.hits[choice.low] + choice.share * curve.hits[choice.high])


def hits_of_one_time(curves: list[Curve], times: list[float], room: float) -> tuple[float, float]:
    """Hits per block of time if all classes are kept equally long, as under LRU, and how long that is."""
    last_hits = last_held = 0.0
    for place, time in enumerate(times):
        hits = sum([curve.rate * curve.hits[place] for curve in curves])
        held = sum([curve.rate * curve.held[place] for curve in curves])
        if held >= room and place:
            share = (room - last_held) / (held - last_held)
            return last_hits + (hits - last_hits) * share, times[place - 1] + (time - times[place - 1]) * share
        last_hits, last_held = hits, held
    return last_hits, times[-1]


class Ghost(NamedTuple):
    """What is kept of an evicted segment."""

    used_at: int
    event_class: int
    num_blocks: int
    num_uses: int
    planned: int
    is_forked: bool


class Segments:
    """Runs of blocks that were used together; parallel arrays by segment number, numbers are used again."""

    def __init__(self) -> None:
        self.start = array("i", [0])  # index of its first block in a table
        self.num_blocks = array("i", [0])  # that bear its number
        self.num_evicted = array("i", [0])  # from its end, since it was used last
        self.used_at = array("q", [0])
        self.parked_at = array("q", [0])
        self.key = array("q", [UNKNOWN])  # of its first block
        self.num_uses = array("B", [0])  # MOST_USES stands for more, too
        self.event_class = array("B", [0])
        self.place = array("B", [0])  # of the time it is kept
        self.planned = array("b", [-1])  # the place that the plan had for it when it was used
        self.is_forked = array("B", [0])  # a prompt left its end, or it was cut there: what comes next is another's
        self._unused: list[int] = []

    def new(self, start: int, key: int) -> int:
        """A segment without blocks."""
        if self._unused:
            number = self._unused.pop()
            self.num_evicted[number] = self.parked_at[number] = self.is_forked[number] = 0
        else:
            number = len(self.start)
            for column in self._columns():
                column.append(0)
        self.start[number] = start
        self.key[number] = key
        return number

    def cut(self, number: int, end: int) -> int:
        """A new segment, without blocks yet, for those of this one before index `end`; this one keeps the others."""
        upper = self.new(self.start[number], UNKNOWN)
        for column in self._columns():
            column[upper] = column[number]
        self.num_blocks[upper] = self.num_evicted[upper] = 0
        self.is_forked[upper] = 1
        self.start[number] = end
        self.key[number] = UNKNOWN
        return upper

    def remove(self, number: int) -> None:
        """It has no blocks any more."""
        self._unused.append(number)

    def __len__(self) -> int:
        return len(self.start) - 1 - len(self._unused)

    def _columns(self) -> tuple[array[int], ...]:
        return (
            *(self.start, self.num_blocks, self.num_evicted, self.used_at, self.parked_at, self.key),
            *(self.num_uses, self.event_class, self.place, self.planned, self.is_forked),
        )


KEY_BYTES = 7
LEAST_GHOSTS = 4096
BLOCKS_PER_GHOST = 32
MIX = 2654435761
"""Knuth's multiplier: spreads keys before a share of them is chosen."""


def key_of(hashes: Sequence[bytes], index: int) -> int:
    """A number for the block at an index of the table; UNKNOWN if its hash is not given."""
    return int.from_bytes(hashes[index][:KEY_BYTES], "little") if index < len(hashes) else UNKNOWN


class Lineage:
    """Keeps each kind of prefix as long as it is worth. 12 bytes per block, 41 per segment, and the ghosts.

    Costs do not depend on the pool's size. `admit` is O(segments of the prompt), and O(1) per fresh block and per block
    of a segment that is cut. A block without a segment (nobody told of its admission) takes its parent's.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._rings = Rings(num_blocks + NUM_TIMES + 1)  # one per time; the last nodes are their sentinels,
        self._unknown_ring = num_blocks + NUM_TIMES  # the very last for blocks that nothing is known of
        self._segment_of = array("i", bytes(4 * num_blocks) + b"\xff" * 4 * (NUM_TIMES + 1))  # a sentinel's is none: -1
        self._segments_of: npt.NDArray[np.int32] = np.frombuffer(self._segment_of, np.int32)  # the same memory
        self._segments = Segments()
        self._planner = RetentionPlanner(max(1, num_blocks - 1))
        self._ghosts: dict[int, Ghost] = {}
        self._most_ghosts = max(LEAST_GHOSTS, num_blocks // BLOCKS_PER_GHOST)
        self._sampling = 0  # segments whose key has these bits set are not observed: there would be too many ghosts
        self._clock = 0  # blocks allocated
        self._num_parked = 0

    # -- uses -----------------------------------------------------------------------------------------------------

    def admit(self, found: Sequence[int], fresh: Blocks, hashes: Sequence[bytes] = ()) -> None:
        """Enters a use of each segment on the path, and a segment for what continues them."""
        now = self._clock
        self._clock = now + len(fresh)
        path = self._path(found, hashes)
        classes = [self._return(segment, now) for segment in path]
        begun: list[int] = []
        if len(fresh):
            if path and not self._segments.is_forked[path[0]]:
                self._label(fresh, path[0])
            else:
                begun, begun_classes = self._begin(fresh, len(found), hashes, now)
                classes = begun_classes + classes
        place = 0
        num_uncounted = int(0 < len(hashes) < len(found) + len(fresh))  # the partial tail, which can't be found
        for segment, event_class in zip(begun + path, classes, strict=True):
            place = max(place, self._segments.place[segment], self._use(segment, event_class, num_uncounted))
            self._segments.place[segment] = place
            num_uncounted = 0
        self._planner.end_admission(self._clock)

    def _path(self, found: Sequence[int], hashes: Sequence[bytes]) -> list[int]:
        """The segments of the blocks, the last one first. One that goes on elsewhere is cut."""
        segments, path, end = self._segments, [], len(found)
        while end:
            segment = self._segment_of[found[end - 1]] or self._adopt(found, end)
            start = min(segments.start[segment], end - 1)
            if start + segments.num_blocks[segment] > end:
                upper = segments.cut(segment, end)
                self._label(found[start:end], upper)
                segment = upper
            if segments.key[segment] == UNKNOWN:
                segments.key[segment] = key_of(hashes, start)
            path.append(segment)
            end = start
        return path

    def _adopt(self, found: Sequence[int], end: int) -> int:
        """Gives blocks without a segment their parent's, or one of their own."""
        start = end - 1
        while start and not self._segment_of[found[start - 1]]:
            start -= 1
        segment = self._segment_of[found[start - 1]] if start else self._segments.new(0, UNKNOWN)
        self._label(found[start:end], segment)
        return segment

    def _begin(self, fresh: Blocks, start: int, hashes: Sequence[bytes], now: int) -> tuple[list[int], list[int]]:
        """Makes segments of blocks that continue nothing or a fork: as they were when evicted, where that is known.

        Returns them and their classes, the last one first.
        """
        begun, classes, first = [], [], 0
        while first < len(fresh):
            key = key_of(hashes, start + first)
            ghost = self._ghosts.pop(key, None)
            end = min(first + ghost.num_blocks, len(fresh)) if ghost and ghost.is_forked else len(fresh)
            segment = self._segments.new(start + first, key)
            self._label(fresh[first:end], segment)
            self._segments.num_uses[segment] = 1
            self._segments.place[segment] = 0
            begun.append(segment)
            is_new = class_of_new(end - first, continues=start > 0)
            classes.append(self._revive(segment, ghost, now) if ghost else is_new)
            first = end
        return begun[::-1], classes[::-1]

    def _revive(self, segment: int, ghost: Ghost, now: int) -> int:
        """An evicted segment is back; returns its class."""
        segments = self._segments
        weight = min(ghost.num_blocks, segments.num_blocks[segment]) * (self._sampling + 1)
        gap = now - ghost.used_at
        place = self._planner.enter_return(ghost.event_class, gap, weight, found=0, planned=ghost.planned)
        num_uses = segments.num_uses[segment] = min(ghost.num_uses + 1, MOST_USES)
        segments.is_forked[segment] = ghost.is_forked
        return class_of_reused(num_uses, place)

    def _return(self, segment: int, now: int) -> int:
        """A segment that is in the cache was found; returns its class from now on."""
        segments, planner = self._segments, self._planner
        gap = now - segments.used_at[segment]
        if self._is_observed(segment):
            found = segments.num_blocks[segment] * (self._sampling + 1)
            weight = found + segments.num_evicted[segment] * (self._sampling + 1)
            planned = segments.planned[segment]
            planner.enter_return(segments.event_class[segment], gap, weight, found=found, planned=planned)
        segments.num_evicted[segment] = 0
        num_uses = segments.num_uses[segment] = min(segments.num_uses[segment] + 1, MOST_USES)
        return class_of_reused(num_uses, planner.place(gap))

    def _use(self, segment: int, event_class: int, num_uncounted: int) -> int:
        """Enters a use of all blocks but `num_uncounted`; returns the place of the time it is worth keeping."""
        segments, planner = self._segments, self._planner
        segments.used_at[segment] = self._clock
        segments.event_class[segment] = event_class
        if self._is_observed(segment):
            weight = segments.num_blocks[segment] - num_uncounted
            planner.enter_use(event_class, weight * (self._sampling + 1))
        if planner.plan is None:
            segments.planned[segment] = -1
            return BASE_TIME
        low, high, share = planner.plan[event_class]
        is_high = (segments.key[segment] * MIX >> 8) & 0xFFFF < share * 0x10000
        planned = segments.planned[segment] = high if is_high else low
        return planned if planner.is_trusted else BASE_TIME

    def _is_observed(self, segment: int) -> bool:
        return not self._sampling or not (self._segments.key[segment] or 1) & self._sampling

    # -- blocks ---------------------------------------------------------------------------------------------------

    def park(self, block_ids: Blocks) -> None:
        """Appends each to the ring of its segment's time."""
        if not len(block_ids):
            return
        segments_of = self._segments_of[block_ids]
        if np.count_nonzero(segments_of) < len(block_ids):
            segments_of = self._adopt_parked(block_ids)
        ends = [*((segments_of[1:] != segments_of[:-1]).nonzero()[0] + 1).tolist(), len(block_ids)]
        start = 0
        for end in ends:
            segment = segments_of.item(start)
            self._segments.parked_at[segment] = self._clock
            ring = self._num_blocks + self._segments.place[segment] if segment else self._unknown_ring
            self._rings.append(block_ids[start:end], ring)
            start = end
        self._num_parked += len(block_ids)

    def _adopt_parked(self, block_ids: Blocks) -> npt.NDArray[np.int32]:
        """Gives blocks that came while a sequence ran the segment of the next one: their parent's. All segments."""
        segment, orphans = UNKNOWN, 0
        for index in range(len(block_ids) - 1, -1, -1):
            block_id = block_ids.item(index)
            if self._segment_of[block_id]:
                segment = self._segment_of[block_id]
            elif segment:
                self._segment_of[block_id] = segment
                self._segments.num_blocks[segment] += 1
                orphans += 1
        self._clock += orphans
        return self._segments_of[block_ids]

    def unpark(self, block_ids: Blocks) -> None:
        """Takes out of the rings, wherever they are."""
        if len(block_ids):
            self._rings.remove(block_ids)
            self._num_parked -= len(block_ids)

    def forget(self, block_ids: Blocks) -> None:
        """They leave their segments."""
        self._label(block_ids, UNKNOWN)

    def evict(self, count: int) -> list[int]:
        """Takes the head whose time ends first, and what follows it of the same segment, until there are enough."""
        self._num_parked -= count
        self._planner.enter_eviction(count, self._num_parked)
        victims: list[int] = []
        while len(victims) < count:
            ring = self._first_to_end()
            segment = self._segment_of[self._rings.first(ring)]
            taken = self._rings.take_alike(ring, count - len(victims), self._segment_of)
            victims += taken
            if segment != UNKNOWN:
                self._segments_of[taken] = UNKNOWN
                self._lose(segment, len(taken))
        return victims

    def _first_to_end(self) -> int:
        """The ring whose head's time ends first; of equal ones the longest time's, the child's."""
        rings, num_blocks = self._rings, self._num_blocks
        first = self._unknown_ring
        if rings.first(first) != first:
            return first
        parked_at, times, earliest = self._segments.parked_at, self._planner.times, float("inf")
        for place in range(NUM_TIMES - 1, -1, -1):
            head = rings.first(num_blocks + place)
            if head < num_blocks:
                end = parked_at[self._segment_of[head]] + times[place]
                if end < earliest:
                    first, earliest = num_blocks + place, end
        return first

    def _lose(self, segment: int, count: int) -> None:
        """The last `count` blocks of the segment were evicted."""
        segments = self._segments
        segments.num_blocks[segment] -= count
        segments.num_evicted[segment] += count
        if not segments.num_blocks[segment]:
            if segments.key[segment] != UNKNOWN and self._is_observed(segment):
                self._remember(segment)
            segments.remove(segment)

    def _remember(self, segment: int) -> None:
        segments, ghosts = self._segments, self._ghosts
        ghosts[segments.key[segment]] = Ghost(
            segments.used_at[segment],
            segments.event_class[segment],
            segments.num_evicted[segment],
            segments.num_uses[segment],
            segments.planned[segment],
            bool(segments.is_forked[segment]),
        )
        if len(ghosts) > self._most_ghosts:
            oldest = ghosts.pop(next(iter(ghosts)))
            if self._clock - oldest.used_at < 4 * self._num_blocks:
                self._sampling = self._sampling * 2 + 1

    def _label(self, block_ids: Sequence[int] | Blocks, segment: int) -> None:
        """Moves blocks to a segment."""
        blocks = np.asarray(block_ids, np.int64)
        if segment != UNKNOWN:
            self._segments.num_blocks[segment] += len(blocks)
        olds = self._segments_of[blocks]
        if np.count_nonzero(olds):
            for old in olds.tolist():
                if old:
                    self._leave(old)
        self._segments_of[blocks] = segment

    def _leave(self, segment: int) -> None:
        segments = self._segments
        segments.num_blocks[segment] -= 1
        if not segments.num_blocks[segment]:
            segments.remove(segment)

    def __len__(self) -> int:
        return self._num_parked

    def __iter__(self) -> Iterator[int]:
        """The longest time last; within one, least recently parked first."""
        for place in (NUM_TIMES, *range(NUM_TIMES)):
            yield from self._rings.nodes(self._num_blocks + place)


POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {"lineage": Lineage, "lru": Lru}
"""By name; the first is the default."""

DEFAULT_POLICY = next(iter(POLICIES))


def make_policy(name: str, num_blocks: int) -> EvictionPolicy:
    """A policy for blocks 1 to num_blocks - 1. Raises KeyError if there is none of the name."""
    return POLICIES[name](num_blocks)
