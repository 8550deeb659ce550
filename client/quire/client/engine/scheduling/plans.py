"""Values of the scheduler: its limits, a plan, cachemgr's answer, the step in flight, and its results. Pure.

Plan           the question: the items that the scheduler asks for
GrantedStep    the answer: the runs of the next step, and the items that were refused
StepInFlight   the step until its tokens or its failure come
StepTokens, Failed   its results
"""

from collections import abc
from dataclasses import dataclass, field, fields
from enum import Enum
from types import MappingProxyType

from quire.client.engine.caching import NO_CACHE_PARAMS, CacheOutcome, CacheParams
from quire.client.engine.scheduling.layer_groups import BlockTables, LayerGroup
from quire.client.engine.scheduling.sequence import FinishReason, Sequence
from quire.client.engine.scheduling.tier import HostCopyUse
from quire.client.errors import InvalidRequest, QuireError

# One in so many of a step's tokens is reserved for prompts.
_PROMPT_SHARE = 4
DEFAULT_EXPECTED_PROMPTS = 8
"""As measured: docs/reference/eviction.md, queued prompts."""
_MAY_BE_ZERO = frozenset(
    {"num_host_blocks", "block_bytes", "has_recurrent_state", "max_expected_prompts", "max_draft_count"}
)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The limits of the scheduler.

    max_step_tokens          tokens one step may compute
    max_running_sequences    sequences that hold blocks at once
    block_size               tokens per block
    num_blocks               blocks of the pool that can be owned: without the null block
    max_sequence_tokens      the model's context
    vocabulary_size          token ids are below this
    max_step_failures        a request fails when this many steps it was alone in have failed
    max_expected_prompts     prompts at the head of the queue that cachemgr is told of. One further back would find more
                             if it were named later, because those before it may compute what it finds
    max_stalls               plans in a row without a run before the only running sequence is preempted
    num_host_blocks          blocks of the host tier; 0: there is none
    block_bytes              bytes that a copy of a block moves
    max_draft_count          drafts of a sequence in a step; 0: none
    max_sampled_tokens       tokens that a step samples: one of each sequence, and one behind each draft; None: any
    has_recurrent_state      the model keeps a state per sequence: no prefix is shared, and no beam can be forked again
    layer_groups             the groups of layers with a block table each; none: one full group
    tables                   the blocks of a sequence, by these groups
    """

    max_step_tokens: int
    max_running_sequences: int
    block_size: int
    num_blocks: int
    max_sequence_tokens: int
    vocabulary_size: int
    max_step_failures: int = 3
    max_expected_prompts: int = DEFAULT_EXPECTED_PROMPTS
    max_stalls: int = 20
    num_host_blocks: int = 0
    block_bytes: int = 0
    max_draft_count: int = 0
    max_sampled_tokens: int | None = None
    has_recurrent_state: bool = False
    layer_groups: tuple[LayerGroup, ...] = ()
    tables: BlockTables = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self) if f.name not in ("layer_groups", "tables")):
            least, value = 0 if name in _MAY_BE_ZERO else 1, getattr(self, name)
            if value is not None and value < least:
                raise InvalidRequest.of_field(name, value, f"at least {least}")
        object.__setattr__(self, "tables", BlockTables(self.block_size, self.layer_groups))

    @property
    def bytes_of_all_layers(self) -> int:
        """Bytes that copies of a block's tokens move at most: those of a block of each layer group."""
        return self.block_bytes * max(1, len(self.layer_groups))

    @property
    def num_places(self) -> int:
        """Sequences that may run at once: all of them may decode, and prompts still get their share of a step."""
        return min(self.max_running_sequences, self.max_decode_tokens)

    @property
    def max_decode_tokens(self) -> int:
        """Tokens of a step that are not kept for prompts: a token of each sequence that decodes, and their drafts."""
        computed = self.max_step_tokens - self.max_step_tokens // _PROMPT_SHARE
        return computed if self.max_sampled_tokens is None else min(computed, self.max_sampled_tokens)

    @property
    def max_tokens_per_sequence(self) -> int:
        """The most tokens a sequence can have: of the model or of the whole pool, whichever is less."""
        in_pool = self.tables.max_tokens(self.num_blocks, at_most=self.max_sequence_tokens)
        return min(self.max_sequence_tokens, in_pool)


class PlanItem(Enum):
    """The kind of an item of a plan."""

    OFFLOAD = "offload"
    TRIM = "trim"
    FORK = "fork"
    EXTEND = "extend"
    RESTORE = "restore"
    ADMISSION = "admission"


@dataclass(frozen=True, slots=True)
class Fork:
    """Children that begin with the parent's first num_tokens tokens."""

    parent_id: int
    child_ids: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that begins with tokens."""

    seq_id: int
    token_ids: abc.Sequence[int]
    resumed: bool = False
    """The prompt was in a pool before, and does not count again: it was preempted or lost, or has several samples."""
    waits_for_prefix: bool = False
    """It is refused while another client computes the next block that it needs."""
    cache: CacheParams = NO_CACHE_PARAMS
    reserved_tokens: int = 0
    """The most tokens that are computed of it, guaranteed; 0: best effort."""
    tenant: str = ""
    """The tenant of the sequence; "": the lease's."""


