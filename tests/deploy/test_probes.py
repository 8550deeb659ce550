"""The kubelet's probes: --health-listen of real servers, in plain text beside TLS; liveness apart from readiness."""

from __future__ import annotations

import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from certificates import Authority
from deadlines import DEADLINE_S
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2
from ports import free_port

from quire.cli.service_process import ServiceExitedError, ServiceProcess

STAND_IN = str(Path(__file__).parents[1] / "integration" / "stand_in.py")
DEMO_MODEL = str(Path(__file__).parents[2] / "deploy" / "demo" / "model")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
READINESS, LIVENESS = "", "liveness"

Start = Callable[..., ServiceProcess]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        yield Path(name)


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """start(target, *flags): a server on a socket of its own, not waited for; ended with the test."""
    started: list[ServiceProcess] = []

    def start(target: str, *flags: str) -> ServiceProcess:
        address, log_path = f"unix:{folder}/{len(started)}.sock", folder / f"{len(started)}.log"
        arguments = ("--listen", address, *flags)
        started.append(ServiceProcess("it", target=target, arguments=arguments, address=address, log_path=log_path))
        started[-1].start()
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def port() -> int:
    """A free port."""
    return free_port()


def probe(port: int, service: str, *, timeout_s: float = DEADLINE_S) -> int:
    """Probes as the kubelet: one call, plain text, no credentials."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=(("grpc.enable_http_proxy", 0),)) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )
        request = health_pb2.HealthCheckRequest(service=service)
        answer: health_pb2.HealthCheckResponse = check(request, timeout=timeout_s, wait_for_ready=True)
    return answer.status


def await_that(holds: Callable[[], bool]) -> None:
    """Asks until it is so. Raises TimeoutError."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError


def log_of(server: ServiceProcess) -> str:
    assert server.log_path is not None
    return server.log_path.read_text()


def test_a_worker_without_a_cachemgr_is_alive_and_not_ready(start: Start, folder: Path, port: int) -> None:
    health = ("--health-listen", f"127.0.0.1:{port}")
    worker = start(
        "quire.worker", "--model", DEMO_MODEL, "--num-blocks", "16", "--cachemgr", f"unix:{folder}/1.sock", *health
    )
    assert probe(port, LIVENESS, timeout_s=DEADLINE_S) == SERVING
    assert probe(port, READINESS) == NOT_SERVING
    await_that(lambda: probe(port, LIVENESS) != SERVING or " listening addresses=" in log_of(worker))
    assert (probe(port, LIVENESS), probe(port, READINESS)) == (SERVING, NOT_SERVING)
    log = log_of(worker)
    assert log.index(" quire.serving.server health address=") < log.index(" quire.worker model ")

    cachemgr = start("quire.cachemgr")
    worker.wait_serving(DEADLINE_S)
    assert (probe(port, LIVENESS), probe(port, READINESS)) == (SERVING, SERVING)
    cachemgr.kill()
    assert (probe(port, LIVENESS), probe(port, READINESS)) == (SERVING, SERVING)


def test_a_gateway_without_services_is_alive_and_not_ready(start: Start, folder: Path) -> None:
    gateway = start("quire.gateway", "--cachemgr", f"unix:{folder}/1.sock")
    await_that(lambda: " listening addresses=" in log_of(gateway))
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=f"{folder}/0.sock"), base_url="http://gateway", timeout=DEADLINE_S
    ) as kubelet:

        def probes() -> tuple[int, int, str]:
            samples = re.findall(r"^quire_gateway_ready (\S+)$", kubelet.get("/metrics").text, re.MULTILINE)
            return kubelet.get("/health").status_code, kubelet.get("/ready").status_code, *samples

        assert probes() == (200, 503, "0.0")
        start("quire.cachemgr")
        flags = ("--num-blocks", "16", "--cachemgr", f"unix:{folder}/1.sock")
        worker = start("quire.worker", "--model", DEMO_MODEL, *flags)
        await_that(lambda: probes() == (200, 200, "1.0"))
        worker.kill()
        await_that(lambda: probes() == (200, 503, "0.0"))


def test_probes_need_no_certificate_where_everything_else_does(start: Start, folder: Path, port: int) -> None:
    authority = Authority(folder)
    flags = (*authority.issue("localhost").flags(), "--tls-client-ca", str(authority.path))
    server = start("quire.cachemgr", "--listen", "127.0.0.1:0", *flags, "--health-listen", f"127.0.0.1:{port}")
    server.wait_serving(DEADLINE_S)
    assert probe(port, READINESS) == SERVING
    listening = log_of(server).partition(" listening addresses=")[2].splitlines()[0]
    with pytest.raises(grpc.RpcError):
        probe(int(listening.rpartition(":")[2]), READINESS, timeout_s=1)


def test_nothing_but_health_is_answered_there(start: Start, port: int) -> None:
    server = start(STAND_IN, "--health-listen", f"127.0.0.1:{port}")
    server.wait_serving(DEADLINE_S)
    methods = ("/quire.test.StandIn/Echo", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=(("grpc.enable_http_proxy", 0),)) as channel:
        for method in methods:
            call = channel.unary_unary(method, StringValue.SerializeToString, StringValue.FromString)
            with pytest.raises(grpc.RpcError) as refused:
                call(StringValue(value="x"), timeout=DEADLINE_S)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_drain_is_answered_to_its_end(start: Start, folder: Path, port: int) -> None:
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    server = start(STAND_IN, "--model", f"drain:{fifo}", "--health-listen", f"127.0.0.1:{port}")
    server.wait_serving(DEADLINE_S)
    os.kill(server.pid or 0, signal.SIGTERM)
    await_that(lambda: " draining signal=SIGTERM" in log_of(server) and probe(port, READINESS) == NOT_SERVING)
    assert server.is_running
    fifo.write_text("go")
    assert server.wait_exited(DEADLINE_S)
    assert server.returncode == 0


@pytest.mark.parametrize("address", ["unix:/tmp/x.sock", "somewhere"])
def test_health_is_served_on_a_port_only(start: Start, address: str) -> None:
    server = start("quire.cachemgr", "--health-listen", address)
    assert server.wait_exited(DEADLINE_S)
    assert server.returncode == 2
    assert "--health-listen" in log_of(server)


def test_a_port_that_is_taken_is_a_start_that_fails(start: Start, port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        server = start("quire.cachemgr", "--health-listen", f"127.0.0.1:{port}")
        with pytest.raises(ServiceExitedError, match="another process is listening there"):
            server.wait_serving(DEADLINE_S)
