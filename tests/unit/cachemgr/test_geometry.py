"""A worker's registration of its layer groups: what is refused, and how long a sequence of a pool can be."""

from __future__ import annotations

from typing import Any

import pytest

from quire.cache.v1 import attach_pb2
from quire.cache.v1.layer_spans import LayerGroupKind
from quire.cachemgr.errors import CallRefused
from quire.cachemgr.geometry import Geometry, LayerGroup
from quire.cachemgr.service import messages

FULL = attach_pb2.LAYER_GROUP_KIND_FULL
SLIDING = attach_pb2.LAYER_GROUP_KIND_SLIDING
CHUNKED = attach_pb2.LAYER_GROUP_KIND_CHUNKED

Group = tuple[int, int, int]
"""Kind, tokens of the window, layers."""


def registered(*groups: Group, **fields: Any) -> attach_pb2.PoolGeometry:
    values = {
        "block_size_tokens": 4,
        "block_count": 9,
        "block_bytes": 1,
        "max_sequence_count": 6,
        "max_sequence_tokens": 1000,
        "vocabulary_size": 100,
    }
    geometry = attach_pb2.PoolGeometry(**(values | fields))
    for kind, window, num_layers in groups:
        geometry.layer_groups.add(
            kind=attach_pb2.LayerGroupKind.ValueType(kind), window_token_count=window, layer_count=num_layers
        )
    return geometry


def decoded(*groups: Group, **fields: Any) -> Geometry:
    return messages.decode_geometry(registered(*groups, **fields))


def test_layer_groups_are_read_and_written_as_they_were_registered() -> None:
    groups = [(FULL, 0, 2), (SLIDING, 16, 2), (CHUNKED, 8, 1)]
    geometry = decoded(*groups)
    assert geometry.layer_groups == (
        LayerGroup(LayerGroupKind.FULL, 0, 2),
        LayerGroup(LayerGroupKind.SLIDING, 16, 2),
        LayerGroup(LayerGroupKind.CHUNKED, 8, 1),
    )
    assert messages.encode_geometry(geometry) == registered(*groups)
    assert decoded().layer_groups == ()


@pytest.mark.parametrize(
    ("groups", "fields", "message"),
    [
        ([(0, 0, 1)], {}, "geometry.layer_groups[0].kind is 0; must be FULL, SLIDING or CHUNKED"),
        ([(FULL, 0, 1), (9, 0, 1)], {}, "geometry.layer_groups[1].kind is 9; must be FULL, SLIDING or CHUNKED"),
        (
            [(SLIDING, 4, 1), (FULL, 0, 1)],
            {},
            "geometry.layer_groups[1].kind is FULL; must be SLIDING or CHUNKED, after a group of these kinds",
        ),
        ([(FULL, 4, 1)], {}, "geometry.layer_groups[0].window_token_count is 4; must be 0 to 0 for FULL"),
        (
            [(SLIDING, 0, 1)],
            {},
            "geometry.layer_groups[0].window_token_count is 0; must be 1 to 2147483647 for SLIDING",
        ),
        (
            [(CHUNKED, -1, 1)],
            {},
            "geometry.layer_groups[0].window_token_count is -1; must be 1 to 2147483647 for CHUNKED",
        ),
        ([(FULL, 0, 0)], {}, "geometry.layer_groups[0].layer_count is 0; must be at least 1"),
        (
            [(FULL, 0, 1), (SLIDING, 4, 1)],
            {"has_recurrent_state": True},
            "geometry.layer_groups[1].kind is SLIDING; must be FULL in a model with has_recurrent_state",
        ),
        ([(FULL, 0, 1)] * 65, {}, "geometry.layer_groups is 65 entries; must be at most 64 entries"),
    ],
)
def test_groups_that_no_worker_has_are_refused(groups: list[Group], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CallRefused) as caught:
        decoded(*groups, **fields)
    assert caught.value.refusal.message == message


def test_an_epoch_keeps_its_groups() -> None:
    known = decoded((FULL, 0, 2), (SLIDING, 16, 2))
    messages.require_same_geometry(registered((FULL, 0, 2), (SLIDING, 16, 2)), known)
    with pytest.raises(CallRefused) as caught:
        messages.require_same_geometry(registered((FULL, 0, 2), (SLIDING, 8, 2)), known)
    assert caught.value.refusal.message.startswith("geometry.layer_groups is ")


def test_with_windows_a_sequence_can_be_longer_than_the_pool() -> None:
    assert decoded().max_tokens == 8 * 4
    assert decoded((FULL, 0, 1), (FULL, 0, 1)).max_tokens == 4 * 4
    assert decoded((FULL, 0, 1), (SLIDING, 4, 1)).max_tokens == 6 * 4, "of the window at most two blocks at once"
    assert decoded((SLIDING, 4, 2)).max_tokens == 1000
