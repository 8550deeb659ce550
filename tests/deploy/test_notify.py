"""Messages of real servers to systemd, on a socket that the test owns."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from deadlines import DEADLINE_S
from grpc_health.v1 import health_pb2

from quire.cli.service_process import ServiceProcess
from quire.serving.systemd import ServiceManager

STAND_IN = str(Path(__file__).parents[1] / "integration" / "stand_in.py")
DEMO_MODEL = str(Path(__file__).parents[2] / "deploy" / "demo" / "model")
WATCHDOG_US = 200_000
# In which a watchdog of that period would have been fed some ten times.
STUCK_S = 1.0
BUSY_SERVER = """
import asyncio, sys
from quire.serving.server import Server

async def main():
    async with Server(service_names=["quire.test.Busy"], domain="test.quire.dev"):
        await asyncio.sleep(0.5)
        print("stuck", flush=True)
        sys.stdin.read()

asyncio.run(main())
"""

Message = dict[str, str]


class Systemd:
    """The end of NOTIFY_SOCKET that systemd has, and a reader of it."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)

    def next(self, timeout_s: float = DEADLINE_S) -> Message:
        """The next message. Raises TimeoutError."""
        self._socket.settimeout(timeout_s)
        return dict(line.split("=", 1) for line in self._socket.recv(65536).decode().split("\n"))

    def await_message(self, name: str) -> tuple[Message, list[Message]]:
        """The next message with this variable, and those before it. Raises TimeoutError, also if others arrive."""
        deadline = time.monotonic() + DEADLINE_S
        before: list[Message] = []
        while name not in (message := self.next(max(deadline - time.monotonic(), 0.001))):
            before.append(message)
        return message, before

    def read_until(self, holds: Callable[[], bool]) -> list[Message]:
        """The messages that come until it is so. Raises TimeoutError."""
        deadline = time.monotonic() + DEADLINE_S
        found: list[Message] = []
        while not holds():
            found.append(self.next(max(deadline - time.monotonic(), 0.001)))
        return found

    def drain(self) -> list[Message]:
        """The messages in the socket."""
        found: list[Message] = []
        try:
            while True:
                found.append(self.next(0.001))
        except TimeoutError:
            return found

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        yield Path(name)


@pytest.fixture
def systemd(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Systemd]:
    """Processes started now tell it how they are. Parameter: "@" for an abstract socket."""
    path, is_abstract = f"{folder}/notify", getattr(request, "param", "") == "@"
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{path}" if is_abstract else path)
    monkeypatch.setenv("WATCHDOG_USEC", str(WATCHDOG_US))
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    listening = Systemd(f"\0{path}" if is_abstract else path)
    yield listening
    listening.close()


Start = Callable[..., ServiceProcess]


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """start(target, *flags): a server that listens on a socket of its own; ended with the test."""
    started: list[ServiceProcess] = []

    def start(target: str, *flags: str) -> ServiceProcess:
        address = f"unix:{folder}/{len(started)}.sock"
        log_path = folder / f"{len(started)}.log"
        arguments = ("--listen", address, *flags)
        started.append(ServiceProcess("it", target=target, arguments=arguments, address=address, log_path=log_path))
        started[-1].start()
        return started[-1]

    yield start
    for process in started:
        process.kill()


