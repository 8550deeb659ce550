"""Ranks of one worker: processes that hold a part of the model each, and compute every step together.

A worker is one rank unless it was told otherwise (`quire worker --tensor-parallel-size`). The executor calls the
methods of OneRank where a group of ranks has something to agree on; worker/tensor_parallel/ has the classes for the two
kinds of rank in a group: the leader, which serves, and its followers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from quire.worker.grant.decoding import AcceptedStep
from quire.worker.model.sharding import ModelRanks
from quire.worker.sampling.sampler import Sampled


class RankLostError(Exception):
    """A rank of the group has ended, hangs or differs from the others: nothing can be computed any more."""


@dataclass(frozen=True, slots=True)
class RankStatistics:
    """The leader's counts since the process started: orders sent, their bytes with headers, and seconds of exchanges.

    An exchange sends an order or sampled tokens, or waits for an answer. The model's own collectives are not counted.
    """

    num_ranks: int = 1
    num_orders: int = 0
    order_bytes: int = 0
    exchange_s: float = 0.0


class OneRank(ModelRanks):
    """A worker of one rank. Each method says what the ranks of a group do there."""

    local_size = 1
    """Ranks of the worker on this machine."""

    def statistics(self) -> RankStatistics:
        """Return the numbers of this rank's exchanges with the others."""
        return RankStatistics()

    def raise_if_lost(self) -> None:
        """Raise RankLostError if a rank was lost before: what was launched behind that step has nothing to build on."""

    def computing(self, step: AcceptedStep) -> AbstractContextManager[None]:
        """Have all ranks run the forward of a step in this context."""
        return nullcontext()

    def sample(self, num_rows: int, sample: Callable[[], Sampled]) -> Sampled:
        """Return the tokens of num_rows rows: the leader samples, the followers get the same tokens."""
        return sample()

    def launched(self, step: AcceptedStep, tables: Callable[[], int]) -> Callable[[], None]:
        """Note that the step's work is given to the device; return a function that waits for the other ranks.

        `tables` returns a number that is equal on all ranks.
        """
        return _nothing

    def fence_lease(self, lease_id: str) -> None:
        """Have all ranks forget a lease."""

    def begin_epoch(self) -> None:
        """Have all ranks forget all leases."""

    def add_checksums(self, block_ids: list[int], own: list[int]) -> list[int]:
        """Return checksums of blocks over all ranks, from those of this rank's part."""
        return own

    def least(self, value: int) -> int:
        """Return the least of the ranks' values."""
        return value

    def total(self, value: int) -> int:
        """Return the sum of the ranks' values."""
        return value


ONE_RANK = OneRank()


def _nothing() -> None:
    pass
