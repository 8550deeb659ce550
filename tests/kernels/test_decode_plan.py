"""The work list of decode attention: every key in one split, programs loaded alike, tokens in their slots."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels import reference
from quire.kernels.decode_plan import RECORD, RESIDENT, TILE, DecodePlan, build_decode_plan

BLOCK_SIZE = 16
NUM_BLOCKS = 32  # per table
LONGEST = NUM_BLOCKS * BLOCK_SIZE
UNREADABLE = 2**30  # a block id where no block is


def make_tables(seq_lens: Sequence[int], device: torch.device) -> torch.Tensor:
    """[n, NUM_BLOCKS] int32, rows apart by more than that; a sequence's i-th block is 1000 * (sequence + 1) + i."""
    rows = torch.full((len(seq_lens), NUM_BLOCKS + 5), UNREADABLE, dtype=torch.int32)
    for seq, seq_len in enumerate(seq_lens):
        count = -(-seq_len // BLOCK_SIZE)
        rows[seq, :count] = 1000 * (seq + 1) + torch.arange(count, dtype=torch.int32)
    return rows.to(device)[:, :NUM_BLOCKS]


def build(
    seq_lens: Sequence[int],
    device: torch.device,
    *,
    q_lens: Sequence[int] | None = None,
    num_pads: int = 0,
    num_programs: int = 4,
    **options: Any,
) -> DecodePlan:
    if q_lens is not None:
        cu_seqlens_q = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32, device=device)
        options |= {"cu_seqlens_q": cu_seqlens_q, "num_tokens": sum(q_lens) + num_pads, "max_q_len": max(q_lens)}
    return build_decode_plan(
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_tables=make_tables(seq_lens, device),
        block_size=BLOCK_SIZE,
        num_programs=num_programs,
        **options,
    )


def bounds_of(plan: DecodePlan) -> list[int]:
    """The first split of each program, and one past the last of all."""
    columns = dict(zip(RECORD, plan.programs.t().tolist(), strict=True))
    return [*columns["split"], columns["end_split"][-1]]


def splits_of(plan: DecodePlan) -> list[tuple[int, int, int]]:
    return [tuple(split) for split in plan.splits[: bounds_of(plan)[-1], :3].tolist()]


