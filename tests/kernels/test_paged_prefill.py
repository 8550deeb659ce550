"""paged_prefill() against float64, with NaN in every slot that no query sees and in every result before the call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels import paged_prefill as module
from quire.kernels import reference
from quire.kernels.launching import DEFAULT_LIMITS, INTERPRET, chosen_for
from quire.kernels.paged_prefill import busy_tiles, choose_block_m, choose_num_splits, paged_prefill, prefill_variant

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn

# A block id that no pool has: what is left in a table where nothing may be read.
NO_BLOCK = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Case:
    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    options: dict[str, Any]

    def run(self, **more: Any) -> tuple[Tensor, Tensor]:
        """The result and its lse, both NaN before."""
        shape = (*self.q.shape[:2], self.v_pool.shape[3])
        out = torch.full(shape, float("nan"), dtype=self.q.dtype, device=self.q.device)
        lse = torch.full(shape[:2], float("nan"), device=self.q.device)
        options = {"out": out, "lse": lse} | self.options | more
        assert paged_prefill(self.q, self.k_pool, self.v_pool, **options) is options["out"]
        return options["out"], options["lse"]

    def want(self) -> tuple[Tensor, Tensor]:
        options = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in self.options.items()}
        scales = options.pop("kv_scales", None)
        pools = [self.k_pool.cpu(), self.v_pool.cpu()]
        if scales is not None:
            pools = [pool.double() * scale[:, None] for pool, scale in zip(pools, scales.double(), strict=True)]
        return reference.paged_attention_states(self.q.cpu(), *pools, **options)

    @property
    def largest_v_scale(self) -> float:
        scales = self.options.get("kv_scales")
        return 1.0 if scales is None else float(scales[1].max())

    def check(self, **more: Any) -> None:
        """To what rounding the weights and the result allows; the interpreter's casts to bf16 truncate."""
        out, lse = self.run(**more)
        want_out, want_lse = self.want()
        largest = float(self.v_pool.float().nan_to_num().abs().max()) * self.largest_v_scale
        error = (out.cpu().double() - want_out).abs()
        allowed = torch.finfo(self.q.dtype).eps * (largest + want_out.abs()) + 1e-5 * largest
        assert bool((error <= allowed).all()), f"{float(error.max())}, {int((~(error <= allowed)).sum())} elements"
        assert bool((out[want_lse.isneginf()] == 0).all())
        torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-5, atol=1e-4)


