"""Networks of their own: namespaces of the kernel.

Network   processes that reach one another over TCP, and nobody else: for programs that listen on all addresses
Cable     two networks with a link between them, as two machines have, which a test can cut

As a program, `network.py SOCKET PORT` brings the loopback device up, and passes the unix socket's connections on to the
port of 127.0.0.1. It runs in the network's namespace, which lives as long as it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
UNSHARE = ("unshare", "--net") if os.geteuid() == 0 else ("unshare", "--user", "--map-root-user", "--net")
NSENTER = ("nsenter", "--net") if os.geteuid() == 0 else ("nsenter", "--user", "--preserve-credentials", "--net")


class Network:
    """A namespace, from the constructor to `close`. Raises OSError if this machine allows none."""

    def __init__(self, folder: Path, port: int) -> None:
        """`socket_path` leads to the port."""
        self.socket_path = folder / "network.sock"
        command = [*UNSHARE, sys.executable, "-P", __file__, str(self.socket_path), str(port)]
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "open\n":
            self.close()
            raise OSError("no network namespace can be made here")

    @property
    def prefix(self) -> tuple[str, ...]:
        """The beginning of a command that runs in this network, in the process that is started."""
        return (*NSENTER, "--target", str(self._holder.pid), "--")

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()


class Cable:
    """Two namespaces with an address each, from the constructor to `close`. Raises OSError if none can be made here."""

    INTERFACE = "cable"
    ADDRESSES = ("192.0.2.1", "192.0.2.2")

    def __init__(self) -> None:
        self._machines: list[subprocess.Popen[str]] = []
        try:
            self._add(*UNSHARE)
            # A user's second namespace has the same owner as the first, which may then join them.
            owner = () if os.geteuid() == 0 else (*NSENTER[:-1], "--target", str(self._machines[0].pid), "--")
            self._add(*owner, "unshare", "--net")
            peer = ("peer", "name", self.INTERFACE, "netns", str(self._machines[1].pid))
            self._ip(0, "link", "add", self.INTERFACE, "type", "veth", *peer)
            for machine, address in enumerate(self.ADDRESSES):
                self._ip(machine, "address", "add", f"{address}/24", "dev", self.INTERFACE)
                self._ip(machine, "link", "set", self.INTERFACE, "up")
                self._ip(machine, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            raise OSError(f"two networks with a cable can't be made here: {error}") from error

    def prefix(self, machine: int) -> tuple[str, ...]:
        """The beginning of a command that runs on machine 0 or 1, in the process that is started."""
        return (*NSENTER, "--target", str(self._machines[machine].pid), "--")

    def cut(self) -> None:
        """Cut the link: packets are lost, and no side is told."""
        self._ip(0, "link", "set", self.INTERFACE, "down")

    def close(self) -> None:
        for machine in self._machines:
            machine.kill()
            machine.wait()

    def _add(self, *unshare: str) -> None:
        # It ends when this process does.
        command = [*unshare, "sh", "-c", "echo open; exec cat"]
        self._machines.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        output = self._machines[-1].stdout
        assert output is not None
        if output.readline() != "open\n":
            raise OSError("no network namespace can be made here")

    def _ip(self, machine: int, *arguments: str) -> None:
        subprocess.run([*self.prefix(machine), "ip", *arguments], check=True, capture_output=True)


def bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh14x", b"lo", 0)
        _, flags = struct.unpack("16sh14x", fcntl.ioctl(sock, SIOCGIFFLAGS, request))
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


async def pass_on(path: str, port: int) -> None:
    async def connect(near_reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            far_reader, far = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(pump(near_reader, far), pump(far_reader, near))
        near.close()

    server = await asyncio.start_unix_server(connect, path)
    print("open", flush=True)
    await server.serve_forever()


async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    sink.close()


if __name__ == "__main__":
    bring_up_loopback()
    asyncio.run(pass_on(sys.argv[1], int(sys.argv[2])))
