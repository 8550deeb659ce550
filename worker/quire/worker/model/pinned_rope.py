"""Ropes that depend on the whole batch, pinned to positions alone."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

log = logging.getLogger(__name__)


def pin_rope(model: Any, max_model_len: int) -> int:
    """Make every rope a function of position alone, in place; return how many were changed.

    Dynamic NTK and longrope choose frequencies by the greatest position of the whole batch, so that one long sequence
    would change all the others. They are fixed to what they are for a sequence of max_model_len tokens. If these are
    not the frequencies of a short sequence, a log line says so: transformers' generate() takes other ones then.
    """
    num_pinned = 0
    stretched: set[str] = set()
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str) and _depends_on_batch(rope_type):
            if _pin(module, rope_type, max_model_len, prefix="", arguments={}):
                stretched.add(rope_type)
            module.rope_type = "default"
            num_pinned += 1
        elif isinstance(rope_type, dict):
            for layer_type in [key for key, value in rope_type.items() if _depends_on_batch(value)]:
                arguments = {"layer_type": layer_type}
                if _pin(module, rope_type[layer_type], max_model_len, prefix=f"{layer_type}_", arguments=arguments):
                    stretched.add(rope_type[layer_type])
                rope_type[layer_type] = "default"
                num_pinned += 1
    if stretched:
        log.info(
            "rope (%s) pinned to max_model_len=%d: shorter sequences can get other tokens than "
            "transformers' generate gives",
            ", ".join(sorted(stretched)),
            max_model_len,
        )
    return num_pinned


def _depends_on_batch(rope_type: str) -> bool:
    return rope_type == "longrope" or "dynamic" in rope_type


def _pin(module: Any, rope_type: str, max_model_len: int, *, prefix: str, arguments: dict[str, str]) -> bool:
    """Pin one rope; return True if this changes its frequencies, which are those of a short sequence at load."""
    inv_freq = getattr(module, f"{prefix}inv_freq")
    computed, scaling = ROPE_INIT_FUNCTIONS[rope_type](
        module.config, inv_freq.device, seq_len=max_model_len, **arguments
    )
    pinned = computed.to(inv_freq.dtype)
    setattr(module, f"{prefix}inv_freq", pinned)
    setattr(module, f"{prefix}attention_scaling", scaling)
    return not torch.equal(pinned, inv_freq)
