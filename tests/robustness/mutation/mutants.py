"""Seeds each bug of `seeded_bugs.py` into a copy of its package, and requires that a test notices it.

    python tests/robustness/mutation/mutants.py                  all of them
    python tests/robustness/mutation/mutants.py fork "host tier" those with such words in their idea or name
    python tests/robustness/mutation/mutants.py --suite machine  by the state machine alone
    python tests/robustness/mutation/mutants.py --sample         a few, in some minutes of one core
    python tests/robustness/mutation/mutants.py --suite simulation --record     see simulated.py

The tree is never changed. A copy of the package with the bug stands in for the real one in a process of its own, forked
from one that has imported what takes long and is not ours. For a bug in the core, each job has a copy of the crate. It
builds that copy again and again, and starts from what cargo has in core/target.

A test that hangs or takes the process down has noticed the bug. Exits with 1 if a bug survives, does not fit the
present source or does not compile. The last suite is the simulation: schedules of fixed seeds, until one of them fails.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

if __name__ == "__main__" and os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of a schedule
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONHASHSEED": "0"})

sys.path.extend(str(Path(__file__).parents[2] / folder) for folder in (".", "framework"))

# isort: split
import grpc.aio  # noqa: F401 - once, for all processes
import hypothesis.stateful  # noqa: F401
import llguidance.torch  # noqa: F401
import numpy  # noqa: F401
import prometheus_client  # noqa: F401
import pytest
import torch  # noqa: F401
import transformers.masking_utils
import transformers.modeling_utils  # noqa: F401
from seeded_bugs import (
    ADAPTERS_IDEA,
    BUGS,
    CORE,
    DISK_IDEA,
    GPU_IDEA,
    HOLDER_IDEA,
    NOT_SIMULATED,
    QUANTIZED_IDEA,
    RANKS_IDEA,
    SIMULATED_IDEAS,
    VERIFIED_IDEA,
    Bug,
    NotSeeded,
    needs_of,
)
from simulated import SCHEDULES, drawn, is_judged, record, recorded, simulate
from standing_in import forked, require_imported_from, stand_in

TESTS = Path(__file__).parents[2]
ROOT = TESTS.parent
CRATE = ROOT / "cachemgr" / "core"
LIBRARY = "_core.abi3.so"
SUITES = ["crate", "examples", "machine", "simulation"]
"""The crate's own tests; tests of examples in Python; the state machine in Python; the simulation. The quickest
first."""
BOOKS = [
    f"unit/cachemgr/test_{name}.py"
    for name in (
        "ledger",
        "leases",
        "catalog",
        "state",
        "bounds",
        "watch_promise",
        "watch_pools",
        "watch",
        "looking",
        "time",
        "drafts",
    )
]
EXAMPLES = {
    CORE: BOOKS,
    "cachemgr": BOOKS,
    "worker": [f"unit/worker/test_{name}.py" for name in ("gate", "grants", "verify")],
    "client": [f"unit/engine/test_{name}.py" for name in ("beams", "scheduler", "drafts", "plan_messages")],
    "gateway": ["unit/gateway/test_gateway_routing.py", "unit/gateway/test_prompt_cache.py"],
    "integrations": [
        f"unit/integrations/test_{name}.py" for name in ("prefix_replica", "kv_events", "published_prefixes")
    ],
}
EXAMPLES_OF_IDEA = {
    ADAPTERS_IDEA: ["unit/worker/test_adapters.py", "unit/cachemgr/test_looking.py", "unit/cachemgr/test_ledger.py"],
    GPU_IDEA: ["gpu_desk/test_start.py", "unit/worker/test_process.py", "unit/worker/test_peak_step.py"],
    DISK_IDEA: [
        *("unit/worker/test_disk_store.py", "unit/worker/test_disk_tier.py"),
        "robustness/simulation/test_worker_disk.py",
    ],
    HOLDER_IDEA: [f"unit/worker/test_{name}.py" for name in ("holder", "kept_pool", "deposits")],
    QUANTIZED_IDEA: [f"unit/worker/test_{name}.py" for name in ("kv_scales", "quantized_experts", "int4_weights")],
    RANKS_IDEA: ["unit/worker/test_orders.py", "unit/worker/test_sharding.py"],
    VERIFIED_IDEA: [f"unit/worker/test_{name}.py" for name in ("grants", "verify", "draft_grammars", "drafts")],
}
"""For the bugs of an idea that are not in the core, in place of those of their package."""
MACHINE = ["unit/cachemgr/test_ledger_machine.py"]
SIMULATED = {CORE, "cachemgr", "worker", "client", "gateway"}
"""The packages with code that runs in the simulation."""

ENVIRONMENT = {
    "CARGO_TERM_COLOR": "never",
    "PYO3_PYTHON": sys.executable,
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "QUIRE_MACHINE_EXAMPLES": "700",
    "QUIRE_VERIFY": "1",
}
CARGO = ["--locked", "--lib", "--profile", "mutant"]
TEST_CARGO = ["--locked", "--lib", "--no-default-features"]
"""With the profile of `make test`, which has built the dependencies."""
BUILD_TIMEOUT_S = 600
CONTROL_SCHEDULES = 20
"""Without a bug: thousands of them are tests of their own."""
TIMEOUT_S = 300
ERROR = "ERROR"

NO_BUGS = [
    *(Bug("none", f"no bug in {package}", package, ()) for package in EXAMPLES),
    Bug(GPU_IDEA, f"no bug of {GPU_IDEA}", "worker", ()),
]

Seed = Callable[[Path], None]
"""Changes the files of a copy of a package."""


@dataclass(frozen=True, slots=True)
class Noticed:
    """The suite that notices a bug; of the simulation, how soon and by what."""

    suite: str
    num_schedules: int = 0
    failure: str = ""

    def __str__(self) -> str:
        return self.suite if not self.failure else f"{self.suite} {self.num_schedules}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The finder of a bug: nothing, a suite, or ERROR if it is no bug that can be judged."""

    bug: Bug
    noticed: Noticed | str | None
    seconds: float

    def __str__(self) -> str:
        line = f"{self.noticed or 'SURVIVED'!s:16} {self.seconds:5.1f} s  {self.bug.idea:20} {self.bug.name}"
        failure = self.noticed.failure if isinstance(self.noticed, Noticed) else ""
        return f"{line}\n{'':16}          {failure[:300]}" if failure else line


