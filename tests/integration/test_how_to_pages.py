"""Pages that are followed from beginning to end, as those of docs/tutorials are: docs/asked-for-elsewhere.md, and of
docs/how-to debug-a-preemption-storm.md, lab.md, move-from-vllm.md, prompt-caching.md, read-a-profile.md,
speculative-decoding.md and upgrade-a-running-pair.md."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pages
import pytest
from conformance.foreign import find
from conformance.page import commands
from deadlines import DEADLINE_S
from integration.following import follow, name_of, shell, starting, stripped
from integration.protocol_client import await_that
from pages import ROOT
from ports import free_ports

THIS = "tests/integration/test_how_to_pages.py"
UPGRADE = "docs/how-to/upgrade-a-running-pair.md"


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        yield Path(name)


def test_asked_for_elsewhere(folder: Path) -> None:
    follow("docs/asked-for-elsewhere.md", test=THIS, folder=folder)


@pytest.mark.parametrize(
    "page",
    [
        "docs/how-to/debug-a-preemption-storm.md",
        "docs/how-to/move-from-vllm.md",
        "docs/how-to/prompt-caching.md",
        "docs/how-to/speculative-decoding.md",
    ],
)
def test_through_the_gateway(page: str, folder: Path) -> None:
    find("curl", for_what=page)
    (port,) = free_ports(1)
    follow(page, test=THIS, folder=folder, replaced={"8000": str(port)})


def test_lab(folder: Path) -> None:
    follow("docs/how-to/lab.md", test=THIS, folder=folder)


def test_read_a_profile(folder: Path) -> None:
    page = "docs/how-to/read-a-profile.md"
    follow(page, test=THIS, folder=folder, replaced={"trace.json": str(folder / "trace.json")})


def test_upgrade_a_running_pair(folder: Path) -> None:
    """Both services end by SIGTERM and begin again while the page's client runs."""
    (folder / "deploy").symlink_to(ROOT / "deploy")
    (folder / "quire").mkdir()
    (folder / "state").mkdir(mode=0o700)
    blocks = [each for each in pages.blocks(UPGRADE) if each.test == THIS]
    (lines,) = (each.text.splitlines() for each in blocks if each.language == "")
    (program,) = (each for each in blocks if each.language == "python")
    (folder / name_of(program)).write_text(program.text)
    talk, audit = (
        command for each in blocks if each.language == "console" for command in commands(f"```console\n{each.text}```")
    )
    with ExitStack() as stack:
        cachemgr, worker = (stack.enter_context(starting(line, folder, folder)) for line in lines)
        said = folder / "said"
        run = stack.enter_context(shell(folder, {"XDG_RUNTIME_DIR": str(folder)}))
        with said.open("w") as output, (folder / "log").open("w") as log:
            client = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, program_name(talk.text)],
                    cwd=folder,
                    env={"XDG_RUNTIME_DIR": str(folder), "PATH": ""},
                    stdout=output,
                    stderr=log,
                )
            )
        stack.callback(client.kill)
        await_that("the client has begun", lambda: "begun" in said.read_text())
        before = run.run("quire stats --json | grep epoch")
        assert cachemgr.terminate() == 0
        cachemgr.start()
        cachemgr.wait_serving(DEADLINE_S)
        assert run.run("quire stats --json | grep epoch") == before
        assert worker.terminate() == 0
        worker.start()
        worker.wait_serving(DEADLINE_S)
        assert run.run("quire stats --json | grep epoch") != before
        (folder / "stop").touch()
        assert client.wait(DEADLINE_S) == 0
        assert talk.agrees_with(stripped(said.read_text()))
        assert "recovering: " in (folder / "log").read_text()
        assert audit.agrees_with(stripped(run.run(audit.text)))


def program_name(command: str) -> str:
    python, name = command.split()
    assert python == "python"
    return name
