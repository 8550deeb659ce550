"""Plans and steps that failed or were refused: admit their sequences again, and find the one that is to blame. Pure.

A step that fails makes its sequences suspects. A suspect runs alone until it has passed the place of the failure; only
failures of a step that a sequence had to itself count against it. So one request that breaks the model cannot take the
others with it. A plan or a step that is refused for its input names the sequence, which fails; if it names none, its
sequences are suspects. After a failure nothing is planned until the steps in flight have ended (flight.py).

cachemgr may learn of a failure before this client. Then a run begins too early. That step is void: it is skipped, and
its sequences are admitted again.
"""

from collections import abc

from quire.client.engine.scheduling.ending import Endings
from quire.client.engine.scheduling.flight import Flight
from quire.client.engine.scheduling.plans import Failed, StepInFlight
from quire.client.engine.scheduling.queues import Queues
from quire.client.engine.scheduling.room import Room
from quire.client.engine.scheduling.sequence import Sequence, SequenceState
from quire.client.engine.scheduling.statistics import Counters
from quire.client.errors import InvalidRequest, OutOfRoom, ProtocolViolation, QuireError, RequestFailed


class Failures:
    """Takes failures. Methods return the requests that failed for good."""

    def __init__(self, queues: Queues, room: Room, flight: Flight, endings: Endings, counters: Counters) -> None:
        self._queues = queues
        self._room = room
        self._flight = flight
        self._endings = endings
        self._counters = counters

    def fail_step(self, step: StepInFlight, error: QuireError) -> list[Failed]:
        """Suspect the sequences of the oldest step in flight, which computed nothing. One alone is tried again."""
        self._remove(step)
        failed: list[Failed] = []
        num_units = len({sequence.unit for sequence in step.sequences})
        live = [s for s, i in zip(step.sequences, step.seq_ids, strict=True) if is_under(s, i)]
        for sequence in {sequence.unit: sequence for sequence in live}.values():
            if num_units > 1:
                self._queues.suspect(sequence)
            else:
                failed += self.retry_alone(sequence, error)
        return failed

    def refuse_step(self, step: StepInFlight, error: QuireError) -> list[Failed]:
        """Take a step that was refused for its input. The other sequences are admitted again."""
        self._remove(step)
        sequences = dict(zip(step.seq_ids, step.sequences, strict=True))
        failed = self.blame(sequences, error)
        for seq_id, sequence in sequences.items():
            if is_under(sequence, seq_id):
                self._queues.readmit(sequence)
        return failed

    def drop_step(self, step: StepInFlight) -> None:
        """Admit the sequences of a step again that computed nothing because of one before it.

        Raises ProtocolViolation, nothing changed, if the step is void and none before it has failed.
        """
        if step.is_void and not self._flight.is_settling:
            raise ProtocolViolation(f"step {step.step_number} was planned as if a step before it had failed")
        self._remove(step)
        for sequence, seq_id in zip(step.sequences, step.seq_ids, strict=True):
            if is_under(sequence, seq_id):
                self._queues.readmit(sequence)

    def blame(self, sequences: abc.Mapping[int, Sequence], error: QuireError) -> list[Failed]:
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
                failed += self._endings.fail(sequence, error)
            else:
                failed += self.retry_alone(sequence, error)
        return failed

    def retry_alone(self, sequence: Sequence, error: QuireError) -> list[Failed]:
        """Count a failure against a sequence, or its group. It runs alone, or fails after max_step_failures."""
        sequence = sequence if sequence.group is None else sequence.group.leader
        sequence.num_failures += 1
        if sequence.num_failures < self._room.limits.max_step_failures:
            self._queues.suspect(sequence)
            return []
        given_up = RequestFailed(
            f"given up after {sequence.num_failures} failed steps, the last one: {error}", metadata=error.metadata
        )
        given_up.__cause__ = error
        return self._endings.fail(sequence, given_up)

    def take_fault(self, error: QuireError, culprit: Sequence | None) -> list[Failed]:
        """Take an unexpected exception when nothing is in the pool. The culprit fails, if there is one.

        Without one it counts against the sequence that ran alone. If none did, all that wait run alone from now on.
        """
        if culprit is not None:
            return self._endings.fail(culprit, error) or [Failed(culprit, error)]
        if self._queues.suspects:
            return self.retry_alone(self._queues.suspects[0], error)
        for sequence in list(self._queues.waiting):
            self._queues.suspect(sequence)
        return []

    def clear_suspects(self, step: StepInFlight) -> None:
        """Suspect the sequences of a computed step no longer, if they are past the place of the failure."""
        units = {sequence.unit for sequence in step.sequences}
        for suspect in list(self._queues.suspects):
            beams = [suspect] if suspect.group is None else suspect.group.members
            until = suspect.suspect_until or 0
            if suspect.unit in units and all(beam.num_scheduled_tokens >= until for beam in beams):
                self._queues.clear(suspect)

    def _remove(self, step: StepInFlight) -> None:
        self._flight.fail(step)
        self._counters.failed_steps += 1
        for later in (step, *self._flight):
            for seq_id, sequence in later.idle.items():
                if is_under(sequence, seq_id):
                    self._queues.readmit(sequence)


def is_under(sequence: Sequence, seq_id: int) -> bool:
    """Return True if a sequence is in the pool, or awaits tokens from there, under this id."""
    return sequence.seq_id == seq_id and sequence.state in (SequenceState.RUNNING, SequenceState.DRAINING)
