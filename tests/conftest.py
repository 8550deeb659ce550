"""The environment every test runs in, also when pytest is called without make; and the tiers of the tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import forking
import pytest

DEFAULTS = {
    "QUIRE_VERIFY": "1",  # check_invariants after each mutation
    "HF_HUB_OFFLINE": "1",
    # OpenMP threads that spin while they wait take the cores of the other processes of a test.
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "GRPC_VERBOSITY": "NONE",
}

# What `make verify` runs and `make test` does not: it needs more than Python and Rust, or takes minutes, and changes of
# most files can't break it. Folders and files of tests/.
VERIFY = (
    "conformance/test_docs_go.py",
    "conformance/test_go.py",
    "deploy",
    "faults",
    "fuzz",
    "gpu_desk/test_first_hour.py",
    "gpu_desk/test_five_architectures.py",
    "gpu_desk/test_pieces.py",
    "gpu_desk/test_start_and_steps.py",
    "gpu_desk/test_warm_up.py",
    "integration/test_bench.py",
    "kernels",
    "unit/test_mutants.py",
)

# Before anything imports torch or grpc.
for name, value in DEFAULTS.items():
    os.environ.setdefault(name, value)

forking.install()


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Undo what a test, or code that it calls, changes of the environment: it would change the tests after it."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def started_by_exec() -> Iterator[None]:
    """Start the test's processes as a user does: nothing is imported before."""
    with forking.started_by_exec():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of VERIFY."""
    here = Path(__file__).parent
    for item in items:
        place = item.path.relative_to(here).as_posix()
        if any(place == listed or place.startswith(f"{listed}/") for listed in VERIFY):
            item.add_marker("verify")
