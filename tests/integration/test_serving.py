"""The common behaviour of both servers, from outside: health, reflection, errors, addresses, signals, drain."""

import itertools
import os
import queue
import random
import signal
import socket
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import grpc
import pytest
from deadlines import DEADLINE_S
from google.protobuf.wrappers_pb2 import StringValue
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status

from quire.cli.service_process import ServiceExitedError, ServiceProcess
from quire.serving.receiving import MAX_MESSAGE_BYTES, SMALL_MESSAGE_BYTES

STAND_IN = str(Path(__file__).with_name("stand_in.py"))
SERVICE = "quire.test.StandIn"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

Start = Callable[..., ServiceProcess]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        yield Path(name)


@pytest.fixture
def prepare(folder: Path) -> Iterator[Start]:
    """Makes servers that are not started yet; every one is ended at the end of the test."""
    made: list[ServiceProcess] = []

    def prepare(*arguments: str, name: str = "a") -> ServiceProcess:
        address = f"unix:{folder}/{name}.sock"
        server = ServiceProcess(
            name,
            target=STAND_IN,
            arguments=("--listen", address, *arguments),
            address=address,
            log_path=folder / f"{name}{len(made)}.log",
        )
        made.append(server)
        return server

    yield prepare
    for server in made:
        server.kill()


@pytest.fixture
def start(prepare: Start) -> Start:
    """Starts servers and waits until they are healthy."""

    def start(*arguments: str, name: str = "a") -> ServiceProcess:
        server = prepare(*arguments, name=name)
        server.start()
        server.wait_serving(DEADLINE_S)
        return server

    return start


@pytest.fixture
def fifo(folder: Path) -> Path:
    path = folder / "fifo"
    os.mkfifo(path)
    return path


def log_of(server: ServiceProcess) -> str:
    assert server.log_path is not None
    return server.log_path.read_text()


def logged_addresses(server: ServiceProcess) -> list[str]:
    (line,) = [line for line in log_of(server).splitlines() if " listening addresses=" in line]
    return line.rpartition("=")[2].split(",")


def dial(address: str) -> grpc.Channel:
    options = {
        "grpc.enable_http_proxy": 0,
        "grpc.initial_reconnect_backoff_ms": 100,
        "grpc.max_send_message_length": -1,
        "grpc.max_receive_message_length": -1,
    }
    return grpc.insecure_channel(address, options=tuple(options.items()))


def call(channel: grpc.Channel, method: str, text: str) -> str:
    stub = channel.unary_unary(f"/{SERVICE}/{method}", StringValue.SerializeToString, StringValue.FromString)
    answer: StringValue = stub(StringValue(value=text), timeout=DEADLINE_S)
    return answer.value


def call_raw(channel: grpc.Channel, method: str, data: bytes) -> grpc.StatusCode:
    """The status of a call with these bytes as its request."""
    try:
        channel.unary_unary(f"/{SERVICE}/{method}")(data, timeout=DEADLINE_S)
    except grpc.RpcError as error:
        return status_of(error)[0]
    return grpc.StatusCode.OK


def status_of(error: Any) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    """Code, reason and metadata."""
    status = rpc_status.from_call(error)
    if status is None:
        return error.code(), "", {}
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return error.code(), info.reason, dict(info.metadata)


def watch_health(channel: grpc.Channel, service: str = "") -> Iterator[int]:
    stub = channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        health_pb2.HealthCheckRequest.SerializeToString,
        health_pb2.HealthCheckResponse.FromString,
    )
    for answer in stub(health_pb2.HealthCheckRequest(service=service), wait_for_ready=True, timeout=DEADLINE_S):
        yield answer.status


def send_signal(server: ServiceProcess, number: int) -> None:
    assert server.pid is not None
    os.kill(server.pid, number)


def exit_status(server: ServiceProcess) -> int | None:
    assert server.wait_exited(DEADLINE_S)
    return server.returncode


# Addresses


def test_serves_on_a_socket_and_a_port_at_once(start: Start) -> None:
    server = start("--listen", "127.0.0.1:0")
    unix_address, tcp_address = logged_addresses(server)
    assert unix_address == server.address
    assert not tcp_address.endswith(":0")
    for address in (unix_address, tcp_address):
        with dial(address) as channel:
            assert call(channel, "Echo", address) == address


def test_a_port_in_use_is_said_clearly(start: Start, prepare: Start) -> None:
    _, tcp_address = logged_addresses(start("--listen", "127.0.0.1:0"))
    second = prepare("--listen", tcp_address, name="b")
    second.start()
    with pytest.raises(ServiceExitedError, match=f"{tcp_address}: another process is listening there"):
        second.wait_serving(DEADLINE_S)
    assert second.returncode == 1
    assert not Path(second.address.removeprefix("unix:")).exists()


