"""The steps in flight. Pure."""

from collections import abc, deque

from quire.client.engine.scheduling.plans import StepInFlight
from quire.client.errors import ProtocolViolation

MAX_STEPS = 2
MAX_SHORT_STEPS = 4
SHORT_STEP_S = 0.002
"""A step that takes a GPU less than this is short."""


class FlightLimit:
    """The number of steps that may be in flight: more of them while steps are short.

    The tokens of a step come to the engine, and a step planned then goes to the worker, in 1 to 6 ms. One step that
    waits behind the one that runs hides that from a GPU which needs as long for it; short steps take three. More than
    needed cost something: a sequence that ends is computed in all steps that are in flight by then, and a new prompt
    waits for them. A CPU computes one step after the other, so there more steps would hide nothing.
    """

    def __init__(self) -> None:
        self.max_steps = MAX_STEPS

    def observe(self, step_s: float, *, device: str) -> None:
        """Learn from a step that has ended: its time on the worker's device, 0 if it was not told."""
        is_short = device.startswith("cuda") and 0 < step_s < SHORT_STEP_S
        self.max_steps = MAX_SHORT_STEPS if is_short else MAX_STEPS


class Flight:
    """Steps that were planned and have not ended, the oldest first; they end in this order.

    A step planned before the outcome of a failed one is known fails too, and with steps always in flight that would go
    on for ever. So after a failure nothing is planned until the steps in flight have ended, and with them one that was
    being planned. Nor is anything planned behind a void step: its sequences have to be admitted again first.
    """

    def __init__(self) -> None:
        self._steps: deque[StepInFlight] = deque()
        self.is_settling = False  # a step failed, and those behind it have not ended

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> abc.Iterator[StepInFlight]:
        return iter(self._steps)

    def begin(self, step: StepInFlight) -> None:
        """Add a step that was planned."""
        self._steps.append(step)

    def end(self, step: StepInFlight) -> None:
        """Remove the oldest step. Raises ProtocolViolation if this is another."""
        self.require_oldest(step)
        self._steps.popleft()

    def fail(self, step: StepInFlight) -> None:
        """Remove the oldest step, which computed nothing. Raises ProtocolViolation if this is another."""
        self.end(step)
        self.is_settling = True

    def require_oldest(self, step: StepInFlight) -> None:
        """Raise ProtocolViolation if this is not the oldest step."""
        if not self._steps or self._steps[0] is not step:
            raise ProtocolViolation("steps end in the order they were planned")

    def may_plan(self) -> bool:
        """Return False while steps have to end after one that failed. Asked when no plan is under way."""
        self.is_settling = self.is_settling and bool(self._steps)
        return not self.is_settling and not (self._steps and self._steps[-1].is_void)

    @property
    def may_follow_failure(self) -> bool:
        """True if a step that is planned now may be behind one that failed, known here or not."""
        return bool(self._steps) or self.is_settling

    def clear(self) -> None:
        """Forget all steps."""
        self._steps.clear()
        self.is_settling = False
