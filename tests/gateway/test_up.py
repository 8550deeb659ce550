"""`quire up` with its gateway, as a newcomer meets it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from certificates import Authority
from deadlines import DEADLINE_S
from gateway.conftest import ROOT
from integration.protocol_client import await_that
from ports import free_port

QUIRE = str(Path(sysconfig.get_path("scripts")) / "quire")
MODEL = str(ROOT / "deploy/demo/model")
pytestmark = pytest.mark.usefixtures("with_http")
Process = subprocess.Popen[str]


@pytest.fixture
def with_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_UP_NO_HTTP", raising=False)


@contextlib.contextmanager
def running(folder: Path, *flags: str) -> Iterator[tuple[Process, str]]:
    """A `quire up` with the demo's model that is ready, and what it has printed."""
    command = [QUIRE, "up", MODEL, "--num-blocks", "64", "--runtime-dir", str(folder), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as up:
        try:
            stdout: Any = up.stdout
            shown = ""
            for line in stdout:
                shown += line
                if line.strip().startswith("curl "):
                    break
            yield up, shown
        finally:
            if up.poll() is None:
                up.kill()


def ended(up: Process, *numbers: int) -> tuple[int, str]:
    """Send these signals; return the status and the rest of stderr."""
    for number in numbers:
        up.send_signal(number)
    _, stderr = up.communicate(timeout=DEADLINE_S)
    return up.returncode, stderr


def test_up_prints_a_curl_line_that_works(tmp_path: Path) -> None:
    with running(tmp_path, "--port", "0") as (up, shown):
        curl = shown.splitlines()[-1]
        answer = subprocess.run(curl, shell=True, capture_output=True, timeout=DEADLINE_S, check=True)
        assert 1 <= json.loads(answer.stdout)["usage"]["completion_tokens"] <= 32  # sampled: it may end before
        assert re.search(r"curl -s http://127\.0\.0\.1:\d+/v1/completions", curl)
        assert ended(up, signal.SIGTERM)[0] == 0
    assert not list(tmp_path.glob("*.sock"))


@pytest.mark.night
@pytest.mark.usefixtures("with_http")
def test_a_request_of_a_rank_that_is_killed_is_answered(tmp_path: Path) -> None:
    """A lost rank ends its worker, which `quire up` starts again: the request goes on there."""
    flags = ("--threads", "1", "--dtype", "float32", "--tensor-parallel-size", "3", "--num-blocks", "512")
    command = [QUIRE, "up", "--model", str(ROOT / "deploy/demo/model"), *flags, "--runtime-dir", str(tmp_path)]
    up = subprocess.Popen([*command, "--http-listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
    try:
        stdout: Any = up.stdout
        url = re.search(r"http://127\.0\.0\.1:\d+", next(line for line in stdout if "curl -s http" in line))
        assert url is not None
        body = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "n": 8}
        with httpx.Client(base_url=url[0], timeout=DEADLINE_S) as client, ThreadPoolExecutor() as threads:
            asked = threads.submit(client.post, "/v1/completions", json=body)
            await_that("the request runs", lambda: num_running(client) > 0)
            rank = next(each for each in psutil.Process(up.pid).children(recursive=True) if is_follower(each))
            rank.kill()
            answer = asked.result(DEADLINE_S)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8 * 900
    finally:
        up.send_signal(signal.SIGTERM)
        up.communicate(timeout=DEADLINE_S)


def num_running(client: httpx.Client) -> float:
    """Return the sequences that run."""
    lines = client.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("vllm:num_requests_running")).split()[-1])


def is_follower(process: psutil.Process) -> bool:
    """Return True for a rank of a worker but the first."""
    return "spawn_main" in " ".join(process.cmdline())


