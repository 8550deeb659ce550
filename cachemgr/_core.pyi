"""The core, in Rust (`core/src`): the books of a pool of KV blocks.

Plans and reports go in as serialised messages, and plans come out as such. Token ids of other calls go in as bytes, 4
each, little-endian.
"""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import final

from quire.cache.v1.cache_service_pb2 import PlanItem
from quire.cachemgr.blocks import BlockShare
from quire.cachemgr.errors import Refusal
from quire.cachemgr.geometry import Geometry

POLICIES: list[str]
"""Eviction policies."""

DEFAULT_POLICY: str

LET_IN_S: float
"""When the loop was held, no lease ends within this time: renewals that wait are read first. Once for each renewal."""

MAX_STEPS_IN_FLIGHT: int
"""Steps a lease may have planned without their outcome being known."""

REMEMBERED_PLANS: int
"""Answers kept per lease for a repeated request_id."""

MAX_PLAN_ITEMS: int
"""Of each kind in one plan, also if the pool has room for more sequences."""

MAX_PLAN_TOKENS: int
"""Of all admissions of a plan together, and of all appended tokens: or as many as one sequence can have, if more."""

MAX_FORKED_TOKENS: int
"""The tokens that the children of a plan's forks begin with, all together; or as many as one sequence can have, if
more."""

MAX_REQUEST_ID_BYTES: int
MAX_SALT_BYTES: int

MAX_RANGES: int
"""Of an admission's retention."""

MAX_RETENTION_S: float
MAX_EXPECTED_S: float
LEAST_PRIORITY: int
MOST_PRIORITY: int

NUM_CLASSES: int
NUM_TIMES: int
"""Sizes of what the default policy plans."""

def root_hash(tenant: str, salt: bytes, model_fingerprint: str) -> bytes:
    """The parent of a sequence's first block, 32 bytes. Each part is hashed with its length: no two splits collide."""

@final
class Admission:
    """An admission that is asked about, decoded and checked."""

    def __new__(cls, body: bytes, most_tokens: int) -> Admission:
        """Of a serialised Admission, for pools whose sequences have at most `most_tokens`.

        Raises CallRefused (INVALID_ARGUMENT) for values out of range, ValueError for bytes that are no message.
        """

@final
class StepPlan:
    """What one step may touch and is to compute."""

    def encode_grant(self, pool: str, epoch: int, term: int, lease_id: str) -> bytes:
        """A serialised StepGrant."""

    def encode_answer(self) -> bytes:
        """A serialised PlanStepResponse, without its grant and its refusals."""

    @property
    def has_refusals(self) -> bool: ...
    @property
    def refusals(self) -> list[tuple[PlanItem.ValueType, int, Refusal]]:
        """Of each item that was refused: its kind, its sequence, and why."""

