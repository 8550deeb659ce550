"""The laboratory against the real processes: the same requests find the same tokens, and evict the same blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from integration.protocol_client import BLOCK_SIZE, VOCAB_SIZE, WORKER_ARGS

from quire.cli.launch import LocalServices
from quire.client import CacheClient, Engine, SamplingParams
from quire.lab.config import config_of
from quire.lab.load import make_requests
from quire.lab.requests import Request
from quire.lab.simulation import Simulation

NUM_BLOCKS = 41
CONFIG = config_of(
    {
        "load": {
            "requests": 80,
            "lengths": "known",
            "sessions": {
                "kind": "rag", "documents": 8, "documents_per_request": 2, "document_tokens": 14,
                "system_tokens": 10, "first_tokens": 8, "turn_tokens": 5, "output_tokens": 6, "spread": 0.4,
                "most_tokens": 110,
            },
        },
        "fleet": {
            "blocks": NUM_BLOCKS - 1, "block_size": BLOCK_SIZE, "eviction": "lru", "max_sequence_tokens": 128,
            "max_step_tokens": 92, "step": {"form": "additive", "base_s": 1.0, "token_s": 0.1},
        },
    },
    name="truth",
)  # fmt: skip


def one_after_the_other(requests: Sequence[Request]) -> list[Request]:
    """Each is sent when the one before has ended, so that the order of events is the same in both."""
    return [replace(request, at_s=1.0, after=number - 1 if number else None) for number, request in enumerate(requests)]


async def serve(address: str, requests: Sequence[Request]) -> tuple[list[int], int]:
    """The tokens of each prompt that the real services found, and the blocks that they evicted."""
    found = []
    async with Engine.connect(address) as engine:
        for request in requests:
            before = engine.statistics().scheduler.cached_tokens
            prompt = (request.content.tokens()[: request.num_prompt] % (VOCAB_SIZE - 3) + 3).tolist()
            params = SamplingParams(max_tokens=request.num_output, ignore_eos=True, temperature=0)
            await engine.complete([prompt], params)
            found.append(engine.statistics().scheduler.cached_tokens - before)
    cache = CacheClient(address)
    try:
        (statistics,) = await cache.get_statistics()
    finally:
        await cache.close()
    return found, statistics.evicted_block_count


def test_hits_and_evictions_are_those_of_the_real_processes(model_dir: Path) -> None:
    """Prompts have no earlier answers in them: the real model gives others than the trace."""
    requests = one_after_the_other(make_requests(CONFIG.load, 7))
    simulation = Simulation(CONFIG, 7, requests)
    outcome = simulation.run()
    with LocalServices.start(
        model=model_dir,
        num_blocks=NUM_BLOCKS,
        extra_cachemgr_args=("--eviction-policy", "lru"),
        extra_worker_args=WORKER_ARGS,
    ) as services:
        found, num_evicted = asyncio.run(serve(services.cachemgr_address, requests))
    assert found == [record.num_cached for record in simulation.records]
    assert num_evicted == outcome.metrics["evicted_blocks"]
    assert sum(found) > 0
    assert num_evicted > 0
