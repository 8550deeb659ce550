"""How each part of a step runs, and the reason if it is not the fastest way that this worker was asked for.

A model that fails the check of a fast path is still served, only slower. Code that leaves such a path notes it here.
The log, /healthz, metrics, statistics and benchmarks read it from here.

Not degraded: what a flag turned off, what the device does not have (graphs on a CPU), and modules of kinds for which
there is no fused form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Part(StrEnum):
    """The parts of a step that may run in several ways. The values are labels of a metric."""

    MODULES = "modules"
    WEIGHTS = "weights"
    EXPERTS = "experts"
    ATTENTION = "attention"
    CACHE = "cache"
    DECODE = "decode"
    SAMPLER = "sampler"
    PROMPTS = "prompts"
    COPIES = "copies"
    KERNELS = "kernels"
    ARITHMETIC = "arithmetic"
    DISK = "disk"


GRAPH_PARTS = (Part.DECODE, Part.SAMPLER, Part.PROMPTS)
"""Those that may run as CUDA graphs."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How a part runs, and why it is not faster; "" if that is as it should be."""

    part: Part
    how: str
    degraded: str = ""

    def __str__(self) -> str:
        return f"{self.part}: {self.how}" + (f" (degraded: {self.degraded})" if self.degraded else "")


class Modes:
    """The modes of a loaded model, by part. Read from any thread."""

    def __init__(self) -> None:
        self._modes: dict[Part, Mode] = {}

    def note(self, part: Part, how: str, *, degraded: str = "") -> None:
        """Set the mode of a part; the last one counts. `degraded` is the reason why it is not faster."""
        self._modes[part] = Mode(part, how, degraded)

    def note_without_graphs(self, why: str) -> None:
        """Set the modes of a model that is to run without CUDA graphs."""
        for part in GRAPH_PARTS:
            self.note(part, f"without CUDA graphs: {why}")

    def all(self) -> Sequence[Mode]:
        """Return the modes in the order of Part, without parts that the model does not have."""
        return [self._modes[part] for part in Part if part in self._modes]

    def degraded(self) -> Sequence[Mode]:
        """Return the modes with a reason."""
        return [mode for mode in self.all() if mode.degraded]

    def describe_degraded(self) -> str:
        """Return the degraded parts with their reasons in one line; "" if there is none."""
        return "; ".join(map(str, self.degraded()))