def health_of(server: ServiceProcess) -> int:
    check = "/grpc.health.v1.Health/Check"
    with grpc.insecure_channel(server.address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        call = channel.unary_unary(
            check, health_pb2.HealthCheckRequest.SerializeToString, health_pb2.HealthCheckResponse.FromString
        )
        answer: health_pb2.HealthCheckResponse = call(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    return answer.status


def is_listening(server: ServiceProcess) -> bool:
    assert server.log_path is not None
    return " listening addresses=" in server.log_path.read_text()


def write_fifo(path: Path) -> None:
    with path.open("w") as fifo:
        fifo.write("go")


def send_signal(server: ServiceProcess, number: int) -> None:
    assert server.pid is not None
    os.kill(server.pid, number)


@pytest.mark.parametrize("systemd", ["/", "@"], indirect=True, ids=["path", "abstract"])
def test_cachemgr_is_ready_fed_and_stopping(systemd: Systemd, start: Start) -> None:
    server = start("quire.cachemgr")
    ready, before = systemd.await_message("READY")
    assert ready == {"READY": "1", "STATUS": f"serving at {server.address}"}
    assert all(message["WATCHDOG"] == "1" for message in before)
    assert health_of(server) == health_pb2.HealthCheckResponse.SERVING
    for _ in range(3):
        assert systemd.next() == {"WATCHDOG": "1"}
    send_signal(server, signal.SIGTERM)
    stopping, _ = systemd.await_message("STOPPING")
    assert stopping == {"STOPPING": "1", "STATUS": "draining, for at most 30 s"}
    assert server.wait_exited(DEADLINE_S)
    assert server.returncode == 0
    assert not [message for message in systemd.drain() if "READY" in message or "STOPPING" in message]


def test_a_worker_is_ready_only_once_it_is_attached(systemd: Systemd, start: Start, folder: Path) -> None:
    cachemgr_address = f"unix:{folder}/1.sock"
    worker = start("quire.worker", "--model", DEMO_MODEL, "--num-blocks", "16", "--cachemgr", cachemgr_address)
    # It has loaded its model and serves, but there is no cachemgr to attach to; its event loop runs all the while.
    assert not [message for message in systemd.read_until(lambda: is_listening(worker)) if "READY" in message]
    for _ in range(3):
        message = systemd.next()
        assert message == {"WATCHDOG": "1", "EXTEND_TIMEOUT_USEC": str(WATCHDOG_US), "STATUS": "starting"}
    assert health_of(worker) == health_pb2.HealthCheckResponse.NOT_SERVING

    cachemgr = start("quire.cachemgr")
    ready = {systemd.await_message("READY")[0]["STATUS"] for _ in range(2)}
    assert ready == {f"serving at {worker.address}", f"serving at {cachemgr.address}"}
    assert health_of(worker) == health_pb2.HealthCheckResponse.SERVING


def test_a_gateway_is_ready_only_once_a_worker_serves(
    systemd: Systemd, start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cachemgr_address = f"unix:{folder}/1.sock"
    gateway = start("quire.gateway", "--cachemgr", cachemgr_address)
    assert not [message for message in systemd.read_until(lambda: is_listening(gateway)) if "READY" in message]
    for _ in range(3):
        assert systemd.next() == {
            "WATCHDOG": "1",
            "EXTEND_TIMEOUT_USEC": str(WATCHDOG_US),
            "STATUS": "starting",
        }

    monkeypatch.delenv("NOTIFY_SOCKET")
    start("quire.cachemgr")
    start("quire.worker", "--model", DEMO_MODEL, "--num-blocks", "16", "--cachemgr", cachemgr_address)
    ready, before = systemd.await_message("READY")
    assert ready == {"READY": "1", "STATUS": f"serving at {gateway.address}"}
    assert all(message["WATCHDOG"] == "1" for message in before)
    for _ in range(3):
        assert systemd.next() == {"WATCHDOG": "1"}
    send_signal(gateway, signal.SIGTERM)
    assert systemd.await_message("STOPPING")[0]["STATUS"] == "draining, for at most 30 s"
    assert gateway.wait_exited(DEADLINE_S)
    assert gateway.returncode == 0


def test_ready_comes_with_health_and_not_with_the_port(systemd: Systemd, start: Start, folder: Path) -> None:
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    server = start(STAND_IN, "--model", f"fifo:{fifo}")
    assert not [message for message in systemd.read_until(lambda: is_listening(server)) if "READY" in message]
    writing = threading.Thread(target=write_fifo, args=(fifo,), daemon=True)  # blocks until the server reads
    assert not [message for message in systemd.drain() if "READY" in message]
    writing.start()
    systemd.await_message("READY")
    assert health_of(server) == health_pb2.HealthCheckResponse.SERVING
    writing.join(DEADLINE_S)


def test_a_stuck_loop_stops_feeding(systemd: Systemd, start: Start) -> None:
    server = start("quire.cachemgr")
    systemd.await_message("READY")
    systemd.await_message("WATCHDOG")
    send_signal(server, signal.SIGSTOP)
    os.waitid(os.P_PID, server.pid or 0, os.WSTOPPED | os.WNOWAIT)
    systemd.drain()
    with pytest.raises(TimeoutError):
        systemd.next(STUCK_S)
    send_signal(server, signal.SIGCONT)
    assert systemd.next() == {"WATCHDOG": "1"}


def test_a_busy_loop_stops_feeding_though_its_threads_go_on(systemd: Systemd) -> None:
    """SIGSTOP stops threads too: this is what a watchdog on a thread of its own would not notice."""
    with subprocess.Popen(
        [sys.executable, "-c", BUSY_SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"stuck\n"
            assert len(systemd.drain()) >= 3
            with pytest.raises(TimeoutError):
                systemd.next(STUCK_S)
        finally:
            process.kill()


def test_the_drain_is_fed(systemd: Systemd, start: Start, folder: Path) -> None:
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    server = start(STAND_IN, "--model", f"drain:{fifo}")
    systemd.await_message("READY")
    send_signal(server, signal.SIGTERM)
    systemd.await_message("STOPPING")
    for _ in range(3):
        assert systemd.next() == {"WATCHDOG": "1"}
    write_fifo(fifo)
    assert server.wait_exited(DEADLINE_S)


def test_a_server_that_fails_says_so(systemd: Systemd, start: Start) -> None:
    from google.protobuf.wrappers_pb2 import StringValue

    server = start(STAND_IN)
    systemd.await_message("READY")
    with grpc.insecure_channel(server.address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        echo = channel.unary_unary("/quire.test.StandIn/Echo", StringValue.SerializeToString, StringValue.FromString)
        with pytest.raises(grpc.RpcError):
            echo(StringValue(value="broken"), timeout=DEADLINE_S)
    assert systemd.await_message("STOPPING")[0]["STATUS"] == "failed, see the log"
    assert server.wait_exited(DEADLINE_S)
    assert server.returncode == 1


def test_what_is_stopping_is_not_ready_any_more(systemd: Systemd) -> None:
    """A worker may be attached for the first time while it drains."""
    manager = ServiceManager(os.environ)
    manager.stopping("draining")
    manager.ready("serving")
    manager.stopping("failed")
    assert systemd.drain() == [{"STOPPING": "1", "STATUS": "draining"}]


@pytest.mark.parametrize(
    ("name", "value"), [("WATCHDOG_PID", "1"), ("WATCHDOG_USEC", "0"), ("WATCHDOG_USEC", "soon"), ("WATCHDOG_USEC", "")]
)
def test_a_watchdog_that_is_not_ours_is_not_fed(
    systemd: Systemd, start: Start, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    server = start(STAND_IN)
    assert systemd.await_message("READY")[1] == []
    send_signal(server, signal.SIGTERM)
    assert systemd.await_message("STOPPING")[1] == []


@pytest.mark.parametrize("address", ["{folder}/nobody", "@{folder}/nobody", "vsock:2:1234", ""])
def test_a_server_serves_though_nobody_listens(
    folder: Path, start: Start, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address.format(folder=folder))
    monkeypatch.setenv("WATCHDOG_USEC", str(WATCHDOG_US))
    server = start(STAND_IN)
    server.wait_serving(DEADLINE_S)
    assert server.terminate() == 0
    assert server.log_path is not None
    assert ("systemd" in server.log_path.read_text()) == bool(address)
