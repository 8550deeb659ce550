"""A deterministic model gives a token the same logits, bit for bit, in any step."""

from __future__ import annotations

import math
import os
from pathlib import Path

import lora_zoo
import model_zoo as zoo
import pytest
import torch
from bit_schedules import Sequences
from click.testing import CliRunner
from gpu_desk.steps import make_config
from random_schedules import Schedule, make_prompts, run_alone
from torch import nn

from quire.worker.__main__ import main
from quire.worker.adapters.adapter import UnsupportedAdapter
from quire.worker.adapters.peft_checkpoint import read_adapter
from quire.worker.attention.row_attention import KEY_STEP, num_places
from quire.worker.device import reproducible
from quire.worker.memory.sequence_table import SequenceTable
from quire.worker.memory.step_batch import StepBatch, build_step_batch
from quire.worker.model.adapter_check import check_adapter
from quire.worker.model.modes import Part
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.preparing import prepare_model
from quire.worker.model.row_check import choose_threads
from quire.worker.model.thread_splits import GRAIN, Elementwise, most_threads, record_elementwise
from quire.worker.model.tiles import TILE_ROWS, cut_tiles
from quire.worker.run.loading import load
from quire.worker.sampling.constraints import Constraints
from quire.worker.sampling.drafts import DraftRows
from quire.worker.sampling.grammar_masks import Masks
from quire.worker.sampling.parameters import SamplingParams
from quire.worker.sampling.prompt_logprobs import score_tokens
from quire.worker.sampling.sampler import Sampler
from quire.worker.unsupported_model import UnsupportedModel

with pytest.MonkeyPatch.context() as patch:
    # MKL reads it with its first product, and so in this process alone: processes that tests start have their own.
    patch.setenv(reproducible.VARIABLE, os.environ.get(reproducible.VARIABLE, "AUTO"))
    _ = torch.ones(64, 64) @ torch.ones(64, 64)

FAMILIES = (
    *("llama", "qwen3", "mistral", "gemma2", "gpt2", "mixtral", "gpt_oss", "llama4_temperature", "deepseek_v3"),
    *("bloom", "mamba2", "qwen3_next"),
)
DTYPES = (torch.float32, torch.bfloat16)
# One of each kind: plain, softcap with windows, experts with sinks, latents, its own attention, states.
SAMPLE = (
    ("llama", torch.bfloat16),
    ("gemma2", torch.float32),
    ("gpt_oss", torch.float32),
    ("deepseek_v3", torch.bfloat16),
    ("bloom", torch.float32),
    ("qwen3_next", torch.bfloat16),
)
NUM_SCHEDULES = 9


def prepare(family: str, dtype: torch.dtype = torch.float32, *, deterministic: bool = True) -> PagedModel:
    return prepare_model(zoo.build(family).to(dtype), max_model_len=64, deterministic=deterministic)


def count_differences(model: PagedModel, num_schedules: int) -> int:
    alone = [run_alone(model, prompt) for prompt in make_prompts()]
    num_differences = 0
    for seed in range(num_schedules):
        schedule = Schedule(model, alone, seed)
        num_differences += len(list(schedule.run()))
        assert model.has_recurrent_state or schedule.num_drafts
    return num_differences


@pytest.mark.parametrize(("family", "dtype"), SAMPLE, ids=str)
def test_logits_of_random_schedules_are_those_of_a_sequence_alone(family: str, dtype: torch.dtype) -> None:
    """With chunks, other batches, preemptions, the host tier, forks, prefixes of others and drafts."""
    assert count_differences(prepare(family, dtype), 1) == 0


