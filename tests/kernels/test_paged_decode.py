"""paged_decode() against the float64 reference, and its merge of partial results against the same in NumPy.

Every slot that no query sees is NaN, and so are results before the call; table entries that must not be read name a
block far outside the pool.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels import reference
from quire.kernels.decode_plan import DecodePlan, build_decode_plan
from quire.kernels.launching import INTERPRET
from quire.kernels.merge_states import PARTS_AT_ONCE, merge_states
from quire.kernels.paged_decode import num_decode_programs, num_head_tiles, paged_decode, workspace_size

NAN = float("nan")
UNREADABLE = 2**30
FP8 = torch.float8_e4m3fn

# Of the greatest result. The interpreter cuts bfloat16 off where a GPU rounds it.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.2e-2}

# Orders of a pool's memory, as views [B, S, H, D].
MEMORY = ("BSHD", "BHSD", "BLHSD")


@dataclass(frozen=True)
class Case:
    """One batch: the arguments of paged_decode(), and those that only the reference needs."""

    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None
    max_q_len: int
    visible: dict[str, Any]  # window, chunk, causal
    score: dict[str, Any]  # softcap, sinks, alibi_slopes
    num_programs: int = 3

    @property
    def scaling(self) -> float:
        return self.q.shape[2] ** -0.5

    def plan(self, **options: Any) -> DecodePlan:
        return build_decode_plan(
            self.seq_lens,
            block_tables=self.block_tables,
            block_size=self.k_pool.shape[1],
            cu_seqlens_q=self.cu_seqlens_q,
            num_tokens=self.q.shape[0],
            max_q_len=self.max_q_len,
            **self.visible,
            **{"num_programs": self.num_programs, "min_split": 64} | options,
        )

    def run(self, **options: Any) -> tuple[Tensor, Tensor]:
        """The result and its lses; options besides paged_decode()'s: plan."""
        shape = (self.q.shape[0], self.q.shape[1], self.v_pool.shape[3])
        out = torch.full(shape, NAN, dtype=self.q.dtype, device=self.q.device)
        lse = torch.full(shape[:2], NAN, device=self.q.device)
        plan = options.pop("plan", None) or self.plan()
        size = workspace_size(plan, num_query_heads=shape[1], head_dim=shape[2])
        result = paged_decode(
            self.q,
            self.k_pool,
            self.v_pool,
            block_tables=self.block_tables,
            seq_lens=self.seq_lens,
            plan=plan,
            scaling=self.scaling,
            cu_seqlens_q=self.cu_seqlens_q,
            **self.score,
            **{"out": out, "lse": lse, "workspace": torch.full((size,), NAN, device=self.q.device)} | options,
        )
        return result, lse

    def expected(self, *, kv_scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
        k_scale, v_scale = (1.0, 1.0) if kv_scales is None else kv_scales.double()[..., None]
        cu_seqlens_q = self.cu_seqlens_q
        if cu_seqlens_q is None:
            cu_seqlens_q = torch.arange(self.seq_lens.shape[0] + 1, dtype=torch.int32)
        return reference.paged_attention_states(
            self.q,
            self.k_pool.double() * k_scale,
            self.v_pool.double() * v_scale,
            block_tables=self.block_tables,
            seq_lens=self.seq_lens,
            cu_seqlens_q=cu_seqlens_q,
            scaling=self.scaling,
            **self.visible,
            **self.score,
        )


def make_case(
    device: torch.device,
    seq_lens: Sequence[int],
    *,
    q_lens: Sequence[int] | None = None,
    num_pads: int = 0,
    num_kv_heads: int = 1,
    heads_per_kv: int = 2,
    head_dim: int = 32,
    head_dim_v: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    memory: str = "BHSD",
    seed: int = 0,
    sinks: bool = False,
    alibi: bool = False,
    softcap: float | None = None,
    num_programs: int = 3,
    **visible: Any,
) -> Case:
    random = torch.Generator().manual_seed(seed)
    block_counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(block_counts) + 3
    free = torch.randperm(num_blocks - 1, generator=random).add(1).tolist()
    tables = torch.full((len(seq_lens), max(block_counts) + 3), UNREADABLE, dtype=torch.int32)
    seen = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    mask = {name: value for name, value in visible.items() if name in ("window", "chunk")}
    for seq, seq_len in enumerate(seq_lens):
        q_len = 1 if q_lens is None else q_lens[seq]
        for position in range(seq_len):
            block = position // block_size
            if position % block_size == 0:
                tables[seq, block] = free.pop()
        keys = range(seq_len)
        if seq_len and visible.get("causal", True):
            keys = range(reference.visible_keys(max(seq_len - q_len, 0), **mask)[0], seq_len)
        for position in keys:
            seen[tables[seq, position // block_size], position % block_size] = True

    def make_pool(dim: int) -> Tensor:
        values = torch.randn(num_blocks, block_size, num_kv_heads, dim, generator=random)
        values[~seen] = NAN
        return _lay_out(values.to(kv_dtype or dtype), memory).to(device)

    num_tokens = len(seq_lens) if q_lens is None else sum(q_lens) + num_pads
    num_heads = num_kv_heads * heads_per_kv
    # Queries lie in rows with something before and behind them, as those of a merged projection do.
    q = torch.randn(num_tokens, num_heads + 3, head_dim, generator=random).to(dtype)[:, 1 : num_heads + 1]
    cu_seqlens_q = None
    if q_lens is not None:
        cu_seqlens_q = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32, device=device)
    per_head = torch.randn(num_heads, generator=random).to(device)
    return Case(
        q=q.to(device),
        k_pool=make_pool(head_dim),
        v_pool=make_pool(head_dim_v or head_dim),
        block_tables=tables.to(device)[:, :-1],
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        cu_seqlens_q=cu_seqlens_q,
        max_q_len=1 if q_lens is None else max(q_lens),
        visible=visible,
        score={
            "softcap": softcap,
            "sinks": per_head.to(q.dtype) if sinks else None,
            "alibi_slopes": per_head.abs() / 8 if alibi else None,
        },
        num_programs=num_programs,
    )


def _lay_out(values: Tensor, memory: str) -> Tensor:
    """The values, [B, S, H, D], in another order of memory; BLHSD is the middle one of three layers, keys or values."""
    if memory == "BSHD":
        return values.contiguous()
    rows = values.transpose(1, 2).contiguous()
    if memory == "BLHSD":
        rows = torch.stack([rows, rows, rows], dim=1)[:, 1]
    return rows.transpose(1, 2)


def check(case: Case, **options: Any) -> None:
    (out, lse), (expected, expected_lse) = case.run(**options), case.expected(kv_scales=options.get("kv_scales"))
    limit = TOLERANCE[case.q.dtype]
    assert (out.double() - expected).abs().max() <= limit * max(expected.abs().max().item(), 1e-3)
    empty = expected_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert not out[empty].any()
    assert (lse.double() - expected_lse)[~empty].abs().max() <= 5e-6 * max(expected_lse[~empty].abs().max().item(), 1)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_lengths_around_blocks_and_tiles(device: torch.device, block_size: int, memory: str) -> None:
    lengths = sorted({0, 1, block_size - 1, block_size, block_size + 1, 64, 65, 129})
    check(make_case(device, lengths, block_size=block_size, memory=memory, heads_per_kv=1))


@settings(max_examples=8)
@given(seq_lens=st.lists(st.integers(0, 300), min_size=1, max_size=4).filter(any), num_programs=st.integers(1, 6))
def test_any_lengths_on_any_programs(device: torch.device, seq_lens: list[int], num_programs: int) -> None:
    check(make_case(device, seq_lens, num_programs=num_programs))


@pytest.mark.parametrize(("num_kv_heads", "heads_per_kv"), [(3, 1), (2, 2), (2, 4), (1, 7), (1, 8), (1, 70)])
def test_query_heads_per_kv_head(device: torch.device, num_kv_heads: int, heads_per_kv: int) -> None:
    check(make_case(device, [5, 100, 0], num_kv_heads=num_kv_heads, heads_per_kv=heads_per_kv))


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(8, 8), (64, 64), (80, 80), (128, 128), (192, 128), (32, 96), (256, 256)]
)
def test_head_dims(device: torch.device, head_dim: int, head_dim_v: int) -> None:
    check(make_case(device, [70, 9], head_dim=head_dim, head_dim_v=head_dim_v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["", "softcap"])
def test_half_precision(device: torch.device, dtype: torch.dtype, softcap: float | None) -> None:
    check(make_case(device, [1, 64, 150], dtype=dtype, heads_per_kv=4, head_dim=64, softcap=softcap))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fp8_cache_with_scales(device: torch.device, dtype: torch.dtype) -> None:
    case = make_case(device, [1, 64, 150], dtype=dtype, kv_dtype=FP8, num_kv_heads=2)
    check(case, kv_scales=torch.tensor([[0.5, 2.0], [3.0, 0.1]], device=device))


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("q_lens", [None, (1, 3, 8, 1, 0, 1, 2)], ids=["one", "ragged"])
def test_fp8_cache_around_blocks_and_tiles(device: torch.device, block_size: int, q_lens: Sequence[int] | None) -> None:
    """Tiles of 128 keys, which begin at any multiple of 64."""
    seq_lens = [1, 63, 64, 65, 0, 129, 330]
    case = make_case(
        device, seq_lens, q_lens=q_lens, dtype=torch.bfloat16, kv_dtype=FP8, block_size=block_size, memory="BLHSD"
    )
    check(case)
    check(case, plan=case.plan(fixed_split=192))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 8), (72, 72), (64, 120)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp8_cache_of_any_head_dim(device: torch.device, head_dim: int, head_dim_v: int, dtype: torch.dtype) -> None:
    check(make_case(device, [1, 150], dtype=dtype, kv_dtype=FP8, head_dim=head_dim, head_dim_v=head_dim_v))


