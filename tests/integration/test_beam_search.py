"""Beam search through both real processes: the tokens and scores of transformers' generate(num_beams=...).

And the block of docs/reference/sampling.md that shows one.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pages
import pytest
import torch
from integration.protocol_client import draw_tokens
from model_zoo import build, save
from samples import others_at_night

from quire.cli.launch import LocalServices
from quire.client import (
    LLM,
    BeamCompletion,
    BeamSearchParams,
    CacheParams,
    Engine,
    EngineConfig,
    EngineStatistics,
    FinishReason,
    InvalidRequest,
    SamplingParams,
)

FAMILIES = ("llama", "gemma3", "mixtral", "gpt2", "bloom", "deepseek_v3")
# Each in a process of its own: one in `make test`, the others in `make night`.
SAMPLE = ("llama",)
BLOCK_SIZE = 4
NUM_BLOCKS = 27
# With windows, beams may have to be admitted apart, without blocks in common.
NUM_BLOCKS_OF = {"gemma3": 92}
MAX_STEP_TOKENS = 24
ARGUMENTS = (
    *("--dtype", "float32", "--threads", "1", "--block-size", str(BLOCK_SIZE), "--max-num-seqs", "16"),
    *("--max-model-len", "96"),
)
PROMPTS = [draw_tokens(count, seed=seed) for seed, count in enumerate((5, 16, 21))]
# Tokens that end a text of such a model now and then.
ENDS = (8, 31, 60, 77)

# Of the search that counts them, with fixed weights and a fixed prompt.
KNOWN_FORKS_AND_COPIES = (6, 5)

ASKED = [
    BeamSearchParams(
        beam_width=width,
        n=width,
        max_tokens=max_tokens,
        early_stopping=early_stopping,
        length_penalty=penalty,
        stop_token_ids=ENDS,
    )
    for number, (early_stopping, penalty) in enumerate(product((True, False, "never"), (-1.0, 0.5, 1.0, 2.0)))
    for width, max_tokens in [((2, 9), (4, 14))[number % 2]]
] + [
    BeamSearchParams(beam_width=1, max_tokens=7),
    BeamSearchParams(beam_width=4, n=2, max_tokens=1),
    BeamSearchParams(beam_width=6, n=3, max_tokens=11),
]


def expected(model: Any, prompt: list[int], params: BeamSearchParams) -> list[tuple[tuple[int, ...], float]]:
    ends = list(params.stop_token_ids)
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=params.max_tokens,
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        early_stopping=params.early_stopping,
        length_penalty=params.length_penalty,
        eos_token_id=ends or None,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    if params.beam_width == 1:
        return [(tuple(output.sequences[0, len(prompt) :].tolist()), 0.0)]
    results = []
    for tokens, score in zip(output.sequences[:, len(prompt) :].tolist(), output.sequences_scores, strict=True):
        end = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        results.append((tuple(tokens[:end]), float(score)))
    return results


def assert_equal(completion: BeamCompletion, model: Any, params: BeamSearchParams) -> None:
    found = [(beam.token_ids, beam.score) for beam in completion.beams]
    wanted = expected(model, list(completion.prompt_token_ids), params)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted], params
    if params.beam_width > 1:
        assert [score for _, score in found] == pytest.approx([score for _, score in wanted], rel=1e-4), params


def connect(services: LocalServices, **config: Any) -> Engine:
    return Engine.connect(services.cachemgr_address, config=EngineConfig(max_step_tokens=MAX_STEP_TOKENS, **config))


def start(family: str, folder: Path, *, num_blocks: int = NUM_BLOCKS) -> LocalServices:
    model = save(family, folder / family)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    return LocalServices.start(model=model, num_blocks=num_blocks, extra_worker_args=ARGUMENTS)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServices]:
    with start("llama", tmp_path_factory.mktemp("model")) as services:
        yield services


@pytest.mark.parametrize("family", others_at_night(FAMILIES, SAMPLE))
def test_beams_equal_transformers(family: str, tmp_path: Path) -> None:
    """All searches at once beside samples, in a pool in which not all of it fits."""
    model = build(family)

    async def main(services: LocalServices) -> EngineStatistics:
        async with connect(services) as engine:
            several = [PROMPTS[number % len(PROMPTS)] for number in range(len(ASKED))]
            sampled = engine.complete(PROMPTS, SamplingParams(temperature=0, max_tokens=12, n=2, ignore_eos=True))
            completions, samples = await asyncio.gather(engine.beam_search(several, ASKED), sampled)
            for completion, params in zip(completions, ASKED, strict=True):
                assert_equal(completion, model, params)
            for completion in samples:
                assert len({sample.token_ids for sample in completion.samples}) == 1
            return engine.statistics()

    with start(family, tmp_path, num_blocks=NUM_BLOCKS_OF.get(family, NUM_BLOCKS)) as services:
        statistics = asyncio.run(main(services))
    scheduler = statistics.scheduler
    assert (scheduler.refusals if family in NUM_BLOCKS_OF else scheduler.preemptions) > 0
    assert statistics.scheduler.forks > 0
    assert (statistics.recoveries, statistics.scheduler.failed_steps, statistics.scheduler.num_running) == (0, 0, 0)


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


def test_the_widest_search_fits_the_worker_as_it_is(services: LocalServices, model: Any) -> None:
    params = BeamSearchParams(beam_width=12, n=12, max_tokens=6, stop_token_ids=ENDS)

    async def main() -> None:
        async with Engine.connect(services.cachemgr_address) as engine:
            (completion,) = await engine.beam_search(PROMPTS[0], params)
            assert_equal(completion, model, params)

    asyncio.run(main())


def test_copies_and_forks_are_counted(services: LocalServices) -> None:
    """A fork copies one block at most: the one that it writes."""

    async def main() -> None:
        async with connect(services) as engine:
            before = engine.statistics()
            await engine.beam_search(PROMPTS[2], beam_width=3, max_tokens=8)
            after = engine.statistics()
        forks = after.scheduler.forks - before.scheduler.forks
        assert (forks, after.copied_blocks - before.copied_blocks) == KNOWN_FORKS_AND_COPIES
        assert after.scheduler.preemptions == before.scheduler.preemptions

    asyncio.run(main())


def test_a_new_epoch_in_the_midst(tmp_path: Path, model: Any) -> None:
    params = BeamSearchParams(beam_width=4, n=4, max_tokens=40, early_stopping=True)

    async def main(services: LocalServices) -> None:
        async with connect(services) as engine:
            searching = asyncio.create_task(engine.beam_search(PROMPTS, params))
            while engine.statistics().scheduler.forks < 9:
                await asyncio.sleep(0)
            await asyncio.to_thread(services.worker.restart)
            assert not searching.done()
            for completion in await searching:
                assert_equal(completion, model, params)
            assert engine.statistics().recoveries > 0

    with start("llama", tmp_path, num_blocks=120) as services:
        asyncio.run(main(services))


@pytest.mark.parametrize(
    ("fields", "field", "limit"),
    [
        ({"beam_width": 16, "stop_token_ids": (1, 2, 3, 4, 5)}, "beam_width", "at most 15: the worker's"),
        ({"beam_width": 13, "max_tokens": 1}, "beam_width", "at most 12, the sequences that run at once"),
        ({"beam_width": 12, "max_tokens": 80}, "max_tokens", "with 12 beams after 5 tokens, by the pool's blocks"),
        ({"stop_token_ids": (96,)}, "stop_token_ids", "token ids from 0 to 95"),
        ({"max_tokens": 9, "cache": CacheParams(reserve=True)}, "reserve", "best effort"),
    ],
)
def test_a_search_that_can_not_be_served_is_refused_alone(
    services: LocalServices, fields: dict[str, Any], field: str, limit: str
) -> None:
    async def main() -> None:
        async with connect(services, max_running_sequences=12) as engine:
            beside = asyncio.create_task(engine.complete(PROMPTS[0], max_tokens=5, ignore_eos=True))
            with pytest.raises(InvalidRequest) as refused:
                await engine.beam_search(PROMPTS[0], **fields)
            assert refused.value.metadata["field"] == field
            assert limit in refused.value.metadata["limit"]
            assert len((await beside)[0].token_ids) == 5

    asyncio.run(main())


def test_a_search_that_runs_out_of_time_returns_what_it_has(services: LocalServices) -> None:
    async def main() -> None:
        async with connect(services) as engine:
            (completion,) = await engine.beam_search(PROMPTS[0], beam_width=2, n=2, max_tokens=40, timeout_s=1e-9)
            assert completion.beams[0].finish_reason is FinishReason.TIMEOUT
            searching = asyncio.create_task(engine.beam_search(PROMPTS[0], beam_width=2, max_tokens=40))
            while not engine.statistics().scheduler.forks:
                await asyncio.sleep(0)
            searching.cancel()
            await asyncio.wait([searching])
            while engine.statistics().scheduler.num_running:
                await asyncio.sleep(0)

    asyncio.run(main())


def test_the_best_of_several_samples(services: LocalServices) -> None:
    """Those with the highest log-probability per token; nothing is given out before all have ended."""
    asked: dict[str, Any] = {"max_tokens": 20, "seed": 5, "stop_token_ids": ENDS}

    async def main() -> None:
        async with connect(services) as engine:
            (every,) = await engine.complete(PROMPTS[1], n=5, logprobs=0, **asked)
            means = {
                sample.token_ids: sum(entry.logprob for entry in sample.logprobs or ()) / len(sample.token_ids)
                for sample in every.samples
            }
            assert len({len(tokens) for tokens in means}) > 1
            best = sorted(means, key=lambda tokens: -means[tokens])[:2]
            chunks = [chunk async for chunk in engine.generate(PROMPTS[1], n=2, best_of=5, **asked)]
            assert [(chunk.index, chunk.token_ids, chunk.logprobs) for chunk in chunks] == [
                (0, best[0], None),
                (1, best[1], None),
            ]
            (one,) = await engine.complete(PROMPTS[1], best_of=5, logprobs=1, prompt_logprobs=0, **asked)
            (sample,) = one.samples
            assert sample.token_ids == best[0]
            assert sample.logprobs is not None
            assert len(sample.logprobs[0].top) == 1
            assert one.prompt_logprobs is not None

    asyncio.run(main())


def test_the_block_of_the_page_prints_two_beams() -> None:
    block = pages.block("docs/reference/sampling.md", test="tests/integration/test_beam_search.py")
    printed = io.StringIO()
    with (
        LocalServices.start(model=pages.ROOT / "deploy/demo/model", num_blocks=64) as services,
        LLM(services.cachemgr_address) as llm,
        contextlib.redirect_stdout(printed),
    ):
        exec(compile(block.text, block.page, "exec"), {"llm": llm})
    scores = [float(line.split()[0]) for line in printed.getvalue().splitlines()]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)