def tiles_of(splits: Sequence[tuple[int, int, int]]) -> int:
    return sum(-(-end // TILE) - begin // TILE for _, begin, end in splits)


def tiles_of_programs(plan: DecodePlan) -> list[int]:
    splits, bounds = splits_of(plan), bounds_of(plan)
    return [tiles_of(splits[begin:end]) for begin, end in pairwise(bounds)]


def check(
    plan: DecodePlan,
    seq_lens: Sequence[int],
    q_lens: Sequence[int] | None = None,
    *,
    window: int | None = None,
    chunk: int | None = None,
) -> None:
    reference.check_decode_plan(
        plan.programs.tolist(),
        plan.splits.tolist(),
        seq_lens=list(seq_lens),
        q_lens=[1] * len(seq_lens) if q_lens is None else list(q_lens),
        tile=TILE,
        window=window,
        chunk=chunk,
    )
    counts = [0] * len(seq_lens)
    for seq, _, _ in splits_of(plan):
        counts[seq] += 1
    repeats = [1] * len(seq_lens) if q_lens is None else list(q_lens)
    tokens = [count for count, times in zip(counts, repeats, strict=True) for _ in range(times)]
    assert plan.token_splits.tolist() == tokens + [0] * (plan.layout.num_tokens - len(tokens))
    assert not plan.tickets.any()


lengths = st.lists(
    st.one_of(st.sampled_from([0, 1, TILE - 1, TILE, TILE + 1, LONGEST]), st.integers(0, LONGEST)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=25)
@given(
    seq_lens=lengths,
    num_programs=st.integers(1, 9),
    min_split=st.sampled_from([1, 64, 128, 256]),
    min_spread=st.sampled_from([1, 64, 128]),
    window=st.sampled_from([None, 1, 20, 64, 65, 200]),
    chunk=st.sampled_from([None, 32, 100]),
)
def test_every_program_has_an_equal_run(
    device: torch.device,
    seq_lens: list[int],
    num_programs: int,
    min_split: int,
    min_spread: int,
    window: int | None,
    chunk: int | None,
) -> None:
    split = {"min_split": min_split, "min_spread": min_spread}
    plan = build(seq_lens, device, num_programs=num_programs, window=window, chunk=chunk, **split)
    check(plan, seq_lens, window=window, chunk=chunk)
    assert bounds_of(plan)[-1] <= plan.max_splits
    loads = tiles_of_programs(plan)
    once = -(-sum(loads) // max(num_programs // RESIDENT, 1))
    least = min(-(-min_split // TILE), max(-(-min_spread // TILE), once))
    run = max(least, -(-sum(loads) // num_programs))
    busy = [load for load in loads if load]
    assert loads == busy + [0] * (num_programs - len(busy))
    assert all(load == run for load in busy[:-1])
    assert all(load <= run for load in busy[-1:])


@settings(max_examples=40)
@given(
    seq_lens=lengths,
    num_programs=st.integers(1, 9),
    sequence_cost=st.sampled_from([1, 64, 100, 256, 10**6]),
    min_split=st.sampled_from([1, 128]),
    window=st.sampled_from([None, 65, 200]),
)
def test_sequences_count_more_than_their_keys(
    device: torch.device,
    seq_lens: list[int],
    num_programs: int,
    sequence_cost: int,
    min_split: int,
    window: int | None,
) -> None:
    """Every key is in one split still, no program in front of the last busy one is idle, and no run is exceeded."""
    options: dict[str, Any] = {"num_programs": num_programs, "window": window, "min_split": min_split}
    plan = build(seq_lens, device, sequence_cost=sequence_cost, **options)
    check(plan, seq_lens, window=window)
    assert bounds_of(plan)[-1] <= plan.max_splits
    plain = max(tiles_of_programs(build(seq_lens, device, **options)))
    loads = tiles_of_programs(plan)
    extra = -(-sequence_cost // TILE)
    if extra >= plain:
        return  # a sequence counts its keys alone, or there are fewer runs than programs
    busy = [load for load in loads if load]
    assert loads == busy + [0] * (num_programs - len(busy))
    num_seen = sum(seq_len > 0 for seq_len in seq_lens)
    least = max(-(-min_split // TILE), plain, -(-(sum(loads) + num_seen * extra) // num_programs))
    assert max(loads) <= least


def test_short_sequences_are_divided_over_more_programs(device: torch.device) -> None:
    """32 sequences of 2 tiles and 32 of 8 on 5 programs of 64 tiles: the 32 short ones were the work of one."""
    seq_lens = [128] * 32 + [512] * 32
    plain, weighted = (build(seq_lens, device, num_programs=5, sequence_cost=cost) for cost in (0, 64))
    check(weighted, seq_lens)
    counts = [[end - begin for begin, end in pairwise(bounds_of(plan))] for plan in (plain, weighted)]
    assert counts[0][0] == 32
    assert counts[1][0] == 26


def test_by_default_sequences_count_their_keys_alone(device: torch.device) -> None:
    """Until a GPU has measured another cost; with fixed splits none counts."""
    seq_lens = [128] * 9 + [512] * 9
    for options in ({}, {"fixed_split": 128}):
        plans = [build(seq_lens, device, **options, **cost) for cost in ({}, {"sequence_cost": 64})]
        splits = [splits_of(plan) for plan in plans]
        assert splits[0] == splits_of(build(seq_lens, device, **options, sequence_cost=0))
        assert (splits[0] == splits[1]) == bool(options)


@settings(max_examples=15)
@given(
    seq_lens=lengths,
    num_programs=st.integers(1, 9),
    fixed_split=st.sampled_from([1, 64, 100, 256]),
    window=st.sampled_from([None, 20, 200]),
)
def test_fixed_splits_depend_on_their_sequence_alone(
    device: torch.device, seq_lens: list[int], num_programs: int, fixed_split: int, window: int | None
) -> None:
    plan = build(seq_lens, device, num_programs=num_programs, fixed_split=fixed_split, window=window)
    check(plan, seq_lens, window=window)
    splits = splits_of(plan)
    assert len(splits) <= plan.max_splits
    step = -(-fixed_split // TILE) * TILE
    for seq, seq_len in enumerate(seq_lens):
        mine = [(begin, end) for owner, begin, end in splits if owner == seq]
        assert (
            mine == [(begin, min(begin + step, seq_len)) for begin in range(mine[0][0], seq_len, step)]
            if mine
            else True
        )
    bounds = bounds_of(plan)
    counts = [end - begin for begin, end in pairwise(bounds)]
    assert max(counts) - min(counts) <= 1


def test_more_sequences_than_lanes(device: torch.device) -> None:
    """The kernel takes 128 sequences at a time."""
    seq_lens = [TILE * (1 + seq % 2) for seq in range(130)]
    plan = build(seq_lens, device, num_programs=100, min_split=1)
    check(plan, seq_lens)
    assert tiles_of_programs(plan) == [2] * 97 + [1, 0, 0]


def test_more_programs_and_splits_than_lanes(device: torch.device) -> None:
    seq_lens = torch.tensor([300 * TILE - 1], dtype=torch.int32, device=device)
    tables = torch.zeros(1, 1200, dtype=torch.int32, device=device)
    plan = build_decode_plan(seq_lens, block_tables=tables, block_size=16, num_programs=400, min_split=1)
    assert splits_of(plan) == [(0, TILE * i, min(TILE * (i + 1), 300 * TILE - 1)) for i in range(300)]
    assert bounds_of(plan) == [*range(300), *[300] * 101]
    assert plan.splits[:, 5].tolist()[:300] == [300] * 300


@pytest.mark.sample
def test_long_and_short_sequences_load_programs_alike(device: torch.device) -> None:
    seq_lens = [LONGEST, 1, 1, 1, LONGEST // 2]
    loads = tiles_of_programs(build(seq_lens, device, num_programs=5))
    assert loads == [3, 3, 3, 3, 3]


def test_short_sequences_share_a_program_up_to_min_split(device: torch.device) -> None:
    assert tiles_of_programs(build([1] * 6, device, num_programs=6, min_split=192, min_spread=192)) == [
        *(3, 3),
        *(0, 0, 0, 0),
    ]


def test_splits_are_shorter_while_some_multiprocessors_have_no_program(device: torch.device) -> None:
    """Two programs run on each: 8 programs fill 4 of them once."""

    def loads(num_tiles: int, **options: int) -> list[int]:
        return [
            load for load in tiles_of_programs(build([num_tiles * TILE], device, num_programs=8, **options)) if load
        ]

    assert loads(4) == [1, 1, 1, 1]
    assert loads(4, min_spread=128) == [2, 2]
    assert loads(5) == [2, 2, 1]
    assert loads(8) == [2, 2, 2, 2]


def test_records_of_more_head_tiles_than_lanes(device: torch.device) -> None:
    plan = build([5, 7, 0], device, max_head_tiles=300)
    assert plan.tickets.shape == (3, 300)
    check(plan, [5, 7, 0])


def test_no_keys_at_all(device: torch.device) -> None:
    plan = build([0, 0], device, num_programs=3)
    assert bounds_of(plan) == [0] * 4
    check(plan, [0, 0])


@pytest.mark.parametrize("q_lens", [None, [1, 5, 0, 300, 2, 3]], ids=["one", "ragged"])
def test_tokens_get_their_positions_and_slots(device: torch.device, q_lens: list[int] | None) -> None:
    seq_lens = [16, 17, 40, 350, 1, 0]
    plan = build(seq_lens, device, q_lens=q_lens, num_pads=0 if q_lens is None else 2)
    expected = []
    for seq, (seq_len, count) in enumerate(zip(seq_lens, q_lens or [1] * 6, strict=True)):
        for position in range(seq_len - count, seq_len):
            slot = (1000 * (seq + 1) + position // BLOCK_SIZE) * BLOCK_SIZE + position % BLOCK_SIZE
            expected.append((max(position, 0), slot if position >= 0 else -1))
    expected += [(0, -1)] * (0 if q_lens is None else 2)
    assert list(zip(plan.positions.tolist(), plan.slot_mapping.tolist(), strict=True)) == expected
    check(plan, seq_lens, q_lens)
    assert plan.positions.dtype == plan.slot_mapping.dtype == torch.int64


def test_slots_beyond_int32(device: torch.device) -> None:
    tables = torch.tensor([[2**28 + 3]], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([6], dtype=torch.int32, device=device)
    plan = build_decode_plan(seq_lens, block_tables=tables, block_size=16, num_programs=1)
    assert plan.slot_mapping.tolist() == [(2**28 + 3) * 16 + 5]


def test_the_first_query_of_a_sequence_decides_what_a_window_shows(device: torch.device) -> None:
    plan = build([400], device, q_lens=[8], window=70, num_programs=1)
    assert splits_of(plan) == [(0, 320, 400)]
    plan = build([400], device, q_lens=[8], window=80, num_programs=1)
    assert splits_of(plan) == [(0, 256, 400)]


def test_a_plan_is_written_again_in_place(device: torch.device) -> None:
    plan = build([LONGEST, 1, 30], device)
    addresses = [tensor.data_ptr() for tensor in (plan.programs, plan.splits, plan.slot_mapping)]
    again = build([5, 0, 90], device, out=plan)
    assert again is plan
    assert addresses == [tensor.data_ptr() for tensor in (plan.programs, plan.splits, plan.slot_mapping)]
    check(plan, [5, 0, 90])
    assert plan.positions.tolist() == [4, 0, 89]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 24}, "block_size=24"),
        ({"num_programs": 0}, "num_programs=0 is below 1"),
        ({"min_split": 0}, "min_split=0 is below 1"),
        ({"min_spread": 0}, "min_spread=0 is below 1"),
        ({"sequence_cost": -1}, "sequence_cost=-1 is below 0"),
        ({"max_head_tiles": 0}, "max_head_tiles=0 is below 1"),
        ({"fixed_split": 0}, "fixed_split=0 is below 1"),
        ({"window": 0}, "window=0 is below 1"),
        ({"chunk": 0}, "chunk=0 is below 1"),
        ({"window": 5, "causal": False}, "causal=False with window=5"),
        ({"max_q_len": 0}, "max_q_len=0 is below 1"),
        ({"block_tables": torch.zeros(3, 4, dtype=torch.int32)}, "block_tables has shape"),
        ({"block_tables": torch.zeros(2, 4, dtype=torch.int64)}, "block_tables is torch.int64"),
        ({"block_tables": torch.zeros(4, 2, dtype=torch.int32).t()}, "block_tables has stride 2"),
        ({"cu_seqlens_q": torch.zeros(3, dtype=torch.int32)}, "num_tokens is None"),
        ({"cu_seqlens_q": torch.zeros(2, dtype=torch.int32), "num_tokens": 1}, "cu_seqlens_q has shape"),
    ],
)
def test_refuses_what_does_not_fit(device: torch.device, change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "block_tables": torch.zeros(2, 4, dtype=torch.int32),
        "block_size": 16,
        "num_programs": 2,
    }
    arguments |= change
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    with pytest.raises(ValueError, match=message):
        build_decode_plan(torch.zeros(2, dtype=torch.int32, device=device), **moved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_programs": 5}, "out.programs has shape"),
        ({"max_head_tiles": 5}, "out.tickets has shape"),
        ({"window": 9}, "window=9, but out was made for None"),
        ({"fixed_split": 64}, "out.splits has shape"),
    ],
)
def test_refuses_a_plan_made_for_something_else(device: torch.device, change: dict[str, Any], message: str) -> None:
    plan = build([5, 7], device)
    with pytest.raises(ValueError, match=message):
        build([5, 7], device, out=plan, **change)