def package_folder(package: str) -> Path:
    """Return the folder of a package of the repository, or of the crate."""
    return CRATE if package == CORE else ROOT / package / "quire" / package


class Workshop:
    """A job's copy of the crate, and where it is built."""

    def __init__(self, folder: Path) -> None:
        self.crate = folder / "core"
        self.target = folder / "target"
        shutil.copytree(CRATE, self.crate, ignore=shutil.ignore_patterns("target"))
        for profile in ("mutant", "debug"):
            if (built := cargo_target() / profile).exists():
                shutil.copytree(built, self.target / profile, ignore=shutil.ignore_patterns("incremental", "*_core-*"))

    def seed(self, seed: Seed) -> None:
        """Puts a bug into the crate in place of the last one. Writes only files that differ: cargo looks at times."""
        with tempfile.TemporaryDirectory() as fresh:
            crate = Path(fresh) / "core"
            shutil.copytree(CRATE, crate, ignore=shutil.ignore_patterns("target"))
            seed(crate)
            for path in crate.rglob("*.rs"):
                target = self.crate / path.relative_to(crate)
                if target.read_bytes() != path.read_bytes():
                    target.write_bytes(path.read_bytes())

    def library(self) -> Path:
        """The core, built. Raises RuntimeError if it does not compile."""
        self._cargo("build", *CARGO)
        return self.target / "mutant" / "lib_core.so"

    def is_noticed(self) -> bool:
        """True if one of the crate's own tests fails. Raises RuntimeError if they do not compile."""
        self._cargo("test", *TEST_CARGO, "--no-run")
        try:
            done = self._run("test", *TEST_CARGO, timeout_s=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return True
        return done.returncode != 0

    def _cargo(self, *arguments: str) -> None:
        done = self._run(*arguments, timeout_s=BUILD_TIMEOUT_S)
        if done.returncode != 0:
            raise RuntimeError(f"it does not compile:\n{done.stderr[-4000:]}")

    def _run(self, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "CARGO_TARGET_DIR": str(self.target)}
        return run_all("cargo", *arguments, folder=self.crate, environment=environment, timeout_s=timeout_s)


def run_all(
    *command: str, folder: Path, environment: dict[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Runs a command; after a timeout its child processes are ended, too. Raises subprocess.TimeoutExpired."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def cargo_target() -> Path:
    return Path(os.environ.get("CARGO_TARGET_DIR", CRATE / "target"))


def build_dependencies(suites: Sequence[str]) -> None:
    """Builds what all copies of the crate start from, for these suites. Cost: half a minute of two cores, once."""
    environment = {**os.environ, "CARGO_TARGET_DIR": str(cargo_target())}
    commands = [("test", *TEST_CARGO, "--no-run")] if "crate" in suites else []
    if set(suites) - {"crate"}:
        commands.append(("build", *CARGO))
    for command in commands:
        subprocess.run(["cargo", "--quiet", *command], cwd=CRATE, env=environment, check=True)


@lru_cache(maxsize=1)
def workshop_in(folder: Path) -> Workshop:
    """The one of this process."""
    return Workshop(folder / str(os.getpid()))


def is_noticed(folder: Path, files: list[str]) -> bool:
    """True if a test fails with the package in `folder`, or never ends, or takes its process down."""
    code, output = forked(lambda: run_tests(folder, files), timeout_s=TIMEOUT_S)
    if code > 1:
        raise RuntimeError(f"the tests did not run: {code}\n{output[-4000:]}")
    return code != 0


def run_tests(folder: Path, files: list[str]) -> int:
    """Runs pytest in this process with the package in `folder` in place of the real one. Returns its exit code."""
    stand_in(folder)
    arguments = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line", "-m", "not verify"]
    code = int(pytest.main([*arguments, *(str(TESTS / file) for file in files)]))
    require_imported_from(folder)
    return code


def killer_of(
    package: str,
    seed: Seed,
    suites: Sequence[str],
    scratch: Path,
    *,
    examples: list[str] | None = None,
    num_schedules: int = SCHEDULES,
    needs: frozenset[str] = frozenset(),
) -> Noticed | None:
    """The first suite that notices a bug; None if none does. By default examples are those of the package.

    Raises NotSeeded, RuntimeError or subprocess.TimeoutExpired if it is no bug that can be judged.
    """
    is_rust = package == CORE
    with tempfile.TemporaryDirectory(dir=scratch) as copy:
        folder = Path(copy) / ("cachemgr" if is_rust else package)
        if is_rust:
            workshop_in(scratch).seed(seed)
        notices = {
            "crate": lambda: is_rust and workshop_in(scratch).is_noticed(),
            "examples": lambda: is_noticed(folder, examples or EXAMPLES[package]),
            "machine": lambda: folder.name == "cachemgr" and is_noticed(folder, MACHINE),
        }
        for suite in suites:
            if suite == "simulation" and package not in SIMULATED:
                continue
            if suite != "crate" and not folder.exists():
                shutil.copytree(package_folder(folder.name), folder, ignore=shutil.ignore_patterns("__pycache__"))
                if is_rust:
                    shutil.copyfile(workshop_in(scratch).library(), folder / LIBRARY)
                else:
                    seed(folder)
            if suite == "simulation":
                found = simulate(folder, num_schedules, needs)
                if found.failure is not None:
                    return Noticed(suite, found.num_schedules, found.failure)
            elif notices[suite]():
                return Noticed(suite)
        return None


def judge_one(job: tuple[Bug, Sequence[str], Path, int]) -> Verdict:
    """A bug in a copy of its package, judged by these suites, the simulation by so many schedules."""
    bug, suites, scratch, num_schedules = job
    start = time.monotonic()
    noticed: Noticed | str | None
    try:
        examples = None if bug.package == CORE else EXAMPLES_OF_IDEA.get(bug.idea)
        noticed = killer_of(
            bug.package,
            bug.seed,
            suites,
            scratch,
            examples=examples,
            num_schedules=num_schedules,
            needs=needs_of(bug),
        )
    except (NotSeeded, RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"{bug.name}: {error}", file=sys.stderr, flush=True)
        noticed = ERROR
    return Verdict(bug, noticed, time.monotonic() - start)


def judge_all(
    bugs: Sequence[Bug],
    *,
    suites: Sequence[str],
    core_suites: Sequence[str],
    num_jobs: int,
    num_schedules: int = SCHEDULES,
    keep: Callable[[Verdict], None] = lambda verdict: None,
) -> int:
    """Prints which suite notices each bug; returns how many survive. core_suites judge the bugs of the core.

    `keep` gets each verdict. Raises SystemExit if tests fail without a bug.
    """
    packages, ideas = {bug.package for bug in bugs}, {"none", *(bug.idea for bug in bugs)}
    os.environ |= ENVIRONMENT
    # One job of the crate's tests alone builds them in its own copy, and nothing twice. The build for Python is kept in
    # core/target: a command that goes on where it was stopped starts from there.
    if CORE in packages and (num_jobs > 1 or set(core_suites) != {"crate"}):
        build_dependencies(core_suites)
    num_survivors = 0
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as scratch, context.Pool(num_jobs) as pool:

        def judged(bugs: Sequence[Bug], most: int) -> Iterator[Verdict]:
            of_bugs = [(bug, (core_suites if bug.package == CORE else suites)[:most]) for bug in bugs]
            limits = {True: min(num_schedules, CONTROL_SCHEDULES), False: num_schedules}
            return pool.imap(judge_one, [(bug, own, Path(scratch), limits[not bug.changes]) for bug, own in of_bugs])

        controls = [bug for bug in NO_BUGS if bug.package in packages and bug.idea in ideas]
        for verdict in judged(controls[:1] if suites == ["simulation"] else controls, 2):
            if verdict.noticed is not None:
                raise SystemExit(f"{verdict.bug.name}, and the tests fail: {verdict.noticed}")
        for verdict in judged(bugs, len(SUITES)):
            num_survivors += verdict.noticed in (None, ERROR)
            print(verdict, flush=True)
            keep(verdict)
    print(f"{len(bugs)} bugs, {num_survivors} survived")
    return num_survivors


def sample() -> list[Bug]:
    """The first bug of every sixteenth idea in Python, and of one in the core, where each takes a build.

    Bugs that are for the simulation are left out.
    """
    firsts = {(bug.package, bug.idea): bug for bug in reversed(BUGS) if bug.idea not in SIMULATED_IDEAS}.values()
    of_core = [bug for bug in BUGS if bug.package == CORE and bug in firsts]
    in_python = [bug for bug in BUGS if bug.package != CORE and bug in firsts]
    return [of_core[1], *in_python[::16]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only bugs with one of these in their idea or name")
    parser.add_argument(
        "--suite", choices=SUITES, action="append", help="only these tests; default: all, in this order"
    )
    parser.add_argument(
        "--package", choices=sorted(SIMULATED | {"integrations"}), action="append", help="only bugs of these"
    )
    parser.add_argument("--sample", action="store_true", help="a few, in some minutes of one core")
    parser.add_argument("--schedules", type=int, default=SCHEDULES, help="of the simulation, at most")
    parser.add_argument(
        "--record",
        action="store_true",
        help="keep the verdicts in simulated.json, and leave out bugs that have one there; without the simulation also "
        "those that it finds",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    by_default = [suite for suite in SUITES if suite != "simulation"] if options.sample else SUITES
    suites = [suite for suite in SUITES if suite in (options.suite or by_default)]
    bugs = sample() if options.sample else BUGS
    bugs = [bug for bug in bugs if not options.package or bug.package in options.package]
    bugs = [bug for bug in bugs if not options.words or any(word in f"{bug.idea} {bug.name}" for word in options.words)]
    # A bug of the sample that the crate's tests do not notice is an error: the build for Python takes too long.
    core_suites = ["crate"] if options.sample else suites
    if suites == ["simulation"]:
        bugs = [bug for bug in bugs if bug.package in SIMULATED and bug.name not in NOT_SIMULATED]
    if options.record:
        bugs = list(without_verdict(bugs, suites, options.schedules))

    def keep(verdict: Verdict) -> None:
        if options.record and verdict.noticed != ERROR:
            record_verdict(verdict, suites, options.schedules)

    num_survivors = judge_all(
        bugs,
        suites=suites,
        core_suites=core_suites,
        num_jobs=options.jobs,
        num_schedules=options.schedules,
        keep=keep,
    )
    return 1 if num_survivors else 0


def without_verdict(bugs: Sequence[Bug], suites: Sequence[str], num_schedules: int) -> Iterator[Bug]:
    """Yield the bugs of which the record does not say yet what a run of these suites would show."""
    known = recorded()
    for bug in bugs:
        values = known.get(bug.name, {})
        if suites == ["simulation"]:
            if not is_judged(bug, values, num_schedules):
                yield bug
        elif "else" not in values and values.get("schedules") is None:
            yield bug


def record_verdict(verdict: Verdict, suites: Sequence[str], num_schedules: int) -> None:
    """Keep what a run of the simulation alone, or of other suites, has shown of a bug."""
    noticed = verdict.noticed
    assert not isinstance(noticed, str)
    if suites == ["simulation"]:
        values = (None, "") if noticed is None else (noticed.num_schedules, noticed.failure)
        record(verdict.bug, schedules=values[0], failure=values[1], limit=num_schedules, drawn=drawn(verdict.bug))
    elif "simulation" not in suites:
        record(verdict.bug, **{"else": "" if noticed is None else noticed.suite})


if __name__ == "__main__":
    sys.exit(main())
