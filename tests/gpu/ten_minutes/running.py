"""Parts run one after the other, each in a process with a limit; what they wrote is in one file after each part."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clocks import Clocks, sampled
from parts import GPU, PROBES, ROOT, Call, Part

sys.path.append(str(ROOT / "tests/framework"))

from roots import python_path

MIN_SECONDS = 3.0
"""A part is not begun with less time than this."""
DRY_SECONDS = 600.0
"""The limit of a part in a dry run: the machine may be busy, and no time counts."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a part.

    verdict       ok, FAILED, TIMED OUT, not run
    detail        the reason
    num_compiled  kernels that Triton compiled meanwhile
    content       the JSON that the part wrote, None if it wrote none
    log           all that it printed
    clocks        of the GPU meanwhile
    """

    part: Part
    verdict: str
    detail: str
    seconds: float = 0.0
    num_compiled: int = 0
    content: dict[str, Any] | None = None
    log: str = ""
    clocks: Clocks = field(default_factory=Clocks)

    @property
    def is_bad(self) -> bool:
        return self.verdict in ("FAILED", "TIMED OUT")

    def as_json(self) -> dict[str, Any]:
        figures = {figure.name: figure.read(self.content) for figure in self.part.figures}
        return {
            "verdict": self.verdict,
            "detail": self.detail,
            "seconds": round(self.seconds, 1),
            "num_compiled": self.num_compiled,
            "clocks": self.clocks.as_json(),
            "figures": figures,
            "content": self.content,
        }


def missing(what: Sequence[str] = tuple(PROBES)) -> set[str]:
    """Return those of PROBES that are not there."""
    environment = os.environ | {"PYTHONPATH": with_checkout(os.environ)}
    done = {
        name: subprocess.run([sys.executable, "-c", PROBES[name]], capture_output=True, env=environment)
        for name in what
    }
    return {name for name in what if done[name].returncode}


def run_call(call: Call, parts: Sequence[Part], folder: Path, *, dry: bool, absent: set[str]) -> Iterator[Outcome]:
    """Run parts of a call one by one. A part also has the time that those before it have left.

    The call's limit is over them all: what is not begun by then is not run.
    """
    begun = due = time.monotonic()
    for part in parts:
        now = time.monotonic()
        due += part.limit_s
        left = math.inf if dry else begun + call.seconds - now
        if left < MIN_SECONDS:
            yield Outcome(part, "not run", f"the {call.seconds:g} s of the call are over")
        else:
            limit_s = DRY_SECONDS if dry else min(max(part.limit_s, due - now), left)
            yield run(part, folder, dry=dry, absent=absent, limit_s=limit_s)


def run(part: Part, folder: Path, *, dry: bool, absent: set[str], limit_s: float | None = None) -> Outcome:
    """Run a part, or say why not. Ctrl-C ends its process and goes on to the caller.

    folder  for files that it writes beside its JSON
    dry     the small form, also where there is a GPU
    absent  what is not there, of PROBES
    """
    limit_s = limit_s or part.limit_s
    on_cpu = dry or GPU in absent
    with tempfile.TemporaryDirectory(prefix="ten-minutes-") as name:
        output = Path(name)
        arguments = part.dry_arguments(output) if on_cpu else part.arguments(output)
        lacking = [need for need in part.needs if need in absent and (need != GPU or arguments is None)]
        if lacking or arguments is None:
            return Outcome(part, "not run", f"there is no {' and no '.join(lacking or [GPU])}")
        environment = _environment(folder, on_cpu=on_cpu, interpret=bool(part.without_gpu))
        kernels, started = _num_kernels(environment), time.monotonic()
        with sampled(wanted=not on_cpu) as clocks:
            status, log = run_limited([sys.executable, *arguments], output / "log", environment, limit_s)
        seconds = time.monotonic() - started
        about = (seconds, _num_kernels(environment) - kernels, _content(output, part), log, clocks)
    where = "on the CPU" if on_cpu else ""
    if status is None:
        return Outcome(part, "TIMED OUT", _joined(where, f"not over after {limit_s:g} s"), *about)
    if status:
        return Outcome(part, "FAILED", _joined(where, f"status {status}"), *about)
    return Outcome(part, "ok", where, *about)


def run_limited(
    command: Sequence[str], log: Path, environment: Mapping[str, str], limit_s: float
) -> tuple[int | None, str]:
    """Run a command. Returns its status, None if the time was over and it was killed; and what it printed."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # a session of its own: nothing else is in it
                process.wait()
    return status, log.read_text(errors="replace")


def _joined(*words: str) -> str:
    return ": ".join(word for word in words if word)


def _environment(folder: Path, *, on_cpu: bool, interpret: bool) -> dict[str, str]:
    made = os.environ | {"PYTHONPATH": with_checkout(os.environ), "QUIRE_TEN_MINUTES": str(folder)}
    if on_cpu:
        made["CUDA_VISIBLE_DEVICES"] = ""
    if on_cpu and interpret:
        made["TRITON_INTERPRET"] = "1"
    return made


def with_checkout(environment: Mapping[str, str]) -> str:
    return os.pathsep.join(filter(None, (python_path(), environment.get("PYTHONPATH"))))


def _num_kernels(environment: Mapping[str, str]) -> int:
    """Return the number of kernels in Triton's cache. quire.worker.device.compilations has the same folder."""
    folder = Path(environment.get("TRITON_CACHE_DIR") or Path.home() / ".triton/cache")
    return sum(1 for _ in folder.glob("*/*.cubin"))


def _content(output: Path, part: Part) -> dict[str, Any] | None:
    path = output / part.json
    if not part.json or not path.is_file():
        return None
    content: dict[str, Any] = json.loads(path.read_text())
    return content
