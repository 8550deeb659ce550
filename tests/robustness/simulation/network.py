"""The network between simulated processes: links, connections and what goes wrong on them, in virtual time.

    Network      addresses and who listens there, links by the names of processes, and the faults
    Link         one direction between two names: how long a frame takes, and what is wrong at present
    Connection   made of two Ends, one in each process; each carries streams, which transport.py defines

A frame is a call of a function of the receiving process, later. Frames of a stream arrive in their order. Frames of
different streams overtake each other. What takes a frame wakes the process and does not run for it: frames also reach
a process that stands still, as bytes reach its sockets. Names outlive processes: a link stays the same when a process
is started again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from robustness.simulation.world import Process, World

WINDOW_BYTES = 65_535
"""The bytes of a stream that may be on their way or unread, in each direction."""
ORDER_S = 1e-9
"""Between two frames of a stream, at least."""
SYN_INTERVALS_S = (1.0, 2.0, 4.0, 8.0)
"""Between attempts of TCP to connect to a machine that says nothing."""

Deliver = Callable[..., None]


class Stream(Protocol):
    """A stream at one end of a connection."""

    def end_input(self) -> None:
        """The peer sends nothing more."""

    def break_off(self, reason: str) -> None:
        """The connection is gone."""

    def abandon(self) -> None:
        """This process has closed the connection, or has ended."""


class Link:
    """One direction between two processes by name. The fields are what faults change."""

    __slots__ = (
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
        world = self.world
        if self.stands_until > world.now:
            world.after(self.stands_until - world.now, self._arrive, process, deliver, args)
            return
        if process is not None and not process.is_alive:
            return
        if self.network.tells:
            world.tell(f"{world.now:.6f} {self.sender} -> {self.receiver} {_described(deliver, args)}")
        deliver(*args)


class End:
    """One process's end of a connection."""

    name = "connection"
    __slots__ = (
        "_awaits_pong",
        "_keepalive_s",
        "_pong_timeout_s",
        "is_mute",
        "is_open",
        "latest",
        "link",
        "on_lost",
        "owner",
        "peer",
        "process",
        "streams",
    )

    def __init__(self, process: Process, link: Link) -> None:
        self.process, self.link = process, link
        self.peer: End = self
        self.is_open = True
        self.is_mute = False
        """The machine is lost: it does not even say that the process has ended."""
        self.streams: dict[Stream, None] = {}
        self.latest = 0.0
        """When the last frame that was sent arrives."""
        self.owner: Any = None
        """Takes the frames that belong to no stream yet."""
        self.on_lost: Callable[[str], None] = lambda reason: None
        """Called when the connection is gone, unless this end has closed it."""
        self._keepalive_s = self._pong_timeout_s = 0.0
        self._awaits_pong = False

    def close(self, *, loses_data: bool = False) -> None:
        """Hang up. The peer reads what was sent before, unless that is lost."""
        if not self.is_open:
            return
        for stream in self.streams:
            stream.abandon()
        self._shut()
        if not self.is_mute:
            peer = self.peer
            self.link.send(0.0 if loses_data else self.latest + ORDER_S, peer.process, peer.lose, "Socket closed")

    def lose(self, reason: str) -> None:
        """The connection is gone, as this process learns now."""
        if not self.is_open:
            return
        streams = list(self.streams)
        self._shut()
        for stream in streams:
            stream.break_off(reason)
        self.on_lost(reason)

    def take_goaway(self) -> None:
        """The peer takes no new calls on this connection."""
        if self.is_open:
            self.owner.take_goaway()

    def keep_alive(self, every_s: float, timeout_s: float) -> None:
        """Ping the peer, and give the connection up when it does not answer in time."""
        self._keepalive_s, self._pong_timeout_s = every_s, timeout_s
        self.link.world.after(every_s, self._ping)

    def _shut(self) -> None:
        self.is_open = False
        self.streams.clear()
        self.link.network.forget(self)

    # gRPC answers pings in threads of its own: these are events of the world. A paused process answers none.

    def _ping(self) -> None:
        if self.is_open and not self._waits_for_process(self._ping):
            self._awaits_pong = True
            self.link.send(0.0, None, self.peer._answer_ping)
            self.link.world.after(self._pong_timeout_s, self._check_pong)

    def _answer_ping(self) -> None:
        if self.is_open and not self.is_mute and not self._waits_for_process(self._answer_ping):
            self.link.send(0.0, None, self.peer._take_pong)

    def _take_pong(self) -> None:
        if self.is_open and self._awaits_pong:
            self._awaits_pong = False
            self.link.world.after(self._keepalive_s, self._ping)

    def _check_pong(self) -> None:
        if self.is_open and self._awaits_pong and not self._waits_for_process(self._check_pong):
            peer = self.peer
            self.link.send(self.latest + ORDER_S, peer.process, peer.lose, "Socket closed")
            self.link.world.after(0.0, self.lose, "ping timeout", process=self.process)

    def _waits_for_process(self, then: Callable[[], None]) -> bool:
        """True if the process is paused; `then` is called when it goes on."""
        world, until = self.link.world, self.process.paused_until
        if until > world.now:
            world.after(until - world.now + 0.01, then)
            return True
        return False


