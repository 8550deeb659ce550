"""A worker of two ranks on two machines, which are two network namespaces with a cable between them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from deadlines import DEADLINE_S
from deploy.tools import missing
from integration.network import Cable
from integration.protocol_client import await_that
from integration.test_equality import NUM_NEW, expected_tokens, make_prompts
from integration.test_tensor_parallel import NUM_BLOCKS, WORKER_ARGS
from model_zoo import build

from quire.cli.service_process import ServiceProcess
from quire.client import Completion, Engine, SamplingParams

PORT = 29500
STEP_TIMEOUT_S = 5
SILENCE_S = 2 * STEP_TIMEOUT_S


class Machine:
    """torchrun on one machine, with one rank, from the constructor to `close`."""

    def __init__(self, cable: Cable, number: int, folder: Path, *flags: str) -> None:
        self.log_path = folder / f"machine-{number}.log"
        torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        torchrun += ["--node-rank", str(number), "--master-addr", cable.ADDRESSES[0], "--master-port", str(PORT)]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*cable.prefix(number), *torchrun, "-m", "quire.worker", *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"GLOO_SOCKET_IFNAME": cable.INTERFACE},
            )

    def log(self) -> str:
        return self.log_path.read_text()

    def rank(self) -> psutil.Process:
        """The process of its rank."""
        (rank,) = psutil.Process(self._process.pid).children()
        return rank

    def close(self) -> None:
        """End torchrun and its rank. Idempotent."""
        if self._process.poll() is None:
            for child in psutil.Process(self._process.pid).children(recursive=True):
                child.kill()
        self._process.kill()
        self._process.wait()


@pytest.fixture
def cable() -> Iterator[Cable]:
    try:
        made = Cable()
    except OSError as error:
        missing(f"a cable ({error})", required_by="QUIRE_REQUIRE_FOREIGN", for_what="a worker on two machines")
    yield made
    made.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        yield Path(name)


@pytest.fixture
def cachemgr(folder: Path) -> Iterator[ServiceProcess]:
    address = f"unix:{folder}/cachemgr.sock"
    process = ServiceProcess(
        "cachemgr",
        target="quire.cachemgr",
        arguments=("--listen", address),
        address=address,
        log_path=folder / "cachemgr.log",
    )
    process.start()
    process.wait_serving(DEADLINE_S)
    yield process
    process.kill()


@pytest.fixture
def machines(cable: Cable, folder: Path, cachemgr: ServiceProcess, model_dir: Path) -> Iterator[tuple[Machine, ...]]:
    flags = ("--model", str(model_dir), "--num-blocks", str(NUM_BLOCKS), "--cachemgr", cachemgr.address, *WORKER_ARGS)
    flags += ("--listen", f"unix:{folder}/worker.sock", "--step-timeout", str(STEP_TIMEOUT_S))
    started = tuple(Machine(cable, number, folder, *flags) for number in range(2))
    yield started
    for machine in started:
        machine.close()


async def generate(address: str) -> list[Completion]:
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)
    async with Engine.connect(address) as engine:
        return await engine.complete(make_prompts(), [params] * len(make_prompts()))


@pytest.mark.verify
def test_steps_run_over_two_machines_and_a_cut_cable_ends_both_ranks(
    cable: Cable, cachemgr: ServiceProcess, machines: tuple[Machine, ...]
) -> None:
    first, second = machines
    await_that("the worker serves", lambda: " serving addresses=" in first.log())
    ranks = [machine.rank() for machine in machines]
    completions = asyncio.run(generate(cachemgr.address))
    assert [tuple(each.samples[0].token_ids) for each in completions] == expected_tokens(build("llama"), make_prompts())
    cable.cut()
    await_that("no rank is left", lambda: not any(is_alive(rank) for rank in ranks))
    reason = f"can't be reached: no sign of life for {SILENCE_S} s"
    assert sum(f"failed: rank 1 {reason}" in line for line in first.log().splitlines()) == 1
    assert sum(f"rank 1 of 2 ends: rank 0 {reason}" in line for line in second.log().splitlines()) == 1


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
