"""Take cachemgr's answer to a plan: sequences begin, and the step that it grants is in flight. Pure."""

from collections import abc

from quire.client.engine.caching import CacheOutcome
from quire.client.engine.scheduling.ending import Endings
from quire.client.engine.scheduling.failures import Failures
from quire.client.engine.scheduling.flight import Flight
from quire.client.engine.scheduling.plans import Failed, GrantedStep, Plan, PlanItem, StepInFlight
from quire.client.engine.scheduling.queues import Queues
from quire.client.engine.scheduling.room import NO_BLOCKS, Room
from quire.client.engine.scheduling.sequence import Sequence, SequenceState
from quire.client.engine.scheduling.shortage import Shortage
from quire.client.engine.scheduling.statistics import Counters
from quire.client.errors import OutOfRoom, ProtocolViolation, QuireError

_RUNNING = SequenceState.RUNNING  # in a loop over all sequences of a step, where the enum's own lookup would show

_TAKE_PLACES = (PlanItem.FORK, PlanItem.ADMISSION)

Refusals = abc.Mapping[tuple[PlanItem, int], QuireError]


class Answers:
    """Applies answers to the queues, in the order of the plan's items."""

    def __init__(
        self,
        queues: Queues,
        room: Room,
        flight: Flight,
        shortage: Shortage,
        failures: Failures,
        endings: Endings,
        counters: Counters,
    ) -> None:
        self._queues = queues
        self._room = room
        self._flight = flight
        self._shortage = shortage
        self._failures = failures
        self._endings = endings
        self._counters = counters

    def take(self, plan: Plan, granted: GrantedStep) -> StepInFlight:
        """Take the answer to a plan. Returns the step, now in flight.

        Raises ProtocolViolation if the answer does not fit the plan; then the queues are of no use any more.
        """
        refused = {(refusal.item, refusal.seq_id): refusal.error for refusal in granted.refusals}
        self._counters.planned_steps += 1
        self._counters.refusals += len(refused)
        self._room.blocks, self._room.num_free_host_blocks = granted.blocks, granted.num_free_host_blocks
        for sequence in plan.expected:
            sequence.is_expected = True
        self._take_releases(plan, refused)
        failed = self._begin_forks(plan, refused)
        if plan.restore_ids or plan.admissions:
            if not self._queues.apart:
                self._room.awaited = None
            self._begin_restores(plan, granted, refused)
            failed += self._begin_admissions(plan, granted, refused)
        step = self._step_of(plan, granted, failed)
        self._flight.begin(step)
        failed += self._refuse_extends(plan, refused)
        if plan.asks_to_compute:
            self._room.num_stalls = 0 if granted.run_ids else self._room.num_stalls + 1
            if granted.run_ids and not any(error.reason in NO_BLOCKS for error in refused.values()):
                self._room.lengthen_chunks()
            self._shortage.give_way(_placeless_of(plan, refused))
        return step

    def _take_releases(self, plan: Plan, refused: Refusals) -> None:
        if plan.release_ids:
            self._room.gives_way = False
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
                self._queues.release_host(sequence)
            else:
                del self._queues.offloads[seq_id]

    def _begin_forks(self, plan: Plan, refused: Refusals) -> list[Failed]:
        failed: list[Failed] = []
        for fork in plan.forks:
            for child_id in fork.child_ids:
                child = plan.sequences[child_id]
                error = refused.get((PlanItem.FORK, child_id))
                accepted = error is None
                if child.group is not None and error is not None:
                    failed += self._keep_following(child, error)
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
        return failed

    def _keep_following(self, beam: Sequence, error: QuireError) -> list[Failed]:
        """A beam's fork was refused: a later plan tries again, since a group has one place in the queue.

        If a window at the fork's position is gone, every later plan would be refused too. Then the beam is admitted.
        """
        if beam.state is not SequenceState.FOLLOWING or isinstance(error, OutOfRoom):
            return []
        if error.reason != "POSITION_OUT_OF_RANGE":
            return self._failures.retry_alone(beam, error)
        if beam.group is not None and beam.group.running:
            self._queues.wait_apart(beam)
        return []

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

    def _begin_admissions(self, plan: Plan, granted: GrantedStep, refused: Refusals) -> list[Failed]:
        failed: list[Failed] = []
        outcomes = dict(zip(granted.admitted_ids, granted.outcomes, strict=True))
        for admission in plan.admissions:
            sequence, seq_id = plan.sequences[admission.seq_id], admission.seq_id
            if seq_id in outcomes:
                self._begin_admitted(sequence, seq_id, outcomes[seq_id])
            elif (error := refused.get((PlanItem.ADMISSION, seq_id))) is None:
                raise ProtocolViolation("an admission was neither accepted nor refused")
            elif not isinstance(error, OutOfRoom):
                failed += self._endings.fail(sequence, error)
            elif error.reason == "PREFIX_BEING_COMPUTED":
                sequence.num_waits_for_prefix += 1
            elif error.reason in NO_BLOCKS and sequence not in self._queues.apart:
                self._shortage.await_blocks(sequence, error, plan, granted)
        return failed

    def _begin_admitted(self, sequence: Sequence, seq_id: int, outcome: CacheOutcome) -> None:
        num_tokens, num_cached = len(sequence.token_ids), outcome.num_cached_tokens
        self._counters.admissions += 1
        self._counters.admitted_tokens += num_tokens
        self._counters.cached_tokens += num_cached
        if sequence.cache_outcome is None:
            sequence.cache_outcome = outcome
        if sequence.cache_params.reads_cache:
            self._room.observe_admission(num_tokens=num_tokens, num_cached=num_cached)
        self._room.short_tenants.discard(sequence.tenant)
        if sequence.state is SequenceState.FOLLOWING:
            # The group of this beam was preempted while the plan was under way.
            self._queues.releases[seq_id] = self._queues.blocks_of(sequence)
        else:
            self._begin(sequence, seq_id, num_tokens=num_cached)

    def _begin_restores(self, plan: Plan, granted: GrantedStep, refused: Refusals) -> None:
        restored = dict(zip(granted.restored_ids, granted.restored_counts, strict=True))
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
                self._shortage.await_blocks(sequence, error, plan, granted)
            elif not isinstance(error, OutOfRoom):
                self._queues.release_host(sequence)  # it can be admitted like any other

    def _step_of(self, plan: Plan, granted: GrantedStep, failed: abc.Sequence[Failed]) -> StepInFlight:
        given = set(granted.given_run_indexes)
        sequences: list[Sequence] = self._run_batch(plan, granted)
        num_batched = len(sequences)
        samplers = dict(zip(plan.extend_ids[:num_batched], sequences, strict=True))
        introduced: list[int] = []
        decoding: list[Sequence] = []
        is_void = False
        for index in range(num_batched, len(granted.run_ids)):
            seq_id, start, count = granted.run_ids[index], granted.run_starts[index], granted.run_counts[index]
            sequence = plan.sequences.get(seq_id)
            if sequence is None:
                raise ProtocolViolation("a run of a sequence that was not asked for")
            sequences.append(sequence)
            if sequence.seq_id != seq_id or sequence.state is not _RUNNING:
                continue  # it ended during the plan: it runs, and its result is dropped
            if start < sequence.num_scheduled_tokens and self._flight.may_follow_failure:
                is_void = True
                continue
            drafts = plan.drafts.get(seq_id) if plan.drafts else None
            num_most = sequence.num_schedulable_tokens if drafts is None else 1 + len(drafts)
            num_least = 1 if drafts is None else num_most
            if start != sequence.num_scheduled_tokens or not num_least <= count <= num_most:
                raise ProtocolViolation(f"a run of [{start}, {start + count}) where another was due")
            if drafts is not None:
                sequence.schedule_drafts(len(drafts))
                samplers[seq_id] = sequence
                continue
            if given and index in given and start + count > len(sequence.token_ids):
                raise ProtocolViolation("token ids are asked for that are still being sampled")
            if sequence.schedule(count):
                samplers[seq_id] = sequence
                if not self._queues.groups and sequence.num_left:
                    decoding.append(sequence)
            if not sequence.sampling_sent:
                sequence.sampling_sent = True
                introduced.append(index)
        self._queues.batch_up(decoding)
        self._counters.scheduled_tokens += sum(granted.run_counts)
        return StepInFlight(
            step_number=granted.step_number,
            seq_ids=granted.run_ids,
            sequences=sequences,
            starts=granted.run_starts,
            counts=granted.run_counts,
            given=granted.given_run_indexes,
            introduced=introduced,
            samplers=samplers,
            idle=_idle_of(plan, granted),
            failed=failed,
            is_void=is_void,
            drafts=plan.drafts,
        )

    def _run_batch(self, plan: Plan, granted: GrantedStep) -> list[Sequence]:
        """Count the runs of the batch of decodes as planned, if the step begins with them. Returns its sequences.

        Otherwise it is disbanded, and all runs are looked at one by one: some were refused or have ended meanwhile.
        """
        queues = self._queues
        batch, num_runs = queues.batch, plan.num_batched
        if (
            batch.ids == list(plan.extend_ids[:num_runs])
            and min(granted.given_run_indexes, default=num_runs) >= num_runs
            and batch.runs_in(granted.run_ids, granted.run_starts, granted.run_counts)
        ):
            members = batch.members.copy()
            queues.advance_batch()
            return members
        queues.disband()
        return []

    def _refuse_extends(self, plan: Plan, refused: Refusals) -> list[Failed]:
        failed: list[Failed] = []
        needs: dict[Sequence, QuireError] = {}
        for (item, seq_id), error in refused.items():
            sequence = plan.sequences.get(seq_id)
            live = sequence is not None and sequence.seq_id == seq_id and sequence.state is SequenceState.RUNNING
            if item is PlanItem.ADMISSION and sequence in self._queues.apart and error.reason in NO_BLOCKS:
                needs[sequence] = error
            if item is not PlanItem.EXTEND or sequence is None or not live:
                continue
            if error.reason == "SEQUENCE_BUSY":
                continue  # the outcome of its drafts is on the way to cachemgr
            if seq_id in plan.drafts:
                self._queues.let_go(sequence)  # its token alone may be computed; none is preempted for guesses
            elif error.reason in NO_BLOCKS:
                needs[sequence] = error
            elif error.reason in ("SEQUENCE_NOT_FOUND", "NOTHING_TO_COMPUTE"):
                failed += self._failures.retry_alone(sequence, error)
            else:
                failed += self._endings.fail(sequence, error)
        self._shortage.relieve(needs, plan)
        return failed


def _placeless_of(plan: Plan, refused: Refusals) -> list[Sequence]:
    """Return the sequences that could not be forked or admitted, because other clients have the places for them."""
    errors = {seq_id: error for (item, seq_id), error in refused.items() if item in _TAKE_PLACES}
    return [plan.sequences[seq_id] for seq_id, error in errors.items() if error.reason == "TOO_MANY_SEQUENCES"]


def _idle_of(plan: Plan, granted: GrantedStep) -> dict[int, Sequence]:
    forked = (child_id for fork in plan.forks for child_id in fork.child_ids)
    running = set(granted.run_ids) if plan.forks else set()
    return {child_id: plan.sequences[child_id] for child_id in forked if child_id not in running}
