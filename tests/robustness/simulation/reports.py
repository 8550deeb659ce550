"""The reports of a simulated worker, which may come late, twice, or say what no worker says."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from robustness.simulation.world import Process

from quire.cache.v1 import attach_pb2
from quire.worker.service.steps import Reports

Send = Callable[[attach_pb2.StepReport], None]


class Lie(StrEnum):
    """The mistake in a report."""

    UNKNOWN_LEASE = "a lease that there is not"
    OTHER_LEASE_STEP = "a step that was not granted"
    NUMBER_OUT_OF_ORDER = "a number that leaves a gap"
    WRONG_COUNTS = "more tokens than were run"
    UNKNOWN_SEQUENCE = "a sequence that did not run"
    SAMPLED_FOR_NOBODY = "a token for a sequence that was not to be sampled"
    TOKEN_OUT_OF_RANGE = "a token that is not in the vocabulary"
    NO_OUTCOME = "no outcome"


NOBODY = 2**31 - 1
"""An id that no sequence has."""


class UnreliableReports(Reports):
    """Reports as they are, until one of the methods asks for something else. What is kept is always the truth."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._outward: Send = lambda report: None
        self._held: list[tuple[Send, attach_pb2.StepReport]] = []
        self._is_holding = False
        self._num_twice = 0
        self._lies: list[Lie] = []
        self.has_lied = False
        self.last_acknowledged = 0
        """Of the present epoch: cachemgr has said so."""
        super().__init__()

    @property
    def send(self) -> Send:
        """The function that passes a new report on: to the stream, with the faults that were asked for."""
        return self._send

    @send.setter
    def send(self, outward: Send) -> None:
        self._outward = outward

    def acknowledge(self, report_number: int) -> None:
        """See Reports.acknowledge."""
        super().acknowledge(report_number)
        # One of the epoch before may still come on its stream; then there are no reports yet.
        self.last_acknowledged = max(self.last_acknowledged, min(report_number, self._next_number - 1))

    def begin_epoch(self) -> None:
        """See Reports.begin_epoch."""
        super().begin_epoch()
        self.last_acknowledged = 0

    def late(self, seconds: float) -> None:
        """Hold all reports of the next seconds back, and send them then, in their order."""
        if not self._is_holding:
            self._is_holding = True
            self._process.world.after(seconds, self._let_go, process=self._process)

    def twice(self) -> None:
        """Send the next report a second time."""
        self._num_twice += 1

    def lie(self, kind: Lie) -> None:
        """Change the next report on its way."""
        self._lies.append(kind)

    def _send(self, report: attach_pb2.StepReport) -> None:
        if self._lies:
            report = lying(report, self._lies.pop(0))
            self.has_lied = True
        times, self._num_twice = (2, self._num_twice - 1) if self._num_twice else (1, 0)
        self._held += [(self._outward, report)] * times
        if not self._is_holding:
            self._pass_on()

    def _let_go(self) -> None:
        self._is_holding = False
        self._pass_on()

    def _pass_on(self) -> None:
        """Send what is held to the stream of its time: one that has ended takes nothing."""
        held, self._held = self._held, []
        for outward, report in held:
            outward(report)


def lying(report: attach_pb2.StepReport, kind: Lie) -> attach_pb2.StepReport:
    """A report that is wrong in one way."""
    lie = attach_pb2.StepReport()
    lie.CopyFrom(report)
    match kind:
        case Lie.UNKNOWN_LEASE:
            lie.lease_id = "nobody's"
        case Lie.OTHER_LEASE_STEP:
            lie.step_number += 1000
        case Lie.NUMBER_OUT_OF_ORDER:
            lie.report_number += 1
        case Lie.WRONG_COUNTS:
            lie.computed_token_counts[:] = [count + 1 for count in report.computed_token_counts]
        case Lie.UNKNOWN_SEQUENCE:
            lie.sequence_ids.append(NOBODY)
            lie.computed_token_counts.append(1)
        case Lie.SAMPLED_FOR_NOBODY:
            lie.sampled_sequence_ids.append(NOBODY)
            lie.sampled_token_ids.append(0)
            if report.sampled_token_counts:
                lie.sampled_token_counts.append(1)
        case Lie.TOKEN_OUT_OF_RANGE:
            lie.sampled_token_ids[:] = [2**31 - 1] * len(report.sampled_token_ids)
        case Lie.NO_OUTCOME:
            lie.ClearField("outcome")
    return lie
