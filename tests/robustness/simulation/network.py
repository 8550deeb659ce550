"""The network between simulated processes, in virtual time: addresses and who listens there, and what goes wrong.

    Network      this file
    Link         one direction between two names: links.py
    End          one process's end of a connection: connections.py. Each carries streams, which streams.py defines

A frame is a call of a function of the receiving process, later. Frames of a stream arrive in their order. Frames of
different streams overtake each other. What takes a frame wakes the process and does not run for it: frames also reach
a process that stands still, as bytes reach its sockets. Names outlive processes: a link stays the same when a process
is started again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from robustness.simulation.connections import Attempt, End, Listener
from robustness.simulation.links import Link
from robustness.simulation.world import Process, World

WINDOW_BYTES = 65_535
"""The bytes of a stream that may be on their way or unread, in each direction."""


class Network:
    """Every address, link and connection of a world. Its numbers are its own: they depend on the seed alone."""

    def __init__(
        self,
        world: World,
        seed: int,
        *,
        mean_delay_s: float = 100e-6,
        jitter_s: float = 200e-6,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        """A frame takes mean_delay_s and up to jitter_s more."""
        self.world = world
        self.random = random.Random(seed)
        self.mean_delay_s, self.jitter_s = mean_delay_s, jitter_s
        self.window_bytes = window_bytes
        self.tells = False
        """Tell the world's story each frame that arrives."""
        self.listeners: dict[str, Listener] = {}
        self.lost_addresses: set[str] = set()
        """Of lost machines: nothing answers there, not even the kernel."""
        self._names: dict[str, str] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._ends: dict[Process, dict[End, None]] = {}

    # What processes do.

    def listen(self, process: Process, address: str, accept: Callable[[End], None]) -> None:
        """Let a process accept connections at an address, until it ends or `stop_listening`."""
        if address in self.listeners:
            raise OSError(f"{address} is in use")
        self._watch(process)
        self.listeners[address] = Listener(process, accept)
        self.lost_addresses.discard(address)
        self._names[address] = process.name

    def stop_listening(self, address: str) -> None:
        """Refuse connections at the address. Those that are open stay."""
        listener = self.listeners.pop(address, None)
        if listener is not None:
            for attempt in listener.attempts:
                self.world.after(0.0, attempt.fail, "Connection reset by peer", process=attempt.process)

    def connect(
        self,
        process: Process,
        address: str,
        timeout_s: float,
        connected: Callable[[End], None],
        failed: Callable[[str], None],
    ) -> None:
        """Connect, and call one of the two functions in the process when it is known how it went."""
        self._watch(process)
        Attempt(self, process, address, connected, failed).begin(timeout_s)

    def link(self, sender: str, receiver: str) -> Link:
        """The direction from one name to another."""
        found = self._links.get((sender, receiver))
        if found is None:
            found = self._links[sender, receiver] = Link(self, sender, receiver)
        return found

    def name_of(self, address: str) -> str:
        """The name of the process that listens there, or did."""
        return self._names.get(address, address)

    def remember(self, *ends: End) -> None:
        """Note the ends of a connection, which their processes close when they end."""
        for end in ends:
            self._ends[end.process][end] = None

    def forget(self, end: End) -> None:
        """The end is closed."""
        self._ends[end.process].pop(end, None)

    # What goes wrong. Processes are meant by name.

    def cut(self, first: str, second: str) -> None:
        """Break all connections between two processes, now."""
        for end in self._between(first, second):
            if end.process.name == first:
                self.break_connection(end)

    def partition(self, first: str, second: str, seconds: float) -> None:
        """Let nothing pass between two processes for a time. What was on its way arrives then, if connections live."""
        self.freeze(first, second, seconds)
        self.freeze(second, first, seconds)

    def freeze(self, sender: str, receiver: str, seconds: float) -> None:
        """Let nothing pass in one direction for a time."""
        link = self.link(sender, receiver)
        link.stands_until = max(link.stands_until, self.world.now + seconds)

    def slow_reader(self, reader: str, writer: str, seconds: float) -> None:
        """Let a process give no room to a peer that writes, for a time: writes wait when the window is full."""
        self.link(reader, writer).windows_stand_until = self.world.now + seconds

    def delay(self, sender: str, receiver: str, seconds: float) -> None:
        """Let the next frame in one direction take longer."""
        self.link(sender, receiver).next_delay_s = seconds

    def half_close(self, client: str, server: str) -> None:
        """End the requests of all streams that a client has open to a server, as a proxy may."""
        for end in self._between(client, server):
            if end.process.name == server:
                for stream in list(end.streams):
                    end.link.world.after(0.0, stream.end_input, process=end.process)

    def lose_answer(self, client: str, server: str) -> None:
        """Break the connection in place of the server's next answer to a unary call of the client."""
        self.link(server, client).loses_answer = True

    def double_next_unary(self, client: str, server: str) -> None:
        """Let the client's next unary call reach the server twice. The client gets the first answer."""
        self.link(client, server).doubles_call = True

    def lose_machine(self, process: Process) -> None:
        """End the process with its machine: peers hear nothing, and connecting to it times out."""
        for address, listener in self.listeners.items():
            if listener.process is process:
                self.lost_addresses.add(address)
                listener.attempts.clear()
        for end in self._ends.get(process, ()):
            end.is_mute = True
        process.end()

    def break_connection(self, end: End) -> None:
        """Break one connection, now."""
        for each in (end, end.peer):
            learns_after_s = self.random.random() * self.jitter_s
            self.world.after(learns_after_s, each.lose, "Connection reset by peer", process=each.process)

    def _between(self, first: str, second: str) -> list[End]:
        wanted = {first, second}
        return [
            end
            for process, ends in self._ends.items()
            if process.name in wanted
            for end in ends
            if {end.process.name, end.peer.process.name} == wanted
        ]

    def _watch(self, process: Process) -> None:
        if process not in self._ends:
            self._ends[process] = {}
            process.at_end.append(partial(self._ended, process))

    def _ended(self, process: Process) -> None:
        """Do what the kernel does for a process that was killed: data that it has not read makes it a reset."""
        for address in [address for address, listener in self.listeners.items() if listener.process is process]:
            self.stop_listening(address)
        for end in list(self._ends[process]):
            end.close(loses_data=self.random.random() < 0.5)
        del self._ends[process]
