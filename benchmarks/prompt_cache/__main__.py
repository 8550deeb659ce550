"""Breakpoints of prompts: what they save, what they cost other tenants, and what an admission with them takes.

    quire bench prompt-cache

Requests of agents, recorded (benchmarks/traces) and made, go through cachemgr's books one at a time, at their own
times: under LRU, under the default policy without breakpoints, with a breakpoint at the end of the system prompt, and
with a second one at the end of each prompt. Pools have 10, 25 and 50 % of the working set, or
room for the longest prompt if that is more. Counts are exact. A
breakpoint keeps for five minutes; a tenant keeps at most a quarter of the pool, as without settings.

The traces have no breakpoints. They are put where a client would: the system prompt with its tools is the longest
prefix that 10 requests of 2 sessions have; in a trace without sessions each request is one. An answer is not in the
books: the next turn computes it as a part of its prompt, in all ways. The time to the first token is virtual: that of
one step on an H200 with 8 billion parameters which computes what was not found, without a queue.

An admission's cost is cachemgr's processor time for it beside gRPC, in a full pool.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from admission import NUM_BREAKPOINTS, Cost, measure_cost
from keeping import Pool
from loads import BLOCK_SIZE, Ask, Breakpoints, Load, made, new_prompts, recorded
from matplotlib import pyplot
from matplotlib.figure import Figure
from report import Findings, benchmark, percent, plain, table
from rich.progress import Progress

from quire.cachemgr._core import DEFAULT_POLICY
from quire.lab.step_times import PRESETS

PARTS_OF_SET = (0.10, 0.25, 0.50)
STEP = PRESETS["h200-8b"].time
OTHERS, KEEPER = "others", "keeper"
HOUR_S = 3600.0
TO_REACH = 1.10
ROOM_EVERY = 20
"""Requests of the keeper between two looks at the room that a floor guarantees."""


def _none(_: Ask) -> Breakpoints:
    return ()


WAYS: Mapping[str, tuple[str, Callable[[Ask], Breakpoints]]] = MappingProxyType(
    {
        "LRU": ("lru", _none),
        "no breakpoints": (DEFAULT_POLICY, _none),
        "system": (DEFAULT_POLICY, Ask.system),
        "system and turns": (DEFAULT_POLICY, Ask.turns),
    }
)
"""Policy and breakpoints by way."""


@dataclass(frozen=True, slots=True)
class Row:
    """One load in one pool in one way. Computed tokens of all prompts; seconds to the first token, virtual."""

    load: str
    part: float
    num_blocks: int
    way: str
    num_tokens: int
    num_computed: int
    first_token_s: float
    first_token_p95_s: float

    @property
    def computed(self) -> float:
        """The part of the prompts' tokens that was computed."""
        return self.num_computed / self.num_tokens


@dataclass(frozen=True, slots=True)
class Shared:
    """Two tenants in one pool. Blocks are those of BLOCK_SIZE tokens.

    found       part of the tokens of the others' prompts that was found
    num_kept    the most blocks that the keeper kept; keep_limit: that it may
    broken      looks at which the floor of the others had no room, of num_looks
    """

    keeper: str
    way: str
    num_blocks: int
    found: float
    num_kept: int
    keep_limit: int
    floor: int
    num_looks: int
    broken: int


# -- one tenant -------------------------------------------------------------------------------------------------------


def measure_load(load: Load) -> list[Row]:
    """Every pool and way."""
    rows = []
    for part in PARTS_OF_SET:
        num_blocks = max(load.longest, int(part * load.num_blocks))
        rows += [measure_way(load, part, num_blocks, way) for way in WAYS]
    return rows


def measure_way(load: Load, part: float, num_blocks: int, way: str) -> Row:
    policy, breakpoints = WAYS[way]
    pool = Pool(num_blocks, policy=policy)
    found = [pool.serve(ask.tokens, breakpoints(ask), ask.at_s) for ask in load.asks]
    computed = [len(ask.tokens) - num_found for ask, num_found in zip(load.asks, found, strict=True)]
    times = [STEP.seconds([start], [count]) for start, count in zip(found, computed, strict=True)]
    return Row(
        *(load.name, part, num_blocks, way, sum(found) + sum(computed), sum(computed)),
        *(statistics.fmean(times), statistics.quantiles(times, n=20)[-1]),
    )


# -- two tenants ------------------------------------------------------------------------------------------------------


