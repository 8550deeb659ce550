"""The processor time of an admission with breakpoints beside one without, in cachemgr's books."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
from keeping import Pool, report_of, request_of
from loads import Breakpoints
from numpy.typing import NDArray

from quire.cachemgr._core import PlanRequest, StepReport

NUM_BREAKPOINTS = 4
TTL_S = 300.0
POOL_BLOCKS = 65_536


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of processor time for plan and settle: medians of windows, in turns, and of their ratios."""

    num_tokens: int
    is_found: bool
    without_us: float
    with_us: float
    ratio: float
    ratios: list[float]


def measure_cost(num_tokens: int, *, is_found: bool, windows: int, admissions: int) -> Cost:
    """Each way in a pool of its own; the first window of each is not counted."""
    pools = {False: Pool(POOL_BLOCKS), True: Pool(POOL_BLOCKS)}
    generator = np.random.default_rng(num_tokens)
    prompts = generator.integers(1, 2**31 - 2, (admissions, num_tokens), dtype=np.int32)
    times: dict[bool, list[float]] = {False: [], True: []}
    for window in range(windows + 1):
        if not is_found:
            prompts = generator.integers(1, 2**31 - 2, (admissions, num_tokens), dtype=np.int32)
        for keeps in (False, True) if window % 2 else (True, False):
            taken = _window(pools[keeps], prompts[:1].repeat(admissions, 0) if is_found else prompts, keeps, window)
            times[keeps].append(1e6 * taken / admissions)
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


def breakpoints_of(num_tokens: int) -> Breakpoints:
    """At equal distances, the last one at the end."""
    return [(num_tokens * part // NUM_BREAKPOINTS, TTL_S) for part in range(1, NUM_BREAKPOINTS + 1)]


def _window(pool: Pool, prompts: NDArray[np.int32], keeps: bool, window: int) -> float:
    """Seconds of processor time for all of these prompts."""
    num_tokens = prompts.shape[1]
    bodies = [request_of(prompt, breakpoints_of(num_tokens) if keeps else ()) for prompt in prompts]
    requests = [PlanRequest(body) for body in bodies]
    ledger, first = pool.ledger, window * len(prompts) + 1
    reports = [StepReport(report_of(first + number, num_tokens)) for number in range(len(prompts))]
    start = time.process_time()
    for request, report in zip(requests, reports, strict=True):
        ledger.plan(request, now=float(window))
        ledger.settle(report)
    return time.process_time() - start
