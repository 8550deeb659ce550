"""Checks the model of the ownership protocol with Spin: every configuration, and that every seeded fault is caught.

    python tests/robustness/model/check.py                     all of it, some minutes on two cores
    python tests/robustness/model/check.py --only forks        one configuration, or one fault
    python tests/robustness/model/check.py --large             larger sizes (hours, tens of gigabytes)
    python tests/robustness/model/check.py --trail no_fence    how a fault or a violated configuration goes wrong
    python tests/robustness/model/check.py --markdown          writes the tables to RESULTS.md as well, if all is well
    python tests/robustness/model/check.py --unless-recorded   only if RESULTS.md is about other files, sizes or Spin

Needs spin and a C compiler ($CC, or cc). Exits with 1 if a configuration is violated, or its search was cut short, or a
situation that it has to get to was not seen, or a fault was not caught by the invariant it breaks. Nothing is left in
the tree but RESULTS.md.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NAMES = FOLDER / "faults.pml"
RESULTS = FOLDER / "RESULTS.md"

JOBS = 2
MAX_DEPTH = 20_000
"""Steps of a run; a search that gets there is cut short, and fails."""
MEMORY_MB, LARGE_MEMORY_MB = 1_800, 64_000
TIMEOUT_S, LARGE_TIMEOUT_S = 240, 12 * 3600
CYCLE = "no run is endless"
VIOLATION = re.compile(r"assertion violated .*\|\|\s*(\w+)\)")
EVENT = re.compile(r"^\s*((?:worker|cachemgr|network|client)\b.*)$")

Sizes = dict[str, int]


@dataclass(frozen=True, slots=True)
class Configuration:
    """One aspect of the protocol. Sizes are those of quire.pml, as "NAME=1 OTHER=2"; `large` replaces some of them."""

    name: str
    sizes: str
    large: str
    situations: tuple[str, ...] = ()
    """The states that the search has to reach."""
    is_cycle_search: bool = False
    """Looks for a run that never ends, instead of for violations."""
    model: str = "quire.pml"


@dataclass(frozen=True, slots=True)
class Fault:
    """A rule that is left out, and what has to notice it where."""

    name: str
    configuration: str
    caught_by: str
    sizes: str = ""
    """Beyond the configuration's."""


@dataclass(frozen=True, slots=True)
class Search:
    """Spin's report. Memory in MB."""

    name: str
    verdict: str
    violated: str = ""
    states: int = 0
    transitions: int = 0
    depth: int = 0
    trail_length: int = 0
    seconds: float = 0.0
    memory_mb: float = 0.0
    situations: frozenset[str] = frozenset()

    @property
    def is_exhaustive(self) -> bool:
        return self.verdict == "holds"


