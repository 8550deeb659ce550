"""`quire demo` from start to end, and ended at every stage: with pipes, and in a terminal with Ctrl-C."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from deadlines import DEADLINE_S

QUIRE = str(Path(sysconfig.get_path("scripts")) / "quire")
CTRL_C = b"\x03"
NUM_BLOCKS = 65
LONG = ("--samples", "8", "--max-tokens", "1500")
TAKE_TERMINAL = str(Path(__file__).with_name("take_terminal.py"))
SMALL_PROMPTS = {
    "system": "A list of arguments. " * 8,
    "join": "\n",
    "prompts": ["The value", "A function", "It returns"],
}


def environment(folder: Path) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("QUIRE_") or name == "QUIRE_VERIFY"
    }
    return {**kept, "TMPDIR": str(folder), "TERM": "xterm-256color"}


def nothing_left(folder: Path) -> bool:
    """No runtime folder, and no service that was told to listen in one."""
    processes = [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(f"unix:{folder}" in argument for argument in process.info["cmdline"] or ())
    ]
    return not processes and not list(folder.glob("quire-*"))


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as name:
        yield Path(name)


@contextmanager
def piped(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A demo with output into a pipe; killed if it does not end in time."""
    process = subprocess.Popen(
        [QUIRE, "demo", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment(folder), "COLUMNS": "80"},
    )
    watchdog = threading.Timer(DEADLINE_S, process.kill)
    watchdog.start()
    try:
        with process:
            yield process
    finally:
        watchdog.cancel()
        process.kill()


class Terminal:
    """A demo in a terminal of its own."""

    def __init__(self, folder: Path, *arguments: str, width: int, height: int) -> None:
        self._main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        command = [sys.executable, TAKE_TERMINAL, QUIRE, "demo", *arguments]
        self._process = subprocess.Popen(
            command, stdin=side, stdout=side, stderr=side, env=environment(folder), start_new_session=True
        )
        os.close(side)
        self._watchdog = threading.Timer(DEADLINE_S, self._process.kill)
        self._watchdog.start()
        self.seen = ""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.cancel()
        self._process.kill()
        self._process.wait()
        os.close(self._main)

    def press(self, keys: bytes) -> None:
        os.write(self._main, keys)

    def read_until(self, text: str) -> None:
        """Reads until this is on the screen; fails if the demo ends before."""
        while text not in self.seen:
            assert self._read(), f"ended without {text!r}: {self.seen[-2000:]}"

    def status(self) -> int:
        """Reads the rest and waits for the end."""
        while self._read():
            pass
        return self._process.wait(DEADLINE_S)

    def _read(self) -> bool:
        try:
            data = os.read(self._main, 65536)
        except OSError:  # Linux: the other side is closed
            data = b""
        self.seen += data.decode(errors="replace")
        return bool(data)

    @property
    def last_line(self) -> str:
        lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.seen).replace("\r", "\n").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "")


# To the end


@pytest.fixture(scope="module")
def shown() -> Iterator[str]:
    """The output of a demo into a pipe."""
    with tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as name, piped(Path(name)) as process:
        output, _ = process.communicate()
        assert process.returncode == 0, output
        assert nothing_left(Path(name))
        yield output


def test_every_sample_is_printed(shown: str) -> None:
    numbers = [int(line.split("/", 1)[0][1:]) for line in shown.splitlines() if re.match(r"\[\d+/16\] ", line)]
    assert numbers == list(range(1, 17))


def test_the_numbers_are_of_one_pool(shown: str) -> None:
    """128 blocks at both moments; the prefix is computed once, and each second sample is a fork."""
    fullest, final = (
        {label: int(count) for count, label in re.findall(r"(\d+) (shared|held|retired|cached|free)", line)}
        for line in shown.splitlines()
        if re.search(r"\d+ shared .*\d+ free", line)
    )
    assert sum(fullest.values()) == sum(final.values()) == 128
    # All 16, unless the machine is so busy that no look at the pool met them.
    num_sequences = int(re.search(r"while (\d+) sequences ran", shown)[1])  # type: ignore[index]
    assert 2 <= num_sequences <= 16
    assert fullest["shared"] >= 1
    assert fullest["held"] >= num_sequences
    assert final["shared"] == final["held"] == final["retired"] == 0
    assert final["cached"] >= 1
    admitted = int(re.search(r"prompt tokens admitted +(\d+)", shown)[1])  # type: ignore[index]
    cached = int(re.search(r"found in the cache +(\d+)", shown)[1])  # type: ignore[index]
    assert 0.5 < cached / admitted < 1
    assert re.search(r"samples forked from another +8\n", re.sub(r" +\n", "\n", shown))
    assert "128 blocks, no violation" in shown


def test_less_memory_than_contiguous_buffers(shown: str) -> None:
    rows = re.findall(r"([\d,]+) +([\d,]+) +([\d.]+) % +[\d.]+ [KM]iB", shown)
    (_, paged_slots, paged_ratio), (_, slots, slots_ratio) = rows
    assert int(slots.replace(",", "")) == 16 * 2048
    assert int(paged_slots.replace(",", "")) < int(slots.replace(",", "")) / 10
    assert float(paged_ratio) > 5 * float(slots_ratio)


