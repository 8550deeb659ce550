"""Constraints and biases of a row, against transformers' logits processors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from quire.compute.v1.sampling_ranges import MAX_BAD_WORD_TOKENS, MAX_LOGIT_BIASES
from quire.worker.sampling.constraints import Constraints
from quire.worker.sampling.parameters import SamplingParams
from quire.worker.sampling.sampler import Sampler

VOCAB = 40
PROMPT = [3, 7, 7, 19, 30]
NUM_STEPS = 60


def ids(*token_ids: int) -> Any:
    return np.array(token_ids, dtype=np.int64)


def make_sampler(*params: SamplingParams, max_num_seqs: int | None = None, vocab_size: int = VOCAB) -> Sampler:
    """Row i has params[i], with PROMPT as what its sequence holds."""
    sampler = Sampler(max_num_seqs=max_num_seqs or len(params), vocab_size=vocab_size, device="cpu")
    for row, each in enumerate(params):
        sampler.set_params(row, each, prompt_token_ids=PROMPT, last_token_ids=PROMPT)
    return sampler


def logits_of_step(step: int, rows: int = 1, *, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(step)) * 2


def generate(sampler: Sampler, row: int = 0, *, num_steps: int = NUM_STEPS, first_step: int = 0) -> list[int]:
    tokens = []
    for step in range(first_step, first_step + num_steps):
        sampled = sampler.sample(logits_of_step(step), [row], [len(PROMPT) + step])
        tokens.append(int(sampled.tokens.item()))
    return tokens


def generate_with(processors: hf.LogitsProcessorList, *, num_steps: int = NUM_STEPS) -> list[int]:
    """Greedy, over the same logits, by transformers."""
    tokens: list[int] = list(PROMPT)
    for step in range(num_steps):
        scores = processors(torch.tensor([tokens]), logits_of_step(step))
        tokens.append(int(scores.argmax(-1)))
    return tokens[len(PROMPT) :]


BAD_WORDS = ((4,), (11, 5), (7, 12, 30), *((30, token) for token in range(1, 20)), *((a, 9) for a in range(0, 40, 2)))
BIAS = {2: 3.0, 17: -50.0, 23: 1.5, 39: -0.25}
ENDS = [8, 23]


def test_bad_words_equal_transformers() -> None:
    expected = generate_with(hf.LogitsProcessorList([hf.NoBadWordsLogitsProcessor([list(w) for w in BAD_WORDS])]))
    tokens = generate(make_sampler(SamplingParams(constraints=Constraints(bad_words=BAD_WORDS))))
    assert tokens == expected
    assert tokens != generate(make_sampler(SamplingParams())), "nothing was forbidden"
    whole = [*PROMPT, *tokens]
    for word in BAD_WORDS:
        found = [i for i in range(len(PROMPT) - len(word) + 1, len(whole)) if whole[i : i + len(word)] == list(word)]
        assert not found


def test_bias_equals_transformers() -> None:
    processor = hf.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in BIAS.items()])
    tokens = generate(make_sampler(SamplingParams(constraints=Constraints(logit_bias=BIAS))))
    assert tokens == generate_with(hf.LogitsProcessorList([processor]))
    assert tokens != generate(make_sampler(SamplingParams()))


def test_delayed_end_equals_transformers() -> None:
    """The first end token can come at the first position that is allowed, and no earlier."""
    min_new = 25
    processor = hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), min_new, ENDS, device="cpu")
    likely_ends = hf.SequenceBiasLogitsProcessor([[[token], 30.0] for token in ENDS])
    constraints = Constraints(
        min_seq_tokens=len(PROMPT) + min_new, end_token_ids=ids(*ENDS), logit_bias=dict.fromkeys(ENDS, 30.0)
    )
    tokens = generate(make_sampler(SamplingParams(constraints=constraints)))
    assert tokens == generate_with(hf.LogitsProcessorList([likely_ends, processor]))
    assert [step for step, token in enumerate(tokens) if token in ENDS] == list(range(min_new, NUM_STEPS))


def test_allowed_tokens_equal_transformers() -> None:
    allowed = [0, 5, 6, 31, 39]
    processor = hf.PrefixConstrainedLogitsProcessor(lambda batch, seen: allowed, num_beams=1)
    tokens = generate(make_sampler(SamplingParams(constraints=Constraints(allowed_token_ids=ids(*allowed)))))
    assert tokens == generate_with(hf.LogitsProcessorList([processor]))
    assert set(tokens) <= set(allowed)


def test_everything_in_the_order_of_transformers() -> None:
    """Bias before the repetition penalty, as in generate(); forbidden tokens commute with the rest."""
    allowed = list(range(1, VOCAB, 2)) + ENDS
    constraints = Constraints(
        allowed_token_ids=ids(*allowed),
        bad_words=BAD_WORDS,
        min_seq_tokens=len(PROMPT) + 20,
        end_token_ids=ids(*ENDS),
        logit_bias=BIAS,
    )
    processors = hf.LogitsProcessorList(
        [
            hf.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in BIAS.items()]),
            hf.RepetitionPenaltyLogitsProcessor(1.4),
            hf.NoBadWordsLogitsProcessor([list(word) for word in BAD_WORDS]),
            hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 20, ENDS, device="cpu"),
            hf.PrefixConstrainedLogitsProcessor(lambda batch, seen: allowed, num_beams=1),
        ]
    )
    tokens = generate(make_sampler(SamplingParams(repetition_penalty=1.4, constraints=constraints)))
    assert tokens == generate_with(processors)


def penalized(logits: torch.Tensor, counts: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """OpenAI's formula of both penalties, in float64."""
    return logits.double() - counts * params.frequency_penalty - (counts > 0) * params.presence_penalty


