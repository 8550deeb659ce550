"""The books of one pool in one epoch: which block belongs to whom, and which steps may still touch it.

Single writer, no I/O, no clock: every method is atomic, and time comes in as `now`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from quire.cachemgr.errors import BrokenInvariant, CallRefused, Reason, invalid, lease_not_found, refuse
from quire.cachemgr.eviction import DEFAULT_POLICY, make_policy
from quire.cachemgr.geometry import Geometry
from quire.cachemgr.leases import MAX_STEPS_IN_FLIGHT, ExpiryQueue, Lease, LeaseState, Runs, StepInFlight
from quire.cachemgr.planner import LedgerCounters, StepPlanner
from quire.cachemgr.plans import StepPlan, StepRequest
from quire.cachemgr.pool import BlockCounts, BlockPool, BlockState
from quire.cachemgr.prefix import TOKEN_BYTES, PrefixIndex, chain_hashes, root_hash
from quire.cachemgr.sequences import Ids, Rows, Sequence, SequenceTable

IdsLike: TypeAlias = Collection[int] | npt.NDArray[np.int32]
"""Sequence or token ids, or counts, that fit in 32 bits."""

NO_IDS: Ids = np.zeros(0, np.int32)


class StepOutcome(Enum):
    COMPUTED = "computed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class LedgerStatistics:
    """The present state of a pool, and what happened in its epoch."""

    counts: BlockCounts
    num_leases: int
    num_sequences: int
    num_held_tokens: int
    """Tokens in active blocks, each block counted once."""
    num_table_entries: int
    num_shared_blocks: int
    counters: LedgerCounters
    num_allocated: int
    num_evicted: int
    num_published: int
    refusals: dict[Reason, int]


class Ledger:
    """Books of one pool, from the attachment of an epoch to its end."""

    def __init__(
        self, pool: str, epoch: int, geometry: Geometry, *, policy: str = DEFAULT_POLICY, verify: bool = False
    ) -> None:
        self.pool = pool
        self.epoch = epoch
        self.geometry = geometry
        self._verify = verify
        self._index = PrefixIndex(geometry.num_blocks)
        self._policy = make_policy(policy, geometry.num_blocks)
        self._blocks = BlockPool(geometry.num_blocks, self._index, self._policy)
        self._table = SequenceTable(geometry.block_size)
        self._leases: dict[str, Lease] = {}
        self._expiry = ExpiryQueue()
        self._num_rows = 0
        self._counters = LedgerCounters()
        self._refusals: Counter[Reason] = Counter()

    # -- leases ---------------------------------------------------------------------------------------------------

    def open_lease(self, lease_id: str, *, ttl_s: float, now: float, tenant: str = "") -> Lease:
        """A new lease without sequences."""
        lease = Lease(lease_id, self.pool, ttl_s, now + ttl_s, tenant)
        self.adopt_lease(lease)
        return lease

    def adopt_lease(self, lease: Lease) -> None:
        """Takes over an open lease of an earlier epoch; its sequences are gone."""
        lease.start_anew()
        self._leases[lease.lease_id] = lease
        self._expiry.add(lease)

    def lease(self, lease_id: str) -> Lease:
        """The open lease of this id. Raises CallRefused (LEASE_NOT_FOUND)."""
        if not self.is_open(lease_id):
            raise lease_not_found(lease_id)
        return self._leases[lease_id]

    def is_open(self, lease_id: str) -> bool:
        """Whether the lease is there and has not ended."""
        lease = self._leases.get(lease_id)
        return lease is not None and lease.state is LeaseState.OPEN

    def leases(self) -> list[Lease]:
        """All leases, those being fenced included, by id."""
        return [self._leases[lease_id] for lease_id in sorted(self._leases)]

    def end_lease(self, lease_id: str) -> bool:
        """Stops a lease; its blocks come back with `lease_fenced`. False if it is not open."""
        if not self.is_open(lease_id):
            return False
        self._leases[lease_id].state = LeaseState.FENCING
        return True

    def expire_leases(self, now: float) -> list[Lease]:
        """Stops the leases whose time is over and returns them: the worker has to fence them."""
        expired = self._expiry.pop_expired(self._leases, now)
        for lease in expired:
            lease.state = LeaseState.FENCING
        self._counters.expired_leases += len(expired)
        return expired

    def next_expiry(self) -> float | None:
        """No lease runs out before this."""
        return self._expiry.next_expiry()

    def lease_fenced(self, lease_id: str) -> None:
        """The worker will not touch the lease's blocks any more: all of them come back. No effect if it is gone."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return
        for step in lease.in_flight:
            self._finish(step)
        for sequence in lease.sequences.values():
            sequence.released = True
            self._blocks.release(sequence.blocks_tail_first())
        self._table.leave(sequence.row for sequence in lease.sequences.values())
        self._num_rows -= len(lease.sequences)
        self._check()

    # -- steps ----------------------------------------------------------------------------------------------------

    def plan(
        self, lease_id: str, epoch: int, request: StepRequest, *, now: float, request_id: str = "", digest: bytes = b""
    ) -> StepPlan:
        """Plans the lease's next step and renews the lease.

        `digest` identifies the request for `request_id`. Raises CallRefused (LEASE_NOT_FOUND, EPOCH_CHANGED,
        REQUEST_ID_REUSED, TOO_MANY_STEPS, INVALID_ARGUMENT) with nothing changed.
        """
        lease = self.lease(lease_id)
        lease.renew(now)
        self._require_epoch(epoch)
        known = lease.recall(request_id, digest)
        if known is not None:
            return known
        refuse_repeated(request)
        if len(lease.in_flight) >= MAX_STEPS_IN_FLIGHT:
            message = f"the lease has {len(lease.in_flight)} steps in flight, the most there may be"
            raise CallRefused(refuse(Reason.TOO_MANY_STEPS, message, limit=MAX_STEPS_IN_FLIGHT))
        planner = StepPlanner(
            lease,
            pool=self._blocks,
            index=self._index,
            policy=self._policy,
            table=self._table,
            geometry=self.geometry,
            counters=self._counters,
            num_rows=self._num_rows,
        )
        plan = planner.run(request)
        self._num_rows = planner.num_rows
        self._counters.planned_steps += 1
        self._refusals.update(refused.refusal.reason for refused in plan.refusals)
        lease.remember(request_id, digest, plan)
        self._check()
        return plan

    def settle(
        self,
        lease_id: str,
        step_number: int,
        outcome: StepOutcome,
        *,
        seq_ids: IdsLike = (),
        token_counts: IdsLike = (),
        sampled_ids: IdsLike = (),
        sampled_tokens: IdsLike = (),
    ) -> None:
        """Enters the worker's report of a step.

        `token_counts` are the tokens whose KV is valid of `seq_ids`, the plan's runs in their order; `sampled_tokens`
        those of `sampled_ids`. A step that is settled already, or of a lease that is gone, has no effect. Raises
        CallRefused (INVALID_ARGUMENT) if the report does not fit what was planned.
        """
        lease = self._leases.get(lease_id)
        if lease is None or step_number <= lease.settled_step:
            return
        step = lease.in_flight[0] if lease.in_flight else None
        if step is None or step.step_number != step_number:
            limit = f"{lease.settled_step + 1}, planned and not reported"
            raise CallRefused(invalid("step_report.step_number", step_number, limit))
        tokens = NO_IDS
        if outcome is StepOutcome.COMPUTED:
            refuse_unplanned(step, as_ids(seq_ids), as_ids(token_counts))
            tokens = self._tokens_by_run(step.runs, as_ids(sampled_ids), as_ids(sampled_tokens))
            refuse_doomed(step)
        lease.in_flight.popleft()
        lease.settled_step = step_number
        lease.known_step = max(lease.known_step, step_number)
        self._count(outcome)
        if outcome is StepOutcome.COMPUTED:
            self._enter_computed(lease, step.runs, tokens)
        elif len(step.runs) and not step.is_doomed:
            self._doom_in_flight(lease)
        self._finish(step)
        self._check()

    def _tokens_by_run(self, runs: Runs, sampled_ids: Ids, sampled_tokens: Ids) -> Ids:
        """The token that each run sampled, 0 where nobody waits for one. Raises CallRefused (INVALID_ARGUMENT)."""
        if len(sampled_tokens) and sampled_tokens.view(np.uint32).max() >= self.geometry.vocab_size:
            foreign = [token for token in sampled_tokens.tolist() if not 0 <= token < self.geometry.vocab_size]
            limit = f"0 to {self.geometry.vocab_size - 1}"
            raise CallRefused(invalid("step_report.sampled_token_ids", foreign[0], limit))
        if sampled_ids.tobytes() == runs.seq_ids.tobytes():
            return sampled_tokens
        token_of = dict(zip(sampled_ids.tolist(), sampled_tokens.tolist(), strict=True))
        missing = runs.first_waiting(token_of)
        if missing is not None:
            limit = f"a token for sequence {missing}"
            raise CallRefused(invalid("step_report.sampled_sequence_ids", "incomplete", limit))
        return np.array([token_of.get(seq_id, 0) for seq_id in runs.seq_ids.tolist()], np.int32)

    def _count(self, outcome: StepOutcome) -> None:
        counters = self._counters
        counters.computed_steps += outcome is StepOutcome.COMPUTED
        counters.failed_steps += outcome is StepOutcome.FAILED
        counters.skipped_steps += outcome is StepOutcome.SKIPPED

    def _enter_computed(self, lease: Lease, runs: Runs, tokens: Ids) -> None:
        table, rows = self._table, runs.rows
        if not len(rows):
            return
        computed = np.maximum(table.computed[rows], runs.ends)
        table.computed[rows] = computed
        is_received = runs.receives
        if np.count_nonzero(is_received) == len(rows):
            table.append(rows, tokens)
        else:
            table.append(rows[is_received], tokens[is_received])
        for index, forks in runs.also.items():
            for sequence in forks:
                sequence.append_promised(tokens.item(index))
        num_valid = np.minimum(computed, table.known[rows])
        has_more = num_valid >= (table.published[rows] + 1) * self.geometry.block_size
        if np.count_nonzero(has_more):
            self._publish(lease, rows[has_more], num_valid[has_more] // self.geometry.block_size)

    def _publish(self, lease: Lease, rows: Rows, num_full: Rows) -> None:
        """Makes the full blocks that were computed findable; where another block stands for the hash, takes that."""
        places = list(zip(rows.tolist(), self._table.published[rows].tolist(), num_full.tolist(), strict=True))
        hashes: list[bytes] = []
        block_ids: list[int] = []
        for row, first, end in places:
            sequence = self._table.at(row)
            hashes += sequence.take_hashes(first, end)
            block_ids += sequence.block_table[first:end]
        self._table.published[rows] = num_full
        standing = self._index.publish(hashes, block_ids)
        if standing != block_ids:
            indexes = [(self._table.at(row), index) for row, first, end in places for index in range(first, end)]
            for (sequence, index), block_id, stands in zip(indexes, block_ids, standing, strict=True):
                if block_id != stands and not sequence.released:
                    self._swap(lease, sequence, index, stands)

    def _swap(self, lease: Lease, sequence: Sequence, index: int, standing: int) -> None:
        """Two blocks hold the same tokens: keep the one that is published."""
        duplicate = sequence.block_table[index]
        self._blocks.acquire(np.array([standing]))
        sequence.block_table[index] = standing
        lease.table_changes.append((sequence, index))
        if lease.in_flight:
            lease.in_flight[-1].pinned.append(np.array([duplicate]))
            self._blocks.retire_one(duplicate)
        else:
            self._blocks.release(np.array([duplicate]))

    def _doom_in_flight(self, lease: Lease) -> None:
        """A step computed nothing: whatever was planned before that was known will compute nothing either."""
        for step in lease.in_flight:
            step.fills.clear()
            step.is_doomed = True
            lease.known_step = step.step_number
            step.runs.disappoint()
        for sequence in lease.sequences.values():
            sequence.forget_uncomputed()

    def _finish(self, step: StepInFlight) -> None:
        for block_ids in step.pinned:
            self._blocks.unpin(block_ids)
        self._table.leave(step.released_rows)
        self._num_rows -= len(step.released_rows)

    def _require_epoch(self, epoch: int) -> None:
        if epoch == self.epoch:
            return
        message = f"pool {self.pool!r} has epoch {self.epoch}, the call is for {epoch}; its sequences are gone"
        raise CallRefused(refuse(Reason.EPOCH_CHANGED, message, pool=self.pool, epoch=self.epoch, value=epoch))

    # -- looking --------------------------------------------------------------------------------------------------

    def sequence(self, lease_id: str, seq_id: int) -> Sequence | None:
        """A sequence of an open lease, or None. Raises CallRefused (LEASE_NOT_FOUND)."""
        return self.lease(lease_id).sequences.get(seq_id)

    def num_cached_tokens(self, tokens: bytes, *, salt: bytes, tenant: str = "") -> int:
        """Tokens that an admission would find in the cache; takes nothing."""
        root = root_hash(tenant=tenant, salt=salt, model_fingerprint=self.geometry.model_fingerprint)
        size = self.geometry.block_size
        known = tokens[: (len(tokens) // TOKEN_BYTES - 1) // size * size * TOKEN_BYTES] if tokens else b""
        return len(self._index.find(chain_hashes(root, known, block_bytes=size * TOKEN_BYTES))) * size

    def counts(self) -> BlockCounts:
        return self._blocks.counts()

    def block(self, block_id: int) -> tuple[BlockState, int, int, bytes | None]:
        """State, references, pins and prefix hash of a block."""
        pool = self._blocks
        return (
            pool.state(block_id),
            pool.ref_count(block_id),
            pool.pin_count(block_id),
            self._index.hashes[block_id] or None,
        )

    def reset_prefix_cache(self, first: int = 0, end: int | None = None) -> int:
        """Makes the blocks from `first` to before `end` unfindable, all of them by default; returns how many were."""
        dropped = self._blocks.drop_cached(first, self.geometry.num_blocks if end is None else end)
        self._check()
        return dropped

    def statistics(self) -> LedgerStatistics:
        """Cost: O(sequences), and a millisecond or two for every million blocks."""
        pool = self._blocks.statistics()
        return LedgerStatistics(
            counts=pool.counts,
            num_leases=len(self._leases),
            num_sequences=sum(len(lease.sequences) for lease in self._leases.values()),
            num_held_tokens=self._num_held_tokens(),
            num_table_entries=pool.num_references,
            num_shared_blocks=pool.num_shared,
            counters=replace(self._counters),
            num_allocated=pool.num_allocated,
            num_evicted=pool.num_evicted,
            num_published=self._index.statistics().num_published,
            refusals=dict(self._refusals),
        )

    def _sequences(self) -> Iterator[Sequence]:
        for lease in self._leases.values():
            yield from lease.sequences.values()

    def _holders(self) -> Counter[int]:
        return Counter(block_id for sequence in self._sequences() for block_id in sequence.block_table)

    def _num_held_tokens(self) -> int:
        """A block that several sequences hold counts as its fullest holder fills it."""
        size = self.geometry.block_size
        fills: dict[int, int] = {}  # of the blocks that a holder does not fill
        for sequence in self._sequences():
            num_tokens = max(sequence.num_known, sequence.num_scheduled)
            first = num_tokens // size
            for index, block_id in enumerate(sequence.block_table[first:], first):
                fills[block_id] = max(fills.get(block_id, 0), num_tokens - index * size, 0)
        shared = {block_id for block_id in fills if self._blocks.ref_count(block_id) > 1}
        if shared:
            for sequence in self._sequences():
                first = max(sequence.num_known, sequence.num_scheduled) // size
                fills |= dict.fromkeys(shared.intersection(sequence.block_table[:first]), size)
        return self._blocks.counts().active * size - sum(size - fill for fill in fills.values())

    # -- checking -------------------------------------------------------------------------------------------------

    def violations(self) -> Iterator[str]:
        """What is wrong with the books (I1 to I4), one sentence each. Cost: O(blocks + table entries)."""
        yield from self._index.violations()
        yield from self._blocks.violations()
        yield from self._wrong_references()
        yield from self._wrong_pins()
        yield from self._wrong_sharing()
        rows = sum(len(lease.sequences) for lease in self._leases.values())
        rows += sum(len(step.released_rows) for lease in self._leases.values() for step in lease.in_flight)
        if rows != self._num_rows:
            yield f"{self._num_rows} rows counted in the worker, {rows} are taken"

    def _wrong_references(self) -> Iterator[str]:
        holders = self._holders()
        for block_id in range(1, self.geometry.num_blocks):
            if holders[block_id] != self._blocks.ref_count(block_id):
                count = self._blocks.ref_count(block_id)
                yield f"block {block_id} is in {holders[block_id]} tables and has {count} references"

    def _wrong_pins(self) -> Iterator[str]:
        steps = (step for lease in self._leases.values() for step in lease.in_flight)
        pins = Counter(block_id for step in steps for block_ids in step.pinned for block_id in block_ids.tolist())
        for block_id in range(1, self.geometry.num_blocks):
            if pins[block_id] != self._blocks.pin_count(block_id):
                count = self._blocks.pin_count(block_id)
                yield f"block {block_id} is pinned by {pins[block_id]} steps and has {count} pins"

    def _wrong_sharing(self) -> Iterator[str]:
        """I4: who shares a block agrees on every token up to its end, as far as steps were planned to fill it."""
        size = self.geometry.block_size
        seen: dict[tuple[int, int], bytes] = {}
        for sequence in self._sequences():
            for index, block_id in enumerate(sequence.block_table):
                if self._blocks.ref_count(block_id) < 2:
                    continue
                filled = min((index + 1) * size, sequence.num_known, sequence.num_scheduled)
                prefix = sequence.root + sequence.token_bytes(0, filled)
                other = seen.setdefault((index, block_id), prefix)
                shorter = min(len(prefix), len(other))
                if prefix[:shorter] != other[:shorter]:
                    yield f"block {block_id} is shared by sequences with different tokens"

    def check_invariants(self) -> None:
        """Raises BrokenInvariant with the first violation."""
        for violation in self.violations():
            raise BrokenInvariant(violation)

    def _check(self) -> None:
        if self._verify:
            self.check_invariants()


def refuse_repeated(request: StepRequest) -> None:
    """A sequence can be computed only once in a step. Raises CallRefused (INVALID_ARGUMENT)."""
    if not len(request.extend_ids) and not len(request.extend_token_counts):
        return
    if len(request.extend_ids) != len(request.extend_token_counts):
        limit = f"{len(request.extend_ids)} entries, as extends.sequence_ids"
        raise CallRefused(invalid("extends.token_counts", f"{len(request.extend_token_counts)} entries", limit))
    seq_ids = np.sort(request.extend_ids)
    is_repeated = seq_ids[1:] == seq_ids[:-1]
    if np.count_nonzero(is_repeated):
        repeated = seq_ids[is_repeated.argmax()]
        raise CallRefused(invalid("extends.sequence_ids", f"{repeated} more than once", "distinct"))


def as_ids(values: IdsLike) -> Ids:
    return np.asarray(values, np.int32)


def refuse_unplanned(step: StepInFlight, seq_ids: Ids, token_counts: Ids) -> None:
    """A report has to be about what was planned. Raises CallRefused (INVALID_ARGUMENT)."""
    runs = step.runs
    planned_counts = runs.sampled_positions.astype(np.int32)
    if runs.seq_ids.tobytes() != seq_ids.tobytes() or planned_counts.tobytes() != token_counts.tobytes():
        raise CallRefused(invalid("step_report.sequence_ids", "other runs", f"the runs of step {step.step_number}"))


def refuse_doomed(step: StepInFlight) -> None:
    """A step behind one that computed nothing can't have been computed. Raises CallRefused (INVALID_ARGUMENT)."""
    if step.is_doomed and len(step.runs):
        raise CallRefused(invalid("step_report.outcome", "COMPUTED", "FAILED or SKIPPED, as of a step before it"))
