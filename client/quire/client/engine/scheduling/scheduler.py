"""The life of sequences from request to end: waiting, running, preempted, ended. Pure: no I/O, clock or randomness.

    schedule() -> Plan               the next step's items; changes nothing
    on_planned(plan, outcome)        cachemgr's answer; from here on the step is in flight
    on_step_done(step, ...)          its tokens; steps end in the order they were planned
    on_step_failed / on_step_dropped its sequences are admitted again
    on_plan_refused / on_step_refused  the same, without the sequence with the refused input
    resume                          queues a sequence again that on_step_refused postponed
    branch                          chooses the beams of a search that continue, and their tokens
    end / reset_all                  from outside, at any point between those calls

The policy (policy.py) decides rank, victim, reserve and admission. The collections are in queues.py, the next plan is
made in drafting.py, and the known room in the pool is in room.py. docs/architecture.md describes the default
policy.

Progress, with any policy. Running sequences get tokens and blocks in order of rank, decodes before forks before chunks
of prompts. A running sequence that lacks blocks, which neither retired blocks nor releases will cover, preempts some
below it in rank; if the policy names none, it waits and keeps its blocks. So the first in rank is never preempted for
another one of this client and gets every block that this client holds, so it ends; then so does the next one.

A preempted sequence returns by re-admission or, if the pool has a host tier with room and copying there and back is
measured to be cheaper than computing again, by a restore. Both share one queue.

The beams of one search are a group. No beam runs ahead, because the next tokens are chosen when the outcome of all
beams is known. Then the first successor of a beam continues in its table, and the others are forked from it. A group is
preempted, admitted and suspected as a whole. Its first beam waits in the queue, and the others are forked from it
again. A running group keeps places for all of its beams.

Lack of quota: cachemgr keeps no reserve of it. So after a preemption for quota, and until a running sequence has
ended, no sequence is admitted beside others.

Bounds. A decode waits for prompts no longer than one step of max_step_tokens, because every step has a token of every
running sequence that decodes. A prompt waits for decodes no longer either: they have at most as many places as leave a
quarter of max_step_tokens to prompts, in every step.

A step that fails makes its sequences suspects. A suspect runs alone until it has passed the place of the failure; only
failures of a step that a sequence had to itself count against it. So one request that breaks the model cannot take the
others with it. A plan or a step that is refused for its input names the sequence, which fails; if it names none, its
sequences are suspects. After a failure nothing is planned until the steps in flight have ended (flight.py).

cachemgr may learn of a failure before this client. Then a run begins too early. That step is void: it is skipped, and
its sequences are admitted again.
"""

from collections import abc
from dataclasses import dataclass, fields
from itertools import islice

from quire.client.engine.caching import NO_CACHE_PARAMS, CacheParams
from quire.client.engine.prompt_logprobs import PromptLogprobs
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.scheduling.beam_search import BeamSearchParams, Heir
from quire.client.engine.scheduling.drafting import Draft
from quire.client.engine.scheduling.flight import Flight
from quire.client.engine.scheduling.plans import Failed, Plan, PlanItem, PlanOutcome, Sampled, SchedulerLimits, Step
from quire.client.engine.scheduling.policy import Policy, PoolView, PriorityPolicy
from quire.client.engine.scheduling.queues import Queues, by_rank, id_of, require
from quire.client.engine.scheduling.room import NO_BLOCKS, Awaited, Pressure, Room
from quire.client.engine.scheduling.sequence import BeamGroup, Delivered, FinishReason, Sequence, SequenceState
from quire.client.engine.scheduling.tier import TierCosts
from quire.client.errors import InvalidRequest, OutOfRoom, ProtocolViolation, QuireError, RequestFailed

_MAX_SEQ_ID = 2**31
_RUNNING = SequenceState.RUNNING  # in loops over all sequences of a step, where the enum's own lookup would show
_DRAINING = SequenceState.DRAINING

Refusals = abc.Mapping[tuple[PlanItem, int], QuireError]


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


