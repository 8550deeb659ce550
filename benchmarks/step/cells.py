"""One kind of step, again and again, through the worker's executor: decode at a batch and a context, and prompts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from in_process import make_executor
from lengths import lengths_around
from roofline import Ceilings, num_scores, step_bound_s, synchronize
from running import Ended, run_steps, steps_in_flight
from shapes import BLOCK_SIZE, Shape
from worker_flags import DEFAULTS, WorkerFlags

from quire.cache.v1 import grant_pb2
from quire.worker.grant.decoding import AcceptedStep
from quire.worker.memory.kv_pool import NULL_BLOCK, bytes_per_block
from quire.worker.model.paged_model import PagedModel
from quire.worker.run.executor import Executor, StepResult

WARM_UP_STEPS = 3
LEASE = "benchmark"
MEMORY_SHARE = 0.85
"""The part of a GPU's free memory for keys and values; graphs and the largest step take some."""


@dataclass(frozen=True, slots=True)
class Cell:
    """num_seqs sequences with `cached` tokens in the pool and `new` to compute: 1 is a decode step.

    must_ms and goal_ms are the targets of a step on an H200 in bfloat16, if there are any. Mixed sequences have
    `cached` tokens on average; see lengths_around().
    """

    num_seqs: int
    cached: int
    new: int = 1
    must_ms: float | None = None
    goal_ms: float | None = None
    is_mixed: bool = False

    @property
    def name(self) -> str:
        if self.new == 1:
            return f"decode {self.num_seqs} x {self.cached}" + (" mixed" if self.is_mixed else "")
        return f"prompt {self.num_seqs} x {self.new}" + (f" on {self.cached}" if self.cached else "")

    @property
    def starts(self) -> list[int]:
        """The tokens of each sequence in the pool."""
        return lengths_around(self.cached, self.num_seqs) if self.is_mixed else [self.cached] * self.num_seqs

    @property
    def num_blocks(self) -> int:
        """The blocks of all sequences, with room for the measured steps: as many for each as the longest needs."""
        return self.num_seqs * -(-(max(self.starts) + self.new + 64) // BLOCK_SIZE)

    def bound_s(self, shape: Shape, dtype: torch.dtype, ceilings: Ceilings) -> float:
        return step_bound_s(
            shape,
            dtype,
            ceilings,
            num_tokens=self.num_seqs * self.new,
            num_sampled=self.num_seqs,
            num_keys=sum(self.starts) + self.num_seqs * self.new,
            num_scores=sum(num_scores(start, self.new) for start in self.starts),
        )


@dataclass(frozen=True, slots=True)
class Timing:
    """The time of a cell's step, in two ways.

    step_ms     steady state: from a step's tokens to those of the next one, which was launched before; a sample a step
    lone_ms     of a step by itself: from when the executor gets it to when its tokens are read. The same on a CPU,
                where no step is launched ahead
    prepare_ms, forward_ms, sample_ms, gap_ms
                in the steady state, the executor's own medians: the parts of a step, and of a decode the time from the
                end of the step before to the forward
    num_compiled
                kernels compiled in measured steps
    mode        how each part of the step ran
    flags       the worker's flags that differ from its defaults
    """

    model: str
    dtype: str
    cell: str
    flags: str
    bound_ms: float
    step_ms: list[float]
    lone_ms: list[float]
    prepare_ms: float
    forward_ms: float
    sample_ms: float
    gap_ms: float | None
    must_ms: float | None
    goal_ms: float | None
    num_compiled: int
    mode: dict[str, str]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)

    @property
    def lone_median_ms(self) -> float:
        return statistics.median(self.lone_ms)

    @property
    def of_bound(self) -> float:
        return self.bound_ms / self.median_ms

    def describe(self) -> dict[str, Any]:
        medians = {"median_ms": self.median_ms, "lone_median_ms": self.lone_median_ms}
        return asdict(self) | medians | {"of_bound": round(self.of_bound, 4)}


def fits(cell: Cell, model: PagedModel) -> bool:
    """True if its pool fits the free memory of the model's device."""
    if model.device.type != "cuda":
        return True
    needed = (cell.num_blocks + 1) * bytes_per_block(model.specs, BLOCK_SIZE, model.dtype)
    return bool(needed < MEMORY_SHARE * torch.cuda.mem_get_info(model.device)[0])


def executor_for(model: PagedModel, cells: Sequence[Cell], flags: WorkerFlags = DEFAULTS) -> Executor:
    """An executor for all of these cells, with a pool of random keys and values."""
    pool = model.make_pool(num_blocks=1 + max(cell.num_blocks for cell in cells), block_size=BLOCK_SIZE)
    for tensor in pool.tensors():
        tensor.normal_()
        tensor[NULL_BLOCK] = 0
    return make_executor(model, pool, max_num_seqs=max(cell.num_seqs for cell in cells), flags=flags)