@pytest.mark.usefixtures("with_http")
def test_certificate_tokens_and_logs_are_those_of_all_three(tmp_path: Path) -> None:
    tokens, services = tmp_path / "tokens", tmp_path / "services.token"
    services.write_text("s3cret")
    services.chmod(0o600)
    digests = {name: hashlib.sha256(token.encode()).hexdigest() for name, token in (("s", "s3cret"), ("a", "alices"))}
    tokens.write_text(f"services worker,client,gateway {digests['s']}\nalice client {digests['a']}\n")
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception('a template of the flag') }}")
    authority, port = Authority(tmp_path), free_port()
    flags = (
        *authority.issue("127.0.0.1").flags(),
        *("--token-file", str(tokens), "--cachemgr-token-file", str(services)),
        *("--log-format", "json", "--port", str(port), "--chat-template", str(template)),
    )
    folder = tmp_path / "run"
    with running(folder, *flags) as (up, shown):
        assert f"https://127.0.0.1:{port}" in shown
        context = ssl.create_default_context(cafile=authority.path)
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=context, timeout=DEADLINE_S) as client:
            body = {"prompt": "Once", "max_tokens": 2}
            assert client.post("/v1/completions", json=body).status_code == 401
            key = {"Authorization": "Bearer alices"}
            assert client.post("/v1/completions", json=body, headers=key).status_code == 200
            chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
            assert "a template of the flag" in client.post("/v1/chat/completions", json=chat, headers=key).text
        curl = subprocess.run(
            shown.splitlines()[-1],
            shell=True,
            capture_output=True,
            check=True,
            env={**os.environ, "QUIRE_API_KEY": "alices"},
        )
        assert json.loads(curl.stdout)["choices"]
        assert ended(up, signal.SIGTERM)[0] == 0
    for service in ("cachemgr", "worker", "gateway"):
        lines = [
            line for line in (folder / f"{service}.log").read_text().splitlines() if not line.startswith("serving ")
        ]
        assert lines
        assert all(json.loads(line)["level"] for line in lines)


def test_a_key_of_the_command_line_is_needed_and_shown_to_nobody(tmp_path: Path) -> None:
    with running(tmp_path, "--port", "0", "--api-key", "tell-nobody") as (up, shown):
        curl = shown.splitlines()[-1]
        found = [
            subprocess.run(curl, shell=True, capture_output=True, check=True, env={**os.environ, "QUIRE_API_KEY": key})
            for key in ("other", "tell-nobody")
        ]
        assert [next(iter(json.loads(each.stdout))) for each in found] == ["error", "id"]
        (gateway,) = re.findall(r"gateway .*\(pid (\d+)\)", shown)
        assert b"tell-nobody" not in Path(f"/proc/{gateway}/cmdline").read_bytes()
        assert ended(up, signal.SIGTERM)[0] == 0


def test_up_says_that_the_port_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        up = subprocess.run(
            [QUIRE, "up", "--model", "any", "--runtime-dir", str(tmp_path), "--http-listen", taken],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
            env=dict(os.environ),
        )
    assert up.returncode == 1
    assert f"HTTP can't be served at {taken}: Address already in use" in up.stderr
    assert "--no-http" in up.stderr


def begun_stream(url: str, *, max_tokens: int = 900, n: int = 8) -> subprocess.Popen[str]:
    """Begin a stream that takes longer than the test, or a shorter one, and wait for its first event."""
    body = json.dumps({"prompt": "The", "max_tokens": max_tokens, "ignore_eos": True, "n": n, "stream": True})
    stream = subprocess.Popen(["curl", "-sN", f"{url}/v1/completions", "-d", body], stdout=subprocess.PIPE, text=True)
    assert stream.stdout is not None
    assert stream.stdout.readline().startswith("data:")
    return stream


@pytest.mark.parametrize(
    ("drain_timeout", "sizes", "last"),
    [
        (str(DEADLINE_S), {"max_tokens": 300, "n": 2}, "data: [DONE]"),
        ("0.2", {}, '"code":"engine_stopped"'),
    ],
)
def test_ctrl_c_lets_streams_end_with_their_event(
    tmp_path: Path, drain_timeout: str, sizes: dict[str, int], last: str
) -> None:
    with running(tmp_path, "--port", "0", "--drain-timeout", drain_timeout) as (up, shown):
        stream = begun_stream(url_in(shown), **sizes)
        up.send_signal(signal.SIGINT)
        text, _ = stream.communicate(timeout=DEADLINE_S)
        assert last in text.strip().splitlines()[-1]
        status, stderr = ended(up)
    assert status == 0
    assert f"Open requests may finish, for at most {float(drain_timeout):g} s. Ctrl-C again ends at once." in stderr
    assert "SIGKILL" not in stderr


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    with running(tmp_path, "--port", "0", "--drain-timeout", str(10 * DEADLINE_S)) as (up, shown):
        stream = begun_stream(url_in(shown))
        (worker,) = re.findall(r"worker .*\(pid (\d+)\)", shown)
        os.kill(int(worker), signal.SIGSTOP)  # the stream does not end
        up.send_signal(signal.SIGINT)
        stderr: Any = up.stderr
        assert any("Ctrl-C again ends at once" in line for line in stderr)
        status, _ = ended(up, signal.SIGINT)
        text, _ = stream.communicate(timeout=DEADLINE_S)
    assert status == 130
    assert "[DONE]" not in text
    assert not list(tmp_path.glob("*.sock"))


def url_in(shown: str) -> str:
    return re.findall(r"gateway +(http://\S+)", shown)[0]
