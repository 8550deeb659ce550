"""The processes of one schedule: started, killed, started again, disturbed, and looked at in the end.

gateway-N ──► cachemgr ◄── worker-N          gateway-N ──► worker-N
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from robustness.simulation.admissions import Admissions
from robustness.simulation.cachemgr import ADDRESS, NAME, SimulatedCachemgr
from robustness.simulation.deliveries import Answer, Deliveries
from robustness.simulation.disk import Disk
from robustness.simulation.faults import apply
from robustness.simulation.gateway import DRAFTS, SimulatedGateway, Task
from robustness.simulation.holdings import of_cachemgr, of_gateway, of_network, of_worker
from robustness.simulation.network import Network
from robustness.simulation.resets import Reset
from robustness.simulation.schedule import LEASE_TTL_S, LONGEST_KEEP_S, FaultKind, Features, Schedule
from robustness.simulation.server import SimulatedServer
from robustness.simulation.watcher import SimulatedWatcher
from robustness.simulation.worker import SimulatedWorker, WorkerSettings, worker_guard
from robustness.simulation.worker_disk import WorkerDisks
from robustness.simulation.workload import FUNCTIONS, TENANTS, requests
from robustness.simulation.world import Process, World, WorldFailed

from quire.cachemgr.shares import Percentage, Share
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.scheduling.beam_search import BeamSearchParams
from quire.serving.addresses import parse_dial_address
from quire.serving.server import CannotStartError

CACHEMGR, WATCHER = NAME, "watcher"
SHARES = {"alice": Share(floor=2, quota=Percentage(50)), "bob": Share(limit=Percentage(100), pin_budget=0)}
SERVED_WITHIN_S = 120.0
"""Of virtual time, after the last fault: then every request has ended."""
STOP_TIMEOUT_S = 2.0
ENDED_WITHIN_S = 5.0
"""Blocks that a breakpoint keeps after its time."""
CLEAN_WITHIN_S = 30.0
"""After the last request has ended: then only leases are left. After the last gateway was closed: then nothing is."""


@dataclass
class Cluster:
    """The processes of one schedule and what is to come of them; `run` is all of it."""

    world: World
    network: Network
    schedule: Schedule
    expected: Mapping[int, Answer] | None
    disk: Disk
    worker_disks: WorkerDisks
    generator: random.Random
    cachemgr: SimulatedCachemgr | None = None
    workers: dict[str, SimulatedWorker] = field(default_factory=dict)
    gateways: dict[str, SimulatedGateway] = field(default_factory=dict)
    tasks: dict[str, Task] = field(default_factory=dict)
    deliveries: dict[str, Deliveries] = field(default_factory=dict)
    watcher: SimulatedWatcher | None = None
    resets: list[Reset] = field(default_factory=list)
    """Those that operators wait for."""
    processes: dict[str, Process] = field(default_factory=dict)
    admissions: Admissions = field(init=False)
    clock_offset_s: float = 0.0
    fired: Counter[FaultKind] = field(default_factory=Counter)
    restart_after_s: dict[str, float] = field(default_factory=dict)
    disturbed_until: float = 0.0
    num_starting: int = 0
    is_closing: bool = False
    """All requests have ended: gateways give their leases back."""

    def __post_init__(self) -> None:
        every = [requests()[call.request] for calls in self.schedule.calls for call in calls]
        if self.features.has_drafts:  # a gateway rehearses those that can have drafts
            every += [request for request in every if isinstance(request.params, SamplingParams)]
        self.admissions = Admissions(self.world.fail, Counter((each.params.tenant, each.prompt) for each in every))

    @property
    def features(self) -> Features:
        return self.schedule.features

    # -- starts and ends

    def start_all(self) -> None:
        """Start everything. The order is the seed's: a worker may be there before cachemgr."""
        starts: list[Callable[[], None]] = [self.start_cachemgr]
        for number in range(self.features.num_pools):
            starts.append(partial(self.start_worker, f"worker-{number}"))
        for number, calls in enumerate(self.schedule.calls):
            name = f"gateway-{number}"
            self.tasks[name] = Task(calls)
            self.deliveries[name] = Deliveries(self._wrong(name), self.expected)
            starts.append(partial(self.start_gateway, name))
        if self.features.has_watcher:
            starts.append(self.start_watcher)
        self.generator.shuffle(starts)
        for start in starts:
            start()

    def _wrong(self, name: str) -> Callable[[str], None]:
        return lambda what: None if self.world.is_deceived else self.world.fail(f"{name}: {what}")

    def _start(self, name: str) -> Process:
        process = self.processes[name] = self.world.start(name)
        process.clock_offset_s = self.clock_offset_s
        process.at_end.append(partial(self._ended, name, process))
        return process

    def start_cachemgr(self) -> None:
        process = self._start(CACHEMGR)
        features = self.features

        def begin() -> None:
            self.cachemgr = SimulatedCachemgr(
                process,
                self.network,
                policy=features.policy,
                shares=SHARES if features.has_shares else {},
                state_folder=self.disk.folder if features.keeps_state else None,
                admissions=self.admissions,
            )

        process.loop.call_soon(begin)

    def start_worker(self, name: str) -> None:
        process = self._start(name)
        features = self.features
        address = f"unix:/sim/{name}"
        settings = WorkerSettings(
            function=FUNCTIONS[features.model],
            pool=name.replace("worker", "pool"),
            block_size=features.block_size,
            num_blocks=features.num_blocks,
            num_host_blocks=features.num_host_blocks,
            host_cache_share=features.host_cache_share,
            max_num_seqs=features.max_num_seqs,
            max_step_tokens=features.max_step_tokens,
            mean_step_s=features.step_s,
            runs_ahead=features.runs_ahead,
            num_ranks=features.num_ranks,
        )
        cachemgr, disks = parse_dial_address(ADDRESS), self.worker_disks

        def begin() -> None:
            try:
                worker = SimulatedWorker(process, settings, address=address, cachemgr=cachemgr, disks=disks)
            except CannotStartError:
                process.end()
                return
            server = SimulatedServer(self.network, process, address, worker_guard(process))
            process.spawn(server.start())
            worker.start(server)
            self.workers[name] = worker

        process.loop.call_soon(begin)

    def start_gateway(self, name: str) -> None:
        process = self._start(name)
        features = self.features

        def begin() -> None:
            self.gateways[name] = SimulatedGateway(
                process,
                self.tasks[name],
                requests(),
                self.deliveries[name],
                self.admissions,
                uses_router=features.uses_router,
                max_step_tokens=features.max_step_tokens,
                drafts=replace(DRAFTS, adaptive=features.adapts_drafts) if features.has_drafts else None,
                lease_ttl_s=LEASE_TTL_S,
                wrong=self._wrong(name),
                call_timeout_s=features.call_timeout_s,
                failover_after_s=features.failover_after_s,
            )
            if self.is_closing:
                self.gateways[name].close()

        process.loop.call_soon(begin)

    def start_watcher(self) -> None:
        """Start the process that copies the pools' blocks."""
        process = self._start(WATCHER)
        pools = [f"pool-{number}" for number in range(self.features.num_pools)]

        def begin() -> None:
            self.watcher = SimulatedWatcher(process, pools)

        process.loop.call_soon(begin)

    def start_reset(self, worker: str, tenant: str | None) -> None:
        """Begin a reset of the pool of a worker, as an operator does; None: of all tenants."""
        process = self.world.start("operator")
        pool, copies = worker.replace("worker", "pool"), self.worker_disks.copies(worker)
        self.resets.append(Reset(process, pool, tenant, copies))

    def lose_power_of(self, worker: str) -> None:
        """The machine of a worker that was killed starts again."""
        self.world.has_lost_copies = True
        self.worker_disks.files(worker).lose_power()

    def disturb(self, seconds: float) -> None:
        """A fault goes on for so long."""
        self.disturbed_until = max(self.disturbed_until, self.world.now + seconds)

    def kill(self, name: str, restart_after_s: float) -> None:
        """SIGKILL; the supervisor starts it again."""
        self.restart_after_s[name] = restart_after_s
        self.processes[name].end()

    def terminate(self, name: str, restart_after_s: float) -> None:
        """SIGTERM, and SIGKILL if it takes too long; the supervisor starts it again."""
        self.restart_after_s[name] = restart_after_s
        service = self._service(name)
        process = self.processes[name]
        if service is None or not process.is_alive:
            process.end()
            return
        process.spawn(service.terminate())
        self.world.after(STOP_TIMEOUT_S, process.end)

    def _service(self, name: str) -> SimulatedCachemgr | SimulatedWorker | SimulatedGateway | SimulatedWatcher | None:
        if name == CACHEMGR:
            return self.cachemgr
        return self.watcher if name == WATCHER else self.workers.get(name) or self.gateways.get(name)

    def _ended(self, name: str, process: Process) -> None:
        """A process has ended, and will be started again."""
        if name == CACHEMGR:
            if self.cachemgr is not None:
                self.admissions.stop([pool.ledger for pool in self.cachemgr.catalog.pools()])
            self.cachemgr = None
        if name == WATCHER:
            self.watcher = None
        self.workers.pop(name, None)
        self.gateways.pop(name, None)
        self.num_starting += 1
        self.world.after(self.restart_after_s.pop(name, 0.05), self._restart, name)

    def _restart(self, name: str) -> None:
        self.num_starting -= 1
        if name == CACHEMGR:
            self.start_cachemgr()
        elif name == WATCHER:
            self.start_watcher()
        elif name in self.tasks:
            self.start_gateway(name)
        else:
            self.start_worker(name)

    # -- the whole schedule

    def run(self) -> None:
        """Raises WorldFailed."""
        faults = list(self.schedule.faults)
        world = self.world
        self.disturbed_until = world.now

        def next_fault() -> None:
            while faults and faults[0].at_callback <= world.num_callbacks:
                apply(self, faults.pop(0))
            world.stop_at = faults[0].at_callback if faults else None

        world.on_stop, world.check = next_fault, self._check_holdings
        next_fault()
        self.start_all()
        if not world.run_until(self._is_served, ends_at=lambda: self.disturbed_until + SERVED_WITHIN_S):
            raise WorldFailed(f"not served within {SERVED_WITHIN_S:g} s: {self._unserved()}")
        world.stop_at = None  # faults that were not reached
        self._await_clean(self._is_idle, lambda: self.left(with_leases=False), "while leases live")
        self.is_closing = True
        for gateway in self.gateways.values():
            gateway.close()
        self._await_clean(self._is_clean, self.left, "when all leases were given back")
        if self.features.disk is not None:
            self._lose_power_in_the_end()
        self._check_invariants()
        self._check_holdings()
        self._await_ends_of_keeps()
        if not self.fired and not any(call.may_leave for calls in self.schedule.calls for call in calls):
            self.admissions.require_all_answered(self._searched())
        if self.world.failure is not None:
            raise self.world.failure

    def _searched(self) -> Counter[tuple[str, tuple[int, ...]]]:
        """The prompts of beam searches, by tenant."""
        every = [requests()[call.request] for calls in self.schedule.calls for call in calls]
        return Counter((each.params.tenant, each.prompt) for each in every if isinstance(each.params, BeamSearchParams))

    def _await_ends_of_keeps(self) -> None:
        """Raises WorldFailed if anything is kept after the longest time of a breakpoint."""
        ends_at = self.world.now + LONGEST_KEEP_S + ENDED_WITHIN_S
        if not self.world.run_until(
            lambda: self.cachemgr is not None and not self.cachemgr.num_kept(), ends_at=lambda: ends_at
        ):
            raise WorldFailed("blocks are kept after the last time to live")

    def _lose_power_in_the_end(self) -> None:
        """A tenant's content is reset, or that of all, or none. Then the workers' machines start again.

        Raises WorldFailed if what was erased is there again.
        """
        scopes = self.generator.choice(([], [None], *([tenant] for tenant in TENANTS)))
        for name in self.workers:
            for tenant in scopes:
                self.start_reset(name, tenant)
        self._await_clean(self._is_clean, self.left, "when content was reset")
        for name in list(self.workers):
            self.kill(name, 0.0)
            self.lose_power_of(name)
        self._await_clean(self._is_clean, self.left, "when all workers' machines had lost power")

    def _check_holdings(self) -> None:
        """Fail the world if a process holds more of anything than it may."""
        held = [("the network", of_network(self.network))]
        held += [(name, of_worker(worker, self.cachemgr)) for name, worker in self.workers.items()]
        held += [(name, of_gateway(gateway)) for name, gateway in self.gateways.items()]
        if self.cachemgr is not None:
            held.append((CACHEMGR, of_cachemgr(self.cachemgr)))
        for name, holdings in held:
            for what, count, most in holdings:
                if count > most:
                    self.world.fail(f"{name} holds {count} {what}, {most:g} at most")

    def _check_invariants(self) -> None:
        """Raises WorldFailed if the books, or a worker's memory, are not as they must be."""
        assert self.cachemgr is not None, "else it was not clean"
        if violations := self.cachemgr.violations():
            raise WorldFailed(f"the books are wrong: {'; '.join(violations)}")
        for name, worker in self.workers.items():
            try:
                worker.check_invariants()
            except AssertionError as error:
                raise WorldFailed(f"{name}: its memory is wrong: {error}") from error

    def _await_clean(self, is_clean: Callable[[], bool], left: Callable[[], list[str]], when: str) -> None:
        self.disturbed_until = max(self.disturbed_until, self.world.now)
        if not self.world.run_until(is_clean, ends_at=lambda: self.disturbed_until + CLEAN_WITHIN_S):
            raise WorldFailed(f"left after {CLEAN_WITHIN_S:g} s, {when}: {'; '.join(left()) or 'a gateway'}")

    def _is_served(self) -> bool:
        return all(gateway.is_done for gateway in self.gateways.values()) and len(self.gateways) == len(self.tasks)

    def _is_idle(self) -> bool:
        """Engines give back what requests held, while their leases live."""
        return not self.num_starting and not self.left(with_leases=False)

    def _unserved(self) -> str:
        open_calls = {
            name: [call.request for call in task.calls if call.request not in task.ended]
            for name, task in self.tasks.items()
        }
        return f"open requests by gateway: {open_calls}"

    def _is_clean(self) -> bool:
        is_closed = all(gateway.is_closed for gateway in self.gateways.values())
        return is_closed and not self.num_starting and not self.left()

    def left(self, *, with_leases: bool = True) -> list[str]:
        """List what is left of leases, if they count, sequences, steps, blocks and reports, on both sides."""
        if self.cachemgr is None or len(self.workers) < self.features.num_pools:
            return ["a process is not there"]
        found = self.cachemgr.left(num_pools=self.features.num_pools, with_leases=with_leases)
        found += [f"an operator waits for a reset of {reset.pool}" for reset in self.resets if not reset.is_done]
        for name, worker in self.workers.items():
            found += [f"{name}: {what}" for what in worker.left(with_leases=with_leases)]
        if self.watcher is not None and not found:
            found += self.watcher.left(self.cachemgr)
        return found
