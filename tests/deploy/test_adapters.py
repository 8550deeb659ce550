"""Adapters for other projects: each can be deleted with its extra, and its tested version is the same everywhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pages
import pytest
from deadlines import DEADLINE_S
from deploy.tools import ROOT
from package_environments import SMG
from roots import python_path

EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
REQUIREMENTS = ROOT / "tests/integration/dynamo_requirements.txt"


@dataclass(frozen=True)
class Adapter:
    """The parts that belong to an adapter alone.

    files     of the product
    users     tests and benchmarks that are deleted with them
    packages  of its extra alone, as they are imported
    """

    extra: str
    files: tuple[str, ...]
    users: tuple[str, ...]
    packages: tuple[str, ...]

    def delete(self, tree: Path) -> None:
        for name in (*self.files, *self.users):
            path = tree / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    @property
    def modules(self) -> list[str]:
        return [name.partition("/")[2].removesuffix(".py").replace("/", ".") for name in self.files]


ADAPTERS = (
    Adapter(
        "shepherd",
        ("integrations/quire/integrations/shepherd",),
        (
            "tests/gateway/test_shepherd.py",
            "tests/gateway/test_shepherd_gateway.py",
            "tests/unit/integrations/test_shepherd_events.py",
        ),
        ("smg_grpc_proto",),
    ),
    Adapter("dynamo", ("integrations/quire/integrations/dynamo",), ("tests/integration/test_dynamo.py",), ("dynamo",)),
    # The other two adapters use the rest of the folder: the copy of a pool's blocks.
    Adapter(
        "events",
        tuple(
            f"integrations/quire/integrations/kv_events/{name}.py"
            for name in ("__main__", "encoding", "metrics", "publisher")
        ),
        (
            "benchmarks/control_plane/kv_events.py",
            "tests/integration/kv_events.py",
            "tests/integration/test_dynamo_indexer.py",
            "tests/integration/test_kv_events.py",
            "tests/unit/integrations/test_kv_events.py",
        ),
        ("zmq",),
    ),
)
# Each begins with the names of packages that count as not installed.
BEGINNING = """
import sys
absent, *arguments = sys.argv[1:]
sys.modules.update(dict.fromkeys(absent.split(",")))
"""
IMPORT_ALL = """
import importlib, pkgutil
for name in ("client", "cli", "gateway", "lab", "integrations"):
    package = importlib.import_module(f"quire.{name}")
    assert not [path for path in package.__path__ if not path.startswith(arguments[0])]
    for module in pkgutil.walk_packages(package.__path__, f"quire.{name}."):
        print(module.name)
        if module.name != "quire.integrations.dynamo.__main__":  # Dynamo is not installed here
            importlib.import_module(module.name)
"""
COMMAND = """
import importlib
command, *flags = arguments
module, name = command.split(":")
getattr(importlib.import_module(module), name)(flags, prog_name="quire")
"""
COLLECT = """
import pytest
sys.exit(pytest.main(["--collect-only", "--quiet", "-p", "no:cacheprovider", *arguments]))
"""
QUIRE, SERVE, EVENTS = (
    "quire.cli.commands:quire",
    "quire.gateway.__main__:main",
    "quire.integrations.kv_events.__main__:main",
)


class Tree:
    """A copy of the repository. Its packages are imported in place of the installed ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for name in (*filter(None, listed.split("\0")), *built()):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, folder / name)

    def tests_with(self, words: tuple[str, ...]) -> list[str]:
        """Return the files of tests that have one of these words."""
        files = sorted((self.folder / "tests").rglob("test_*.py"))
        return [str(path) for path in files if any(word in path.read_text() for word in words)]

    def run(self, program: str, *arguments: str, absent: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        """Run a program without the finder of the installation (-S), which would find what was deleted."""
        installed = [path for path in sys.path if path.endswith("site-packages")]
        variables = {"PYTHONPATH": os.pathsep.join([python_path(self.folder), *installed])}
        command = [sys.executable, "-S", "-P", "-c", BEGINNING + program, ",".join(absent), *arguments]
        return subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=DEADLINE_S, env=os.environ | variables
        )


