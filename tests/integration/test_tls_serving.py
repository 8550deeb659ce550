"""TLS, mTLS and tokens on a server's ports, seen from outside of a real process, with certificates made here."""

from __future__ import annotations

import contextlib
import queue
import re
import socket
import ssl
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority, Pair, sha256
from cryptography import x509
from deadlines import DEADLINE_S
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from integration.protocol_client import CHANNEL_OPTIONS, RefusedError

from quire.cli.service_process import ServiceExitedError, ServiceProcess

STAND_IN = str(Path(__file__).with_name("stand_in.py"))
SERVICE = "quire.test.StandIn"

Start = Callable[..., ServiceProcess]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Short enough for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


@pytest.fixture(scope="module")
def stranger(folder: Path) -> Authority:
    """A CA without trust."""
    return Authority(folder, "stranger")


@pytest.fixture
def pair(authority: Authority) -> Pair:
    return authority.issue("localhost", "127.0.0.1")


@pytest.fixture
def prepare(folder: Path) -> Iterator[Start]:
    """Makes servers that are not started yet; every one is ended at the end of the test."""
    made: list[ServiceProcess] = []

    def prepare(*arguments: str) -> ServiceProcess:
        address = f"unix:{folder}/a.sock"
        log_path = Path(tempfile.mkstemp(dir=folder, suffix=".log")[1])
        server = ServiceProcess(
            "a", target=STAND_IN, arguments=("--listen", address, *arguments), address=address, log_path=log_path
        )
        made.append(server)
        return server

    yield prepare
    for server in made:
        server.kill()


@pytest.fixture
def start(prepare: Start) -> Start:
    def start(*arguments: str) -> ServiceProcess:
        server = prepare(*arguments)
        server.start()
        server.wait_serving(DEADLINE_S)
        return server

    return start


def refusal_of_start(server: ServiceProcess) -> str:
    """The error of a server that does not start."""
    server.start()
    with pytest.raises(ServiceExitedError):
        server.wait_serving(DEADLINE_S)
    return log_of(server)


def log_of(server: ServiceProcess) -> str:
    assert server.log_path is not None
    return server.log_path.read_text()


def addresses(server: ServiceProcess) -> list[str]:
    """Its TCP addresses."""
    (line,) = [line for line in log_of(server).splitlines() if " listening addresses=" in line]
    return [address for address in line.rpartition("=")[2].split(",") if not address.startswith("unix:")]


def metrics_port(server: ServiceProcess) -> int:
    (line,) = [line for line in log_of(server).splitlines() if " metrics address=" in line]
    return int(line.rpartition(":")[2])


@contextlib.contextmanager
def dial(
    address: str, authority: Authority | None = None, client: Pair | None = None, *, name: str = ""
) -> Iterator[grpc.Channel]:
    options = [*CHANNEL_OPTIONS, *([("grpc.ssl_target_name_override", name)] if name else [])]
    if authority is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        pair = (None, None) if client is None else (client.key.read_bytes(), client.cert.read_bytes())
        credentials = grpc.ssl_channel_credentials(authority.path.read_bytes(), *pair)
        channel = grpc.secure_channel(address, credentials, options=options)
    with channel:
        yield channel


def metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    return () if token is None else (("authorization", f"Bearer {token}"),)


def call(channel: grpc.Channel, method: str, text: str = "", *, token: str | None = None) -> str:
    """The answer. Raises RefusedError."""
    stub = channel.unary_unary(f"/{SERVICE}/{method}", StringValue.SerializeToString, StringValue.FromString)
    try:
        answer: StringValue = stub(StringValue(value=text), timeout=DEADLINE_S, metadata=metadata(token))
    except grpc.RpcError as error:
        raise RefusedError.of_call(error) from None
    return answer.value


def refusal(channel: grpc.Channel, method: str, *, token: str | None = None) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(RefusedError) as refused:
        call(channel, method, token=token)
    return refused.value.code, refused.value.reason


def handshake_failure(channel: grpc.Channel) -> str:
    """Why no call gets through."""
    with pytest.raises(RefusedError) as refused:
        call(channel, "Echo")
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE
    return refused.value.message


