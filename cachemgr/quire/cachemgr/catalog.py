"""All pools of this cachemgr: the attached epoch of each, and the pool of each lease.

A worker that registers brings a new epoch (never attached before), a known epoch (its books are here, and it was
attached under no other term since), or an unknown epoch (it has a history that this cachemgr does not have). With an
unknown epoch the worker has to begin a new one.

A new epoch begins with empty books, unless its memory is that of the epoch before and outlived the worker: then the
books go on with what was published (`why_empty` has the conditions).

A pool is controlled under this cachemgr's term. If its worker has accepted a higher one before this cachemgr started,
the clock was set back, and the pool is controlled under a term above that (`term_over`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

from quire.cachemgr._core import DEFAULT_POLICY, Lease, Ledger
from quire.cachemgr.blocks import BlockShare
from quire.cachemgr.errors import CallRefused, Reason, lease_not_found, pool_not_found, refuse
from quire.cachemgr.geometry import Geometry
from quire.cachemgr.pool_journal import PoolJournal

SIGNING_KEY_BYTES = 32
MAX_TERM = 2**63 - 1
MAX_TERM_STEP = 2**32
LEASES_AT_ONCE = 100
"""Leases of one read of a list from the books."""

SharesOf = Callable[[int], tuple[BlockShare, dict[str, BlockShare]]]
"""Returns the shares of a pool with so many blocks: the default, and others by name."""
AdapterRights = tuple[Set[str] | None, Mapping[str, Set[str] | None]]
"""The names of the adapters that tenants may use: the default, and those by tenant. None: all."""


@dataclass(frozen=True, slots=True)
class KeptMemory:
    """Memory that outlived its worker, as the next worker found it."""

    epoch: int
    """Attached last on this memory."""
    attached_term: int
    num_accepted_steps: int
    """Of that epoch."""
    whole_blocks: bytes
    """A bit for each block, the lowest bit of the first byte for block 0: its content is as a step left it."""


@dataclass(frozen=True, slots=True)
class CarriedOver:
    """The published blocks of the epoch before: those that are cached now, and those with damaged content."""

    num_kept: int
    num_dropped: int


@dataclass(frozen=True, slots=True)
class BegunEmpty:
    """The memory was kept, and the books did not go on with it; the reason is for people."""

    reason: str


@dataclass(frozen=True, slots=True)
class Registration:
    """A pool, as its worker presents it."""

    pool: str
    epoch: int
    highest_term: int
    attached_term: int
    geometry: Geometry
    worker_address: str
    next_steps: Mapping[str, int] = field(default_factory=dict)
    """The number of the next step that the worker accepts, for each lease that is open there."""
    acknowledged_report: int = 0
    """The worker has discarded its reports up to this one."""
    last_disk_order: int = 0
    """The last order about the disk that the worker has had."""
    highest_term_age_s: float = 0.0
    """Seconds since the worker first obeyed the highest term."""
    memory_id: str = ""
    """Empty: the memory ends with the worker."""
    kept_memory: KeptMemory | None = None
    adapters: Mapping[str, bytes] | None = None
    """The identities of the worker's adapters, by name; None: the worker does not say."""


@dataclass(frozen=True, slots=True)
class NewEpoch:
    """The worker has to begin a new epoch under this term and register again."""

    term: int


@dataclass(frozen=True, slots=True)
class SavedPool:
    """A pool's epoch as it is kept for the next cachemgr, but for its books."""

    pool: str
    epoch: int
    geometry: Geometry
    worker_address: str
    signing_key: bytes
    terms: tuple[int, ...]
    """The terms that have used these books, in order."""
    memory_id: str = ""


