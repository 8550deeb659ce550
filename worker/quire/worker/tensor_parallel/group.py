"""A group of ranks on torch.distributed: who is in it, what goes between its ranks, and who has ended.

    process group   backend                 what
    the default     NCCL, gloo on a CPU     the model's collectives, sampled tokens
    orders          gloo                    orders, from the leader; agreements at start
    answers         gloo                    what followers answer
    lifeline        gloo                    signs of life, between the leader and each follower

None of the first three has a timeout of its own: an idle worker waits for days, and a step that hangs is the watchdog's
affair. The lifeline's connections break when a process ends. A network that is cut breaks no connection, so ranks of
several machines send signs of life too, and one that has sent none for too long is lost.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from quire.worker.run.ranks import RankLostError
from quire.worker.tensor_parallel.orders import HEADER_LENGTH, Order, read_order

LEADER = 0
JOIN_TIMEOUT = timedelta(minutes=10)
"""The time that all ranks have to be there: each has to import torch first."""
NO_TIMEOUT = timedelta(days=3650)
SIGN_PERIOD_S = 1.0
"""Between two signs of life."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's place in its group.

    store_path  a file that ranks of one machine meet by; None: at torchrun's MASTER_ADDR and MASTER_PORT
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    store_path: str | None = None

    @property
    def leads(self) -> bool:
        """True for the rank that serves."""
        return self.rank == LEADER


def given_place() -> RankPlace | None:
    """Return the place that torchrun gave to this process by its environment, None if there is none."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if any(name not in os.environ for name in names):
        return None
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in names)
    return RankPlace(rank, size, local_rank, local_size) if size > 1 else None


class RankGroup:
    """This process's place in a group of ranks that have all joined it.

    num_orders, order_bytes    orders sent or received since then, and their bytes, headers included
    """

    def __init__(self, place: RankPlace, device: torch.device, *, silence_s: float | None = None) -> None:
        """Wait for all ranks. Raises RankLostError if they have not all come within JOIN_TIMEOUT.

        A watched rank that sends no sign of life for silence_s is lost; None: signs are neither sent nor expected.
        """
        self.place = place
        self.num_orders = self.order_bytes = 0
        self._silence_s = silence_s
        # By the names that transformers reads, too.
        os.environ["LOCAL_RANK"] = str(place.local_rank)
        if place.store_path is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            _init(place, device)
            self._orders, self._answers, self._lifeline = (
                dist.new_group(backend="gloo", timeout=NO_TIMEOUT) for _ in range(3)
            )
        except RuntimeError as error:
            raise RankLostError(f"rank {place.rank} can't join the other {place.size - 1}: {error}") from error

    @property
    def backend(self) -> str:
        """The backend of the model's collectives: "nccl" or "gloo"."""
        return str(dist.get_backend())

    def watch(self, rank: int, on_lost: Callable[[str], None]) -> None:
        """Call back, on a thread of its own, with the reason, when another rank has ended or can't be reached."""
        self._start(f"watch-rank-{rank}", lambda: on_lost(self._await_loss(rank)))
        if self._silence_s is not None:
            self._start(f"signs-to-rank-{rank}", lambda: self._send_signs(rank))

    def _start(self, name: str, run: Callable[[], None]) -> None:
        threading.Thread(target=run, name=name, daemon=True).start()

    def _await_loss(self, rank: int) -> str:
        """Wait until the lifeline to a rank breaks, or no sign of life comes; return the reason."""
        limit = NO_TIMEOUT if self._silence_s is None else timedelta(seconds=self._silence_s)
        while True:
            heard = time.monotonic()
            try:
                dist.irecv(torch.zeros(1), src=rank, group=self._lifeline).wait(limit)  # type: ignore[union-attr]
            except RuntimeError:
                if time.monotonic() - heard < limit.total_seconds():
                    return f"rank {rank} has ended: its connection broke"
                return f"rank {rank} can't be reached: no sign of life for {self._silence_s:g} s"

    def _send_signs(self, rank: int) -> None:
        """Send signs of life until the lifeline breaks, which the watching thread reports."""
        with suppress(RuntimeError):
            while True:
                dist.send(torch.zeros(1), dst=rank, group=self._lifeline)
                time.sleep(SIGN_PERIOD_S)

    def send(self, order: Order) -> None:
        """Broadcast an order; for the leader."""
        header, payload = torch.from_numpy(order.header()), order.payload()
        dist.broadcast(header, src=LEADER, group=self._orders)
        if payload.size:
            dist.broadcast(torch.from_numpy(payload.copy()), src=LEADER, group=self._orders)
        self._count(header.nbytes + payload.nbytes)

    def receive(self) -> Order:
        """Wait for the leader's next order."""
        header = torch.zeros(HEADER_LENGTH, dtype=torch.int64)
        dist.broadcast(header, src=LEADER, group=self._orders)
        payload = torch.zeros(int(header[1:].sum()), dtype=torch.uint8)
        if payload.numel():
            dist.broadcast(payload, src=LEADER, group=self._orders)
        self._count(header.nbytes + payload.nbytes)
        return read_order(header.numpy(), payload.numpy())

    def _count(self, num_bytes: int) -> None:
        self.num_orders += 1
        self.order_bytes += num_bytes

    def answer(self, values: list[int]) -> None:
        """Send the leader this rank's answer to an order."""
        dist.send(torch.tensor(values, dtype=torch.int64), dst=LEADER, group=self._answers)

    def answers(self, length: int) -> dict[int, list[int]]:
        """Wait for the answers of all followers to the oldest order that has none, by rank; `length` numbers each."""
        found: dict[int, list[int]] = {}
        for rank in range(1, self.place.size):
            values = torch.zeros(length, dtype=torch.int64)
            dist.recv(values, src=rank, group=self._answers)
            found[rank] = values.tolist()
        return found

    def share(self, tokens: Tensor) -> None:
        """Give the followers the leader's tokens: [n] int64 on the device, the leader's read and the others written."""
        dist.broadcast(tokens, src=LEADER)

    def reduced(self, value: int, how: dist.ReduceOp.RedOpType) -> int:
        """Return the sum, or the least, of the ranks' values; at start, before there are orders."""
        tensor = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(tensor, op=how, group=self._orders)
        return int(tensor)

    def combined(self, fingerprint: str) -> str:
        """Return one fingerprint for those of all ranks, in order; at start, before there are orders."""
        own = torch.from_numpy(np.frombuffer(sha256(fingerprint.encode()).digest(), dtype=np.uint8).copy())
        found = [torch.zeros_like(own) for _ in range(self.place.size)]
        dist.all_gather(found, own, group=self._orders)
        return sha256(b"".join(each.numpy().tobytes() for each in found)).hexdigest()


def _init(place: RankPlace, device: torch.device) -> None:
    is_cuda = device.type == "cuda"
    store = None if place.store_path is None else dist.FileStore(place.store_path, place.size)  # type: ignore[attr-defined]
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        rank=place.rank,
        world_size=place.size,
        timeout=JOIN_TIMEOUT,
        device_id=device if is_cuda else None,
        store=store,
    )