CONFIGURATIONS = (
    Configuration(
        "sharing",
        "LEASES=2 SEQS=2 STEPS=2 BLOCKS=3 TABLE=3 PROMPT=2 ITEMS=2 EXTENDS=1 FAILURES=1",
        "STEPS=3 TOKENS=2 QUEUE=8",
        (
            "SHARED_ACROSS_LEASES",
            "SHARED_UNFINISHED",
            "BLOCK_SWAPPED",
            "EVICTION",
            "WAITS_FOR_RETIRED",
            "RETIRED_ACQUIRED",
        ),
    ),
    Configuration(
        "forks",
        "LEASES=1 SEQS=3 STEPS=3 BLOCKS=4 BLOCK_SIZE=2 TABLE=2 PROMPT=2 TOKENS=2 ITEMS=2 FORKS=1 EXTENDS=1 FAILURES=1",
        "STEPS=4 SKIPS=1",
        ("COPY", "CLAIM_FORGOTTEN", "PRIOR_STEP_FAILED", "THREE_STEPS"),
    ),
    Configuration(
        "trims",
        "LEASES=1 SEQS=2 STEPS=3 BLOCKS=3 BLOCK_SIZE=2 TABLE=2 PROMPT=3 TOKENS=2 ITEMS=3 TRIMS=1 FORKS=1 EXTENDS=1",
        "STEPS=4 BLOCKS=4 FAILURES=1",
        ("COPY", "EVICTION", "BLOCK_SWAPPED"),
    ),
    Configuration(
        "failures",
        "LEASES=1 SEQS=2 STEPS=4 BLOCKS=4 TABLE=3 PROMPT=2 ITEMS=2 EXTENDS=1 FAILURES=2 SKIPS=1",
        "STEPS=6 BLOCKS=5 QUEUE=8",
        ("PRIOR_STEP_FAILED", "SHARED_UNFINISHED", "THREE_STEPS"),
    ),
    Configuration(
        "network",
        "LEASES=1 SEQS=2 STEPS=3 BLOCKS=3 COPIES=2 REPEATS=1 BREAKS=1",
        "LEASES=2 STEPS=2 BREAKS=2 QUEUE=8",
        ("REPORT_AGAIN", "OLD_STREAM_HEARD", "LATE_GRANT", "THREE_STEPS"),
    ),
    Configuration(
        "leases",
        "LEASES=2 SEQS=1 STEPS=1 BLOCKS=1 COPIES=2 REPEATS=1 BREAKS=1 FAILURES=1",
        "STEPS=2 BREAKS=2 QUEUE=8",
        ("REPORT_AGAIN", "OLD_STREAM_HEARD", "LATE_GRANT", "FENCED_WHILE_RUNNING"),
    ),
    Configuration(
        "expiry",
        "LEASES=3 SEQS=1 STEPS=1 BLOCKS=1 COPIES=2",
        "STEPS=2 BLOCKS=2 QUEUE=8",
        ("FENCED_WHILE_RUNNING", "LATE_GRANT", "EVICTION"),
    ),
    Configuration(
        "worker_restart",
        "LEASES=2 SEQS=1 STEPS=1 BLOCKS=1 COPIES=2 RESTARTS=1 DAMAGES=1 BREAKS=1",
        "STEPS=2 RESTARTS=2 QUEUE=8",
        ("LEASE_ADOPTED", "OLD_STREAM_HEARD", "LATE_GRANT"),
    ),
    Configuration(
        "two_managers",
        "LEASES=2 SEQS=1 STEPS=1 BLOCKS=1 COPIES=2 MANAGERS=2 BREAKS=2 RESTARTS=1 DEATHS=1",
        "STEPS=2 BREAKS=3 QUEUE=8",
        ("NEW_EPOCH_REQUIRED", "TERM_SUPERSEDED", "TWO_BOOKS_OF_AN_EPOCH", "SIGNATURE_REFUSED", "LEASE_ADOPTED"),
    ),
    Configuration(
        "clock_back",
        "LEASES=2 SEQS=1 STEPS=1 BLOCKS=1 COPIES=2 MANAGERS=2 AHEAD=1 BREAKS=2 DEATHS=1",
        "STEPS=2 BREAKS=3 QUEUE=8",
        ("TERM_RAISED", "TERM_RAISED_TWICE", "TERM_SUPERSEDED", "NEW_EPOCH_REQUIRED", "TWO_BOOKS_OF_AN_EPOCH"),
    ),
    Configuration(
        "clock_back_restart",
        "LEASES=2 SEQS=1 STEPS=1 BLOCKS=1 MANAGERS=2 AHEAD=1 BREAKS=2 RESTARTS=1 DEATHS=1",
        "COPIES=2 STEPS=2 QUEUE=8",
        ("TERM_RAISED", "TERM_RAISED_TWICE", "NEW_EPOCH_REQUIRED", "TWO_BOOKS_OF_AN_EPOCH"),
    ),
    Configuration(
        "tenants",
        "LEASES=2 SEQS=1 STEPS=2 BLOCKS=3 TABLE=2 PROMPT=2 TENANTS=2",
        "SEQS=2 TABLE=3 EXTENDS=1 ITEMS=2 QUEUE=8",
        ("EVICTION", "WAITS_FOR_RETIRED"),
    ),
    Configuration(
        "windows",
        "LEASES=1 SEQS=2 STEPS=4 BLOCKS=5 BLOCK_SIZE=2 TABLE=2 PROMPT=3 WINDOW=2 TRIMS=1 FORKS=1 EXTENDS=1 FAILURES=1",
        "STEPS=5 ITEMS=2 QUEUE=8",
        ("PASSED", "PASSED_IN_FLIGHT", "POSITION_LOST", "WINDOW_HIT", "COPY", "SHARED_UNFINISHED"),
    ),
    Configuration(
        "window_hits",
        "LEASES=1 SEQS=2 STEPS=4 BLOCKS=5 TABLE=2 PROMPT=2 WINDOW=2 TOKENS=2 ITEMS=2 FAILURES=1",
        "STEPS=5 SKIPS=1",
        ("WINDOW_HIT", "WINDOW_GONE", "EVICTION", "SHARED_UNFINISHED"),
    ),
    Configuration(
        "window_leases",
        "LEASES=2 SEQS=1 STEPS=2 BLOCKS=4 TABLE=2 PROMPT=2 WINDOW=1 QUEUE=8",
        "STEPS=3 BLOCKS=5 COPIES=2 BREAKS=1",
        ("PASSED", "FENCED_WHILE_RUNNING", "LATE_GRANT", "SHARED_ACROSS_LEASES"),
    ),
    Configuration(
        "window_crashes",
        "LEASES=1 SEQS=1 STEPS=3 BLOCKS=4 TABLE=2 PROMPT=2 WINDOW=1 BREAKS=1 RESTARTS=1 DEATHS=1 RETURNS=1 QUEUE=8",
        "LEASES=2 COPIES=2 DAMAGES=1",
        ("PASSED", "PASSED_IN_FLIGHT", "REPORT_AGAIN", "LEASE_ADOPTED", "WARM_ATTACHED", "NEW_EPOCH_REQUIRED"),
    ),
    Configuration(
        "drafts",
        "LEASES=1 SEQS=2 STEPS=4 BLOCKS=3 BLOCK_SIZE=2 TABLE=2 EXTENDS=1 FORKS=1 TRIMS=1 FAILURES=1 DRAFTS=1",
        "STEPS=5 ITEMS=2 QUEUE=8",
        ("DRAFT_ACCEPTED", "DRAFT_REJECTED", "DRAFT_FAILED", "DRAFT_OF_RELEASED", "COPY"),
    ),
    Configuration(
        "draft_crashes",
        "LEASES=1 SEQS=1 STEPS=3 BLOCKS=3 TABLE=3 EXTENDS=1 DRAFTS=1 BREAKS=1 DEATHS=1 RETURNS=1",
        "LEASES=2 COPIES=2 RESTARTS=1 QUEUE=8",
        ("DRAFT_ACCEPTED", "DRAFT_REJECTED", "REPORT_AGAIN", "WARM_ATTACHED", "NEW_EPOCH_REQUIRED"),
    ),
    Configuration(
        "endless",
        "LEASES=2 SEQS=1 STEPS=1 BLOCKS=1 MANAGERS=2 BREAKS=1 RESTARTS=1 DEATHS=1 FAILURES=1",
        "COPIES=2 BREAKS=2 DAMAGES=1 SKIPS=1",
        is_cycle_search=True,
    ),
    Configuration(
        "warm",
        "LEASES=2 SEQS=1 STEPS=2 BLOCKS=1 DEATHS=1 RETURNS=1 QUEUE=8",
        "BLOCKS=2 COPIES=2 REPEATS=1 BREAKS=1 DEATHS=2",
        ("WARM_ATTACHED", "WARM_WITH_REPORTS", "WARM_WHILE_RUNNING", "NEW_EPOCH_REQUIRED", "LATE_GRANT"),
    ),
    Configuration(
        "warm_two_managers",
        "LEASES=2 SEQS=1 STEPS=1 BLOCKS=1 COPIES=2 MANAGERS=2 BREAKS=1 DEATHS=1 RETURNS=1",
        "STEPS=2 DEATHS=2 RESTARTS=1 QUEUE=8",
        ("WARM_ATTACHED", "OTHER_TERM_RULED", "TERM_SUPERSEDED", "TWO_BOOKS_OF_AN_EPOCH", "LEASE_ADOPTED"),
    ),
    Configuration(
        "warm_behind",
        "LEASES=2 SEQS=1 STEPS=2 BLOCKS=1 DEATHS=1 RETURNS=1 BEHIND=1 QUEUE=8",
        "BLOCKS=2 COPIES=2 BREAKS=1",
        ("BOOKS_BEHIND", "WARM_ATTACHED", "LEASE_ADOPTED", "NEW_EPOCH_REQUIRED"),
    ),
    Configuration(
        "warm_endless",
        "LEASES=2 SEQS=1 STEPS=1 BLOCKS=1 MANAGERS=2 BREAKS=1 DEATHS=1 RETURNS=1",
        "COPIES=2 BREAKS=2 DEATHS=2 QUEUE=8",
        is_cycle_search=True,
    ),
    Configuration(
        "kept_memory",
        "LEASES=2 SEQS=1 STEPS=2 BLOCKS=2 TABLE=2 PROMPT=2 TENANTS=2 HOLDER=1 RESTARTS=1",
        "RESTARTS=2 CHANGES=1 QUEUE=8",
        ("CARRIED", "KILLED_IN_STEP", "EVICTION", "LEASE_ADOPTED"),
    ),
    Configuration(
        "kept_elsewhere",
        "LEASES=2 SEQS=1 STEPS=1 BLOCKS=1 TENANTS=2 HOLDER=2 RESTARTS=2 CHANGES=1",
        "STEPS=2 RESTARTS=3 QUEUE=8",
        ("CARRIED", "NOT_CARRIED", "MEMORY_OF_OTHER_BOOKS", "KILLED_IN_STEP"),
    ),
    Configuration(
        "kept_two_managers",
        "LEASES=2 SEQS=1 STEPS=1 BLOCKS=1 TENANTS=2 MANAGERS=2 HOLDER=1 RESTARTS=1 BREAKS=1",
        "STEPS=2 RESTARTS=2 BREAKS=2 QUEUE=8",
        ("CARRIED", "MEMORY_OF_OTHER_BOOKS", "TWO_BOOKS_OF_AN_EPOCH"),
    ),
    Configuration(
        "disk",
        "HOST=1 DISK=1 STEPS=4 MOVES=3 ENDS=1 BREAKS=1 FAILURES=1",
        "HOST=2 DISK=2",
        (
            "HOST_EVICTION",
            "READ_ORDERED",
            "READ_FAILED",
            "COPIED_BACK",
            "CLOSED_UNREPORTED",
            "ORDER_REPORTED_AGAIN",
        ),
        model="disk.pml",
    ),
    Configuration(
        "disk_resets",
        "HOST=1 DISK=1 STEPS=3 MOVES=2 RESETS=1 RESTARTS=1 FAILURES=1",
        "HOST=2 RESETS=2 RESTARTS=2 BREAKS=1",
        ("RESET_ANSWERED", "ERASE_FAILED", "ERASED_NOT_ENTERED", "KILLED_IN_WRITE"),
        model="disk.pml",
    ),
    Configuration(
        "disk_crashes",
        "CONTENTS=2 HOST=1 DISK=1 STEPS=3 MOVES=2 RESTARTS=1 DEATHS=1",
        "HOST=2 DISK=2 RESETS=1",
        ("CONTENT_FOUND", "NEW_EPOCH_OF_WORKER", "WRITE_OF_OLD_EPOCH", "WRITTEN_IN_NEW_EPOCH", "READ_OF_OLD_EPOCH"),
        model="disk.pml",
    ),
)