@pytest.mark.parametrize("magnitude", [0.0, 1e-30, 1e30])
def test_queries_beyond_the_range_of_float16_over_an_fp8_cache(device: torch.device, magnitude: float) -> None:
    """They are float16 numbers times a power of two for each row."""
    case = make_case(device, [1, 64, 150], dtype=torch.bfloat16, kv_dtype=FP8, heads_per_kv=4, head_dim=64)
    q = case.q.clone()
    q[:, 1] *= magnitude
    k_scale = min(1.0, 1 / magnitude) if magnitude else 1.0
    check(replace(case, q=q), kv_scales=torch.tensor([[k_scale], [1.0]], device=device))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
def test_strides_that_8_does_not_divide(device: torch.device, kv_dtype: torch.dtype) -> None:
    """Rows begin at odd elements, where no copy of several elements can."""
    case = make_case(device, [5, 100, 0], dtype=torch.bfloat16, kv_dtype=kv_dtype, head_dim=24)

    def padded(x: Tensor) -> Tensor:
        return torch.cat([x, x[..., :1]], dim=-1)[..., :-1]

    case = replace(case, q=padded(case.q), k_pool=padded(case.k_pool), v_pool=padded(case.v_pool))
    assert case.k_pool.stride(1) % 2 == 1
    check(case)


