"""The processor time of an admission with breakpoints beside one without, in cachemgr.

It is all that cachemgr does for one beside gRPC: decode the request, plan, encode the answer, decode the report,
settle. The pool is full, as a cache is, and its tenant keeps as much as it may: a new prompt evicts, and ends what was
kept.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
from keeping import Pool, report_of, request_of
from loads import BLOCK_SIZE, Breakpoints
from numpy.typing import NDArray

from quire.cachemgr._core import PlanRequest, StepReport

NUM_BREAKPOINTS = 4
TTL_S = 300.0
POOL_BLOCKS = 65_536
FILLER_TOKENS = 8_192


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of processor time: medians of windows, in turns, and of their ratios."""

    num_tokens: int
    is_found: bool
    without_us: float
    with_us: float
    ratio: float
    ratios: list[float]


class Admissions:
    """A full pool, in which each prompt takes the place of the one before, with breakpoints or without."""

    def __init__(self, generator: np.random.Generator, *, keeps: bool) -> None:
        self.ledger = Pool(POOL_BLOCKS).ledger
        self.keeps = keeps
        self.next_step = 1
        for _ in range(POOL_BLOCKS * BLOCK_SIZE // FILLER_TOKENS):
            self.time(random_prompts(generator, 1, FILLER_TOKENS), now=0.0)

    def time(self, prompts: NDArray[np.int32], *, now: float) -> float:
        """Seconds of processor time for all of these prompts."""
        num_tokens = prompts.shape[1]
        requests = [request_of(prompt, breakpoints_of(num_tokens) if self.keeps else ()) for prompt in prompts]
        reports = [report_of(self.next_step + number, num_tokens) for number in range(len(prompts))]
        self.next_step += len(prompts)
        start = time.process_time()
        for request, report in zip(requests, reports, strict=True):
            self.ledger.plan(PlanRequest(request), now=now).encode_answer()
            self.ledger.settle(StepReport(report))
        return time.process_time() - start


def measure_cost(num_tokens: int, *, is_found: bool, windows: int, admissions: int) -> Cost:
    """Each way in a pool of its own; the first window of each is not counted."""
    generator = np.random.default_rng(num_tokens)
    pools = {keeps: Admissions(generator, keeps=keeps) for keeps in (False, True)}
    prompts = random_prompts(generator, 1, num_tokens).repeat(admissions, 0)
    times: dict[bool, list[float]] = {False: [], True: []}
    for window in range(windows + 1):
        if not is_found:
            prompts = random_prompts(generator, admissions, num_tokens)
        for keeps in (False, True) if window % 2 else (True, False):
            times[keeps].append(1e6 * pools[keeps].time(prompts, now=float(window)) / admissions)
    without, kept = times[False][1:], times[True][1:]
    ratios = [b / a for a, b in zip(without, kept, strict=True)]
    return Cost(
        num_tokens,
        is_found,
        statistics.median(without),
        statistics.median(kept),
        statistics.median(ratios),
        [round(ratio, 3) for ratio in ratios],
    )


def random_prompts(generator: np.random.Generator, count: int, num_tokens: int) -> NDArray[np.int32]:
    return generator.integers(1, 2**31 - 2, (count, num_tokens), dtype=np.int32)


def breakpoints_of(num_tokens: int) -> Breakpoints:
    """At equal distances, the last one at the end."""
    return [(num_tokens * part // NUM_BREAKPOINTS, TTL_S) for part in range(1, NUM_BREAKPOINTS + 1)]
