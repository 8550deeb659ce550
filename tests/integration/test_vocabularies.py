"""Models with more logits than their tokenizer has tokens, and with fewer: no id without a token, or without a logit,
ends more than the request that asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import text_model
from tokenizers import AddedToken, Tokenizer

from quire.cli.launch import LocalServices
from quire.client import Completion, Engine, FinishReason, Grammar, InvalidRequest, SamplingParams

NUM_MORE, NUM_FEWER = 5, 4
EXTRA = tuple(f"<extra-{number}>" for number in range(NUM_FEWER))
LETTERS = Grammar(regex="[a-z]{4}")


def tokenizer_of(kind: str) -> Tokenizer:
    tokenizer = text_model.make_tokenizer()
    if kind == "fewer logits":
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in EXTRA])
    return tokenizer


def start(kind: str, folder: Path) -> LocalServices:
    tokenizer = tokenizer_of(kind)
    num_logits = tokenizer.get_vocab_size() + (NUM_MORE if kind == "more logits" else -NUM_FEWER)
    model = text_model.save(folder, tokenizer=tokenizer, vocab_size=num_logits)
    arguments = ("--dtype", "float32", "--threads", "1", "--max-num-seqs", "16")
    return LocalServices.start(model=model, num_blocks=256, extra_worker_args=arguments)


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServices]:
    """Ids behind those of the tokenizer have logits, as Qwen's have."""
    with start("more logits", tmp_path_factory.mktemp("padded")) as services:
        yield services


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServices]:
    """The last tokens of the tokenizer have no logits."""
    with start("fewer logits", tmp_path_factory.mktemp("cut")) as services:
        yield services


def ask(services: LocalServices, *requests: tuple[Any, dict[str, Any]]) -> list[Completion | BaseException]:
    """Return the outcomes of requests that run beside one another and beside one that has nothing special."""

    async def one(engine: Engine, prompt: Any, fields: dict[str, Any]) -> Completion:
        params = SamplingParams(**{"max_tokens": 6, "temperature": 0.0, "seed": 3} | fields)
        [completion] = await engine.complete([prompt], params)
        return completion

    async def main() -> list[Completion | BaseException]:
        async with Engine.connect(services.cachemgr_address) as engine:
            plain: tuple[Any, dict[str, Any]] = ("the", {"max_tokens": 30, "ignore_eos": True})
            alone = await one(engine, *plain)
            each = [one(engine, prompt, fields) for prompt, fields in (plain, *requests)]
            beside, *outcomes = await asyncio.gather(*each, return_exceptions=True)
            assert isinstance(beside, Completion)
            assert beside.samples[0].token_ids == alone.samples[0].token_ids
            assert engine.statistics().recoveries == 0
            return outcomes

    return asyncio.run(main())


def test_ids_without_a_token_have_no_text_and_match_no_grammar(padded: LocalServices) -> None:
    """mlx-vlm#1917, mlc-llm#2651: a grammar, or the text, ended the engine at such an id."""
    num_tokens = tokenizer_of("more logits").get_vocab_size()
    gap = tuple(range(num_tokens, num_tokens + NUM_MORE))
    forced, hot, led, pulled, scored = ask(
        padded,
        ("ab", {"allowed_token_ids": gap, "logprobs": 3, "stop": "a"}),
        ("ab", {"temperature": 3.0, "max_tokens": 100, "ignore_eos": True}),
        ([5, *gap], {"grammar": LETTERS}),
        ([5, *gap], {"grammar": LETTERS, "logit_bias": dict.fromkeys(gap, 100.0)}),
        ([5, *gap], {"prompt_logprobs": 2, "bad_words": ((gap[0],), (5, gap[1]))}),
    )
    assert isinstance(forced, Completion)
    assert (forced.samples[0].text, len(forced.samples[0].token_ids)) == ("", 6)
    assert set(forced.samples[0].token_ids) <= set(gap)
    assert isinstance(hot, Completion)
    assert len(hot.samples[0].token_ids) == 100
    for followed in (led, pulled):
        assert isinstance(followed, Completion)
        assert followed.samples[0].finish_reason is FinishReason.STOP
        assert len(followed.samples[0].text) == 4
        assert followed.samples[0].text.isalpha()
    assert isinstance(scored, Completion)


def test_tokens_without_a_logit_are_refused_by_the_field_that_has_them(cut: LocalServices) -> None:
    """CVE-2026-93840: ids were compared with the tokenizer's length, and written into the neighbour's logits."""
    last = tokenizer_of("fewer logits").get_vocab_size() - 1
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (f"ab{EXTRA[-1]}", {}, "prompt"),
        ([5, last], {}, "prompt"),
        ("ab", {"bad_words": (EXTRA[-1],)}, "bad_words"),
        ("ab", {"bad_words": ((5, last),)}, "bad_words"),
        ("ab", {"stop_token_ids": (last,), "min_tokens": 2}, "stop_token_ids"),
        ("ab", {"allowed_token_ids": (5, last)}, "allowed_token_ids"),
        ("ab", {"logit_bias": {last: 5.0}}, "logit_bias"),
        ("ab", {"grammar": LETTERS}, "grammar"),
    ]
    outcomes = ask(cut, *((prompt, fields) for prompt, fields, _ in cases))
    for (prompt, fields, name), outcome in zip(cases, outcomes, strict=True):
        assert isinstance(outcome, InvalidRequest), (prompt, fields, outcome)
        assert outcome.metadata["field"] == name