@dataclass(slots=True)
class AttachedPool:
    """A pool's books with the state of the attachment.

    terms: the terms that have controlled the epoch with these books; the last is this cachemgr's.
    """

    ledger: Ledger
    signing_key: bytes
    worker_address: str
    terms: tuple[int, ...]
    is_attached: bool = True
    acknowledged_report: int = 0
    is_acknowledging: bool = False
    num_refused_reports: int = 0
    """Reports of steps that were refused since the last one that was not."""
    memory_id: str = ""
    memory: CarriedOver | BegunEmpty | None = None
    """The content that the epoch began with, if its memory was kept; None: it was new."""
    adapters: Mapping[str, bytes] | None = None
    """As in Registration."""

    @property
    def term(self) -> int:
        """The term under which this cachemgr controls the pool."""
        return self.terms[-1]

    @property
    def is_contradicted(self) -> bool:
        """True if the worker repeats a report that does not fit the books: they can't agree in this epoch any more."""
        return self.num_refused_reports > 1

    def set_adapters(self, adapters: Mapping[str, bytes] | None) -> None:
        """Sets the worker's adapters: plans are refused for others."""
        self.adapters = adapters
        self.ledger.set_adapters(
            None if adapters is None else [(identity, name) for name, identity in adapters.items()]
        )

    def lacks(self, registration: Registration) -> bool:
        """True if the worker has state that is not in these books: they are not those that granted its steps."""
        if registration.acknowledged_report > self.acknowledged_report:
            return True
        if registration.last_disk_order > self.ledger.last_disk_order:
            return True
        for lease_id, next_step in registration.next_steps.items():
            lease = self.ledger.inspector.find_lease(lease_id)
            if lease is None or lease.next_step < next_step:
                return True
        return False


