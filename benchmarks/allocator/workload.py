"""The work of every allocator, ours and the peers', and the loops that repeat it.

Needs only the standard library: a peer's driver imports it under that peer's Python. A subject times its own calls, so
that its inputs (decoded requests, the worker's reports) are prepared outside of the timed region.
"""

from __future__ import annotations

import gc
import hashlib
import random
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

BLOCK_SIZE = 16
PROMPT_TOKENS = 2048
FORK_TOKENS = 2040
"""Leaves the prompt's last block half full, so that there is something to copy."""
BATCH = 256
NUM_SAMPLES = 3
VOCAB = 128_256
BATCH_STEPS, STEPS_PER_REPEAT = 16, 4
"""Consecutive steps of a batch, in which each of its sequences fills one block; steps measured per repeat."""
MIN_SAMPLES, MAX_ROW_S = 3, 30.0
"""A row ends early if its repeats and the work between them take longer than this."""
GC_THRESHOLDS = (10_000, 10, 10)
FILL_FROM_BLOCKS = 10_000
"""From this size on, half of the pool holds cached prompts before anything is timed."""

CALIBRATION_BLOCKS = 128
CALIBRATION_REFERENCE_US = 47.0
"""The time of the chain of SHA-256 over 128 blocks on the machine of the recorded figures."""


class Subject(Protocol):
    """One allocator with one pool. Methods that return a number do their work once and return nanoseconds."""

    def prepare(self, seq_id: int, tokens: list[int]) -> Any:
        """An admission as the allocator's caller has it: decoded, not hashed."""

    def admit(self, prepared: Any) -> int:
        """Tokens to published blocks: hash, look up, allocate, and make the full blocks findable."""

    def release(self, seq_id: int) -> int:
        """Releases a sequence's blocks; its full blocks stay cached."""

    def extend(self, seq_ids: list[int]) -> int:
        """One step of a batch: a slot for one more token of each sequence."""

    def extend_and_publish(self, seq_ids: list[int]) -> int:
        """Extends with the token before appended, and publishes the blocks that became full."""

    def begin_batch(self, seq_ids: list[int]) -> None:
        """Untimed: the sequences are running from now on."""

    def end_batch(self, seq_ids: list[int]) -> None:
        """Untimed: the sequences end."""

    def fork(self, seq_id: int, child_ids: list[int]) -> int:
        """More samples of a prompt that was just admitted, up to the first token of each in a block of its own."""

    def num_free(self) -> int:
        """Blocks that can be allocated without evicting."""

    def clear(self) -> None:
        """Untimed: nothing is held or cached any more."""


