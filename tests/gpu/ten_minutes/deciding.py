"""Writes what the results of a GPU decide into its place: python deciding.py RESULTS... [--dry]

decisions.toml has the decisions. Each reads figures of one or several results by a rule, and writes one place:

    pairs      figures [new, old]: `then` if the new ones are better by `margin`, in at least `at_least` pairs (else in
               all), and none is worse by as much; otherwise the place keeps its value
    measured   the figure times a number, where that differs by more than `margin` from the present value
    winners    the list of products in a part's JSON: those of which an own kernel was faster, as the benchmark says

    constant   an assignment of a number, a string or a truth value at the top level of a Python file
    table      the worker's table of products: the value is of the GPU's name

Every decision is printed with its figures. A figure that was not measured decides nothing. Copies of the results go to
benchmarks/results.
"""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parts import HERE, ROOT

from quire.worker.fusion.product_table import ProductKey, ProductKind, TableEntry, read_table, write_table


@dataclass(frozen=True, slots=True)
class Pairs:
    """Choose `then` if new figures are better than old ones; less is better."""

    pairs: tuple[tuple[str, str], ...]
    margin: float
    then: Any
    at_least: int | None = None

    def decide(self, results: Results, present: Any) -> Choice:
        known = [(results.figure(new), results.figure(old)) for new, old in self.pairs]
        shown = ", ".join(f"{_shown(new)} against {_shown(old)}" for new, old in known)
        gains = [1 - new / old for new, old in known if new is not None and old]
        if len(gains) < len(self.pairs):
            return Choice(present, f"not decided, not measured: {shown}")
        better, worse = sum(gain > self.margin for gain in gains), sum(gain < -self.margin for gain in gains)
        is_chosen = better >= (self.at_least or len(gains)) and not worse
        return Choice(
            self.then if is_chosen else present, f"{better} of {len(gains)} better by {self.margin:.0%}: {shown}"
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """Take a figure times a number, if that is far from the present value."""

    figure: str
    times: float
    margin: float

    def decide(self, results: Results, present: Any) -> Choice:
        found = results.figure(self.figure)
        if found is None:
            return Choice(present, "not decided, not measured")
        value = float(f"{found * self.times:.3g}")
        is_far = not present or abs(value / present - 1) > self.margin
        return Choice(value if is_far else present, f"measured {value:g}, present {present:g}")


@dataclass(frozen=True, slots=True)
class Winners:
    """Take the products of which an own kernel was faster, each with its fastest tiling.

    at  "PART: KEY" of the list that benchmarks/kernels/products.py writes. The table keeps products that it has not.
    """

    at: str

    def decide(self, results: Results, present: Mapping[ProductKey, TableEntry]) -> Choice:
        rows = results.content(self.at)
        if not isinstance(rows, list):
            return Choice(present, "not decided, not measured")
        measured = {_product(row): row for row in rows}
        chosen = {key: _fastest(key, row) for key, row in measured.items() if row["is_own_faster"]}
        kept = {key: entry for key, entry in present.items() if key not in measured}
        return Choice(kept | chosen, f"own kernels are faster for {len(chosen)} of {len(rows)} products")


def _product(row: Mapping[str, Any]) -> ProductKey:
    return ProductKey(ProductKind(row["kind"]), *(row[name] for name in ProductKey._fields[1:]))


def _fastest(key: ProductKey, row: Mapping[str, Any]) -> TableEntry:
    own = min(row["own"], key=lambda each: each["taken_us"])
    return TableEntry(key, own["tiling"], own_us=own["taken_us"], library_us=row["library_us"])


@dataclass(frozen=True, slots=True)
class Choice:
    """The value that the place is to have, and the figures behind it."""

    value: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Constant:
    """NAME = value in a Python file."""

    path: Path
    name: str

    def read(self, gpu: str) -> Any:
        return ast.literal_eval(self._assignment().value)

    def write(self, gpu: str, value: Any) -> None:
        literal = self._assignment().value
        lines = self.path.read_text().splitlines(keepends=True)
        line = lines[literal.lineno - 1]
        lines[literal.lineno - 1] = line[: literal.col_offset] + repr(value) + line[literal.end_col_offset :]
        self.path.write_text("".join(lines))

    def _assignment(self) -> ast.Assign:
        """Return the one assignment of the name. Raises ValueError if there is not one, in one line."""
        found = [
            node
            for node in ast.parse(self.path.read_text()).body
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [self.name]
        ]
        if len(found) != 1 or found[0].value.lineno != found[0].value.end_lineno:
            raise ValueError(f"{self.path}: {self.name} is not assigned in one line at the top level")
        return found[0]


@dataclass(frozen=True, slots=True)
class ProductTable:
    """The GPU's part of the worker's table of products, in the form that the worker reads and writes."""

    path: Path

    def read(self, gpu: str) -> dict[ProductKey, TableEntry]:
        return read_table(gpu, self.path)

    def write(self, gpu: str, value: Mapping[ProductKey, TableEntry]) -> None:
        write_table(gpu, list(value.values()), self.path)


@dataclass(frozen=True, slots=True)
class Decision:
    name: str
    rule: Pairs | Measured | Winners
    place: Constant | ProductTable


@dataclass(frozen=True, slots=True)
class Results:
    """The parts of one or several files of results, of one GPU."""

    gpu: str
    parts: Mapping[str, Mapping[str, Any]]

    def figure(self, name: str) -> float | None:
        part, figure = name.split(": ", 1)
        value = self.parts.get(part, {}).get("figures", {}).get(figure)
        return None if value is None else float(value)

    def content(self, name: str) -> Any:
        part, key = name.split(": ", 1)
        return (self.parts.get(part, {}).get("content") or {}).get(key)


def read_results(paths: Sequence[Path]) -> Results:
    """Read files of results. Raises ValueError if they are of several GPUs, or of none."""
    contents = [json.loads(path.read_text()) for path in paths]
    gpus = sorted({content["gpu"] for content in contents})
    if len(gpus) != 1 or gpus == ["none"]:
        raise ValueError(f"the results are of {' and of '.join(gpus)}: one GPU decides")
    return Results(gpus[0], {name: part for content in contents for name, part in content["parts"].items()})


def read_decisions(path: Path = HERE / "decisions.toml", root: Path = ROOT) -> list[Decision]:
    """Read the decisions. Raises ValueError if one has no rule, no place, or several."""
    return [_decision(table, root) for table in tomllib.loads(path.read_text())["decisions"]]


def _decision(table: Mapping[str, Any], root: Path) -> Decision:
    rules = {"pairs", "measured", "winners"} & table.keys()
    places = {"constant", "table"} & table.keys()
    if len(rules) != 1 or len(places) != 1:
        raise ValueError(f"{table['name']}: has {len(rules)} rules and {len(places)} places, not one of each")
    rule: Pairs | Measured | Winners
    if "pairs" in table:
        pairs = tuple((new, old) for new, old in table["pairs"])
        rule = Pairs(pairs, table["margin"], table["then"], table.get("at_least"))
    else:
        rule = Measured(**table["measured"]) if "measured" in table else Winners(table["winners"])
    about = table.get("constant") or table["table"]
    path = root / about["path"]
    place = Constant(path, about["name"]) if "constant" in table else ProductTable(path)
    return Decision(table["name"], rule, place)


def _shown(value: float | None) -> str:
    return "not measured" if value is None else f"{value:g}"


def _brief(value: object) -> str:
    return f"{len(value)} products" if isinstance(value, dict) else repr(value)


def decide(decisions: Sequence[Decision], results: Results, *, dry: bool) -> None:
    """Write each decision into its place, and print it. All places are read before one is written."""
    presents = [decision.place.read(results.gpu) for decision in decisions]
    for decision, present in zip(decisions, presents, strict=True):
        choice = decision.rule.decide(results, present)
        is_new = choice.value != present
        what = f"-> {_brief(choice.value)}" if is_new else "unchanged"
        print(f"{decision.name}: {what} ({choice.reason})")
        if is_new and not dry:
            decision.place.write(results.gpu, choice.value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS")
    parser.add_argument("--dry", action="store_true", help="print the decisions, write nothing")
    given = parser.parse_args()
    try:
        results, decisions = read_results(given.results), read_decisions()
        decide(decisions, results, dry=given.dry)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(decisions)} decisions, by results of {results.gpu}")
    if not given.dry:
        for path in given.results:
            print(f"kept: {shutil.copy(path, ROOT / 'benchmarks/results')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
