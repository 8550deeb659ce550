"""The engine over the two real services, and over the same services in this process: what several benchmarks drive."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from in_process import LEASE_TTL_S, InProcessCache, InProcessServices, InProcessWorker, make_executor
from worker_flags import DEFAULTS, WorkerFlags

from quire.cli.launch import LocalServices
from quire.client import Engine, EngineConfig, SamplingParams
from quire.client.cache_client import CacheClient
from quire.serving.runtime import tune_garbage_collector
from quire.worker.model.checkpoint import load_model
from quire.worker.model.paged_model import PagedModel
from quire.worker.service.step_gaps import StepGaps

NUM_CORES = len(os.sched_getaffinity(0))

logging.getLogger("quire.client").setLevel(logging.ERROR)  # these models have no tokenizer, and need none


@dataclass(frozen=True, slots=True)
class Setup:
    """A model on a pool, and how the engine uses it."""

    model: Path
    num_blocks: int
    block_size: int = 16
    dtype: str = "float32"
    device: str = "cpu"
    max_num_seqs: int = 256
    max_step_tokens: int = 2048
    max_running_sequences: int = 256
    threads: int = NUM_CORES

    def engine_config(self) -> EngineConfig:
        """The lease outlives any other use of this process's event loop."""
        return EngineConfig(
            max_step_tokens=self.max_step_tokens,
            max_running_sequences=self.max_running_sequences,
            lease_ttl_s=LEASE_TTL_S,
            verify=False,
        )


@dataclass(frozen=True, slots=True)
class Running:
    """An engine at work; `forget` empties the prefix cache. `gaps` are those between steps, in this process alone."""

    engine: Engine
    forget: Callable[[], Awaitable[object]]
    gaps: StepGaps | None = None


@contextlib.asynccontextmanager
async def two_processes(setup: Setup) -> AsyncIterator[Running]:
    """cachemgr and worker as `quire up` starts them."""
    worker_args = (
        *(
            "--dtype",
            setup.dtype,
            "--device",
            setup.device,
            "--threads",
            str(setup.threads),
            "--block-size",
            str(setup.block_size),
        ),
        *("--max-num-seqs", str(setup.max_num_seqs), "--max-step-tokens", str(setup.max_step_tokens)),
    )
    async with LocalServices(model=setup.model, num_blocks=setup.num_blocks, extra_worker_args=worker_args) as services:
        cache = CacheClient(services.cachemgr_address)
        try:
            async with Engine.connect(services.cachemgr_address, config=setup.engine_config()) as engine:
                yield Running(engine, cache.reset_prefix_cache)
        finally:
            await cache.close()


@contextlib.asynccontextmanager
async def one_process(
    setup: Setup, *, model: PagedModel | None = None, flags: WorkerFlags = DEFAULTS
) -> AsyncIterator[Running]:
    """The engine without gRPC and other processes; with a model that is loaded already, if given."""
    torch.set_num_threads(setup.threads)
    services = InProcessServices(
        model or load(setup),
        num_blocks=setup.num_blocks,
        block_size=setup.block_size,
        max_num_seqs=setup.max_num_seqs,
        max_step_tokens=setup.max_step_tokens,
        make_executor=partial(make_executor, flags=flags),
    )

    async def forget() -> None:
        services.pool.ledger.reset_prefix_cache()

    worker = InProcessWorker(services)
    tune_garbage_collector()  # as each service does
    try:
        async with Engine(InProcessCache(services), lambda _: worker, config=setup.engine_config()) as engine:
            yield Running(engine, forget, services.steps.counters.gaps)
    finally:
        services.close()
        gc.unfreeze()  # else the model would never be freed


def load(setup: Setup) -> PagedModel:
    """The model of a setup."""
    return load_model(setup.model, dtype=getattr(torch, setup.dtype), device=setup.device)


async def generate(engine: Engine, prompts: Sequence[Sequence[int]], num_new: Sequence[int]) -> list[list[int]]:
    """So many tokens of each prompt, greedy, all at once; returns them."""
    params = [greedy(count) for count in num_new]
    return [list(completion.token_ids) for completion in await engine.complete(prompts, params)]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


async def until(reached: Callable[[], bool]) -> None:
    """Returns soon after it is."""
    while not reached():
        await asyncio.sleep(0.005)
