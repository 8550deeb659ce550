"""The Python snippet of the README does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from quire.client.launch import LocalServices

ROOT = Path(__file__).parents[2]
SOCKET = "unix:/run/quire/cachemgr.sock"


def test_python_snippet_streams_two_samples() -> None:
    snippet = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert snippet is not None
    assert SOCKET in snippet[1]
    with LocalServices.start(model=ROOT / "deploy/demo/model", num_blocks=64) as services:
        code = snippet[1].replace(SOCKET, services.cachemgr_address)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line[:2] in ("0 ", "1 ")]
    assert len(lines) >= 4
    assert {line[0] for line in lines} == {"0", "1"}
