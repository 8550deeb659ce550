"""A worker with a holder: killed and started again it finds the published blocks, or begins empty."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from integration.protocol_client import (
    FAULTY_WORKER,
    NUM_BLOCKS,
    WORKER_ARGS,
    LeaseHolder,
    Pair,
    await_that,
    draw_tokens,
)

from quire.cli.launch import LocalServices

Generate = Callable[[list[int], int], list[int]]
PROMPT = draw_tokens(41, seed=1)
NUM_NEW = 6


class Deployment:
    """A holder, a cachemgr with a state directory, and a worker; each can be killed and started again."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.services = LocalServices.start(
            model=model,
            num_blocks=NUM_BLOCKS,
            extra_cachemgr_args=("--state-dir", str(folder / "state")),
            extra_worker_args=WORKER_ARGS,
            keeps_memory=True,
            runtime_dir=folder,
            worker_target=FAULTY_WORKER,
        )
        assert self.services.holder is not None
        self.holder = self.services.holder
        self.pair = Pair(self.services)

    def start_worker(self) -> None:
        self.services.worker.start()
        self.services.worker.wait_serving(DEADLINE_S)
        self.pair.await_attached()

    def close(self) -> None:
        self.pair.close()
        self.services.stop()


@pytest.fixture(scope="module")
def deployment(model_dir: Path) -> Iterator[Deployment]:
    with tempfile.TemporaryDirectory(prefix="quire-") as name:
        deployment = Deployment(Path(name), model_dir)
        yield deployment
        deployment.close()


def run_prompt(pair: Pair) -> tuple[list[int], int]:
    """The tokens behind the prompt, and how many of its own were found in the cache."""
    holder = LeaseHolder.create(pair)
    plan = holder.admit((1, PROMPT))
    num_found = plan.run_starts[0]
    holder.run(plan)
    holder.go_on(1, num_steps=NUM_NEW - 1)
    holder.await_settled()
    tokens = holder.tokens[1][len(PROMPT) :]
    holder.delete()
    await_that("the lease is gone", lambda: not pair.leases())
    assert pair.violations() == []
    return tokens, num_found


def test_a_worker_that_was_killed_finds_what_was_published(deployment: Deployment, generate: Generate) -> None:
    pair, expected = deployment.pair, generate(PROMPT, NUM_NEW)
    assert run_prompt(pair)[0] == expected
    with pair.held() as hold:
        other = LeaseHolder.create(pair)
        running = other.start(other.admit((1, draw_tokens(30, seed=2))))  # the call would end with its object
        hold.await_running()
        deployment.services.worker.kill()
    assert running.exception(DEADLINE_S) is not None
    deployment.start_worker()
    assert pair.cached_tokens(draw_tokens(30, seed=2)) == 0, "a step in flight is dropped"
    other.delete()
    tokens, num_found = run_prompt(pair)
    assert (tokens, num_found > 0) == (expected, True)


def test_both_killed_at_once_find_it_again(deployment: Deployment, generate: Generate) -> None:
    services = deployment.services
    services.worker.kill()
    services.cachemgr.kill()
    services.cachemgr.start()
    services.cachemgr.wait_serving(DEADLINE_S)
    deployment.start_worker()
    tokens, num_found = run_prompt(deployment.pair)
    assert (tokens, num_found > 0) == (generate(PROMPT, NUM_NEW), True)


def test_a_second_worker_on_the_memory_is_refused(deployment: Deployment, model_dir: Path) -> None:
    command = [sys.executable, "-m", "quire.worker", "--model", str(model_dir), "--num-blocks", str(NUM_BLOCKS)]
    listen = f"unix:{deployment.services.runtime_dir}/second.sock"
    where = ("--listen", listen, "--cachemgr", deployment.services.cachemgr_address)
    flags = (*WORKER_ARGS, "--holder", deployment.holder.address)
    second = subprocess.run([*command, *where, *flags], capture_output=True, text=True, timeout=DEADLINE_S)
    assert second.returncode == 1
    assert f"the memory is lent to process {deployment.services.worker.pid}, which is alive" in second.stderr


def test_a_holder_that_was_killed_takes_the_cache_with_it_and_nothing_else(
    deployment: Deployment, generate: Generate
) -> None:
    deployment.holder.kill()
    tokens, num_found = run_prompt(deployment.pair)
    assert (tokens, num_found > 0) == (generate(PROMPT, NUM_NEW), True), "the worker still has its memory"
    deployment.holder.start()
    deployment.services.worker.kill()
    deployment.start_worker()
    tokens, num_found = run_prompt(deployment.pair)
    assert (tokens, num_found) == (generate(PROMPT, NUM_NEW), 0)