def make_case(
    device: torch.device,
    lengths: list[tuple[int, int]],
    *,
    num_kv_heads: int = 1,
    heads_per_kv: int = 2,
    head_dim: int = 32,
    v_head_dim: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float16,
    kv_dtype: torch.dtype | None = None,
    num_pads: int = 0,
    heads_first: bool = False,
    seed: int = 0,
    **options: Any,
) -> Case:
    """Sequences of (keys, queries), their blocks in random order, and pads behind them.

    Slots before the first position that a sequence's first query sees are NaN, and blocks of such slots are not in
    the table.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-num_keys // block_size) for num_keys, _ in lengths]
    block_ids = iter((torch.randperm(sum(counts), generator=generator) + 1).tolist())
    block_tables = torch.full((len(lengths), max(counts) + 2), NO_BLOCK, dtype=torch.int32)
    shape = (sum(counts) + 2, block_size, num_kv_heads)
    pools = [torch.full((*shape, dim), float("nan")) for dim in (head_dim, v_head_dim or head_dim)]
    for seq, (num_keys, num_queries) in enumerate(lengths):
        seen = reference.visible_keys(num_keys - num_queries, window=options.get("window"), chunk=options.get("chunk"))
        for key in range(min(seen, default=0), num_keys):
            index, offset = divmod(key, block_size)
            if block_tables[seq, index] == NO_BLOCK:
                block_tables[seq, index] = next(block_ids)
            for pool in pools:
                pool[block_tables[seq, index], offset] = torch.randn(pool.shape[2:], generator=generator)
    k_pool, v_pool = (pool.to(kv_dtype or dtype).to(device) for pool in pools)
    if heads_first:
        k_pool, v_pool = (pool.transpose(1, 2).contiguous().transpose(1, 2) for pool in (k_pool, v_pool))
    cu_seqlens_q = list(accumulate((num_queries for _, num_queries in lengths), initial=0))
    num_heads = num_kv_heads * heads_per_kv
    per_head = {name: torch.randn(num_heads, generator=generator).to(device) for name in ("sinks", "alibi_slopes")}
    return Case(
        q=torch.randn(cu_seqlens_q[-1] + num_pads, num_heads, head_dim, generator=generator).to(dtype).to(device),
        k_pool=k_pool,
        v_pool=v_pool,
        options={
            "block_tables": block_tables.to(device),
            "seq_lens": torch.tensor([num_keys for num_keys, _ in lengths], dtype=torch.int32, device=device),
            "cu_seqlens_q": torch.tensor(cu_seqlens_q, dtype=torch.int32, device=device),
            "scaling": head_dim**-0.5,
            **{name: per_head[name] if value is True else value for name, value in options.items()},
        },
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_lengths(device: torch.device, dtype: torch.dtype) -> None:
    """Whole prompts, later parts, one token, none, at the edges of blocks and tiles, and pads."""
    lengths = [(1, 1), (0, 0), (15, 15), (16, 16), (17, 3), (0, 2), (64, 2), (129, 66), (5, 0), (70, 1)]
    make_case(device, lengths, dtype=dtype, num_pads=5).check()


@pytest.mark.parametrize(
    ("num_kv_heads", "heads_per_kv"), [(1, 1), (3, 1), (1, 2), (2, 4), (1, 7), (3, 7), (1, 8), (1, 71)]
)
def test_heads(device: torch.device, num_kv_heads: int, heads_per_kv: int) -> None:
    make_case(device, [(20, 11), (70, 3)], heads_per_kv=heads_per_kv, num_kv_heads=num_kv_heads).check()


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("kv_dtype", [torch.float16, FP8], ids=str)
def test_block_sizes(device: torch.device, block_size: int, kv_dtype: torch.dtype) -> None:
    make_case(device, [(140, 20), (64, 64), (257, 2)], block_size=block_size, kv_dtype=kv_dtype).check()


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim"), [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (64, 32), (8, 72), (192, 128)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_head_dims(device: torch.device, head_dim: int, v_head_dim: int, dtype: torch.dtype) -> None:
    make_case(device, [(70, 9), (33, 33)], head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype).check()


@pytest.mark.parametrize("heads_first", [False, True], ids=["slots-heads", "heads-slots"])
def test_strided_queries_pools_tables_and_result(device: torch.device, heads_first: bool) -> None:
    case = make_case(device, [(40, 30), (50, 7)], num_kv_heads=2, heads_first=heads_first)
    qkv = torch.full((37, 8, 40), float("nan"), dtype=torch.float16, device=device)
    qkv[:, 2:6, :32] = case.q
    tables = torch.full((2, 11), NO_BLOCK, dtype=torch.int32, device=device)
    tables[:, : case.options["block_tables"].shape[1]] = case.options["block_tables"]
    options = case.options | {"block_tables": tables[:, : case.options["block_tables"].shape[1]]}
    out = torch.full((6, 37, 40), float("nan"), dtype=torch.float16, device=device).transpose(0, 1)[:, 1:5, :32]
    Case(qkv[:, 2:6, :32], case.k_pool, case.v_pool, options).check(out=out)


@pytest.mark.parametrize(
    "bounds",
    [{"window": 1}, {"window": 9}, {"window": 64}, {"window": 1000}, {"chunk": 1}, {"chunk": 48}, {"chunk": 64},
     {"window": 20, "chunk": 32}],
    ids=str,
)  # fmt: skip
def test_windows_and_chunks(device: torch.device, bounds: dict[str, int]) -> None:
    """In tiles of 64 rows and keys: some rows see none of a tile's keys, some tiles are seen by no row."""
    make_case(device, [(300, 90), (65, 65), (200, 1), (0, 2)], **bounds).check()