FAULTS = (
    Fault("no_retired_state", "sharing", "I5"),
    Fault("no_fence", "expiry", "I5"),
    Fault("publish_at_allocation", "sharing", "I6"),
    Fault("equal_term", "two_managers", "TERMS"),
    Fault("no_epoch_check", "worker_restart", "I5"),
    Fault("share_across_tenants", "tenants", "I4"),
    Fault("pinned_too_short", "failures", "I5"),
    Fault("copy_source_not_pinned", "trims", "I5"),
    Fault("report_of_old_epoch", "worker_restart", "REPORTS", "LEASES=1 STEPS=3 COPIES=1"),
    Fault("failed_is_computed", "failures", "I6"),
    Fault("replay_accepted", "network", "I5"),
    Fault("out_of_order", "failures", "I6"),
    Fault("fence_answered_early", "expiry", "I5"),
    Fault("old_managers_grant", "two_managers", "TERMS"),
    Fault("report_entered_twice", "network", "REPORTS"),
    Fault("acknowledged_unapplied", "network", "REPORTS"),
    Fault("no_prior_step_failed", "failures", "I6"),
    Fault("request_applied_again", "network", "I7"),
    Fault("write_shared", "forks", "I3"),
    Fault("fenced_too_late", "expiry", "I5"),
    Fault("known_epoch_trusted", "two_managers", "REPORTS"),
    Fault("reports_not_kept", "network", "WARM"),
    Fault("lower_term", "two_managers", "TERMS"),
    Fault("order_after_break", "leases", "I5", "QUEUE=8"),
    Fault("changes_not_told", "sharing", "I5"),
    Fault("trim_keeps_claim", "trims", "I6"),
    Fault("books_lost", "two_managers", "REPORTS"),
    Fault("new_epoch_runs_first", "two_managers", "I8"),
    Fault("doomed_shared", "failures", "I6", "SEQS=3 STEPS=3 BLOCKS=5 TABLE=2 TOKENS=2 EXTENDS=0"),
    Fault("claim_of_released", "forks", "I6"),
    Fault("cached_kept", "sharing", "I7"),
    Fault("reference_left", "sharing", "I2"),
    Fault("found_still_evictable", "sharing", "I1"),
    Fault("fence_not_repeated", "leases", "PROGRESS"),
    Fault("asked_for_ever", "endless", CYCLE),
    Fault("other_term_trusted", "warm_two_managers", "TERMS"),
    Fault("terms_forgotten", "warm", "WARM"),
    Fault("answered_unwritten", "warm_behind", "I5"),
    Fault("settled_unwritten", "warm_behind", "REPORTS"),
    Fault("stale_state", "warm_behind", "I5"),
    Fault("late_unwritten", "warm_behind", "I5"),
    Fault("end_unwritten", "warm_behind", "I3", "LEASES=1 COPIES=2"),
    Fault("raised_equal", "clock_back", "TERMS"),
    Fault("older_raises", "clock_back", "TERMS"),
    Fault("planned_unchecked", "warm_behind", "REPORTS"),
    Fault("passed_by_scheduled", "windows", "I5"),
    Fault("pass_not_told", "windows", "I5"),
    Fault("written_before_passed", "window_leases", "I5", "STEPS=3 BLOCKS=5 TABLE=3 PROMPT=1 EXTENDS=1"),
    Fault("window_missed", "window_hits", "I6"),
    Fault("lost_position", "windows", "I5"),
    Fault("group_not_hashed", "windows", "I4"),
    Fault("window_not_masked", "windows", "I6"),
    Fault("draft_kept", "drafts", "I6"),
    Fault("draft_counted", "drafts", "I6"),
    Fault("draft_built_on", "drafts", "I6"),
    Fault("draft_shared", "drafts", "I6", "BLOCKS=5 BLOCK_SIZE=1 TABLE=3 PROMPT=3 FORKS=0 TRIMS=1 ITEMS=2"),
    Fault("refilled_carried", "kept_elsewhere", "I6", "STEPS=2 HOLDER=1 RESTARTS=1 CHANGES=0 QUEUE=8"),
    Fault("not_whole_carried", "kept_elsewhere", "I6"),
    Fault("older_memory", "kept_elsewhere", "I6"),
    Fault("older_books", "kept_two_managers", "I6"),
    Fault("empty_taken_for_old", "kept_elsewhere", "I6"),
    Fault("two_workers", "kept_elsewhere", "I6", "HOLDER=1 RESTARTS=1 CHANGES=0 QUEUE=8"),
    Fault("written_unheld", "disk", "I6"),
    Fault("unreported_kept", "disk", "I6"),
    Fault("failed_read_found", "disk", "I6"),
    Fault("read_unchecked", "disk_crashes", "I6", "MOVES=3"),
    Fault("found_takes_block", "disk_crashes", "I1"),
    Fault("old_epoch_writes", "disk_crashes", "I6"),
    Fault("old_epoch_reads", "disk_crashes", "I6"),
    Fault("read_before_begun", "disk_crashes", "I6"),
    Fault("reset_keeps_copies", "disk_resets", "I6"),
    Fault("reset_keeps_files", "disk_resets", "ERASED"),
    Fault("erase_overtakes", "disk_resets", "ERASED"),
    Fault("erased_found", "disk_resets", "I6"),
    Fault("erase_not_carried", "disk_resets", "I6"),
    Fault("failed_erase_forgotten", "disk_resets", "I6"),
    Fault("header_left", "disk_resets", "ERASED"),
)

