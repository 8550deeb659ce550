"""Terminal views of a pool: the map of its blocks by state, and its numbers in tables. Draws only, makes no calls.

Colours only repeat the glyphs, so nothing is lost without them; on a terminal with ASCII only the glyphs are ASCII.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from quire.cache.v1 import attach_pb2
from quire.cache.v1 import cache_service_pb2 as pb
from quire.cli.snapshot import Snapshot, ratio
from quire.client.block_kinds import BlockKind, kind_of
from quire.compute.v1 import worker_service_pb2

MAX_MAP_ROWS = 16
BARS = "▁▂▃▄▅▆▇█"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_GROUP_NAMES = {
    attach_pb2.LAYER_GROUP_KIND_FULL: "full",
    attach_pb2.LAYER_GROUP_KIND_SLIDING: "sliding",
    attach_pb2.LAYER_GROUP_KIND_CHUNKED: "chunked",
}
# The only control characters that reach a terminal.
_HARMLESS_CONTROLS = "\n\t"


@dataclass(frozen=True, slots=True)
class Look:
    """The glyph, colour and name of a kind of block."""

    label: str
    glyph: str
    ascii_glyph: str
    style: str


LOOKS = {
    BlockKind.SHARED: Look("shared", "█", "#", "bright_magenta"),
    BlockKind.ACTIVE: Look("held by one", "█", "@", "green"),
    BlockKind.RETIRED: Look("retired", "▓", "x", "yellow"),
    BlockKind.CACHED: Look("cached", "▒", "o", "cyan"),
    BlockKind.FREE: Look("free", "·", ".", "bright_black"),
}


def kinds_of(snapshot: Snapshot) -> bytes:
    """The kind of each of a pool's blocks, by id; in order of kinds if the blocks were too many to be listed."""
    if snapshot.blocks:
        return bytes(kind_of(block) for block in snapshot.blocks)
    return b"".join(bytes([kind]) * count for kind, count in kind_counts(snapshot.statistics).items())


def kind_counts(statistics: pb.PoolStatistics) -> dict[BlockKind, int]:
    """Blocks of each kind, in the order in which kinds are drawn."""
    counts = statistics.block_counts
    num_shared = min(statistics.shared_block_count, counts.active_count)
    return {
        BlockKind.SHARED: num_shared,
        BlockKind.ACTIVE: counts.active_count - num_shared,
        BlockKind.RETIRED: counts.retired_count,
        BlockKind.CACHED: counts.cached_count,
        BlockKind.FREE: counts.free_count,
    }


@dataclass(frozen=True, slots=True)
class Grid:
    """The layout of a pool's blocks: cells in a row, blocks in a cell, columns of a cell."""

    per_row: int
    per_cell: int
    cell_width: int


