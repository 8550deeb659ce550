"""Policies from files: "FILE.py:CLASS". Errors name the file, the line, and the expected value."""

from __future__ import annotations

import importlib.util
import inspect
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from quire.cachemgr._core import POLICIES
from quire.cachemgr.eviction_interface import EvictionPolicy
from quire.client.engine.scheduling.faults import RequestFault
from quire.client.engine.scheduling.policy import Policy, PriorityPolicy
from quire.lab.errors import ConfigError
from quire.lab.routers import ROUTERS, Router

# The methods of each interface: positional and keyword parameters after self.
_ROUTER = MappingProxyType({"place": (("request", "pools"), ())})
_SCHEDULER = MappingProxyType(
    {
        "rank": (("sequence", "view"), ()),
        "victim": (("needy", "candidates"), ("missing_blocks", "view")),
        "reserve": (("newcomer",), ("num_beside", "view")),
        "admits": (("newcomer", "view"), ()),
        "divide": (("prompts", "newcomer"), ("budget",)),
        "ended": (("sequence",), ()),
    }
)
_EVICTION = MappingProxyType(
    {
        "__init__": (("num_blocks",), ()),
        "admit": (("found", "fresh", "hashes"), ()),
        "park": (("blocks",), ()),
        "unpark": (("blocks",), ()),
        "forget": (("blocks",), ()),
        "evict": (("count",), ()),
    }
)
_Methods = Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]


def make_router(choice: str, folder: Path, generator: random.Random) -> Router:
    """The router of a configuration. Raises ConfigError."""
    kind = ROUTERS.get(choice) or _class_of("policy.router", choice, folder, _ROUTER, tuple(ROUTERS))
    with errors_of(choice, folder):
        router: Router = _made(kind, generator)
    return router


def scheduling_policies(choice: str, folder: Path) -> Callable[[], Policy]:
    """A function that makes the scheduling policy of one more engine. Both raise ConfigError."""
    if choice == "priority":
        return PriorityPolicy
    kind = _class_of("policy.scheduler", choice, folder, _SCHEDULER, ("priority",))

    def make() -> Policy:
        with errors_of(choice, folder):
            policy: Policy = kind()
        return policy

    return make


def eviction_policies(
    choice: str, folder: Path, *, field: str = "fleet.eviction"
) -> Callable[[int], str | EvictionPolicy]:
    """A function that makes the eviction policy of one more pool, by its number of blocks. Both raise ConfigError."""
    if choice in POLICIES:
        return lambda num_blocks: choice
    kind = _class_of(field, choice, folder, _EVICTION, tuple(POLICIES))

    def make(num_blocks: int) -> EvictionPolicy:
        with errors_of(choice, folder):
            policy: EvictionPolicy = kind(num_blocks)
        return policy

    return make


def _made(kind: Any, generator: random.Random) -> Any:
    """A router may take the random generator, and need not."""
    takes_one = "__init__" in vars(kind) and len(inspect.signature(kind).parameters) > 0
    return kind(generator) if takes_one or kind in ROUTERS.values() else kind()


def _class_of(field: str, choice: str, folder: Path, methods: _Methods, names: tuple[str, ...]) -> Any:
    file, _, name = choice.rpartition(":")
    if not file.endswith(".py") or not name:
        raise ConfigError.of_field(field, choice, f'"FILE.py:CLASS", or one of {", ".join(names)}')
    path = folder / file
    module = _load(field, path)
    kind = getattr(module, name, None)
    if not inspect.isclass(kind):
        there = [
            each
            for each, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__
        ]
        raise ConfigError(f"{path}: has no class {name}: {field} must name one of {', '.join(there) or 'its classes'}")
    for method, parameters in methods.items():
        _require_method(path, kind, method, *parameters)
    return kind


def _load(field: str, path: Path) -> ModuleType:
    """Run a file as a module of its own. Its imports are searched in its folder."""
    if not path.is_file():
        raise ConfigError.of_field(field, str(path), "a file that is there")
    spec = importlib.util.spec_from_file_location(f"quire_lab_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError.of_field(field, str(path), "a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ConfigError(f"{error.filename}:{error.lineno}: {error.msg}: expected Python") from None
    except Exception as error:
        raise ConfigError(f"{_place_in(error, path)}: the file can't be run: {error!r}") from None
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return module


def _require_method(path: Path, kind: Any, name: str, positional: tuple[str, ...], keywords: tuple[str, ...]) -> None:
    parameters = ["self", *positional, *(["*", *keywords] if keywords else [])]
    expected = f"expected def {name}({', '.join(parameters)})"
    method = getattr(kind, name, None)
    if not callable(method) or method is getattr(object, name, None):
        line = inspect.getsourcelines(kind)[1]
        raise ConfigError(f"{path}:{line}: class {kind.__name__} has no method {name}: {expected}")
    try:
        inspect.signature(method).bind(None, *positional, **dict.fromkeys(keywords))
    except TypeError as error:
        said = f"{kind.__name__}.{name} has other parameters ({error})"
        raise ConfigError(f"{path}:{_line_of(kind, name)}: {said}: {expected}") from None


def _line_of(kind: Any, name: str) -> int:
    """The line where a method begins, or its class."""
    method = getattr(kind, name)
    line: int = method.__code__.co_firstlineno if hasattr(method, "__code__") else inspect.getsourcelines(kind)[1]
    return line


def wrong_result(choice: str, folder: Path, policy: object, method: str, said: str) -> ConfigError:
    """Return the error for a method of a file's policy that returned a wrong value."""
    path = folder / choice.rpartition(":")[0]
    return ConfigError(f"{path}:{_line_of(type(policy), method)}: {said}")


@contextmanager
def errors_of(*choices: str | Path) -> Iterator[None]:
    """Turn an error of a policy's file into a ConfigError with its line. choices: "FILE.py:CLASS"s, then the folder."""
    *names, folder = choices
    try:
        yield
    except ConfigError:
        raise
    except Exception as caught:
        error = caught.__cause__ if isinstance(caught, RequestFault) and caught.__cause__ is not None else caught
        for choice in names:
            path = Path(folder) / str(choice).rpartition(":")[0]
            place = _place_in(error, path) if path.is_file() else str(path)
            if place != str(path):
                raise ConfigError(f"{place}: the policy failed: {error!r}") from error
        raise


def _place_in(error: BaseException, path: Path) -> str:
    """The file, and the last line of it that the error came through."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve() == path.resolve()
    ]
    return f"{path}:{lines[-1]}" if lines else str(path)
