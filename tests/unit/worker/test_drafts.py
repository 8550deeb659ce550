"""Steps that verify drafts give the tokens that steps of one token give, whatever the drafts are."""

from __future__ import annotations

import random
from dataclasses import replace

import model_zoo as zoo
import numpy as np
import pytest
from executor_driver import ExecutorDriver, Stream, make_prompts

from quire.worker.grant.decoding import RowSampling
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.preparing import prepare_model
from quire.worker.run.executor import Outcome, TokenLogprobs
from quire.worker.sampling.constraints import Constraints
from quire.worker.sampling.parameters import SamplingParams

MAX_MODEL_LEN = 64
NUM_NEW = 20
END_IDS = np.array([1, 2], dtype=np.int64)
SAMPLED = (
    SamplingParams(num_logprobs=3),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.95, seed=11),
    SamplingParams(
        temperature=0.9, seed=5, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7, num_logprobs=0
    ),
    SamplingParams(frequency_penalty=0.6, repetition_penalty=1.1),
    SamplingParams(
        temperature=1.2,
        seed=7,
        num_logprobs=1,
        constraints=Constraints(
            allowed_token_ids=np.arange(12),
            bad_words=((3,), (5, 9), (7, 2, 4), (9, 9)),
            logit_bias={9: 3.0, 5: 3.0, 2: 2.0},
            min_seq_tokens=32,
            end_token_ids=END_IDS,
        ),
    ),
)
"""The parameters of each prompt's sequence."""


@pytest.fixture(scope="module")
def model() -> PagedModel:
    return prepare_model(zoo.build("llama"), max_model_len=MAX_MODEL_LEN)


def rows_of(streams: list[Stream], prompts: list[list[int]]) -> dict[int, RowSampling]:
    return {
        stream.seq_id: RowSampling(params, prompt_token_ids=prompt, last_token_ids=prompt[-5:])
        for stream, params, prompt in zip(streams, SAMPLED, prompts, strict=True)
    }


class Conversation:
    """Sequences of a driver, with the log-probabilities that each has got with its tokens."""

    def __init__(self, driver: ExecutorDriver, prompts: list[list[int]]) -> None:
        self.driver = driver
        self.prompts = prompts
        self.streams = [driver.admit(prompt) for prompt in prompts]
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.num_steps = 0
        self.step([(stream, len(stream.tokens)) for stream in self.streams], sampling=True)

    def step(
        self, counts: list[tuple[Stream, int]], drafts: dict[int, list[int]] | None = None, *, sampling: bool = False
    ) -> None:
        rows = rows_of(self.streams, self.prompts) if sampling else {}
        assert self.driver.step(counts, rows, drafts or {}) is Outcome.COMPUTED
        self.num_steps += 1
        for entry in self.driver.result.logprobs:
            self.logprobs.setdefault(entry.seq_id, []).append(entry)

    def missing(self, stream: Stream) -> int:
        return len(self.prompts[self.streams.index(stream)]) + NUM_NEW - len(stream.tokens)

    def unfinished(self) -> list[Stream]:
        return [stream for stream in self.streams if self.missing(stream) > 0]

    def tokens(self) -> list[list[int]]:
        lengths = [len(prompt) + NUM_NEW for prompt in self.prompts]
        return [stream.tokens[:length] for stream, length in zip(self.streams, lengths, strict=True)]


def without_drafts(model: PagedModel, prompts: list[list[int]]) -> Conversation:
    """The tokens of steps of one token each."""
    conversation = Conversation(ExecutorDriver(model), prompts)
    while unfinished := conversation.unfinished():
        conversation.step([(stream, 1) for stream in unfinished])
    return conversation


def guesses(right: list[int], stream: Stream, most: int, draw: random.Random, *, vocab_size: int) -> list[int]:
    """Drafts for a stream, of which the first few are right, at most all of them, at least none."""
    known = right[len(stream.tokens) : len(stream.tokens) + most]
    num_right = draw.randint(0, len(known))
    wrong = [draw.randrange(vocab_size) for _ in known[num_right:]]
    return known[:num_right] + wrong


def assert_equal_logprobs(found: Conversation, expected: Conversation) -> None:
    for stream, other in zip(found.streams, expected.streams, strict=True):
        pairs = list(zip(found.logprobs.get(stream.seq_id, []), expected.logprobs.get(other.seq_id, []), strict=False))
        assert len(pairs) >= (NUM_NEW if other.seq_id in expected.logprobs else 0)
        for one, two in pairs:
            assert one.sampled == pytest.approx(two.sampled, abs=1e-4)
            assert one.top == pytest.approx(two.top, abs=1e-4)
            assert len(one.top_token_ids) == len(two.top_token_ids)


def verify(model: PagedModel, prompts: list[list[int]], *, seed: int) -> tuple[Conversation, Conversation]:
    """Run the prompts without drafts, and with drafts of all kinds beside sequences that have none."""
    expected = without_drafts(model, prompts)
    right = [stream.tokens for stream in expected.streams]
    draw = random.Random(seed)
    found = Conversation(ExecutorDriver(model), prompts)
    while unfinished := found.unfinished():
        draw.shuffle(unfinished)
        drafts = {
            stream.seq_id: guesses(
                right[found.streams.index(stream)],
                stream,
                draw.choice((0, 1, 2, 3, 5, 8)),
                draw,
                vocab_size=model.vocab_size,
            )
            for stream in unfinished
        }
        found.step([(stream, 1) for stream in unfinished], drafts)
        found.driver.pool.check_invariants()
    return found, expected


@pytest.mark.parametrize("seed", range(3))
def test_drafts_give_the_tokens_of_steps_without_them(model: PagedModel, seed: int) -> None:
    found, expected = verify(model, make_prompts(), seed=seed)
    assert found.tokens() == expected.tokens()
    assert_equal_logprobs(found, expected)
    assert found.num_steps < expected.num_steps
