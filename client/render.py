"""What a person sees of a pool: the map of its blocks by state, and its numbers in tables. Draws, asks nobody.

Colours say what glyphs say too, so nothing is lost without them; where the terminal has ASCII only, so have the glyphs.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from rich import box
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from quire.cache.v1 import cache_service_pb2 as pb
from quire.client.snapshot import Snapshot, ratio

_CELL_WIDTH = 2
_MAX_CELLS_PER_ROW = 128
_MAX_MAP_ROWS = 16
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# Of control characters only these reach a terminal.
_HARMLESS_CONTROLS = "\n\t"


class BlockKind(IntEnum):
    """A block's state, those with several holders apart. Of two as common in a cell the higher is drawn."""

    FREE = 0
    CACHED = 1
    RETIRED = 2
    ACTIVE = 3
    SHARED = 4


@dataclass(frozen=True, slots=True)
class Look:
    """How a kind is drawn, and what it is called."""

    label: str
    glyph: str
    ascii_glyph: str
    style: str


LOOKS = {
    BlockKind.SHARED: Look("shared", "█", "#", "bright_magenta"),
    BlockKind.ACTIVE: Look("held", "█", "@", "green"),
    BlockKind.RETIRED: Look("retired", "▓", "x", "yellow"),
    BlockKind.CACHED: Look("cached", "▒", "o", "cyan"),
    BlockKind.FREE: Look("free", "·", ".", "bright_black"),
}
_KIND_OF_STATE = {
    pb.BLOCK_STATE_FREE: BlockKind.FREE,
    pb.BLOCK_STATE_CACHED: BlockKind.CACHED,
    pb.BLOCK_STATE_ACTIVE: BlockKind.ACTIVE,
    pb.BLOCK_STATE_RETIRED: BlockKind.RETIRED,
}


def kind_of(block: pb.Block) -> BlockKind:
    """How a block is drawn. Raises KeyError for a state that the contract does not have."""
    kind = _KIND_OF_STATE[block.state]
    return BlockKind.SHARED if kind is BlockKind.ACTIVE and block.reference_count > 1 else kind


def kinds_of(snapshot: Snapshot) -> list[BlockKind]:
    """The kinds of a pool's blocks by id; by state instead if they were too many to be listed."""
    if snapshot.blocks:
        return [kind_of(block) for block in snapshot.blocks]
    counts = snapshot.statistics.block_counts
    num_shared = min(snapshot.statistics.shared_block_count, counts.active_count)
    return [
        *[BlockKind.SHARED] * num_shared,
        *[BlockKind.ACTIVE] * (counts.active_count - num_shared),
        *[BlockKind.RETIRED] * counts.retired_count,
        *[BlockKind.CACHED] * counts.cached_count,
        *[BlockKind.FREE] * counts.free_count,
    ]


