"""The allowed imports. The walls are the tables below; the rest of this file reads imports and compares."""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import syntax

ROOT = Path(__file__).parents[2]
PROTOS = ("quire.cache.v1", "quire.compute.v1", "quire.engine.v1")

# What servers and clients share, of serving: how a service is found and dialed, flags, traces, metrics.
SHARED = ("addresses", "dialing", "flags", "loop_collector", "metrics_server", "runtime_folder", "tracing")
# What the gateway, which is a server too, has of serving beside them.
# What of quire each folder may import besides itself.
MAY_IMPORT = {
    "protos": PROTOS,
    "serving": ("quire.cache.v1.error_pb2",),
    "cachemgr": ("quire.serving", *PROTOS),
    "worker": ("quire.serving", "quire.kernels", *PROTOS),
    "kernels": (),
    # cachemgr's flags are for `quire up` alone.
    "client": (*(f"quire.serving.{module}" for module in SHARED), "quire.cachemgr.flags", *PROTOS),
    # The gateway is a client and a server; so is what publishes events.
    "client/gateway": ("quire.client", "quire.serving", *PROTOS),
    "client/kv_events": ("quire.client", "quire.serving", *PROTOS),
    # A server by Dynamo's means, with our flags.
    "client/dynamo": ("quire.client", "quire.serving", *PROTOS),
    # It runs cachemgr's books in its own process: a policy tried on other books would be another policy.
    "client/lab": (
        "quire.client",
        *(f"quire.cachemgr.{module}" for module in ("_core", "errors", "eviction", "geometry", "messages")),
        *PROTOS,
    ),
}
# What of others a folder must not import.
MUST_NOT_IMPORT = {
    "serving": ("torch", "triton", "transformers", "numpy"),
    "cachemgr": ("torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface_hub"),
    "client": ("torch", "triton"),
    "kernels": ("transformers", "grpc", "google"),
}
# What client's folders must not import: the thin clients know no engine, and the engine no command line.
WITHIN_CLIENT = {
    "client": ("quire.client.engine.engine", "quire.client.cli", "quire.cachemgr"),
    "client/engine": ("quire.client.cli", "quire.client.gateway", "quire.cachemgr"),
    "client/gateway": ("quire.client.cli", "quire.cachemgr"),
    "client/kv_events": ("quire.client.cli", "quire.client.engine", "quire.client.gateway", "quire.cachemgr"),
    "client/dynamo": ("quire.client.cli", "quire.client.gateway", "quire.cachemgr"),
    "client/cli": (*("quire.client.gateway", "quire.client.kv_events", "quire.client.dynamo", "quire.client.lab"),),
    # Of the engine and the gateway the parts that decide, not those that act.
    "client/lab": ("quire.client.cli", "quire.client.engine.engine", "quire.client.gateway.routing"),
}
# What every install has; the rest comes with extras.
ALWAYS_INSTALLED = ("quire", "click", "google", "grpc", "prometheus_client", *sys.stdlib_module_names)
# Modules that decide and touch nothing: no gRPC, tensors, clock, randomness, logging or metrics, and of quire only
# each other.
PURE = {
    "cachemgr": ("blocks", "catalog", "errors", "geometry"),
    "client": (
        "errors",
        *(
            f"engine.{name}"
            for name in ("beam", "caching", "drafting", "fairness", "flight", "grammar", "layer_groups", "plans")
        ),
        *(
            f"engine.{name}"
            for name in ("policy", "prompt_logprobs", "queues", "room", "sampling", "scheduler", "sequence")
        ),
        *("engine.tier", "gateway.choosing", "gateway.conversation", "gateway.errors", "gateway.fields"),
        *("gateway.parameters", "gateway.tools"),
    ),
}
# Beside the generated code; as pure as the modules that may import it.
PURE_PROTOS = ("quire.cache.v1.admission_bounds", "quire.cache.v1.lease_bounds", "quire.compute.v1.sampling_ranges")
# Built from Rust; no less pure, but for the module that Python calls.
CORE = "quire.cachemgr._core"
ACTING_IN_CORE = {
    "python.rs": {"pyo3"},
    "python/eviction.rs": {"pyo3"},
    "store/files.rs": {f"std::{name}" for name in ("env", "fs", "io", "process", "thread")},
}
CORE_SOURCE = ROOT / "cachemgr/core/src"
CORE_MODULES = sorted(str(path.relative_to(CORE_SOURCE)) for path in CORE_SOURCE.rglob("*.rs"))
IMPURE_IN_CORE = ("pyo3", *(f"std::{name}" for name in ("env", "fs", "io", "net", "process", "thread", "time")))
IMPURE = (
    *("grpc", "google", "prometheus_client", "torch", "triton", "transformers"),
    *("time", "datetime", "random", "secrets", "uuid", "logging"),
    *("asyncio", "threading", "socket", "subprocess", "os", "io", "sys"),
)
# The folders by these names are quire.*; bare, one file would be two modules, and transformers probes for "kernels".
BARE_NAMES = ("cachemgr", "worker", "kernels", "client", "serving", "protos")
NOT_OURS = {".venv", ".venv-clients", ".venv-peers", ".typecheck", "node_modules", "build", "dist", ".git"}


