"""The order of a step's tokens and sequences in a graph that holds all of it."""

from __future__ import annotations

import pytest

from quire.worker.run import prompt_graphs
from quire.worker.run.pieces import piece_buckets
from quire.worker.run.prompt_graphs import NUM_SLOTS, Shape, place


@pytest.fixture
def three_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_graphs, "NUM_SLOTS", 3)


def test_tokens_are_put_in_the_order_of_the_graph(three_slots: None) -> None:
    shape = Shape(12, has_decodes=True)
    assert shape.counts == (1, 1, 1, 3, 3, 3)
    placed = place((1, 4, 1), (9, 20, 3), shape)
    assert placed.sources.tolist() == [0, 5, 0, 1, 2, 3, 4, 0, 0, 0, 0, 0]
    assert placed.is_padding.tolist() == [0, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert placed.seqs.tolist() == [0, 2, 0, 1, 0, 0]
    assert placed.lengths.tolist() == [9, 3, 0, 20, 0, 0]
    assert placed.starts.tolist() == [0, 1, 2, 3, 7, 7, 7]
    assert placed.lasts.tolist() == [0, 6, 1]


def test_an_empty_step_is_padding_alone(three_slots: None) -> None:
    for has_decodes in (False, True):
        placed = place((), (), Shape(12, has_decodes))
        assert placed.is_padding.all()
        assert not placed.lengths.any()
        assert len(set(placed.starts[3 if has_decodes else 0 :].tolist())) == 1


def test_attention_sees_decodes_where_they_are_and_never_takes_a_prompt_for_one() -> None:
    for size in piece_buckets(1024):
        for shape in (Shape(size, has_decodes=False), Shape(size, has_decodes=True)):
            assert sum(shape.counts) == size
            assert len(shape.counts) == shape.num_seqs
            assert shape.counts.count(1) == (NUM_SLOTS if shape.has_decodes else 0)