class BlockMap:
    """Blocks as coloured cells in rows, the number of each row's first block before it, the legend below.

    Fits any width. A pool too big for 16 rows has several blocks in a cell, which shows the most common kind of them.
    """

    def __init__(self, kinds: Sequence[BlockKind], *, first_block_id: int = 1) -> None:
        """kinds are of consecutive blocks from first_block_id on; the null block 0 has none."""
        self._kinds = kinds
        self._first_block_id = first_block_id

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        label_width = self._label_width()
        widest = label_width + _CELL_WIDTH * _cells_per_row(options.max_width - label_width)
        return Measurement(min(widest, options.max_width), max(1, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        label_width = self._label_width()
        per_row = _cells_per_row(options.max_width - label_width)
        per_cell = max(1, -(-len(self._kinds) // (per_row * _MAX_MAP_ROWS)))
        cells = [_most_common(self._kinds[start : start + per_cell]) for start in range(0, len(self._kinds), per_cell)]
        for start in range(0, len(cells), per_row):
            label = f"{self._first_block_id + start * per_cell:>{label_width - 1}} "
            row = Text.assemble((label, "dim"), no_wrap=True)
            for kind in cells[start : start + per_row]:
                row.append(_glyph(kind, options) + " ", style=LOOKS[kind].style)
            row.rstrip()
            yield row
        yield self._legend(options)
        if per_cell > 1:
            yield Text(f"A cell is {per_cell} blocks and shows what most of them are.", style="dim")

    def _label_width(self) -> int:
        return len(str(self._first_block_id + len(self._kinds))) + 1

    def _legend(self, options: ConsoleOptions) -> RenderableType:
        counts = Counter(self._kinds)
        entries = [
            Text.assemble((_glyph(kind, options), look.style), f" {counts[kind]:,} {look.label}")
            for kind, look in LOOKS.items()
        ]
        return Columns(entries, padding=(0, 3))


def _cells_per_row(width: int) -> int:
    """The greatest power of two that fits, at least 8."""
    cells = 8
    while cells < _MAX_CELLS_PER_ROW and 2 * cells * _CELL_WIDTH <= width:
        cells *= 2
    return cells


def _most_common(kinds: Sequence[BlockKind]) -> BlockKind:
    counts = Counter(kinds)
    return max(counts, key=lambda kind: (counts[kind], kind))


def _glyph(kind: BlockKind, options: ConsoleOptions) -> str:
    return LOOKS[kind].ascii_glyph if options.ascii_only else LOOKS[kind].glyph


def map_panel(snapshot: Snapshot, title: str) -> Panel:
    """The map of a pool under a title."""
    return Panel(BlockMap(kinds_of(snapshot)), title=title, title_align="left", border_style="dim", box=box.ROUNDED)


# Numbers.


def format_bytes(num_bytes: float) -> str:
    """ "1.5 MiB"; whole bytes below 1,024."""
    unit = 0
    while num_bytes >= 1024 and unit < len(_UNITS) - 1:
        num_bytes /= 1024
        unit += 1
    return f"{num_bytes:,.0f} B" if unit == 0 else f"{num_bytes:,.1f} {_UNITS[unit]}"


def format_ratio(value: float | None) -> str:
    """ "77.1 %"; a dash if there is none."""
    return "–" if value is None else f"{100 * value:.1f} %"


def counted(count: int, noun: str) -> str:
    """ "1 block", "2 blocks"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def printable(text: str) -> str:
    """Text that a model made, without what a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _HARMLESS_CONTROLS else "\ufffd" for c in text)


Row = tuple[str, str]


def number_table(title: str, rows: Iterable[Row], *, justify: JustifyMethod = "right") -> Table:
    """Names on the left, numbers beside them."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify=justify, no_wrap=True)
    for name, value in rows:
        table.add_row(name, value)
    return table


def pool_view(snapshot: Snapshot) -> RenderableType:
    """Everything `quire stats` shows of a pool."""
    pool, geometry = snapshot.pool, snapshot.pool.geometry
    capacity = snapshot.num_blocks * geometry.block_bytes
    heading = Text.assemble(
        ("pool ", "dim"),
        (pool.name, "bold"),
        f"  {geometry.model}  {counted(snapshot.num_blocks, 'block')} of {geometry.block_size_tokens} tokens, "
        f"{format_bytes(capacity)}  ",
        ("attached", "green") if pool.attached else ("not attached", "red"),
    )
    address = Text(f"worker {pool.worker_address}  epoch {pool.epoch}  term {pool.term}", style="dim", overflow="fold")
    tables = Columns(
        [
            number_table("Now", _rows_now(snapshot)),
            number_table("Prefix cache", _rows_prefix(snapshot.statistics, snapshot.hit_ratio)),
            number_table("Blocks", _rows_blocks(snapshot.statistics)),
            number_table("Steps", _rows_steps(snapshot.statistics)),
            *([number_table("Host tier", _rows_host(snapshot.statistics))] if snapshot.has_host_tier else []),
        ],
        padding=(0, 4),
    )
    return Group(heading, address, Text(), tables, Text(), map_panel(snapshot, "Blocks by state"))


def _rows_now(snapshot: Snapshot) -> list[Row]:
    statistics, counts = snapshot.statistics, snapshot.statistics.block_counts
    return [
        ("leases", f"{statistics.lease_count:,}"),
        ("sequences", f"{statistics.sequence_count:,}"),
        ("blocks held", f"{counts.active_count:,}"),
        ("of which shared", f"{statistics.shared_block_count:,}"),
        ("block table entries", f"{statistics.table_entry_count:,}"),
        ("tokens held", f"{statistics.held_token_count:,}"),
        ("slots used", format_ratio(snapshot.used_slots_ratio)),
    ]


def _rows_prefix(statistics: pb.PoolStatistics, hit_ratio: float | None) -> list[Row]:
    return [
        ("sequences admitted", f"{statistics.admission_count:,}"),
        ("prompt tokens", f"{statistics.admitted_token_count:,}"),
        ("found in the cache", f"{statistics.cached_token_count:,}"),
        ("hit ratio", format_ratio(hit_ratio)),
        ("forks", f"{statistics.fork_count:,}"),
    ]


def _rows_blocks(statistics: pb.PoolStatistics) -> list[Row]:
    return [
        ("handed out", f"{statistics.allocated_block_count:,}"),
        ("copied on write", f"{statistics.copied_block_count:,}"),
        ("published", f"{statistics.published_block_count:,}"),
        ("evicted", f"{statistics.evicted_block_count:,}"),
    ]


def _rows_host(statistics: pb.PoolStatistics) -> list[Row]:
    counts = statistics.host_block_counts
    return [
        ("sequences there", f"{statistics.offloaded_sequence_count:,}"),
        ("blocks held", f"{counts.held_count:,}"),
        ("blocks free", f"{counts.free_count:,}"),
        ("sequences moved there", f"{statistics.offload_count:,}"),
        ("brought back", f"{statistics.restore_count:,}"),
    ]


def _rows_steps(statistics: pb.PoolStatistics) -> list[Row]:
    refusals = [(f"refused: {reason}", f"{count:,}") for reason, count in sorted(statistics.refusal_counts.items())]
    return [
        ("planned", f"{statistics.planned_step_count:,}"),
        ("computed", f"{statistics.computed_step_count:,}"),
        ("skipped", f"{statistics.skipped_step_count:,}"),
        ("failed", f"{statistics.failed_step_count:,}"),
        ("leases expired", f"{statistics.expired_lease_count:,}"),
        *refusals,
    ]


def memory_table(snapshot: Snapshot) -> Table:
    """What the sequences of this moment take in blocks, beside one buffer of the longest length for each."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.add_column("KV memory at that moment")
    for name in ("tokens", "slots", "used", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    paged, contiguous = snapshot.num_active_slots, snapshot.num_contiguous_slots
    held, longest = snapshot.statistics.held_token_count, snapshot.pool.geometry.max_sequence_tokens
    num_active = snapshot.statistics.block_counts.active_count
    table.add_row(
        f"Quire: {counted(num_active, 'block')} of {snapshot.block_size} tokens",
        *_memory_cells(held, paged, snapshot.bytes_per_token),
        style="green",
    )
    table.add_row(
        f"contiguous: {counted(len(snapshot.sequences), 'buffer')} of the longest length, {longest:,}",
        *_memory_cells(snapshot.num_sequence_tokens, contiguous, snapshot.bytes_per_token),
    )
    return table


def _memory_cells(num_tokens: int, num_slots: int, bytes_per_token: float) -> list[str]:
    used = format_ratio(ratio(num_tokens, num_slots))
    return [f"{num_tokens:,}", f"{num_slots:,}", used, format_bytes(num_slots * bytes_per_token)]


# Text that grows.


def text_tail(text: str, *, width: int, num_lines: int) -> str:
    """The last lines of a text broken at `width` columns, words kept whole where they fit."""
    lines = _wrap(printable(text), max(1, width))
    return "\n".join(lines[-num_lines:]) if num_lines > 0 else ""


def _wrap(text: str, width: int) -> list[str]:
    console = Console(width=width, color_system=None, legacy_windows=False)
    # Far more than any terminal shows; wrapping all of a long text many times a second would be felt.
    lines = Text(text[-20_000:]).wrap(console, width)
    return [line.plain.rstrip() for line in lines]
