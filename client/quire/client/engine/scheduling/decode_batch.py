"""The running sequences that compute one token in every step, in columns. Pure.

A step of all of them changes one number, and not each sequence. A sequence is added when its next run has one token,
and removed when it has been planned to its end, or leaves the pool. If the members run in different steps, the batch is
disbanded. While there are beams, which take turns with the others by rank, it is empty.

    members    by rank
    ids        parallel
    bases      parallel: their scheduled tokens, less the steps of the batch
    steps      of the whole batch so far
"""

from bisect import bisect_left
from collections import abc
from operator import attrgetter

from quire.client.engine.scheduling.sequence import BatchSteps, Sequence

_by_rank: abc.Callable[[Sequence], tuple[int, ...]] = attrgetter("rank")


class DecodeBatch:
    """The columns; read them freely, change them through the methods."""

    __slots__ = ("_last_steps", "bases", "ids", "members", "steps")

    def __init__(self) -> None:
        self.members: list[Sequence] = []
        self.ids: list[int] = []
        self.bases: list[int] = []
        self.steps = BatchSteps()
        # By the number of the step that plans the last token of these.
        self._last_steps: dict[int, dict[Sequence, None]] = {}

    def add(self, sequence: Sequence) -> None:
        """Take a running sequence with an id. Its next run has one token."""
        if sequence.seq_id is None or sequence.num_schedulable_tokens != 1:
            raise AssertionError("a sequence was added to the batch that does not decode")
        index = bisect_left(self.members, sequence.rank, key=_by_rank)
        self.members.insert(index, sequence)
        self.ids.insert(index, sequence.seq_id)
        self.bases.insert(index, sequence.num_scheduled_tokens - self.steps.count)
        self._last_steps.setdefault(self.steps.count + sequence.num_left, {})[sequence] = None
        sequence.join(self.steps)

    def remove(self, sequence: Sequence) -> None:
        """Let a member count its own tokens again."""
        index = bisect_left(self.members, sequence.rank, key=_by_rank)
        del self.members[index], self.ids[index], self.bases[index]
        last_step = self.steps.count + sequence.num_left
        del self._last_steps[last_step][sequence]
        if not self._last_steps[last_step]:
            del self._last_steps[last_step]
        sequence.leave()

    def clear(self) -> None:
        """Let all members count their own tokens again."""
        for sequence in self.members:
            sequence.leave()
        self.members.clear()
        self.ids.clear()
        self.bases.clear()
        self._last_steps.clear()

    def runs_in(self, run_ids: list[int], run_starts: list[int], run_counts: list[int]) -> bool:
        """Return whether the first runs of a step are those of all members, with one token each."""
        count, num_steps = len(self.ids), self.steps.count
        return (
            run_ids[:count] == self.ids
            and run_counts[:count].count(1) == count
            and [start - num_steps for start in run_starts[:count]] == self.bases
        )

    def advance(self) -> abc.Collection[Sequence]:
        """Count a run of every member as planned. Returns those that have no further one: they are members no more."""
        self.steps.count += 1
        ended = tuple(self._last_steps.get(self.steps.count, ()))
        for sequence in ended:
            self.remove(sequence)
        return ended
