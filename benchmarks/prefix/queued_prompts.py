"""Hits and times of an engine that names the prompts at the head of its queue to cachemgr, and of one that does not.

    quire bench prefix queued-prompts

In the laboratory (`quire lab`): cachemgr's own books and the engine's own scheduler, and a formula for the time of a
step. One worker `h100-8b`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from replay import TRACES
from report import Findings, benchmark, table
from rich.progress import Progress
from rich.table import Table

from quire.client.engine.scheduling.plans import DEFAULT_EXPECTED_PROMPTS
from quire.lab.config import LabConfig, config_of
from quire.lab.experiment import run
from quire.lab.measures import Outcome

METRICS = {"hit_ratio": "hits", "duration_s": "time for all", "first_token_p50_s": "first token, median"}


@dataclass(frozen=True, slots=True)
class Case:
    """A load, and a pool that is too small for it. num_running: the most sequences that run at once."""

    name: str
    load: dict[str, Any]
    num_running: int
    num_blocks: int
    seeds: tuple[int, ...]

    def config(self, num_expected: int) -> LabConfig:
        fleet = {"step": "h100-8b", "blocks": self.num_blocks, "max_running_sequences": self.num_running}
        table = {"load": self.load, "fleet": fleet | {"max_expected_prompts": num_expected}}
        return config_of(table, name=self.name)


def made(kind: str, rate: float, num_running: int, num_blocks: int) -> Case:
    load = {"sessions": {"kind": kind, "rate": rate}, "requests": 400}
    return Case(f"{kind}, {rate:g} sessions a second", load, num_running, num_blocks, (1, 2, 3))


def recorded(name: str, speed: float, num_running: int, num_blocks: int) -> Case:
    load = {"trace": str(TRACES / f"{name}.jsonl.gz"), "requests": 400, "speed": speed}
    return Case(f"{name}, {speed:g} times as fast", load, num_running, num_blocks, (1,))


CASES = (
    made("agents", 10, 4, 4_000),
    made("agents", 10, 4, 8_000),
    made("agents", 10, 256, 6_000),
    made("agents", 40, 8, 8_000),
    made("chat", 40, 8, 1_500),
    made("rag", 40, 8, 3_000),
    recorded("sharegpt128_B16", 10, 8, 2_000),
    recorded("sharegpt128_B16", 10, 4, 1_000),
    recorded("lmcache_miniswe_B16", 10, 8, 4_000),
    recorded("mooncake_toolagent_arxiv_1000", 20, 8, 10_000),
    recorded("mooncake_toolagent_arxiv_1000", 20, 256, 20_000),
    recorded("mooncake_conversation_2000", 10, 256, 20_000),
)


def measure_case(case: Case, num_expected: int) -> dict[str, float]:
    """Means over the seeds."""
    outcomes: list[Outcome] = [run(case.config(num_expected), seed) for seed in case.seeds]
    return {name: fmean(outcome.metrics[name] for outcome in outcomes) for name in (*METRICS, "preemptions")}


def measure(quick: bool, progress: Progress) -> Findings:
    """--quick: 50 requests of each load, one seed."""
    figures = []
    for case in progress.track(CASES, description="loads"):
        if quick:
            case = replace(case, load=case.load | {"requests": 50}, seeds=(1,))
        figures.append(
            {
                "load": case.name,
                "running": case.num_running,
                "blocks": case.num_blocks,
                "seeds": case.seeds,
                "without": measure_case(case, 0),
                "with": measure_case(case, DEFAULT_EXPECTED_PROMPTS),
            }
        )
    return Findings([table_of(figures)], {"expected_prompts": DEFAULT_EXPECTED_PROMPTS, "figures": figures})


def table_of(figures: list[dict[str, Any]]) -> Table:
    title = f"prompts of the queue that cachemgr knows of: none, {DEFAULT_EXPECTED_PROMPTS}"
    made = table(title, "load", "running", "blocks", "hits", *list(METRICS.values())[1:])
    for each in figures:
        before, after = each["without"], each["with"]
        ratios = [f"{after[name] / before[name]:.3f}" for name in list(METRICS)[1:]]
        hits = f"{before['hit_ratio']:.3f}, {after['hit_ratio']:.3f}"
        made.add_row(each["load"], str(each["running"]), f"{each['blocks']:,}", hits, *ratios)
    return made


main = benchmark("prefix queued-prompts", measure)

if __name__ == "__main__":
    main()
