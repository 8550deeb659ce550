"""A model with fixed tiles: logits bit for bit alone, in any batch, in any chunks, decoded or computed again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import model_zoo as zoo
import pytest
import torch
from bit_schedules import Sequences
from torch import Tensor, nn

from quire.kernels.fixed_tiles import use_fixed_tiles
from quire.worker.adapter_bounds import AdapterBounds
from quire.worker.attention.triton_attention import TritonAttentionStep
from quire.worker.fusion.activations import ACTIVATIONS, Activation
from quire.worker.fusion.adapted_steps import AdaptedSteps
from quire.worker.fusion.fixed_products import FixedProducts
from quire.worker.fusion.product_table import ProductKind
from quire.worker.fusion.projection import Projection
from quire.worker.fusion.steps import FusedSteps, KernelSteps, Norm, fixed_steps
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.preparing import prepare_model
from quire.worker.run.graphs import StaticDecode
from quire.worker.run.pieces import StaticPieces
from quire.worker.sampling.parameters import SamplingParams
from quire.worker.sampling.sampler import Sampler
from quire.worker.unsupported_model import UnsupportedModel


@pytest.fixture
def _fixed() -> Iterator[None]:
    use_fixed_tiles(True)
    yield
    use_fixed_tiles(False)


def prepare(device: torch.device, dtype: torch.dtype, steps: FusedSteps) -> PagedModel:
    """A deterministic Llama of one layer, as the worker prepares it on a GPU."""
    llama = zoo.one_layer_llama(max_position_embeddings=64).to(device, dtype)
    return prepare_model(llama, max_model_len=64, step_kind=TritonAttentionStep, fused_steps=steps, deterministic=True)


class ByPlace(KernelSteps):
    """Steps with a norm that depends on a row's place."""

    def add_rmsnorm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        result = super().add_rmsnorm(x, norm, residual)
        result[-1] *= 1 + 2**-20
        return result


@pytest.mark.usefixtures("_fixed")
def test_logits_have_the_same_bits_in_any_schedule_and_in_memory_for_graphs(device: torch.device) -> None:
    model = prepare(device, torch.bfloat16, fixed_steps())
    assert (model.is_deterministic, model.fingerprint[-14:]) == (True, ":deterministic")
    sequences = Sequences(model, (5, 18, 3), block_size=16)
    expected = sequences.decoded_alone()
    for seed in range(3):
        assert sequences.find_difference(expected, seed=seed, most_steps=4) is None
    # What graphs are captured of: decodes padded to 4 sequences, and other steps to 64 tokens.
    decode = StaticDecode(model, sequences.pool, max_num_seqs=4, max_blocks_per_seq=4)
    pieces = StaticPieces(model, sequences.pool, buckets=(64,))
    ends = torch.stack([logits[-1] for logits in expected])
    assert torch.equal(decode.forward(sequences.batch([(0, 4, 5), (1, 17, 18), (2, 2, 3)])).float(), ends)
    assert torch.equal(pieces.forward(sequences.batch([(0, 4, 5), (1, 4, 18), (2, 0, 3)])), ends)


@pytest.mark.night
@pytest.mark.usefixtures("_fixed")
def test_with_an_adapter_logits_have_the_same_bits_in_any_schedule(device: torch.device) -> None:
    model = prepare(device, torch.bfloat16, AdaptedSteps(fixed_steps()))
    model.make_adapter_slots(AdapterBounds(max_adapters=1, max_rank=16))
    with model.adapters.trial() as identity:
        assert identity is not None
        slot = model.adapters.numbers[identity]
        sequences = Sequences(model, (5, 18, 3), block_size=16, adapters=(slot, None, slot))
        expected = sequences.decoded_alone()
        plain = Sequences(model, sequences.lengths, block_size=16).decoded_alone()
        assert [torch.equal(*pair) for pair in zip(expected, plain, strict=True)] == [False, True, False]
        for seed in range(3):
            assert sequences.find_difference(expected, seed=seed, most_steps=4) is None


@pytest.mark.usefixtures("_fixed")
def test_a_model_is_refused_if_its_bits_depend_on_the_batch(device: torch.device) -> None:
    with pytest.raises(UnsupportedModel, match=r"--deterministic: .* gives a token other results in another row"):
        prepare(device, torch.float32, ByPlace(FixedProducts()))


@pytest.mark.parametrize("num_top", [None, 3])
def test_a_row_draws_the_same_token_alone_and_in_any_batch(num_top: int | None, device: torch.device) -> None:
    """With filters that are the kernels', as on a GPU."""
    vocab_size, rows = 5000, range(4)
    sampler = Sampler(max_num_seqs=4, vocab_size=vocab_size, device=device, row_by_row=True, in_kernels=True)
    of_torch = Sampler(max_num_seqs=4, vocab_size=vocab_size, device=device)
    kinds: list[dict[str, Any]] = [{"temperature": 0.8, "top_k": 50, "top_p": 0.9}, {"temperature": 1.0, "min_p": 0.01}]
    for row, kind in enumerate([*kinds, {"temperature": 1.3}, {}]):
        for each in (sampler, of_torch):
            each.set_params(row, SamplingParams(**kind, seed=row, num_logprobs=num_top))
    logits = 3 * torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(0)).to(device)
    together = sampler.sample(logits.clone(), rows, [7] * 4)
    assert torch.equal(together.tokens, of_torch.sample(logits.clone(), rows, [7] * 4).tokens)
    for row in rows:
        alone = sampler.sample(logits[row : row + 1].clone(), [row], [7])
        for found, expected in zip(alone.tensors(), together.tensors(), strict=True):
            assert found is expected is None or torch.equal(found[0], expected[row])  # type: ignore[index]
    assert (sampler.draws([3]) is None) is (num_top is not None)
    assert sampler.draws([2]) is None, "drawn tokens are not sampled in graphs"


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