@pytest.mark.parametrize("penalty", [-0.5, 0.7, 2.0])
def test_frequency_penalty_counts_each_generated_token(penalty: float) -> None:
    params = SamplingParams(frequency_penalty=penalty, presence_penalty=0.3)
    sampler = Sampler(max_num_seqs=2, vocab_size=VOCAB, device="cpu")
    history = [7, 7, 7, 21]
    sampler.set_params(1, params, prompt_token_ids=PROMPT, output_token_ids=history)
    counts = torch.bincount(torch.tensor(history), minlength=VOCAB)
    for step in range(NUM_STEPS):
        logits = logits_of_step(step % 3)
        token = int(sampler.sample(logits, [1], [step]).tokens.item())
        assert token == int(penalized(logits[0], counts, params).argmax())
        counts[token] += 1
    assert int(counts.max()) > 2


def test_a_count_stays_at_its_limit() -> None:
    sampler = Sampler(max_num_seqs=1, vocab_size=3, device="cpu")
    sampler.set_params(0, SamplingParams(frequency_penalty=2.0), output_token_ids=[1] * 40_000)
    logits = torch.tensor([[0.0, 100_000.0, 0.0]])
    assert [sampler.sample(logits, [0], [step]).tokens.item() for step in range(3)] == [1, 1, 1]


EACH = {
    "bias": Constraints(logit_bias=BIAS),
    "bad words": Constraints(bad_words=BAD_WORDS),
    "one bad word": Constraints(bad_words=((3, 1),)),
    "allowed": Constraints(allowed_token_ids=ids(1, 2, 3, 23)),
    "delayed": Constraints(min_seq_tokens=len(PROMPT) + 9, end_token_ids=ids(*ENDS), logit_bias={8: 20.0}),
    "never delayed": Constraints(min_seq_tokens=2, end_token_ids=ids(*ENDS), logit_bias={8: 20.0}),
}
MIXTURE = [
    SamplingParams(),
    *(SamplingParams(constraints=each) for each in EACH.values()),
    SamplingParams(temperature=0.9, top_p=0.8, seed=3),
    *(SamplingParams(temperature=1.2, top_k=9, seed=i, constraints=each) for i, each in enumerate(EACH.values())),
    SamplingParams(frequency_penalty=1.0),
    SamplingParams(temperature=0.7, min_p=0.1, frequency_penalty=0.4, repetition_penalty=1.2, seed=8),
]


def test_rows_of_a_batch_do_not_change_one_another() -> None:
    """Each row chooses among the others as it chooses alone, while rows of the batch change."""
    logits = [logits_of_step(step, len(MIXTURE)) for step in range(NUM_STEPS)]
    together: list[list[int]] = [[] for _ in MIXTURE]
    sampler = make_sampler(*MIXTURE)
    for step in range(NUM_STEPS):
        rows = [row for row in range(len(MIXTURE)) if (row + step) % 4]
        tokens = sampler.sample(logits[step][rows], rows, [len(PROMPT) + step] * len(rows)).tokens.tolist()
        for row, token in zip(rows, tokens, strict=True):
            together[row].append(token)
    for row, params in enumerate(MIXTURE):
        one = make_sampler(params)
        steps = [step for step in range(NUM_STEPS) if (row + step) % 4]
        alone = [one.sample(logits[step][[row]], [0], [len(PROMPT) + step]).tokens.item() for step in steps]
        assert together[row] == alone, params


def test_logits_of_the_caller_are_not_changed() -> None:
    logits = logits_of_step(0, len(MIXTURE))
    before = logits.clone()
    make_sampler(*MIXTURE).sample(logits, range(len(MIXTURE)), [6] * len(MIXTURE))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("constraints", EACH.values(), ids=EACH.keys())
def test_a_fork_goes_on_alike_and_on_its_own(constraints: Constraints) -> None:
    params = SamplingParams(frequency_penalty=0.5, constraints=constraints)
    sampler = make_sampler(params, max_num_seqs=3)
    generate(sampler, num_steps=20)
    sampler.fork(0, 2)
    child = generate(sampler, 2, num_steps=20, first_step=20)
    assert generate(sampler, 0, num_steps=20, first_step=20) == child


