"""Runs tests on an old commit of this repository, in a worktree, with the packages of others that are installed today.

Of what is ours everything is the commit's: the packages, found as that commit arranged them, the core, built by cargo
if there is one, and the command `quire`. Only the tests may be of a later commit. The folder build/old_commits keeps
what is built for the next run, and `git worktree remove --force build/old_commits/checkout` ends it.
"""

from __future__ import annotations

import ast
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build/old_commits"
CHECKOUT = BUILD / "checkout"
ENVIRONMENT = BUILD / "venv"
CRATE = "cachemgr/core"
MODULE_OF_TESTS = "#[cfg(test)]\nmod tests {"  # the end of a file of the crate
LIMIT_S = 180
TIMED_OUT = -signal.SIGKILL
SAID_LENGTH = 160

# Folders of one machine, which a record leaves out.
OWN_FOLDERS = re.compile(
    rf"{re.escape(str(CHECKOUT))}/|{re.escape(str(ROOT))}/|{re.escape(tempfile.gettempdir())}/(\S+/)?"
)

# It finds packages in folders that are under no root of the namespace, as setuptools' editable installs did.
FINDER = """
import importlib.machinery, importlib.util, os, sys
class Finder:
    folders = {folders!r}
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        folder = cls.folders.get(name)
        if folder is None:
            return None
        if os.path.exists(folder + "/__init__.py"):
            return importlib.util.spec_from_file_location(
                name, folder + "/__init__.py", submodule_search_locations=[folder])
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations.append(folder)
        return spec
sys.meta_path.insert(0, Finder)
"""


# It stands in tests for a name that only its commit has, and fails at any use.
STAND_IN = """
class StandIn:
    def fail(self, *arguments, **named):
        raise AttributeError("a name that a later commit has")
    __call__ = __getattr__ = __getitem__ = __iter__ = __len__ = __index__ = __eq__ = __lt__ = __gt__ = fail
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __enter__ = __aenter__ = fail
    __hash__ = object.__hash__
"""


@dataclass(frozen=True, slots=True)
class Result:
    """An outcome of tests: passed is None if they could not be run."""

    passed: bool | None
    said: str
    """The first failure, or why they could not be run."""


