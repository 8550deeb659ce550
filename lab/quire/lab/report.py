"""The report of a comparison: one HTML file with its pictures, and the same figures as JSON."""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from quire.lab.config import LabConfig
from quire.lab.experiment import Comparison, Estimate
from quire.lab.measures import Metric, Outcome

_COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d", "#666666")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
td.better { color: #1a7f37; } td.worse { color: #b42318; } .small { color: #666; font-size: 13px; }
figure { margin: 1.5rem 0; } figcaption { color: #444; } svg { max-width: 100%; height: auto; }
pre { background: #f6f6f6; padding: .6rem; white-space: pre-wrap; }
"""


def write_report(comparison: Comparison, folder: Path) -> tuple[Path, Path]:
    """Write report.html and report.json into a folder, which is made; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    page, data = folder / "report.html", folder / "report.json"
    data.write_text(json.dumps(comparison.describe(), indent=1, sort_keys=True) + "\n")
    page.write_text(make_page(comparison))
    return page, data


def make_page(comparison: Comparison) -> str:
    """The HTML."""
    names = [config.name for config in comparison.configs]
    title = html.escape("Quire lab: " + " and ".join(names))
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>',
            f"<h1>{title}</h1>",
            *_introduction(comparison),
            "<h2>All requests</h2>",
            _metric_table(comparison),
            "<h2>Pictures</h2>",
            *_pictures(comparison),
            "<h2>Tenants</h2>" if _has_tenants(comparison) else "",
            *(_tenant_table(comparison) if _has_tenants(comparison) else ()),
            *_layer_group_table(comparison),
            "<h2>Configurations</h2>",
            *(
                f"<h3>{html.escape(config.name)}</h3><pre>{html.escape(_describe(config))}</pre>"
                for config in comparison.configs
            ),
            "</html>",
        ]
    )


def _introduction(comparison: Comparison) -> Iterator[str]:
    config, seeds = comparison.configs[0], comparison.seeds
    yield (
        f"<p>Requests in virtual time; simulated workers: {config.fleet.workers}. The block manager and the scheduler "
        "are the real ones. A step of a worker takes the time that its formula says.</p>"
    )
    for limits in dict.fromkeys(each.limits for each in comparison.configs):
        names = ", ".join(html.escape(each.name) for each in comparison.configs if each.limits == limits)
        yield (
            f"<p>A request is <b>good</b> if its first token comes within {limits.first_token_s:g} s, and each further "
            f"one takes at most {limits.token_s:g} s in the mean ({names}).</p>"
        )
    if len(seeds) > 1:
        yield (
            f"<p>Each figure is a mean over {len(seeds)} seeds, ± the 95 % interval (Student's t). A change is the "
            "mean of the differences for equal seeds; it has a colour where its interval excludes 0: "
            '<span style="color:#1a7f37">better</span>, <span style="color:#b42318">worse</span>.</p>'
        )
    else:
        yield "<p>One seed was run, so there is no interval. A small difference may be chance: run several seeds.</p>"


# Tables.


def _metric_table(comparison: Comparison) -> str:
    names = [html.escape(config.name) for config in comparison.configs]
    head = "".join(f"<th>{name}</th>{'<th>change</th>' * bool(index)}" for index, name in enumerate(names))
    rows = "".join(_metric_row(comparison, name, metric) for name, metric in comparison.metrics.items())
    return f"<table><tr><th></th>{head}</tr>{rows}</table>"


def _metric_row(comparison: Comparison, name: str, metric: Metric) -> str:
    cells = []
    for index in range(len(comparison.configs)):
        cells.append(f"<td>{_show(comparison.estimate(index, name), metric)}</td>")
        if index:
            change = comparison.change(index, name)
            cells.append(f'<td class="{_class_of(change, metric)}">{_show(change, metric, sign="+")}</td>')
    return f"<tr><td>{html.escape(metric.title)}</td>{''.join(cells)}</tr>"


def _show(estimate: Estimate, metric: Metric, sign: str = "") -> str:
    scale = 100 if metric.unit == "%" else 1
    text = format(scale * estimate.mean, f"{sign},.{metric.digits}f")
    if estimate.margin is not None:
        text += f' <span class="small">± {scale * estimate.margin:,.{metric.digits}f}</span>'
    return f"{text} {metric.unit}".strip()


def _class_of(change: Estimate, metric: Metric) -> str:
    if not metric.better or not change.is_clear:
        return ""
    return "better" if (change.mean > 0) == (metric.better == "more") else "worse"


def _has_tenants(comparison: Comparison) -> bool:
    return any(len(runs[0].tenants) > 1 for runs in comparison.outcomes)


def _tenant_table(comparison: Comparison) -> Iterator[str]:
    yield (
        f'<p class="small">Of seed {comparison.seeds[0]}. Speed: generated tokens a second of a request, from its '
        "arrival.</p>"
    )
    yield (
        "<table><tr><th>tenant</th><th></th><th>requests</th><th>first token, median</th><th>99 %</th><th>good</th>"
        "<th>found in the cache</th><th>speed</th></tr>"
    )
    for tenant in sorted({tenant for runs in comparison.outcomes for tenant in runs[0].tenants}):
        for config, runs in zip(comparison.configs, comparison.outcomes, strict=True):
            figures = runs[0].tenants.get(tenant)
            if figures is None:
                continue
            yield (
                f"<tr><td>{html.escape(tenant)}</td><td>{html.escape(config.name)}</td><td>{figures['requests']:,}</td>"
                f"<td>{figures['first_token_p50_s']:.3f} s</td><td>{figures['first_token_p99_s']:.3f} s</td>"
                f"<td>{100 * figures['good_ratio']:.1f} %</td><td>{100 * figures['hit_ratio']:.1f} %</td>"
                f"<td>{figures['speed']:.1f}</td></tr>"
            )
    yield "</table>"


def _layer_group_table(comparison: Comparison) -> Iterator[str]:
    """A table of the pools with several layer groups; nothing if there is none."""
    rows = [
        f"<tr><td>{html.escape(group)}</td><td>{html.escape(config.name)}</td><td>{figures['found_blocks']:,}</td>"
        f"<td>{figures['evicted_blocks']:,}</td><td>{figures['passed_blocks']:,}</td></tr>"
        for config, runs in zip(comparison.configs, comparison.outcomes, strict=True)
        for group, figures in runs[0].layer_groups.items()
    ]
    if not rows:
        return
    yield (
        f'<h2>Layer groups</h2><p class="small">Blocks of all workers, of seed {comparison.seeds[0]}. Found: in the '
        "cache. Let go: behind the window of a sequence that runs.</p>"
    )
    yield "<table><tr><th>layer group</th><th></th><th>found</th><th>evicted</th><th>let go</th></tr>"
    yield from rows
    yield "</table>"


def _describe(config: LabConfig) -> str:
    load, fleet = config.load, config.fleet
    requests = f"trace {load.trace.name}" if load.trace is not None else f"sessions: {load.sessions}"
    return "\n".join(
        [
            f"load     {requests}",
            f"         requests {load.requests or 'all'}, rate {load.rate:g}, speed {load.speed:g}, "
            f"lengths {load.lengths}, tenants {dict(load.tenants)}",
            f"workers  {fleet.workers}, each with {fleet.blocks:,} blocks of {fleet.block_size} tokens"
            + (f" and {fleet.host_blocks:,} in the host tier" if fleet.host_blocks else "")
            + (f", {fleet.host_cache_share:g} of them for evicted blocks" if fleet.host_cache_share else "")
            + (f", and {fleet.disk_blocks:,} on the disk" if fleet.disk_blocks else ""),
            *(f"layers   {group}" for group in fleet.layer_groups),
            f"eviction {fleet.eviction_in_use}",
            f"         at most {fleet.max_running_sequences} sequences and {fleet.max_step_tokens} tokens a step, "
            f"{fleet.max_expected_prompts} expected prompts",
            *(f"step     {part}" for part in fleet.step.describe()),
            f"router   {config.policy.router}",
            f"engine   {config.policy.scheduler}",
        ]
    )


# Pictures.


def _pictures(comparison: Comparison) -> Iterator[str]:
    runs = [outcomes[0] for outcomes in comparison.outcomes]
    seed = comparison.seeds[0]
    pictures: Sequence[tuple[str, Callable[[Sequence[Outcome]], Figure]]] = (
        ("Part of the requests with at most the time below. Further left is better.", _draw_times),
        ("By arrival: each point stands for the requests that arrived in that part of the run.", _draw_arrivals),
        ("The fleet over time. Rates are differences of counters between samples.", _draw_series),
        ("Each worker, in order of the figure: a flat line means that all workers are alike.", _draw_pools),
    )
    for caption, draw in pictures:
        yield f"<figure>{svg_of(draw(runs))}<figcaption>{caption} Seed {seed}.</figcaption></figure>"


def svg_of(figure: Figure) -> str:
    """A figure as an element of HTML. The same figure gives the same text."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "quire", "svg.fonttype": "none", "font.size": 10}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    text = buffer.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)


def _axes(rows: int, columns: int) -> tuple[Figure, list[Any]]:
    figure, axes = pyplot.subplots(rows, columns, figsize=(11, 2.9 * rows), squeeze=False, layout="constrained")
    flat = list(axes.flat)
    for each in flat:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(alpha=0.25)
    return figure, flat


def _lines(runs: Sequence[Outcome]) -> Iterator[tuple[Outcome, dict[str, Any]]]:
    for index, run in enumerate(runs):
        yield run, {"label": run.name, "color": _COLOURS[index % len(_COLOURS)], "linewidth": 1.6}


def _draw_times(runs: Sequence[Outcome]) -> Figure:
    figure, (first, token) = _axes(1, 2)
    for axes, name, title in (
        (first, "first_token_s", "time to first token, s"),
        (token, "token_s", "time per further token, s"),
    ):
        for run, style in _lines(runs):
            axes.plot(run.quantiles[name], range(len(run.quantiles[name])), **style)
        _scale(axes, [value for run in runs for value in run.quantiles[name]])
        axes.set_xlabel(title)
        axes.set_ylabel("% of requests")
    first.legend(fontsize=8)
    return figure


def _scale(axes: Any, values: Sequence[float]) -> None:
    """A logarithmic axis where the values need one; labels at powers of ten only."""
    if values and 0 < 10 * min(values) < max(values):
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())


def _draw_arrivals(runs: Sequence[Outcome]) -> Figure:
    figure, axes = _axes(2, 2)
    columns = (
        ("first_token_p50_s", "time to first token, median, s", 1),
        ("token_p50_s", "time per further token, median, s", 1),
        ("good_ratio", "good requests, %", 100),
        ("hit_ratio", "prompt tokens found in the cache, %", 100),
    )
    for each, (name, title, scale) in zip(axes, columns, strict=True):
        for run, style in _lines(runs):
            points = [
                (at, scale * value)
                for at, value in zip(run.arrivals.get("at_s", ()), run.arrivals.get(name, ()), strict=True)
                if value is not None and at is not None
            ]
            each.plot([at for at, _ in points], [value for _, value in points], **style)
        each.set_title(title, fontsize=10)
        each.set_ylim(bottom=0)
        each.set_xlabel("s")
    axes[0].legend(fontsize=8)
    return figure


def _draw_series(runs: Sequence[Outcome]) -> Figure:
    has_host_tier = any("host_blocks" in run.series for run in runs)
    figure, axes = _axes(4 if has_host_tier else 3, 2)
    for run, style in _lines(runs):
        at_s = run.series["at_s"]
        for each, name in ((axes[0], "running"), (axes[1], "waiting"), (axes[2], "used_blocks")):
            each.plot(at_s, run.series[name], **style)
        for each, name in ((axes[3], "generated_tokens"), (axes[4], "evicted_blocks"), (axes[5], "preemptions")):
            each.plot(at_s[1:], _rates(at_s, run.series[name]), **style)
        if "host_blocks" in run.series:
            axes[6].plot(at_s, run.series["host_blocks"], **style)
            axes[7].plot(at_s[1:], _rates(at_s, run.series["copied_blocks"]), **style)
    titles = (
        "sequences that run", "sequences that wait", "blocks that sequences hold", "generated tokens a second",
        "evicted blocks a second", "preemptions a second", "used blocks of the host tier",
        "blocks copied to it and back a second",
    )[: len(axes)]  # fmt: skip
    for each, title in zip(axes, titles, strict=True):
        each.set_title(title, fontsize=10)
        each.set_ylim(bottom=0)
        each.set_xlabel("s")
    axes[0].legend(fontsize=8)
    return figure


def _rates(at_s: Sequence[float], counter: Sequence[float]) -> list[float]:
    """Differences a second."""
    points = pairwise(zip(at_s, counter, strict=True))
    return [(value - before) / (at - since) for (since, before), (at, value) in points]


def _draw_pools(runs: Sequence[Outcome]) -> Figure:
    figure, axes = _axes(1, 3)
    columns = (
        ("busy_ratio", "time in which it computes, %", 100),
        ("hit_ratio", "prompt tokens found, %", 100),
        ("requests", "requests", 1),
    )
    for each, (name, title, scale) in zip(axes, columns, strict=True):
        for run, style in _lines(runs):
            values = sorted(scale * pool[name] for pool in run.pools)
            each.plot(range(1, len(values) + 1), values, marker="o", markersize=3, **style)
        each.set_title(title, fontsize=10)
        each.set_ylim(bottom=0)
        each.set_xlabel("workers")
        each.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].legend(fontsize=8)
    return figure
