"""A process that the tests fork is what exec would have started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import forking
import psutil
import pytest

PROGRAM = """
    import atexit, json, os, signal, sys, threading
    def describe():
        atexit.register(lambda: print("at the end", flush=True))
        first, *others = sys.argv[1:]
        if first == "raise":
            raise RuntimeError("told to")
        if first == "wait":
            print("waits", flush=True)
            threading.Event().wait()
        if first == "status":
            sys.exit(int(others[0]))
        print(json.dumps({
            "arguments": sys.argv[1:], "folder": os.getcwd(), "name": __name__,
            "environment": os.environ.get("QUIRE_SAID"), "input": sys.stdin.read(), "parent": os.getppid(),
            "session": os.getsid(0) == os.getpid(),
            "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd")), "preloaded": "forking" in sys.modules,
        }))
    describe()
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere exec starts every process")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that prints its environment, in a folder that counts as the tests' own."""
    monkeypatch.setattr(forking, "PROGRAMS", (*forking.PROGRAMS, tmp_path))
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    return script


def run(program: Path, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)  # type: ignore[call-overload,no-any-return]


@linux
def test_it_sees_what_a_started_program_sees(program: Path, tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    options = {
        "cwd": tmp_path,
        "env": os.environ | {"QUIRE_SAID": "this"},
        "input": "a line\n",
        "pass_fds": (read_fd,),
        "start_new_session": True,
    }
    forked = run(program, "say", "ä b", **options)
    with forking.started_by_exec():
        started = run(program, "say", "ä b", **options)
    os.close(read_fd)
    os.close(write_fd)
    said, expected = (json.loads(done.stdout.splitlines()[0]) for done in (forked, started))
    assert said.pop("preloaded")
    assert not expected.pop("preloaded")
    assert said == expected
    assert said["parent"] == os.getpid()
    assert forked.stdout.splitlines()[1:] == started.stdout.splitlines()[1:] == ["at the end"]
    assert (forked.returncode, forked.stderr) == (0, "")


@linux
def test_it_ends_as_a_started_program_ends(program: Path) -> None:
    assert run(program, "status", "7").returncode == 7
    failed = run(program, "raise")
    assert failed.returncode == 1
    assert failed.stderr.endswith("RuntimeError: told to\n")
    assert failed.stdout == "at the end\n"


@linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it(program: Path, number: int) -> None:
    with subprocess.Popen(
        [sys.executable, str(program), "wait"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        assert psutil.Process(process.pid).cmdline()[-2:] == [str(program), "wait"]
        process.send_signal(number)
        assert process.wait(120) == -number
    assert not psutil.pid_exists(process.pid)


@linux
def test_an_environment_that_imports_read_is_for_exec(program: Path) -> None:
    done = run(program, "say", env=os.environ | {"HF_HUB_OFFLINE": "0"})
    assert not json.loads(done.stdout.splitlines()[0])["preloaded"]
