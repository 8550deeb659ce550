"""Adapters in the slots of a model on the kernels: tokens against merged weights, eager and on memory for graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import executor_driver as driver
import lora_zoo
import model_zoo as zoo
import pytest
import torch
from kernels.conftest import few_multiprocessors
from samples import others_at_night
from torch import Tensor

from quire.worker.adapter_bounds import AdapterBounds
from quire.worker.adapters import slotted_linear
from quire.worker.adapters.adapter import UnsupportedAdapter
from quire.worker.adapters.peft_checkpoint import read_adapter
from quire.worker.attention.triton_attention import TritonAttentionStep
from quire.worker.fusion.adapted_steps import AdaptedSteps
from quire.worker.fusion.steps import KernelSteps
from quire.worker.memory.kv_pool import KVPool
from quire.worker.model.adapter_check import check_adapter
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.preparing import prepare_model
from quire.worker.run.graphs import StaticDecode
from quire.worker.run.pieces import StaticPieces

pytestmark = pytest.mark.usefixtures("small_device")

BLOCK_SIZE, NEW_TOKENS = 16, 3
SCALING = 2.0
ADAPTED = ("a", "", "b", "b", "a")
"""The adapters of the driver's prompts: "a" of all layers, "b" of the attention's."""
TARGETS = {"a": lora_zoo.ALL, "b": lora_zoo.ATTENTION}


def build(device: torch.device) -> Any:
    return zoo.one_layer_llama(max_position_embeddings=driver.MAX_MODEL_LEN).to(device)


def slotted(device: torch.device, *, fused: bool) -> PagedModel:
    steps = AdaptedSteps(KernelSteps()) if fused else None
    with few_multiprocessors():
        model = prepare_model(
            build(device), max_model_len=driver.MAX_MODEL_LEN, step_kind=TritonAttentionStep, fused_steps=steps
        )
        bounds = model.make_adapter_slots(AdapterBounds(max_adapters=2, max_rank=4))
    assert (bounds.max_adapters, model.adapters.numbers) == (2, {})
    return model


@pytest.fixture(scope="module")
def fused(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> PagedModel:
    """With "a" and "b" in its slots, checked."""
    model = slotted(device, fused=True)
    with few_multiprocessors():
        put(model, "a", tmp_path_factory.mktemp("adapters"))
        put(model, "b", tmp_path_factory.mktemp("adapters"))
    return model


def identity_of(model: PagedModel, name: str) -> bytes:
    """Return the identity of the first adapter, "a", or of the second one; of "" there is none."""
    return list(model.adapters.numbers)["ab".index(name)] if name else b""


def put(model: PagedModel, name: str, folder: Path) -> bytes:
    path = lora_zoo.save(build(torch.device("cpu")), folder / name, seed=ord(name), targets=TARGETS[name])
    prepared = model.adapters.prepare(read_adapter(name, path))
    model.adapters.add(prepared)
    check_adapter(model, prepared)
    return prepared.identity


def expected(name: str) -> list[list[int]]:
    """Tokens of all prompts by the model with an adapter in its weights, or none."""
    model = build(torch.device("cpu"))
    if name:
        model = lora_zoo.merge(
            model, lora_zoo.draw_weights(model, seed=ord(name), targets=TARGETS[name]), scaling=SCALING
        )
    return [zoo.generate(model, prompt, NEW_TOKENS) for prompt in driver.make_prompts()]


def make_static(model: PagedModel, pool: KVPool) -> StaticDecode:
    width = -(-driver.MAX_MODEL_LEN // BLOCK_SIZE)
    decode = StaticDecode(model, pool, max_num_seqs=driver.MAX_NUM_SEQS, max_blocks_per_seq=width)
    decode.pieces = StaticPieces(model, pool, buckets=(64,))
    decode.make_ring()
    if model.device.type == "cuda":
        decode.capture()
        decode.capture_sampling()
        decode.capture_whole()
        decode.pieces.capture()
    return decode


def check(model: PagedModel, orders: driver.ExecutorDriver) -> None:
    adapters = [identity_of(model, name) for name in ADAPTED]
    found, forked = driver.run_mixed(model, NEW_TOKENS, driver=orders, adapters=adapters)
    tokens_of = {name: expected(name) for name in ("a", "b", "")}
    assert found == [tokens_of[name][index] for index, name in enumerate(ADAPTED)]
    assert forked == [found[index] for index in driver.FORKED]
    differ = [tokens_of[name][index] != tokens_of[""][index] for index, name in enumerate(ADAPTED)]
    assert differ == [bool(name) for name in ADAPTED]


@pytest.mark.parametrize("how", others_at_night(["eager", "for graphs"], ["for graphs"]))
def test_tokens_are_those_of_merged_weights(how: str, fused: PagedModel) -> None:
    """Two adapters and the base in one batch: prompts in chunks, forks and a preemption."""
    make_decode = make_static if how == "for graphs" else None
    check(fused, driver.ExecutorDriver(fused, block_size=BLOCK_SIZE, make_decode=make_decode))


@pytest.mark.night
def test_modules_that_are_not_fused_have_their_updates_too(device: torch.device, tmp_path: Path) -> None:
    model = slotted(device, fused=False)
    put(model, "a", tmp_path)
    put(model, "b", tmp_path)
    check(model, driver.ExecutorDriver(model, block_size=BLOCK_SIZE))


def test_the_checks_find_kernels_that_give_other_updates(
    fused: PagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At start with a random adapter, and when one is loaded."""

    def add_less(out: Tensor, x: Tensor, slots: Any, adapters: Tensor) -> None:
        add_updates(out, x, replace(slots, ranks=slots.ranks // 2), adapters)

    add_updates = slotted_linear.add_updates
    monkeypatch.setattr(slotted_linear, "add_updates", add_less)
    assert fused.find_replay_disagreement(fused.forward) is not None
    with pytest.raises(UnsupportedAdapter, match="adapter a is not supported"):
        put(fused, "a", tmp_path)


def test_a_slot_that_another_adapter_had_has_nothing_of_it(fused: PagedModel, tmp_path: Path) -> None:
    """The attention's adapter in the slot of one of all layers; the last test here."""
    for identity in list(fused.adapters.numbers):
        fused.adapters.remove(identity)
    slot = fused.adapters.numbers[first := put(fused, "a", tmp_path)]
    fused.adapters.remove(first)
    second = put(fused, "b", tmp_path)
    assert fused.adapters.numbers[second] == slot
    orders = driver.ExecutorDriver(fused, block_size=BLOCK_SIZE)
    prompt = driver.make_prompts()[1]
    stream = orders.admit(prompt, second)
    for count in (len(prompt), *[1] * (NEW_TOKENS - 1)):
        orders.step([(stream, count)])
    assert stream.tokens == expected("b")[1]