def test_window_with_a_full_tile_in_the_middle(device: torch.device) -> None:
    make_case(device, [(330, 40)], window=150).check()
    make_case(device, [(330, 40)], window=150, dtype=torch.float32).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "feature",
    [{"softcap": 2.0}, {"sinks": True}, {"alibi_slopes": True},
     {"softcap": 3.0, "sinks": True, "alibi_slopes": True, "window": 37}],
    ids="-".join,
)  # fmt: skip
def test_features(device: torch.device, dtype: torch.dtype, feature: dict[str, Any]) -> None:
    make_case(device, [(90, 40), (17, 17), (0, 3)], num_kv_heads=2, dtype=dtype, num_pads=2, **feature).check()


def test_softcap_of_huge_scores(device: torch.device) -> None:
    case = make_case(device, [(40, 40)], softcap=20.0, dtype=torch.float32)
    Case(case.q * 1e4, case.k_pool, case.v_pool, case.options).check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_pool(device: torch.device, dtype: torch.dtype) -> None:
    scales = torch.tensor([[0.5, 2.0], [3.0, 1.0]], device=device)
    make_case(device, [(100, 40), (17, 17)], dtype=dtype, kv_dtype=FP8, num_kv_heads=2, kv_scales=scales).check()


@pytest.mark.parametrize("feature", [{}, {"softcap": 5.0}, {"alibi_slopes": True, "window": 20}], ids=str)
@pytest.mark.parametrize("magnitude", [0.0, 1e-30, 1e30])
def test_queries_beyond_the_range_of_float16_over_an_fp8_pool(
    device: torch.device, magnitude: float, feature: dict[str, Any]
) -> None:
    """They are float16 numbers times a power of two for each row."""
    k_scale = min(1.0, 1 / magnitude) if magnitude else 1.0
    scales = torch.tensor([[k_scale], [1.0]], device=device)
    case = make_case(device, [(100, 40), (17, 17)], dtype=torch.bfloat16, kv_dtype=FP8, kv_scales=scales, **feature)
    q = case.q.clone()
    q[:, 1] *= magnitude
    replace(case, q=q).check()


@pytest.mark.parametrize("num_splits", [2, 5])
@pytest.mark.parametrize("feature", [{}, {"window": 70, "sinks": True}, {"chunk": 128, "softcap": 5.0}], ids=str)
def test_splits(device: torch.device, num_splits: int, feature: dict[str, Any]) -> None:
    """More splits than tiles of keys too: some have none."""
    case = make_case(device, [(200, 9), (3, 3), (0, 1), (150, 3)], num_pads=1, v_head_dim=64, **feature)
    case.check(num_splits=num_splits)


@pytest.mark.parametrize(
    "feature",
    [{}, {"window": 70}, {"chunk": 100, "sinks": True}, {"softcap": 3.0, "block_size": 64}, {"kv_dtype": FP8}],
    ids=str,
)
def test_products_begun_a_tile_ahead_change_no_bit(device: torch.device, feature: dict[str, Any]) -> None:
    """Nor do they read slots that no query sees, which are NaN."""
    case = make_case(device, [(1, 1), (64, 64), (65, 5), (230, 140)], num_pads=2, **feature)
    for found, expected in zip(case.run(qk_ahead=True), case.run(), strict=True):
        assert torch.equal(found, expected)


DESCRIBED: list[dict[str, Any]] = [
    {},
    {"window": 70},
    {"chunk": 100, "sinks": True},
    {"softcap": 3.0, "alibi_slopes": True},
    {"block_size": 128, "heads_first": True, "num_kv_heads": 2},
    {"head_dim": 24, "v_head_dim": 40},
    {"kv_dtype": FP8, "window": 70},
    {"dtype": torch.float32, "block_size": 64},
]


