"""A step that does not end: health says so, the process ends, and requests finish on the worker that comes after it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from grpc_health.v1 import health_pb2
from integration.protocol_client import FAULTY_WORKER, NUM_BLOCKS, WORKER_ARGS, WORKER_SERVICE, Pair, draw_tokens

from quire.cli.launch import LocalServices
from quire.client import Engine, SamplingParams

LIMIT_S = 4
PROMPTS = [draw_tokens(count, seed=count) for count in (21, 9)]
NUM_NEW = 12
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
Generate = Callable[[list[int], int], list[int]]


@pytest.fixture
def pair(model_dir: Path) -> Iterator[Pair]:
    with (
        tempfile.TemporaryDirectory(prefix="q-") as folder,
        LocalServices.start(
            model=model_dir,
            num_blocks=NUM_BLOCKS,
            extra_worker_args=(*WORKER_ARGS, "--step-timeout", str(LIMIT_S)),
            runtime_dir=folder,
            worker_target=FAULTY_WORKER,
        ) as services,
    ):
        pair = Pair(services)
        yield pair
        pair.close()


async def complete(pair: Pair, meanwhile: Callable[[], None]) -> list[list[int]]:
    """The tokens of PROMPTS by an engine; `meanwhile` runs beside it."""
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)
    async with Engine.connect(pair.services.cachemgr_address) as engine:
        generating = asyncio.create_task(engine.complete(PROMPTS, params))
        await asyncio.to_thread(meanwhile)
        return [list(completion.samples[0].token_ids) for completion in await generating]


def log_lines(pair: Pair, text: str) -> list[str]:
    """The lines of the worker's log with this text."""
    path = pair.services.worker.log_path
    assert path is not None
    return [line for line in path.read_text().splitlines() if text in line]


def test_health_is_not_serving_while_a_step_takes_longer_than_the_limit(pair: Pair, generate: Generate) -> None:
    epoch = pair.worker_statistics().epoch
    health, liveness = (pair.health(pair.worker_channel, name) for name in (WORKER_SERVICE, "liveness"))
    assert next(health).status == next(liveness).status == SERVING

    def let_it_end_late() -> None:
        hold.await_running()
        assert next(health).status == NOT_SERVING
        hold.release()
        assert next(health).status == SERVING

    with pair.held() as hold:
        answers = asyncio.run(complete(pair, let_it_end_late))
    assert answers == [generate(prompt, NUM_NEW) for prompt in PROMPTS]
    assert pair.worker_statistics().epoch == epoch
    (line,) = log_lines(pair, "step does not end: not serving until it does")
    assert "step=1 tokens=30 sequences=2" in line
    assert f"age_s={LIMIT_S}" in line
    assert len(log_lines(pair, "the step that did not end has ended: serving again")) == 1


def test_requests_finish_on_the_worker_that_comes_after_one_that_hangs(pair: Pair, generate: Generate) -> None:
    worker, epoch = pair.services.worker, pair.worker_statistics().epoch

    def hang_and_start_again() -> None:
        hold.await_running()
        assert worker.wait_exited(DEADLINE_S)
        assert worker.returncode == 1
        hold.release()
        worker.start()
        worker.wait_serving(DEADLINE_S)

    with pair.held() as hold:
        answers = asyncio.run(complete(pair, hang_and_start_again))
    assert answers == [generate(prompt, NUM_NEW) for prompt in PROMPTS]
    assert pair.worker_statistics().epoch != epoch
    (line,) = log_lines(pair, "failed: step does not end: the worker stops")
    assert f"age_s={2 * LIMIT_S}" in line
    assert "at=model:" in line
