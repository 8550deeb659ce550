"""Memory of a GPU that outlives the process that made it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from deadlines import DEADLINE_S
from running_holder import RunningHolder

from quire.worker.device.shared_memory import open_shared
from quire.worker.holder.borrowing import Borrowed

NUM_BYTES, HOST_BYTES = (300 << 20) + 8, 8_192
WORK = f"""
import os, signal, sys, torch
from pathlib import Path
from quire.worker.device.shared_memory import make_shared
from quire.worker.holder.borrowing import Borrowed
device = torch.device("cuda:0")
torch.zeros(1, device=device)
borrowed = Borrowed(Path(sys.argv[1]), {HOST_BYTES})
memory, descriptor = make_shared({NUM_BYTES}, device)
assert not memory.any()
borrowed.leave(descriptor)
memory.copy_((torch.arange({NUM_BYTES}, device=device) % 251).to(torch.uint8))
torch.cuda.synchronize()
torch.cuda._sleep(2_000_000_000)  # and killed while the device is busy
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_is_found_after_the_death_of_its_process_and_freed_when_it_is_replaced(
    device: torch.device, tmp_path: Path
) -> None:
    with RunningHolder(tmp_path / "holder.sock") as holder:
        ended = subprocess.run([sys.executable, "-c", WORK, holder.path], timeout=2 * DEADLINE_S, check=False)
        assert ended.returncode == -9
        borrowed = Borrowed(holder.path, HOST_BYTES)
        assert borrowed.deposit is not None
        memory = open_shared(borrowed.deposit, NUM_BYTES, torch.device("cuda:0"))
        expected = (torch.arange(NUM_BYTES, device=device) % 251).to(torch.uint8)
        assert torch.equal(memory, expected)
        assert memory.view(torch.int64)[:4].clone().is_cuda
        borrowed.replace()
        assert borrowed.deposit is None
        borrowed.close()
