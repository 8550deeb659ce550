"""The life of sequences from request to end: waiting, running, preempted, ended. Pure: no I/O, clock or randomness.

    schedule() -> Plan               the next step's items; changes nothing
    on_planned(plan, granted)        cachemgr's answer; from here on the step is in flight
    on_step_done(step, ...)          its tokens; steps end in the order they were planned
    on_step_failed / on_step_dropped its sequences are admitted again
    on_plan_refused / on_step_refused  the same, without the sequence with the refused input
    on_fault                        an unexpected exception: its sequence ends, or is found
    resume                          queues a sequence again that on_step_refused or on_step_done postponed
    branch                          chooses the beams of a search that continue, and their tokens
    end / reset_all                  from outside, at any point between those calls

Progress, with any policy. Running sequences get tokens and blocks in order of rank, decodes before forks before chunks
of prompts. Only sequences below the needy one in rank are preempted. So the first in rank is never preempted for
another one of this client and gets every block that this client holds, so it ends; then so does the next one.

Bounds. A decode waits for prompts no longer than one step of max_step_tokens, because every step has a token of every
running sequence that decodes. A prompt waits for decodes no longer either: they have at most as many places as leave a
quarter of max_step_tokens to prompts, in every step.

docs/reference/scheduling.md describes the default policy.
"""

import operator
from collections import abc
from itertools import islice

from quire.client.engine.scheduling.answers import Answers
from quire.client.engine.scheduling.beam_search import Heir
from quire.client.engine.scheduling.beams import Beams
from quire.client.engine.scheduling.ending import Endings
from quire.client.engine.scheduling.failures import Failures, is_under
from quire.client.engine.scheduling.faults import RequestFault, to_failure
from quire.client.engine.scheduling.flight import Flight
from quire.client.engine.scheduling.guessing import DrafterCounts
from quire.client.engine.scheduling.planning import Planning
from quire.client.engine.scheduling.plans import Failed, GrantedStep, Plan, SchedulerLimits, StepInFlight, StepTokens
from quire.client.engine.scheduling.policy import Policy, PriorityPolicy
from quire.client.engine.scheduling.preemption import Preemption
from quire.client.engine.scheduling.queues import Queues, by_rank, require
from quire.client.engine.scheduling.room import Room
from quire.client.engine.scheduling.sequence import BeamGroup, FinishReason, Sequence, SequenceState
from quire.client.engine.scheduling.shortage import Shortage
from quire.client.engine.scheduling.speculation import Drafts, Speculation
from quire.client.engine.scheduling.statistics import Counters, SchedulerStatistics, statistics_of
from quire.client.engine.scheduling.step_costs import StepCosts
from quire.client.engine.scheduling.tier import TierCosts
from quire.client.engine.speculative import SpeculativeConfig
from quire.client.errors import ProtocolViolation, QuireError

_MAX_SEQ_ID = 2**31
_RUNNING = SequenceState.RUNNING  # in loops over all sequences of a step, where the enum's own lookup would show
_DRAINING = SequenceState.DRAINING


