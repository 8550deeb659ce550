"""The host tier: memory beside the pool for the blocks of offloaded sequences.

Like the pool it has bytes, not owners. A host block has the bytes of one block, all layers' keys and values. On a GPU
the memory is pinned and copies run on a stream of their own, beside the computation:

    to the host      after all work submitted to the device before; work submitted after `join` waits for them
    from the host    the same; work submitted after `restore` waits for them

so that no block is written before it was copied, and none is read before it was copied back. On a CPU both are plain
copies, done when the call returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.worker.device.transfer import pin
from quire.worker.memory.kv_pool import NULL_BLOCK, KVPool, bytes_of_blocks

Pairs = Sequence[tuple[int, int]]
"""Sources and targets."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Move = Callable[..., None]
"""gather_blocks or scatter_blocks of kernels/quire/kernels/offload.py."""


@dataclass(frozen=True, slots=True)
class HostCopies:
    """Blocks copied for one step, and how long the copies took in seconds."""

    num_offloaded: int = 0
    num_restored: int = 0
    offload_s: float = 0.0
    restore_s: float = 0.0


class HostPool:
    """Host blocks 0 .. num_blocks - 1, and the copies of one step at a time.

    Copies raise ValueError, with nothing copied, for a block out of range, and for a target that comes twice.
    """

    def __init__(self, pool: KVPool, *, num_blocks: int) -> None:
        """Takes num_blocks * pool.bytes_per_block bytes, and touches them: memory that is not there is missed here."""
        self.num_blocks = num_blocks
        self._pool = pool
        self._storage = torch.empty((num_blocks, pool.bytes_per_block), dtype=torch.uint8).zero_()
        self._copies = HostCopies()

    def offload(self, pairs: Pairs) -> None:
        """Copy blocks of the pool to host blocks."""
        if pairs:
            host_blocks = [host for _, host in pairs]
            self._check(blocks=[block for block, _ in pairs], host_blocks=host_blocks)
            if len(set(host_blocks)) != len(host_blocks):
                raise ValueError(f"{len(host_blocks)} copies are of {len(set(host_blocks))} distinct host blocks")
            self._offload(pairs)

    def restore(self, pairs: Pairs) -> None:
        """Copy host blocks to blocks of the pool."""
        if pairs:
            blocks = [block for _, block in pairs]
            self._check(blocks=blocks, host_blocks=[host for host, _ in pairs])
            if len(set(blocks)) != len(blocks):
                raise ValueError(f"{len(blocks)} copies have {len(set(blocks))} distinct targets")
            self._restore(pairs)

    @property
    def bytes_per_block(self) -> int:
        return self._pool.bytes_per_block

    def read_block(self, host_block: int) -> bytes:
        """Return the content of a host block that nothing is being copied to."""
        return self._storage[host_block].numpy().tobytes()

    def write_block(self, host_block: int, content: bytes) -> None:
        """Replace the content of a host block that nothing else uses."""
        self._storage[host_block].numpy()[:] = np.frombuffer(content, np.uint8)

    def join(self) -> None:
        """Makes later work on the device wait for the copies to the host."""

    def finish(self) -> HostCopies:
        """Returns the step's copies with their times when they are done; the next step's begin."""
        copies, self._copies = self._copies, HostCopies()
        return copies

    def _check(self, *, blocks: list[int], host_blocks: list[int]) -> None:
        """A block may be copied to several host blocks: two sequences that shared it have left. And a host block to
        several blocks: two prompts have found it."""
        for name, ids, first, end in (
            ("block_id", blocks, NULL_BLOCK + 1, self._pool.num_blocks),
            ("host_block_id", host_blocks, 0, self.num_blocks),
        ):
            for value in ids:
                if not first <= value < end:
                    raise ValueError(f"{name} {value} is not in {first} .. {end - 1}")

    def _offload(self, pairs: Pairs) -> None:
        started = time.perf_counter()
        for host, blocks in self._rows():
            for block_id, host_block in pairs:
                host[host_block] = blocks[block_id]
        self._copies = HostCopies(num_offloaded=len(pairs), offload_s=time.perf_counter() - started)

    def _restore(self, pairs: Pairs) -> None:
        started, before = time.perf_counter(), self._copies
        for host, blocks in self._rows():
            for host_block, block_id in pairs:
                blocks[block_id] = host[host_block]
        seconds = time.perf_counter() - started
        self._copies = HostCopies(before.num_offloaded, len(pairs), before.offload_s, seconds)

    def _rows(self) -> Iterator[tuple[Bytes, Bytes]]:
        """Return each tensor's part of the host blocks, and its blocks: bytes [H, n] and [B, n].

        Row by row numpy copies three times as fast as torch by indices, which copies twice.
        """
        first = 0
        for tensor in self._pool.block_tensors:
            blocks = bytes_of_blocks(tensor).numpy()
            end = first + blocks.shape[1]
            yield self._storage.numpy()[:, first:end], blocks
            first = end


