"""The environment every test runs in, also when pytest is called without make; and the tiers of the tests."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import forking
import hypothesis
import pytest

DEFAULTS = {
    "QUIRE_VERIFY": "1",  # check_invariants after each mutation
    "HF_HUB_OFFLINE": "1",
    # OpenMP threads that spin while they wait take the cores of the other processes of a test.
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "GRPC_VERBOSITY": "NONE",
    # Tests of `quire up` at the same time would take the same port; tests/gateway has the test of its gateway.
    "QUIRE_UP_NO_HTTP": "1",
}

TESTS = Path(__file__).parent

# What `make verify` runs and `make test` does not: it needs more than Python and Rust, or takes minutes, and changes of
# most files can't break it. Folders and files of tests/.
VERIFY = (
    "conformance/test_docs_go.py",
    "conformance/test_go.py",
    "conformance/test_grpcurl.py",
    "conformance/test_reasons.py",
    "deploy",
    "robustness/faults",
    "robustness/fuzz",
    "gpu_desk/test_ten_minutes.py",
    "gpu_desk/test_five_architectures.py",
    "gpu_desk/test_own_products.py",
    "gpu_desk/test_pieces.py",
    "gpu_desk/test_prompt_graphs.py",
    "gpu_desk/test_start_and_steps.py",
    "gpu_desk/test_warm_up.py",
    "integration/test_bench.py",
    "integration/test_how_to_pages.py",
    "integration/test_tutorials.py",
    "kernels",
    "unit/framework/test_mutants.py",
)

BEGIN = pytest.StashKey[tuple[float, float]]()

# What begins first, the longest before the others: no process is left with a long file when the others have ended.
FIRST = (
    "robustness/simulation/test_simulation.py",
    "kernels/test_prompt_graphs.py",
    "kernels/test_pieces.py",
    "robustness/faults/test_faults.py",
    "gpu_desk/test_start_and_steps.py",
    "unit/framework/test_mutants.py",
    "integration/test_bench.py",
    "gpu_desk/test_ten_minutes.py",
    "gateway/test_clients.py",
    "gpu_desk/test_warm_up.py",
    "integration/test_tutorials.py",
    "kernels/test_fused_model.py",
    "integration/test_warm_restart.py",
    "integration/test_grammars.py",
    "integration/test_tensor_parallel.py",
    "integration/test_cli.py",
    "unit/cachemgr/test_ledger_machine.py",
    "integration/test_top.py",
    "integration/test_own_mistakes.py",
    "integration/test_launch.py",
    "integration/test_equality.py",
    "integration/test_bad_input.py",
    "unit/engine/test_engine.py",
    "integration/test_demo.py",
    "unit/worker/test_grammars.py",
    "integration/test_stuck_step.py",
    "integration/test_ownership.py",
    "gpu_desk/test_start.py",
    "integration/test_docs.py",
    "integration/test_cache_use.py",
    "integration/test_tracing.py",
    "integration/test_outages.py",
    "integration/test_policy.py",
)

# Before anything imports torch or grpc.
for name, value in DEFAULTS.items():
    os.environ.setdefault(name, value)

# A shell without job control starts a command in the background with SIGINT ignored. What the command starts ignores it
# too, and the programs that tests interrupt would go on.
signal.signal(signal.SIGINT, signal.default_int_handler)

# An example may take as long as a busy machine needs, and each run has the same examples.
hypothesis.settings.register_profile(
    "quire", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("quire")

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


def is_verify(path: Path) -> bool:
    """Return True if VERIFY lists this file or folder, or a folder around it."""
    place = path.relative_to(TESTS).as_posix()
    return any(place == listed or place.startswith(f"{listed}/") for listed in VERIFY)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of VERIFY unread where none of their tests will run: to read all of them takes seconds."""
    return True if config.option.markexpr == "not verify" and is_verify(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of VERIFY, and those of the night, which `make test` does not run either; order by FIRST."""
    for item in items:
        if is_verify(item.path) or item.get_closest_marker("night"):
            item.add_marker("verify")
    order = {TESTS / place: number for number, place in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path, len(FIRST)))


def processor_s() -> float:
    """Return the processor time of this process and of its children that have ended, in seconds."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note when the test began."""
    item.stash[BEGIN] = time.perf_counter(), processor_s()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Give the test's times to its reports, which junit's XML shows: framework/tiers.py reads them."""
    try:
        return (yield)
    finally:
        begin_s, begin_processor_s = item.stash[BEGIN]
        item.user_properties += [
            ("wall_s", round(time.perf_counter() - begin_s, 3)),
            ("processor_s", round(processor_s() - begin_processor_s, 3)),
        ]