MASKS: tuple[dict[str, int], ...] = (
    {"window": 1},
    {"window": 20},
    {"window": 64},
    {"window": 65},
    {"window": 132},  # for the 5 queries at the end of 200 keys it begins in the first keys of a tile
    {"window": 1000},
    {"chunk": 32},
    {"chunk": 100},
    {"chunk": 100, "window": 50},
)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("q_lens", [None, (1, 3, 8, 5, 2)], ids=["one", "ragged"])
def test_windows_and_chunks(device: torch.device, mask: dict[str, int], q_lens: Sequence[int] | None) -> None:
    check(make_case(device, [1, 20, 130, 200, 64], q_lens=q_lens, **mask))


@pytest.mark.parametrize(
    "score",
    [{"softcap": 2.0}, {"sinks": True}, {"alibi": True}, {"softcap": 2.0, "sinks": True, "alibi": True, "window": 70}],
    ids=lambda score: "+".join(score),
)
@pytest.mark.parametrize("q_lens", [None, (1, 3, 8, 1)], ids=["one", "ragged"])
def test_scores(device: torch.device, score: dict[str, Any], q_lens: Sequence[int] | None) -> None:
    check(make_case(device, [1, 20, 130, 0], q_lens=q_lens, heads_per_kv=2, num_kv_heads=2, **score))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