@pytest.mark.parametrize("constraints", EACH.values(), ids=EACH.keys())
def test_a_row_that_is_set_again_with_its_tokens_goes_on_alike(constraints: Constraints) -> None:
    """As after a preemption."""
    params = SamplingParams(temperature=0.9, seed=5, frequency_penalty=0.5, constraints=constraints)
    expected = generate(make_sampler(params))
    sampler = make_sampler(params, SamplingParams(constraints=EACH["allowed"]))
    first = generate(sampler, num_steps=21)
    sampler.clear(0)
    sampler.clear(1)
    sampler.set_params(
        1, params, output_token_ids=first, last_token_ids=[*PROMPT, *first][-(MAX_BAD_WORD_TOKENS - 1) :]
    )
    assert first + generate(sampler, 1, num_steps=NUM_STEPS - 21, first_step=21) == expected


def test_a_row_without_constraints_has_nothing_of_the_one_before() -> None:
    sampler = make_sampler(SamplingParams(constraints=EACH["allowed"]))
    sampler.set_params(0, SamplingParams(constraints=EACH["bias"]))
    assert generate(sampler) == generate(make_sampler(SamplingParams(constraints=EACH["bias"])))


@pytest.mark.parametrize("constraints", EACH.values(), ids=EACH.keys())
def test_a_fork_of_a_row_without_constraints_has_nothing_of_the_one_before(constraints: Constraints) -> None:
    sampler = make_sampler(SamplingParams(), SamplingParams(constraints=constraints))
    sampler.fork(0, 1)
    assert generate(sampler, 1) == generate(make_sampler(SamplingParams()))


def test_bad_words_that_leave_nothing_are_ignored() -> None:
    constraints = Constraints(allowed_token_ids=ids(1, 2), bad_words=((1, 1), (1, 2), (2, 2)))
    logits = torch.zeros(1, VOCAB)
    logits[0, 1] = 1.0
    sampler = make_sampler(SamplingParams(constraints=constraints))
    assert [sampler.sample(logits, [0], [step]).tokens.item() for step in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("penalty", [3e38, 1e-45])
def test_no_penalty_is_so_large_that_a_forbidden_token_is_chosen(penalty: float, sign: int, temperature: float) -> None:
    """A logit times the penalty is beyond float32, also that of every token that may be chosen."""
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty, constraints=EACH["allowed"])
    sampler = Sampler(max_num_seqs=1, vocab_size=VOCAB, device="cpu")
    sampler.set_params(0, params, prompt_token_ids=list(range(VOCAB)))
    tokens = [sampler.sample(logits_of_step(step).abs() * sign, [0], [step]).tokens.item() for step in range(20)]
    assert set(tokens) <= set(EACH["allowed"].allowed_token_ids.tolist())


def test_log_probabilities_are_of_the_raw_logits() -> None:
    params = SamplingParams(num_logprobs=2, frequency_penalty=1.0, constraints=EACH["allowed"])
    logits = logits_of_step(0)
    sampled = make_sampler(params).sample(logits, [0], [5])
    assert sampled.chosen_logprobs is not None
    torch.testing.assert_close(sampled.chosen_logprobs, logits.log_softmax(-1)[0, sampled.tokens])


def test_end_tokens_alone_may_be_allowed_if_the_sequence_may_end() -> None:
    constraints = Constraints(allowed_token_ids=ids(*ENDS), end_token_ids=ids(*ENDS))
    assert set(generate(make_sampler(SamplingParams(constraints=constraints)))) <= set(ENDS)


def test_the_most_biases_of_many_rows() -> None:
    """256 rows of 1,024 biases: each row chooses a token by its own."""
    vocab_size, num_rows = 4_096, 256
    sampler = Sampler(max_num_seqs=num_rows, vocab_size=vocab_size, device="cpu")
    for row in range(num_rows):
        bias = dict.fromkeys(range(row, row + MAX_LOGIT_BIASES), 1.0) | {row: 100.0}
        sampler.set_params(row, SamplingParams(constraints=Constraints(logit_bias=bias)))
    tokens = sampler.sample(torch.zeros(num_rows, vocab_size), range(num_rows), [0] * num_rows).tokens.tolist()
    assert tokens == list(range(num_rows))


def test_only_rows_without_more_are_drawn_by_kernels() -> None:
    plain = SamplingParams(temperature=1.0)
    for params in (replace(plain, frequency_penalty=0.1), replace(plain, constraints=EACH["bias"])):
        assert make_sampler(plain, params).draws([0, 1]) is None
        assert make_sampler(plain, params).draws([0]) is not None


def test_minus_infinity_in_the_logits_stays() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 3] = 0.0
    assert make_sampler(SamplingParams(constraints=EACH["bias"])).sample(logits, [0], [5]).tokens.item() == 3
