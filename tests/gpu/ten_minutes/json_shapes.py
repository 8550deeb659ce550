"""The shapes of the JSON files that the parts write, in shapes.json: a figure that is in none of them can't be read.

    python json_shapes.py FOLDER     take the shapes of files in FOLDER, written by --quick --output FOLDER on a CPU

A shape has the same keys as the file. A list is one item with the keys of all of its items, or a number if it is one of
numbers. Rows that were absent, such as peers, are among the keys that a list's items have for each row.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from parts import HERE, Figure, Part, read_plan

SHAPES = HERE / "shapes.json"
LEFT_OUT = {"machine", "command", "notes", "left_out", "errors", "load_average_at_start", "absent"}
"""Keys of a file that have no figures."""
ROWS_KEYS = {"taken_us"}
"""Keys of what has an entry for each row: there the absent ones are entered."""
QUICK_NAMES = {"step.json": "step_cpu.json"}
"""Files of benchmarks that write another one on a CPU."""


def shape_of(content: object, absent: tuple[str, ...] = (), *, key: str = "") -> Any:
    """Return the shape of a part of a file; `absent` are names of rows."""
    if isinstance(content, Mapping):
        made = {name: shape_of(value, absent, key=name) for name, value in content.items() if name not in LEFT_OUT}
        return {**dict.fromkeys(absent, next(iter(made.values()))), **made} if key in ROWS_KEYS and made else made
    if isinstance(content, list):
        items = [shape_of(item, absent) for item in content]
        return [reduce(merged, items)] if items and isinstance(items[0], dict) else 0
    return "" if isinstance(content, str) else 0


def merged(one: Any, other: Any) -> Any:
    """Return the shape with the keys of both."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return other if one == {} else one
    return {name: merged(one.get(name, {}), other.get(name, {})) for name in one | other}


def lacking(figure: Figure, shape: Any) -> str:
    """Return the first step of a figure's place that the shape does not have; empty if it has all."""
    for step in figure.steps():
        if isinstance(shape, list):
            names = {pair.split("=", 1)[0] for pair in step.split("&")}
            found = shape[0] if names <= shape[0].keys() else None
        else:
            found = shape.get(step) if isinstance(shape, dict) else None
        if found is None:
            return step
        shape = found
    return "" if shape == 0 else f"{figure.at} is no number"


def read_shapes() -> dict[str, Any]:
    """Return the shapes by the scripts that write them."""
    content: dict[str, Any] = json.loads(SHAPES.read_text())
    return content


def with_figures() -> list[Part]:
    return [part for call in read_plan().calls.values() for part in call.parts if part.figures]


def main() -> int:
    shapes = read_shapes() if SHAPES.exists() else {}
    for part in with_figures():
        path = Path(sys.argv[1], QUICK_NAMES.get(part.json, part.json))
        if path.is_file():
            content = json.loads(path.read_text())
            shapes[part.command[0]] = shape_of(content, tuple(content.get("absent") or ()))
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(shape)}" for name, shape in sorted(shapes.items()))
    SHAPES.write_text("{\n" + rows + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
