"""One direction between two simulated processes: how long a frame takes, and what is wrong at present."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from robustness.simulation.story import line_of
from robustness.simulation.world import Process

if TYPE_CHECKING:
    from robustness.simulation.network import Network

ORDER_S = 1e-9
"""Between two frames of a stream, at least."""

Deliver = Callable[..., None]
Frame = tuple[Process | None, Deliver, tuple[Any, ...]]


class Link:
    """One direction between two processes by name. The fields are what faults change."""

    __slots__ = (
        "_held",
        "_random",
        "doubles_call",
        "jitter_s",
        "loses_answer",
        "mean_s",
        "network",
        "next_delay_s",
        "receiver",
        "sender",
        "stands_until",
        "windows_stand_until",
        "world",
    )

    def __init__(self, network: Network, sender: str, receiver: str) -> None:
        self.network, self.world = network, network.world
        self.sender, self.receiver = sender, receiver
        self.mean_s, self.jitter_s = network.mean_delay_s, network.jitter_s
        self.stands_until = 0.0
        """Nothing arrives before this time."""
        self.windows_stand_until = 0.0
        """The receiver gives no room before this time: it reads slowly."""
        self.next_delay_s = 0.0
        """Of one frame, in addition."""
        self.loses_answer = False
        """The next answer to a unary call breaks its connection instead."""
        self.doubles_call = False
        """The next unary call reaches the server twice."""
        self._random = network.random.random
        self._held: list[Frame] = []
        """Those that arrived while nothing passes, in their order."""

    def send(self, not_before: float, process: Process | None, deliver: Deliver, *args: Any) -> float:
        """Call `deliver` after a while, and at `not_before` at the earliest, unless the process has ended by then.

        Returns the time of arrival.
        """
        world = self.world
        now = world.now
        arrival = now + self.mean_s + self.jitter_s * self._random()
        if self.next_delay_s:
            arrival += self.next_delay_s
            self.next_delay_s = 0.0
        if arrival < not_before:
            arrival = not_before
        world.after(arrival - now, self._arrive, process, deliver, args)
        return arrival

    def _arrive(self, process: Process | None, deliver: Deliver, args: tuple[Any, ...]) -> None:
        if not self._held and self.stands_until <= self.world.now:
            self._hand_over(process, deliver, args)
            return
        if not self._held:
            self.world.after(self.stands_until - self.world.now, self._go_on)
        self._held.append((process, deliver, args))

    def _go_on(self) -> None:
        """Hand over what was held, unless nothing passes for longer by now."""
        if self.stands_until > self.world.now:
            self.world.after(self.stands_until - self.world.now, self._go_on)
            return
        held, self._held = self._held, []
        for frame in held:
            self._hand_over(*frame)

    def _hand_over(self, process: Process | None, deliver: Deliver, args: tuple[Any, ...]) -> None:
        if process is not None and not process.is_alive:
            return
        if self.network.tells:
            line = line_of(self.sender, self.receiver, deliver, args)
            if line is not None:
                self.world.tell(line)
        deliver(*args)
