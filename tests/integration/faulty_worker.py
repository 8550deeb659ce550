"""The worker, with a model and a pool that a test can hold or break; run as a process by the tests beside it.

It looks into the folder of its socket before each forward and before each copy of blocks:

    hold      a FIFO: the forward begins when something has been written to it
    fail      the forward raises
    damage    the copy raises, once
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from quire.worker.__main__ import main  # sets what torch must find in the environment

# isort: split
from torch import Tensor

from quire.worker.kv_pool import KVPool
from quire.worker.model import PagedModel
from quire.worker.step_batch import StepBatch

FOLDER = Path(sys.argv[sys.argv.index("--listen") + 1].removeprefix("unix:")).parent

forward = PagedModel.forward
copy_blocks = KVPool.copy_blocks


def faulty_forward(model: PagedModel, batch: StepBatch, pool: KVPool) -> Tensor:
    if (FOLDER / "hold").exists():
        (FOLDER / "hold").read_bytes()
    if (FOLDER / "fail").exists():
        raise RuntimeError("told to fail")
    return forward(model, batch, pool)


def faulty_copy_blocks(pool: KVPool, pairs: Sequence[tuple[int, int]]) -> None:
    if (FOLDER / "damage").exists():
        (FOLDER / "damage").unlink()
        raise RuntimeError("told to damage the pool")
    copy_blocks(pool, pairs)


if __name__ == "__main__":
    PagedModel.forward = faulty_forward  # type: ignore[method-assign]
    KVPool.copy_blocks = faulty_copy_blocks  # type: ignore[method-assign]
    main()
