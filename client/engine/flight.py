"""The steps in flight. Pure."""

from collections import abc, deque

from quire.client.engine.plans import Step
from quire.client.errors import ProtocolViolation


class Flight:
    """Steps that were planned and have not ended, the oldest first; they end in this order.

    A step planned before the outcome of a failed one is known fails too, and with steps always in flight that would go
    on for ever. So after a failure nothing is planned until the steps in flight have ended, and with them one that was
    being planned.
    """

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        self._is_settling = False

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> abc.Iterator[Step]:
        return iter(self._steps)

    def begin(self, step: Step) -> None:
        """Add a step that was planned."""
        self._steps.append(step)

    def end(self, step: Step) -> None:
        """Remove the oldest step. Raises ProtocolViolation if this is another."""
        self.require_oldest(step)
        self._steps.popleft()

    def fail(self, step: Step) -> None:
        """Remove the oldest step, which computed nothing. Raises ProtocolViolation if this is another."""
        self.end(step)
        self._is_settling = True

    def require_oldest(self, step: Step) -> None:
        """Raise ProtocolViolation if this is not the oldest step."""
        if not self._steps or self._steps[0] is not step:
            raise ProtocolViolation("steps end in the order they were planned")

    def may_plan(self) -> bool:
        """Return False while steps have to end after one that failed. Asked when no plan is under way."""
        self._is_settling = self._is_settling and bool(self._steps)
        return not self._is_settling

    def clear(self) -> None:
        """Forget all steps."""
        self._steps.clear()
        self._is_settling = False
