"""The machine and the versions of a benchmark, written beside its figures."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path


def machine(*packages: str) -> dict[str, str | int]:
    """The processor, how many cores of it this process may use, and the versions of Python and these packages."""
    return {
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
