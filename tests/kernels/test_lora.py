"""Updates of adapters by slot: against float64, and a row's bits among any other rows."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from quire.kernels import reference_elementwise as reference
from quire.kernels.fixed_tiles import use_fixed_tiles
from quire.kernels.lora import MOST_FEW_ROWS, SPLIT, LoraSlots, add_updates, padded_rank

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NUM_SLOTS = 4


def draw(device: torch.device, dtype: torch.dtype, *sizes: int, seed: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def numbers(slot_of_row: list[int], device: torch.device) -> Tensor:
    return torch.tensor(slot_of_row, device=device) + 1


class Filled:
    """Slots with updates of these ranks, [S][P], on NaN; and what each row of a slot should get."""

    def __init__(
        self,
        ranks: list[list[int]],
        *,
        num_inputs: int,
        sizes: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        most = max(max(each) for each in ranks)
        self.slots = LoraSlots.allocate(
            len(ranks), max_rank=most, num_inputs=num_inputs, sizes=sizes, dtype=dtype, device=device
        )
        self.slots.a.fill_(torch.nan)
        self.slots.b.fill_(torch.nan)
        self.slots.ranks.copy_(torch.tensor(ranks))
        self.sizes, self.ranks = sizes, ranks
        for slot, part in itertools.product(range(len(ranks)), range(len(sizes))):
            rank, rows = ranks[slot][part], self.outputs(part)
            a = draw(device, dtype, rank, num_inputs, seed=10 * slot + part) * num_inputs**-0.5
            self.slots.a[slot, part, :rank] = a
            self.slots.b[slot, rows, :rank] = draw(device, dtype, sizes[part], rank, seed=99 + 10 * slot + part)

    def outputs(self, part: int) -> slice:
        return slice(sum(self.sizes[:part]), sum(self.sizes[: part + 1]))

    def expected(self, out: Tensor, x: Tensor, slot_of_row: list[int]) -> Tensor:
        parts = []
        for part in range(len(self.sizes)):
            rows = self.outputs(part)
            updates = [None if slot < 0 else self.update(slot, part) for slot in slot_of_row]
            parts.append(reference.add_updates(out[:, rows], x, updates))
        return torch.cat(parts, 1)

    def update(self, slot: int, part: int) -> tuple[Tensor, Tensor]:
        rank = self.ranks[slot][part]
        return self.slots.a[slot, part, :rank], self.slots.b[slot, self.outputs(part), :rank]


def check(filled: Filled, slot_of_row: list[int], *, dtype: torch.dtype, device: torch.device) -> None:
    num_inputs, num_rows = filled.slots.a.shape[3], len(slot_of_row)
    x = draw(device, dtype, num_rows, num_inputs, seed=7)
    x[[row for row, slot in enumerate(slot_of_row) if slot < 0]] = torch.nan
    out = draw(device, dtype, num_rows, sum(filled.sizes), seed=8)
    expected = filled.expected(out, x, slot_of_row)
    add_updates(out, x, filled.slots, numbers(slot_of_row, device))
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.sample
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_several_slots_get_their_own_updates(dtype: torch.dtype, device: torch.device) -> None:
    """Merged projections, with a part that an adapter has no update of, a free slot, and rows without an adapter."""
    filled = Filled(
        [[4, 16, 1], [0, 3, 16], [0, 0, 0], [16, 16, 16]], num_inputs=96, sizes=(80, 24, 24), dtype=dtype, device=device
    )
    check(filled, [3, -1, 0, 0, 1, -1, 2, 3, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, 0], dtype=dtype, device=device)


@pytest.mark.parametrize("rank", [1, 8, 33, 128])
def test_every_rank_and_inputs_beyond_one_sum(rank: int, device: torch.device) -> None:
    filled = Filled([[rank], [1]], num_inputs=SPLIT + 40, sizes=(72,), dtype=torch.float32, device=device)
    check(filled, [0, -1, 1, 0], dtype=torch.float32, device=device)


def test_many_rows_have_larger_tiles(device: torch.device) -> None:
    """A prompt of each adapter, and one without, which do not end with a tile."""
    filled = Filled([[5], [9]], num_inputs=64, sizes=(40,), dtype=torch.float32, device=device)
    check(filled, [0] * 70 + [-1] * 30 + [1] * (MOST_FEW_ROWS - 90), dtype=torch.float32, device=device)


def test_rows_without_an_adapter_and_steps_without_rows_are_left_alone(device: torch.device) -> None:
    filled = Filled([[4]], num_inputs=32, sizes=(24,), dtype=torch.float32, device=device)
    out = draw(device, torch.float32, 3, 24, seed=1)
    before = out.clone()
    add_updates(out, out.new_full((3, 32), torch.nan), filled.slots, numbers([-1] * 3, device))
    assert torch.equal(out, before)
    add_updates(out[:0], out.new_empty(0, 32), filled.slots, torch.zeros(0, dtype=torch.int64, device=device))


def test_a_part_of_a_product_by_itself(device: torch.device) -> None:
    """Views of the slots: the layers of a merged projection outside of it, and results that are columns of another."""
    filled = Filled([[4, 2], [1, 6]], num_inputs=32, sizes=(24, 40), dtype=torch.float32, device=device)
    x, wide = draw(device, torch.float32, 3, 32, seed=1), draw(device, torch.float32, 3, 64, seed=2)
    expected = filled.expected(wide, x, [1, 0, -1])[:, 24:]
    add_updates(wide[:, 24:], x, filled.slots.part(1), numbers([1, 0, -1], device))
    torch.testing.assert_close(wide[:, 24:].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_with_fixed_tiles_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, device: torch.device) -> None:
    filled = Filled([[8], [16], [3]], num_inputs=SPLIT + 64, sizes=(64,), dtype=dtype, device=device)
    slot_of_row = [row % 4 - 1 for row in range(MOST_FEW_ROWS + 10)]
    x = draw(device, dtype, len(slot_of_row), SPLIT + 64, seed=3)
    base = draw(device, dtype, len(slot_of_row), 64, seed=4)
    use_fixed_tiles(True)
    try:
        whole = base.clone()
        add_updates(whole, x, filled.slots, numbers(slot_of_row, device))
        for first, end in ((2, 3), (1, 20), (37, 70), (100, MOST_FEW_ROWS + 10)):
            part = base[first:end].clone()
            add_updates(part, x[first:end], filled.slots, numbers(slot_of_row[first:end], device))
            assert torch.equal(part, whole[first:end]), f"rows {first} .. {end - 1}"
    finally:
        use_fixed_tiles(False)


def test_refusals(device: torch.device) -> None:
    slots = LoraSlots.allocate(2, max_rank=20, num_inputs=32, sizes=(8, 8), dtype=torch.float32, device=device)
    assert (padded_rank(1), padded_rank(16), padded_rank(17), padded_rank(128)) == (16, 16, 32, 128)
    x, out, rows = (
        torch.zeros(3, 32, device=device),
        torch.zeros(3, 16, device=device),
        torch.zeros(3).long().to(device),
    )
    with pytest.raises(ValueError, match=r"out has shape \[3, 16\], not \[3, 8\]"):
        add_updates(out, x, slots.part(0), rows)
    with pytest.raises(ValueError, match=r"adapter_of_row has shape \[3\], not \[2\]"):
        add_updates(out[:2], x[:2], slots, rows)
    with pytest.raises(ValueError, match=r"adapter_of_row is torch\.int32, not torch\.int64"):
        add_updates(out, x, slots, rows.int())
    with pytest.raises(ValueError, match=r"a is torch\.float32, not torch\.float16"):
        add_updates(out.half(), x.half(), slots, rows)
