"""The worker, with a model and a pool that a test can hold or break; run as a process by the tests beside it.

It looks into the folder of its socket before each forward, each copy of blocks, and each step that a follower reads:

    hold            a FIFO: the forward begins when something has been written to it
    fail            the forward raises, on every rank
    damage          the copy raises, once
    other-blocks    followers write the step's new blocks into their tables in another order, once
    hold-loading    a FIFO: a follower loads its model when something has been written to it
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.worker.__main__ import main  # sets what torch must find in the environment

# isort: split
from torch import Tensor
from transformers import AutoModelForCausalLM

from quire.worker.grant.decoding import AcceptedStep
from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.step_batch import StepBatch
from quire.worker.model.paged_model import PagedModel
from quire.worker.tensor_parallel import follower
from quire.worker.tensor_parallel.orders import Order

IN_FOLLOWER = "__mp_main__"
"""The name of this module in a process that torch's spawn has started."""
FOLDER = Path(sys.argv[sys.argv.index("--listen") + 1].removeprefix("unix:")).parent

forward = PagedModel.forward
copy_blocks = KVPool.copy_blocks
read_step = follower.read_step
from_pretrained = AutoModelForCausalLM.from_pretrained


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


def faulty_read_step(order: Order) -> AcceptedStep:
    step = read_step(order)
    if (FOLDER / "other-blocks").exists() and len(step.grant.write_block_ids) > 1:
        (FOLDER / "other-blocks").unlink()
        step.grant.write_block_ids[:] = reversed(step.grant.write_block_ids)
    return step


def faulty_from_pretrained(*args: Any, **kwargs: Any) -> Any:
    if (FOLDER / "hold-loading").exists():
        (FOLDER / "hold-loading").read_bytes()
    return from_pretrained(*args, **kwargs)


if __name__ in ("__main__", IN_FOLLOWER):
    PagedModel.forward = faulty_forward  # type: ignore[method-assign]
    KVPool.copy_blocks = faulty_copy_blocks  # type: ignore[method-assign]
if __name__ == IN_FOLLOWER:
    follower.read_step = faulty_read_step
    AutoModelForCausalLM.from_pretrained = faulty_from_pretrained
if __name__ == "__main__":
    main()
