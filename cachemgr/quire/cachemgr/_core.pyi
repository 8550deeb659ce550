"""The core, in Rust (`core/src`): the books of a pool of KV blocks.

Plans and reports are serialised messages, and so are the answers to plans. Token ids of other calls are bytes, 4
each, little-endian.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import final

from quire.cache.v1.cache_service_pb2 import PlanItem
from quire.cachemgr.blocks import BlockShare
from quire.cachemgr.errors import Refusal
from quire.cachemgr.eviction_interface import EvictionPolicy
from quire.cachemgr.geometry import Geometry

POLICIES: list[str]
"""Eviction policies."""

DEFAULT_POLICY: str

class WrongVictims(ValueError):
    """An eviction policy in Python returned other blocks than `evict` must return."""

GRACE_S: float
"""The time that a held event loop gives every lease: pending renewals are read before it ends. Once for each renewal.
"""

MAX_STEPS_IN_FLIGHT: int
"""The limit of a lease's planned steps without a reported outcome."""

REMEMBERED_PLANS: int
"""Answers kept per lease for a repeated request_id."""

MAX_LAYER_GROUPS: int
"""Layer groups of a pool."""
MAX_PLAN_ITEMS: int
"""Items of each kind in one plan, also if the pool has room for more sequences."""

MAX_PLAN_TOKENS: int
"""Tokens of all admissions of a plan together, and of all appended tokens; the longest sequence's length if more."""

MAX_FORKED_TOKENS: int
"""Tokens that the children of a plan's forks begin with, all together; the longest sequence's length if more."""

MAX_REQUEST_ID_BYTES: int
MAX_SALT_BYTES: int
ADAPTER_BYTES: int

MAX_RANGES: int
"""Ranges of an admission's retention."""

MAX_BREAKPOINTS: int
"""Of an admission."""
LEAST_KEEP_S: float
"""Seconds for which a breakpoint keeps."""
MAX_KEEP_S: float
MAX_RETENTION_S: float
MAX_EXPECTED_S: float
LEAST_PRIORITY: int
MOST_PRIORITY: int

NUM_CANDIDATES: int
"""Number of times that the default policy plans with."""

def longest_sequence(geometry: Geometry) -> int:
    """The longest sequence of a pool, in tokens."""

def answer_on_stream(answer: bytes) -> bytes:
    """A serialised PlanStepsResponse with a serialised PlanStepResponse."""

def root_hash(tenant: str, salt: bytes, model_fingerprint: str, adapter: bytes = b"") -> bytes:
    """The parent of a sequence's first block, 32 bytes. Each part is hashed with its length: no two splits collide."""

@final
class Admission:
    """A decoded and checked admission of a request."""

    def __new__(cls, body: bytes, most_tokens: int) -> Admission:
        """Decodes a serialised Admission, for pools with sequences of at most `most_tokens`.

        Raises CallRefused (INVALID_ARGUMENT) for values out of range, ValueError for bytes that are no message.
        """

@final
class PlanRequest:
    """A decoded request for a step. Its items are checked when it is planned."""

    def __new__(cls, body: bytes) -> PlanRequest:
        """Decodes a serialised PlanStepRequest. Raises ValueError for bytes that are no message."""

    @staticmethod
    def on_stream(body: bytes) -> PlanRequest:
        """Decodes a serialised PlanStepsRequest. Raises ValueError for bytes that are no message."""

    @property
    def lease_id(self) -> str: ...
    @property
    def has_admissions(self) -> bool:
        """True if it has admissions or restores."""

@final
class StepReport:
    """A decoded report of a step. It is checked when it is settled."""

    def __new__(cls, body: bytes) -> StepReport:
        """Decodes a serialised StepReport. Raises ValueError for bytes that are no message."""

    @staticmethod
    def on_stream(body: bytes) -> StepReport | None:
        """Decodes the report in a serialised AttachPoolRequest; None if that is something else.

        Raises ValueError for bytes that are no message.
        """

    @property
    def report_number(self) -> int: ...