@final
class SequenceView:
    """A sequence as it was when it was asked for."""

    @property
    def seq_id(self) -> int: ...
    @property
    def tenant(self) -> str: ...
    @property
    def num_known(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def num_computed(self) -> int: ...
    @property
    def num_scheduled(self) -> int: ...
    @property
    def num_published(self) -> int: ...
    @property
    def num_promised(self) -> int: ...
    @property
    def sampled_position(self) -> int: ...
    @property
    def reserved_tokens(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_table(self) -> list[int]: ...
    @property
    def is_offloaded(self) -> bool: ...
    @property
    def host_blocks(self) -> list[int]: ...
    @property
    def cache_use(self) -> int: ...

@final
class Reset:
    """A reset of the prefix cache that was begun."""

@final
class Lease:
    """The right to hold blocks of one pool, as it was when it was asked for, and what it holds.

    A lease is open, then it has ended and waits for the worker's fence, then it is gone. It never opens again.
    """

    @property
    def lease_id(self) -> str: ...
    @property
    def pool(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def ttl_s(self) -> float: ...
    @property
    def expires_at(self) -> float: ...
    @property
    def was_let_in(self) -> bool:
        """It got LET_IN_S since its last renewal."""

    @property
    def is_ending(self) -> bool:
        """It has ended, and waits for the worker's fence."""

    @property
    def next_step(self) -> int: ...
    @property
    def settled_step(self) -> int:
        """The last step that was reported."""

    @property
    def num_in_flight(self) -> int: ...
    @property
    def num_sequences(self) -> int: ...

@final
class TenantUse:
    """A tenant's part of a pool, in blocks: its BlockShare, and what it uses."""

    @property
    def name(self) -> str: ...
    @property
    def floor(self) -> int: ...
    @property
    def quota(self) -> int: ...
    @property
    def limit(self) -> int: ...
    @property
    def pin_budget(self) -> int: ...
    @property
    def num_held(self) -> int: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def num_reserved(self) -> int: ...
    @property
    def num_pinned(self) -> int: ...

@final
class AdmissionCheck:
    """What would become of an admission."""

    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def num_needed(self) -> int:
        """Blocks that it would be handed out, now or later."""

    @property
    def num_available(self) -> int:
        """Blocks that the tenant could take."""

    @property
    def refusal(self) -> Refusal | None: ...

@final
class PinView:
    """A prefix that is kept."""

    @property
    def pin_id(self) -> bytes: ...
    @property
    def tenant(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def until(self) -> float: ...

@final
class Explanation:
    """Why a prefix is not found.

    `reason` is one of "none", "never_computed", "evicted", "reset", "being_computed", "other_salt", "other_tenant".
    """

    @property
    def num_blocks(self) -> int:
        """Full blocks of the tokens."""

    @property
    def num_found(self) -> int:
        """Of which so many leading ones are found."""

    @property
    def missing(self) -> bytes | None:
        """Prefix hash of the first that is not."""

    @property
    def reason(self) -> str: ...
    @property
    def lost_at(self) -> float | None:
        """When it was evicted or dropped, by the clock of `plan` and `reset_prefix_cache`."""

    @property
    def evicted_by(self) -> tuple[str, str] | None:
        """Whose allocation it made room for: the tenant, and the first 8 characters of the lease's id."""

    @property
    def num_stranded(self) -> int:
        """Blocks behind the missing one that are there."""

    @property
    def other_tenant(self) -> str | None: ...

@final
class StepView:
    """A step in flight as it was when it was asked for."""

    @property
    def step_number(self) -> int: ...
    @property
    def is_doomed(self) -> bool: ...
    @property
    def run_seq_ids(self) -> list[int]: ...
    @property
    def num_pinned(self) -> int: ...
    @property
    def num_fills(self) -> int: ...
    @property
    def num_released(self) -> int: ...

@final
class Ledger:
    """The books of one pool, from the attachment of an epoch to its end: leases, sequences, blocks, steps in flight.

    Single writer, no clock: every method is atomic, and time comes in as `now`, in seconds. Changes are written to a
    store before a call returns, if there is one. Raises BrokenInvariant where the books are wrong.
    """

    def __new__(
        cls,
        pool: str,
        epoch: int,
        geometry: Geometry,
        *,
        policy: str = ...,
        verify: bool = False,
        listeners: AbstractSet[Callable[[], None]] = ...,
        directory: Path | None = None,
    ) -> Ledger:
        """Empty books. `listeners` are called after every change; they must not call the ledger.

        Changes are written to a store in the directory, if one is given: empty, and existing. A store that fails, now
        or later, is removed and done without; the log says so. Raises KeyError for an unknown policy.
        """

    @staticmethod
    def recover(
        pool: str,
        epoch: int,
        geometry: Geometry,
        *,
        directory: Path,
        now: float,
        verify: bool = False,
        listeners: AbstractSet[Callable[[], None]] = ...,
    ) -> Ledger:
        """The books that a store has, to go on with. Open leases are renewed: nobody could do it meanwhile.

        Raises OSError if the store can't be read, is not whole, or breaks an invariant.
        """

    @property
    def pool(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def geometry(self) -> Geometry: ...
    @property
    def last_report(self) -> int:
        """The number of the last report that was entered, 0 if none."""

    # -- leases -------------------------------------------------------------------------------------------------------

    def open_lease(self, lease_id: str, *, ttl_s: float, now: float, tenant: str = "") -> Lease:
        """A new lease without sequences."""

    def adopt_lease(self, lease: Lease) -> None:
        """Takes over an open lease of an earlier epoch; its sequences are gone."""

    def lease(self, lease_id: str) -> Lease:
        """The open lease of this id. Raises CallRefused (LEASE_NOT_FOUND)."""

    def find_lease(self, lease_id: str) -> Lease | None:
        """The lease of this id, one that has ended included."""

    def tenant_of(self, lease_id: str) -> str | None:
        """Whose lease it is, one that has ended included; None if it is gone."""

    def leases(self) -> list[Lease]:
        """All leases, those that have ended included, by id."""

    def leases_from(self, key: str, most: int, *, only: str = "") -> list[tuple[str, Lease]]:
        """At most `most` leases from a page key on, by these, with their keys; of `only` that id.

        Page keys order leases in lists without giving their ids away: 24 hexadecimal digits. Cost: O(page).
        """

    def num_leases_by_tenant(self) -> dict[str, int]:
        """Leases of each tenant that has any, those that have ended included. Cost: O(leases)."""

    def renew_lease(self, lease_id: str, *, now: float) -> Lease:
        """Gives an open lease its whole time again; `plan` does so too. Raises CallRefused (LEASE_NOT_FOUND)."""

    def end_lease(self, lease_id: str) -> bool:
        """Stops a lease; its blocks come back with `lease_fenced`. False if it is not open."""

    def expire_leases(self, now: float) -> list[str]:
        """Stops the leases whose time is over and returns their ids: the worker has to fence them.

        Cost: O(log n) for each lease whose time, as it was when it was looked at last, is over.
        """

    def extend_leases(self, held_s: float, now: float) -> None:
        """Adds the time in which no renewal could be read to the time of every lease. Cost: O(leases)."""

    def next_expiry(self) -> float | None:
        """No lease runs out before this; None if there is none."""

    def lease_fenced(self, lease_id: str) -> None:
        """The worker will not touch the lease's blocks any more: all of them come back. No effect if it is gone."""

    # -- steps --------------------------------------------------------------------------------------------------------

    def plan(self, body: bytes, *, now: float, names_tenants: bool = False) -> StepPlan:
        """Plans the next step of a lease, as a serialised PlanStepRequest asks for it, and renews the lease.

        `names_tenants`: the caller may say whose an admission is. With a request_id the answer is remembered; the
        request_id of one of the last REMEMBERED_PLANS answers gets the same answer. Raises CallRefused
        (LEASE_NOT_FOUND, EPOCH_CHANGED, REQUEST_ID_REUSED, TOO_MANY_STEPS, INVALID_ARGUMENT) with nothing changed,
        ValueError for bytes that are no message.
        """

    def settle(self, body: bytes) -> None:
        """Enters the worker's report of a step, a serialised StepReport.

        A step that is settled already, or of a lease that is gone, has no effect. Raises CallRefused (INVALID_ARGUMENT)
        if the report does not fit what was planned, ValueError for bytes that are no message.
        """

    def steps_in_flight(self, lease_id: str) -> list[StepView]:
        """The steps of a lease that were planned and not reported. Raises KeyError if there is none of this id."""

    # -- tenants, and what is kept ------------------------------------------------------------------------------------

    def set_shares(self, default: BlockShare, by_name: dict[str, BlockShare]) -> None:
        """What tenants may take from now on: all of them, and others by name."""

    def tenants(self) -> list[TenantUse]:
        """The tenants that were seen or have a share of their own, by name."""

    def tenant_use(self, name: str) -> TenantUse | None:
        """The same of one of them."""

    def check_admission(self, tenant: str, admission: Admission, *, reserve: int = 0) -> AdmissionCheck:
        """What would become of an admission of the tenant now; takes nothing."""

    def pin_prefix(self, tokens: bytes, *, salt: bytes, tenant: str, ttl_s: float, now: float) -> PinView:
        """Keeps what is cached of a prefix from being evicted.

        Raises CallRefused (PREFIX_NOT_CACHED, PIN_BUDGET_SPENT, QUOTA_EXCEEDED, OUT_OF_BLOCKS).
        """

    def unpin_prefix(self, pin_id: bytes, *, tenant: str | None = None) -> bool:
        """Takes a pin of the tenant back, by default anybody's; False if there is none."""

    def pins(self, *, tenant: str | None = None, behind: bytes | None = None, most: int = 1_000) -> list[PinView]:
        """The pins behind one, by id: the tenant's, by default everybody's."""

    def advance(self, now: float) -> None:
        """Ends the pins and the advice whose time is over; `plan` does so too. Cost: O(1) if none has ended."""

    def next_end(self) -> float | None:
        """No pin and no advice ends before this; None if there is none that ends."""

    # -- looking ------------------------------------------------------------------------------------------------------

    def sequence(self, lease_id: str, seq_id: int) -> SequenceView | None:
        """A sequence of an open lease, or None. Raises CallRefused (LEASE_NOT_FOUND)."""

    def sequence_ids(self, lease_id: str) -> list[int]:
        """The sequences of a lease, one that has ended included, as they were admitted."""

    def sequences_from(self, lease_id: str, first: int, most: int, *, tenant: str | None = None) -> list[SequenceView]:
        """The first `most` of a lease's sequences with ids from `first` on, by id; of one tenant, if it is given.

        Cost: O(the lease's sequences).
        """

    def tokens(self, lease_id: str, seq_id: int) -> bytes | None:
        """All known tokens of a sequence, 4 bytes each; None if there is no such sequence."""

    def num_cached_tokens(self, tokens: bytes, *, salt: bytes, tenant: str = "") -> int:
        """Tokens that an admission would find in the cache; takes nothing."""

    def counts(self) -> bytes:
        """A serialised BlockCounts."""

    def statistics(self) -> bytes:
        """A serialised PoolStatistics. Cost: O(leases + sequences)."""

    def block(self, block_id: int) -> tuple[str, int, int, bytes | None]:
        """State, references, pins and prefix hash of a block."""

    def list_blocks(
        self, first: int, most: int, *, state: str | None, tenant: str | None, lease_id: str | None
    ) -> tuple[bytes, int | None]:
        """A page of at most `most` blocks from `first` on, by id, and where the next one begins; None at the end.

        The blocks are those of a ListBlocksResponse, serialised. Fewer than `most` come with a next page where those
        that are listed are rare. Filters: a state, a tenant (whose no free block is), the tables of a lease; None lets
        everything through. Cost: O(page + 65,536), and of a lease its table entries.
        """

    def snapshot(self, first: int, most: int, *, tenant: str | None, with_content: bool) -> tuple[bytes, int | None]:
        """The same of all blocks that are not free, as events of a WatchBlocksResponse."""

    def changes(self, first: int, most: int, *, tenant: str | None, with_content: bool) -> tuple[bytes, int] | None:
        """What changed from number `first` on, of at most `most` blocks, and the number to go on from.

        Events of a WatchBlocksResponse, serialised: the blocks as they are now; to a tenant, those that are not its own
        any more are free. None if what came next is not known any more: `num_changes_kept` changes are.
        """

    def num_changes(self) -> int:
        """Changes of blocks in this epoch."""

    def num_changes_kept(self) -> int: ...
    def keep_contents(self, are_kept: bool) -> None:
        """Keeps tokens and salts of the blocks that become findable from now on, or of none. New books keep them."""

    def contents_are_kept(self) -> bool: ...
    def explain(self, tokens: bytes, *, salt: bytes, tenant: str, with_other_tenants: bool) -> Explanation:
        """Why an admission would not find more in the cache; takes nothing. Cost: about that of a lookup."""

    def parked_blocks(self) -> list[int]:
        """The cached blocks as the eviction policy keeps them."""

    def reset_prefix_cache(self, first: int = 0, end: int | None = None, *, now: float = 0.0) -> int:
        """Makes the blocks from `first` to before `end` unfindable, all of them by default; returns how many were.

        From the first block on it takes all pins back, too.
        """

    def begin_reset(self, tenant: str, *, salt: bytes | None = None, tokens: bytes = b"") -> Reset:
        """Begins a reset of a tenant's content: all of it, what is under a salt, or what begins with tokens under it.

        Only the full blocks of the tokens count. Sequences in the host tier do not publish what is computed of them.
        """

    def go_on_with_reset(self, reset: Reset, *, now: float = 0.0) -> tuple[int, int] | None:
        """Drops the next part: how many blocks and pins. None if all is done."""

    def num_pins(self) -> int:
        """Pins of all tenants."""

    # -- checking -----------------------------------------------------------------------------------------------------

    def violations(self) -> list[str]:
        """What is wrong with the books (I1 to I4), one sentence each. Cost: O(blocks + table entries)."""

    def audit(self, first: int, end: int) -> list[str]:
        """The same of the blocks from `first` to before `end`. Cost: O(these + table entries + free blocks)."""

    def audit_counts(self) -> list[str]:
        """What is wrong with the counts. Cost: O(blocks), about a millisecond for a million."""

    def audit_promises(self) -> list[str]:
        """What is wrong with tenants' accounts, pins and reservations. Cost: likewise."""

    def num_rows(self) -> int:
        """Rows taken in the worker: sequences that leases hold, and those released that steps in flight still run."""

    def state(self, but_last_step_of: str | None = None) -> str:
        """All that a refusal leaves as it was; of one lease without its last step."""

    def set_retention(self, plan: list[tuple[int, int, float]], is_trusted: bool) -> None:
        """Sets what the default policy plans: low and high place and share by class. For tests."""