def built() -> Iterator[str]:
    """The files that git ignores and Python imports."""
    yield from (str(path.relative_to(ROOT)) for path in (ROOT / "cachemgr").glob("quire/cachemgr/*.so"))


@pytest.fixture(params=ADAPTERS, ids=lambda adapter: adapter.extra)
def adapter(request: pytest.FixtureRequest) -> Adapter:
    found: Adapter = request.param
    return found


def test_the_rest_goes_on_without_an_adapter(adapter: Adapter, tmp_path: Path) -> None:
    """All that is left is imported and answers --help. Tests that mention the adapter are collected."""
    tree = Tree(tmp_path)
    adapter.delete(tree.folder)
    done = tree.run(IMPORT_ALL, str(tree.folder), absent=adapter.packages)
    assert done.returncode == 0, done.stdout + done.stderr
    imported = done.stdout.split()
    assert "quire.gateway.__main__" in imported
    assert not set(adapter.modules) & set(imported)
    for command in (QUIRE, SERVE, *([EVENTS] if adapter.extra != "events" else [])):
        done = tree.run(COMMAND, command, "--help", absent=adapter.packages)
        assert (done.returncode, done.stdout[:6]) == (0, "Usage:"), done.stderr
    done = tree.run(COLLECT, *tree.tests_with((adapter.extra, *adapter.packages)), absent=adapter.packages)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_gateway_without_the_adapter_refuses_its_flag(tmp_path: Path) -> None:
    (adapter,) = (each for each in ADAPTERS if each.extra == "shepherd")
    tree = Tree(tmp_path)
    adapter.delete(tree.folder)
    flags = ("--cachemgr", f"unix:{tmp_path}/none", "--listen", "127.0.0.1:0")
    done = tree.run(COMMAND, SERVE, *flags, "--pool", "one", "--shepherd", "127.0.0.1:0", absent=adapter.packages)
    assert done.returncode == 1
    assert "--shepherd needs the extra quire-kv[shepherd]" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_other_extra_needs_that_of_an_adapter(adapter: Adapter) -> None:
    needed = re.compile(rf"quire-kv\[(\w+,)*{adapter.extra}[,\]]")
    assert {name for name, required in EXTRAS.items() if any(map(needed.match, required))} <= {"all", "dev"}


def constant(path: str, name: str) -> str:
    (value,) = re.findall(rf'^{name} = "([^"]*)"', (ROOT / path).read_text(), re.M)
    return str(value)


def test_tested_versions_are_the_same_everywhere() -> None:
    """In the code, which compares them at start; in the extras; where the tests install them; in the pages."""
    required = REQUIREMENTS.read_text().split()
    dynamo = constant("integrations/quire/integrations/dynamo/__main__.py", "TESTED")
    assert {f"ai-dynamo=={dynamo}", f"ai-dynamo-runtime=={dynamo}"} <= set(required)
    assert f"ai-dynamo=={dynamo}" in EXTRAS["dynamo"]
    indexer = constant("integrations/quire/integrations/kv_events/__main__.py", "TESTED_CONSUMER")
    assert indexer.replace(" ", "==") in required
    proto = constant("integrations/quire/integrations/shepherd/service.py", "TESTED_PROTO")
    assert f"smg-grpc-proto=={proto}" in EXTRAS["shepherd"]
    smg = SMG.partition("==")[2]
    comparison = pages.read("docs/how-to/many-machines.md")
    for version, page in ((smg, "shepherd"), (proto, "shepherd"), (dynamo, "dynamo"), (indexer[-5:], "kv-events")):
        assert version in pages.read(f"docs/how-to/{page}.md")
        assert version in comparison
