"""`quire up` with its gateway, as a newcomer meets it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from deadlines import DEADLINE_S
from gateway.conftest import ROOT
from integration.protocol_client import await_that

QUIRE = str(Path(sysconfig.get_path("scripts")) / "quire")


@pytest.fixture
def with_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_UP_NO_HTTP", raising=False)


@pytest.mark.usefixtures("with_http")
def test_up_prints_a_curl_line_that_works(tmp_path: Path) -> None:
    command = [QUIRE, "up", "--model", str(ROOT / "deploy/demo/model"), "--num-blocks", "64"]
    up = subprocess.Popen(
        [*command, "--runtime-dir", str(tmp_path), "--http-listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    )
    try:
        stdout: Any = up.stdout
        shown = next(line for line in stdout if line.strip().startswith("curl "))
        answer = subprocess.run(shown, shell=True, capture_output=True, timeout=DEADLINE_S, check=True)
        assert 1 <= json.loads(answer.stdout)["usage"]["completion_tokens"] <= 32  # sampled: it may end before
        assert re.search(r"curl -s http://127\.0\.0\.1:\d+/v1/completions", shown)
    finally:
        up.send_signal(signal.SIGTERM)
        up.communicate(timeout=DEADLINE_S)
    assert up.returncode == 0
    assert not list(tmp_path.glob("*.sock"))


@pytest.mark.verify
@pytest.mark.usefixtures("with_http")
def test_a_request_of_a_rank_that_is_killed_is_answered(tmp_path: Path) -> None:
    """A lost rank ends its worker, and this all processes of `quire up`: open requests get 503 before that."""
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
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["type"] == "service_unavailable_error"
        assert answer.headers["Retry-After"]
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