class Scheduler:
    """The state behind schedule(). One plan at a time: on_planned or a failed call comes before the next schedule()."""

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        policy: Policy | None = None,
        by_tenant: bool = False,
        verify: bool = False,
        speculative: SpeculativeConfig | None = None,
    ) -> None:
        """policy None is PriorityPolicy. With verify, check_invariants() runs after each change. speculative None: no
        drafts.

        by_tenant: the tenants of requests are cachemgr's too, and a quota is the tenant's, not this client's.
        """
        self.costs = TierCosts()
        self._policy = policy or PriorityPolicy()
        self._by_tenant = by_tenant
        self._verify = verify
        self._next_seq_id = 0
        self._counters = counters = Counters()
        self._queues = queues = Queues(limits.tables)
        self._room = room = Room.of_empty_pool(limits)
        self._flight = flight = Flight()
        self._speculation = None if speculative is None else Speculation(speculative, queues)
        endings = Endings(queues, room, self._policy, self._speculation)
        preemption = Preemption(queues, room, self._policy, self.costs, counters)
        shortage = Shortage(queues, room, self._policy, preemption, counters, by_tenant=by_tenant)
        failures = Failures(queues, room, flight, endings, counters)
        self._endings = endings
        self._preemption = preemption
        self._shortage = shortage
        self._failures = failures
        self._answers = Answers(queues, room, flight, shortage, failures, endings, counters)
        self._beams = Beams(queues, endings)

    @property
    def limits(self) -> SchedulerLimits:
        """The limits of the pool and of the model."""
        return self._room.limits

    @property
    def step_costs(self) -> StepCosts | None:
        """The time of steps, to be measured for drafts; None without these."""
        return None if self._speculation is None else self._speculation.costs

    @property
    def drafters(self) -> abc.Mapping[str, DrafterCounts]:
        """The outcomes of drafts, by drafter; none without drafts."""
        return {} if self._speculation is None else self._speculation.counts

    # External events.

    @property
    def has_work(self) -> bool:
        """True if schedule() or a step in flight still has something to do."""
        return bool(self._flight) or not self._queues.are_empty

    def add(self, sequences: abc.Sequence[Sequence]) -> None:
        """Take the sequences of a request (new_sequences.py). Each that waits is queued; others follow the first.

        Raises RequestFault, nothing taken, for an unexpected exception: if the policy can't rank one, for example.
        """
        view = self._room.view(self._queues.running)
        try:
            for sequence in sequences:
                sequence.rank = (*map(operator.index, self._policy.rank(sequence, view)), *sequence.arrival)
            if any(sequence.state is SequenceState.FOLLOWING for sequence in sequences):
                self._queues.add(sequences)
            else:
                for sequence in sequences:
                    self._queues.add([sequence])
            if self._speculation is not None:
                for sequence in sequences:
                    self._speculation.begin(sequence)
        except Exception as error:
            self._queues.forget(sequences)
            raise RequestFault(sequences[0]) from error
        self._checked()

    def take_top(self, beam: Sequence, top: abc.Sequence[tuple[int, float]]) -> None:
        """Take the result of a beam after its step: its most probable next tokens."""
        beam.top = top

    def branch(self, group: BeamGroup, heirs: abc.Sequence[Heir]) -> None:
        """Continue a group with these beams, the best first. A beam without an heir ends."""
        self._beams.branch(group, heirs)
        self._checked()

    def end(self, sequences: abc.Iterable[Sequence], reason: FinishReason) -> None:
        """End these now; their blocks are released with the next plan. Those that have ended are left alone."""
        for sequence in sorted(sequences, key=by_rank, reverse=True):
            # Last first: a parent that ends would only send its followers to the queue.
            self._endings.finish(sequence, reason)
        self._checked()

    def set_limits(self, limits: SchedulerLimits) -> None:
        """Another pool, or a new epoch. Only while nothing runs; what does not fit any more is refused by cachemgr."""
        if self._queues.running or self._queues.draining:
            raise ValueError("limits change only while nothing runs")
        self._queues.tables = limits.tables
        self._room.reset(limits)

    @property
    def postponed(self) -> abc.Sequence[Sequence]:
        """Sequences that are in no plan: the worker had no room for their input to a step, or a mask was late."""
        return tuple(self._queues.postponed)

    def resume(self, sequence: Sequence) -> None:
        """Let a postponed sequence wait for its admission again. One that has ended is left alone."""
        if sequence.state is SequenceState.POSTPONED:
            self._queues.resume(sequence)
            self._checked()

    def reset_all(self) -> None:
        """The pool has forgotten everything: all that ran wait with their known tokens; steps in flight are void."""
        self._reset()
        self._checked()

    def _reset(self) -> None:
        self._counters.resets += 1
        self._flight.clear()
        self._queues.reset_pool()
        self._room.reset(self.limits)

    # Planning of the next step.

    def schedule(self) -> Plan:
        """The next plan; empty if nothing can be done before a step in flight ends.

        Changes no sequence, but for those that are held back for drafts or let go.
        """
        if not self._flight.may_plan():
            return Plan()
        queues, room = self._queues, self._room
        drafts: abc.Mapping[int, Drafts] | None = {}
        if self._speculation is not None:
            drafts = self._speculation.drafts(self.limits, is_running=bool(self._flight))
        if drafts is None:
            return Plan()
        planning = Planning(
            self.limits,
            queues,
            room,
            self._policy,
            room.view(queues.running),
            fresh_id=self._fresh_id,
            by_tenant=self._by_tenant,
            drafts=drafts,
        )
        if not queues.suspects:
            # Beams of groups that run hold places and blocks: nothing is admitted before them.
            is_open = bool(planning.line) and not (queues.apart or room.gives_way)
            is_open = is_open and not self._shortage.is_line_blocked(planning.line[0])
            planning.add_running(planning.line[0] if is_open else None)
            if is_open:
                planning.add_newcomers()
            planning.expect_line()
        elif not self._flight:  # alone means alone: a failure must have one possible cause
            planning.add_alone(queues.suspects[0])
        releases = islice(queues.releases, self.limits.max_running_sequences)
        block_size, num_bytes = self.limits.block_size, self.limits.bytes_of_all_layers
        copy_use = self.costs.host_copy_use(block_size=block_size, num_bytes=num_bytes)
        skips_disk = self.costs.skips_disk(block_size=block_size, num_bytes=num_bytes)
        return planning.plan(
            release_ids=releases, offload_ids=queues.offloads, host_copy_use=copy_use, skips_disk=skips_disk
        )

    def _fresh_id(self) -> int:
        self._next_seq_id = (self._next_seq_id + 1) % _MAX_SEQ_ID
        return self._next_seq_id

    def on_planned(self, plan: Plan, granted: GrantedStep) -> StepInFlight:
        """Take the answer to the plan that schedule() returned last. Returns the step, now in flight.

        Raises ProtocolViolation if the answer does not fit the plan; then only reset_all() makes sense.
        """
        step = self._answers.take(plan, granted)
        self._preemption.preempt_for_place()
        self._checked()
        return step

    # Ends of steps.

    def on_step_done(
        self,
        step: StepInFlight,
        seq_ids: abc.Sequence[int],
        token_ids: abc.Sequence[int],
        *,
        token_counts: abc.Sequence[int] = (),
        late_ids: abc.Collection[int] = (),
    ) -> tuple[StepTokens, abc.Sequence[Failed]]:
        """Take the tokens of the oldest step in flight, by sequence; returns the sequences that got one, in order.

        token_counts has the tokens of each sequence; empty: one of each. The tokens of late_ids do not count: the
        worker did not wait for their masks. These sequences are postponed. A sequence that can't take its token is
        returned as failed: the caller ends it. The others have theirs. Raises ProtocolViolation, nothing taken, if a
        sequence that should have sampled has no token, or if one has other tokens than its drafts allow.
        """
        self._flight.require_oldest(step)
        tokens, drafted = _tokens_of(step, seq_ids, token_ids, token_counts)
        if not step.samplers.keys() <= tokens.keys():
            raise ProtocolViolation("a step came back without a token that it was to sample")
        self._flight.end(step)
        speculation = self._speculation
        got: dict[int, Sequence] = {}
        counts: dict[int, int] = {}
        ended: dict[Sequence, FinishReason] = {}
        failed: list[Failed] = []
        for seq_id, sequence in step.samplers.items():
            if sequence.seq_id != seq_id or (sequence.state is not _RUNNING and sequence.state is not _DRAINING):
                continue
            if late_ids and seq_id in late_ids:
                continue
            try:
                if speculation is None:
                    reason = sequence.accept(tokens[seq_id])
                elif seq_id in drafted:
                    counts[seq_id], reason = sequence.accept_all(drafted[seq_id])
                    speculation.take(sequence, step.drafts[seq_id], counts[seq_id])
                else:
                    reason = sequence.accept(tokens[seq_id])
                    speculation.take(sequence, None, 1)
                if reason is not None:
                    ended[sequence] = reason
                    self._endings.finish(sequence, reason)
                elif sequence.state is _DRAINING:
                    self._queues.drain(sequence)
                got[seq_id] = sequence
            except Exception as error:
                failed.append(Failed(sequence, to_failure(error)))
        for seq_id in late_ids:
            self._postpone_late(step, seq_id)
        num_taken = len(got) + sum(counts.values()) - len(counts)
        self._counters.sampled_tokens += num_taken
        if counts:
            self._counters.drafts += len(counts)
            self._counters.drafted_tokens += sum(len(step.drafts[seq_id]) for seq_id in counts)
            self._counters.accepted_tokens += sum(counts.values()) - len(counts)
        self._counters.discarded_tokens += len(token_ids) - num_taken
        if self._queues.suspects:
            self._failures.clear_suspects(step)
        if not failed:
            self._checked()
        return StepTokens([*got], [*got.values()], ended, counts), failed

    def _postpone_late(self, step: StepInFlight, seq_id: int) -> None:
        sequence = step.samplers.get(seq_id)
        if sequence is not None and is_under(sequence, seq_id):
            self._queues.postpone(sequence)

    def on_step_failed(self, step: StepInFlight, error: QuireError) -> abc.Sequence[Failed]:
        """The oldest step in flight computed nothing, perhaps because of one of its sequences. Returns failed
        requests."""
        failed = self._failures.fail_step(step, error)
        self._checked()
        return failed

    def on_step_refused(self, step: StepInFlight, error: QuireError) -> abc.Sequence[Failed]:
        """The worker refused the oldest step in flight for its input, and has skipped it. Returns failed requests.

        If it was refused for now, the sequence that the refusal names is postponed.
        """
        failed = self._failures.refuse_step(step, error)
        self._checked()
        return failed

    def on_plan_refused(self, plan: Plan, error: QuireError) -> abc.Sequence[Failed]:
        """cachemgr refused a whole plan for its input, and applied nothing. Returns failed requests."""
        failed = self._failures.blame(plan.sequences, error)
        self._checked()
        return failed

    def on_fault(
        self, error: QuireError, living: abc.Iterable[Sequence], culprit: Sequence | None = None
    ) -> abc.Sequence[Failed]:
        """Take an unexpected exception: as reset_all(), but returns failed requests, which the caller ends.

        The exception may have left a sequence of the caller's list, all that live, in no collection: this one has
        failed. If there is none, the culprit has, the sequence that the exception is about. If that is not known, every
        sequence runs alone until it is.
        """
        self._reset()
        lost = sorted(set(living).difference(self._queues.living()), key=by_rank)
        for sequence in lost:
            sequence.finish(FinishReason.FAILED)
        if lost:
            return [Failed(sequence, error) for sequence in lost]
        return self._failures.take_fault(error, culprit)

    def on_step_dropped(self, step: StepInFlight) -> None:
        """The oldest step in flight computed nothing because of one before it: its sequences are admitted again.

        Raises ProtocolViolation, nothing changed, if the step is void and none before it has failed.
        """
        self._failures.drop_step(step)
        self._checked()

    # State as a value.

    def statistics(self) -> SchedulerStatistics:
        """Present numbers and counters."""
        return statistics_of(self._queues, self._flight, self._counters)

    def _checked(self) -> None:
        if self._verify:
            self.check_invariants()

    def check_invariants(self) -> None:
        """Raises BrokenInvariantError if queues, steps and sequences disagree. Cost: all sequences and steps."""
        self._queues.check_invariants()
        require(len(self._queues.running) <= self.limits.num_places, "the limit of running sequences holds")
        for sequence in self._queues.living():
            seq_id = -1 if sequence.seq_id is None else sequence.seq_id
            awaited = sum(step.samplers.get(seq_id) is sequence for step in self._flight)
            require(sequence.num_sampling == awaited, "a token being sampled is awaited from one step")