def measure(
    shape: Shape,
    model: PagedModel,
    executor: Executor,
    cell: Cell,
    ceilings: Ceilings,
    *,
    num_steps: int,
    seconds: float,
    mode: dict[str, str],
    num_compiled: Callable[[], int],
    flags: WorkerFlags = DEFAULTS,
) -> Timing:
    """Run the cell's step num_steps times in each way, each for so many seconds at most.

    Raises RuntimeError if the executor does not compute one, or no time was left for one.
    """
    in_flight = steps_in_flight(executor)
    passes = Passes(model, executor, cell, num_steps, seconds, num_compiled)
    lone, steady = passes.run(1), passes.run(in_flight) if in_flight > 1 else None
    ended = lone if steady is None else steady
    if not lone or not ended:
        raise RuntimeError(f"no step ended within {seconds:g} s")

    def median_ms(part: Callable[[StepResult], float]) -> float:
        return _ms(statistics.median(part(each.result) for each in ended))

    gaps = [each.result.gap_s for each in ended if each.result.gap_s is not None]

    return Timing(
        model=shape.name,
        dtype=str(model.dtype).removeprefix("torch."),
        cell=cell.name,
        flags=str(flags),
        bound_ms=_ms(cell.bound_s(shape, model.dtype, ceilings)),
        step_ms=[_ms(each.seconds) for each in ended],
        lone_ms=[_ms(each.seconds) for each in lone],
        prepare_ms=median_ms(lambda result: result.prepare_s),
        forward_ms=median_ms(lambda result: result.forward_s),
        sample_ms=median_ms(lambda result: result.sample_s),
        gap_ms=_ms(statistics.median(gaps)) if gaps else None,
        must_ms=cell.must_ms,
        goal_ms=cell.goal_ms,
        num_compiled=passes.num_compiled,
        mode=mode,
    )


class Passes:
    """Runs of a cell's steps, each from its beginning. Kernels compiled in the measured steps are counted."""

    def __init__(
        self,
        model: PagedModel,
        executor: Executor,
        cell: Cell,
        num_steps: int,
        seconds: float,
        num_compiled: Callable[[], int],
    ) -> None:
        self.num_compiled = 0
        self._model = model
        self._executor = executor
        self._cell = cell
        self._num_steps = num_steps
        self._seconds = seconds
        self._count = num_compiled

    def run(self, in_flight: int) -> list[Ended]:
        """Run the warm-up, then the measured steps, without those that fill the pipeline."""
        num_filling = in_flight - 1
        count = WARM_UP_STEPS + num_filling + self._num_steps
        steps = make_steps(self._cell, count, vocab_size=self._model.vocab_size)
        run = partial(
            run_steps, self._executor, in_flight=in_flight, synchronize=partial(synchronize, self._model.device)
        )
        run(steps[:WARM_UP_STEPS])
        before = self._count()
        ended = run(steps[WARM_UP_STEPS:], seconds=self._seconds)
        self.num_compiled += self._count() - before
        self._executor.fence_lease(LEASE)
        return ended[num_filling:]


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 4)


def make_steps(cell: Cell, count: int, *, vocab_size: int) -> list[AcceptedStep]:
    """A decode's steps each compute the token after the last one; a prompt's all compute the same tokens again."""
    generator = np.random.default_rng(0)
    block_ids = 1 + generator.permutation(cell.num_blocks)
    seq_ids = list(range(1, cell.num_seqs + 1))
    steps = []
    for number in range(count):
        is_decode = cell.new == 1
        starts = [start + (number if is_decode else 0) for start in cell.starts]
        grant = grant_pb2.StepGrant(
            lease_id=LEASE,
            step_number=number + 1,
            known_step_number=number,
            run_sequence_ids=seq_ids,
            run_starts=starts,
            run_token_counts=[cell.new] * cell.num_seqs,
            run_samples=[True] * cell.num_seqs,
        )
        if number == 0:
            grant.write_sequence_ids.extend(seq_ids)
            grant.write_first_indexes.extend([0] * cell.num_seqs)
            grant.write_block_counts.extend([cell.num_blocks // cell.num_seqs] * cell.num_seqs)
            grant.write_block_ids.extend(block_ids.tolist())
        given = {}
        if number == 0 or not is_decode:
            tokens = generator.integers(3, vocab_size, (cell.num_seqs, cell.new), dtype=np.int32)
            given = dict(enumerate(tokens))
        steps.append(AcceptedStep(grant, given_tokens=given))
    return steps
