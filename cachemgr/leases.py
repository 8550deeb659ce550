"""Leases: who may hold blocks, until when, and which of their steps are in flight."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from quire.cachemgr.errors import CallRefused, Reason, refuse
from quire.cachemgr.geometry import Blocks
from quire.cachemgr.plans import StepPlan
from quire.cachemgr.prefix import root_hash
from quire.cachemgr.sequences import NOBODY, Ids, Rows, Sequence, SequenceTable

Flags: TypeAlias = npt.NDArray[np.bool_]

MAX_STEPS_IN_FLIGHT = 64
"""Steps a lease may have planned without their outcome being known."""

REMEMBERED_PLANS = 8
"""Answers kept per lease for a repeated request_id."""


class LeaseState(Enum):
    """OPEN → FENCING → gone. A lease never opens again."""

    OPEN = "open"
    FENCING = "fencing"


class Runs:
    """What one step computes: a run per sequence, parallel arrays."""

    __slots__ = ("also", "ends", "receives", "rows", "sampled_positions", "samples", "seq_ids")

    def __init__(self, rows: Rows, seq_ids: Ids, ends: Rows, samples: Flags) -> None:
        self.rows = rows
        """Rows of the sequences; they stay theirs until the step has ended."""
        self.seq_ids = seq_ids
        self.sampled_positions = ends
        """Where the token stands that a run samples, if it does: behind the last position computed."""
        self.ends = ends.copy()
        """Positions before these count as computed when the step is; less after a trim."""
        self.samples = samples
        self.receives = samples.copy()
        """Whether the sequence still wants the token that is sampled."""
        self.also: dict[int, list[Sequence]] = {}
        """Who else takes it over: forks, by index of the run."""

    def __len__(self) -> int:
        return len(self.rows)

    def followed_by(self, others: Runs) -> Runs:
        """These runs and more of the same step, of which nothing was trimmed or forked yet."""
        return Runs(
            np.concatenate([self.rows, others.rows]),
            np.concatenate([self.seq_ids, others.seq_ids]),
            np.concatenate([self.ends, others.ends]),
            np.concatenate([self.samples, others.samples]),
        )

    def find(self, sequence: Sequence) -> int | None:
        """Index of the sequence's run."""
        found = (self.rows == sequence.row).nonzero()[0]
        return int(found[0]) if len(found) else None

    def cut(self, sequence: Sequence, num_tokens: int) -> None:
        """The sequence is trimmed: what is computed for it counts only up to what is kept."""
        for index, forks in self.also.items():
            if sequence in forks and self.sampled_positions[index] >= num_tokens:
                forks.remove(sequence)
        self.limit(sequence, num_tokens)
        index_of = self.find(sequence)
        if index_of is not None and self.sampled_positions[index_of] >= num_tokens:
            self.receives[index_of] = False

    def limit(self, sequence: Sequence, num_tokens: int) -> None:
        """What is computed for the sequence counts only up to here."""
        index = self.find(sequence)
        if index is not None:
            self.ends[index] = min(self.ends[index], num_tokens)

    def join(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """The child begins with the parent's first tokens, those being sampled included."""
        for index, forks in self.also.items():
            if parent in forks and self.sampled_positions[index] < num_tokens:
                forks.append(child)
        index_of = self.find(parent)
        if index_of is not None and self.receives[index_of] and self.sampled_positions[index_of] < num_tokens:
            self.also.setdefault(index_of, []).append(child)

    def disappoint(self) -> None:
        """Nothing will be sampled."""
        self.receives[:] = False
        self.also.clear()

    def first_waiting(self, seq_ids: Container[int]) -> int | None:
        """A sequence not among these whose sampled token somebody waits for, or None."""
        waiting = {*self.receives.nonzero()[0].tolist(), *(index for index, forks in self.also.items() if forks)}
        missing = [int(self.seq_ids[index]) for index in sorted(waiting) if self.seq_ids[index] not in seq_ids]
        return missing[0] if missing else None


NO_RUNS = Runs(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.bool_))


@dataclass(slots=True)
class Fill:
    """Full blocks of known tokens that a step computes: later plans of the lease may share them."""

    sequence: Sequence
    first: int
    """Index in the block table."""
    end: int
    """Less after a trim."""


