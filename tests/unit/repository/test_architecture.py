"""The allowed imports: the contracts in pyproject.toml between packages, and the order of the crate's modules."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from roots import CHECKOUT, ROOTS, python_path

CORE_SOURCE = CHECKOUT / "cachemgr/core/src"
CORE_MODULES = sorted(str(path.relative_to(CORE_SOURCE)) for path in CORE_SOURCE.rglob("*.rs"))
# The crate is pure, but for the modules that Python calls, and one that writes files.
ACTING_IN_CORE = {
    **{path: {"pyo3"} for path in CORE_MODULES if path.startswith("python/")},
    "store/files.rs": {f"std::{name}" for name in ("env", "fs", "io", "process", "thread")},
}
ACTING_IN_CORE = {
    **{path: {"pyo3"} for path in CORE_MODULES if path.startswith("python/")},
    "store/files.rs": {f"std::{name}" for name in ("env", "fs", "io", "process", "thread")},
}
IMPURE_IN_CORE = ("pyo3", *(f"std::{name}" for name in ("env", "fs", "io", "net", "process", "thread", "time")))


def contracts_broken(checkout: Path) -> str:
    """Return the output of import-linter if a contract is broken, and nothing if all are kept."""
    program = "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache', '--no-logo'])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": python_path(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Contracts:" in done.stdout, done.stdout + done.stderr
    return done.stdout if done.returncode else ""


def test_the_packages_import_what_the_contracts_allow() -> None:
    assert contracts_broken(CHECKOUT) == ""


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("cachemgr/quire/cachemgr/blocks.py", "import torch", "has no tensors"),
        ("cachemgr/quire/cachemgr/catalog.py", "from time import monotonic", "modules that decide"),
        ("cachemgr/quire/cachemgr/state.py", "def f():\n    from quire.cli import launch", "cachemgr meets worker"),
        ("worker/quire/worker/config.py", "import quire.cachemgr.catalog", "decides nothing about ownership"),
        ("client/quire/client/errors.py", "from quire.serving.server import run", "what needs no extra"),
        ("client/quire/client/channel.py", "from quire.client.engine.llm import LLM", "on top of the thin clients"),
        ("client/quire/client/engine/scheduling/room.py", "import logging as log", "modules that decide"),
        ("gateway/quire/gateway/texts.py", "from quire.gateway.gateway import Gateway", "gateway are in levels"),
        ("gateway/quire/gateway/chat/tools.py", "import quire.gateway.chat.models", "in one direction"),
        ("kernels/quire/kernels/rope_table.py", "import quire.worker.config", "kernels know tensors alone"),
        ("worker/quire/worker/memory/state_slots.py", "from quire.worker.model import probe", "the rooms below it"),
        (
            "worker/quire/worker/memory/layer_spec.py",
            "from quire.worker.memory import kv_pool",
            "import one another",
        ),
    ],
)
def test_the_contracts_catch(module: str, line: str, contract: str, tmp_path: Path) -> None:
    shutil.copy(CHECKOUT / "pyproject.toml", tmp_path)
    for root in ROOTS:
        shutil.copytree(
            CHECKOUT / root / "quire", tmp_path / root / "quire", ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    with (tmp_path / module).open("a") as file:
        file.write(f"\n{line}\n")
    (broken,) = re.findall(r"Broken contracts\n-+\n(.*)", contracts_broken(tmp_path), re.DOTALL)
    assert contract in " ".join(broken.split())


def used_in_core(source: str) -> set[str]:
    """The modules of the crate that one uses; its tests do not count."""
    product = re.split(r"\n#\[cfg\(test\)\]\n(?:pub |pub\(crate\) )?mod tests", source)[0]
    used = set()
    for path in re.findall(r"\bcrate((?:::[a-z_]+)+)", product):
        names = path.split("::")[1:]
        places = ("/".join(names[:depth]) for depth in range(len(names), 0, -1))  # the innermost module first
        files = (f"{place}{end}" for place in places for end in (".rs", "/mod.rs"))
        used.add(next(file for file in files if file in CORE_MODULES))
    return used


@pytest.mark.parametrize("module", CORE_MODULES)
def test_only_the_bindings_know_python_and_one_module_acts(module: str) -> None:
    found = {name for name in IMPURE_IN_CORE if name in (CORE_SOURCE / module).read_text()}
    assert found == ACTING_IN_CORE.get(module, set())


def test_modules_of_the_core_use_one_another_in_one_direction() -> None:
    uses = {module: used_in_core((CORE_SOURCE / module).read_text()) - {module} for module in CORE_MODULES}
    for _ in CORE_MODULES:  # what uses nothing that is left is in no circle
        uses = {module: {name for name in used if name in uses} for module, used in uses.items() if used}
    assert uses == {}
