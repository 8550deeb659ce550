"""The results as tables, as JSON and as figures."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import torch
from attention import Measured
from elementwise import Timing
from grids import LLAMA, TO_REACH_US
from machine import machine
from matplotlib import pyplot
from report import save_svg, summary, write_json
from rich.console import Console
from rich.table import Table
from timing import median

matplotlib.use("svg")

OURS = "Quire"
PANELS_IN_A_ROW = 4


@dataclass(slots=True)
class Results:
    """Everything measured in one run."""

    command: str
    dry: bool
    ceilings: dict[str, list[float]] = field(default_factory=dict)
    decode: list[Measured] = field(default_factory=list)
    prefill: list[Measured] = field(default_factory=list)
    elementwise: list[Timing] = field(default_factory=list)
    variants: list[Measured] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """Cells that did not fit the memory or the time."""

    def as_json(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "dry": self.dry,
            "machine": machine("torch", "triton", "numpy") | gpu(),
            "ceilings": {name: summary(samples) for name, samples in self.ceilings.items()},
            "absent": self.absent,
            "left_out": self.left_out,
            "decode": [each.as_json() for each in self.decode],
            "prefill": [each.as_json() for each in self.prefill],
            "elementwise": [each.as_json() for each in self.elementwise],
            "variants": [each.as_json() for each in self.variants],
        }

    def ceiling_gb_s(self, name: str) -> float:
        return median(self.ceilings[name])


def gpu() -> dict[str, str | int]:
    if not torch.cuda.is_available():
        return {"gpu": "none"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda or "none",
    }


def show(results: Results) -> None:
    """Tables, then the missing peers."""
    console = Console(width=max(Console().width, 150))
    if results.dry:
        console.print("dry run on tiny sizes: it shows that everything runs, and no figure means anything")
    if results.ceilings:
        console.print(
            f"copy {results.ceiling_gb_s('copy_gb_s'):,.0f} GB/s, read {results.ceiling_gb_s('read_gb_s'):,.0f} GB/s"
        )
    for name, measured in (
        ("decode", results.decode),
        ("prefill", results.prefill),
        ("decode", [each for each in results.variants if each.cell.is_decode]),
        ("prefill", [each for each in results.variants if not each.cell.is_decode]),
    ):
        if measured:
            console.print(attention_table(name, measured, results))
    if results.elementwise:
        console.print(elementwise_table(results))
    for name, reason in sorted(results.absent.items()):
        console.print(f"{name}: absent, {reason}")
    for cell in results.left_out:
        console.print(f"left out: {cell}")


def attention_table(name: str, cells: list[Measured], results: Results) -> Table:
    rows = sorted(
        {row for each in cells for row in (*each.samples_us, *each.unfit)}, key=lambda row: (row != OURS, row)
    )
    unit = "TB/s" if name == "decode" else "TFLOP/s"
    table = Table(title=f"{name}: µs a layer (and {unit}), medians")
    for heading in ("batch", "heads", "block", "KV", "memory"):
        table.add_column(heading, no_wrap=True)
    for heading in (*rows, "of read", "of copy", "bar, goal", "error"):
        table.add_column(heading, justify="right")
    for each in cells:
        shown = [shown_row(each, row, name) for row in rows]
        ours = each.samples_us.get(OURS)
        speed = each.cell.kv_bytes / median(ours) / 1e3 if ours else math.nan
        shares = [f"{speed / results.ceiling_gb_s(of):.2f}" for of in ("read_gb_s", "copy_gb_s")]
        about = each.cell.describe()
        table.add_row(
            *(str(about[key]) for key in ("name", "heads", "block_size", "kv_dtype", "layout")),
            *shown,
            *(shares if name == "decode" and ours else ("", "")),
            bars(each) if ours and name == "decode" else "",
            f"{each.errors[OURS]:.1e}" if OURS in each.errors else "",
        )
    return table


def shown_row(each: Measured, row: str, name: str) -> str:
    if row not in each.samples_us:
        return "–"
    taken = median(each.samples_us[row])
    speed = (each.cell.kv_bytes if name == "decode" else each.cell.flops) / taken / 1e6
    return f"{taken:,.1f} ({speed:.2f})"


def bars(each: Measured) -> str:
    """The bar and the goal of the cell, with the bar's colour by whether it was reached."""
    cell = each.cell
    about = cell.describe()
    if cell.heads != LLAMA or (about["block_size"], about["kv_dtype"], about["layout"]) != (16, "bf16", "interleaved"):
        return ""
    names = {f"{num_seqs}x{context // 1024}k": bar for (num_seqs, context), bar in TO_REACH_US.items()}
    if cell.name not in names:
        return ""
    bar, goal = names[cell.name]
    reached = median(each.samples_us[OURS])
    colour = "green" if reached <= goal else "yellow" if reached <= bar else "red"
    return f"[{colour}]{bar}, {goal}[/{colour}]"


