"""The end of a sequence: its queue, the pressure in the pool, the policy and the drafters learn of it. Pure."""

from quire.client.engine.scheduling.plans import Failed
from quire.client.engine.scheduling.policy import Policy
from quire.client.engine.scheduling.queues import Queues, by_rank
from quire.client.engine.scheduling.room import Room
from quire.client.engine.scheduling.sequence import FinishReason, Sequence, SequenceState
from quire.client.engine.scheduling.speculation import Speculation
from quire.client.errors import QuireError


class Endings:
    """Ends sequences. Those that have ended are left alone."""

    def __init__(self, queues: Queues, room: Room, policy: Policy, speculation: Speculation | None) -> None:
        self._queues = queues
        self._room = room
        self._policy = policy
        self._speculation = speculation

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence or one beam."""
        if sequence.state is SequenceState.FINISHED:
            return
        is_running = sequence.state is SequenceState.RUNNING
        self._queues.finish(sequence, reason)
        if self._speculation is not None:
            self._speculation.end(sequence)
        if sequence.group is not None and sequence.group.members:
            return  # the others continue
        if is_running:
            self._room.on_end()
        self._policy.ended(sequence)

    def fail(self, sequence: Sequence, error: QuireError) -> list[Failed]:
        """End a sequence, or all beams of its group, for an error. Returns it with the error."""
        if sequence.state is SequenceState.FINISHED:
            return []
        others = [] if sequence.group is None else sequence.group.members
        for each in sorted({sequence, *others}, key=by_rank, reverse=True):
            self.finish(each, FinishReason.FAILED)
        return [Failed(sequence, error)]
