"""Who runs in the next step, who waits, who gives its blocks back. Pure: no I/O, clock or randomness.

    schedule() -> Plan               asks: what the next step should do; changes nothing
    on_planned(plan, outcome)        what cachemgr made of it; from here on the step is in flight
    on_step_done(step, ...)          its tokens; steps end in the order they were planned
    on_step_failed / on_step_dropped what it should have computed is admitted again
    on_plan_refused / on_step_refused  likewise, without the sequence for whose input it was refused
    cancel / stop / reset_all        from outside, at any point between those calls

Rank. Higher priority first, then who arrived first; in everything. Running sequences get tokens and blocks in order of
rank, decodes before forks before chunks of prompts; whoever waits is admitted in order of rank.

Blocks. When a running sequence lacks blocks and neither retired blocks nor releases will cover it, sequences below it
in rank are preempted: of the lowest priority, and of these the one that loses least work per block of use. If nobody is
below it, it waits and keeps what it has. So every request ends: the first in rank is never preempted for another one of
this client and gets every block that this client holds, so it ends; then so does the next one. Requests of lower
priority may have to wait for as long as higher ones keep coming: who waits for admission takes blocks and places from
running sequences of lower priority, and never from others.

Who is preempted comes back by an admission of its tokens; or by a restore, if the pool has a host tier with room and
copying what it has there and back is measured to take less than computing it again. Both wait in one line.

Thrashing. Admissions leave what the running sequences will want within so many steps: twice as many after each plan
that preempted for one of them, until a running sequence ends. So between two ends there are no more such plans than
doublings and places: beyond the last doubling nobody is admitted beside others before one of them has ended.
Where a quota is short and not the pool, of which cachemgr keeps no reserve, nobody is admitted before that either.

Bounds. A decode waits for prompts no longer than one step of max_step_tokens, because every step has a token of every
running sequence that decodes. A prompt waits for decodes no longer either: they have at most as many places as leave a
quarter of max_step_tokens to prompts, in every step.

A step that fails makes its sequences suspects. A suspect runs alone until it has passed the place of the failure; only
failures of a step that a sequence had to itself count against it. So one request that breaks the model cannot take the
others with it. A plan or a step that is refused for its input names the sequence, which fails; if it names none, its
sequences are suspects. After a failure nothing is planned until the steps in flight have ended: a step planned before
the outcome of a failed one is known fails too, and with steps always in flight that would go on for ever.
"""

from bisect import bisect_right, insort
from collections import abc, deque
from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

from quire.client.errors import InvalidRequest, OutOfRoom, ProtocolViolation, QuireError, RequestFailed
from quire.client.sampling import SamplingParams
from quire.client.sequence import FinishReason, Sequence, SequenceState
from quire.client.tier import TierCosts

_MAX_SEQ_ID = 2**31
# Tokens of all admissions of one plan, if there are two or more (Admission.token_ids of the proto).
_MAX_PLAN_TOKENS = 262_144
# Tokens that all children of one plan's forks begin with (Fork.child_sequence_ids of the proto).
_MAX_FORKED_TOKENS = 8_388_608
# There is no room for an item: in the pool, or in what this client may hold of it.
_NO_BLOCKS = frozenset({"OUT_OF_BLOCKS", "QUOTA_EXCEEDED"})
_RUNNING = SequenceState.RUNNING  # in loops over all sequences of a step, where the enum's own lookup would show
_DRAINING = SequenceState.DRAINING
# Who may have something in the host tier.
_AWAY = frozenset({SequenceState.WAITING, SequenceState.DRAINING})
# Admissions leave the blocks that running sequences will ask for within this many steps, or more under pressure.
_RESERVE_STEPS = 4
# Of a step's tokens one in so many is never a decode's.
_PROMPT_SHARE = 4


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the scheduler has to keep to.

    max_step_tokens          tokens one step may compute
    max_running_sequences    sequences that hold blocks at once
    block_size               tokens per block
    num_blocks               blocks of the pool that can be owned: without the null block
    max_sequence_tokens      the model's context
    vocabulary_size          token ids are below this
    max_step_failures        a request is given up when this many steps it was alone in have failed
    max_stalls               plans without a run, one after the other, before the only running sequence gives way
    num_host_blocks          blocks of the host tier; 0: there is none
    block_bytes              what a copy of a block moves
    """

    max_step_tokens: int
    max_running_sequences: int
    block_size: int
    num_blocks: int
    max_sequence_tokens: int
    vocabulary_size: int
    max_step_failures: int = 3
    max_stalls: int = 20
    num_host_blocks: int = 0
    block_bytes: int = 0

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            least = 0 if name in ("num_host_blocks", "block_bytes") else 1
            if getattr(self, name) < least:
                raise InvalidRequest.of_field(name, getattr(self, name), f"at least {least}")

    @property
    def num_places(self) -> int:
        """Sequences that may run at once: all of them may decode, and prompts still get their share of a step."""
        return min(self.max_running_sequences, self.max_step_tokens - self.max_step_tokens // _PROMPT_SHARE)

    @property
    def max_tokens_per_sequence(self) -> int:
        """The most tokens a sequence can have: of the model or of the whole pool, whichever is less."""
        return min(self.max_sequence_tokens, self.num_blocks * self.block_size)


class PlanItem(Enum):
    """The kind of an item of a plan."""

    OFFLOAD = "offload"
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
    """It was in a pool before, and was preempted or lost."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the next step should do. extend_ids and extend_counts are parallel; sequences has whom the ids stand for."""

    release_ids: tuple[int, ...] = ()
    offload_ids: tuple[int, ...] = ()
    forks: tuple[Fork, ...] = ()
    extend_ids: tuple[int, ...] = ()
    extend_counts: tuple[int, ...] = ()
    restore_ids: tuple[int, ...] = ()
    admissions: tuple[Admission, ...] = ()
    admission_token_budget: int = 0
    admission_reserve_blocks: int = 0
    sequences: abc.Mapping[int, Sequence] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to ask for."""
        return not (self.release_ids or self.offload_ids or self.asks_to_compute)

    @property
    def asks_to_compute(self) -> bool:
        """Whether anything should run."""
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
class PlanOutcome:
    """What cachemgr made of a plan. run_* are parallel; so are admitted_ids and cached_counts, restored_*.

    restored_counts have the tokens that need not be computed again.
    """

    step_number: int
    run_ids: abc.Sequence[int]
    run_starts: abc.Sequence[int]
    run_counts: abc.Sequence[int]
    given_run_indexes: abc.Sequence[int]
    refusals: abc.Sequence[Refusal]
    admitted_ids: abc.Sequence[int]
    cached_counts: abc.Sequence[int]
    blocks: Blocks
    restored_ids: abc.Sequence[int] = ()
    restored_counts: abc.Sequence[int] = ()
    num_free_host_blocks: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A step in flight. seq_ids, sequences, starts and counts are parallel.

    given          indexes of runs whose token ids the worker needs
    introduced     indexes of runs whose sampling parameters the worker needs
    samplers       who gets a token, by id
    idle           forked for this step but refused blocks to run: what they share may be computed by steps in flight
    failed         requests that ended with this plan, and why; not part of the step
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


class Sampled(NamedTuple):
    """A token a sequence got, under the id it had in the step; finish_reason if it is the last one."""

    sequence: Sequence
    seq_id: int
    token_id: int
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Failed:
    """A sequence that ended for an error of its own."""

    sequence: Sequence
    error: QuireError


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Present numbers of sequences by state, and counters since the beginning."""

    num_waiting: int
    num_running: int
    num_following: int
    num_draining: int
    num_offloaded: int
    num_steps_in_flight: int
    planned_steps: int
    failed_steps: int
    admissions: int
    admitted_tokens: int
    cached_tokens: int
    forks: int
    preemptions: int
    offloads: int
    restores: int
    restored_tokens: int
    scheduled_tokens: int
    sampled_tokens: int
    discarded_tokens: int
    refusals: int
    resets: int


