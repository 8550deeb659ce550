"""`quire demo`: both services, prompts that share a system prompt, and the blocks that the cache saved.

    start        cachemgr and worker as processes on unix sockets
    generate     all prompts at once; meanwhile cachemgr is asked for the state of its pool, and the fullest one is kept
    report       every number is an answer of the services

In any case LocalServices ends both processes and removes their folder.
"""

import asyncio
import contextlib
import errno
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from quire.cache.v1 import cache_service_pb2
from quire.cli.launch import LocalServices
from quire.cli.render import (
    Row,
    counted,
    format_ratio,
    map_panel,
    memory_table,
    number_table,
    printable,
    text_tail,
)
from quire.cli.signals import ending_on, run_until_signal
from quire.cli.snapshot import Snapshot, ratio, take_snapshot
from quire.cli.starting import check_alive, started
from quire.cli.up import curl_command
from quire.client.cache_client import CacheClient
from quire.client.engine.engine import Engine
from quire.client.engine.outputs import Chunk
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.scheduling.sequence import FinishReason
from quire.client.errors import QuireError
from quire.serving.addresses import DEFAULT_HTTP_LISTEN

TEMPERATURE = 0.7
TOP_K = 40
DEFAULT_REPETITION_PENALTY = 1.15

_CHECKOUT = Path(__file__).resolve().parents[3]
_MODEL = "deploy/demo/model"
_PROMPTS = "deploy/demo/prompts.json"
_LOOK_INTERVAL_S = 0.01
_QUIET_TIMEOUT_S = 5.0
_MIN_LIVE_WIDTH = 38
_MIN_TEXT_WIDTH = 76
_FRAME_WIDTH = 6  # of a panel and a sample's number
_MAX_TEXT_LINES = 100
_SAMPLE_STYLES = ("cyan", "yellow", "green", "magenta")
NOTHING_LEFT = "Interrupted. Both services have ended, nothing is left behind."


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The flags of `quire demo`; model and prompts None: those of the checkout."""

    model: str | None
    prompts: Path | None
    num_samples: int
    max_tokens: int
    num_blocks: int
    seed: int


@dataclass(frozen=True, slots=True)
class Prompts:
    """Return the prompts of the file, each after the one system prompt."""

    system: str
    join: str
    prompts: tuple[str, ...]
    repetition_penalty: float

    def full(self, index: int) -> str:
        """Return the text that is sent for a prompt."""
        return self.system + self.join + self.prompts[index]


class DemoConsole(Console):
    """A console with a reader that may end: then printing raises BrokenPipeError, which click handles."""

    def on_broken_pipe(self) -> None:
        """Instead of SystemExit, which must not come out of a task."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def run_demo(options: DemoOptions, console: Console | None = None) -> tuple["DemoRun", "SampleGrid"]:
    """Run and print the whole demo. Returns its results.

    Raises click.ClickException, QuireError; KeyboardInterrupt with a last line for the user.
    """
    model = options.model or str(_shipped(_MODEL, "--model"))
    prompts = read_prompts(options.prompts or _shipped(_PROMPTS, "--prompts"))
    console = console or DemoConsole(highlight=False)
    services = LocalServices(model=model, num_blocks=options.num_blocks)
    try:
        with ending_on(signal.SIGHUP):
            shown = _run(console, services, options, prompts, model)
    except KeyboardInterrupt:
        services.stop()  # the signal may have come just before that began
        raise KeyboardInterrupt(NOTHING_LEFT) from None
    console.print("Both services have ended. [bold]quire up PATH_OR_HUB_ID[/] keeps them running. Then:")
    console.print(Text(f"\n  {curl_command(f'http://{DEFAULT_HTTP_LISTEN}')}"), soft_wrap=True)
    return shown


def _run(
    console: Console, services: LocalServices, options: DemoOptions, prompts: Prompts, model: str
) -> tuple["DemoRun", "SampleGrid"]:
    begun = time.monotonic()
    with started(services, console, model=model):
        console.print(_describe_start(services, time.monotonic() - begun), soft_wrap=True)
        show_prompts(console, prompts, options.num_samples)
        samples = SampleGrid(prompts.prompts, options.num_samples, options.max_tokens)
        try:
            run = run_until_signal(_generate(services, console, options, prompts, samples))
        except Exception as error:
            first = _first_of(error)
            if isinstance(first, QuireError):
                check_alive(services, grace_s=0.5)  # that is the reason then, and the error a consequence
            raise first from None
        console.print(report(run, samples))
        return run, samples


