"""Environments of other projects' packages, each made once and kept in `.venv-clients/`.

uv makes them from the index that it is configured with.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import venv
from pathlib import Path

from deadlines import DEADLINE_S

FOLDER = Path(__file__).parents[2] / ".venv-clients"
UV = (sys.executable, "-m", "uv", "pip")
INSTALL_S = 5 * DEADLINE_S
SMG = "smg==1.13.0"
"""Shepherd Model Gateway, for environment("smg", SMG)."""


def python_of(folder: Path) -> list[str]:
    """Return the arguments that name the environment for uv."""
    return ["--python", str(folder / "bin/python")]


def installing(folder: Path) -> list[str]:
    """Return the command that installs into it. Nothing is compiled before its first import."""
    return [*UV, "install", "--quiet", *python_of(folder)]


def environment(name: str, *packages: str) -> Path:
    """Return the folder of the commands of an environment; make it if it is not whole.

    Tests of several processes may ask for it at the same time: one of them makes it, the others wait.
    """
    folder = FOLDER / name
    mark = folder / ".installed"
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not mark.exists() or mark.read_text().split() != [*packages]:
            venv.create(folder, clear=True, symlinks=True)
            subprocess.run([*installing(folder), *packages], timeout=INSTALL_S, check=True)
            mark.write_text("\n".join(packages))
    return folder / "bin"