@dataclass(slots=True)
class _Counters:
    planned_steps: int = 0
    failed_steps: int = 0
    admissions: int = 0
    admitted_tokens: int = 0
    cached_tokens: int = 0
    forks: int = 0
    preemptions: int = 0
    offloads: int = 0
    restores: int = 0
    restored_tokens: int = 0
    scheduled_tokens: int = 0
    sampled_tokens: int = 0
    discarded_tokens: int = 0
    refusals: int = 0
    resets: int = 0


class _Draft:
    """A plan while it is being made."""

    __slots__ = ("admissions", "budget", "counts", "forks", "ids", "restores", "sequences")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.ids: list[int] = []
        self.counts: list[int] = []
        self.forks: list[Fork] = []
        self.restores: list[int] = []
        self.admissions: list[Admission] = []
        self.sequences: dict[int, Sequence] = {}

    def extend(self, seq_id: int, sequence: Sequence, count: int) -> None:
        self.ids.append(seq_id)
        self.counts.append(count)
        self.sequences[seq_id] = sequence
        self.budget -= count

    def decode(self, sequences: list[Sequence]) -> None:
        ids = [_id_of(sequence) for sequence in sequences]
        self.ids += ids
        self.counts += [1] * len(ids)
        self.sequences.update(zip(ids, sequences, strict=True))
        self.budget -= len(ids)

    def restore(self, seq_id: int, sequence: Sequence) -> None:
        self.restores.append(seq_id)
        self.sequences[seq_id] = sequence

    def admit(self, seq_id: int, sequence: Sequence) -> None:
        self.admissions.append(Admission(seq_id, sequence.token_ids, resumed=sequence.was_admitted))
        self.sequences[seq_id] = sequence


def _by_rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank


def _by_priority(sequence: Sequence) -> int:
    return sequence.rank[0]