def test_an_address_of_another_machine_is_said_clearly(prepare: Start) -> None:
    server = prepare("--listen", "192.0.2.1:7070", "--allow-plaintext")
    server.start()
    with pytest.raises(ServiceExitedError, match=r"192\.0\.2\.1:7070: can't listen there: Cannot assign"):
        server.wait_serving(DEADLINE_S)


def test_a_socket_in_use_is_refused_and_its_server_goes_on(start: Start, prepare: Start) -> None:
    first, second = start(), prepare()
    second.start()
    assert exit_status(second) == 1
    assert "another server is listening there" in log_of(second)
    with dial(first.address) as channel:
        assert call(channel, "Echo", "still here") == "still here"


def test_of_servers_that_start_together_one_gets_the_socket(prepare: Start) -> None:
    servers = [prepare() for _ in range(4)]
    for server in servers:
        server.start()
    with ThreadPoolExecutor(len(servers)) as pool:
        ends = {pool.submit(server.wait_exited, 3 * DEADLINE_S): server for server in servers}
        losers = [ends[end] for end in itertools.islice(as_completed(ends), len(servers) - 1)]
        (winner,) = set(servers) - set(losers)
        with dial(winner.address) as channel:
            assert call(channel, "Echo", "won") == "won"
        assert winner.terminate() == 0
    assert [server.returncode for server in losers] == [1, 1, 1]
    assert all("another server is listening there" in log_of(server) for server in losers)


def test_a_killed_server_leaves_a_socket_that_the_next_replaces(start: Start) -> None:
    server = start()
    server.kill()
    assert Path(server.address.removeprefix("unix:")).is_socket()
    server.restart(DEADLINE_S)
    with dial(server.address) as channel:
        assert call(channel, "Echo", "again") == "again"


def test_a_bad_flag_is_a_usage_error(prepare: Start) -> None:
    server = prepare("--listen", "nowhere")
    server.start()
    assert exit_status(server) == 2
    assert "'nowhere': neither host:port" in log_of(server)


# Health and reflection


@pytest.mark.parametrize("service", ["", SERVICE])
def test_health_says_not_serving_until_told(prepare: Start, fifo: Path, service: str) -> None:
    server = prepare("--model", f"fifo:{fifo}")
    server.start()
    with dial(server.address) as channel:
        health = watch_health(channel, service)
        assert next(health) == NOT_SERVING
        fifo.write_bytes(b"go")
        assert next(health) == SERVING


def test_reflection_lists_the_services(start: Start) -> None:
    with dial(start().address) as channel:
        stub = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = stub(iter([request]), timeout=DEADLINE_S)
    names = {service.name for service in answer.list_services_response.service}
    assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


# Errors


def test_an_error_carries_code_reason_and_metadata(start: Start) -> None:
    with dial(start().address) as channel, pytest.raises(grpc.RpcError, match="no pool 'a'") as caught:
        call(channel, "Echo", "refuse")
    assert status_of(caught.value) == (grpc.StatusCode.NOT_FOUND, "POOL_NOT_FOUND", {"pool": "a"})


