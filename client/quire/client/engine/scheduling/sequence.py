"""One stream of tokens, as the client sees it. Pure.

Positions of a sequence, half-open ranges:

    [0, num_prompt_tokens)                    given by the caller
    [num_prompt_tokens, len(token_ids))       generated and known
    [len(token_ids), num_tokens)              being sampled by steps in flight: they count, their values are unknown
    [0, num_scheduled_tokens)                 KV computed, or will be by steps in flight
    [num_scheduled_tokens, num_tokens)        to be scheduled; never empty once the sequence runs
    the last num_untold_tokens of token_ids   chosen by the engine; sent to cachemgr with the next run
    [num_tokens, num_tokens + num_drafts)     guesses that a step in flight verifies; they do not count

A run that reaches num_tokens samples one more, so in steady state a sequence has one token to schedule, whether its
value is known or not. A beam has none between its outcome and the choice of the next beams.

A run with drafts computes the last token, which is known, and the drafts. It gives one token, and one more for each
draft that comes true. Until then it counts as a run of one token.
"""

from collections import abc
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

from quire.client.engine.caching import NO_CACHE_PARAMS, CacheOutcome, CacheParams, CacheUse
from quire.client.engine.prompt_logprobs import PromptLogprobs
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.scheduling.guessing import Guesses
from quire.client.engine.scheduling.layer_groups import BlockTables


class SequenceState(Enum):
    """A state in the life of a sequence."""

    FOLLOWING = "following"  # A further sample of a prompt that another sequence computes; will be forked from it.
    WAITING = "waiting"  # All tokens known, holds nothing, wants to be admitted.
    RUNNING = "running"  # Holds blocks under seq_id.
    DRAINING = "draining"  # Preempted with samples in flight: waits for their tokens, then for admission.
    POSTPONED = "postponed"  # Holds nothing, and is in no plan before the worker has its grammar and its mask.
    FINISHED = "finished"  # Has a finish_reason and gets no more tokens.


_F, _W, _R, _D, _P, _E = (
    SequenceState.FOLLOWING,
    SequenceState.WAITING,
    SequenceState.RUNNING,
    SequenceState.DRAINING,
    SequenceState.POSTPONED,
    SequenceState.FINISHED,
)
TRANSITIONS: abc.Mapping[SequenceState, frozenset[SequenceState]] = MappingProxyType(
    {
        _F: frozenset({_R, _W, _E}),  # forked · the parent has gone, or its fork was refused · cancelled
        # admitted · a beam that follows another one · its step was refused for now · cancelled or refused for good
        _W: frozenset({_R, _F, _P, _E}),
        _R: frozenset({_W, _D, _E}),  # preempted, reset or failed · preempted in flight · ended
        _D: frozenset({_W, _E}),  # its tokens are known · ended by one of them
        _P: frozenset({_W, _E}),  # resumed · cancelled
        _E: frozenset(),
    }
)


class FinishReason(Enum):
    """Why a sample ended."""

    STOP = "stop"  # An end token, a stop token or a stop string.
    LENGTH = "length"  # max_tokens.
    TIMEOUT = "timeout"  # The request's timeout_s.
    CANCELLED = "cancelled"  # The caller has cancelled it.
    FAILED = "failed"  # The request was refused or given up; the caller gets the error.


@dataclass(frozen=True, slots=True)
class Delivered:
    """Tokens of one sample that its caller has already received, from an engine that could not continue.

    has_ended  the sample has no further tokens
    """

    token_ids: tuple[int, ...] = ()
    has_ended: bool = False


@dataclass(slots=True, eq=False)
class BeamGroup:
    """The beams of one search. All have the same number of tokens. They are preempted, admitted and suspected together.

    width         the most beams there can be
    max_tokens    the most tokens that a beam may generate
    members       the beams that have not ended, the best first
    num_begun     all beams so far
    """

    width: int
    max_tokens: int
    members: list["Sequence"]
    num_begun: int = 1

    @property
    def leader(self) -> "Sequence":
        """The first beam in rank. It represents the group in the queue and among the suspects."""
        return min(self.members, key=lambda beam: beam.rank)

    @property
    def is_ready(self) -> bool:
        """True if the outcome of all beams is known."""
        return all(beam.top is not None for beam in self.members)

    @property
    def running(self) -> list["Sequence"]:
        """Beams that hold blocks."""
        return [beam for beam in self.members if beam.state is SequenceState.RUNNING]

    @property
    def num_places_kept(self) -> int:
        """Places that are kept for beams to come while some hold blocks."""
        num_running = len(self.running)
        return self.width - num_running if num_running else 0