def _first_of(error: Exception) -> Exception:
    """Return the first error of several tasks: the others follow from it."""
    return _first_of(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error


def _shipped(name: str, flag: str) -> Path:
    """A file of the checkout: of this package's, or of the working directory."""
    for root in (_CHECKOUT, Path.cwd()):
        if (root / name).exists():
            return root / name
    raise click.ClickException(f"there is no {name} in {_CHECKOUT}: run the demo in a checkout, or give {flag}.")


def read_prompts(path: Path) -> Prompts:
    """Reads a prompts file. Raises click.ClickException if it is none."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        system, join, prompts = content["system"], content["join"], content["prompts"]
        penalty = float(content.get("repetition_penalty", DEFAULT_REPETITION_PENALTY))
        if not prompts or not all(isinstance(text, str) for text in (system, join, *prompts)):
            raise ValueError("every part is a text, and there is at least one prompt")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise click.ClickException(f"{path} is no file of prompts: {error!r}") from error
    return Prompts(system, join, tuple(prompts), penalty)


def _describe_start(services: LocalServices, seconds: float) -> Text:
    return Text.assemble(
        ("cachemgr", "bold"),
        f" (pid {services.cachemgr.pid}) and ",
        ("worker", "bold"),
        f" (pid {services.worker.pid}) serve on unix sockets in {services.runtime_dir}, after {seconds:.1f} s",
    )


def show_prompts(console: Console, prompts: Prompts, num_samples: int) -> None:
    """Show the system prompt, and the requests to come."""
    title = f"{len(prompts.prompts)} prompts share this beginning, {counted(num_samples, 'sample')} of each"
    text = Text(printable(prompts.system).strip(), style="dim")
    console.print(Panel(text, title=title, title_align="left", border_style="dim", box=box.ROUNDED))


# Generating, and looking at the pool meanwhile.


@dataclass(slots=True)
class SampleText:
    """A sample while it grows."""

    text: str = ""
    num_tokens: int = 0
    finish_reason: FinishReason | None = None


class SampleGrid:
    """All samples of all prompts while they grow; draws the end of each, as much as the terminal has room for."""

    def __init__(self, prompts: Sequence[str], num_samples: int, max_tokens: int) -> None:
        """max_tokens is the most tokens of a sample."""
        self.prompts = prompts
        self.samples = [[SampleText() for _ in range(num_samples)] for _ in prompts]
        self._max_tokens = max_tokens

    @property
    def all(self) -> list[SampleText]:
        """Every sample, by prompt."""
        return [sample for row in self.samples for sample in row]

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(sample.num_tokens for sample in self.all)

    @property
    def num_ended(self) -> int:
        """Samples that have ended."""
        return sum(sample.finish_reason is not None for sample in self.all)

    def add(self, prompt_index: int, chunk: Chunk) -> SampleText:
        """Add the new content of a sample; returns it."""
        sample = self.samples[prompt_index][chunk.index]
        sample.text += chunk.text
        sample.num_tokens += len(chunk.token_ids)
        sample.finish_reason = chunk.finish_reason
        return sample

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._progress(options.max_width)
        num_columns = _num_columns(len(self.prompts), options.max_width, _MIN_LIVE_WIDTH, most=4)
        num_rows = -(-len(self.prompts) // num_columns)
        num_lines = ((options.height or console.size.height) - 2) // num_rows - 2
        yield self._panels(options.max_width, num_columns, max(1, num_lines // len(self.samples[0])))

    def whole(self, width: int) -> RenderableType:
        """All texts to their last word."""
        return self._panels(width, _num_columns(len(self.prompts), width, _MIN_TEXT_WIDTH, most=2), _MAX_TEXT_LINES)

    def _panels(self, width: int, num_columns: int, num_lines: int) -> Table:
        """A panel per prompt, at most num_lines of each sample, those beside each other equally high."""
        text_width = width // num_columns - _FRAME_WIDTH
        tails = [
            [text_tail(_without_gaps(sample.text), width=text_width, num_lines=num_lines) for sample in row]
            for row in self.samples
        ]
        heights = [sum(tail.count("\n") + 1 for tail in row) for row in tails]
        panels = []
        for index, row in enumerate(tails):
            start = index - index % num_columns
            panels.append(self._panel(index, row, height=2 + max(heights[start : start + num_columns])))
        return _grid(panels, num_columns)

    def _progress(self, width: int) -> RenderableType:
        ended, count = self.num_ended, len(self.all)
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(no_wrap=True)
        table.add_column(ratio=1)
        bar = ProgressBar(total=count * self._max_tokens, completed=self._completed_tokens(), width=min(60, width // 3))
        table.add_row(f"{ended} of {counted(count, 'sample')} done, {counted(self.num_tokens, 'token')}", bar)
        return table

    def _completed_tokens(self) -> int:
        """A sample that ended early counts as full."""
        return sum(self._max_tokens if sample.finish_reason else sample.num_tokens for sample in self.all)

    def _panel(self, index: int, texts: Sequence[str], *, height: int) -> Panel:
        table = Table.grid(padding=(0, 1))
        for number, text in enumerate(texts):
            style = _SAMPLE_STYLES[number % len(_SAMPLE_STYLES)]
            table.add_row(Text(str(number + 1), style=f"bold {style}"), Text(text))
        has_ended = all(sample.finish_reason for sample in self.samples[index])
        title = Text(printable(self.prompts[index]), style="bold")
        border = "green" if has_ended else "dim"
        return Panel(table, title=title, title_align="left", border_style=border, box=box.ROUNDED, height=height)


def _without_gaps(text: str) -> str:
    """The text without empty lines: there are many samples to show."""
    return "\n".join(line for line in text.strip().splitlines() if line.strip())


def _num_columns(num_panels: int, width: int, min_width: int, *, most: int) -> int:
    return max(1, min(most, num_panels, width // min_width))


def _grid(panels: Sequence[RenderableType], num_columns: int) -> Table:
    grid = Table.grid(expand=True)
    for _ in range(num_columns):
        grid.add_column(ratio=1)
    for start in range(0, len(panels), num_columns):
        grid.add_row(*panels[start : start + num_columns])
    return grid


@dataclass(frozen=True, slots=True)
class DemoRun:
    """The results of a run.

    fullest     the moment of most sequences; of these, the complete one with the most tokens
    final       after the release of all blocks
    audit       violations that cachemgr found in its books at the end: none
    generate_s  from the first prompt sent to the last token
    """

    fullest: Snapshot
    final: Snapshot
    audit: cache_service_pb2.AuditPoolResponse
    generate_s: float


@dataclass(slots=True)
class _Watcher:
    """Looks at the pool again and again and keeps the fullest moment."""

    cache: CacheClient
    services: LocalServices
    fullest: Snapshot | None = None

    async def watch(self) -> None:
        """Until cancelled. Raises click.ClickException once a service has died, QuireError."""
        while True:
            check_alive(self.services)
            await self.look()
            await asyncio.sleep(_LOOK_INTERVAL_S)

    async def look(self) -> None:
        """Once. The blocks are only listed if it could be the fullest moment so far."""
        (statistics,) = await self.cache.get_statistics()
        best = self.fullest
        if best is None or _may_be_fuller(statistics, best):
            seen = await take_snapshot(self.cache)
            if best is None or _fullness(seen) > _fullness(best):
                self.fullest = seen


def _may_be_fuller(statistics: cache_service_pb2.PoolStatistics, best: Snapshot) -> bool:
    if statistics.sequence_count != best.statistics.sequence_count:
        return statistics.sequence_count > best.statistics.sequence_count
    return not best.is_consistent or statistics.held_token_count > best.statistics.held_token_count


def _fullness(snapshot: Snapshot) -> tuple[int, bool, int]:
    statistics = snapshot.statistics
    return statistics.sequence_count, snapshot.is_consistent, statistics.held_token_count


async def _generate(
    services: LocalServices, console: Console, options: DemoOptions, prompts: Prompts, samples: SampleGrid
) -> DemoRun:
    cache = CacheClient(services.cachemgr_address)
    try:
        watcher = _Watcher(cache, services)
        async with Engine.connect(services.cachemgr_address) as engine:
            begun = time.monotonic()
            with _shown_live(console, samples):
                await _generate_all(engine, console, options, prompts, samples, watcher)
            generate_s = time.monotonic() - begun
            final = await _when_quiet(cache)
        audit = await cache.audit_pool()
        return DemoRun(watcher.fullest or final, final, audit, generate_s)
    finally:
        await cache.close()


@contextlib.contextmanager
def _shown_live(console: Console, samples: SampleGrid) -> Iterator[None]:
    if not console.is_terminal:
        yield
        return
    with Live(samples, console=console, refresh_per_second=8, transient=True, vertical_overflow="crop"):
        yield
    console.print(samples.whole(console.width))


async def _generate_all(
    engine: Engine,
    console: Console,
    options: DemoOptions,
    prompts: Prompts,
    samples: SampleGrid,
    watcher: _Watcher,
) -> None:
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watcher.watch())
        requests = [
            group.create_task(
                _generate_one(engine, console, prompts.full(index), _params(options, prompts, index), samples, index)
            )
            for index in range(len(prompts.prompts))
        ]
        await asyncio.wait(requests)
        watching.cancel()


def _params(options: DemoOptions, prompts: Prompts, index: int) -> SamplingParams:
    return SamplingParams(
        n=options.num_samples,
        max_tokens=options.max_tokens,
        temperature=TEMPERATURE,
        top_k=TOP_K,
        repetition_penalty=prompts.repetition_penalty,
        seed=options.seed + index * options.num_samples,  # sample i of a prompt has its seed + i
    )


async def _generate_one(
    engine: Engine, console: Console, prompt: str, params: SamplingParams, samples: SampleGrid, index: int
) -> None:
    async with contextlib.aclosing(engine.generate(prompt, params)) as chunks:
        async for chunk in chunks:
            sample = samples.add(index, chunk)
            if chunk.finish_reason is not None and not console.is_terminal:
                console.print(_plain_line(samples, index, chunk.index, sample), soft_wrap=True)


def _plain_line(samples: SampleGrid, prompt_index: int, sample_index: int, sample: SampleText) -> Text:
    text = " ".join(printable(sample.text).split())
    return Text(f"[{samples.num_ended}/{len(samples.all)}] {samples.prompts[prompt_index]} ({sample_index + 1}) {text}")


async def _when_quiet(cache: CacheClient) -> Snapshot:
    """The pool once every sequence is released and no step could touch its blocks any more; or as it is after 5 s."""
    deadline = time.monotonic() + _QUIET_TIMEOUT_S
    while True:
        seen = await take_snapshot(cache)
        counts = seen.statistics.block_counts
        if not (counts.active_count or counts.retired_count) or time.monotonic() > deadline:
            return seen
        await asyncio.sleep(_LOOK_INTERVAL_S)


# The use of the cache.


def report(run: DemoRun, samples: SampleGrid) -> RenderableType:
    """The blocks by state, the cache's numbers, the memory."""
    num_sequences = run.fullest.statistics.sequence_count
    fullest = map_panel(run.fullest, f"The pool's blocks while {counted(num_sequences, 'sequence')} ran")
    final = map_panel(run.final, "At the end: no block is held, and the computed blocks are cached")
    return Group(_SideBySide(fullest, final), Text(), _cache_table(run, samples), Text(), memory_table(run.fullest))


class _SideBySide:
    """Two panels beside each other if there is room, else one below the other."""

    def __init__(self, first: RenderableType, second: RenderableType) -> None:
        self._panels = [first, second]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _grid(self._panels, _num_columns(2, options.max_width, _MIN_TEXT_WIDTH, most=2))


def _cache_table(run: DemoRun, samples: SampleGrid) -> Table:
    final, fullest = run.final.statistics, run.fullest.statistics
    rate = ratio(samples.num_tokens, run.generate_s) or 0.0
    rows: list[Row] = [
        ("prompt tokens admitted", f"{final.admitted_token_count:,}"),
        ("of which found in the cache", _with_ratio(final.cached_token_count, run.final.hit_ratio)),
        ("samples forked from another", f"{final.fork_count:,}"),
        ("blocks shared while most sequences ran", _sharing(fullest)),
        ("blocks copied before a write", f"{final.copied_block_count:,}"),
        ("tokens generated", f"{samples.num_tokens:,} in {run.generate_s:.1f} s, {rate:,.0f} per second"),
        ("ownership audit at the end", _audit(run.audit)),
    ]
    return number_table("Prefix cache", rows, justify="left")


def _with_ratio(count: int, of_all: float | None) -> str:
    return f"{count:,} ({format_ratio(of_all)})"


def _sharing(statistics: cache_service_pb2.PoolStatistics) -> str:
    active = statistics.block_counts.active_count
    return f"{statistics.shared_block_count:,} ({statistics.table_entry_count:,} table entries in {active:,} blocks)"


def _audit(audit: cache_service_pb2.AuditPoolResponse) -> str:
    if audit.violations:
        return f"{counted(len(audit.violations), 'violation')}: {audit.violations[0]}"
    return f"{counted(audit.block_count, 'block')}, no violation"
