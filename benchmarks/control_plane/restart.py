"""The cost of a state directory in every step, and the time to restart from it.

    quire bench control-plane restart

Costs: cachemgr as it is deployed with and without --state-dir, in turns, and its books alone, without gRPC. Recovery:
books with all blocks in use or cached, killed when the log is as long as it gets before a snapshot replaces it; the
time is that of a new process to read them, the check of every invariant included.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from books import EPOCH, LEASE, report_of
from matplotlib import pyplot
from matplotlib.figure import Figure
from plans import QUICK, Services, Sizes, figure_of, rows
from report import Findings, benchmark, plain, spread, table
from rich.progress import Progress

from quire.cache.v1 import cache_service_pb2, grant_pb2
from quire.cachemgr._core import Ledger, PlanRequest, StepReport
from quire.cachemgr.geometry import Geometry

BLOCK_SIZE, PROMPT_TOKENS, NUM_RUNNING = 16, 4096, 64
SEQUENCES = (1, 32, 256)
POOL = "benchmark"
RECORDS_PER_LOG = 20_000
Samples = dict[str, list[float]]
PlanStepRequest = cache_service_pb2.PlanStepRequest


class Steps:
    """A lease on books of so many blocks, kept in a directory or not at all."""

    def __init__(self, num_blocks: int, directory: Path | None) -> None:
        self.ledger = Ledger(POOL, EPOCH, geometry(num_blocks), directory=directory)
        self.ledger.open_lease(LEASE, ttl_s=1.0, now=0.0)
        self._generator = np.random.default_rng(1)
        self._num_plans = 0

    def admit(self, first: int, count: int, num_tokens: int) -> None:
        """Sequences of tokens that are like no other's, computed at once."""
        prompts = self._generator.integers(0, 50_000, (count, num_tokens), dtype="<i4")
        request = PlanStepRequest()
        for index, prompt in enumerate(prompts):
            request.admissions.add(sequence_id=first + index, token_ids=prompt.tolist())
        self.run(request)

    def run(self, request: PlanStepRequest) -> tuple[float, float]:
        """A step from plan to report; how long each took, in µs."""
        self._num_plans += 1
        request.lease_id, request.epoch, request.request_id = LEASE, EPOCH, str(self._num_plans)
        body = request.SerializeToString()
        start = time.perf_counter()
        plan = self.ledger.plan(PlanRequest(body), now=0.0)
        planned = time.perf_counter()
        grant = grant_pb2.StepGrant.FromString(plan.encode_grant(POOL, EPOCH, 1, LEASE))
        report = report_of(grant, number=self._num_plans, token=1).SerializeToString()
        reported = time.perf_counter()
        self.ledger.settle(StepReport(report))
        return (planned - start) * 1e6, (time.perf_counter() - reported) * 1e6


def geometry(num_blocks: int) -> Geometry:
    return Geometry(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks + 1,
        block_bytes=1,
        max_sequences=4096,
        max_sequence_tokens=2**20,
        vocab_size=50_000,
        model="benchmark",
        model_fingerprint="benchmark",
    )


def decode_of(num_sequences: int) -> PlanStepRequest:
    extends = cache_service_pb2.Extends(sequence_ids=range(num_sequences), token_counts=[1] * num_sequences)
    return PlanStepRequest(extends=extends)


def cost_in_books(num_sequences: int, num_steps: int, *, kept: bool) -> tuple[float, float]:
    """Medians of a decode step's plan and report, in µs."""
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(100_000, Path(folder) if kept else None)
        steps.admit(0, num_sequences, 512)
        request = decode_of(num_sequences)
        taken = np.array([steps.run(request) for _ in range(num_steps)])
    plan, report = np.median(taken, axis=0).tolist()
    return plan, report


def cost_through_grpc(sizes: Sizes, *, kept: bool) -> Iterator[tuple[str, float]]:
    """Rows of the control plane's benchmark, each with its median latency in µs."""
    wanted = ("decode step, 256 sequences, stream", "admission, 4,096 fresh tokens, stream", "empty plan, stream")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        flags = ("--state-dir", f"{folder}/state") if kept else ()
        services = Services(Path(folder), stack, pinned=False, flags=flags)
        for row in rows(sizes):
            if row.name in wanted:
                yield row.name, figure_of([services.measure(row)]).p50_us