@dataclass(frozen=True, slots=True)
class ExpectedPrompt:
    """A prompt that waits in the queue: the blocks that it would find now are evicted last."""

    token_ids: abc.Sequence[int]
    salt: bytes
    adapter: bytes
    tenant: str
    """The tenant of the sequence; "": the lease's."""
    expected_in_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The request for the next step. extend_ids and extend_counts are parallel; sequences maps ids to sequences.

    trims       tokens to keep, by id
    appended    tokens that the engine chose, by the id of a sequence that is extended
    drafts      of sequences that are extended, by id: extend_counts has them too
    num_batched    the first so many of extend_ids are the whole batch of decodes (decode_batch.py); 0: none are
    """

    release_ids: tuple[int, ...] = ()
    expected_back_s: abc.Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """The seconds until the tokens of released sequences are needed again, if known; math.inf: never."""
    offload_ids: tuple[int, ...] = ()
    expected: abc.Mapping[Sequence, ExpectedPrompt] = field(default_factory=lambda: MappingProxyType({}))
    """The prompts of sequences that stay at the head of the queue, in its order, that cachemgr does not know of."""
    trims: abc.Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    forks: tuple[Fork, ...] = ()
    extend_ids: tuple[int, ...] = ()
    extend_counts: tuple[int, ...] = ()
    appended: abc.Mapping[int, abc.Sequence[int]] = field(default_factory=lambda: MappingProxyType({}))
    drafts: abc.Mapping[int, abc.Sequence[int]] = field(default_factory=lambda: MappingProxyType({}))
    restore_ids: tuple[int, ...] = ()
    admissions: tuple[Admission, ...] = ()
    admission_token_budget: int = 0
    admission_reserve_blocks: int = 0
    sequences: abc.Mapping[int, Sequence] = field(default_factory=lambda: MappingProxyType({}))
    num_batched: int = 0
    host_copy_use: HostCopyUse = HostCopyUse.THERE_AND_BACK
    skips_disk: bool = False
    gives_way: bool = False
    """It releases what another client of the pool may wait for, and admits nothing."""

    @property
    def is_empty(self) -> bool:
        """True if it has no items."""
        return not (self.release_ids or self.offload_ids or self.asks_to_compute)

    @property
    def asks_to_compute(self) -> bool:
        """True if anything should run."""
        return bool(self.extend_ids or self.restore_ids or self.admissions)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An item that was refused and changed nothing."""

    item: PlanItem
    seq_id: int
    error: QuireError


@dataclass(frozen=True, slots=True)
class Blocks:
    """The pool's blocks after a plan; as in the contract."""

    free: int
    cached: int
    active: int
    retired: int


@dataclass(frozen=True, slots=True)
class GrantedStep:
    """The answer of cachemgr to a plan. run_* are parallel; so are admitted_ids and outcomes, restored_*.

    restored_counts have the tokens that need not be computed again.
    """

    step_number: int
    run_ids: list[int]
    run_starts: list[int]
    run_counts: list[int]
    given_run_indexes: abc.Sequence[int]
    refusals: abc.Sequence[Refusal]
    admitted_ids: abc.Sequence[int]
    outcomes: abc.Sequence[CacheOutcome]
    blocks: Blocks
    restored_ids: abc.Sequence[int] = ()
    restored_counts: abc.Sequence[int] = ()
    num_free_host_blocks: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class StepInFlight:
    """A step in flight. seq_ids, sequences, starts and counts are parallel.

    given          indexes of runs with token ids for the worker
    introduced     indexes of runs with sampling parameters for the worker
    samplers       the sequences that get a token, by id
    idle           forked for this step but refused blocks to run: steps in flight may compute their shared blocks
    drafts         of runs with drafts, by id
    failed         requests that ended with this plan, and their errors; not part of the step
    is_void        cachemgr planned it knowing of a failed step that is not known here yet: it is sent to be skipped
    """

    step_number: int
    seq_ids: abc.Sequence[int]
    sequences: abc.Sequence[Sequence]
    starts: abc.Sequence[int]
    counts: abc.Sequence[int]
    given: abc.Sequence[int]
    introduced: abc.Sequence[int]
    samplers: abc.Mapping[int, Sequence]
    idle: abc.Mapping[int, Sequence]
    failed: abc.Sequence["Failed"]
    is_void: bool = False
    drafts: abc.Mapping[int, abc.Sequence[int]] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def num_tokens(self) -> int:
        """The tokens that it computes."""
        return sum(self.counts)

    @property
    def has_prompts(self) -> bool:
        """True if a run has tokens that are neither decoded nor drafted."""
        return self.num_tokens > len(self.seq_ids) + sum(map(len, self.drafts.values()))


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The sequences that got a token in a step, the last of their token_ids then.

    seq_ids    their ids in the step, parallel
    counts     of those with drafts, by id: the tokens that they got, 1 or more
    ended      those for which it was the last one, and why
    """

    seq_ids: abc.Sequence[int]
    sequences: abc.Sequence[Sequence]
    ended: abc.Mapping[Sequence, FinishReason]
    counts: abc.Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Failed:
    """A sequence that ended for an error of its own."""

    sequence: Sequence
    error: QuireError
