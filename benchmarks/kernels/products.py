"""Products of few rows on a GPU: cuBLAS against Quire's own kernels, and the table that the worker chooses by.

    quire bench kernels products                    every product of four models, 1 to 128 rows
    quire bench kernels products --write-table      and what was found into the worker's table, for this GPU
    quire bench kernels products --quick            a few tiny ones on a CPU, interpreted

A product is measured with what stands beside it in a layer, as a step would launch it without own kernels:

    plain           cuBLAS
    norm            add_rmsnorm, then the faster plain product
    gated           cuBLAS and silu_mul
    norm+gated      add_rmsnorm, then the faster of gated
    residual        cuBLAS, and the norm that adds; the own kernel has a norm that does not add behind it

Eight weights or more take turns, together three times the L2 cache, so that none is there from the call before. An own
kernel is taken where its time is more than 4 % below the other's.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

if "--quick" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch
import torch.nn.functional as F
from machine import machine
from report import command_line, table, write_json
from rich.console import Console
from rich.progress import Progress
from timing import Call, Clock, DryClock, GraphClock, median
from torch import Tensor

from quire.kernels.add_rmsnorm import add_rmsnorm
from quire.kernels.launching import DEFAULT_LIMITS, chosen_for, device_limits
from quire.kernels.silu_mul import silu_mul
from quire.kernels.skinny_linear import SkinnyWorkspace, skinny_linear
from quire.kernels.skinny_tiling import Tiling, candidates
from quire.worker.fusion.product_table import (
    ROW_COUNTS,
    TABLE_FILE,
    ProductKey,
    ProductKind,
    TableEntry,
    read_table,
    write_table,
)

LEAST_WEIGHTS, MOST_WEIGHTS = 8, 64
OUTRUN_BYTES = 180 << 20
"""Three times the L2 cache of an H200."""
LEAST_GAIN = 0.04
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes that products of a layer follow from."""

    name: str
    hidden: int
    qkv: int
    attention: int
    intermediate: int

    def products(self) -> Iterator[tuple[ProductKind, int, int]]:
        """Kinds, outputs and inputs, in an order in which each comes behind those it is compared with."""
        for kind in (ProductKind.PLAIN, ProductKind.NORM):
            yield kind, self.qkv, self.hidden
        for kind in (ProductKind.GATED, ProductKind.NORM_GATED):
            yield kind, self.intermediate, self.hidden
        for inputs in (self.attention, self.intermediate):
            yield ProductKind.PLAIN, self.hidden, inputs
            yield ProductKind.RESIDUAL, self.hidden, inputs


MODELS = (
    Model("Qwen3 0.6B", hidden=1024, qkv=4096, attention=2048, intermediate=3072),
    Model("Llama 3.2 1B", hidden=2048, qkv=3072, attention=2048, intermediate=8192),
    Model("Qwen3 1.7B", hidden=2048, qkv=4096, attention=2048, intermediate=6144),
    Model("Llama 3.1 8B", hidden=4096, qkv=6144, attention=4096, intermediate=14336),
)
QUICK_MODELS = (Model("tiny", hidden=32, qkv=48, attention=32, intermediate=40),)
QUICK_ROWS = (1, 16)


@dataclass(frozen=True, slots=True)
class Measured:
    """One product with these rows: the medians of the library and of each own tiling, µs a call."""

    key: ProductKey
    library_us: float
    own_us: dict[Tiling, float]

    @property
    def best(self) -> tuple[Tiling, float] | None:
        """The fastest own tiling."""
        return min(self.own_us.items(), key=lambda each: each[1], default=None)

    @property
    def winner(self) -> TableEntry | None:
        """The entry of the table, if an own kernel is faster by more than LEAST_GAIN."""
        if self.best is None or self.best[1] >= (1 - LEAST_GAIN) * self.library_us:
            return None
        tiling, own_us = self.best
        return TableEntry(self.key, tiling._asdict(), own_us=own_us, library_us=self.library_us)

    def as_json(self) -> dict[str, Any]:
        own = [{"tiling": tiling._asdict(), "taken_us": taken} for tiling, taken in self.own_us.items()]
        return {
            **self.key._asdict(),
            "library_us": self.library_us,
            "own_us": self.best and self.best[1],
            "own": own,
            "is_own_faster": bool(self.winner),
        }


