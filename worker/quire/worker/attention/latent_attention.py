"""Multi-head latent attention on the latents themselves: DeepSeek V2 and V3, and models built like them.

Such a layer makes keys and values of all heads from one latent per token, and a part of the key that carries the rope.
transformers expands the latents and then calls attention; here the expansion is left out, and its two halves are
applied to the query and to the result instead:

    key         [latent, rope key]          one head of rank + rope
    value       [latent]                    the same memory: the first `rank` of the key
    query       [q_nope @ W_k, q_rope]      score = q_nope . (W_k @ latent) + q_rope . rope key
    output      W_v @ (weights @ latent)

So a token takes rank + rope elements, whatever the number of heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from quire.worker.attention.torch_attention import paged_attention
from quire.worker.memory.layer_spec import LayerSpec

LATENT_NAME = "quire_latent"


def latent_specs(model: Any, specs: Mapping[int, LayerSpec]) -> dict[int, LayerSpec] | None:
    """The layers' latents, by the specs of their expanded form; None if one of them is not built so."""
    modules = _latent_modules(model)
    if modules.keys() != specs.keys():
        return None
    if any(not _fits(modules[layer_idx], spec) for layer_idx, spec in specs.items()):
        return None
    return {
        layer_idx: replace(
            spec,
            num_kv_heads=1,
            k_head_dim=modules[layer_idx].kv_lora_rank + modules[layer_idx].qk_rope_head_dim,
            v_head_dim=modules[layer_idx].kv_lora_rank,
            values_in_keys=True,
        )
        for layer_idx, spec in specs.items()
    }


def keep_latents(model: Any) -> None:
    """Make the layers pass latents as long as the model's attention implementation is LATENT_NAME."""
    for module in _latent_modules(model).values():
        _hand_over_latents(module)


def _latent_modules(model: Any) -> dict[int, Any]:
    names = ("kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "layer_idx")
    return {
        module.layer_idx: module
        for module in model.modules()
        if callable(getattr(module, "expand_kv", None)) and all(hasattr(module, name) for name in names)
    }


def _fits(module: Any, spec: LayerSpec) -> bool:
    """True if each head has its own key and value, made by one matrix without a bias."""
    projection = module.kv_b_proj
    return (
        type(projection) is nn.Linear
        and projection.bias is None
        and spec.num_kv_heads == spec.num_query_heads
        and spec.k_head_dim == module.qk_nope_head_dim + module.qk_rope_head_dim
        and spec.v_head_dim == module.v_head_dim
        and projection.out_features == spec.num_query_heads * (module.qk_nope_head_dim + module.v_head_dim)
    )


def _hand_over_latents(module: Any) -> None:
    expand = module.expand_kv

    def expand_kv(latent: Tensor, rope_key: Tensor) -> tuple[Tensor, Tensor]:
        if module.config._attn_implementation != LATENT_NAME:
            expanded: tuple[Tensor, Tensor] = expand(latent, rope_key)
            return expanded
        return torch.cat((latent, rope_key), dim=-1), latent

    module.expand_kv = expand_kv


def latent_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """paged_attention() on latents. H heads, R rank, N and P the parts of a head's key without and with rope.

    query   [1, H, T, N + P]
    key     [1, 1, T, R + P]    value [1, 1, T, R]
    returns [1, T, H, Dv], and None for the weights
    """
    num_heads, nope_dim = query.shape[1], module.qk_nope_head_dim
    weight = module.kv_b_proj.weight.view(num_heads, -1, value.shape[-1])
    latent_query = torch.matmul(query[..., :nope_dim], weight[:, :nope_dim])
    absorbed = torch.cat((latent_query, query[..., nope_dim:]), dim=-1)
    out, _ = paged_attention(module, absorbed, key, value, attention_mask, **kwargs)
    heads = torch.matmul(out.transpose(1, 2), weight[:, nope_dim:].transpose(1, 2))
    return heads.transpose(1, 2), None


AttentionInterface.register(LATENT_NAME, latent_attention)
