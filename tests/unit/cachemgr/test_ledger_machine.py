"""The ledger against two independent models in plain Python: a worker that follows every order, and second books.

The worker has a memory. A slot's content is the tuple (layer group, tag, token 0, ..., token i) of the tokens that its
KV depends on. A step reads, through the worker's own block table of each layer group, the slots that its tokens see
there; tables change only by the grants' writes and passes. Steps run late, interleaved, fail, are skipped; reports are
delayed and repeated. Any error of the ledger in sharing, reuse, copies, windows or table writes is read
as a wrong tuple.

The books (`Books`) predict every answer of the ledger, item by item, and every block's state after it. Under LRU that
includes which block is evicted next; for the default policy they know the blocks that it must never evict.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from planning import (
    Admission,
    Breakpoint,
    CacheUse,
    ExpectedPrompt,
    Fork,
    HostCopyUse,
    PlanItem,
    Planned,
    Restore,
    StepOutcome,
    StepRequest,
    Trim,
    counts_of,
    host_counts_of,
    plan_step,
    report_of,
    sequence_of,
    sequences_of,
)

from quire.cache.v1 import attach_pb2
from quire.cache.v1 import cache_service_pb2 as pb
from quire.cache.v1.layer_spans import LayerGroupKind
from quire.cachemgr._core import DEFAULT_POLICY, NUM_CANDIDATES, Known, Ledger
from quire.cachemgr.blocks import BlockState
from quire.cachemgr.errors import CallRefused, Reason
from quire.cachemgr.geometry import Geometry, LayerGroup
from quire.cachemgr.service.messages import statistics_of

VOCAB = 2
MAX_DRAFTS = 4
TTL_S = 10.0
EPOCH = 7
NAMESPACES = ((b"", b""), (b"salt", b""), (b"", bytes(range(32))))
"""Salts and adapters."""
TENANTS = ("", "acme")
FINGERPRINT = "model-1"
POISON = ("poison",)
NUM_EXAMPLES = int(os.environ.get("QUIRE_MACHINE_EXAMPLES", "400"))
NUM_EXAMPLES_OF_NIGHT = 1_000
FULL = LayerGroup(LayerGroupKind.FULL, 0, 1)


def sliding(window: int) -> LayerGroup:
    return LayerGroup(LayerGroupKind.SLIDING, window, 1)


def chunked(window: int) -> LayerGroup:
    return LayerGroup(LayerGroupKind.CHUNKED, window, 1)


LAYER_GROUPS = (
    *[(FULL,)] * 4,
    (FULL, sliding(3)),
    (sliding(4),),
    (FULL, sliding(1), chunked(4)),
    (FULL, FULL, sliding(5), sliding(5)),
)
PHASES = (Phase.generate,) if "QUIRE_MACHINE_EXAMPLES" in os.environ else tuple(Phase)
"""A run with a given number of examples is to find failures, not the smallest one."""


@dataclass(frozen=True, slots=True)
class Share:
    """The limits of a tenant, in blocks."""

    floor: int
    limit: int
    pin_budget: int
    keep_limit: int


def first_seen(group: LayerGroup, position: int) -> int:
    """The first position that a token at this one sees in the layers of a group."""
    if group.kind is LayerGroupKind.FULL:
        return 0
    if group.kind is LayerGroupKind.SLIDING:
        return max(0, position - group.window + 1)
    return position // group.window * group.window


def held(table: list[int]) -> list[int]:
    """The blocks of a table; entries that were passed are null."""
    return [block for block in table if block]


def num_passed(table: list[int | None]) -> int:
    """The leading entries that are null; None is one that is still to be filled."""
    return next((index for index, block in enumerate(table) if block != 0), len(table))


def blocks_in_order(tables: list[list[int]], first: int = 0) -> list[int]:
    """All blocks from an index of the tables on. They are let go in reverse order: children before their parents."""
    indexes = range(first, max(map(len, tables)))
    blocks = [table[index] for index in indexes for table in reversed(tables) if index < len(table)]
    return held(blocks)


def pack(tokens) -> bytes:
    return b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)


def root_of(tag: int) -> bytes:
    tenant, (salt, adapter) = TENANTS[tag // len(NAMESPACES)], NAMESPACES[tag % len(NAMESPACES)]
    root = sha256(b"quire prefix v1")
    for part in (tenant.encode(), salt, FINGERPRINT.encode(), *([adapter] if adapter else [])):
        root.update(len(part).to_bytes(8, "little") + part)
    return root.digest()


@lru_cache(maxsize=100_000)
def hash_of(prefix: tuple, block_size: int) -> bytes:
    """The prefix hash of the blocks that end with the last token of prefix = (tag, token, ...)."""
    if len(prefix) == 1:
        return root_of(prefix[0])
    return sha256(hash_of(prefix[:-block_size], block_size) + pack(prefix[-block_size:])).digest()


def tenant_of(key: tuple) -> str:
    """The name of the tenant that content belongs to, by its group, tag and tokens."""
    return TENANTS[key[1] // len(NAMESPACES)]


def sample(prefix: tuple) -> int:
    return (sum(prefix) + len(prefix) // 3) % VOCAB


def accept(prefix: tuple, num_drafts: int) -> list[int]:
    """The tokens that a run with drafts samples: accepted drafts, and one more."""
    tokens: list[int] = []
    for end in range(len(prefix) - num_drafts, len(prefix) + 1):
        tokens.append(sample(prefix[:end]))
        if end == len(prefix) or prefix[end] != tokens[-1]:
            break
    return tokens


class Token:
    """A token of a sequence: given by the client, or promised by a run; `known` once the ledger has seen it."""

    __slots__ = ("known", "value")

    def __init__(self, value: int | None = None) -> None:
        self.value = value
        self.known = value is not None


# -- the worker -----------------------------------------------------------------------------------------------------


@dataclass
class Row:
    tables: list[dict[int, int]]
    """By layer group and index; an entry that is not there is null."""
    last: tuple[int, int] | None = None
    """Position and id of the token sampled last."""


@dataclass
class WorkerLease:
    rows: dict[int, Row] = field(default_factory=dict)
    offloaded: set[int] = field(default_factory=set)
    next_step: int = 1
    last_failed: int = 0


@dataclass
class PlannedRun:
    seq_id: int
    tag: int
    start: int
    tokens: list[Token]
    """All tokens of the sequence up to the end of the run."""
    tables: list[list[int]]
    sampled: list[Token]
    """Those that it samples: none, or one more than its drafts, of which the last ones stay unknown."""
    num_drafts: int = 0
    """Its last tokens, which are guesses."""


@dataclass
class PlannedStep:
    """The client's request, and the test's state at the moment of the grant."""

    plan: Planned
    runs: list[PlannedRun]
    generations: dict[int, int]
    """The number of allocations of each block that the step accesses."""


def writes_of(plan: Planned) -> list[tuple[int, int, int, int]]:
    """Sequence, layer group, first index and number of blocks of each table write."""
    groups = plan.write_groups or [0] * len(plan.write_seq_ids)
    return list(zip(plan.write_seq_ids, groups, plan.write_first_indexes, plan.write_block_counts, strict=True))


@dataclass(frozen=True)
class DiskRecord:
    prefix_hash: bytes
    group: int
    tenant: str
    slots: list[tuple]


@dataclass
class Report:
    step_number: int
    outcome: StepOutcome
    computed: list[tuple[int, int]]
    sampled: dict[int, list[int]]


class Worker:
    def __init__(self, geometry: Geometry) -> None:
        self.block_size = geometry.block_size
        self.groups = geometry.layer_groups
        self.slots = [[POISON] * self.block_size for _ in range(geometry.num_blocks)]
        self.host_slots = [[POISON] * self.block_size for _ in range(geometry.num_host_blocks)]
        self.leases: dict[str, WorkerLease] = {}
        self.disk: dict[int, DiskRecord] = {}
        """The records that are there, findable or not; the ones that were written first in front."""

    def obey(self, order: attach_pb2.DiskOrder, *, fails: bool) -> bool:
        """Carry out an order about the disk, as far as it goes; return whether it is done."""
        match order.WhichOneof("order"):
            case "write":
                self.disk.pop(order.write.disk_block_id, None)
                if not fails:
                    slots = list(self.host_slots[order.write.host_block_id])
                    record = DiskRecord(order.write.prefix_hash, order.write.layer_group, order.write.tenant, slots)
                    self.disk[order.write.disk_block_id] = record
            case "read":
                record = self.disk.get(order.read.disk_block_id)
                assert record is not None, "a disk block is read that was never written"
                content = (order.read.prefix_hash, order.read.layer_group)
                assert (record.prefix_hash, record.group) == content, "a disk block has other content than is read"
                self.host_slots[order.read.host_block_id] = [POISON] * self.block_size if fails else list(record.slots)
            case _:
                erased = TENANTS if not order.erase.HasField("tenant") else (order.erase.tenant,)
                self.disk = {block: record for block, record in self.disk.items() if record.tenant not in erased}
                return True
        return not fails

    def new_row(self, last: tuple[int, int] | None = None) -> Row:
        return Row([{} for _ in self.groups], last)

    def read(self, row: Row, group: int, position: int) -> tuple:
        return self.slots[row.tables[group][position // self.block_size]][position % self.block_size]

    def write(self, row: Row, group: int, position: int, content: tuple) -> None:
        self.slots[row.tables[group][position // self.block_size]][position % self.block_size] = content

    def run(self, lease_id: str, step: PlannedStep, *, skip: bool, fail: bool) -> Report:
        lease, plan = self.leases[lease_id], step.plan
        assert plan.step_number == lease.next_step
        lease.next_step += 1
        self.apply(lease, plan)
        is_doomed = lease.last_failed > plan.known_step
        if is_doomed or fail or skip:
            if plan.run_seq_ids or not skip:
                lease.last_failed = plan.step_number
            if fail and not is_doomed:
                self.scribble(lease, plan)
            outcome = StepOutcome.SKIPPED if skip else StepOutcome.FAILED
            return Report(plan.step_number, outcome, [], {})
        return self.compute(lease, step)

    def apply(self, lease: WorkerLease, plan: Planned) -> None:
        for seq_id in plan.released_ids:
            if seq_id in lease.offloaded:
                lease.offloaded.remove(seq_id)
            else:
                del lease.rows[seq_id]
        for seq_id in plan.offloaded_ids:
            del lease.rows[seq_id]
            lease.offloaded.add(seq_id)
        for parent, child in zip(plan.fork_parent_ids, plan.fork_child_ids, strict=True):
            assert child not in lease.rows
            lease.rows[child] = self.new_row(lease.rows[parent].last)
        for seq_id, group, count in zip(plan.passed_seq_ids, plan.passed_groups, plan.passed_counts, strict=True):
            table = lease.rows[seq_id].tables[group]
            for index in range(count):
                table.pop(index, None)
        cursor = 0
        for seq_id, group, first, count in writes_of(plan):
            assert count >= 1
            lease.offloaded.discard(seq_id)
            if seq_id not in lease.rows:
                lease.rows[seq_id] = self.new_row()
            table = lease.rows[seq_id].tables[group]
            for offset, block in enumerate(plan.write_block_ids[cursor : cursor + count]):
                assert block != 0, "the null block in a table"
                table[first + offset] = block
            cursor += count
        assert cursor == len(plan.write_block_ids)
        assert not set(plan.copy_sources) & set(plan.copy_targets), "a block is source and target of copies"
        for source, host in zip(plan.offload_sources, plan.offload_targets, strict=True):
            self.host_slots[host] = list(self.slots[source])
        for source, target in zip(plan.copy_sources, plan.copy_targets, strict=True):
            self.slots[target] = list(self.slots[source])
        for host, target in zip(plan.restore_sources, plan.restore_targets, strict=True):
            self.slots[target] = list(self.host_slots[host])

    def scribble(self, lease: WorkerLease, plan: Planned) -> None:
        """A model that fails may have written anything where it was allowed to write."""
        for seq_id, start, count in zip(plan.run_seq_ids, plan.run_starts, plan.run_token_counts, strict=True):
            for group, position in itertools.product(range(len(self.groups)), range(start, start + count)):
                self.write(lease.rows[seq_id], group, position, POISON)

    def compute(self, lease: WorkerLease, step: PlannedStep) -> Report:
        plan = step.plan
        computed, sampled = [], {}
        given = dict(zip(plan.given_run_indexes, range(len(plan.given_run_indexes)), strict=True))
        draft_counts = plan.run_draft_counts or [0] * len(step.runs)
        for i, run in enumerate(step.runs):
            row, start, end = lease.rows[run.seq_id], run.start, len(run.tokens)
            assert run.num_drafts == draft_counts[i]
            if i in given:
                first = start + (run.num_drafts > 0)
                values = [token.value for token in run.tokens[first:end]]
                digest = bytes(plan.given_digests[16 * given[i] : 16 * given[i] + 16])
                assert digest == sha256(pack(values)).digest()[:16], "digest of other tokens"
            else:
                assert end - start == 1, "a run of several tokens without their ids"
                values = []
            if i not in given or run.num_drafts:
                assert row.last is not None
                assert row.last[0] == start, "the token sampled last stands elsewhere"
                values = [row.last[1], *values]
            prefix = (run.tag, *(token.value for token in run.tokens[:start]))
            for position, value in enumerate(values, start):
                prefix = (*prefix, value)
                for group in range(len(self.groups)):
                    self.write(row, group, position, (group, *prefix))
            tokens = accept(prefix, run.num_drafts) if plan.run_samples[i] else []
            end -= run.num_drafts - len(tokens[1:])
            computed.append((run.seq_id, end))
            if tokens:
                row.last = (end, tokens[-1])
                sampled[run.seq_id] = tokens
        for run in step.runs:
            row, expected = lease.rows[run.seq_id], (run.tag, *(token.value for token in run.tokens))
            for number, group in enumerate(self.groups):
                for position in range(first_seen(group, run.start), len(run.tokens)):
                    found, content = self.read(row, number, position), (number, *expected[: position + 2])
                    assert found == content, f"sequence {run.seq_id} reads {found} at {position} in group {number}"
            for token, value in zip(run.sampled, sampled.get(run.seq_id, ()), strict=False):
                token.value = value
        return Report(plan.step_number, StepOutcome.COMPUTED, computed, sampled)

    def fence(self, lease_id: str) -> None:
        del self.leases[lease_id]

    def lose_all_but_memory(self) -> None:
        """The process dies; the pool's memory is kept, the host tier is not."""
        self.leases.clear()
        self.host_slots = [[POISON] * self.block_size for _ in self.host_slots]


@dataclass
class BookOrder:
    """An order about the disk that is not reported."""

    kind: str
    host: int
    disk: int
    key: tuple
    """Group, tag and tokens of the content."""
    tenants: tuple[int, ...] = ()
    """Of an erasure."""
    is_dropped: bool = False
    """A reset was about its content."""


# -- the books kept twice -------------------------------------------------------------------------------------------


@dataclass(eq=False)
class BookSequence:
    seq_id: int
    tag: int
    tokens: list[Token]
    tables: list[list[int]]
    """By layer group; 0 where the block was passed."""
    computed: int
    scheduled: int
    published: int
    sampled_at: int | None = None
    released: bool = False
    host: list[list[int]] | None = None
    """Its host blocks while it is in the host tier, by layer group, from the first one on that was not passed."""
    reserved_tokens: int = 0
    promised: int = 0
    """Blocks that are kept for its reservation, as they were counted last."""
    cache_use: CacheUse = CacheUse.READ_AND_WRITE
    withheld: int = 0
    """Leading blocks that a reset has dropped: they are not published at its restore."""
    num_drafts: int = 0
    """In flight."""
    kept: list[tuple[int, int]] = field(default_factory=list)
    """The prefixes of its breakpoints, the shorter ones first: full blocks, and milliseconds from a use to the end."""

    @property
    def known(self) -> int:
        return sum(token.known for token in self.tokens)

    @property
    def takes_drafts(self) -> bool:
        return self.sampled_at == self.scheduled == len(self.tokens) - 1

    @property
    def tenant(self) -> int:
        return self.tag // len(NAMESPACES)

    def prefix(self, num_tokens: int) -> tuple:
        return (self.tag, *(token.value for token in self.tokens[:num_tokens]))