def elementwise_table(results: Results) -> Table:
    table = Table(title="the other kernels: medians")
    for heading in ("kernel", "size"):
        table.add_column(heading)
    for heading in ("µs", "GB/s", "of copy"):
        table.add_column(heading, justify="right")
    for each in results.elementwise:
        taken = median(each.samples_us)
        speed = each.num_bytes / taken / 1e3
        table.add_row(
            each.kernel, each.size, f"{taken:,.1f}", f"{speed:,.0f}", f"{speed / results.ceiling_gb_s('copy_gb_s'):.2f}"
        )
    return table


def write(results: Results, folder: Path) -> None:
    """kernels.json with everything, and a figure where decode was measured."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(results.as_json(), folder / "kernels.json")
    if results.decode:
        plot(results, folder / "kernels_decode.svg")


def plot(results: Results, path: Path) -> None:
    """Bandwidth against context, a panel per batch size, for the first cell's heads, block size and dtype.

    Batches of mixed lengths are left out.
    """
    kind = _kind(results.decode[0])
    cells = [each for each in results.decode if _kind(each) == kind and each.cell.is_decode and _is_even(each)]
    batches = sorted({len(each.cell.seq_lens) for each in cells})
    rows = sorted({row for each in cells for row in each.samples_us}, key=lambda row: (row != OURS, row))
    num_rows = -(-len(batches) // PANELS_IN_A_ROW)
    canvas, panels = pyplot.subplots(
        num_rows,
        min(len(batches), PANELS_IN_A_ROW),
        figsize=(10, 2.6 * num_rows + 0.6),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axes in panels.flat[len(batches) :]:
        axes.set_axis_off()
    for axes, batch in zip(panels.flat, batches, strict=False):
        for row in rows:
            points = sorted(
                (sum(each.cell.seq_lens) / batch, each.cell.kv_bytes / median(each.samples_us[row]) / 1e6)
                for each in cells
                if len(each.cell.seq_lens) == batch and row in each.samples_us
            )
            axes.plot(*zip(*points, strict=True) if points else ((), ()), marker="o", markersize=3, label=row)
        for name, style in (("read", ":"), ("copy", "--")):
            axes.axhline(results.ceiling_gb_s(f"{name}_gb_s") / 1e3, color="grey", linestyle=style, label=name)
        axes.set_xscale("log", base=2)
        axes.set_title(f"batch {batch}", fontsize=9)
        axes.set_xlabel("tokens a sequence, mean", fontsize=8)
        axes.tick_params(labelbottom=True)
        axes.grid(linewidth=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    canvas.supylabel("TB/s of keys and values", fontsize=9)
    canvas.legend(*panels.flat[0].get_legend_handles_labels(), loc="lower right", fontsize=8)
    canvas.suptitle(f"paged decode, {', '.join(map(str, kind))}, {gpu()['gpu']}", fontsize=10)
    save_svg(canvas, path)
    pyplot.close(canvas)


def _is_even(each: Measured) -> bool:
    return max(each.cell.seq_lens) < 2 * min(each.cell.seq_lens)


def _kind(each: Measured) -> tuple[object, ...]:
    about = each.cell.describe()
    return tuple(about[key] for key in ("heads", "block_size", "kv_dtype", "layout"))
