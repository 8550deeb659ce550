"""compute-sanitizer on every kernel: accesses outside of tensors, and races on shared memory."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("every_kernel.py")


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on PATH")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, str(SCRIPT)]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "every kernel ran" in done.stdout
