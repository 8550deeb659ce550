"""The cost of a kept pool while all is well, and the time that a start takes with the records of many blocks.

records         the checksums of the blocks that a step fills, of 262 kB each in a 56M, and their stores; beside the
                step's forward by transformers: a prompt of 512 tokens fills 32 blocks, and 16 decoding sequences
                fill one on average
a start         of the worker: the records of all blocks, and the sums of some; the tensors are small, so that
                they fit this machine. Of cachemgr: the new epoch, in which all blocks stay cached
"""

from __future__ import annotations

import mmap
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from models import llama_56m
from report import spread, table
from restart import BLOCK_SIZE, EPOCH, Steps
from rich.table import Table

from quire.cache.v1.cache_service_pb2 import PlanStepRequest
from quire.worker.holder.borrowing import Borrowed
from quire.worker.memory.kept_pool import KeptPool, mark_of, size_of_memory, size_of_tensors
from quire.worker.memory.kv_pool import KVPool, bytes_per_block

PROMPT_TOKENS = 512
NUM_SEQUENCES = 16
NUM_FILLED = PROMPT_TOKENS // BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Heads:
    """See KeptPerToken."""

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    values_in_keys: bool = False


SMALL = {0: Heads(1, 8, 8)}
"""A block of 1 KiB."""


class Memory:
    """Memory as a holder lends it, without the holder."""

    memory_id = "benchmark"

    def __init__(self, num_bytes: int) -> None:
        self.buffer = mmap.mmap(-1, num_bytes)

    def replace(self) -> None:
        raise RuntimeError("the memory is another pool's")


def keep(layers: dict[int, Heads], num_blocks: int, memory: Memory | None = None) -> tuple[KeptPool, KVPool, Memory]:
    """A pool in memory that is kept, or that was kept before."""
    size = bytes_per_block(layers, BLOCK_SIZE, torch.float32)
    tensors = size_of_tensors(num_blocks=num_blocks, bytes_per_block=size, num_tensors=2 * len(layers))
    memory = memory or Memory(size_of_memory(num_blocks=num_blocks) + tensors)
    kept = KeptPool(cast(Borrowed, memory), mark=mark_of("benchmark"), num_blocks=num_blocks)
    pool = KVPool(
        layers, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=torch.float32, device="cpu", allocate=kept.allocate
    )
    kept.bind(pool)
    return kept, pool, memory


def seconds_of(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def record(kept: KeptPool, block_ids: Sequence[int]) -> None:
    """Record blocks, as the step that fills them does."""
    kept.begin_writing(block_ids)
    kept.end_writing(block_ids)()


def cost_of_records(num_rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of a step's forward, and of its records, in turns."""
    taken: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model = llama_56m(Path(folder)).eval()
        config = model.config
        heads = Heads(config.num_key_value_heads, config.head_dim, config.head_dim)
        kept, pool, _ = keep(dict.fromkeys(range(config.num_hidden_layers), heads), 1 + 2 * NUM_FILLED)
        steps = {
            f"a prompt of {PROMPT_TOKENS} tokens": (torch.zeros(1, PROMPT_TOKENS, dtype=torch.int64), NUM_FILLED),
            f"{NUM_SEQUENCES} decoding sequences": (torch.zeros(NUM_SEQUENCES, 1, dtype=torch.int64), 1),
        }
        for number in range(num_rounds):
            for name, (tokens, num_filled) in steps.items():
                forward = seconds_of(partial(model, tokens, logits_to_keep=1))
                first = 1 + number % 2 * NUM_FILLED
                for tensor in pool.tensors():
                    tensor[first : first + num_filled] = number
                records = seconds_of(partial(record, kept, range(first, first + num_filled)))
                taken.setdefault(name, []).append((forward, records))
    return taken


def starts(num_blocks: int, num_rounds: int) -> dict[str, list[float]]:
    """Seconds of both processes with so many kept blocks."""
    kept, _, memory = keep(SMALL, num_blocks)
    kept.attached(EPOCH, 1)
    for first in range(1, num_blocks, 10_000):
        block_ids = range(first, min(first + 10_000, num_blocks))
        kept.begin_writing(block_ids)
        kept.end_writing(block_ids)()
    taken: dict[str, list[float]] = {"worker": [], "cachemgr": []}
    whole = b""
    for _ in range(num_rounds):
        again, _, _ = keep(SMALL, num_blocks, memory)
        started = time.perf_counter()
        content, changed = again.find_content(verify_all=False)
        taken["worker"].append(time.perf_counter() - started)
        assert not changed
        whole = content.whole_blocks
    steps = Steps(num_blocks - 1, None)
    for number in range((num_blocks - 1) * BLOCK_SIZE // 4096):
        steps.admit(number, 1, 4096)
        steps.run(PlanStepRequest(release_sequence_ids=[number]))
    for number in range(num_rounds):
        started = time.perf_counter()
        num_kept, _ = steps.ledger.begin_epoch(EPOCH + 1 + number, whole_blocks=whole, now=0.0)
        taken["cachemgr"].append(time.perf_counter() - started)
        assert num_kept > 0.9 * num_blocks, f"{num_kept} of {num_blocks} blocks are kept"
    return taken


def measure_records(quick: bool) -> tuple[Table, dict[str, Any]]:
    """A table for people, and its figures."""
    num_blocks, num_rounds = (10_000, 1) if quick else (1_000_000, 5)
    costs, begun = cost_of_records(num_rounds * 7), starts(num_blocks, num_rounds)
    made = table("records of kept blocks", "", "ms", "ms of records", "part")
    for name, pairs in costs.items():
        forwards, records = ([1e3 * each[which] for each in pairs] for which in (0, 1))
        part = statistics.median(records) / statistics.median(forwards)
        made.add_row(name, spread(forwards, ".1f"), spread(records, ".2f"), f"{part:.1%}")
    for name, samples in begun.items():
        made.add_row(f"start of the {name}, {num_blocks:,} blocks", spread([1e3 * each for each in samples]), "", "")
    return made, {"num_blocks": num_blocks, "costs_s": costs, "starts_s": begun}
