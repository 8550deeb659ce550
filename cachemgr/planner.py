"""Plans one step of one lease: applies a request's items to the books, one by one, each whole or not at all.

Order: releases, trims, forks, extends, admissions. Forks come before extends, so that a block that is shared from now
on is not written by its old holder in the same step.

What lets go of a block, and until when it stays retired (n is the step being planned):

    a sequence that is released, a trimmed tail      the last step in flight before n
    the source of a copy done at the start of n      n
    nothing in flight                                not at all
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from typing import NamedTuple

import numpy as np

from quire.cachemgr.errors import Reason, Refusal, invalid, refuse, sequence_not_found
from quire.cachemgr.eviction import EvictionPolicy
from quire.cachemgr.geometry import Blocks, Geometry
from quire.cachemgr.leases import Fill, Flags, Lease, Runs, StepInFlight
from quire.cachemgr.plans import Admission, Fork, PlanItem, RefusedItem, StepPlan, StepRequest, Trim
from quire.cachemgr.pool import BlockPool
from quire.cachemgr.prefix import TOKEN_BYTES, PrefixIndex, chain_hashes
from quire.cachemgr.sequences import NOWHERE, Ids, Rows, Sequence, SequenceTable

DIGEST_BYTES = 16
MAX_SEQUENCE_ID = 2**31 - 1


@dataclass(slots=True)
class LedgerCounters:
    """What happened in a pool since its epoch was attached."""

    planned_steps: int = 0
    computed_steps: int = 0
    failed_steps: int = 0
    skipped_steps: int = 0
    admissions: int = 0
    admitted_tokens: int = 0
    cached_tokens: int = 0
    forks: int = 0
    copied_blocks: int = 0
    expired_leases: int = 0


class Extends(NamedTuple):
    """Extends of a request, parallel arrays."""

    seq_ids: Ids
    rows: Rows
    starts: Rows
    is_decode: Flags
    """It computes just the token that the worker sampled last, the sequence's last one."""
    is_ready: Flags
    """Its slots are the sequence's own to write."""


