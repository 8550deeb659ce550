"""How many simulated schedules run until a seeded bug is found; the record of it, and its table in the docs.

    python tests/robustness/mutation/mutants.py --suite simulation --record      runs, and keeps the numbers
    python tests/robustness/mutation/simulated.py                                writes the table

The record is simulated.json, the table that of docs/reference/simulation.md. Each verdict is kept as soon as it is
known, with what its seeds drew: the same command goes on where it was stopped, and judges again where other schedules
are drawn by now.

Schedules are those of the seeds from 0 on, for bugs that need a disk those of the first seeds with disks, see
robustness/simulation.
"""

from __future__ import annotations

import json
import mmap
import signal
import struct
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[2] / folder) for folder in (".", "framework"))

# isort: split
from seeded_bugs import BUGS, DISK, KEPT_AWAY_BY, NOT_SIMULATED, SIMULATED_IDEAS, Bug, needs_of
from standing_in import NOT_RUN, forked, require_imported_from, stand_in

SCHEDULES = 3_000
NUM_DRAWN = 300
"""Schedules that are compared with those of an earlier record."""
SCHEDULE_TIMEOUT_S = 60
"""Of processor time: a tenth of a second is usual."""
START_TIMEOUT_S = 300
RECORD = Path(__file__).with_name("simulated.json")
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "simulation.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
COUNT = struct.Struct("q")
OTHER_SUITE = "another suite of `mutants.py`"
"""Each night requires it of all bugs of other ideas than those of the simulation."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """How many schedules ran, the one that failed included, and how that one failed; None if all are well.

    0 schedules: the answers without faults are wrong.
    """

    num_schedules: int
    failure: str | None


def simulate(folder: Path, most: int, needs: frozenset[str] = frozenset()) -> Simulated:
    """Run schedules with the package in `folder` until one fails, hangs or takes the process down, `most` of them.

    Those without any of the features and faults that a bug `needs` are counted, and not run: it can't show there.
    Raises RuntimeError if they don't run.
    """
    progress = mmap.mmap(-1, COUNT.size)
    code, output = forked(partial(run_schedules, folder, most, needs, progress), timeout_s=START_TIMEOUT_S)
    (num_schedules,) = COUNT.unpack(progress[:])
    if code == 0:
        return Simulated(num_schedules, None)
    if code == NOT_RUN and not num_schedules:
        raise RuntimeError(f"the schedules did not run\n{output[-4000:]}")
    if code < 0:
        return Simulated(num_schedules, f"the process is ended by {signal.Signals(-code).name}")
    return Simulated(num_schedules, output.strip().splitlines()[-1])


def run_schedules(folder: Path, most: int, needs: frozenset[str], progress: mmap.mmap) -> int:
    """Returns 1 if a schedule fails; the last line of the output says how. `progress` has the number of each."""
    stand_in(folder)
    from robustness.simulation.running import SchedulesFailed, run, simulating
    from robustness.simulation.schedule import FIRST_WITH_DISK, make_schedule

    require_imported_from(folder)
    signal.alarm(0)
    first = FIRST_WITH_DISK if DISK in needs else 0
    with simulating():
        for number in range(most):
            signal.setitimer(signal.ITIMER_PROF, SCHEDULE_TIMEOUT_S)
            progress[:] = COUNT.pack(number + 1)
            schedule = make_schedule(first + number)
            has = {*schedule.features.names(), *(fault.kind.value for fault in schedule.faults)}
            if needs and not needs & has:
                continue
            try:
                failure = run(schedule).failure
            except SchedulesFailed as failed:
                progress[:] = COUNT.pack(0)
                failure = str(failed)
            if failure is not None:
                print("\n" + " ".join(failure.split()))
                return 1
    return 0


def drawn(bug: Bug) -> int:
    """Return a number that changes if the seeds that judge a bug draw other schedules than before."""
    return _drawn(DISK in needs_of(bug))


@cache
def _drawn(with_disk: bool) -> int:
    code, output = forked(partial(print_drawn, with_disk), timeout_s=START_TIMEOUT_S)
    if code != 0:
        raise RuntimeError(f"no schedules are drawn\n{output[-4000:]}")
    return int(output.split()[-1])


def print_drawn(with_disk: bool) -> int:
    """Print the number, in a process that may import the packages."""
    from robustness.simulation.schedule import FIRST_WITH_DISK, make_schedule
    from robustness.simulation.workload import requests

    first = FIRST_WITH_DISK if with_disk else 0
    schedules = [make_schedule(seed) for seed in range(first, first + NUM_DRAWN)]
    disks = [schedule.features.disk for schedule in schedules if schedule.features.disk is not None]
    print(zlib.crc32(f"{(requests(), schedules)!r}{disks or ''}".encode()))
    return 0


# -- the record: by the names of bugs ---------------------------------------------------------------------------------


def recorded() -> dict[str, dict[str, Any]]:
    """Return what is known of each bug."""
    known: dict[str, dict[str, Any]] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return known


def is_judged(bug: Bug, values: Mapping[str, Any], limit: int) -> bool:
    """Return whether the simulation has found a bug, or not within so many schedules, of those that are drawn now."""
    return values.get("drawn") == drawn(bug) and (values["schedules"] is not None or values["limit"] >= limit)


def record(bug: Bug, **values: Any) -> None:
    """Keep what is known of a bug."""
    known = recorded()
    known[bug.name] = known.get(bug.name, {}) | values
    present = {each.name for each in BUGS}
    kept = {name: known[name] for name in sorted(known) if name in present}
    RECORD.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def table() -> str:
    """The record as lines of Markdown: first what is found, the soonest first; then what is not, and what can't be."""
    known = recorded()
    judged = [(bug, known[bug.name]) for bug in BUGS if "limit" in known.get(bug.name, {})]
    judged.sort(key=lambda row: row[1]["schedules"] if row[1]["schedules"] is not None else row[1]["limit"] + 1)
    rows = []
    for bug, values in judged:
        found = values["schedules"] if values["schedules"] is not None else f"not in {values['limit']:,}"
        mark = "" if values.get("drawn") == drawn(bug) else " *"
        rows.append(f"| {bug.idea} | {bug.name} | {found}{mark} | {others_that_find(bug, values)} |")
    absent = [bug for bug in BUGS if bug.name in NOT_SIMULATED]
    rows += [
        f"| {bug.idea} | {bug.name} | not simulated: {NOT_SIMULATED[bug.name]} | {OTHER_SUITE} |" for bug in absent
    ]
    num_found = sum(values["schedules"] is not None for _, values in judged)
    num_missed, num_left = len(judged) - num_found, len(BUGS) - len(judged) - len(absent)
    lines = [
        f"Of {len(BUGS)} seeded bugs {num_found} are found, {num_missed} are not found within their limit,",
        f"{len(absent)} need what is not simulated, and {num_left} are not judged yet.",
        "",
        "| idea | bug | schedules until found | what else finds it |",
        "| --- | --- | --- | --- |",
        *rows,
    ]
    return "".join(f"{line}\n" for line in lines)


def others_that_find(bug: Bug, values: dict[str, Any]) -> str:
    """The suite that was seen to find it, or the tests that were written for it."""
    if "else" in values:
        return values["else"] or "no other suite"
    known = KEPT_AWAY_BY.get(bug.name)
    return known or ("not judged yet" if bug.idea in SIMULATED_IDEAS else OTHER_SUITE)


def main() -> None:
    text = PAGE.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")


if __name__ == "__main__":
    main()
