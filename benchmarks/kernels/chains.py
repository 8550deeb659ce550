"""The GPU's fixed costs: a kernel of a chain with and without dependent launch, the start of graphs, a wake-up.

    quire bench kernels chains

A chain is a graph of 200 kernels that do nothing. With programmatic dependent launch a kernel starts before the one in
front has ended, and waits for it. One graph or three with the same kernels tell the cost of a start. A wake-up is the
time from the end of a kernel to the line of Python behind the wait: an event that blocks, one that spins, polling.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

if "--quick" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch
import triton
import triton.language as tl
from report import Findings, benchmark, summary, table
from rich.progress import Progress
from timing import DryClock
from torch import Tensor

CHAIN, QUICK_CHAIN = 200, 3
NUM_SAMPLES, QUICK_SAMPLES = 30, 2
STARTS = (1, 3)
KERNELS_OF_STARTS = 12
BUSY_CYCLES = 1_000_000
"""Of a kernel before a wake-up: about half a millisecond."""


@triton.jit
def _touch(
    word_ptr,  # [1] int32
    DEPENDENT: tl.constexpr,  # noqa: N803
):
    """Read and write one word. DEPENDENT: lets the next kernel start, and waits for the one in front."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tl.store(word_ptr, tl.load(word_ptr) + 1)


def touch(word: Tensor, *, dependent: bool) -> None:
    """Launch the kernel that does nothing, of one warp; `dependent` needs a GPU of capability 9.0 or more."""
    options: dict[str, Any] = {"launch_pdl": True} if dependent else {}
    _touch[(1,)](word, DEPENDENT=dependent, num_warps=1, **options)


def graph_of(call: Callable[[], object], times: int) -> torch.cuda.CUDAGraph:
    """Return a graph of so many calls."""
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return graph


def chain_us(word: Tensor, *, dependent: bool, length: int, samples: int) -> list[float]:
    """Return microseconds a kernel, a sample for each replay of a chain."""
    graph = graph_of(lambda: touch(word, dependent=dependent), length)
    graph.replay()
    return [elapsed_us(graph.replay) / length for _ in range(samples)]


def starts_us(word: Tensor, *, num_graphs: int, samples: int) -> list[float]:
    """Return microseconds of the same kernels in so many graphs, one replayed behind the other.

    The least of a start's own time is the difference between the values of STARTS.
    """
    length = KERNELS_OF_STARTS // num_graphs
    graphs = [graph_of(lambda: touch(word, dependent=False), length) for _ in range(num_graphs)]

    def replay() -> None:
        for _ in range(20):
            for graph in graphs:
                graph.replay()

    replay()
    return [elapsed_us(replay) / 20 for _ in range(samples)]


def elapsed_us(call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def wait(event: torch.cuda.Event, how: str) -> None:
    if how != "polling":
        event.synchronize()
        return
    while not event.query():
        pass


def wake_ups_us(device: torch.device, *, how: str, samples: int) -> list[float]:
    """Return microseconds from the end of a kernel to the line behind the wait.

    The time of the launch is in it: the same for each `how`.
    """
    taken = []
    for _ in range(samples):
        torch.cuda.synchronize(device)
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True, blocking=how == "blocking")
        start = time.perf_counter()
        begin.record()
        torch.cuda._sleep(BUSY_CYCLES)
        end.record()
        wait(end, how)
        waited_us = 1e6 * (time.perf_counter() - start)
        taken.append(waited_us - 1e3 * float(begin.elapsed_time(end)))
    return taken


def measure_gpu(device: torch.device, progress: Progress) -> dict[str, Any]:
    word = torch.zeros(1, dtype=torch.int32, device=device)
    kinds = ["plain", *(["dependent"] if torch.cuda.get_device_capability(device) >= (9, 0) else [])]
    task = progress.add_task("chains", total=3)
    kernels = {
        kind: summary(chain_us(word, dependent=kind == "dependent", length=CHAIN, samples=NUM_SAMPLES))
        for kind in kinds
    }
    progress.update(task, advance=1, description="starts of graphs")
    graphs = {str(count): summary(starts_us(word, num_graphs=count, samples=NUM_SAMPLES)) for count in STARTS}
    progress.update(task, advance=1, description="wake-ups")
    wakes = {
        how: summary(wake_ups_us(device, how=how, samples=NUM_SAMPLES)) for how in ("blocking", "spinning", "polling")
    }
    progress.advance(task)
    start_us = (graphs["3"]["median"] - graphs["1"]["median"]) / 2
    return {
        "device": torch.cuda.get_device_name(device),
        "kernel_us": kernels,
        "graphs_us": graphs,
        "start_of_a_graph_us": round(start_us, 3),
        "wake_up_us": wakes,
    }


def measure(quick: bool, progress: Progress) -> Findings:
    if torch.cuda.is_available() and not quick:
        figures = measure_gpu(torch.device("cuda"), progress)
        notes = []
    else:
        word = torch.zeros(1, dtype=torch.int32)
        calls = [lambda: touch(word, dependent=False)] * QUICK_CHAIN
        kernels = [each for _ in range(QUICK_SAMPLES) for each in DryClock().measure(calls)] if quick else []
        figures = {"device": "cpu", "kernel_us": {"plain": summary(kernels)} if kernels else {}}
        figures |= {"graphs_us": {}, "wake_up_us": {}}
        notes = ["There is no GPU here: graphs and events were not measured."]
    return Findings([shown(figures)], figures, notes=notes)


def shown(figures: dict[str, Any]) -> Any:
    made = table("fixed costs, us", "", "median", "least", "most")
    for group in ("kernel_us", "graphs_us", "wake_up_us"):
        for name, each in figures[group].items():
            made.add_row(f"{group}, {name}", *(f"{each[key]:,.4g}" for key in ("median", "min", "max")))
    return made


main = benchmark("kernels chains", measure, packages=("torch", "triton"))

if __name__ == "__main__":
    main()
