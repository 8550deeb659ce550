"""The sampler against transformers' logits processors, and its promises about seeds, batches and log-probabilities."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from quire.worker.sampling import gumbel
from quire.worker.sampling import sampler as sampler_module
from quire.worker.sampling.constraints import NUM_REMEMBERED
from quire.worker.sampling.parameters import SamplingParams
from quire.worker.sampling.sampler import Sampler, SamplerStatistics

VOCAB = 50
PROMPT = [3, 7, 7, 19, 40]
OUTPUT = [7, 21, 30]

FILTERS = {
    "temperature": SamplingParams(temperature=0.7),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(temperature=1.0, top_k=5),
    "top_k of one": SamplingParams(temperature=1.0, top_k=1),
    "top_k beyond the vocabulary": SamplingParams(temperature=1.0, top_k=VOCAB + 9),
    "top_p": SamplingParams(temperature=1.0, top_p=0.6),
    "tiny top_p": SamplingParams(temperature=1.0, top_p=1e-6),
    "min_p": SamplingParams(temperature=1.0, min_p=0.2),
    "top_k then top_p": SamplingParams(temperature=1.3, top_k=12, top_p=0.8),
    "all filters": SamplingParams(temperature=1.5, top_k=20, top_p=0.9, min_p=0.05),
    "repetition": SamplingParams(temperature=1.0, repetition_penalty=1.8),
    "repetition below one": SamplingParams(temperature=1.0, repetition_penalty=0.5),
    "presence": SamplingParams(temperature=1.0, presence_penalty=1.5),
    "everything": SamplingParams(
        temperature=0.8, top_k=30, top_p=0.95, min_p=0.02, repetition_penalty=1.2, presence_penalty=-1.0
    ),
}


def make_sampler(*params: SamplingParams, max_num_seqs: int | None = None, vocab_size: int = VOCAB) -> Sampler:
    """Row i has params[i], with PROMPT and OUTPUT as what its sequence holds."""
    sampler = Sampler(max_num_seqs=max_num_seqs or len(params), vocab_size=vocab_size, device="cpu")
    for row, each in enumerate(params):
        sampler.set_params(row, each, prompt_token_ids=PROMPT, output_token_ids=OUTPUT)
    return sampler


def random_logits(rows: int, *, seed: int = 0, scale: float = 3.0, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def hf_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """transformers' processors on one row of logits, [V] float64; presence penalty by its definition."""
    ids = torch.tensor([PROMPT + OUTPUT])
    scores = logits[None].clone()
    if params.repetition_penalty != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    scores[0, sorted(set(OUTPUT))] -= params.presence_penalty
    warpers: list[Any] = [hf.TemperatureLogitsWarper(float(params.temperature))]
    warpers += [hf.TopKLogitsWarper(params.top_k)] if params.top_k else []
    warpers += [hf.TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    warpers += [hf.MinPLogitsWarper(params.min_p)] if params.min_p else []
    for warper in warpers:
        scores = warper(ids, scores)
    return scores[0].double().softmax(-1)


def tokens_at(sampler: Sampler, logits: torch.Tensor, positions: range) -> list[list[int]]:
    """Tokens of all rows at each position."""
    rows = list(range(len(logits)))
    return [sampler.sample(logits, rows, [position] * len(rows)).tokens.tolist() for position in positions]


def draws(logits: torch.Tensor, params: SamplingParams, *, num: int, seed: int = 0) -> list[int]:
    """Draw from one row of logits [V] at positions 0 .. num - 1, all at once."""
    sampler = Sampler(max_num_seqs=num, vocab_size=len(logits), device="cpu")
    for row in range(num):
        sampler.set_params(row, replace(params, seed=seed), prompt_token_ids=PROMPT, output_token_ids=OUTPUT)
    return sampler.sample(logits.expand(num, -1).contiguous(), range(num), range(num)).tokens.tolist()


@pytest.mark.parametrize("params", FILTERS.values(), ids=FILTERS.keys())
def test_draws_the_greatest_sum_of_transformers_log_probabilities_and_noise(params: SamplingParams) -> None:
    for seed in range(5):
        logits = random_logits(1, seed=seed)[0]
        probabilities = hf_probabilities(logits, params)
        noise = noise_at(np.full(100, seed), np.arange(100), VOCAB)
        sums = probabilities.log() + torch.from_numpy(noise).double()
        assert draws(logits, params, num=100, seed=seed) == sums.argmax(1).tolist()
        assert (probabilities[draws(logits, params, num=100, seed=seed)] > 0).all()


def noise_at(seeds: Any, positions: Any, vocab_size: int) -> Any:
    """The noise of every token, [n, vocab_size]."""
    keys = gumbel.row_keys(np.asarray(seeds, dtype=np.uint64), np.asarray(positions))
    return gumbel.token_noise(keys[:, None], np.arange(vocab_size)[None])


@pytest.mark.parametrize("position", range(7))
def test_rows_of_a_batch_do_not_change_one_another(position: int) -> None:
    """Every mixture of parameters: a row draws among the others as it draws alone."""
    params = [*FILTERS.values(), SamplingParams(), SamplingParams(repetition_penalty=2.0)]
    logits = random_logits(len(params))
    [together] = tokens_at(make_sampler(*params), logits, range(position, position + 1))
    alone = [make_sampler(each).sample(logits[[i]], [0], [position]).tokens.item() for i, each in enumerate(params)]
    assert together == alone


def test_a_row_draws_the_same_wherever_it_stands() -> None:
    params = [replace(each, seed=i) for i, each in enumerate(FILTERS.values())] + [SamplingParams()]
    logits = random_logits(len(params))
    order = torch.randperm(len(params), generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = make_sampler(*params).sample(logits[order], order, [row + 9 for row in order]).tokens.tolist()
    alone = [make_sampler(*params).sample(logits[[row]], [row], [row + 9]).tokens.item() for row in order]
    assert shuffled == alone


def test_greedy_takes_the_greatest_whatever_the_filters() -> None:
    logits = random_logits(3)
    sampler = make_sampler(SamplingParams(), SamplingParams(top_k=3, seed=5), SamplingParams(top_p=0.1))
    assert sampler.sample(logits, [0, 1, 2], [4, 5, 6]).tokens.tolist() == logits.argmax(-1).tolist()
    assert sampler.sample(logits, [2, 1, 0], [4, 5, 6]).tokens.tolist() == logits.argmax(-1).tolist()


def test_position_and_seed_decide_and_nothing_else() -> None:
    logits = random_logits(1, scale=0.5)
    tokens = [
        [make_sampler(SamplingParams(temperature=1.0, seed=seed)).sample(logits, [0], [position]).tokens.item()]
        for seed in (1, 2)
        for position in range(6)
    ]
    again = make_sampler(SamplingParams(temperature=1.0, seed=1))
    assert [again.sample(logits, [0], [position]).tokens.tolist() for position in range(6)] == tokens[:6]
    assert tokens[:6] != tokens[6:]
    assert len({token for (token,) in tokens}) > 3


def test_what_is_filtered_out_is_never_drawn() -> None:
    logits = torch.full((VOCAB,), -50.0)
    logits[[4, 9]] = torch.tensor([1.0, 2.0])
    assert set(draws(logits, SamplingParams(temperature=1.0, top_k=2), num=200)) == {4, 9}
    logits[:] = -math.inf
    logits[[4, 9]] = torch.tensor([1.0, 2.0])
    assert set(draws(logits, SamplingParams(temperature=9.0), num=200)) == {4, 9}


def test_extreme_logits_and_temperatures_stay_finite() -> None:
    logits = random_logits(1)[0] * 1e6
    logits[5] = -math.inf
    for temperature in (1e-9, 1e-3, 1e9):
        tokens = draws(logits, SamplingParams(temperature=temperature), num=50)
        assert 5 not in tokens
        assert temperature > 1 or set(tokens) == {int(logits.argmax())}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [SamplingParams(temperature=1.0), FILTERS["all filters"]], ids=["plain", "filters"])
def test_a_row_without_numbers_gets_a_token_of_the_vocabulary(params: SamplingParams, value: float) -> None:
    logits = torch.full((2, 70), value)
    logits[1] = random_logits(1, vocab_size=70)
    sampler = make_sampler(params, params, vocab_size=70)
    tokens = sampler.sample(logits, [0, 1], [3, 3]).tokens.tolist()
    assert 0 <= tokens[0] < 70
    assert tokens[1] == make_sampler(params, vocab_size=70).sample(logits[1:], [0], [3]).tokens.item()


def test_a_flat_distribution_needs_the_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-p that its first candidates do not reach gives the same as one that looks at everything at once."""
    logits = random_logits(2, scale=0.1, vocab_size=2000)
    params = (SamplingParams(temperature=1.0, top_p=0.9), SamplingParams(temperature=0.01, top_p=0.5))
    expected = []
    for candidates in ((2000,), (8, 64), ()):
        monkeypatch.setattr(sampler_module, "TOP_P_CANDIDATES", candidates)
        expected.append(tokens_at(make_sampler(*params, vocab_size=2000), logits, range(50)))
    assert expected[0] == expected[1] == expected[2]


def test_ties_at_the_threshold_are_kept() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0])
    for params in (SamplingParams(temperature=1.0, top_k=2), SamplingParams(temperature=1.0, top_p=0.6)):
        sampler = Sampler(max_num_seqs=1, vocab_size=5, device="cpu")
        sampler.set_params(0, params)
        assert {token for [token] in tokens_at(sampler, logits[None], range(100))} == {1, 2, 3}


def make_sampler_without_history(params: SamplingParams, *, vocab_size: int) -> Sampler:
    sampler = Sampler(max_num_seqs=1, vocab_size=vocab_size, device="cpu")
    sampler.set_params(0, params)
    return sampler


class TestPenalties:
    def test_sampled_tokens_count_from_the_next_step(self) -> None:
        sampler = make_sampler_without_history(SamplingParams(presence_penalty=2.0), vocab_size=4)
        logits = torch.tensor([[5.0, 4.0, 3.5, 0.0]])
        tokens = [sampler.sample(logits, [0], [position]).tokens.item() for position in range(5)]
        assert tokens == [0, 1, 2, 0, 0]

    def test_the_prompt_counts_for_repetition_and_not_for_presence(self) -> None:
        logits = torch.tensor([[5.0, 4.0, 3.0, -1.0]])
        for params, expected in (
            (SamplingParams(presence_penalty=2.0), 0),
            (SamplingParams(repetition_penalty=2.0), 1),
        ):
            sampler = Sampler(max_num_seqs=1, vocab_size=4, device="cpu")
            sampler.set_params(0, params, prompt_token_ids=[0])
            assert sampler.sample(logits, [0], [0]).tokens.item() == expected

    def test_logits_of_the_caller_are_not_changed(self) -> None:
        logits = random_logits(2)
        before = logits.clone()
        sampler = make_sampler(FILTERS["everything"], SamplingParams())
        sampler.sample(logits, [0, 1], [0, 0])
        sampler.sample(logits[:1], [0], [1])
        assert torch.equal(logits, before)

    def test_a_fork_goes_its_own_way(self) -> None:
        sampler = make_sampler(SamplingParams(repetition_penalty=100.0), max_num_seqs=3)
        logits = random_logits(1).abs()
        logits[0, PROMPT] = 20.0
        sampler.fork(0, 2)
        first = sampler.sample(logits, [0], [0]).tokens.item()
        assert first not in PROMPT
        assert sampler.sample(logits, [2], [0]).tokens.item() == first
        assert sampler.sample(logits, [2], [1]).tokens.item() != first
        assert sampler.sample(logits, [0], [1]).tokens.item() != first

    def test_a_fork_may_have_another_seed(self) -> None:
        sampler = make_sampler(SamplingParams(temperature=1.0, seed=4), max_num_seqs=2)
        sampler.fork(0, 1, seed=5)
        assert sampler.params(1) == SamplingParams(temperature=1.0, seed=5)
        with pytest.raises(ValueError, match="seed=-1"):
            sampler.fork(0, 1, seed=-1)

    def test_setting_parameters_again_forgets_what_was_seen(self) -> None:
        sampler = make_sampler_without_history(SamplingParams(presence_penalty=2.0), vocab_size=3)
        logits = torch.tensor([[1.0, 0.5, 0.0]])
        for _ in range(2):
            assert sampler.sample(logits, [0], [0]).tokens.item() == 0
            assert sampler.sample(logits, [0], [1]).tokens.item() == 1
            sampler.clear(0)
            sampler.set_params(0, SamplingParams(presence_penalty=2.0))

    def test_memory_is_taken_at_the_start(self) -> None:
        sampler = make_sampler(SamplingParams(temperature=1.0, top_p=0.5), max_num_seqs=4)
        num_bytes = 4 * (VOCAB * (1 + 2 + 1) + 8 * NUM_REMEMBERED)
        assert sampler.statistics() == SamplerStatistics(num_rows=1, num_penalty_bytes=num_bytes)
        sampler.set_params(3, SamplingParams(presence_penalty=1.0))
        assert sampler.statistics() == SamplerStatistics(num_rows=2, num_penalty_bytes=num_bytes)
        sampler.check_invariants()


class TestLogprobs:
    def test_are_of_the_raw_logits(self) -> None:
        params = SamplingParams(temperature=0.5, top_k=3, repetition_penalty=2.0, num_logprobs=4)
        logits = random_logits(1)
        sampled = make_sampler(params).sample(logits, [0], [0])
        expected = logits.double().log_softmax(-1)
        assert sampled.chosen_logprobs is not None
        assert sampled.top_ids is not None
        assert sampled.top_logprobs is not None
        torch.testing.assert_close(sampled.chosen_logprobs, expected[0, sampled.tokens].float())
        assert sampled.top_ids.tolist() == expected.topk(4).indices.tolist()
        torch.testing.assert_close(sampled.top_logprobs, expected.topk(4).values.float())

    def test_rows_that_ask_and_rows_that_do_not(self) -> None:
        logits = random_logits(3)
        sampled = make_sampler(SamplingParams(num_logprobs=2), SamplingParams(), SamplingParams(num_logprobs=0)).sample(
            logits, [0, 1, 2], [0, 0, 0]
        )
        assert sampled.chosen_logprobs is not None
        assert sampled.top_ids is not None
        expected = logits.log_softmax(-1).amax(-1)
        torch.testing.assert_close(sampled.chosen_logprobs[[0, 2]], expected[[0, 2]])
        assert sampled.chosen_logprobs[1].isnan()
        assert sampled.top_ids[0].tolist() == logits[0].topk(2).indices.tolist()
        assert sampled.top_ids[1].tolist() == [-1, -1]

    def test_nobody_asks(self) -> None:
        sampled = make_sampler(SamplingParams()).sample(random_logits(1), [0], [0])
        assert (sampled.chosen_logprobs, sampled.top_ids, sampled.top_logprobs) == (None, None, None)

    def test_only_the_chosen_one(self) -> None:
        sampled = make_sampler(SamplingParams(num_logprobs=0)).sample(random_logits(1), [0], [0])
        assert sampled.chosen_logprobs is not None
        assert (sampled.top_ids, sampled.top_logprobs) == (None, None)


class TestRefusals:
    @pytest.mark.parametrize(
        ("params", "message"),
        [
            (SamplingParams(temperature=-0.1), r"temperature=-0\.1 is not in \[0, inf\)"),
            (SamplingParams(temperature=math.nan), "temperature=nan"),
            (SamplingParams(temperature=math.inf), "temperature=inf"),
            (SamplingParams(top_k=-1), r"top_k=-1 is not in \[0, 2147483647\]"),
            (SamplingParams(top_p=0.0), r"top_p=0\.0 is not in \(0, 1\]"),
            (SamplingParams(top_p=1.01), r"top_p=1\.01"),
            (SamplingParams(min_p=1.5), r"min_p=1\.5 is not in \[0, 1\]"),
            (SamplingParams(repetition_penalty=0.0), r"repetition_penalty=0\.0"),
            (SamplingParams(presence_penalty=2.5), r"presence_penalty=2\.5 is not in \[-2, 2\]"),
            (SamplingParams(frequency_penalty=-2.5), r"frequency_penalty=-2\.5 is not in \[-2, 2\]"),
            (SamplingParams(seed=-1), r"seed=-1 is not in 0 \.\. 2\*\*63 - 1"),
            (SamplingParams(seed=2**63), "seed=9223372036854775808"),
            (SamplingParams(num_logprobs=21), r"num_logprobs=21 is not in 0 \.\. 20"),
        ],
    )
    def test_parameters_out_of_range(self, params: SamplingParams, message: str) -> None:
        sampler = Sampler(max_num_seqs=1, vocab_size=VOCAB, device="cpu")
        with pytest.raises(ValueError, match=message):
            sampler.set_params(0, params)
        assert sampler.params(0) is None

    def test_the_limits_themselves_are_allowed(self) -> None:
        SamplingParams(top_p=1.0, min_p=1.0, presence_penalty=-2.0, seed=2**63 - 1, num_logprobs=20).validate()
        SamplingParams(temperature=0.0, top_p=1e-9, min_p=0.0, presence_penalty=2.0, num_logprobs=0).validate()

    def test_tokens_and_rows_out_of_range(self) -> None:
        sampler = Sampler(max_num_seqs=2, vocab_size=VOCAB, device="cpu")
        penalty = SamplingParams(presence_penalty=1.0)
        for token in (-1, VOCAB):
            with pytest.raises(ValueError, match=r"a token id is not in 0 \.\. 49"):
                sampler.set_params(0, penalty, output_token_ids=[token])
        with pytest.raises(ValueError, match=r"row=2 is not in 0 \.\. 1"):
            sampler.set_params(2, penalty)

    def test_sizes_that_differ_and_rows_not_set(self) -> None:
        sampler = make_sampler(SamplingParams(), max_num_seqs=2)
        with pytest.raises(ValueError, match="2 rows of which 1 distinct"):
            sampler.sample(random_logits(2), [0, 0], [1, 1])
        with pytest.raises(ValueError, match="0 positions"):
            sampler.sample(random_logits(1), [0], [])
        with pytest.raises(ValueError, match=r"logits \[1, 49\]"):
            sampler.sample(random_logits(1)[:, 1:], [0], [1])
        with pytest.raises(KeyError):
            sampler.sample(random_logits(1), [1], [1])

    def test_a_batch_has_the_parameters_that_its_rows_have_now(self) -> None:
        sampler, draw = make_sampler(max_num_seqs=5), random.Random(7)
        for number in range(300):
            row, other = draw.sample(range(5), 2)
            change = draw.choice(("set", "set", "clear", "fork"))
            if change == "set":
                params = SamplingParams(temperature=draw.random(), top_k=draw.randrange(9), top_p=0.5, seed=number)
                sampler.set_params(row, params)
            elif change == "clear":
                sampler.clear(row)
            else:
                sampler.fork(row, other, seed=number)
            sampler.check_invariants()
            for row in range(5):
                expected = sampler.params(row)
                if expected is None:
                    with pytest.raises(KeyError):
                        sampler.draws([row])
                    continue
                draws = sampler.draws([row])
                assert draws is not None
                seed, top_k, *shares = draws.columns[:, 0]
                assert (seed, top_k) == (expected.seed, expected.top_k)
                top_p, min_p, temperature = np.array(shares).view(np.float64)
                assert (top_p, min_p, temperature) == (expected.top_p, expected.min_p, expected.temperature)

    def test_clearing_and_forking_a_row_without_parameters_is_nothing(self) -> None:
        sampler = make_sampler(SamplingParams(), max_num_seqs=3)
        sampler.clear(2)
        sampler.fork(2, 1)
        assert sampler.params(1) is None
        sampler.fork(2, 0)
        assert sampler.statistics().num_rows == 0
