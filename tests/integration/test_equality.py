"""Token for token what transformers' greedy generate gives, through the two real processes, with everything on at once.

Per model family: a pool so small that sequences are preempted, a step budget so small that prompts are cut into chunks,
prompts that share a prefix, and forks; and the tokens of every sample are still those of one sequence alone in memory.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import VOCAB_SIZE, WINDOWED, build, save
from samples import others_at_night

from quire.cli.launch import LocalServices
from quire.client import Completion, Engine, EngineConfig, EngineStatistics, SamplingParams, WorkerClient
from quire.compute.v1.worker_service_pb2 import GetModelResponse

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "phi3",
    "gpt2",
    "opt",
    "gpt_neox",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
    "llama4_temperature",
    "bloom",
    "gptj",
    *WINDOWED,
)
# With a state per sequence: nothing is found, and each preemption computes from the first token.
STATEFUL = ("mamba2", "qwen3_next")
# One of each kind: plain, windows, experts, positions added and biased, latents, states. The others are in `night`.
SAMPLE = ("llama", "gemma3", "mixtral", "gpt2", "bloom", "deepseek_v3", "qwen3_next")
BLOCK_SIZE = 4
NUM_BLOCKS = 24
# Their sequences give blocks back while they run, so others may get by with waiting.
WITH_WINDOWS = ("mistral", "gemma2", "gemma3", "phi3", "gpt_oss", "llama4_temperature", *WINDOWED)
# All layers of these have windows: their sequences give most blocks back.
NUM_BLOCKS_OF = {"mistral": 12, "phi3": 12}
NUM_NEW = 16
MAX_STEP_TOKENS = 14
WORKER_ARGS = ("--dtype", "float32", "--threads", "1", "--block-size", str(BLOCK_SIZE), "--max-num-seqs", "16")


def make_prompts() -> list[list[int]]:
    """Seven prompts of 5 to 37 tokens, all but two of them with the same 17 first tokens."""
    generator = torch.Generator().manual_seed(5)

    def draw(count: int) -> list[int]:
        return torch.randint(2, VOCAB_SIZE, (count,), generator=generator).tolist()

    shared = draw(17)
    return [shared + draw(count) for count in (3, 7, 20, 1, 11)] + [draw(5), draw(32)]


def expected_tokens(model: Any, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Greedy continuations, one prompt at a time, by the model's own attention."""
    results = []
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=NUM_NEW, do_sample=False
        )
        results.append(tuple(output[0, len(prompt) :].tolist()))
    return results


async def generate(address: str, prompts: list[list[int]]) -> tuple[list[Completion], EngineStatistics]:
    """Twice: the second time finds prefixes in the cache; the first two prompts with two samples each."""
    config = EngineConfig(max_step_tokens=MAX_STEP_TOKENS)
    params = [SamplingParams(max_tokens=NUM_NEW, temperature=0.0, n=2 if i < 2 else 1) for i in range(len(prompts))]
    async with Engine.connect(address, config=config) as engine:
        completions = await engine.complete(prompts, params)
        completions += await engine.complete(prompts, params)
        return completions, engine.statistics()


@pytest.mark.parametrize("family", others_at_night(FAMILIES + STATEFUL, SAMPLE))
def test_tokens_equal_generate(family: str, tmp_path: Path) -> None:
    prompts = make_prompts()
    expected = expected_tokens(build(family), prompts) * 2
    model = save(family, tmp_path / family)
    arguments = (*WORKER_ARGS, "--max-model-len", "96")
    num_blocks = NUM_BLOCKS_OF.get(family, NUM_BLOCKS)
    with LocalServices.start(model=model, num_blocks=num_blocks, extra_worker_args=arguments) as services:
        completions, statistics = asyncio.run(generate(services.cachemgr_address, prompts))
    for completion, tokens in zip(completions, expected, strict=True):
        for sample in completion.samples:
            assert sample.token_ids == tokens
    scheduler = statistics.scheduler
    assert (scheduler.refusals if family in WITH_WINDOWS else scheduler.preemptions) > 0
    assert (scheduler.cached_tokens > 0) == (family not in STATEFUL)
    assert 0 < scheduler.forks <= 4
    assert scheduler.forks == 4 or family in STATEFUL
    assert scheduler.failed_steps == 0
    assert statistics.recoveries == 0


def test_keys_and_values_in_float8(tmp_path: Path) -> None:
    """Rounded, so with tokens of their own, but the same whether a prefix is computed at once, in parts, or found."""
    prompts = make_prompts()

    async def ask(services: LocalServices) -> tuple[list[Completion], EngineStatistics, GetModelResponse]:
        worker = WorkerClient(services.worker_address)
        model = await worker.get_model()
        await worker.close()
        return *await generate(services.cachemgr_address, prompts), model

    args = (*WORKER_ARGS, "--kv-dtype", "float8")
    model = save("llama", tmp_path / "llama")
    with LocalServices.start(model=model, num_blocks=NUM_BLOCKS, extra_worker_args=args) as services:
        completions, statistics, described = asyncio.run(ask(services))
    tokens = [[sample.token_ids for sample in completion.samples] for completion in completions]
    assert tokens[: len(prompts)] == tokens[len(prompts) :]
    assert statistics.scheduler.cached_tokens > 0
    assert described.dtype == "float32"
    assert described.kv_dtype == "float8_e4m3fn"
    assert described.geometry.block_bytes == BLOCK_SIZE * 3 * 2 * 2 * 8
    assert described.geometry.model_fingerprint.endswith(":float8_e4m3fn")


@pytest.mark.parametrize(
    "shares", [f"[default]\nlimit = {NUM_BLOCKS - 1}\n", f"[tenants.other]\nfloor = {2 * NUM_BLOCKS}\n"]
)
def test_a_part_of_a_large_pool_is_as_good_as_a_small_one(shares: str, tmp_path: Path) -> None:
    """The pool has room, but not for this tenant: because of its limit, or of another one's floor."""
    prompts = make_prompts()
    expected = expected_tokens(build("llama"), prompts) * 2
    (tmp_path / "tenants.toml").write_text(shares)
    with LocalServices.start(
        model=save("llama", tmp_path / "llama"),
        num_blocks=3 * NUM_BLOCKS,
        extra_cachemgr_args=("--tenants", str(tmp_path / "tenants.toml")),
        extra_worker_args=WORKER_ARGS,
    ) as services:
        completions, statistics = asyncio.run(generate(services.cachemgr_address, prompts))
    for completion, tokens in zip(completions, expected, strict=True):
        for sample in completion.samples:
            assert sample.token_ids == tokens
    assert statistics.scheduler.preemptions > 0
    assert statistics.scheduler.failed_steps == 0
    assert statistics.recoveries == 0
