"""Runs the peers' drivers, each under a Python that has the peer.

transformers is in this project's own environment. vLLM, SGLang and TokenSpeed get one each under .venv-peers/, with
only what importing their block manager and their scheduler needs; torch, numpy and the like come from this project's
environment, by a path file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from environments import PeerUnavailable, install, last_line, python_of

FOLDER = Path(__file__).parent / "peers"
PEERS = ("vllm", "sglang", "transformers", "tokenspeed")
TIMEOUT_S = 1800
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "PYTHONDONTWRITEBYTECODE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def requirements(peer: str) -> Path:
    return FOLDER / f"requirements-{peer}.txt"


def interpreter(peer: str) -> Path:
    """The interpreter that has the peer."""
    return python_of(peer) if requirements(peer).exists() else Path(sys.executable)


def prepare(peer: str) -> None:
    """Makes the peer's environment, if it needs one. Raises PeerUnavailable."""
    if requirements(peer).exists():
        install(peer, requirements(peer))


def run(peer: str, *, sizes: list[int], repeats: int, memory: int) -> dict[str, Any]:
    """The driver's result. Raises PeerUnavailable."""
    python = interpreter(peer)
    if not python.exists():
        raise PeerUnavailable("not installed; --peers installs it")
    command = [str(python), str(FOLDER / f"{peer}_driver.py"), "--repeats", str(repeats), "--memory", str(memory)]
    command += ["--sizes", *map(str, sizes)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=os.environ | QUIET)
    except subprocess.TimeoutExpired:
        raise PeerUnavailable(f"not done after {TIMEOUT_S} s") from None
    if done.returncode:
        raise PeerUnavailable(last_line(done.stderr))
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result
