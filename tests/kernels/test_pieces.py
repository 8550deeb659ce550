"""Mixed steps in pieces, against the same steps as they are: logits, and every byte of the pool."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from mixed_steps import STEPS, make_batches, make_pool, prepare
from recorded_graphs import recorded_graphs
from samples import others_at_night

from quire.kernels import launching
from quire.worker.device.capture import CannotCapture
from quire.worker.model.paged_model import PagedModel
from quire.worker.run.pieces import StaticPieces, piece_buckets

BUCKETS = (8, 24)
SMALL_DEVICE = replace(launching.DEFAULT_LIMITS, num_multiprocessors=2)
INTERPRETED = launching.INTERPRET
EXPERTS = ("gpt_oss", "llama4")

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


@pytest.fixture(autouse=True)
def small_device() -> Iterator[None]:
    """In the interpreter each program takes its time, so plans are made for few of them."""
    with launching.chosen_for(SMALL_DEVICE):
        yield


@pytest.fixture(scope="module")
def unfused(device: torch.device) -> PagedModel:
    with launching.chosen_for(SMALL_DEVICE):
        return prepare("llama", device, fused=False)


def fill_with_nan(pieces: StaticPieces) -> None:
    """Fill the buffers with values that no step may read."""
    for buffer in pieces._buffers._buffers.values():
        buffer.fill_(torch.nan)


def compare(model: PagedModel, *, captured: bool) -> None:
    own_pool, pool = make_pool(model), make_pool(model)
    with recorded_graphs() if captured and INTERPRETED else contextlib.nullcontext():
        pieces = StaticPieces(model, pool, buckets=BUCKETS)
        if captured:
            pieces.capture()
        for name, batch in zip(STEPS, make_batches(model), strict=True):
            expected = model.forward(batch, own_pool)
            fill_with_nan(pieces)
            logits = pieces.forward(batch)
            torch.testing.assert_close(
                logits, expected, atol=2e-4, rtol=2e-4, msg=lambda text, name=name: f"{name}: {text}"
            )
            bucket = next(size for size in BUCKETS if size >= batch.num_tokens)
            assert bool(pieces._hidden_states[:bucket].isfinite().all()), f"{name}: the padding has no numbers"
    for written, expected_blocks in zip(pool.tensors(), own_pool.tensors(), strict=True):
        torch.testing.assert_close(written, expected_blocks, atol=2e-4, rtol=2e-4, equal_nan=True)
    pool.check_invariants()


# Heads with norms; windows, capped scores and logits; sinks and experts; positions that count on from a cache, chunks.
@pytest.mark.parametrize("family", others_at_night(["qwen3", "gemma2", "gpt_oss", "llama4"], ["gemma2", "gpt_oss"]))
def test_pieces_compute_what_the_model_computes(family: str, device: torch.device) -> None:
    if family in EXPERTS and not INTERPRETED:
        pytest.skip("its experts read sizes on the host in float32")
    model = prepare(family, device)
    assert model.fusion is not None
    compare(model, captured=True)


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "not captured"])
def test_pieces_without_fused_modules(captured: bool, unfused: PagedModel) -> None:
    compare(unfused, captured=captured)


def test_a_model_without_a_base_model_is_not_cut(unfused: PagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfused, "_base", None)
    with pytest.raises(CannotCapture, match="its output layer can't be run by itself"):
        StaticPieces(unfused, make_pool(unfused), buckets=BUCKETS)


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [
        (1, (1,)),
        (64, (64,)),
        (65, (64, 65)),
        (512, (64, 128, 192, 256, 320, 384, 448, 512)),
        (1100, (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1100)),
    ],
)
def test_buckets_rise_to_the_limit(max_tokens: int, expected: tuple[int, ...]) -> None:
    assert piece_buckets(max_tokens) == expected
