"""Extras against what the code imports. check_packages.py builds and installs them."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions

import pytest
import syntax
from deploy.tools import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
FOLDERS = {
    "cachemgr": ("cachemgr/quire", "serving", "protos"),
    "client": ("client", "protos"),
    "events": ("integrations/quire/integrations/kv_events", "serving", "protos"),
    "lab": ("lab", "protos"),
    "gateway": ("client", "gateway", "serving", "protos"),
    "worker": ("worker", "kernels", "serving", "protos"),
}
# Folders that can be deleted with their extra: no other extra has what they import.
ADAPTERS = {"shepherd": "integrations/quire/integrations/shepherd"}
# Not part of `all`: installed in an environment of its own.
APART = {"dynamo": ("client", "integrations/quire/integrations/dynamo", "serving", "protos")}
# Beside the worker's: for a GPU, and not in the lock, because it requires NVIDIA's packages of some hundred MB.
FOR_A_GPU = {"flashinfer"}
OF_TORCH = {"cuda-bindings"}
"""Installed with a torch for GPUs: without them the worker's error names the package."""
DISTRIBUTIONS = packages_distributions()


def name_of(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match is not None
    return match[0].lower().replace("_", "-")


def required(extra: str) -> set[str]:
    """Distributions that an extra requires, with those of the extras that it requires."""
    names = {name_of(requirement) for requirement in PROJECT["dependencies"]}
    for requirement in EXTRAS[extra]:
        if inner := re.match(r"quire-kv\[([\w,]+)\]", requirement):
            names |= set().union(*map(required, inner[1].split(",")))
        else:
            names.add(name_of(requirement))
    return names


def imported(folder: str) -> Iterator[str]:
    """Distributions that a folder's files import, inside functions too."""
    for path in (ROOT / folder).rglob("*.py"):
        if "node_modules" in path.parts:
            continue
        for node in ast.walk(syntax.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for module in modules:
                top = module.partition(".")[0]
                if top not in sys.stdlib_module_names and top != "quire":
                    yield distribution_of(module, path.name)


def distribution_of(module: str, file: str) -> str:
    top = module.partition(".")[0]
    if top == "google":  # a namespace of many
        return "googleapis-common-protos" if module.startswith("google.rpc") else "protobuf"
    if top == "dynamo":
        return "ai-dynamo"
    if top == "flashinfer":
        return "flashinfer-python"
    assert top in DISTRIBUTIONS, f"{file} imports {module}, which is not installed"
    names = {name.lower().replace("_", "-") for name in DISTRIBUTIONS[top]}
    return min(names, key=len)


@pytest.mark.parametrize("extra", ADAPTERS)
def test_an_adapter_has_what_it_imports(extra: str) -> None:
    assert set(imported(ADAPTERS[extra])) - required(extra) == set()


@pytest.mark.parametrize("extra", FOLDERS | APART)
def test_an_extra_has_what_its_code_imports(extra: str) -> None:
    needed = {name for folder in (FOLDERS | APART)[extra] for name in imported(folder)}
    optional = set().union(*map(required, FOR_A_GPU)) if extra == "worker" else set()
    assert needed - required(extra) - optional - OF_TORCH == set()


@pytest.mark.parametrize("extra", ["cachemgr", "client", "events", "gateway", "lab"])
def test_only_the_worker_asks_for_torch(extra: str) -> None:
    assert not required(extra) & {"torch", "triton", "transformers", "safetensors"}
    assert {"torch", "transformers"} <= required("worker")


def test_all_is_all_and_developers_have_it() -> None:
    assert required("all") == set().union(*map(required, FOLDERS))
    assert required("dev") >= required("all")


def test_the_lock_has_everything_with_hashes_and_names_no_index() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    locked = re.findall(r"^([\w.-]+)==\S+.*((?:\n    --hash=sha256:[0-9a-f]{64}.*)+)", lock, re.MULTILINE)
    assert len(locked) == len(re.findall(r"^[^#\s]", lock, re.MULTILINE))
    assert "://" not in lock
    extras = set().union(*map(required, EXTRAS.keys() - APART - FOR_A_GPU))
    needed = [*PYPROJECT["build-system"]["requires"], *PYPROJECT["dependency-groups"]["tools"]]
    assert (extras | set(map(name_of, needed))) - {name_of(name) for name, _ in locked} == set()


def test_what_is_apart_has_one_version() -> None:
    """Their dependencies do not fit those of the lock."""
    assert all(re.search("==|quire-kv", requirement) for extra in APART for requirement in EXTRAS[extra])
