"""The cost of cachemgr's core beside the block managers of vLLM, SGLang, transformers and TokenSpeed, in process.

    quire bench allocator                       all rows at 1,000, 100,000 and a million blocks, and metadata
    quire bench allocator --peers               all rows, after making the peers' environments
    quire bench allocator --scaling             cost against pool size, leases, sequences, cached chains
    quire bench allocator --mixed 10            ten minutes of mixed load: the worst single call
    quire bench allocator --quick               everything of ours once and small, in seconds

Every row is defined where it is measured: the work in workload.Rows, its timed part in core.Core and in each peer's
driver. Block size 16. A peer that can't run here is shown by its recorded figures, if there are some, times this
machine's slowness by a fixed loop.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import click
import mixed
import own_rows
import peer_runs
import scaling
import tables
from core import Crowd
from recorded import PEERS, SIZES
from report import command_line
from rich.console import Console
from rich.progress import Progress
from workload import calibrate, settle_garbage

try:
    from quire.serving.runtime import tune_garbage_collector
except ImportError:  # does the same
    tune_garbage_collector = settle_garbage

DEFAULT_SIZES = (1_000, 100_000, 1_000_000)
QUICK_SIZES = (1_000,)
QUICK_CROWD = Crowd(num_leases=2, num_sequences=2, num_chains=2)
MIXED_BLOCKS = 1_000_000
NOT_PACKAGED = "nano-vllm"
KEPT_TOKENS_REPEATS = 1_000


def measure_rows(results: tables.Results, sizes: tuple[int, ...], repeats: int, progress: Progress) -> None:
    """Quire's rows at every pool size."""
    task = progress.add_task("Quire", total=len(sizes))
    for size in sizes:
        progress.update(task, description=f"Quire, {size:,} blocks")
        note_load(results)
        results.quire[size] = own_rows.measure(size, repeats=repeats)
        progress.advance(task)


def measure_peers(
    results: tables.Results, sizes: tuple[int, ...], repeats: int, memory: int, progress: Progress, *, install: bool
) -> None:
    """The peers' rows at the same sizes, one peer after the other."""
    task = progress.add_task("peers", total=len(peer_runs.PEERS))
    for peer in peer_runs.PEERS:
        progress.update(task, description=peer)
        note_load(results)
        try:
            if install:
                peer_runs.prepare(peer)
            measured = peer_runs.run(peer, sizes=list(sizes), repeats=repeats, memory=memory)
        except peer_runs.PeerUnavailable as error:
            results.unavailable[peer] = str(error)
        else:
            results.peers[peer] = measured
            if "metadata_bytes_per_block" in measured:
                results.metadata[peer] = measured["metadata_bytes_per_block"]
        progress.advance(task)


def measure_scaling(results: tables.Results, repeats: int, progress: Progress) -> None:
    task = progress.add_task("scaling", total=scaling.num_points())
    for axis, value, num_blocks, crowd in scaling.points():
        progress.update(task, description=f"{axis}: {value:,}")
        samples = scaling.measure_point(num_blocks, crowd, repeats=repeats)
        results.scaling.setdefault(axis, {})[value] = samples
        progress.advance(task)


def measure_mixed(minutes: float, num_blocks: int, progress: Progress) -> dict[str, Any]:
    """The collector is set as the server sets it, once the pool is there."""
    task = progress.add_task("mixed load: filling the pool", total=minutes * 60)
    load = mixed.MixedLoad(num_blocks)
    tune_garbage_collector()
    before = [generation["collections"] for generation in gc.get_stats()]
    progress.update(task, description="mixed load")
    load.run(minutes * 60, lambda passed: progress.update(task, completed=passed))
    after = [generation["collections"] for generation in gc.get_stats()]
    return load.timings.summary() | {
        "minutes": minutes,
        "num_blocks": num_blocks,
        "refused": dict(load.num_refused),
        "collections": [late - early for early, late in zip(before, after, strict=True)],
    }


def note_load(results: tables.Results) -> None:
    results.load_average.append(os.getloadavg()[0])


def read_sizes(text: str) -> tuple[int, ...]:
    """Numbers of blocks, separated by commas. Raises click.BadParameter."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) >= min(DEFAULT_SIZES) for word in words):
        raise click.BadParameter(f"{text!r}: must be numbers of at least {min(DEFAULT_SIZES)}, separated by commas")
    return tuple(map(int, words))


@click.command(help=__doc__.partition("\n")[0] if __doc__ else None)
@click.option(
    "--sizes",
    default=",".join(map(str, DEFAULT_SIZES)),
    show_default=True,
    callback=lambda _context, _option, value: read_sizes(value),
    help="Blocks of the pools.",
)
@click.option("--repeats", default=50, show_default=True, type=click.IntRange(min=1), help="Samples of each row.")
@click.option("--peers", "install", is_flag=True, help="Make the peers' environments if they are not there.")
@click.option("--no-peers", is_flag=True, help="Show recorded figures for all peers.")
@click.option("--no-rows", is_flag=True, help="Only what --scaling and --mixed ask for.")
@click.option("--scaling", "with_scaling", is_flag=True, help="Also cost against what else there is.")
@click.option("--mixed", "mixed_minutes", default=0.0, metavar="MINUTES", help="Also the worst call of mixed load.")
@click.option("--quick", is_flag=True, help="Tiny, without peers: whether everything runs.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Folder for the JSON and the figure.")
def main(
    sizes: tuple[int, ...],
    repeats: int,
    install: bool,
    no_peers: bool,
    no_rows: bool,
    with_scaling: bool,
    mixed_minutes: float,
    quick: bool,
    output: Path | None,
) -> None:
    """Measures, shows, and writes the results."""
    command = command_line("allocator", sys.argv[1:])
    results = tables.Results(command=command, calibration=calibrate())
    chosen = QUICK_SIZES if quick else sizes
    repeats = 2 if quick else repeats
    with Progress(console=Console(stderr=True)) as progress:
        if not no_rows:
            measure_rows(results, chosen, repeats, progress)
            for row, keep_tokens in (("quire", True), ("quire, tokens not kept", False)):
                results.metadata[row] = own_rows.metadata_per_block(max(chosen), keep_tokens=keep_tokens)
            kept_repeats = 2 if quick else KEPT_TOKENS_REPEATS
            results.kept_tokens_ratio = own_rows.kept_tokens_ratio(min(chosen[-1], MIXED_BLOCKS), repeats=kept_repeats)
        if not no_rows and not no_peers and not quick:
            measure_peers(results, chosen, repeats, max(chosen), progress, install=install)
        if quick:
            scaling.measure_point(QUICK_SIZES[0], QUICK_CROWD, repeats=1)
        if with_scaling:
            measure_scaling(results, repeats, progress)
        if mixed_minutes or quick:
            blocks = SIZES[0] if quick else MIXED_BLOCKS
            results.mixed = measure_mixed(0.005 if quick else mixed_minutes, blocks, progress)
    for peer in set(PEERS) - results.peers.keys():
        results.unavailable.setdefault(peer, "not on the package index" if peer == NOT_PACKAGED else "not run")
    tables.show(results)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        tables.write(results, output)


if __name__ == "__main__":
    main()