@final
class GrantedStep:
    """The blocks that one step may access, and its computations."""

    def encode_grant(self, pool: str, epoch: int, term: int, lease_id: str) -> bytes:
        """A serialised StepGrant."""

    def encode_answer(self, *, wall_clock_offset_s: float = 0.0) -> bytes:
        """A serialised PlanStepResponse, without its grant and its refusals."""

    def encode_signed(
        self,
        pool: str,
        epoch: int,
        term: int,
        lease_id: str,
        signing_key: bytes,
        *,
        wall_clock_offset_s: float = 0.0,
    ) -> bytes:
        """A serialised PlanStepResponse with its grant and the grant's HMAC-SHA256, without its refusals."""

    @property
    def has_refusals(self) -> bool: ...
    @property
    def refusals(self) -> list[tuple[PlanItem.ValueType, int, Refusal]]:
        """For each refused item: its kind, its sequence, and the refusal."""

@final
class SequenceView:
    """A sequence at the time of the call."""

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
    def num_drafts(self) -> int: ...
    @property
    def sampled_position(self) -> int: ...
    @property
    def reserved_tokens(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_table(self) -> list[int]:
        """Its blocks, group by group."""

    @property
    def tables(self) -> list[tuple[int, int]]:
        """By layer group: the entries that were let go, and the blocks; in the host tier, if it is offloaded."""

    @property
    def has_groups(self) -> bool:
        """True if the pool has several layer groups, or one with a window."""

    @property
    def is_offloaded(self) -> bool: ...
    @property
    def host_blocks(self) -> list[int]: ...
    @property
    def cache_use(self) -> int: ...

@final
class Reset:
    """A reset of the prefix cache in progress."""

@final
class Known:
    """The changes of a pool's blocks that a reader knows: all before a number, and of some blocks later ones."""

    def __init__(self, number: int) -> None: ...
    @property
    def number(self) -> int:
        """The number of the first change that the reader may not know."""

@final
class Lease:
    """The right to hold blocks of one pool, with the state at the time of the call.

    A lease is open; then it has ended and waits for the worker's fence; then it is removed. It never opens again.
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
    def had_grace(self) -> bool:
        """True if it got GRACE_S since its last renewal."""

    @property
    def is_ending(self) -> bool:
        """True if it has ended and waits for the worker's fence."""

    @property
    def next_step(self) -> int: ...
    @property
    def settled_step(self) -> int:
        """The last reported step."""

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
    @property
    def keep_limit(self) -> int: ...
    @property
    def num_kept(self) -> int: ...
    @property
    def next_keep_end_s(self) -> float | None:
        """When the next of its kept blocks ends, by the clock of `plan`."""

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of its admitted prompts that were found, in the epoch."""

    @property
    def num_written_tokens(self) -> int:
        """Tokens of its admitted prompts that were computed in full blocks and published."""

    @property
    def num_admitted_tokens(self) -> int:
        """Tokens of its admitted prompts."""

@final
class AdmissionCheck:
    """The result that an admission would have."""

    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def num_needed(self) -> int:
        """Blocks that it would be allocated, now or later."""

    @property
    def num_available(self) -> int:
        """Blocks that the tenant could take."""

    @property
    def refusal(self) -> Refusal | None: ...

@final
class PinView:
    """A pinned prefix."""

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
    """The reason why a prefix is not found.

    `reason` is one of "none", "never_computed", "evicted", "reset", "being_computed", "other_salt",
    "other_adapter", "other_tenant", "window_evicted".
    """

    @property
    def num_blocks(self) -> int:
        """Full blocks of the tokens."""

    @property
    def num_found(self) -> int:
        """Number of leading blocks that are found."""

    @property
    def num_in_host(self) -> int:
        """Of these, the ones behind the pool's, which are in the host tier."""

    @property
    def num_on_disk(self) -> int:
        """Behind these, the ones on the disk."""

    @property
    def missing(self) -> tuple[int, int, bytes] | None:
        """Index, layer group and prefix hash of the block without which no more is found."""

    @property
    def reason(self) -> str: ...
    @property
    def lost_at(self) -> float | None:
        """The time of its eviction or reset, by the clock of `plan` and `reset_prefix_cache`."""

    @property
    def evicted_by(self) -> tuple[str, str] | None:
        """The tenant of the allocation that evicted it, and the first 8 characters of the lease's id."""

    @property
    def num_stranded(self) -> int:
        """Cached blocks after the missing one."""

    @property
    def other_tenant(self) -> str | None: ...
    @property
    def reset_by(self) -> str | None:
        """The name of the caller that reset it, if that is known."""

@final
class StepView:
    """A step in flight at the time of the call."""

    @property
    def step_number(self) -> int: ...
    @property
    def is_doomed(self) -> bool: ...
    @property
    def run_seq_ids(self) -> list[int]: ...
    @property
    def num_held(self) -> int: ...
    @property
    def num_fills(self) -> int: ...
    @property
    def num_released(self) -> int: ...

@final
class Ledger:
    """The books of one pool, from the attachment of an epoch to its end: leases, sequences, blocks, steps in flight.

    Single writer, no clock: every method is atomic, and time is an argument `now`, in seconds. Changes are written to
    a store, if there is one, before a call returns. Raises BrokenInvariant if an invariant does not hold.
    """

    def __new__(
        cls,
        pool: str,
        epoch: int,
        geometry: Geometry,
        *,
        policy: str | EvictionPolicy = ...,
        verify: bool = False,
        listeners: Iterable[Callable[[], None]] = ...,
        directory: Path | None = None,
        now: float = 0.0,
    ) -> Ledger:
        """Empty books of an epoch that begins now. `listeners` are called after every change; they must not call the
        ledger.

        With a directory, which must exist and be empty, changes are written to a store there. A store that fails, now
        or later, is removed and logged, and the books continue without it. Raises KeyError for an unknown policy, and
        ValueError for a directory with a policy that is an object.
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
        listeners: Iterable[Callable[[], None]] = ...,
    ) -> Ledger:
        """Reads the books of a store, to continue with them. Renews open leases, since no client could renew them
        meanwhile.

        Raises OSError if the store can't be read, is incomplete, or breaks an invariant.
        """

    @property
    def pool(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def geometry(self) -> Geometry: ...
    @property
    def began_at(self) -> float:
        """When the epoch began, by the clock of `plan`."""

    @property
    def inspector(self) -> Inspector:
        """The views of the books that change nothing."""

    @property
    def probe(self) -> Probe:
        """The further views that tests and benchmarks read."""

    def begin_epoch(
        self, epoch: int, *, whole_blocks: bytes, now: float, directory: Path | None = None
    ) -> tuple[int, int]:
        """Goes on in a new epoch, on memory that outlived its worker: findable blocks stay findable, all else is free.

        `whole_blocks` has a bit for each block, the lowest bit of the first byte for block 0; blocks without one lose
        their content. Open leases stay, without their sequences; ended ones are removed. Changes are written to a
        directory, if one is given. Returns the numbers of blocks that are kept and dropped.
        """

    # -- leases -------------------------------------------------------------------------------------------------------

    def open_lease(self, lease_id: str, *, ttl_s: float, now: float, tenant: str = "") -> Lease:
        """A new lease without sequences."""

    def adopt_lease(self, lease: Lease) -> None:
        """Adopts an open lease of an earlier epoch; its sequences are lost."""

    def renew_lease(self, lease_id: str, *, now: float) -> Lease:
        """Renews an open lease for its ttl; `plan` does so, too. Raises CallRefused (LEASE_NOT_FOUND)."""

    def end_lease(self, lease_id: str) -> bool:
        """Stops a lease; `lease_fenced` frees its blocks. False if it is not open."""

    def expire_leases(self, now: float) -> list[str]:
        """Stops the expired leases and returns their ids: the worker has to fence them.

        Cost: O(log n) for each lease that was due at its last check.
        """

    def extend_leases(self, held_s: float, now: float) -> None:
        """Adds the time in which no renewal could be read to the ttl of every lease. Cost: O(leases)."""

    def lease_fenced(self, lease_id: str) -> None:
        """Frees all blocks of a fenced lease. No effect if the lease is removed already."""

    # -- steps --------------------------------------------------------------------------------------------------------

    def hash_part(self, request: PlanRequest, *, names_tenants: bool = False) -> bool:
        """Computes a part of the hashes of a request's prompts, if they are many. Changes nothing.

        True if this is to be called again before the request is planned, which computes the others. Cost: 0.15 ms.
        """

    def plan(self, request: PlanRequest, *, now: float, names_tenants: bool = False) -> GrantedStep:
        """Plans the next step of a lease, and renews the lease. A request is planned once.

        `names_tenants`: the caller may name the tenant of an admission. With a request_id the answer is kept; the
        request_id of one of the last REMEMBERED_PLANS answers gets the same answer. Raises CallRefused
        (LEASE_NOT_FOUND, EPOCH_CHANGED, REQUEST_ID_REUSED, TOO_MANY_STEPS, INVALID_ARGUMENT) with nothing changed,
        ValueError for a request that was planned before.
        """

    def settle(self, report: StepReport) -> None:
        """Enters the worker's report of a step.

        A step that is settled already, or of a lease that is removed, has no effect. Raises CallRefused
        (INVALID_ARGUMENT) if the report does not fit the plan.
        """

    # -- the disk -----------------------------------------------------------------------------------------------------

    def disk_orders(self, after: int) -> bytes | None:
        """A serialised DiskOrders with the orders behind a number that are not reported; None if there is none."""

    @property
    def last_disk_order(self) -> int:
        """The number of the last order about the disk."""

    @property
    def num_erasing(self) -> int:
        """Orders to erase content from the disk that are not reported."""

    @property
    def erasing(self) -> list[str | None]:
        """The tenants with content that is to be erased from the disk, also of orders that have failed; None: all."""

    def go_on_erasing(self, tenants: list[str | None]) -> None:
        """Has content erased from the disk that was still to be erased in the epoch before."""

    def enter_disk_report(self, body: bytes) -> None:
        """Enters a serialised DiskReport. Raises CallRefused (INVALID_ARGUMENT)."""

    def enter_disk_content(self, body: bytes) -> None:
        """Enters a serialised DiskContent. Raises CallRefused (INVALID_ARGUMENT)."""

    # -- tenants, and what is kept ------------------------------------------------------------------------------------

    def set_shares(self, default: BlockShare, by_name: dict[str, BlockShare]) -> None:
        """Sets the tenants' shares: a default, and others by name."""

    def check_admission(self, tenant: str, admission: Admission, *, reserve: int = 0) -> AdmissionCheck:
        """The result that an admission of the tenant would have now; takes nothing."""

    def pin_prefix(
        self, tokens: bytes, *, salt: bytes, tenant: str, ttl_s: float, now: float, adapter: bytes = b""
    ) -> PinView:
        """Keeps the cached blocks of a prefix from eviction.

        Raises CallRefused (PREFIX_NOT_CACHED, PIN_BUDGET_SPENT, QUOTA_EXCEEDED, OUT_OF_BLOCKS).
        """

    def unpin_prefix(self, pin_id: bytes, *, tenant: str | None = None) -> bool:
        """Removes a pin of the tenant, by default of any tenant; False if there is none."""

    def advance(self, now: float) -> None:
        """Ends expired pins and advice; `plan` does so, too. Cost: O(1) if none has ended."""

    def set_adapters(self, adapters: list[tuple[bytes, str]] | None) -> None:
        """Sets the adapters that admissions may have: identities and names. None: any."""

    def check_adapter(self, tenant: str, adapter: bytes, field: str) -> None:
        """Refuses an adapter that a plan would refuse the tenant; `field` is the adapter's in the request.

        Raises CallRefused (INVALID_ARGUMENT).
        """

    def set_adapter_rights(self, default: Set[str] | None, by_name: Mapping[str, Set[str] | None]) -> None:
        """Sets the names of the adapters that tenants may use: a default, and others by tenant. None: all adapters."""

    def keep_contents(self, are_kept: bool) -> None:
        """Keeps tokens, salts and adapters of blocks that become findable from now on, or none. New books keep them."""

    def reset_prefix_cache(self, first: int = 0, end: int | None = None, *, now: float = 0.0, by: str = "") -> int:
        """Removes the blocks from `first` to before `end` from the index, all by default; returns their number.

        From the first block on it ends all pins, too.
        """

    def begin_reset(
        self, tenant: str, *, salt: bytes | None = None, adapter: bytes = b"", tokens: bytes = b""
    ) -> Reset:
        """Begins a reset of a tenant's content: all, the content under a salt, or that which begins with tokens under
        it.

        Only the full blocks of the tokens count. Sequences in the host tier will not publish their computed blocks.
        """

    def go_on_with_reset(self, reset: Reset, *, now: float = 0.0, by: str = "") -> tuple[int, int] | None:
        """Drops the next part: returns the numbers of blocks and pins. None if all is done."""

@final
class Inspector:
    """The listings, lookups, statistics and audits of a ledger. Changes nothing."""

    @property
    def last_report(self) -> int:
        """The number of the last entered report, 0 if none."""

    @property
    def num_planned_steps(self) -> int:
        """Steps that were planned in the epoch."""

    def lease(self, lease_id: str) -> Lease:
        """The open lease of this id. Raises CallRefused (LEASE_NOT_FOUND)."""

    def find_lease(self, lease_id: str) -> Lease | None:
        """The lease of this id, one that has ended included."""

    def tenant_of(self, lease_id: str) -> str | None:
        """The tenant of a lease, one that has ended included; None if the lease is removed."""

    def leases(self) -> list[Lease]:
        """All leases, those that have ended included, by id."""

    def leases_from(self, key: str, most: int, *, only: str = "") -> list[tuple[str, Lease]]:
        """At most `most` leases from a page key on, in the order of page keys, with them; with `only`, only that id.

        Page keys order leases in lists without disclosing their ids: 24 hexadecimal digits. Cost: O(page).
        """

    def num_leases_by_tenant(self) -> dict[str, int]:
        """Leases of each tenant that has any, those that have ended included. Cost: O(leases)."""

    def next_expiry(self) -> float | None:
        """A time before which no lease expires; None if there is none."""

    def next_end(self) -> float | None:
        """A time before which no pin and no advice ends; None if there is none."""

    def sequence(self, lease_id: str, seq_id: int) -> SequenceView | None:
        """A sequence of an open lease, or None. Raises CallRefused (LEASE_NOT_FOUND)."""

    def sequences_from(self, lease_id: str, first: int, most: int, *, tenant: str | None = None) -> list[SequenceView]:
        """The first `most` of a lease's sequences with ids from `first` on, by id; of one tenant, if it is given.

        Cost: O(the lease's sequences).
        """

    def num_cached_tokens(self, tokens: bytes, *, salt: bytes, tenant: str = "", adapter: bytes = b"") -> int:
        """Tokens that an admission would find in the cache; takes nothing."""

    def cached_tokens(
        self, tokens: bytes, *, salt: bytes, tenant: str = "", adapter: bytes = b""
    ) -> tuple[int, int, int]:
        """The same in the pool, behind that in the host tier, and behind that on the disk."""

    def counts(self) -> bytes:
        """A serialised BlockCounts."""

    def tenants(self) -> list[TenantUse]:
        """The tenants that were named or have a share of their own, by name."""

    def num_tenants_at_keep_limit(self) -> int:
        """Tenants that keep as many blocks as they may, and more than none."""

    def tenant_use(self, name: str) -> TenantUse | None:
        """One tenant's use."""

    def pins(self, *, tenant: str | None = None, behind: bytes | None = None, most: int = 1_000) -> list[PinView]:
        """The pins after a given one, by id: the tenant's, by default every tenant's."""

    def num_pins(self) -> int:
        """Pins of all tenants."""

    def list_blocks(
        self, first: int, most: int, *, state: str | None, tenant: str | None, lease_id: str | None
    ) -> tuple[bytes, int | None]:
        """A page of at most `most` blocks from `first` on, by id, and the first block of the next one; None at the
        end.

        The blocks are those of a ListBlocksResponse, serialised. A page can have fewer than `most` and a next page if
        few blocks match. Filters: a state, a tenant (free blocks have none), the tables of a lease; None: no filter.
        Cost: O(page + 65,536), and for a lease its table entries.
        """

    def snapshot(
        self,
        first: int,
        most: int,
        known: Known | None = None,
        *,
        tenant: str | None,
        with_content: bool,
        medium: str = "device",
    ) -> tuple[bytes, int | None]:
        """A page as `list_blocks`, of all blocks that are not free, as events of a WatchBlocksResponse.

        A reader's `known` has their present state then. With the medium "host" or "disk": the copies there, which have
        no content, and a `known` of their own.
        """

    def changes(
        self, known: Known, most: int, *, tenant: str | None, with_content: bool, medium: str = "device"
    ) -> bytes | None:
        """The next changes that are not in `known`, of at most `most` blocks. They are in it then.

        Events of a WatchBlocksResponse, serialised: the blocks in their present state; a tenant sees blocks that it
        has lost as free. None if the next change is not kept any more: `num_changes_kept` changes are. A medium as in
        `snapshot`.
        """

    def num_changes(self, medium: str = "device") -> int:
        """Changes of blocks, or of the copies in a tier, in this epoch."""

    def num_changes_kept(self, medium: str = "device") -> int:
        """0 if the pool has no copies there."""

    def contents_are_kept(self) -> bool: ...
    def explain(
        self, tokens: bytes, *, salt: bytes, tenant: str, with_other_tenants: bool, adapter: bytes = b""
    ) -> Explanation:
        """Explains why an admission would find no more in the cache; takes nothing. Cost: about that of a lookup."""

    def statistics(self) -> bytes:
        """A serialised PoolStatistics. Cost: O(leases + sequences)."""

    def audit(self, first: int, end: int) -> list[str]:
        """The violations in the blocks from `first` to before `end`. Cost: O(these + table entries + free blocks)."""

    def audit_counts(self) -> list[str]:
        """The violations in the counts. Cost: O(blocks), about a millisecond for a million."""

    def audit_promises(self) -> list[str]:
        """The violations in tenants' accounts, pins and reservations. Cost: as `audit_counts`."""

@final
class Probe:
    """The internals of a ledger, for tests and benchmarks."""

    def steps_in_flight(self, lease_id: str) -> list[StepView]:
        """The planned steps of a lease without a report. Raises KeyError if there is no such lease."""

    def sequence_ids(self, lease_id: str) -> list[int]:
        """The sequences of a lease, one that has ended included, in the order of admission."""

    def tokens(self, lease_id: str, seq_id: int) -> bytes | None:
        """All known tokens of a sequence, 4 bytes each; None if there is no such sequence."""

    def block(self, block_id: int) -> tuple[str, int, int, bytes | None]:
        """State, references, pins and prefix hash of a block."""

    def host_copies(self) -> list[tuple[int, bytes, int, str, bool]]:
        """The copies of evicted blocks: host block, prefix hash, layer group, tenant, and if a step copies to it."""

    def disk_copies(self) -> list[tuple[int, bytes, int, str, bool]]:
        """The copies on the disk: disk block, prefix hash, layer group, tenant, and if it is being written."""

    def num_rows(self) -> int:
        """Rows taken in the worker: sequences that leases hold, and those released that steps in flight still run."""

    def violations(self) -> list[str]:
        """All violations in the books (I1 to I4), one sentence each. Cost: O(blocks + table entries)."""

    def state(self, but_last_step_of: str | None = None) -> str:
        """The state that a refusal leaves unchanged; `but_last_step_of`: without the last step of this lease."""

    def parked_blocks(self) -> list[int]:
        """The cached blocks in the eviction policy's order."""

    def kept_blocks(self, tenant: str) -> list[tuple[int, int, int]]:
        """The blocks that breakpoints keep for a tenant, the least recently used first: block, end, and time from a use
        to it, in milliseconds."""

    def follow(self, candidate: int) -> None:
        """Lets the default policy follow a candidate until it chooses one itself. For tests."""