def test_a_softcap_far_below_the_scores(device: torch.device) -> None:
    case = make_case(device, [3, 70], softcap=0.5)
    check(replace(case, q=case.q * 1000))


def test_scores_too_great_for_exp(device: torch.device) -> None:
    case = make_case(device, [3, 150])
    check(replace(case, q=case.q * 100))


@pytest.mark.parametrize("heads_per_kv", [1, 4, 9])
def test_several_queries_per_sequence(device: torch.device, heads_per_kv: int) -> None:
    """Up to 8 queries, of which some have no key, a sequence without queries, and tokens of no sequence."""
    case = make_case(device, [8, 64, 67, 3, 0, 150], q_lens=[8, 2, 8, 0, 1, 7], num_pads=3, heads_per_kv=heads_per_kv)
    check(case)


@pytest.mark.sample
def test_more_queries_than_keys(device: torch.device) -> None:
    check(make_case(device, [1, 70], q_lens=[8, 5]))


def test_only_empty_sequences(device: torch.device) -> None:
    case = make_case(device, [0, 5])
    case = replace(case, seq_lens=torch.zeros_like(case.seq_lens))
    out, lse = case.run()
    assert not out.any()
    assert bool((lse == -math.inf).all())


def test_without_room_given(device: torch.device) -> None:
    case = make_case(device, [5, 100])
    out, lse = case.run(out=None, workspace=None, lse=None)
    assert out.shape == case.q.shape
    assert lse.isnan().all()
    assert torch.equal(out, case.run()[0])


def test_writes_where_it_is_told(device: torch.device) -> None:
    """Rows after a sequence's last query are another's, or unowned."""
    case = make_case(device, [5, 100, 7], q_lens=[3, 3, 1], num_kv_heads=2)
    room = torch.full((12, 6, 40), NAN, device=device)
    out = case.run(out=room[2:9, 1:5, :32])[0]
    assert torch.equal(out, case.run()[0])
    assert room.isnan().sum() == room.numel() - out.numel()


def test_a_plan_written_again_serves_other_lengths(device: torch.device) -> None:
    first = make_case(device, [200, 0, 40])
    second = make_case(device, [3, 100, 131], seed=1)
    plan = first.plan()
    rows = torch.full((3, first.block_tables.shape[1]), UNREADABLE, dtype=torch.int32, device=device)
    rows[:, : second.block_tables.shape[1]] = second.block_tables
    second = replace(second, block_tables=rows)
    check(first, plan=plan)
    check(second, plan=second.plan(out=plan))
    check(first, plan=first.plan(out=plan))


def test_equal_inputs_give_equal_bits(device: torch.device) -> None:
    case = make_case(device, [300, 17, 64], dtype=torch.float16)
    assert torch.equal(case.run()[0], case.run()[0])


