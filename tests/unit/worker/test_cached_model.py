"""Models that keep their own attention, over a cache that is the pool, and those with a state per sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import model_zoo as zoo
import pytest
import torch
from executor_driver import FORKED, MAX_MODEL_LEN, ExecutorDriver, make_prompts, run_mixed

from quire.worker.config import WorkerConfig
from quire.worker.memory.layer_groups import one_group
from quire.worker.memory.state_slots import StateKey, StateSpec
from quire.worker.memory.step_batch import StepBatch
from quire.worker.model import cached_model
from quire.worker.model.cache_layout import CacheLayout
from quire.worker.model.cached_model import CachedModel, cut_step
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.preparing import prepare_model
from quire.worker.run.executor import Outcome
from quire.worker.run.pool_budget import size_empty_pool
from quire.worker.unsupported_model import UnsupportedModel

NEW_TOKENS = 10
FAMILIES = (*zoo.CACHED, *zoo.STATEFUL)


def prepared(name: str) -> PagedModel:
    return prepare_model(zoo.build(name), max_model_len=MAX_MODEL_LEN)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_generate(name: str) -> None:
    """Chunks of prompts beside decodes, forks, a preemption: each sequence as if it were alone."""
    model = prepared(name)
    assert isinstance(model, CachedModel)
    assert model.has_recurrent_state == (name in zoo.STATEFUL)
    found, forked = run_mixed(model, NEW_TOKENS)
    own = zoo.build(name)
    expected = [zoo.generate(own, prompt, NEW_TOKENS) for prompt in make_prompts()]
    assert found == expected
    assert forked == [expected[i] for i in FORKED]
    assert len({token for tokens in found for token in tokens[-NEW_TOKENS:]}) > 5


@pytest.mark.parametrize("name", ["bloom", "gpt_neo", "qwen3_next", "mamba2"])
def test_groups_that_are_cut_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding is bounded, so sequences that decode may be several forwards."""
    expected = run_mixed(prepared(name), NEW_TOKENS)
    monkeypatch.setattr(cached_model, "GROUP_TOKENS", 48)
    assert run_mixed(prepared(name), NEW_TOKENS) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_runs_in_bfloat16(name: str) -> None:
    model = prepare_model(zoo.build(name).to(torch.bfloat16), max_model_len=MAX_MODEL_LEN)
    assert isinstance(model, CachedModel)
    driver = ExecutorDriver(model)
    stream = driver.admit(make_prompts()[2])
    for count in (7, 5, 1, 1):
        assert driver.step([(stream, count)]) is Outcome.COMPUTED
    assert len(stream.tokens) == 15


def test_a_model_that_looks_ahead_is_refused() -> None:
    model = zoo.build("codegen")
    attention = model.transformer.h[1].attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, **kwargs | {"attention_mask": None})
    with pytest.raises(
        UnsupportedModel, match=r"none of its 3 layers .* with its own attention over the pool, its logits"
    ):
        prepare_model(model, max_model_len=MAX_MODEL_LEN)


def test_positions_that_are_counted_from_the_cache_are_refused() -> None:
    """Under padding they would be another sequence's."""
    model = zoo.build("codegen")
    forward = model.transformer.forward
    model.transformer.forward = lambda *args, **kwargs: forward(*args, **kwargs | {"position_ids": None})
    with pytest.raises(UnsupportedModel, match=r"CodeGenForCausalLM is not supported: .*its logits over a block pool"):
        prepare_model(model, max_model_len=MAX_MODEL_LEN)


def test_blocks_without_bytes_are_enough_for_every_sequence() -> None:
    config = SimpleNamespace(block_size=16, max_num_seqs=4, num_blocks=None)
    model = cast(PagedModel, SimpleNamespace(max_model_len=100, layer_groups=one_group({})))
    assert size_empty_pool(cast(WorkerConfig, config), model).num_blocks == 1 + 4 * 7
    config.num_blocks = 9
    assert size_empty_pool(cast(WorkerConfig, config), model).num_blocks == 9


