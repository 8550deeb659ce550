"""The time of the engine's steps on a CPU by part, and the least time that the machine could take for them.

The work runs once more through the engine in this process, with a clock around each part. Then the matrix products of
all its steps run again, one after the other, with nothing between. The last bound is by the machine's rates, of a large
product and of reading memory.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from report import percent, table
from rich.table import Table
from roofline import Ceilings, measure_ceilings, num_scores, step_bound_s
from shapes import Shape
from torch import nn

from quire.worker.attention.torch_attention import AttentionStep
from quire.worker.memory.step_batch import StepBatch
from quire.worker.model.packed_linear import PackedLinear
from quire.worker.model.paged_model import PagedModel
from quire.worker.run.executor import Executor
from quire.worker.sampling.sampler import Sampler

LAYERS, OUTPUT, ATTENTION = "products of the layers", "product with the output matrix", "attention"
FORWARD, SAMPLING, STEP = "rest of the forward", "sampling", "tables, copies and the batch"
BETWEEN = "between steps: engine, books, messages"
PARTS = (LAYERS, OUTPUT, ATTENTION, FORWARD, SAMPLING, STEP, BETWEEN)

LARGE_PRODUCT = 2048
READ_BYTES = 1 << 28
REPEATS = 5


@dataclass(frozen=True, slots=True)
class StepSize:
    """A step: tokens, tokens with logits, keys that are read, and pairs of a query and a key."""

    num_tokens: int
    num_logits: int
    num_keys: int
    num_scores: int


@dataclass(slots=True)
class Clock:
    """Seconds by part, on one thread. Time of a part within another one counts for the inner one alone."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: list[StepSize] = field(default_factory=list)
    _inner: float = 0.0

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call with its time counted."""

        @wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            before, self._inner = self._inner, 0.0
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent = time.perf_counter() - start
                self.seconds[part] += spent - self._inner
                self._inner = before + spent

        return run

    def counted(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a PagedModel's forward with its steps noted."""

        @wraps(forward)
        def run(model: PagedModel, batch: StepBatch, *args: Any) -> Any:
            ends, counts = batch.seq_lens_host, batch.counts_host
            scores = sum(num_scores(end - count, count) for end, count in zip(ends, counts, strict=True))
            self.steps.append(StepSize(sum(counts), len(batch.logit_indices), sum(ends), scores))
            return forward(model, batch, *args)

        return run


@contextmanager
def clocked(model: nn.Module) -> Iterator[Clock]:
    """Count the time of the steps in this context that run on a model's modules."""
    clock = Clock()
    layers, output = linears(model)
    methods = (
        (AttentionStep, "write", ATTENTION),
        (AttentionStep, "attend", ATTENTION),
        (Sampler, "sample", SAMPLING),
        (Executor, "execute", STEP),
    )
    with ExitStack() as stack:
        for owner, name, part in methods:
            stack.enter_context(patch.object(owner, name, clock.timed(part, getattr(owner, name))))
        forward = clock.counted(clock.timed(FORWARD, PagedModel.forward))
        stack.enter_context(patch.object(PagedModel, "forward", forward))
        for module in (*layers, output):
            part = OUTPUT if module is output else LAYERS
            stack.enter_context(patch.object(module, "forward", clock.timed(part, module.forward)))
        yield clock


def linears(model: nn.Module) -> tuple[list[Any], Any]:
    """Return the linear modules of a model's layers, and its output layer."""
    output: Any = model.get_output_embeddings()  # type: ignore[operator]
    found = [module for module in model.modules() if isinstance(module, nn.Linear | PackedLinear)]
    return [module for module in found if module is not output], output


def products_s(model: nn.Module, steps: Sequence[StepSize]) -> float:
    """Seconds of all matrix products of the steps, one after the other: the shortest of some repeats of each size."""
    layers, output = linears(model)
    in_layers = Counter(step.num_tokens for step in steps)
    in_output = Counter(step.num_logits for step in steps)
    return sum(count * shortest_s(layers, rows) for rows, count in in_layers.items()) + sum(
        count * shortest_s([output], rows) for rows, count in in_output.items()
    )


