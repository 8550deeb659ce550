"""A copy of a package stands in for the real one, in a forked process: what is done there is done with the copy."""

from __future__ import annotations

import importlib.util
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

MEMORY_BYTES = 8 << 30
NOT_RUN = 70
"""The status of a process in which the work raised an exception."""


def forked(work: Callable[[], int], *, timeout_s: int) -> tuple[int, str]:
    """Do the work in a forked process. Returns its status, which is negative if a signal ended it, and its output.

    A timeout ends it by SIGALRM; the work may set another one by signal.alarm().
    """
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            code = NOT_RUN
            try:
                os.dup2(output.fileno(), sys.stdout.fileno())
                os.dup2(output.fileno(), sys.stderr.fileno())
                resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
                signal.alarm(timeout_s)
                code = work()
                sys.stdout.flush()
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        output.seek(0)
        return code, output.read().decode(errors="replace")


def stand_in(folder: Path) -> None:
    """Let the package in `folder` be imported in place of the real one of its name, in this process.

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


def require_imported_from(folder: Path) -> None:
    """Raises AssertionError if the copy was not used, or not alone."""
    package = f"quire.{folder.name}"
    files = [module.__file__ for name, module in sys.modules.items() if f"{name}.".startswith(f"{package}.")]
    assert files, f"nothing has imported {package}"
    assert all(Path(file).is_relative_to(folder) for file in files if file)
