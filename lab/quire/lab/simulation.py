"""One run in virtual time: a queue of events, the pools, and the router. Nothing sleeps, and no clock is read."""

from __future__ import annotations

import heapq
import os
import random
from collections.abc import Callable, Sequence

from quire.cache.v1.cache_service_pb2 import HostBlockCounts, LayerGroupStatistics, PoolStatistics
from quire.cachemgr._core import WrongVictims
from quire.client.errors import InvalidRequest
from quire.gateway.routing.choosing import OpenRequest, OutputLength
from quire.lab.config import LabConfig, LayerGroup
from quire.lab.load import make_requests
from quire.lab.measures import (
    Outcome,
    Record,
    Series,
    by_tenant,
    over_arrivals,
    quantiles_of,
    ratio,
    summarise,
)
from quire.lab.policy_files import (
    errors_of,
    eviction_policies,
    make_router,
    scheduling_policies,
    wrong_result,
)
from quire.lab.pool import Job, SimulatedPool, prompt_bytes
from quire.lab.requests import Request
from quire.lab.routers import Arrival

_ARRIVAL, _TURN = 0, 1
OnEnd = Callable[[int], None]
"""Gets the number of requests that have ended since the last call."""


class Simulation:
    """A configuration with a seed."""

    def __init__(self, config: LabConfig, seed: int, requests: Sequence[Request] | None = None) -> None:
        """requests: those to serve, instead of the configuration's load. Raises ConfigError."""
        self.config, self.seed = config, seed
        self.requests = make_requests(config.load, seed) if requests is None else requests
        self._router = make_router(config.policy.router, config.folder, random.Random(seed))
        make_policy = scheduling_policies(config.policy.scheduler, config.folder)
        make_eviction = eviction_policies(config.fleet.eviction, config.folder)
        verify = os.environ.get("QUIRE_VERIFY") == "1"
        width = len(str(config.fleet.workers))
        self.pools = [
            SimulatedPool(
                f"worker-{number:0{width}}",
                config.fleet,
                make_policy(),
                make_eviction(config.fleet.blocks),
                verify=verify,
            )
            for number in range(1, config.fleet.workers + 1)
        ]
        self._index = {pool.name: index for index, pool in enumerate(self.pools)}
        self._lengths = OutputLength()
        self._open: dict[int, OpenRequest] = {}
        self._followers = {
            request.after: number for number, request in enumerate(self.requests) if request.after is not None
        }
        self._events: list[tuple[float, int, int, int]] = []
        self._num_events = 0
        self._now_s = 0.0
        self._num_ended = 0
        self._busy_s = [0.0] * len(self.pools)
        """By pool, when the last request ended. A step that was sent ahead of an end may go on."""
        self._series = Series()
        self.records = [Record(each.tenant, each.num_prompt, each.num_output) for each in self.requests]

    def run(self, on_end: OnEnd | None = None) -> Outcome:
        """All requests, until the last has ended. Raises ConfigError if a policy's file fails."""
        for number, request in enumerate(self.requests):
            if request.after is None:
                self._push(request.at_s, _ARRIVAL, number)
        choice, eviction, folder = self.config.policy, self.config.fleet.eviction, self.config.folder
        with errors_of(choice.router, choice.scheduler, eviction, folder):
            try:
                self._run(on_end or _ignore)
            except WrongVictims as error:
                raise wrong_result(eviction, folder, self.pools[0].eviction, "evict", str(error)) from None
        return self._outcome()

    def _run(self, on_end: OnEnd) -> None:
        num_told = 0
        while self._events:
            at_s, _, kind, index = heapq.heappop(self._events)
            while at_s > self._series.next_s:
                self._series.add(self._sample())
            self._now_s = at_s
            if kind == _ARRIVAL:
                self._arrive(index)
            else:
                self._turn(self.pools[index], index)
            if self._num_ended >= num_told + 32:
                on_end(self._num_ended - num_told)
                num_told = self._num_ended
        self._series.add(self._sample())
        on_end(self._num_ended - num_told)
        if self._num_ended != len(self.requests):
            raise RuntimeError(f"{len(self.requests) - self._num_ended} requests have not ended")

    def _push(self, at_s: float, kind: int, index: int) -> None:
        """Events of one time happen in the order in which they were pushed."""
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, kind, index))

    def _turn(self, pool: SimulatedPool, index: int) -> None:
        pool.wakes_at_s = pool.turn(self._now_s, self._on_first, self._on_end)
        if pool.wakes_at_s is not None:
            self._push(pool.wakes_at_s, _TURN, index)

    def _arrive(self, number: int) -> None:
        request, record = self.requests[number], self.records[number]
        is_known = self.config.load.lengths == "known"
        tokens = request.content.tokens()
        prompt = prompt_bytes(tokens[: request.num_prompt])
        token_ids: list[int] = tokens.tolist()
        record.arrived_at_s = self._now_s
        for pool in self.pools:
            pool.look_for(prompt, request.tenant)
        arrival = Arrival(
            token_ids=token_ids[: request.num_prompt],
            tenant=request.tenant,
            session=request.session,
            max_tokens=request.num_output if is_known else None,
            at_s=self._now_s,
        )
        pool = self._place(arrival)
        record.pool = self._index[pool.name]
        expected = self._lengths.expected(arrival.max_tokens, 1)
        use = OpenRequest(pool.use, num_missing=request.num_prompt - pool.num_found, num_expected=expected)
        try:
            pool.add(number, token_ids, request.num_prompt, tenant=request.tenant, is_length_known=is_known)
        except InvalidRequest:
            use.leave()
            record.was_refused = True
            self._finish(number)
            return
        self._open[number] = use
        if pool.wakes_at_s is None:
            pool.wakes_at_s = self._now_s
            self._push(self._now_s, _TURN, record.pool)

    def _place(self, arrival: Arrival) -> SimulatedPool:
        placed = self._router.place(arrival, self.pools)
        if not isinstance(placed, SimulatedPool) or self._index.get(placed.name) is None:
            said = f"place returned {placed!r}: must return one of the pools that it was given"
            raise wrong_result(self.config.policy.router, self.config.folder, self._router, "place", said)
        return placed

    def _on_first(self, job: Job) -> None:
        record = self.records[job.number]
        record.first_at_s, record.num_cached = job.first_at_s, job.num_cached
        self._open[job.number].begin_output()

    def _on_end(self, job: Job) -> None:
        record = self.records[job.number]
        record.ended_at_s, record.num_generated = job.ended_at_s, job.num_generated
        record.was_refused = job.first_at_s is None
        self._open.pop(job.number).leave()
        if not record.was_refused:
            self._lengths.observe(job.num_generated)
        self._finish(job.number)

    def _finish(self, number: int) -> None:
        self._num_ended += 1
        if self._num_ended == len(self.requests):
            self._busy_s = [pool.busy_until(self._now_s) for pool in self.pools]
        follower = self._followers.get(number)
        if follower is not None:
            self._push(self._now_s + self.requests[follower].at_s, _ARRIVAL, follower)

    # Results.

    def _sample(self) -> dict[str, float]:
        schedulers = [pool.scheduler_statistics() for pool in self.pools]
        books = [pool.pool_statistics() for pool in self.pools]
        return {
            "running": sum(each.num_running for each in schedulers),
            "waiting": sum(each.num_waiting + each.num_draining for each in schedulers),
            "used_blocks": sum(each.block_counts.active_count + each.block_counts.retired_count for each in books),
            "cached_blocks": sum(each.block_counts.cached_count for each in books),
            "evicted_blocks": sum(each.evicted_block_count for each in books),
            "preemptions": sum(each.preemptions for each in schedulers),
            "generated_tokens": sum(each.sampled_tokens for each in schedulers),
            "computed_tokens": sum(pool.num_computed for pool in self.pools),
            "busy_s": sum(pool.busy_until(self._series.next_s) for pool in self.pools),
            "ended": self._num_ended,
        } | (_host_sample(self.pools, books) if self.config.fleet.host_blocks else {})

    def _outcome(self) -> Outcome:
        limits, fleet = self.config.limits, self.config.fleet
        last, series = self._series.samples[-1], self._series.columns()
        books = [pool.pool_statistics() for pool in self.pools]
        counters = {
            "evicted_blocks": last["evicted_blocks"],
            "preemptions": last["preemptions"],
            "offloads": sum(each.offload_count for each in books),
            "restores": sum(each.restore_count for each in books),
            "copied_blocks": sum(pool.num_copied for pool in self.pools),
            "found_in_host_tokens": sum(each.found_in_host_token_count for each in books),
            "read_from_disk_tokens": sum(each.read_from_disk_block_count for each in books) * fleet.block_size,
            "copying_s": sum(pool.copying_s for pool in self.pools),
            "computed_tokens": last["computed_tokens"],
            "recomputed_tokens": sum(each.recomputed_token_count for each in books),
            "busy_s": sum(self._busy_s),
            "workers": fleet.workers,
            "steps": sum(pool.num_steps for pool in self.pools),
            "used_ratio": ratio(sum(series["used_blocks"]), len(series["at_s"]) * fleet.blocks * fleet.workers),
        }
        metrics = summarise(self.records, limits, counters=counters)
        served = [record for record in self.records if not record.was_refused]
        return Outcome(
            name=self.config.name,
            seed=self.seed,
            metrics=metrics,
            series=series,
            arrivals=over_arrivals(self.records, limits),
            quantiles=quantiles_of(self.records),
            tenants=by_tenant(served, limits),
            pools=[self._figures_of(index, metrics["duration_s"]) for index in range(len(self.pools))],
            layer_groups=_by_layer_group(fleet.layer_groups, [each.layer_groups for each in books]),
        )

    def _figures_of(self, index: int, duration_s: float) -> dict[str, float]:
        pool, books = self.pools[index], self.pools[index].pool_statistics()
        placed = [record for record in self.records if record.pool == index and not record.was_refused]
        return {
            "requests": len(placed),
            "busy_ratio": ratio(self._busy_s[index], duration_s),
            "hit_ratio": ratio(sum(r.num_cached for r in placed), sum(r.num_prompt for r in placed)),
            "evicted_blocks": books.evicted_block_count,
            "preemptions": pool.scheduler_statistics().preemptions,
        }


def _host_sample(pools: Sequence[SimulatedPool], books: Sequence[PoolStatistics]) -> dict[str, float]:
    return {
        "host_blocks": sum(_num_used(each.host_block_counts) for each in books),
        "copied_blocks": sum(pool.num_copied for pool in pools),
    }


def _num_used(counts: HostBlockCounts) -> int:
    """Blocks of the host tier that are not free."""
    return counts.held_count + counts.retired_count + counts.cached_count


def _by_layer_group(
    groups: Sequence[LayerGroup], by_pool: Sequence[Sequence[LayerGroupStatistics]]
) -> dict[str, dict[str, float]]:
    """The counters of each group. The books count none in a pool with one group."""
    by_group = zip(*by_pool, strict=True)
    return {
        f"{number}: {groups[number]}": {
            "found_blocks": sum(each.found_block_count for each in pools),
            "passed_blocks": sum(each.passed_block_count for each in pools),
            "evicted_blocks": sum(each.evicted_block_count for each in pools),
        }
        for number, pools in enumerate(by_group)
    }


def _ignore(_: int) -> None:
    pass