class Scheduler:
    """The state behind schedule(). One plan at a time: on_planned or a failed call comes before the next schedule()."""

    def __init__(self, limits: SchedulerLimits, *, verify: bool = False) -> None:
        """With verify, check_invariants() runs after each change."""
        self.limits = limits
        self._verify = verify
        self._waiting: list[Sequence] = []  # by rank
        self._running: list[Sequence] = []  # by rank
        self._draining: set[Sequence] = set()
        self._followers: dict[Sequence, list[Sequence]] = {}  # parent -> samples still to be forked
        self._suspects: list[Sequence] = []  # by rank
        self._releases: dict[int, int] = {}  # id -> blocks that will come back, at most
        self._offloads: dict[int, Sequence] = {}  # id -> who gave way under it and is to go to the host tier
        self.costs = TierCosts()
        self._steps: deque[Step] = deque()
        self._next_request = 0
        self._next_seq_id = 0
        self._counters = _Counters()
        self._forget_pool()

    def _forget_pool(self) -> None:
        self._blocks = Blocks(free=self.limits.num_blocks, cached=0, active=0, retired=0)
        self._starved: int | None = None  # highest priority of a running sequence refused blocks in the last plan
        self._reserve_steps = _RESERVE_STEPS
        self._is_quota_short = False  # somebody gave way for want of quota, and nobody has ended since
        self._admission_needs = 0  # blocks without which the first in line need not ask again
        self._cached_ratio = 0.0  # of admitted tokens lately: how far a budget for admissions goes
        self._stalls = 0
        self._is_settling = False  # a step failed: those in flight end before another is planned
        self._free_host_blocks = self.limits.num_host_blocks  # those not asked for yet
        self._unscheduled: abc.Set[int] = frozenset()  # ids with a run that cachemgr has planned, and this has not

    # What comes from outside.

    @property
    def has_work(self) -> bool:
        """Whether schedule() or a step in flight still has something to do."""
        return bool(self._waiting or self._running or self._draining or self._releases or self._offloads or self._steps)

    def add(
        self,
        prompt_token_ids: abc.Sequence[int],
        params: SamplingParams,
        *,
        end_token_ids: abc.Iterable[int],
        seed: int,
    ) -> list[Sequence]:
        """Take a request; returns its params.n sequences. Sample i has seed + i, in 64 bits.

        Raises InvalidRequest, nothing taken, for what check() refuses.
        """
        max_tokens = self.check(prompt_token_ids, params)
        ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= frozenset(end_token_ids)
        request_id = self._next_request
        self._next_request += 1
        prompt = list(prompt_token_ids)
        sequences = [
            Sequence(
                request_id=request_id,
                index=index,
                arrival=(request_id, index),
                token_ids=prompt if index else prompt.copy(),
                num_prompt_tokens=len(prompt_token_ids),
                max_tokens=max_tokens,
                end_token_ids=ends,
                params=params,
                seed=(seed + index + 2**63) % 2**64 - 2**63,
                state=SequenceState.FOLLOWING if index else SequenceState.WAITING,
            )
            for index in range(params.n)
        ]
        self._queue(sequences[0])
        if len(sequences) > 1:
            self._followers[sequences[0]] = sequences[1:]
        self._checked()
        return sequences

    def check(self, token_ids: abc.Sequence[int], params: SamplingParams) -> int:
        """The most tokens a request may generate.

        Raises InvalidRequest if the prompt is empty, if it or stop_token_ids have a token out of range, or if it does
        not fit, together with max_tokens, into the model or the pool.
        """
        num_tokens, limit = len(token_ids), self.limits.max_tokens_per_sequence
        if not num_tokens:
            raise InvalidRequest.of_field("prompt", 0, "at least 1 token", reason="EMPTY_PROMPT")
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self.limits.vocabulary_size:
                allowed = f"token ids from 0 to {self.limits.vocabulary_size - 1}"
                raise InvalidRequest.of_field("prompt", token_id, allowed, reason="TOKEN_OUT_OF_RANGE")
        for token_id in params.stop_token_ids:
            if token_id >= self.limits.vocabulary_size:
                allowed = f"token ids from 0 to {self.limits.vocabulary_size - 1}"
                raise InvalidRequest.of_field("stop_token_ids", token_id, allowed, reason="TOKEN_OUT_OF_RANGE")
        whose = "model's context" if limit == self.limits.max_sequence_tokens else "pool's blocks"
        if num_tokens >= limit:
            allowed = f"fewer than {limit} tokens, by the {whose}"
            raise InvalidRequest.of_field("prompt", num_tokens, allowed, reason="SEQUENCE_TOO_LONG")
        if params.max_tokens is None:
            return limit - num_tokens
        if num_tokens + params.max_tokens > limit:
            allowed = f"at most {limit - num_tokens} after {num_tokens} tokens, by the {whose}"
            raise InvalidRequest.of_field("max_tokens", params.max_tokens, allowed, reason="SEQUENCE_TOO_LONG")
        return params.max_tokens

    def cancel(self, sequences: abc.Iterable[Sequence]) -> None:
        """End these now; their blocks are released with the next plan. Those that have ended are left alone."""
        for sequence in sorted(sequences, key=_by_rank, reverse=True):
            # Last first: a parent that ends would only send its followers to the queue.
            self._finish(sequence, FinishReason.CANCELLED)
        self._checked()

    def stop(self, sequence: Sequence) -> None:
        """End one whose text has met a stop string. One that has ended is left alone."""
        self._finish(sequence, FinishReason.STOP)
        self._checked()

    def set_limits(self, limits: SchedulerLimits) -> None:
        """Another pool, or a new epoch. Only while nothing runs; what does not fit any more is refused by cachemgr."""
        if self._running or self._draining:
            raise ValueError("limits change only while nothing runs")
        self.limits = limits
        self._forget_pool()

    def reset_all(self) -> None:
        """The pool has forgotten everything: whoever ran waits with its known tokens; steps in flight are void."""
        self._counters.resets += 1
        self._steps.clear()
        self._releases.clear()
        self._offloads.clear()
        for sequence in self._waiting:
            sequence.host_id = None
        for sequence in (*self._running, *self._draining):
            sequence.forget()
            insort(self._waiting, sequence, key=_by_rank)
        self._running.clear()
        self._draining.clear()
        self._forget_pool()
        self._checked()

    # What the next step should do.

    def schedule(self) -> Plan:
        """The next plan; empty if nothing can be done before a step in flight ends. Changes no sequence."""
        if self._is_settling and self._steps:
            return Plan()
        self._is_settling = False
        draft = _Draft(self.limits.max_step_tokens)
        if self._suspects:
            self._draft_suspect(draft, self._suspects[0])
        else:
            self._draft_decodes(draft)
            self._draft_forks(draft)
            self._draft_chunks(draft)
            self._draft_admissions(draft)
        return Plan(
            release_ids=tuple(islice(self._releases, self.limits.max_running_sequences)),
            offload_ids=tuple(self._offloads),
            forks=tuple(draft.forks),
            extend_ids=tuple(draft.ids),
            extend_counts=tuple(draft.counts),
            restore_ids=tuple(draft.restores),
            admissions=tuple(draft.admissions),
            admission_token_budget=draft.budget if draft.restores or draft.admissions else 0,
            admission_reserve_blocks=self._reserve_of(draft),
            sequences=draft.sequences,
        )

    def _reserve_of(self, draft: _Draft) -> int:
        newcomers = [*draft.restores, *(admission.seq_id for admission in draft.admissions)]
        if not newcomers:
            return 0
        return self._reserve_for(draft.sequences[newcomers[-1]], beside=len(newcomers) - 1)

    def _reserve_for(self, newcomer: Sequence, *, beside: int = 0) -> int:
        """Blocks that an admission has to leave to running sequences of no lower priority, and others admitted too."""
        if self._suspects:
            return 0
        num_sequences = self._num_not_below(newcomer.priority) + beside
        return -(-num_sequences * self._reserve_steps // self.limits.block_size)

    def _num_not_below(self, priority: int) -> int:
        return bisect_right(self._running, -priority, key=_by_priority)

    def _may_take_blocks(self, sequence: Sequence) -> bool:
        """Whether it may be let in: those who run go first, if their priority is not lower."""
        return self._starved is None or sequence.priority > self._starved

    def _draft_suspect(self, draft: _Draft, suspect: Sequence) -> None:
        if self._steps:
            return  # alone means alone: a failure must have one possible cause
        if suspect.state is SequenceState.WAITING:
            self._draft_newcomer(draft, suspect)
        elif suspect.seq_id is not None:
            draft.extend(suspect.seq_id, suspect, min(suspect.num_schedulable_tokens, draft.budget))

    def _draft_decodes(self, draft: _Draft) -> None:
        ready = [sequence for sequence in self._running if sequence.num_schedulable_tokens == 1]
        draft.decode(ready[: draft.budget])

    def _draft_chunks(self, draft: _Draft) -> None:
        for sequence in self._running:
            if not draft.budget:
                return
            count = sequence.num_schedulable_tokens
            if count > 1:
                draft.extend(_id_of(sequence), sequence, min(count, draft.budget))

    def _draft_forks(self, draft: _Draft) -> None:
        if not self._followers:
            return
        places = self.limits.num_places - len(self._running)
        num_left = max(_MAX_FORKED_TOKENS, self.limits.max_sequence_tokens)
        for parent in self._running:
            followers = self._followers.get(parent, [])
            children = followers[: max(0, min(places, draft.budget, num_left // parent.num_prompt_tokens))]
            if not children or parent.num_scheduled_tokens < parent.num_prompt_tokens:
                continue
            if not self._may_take_blocks(parent):
                return
            places -= len(children)
            num_left -= len(children) * parent.num_prompt_tokens
            child_ids = tuple(self._fresh_id() for _ in children)
            draft.forks.append(Fork(_id_of(parent), child_ids, parent.num_prompt_tokens))
            for child_id, child in zip(child_ids, children, strict=True):
                draft.extend(child_id, child, 1)

    def _draft_admissions(self, draft: _Draft) -> None:
        forked = sum(len(fork.child_ids) for fork in draft.forks)
        places = self.limits.num_places - len(self._running) - forked
        if self._admissions_blocked():
            return
        # Prompts are offered until what they will probably compute fills the budget; cachemgr, who knows what is
        # cached, cuts the last one.
        budget, num_given = float(draft.budget), 0
        for sequence in self._waiting[: max(0, places)]:
            num_given += len(sequence.token_ids) if sequence.host_id is None else 0
            if num_given > _MAX_PLAN_TOKENS and draft.admissions:
                return
            if budget <= 0 or not self._may_take_blocks(sequence) or not self._draft_newcomer(draft, sequence):
                return
            budget -= max(1.0, self._expected_run_of(sequence))
            if self._admission_needs:
                return  # somebody was refused blocks: nobody may overtake the first in line

    def _draft_newcomer(self, draft: _Draft, sequence: Sequence) -> bool:
        """Offer one that waits; False if it has to wait for the next plan."""
        if sequence.host_id is None:
            draft.admit(self._fresh_id(), sequence)
            return True
        if sequence.host_id in self._offloads or draft.admissions:
            return False  # it is on its way there; or it would be let in before those above it in rank
        draft.restore(sequence.host_id, sequence)
        return True

    def _expected_run_of(self, newcomer: Sequence) -> float:
        num_tokens = len(newcomer.token_ids)
        if newcomer.host_id is not None:
            return num_tokens - newcomer.num_host_tokens
        return num_tokens * (1.0 - self._cached_ratio)

    def _admissions_blocked(self) -> bool:
        """Whether the first in line was refused and nothing has come back since that would change it."""
        if not self._running or not self._waiting:
            return False
        if self._is_quota_short and not self._below(self._waiting[0]):
            return True
        return self._room(self._blocks.free + self._blocks.cached) < self._admission_needs

    def _fresh_id(self) -> int:
        self._next_seq_id = (self._next_seq_id + 1) % _MAX_SEQ_ID
        return self._next_seq_id

    # What cachemgr made of it.

    def on_planned(self, plan: Plan, outcome: PlanOutcome) -> Step:
        """Take the answer to the plan that schedule() returned last. Returns the step, now in flight.

        Raises ProtocolViolation if the answer does not fit the plan; then only reset_all() makes sense.
        """
        refused = {(refusal.item, refusal.seq_id): refusal.error for refusal in outcome.refusals}
        self._counters.planned_steps += 1
        self._counters.refusals += len(refused)
        for seq_id in plan.release_ids:
            self._releases.pop(seq_id, None)
        self._blocks = outcome.blocks
        self._free_host_blocks = outcome.num_free_host_blocks
        for seq_id in plan.offload_ids:
            self._take_offload(seq_id, is_refused=(PlanItem.OFFLOAD, seq_id) in refused)
        failed: list[Failed] = []
        self._unscheduled = frozenset(outcome.run_ids)
        if plan.forks:
            self._begin_forks(plan, refused)
        if plan.restore_ids or plan.admissions:
            self._admission_needs = 0
            self._begin_restores(plan, outcome, refused)
            self._begin_admissions(plan, outcome, refused, failed)
        step = self._step_of(plan, outcome, failed)
        self._unscheduled = frozenset()
        self._steps.append(step)
        self._refuse_extends(plan, refused, failed)
        if plan.asks_to_compute:
            self._stalls = 0 if outcome.run_ids else self._stalls + 1
        self._yield_place()
        self._checked()
        return step

    def _begin_forks(self, plan: Plan, refused: abc.Mapping[tuple[PlanItem, int], QuireError]) -> None:
        for fork in plan.forks:
            for child_id in fork.child_ids:
                child = plan.sequences[child_id]
                accepted = (PlanItem.FORK, child_id) not in refused
                if child.state is SequenceState.FOLLOWING:
                    parent = self._unfollow(child)
                    if accepted:
                        parent.num_shared_tokens = max(parent.num_shared_tokens, fork.num_tokens - 1)
                    else:
                        self._wait(child)  # an ordinary admission; the prompt is in the cache
                        continue
                elif not accepted:
                    continue
                elif child.state is not SequenceState.WAITING:
                    self._releases[child_id] = 1  # it ended while the plan was under way
                    continue
                else:
                    self._waiting.remove(child)  # the parent ended while the plan was under way
                child.begin(child_id, num_scheduled_tokens=fork.num_tokens - 1)
                insort(self._running, child, key=_by_rank)
                self._counters.forks += 1

    def _begin_admissions(
        self,
        plan: Plan,
        outcome: PlanOutcome,
        refused: abc.Mapping[tuple[PlanItem, int], QuireError],
        failed: list[Failed],
    ) -> None:
        cached = dict(zip(outcome.admitted_ids, outcome.cached_counts, strict=True))
        for admission in plan.admissions:
            sequence, seq_id = plan.sequences[admission.seq_id], admission.seq_id
            if seq_id in cached:
                self._begin_admitted(sequence, seq_id, cached[seq_id])
            elif (error := refused.get((PlanItem.ADMISSION, seq_id))) is None:
                raise ProtocolViolation("an admission was neither accepted nor refused")
            elif not isinstance(error, OutOfRoom):
                self._fail(sequence, error, failed)
            elif error.reason in _NO_BLOCKS:
                self._await_blocks(sequence, error, plan)

    def _begin_restores(
        self, plan: Plan, outcome: PlanOutcome, refused: abc.Mapping[tuple[PlanItem, int], QuireError]
    ) -> None:
        restored = dict(zip(outcome.restored_ids, outcome.restored_counts, strict=True))
        for seq_id in plan.restore_ids:
            sequence = plan.sequences[seq_id]
            if seq_id in restored:
                self._begin_restored(sequence, seq_id, restored[seq_id])
            elif (error := refused.get((PlanItem.RESTORE, seq_id))) is None:
                raise ProtocolViolation("a restore was neither accepted nor refused")
            elif error.reason in _NO_BLOCKS:
                self._await_blocks(sequence, error, plan)
            elif not isinstance(error, OutOfRoom):
                self._leave_host(sequence)  # it can be admitted like any other

    def _begin_restored(self, sequence: Sequence, seq_id: int, num_tokens: int) -> None:
        self._counters.restores += 1
        self._counters.restored_tokens += num_tokens
        if sequence.state is not SequenceState.WAITING:
            self._releases[seq_id] = self._blocks_of(sequence)  # it ended while the plan was under way
            return
        self._waiting.remove(sequence)
        num_shared = min(sequence.num_shared_tokens, num_tokens)
        sequence.begin(seq_id, num_scheduled_tokens=num_tokens, num_shared_tokens=num_shared)
        insort(self._running, sequence, key=_by_rank)

    def _await_blocks(self, newcomer: Sequence, error: QuireError, plan: Plan) -> None:
        """The first that was refused blocks waits for so many, and takes them from those below it."""
        if self._admission_needs:
            return
        self._admission_needs = self._needed_by(newcomer, error, plan.admission_reserve_blocks)
        if newcomer.state is SequenceState.WAITING:
            self._make_room(newcomer, self._admission_needs - self._room(self._spare_of(error)))

    def _needed_by(self, newcomer: Sequence, error: QuireError, reserve: int) -> int:
        """Blocks without which it is refused again; the reserve was the plan's, which may have been for others too."""
        if error.reason == "QUOTA_EXCEEDED":
            return error.number("needed", 1)
        return error.number("needed", 1) - reserve + self._reserve_for(newcomer)

    def _begin_admitted(self, sequence: Sequence, seq_id: int, num_cached: int) -> None:
        num_tokens = len(sequence.token_ids)
        self._counters.admissions += 1
        self._counters.admitted_tokens += num_tokens
        self._counters.cached_tokens += num_cached
        self._cached_ratio = 0.5 * self._cached_ratio + 0.5 * num_cached / num_tokens
        if sequence.state is not SequenceState.WAITING:
            self._releases[seq_id] = self._blocks_of(sequence)  # it ended while the plan was under way
            return
        self._waiting.remove(sequence)
        sequence.begin(seq_id, num_scheduled_tokens=num_cached)
        insort(self._running, sequence, key=_by_rank)

    def _step_of(self, plan: Plan, outcome: PlanOutcome, failed: abc.Sequence[Failed]) -> Step:
        given = set(outcome.given_run_indexes)
        sequences: list[Sequence] = []
        introduced: list[int] = []
        samplers: dict[int, Sequence] = {}
        runs = zip(outcome.run_ids, outcome.run_starts, outcome.run_counts, strict=True)
        for index, (seq_id, start, count) in enumerate(runs):
            sequence = plan.sequences.get(seq_id)
            if sequence is None:
                raise ProtocolViolation("a run of a sequence that was not asked for")
            sequences.append(sequence)
            if sequence.seq_id != seq_id or sequence.state is not _RUNNING:
                continue  # it ended while the plan was under way: it runs, and nobody looks
            if start != sequence.num_scheduled_tokens or not 0 < count <= sequence.num_schedulable_tokens:
                raise ProtocolViolation(f"a run of [{start}, {start + count}) where another was due")
            if given and index in given and start + count > len(sequence.token_ids):
                raise ProtocolViolation("token ids are asked for that are still being sampled")
            if sequence.schedule(count):
                samplers[seq_id] = sequence
            if not sequence.sampling_sent:
                sequence.sampling_sent = True
                introduced.append(index)
        self._counters.scheduled_tokens += sum(outcome.run_counts)
        return Step(
            step_number=outcome.step_number,
            seq_ids=outcome.run_ids,
            sequences=sequences,
            starts=outcome.run_starts,
            counts=outcome.run_counts,
            given=outcome.given_run_indexes,
            introduced=introduced,
            samplers=samplers,
            idle=self._idle_of(plan, outcome),
            failed=failed,
        )

    def _idle_of(self, plan: Plan, outcome: PlanOutcome) -> dict[int, Sequence]:
        forked = (child_id for fork in plan.forks for child_id in fork.child_ids)
        running = set(outcome.run_ids) if plan.forks else set()
        return {child_id: plan.sequences[child_id] for child_id in forked if child_id not in running}

    def _refuse_extends(
        self, plan: Plan, refused: abc.Mapping[tuple[PlanItem, int], QuireError], failed: list[Failed]
    ) -> None:
        needs: dict[Sequence, QuireError] = {}
        for (item, seq_id), error in refused.items():
            sequence = plan.sequences.get(seq_id)
            live = sequence is not None and sequence.seq_id == seq_id and sequence.state is SequenceState.RUNNING
            if item is not PlanItem.EXTEND or sequence is None or not live:
                continue
            if error.reason in _NO_BLOCKS:
                needs[sequence] = error
            elif error.reason in ("SEQUENCE_NOT_FOUND", "NOTHING_TO_COMPUTE"):
                self._retry_alone(sequence, error, failed)
            else:
                self._fail(sequence, error, failed)
        self._starved = max((sequence.priority for sequence in needs), default=None)
        if needs:
            self._relieve(needs)

    def _spare_of(self, error: QuireError) -> int:
        """The blocks that this client could have had when it was refused more."""
        if error.reason == "QUOTA_EXCEEDED":
            return error.number("limit", 0) - error.number("held", 0)
        return error.number("free", self._blocks.free + self._blocks.cached)

    def _room(self, spare: int) -> int:
        """Blocks that there are or that are on their way back."""
        leaving = sum(map(self._blocks_of, self._offloads.values()))
        return spare + self._blocks.retired + sum(self._releases.values()) + leaving

    def _relieve(self, needs: abc.Mapping[Sequence, QuireError]) -> None:
        """Make room for running sequences that were refused blocks, the first in rank first."""
        *_, last_refused = needs.values()
        room, num_preemptions = self._room(self._spare_of(last_refused)), self._counters.preemptions
        for sequence in sorted(needs, key=_by_rank):
            if sequence.state is _RUNNING:  # it has not given way to one above it
                room -= needs[sequence].number("needed", 1)
                room += self._make_room(sequence, -room)
        if self._counters.preemptions > num_preemptions:
            self._reserve_steps = min(2 * self._reserve_steps, self.limits.num_blocks * self.limits.block_size)
            self._is_quota_short = last_refused.reason == "QUOTA_EXCEEDED"
        if room < 0 and self._stalls >= self.limits.max_stalls:
            # Nobody of this client holds what is lacking: give way to another client of the pool.
            self._preempt(max((sequence for sequence in needs if sequence.state is _RUNNING), key=_by_rank))

    def _make_room(self, needy: Sequence, missing: int) -> int:
        """Preempt until so many blocks will come back, or there is nobody left to; returns how many will."""
        coming = 0
        while coming < missing and (victim := self._victim_for(needy, missing - coming)) is not None:
            coming += self._own_blocks_of(victim)
            self._preempt(victim)
        return coming

    def _victim_for(self, needy: Sequence, missing: int) -> Sequence | None:
        """Of the lowest priority, who loses least work per block of use; of equals the last in rank."""

        def price(victim: Sequence) -> tuple[int, float]:
            lost = victim.num_scheduled_tokens - victim.num_shared_tokens
            return victim.priority, lost / min(self._own_blocks_of(victim), missing)

        return min(reversed(self._below(needy)), key=price, default=None)

    def _below(self, needy: Sequence) -> list[Sequence]:
        """Running sequences that have to give way to one that runs, or to one that waits."""
        if self._suspects:  # needy is one: everybody else is paused and would hold the blocks for ever
            return [sequence for sequence in self._running if sequence is not needy]
        if needy.state is _RUNNING:
            return self._running[bisect_right(self._running, needy.rank, key=_by_rank) :]
        return self._running[self._num_not_below(needy.priority) :]

    def _yield_place(self) -> None:
        """If all places are taken, the first in line gets that of a sequence of lower priority, one with each plan."""
        if self._waiting and not self._suspects and len(self._running) >= self.limits.num_places:
            self._make_room(self._waiting[0], 1)

    def _preempt(self, sequence: Sequence) -> None:
        self._counters.preemptions += 1
        seq_id, is_kept = _id_of(sequence), self._is_worth_offloading(sequence)
        self._leave(sequence)
        sequence.preempt(is_offloaded=is_kept)
        if is_kept:
            del self._releases[seq_id]
            self._offloads[seq_id] = sequence
            self._free_host_blocks -= self._host_blocks_of(sequence.num_host_tokens)
        if sequence.state is SequenceState.DRAINING:
            self._draining.add(sequence)
        else:
            self._queue(sequence)

    # The host tier.

    def _is_worth_offloading(self, sequence: Sequence) -> bool:
        num_tokens = sequence.num_scheduled_tokens
        num_blocks = self._host_blocks_of(num_tokens)
        if num_blocks > self._free_host_blocks or sequence.seq_id in self._unscheduled:
            return False  # in the second case it would come back with a token that nobody awaits
        return self.costs.prefers_offload(
            num_lost_tokens=num_tokens - sequence.num_shared_tokens, num_bytes=num_blocks * self.limits.block_bytes
        )

    def _host_blocks_of(self, num_tokens: int) -> int:
        return max(1, -(-num_tokens // self.limits.block_size))

    def _take_offload(self, seq_id: int, *, is_refused: bool) -> None:
        """A sequence was asked to be moved to the host tier; one that can't be is released."""
        self._counters.offloads += not is_refused
        sequence = self._offloads.get(seq_id)
        if sequence is None:
            return  # it ended while the plan was under way
        if is_refused:
            self._leave_host(sequence)
        else:
            del self._offloads[seq_id]

    def _leave_host(self, sequence: Sequence) -> None:
        """Give up what a sequence has in the host tier, or was to get there: with the next plan."""
        if sequence.host_id is None:
            return
        leaving = self._offloads.pop(sequence.host_id, None)
        self._releases[sequence.host_id] = 0 if leaving is None else self._blocks_of(sequence)
        sequence.host_id = None

    # How a step ended.

    def on_step_done(
        self, step: Step, seq_ids: abc.Sequence[int], token_ids: abc.Sequence[int]
    ) -> abc.Sequence[Sampled]:
        """Take the tokens of the oldest step in flight, parallel lists; returns those that count, in this order.

        Raises ProtocolViolation, nothing taken, if a sequence that should have sampled has no token.
        """
        self._check_oldest(step)
        tokens = dict(zip(seq_ids, token_ids, strict=True))
        if not step.samplers.keys() <= tokens.keys():
            raise ProtocolViolation("a step came back without a token that it was to sample")
        self._steps.popleft()
        events = [
            self._accept(sequence, seq_id, tokens[seq_id])
            for seq_id, sequence in step.samplers.items()
            if sequence.seq_id == seq_id and (sequence.state is _RUNNING or sequence.state is _DRAINING)
        ]
        self._counters.sampled_tokens += len(events)
        self._counters.discarded_tokens += len(tokens) - len(events)
        if self._suspects:
            self._clear_suspects(step)
        self._checked()
        return events

    def _accept(self, sequence: Sequence, seq_id: int, token_id: int) -> Sampled:
        reason = sequence.accept(token_id)
        if reason is not None:
            self._finish(sequence, reason)
        elif sequence.state is _DRAINING and not sequence.num_sampling:
            self._draining.discard(sequence)
            sequence.move(SequenceState.WAITING)
            self._queue(sequence)
        return Sampled(sequence, seq_id, token_id, reason)

    def on_step_failed(self, step: Step, error: QuireError) -> abc.Sequence[Failed]:
        """The oldest step in flight computed nothing, and one of its sequences may be why. Returns who is given up."""
        self._take_failed(step)
        failed: list[Failed] = []
        live = [s for s, i in zip(step.sequences, step.seq_ids, strict=True) if self._is_of(s, i)]
        for sequence in live:
            if len(step.sequences) > 1:
                self._suspect(sequence)
            else:
                self._retry_alone(sequence, error, failed)
        self._checked()
        return failed

    def on_step_refused(self, step: Step, error: QuireError) -> abc.Sequence[Failed]:
        """The worker refused the oldest step in flight for its input, and has skipped it. Returns who is given up."""
        self._take_failed(step)
        sequences = dict(zip(step.seq_ids, step.sequences, strict=True))
        failed = self._blame(sequences, error)
        for seq_id, sequence in sequences.items():
            if self._is_of(sequence, seq_id):
                self._readmit(sequence)
        self._checked()
        return failed

    def on_plan_refused(self, plan: Plan, error: QuireError) -> abc.Sequence[Failed]:
        """cachemgr refused a whole plan for its input, and applied nothing. Returns who is given up."""
        failed = self._blame(plan.sequences, error)
        self._checked()
        return failed

    def _blame(self, sequences: abc.Mapping[int, Sequence], error: QuireError) -> list[Failed]:
        """Give up the sequence that a refusal names, or the only one; if it could be any of several, suspect them."""
        named = error.number("sequence_id", -1)
        culprits = [sequences[named]] if named in sequences else list(sequences.values())
        failed: list[Failed] = []
        for sequence in culprits:
            if sequence.state is SequenceState.FINISHED:
                continue
            if len(culprits) > 1:
                self._suspect(sequence)
            elif isinstance(error, InvalidRequest):
                self._fail(sequence, error, failed)
            else:
                self._retry_alone(sequence, error, failed)
        return failed

    def on_step_dropped(self, step: Step) -> None:
        """The oldest step in flight computed nothing because of one before it: its sequences are admitted again."""
        self._take_failed(step)
        for sequence, seq_id in zip(step.sequences, step.seq_ids, strict=True):
            if self._is_of(sequence, seq_id):
                self._readmit(sequence)
        self._checked()

    def _take_failed(self, step: Step) -> None:
        self._check_oldest(step)
        self._steps.popleft()
        self._counters.failed_steps += 1
        self._is_settling = True
        for later in (step, *self._steps):
            for seq_id, sequence in later.idle.items():
                if self._is_of(sequence, seq_id):
                    self._readmit(sequence)

    def _check_oldest(self, step: Step) -> None:
        if not self._steps or self._steps[0] is not step:
            raise ProtocolViolation("steps end in the order they were planned")

    def _is_of(self, sequence: Sequence, seq_id: int) -> bool:
        live = sequence.state in (SequenceState.RUNNING, SequenceState.DRAINING)
        return live and sequence.seq_id == seq_id

    def _suspect(self, sequence: Sequence) -> None:
        until = max(sequence.num_scheduled_tokens, len(sequence.token_ids))
        sequence.suspect_until = max(until, sequence.suspect_until or 0)
        self._readmit(sequence)
        if sequence not in self._suspects:
            insort(self._suspects, sequence, key=_by_rank)

    def _retry_alone(self, sequence: Sequence, error: QuireError, failed: list[Failed]) -> None:
        sequence.num_failures += 1
        if sequence.num_failures < self.limits.max_step_failures:
            self._suspect(sequence)
            return
        given_up = RequestFailed(
            f"given up after {sequence.num_failures} failed steps, the last one: {error}", metadata=error.metadata
        )
        given_up.__cause__ = error
        self._fail(sequence, given_up, failed)

    def _clear_suspects(self, step: Step) -> None:
        for sequence in step.sequences:
            until = sequence.suspect_until
            if until is not None and sequence.num_scheduled_tokens >= until:
                sequence.suspect_until = None
                sequence.num_failures = 0
                if sequence in self._suspects:
                    self._suspects.remove(sequence)

    # Moves between the collections; each sequence is in the one of its state.

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence out of the collection of its state; its blocks, if any, go with the next plan."""
        match sequence.state:
            case SequenceState.WAITING:
                self._unqueue(sequence)
            case SequenceState.RUNNING:
                self._running.remove(sequence)
                self._releases[_id_of(sequence)] = self._blocks_of(sequence)
            case SequenceState.DRAINING:
                self._draining.discard(sequence)
            case SequenceState.FOLLOWING:
                self._unfollow(sequence)
            case SequenceState.FINISHED:
                pass

    def _queue(self, sequence: Sequence) -> None:
        sequence.seq_id = None
        insort(self._waiting, sequence, key=_by_rank)
        if self._waiting[0] is sequence:
            self._admission_needs = 0  # that was about another one

    def _unqueue(self, sequence: Sequence) -> None:
        if self._waiting[0] is sequence:
            self._admission_needs = 0
        self._waiting.remove(sequence)

    def _wait(self, follower: Sequence) -> None:
        follower.move(SequenceState.WAITING)
        self._queue(follower)

    def _readmit(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self._leave_host(sequence)
        sequence.forget()
        self._queue(sequence)

    def _unfollow(self, child: Sequence) -> Sequence:
        """Returns whom it has followed."""
        parent = next(parent for parent, followers in self._followers.items() if child in followers)
        self._followers[parent].remove(child)
        if not self._followers[parent]:
            del self._followers[parent]
        return parent

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.state is SequenceState.FINISHED:
            return
        if sequence.state is _RUNNING:
            self._reserve_steps = _RESERVE_STEPS
            self._is_quota_short = False
            # The first in line asks again, and nobody before it: what it had to leave to others was more.
            self._admission_needs = min(self._admission_needs, 1)
        self._leave(sequence)
        self._leave_host(sequence)
        sequence.finish(reason)
        if sequence in self._suspects:
            self._suspects.remove(sequence)
        for follower in self._followers.pop(sequence, ()):
            self._wait(follower)

    def _fail(self, sequence: Sequence, error: QuireError, failed: list[Failed]) -> None:
        if sequence.state is not SequenceState.FINISHED:
            self._finish(sequence, FinishReason.FAILED)
            failed.append(Failed(sequence, error))

    def _blocks_of(self, sequence: Sequence) -> int:
        """Blocks that a sequence's release gives back, at most: shared ones stay."""
        num_tokens = max(len(sequence.token_ids), sequence.num_scheduled_tokens, sequence.num_host_tokens)
        return -(-num_tokens // self.limits.block_size)

    def _own_blocks_of(self, sequence: Sequence) -> int:
        """Of these, those that nobody else is known to have had."""
        return max(1, self._blocks_of(sequence) - sequence.num_shared_tokens // self.limits.block_size)

    # State as a value.

    def statistics(self) -> SchedulerStatistics:
        """Present numbers and counters."""
        return SchedulerStatistics(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_following=sum(map(len, self._followers.values())),
            num_draining=len(self._draining),
            num_offloaded=sum(sequence.host_id is not None for sequence in (*self._waiting, *self._draining)),
            num_steps_in_flight=len(self._steps),
            **{f.name: getattr(self._counters, f.name) for f in fields(self._counters)},
        )

    def _checked(self) -> None:
        if self._verify:
            self.check_invariants()

    def check_invariants(self) -> None:
        """Raises AssertionError if the collections and the sequences disagree. Cost: all sequences and steps."""
        following = [child for children in self._followers.values() for child in children]
        homes = [
            (SequenceState.WAITING, self._waiting),
            (SequenceState.RUNNING, self._running),
            (SequenceState.DRAINING, list(self._draining)),
            (SequenceState.FOLLOWING, following),
        ]
        everybody = [sequence for _, members in homes for sequence in members]
        _require(len(set(everybody)) == len(everybody), "a sequence is in one place")
        for state, members in homes:
            _require(all(s.state is state for s in members), f"only {state.value} sequences are {state.value}")
        for ordered in (self._waiting, self._running, self._suspects):
            _require(ordered == sorted(ordered, key=_by_rank), "queues are in order of rank")
        _require(set(self._suspects) <= set(everybody), "a suspect is alive")
        _require(all(parent in set(everybody) for parent in self._followers), "a parent of followers is alive")
        _require(len(self._running) <= self.limits.num_places, "the limit of running sequences holds")
        ids = [_id_of(sequence) for sequence in self._running]
        _require(len(set(ids)) == len(ids), "an id stands for one sequence")
        _require(not set(ids) & self._releases.keys(), "what runs is not released")
        _require(not set(ids) & self._offloads.keys(), "what runs does not leave for the host tier")
        _require(not self._offloads.keys() & self._releases.keys(), "what is kept in the host tier is not released")
        _require(all(s.host_id == i for i, s in self._offloads.items()), "who leaves knows under which id")
        for sequence in everybody:
            self._check_sequence(sequence)

    def _check_sequence(self, sequence: Sequence) -> None:
        awaited = sum(step.samplers.get(_id_or_none(sequence)) is sequence for step in self._steps)
        _require(sequence.num_sampling == awaited, "a token being sampled is awaited from one step")
        _require(sequence.num_scheduled_tokens <= sequence.num_tokens, "nothing is scheduled that does not exist")
        num_output = sequence.num_tokens - sequence.num_prompt_tokens
        _require(num_output <= sequence.max_tokens, "nothing is sampled beyond max_tokens")
        _require(sequence.host_id is None or sequence.state in _AWAY, "who is in the host tier is not in the pool")
        held = sequence.state in (SequenceState.RUNNING, SequenceState.DRAINING)
        _require(held == (sequence.seq_id is not None), "who has an id is in the pool")
        if sequence.state is SequenceState.DRAINING:
            _require(sequence.num_sampling > 0, "who drains has something to wait for")


def _id_of(sequence: Sequence) -> int:
    if sequence.seq_id is None:
        raise AssertionError("a sequence without an id was taken for one in the pool")
    return sequence.seq_id


def _id_or_none(sequence: Sequence) -> int:
    return -1 if sequence.seq_id is None else sequence.seq_id


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"broken invariant: {what}")
