"""Tests, lines, wall time and processor time of each tier: of the last `make check`, `test`, `verify` and `night`.

    python tests/framework/tiers.py show                        the table, and the files that take most processor time
    python tests/framework/tiers.py record TIER PART COMMAND... run a command and keep what it took in build/tiers/

The Makefile records each command of a tier as a part of it, unless ARGS selects tests. Processor time is that of the
command and of all its descendants, so it is nearly the same on a busy machine. pytest's parts have it by test too:
conftest.py gives both times to junit's XML. A shared service counts for the test that it ends with.

Lines are those of the files with the tests; a file with tests of two tiers counts in both. Those of the crate are the
lines of its tests. Linux counts descendants of ended parents; other systems do not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

import forking

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "tiers"
CRATE = ROOT / "cachemgr" / "core" / "src"
TIERS = ("check", "test", "verify", "night")
NUM_FILES = 20
END_S = 10
"""The time that descendants may take to end after the command, to be counted."""


@dataclass(frozen=True)
class Taken:
    """The cost of a part of a tier; or of a tier, or of a file of tests."""

    num_tests: int
    num_lines: int
    wall_s: float
    processor_s: float

    def __add__(self, other: Taken) -> Taken:
        return Taken(
            self.num_tests + other.num_tests,
            self.num_lines + other.num_lines,
            self.wall_s + other.wall_s,
            self.processor_s + other.processor_s,
        )


NOTHING = Taken(0, 0, 0.0, 0.0)


def record(folder: Path, part: str, command: list[str]) -> int:
    """Run a command, record its cost as a part of the tier of this folder, return its exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / f"{part}.xml"
    results.unlink(missing_ok=True)
    if "pytest" in command:
        command = [*command, f"--junitxml={results}"]
    if sys.platform == "linux":
        forking.subreaper(True)
    begin_s = time.monotonic()
    status = await_all(subprocess.Popen(command))
    wall_s = time.monotonic() - begin_s
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    files = files_of(results) if results.exists() else crate_tests() if "cargo" in command else {}
    taken = sum(files.values(), NOTHING)
    total = Taken(taken.num_tests, taken.num_lines, wall_s, used.ru_utime + used.ru_stime)
    (folder / f"{part}.json").write_text(json.dumps({"status": status, **asdict(total)}, indent=2) + "\n")
    return status


def await_all(process: subprocess.Popen[bytes]) -> int:
    """Return the exit status of a process. Also wait for descendants that outlive it: then they are counted."""
    status = None
    while status is None:
        with contextlib.suppress(KeyboardInterrupt):  # the process gets the signal too, and decides
            pid, code = os.wait()
            if pid == process.pid:
                status = process.returncode = os.waitstatus_to_exitcode(code)
    signal.signal(signal.SIGALRM, stop_waiting)
    signal.alarm(END_S)
    with contextlib.suppress(ChildProcessError, TimeoutError):
        while True:
            os.wait()
    signal.alarm(0)
    return status if status >= 0 else 128 - status


def stop_waiting(*_: object) -> None:
    raise TimeoutError


def crate_tests() -> dict[str, Taken]:
    """Return the number of the crate's tests and their lines, by file."""
    found = {}
    for path in CRATE.rglob("*.rs"):
        _, mark, tests = path.read_text().partition("#[cfg(test)]")
        found[str(path.relative_to(ROOT))] = Taken(tests.count("#[test]"), (mark + tests).count("\n"), 0.0, 0.0)
    return found


def files_of(results: Path) -> dict[str, Taken]:
    """Return what each file of tests took, by path in the tree, from junit's XML."""
    taken: dict[str, Taken] = {}
    for case in ElementTree.parse(results).iter("testcase"):
        told = {each.get("name"): float(each.get("value", "")) for each in case.iter("property")}
        path = path_of(case.get("classname") or case.get("name", ""))
        before = taken.get(path) or Taken(0, (ROOT / path).read_text().count("\n"), 0.0, 0.0)
        taken[path] = before + Taken(1, 0, told.get("wall_s", 0.0), told.get("processor_s", 0.0))
    return taken


def path_of(name: str) -> str:
    """Return the file that holds this test: the name is of its module, or of a class in it."""
    words = name.split(".")
    paths = ["/".join(words[:length]) + ".py" for length in range(len(words), 0, -1)]
    return next(path for path in paths if (ROOT / path).exists())


def parts_of(folder: Path) -> dict[str, tuple[float, Taken]]:
    """Return when the parts of a tier ended, in seconds, and their costs, in this order."""
    parts = {}
    for ended_s, path in sorted((path.stat().st_mtime, path) for path in folder.glob("*.json")):
        told = json.loads(path.read_text())
        status = told.pop("status")
        parts[path.stem + (f" (failed: {status})" if status else "")] = ended_s, Taken(**told)
    return parts


def sum_of(parts: Iterable[tuple[float, Taken]]) -> Taken:
    """Return the cost of all parts. Time in which several of them ran beside each other counts once."""
    parts = list(parts)
    wall_s = last_s = 0.0
    for began_s, ended_s in sorted((ended_s - each.wall_s, ended_s) for ended_s, each in parts):
        wall_s += max(0.0, ended_s - max(began_s, last_s))
        last_s = max(last_s, ended_s)
    return replace(sum((each for _, each in parts), NOTHING), wall_s=wall_s)


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def row_of(tier: str, part: str, taken: Taken) -> str:
    counts = (f"{taken.num_tests:,}", f"{taken.num_lines:,}") if taken.num_tests else ("", "")
    return row(tier, part, *counts, f"{taken.wall_s:.0f}", f"{taken.processor_s:.0f}")


def lines_to_show(folder: Path) -> Iterator[str]:
    """The table of tiers, then that of the files of tests that took most processor time."""
    yield row("tier", "part", "tests", "lines", "wall s", "processor s")
    yield row("---", "---", "---:", "---:", "---:", "---:")
    files: Counter[tuple[str, str]] = Counter()
    taken: dict[tuple[str, str], Taken] = {}
    for tier in TIERS:
        parts = parts_of(folder / tier)
        for part, (_, each) in parts.items():
            yield row_of(tier, part, each)
        if parts:
            yield row_of(f"**{tier}**", "all", sum_of(parts.values()))
        for results in (folder / tier).glob("*.xml"):
            for path, each in files_of(results).items():
                taken[tier, path] = each
                files[tier, path] += round(1000 * each.processor_s)
    yield ""
    yield row("tier", "file", "tests", "lines", "wall s", "processor s")
    yield row("---", "---", "---:", "---:", "---:", "---:")
    for (tier, path), _ in files.most_common(NUM_FILES):
        yield row_of(tier, path, taken[tier, path])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the results are")
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("show")
    recording = commands.add_parser("record")
    recording.add_argument("tier", choices=TIERS)
    recording.add_argument("part")
    recording.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if given.what == "show":
        print("\n".join(lines_to_show(given.folder)))
    else:
        sys.exit(record(given.folder / given.tier, given.part, given.command))


if __name__ == "__main__":
    main()
