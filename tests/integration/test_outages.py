"""`quire generate` says which service it waits for, and for how long, while that service is away."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from deadlines import DEADLINE_S

from quire.cli.launch import LocalServices

QUIRE = str(Path(sysconfig.get_path("scripts")) / "quire")
MODEL = Path(__file__).parents[2] / "deploy" / "demo" / "model"
# As many tokens as take a while.
LONG = ("generate", "The", "--max-tokens", "900", "--temperature", "100", "--ignore-eos")


@pytest.fixture(scope="module")
def services() -> Iterator[LocalServices]:
    arguments = ("--device", "cpu", "--threads", "1")
    with LocalServices.start(model=MODEL, num_blocks=128, extra_worker_args=arguments) as services:
        yield services


def begin(services: LocalServices, stderr: int) -> subprocess.Popen[bytes]:
    """`quire generate`, once it has printed something. Ended after DEADLINE_S."""
    process = subprocess.Popen(
        [QUIRE, *LONG, "--cachemgr", services.cachemgr_address], stdout=subprocess.PIPE, stderr=stderr
    )
    watchdog = threading.Timer(DEADLINE_S, process.kill)
    watchdog.daemon = True
    watchdog.start()
    assert process.stdout is not None
    assert process.stdout.read(1)
    return process


def test_a_worker_that_stays_away_is_named_in_a_line(services: LocalServices) -> None:
    with begin(services, subprocess.PIPE) as process:
        assert process.stderr is not None
        services.worker.kill()
        said = process.stderr.readline().decode()
        assert re.fullmatch(r"waiting for the worker, \d+ s at most \(.+\)\n", said)
        services.worker.start()
        services.worker.wait_serving(DEADLINE_S)
        assert process.stderr.readline() == b"the services are back\n"
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130


def test_on_a_terminal_the_line_counts_down_and_goes_away(services: LocalServices) -> None:
    near, far = pty.openpty()
    with begin(services, far) as process:
        os.close(far)
        services.worker.kill()
        seen = read_until(near, rb"waiting for the worker, (\d+) s at most.*waiting for the worker, (?!\1)(\d+) s")
        services.worker.start()
        services.worker.wait_serving(DEADLINE_S)
        seen += read_until(near, rb"\r\x1b\[K$")
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    os.close(near)
    assert b"services are back" not in seen


def read_until(terminal: int, pattern: bytes) -> bytes:
    seen = b""
    while not re.search(pattern, seen, re.DOTALL):
        seen += os.read(terminal, 65536)
    return seen