class EchoStream:
    """A stream that is open."""

    def __init__(self, channel: grpc.Channel, *, method: str = "EchoStream", token: str | None = None) -> None:
        self._texts: queue.SimpleQueue[StringValue] = queue.SimpleQueue()
        stub = channel.stream_stream(f"/{SERVICE}/{method}", StringValue.SerializeToString, StringValue.FromString)
        self._answers: Any = stub(iter(self._texts.get, None), metadata=metadata(token), timeout=DEADLINE_S)

    def echo(self, text: str) -> str:
        self._texts.put(StringValue(value=text))
        answer: StringValue = next(self._answers)
        return answer.value

    def end(self) -> RefusedError:
        """The status with which the server ends it."""
        with pytest.raises(grpc.RpcError):
            next(self._answers)
        return RefusedError.of_call(self._answers)


def certificate_served(address: str) -> str:
    host, port = address.split(":")
    return ssl.get_server_certificate((host, int(port)))


def first_pem(pair: Pair) -> str:
    end = "-----END CERTIFICATE-----"
    return ssl.DER_cert_to_PEM_cert(ssl.PEM_cert_to_DER_cert(pair.cert.read_text().partition(end)[0] + end))


LOOPBACK = ("--listen", "127.0.0.1:0")
DENIED, UNKNOWN = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED


# -- TLS ----------------------------------------------------------------------------------------------------------


def test_tls(start: Start, authority: Authority, stranger: Authority, pair: Pair) -> None:
    server = start(*LOOPBACK, *pair.flags())
    (address,) = addresses(server)
    with dial(address, authority) as channel:
        assert call(channel, "Echo", "hello") == "hello"
        # Nobody is asked: everybody has every role.
        assert call(channel, "WhoAmI") == " client,content,gateway,operator,worker"
    with dial(server.address) as channel:  # unix sockets are not TLS
        assert call(channel, "Echo", "hello") == "hello"
    with dial(address, stranger) as channel:
        assert "CERTIFICATE_VERIFY_FAILED" in handshake_failure(channel)
    with dial(address, authority, name="another.example") as channel:
        assert "Hostname Verification Check failed" in handshake_failure(channel)
    with dial(address, authority, name="localhost") as channel:
        assert call(channel, "Echo", "hello") == "hello"
    with dial(address) as channel:  # no plain text beside it
        handshake_failure(channel)


def test_mutual_tls(start: Start, authority: Authority, stranger: Authority, pair: Pair) -> None:
    server = start(*LOOPBACK, *pair.flags(), "--tls-client-ca", str(authority.path))
    (address,) = addresses(server)
    with dial(address, authority, authority.issue("spiffe-like.example", common_name="cn")) as channel:
        assert call(channel, "WhoAmI") == "spiffe-like.example client"
        assert refusal(channel, "Hold") == (DENIED, "ROLE_MISSING")
        assert refusal(channel, "Echo", token="abc") == (UNKNOWN, "TOKEN_REJECTED")
    for client in (None, stranger.issue("a"), authority.issue("a", days=-1)):
        with dial(address, authority, client) as channel:
            handshake_failure(channel)
    with dial(server.address) as channel:  # on the unix socket there is no certificate to show
        assert refusal(channel, "Echo") == (UNKNOWN, "CREDENTIALS_MISSING")


def test_roles_of_certificates(start: Start, authority: Authority, pair: Pair, folder: Path) -> None:
    tokens = folder / "certificate-roles"
    tokens.write_text("wanda.example worker cert\nolga client,operator cert\n")
    flags = ("--tls-client-ca", str(authority.path), "--token-file", str(tokens))
    (address,) = addresses(start(*LOOPBACK, *pair.flags(), *flags))
    with dial(address, authority, authority.issue("10.0.0.1", common_name="olga")) as channel:
        assert call(channel, "WhoAmI") == "olga client,operator"
        assert EchoStream(channel, method="EchoWrites").echo("for operators") == "for operators"
    with dial(address, authority, authority.issue("wanda.example")) as channel:
        assert refusal(channel, "Echo") == (DENIED, "ROLE_MISSING")
    with dial(address, authority, authority.issue("alice.example", common_name="olga")) as channel:
        assert refusal(channel, "Echo") == (DENIED, "ROLE_MISSING")  # its name is alice.example


