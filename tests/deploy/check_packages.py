"""Installed packages: the sdist and the wheel built of it, extras in environments of their own, and their commands.

    python tests/deploy/check_packages.py [--cargo-target FOLDER]

Works on a copy of the files that git knows or would take. Needs cargo, git and a package index. Takes some three
minutes, most of them for the Rust core, which a --cargo-target that is kept spares. The last line is "packages: N
checks passed"; exit status 1 if one did not. quire-kv[worker] is resolved and not installed: the checkout's own
environment has it. Extras that are not checked are named with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import tomllib
import venv
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in (".", "framework"))

# isort: split
from deadlines import DEADLINE_S
from package_environments import UV, installing, python_of

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements.lock"
BUILD_TIMEOUT_S = 1800.0
IN_SDIST = (
    *("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "requirements.lock"),
    *(
        "cachemgr/core/build_core.py",
        "cachemgr/core/Cargo.toml",
        "cachemgr/core/Cargo.lock",
        "cachemgr/core/src/lib.rs",
    ),
    *(
        "cachemgr/quire/cachemgr/__main__.py",
        "cachemgr/quire/cachemgr/_core.pyi",
        "worker/quire/worker/service/process.py",
        "kernels/quire/kernels/paged_decode.py",
        "serving/quire/serving/systemd.py",
    ),
    *("protos/quire/cache/v1/cache_service.proto", "protos/quire/cache/v1/cache_service_pb2.pyi"),
    *(
        "deploy/systemd/quire-cachemgr.service",
        "deploy/kubernetes/base/kustomization.yaml",
        "docs/how-to/deployment.md",
    ),
)
IN_WHEEL = (
    *("quire/cachemgr/_core.abi3.so", "quire/cachemgr/_core.pyi", "quire/cachemgr/py.typed"),
    *(
        "quire/worker/__main__.py",
        "quire/kernels/paged_decode.py",
        "quire/cli/__init__.py",
        "quire/gateway/http/page/index.html",
        "quire/lab/__init__.py",
        "quire/serving/systemd.py",
    ),
    *(f"quire/integrations/{name}" for name in ("shepherd/service.py", "dynamo/__main__.py", "kv_events/__main__.py")),
    *("quire/cache/v1/cache_service.proto", "quire/compute/v1/worker_service_pb2.py"),
)
# No package at the top level but quire, and nothing that only a checkout needs.
NOT_IN_WHEEL = (
    "tests",
    "benchmarks",
    "deploy",
    "docs",
    "quire/cachemgr/core",
    "cachemgr",
    "kernels",
    "client",
)
NOT_IN_SDIST = (
    "cachemgr/core/target",
    "cachemgr/quire/cachemgr/_core.abi3.so",
    ".venv",
    "tests",
    "benchmarks",
    "client/go",
)
WITHOUT_TORCH = {"torch", "triton", "transformers", "safetensors"}
FOREIGN_TO = {
    "cachemgr": WITHOUT_TORCH | {"llguidance", "tokenizers", "huggingface-hub", "rich", "psutil"},
    "client": WITHOUT_TORCH | {"llguidance", "numpy", "uvloop", "grpcio-reflection"},
    "events": WITHOUT_TORCH | {"llguidance", "tokenizers", "starlette", "ai-dynamo-runtime"},
    "gateway": WITHOUT_TORCH | {"llguidance", "pyzmq", "smg-grpc-proto"},
    "lab": WITHOUT_TORCH | {"llguidance", "pyzmq", "starlette"},
    "shepherd": WITHOUT_TORCH | {"llguidance", "pyzmq", "smg"},
}
# Extras that are not installed here, and the reason.
NOT_CHECKED = {
    "all": "it is others together",
    "dev": "the environment of this check has it",
    "dynamo": "ai-dynamo requires aisimulate, which downloads its wheel from NVIDIA's index; it is not used here",
    "flashinfer": "it is for a GPU, and requires NVIDIA's packages of some hundred MB",
    "otel": "the environment of this check has it",
}
# Nothing is at that address, so it waits.
AS_WORKER_OF_SMG = (
    *("--cachemgr", "127.0.0.1:9", "--pool", "one"),
    *("--listen", "127.0.0.1:0", "--shepherd", "127.0.0.1:0"),
)
SERVING = f"""
import grpc, sys
from grpc_health.v1 import health_pb2, health_pb2_grpc
with grpc.insecure_channel(sys.argv[1], options=(("grpc.enable_http_proxy", 0),)) as channel:
    request = health_pb2.HealthCheckRequest()
    for answer in health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True, timeout={DEADLINE_S}):
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            break
"""


class CheckFailed(Exception):
    """A check failed."""


def run(
    *command: str | Path, cwd: Path | None = None, timeout_s: float = DEADLINE_S, env: dict[str, str] | None = None
) -> str:
    """Return the standard output of a command. Raises CheckFailed if it fails. env is put over ours."""
    done = attempt(*command, cwd=cwd, timeout_s=timeout_s, env=env)
    if done.returncode:
        raise CheckFailed(f"{' '.join(map(str, command))}: {(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def attempt(
    *command: str | Path, cwd: Path | None = None, timeout_s: float = DEADLINE_S, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The output of a command, whatever its status."""
    environment = {**os.environ, **(env or {})}
    return subprocess.run(
        [*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=timeout_s, env=environment
    )


@dataclass(frozen=True)
class Environment:
    """A virtual environment."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, *requirements: str) -> Environment:
        """With these installed."""
        venv.create(folder)
        made = cls(folder)
        made.install(*requirements)
        return made

    def install(self, *arguments: str) -> str:
        """With the versions of the lock. Raises CheckFailed if a file has none of its hashes."""
        return run(*installing(self.folder), "--constraint", LOCK, *arguments, timeout_s=BUILD_TIMEOUT_S)

    def program(self, name: str) -> Path:
        return self.folder / "bin" / name

    def distributions(self) -> set[str]:
        """Names of all that is installed."""
        listed = json.loads(run(*UV, "list", "--format=json", *python_of(self.folder)))
        return {entry["name"].lower().replace("_", "-") for entry in listed}


@dataclass(frozen=True)
class Scratch:
    """The folder of the check: the copy, the built packages, environments by extra."""

    folder: Path

    @property
    def tree(self) -> Path:
        return self.folder / "tree"

    def built(self, pattern: str) -> Path:
        (path,) = (self.tree / "dist").glob(pattern)
        return path

    def requirement(self, extra: str) -> str:
        """For pip: the wheel with an extra."""
        return f"quire-kv[{extra}] @ {self.built('*.whl').as_uri()}"


def copy_tree(scratch: Scratch) -> None:
    """The files of a clean clone, with those not committed yet."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (scratch.tree / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch.tree / name).write_bytes((ROOT / name).read_bytes())


def they_build(scratch: Scratch) -> None:
    """`make wheel` builds the sdist from a clean tree, and the wheel from nothing but the sdist."""
    run("make", "wheel", f"PYTHON={sys.executable}", cwd=scratch.tree, timeout_s=BUILD_TIMEOUT_S)


def they_have_what_they_must(scratch: Scratch) -> None:
    """The sdist has sources, protos and licence, the wheel only importable files; one wheel is for every Python."""
    with tarfile.open(scratch.built("*.tar.gz")) as sdist:
        check_names("sdist", {name.partition("/")[2] for name in sdist.getnames()}, IN_SDIST, NOT_IN_SDIST)
    wheel = scratch.built("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        check_names("wheel", set(archive.namelist()), IN_WHEEL, NOT_IN_WHEEL)
        if not [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]:
            raise CheckFailed("the wheel has no licence")
    if not re.fullmatch(r"quire_kv-.*-cp311-abi3-(manylinux_.*|(?!linux).*)\.whl", wheel.name):
        raise CheckFailed(f"{wheel.name} is for one Python or one Linux only")


def it_installs_without_rust(scratch: Scratch) -> None:
    """Without cargo or a compiler in PATH the wheel installs as quire-kv, and imports and runs as quire."""
    environment = Environment.make(scratch.folder / "alone", "pip")
    constraints = scratch.folder / "constraints.txt"
    # Without hashes: pip takes none beside a wheel that has none.
    constraints.write_text("\n".join(re.findall(r"^[\w.-]+==[^\\\n]+", LOCK.read_text(), re.MULTILINE)))
    programs = {"PATH": str(environment.folder / "bin")}
    python = environment.program("python")
    constraint = ("--constraint", str(constraints), "--only-binary=:all:")
    requirement = scratch.requirement("cachemgr")
    install = ("-m", "pip", "install", "--quiet", requirement, *constraint)
    run(python, *install, timeout_s=BUILD_TIMEOUT_S, env=programs)
    run(python, "-c", "import quire.cachemgr, quire.cachemgr._core", env=programs)
    if "Usage: quire" not in run(environment.program("quire"), "--help", env=programs):
        raise CheckFailed("quire --help does not answer as it should")
    installed = environment.distributions()
    if "quire-kv" not in installed or "quire" in installed:
        raise CheckFailed(f"it installs as {sorted(name for name in installed if 'quire' in name)}")


def check_names(what: str, names: set[str], needed: tuple[str, ...], foreign: tuple[str, ...]) -> None:
    lacking = set(needed) - names
    strangers = {name for name in names for folder in foreign if name == folder or name.startswith(f"{folder}/")}
    if lacking or strangers:
        raise CheckFailed(f"{what}: lacks {sorted(lacking)}, has {sorted(strangers)[:5]}")


def extras_have_no_torch(scratch: Scratch) -> None:
    """Each extra without torch installs, without the packages of others. No extra is forgotten."""
    project = tomllib.loads((scratch.tree / "pyproject.toml").read_text())["project"]
    if forgotten := set(project["optional-dependencies"]) ^ {"worker", *FOREIGN_TO, *NOT_CHECKED}:
        raise CheckFailed(f"extras that are neither checked nor named: {sorted(forgotten)}")
    for extra, foreign in FOREIGN_TO.items():
        installed = Environment.make(scratch.folder / extra, scratch.requirement(extra)).distributions()
        if strangers := installed & foreign:
            raise CheckFailed(f"quire-kv[{extra}] installs {sorted(strangers)}")


def the_worker_extra_has_torch(scratch: Scratch) -> None:
    """quire-kv[worker] can be resolved, and has torch, transformers, and what cachemgr's extra has."""
    requirements = scratch.folder / "worker.in"
    requirements.write_text(scratch.requirement("worker"))
    resolved = run(*UV, "compile", "--quiet", "--constraint", LOCK, requirements, timeout_s=BUILD_TIMEOUT_S)
    names = set(re.findall(r"^[\w-]+(?===)", resolved, re.MULTILINE))
    if lacking := {"torch", "transformers", "safetensors", "psutil", "prometheus-client", "uvloop"} - names:
        raise CheckFailed(f"quire-kv[worker] lacks {sorted(lacking)}")


def cachemgr_serves(scratch: Scratch) -> None:
    """From quire-kv[cachemgr] alone cachemgr starts, a client from quire-kv[client] alone calls it, SIGTERM ends it."""
    server, client = (Environment(scratch.folder / extra) for extra in ("cachemgr", "client"))
    with tempfile.TemporaryDirectory(prefix="q-") as folder:
        address = f"unix:{folder}/c.sock"
        with subprocess.Popen([server.program("quire"), "cachemgr", "--listen", address]) as process:
            try:
                run(client.program("python"), "-c", SERVING, address)
                said = run(client.program("quire"), "stats", "--json", "--cachemgr", address)
                if json.loads(said)["pools"] != []:
                    raise CheckFailed(f"quire stats said {said}")
                process.send_signal(signal.SIGTERM)
                if process.wait(DEADLINE_S) != 0:
                    raise CheckFailed(f"cachemgr ended with status {process.returncode}")
            finally:
                process.kill()


def the_command_line_says_what_it_is(scratch: Scratch) -> None:
    """`quire --version` is pyproject's, and `quire --help` answers, with either extra."""
    version = tomllib.loads((scratch.tree / "pyproject.toml").read_text())["project"]["version"]
    for extra in FOREIGN_TO:
        quire = Environment(scratch.folder / extra).program("quire")
        if version not in run(quire, "--version") or "Usage: quire" not in run(quire, "--help"):
            raise CheckFailed(f"quire-kv[{extra}] does not answer as it should")


def adapters_start(scratch: Scratch) -> None:
    """`quire events`, `quire lab` and `quire serve --shepherd` have their packages in the extras of these names."""
    events, lab, shepherd = (Environment(scratch.folder / extra) for extra in ("events", "lab", "shepherd"))
    if "h100-8b" not in run(lab.program("quire"), "lab", "presets"):
        raise CheckFailed("quire lab presets does not answer as it should")
    if "Usage: quire events" not in run(events.program("quire"), "events", "--help"):
        raise CheckFailed("quire events --help does not answer as it should")
    command = [shepherd.program("quire"), "serve", *AS_WORKER_OF_SMG]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(DEADLINE_S, process.kill)
        timer.start()
        said = list(until("a worker of Shepherd Model Gateway", process.stderr or ()))
        timer.cancel()
        process.kill()
    if not said or "smg_grpc_proto" not in said[-1]:
        raise CheckFailed(f"quire serve --shepherd does not start: {said[-5:]}")


def until(text: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines up to the first one with a text."""
    for line in lines:
        yield line
        if text in line:
            return


def what_is_missing_is_named(scratch: Scratch) -> None:
    """A command with a missing extra names it, in one line, with status 1."""
    for extra, command, needed in (
        ("cachemgr", ("worker", "--model", "some"), "quire-kv[worker]"),
        ("cachemgr", ("generate", "Once"), "quire-kv[client]"),
        ("client", ("cachemgr",), "quire-kv[cachemgr]"),
        ("client", ("worker", "--model", "some"), "quire-kv[worker]"),
        ("client", ("serve",), "quire-kv[gateway]"),
        ("client", ("events",), "quire-kv[events]"),
        ("client", ("dynamo",), "quire-kv[dynamo]"),
        ("client", ("lab", "presets"), "quire-kv[lab]"),
        ("gateway", ("serve", *AS_WORKER_OF_SMG), "quire-kv[shepherd]"),
        ("client", ("up", "--model", "some"), "quire-kv[cachemgr,gateway,worker]"),
    ):
        done = attempt(Environment(scratch.folder / extra).program("quire"), *command)
        if done.returncode != 1 or needed not in done.stderr or "Traceback" in done.stderr:
            raise CheckFailed(f"quire-kv[{extra}]: quire {' '.join(command)}: {done.returncode}, {done.stderr[-500:]}")


CHECKS: tuple[Callable[[Scratch], None], ...] = (
    they_build,
    they_have_what_they_must,
    it_installs_without_rust,
    extras_have_no_torch,
    the_worker_extra_has_torch,
    the_command_line_says_what_it_is,
    cachemgr_serves,
    adapters_start,
    what_is_missing_is_named,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cargo-target", type=Path, help="Where cargo builds. Default: in the scratch folder.")
    target: Path | None = parser.parse_args().cargo_target
    with tempfile.TemporaryDirectory(prefix="quire-packages-") as folder:
        scratch = Scratch(Path(folder))
        os.environ["CARGO_TARGET_DIR"] = str(target.absolute() if target else scratch.folder / "cargo")
        copy_tree(scratch)
        for check in CHECKS:
            summary = (check.__doc__ or "").partition("\n")[0]
            try:
                check(scratch)
            except CheckFailed as error:
                print(f"FAILED  {summary}\n{error}", file=sys.stderr)
                return 1
            print(f"ok  {summary}", flush=True)
    for extra, reason in NOT_CHECKED.items():
        print(f"not checked  quire-kv[{extra}]: {reason}")
    print(f"packages: {len(CHECKS)} checks passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
