"""How layers are divided into groups: the known models, and the rule for the layers of a block."""

from __future__ import annotations

from dataclasses import replace

import pytest
from layers import UNEVEN_LAYERS, causal_layer

from quire.worker.memory.layer_groups import (
    MAX_GROUPS,
    MAX_PADDING,
    PADDING_TOKENS,
    LayerGroup,
    describe_groups,
    group_layers,
    layers_per_block,
    one_group,
    specs_of_places,
)
from quire.worker.memory.layer_spec import Causal, Chunked, LayerSpec, Mask, Sliding
from quire.worker.model.cache_layout import CachedLayer

LONG = 131_072
FULL = Causal()


def make_layers(*masks: Mask) -> dict[int, LayerSpec]:
    """Layers of one size with these masks."""
    return {
        i: replace(causal_layer(i, num_kv_heads=2, k_head_dim=8, v_head_dim=8), mask=mask)
        for i, mask in enumerate(masks)
    }


def every(period: int, count: int, windowed: Mask) -> dict[int, LayerSpec]:
    """`count` layers, of which each period-th sees all positions."""
    return make_layers(*(FULL if i % period == period - 1 else windowed for i in range(count)))


# Layers, then groups of layers that see all positions, groups with a window, layers of a block.
MODELS = {
    "Gemma 2 2B": (every(2, 26, Sliding(4096)), 1, 1, 13),
    "Gemma 3 1B": (every(6, 26, Sliding(512)), 1, 6, 4),
    "Gemma 3 4B": (every(6, 34, Sliding(1024)), 1, 6, 5),
    "Gemma 3 27B": (every(6, 62, Sliding(1024)), 2, 11, 5),
    "gpt-oss 20B": (every(2, 24, Sliding(128)), 1, 1, 12),
    "Llama 4 Scout": (every(4, 48, Chunked(8192)), 1, 3, 12),
    "Cohere 2 7B": (every(4, 32, Sliding(4096)), 1, 3, 8),
    "Mistral 7B 0.1": (make_layers(*[Sliding(4096)] * 32), 0, 1, 32),
    "Llama 3 8B": (make_layers(*[FULL] * 32), 1, 0, 32),
}


@pytest.mark.parametrize(("layers", "num_full", "num_windowed", "length"), MODELS.values(), ids=MODELS)
def test_known_models(layers: dict[int, LayerSpec], num_full: int, num_windowed: int, length: int) -> None:
    groups = group_layers(layers, max_model_len=LONG)
    assert [group.is_windowed for group in groups] == [False] * num_full + [True] * num_windowed
    assert max(len(group.layers) for group in groups) == length == len(specs_of_places(layers, groups))
    assert sorted(layer for group in groups for layer in group.layers) == list(layers)
    assert all(layers[layer].mask == group.mask for group in groups for layer in group.layers)
    held = [len(group.layers) * min(PADDING_TOKENS, group.window or PADDING_TOKENS) for group in groups]
    taken = [length * min(PADDING_TOKENS, group.window or PADDING_TOKENS) for group in groups]
    assert sum(taken) <= sum(held) * (1 + MAX_PADDING)


def test_one_more_layer_of_a_block_would_leave_more_room_unused() -> None:
    kinds: list[tuple[int, int | None]] = [(10, None), (52, 1024)]
    assert layers_per_block(kinds, max_model_len=LONG) == 5
    for length in range(6, 53):
        unused = -10 % length * PADDING_TOKENS + -52 % length * 1024
        assert unused > MAX_PADDING * (10 * PADDING_TOKENS + 52 * 1024)


def test_there_are_never_more_groups_than_the_contract_has() -> None:
    layers = make_layers(FULL, *[Sliding(64)] * 126)
    groups = group_layers(layers, max_model_len=LONG)
    assert len(groups) == 64
    assert len(groups) <= MAX_GROUPS
    kinds = make_layers(*[Sliding(size) for size in range(1, MAX_GROUPS + 2)])
    assert group_layers(kinds, max_model_len=LONG) == one_group(kinds)


def test_a_window_as_long_as_the_longest_sequence_hides_nothing() -> None:
    layers = make_layers(FULL, Sliding(4096), Chunked(8192))
    assert group_layers(layers, max_model_len=4096) == (LayerGroup(FULL, (0, 1, 2)),)
    shorter = group_layers(layers, max_model_len=4097)
    assert shorter == (LayerGroup(FULL, (0,)), LayerGroup(FULL, (2,)), LayerGroup(Sliding(4096), (1,)))


def test_layers_without_windows_come_first_and_the_others_as_they_come() -> None:
    layers = make_layers(Sliding(8), Chunked(4), FULL, Sliding(16), Sliding(8))
    groups = group_layers(layers, max_model_len=64)
    assert [(str(group), group.layers) for group in groups] == [
        ("full", (2,)),
        ("window 8", (0,)),
        ("window 8", (4,)),
        ("chunk 4", (1,)),
        ("window 16", (3,)),
    ]


def test_one_group_if_asked_for_or_if_layers_differ_or_are_not_known() -> None:
    layers = make_layers(FULL, Sliding(8))
    assert group_layers(layers, max_model_len=64, choice="one") == one_group(layers) == (LayerGroup(FULL, (0, 1)),)
    uneven = UNEVEN_LAYERS | {7: replace(UNEVEN_LAYERS[0], layer_idx=7, mask=Sliding(8))}
    assert group_layers(uneven, max_model_len=64) == (LayerGroup(FULL, (0, 3, 7)),)
    own = {2: CachedLayer(2, 8, 8), 5: CachedLayer(2, 8, 8)}
    assert group_layers(own, max_model_len=64) == (LayerGroup(FULL, (2, 5)),)
    assert group_layers({}, max_model_len=64) == (LayerGroup(FULL, ()),)


@pytest.mark.parametrize("mask", [FULL, Sliding(1), Sliding(6), Sliding(9), Chunked(4), Chunked(6)], ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 5])
def test_passed_blocks_are_those_that_no_later_token_sees(mask: Mask, block_size: int) -> None:
    group = LayerGroup(mask, (0,))
    assert group.count_passed(0, block_size) == 0
    for num_computed in range(1, 40):
        later = range(num_computed - 1, 80)
        first_seen = min(mask.first_visible(position) for position in later)
        assert group.count_passed(num_computed, block_size) == first_seen // block_size


def test_the_line_about_groups() -> None:
    gemma = group_layers(every(6, 62, Sliding(1024)), max_model_len=LONG)
    assert describe_groups(gemma, layer_bytes=1000) == (
        "13 of up to 5 layers (full: 2 of 10 layers; window 1024: 11 of 52 layers); "
        "unused: 3000 bytes in blocks of window 1024"
    )
    oss = group_layers(every(2, 24, Sliding(128)), max_model_len=LONG)
    assert describe_groups(oss, layer_bytes=1000) == (
        "2 of up to 12 layers (full: 1 of 12 layers; window 128: 1 of 12 layers); unused: none"
    )
    mistral = group_layers(make_layers(Sliding(4096)), max_model_len=LONG)
    assert describe_groups(mistral, layer_bytes=1000) == "1 of 1 layers, window 4096"