@pytest.mark.parametrize("qk_ahead", [False, True])
@pytest.mark.parametrize("feature", DESCRIBED, ids=str)
def test_tiles_copied_by_descriptors_change_no_bit(
    device: torch.device, feature: dict[str, Any], qk_ahead: bool
) -> None:
    """Nor do they read slots that no query sees, which are NaN, and blocks that no table has."""
    case = make_case(device, [(1, 1), (64, 64), (65, 5), (230, 140)], num_pads=2, **{"block_size": 64} | feature)
    for found, expected in zip(case.run(descriptors=True, qk_ahead=qk_ahead), case.run(), strict=True):
        assert torch.equal(found, expected)


def test_descriptors_are_refused_where_a_tile_is_no_box(device: torch.device) -> None:
    lengths = [(70, 70)]
    with pytest.raises(ValueError, match="block size with descriptors=True=16 is below 64"):
        make_case(device, lengths).run(descriptors=True)
    with pytest.raises(ValueError, match=r"k_pool has strides .*, not multiples of 16 bytes"):
        make_case(device, lengths, block_size=64, head_dim=24, kv_dtype=FP8).run(descriptors=True)
    case = make_case(device, lengths, block_size=64)
    moved = torch.empty(case.v_pool.numel() + 4, dtype=case.v_pool.dtype, device=device)[4:].view(case.v_pool.shape)
    with pytest.raises(ValueError, match="v_pool begins at no multiple of 16 bytes"):
        replace(case, v_pool=moved).run(descriptors=True)
    with chosen_for(replace(DEFAULT_LIMITS, capability=(8, 0))):
        if INTERPRET:
            with pytest.raises(ValueError, match=r"needs a GPU of capability \(9, 0\), not \(8, 0\)"):
                case.run(descriptors=True)


