"""The rank that serves: it sends orders to its followers, and a step counts when all of them have run it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from quire.worker.device.profiling import phase
from quire.worker.grant.decoding import AcceptedStep
from quire.worker.run.ranks import OneRank, RankLostError, RankStatistics
from quire.worker.sampling.sampler import Sampled
from quire.worker.tensor_parallel.group import RankGroup
from quire.worker.tensor_parallel.orders import Order, OrderKind, checksum_order, step_order

WHY_TIMEOUT_S = 5.0
"""The time to wait for the cause of a broken connection: the end of the other process."""
FAILURE_TIMEOUT_S = 1.0
"""The time to wait for the cause of a failed forward, which may be the fault of the model."""


class Leader(OneRank):
    """Rank 0 of a group; called by its executor, on the model thread.

    All methods raise RankLostError when another rank has ended.
    """

    def __init__(self, group: RankGroup, device: torch.device, why_lost: Callable[[float], str | None]) -> None:
        """`why_lost` waits so many seconds for the cause of a loss, and returns None if there is none."""
        self.group = group
        self.size = group.place.size
        self.local_size = group.place.local_size
        self._device = device
        self._why_lost = why_lost
        self._lost: RankLostError | None = None
        self._ordered: AcceptedStep | None = None
        self._has_forwarded = False
        self._exchange_s = 0.0
        self._counting = threading.Lock()

    def statistics(self) -> RankStatistics:
        """See OneRank.statistics."""
        return RankStatistics(self.size, self.group.num_orders, self.group.order_bytes, self._exchange_s)

    def raise_if_lost(self) -> None:
        """See OneRank.raise_if_lost."""
        if self._lost is not None:
            raise self._lost

    @contextmanager
    def computing(self, step: AcceptedStep) -> Iterator[None]:
        """See OneRank.computing. The order goes here, when the leader has nothing left to refuse."""
        with phase("order"), self._talking():
            self.group.send(step_order(step, computes=True))
        self._ordered = step
        try:
            yield
        except RuntimeError as error:
            if (why := self._why_lost(FAILURE_TIMEOUT_S)) is not None:
                raise self._lose(why) from error
            raise
        self._has_forwarded = True

    def sample(self, num_rows: int, sample: Callable[[], Sampled]) -> Sampled:
        """See OneRank.sample. Tokens go out even if sampling fails: the followers wait for them."""
        tokens = torch.zeros(num_rows, dtype=torch.int64, device=self._device)
        try:
            sampled = sample()
            tokens = sampled.tokens
            return sampled
        finally:
            with self._talking():
                self.group.share(tokens)

    def launched(self, step: AcceptedStep, tables: Callable[[], int]) -> Callable[[], None]:
        """See OneRank.launched. A step that the leader could not begin to compute changes tables all the same."""
        if self._ordered is not step:
            with self._talking():
                self.group.send(step_order(step, computes=False))
        expected = [int(self._has_forwarded), tables()]
        self._ordered, self._has_forwarded = None, False
        number = step.grant.step_number
        return lambda: self._compare(number, expected)

    def _compare(self, step_number: int, expected: list[int]) -> None:
        with self._talking():
            answers = self.group.answers(len(expected))
        for rank, (has_forwarded, tables) in answers.items():
            if has_forwarded != expected[0]:
                failed = 0 if has_forwarded else rank
                raise self._lose(f"step {step_number} failed on rank {failed}, and not on all others")
            if tables != expected[1]:
                raise self._lose(f"the block tables of rank {rank} are not rank 0's after step {step_number}")

    def fence_lease(self, lease_id: str) -> None:
        """See OneRank.fence_lease."""
        with self._talking():
            self.group.send(Order(OrderKind.FENCE_LEASE, (lease_id.encode(),)))

    def begin_epoch(self) -> None:
        """See OneRank.begin_epoch."""
        with self._talking():
            self.group.send(Order(OrderKind.BEGIN_EPOCH))

    def add_checksums(self, block_ids: list[int], own: list[int]) -> list[int]:
        """See OneRank.add_checksums: the sum of the ranks' checksums, each times an odd number of its own."""
        with self._talking():
            self.group.send(checksum_order(block_ids))
            answers = self.group.answers(len(block_ids))
        sums = list(own)
        for rank, checksums in answers.items():
            sums = [total + checksum * (2 * rank + 1) for total, checksum in zip(sums, checksums, strict=True)]
        return [value % 2**63 for value in sums]

    def end(self) -> None:
        """Tell the followers to end."""
        with self._talking():
            self.group.send(Order(OrderKind.END))

    def least(self, value: int) -> int:
        """See OneRank.least."""
        with self._talking():
            return self.group.reduced(value, dist.ReduceOp.MIN)

    def total(self, value: int) -> int:
        """See OneRank.total."""
        with self._talking():
            return self.group.reduced(value, dist.ReduceOp.SUM)

    def combined(self, fingerprint: str) -> str:
        """See OneRank.combined."""
        with self._talking():
            return self.group.combined(fingerprint)

    @contextmanager
    def _talking(self) -> Iterator[None]:
        """Take a broken connection here for a lost rank. Two threads may be in it: steps are collected on another."""
        start = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            raise self._lose(self._why_lost(WHY_TIMEOUT_S) or f"a rank does not answer: {error}") from error
        finally:
            with self._counting:
                self._exchange_s += time.perf_counter() - start

    def _lose(self, why: str) -> RankLostError:
        self._lost = RankLostError(why)
        return self._lost