def measure_shared(others: Load, keepers: Mapping[str, Sequence[Ask]]) -> list[Shared]:
    """The others without the keeper, beside it without and with breakpoints, and with a floor."""
    longest = max(others.longest, *(len(ask.tokens) // BLOCK_SIZE + 1 for asks in keepers.values() for ask in asks))
    num_blocks = max(others.num_blocks // 10, 2 * longest)
    rows = [share("none", [], others, num_blocks, way="alone")]
    for name, asks in keepers.items():
        rows.append(share(name, asks, others, num_blocks, way="no breakpoints"))
        rows.append(share(name, asks, others, num_blocks, way="keeps"))
        rows.append(share(name, asks, others, num_blocks, way="keeps, floor", floor=num_blocks // 2))
    return rows


def share(keeper: str, asks: Sequence[Ask], others: Load, num_blocks: int, *, way: str, floor: int = 0) -> Shared:
    pool = Pool(num_blocks, floors={OTHERS: floor})
    num_found, most_kept, looks, num_served = 0, 0, [], 0
    for tenant, ask in by_time(others.asks, asks):
        if tenant == OTHERS:
            num_found += pool.serve(ask.tokens, (), ask.at_s, tenant=OTHERS)
            continue
        breakpoints = [(len(ask.tokens), HOUR_S)] if way.startswith("keeps") else []
        pool.serve(ask.tokens, breakpoints, ask.at_s, tenant=KEEPER)
        most_kept = max(most_kept, pool.use(KEEPER).num_kept)
        num_served += 1
        if floor and num_served % ROOM_EVERY == 0:
            looks.append(pool.has_room_for(floor, OTHERS))
    num_tokens = sum(len(ask.tokens) for ask in others.asks)
    limit = pool.use(KEEPER).keep_limit if asks else 0
    found = num_found / num_tokens
    return Shared(keeper, way, num_blocks, found, most_kept, limit, floor, len(looks), looks.count(False))


def by_time(others: Sequence[Ask], keeper: Sequence[Ask]) -> Iterable[tuple[str, Ask]]:
    """Both tenants' prompts; the keeper's times are stretched to those of the others."""
    stretch = others[-1].at_s / keeper[-1].at_s if keeper else 1.0
    placed = [(ask.at_s, OTHERS, ask) for ask in others]
    placed += [(ask.at_s * stretch, KEEPER, Ask(ask.at_s * stretch, ask.tokens, ask.num_common)) for ask in keeper]
    return [(tenant, ask) for _, tenant, ask in sorted(placed, key=lambda each: each[0])]


# -- all --------------------------------------------------------------------------------------------------------------


def measure(quick: bool, progress: Progress) -> Findings:
    loads = [
        recorded("lmcache_miniswe_B16.jsonl.gz", 40 if quick else None),
        *([] if quick else [recorded("mooncake_toolagent_arxiv_1000.jsonl.gz")]),
        *(made("agents", seed, 60 if quick else 1000) for seed in ((1,) if quick else (1, 2))),
    ]
    agents, others = loads[0], made("agents", 3, 60 if quick else 1000)
    scan = new_prompts(20 if quick else 1000, 2048, 1.0)
    costs_of = [(num_tokens, is_found) for is_found in (True, False) for num_tokens in (512, 2048, 8192)]
    task = progress.add_task("loads", total=len(loads) + 2)
    rows = []
    for load in loads:
        rows += measure_load(load)
        progress.advance(task)
    shared = measure_shared(others, {"agents": agents.asks, "prompts that come once": scan})
    progress.advance(task)
    windows, admissions = (3, 2) if quick else (201, 20)
    costs = [measure_cost(count, is_found=found, windows=windows, admissions=admissions) for count, found in costs_of]
    progress.advance(task)
    figures = {
        "default": DEFAULT_POLICY,
        "block_size": BLOCK_SIZE,
        "loads": [asdict(row) | {"computed": row.computed} for row in rows],
        "shared": [asdict(row) for row in shared],
        "costs": [asdict(cost) for cost in costs],
    }
    errors = [f"a floor was broken beside {each.keeper}" for each in shared if each.broken]
    tables = [load_table(rows), shared_table(shared), cost_table(costs)]
    notes = ["The time to the first token is virtual: one step on an H200, 8 billion parameters, without a queue."]
    return Findings(tables, figures, lambda: plot(rows), notes, errors=errors)


def load_table(rows: Sequence[Row]) -> Any:
    made_table = table("part of the prompts' tokens that is computed; ms to the first token", "load", "blocks", *WAYS)
    for load, num_blocks in dict.fromkeys((row.load, row.num_blocks) for row in rows):
        own = [row for row in rows if (row.load, row.num_blocks) == (load, num_blocks)][: len(WAYS)]
        cells = [f"{percent(row.computed)}  {1e3 * row.first_token_s:.1f}" for row in own]
        made_table.add_row(load, f"{num_blocks:,}", *cells)
    return made_table


def shared_table(rows: Sequence[Shared]) -> Any:
    made_table = table(
        *("a pool with another tenant", "keeper", "way", "found by others", "most kept", "may keep", "floor", "broken"),
        words=2,
    )
    for row in rows:
        counts = (f"{row.num_kept:,}", f"{row.keep_limit:,}", f"{row.floor:,}", f"{row.broken} of {row.num_looks}")
        made_table.add_row(row.keeper, row.way, percent(row.found), *counts)
    return made_table


def cost_table(costs: Sequence[Cost]) -> Any:
    title = f"processor time of an admission, without and with {NUM_BREAKPOINTS} breakpoints"
    made_table = table(title, "prompt", "without, us", "with, us", "ratio", "to reach")
    for cost in costs:
        prompt = f"{cost.num_tokens:,} tokens, {'found' if cost.is_found else 'new'}"
        times = (f"{cost.without_us:.1f}", f"{cost.with_us:.1f}", f"{cost.ratio:.3f}")
        made_table.add_row(prompt, *times, f"{TO_REACH:.2f}")
    return made_table


def plot(rows: Sequence[Row]) -> Figure:
    """A panel per load: computed part of the tokens over the pool's part of the working set."""
    loads = list(dict.fromkeys(row.load for row in rows))
    figure, panels = pyplot.subplots(1, len(loads), figsize=(3 * len(loads) + 1, 3.2), squeeze=False)
    for axes, load in zip(panels[0], loads, strict=True):
        for way, marker in zip(WAYS, "osv^", strict=True):
            own = [row for row in rows if (row.load, row.way) == (load, way)]
            axes.plot([100 * row.part for row in own], [100 * row.computed for row in own], f"{marker}-", label=way)
        axes.set_ylim(0, None)
        axes.set_xlabel("pool, % of the working set")
        axes.set_title(load, fontsize=9)
        plain(axes)
    panels[0][0].set_ylabel("computed prompt tokens, %")
    panels[0][0].legend(fontsize=8)
    return figure


main = benchmark("prompt-cache", measure, packages=("numpy", "grpcio"))

if __name__ == "__main__":
    main()
