"""A quantized model through both real processes: chunks, prefixes that are found, forks, preemptions, a host tier."""

from __future__ import annotations

import asyncio
from pathlib import Path

import quantized_zoo
from integration.test_equality import NUM_BLOCKS, WORKER_ARGS, expected_tokens, generate, make_prompts

from quire.cli.launch import LocalServices


def test_tokens_equal_generate_on_the_dequantized_weights(tmp_path: Path) -> None:
    prompts = make_prompts()
    folder, plain = quantized_zoo.save("gptq", tmp_path)
    arguments = (*WORKER_ARGS, "--host-memory", "1M")
    with LocalServices.start(model=folder, num_blocks=NUM_BLOCKS, extra_worker_args=arguments) as services:
        completions, statistics = asyncio.run(generate(services.cachemgr_address, prompts))
    for completion, tokens in zip(completions, expected_tokens(plain, prompts) * 2, strict=True):
        assert [sample.token_ids for sample in completion.samples] == [tokens] * len(completion.samples)
    scheduler = statistics.scheduler
    assert scheduler.preemptions > 0
    assert scheduler.cached_tokens > 0
    assert scheduler.forks == 4
    assert scheduler.failed_steps == 0
