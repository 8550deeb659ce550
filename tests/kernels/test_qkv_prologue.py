"""qkv_prologue() against float64: queries returned, keys and values in their slots, and nothing else written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels import reference_prologue
from quire.kernels.qkv_prologue import prologue_variant, qkv_prologue
from quire.kernels.rope_table import make_rope_table

NUM_BLOCKS = 7
BLOCK_SIZE = 16
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Step:
    """One step's arguments, and in `sizes` those that only the reference takes."""

    qkv: Tensor
    k_pool: Tensor
    v_pool: Tensor
    options: dict[str, Any]
    sizes: dict[str, Any]

    def run(self, **more: Any) -> Tensor:
        return qkv_prologue(self.qkv, self.k_pool, self.v_pool, **(self.options | more))

    def want(self) -> tuple[Tensor, Tensor, Tensor]:
        return reference_prologue.qkv_prologue(self.qkv.cpu(), **self.sizes)

    def check(self, q: Tensor) -> None:
        want_q, want_k, want_v = self.want()
        assert_rounded(q, want_q)
        slots = self.options["slot_mapping"].cpu()
        for pool, want in ((self.k_pool, want_k), (self.v_pool, want_v)):
            flat = pool.cpu().reshape(-1, *pool.shape[2:])
            assert_rounded(flat[slots[slots >= 0]], want[slots >= 0])
            assert int(flat.float().isnan().any((1, 2)).sum()) == flat.shape[0] - int((slots >= 0).sum())


def assert_rounded(have: Tensor, want: Tensor) -> None:
    """As exact as float32 arithmetic and one rounding. Truncation passes: the interpreter casts to bf16 that way."""
    error = (have.double().cpu() - want).abs()
    assert bool((error <= torch.finfo(have.dtype).eps * want.abs() + 2e-6 * (1 + want.abs())).all()), float(error.max())


def make_step(
    device: torch.device,
    *,
    num_tokens: int = 9,
    num_query_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    rotary_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    heads_first: bool = False,
    interleaved: bool = False,
    norm: bool = True,
    attention_scaling: float = 1.0,
    eps: float = 1e-3,
    seed: int = 0,
) -> Step:
    """Pools of NaN, slots in random order with every third token from the second skipped, positions up to 4095."""
    generator = torch.Generator().manual_seed(seed)
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    num_heads = num_query_heads + 2 * num_kv_heads
    qkv = torch.randn(num_tokens, num_heads * head_dim, generator=generator).to(dtype)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=generator)[:num_tokens]
    slots[1::3] = -1
    positions = torch.randint(0, 4096, (num_tokens,), generator=generator)
    positions[0] = 0
    inv_freq = 10000.0 ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / max(rotary_dim, 1))
    weights = [
        (1 + torch.randn(head_dim, generator=generator) / 4).to(dtype).to(device) if norm else None for _ in range(2)
    ]
    shape = (NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim)
    if heads_first:
        shape = (NUM_BLOCKS, num_kv_heads, BLOCK_SIZE, head_dim)
    pools = [torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2)]
    k_pool, v_pool = (pool.transpose(1, 2) if heads_first else pool for pool in pools)
    shared = {"interleaved": interleaved, "eps": eps}
    rope_table = make_rope_table(inv_freq, num_positions=4096, attention_scaling=attention_scaling).to(device)
    return Step(
        qkv=qkv.to(device),
        k_pool=k_pool,
        v_pool=v_pool,
        options={
            "slot_mapping": slots.to(device),
            "positions": positions.to(device),
            "rope_table": rope_table if rotary_dim else None,
            "q_norm_weight": weights[0],
            "k_norm_weight": weights[1],
            **shared,
        },
        sizes={
            "num_query_heads": num_query_heads,
            "num_kv_heads": num_kv_heads,
            "positions": positions,
            "inv_freq": inv_freq if rotary_dim else None,
            "attention_scaling": attention_scaling,
            "q_norm_weight": None if weights[0] is None else weights[0].cpu(),
            "k_norm_weight": None if weights[1] is None else weights[1].cpu(),
            **shared,
        },
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "qk-norm"])
def test_dtypes_and_forms(device: torch.device, dtype: torch.dtype, interleaved: bool, norm: bool) -> None:
    step = make_step(device, dtype=dtype, interleaved=interleaved, norm=norm)
    step.check(step.run())


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(64, 64), (64, 16), (80, 80), (80, 32), (96, 48), (32, 0), (256, 256)]
)
def test_head_dims_rotated_in_part(device: torch.device, head_dim: int, rotary_dim: int, interleaved: bool) -> None:
    step = make_step(device, num_tokens=3, head_dim=head_dim, rotary_dim=rotary_dim, interleaved=interleaved)
    step.check(step.run())


