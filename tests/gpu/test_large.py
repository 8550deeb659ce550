"""Sizes that only a GPU can take: pools of more than 2**31 elements, and contexts of tens of thousands of tokens."""

import pytest
import torch
from kernel_batch import LAYOUTS, Batch, Shape

LLAMA = Shape(32, 8, 128, num_layers=1)
RELATIVE_ERROR = 3e-3
"""The tolerance for bfloat16, in the Euclidean norm. Its 8 bits round by 1.7e-3 in the mean (root of the squares): once
the weights, which the tensor cores multiply in bfloat16, and once the result. Together 2.3e-3; an H200 has 2.2e-3."""


def exact_rows(batch: Batch, tokens: list[tuple[int, int, int]]) -> torch.Tensor:
    """Attention in float64 on the GPU, for (token, sequence, number of keys it sees): [len(tokens), Hq, D]."""
    size = batch.shape.block_size
    rows = []
    for token, seq, visible in tokens:
        positions = torch.arange(visible, device=batch.device)
        blocks = batch.block_tables[seq].long()[positions // size]
        keys, values = (pool[blocks, positions % size].double() for pool in batch.layers[0])
        q = batch.q[token].double().view(batch.shape.num_kv_heads, -1, batch.shape.head_dim)
        weights = torch.softmax(torch.einsum("hgd,nhd->hgn", q, keys) * batch.scaling, -1)
        rows.append(torch.einsum("hgn,nhd->hgd", weights, values).flatten(0, 1))
    return torch.stack(rows)


def check(result: torch.Tensor, exact: torch.Tensor) -> None:
    assert not result.isnan().any()
    assert float((result.double() - exact).norm() / exact.norm()) <= RELATIVE_ERROR


@pytest.mark.parametrize("lens", [(32768,) * 2 + (4096,) * 6, (65536,), (1024,) * 128], ids=["mixed", "64k", "128x1k"])
def test_decode(lens: tuple[int, ...], device: torch.device) -> None:
    batch = Batch(LLAMA, (1,) * len(lens), lens, device)
    check(batch.decode(batch.plan()), exact_rows(batch, [(i, i, n) for i, n in enumerate(lens)]))


@pytest.mark.parametrize(("count", "length"), [(8192, 8192), (1024, 32768)], ids=["8k", "1k-on-31k"])
def test_prefill(count: int, length: int, device: torch.device) -> None:
    batch = Batch(LLAMA, (count,), (length,), device)
    tokens = list(range(0, count, 97))
    exact = exact_rows(batch, [(token, 0, length - count + token + 1) for token in tokens])
    check(batch.prefill()[tokens], exact)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pool_of_more_than_2_to_the_31_elements(layout: str, device: torch.device) -> None:
    """Blocks in no order all over the pool, so most of the sequences lie past what 32 bits can address."""
    num_blocks = 2**31 // (2 * 16 * 8 * 128) * 3 // 2
    batch = Batch(
        Shape(32, 8, 128, num_layers=1, layout=layout),
        (1,) * 16,
        (500,) * 16,
        device,
        num_blocks=num_blocks,
    )
    assert batch.memory.numel() > 2**31
    exact = exact_rows(batch, [(i, i, 500) for i in range(16)])
    check(batch.decode(batch.plan()), exact)
    check(batch.prefill(), exact)
    batch.write()
    written = batch.layers[0][1].flatten(0, 1)[batch.slot_mapping]
    assert torch.equal(written, batch.qkv.view(16, -1, 128)[:, -8:])
