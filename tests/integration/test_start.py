"""The lines of docs/start/first-client.md do as the page says, unchanged, in order, without a QUIRE_ variable."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

import pages
import pytest
from pages import ROOT

from quire.cli import __file__ as CLI

PAGE, THIS = "docs/start/first-client.md", "tests/integration/test_start.py"
TIMEOUT_S = 300.0


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """The environment of a user after login: only the port is another one, and the runtime folder is the test's own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    with tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as folder:
        yield {**kept, "XDG_RUNTIME_DIR": folder, "QUIRE_UP_HTTP_LISTEN": "127.0.0.1:0"}


FIRST, SECOND = (block.commands() for block in pages.blocks(PAGE) if block.test == THIS and block.language == "")


def command(line: str) -> list[str]:
    program, *arguments = shlex.split(line)
    assert program == "quire"
    return [sys.executable, "-P", CLI, *arguments]


@pytest.fixture(scope="module", autouse=True)
def first_terminal(environment: dict[str, str]) -> Iterator[None]:
    """Run the only line of the first block until the tests end."""
    (line,) = FIRST
    assert line == "quire up deploy/demo/model"
    with subprocess.Popen(command(line), cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            assert any("ready" in said for said in process.stdout)
            yield
        finally:
            process.terminate()
            watchdog.cancel()


@pytest.mark.parametrize("line", [line for line in SECOND if "--help" not in line and line != "quire top"])
def test_a_line_for_the_second_terminal(line: str, environment: dict[str, str]) -> None:
    done = subprocess.run(
        command(line), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_top_shows_the_same(environment: dict[str, str]) -> None:
    assert "quire top" in SECOND
    once = [*command("quire top"), "--once"]
    done = subprocess.run(
        once, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "pool default" in done.stdout


def test_python_snippet_streams_two_samples(environment: dict[str, str]) -> None:
    snippet = pages.block(PAGE, test=THIS, language="python").text
    done = subprocess.run(
        [sys.executable, "-c", snippet],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line[:2] in ("0 ", "1 ")]
    assert len(lines) >= 4
    assert {line[0] for line in lines} == {"0", "1"}