def test_without_a_terminal_there_is_nothing_for_one(shown: str) -> None:
    assert "\x1b" not in shown
    long_lines = ("[", "Starting", "cachemgr (", "  curl ")  # with paths, and what is to be copied
    assert all(len(line) <= 80 for line in shown.splitlines() if not line.startswith(long_lines))


def test_in_a_terminal_with_prompts_of_ones_own(folder: Path) -> None:
    prompts = folder / "prompts.json"
    prompts.write_text(json.dumps(SMALL_PROMPTS))
    arguments = ("--prompts", str(prompts), "--max-tokens", "8", "--num-blocks", str(NUM_BLOCKS))
    with Terminal(folder, *arguments, width=80, height=24) as terminal:
        assert terminal.status() == 0, terminal.seen
    assert "loading" in terminal.seen
    assert "6 of 6 samples done" in terminal.seen
    assert "\x1b[3" in terminal.seen or "\x1b[9" in terminal.seen  # colours
    assert "64 blocks, no violation" in terminal.seen
    assert nothing_left(folder)


# Not to the end


@pytest.mark.parametrize(
    ("stage", "text"),
    [("starting cachemgr", "starting"), ("loading the model", "loading"), ("generating", "samples done")],
)
def test_ctrl_c_leaves_nothing(folder: Path, stage: str, text: str) -> None:
    with Terminal(folder, *LONG, width=80, height=24) as terminal:
        terminal.read_until(text)
        terminal.press(CTRL_C)
        assert terminal.status() == 130, terminal.seen
    assert terminal.last_line.endswith("Interrupted. Both services have ended, nothing is left behind.")
    assert "Traceback" not in terminal.seen
    assert nothing_left(folder)


def test_ctrl_c_at_the_end_leaves_nothing(folder: Path) -> None:
    with Terminal(folder, width=200, height=50) as terminal:
        terminal.read_until("ownership audit")
        terminal.press(CTRL_C)
        assert terminal.status() in (0, 130)  # it may be over by then
    assert "Traceback" not in terminal.seen
    assert nothing_left(folder)


@pytest.mark.usefixtures("started_by_exec")
def test_ctrl_c_pressed_again_and_again(folder: Path) -> None:
    with Terminal(folder, width=80, height=24) as terminal:
        terminal.read_until("loading")
        for _ in range(20):
            terminal.press(CTRL_C)
        assert terminal.status() == 130, terminal.seen
    assert nothing_left(folder)


@pytest.mark.usefixtures("started_by_exec")
def test_sigterm_while_starting_leaves_nothing(folder: Path) -> None:
    with piped(folder) as process:
        while len(psutil.Process(process.pid).children()) < 2:
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate()
        assert process.returncode == 143
    assert "Traceback" not in output
    assert nothing_left(folder)


def test_sigterm_while_generating_leaves_nothing(folder: Path) -> None:
    with piped(folder, *LONG) as process:
        assert process.stdout is not None
        assert any("serve on unix sockets" in line for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate()
        assert process.returncode == 143
    assert "Traceback" not in output
    assert nothing_left(folder)


def test_a_reader_that_goes_away_ends_it(folder: Path) -> None:
    with piped(folder, *LONG) as process:
        assert process.stdout is not None
        assert any("serve on unix sockets" in line for line in process.stdout)
        process.stdout.close()
        assert process.wait() == 1
    assert nothing_left(folder)


@pytest.mark.parametrize("name", ["cachemgr", "worker"])
def test_a_service_that_dies_is_said(folder: Path, name: str) -> None:
    with piped(folder, *LONG) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "serve on unix sockets" in line)
        pid = int(re.search(rf"{name} \(pid (\d+)\)", line)[1])  # type: ignore[index]
        os.kill(pid, signal.SIGKILL)
        output, _ = process.communicate()
        assert process.returncode == 1
    assert f"Error: {name} was ended by SIGKILL" in output
    assert "Traceback" not in output
    assert nothing_left(folder)


# Not even begun


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"system": "", "join": "", "prompts": []}', '{"system": 1}'])
def test_a_file_that_has_no_prompts(folder: Path, content: str) -> None:
    prompts = folder / "prompts.json"
    prompts.write_text(content)
    with piped(folder, "--prompts", str(prompts)) as process:
        output, _ = process.communicate()
        assert process.returncode == 1
    assert f"{prompts} is no file of prompts" in output
    assert "Traceback" not in output


def test_a_model_that_does_not_exist(folder: Path) -> None:
    (folder / "empty").mkdir()
    with piped(folder, "--model", str(folder / "empty")) as process:
        output, _ = process.communicate()
        assert process.returncode == 1
    assert "worker ended with status 2" in output
    assert "Traceback" not in output
    assert nothing_left(folder)
