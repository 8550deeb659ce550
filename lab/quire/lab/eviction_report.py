"""The judgement of an eviction policy as tables, as JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from matplotlib import pyplot
from rich.table import Table

from quire.lab.eviction import MOST_RATIO, Pair, Summary, after_changes, by_kind, worst
from quire.lab.report import svg_of

NUM_WORST = 10


def tables(pairs: Sequence[Pair]) -> Iterator[Table]:
    """By kind, the held-out loads apart; the worst pairs; the turnovers after changes of phase."""
    chosen = [pair for pair in pairs if not pair.is_held_out]
    held_out = [pair for pair in pairs if pair.is_held_out]
    for title, part in (("loads that are not held out", chosen), ("held-out loads", held_out), ("all loads", pairs)):
        if part:
            yield _table(title, by_kind(part))
    if changes := after_changes(pairs):
        yield _table("after changes of phase", changes)
    yield _worst_table(worst(pairs, NUM_WORST))


def _table(title: str, summaries: Sequence[Summary]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("", min_width=36, no_wrap=True)
    for heading in ("pairs", "mean", "lowest mean", "lowest of any hashes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in summaries:
        figures = (each.mean, each.lowest_mean, each.lowest)
        table.add_row(each.title, f"{each.num_pairs:,}", *(f"{figure:.3f}" for figure in figures))
    return table


def _worst_table(pairs: Sequence[Pair]) -> Table:
    table = Table(title="worst pairs", title_justify="left", box=None, pad_edge=False)
    table.add_column("", min_width=36)
    for heading in ("held out", "LRU's hits", "mean", "lowest of any hashes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for pair in pairs:
        figures = (pair.hits.mean, min(pair.hits.ratios))
        held_out = "yes" if pair.is_held_out else ""
        table.add_row(pair.title, held_out, f"{pair.hits.lru:,}", *(f"{figure:.3f}" for figure in figures))
    return table


def write_judgement(pairs: Sequence[Pair], folder: Path, *, policy: str, command: str) -> tuple[Path, Path]:
    """Write eviction_loads.json and eviction_loads.svg into a folder, which is made; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, picture = folder / "eviction_loads.json", folder / "eviction_loads.svg"
    data.write_text(as_json(pairs, policy=policy, command=command))
    _draw(pairs, picture, policy)
    return data, picture


def as_json(pairs: Sequence[Pair], *, policy: str, command: str) -> str:
    """The summaries, and the hits of each pair on a line."""
    held_out = {False: "not held out", True: "held out"}
    kinds = {title: [pair for pair in pairs if pair.is_held_out is which] for which, title in held_out.items()}
    contents = {
        "command": command,
        "policy": policy,
        **{title: [_rounded(each) for each in by_kind(part)] for title, part in kinds.items() if part},
        "all": [_rounded(each) for each in by_kind(pairs)],
        "after changes of phase": [_rounded(each) for each in after_changes(pairs)],
    }
    rows = ",\n".join("  " + json.dumps(_row(pair)) for pair in pairs)
    return json.dumps(contents, indent=1).removesuffix("\n}") + ',\n "pairs": [\n' + rows + "\n ]\n}\n"


def _rounded(summary: Summary) -> dict[str, str | float]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(summary).items()}


def _row(pair: Pair) -> dict[str, object]:
    row: dict[str, object] = {"load": pair.load, "held_out": pair.is_held_out, "capacity": pair.capacity}
    row |= {"blocks": pair.hits.num_blocks, "lru": pair.hits.lru, "own": pair.hits.own}
    if pair.turnovers:
        row["turnovers"] = [(each.num_blocks, each.lru, *each.own) for each in pair.turnovers]
    return row


def _draw(pairs: Sequence[Pair], path: Path, policy: str) -> None:
    """The ratios of all pairs in their order, with the range over the sets of hashes."""
    figure, axes = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
    for is_held_out, colour in ((False, "#1f77b4"), (True, "#d95f02")):
        part = sorted((pair.hits for pair in pairs if pair.is_held_out is is_held_out), key=lambda hits: hits.mean)
        places = [(index + 0.5) / len(part) for index in range(len(part))]
        lowest, highest = [min(hits.ratios) for hits in part], [max(hits.ratios) for hits in part]
        axes.fill_between(places, lowest, highest, color=colour, alpha=0.25, linewidth=0)
        label = "held out" if is_held_out else "not held out"
        axes.plot(places, [hits.mean for hits in part], color=colour, label=f"{label}: {len(part)} pairs")
    axes.axhline(1, color="black", linewidth=0.6)
    axes.set_ylim(0.85, MOST_RATIO + 0.02)
    axes.set_xlim(0, 1)
    axes.set_xlabel("pairs of load and pool size, in the order of the mean")
    axes.set_ylabel(f"hits of {policy} relative to LRU's")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, loc="upper left")
    path.write_text(svg_of(figure) + "\n")
