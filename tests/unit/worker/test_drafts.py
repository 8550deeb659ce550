"""Steps that verify drafts give the tokens that steps of one token give, whatever the drafts are."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import model_zoo as zoo
import numpy as np
import pytest
import torch
from executor_driver import ExecutorDriver, Stream, make_prompts

from quire.cache.v1 import grant_pb2
from quire.worker.grant.decoding import AcceptedStep, RowSampling
from quire.worker.memory import step_batch
from quire.worker.memory.step_batch import DraftCounts
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.preparing import prepare_model
from quire.worker.run import executor
from quire.worker.run.executor import Executor, Outcome, StepResult, TokenLogprobs
from quire.worker.sampling.constraints import Constraints
from quire.worker.sampling.drafts import VOID, DraftRows
from quire.worker.sampling.parameters import SamplingParams
from quire.worker.sampling.sampler import Sampler

MAX_MODEL_LEN = 64
NUM_NEW = 20
CPU = torch.device("cpu")
MAX_COUNT = 2**15 - 1
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
FAMILIES = (
    *("gemma3", "mistral", "gpt_oss", "llama4", "cohere2", "gemma3n"),  # windows and chunks
    *("deepseek_v3", "qwen3_moe", "phi3", "gpt2", "stablelm"),
    *("bloom", "falcon_alibi", "gptj", "gpt_neo", "mpt", "xglm"),  # with their own attention
)


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


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_all_kinds_verify_drafts(family: str) -> None:
    """Blocks behind a window are full of NaN, and handed out again."""
    some = prepare_model(zoo.build(family), max_model_len=MAX_MODEL_LEN)
    found, expected = verify(some, make_prompts(), seed=1)
    assert found.tokens() == expected.tokens()


def test_right_drafts_are_all_accepted_and_wrong_ones_give_one_token(model: PagedModel) -> None:
    prompt = make_prompts()[2]
    driver, other = ExecutorDriver(model), ExecutorDriver(model)
    stream, drafted = driver.admit(prompt), other.admit(prompt)
    driver.step([(stream, len(prompt))])
    other.step([(drafted, len(prompt))])
    for _ in range(9):
        driver.step([(stream, 1)])
    length = len(drafted.tokens)
    right = stream.tokens[length : length + 4]
    wrong = [(token + 1) % model.vocab_size for token in right]
    other.step([(drafted, 1)], drafts={drafted.seq_id: wrong})
    assert (other.result.sampled_counts, other.result.sampled_tokens) == ([1], right[:1])
    right = stream.tokens[length + 1 : length + 5]
    other.step([(drafted, 1)], drafts={drafted.seq_id: right})
    assert (other.result.sampled_counts, other.result.sampled_tokens) == ([5], stream.tokens[length + 1 : length + 6])
    other.step(
        [(drafted, 1)], drafts={drafted.seq_id: [stream.tokens[length + 6], wrong[0], stream.tokens[length + 8]]}
    )
    assert drafted.tokens == stream.tokens[: length + 8]


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_a_sequence_with_rejected_drafts_is_forked_moved_to_the_host_tier_and_goes_on(family: str) -> None:
    """Keys and values of rejected drafts are copied with their block, and nothing reads them."""
    some = prepare_model(zoo.build(family), max_model_len=MAX_MODEL_LEN)
    prompts = make_prompts()
    own = zoo.build(family)
    own.set_attn_implementation("eager")
    expected = zoo.generate(own, prompts[1], 30)
    wrong = [(token + 1) % some.vocab_size for token in expected]
    driver = ExecutorDriver(some)
    parent = driver.admit(prompts[1])
    driver.step([(parent, len(prompts[1]))])

    def step(streams: list[Stream], *, num_right: int) -> None:
        """One step with 6 drafts for those that can have some, of which the first few are right."""
        drafts = {}
        for stream in streams:
            if stream.sampled_at == stream.num_computed:
                at = len(stream.tokens)
                drafts[stream.seq_id] = expected[at : at + num_right] + wrong[at + num_right : at + 6]
        assert driver.step([(stream, 1) for stream in streams], drafts=drafts) is Outcome.COMPUTED

    step([parent], num_right=1)
    child = driver.fork(parent)
    step([parent, child], num_right=2)
    driver.offload(parent)
    step([child], num_right=0)
    driver.restore(parent)
    for _ in range(3):
        step([parent, child], num_right=1)
    driver.pool.check_invariants()
    for stream in (parent, child):
        assert len(stream.tokens) > len(prompts[1]) + 6
        assert stream.tokens == expected[: len(stream.tokens)]


def test_drafts_without_room_for_their_logits_are_run_and_not_accepted(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "max_logits", lambda max_num_seqs: 12)
    found, expected = verify(model, make_prompts(), seed=2)
    assert found.tokens() == expected.tokens()
    assert found.num_steps < expected.num_steps


def test_room_for_logits_is_divided_among_the_runs_with_drafts() -> None:
    given = np.array([0, 5, 2, 8])
    assert DraftCounts.fit(given, most_logits=99).verified.tolist() == [0, 5, 2, 8]
    assert DraftCounts.fit(given, most_logits=14).verified.tolist() == [0, 4, 2, 4]
    assert DraftCounts.fit(given, most_logits=13).verified.tolist() == [0, 3, 2, 3]
    assert DraftCounts.fit(given, most_logits=4).verified.tolist() == [0, 0, 0, 0]
    assert (step_batch.max_logits(3), step_batch.max_logits(400)) == (256, 400)


def test_a_step_with_drafts_that_fails_changes_nothing_of_its_sequences(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts()
    expected = without_drafts(model, prompts)
    found = Conversation(ExecutorDriver(model), prompts)
    right = {
        stream.seq_id: other.tokens[len(stream.tokens) :][:3]
        for stream, other in zip(found.streams, expected.streams, strict=True)
    }

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the model was to fail")

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", fail)
        assert found.driver.step([(stream, 1) for stream in found.streams], drafts=right) is Outcome.FAILED
    found.step([(stream, 1) for stream in found.streams], right)
    assert found.driver.result.sampled_counts == [4] * len(prompts)
    while unfinished := found.unfinished():
        found.step([(stream, 1) for stream in unfinished])
    assert found.tokens() == expected.tokens()


# -- steps launched ahead -----------------------------------------------------------------------------------------

BLOCKS: dict[str, Any] = {
    "write_sequence_ids": [1, 2],
    "write_first_indexes": [0, 0],
    "write_block_counts": [4, 4],
    "write_block_ids": [3, 9, 1, 5, 7, 2, 4, 6],
}


def grant(number: int, **fields: Any) -> grant_pb2.StepGrant:
    return grant_pb2.StepGrant(lease_id="lease", step_number=number, **fields)


def make_step(step_grant: grant_pb2.StepGrant, **given: list[int]) -> AcceptedStep:
    tokens = {int(run.removeprefix("run")): np.array(ids, dtype=np.int32) for run, ids in given.items()}
    return AcceptedStep(step_grant, tokens)


def test_steps_of_other_sequences_are_launched_behind_a_step_with_drafts(model: PagedModel) -> None:
    """The sequence's next position is known when its step has ended; until then the others do not wait for it."""

    def decode(number: int, seq_id: int, start: int, drafts: list[int] | None = None) -> AcceptedStep:
        runs = {"run_sequence_ids": [seq_id], "run_starts": [start], "run_samples": [True]}
        counts = {"run_token_counts": [1 + len(drafts or [])]}
        if not drafts:
            return make_step(grant(number, **runs, **counts))
        return make_step(grant(number, **runs, **counts, run_draft_counts=[len(drafts)]), run0=drafts)

    def start_both(some: Executor) -> StepResult:
        runs = {"run_sequence_ids": [1, 2], "run_starts": [0, 0], "run_token_counts": [6, 2]}
        first = grant(1, **BLOCKS, **runs, run_samples=[True, True])
        return some.execute(make_step(first, run0=[5, 9, 2, 11, 3, 8], run1=[7, 1]))

    def make() -> Executor:
        return Executor(model, model.make_pool(num_blocks=12, block_size=4), max_num_seqs=4)

    plain, ahead = make(), make()
    expected = {1: [start_both(plain).sampled_tokens[0]], 2: [start_both(ahead).sampled_tokens[1]]}
    number = 1
    for seq_id, start, count in ((1, 6, 5), (2, 2, 2)):
        for offset in range(count):
            number += 1
            expected[seq_id] += plain.execute(decode(number, seq_id, start + offset)).sampled_tokens
    wrong = (expected[1][3] + 1) % model.vocab_size
    drafted = ahead.launch(decode(2, 1, 6, [*expected[1][1:3], wrong]))
    behind = [ahead.launch(decode(3 + offset, 2, 2 + offset)) for offset in range(2)]
    assert (drafted.collect().sampled_tokens, drafted.collect().sampled_counts) == (expected[1][1:4], [3])
    assert [token for each in behind for token in each.collect().sampled_tokens] == expected[2][1:]
    assert ahead.execute(decode(5, 1, 9)).sampled_tokens == expected[1][4:5]
    released = ahead.launch(decode(6, 1, 10, [1, 2]))
    gone = replace(decode(7, 2, 4), grant=grant(7, released_sequence_ids=[1]))
    assert ahead.launch(gone).collect().outcome is Outcome.COMPUTED
    assert released.collect().outcome is Outcome.COMPUTED
    assert ahead._unsettled == {}