def put_adapter(model: PagedModel, folder: Path, seed: int, *, rank: int = 4) -> int:
    """Add an adapter of a llama to a model, checked; return its number."""
    path = lora_zoo.save(zoo.build("llama"), folder / str(seed), seed=seed, rank=rank)
    prepared = model.adapters.prepare(read_adapter(str(seed), path))
    model.adapters.add(prepared)
    check_adapter(model, prepared)
    return model.adapters.numbers[prepared.identity]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_with_adapters_are_those_of_a_sequence_alone(dtype: torch.dtype, tmp_path: Path) -> None:
    """Two adapters of other ranks and the base, in chunks and beside one another, while a third one comes and goes."""
    model = prepare("llama", dtype)
    first, second = put_adapter(model, tmp_path, 1), put_adapter(model, tmp_path, 2, rank=7)
    adapters = (first, second, None, first, second)
    sequences = Sequences(model, (21, 40, 18, 5, 33), block_size=4, adapters=adapters)
    expected = sequences.decoded_alone()
    plain = Sequences(model, sequences.lengths, block_size=4).decoded_alone()
    assert [torch.equal(*pair) for pair in zip(expected, plain, strict=True)] == [each is None for each in adapters]
    for seed in range(4):
        if seed == 2:
            put_adapter(model, tmp_path, 3, rank=2)
        assert sequences.find_difference(expected, seed=seed, most_steps=8) is None


def test_an_adapter_whose_updates_depend_on_other_tokens_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of its own tokens alone have another shape in each step."""
    model = prepare("llama", torch.float32)
    monkeypatch.setattr(model.adapters, "_by_tile", False)
    with pytest.raises(UnsupportedAdapter, match="its logits depend on the other sequences of a step"):
        put_adapter(model, tmp_path, 1, rank=64)


@pytest.mark.night
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_many_random_schedules(family: str, dtype: torch.dtype) -> None:
    """216 schedules in all."""
    assert count_differences(prepare(family, dtype), NUM_SCHEDULES) == 0


def test_logits_without_the_flag_depend_on_the_schedule() -> None:
    """So the schedules above would find it."""
    assert count_differences(prepare("llama", torch.bfloat16, deterministic=False), 1) > 0


def test_blocks_of_a_deterministic_model_are_its_own() -> None:
    plain, deterministic = (prepare("llama", deterministic=each) for each in (False, True))
    assert deterministic.fingerprint == f"{plain.fingerprint}:deterministic"
    modes = {mode.part: mode for mode in deterministic.modes.all()}
    assert modes[Part.ARITHMETIC].how == "deterministic: 16 tokens in each forward"
    assert not modes[Part.ARITHMETIC].degraded
    assert Part.ARITHMETIC not in {mode.part for mode in plain.modes.all()}


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--tensor-parallel-size", "2"), "--tensor-parallel-size 2: a sum over ranks has no fixed order"),
        (("--attention", "flashinfer"), "--attention flashinfer: it divides keys by the batch"),
        (("--products", "own"), "--products own: its products have tiles of their own"),
    ],
)
def test_flags_that_are_not_deterministic_are_refused(flags: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--model", str(tmp_path), "--deterministic", *flags])
    assert result.exit_code == 2
    assert f"--deterministic excludes {reason}" in " ".join(result.output.replace("│", " ").split())


def test_fused_modules_are_refused_on_a_cpu(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--deterministic excludes --fuse on a CPU: fused modules are not made for it"):
        load(make_config(tmp_path, device="cpu", deterministic=True, fuse=True))


class LooksAtOthers(nn.Linear):
    """A layer with a result that depends on the other rows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + input.mean() * 1e-3


