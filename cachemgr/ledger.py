"""The books of one pool in one epoch: who may change them, and what changed.

Which block belongs to whom, and which steps may still touch it, is in the core (`core/`, Rust). Here are leases and
their time, epochs, repeated requests and statistics.

Single writer, no I/O, no clock: every method is atomic, and time comes in as `now`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from quire.cachemgr._core import (
    POLICIES,
    Admission,
    Books,
    Explanation,
    PinView,
    SequenceView,
    StepPlan,
    StepRequest,
    StepView,
)
from quire.cachemgr.blocks import BlockCounts, BlockState, HostBlockCounts
from quire.cachemgr.errors import BrokenInvariant, CallRefused, Reason, Refusal, lease_not_found, refuse
from quire.cachemgr.geometry import Geometry
from quire.cachemgr.leases import ExpiryQueue, Lease, LeaseOrder, LeaseState, page_key

ID_BYTES = 4

IdsLike: TypeAlias = Collection[int] | npt.NDArray[np.int32] | bytes
"""Sequence or token ids, or counts, that fit in 32 bits; as bytes, ID_BYTES each, little-endian."""

DEFAULT_POLICY = POLICIES[0]


class StepOutcome(Enum):
    COMPUTED = "computed"
    FAILED = "failed"
    SKIPPED = "skipped"


class Holdings(NamedTuple):
    """What a lease holds, counted, and how far its steps have come."""

    next_step: int
    settled_step: int
    """The last step that was reported."""
    num_in_flight: int
    num_sequences: int


class BlockShare(NamedTuple):
    """What a tenant may take of a pool, in blocks."""

    floor: int
    """It can always hold as many."""
    quota: int
    """While it holds and caches more, its cached blocks are evicted before others'."""
    limit: int
    """It never holds more."""
    pin_budget: int
    """It never pins more."""


class TenantUse(NamedTuple):
    """A tenant's part of a pool, in blocks."""

    name: str
    share: BlockShare
    num_held: int
    num_cached: int
    num_reserved: int
    num_pinned: int


class AdmissionCheck(NamedTuple):
    """What would become of an admission."""

    num_cached_tokens: int
    num_needed: int
    """Blocks that it would be handed out, now or later."""
    num_available: int
    """Blocks that the tenant could take."""
    refusal: Refusal | None


@dataclass(frozen=True, slots=True)
class LedgerStatistics:
    """The present state of a pool, and what happened in its epoch."""

    counts: BlockCounts
    host_counts: HostBlockCounts | None
    """None: there is no host tier."""
    num_leases: int
    num_fencing_leases: int
    num_steps_in_flight: int
    """Planned and not reported, of all leases."""
    num_sequences: int
    num_offloaded: int
    """Sequences in the host tier."""
    num_held_tokens: int
    """Tokens in active blocks, each block counted once."""
    num_table_entries: int
    num_shared_blocks: int
    num_allocated: int
    num_evicted: int
    num_published: int
    planned_steps: int
    computed_steps: int
    failed_steps: int
    skipped_steps: int
    admissions: int
    admitted_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    """Tokens of admissions that were cached before, and evicted."""
    forks: int
    copied_blocks: int
    resumed_admissions: int
    """Sequences that were released to make room and came back; they do not count as admissions."""
    resumed_tokens: int
    resumed_cached_tokens: int
    offloads: int
    restores: int
    offloaded_blocks: int
    restored_blocks: int
    """Copied to the host tier and back."""
    computed_tokens: int
    """Tokens whose keys and values steps computed, as far as they were reported."""
    generated_tokens: int
    """Tokens that these steps added to sequences."""
    num_reserved_blocks: int
    """Guaranteed to sequences with a reservation, and not held yet."""
    num_pinned_blocks: int
    expired_leases: int
    refusals: dict[Reason, int]


