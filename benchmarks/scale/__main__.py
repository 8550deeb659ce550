"""How many workers one cachemgr serves: plans a second, their latency and processor time, by number of workers.

    quire bench scale --output benchmarks/results

cachemgr as it is deployed, on a core of its own. On the other cores a driver in Go (main.go) is all workers and all
engines: a worker obeys the protocol, computes nothing and reports each step at once; an engine keeps 64 sequences
running in one pool, with prompts and answers from the recorded traces, and has one step with its worker while it plans
the next. Each has a connection of its own. Twice: engines that plan as fast as they can, and engines that plan a step
every 20 ms, as if the worker took so long. Medians of the rounds.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil
from matplotlib import pyplot
from matplotlib.figure import Figure
from replay import TRACES, load
from report import Findings, benchmark, plain, summary, table
from rich.progress import Progress
from rich.table import Table

from quire.cli.service_process import ServiceProcess

HERE = Path(__file__).parent
TRACE_FILES = {"sharegpt128_B16.jsonl.gz": 16, "mooncake_conversation_2000.jsonl.gz": 512}
"""The tokens of a block, by file. Their requests take turns."""
STEP_S = 0.02
MAX_PROMPT_TOKENS = 16_384
"""Of a longer prompt the beginning: 64 of them would not fit in a pool."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the benchmark.

    workers     numbers of workers; there are as many engines, and at least 2
    num_blocks  of each pool
    """

    workers: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    batch: int = 64
    num_blocks: int = 65_536
    seconds: float = 5.0
    rounds: int = 3
    requests: int = 2_000


QUICK = Sizes(workers=(1, 2), batch=4, num_blocks=8_192, seconds=0.3, rounds=1, requests=20)


@dataclass(frozen=True, slots=True)
class Run:
    """One number of workers in one round.

    processor_s  of cachemgr, and of the driver, while it was measured
    found        Result of main.go
    """

    processor_s: dict[str, float]
    found: dict[str, Any]

    @property
    def num_plans(self) -> int:
        """Plans that were answered."""
        return len(self.found["decode_us"]) + len(self.found["admission_us"])

    @property
    def latencies_us(self) -> list[int]:
        """Of all plans."""
        return [*self.found["decode_us"], *self.found["admission_us"]]


def build_driver(folder: Path) -> Path:
    """Compile the driver. Raises click.ClickException without Go."""
    if shutil.which("go") is None:
        raise click.ClickException("the load comes from a program in Go: install Go (client/go/go.mod has its version)")
    driver = folder / "driver"
    subprocess.run(["go", "build", "-o", str(driver), "."], cwd=HERE, check=True)
    return driver


def write_requests(path: Path, count: int) -> None:
    """Requests of the traces in turn, with their full blocks; block ids of different traces differ."""
    recorded = []
    for number, (name, block_tokens) in enumerate(TRACE_FILES.items()):
        with gzip.open(TRACES / name, "rt") as lines:
            records = [json.loads(line) for line in lines]
        recorded.append(
            [
                {
                    "input_length": min(record["input_length"], MAX_PROMPT_TOKENS),
                    "output_length": max(1, record["output_length"]),
                    "block_tokens": block_tokens,
                    "block_ids": [block << 8 | number for block in prompt.block_ids],
                }
                for record, prompt in zip(records, load(name), strict=True)
            ]
        )
    turns = [each[index % len(each)] for index in range(count) for each in recorded][:count]
    path.write_text("".join(json.dumps(request) + "\n" for request in turns))


@contextmanager
def cachemgr_alone(folder: Path) -> Iterator[ServiceProcess]:
    """cachemgr on the first core, and whatever is started in the block on the others."""
    address = f"unix:{folder}/cachemgr.sock"
    service = ServiceProcess(
        "cachemgr",
        target="quire.cachemgr",
        arguments=("--listen", address, "--log-level", "warning"),
        address=address,
        log_path=folder / "cachemgr.log",
    )
    cores = os.sched_getaffinity(0)
    others = cores - {min(cores)} or cores
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, cores)
        os.sched_setaffinity(0, {min(cores)})
        service.start()
        stack.callback(service.terminate)
        os.sched_setaffinity(0, others)
        service.wait_serving(30.0)
        yield service


def measure_one(driver: Path, requests: Path, sizes: Sizes, num_workers: int, interval_s: float) -> Run:
    """One number of workers, with new processes."""
    with tempfile.TemporaryDirectory() as name, cachemgr_alone(Path(name)) as cachemgr:
        command = [str(driver), "--cachemgr", cachemgr.address, "--trace", str(requests)]
        command += ["--workers", str(num_workers), "--engines", str(max(2, num_workers))]
        command += ["--batch", str(sizes.batch), "--blocks", str(sizes.num_blocks)]
        command += ["--seconds", str(sizes.seconds), "--interval", f"{1e3 * interval_s:g}ms"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as load:
            try:
                assert load.stdin is not None
                assert load.stdout is not None
                if load.stdout.readline() != "ready\n":
                    raise RuntimeError(f"the load of {num_workers} workers has ended; see above")
                before = {"cachemgr": processor_s(cachemgr.pid), "driver": processor_s(load.pid)}
                load.stdin.write("\n")
                load.stdin.flush()
                found = json.loads(load.stdout.readline())
                after = {"cachemgr": processor_s(cachemgr.pid), "driver": processor_s(load.pid)}
            finally:
                load.kill()
    return Run({name: after[name] - before[name] for name in before}, found)


def processor_s(pid: int | None) -> float:
    """Seconds that a process has used."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def figures_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Medians over the rounds of one number of workers; times in µs."""

    def median(values: list[float]) -> float:
        return float(f"{statistics.median(values):.4g}")

    def of_rounds(kind: str, name: str) -> float | None:
        each = [run.latencies_us if kind == "all" else run.found[f"{kind}_us"] for run in runs]
        measured = [summary(latencies)[name] for latencies in each if latencies]
        return median(measured) if measured else None

    seconds = [run.found["seconds"] for run in runs]
    return {
        "plans_per_s": median([run.num_plans / s for run, s in zip(runs, seconds, strict=True)]),
        "plan_us": {name: of_rounds("all", name) for name in ("median", "p99")},
        "decode_us": {name: of_rounds("decode", name) for name in ("median", "p99")},
        "admission_us": {name: of_rounds("admission", name) for name in ("median", "p99")},
        "processor_us_per_plan": median([1e6 * run.processor_s["cachemgr"] / run.num_plans for run in runs]),
        "cores": {
            name: median([run.processor_s[name] / s for run, s in zip(runs, seconds, strict=True)])
            for name in ("cachemgr", "driver")
        },
        "admission_share": median([len(run.found["admission_us"]) / run.num_plans for run in runs]),
        "prompt_tokens_per_s": median([run.found["prompt_tokens"] / s for run, s in zip(runs, seconds, strict=True)]),
        "cached_share": median([run.found["cached_tokens"] / max(1, run.found["prompt_tokens"]) for run in runs]),
        **{name: sum(run.found[name] for run in runs) for name in ("num_refused", "num_put_off", "num_late")},
    }


