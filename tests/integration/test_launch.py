"""Child processes: they serve when they should, and none outlives its parent, however that one ends."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from deadlines import DEADLINE_S
from integration.protocol_client import await_that

from quire.cli.launch import LocalServices
from quire.cli.restarts import keep_running
from quire.cli.service_process import LaunchError, ServiceExitedError, ServiceProcess, ServiceTimeoutError
from quire.cli.signals import signals_held

STAND_IN = str(Path(__file__).with_name("stand_in.py"))
STAND_INS: dict[str, Any] = {"cachemgr_target": STAND_IN, "worker_target": STAND_IN}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The parent of runtime folders: short, and checked for leftovers."""
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


@pytest.fixture
def fifo(folder: Path) -> Path:
    path = folder / "fifo"
    os.mkfifo(path)
    return path


@pytest.fixture
def parents() -> Iterator[list[subprocess.Popen[str]]]:
    """Parents that a test starts; they and their children are ended with it."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for parent in started:
        with parent:
            parent.kill()


def test_a_runtime_folder_with_too_long_a_path_is_told_at_once(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is started or made, and gRPC prints nothing."""
    long = folder / ("x" * 100)
    with pytest.raises(LaunchError, match=r"has a path of \d+ bytes; must be at most \d+"):
        LocalServices.start(model="none", runtime_dir=long, **STAND_INS)
    assert left_in(folder) == []
    assert capfd.readouterr() == ("", "")


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "fifo")