def grid_of(num_blocks: int, *, width: int, rows: int) -> Grid:
    """The finest grid that has room for all blocks; with gaps between cells if there is room for those too.

    width includes the number of a row's first block.
    """
    width -= _label_width(num_blocks)
    per_row = max(8, width // 2 // 8 * 8)
    if num_blocks <= per_row * rows:
        return Grid(per_row, 1, 2)
    per_row, per_cell = max(8, width // 8 * 8), 1
    while num_blocks > per_row * rows * per_cell:
        per_cell *= 2
    return Grid(per_row, per_cell, 1)


def _label_width(num_blocks: int) -> int:
    return len(str(num_blocks)) + 1


def map_rows(kinds: bytes | bytearray, grid: Grid, options: ConsoleOptions) -> Iterator[Text]:
    """A pool's blocks by id as rows of cells, the number of a row's first block before it."""
    label_width = _label_width(len(kinds)) - 1
    for start in range(0, len(kinds), grid.per_row * grid.per_cell):
        row = Text.assemble((f"{start + 1:>{label_width}} ", "dim"), no_wrap=True)
        for cell in range(start, min(start + grid.per_row * grid.per_cell, len(kinds)), grid.per_cell):
            glyph, style = _cell(kinds[cell : cell + grid.per_cell], options)
            row.append(glyph + " " * (grid.cell_width - 1), style=style)
        row.rstrip()
        yield row


def _cell(kinds: bytes | bytearray, options: ConsoleOptions) -> tuple[str, str]:
    """A single block by its kind's glyph. Of several the height says how many are not free.

    The colour says what most of those are; with ASCII only the character does, and nothing says how many they are.
    """
    used = len(kinds) - kinds.count(BlockKind.FREE)
    if not used:
        return glyph_of(BlockKind.FREE, options), LOOKS[BlockKind.FREE].style
    kind = max(list(BlockKind)[1:], key=lambda kind: (kinds.count(kind), kind))
    if len(kinds) == 1 or options.ascii_only:
        return glyph_of(kind, options), LOOKS[kind].style
    return BARS[-(-used * len(BARS) // len(kinds)) - 1], LOOKS[kind].style


def glyph_of(kind: BlockKind, options: ConsoleOptions, *, per_cell: int = 1) -> str:
    """The glyph of a cell that has only blocks of this kind."""
    if options.ascii_only:
        return LOOKS[kind].ascii_glyph
    return LOOKS[kind].glyph if per_cell == 1 or kind is BlockKind.FREE else BARS[-1]


class BlockMap:
    """Blocks as coloured cells in rows, the number of each row's first block before it, the legend below.

    Fits any width. A pool that has more blocks than there are cells has several blocks in a cell.
    """

    def __init__(self, kinds: Iterable[int], *, rows: int = MAX_MAP_ROWS) -> None:
        """kinds are of all blocks from 1 on; the null block 0 has none. rows is the most rows of cells."""
        self._kinds = bytes(kinds)
        self._rows = rows

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        grid = grid_of(len(self._kinds), width=options.max_width, rows=self._rows)
        widest = _label_width(len(self._kinds)) + grid.per_row * grid.cell_width
        return Measurement(min(widest, options.max_width), max(1, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        grid = grid_of(len(self._kinds), width=options.max_width, rows=self._rows)
        yield from map_rows(self._kinds, grid, options)
        entries = []
        for kind, look in LOOKS.items():
            glyph = glyph_of(kind, options, per_cell=grid.per_cell)
            entries.append(Text.assemble((glyph, look.style), f" {self._kinds.count(kind):,} {look.label}"))
        yield Columns(entries, padding=(0, 3))
        if grid.per_cell > 1:
            yield Text(cell_note(grid.per_cell, options), style="dim")


def cell_note(per_cell: int, options: ConsoleOptions) -> str:
    """A sentence on cells of several blocks."""
    if options.ascii_only:
        return f"A cell is {per_cell:,} blocks: the most common kind that is not free."
    return f"A cell is {per_cell:,} blocks. Height: the part not free. Colour: the most frequent state."


def map_panel(snapshot: Snapshot, title: str, *, rows: int = MAX_MAP_ROWS) -> Panel:
    """The map of a pool under a title."""
    blocks = BlockMap(kinds_of(snapshot), rows=rows)
    return Panel(blocks, title=title, title_align="left", border_style="dim", box=box.ROUNDED)


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
    """A model's text without characters that control a terminal."""
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


def pool_view(snapshot: Snapshot, *, rows: int = MAX_MAP_ROWS) -> RenderableType:
    """Everything `quire stats` shows of a pool; rows is the most rows of the map's cells, 0: no map."""
    pool, geometry = snapshot.pool, snapshot.pool.geometry
    capacity = snapshot.num_blocks * geometry.block_bytes
    heading = Text.assemble(
        ("pool ", "dim"),
        (printable(pool.name), "bold"),
        f"  {printable(geometry.model)}  {counted(snapshot.num_blocks, 'block')} of {geometry.block_size_tokens} "
        f"tokens, {format_bytes(capacity)}  ",
        ("attached", "green") if pool.attached else ("not attached", "red"),
    )
    address = Text(f"worker {pool.worker_address}  epoch {pool.epoch}  term {pool.term}", style="dim", overflow="fold")
    degraded = [_degraded_line(part) for part in snapshot.step_parts if part.degraded_reason]
    parts: list[RenderableType] = [heading, address, *degraded, Text(), Columns(_tables(snapshot), padding=(0, 2))]
    if snapshot.statistics.layer_groups:
        parts += [Text(), layer_group_table(snapshot)]
    if rows:
        title = "Blocks by state" if snapshot.blocks else "Blocks in order of state: too many to be listed by number"
        parts += [Text(), map_panel(snapshot, title, rows=rows)]
    return Group(*parts)


def _degraded_line(part: worker_service_pb2.StepPart) -> Text:
    """A part of the worker's steps that is slower than it could be."""
    text = f"DEGRADED {part.part}: {printable(part.mode)}: {printable(part.degraded_reason)}"
    return Text(text, style="bold yellow", overflow="fold")


def _tables(snapshot: Snapshot) -> Iterator[RenderableType]:
    """Columns of tables: three of them have room in 80 columns."""
    statistics = snapshot.statistics
    now = number_table("Now", _rows_now(snapshot))
    yield Group(now, Text(), number_table("Host tier", _rows_host(statistics))) if snapshot.has_host_tier else now
    yield Group(
        number_table("Prefix cache", _rows_prefix(statistics, snapshot.hit_ratio)),
        Text(),
        number_table("Blocks", _rows_blocks(statistics)),
    )
    yield Group(
        number_table("Steps", _rows_steps(statistics)), Text(), number_table("Tokens", _rows_tokens(statistics))
    )


class StatsScreen:
    """Everything `quire stats --watch` shows, cut to a height: maps shrink, then go, then lines are left out.

    trouble is a first line on why the snapshots are old ones; "" if they are not.
    """

    def __init__(self, snapshots: Sequence[Snapshot], *, height: int, trouble: str = "") -> None:
        self._snapshots = snapshots
        self._height = height
        self._trouble = trouble

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        options = options.reset_height()
        lines = self._lines(console, options, rows=1)
        if (spare := self._height - len(lines)) < 0:
            lines = self._lines(console, options, rows=0)
        elif self._snapshots:
            rows = min(MAX_MAP_ROWS, 1 + spare // len(self._snapshots))
            lines = self._lines(console, options, rows=rows)
        if len(lines) > self._height:
            hidden = Text(f"{len(lines) - self._height + 1} lines more: a higher terminal, or --pool", style="yellow")
            lines[max(0, self._height - 1) :] = console.render_lines(hidden, options)[:1]
        yield Segments(segment for line in lines for segment in [*line, Segment.line()])

    def _lines(self, console: Console, options: ConsoleOptions, *, rows: int) -> list[list[Segment]]:
        parts: list[RenderableType] = []
        if self._trouble:
            parts.append(Text(self._trouble, style="bold red", no_wrap=True, overflow="ellipsis"))
        parts += [pool_view(snapshot, rows=rows) for snapshot in self._snapshots]
        return console.render_lines(Group(*parts), options)


def layer_group_name(group: attach_pb2.LayerGroup) -> str:
    """ "full", "sliding, 1,024 tokens", "chunked, 8,192 tokens"."""
    name = _GROUP_NAMES.get(group.kind, "unknown")
    return f"{name}, {counted(group.window_token_count, 'token')}" if group.window_token_count else name


def layer_group_table(snapshot: Snapshot) -> Table:
    """A line for each layer group. found, passed and evicted are counters."""
    table = Table(title="Layer groups", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("group", justify="right", style="dim", header_style="dim")
    table.add_column("attention", header_style="dim", no_wrap=True)
    for name in ("layers", "held", "findable", "found", "passed", "evicted"):
        table.add_column(name, justify="right", header_style="dim", no_wrap=True)
    groups = zip(snapshot.pool.geometry.layer_groups, snapshot.statistics.layer_groups, strict=False)
    for index, (group, numbers) in enumerate(groups):
        counts = (
            group.layer_count,
            numbers.active_block_count,
            numbers.findable_block_count,
            numbers.found_block_count,
            numbers.passed_block_count,
            numbers.evicted_block_count,
        )
        table.add_row(str(index), layer_group_name(group), *(f"{count:,}" for count in counts))
    return table


def _rows_now(snapshot: Snapshot) -> list[Row]:
    statistics, counts = snapshot.statistics, snapshot.statistics.block_counts
    return [
        ("leases", f"{statistics.lease_count:,}"),
        ("sequences", f"{statistics.sequence_count:,}"),
        ("blocks held", f"{counts.active_count:,}"),
        ("of which shared", f"{statistics.shared_block_count:,}"),
        ("table entries", f"{statistics.table_entry_count:,}"),
        ("tokens held", f"{statistics.held_token_count:,}"),
        ("slots used", format_ratio(snapshot.used_slots_ratio)),
    ]


def _rows_prefix(statistics: pb.PoolStatistics, hit_ratio: float | None) -> list[Row]:
    return [
        ("admissions", f"{statistics.admission_count:,}"),
        ("prompt tokens", f"{statistics.admitted_token_count:,}"),
        ("found in cache", f"{statistics.cached_token_count:,}"),
        ("hit ratio", format_ratio(hit_ratio)),
        ("forks", f"{statistics.fork_count:,}"),
        *_rows_drafts(statistics),
    ]


def _rows_drafts(statistics: pb.PoolStatistics) -> list[Row]:
    """Return the drafts and the part of them that came true; nothing if there were none."""
    if not statistics.drafted_token_count:
        return []
    accepted = statistics.accepted_draft_token_count / statistics.drafted_token_count
    return [("drafts", f"{statistics.drafted_token_count:,}"), ("accepted", format_ratio(accepted))]


def _rows_blocks(statistics: pb.PoolStatistics) -> list[Row]:
    rows = [
        ("handed out", f"{statistics.allocated_block_count:,}"),
        ("copied on write", f"{statistics.copied_block_count:,}"),
        ("published", f"{statistics.published_block_count:,}"),
        ("evicted", f"{statistics.evicted_block_count:,}"),
    ]
    return [*rows, ("kept", f"{statistics.kept_block_count:,}")] if statistics.kept_block_count else rows


def _rows_tokens(statistics: pb.PoolStatistics) -> list[Row]:
    return [
        ("computed", f"{statistics.computed_token_count:,}"),
        ("generated", f"{statistics.generated_token_count:,}"),
    ]


def _rows_host(statistics: pb.PoolStatistics) -> list[Row]:
    counts = statistics.host_block_counts
    return [
        ("sequences there", f"{statistics.offloaded_sequence_count:,}"),
        ("blocks held", f"{counts.held_count:,}"),
        ("blocks free", f"{counts.free_count:,}"),
        *([("blocks cached", f"{counts.cached_count:,}")] if counts.cached_count else []),
        ("sequences moved there", f"{statistics.offload_count:,}"),
        ("brought back", f"{statistics.restore_count:,}"),
    ]


def _rows_steps(statistics: pb.PoolStatistics) -> list[Row]:
    refusals = [(f"refused: {reason}", f"{count:,}") for reason, count in sorted(statistics.refusal_counts.items())]
    return [
        ("planned", f"{statistics.planned_step_count:,}"),
        ("in flight", f"{statistics.step_in_flight_count:,}"),
        ("computed", f"{statistics.computed_step_count:,}"),
        ("skipped", f"{statistics.skipped_step_count:,}"),
        ("failed", f"{statistics.failed_step_count:,}"),
        ("leases expired", f"{statistics.expired_lease_count:,}"),
        *refusals,
    ]


def memory_table(snapshot: Snapshot) -> Table:
    """The memory of this moment's sequences in blocks, beside one buffer of the longest length for each."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.add_column("KV memory at that moment")
    for name in ("tokens", "slots", "used", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    paged, contiguous = snapshot.num_active_slots, snapshot.num_contiguous_slots
    held, longest = snapshot.statistics.held_token_count, snapshot.pool.geometry.max_sequence_tokens
    num_active = snapshot.statistics.block_counts.active_count
    table.add_row(
        f"Quire: {counted(num_active, 'block')} of {snapshot.block_size} tokens",
        *_memory_cells(held, paged, snapshot.bytes_per_slot),
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
