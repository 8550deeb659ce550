"""Connections of simulated processes: how they are made, how they break, and the pings that notice it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from robustness.simulation.links import ORDER_S, Link
from robustness.simulation.world import Process

if TYPE_CHECKING:
    from robustness.simulation.network import Network

SYN_INTERVALS_S = (1.0, 2.0, 4.0, 8.0)
"""Between attempts of TCP to connect to a machine that says nothing."""


class Stream(Protocol):
    """A stream at one end of a connection."""

    def end_input(self) -> None:
        """The peer sends nothing more."""

    def break_off(self, reason: str) -> None:
        """The connection is gone."""

    def abandon(self) -> None:
        """This process has closed the connection, or has ended."""


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
        self._send_knock(0)
        timed_out = "connection attempt timed out before receiving SETTINGS frame"
        self._network.world.after(timeout_s, self.fail, timed_out, process=self.process)

    def fail(self, reason: str) -> None:
        """Only the first end of an attempt counts."""
        if not self._is_over:
            self._is_over = True
            self._failed(reason)

    def _send_knock(self, number: int) -> None:
        self._link.send(0.0, None, self._knock, number)

    def _knock(self, number: int) -> None:
        """The part of the server's kernel. Its first answer must find a way back, too."""
        network, world = self._network, self._network.world
        listener = network.listeners.get(self.address)
        back = network.link(network.name_of(self.address), self.process.name)
        if (listener is None and self.address in network.lost_addresses) or back.stands_until > world.now:
            if number < len(SYN_INTERVALS_S):
                world.after(SYN_INTERVALS_S[number], self._send_knock, number + 1)
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