INVARIANTS = ("I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8", "REPORTS", "TERMS", "PROGRESS", "WARM", "ERASED")
"""By the numbers that ONLY has for them, from 1 on."""


class Unusable(Exception):
    """The model can't be checked: a tool is missing, or it does not compile."""


# -- one search ----------------------------------------------------------------------------------------------------


def numbers_of(kind: str) -> dict[str, int]:
    """By name, what faults.pml defines as FAULT_... or REACH_..."""
    found = re.findall(rf"^#define {kind}_(\w+)\s+(\d+)", NAMES.read_text(), re.MULTILINE)
    return {name: int(number) for name, number in found}


def run(command: Sequence[str], folder: Path, timeout_s: float | None = None) -> str:
    """The output of a command. Raises Unusable if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise Unusable(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def read_sizes(text: str) -> Sizes:
    return {name: int(value) for name, value in (size.split("=") for size in text.split())}


def build(folder: Path, model: str, sizes: Sizes, options: Iterable[str]) -> None:
    """Makes the verifier `pan` in a folder."""
    defines = [f"-D{name}={value}" for name, value in sizes.items()]
    run(["spin", "-a", *defines, str(FOLDER / model)], folder)
    run([compiler(), "-w", *options, "-o", "pan", "pan.c"], folder)


def compiler() -> str:
    return os.environ.get("CC", "cc")


def search(
    name: str,
    model: str,
    sizes: Sizes,
    *,
    is_large: bool = False,
    options: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> Search:
    """Compiles and runs one verifier. `options` are the C compiler's, `flags` the verifier's."""
    memory_mb, timeout_s = (LARGE_MEMORY_MB, LARGE_TIMEOUT_S) if is_large else (MEMORY_MB, TIMEOUT_S)
    with tempfile.TemporaryDirectory(prefix="quire-model-") as scratch:
        folder = Path(scratch)
        build(folder, model, sizes, [*options, "-DNOREDUCE", f"-DMEMLIM={memory_mb}", "-DVECTORSZ=4096"])
        started = time.monotonic()
        try:
            output = run(["./pan", f"-m{MAX_DEPTH}", *flags], folder, timeout_s)
        except subprocess.TimeoutExpired:
            return Search(name, f"cut short after {timeout_s} s", seconds=time.monotonic() - started)
        return read_output(name, output, time.monotonic() - started)


def read_output(name: str, output: str, seconds: float) -> Search:
    """Spin's own words, as a value."""
    violation = VIOLATION.search(output)
    violated = violation[1] if violation else CYCLE if "pan:1: non-progress cycle" in output else ""
    if "errors: 0" not in output:
        verdict = f"{violated or first_error(output)} violated"
    elif "max search depth too small" in output or "Search not completed" in output or "out of memory" in output:
        verdict = "cut short"
    else:
        verdict = "holds"
    depths = re.search(r"depth reached (\d+)", output)
    trail = re.search(r"\(at depth (\d+)\)", output)
    situations = {number: name for name, number in numbers_of("REACH").items()}
    return Search(
        name,
        verdict,
        violated,
        states=int(first_number(r"([\d.e+]+) states, stored", output)),
        transitions=int(first_number(r"([\d.e+]+) transitions", output)),
        depth=int(depths[1]) if depths else 0,
        trail_length=int(trail[1]) if trail else 0,
        seconds=seconds,
        memory_mb=first_number(r"([\d.]+)\s+total actual memory usage", output),
        situations=frozenset(
            situations[int(number)] for number in re.findall(r"^reached (\d+)$", output, re.MULTILINE)
        ),
    )


