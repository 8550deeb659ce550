"""States per sequence: the position from which a row continues, forks, and invalid states."""

from __future__ import annotations

import pytest
import torch

from quire.worker.memory.state_slots import StateKey, StateNotKept, StateSlots, StateSpec

CONV, SSM = StateKey(0, "conv", 0), StateKey(2, "recurrent", 1)
SPECS = {CONV: StateSpec((3, 2), torch.bfloat16), SSM: StateSpec((4,), torch.float32)}


def states(*values: float) -> dict[StateKey, torch.Tensor]:
    """A state for each row, all of one number."""
    return {
        key: torch.stack([torch.full(spec.shape, value, dtype=spec.dtype) for value in values])
        for key, spec in SPECS.items()
    }


def numbers(found: dict[StateKey, torch.Tensor]) -> list[float]:
    for key, spec in SPECS.items():
        assert found[key].dtype == spec.dtype
        assert found[key].shape[1:] == spec.shape
    assert torch.equal(found[CONV][:, 0, 0].float(), found[SSM][:, 0])
    assert all(torch.equal(state.flatten(1).amin(1), state.flatten(1).amax(1)) for state in found.values())
    values: list[float] = found[SSM][:, 0].tolist()
    return values


def make_slots() -> StateSlots:
    """Row 3 is at position 9 and row 1 at 2."""
    slots = StateSlots(SPECS, max_num_seqs=4, device="cpu")
    slots.store([3, 1], [9, 2], before=states(38, 11), after=states(39, 12))
    slots.check_invariants()
    return slots


def test_a_row_goes_on_behind_its_last_token_or_before_it() -> None:
    slots = make_slots()
    assert numbers(slots.load([1, 3], [2, 9])) == [12, 39]
    assert numbers(slots.load([3, 1], [8, 1])) == [38, 11]
    assert numbers(slots.load([3, 0, 1], [0, 0, 2])) == [0, 0, 12], "a new sequence has zeros, for any old content"


@pytest.mark.parametrize(("row", "start"), [(3, 7), (3, 10), (1, 9), (0, 1), (2, 5)])
def test_from_nowhere_else(row: int, start: int) -> None:
    with pytest.raises(StateNotKept, match=f"row {row} is to continue at position {start}"):
        make_slots().load([row], [start])


def test_what_is_loaded_is_a_copy() -> None:
    slots = make_slots()
    for state in slots.load([3], [9]).values():
        state.fill_(7)
    assert numbers(slots.load([3], [9])) == [39]


def test_a_fork_has_both_states_and_goes_its_own_way() -> None:
    slots = make_slots()
    slots.fork(3, 0)
    assert numbers(slots.load([0, 0], [9, 8])) == [39, 38]
    slots.store([0], [10], before=states(50), after=states(51))
    assert numbers(slots.load([0, 3], [10, 9])) == [51, 39]


def test_a_fork_of_who_has_not_begun_has_not_either() -> None:
    slots = make_slots()
    slots.fork(2, 0)
    slots.check_invariants()
    with pytest.raises(StateNotKept):
        slots.load([0], [1])


def test_a_row_that_was_cleared_holds_nothing() -> None:
    slots = make_slots()
    slots.clear(3)
    slots.clear(2)
    slots.check_invariants()
    with pytest.raises(StateNotKept):
        slots.load([3], [9])
    assert not any(bool(tensor[:, 3].any()) for tensor in slots.tensors())
    assert numbers(slots.load([1], [2])) == [12]
    assert slots.statistics().num_kept == 1


def test_bytes_are_those_of_both_states_of_each_row() -> None:
    assert StateSlots(SPECS, max_num_seqs=5, device="cpu").statistics().num_bytes == 2 * 5 * (6 * 2 + 4 * 4)
    assert [spec.num_bytes for spec in SPECS.values()] == [12, 16]


def test_without_states_every_position_is_as_good() -> None:
    slots = StateSlots({}, max_num_seqs=1, device="cpu")
    assert slots.load([0, 7], [3, 8]) == {}
    slots.store([0, 7], [4, 9], before={}, after={})
    slots.fork(0, 5)
    slots.clear(9)
    slots.check_invariants()
    assert slots.statistics().num_kept == 0