class Prompts:
    """Random token ids below 65,536, the same for every allocator and run."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = random.Random(seed)
        self._next_id = 0

    def tokens(self, count: int) -> list[int]:
        return array("H", self._generator.randbytes(2 * count)).tolist()

    def seq_id(self) -> int:
        self._next_id += 1
        return self._next_id


def settle_garbage() -> None:
    """Freezes existing objects and makes collections rare, as our server does after its start; here for the peers,
    too."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def fill(subject: Subject, prompts: Prompts, num_blocks: int) -> None:
    """Leaves num_blocks cached, in chains of a prompt's length, nothing held."""
    per_prompt = PROMPT_TOKENS // BLOCK_SIZE
    for _ in range(num_blocks // per_prompt):
        seq_id = prompts.seq_id()
        subject.admit(subject.prepare(seq_id, prompts.tokens(PROMPT_TOKENS)))
        subject.release(seq_id)


class Rows:
    """The rows of the table for one subject and pool size: nanoseconds, one entry per repeat."""

    def __init__(self, subject: Subject, num_blocks: int, *, repeats: int, warm_up: int = 3) -> None:
        """Half of the pool is cached from FILL_FROM_BLOCKS on."""
        self.subject = subject
        self.num_blocks = num_blocks
        self.prompts = Prompts()
        self.repeats = repeats
        self.warm_up = warm_up
        self._num_filled = num_blocks // 2 if num_blocks >= FILL_FROM_BLOCKS else 0
        self.refill()

    def refill(self) -> None:
        """A pool as it is before any row: half of it cached (see FILL_FROM_BLOCKS), the other half free."""
        self.subject.clear()
        fill(self.subject, self.prompts, self._num_filled)

    def require_free(self, num_blocks: int) -> None:
        """Untimed: nothing has to be evicted for the next num_blocks."""
        if self.subject.num_free() < num_blocks:
            self.refill()

    def repeat(self, once: Callable[[], float]) -> list[float]:
        """Samples of one row, after warm_up that do not count."""
        settle_garbage()
        started, samples = time.monotonic(), []
        for number in range(self.repeats + self.warm_up):
            taken = once()
            if number >= self.warm_up:
                samples.append(taken)
            if len(samples) >= MIN_SAMPLES and time.monotonic() - started > MAX_ROW_S:
                break
        return samples

    def admitted(self, num_tokens: int = PROMPT_TOKENS) -> tuple[int, int]:
        """A fresh prompt; returns its sequence and what admitting it took."""
        seq_id, tokens = self.prompts.seq_id(), self.prompts.tokens(num_tokens)
        self.require_free(2 * PROMPT_TOKENS // BLOCK_SIZE)
        return seq_id, self.subject.admit(self.subject.prepare(seq_id, tokens))

    def fresh(self) -> list[float]:
        """Admit a prompt of 2,048 tokens that nothing is known of, into free blocks."""

        def once() -> float:
            seq_id, taken = self.admitted()
            self.subject.release(seq_id)
            return taken

        return self.repeat(once)

    def cached(self) -> list[float]:
        """Admit 2,048 tokens, all of them cached and without a holder; the last block is computed again."""
        tokens = self.prompts.tokens(PROMPT_TOKENS)
        first = self.prompts.seq_id()
        self.require_free(4 * PROMPT_TOKENS // BLOCK_SIZE)
        self.subject.admit(self.subject.prepare(first, tokens))
        self.subject.release(first)

        def once() -> float:
            seq_id = self.prompts.seq_id()
            taken = self.subject.admit(self.subject.prepare(seq_id, tokens))
            self.subject.release(seq_id)
            return taken

        return self.repeat(once)

    def release(self) -> list[float]:
        """Release a sequence of 2,048 tokens with published blocks that it does not share."""

        def once() -> float:
            seq_id, _ = self.admitted()
            return self.subject.release(seq_id)

        return self.repeat(once)

    def fork(self) -> list[float]:
        """Three more samples of a prompt of 2,040 tokens, and the first token of all four computed."""

        def once() -> float:
            seq_id, _ = self.admitted(FORK_TOKENS)
            children = [self.prompts.seq_id() for _ in range(NUM_SAMPLES)]
            taken = self.subject.fork(seq_id, children)
            for held in (seq_id, *children):
                self.subject.release(held)
            return taken

        return self.repeat(once)

    def extend(self) -> list[float]:
        """256 running sequences, one token each; a sample is one of 16 consecutive steps of a batch."""
        return self._batches(self.subject.extend)

    def extend_and_publish(self) -> list[float]:
        """Extend with tokens appended and full blocks published: one sequence in 16 fills a block in each step."""
        return self._batches(self.subject.extend_and_publish)

    def _batches(self, step: Callable[[list[int]], int]) -> list[float]:
        """Lengths are staggered, so that every step is the same work."""
        settle_garbage()
        samples: list[float] = []
        while len(samples) < self.repeats * STEPS_PER_REPEAT:
            with self.running() as seq_ids:
                step(seq_ids)
                samples += [step(seq_ids) for _ in range(BATCH_STEPS)]
        return samples

    @contextmanager
    def running(self) -> Iterator[list[int]]:
        """256 sequences of 17 to 32 tokens, as many of each length."""
        self.require_free(min(4 * BATCH, self.num_blocks - 1))
        seq_ids = [self.prompts.seq_id() for _ in range(BATCH)]
        for index, seq_id in enumerate(seq_ids):
            tokens = self.prompts.tokens(BLOCK_SIZE + 1 + index % BLOCK_SIZE)
            self.subject.admit(self.subject.prepare(seq_id, tokens))
        self.subject.begin_batch(seq_ids)
        yield seq_ids
        self.subject.end_batch(seq_ids)

    def full(self) -> list[float]:
        """Admit a fresh prompt of 2,048 tokens while every block of the pool is cached: 128 are evicted."""
        self._fill_up()

        def once() -> float:
            if self.subject.num_free() >= PROMPT_TOKENS // BLOCK_SIZE:
                self._fill_up()
            seq_id, tokens = self.prompts.seq_id(), self.prompts.tokens(PROMPT_TOKENS)
            taken = self.subject.admit(self.subject.prepare(seq_id, tokens))
            self.subject.release(seq_id)
            return taken

        return self.repeat(once)

    def _fill_up(self) -> None:
        self.subject.clear()
        fill(self.subject, self.prompts, self.num_blocks)

    def all(self) -> dict[str, list[float]]:
        """Every row by name. The pool is full of cached blocks afterwards."""
        return {name: getattr(self, name)() for name in ROWS}


ROWS = ("fresh", "cached", "extend", "extend_and_publish", "release", "fork", "full")


def sha256_chain() -> None:
    """SHA-256 of 128 blocks of 64 bytes, each chained on the one before."""
    parent, tokens = b"\0" * 32, bytes(CALIBRATION_BLOCKS * BLOCK_SIZE * 4)
    for start in range(0, len(tokens), BLOCK_SIZE * 4):
        parent = hashlib.sha256(parent + tokens[start : start + BLOCK_SIZE * 4]).digest()


def allocator_loop() -> None:
    """The work of an allocator beside the hashes: a dict of bytes, a free list, reference counts; 128 blocks twice."""
    found: dict[bytes, int] = {}
    free, counts = list(range(CALIBRATION_BLOCKS)), [0] * CALIBRATION_BLOCKS
    for number in range(CALIBRATION_BLOCKS):
        block_id = free.pop()
        counts[block_id] += 1
        found[number.to_bytes(32, "little")] = block_id
    for number in range(CALIBRATION_BLOCKS):
        block_id = found.pop(number.to_bytes(32, "little"))
        counts[block_id] -= 1
        free.append(block_id)


def calibrate(repeats: int = 500) -> dict[str, float]:
    """Median microseconds of the two loops, which tell one machine, or moment, from another."""
    taken: dict[str, float] = {}
    for name, work in (("sha256_chain_us", sha256_chain), ("allocator_loop_us", allocator_loop)):
        samples = []
        for _ in range(repeats):
            start = time.perf_counter_ns()
            work()
            samples.append(time.perf_counter_ns() - start)
        taken[name] = sorted(samples)[repeats // 2] / 1000
    return taken