def first_error(output: str) -> str:
    told = re.search(r"^pan:1: (.*?)(?: \(at depth|$)", output, re.MULTILINE)
    return told[1] if told else "something"


def first_number(pattern: str, output: str) -> float:
    found = re.search(pattern, output)
    return float(found[1]) if found else 0.0


# -- configurations and faults -------------------------------------------------------------------------------------


def check_configuration(configuration: Configuration, *, is_large: bool) -> Search:
    name, model = configuration.name, configuration.model
    sizes = read_sizes(configuration.sizes) | read_sizes(configuration.large if is_large else "")
    if configuration.is_cycle_search:
        return search(name, model, sizes, is_large=is_large, options=["-O1", "-DNP"], flags=["-l"])
    return search(name, model, sizes | {"COVERAGE": 1}, is_large=is_large, options=["-O1", "-DSAFETY"])


def check_fault(fault: Fault) -> Search:
    """Stops at the first violation, so it need not be compiled to be fast."""
    model = configuration_named(fault.configuration).model
    if fault.caught_by == CYCLE:
        return search(fault.name, model, sizes_of(fault), options=["-O0", "-DNP"], flags=["-l"])
    return search(fault.name, model, sizes_of(fault), options=["-O0", "-DSAFETY"])


def configuration_named(name: str) -> Configuration:
    return next(known for known in CONFIGURATIONS if known.name == name)


