"""The screen of `quire top`: a frame of the known state, for any width and height. Draws only, makes no calls."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cache.v1.attach_pb2 import LayerGroup
from quire.cli.render import (
    BARS,
    LOOKS,
    MAX_MAP_ROWS,
    counted,
    format_bytes,
    format_ratio,
    glyph_of,
    grid_of,
    kind_counts,
    layer_group_name,
    map_rows,
    printable,
)
from quire.cli.snapshot import ratio
from quire.cli.top_model import BlockBook, Entry, Look, Place, Rates, Tab, key_of, rows_of
from quire.client.block_kinds import BlockKind, kind_of

WIDE = 150
"""Columns from which on the lists are beside the numbers."""
_ASCII_BARS = "._-=+*%#"
_LABEL_WIDTH = 9
_MAX_POOL_ROWS = 5
_MIN_LIST_HEIGHT = 6
_TITLES = {Tab.SEQUENCES: "Sequences", Tab.LEASES: "Leases", Tab.TENANTS: "Tenants"}
_STATE_NAMES = {pb.LEASE_STATE_OPEN: "open", pb.LEASE_STATE_FENCING: "fencing"}
_KEYS = (
    ("q", "quit", "Ends the program."),
    ("p", "pool", "The next pool."),
    ("tab", "list", "Sequences, leases, tenants."),
    ("jk", "move", "The next row, the one before; arrows, page up and down, home, end."),
    ("enter", "open", "A sequence: its block table. A lease or a tenant: its sequences."),
    ("esc", "back", "Close a sequence; else clear the filter."),
    ("/", "find", "Only rows with this text in their lease or tenant."),
    ("b", "map", "The block map, on or off."),
    ("?", "help", "This page."),
)


@dataclass(frozen=True, slots=True)
class Shown:
    """The content of a frame.

    address    of cachemgr
    clock      the time of day, for people
    now_s      seconds since 1970, to show the time left of leases
    trouble    the reason why the look is old; "" if it is not
    """

    address: str
    look: Look
    place: Place
    clock: str = ""
    now_s: float = 0.0
    trouble: str = ""
    rates: Rates = field(default_factory=Rates)
    book: BlockBook | None = None


class TopScreen:
    """A frame of this height, in lines; without one every row of the list is in it, and no row is selected."""

    def __init__(self, shown: Shown, *, height: int | None) -> None:
        self._shown = shown
        self._height = height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(Group(*self._parts(options)), options):
            yield Segment(_ascii(segment.text), segment.style) if options.ascii_only else segment

    def _parts(self, options: ConsoleOptions) -> Iterator[RenderableType]:
        shown, width, height = self._shown, options.max_width, self._height
        options = options.update(height=height)
        head, foot = [_header(shown), *_pool_lines(shown, options)], _footer(shown)
        body_height = None if height is None else height - len(head) - 1
        if body_height is not None and body_height < 1:
            yield _fitted(head, height)
            return
        yield from head
        if shown.place.shows_help:
            yield _fitted(_help(), body_height)
        elif shown.look.chosen is None:
            yield _fitted([Text(" No pool: no worker is attached.", "yellow", no_wrap=True)], body_height)
        elif width >= WIDE:
            yield _side_by_side(shown, options, body_height)
        else:
            yield _stacked(shown, options, body_height)
        if height is not None:
            yield foot


def _ascii(text: str) -> str:
    """A text as a terminal with ASCII only shows it, for any name."""
    return text.replace("–", "-").replace("…", "~").encode("ascii", "replace").decode()


def list_height(shown: Shown, *, width: int, height: int) -> int:
    """The rows that a page key moves by, about."""
    used = 8 if width >= WIDE else 8 + (_map_height(height) if shown.place.shows_map else 0)
    return max(1, height - used)


# The parts from top to bottom.


def _header(shown: Shown) -> RenderableType:
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    if shown.trouble:
        left = Text(f" {shown.trouble}", style="bold red")
    else:
        left = Text.assemble((" quire top ", "bold"), (shown.address, "dim"))
    grid.add_row(left, Text(f"{shown.clock} ", style="dim"))
    return grid


def _pool_lines(shown: Shown, options: ConsoleOptions) -> list[RenderableType]:
    """A line for each pool, the chosen one marked; of many those around it."""
    pools, look = shown.look.pools, shown.look
    chosen = next((index for index, pool in enumerate(pools) if pool.name == look.pool), 0)
    first = max(0, min(chosen - _MAX_POOL_ROWS // 2, len(pools) - _MAX_POOL_ROWS))
    arrow = ">" if options.ascii_only else "▸"
    marks = [arrow if pool.name == look.pool else " " for pool in pools] if len(pools) > 1 else [""]
    lines = [
        _pool_line(pools[index], look.statistics.get(pools[index].name), options, mark=marks[index])
        for index in range(first, min(first + _MAX_POOL_ROWS, len(pools)))
    ]
    hidden = len(pools) - len(lines)
    return [*lines, *([Text(f" and {counted(hidden, 'pool')} more: p", "dim", no_wrap=True)] if hidden else [])]


def _pool_line(
    pool: pb.Pool, statistics: pb.PoolStatistics | None, options: ConsoleOptions, *, mark: str
) -> RenderableType:
    geometry = pool.geometry
    num_blocks = geometry.block_count - 1
    line = Text.assemble(
        (mark or " ", "bold"),
        ("pool ", "dim"),
        (printable(pool.name), "bold"),
        "  ",
        ("attached", "green") if pool.attached else ("NOT ATTACHED", "bold red"),
        "  ",
    )
    if mark:
        used = ratio(num_blocks - pool.block_counts.free_count, num_blocks)
        hits = None if statistics is None else ratio(statistics.cached_token_count, statistics.admitted_token_count)
        line.append(f"{format_ratio(used)} used, hit ratio {format_ratio(hits)}  ")
    size = format_bytes(num_blocks * geometry.block_bytes)
    line.append(f"{counted(num_blocks, 'block')} of {geometry.block_size_tokens} tokens, {size}  ", "dim")
    line.append(printable(geometry.model))
    line.truncate(options.max_width, overflow="crop" if options.ascii_only else "ellipsis")
    return line


def _stacked(shown: Shown, options: ConsoleOptions, height: int | None) -> RenderableType:
    parts: list[RenderableType] = [*_numbers(shown, options), Text()]
    has_map = shown.place.shows_map and shown.book is not None and shown.place.opened is None
    left = None if height is None else height - len(parts)
    if has_map and (left is None or left >= _MIN_LIST_HEIGHT + 3):
        rows = MAX_MAP_ROWS if left is None else min(MAX_MAP_ROWS, max(2, left - _MIN_LIST_HEIGHT - 3, left // 3))
        parts += [*_map(shown, options, width=options.max_width, rows=rows), Text()]
    left = None if height is None else max(0, height - len(parts))
    return _fitted([*parts, *_main(shown, options, options.max_width, left)], height)


def _side_by_side(shown: Shown, options: ConsoleOptions, height: int | None) -> RenderableType:
    left_width = options.max_width * 9 // 20
    right_width = options.max_width - left_width - 2
    narrow = options.update(width=left_width)
    left: list[RenderableType] = [*_numbers(shown, narrow), Text()]
    if shown.place.shows_map and shown.book is not None:
        rows = 2 * MAX_MAP_ROWS if height is None else max(2, height - len(left) - 3)
        left += _map(shown, narrow, width=left_width, rows=rows)
    others = [] if shown.place.opened else _other_lists(shown, options, right_width, height)
    main_height = None if height is None else max(0, height - len(others))
    main = _main(shown, options, right_width, main_height)
    if others and main_height is not None:
        main += [Text()] * (main_height - len(main))
    grid = Table.grid(Column(width=left_width), Column(width=2), Column(width=right_width))
    grid.add_row(_fitted(left, height), "", _fitted([*main, *others], height))
    return grid


def _fitted(lines: Sequence[RenderableType], height: int | None) -> RenderableType:
    """Lines of text, filled up or cut to a height."""
    if height is None:
        return Group(*lines)
    return Group(*lines[:height], *[Text()] * (height - len(lines)))


def _footer(shown: Shown) -> RenderableType:
    place = shown.place
    if place.typed is not None:
        return Text.assemble(
            (" filter: ", "bold"), place.typed, ("_", "blink"), ("   enter apply  esc leave", "dim"), no_wrap=True
        )
    line = Text(" ", no_wrap=True, overflow="ellipsis")
    for key, name, _ in _KEYS:
        if key == "p" and len(shown.look.pools) < 2:
            continue
        line.append(key, style="bold").append(f" {name}  ", style="dim")
    line.rstrip()
    return line


def _help() -> list[RenderableType]:
    keys = [
        Text.assemble("  ", (f"{key:<8}", "bold"), text, no_wrap=True, overflow="ellipsis") for key, _, text in _KEYS
    ]
    return [Text(), *keys, Text(), Text("  Any key goes back.", "dim", no_wrap=True)]


# Numbers.


def _numbers(shown: Shown, options: ConsoleOptions) -> list[RenderableType]:
    """Six lines of a pool's numbers, and one for its layer groups if there are several."""
    look, rates = shown.look, shown.rates
    statistics = look.statistics.get(look.pool, pb.PoolStatistics())
    width = options.max_width - _LABEL_WIDTH - 1
    lines = [
        ("blocks", _block_numbers(statistics)),
        ("", _state_bar(statistics, options, width)),
        ("cache", _cache_numbers(statistics, rates)),
        ("tokens", _token_rates(rates)),
        ("steps", _step_numbers(statistics, rates, options, width)),
        ("holders", _holder_numbers(look, statistics)),
    ]
    if look.chosen is not None and statistics.layer_groups:
        lines.append(("groups", _group_numbers(look.chosen.geometry.layer_groups, statistics.layer_groups)))
    return [_labelled(name, text, options.max_width) for name, text in lines]


