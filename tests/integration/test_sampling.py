"""Sampling parameters through both real processes, with chunks of prompts, forks and preemptions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from integration.protocol_client import VOCAB_SIZE, draw_tokens
from model_zoo import build, save
from torch import Tensor
from transformers.generation import logits_process as hf

from quire.cli.launch import LocalServices
from quire.client import Completion, Engine, EngineConfig, FinishReason, InvalidRequest, SamplingParams

NUM_NEW = 16
NUM_BLOCKS = 24
MAX_STEP_TOKENS = 14
ARGUMENTS = (
    *("--dtype", "float32", "--threads", "1", "--block-size", "4", "--max-num-seqs", "16"),
    *("--max-model-len", "96"),
)
PROMPTS = [draw_tokens(count, seed=seed) for seed, count in enumerate((5, 9, 21, 37))]
END_TOKEN = 2
STOPS = (8, 31, 60, 77)
MakeProcessors = Callable[[int], list[Any]]


class FrequencyPenalty(hf.LogitsProcessor):
    """OpenAI's formula."""

    def __init__(self, penalty: float, prompt_length: int) -> None:
        self.penalty, self.prompt_length = penalty, prompt_length

    def __call__(self, input_ids: Any, scores: Any) -> Tensor:
        counts = torch.bincount(input_ids[0, self.prompt_length :], minlength=scores.shape[1])
        result: Tensor = scores - self.penalty * counts
        return result


def biased(bias: dict[int, float]) -> Any:
    return hf.SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])


BIAS = {3: 4.0, 40: -100.0, 41: 2.5}
BAD_WORDS = ((9,), *((a, b) for a in range(0, VOCAB_SIZE, 2) for b in range(20, 40)), (1, 2, 3), (70, 71, 72, 73))
ALLOWED = tuple(range(5, 45))
END_BIAS = dict.fromkeys(STOPS, 12.0)

# Parameters, and the processors of transformers that do the same, by the length of the prompt.
ASKED: dict[str, tuple[dict[str, Any], MakeProcessors]] = {
    "nothing": ({}, lambda length: []),
    "bias": ({"logit_bias": BIAS}, lambda length: [biased(BIAS)]),
    "bad words": (
        {"bad_words": BAD_WORDS},
        lambda length: [hf.NoBadWordsLogitsProcessor([list(word) for word in BAD_WORDS])],
    ),
    "allowed": (
        {"allowed_token_ids": ALLOWED},
        lambda length: [hf.PrefixConstrainedLogitsProcessor(lambda batch, ids: list(ALLOWED), num_beams=1)],
    ),
    "frequency": ({"frequency_penalty": 0.9}, lambda length: [FrequencyPenalty(0.9, length)]),
    "min_tokens": (
        {"min_tokens": 11, "stop_token_ids": STOPS, "logit_bias": END_BIAS},
        lambda length: [
            biased(END_BIAS),
            hf.MinNewTokensLengthLogitsProcessor(length, 11, list(STOPS), device="cpu"),
        ],
    ),
    "all": (
        {
            "logit_bias": BIAS,
            "bad_words": BAD_WORDS,
            "allowed_token_ids": ALLOWED,
            "frequency_penalty": -0.4,
            "repetition_penalty": 1.3,
        },
        lambda length: [
            biased(BIAS),
            hf.RepetitionPenaltyLogitsProcessor(1.3),
            FrequencyPenalty(-0.4, length),
            hf.NoBadWordsLogitsProcessor([list(word) for word in BAD_WORDS]),
            hf.PrefixConstrainedLogitsProcessor(lambda batch, ids: list(ALLOWED), num_beams=1),
        ],
    ),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServices]:
    """A model with an end token."""
    folder = save("llama", tmp_path_factory.mktemp("model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": END_TOKEN}))
    with LocalServices.start(model=folder, num_blocks=NUM_BLOCKS, extra_worker_args=ARGUMENTS) as services:
        yield services


def connect(services: LocalServices) -> Engine:
    return Engine.connect(services.cachemgr_address, config=EngineConfig(max_step_tokens=MAX_STEP_TOKENS))


def complete(services: LocalServices, *requests: tuple[list[int], SamplingParams]) -> list[Completion]:
    async def main() -> list[Completion]:
        async with connect(services) as engine:
            prompts, params = zip(*requests, strict=True)
            return await engine.complete(list(prompts), list(params))

    return asyncio.run(main())


def complete_one(services: LocalServices, **fields: Any) -> Completion:
    (completion,) = complete(services, (PROMPTS[0], SamplingParams(**{"temperature": 0, "max_tokens": 9} | fields)))
    return completion