def merge_in_order(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """One row of partial results [K, D] and their lses [K], merged by the arithmetic of two launches of before."""
    highest, weight_sum = np.float32(-np.inf), np.float32(0)
    total = np.zeros(outs.shape[1], np.float32)
    for part_outs, part_lses in zip(outs.split(PARTS_AT_ONCE), lses.split(PARTS_AT_ONCE), strict=True):
        missing = PARTS_AT_ONCE - len(part_lses)
        lse = np.pad(part_lses.numpy(), (0, missing), constant_values=-np.inf)
        rows = np.pad(part_outs.numpy(), ((0, missing), (0, 0)))
        rows[lse == -np.inf] = 0
        new_highest = np.maximum(highest, lse.max())
        shift = np.float32(0) if new_highest == -np.inf else new_highest
        weights, decay = np.exp2(lse - shift), np.exp2(highest - shift)
        total = total * decay + (weights[:, None] * rows).sum(0)
        weight_sum = weight_sum * decay + weights.sum()
        highest = new_highest
    divisor = weight_sum if weight_sum > 0 else np.float32(1)
    return torch.from_numpy(total / divisor), torch.tensor(highest + np.log2(divisor))


SPLIT_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "groups": ({"seq_lens": [300, 17, 200, 0], "heads_per_kv": 4, "num_kv_heads": 2}, {}),
    "more than are merged at once": ({"seq_lens": [64 * 35, 70]}, {"fixed_split": 64}),
    "queries": ({"seq_lens": [8, 267, 3, 0], "q_lens": [8, 8, 0, 1], "num_pads": 2, "heads_per_kv": 9}, {}),
    "window and sinks": ({"seq_lens": [20, 330], "q_lens": [3, 8], "sinks": True, "window": 170}, {}),
    "fp8": ({"seq_lens": [64, 350], "kv_dtype": FP8, "num_kv_heads": 2, "softcap": 2.0}, {}),
    "256 dims": ({"seq_lens": [200, 9], "head_dim": 256}, {}),
    "80 and 96 dims": ({"seq_lens": [200, 9], "head_dim": 80, "head_dim_v": 96}, {}),
}


@pytest.mark.parametrize(("arguments", "options"), SPLIT_CASES.values(), ids=SPLIT_CASES)
def test_partial_results_are_merged_in_the_order_of_keys(
    device: torch.device, arguments: dict[str, Any], options: dict[str, Any]
) -> None:
    """To the bit as two launches did it, in the interpreter; a GPU's exp2 and its sums differ from NumPy's."""
    case = make_case(device, **arguments)
    plan = case.plan(**options)
    num_tokens, num_heads = case.q.shape[:2]
    head_dim, sizes = case.v_pool.shape[3], plan.layout
    workspace = torch.full((workspace_size(plan, num_query_heads=num_heads, head_dim=head_dim),), NAN, device=device)
    out, lse = (each.cpu() for each in case.run(plan=plan, workspace=workspace))
    num_partials = sizes.max_splits * sizes.max_q_len * num_heads * head_dim
    outs = workspace[:num_partials].view(sizes.max_splits, sizes.max_q_len, num_heads, head_dim).cpu()
    lses = workspace[num_partials:].view(sizes.max_splits, sizes.max_q_len, num_heads).cpu()
    bounds = range(num_tokens + 1) if case.cu_seqlens_q is None else case.cu_seqlens_q.tolist()
    records = {row[0]: (row[4], row[5]) for row in plan.splits[: plan.programs[-1, 6]].tolist()}
    assert max(count for _, count in records.values()) > 1
    for seq, (first, count) in records.items():
        for token in range(bounds[seq], bounds[seq + 1]) if count > 1 else ():
            for head in range(num_heads):
                places = (slice(first, first + count), token - bounds[seq], head)
                expected, expected_lse = merge_in_order(outs[places], lses[places])
                if INTERPRET:
                    assert torch.equal(out[token, head], expected.to(out.dtype))
                    assert lse[token, head] == expected_lse
                else:
                    assert (out[token, head].double() - expected).abs().max() <= 1e-5
    assert not plan.tickets.any()


@pytest.mark.sample
def test_who_comes_last_changes_no_bit_and_every_layer_finds_all_tickets(device: torch.device) -> None:
    """Programs that begin in another order; a plan used by one layer after the other, with idle programs and pads."""
    case = make_case(device, [300, 0, 17, 200, 0], heads_per_kv=4, num_kv_heads=2, num_programs=9)
    plan = case.plan()
    first = case.run(plan=plan)
    for order in (range(9), reversed(range(9)), (4, 8, 1, 0, 7, 3, 2, 6, 5)):
        shuffled = replace(plan, programs=plan.programs[torch.tensor(list(order), device=device)])
        for found, expected in zip(case.run(plan=shuffled), first, strict=True):
            assert torch.equal(found, expected)
        assert not plan.tickets.any()