def processes_of(folder: Path) -> list[psutil.Process]:
    """The services that were told to listen in a folder within this one."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(f"unix:{folder}" in argument for argument in process.info["cmdline"] or ())
    ]


def gone(pids: list[int]) -> bool:
    """Waits until none of these processes exists."""
    return all(_is_gone(pid) for pid in pids)


def _is_gone(pid: int) -> bool:
    try:
        psutil.Process(pid).wait(DEADLINE_S)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


# While the parent lives


def test_both_serve_and_nothing_is_left(folder: Path) -> None:
    with LocalServices.start(model="any", num_blocks=8, **STAND_INS) as services:
        assert services.cachemgr.is_running
        assert services.worker.is_running
        assert services.cachemgr_address == f"unix:{services.runtime_dir}/cachemgr.sock"
        assert services.worker_address == f"unix:{services.runtime_dir}/worker.sock"
        assert services.runtime_dir.parent == folder
    assert (services.cachemgr.returncode, services.worker.returncode) == (0, 0)
    assert not left_in(folder)
    services.stop()


def test_all_start_at_the_same_time(folder: Path, fifo: Path) -> None:
    services = LocalServices(model="any", extra_cachemgr_args=("--model", f"fifo:{fifo}"), **STAND_INS)
    with ThreadPoolExecutor() as threads:
        starting = threads.submit(services.__enter__)
        with fifo.open("wb"):  # opens when cachemgr reads: it does not serve yet
            await_that("the worker serves", lambda: len(services.all) == 2 and services.worker.is_serving)
            assert not services.cachemgr.is_serving
        assert starting.result(DEADLINE_S) is services
    with services:
        assert services.cachemgr.is_serving
    assert not services.worker.is_serving


def test_the_worker_can_begin_before_the_others(folder: Path) -> None:
    services = LocalServices(model="any", **STAND_INS)
    services.begin()
    assert (services.worker.is_running, services.cachemgr.pid) == (True, None)
    begun = services.worker.pid
    with services:
        assert services.cachemgr.is_serving
        assert services.worker.is_serving
        assert services.worker.pid == begun
    assert not left_in(folder)


def test_a_worker_that_has_begun_is_ended_without_the_others(folder: Path) -> None:
    services = LocalServices(model="any", **STAND_INS)
    services.begin()
    services.stop()
    assert not services.worker.is_running
    assert services.cachemgr.pid is None
    assert not left_in(folder)


def test_the_first_failure_ends_the_start(folder: Path) -> None:
    with pytest.raises(ServiceExitedError, match="worker ended with status 3"):
        LocalServices.start(model="fail", extra_cachemgr_args=("--model", "mute"), **STAND_INS)
    assert not left_in(folder)


def test_kill_and_restart(folder: Path) -> None:
    with LocalServices.start(model="any", **STAND_INS) as services:
        first = services.worker.pid
        assert services.worker.kill() == -signal.SIGKILL
        assert services.wait() is services.worker
        services.worker.restart(DEADLINE_S)
        assert services.worker.is_running
        assert services.worker.pid != first
        assert services.worker.terminate() == 0
        assert services.worker.terminate() == 0
        with pytest.raises(LaunchError, match="runs already"):
            services.cachemgr.start()


def test_a_given_folder_is_made_and_keeps_the_logs(folder: Path) -> None:
    given = folder / "run" / "quire"
    with LocalServices.start(model="any", runtime_dir=given, **STAND_INS):
        assert sorted(path.name for path in given.iterdir()) == [
            "cachemgr.log",
            "cachemgr.sock",
            "worker.log",
            "worker.sock",
        ]
    assert sorted(path.name for path in given.iterdir()) == ["cachemgr.log", "worker.log"]


def test_a_child_that_fails_at_start_shows_the_end_of_its_log(folder: Path) -> None:
    with pytest.raises(ServiceExitedError, match=r"(?s)worker ended with status 3 at start.*no attention"):
        LocalServices.start(model="fail", **STAND_INS)
    assert not left_in(folder)


def test_the_end_of_the_log_is_that_of_this_run(folder: Path) -> None:
    given = folder / "run"
    given.mkdir()
    for name in ("cachemgr.log", "worker.log"):
        (given / name).write_text("an error of yesterday\n")
    with pytest.raises(ServiceExitedError) as caught:
        LocalServices.start(model="fail", runtime_dir=given, **STAND_INS)
    assert "no attention" in str(caught.value)
    assert "yesterday" not in str(caught.value)
    assert "yesterday" in (given / "worker.log").read_text()


def test_a_service_that_ends_again_and_again_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.restarts.FIRST_PAUSE_S", 0.001)
    said: list[str] = []
    with LocalServices.start(model="any", **STAND_INS) as services:

        def kill_it_again(text: str) -> None:
            said.append(text)
            if "serves again" in text:
                services.worker.kill()

        services.worker.kill()
        with pytest.raises(LaunchError, match=r"(?s)worker was ended by SIGKILL.*started 5 times again, and ended"):
            keep_running(services, kill_it_again)
        assert services.cachemgr.is_running
    assert [text.splitlines()[-1].split(" (pid")[0] for text in said] == [
        text
        for pause in ("0.001", "0.002", "0.004", "0.008", "0.016")
        for text in (f"worker starts again in {pause} s.", "worker serves again")
    ]


def test_a_module_that_is_missing_is_said(folder: Path) -> None:
    with pytest.raises(ServiceExitedError, match=r"(?s)cachemgr ended with status 1.*No module named quire\.nothing"):
        LocalServices.start(model="any", cachemgr_target="quire.nothing", worker_target=STAND_IN)
    assert not left_in(folder)


def test_a_child_that_never_becomes_healthy_is_ended(folder: Path) -> None:
    with pytest.raises(ServiceTimeoutError, match="was not serving within 1 s"):
        LocalServices.start(model="mute", worker_start_timeout_s=1, **STAND_INS)
    assert not left_in(folder)


def test_an_exception_in_the_block_ends_both(folder: Path) -> None:
    with pytest.raises(KeyError), LocalServices.start(model="any", **STAND_INS) as services:
        raise KeyError
    assert not services.cachemgr.is_running
    assert not services.worker.is_running
    assert not left_in(folder)


def test_a_child_deaf_to_sigterm_is_killed(folder: Path, fifo: Path) -> None:
    deaf = folder / "deaf.py"
    deaf.write_text(
        textwrap.dedent(f"""
            import signal, threading
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            open({str(fifo)!r}, "w").close()
            threading.Event().wait()
        """)
    )
    service = ServiceProcess("deaf", target=str(deaf), arguments=(), address="unix:/nowhere")
    service.start()
    fifo.read_bytes()
    assert service.terminate(0.1) == -signal.SIGKILL


def test_async_with(folder: Path) -> None:
    async def use() -> LocalServices:
        async with LocalServices(model="any", **STAND_INS) as services:
            assert services.worker.is_running
        return services

    services = asyncio.run(use())
    assert not services.worker.is_running
    assert not left_in(folder)


def test_a_cancelled_async_start_leaves_nothing(folder: Path, fifo: Path) -> None:
    async def use() -> None:
        async with LocalServices(model=f"fifo:{fifo}", **STAND_INS):
            raise AssertionError("it never becomes healthy")

    async def cancel() -> None:
        task = asyncio.create_task(use())
        with await asyncio.to_thread(fifo.open, "wb"):  # opens when the worker reads
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancel())
    assert not left_in(folder)


def test_held_signals_are_delivered_at_the_end() -> None:
    seen: list[str] = []

    def interrupted() -> None:
        with signals_held(lambda: seen.append("noted")):
            signal.raise_signal(signal.SIGINT)
            seen.append("goes on")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert seen == ["noted", "goes on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# When the parent ends

PARENT = """
    from quire.cli.launch import LocalServices

    with LocalServices.start(model={model!r}, cachemgr_target={stand_in!r}, worker_target={stand_in!r}) as services:
        print(services.cachemgr.pid, services.worker.pid, flush=True)
        services.wait()
