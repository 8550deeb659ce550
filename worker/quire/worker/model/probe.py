"""The attention parameters of a model, learned from a forward.

One forward of one token runs under a throw-away name that is registered in both of transformers' interfaces. The mask
interface hands over the symbolic mask function instead of a mask; a tag tensor carries it through the model to the
attention call of each layer. So geometry, scaling, softcap, sinks and the mask of every layer are read from the calls
the model really makes, and neither its name nor its configuration is consulted.

    mask interface      gets mask_function(b, h, q, kv)    returns a tag, [1, 1, 1, 1]
    attention interface gets module.layer_idx, q, k, v, tag, keyword arguments

What the probe cannot see (a bias added outside the mask, a rope that looks at the batch) is left to the numeric
self-check of quire.worker.model.self_check.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from quire.worker.memory.layer_spec import Causal, Chunked, LayerSpec, Mask, Sliding
from quire.worker.unsupported_model import OffTheInterface, UnsupportedModel

PROBE_NAME = "quire_probe"

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Masks are classified on positions 0 .. MASK_POSITIONS - 1. A window at least this wide counts as causal unless the
# layer's sliding_window gives a size, which _agreed_mask then uses.
MASK_POSITIONS = 1 << 16


@dataclass(frozen=True, slots=True)
class _AttentionCall:
    layer_idx: int | None
    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    mask_function: MaskFunction | None
    mask_given: bool
    kwargs: dict[str, Any]


class _Recorder:
    """Both halves of the temporary implementation, and the recorded calls."""

    def __init__(self) -> None:
        self.calls: list[_AttentionCall] = []
        self._tags: list[tuple[Tensor, MaskFunction | None]] = []

    def make_mask(self, *args: Any, mask_function: MaskFunction | None = None, **kwargs: Any) -> Tensor:
        tag = torch.zeros(1, 1, 1, 1)
        self._tags.append((tag, mask_function))
        return tag

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        mask_function = next((function for tag, function in self._tags if tag is attention_mask), None)
        self.calls.append(
            _AttentionCall(
                layer_idx=getattr(module, "layer_idx", None),
                query_shape=tuple(query.shape),
                key_shape=tuple(key.shape),
                value_shape=tuple(value.shape),
                mask_function=mask_function,
                mask_given=attention_mask is not None,
                kwargs=kwargs,
            )
        )
        batch, heads, length, _ = query.shape
        return query.new_zeros(batch, length, heads, value.shape[-1]), None


def probe(model: Any) -> dict[int, LayerSpec]:
    """Return the attention parameters of each layer of a causal language model, by layer index.

    Raises OffTheInterface if a layer makes no attention call through transformers' AttentionInterface, and
    UnsupportedModel if one makes more than one, or has a mask other than causal, sliding or chunked. The model's
    attention implementation is the same after the call as before. Cost: one forward of one token, and a few
    milliseconds per distinct mask.
    """
    model_class = type(model).__name__
    calls = _record_calls(model)
    _check_every_layer_called_once(calls, model)
    classified: dict[int, Mask | None] = {}
    specs = {}
    for call in calls:
        key = id(call.mask_function)
        if key not in classified:
            classified[key] = classify_mask(call.mask_function, device=model.device) if call.mask_function else None
        spec = _layer_spec(call, classified[key], model_class)
        specs[spec.layer_idx] = spec
    return dict(sorted(specs.items()))


def _record_calls(model: Any) -> list[_AttentionCall]:
    recorder = _Recorder()
    AttentionInterface.register(PROBE_NAME, recorder.attend)
    AttentionMaskInterface.register(PROBE_NAME, recorder.make_mask)
    previous = model.config._attn_implementation
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        model.set_attn_implementation(PROBE_NAME)
        with torch.inference_mode():
            model(input_ids=token, position_ids=token, use_cache=False)
    except Exception as error:
        raise UnsupportedModel(
            type(model).__name__, f"a forward of one token under the probe failed with {type(error).__name__}: {error}"
        ) from error
    finally:
        model.set_attn_implementation(previous)
    return recorder.calls


def _check_every_layer_called_once(calls: list[_AttentionCall], model: Any) -> None:
    model_class = type(model).__name__
    num_layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    if not calls:
        raise OffTheInterface(
            model_class, f"none of its {num_layers} layers calls attention through transformers' AttentionInterface"
        )
    if any(call.layer_idx is None for call in calls):
        raise UnsupportedModel(model_class, "its attention modules carry no layer_idx")
    called = [call.layer_idx for call in calls if call.layer_idx is not None]
    missing = sorted(set(range(num_layers)) - set(called))
    if missing:
        raise OffTheInterface(
            model_class, f"{len(missing)} of its {num_layers} layers (first: {missing[0]}) made no attention call"
        )
    if len(called) != num_layers:
        raise UnsupportedModel(model_class, f"{len(called)} attention calls in one forward of {num_layers} layers")


def _layer_spec(call: _AttentionCall, mask: Mask | None, model_class: str) -> LayerSpec:
    layer_idx = call.layer_idx
    assert layer_idx is not None
    if mask is None:
        what = "a mask of its own making" if call.mask_given and not call.mask_function else "an unknown mask"
        what = what if call.mask_given else "no mask"
        raise UnsupportedModel(model_class, f"layer {layer_idx} asks for {what}, not causal, sliding or chunked")
    num_query_heads, k_head_dim = call.query_shape[1], call.key_shape[-1]
    num_kv_heads = call.key_shape[1]
    if num_query_heads % num_kv_heads or call.value_shape[1] != num_kv_heads:
        raise UnsupportedModel(
            model_class,
            f"layer {layer_idx} has {num_query_heads} query, {num_kv_heads} key and {call.value_shape[1]} value heads",
        )
    scaling = call.kwargs.get("scaling")
    return LayerSpec(
        layer_idx=layer_idx,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        k_head_dim=k_head_dim,
        v_head_dim=call.value_shape[-1],
        mask=_agreed_mask(mask, call, model_class),
        scaling=k_head_dim**-0.5 if scaling is None else float(scaling),
        softcap=call.kwargs.get("softcap"),
        has_sinks=call.kwargs.get("s_aux") is not None,
    )


def _agreed_mask(mask: Mask, call: _AttentionCall, model_class: str) -> Mask:
    """The mask, if the layer's sliding_window argument does not contradict it."""
    window = call.kwargs.get("sliding_window")
    if window is None or mask == Sliding(window):
        return mask
    if mask == Causal() and window >= MASK_POSITIONS:
        return Sliding(window)
    raise UnsupportedModel(
        model_class, f"layer {call.layer_idx} asks for the mask {mask} and for sliding_window={window}"
    )