def expected_tokens(model: Any, prompt: list[int], make_processors: MakeProcessors) -> tuple[int, ...]:
    """Greedy, by transformers alone; as far as the first stop token after min_tokens of "min_tokens"."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        eos_token_id=None,
        logits_processor=hf.LogitsProcessorList(make_processors(len(prompt))),
    )
    return tuple(output[0, len(prompt) :].tolist())


def test_tokens_equal_transformers(services: LocalServices, model: Any) -> None:
    """Everything in one batch, in a pool in which not all of it fits; with a fork of each."""

    async def main() -> list[Completion]:
        async with connect(services) as engine:
            params = [
                SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, n=2, **fields)
                for fields, _ in ASKED.values()
                for _ in PROMPTS
            ]
            completions = await engine.complete(PROMPTS * len(ASKED), params)
            statistics = engine.statistics()
            assert statistics.scheduler.preemptions > 0
            assert statistics.scheduler.forks > 0
            assert (statistics.recoveries, statistics.scheduler.failed_steps) == (0, 0)
            return completions

    completions = iter(asyncio.run(main()))
    plain = [expected_tokens(model, prompt, lambda length: []) for prompt in PROMPTS]
    for name, (_, make_processors) in ASKED.items():
        by_prompt = [expected_tokens(model, prompt, make_processors) for prompt in PROMPTS]
        assert name == "nothing" or by_prompt != plain, f"{name} changes nothing"
        for number, expected in enumerate(by_prompt):
            for sample in next(completions).samples:
                tokens = sample.token_ids
                if name == "min_tokens":
                    assert len(tokens) == 12
                    assert tokens[-1] in STOPS
                    assert sample.finish_reason is FinishReason.STOP
                else:
                    assert len(tokens) == NUM_NEW
                assert tokens == expected[: len(tokens)], (name, number)


def test_drawn_tokens_are_the_same_after_a_preemption(services: LocalServices) -> None:
    """Each with all parameters, alone and in a batch that does not fit."""
    fields, _ = ASKED["all"]
    params = [
        SamplingParams(temperature=0.8, top_k=9, max_tokens=NUM_NEW, ignore_eos=True, seed=seed, **fields)
        for seed in range(len(PROMPTS))
    ]
    requests = list(zip(PROMPTS, params, strict=True))
    alone = [complete(services, request)[0].token_ids for request in requests]
    assert [completion.token_ids for completion in complete(services, *requests)] == alone


# -- ends ---------------------------------------------------------------------------------------------------------


def test_min_tokens_ignore_eos_and_stop_token_ids(services: LocalServices) -> None:
    end = END_TOKEN
    ends = {"logit_bias": {end: 100.0}}

    def ended(**fields: Any) -> tuple[int, FinishReason, bool]:
        (sample,) = complete_one(services, **fields).samples
        assert sample.token_ids.count(end) == (sample.token_ids[-1] == end) or "ignore_eos" in fields
        return len(sample.token_ids), sample.finish_reason, sample.token_ids[-1] == end

    stop, length = FinishReason.STOP, FinishReason.LENGTH
    assert ended(**ends) == (1, stop, True)
    assert ended(**ends, min_tokens=1) == (2, stop, True)
    assert ended(**ends, min_tokens=5) == (6, stop, True)
    assert ended(**ends, min_tokens=9) == (9, length, False)
    assert ended(**ends, ignore_eos=True) == (9, length, True)
    assert ended(**ends, ignore_eos=True, min_tokens=5, stop_token_ids=(end,)) == (6, stop, True)
    assert ended(logit_bias={7: 100.0}, stop_token_ids=(6, 7)) == (1, stop, False)


def test_a_bias_forces_a_token_and_forbids_one(services: LocalServices) -> None:
    assert complete_one(services, ignore_eos=True, logit_bias={17: 100.0}).token_ids == (17,) * 9
    plain = complete_one(services, ignore_eos=True).token_ids
    assert plain[0] not in complete_one(services, ignore_eos=True, logit_bias={plain[0]: -100.0}).token_ids


# -- log-probabilities of prompts ---------------------------------------------------------------------------------

LONG = draw_tokens(70, seed=77)


def assert_prompt_logprobs(completion: Completion, model: Any, *, num_top: int) -> None:
    prompt = list(completion.prompt_token_ids)
    found = completion.prompt_logprobs
    assert found is not None
    assert len(found) == len(prompt)
    assert found[0] is None
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    for position, entry in enumerate(found[1:], start=1):
        assert entry is not None
        before = expected[position - 1]
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(float(before[prompt[position]]), abs=2e-4)
        assert [value for _, value in entry.top] == pytest.approx(before.topk(num_top).values.tolist(), abs=2e-4)
        assert [float(before[token]) for token, _ in entry.top] == pytest.approx(
            [value for _, value in entry.top], abs=2e-4
        )


def test_log_probabilities_of_prompts_in_chunks(services: LocalServices, model: Any) -> None:
    """Beside other requests, with other numbers or none; prompts that are not cached."""
    prompts = [draw_tokens(count, seed=100 + count) for count in (1, 2, 13, 14, 15, 40, 61)]
    asked = [0, 3, 20, None, 1, 5, 2]
    requests = [
        (prompt, SamplingParams(max_tokens=2, ignore_eos=True, n=1 + (count == 5), logprobs=1, prompt_logprobs=count))
        for prompt, count in zip(prompts, asked, strict=True)
    ]
    for completion, count in zip(complete(services, *requests), asked, strict=True):
        if count is None:
            assert completion.prompt_logprobs is None
        else:
            assert_prompt_logprobs(completion, model, num_top=count)
        assert all(sample.logprobs is not None and len(sample.logprobs) == 2 for sample in completion.samples)


def test_log_probabilities_of_a_prompt_that_is_cached(services: LocalServices, model: Any) -> None:
    prompt = draw_tokens(33, seed=400)
    plain, asked = SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, prompt_logprobs=1)
    complete(services, (prompt, plain))
    for completion in complete(services, (prompt, asked), (prompt, asked)):
        assert_prompt_logprobs(completion, model, num_top=1)


def test_they_come_once_with_the_first_token(services: LocalServices) -> None:
    async def main() -> None:
        async with connect(services) as engine:
            params = SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=1)
            chunks = [chunk async for chunk in engine.generate(draw_tokens(30, seed=201), params)]
        assert chunks[0].prompt_logprobs is not None
        assert all(chunk.prompt_logprobs is None for chunk in chunks[1:])

    asyncio.run(main())


def test_log_probabilities_of_a_prompt_that_is_preempted_in_its_midst(services: LocalServices, model: Any) -> None:
    async def main() -> Completion:
        async with connect(services) as engine:
            low = asyncio.create_task(engine.complete([LONG], max_tokens=2, prompt_logprobs=2, priority=-1))
            while engine.statistics().scheduler.scheduled_tokens < 2 * MAX_STEP_TOKENS:
                await asyncio.sleep(0)
            high = asyncio.create_task(
                engine.complete(
                    [draw_tokens(30, seed=300), draw_tokens(30, seed=301)], max_tokens=10, ignore_eos=True, priority=1
                )
            )
            while not engine.statistics().scheduler.preemptions:
                await asyncio.sleep(0)
                assert not high.done()
            assert engine.statistics().scheduler.sampled_tokens == 0 or not low.done()
            await high
            (completion,) = await low
            return completion

    assert_prompt_logprobs(asyncio.run(main()), model, num_top=2)


# -- bad values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("logit_bias", {"logit_bias": {VOCAB_SIZE: 1.0}}),
        ("allowed_token_ids", {"allowed_token_ids": (1, VOCAB_SIZE)}),
        ("bad_words", {"bad_words": ((1, VOCAB_SIZE),)}),
        ("bad_words", {"bad_words": ("a text",)}),
        ("bad_words", {"bad_words": tuple((token,) for token in range(VOCAB_SIZE))}),
        ("allowed_token_ids", {"allowed_token_ids": (4,), "bad_words": ((4,),)}),
        ("allowed_token_ids", {"allowed_token_ids": (4,), "min_tokens": 1, "stop_token_ids": (4,)}),
        ("prompt_logprobs", {"prompt_logprobs": 21}),
        ("stop_token_ids", {"stop_token_ids": (VOCAB_SIZE,)}),
    ],
    ids=str,
)
def test_what_the_model_can_not_do_is_refused_before_anything_is_planned(
    field: str, fields: dict[str, Any], services: LocalServices
) -> None:
    async def main() -> None:
        async with connect(services) as engine:
            with pytest.raises(InvalidRequest) as caught:
                engine.generate(PROMPTS[0], SamplingParams(max_tokens=4, **fields))
            assert caught.value.metadata["field"] == field
            assert {"value", "limit"} <= set(caught.value.metadata)
            assert engine.statistics().scheduler.planned_steps == 0

    asyncio.run(main())
