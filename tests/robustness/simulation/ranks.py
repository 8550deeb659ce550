"""A worker of two ranks in one process: the second one has tables and a pool of its own, and gets the leader's orders.

The orders are the messages of tensor_parallel/orders.py; what goes over sockets in a real group is a call here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from quire.worker.grant.decoding import AcceptedStep
from quire.worker.run.executor import Executor
from quire.worker.run.ranks import OneRank, RankLostError, RankStatistics
from quire.worker.sampling.sampler import Sampled
from quire.worker.tensor_parallel.orders import read_step, step_order


class SimulatedFollower(OneRank):
    """Rank 1, as its executor calls it."""

    size = 2

    def __init__(self) -> None:
        self.tokens = torch.zeros(0, dtype=torch.int64)
        """Those that the leader sampled last."""
        self.has_forwarded = False
        self.tables = 0

    @contextmanager
    def computing(self, step: AcceptedStep) -> Iterator[None]:
        """See OneRank.computing."""
        yield
        self.has_forwarded = True

    def sample(self, num_rows: int, sample: Callable[[], Sampled]) -> Sampled:
        """See OneRank.sample."""
        return Sampled(self.tokens)

    def launched(self, step: AcceptedStep, tables: Callable[[], int]) -> Callable[[], None]:
        """See OneRank.launched."""
        self.tables = tables()
        return super().launched(step, tables)


class SimulatedLeader(OneRank):
    """Rank 0, as its executor calls it. Has the follower run each step when it has launched its own."""

    size = 2

    def __init__(self, follower: SimulatedFollower, executor: Executor) -> None:
        """`executor` is the follower's."""
        self._follower = follower
        self._executor = executor
        self._ordered: AcceptedStep | None = None
        self._has_forwarded = False
        self._num_orders = 0
        self._lost: RankLostError | None = None

    def lose(self) -> None:
        """From here on the follower does not answer."""
        self._lost = RankLostError("rank 1 has ended")

    def statistics(self) -> RankStatistics:
        """See OneRank.statistics."""
        return RankStatistics(num_ranks=2, num_orders=self._num_orders)

    def raise_if_lost(self) -> None:
        """See OneRank.raise_if_lost."""
        if self._lost is not None:
            raise self._lost

    @contextmanager
    def computing(self, step: AcceptedStep) -> Iterator[None]:
        """See OneRank.computing."""
        self._ordered = step
        yield
        self._has_forwarded = True

    def sample(self, num_rows: int, sample: Callable[[], Sampled]) -> Sampled:
        """See OneRank.sample."""
        self._follower.tokens = torch.zeros(num_rows, dtype=torch.int64)
        sampled = sample()
        self._follower.tokens = sampled.tokens
        return sampled

    def launched(self, step: AcceptedStep, tables: Callable[[], int]) -> Callable[[], None]:
        """See OneRank.launched."""
        expected = (self._has_forwarded, tables())
        computes, self._ordered, self._has_forwarded = self._ordered is step, None, False
        self._follow(read_step(step_order(step, computes=computes)))
        found = (self._follower.has_forwarded, self._follower.tables)
        self._follower.has_forwarded = False
        return lambda: self._compare(step.grant.step_number, expected, found)

    def _follow(self, step: AcceptedStep) -> None:
        self.raise_if_lost()
        self._num_orders += 1
        try:
            self._executor.execute(step)
        except Exception as error:  # it ends the follower's process
            self._lost = RankLostError(f"rank 1 has ended: {error!r}")
            raise self._lost from error

    def _compare(self, step_number: int, expected: tuple[bool, int], found: tuple[bool, int]) -> None:
        if expected[0] != found[0]:
            self._lost = RankLostError(f"step {step_number} failed on rank {int(expected[0])}, and not on both")
        elif expected[1] != found[1]:
            self._lost = RankLostError(f"the block tables of rank 1 are not rank 0's after step {step_number}")
        self.raise_if_lost()

    def fence_lease(self, lease_id: str) -> None:
        """See OneRank.fence_lease."""
        self._executor.fence_lease(lease_id)

    def begin_epoch(self) -> None:
        """See OneRank.begin_epoch."""
        self._executor.begin_epoch()

    def add_checksums(self, block_ids: list[int], own: list[int]) -> list[int]:
        """See OneRank.add_checksums. Both ranks keep the same here. Raises RankLostError if they do not."""
        if self._executor.checksum_blocks(block_ids) != own:
            self._lost = RankLostError("the blocks of rank 1 are not rank 0's")
        self.raise_if_lost()
        return own
