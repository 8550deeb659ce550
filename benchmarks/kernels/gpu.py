"""Quire's kernels on a GPU: decode and prompts beside other engines' kernels, and the small kernels.

    quire bench kernels gpu                     decode, prompts and the small kernels
    quire bench kernels gpu --grid decode       bandwidth by batch and context
    quire bench kernels gpu --grid variants     ours beside its own choices that no GPU has judged
    quire bench kernels gpu --quick             all of it on a CPU, tiny, interpreted

Every figure is a median of replays of a CUDA graph, over layers that together are three times the L2 cache. The
memory's rate is measured in the same run: a copy, and reading alone. Peers that are not there are named.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

if "--quick" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import elementwise
import tables
import torch
from attention import fits, measure, present
from grids import decode_cells, dry_cells, prefill_cells, variant_cells
from ours import VARIANTS, Naive, Quire
from peers import DenseSdpa, FlashInfer, VllmTriton
from report import command_line
from rich.console import Console
from rich.progress import Progress
from timing import Clock, DryClock, GraphClock, ceilings

from quire.kernels.dependent_launch import IS_DEFAULT, use_dependent_launches

CELLS = {"decode": decode_cells, "prefill": prefill_cells, "variants": variant_cells}
GRIDS = ("decode", "prefill", "elementwise", "variants")
CEILING_BYTES = 4 << 30
DRY_CEILING_BYTES = 1 << 18

ROWS = (
    Quire(),
    Naive(),
    FlashInfer(use_tensor_cores=True),
    FlashInfer(use_tensor_cores=False),
    VllmTriton(),
    DenseSdpa(),
)


class Run:
    """One run: its results so far, and the time limit of a grid."""

    def __init__(self, results: tables.Results, device: torch.device, minutes: float, progress: Progress) -> None:
        self.results = results
        self.device = device
        self.clock: Clock = DryClock() if results.dry else GraphClock()
        self._minutes = minutes
        self._progress = progress

    def measure_ceilings(self) -> None:
        num_bytes = DRY_CEILING_BYTES if self.results.dry else CEILING_BYTES
        self.results.ceilings = ceilings(self.clock, self.device, num_bytes=num_bytes)

    def measure_attention(self, grid: str) -> None:
        """Every cell of the grid that fits and is reached in time."""
        rows = list(VARIANTS) if grid == "variants" else present(ROWS, self.results.absent)
        if self.results.dry:
            cells = list(dry_cells(grid))
        else:
            cells = list(CELLS[grid]())
        deadline = time.monotonic() + self._minutes * 60
        target = {
            "decode": self.results.decode,
            "prefill": self.results.prefill,
            "variants": self.results.variants,
        }[grid]
        task = self._progress.add_task(grid, total=len(cells))
        for cell in cells:
            about = " ".join(str(value) for value in list(cell.describe().values())[:6])
            self._progress.update(task, description=f"{grid}: {about}")
            if not fits(cell, self.device):
                self.results.left_out.append(f"{grid} {about}: memory")
            elif time.monotonic() > deadline:
                self.results.left_out.append(f"{grid} {about}: time")
            else:
                target.append(measure(cell, rows, self.clock, self.device))
            self._progress.advance(task)

    def measure_elementwise(self) -> None:
        jobs = elementwise.jobs(self.device, dry=self.results.dry)
        for job in self._progress.track(jobs, description="elementwise"):
            self.results.elementwise.append(job.measure(self.clock))


def gpu_items(given: Mapping[str, Any]) -> dict[str, list[dict[str, str]]]:
    """Return what lists of the JSON have on a GPU with these parameters: the fields that name each item."""
    chosen = CELLS if given["grid"] == "all" else {grid: CELLS[grid] for grid in CELLS if grid == given["grid"]}
    return {
        grid: [{name: str(value) for name, value in cell.describe().items()} for cell in cells()]
        for grid, cells in chosen.items()
    }


@click.command(help=__doc__.partition("\n")[0] if __doc__ else None)
@click.option("--grid", type=click.Choice((*GRIDS, "all")), default="all", show_default=True, help="What is measured.")
@click.option("--minutes", default=9.0, show_default=True, help="For each attention grid: no further cell then.")
@click.option("--quick", "dry", is_flag=True, help="On a CPU, tiny, in Triton's interpreter: whether everything runs.")
@click.option(
    "--dependent-launch/--no-dependent-launch",
    default=IS_DEFAULT,
    show_default=True,
    help="Start kernels while those in front of them still run.",
)
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Folder for the JSON and the figure.")
def main(grid: str, minutes: float, dry: bool, dependent_launch: bool, output: Path | None) -> None:
    """Measures, shows, and writes the results."""
    use_dependent_launches(dependent_launch)
    if not dry and not torch.cuda.is_available():
        raise click.UsageError("there is no GPU here; --quick shows whether everything runs")
    results = tables.Results(command=command_line("kernels gpu", sys.argv[1:]), dry=dry)
    grids = GRIDS if grid == "all" else (grid,)
    with Progress(console=Console(stderr=True)) as progress, torch.inference_mode():
        run = Run(results, torch.device("cpu" if dry else "cuda"), minutes, progress)
        run.measure_ceilings()
        if "elementwise" in grids:
            run.measure_elementwise()
        for each in ("decode", "prefill", "variants"):
            if each in grids:
                run.measure_attention(each)
    tables.show(results)
    if output is not None:
        tables.write(results, output)


if __name__ == "__main__":
    main()