def test_a_plan_for_fewer_head_tiles_is_refused(device: torch.device) -> None:
    case = make_case(device, [300, 17], num_kv_heads=3)
    assert torch.equal(case.run(plan=case.plan(max_head_tiles=3))[0], case.run()[0])
    with pytest.raises(ValueError, match="3 head tiles, but plan was made for 2"):
        case.run(plan=case.plan(max_head_tiles=2))


@pytest.mark.parametrize("window", [None, 150])
def test_fixed_splits_give_equal_bits_in_any_batch(device: torch.device, window: int | None) -> None:
    case = make_case(device, [300, 17, 128, 129], dtype=torch.float16, window=window)
    together = case.run(plan=case.plan(fixed_split=128))[0]
    for seq in range(4):
        alone = replace(
            case,
            q=case.q[seq : seq + 1],
            block_tables=case.block_tables[seq : seq + 1],
            seq_lens=case.seq_lens[seq : seq + 1],
        )
        assert torch.equal(alone.run(plan=alone.plan(fixed_split=128, num_programs=7))[0][0], together[seq])


def test_fixed_splits_equal_the_reference(device: torch.device) -> None:
    case = make_case(device, [300, 0, 17, 128, 129], sinks=True)
    check(case, plan=case.plan(fixed_split=64))


def test_a_shared_prefix_attended_to_once(device: torch.device) -> None:
    """Sequences that share 96 tokens: all of a group are queries over the prefix, each over its own rest, merged."""
    case = make_case(device, [106, 97, 170, 30], heads_per_kv=4, num_kv_heads=2)
    tables = case.block_tables.clone()
    tables[1, :6] = tables[0, :6]
    tables[2, :6] = tables[0, :6]
    case = replace(case, block_tables=tables)
    prefix = replace(
        case,
        block_tables=tables[:1, :6],
        seq_lens=torch.tensor([96], dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32, device=device),
        max_q_len=3,
        visible={"causal": False},
    )
    starts = torch.tensor([96, 96, 96, 0], dtype=torch.int32, device=device)
    rest_tables = tables.clone()
    rest_tables[:3, :-6] = tables[:3, 6:]
    rest = replace(case, block_tables=rest_tables, seq_lens=case.seq_lens - starts)
    (prefix_out, prefix_lse), (rest_out, rest_lse) = prefix.run(), rest.run()
    assert bool((prefix_lse[3] == -math.inf).all())
    merged = merge_states(torch.stack([prefix_out, rest_out]), torch.stack([prefix_lse, rest_lse]))
    assert (merged.double() - case.expected()[0]).abs().max() <= 2e-6


def test_all_queries_see_all_keys_without_causality(device: torch.device) -> None:
    check(make_case(device, [70, 3, 0], q_lens=[8, 8, 1], causal=False))