def recovery(num_blocks: int, num_rounds: int, num_records: int) -> dict[str, Any]:
    """Seconds that it takes to go on, and how much there is to read."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps = Steps(num_blocks, folder)
        num_filling = max(1, (num_blocks - 8 * NUM_RUNNING) * BLOCK_SIZE // PROMPT_TOKENS)
        for number in range(num_filling):  # all of them cached in the end
            steps.admit(NUM_RUNNING + number, 1, PROMPT_TOKENS - BLOCK_SIZE)
            steps.run(PlanStepRequest(release_sequence_ids=[NUM_RUNNING + number]))
        steps.admit(0, NUM_RUNNING, BLOCK_SIZE)
        request, log = decode_of(NUM_RUNNING), last_log(folder)
        while num_records == RECORDS_PER_LOG and last_log(folder) == log:
            steps.run(request)
        for _ in range(num_records // 2 - 10):
            steps.run(request)
        before = steps.ledger.inspector.counts()
        settled = await_one_log(folder)
        del steps
        gc.collect()
        num_bytes = sum(path.stat().st_size for path in folder.iterdir())
        taken = []
        for _ in range(num_rounds):
            start = time.perf_counter()
            ledger = Ledger.recover(POOL, EPOCH, geometry(num_blocks), directory=folder, now=0.0)
            taken.append(time.perf_counter() - start)
            if ledger.inspector.counts() != before or ledger.inspector.lease(LEASE).num_sequences != NUM_RUNNING:
                raise RuntimeError("what was recovered is not what was there")
            del ledger
            gc.collect()
        return {
            "num_blocks": num_blocks,
            "num_records": num_records,
            "num_logs": settled,
            "mib": num_bytes / 2**20,
            "seconds": taken,
        }


def last_log(folder: Path) -> int:
    return max(int(path.name.removeprefix("log-")) for path in folder.glob("log-*"))


def await_one_log(folder: Path, timeout_s: float = 60.0) -> int:
    """Waits until a snapshot that is being made is done; how many logs there are then."""
    deadline = time.monotonic() + timeout_s
    while (count := len(list(folder.glob("log-*")))) > 1:
        if time.monotonic() > deadline:
            raise RuntimeError("the snapshot does not end")
        time.sleep(0.05)
    return count


def measure(quick: bool, progress: Progress) -> Findings:
    """In turns, so that what else the machine does falls on both."""
    num_rounds, num_steps = (1, 50) if quick else (5, 2_000)
    sizes = QUICK if quick else Sizes(calls=2_000, admissions=300)
    blocks = (1_000, 10_000) if quick else (10_000, 100_000, 1_000_000)
    num_records = 100 if quick else RECORDS_PER_LOG
    books: Samples = {}
    grpc: Samples = {}
    task = progress.add_task("books", total=num_rounds * (len(SEQUENCES) + 1) * 2 + len(blocks))
    for _, num_sequences, kept in product(range(num_rounds), SEQUENCES, (False, True)):
        plan, report = cost_in_books(num_sequences, num_steps, kept=kept)
        for what, us in (("plan", plan), ("report", report)):
            books.setdefault(f"{what}, {num_sequences} running, {kept}", []).append(us)
        progress.advance(task)
    progress.update(task, description="through gRPC")
    for _, kept in product(range(num_rounds), (False, True)):
        for row, us in cost_through_grpc(sizes, kept=kept):
            grpc.setdefault(f"{row}, {kept}", []).append(us)
        progress.advance(task)
    recovered = []
    for num_blocks in blocks:
        progress.update(task, description=f"recovery of {num_blocks:,} blocks")
        recovered.append(recovery(num_blocks, num_rounds, num_records))
        progress.advance(task)
    first = cost_table("through gRPC, as a client sees it: median µs", grpc)
    second = cost_table("the books alone: median µs of a decode step's plan and of its report", books)
    third = table("recovery", "blocks", "records in the log", "MiB on disk", "seconds", words=0)
    for row in recovered:
        third.add_row(
            f"{row['num_blocks']:,}", f"{row['num_records']:,}", f"{row['mib']:.1f}", spread(row["seconds"], ".2f")
        )
    figures = {"through_grpc_us": grpc, "books_us": books, "recovery": recovered}
    return Findings([first, second, third], figures, lambda: plot(grpc, recovered))


def cost_table(title: str, samples: Samples) -> Any:
    made = table(title, "", "without", "with --state-dir", "added")
    for name, without, kept in pairs(samples):
        added = statistics.median(kept) - statistics.median(without)
        made.add_row(
            name,
            spread(without, ".1f"),
            spread(kept, ".1f"),
            f"{added:+.1f} ({added / statistics.median(without):+.0%})",
        )
    return made


def pairs(samples: Samples) -> Iterator[tuple[str, list[float], list[float]]]:
    """Name, without, with."""
    for key in samples:
        if key.endswith(", False"):
            name = key.removesuffix(", False")
            yield name, samples[key], samples[f"{name}, True"]


def plot(grpc: Samples, recovered: list[dict[str, Any]]) -> Figure:
    """Latencies beside one another, and recovery by size."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 2.8), width_ratios=(3, 2))
    for place, (_, without, kept) in enumerate(pairs(grpc)):
        left.barh(place - 0.2, statistics.median(without), 0.36, color="0.75", label=None if place else "without")
        left.barh(
            place + 0.2, statistics.median(kept), 0.36, color="tab:blue", label=None if place else "with --state-dir"
        )
    left.set_yticks(range(len(list(pairs(grpc)))), [name for name, *_ in pairs(grpc)], fontsize=8)
    left.invert_yaxis()
    left.set_xlabel("median µs")
    left.legend(fontsize=8)
    right.plot([row["num_blocks"] for row in recovered], [statistics.median(row["seconds"]) for row in recovered], "o-")
    right.set_xscale("log")
    right.set_ylim(0)
    right.set_xlabel("blocks")
    right.set_ylabel("seconds to go on")
    plain(left)
    plain(right)
    return figure


main = benchmark("control-plane restart", measure, packages=("grpcio",))

if __name__ == "__main__":
    main()
