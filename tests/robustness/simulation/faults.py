"""The effect of each kind of fault on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from robustness.simulation.disk import FullDisk
from robustness.simulation.reports import Lie
from robustness.simulation.schedule import Fault, FaultKind
from robustness.simulation.workload import TENANTS

if TYPE_CHECKING:
    from robustness.simulation.cluster import Cluster

MAX_FREE_BYTES = 3_000
SLOW_S = 0.2
SLOWNESS = 1_000.0
"""Of a slow disk."""


def apply(cluster: Cluster, fault: Fault) -> None:
    """Begin a fault; what ends it is an event of the world."""
    world = cluster.world
    if world.tells:
        world.tell(f"-- {fault}")
    cluster.fired[fault.kind] += 1
    cluster.disturb(_DO[fault.kind](cluster, fault))


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
        with cluster.cachemgr.process.entered():
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


def _disk_slow(cluster: Cluster, fault: Fault) -> float:
    return _of_disk(cluster, fault, "slowness", SLOWNESS, 1.0)


def _disk_full(cluster: Cluster, fault: Fault) -> float:
    return _of_disk(cluster, fault, "is_full", True, False)


def _disk_errors(cluster: Cluster, fault: Fault) -> float:
    cluster.world.has_lost_copies = True
    return _of_disk(cluster, fault, "has_errors", True, False)


def _of_disk(cluster: Cluster, fault: Fault, name: str, during: Any, afterwards: Any) -> float:
    files = cluster.worker_disks.files(fault.target[0])
    setattr(files, name, during)
    cluster.world.after(fault.size, lambda: setattr(files, name, afterwards))
    return fault.size


def _disk_rot(cluster: Cluster, fault: Fault) -> float:
    cluster.world.has_lost_copies = True
    cluster.worker_disks.files(fault.target[0]).rot()
    return 0.0


def _disk_kill(cluster: Cluster, fault: Fault) -> float:
    return _in_call(cluster, fault, lambda: None)


def _disk_power(cluster: Cluster, fault: Fault) -> float:
    return _in_call(cluster, fault, lambda: cluster.lose_power_of(fault.target[0]))


def _in_call(cluster: Cluster, fault: Fault, lose: Callable[[], None]) -> float:
    """Kill a worker in a call of its disk. One that makes no more calls is not killed."""
    (name,) = fault.target
    files, restart_after_s = cluster.worker_disks.files(name), fault.way / 20

    def end() -> None:
        cluster.disturb(restart_after_s)
        cluster.kill(name, restart_after_s)
        lose()

    files.num_calls_left, files.on_last_call = int(fault.size), end
    return 0.0


def _kill_both(cluster: Cluster, fault: Fault) -> float:
    (name,) = fault.target
    cluster.kill("cachemgr", fault.size * (fault.way % 3) / 2)
    cluster.kill(name, fault.size * (fault.way % 4) / 3)
    if fault.way % 2:
        cluster.lose_power_of(name)
    return fault.size


def _disk_reset(cluster: Cluster, fault: Fault) -> float:
    cluster.start_reset(fault.target[0], [None, *TENANTS][fault.way % (1 + len(TENANTS))])
    return 0.0


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
    FaultKind.DISK_SLOW: _disk_slow,
    FaultKind.DISK_FULL: _disk_full,
    FaultKind.DISK_ERRORS: _disk_errors,
    FaultKind.DISK_ROT: _disk_rot,
    FaultKind.DISK_KILL: _disk_kill,
    FaultKind.DISK_POWER: _disk_power,
    FaultKind.KILL_BOTH: _kill_both,
    FaultKind.DISK_RESET: _disk_reset,
}