"""


def start_parent(parents: list[subprocess.Popen[str]], model: str, source: str = PARENT) -> subprocess.Popen[str]:
    code = textwrap.dedent(source).format(model=model, stand_in=STAND_IN)
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    parents.append(parent)
    return parent


def pids_printed(parent: subprocess.Popen[str]) -> list[int]:
    assert parent.stdout is not None
    return [int(pid) for pid in parent.stdout.readline().split()]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_a_signal_to_the_parent_ends_the_children(
    folder: Path, parents: list[subprocess.Popen[str]], number: int, status: int
) -> None:
    parent = start_parent(parents, "any")
    pids = pids_printed(parent)
    assert len(pids) == 2
    parent.send_signal(number)
    assert parent.wait(DEADLINE_S) == status
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not left_in(folder)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_a_signal_during_the_start_ends_the_children(
    folder: Path, fifo: Path, parents: list[subprocess.Popen[str]], number: int, status: int
) -> None:
    parent = start_parent(parents, f"fifo:{fifo}")
    with fifo.open("wb"):  # opens when the worker reads: it has started and is not healthy yet
        pids = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
        assert len(pids) == 2
        parent.send_signal(number)
        assert parent.wait(DEADLINE_S) == status
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not left_in(folder)


def test_a_signal_at_any_moment_of_the_start_leaves_nothing(folder: Path, parents: list[subprocess.Popen[str]]) -> None:
    """The signal comes from inside, before every tenth line that the start runs, one process for each."""
    source = """
        import os, signal, sys
        from quire.cli import launch

        lines = 0
        def trace(frame, event, argument):
            global lines
            if not frame.f_code.co_filename.endswith(("launch.py", "service_process.py", "cli/signals.py")):
                return None
            lines += event == "line"
            if lines == {model}:
                sys.settrace(None)
                os.kill(os.getpid(), signal.SIGINT)
            return trace

        sys.settrace(trace)
        with launch.LocalServices.start(
            model="any", cachemgr_target={stand_in!r}, worker_target={stand_in!r}
        ) as services:
            sys.settrace(None)
            sys.exit(7)
    """
    for line in range(1, 1000, 10):
        parent = start_parent(parents, str(line), source)
        status = parent.wait(DEADLINE_S)
        assert not processes_of(folder), f"signal before line {line}"
        assert not left_in(folder), f"signal before line {line}"
        if status == 7:
            break
        assert status == -signal.SIGINT, f"signal before line {line}"
    assert line > 100, "the start ran fewer lines than it has: nothing was tried"


def test_an_interrupt_at_any_moment_of_a_wait_leaves_nothing_locked(
    folder: Path, parents: list[subprocess.Popen[str]]
) -> None:
    """The signal comes from inside, at each call, line and return of `wait` and of what it calls."""
    source = """
        import contextlib, os, sys
        from quire.cli.launch import LocalServices

        sys.path.insert(0, os.path.dirname({stand_in!r}))
        from interrupting import interrupt_at

        with LocalServices.start(model={model!r}, cachemgr_target={stand_in!r}, worker_target={stand_in!r}) as services:
            for moment in range(1, 16):
                with contextlib.suppress(KeyboardInterrupt):
                    interrupt_at(moment)
                    services.wait()
        sys.exit(7)
    """
    parent = start_parent(parents, "any", source)
    assert parent.wait(DEADLINE_S) == 7
    assert not left_in(folder)


def test_kill_9_of_the_parent_leaves_no_child_and_no_socket(folder: Path, parents: list[subprocess.Popen[str]]) -> None:
    parent = start_parent(parents, "any")
    pids = pids_printed(parent)
    assert len(pids) == 2
    parent.kill()
    assert gone(pids)
    assert not list(folder.rglob("*.sock"))


def test_kill_9_of_the_parent_ends_children_that_are_still_starting(
    folder: Path, fifo: Path, parents: list[subprocess.Popen[str]]
) -> None:
    parent = start_parent(parents, f"fifo:{fifo}")
    with fifo.open("wb"):
        pids = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
        assert len(pids) == 2
        parent.kill()
        assert gone(pids)
