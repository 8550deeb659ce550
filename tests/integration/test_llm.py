"""LLM, the engine without asyncio, over real services."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pages
import pytest
from deadlines import DEADLINE_S

from quire.cache.v1 import cache_service_pb2
from quire.cli.launch import LocalServices
from quire.client import LLM, CacheClient, Engine, EngineStopped, InvalidRequest, NotFound, SamplingParams, Unavailable
from quire.serving.polling import EXPERIMENTS

MODEL = Path(__file__).parents[2] / "deploy" / "demo" / "model"
PARAMS = SamplingParams(max_tokens=8, temperature=0)


@pytest.fixture(scope="module")
def cachemgr() -> Iterator[str]:
    with LocalServices.start(model=MODEL, num_blocks=128) as services:
        yield services.cachemgr_address


def leases(cachemgr: str) -> list[cache_service_pb2.Lease]:
    """Leases that are not deleted: cachemgr keeps a fenced lease until the worker has answered."""

    async def ask() -> list[cache_service_pb2.Lease]:
        cache = CacheClient(cachemgr)
        try:
            listed = await cache.list_leases()
            return [lease for lease in listed if lease.state != cache_service_pb2.LEASE_STATE_FENCING]
        finally:
            await cache.close()

    return asyncio.run(ask())


def test_the_address_is_that_of_the_environment(cachemgr: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUIRE_CACHEMGR", cachemgr)

    async def pools() -> list[str]:
        cache = CacheClient()
        async with Engine.connect():
            found = [pool.name for pool in await cache.list_pools()]
        await cache.close()
        return found

    assert asyncio.run(pools()) == ["default"]
    with LLM() as llm:
        assert llm.generate(["The input"], PARAMS)[0].samples[0].text


@pytest.mark.parametrize("polling", ["none", EXPERIMENTS])
@pytest.mark.parametrize("address", ["unix:{folder}/nobody.sock", "127.0.0.1:1"])
def test_without_a_cachemgr_the_error_is_one_line_with_the_remedy(address: str, polling: str, tmp_path: Path) -> None:
    """gRPC's two ways to poll say it in different words."""
    address = address.format(folder=tmp_path)
    code = "from quire.client import LLM; LLM()"
    environment = {**os.environ, "QUIRE_CACHEMGR": address, "GRPC_EXPERIMENTS": polling}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    *trace, last = done.stderr.splitlines()
    assert re.search(rf"no cachemgr answers at {address} \([\w ]+\): start one with `quire up PATH", last)
    assert "QUIRE_CACHEMGR" in last
    assert sum(line.startswith("  File") for line in trace) == 2, "the program's line and LLM's own"
    command = [sys.executable, "-m", "quire.cli", "stats", "--cachemgr", address]
    told = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    ).stderr
    assert re.search(rf"no cachemgr answers at {address} \([\w ]+\)\.$", told, re.MULTILINE)


def test_it_gives_what_the_engine_gives_and_closes(cachemgr: str) -> None:
    async def by_engine() -> list[str]:
        engine = Engine.connect(cachemgr)
        await engine.start()
        try:
            with pytest.raises(RuntimeError, match="started before"):
                await engine.start()
            return [each.samples[0].text for each in await engine.complete(["The input", "By default"], PARAMS)]
        finally:
            await engine.close()

    with LLM(cachemgr) as llm:
        texts = [each.samples[0].text for each in llm.generate(["The input", "By default"], PARAMS)]
        assert len(leases(cachemgr)) == 1
    assert not leases(cachemgr), "the lease is given back"
    assert texts == asyncio.run(by_engine())
    assert all(texts)
    with pytest.raises(EngineStopped):
        llm.generate("The input")
    llm.close()


def test_a_bad_request_leaves_it_usable(cachemgr: str) -> None:
    with LLM(cachemgr) as llm:
        with pytest.raises(InvalidRequest, match="max_tokens"):
            llm.generate("The input", max_tokens=0)
        assert llm.generate("The input", PARAMS)[0].samples[0].token_ids


def test_it_works_inside_of_a_running_event_loop(cachemgr: str) -> None:
    """As in a notebook."""

    async def cell() -> str:
        with LLM(cachemgr) as llm:
            return llm.generate("The input", PARAMS)[0].samples[0].text

    assert asyncio.run(cell())


def test_a_service_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises((Unavailable, NotFound)):
        LLM(f"unix:{tmp_path}/nothing.sock")


def test_a_script_that_does_not_close_it_ends_and_gives_the_lease_back(cachemgr: str) -> None:
    script = (
        "import sys; from quire.client import LLM; print(len(LLM(sys.argv[1]).generate('The input', max_tokens=2)))"
    )
    done = subprocess.run([sys.executable, "-c", script, cachemgr], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    assert not leases(cachemgr)


INTERRUPTED = """
import sys
from quire.client import LLM
llm = LLM(sys.argv[1])
print("begun", flush=True)
try:
    llm.generate(["The input"] * 4, max_tokens=500, ignore_eos=True)
except KeyboardInterrupt:
    print(len(llm.generate("The input", max_tokens=2)))
"""


def test_ctrl_c_cancels_a_call_and_the_next_one_works(cachemgr: str) -> None:
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED, cachemgr], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "begun\n"
            while not any(lease.sequence_count for lease in leases(cachemgr)):
                assert process.poll() is None
            os.kill(process.pid, signal.SIGINT)
            assert process.stdout.read() == "1\n"
            assert process.wait(timeout=DEADLINE_S) == 0
        finally:
            process.kill()
    assert not leases(cachemgr)


INTERRUPTED_AT_ANY_MOMENT = """
import sys
from quire.client import LLM

sys.path.insert(0, sys.argv[2])
from interrupting import interrupt_at

llm = LLM(sys.argv[1])
for moment in range(1, 1000):
    interrupt_at(moment)
    try:
        llm.generate("The input", max_tokens=2)
        break
    except KeyboardInterrupt:
        assert len(llm.generate("The input", max_tokens=2)) == 1
sys.settrace(None)
print(moment)
"""


def test_ctrl_c_at_any_moment_of_a_call_leaves_nothing_locked(cachemgr: str) -> None:
    """The signal comes from inside, at each call, line and return of a call."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT_ANY_MOMENT, cachemgr, str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0
    assert 20 < int(done.stdout) < 999, "it was interrupted at each moment, and then not any more"
    assert not leases(cachemgr)


def test_the_snippet_of_the_page(
    cachemgr: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_CACHEMGR", cachemgr)
    exec(pages.block("docs/start/first-client.md", test="tests/integration/test_llm.py").text, {})
    assert capsys.readouterr().out.strip()
