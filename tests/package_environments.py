"""Environments of other projects' packages, each made once and kept in `.venv-clients/`.

pip makes them from the index that it is configured with.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

from deadlines import DEADLINE_S

FOLDER = Path(__file__).parents[1] / ".venv-clients"
INSTALL_S = 5 * DEADLINE_S
SMG = "smg==1.13.0"
"""Shepherd Model Gateway, for environment("smg", SMG)."""


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
            make = [sys.executable, "-m", "venv", "--clear", "--without-pip", folder]
            subprocess.run(make, timeout=INSTALL_S, check=True)
            # What is compiled at the first import is a small part of what pip would compile.
            pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python"]
            flags = ["install", "--quiet", "--disable-pip-version-check", "--no-compile"]
            subprocess.run([*pip, *flags, *packages], timeout=INSTALL_S, check=True)
            mark.write_text("\n".join(packages))
    return folder / "bin"
