"""write_kv() against the reference, bit for bit but for fp8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels import reference
from quire.kernels.cache_write import write_kv, write_variant
from quire.kernels.reference_prologue import to_fp8

NUM_BLOCKS = 9
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def make_pool(
    num_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int = 16,
    heads_first: bool = False,
) -> Tensor:
    """[NUM_BLOCKS, block_size, num_heads, head_dim], all NaN, in memory [.., heads, slots, ..] if heads_first."""
    shape = (NUM_BLOCKS, block_size, num_heads, head_dim)
    if heads_first:
        shape = (NUM_BLOCKS, num_heads, block_size, head_dim)
    pool = torch.full(shape, float("nan"), device=device).to(dtype)
    return pool.transpose(1, 2) if heads_first else pool


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


def choose_slots(num_tokens: int, device: torch.device, *, block_size: int = 16) -> Tensor:
    """Distinct slots in random order, the last one of the pool among them; every third token from the second skips."""
    slots = torch.randperm(NUM_BLOCKS * block_size - 1)[:num_tokens]
    slots[0] = NUM_BLOCKS * block_size - 1
    slots[1::3] = -1
    return slots.to(device)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads_first", [False, True], ids=["slots-heads", "heads-slots"])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "k_head_dim", "v_head_dim", "block_size"),
    [(1, 1, 32, 32, 16), (13, 3, 64, 64, 16), (33, 2, 96, 32, 64), (20, 8, 80, 80, 32), (9, 1, 256, 256, 128)],
)
def test_equals_the_reference_bit_for_bit(
    device: torch.device,
    dtype: torch.dtype,
    heads_first: bool,
    num_tokens: int,
    num_heads: int,
    k_head_dim: int,
    v_head_dim: int,
    block_size: int,
) -> None:
    k, v = (
        torch.randn(num_tokens, num_heads, head_dim, device=device).to(dtype) for head_dim in (k_head_dim, v_head_dim)
    )
    k_pool, v_pool = (
        make_pool(num_heads, head_dim, dtype=dtype, device=device, block_size=block_size, heads_first=heads_first)
        for head_dim in (k_head_dim, v_head_dim)
    )
    want_k, want_v = k_pool.clone(), v_pool.clone()
    slots = choose_slots(num_tokens, device, block_size=block_size)
    reference.write_kv(k, v, want_k, want_v, slot_mapping=slots)
    write_kv(k, v, k_pool, v_pool, slot_mapping=slots)
    assert torch.equal(bits(k_pool), bits(want_k))
    assert torch.equal(bits(v_pool), bits(want_v))


@pytest.mark.sample
def test_reads_views_of_the_projection(device: torch.device) -> None:
    qkv = torch.randn(10, 8, 32, device=device)
    k, v = qkv[:, 4:6], qkv[:, 6:8]
    k_pool, v_pool = (make_pool(2, 32, dtype=torch.float32, device=device) for _ in range(2))
    want_k, want_v = k_pool.clone(), v_pool.clone()
    slots = choose_slots(10, device)
    reference.write_kv(k, v, want_k, want_v, slot_mapping=slots)
    write_kv(k, v, k_pool, v_pool, slot_mapping=slots)
    assert torch.equal(bits(k_pool), bits(want_k))
    assert torch.equal(bits(v_pool), bits(want_v))


def test_the_tile_of_long_steps(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU of one multiprocessor a step is soon long."""
    sizes = {"num_kv_heads": 3, "head_dim_k": 32, "head_dim_v": 32, "block_size": 16, "multiprocessors": 1}
    assert [write_variant(num_rows=n, stride_unit=8, **sizes).constants["BLOCK_ROWS"] for n in (127, 128)] == [8, 32]
    monkeypatch.setattr("quire.kernels.cache_write.num_multiprocessors", lambda device: 1)
    k, v = (torch.randn(45, 3, 32, device=device) for _ in range(2))
    k_pool, v_pool = (make_pool(3, 32, dtype=torch.float32, device=device) for _ in range(2))
    want_k, want_v = k_pool.clone(), v_pool.clone()
    slots = choose_slots(45, device)
    reference.write_kv(k, v, want_k, want_v, slot_mapping=slots)
    write_kv(k, v, k_pool, v_pool, slot_mapping=slots)
    assert torch.equal(bits(k_pool), bits(want_k))
    assert torch.equal(bits(v_pool), bits(want_v))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_scales_and_saturates(device: torch.device, dtype: torch.dtype) -> None:
    scales = torch.tensor([[0.25, 4.0], [2.0, 0.5]], device=device)
    k, v = (fp8_tokens(scale, device).to(dtype) for scale in scales)
    k[0, 0, :4] = torch.tensor([1000.0, -1000.0, float("inf"), 0.0])
    k_pool, v_pool = (make_pool(2, 32, dtype=torch.float8_e4m3fn, device=device) for _ in range(2))
    slots = torch.arange(12, device=device) * 7
    write_kv(k, v, k_pool, v_pool, slot_mapping=slots, kv_scales=scales)
    for pool, tokens, scale in zip((k_pool, v_pool), (k, v), scales, strict=True):
        flat = pool.view(-1, 2, 32)
        assert torch.equal(flat[slots].float(), to_fp8(tokens, scale[:, None]).float())
        assert int(flat.float().isnan().any((1, 2)).sum()) == flat.shape[0] - 12
    assert k_pool.view(-1, 2, 32)[0, 0, :4].float().tolist() == [448.0, -448.0, 448.0, 0.0]