class Scheduler:
    """The state behind schedule(). One plan at a time: on_planned or a failed call comes before the next schedule()."""

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        policy: Policy | None = None,
        by_tenant: bool = False,
        verify: bool = False,
    ) -> None:
        """policy None is PriorityPolicy. With verify, check_invariants() runs after each change.

        by_tenant: the tenants of requests are cachemgr's too, and a quota is the tenant's, not this client's.
        """
        self.limits = limits
        self.costs = TierCosts()
        self._policy = policy or PriorityPolicy()
        self._by_tenant = by_tenant
        self._verify = verify
        self._queues = Queues(limits.tables)
        self._room = Room.of_empty_pool(limits)
        self._flight = Flight()
        self._next_request = 0
        self._next_seq_id = 0
        self._counters = _Counters()

    # External events.

    @property
    def has_work(self) -> bool:
        """True if schedule() or a step in flight still has something to do."""
        return bool(self._flight) or not self._queues.are_empty

    def add(
        self,
        prompt_token_ids: abc.Sequence[int],
        params: SamplingParams,
        *,
        end_token_ids: abc.Iterable[int],
        seed: int,
        cache: CacheParams = NO_CACHE_PARAMS,
        delivered: abc.Sequence[Delivered] | None = None,
    ) -> list[Sequence]:
        """Take a request; returns its params.n sequences. Sample i has seed + i, in 64 bits.

        With delivered, each sample that has not ended continues after its tokens; the others have no sequence.

        Raises InvalidRequest if check() does; then no state has changed.
        """
        max_tokens = self.check(prompt_token_ids, params, delivered)
        ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= frozenset(end_token_ids)
        request_id = self._next_request
        self._next_request += 1
        prompt = list(prompt_token_ids)
        num_top = params.prompt_logprobs
        # They came with the first token that was delivered.
        logprobs = None if num_top is None or delivered is not None else PromptLogprobs(prompt, num_top=num_top)
        known = [[*prompt, *sample.token_ids] for sample in delivered or ()]
        sequences = [
            Sequence(
                request_id=request_id,
                index=index,
                arrival=(request_id, index),
                token_ids=known[index] if known else prompt if index else prompt.copy(),
                num_prompt_tokens=len(prompt_token_ids),
                max_tokens=max_tokens,
                end_token_ids=ends,
                params=params,
                prompt_logprobs=logprobs,
                cache=cache,
                seed=(seed + index + 2**63) % 2**64 - 2**63,
                state=SequenceState.FOLLOWING if index and not known else SequenceState.WAITING,
                num_forked_tokens=len(prompt),
                was_admitted=bool(known),
            )
            for index in range(params.n)
            if delivered is None or not delivered[index].has_ended
        ]
        self._enter(*([sequence] for sequence in sequences) if known else (sequences,))
        return sequences

    def _enter(self, *groups: list[Sequence]) -> None:
        """Queue sequences. Those of a group share a prompt and follow its first sequence."""
        view = self._view()
        for sequences in groups:
            for sequence in sequences:
                sequence.rank = (*self._policy.rank(sequence, view), *sequence.arrival)
        for sequences in groups:
            self._queues.add(sequences)
        self._checked()

    def add_beams(
        self,
        prompt_token_ids: abc.Sequence[int],
        params: BeamSearchParams,
        *,
        end_token_ids: abc.Set[int],
        cache: CacheParams = NO_CACHE_PARAMS,
    ) -> BeamGroup:
        """Take a beam search. Returns its group with one beam, the prompt. A beam ends with one of end_token_ids.

        Raises InvalidRequest if check_beams() does; then no state has changed.
        """
        max_tokens = self.check_beams(prompt_token_ids, params, cache)
        request_id = self._next_request
        self._next_request += 1
        group = BeamGroup(params.beam_width, max_tokens, [])
        beam = Sequence(
            request_id=request_id,
            index=0,
            arrival=(request_id, 0),
            token_ids=list(prompt_token_ids),
            num_prompt_tokens=len(prompt_token_ids),
            max_tokens=1,  # one more than it has: its next step depends on the other beams
            end_token_ids=frozenset(),
            params=params.sampling(num_logprobs=params.beam_width + len(end_token_ids)),
            cache=cache,
            seed=0,
            group=group,
        )
        group.members.append(beam)
        self._enter([beam])
        return group

    def check(
        self, token_ids: abc.Sequence[int], params: SamplingParams, delivered: abc.Sequence[Delivered] | None = None
    ) -> int:
        """The most tokens a request may generate, those delivered counted.

        Raises InvalidRequest if the prompt is empty, if it or a parameter has a token out of range, or if it does not
        fit, together with max_tokens, into the model or the pool; or if delivered is not what such a request gives out.
        """
        max_tokens = self._check_size(token_ids, params)
        if delivered is not None:
            self._check_delivered(delivered, params.n, max_tokens)
        return max_tokens

    def _check_delivered(self, delivered: abc.Sequence[Delivered], num_samples: int, max_tokens: int) -> None:
        if len(delivered) != num_samples:
            raise InvalidRequest.of_field("delivered", len(delivered), f"one for each of {num_samples} samples")
        if all(sample.has_ended for sample in delivered):
            raise InvalidRequest.of_field("delivered", "all samples have ended", "at least one that has not")
        for sample in delivered:
            if len(sample.token_ids) >= max_tokens and not sample.has_ended:
                allowed = f"fewer than {max_tokens} tokens of a sample that has not ended"
                raise InvalidRequest.of_field("delivered", len(sample.token_ids), allowed)
            self._check_token_ids("delivered", sample.token_ids)

    def _check_token_ids(self, field: str, token_ids: abc.Collection[int]) -> None:
        for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
            if not 0 <= token_id < self.limits.vocabulary_size:
                allowed = f"token ids from 0 to {self.limits.vocabulary_size - 1}"
                raise InvalidRequest.of_field(field, token_id, allowed, reason="TOKEN_OUT_OF_RANGE")

    def _check_size(self, token_ids: abc.Sequence[int], params: SamplingParams) -> int:
        num_tokens, limit = len(token_ids), self.limits.max_tokens_per_sequence
        if not num_tokens:
            raise InvalidRequest.of_field("prompt", 0, "at least 1 token", reason="EMPTY_PROMPT")
        for field, given in (("prompt", token_ids), *params.token_ids_by_field()):
            self._check_token_ids(field, given)
        limiter = "model's context" if limit == self.limits.max_sequence_tokens else "pool's blocks"
        if num_tokens >= limit:
            allowed = f"fewer than {limit} tokens, by the {limiter}"
            raise InvalidRequest.of_field("prompt", num_tokens, allowed, reason="SEQUENCE_TOO_LONG")
        if params.max_tokens is None:
            return limit - num_tokens
        if num_tokens + params.max_tokens > limit:
            allowed = f"at most {limit - num_tokens} after {num_tokens} tokens, by the {limiter}"
            raise InvalidRequest.of_field("max_tokens", params.max_tokens, allowed, reason="SEQUENCE_TOO_LONG")
        return params.max_tokens

    def check_beams(self, token_ids: abc.Sequence[int], params: BeamSearchParams, cache: CacheParams) -> int:
        """Return the most tokens that a beam may generate.

        Raises InvalidRequest if check() does, and if beam_width beams do not fit into the pool together.
        """
        limits, width = self.limits, params.beam_width
        max_tokens = self.check(token_ids, params.sampling(num_logprobs=0))
        if limits.has_recurrent_state:
            limit = "no beam search with this model: it keeps a state per sequence"
            raise InvalidRequest.of_field("beam_width", width, limit)
        if cache.reserve:
            raise InvalidRequest.of_field("reserve", True, "False with beams, which are best effort")
        if width > limits.num_places:
            limit = f"at most {limits.num_places}, the sequences that run at once"
            raise InvalidRequest.of_field("beam_width", width, limit)
        # The beams share the blocks before the one with the prompt's last token, which each computes again. A beam that
        # is admitted apart may share none.
        shares = cache.reads_cache and not limits.tables.has_windows
        num_each = limits.tables.max_tokens(
            limits.num_blocks,
            at_most=limits.max_sequence_tokens,
            num_shared=len(token_ids) - 1 if shares else 0,
            num_sequences=width,
        )
        most = num_each - len(token_ids)
        if params.max_tokens is None and most >= 1:
            return min(max_tokens, most)
        if max_tokens > most:
            allowed = f"at most {max(0, most)} with {width} beams after {len(token_ids)} tokens, by the pool's blocks"
            raise InvalidRequest.of_field("max_tokens", max_tokens, allowed, reason="SEQUENCE_TOO_LONG")
        return max_tokens

    def take_top(self, beam: Sequence, top: abc.Sequence[tuple[int, float]]) -> None:
        """Take the result of a beam after its step: its most probable next tokens."""
        beam.top = top

    def branch(self, group: BeamGroup, heirs: abc.Sequence[Heir]) -> None:
        """Continue a group with these beams, the best first. A beam without an heir ends."""
        parents = list(group.members)
        firsts = {heir.parent: heir for heir in reversed(heirs)}
        for index, parent in enumerate(parents):
            if index not in firsts:
                self._finish(parent, FinishReason.CANCELLED)
        further = {
            heir: self._child_of(parents[heir.parent], heir) for heir in heirs if heir is not firsts[heir.parent]
        }
        for index, heir in firsts.items():
            parents[index].choose(heir.token_id)
        group.members[:] = [further.get(heir) or parents[heir.parent] for heir in heirs]
        for heir, child in further.items():
            self._queues.follow(child, parents[heir.parent])
        self._checked()

    def _child_of(self, parent: Sequence, heir: Heir) -> Sequence:
        """Make a new beam, to be forked from its parent before the parent's next step."""
        group = parent.group
        if group is None:
            raise AssertionError("only beams have heirs")
        group.num_begun += 1
        arrival = (parent.request_id, group.num_begun - 1)
        return Sequence(
            request_id=parent.request_id,
            index=arrival[1],
            arrival=arrival,
            token_ids=[*parent.token_ids, heir.token_id],
            num_prompt_tokens=parent.num_prompt_tokens,
            max_tokens=parent.max_tokens + 1,
            end_token_ids=parent.end_token_ids,
            params=parent.params,
            seed=parent.seed,
            cache=parent.cache,
            state=SequenceState.FOLLOWING,
            num_forked_tokens=len(parent.token_ids),
            num_shared_tokens=parent.num_shared_tokens,
            rank=(*parent.rank[: -len(arrival)], *arrival),
            group=group,
        )

    def end(self, sequences: abc.Iterable[Sequence], reason: FinishReason) -> None:
        """End these now; their blocks are released with the next plan. Those that have ended are left alone."""
        for sequence in sorted(sequences, key=by_rank, reverse=True):
            # Last first: a parent that ends would only send its followers to the queue.
            self._finish(sequence, reason)
        self._checked()

    def set_limits(self, limits: SchedulerLimits) -> None:
        """Another pool, or a new epoch. Only while nothing runs; what does not fit any more is refused by cachemgr."""
        if self._queues.running or self._queues.draining:
            raise ValueError("limits change only while nothing runs")
        self.limits = limits
        self._queues.tables = limits.tables
        self._room = Room.of_empty_pool(limits)

    @property
    def postponed(self) -> abc.Sequence[Sequence]:
        """Sequences that are in no plan: the worker had no room for their input to a step."""
        return tuple(self._queues.postponed)

    def resume(self, sequence: Sequence) -> None:
        """Let a postponed sequence wait for its admission again. One that has ended is left alone."""
        if sequence.state is SequenceState.POSTPONED:
            self._queues.resume(sequence)
            self._checked()

    def reset_all(self) -> None:
        """The pool has forgotten everything: all that ran wait with their known tokens; steps in flight are void."""
        self._counters.resets += 1
        self._flight.clear()
        self._queues.forget_pool()
        self._room = Room.of_empty_pool(self.limits)
        self._checked()

    # Planning of the next step.

    def schedule(self) -> Plan:
        """The next plan; empty if nothing can be done before a step in flight ends. Changes no sequence."""
        if not self._flight.may_plan():
            return Plan()
        queues = self._queues
        view, by_tenant = self._view(), self._by_tenant
        draft = Draft(self.limits, queues, self._room, self._policy, view, fresh_id=self._fresh_id, by_tenant=by_tenant)
        if not queues.suspects:
            # Beams of groups that run hold places and blocks: nothing is admitted before them.
            is_open = bool(draft.line) and not queues.apart and not self._is_line_blocked(draft.line[0])
            draft.add_running(draft.line[0] if is_open else None)
            if is_open:
                draft.add_newcomers()
            draft.expect_line()
        elif not self._flight:  # alone means alone: a failure must have one possible cause
            draft.add_alone(queues.suspects[0])
        releases = islice(queues.releases, self.limits.max_running_sequences)
        return draft.plan(release_ids=releases, offload_ids=queues.offloads)

    def _view(self) -> PoolView:
        return PoolView(self.limits, self._queues.running, self._room.starved, self._room.pressure.num_plans)

    def _is_line_blocked(self, first: Sequence) -> bool:
        """Return True if the first in the queue was refused, and no block has become free since then."""
        if not self._queues.running:
            return False
        if self._room.pressure.is_by_quota and self._victim_for(first, 1) is None:
            return True
        available = self._coming(self._room.blocks.free + self._room.blocks.cached)
        return available < self._room.blocks_awaited_by(first)

    def _fresh_id(self) -> int:
        self._next_seq_id = (self._next_seq_id + 1) % _MAX_SEQ_ID
        return self._next_seq_id

    # cachemgr's answers.

    def on_planned(self, plan: Plan, outcome: PlanOutcome) -> Step:
        """Take the answer to the plan that schedule() returned last. Returns the step, now in flight.

        Raises ProtocolViolation if the answer does not fit the plan; then only reset_all() makes sense.
        """
        refused = {(refusal.item, refusal.seq_id): refusal.error for refusal in outcome.refusals}
        failed: list[Failed] = []
        self._counters.planned_steps += 1
        self._counters.refusals += len(refused)
        self._room.blocks, self._room.num_free_host_blocks = outcome.blocks, outcome.num_free_host_blocks
        for sequence in plan.expected:
            sequence.is_expected = True
        self._take_releases(plan, refused)
        self._begin_forks(plan, refused, failed)
        if plan.restore_ids or plan.admissions:
            if not self._queues.apart:
                self._room.awaited = None
            self._begin_restores(plan, outcome, refused)
            self._begin_admissions(plan, outcome, refused, failed)
        step = self._step_of(plan, outcome, failed)
        self._flight.begin(step)
        self._refuse_extends(plan, refused, failed)
        if plan.asks_to_compute:
            self._room.num_stalls = 0 if outcome.run_ids else self._room.num_stalls + 1
            if outcome.run_ids and not any(error.reason in NO_BLOCKS for error in refused.values()):
                self._room.lengthen_chunks(self.limits)
        self._yield_place()
        self._checked()
        return step

    def _take_releases(self, plan: Plan, refused: Refusals) -> None:
        for seq_id in plan.release_ids:
            self._queues.releases.pop(seq_id, None)
            self._queues.expected_back_s.pop(seq_id, None)
        for seq_id in plan.offload_ids:
            is_refused = (PlanItem.OFFLOAD, seq_id) in refused
            self._counters.offloads += not is_refused
            sequence = self._queues.offloads.get(seq_id)
            if sequence is None:
                continue  # it ended while the plan was under way
            if is_refused:
                self._queues.leave_host(sequence)
            else:
                del self._queues.offloads[seq_id]

    def _begin_forks(self, plan: Plan, refused: Refusals, failed: list[Failed]) -> None:
        for fork in plan.forks:
            for child_id in fork.child_ids:
                child = plan.sequences[child_id]
                error = refused.get((PlanItem.FORK, child_id))
                accepted = error is None
                if child.group is not None and error is not None:
                    self._keep_following(child, error, failed)
                    continue
                if child.state is SequenceState.FOLLOWING:
                    parent = self._queues.stop_following(child)
                    if accepted and child.group is None:
                        parent.num_shared_tokens = max(parent.num_shared_tokens, fork.num_tokens - 1)
                    elif not accepted:
                        self._queues.wait_alone(child)  # an ordinary admission; the prompt is in the cache
                # Otherwise the parent, or the child itself, ended while the plan was under way.
                num_shared = None if child.group is None else min(child.num_shared_tokens, fork.num_tokens - 1)
                num_tokens = fork.num_tokens - 1
                if accepted and self._begin(
                    child, child_id, num_tokens=num_tokens, num_shared_tokens=num_shared, num_blocks=1
                ):
                    child.num_untold_tokens = len(child.token_ids) - fork.num_tokens
                    self._counters.forks += 1

    def _keep_following(self, beam: Sequence, error: QuireError, failed: list[Failed]) -> None:
        """A beam's fork was refused: a later plan tries again, since a group has one place in the queue.

        If a window at the fork's position is gone, every later plan would be refused too. Then the beam is admitted.
        """
        if beam.state is not SequenceState.FOLLOWING or isinstance(error, OutOfRoom):
            return
        if error.reason != "POSITION_OUT_OF_RANGE":
            self._retry_alone(beam, error, failed)
        elif beam.group is not None and beam.group.running:
            self._queues.wait_apart(beam)

    def _begin(
        self,
        sequence: Sequence,
        seq_id: int,
        *,
        num_tokens: int,
        num_shared_tokens: int | None = None,
        num_blocks: int | None = None,
    ) -> bool:
        """Let a sequence run under the id it got; if it ended while the plan was under way, release the id."""
        if sequence.state not in (SequenceState.WAITING, SequenceState.FOLLOWING):
            self._queues.releases[seq_id] = self._queues.blocks_of(sequence) if num_blocks is None else num_blocks
            self._queues.hint_return(sequence, seq_id)
            return False
        self._queues.begin(sequence, seq_id, num_tokens=num_tokens, num_shared_tokens=num_shared_tokens)
        return True

    def _begin_admissions(self, plan: Plan, outcome: PlanOutcome, refused: Refusals, failed: list[Failed]) -> None:
        cached = dict(zip(outcome.admitted_ids, outcome.cached_counts, strict=True))
        for admission in plan.admissions:
            sequence, seq_id = plan.sequences[admission.seq_id], admission.seq_id
            if seq_id in cached:
                self._begin_admitted(sequence, seq_id, cached[seq_id])
            elif (error := refused.get((PlanItem.ADMISSION, seq_id))) is None:
                raise ProtocolViolation("an admission was neither accepted nor refused")
            elif not isinstance(error, OutOfRoom):
                self._fail(sequence, error, failed)
            elif error.reason in NO_BLOCKS and sequence not in self._queues.apart:
                self._await_blocks(sequence, error, plan, outcome)

    def _begin_admitted(self, sequence: Sequence, seq_id: int, num_cached: int) -> None:
        num_tokens = len(sequence.token_ids)
        self._counters.admissions += 1
        self._counters.admitted_tokens += num_tokens
        self._counters.cached_tokens += num_cached
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = num_cached
        if sequence.cache_params.reads_cache:
            self._room.observe_admission(num_tokens=num_tokens, num_cached=num_cached)
        self._room.short_tenants.discard(sequence.tenant)
        if sequence.state is SequenceState.FOLLOWING:
            # The group of this beam was preempted while the plan was under way.
            self._queues.releases[seq_id] = self._queues.blocks_of(sequence)
        else:
            self._begin(sequence, seq_id, num_tokens=num_cached)

    def _begin_restores(self, plan: Plan, outcome: PlanOutcome, refused: Refusals) -> None:
        restored = dict(zip(outcome.restored_ids, outcome.restored_counts, strict=True))
        for seq_id in plan.restore_ids:
            sequence = plan.sequences[seq_id]
            if seq_id in restored:
                num_tokens = restored[seq_id]
                self._counters.restores += 1
                self._counters.restored_tokens += num_tokens
                num_shared = min(sequence.num_shared_tokens, num_tokens)
                self._room.short_tenants.discard(sequence.tenant)
                self._begin(sequence, seq_id, num_tokens=num_tokens, num_shared_tokens=num_shared)
            elif (error := refused.get((PlanItem.RESTORE, seq_id))) is None:
                raise ProtocolViolation("a restore was neither accepted nor refused")
            elif error.reason in NO_BLOCKS:
                self._await_blocks(sequence, error, plan, outcome)
            elif not isinstance(error, OutOfRoom):
                self._queues.leave_host(sequence)  # it can be admitted like any other

    def _step_of(self, plan: Plan, outcome: PlanOutcome, failed: abc.Sequence[Failed]) -> Step:
        given = set(outcome.given_run_indexes)
        sequences: list[Sequence] = []
        introduced: list[int] = []
        samplers: dict[int, Sequence] = {}
        is_void = False
        runs = zip(outcome.run_ids, outcome.run_starts, outcome.run_counts, strict=True)
        for index, (seq_id, start, count) in enumerate(runs):
            sequence = plan.sequences.get(seq_id)
            if sequence is None:
                raise ProtocolViolation("a run of a sequence that was not asked for")
            sequences.append(sequence)
            if sequence.seq_id != seq_id or sequence.state is not _RUNNING:
                continue  # it ended during the plan: it runs, and its result is dropped
            if start < sequence.num_scheduled_tokens and self._flight.may_follow_failure:
                is_void = True
                continue
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
            is_void=is_void,
        )

    def _idle_of(self, plan: Plan, outcome: PlanOutcome) -> dict[int, Sequence]:
        forked = (child_id for fork in plan.forks for child_id in fork.child_ids)
        running = set(outcome.run_ids) if plan.forks else set()
        return {child_id: plan.sequences[child_id] for child_id in forked if child_id not in running}

    def _refuse_extends(self, plan: Plan, refused: Refusals, failed: list[Failed]) -> None:
        needs: dict[Sequence, QuireError] = {}
        for (item, seq_id), error in refused.items():
            sequence = plan.sequences.get(seq_id)
            live = sequence is not None and sequence.seq_id == seq_id and sequence.state is SequenceState.RUNNING
            if item is PlanItem.ADMISSION and sequence in self._queues.apart and error.reason in NO_BLOCKS:
                needs[sequence] = error
            if item is not PlanItem.EXTEND or sequence is None or not live:
                continue
            if error.reason in NO_BLOCKS:
                needs[sequence] = error
            elif error.reason in ("SEQUENCE_NOT_FOUND", "NOTHING_TO_COMPUTE"):
                self._retry_alone(sequence, error, failed)
            else:
                self._fail(sequence, error, failed)
        by_quota = {sequence: error for sequence, error in needs.items() if self._is_of_tenant(error)}
        self._room.starved_tenants = {sequence.tenant for sequence in by_quota}
        for tenant in sorted(self._room.starved_tenants):
            self._relieve({sequence: error for sequence, error in by_quota.items() if sequence.tenant == tenant}, plan)
        needs = {s: error for s, error in needs.items() if s not in by_quota and self._is_needy(s)}
        self._room.starved = min(needs, default=None, key=by_rank)
        if needs:
            self._relieve(needs, plan)

    # Preemption.

    def _coming(self, spare: int) -> int:
        """Blocks that there are or that are on their way back."""
        return spare + self._room.blocks.retired + self._queues.num_leaving_blocks

    def _is_of_tenant(self, error: QuireError) -> bool:
        """True if only sequences of the same tenant can make room."""
        return self._by_tenant and error.reason == "QUOTA_EXCEEDED"

    def _await_blocks(self, newcomer: Sequence, error: QuireError, plan: Plan, outcome: PlanOutcome) -> None:
        """Let the first refused sequence wait for the blocks that it needs, and preempt others for them.

        The first sequence of each tenant that was refused by its quota waits too; other tenants do not wait for it.
        """
        is_of_tenant = self._is_of_tenant(error)
        # With no other sequence that could give it blocks, it asks for fewer below.
        is_alone = not any(not is_of_tenant or each.tenant == newcomer.tenant for each in self._queues.running)
        if is_of_tenant:
            if newcomer.tenant in self._room.short_tenants and not is_alone:
                return
        elif self._room.awaited is not None:
            return
        needed = self._needed_by(newcomer, error, plan.admission_reserve_blocks)
        if is_of_tenant:
            self._room.short_tenants.add(newcomer.tenant)
        else:
            self._room.awaited = Awaited(newcomer, needed)
        if newcomer.state is SequenceState.WAITING:
            coming = self._coming(self._room.spare(error))
            unscheduled = frozenset(outcome.run_ids)
            made = self._make_room(newcomer, needed - coming, unscheduled=unscheduled, of_tenant=is_of_tenant)
            if needed > coming + made and is_alone:
                self._shorten_chunks(newcomer, plan, needed=needed, coming=coming + made)

    def _shorten_longest(self, needs: abc.Mapping[Sequence, QuireError], plan: Plan, room: int) -> bool:
        """Ask for fewer tokens of the longest chunk that was refused. room is negative: the blocks that are missing."""
        needy = list(filter(self._is_needy, needs))
        if not needy:
            return False
        longest = max(needy, key=lambda sequence: _num_asked(plan, sequence))
        needed = needs[longest].number("needed", 1)
        return self._shorten_chunks(longest, plan, needed=needed, coming=room + needed)

    def _shorten_chunks(self, refused: Sequence, plan: Plan, *, needed: int, coming: int) -> bool:
        """Ask for fewer tokens of prompts, if that needs fewer blocks. Returns False if it does not."""
        num_asked = _num_asked(plan, refused)
        if num_asked < 2 or not self.limits.tables.has_windows:
            return False
        self._room.shorten_chunks(num_asked, needed=needed, coming=coming)
        return True

    def _needed_by(self, newcomer: Sequence, error: QuireError, reserve: int) -> int:
        """Return the number of blocks without which it is refused again. The plan's reserve may be for others too."""
        needed = error.number("needed", 1)
        if error.reason == "QUOTA_EXCEEDED":
            return needed
        if self._queues.suspects:
            return needed - reserve
        own = self._policy.reserve(newcomer, num_beside=0, view=self._view())
        return needed - reserve + own + newcomer.num_places - 1

    def _relieve(self, needs: abc.Mapping[Sequence, QuireError], plan: Plan) -> None:
        """Make room for running sequences that were refused blocks, the first in rank first."""
        *_, last_refused = needs.values()
        of_tenant = self._is_of_tenant(last_refused)
        room, num_preemptions = self._coming(self._room.spare(last_refused)), self._counters.preemptions
        for sequence in sorted(needs, key=by_rank):
            if self._is_needy(sequence):  # it was not preempted for one above it
                room -= needs[sequence].number("needed", 1)
                holder = sequence
                if sequence.group is not None:
                    holder = min(sequence.group.running, key=by_rank)
                room += self._make_room(holder, -room, of_tenant=of_tenant)
        if self._counters.preemptions > num_preemptions and not of_tenant:
            is_by_quota = last_refused.reason == "QUOTA_EXCEEDED"
            self._room.pressure = Pressure(self._room.pressure.num_plans + 1, is_by_quota)
        if room >= 0 or self._shorten_longest(needs, plan, room):
            return
        if self._room.num_stalls >= self.limits.max_stalls:
            # No sequence of this client holds the missing blocks: preempt one for another client of the pool.
            self._preempt(max(filter(self._is_needy, needs), key=by_rank))

    def _is_needy(self, refused: Sequence) -> bool:
        """True if a sequence that was refused blocks runs, or if its group does."""
        return refused.state is _RUNNING or refused in self._queues.apart

    def _make_room(
        self, needy: Sequence, missing: int, *, unscheduled: abc.Set[int] = frozenset(), of_tenant: bool = False
    ) -> int:
        """Preempt until so many blocks will be freed, or no candidate is left; returns how many will be.

        unscheduled are the ids with a run that cachemgr has planned, and that no sequence knows of yet. of_tenant: only
        sequences of the same tenant can make room.
        """
        coming = 0
        while coming < missing and (victim := self._victim_for(needy, missing - coming, of_tenant)) is not None:
            coming += self._num_coming_from(victim)
            self._preempt(victim, unscheduled=unscheduled)
        return coming

    def _num_coming_from(self, victim: Sequence) -> int:
        """Return the blocks that a victim gives back. For a group at least; blocks that its beams share count once."""
        tables = self.limits.tables
        each = [beam.num_own_blocks(tables) for beam in (victim.group.running if victim.group else ())]
        return max(each) + len(each) - 1 if each else victim.num_own_blocks(tables)

    def _victim_for(self, needy: Sequence, missing: int, of_tenant: bool = False) -> Sequence | None:
        # With a suspect all others are paused and would hold the blocks for ever.
        if needy.is_suspect:
            candidates = [sequence for sequence in self._queues.running if sequence.unit is not needy.unit]
        else:
            candidates = self._queues.below(needy)
        if of_tenant:
            candidates = [other for other in candidates if other.tenant == needy.tenant]
        victim = self._policy.victim(needy, candidates, missing_blocks=missing, view=self._view())
        return candidates[-1] if victim is None and needy.is_suspect and candidates else victim

    def _yield_place(self) -> None:
        """If all places are taken, preempt a sequence below the first in the queue, one with each plan."""
        queues = self._queues
        if not queues.waiting or queues.suspects:
            return
        withheld = self._room.short_tenants | self._room.starved_tenants
        first = next((sequence for sequence in queues.waiting if sequence.tenant not in withheld), None)
        if first is not None and queues.num_places_taken + first.num_places > self.limits.num_places:
            self._make_room(first, 1)

    def _preempt(self, sequence: Sequence, *, unscheduled: abc.Set[int] = frozenset()) -> None:
        self._counters.preemptions += 1 if sequence.group is None else len(sequence.group.running)
        # In the host tier a sequence with an unknown run would return with an unexpected token.
        may_offload = sequence.group is None and sequence.seq_id not in unscheduled
        is_offloaded = may_offload and self._is_worth_offloading(sequence)
        self._queues.preempt(sequence, is_offloaded=is_offloaded)
        if is_offloaded:
            self._room.num_free_host_blocks -= self._host_blocks_of(sequence.num_host_tokens)

    def _is_worth_offloading(self, sequence: Sequence) -> bool:
        num_tokens = sequence.num_scheduled_tokens
        num_blocks = self._host_blocks_of(num_tokens)
        if num_blocks > self._room.num_free_host_blocks:
            return False
        return self.costs.prefers_offload(
            num_lost_tokens=num_tokens - sequence.num_shared_tokens, num_bytes=num_blocks * self.limits.block_bytes
        )

    def _host_blocks_of(self, num_tokens: int) -> int:
        return max(1, self.limits.tables.num_blocks(num_tokens, num_tokens))

    # Ends of steps.

    def on_step_done(
        self, step: Step, seq_ids: abc.Sequence[int], token_ids: abc.Sequence[int]
    ) -> abc.Sequence[Sampled]:
        """Take the tokens of the oldest step in flight, parallel lists; returns those that count, in this order.

        Raises ProtocolViolation, nothing taken, if a sequence that should have sampled has no token.
        """
        self._flight.require_oldest(step)
        tokens = dict(zip(seq_ids, token_ids, strict=True))
        if not step.samplers.keys() <= tokens.keys():
            raise ProtocolViolation("a step came back without a token that it was to sample")
        self._flight.end(step)
        events = [
            self._accept(sequence, seq_id, tokens[seq_id])
            for seq_id, sequence in step.samplers.items()
            if sequence.seq_id == seq_id and (sequence.state is _RUNNING or sequence.state is _DRAINING)
        ]
        self._counters.sampled_tokens += len(events)
        self._counters.discarded_tokens += len(tokens) - len(events)
        if self._queues.suspects:
            self._clear_suspects(step)
        self._checked()
        return events

    def _accept(self, sequence: Sequence, seq_id: int, token_id: int) -> Sampled:
        reason = self._queues.accept(sequence, token_id)
        if reason is not None:
            self._finish(sequence, reason)
        return Sampled(sequence, seq_id, token_id, reason)

    def on_step_failed(self, step: Step, error: QuireError) -> abc.Sequence[Failed]:
        """The oldest step in flight computed nothing, perhaps because of one of its sequences. Returns failed
        requests."""
        self._take_failed(step)
        failed: list[Failed] = []
        num_units = len({sequence.unit for sequence in step.sequences})
        live = [s for s, i in zip(step.sequences, step.seq_ids, strict=True) if self._is_of(s, i)]
        for sequence in {sequence.unit: sequence for sequence in live}.values():
            if num_units > 1:
                self._queues.suspect(sequence)
            else:
                self._retry_alone(sequence, error, failed)
        self._checked()
        return failed

    def on_step_refused(self, step: Step, error: QuireError) -> abc.Sequence[Failed]:
        """The worker refused the oldest step in flight for its input, and has skipped it. Returns failed requests.

        If it was refused for now, the sequence that the refusal names is postponed.
        """
        self._take_failed(step)
        sequences = dict(zip(step.seq_ids, step.sequences, strict=True))
        failed = self._blame(sequences, error)
        for seq_id, sequence in sequences.items():
            if self._is_of(sequence, seq_id):
                self._queues.readmit(sequence)
        self._checked()
        return failed

    def on_plan_refused(self, plan: Plan, error: QuireError) -> abc.Sequence[Failed]:
        """cachemgr refused a whole plan for its input, and applied nothing. Returns failed requests."""
        failed = self._blame(plan.sequences, error)
        self._checked()
        return failed

    def _blame(self, sequences: abc.Mapping[int, Sequence], error: QuireError) -> list[Failed]:
        """Give up the sequence that a refusal names, or the only one; if it could be any of several, suspect them.

        A sequence that is named in a refusal for now is postponed.
        """
        named = error.number("sequence_id", -1)
        if named in sequences and isinstance(error, OutOfRoom):
            if sequences[named].state is not SequenceState.FINISHED:
                self._queues.postpone(sequences[named])
            return []
        units = {sequence.unit: sequence for sequence in sequences.values()}
        culprits = [sequences[named]] if named in sequences else list(units.values())
        failed: list[Failed] = []
        for sequence in culprits:
            if sequence.state is SequenceState.FINISHED:
                continue
            if len(culprits) > 1:
                self._queues.suspect(sequence)
            elif isinstance(error, InvalidRequest):
                self._fail(sequence, error, failed)
            else:
                self._retry_alone(sequence, error, failed)
        return failed

    def on_step_dropped(self, step: Step) -> None:
        """The oldest step in flight computed nothing because of one before it: its sequences are admitted again.

        Raises ProtocolViolation, nothing changed, if the step is void and none before it has failed.
        """
        if step.is_void and not self._flight.is_settling:
            raise ProtocolViolation(f"step {step.step_number} was planned as if a step before it had failed")
        self._take_failed(step)
        for sequence, seq_id in zip(step.sequences, step.seq_ids, strict=True):
            if self._is_of(sequence, seq_id):
                self._queues.readmit(sequence)
        self._checked()

    def _take_failed(self, step: Step) -> None:
        self._flight.fail(step)
        self._counters.failed_steps += 1
        for later in (step, *self._flight):
            for seq_id, sequence in later.idle.items():
                if self._is_of(sequence, seq_id):
                    self._queues.readmit(sequence)

    def _is_of(self, sequence: Sequence, seq_id: int) -> bool:
        live = sequence.state in (SequenceState.RUNNING, SequenceState.DRAINING)
        return live and sequence.seq_id == seq_id

    def _retry_alone(self, sequence: Sequence, error: QuireError, failed: list[Failed]) -> None:
        sequence = sequence if sequence.group is None else sequence.group.leader
        sequence.num_failures += 1
        if sequence.num_failures < self.limits.max_step_failures:
            self._queues.suspect(sequence)
            return
        given_up = RequestFailed(
            f"given up after {sequence.num_failures} failed steps, the last one: {error}", metadata=error.metadata
        )
        given_up.__cause__ = error
        self._fail(sequence, given_up, failed)

    def _clear_suspects(self, step: Step) -> None:
        units = {sequence.unit for sequence in step.sequences}
        for suspect in list(self._queues.suspects):
            beams = [suspect] if suspect.group is None else suspect.group.members
            until = suspect.suspect_until or 0
            if suspect.unit in units and all(beam.num_scheduled_tokens >= until for beam in beams):
                self._queues.clear(suspect)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.state is SequenceState.FINISHED:
            return
        is_running = sequence.state is _RUNNING
        self._queues.finish(sequence, reason)
        if sequence.group is not None and sequence.group.members:
            return  # the others continue
        if is_running:
            self._room.on_end()
        self._policy.ended(sequence)

    def _fail(self, sequence: Sequence, error: QuireError, failed: list[Failed]) -> None:
        if sequence.state is not SequenceState.FINISHED:
            others = [] if sequence.group is None else sequence.group.members
            for each in sorted({sequence, *others}, key=by_rank, reverse=True):
                self._finish(each, FinishReason.FAILED)
            failed.append(Failed(sequence, error))

    # State as a value.

    def statistics(self) -> SchedulerStatistics:
        """Present numbers and counters."""
        queues = self._queues
        return SchedulerStatistics(
            num_waiting=len(queues.waiting) + len(queues.apart) + len(queues.postponed),
            num_running=len(queues.running),
            num_following=sum(map(len, queues.followers.values())),
            num_draining=len(queues.draining),
            num_offloaded=sum(sequence.host_id is not None for sequence in (*queues.waiting, *queues.draining)),
            num_steps_in_flight=len(self._flight),
            **{f.name: getattr(self._counters, f.name) for f in fields(self._counters)},
        )

    def _checked(self) -> None:
        if self._verify:
            self.check_invariants()

    def check_invariants(self) -> None:
        """Raises AssertionError if the queues, the steps and the sequences disagree. Cost: all sequences and steps."""
        self._queues.check_invariants()
        require(len(self._queues.running) <= self.limits.num_places, "the limit of running sequences holds")
        for sequence in self._queues.living():
            seq_id = -1 if sequence.seq_id is None else sequence.seq_id
            awaited = sum(step.samplers.get(seq_id) is sequence for step in self._flight)
            require(sequence.num_sampling == awaited, "a token being sampled is awaited from one step")


def _num_asked(plan: Plan, sequence: Sequence) -> int:
    """Return the tokens that a plan asked for, at most, of a sequence that was refused."""
    if sequence.state is _RUNNING:
        return plan.extend_counts[plan.extend_ids.index(id_of(sequence))]
    return min(plan.admission_token_budget, len(sequence.token_ids))
