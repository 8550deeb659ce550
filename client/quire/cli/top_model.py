"""The state of `quire top`: looks at cachemgr, rates between them, blocks, keys, the user's position. Pure."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cli.snapshot import ratio
from quire.client.block_kinds import kind_of

Entry = pb.Sequence | pb.Lease | pb.Tenant
Key = tuple[str, int]
"""The key of a row: a lease's prefix or a tenant, and a sequence id."""

RATE_WINDOW_S = 5.0
MAX_TREND = 120
"""The most looks of a trend."""


# Answers of cachemgr.


@dataclass(frozen=True, slots=True)
class Look:
    """One round of questions.

    at_s        when, by a clock that never goes back
    pools       all of them, by name
    statistics  their counters, by name
    pool        the pool of the following fields; "" if there is none
    leases, sequences, tenants  a page of each
    is_cut      which of those have more than the page
    sequence    the requested one, with its block table if the server gave it; None if it has ended
    """

    at_s: float
    pools: tuple[pb.Pool, ...] = ()
    statistics: Mapping[str, pb.PoolStatistics] = field(default_factory=lambda: MappingProxyType({}))
    pool: str = ""
    leases: tuple[pb.Lease, ...] = ()
    sequences: tuple[pb.Sequence, ...] = ()
    tenants: tuple[pb.Tenant, ...] = ()
    is_cut: frozenset["Tab"] = frozenset()
    sequence: pb.Sequence | None = None

    @property
    def chosen(self) -> pb.Pool | None:
        """The pool that the rest is of."""
        return next((pool for pool in self.pools if pool.name == self.pool), None)

    def tenant_of(self, lease_id_prefix: str) -> str:
        """The tenant of a lease of the page; "" if it is not on it."""
        return next((lease.tenant for lease in self.leases if lease.lease_id_prefix == lease_id_prefix), "")


@dataclass(frozen=True, slots=True)
class Rates:
    """The recent activity. hit_ratio is None if no prompt was admitted; speeds are per second, the oldest first.

    prompt     tokens of admitted prompts, those found in the cache included
    generated  tokens that steps added to sequences
    computed   tokens with keys and values that steps computed: of prompts, and generated ones
    """

    steps_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    evicted_per_s: float = 0.0
    hit_ratio: float | None = None
    step_speeds: tuple[float, ...] = ()
    generated_tokens_per_s: float = 0.0
    computed_tokens_per_s: float = 0.0