@dataclass(eq=False)
class BookRun:
    sequence: BookSequence
    end: int
    covers: int
    fills: range
    """Indexes of the blocks that it fills with tokens known when it was planned."""
    sampled: list[Token]
    num_drafts: int = 0
    heirs: list[list] = field(default_factory=list)
    """Sequences after this one was offloaded, each with the part of the run that it needs."""


@dataclass(eq=False)
class BookStep:
    number: int
    runs: list[BookRun]
    touched: set[int]
    num_released: int
    host_touched: set[int] = field(default_factory=set)
    arriving: dict[int, tuple] = field(default_factory=dict)
    """Host blocks to which it copies evicted blocks, with what content, as long as no reset was about it."""
    is_doomed: bool = False
    let_go: list[int] = field(default_factory=list)
    """Blocks that left a table while it was the last step in flight."""


@dataclass
class BookLease:
    tenant: int
    names_tenants: bool
    sequences: dict[int, BookSequence] = field(default_factory=dict)
    steps: list[BookStep] = field(default_factory=list)
    changes: list[tuple[BookSequence, int, int]] = field(default_factory=list)
    """Entries that have another block since a report: sequence, layer group, index."""
    computed: list[BookSequence] = field(default_factory=list)
    """Sequences with tokens that were reported since the last plan."""
    next_step: int = 1
    settled: int = 0
    known: int = 0


@dataclass(eq=False)
class BookPin:
    prefix: tuple
    """Tag and tokens."""
    blocks: list[int]
    until: float

    @property
    def tenant(self) -> int:
        return self.prefix[0] // len(NAMESPACES)


class Writes:
    """The block table writes of a plan, taken one by one as the books expect them."""

    def __init__(self, plan: Planned) -> None:
        self.entries = writes_of(plan)
        self.ids = list(plan.write_block_ids)
        self.copies = list(zip(plan.copy_sources, plan.copy_targets, strict=True))
        self.offloads = list(zip(plan.offload_sources, plan.offload_targets, strict=True))

    def take(self, seq_id: int, group: int, first: int, count: int) -> list[int]:
        assert self.entries, f"no write for sequence {seq_id} from {first} on in group {group}"
        assert self.entries.pop(0) == (seq_id, group, first, count)
        ids, self.ids = self.ids[:count], self.ids[count:]
        return ids


