"""A pool's tensors as the deposit of a holder's memory, as on a GPU; see also tests/gpu/test_kept_pool.py."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from layers import UNEVEN_LAYERS
from running_holder import RunningHolder
from stand_in_cuda_driver import StandInDriver

from quire.worker.device import shared_memory
from quire.worker.device.shared_memory import SharedMemoryError, make_shared, open_shared
from quire.worker.holder.borrowing import Borrowed, HolderError
from quire.worker.memory.kept_pool import KeptPool, Overwritten, mark_of, size_of_memory, size_of_tensors
from quire.worker.memory.kv_pool import KVPool, bytes_per_block

NUM_BLOCKS, BLOCK_SIZE = 12, 4
DTYPE = torch.bfloat16
TENSOR_BYTES = size_of_tensors(
    num_blocks=NUM_BLOCKS, bytes_per_block=bytes_per_block(UNEVEN_LAYERS, BLOCK_SIZE, DTYPE), num_tensors=4
)
CPU = torch.device("cpu")


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[RunningHolder]:
    with RunningHolder(tmp_path / "holder.sock") as running:
        yield running


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> StandInDriver:
    found = StandInDriver()
    monkeypatch.setattr(shared_memory, "_driver", lambda: found)
    return found


def start(path: Path, mark: object = 0) -> tuple[Borrowed, KeptPool, KVPool]:
    """A worker of which the pool's tensors are a deposit."""
    borrowed = Borrowed(path, size_of_memory(num_blocks=NUM_BLOCKS))
    kept = KeptPool(
        borrowed, mark=mark_of(mark), num_blocks=NUM_BLOCKS, tensor_bytes=TENSOR_BYTES, deposits=True, device=CPU
    )
    pool = KVPool(
        UNEVEN_LAYERS, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=DTYPE, device=CPU, allocate=kept.allocate
    )
    kept.bind(pool)
    return borrowed, kept, pool


def num_files(name: str) -> int:
    """The open files of this process, in which the holder runs, too."""
    folder = Path("/proc/self/fd")
    return sum(name in os.readlink(folder / each) for each in os.listdir(folder) if (folder / each).is_symlink())


def fill(kept: KeptPool | Overwritten, pool: KVPool, block_ids: list[int]) -> None:
    kept.begin_writing(block_ids)
    for tensor in pool.tensors():
        tensor[block_ids] = torch.randn(tensor[block_ids].shape).to(DTYPE)
    kept.end_writing(block_ids)()


def whole(kept: KeptPool) -> list[int]:
    bits = kept.find_content(verify_all=True)[0].whole_blocks
    return [block for block in range(NUM_BLOCKS) if bits[block // 8] >> block % 8 & 1]


def in_a_killed_process(work: Callable[[], None]) -> None:
    """Run a function in a process that is killed when it returns."""
    child = os.fork()
    if not child:
        try:
            work()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            sys.stderr.write("the child failed\n")
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_the_deposit_of_a_killed_worker_is_found(holder: RunningHolder, driver: StandInDriver) -> None:
    def work() -> None:
        torch.manual_seed(3)
        _, kept, pool = start(holder.path)
        kept.attached(11, 5)
        fill(kept, pool, [1, 5, 7])
        pool.k(0)[5, 0] += 1  # without a record
        fill(kept, pool, [9])
        kept.begin_writing([7])

    in_a_killed_process(work)
    borrowed, kept, pool = start(holder.path)
    assert (kept.is_kept, kept.held_bytes, driver.calls) == (True, TENSOR_BYTES, ["cuMemImportFromShareableHandle"])
    assert (whole(kept), bool(pool.k(0)[1].any()), bool(pool.k(0)[0].any())) == ([1, 9], True, False)
    borrowed.close()


def test_memory_without_its_deposit_is_replaced(holder: RunningHolder, driver: StandInDriver) -> None:
    """A worker that was killed before it had made one."""
    borrowed = Borrowed(holder.path, size_of_memory(num_blocks=NUM_BLOCKS))
    first = borrowed.memory_id
    kept = KeptPool(borrowed, mark=mark_of(0), num_blocks=NUM_BLOCKS)
    kept.attached(11, 5)
    borrowed.close()
    borrowed, kept, _ = start(holder.path)
    assert (kept.is_kept, kept.memory_id == first, driver.calls) == (False, False, ["cuMemCreate"])
    borrowed.close()


def test_foreign_memory_is_freed_before_new_memory_is_made(holder: RunningHolder, driver: StandInDriver) -> None:
    borrowed, kept, pool = start(holder.path, "model")
    kept.attached(11, 5)
    fill(kept, pool, [1])
    borrowed.close()
    num_deposits = num_files("memfd:device")
    borrowed, kept, pool = start(holder.path, "other model")
    assert num_files("memfd:device") == num_deposits
    assert (kept.is_kept, kept.is_foreign, whole(kept)) == (False, True, [])
    assert not any(tensor.any() for tensor in pool.tensors())
    borrowed.close()


def test_what_a_warm_up_writes_has_no_record(holder: RunningHolder) -> None:
    borrowed, kept, pool = start(holder.path)
    kept.attached(11, 5)
    fill(kept, pool, [1, 2])
    fill(Overwritten(kept), pool, [1])
    assert (kept.find_content(verify_all=True)[1], whole(kept)) == ([], [2])
    borrowed.close()


def test_a_block_that_is_written_again_before_its_step_ends_has_no_record(holder: RunningHolder) -> None:
    borrowed, kept, _ = start(holder.path)
    kept.attached(11, 5)
    kept.begin_writing([1, 2])
    record = kept.end_writing([1, 2])
    kept.begin_writing([2])  # the next step is launched
    record()
    assert whole(kept) == [1]
    borrowed.close()


def test_a_deposit_is_taken_once_and_from_the_borrower_alone(holder: RunningHolder) -> None:
    borrowed, kept, _ = start(holder.path)
    with pytest.raises(HolderError, match="has a deposit already"):
        borrowed.leave(0)
    borrowed.close()
    again = Borrowed(holder.path, size_of_memory(num_blocks=NUM_BLOCKS))
    again.replace()
    again.memory_id = kept.memory_id
    with pytest.raises(HolderError, match=f"memory {kept.memory_id} is not lent to this process"):
        again.leave(0)
    again.close()


def test_a_device_without_room_is_named(driver: StandInDriver) -> None:
    driver.free_bytes = 1
    with pytest.raises(SharedMemoryError, match="cuMemCreate fails: CUDA_ERROR_OUT_OF_MEMORY"):
        make_shared(10, CPU)


def test_a_deposit_of_another_size_is_refused() -> None:
    _, descriptor = make_shared(10, CPU)
    assert open_shared(descriptor, 10, CPU).shape == (10,)
    with pytest.raises(SharedMemoryError, match="cuMemMap fails: CUDA_ERROR_INVALID_VALUE"):
        open_shared(descriptor, 3 << 20, CPU)
    os.close(descriptor)
