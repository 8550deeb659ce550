"""merge_states() against the float64 reference, and against attention over all keys at once."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels import reference
from quire.kernels.merge_states import merge_states

NAN = float("nan")
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def make_states(
    num_parts: int, *, head_dim: int = 32, dtype: torch.dtype = torch.float32, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Parts for 5 tokens of 3 heads: token 1 lacks the first part, token 2 has no part, missing values are NaN."""
    random = torch.Generator().manual_seed(num_parts)
    outs = torch.randn(num_parts, 5, 3, head_dim, generator=random)
    lses = torch.randn(num_parts, 5, 3, generator=random) * 10
    lses[0, 1] = lses[:, 2] = -math.inf
    outs[0, 1] = outs[:, 2] = NAN
    return outs.to(dtype).to(device), lses.to(device)


@pytest.mark.parametrize("num_parts", [1, 2, 16, 17, 40])
def test_any_number_of_parts(device: torch.device, num_parts: int) -> None:
    outs, lses = make_states(num_parts, device=device)
    lse = torch.full(lses.shape[1:], NAN, device=device)
    out = merge_states(outs, lses, lse=lse)
    expected, expected_lse = reference.merge_states(outs, lses)
    assert (out.double() - expected).abs().max() <= 2e-6
    empty = expected_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert (lse.double() - expected_lse)[~empty].abs().max() <= 1e-5
    assert not out[2].any()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [8, 80, 128, 256])
def test_dtypes_and_head_dims(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    outs, lses = make_states(3, head_dim=head_dim, dtype=dtype, device=device)
    out = merge_states(outs, lses)
    assert out.dtype == dtype
    expected = reference.merge_states(outs, lses)[0]
    assert (out.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


def test_lses_far_apart_and_far_from_zero(device: torch.device) -> None:
    for lses in ([1000.0, 1001.0, 999.0], [-1000.0, -1001.0], [1000.0, -1000.0, 0.0], [1000.0] * 16 + [-1000.0] * 4):
        outs = torch.randn(len(lses), 1, 1, 8, generator=torch.Generator().manual_seed(0)).to(device)
        parts = torch.tensor(lses, device=device).view(-1, 1, 1)
        expected = reference.merge_states(outs, parts)[0]
        assert (merge_states(outs, parts).double() - expected).abs().max() <= 1e-6


@pytest.mark.sample
def test_strided_parts_and_result(device: torch.device) -> None:
    outs, lses = make_states(2, device=device)
    room = torch.full((5, 2, 4, 40), NAN, device=device)
    spread = torch.full((5, 3, 2, 48), NAN, device=device).permute(2, 0, 1, 3)[..., :32]
    spread.copy_(outs)
    out = room[:, 1, :3, :32]
    assert merge_states(spread, lses, out=out) is out
    assert torch.equal(out, merge_states(outs, lses))
    assert room.isnan().sum() == room.numel() - out.numel()


def test_result_in_another_dtype(device: torch.device) -> None:
    outs, lses = make_states(2, device=device)
    out = torch.empty(5, 3, 32, dtype=torch.float16, device=device)
    merge_states(outs, lses, out=out)
    assert (out - merge_states(outs, lses)).abs().max() <= 2e-3


def test_no_tokens(device: torch.device) -> None:
    assert merge_states(torch.empty(2, 0, 3, 8, device=device), torch.empty(2, 0, 3, device=device)).shape == (0, 3, 8)


def test_parts_of_the_keys_make_attention_over_all(device: torch.device) -> None:
    """The reference itself: softmax over 50 keys is that over 20 and over 30, merged."""
    random = torch.Generator().manual_seed(3)
    scores, values = torch.randn(50, generator=random).double(), torch.randn(50, 4, generator=random).double()
    parts = (slice(0, 20), slice(20, 50))
    outs = torch.stack([torch.softmax(scores[part], 0) @ values[part] for part in parts]).view(2, 1, 1, 4)
    lses = torch.stack([torch.logsumexp(scores[part], 0) / math.log(2) for part in parts]).view(2, 1, 1)
    out, lse = reference.merge_states(outs, lses)
    torch.testing.assert_close(out[0, 0], torch.softmax(scores, 0) @ values)
    torch.testing.assert_close(lse[0, 0], torch.logsumexp(scores, 0) / math.log(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outs": torch.zeros(5, 3, 8)}, "outs has shape"),
        ({"outs": torch.zeros(0, 5, 3, 8), "lses": torch.zeros(0, 5, 3)}, "below 1"),
        ({"outs": torch.zeros(2, 5, 3, 8, dtype=torch.float64)}, "outs is torch.float64"),
        ({"outs": torch.zeros(2, 5, 8, 3).transpose(2, 3)}, "outs has stride 3"),
        ({"lses": torch.zeros(2, 3, 5)}, "lses has shape"),
        ({"lses": torch.zeros(2, 5, 3, dtype=torch.float16)}, "lses is torch.float16"),
        ({"lses": torch.zeros(2, 3, 5).transpose(1, 2)}, "lses has strides"),
        ({"out": torch.zeros(5, 3, 9)}, "out has shape"),
        ({"lse": torch.zeros(3, 5)}, "lse has shape"),
    ],
)
def test_refuses_what_does_not_fit(device: torch.device, change: dict[str, Any], message: str) -> None:
    arguments = {"outs": torch.zeros(2, 5, 3, 8), "lses": torch.zeros(2, 5, 3)} | change
    with pytest.raises(ValueError, match=message):
        merge_states(**{name: tensor.to(device) for name, tensor in arguments.items()})
