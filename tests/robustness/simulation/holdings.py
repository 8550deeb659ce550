"""The things that each simulated process holds and that could grow, counted while it runs, with their bounds.

A bound is the one that the code states: its constant is read here. Of the books of cachemgr only those counts are
here that a schedule can reach, or that nothing else in a schedule checks. A message that waits in a stream's window,
and the tasks of a process, have no constant in the code: their bound is computed from what there is of the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from quire.cachemgr._core import MAX_STEPS_IN_FLIGHT
from quire.cachemgr.bounds import MAX_ATTACHMENTS, MAX_LEASE_ANSWERS, MAX_LEASES, MAX_WAITING_ADMISSIONS, MAX_WATCHES
from quire.cachemgr.service.attachments import ACKNOWLEDGE_AFTER_S
from quire.client.engine.engine import Engine
from quire.client.engine.scheduling.flight import MAX_SHORT_STEPS
from quire.client.engine.scheduling.lookup import MAX_ANSWER_TOKENS, MAX_TENANTS
from quire.serving.interceptor import MAX_CALLS
from quire.serving.server import SERVER_OPTIONS
from quire.worker.service.servicer import MAX_STEPS_WAITING

if TYPE_CHECKING:
    from robustness.simulation.cachemgr import SimulatedCachemgr
    from robustness.simulation.gateway import SimulatedGateway
    from robustness.simulation.network import Network
    from robustness.simulation.worker import SimulatedWorker

_GIVEN = dict(SERVER_OPTIONS)
SILENCE_S = (_GIVEN["grpc.keepalive_time_ms"] + _GIVEN["grpc.keepalive_timeout_ms"]) / 1e3
"""A peer that takes nothing for longer has no connection any more."""


class Holding(NamedTuple):
    """The number of things of one kind that a process holds, and the most that it may."""

    what: str
    count: float
    most: float


def of_cachemgr(cachemgr: SimulatedCachemgr) -> Iterator[Holding]:
    """Yield what cachemgr holds."""
    service, pools = cachemgr.servicer, cachemgr.catalog.pools()
    leases = [lease for pool in pools for lease in pool.ledger.inspector.leases()]
    yield Holding("leases", len(leases), MAX_LEASES)
    yield Holding("remembered calls that make leases", len(service._leasing._lease_answers), MAX_LEASE_ANSWERS)
    yield Holding("admissions that wait", service.statistics().num_waiting_admissions, MAX_WAITING_ADMISSIONS)
    num_watches = service.statistics().num_watches
    yield Holding("watches", num_watches, MAX_WATCHES)
    yield Holding("open calls", cachemgr.guard.statistics().num_open, MAX_CALLS)
    yield Holding("attachments", service._attachments._places.num_taken, MAX_ATTACHMENTS)
    num_listeners = sum(len(listeners) for listeners in cachemgr.catalog._listeners.values())
    num_disks = sum(bool(pool.ledger.geometry.num_disk_blocks) for pool in pools)
    yield Holding("watchers that are told of changes", num_listeners, num_watches + num_disks)
    for lease in leases:
        yield Holding("steps in flight of a lease", lease.num_in_flight, MAX_STEPS_IN_FLIGHT)
    for name, stream in service._attachments._streams.items():
        most = SILENCE_S / ACKNOWLEDGE_AFTER_S + 2 * len(leases) + 1
        yield Holding(f"orders for the worker of {name}", stream.orders.qsize(), most)
    for pool in pools:
        geometry, probe = pool.ledger.geometry, pool.ledger.probe
        yield Holding("rows", probe.num_rows(), geometry.max_sequences)
        yield Holding("copies of evicted blocks", len(probe.host_copies()), geometry.host_cached_limit)


def of_worker(worker: SimulatedWorker, cachemgr: SimulatedCachemgr | None) -> Iterator[Holding]:
    """Yield what a worker holds. Reports that cachemgr has entered wait for its acknowledgement, with no constant."""
    kept, acknowledged, gate = worker.reports.kept(), worker.reports.last_acknowledged, worker.steps.gate
    yield Holding("acknowledged reports", sum(report.report_number <= acknowledged for report in kept), 0)
    pool = None if cachemgr is None else cachemgr.catalog.find(gate.pool, gate.epoch)
    if pool is not None:
        entered = pool.acknowledged_report
        new = [report.lease_id for report in kept if report.report_number > entered]
        yield _most_of_a_lease("reports of a lease that cachemgr does not have", new)
    yield Holding("open leases", gate.statistics().num_open_leases, MAX_LEASES)
    yield _most_of_a_lease("steps of a lease", [step.grant.lease_id for step in worker.steps._running])
    for queue in worker.servicer._owed:
        yield Holding("answers that a stream waits for", queue.qsize(), MAX_STEPS_WAITING)
    yield Holding("sequences", worker.executor.statistics().num_sequences, worker.settings.max_num_seqs)


def _most_of_a_lease(what: str, lease_ids: list[str]) -> Holding:
    return Holding(what, max(Counter(lease_ids).values(), default=0), MAX_STEPS_IN_FLIGHT)


def of_gateway(gateway: SimulatedGateway) -> Iterator[Holding]:
    """Yield what a gateway holds: each of its callers has one request at a time."""
    backend = gateway.backend
    if backend is None:
        return
    engines = [backend] if isinstance(backend, Engine) else [member.engine for member in backend._members.values()]
    yield Holding("requests", sum(engine.statistics().num_requests for engine in engines), gateway.num_callers)
    for engine in engines:
        yield Holding("steps in flight", len(engine._flight), MAX_SHORT_STEPS)
        yield Holding("steps that are not delivered", len(engine._undelivered), MAX_SHORT_STEPS)
        speculation = engine._scheduler._speculation
        if speculation is not None:
            recent = speculation._recent._of
            yield Holding("tenants with recent answers", len(recent), MAX_TENANTS)
            longest = max((sum(len(part.tokens) for part in each.parts) for each in recent.values()), default=0)
            yield Holding("tokens of recent answers", longest, MAX_ANSWER_TOKENS)


def of_network(network: Network) -> Iterator[Holding]:
    """Yield what the streams of all processes hold unread."""
    for process, ends in network._ends.items():
        for end in ends:
            num_bytes = max((sum(map(len, stream.inbox)) for stream in end.streams), default=0)
            yield Holding(f"bytes that a stream of {process.name} has not read", num_bytes, network.window_bytes)
