"""Plans one step of one lease: applies a request's items to the books, one by one, each whole or not at all.

Order: releases, trims, forks, extends, admissions. Forks come before extends, so that a block that is shared from now
on is not written by its old holder in the same step.

What lets go of a block, and until when it stays retired (n is the step being planned):

    a sequence that is released, a trimmed tail      the last step in flight before n
    the source of a copy done at the start of n      n
    nothing in flight                                not at all
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from quire.cachemgr.errors import Reason, Refusal, invalid, refuse, sequence_not_found
from quire.cachemgr.geometry import Geometry
from quire.cachemgr.leases import Lease, Run, StepInFlight
from quire.cachemgr.plans import Admission, Fork, PlanItem, RefusedItem, StepPlan, StepRequest, Trim
from quire.cachemgr.pool import BlockPool
from quire.cachemgr.prefix import TOKEN_BYTES, PrefixIndex, chain_hashes, root_hash
from quire.cachemgr.sequences import Sequence

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


class StepPlanner:
    """One plan in the making. `run` it once."""

    def __init__(
        self,
        lease: Lease,
        *,
        pool: BlockPool,
        index: PrefixIndex,
        geometry: Geometry,
        counters: LedgerCounters,
        num_rows: int,
    ) -> None:
        self._lease = lease
        self._pool = pool
        self._index = index
        self._geometry = geometry
        self._counters = counters
        self._num_rows = num_rows
        self._step = StepInFlight(lease.next_step)
        self._plan = StepPlan(step_number=lease.next_step, known_step=lease.known_step)
        self._budget: int | None = None

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
            self._answer(PlanItem.FORK, fork.child_id, self._fork(fork))
        for seq_id, num_tokens in zip(request.extend_ids, request.extend_token_counts, strict=True):
            self._answer(PlanItem.EXTEND, seq_id, self._extend(seq_id, num_tokens, request.appends.get(seq_id, b"")))
        self._budget = request.admission_token_budget or None
        for admission in request.admissions:
            refusal = self._admit(admission, request.admission_reserve)
            self._answer(PlanItem.ADMISSION, admission.seq_id, refusal)
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
        self._let_go(sequence.block_table)
        self._step.num_released_rows += 1
        self._plan.released_ids.append(seq_id)

    def _let_go(self, block_ids: list[int]) -> None:
        """Releases a table's tail; steps in flight before this one may still touch it."""
        tail_first = block_ids[::-1]
        if self._lease.in_flight:
            for block_id in tail_first:
                self._pool.pin(block_id)
            self._lease.in_flight[-1].pinned.extend(tail_first)
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
        num_full = num_tokens // self._geometry.block_size
        for prefix_hash, block_id in zip(sequence.hashes[num_full:], sequence.block_table[num_full:], strict=False):
            if self._lease.pending.get(prefix_hash) == block_id:  # may be written again, with other tokens
                del self._lease.pending[prefix_hash]
        sequence.num_promised = max(0, num_tokens - sequence.num_known)
        del sequence.tokens[num_tokens * TOKEN_BYTES :]
        del sequence.hashes[num_full:]
        sequence.num_published = min(sequence.num_published, num_full)
        sequence.num_cached = min(sequence.num_cached, num_tokens)
        sequence.num_computed = min(sequence.num_computed, num_tokens)
        sequence.num_scheduled = min(sequence.num_scheduled, num_tokens)
        if sequence.sampled_position is not None and sequence.sampled_position >= num_tokens:
            sequence.sampled_position = None
        for step in self._lease.in_flight:
            for run in step.runs:
                cut_run(run, sequence, num_tokens)
        num_kept = self._geometry.num_blocks_for(num_tokens)
        tail = sequence.block_table[num_kept:]
        del sequence.block_table[num_kept:]
        self._let_go(tail)

    # -- forks ----------------------------------------------------------------------------------------------------

    def _fork(self, fork: Fork) -> Refusal | None:
        parent = self._lease.sequences.get(fork.parent_id)
        if parent is None:
            return sequence_not_found(fork.parent_id)
        if not 1 <= fork.num_tokens <= parent.num_tokens:
            return position_out_of_range(fork.parent_id, fork.num_tokens, parent.num_tokens)
        refusal = self._refuse_new(fork.child_id)
        if refusal is not None:
            return refusal
        child = self._continue(parent, fork.child_id, fork.num_tokens)
        self._enter(child)
        for step in self._lease.in_flight:
            for run in step.runs:
                if parent in run.receivers and run.sampled_position < fork.num_tokens:
                    run.receivers.append(child)
        self._plan.fork_parent_ids.append(fork.parent_id)
        self._plan.fork_child_ids.append(fork.child_id)
        self._counters.forks += 1
        return None

    def _continue(self, parent: Sequence, child_id: int, num_tokens: int) -> Sequence:
        """A sequence that shares the parent's blocks and computes its last token again, into a copy."""
        num_full = num_tokens // self._geometry.block_size
        table = parent.block_table[: self._geometry.num_blocks_for(num_tokens)]
        for block_id in table:
            self._pool.acquire(block_id)
        num_scheduled = min(parent.num_scheduled, num_tokens - 1)
        position = parent.sampled_position
        return Sequence(
            seq_id=child_id,
            root=parent.root,
            tokens=parent.tokens[: num_tokens * TOKEN_BYTES],
            block_table=table,
            hashes=parent.hashes[:num_full],
            num_cached=min(parent.num_cached, num_scheduled),
            num_computed=min(parent.num_computed, num_scheduled),
            num_scheduled=num_scheduled,
            num_promised=max(0, num_tokens - parent.num_known),
            num_published=min(parent.num_published, num_scheduled // self._geometry.block_size),
            sampled_position=position if position is not None and position < num_tokens else None,
        )

    # -- computing ------------------------------------------------------------------------------------------------

    def _extend(self, seq_id: int, num_tokens: int, append: bytes) -> Refusal | None:
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
        )
        if refusal is not None:
            return refusal
        refusal = self._make_writable(sequence, end, num_tokens=sequence.num_tokens + num_appended)
        if refusal is not None:
            return refusal
        sequence.tokens += append
        self._run(sequence, num_tokens)
        return None

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
        num_written = min(self._geometry.num_blocks_for(end), len(table))
        foreign = [i for i in range(start // block_size, num_written) if not self._pool.is_writable(table[i])]
        num_fresh = len(foreign) + max(0, self._geometry.num_blocks_for(num_tokens) - len(table))
        if num_fresh > self._pool.num_allocatable:
            return self._out_of_blocks(sequence.seq_id, num_fresh, self._pool.num_allocatable)
        for index in range(start // block_size, num_written):
            if self._pool.pin_count(table[index]) and index not in foreign:
                self._forget_claims(table[index])
        fresh = self._pool.allocate(num_fresh)
        for index in foreign:
            self._replace(sequence, index, fresh.pop(0), is_copied=index * block_size < start)
        if fresh:
            self._plan.write(sequence.seq_id, len(table), fresh)
            table += fresh
        return None

    def _forget_claims(self, block_id: int) -> None:
        """A released sequence shared this block, which is to be written again: its runs in flight do not publish it."""
        for run in (run for step in self._lease.in_flight for run in step.runs if run.sequence.released):
            if block_id not in run.sequence.block_table:
                continue
            index = run.sequence.block_table.index(block_id)
            run.end = min(run.end, index * self._geometry.block_size)
            for prefix_hash in run.sequence.hashes[index : index + 1]:
                if self._lease.pending.get(prefix_hash) == block_id:
                    del self._lease.pending[prefix_hash]

    def _replace(self, sequence: Sequence, index: int, target: int, *, is_copied: bool) -> None:
        """Copy-on-write of one block of the table; the old one stays pinned as long as a step may read it."""
        source = sequence.block_table[index]
        sequence.block_table[index] = target
        self._plan.write(sequence.seq_id, index, [target])
        if not is_copied:
            self._let_go([source])
            return
        self._plan.copy_sources.append(source)
        self._plan.copy_targets.append(target)
        self._counters.copied_blocks += 1
        self._pool.pin(source)
        self._step.pinned.append(source)
        self._pool.release([source])

    def _out_of_blocks(self, seq_id: int, needed: int, available: int) -> Refusal:
        retired = self._pool.num_retired
        message = f"sequence {seq_id} needs {needed} blocks; {available} are free or evictable, {retired} retired"
        return refuse(Reason.OUT_OF_BLOCKS, message, sequence_id=seq_id, needed=needed, free=available, retired=retired)

    def _run(self, sequence: Sequence, num_tokens: int) -> None:
        """Schedules the next tokens. A run that reaches the last token samples the next one."""
        start, end = sequence.num_scheduled, sequence.num_scheduled + num_tokens
        if not (num_tokens == 1 and start == sequence.sampled_position):
            self._plan.given_run_indexes.append(len(self._plan.run_seq_ids))
            self._plan.given_digests += sha256(sequence.token_bytes(start, end)).digest()[:DIGEST_BYTES]
        samples = end == sequence.num_tokens
        self._plan.run_seq_ids.append(sequence.seq_id)
        self._plan.run_starts.append(start)
        self._plan.run_token_counts.append(num_tokens)
        self._plan.run_samples.append(samples)
        self._step.runs.append(Run(sequence, end, end, receivers=[sequence] if samples else []))
        self._expect_hashes(sequence, start, end)
        sequence.num_scheduled = end
        if samples:
            sequence.num_promised += 1
            sequence.sampled_position = end

    def _expect_hashes(self, sequence: Sequence, start: int, end: int) -> None:
        """Lets later plans of the lease share the blocks that this step fills, as far as their tokens are known."""
        block_size = self._geometry.block_size
        num_full = min(end, sequence.num_known) // block_size
        if num_full <= start // block_size:
            return
        extend_hashes(sequence, num_full, block_size=block_size)
        for index in range(start // block_size, num_full):
            prefix_hash, block_id = sequence.hashes[index], sequence.block_table[index]
            if prefix_hash not in self._lease.pending and self._pool.is_writable(block_id):
                self._lease.pending[prefix_hash] = block_id
                self._step.pending.append(prefix_hash)

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
        root = root_hash(
            tenant=self._lease.tenant, salt=admission.salt, model_fingerprint=self._geometry.model_fingerprint
        )
        hashes = chain_hashes(root, admission.tokens, block_bytes=self._geometry.block_size * TOKEN_BYTES)
        found, num_published = self._find(hashes, num_tokens)
        num_fresh = self._geometry.num_blocks_for(num_tokens) - len(found)
        available = self._pool.num_allocatable - sum(map(self._pool.is_cached, found))
        if num_fresh + reserve > available:
            return self._out_of_blocks(seq_id, num_fresh + reserve, available)
        for block_id in found:
            self._pool.acquire(block_id)
        num_cached = len(found) * self._geometry.block_size
        sequence = Sequence(
            seq_id=seq_id,
            root=root,
            tokens=bytearray(admission.tokens),
            block_table=found + self._pool.allocate(num_fresh),
            hashes=hashes,
            num_cached=num_cached,
            num_computed=num_published * self._geometry.block_size,
            num_scheduled=num_cached,
            num_published=num_published,
        )
        self._enter(sequence)
        self._run_admitted(sequence, admission.max_compute)
        return None

    def _find(self, hashes: list[bytes], num_tokens: int) -> tuple[list[int], int]:
        """The longest known prefix: its blocks, and how many of them the index has; the rest are being filled.

        At least one token is left to compute.
        """
        found: list[int] = []
        num_published = 0
        for prefix_hash in hashes[: (num_tokens - 1) // self._geometry.block_size]:
            block_id = self._index.lookup(prefix_hash)
            if block_id is not None:
                num_published += num_published == len(found)
            else:
                block_id = self._lease.pending.get(prefix_hash)
                if block_id is None or not self._pool.ref_count(block_id):
                    break
            found.append(block_id)
        return found, num_published

    def _run_admitted(self, sequence: Sequence, max_compute: int) -> None:
        num_left = sequence.num_known - sequence.num_scheduled
        count = min(num_left, max_compute or num_left, num_left if self._budget is None else self._budget)
        if self._budget is not None:
            self._budget -= count
        self._counters.admissions += 1
        self._counters.admitted_tokens += sequence.num_known
        self._counters.cached_tokens += sequence.num_cached
        self._plan.admitted_ids.append(sequence.seq_id)
        self._plan.admitted_cached_counts.append(sequence.num_cached)
        self._run(sequence, count)

    def _enter(self, sequence: Sequence) -> None:
        self._lease.sequences[sequence.seq_id] = sequence
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


def extend_hashes(sequence: Sequence, num_full: int, *, block_size: int) -> None:
    """Makes sequence.hashes cover its first num_full blocks, whose tokens are known."""
    done = len(sequence.hashes)
    if num_full > done:
        parent = sequence.hashes[-1] if sequence.hashes else sequence.root
        tokens = sequence.token_bytes(done * block_size, num_full * block_size)
        sequence.hashes += chain_hashes(parent, tokens, block_bytes=block_size * TOKEN_BYTES)


def cut_run(run: Run, sequence: Sequence, num_tokens: int) -> None:
    """What a run in flight computes for a sequence that is trimmed counts only up to what is kept."""
    if sequence in run.receivers and run.sampled_position >= num_tokens:
        run.receivers.remove(sequence)
    if run.sequence is sequence:
        run.end = min(run.end, num_tokens)


def position_out_of_range(seq_id: int, value: int, limit: int) -> Refusal:
    message = f"position {value} of sequence {seq_id} must be 1 to {limit}"
    return refuse(Reason.POSITION_OUT_OF_RANGE, message, sequence_id=seq_id, value=value, limit=limit)


def refuse_empty(seq_id: int, num_tokens: int) -> Refusal | None:
    if num_tokens:
        return None
    return refuse(Reason.EMPTY_PROMPT, f"sequence {seq_id} has no tokens; at least 1 is needed", sequence_id=seq_id)


def refuse_too_long(seq_id: int, num_tokens: int, geometry: Geometry) -> Refusal | None:
    pool_tokens = (geometry.num_blocks - 1) * geometry.block_size
    limit, limited_by = min((geometry.max_sequence_tokens, "model"), (pool_tokens, "pool"))
    if num_tokens <= limit:
        return None
    message = f"sequence {seq_id} would have {num_tokens} tokens; the {limited_by}'s limit is {limit}"
    return refuse(
        Reason.SEQUENCE_TOO_LONG, message, sequence_id=seq_id, value=num_tokens, limit=limit, limited_by=limited_by
    )


def refuse_foreign_tokens(seq_id: int, tokens: bytes, geometry: Geometry) -> Refusal | None:
    ids = np.frombuffer(tokens, dtype="<i4")
    foreign = (ids < 0) | (ids >= geometry.vocab_size)
    if not foreign.any():
        return None
    index = int(foreign.argmax())
    value, limit = int(ids[index]), geometry.vocab_size - 1
    message = f"token {value} at index {index} of sequence {seq_id} is not in the vocabulary, 0 to {limit}"
    return refuse(Reason.TOKEN_OUT_OF_RANGE, message, sequence_id=seq_id, index=index, value=value, limit=limit)
