"""The measured answer to which products of few rows are faster in Quire's own kernels than in the device's library.

products.json has, by the name of a GPU, those that are: each with the tiling that was fastest. A product that it does
not have is the library's, on any device. `quire bench kernels products --write-table` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

TABLE_FILE = Path(__file__).with_name("products.json")

# Rows that are measured. Other numbers of rows go by the next one.
ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)


class ProductKind(StrEnum):
    """A product with what is computed in the same launch."""

    PLAIN = "plain"
    NORM = "norm"
    RESIDUAL = "residual"
    GATED = "gated"
    NORM_GATED = "norm+gated"

    @property
    def has_norm(self) -> bool:
        return self in (ProductKind.NORM, ProductKind.NORM_GATED)

    @property
    def is_gated(self) -> bool:
        return self in (ProductKind.GATED, ProductKind.NORM_GATED)


class ProductKey(NamedTuple):
    """The key of a decision: K inputs, N columns of the result, rows as in ROW_COUNTS, a dtype as torch prints it
    without its "torch.".
    """

    kind: ProductKind
    num_outputs: int
    num_inputs: int
    dtype: str
    num_rows: int


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A product that an own kernel has won. The tiling as quire.kernels.skinny_tiling.Tiling; times in µs."""

    key: ProductKey
    tiling: Mapping[str, Any]
    own_us: float
    library_us: float

    def as_json(self) -> dict[str, Any]:
        times = {"own_us": round(self.own_us, 2), "library_us": round(self.library_us, 2)}
        return {**self.key._asdict(), "tiling": dict(self.tiling), **times}


def read_table(device_name: str, path: Path = TABLE_FILE) -> dict[ProductKey, TableEntry]:
    """This GPU's products for which an own kernel is faster. Raises ValueError, naming the file, if it is malformed."""
    try:
        entries = [_entry(each) for each in json.loads(path.read_text()).get(device_name, [])]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name} is no table of products: {type(error).__name__}: {error}") from error
    return {entry.key: entry for entry in entries}


def _entry(found: Mapping[str, Any]) -> TableEntry:
    num_rows = int(found["num_rows"])
    if num_rows not in ROW_COUNTS:
        raise ValueError(f"num_rows={num_rows} is not one of {', '.join(map(str, ROW_COUNTS))}")
    key = ProductKey(
        ProductKind(found["kind"]), int(found["num_outputs"]), int(found["num_inputs"]), str(found["dtype"]), num_rows
    )
    return TableEntry(key, dict(found["tiling"]), float(found["own_us"]), float(found["library_us"]))


def write_table(device_name: str, entries: list[TableEntry], path: Path = TABLE_FILE) -> None:
    """Replace this GPU's part of the table; that of other GPUs stays."""
    table = json.loads(path.read_text()) if path.exists() else {}
    table[device_name] = [entry.as_json() for entry in sorted(entries, key=lambda entry: entry.key)]
    lines = []
    for name in sorted(table):
        rows = ",\n".join(f"    {json.dumps(each)}" for each in table[name])
        lines.append(f"  {json.dumps(name)}: [\n{rows}\n  ]" if rows else f"  {json.dumps(name)}: []")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n" if lines else "{}\n")