class Catalog:
    """Pools by name. `term` is this cachemgr's incarnation; a pool may have a higher one."""

    def __init__(
        self,
        term: int,
        *,
        policy: str = DEFAULT_POLICY,
        verify: bool = False,
        keep_tokens: bool = True,
        begin_state: Callable[[SavedPool], Path | None] = lambda saved: None,
    ) -> None:
        """`begin_state` says where to write a new epoch's changes, for `recover`; None: nowhere.

        `keep_tokens`: the tokens of findable blocks are kept for watchers with the role content.
        """
        self.term = term
        self.journal = PoolJournal()
        self._begin_state = begin_state
        self._policy = policy
        self._verify = verify
        self._keep_tokens = keep_tokens
        self._pools: dict[str, AttachedPool] = {}
        self._raised_terms: dict[str, int] = {}
        self._pool_of_lease: dict[str, str] = {}
        self._listeners: dict[str, dict[Callable[[], None], None]] = {}  # told in the order in which they came
        self._shares: SharesOf | None = None
        self._adapter_rights: AdapterRights = (None, {})

    def set_shares(self, shares: SharesOf, adapter_rights: AdapterRights = (None, {})) -> None:
        """Sets the tenants' shares of each pool, and the adapters that they may use."""
        self._shares = shares
        has_other_rights, self._adapter_rights = adapter_rights != self._adapter_rights, adapter_rights
        for pool in self.pools():
            self._apply_shares(pool.ledger)
            if has_other_rights:
                self.journal.touch(pool.ledger.pool)

    def adapters_of(self, tenant: str) -> Set[str] | None:
        """Return the names of the adapters that a tenant may use. None: all."""
        default, by_tenant = self._adapter_rights
        return by_tenant.get(tenant, default)

    def _apply_shares(self, ledger: Ledger) -> None:
        if self._shares is not None:
            ledger.set_shares(*self._shares(ledger.geometry.num_blocks - 1))
            ledger.set_adapter_rights(*self._adapter_rights)

    def pools(self) -> list[AttachedPool]:
        """All pools, by name."""
        return [self._pools[name] for name in sorted(self._pools)]

    def pool(self, name: str) -> AttachedPool:
        """The pool of this name; of no name, the only one there is. Raises CallRefused (POOL_NOT_FOUND)."""
        if name in self._pools:
            return self._pools[name]
        if not name and len(self._pools) == 1:
            return next(iter(self._pools.values()))
        raise pool_not_found(name, num_pools=len(self._pools))

    def pool_of(self, lease_id: str) -> AttachedPool:
        """The pool a lease is for. Raises CallRefused (LEASE_NOT_FOUND)."""
        name = self._pool_of_lease.get(lease_id)
        if name is None:
            raise lease_not_found(lease_id)
        return self._pools[name]

    def tenant_of(self, lease_id: str) -> str | None:
        """The tenant of a lease, one being fenced included; None if the lease is removed."""
        name = self._pool_of_lease.get(lease_id)
        return None if name is None else self._pools[name].ledger.inspector.tenant_of(lease_id)

    def leases_after(self, key: str, ledgers: Sequence[Ledger]) -> Iterator[tuple[str, Lease]]:
        """Leases of these pools after a page key, in the order of page keys. They must not change meanwhile."""
        ordered = heapq.merge(*(leases_from(ledger, key) for ledger in ledgers), key=itemgetter(0))
        return ((each, lease) for each, lease in ordered if each > key)

    def listeners(self, pool: str) -> dict[Callable[[], None], None]:
        """The callbacks for any change of the pool of this name, its epoch included; to be added to."""
        return self._listeners.setdefault(pool, {})

    def find(self, name: str, epoch: int) -> AttachedPool | None:
        """The pool of this name, if this is its epoch."""
        pool = self._pools.get(name)
        return pool if pool is not None and pool.ledger.epoch == epoch else None

    def register(
        self,
        registration: Registration,
        *,
        signing_key: bytes,
        uptime_s: float = 0.0,
        term_step: int = 1,
        now: float = 0.0,
    ) -> AttachedPool | NewEpoch:
        """Attaches a pool, unless its worker has to begin a new epoch first.

        signing_key     for an epoch that is new here; one that is back keeps its key, so that grants on their way stay
                        good
        uptime_s        seconds since this cachemgr started
        term_step       how far to go above a higher term that the worker has obeyed, 1 to MAX_TERM_STEP: at random, so
                        that two cachemgrs that do so have different terms
        now             when the epoch begins, if it is new here, by the clock of plans

        Raises CallRefused (TERM_SUPERSEDED, POOL_ALREADY_ATTACHED).
        """
        known = self._pools.get(registration.pool)
        term = max(self.term, self._raised_terms.get(registration.pool, 0), 0 if known is None else known.term)
        if registration.highest_term > term:
            term = term_over(registration, term=term, uptime_s=uptime_s, step=term_step)
            self._raised_terms[registration.pool] = term
        if known is not None and known.is_attached and known.ledger.epoch != registration.epoch:
            message = f"a worker with epoch {known.ledger.epoch} is attached to pool {registration.pool!r}"
            refusal = refuse(Reason.POOL_ALREADY_ATTACHED, message, pool=registration.pool, epoch=known.ledger.epoch)
            raise CallRefused(refusal)
        if known is not None and known.ledger.epoch == registration.epoch:
            is_ours = registration.attached_term in (0, *known.terms)  # else another cachemgr has ruled it meanwhile
            is_followed = not (known.is_contradicted or known.lacks(registration))
            if not is_ours or not is_followed or registration.highest_term > known.term:
                return NewEpoch(term)
            self._attach_again(known, registration)
            return known
        if registration.attached_term:
            return NewEpoch(term)
        return self._begin(registration, signing_key, known, term, now)

    def _attach_again(self, pool: AttachedPool, registration: Registration) -> None:
        before = (pool.is_attached, pool.worker_address)
        pool.is_attached, pool.worker_address = True, registration.worker_address
        if before != (True, registration.worker_address):
            self.journal.touch(registration.pool)
        self.set_adapters(pool, registration.adapters)

    def detach(self, pool: AttachedPool) -> None:
        """The pool's worker has gone."""
        pool.is_attached = False
        self.journal.touch(pool.ledger.pool)

    def set_adapters(self, pool: AttachedPool, adapters: Mapping[str, bytes] | None) -> None:
        """The worker's adapters, as it says them now."""
        if adapters != pool.adapters:
            pool.set_adapters(adapters)
            self.journal.touch(pool.ledger.pool)

    def _begin(
        self, registration: Registration, signing_key: bytes, known: AttachedPool | None, term: int, now: float
    ) -> AttachedPool:
        """Make the books of a new epoch. Open leases of the pool stay, without their sequences."""
        name, epoch, memory_id = registration.pool, registration.epoch, registration.memory_id
        terms, address = (term,), registration.worker_address
        saved = SavedPool(name, epoch, registration.geometry, address, signing_key, terms, memory_id)
        leases = [] if known is None else known.ledger.inspector.leases()
        kept, reason = registration.kept_memory, why_empty(registration, known)
        memory: CarriedOver | BegunEmpty | None
        if known is not None and kept is not None and reason is None:
            ledger = known.ledger
            directory = self._begin_state(saved)
            carried = ledger.begin_epoch(epoch, whole_blocks=kept.whole_blocks, now=now, directory=directory)
            memory = CarriedOver(*carried)
        else:
            ledger = self._make_books(saved, now)
            ledger.go_on_erasing([] if known is None else known.ledger.erasing)
            for lease in leases:
                if not lease.is_ending:
                    ledger.adopt_lease(lease)
            memory = None if reason is None else BegunEmpty(reason)
        pool = AttachedPool(ledger, signing_key, address, terms, memory_id=memory_id, memory=memory)
        pool.set_adapters(registration.adapters)
        self._pools[registration.pool] = pool
        for lease in leases:
            if lease.is_ending:
                self._pool_of_lease.pop(lease.lease_id, None)
        for tell in self.listeners(registration.pool):
            tell()
        self.journal.touch(registration.pool)
        return pool

    def _make_books(self, saved: SavedPool, now: float) -> Ledger:
        """Make empty books."""
        ledger = Ledger(
            saved.pool,
            saved.epoch,
            saved.geometry,
            policy=self._policy,
            verify=self._verify,
            listeners=self.listeners(saved.pool),
            directory=self._begin_state(saved),
            now=now,
        )
        ledger.keep_contents(self._keep_tokens)
        self._apply_shares(ledger)
        return ledger

    def recover(self, saved: SavedPool, directory: Path, *, now: float) -> None:
        """Restore a pool of a cachemgr that has ended, from its store. Raises OSError if the store can't be read."""
        ledger = Ledger.recover(
            saved.pool,
            saved.epoch,
            saved.geometry,
            directory=directory,
            now=now,
            verify=self._verify,
            listeners=self.listeners(saved.pool),
        )
        ledger.keep_contents(self._keep_tokens)
        pool = AttachedPool(ledger, saved.signing_key, saved.worker_address, saved.terms, is_attached=False)
        pool.memory_id = saved.memory_id
        pool.acknowledged_report = ledger.inspector.last_report
        self._pools[saved.pool] = pool
        self.journal.touch(saved.pool)
        self._pool_of_lease.update((lease.lease_id, saved.pool) for lease in ledger.inspector.leases())

    def open_lease(self, pool: AttachedPool, lease_id: str, *, ttl_s: float, now: float, tenant: str = "") -> None:
        """A new lease on a pool."""
        pool.ledger.open_lease(lease_id, ttl_s=ttl_s, now=now, tenant=tenant)
        self._pool_of_lease[lease_id] = pool.ledger.pool

    def lease_fenced(self, pool: AttachedPool, lease_id: str) -> None:
        """Removes a lease that the worker has fenced."""
        pool.ledger.lease_fenced(lease_id)
        if self._pool_of_lease.get(lease_id) == pool.ledger.pool:  # a worker reports on its own pool only
            del self._pool_of_lease[lease_id]