class StepPlanner:
    """One plan in the making. `run` it once."""

    def __init__(
        self,
        lease: Lease,
        *,
        pool: BlockPool,
        index: PrefixIndex,
        policy: EvictionPolicy,
        table: SequenceTable,
        geometry: Geometry,
        counters: LedgerCounters,
        num_rows: int,
    ) -> None:
        self._lease = lease
        self._pool = pool
        self._index = index
        self._policy = policy
        self._table = table
        self._geometry = geometry
        self._counters = counters
        self._num_rows = num_rows
        self._step = StepInFlight(lease.next_step)
        self._plan = StepPlan(lease.next_step, lease.known_step)
        self._budget: int | None = None
        self._admitted_rows: list[int] = []

    @property
    def num_rows(self) -> int:
        """Sequences that the worker keeps rows for, of all leases, once this step is planned."""
        return self._num_rows

    def run(self, request: StepRequest) -> StepPlan:
        """Applies the request and puts the step in flight."""
        for seq_id in request.releases:
            self._release(seq_id)
        self._write_changed_entries()
        for trim in request.trims:
            self._answer(PlanItem.TRIM, trim.seq_id, self._trim(trim))
        for fork in request.forks:
            self._fork(fork)
        if len(request.extend_ids):
            self._extend_all(request)
        self._budget = request.admission_token_budget or None
        for admission in request.admissions:
            refusal = self._admit(admission, request.admission_reserve)
            self._answer(PlanItem.ADMISSION, admission.seq_id, refusal)
        self._add_admitted_runs()
        self._lease.next_step += 1
        self._lease.in_flight.append(self._step)
        self._plan.counts = self._pool.counts()
        return self._plan

    def _answer(self, item: PlanItem, seq_id: int, refusal: Refusal | None) -> None:
        if refusal is not None:
            self._plan.refusals.append(RefusedItem(item, seq_id, refusal))

    # -- letting go -----------------------------------------------------------------------------------------------

    def _release(self, seq_id: int) -> None:
        sequence = self._lease.sequences.pop(seq_id, None)
        if sequence is None:
            return
        sequence.released = True
        self._lease.rows.leave(sequence)
        self._let_go(sequence.blocks_tail_first())
        self._step.released_rows.append(sequence.row)
        self._plan.released_ids.append(seq_id)

    def _let_go(self, tail_first: Blocks) -> None:
        """Releases a table's tail; steps in flight before this one may still touch it."""
        if self._lease.in_flight:
            self._lease.in_flight[-1].pinned.append(tail_first)
            self._pool.retire(tail_first)
        else:
            self._pool.release(tail_first)

    def _write_changed_entries(self) -> None:
        for sequence, index in self._lease.table_changes:
            if not sequence.released and index < len(sequence.block_table):
                self._plan.write(sequence.seq_id, index, [sequence.block_table[index]])
        self._lease.table_changes.clear()

    def _trim(self, trim: Trim) -> Refusal | None:
        sequence = self._lease.sequences.get(trim.seq_id)
        if sequence is None:
            return sequence_not_found(trim.seq_id)
        if not 1 <= trim.num_tokens <= sequence.num_tokens:
            return position_out_of_range(trim.seq_id, trim.num_tokens, sequence.num_tokens)
        self._cut(sequence, trim.num_tokens)
        return None

    def _cut(self, sequence: Sequence, num_tokens: int) -> None:
        sequence.unpublish(num_tokens // self._geometry.block_size, self._index)
        sequence.truncate(num_tokens)
        sequence.num_cached = min(sequence.num_cached, num_tokens)
        sequence.num_computed = min(sequence.num_computed, num_tokens)
        sequence.num_scheduled = min(sequence.num_scheduled, num_tokens)
        sequence.num_writable = 0
        if sequence.sampled_position >= num_tokens:
            sequence.sampled_position = NOWHERE
        for step in self._lease.in_flight:
            step.cut(sequence, num_tokens, block_size=self._geometry.block_size)
        num_kept = self._geometry.num_blocks_for(num_tokens)
        tail_first = sequence.blocks_tail_first(num_kept)
        del sequence.block_table[num_kept:]
        if len(tail_first):
            self._let_go(tail_first)

    # -- forks ----------------------------------------------------------------------------------------------------

    def _fork(self, fork: Fork) -> None:
        parent = self._lease.sequences.get(fork.parent_id)
        refusal = self._refuse_fork(fork, parent)
        children = []
        for child_id in fork.child_ids:
            refused = refusal or self._refuse_new(child_id)
            self._answer(PlanItem.FORK, child_id, refused)
            if refused is None and parent is not None:
                children.append(self._continue(parent, child_id, fork.num_tokens))
        if parent is not None and children:
            self._pool.acquire(np.array(children[0].block_table, np.int64), len(children))
            parent.num_writable = 0
            self._counters.forks += len(children)

    def _refuse_fork(self, fork: Fork, parent: Sequence | None) -> Refusal | None:
        if parent is None:
            return sequence_not_found(fork.parent_id)
        if not 1 <= fork.num_tokens <= parent.num_tokens:
            return position_out_of_range(fork.parent_id, fork.num_tokens, parent.num_tokens)
        return None

    def _continue(self, parent: Sequence, child_id: int, num_tokens: int) -> Sequence:
        """A sequence that has the parent's blocks in its table and computes its last token again, into a copy."""
        block_table = parent.block_table[: self._geometry.num_blocks_for(num_tokens)]
        child = Sequence(self._table, child_id, parent.root, block_table)
        child.copy_beginning(parent, num_tokens, self._index)
        self._enter(child)
        for step in self._lease.in_flight:
            step.runs.join(parent, child, num_tokens)
        self._plan.fork_parent_ids.append(parent.seq_id)
        self._plan.fork_child_ids.append(child_id)
        return child

    # -- computing ------------------------------------------------------------------------------------------------

    def _extend_all(self, request: StepRequest) -> None:
        """All extends: what each one needs, in the order of the request; then the bounds of all at once."""
        table, appends = self._table, request.appends
        seq_ids = np.asarray(request.extend_ids, np.int32)
        rows = self._lease.find_rows(seq_ids, table)
        starts = table.scheduled[rows]
        ends = starts + request.extend_token_counts
        is_given = (table.sampled[rows] != starts) | (ends != starts + 1)
        is_decode = ~is_given & (table.tokens[rows] == ends)
        if appends:
            is_decode &= [seq_id not in appends for seq_id in seq_ids.tolist()]
        is_ready = is_decode & (starts < table.writable[rows])
        if np.count_nonzero(is_ready) < len(rows):
            self._extend_others(request, Extends(seq_ids, rows, starts, is_decode, is_ready))
        if not is_ready.all():
            seq_ids, rows, starts, ends = seq_ids[is_ready], rows[is_ready], starts[is_ready], ends[is_ready]
            is_given = is_given[is_ready]
        if len(rows):
            self._schedule_all(seq_ids, rows, starts, ends, is_given)

    def _schedule_all(self, seq_ids: Ids, rows: Rows, starts: Rows, ends: Rows, is_given: Flags) -> None:
        """Puts runs into the plan. One that reaches its sequence's last token samples the next one."""
        table, plan = self._table, self._plan
        samples = table.tokens[rows] == ends
        table.scheduled[rows] = ends
        all_sample = np.count_nonzero(samples) == len(rows)
        sampling, positions = (rows, ends) if all_sample else (rows[samples], ends[samples])
        table.tokens[sampling] = positions + 1
        table.sampled[sampling] = positions
        plan.run_seq_ids = seq_ids.tolist()
        plan.run_starts = starts.tolist()
        plan.run_samples = [True] * len(rows) if all_sample else samples.tolist()
        self._step.runs = Runs(rows, seq_ids, ends, samples)
        given = is_given.nonzero()[0].tolist()
        plan.run_token_counts = (ends - starts).tolist() if given else [1] * len(rows)
        for index in given:
            self._give(index, table.at(rows.item(index)).token_bytes(starts.item(index), ends.item(index)))
        for index in (table.known[rows] > starts).nonzero()[0].tolist():
            self._expect_fill(table.at(rows.item(index)), starts.item(index), ends.item(index))

    def _give(self, run_index: int, tokens: bytes) -> None:
        """The client sends the worker these tokens for the run."""
        self._plan.given_run_indexes.append(run_index)
        self._plan.given_digests += sha256(tokens).digest()[:DIGEST_BYTES]

    def _extend_others(self, request: StepRequest, extends: Extends) -> None:
        """What is not ready, in the order of the request; decodes that come one after the other are one allocation."""
        others = (~extends.is_ready).nonzero()[0]
        for is_decode, group in groupby(others.tolist(), key=extends.is_decode.item):
            indexes = list(group)
            if is_decode and self._add_blocks(extends, np.array(indexes)):
                extends.is_ready[indexes] = True
                continue
            for index in indexes:
                seq_id, num_tokens = extends.seq_ids.item(index), int(request.extend_token_counts[index])
                refusal = self._extend(seq_id, num_tokens, request.appends.get(seq_id, b""))
                self._answer(PlanItem.EXTEND, seq_id, refusal)
                extends.is_ready[index] = refusal is None

    def _add_blocks(self, extends: Extends, indexes: Rows) -> bool:
        """Gives each of these decodes one more block, if that is all that each needs; else changes nothing."""
        rows, starts = extends.rows[indexes], extends.starts[indexes]
        firsts = (starts // self._geometry.block_size).tolist()
        sequences = self._table.sequences
        block_tables = [sequences[row].block_table for row in rows.tolist()]
        is_possible = len(rows) <= self._pool.num_allocatable and starts.max() < self._geometry.max_tokens
        if not is_possible or firsts != list(map(len, block_tables)):
            return False
        fresh = self._pool.allocate(len(rows)).tolist()
        for block_table, block_id in zip(block_tables, fresh, strict=True):
            block_table.append(block_id)
        self._plan.write_each(extends.seq_ids[indexes].tolist(), firsts, fresh)
        self._table.writable[rows] = np.minimum(starts + self._geometry.block_size, self._geometry.max_tokens)
        return True

    def _extend(self, seq_id: int, num_tokens: int, append: bytes) -> Refusal | None:
        """Makes room for the next tokens of a sequence and appends those that are given."""
        sequence = self._lease.sequences.get(seq_id)
        if sequence is None:
            return sequence_not_found(seq_id)
        if num_tokens < 1:
            return invalid("extends.token_counts", num_tokens, "at least 1")
        num_appended = len(append) // TOKEN_BYTES
        end = sequence.num_scheduled + num_tokens
        refusal = (
            self._refuse_append(sequence, append)
            or refuse_too_long(seq_id, max(end, sequence.num_known + num_appended), self._geometry)
            or self._refuse_uncomputable(sequence, num_tokens, num_appended)
            or self._make_writable(sequence, end, num_tokens=sequence.num_tokens + num_appended)
        )
        if refusal is None and append:
            sequence.append(append)
        return refusal

    def _refuse_append(self, sequence: Sequence, append: bytes) -> Refusal | None:
        if not append:
            return None
        if sequence.num_promised:
            message = f"sequence {sequence.seq_id} has tokens being sampled; trim it before others are appended"
            return refuse(Reason.INVALID_ARGUMENT, message, field="extends.append_token_ids", value=sequence.seq_id)
        return refuse_foreign_tokens(sequence.seq_id, append, self._geometry)

    def _refuse_uncomputable(self, sequence: Sequence, num_tokens: int, num_appended: int) -> Refusal | None:
        """Only known tokens can be computed, or the one token that is being sampled."""
        start = sequence.num_scheduled
        num_known = sequence.num_known + num_appended
        is_sampled = start == sequence.sampled_position and start < sequence.num_tokens
        limit = max(num_known - start, 1 if is_sampled else 0)
        if num_tokens <= limit:
            return None
        message = f"sequence {sequence.seq_id} has {limit} tokens left to compute, {num_tokens} asked for"
        return refuse(Reason.NOTHING_TO_COMPUTE, message, sequence_id=sequence.seq_id, value=num_tokens, limit=limit)

    def _make_writable(self, sequence: Sequence, end: int, *, num_tokens: int) -> Refusal | None:
        """Blocks of the sequence's own from its next position to end, and a table long enough for num_tokens.

        A block that is shared or published is replaced, by a copy if slots before the next position count. Refused,
        with nothing changed, if there are too few blocks.
        """
        table, block_size, start = sequence.block_table, self._geometry.block_size, sequence.num_scheduled
        num_blocks = self._geometry.num_blocks_for(end)
        written = range(start // block_size, min(num_blocks, len(table)))
        foreign = [index for index in written if not self._pool.is_writable(table[index])]
        num_fresh = len(foreign) + max(0, self._geometry.num_blocks_for(num_tokens) - len(table))
        if num_fresh > self._pool.num_allocatable:
            return self._out_of_blocks(sequence.seq_id, num_fresh, self._pool.num_allocatable)
        for index in written:
            if self._pool.pin_count(table[index]) and index not in foreign:
                self._forget_claims(table[index])
        fresh = self._pool.allocate(num_fresh)
        for index, target in zip(foreign, fresh.tolist(), strict=False):
            self._replace(sequence, index, target, is_copied=index * block_size < start)
        added = fresh[len(foreign) :].tolist()
        if added:
            self._plan.write(sequence.seq_id, len(table), added)
            table.extend(added)
        sequence.num_writable = min(num_blocks * block_size, self._geometry.max_tokens)
        return None

    def _forget_claims(self, block_id: int) -> None:
        """A released sequence shared this block, which is to be written again: its runs in flight do not publish it."""
        steps = (*self._lease.in_flight, self._step)
        for sequence in [self._table.at(row) for step in steps for row in step.released_rows]:
            if block_id not in sequence.block_table:
                continue
            index = sequence.block_table.index(block_id)
            for step in steps:
                step.limit(sequence, index, block_size=self._geometry.block_size)

    def _replace(self, sequence: Sequence, index: int, target: int, *, is_copied: bool) -> None:
        """Copy-on-write of one block of the table; the old one stays pinned as long as a step may read it."""
        source = sequence.block_table[index]
        sequence.block_table[index] = target
        self._plan.write(sequence.seq_id, index, (target,))
        if not is_copied:
            self._let_go(np.array([source]))
            return
        self._plan.copy_sources.append(source)
        self._plan.copy_targets.append(target)
        self._counters.copied_blocks += 1
        self._step.pinned.append(np.array([source]))
        self._pool.retire_one(source)

    def _out_of_blocks(self, seq_id: int, needed: int, available: int) -> Refusal:
        retired = self._pool.num_retired
        message = f"sequence {seq_id} needs {needed} blocks; {available} are free or evictable, {retired} retired"
        return refuse(Reason.OUT_OF_BLOCKS, message, sequence_id=seq_id, needed=needed, free=available, retired=retired)

    def _expect_fill(self, sequence: Sequence, start: int, end: int) -> None:
        """Lets later plans of the lease share the blocks that this step fills, as far as their tokens are known."""
        block_size = self._geometry.block_size
        first, num_full = start // block_size, min(end, sequence.num_known) // block_size
        if first < num_full:
            self._step.fills.append(Fill(sequence, first, num_full))

    # -- admissions -----------------------------------------------------------------------------------------------

    def _admit(self, admission: Admission, reserve: int) -> Refusal | None:
        num_tokens = len(admission.tokens) // TOKEN_BYTES
        seq_id = admission.seq_id
        refusal = (
            self._refuse_new(seq_id)
            or refuse_empty(seq_id, num_tokens)
            or refuse_too_long(seq_id, num_tokens, self._geometry)
            or refuse_foreign_tokens(seq_id, admission.tokens, self._geometry)
            or self._refuse_over_budget(seq_id)
        )
        if refusal is not None:
            return refusal
        root = self._lease.root(admission.salt, self._geometry.model_fingerprint)
        hashes = chain_hashes(root, admission.tokens, block_bytes=self._geometry.block_size * TOKEN_BYTES)
        found, num_published = self._find(hashes, num_tokens)
        num_fresh = self._geometry.num_blocks_for(num_tokens) - len(found)
        shared = np.array(found, np.int64)
        available = self._pool.num_allocatable - self._pool.num_parked(shared)
        if num_fresh + reserve > available:
            return self._out_of_blocks(seq_id, num_fresh + reserve, available)
        if found:
            self._pool.acquire(shared)
        fresh = self._pool.allocate(num_fresh)
        self._policy.admit(found, fresh, hashes)
        sequence = Sequence(self._table, seq_id, root, array("q", found))
        sequence.block_table.frombytes(fresh.tobytes())
        sequence.begin(admission.tokens, hashes, num_cached_blocks=len(found), num_published=num_published)
        sequence.num_writable = min(len(sequence.block_table) * self._geometry.block_size, self._geometry.max_tokens)
        self._enter(sequence)
        self._run_admitted(sequence, admission.max_compute)
        return None

    def _find(self, hashes: list[bytes], num_tokens: int) -> tuple[list[int], int]:
        """The longest known prefix: its blocks, and how many of them the index has; the rest are being filled.

        At least one token is left to compute.
        """
        most = (num_tokens - 1) // self._geometry.block_size
        found = self._index.find(hashes[:most])
        num_published = len(found)
        filled = self._filled() if num_published < most else {}
        if not filled:
            return found, num_published
        for prefix_hash in hashes[num_published:most]:
            block_id = self._index.lookup(prefix_hash) or filled.get(prefix_hash)
            if block_id is None or not (self._pool.ref_count(block_id) or self._index.hashes[block_id]):
                break
            found.append(block_id)
        return found, num_published

    def _filled(self) -> dict[bytes, int]:
        """Blocks that the lease's steps in flight and this one fill, by prefix hash; of equal ones the first."""
        filled: dict[bytes, int] = {}
        for step in (self._step, *reversed(self._lease.in_flight)):
            filled |= step.filled()
        return filled

    def _run_admitted(self, sequence: Sequence, max_compute: int) -> None:
        plan, start, num_known = self._plan, sequence.num_scheduled, sequence.num_known
        num_left = num_known - start
        count = min(num_left, max_compute or num_left, num_left if self._budget is None else self._budget)
        if self._budget is not None:
            self._budget -= count
        self._counters.admissions += 1
        self._counters.admitted_tokens += num_known
        self._counters.cached_tokens += start
        plan.admitted_ids.append(sequence.seq_id)
        plan.admitted_cached_counts.append(start)
        end = start + count
        samples = end == num_known
        self._give(len(plan.run_seq_ids), sequence.token_bytes(start, end))
        plan.run_seq_ids.append(sequence.seq_id)
        plan.run_starts.append(start)
        plan.run_token_counts.append(count)
        plan.run_samples.append(samples)
        self._admitted_rows.append(sequence.row)
        sequence.num_scheduled = end
        if samples:
            sequence.num_tokens = end + 1
            sequence.sampled_position = end
        self._expect_fill(sequence, start, end)

    def _add_admitted_runs(self) -> None:
        """The runs of the admissions come after those of the extends."""
        num_admitted, plan, runs = len(self._admitted_rows), self._plan, self._step.runs
        if not num_admitted:
            return
        starts, counts = np.array(plan.run_starts[-num_admitted:]), np.array(plan.run_token_counts[-num_admitted:])
        added = Runs(
            np.array(self._admitted_rows),
            np.array(plan.run_seq_ids[-num_admitted:], np.int32),
            starts + counts,
            np.array(plan.run_samples[-num_admitted:]),
        )
        self._step.runs = runs.followed_by(added) if len(runs) else added

    def _enter(self, sequence: Sequence) -> None:
        self._lease.sequences[sequence.seq_id] = sequence
        self._lease.rows.enter(sequence, self._lease.sequences)
        self._num_rows += 1
        self._plan.write(sequence.seq_id, 0, sequence.block_table)

    def _refuse_new(self, seq_id: int) -> Refusal | None:
        if not 0 <= seq_id <= MAX_SEQUENCE_ID:
            return invalid("sequence_id", seq_id, f"0 to {MAX_SEQUENCE_ID}")
        if seq_id in self._lease.sequences:
            message = f"the lease holds a sequence {seq_id} already"
            return refuse(Reason.SEQUENCE_EXISTS, message, sequence_id=seq_id)
        limit = self._geometry.max_sequences
        if self._num_rows >= limit:
            message = f"sequence {seq_id} would be one more than the {limit} the worker has room for"
            return refuse(Reason.TOO_MANY_SEQUENCES, message, sequence_id=seq_id, limit=limit)
        return None

    def _refuse_over_budget(self, seq_id: int) -> Refusal | None:
        if self._budget is None or self._budget > 0:
            return None
        message = f"the plan's admission_token_budget was used up before sequence {seq_id}"
        return refuse(Reason.TOKEN_BUDGET_SPENT, message, sequence_id=seq_id)


def position_out_of_range(seq_id: int, value: int, limit: int) -> Refusal:
    message = f"position {value} of sequence {seq_id} must be 1 to {limit}"
    return refuse(Reason.POSITION_OUT_OF_RANGE, message, sequence_id=seq_id, value=value, limit=limit)


def refuse_empty(seq_id: int, num_tokens: int) -> Refusal | None:
    if num_tokens:
        return None
    return refuse(Reason.EMPTY_PROMPT, f"sequence {seq_id} has no tokens; at least 1 is needed", sequence_id=seq_id)


def refuse_too_long(seq_id: int, num_tokens: int, geometry: Geometry) -> Refusal | None:
    limit = geometry.max_tokens
    if num_tokens <= limit:
        return None
    limited_by = "model" if limit == geometry.max_sequence_tokens else "pool"
    message = f"sequence {seq_id} would have {num_tokens} tokens; the {limited_by}'s limit is {limit}"
    return refuse(
        Reason.SEQUENCE_TOO_LONG, message, sequence_id=seq_id, value=num_tokens, limit=limit, limited_by=limited_by
    )


def refuse_foreign_tokens(seq_id: int, tokens: bytes, geometry: Geometry) -> Refusal | None:
    ids = np.frombuffer(tokens, dtype="<u4")  # negative ones are large
    if not len(ids) or ids.max() < geometry.vocab_size:
        return None
    foreign = ids >= geometry.vocab_size
    index = int(foreign.argmax())
    value, limit = int(ids.view(np.int32)[index]), geometry.vocab_size - 1
    message = f"token {value} at index {index} of sequence {seq_id} is not in the vocabulary, 0 to {limit}"
    return refuse(Reason.TOKEN_OUT_OF_RANGE, message, sequence_id=seq_id, index=index, value=value, limit=limit)
