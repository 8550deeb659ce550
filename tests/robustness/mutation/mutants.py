"""Seeds each bug of `seeded_bugs.py` into a copy of its package, and requires that a test notices it.

    python tests/robustness/mutation/mutants.py                  all of them
    python tests/robustness/mutation/mutants.py fork "host tier" those with such words in their idea or name
    python tests/robustness/mutation/mutants.py --suite machine  by the state machine alone
    python tests/robustness/mutation/mutants.py --sample         a few, in some minutes of one core

The tree is never changed. A copy of the package with the bug stands in for the real one in a process of its own, forked
from one that has imported what takes long and is not ours. For a bug in the core, each job has a copy of the crate. It
builds that copy again and again, and starts from what cargo has in core/target.

A test that hangs or takes the process down has noticed the bug. Exits with 1 if a bug survives, does not fit the
present source or does not compile.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "framework"))

# isort: split
import hypothesis.stateful  # noqa: F401 - once, for all processes
import numpy  # noqa: F401
import pytest
from seeded_bugs import BUGS, CORE, GPU_IDEA, RANKS_IDEA, Bug, NotSeeded

TESTS = Path(__file__).parents[2]
ROOT = TESTS.parent
CRATE = ROOT / "cachemgr" / "core"
LIBRARY = "_core.abi3.so"
SUITES = ["crate", "examples", "machine"]
"""The crate's own tests; tests of examples in Python; the state machine in Python. The quickest first."""
BOOKS = [
    f"unit/cachemgr/test_{name}.py"
    for name in ("ledger", "leases", "catalog", "state", "bounds", "watch_promise", "watch", "looking", "time")
]
EXAMPLES = {
    CORE: BOOKS,
    "cachemgr": BOOKS,
    "worker": [f"unit/worker/test_{name}.py" for name in ("gate", "grants", "verify")],
    "client": ["unit/engine/test_beams.py", "unit/engine/test_scheduler.py"],
    "integrations": [
        f"unit/integrations/test_{name}.py" for name in ("prefix_replica", "kv_events", "published_prefixes")
    ],
}
EXAMPLES_OF_IDEA = {
    GPU_IDEA: ["gpu_desk/test_start.py", "unit/worker/test_process.py", "unit/worker/test_peak_step.py"],
    RANKS_IDEA: ["unit/worker/test_orders.py", "unit/worker/test_sharding.py"],
}
"""For the bugs of an idea, in place of those of their package."""
MACHINE = ["unit/cachemgr/test_ledger_machine.py"]

ENVIRONMENT = {
    "CARGO_TERM_COLOR": "never",
    "PYO3_PYTHON": sys.executable,
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "QUIRE_MACHINE_EXAMPLES": "700",
}
CARGO = ["--locked", "--lib", "--profile", "mutant"]
TEST_CARGO = [*CARGO, "--no-default-features"]
BUILD_TIMEOUT_S = 600
TIMEOUT_S = 300
MEMORY_BYTES = 8 << 30
NOT_RUN = 70
ERROR = "ERROR"

NO_BUGS = [
    *(Bug("none", f"no bug in {package}", package, ()) for package in EXAMPLES),
    Bug(GPU_IDEA, f"no bug of {GPU_IDEA}", "worker", ()),
]

Seed = Callable[[Path], None]
"""Changes the files of a copy of a package."""


def package_folder(package: str) -> Path:
    """Return the folder of a package of the repository, or of the crate."""
    return CRATE if package == CORE else ROOT / package / "quire" / package


class Workshop:
    """A job's copy of the crate, and where it is built."""

    def __init__(self, folder: Path) -> None:
        self.crate = folder / "core"
        self.target = folder / "target"
        shutil.copytree(CRATE, self.crate, ignore=shutil.ignore_patterns("target"))
        built = cargo_target() / "mutant"
        if built.exists():
            shutil.copytree(built, self.target / "mutant", ignore=shutil.ignore_patterns("incremental"))

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
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            code = NOT_RUN
            try:
                os.dup2(output.fileno(), sys.stdout.fileno())
                os.dup2(output.fileno(), sys.stderr.fileno())
                resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
                signal.alarm(TIMEOUT_S)
                code = stand_in(folder, [str(TESTS / file) for file in files])
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code > 1:
            output.seek(0)
            raise RuntimeError(f"the tests did not run: {code}\n{output.read().decode()[-4000:]}")
    return code != 0


