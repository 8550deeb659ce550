"""The layout of a model's cache: keys and values per token, and states per sequence, of each layer.

A forward of two tokens with a cache, as generate() makes it, shows what each layer keeps.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from quire.worker.memory.state_slots import StateKey, StateSpec
from quire.worker.unsupported_model import UnsupportedModel

CACHE_ARGUMENTS = ("past_key_values", "cache_params")
STATE_KINDS = ("conv", "recurrent")

# Layers of transformers' own cache with one pair of key and value per token and nothing else. The mask applies a
# sliding window: the pool keeps the tokens before it.
_KEY_VALUE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """The tensors that one layer keeps per token."""

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    values_in_keys: bool = False


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The cache contents of a model, by layer: keys and values, states, or both; and the form of its forward's
    argument."""

    num_layers: int
    layers: Mapping[int, CachedLayer]
    states: Mapping[StateKey, StateSpec]
    argument: str
    takes_positions: bool
    takes_logits_to_keep: bool
    continues_by_one: bool = False
    """Several tokens at once are always the first ones of a sequence to it."""


def probe_cache(model: Any) -> CacheLayout:
    """Learn from a forward of two tokens what the model puts into transformers' own cache, and how it continues from
    it.

    Raises UnsupportedModel if its forward takes no cache, fails, leaves it empty, or keeps anything of another kind.
    """
    model_class = type(model).__name__
    parameters = inspect.signature(model.forward).parameters
    argument = next((name for name in CACHE_ARGUMENTS if name in parameters), None)
    if argument is None:
        raise UnsupportedModel(model_class, "its forward takes no cache")
    cache = DynamicCache(config=model.config)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    try:
        with torch.inference_mode():
            model(input_ids=tokens, use_cache=True, **{argument: cache})
    except Exception as error:
        reason = f"a forward of two tokens with a cache failed with {type(error).__name__}: {error}"
        raise UnsupportedModel(model_class, reason) from error
    layers: dict[int, CachedLayer] = {}
    states: dict[StateKey, StateSpec] = {}
    for layer_idx, layer in enumerate(cache.layers):
        _note_keys_and_values(layers, layer_idx, layer, model_class)
        _note_states(states, layer_idx, layer)
    if not layers and not states:
        raise UnsupportedModel(model_class, "it keeps nothing in a cache")
    return CacheLayout(
        num_layers=len(cache.layers),
        layers=layers,
        states=states,
        argument=argument,
        takes_positions="position_ids" in parameters,
        takes_logits_to_keep="logits_to_keep" in parameters,
        continues_by_one=bool(states) and _forgets_states(model, argument, cache),
    )


def _forgets_states(model: Any, argument: str, cache: DynamicCache) -> bool:
    """True if two more tokens have the same result for any value of one kind of its states."""
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    layers = [i for i, layer in enumerate(cache.layers) if isinstance(layer, LinearAttentionCacheLayerMixin)]

    def logits(changed: str | None) -> Tensor:
        copied = deepcopy(cache)
        for layer_idx in layers if changed else ():
            for state in _states_of(copied.layers[layer_idx], str(changed)).values():
                state.add_(1)
        result: Tensor = model(input_ids=tokens, use_cache=True, **{argument: copied}).logits
        return result

    with torch.inference_mode():
        expected = logits(None)
        kinds = {kind for kind in STATE_KINDS if any(_states_of(cache.layers[i], kind) for i in layers)}
        return any(torch.equal(logits(kind), expected) for kind in kinds)


def keeps_states(model: Any) -> bool:
    """True if the model puts anything per sequence into a cache: a layer may, beside attention."""
    try:
        return bool(probe_cache(model).states)
    except UnsupportedModel:
        return False


def _note_keys_and_values(layers: dict[int, CachedLayer], layer_idx: int, layer: Any, model_class: str) -> None:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None:
        return
    is_known = type(layer) in _KEY_VALUE_LAYERS or isinstance(layer, LinearAttentionCacheLayerMixin)
    if not is_known or keys.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        what = f"layer {layer_idx} keeps a {type(layer).__name__} of {tuple(keys.shape)} and {tuple(values.shape)}"
        raise UnsupportedModel(model_class, f"{what}, not a key and a value per head and token")
    layers[layer_idx] = CachedLayer(keys.shape[1], keys.shape[3], values.shape[3])


def _note_states(states: dict[StateKey, StateSpec], layer_idx: int, layer: Any) -> None:
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return
    for kind in STATE_KINDS:
        for index, state in _states_of(layer, kind).items():
            states[StateKey(layer_idx, kind, index)] = StateSpec(tuple(state.shape[1:]), state.dtype)


def _states_of(layer: Any, kind: str) -> dict[int, Tensor]:
    return {index: state for index, state in getattr(layer, f"{kind}_states").items() if state is not None}
