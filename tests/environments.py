"""Environments of other projects' packages, each made once and kept in `.venv-clients/`.

pip makes them from the index that it is configured with.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from deadlines import DEADLINE_S

FOLDER = Path(__file__).parents[1] / ".venv-clients"
INSTALL_S = 5 * DEADLINE_S


def environment(name: str, *packages: str) -> Path:
    """Return the folder of the commands of an environment; make it if it is not whole."""
    folder = FOLDER / name
    mark = folder / ".installed"
    if not mark.exists() or mark.read_text().split() != [*packages]:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], timeout=INSTALL_S, check=True)
        pip = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *packages], timeout=INSTALL_S, check=True)
        mark.write_text("\n".join(packages))
    return folder / "bin"
