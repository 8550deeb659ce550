"""Rows that only our core has: the floor of a step, releases with a step in flight, the path of a message, memory."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import psutil
from core import EPOCH, LEASE, Core, Report
from workload import BATCH_STEPS, BLOCK_SIZE, PROMPT_TOKENS, Prompts, Rows, fill, settle_garbage

from quire.cache.v1 import cache_service_pb2
from quire.cachemgr._core import PlanRequest
from quire.cachemgr.catalog import AttachedPool
from quire.cachemgr.service import messages

Samples = dict[str, list[float]]
clock = time.perf_counter_ns


def empty_step(rows: Rows, core: Core) -> Samples:
    """`plan` of nothing and `settle` of its step: the floor of every row, subtracted from none."""
    return {"empty_step": rows.repeat(core.empty_step)}


def release_in_flight(rows: Rows, core: Core) -> Samples:
    """Release of 2,048 tokens while a step that reads them is in flight: `plan`, and the same with both `settle`s."""
    settled: list[float] = []

    def once() -> float:
        seq_id, _ = rows.admitted()
        planned, with_settle = core.release_in_flight(seq_id)
        settled.append(with_settle)
        return planned

    planned = rows.repeat(once)
    return {"release_in_flight": planned, "release_in_flight_settled": settled[-len(planned) :]}


# -- the path of a message -------------------------------------------------------------------------------------------

PARTS = ("parse", "plan", "answer")


def plan_message(core: Core, pool: AttachedPool, body: bytes) -> tuple[Any, list[int]]:
    """A plan as the servicer answers it; returns the plan and nanoseconds of each of PARTS.

    parse: `PlanRequest`. plan: `Ledger.plan`. answer: `messages.encode_plan`, with the grant's signature.
    """
    times = [clock()]
    request = PlanRequest(body)
    times.append(clock())
    plan = core.ledger.plan(request, now=1.0)
    times.append(clock())
    messages.encode_plan(plan, pool, lease_id=request.lease_id)
    times.append(clock())
    return plan, [after - before for before, after in itertools.pairwise(times)]


def by_part(name: str, timings: Iterable[list[int]]) -> Samples:
    columns = list(zip(*timings, strict=True))
    samples: Samples = {f"{name}: {part}": list(column) for part, column in zip(PARTS, columns, strict=True)}
    return samples | {f"{name}: all": [sum(parts) for parts in zip(*columns, strict=True)]}


def message_rows(rows: Rows, core: Core) -> Samples:
    """A fresh prompt of 2,048 tokens, and one token of 256 sequences with a step in flight, each as a message."""
    pool = AttachedPool(core.ledger, b"k" * 32, "-", terms=(1,))
    return by_part("message_fresh", fresh_messages(rows, core, pool)) | by_part(
        "message_extend", extend_messages(rows, core, pool)
    )


def fresh_messages(rows: Rows, core: Core, pool: AttachedPool) -> list[list[int]]:
    timings = []
    for number in range(rows.repeats + rows.warm_up):
        rows.require_free(2 * PROMPT_TOKENS // BLOCK_SIZE)
        pool.ledger = core.ledger
        seq_id = rows.prompts.seq_id()
        request = cache_service_pb2.PlanStepRequest(lease_id=LEASE, epoch=EPOCH, request_id=f"fresh {number}")
        request.admissions.add(sequence_id=seq_id, token_ids=rows.prompts.tokens(PROMPT_TOKENS))
        plan, taken = plan_message(core, pool, request.SerializeToString())
        Report(plan).settle(core.ledger, LEASE)
        core.release(seq_id)
        timings.append(taken)
    return timings[rows.warm_up :]


def extend_messages(rows: Rows, core: Core, pool: AttachedPool) -> list[list[int]]:
    timings = []
    with rows.running() as seq_ids:
        pool.ledger = core.ledger
        for number in range(BATCH_STEPS):
            request = cache_service_pb2.PlanStepRequest(lease_id=LEASE, epoch=EPOCH, request_id=f"extend {number}")
            request.extends.sequence_ids.extend(seq_ids)
            request.extends.token_counts.extend([1] * len(seq_ids))
            plan, taken = plan_message(core, pool, request.SerializeToString())
            core.settle_before(plan)
            timings.append(taken)
    return timings


# -- what tokens cost that are kept for watchers -----------------------------------------------------------------------


def kept_tokens_ratio(num_blocks: int, *, repeats: int) -> float:
    """The time of an admission of 2,048 fresh tokens with its step's report, tokens kept over not kept; in turns.

    Both pools are full of cached blocks, so that each admission evicts as many blocks as it takes.
    """
    prompts = Prompts()
    cores = {keep: Core(num_blocks, keep_tokens=keep) for keep in (True, False)}
    for core in cores.values():
        fill(core, prompts, num_blocks)
    taken: dict[bool, list[int]] = {True: [], False: []}
    settle_garbage()
    for number in range(repeats):
        for keep in (True, False) if number % 2 else (False, True):
            seq_id = prompts.seq_id()
            taken[keep].append(cores[keep].admit(cores[keep].prepare(seq_id, prompts.tokens(PROMPT_TOKENS))))
            cores[keep].release(seq_id)
    return statistics.median(taken[True]) / statistics.median(taken[False])


# -- memory ----------------------------------------------------------------------------------------------------------


def metadata_per_block(num_blocks: int, *, keep_tokens: bool) -> float:
    """Bytes of memory per block of a ledger full of cached blocks, sequences released: the growth of a process.

    The core is not in Python's memory, so it is the resident set that is read, in a process of its own.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(resident_growth, num_blocks, keep_tokens).result() / num_blocks


def resident_growth(num_blocks: int, keep_tokens: bool) -> int:
    """Bytes that this process grows by when a pool is made and filled."""
    fill(Core(1_000), Prompts(), 1_000)  # allocations that happen only once
    gc.collect()
    before = psutil.Process().memory_info().rss
    core = Core(num_blocks, keep_tokens=keep_tokens)
    fill(core, Prompts(), num_blocks)
    gc.collect()
    assert messages.counts_of(core.ledger).cached_count >= num_blocks - PROMPT_TOKENS // BLOCK_SIZE
    return psutil.Process().memory_info().rss - before


# -- all of it -------------------------------------------------------------------------------------------------------

OWN_ROWS: tuple[Callable[[Rows, Core], Samples], ...] = (empty_step, release_in_flight, message_rows)


def measure(num_blocks: int, *, repeats: int) -> Samples:
    """Every row, those of the common interface included, on a pool of this size."""
    core = Core(num_blocks)
    rows = Rows(core, num_blocks, repeats=repeats)
    samples: Samples = {}
    for own in OWN_ROWS:
        settle_garbage()
        samples |= own(rows, core)
    return rows.all() | samples
