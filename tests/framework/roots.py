"""The roots of the namespace `quire`: the folders of a checkout that Python must have on its path to import it."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
ROOTS: list[str] = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["dev-mode-dirs"]


def python_path(checkout: Path = CHECKOUT) -> str:
    """Return a PYTHONPATH with which an interpreter that has nothing of Quire imports this checkout."""
    return os.pathsep.join(str(checkout / root) for root in ROOTS)