def fp8_tokens(scale: Tensor, device: torch.device) -> Tensor:
    """[12, 2, 32], for scales [2]. On a GPU any, else just above fp8 numbers: the interpreter may round 1.99 to 1."""
    x = torch.randn(12, 2, 32, device=device)
    return x if device.type == "cuda" else x.to(torch.float8_e4m3fn).float() * (1 + 2**-6) * scale[:, None]


def test_fp8_keeps_nan(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("the interpreter's cast to fp8 makes numbers of NaN")
    pool = torch.zeros(2, 16, 1, 32, device=device).to(torch.float8_e4m3fn)
    k = torch.full((1, 1, 32), float("nan"), device=device)
    write_kv(k, k, pool, pool, slot_mapping=torch.tensor([17], device=device))
    assert bool(pool[1, 1].float().isnan().all())


@pytest.mark.parametrize("heads_first", [False, True], ids=["block", "head"])
def test_offsets_beyond_int32(device: torch.device, heads_first: bool) -> None:
    """Memory that is not touched costs nothing: the pools take 3 GiB of addresses and a few pages."""
    if heads_first:
        memory = torch.empty(3, 2**20 + 1, 2, 16, 32, dtype=torch.int8, device=device).permute(2, 1, 3, 0, 4)
    else:
        memory = torch.empty(2**20 + 2, 2, 16, 3, 32, dtype=torch.int8, device=device).transpose(0, 1)
    k_pool, v_pool = memory.view(torch.float8_e4m3fn)
    block_id = k_pool.shape[0] - 1
    assert k_pool.stride(2) < 2**31 < block_id * k_pool.stride(0) + 2 * k_pool.stride(2)
    k = torch.ones(2, 3, 32, device=device)
    write_kv(k, 2 * k, k_pool, v_pool, slot_mapping=torch.tensor([block_id * 16 + 3, -1], device=device))
    assert bool((k_pool[block_id, 3].float() == 1).all())
    assert bool((v_pool[block_id, 3].float() == 2).all())


def test_no_tokens(device: torch.device) -> None:
    pool = make_pool(2, 32, dtype=torch.float16, device=device)
    k = torch.empty(0, 2, 32, dtype=torch.float16, device=device)
    write_kv(k, k, pool, pool, slot_mapping=torch.empty(0, dtype=torch.int64, device=device))
    assert bool(pool.isnan().all())


def test_two_runs_give_the_same_bits(device: torch.device) -> None:
    k = torch.randn(12, 2, 32, device=device)
    slots = choose_slots(12, device)
    pools = [make_pool(2, 32, dtype=torch.float8_e4m3fn, device=device) for _ in range(2)]
    scales = torch.full((2, 2), 0.7, device=device)
    for pool in pools:
        write_kv(k, k, pool, pool, slot_mapping=slots, kv_scales=scales)
    assert torch.equal(bits(pools[0]), bits(pools[1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(3, 2, 32)}, "k is torch.float32"),
        ({"v": torch.zeros(3, 1, 32).half()}, "v has shape"),
        ({"k": torch.zeros(3, 2, 64).half()[:, :, ::2]}, "k has stride 2"),
        ({"v": torch.zeros(4, 2, 32).half()}, "v has shape"),
        ({"slot_mapping": torch.zeros(3, dtype=torch.int32)}, "slot_mapping is torch.int32"),
        ({"slot_mapping": torch.zeros(6, dtype=torch.int64)[::2]}, "slot_mapping has strides"),
        ({"slot_mapping": torch.zeros(3, 1, dtype=torch.int64)}, "slot_mapping has shape"),
        ({"k_pool": torch.zeros(4, 12, 2, 32).half(), "v_pool": torch.zeros(4, 12, 2, 32).half()}, "block size=12"),
        ({"v_pool": torch.zeros(4, 16, 2, 32)}, "v_pool is torch.float32"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refuses(change: dict[str, Tensor], message: str) -> None:
    arguments = {name: torch.zeros(3, 2, 32).half() for name in ("k", "v")}
    arguments |= {name: torch.zeros(4, 16, 2, 32).half() for name in ("k_pool", "v_pool")}
    arguments |= {"slot_mapping": torch.arange(3)}
    with pytest.raises(ValueError, match=message):
        write_kv(**(arguments | change))
