"""The core, in Rust (`core/src`): the books of a pool of KV blocks.

Plans go in and come out as serialised messages. Token ids, sequence ids and counts of other calls go in as bytes, 4
each, little-endian.
"""

from pathlib import Path
from typing import final

from quire.cache.v1.cache_service_pb2 import PlanItem
from quire.cachemgr.errors import Refusal

POLICIES: list[str]
"""Eviction policies; the first is the default."""

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

NUM_CLASSES: int
NUM_TIMES: int
"""Sizes of what the default policy plans."""

def root_hash(tenant: str, salt: bytes, model_fingerprint: str) -> bytes:
    """The parent of a sequence's first block, 32 bytes. Each part is hashed with its length: no two splits collide."""

@final
class StepRequest:
    """A request for a step, decoded and checked."""

    def __new__(cls, body: bytes, *, max_sequences: int, max_tokens: int) -> StepRequest:
        """Of a serialised PlanStepRequest, for a pool with so many sequences, of so many tokens each.

        Raises CallRefused (INVALID_ARGUMENT) for lists that do not fit together, are too long, and for values out of
        range; ValueError for bytes that are no message.
        """

    @property
    def lease_id(self) -> str: ...
    @property
    def epoch(self) -> int: ...

@final
class Admission:
    """An admission that is asked about, decoded and checked."""

    def __new__(cls, body: bytes, most_tokens: int) -> Admission:
        """Of a serialised Admission, for pools whose sequences have at most `most_tokens`. Raises as StepRequest."""

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
class Books:
    """Which block of one pool belongs to whom, and which steps may still touch it.

    Raises BrokenInvariant where the books are wrong, CallRefused for a report that does not fit, KeyError for a lease
    that is not open here.
    """

    def __new__(
        cls,
        *,
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        max_sequences: int,
        max_sequence_tokens: int,
        vocab_size: int,
        model_fingerprint: str,
        policy: str,
        has_recurrent_state: bool = False,
        directory: Path | None = None,
    ) -> Books:
        """Empty books. Changes are written to a store in the directory, if one is given, before a call returns.

        A store that fails, now or later, is removed and done without; the log says so. Raises KeyError for an unknown
        policy.
        """

    @staticmethod
    def recover(directory: Path) -> Books:
        """The books that a store has, to go on with. Raises OSError if it can't be read, or is not whole."""

    def is_stored(self) -> bool:
        """Whether changes are written down; not any more once that has failed."""

    def last_report(self) -> int:
        """The number of the last report that was entered, 0 if none."""

    def leases(self) -> list[tuple[str, str, float, bool]]:
        """Id, tenant and time to live, in seconds, of each; and whether it has ended."""

    def open_lease(self, lease_id: str, tenant: str, ttl: float) -> None: ...
    def end_lease(self, lease_id: str) -> None:
        """Its blocks stay until it is closed."""

    def close_lease(self, lease_id: str) -> None: ...
    def plan(self, request: StepRequest, now: float) -> StepPlan:
        """Plans the lease's next step at a time, in seconds. With a request_id the answer is remembered.

        The request_id of one of the last eight answers gets the same answer. Raises CallRefused (TOO_MANY_STEPS,
        INVALID_ARGUMENT, REQUEST_ID_REUSED), KeyError for a lease that is not open here.
        """

    def settle(
        self,
        lease_id: str,
        step_number: int,
        outcome: str,
        *,
        seq_ids: bytes,
        token_counts: bytes,
        sampled_ids: bytes,
        sampled_tokens: bytes,
        report_number: int = 0,
    ) -> None: ...
    def steps_of(self, lease_id: str) -> tuple[int, int, int]:
        """The next step's number, the last settled one, and how many are in flight."""

    def in_flight(self, lease_id: str) -> list[StepView]: ...
    def num_sequences(self, lease_id: str) -> int: ...
    def sequence_ids(self, lease_id: str) -> list[int]:
        """As they were admitted."""

    def sequences_from(self, lease_id: str, first: int, most: int) -> list[SequenceView]:
        """By id, from `first` on."""

    def sequence(self, lease_id: str, seq_id: int) -> SequenceView | None: ...
    def tokens(self, lease_id: str, seq_id: int) -> bytes | None: ...
    def num_cached_tokens(self, tokens: bytes, salt: bytes, tenant: str) -> int: ...
    def block_counts(self) -> tuple[int, int, int, int]:
        """Free, cached, active and retired ones."""

    def host_block_counts(self) -> tuple[int, int, int]:
        """Free, held and retired blocks of the host tier."""

    def block(self, block_id: int) -> tuple[str, int, int, bytes | None]:
        """State, references, pins and prefix hash."""

    def set_shares(self, default: tuple[int, int, int, int], by_name: dict[str, tuple[int, int, int, int]]) -> None:
        """Floor, quota, limit and pin budget in blocks: of everybody, and of others by name."""

    def tenants(self) -> list[tuple[str, tuple[int, int, int, int], tuple[int, int, int, int]]]:
        """Name, share, and the blocks held, cached, reserved and pinned."""

    def check_admission(self, tenant: str, admission: Admission, reserve: int) -> tuple[int, int, int, Refusal | None]:
        """Tokens found, blocks needed and available, and why it would be refused."""

    def advance(self, now: float) -> bool:
        """Ends pins and advice whose time is over; `plan` does so too. False if there are none."""

    def next_end(self) -> float | None:
        """No pin and no advice ends before this; None if there is none that ends."""

    def pin_prefix(self, tenant: str, tokens: bytes, salt: bytes, until: float) -> PinView:
        """Raises CallRefused (PREFIX_NOT_CACHED, PIN_BUDGET_SPENT, QUOTA_EXCEEDED, OUT_OF_BLOCKS)."""

    def unpin_prefix(self, tenant: str | None, pin_id: bytes) -> bool:
        """Whether there was such a pin of the tenant, or of anybody."""

    def pins(self, tenant: str | None, behind: bytes | None, most: int) -> list[PinView]:
        """By id."""

    def list_blocks(
        self, first: int, most: int, *, state: str | None, tenant: str | None, lease_id: str | None
    ) -> tuple[bytes, int | None]:
        """Serialised blocks of a ListBlocksResponse from `first` on, and where the next page begins."""

    def snapshot(self, first: int, most: int, *, tenant: str | None, with_content: bool) -> tuple[bytes, int | None]:
        """The same of the blocks that are not free, as events of a WatchBlocksResponse."""

    def changes(self, first: int, most: int, *, tenant: str | None, with_content: bool) -> tuple[bytes, int] | None:
        """Serialised events: what changed from number `first` on, and the number to go on from; None after a gap."""

    def num_changes(self) -> int: ...
    def num_changes_kept(self) -> int: ...
    def begin_reading(self) -> None: ...
    def end_reading(self) -> None: ...
    def explain(self, tokens: bytes, salt: bytes, tenant: str, *, with_other_tenants: bool) -> Explanation: ...
    def reset_prefix_cache(self, first: int, end: int, now: float) -> int:
        """From the first block on it takes all pins back, too."""

    def refusals(self) -> dict[str, int]:
        """Items of plans that were refused, by the name of the reason."""

    def num_rows(self) -> int:
        """Rows taken in the worker: sequences that leases hold, and those released that steps in flight still run."""

    def num_held_tokens(self) -> int: ...
    def counters(self) -> list[tuple[str, int]]:
        """By name, as in LedgerStatistics."""

    def violations(self) -> list[str]: ...
    def audit(self, first: int, end: int) -> list[str]:
        """What is wrong with the blocks from `first` to before `end`."""

    def audit_counts(self) -> list[str]: ...
    def audit_promises(self) -> list[str]: ...
    def state(self, but_last_step_of: str | None = None) -> str:
        """All that a refusal leaves as it was; of one lease without its last step."""

    def parked_blocks(self) -> list[int]: ...
    def set_retention(self, plan: list[tuple[int, int, float]], is_trusted: bool) -> None:
        """Sets what the default policy plans: low and high place and share by class. For tests."""