@dataclass(frozen=True)
class Import:
    """One name that a file imports, as far as it is written: "from a import b" is "a.b"."""

    module: str
    line: int

    def is_within(self, packages: tuple[str, ...]) -> bool:
        return any(self.module == package or self.module.startswith(f"{package}.") for package in packages)


def read_imports(source: str, *, package: str) -> Iterator[Import]:
    """Every import of a file, inside functions and `if TYPE_CHECKING` too, and import_module("literal")."""
    for node in ast.walk(syntax.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from (Import(f"{origin}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            name = node.args[0] if node.args else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield Import(name.value, node.lineno)


def used_in_core(source: str) -> set[str]:
    """The modules of the crate that one uses; its tests do not count."""
    product = re.split(r"\n#\[cfg\(test\)\]\n(?:pub |pub\(crate\) )?mod tests", source)[0]
    used = set()
    for folder, name in re.findall(r"\bcrate::([a-z_]+)(?:::([a-z_]+))?", product):
        files = (f"{folder}/{name}.rs", f"{folder}/mod.rs", f"{folder}.rs")
        used.add(next(file for file in files if file in CORE_MODULES))
    return used


def house_files(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if not NOT_OURS & set(path.relative_to(ROOT).parts))


def imports_of(path: Path) -> list[Import]:
    parts = path.relative_to(ROOT).parent.parts
    package = ".".join(parts[1:] if parts[:1] == ("protos",) else ("quire", *parts))
    return list(read_imports(path.read_text(), package=package))


def trespasses(folder: str, imports: list[Import]) -> list[Import]:
    """The imports that cross a wall of the folder."""
    allowed = (f"quire.{folder.replace('/', '.')}", *MAY_IMPORT[folder])
    forbidden = MUST_NOT_IMPORT.get(folder.partition("/")[0], ())
    return [
        each
        for each in imports
        if each.is_within(forbidden) or (each.is_within(("quire",)) and not each.is_within(allowed))
    ]


def impurities(folder: str, imports: list[Import]) -> list[Import]:
    """The imports that a pure module of the folder must not have."""
    allowed = (CORE, *PURE_PROTOS, *(f"quire.{folder}.{module}" for module in PURE[folder]))
    return [
        each
        for each in imports
        if each.is_within(IMPURE) or (each.is_within(("quire",)) and not each.is_within(allowed))
    ]


def show(path: Path, found: list[Import]) -> str:
    return "\n".join(f"{path.relative_to(ROOT)}:{each.line} imports {each.module}" for each in found)


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_folders_import_only_what_the_walls_let_through(folder: str) -> None:
    own_walls = [ROOT / each for each in MAY_IMPORT if each.startswith(f"{folder}/")]
    paths = [path for path in house_files(folder) if not set(own_walls) & set(path.parents)]
    found = {path: trespasses(folder, imports_of(path)) for path in paths}
    assert not any(found.values()), "\n".join(show(path, bad) for path, bad in found.items() if bad)


def test_what_clients_share_with_servers_needs_no_extra() -> None:
    waiting = [ROOT / f"serving/{module}.py" for module in SHARED]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        found = imports_of(path)
        extra = [each for each in found if not each.is_within(ALWAYS_INSTALLED)]
        assert not extra, show(path, extra)
        waiting += [
            ROOT / "serving" / f"{each.module.split('.')[2]}.py" for each in found if each.is_within(("quire.serving",))
        ]


@pytest.mark.parametrize("module", CORE_MODULES)
def test_only_the_bindings_know_python_and_one_module_acts(module: str) -> None:
    found = {name for name in IMPURE_IN_CORE if name in (CORE_SOURCE / module).read_text()}
    assert found == ACTING_IN_CORE.get(module, set())


def test_modules_of_the_core_use_one_another_in_one_direction() -> None:
    uses = {module: used_in_core((CORE_SOURCE / module).read_text()) - {module} for module in CORE_MODULES}
    for _ in CORE_MODULES:  # what uses nothing that is left is in no circle
        uses = {module: {name for name in used if name in uses} for module, used in uses.items() if used}
    assert uses == {}


@pytest.mark.parametrize("folder", WITHIN_CLIENT)
def test_the_thin_clients_know_no_engine_and_the_engine_no_commands(folder: str) -> None:
    paths = [path for path in (ROOT / folder).glob("*.py") if path != ROOT / "client/__init__.py"]
    assert paths, "the folder is gone: correct the table"
    found = {path: [each for each in imports_of(path) if each.is_within(WITHIN_CLIENT[folder])] for path in paths}
    assert not any(found.values()), "\n".join(show(path, bad) for path, bad in found.items() if bad)


@pytest.mark.parametrize(("folder", "module"), [(folder, module) for folder in PURE for module in PURE[folder]])
def test_pure_modules_import_nothing_that_acts(folder: str, module: str) -> None:
    path = ROOT / folder / f"{module.replace('.', '/')}.py"
    assert path.exists(), f"{module} is listed as pure and is gone: correct the list"
    found = impurities(folder, imports_of(path))
    assert not found, show(path, found)


@pytest.mark.parametrize("module", PURE_PROTOS)
def test_pure_modules_beside_the_generated_code_import_nothing_that_acts(module: str) -> None:
    path = ROOT / "protos" / f"{module.replace('.', '/')}.py"
    found = [each for each in imports_of(path) if each.is_within(("quire", *IMPURE))]
    assert not found, show(path, found)


def test_no_file_imports_a_folder_by_its_bare_name() -> None:
    found = {path: [each for each in imports_of(path) if each.is_within(BARE_NAMES)] for path in house_files(".")}
    assert not any(found.values()), "\n".join(show(path, bad) for path, bad in found.items() if bad)


def test_kernels_is_no_package_to_transformers() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("cachemgr", "import torch"),
        ("cachemgr", "def f():\n    from torch.nn import functional"),
        ("cachemgr", "from quire import worker"),
        ("cachemgr", "from quire.client.cli import launch"),
        ("cachemgr", "from ..worker import model"),
        ("cachemgr", "import importlib\nimportlib.import_module('quire.worker')"),
        ("worker", "import quire.cachemgr.pool"),
        ("worker", "from quire.client.cli.launch import LocalServices"),
        ("client", "import quire.worker.servicer as s"),
        ("client", "from quire.serving.server import run"),
        ("client", "from quire.kernels import reference"),
        ("serving", "from quire.cache.v1 import cache_service_pb2"),
        ("kernels", "import quire.worker"),
    ],
)
def test_the_walls_catch(folder: str, source: str) -> None:
    assert trespasses(folder, list(read_imports(source, package=f"quire.{folder}")))


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("cachemgr", "from time import monotonic"),
        ("cachemgr", "import logging as log"),
        ("cachemgr", "from quire.cache.v1 import grant_pb2"),
        ("cachemgr", "from quire.cachemgr import servicer"),
        ("client", "from quire.client.engine.engine import Engine"),
        ("client", "from google.protobuf import duration_pb2"),
    ],
)
def test_purity_catches(folder: str, source: str) -> None:
    assert impurities(folder, list(read_imports(source, package=f"quire.{folder}")))


def test_the_walls_let_through() -> None:
    source = (
        "from quire.cache.v1 import error_pb2\nfrom quire.serving.server import run\nfrom . import pool\nimport time"
    )
    assert not trespasses("cachemgr", list(read_imports(source, package="quire.cachemgr")))
