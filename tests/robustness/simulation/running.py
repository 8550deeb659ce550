"""One schedule from its seed to its outcome, and the answers without faults that it is compared with."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from robustness.simulation.cluster import Cluster
from robustness.simulation.deliveries import Answer
from robustness.simulation.disk import Disk
from robustness.simulation.gateway import Call
from robustness.simulation.network import Network
from robustness.simulation.schedule import Features, Schedule, make_schedule
from robustness.simulation.surroundings import surroundings
from robustness.simulation.transport import open_channel
from robustness.simulation.worker_disk import WorkerDisks
from robustness.simulation.workload import FUNCTIONS, NUM_REQUESTS, ModelKind, requests
from robustness.simulation.world import World, WorldFailed

from quire.cachemgr import state
from quire.client.engine.sampling import SamplingParams
from quire.client.errors import ProtocolViolation

torch.set_num_threads(1)  # a step has a few numbers

COLLECT_EVERY = 40
"""Schedules between two collections of what they left."""


@dataclass(slots=True)
class Outcome:
    """The outcome of a schedule."""

    seed: int
    failure: str | None = None
    error: BaseException | None = None
    fired: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    """Events that engines counted."""
    met: tuple[str, ...] = ()
    """Features and kinds of faults of this schedule."""
    num_callbacks: int = 0
    num_tokens: int = 0
    virtual_s: float = 0.0
    digest: int = 0
    """Equal for equal runs."""


class SchedulesFailed(AssertionError):
    """Undisturbed runs are wrong: nothing can be compared."""


def run(schedule: Schedule, *, tell: Callable[[str], None] | None = None) -> Outcome:
    """Run a schedule; `tell` gets its story, line by line."""
    expected = answers(schedule.features.model)
    outcome, _ = _run(schedule, expected, tell)
    return outcome


def run_seed(seed: int) -> Outcome:
    """The schedule of a seed."""
    return run(make_schedule(seed))


@functools.cache
def answers(model: ModelKind) -> Mapping[int, Answer]:
    """The answers to all requests of an undisturbed cluster, those of greedy ones checked by computing them."""
    features = Features(model=model, num_blocks=600, max_num_seqs=32)
    found: dict[int, Answer] = {}
    calls = tuple(Call(number) for number in range(NUM_REQUESTS))
    outcome, cluster = _run(Schedule(0, features, (calls,), ()), None, None)
    if outcome.failure is not None:
        raise SchedulesFailed(f"undisturbed: {outcome.failure}") from outcome.error
    for number, request in enumerate(requests()):
        found[number] = cluster.deliveries["gateway-0"].answer(number)
        if request.is_greedy:
            assert isinstance(request.params, SamplingParams)
            ((token_ids, _, _),) = found[number].samples
            computed = FUNCTIONS[model].expected_tokens(request.prompt, request.params.max_tokens or 0)
            if token_ids != tuple(computed):
                raise SchedulesFailed(f"undisturbed: request {number}: {token_ids}, computed {computed}")
    return found


def _run(
    schedule: Schedule, expected: Mapping[int, Answer] | None, tell: Callable[[str], None] | None
) -> tuple[Outcome, Cluster]:
    world = World(schedule.seed, callback_s=schedule.features.callback_s)
    delay_s = schedule.features.delay_s
    network = Network(
        world, schedule.seed, mean_delay_s=delay_s, jitter_s=2 * delay_s, window_bytes=schedule.features.window_bytes
    )
    disk = Disk(random.Random(f"disk {schedule.seed}"))
    disks = WorkerDisks(world, schedule.seed, schedule.features.disk)
    cluster = Cluster(world, network, schedule, expected, disk, disks, random.Random(f"cluster {schedule.seed}"))
    outcome = Outcome(schedule.seed)
    if tell is not None:
        world.tells = network.tells = True
        world.tell = lambda line: tell(f"{world.now - 1000.0:10.6f}  {line}")
    with _present(world), surroundings(world, partial(open_channel, network)), _booted(disk), disks.present():
        try:
            cluster.run()
        except WorldFailed as failure:
            outcome.failure, outcome.error = str(failure), failure.__cause__
            if world.tells:
                for line in (line for process in world.processes for line in process.whereabouts()):
                    world.tell(line)
        finally:
            for process in list(world.processes):
                process.end()
            disk.close()
    outcome.fired = Counter({kind.value: count for kind, count in cluster.fired.items()})
    for task in cluster.tasks.values():
        outcome.happened += task.happened
    outcome.happened += disks.happened
    outcome.met = tuple(sorted([*schedule.features.names(), *(f"fault: {kind}" for kind in outcome.fired)]))
    outcome.num_callbacks = world.num_callbacks
    outcome.num_tokens = sum(deliveries.num_tokens for deliveries in cluster.deliveries.values())
    outcome.virtual_s = world.now - 1000.0
    outcome.digest = hash((world.num_callbacks, world.now, outcome.num_tokens, world.random.getrandbits(64)))
    return outcome, cluster


EXPECTED_ERRORS = (
    "state not kept",
    "state given up",
    "pool not recovered",
    "step failed",
    "pool damaged",
    "the event loop was held",
    "the disk fails",
)
"""Errors that a fault explains. Others are findings."""
LOST_COPIES = ("a copy on the disk is lost",)
"""Errors that the fault of a disk explains."""
UNEXPECTED_WARNINGS = ("attachment refused reason=INVALID_ARGUMENT",)
"""Warnings that no fault explains: cachemgr refuses what a worker says that does not lie."""


FOLDER = re.compile(r"/\S*quire-simulation-\w+")
"""The state directory, which has another name in each run."""


_running: World | None = None
"""The world that runs now."""
_num_run = 0


@contextlib.contextmanager
def _present(world: World) -> Iterator[None]:
    """The world takes the log lines. Earlier ones are freed now and then."""
    global _running, _num_run
    _num_run += 1
    if _num_run % COLLECT_EVERY == 0:
        collect_the_dead()
    _running = world
    try:
        yield
    finally:
        _running = None


class _Log(logging.Handler):
    """Takes the log lines of all simulated processes: an error that no fault explains is a finding.

    So is a warning of an engine that a service has broken the protocol: no fault makes one do so. The engine itself
    would go on, with another lease.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if _running is None or _running.running is None:
            return
        world, who, message = _running, _running.running.name, record.getMessage()
        violations = [each for each in record.args or () if isinstance(each, ProtocolViolation)]
        signs = EXPECTED_ERRORS + LOST_COPIES if world.has_lost_copies else EXPECTED_ERRORS
        is_error = record.levelno >= logging.ERROR and not any(sign in message for sign in signs)
        if world.tells:
            world.tell(f"{who}: {FOLDER.sub('state', message)}")
        is_refused = message.startswith(UNEXPECTED_WARNINGS) and not world.is_deceived
        if violations or is_error or is_refused:
            error = record.exc_info[1] if record.exc_info else None
            world.fail(f"{who} logs: {message}", error)


@contextlib.contextmanager
def simulating(*, told: bool = False) -> Iterator[None]:
    """Run schedules in this context: log lines go to their worlds, and what they leave is freed between them.

    told: with the lines that only a story needs.
    """
    log, handler = logging.getLogger("quire"), _Log()
    level, propagates = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO if told else logging.WARNING)
    log.propagate = False
    gc.collect()
    gc.freeze()  # what is imported is not looked at again
    gc.disable()
    try:
        yield
    finally:
        collect_the_dead()
        gc.unfreeze()
        gc.enable()
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagates


def collect_the_dead() -> None:
    """Free the processes of earlier schedules. Their `finally` blocks run here, and reach nobody."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    logging.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
    logging.disable(logging.NOTSET)
    sys.unraisablehook = hook


class _BootId:
    """The file of a machine's boot id."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def read_text(self) -> str:
        return self._disk.boot_id


@contextlib.contextmanager
def _booted(disk: Disk) -> Iterator[None]:
    before = state.BOOT_ID
    state.BOOT_ID = _BootId(disk)  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        state.BOOT_ID = before  # type: ignore[misc]
