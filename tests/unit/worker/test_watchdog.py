"""When a step counts as stuck."""

from __future__ import annotations

import pytest

from quire.cache.v1 import grant_pb2
from quire.worker.grant.decoding import AcceptedStep
from quire.worker.run.watchdog import LOOKS_PER_LIMIT, Look, StuckStepError, Watchdog, WatchdogActions


class Steps:
    """Steps in flight, as their watchdog sees them."""

    def __init__(self) -> None:
        self.oldest: AcceptedStep | None = None
        actions = WatchdogActions(self.pass_by, self.pass_by, whereabouts=lambda: "model:executor.py:1")
        self.watchdog = Watchdog(lambda: self.oldest, actions, limit_s=100.0)

    async def pass_by(self) -> None: ...

    def begin(self, number: int) -> None:
        grant = grant_pb2.StepGrant(step_number=number, run_sequence_ids=[1, 2], run_token_counts=[1, 30])
        self.oldest = AcceptedStep(grant, {})

    def look(self, times: int = 1) -> list[Look]:
        """Collect so many looks, without those that show nothing new."""
        looks = [self.watchdog.look() for _ in range(times)]
        return [look for look in looks if look is not Look.NOTHING_NEW]


@pytest.fixture
def steps() -> Steps:
    return Steps()


def test_a_step_is_stuck_after_the_limit_and_the_worker_stops_after_twice_the_limit(
    steps: Steps, caplog: pytest.LogCaptureFixture
) -> None:
    steps.begin(7)
    assert steps.look(LOOKS_PER_LIMIT) == []
    assert steps.look() == [Look.STUCK]
    described = "step=7 tokens=31 sequences=2 copied_blocks=0 age_s={} at=model:executor.py:1"
    assert described.format(100) in caplog.text
    assert steps.look(LOOKS_PER_LIMIT - 1) == []
    with pytest.raises(StuckStepError, match=described.format(200)):
        steps.look()


def test_a_stuck_step_that_ends_makes_the_worker_serve_again(steps: Steps) -> None:
    steps.begin(1)
    assert steps.look(2 * LOOKS_PER_LIMIT) == [Look.STUCK]
    steps.begin(2)
    assert steps.look() == [Look.MOVES_AGAIN]
    assert steps.look(LOOKS_PER_LIMIT) == [Look.STUCK]
    steps.oldest = None
    assert steps.look(3 * LOOKS_PER_LIMIT) == [Look.MOVES_AGAIN]


def test_steps_that_follow_one_another_are_not_stuck(steps: Steps) -> None:
    """However long all of them take together."""
    for number in range(5):
        steps.begin(number)
        assert steps.look(LOOKS_PER_LIMIT) == []


def test_without_steps_nothing_is_stuck(steps: Steps) -> None:
    assert steps.look(5 * LOOKS_PER_LIMIT) == []
