"""Calls of other tasks that the engine's task applies to the scheduler, which it alone changes.

    a caller's task, a timer                      the engine's task
    submit: a request's sequences            ->   Scheduler.add
    end: a request is cancelled, or late     ->   Scheduler.end
    wake                                     ->   looks for work

The engine's task takes them before each plan, and before it takes a step's tokens. Refusals do not pass here: limits
are checked, and waiting requests are counted, in the caller's task before it submits.
"""

import asyncio
from collections import abc
from dataclasses import replace

from quire.client.engine.scheduling.faults import RequestFault
from quire.client.engine.scheduling.scheduler import Scheduler
from quire.client.engine.scheduling.sequence import FinishReason, Sequence, SequenceState
from quire.client.engine.scheduling.statistics import SchedulerStatistics


class Inbox:
    """Requests that were submitted, and those that end, in their order. Belongs to one event loop."""

    def __init__(self) -> None:
        self._submitted: dict[int, abc.Sequence[Sequence]] = {}  # by request id
        self._ended: list[tuple[abc.Sequence[Sequence], FinishReason]] = []
        self._has_news = asyncio.Event()

    def submit(self, request_id: int, sequences: abc.Sequence[Sequence]) -> None:
        """Give the scheduler a request."""
        self._submitted[request_id] = sequences
        self._has_news.set()

    def has(self, request_id: int) -> bool:
        """Return whether the scheduler does not have a request yet."""
        return request_id in self._submitted

    def end(self, request_id: int, sequences: abc.Sequence[Sequence], reason: FinishReason) -> None:
        """End a request. One that was not taken yet ends here, and the scheduler never gets it.

        sequences are read when the engine's task takes the call: until then a search may have other beams.
        """
        submitted = self._submitted.pop(request_id, None)
        if submitted is None:
            self._ended.append((sequences, reason))
        for sequence in submitted or ():
            sequence.finish(reason)
        self._has_news.set()

    def wake(self) -> None:
        """Let an idle engine look for work."""
        self._has_news.set()

    async def wait(self) -> None:
        """Wait until there was a call since the last take_into."""
        await self._has_news.wait()

    def take_into(self, scheduler: Scheduler) -> list[RequestFault]:
        """Apply all calls. Returns those of requests that the scheduler can't take; they have ended. For the engine's
        task."""
        self._has_news.clear()
        faults: list[RequestFault] = []
        while self._submitted:
            sequences = self._submitted.pop(next(iter(self._submitted)))
            try:
                scheduler.add(sequences)
            except RequestFault as fault:
                for sequence in sequences:
                    sequence.finish(FinishReason.FAILED)
                faults.append(fault)
        ended, self._ended = self._ended, []
        for sequences, reason in ended:
            scheduler.end(sequences, reason)
        return faults

    def counted_with(self, statistics: SchedulerStatistics) -> SchedulerStatistics:
        """Return a scheduler's numbers with the sequences that it has not taken yet."""
        new = [sequence for sequences in self._submitted.values() for sequence in sequences]
        num_following = sum(sequence.state is SequenceState.FOLLOWING for sequence in new)
        return replace(
            statistics,
            num_waiting=statistics.num_waiting + len(new) - num_following,
            num_following=statistics.num_following + num_following,
        )