class Layer:
    """The tensors of one product, and calls of it: one for each of the weights that take turns."""

    def __init__(self, key: ProductKey, device: torch.device, workspace: SkinnyWorkspace, *, outrun_bytes: int) -> None:
        self.key = key
        self._workspace = workspace
        dtype = getattr(torch, key.dtype)
        rows = key.num_outputs * (2 if key.kind.is_gated else 1)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(dtype)

        self.x = random(key.num_rows, key.num_inputs)
        self.norm = random(key.num_inputs)
        self.norm_behind = random(key.num_outputs)
        self.residual = random(key.num_rows, key.num_outputs)
        num_bytes = rows * key.num_inputs * dtype.itemsize
        count = min(MOST_WEIGHTS, max(LEAST_WEIGHTS, math.ceil(outrun_bytes / num_bytes))) if outrun_bytes else 1
        self.weights = [random(rows, key.num_inputs) * key.num_inputs**-0.5 for _ in range(count)]

    def calls(self, tiling: Tiling | None, *, plain: Tiling | None) -> list[Call]:
        """With the own kernel of this tiling, or as a step would launch it without: then `plain` is that kernel's."""
        return [self._call(weight, tiling, plain) for weight in self.weights]

    def _call(self, weight: Tensor, tiling: Tiling | None, plain: Tiling | None) -> Call:
        kind, x = self.key.kind, self.x
        if tiling is None:
            return self._apart(weight, plain)
        options: dict[str, Any] = {"norm_weight": self.norm, "eps": EPS} if kind.has_norm else {}
        if kind is not ProductKind.RESIDUAL:
            return lambda: self._own(x, weight, tiling, gated=kind.is_gated, **options)

        def add_and_norm() -> None:
            total = self._own(x, weight, tiling, residual=self.residual, out=self.residual)
            add_rmsnorm(total, self.norm_behind, eps=EPS)

        return add_and_norm

    def _apart(self, weight: Tensor, plain: Tiling | None) -> Call:
        kind, x = self.key.kind, self.x

        def run(rows: Tensor) -> Tensor:
            if plain is not None:
                return self._own(rows, weight, plain, gated=kind.is_gated)
            result = F.linear(rows, weight)
            return silu_mul(*result.chunk(2, -1)) if kind.is_gated else result

        if kind.has_norm:
            return lambda: run(add_rmsnorm(x, self.norm, eps=EPS))
        if kind is ProductKind.RESIDUAL:
            return lambda: add_rmsnorm(run(x), self.norm_behind, eps=EPS, residual=self.residual)
        return lambda: run(x)

    def _own(self, x: Tensor, weight: Tensor, tiling: Tiling, **options: Any) -> Tensor:
        return skinny_linear(x, weight, form=tiling.form, tiling=tiling, workspace=self._workspace, **options)


class Run:
    """Measures one product after the other."""

    def __init__(self, device: torch.device) -> None:
        is_dry = device.type == "cpu"
        self._clock: Clock = DryClock() if is_dry else GraphClock()
        self._outrun_bytes = 0 if is_dry else OUTRUN_BYTES
        self._device = device
        self._workspace = SkinnyWorkspace.allocate(device)
        self.measured: dict[ProductKey, Measured] = {}

    def measure(self, key: ProductKey) -> Measured:
        """Time the product in the library and in each candidate."""
        layer = Layer(key, self._device, self._workspace, outrun_bytes=self._outrun_bytes)
        library_us = median(self._clock.measure(layer.calls(None, plain=self._plain(key))))
        own_us = {tiling: median(self._clock.measure(layer.calls(tiling, plain=None))) for tiling in self._tilings(key)}
        found = Measured(key, library_us, own_us)
        self.measured[key] = found
        return found

    def _plain(self, key: ProductKey) -> Tiling | None:
        """The tiling of the same product without a norm, if that was faster than the library."""
        apart = {ProductKind.NORM: ProductKind.PLAIN, ProductKind.NORM_GATED: ProductKind.GATED}.get(key.kind)
        before = None if apart is None else self.measured.get(key._replace(kind=apart))
        if before is None or before.winner is None or before.best is None:
            return None
        return before.best[0]

    def _tilings(self, key: ProductKey) -> Iterator[Tiling]:
        itemsize = getattr(torch, key.dtype).itemsize
        for tiling in candidates(
            num_rows=key.num_rows,
            num_outputs=key.num_outputs,
            num_inputs=key.num_inputs,
            itemsize=itemsize,
            gated=key.kind.is_gated,
            limits=device_limits(self._device),
        ):
            if tiling.form == "gemv" or not key.kind.has_norm:
                yield tiling


