"""Equal inputs give equal bits, and with fixed splits a sequence's result does not depend on its neighbours."""

from collections.abc import Callable

import pytest
import torch
from kernel_batch import Batch, Shape

LLAMA = Shape(32, 8, 128, hidden=512, intermediate=1024, vocab_size=4096)
REPEATS = 5

DECODE_LENS = (1, 700, 16, 3000, 17, 64, 65, 200)
WORK: dict[str, Callable[[Batch], torch.Tensor]] = {
    "decode": lambda batch: batch.decode(batch.plan()),
    "decode, fixed splits": lambda batch: batch.decode(batch.plan(fixed_split=256)),
    "prologue": Batch.prologue,
    "merge": Batch.merge,
}


@pytest.mark.parametrize("name", WORK)
def test_equal_inputs_give_equal_bits(name: str, device: torch.device) -> None:
    results = []
    for _ in range(REPEATS):
        batch = Batch(LLAMA, (1,) * len(DECODE_LENS), DECODE_LENS, device)
        results.append(WORK[name](batch))
        assert not results[-1].isnan().any()
        assert torch.equal(results[-1], results[0])


@pytest.mark.parametrize("num_splits", [None, 1, 4], ids="splits-{}".format)
def test_equal_prompts_give_equal_bits(num_splits: int | None, device: torch.device) -> None:
    results = []
    for _ in range(REPEATS):
        batch = Batch(LLAMA, (300, 5, 64), (300, 500, 100), device)
        results.append(batch.prefill(num_splits=num_splits))
        assert not results[-1].isnan().any()
        assert torch.equal(results[-1], results[0])


def test_equal_logits_draw_equal_tokens(device: torch.device) -> None:
    batches = [Batch(LLAMA, (1,) * 4, (1,) * 4, device) for _ in range(2)]
    for first, second in zip(*(batch.sample() for batch in batches), strict=True):
        assert torch.equal(first, second)


def alone(batch: Batch, seq: int) -> torch.Tensor:
    """The sequence's row of a decode with no other sequence in the batch, [Hq, D]."""
    whole = (batch.q, batch.block_tables, batch.seq_lens)
    batch.q, batch.block_tables, batch.seq_lens = (each[seq : seq + 1] for each in whole)
    row = batch.decode(batch.plan(fixed_split=256))[0]
    batch.q, batch.block_tables, batch.seq_lens = whole
    return row


def test_fixed_splits_make_a_sequence_independent_of_the_batch(device: torch.device) -> None:
    batch = Batch(LLAMA, (1,) * len(DECODE_LENS), DECODE_LENS, device)
    together = batch.decode(batch.plan(fixed_split=256))
    for seq in range(len(DECODE_LENS)):
        assert torch.equal(alone(batch, seq), together[seq]), f"sequence {seq}"
