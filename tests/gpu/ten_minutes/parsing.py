"""Reads the command lines of a call's benchmarks and the places of their figures: python parsing.py CALL

Nothing is run. Each command line is read by a fork of this process, which has imported torch: without that every one
would take seconds. Exits with 1 if a script is not there, has no such flag, or refuses a flag's value; or if the JSON
that it writes has no such figure, by shapes.json and by the script's gpu_items(), if it has it.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import matplotlib.pyplot  # noqa: F401
import torch._dynamo  # noqa: F401
import transformers  # noqa: F401
from forks import succeeds
from json_shapes import lacking, read_shapes
from parts import ROOT, Figure, Part, filters_of, read_plan


def read(part: Part) -> None:
    """Import a benchmark as harness/run.py does, and let its command read the flags. Raises ValueError."""
    script, flags = ROOT / part.command[0], part.flags(ROOT)
    sys.argv = [str(script), *flags]
    sys.path[:0] = [str(script.parent), str(ROOT / "benchmarks/harness")]
    benchmark = runpy.run_path(str(script), run_name="read")
    context = benchmark["main"].make_context(script.name, list(flags))
    shape = read_shapes().get(part.command[0])
    items = benchmark["gpu_items"](context.params) if "gpu_items" in benchmark else {}
    for figure in part.figures:
        check(figure, shape, items)


def check(figure: Figure, shape: Any, items: dict[str, list[dict[str, str]]]) -> None:
    """Raise ValueError if the JSON of this shape has no such figure, or none of the items of its list is meant."""
    if shape is None:
        raise ValueError(f"shapes.json has no shape of the JSON of {figure.name!r}: see json_shapes.py")
    if step := lacking(figure, shape):
        raise ValueError(f"{figure.name!r} is not in the JSON: {step!r} of {figure.at!r}")
    name, *rest = figure.steps()
    if name not in items or not rest:
        return
    wanted = filters_of(rest[0])
    if not any(wanted.items() <= (wanted | item).items() for item in items[name]):
        raise ValueError(f"{figure.name!r}: the command measures no item of {name!r} with {rest[0]!r}")


def main() -> int:
    parts = [part for part in read_plan().calls[sys.argv[1]].parts if part.is_only_read]
    wrong = [part.name for part in parts if not succeeds(part.name, lambda part=part: read(part))]
    print(f"report: {len(parts) - len(wrong)} of {len(parts)} command lines are right", *wrong, flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
