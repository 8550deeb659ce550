"""The processes of a group of ranks: how they start, find each other, and end.

    started by          the leader                                  followers
    quire worker        starts its followers with torch's spawn     meet it by a file in its memory, which has no name
    torchrun            the process of rank 0                       the other processes, on one machine or several

No rank survives another. The leader ends the followers of this machine by their handles; a follower that loses the
leader ends itself, and on Linux the kernel ends one that was started by `quire worker` and can't, because it is
stopped. An orderly end is the leader's: followers ignore SIGTERM and SIGINT, and end when it tells them, with status 0.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import psutil
import torch
import torch.multiprocessing

from quire.serving.logs import configure_logging, describe_exception
from quire.serving.server import CannotStartError
from quire.worker.config import WorkerConfig
from quire.worker.device.devices import pick_device, use_device
from quire.worker.model.checkpoint import check_sharding
from quire.worker.run.model_thread import ModelThread
from quire.worker.run.ranks import OneRank, RankLostError
from quire.worker.run.watchdog import GROUP_LIMIT_S
from quire.worker.tensor_parallel.follower import Follower, follow
from quire.worker.tensor_parallel.group import LEADER, RankGroup, RankPlace, given_place
from quire.worker.tensor_parallel.leader import FAILURE_TIMEOUT_S, Leader

log = logging.getLogger("quire.worker")

Result = TypeVar("Result")

END_TIMEOUT_S = 5.0
"""The time that followers have to end once they are told to."""
_PR_SET_PDEATHSIG = 1


def run_given_rank(config: WorkerConfig) -> None:
    """Be the follower that torchrun started this process as; return if it is to lead, or there is no torchrun."""
    place = given_place()
    if place is None:
        return
    if place.size != config.tensor_parallel_size:
        log.error(
            "can't start: torchrun started %d ranks, --tensor-parallel-size is %d",
            place.size,
            config.tensor_parallel_size,
        )
        sys.exit(1)
    if not place.leads:
        run_follower(config, place)


def rank_config(config: WorkerConfig, place: RankPlace) -> WorkerConfig:
    """The settings of one rank: its device, its part of the CPU's threads. Raises ValueError, naming the flag."""
    threads = max(1, config.threads // place.local_size)
    has_gpus = torch.cuda.is_available()
    if config.device not in ("auto", "cuda", "cpu"):
        raise ValueError(f"--device {config.device}: each of {place.size} ranks takes the GPU of its number")
    if config.device == "cpu" and has_gpus:
        raise ValueError(
            f"--device cpu: transformers shards over the GPUs that torch finds; set CUDA_VISIBLE_DEVICES= to compute "
            f"on the CPU with {place.size} ranks"
        )
    device = pick_device(config.device)
    if device.type == "cuda":
        if place.local_size > torch.cuda.device_count():
            raise ValueError(
                f"--tensor-parallel-size {config.tensor_parallel_size}: {place.local_size} ranks of this machine need "
                f"as many GPUs; torch finds {torch.cuda.device_count()}"
            )
        device = torch.device("cuda", place.local_rank)
    return replace(config, device=str(device), threads=threads)


def silence_limit_s(config: WorkerConfig, place: RankPlace) -> float | None:
    """Seconds without a sign of life after which another rank is lost, as long as a step may hang; None: no limit.

    Ranks that the worker has started are on one machine. No network between them can be cut.
    """
    if place.store_path is not None:
        return None
    limit_s = GROUP_LIMIT_S if config.step_timeout_s is None else config.step_timeout_s
    return 2 * limit_s or None


class Group:
    """The leader's side of a group, from the start of its followers to their end: an asynchronous context manager.

    lost    done, with RankLostError, once another rank has ended; its cause is in the message
    """

    def __init__(self, config: WorkerConfig, place: RankPlace | None, thread: ModelThread) -> None:
        """`place` is torchrun's, None if the followers are to be started here."""
        self.place = place or RankPlace(LEADER, config.tensor_parallel_size, 0, config.tensor_parallel_size)
        self._starts_followers = place is None
        self._config = config
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self._loop.create_future()
        self._why: str | None = None
        self._was_killed = False
        """True if a follower was ended by a signal: it had no reason of its own, which the leader may have too."""
        self._is_lost = threading.Event()
        self._is_ending = False
        self._leader: Leader | None = None
        self._store: int | None = None
        self._processes: list[Any] = []

    async def __aenter__(self) -> Self:
        if self._starts_followers:
            self._store = os.memfd_create("quire-ranks")
            self.place = replace(self.place, store_path=f"/proc/{os.getpid()}/fd/{self._store}")
            context: Any = torch.multiprocessing.start_processes(  # type: ignore[attr-defined,no-untyped-call]
                run_started_follower,
                args=(self._config, self.place, os.getpid()),
                nprocs=self.place.size - 1,
                join=False,
                daemon=True,
                start_method="spawn",
            )
            self._processes = context.processes
            threading.Thread(target=self._watch_processes, name="watch-ranks", daemon=True).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and not self.lost.done():
            await self._end()
        self._is_ending = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        if self._store is not None:
            os.close(self._store)
        if self.lost.done():
            self.lost.exception()  # seen, whether or not anybody waited for it

    async def _end(self) -> None:
        """Have the followers end, if the model thread is free to tell them."""
        if self._leader is None:
            return
        self._is_ending = True
        statistics = self._leader.statistics()
        log.info("ranks end: orders=%d order_bytes=%d", statistics.num_orders, statistics.order_bytes)
        ending = self._thread.submit(self._leader.end)
        done, _ = await asyncio.wait((ending,), timeout=END_TIMEOUT_S)
        deadline = time.monotonic() + END_TIMEOUT_S if done else 0.0
        for process in self._processes:
            await asyncio.to_thread(process.join, max(0.0, deadline - time.monotonic()))

    def join(self, device: torch.device) -> OneRank:
        """Meet the followers; on the model thread. Raises RankLostError."""
        group = RankGroup(self.place, device, silence_s=silence_limit_s(self._config, self.place))
        for rank in range(1, self.place.size):
            if not self._starts_followers:
                group.watch(rank, self._lose)
        self._leader = Leader(group, device, self._why_lost)
        pids = ",".join(str(process.pid) for process in self._processes) or "torchrun's"
        log.info("ranks: %d have joined, on %s followers=%s", self.place.size, group.backend, pids)
        return self._leader

    async def unless_lost(self, work: asyncio.Future[Result]) -> Result:
        """Wait for a part of the start. Raises CannotStartError if a rank ends meanwhile."""
        await asyncio.wait((work, self.lost), return_when=asyncio.FIRST_COMPLETED)
        if work.done() and not isinstance(work.exception(), RankLostError):
            if work.exception() is not None:  # a collective may fail before the other rank's end is known
                await asyncio.wait((self.lost,), timeout=FAILURE_TIMEOUT_S)
            if not self._was_killed:
                return work.result()
        raise CannotStartError(self._why or str(work.exception()))

    async def await_loss(self) -> None:
        """Wait for ever. Raises RankLostError when a rank has ended."""
        await asyncio.shield(self.lost)

    def whereabouts(self) -> str:
        """Return what the followers of this machine do, ",rank 1:stopped"."""
        found = ""
        for rank, process in enumerate(self._processes, 1):
            try:
                found += f",rank {rank}:{psutil.Process(process.pid).status()}"
            except psutil.Error:
                found += f",rank {rank}:gone"
        return found

    def _watch_processes(self) -> None:
        """Wait for the first follower to end."""
        ended = wait([process.sentinel for process in self._processes])
        for rank, process in enumerate(self._processes, 1):
            if process.sentinel in ended:
                process.join()
                self._was_killed = process.exitcode is not None and process.exitcode < 0
                self._lose(f"rank {rank} (pid {process.pid}) {_describe_exit(process.exitcode)}")
                return

    def _lose(self, why: str) -> None:
        """Note the first loss, from any thread."""
        if self._is_ending or self._why is not None:
            return
        self._why = why
        self._is_lost.set()
        self._loop.call_soon_threadsafe(self._tell, RankLostError(why))

    def _tell(self, error: RankLostError) -> None:
        if not self.lost.done():
            self.lost.set_exception(error)

    def _why_lost(self, timeout_s: float) -> str | None:
        self._is_lost.wait(timeout_s)
        return self._why


def run_started_follower(index: int, config: WorkerConfig, leader: RankPlace, leader_pid: int) -> NoReturn:
    """Be the follower of this number, in a process that the leader started."""
    _end_with_parent(leader_pid)
    rank = index + 1
    run_follower(config, replace(leader, rank=rank, local_rank=rank))


def run_follower(config: WorkerConfig, place: RankPlace) -> NoReturn:
    """Be a follower, from the start to the end of the process: status 0 when the leader says so, 1 after an error."""
    configure_logging(config.server.log_level, config.server.log_format)
    log.setLevel(max(logging.WARNING, log.getEffectiveLevel()))  # the leader says the rest
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        _follow(config, place)
    except ValueError as error:
        _exit(f"can't start: {error}", place)
    except Exception as error:
        _exit(f"failed: {error} ({describe_exception(error)})", place)
    _flush()
    os._exit(0)


def _follow(config: WorkerConfig, place: RankPlace) -> None:
    from quire.worker.run.loading import load_warm, make_executor

    config = rank_config(config, place)
    device = pick_device(config.device)
    use_device(device)
    group = RankGroup(place, device, silence_s=silence_limit_s(config, place))
    group.watch(LEADER, lambda why: _exit(why, place))
    ranks = Follower(group, device)
    executor = make_executor(config, load_warm(config, ranks), ranks)
    follow(executor, group, lambda error: _exit(f"failed: {error} ({describe_exception(error)})", place))


def _exit(why: str, place: RankPlace) -> NoReturn:
    log.error("rank %d of %d ends: %s", place.rank, place.size, why)
    _flush()
    os._exit(1)


def _flush() -> None:
    logging.shutdown()
    sys.stdout.flush()


def _end_with_parent(parent_pid: int) -> None:
    """Have the kernel end this process when the leader ends, even if this one is stopped; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)


def _describe_exit(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"has ended with status {status}"


async def lead(config: WorkerConfig, thread: ModelThread) -> Group:
    """Return the group that this process is to lead. Raises what check_sharding and rank_config raise."""
    group = Group(config, given_place(), thread)
    rank_config(config, group.place)
    await thread.submit(
        partial(
            check_sharding,
            config.model,
            num_ranks=config.tensor_parallel_size,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
        )
    )
    return group
