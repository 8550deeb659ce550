"""Requests of an engine outlive the processes they run in: every one ends with the tokens of an undisturbed run.

Each test lets greedy and sampled requests stream, holds a step in the model once some tokens are there, breaks
something, lets it heal, and compares. A stream that skipped, repeated or changed a token would differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deadlines import DEADLINE_S
from integration.protocol_client import (
    FAULTY_WORKER,
    NUM_BLOCKS,
    WORKER_ARGS,
    Hold,
    Pair,
    RefusedError,
    Wire,
    await_that,
    draw_tokens,
)

from quire.cli.launch import LocalServices
from quire.client import Engine, EngineConfig, EngineStatistics, SamplingParams
from quire.client.engine.speculative import SpeculativeConfig

DISTURBED_AFTER = 3
"""Tokens of one stream."""
NUM_NEW = 20
SEEDED: dict[str, Any] = {"max_tokens": NUM_NEW, "temperature": 0.9, "top_p": 0.95}
REQUESTS = [
    (draw_tokens(11, seed=1), SamplingParams(max_tokens=NUM_NEW, temperature=0, ignore_eos=True)),
    (draw_tokens(6, seed=2), SamplingParams(max_tokens=NUM_NEW, temperature=0, ignore_eos=True, priority=1)),
    (draw_tokens(9, seed=3), SamplingParams(**SEEDED, seed=7, ignore_eos=True)),
    (draw_tokens(5, seed=4), SamplingParams(**SEEDED, seed=8, ignore_eos=True, n=2)),
]
DRAFTS = SpeculativeConfig("suffix", num_speculative_tokens=3, prompt_lookup_min=1, adaptive=False)
Streams = dict[tuple[int, int], list[int]]
"""Tokens by request and sample."""

PAUSED_CLIENT = """
import asyncio, json, sys
from integration.test_survival import REQUESTS, stream_all
from quire.client import Engine, EngineConfig

def say(stream, token_ids):
    print(json.dumps([stream, token_ids]), flush=True)

async def main():
    config = EngineConfig(lease_ttl_s=1.0)
    async with Engine.connect(sys.argv[1], worker=sys.argv[2], config=config) as engine:
        await stream_all(engine, say)
        say("recoveries", engine.statistics().recoveries)

asyncio.run(main())
"""


async def stream_all(engine: Engine, on_tokens: Callable[[tuple[int, int], tuple[int, ...]], None]) -> None:
    """All requests at once."""

    async def stream(number: int) -> None:
        async for chunk in engine.generate(*REQUESTS[number]):
            on_tokens((number, chunk.index), chunk.token_ids)

    await asyncio.gather(*(stream(number) for number in range(len(REQUESTS))))


@dataclass
class Stage:
    """The processes, and the wires by which an engine reaches them."""

    services: LocalServices
    to_cachemgr: Wire
    to_worker: Wire
    pair: Pair

    def engine(self, **config: Any) -> Engine:
        folder = self.pair.folder
        return Engine.connect(
            f"unix:{folder}/to-cachemgr.sock", worker=f"unix:{folder}/to-worker.sock", config=EngineConfig(**config)
        )


@pytest.fixture(scope="module")
def stage(model_dir: Path) -> Iterator[Stage]:
    with staged(model_dir) as stage:
        yield stage


@contextlib.contextmanager
def staged(model_dir: Path, *, with_state: bool = False) -> Iterator[Stage]:
    """Started, and ended with the block."""
    with (
        tempfile.TemporaryDirectory(prefix="q-") as name,
        LocalServices.start(
            model=model_dir,
            num_blocks=NUM_BLOCKS,
            extra_cachemgr_args=("--state-dir", f"{name}/state") if with_state else (),
            extra_worker_args=WORKER_ARGS,
            runtime_dir=name,
            worker_target=FAULTY_WORKER,
        ) as services,
    ):
        folder = Path(name)
        to_cachemgr = Wire(folder / "to-cachemgr.sock", folder / "cachemgr.sock")
        to_worker = Wire(folder / "to-worker.sock", folder / "worker.sock")
        pair = Pair(services)
        yield Stage(services, to_cachemgr, to_worker, pair)
        pair.close()
        to_cachemgr.close()
        to_worker.close()


Disturb = Callable[[Engine, Hold], Awaitable[None]]
"""Injects a fault while the hold holds a step, releases it, and repairs the fault."""


async def run(stage: Stage, disturb: Disturb | None = None, **config: Any) -> tuple[Streams, EngineStatistics]:
    """The streams' results, disturbed once at most."""
    streams: Streams = {}
    held: list[Hold] = []
    is_held = asyncio.Event()

    def take(stream: tuple[int, int], token_ids: tuple[int, ...]) -> None:
        streams.setdefault(stream, []).extend(token_ids)
        if disturb is not None and not held and len(streams[stream]) >= DISTURBED_AFTER:
            held.append(Hold(stage.pair.folder / "hold"))
            is_held.set()

    async def disturb_once(disturb: Disturb) -> None:
        await is_held.wait()
        await asyncio.to_thread(held[0].await_running)
        assert any(len(tokens) < NUM_NEW for tokens in streams.values())
        await disturb(engine, held[0])

    async with asyncio.timeout(DEADLINE_S), stage.engine(**config) as engine:
        try:
            if config.get("speculative") is not None:  # the same requests have drafts that come true then
                await stream_all(engine, lambda *_: None)
            disturbing = [] if disturb is None else [disturb_once(disturb)]
            await asyncio.gather(stream_all(engine, take), *disturbing)
        finally:
            for hold in held:
                hold.release()
        return streams, engine.statistics()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def undisturbed(stage: Stage) -> Streams:
    streams, statistics = asyncio.run(run(stage))
    assert statistics.recoveries == 0
    assert {len(tokens) for tokens in streams.values()} == {NUM_NEW}
    return streams