def test_a_run_elsewhere_than_behind_the_accepted_drafts_fails(model: PagedModel) -> None:
    driver, prompt = ExecutorDriver(model), make_prompts()[0]
    stream = driver.admit(prompt)
    driver.step([(stream, len(prompt))])
    driver.step([(stream, 1)], drafts={stream.seq_id: [1, 2, 3]})
    num_accepted = driver.result.sampled_counts[0] - 1
    stream.num_computed += 3 - num_accepted
    stream.sampled_at = stream.num_computed
    if num_accepted < 3:
        assert driver.step([(stream, 1)]) is Outcome.FAILED


# -- rows of a sample ---------------------------------------------------------------------------------------------


def test_tokens_are_kept_up_to_the_first_that_is_not_its_draft() -> None:
    rows = DraftRows([[4, 5, 6], [], [7, 8], [9], [3, 3]], CPU)
    assert rows.counts.tolist() == [4, 1, 3, 2, 3]
    assert rows.offsets.tolist() == [0, 1, 2, 3, 0, 0, 1, 2, 0, 1, 0, 1, 2]
    tokens = torch.tensor([4, 0, 6, 1, 2, 7, 8, 5, 9, VOID, 3, VOID, 3])
    kept = rows.keep(tokens)
    assert kept.counts.tolist() == [2, 1, 3, 1, 1]
    assert torch.nonzero(kept.is_kept)[:, 0].tolist() == [0, 1, 4, 5, 6, 7, 8, 10]
    assert (torch.arange(13) + kept.to_newest).tolist() == [1, 1, 1, 1, 4, 7, 7, 7, 8, 8, 10, 10, 10]
    assert rows.newest(tokens, kept).tolist() == [0, 2, 5, 9, 3]


