"""TokenSpeed's C++ scheduler, one group of full attention, pages of 16 tokens, prefix caching on, a step in flight.

It has no block manager of its own to call: each row is calls of the scheduler.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Iterable
from pathlib import Path

import tokenspeed_scheduler as ts
from driving import drive
from workload import BLOCK_SIZE

clock = time.perf_counter_ns
SAMPLED_TOKEN = 7
MAX_STEP_TOKENS = 8192
MAX_REQUESTS = 1024


def make_scheduler(num_blocks: int, *, max_requests: int = MAX_REQUESTS) -> ts.Scheduler:
    """A scheduler with num_blocks usable pages, which never offloads a request."""
    config = ts.SchedulerConfig()
    config.prefix_granularity = BLOCK_SIZE
    config.num_device_pages = num_blocks + 1
    config.num_snapshot_pages = 1
    config.disable_l2_cache = True
    config.max_scheduled_tokens = MAX_STEP_TOKENS
    config.max_batch_size = max_requests
    config.overlap_schedule_depth = 1
    config.cache_groups = [
        ts.CacheGroupConfig(
            group_id="layers",
            block_granularity=BLOCK_SIZE,
            total_pages=num_blocks + 1,
            attn_kind=ts.AttnKind.Full,
        )
    ]
    return ts.Scheduler(config)


def request(seq_id: int, tokens: list[int]) -> ts.RequestSpec:
    """A request without a limit: with one, the scheduler takes all pages that it may need when it begins."""
    spec = ts.RequestSpec()
    spec.request_id, spec.tokens = str(seq_id), tokens
    return spec


def sampled(request_ids: Iterable[str]) -> ts.ExecutionEvent:
    """The event of a step: a token of each request."""
    event = ts.ExecutionEvent()
    for request_id in request_ids:
        result = ts.ForwardEvent.ExtendResult()
        result.request_id, result.tokens = request_id, [SAMPLED_TOKEN]
        event.add_event(result)
    return event


def finished(request_ids: Iterable[str]) -> ts.ExecutionEvent:
    """The event that ends requests."""
    event = ts.ExecutionEvent()
    for request_id in request_ids:
        finish = ts.ForwardEvent.Finish()
        finish.request_id = request_id
        event.add_event(finish)
    return event


def resident_bytes() -> int:
    """The memory of this process, without what the allocator of C keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class TokenSpeed:
    """A request's blocks are findable from its second plan on, or from its end."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._resident = resident_bytes()
        self.clear()

    def clear(self) -> None:
        self._scheduler = make_scheduler(self._num_blocks)
        self._running: dict[str, list[int]] = {}

    def prepare(self, seq_id: int, tokens: list[int]) -> ts.RequestSpec:
        return request(seq_id, tokens)

    def admit(self, spec: ts.RequestSpec) -> int:
        """Timed: submit_requests, next_execution_plan (match, allocate), advance with its first token, and the next
        plan, which publishes. The last only if no other request runs, because it would plan their decodes, too."""
        scheduler, alone = self._scheduler, not self._running
        self._running[spec.request_id] = spec.tokens
        start = clock()
        scheduler.submit_requests([spec])
        scheduler.next_execution_plan()
        event = sampled([spec.request_id])
        scheduler.advance(event)
        if alone:
            scheduler.next_execution_plan()
        elapsed = clock() - start
        if alone:
            scheduler.advance(sampled([spec.request_id]))
        return elapsed

    def release(self, seq_id: int) -> int:
        """Timed: advance with the end of the request."""
        del self._running[str(seq_id)]
        start = clock()
        self._scheduler.advance(finished([str(seq_id)]))
        return clock() - start

    def begin_batch(self, seq_ids: list[int]) -> None:
        self._scheduler.next_execution_plan()

    def end_batch(self, seq_ids: list[int]) -> None:
        names = [str(seq_id) for seq_id in seq_ids]
        self._scheduler.advance(sampled(names))
        self._scheduler.advance(finished(names))
        self._running.clear()

    def extend(self, seq_ids: list[int]) -> int:
        """Timed: next_execution_plan, with the step before in flight, and its batch read. The advance is outside."""
        start = clock()
        self._planned()
        elapsed = clock() - start
        self._scheduler.advance(sampled(map(str, seq_ids)))
        return elapsed

    def extend_and_publish(self, seq_ids: list[int]) -> int:
        """Timed: next_execution_plan and its batch read, the event of the step before made, and advance."""
        start = clock()
        names = self._planned()
        self._scheduler.advance(sampled(names))
        return clock() - start

    def _planned(self) -> list[str]:
        [batch] = self._scheduler.next_execution_plan().forward
        batch.block_tables_arrays()
        names: list[str] = batch.request_ids
        return names

    def fork(self, seq_id: int, child_ids: list[int]) -> int:
        """Timed: an admission for each child, which finds the prompt in the cache: there is no fork."""
        tokens = self._running[str(seq_id)]
        return sum(self.admit(request(child_id, tokens)) for child_id in child_ids)

    def num_free(self) -> int:
        return int(self._scheduler.empty_lcm_blocks())

    def native_bytes(self) -> int:
        """The growth of the process since the scheduler was made, which has all of its memory in C++."""
        return resident_bytes() - self._resident


if __name__ == "__main__":
    drive(TokenSpeed, package="tokenspeed-scheduler")
