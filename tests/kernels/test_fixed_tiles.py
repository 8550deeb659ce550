"""Fixed tiles: a row's bits alone, in any batch, decoded or in a prompt, and the results against float64."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_batch import Batch, Shape
from torch import Tensor

from quire.kernels.add_rmsnorm import add_rmsnorm
from quire.kernels.fixed_linear import ROWS, fixed_linear
from quire.kernels.fixed_tiles import are_fixed_tiles_used, use_fixed_tiles
from quire.kernels.launching import forget_prepared
from quire.kernels.paged_prefill import paged_prefill
from quire.kernels.sampler import draw

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def fixed() -> Iterator[None]:
    use_fixed_tiles(True)
    yield
    use_fixed_tiles(False)
    forget_prepared()


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def random_like(device: torch.device, dtype: torch.dtype, *sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("num_inputs", [128, 200])
def test_products_equal_float64(num_inputs: int, gated: bool, dtype: torch.dtype, device: torch.device) -> None:
    x = random_like(device, dtype, ROWS + 3, num_inputs)
    weight, bias = random_like(device, dtype, 80, num_inputs, seed=1), random_like(device, dtype, 80, seed=2)
    residual = None if gated else random_like(device, dtype, ROWS + 3, 80, seed=3)
    result = fixed_linear(x, weight, bias=bias, residual=residual, gated=gated).double().cpu()
    expected = x.double().cpu() @ weight.double().cpu().T + bias.double().cpu()
    if gated:
        gate, up = expected.chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
    if residual is not None:
        expected = expected + residual.double().cpu()
    tolerance = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance * math.sqrt(num_inputs))


@pytest.mark.sample
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_row_of_a_product_has_the_same_bits_in_any_batch(
    gated: bool, dtype: torch.dtype, device: torch.device
) -> None:
    num_rows = 2 * ROWS + 7
    x, weight = random_like(device, dtype, num_rows, 192), random_like(device, dtype, 96, 192, seed=1)
    whole = fixed_linear(x, weight, gated=gated)
    for first, count in ((0, 1), (5, 1), (num_rows - 1, 1), (3, 17), (ROWS - 1, 2), (10, ROWS), (1, num_rows - 1)):
        part = fixed_linear(x[first : first + count], weight, gated=gated)
        assert torch.equal(bits(part), bits(whole[first : first + count])), f"rows {first} .. {first + count - 1}"


def test_rows_of_norms_and_draws_have_the_same_bits_in_any_batch(device: torch.device) -> None:
    for columns in (64, 500, 2048):
        x, weight = random_like(device, torch.bfloat16, 20, columns), random_like(device, torch.bfloat16, columns)
        whole = add_rmsnorm(x, weight, eps=1e-6)
        for row in (0, 7, 19):
            assert torch.equal(bits(add_rmsnorm(x[row : row + 1], weight, eps=1e-6)), bits(whole[row : row + 1]))
    logits = random_like(device, torch.bfloat16, 9, 5000)
    columns_of = {"temperature": torch.ones(9), "seeds": torch.arange(9), "positions": torch.arange(9)}
    given = {name: x.to(device) for name, x in columns_of.items()}
    tokens = draw(logits, **given)
    for row in range(9):
        assert draw(logits[row : row + 1], **{name: x[row : row + 1] for name, x in given.items()}) == tokens[row]


class Prompt:
    """A sequence's queries and its keys and values in blocks, of which any run can be attended for."""

    def __init__(self, length: int, device: torch.device, dtype: torch.dtype, *, seed: int, **options: Any) -> None:
        self.length, self.device = length, device
        generator = torch.Generator().manual_seed(seed)
        num_blocks = -(-length // 16)
        self.q = torch.randn(length, 4, 32, generator=generator).to(device, dtype)
        pools = torch.randn(2, num_blocks * 16, 2, 32, generator=generator)
        pools[:, length:] = math.nan
        self.pools = pools.view(2, num_blocks, 16, 2, 32).to(device, dtype)
        self.options = options


def attend(runs: list[tuple[Prompt, int, int]]) -> list[Tensor]:
    """Attention of runs (prompt, first query, end) in one call, each by itself. The keys end with the run."""
    device = runs[0][0].device
    pools = torch.cat([prompt.pools for prompt, _, _ in runs], 1)
    width = max(prompt.pools.shape[1] for prompt, _, _ in runs)
    tables = torch.zeros(len(runs), width, dtype=torch.int32)
    begin = 0
    for row, (prompt, _, _) in zip(tables, runs, strict=True):
        count = prompt.pools.shape[1]
        row[:count] = torch.arange(begin, begin + count)
        begin += count
    counts = [end - first for _, first, end in runs]
    cu_seqlens_q = torch.tensor([0, *counts]).cumsum(0).int()
    result = paged_prefill(
        torch.cat([prompt.q[first:end] for prompt, first, end in runs]),
        pools[0],
        pools[1],
        block_tables=tables.to(device),
        seq_lens=torch.tensor([end for _, _, end in runs], dtype=torch.int32, device=device),
        cu_seqlens_q=cu_seqlens_q.to(device),
        scaling=32**-0.5,
        **runs[0][0].options,
    )
    return list(result.split(counts))


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 40}, {"chunk": 32}, {"softcap": 20.0}, {"sinks": True}, {"window": 24, "sinks": True}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("fixed")
def test_a_query_has_the_same_bits_alone_in_any_batch_decoded_or_recomputed(
    dtype: torch.dtype, options: dict[str, Any], device: torch.device
) -> None:
    if options.get("sinks"):
        options = options | {"sinks": random_like(device, dtype, 4, seed=9)}
    choose = random.Random(0)
    prompts = [Prompt(length, device, dtype, seed=length, **options) for length in (1, 40, 150)]
    whole = {prompt.length: attend([(prompt, 0, prompt.length)])[0] for prompt in prompts}
    for _ in range(6):
        runs = []
        for prompt in choose.sample(prompts, choose.randint(1, 3)):
            first = choose.randrange(prompt.length)
            end = first + choose.choice([1, choose.randint(1, prompt.length - first)])
            runs.append((prompt, first, end))
        for (prompt, first, end), result in zip(runs, attend(runs), strict=True):
            assert torch.equal(bits(result), bits(whole[prompt.length][first:end])), (
                f"{prompt.length}: {first} .. {end}"
            )


@pytest.mark.usefixtures("fixed")
def test_fixed_tiles_equal_the_reference(device: torch.device) -> None:
    shape = Shape(4, 2, 32, dtype=torch.float32)
    batch = Batch(shape, (30, 1, 7), (30, 100, 33), device)
    assert are_fixed_tiles_used()
    torch.testing.assert_close(batch.prefill().double().cpu(), batch.exact_attention(), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="num_splits=2 is not 1, with a fixed tile"):
        batch.prefill(num_splits=2)


def test_refusals(device: torch.device) -> None:
    x, weight = random_like(device, torch.float32, 2, 64), random_like(device, torch.float32, 6, 64)
    with pytest.raises(ValueError, match=r"weight has shape \[6, 64\], not \[any, 60\]"):
        fixed_linear(x[:, :60], weight)
    with pytest.raises(ValueError, match="residual is not taken together with gated"):
        fixed_linear(x, weight, residual=x[:, :3].contiguous(), gated=True)
    with pytest.raises(ValueError, match="has not as many gates as ups"):
        fixed_linear(x, weight[:5], gated=True)
    with pytest.raises(ValueError, match=r"weight is torch.float32, not torch.bfloat16"):
        fixed_linear(x.bfloat16(), weight)
    assert fixed_linear(x[:0], weight).shape == (0, 6)