def killer_of(
    package: str, seed: Seed, suites: Sequence[str], scratch: Path, *, examples: list[str] | None = None
) -> str | None:
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
            if suite != "crate" and not folder.exists():
                shutil.copytree(package_folder(folder.name), folder, ignore=shutil.ignore_patterns("__pycache__"))
                if is_rust:
                    shutil.copyfile(workshop_in(scratch).library(), folder / LIBRARY)
                else:
                    seed(folder)
            if notices[suite]():
                return suite
        return None


def stand_in(folder: Path, arguments: list[str]) -> int:
    """Runs pytest in this process with the package in `folder` in place of the real one. Returns its exit code.

    Raises RuntimeError if this process has imported the real one: a fork of `framework/forking.py`'s server has.
    """
    package = f"quire.{folder.name}"
    if package in sys.modules:
        raise RuntimeError(f"{package} is imported already, from {sys.modules[package].__file__}")

    class StandIn:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            if name != package:
                return None  # its modules are found by its path
            where = [str(folder)]
            return importlib.util.spec_from_file_location(
                name, folder / "__init__.py", submodule_search_locations=where
            )

    sys.meta_path.insert(0, StandIn)
    code = int(
        pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line", "-m", "not verify", *arguments])
    )
    files = [module.__file__ for name, module in sys.modules.items() if name.startswith(package)]
    assert files, f"no test imports {package}"
    assert all(Path(file).is_relative_to(folder) for file in files if file)
    sys.stdout.flush()
    return code


def judge_one(job: tuple[Bug, Sequence[str], Path]) -> tuple[Bug, str | None, float]:
    """The bug, the suite that notices it (ERROR if it is none that can be judged), and how long that took."""
    bug, suites, scratch = job
    start = time.monotonic()
    try:
        examples = EXAMPLES_OF_IDEA.get(bug.idea)
        killer = killer_of(bug.package, bug.seed, suites, scratch, examples=examples)
    except (NotSeeded, RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"{bug.name}: {error}", file=sys.stderr, flush=True)
        killer = ERROR
    return bug, killer, time.monotonic() - start


def judge_all(bugs: Sequence[Bug], *, suites: Sequence[str], core_suites: Sequence[str], num_jobs: int) -> int:
    """Prints which suite notices each bug; returns how many survive. core_suites judge the bugs of the core.

    Raises SystemExit if tests fail without a bug.
    """
    packages, ideas = {bug.package for bug in bugs}, {"none", *(bug.idea for bug in bugs)}
    os.environ |= ENVIRONMENT
    if CORE in packages and num_jobs > 1:  # one job builds them in its own copy, and nothing twice
        build_dependencies(core_suites)
    num_survivors = 0
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as scratch, context.Pool(num_jobs) as pool:

        def judged(bugs: Sequence[Bug], most: int) -> Iterator[tuple[Bug, str | None, float]]:
            jobs = [(bug, (core_suites if bug.package == CORE else suites)[:most], Path(scratch)) for bug in bugs]
            return pool.imap(judge_one, jobs)

        controls = [bug for bug in NO_BUGS if bug.package in packages and bug.idea in ideas]
        for bug, killer, _ in judged(controls, 2):
            if killer is not None:
                raise SystemExit(f"{bug.name}, and the tests fail: {killer}")
        for bug, killer, seconds in judged(bugs, len(SUITES)):
            num_survivors += killer in (None, ERROR)
            print(f"{killer or 'SURVIVED':9} {seconds:5.1f} s  {bug.idea:20} {bug.name}", flush=True)
    print(f"{len(bugs)} bugs, {num_survivors} survived")
    return num_survivors


def sample() -> list[Bug]:
    """The first bug of each idea in Python, and of every eighth idea in the core, where each takes a build."""
    firsts = {(bug.package, bug.idea): bug for bug in reversed(BUGS)}.values()
    of_core = [bug for bug in BUGS if bug.package == CORE and bug in firsts]
    return [*of_core[1::8], *(bug for bug in BUGS if bug.package != CORE and bug in firsts)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only bugs with one of these in their idea or name")
    parser.add_argument(
        "--suite", choices=SUITES, action="append", help="only these tests; default: all, in this order"
    )
    parser.add_argument("--sample", action="store_true", help="a few, in some minutes of one core")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    suites = [suite for suite in SUITES if suite in (options.suite or SUITES)]
    bugs = sample() if options.sample else BUGS
    bugs = [bug for bug in bugs if not options.words or any(word in f"{bug.idea} {bug.name}" for word in options.words)]
    # A bug of the sample that the crate's tests do not notice is an error: the build for Python takes too long.
    core_suites = ["crate"] if options.sample else suites
    return 1 if judge_all(bugs, suites=suites, core_suites=core_suites, num_jobs=options.jobs) else 0


if __name__ == "__main__":
    sys.exit(main())