def shortest_s(modules: Sequence[Any], rows: int) -> float:
    """Seconds of the products of so many rows with some linear modules."""
    inputs = {width: torch.randn(rows, width) for width in {module.in_features for module in modules}}

    def run() -> float:
        start = time.perf_counter()
        for module in modules:
            module(inputs[module.in_features])
        return time.perf_counter() - start

    with torch.inference_mode():
        return min(run() for _ in range(REPEATS))


@dataclass(frozen=True, slots=True)
class PartTimes:
    """The seconds of a workload by part, and bounds: medians of the runs."""

    workload: str
    num_generated: int
    num_steps: int
    num_tokens: int
    seconds: dict[str, float]
    products_s: float
    by_rates_s: float

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


async def time_parts(
    name: str,
    num_generated: int,
    run: Callable[[], Awaitable[object]],
    *,
    forget: Callable[[], Awaitable[object]],
    model: nn.Module,
    shape: Shape,
    ceilings: Ceilings,
    rounds: int,
) -> PartTimes:
    """Run a workload some times through the engine in this process, over this model; `forget` before each run."""
    runs: list[dict[str, float]] = []
    steps: list[StepSize] = []
    for _ in range(rounds):
        await forget()
        with clocked(model) as clock:
            start = time.perf_counter()
            await run()
            spent = time.perf_counter() - start
        steps = clock.steps
        runs.append({**clock.seconds, BETWEEN: spent - sum(clock.seconds.values())})
    by_rates_s = sum(step_bound_s(shape, torch.float32, ceilings, **_sizes(step)) for step in steps)
    return PartTimes(
        name,
        num_generated,
        num_steps=len(steps),
        num_tokens=sum(step.num_tokens for step in steps),
        seconds={part: round(statistics.median(each.get(part, 0.0) for each in runs), 4) for part in PARTS},
        products_s=round(products_s(model, steps), 4),
        by_rates_s=round(by_rates_s, 4),
    )


def _sizes(step: StepSize) -> dict[str, int]:
    return {
        "num_tokens": step.num_tokens,
        "num_sampled": step.num_logits,
        "num_keys": step.num_keys,
        "num_scores": step.num_scores,
    }


def measure_cpu() -> Ceilings:
    """Return the rates of float32 with this process's threads."""
    return measure_ceilings(torch.device("cpu"), torch.float32, num_bytes=READ_BYTES, size=LARGE_PRODUCT)


def parts_table(times: Sequence[PartTimes], ceilings: Ceilings) -> Table:
    """A row for each part and each bound, and two columns for each workload."""
    rates = f"{ceilings.flops_per_s / 1e9:.0f} GFLOP/s, {ceilings.bytes_per_s / 1e9:.1f} GB/s read"
    names = [heading for each in times for heading in (f"{each.workload}, ms a step", "of the time")]
    made = table(f"Quire, in one process: where its time goes; float32, {rates}", "part", *names)
    rows: list[tuple[str, list[float]]] = [(part, [each.seconds[part] for each in times]) for part in PARTS]
    rows.append(("all", [each.total_s for each in times]))
    rows.append(("bound: the products alone", [each.products_s for each in times]))
    rows.append(("bound: by the rates", [each.by_rates_s for each in times]))
    for name, seconds in rows:
        cells = []
        for each, spent in zip(times, seconds, strict=True):
            cells += [f"{1000 * spent / each.num_steps:.2f}", percent(spent / each.total_s)]
        made.add_row(name, *cells)
    return made


def describe(times: Sequence[PartTimes], ceilings: Ceilings) -> dict[str, Any]:
    """Return the figures for JSON."""
    return {"rates": ceilings.describe(), "workloads": [asdict(each) for each in times]}