class LooksAtPlace(nn.Linear):
    """A layer in which the last row of a tile has other bits than it would have in another place."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        result = super().forward(input)
        if result.shape[-2] == TILE_ROWS:
            result[..., -1, :] *= 1 + 2**-20
        return result


@pytest.mark.parametrize("kind", [LooksAtOthers, LooksAtPlace])
def test_a_model_with_rows_that_depend_on_others_is_refused(kind: type[nn.Linear]) -> None:
    model = zoo.build("llama")
    model.model.layers[1].mlp.up_proj.__class__ = kind
    reason = r"--deterministic: its module model\.layers\.1\.mlp\.up_proj gives a token other results in another row"
    with pytest.raises(UnsupportedModel, match=reason):
        prepare_model(model, max_model_len=64, deterministic=True)


class TestTiles:
    def batch(self, starts: list[int], counts: list[int]) -> StepBatch:
        table = SequenceTable(max_num_seqs=len(starts), max_blocks_per_seq=16, device="cpu")
        for row in range(len(starts)):
            table.stage_blocks(table.add(), 0, list(range(1 + 16 * row, 17 + 16 * row)))
        tokens = [[0] * count for count in counts]
        rows = list(range(len(starts)))
        return build_step_batch(table, block_size=4, rows=rows, starts=starts, counts=counts, token_ids=tokens)

    def test_a_reader_of_shared_blocks_comes_behind_the_tokens_that_fill_them(self) -> None:
        tiles = cut_tiles(self.batch([20, 0, 3], [2, 20, 1]))
        assert [tile.tokens for tile in tiles] == [tuple(range(2, 18)), (18, 19, 20, 21, 22, 0, 1)]
        assert [(tile.logits, tile.places) for tile in tiles] == [((), ()), ((1, 2, 0), (3, 4, 6))]

    def test_every_token_is_in_one_tile(self) -> None:
        batch = self.batch([5, 0, 7, 1], [3, 33, 1, 16])
        tiles = cut_tiles(batch)
        assert sorted(token for tile in tiles for token in tile.tokens) == list(range(53))
        assert sorted(seq for tile in tiles for seq in tile.logits) == [0, 1, 2, 3]
        assert [len(tile.tokens) for tile in tiles] == [16, 16, 16, 5]


def test_places_of_keys_are_few_and_whole_vectors() -> None:
    places = [num_places(keys) for keys in range(1, 5000)]
    assert all(each >= keys and each % KEY_STEP == 0 for keys, each in enumerate(places, start=1))
    assert all(each <= max(keys + KEY_STEP, keys * 1.25) for keys, each in enumerate(places, start=1))
    assert len(set(places)) == 21


class TestThreads:
    def test_a_border_between_threads_must_be_one_between_vectors(self) -> None:
        """16 rows of 5,632: two threads have 8 rows each, three would divide a row within a vector."""
        call = Elementwise("silu", (1, TILE_ROWS, 5632), 4, None)
        assert [call.is_even(threads) for threads in (1, 2, 3, 4)] == [True, True, False, False]
        assert most_threads([call], 8) == (2, call)

    def test_small_tensors_have_one_thread(self) -> None:
        assert Elementwise("silu", (TILE_ROWS, GRAIN // TILE_ROWS), 4, None).is_even(7)

    def test_rows_that_end_within_a_vector_are_not_even(self) -> None:
        assert not Elementwise("exp", (TILE_ROWS, 3), 4, None).is_even(1)
        assert Elementwise("exp", (TILE_ROWS, 3), 4, 3).is_even(1)

    def test_functions_that_are_rounded_correctly_do_not_count(self) -> None:
        x = torch.rand(48)
        assert record_elementwise(lambda: [x + x, x * x, x.sqrt(), x.pow(2), x.rsqrt(), x.clamp(0, 1)]) == set()
        assert {call.name for call in record_elementwise(lambda: [x.exp(), x.bfloat16().rsqrt(), x.pow(3)])} == {
            "exp",
            "rsqrt",
            "pow",
        }

    def test_uneven_threads_are_not_used(self) -> None:
        model = zoo.one_layer_llama(max_position_embeddings=64)
        before = torch.get_num_threads()
        wide = Elementwise("silu", (1, TILE_ROWS, 5632), 4, None)
        try:
            torch.set_num_threads(3)
            choose_threads(prepare_model(model, max_model_len=64, deterministic=True))
            assert torch.get_num_threads() == 3
            assert most_threads([wide], torch.get_num_threads()) == (2, wide)
        finally:
            torch.set_num_threads(before)


class TestSampling:
    """Rows with other parameters, and without, in a batch and alone."""

    VOCAB = 999
    PARAMS = (
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=0.7, seed=6, top_p=0.9, num_logprobs=3),
        SamplingParams(temperature=1.3, seed=7, top_k=40, top_p=0.95),
        SamplingParams(num_logprobs=0),
        SamplingParams(temperature=1.0, seed=8, repetition_penalty=1.2, constraints=Constraints(logit_bias={4: 2.0})),
        SamplingParams(temperature=1.0, seed=9, min_p=0.02, num_logprobs=5),
    )

    def sampler(self) -> Sampler:
        sampler = Sampler(max_num_seqs=len(self.PARAMS), vocab_size=self.VOCAB, device="cpu", row_by_row=True)
        for row, params in enumerate(self.PARAMS):
            sampler.set_params(row, params)
        return sampler

    def test_a_row_is_sampled_as_alone(self) -> None:
        logits = torch.randn(len(self.PARAMS), self.VOCAB, generator=torch.Generator().manual_seed(1)) * 3
        rows, positions = list(range(len(self.PARAMS))), [10 + row for row in range(len(self.PARAMS))]
        together = self.sampler().sample(logits.clone(), rows, positions)
        assert together.chosen_logprobs is not None
        assert together.top_ids is not None
        assert together.top_logprobs is not None
        for row in rows:
            alone = self.sampler().sample(logits[row : row + 1].clone(), [row], positions[row : row + 1])
            assert together.tokens[row] == alone.tokens[0]
            if alone.chosen_logprobs is None:
                assert math.isnan(together.chosen_logprobs[row])
            else:
                assert torch.equal(together.chosen_logprobs[row], alone.chosen_logprobs[0])
            width = 0 if alone.top_ids is None else alone.top_ids.shape[1]
            if alone.top_ids is not None and alone.top_logprobs is not None:
                assert torch.equal(together.top_ids[row, :width], alone.top_ids[0])
                assert torch.equal(together.top_logprobs[row, :width], alone.top_logprobs[0])
            assert (together.top_ids[row, width:] == -1).all()

    @pytest.mark.parametrize("row", range(len(PARAMS)))
    def test_a_draft_is_sampled_as_a_step_of_its_own(self, row: int) -> None:
        logits = torch.randn(4, self.VOCAB, generator=torch.Generator().manual_seed(row)) * 3
        one_by_one = self.sampler()
        steps = [one_by_one.sample(logits[i : i + 1].clone(), [row], [10 + i]) for i in range(4)]
        drafts = [int(step.tokens[0]) for step in steps[:3]]
        verified = self.sampler().sample(
            logits.clone(), [row] * 4, [10, 11, 12, 13], drafts=DraftRows([drafts], device=torch.device("cpu"))
        )
        for name in ("tokens", "chosen_logprobs", "top_ids", "top_logprobs"):
            of_steps, of_drafts = [getattr(step, name) for step in steps], getattr(verified, name)
            assert of_drafts is None if of_steps[0] is None else torch.equal(torch.cat(of_steps), of_drafts)

    def test_a_mask_is_that_of_its_row(self) -> None:
        logits = torch.zeros(2, self.VOCAB)
        bits = torch.zeros(1, 125, dtype=torch.uint8).numpy()
        bits[0, 3] = 1
        masks = Masks(rows=(2,), bits=bits)
        sampled = self.sampler().sample(logits, [1, 2], [3, 3], masks)
        assert sampled.tokens[1] == 24

    def test_scores_of_a_prompt_do_not_depend_on_each_other(self) -> None:
        logits = torch.randn(9, self.VOCAB, generator=torch.Generator().manual_seed(2))
        tokens, following = torch.arange(9), torch.arange(9) * 7

        def score(chosen: torch.Tensor) -> torch.Tensor:
            return score_tokens(
                lambda index: logits[index],
                chosen,
                following[chosen],
                num_top=2,
                vocab_size=self.VOCAB,
                row_by_row=True,
            ).logprobs

        together = score(tokens)
        assert all(torch.equal(score(tokens[i : i + 1]), together[i : i + 1]) for i in range(9))


def test_the_order_of_products_is_fixed_unless_the_environment_says_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(reproducible.VARIABLE, raising=False)
    reproducible.fix_product_order()
    assert os.environ[reproducible.VARIABLE] == "AUTO"
    monkeypatch.setenv(reproducible.VARIABLE, "COMPATIBLE")
    reproducible.fix_product_order()
    assert os.environ[reproducible.VARIABLE] == "COMPATIBLE"