def test_a_defect_is_internal_and_nothing_of_the_request_gets_out(start: Start) -> None:
    server = start()
    with dial(server.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            call(channel, "Echo", "defect")
        assert status_of(caught.value) == (grpc.StatusCode.INTERNAL, "INTERNAL", {})
        assert "secret" not in caught.value.details()  # type: ignore[attr-defined]
        assert call(channel, "Echo", "and on") == "and on"
    (line,) = [line for line in log_of(server).splitlines() if "ERROR" in line]
    assert f"method=/{SERVICE}/Echo error=KeyError at stand_in.py:" in line
    assert "secret" not in log_of(server)


@pytest.mark.parametrize("method", ["EchoStream", "EchoWrites"])
def test_a_defect_ends_a_stream_with_internal(start: Start, method: str) -> None:
    with dial(start().address) as channel:
        stub = channel.stream_stream(f"/{SERVICE}/{method}", StringValue.SerializeToString, StringValue.FromString)
        answers = stub(iter([StringValue(value="a"), StringValue(value="defect")]), timeout=DEADLINE_S)
        assert next(answers).value == "a"
        with pytest.raises(grpc.RpcError) as caught:
            next(answers)
    assert status_of(caught.value)[:2] == (grpc.StatusCode.INTERNAL, "INTERNAL")


def test_a_broken_invariant_ends_the_process(start: Start) -> None:
    server = start("--drain-timeout", "1000")
    with dial(server.address) as channel, pytest.raises(grpc.RpcError):
        call(channel, "Echo", "broken")
    assert exit_status(server) == 1
    assert "block 7 has two owners" in log_of(server)


TRUNCATED = StringValue(value="a text of some length").SerializeToString()[:-3]


def test_a_truncated_message_is_an_invalid_argument(start: Start) -> None:
    with dial(start().address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/{SERVICE}/Echo")(TRUNCATED, timeout=DEADLINE_S)
        assert status_of(caught.value) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", {"field": "request"})
        for method in ("EchoStream", "EchoWrites"):
            answers = channel.stream_stream(f"/{SERVICE}/{method}")(iter([b"", TRUNCATED]), timeout=DEADLINE_S)
            assert next(answers) == b""
            with pytest.raises(grpc.RpcError) as caught:
                next(answers)
            assert status_of(caught.value)[:2] == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")


def test_random_bytes_get_a_clear_status_and_hurt_nobody(start: Start) -> None:
    dice = random.Random(2)
    with dial(start().address) as channel:
        codes = {call_raw(channel, "Echo", dice.randbytes(dice.randrange(1, 64))) for _ in range(300)}
        assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
        assert grpc.StatusCode.INVALID_ARGUMENT in codes
        assert call(channel, "Echo", "unhurt") == "unhurt"


def test_a_message_too_large_is_refused(start: Start) -> None:
    with dial(start().address) as channel:
        assert call_raw(channel, "Echo", bytes(MAX_MESSAGE_BYTES + 1)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        text = "x" * (8 * 1024 * 1024)  # over gRPC's own limit, 4 MiB
        assert call(channel, "Echo", text) == text


def test_a_message_too_large_for_its_method_is_refused_with_the_limit(start: Start) -> None:
    with dial(start().address) as channel:
        stub = channel.unary_unary(f"/{SERVICE}/WhoAmI", StringValue.SerializeToString, StringValue.FromString)
        fits = StringValue(value="x" * (SMALL_MESSAGE_BYTES - 4))
        assert fits.ByteSize() == SMALL_MESSAGE_BYTES
        stub(fits, timeout=DEADLINE_S)
        with pytest.raises(grpc.RpcError) as caught:
            stub(StringValue(value="x" * (SMALL_MESSAGE_BYTES - 3)), timeout=DEADLINE_S)
        metadata = {"field": "request", "value": "65537 bytes", "limit": "at most 65536 bytes"}
        assert status_of(caught.value) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", metadata)
        answers = channel.stream_stream(f"/{SERVICE}/EchoStream")(iter([bytes(65537)]), timeout=DEADLINE_S)
        with pytest.raises(grpc.RpcError) as caught:
            next(answers)
        assert status_of(caught.value) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", metadata)


def test_a_call_without_a_message_is_an_invalid_argument(start: Start) -> None:
    with dial(start().address) as channel:
        call = channel.stream_unary(f"/{SERVICE}/Echo", StringValue.SerializeToString, StringValue.FromString)
        with pytest.raises(grpc.RpcError) as caught:
            call(iter(()), timeout=DEADLINE_S)
        assert status_of(caught.value) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", {"field": "request"})


def test_bytes_that_are_no_http2_hurt_nobody(start: Start) -> None:
    server = start()
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(DEADLINE_S)
        peer.connect(server.address.removeprefix("unix:"))
        peer.sendall(random.Random(3).randbytes(4096))
        while peer.recv(4096):
            pass  # until the server hangs up
    with dial(server.address) as channel:
        assert call(channel, "Echo", "unhurt") == "unhurt"


# Signals and drain


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_call_that_has_begun_finishes_after_the_signal(start: Start, fifo: Path, number: int) -> None:
    server = start()
    with dial(server.address) as channel:
        health = watch_health(channel)
        assert next(health) == SERVING
        stub = channel.unary_unary(f"/{SERVICE}/Hold", StringValue.SerializeToString, StringValue.FromString)
        held = stub.future(StringValue(value=str(fifo)), timeout=DEADLINE_S)
        with fifo.open("wb") as release:  # opens when the call is reading
            send_signal(server, number)
            assert next(health) == NOT_SERVING
            assert not held.done()
            release.write(b"go")
        assert held.result().value == str(fifo)
    assert exit_status(server) == 0
    assert not Path(server.address.removeprefix("unix:")).exists()


def test_the_drain_is_awaited_and_calls_are_answered_meanwhile(start: Start, fifo: Path) -> None:
    server = start("--model", f"drain:{fifo}")
    with dial(server.address) as channel:
        health = watch_health(channel)
        assert next(health) == SERVING
        send_signal(server, signal.SIGTERM)
        assert next(health) == NOT_SERVING
        assert call(channel, "Echo", "still answering") == "still answering"
        fifo.write_bytes(b"drained")
    assert exit_status(server) == 0


@pytest.mark.parametrize("method", ["EchoStream", "EchoWrites"])
def test_open_streams_end_with_a_reason_and_do_not_hold_up_the_stop(start: Start, method: str) -> None:
    server = start("--drain-timeout", "1000")
    requests: queue.SimpleQueue[StringValue | None] = queue.SimpleQueue()
    with dial(server.address) as channel:
        stub = channel.stream_stream(f"/{SERVICE}/{method}", StringValue.SerializeToString, StringValue.FromString)
        answers = stub(iter(requests.get, None), timeout=DEADLINE_S)
        requests.put(StringValue(value="a"))
        assert next(answers).value == "a"
        send_signal(server, signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as caught:
            next(answers)
        requests.put(None)
    assert status_of(caught.value)[:2] == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
    assert exit_status(server) == 0


@pytest.mark.parametrize("method", ["EchoStream", "EchoWrites"])
def test_streams_that_are_busy_end_too(start: Start, method: str) -> None:
    server = start("--drain-timeout", "1000")
    with dial(server.address) as channel:
        stub = channel.stream_stream(f"/{SERVICE}/{method}", StringValue.SerializeToString, StringValue.FromString)
        answers = stub(itertools.repeat(StringValue(value="a")), timeout=DEADLINE_S)
        assert len(list(itertools.islice(answers, 200))) == 200
        send_signal(server, signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as caught:
            list(answers)
    code, reason, _ = status_of(caught.value)
    # A client that is still sending may find the connection closed before it reads why.
    assert (code, reason or "SHUTTING_DOWN") == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
    assert exit_status(server) == 0


def test_what_does_not_finish_in_time_is_dropped(start: Start, fifo: Path) -> None:
    server = start("--drain-timeout", "0.1", "--model", f"drain:{fifo}")
    send_signal(server, signal.SIGTERM)
    assert exit_status(server) == 0
    assert "drain timed out timeout_s=0.1" in log_of(server)


def test_a_second_signal_stops_at_once(start: Start, fifo: Path) -> None:
    server = start("--drain-timeout", "1000", "--model", f"drain:{fifo}")
    with dial(server.address) as channel:
        health = watch_health(channel)
        assert next(health) == SERVING
        send_signal(server, signal.SIGTERM)
        assert next(health) == NOT_SERVING
        send_signal(server, signal.SIGTERM)
        assert exit_status(server) == 128 + signal.SIGTERM
    assert not Path(server.address.removeprefix("unix:")).exists()


def test_a_signal_during_the_start_ends_it(prepare: Start, fifo: Path) -> None:
    server = prepare("--model", f"fifo:{fifo}")
    server.start()
    with dial(server.address) as channel:
        assert next(watch_health(channel)) == NOT_SERVING
        send_signal(server, signal.SIGTERM)
        assert exit_status(server) == 0
    assert not Path(server.address.removeprefix("unix:")).exists()


# Metrics and environment


def test_the_metrics_port_answers_health_and_nothing_unknown(start: Start) -> None:
    server = start("--metrics-listen", "127.0.0.1:0")
    (line,) = [line for line in log_of(server).splitlines() if " metrics address=" in line]
    address = line.rpartition("=")[2]
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address}/healthz", timeout=DEADLINE_S) as page:
        assert (page.status, page.read()) == (200, b"ok\n")
    for path in ("/", "/health", "/metrics/", "/healthz/x"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            opener.open(f"http://{address}{path}", timeout=DEADLINE_S)


def test_the_metrics_page_has_our_families_and_the_process(start: Start, prepare: Start) -> None:
    server = start("--metrics-listen", "127.0.0.1:0")
    (line,) = [line for line in log_of(server).splitlines() if " metrics address=" in line]
    address = line.rpartition("=")[2]
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    page = opener.open(f"http://{address}/metrics", timeout=DEADLINE_S).read().decode()
    assert "\nquire_stand_in_pages_total 7.0\n" in page
    assert "\nprocess_resident_memory_bytes " in page
    second = prepare("--metrics-listen", address, name="b")
    second.start()
    assert exit_status(second) == 1
    assert f"--metrics-listen {address}: Address already in use" in log_of(second)
    server.terminate()
    assert server.returncode == 0


def test_flags_come_from_the_environment_too(prepare: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_STAND_IN_MODEL", "fail")
    server = prepare()
    server.start()
    assert exit_status(server) == 3