def test_measured_choices_are_taken_where_they_fit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant holds the choice that a GPU decides. A pool without boxes is read as before, and not refused."""
    for name in ("QK_AHEAD", "DESCRIPTORS"):
        assert not getattr(module, name), "no GPU has decided this"
        monkeypatch.setattr(module, name, True)
    taken: list[tuple[bool, bool]] = []
    prepare = module._prepare

    def record(*args: Any) -> Any:
        taken.append(args[-2:])
        return prepare(*args)

    monkeypatch.setattr(module, "_prepare", record)
    lengths = [(70, 70)]
    make_case(device, lengths, block_size=64).check()
    make_case(device, lengths, block_size=16).check()
    make_case(device, lengths, block_size=64, kv_dtype=FP8).check()
    make_case(device, lengths, block_size=64, kv_dtype=FP8, head_dim=24).check()
    assert taken == [(True, True), (True, False), (False, True), (False, False)]


def test_few_rows_behind_a_long_prefix_are_split(device: torch.device) -> None:
    case = make_case(device, [(1100, 5)], num_kv_heads=2)
    case.check()
    split, whole = case.run()[0], case.run(num_splits=1)[0]
    assert not torch.equal(split, whole)


def test_choice_of_splits_and_tiles() -> None:
    assert choose_num_splits(132, max_keys=10**6, multiprocessors=132) == 1
    assert choose_num_splits(500, max_keys=10**6, multiprocessors=132) == 1
    assert choose_num_splits(16, max_keys=10**6, multiprocessors=132) == 8
    assert choose_num_splits(1, max_keys=10**6, multiprocessors=132) == 32
    assert choose_num_splits(16, max_keys=100, multiprocessors=132) == 1
    sizes = {"dtype": torch.bfloat16, "head_dim": 128, "kv_itemsize": 2, "limits": DEFAULT_LIMITS}
    assert [choose_block_m(rows, num_seqs=2, **sizes) for rows in (255, 256)] == [64, 128]


def test_splits_count_the_tiles_that_have_rows(device: torch.device) -> None:
    """The grid has a tile more than the one with rows: with that counted, two multiprocessors would split nothing."""
    case = make_case(device, [(1100, 5)])
    with chosen_for(replace(DEFAULT_LIMITS, num_multiprocessors=2)):
        result, in_two, whole = case.run()[0], case.run(num_splits=2)[0], case.run(num_splits=1)[0]
    assert not torch.equal(in_two, whole)
    if INTERPRET:
        assert torch.equal(result, in_two)


@pytest.mark.parametrize(("num_tokens", "num_seqs"), [(32, 1), (2, 1), (8 * 20, 8), (500, 1)])
def test_splits_of_equally_long_prompts_use_most_multiprocessors(num_tokens: int, num_seqs: int) -> None:
    """Behind 64k tokens, with 32 query heads and 8 kv heads: 32 tokens had 40 of 132 multiprocessors."""
    num_rows = num_tokens * 4
    block_m = choose_block_m(
        num_rows, num_seqs=num_seqs, dtype=torch.bfloat16, head_dim=128, kv_itemsize=2, limits=DEFAULT_LIMITS
    )
    tiles = busy_tiles(num_rows, num_seqs=num_seqs, block_m=block_m)
    assert tiles == num_seqs * -(-num_rows // num_seqs // block_m)
    num_splits = choose_num_splits(tiles * 8, max_keys=1 << 16, multiprocessors=132)
    assert 66 < tiles * 8 * num_splits <= 132


def test_the_tile_of_long_prompts(device: torch.device) -> None:
    """128 rows of 8 heads: the diagonal is 16 keys wide, and moves over the edges of tiles of 64 keys."""
    make_case(device, [(150, 130)], heads_per_kv=8).check()
    make_case(device, [(150, 130)], heads_per_kv=8, window=40).check()


@pytest.mark.sample
def test_a_prompt_in_parts_is_the_prompt_at_once(device: torch.device) -> None:
    whole = make_case(device, [(80, 80)], dtype=torch.float32)
    want = whole.run()[0]
    for first, last in ((0, 17), (17, 48), (48, 80)):
        options = whole.options | {
            "seq_lens": torch.tensor([last], dtype=torch.int32, device=device),
            "cu_seqlens_q": torch.tensor([0, last - first], dtype=torch.int32, device=device),
        }
        part = Case(whole.q[first:last], whole.k_pool, whole.v_pool, options).run()[0]
        torch.testing.assert_close(part, want[first:last], rtol=0, atol=2e-6)


@pytest.mark.parametrize("heads_first", [False, True], ids=["block", "head"])
def test_offsets_beyond_int32(device: torch.device, heads_first: bool) -> None:
    """Memory that is not touched costs nothing: the pools take 4 or 6 GiB of addresses and a few pages."""
    if heads_first:
        memory = torch.empty(3, 2**20 + 4, 2, 16, 32, dtype=torch.float16, device=device).permute(2, 1, 3, 0, 4)
    else:
        memory = torch.empty(2**20 + 4, 2, 16, 3, 32, dtype=torch.float16, device=device).transpose(0, 1)
    k_pool, v_pool = memory
    small = make_case(device, [(40, 20)], num_kv_heads=3)
    block_ids = torch.arange(k_pool.shape[0] - 3, k_pool.shape[0], device=device)
    assert k_pool.stride(2) < 2**31 < int(block_ids[0]) * k_pool.stride(0) + 2 * k_pool.stride(2)
    block_tables = small.options["block_tables"].clone()
    for pool, small_pool in ((k_pool, small.k_pool), (v_pool, small.v_pool)):
        pool[block_ids] = small_pool[block_tables[0, :3].long()]
    block_tables[0, :3] = block_ids
    out, _ = Case(small.q, k_pool, v_pool, small.options | {"block_tables": block_tables}).run()
    assert torch.equal(out, small.run()[0])


@settings(max_examples=12)
@given(
    lengths=st.lists(
        st.integers(0, 90).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, min(n, 30)))), min_size=1, max_size=4
    ),
    heads_per_kv=st.sampled_from([1, 3, 4]),
    num_pads=st.integers(0, 2),
    window=st.none() | st.integers(1, 70),
    seed=st.integers(0, 100),
)
def test_any_lengths(
    lengths: list[tuple[int, int]], heads_per_kv: int, num_pads: int, window: int | None, seed: int
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() and not INTERPRET else "cpu")
    case = make_case(device, lengths, heads_per_kv=heads_per_kv, num_pads=num_pads, window=window, seed=seed)
    case.check()


def test_two_runs_give_the_same_bits(device: torch.device) -> None:
    case = make_case(device, [(200, 9), (90, 3)], num_pads=1, sinks=True)
    for num_splits in (1, 3):
        first, second = (case.run(num_splits=num_splits)[0] for _ in range(2))
        assert torch.equal(first.view(torch.int16), second.view(torch.int16))


def test_no_tokens_and_no_lse(device: torch.device) -> None:
    case = make_case(device, [(3, 0)])
    assert case.run(lse=None)[0].shape == (0, 2, 32)
    case = make_case(device, [(3, 3)])
    assert torch.equal(case.run(lse=None)[0], case.run()[0])


def test_one_variant_for_any_lengths() -> None:
    """Nothing that changes from step to step is among the constants, but the choice of two tiles."""
    sizes = {
        "dtype": torch.bfloat16, "kv_itemsize": 2, "num_query_heads": 32, "num_kv_heads": 8, "head_dim_k": 128,
        "head_dim_v": 128, "block_size": 16, "bounded": False, "has_softcap": False, "has_sinks": False,
        "has_alibi": False, "has_lse": False, "qk_ahead": False, "descriptors": False, "stride_unit": 8,
        "limits": DEFAULT_LIMITS,
    }  # fmt: skip
    tiles = [prefill_variant(block_m=block_m, **sizes) for block_m in (128, 64)]
    assert [(t.constants["BLOCK_M"], t.constants["BLOCK_N"], t.num_warps, t.num_stages) for t in tiles] == [
        (128, 64, 8, 3),
        (64, 64, 4, 3),
    ]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(5, 4, 64)}, "q has shape"),
    ({"q": torch.zeros(5, 3, 32)}, "q has 3 heads"),
    ({"q": torch.zeros(5, 4, 32).half()}, "q is torch.float16"),
    ({"q": torch.zeros(5, 4, 64)[:, :, ::2]}, "q has stride 2"),
    ({"block_tables": torch.zeros(2, 3)}, "block_tables is torch.float32"),
    ({"block_tables": torch.zeros(2, 0, dtype=torch.int32)}, "block_tables.shape.1.=0"),
    ({"block_tables": torch.zeros(3, 2, dtype=torch.int32).t()}, "block_tables has stride 2"),
    ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, "seq_lens has shape"),
    ({"cu_seqlens_q": torch.zeros(2, dtype=torch.int32)}, "cu_seqlens_q has shape"),
    ({"scaling": -1.0}, "scaling=-1.0"),
    ({"softcap": 0.0}, "softcap=0.0"),
    ({"window": 0}, "window=0"),
    ({"chunk": 0}, "chunk=0"),
    ({"num_splits": 0}, "num_splits=0"),
    ({"sinks": torch.zeros(2)}, "sinks has shape"),
    ({"alibi_slopes": torch.zeros(4).half()}, "alibi_slopes is torch.float16"),
    ({"out": torch.zeros(5, 4, 16)}, "out has shape"),
    ({"out": torch.zeros(5, 4, 32).half()}, "out is torch.float16"),
    ({"lse": torch.zeros(4, 5).t()}, "lse has strides"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message.replace(" ", "-") for _, message in REFUSED])
def test_refuses(change: dict[str, Any], message: str) -> None:
    arguments = {
        "q": torch.zeros(5, 4, 32),
        "k_pool": torch.zeros(4, 16, 2, 32),
        "v_pool": torch.zeros(4, 16, 2, 32),
        "block_tables": torch.zeros(2, 3, dtype=torch.int32),
        "seq_lens": torch.zeros(2, dtype=torch.int32),
        "cu_seqlens_q": torch.zeros(3, dtype=torch.int32),
        "scaling": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        paged_prefill(**(arguments | change))