class Listener:
    """A process that listens at an address."""

    __slots__ = ("accept", "attempts", "process")

    def __init__(self, process: Process, accept: Callable[[End], None]) -> None:
        self.process, self.accept = process, accept
        self.attempts: dict[Attempt, None] = {}
        """The kernel has accepted them, and the process has not."""


class Attempt:
    """A process that connects to an address. Exactly one of the two functions is called."""

    name = "connection"
    __slots__ = ("_connected", "_failed", "_is_over", "_link", "_network", "address", "process")

    def __init__(
        self,
        network: Network,
        process: Process,
        address: str,
        connected: Callable[[End], None],
        failed: Callable[[str], None],
    ) -> None:
        self._network, self.process, self.address = network, process, address
        self._connected, self._failed = connected, failed
        self._link = network.link(process.name, network.name_of(address))
        self._is_over = False

    def begin(self, timeout_s: float) -> None:
        """Fails after the timeout, if nothing was heard until then."""
        self._link.send(0.0, None, self._knock, 0)
        timed_out = "connection attempt timed out before receiving SETTINGS frame"
        self._network.world.after(timeout_s, self.fail, timed_out, process=self.process)

    def fail(self, reason: str) -> None:
        """Only the first end of an attempt counts."""
        if not self._is_over:
            self._is_over = True
            self._failed(reason)

    def _knock(self, number: int) -> None:
        """What the kernel of the server's machine does. Its first answer must find a way back, too."""
        network, world = self._network, self._network.world
        listener = network.listeners.get(self.address)
        back = network.link(network.name_of(self.address), self.process.name)
        if (listener is None and self.address in network.lost_addresses) or back.stands_until > world.now:
            if number < len(SYN_INTERVALS_S):
                self._link.world.after(SYN_INTERVALS_S[number], self._link.send, 0.0, None, self._knock, number + 1)
        elif listener is None:
            back.send(0.0, self.process, self.fail, "connect failed (Connection refused)")
        else:
            listener.attempts[self] = None
            world.after(0.0, self._accept, listener, back, process=listener.process)

    def _accept(self, listener: Listener, back: Link) -> None:
        listener.attempts.pop(self, None)
        if self._is_over or not self.process.is_alive:
            return
        client, server = End(self.process, self._link), End(listener.process, back)
        client.peer, server.peer = server, client
        self._network.remember(client, server)
        listener.accept(server)
        server.latest = back.send(server.latest, self.process, self._succeed, client)

    def _succeed(self, client: End) -> None:
        if self._is_over:
            client.close()
            return
        self._is_over = True
        if client.is_open:
            self._connected(client)
        else:
            self._failed("Socket closed")


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
            each.link.send(0.0, each.process, each.lose, "Connection reset by peer")

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


def _described(deliver: Deliver, args: tuple[Any, ...]) -> str:
    """A line's words about a frame: the stream, the function that takes it, and what can be said of its contents."""
    owner = getattr(deliver, "__self__", None)
    name = getattr(owner, "name", type(owner).__name__.lower())
    what = deliver.__name__.lstrip("_").removeprefix("take_").replace("_", " ")
    return " ".join([name, what, *filter(None, map(_in_words, args))])


def _in_words(arg: Any) -> str:
    if isinstance(arg, bytes):
        return f"{len(arg)} bytes"
    if isinstance(arg, (str, int)) and not isinstance(arg, bool):
        return str(arg)
    return str(getattr(arg, "in_words", ""))