def test_a_certificate_is_replaced_under_an_open_stream(start: Start, authority: Authority, folder: Path) -> None:
    files = Pair(folder / "rotated.pem", folder / "rotated.key")
    first, second, expired = (authority.issue("127.0.0.1", days=days) for days in (365, 300, -1))
    files.replace_by(first)
    server = start(*LOOPBACK, "--listen", "127.0.0.1:0", *files.flags())
    both = addresses(server)
    assert len(both) == 2
    with dial(both[0], authority) as channel:
        stream = EchoStream(channel)
        assert stream.echo("before") == "before"
        assert {certificate_served(address) for address in both} == {first_pem(first)}
        files.cert.write_bytes(second.cert.read_bytes())  # half of it
        assert {certificate_served(address) for address in both} == {first_pem(first)}
        files.key.write_bytes(second.key.read_bytes())
        assert {certificate_served(address) for address in both} == {first_pem(second)}
        files.replace_by(expired)
        assert {certificate_served(address) for address in both} == {first_pem(second)}
        assert stream.echo("after") == "after"
    log = log_of(server)
    assert log.count(f"certificate not reloaded, the one before stays: {files.key}: not the key of") == 1, "said once"
    assert f"certificate not reloaded, the one before stays: {files.cert}: certificate has expired" in log
    assert "BEGIN" not in log


def test_the_authority_of_clients_is_replaced(
    start: Start, authority: Authority, stranger: Authority, pair: Pair, folder: Path
) -> None:
    trusted = folder / "trusted.pem"
    trusted.write_bytes(authority.path.read_bytes())
    (address,) = addresses(start(*LOOPBACK, *pair.flags(), "--tls-client-ca", str(trusted)))
    ours, theirs = authority.issue("a"), stranger.issue("b")
    with dial(address, authority, ours) as channel:
        assert call(channel, "WhoAmI") == "a client"
    trusted.write_bytes(stranger.path.read_bytes())
    with dial(address, authority, theirs) as channel:
        assert call(channel, "WhoAmI") == "b client"
    with dial(address, authority, ours) as channel:
        handshake_failure(channel)


# -- tokens -------------------------------------------------------------------------------------------------------


def test_tokens(start: Start, folder: Path) -> None:
    tokens = folder / "tokens"
    tokens.write_text(f"alice client {sha256('a-token')}\nwanda worker {sha256('w-token')}\n")
    server = start(*LOOPBACK, "--token-file", str(tokens))
    (address,) = addresses(server)
    with dial(address) as channel:
        assert call(channel, "WhoAmI", token="a-token") == "alice client"
        assert refusal(channel, "Hold", token="a-token") == (DENIED, "ROLE_MISSING")
        assert refusal(channel, "Echo", token="w-token") == (DENIED, "ROLE_MISSING")
        assert refusal(channel, "Echo", token="wrong-token") == (UNKNOWN, "TOKEN_REJECTED")
        assert refusal(channel, "Echo", token=sha256("a-token")) == (UNKNOWN, "TOKEN_REJECTED")
        assert refusal(channel, "Echo") == (UNKNOWN, "CREDENTIALS_MISSING")
        for method in ("EchoStream", "EchoWrites"):
            assert EchoStream(channel, method=method).end().reason == "CREDENTIALS_MISSING"
        assert EchoStream(channel, method="EchoWrites", token="a-token").end().reason == "ROLE_MISSING"

        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S).status == 1
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        assert next(reflection.ServerReflectionInfo(iter([asked]), timeout=DEADLINE_S)).list_services_response.service

        stream = EchoStream(channel, token="a-token")
        assert stream.echo("open") == "open"
        tokens.write_text(f"alice client {sha256('another-token')}\nwanda worker {sha256('w-token')}\n")
        assert refusal(channel, "Echo", token="a-token") == (UNKNOWN, "TOKEN_REJECTED")
        assert call(channel, "Echo", "new", token="another-token") == "new"
        ended = stream.end()
        assert (ended.code, ended.reason) == (UNKNOWN, "TOKEN_REJECTED")
    log = log_of(server)
    for secret in ("a-token", "w-token", "wrong-token", "another-token"):
        assert secret not in log
        assert sha256(secret) not in log
    assert "refused method=/quire.test.StandIn/Echo reason=TOKEN_REJECTED" in log


def test_tokens_for_who_has_no_certificate(start: Start, authority: Authority, pair: Pair, folder: Path) -> None:
    tokens = folder / "some-tokens"
    tokens.write_text(f"alice client {sha256('a-token')}\nwanda.example worker cert\n")
    flags = ("--tls-client-ca", str(authority.path), "--token-file", str(tokens), "--token-listen", "127.0.0.1:0")
    with_certificate, with_token = addresses(start(*LOOPBACK, *pair.flags(), *flags))
    with dial(with_token, authority) as channel:
        assert call(channel, "WhoAmI", token="a-token") == "alice client"
        assert refusal(channel, "Echo") == (UNKNOWN, "CREDENTIALS_MISSING")
    with dial(with_token, authority, authority.issue("wanda.example")) as channel:
        assert refusal(channel, "Hold") == (UNKNOWN, "CREDENTIALS_MISSING")  # this server authenticates nobody
    with dial(with_certificate, authority) as channel:
        handshake_failure(channel)


