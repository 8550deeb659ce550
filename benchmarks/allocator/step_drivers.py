"""Processes that step whole schedulers: each under a Python that has the scheduler, asked by lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from environments import PeerUnavailable, last_line
from peer_runs import FOLDER, QUIET, interpreter

ANSWER_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class StepDriver:
    """The process of one scheduler, and the file of what it says on standard error."""

    process: subprocess.Popen[str]
    errors: IO[str]

    def ask(self, question: dict[str, int]) -> dict[str, Any]:
        """The answer to one line. Raises PeerUnavailable if the process ends instead, or is not done in time."""
        timer = threading.Timer(ANSWER_TIMEOUT_S, self.process.kill)
        timer.start()
        try:
            answer = self._answer(json.dumps(question))
            is_late = not timer.is_alive()
        finally:
            timer.cancel()
        if answer is not None:
            return answer
        if is_late:
            raise PeerUnavailable(f"no answer within {ANSWER_TIMEOUT_S} s")
        self.process.wait()
        self.errors.seek(0)
        raise PeerUnavailable(last_line(self.errors.read()))

    def _answer(self, line: str) -> dict[str, Any] | None:
        """None if the process has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        for said in self.process.stdout:
            if said.startswith("{"):  # packages write lines of their own
                answer: dict[str, Any] = json.loads(said)
                return answer
        return None


@contextmanager
def step_driver(name: str) -> Iterator[StepDriver]:
    """The driver of a scheduler. Raises PeerUnavailable if there is no Python that has it."""
    python = interpreter(name)
    if not python.exists():
        raise PeerUnavailable("not installed; --peers installs it")
    command = [str(python), str(FOLDER / f"{name}_steps.py")]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | QUIET,
            text=True,
        ) as process,
    ):
        try:
            yield StepDriver(process, errors)
        finally:
            process.kill()
            process.communicate()