def _labelled(name: str, text: Text, width: int) -> Text:
    line = Text.assemble((f" {name:<{_LABEL_WIDTH - 1}}", "dim"), text, no_wrap=True)
    line.truncate(width)
    return line


def _number(text: str, *, warns: bool = False) -> tuple[str, str]:
    return text, "bold yellow" if warns else "bold"


def _block_numbers(statistics: pb.PoolStatistics) -> Text:
    counts = statistics.block_counts
    parts: list[str | tuple[str, str]] = [
        *(_number(f"{counts.active_count:,}"), f" held, of these {statistics.shared_block_count:,} shared   "),
        *(_number(f"{counts.cached_count:,}"), " cached   "),
        *(_number(f"{counts.retired_count:,}", warns=counts.retired_count > 0), " retired   "),
        *(_number(f"{counts.free_count:,}"), " free"),
    ]
    if statistics.reserved_block_count or statistics.pinned_block_count or statistics.kept_block_count:
        parts.append(f"   {statistics.reserved_block_count:,} reserved, {statistics.pinned_block_count:,} pinned")
    if statistics.kept_block_count:
        parts.append(f", {statistics.kept_block_count:,} kept")
    host = statistics.host_block_counts
    if num_host_blocks := host.free_count + host.held_count + host.retired_count + host.cached_count:
        used = ratio(num_host_blocks - host.free_count, num_host_blocks)
        parts.append(f"   {statistics.offloaded_sequence_count:,} in the host tier, {format_ratio(used)} full")
    if host.cached_count:
        parts.append(f", {host.cached_count:,} cached there")
    disk = statistics.disk_block_counts
    if num_disk_blocks := disk.free_count + disk.retired_count + disk.cached_count:
        used = ratio(num_disk_blocks - disk.free_count, num_disk_blocks)
        parts.append(f"   {disk.cached_count:,} on the disk, {format_ratio(used)} full")
    return Text.assemble(*parts)


