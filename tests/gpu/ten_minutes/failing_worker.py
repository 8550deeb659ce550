"""The worker, with a device that can be lost or hang: run as a process by the check of device loss.

Before each forward it looks into the folder of its socket:

    lose      the forward breaks the device: an index out of range on a GPU
    hang      the device does not answer: a kernel that sleeps for hours on a GPU
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from quire.worker.__main__ import main  # sets what torch must find in the environment

# isort: split
import torch
from torch import Tensor

from quire.worker.memory.step_batch import StepBatch
from quire.worker.run.executor import Executor

FOLDER = Path(sys.argv[sys.argv.index("--listen") + 1].removeprefix("unix:")).parent
SLEEP_CYCLES = 2**44

forward = Executor._forward


def failing_forward(executor: Executor, grant: object, batch: StepBatch) -> Tensor:
    device = batch.input_ids.device
    if (FOLDER / "lose").exists():
        if device.type != "cuda":
            raise torch.AcceleratorError("told to lose the device")
        torch.zeros(1, device=device).index_select(0, torch.full((1,), 2**20, device=device))
    if (FOLDER / "hang").exists():
        if device.type != "cuda":
            time.sleep(3600)
        torch.cuda._sleep(SLEEP_CYCLES)
    return forward(executor, grant, batch)  # type: ignore[arg-type]


if __name__ == "__main__":
    Executor._forward = failing_forward  # type: ignore[method-assign,assignment]
    main()
