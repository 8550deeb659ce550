"""After a warm-up of a few steps nothing is compiled any more, for any lengths, batches and table widths."""

from dataclasses import replace

import pytest
import torch
from compilations import compilations
from kernel_batch import Batch, Shape

SHAPES = {
    "llama": Shape(32, 8, 128, hidden=512, intermediate=1024, vocab_size=4096, num_layers=1),
    "fp8-kv-window": Shape(
        16, 8, 64, kv_dtype=torch.float8_e4m3fn, window=100, hidden=512, intermediate=1024, vocab_size=4096
    ),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_nothing_compiles_after_warm_up(shape: Shape, device: torch.device) -> None:
    with compilations() as warm:
        Batch(shape, (1,), (1,), device).serve()
        Batch(shape, (1,) * 256, (1,) * 256, device).serve()
        for count in (2, 512, 4096):
            prompt = Batch(shape, (count,), (count,), device)
            prompt.serve()
            for num_splits in (1, 2):
                prompt.prefill(num_splits=num_splits)
    assert 0 < len(warm) <= 40
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, count: int = 1) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    with compilations() as names:
        for number in range(30):
            (num_seqs,), (width,) = draw(1, 300), draw(64, 5000)
            shifted = number % 2 == 1
            lens = tuple(draw(1, 300, num_seqs))
            Batch(shape, (1,) * num_seqs, lens, device, max_blocks=width, shifted=shifted).serve()
            counts = tuple(draw(2, 700, 1 + num_seqs % 7))
            lens = tuple(count + prefix for count, prefix in zip(counts, draw(0, 500, len(counts)), strict=True))
            Batch(shape, counts, lens, device, max_blocks=width, shifted=shifted).serve()
    assert names == []


def test_a_new_model_does_compile(device: torch.device) -> None:
    """The test above would notice."""
    shape = replace(SHAPES["llama"], num_query_heads=24)
    with compilations() as names:
        batch = Batch(shape, (1,), (1,), device)
        batch.decode(batch.plan())
    assert "paged_decode_kernel" in names