def sizes_of(fault: Fault) -> Sizes:
    sizes = configuration_named(fault.configuration).sizes
    only = INVARIANTS.index(fault.caught_by) + 1 if fault.caught_by in INVARIANTS else 0
    return (
        read_sizes(sizes) | read_sizes(fault.sizes) | {"FAULT": numbers_of("FAULT")[fault.name.upper()], "ONLY": only}
    )


def is_good(configuration: Configuration, result: Search) -> bool:
    return result.is_exhaustive and result.situations >= set(configuration.situations)


def configuration_row(configuration: Configuration, result: Search) -> list[str]:
    missing = sorted(set(configuration.situations) - result.situations)
    verdict = f"never got to {', '.join(missing)}" if result.is_exhaustive and missing else result.verdict
    return [
        configuration.name,
        f"{result.states:,}",
        f"{result.transitions:,}",
        f"{result.depth}",
        f"{result.seconds:.0f}",
        f"{result.memory_mb:.0f}",
        verdict,
    ]


def fault_row(fault: Fault, result: Search) -> list[str]:
    caught = result.violated == fault.caught_by
    verdict = "caught" if caught else f"NOT caught by {fault.caught_by}"
    return [fault.name, fault.configuration, result.violated or result.verdict, f"{result.trail_length}", verdict]


