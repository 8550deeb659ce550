"""Runs the peers' drivers, each under a Python that has the peer.

transformers is in this project's own environment. vLLM and SGLang get one each under .venv-peers/, with only what
importing their block manager needs; torch, numpy and the like come from this project's environment, by a path file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "peers"
ENVIRONMENTS = Path(__file__).parents[2] / ".venv-peers"
PEERS = ("vllm", "sglang", "transformers")
TIMEOUT_S = 1800
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "PYTHONDONTWRITEBYTECODE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class PeerUnavailable(Exception):
    """The peer can't run here; its recorded figures have to do."""


def requirements(peer: str) -> Path:
    return FOLDER / f"requirements-{peer}.txt"


def python_of(peer: str) -> Path:
    """The interpreter that has the peer."""
    if not requirements(peer).exists():
        return Path(sys.executable)
    return ENVIRONMENTS / peer / ("Scripts" if os.name == "nt" else "bin") / "python"


def install(peer: str) -> None:
    """Makes the peer's environment, unless it is there with these requirements. Raises PeerUnavailable."""
    if not requirements(peer).exists():
        return
    folder, pinned = ENVIRONMENTS / peer, requirements(peer).read_text()
    stamp = folder / "installed.txt"
    if stamp.exists() and stamp.read_text() == pinned:
        return
    venv.create(folder, clear=True, with_pip=True)
    python = str(python_of(peer))
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "-r", str(requirements(peer))], capture_output=True, text=True)
    if done.returncode:
        raise PeerUnavailable(f"pip: {last_line(done.stderr)}")
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    (Path(site) / "zz_borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    stamp.write_text(pinned)


def run(peer: str, *, sizes: list[int], repeats: int, memory: int) -> dict[str, Any]:
    """The driver's result. Raises PeerUnavailable."""
    python = python_of(peer)
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


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message"