# -- what is refused at start -------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--listen", "--metrics-listen"])
def test_plain_text_for_all_is_refused(prepare: Start, flag: str) -> None:
    log = refusal_of_start(prepare(flag, "0.0.0.0:0"))
    assert f"can't start: {flag} 0.0.0.0:0: not loopback, and there is no certificate" in log


def test_plain_text_for_all_that_is_asked_for(start: Start) -> None:
    server = start("--listen", "0.0.0.0:0", "--metrics-listen", "0.0.0.0:0", "--allow-plaintext")
    (address,) = addresses(server)
    with dial(address.replace("0.0.0.0", "127.0.0.1")) as channel:
        assert call(channel, "Echo", "hello") == "hello"


def test_a_certificate_that_nobody_would_accept_is_refused(prepare: Start, authority: Authority) -> None:
    expired = authority.issue("localhost", days=-1)
    assert f"can't start: {expired.cert}: certificate has expired" in refusal_of_start(prepare(*expired.flags()))


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--tls-cert", "a"], "--tls-cert and --tls-key go together"),
        (["--tls-client-ca", "a"], "--tls-client-ca needs --tls-cert"),
        (["--token-listen", "127.0.0.1:0"], "--token-listen needs"),
        (["--token-file", "/nowhere"], "can't start: /nowhere: No such file"),
    ],
)
def test_flags_that_make_no_sense_are_refused(prepare: Start, flags: list[str], complaint: str) -> None:
    assert complaint in refusal_of_start(prepare(*flags))


# -- metrics ------------------------------------------------------------------------------------------------------


def page(port: int, authority: Authority | None, client: Pair | None = None) -> str:
    context = None if authority is None else ssl.create_default_context(cafile=str(authority.path))
    if context is not None and client is not None:
        context.load_cert_chain(client.cert, client.key)
    scheme = "http" if context is None else "https"
    with urllib.request.urlopen(f"{scheme}://127.0.0.1:{port}/metrics", timeout=DEADLINE_S, context=context) as found:
        text: str = found.read().decode()
        return text


def expiries(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"^quire_tls_certificate_expiry_timestamp_seconds (\S+)$", text, re.M)]


def expiry_of(pair: Pair) -> float:
    return x509.load_pem_x509_certificate(first_pem(pair).encode()).not_valid_after_utc.timestamp()


def test_metrics_over_tls_and_when_the_certificate_in_force_ends(
    start: Start, authority: Authority, folder: Path
) -> None:
    files = Pair(folder / "metrics.pem", folder / "metrics.key")
    first, second = authority.issue("127.0.0.1", days=20), authority.issue("127.0.0.1", days=90)
    files.replace_by(first)
    port = metrics_port(start("--metrics-listen", "127.0.0.1:0", *files.flags()))
    with socket.create_connection(("127.0.0.1", port)):  # and says nothing
        text = page(port, authority)
        assert "quire_stand_in_pages_total 7.0" in text
        assert expiries(text) == [expiry_of(first)]
        assert certificate_served(f"127.0.0.1:{port}") == first_pem(first)
        for files_now in (second, authority.issue("127.0.0.1", days=-1)):  # the last one is refused
            files.replace_by(files_now)
            assert expiries(page(port, authority)) == [expiry_of(second)]
            assert certificate_served(f"127.0.0.1:{port}") == first_pem(second)
    with pytest.raises(OSError, match=r"."):
        page(port, None)


def test_without_a_certificate_the_page_tells_of_no_end(start: Start) -> None:
    text = page(metrics_port(start("--metrics-listen", "127.0.0.1:0")), None)
    assert "# TYPE quire_tls_certificate_expiry_timestamp_seconds gauge" in text
    assert expiries(text) == []


def test_metrics_over_mutual_tls(start: Start, authority: Authority, stranger: Authority, pair: Pair) -> None:
    flags = ("--metrics-listen", "127.0.0.1:0", *pair.flags(), "--tls-client-ca", str(authority.path))
    port = metrics_port(start(*flags))
    assert "quire_stand_in_pages_total 7.0" in page(port, authority, authority.issue("prometheus"))
    for client in (None, stranger.issue("prometheus")):
        with pytest.raises((OSError, urllib.error.URLError)):
            page(port, authority, client)
