"""A model with fixed tiles on a GPU: equal bits over 50 random schedules, and what they cost. Under a minute."""

from __future__ import annotations

from collections.abc import Iterator

import model_zoo as zoo
import pytest
import torch
from bit_schedules import Sequences

from quire.kernels.fixed_tiles import use_fixed_tiles
from quire.worker.attention.triton_attention import TritonAttentionStep
from quire.worker.fusion.steps import KernelSteps, fixed_steps
from quire.worker.model.preparing import prepare_model

LENGTHS = (1, 40, 130, 200, 65, 333)
NUM_SCHEDULES, MOST_STEPS = 50, 12


@pytest.fixture
def _fixed() -> Iterator[None]:
    use_fixed_tiles(True)
    yield
    use_fixed_tiles(False)


def sequences(device: torch.device, *, fixed: bool) -> Sequences:
    """Of a Llama of four layers in bfloat16."""
    llama = zoo.four_layer_llama(max_position_embeddings=1024).to(device)
    steps = fixed_steps() if fixed else KernelSteps()
    model = prepare_model(
        llama, max_model_len=1024, step_kind=TritonAttentionStep, fused_steps=steps, deterministic=fixed
    )
    return Sequences(model, LENGTHS, block_size=16)


@pytest.mark.usefixtures("_fixed")
def test_fixed_tiles_give_equal_bits_in_50_schedules(device: torch.device) -> None:
    made = sequences(device, fixed=True)
    expected = made.decoded_alone()
    for seed in range(NUM_SCHEDULES):
        assert made.find_difference(expected, seed=seed, most_steps=MOST_STEPS) is None


def test_without_them_bits_differ(device: torch.device) -> None:
    """Else the test above would notice nothing."""
    made = sequences(device, fixed=False)
    expected = made.decoded_alone()
    found = [made.find_difference(expected, seed=seed, most_steps=MOST_STEPS) for seed in range(5)]
    assert any(found)