def why_empty(registration: Registration, known: AttachedPool | None) -> str | None:
    """Return why these books are not exactly those of the memory that the worker has kept; None if they are."""
    kept = registration.kept_memory
    if kept is None:
        return None
    if known is None:
        return "there are no books of the pool"
    if not registration.memory_id or known.memory_id != registration.memory_id:
        return f"the books are of memory {known.memory_id!r}, the worker has {registration.memory_id!r}"
    if known.ledger.epoch != kept.epoch:
        return f"the books are of epoch {known.ledger.epoch}, the memory of {kept.epoch}"
    if kept.attached_term not in known.terms:
        return f"another cachemgr, of term {kept.attached_term}, has ruled the epoch since"
    if known.is_contradicted:
        return "the worker's reports did not fit the books"
    if known.ledger.geometry != registration.geometry:
        return "the pool has another geometry or model"
    least, most = known.ledger.inspector.last_report, known.ledger.inspector.num_planned_steps
    if not least <= kept.num_accepted_steps <= most:
        steps = f"{kept.num_accepted_steps} steps ran on the memory"
        return f"{steps}; by the books {least} were reported and {most} planned"
    return None


def leases_from(ledger: Ledger, key: str, *, only: str = "") -> Iterator[tuple[str, Lease]]:
    """Leases with their page keys, by these, from one on; of `only` that id. They must not change meanwhile."""
    while page := ledger.inspector.leases_from(key, LEASES_AT_ONCE, only=only):
        yield from page
        key = page[-1][0] + "0"  # after this one and before any other


def term_over(registration: Registration, *, term: int, uptime_s: float, step: int) -> int:
    """A term above the worker's highest.

    Raises CallRefused (TERM_SUPERSEDED) unless this cachemgr started after the worker first obeyed its highest term:
    otherwise the cachemgr of that term may be the later one.
    """
    if uptime_s < registration.highest_term_age_s and registration.highest_term <= MAX_TERM - MAX_TERM_STEP:
        return registration.highest_term + step
    message = f"the worker has obeyed term {registration.highest_term}; this cachemgr's is {term}"
    raise CallRefused(refuse(Reason.TERM_SUPERSEDED, message, value=term, limit=registration.highest_term))