class Trend:
    """The last looks at one pool's counters."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, pb.PoolStatistics]] = deque(maxlen=MAX_TREND)

    def add(self, at_s: float, statistics: pb.PoolStatistics) -> None:
        """Take a look; those of an epoch before are forgotten."""
        if self._seen and self._seen[-1][1].epoch != statistics.epoch:
            self._seen.clear()
        self._seen.append((at_s, statistics))

    def rates(self) -> Rates:
        """Rates over the last RATE_WINDOW_S, or over a shorter time after the start."""
        if len(self._seen) < 2:
            return Rates()
        end_s, last = self._seen[-1]
        start_s, first = next(seen for seen in self._seen if end_s - seen[0] <= RATE_WINDOW_S or seen is self._seen[-2])

        def per_s(count_of: Callable[[pb.PoolStatistics], int]) -> float:
            return (count_of(last) - count_of(first)) / (end_s - start_s)

        return Rates(
            steps_per_s=per_s(lambda seen: seen.computed_step_count),
            prompt_tokens_per_s=per_s(lambda seen: seen.admitted_token_count),
            evicted_per_s=per_s(lambda seen: seen.evicted_block_count),
            hit_ratio=ratio(
                last.cached_token_count - first.cached_token_count,
                last.admitted_token_count - first.admitted_token_count,
            ),
            step_speeds=tuple(self._step_speeds()),
            generated_tokens_per_s=per_s(lambda seen: seen.generated_token_count),
            computed_tokens_per_s=per_s(lambda seen: seen.computed_token_count),
        )

    def _step_speeds(self) -> Iterator[float]:
        previous_s, previous = self._seen[0]
        for at_s, statistics in list(self._seen)[1:]:
            yield (statistics.computed_step_count - previous.computed_step_count) / (at_s - previous_s)
            previous_s, previous = at_s, statistics


class BlockBook:
    """A pool's blocks by the last events, or by the last page of each part.

    Keeps the blocks themselves only with events; a pool that is too big for that has its kinds.
    """

    def __init__(self, num_blocks: int) -> None:
        """num_blocks without the null block. All are free at first."""
        self.kinds = bytearray(num_blocks)
        self.is_whole = False
        self._blocks: dict[int, pb.Block] = {}

    def apply(self, answer: pb.WatchBlocksResponse) -> None:
        """Apply an answer of WatchBlocks."""
        if answer.cleared:
            self.kinds = bytearray(len(self.kinds))
            self._blocks.clear()
            self.is_whole = False
        for event in answer.events:
            block = event.block
            self._put(block)
            if block.state == pb.BLOCK_STATE_FREE:
                self._blocks.pop(block.block_id, None)
            else:
                self._blocks[block.block_id] = block
        self.is_whole |= bool(answer.cursor)

    def apply_page(self, blocks: Iterable[pb.Block], *, is_last: bool) -> None:
        """Apply a page of ListBlocks."""
        for block in blocks:
            self._put(block)
        self.is_whole |= is_last

    def block(self, block_id: int) -> pb.Block | None:
        """A block that is not free, None if it is or if blocks are not kept."""
        return self._blocks.get(block_id)

    def _put(self, block: pb.Block) -> None:
        if 0 < block.block_id <= len(self.kinds):  # else of an epoch with another size
            self.kinds[block.block_id - 1] = kind_of(block)


# The user's position.


class Tab(Enum):
    """The kind of the list."""

    SEQUENCES = "sequences"
    LEASES = "leases"
    TENANTS = "tenants"


class Action(Enum):
    """An action of the program for a key, beside drawing."""

    QUIT = "quit"
    ASK = "ask"


@dataclass(slots=True)
class Place:
    """The user's position: pool, list, row, filter.

    pool      "": the first
    selected  the row; while it is missing, the one at its place
    filter    a text that rows must have in their tenant's or lease's name
    typed     the filter that is being typed; None if none is
    opened    the sequence that is open
    offset    the first line shown of its block table
    """

    pool: str = ""
    tab: Tab = Tab.SEQUENCES
    selected: Key | None = None
    index: int = 0
    filter: str = ""
    typed: str | None = None
    opened: Key | None = None
    offset: int = 0
    shows_map: bool = True
    shows_help: bool = False

    def rows(self, look: Look) -> list[Entry]:
        """The rows of the list, filtered."""
        return rows_of(look, self.tab, self.filter)

    def selected_index(self, rows: Sequence[Entry]) -> int:
        """Index of the selected row; 0 if there are no rows."""
        for index, row in enumerate(rows):
            if key_of(row) == self.selected:
                return index
        return max(0, min(self.index, len(rows) - 1))

    def press(self, key: str, look: Look, *, page: int) -> Action | None:
        """A key was pressed: a character, or a name such as "up" or "enter". page is the rows a page key moves by."""
        if self.typed is not None:
            return self._type(key)
        if self.shows_help:
            self.shows_help = False
            return Action.QUIT if key == "q" else None
        if key in _MOVES or key in _PAGES:
            self._move(_MOVES.get(key, 0) + page * _PAGES.get(key, 0), look)
            return None
        return self._command(key, look)

    def _command(self, key: str, look: Look) -> Action | None:
        match key:
            case "q":
                return Action.QUIT
            case "p":
                return self._next_pool(look)
            case "tab":
                self._turn_to(_NEXT_TAB[self.tab])
            case "enter" | "right" if self.opened is None:
                return self._open(look)
            case "escape" | "left" | "backspace":
                return self._back()
            case "/":
                self.opened, self.typed = None, ""
            case "b":
                self.shows_map = not self.shows_map
            case "?" | "h":
                self.shows_help = True
        return None

    def _type(self, key: str) -> Action | None:
        assert self.typed is not None, "only while a filter is typed"
        match key:
            case "enter":
                self.filter, self.typed = self.typed, None
                self.selected, self.index = None, 0
                return Action.ASK
            case "escape":
                self.typed = None
            case "backspace":
                self.typed = self.typed[:-1]
            case _ if len(key) == 1:
                self.typed += key
        return None

    def _move(self, by: int, look: Look) -> None:
        if self.opened is not None:
            num_rows = 0 if look.sequence is None else look.sequence.block_count
            self.offset = max(0, min(self.offset + by, num_rows - 1))
            return
        rows = self.rows(look)
        self.index = max(0, min(self.selected_index(rows) + by, len(rows) - 1))
        self.selected = key_of(rows[self.index]) if rows else None

    def _next_pool(self, look: Look) -> Action | None:
        names = [pool.name for pool in look.pools]
        if len(names) < 2:
            return None
        self.pool = names[(names.index(look.pool) + 1) % len(names)] if look.pool in names else names[0]
        self.opened, self.selected, self.index = None, None, 0
        return Action.ASK

    def _turn_to(self, tab: Tab) -> None:
        self.tab, self.opened, self.selected, self.index = tab, None, None, 0

    def _open(self, look: Look) -> Action | None:
        """A sequence is looked at; a lease's or a tenant's sequences are listed."""
        rows = self.rows(look)
        if not rows:
            return None
        lease_or_tenant, sequence_id = key_of(rows[self.selected_index(rows)])
        if self.tab is Tab.SEQUENCES:
            self.opened, self.offset = (lease_or_tenant, sequence_id), 0
        else:
            self.filter = lease_or_tenant
            self._turn_to(Tab.SEQUENCES)
        return Action.ASK

    def _back(self) -> Action | None:
        """Out of a sequence, else out of the filter."""
        if self.opened is not None:
            self.opened = None
            return None
        self.filter = ""
        return Action.ASK


_FAR = 2**31
_MOVES = {"up": -1, "k": -1, "down": 1, "j": 1, "home": -_FAR, "g": -_FAR, "end": _FAR, "G": _FAR}
_PAGES = {"page up": -1, "page down": 1, " ": 1}
_NEXT_TAB = {Tab.SEQUENCES: Tab.LEASES, Tab.LEASES: Tab.TENANTS, Tab.TENANTS: Tab.SEQUENCES}


def key_of(entry: Entry) -> Key:
    """The identity of a row."""
    match entry:
        case pb.Sequence():
            return entry.lease_id_prefix, entry.sequence_id
        case pb.Lease():
            return entry.lease_id_prefix, -1
        case _:
            return entry.name, -1


def rows_of(look: Look, tab: Tab, wanted: str) -> list[Entry]:
    """The entries of a list with `wanted` in their tenant's or lease's name, in any case."""
    pages: dict[Tab, Sequence[Entry]] = {
        Tab.SEQUENCES: look.sequences,
        Tab.LEASES: look.leases,
        Tab.TENANTS: look.tenants,
    }
    entries = pages[tab]
    if not wanted:
        return list(entries)
    tenants = {lease.lease_id_prefix: lease.tenant for lease in look.leases}
    wanted = wanted.lower()

    def matches(entry: Entry) -> bool:
        name = key_of(entry)[0]
        return wanted in name.lower() or (tab is not Tab.TENANTS and wanted in tenants.get(name, "").lower())

    return [entry for entry in entries if matches(entry)]


# Keys.

_NAMED_BYTES = {
    b"\r": "enter",
    b"\n": "enter",
    b"\t": "tab",
    b"\x7f": "backspace",
    b"\x08": "backspace",
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\x1b[C": "right",
    b"\x1bOC": "right",
    b"\x1b[D": "left",
    b"\x1bOD": "left",
    b"\x1b[H": "home",
    b"\x1b[1~": "home",
    b"\x1b[F": "end",
    b"\x1b[4~": "end",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
}


class KeyDecoder:
    """A terminal's input as keys: characters, and names for the others. Unknown ones are ignored."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def is_open(self) -> bool:
        """True if it waits for the rest of a key: after the escape key nothing more comes."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[str]:
        """The keys that are complete with these bytes."""
        self._rest += data
        keys = []
        while self._rest and (length := _length_of_key(self._rest)):
            taken, self._rest = self._rest[:length], self._rest[length:]
            if key := _name_of(taken):
                keys.append(key)
        return keys

    def flush(self) -> list[str]:
        """After a pause in the input, the remainder of an escape sequence is the escape key."""
        rest, self._rest = self._rest, b""
        return ["escape"] if rest[:1] == b"\x1b" else []


def _length_of_key(data: bytes) -> int:
    """Bytes of the first key; 0 if it is not complete."""
    if data[0] != 0x1B:
        length = 1 if data[0] < 0xC0 else 2 if data[0] < 0xE0 else 3 if data[0] < 0xF0 else 4
        return length if len(data) >= length else 0
    if len(data) == 1:
        return 0
    if data[1:2] == b"O":
        return 3 if len(data) >= 3 else 0
    if data[1:2] != b"[":
        return 1
    return next((end + 1 for end in range(2, len(data)) if 0x40 <= data[end] <= 0x7E), 0)


def _name_of(taken: bytes) -> str:
    """ "" for a key that has no name here."""
    if taken in _NAMED_BYTES:
        return _NAMED_BYTES[taken]
    if taken == b"\x1b":
        return "escape"
    text = taken.decode(errors="replace")
    return text if len(text) == 1 and text.isprintable() else ""
