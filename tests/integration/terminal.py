"""A command of `quire` in a terminal of its own: keys are pressed, the screen is read, the terminal is put back."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sysconfig
import termios
import time
from collections.abc import Iterator
from pathlib import Path

from integration.protocol_client import DEADLINE_S

QUIRE = str(Path(sysconfig.get_path("scripts")) / "quire")
HOME = "\x1b[H"
LEFT = "\x1b[?1049l"


@contextlib.contextmanager
def hung_up_with_its_terminal() -> Iterator[None]:
    """Start processes with the default for SIGHUP within the block, also where nohup runs the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


class Terminal:
    """A terminal of some size with a command in it."""

    def __init__(
        self,
        *arguments: str,
        command: tuple[str, ...] = ("top", "--interval", "0.1"),
        width: int = 80,
        height: int = 24,
        **environment: str,
    ) -> None:
        self._near, self._far = pty.openpty()
        self.resize(width, height)
        self.before = termios.tcgetattr(self._far)
        self._has_screen = command[0] != "generate"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("QUIRE_", "NO_COLOR"))}
        for name in ("COLUMNS", "LINES"):
            kept.pop(name, None)
        with hung_up_with_its_terminal():
            self.process = subprocess.Popen(
                [QUIRE, *command, *arguments],
                stdin=self._far,
                stdout=self._far,
                stderr=self._far,
                env={**kept, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"} | environment,
                process_group=0,
            )
        self.written = ""

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._near, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._near, keys.encode())

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def read(self, timeout_s: float = 0.1) -> None:
        """Takes the written output, if there is any within the time."""
        if select.select([self._near], [], [], timeout_s)[0]:
            with contextlib.suppress(OSError):
                self.written += os.read(self._near, 65536).decode(errors="replace")

    def await_left(self) -> None:
        """Wait until the screen is the shell's again. The terminal may pass on a write after the writer has ended."""
        deadline = time.monotonic() + DEADLINE_S
        while LEFT not in self.written:
            assert time.monotonic() < deadline, self.written
            self.read()

    def frame(self) -> list[str]:
        """The lines of the last frame that was drawn whole, without colours."""
        frames = self.written.split(HOME)
        text = frames[-2] if len(frames) > 2 else ""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "").rstrip("\n").split("\n")

    def await_frame(self, pattern: str) -> list[str]:
        """The first frame from now on that the pattern is found in, `^` and `$` being a line's ends."""
        deadline = time.monotonic() + DEADLINE_S
        self.written = self.written[-1:] if not self.written.endswith(HOME) else HOME
        while not re.search(pattern, "\n".join(self.frame()), re.MULTILINE):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.frame()}"
            assert self.process.poll() is None, self.written
            self.read()
        return self.frame()

    def await_text(self, pattern: str) -> str:
        """Return the text so far, without colours and controls, once the pattern is found in it."""
        deadline = time.monotonic() + DEADLINE_S
        while not re.search(pattern, self.text()):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.text()!r}"
            self.read()
        return self.text()

    def text(self) -> str:
        """Return the text so far, without colours and controls."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.written).replace("\r", "")

    def await_colour(self, cells: str) -> None:
        """A frame from now on with cells of this colour in the map's first row, and of none else."""
        deadline = time.monotonic() + DEADLINE_S
        self.written = HOME
        while not re.search(rf" 1 (\x1b\[0m)?\x1b\[{cells}+(\x1b|\r|\n)", self.written.rpartition(HOME)[0]):
            assert time.monotonic() < deadline, repr(self.written[-4000:])
            self.read()

    def await_end(self) -> int:
        """The exit status. The terminal has to be as it was, and the screen the shell's again."""
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline
            self.read()
        if self._has_screen:
            self.await_left()
        while select.select([self._near], [], [], 0)[0]:
            self.read()
        assert termios.tcgetattr(self._far) == self.before
        assert self.written.rfind("\x1b[?25h") >= self.written.rfind("\x1b[?25l")
        assert "Traceback" not in self.written
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._near)
        os.close(self._far)