@pytest.mark.parametrize(("num_query_heads", "num_kv_heads"), [(1, 1), (4, 4), (7, 1), (16, 2)])
@pytest.mark.parametrize("num_tokens", [1, 4, 5])
def test_heads_and_tokens(device: torch.device, num_query_heads: int, num_kv_heads: int, num_tokens: int) -> None:
    step = make_step(device, num_tokens=num_tokens, num_query_heads=num_query_heads, num_kv_heads=num_kv_heads)
    step.check(step.run())


def test_the_tile_of_long_steps(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU of one multiprocessor a step is soon long."""
    sizes = {"head_dim": 32, "rotary_dim": 32, "block_size": 16, "has_norm": True, "interleaved": False}
    heads = {"num_query_heads": 4, "num_kv_heads": 2}
    variants = [prologue_variant(num_tokens=n, multiprocessors=1, stride_unit=8, **heads, **sizes) for n in (9, 37)]
    assert [variant.constants["BLOCK_TOKENS"] for variant in variants] == [4, 32]
    monkeypatch.setattr("quire.kernels.qkv_prologue.num_multiprocessors", lambda device: 1)
    step = make_step(device, num_tokens=37, **heads)
    step.check(step.run())


@pytest.mark.sample
def test_strided_projection_pool_and_result(device: torch.device) -> None:
    step = make_step(device, heads_first=True)
    wide = torch.full((9, step.qkv.shape[1] + 64), float("nan"), device=device)
    wide[:, 32:-32] = step.qkv
    out = torch.full((4, 9, 64), float("nan"), device=device).transpose(0, 1)[:, :, :32]
    step = Step(wide[:, 32:-32], step.k_pool, step.v_pool, step.options, step.sizes)
    assert step.run(out=out) is out
    step.check(out)


def test_attention_scaling(device: torch.device) -> None:
    step = make_step(device, attention_scaling=1.25, head_dim=64, rotary_dim=32)
    step.check(step.run())


def test_values_are_copied_bit_for_bit(device: torch.device) -> None:
    step = make_step(device, dtype=torch.bfloat16)
    step.run()
    slots = step.options["slot_mapping"]
    values = step.qkv.view(9, 8, 32)[:, 6:]
    assert torch.equal(step.v_pool.reshape(-1, 2, 32)[slots[slots >= 0]], values[slots >= 0])


def test_fp8_pool(device: torch.device) -> None:
    """Keys within one unit in the last place of e4m3, values as write_kv() writes them."""
    step = make_step(device, dtype=torch.bfloat16, norm=False)
    step.qkv[:, -64:] = step.qkv[:, -64:].to(torch.float8_e4m3fn).to(torch.bfloat16) * 2
    k_pool, v_pool = (pool.to(torch.float8_e4m3fn) for pool in (step.k_pool, step.v_pool))
    fp8 = Step(step.qkv, k_pool, v_pool, step.options, step.sizes)
    scales = torch.tensor([[0.5, 0.25], [2.0, 1.0]])
    q = fp8.run(kv_scales=scales.to(device))
    want_q, want_k, want_v = fp8.want()
    assert_rounded(q, want_q)
    slots = step.options["slot_mapping"].cpu()
    written = slots >= 0
    have_k, have_v = (pool.cpu().view(-1, 2, 32)[slots[written]].double() for pool in (k_pool, v_pool))
    k_scale, v_scale = scales.double()[..., None]
    assert torch.equal(have_v, want_v[written] / v_scale)
    # The interpreter may round 1.99 to 1; elsewhere it is exact to a unit in the last place.
    close = torch.isclose(have_k, want_k[written] / k_scale, rtol=2**-3, atol=2**-9)
    assert float(close.double().mean()) > (0.9 if device.type == "cpu" else 0.9999)
    assert bool((have_k.abs() <= want_k[written].abs() / k_scale * (1 + 2**-3) + 2**-9).all())


@pytest.mark.parametrize("pool_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_pool_of_another_dtype(device: torch.device, dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    """Keys and values are rounded once, to the pool's dtype; queries stay in their own."""
    step = make_step(device, dtype=dtype)
    pools = (pool.to(pool_dtype) for pool in (step.k_pool, step.v_pool))
    mixed = Step(step.qkv, *pools, step.options, step.sizes)
    q = mixed.run()
    assert q.dtype == dtype
    mixed.check(q)


@pytest.mark.parametrize("heads_first", [False, True], ids=["block", "head"])
def test_offsets_beyond_int32(device: torch.device, heads_first: bool) -> None:
    """Memory that is not touched costs nothing: the pools take 3 GiB of addresses and a few pages."""
    step = make_step(device, num_tokens=1, num_kv_heads=3, dtype=torch.float16)
    k_pool, v_pool = huge_pools(device, heads_first=heads_first)
    block_id = k_pool.shape[0] - 1
    assert k_pool.stride(2) < 2**31 < block_id * k_pool.stride(0) + 2 * k_pool.stride(2)
    step.qkv[:] = 2
    options = step.options | {"slot_mapping": torch.tensor([block_id * 16 + 3], device=device), "rope_table": None}
    Step(step.qkv, k_pool, v_pool, options, step.sizes).run()
    want_k = 2 / (4 + 1e-3) ** 0.5 * step.options["k_norm_weight"].float()
    torch.testing.assert_close(k_pool[block_id, 3].float(), want_k.expand(3, 32), rtol=0.125, atol=0)
    assert bool((v_pool[block_id, 3].float() == 2).all())


def huge_pools(device: torch.device, *, heads_first: bool) -> tuple[Tensor, Tensor]:
    """Two fp8 pools [B, 16, 3, 32] in one tensor, with the last block, or last head, 2 ** 31 elements behind."""
    if heads_first:
        memory = torch.empty(3, 2**20 + 1, 2, 16, 32, dtype=torch.int8, device=device)
        pools = memory.permute(2, 1, 3, 0, 4)
    else:
        memory = torch.empty(2**20 + 2, 2, 16, 3, 32, dtype=torch.int8, device=device)
        pools = memory.transpose(0, 1)
    k_pool, v_pool = pools.view(torch.float8_e4m3fn)
    return k_pool, v_pool


def test_two_runs_give_the_same_bits(device: torch.device) -> None:
    first, second = (make_step(device, dtype=torch.bfloat16) for _ in range(2))
    assert torch.equal(first.run().view(torch.int16), second.run().view(torch.int16))
    assert torch.equal(first.k_pool.view(torch.int16), second.k_pool.view(torch.int16))


def test_no_tokens(device: torch.device) -> None:
    step = make_step(device, num_tokens=9)
    options = step.options | {name: step.options[name][:0] for name in ("slot_mapping", "positions")}
    q = qkv_prologue(step.qkv[:0], step.k_pool, step.v_pool, **options)
    assert q.shape == (0, 4, 32)
    assert bool(step.k_pool.isnan().all())


def test_rope_table_of_late_positions() -> None:
    """Float32 angles are off by 2 ** -8 at position 131071: as much as bfloat16 resolves."""
    table = make_rope_table(torch.tensor([1.0, 0.25]), num_positions=131072, attention_scaling=0.5)
    assert table.shape == (131072, 4)
    assert table.dtype == torch.float32
    angles = torch.tensor([131071.0, 131071.0 / 4], dtype=torch.float64)
    want = 0.5 * torch.cat([angles.cos(), angles.sin()])
    torch.testing.assert_close(table[-1].double(), want, rtol=0, atol=1e-7)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"qkv": torch.zeros(3, 250)}, "qkv has 250 columns"),
    ({"qkv": torch.zeros(3, 128)}, "qkv has 128 columns"),
    ({"qkv": torch.zeros(3, 256).double()}, "qkv is torch.float64"),
    ({"qkv": torch.zeros(3, 512)[:, ::2]}, "qkv has stride 2"),
    ({"qkv": torch.zeros(4, 256)}, "slot_mapping has shape"),
    ({"v_pool": torch.zeros(4, 16, 2, 64)}, "v_pool has shape"),
    ({"positions": torch.zeros(3, dtype=torch.int32)}, "positions is torch.int32"),
    ({"slot_mapping": torch.zeros(6, dtype=torch.int64)[::2]}, "slot_mapping has strides"),
    ({"rope_table": torch.zeros(8, 31)}, "rope_table has 31 columns"),
    ({"rope_table": torch.zeros(8, 34)}, "rope_table has 34 columns"),
    ({"rope_table": torch.zeros(8, 32).double()}, "rope_table is torch.float64"),
    ({"q_norm_weight": torch.zeros(32)}, "k_norm_weight is None"),
    ({"q_norm_weight": torch.zeros(32), "k_norm_weight": torch.zeros(16)}, "k_norm_weight has shape"),
    ({"q_norm_weight": torch.zeros(32), "k_norm_weight": torch.zeros(32).half()}, "k_norm_weight is torch.float16"),
    ({"out": torch.zeros(3, 5, 32)}, "out has shape"),
    ({"out": torch.zeros(3, 4, 32).half()}, "out is torch.float16"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message.replace(" ", "-") for _, message in REFUSED])
def test_refuses(change: dict[str, Any], message: str) -> None:
    arguments = {
        "qkv": torch.zeros(3, 256),
        "k_pool": torch.zeros(4, 16, 2, 32),
        "v_pool": torch.zeros(4, 16, 2, 32),
        "slot_mapping": torch.arange(3),
        "positions": torch.arange(3),
        "rope_table": torch.zeros(8, 32),
    }
    with pytest.raises(ValueError, match=message):
        qkv_prologue(**(arguments | change))