class Books:
    """Plain dictionaries, everything counted anew each time."""

    def __init__(self, geometry: Geometry, shares: Sequence[Share], *, is_lru: bool, has_advice: bool) -> None:
        self.geometry = geometry
        self.shares = shares
        """By tenant."""
        self.owners: dict[int, int] = {}
        """The tenant that each block was handed out for last."""
        self.is_lru = is_lru and not has_advice
        """True if the evicted block is known beforehand: the block parked longest ago."""
        self.has_advice = has_advice
        """True if any parked block may be evicted next."""
        self.size = geometry.block_size
        self.groups = geometry.layer_groups
        self.has_windows = any(group.kind is not LayerGroupKind.FULL for group in self.groups)
        self.leases: dict[str, BookLease] = {}
        self.index: dict[tuple, int] = {}
        """By layer group, tag and tokens."""
        self.keeps: dict[int, tuple[int, int]] = {}
        """Blocks that breakpoints keep, the least recently used first: the end, and the time from a use to it, in
        milliseconds."""
        self.now_ms = 0
        self.written = 0
        """Tokens."""
        self.drafted, self.accepted = 0, 0
        """Drafts that steps verified, and accepted."""
        self.stranded: list[int] = []
        """Blocks that nobody could find any more when another one was evicted, the last one last."""
        self.pins: dict[bytes, BookPin] = {}
        """By id."""
        self.sealed: set[int] = set()
        self.lru: list[int] = []
        self.copies: dict[int, tuple] = {}
        """Group, tag and tokens of the evicted blocks that can be found in the host tier, by host block."""
        self.on_disk: dict[int, tuple] = {}
        """The same on the disk, by disk block."""
        self.orders: dict[int, BookOrder] = {}
        """Not reported, by number."""
        self.reads_now: list[attach_pb2.DiskOrder] = []
        """Ordered by the plan that is being followed."""
        self.expected_erasures: list[tuple[int, ...]] = []
        self.published_at: dict[int, int] = {}
        self.reset_at: dict[int, int] = {}
        """By tenant: content that was published before is not copied to the host tier any more."""
        self.new: set[int] = set()
        """Blocks that were published since a reset was begun."""
        self.generations: Counter[int] = Counter()
        self.let_go: dict[int, int] = {}
        self.ticks = itertools.count()
        self.evicted = 0
        self.allocated = 0
        self.knows_parents = self.groups == (FULL,)
        self.refused: list[tuple[PlanItem, int, Reason]] = []

    # what is held, retired, free: counted anew from the tables and the steps in flight

    def holders(self) -> Counter[int]:
        sequences = (sequence for lease in self.leases.values() for sequence in lease.sequences.values())
        holders = Counter(block for sequence in sequences for table in sequence.tables for block in table)
        del holders[0]
        return holders

    def touched(self) -> set[int]:
        return set().union(*(step.touched for lease in self.leases.values() for step in lease.steps))

    def states(self) -> dict[int, BlockState]:
        holders, touched = self.holders(), self.touched() | self.touched_now
        findable = set(self.index.values())
        states = {}
        for block in range(1, self.geometry.num_blocks):
            if holders[block]:
                states[block] = BlockState.ACTIVE
            elif block in touched:
                states[block] = BlockState.RETIRED
            else:
                states[block] = BlockState.CACHED if block in findable else BlockState.FREE
        return states

    step: BookStep | None = None
    """The step that is being planned, or was planned last."""
    touched_now: frozenset[int] | set[int] = frozenset()
    """Sources of the copies of the step that is being planned."""
    host_touched_now: frozenset[int] | set[int] = frozenset()

    def host_states(self) -> dict[int, str]:
        sequences = [s for lease in self.leases.values() for s in lease.sequences.values()]
        held = [block for sequence in sequences for blocks in sequence.host or () for block in blocks]
        assert len(set(held)) == len(held), "a host block is of two sequences"
        steps = [step for lease in self.leases.values() for step in lease.steps]
        touched = set(self.host_touched_now).union(*(step.host_touched for step in steps), self.hosts_ordered())
        assert not set(held) & self.copies.keys(), "a host block is of a sequence, and a copy of an evicted block"
        states = dict.fromkeys(range(self.geometry.num_host_blocks), "free")
        states |= dict.fromkeys(touched, "retired") | dict.fromkeys(self.copies, "cached") | dict.fromkeys(held, "held")
        return states

    def evictable_copies(self) -> set[int]:
        steps = [step for lease in self.leases.values() for step in lease.steps]
        touched = set(self.host_touched_now).union(*(step.host_touched for step in steps), self.hosts_ordered())
        return self.copies.keys() - touched

    # the disk: the ledger chooses what is written and read, and the block that makes room

    def hosts_ordered(self) -> set[int]:
        return {order.host for order in self.orders.values() if order.kind != "erase"}

    def disk_states(self) -> dict[int, str]:
        states = dict.fromkeys(range(self.geometry.num_disk_blocks), "free")
        states |= dict.fromkeys((order.disk for order in self.orders.values() if order.kind != "erase"), "retired")
        return states | dict.fromkeys(self.on_disk, "cached")

    def num_copies(self) -> int:
        """Copies in the host tier, those on their way there included."""
        steps = [self.step, *(step for lease in self.leases.values() for step in lease.steps)]
        arriving = {block for step in steps if step is not None for block in step.arriving}
        reads = [order for order in self.orders.values() if order.kind == "read" and not order.is_dropped]
        return len(self.copies) + len(arriving) + len(reads)

    def take_orders(self, orders: Sequence[attach_pb2.DiskOrder]) -> None:
        """Writes and erasures that the ledger has ordered."""
        for order in orders:
            if order.WhichOneof("order") == "erase":
                tenants = tuple(range(len(TENANTS)))
                if order.erase.HasField("tenant"):
                    tenants = (TENANTS.index(order.erase.tenant),)
                assert tenants == self.expected_erasures.pop(0), "the content of other tenants is erased"
                self.orders[order.order_number] = BookOrder("erase", -1, -1, (), tenants)
                continue
            assert order.WhichOneof("order") == "write", "a read that no admission waits for"
            host, disk = order.write.host_block_id, order.write.disk_block_id
            key = self.copies.get(host)
            assert key is not None, f"host block {host} is written to the disk, and is no copy"
            assert (order.write.layer_group, order.write.prefix_hash) == (key[0], hash_of(key[1:], self.size))
            assert order.write.tenant == tenant_of(key)
            assert key not in self.on_disk.values(), "a copy is written that is on the disk"
            self.take_disk_block(disk)
            self.orders[order.order_number] = BookOrder("write", host, disk, key)

    def take_disk_block(self, disk: int) -> None:
        states = self.disk_states()
        is_used = any(order.disk == disk for order in self.orders.values())
        assert not is_used, f"disk block {disk} is written while it is in use"
        assert states[disk] == "free" or "free" not in states.values(), (
            "a copy was evicted from a disk with free blocks"
        )
        self.on_disk.pop(disk, None)

    def take_reads(self, keys: list[tuple]) -> bool:
        """The reads that the ledger has ordered for an admission that needs these copies, which are on the disk alone.
        Returns True if the first of them is being read: the admission waits."""
        left = list(keys)
        while self.reads_now and left:
            order = self.reads_now[0]
            content = (order.read.layer_group, order.read.prefix_hash)
            while left and (left[0][0], hash_of(left[0][1:], self.size)) != content:
                left.pop(0)
            if not left:
                break
            self.reads_now.pop(0)
            host, disk, key = order.read.host_block_id, order.read.disk_block_id, left.pop(0)
            assert self.on_disk.get(disk) == key, f"disk block {disk} is read for something else"
            assert key not in self.copies.values(), "a copy is read that is in the host tier"
            states, evictable = self.host_states(), self.evictable_copies()
            is_room = self.num_copies() < self.geometry.host_cached_limit and "free" in states.values()
            assert states[host] == "free" if is_room else host in evictable, f"a read to host block {host}"
            self.copies.pop(host, None)
            self.generations[-1 - host] += 1
            self.orders[order.order_number] = BookOrder("read", host, disk, key)
        being_read = [order.key for order in self.orders.values() if order.kind == "read"]
        if not keys:
            return False
        is_room = self.num_copies() < self.geometry.host_cached_limit and "free" in self.host_states().values()
        is_there = keys[0] in self.on_disk.values() and keys[0] not in being_read
        assert not (is_there and is_room), "a copy on the disk is not read, though there is room"
        return keys[0] in being_read

    def reads_for(self, prefixes: list[tuple], num_found: int, num_copies: int) -> list[tuple]:
        """The keys of the copies on the disk that a prefix needs to be longer, if the host tier has room for all."""
        limit = self.geometry.host_cached_limit
        most = num_found + max(0, limit - num_copies) // len(self.groups)
        for tried in (prefixes, prefixes[:most]):
            length, places = self.longest_with_copies(tried, {*self.copies.values(), *self.on_disk.values()})
            if length > num_found and len(places) <= limit:
                return [key for _, _, key in places if key not in self.copies.values()]
        return []

    def end_order(self, number: int, *, is_done: bool) -> None:
        order = self.orders.pop(number, None)
        if order is None or order.kind == "erase":
            return
        if order.kind == "write" and is_done and not order.is_dropped and order.key not in self.on_disk.values():
            self.on_disk[order.disk] = order.key
        if order.kind == "read" and not order.is_dropped:
            if not is_done:
                self.on_disk.pop(order.disk, None)
            elif order.key not in self.copies.values():
                self.copies[order.host] = order.key

    def rest(self) -> None:
        """After every event: what became evictable goes to the recent end, in the order of release."""
        states, kept, findable = self.states(), self.kept(), set(self.index.values())
        cached = {block for block, state in states.items() if state is BlockState.CACHED and block not in kept}
        is_lost = lambda block: states[block] is BlockState.FREE or (block in self.sealed and block not in findable)  # noqa: E731
        self.keeps = {block: keep for block, keep in self.keeps.items() if not is_lost(block)}
        self.lru = [block for block in self.lru if block in cached]
        self.lru += sorted(cached - set(self.lru), key=self.order)

    def order(self, block: int) -> int:
        return self.let_go.get(block, -1)

    def num_room(self) -> int:
        states, kept = self.states(), self.kept()
        return sum(
            state in (BlockState.FREE, BlockState.CACHED) and block not in kept for block, state in states.items()
        )

    # breakpoints

    def use(self, tenant: int, prefixes: list[tuple[int, int]], table: list[int], num_found: int) -> None:
        """An admission, or a restore, with these prefixes: the last block of its table is used first."""
        num_kept = prefixes[-1][0] if prefixes else 0
        for index in reversed(range(max(num_found, num_kept))):
            longer = [ttl for num_blocks, ttl in prefixes if index < num_blocks]
            if longer or table[index] in self.keeps:
                self.keep(table[index], max(longer, default=0), self.now_ms)
        self.limit_keeps(tenant)

    def keep(self, block: int, ttl: int, now_ms: int) -> None:
        """The longest time counts, and no use shortens it."""
        until, known = self.keeps.pop(block, (0, 0))
        self.keeps[block] = (max(until, now_ms + max(ttl, known)), max(ttl, known))

    def keep_fresh(self, sequence: BookSequence, indexes: Collection[int]) -> None:
        for index in sorted(indexes, reverse=True):
            longer = [ttl for num_blocks, ttl in sequence.kept if index < num_blocks]
            if longer:
                self.keep(sequence.tables[0][index], max(longer), self.now_ms)
        self.limit_keeps(sequence.tenant)

    def limit_keeps(self, tenant: int) -> None:
        """The least recently used ones of the tenant end, and those of nobody else."""
        own = [block for block in self.keeps if self.owners[block] == tenant]
        for block in own[: max(0, len(own) - self.shares[tenant].keep_limit)]:
            del self.keeps[block]

    # pins

    def kept(self) -> set[int]:
        return {block for pin in self.pins.values() for block in pin.blocks}

    def pin(self, tag: int, tokens: list[int], until: float) -> Reason | bytes:
        """The id of the pin, if there is one then."""
        length, tables = self.longest_hit(self.prefixes(tag, tokens, len(tokens)))
        if not length:
            return Reason.PREFIX_NOT_CACHED
        tenant, blocks = tag // len(NAMESPACES), [block for table in tables for block in held(table)]
        prefix = (tag, *tokens[: length * self.size])
        pin_id = hash_of(prefix, self.size)[:16]
        if pin_id not in self.pins:
            if self.num_pinned(tenant) + len(set(blocks) - self.kept()) > self.shares[tenant].pin_budget:
                return Reason.PIN_BUDGET_SPENT
            if (reason := self.refuse(tenant, 0, parked=self.num_parked(blocks))) is not None:
                return reason
        self.pins[pin_id] = BookPin(prefix, blocks, until)
        self.rest()
        return pin_id

    def unpin(self, pin_id: bytes) -> None:
        pin, states = self.pins.pop(pin_id), self.states()
        for block in reversed(pin.blocks):
            if states[block] is BlockState.CACHED and block not in self.kept():
                self.let_go[block] = next(self.ticks)
        self.rest()

    def advance(self, now: float) -> None:
        self.now_ms = int(now * 1e3)
        for until_ms, pin_id in sorted((int(pin.until * 1e3), pin_id) for pin_id, pin in self.pins.items()):
            if until_ms <= self.now_ms:
                self.unpin(pin_id)
        self.keeps = {block: keep for block, keep in self.keeps.items() if keep[0] > self.now_ms}

    def num_pinned(self, tenant: int) -> int:
        return sum(self.owners[block] == tenant for block in self.kept())

    # reservations

    def is_at_risk(self, block: int) -> bool:
        """True if a holder would be handed out another block to write there: now, or while a step in flight is."""
        steps = [step for lease in self.leases.values() for step in lease.steps]
        is_let_go = block in self.touched_now or any(block in step.let_go for step in steps)
        return self.holders()[block] != 1 or block in self.sealed or is_let_go

    def needs(self, sequence: BookSequence, *, computed: int | None = None, shared: Collection[int] = ()) -> int:
        """Blocks that a sequence with a reservation may still have to be handed out; `shared` are to be shared."""
        if not sequence.reserved_tokens or sequence.host is not None:
            return 0
        first = (sequence.computed if computed is None else computed) // self.size
        most = self.num_blocks_for(sequence.reserved_tokens)
        missing = sum(max(0, most - len(table)) for table in sequence.tables)
        blocks = [block for table in sequence.tables for block in held(table[first:])]
        return missing + sum(block in shared or self.is_at_risk(block) for block in blocks)

    def needs_more(self, sequence: BookSequence, **changes: Any) -> int:
        return self.needs(sequence, **changes) - self.needs(sequence)

    def promise(self, *sequences: BookSequence) -> None:
        for sequence in sequences:
            sequence.promised = self.needs(sequence)

    # tenants

    def num_reserved(self, tenant: int) -> int:
        sequences = [s for lease in self.leases.values() for s in lease.sequences.values()]
        return sum(s.promised for s in sequences if s.tenant == tenant)

    def blocks_of(self, tenant: int, *wanted: BlockState) -> int:
        return sum(state in wanted and self.owners[block] == tenant for block, state in self.states().items())

    def num_held(self, tenant: int) -> int:
        """Blocks that nobody can take from the tenant: in a table, touched by a step in flight, or pinned."""
        return self.blocks_of(tenant, BlockState.ACTIVE, BlockState.RETIRED) + self.num_idle_pinned(tenant)

    def num_idle_pinned(self, tenant: int) -> int:
        states = self.states()
        return sum(states[block] is BlockState.CACHED and self.owners[block] == tenant for block in self.kept())

    def num_unclaimed(self, tenant: int) -> int:
        """Blocks that the tenant's floor promises beyond the reservations of its sequences."""
        return max(0, self.shares[tenant].floor - self.num_held(tenant) - self.num_reserved(tenant))

    def num_promised(self) -> int:
        return sum(self.num_reserved(tenant) + self.num_unclaimed(tenant) for tenant in range(len(TENANTS)))

    def refuse(self, tenant: int, needed: int, *, parked: int = 0, spared: int = 0) -> Reason | None:
        """The reason why the tenant can't take so many blocks, beside those that are promised."""
        taken, limit = needed + parked, self.shares[tenant].limit
        if not taken:
            return None
        is_limited = limit < self.geometry.num_blocks - 1
        if is_limited and self.num_held(tenant) + self.num_reserved(tenant) + taken > limit:
            return Reason.QUOTA_EXCEEDED
        others = self.num_promised() - self.num_unclaimed(tenant)
        return Reason.OUT_OF_BLOCKS if taken + spared > max(0, self.num_room() - others) else None

    def num_parked(self, blocks: Collection[int]) -> int:
        states, kept = self.states(), self.kept()
        return sum(states[block] is BlockState.CACHED and block not in kept for block in blocks)

    def num_rows(self) -> int:
        num_held = lambda lease: sum(s.host is None for s in lease.sequences.values())  # noqa: E731
        return sum(num_held(lease) + sum(step.num_released for step in lease.steps) for lease in self.leases.values())

    def drop(self, blocks: list[int], steps: list[BookStep]) -> None:
        """These table entries are gone already: note the order in which their blocks lost the last holder.

        Those in flight of their lease are `steps`: the last of them may still touch the blocks.
        """
        if steps:
            steps[-1].let_go += blocks
        holders, is_now = self.holders(), steps == [self.step]
        for block in reversed(blocks):
            # A block that the step being planned touches comes back with that step, at its place there.
            if is_now or not (holders[block] or block in self.touched_now):
                self.let_go[block] = next(self.ticks)
        self.rest()

    def hand_out(self, blocks: list[int], tenant: int) -> None:
        """The ledger chose these for a tenant: blocks without content first, then those that may be evicted.

        They have no holder.
        """
        for block in blocks:
            states = self.states()
            free = {b for b, state in states.items() if state is BlockState.FREE} - self.taken
            if free:
                assert block in free, f"block {block} handed out, {states[block]}, while {free} are free"
            else:
                self.check_eviction(block)
                self.evict(block)
            self.keeps.pop(block, None)
            self.taken.add(block)
            self.owners[block] = tenant
            self.sealed.discard(block)
            self.generations[block] += 1
            self.allocated += 1

    def check_eviction(self, block: int) -> None:
        """For all policies: only parked blocks are evicted, and a child that was parked before its parent goes first.

        If a block replaced another sequence's equal block, the policy does not know it as the parent of the blocks
        after that one: two sequences computed the same tokens, or a copy came after a reset.
        """
        if block in self.keeps:
            others = [other for other in self.lru if other not in self.keeps]
            assert not others, f"block {block} evicted, which is kept, before {others}"
        if self.has_advice:
            assert block in self.lru, f"block {block} evicted, it is not parked"
            return
        stranded = self.next_stranded()
        if stranded is not None:
            assert block == stranded, f"block {block} evicted before {stranded}, which nobody can find"
            return
        if self.is_lru:
            assert block == self.lru[0], f"block {block} evicted before {self.lru[0]}"
        assert block in self.lru, f"block {block} evicted, it is not parked"
        if not self.knows_parents:
            return
        key_of = {b: key for key, b in self.index.items()}
        key = key_of[block]
        for child in self.lru[: self.lru.index(block)]:
            assert key_of[child][: len(key)] != key, f"block {block} evicted before {child}, which continues it"

    def evict(self, block: int) -> None:
        """Those that can't be found without it are stranded."""
        self.lru.remove(block)
        (key,) = [key for key, b in self.index.items() if b == block]
        del self.index[key]
        self.evicted += 1
        self.evicted_now.append((block, key))
        lost = self.groups[key[0]]
        for number, group in enumerate(self.groups):
            if (lost == FULL or group == lost) and (number, *key[1:]) in self.index:
                self.stranded.append(self.index[number, *key[1:]])

    def next_stranded(self) -> int | None:
        """Those that can be found again, or are held, are evictable in their order only."""
        while self.stranded:
            block = self.stranded.pop()
            if block in self.lru and self.is_stranded(block):
                return block
        return None

    def is_stranded(self, block: int) -> bool:
        """True if a block of the same tokens is gone that every prefix with this one needs."""
        (key,) = [key for key, b in self.index.items() if b == block]
        needed = [number for number, group in enumerate(self.groups) if group in (FULL, self.groups[key[0]])]
        return any((number, *key[1:]) not in self.index for number in needed)

    taken: set[int] = set()  # noqa: RUF012 - replaced for each item
    """Blocks handed out for the present item, in no table yet."""

    # resets

    def withhold(self, tags: Collection[int]) -> None:
        """Sequences in the host tier, and those that have come from there or got copies from there, will not publish
        their computed blocks. The copies of the tenants are dropped."""
        for sequence in (s for lease in self.leases.values() for s in lease.sequences.values()):
            computed = min(sequence.computed, sequence.known) // self.size
            if sequence.tag not in tags:
                continue
            if sequence.host is not None:
                sequence.withheld = computed
            elif sequence.cache_use is not CacheUse.NONE and computed > sequence.published:
                sequence.withheld = sequence.published = computed
        tenants = {tag // len(NAMESPACES) for tag in tags}
        is_left = lambda key: key[1] // len(NAMESPACES) not in tenants  # noqa: E731
        self.copies = {block: key for block, key in self.copies.items() if is_left(key)}
        for step in (step for lease in self.leases.values() for step in lease.steps):
            step.arriving = {block: key for block, key in step.arriving.items() if is_left(key)}
        self.reset_at |= dict.fromkeys(tenants, next(self.ticks))
        self.on_disk = {block: key for block, key in self.on_disk.items() if is_left(key)}
        for order in self.orders.values():
            order.is_dropped |= order.kind != "erase" and not is_left(order.key)
        if self.geometry.num_disk_blocks:
            self.expected_erasures.append(tuple(sorted(tenants)))

    def begins_with(self, prefix: tuple, stem: tuple) -> bool:
        """True if content continues the stem, or if a block between them is gone."""
        ends = range(len(prefix) - self.size, len(stem), -self.size)
        is_holed = len(prefix) > len(stem) and any((0, *prefix[:end]) not in self.index for end in ends)
        return is_holed or prefix[: len(stem)] == stem

    # prefixes

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)

    def prefixes(self, tag: int, tokens: list[int], num_tokens: int) -> list[tuple]:
        """Those that end with a full block of the first tokens, the shortest first."""
        return [(tag, *tokens[:end]) for end in range(self.size, num_tokens + 1, self.size)]

    def first_needed(self, group: LayerGroup, position: int) -> int:
        """The index of the first block that a token at a position sees."""
        return first_seen(group, position) // self.size

    def longest_hit(self, prefixes: list[tuple]) -> tuple[int, list[list[int]]]:
        """The longest prefix with all blocks that its next token sees: their number, and the tables."""
        for length in range(len(prefixes), -1, -1):
            tables = [self.table_of(prefixes[:length], number) for number in range(len(self.groups))]
            if all(None not in table for table in tables):
                return length, tables
        raise AssertionError("nothing is a prefix, too")

    def table_of(self, prefixes: list[tuple], number: int) -> list[int]:
        """The table of a prefix by the index: None for a block that is not in it, 0 for one that nobody will see."""
        first = self.first_needed(self.groups[number], len(prefixes) * self.size)
        return [0] * first + [self.index.get((number, *prefix)) for prefix in prefixes[first:]]

    def ends_of_tables(self, num_tokens: int, num_scheduled: int) -> list[int]:
        """Full tables have blocks for all tokens, windowed ones for the scheduled ones."""
        is_full = lambda group: group.kind is LayerGroupKind.FULL  # noqa: E731
        return [self.num_blocks_for(num_tokens if is_full(group) else num_scheduled) for group in self.groups]

    def least_position(self, sequence: BookSequence) -> int:
        """The first position at which a token sees no block that was passed."""
        firsts = [num_passed(table) for table in sequence.tables]
        is_there = lambda position: all(  # noqa: E731
            first_seen(group, position) >= first * self.size for group, first in zip(self.groups, firsts, strict=True)
        )
        return next(position for position in itertools.count() if is_there(position))

    # planning

    def plan(self, lease: BookLease, request: StepRequest, plan: Planned) -> list[PlannedRun]:
        """Predicts the plan, taking only the choice of fresh blocks from it."""
        writes = Writes(plan)
        self.refused = []
        self.lease, self.writes = lease, writes
        self.step = BookStep(lease.next_step, [], set(), 0)
        self.runs: list[tuple[int, int, int, bool, bool]] = []
        self.planned: list[PlannedRun] = []
        self.expected_copies: list[tuple[int, int]] = []
        self.expected_restores: list[tuple[int, int]] = []
        self.expected_passes: list[tuple[int, int, int]] = []
        self.expected_written: list[int] = []
        self.evicted_now: list[tuple[int, tuple]] = []
        self.leasts: list[int] = []
        """The least positions that the items with a position out of range name."""
        self.touched_now, self.host_touched_now = set(), set()
        self.host_copy_use = request.host_copy_use
        self.skips_disk = request.skips_disk
        released, offloaded, restored, admitted = [], [], [], []
        for seq_id in request.releases:
            if self.release(seq_id):
                released.append(seq_id)
        for seq_id in request.offloads:
            reason = self.offload(seq_id)
            self.note(PlanItem.OFFLOAD, seq_id, reason)
            offloaded += [] if reason else [seq_id]
        self.pass_windows()
        for sequence, group, index in lease.changes:
            if not sequence.released and sequence.tables[group][index]:
                assert writes.take(sequence.seq_id, group, index, 1) == [sequence.tables[group][index]]
        lease.changes = []
        for trim in request.trims:
            self.note(PlanItem.TRIM, trim.seq_id, self.trim(trim))
        forked = []
        for fork in request.forks:
            for child_id in fork.child_ids:
                reason = self.fork(fork, child_id)
                self.note(PlanItem.FORK, child_id, reason)
                forked += [] if reason else [(fork.parent_id, child_id)]
        for seq_id, count in zip(request.extend_ids, request.extend_token_counts, strict=True):
            append = request.appends.get(seq_id, b"")
            tokens = [int.from_bytes(append[i : i + 4], "little", signed=True) for i in range(0, len(append), 4)]
            self.note(PlanItem.EXTEND, seq_id, self.extend(seq_id, count, tokens, request.drafts.get(seq_id, ())))
        self.refused_elsewhere = {
            refused.refusal.message for refused in plan.refusals if refused.refusal.message.startswith("another lease")
        }
        self.budget = request.admission_token_budget or 10**9
        for restore in request.restores:
            found = self.restore(restore, request.admission_reserve)
            if isinstance(found, int):
                restored.append((restore.seq_id, found))
            else:
                self.note(PlanItem.RESTORE, restore.seq_id, found)
        for admission in request.admissions:
            found = self.admit(admission, request.admission_reserve)
            if isinstance(found, int):
                admitted.append((admission.seq_id, found))
            else:
                self.note(PlanItem.ADMISSION, admission.seq_id, found)
        tables = [table for sequence in lease.sequences.values() for table in sequence.tables]
        self.step.touched = {block for table in tables for block in held(table)} | self.touched_now
        in_host = {block for s in lease.sequences.values() for blocks in s.host or () for block in blocks}
        self.keep_evicted()
        self.step.host_touched = in_host | self.host_touched_now
        self.touched_now = self.host_touched_now = frozenset()
        lease.steps.append(self.step)
        lease.next_step += 1
        self.promise(*lease.sequences.values())
        assert not writes.entries, f"unexpected table writes {writes.entries}"
        assert writes.copies == self.expected_copies
        assert not writes.offloads, f"unexpected copies to the host tier {writes.offloads}"
        assert list(zip(plan.restore_sources, plan.restore_targets, strict=True)) == self.expected_restores
        passes = zip(plan.passed_seq_ids, plan.passed_groups, plan.passed_counts, strict=True)
        assert list(passes) == self.expected_passes
        assert plan.step_number == self.step.number
        assert plan.known_step == lease.known
        assert (plan.released_ids, plan.offloaded_ids) == (released, offloaded)
        assert list(zip(plan.restored_ids, plan.restored_counts, strict=True)) == restored
        assert list(zip(plan.fork_parent_ids, plan.fork_child_ids, strict=True)) == forked
        assert [(r.item, r.seq_id, r.refusal.reason) for r in plan.refusals] == self.refused
        out_of_range = [r for r in plan.refusals if r.refusal.reason is Reason.POSITION_OUT_OF_RANGE]
        assert [int(r.refusal.metadata["least"]) for r in out_of_range] == self.leasts
        assert list(zip(plan.admitted_ids, plan.admitted_cached_counts, strict=True)) == admitted
        assert plan.admitted_written_counts == self.expected_written
        self.written += sum(self.expected_written)
        runs = zip(plan.run_seq_ids, plan.run_starts, plan.run_token_counts, plan.run_samples, strict=True)
        assert [(*run, i in plan.given_run_indexes) for i, run in enumerate(runs)] == self.runs
        self.check_adapters(lease, plan)
        return self.planned

    def check_adapters(self, lease: BookLease, plan: Planned) -> None:
        """Each run is computed with the adapter of its sequence, and the grant names no others."""
        expected = [NAMESPACES[lease.sequences[seq_id].tag % len(NAMESPACES)][1] for seq_id in plan.run_seq_ids]
        named = [plan.adapters[number - 1] if number else b"" for number in plan.run_adapters]
        assert named == (expected if any(expected) else [])
        assert sorted(plan.adapters) == sorted({adapter for adapter in expected if adapter})

    def note(self, item: PlanItem, seq_id: int, reason: Reason | None) -> None:
        if reason is not None:
            self.refused.append((item, seq_id, reason))

    def pass_windows(self) -> None:
        """The blocks behind the windows of the last computed token are let go: it may be computed again."""
        computed, self.lease.computed = self.lease.computed, []
        for sequence in computed if self.has_windows else ():
            if self.lease.sequences.get(sequence.seq_id) is not sequence or sequence.host is not None:
                continue
            passed = []
            for number, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True)):
                end = self.first_needed(group, max(0, sequence.computed - 1))
                blocks = held(table[:end])
                if blocks:
                    table[:end] = [0] * end
                    self.expected_passes.append((sequence.seq_id, number, end))
                    passed += blocks
            if passed:
                self.drop(passed[::-1], self.lease.steps)
                self.promise(sequence)

    def release(self, seq_id: int) -> bool:
        sequence = self.lease.sequences.pop(seq_id, None)
        if sequence is None:
            return False
        sequence.released = True
        self.step.num_released += sequence.host is None
        self.drop(blocks_in_order(sequence.tables), self.lease.steps)
        return True

    def offload(self, seq_id: int) -> Reason | None:
        old = self.lease.sequences.get(seq_id)
        if old is None:
            return Reason.SEQUENCE_NOT_FOUND
        if old.host is not None:
            return Reason.SEQUENCE_OFFLOADED
        if old.num_drafts:
            return Reason.SEQUENCE_BUSY
        end, states = max(1, self.num_blocks_for(old.scheduled)), self.host_states()
        sources = [held(table[:end]) for table in old.tables]
        count = sum(map(len, sources))
        num_free, evictable = sum(state == "free" for state in states.values()), self.evictable_copies()
        if count > num_free + len(evictable):
            return Reason.OUT_OF_HOST_BLOCKS
        copies, self.writes.offloads = self.writes.offloads[:count], self.writes.offloads[count:]
        assert [source for source, _ in copies] == [block for blocks in sources for block in blocks]
        targets = iter([target for _, target in copies])
        host = [list(itertools.islice(targets, len(blocks))) for blocks in sources]
        for _, block in copies:
            is_there = states[block] == "free" or block in evictable
            assert is_there, f"host block {block} handed out, {states[block]}"
            self.copies.pop(block, None)
            self.generations[-1 - block] += 1
        num_evicted = sum(states[block] == "cached" for _, block in copies)
        assert num_evicted == max(0, count - num_free), "a copy was evicted while a host block was free"
        tables = [[0] * num_passed(table) for table in old.tables]
        heir = replace(old, tables=tables, published=0, sampled_at=None, host=host, promised=0)
        is_dropped = lambda block: block in self.sealed and block not in self.index.values()  # noqa: E731
        published = [enumerate(table[: old.published], 1) for table in old.tables]
        heir.withheld = max(old.withheld, *(i for blocks in published for i, block in blocks if is_dropped(block)), 0)
        old.released = True
        self.step.num_released += 1
        del self.lease.sequences[seq_id]
        self.lease.sequences[seq_id] = heir
        for run in (run for step in self.lease.steps for run in step.runs):
            run.heirs += [[heir, covers] for known, covers in [(run.sequence, run.covers), *run.heirs] if known is old]
        blocks = blocks_in_order(old.tables)
        self.touched_now = {*self.touched_now, *blocks}
        self.drop(blocks, [self.step])
        return None

    def keep_evicted(self) -> None:
        """The blocks that this plan has evicted are copied to the host tier, where there is room for a copy."""
        most = self.geometry.host_cached_limit
        for block, key in self.evicted_now if most and self.host_copy_use is HostCopyUse.THERE_AND_BACK else ():
            states, evictable = self.host_states(), self.evictable_copies()
            states |= dict.fromkeys(self.step.arriving, "retired")
            tenant = key[1] // len(NAMESPACES)
            source, target = self.writes.offloads[0] if self.writes.offloads else (0, 0)
            if key in self.copies.values() or self.published_at[block] <= self.reset_at.get(tenant, -1):
                assert source != block, f"block {block} was copied to the host tier, which has it or must not"
                continue
            is_room = self.num_copies() < most and "free" in states.values()
            if source != block:
                has_floors = any(share.floor for share in self.shares)
                assert not is_room, f"block {block} was evicted and not copied to the host tier"
                assert has_floors or not evictable, f"no copy was evicted for that of block {block}"
                continue
            self.writes.offloads.pop(0)
            assert states[target] == "free" if is_room else target in evictable, f"a copy to host block {target}"
            self.copies.pop(target, None)
            self.generations[-1 - target] += 1
            self.step.arriving[target] = key
            self.host_touched_now = {*self.host_touched_now, target}

    def restore(self, restore: Restore, reserve: int) -> Reason | int:
        sequence = self.lease.sequences.get(restore.seq_id)
        if sequence is None:
            return Reason.SEQUENCE_NOT_FOUND
        if sequence.host is None:
            return Reason.SEQUENCE_EXISTS
        if sequence.known < len(sequence.tokens):
            return Reason.SEQUENCE_BUSY
        if self.num_rows() + self.step.num_released >= self.geometry.max_sequences:
            return Reason.TOO_MANY_SEQUENCES
        if sequence.known > self.max_tokens(sequence.tenant, sequence.reserved_tokens):
            return Reason.SEQUENCE_TOO_LONG
        if self.budget <= 0:
            return Reason.TOKEN_BUDGET_SPENT
        length, tables = self.find_for_restore(sequence)
        start = max(sequence.scheduled, length * self.size)
        count = min(sequence.known - start, restore.max_compute or 10**9, self.budget)
        ends = self.ends_of_tables(sequence.known, start + count)
        need = sum(end - len(table) for end, table in zip(ends, tables, strict=True))
        most = self.num_blocks_for(sequence.reserved_tokens)
        later = sum(max(0, most - end) for end in ends)
        found = [block for table in tables for block in held(table)]
        reason = self.refuse(sequence.tenant, need + later, parked=self.num_parked(found), spared=reserve)
        if reason is not None:
            return reason
        hosted = [num_passed(table) for table in sequence.tables]
        sequence.tables = self.take_blocks(sequence.seq_id, tables, ends, sequence.tenant)
        if not sequence.withheld:
            self.use(sequence.tenant, sequence.kept, sequence.tables[0], length)
        end = self.num_blocks_for(sequence.scheduled)
        for table, found_table, first, host in zip(sequence.tables, tables, hosted, sequence.host, strict=True):
            copied = range(len(found_table), end)
            self.expected_restores += [(host[index - first], table[index]) for index in copied]
        self.host_touched_now = {*self.host_touched_now, *(block for blocks in sequence.host for block in blocks)}
        sequence.host, sequence.published = None, max(length, sequence.withheld)
        sequence.computed = max(sequence.computed, length * self.size)
        sequence.scheduled = start
        self.promise(sequence)
        self.budget -= count
        if count:
            self.run(sequence, count, given=True)
        return start

    def find_for_restore(self, sequence: BookSequence) -> tuple[int, list[list[int]]]:
        """A prefix from the index. One that ends before what the host tier has is taken in the full groups only."""
        if sequence.cache_use is not CacheUse.READ_AND_WRITE:
            prefixes = []
        else:
            tokens = [token.value for token in sequence.tokens[: sequence.known]]
            prefixes = self.prefixes(sequence.tag, tokens, sequence.known - 1)
        length, tables = self.longest_hit(prefixes)
        if not self.has_windows or length * self.size >= sequence.scheduled:
            return length, tables
        full = [number for number, group in enumerate(self.groups) if group == FULL]
        is_known = lambda prefix: all((number, *prefix) in self.index for number in full)  # noqa: E731
        known = list(itertools.takewhile(is_known, prefixes))[: sequence.scheduled // self.size]
        tables = [list(table) for table in sequence.tables]
        for number in full:
            tables[number] = [self.index[number, *prefix] for prefix in known]
        return len(known), tables

    def in_pool(self, seq_id: int) -> BookSequence | Reason:
        sequence = self.lease.sequences.get(seq_id)
        if sequence is None:
            return Reason.SEQUENCE_NOT_FOUND
        if sequence.host is not None:
            return Reason.SEQUENCE_OFFLOADED
        return Reason.SEQUENCE_BUSY if sequence.num_drafts else sequence

    def trim(self, trim: Trim) -> Reason | None:
        sequence, count = self.in_pool(trim.seq_id), trim.num_tokens
        if isinstance(sequence, Reason):
            return sequence
        least = max(1, self.least_position(sequence))
        if not least <= count <= len(sequence.tokens):
            self.leasts.append(least)
            return Reason.POSITION_OUT_OF_RANGE
        needed = self.needs_more(sequence, computed=min(sequence.computed, count))
        if (reason := self.refuse(sequence.tenant, needed)) is not None:
            return reason
        full, kept = count // self.size, -(-count // self.size)
        kept = max(map(len, sequence.tables)) if sequence.reserved_tokens else kept
        sequence.tokens = sequence.tokens[:count]
        sequence.kept = [(min(num_blocks, full), ttl) for num_blocks, ttl in sequence.kept]
        sequence.computed = min(sequence.computed, count)
        sequence.scheduled = min(sequence.scheduled, count)
        sequence.published, sequence.withheld = min(sequence.published, full), min(sequence.withheld, full)
        if sequence.sampled_at is not None and sequence.sampled_at >= count:
            sequence.sampled_at = None
        for step in self.lease.steps:
            for run in step.runs:
                if run.sequence is sequence:
                    run.covers = min(run.covers, count)
                for entry in run.heirs:
                    if entry[0] is sequence:
                        entry[1] = min(entry[1], count)
        tail, sequence.tables = blocks_in_order(sequence.tables, kept), [table[:kept] for table in sequence.tables]
        self.promise(sequence)
        self.drop(tail, self.lease.steps)
        return None

    def fork(self, fork: Fork, child_id: int) -> Reason | None:
        parent, count = self.in_pool(fork.parent_id), fork.num_tokens
        if isinstance(parent, Reason):
            return parent
        least = self.least_position(parent) + 1
        if not least <= count <= len(parent.tokens):
            self.leasts.append(least)
            return Reason.POSITION_OUT_OF_RANGE
        tables = [table[: self.num_blocks_for(count)] for table in parent.tables]
        needed = self.needs_more(parent, shared=blocks_in_order(tables))
        if (reason := self.refuse(parent.tenant, needed)) is not None:
            return reason
        if (reason := self.refuse_new(child_id)) is not None:
            return reason
        scheduled = min(parent.scheduled, count - 1)
        at = parent.sampled_at
        child = BookSequence(
            child_id,
            parent.tag,
            parent.tokens[:count],
            tables,
            computed=min(parent.computed, scheduled),
            scheduled=scheduled,
            published=min(parent.published, scheduled // self.size),
            sampled_at=at if at is not None and at < count else None,
            cache_use=parent.cache_use,
        )
        child.withheld = min(parent.withheld, child.published)
        self.write_tables(child_id, tables)
        self.lease.sequences[child_id] = child
        self.promise(parent)
        return None

    def write_tables(self, seq_id: int, tables: list[list[int]]) -> None:
        """The writes of a sequence that begins."""
        for number, table in enumerate(tables):
            if blocks := held(table):
                assert self.writes.take(seq_id, number, num_passed(table), len(blocks)) == blocks

    def refuse_new(self, seq_id: int) -> Reason | None:
        if not 0 <= seq_id < 2**31:
            return Reason.INVALID_ARGUMENT
        if seq_id in self.lease.sequences:
            return Reason.SEQUENCE_EXISTS
        if self.num_rows() + self.step.num_released >= self.geometry.max_sequences:
            return Reason.TOO_MANY_SEQUENCES
        return None

    def longest_in(self, num_blocks: int, *, is_reserved: bool) -> int:
        """The tokens of the longest sequence in so many blocks. One with a reservation may be computed in one step; one
        without holds in a windowed group what two neighbouring tokens see."""
        least = lambda group: (group.window - 1) // self.size + 2  # noqa: E731
        is_passed = lambda group: not is_reserved and group.kind is not LayerGroupKind.FULL  # noqa: E731
        needed = lambda length: sum(min(length, least(g)) if is_passed(g) else length for g in self.groups)  # noqa: E731
        most = self.num_blocks_for(self.geometry.max_sequence_tokens)
        length = max(length for length in range(most + 1) if needed(length) <= num_blocks)
        return min(self.geometry.max_sequence_tokens, length * self.size)

    def max_tokens(self, tenant: int, reserved: int = 0) -> int:
        """The tokens of any sequence of a tenant, or of one with a reservation of so many."""
        others = sum(share.floor for share in self.shares) - self.shares[tenant].floor
        most = min(self.shares[tenant].limit, self.geometry.num_blocks - 1 - others)
        return min(self.longest_in(most, is_reserved=reserved > 0), reserved or 10**9)

    def extend(self, seq_id: int, count: int, append: list[int], drafts: Sequence[int]) -> Reason | None:
        sequence = self.in_pool(seq_id)
        if isinstance(sequence, Reason):
            return sequence
        if count < 1:
            return Reason.INVALID_ARGUMENT
        start, end, known = sequence.scheduled, sequence.scheduled + count, sequence.known
        if append and known < len(sequence.tokens):
            return Reason.INVALID_ARGUMENT
        if drafts and not sequence.takes_drafts:
            return Reason.INVALID_ARGUMENT
        if any(not 0 <= token < VOCAB for token in (*append, *drafts)):
            return Reason.TOKEN_OUT_OF_RANGE
        if max(end, known + len(append)) > self.max_tokens(sequence.tenant, sequence.reserved_tokens):
            return Reason.SEQUENCE_TOO_LONG
        is_last_sampled = count == 1 and start == sequence.sampled_at and start < len(sequence.tokens)
        if end > known + len(append) and not is_last_sampled and not drafts:
            return Reason.NOTHING_TO_COMPUTE
        holders, ends = self.holders(), self.ends_of_tables(len(sequence.tokens) + len(append) + len(drafts), end)
        is_foreign = lambda block: holders[block] > 1 or block in self.sealed  # noqa: E731
        written = [range(start // self.size, min(self.num_blocks_for(end), len(table))) for table in sequence.tables]
        foreign = [
            [index for index in indexes if is_foreign(table[index])]
            for indexes, table in zip(written, sequence.tables, strict=True)
        ]
        grown = [max(0, end - len(table)) for end, table in zip(ends, sequence.tables, strict=True)]
        needed = max(0, sum(map(len, foreign)) + sum(grown) - sequence.promised)
        if (reason := self.refuse(sequence.tenant, needed)) is not None:
            assert not sequence.reserved_tokens, "a sequence does not get what is reserved for it"
            return reason
        for number in range(len(self.groups)):
            self.replace(sequence, number, foreign[number], grown[number], start)
        if any(foreign) or any(grown):
            self.promise(sequence)
        sequence.tokens = sequence.tokens + [Token(value) for value in append]
        for indexes, table in zip(written, sequence.tables, strict=True):
            for index in indexes:
                self.forget_claims(table[index])
        if drafts:
            self.run_drafts(sequence, drafts)
        else:
            self.run(sequence, count, given=not (count == 1 and start == sequence.sampled_at))
        return None

    def replace(self, sequence: BookSequence, number: int, foreign: list[int], grown: int, start: int) -> None:
        table, fresh = sequence.tables[number], []
        for index in foreign:
            fresh += self.writes.take(sequence.seq_id, number, index, 1)
        if grown:
            fresh += self.writes.take(sequence.seq_id, number, len(table), grown)
        self.taken = set()
        self.hand_out(fresh, sequence.tenant)
        for index in foreign:
            source, target = table[index], fresh.pop(0)
            if index * self.size < start:
                self.expected_copies.append((source, target))
                self.touched_now = {*self.touched_now, source}
            table[index] = target
            self.drop([source], [self.step] if index * self.size < start else self.lease.steps)
        table += fresh
        self.taken = set()
        self.keep_fresh(sequence, {*foreign, *range(len(table) - grown, len(table))})

    def forget_claims(self, block: int) -> None:
        """A block that is written in place is not published by a released sequence that filled it before."""
        for step in self.lease.steps:
            for run in step.runs:
                tables = run.sequence.tables if run.sequence.released else ()
                for table in (table for table in tables if block in table):
                    covers = table.index(block) * self.size
                    run.covers = min(run.covers, covers)
                    run.sequence.computed = min(run.sequence.computed, covers)

    def run(self, sequence: BookSequence, count: int, *, given: bool) -> None:
        start, end = sequence.scheduled, sequence.scheduled + count
        samples = end == len(sequence.tokens)
        self.runs.append((sequence.seq_id, start, count, samples, given))
        self.enter_run(sequence, sequence.tokens[:end], [Token()] if samples else [])
        if samples:
            sequence.sampled_at = end

    def run_drafts(self, sequence: BookSequence, drafts: Sequence[int]) -> None:
        """Run drafts. The tokens sampled in their places may be others."""
        sampled = [Token() for _ in range(len(drafts) + 1)]
        self.runs.append((sequence.seq_id, sequence.scheduled, 1 + len(drafts), True, True))
        self.enter_run(sequence, [*sequence.tokens, *map(Token, drafts)], sampled, len(drafts))
        sequence.num_drafts, sequence.sampled_at = len(drafts), None

    def enter_run(self, sequence: BookSequence, tokens: list[Token], sampled: list[Token], num_drafts: int = 0) -> None:
        start, end = sequence.scheduled, len(tokens)
        tables = [table[:] for table in sequence.tables]
        self.planned.append(PlannedRun(sequence.seq_id, sequence.tag, start, tokens, tables, sampled, num_drafts))
        fills = range(start // self.size, min(end, sequence.known) // self.size)
        self.step.runs.append(BookRun(sequence, end, end, fills, sampled, num_drafts))
        sequence.scheduled = end
        sequence.tokens = [*sequence.tokens, *sampled]

    def admit(self, admission: Admission, reserve: int) -> Reason | int:
        data = admission.tokens
        tokens = [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data), 4)]
        tenant = self.lease.tenant if admission.tenant is None else TENANTS.index(admission.tenant)
        if tenant != self.lease.tenant and not self.lease.names_tenants:
            return Reason.ROLE_MISSING
        if (reason := self.refuse_new(admission.seq_id)) is not None:
            return reason
        longest = self.longest_in(self.geometry.num_blocks - 1, is_reserved=False)
        if 0 < admission.reserved_tokens < len(tokens) <= longest:
            return Reason.INVALID_ARGUMENT
        if not tokens:
            return Reason.EMPTY_PROMPT
        if max(len(tokens), admission.reserved_tokens) > self.max_tokens(tenant, admission.reserved_tokens):
            return Reason.SEQUENCE_TOO_LONG
        if any(not 0 <= token < VOCAB for token in tokens):
            return Reason.TOKEN_OUT_OF_RANGE
        if self.budget <= 0:
            return Reason.TOKEN_BUDGET_SPENT
        tag = tenant * len(NAMESPACES) + NAMESPACES.index((admission.salt, admission.adapter))
        length, published, tables = self.find(tag, tokens, is_read=admission.cache_use is CacheUse.READ_AND_WRITE)
        prefixes = self.prefixes(tag, tokens, len(tokens) - 1) if admission.cache_use is CacheUse.READ_AND_WRITE else []
        may_copy = length == published and self.host_copy_use is not HostCopyUse.NONE
        num_found, copies = length, []
        if may_copy:
            num_found, tables, copies = self.add_copies(prefixes, length, tables)
        cached = num_found * self.size
        message = f"another lease computes the prefix of sequence {admission.seq_id} behind {cached} tokens"
        if admission.waits_for_prefix and message in self.refused_elsewhere:
            others = [lease for lease in self.leases.values() if lease is not self.lease]
            assert any(lease.steps for lease in others), "no other lease computes anything"
            return Reason.PREFIX_BEING_COMPUTED
        count = min(len(tokens) - cached, admission.max_compute or 10**9, self.budget)
        ends = self.ends_of_tables(len(tokens), cached + count)
        found = [block for table in tables for block in table if block]
        unpublished = [block for table in tables for block in held(table[published:])] if not copies else []
        most = self.num_blocks_for(admission.reserved_tokens)
        later = sum(max(0, most - end) for end in ends) + (len(unpublished) if admission.reserved_tokens else 0)
        later += sum(self.needs_more(other, shared=unpublished) for other in self.lease.sequences.values())
        needed = sum(end - len(table) for end, table in zip(ends, tables, strict=True)) + len(copies) + later
        if (reason := self.refuse(tenant, needed, parked=self.num_parked(found), spared=reserve)) is not None:
            return reason
        reads = admission.waits_for_prefix and may_copy and not self.skips_disk
        if reads and self.take_reads(self.reads_for(prefixes, num_found, len(copies))):
            return Reason.PREFIX_BEING_COMPUTED
        is_written = admission.cache_use is not CacheUse.NONE
        unfound = self.prefixes(tag, tokens, len(tokens) * is_written)[num_found:]
        is_new = lambda prefix: any((number, *prefix) not in self.index for number in range(len(self.groups)))  # noqa: E731
        self.expected_written.append(self.size * sum(map(is_new, unfound)))
        sources = {key: host for host, key in self.copies.items()}
        self.host_touched_now = {*self.host_touched_now, *(sources[key] for _, _, key in copies)}
        tables = self.take_blocks(admission.seq_id, tables, ends, tenant)
        self.expected_restores += [(sources[key], tables[number][index]) for index, number, key in copies]
        sequence = BookSequence(
            admission.seq_id,
            tag,
            [Token(value) for value in tokens],
            tables,
            computed=(published + num_found - length) * self.size,
            scheduled=cached,
            published=published,
            reserved_tokens=admission.reserved_tokens,
            cache_use=admission.cache_use,
            kept=[(each.num_tokens // self.size, int(each.ttl_s * 1e3)) for each in admission.breakpoints],
        )
        self.use(tenant, sequence.kept, tables[0], length)
        self.lease.sequences[admission.seq_id] = sequence
        if later or admission.reserved_tokens:
            self.promise(*self.lease.sequences.values())
        self.budget -= count
        self.run(sequence, count, given=True)
        return cached

    def take_blocks(self, seq_id: int, tables: list[list[int]], ends: list[int], tenant: int) -> list[list[int]]:
        """Tables with those that were found, and fresh ones of the ledger's choice for None and up to the ends."""
        found = {block for table in tables for block in table if block}
        self.taken = set(found)
        self.lru = [block for block in self.lru if block not in found]
        taken = []
        for number, (table, end) in enumerate(zip(tables, ends, strict=True)):
            first = num_passed(table)
            ids = self.writes.take(seq_id, number, first, end - first) if end > first else []
            places = [*table[first:], *[None] * (end - len(table))]
            are_right = all(block in (None, given) for block, given in zip(places, ids, strict=True))
            assert are_right, "other blocks than the ones that hold the prefix"
            self.hand_out([given for block, given in zip(places, ids, strict=True) if block is None], tenant)
            taken.append([0] * first + ids)
        self.taken = set()
        return taken

    def find(self, tag: int, tokens: list[int], *, is_read: bool) -> tuple[int, int, list[list[int]]]:
        """The number of blocks found, of those that are published, and the tables."""
        prefixes = self.prefixes(tag, tokens, (len(tokens) - 1) * is_read)
        published, tables = self.longest_hit(prefixes)
        pending = self.pending() if published < len(prefixes) else {}
        length, holders = published, self.holders()
        for prefix in prefixes[published:]:
            keys = [(number, *prefix) for number in range(len(self.groups))]
            blocks = [self.index.get(key) or pending.get(key, 0) for key in keys]
            if not all(key in self.index or holders[block] for key, block in zip(keys, blocks, strict=True)):
                break
            for table, block in zip(tables, blocks, strict=True):
                table.append(block)
            length += 1
        return length, published, tables

    def longest_with_copies(
        self, prefixes: list[tuple], copies: Collection[tuple]
    ) -> tuple[int, list[tuple[int, int, tuple]]]:
        """The longest prefix of which the index or these copies have all that its next token sees: the number of its
        blocks, and index, group and key of those that are copies. A full group's blocks of the index come first."""
        for length in range(len(prefixes), -1, -1):
            places: list[tuple[int, int, tuple]] = []
            for number, group in enumerate(self.groups):
                first = self.first_needed(group, length * self.size)
                keys = [(number, *prefix) for prefix in prefixes[:length]]
                num_leading = sum(1 for _ in itertools.takewhile(self.index.__contains__, keys))
                is_in_pool = lambda index: keys[index] in self.index and (group != FULL or index < num_leading)  # noqa: B023, E731
                places += [(index, number, keys[index]) for index in range(first, length) if not is_in_pool(index)]
            if all(key in copies for _, _, key in places):
                return length, sorted(places)
        raise AssertionError("nothing is a prefix, too")

    def add_copies(
        self, prefixes: list[tuple], num_in_pool: int, tables: list[list[int]]
    ) -> tuple[int, list[list[int]], list[tuple[int, int, tuple]]]:
        """A prefix with copies of the host tier, if they make it longer: its blocks, the tables with None in the places
        of copies, and the copies."""
        length, copies = self.longest_with_copies(prefixes, self.copies.values())
        if length == num_in_pool:
            return num_in_pool, tables, []
        tables = [self.table_of(prefixes[:length], number) for number in range(len(self.groups))]
        for index, number, _ in copies:
            tables[number][index] = None
        return length, tables, copies

    def pending(self) -> dict[tuple, int]:
        """Blocks that steps in flight fill, that of the step being planned included; of equal blocks the first. It is 0
        if the block was passed."""
        pending: dict[tuple, int] = {}
        for step in [*self.lease.steps, self.step]:
            for run in step.runs if not step.is_doomed else ():
                if run.sequence.cache_use is CacheUse.NONE:
                    continue
                for index in run.fills:
                    if (index + 1) * self.size <= run.covers:
                        prefix = run.sequence.prefix((index + 1) * self.size)
                        for number, table in enumerate(run.sequence.tables):
                            pending.setdefault((number, *prefix), table[index])
        return pending

    # reports

    def settle(self, lease: BookLease, report: Report) -> None:
        step = lease.steps.pop(0)
        assert step.number == report.step_number
        lease.settled = step.number
        lease.known = max(lease.known, step.number)
        step_touched = step.touched
        if report.outcome is StepOutcome.COMPUTED:
            assert not (step.runs and step.is_doomed)
            for run, (seq_id, end) in zip(step.runs, report.computed, strict=True):
                if run.num_drafts:
                    self.accept(run, end, len(report.sampled[seq_id]) - 1)
                for sequence, covers in [(run.sequence, run.covers), *run.heirs]:
                    sequence.computed = max(sequence.computed, covers)
                for token in run.sampled:
                    token.known = True
            lease.computed += [run.sequence for run in step.runs]
            lease.computed += [heir for run in step.runs for heir, _ in run.heirs]
            # What was touched by this step stays out of reach until all of it is published.
            lease.steps.insert(0, BookStep(step.number, [], step_touched, 0))
            for run in step.runs:
                self.publish(lease, run.sequence)
            lease.steps.pop(0)
        elif step.runs and not step.is_doomed:
            for doomed in lease.steps:
                doomed.is_doomed, lease.known = True, doomed.number
            for sequence in lease.sequences.values():
                sequence.tokens = [token for token in sequence.tokens if token.known]
                sequence.scheduled, sequence.num_drafts = sequence.computed, 0
                if sequence.sampled_at is not None and sequence.sampled_at >= len(sequence.tokens):
                    sequence.sampled_at = None
        for block, key in step.arriving.items():
            if key not in self.copies.values():
                self.copies[block] = key
        self.promise(*lease.sequences.values())
        self.rest()

    def accept(self, run: BookRun, end: int, num_accepted: int) -> None:
        """The sequence has the accepted drafts and one token after them."""
        sequence = run.sequence
        run.covers, run.sampled = min(run.covers, end), run.sampled[: num_accepted + 1]
        sequence.tokens = sequence.tokens[: end + 1]
        sequence.scheduled, sequence.sampled_at, sequence.num_drafts = end, end, 0
        self.drafted += run.num_drafts
        self.accepted += num_accepted

    def publish(self, lease: BookLease, sequence: BookSequence) -> None:
        if sequence.cache_use is CacheUse.NONE:
            return
        while (sequence.published + 1) * self.size <= min(sequence.computed, sequence.known):
            for number, table in enumerate(sequence.tables):
                if block := table[sequence.published]:
                    self.publish_one(lease, sequence, number, block)
            sequence.published += 1

    def publish_one(self, lease: BookLease, sequence: BookSequence, number: int, block: int) -> None:
        index = sequence.published
        key = (number, *sequence.prefix((index + 1) * self.size))
        standing = self.index.setdefault(key, block)
        self.knows_parents &= standing == block
        if standing != block and block in self.keeps:
            until, ttl = self.keeps.pop(block)
            self.keep(standing, ttl, until - ttl)
        if standing == block:
            self.sealed.add(block)
            self.new.add(block)
            self.published_at[block] = next(self.ticks)
        elif not sequence.released and self.num_parked([standing]) <= self.num_room() - self.num_promised():
            sequence.tables[number][index] = standing
            lease.changes.append((sequence, number, index))
            lease.steps[-1].touched.add(standing)  # more than it does: no step in flight knows of this yet
            if len(lease.steps) == 1:
                lease.steps[0].touched.discard(block)  # nothing in flight: it is free at once
            self.drop([block], lease.steps[1:])

    def fence(self, lease_id: str) -> None:
        """Retired blocks, then all tables of the lease, one sequence after the other."""
        lease = self.leases.pop(lease_id)
        for sequence in lease.sequences.values():
            sequence.released = True
        holders = self.holders()
        tables = [block for s in lease.sequences.values() for block in reversed(blocks_in_order(s.tables))]
        for block in reversed(dict.fromkeys(reversed(tables))):
            if not holders[block]:
                self.let_go[block] = next(self.ticks)
        self.rest()


def state_of(ledger: Ledger, lease_id: str | None = None, *, but_last_step: bool = False) -> object:
    """Everything in a ledger that a refusal must leave as it was; what a refused plan may change is left out."""
    if not but_last_step:
        lease_id = None
    elif lease_id is not None:
        last = ledger.probe.steps_in_flight(lease_id)[-1]
        assert not last.run_seq_ids
        assert not any((last.num_held, last.num_fills, last.num_released))
    return ledger.probe.state(lease_id), [(lease.lease_id, lease.is_ending) for lease in ledger.inspector.leases()]


# -- the machine ----------------------------------------------------------------------------------------------------

SEED = st.integers(0, 2**32 - 1)
"""Choices inside of a plan are made by a generator of this seed: evener than Hypothesis would, and known from it."""

PLANS = ["items"] * 5 + ["decode"] * 3 + ["again", "rewrite"]
WORK = ["run"] * 5 + ["report"] * 4 + ["catch up"] * 3 + ["fail", "skip", "report wrongly"]
EVENTS = (
    ["open lease"] * 3
    + ["look up"] * 3
    + ["end lease", "fence", "fence", "expire", "reset prefix cache", "reset some", "reset some"]
    + ["pin"] * 3
    + ["unpin", "lose worker"]
)


class Client:
    """One lease as its client sees it: steps planned and not run, steps run and not reported."""

    def __init__(self, lease_id: str) -> None:
        self.lease_id = lease_id
        self.is_open = True
        self.names_tenants = False
        self.forget_steps()

    def forget_steps(self) -> None:
        self.to_run: list[PlannedStep] = []
        self.to_report: list[Report] = []
        self.reported: list[Report] = []
        self.last_call: tuple[str, StepRequest, Planned] | None = None


class LedgerMachine(RuleBasedStateMachine):
    policy = "lru"
    keeps = False
    """True if half of the admissions have breakpoints, at least."""
    is_tiered = False
    """True if evicted blocks are copied to the host tier, and sequences come and go."""
    has_disk = False
    """True if the host tier is small, and has a disk below."""
    watched = None
    """The ledger and the epoch that are watched, and what was told of each medium of copies."""

    @initialize(
        groups=st.sampled_from(LAYER_GROUPS),
        num_usable=st.sampled_from([6, 8, 12, 7, 5, 4, 3, 2, 1]),
        block_size=st.sampled_from([2, 2, 1, 4]),
        max_sequences=st.sampled_from([8, 8, 8, 5, 3, 1]),
        max_tokens=st.sampled_from([24, 24, 24, 5]),
        num_host=st.sampled_from([6, 6, 12, 3, 0]),
        tenants=st.sampled_from([(0, 0, 0), (0, 0, 1), (0, 1, 0)]),
        delay=st.sampled_from([2, 1, 3, 0, 6]),
        reserving=st.sampled_from([0.3, 0.0, 0.7]),
        naming=st.sampled_from([0.3, 0.0, 0.6]),
        shares=st.sampled_from([(0, None), (0, None), (2, None), (0, 3), (1, 4)]),
        pinning=st.sampled_from([0.1, 0.0, 0.3]),
        budgets=st.sampled_from([(None, None), (None, 2), (2, 4), (0, 1)]),
        expecting=st.sampled_from([0.0, 0.0, 0.5]),
        keeping=st.sampled_from([0.0, 0.5, 0.8]),
        keep_limits=st.sampled_from([(None, None), (3, 2), (None, 1), (0, 4)]),
        speculating=st.sampled_from([0.3, 0.0, 0.8]),
        num_copies=st.sampled_from([12, 3, 0, 1]),
        num_disk=st.sampled_from([12, 12, 4, 2]),
    )
    def start(
        self,
        groups,
        num_usable,
        block_size,
        max_sequences,
        max_tokens,
        num_host,
        tenants,
        delay,
        reserving,
        naming,
        shares,
        pinning,
        budgets,
        expecting,
        keeping,
        keep_limits,
        speculating,
        num_copies,
        num_disk,
    ):
        if self.keeps:
            groups, keeping, expecting, max_sequences = (FULL,), max(keeping, 0.5), 0.0, 8
            num_usable, max_tokens, reserving = max(num_usable, 6), 24, 0.0
        if self.is_tiered:
            keeping, expecting, max_sequences, max_tokens, reserving = 0.0, 0.0, 8, 24, 0.0
            num_usable, num_host, num_copies = max(num_usable, 5), max(num_host, 6), max(num_copies, 3)
        if self.has_disk:
            num_usable, num_copies, block_size = min(num_usable, 6), min(num_copies, 4), min(block_size, 2)
        num_usable += 3 * (len(groups) - 1)
        num_host += 3 * (len(groups) - 1) * (num_host > 0)
        self.geometry = Geometry(
            block_size=block_size,
            num_blocks=num_usable + 1,
            block_bytes=1,
            max_sequences=max_sequences,
            max_sequence_tokens=max_tokens,
            vocab_size=VOCAB,
            model="m",
            model_fingerprint=FINGERPRINT,
            num_host_blocks=num_host,
            layer_groups=groups,
            max_drafts=MAX_DRAFTS,
            host_cached_limit=min(num_copies, num_host),
            num_disk_blocks=num_disk if self.has_disk else 0,
        )
        self.epoch = EPOCH
        self.ledger = Ledger("pool", EPOCH, self.geometry, policy=self.policy, verify=True)
        floor, limit = (num_usable if share is None else min(share, num_usable) for share in shares)
        budget, other_budget = (num_usable if budget is None else budget for budget in budgets)
        keep_limit, other_keep_limit = (num_usable if most is None else most for most in keep_limits)
        of_all = Share(0, num_usable, budget, keep_limit)
        of_second = Share(floor, limit, other_budget, other_keep_limit)
        as_blocks = lambda share: (share.floor, num_usable, share.limit, share.pin_budget, share.keep_limit)  # noqa: E731
        keeping = keeping if groups == (FULL,) else 0.0  # windows: see the core's own tests
        self.ledger.set_shares(as_blocks(of_all), {TENANTS[1]: as_blocks(of_second)})
        # A pool with windows is always under LRU.
        self.is_lru = self.policy == "lru" or any(group != FULL for group in groups)
        self.books = Books(self.geometry, [of_all, of_second], is_lru=self.is_lru, has_advice=expecting + keeping > 0.0)
        self.worker = Worker(self.geometry)
        self.tenants = tenants
        self.delay = delay
        self.reserving = reserving
        """The part of the admissions that have a reservation."""
        self.naming = naming
        """The part of the admissions that name a tenant."""
        self.pinning = pinning
        """The part of the plans that a pin follows."""
        self.expecting = expecting
        """The part of the plans that name prompts that wait."""
        self.keeping = keeping
        """The part of the admissions that have breakpoints."""
        self.speculating = speculating
        """The part of the decoding sequences that have drafts."""
        self.clients: dict[int, Client] = {}
        self.names = itertools.count()
        self.open_orders: dict[int, attach_pb2.DiskOrder] = {}
        """Orders about the disk that the worker has, and has not begun."""
        self.ended_orders: list[tuple[int, bool]] = []
        """Those that have ended and are not reported: the number, and whether it is done."""
        self.last_order = 0
        self.now = 0.0
        self.resetting = None
        self.open(0)

    def open(self, slot):
        client = self.clients[slot] = Client(f"lease-{next(self.names)}")
        tenant = self.tenants[slot]
        self.ledger.open_lease(client.lease_id, ttl_s=TTL_S, now=self.now, tenant=TENANTS[tenant])
        # The third lease's holder has no role to name tenants.
        client.names_tenants = slot != 2
        self.books.leases[client.lease_id] = BookLease(tenant, client.names_tenants)
        self.worker.leases[client.lease_id] = WorkerLease()

    def pick(self, rng, wanted=lambda client: client.is_open):
        """One of the clients that are as wanted, or None."""
        clients = [client for _, client in sorted(self.clients.items()) if wanted(client)]
        return rng.choice(clients) if clients else None

    # what a client may ask for

    def request(self, client, rng, num_items):
        book = self.books.leases[client.lease_id]
        ids = sorted(book.sequences)
        away = [seq_id for seq_id in ids if book.sequences[seq_id].host is not None]
        releases, offloads, trims, forks, counts, appends, restores, admissions = [], [], [], [], {}, {}, [], []
        drafts: dict[int, list[int]] = {}
        for _ in range(num_items):
            weights = [8, 2 if len(ids) < 3 else 4, 2, 3, 3 if len(ids) < 3 else 1, 2, 1 + 3 * len(away)]
            if self.keeps or self.is_tiered:
                weights[1], weights[4] = 6, 9
            kinds = ["extend", "release", "trim", "fork", "admit", "offload", "restore"]
            kind = rng.choices(kinds, weights)[0] if ids else "admit"
            seq_id = rng.choice(ids) if ids and rng.random() < 0.97 else rng.randrange(10)
            sequence = book.sequences.get(seq_id)
            length = len(sequence.tokens) if sequence else 3
            new_id = rng.choice(
                [i for i in range(12 + len(ids)) if i not in ids] if rng.random() < 0.95 else [-1, *range(10)]
            )
            position = rng.choice([length, length - 1, rng.randint(1, length), rng.randint(0, length + 1)])
            if sequence and self.books.has_windows and rng.random() < 0.5:
                position = min(length, self.books.least_position(sequence) + rng.randrange(3))
            if kind == "release":
                releases.append(seq_id)
            elif kind == "offload":
                offloads.append(seq_id)
            elif kind == "restore":
                restores.append(Restore(rng.choice(away) if away else seq_id, max_compute=rng.choice([0, 0, 1, 3])))
            elif kind == "trim":
                trims.append(Trim(seq_id, position))
            elif kind == "fork":
                forks.append(Fork(seq_id, [new_id], position))
            elif kind == "admit":
                salt, adapter = rng.choices(NAMESPACES, [7, 2, 2])[0]
                tenant = rng.randrange(len(TENANTS)) if rng.random() < self.naming else None
                tokens = self.prompt(book, rng)
                cache_use = rng.choices([*CacheUse], [6, 1, 2])[0]
                if self.books.copies and rng.random() < 0.6:
                    _, tag, *tokens = rng.choice(sorted(self.books.copies.values()))
                    tokens.append(rng.randrange(VOCAB))
                    tenant, (salt, adapter) = tag // len(NAMESPACES), NAMESPACES[tag % len(NAMESPACES)]
                    tenant = None if tenant == book.tenant else tenant
                waits = self.has_disk and rng.random() < 0.8
                if self.has_disk and rng.random() < 0.7:
                    tokens, cache_use, tenant = self.known_prompt(rng), CacheUse.READ_AND_WRITE, None
                    salt, adapter = NAMESPACES[0]
                if self.books.on_disk and rng.random() < 0.3:
                    _, tag, *tokens = rng.choice(sorted(self.books.on_disk.values()))
                    tokens.append(rng.randrange(VOCAB))
                    tenant, (salt, adapter) = tag // len(NAMESPACES), NAMESPACES[tag % len(NAMESPACES)]
                    tenant = None if tenant == book.tenant else tenant
                admissions.append(
                    Admission(
                        new_id,
                        pack(tokens),
                        waits_for_prefix=waits,
                        max_compute=rng.choice([0, 0, 0, 1, 3]),
                        salt=salt,
                        adapter=adapter,
                        reserved_tokens=self.reservation(len(tokens), rng),
                        cache_use=cache_use,
                        tenant=None if tenant is None else TENANTS[tenant],
                        breakpoints=() if cache_use is CacheUse.NONE else self.breakpoints(len(tokens), rng),
                    )
                )
            elif seq_id not in counts:
                self.add_extend(sequence, seq_id, rng, counts, appends, drafts)
        expected_prompts = [
            ExpectedPrompt(pack(self.prompt(book, rng)), rng.choice([0.0, 5.0]), tenant=rng.choice([None, *TENANTS]))
            for _ in range(rng.choice([1, 1, 2]) if rng.random() < self.expecting else 0)
        ]
        return StepRequest(
            releases=releases,
            offloads=offloads,
            expected_prompts=expected_prompts,
            trims=trims,
            forks=forks,
            restores=restores,
            extend_ids=list(counts),
            extend_token_counts=list(counts.values()),
            appends=appends,
            drafts=drafts,
            admissions=admissions,
            admission_token_budget=rng.choice([0, 0, 0, 1, 3]),
            admission_reserve=rng.choice([0, 0, 0, 1]),
            host_copy_use=rng.choice([HostCopyUse.THERE_AND_BACK] * 6 + [HostCopyUse.BACK, HostCopyUse.NONE]),
            skips_disk=self.has_disk and rng.random() < 0.1,
        )

    def add_extend(self, sequence, seq_id, rng, counts, appends, drafts):
        if rng.random() < (0.5 if sequence and sequence.takes_drafts else 0.03):
            drafts[seq_id] = self.drafts(sequence, rng)
            counts[seq_id] = 1 + len(drafts[seq_id])
            return
        waiting = sequence.known - sequence.scheduled if sequence else 1
        can_go_on = waiting > 0 or (sequence is not None and sequence.sampled_at == sequence.scheduled)
        if rng.random() < (0.15 if can_go_on else 0.9):
            values = [rng.randrange(VOCAB + (rng.random() < 0.03)) for _ in range(rng.randint(1, 3))]
            appends[seq_id] = pack(values)
            waiting += len(values)
        counts[seq_id] = rng.choice([1, max(1, waiting), rng.randint(0, max(1, waiting)), rng.choice([1, 2, 40])])

    def drafts(self, sequence, rng):
        """Any tokens; or the right ones, and one that is not."""
        count = rng.randint(1, MAX_DRAFTS)
        drafts = [rng.randrange(VOCAB + (rng.random() < 0.01)) for _ in range(count)]
        if sequence and rng.random() < 0.5 and all(token.value is not None for token in sequence.tokens):
            right, prefix = rng.randint(0, count), sequence.prefix(len(sequence.tokens))
            for index in range(right):
                drafts[index] = sample(prefix)
                prefix = (*prefix, drafts[index])
        return drafts

    def prompt(self, book, rng):
        """Some prompts begin like a sequence that is there, or as one that was here before may have begun."""
        longest = max(1, self.books.max_tokens(rng.randrange(len(TENANTS))))
        length = rng.choices(
            [rng.randint(1, min(longest, 3 * self.books.size + 1)), longest, longest + 1, 0], [40, 2, 2, 1]
        )
        fixed = rng.choice([[0] * length[0], [i % 2 for i in range(length[0])]])
        if book.sequences and rng.random() < 0.6:
            sequence = book.sequences[rng.choice(sorted(book.sequences))]
            known = [token.value for token in sequence.tokens[: sequence.known]]
            fixed = (known + fixed)[: length[0]]
        return [*fixed[:-1], VOCAB] if rng.random() < 0.02 else fixed

    def known_prompt(self, rng):
        """One of eight prompts of up to three blocks, some with a common beginning."""
        size, number = self.geometry.block_size, rng.randrange(8)
        return [number >> place & 1 for place in range(rng.choice([2, 3, 3])) for _ in range(size)] + [0]

    def reservation(self, num_tokens, rng):
        """None, one that mostly ends within a block, or seldom one that can't be."""
        if rng.random() >= self.reserving:
            return 0
        return max(0, num_tokens + rng.choice([*range(2 * self.books.size + 2), self.books.max_tokens(0), -1]))

    def breakpoints(self, num_tokens, rng):
        """None, or up to four, some within a block, with times that end while the machine runs."""
        if not num_tokens or rng.random() >= self.keeping:
            return ()
        ends = sorted(rng.sample(range(1, num_tokens + 1), rng.randint(1, min(4, num_tokens))))
        return [Breakpoint(end, rng.choice([1.0, 1.5, 4.0])) for end in ends]

    @rule(kind=st.sampled_from(PLANS), num_items=st.integers(1, 5), seed=SEED)
    def plan(self, kind, num_items, seed):
        rng = Random(seed)
        client = self.pick(rng)
        if client is None:
            return
        if kind == "items":
            self.do_plan(client, self.request(client, rng, num_items), named=rng.random() < 0.3)
        elif kind == "again":
            self.plan_again(client)
        elif kind == "rewrite":
            self.rewrite(client, rng)
        for _ in range(min(num_items, 3) if kind == "decode" else 0):
            sequences = self.books.leases[client.lease_id].sequences
            ids = [i for i in sorted(sequences) if rng.random() < 0.8]
            speculating = [i for i in ids if sequences[i].takes_drafts and rng.random() < self.speculating]
            drafts = {i: self.drafts(sequences[i], rng) for i in speculating}
            counts = [1 + len(drafts.get(i, ())) for i in ids]
            self.do_plan(client, StepRequest(extend_ids=ids, extend_token_counts=counts, drafts=drafts))
            if len(client.to_run) > 1 and rng.random() < 0.5:  # the next plan has a report, and steps in flight
                self.do_run(client)
                self.do_report(client)
        self.follow(client, rng)
        if self.books.index and rng.random() < self.pinning:
            self.pin(rng)

    def rewrite(self, client, rng):
        """Forks a sequence, one with a reservation if there is one, and goes on with other tokens than the fork has."""
        sequences = [s for s in self.books.leases[client.lease_id].sequences.values() if s.host is None]
        if not sequences:
            return
        sequence = rng.choice([s for s in sequences if s.reserved_tokens] or sequences)
        seq_id, length = sequence.seq_id, len(sequence.tokens)
        new_id = next(i for i in range(12) if i not in self.books.leases[client.lease_id].sequences)
        self.do_plan(client, StepRequest(forks=[Fork(seq_id, [new_id], rng.choice([length, rng.randint(1, length)]))]))
        if rng.random() < 0.5:
            self.do_catch_up(client)
        kept = rng.randint(1, len(sequence.tokens))
        values = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 2))]
        count = max(0, kept - sequence.scheduled) + len(values)
        trims = [Trim(seq_id, kept)] if rng.random() < 0.8 else []
        appends = {seq_id: pack(values)}
        request = StepRequest(trims=trims, extend_ids=[seq_id], extend_token_counts=[count], appends=appends)
        self.do_plan(client, request)

    def follow(self, client, rng):
        """The worker is a few steps behind, and its reports a few more."""
        while len(client.to_run) > rng.randint(0, self.delay):
            how = rng.random()
            self.do_run(client, skip=how < 0.005, fail=0.005 <= how < 0.02)
        while len(client.to_report) > rng.randint(0, self.delay):
            self.do_report(client)

    def within_bounds(self, request):
        """The request without the items that are too many for one plan."""
        most = self.ledger.geometry.max_sequences
        lists = (
            "releases",
            "offloads",
            "expected_prompts",
            "trims",
            "forks",
            "extend_ids",
            "extend_token_counts",
            "restores",
            "admissions",
        )
        return replace(request, **{name: getattr(request, name)[:most] for name in lists})

    def do_plan(self, client, request, *, named=False):
        request, lease_id = self.within_bounds(request), client.lease_id
        request_id = f"plan-{next(self.names)}" if named else ""
        self.pass_time((0.01, 0.01, 0.01, 0.4)[next(self.names) % 4] if self.keeping else 0.01)
        before = state_of(self.ledger)
        if len(self.books.leases[lease_id].steps) >= 64:
            self.refused_call(Reason.TOO_MANY_STEPS, lambda: self.call(client, request))
            return
        plan = self.call(client, request, request_id=request_id)
        items = (
            *(request.offloads, request.trims, request.forks),
            *(request.extend_ids, request.restores, request.admissions),
        )
        orders = self.new_orders()
        self.books.reads_now = [order for order in orders if order.WhichOneof("order") == "read"]
        has_effect = plan.released_ids or plan.passed_seq_ids or request.expected_prompts or orders
        # One that waits for the disk has used the copies before what it waits for.
        has_effect = has_effect or any("read from the disk" in each.refusal.message for each in plan.refusals)
        if not has_effect and len(plan.refusals) == sum(map(len, items)):
            assert state_of(self.ledger, lease_id, but_last_step=True) == before, "a refused item changed something"
        lease = self.books.leases[lease_id]
        runs = self.books.plan(lease, request, plan)
        assert not self.books.reads_now, "a copy is read that no admission waits for"
        self.books.take_orders([order for order in orders if order.WhichOneof("order") != "read"])
        touched = {block for run in runs for table in run.tables for block in table} | {
            *plan.copy_sources,
            *plan.copy_targets,
        }
        touched |= {*plan.offload_sources, *plan.restore_targets}
        touched |= {-1 - host for host in (*plan.offload_targets, *plan.restore_sources)}
        client.to_run.append(PlannedStep(plan, runs, {block: self.books.generations[block] for block in touched}))
        if named:
            client.last_call = (request_id, request, plan)

    def pass_time(self, seconds):
        """End the pins that have expired."""
        self.now += seconds
        self.books.advance(self.now)
        self.ledger.advance(self.now)

    def call(self, client, request, *, request_id="", epoch=None):
        return plan_step(
            self.ledger,
            client.lease_id,
            request,
            now=self.now,
            epoch=self.epoch if epoch is None else epoch,
            request_id=request_id,
            names_tenants=client.names_tenants,
        )

    def refused_call(self, reason, call):
        before = state_of(self.ledger)
        with pytest.raises(CallRefused) as refused:
            call()
        assert refused.value.refusal.reason is reason
        assert state_of(self.ledger) == before

    def plan_again(self, client):
        self.refused_call(Reason.EPOCH_CHANGED, lambda: self.call(client, StepRequest(), epoch=self.epoch + 1))
        if client.last_call is None:
            return
        request_id, request, plan = client.last_call
        before = state_of(self.ledger)
        again = self.call(client, request, request_id=request_id)
        assert (again.grant, again.answer) == (plan.grant, plan.answer)
        assert state_of(self.ledger) == before
        other = StepRequest(releases=[99])
        self.refused_call(Reason.REQUEST_ID_REUSED, lambda: self.call(client, other, request_id=request_id))

    # what a worker does

    @rule(kind=st.sampled_from(WORK), count=st.integers(1, 3), seed=SEED)
    def work(self, kind, count, seed):
        rng = Random(seed)
        if kind == "report":
            client = self.pick(rng, lambda client: client.to_report)
            for _ in range(min(count, len(client.to_report)) if client else 0):
                self.do_report(client)
        elif kind == "catch up":
            client = self.pick(rng, lambda client: client.to_run or client.to_report)
            self.do_catch_up(client)
        elif kind == "report wrongly":
            self.report_wrongly(rng)
        else:
            client = self.pick(rng, lambda client: client.to_run)
            count = 1 if kind != "run" else count
            for _ in range(min(count, len(client.to_run)) if client else 0):
                self.do_run(client, skip=kind == "skip", fail=kind == "fail")

    def do_run(self, client, *, skip=False, fail=False):
        step = client.to_run.pop(0)
        for block, generation in step.generations.items():
            assert self.books.generations[block] == generation, f"block {block} was handed out again"
        findable = {block for block in range(1, self.geometry.num_blocks) if self.ledger.probe.block(block)[3]}
        for run in step.runs:
            written = range(run.start // self.books.size, self.books.num_blocks_for(len(run.tokens)))
            for table in run.tables:
                assert not findable & {table[index] for index in written}, "a findable block is written"
        report = self.worker.run(client.lease_id, step, skip=skip, fail=fail)
        for run in step.runs:
            row = self.worker.leases[client.lease_id].rows[run.seq_id]
            told = [[row.tables[g].get(i, 0) for i in range(len(table))] for g, table in enumerate(run.tables)]
            assert told == run.tables, "the worker was told another table"
        client.to_report.append(report)

    def do_report(self, client):
        report = client.to_report.pop(0)
        self.settle(client, report)
        client.reported.append(report)
        if client.lease_id in self.books.leases:
            self.books.settle(self.books.leases[client.lease_id], report)
        self.follow_disk()

    def settle(self, client, report):
        counts = [len(tokens) for tokens in report.sampled.values()]
        self.ledger.settle(
            report_of(
                client.lease_id,
                report.step_number,
                report.outcome,
                seq_ids=[seq_id for seq_id, _ in report.computed],
                token_counts=[count for _, count in report.computed],
                sampled_ids=list(report.sampled),
                sampled_tokens=[token for tokens in report.sampled.values() for token in tokens],
                sampled_counts=[] if set(counts) == {1} else counts,
            )
        )

    def report_wrongly(self, rng):
        """Reports that were sent before, and later ones out of order."""
        client = self.pick(rng, lambda client: client.reported)
        before = state_of(self.ledger)
        for report in client.reported[-2:] if client else ():
            self.settle(client, report)
        assert state_of(self.ledger) == before
        client = self.pick(rng, lambda client: len(client.to_report) > 1)
        if client:
            self.refused_call(Reason.INVALID_ARGUMENT, lambda: self.settle(client, client.to_report[1]))
        client = self.pick(rng, lambda client: client.to_report and client.to_report[0].computed)
        if client and client.lease_id in self.books.leases:
            self.report_more(client, client.to_report[0])

    def report_more(self, client, report):
        """More drafts were accepted than there were, or than the tokens say."""
        (seq_id, end), *others = report.computed
        if seq_id in report.sampled:
            longer = replace(report, computed=[(seq_id, end + 1), *others])
            self.refused_call(Reason.INVALID_ARGUMENT, lambda: self.settle(client, longer))
            longer = replace(longer, sampled={**report.sampled, seq_id: [*report.sampled[seq_id], VOCAB - 1]})
            self.refused_call(Reason.INVALID_ARGUMENT, lambda: self.settle(client, longer))

    def do_catch_up(self, client):
        while client and client.to_run:
            self.do_run(client)
        while client and client.to_report:
            self.do_report(client)

    # what happens to leases

    @rule(kind=st.sampled_from(EVENTS), seed=SEED)
    def happen(self, kind, seed):
        getattr(self, kind.replace(" ", "_"))(Random(seed))

    def open_lease(self, rng):
        slot = rng.randrange(3)
        if slot not in self.clients:
            self.open(slot)

    def end_lease(self, rng):
        client = self.pick(rng, lambda _: True)
        if client:
            assert self.ledger.end_lease(client.lease_id) == client.is_open
            client.is_open = False
            self.refused_call(Reason.LEASE_NOT_FOUND, lambda: self.call(client, StepRequest()))

    def expire(self, rng):
        self.pass_time(rng.choice([1.0, 3.0, 6.0, 11.0]))
        expired = set(self.ledger.expire_leases(self.now))
        for client in self.clients.values():
            if client.lease_id in expired:
                assert client.is_open
                client.is_open = False
            elif client.is_open:
                assert self.ledger.inspector.lease(client.lease_id).expires_at > self.now

    def fence(self, rng):
        client = self.pick(rng, lambda client: not client.is_open)
        if client:
            self.do_fence(client)
            self.clients = {slot: other for slot, other in self.clients.items() if other is not client}

    def do_fence(self, client):
        self.worker.fence(client.lease_id)
        self.ledger.lease_fenced(client.lease_id)
        self.books.fence(client.lease_id)
        self.parked_blocks_agree()
        before = state_of(self.ledger)
        for report in client.to_report:
            self.settle(client, report)
        self.ledger.lease_fenced(client.lease_id)
        assert state_of(self.ledger) == before

    def lose_worker(self, rng):
        """The worker dies, perhaps within a step, and its memory is kept; some blocks are found damaged."""
        client = self.pick(rng, lambda client: client.to_run)
        if client and rng.random() < 0.7:
            lease, plan = self.worker.leases[client.lease_id], client.to_run[0].plan
            self.worker.apply(lease, plan)
            self.worker.scribble(lease, plan)
        damaged = {block for block in range(1, self.geometry.num_blocks) if rng.random() < 0.1}
        whole = sum(1 << block for block in range(self.geometry.num_blocks) if block not in damaged)
        self.epoch += 1
        numbers = self.ledger.begin_epoch(
            self.epoch, whole_blocks=whole.to_bytes(-(-self.geometry.num_blocks // 8), "little"), now=self.now
        )
        books = self.books
        num_findable = len(books.index)
        for lease_id in sorted(books.leases):
            books.fence(lease_id)
        for pin_id in sorted(books.pins):
            if damaged & set(books.pins[pin_id].blocks):
                books.unpin(pin_id)
        left = {key: block for key, block in books.index.items() if block not in damaged}
        assert numbers == (len(left), num_findable - len(left))
        if len(left) < num_findable:
            self.lose_to_reset(left)
        books.copies = {}
        erasures = [order for order in books.orders.values() if order.kind == "erase"]
        books.on_disk, books.orders, books.expected_erasures = {}, {}, [order.tenants for order in erasures]
        self.open_orders, self.ended_orders, self.last_order = {}, [], 0
        self.follow_disk()
        books.drafted = books.accepted = books.written = books.evicted = books.allocated = 0
        self.worker.lose_all_but_memory()
        self.clients = {slot: client for slot, client in self.clients.items() if client.is_open}
        for slot, client in self.clients.items():
            client.forget_steps()
            books.leases[client.lease_id] = BookLease(self.tenants[slot], client.names_tenants)
            self.worker.leases[client.lease_id] = WorkerLease()
        if self.geometry.num_disk_blocks:
            self.find_disk()

    def reset_prefix_cache(self, rng):
        """All of it, or a slice of it, as other calls may find it."""
        num_blocks = self.geometry.num_blocks
        first = rng.choice([0, rng.randrange(num_blocks)])
        self.reset_slice(first, rng.choice([num_blocks, rng.randint(first, num_blocks)]))

    def reset_slice(self, first, end):
        if not first:
            for pin_id in sorted(self.books.pins):
                self.books.unpin(pin_id)
        kept = self.books.kept()
        left = {key: block for key, block in self.books.index.items() if not first <= block < end or block in kept}
        assert self.ledger.reset_prefix_cache(first, end) == len(self.books.index) - len(left)
        if not first:
            self.books.withhold(range(len(TENANTS) * len(NAMESPACES)))
            self.follow_disk()
        self.lose_to_reset(left)

    def lose_to_reset(self, left):
        self.books.index = left
        self.books.knows_parents = False
        self.books.rest()

    def reset_some(self, rng):
        """Resets of a tenant, a salt, or a prefix; other calls run between its beginning and its end."""
        if self.resetting is not None:
            self.go_on_with_reset()
            return
        away = [s.tag for lease in self.books.leases.values() for s in lease.sequences.values() if s.host is not None]
        tag = rng.choice([rng.randrange(len(TENANTS) * len(NAMESPACES)), *away, *(key[1] for key in self.books.index)])
        tenant, salt = divmod(tag, len(NAMESPACES))
        size, kind = self.geometry.block_size, rng.choice(["tenant", "salt", "prefix", "prefix"])
        tags = [tag] if kind != "tenant" else range(tenant * len(NAMESPACES), (tenant + 1) * len(NAMESPACES))
        keys = sorted(key for key in self.books.index if key[1] == tag)
        if keys and rng.random() < 0.3:
            hole = self.books.index[keys.pop(rng.randrange(len(keys)))]
            self.reset_slice(hole, hole + 1)
        stem = min(rng.choices(keys, k=2), key=len)[1:] if kind == "prefix" and keys else (tag,)
        is_wanted = lambda prefix: prefix[0] in tags if kind == "tenant" else self.books.begins_with(prefix, stem)  # noqa: E731
        tail = [0] * rng.randrange(size) if len(stem) > 1 else []
        before = self.ledger.inspector.counts()
        reset = self.ledger.begin_reset(
            TENANTS[tenant],
            salt=None if kind == "tenant" else NAMESPACES[salt][0],
            adapter=NAMESPACES[salt][1],
            tokens=pack([*stem[1:], *tail]),
        )
        assert self.ledger.inspector.counts() == before
        self.books.withhold(tags)
        self.follow_disk()
        self.books.new = set()
        # Pins go at once; what is pinned from then on stays.
        is_meant = lambda prefix: prefix[0] // len(NAMESPACES) == tenant and is_wanted(prefix)  # noqa: E731
        ended = [pin_id for pin_id, pin in sorted(self.books.pins.items()) if is_meant(pin.prefix)]
        assert self.ledger.go_on_with_reset(reset) == (0, len(ended))
        for pin_id in ended:
            self.books.unpin(pin_id)
        self.resetting = reset, is_meant
        if rng.random() < 0.5:
            self.go_on_with_reset()

    def go_on_with_reset(self):
        (reset, is_meant), self.resetting = self.resetting, None
        index, spared = self.books.index, self.books.new | self.books.kept()
        left = {key: block for key, block in index.items() if block in spared or not is_meant(key[1:])}
        dropped = list(iter(lambda: self.ledger.go_on_with_reset(reset), None))
        assert (sum(blocks for blocks, _ in dropped), sum(pins for _, pins in dropped)) == (len(index) - len(left), 0)
        self.lose_to_reset(left)

    # what is pinned

    def pin(self, rng):
        """For any tenant: mostly what is cached, or a part of it and more."""
        self.do_catch_up(self.pick(rng, lambda client: client.to_run or client.to_report))
        tag = rng.randrange(len(TENANTS) * len(NAMESPACES))
        keys = sorted(self.books.index)
        if keys and rng.random() < 0.9:
            _, tag, *tokens = rng.choice(keys)
        else:
            tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
        tokens = tokens[: rng.choice([len(tokens), rng.randint(1, len(tokens))])] + [0] * rng.randrange(3)
        tenant, (salt, adapter) = TENANTS[tag // len(NAMESPACES)], NAMESPACES[tag % len(NAMESPACES)]
        ttl_s = rng.choice([0.025, 0.105, 4.005, 99])
        pin = lambda: self.ledger.pin_prefix(  # noqa: E731
            pack(tokens), salt=salt, adapter=adapter, tenant=tenant, ttl_s=ttl_s, now=self.now
        )
        expected = self.books.pin(tag, tokens, self.now + ttl_s)
        if isinstance(expected, Reason):
            self.refused_call(expected, pin)
            return
        pinned = pin()
        assert (pinned.pin_id, pinned.tenant) == (expected, tenant)
        assert pinned.num_tokens == len(self.books.pins[expected].prefix) - 1

    def unpin(self, rng):
        """By its tenant, by another one, or by a caller that may take back any."""
        pin_id = rng.choice([*sorted(self.books.pins), bytes(16)])
        tenant, pin = rng.choice([*TENANTS, None]), self.books.pins.get(pin_id)
        is_there = pin is not None and tenant in (None, TENANTS[pin.tenant])
        before = state_of(self.ledger)
        assert self.ledger.unpin_prefix(pin_id, tenant=tenant) == is_there
        if is_there:
            self.books.unpin(pin_id)
        else:
            assert state_of(self.ledger) == before

    def look_up(self, rng):
        client = self.pick(rng)
        if client is None:
            return
        book, tenant = self.books.leases[client.lease_id], rng.randrange(len(TENANTS))
        number = rng.randrange(len(NAMESPACES))
        tokens = self.prompt(book, rng)
        prefixes = self.books.prefixes(tenant * len(NAMESPACES) + number, tokens, len(tokens) - 1)
        length = self.books.longest_hit(prefixes)[0]
        in_host, on_disk = self.books.copies.values(), self.books.on_disk.values()
        with_host = self.books.longest_with_copies(prefixes, in_host)[0]
        with_disk = self.books.longest_with_copies(prefixes, {*in_host, *on_disk})[0]
        num_blocks = (length, with_host - length, with_disk - with_host)
        expected = tuple(num * self.geometry.block_size for num in num_blocks)
        before = state_of(self.ledger)
        salt, adapter = NAMESPACES[number]
        found = self.ledger.inspector.cached_tokens(pack(tokens), salt=salt, adapter=adapter, tenant=TENANTS[tenant])
        assert (found, state_of(self.ledger)) == (expected, before)

    # the disk

    def new_orders(self):
        """The orders that the ledger has given since the last time."""
        orders = attach_pb2.DiskOrders.FromString(self.ledger.disk_orders(self.last_order) or b"").orders
        self.open_orders |= {order.order_number: order for order in orders}
        self.last_order = self.ledger.last_disk_order
        return list(orders)

    def follow_disk(self):
        """The books take the orders that came of a call."""
        self.books.take_orders(self.new_orders())

    def use_disk(self, rng):
        """The worker carries some orders out, and reports some that have ended: writes and erasures in their order."""
        for _ in range(rng.randint(1, 4)):
            in_turn = [n for n, order in self.open_orders.items() if order.WhichOneof("order") != "read"][:1]
            ready = in_turn + [n for n, order in self.open_orders.items() if order.WhichOneof("order") == "read"]
            if ready:
                number = rng.choice(ready)
                order = self.open_orders.pop(number)
                self.ended_orders.append((number, self.worker.obey(order, fails=rng.random() < 0.1)))
        rng.shuffle(self.ended_orders)
        ended, self.ended_orders = self.ended_orders[:4], self.ended_orders[4:]
        report = attach_pb2.DiskReport(
            done_order_numbers=[number for number, is_done in ended if is_done],
            failed_order_numbers=[number for number, is_done in ended if not is_done],
        )
        self.ledger.enter_disk_report(report.SerializeToString())
        for number, is_done in sorted(ended, key=lambda each: not each[1]):
            self.books.end_order(number, is_done=is_done)
        self.follow_disk()
        before = state_of(self.ledger)
        self.ledger.enter_disk_report(report.SerializeToString())
        assert state_of(self.ledger) == before, "a report that was repeated had an effect"

    def find_disk(self):
        """A new process of the worker says what is on its disk; all of it fits, but for quotas."""
        books, size = self.books, self.geometry.block_size
        erased = {tenant for order in books.orders.values() for tenant in order.tenants}
        content = attach_pb2.DiskContent(tenants=TENANTS)
        for block, record in self.worker.disk.items():
            content.disk_block_ids.append(block)
            content.prefix_hashes += record.prefix_hash
            content.tenant_indexes.append(TENANTS.index(record.tenant))
            content.layer_groups.append(record.group)
        self.ledger.enter_disk_content(content.SerializeToString())
        left = {b: r for b, r in self.worker.disk.items() if TENANTS.index(r.tenant) not in erased}
        found = {block: left[block] for block, *_ in self.ledger.probe.disk_copies()}
        books.on_disk = {block: record.slots[-1] for block, record in found.items()}
        assert all(hash_of(key[1:], size) == found[block].prefix_hash for block, key in books.on_disk.items())
        if all(share.limit >= self.geometry.num_blocks - 1 for share in books.shares):
            assert set(books.on_disk.values()) == {record.slots[-1] for record in left.values()}
        self.follow_disk()

    def disk_agrees(self):
        """The copies on the disk, those that are being written, and what they hold."""
        books, size = self.books, self.geometry.block_size
        orders = [order for order in books.orders.values() if order.kind == "write" and not order.is_dropped]
        expected = [(block, key, False) for block, key in books.on_disk.items()]
        expected += [(order.disk, order.key, True) for order in orders]
        assert sorted(self.ledger.probe.disk_copies()) == sorted(
            (block, hash_of(key[1:], size), key[0], tenant_of(key), is_arriving) for block, key, is_arriving in expected
        )
        for block, key in books.on_disk.items():
            ends = range(len(key) - size + 1, len(key) + 1)
            assert self.worker.disk[block].slots == [key[:end] for end in ends], "a copy holds something else"
        if self.geometry.num_disk_blocks:
            counts, states = statistics_of(self.ledger).disk_block_counts, Counter(books.disk_states().values())
            told = (counts.free_count, counts.held_count, counts.retired_count, counts.cached_count)
            assert told == (states["free"], 0, states["retired"], states["cached"])

    # what holds after every rule

    @invariant()
    def all_is_well(self):
        if hasattr(self, "ledger"):
            assert self.ledger.probe.violations() == []
            self.findable_blocks_hold_what_their_hash_says()
            self.computed_tokens_are_there()
            self.books_agree()
            self.watched_copies_agree()

    def watched_copies_agree(self):
        """A watch that reads all changes has the copies that the tiers have."""
        if self.watched is None or self.watched[0] != (self.ledger, self.ledger.epoch):
            media = {"host": self.ledger.probe.host_copies, "disk": self.ledger.probe.disk_copies}
            self.watched = (
                (self.ledger, self.ledger.epoch),
                [(medium, Known(0), {}, copies) for medium, copies in media.items()],
            )
        for medium, known, told, copies in self.watched[1]:
            events = self.ledger.inspector.changes(known, 1 << 20, tenant=None, with_content=False, medium=medium)
            for event in pb.WatchBlocksResponse.FromString(events).events:
                told.pop(event.block.block_id, None)
                if event.kind == pb.BLOCK_EVENT_KIND_STORED:
                    content = (event.block.prefix_hash, event.block.layer_group, event.block.tenant)
                    told[event.block.block_id] = content
            listed = {block: tuple(content) for block, *content, is_arriving in copies() if not is_arriving}
            assert told == listed, f"a watch of the {medium} has other copies"

    def books_agree(self):
        books, ledger = self.books, self.ledger
        states, holders = books.states(), books.holders()
        hash_by_block = {block: hash_of(key[1:], self.geometry.block_size) for key, block in books.index.items()}
        for block in range(1, self.geometry.num_blocks):
            state, references, _, prefix_hash = ledger.probe.block(block)
            assert state == states[block], f"block {block} is {state}, should be {states[block]}"
            assert references == holders[block]
            assert prefix_hash == hash_by_block.get(block)
        counts = counts_of(ledger)
        assert (counts.free, counts.cached, counts.active, counts.retired) == tuple(
            sum(state is s for s in states.values()) for state in BlockState
        )
        host_states = Counter(books.host_states().values())
        host_counts = host_counts_of(ledger) or (0, 0, 0, 0)
        assert tuple(host_counts) == tuple(host_states[state] for state in ("free", "held", "retired", "cached"))
        self.copies_agree()
        self.disk_agrees()
        reserved = sum(books.num_reserved(tenant) for tenant in range(len(TENANTS)))
        assert statistics_of(ledger).reserved_block_count == reserved
        statistics = statistics_of(ledger)
        drafted = (statistics.drafted_token_count, statistics.accepted_draft_token_count)
        assert drafted == (books.drafted, books.accepted)
        self.tenants_agree()
        self.keeps_agree()
        self.parked_blocks_agree()
        for lease_id, book in books.leases.items():
            self.sequences_agree(lease_id, book.sequences)

    def copies_agree(self):
        """The copies of evicted blocks, and what they hold."""
        size, steps = self.geometry.block_size, [s for lease in self.books.leases.values() for s in lease.steps]
        expected = [(block, key, False) for block, key in self.books.copies.items()]
        expected += [(block, key, True) for step in steps for block, key in step.arriving.items()]
        reads = [order for order in self.books.orders.values() if order.kind == "read" and not order.is_dropped]
        expected += [(order.host, order.key, True) for order in reads]
        assert sorted(self.ledger.probe.host_copies()) == sorted(
            (block, hash_of(key[1:], size), key[0], tenant_of(key), is_arriving) for block, key, is_arriving in expected
        )
        for block, key in self.books.copies.items():
            ends = range(len(key) - size + 1, len(key) + 1)
            assert self.worker.host_slots[block] == [key[:end] for end in ends], "a copy holds something else"

    def tenants_agree(self):
        for use in self.ledger.inspector.tenants():
            tenant = TENANTS.index(use.name)
            held, cached = self.books.num_held(tenant), self.books.blocks_of(tenant, BlockState.CACHED)
            cached -= self.books.num_idle_pinned(tenant)
            assert (use.num_held, use.num_cached) == (held, cached), use.name
            assert use.num_reserved == self.books.num_reserved(tenant), use.name
            assert use.num_pinned == self.books.num_pinned(tenant), use.name
            pins = [(pin.pin_id, pin.num_tokens) for pin in self.ledger.inspector.pins(tenant=use.name)]
            of_tenant = [(pin_id, pin) for pin_id, pin in sorted(self.books.pins.items()) if pin.tenant == tenant]
            assert pins == [(pin_id, len(pin.prefix) - 1) for pin_id, pin in of_tenant], use.name

    def keeps_agree(self):
        for tenant, name in enumerate(TENANTS):
            own = [(block, *keep) for block, keep in self.books.keeps.items() if self.books.owners[block] == tenant]
            assert self.ledger.probe.kept_blocks(name) == own, name
        statistics = statistics_of(self.ledger)
        assert (statistics.kept_block_count, statistics.written_token_count) == (
            len(self.books.keeps),
            self.books.written,
        )

    def parked_blocks_agree(self):
        parked, expected = self.ledger.probe.parked_blocks(), self.books.lru
        assert parked == expected if self.books.is_lru else sorted(parked) == sorted(expected)

    def sequences_agree(self, lease_id, book_sequences):
        assert self.ledger.probe.sequence_ids(lease_id) == list(book_sequences)
        for seq_id, book in book_sequences.items():
            sequence = sequence_of(self.ledger, lease_id, seq_id)
            flat = [block for table in book.tables for block in held(table)]
            in_host = [block for blocks in book.host or () for block in blocks]
            assert (sequence.block_table, sequence.host_blocks) == (flat, in_host)
            counts = map(len, book.host if book.host is not None else map(held, book.tables))
            assert sequence.tables == list(zip(map(num_passed, book.tables), counts, strict=True))
            assert sequence.tenant == TENANTS[book.tenant]
            assert sequence.is_offloaded == (book.host is not None)
            assert (sequence.num_known, sequence.num_tokens) == (book.known, len(book.tokens))
            assert (sequence.num_computed, sequence.num_scheduled) == (book.computed, book.scheduled)
            assert sequence.num_drafts == book.num_drafts
            known = pack(token.value for token in book.tokens if token.known)
            assert self.ledger.probe.tokens(lease_id, seq_id) == known

    def findable_blocks_hold_what_their_hash_says(self):
        size = self.geometry.block_size
        for block in range(1, self.geometry.num_blocks):
            prefix_hash = self.ledger.probe.block(block)[3]
            if prefix_hash is None:
                continue
            slots = self.worker.slots[block]
            assert POISON not in slots, f"block {block} can be found and was not computed"
            assert hash_of(slots[-1][1:], size) == prefix_hash, f"block {block} holds something else"
            assert all(slot == slots[-1][: len(slot)] for slot in slots)
            assert len(slots[0]) == len(slots[-1]) - size + 1

    def computed_tokens_are_there(self):
        """The computed tokens that the next one sees are read through the tables, except blocks still to be copied."""
        size = self.geometry.block_size
        for client in self.clients.values():
            plans = [step.plan for step in client.to_run]
            targets = {block for plan in plans for block in (*plan.copy_targets, *plan.restore_targets)}
            host_targets = {block for plan in plans for block in plan.offload_targets}
            for sequence in sequences_of(self.ledger, client.lease_id):
                book = self.books.leases[client.lease_id].sequences[sequence.seq_id]
                is_away = sequence.is_offloaded
                slots, unknown = (self.worker.host_slots, host_targets) if is_away else (self.worker.slots, targets)
                for number, (group, table) in enumerate(zip(self.geometry.layer_groups, book.tables, strict=True)):
                    first = num_passed(table)
                    assert first * size <= first_seen(group, book.computed), "blocks that the next token sees are gone"
                    blocks = [0] * first + book.host[number] if is_away else table
                    for position in range(first * size, book.computed):
                        block = blocks[position // size]
                        if block not in unknown:
                            content = (number, *book.prefix(position + 1))
                            assert slots[block][position % size] == content

    def teardown(self):
        if not hasattr(self, "ledger"):
            return
        for client in self.clients.values():
            while client.to_run and len(client.to_run) % 2:
                self.do_run(client)
            self.ledger.end_lease(client.lease_id)
            self.do_fence(client)
        counts = counts_of(self.ledger)
        assert counts.free + counts.cached == self.geometry.num_blocks - 1
        assert self.ledger.probe.num_rows() == 0
        free, _, _, cached = host_counts_of(self.ledger) or (0, 0, 0, 0)
        assert free + cached == self.geometry.num_host_blocks
        statistics = statistics_of(self.ledger)
        assert (statistics.evicted_block_count, statistics.allocated_block_count) == (
            self.books.evicted,
            self.books.allocated,
        )


class DefaultPolicyMachine(LedgerMachine):
    """With the policy that cachemgr runs with, which follows another candidate at any time."""

    policy = DEFAULT_POLICY

    def follow(self, client, rng):
        super().follow(client, rng)
        if not self.is_lru and rng.random() < 0.5:
            self.ledger.probe.follow(rng.randrange(NUM_CANDIDATES))


class KeepingMachine(LedgerMachine):
    """With breakpoints in a pool with one layer group."""

    keeps = True


class TieredMachine(LedgerMachine):
    """With copies of evicted blocks in the host tier."""

    is_tiered = True

    def follow(self, client, rng):
        super().follow(client, rng)
        if rng.random() < 0.5:
            self.do_catch_up(client)


class DiskMachine(TieredMachine):
    """With a disk below a small host tier."""

    has_disk = True

    def follow(self, client, rng):
        super().follow(client, rng)
        self.use_disk(rng)

    @rule(seed=SEED)
    def come_and_go(self, seed):
        """A client has one prompt after the other computed, and waits for what is on the disk."""
        rng = Random(seed)
        client = self.pick(rng)
        for seq_id in range(100, 104) if client else ():
            book = self.books.leases[client.lease_id]
            request = StepRequest(
                releases=sorted(book.sequences),
                admissions=[Admission(seq_id, pack(self.known_prompt(rng)), waits_for_prefix=rng.random() < 0.9)],
            )
            for _ in range(rng.randint(1, 3)):
                self.do_plan(client, request)
                self.do_catch_up(client)
                self.use_disk(rng)

    def reset_prefix_cache(self, rng):
        if rng.random() < 0.6:
            super().reset_prefix_cache(rng)

    def reset_some(self, rng):
        if rng.random() < 0.6:
            super().reset_some(rng)

    def lose_worker(self, rng):
        if rng.random() < 0.8:
            super().lose_worker(rng)


def configured(num_examples: int) -> settings:
    return settings(
        max_examples=num_examples,
        phases=PHASES,
        report_multiple_bugs=False,
        stateful_step_count=50,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = configured(NUM_EXAMPLES - NUM_EXAMPLES // 4)
TestDefaultPolicyMachine = DefaultPolicyMachine.TestCase
TestDefaultPolicyMachine.settings = configured(max(1, NUM_EXAMPLES // 4))
TestKeepingMachine = KeepingMachine.TestCase
TestKeepingMachine.settings = configured(max(1, NUM_EXAMPLES // 3))

TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = configured(max(1, NUM_EXAMPLES // 3))
TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = configured(max(1, NUM_EXAMPLES // 8))


@pytest.mark.night
class TestDiskMachineForLong(DiskMachine.TestCase):
    settings = configured(NUM_EXAMPLES_OF_NIGHT // 2)


@pytest.mark.night
class TestTieredMachineForLong(TieredMachine.TestCase):
    settings = configured(NUM_EXAMPLES_OF_NIGHT // 2)


@pytest.mark.night
class TestLedgerMachineForLong(LedgerMachine.TestCase):
    settings = configured(NUM_EXAMPLES_OF_NIGHT * 3 // 4)


@pytest.mark.night
class TestKeepingMachineForLong(KeepingMachine.TestCase):
    settings = configured(NUM_EXAMPLES_OF_NIGHT // 2)


@pytest.mark.night
class TestDefaultPolicyMachineForLong(DefaultPolicyMachine.TestCase):
    settings = configured(NUM_EXAMPLES_OF_NIGHT // 4)