def git(*arguments: str, folder: Path = ROOT) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def run_on(commit: str, tests: Sequence[str], *, tests_of: str) -> Result:
    """Run tests of one commit on another one: node ids of pytest, and file::test of the crate."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        check_out(commit)
        take_tests(tests, tests_of)
        return run(tests)


def check_out(commit: str) -> None:
    """Bring the worktree to a commit, and keep what cargo built: of files that are equal it builds nothing again."""
    if not CHECKOUT.exists():
        git("worktree", "prune")
        git("worktree", "add", "--quiet", "--detach", "--force", str(CHECKOUT), commit)
    git("checkout", "--quiet", "--detach", "--force", commit, folder=CHECKOUT)
    git("clean", "--quiet", "-ffd", folder=CHECKOUT)


def take_tests(tests: Sequence[str], commit: str) -> None:
    """Put the tests of a commit into the worktree. Those of the crate replace the tests that their file has there."""
    git("checkout", commit, "--", "tests", folder=CHECKOUT)
    for path in {CHECKOUT / test.partition("::")[0] for test in tests}:
        if path.suffix == ".py":
            path.write_text(with_lenient_imports(path.read_text()))
        elif path.exists():
            code, mark, _ = path.read_text().partition(MODULE_OF_TESTS)
            taken = git("show", f"{commit}:{path.relative_to(CHECKOUT)}").partition(MODULE_OF_TESTS)[2]
            path.write_text(f"{code}{mark}{taken}\n")


def with_lenient_imports(source: str) -> str:
    """Return a file of tests in which a name of ours that is not there fails only the tests that use it."""
    lines = source.splitlines()
    imports = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quire.")
    ]
    for node in reversed(imports):
        lines[node.lineno - 1 : node.end_lineno] = [
            line
            for name in node.names
            for line in (
                f"try: from {node.module} import {name.name} as {name.asname or name.name}",
                f"except ImportError: {name.asname or name.name} = StandIn()",
            )
        ]
    first = min((node.lineno for node in imports), default=1) - 1
    return "\n".join([*lines[:first], STAND_IN if imports else "", *lines[first:], ""])


def run(tests: Sequence[str]) -> Result:
    """Run tests in the worktree as it is; of those that do not pass, the first one counts."""
    in_rust = [test for test in tests if ".rs::" in test]
    in_python = [test for test in tests if ".rs::" not in test]
    results = [run_rust(test) for test in in_rust] + ([run_python(in_python)] if in_python else [])
    return min(results, key=lambda result: (result.passed is not False, result.passed is not None))


def run_rust(test: str) -> Result:
    """Run one test of the crate."""
    name = test.rpartition("::")[2]
    code, output = run_in_checkout(cargo("test", "--no-default-features", "--lib", name))
    if "running " not in output:
        return Result(None, shortened(next(iter(re.findall(r"^error.*", output, re.M)), output[-SAID_LENGTH:])))
    if not re.search(r"[1-9]\d* (passed|failed);", output):
        return Result(None, "there is no such test")
    panic = re.search(r"panicked at [^\n]*\n(.+?)\n(?:note:|stack backtrace:|\n)", output, re.S)
    return Result(code == 0, shortened(panic[1]) if panic else "")


def run_python(tests: list[str]) -> Result:
    """Run tests of Python, on packages and a core of the commit that is checked out."""
    code, output = install()
    if code != 0:
        return Result(None, f"the crate does not build: {shortened(output[-SAID_LENGTH:])}")
    command = [str(ENVIRONMENT / "bin/python"), "-m", "pytest", "--quiet", "--exitfirst", "-rfE", "--tb=short"]
    code, output = run_in_checkout([*command, "--override-ini=addopts=--import-mode=importlib", *tests])
    if code == 0:
        ran = re.search(r"\d+ passed", output)
        return Result(True, "") if ran else Result(None, "the test is skipped")
    if code < 0:
        return Result(False, f"no end within {LIMIT_S} s" if code == TIMED_OUT else f"ended by signal {-code}")
    failed = re.search(r"^FAILED \S+(?: - (.*))?", output, re.M)
    errors = re.findall(r"^E   +(.*)", output, re.M) or re.findall(r"^ERROR:? (.*)", output, re.M) or [output[-400:]]
    said = failed[1] if failed and failed[1] and not failed[1].endswith(":") else " ".join(errors)
    return Result(False if failed else None, shortened(said))


def shortened(said: str) -> str:
    """Return one line of limited length, without the folders of this machine."""
    line = OWN_FOLDERS.sub("", " ".join(said.split()))
    return line if len(line) <= SAID_LENGTH else f"{line[:SAID_LENGTH]}…"


def install() -> tuple[int, str]:
    """Make an environment with the worktree's packages, and the present environment's of others."""
    if not ENVIRONMENT.exists():
        venv.create(ENVIRONMENT, symlinks=True)
    settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    (site,) = ENVIRONMENT.glob("lib/python*/site-packages")
    roots = settings["tool"].get("hatch", {}).get("build", {}).get("dev-mode-dirs", ["protos"])
    packages = settings["tool"].get("setuptools", {}).get("package-dir", {})
    folders = {name: str(CHECKOUT / folder) for name, folder in packages.items()}
    (site / "finder_of_checkout.py").write_text(FINDER.format(folders=folders))
    paths = [str(CHECKOUT / root) for root in roots]
    lines = [*paths, sysconfig.get_path("purelib"), "import finder_of_checkout"]
    (site / "checkout.pth").write_text("\n".join(lines) + "\n")
    for name, place in settings["project"].get("scripts", {}).items():
        module, _, function = place.partition(":")
        script = ENVIRONMENT / "bin" / name
        script.write_text(
            f"#!{ENVIRONMENT}/bin/python\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        )
        script.chmod(0o755)
    return install_core(Path(folders.get("quire.cachemgr", CHECKOUT / "cachemgr/quire/cachemgr")))


def install_core(package: Path) -> tuple[int, str]:
    """Build the core, once for all commits with the same sources. Returns cargo's exit code and output."""
    library = package / "_core.abi3.so"
    library.unlink(missing_ok=True)
    if not (CHECKOUT / CRATE).exists():
        return 0, ""
    tree = git("rev-parse", f"HEAD:{CRATE}", folder=CHECKOUT)
    built = BUILD / "cores" / f"{tree}.so"
    if not built.exists():
        code, output = run_in_checkout(cargo("build", "--lib"))
        if code != 0:
            return code, output
        built.parent.mkdir(exist_ok=True)
        shutil.copy2(BUILD / "target/debug/lib_core.so", built)
    shutil.copy2(built, library)
    return 0, ""


def cargo(command: str, *arguments: str) -> list[str]:
    return ["cargo", command, "--quiet", "--manifest-path", f"{CRATE}/Cargo.toml", "--locked", *arguments]


def run_in_checkout(command: list[str]) -> tuple[int, str]:
    """Return the exit code and the output of a command; after the limit, TIMED_OUT."""
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")},
        "PATH": os.pathsep.join((str(ENVIRONMENT / "bin"), os.environ["PATH"])),
        "PYTHONDONTWRITEBYTECODE": "1",  # two commits may be checked out within one second
        "CARGO_TARGET_DIR": str(BUILD / "target"),
        "CARGO_TERM_COLOR": "never",
        "CARGO_PROFILE_DEV_OPT_LEVEL": "1",
        "CARGO_PROFILE_DEV_DEBUG": "false",
        "PYO3_NO_PYTHON": "1",
        "COLUMNS": "400",
        "HF_HUB_OFFLINE": "1",
        "QUIRE_VERIFY": "1",
        **({"TRITON_INTERPRET": "1"} if any("tests/kernels/" in word for word in command) else {}),
    }
    process = subprocess.Popen(
        command,
        cwd=CHECKOUT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return TIMED_OUT, output
    return process.returncode, output