class TimedCopies:
    """Copies of one kind on a stream."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self.begin: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.end: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def finish(self) -> tuple[int, float]:
        """Returns when they are done: how many blocks, and the seconds they took. The next ones begin."""
        num_blocks, self.num_blocks = self.num_blocks, 0
        if not num_blocks:
            return 0, 0.0
        self.end.synchronize()
        return num_blocks, float(self.begin.elapsed_time(self.end)) / 1e3


class PinnedHostPool(HostPool):
    """A host pool beside a pool on a GPU; at least one block."""

    def __init__(self, pool: KVPool, *, num_blocks: int) -> None:
        """Raises ValueError if the pool's blocks can't be moved whole, RuntimeError if the memory can't be pinned."""
        # Triton is imported for a GPU only.
        from quire.kernels.block_copy import block_runs

        super().__init__(pool, num_blocks=num_blocks)
        self._runs = block_runs(pool.block_tensors)
        pin(self, self._storage)
        self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self._offloading, self._restoring = TimedCopies(), TimedCopies()

    def join(self) -> None:
        torch.cuda.current_stream(self._pool.device).wait_event(self._offloading.end)

    def finish(self) -> HostCopies:
        (num_offloaded, offload_s), (num_restored, restore_s) = self._offloading.finish(), self._restoring.finish()
        return HostCopies(num_offloaded, num_restored, offload_s, restore_s)

    def _offload(self, pairs: Pairs) -> None:
        from quire.kernels.offload import gather_blocks

        self._copy(self._offloading, gather_blocks, [(host, block) for block, host in pairs])

    def _restore(self, pairs: Pairs) -> None:
        from quire.kernels.offload import scatter_blocks

        self._copy(self._restoring, scatter_blocks, pairs)
        torch.cuda.current_stream(self._pool.device).wait_event(self._restoring.end)

    def _copy(self, copies: TimedCopies, move: Move, pairs: Pairs) -> None:
        """Host blocks come first in each pair."""
        self._stream.wait_stream(torch.cuda.current_stream(self._pool.device))
        copies.begin.record(self._stream)
        with torch.cuda.stream(self._stream):
            for first, blocks in by_consecutive_rows(pairs):
                move(self._runs, self._storage[first : first + len(blocks)], block_ids=blocks)
        copies.end.record(self._stream)
        copies.num_blocks = len(pairs)


def make_host_pool(pool: KVPool, *, num_blocks: int) -> HostPool:
    """The one for the pool's device. Raises what its constructor raises."""
    kind = PinnedHostPool if num_blocks and pool.device.type == "cuda" else HostPool
    return kind(pool, num_blocks=num_blocks)


def count_host_blocks(host_memory_bytes: int, *, bytes_per_block: int, free_memory_bytes: int) -> int:
    """The number of host blocks that fit so much memory; none in none.

    Raises ValueError if it is more than is free, or less than a block.
    """
    if host_memory_bytes > free_memory_bytes:
        raise ValueError(f"--host-memory: {host_memory_bytes} bytes asked for, {free_memory_bytes} bytes free")
    num_blocks = host_memory_bytes // bytes_per_block
    if host_memory_bytes and not num_blocks:
        raise ValueError(
            f"--host-memory: {host_memory_bytes} bytes have no room for a block of {bytes_per_block} bytes"
        )
    return num_blocks


def by_consecutive_rows(pairs: Pairs) -> list[tuple[int, list[int]]]:
    """Blocks by the runs of consecutive rows, given first in each pair, that they go to or come from."""
    runs: list[tuple[int, list[int]]] = []
    for row, block in sorted(pairs):
        if not runs or row != runs[-1][0] + len(runs[-1][1]):
            runs.append((row, []))
        runs[-1][1].append(block)
    return runs
