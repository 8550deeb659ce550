"""Drafts through both real processes: every token, text and reason is the one that there is without them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deadlines import DEADLINE_S
from text_model import save

from quire.cli.launch import LocalServices
from quire.client import BeamSearchParams, Engine, EngineConfig, EngineStatistics, InvalidRequest, SamplingParams
from quire.client.engine.grammar import Grammar
from quire.client.engine.outputs import Chunk
from quire.client.engine.speculative import SpeculativeConfig

MAX_TOKENS = 40
MAX_STEP_TOKENS = 48
NUM_BLOCKS = 60
WORKER_ARGS = ("--dtype", "float32", "--threads", "1", "--block-size", "4", "--max-num-seqs", "16")
ANSWERS = SpeculativeConfig("suffix", num_speculative_tokens=6, prompt_lookup_min=2, adaptive=False)
"""The second time a request is asked for, nearly all of its tokens are drafts that come true."""
LOOSE = SpeculativeConfig("ngram", num_speculative_tokens=8, prompt_lookup_min=1, adaptive=False)
"""Most drafts are wrong."""
TEXT = '{"name": "ab", "the": [0.00, true, null]}, '
JSON = Grammar(json_schema={"type": "array", "items": {"type": "boolean"}, "minItems": 4, "maxItems": 8})
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "repeating": {"temperature": 0.0, "repetition_penalty": 0.7},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 5},
    "cold": {"temperature": 0.3, "top_k": 5, "seed": 6},
    "samples": {"temperature": 0.8, "seed": 7, "n": 3},
    "logprobs": {"temperature": 0.5, "seed": 8, "logprobs": 3, "prompt_logprobs": 1},
    "penalties": {"temperature": 0.7, "seed": 9, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    "repetition": {"temperature": 0.7, "seed": 10, "repetition_penalty": 1.3},
    "grammar": {"temperature": 1.0, "seed": 11, "grammar": JSON},
    "bad words": {"temperature": 0.8, "seed": 12, "bad_words": ("ab", "the", "00")},
    "least": {"temperature": 1.0, "seed": 13, "min_tokens": 12},
    "some tokens": {"temperature": 1.0, "seed": 14, "allowed_token_ids": tuple(range(60, 80))},
    "tenant": {"temperature": 0.9, "seed": 15, "tenant": "other"},
    "not": {"temperature": 0.9, "seed": 16, "speculative": False},
    "high": {"temperature": 0.9, "seed": 17, "priority": 1},
}

Results = dict[str, list[list[Chunk]]]


@pytest.fixture(scope="module", params=[None, 16], ids=["full", "windows"])
def services(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServices]:
    """A pool so small that sequences are preempted, with a host tier that some of them fit."""
    model = save(tmp_path_factory.mktemp("text"), window=request.param)
    arguments = (*WORKER_ARGS, "--max-model-len", "200", "--host-memory", "64K")
    with LocalServices.start(model=model, num_blocks=NUM_BLOCKS, extra_worker_args=arguments) as started:
        yield started


async def ask(engine: Engine, asked: dict[str, SamplingParams]) -> Results:
    """All requests at once, as streams."""
    results: Results = {}

    async def stream(name: str, params: SamplingParams) -> None:
        samples = results[name] = [[] for _ in range(params.n)]
        async for chunk in engine.generate(TEXT + name, params):
            samples[chunk.index].append(chunk)

    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(stream(name, params) for name, params in asked.items()))
    return results


def whole(results: Results) -> dict[str, list[Any]]:
    """Each sample's tokens, text, reason, stop string, and most probable tokens."""
    return {name: [_whole(sample) for sample in samples] for name, samples in results.items()}