def test_elements_beyond_int32(device: torch.device) -> None:
    """A pool as large as a real one, of which only the pages touched take memory: 2400 blocks of 2 MB."""
    case = make_case(device, [40, 3], dtype=torch.float16, head_dim=64, num_kv_heads=2)
    num_layers, num_heads, block_size, head_dim = 256, 2, 16, 64
    memory = torch.empty(2400, num_layers, 2, num_heads, block_size, head_dim, dtype=torch.float16, device=device)
    assert memory.stride(0) * 2047 < 2**31 <= memory.stride(0) * 2048 + 2**20
    k_pool, v_pool = (memory[:, 255, part].transpose(1, 2) for part in (0, 1))
    tables = case.block_tables.clone()
    for seq, column in ((0, 0), (0, 1), (0, 2), (1, 0)):
        block_id = int(tables[seq, column])
        tables[seq, column] = 2399 - block_id
        k_pool[2399 - block_id] = case.k_pool[block_id]
        v_pool[2399 - block_id] = case.v_pool[block_id]
    big = replace(case, k_pool=k_pool, v_pool=v_pool, block_tables=tables)
    assert torch.equal(big.run()[0], case.run()[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 3, 32)}, "q has 3 heads, not a multiple of the pool's 2"),
        ({"q": torch.zeros(2, 4, 64)}, "q has shape"),
        ({"q": torch.zeros(3, 4, 32)}, "q has shape"),
        ({"q": torch.zeros(2, 4, 32, dtype=torch.float16)}, "q is torch.float16"),
        ({"q": torch.zeros(2, 32, 4).transpose(1, 2)}, "q has stride 4"),
        ({"v_pool": torch.zeros(6, 16, 2, 32, dtype=torch.float16)}, "v_pool is torch.float16"),
        ({"v_pool": torch.zeros(9, 16, 1, 32)}, "v_pool has shape"),
        ({"k_pool": torch.zeros(9, 16, 2, 264), "q": torch.zeros(2, 4, 264)}, "k_pool has head dim 264"),
        ({"k_pool": torch.zeros(9, 48, 2, 32), "v_pool": torch.zeros(9, 48, 2, 32)}, "block size=48"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, "seq_lens has shape"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, "seq_lens is torch.int64"),
        ({"block_tables": torch.zeros(3, 9, dtype=torch.int32)}, "block_tables has shape"),
        ({"cu_seqlens_q": torch.zeros(2, dtype=torch.int32)}, "cu_seqlens_q has shape"),
        ({"sinks": torch.zeros(3)}, "sinks has shape"),
        ({"alibi_slopes": torch.zeros(4, dtype=torch.float16)}, "alibi_slopes is torch.float16"),
        ({"softcap": 0.0}, "softcap=0.0 is not above 0"),
        ({"out": torch.zeros(2, 4, 16)}, "out has shape"),
        ({"out": torch.zeros(2, 4, 32, dtype=torch.float16)}, "out is torch.float16"),
        ({"lse": torch.zeros(4, 2).t()}, "lse has strides"),
        ({"workspace": torch.zeros(3)}, "workspace\\)=3 is below"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_refuses_what_does_not_fit(device: torch.device, change: dict[str, Any], message: str) -> None:
    case = make_case(device, [5, 20], num_kv_heads=2)
    arguments: dict[str, Any] = {
        "q": case.q,
        "k_pool": case.k_pool,
        "v_pool": case.v_pool,
        "block_tables": case.block_tables,
        "seq_lens": case.seq_lens,
        "plan": case.plan(),
        "scaling": 1.0,
    }
    arguments |= {name: value.to(device) if isinstance(value, Tensor) else value for name, value in change.items()}
    q, k_pool, v_pool = (arguments.pop(name) for name in ("q", "k_pool", "v_pool"))
    with pytest.raises(ValueError, match=message):
        paged_decode(q, k_pool, v_pool, **arguments)


def test_several_queries_need_cu_seqlens_q(device: torch.device) -> None:
    case = make_case(device, [20, 5], q_lens=[3, 1])
    with pytest.raises(ValueError, match="4 tokens for 2 sequences, but cu_seqlens_q is None"):
        replace(case, cu_seqlens_q=None).run(plan=case.plan())


def test_programs_fill_the_multiprocessors_twice() -> None:
    cpu = torch.device("cpu")  # counts as 132 multiprocessors
    sizes: dict[str, Any] = {"head_dim": 128, "kv_itemsize": 2, "device": cpu}
    assert num_decode_programs(num_query_heads=32, num_kv_heads=8, **sizes) == 33
    assert num_decode_programs(num_query_heads=32, num_kv_heads=32, **sizes) == 8
    # 8 queries of 32 heads are 256 rows: 4 tiles of 64, or, of a head dim above 128, 16 of 16.
    assert num_decode_programs(num_query_heads=32, num_kv_heads=1, max_q_len=8, **sizes) == 66
    sizes["head_dim"] = 256
    assert num_decode_programs(num_query_heads=32, num_kv_heads=1, max_q_len=8, **sizes) == 16
    assert num_decode_programs(num_query_heads=300, num_kv_heads=300, **sizes) == 1
    assert num_head_tiles(num_query_heads=32, num_kv_heads=1, head_dim=256, kv_itemsize=2, max_q_len=8) == 16
    assert num_head_tiles(num_query_heads=32, num_kv_heads=8, head_dim=128, kv_itemsize=2) == 8
