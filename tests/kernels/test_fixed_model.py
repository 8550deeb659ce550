"""A model with fixed tiles: logits bit for bit alone, in any batch, in any chunks, decoded or computed again."""

from __future__ import annotations

from collections.abc import Iterator

import model_zoo as zoo
import pytest
import torch
from bit_schedules import Sequences

from quire.kernels.fixed_tiles import use_fixed_tiles
from quire.worker.attention.triton_attention import TritonAttentionStep
from quire.worker.fusion.fixed_products import FixedProducts, fix_linears
from quire.worker.fusion.steps import KernelSteps
from quire.worker.model.preparing import prepare_model


@pytest.fixture
def _fixed() -> Iterator[None]:
    use_fixed_tiles(True)
    yield
    use_fixed_tiles(False)


@pytest.mark.usefixtures("_fixed")
def test_logits_have_the_same_bits_in_any_schedule(device: torch.device) -> None:
    llama = zoo.one_layer_llama(max_position_embeddings=64).to(device, torch.bfloat16)
    model = prepare_model(
        llama, max_model_len=64, step_kind=TritonAttentionStep, fused_steps=KernelSteps(FixedProducts())
    )
    fix_linears(llama)
    sequences = Sequences(model, (9, 20), block_size=16)
    expected = sequences.decoded_alone()
    for seed in range(3):
        assert sequences.find_difference(expected, seed=seed, most_steps=4) is None
