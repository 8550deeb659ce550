"""Callers that disconnect, read slowly or stay silent; the end of the process; open connections cost bounded memory."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from certificates import Authority
from deadlines import DEADLINE_S
from deploy.tools import find
from gateway.conftest import Gateway

from quire.cli.launch import LocalServices

LONG = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True}


def await_metric(gateway: Gateway, name: str, value: float) -> None:
    """Wait until a metric has this value. Raises AssertionError if it does not get it in time."""
    deadline = time.monotonic() + DEADLINE_S
    while (found := gateway.metric(name)) != value:
        assert time.monotonic() < deadline, f"{name} is {found}, not {value}"
        time.sleep(0.01)


def begin(gateway: Gateway, body: dict[str, Any], *, receive_buffer: int | None = None) -> socket.socket:
    """Send a request and return the connection, with nothing read."""
    host, _, port = gateway.url.removeprefix("http://").rpartition(":")
    connection = socket.socket()
    connection.settimeout(DEADLINE_S)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((host, int(port)))
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_caller_who_goes_frees_everything(gateway: Gateway, stream: bool) -> None:
    await_metric(gateway, "vllm:num_requests_running", 0)
    connections = [begin(gateway, LONG | {"stream": stream, "n": 2}) for _ in range(4)]
    await_metric(gateway, "vllm:num_requests_running", 8)
    before = gateway.metric("vllm:generation_tokens_total")
    for connection in connections:
        connection.close()
    await_metric(gateway, "vllm:num_requests_running", 0)
    await_metric(gateway, "quire_gateway_requests", 0)
    assert gateway.metric("vllm:generation_tokens_total") - before < 8 * 900


def test_a_caller_who_goes_during_the_body(gateway: Gateway) -> None:
    host, _, port = gateway.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    assert httpx.get(f"{gateway.url}/health", timeout=DEADLINE_S).status_code == 200


def test_pipelined_requests_are_answered_in_order(gateway: Gateway) -> None:
    host, _, port = gateway.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        connection.sendall(
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )
        received = b""
        while received.count(b"HTTP/1.1 200") < 2 or b"version" not in received:
            received += connection.recv(65536)
    assert received.index(b'{"status":"ok"}') < received.index(b'{"version"')


def exchange(gateway: Gateway, *parts: bytes) -> bytes:
    """Send these parts one after the other on one connection, and return all that comes until it is closed."""
    host, _, port = gateway.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        for part in parts:
            connection.sendall(part)
        with connection.makefile("rb") as answer:
            return answer.read()


H2C = b"Host: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
LAST = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
def test_a_body_behind_the_offer_of_an_upgrade_is_read(gateway: Gateway, is_chunked: bool, is_cut: bool) -> None:
    """curl --http2 and Java's client offer h2c with each POST; the answer is HTTP/1.1, and the connection goes on."""
    content = b'{"prompt": "Hi", "max_tokens": 2}'
    length = b"Transfer-Encoding: chunked\r\n" if is_chunked else b"Content-Length: %d\r\n" % len(content)
    framed = b"%x\r\n%s\r\n0\r\n\r\n" % (len(content), content) if is_chunked else content
    sent = b"POST /v1/completions HTTP/1.1\r\n" + H2C + length + b"\r\n" + framed + LAST
    parts = [sent[i : i + 7] for i in range(0, len(sent), 7)] if is_cut else [sent]
    received = exchange(gateway, *parts)
    assert received.count(b"HTTP/1.1 200 OK") == 2, received
    assert b'"completion_tokens":2' in received
    assert b'"version"' in received


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c", b"TLS/1.0"])
def test_the_offer_of_an_upgrade_without_a_body_changes_nothing(gateway: Gateway, protocol: bytes) -> None:
    offer = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: " + protocol + b"\r\n\r\n"
    received = exchange(gateway, offer + LAST)
    assert received.count(b"HTTP/1.1 200 OK") == 2, received


