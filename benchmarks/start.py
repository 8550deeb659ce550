"""Seconds of a start: `quire --help`, cachemgr until it serves, `quire up` with the demo's model until the first token.

    quire bench start

The three in turns. Each has its wall-clock time and its processor time, of all its processes; both have an end:

    help        the process has ended
    cachemgr    it says that it serves
    up          the first token arrives over HTTP, of a request that was sent when `quire up` said that it is ready
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil
from report import Findings, benchmark, spread, summary, table
from rich.progress import Progress

MODEL = Path(__file__).resolve().parents[1] / "deploy/demo/model"
TIMEOUT_S = 120.0
TO_REACH_S = {"help": 0.15, "cachemgr": 0.3, "up": 4.0}
WORDS = {
    "help": "quire --help",
    "cachemgr": "cachemgr until it serves",
    "up": "quire up until the first token over HTTP",
}


@dataclass(slots=True)
class Seconds:
    """One of the three, all runs: seconds by the clock, and of processors."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def add(self, began: float, processor: float) -> None:
        self.wall.append(round(time.perf_counter() - began, 4))
        self.processor.append(round(processor, 3))


def measure_help(seconds: Seconds) -> None:
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-P", "-m", "quire.cli", "--help"], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds.add(began, used.ru_utime + used.ru_stime)
    if process.returncode:
        raise RuntimeError(f"quire --help ended with status {process.returncode}")


def measure_cachemgr(seconds: Seconds) -> None:
    with tempfile.TemporaryDirectory(prefix="q-") as folder:
        command = [sys.executable, "-P", "-m", "quire.cachemgr", "--listen", f"unix:{folder}/cachemgr.sock"]
        began = time.perf_counter()
        with running(command, "stderr") as (process, said):
            await_line(said, r"quire\.cachemgr serving ")
            seconds.add(began, processor_s(process))


def measure_up(seconds: Seconds) -> None:
    with tempfile.TemporaryDirectory(prefix="q-") as folder:
        command = [sys.executable, "-P", "-m", "quire.cli", "up", str(MODEL), "--runtime-dir", folder, "--port", "0"]
        began = time.perf_counter()
        with running(command, "stdout") as (process, said):
            host, port = await_line(said, r"gateway +http://([^:]+):(\d+)")
            await_first_token(host, int(port))
            seconds.add(began, processor_s(process))


MEASURES: dict[str, Callable[[Seconds], None]] = {
    "help": measure_help,
    "cachemgr": measure_cachemgr,
    "up": measure_up,
}


@contextmanager
def running(command: list[str], pipe: str) -> Iterator[tuple[psutil.Popen, IO[str]]]:
    """A process, and what it writes to this pipe; it is ended at the end."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, pipe: subprocess.PIPE}
    with psutil.Popen(command, env=environment, text=True, **pipes) as process:
        try:
            yield process, getattr(process, pipe)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=TIMEOUT_S)


def await_line(said: IO[str], pattern: str) -> tuple[str, ...]:
    """Return the groups of the first line that has the pattern."""
    for line in said:
        if found := re.search(pattern, line):
            return found.groups()
    raise RuntimeError(f"the process ended before it said {pattern!r}")


def await_first_token(host: str, port: int) -> None:
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    body = {"prompt": "Once upon a time", "max_tokens": 1, "stream": True, "temperature": 0}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    event = answer.readline()
    connection.close()
    if answer.status != 200 or not event.startswith(b"data: {"):
        raise RuntimeError(f"the gateway answered {answer.status} {event!r}")


def processor_s(process: psutil.Process) -> float:
    """Processor seconds of a process, its descendants, and those of them that have ended."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return float(sum(each.user + each.system + each.children_user + each.children_system for each in times))


def measure(quick: bool, progress: Progress) -> Findings:
    rounds = 1 if quick else 15
    found = {name: Seconds() for name in MEASURES}
    task = progress.add_task("start", total=(rounds + 1) * len(MEASURES))
    for number in range(rounds + 1):  # the first one reads the files from the disk
        for name, run in MEASURES.items():
            run(found[name] if number else Seconds())
            progress.advance(task)
    made = table("seconds of a start", "", "wall clock", "to reach", "processor")
    for name, seconds in found.items():
        spreads = spread(seconds.wall, ".2f"), f"{TO_REACH_S[name]}", spread(seconds.processor, ".2f")
        made.add_row(WORDS[name], *spreads)
    figures = {
        name: {
            "to_reach_s": TO_REACH_S[name],
            "wall_s": summary(seconds.wall),
            "processor_s": summary(seconds.processor),
        }
        for name, seconds in found.items()
    }
    return Findings([made], figures, notes=["Files are in the page cache; modules are compiled."])


main = benchmark("start", measure, packages=("torch", "transformers", "grpcio", "click"))

if __name__ == "__main__":
    main()