@dataclass(slots=True)
class StepInFlight:
    """A step that was planned and not reported: what it computes, and what it keeps from being handed out."""

    step_number: int
    runs: Runs = NO_RUNS
    pinned: list[Blocks] = field(default_factory=list)
    """Blocks to unpin when the step has ended, in the order in which they were let go."""
    fills: list[Fill] = field(default_factory=list)
    released_rows: list[int] = field(default_factory=list)
    """Rows of sequences that end with this step: the worker keeps its own until then."""
    is_doomed: bool = False
    """It was planned before the outcome of one was known that computed nothing: it will compute nothing either."""

    def cut(self, sequence: Sequence, num_tokens: int, *, block_size: int) -> None:
        """The sequence is trimmed: what is computed for it counts only up to what is kept."""
        self.runs.cut(sequence, num_tokens)
        self._limit_fills(sequence, num_tokens // block_size)

    def limit(self, sequence: Sequence, num_blocks: int, *, block_size: int) -> None:
        """What is computed for the sequence counts only up to here."""
        self.runs.limit(sequence, num_blocks * block_size)
        self._limit_fills(sequence, num_blocks)

    def _limit_fills(self, sequence: Sequence, num_blocks: int) -> None:
        for fill in self.fills:
            if fill.sequence is sequence:
                fill.end = min(fill.end, num_blocks)

    def filled(self) -> dict[bytes, int]:
        """The blocks that it fills, by prefix hash; the first one where several are filled alike."""
        blocks: dict[bytes, int] = {}
        for fill in reversed(self.fills):
            if fill.first < fill.end:
                sequence = fill.sequence
                hashes = sequence.hash_up_to(fill.end)[fill.first - sequence.num_published :]
                blocks.update(zip(hashes, sequence.block_table[fill.first : fill.end], strict=True))
        return blocks


class RowMap:
    """From a lease's sequence ids to rows, many at once: slot `id & mask` names the row that came there last."""

    def __init__(self) -> None:
        self._rows = np.zeros(64, np.int64)
        self._mask = 63

    def enter(self, sequence: Sequence, others: dict[int, Sequence]) -> None:
        """A sequence more; `others` are all of the lease."""
        if 4 * len(others) > len(self._rows):
            self._rows = np.zeros(4 * len(self._rows), np.int64)
            self._mask = len(self._rows) - 1
            for other in others.values():
                self._rows[other.seq_id & self._mask] = other.row
        self._rows[sequence.seq_id & self._mask] = sequence.row

    def leave(self, sequence: Sequence) -> None:
        """A sequence less."""
        slot = sequence.seq_id & self._mask
        if self._rows[slot] == sequence.row:
            self._rows[slot] = NOBODY

    def find(self, seq_ids: Ids, table: SequenceTable) -> Rows:
        """Rows of these sequences; NOBODY where there is none, or where another one took its slot."""
        rows: Rows = self._rows[seq_ids.astype(np.int64) & self._mask]
        is_other = table.seq_ids[rows] != seq_ids
        if np.count_nonzero(is_other):
            rows[is_other] = NOBODY
        return rows


@dataclass(slots=True, eq=False)
class Lease:
    """The right to hold blocks of one pool; owner of its sequences and of its steps' numbers."""

    lease_id: str
    pool: str
    ttl_s: float
    expires_at: float
    tenant: str = ""
    state: LeaseState = LeaseState.OPEN
    sequences: dict[int, Sequence] = field(default_factory=dict)
    rows: RowMap = field(default_factory=RowMap)
    next_step: int = 1
    settled_step: int = 0
    """The last step that was reported."""
    known_step: int = 0
    """Outcomes are known up to this step: reported, or doomed."""
    in_flight: deque[StepInFlight] = field(default_factory=deque)
    table_changes: list[tuple[Sequence, int]] = field(default_factory=list)
    """Table entries changed since the last plan, which the next grant has to tell the worker."""
    last_root: tuple[tuple[bytes, str], bytes] | None = None
    """The root that was asked for last, by salt and model."""
    answers: OrderedDict[str, tuple[bytes, StepPlan]] = field(default_factory=OrderedDict)
    """The last plans by request_id: digest of the request, and the answer."""

    def find_rows(self, seq_ids: Ids, table: SequenceTable) -> Rows:
        """Rows of these sequences; NOBODY where the lease has none of this id."""
        rows = self.rows.find(seq_ids, table)
        if np.count_nonzero(rows) == len(rows):
            return rows
        for index in (rows == NOBODY).nonzero()[0].tolist():
            sequence = self.sequences.get(seq_ids.item(index))
            if sequence is not None:
                rows[index] = sequence.row
        return rows

    def root(self, salt: bytes, model_fingerprint: str) -> bytes:
        """The root of a prompt's prefix hashes."""
        key = (salt, model_fingerprint)
        if self.last_root is None or self.last_root[0] != key:
            self.last_root = (key, root_hash(tenant=self.tenant, salt=salt, model_fingerprint=model_fingerprint))
        return self.last_root[1]

    def renew(self, now: float) -> None:
        self.expires_at = now + self.ttl_s

    def start_anew(self) -> None:
        """The pool's memory is a new one: nothing of the old is left but the right itself."""
        self.sequences.clear()
        self.rows = RowMap()
        self.in_flight.clear()
        self.table_changes.clear()
        self.answers.clear()
        self.next_step, self.settled_step, self.known_step = 1, 0, 0

    def recall(self, request_id: str, digest: bytes) -> StepPlan | None:
        """The answer given to this request_id, or None. Raises CallRefused if the request was another one."""
        if not request_id or request_id not in self.answers:
            return None
        known_digest, answer = self.answers[request_id]
        if known_digest != digest:
            message = f"request_id {request_id!r} was used for another plan"
            raise CallRefused(refuse(Reason.REQUEST_ID_REUSED, message, request_id=request_id))
        return answer

    def remember(self, request_id: str, digest: bytes, answer: StepPlan) -> None:
        """Keeps the answer for a repetition; forgets the oldest beyond REMEMBERED_PLANS."""
        if request_id:
            self.answers[request_id] = (digest, answer)
            if len(self.answers) > REMEMBERED_PLANS:
                self.answers.popitem(last=False)


class ExpiryQueue:
    """Which leases have run out. Renewals cost nothing here: an entry that is early is put back when it comes up."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, str]] = []

    def add(self, lease: Lease) -> None:
        heapq.heappush(self._entries, (lease.expires_at, lease.lease_id))

    def next_expiry(self) -> float | None:
        """No lease runs out before this; None if there is none."""
        return self._entries[0][0] if self._entries else None

    def pop_expired(self, leases: dict[str, Lease], now: float) -> list[Lease]:
        """The open leases among `leases` whose time is over. Cost: O(log n) per entry that has come up."""
        expired = []
        while self._entries and self._entries[0][0] <= now:
            _, lease_id = heapq.heappop(self._entries)
            lease = leases.get(lease_id)
            if lease is None or lease.state is not LeaseState.OPEN:
                continue
            if lease.expires_at > now:
                self.add(lease)
            else:
                expired.append(lease)
        return expired
