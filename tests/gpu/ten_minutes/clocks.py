"""Samples of a GPU's clocks, power and temperature while a part runs, by nvidia-smi, where that is there."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

TOOL = "nvidia-smi"
COLUMNS = {"clocks.sm": "sm_mhz", "clocks.mem": "memory_mhz", "power.draw": "power_w", "temperature.gpu": "celsius"}
"""Columns of nvidia-smi, and their names here."""
PERIOD_MS = 200


@dataclass(slots=True)
class Clocks:
    """The samples of a part; empty where there is no nvidia-smi, or it answers nothing."""

    samples: list[dict[str, float]] = field(default_factory=list)

    def as_json(self) -> dict[str, dict[str, float]] | None:
        """Return least, median and most of each column, None without samples."""
        if not self.samples:
            return None
        columns = {name: [sample[name] for sample in self.samples] for name in self.samples[0]}
        return {
            name: {"min": min(values), "median": statistics.median(values), "max": max(values)}
            for name, values in columns.items()
        }

    def __str__(self) -> str:
        found = self.as_json()
        if found is None:
            return ""
        sm, power = found["sm_mhz"], found["power_w"]
        return f"{sm['median']:.0f} MHz ({sm['min']:.0f} at least), {power['max']:.0f} W"


@contextmanager
def sampled(*, wanted: bool) -> Iterator[Clocks]:
    """Sample beside the block. The result has its samples when the block has ended."""
    clocks, tool = Clocks(), shutil.which(TOOL)
    if not wanted or tool is None:
        yield clocks
        return
    command = [tool, f"--query-gpu={','.join(COLUMNS)}", "--format=csv,noheader,nounits", f"--loop-ms={PERIOD_MS}"]
    with tempfile.TemporaryFile("w+") as written:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.DEVNULL)
        try:
            yield clocks
        finally:
            process.terminate()
            process.wait()
            written.seek(0)
            clocks.samples += filter(None, map(_sample, written))


def _sample(line: str) -> dict[str, float] | None:
    """Return a line's columns; None for one that was cut off, or has a column that this GPU does not tell."""
    values = line.split(",")
    try:
        return dict(zip(COLUMNS.values(), map(float, values), strict=True))
    except ValueError:
        return None