CONFIGURATION_HEAD = ["configuration", "states", "transitions", "depth", "s", "MB", "verdict"]
FAULT_HEAD = ["fault", "configuration", "violates", "trail", "verdict"]


# -- a trail ---------------------------------------------------------------------------------------------------------


def print_trail(name: str) -> int:
    """Finds a short run to the violation and prints its events; 1 if there is none."""
    chosen(name)
    fault = next((fault for fault in FAULTS if fault.name == name), None)
    configuration = configuration_named(fault.configuration if fault else name)
    model, sizes = configuration.model, sizes_of(fault) if fault else read_sizes(configuration.sizes)
    with tempfile.TemporaryDirectory(prefix="quire-model-") as scratch:
        folder = Path(scratch)
        options = ["-O1", "-DSAFETY", "-DNOREDUCE", "-DREACH", f"-DMEMLIM={MEMORY_MB}", "-DVECTORSZ=4096"]
        build(folder, model, sizes, options)
        output = run(["./pan", f"-m{MAX_DEPTH}", "-i"], folder)
        result = read_output(name, output, 0.0)
        if not result.violated:
            print(f"{name}: {result.verdict}, there is no trail")
            return 1
        defines = [f"-D{key}={value}" for key, value in sizes.items()]
        replay = run(["spin", "-t", "-k", f"{model}.trail", *defines, str(FOLDER / model)], folder)
    for event in filter(None, map(EVENT.match, replay.splitlines())):
        print(re.sub(r"\s{2,}", " ", event[1]).replace(" ,", ",").strip())
    print(f"violated: {result.violated}")
    return 0


