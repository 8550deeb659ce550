"""The cost of a kept pool while all is well, and the time that a start takes with the records of many blocks.

a record        the checksum of a block of a 56M, of 262 kB, and its store; beside the time in which transformers
                computes the block's 16 tokens in a prompt, or 16 sequences a token each, of which one fills a block
a start         of the worker: the records of all blocks, and the sums of some; the tensors are small, so that
                they fit this machine. Of cachemgr: the new epoch, in which all blocks stay cached
"""

from __future__ import annotations

import mmap
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
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


def record(kept: KeptPool, block_id: int) -> None:
    """Record a block, as the step that fills it does."""
    kept.begin_writing([block_id])
    kept.end_writing([block_id])()


def cost_of_records(num_rounds: int) -> dict[str, list[float]]:
    """Seconds of a record, of a block's part of a prompt, and of a step of decoding sequences, in turns."""
    taken: dict[str, list[float]] = {"record": [], "block of a prompt": [], "step of 16 sequences": []}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model = llama_56m(Path(folder)).eval()
        config = model.config
        layers = dict.fromkeys(
            range(config.num_hidden_layers), Heads(config.num_key_value_heads, config.head_dim, config.head_dim)
        )
        kept, _, _ = keep(layers, 64)
        prompt, tokens = (
            torch.zeros(1, PROMPT_TOKENS, dtype=torch.int64),
            torch.zeros(NUM_SEQUENCES, 1, dtype=torch.int64),
        )
        for number in range(num_rounds):
            taken["record"].append(seconds_of(lambda block=number % 63 + 1: record(kept, block)))
            whole = seconds_of(lambda: model(prompt, logits_to_keep=1))
            taken["block of a prompt"].append(whole * BLOCK_SIZE / PROMPT_TOKENS)
            taken["step of 16 sequences"].append(seconds_of(lambda: model(tokens)))
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
    made = table("records of kept blocks", "", "ms", "a record's part")
    record_s = statistics.median(costs["record"])
    for name, samples in costs.items():
        part = "" if name == "record" else f"{record_s / statistics.median(samples):.2%}"
        made.add_row(name, spread([1e3 * each for each in samples], ".3f"), part)
    for name, samples in begun.items():
        made.add_row(f"start of the {name}, {num_blocks:,} blocks", spread([1e3 * each for each in samples]), "")
    return made, {"num_blocks": num_blocks, "costs_s": costs, "starts_s": begun}