def test_curl_with_http2(gateway: Gateway) -> None:
    curl = find("curl", required_by="QUIRE_REQUIRE_FOREIGN", for_what="HTTP/2")
    command = [curl, "-sS", "--http2", f"{gateway.url}/v1/completions", "-d", '{"prompt": "Hi", "max_tokens": 2}']
    said = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=True)
    assert json.loads(said.stdout)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost:1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * 70_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 70_000,
    ],
    ids=["tls", "version", "length", "connect", "header", "path"],
)
def test_what_is_no_request_gets_an_error_as_all_others_have(gateway: Gateway, sent: bytes) -> None:
    head, _, content = exchange(gateway, sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in head.lower()
    assert b"x-request-id: " in head.lower()
    error = json.loads(content)["error"]
    assert (error["code"], error["type"], error["param"]) == ("invalid_http", "invalid_request_error", None)


def test_a_reader_who_is_too_slow_gets_an_error_and_frees_blocks(services: LocalServices, tmp_path: Path) -> None:
    """More unread tokens than --max-unread-tokens end the stream with an error, after the sent ones are read."""
    gateway = Gateway(services.cachemgr_address, "--max-unread-tokens", "64", log=tmp_path / "log")
    try:
        # Chunks with 20 log-probabilities each fill the socket's buffers.
        body = LONG | {"stream": True, "n": 16, "logprobs": 20}
        connection = begin(gateway, body, receive_buffer=4096)
        await_metric(gateway, "vllm:num_requests_running", 16)
        await_metric(gateway, "vllm:num_requests_running", 0)
        assert gateway.metric("quire_gateway_requests") == 1  # the caller still has to read
        received = b""
        while b"too_slow" not in received[-2000:]:
            part = connection.recv(65536)
            assert part, received[-500:]
            received += part
        connection.close()
    finally:
        gateway.close()


def test_a_reader_who_takes_nothing_is_disconnected(services: LocalServices, tmp_path: Path) -> None:
    gateway = Gateway(services.cachemgr_address, "--send-timeout", "0.5", log=tmp_path / "log")
    try:
        connection = begin(gateway, LONG | {"stream": True, "n": 16, "logprobs": 20}, receive_buffer=4096)
        await_metric(gateway, "vllm:num_requests_running", 16)
        await_metric(gateway, "quire_gateway_requests", 0)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(65536):
                pass
        connection.close()
    finally:
        gateway.close()


def test_sigterm_drains(services: LocalServices, tmp_path: Path) -> None:
    """Running streams end whole; new requests are refused with 503 meanwhile; then the process ends with status 0."""
    gateway = Gateway(services.cachemgr_address, "--drain-timeout", str(DEADLINE_S), log=tmp_path / "log")
    idle = gateway.connect()
    idle.connect()
    with gateway.client() as client, client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        gateway.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + DEADLINE_S
        while True:  # the signal is on its way
            idle.request("POST", "/v1/completions", json.dumps({"prompt": "Hi", "max_tokens": 1}))
            refused = idle.getresponse()
            content = refused.read()
            if refused.status == 503 or time.monotonic() > deadline:
                break
        assert refused.status == 503, content
        assert json.loads(content)["error"]["code"] == "shutting_down"
        assert refused.headers["Retry-After"]
        *_, last = [line for line in lines if line]
    assert last == "data: [DONE]"
    idle.close()
    assert gateway.process.wait(DEADLINE_S) == 0
    gateway.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_drain_that_takes_too_long_ends_streams_with_an_error(
    path: str, services: LocalServices, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    flags = ("--drain-timeout", "0.1", "--chat-template", str(template))
    gateway = Gateway(services.cachemgr_address, *flags, log=tmp_path / "log")
    asked = {"prompt": "The", "messages": [{"role": "user", "content": "The"}], "input": "The"}
    needed = {"/v1/completions": "prompt", "/v1/chat/completions": "messages", "/v1/responses": "input"}[path]
    limit = "max_output_tokens" if needed == "input" else "max_tokens"
    body = {needed: asked[needed], limit: 900, "ignore_eos": True, "stream": True}
    with gateway.client() as client, contextlib.ExitStack() as stack:
        streams = [stack.enter_context(client.stream("POST", path, json=body)).iter_lines() for _ in range(8)]
        whole = client.build_request("POST", path, json=body | {"stream": False})
        waiting = threading.Thread(target=lambda: answers.append(client.send(whole)))
        answers: list[httpx.Response] = []
        for lines in streams:
            next(lines)
        waiting.start()
        await_metric(gateway, "quire_gateway_requests", 9)
        gateway.process.send_signal(signal.SIGTERM)
        ends = [[line for line in lines if line.startswith("data:")][-1] for lines in streams]
        waiting.join(DEADLINE_S)
    assert all("engine_stopped" in end for end in ends), ends
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "engine_stopped")
    assert gateway.process.wait(DEADLINE_S) == 0
    assert "endpoint failed" not in gateway.log.read_text()
    gateway.close()


def test_a_second_signal_ends_at_once(services: LocalServices, tmp_path: Path) -> None:
    gateway = Gateway(services.cachemgr_address, log=tmp_path / "log")
    connection = begin(gateway, LONG | {"stream": True})
    assert connection.recv(16)
    gateway.process.send_signal(signal.SIGTERM)
    while "draining" not in gateway.log.read_text():
        time.sleep(0.01)
    gateway.process.send_signal(signal.SIGTERM)
    assert gateway.process.wait(DEADLINE_S) == 128 + signal.SIGTERM
    connection.close()
    gateway.close()


def test_a_port_that_is_taken_and_plain_text_for_others(
    gateway: Gateway, services: LocalServices, tmp_path: Path
) -> None:
    command = [sys.executable, "-P", "-m", "quire.gateway", "--cachemgr", services.cachemgr_address, "--listen"]
    taken = gateway.url.removeprefix("http://")
    said = subprocess.run([*command, taken], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert said.returncode == 1
    assert f"{taken}: another process is listening there" in said.stderr
    said = subprocess.run([*command, "0.0.0.0:0"], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert said.returncode == 1
    assert "--allow-anonymous" in said.stderr
    open_to_all = [*command, "0.0.0.0:0", "--allow-anonymous"]
    said = subprocess.run(open_to_all, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert said.returncode == 1
    assert "--allow-plaintext" in said.stderr


def served_certificate(url: str) -> bytes:
    host, _, port = url.removeprefix("https://").rpartition(":")
    return ssl.get_server_certificate((host, int(port)), timeout=DEADLINE_S).encode()


def test_tls_with_a_certificate_that_changes(services: LocalServices, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, other = authority.issue("127.0.0.1"), authority.issue("127.0.0.1")
    gateway = Gateway(services.cachemgr_address, *pair.flags(), log=tmp_path / "log")
    try:
        assert gateway.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=authority.path)
        body = {"prompt": "Hi", "max_tokens": 2}
        answer = httpx.post(f"{gateway.url}/v1/completions", json=body, verify=trusting, timeout=DEADLINE_S)
        assert answer.json()["usage"]["completion_tokens"] == 2
        first = served_certificate(gateway.url)
        pair.replace_by(other)
        deadline = time.monotonic() + DEADLINE_S
        while served_certificate(gateway.url) == first:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        answer = httpx.get(f"{gateway.url}/ready", verify=trusting, timeout=DEADLINE_S)
        assert answer.status_code == 200
    finally:
        gateway.close()


def resident_bytes(gateway: Gateway) -> int:
    return psutil.Process(gateway.process.pid).memory_info().rss


@pytest.mark.verify
def test_2000_idle_connections_and_256_slow_readers_cost_bounded_memory(
    services: LocalServices, tmp_path: Path
) -> None:
    """2,000 connections between two requests: 32 MiB. 256 readers that read nothing: 1 MiB each."""
    gateway = Gateway(services.cachemgr_address, "--max-unread-tokens", "256", log=tmp_path / "log")
    opened: list[http.client.HTTPConnection] = []
    slow: list[socket.socket] = []
    try:
        httpx.get(f"{gateway.url}/health", timeout=DEADLINE_S)
        before = resident_bytes(gateway)
        for _ in range(2000):
            opened.append(gateway.connect())
            opened[-1].request("GET", "/health")
            opened[-1].getresponse().read()
        idle_bytes = resident_bytes(gateway) - before
        slow += [
            begin(gateway, LONG | {"stream": True, "logprobs": 20, "max_tokens": 100}, receive_buffer=4096)
            for _ in range(256)
        ]
        await_metric(gateway, "vllm:num_requests_waiting", 0)
        await_metric(gateway, "vllm:num_requests_running", 0)
        slow_bytes = resident_bytes(gateway) - before - idle_bytes
        print(f"idle {idle_bytes / 2000 / 1024:.1f} KiB each, slow {slow_bytes / 256 / 1024:.1f} KiB each")
        assert idle_bytes < 32 * 2**20
        assert slow_bytes < 256 * 2**20
    finally:
        for connection in (*opened, *slow):
            connection.close()
        gateway.close()


@pytest.mark.verify
def test_bodies_that_do_not_end_and_prompts_that_wait_cost_what_their_limits_say(
    services: LocalServices, tmp_path: Path
) -> None:
    """A body that has not ended costs its bytes. A token of a prompt that waits costs less than 128 bytes."""
    gateway = Gateway(services.cachemgr_address, log=tmp_path / "log")
    opened: list[socket.socket] = []
    num_bodies, body_bytes, num_waiting, num_tokens = 16, 8 * 2**20, 256, 1_900
    host, _, port = gateway.url.removeprefix("http://").rpartition(":")
    try:
        httpx.get(f"{gateway.url}/health", timeout=DEADLINE_S)
        idle = resident_bytes(gateway)
        for _ in range(num_bodies):
            opened.append(socket.create_connection((host, int(port)), timeout=DEADLINE_S))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {2 * body_bytes}\r\n\r\n"
            opened[-1].sendall(head.encode() + b" " * body_bytes)
        deadline = time.monotonic() + DEADLINE_S
        while (bodies := resident_bytes(gateway) - idle) < 0.9 * num_bodies * body_bytes:
            assert time.monotonic() < deadline, f"{bodies} bytes"
            time.sleep(0.05)
        for connection in opened:
            connection.close()
        await_metric(gateway, "quire_gateway_requests", 0)
        before = resident_bytes(gateway)
        prompt = [7] * num_tokens
        # No more than one of them runs at a time: each has room for itself in the pool, and asks for all of it.
        opened += [begin(gateway, {"prompt": [*prompt, index], "max_tokens": 100}) for index in range(num_waiting)]
        deadline = time.monotonic() + DEADLINE_S
        while gateway.metric("vllm:num_requests_waiting") < 0.5 * num_waiting:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        waiting = resident_bytes(gateway) - before
        print(
            f"idle {idle / 2**20:.0f} MiB, bodies {bodies / num_bodies / body_bytes:.2f} bytes a byte, "
            f"waiting {waiting / num_waiting / num_tokens:.0f} bytes a token"
        )
        assert bodies < 2 * num_bodies * body_bytes
        assert waiting < 128 * num_waiting * num_tokens
    finally:
        for connection in opened:
            connection.close()
        gateway.close()