@dataclass(slots=True, eq=False)
class BatchSteps:
    """The steps of the batch of decodes so far: they count for each of its members (decode_batch.py)."""

    count: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of one request, or one beam. Changed by the scheduler only, but for two fields."""

    request_id: int
    index: int
    arrival: tuple[int, int]
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    end_token_ids: frozenset[int]
    params: SamplingParams
    seed: int
    cache: CacheParams = NO_CACHE_PARAMS
    # For the request's prompt, if it asks for them; shared by its samples.
    prompt_logprobs: PromptLogprobs | None = None
    state: SequenceState = SequenceState.WAITING
    finish_reason: FinishReason | None = None
    # The id of its present incarnation in the pool; a new one each time it is admitted or forked, None without one.
    seq_id: int | None = None
    _num_scheduled: int = 0
    # Of these, found in the pool when it began, or shared with other samples of its prompt: others computed them, too.
    num_shared_tokens: int = 0
    _num_sampling: int = 0
    # The steps that count in these two numbers while it is a member of the batch; None if it is not.
    batch: BatchSteps | None = None
    # The id under which it is in the host tier or on its way there, and the tokens that need not be computed again.
    host_id: int | None = None
    num_host_tokens: int = 0
    # Of the prompt at the first admission; None before that, and for forked samples.
    cache_outcome: CacheOutcome | None = None
    # Plans that refused it because another client computes its next block.
    num_waits_for_prefix: int = 0
    # True if it ever was in a pool: if it is admitted again, its tokens do not count as a new prompt.
    was_admitted: bool = False
    # True if the worker has this incarnation's sampling parameters.
    sampling_sent: bool = False
    # True if cachemgr was told that it waits.
    is_expected: bool = False
    # A step with it and others failed: it runs alone until this many tokens are computed.
    suspect_until: int | None = None
    # Failures of steps it was alone in.
    num_failures: int = 0
    # The order in which sequences are served: the policy's rank, then arrival.
    rank: tuple[int, ...] = ()
    # While it follows another one: the tokens that it shares with it, and is forked with.
    num_forked_tokens: int = 0
    num_untold_tokens: int = 0
    # For a beam: the search's others, and the most probable next tokens once they are known.
    group: BeamGroup | None = None
    top: abc.Sequence[tuple[int, float]] | None = None
    # Its drafters; None if it has no drafts.
    guesses: Guesses | None = None
    # It is in no plan while a token of it is being sampled, so that drafts may follow that token.
    is_held: bool = False
    # Drafts that a step in flight verifies.
    num_drafts: int = 0
    # Set by the delivery: its tokens are delivered when it ends; the time of its last token, by time.perf_counter().
    is_silent: bool = False
    last_token_s: float = 0.0

    @property
    def priority(self) -> int:
        """The priority of its request."""
        return self.params.priority

    @property
    def tenant(self) -> str:
        """The tenant that its request is for."""
        return self.params.tenant

    @property
    def cache_params(self) -> CacheParams:
        """The parameters of its next admission. It computes all tokens until its prompt's logprobs are known."""
        awaits_logprobs = self.prompt_logprobs is not None and not self.prompt_logprobs.is_complete
        if awaits_logprobs and self.cache.reads_cache:
            return replace(self.cache, cache_use=CacheUse.WRITE_ONLY)
        return self.cache

    @property
    def num_sent_ids(self) -> int:
        """The most token ids in its sampling parameters for a worker."""
        tells_tokens = self.params.has_penalty or self.params.grammar is not None
        num_seen = len(self.token_ids) if tells_tokens else 0
        return self.params.num_sent_ids + num_seen

    @property
    def num_reserved_tokens(self) -> int:
        """Tokens that are computed of it at most, if these are to be guaranteed; else 0. The last is not computed."""
        return self.num_prompt_tokens + self.max_tokens - 1 if self.cache.reserve else 0

    @property
    def unit(self) -> "Sequence | BeamGroup":
        """Return the unit that is preempted, admitted and suspected together."""
        return self.group or self

    @property
    def num_places(self) -> int:
        """Places that its admission takes: those of the beams to come, too."""
        return 1 if self.group is None else self.group.width

    @property
    def is_suspect(self) -> bool:
        """True while it runs alone, because a step with it has failed."""
        return self.suspect_until is not None

    def num_blocks(self, tables: BlockTables, *, num_shared: int = 0) -> int:
        """Blocks that its release frees, at most: shared ones stay. Without those of num_shared tokens."""
        num_scheduled = max(self.num_scheduled_tokens + self.num_drafts, self.num_host_tokens)
        return tables.num_blocks(max(len(self.token_ids), num_scheduled), num_scheduled, num_shared=num_shared)

    def num_own_blocks(self, tables: BlockTables) -> int:
        """Blocks of these that no other sequence is known to have had."""
        return max(1, self.num_blocks(tables, num_shared=self.num_shared_tokens))

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens with KV, computed or to be computed by steps in flight."""
        return self._num_scheduled if self.batch is None else self._num_scheduled + self.batch.count

    @property
    def num_sampling(self) -> int:
        """Tokens that steps in flight sample."""
        return self._num_sampling if self.batch is None else self.num_scheduled_tokens + 1 - len(self.token_ids)

    @property
    def num_left(self) -> int:
        """Tokens that it may still get, without those being sampled."""
        return self.max_tokens + self.num_prompt_tokens - self.num_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens known and being sampled."""
        return len(self.token_ids) + self.num_sampling

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the tokens generated and known."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_schedulable_tokens(self) -> int:
        """Tokens a next run may compute: 0 once the last token it may have is being sampled, or while it is held."""
        if self.batch is not None:
            return 1
        if self.is_held and self._num_sampling:
            return 0
        num_tokens = len(self.token_ids) + self._num_sampling
        if num_tokens - self.num_prompt_tokens >= self.max_tokens:
            return 0
        return num_tokens - self._num_scheduled

    def move(self, state: SequenceState) -> None:
        """Go to another state. Raises ValueError if the table has no such transition."""
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"sequence {self.arrival}: {self.state.value} -> {state.value}")
        if self.state is SequenceState.FOLLOWING:
            self.token_ids = self.token_ids.copy()  # all samples that follow share the prompt's list
        self.state = state

    def begin(self, seq_id: int, *, num_scheduled_tokens: int, num_shared_tokens: int | None = None) -> None:
        """Enter the pool with this many tokens that need not be computed: found there, unless said otherwise.

        Under a fresh id, or that under which it was in the host tier.
        """
        self.move(SequenceState.RUNNING)
        self.seq_id = seq_id
        self._num_scheduled = num_scheduled_tokens
        self.num_shared_tokens = num_scheduled_tokens if num_shared_tokens is None else num_shared_tokens
        self.host_id, self.num_host_tokens = None, 0
        self.num_untold_tokens = 0
        self.sampling_sent = False
        self.was_admitted = True
        self.is_expected = False
        self.is_held = False

    def schedule(self, num_tokens: int) -> bool:
        """Count a run of this many tokens as planned. Returns whether it samples. For one outside the batch."""
        self._num_scheduled += num_tokens
        self.num_untold_tokens = 0
        self.is_held = False
        samples = self._num_scheduled == len(self.token_ids) + self._num_sampling
        self._num_sampling += samples
        return samples

    def schedule_drafts(self, num_drafts: int) -> None:
        """Count a run of its last token and so many drafts as planned."""
        self.schedule(1)
        self.is_held, self.num_drafts = True, num_drafts

    def join(self, batch: BatchSteps) -> None:
        """Become a member of the batch with these steps."""
        self._num_scheduled -= batch.count
        self.batch = batch

    def leave(self) -> None:
        """Be a member of the batch no more."""
        self._num_scheduled, self._num_sampling, self.batch = self.num_scheduled_tokens, self.num_sampling, None

    def accept(self, token_id: int) -> FinishReason | None:
        """Take the oldest token being sampled. Returns the reason if it ends the sequence, None if not."""
        if self.batch is None:
            self._num_sampling -= 1
            if self.group is not None:
                return None  # the tokens of its successors are chosen when the outcome of all beams is known
        token_ids = self.token_ids
        token_ids.append(token_id)
        if token_id in self.end_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(token_ids) - self.num_prompt_tokens >= self.max_tokens else None

    def accept_all(self, token_ids: abc.Sequence[int]) -> tuple[int, FinishReason | None]:
        """Take the tokens of a run with drafts, of which all but the last were drafts. Those behind an end are dropped.

        Returns the tokens taken, and the reason if the last of them ends the sequence.
        """
        self.num_drafts = 0
        self._num_sampling += len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            reason = self.accept(token_id)
            if index and self.state is SequenceState.RUNNING:
                self._num_scheduled += 1
            if reason is not None:
                self._num_sampling = 0
                return index + 1, reason
        return len(token_ids), None

    def choose(self, token_id: int) -> None:
        """Continue a beam with a known outcome with this token. It may get one more."""
        self.token_ids.append(token_id)
        self.num_untold_tokens = 1
        self.max_tokens += 1
        self.top = None

    def follow(self, leader: "Sequence") -> None:
        """Wait to be forked from another beam, at the tokens that both have."""
        self.move(SequenceState.FOLLOWING)
        pairs = zip(self.token_ids, leader.token_ids, strict=True)
        self.num_forked_tokens = next(index for index, (own, other) in enumerate(pairs) if own != other)

    def preempt(self, *, is_offloaded: bool = False) -> None:
        """Leave the pool, perhaps for the host tier; tokens being sampled are still awaited, under the id it had."""
        self.move(SequenceState.DRAINING if self._num_sampling else SequenceState.WAITING)
        if is_offloaded:
            self.host_id, self.num_host_tokens = self.seq_id, self._num_scheduled
        self._num_scheduled = 0
        self.is_held = False

    def reset(self) -> None:
        """Leave the pool and drop the tokens being sampled; known tokens stay. For an unfinished sequence."""
        if self.state is not SequenceState.WAITING:
            self.move(SequenceState.WAITING)
        self.seq_id = None
        self.host_id, self.num_host_tokens = None, 0
        self.is_expected = False
        self._num_scheduled = self._num_sampling = self.num_drafts = 0
        self.is_held = False
        self.batch = None
        self.num_untold_tokens = 0
        self.top = None

    def finish(self, reason: FinishReason) -> None:
        """End."""
        self.move(SequenceState.FINISHED)
        self.finish_reason = reason
