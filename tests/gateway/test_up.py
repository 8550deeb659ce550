"""`quire up` with its gateway, as a newcomer meets it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from deadlines import DEADLINE_S
from gateway.conftest import ROOT

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
