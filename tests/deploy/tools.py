"""Programs that these tests need, and the real command line that flags in files are held against."""

from __future__ import annotations

import fcntl
import importlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BUILD_TIMEOUT_S = 1200  # with nothing in Go's caches
# Of `quire`: those that become another program, which reads the flags.
SERVICES = {"cachemgr": "quire.cachemgr.__main__", "worker": "quire.worker.__main__"}
# With a gateway, which is a client too.
SERVERS = {
    **SERVICES,
    "serve": "quire.gateway.__main__",
    "events": "quire.integrations.kv_events.__main__",
    "holder": "quire.worker.holder.__main__",
}
# The manifests that a service's pod is merged of.
MANIFESTS = {
    "cachemgr": ("base/cachemgr.yaml", "components/cachemgr/container.yaml"),
    "worker": ("components/workers/workers.yaml",),
    "gateway": ("components/gateway/gateway.yaml",),
}


def pod_of(service: str) -> dict[str, Any]:
    """The specification of a service's pod."""
    pod: dict[str, Any] = {}
    for path in MANIFESTS[service]:
        documents = yaml.safe_load_all((DEPLOY / "kubernetes" / path).read_text())
        (workload,) = [document for document in documents if "template" in document.get("spec", {})]
        pod |= {name: value for name, value in workload["spec"]["template"]["spec"].items() if value}
    return pod


def find(program: str, *, required_by: str, for_what: str) -> str:
    """The path of a program; without it the test is skipped, or fails if the variable `required_by` is 1."""
    path = shutil.which(program)
    return path if path is not None else missing(program, required_by=required_by, for_what=for_what)


def missing(what: str, *, required_by: str, for_what: str) -> NoReturn:
    """Skips the test, loudly, or fails it."""
    if os.environ.get(required_by) == "1":
        pytest.fail(f"{what} is missing, and this run requires it for {for_what}")
    pytest.skip(f"*** {what} is missing: {for_what} NOT tested ***")


def build_go_tool(module: Path, package: str, name: str) -> Path:
    """Build a program at the version of a module's go.mod, and return its path; takes minutes the first time."""
    go = find("go", required_by="QUIRE_REQUIRE_KUBERNETES", for_what=name)
    target = ROOT / ".tools" / name
    command = [go, "build", "-C", str(module), "-o", str(target), package]
    target.parent.mkdir(exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:  # processes of tests would build it side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    assert built.returncode == 0, built.stderr
    return target


def parse_service(
    name: str, arguments: Sequence[str], environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """The flags' values of `quire NAME`, as its own parser reads them from this command line and environment.

    Fails on a flag that is not there, a value that is wrong, and a QUIRE_* variable that no flag reads.
    """
    command: click.Command = importlib.import_module(SERVERS[name]).main
    for variable in [variable for variable in os.environ if variable.startswith("QUIRE_")]:
        monkeypatch.delenv(variable)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    context = command.make_context(name, list(arguments))
    prefix = command.context_settings["auto_envvar_prefix"]
    known = {f"{prefix}_{parameter.name}".upper() for parameter in command.params}
    unread = {variable for variable in environment if variable.startswith("QUIRE_")} - known
    assert not unread, f"no flag of {name} reads {unread}"
    return context.params
