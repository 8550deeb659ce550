"""Environments of peers: a folder each in .venv-peers/, with packages of their own.

What a peer shares with Quire, such as torch and numpy, comes from the environment of this process, by a path file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ENVIRONMENTS = Path(__file__).parents[2] / ".venv-peers"


class PeerUnavailable(Exception):
    """The peer can't run here."""


def python_of(peer: str) -> Path:
    """Return the interpreter of a peer's environment, which need not exist."""
    return ENVIRONMENTS / peer / ("Scripts" if os.name == "nt" else "bin") / "python"


def install(peer: str, requirements: Path) -> Path:
    """Return the interpreter of an environment with these requirements; make it if there is none.

    Raises PeerUnavailable if pip can't install them.
    """
    folder, python, pinned = ENVIRONMENTS / peer, python_of(peer), requirements.read_text()
    stamp = folder / "installed.txt"
    if stamp.exists() and stamp.read_text() == pinned:
        return python
    venv.create(folder, clear=True, with_pip=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "-r", str(requirements)], capture_output=True, text=True)
    if done.returncode:
        raise PeerUnavailable(f"pip: {last_line(done.stderr)}")
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    borrowed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (Path(site) / "zz_borrowed.pth").write_text("\n".join(borrowed) + "\n")
    stamp.write_text(pinned)
    return python


def last_line(text: str) -> str:
    """Return the last line of a program's output."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message"
