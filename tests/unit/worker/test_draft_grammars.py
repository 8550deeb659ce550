"""Sequences that follow a grammar, with drafts: the tokens are those of steps without drafts."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path
from typing import Any

import pytest
import text_model
import torch
from executor_driver import MAX_MODEL_LEN, ExecutorDriver

from quire.worker.grant.decoding import RowSampling
from quire.worker.model.checkpoint import load_model
from quire.worker.model.model_source import find_tokenizer
from quire.worker.model.paged_model import PagedModel
from quire.worker.run.executor import Outcome
from quire.worker.sampling import grammar_masks
from quire.worker.sampling.grammars import Grammar, Grammars, load_grammars
from quire.worker.sampling.parameters import SamplingParams

CPU = torch.device("cpu")
END_ID = text_model.make_tokenizer().token_to_id(text_model.END)
VOCAB_SIZE = text_model.make_tokenizer().get_vocab_size() + 5


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_model.save(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def grammars(text_folder: Path) -> Any:
    loaded = load_grammars(find_tokenizer(str(text_folder)), vocab_size=VOCAB_SIZE, end_token_ids=[END_ID])
    assert isinstance(loaded, Grammars)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def writer(text_folder: Path) -> PagedModel:
    return load_model(str(text_folder), dtype=torch.float32, device=CPU, max_model_len=MAX_MODEL_LEN)


def write_text(
    writer: PagedModel, grammars: Grammars, *, guess: list[int] | None, most: int = 0, seed: int = 3
) -> tuple[list[int], int]:
    """The tokens that follow a grammar behind a prompt, and the number of steps; with drafts some of them are right."""
    driver, prompt = ExecutorDriver(writer), [5, 9, 2, 11, 3, 8]
    following = asyncio.run(grammars.follow(Grammar("regex", "[a-c]{6}(x|yz)[0-9]{4}"), begins_at=6, tokens=[]))
    stream = driver.admit(prompt)
    bound = RowSampling(SamplingParams(temperature=1.0, seed=seed), following=following)
    driver.step([(stream, len(prompt))], {stream.seq_id: bound})
    draw, num_steps = random.Random(seed), 0
    while END_ID not in stream.tokens:
        drafts = []
        if guess is not None:
            known = guess[len(stream.tokens) - len(prompt) :][:most]
            num_right = draw.randint(0, len(known))
            drafts = known[:num_right] + [draw.randrange(VOCAB_SIZE) for _ in known[num_right:]]
        assert driver.step([(stream, 1)], drafts={stream.seq_id: drafts}) is Outcome.COMPUTED
        assert not driver.result.grammar_failures
        assert not driver.result.late_ids
        num_steps += 1
    end = stream.tokens.index(END_ID) + 1  # a draft behind it may be right, too
    return stream.tokens[len(prompt) : end], num_steps


@pytest.mark.parametrize("most", [1, 3, 8])
def test_drafts_follow_a_grammar_as_far_as_it_goes_with_them(writer: PagedModel, grammars: Grammars, most: int) -> None:
    """Some drafts are refused by the grammar, some are end tokens, some are allowed and not those drawn."""
    expected, num_steps = write_text(writer, grammars, guess=None)
    text = text_model.make_tokenizer().decode(expected[:-1])
    assert re.fullmatch("[a-c]{6}(x|yz)[0-9]{4}", text)
    found, num_drafted = write_text(writer, grammars, guess=expected, most=most)
    assert found == expected
    assert num_drafted < num_steps


def test_masks_behind_drafts_that_are_not_made_in_time_cost_drafts_and_no_tokens(
    writer: PagedModel, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, num_steps = write_text(writer, grammars, guess=None)
    monkeypatch.setattr(grammar_masks, "DRAFTS_TIME_S", 0.0)
    assert write_text(writer, grammars, guess=expected, most=8) == (expected, num_steps)
