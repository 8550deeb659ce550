"""A model with fixed tiles: logits bit for bit alone, in any batch, in any chunks, decoded or computed again."""

from __future__ import annotations

from collections.abc import Iterator

import model_zoo as zoo
import pytest
import torch
from bit_schedules import Sequences
from torch import nn

from quire.kernels.fixed_tiles import use_fixed_tiles
from quire.worker.attention.triton_attention import TritonAttentionStep
from quire.worker.fusion.activations import ACTIVATIONS, Activation
from quire.worker.fusion.fixed_products import FixedProducts, fix_linears
from quire.worker.fusion.product_table import ProductKind
from quire.worker.fusion.projection import Projection
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


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", [ProductKind.PLAIN, ProductKind.GATED])
def test_an_activation_behind_a_product_does_not_depend_on_the_batch(
    kind: ProductKind, activation: Activation, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(rows, 32, generator=generator).to(device, torch.bfloat16) for rows in (5, 48))
    linear = nn.Linear(32, 48, bias=False, device=device, dtype=torch.bfloat16)
    linear.weight.data.copy_(weight)
    products, projection = FixedProducts(), Projection([linear])
    batch = products.run(kind, x, projection, activation=activation)
    assert batch is not None
    rows = [products.run(kind, row, projection, activation=activation) for row in x.split(1)]
    assert torch.equal(torch.cat([row for row in rows if row is not None]), batch)
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    expected = ACTIVATIONS[activation](torch.cat([gate, up], -1))
    if kind.is_gated:
        expected = ACTIVATIONS[activation](gate) * up
    torch.testing.assert_close(batch.double(), expected, rtol=0.02, atol=0.02)