def _whole(chunks: list[Chunk]) -> Any:
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    logprobs = [each for chunk in chunks for each in chunk.logprobs or ()]
    assert not logprobs or [each.token_id for each in logprobs] == tokens
    top = [[token for token, _ in each.top] for each in logprobs]
    assert [chunk.finish_reason is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    return tokens, "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason, chunks[-1].stop_string, top


def logprobs_of(results: Results) -> list[float]:
    chunks = [chunk for sample in results["logprobs"] for chunk in sample]
    return [each.logprob for chunk in chunks for each in chunk.logprobs or ()]


async def rounds(
    services: LocalServices, asked: dict[str, SamplingParams], drafts: SpeculativeConfig | None, count: int = 1
) -> tuple[list[Results], EngineStatistics]:
    """The same requests, several times in one engine."""
    config = EngineConfig(max_step_tokens=MAX_STEP_TOKENS, speculative=drafts, verify=True)
    async with Engine.connect(services.cachemgr_address, config=config) as engine:
        results = [await ask(engine, asked) for _ in range(count)]
        return results, engine.statistics()


def num_runs(statistics: EngineStatistics) -> int:
    """How often a sequence ran for tokens. Steps are fewer: how many sequences share one, time decides."""
    return statistics.scheduler.sampled_tokens - statistics.scheduler.accepted_tokens


def requests() -> dict[str, SamplingParams]:
    return {name: SamplingParams(**({"max_tokens": MAX_TOKENS} | kind)) for name, kind in KINDS.items()}


@pytest.mark.parametrize("drafts", [ANSWERS, LOOSE], ids=["right", "wrong"])
def test_tokens_are_those_without_drafts(services: LocalServices, drafts: SpeculativeConfig) -> None:
    [expected], plain = asyncio.run(rounds(services, requests(), None))
    results, statistics = asyncio.run(rounds(services, requests(), drafts, 3))
    for result in results:
        assert whole(result) == whole(expected)
        assert logprobs_of(result) == pytest.approx(logprobs_of(expected), abs=1e-4)
    scheduler = statistics.scheduler
    assert scheduler.preemptions > 0
    assert (scheduler.failed_steps, statistics.recoveries) == (0, 0)
    assert scheduler.drafted_tokens > 50
    if drafts is ANSWERS:
        assert scheduler.accepted_tokens > 0.5 * scheduler.drafted_tokens
        assert num_runs(statistics) < 2.0 * num_runs(plain), "fewer than three times as many"
        assert any(len(chunk.token_ids) > 1 for chunk in results[-1]["greedy"][0]), "several tokens in one chunk"
    else:
        assert scheduler.accepted_tokens < 0.5 * scheduler.drafted_tokens


def test_a_request_that_is_asked_again_takes_fewer_steps(services: LocalServices) -> None:
    asked = {"greedy": requests()["greedy"]}
    _, plain = asyncio.run(rounds(services, asked, None))
    _, drafted = asyncio.run(rounds(services, asked, ANSWERS, 2))
    assert drafted.scheduler.planned_steps < 1.5 * plain.scheduler.planned_steps, "fewer than two times as many"


def test_stop_strings_and_stop_tokens_cut_the_tokens_behind_them(services: LocalServices) -> None:
    """Of what a step accepts only the tokens up to the stop are delivered, and counted."""
    seeded = {"max_tokens": MAX_TOKENS, "temperature": 0.9, "seed": 5}
    [plain], _ = asyncio.run(rounds(services, {"text": SamplingParams(**seeded)}, None))
    [(tokens, text, *_)] = whole(plain)["text"]
    asked = {"text": [SamplingParams(**seeded)]}
    asked["text"] += [SamplingParams(**seeded, stop=(text[at : at + 2],)) for at in range(4, len(text) - 2, 3)]
    asked["text"] += [SamplingParams(**seeded, stop_token_ids=(token,)) for token in tokens[3::5]]
    asked["text"] += [SamplingParams(**(seeded | {"max_tokens": count})) for count in (1, 2, 3, 9, 17)]

    async def one_by_one(drafts: SpeculativeConfig | None) -> list[Any]:
        config = EngineConfig(speculative=drafts, verify=True)
        async with Engine.connect(services.cachemgr_address, config=config) as engine:
            await ask(engine, {"text": asked["text"][0]})
            return [whole(await ask(engine, {"text": params})) for params in asked["text"]]

    expected = asyncio.run(one_by_one(None))
    assert len({str(each) for each in expected}) > 8
    assert asyncio.run(one_by_one(ANSWERS)) == expected


def test_answers_whole_and_best_of_count_their_tokens(services: LocalServices) -> None:
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.9, seed=5, n=2, best_of=4)

    async def complete(drafts: SpeculativeConfig | None) -> list[Any]:
        config = EngineConfig(speculative=drafts, verify=True)
        async with Engine.connect(services.cachemgr_address, config=config) as engine:
            found = []
            for _ in range(2):
                [completion] = await engine.complete(TEXT, params)
                chunks = [chunk async for chunk in engine.generate(TEXT, params, n=1, best_of=None, is_whole=True)]
                found.append(([each.token_ids for each in completion.samples], sum(len(c.token_ids) for c in chunks)))
            beams = await engine.beam_search(TEXT, BeamSearchParams(beam_width=3, max_tokens=8))
            return [found, [beam.token_ids for beam in beams[0].beams]]

    assert asyncio.run(complete(ANSWERS)) == asyncio.run(complete(None))


def test_a_worker_that_verifies_none_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = save(tmp_path / "text")
    arguments = (*WORKER_ARGS, "--max-model-len", "64", "--max-draft-tokens", "0")
    with (
        LocalServices.start(model=model, num_blocks=NUM_BLOCKS, extra_worker_args=arguments) as services,
        pytest.raises(InvalidRequest, match=r"verifies no drafts \(max_draft_count is 0\)"),
    ):
        asyncio.run(rounds(services, {}, LOOSE))