def test_a_row_knows_the_drafts_before_it() -> None:
    rows = DraftRows([[4, 5, 6], [], [7, 8]], CPU)
    places = np.array([0, 1, 2, 3, 5, 6, 7])
    index, tokens = rows.before(places)
    before: dict[int, set[int]] = {}
    for row, token in zip(index.tolist(), tokens.tolist(), strict=True):
        before.setdefault(row, set()).add(token)
    assert before == {1: {4}, 2: {4, 5}, 3: {4, 5, 6}, 5: {7}, 6: {7, 8}}
    latest, columns = rows.latest(np.array([0, 1, 3]), 2)
    assert latest.tolist() == [[-2, -2], [-2, 4], [5, 6]]
    assert columns.tolist() == [[0, 1], [1, 1], [1, 1]]


def test_a_token_is_counted_once_for_each_accepted_draft_up_to_the_limit_of_counts() -> None:
    """Of a sequence that repeats one token; a rejected row's token is the same one, and not counted."""
    sampler = Sampler(max_num_seqs=2, vocab_size=8, device=CPU)
    sampler.set_params(1, SamplingParams(frequency_penalty=0.001), output_token_ids=[3] * (MAX_COUNT - 3))
    sampler.set_params(0, SamplingParams(frequency_penalty=0.001))
    logits = torch.zeros(8, 8)
    logits[:, 3] = 100.0
    drafts = DraftRows([[3, 3, 5, 3], [3, 3]], CPU)
    rows = [1] * 5 + [0] * 3
    sampled = sampler.sample(logits, rows, list(range(8)), drafts=drafts)
    assert sampled.tokens.tolist() == [3] * 8
    assert sampler._counts[:, 3].tolist() == [3, MAX_COUNT]
    sampler.sample(logits, rows, list(range(8)), drafts=drafts)
    assert sampler._counts[:, 3].tolist() == [6, MAX_COUNT]