def assert_all_back(stage: Stage) -> None:
    """I8: every block is free or cached, and no lease is left."""

    def is_all_back() -> bool:
        try:
            pool = stage.pair.pool()
        except RefusedError:  # POOL_NOT_FOUND: no worker has come yet
            return False
        counts = pool.block_counts
        return pool.attached and not pool.lease_count and counts.free_count + counts.cached_count == NUM_BLOCKS - 1

    await_that("every block is back", is_all_back, timeout_s=DEADLINE_S)
    assert stage.pair.violations() == []


@pytest.mark.parametrize("drafts", [None, DRAFTS], ids=["plain", "drafts"])
@pytest.mark.parametrize("killed", [("worker",), ("cachemgr",), ("cachemgr", "worker")], ids="+".join)
def test_killed_processes_cost_no_token(
    stage: Stage, undisturbed: Streams, killed: tuple[str, ...], drafts: SpeculativeConfig | None
) -> None:
    processes = [getattr(stage.services, name) for name in killed]

    async def kill_and_start(engine: Engine, hold: Hold) -> None:
        for process in processes:
            process.kill()
        hold.release()
        for process in processes:
            process.start()
        for process in processes:
            await asyncio.to_thread(process.wait_serving, DEADLINE_S)

    streams, statistics = asyncio.run(run(stage, kill_and_start, speculative=drafts))
    assert streams == undisturbed
    assert statistics.recoveries >= 1
    assert (statistics.scheduler.accepted_tokens > NUM_NEW) == (drafts is not None)
    assert_all_back(stage)


@pytest.mark.parametrize("drafts", [None, DRAFTS], ids=["plain", "drafts"])
def test_a_killed_cachemgr_that_kept_its_books_costs_nothing_but_time(
    model_dir: Path, undisturbed: Streams, drafts: SpeculativeConfig | None
) -> None:
    leases: list[Any] = []

    async def kill_and_start(engine: Engine, hold: Hold) -> None:
        leases.extend(stage.pair.leases())
        for _ in range(2):
            stage.services.cachemgr.kill()
            stage.services.cachemgr.start()
            await asyncio.to_thread(stage.services.cachemgr.wait_serving, DEADLINE_S)
        hold.release()
        await until(lambda: engine.statistics().num_requests < len(REQUESTS))
        leases.extend(stage.pair.leases())

    with staged(model_dir, with_state=True) as stage:
        streams, statistics = asyncio.run(run(stage, kill_and_start, speculative=drafts))
        assert streams == undisturbed
        assert statistics.recoveries == 0, "its lease went on"
        assert len({lease.lease_id_prefix for lease in leases}) == 1
        assert_all_back(stage)


@pytest.mark.parametrize("cut", [("to_worker",), ("to_cachemgr", "to_worker")], ids="+".join)
def test_a_worker_that_is_out_of_reach_for_a_while_costs_no_token(
    stage: Stage, undisturbed: Streams, cut: tuple[str, ...]
) -> None:
    wires: list[Wire] = [getattr(stage, name) for name in cut]
    epoch = stage.pair.pool().epoch

    async def cut_and_heal(engine: Engine, hold: Hold) -> None:
        for wire in wires:
            wire.cut()
        hold.release()
        await until(lambda: engine.statistics().recoveries > 0)
        for wire in wires:
            wire.heal()

    streams, _ = asyncio.run(
        run(stage, cut_and_heal, lease_ttl_s=3.0)
    )  # it can't be given back over a wire that is cut
    assert streams == undisturbed
    assert stage.pair.pool().epoch == epoch
    assert_all_back(stage)


def test_a_cachemgr_that_is_out_of_reach_for_a_while_costs_nothing(stage: Stage, undisturbed: Streams) -> None:
    leases: list[Any] = []

    async def cut_and_heal(engine: Engine, hold: Hold) -> None:
        stage.to_cachemgr.cut()
        leases.extend(stage.pair.leases())
        hold.release()
        await until(lambda: engine.statistics().scheduler.num_steps_in_flight == 0)  # taken while a plan waits
        leases.extend(stage.pair.leases())
        stage.to_cachemgr.heal()

    streams, statistics = asyncio.run(run(stage, cut_and_heal))
    assert streams == undisturbed
    assert statistics.recoveries == 0, "the plan was repeated, and its lease went on"
    assert len({lease.lease_id_prefix for lease in leases}) == 1
    assert_all_back(stage)


def test_a_client_that_was_paused_past_its_lease_goes_on(stage: Stage, undisturbed: Streams) -> None:
    streams: Streams = {}
    hold = None
    command = [sys.executable, "-c", PAUSED_CLIENT, stage.services.cachemgr_address, stage.services.worker_address]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as client:
        try:
            assert client.stdout is not None
            for line in client.stdout:
                stream, said = json.loads(line)
                if stream == "recoveries":
                    assert said >= 1
                    break
                streams.setdefault(tuple(stream), []).extend(said)
                if hold is None and len(streams[tuple(stream)]) >= DISTURBED_AFTER:
                    hold = Hold(stage.pair.folder / "hold")
                    hold.await_running()
                    client.send_signal(signal.SIGSTOP)
                    hold.release()
                    await_that("the lease is gone", lambda: not stage.pair.leases(), timeout_s=DEADLINE_S)
                    client.send_signal(signal.SIGCONT)
            assert client.wait(DEADLINE_S) == 0
        finally:
            client.kill()
            if hold is not None:
                hold.release()
    assert streams == undisturbed
    assert_all_back(stage)