# -- all of it -------------------------------------------------------------------------------------------------------


def table(head: list[str], rows: list[list[str]]) -> str:
    """Columns under each other, readable as text and as Markdown."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def chosen(only: str | None) -> tuple[list[Configuration], list[Fault]]:
    configurations = [known for known in CONFIGURATIONS if only in (None, known.name)]
    faults = [fault for fault in FAULTS if only in (None, fault.name)]
    if not configurations and not faults:
        names = ", ".join(known.name for known in (*CONFIGURATIONS, *FAULTS))
        raise Unusable(f"there is no configuration or fault {only!r}; there are {names}")
    return configurations, faults


def check_all(only: str | None, *, is_large: bool, is_markdown: bool) -> int:
    configurations, faults = chosen(only)
    started = time.monotonic()
    work: list[Callable[[], Search]] = [
        *(partial(check_configuration, known, is_large=is_large) for known in configurations),
        *(partial(check_fault, fault) for fault in faults),
    ]
    with ThreadPoolExecutor(JOBS) as executor:
        results = list(executor.map(lambda check: check(), work))
    found, caught = results[: len(configurations)], results[len(configurations) :]
    configuration_rows = [configuration_row(known, result) for known, result in zip(configurations, found, strict=True)]
    fault_rows = [fault_row(fault, result) for fault, result in zip(faults, caught, strict=True)]
    tables = [table(CONFIGURATION_HEAD, configuration_rows)] if configurations else []
    tables += [table(FAULT_HEAD, fault_rows)] if faults else []
    print("\n\n".join(tables))
    passed = sum(is_good(known, result) for known, result in zip(configurations, found, strict=True))
    passed += sum(result.violated == fault.caught_by for fault, result in zip(faults, caught, strict=True))
    states = sum(result.states for result in found)
    print(f"\n{states:,} states explored in the configurations, {time.monotonic() - started:.0f} s in all")
    if is_markdown and passed == len(work):
        write_results(tables, states, is_large=is_large)
    print(f"{passed} passed, {len(work) - passed} failed")
    return int(passed < len(work))


def digest() -> str:
    """Return a digest of all that a search's result depends on: the model's files, configurations, faults and Spin."""
    total = hashlib.sha256(repr((CONFIGURATIONS, FAULTS, run(["spin", "-V"], FOLDER).strip())).encode())
    for path in sorted(FOLDER.glob("*.pml")):
        total.update(repr((path.name, path.read_bytes())).encode())
    return total.hexdigest()


def write_results(tables: list[str], states: int, *, is_large: bool) -> None:
    size = "`--large`" if is_large else "the sizes of CI"
    spin = run(["spin", "-V"], FOLDER).strip()
    head = (
        f"# What the searches found\n\nWritten by `check.py --markdown` at {size}, {spin}.\n{states:,} states in all, "
        f"of model `{digest()}`.\n"
    )
    RESULTS.write_text(head + "\n" + "\n\n".join(tables) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", help="this configuration or fault")
    parser.add_argument("--large", action="store_true", help="larger sizes: hours")
    parser.add_argument("--trail", metavar="NAME", help="print how this fault or configuration goes wrong")
    parser.add_argument("--markdown", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument(
        "--unless-recorded", action="store_true", help=f"search only if {RESULTS.name} is of another model"
    )
    arguments = parser.parse_args()
    for tool, hint in (("spin", "apt-get install spin"), (compiler(), "apt-get install gcc")):
        if shutil.which(tool) is None:
            print(f"check.py: {tool} is missing ({hint})", file=sys.stderr)
            return 1
    try:
        is_forced = os.environ.get("QUIRE_RUN_ALL") == "1"
        if arguments.unless_recorded and not is_forced and f"`{digest()}`" in RESULTS.read_text():
            print(f"*** the model was NOT SEARCHED: {RESULTS.name} has what was found in these files ***")
            return 0
        if arguments.trail:
            return print_trail(arguments.trail)
        return check_all(arguments.only, is_large=arguments.large, is_markdown=arguments.markdown)
    except Unusable as error:
        print(f"check.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