def measure(quick: bool, progress: Progress) -> Findings:
    sizes = QUICK if quick else Sizes()
    ways = {"as fast as they can": 0.0, f"a step every {1e3 * STEP_S:g} ms": STEP_S}
    task = progress.add_task("scale", total=sizes.rounds * len(sizes.workers) * len(ways))
    runs: dict[str, dict[int, list[Run]]] = {way: {count: [] for count in sizes.workers} for way in ways}
    with tempfile.TemporaryDirectory() as name:
        driver, requests = build_driver(Path(name)), Path(name, "requests.jsonl")
        write_requests(requests, sizes.requests)
        for _ in range(sizes.rounds):
            for count in sizes.workers:
                for way, interval_s in ways.items():
                    runs[way][count].append(measure_one(driver, requests, sizes, count, interval_s))
                    progress.advance(task)
    found = {way: {str(count): figures_of(each) for count, each in by_count.items()} for way, by_count in runs.items()}
    capacity = capacity_of(found)
    notes = [
        "cachemgr has a core of its own; the driver, in Go, has the others.",
        f"A plan takes {capacity['processor_us_per_plan']:.0f} µs of cachemgr's processor time with the most workers, "
        f"so a core makes {capacity['plans_per_s']:.0f} plans a second: {capacity['workers']:.0f} workers that take "
        f"{1e3 * STEP_S:g} ms for a step.",
    ]
    figures = {"step_s": STEP_S, "batch": sizes.batch, "found": found, "capacity": capacity}
    return Findings([table_of(way, each) for way, each in found.items()], figures, lambda: plot(found), notes)


def capacity_of(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Workers at a step every STEP_S that would take all of one core, from the processor time with the most workers."""
    paced = list(list(found.values())[-1].values())[-1]
    plans_per_s = 1e6 / paced["processor_us_per_plan"]
    return {
        "processor_us_per_plan": paced["processor_us_per_plan"],
        "plans_per_s": float(f"{plans_per_s:.4g}"),
        "workers": float(f"{plans_per_s * STEP_S:.4g}"),
    }


def table_of(way: str, by_count: dict[str, Any]) -> Table:
    headings = ("plans/s", "p50 µs", "p99 µs", "processor µs a plan", "cachemgr, cores", "driver, cores")
    made = table(f"engines plan {way}", "workers", *headings)
    for count, each in by_count.items():
        made.add_row(
            count,
            f"{each['plans_per_s']:,.0f}",
            *(f"{each['plan_us'][name]:,.0f}" for name in ("median", "p99")),
            f"{each['processor_us_per_plan']:.0f}",
            *(f"{each['cores'][name]:.2f}" for name in ("cachemgr", "driver")),
        )
    return made


def plot(found: dict[str, dict[str, Any]]) -> Figure:
    """Plans a second, and the latency of a plan, by number of workers."""
    figure, (speed, latency) = pyplot.subplots(1, 2, figsize=(8, 3.2))
    for (way, by_count), colour in zip(found.items(), ("C0", "C1"), strict=True):
        counts = [int(count) for count in by_count]
        speed.plot(counts, [each["plans_per_s"] for each in by_count.values()], "o-", color=colour, label=way)
        for name, style in (("median", "o-"), ("p99", "s--")):
            times_ms = [each["plan_us"][name] / 1e3 for each in by_count.values()]
            latency.plot(counts, times_ms, style, color=colour, label=f"{name}, {way}")
    for axes, label in ((speed, "plans/s"), (latency, "ms from a plan to its answer")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_xlabel("workers")
        axes.set_ylabel(label)
        axes.legend(fontsize=7)
        plain(axes)
    speed.set_ylim(bottom=0)
    latency.set_yscale("log")
    return figure


main = benchmark("scale", measure, packages=("grpcio", "protobuf", "numpy"))

if __name__ == "__main__":
    main()
