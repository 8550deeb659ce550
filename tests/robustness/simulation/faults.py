"""The effect of each kind of fault on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from robustness.simulation.disk import FullDisk
from robustness.simulation.reports import Lie
from robustness.simulation.schedule import Fault, FaultKind

if TYPE_CHECKING:
    from robustness.simulation.cluster import Cluster

MAX_FREE_BYTES = 3_000
SLOW_S = 0.2


def apply(cluster: Cluster, fault: Fault) -> None:
    """Begin a fault; what ends it is an event of the world."""
    world = cluster.world
    if world.tells:
        world.tell(f"-- {fault}")
    cluster.fired[fault.kind] += 1
    cluster.disturbed_until = max(cluster.disturbed_until, world.now + _DO[fault.kind](cluster, fault))


def _kill(cluster: Cluster, fault: Fault) -> float:
    (name,) = fault.target
    cluster.kill(name, fault.size)
    return fault.size


def _terminate(cluster: Cluster, fault: Fault) -> float:
    (name,) = fault.target
    cluster.terminate(name, fault.size)
    return fault.size + 1.0


def _pause(cluster: Cluster, fault: Fault) -> float:
    process = cluster.processes[fault.target[0]]
    process.paused_until = max(process.paused_until, cluster.world.now + fault.size)
    return fault.size


def _slow(cluster: Cluster, fault: Fault) -> float:
    process = cluster.processes[fault.target[0]]
    process.slowness = fault.size

    def end() -> None:
        process.slowness = 1.0

    cluster.world.after(SLOW_S, end)
    return SLOW_S


def _clock(cluster: Cluster, fault: Fault) -> float:
    cluster.clock_offset_s += fault.size
    for process in cluster.processes.values():
        process.clock_offset_s = cluster.clock_offset_s
    return 0.0


def _cut(cluster: Cluster, fault: Fault) -> float:
    cluster.network.cut(*fault.target)
    return 0.0


def _partition(cluster: Cluster, fault: Fault) -> float:
    cluster.network.partition(*fault.target, fault.size)
    return fault.size


def _way_of(fault: Fault) -> tuple[str, ...]:
    """The sender and the receiver of a fault of one direction."""
    return fault.target if fault.way % 2 else fault.target[::-1]


def _freeze(cluster: Cluster, fault: Fault) -> float:
    cluster.network.freeze(*_way_of(fault), fault.size)
    return fault.size


def _half_close(cluster: Cluster, fault: Fault) -> float:
    cluster.network.half_close(*fault.target)
    return 0.0


def _delay(cluster: Cluster, fault: Fault) -> float:
    cluster.network.delay(*_way_of(fault), fault.size)
    return fault.size


def _lose_answer(cluster: Cluster, fault: Fault) -> float:
    cluster.network.lose_answer(*fault.target)
    return 0.0


def _double(cluster: Cluster, fault: Fault) -> float:
    cluster.network.double_next_unary(*fault.target)
    return 0.0


def _power_loss(cluster: Cluster, fault: Fault) -> float:
    cluster.kill("cachemgr", fault.size)
    cluster.disk.lose_power()
    return fault.size


def _full_disk(cluster: Cluster, fault: Fault) -> float:
    process = cluster.processes["cachemgr"]
    process.around = FullDisk(int(cluster.generator.random() * MAX_FREE_BYTES))

    def end() -> None:
        process.around = None

    cluster.world.after(fault.size, end)
    return fault.size


def _reset(cluster: Cluster, fault: Fault) -> float:
    if cluster.cachemgr is not None:
        for pool in cluster.cachemgr.catalog.pools():
            pool.ledger.reset_prefix_cache(now=cluster.world.now)
    return 0.0


def _lie(cluster: Cluster, fault: Fault) -> float:
    worker = cluster.workers.get(fault.target[0])
    if worker is not None:
        worker.reports.lie(tuple(Lie)[fault.way % len(Lie)])
        cluster.world.is_deceived = True
    return 0.0


def _of_worker(do: Callable[[Any, float], None]) -> Callable[[Cluster, Fault], float]:
    def apply_to_worker(cluster: Cluster, fault: Fault) -> float:
        worker = cluster.workers.get(fault.target[0])
        if worker is not None:
            do(worker, fault.size)
        return fault.size

    return apply_to_worker


_DO: dict[FaultKind, Callable[[Cluster, Fault], float]] = {
    FaultKind.KILL: _kill,
    FaultKind.TERMINATE: _terminate,
    FaultKind.PAUSE: _pause,
    FaultKind.OVERSLEEP: _pause,
    FaultKind.SLOW: _slow,
    FaultKind.CLOCK: _clock,
    FaultKind.CUT: _cut,
    FaultKind.PARTITION: _partition,
    FaultKind.FREEZE: _freeze,
    FaultKind.HALF_CLOSE: _half_close,
    FaultKind.DELAY: _delay,
    FaultKind.LOSE_ANSWER: _lose_answer,
    FaultKind.DOUBLE: _double,
    FaultKind.POWER_LOSS: _power_loss,
    FaultKind.FULL_DISK: _full_disk,
    FaultKind.FAIL_STEP: _of_worker(lambda worker, size: worker.fail_next_step()),
    FaultKind.DAMAGE: _of_worker(lambda worker, size: worker.damage_next()),
    FaultKind.HANG: _of_worker(lambda worker, size: worker.hang(size)),
    FaultKind.LATE_REPORTS: _of_worker(lambda worker, size: worker.late(size)),
    FaultKind.DETACH: _of_worker(lambda worker, size: worker.detach()),
    FaultKind.TWICE: _of_worker(lambda worker, size: worker.reports.twice()),
    FaultKind.LIE: _lie,
    FaultKind.LOST_RANK: _of_worker(lambda worker, size: worker.lose_rank()),
    FaultKind.RESET: _reset,
}
