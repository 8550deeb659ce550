"""A rank that follows: it runs what the leader orders, with the executor of every worker."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from quire.worker.grant.decoding import AcceptedStep
from quire.worker.run.executor import Executor, LaunchedStep
from quire.worker.run.ranks import OneRank
from quire.worker.sampling.sampler import Sampled
from quire.worker.tensor_parallel.group import RankGroup
from quire.worker.tensor_parallel.orders import Order, OrderKind, read_block_ids, read_step


class Follower(OneRank):
    """A rank other than 0 of a group; called by its executor."""

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        self.group = group
        self.size = group.place.size
        self.local_size = group.place.local_size
        self._device = device
        self._has_forwarded = False

    @contextmanager
    def computing(self, step: AcceptedStep) -> Iterator[None]:
        """See OneRank.computing."""
        yield
        self._has_forwarded = True

    def sample(self, num_rows: int, sample: Callable[[], Sampled]) -> Sampled:
        """See OneRank.sample."""
        tokens = torch.zeros(num_rows, dtype=torch.int64, device=self._device)
        self.group.share(tokens)
        return Sampled(tokens)

    def launched(self, step: AcceptedStep, tables: Callable[[], int]) -> Callable[[], None]:
        """See OneRank.launched: the answer says that this rank is past the step."""
        answer = [int(self._has_forwarded), tables()]
        self._has_forwarded = False
        return lambda: self.group.answer(answer)

    def add_checksums(self, block_ids: list[int], own: list[int]) -> list[int]:
        """See OneRank.add_checksums."""
        self.group.answer(own)
        return own

    def least(self, value: int) -> int:
        """See OneRank.least."""
        return self.group.reduced(value, dist.ReduceOp.MIN)

    def total(self, value: int) -> int:
        """See OneRank.total."""
        return self.group.reduced(value, dist.ReduceOp.SUM)

    def combined(self, fingerprint: str) -> str:
        """See OneRank.combined."""
        return self.group.combined(fingerprint)


def follow(executor: Executor, group: RankGroup, on_failure: Callable[[BaseException], None]) -> None:
    """Run what the leader orders until it says that this is the end. Raises what the executor raises.

    `on_failure` gets an error of a step that was launched; it has to end the process.
    """
    collector = Collector(on_failure)
    while (order := group.receive()).kind is not OrderKind.END:
        if order.kind in (OrderKind.COMPUTE, OrderKind.APPLY):
            step = read_step(order)
            if executor.runs_ahead:
                collector.put(executor.launch(step))
            else:
                executor.execute(step)
        else:
            collector.wait()
            _run(executor, order)
    collector.wait()


def _run(executor: Executor, order: Order) -> None:
    if order.kind is OrderKind.FENCE_LEASE:
        executor.fence_lease(order.parts[0].decode())
    elif order.kind is OrderKind.BEGIN_EPOCH:
        executor.begin_epoch()
    else:
        executor.checksum_blocks(read_block_ids(order))


class Collector:
    """Waits for launched steps on a thread of its own, so that the next one is launched meanwhile."""

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        """`on_failure` is called on that thread, with an error after which nothing is collected."""
        self._launched: queue.Queue[LaunchedStep] = queue.Queue()
        self._on_failure = on_failure
        threading.Thread(target=self._collect, name="collector", daemon=True).start()

    def put(self, launched: LaunchedStep) -> None:
        """Have a step collected, after those before it."""
        self._launched.put(launched)

    def wait(self) -> None:
        """Return when all steps are collected."""
        self._launched.join()

    def _collect(self) -> None:
        while True:
            try:
                self._launched.get().collect()
            except Exception as error:
                return self._on_failure(error)
            self._launched.task_done()