class Ledger:
    """Books of one pool, from the attachment of an epoch to its end."""

    def __init__(
        self,
        pool: str,
        epoch: int,
        geometry: Geometry,
        *,
        policy: str = DEFAULT_POLICY,
        verify: bool = False,
        listeners: AbstractSet[Callable[[], None]] = frozenset(),
        directory: Path | None = None,
        books: Books | None = None,
    ) -> None:
        """`listeners` are called after every change of the books; `recover` has the books.

        Changes are written to a store in the directory, if one is given: empty, and existing.
        """
        self.pool = pool
        self.epoch = epoch
        self.geometry = geometry
        self._verify = verify
        self._listeners = listeners
        self._books = books or Books(
            num_blocks=geometry.num_blocks,
            num_host_blocks=geometry.num_host_blocks,
            block_size=geometry.block_size,
            max_sequences=geometry.max_sequences,
            max_sequence_tokens=geometry.max_sequence_tokens,
            vocab_size=geometry.vocab_size,
            model_fingerprint=geometry.model_fingerprint,
            has_recurrent_state=geometry.has_recurrent_state,
            policy=policy,
            directory=directory,
        )
        self._leases: dict[str, Lease] = {}
        self._lease_order = LeaseOrder()
        self._expiry = ExpiryQueue()
        self._num_expired = 0

    @classmethod
    def recover(
        cls,
        pool: str,
        epoch: int,
        geometry: Geometry,
        *,
        directory: Path,
        now: float,
        verify: bool = False,
        listeners: AbstractSet[Callable[[], None]] = frozenset(),
    ) -> Ledger:
        """The books that a store has, to go on with. Open leases are renewed: nobody could do it meanwhile.

        Raises OSError if the store can't be read, is not whole, or breaks an invariant.
        """
        books = Books.recover(directory)
        ledger = cls(pool, epoch, geometry, verify=verify, listeners=listeners, books=books)
        for lease_id, tenant, ttl_s, is_ending in books.leases():
            state = LeaseState.FENCING if is_ending else LeaseState.OPEN
            ledger._enter(Lease(lease_id, pool, ttl_s, now + ttl_s, tenant, state))
        return ledger

    @property
    def is_stored(self) -> bool:
        """True if changes are written down; not any more once that has failed."""
        return self._books.is_stored()

    @property
    def last_report(self) -> int:
        """The number of the last report that was entered, 0 if none."""
        return self._books.last_report()

    # -- leases ---------------------------------------------------------------------------------------------------

    def open_lease(self, lease_id: str, *, ttl_s: float, now: float, tenant: str = "") -> Lease:
        """A new lease without sequences."""
        lease = Lease(lease_id, self.pool, ttl_s, now + ttl_s, tenant)
        self.adopt_lease(lease)
        return lease

    def adopt_lease(self, lease: Lease) -> None:
        """Takes over an open lease of an earlier epoch; its sequences are gone."""
        self._books.open_lease(lease.lease_id, lease.tenant, lease.ttl_s)
        self._enter(lease)

    def _enter(self, lease: Lease) -> None:
        self._leases[lease.lease_id] = lease
        self._lease_order.add(lease)
        self._expiry.add(lease)

    def lease(self, lease_id: str) -> Lease:
        """The open lease of this id. Raises CallRefused (LEASE_NOT_FOUND)."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.state is not LeaseState.OPEN:
            raise lease_not_found(lease_id)
        return lease

    def tenant_of(self, lease_id: str) -> str | None:
        """Whose lease it is, one being fenced included; None if it is gone."""
        lease = self._leases.get(lease_id)
        return None if lease is None else lease.tenant

    def is_open(self, lease_id: str) -> bool:
        """True if the lease is there and has not ended."""
        lease = self._leases.get(lease_id)
        return lease is not None and lease.state is LeaseState.OPEN

    def leases(self) -> list[Lease]:
        """All leases, those being fenced included, by id."""
        return [self._leases[lease_id] for lease_id in sorted(self._leases)]

    def leases_from(self, key: str, *, only: str = "") -> Iterator[tuple[str, Lease]]:
        """Leases with their page keys, by these, from one on; of `only` that id. They must not change meanwhile."""
        if not only:
            yield from self._lease_order.starting(key)
        elif only in self._leases and page_key(only) >= key:
            yield page_key(only), self._leases[only]

    def end_lease(self, lease_id: str) -> bool:
        """Stops a lease; its blocks come back with `lease_fenced`. False if it is not open."""
        if not self.is_open(lease_id):
            return False
        self._end(self._leases[lease_id])
        return True

    def _end(self, lease: Lease) -> None:
        lease.state = LeaseState.FENCING
        self._books.end_lease(lease.lease_id)

    def expire_leases(self, now: float) -> list[Lease]:
        """Stops the leases whose time is over and returns them: the worker has to fence them."""
        expired = self._expiry.pop_expired(self._leases, now)
        for lease in expired:
            self._end(lease)
        self._num_expired += len(expired)
        return expired

    def extend_leases(self, held_s: float, now: float) -> None:
        """Add the time in which no renewal could be read to the time of every open lease. Cost: O(leases)."""
        for lease in self._leases.values():
            lease.extend(held_s, now)

    def next_expiry(self) -> float | None:
        """No lease runs out before this."""
        return self._expiry.next_expiry()

    def lease_fenced(self, lease_id: str) -> None:
        """The worker will not touch the lease's blocks any more: all of them come back. No effect if it is gone."""
        if self._leases.pop(lease_id, None) is not None:
            self._lease_order.remove(lease_id)
            self._books.close_lease(lease_id)
            self._changed()

    # -- steps ----------------------------------------------------------------------------------------------------

    def plan(self, body: bytes, *, now: float) -> StepPlan:
        """Plans the next step of a lease, as a serialised PlanStepRequest asks for it, and renews the lease.

        Raises CallRefused (LEASE_NOT_FOUND, EPOCH_CHANGED, REQUEST_ID_REUSED, TOO_MANY_STEPS, INVALID_ARGUMENT) with
        nothing changed.
        """
        sizes = self.geometry
        request = StepRequest(body, max_sequences=sizes.max_sequences, max_tokens=sizes.max_tokens)
        self.lease(request.lease_id).renew(now)
        self._require_epoch(request.epoch)
        plan = self._books.plan(request, now)
        self._changed()
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
        report_number: int = 0,
    ) -> None:
        """Enters the worker's report of a step, the one of this number.

        `token_counts` are the tokens whose KV is valid of `seq_ids`, the plan's runs in their order; `sampled_tokens`
        those of `sampled_ids`. A step that is settled already, or of a lease that is gone, has no effect. Raises
        CallRefused (INVALID_ARGUMENT) if the report does not fit what was planned.
        """
        self._books.settle(
            lease_id,
            step_number,
            outcome.value,
            seq_ids=as_bytes(seq_ids),
            token_counts=as_bytes(token_counts),
            sampled_ids=as_bytes(sampled_ids),
            sampled_tokens=as_bytes(sampled_tokens),
            report_number=report_number,
        )
        self._changed()

    def _require_epoch(self, epoch: int) -> None:
        if epoch == self.epoch:
            return
        message = f"pool {self.pool!r} has epoch {self.epoch}, the call is for {epoch}; its sequences are gone"
        raise CallRefused(refuse(Reason.EPOCH_CHANGED, message, pool=self.pool, epoch=self.epoch, value=epoch))

    # -- tenants --------------------------------------------------------------------------------------------------

    def set_shares(self, default: BlockShare, by_name: Mapping[str, BlockShare]) -> None:
        """What tenants may take from now on: all of them, and others by name."""
        self._books.set_shares(default, dict(by_name))
        self._changed()

    def tenants(self) -> list[TenantUse]:
        """Those that were seen or have a share of their own, by name."""
        used = ((name, BlockShare(*share), *counts) for name, share, counts in self._books.tenants())
        return sorted(TenantUse(*use) for use in used)

    def tenant_use(self, name: str) -> TenantUse:
        """Of a tenant that was seen or has a share of its own. Raises StopIteration if it is not."""
        return next(use for use in self.tenants() if use.name == name)

    def num_leases_by_tenant(self) -> dict[str, int]:
        """Leases of each tenant that has any, those being fenced included. Cost: O(leases)."""
        return Counter(lease.tenant for lease in self._leases.values())

    def check_admission(self, tenant: str, admission: Admission, *, reserve: int = 0) -> AdmissionCheck:
        """What would become of an admission of the tenant now; takes nothing."""
        return AdmissionCheck(*self._books.check_admission(tenant, admission, reserve))

    def pin_prefix(self, tokens: bytes, *, salt: bytes, tenant: str, ttl_s: float, now: float) -> PinView:
        """Keeps what is cached of a prefix from being evicted.

        Raises CallRefused (PREFIX_NOT_CACHED, PIN_BUDGET_SPENT, QUOTA_EXCEEDED, OUT_OF_BLOCKS).
        """
        self.advance(now)
        pin = self._books.pin_prefix(tenant, tokens, salt, now + ttl_s)
        self._changed()
        return pin

    def unpin_prefix(self, pin_id: bytes, *, tenant: str | None = None) -> bool:
        """Takes a pin of the tenant back, by default anybody's; False if there is none."""
        is_gone = self._books.unpin_prefix(tenant, pin_id)
        self._changed()
        return is_gone

    def pins(self, *, tenant: str | None = None, behind: bytes | None = None, most: int = 1_000) -> list[PinView]:
        """The pins behind one, by id: the tenant's, by default everybody's."""
        return self._books.pins(tenant, behind, most)

    # -- time -----------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Ends the pins and the advice whose time is over. Without this, what reads the books finds them still.

        Cost: O(1) if none has ended.
        """
        if self._books.advance(now):
            self._changed()

    def next_end(self) -> float | None:
        """No pin and no advice ends before this; None if there is none that ends."""
        return self._books.next_end()

    # -- looking --------------------------------------------------------------------------------------------------

    def holdings(self, lease_id: str) -> Holdings:
        """What a lease holds, one being fenced included. Raises KeyError if there is none of this id."""
        return Holdings(*self._books.steps_of(lease_id), self._books.num_sequences(lease_id))

    def steps_in_flight(self, lease_id: str) -> list[StepView]:
        """The steps of a lease that were planned and not reported. Raises KeyError if there is none of this id."""
        return self._books.in_flight(lease_id)

    def sequence(self, lease_id: str, seq_id: int) -> SequenceView | None:
        """A sequence of an open lease, or None. Raises CallRefused (LEASE_NOT_FOUND)."""
        self.lease(lease_id)
        return self._books.sequence(lease_id, seq_id)

    def sequence_ids(self, lease_id: str) -> list[int]:
        """The sequences of a lease, one being fenced included, as they were admitted."""
        return self._books.sequence_ids(lease_id)

    def sequences(self, lease_id: str) -> list[SequenceView]:
        """The same with what is known of them."""
        return [self.view(lease_id, seq_id) for seq_id in self.sequence_ids(lease_id)]

    def sequences_from(self, lease_id: str, first: int, most: int) -> list[SequenceView]:
        """The first `most` of a lease's sequences with ids from `first` on, by id. Cost: O(the lease's sequences)."""
        return self._books.sequences_from(lease_id, first, most)

    def view(self, lease_id: str, seq_id: int) -> SequenceView:
        """A sequence of a lease, one being fenced included. Raises KeyError if there is none."""
        view = self._books.sequence(lease_id, seq_id)
        if view is None:
            raise KeyError(seq_id)
        return view

    def tokens(self, lease_id: str, seq_id: int) -> bytes:
        """All known tokens of a sequence, ID_BYTES each; none if there is no such sequence."""
        return self._books.tokens(lease_id, seq_id) or b""

    def num_cached_tokens(self, tokens: bytes, *, salt: bytes, tenant: str = "") -> int:
        """Tokens that an admission would find in the cache; takes nothing."""
        return self._books.num_cached_tokens(tokens, salt, tenant)

    def counts(self) -> BlockCounts:
        return BlockCounts(*self._books.block_counts())

    def host_counts(self) -> HostBlockCounts | None:
        """Of the host tier; None if there is none."""
        return HostBlockCounts(*self._books.host_block_counts()) if self.geometry.num_host_blocks else None

    def block(self, block_id: int) -> tuple[BlockState, int, int, bytes | None]:
        """State, references, pins and prefix hash of a block."""
        state, ref_count, pin_count, prefix_hash = self._books.block(block_id)
        return BlockState(state), ref_count, pin_count, prefix_hash

    def list_blocks(
        self, first: int, most: int, *, state: BlockState | None, tenant: str | None, lease_id: str
    ) -> tuple[bytes, int | None]:
        """A page of at most `most` blocks from `first` on, by id, and where the next one begins; None at the end.

        The blocks are those of a ListBlocksResponse, serialised. Fewer than `most` come with a next page where those
        that are listed are rare. Filters: a state, a tenant (whose no free block is), the tables of a lease; None and
        an empty lease_id let everything through. Cost: O(page + 65,536), and of a lease its table entries.
        """
        first = min(first, self.geometry.num_blocks)
        return self._books.list_blocks(
            first, most, state=None if state is None else state.value, tenant=tenant, lease_id=lease_id or None
        )

    def snapshot(self, first: int, most: int, *, tenant: str | None, with_content: bool) -> tuple[bytes, int | None]:
        """The same of all blocks that are not free, as events of a WatchBlocksResponse."""
        return self._books.snapshot(first, most, tenant=tenant, with_content=with_content)

    def changes(self, first: int, most: int, *, tenant: str | None, with_content: bool) -> tuple[bytes, int] | None:
        """What changed from number `first` on, of at most `most` blocks, and the number to go on from.

        Events of a WatchBlocksResponse, serialised: the blocks as they are now; to a tenant, those that are not its own
        any more are free. None if what came next is not known any more: `num_changes_kept` changes are.
        """
        return self._books.changes(first, most, tenant=tenant, with_content=with_content)

    def num_changes(self) -> int:
        """Changes of blocks in this epoch."""
        return self._books.num_changes()

    def num_changes_kept(self) -> int:
        return self._books.num_changes_kept()

    def begin_reading(self) -> None:
        """Somebody reads what is in blocks: it is kept of those that are published, until as many `end_reading`."""
        self._books.begin_reading()

    def end_reading(self) -> None:
        self._books.end_reading()

    def explain(self, tokens: bytes, *, salt: bytes, tenant: str, with_other_tenants: bool) -> Explanation:
        """Why an admission would not find more in the cache; takes nothing. Cost: about that of a lookup."""
        return self._books.explain(tokens, salt, tenant, with_other_tenants=with_other_tenants)

    def parked_blocks(self) -> list[int]:
        """The cached blocks as the eviction policy keeps them."""
        return self._books.parked_blocks()

    def reset_prefix_cache(self, first: int = 0, end: int | None = None, *, now: float = 0.0) -> int:
        """Makes the blocks from `first` to before `end` unfindable, all of them by default; returns how many were."""
        dropped = self._books.reset_prefix_cache(first, self.geometry.num_blocks if end is None else end, now)
        self._changed()
        return dropped

    def statistics(self) -> LedgerStatistics:
        """Cost: O(sequences)."""
        return LedgerStatistics(
            counts=self.counts(),
            host_counts=self.host_counts(),
            num_leases=len(self._leases),
            num_fencing_leases=sum(lease.state is LeaseState.FENCING for lease in self._leases.values()),
            num_sequences=sum(map(self._books.num_sequences, self._leases)),
            num_held_tokens=self._books.num_held_tokens(),
            expired_leases=self._num_expired,
            refusals={Reason(name): count for name, count in self._books.refusals().items()},
            **dict(self._books.counters()),
        )

    # -- checking -------------------------------------------------------------------------------------------------

    def violations(self) -> list[str]:
        """What is wrong with the books (I1 to I4), one sentence each. Cost: O(blocks + table entries)."""
        return self._books.violations()

    def audit(self, first: int, end: int) -> list[str]:
        """The same of the blocks from `first` to before `end`. Cost: O(these + table entries + free blocks)."""
        return self._books.audit(first, end)

    def audit_counts(self) -> list[str]:
        """What is wrong with the counts. Cost: O(blocks), about a millisecond for a million."""
        return self._books.audit_counts()

    def audit_promises(self) -> list[str]:
        """What is wrong with tenants' accounts, pins and reservations. Cost: likewise."""
        return self._books.audit_promises()

    def check_invariants(self) -> None:
        """Raises BrokenInvariant with the first violation."""
        for violation in self.violations():
            raise BrokenInvariant(violation)

    def _changed(self) -> None:
        if self._verify:
            self.check_invariants()
        for tell in self._listeners:
            tell()


def as_bytes(values: IdsLike) -> bytes:
    """Numbers as the core takes them, ID_BYTES each."""
    return values if isinstance(values, bytes) else np.asarray(values, "<i4").tobytes()