class TestOrder:
    """A step's forwards, each as (places in the batch, first token, count)."""

    @staticmethod
    def parts(
        starts: list[int], counts: list[int], *, states: bool = False, by_one: bool = False
    ) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
        layout = CacheLayout(
            num_layers=1,
            layers={},
            states={StateKey(0, "conv", 0): StateSpec((1,), torch.float32)} if states else {},
            argument="past_key_values",
            takes_positions=True,
            takes_logits_to_keep=True,
            continues_by_one=by_one,
        )
        ends = tuple(start + count for start, count in zip(starts, counts, strict=True))
        batch = SimpleNamespace(seq_lens_host=ends, counts_host=tuple(counts))
        parts = cut_step(cast(StepBatch, batch), layout, block_size=4)
        return [(part.seqs, part.firsts, part.count) for part in parts]

    def test_what_decodes_is_one_forward(self) -> None:
        assert self.parts([9, 3, 30], [1, 1, 1]) == [((0, 1, 2), (0, 1, 2), 1)], "in the order of the batch"

    def test_prompts_come_first_if_they_read_nothing_of_this_step(self) -> None:
        parts = self.parts([9, 0, 3, 6], [1, 5, 1, 7])
        assert parts == [((1,), (1,), 5), ((3,), (7,), 7), ((0, 2), (0, 6), 1)]

    def test_who_may_read_a_block_of_this_step_waits_for_all_that_start_before(self) -> None:
        parts = self.parts([3, 4, 0, 8, 2], [1, 3, 4, 2, 1])
        assert parts == [((2,), (4,), 4), ((0, 4), (0, 10), 1), ((1,), (1,), 3), ((3,), (8,), 2)]

    def test_with_states_the_last_tokens_come_last(self) -> None:
        parts = self.parts([0, 5, 8], [4, 1, 3], states=True)
        assert parts == [((0,), (0,), 3), ((2,), (5,), 2), ((0, 1, 2), (3, 4, 7), 1)]

    def test_what_begins_anew_with_several_tokens_continues_by_one(self) -> None:
        parts = self.parts([0, 8], [4, 3], states=True, by_one=True)
        assert parts == [((0,), (0,), 3), ((1,), (4,), 1), ((1,), (5,), 1), ((0, 1), (3, 6), 1)]


@pytest.mark.parametrize("name", ["bloom", "gptj"])
def test_a_block_may_be_filled_and_read_in_one_step(name: str) -> None:
    """By a decode for a prompt, by a prompt for a decode, and by a prompt for another one."""
    model, own = prepared(name), zoo.build(name)
    driver = ExecutorDriver(model)
    prompt = make_prompts()[1][:20]
    first, other = driver.admit(prompt[:12]), driver.admit([*prompt[:4], *prompt[:8]])
    driver.step([(first, 11)])
    followers = [driver.admit(prompt), driver.admit(prompt[:13])]
    fifth = driver.admit([*other.tokens[:8], 1, 2])
    for follower in followers:
        driver.share(first, follower, 12)
    driver.share(other, fifth, 8)
    driver.step([(first, 1), (other, 12), (fifth, 2), (followers[0], 8), (followers[1], 1)])
    for _ in range(3):
        driver.step([(stream, 1) for stream in (*followers, other, fifth, first)])
    for stream, length in [(first, 12), (followers[0], 20), (followers[1], 13), (other, 12), (fifth, 10)]:
        assert stream.tokens == zoo.generate(own, stream.tokens[:length], 4)


class TestStates:
    @pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "falcon_h1"])
    def test_a_step_that_fails_leaves_them(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model = prepared(name)
        driver = ExecutorDriver(model)
        prompt = make_prompts()[2]
        stream = driver.admit(prompt)
        driver.step([(stream, 7)])
        before = [tensor.clone() for tensor in model.states.tensors()]
        head = model._model.lm_head.forward
        calls = iter(range(2))

        def fail_the_second(x: Any) -> Any:
            if next(calls):
                raise RuntimeError("out of memory")
            return head(x)

        monkeypatch.setattr(model._model.lm_head, "forward", fail_the_second)
        assert driver.step([(stream, 5)]) is Outcome.FAILED
        assert all(torch.equal(a, b) for a, b in zip(before, model.states.tensors(), strict=True))
        monkeypatch.undo()
        for count in (5, 1, 1):
            assert driver.step([(stream, count)]) is Outcome.COMPUTED
        assert stream.tokens == zoo.generate(zoo.build(name), prompt, 3)

    def test_a_position_without_a_state_fails_the_step_alone(self, caplog: pytest.LogCaptureFixture) -> None:
        driver = ExecutorDriver(prepared("mamba2"))
        stream = driver.admit(make_prompts()[2])
        driver.step([(stream, 7)])
        stream.num_computed = 5
        assert driver.step([(stream, 1)]) is Outcome.FAILED
        assert "StateNotKept" in caplog.text

    def test_a_row_that_is_used_again_begins_with_nothing(self) -> None:
        """Whatever lies in its slots."""
        model = prepared("qwen3_next")
        driver = ExecutorDriver(model)
        for tensor in model.states.tensors():
            tensor.fill_(float("nan"))
        stream = driver.admit(make_prompts()[0])
        for count in (3, 2, 1):
            driver.step([(stream, count)])
        assert stream.tokens == zoo.generate(zoo.build("qwen3_next"), make_prompts()[0], 2)

    def test_a_sequence_that_is_released_leaves_nothing(self) -> None:
        model = prepared("mamba2")
        driver = ExecutorDriver(model)
        stream = driver.admit(make_prompts()[0])
        driver.step([(stream, 5)])
        assert model.states.statistics().num_kept == 1
        driver.preempt(stream)
        driver.step([])
        assert model.states.statistics().num_kept == 0
        model.states.check_invariants()