def classify_mask(
    function: MaskFunction, *, positions: int = MASK_POSITIONS, device: torch.device | str = "cpu"
) -> Mask | None:
    """Return the mask that a mask function makes on positions 0 .. positions - 1, or None if it is of no known kind.

    A function may hold tensors of the model's device, so it is called there. Two queries suggest the kind and its size;
    the suggestion must then hold for every key of about twenty queries, those next to a boundary among them. Cost:
    about twenty evaluations over `positions` keys.
    """
    keys = torch.arange(positions, device=device)
    last = positions - 1
    first_visible = _first_visible(function, last, keys)
    if first_visible is None:
        return None
    before = _first_visible(function, first_visible - 1, keys) if first_visible else None
    candidates: list[Mask] = [Causal()] if not first_visible else [Sliding(positions - first_visible)]
    if before is not None:
        candidates.append(Chunked(first_visible - before))
    return next((mask for mask in candidates if _holds(mask, function, keys)), None)


def _row(function: MaskFunction, position: int, keys: Tensor) -> Tensor:
    """Return the keys that a query at `position` sees, [len(keys)] bool."""
    zero = keys.new_zeros(())
    return function(zero, zero, zero + position, keys).expand(keys.shape)


def _first_visible(function: MaskFunction, position: int, keys: Tensor) -> int | None:
    """The least key a query sees, or None if it sees none."""
    row = _row(function, position, keys)
    return int(row.to(torch.uint8).argmax()) if bool(row.any()) else None


def _holds(mask: Mask, function: MaskFunction, keys: Tensor) -> bool:
    for position in _telling_positions(mask, len(keys)):
        expected = (keys >= mask.first_visible(position)) & (keys <= position)
        if not torch.equal(_row(function, position, keys), expected):
            return False
    return True


def _telling_positions(mask: Mask, positions: int) -> list[int]:
    """Queries at both ends, in between, and next to where a window fills or a chunk ends."""
    size = mask.window if isinstance(mask, Sliding) else mask.chunk if isinstance(mask, Chunked) else 1
    near = [multiple * size + offset for multiple in (1, 2, 3) for offset in (-1, 0, 1)]
    spread = [0, 1, 2, positions // 7, positions // 3, positions // 2 + 1, positions - 2, positions - 1]
    return sorted({position for position in near + spread if 0 <= position < positions})
