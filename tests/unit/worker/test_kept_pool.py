"""Memory that outlives a worker: the header and the records, and the content that the next worker finds."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import cast

import pytest
import torch
from layers import UNEVEN_LAYERS

from quire.worker.holder.borrowing import Borrowed
from quire.worker.memory import kept_pool
from quire.worker.memory.kept_pool import KeptPool, mark_of, size_of_memory, size_of_tensors
from quire.worker.memory.kv_pool import KVPool, bytes_per_block

NUM_BLOCKS, BLOCK_SIZE = 70, 4


class Memory:
    """Lent memory of this process alone."""

    def __init__(self, num_bytes: int) -> None:
        self.buffer = mmap.mmap(-1, num_bytes)
        self.memory_id = "first"

    def replace(self) -> None:
        self.buffer = mmap.mmap(-1, len(self.buffer))
        self.memory_id = "second"


def make_memory(dtype: torch.dtype = torch.float32) -> Memory:
    num_bytes = bytes_per_block(UNEVEN_LAYERS, BLOCK_SIZE, dtype)
    tensors = size_of_tensors(num_blocks=NUM_BLOCKS, bytes_per_block=num_bytes, num_tensors=4)
    return Memory(size_of_memory(num_blocks=NUM_BLOCKS) + tensors)


def start(memory: Memory, *parts: object, dtype: torch.dtype = torch.float32) -> tuple[KeptPool, KVPool]:
    """A worker on this memory."""
    kept = KeptPool(cast(Borrowed, memory), mark=mark_of(*parts), num_blocks=NUM_BLOCKS)
    pool = KVPool(
        UNEVEN_LAYERS, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype, device="cpu", allocate=kept.allocate
    )
    kept.bind(pool)
    return kept, pool


def fill(kept: KeptPool, pool: KVPool, block_ids: Sequence[int]) -> None:
    kept.begin_writing(block_ids)
    for block_id in block_ids:
        for tensor in pool.tensors():
            tensor[block_id] = torch.full_like(tensor[block_id], block_id)
    kept.end_writing(block_ids)()


def bits(whole: bytes) -> list[int]:
    return [block for block in range(8 * len(whole)) if whole[block // 8] >> block % 8 & 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_the_next_worker_finds_what_was_filled(dtype: torch.dtype) -> None:
    memory = make_memory(dtype)
    kept, pool = start(memory, dtype=dtype)
    assert (kept.is_kept, kept.is_foreign) == (False, False)
    kept.attached(11, 5)
    kept.accepted()
    kept.accepted()
    fill(kept, pool, [1, 9, 69])
    kept.begin_writing([9])  # and killed
    again, found = start(memory, dtype=dtype)
    assert (again.is_kept, again.memory_id) == (True, "first")
    content, changed = again.find_content(verify_all=True)
    assert (content.epoch, content.attached_term, content.num_accepted_steps) == (11, 5, 2)
    assert (bits(content.whole_blocks), changed) == ([1, 69], [])
    assert all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(pool.tensors(), found.tensors(), strict=True)
    )


@pytest.mark.parametrize("verify_all", [False, True])
def test_a_block_with_a_changed_byte_is_found_and_dropped(verify_all: bool) -> None:
    memory = make_memory()
    kept, pool = start(memory)
    kept.attached(11, 5)
    fill(kept, pool, [1, 2, 3])
    pool.v(3)[2, 3, 0, 3] += 1
    content, changed = start(memory)[0].find_content(verify_all=verify_all)
    assert (bits(content.whole_blocks), changed) == ([1, 3], [2])


def test_one_changed_block_in_the_sample_has_all_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_pool, "SAMPLED_BLOCKS", 1)
    memory = make_memory()
    kept, pool = start(memory)
    kept.attached(11, 5)
    fill(kept, pool, range(1, 70))
    pool.k(0)[1:] = 0
    content, changed = start(memory)[0].find_content(verify_all=False)
    assert (bits(content.whole_blocks), changed) == ([], list(range(1, 70)))


def test_memory_of_another_pool_is_replaced() -> None:
    memory = make_memory()
    kept, pool = start(memory, "model", torch.float32)
    kept.attached(11, 5)
    fill(kept, pool, [1])
    other, fresh = start(memory, "other model", torch.float32)
    assert (other.is_kept, other.is_foreign, other.memory_id) == (False, True, "second")
    assert not any(tensor.any() for tensor in fresh.tensors())


def test_memory_that_was_never_attached_is_replaced() -> None:
    memory = make_memory()
    fill(*start(memory), [1])
    again, _ = start(memory)
    assert (again.is_kept, again.is_foreign, again.memory_id) == (False, False, "second")


def test_an_epoch_that_the_worker_gave_up_is_not_gone_on_with() -> None:
    memory = make_memory()
    kept, _ = start(memory)
    kept.attached(11, 5)
    kept.accepted()
    kept.attached(11, 6)
    assert start(memory)[0].find_content(verify_all=False)[0].attached_term == 6
    kept.epoch_ended()
    assert not start(memory)[0].is_kept
    kept, _ = start(memory)
    kept.attached(12, 6)
    content, _ = start(memory)[0].find_content(verify_all=False)
    assert (content.epoch, content.num_accepted_steps) == (12, 0)