def keys(models: Sequence[Model], rows: Sequence[int], dtype: str) -> list[ProductKey]:
    """Every product once."""
    found = (
        ProductKey(kind, num_outputs, num_inputs, dtype, num_rows)
        for num_rows in rows
        for model in models
        for kind, num_outputs, num_inputs in model.products()
    )
    return list(dict.fromkeys(found))


def gpu_items(given: Mapping[str, Any]) -> dict[str, list[dict[str, str]]]:
    """Return what lists of the JSON have on a GPU with these parameters: the fields that name each item."""
    chosen = keys(MODELS, given["rows"] or ROW_COUNTS, "bfloat16")
    return {"products": [{name: str(value) for name, value in key._asdict().items()} for key in chosen]}


def show(measured: Sequence[Measured]) -> None:
    shown = table(
        "products: µs a call, medians", *("kind", "N x K", "rows", "library", "own", "gain", "tiling"), words=2
    )
    for each in measured:
        key, best = each.key, each.best
        own = (
            ("–", "–", "–")
            if best is None
            else (f"{best[1]:.1f}", f"{1 - best[1] / each.library_us:.0%}", _brief(best[0]))
        )
        sizes = f"{key.num_outputs} x {key.num_inputs}"
        shown.add_row(key.kind, sizes, str(key.num_rows), f"{each.library_us:.1f}", *own)
    Console(width=max(Console().width, 110)).print(shown)


def _brief(tiling: Tiling) -> str:
    split = f", in {tiling.split} parts" if tiling.split > 1 else ""
    return f"{tiling.form} {tiling.block_outputs} x {tiling.block_inputs}{split}"


@click.command(help=__doc__.partition("\n")[0] if __doc__ else None)
@click.option("--quick", "dry", is_flag=True, help="On a CPU, tiny, in Triton's interpreter: whether everything runs.")
@click.option(
    "--rows", type=click.IntRange(1, 128), multiple=True, help="Rows to measure; all of the table's by default."
)
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Folder for the JSON.")
@click.option(
    "--write-table",
    "table_file",
    is_flag=False,
    flag_value=TABLE_FILE,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the own kernels that are faster into this file, or into the worker's table.",
)
def main(dry: bool, rows: tuple[int, ...], output: Path | None, table_file: Path | None) -> None:
    """Measures, shows, and writes the results."""
    if not dry and not torch.cuda.is_available():
        raise click.UsageError("there is no GPU here; --quick shows whether everything runs")
    for count in rows:
        if count not in ROW_COUNTS:
            raise click.UsageError(f"--rows {count}: the table has {', '.join(map(str, ROW_COUNTS))}")
    if dry and table_file == TABLE_FILE:
        raise click.UsageError("--quick measures nothing that the worker's table could have: give another file")
    device = torch.device("cpu" if dry else "cuda")
    # In the interpreter each program takes its time.
    few = chosen_for(replace(DEFAULT_LIMITS, num_multiprocessors=2)) if dry else nullcontext()
    chosen = keys(QUICK_MODELS, QUICK_ROWS, "float32") if dry else keys(MODELS, rows or ROW_COUNTS, "bfloat16")
    with few, Progress(console=Console(stderr=True)) as progress, torch.inference_mode():
        run = Run(device)
        for key in progress.track(chosen, description="products"):
            run.measure(key)
    measured = list(run.measured.values())
    show(measured)
    name = "no GPU" if dry else torch.cuda.get_device_name(device)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        about = {"command": command_line("kernels products", sys.argv[1:]), "dry": dry, "gpu": name}
        results = {**about, "machine": machine("torch", "triton"), "products": [each.as_json() for each in measured]}
        write_json(results, output / "products.json")
    if table_file is not None:
        save(measured, name, table_file)


def save(measured: Sequence[Measured], name: str, path: Path) -> None:
    """Replace what the table has of the products measured; others of this GPU stay."""
    kept = read_table(name, path) if path.exists() else {}
    entries = {key: entry for key, entry in kept.items() if key not in {each.key for each in measured}}
    entries |= {entry.key: entry for each in measured if (entry := each.winner) is not None}
    write_table(name, list(entries.values()), path)


if __name__ == "__main__":
    main()