def _tokens_of(
    step: StepInFlight, seq_ids: abc.Sequence[int], token_ids: abc.Sequence[int], counts: abc.Sequence[int]
) -> tuple[abc.Mapping[int, int], abc.Mapping[int, abc.Sequence[int]]]:
    """Return the first token of each sequence, and all tokens of those with drafts. Raises ProtocolViolation."""
    if not counts and not step.drafts:
        return dict(zip(seq_ids, token_ids, strict=True)), {}
    counts = counts or [1] * len(seq_ids)
    if len(counts) != len(seq_ids) or sum(counts) != len(token_ids):
        raise ProtocolViolation("the tokens of a step differ from their counts")
    tokens: dict[int, int] = {}
    drafted: dict[int, abc.Sequence[int]] = {}
    first = 0
    for seq_id, count in zip(seq_ids, counts, strict=True):
        drafts = step.drafts.get(seq_id, ())
        given = token_ids[first : first + count]
        if not 1 <= count <= 1 + len(drafts) or list(given[:-1]) != list(drafts[: count - 1]):
            raise ProtocolViolation(f"{count} tokens of a run with {len(drafts)} drafts, or others than these")
        tokens[seq_id] = given[0]
        if drafts:
            drafted[seq_id] = given
        first += count
    return tokens, drafted
