"""The parts of `make gpu-ten-minutes`, read from parts.toml: commands, limits, figures and their predictions."""

from __future__ import annotations

import re
import statistics
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
RUN_BENCHMARK = ROOT / "benchmarks/harness/run.py"
# What a part can need, with a program that exits with 0 if it is there.
GPU, CORE = "GPU that torch finds", "native core of cachemgr (make venv)"
PROBES = {
    GPU: "import sys, torch; sys.exit(not torch.cuda.is_available())",
    CORE: "import quire.cachemgr._core",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a part's JSON.

    at         where it is: keys and, for a list, the first item with these values ("steps/cell=decode 1 x 1024/ms").
               A "/" between two digits is one of a value. The median is taken of a list of numbers
    predicted  before the first run
    estimate   True if the prediction does not follow from a measured or a published figure
    target     the value that must be reached, or a bound
    goal       a value beyond the target
    better     "less" or "more"
    """

    name: str
    at: str
    predicted: float | None = None
    target: float | None = None
    goal: float | None = None
    better: str = "less"
    estimate: bool = False

    def read(self, content: object) -> float | None:
        """Return the figure's value, or None if it is not in the JSON."""
        for step in self.steps():
            content = _follow(content, step)
        if isinstance(content, list) and content and all(isinstance(each, int | float) for each in content):
            return float(statistics.median(content))
        return float(content) if isinstance(content, int | float) and not isinstance(content, bool) else None

    def steps(self) -> list[str]:
        """Return the steps to it in the JSON."""
        return re.split(r"(?<!\d)/|/(?!\d)", self.at)

    def reaches(self, value: float, limit: float) -> bool:
        """Return True if the value is as good as the limit."""
        return value >= limit if self.better == "more" else value <= limit


def filters_of(step: str) -> dict[str, str]:
    """Return the values that a step wants of a list's item, by key."""
    return dict(pair.split("=", 1) for pair in step.split("&"))


def _follow(content: object, step: str) -> object:
    if isinstance(content, Mapping):
        return content.get(step)
    if isinstance(content, list):
        wanted = filters_of(step)
        return next((item for item in content if all(str(item.get(k)) == v for k, v in wanted.items())), None)
    return None


@dataclass(frozen=True, slots=True)
class Part:
    """A part: a process of its own with a time limit.

    name         of letters, digits, "." and "-"
    call         the call that it belongs to
    limit_s      its time limit in seconds
    command      a script of benchmarks/ with its flags, or arguments of Python; "OUTPUT" in a flag is the folder of
                 its JSON, for benchmarks that write it after each figure
    decides      the decision that it is for, or what to look at
    json         the file that a benchmark writes into the folder after --output
    dry          "run": in a dry run its --quick form runs. "read": its command line is read, and nothing runs
    without_gpu  arguments of Python in place of the command where there is no GPU
    needs        keys of PROBES
    figures      of its JSON, for the table
    """

    name: str
    call: str
    limit_s: float
    command: tuple[str, ...]
    decides: str
    json: str = ""
    dry: str = "read"
    without_gpu: tuple[str, ...] = ()
    needs: tuple[str, ...] = (GPU,)
    figures: tuple[Figure, ...] = ()

    @property
    def is_benchmark(self) -> bool:
        return self.command[0].startswith("benchmarks/")

    @property
    def is_only_read(self) -> bool:
        """True if a dry run only reads its command line."""
        return self.is_benchmark and self.dry == "read"

    def arguments(self, output: Path) -> list[str]:
        """Return the arguments of Python that run the part on a GPU."""
        if not self.is_benchmark:
            return list(self.command)
        return [str(RUN_BENCHMARK), *self._in_root(output), "--output", str(output)]

    def flags(self, output: Path) -> list[str]:
        """Return the flags of its script."""
        return [flag.replace("OUTPUT", str(output)) for flag in self.command[1:]]

    def dry_arguments(self, output: Path) -> list[str] | None:
        """Return the arguments of Python that run it without a GPU, None if nothing of it can."""
        if self.without_gpu:
            return list(self.without_gpu)
        if not self.is_benchmark:
            return None if GPU in self.needs else list(self.command)
        return [str(RUN_BENCHMARK), *self._in_root(output), "--quick", "--output", str(output)]

    def _in_root(self, output: Path) -> list[str]:
        return [str(ROOT / self.command[0]), *self.flags(output)]


@dataclass(frozen=True, slots=True)
class Call:
    """One run of the script: its limit in seconds and its parts, in order."""

    name: str
    title: str
    seconds: float
    parts: tuple[Part, ...]

    def dry_parts(self) -> list[Part]:
        """Return the parts of a dry run: those that run, and one that reads the command lines of the others."""
        reading = Part("command-lines", self.name, 120, (str(HERE / "parsing.py"), self.name), "a wrong flag", needs=())
        read = any(part.is_only_read for part in self.parts)
        return [part for part in self.parts if not part.is_only_read] + [reading] * read


@dataclass(frozen=True, slots=True)
class Plan:
    """All calls; `gpu` is a part of the name of the GPU of the predictions and targets."""

    gpu: str
    calls: dict[str, Call]


def read_plan(path: Path = HERE / "parts.toml") -> Plan:
    """Read all calls and parts. Raises ValueError if a part is of no call, TypeError for a key that none has."""
    content = tomllib.loads(path.read_text())
    parts = [_part(table) for table in content["parts"]]
    calls = {
        name: Call(name, about["title"], about["seconds"], tuple(part for part in parts if part.call == name))
        for name, about in content["calls"].items()
    }
    if strays := [part.name for part in parts if part.call not in calls]:
        raise ValueError(f"{path}: {strays[0]} is of a call that is none of {', '.join(calls)}")
    return Plan(content["gpu"], calls)


def _part(table: dict[str, Any]) -> Part:
    lists = {key: tuple(table[key]) for key in ("command", "without_gpu") if key in table}
    needs = {"needs": tuple(_NEEDS[need] for need in table["needs"])} if "needs" in table else {}
    return Part(**table | lists | needs | {"figures": tuple(Figure(**each) for each in table.get("figures", ()))})


_NEEDS = {"gpu": GPU, "core": CORE}