def _state_bar(statistics: pb.PoolStatistics, options: ConsoleOptions, width: int) -> Text:
    """All blocks in one line, as wide as their states' shares; a state that there is has a cell."""
    sizes = kind_counts(statistics)
    bar = Text()
    for kind, cells in zip(sizes, _shares(list(sizes.values()), width), strict=True):
        bar.append(glyph_of(kind, options) * cells, style=LOOKS[kind].style)
    return bar


def _shares(sizes: Sequence[int], width: int) -> list[int]:
    """Cells for each size, `width` together: at least one for a size that is not 0, if there is room for all."""
    total = sum(sizes)
    if not total:
        return [0] * len(sizes)
    cells = [max(1, size * width // total) if size else 0 for size in sizes]
    widest = max(range(len(sizes)), key=lambda index: sizes[index])
    cells[widest] = max(0, cells[widest] + width - sum(cells))
    return cells


def _cache_numbers(statistics: pb.PoolStatistics, rates: Rates) -> Text:
    overall = ratio(statistics.cached_token_count, statistics.admitted_token_count)
    accepted = ratio(statistics.accepted_draft_token_count, statistics.drafted_token_count)
    return Text.assemble(
        *("hits ", _number(format_ratio(rates.hit_ratio)), f" now, {format_ratio(overall)} in all   "),
        *(_number(f"{rates.evicted_per_s:,.0f}"), " evicted/s"),
        *(() if accepted is None else ("   drafts accepted ", _number(format_ratio(accepted)))),
    )


def _token_rates(rates: Rates) -> Text:
    return Text.assemble(
        *(_number(f"{rates.generated_tokens_per_s:,.0f}"), " generated/s   "),
        *(_number(f"{rates.computed_tokens_per_s:,.0f}"), " computed/s   "),
        *(_number(f"{rates.prompt_tokens_per_s:,.0f}"), " admitted/s"),
    )


def _step_numbers(statistics: pb.PoolStatistics, rates: Rates, options: ConsoleOptions, width: int) -> Text:
    in_flight, failed = statistics.step_in_flight_count, statistics.failed_step_count
    text = Text.assemble(
        *(_number(f"{rates.steps_per_s:,.1f}"), "/s   "),
        *(_number(f"{in_flight:,}"), " in flight   "),
        *(_number(f"{failed:,}", warns=failed > 0), " failed   "),
        *(_number(f"{sum(statistics.refusal_counts.values()):,}"), " refused"),
    )
    room = min(60, width - text.cell_len - 3)
    return Text.assemble(text, "   ", (_sparkline(rates.step_speeds, room, options), "cyan")) if room > 3 else text


def _holder_numbers(look: Look, statistics: pb.PoolStatistics) -> Text:
    chosen = look.chosen
    num_slots = statistics.block_counts.active_count * (chosen.geometry.block_size_tokens if chosen else 0)
    fencing = statistics.fencing_lease_count
    parts: list[str | tuple[str, str]] = [
        *(_number(f"{statistics.lease_count:,}"), f" lease{'s' * (statistics.lease_count != 1)}"),
        *((", ", _number(f"{fencing:,} fencing", warns=True)) if fencing else ()),
        *("   ", _number(f"{statistics.sequence_count:,}"), f" sequence{'s' * (statistics.sequence_count != 1)}   "),
        *(_number(f"{statistics.held_token_count:,}"), " tokens, "),
        f"{format_ratio(ratio(statistics.held_token_count, num_slots))} of their slots",
    ]
    return Text.assemble(*parts)


def _group_numbers(groups: Sequence[LayerGroup], statistics: Sequence[pb.LayerGroupStatistics]) -> Text:
    """The blocks of the layer groups, those that see the same positions together."""
    held: Counter[str] = Counter()
    findable: Counter[str] = Counter()
    names = list(map(layer_group_name, groups))
    for name, numbers in zip(names, statistics, strict=False):
        held[name] += numbers.active_block_count
        findable[name] += numbers.findable_block_count
    parts: list[str | tuple[str, str]] = []
    for name, count in Counter(names).items():
        several = f" ({count} groups)" if count > 1 else ""
        parts += [f"{name}{several}: ", _number(f"{held[name]:,}"), f" held, {findable[name]:,} findable   "]
    text = Text.assemble(*parts)
    text.rstrip()
    return text


def _sparkline(values: Sequence[float], width: int, options: ConsoleOptions) -> str:
    """The last values, the greatest of them as high as a line."""
    bars, shown = _ASCII_BARS if options.ascii_only else BARS, values[-width:]
    greatest = max(shown, default=0.0)
    if greatest <= 0:
        return bars[0] * len(shown)
    return "".join(bars[round(value / greatest * (len(bars) - 1))] for value in shown)


# The block map.


def _map(shown: Shown, options: ConsoleOptions, *, width: int, rows: int) -> list[RenderableType]:
    """A line that says how blocks are drawn, then at most `rows` lines of cells."""
    book = shown.book
    if book is None:
        return []
    grid = grid_of(len(book.kinds), width=width - 1, rows=rows)
    lines = map_rows(book.kinds, grid, options)
    return [_legend(book, grid.per_cell, options, width), *(Text.assemble(" ", line, no_wrap=True) for line in lines)]


def _legend(book: BlockBook, per_cell: int, options: ConsoleOptions, width: int) -> Text:
    """Draw the legend, without counts. The first line of numbers has those of the last look; events may be newer."""
    line = Text(" ", no_wrap=True)
    for kind, look in LOOKS.items():
        line.append(glyph_of(kind, options, per_cell=per_cell), style=look.style).append(f" {look.label}  ", "dim")
    if not book.is_whole:
        line.append("being read", style="yellow")
    elif per_cell > 1:
        line.append(f"a cell: {per_cell:,} blocks", style="dim")
    line.truncate(width)
    return line


# Lists.


@dataclass(frozen=True, slots=True)
class _Field:
    """A column: its title, its least width, whether it is a number, from which width of the screen on it is shown."""

    title: str
    width: int
    value: Callable[[Entry], str]
    is_number: bool = True
    from_width: int = 0


def _main(shown: Shown, options: ConsoleOptions, width: int, height: int | None) -> list[RenderableType]:
    """The list, or the sequence that is looked at."""
    if shown.place.opened is not None:
        return _opened(shown, options, width, height)
    return _list(shown, options, shown.place.tab, width, height, selects=True)


def _other_lists(shown: Shown, options: ConsoleOptions, width: int, height: int | None) -> list[RenderableType]:
    """The lists that are not chosen, a few rows of each."""
    lines: list[RenderableType] = []
    for tab in Tab:
        if tab is not shown.place.tab and rows_of(shown.look, tab, shown.place.filter):
            most = None if height is None else max(4, height // 4)
            lines += [Text(), *_list(shown, options, tab, width, most, selects=False)]
    return lines


def _list(
    shown: Shown, options: ConsoleOptions, tab: Tab, width: int, height: int | None, *, selects: bool
) -> list[RenderableType]:
    rows = rows_of(shown.look, tab, shown.place.filter)
    fields = [each for each in _fields(shown)[tab] if each.from_width <= width]
    chosen = shown.place.selected_index(rows) if selects else -1
    visible = range(len(rows)) if height is None else _window(len(rows), max(0, chosen), max(0, height - 2))
    lines: list[RenderableType] = [_list_title(shown, tab, len(rows), visible, width), _titles(fields, width)]
    for index in visible:
        line = _row([each.value(rows[index]) for each in fields], fields, width)
        line.stylize("reverse" if index == chosen and options.height is not None else "")
        lines.append(line)
    return lines


def _window(count: int, chosen: int, height: int) -> range:
    """The rows that fit, with the chosen one among them."""
    first = max(0, min(chosen - height // 2, count - height))
    return range(first, min(count, first + height))


def _list_title(shown: Shown, tab: Tab, count: int, visible: range, width: int) -> Text:
    look, place = shown.look, shown.place
    of_all = len(rows_of(look, tab, ""))
    line = Text.assemble(" ", (_TITLES[tab], "bold underline" if tab is place.tab else "bold"))
    line.append(f" {count:,}" + (f" of {of_all:,}" if count < of_all else ""))
    if tab in look.is_cut:
        line.append(" and more", style="yellow")
    if len(visible) < count:
        line.append(f"   rows {visible.start + 1:,} to {visible.stop:,}", style="dim")
    if place.filter:
        line.append(f"   filter: {printable(place.filter)}", style="yellow")
    line.truncate(width)
    return line


def _titles(fields: Sequence[_Field], width: int) -> Text:
    line = _row([each.title for each in fields], fields, width)
    line.stylize("dim")
    return line


def _row(values: Iterable[str], fields: Sequence[_Field], width: int) -> Text:
    line = Text(" ", no_wrap=True)
    for value, each in zip(values, fields, strict=True):
        cell = Text(value)
        cell.truncate(each.width)
        padding = " " * (each.width - cell.cell_len)
        line.append_text(Text(padding) + cell if each.is_number else cell + Text(padding)).append("  ")
    line.truncate(width, pad=True)
    return line


def _fields(shown: Shown) -> dict[Tab, list[_Field]]:
    """The columns of each list."""

    def lease_name(entry: Entry) -> str:
        return key_of(entry)[0]

    def tenant(entry: Entry) -> str:
        return printable(shown.look.tenant_of(key_of(entry)[0])) or "–"

    def count(name: str) -> Callable[[Entry], str]:
        return lambda entry: f"{getattr(entry, name):,}"

    def some(name: str) -> Callable[[Entry], str]:
        return lambda entry: f"{getattr(entry, name):,}" if getattr(entry, name) else "–"

    return {
        Tab.SEQUENCES: [
            _Field("lease", 8, lease_name, is_number=False),
            _Field("tenant", 12, tenant, is_number=False),
            _Field("seq", 7, lambda entry: str(key_of(entry)[1])),
            _Field("tokens", 7, count("token_count")),
            _Field("computed", 8, count("computed_token_count")),
            _Field("planned", 7, count("scheduled_token_count")),
            _Field("cached", 7, count("cached_token_count")),
            _Field("blocks", 6, count("block_count")),
            _Field("reserved", 8, some("reserved_token_count"), from_width=90),
            _Field("done", 14, lambda entry: _progress(entry, 14), is_number=False, from_width=105),
        ],
        Tab.LEASES: [
            _Field("lease", 8, lease_name, is_number=False),
            _Field("tenant", 16, tenant, is_number=False),
            _Field("state", 8, _lease_state, is_number=False),
            _Field("ends in", 8, lambda entry: _ends_in(entry, shown.now_s)),
            _Field("sequences", 9, count("sequence_count")),
            _Field("last step", 10, count("last_step_number")),
            _Field("in flight", 9, count("step_in_flight_count")),
        ],
        Tab.TENANTS: [
            _Field("tenant", 16, lambda entry: printable(key_of(entry)[0]) or "–", is_number=False),
            _Field("held", 7, count("held_block_count")),
            _Field("cached", 7, count("cached_block_count")),
            _Field("reserved", 8, some("reserved_block_count")),
            _Field("pinned", 7, some("pinned_block_count")),
            _Field("kept", 6, some("kept_block_count")),
            _Field("keep limit", 10, count("keep_limit_block_count"), from_width=110),
            _Field("keep ends", 9, lambda entry: _keep_ends_in(entry, shown.now_s), from_width=120),
            _Field("floor", 6, some("floor_block_count")),
            _Field("quota", 6, count("quota_block_count")),
            _Field("limit", 6, count("limit_block_count"), from_width=85),
            _Field("leases", 6, count("lease_count"), from_width=93),
        ],
    }


def _lease_state(entry: Entry) -> str:
    return _STATE_NAMES.get(entry.state, "?") if isinstance(entry, pb.Lease) else ""


def _keep_ends_in(entry: Entry, now_s: float) -> str:
    if not isinstance(entry, pb.Tenant) or not entry.HasField("next_keep_end_time"):
        return ""
    return f"{max(0.0, entry.next_keep_end_time.ToNanoseconds() / 1e9 - now_s):,.0f} s"


def _ends_in(entry: Entry, now_s: float) -> str:
    if not isinstance(entry, pb.Lease) or entry.state == pb.LEASE_STATE_FENCING:
        return "–"
    return f"{max(0.0, entry.expire_time.seconds + entry.expire_time.nanos / 1e9 - now_s):,.0f} s"


def _progress(entry: Entry, width: int) -> str:
    """The progress of a sequence, as a bar of characters that every terminal has."""
    if not isinstance(entry, pb.Sequence):
        return ""
    done = round((ratio(entry.computed_token_count, entry.token_count) or 0.0) * width)
    return "=" * done + "." * (width - done)


# One sequence.


def _opened(shown: Shown, options: ConsoleOptions, width: int, height: int | None) -> list[RenderableType]:
    """The sequence that is looked at: its tokens, then its block table."""
    look, opened = shown.look, shown.place.opened
    assert opened is not None, "only while a sequence is looked at"
    title = Text.assemble(" Sequence ", (str(opened[1]), "bold"), " of lease ", (opened[0], "bold"), no_wrap=True)
    if tenant := look.tenant_of(opened[0]):
        title.append(f", tenant {printable(tenant)}")
    sequence, chosen = look.sequence, look.chosen
    if sequence is None or chosen is None:
        return [title, Text(" It has ended.", "yellow", no_wrap=True)]
    lines: list[RenderableType] = [
        title,
        _labelled("tokens", _token_numbers(sequence), width),
        _labelled("blocks", _sequence_bar(sequence, chosen.geometry.block_size_tokens, options, width), width),
    ]
    if sequence.group_block_tables:
        numbers = _table_numbers(chosen.geometry.layer_groups, sequence.group_block_tables)
        lines.append(_labelled("groups", numbers, width))
    lines.append(Text())
    left = None if height is None else max(0, height - len(lines))
    return [*lines, *_block_table(shown, sequence, chosen.geometry.block_size_tokens, width, left)]


def _token_numbers(sequence: pb.Sequence) -> Text:
    reserved = f"   {sequence.reserved_token_count:,} reserved" if sequence.reserved_token_count else ""
    return Text.assemble(
        *(_number(f"{sequence.token_count:,}"), " known   "),
        *(_number(f"{sequence.computed_token_count:,}"), " computed   "),
        *(_number(f"{sequence.scheduled_token_count:,}"), " planned   "),
        *(_number(f"{sequence.cached_token_count:,}"), f" found in the cache{reserved}"),
    )


def _sequence_bar(sequence: pb.Sequence, block_size: int, options: ConsoleOptions, width: int) -> Text:
    """The sequence from its first token to the end of its last block."""
    num_blocks = max(
        (table.passed_block_count + table.block_count for table in sequence.group_block_tables),
        default=sequence.block_count,
    )
    num_slots = max(num_blocks * block_size, sequence.token_count)
    cached, computed = sequence.cached_token_count, sequence.computed_token_count
    sizes = (
        (cached, "▒", "o", "cyan", "cached"),
        (computed - cached, "█", "#", "green", "computed"),
        (sequence.scheduled_token_count - computed, "▓", "+", "yellow", "in flight"),
        (num_slots - sequence.scheduled_token_count, "·", ".", "bright_black", "free"),
    )
    bar = Text()
    bar_width = min(60, max(8, width - 56))
    for (_, glyph, ascii_glyph, style, _), cells in zip(
        sizes, _shares([max(0, size) for size, *_ in sizes], bar_width), strict=True
    ):
        bar.append((ascii_glyph if options.ascii_only else glyph) * cells, style=style)
    for _, glyph, ascii_glyph, style, name in sizes:
        bar.append("  ").append(ascii_glyph if options.ascii_only else glyph, style=style).append(f" {name}", "dim")
    return bar


def _table_numbers(groups: Sequence[LayerGroup], tables: Sequence[pb.GroupBlockTable]) -> Text:
    """The blocks of each layer group's table, and those that it let go."""
    parts: list[str | tuple[str, str]] = []
    for index, (group, table) in enumerate(zip(groups, tables, strict=False)):
        parts += [f"{index} {layer_group_name(group)}: ", _number(f"{table.block_count:,}")]
        parts.append(f", {table.passed_block_count:,} passed   " if table.passed_block_count else "   ")
    text = Text.assemble(*parts)
    text.rstrip()
    return text


def entries_of(sequence: pb.Sequence) -> list[tuple[int, int, int]]:
    """Return the layer group, the index and the block of each entry of a sequence's block tables."""
    if not sequence.group_block_tables:
        return [(0, index, block_id) for index, block_id in enumerate(sequence.block_ids)]
    block_ids = iter(sequence.block_ids)
    return [
        (group, index, block_id)
        for group, table in enumerate(sequence.group_block_tables)
        for index, block_id in enumerate(islice(block_ids, table.block_count), table.passed_block_count)
    ]


_TABLE = (("index", 6), ("tokens", 17), ("block", 9), ("state", 8), ("holders", 7), ("priority", 8), ("pins", 5))


def _block_table(
    shown: Shown, sequence: pb.Sequence, block_size: int, width: int, height: int | None
) -> list[RenderableType]:
    """A line per entry of the block tables, from the place's offset on."""
    entries = entries_of(sequence)
    if not entries:
        return [Text(f" {counted(sequence.block_count, 'block')}; cachemgr does not list them.", "dim", no_wrap=True)]
    has_groups = bool(sequence.group_block_tables)
    columns = (("group", 6), *_TABLE) if has_groups else _TABLE
    titles = _cells([f"{name:>{size}}" for name, size in columns] + ["prefix hash"], width)
    titles.stylize("dim")
    first = min(shown.place.offset, len(entries) - 1)
    last = len(entries) if height is None else min(len(entries), first + max(0, height - 1))
    lines: list[RenderableType] = [titles]
    for group, index, block_id in entries[first:last]:
        block = shown.book.block(block_id) if shown.book is not None else None
        values, style = _entry_values(sequence, index, block_id, block, block_size)
        if has_groups:
            values.insert(0, str(group))
        padded = [f"{value:>{size}}" for value, (_, size) in zip(values, columns, strict=False)]
        line = _cells(padded + values[len(columns) :], width)
        line.stylize(style, 44 if has_groups else 36)
        lines.append(line)
    return lines


def _entry_values(
    sequence: pb.Sequence, index: int, block_id: int, block: pb.Block | None, block_size: int
) -> tuple[list[str], str]:
    """The texts of an entry's columns, and the style of those about its block."""
    start = index * block_size
    stop = min(start + block_size, sequence.token_count)
    tokens = f"{start:,} to {stop - 1:,}" if stop > start else "none yet"
    values = [f"{index:,}", tokens, f"{block_id:,}"]
    if block is None:
        return values, ""
    kind = kind_of(block)
    pins = block.pin_count + block.prefix_pin_count
    state = "held" if kind is BlockKind.ACTIVE else LOOKS[kind].label
    values += [state, f"{block.reference_count:,}", str(block.priority or "–"), f"{pins:,}"]
    values.append(block.prefix_hash.hex()[:16] or "–")
    return values, LOOKS[kind].style


def _cells(values: Iterable[str], width: int) -> Text:
    line = Text("  ".join([" ", *values])[1:], no_wrap=True)
    line.truncate(width)
    return line


def _map_height(height: int) -> int:
    return min(MAX_MAP_ROWS, height // 4) + 2
