"""Experts of a deterministic model: each runs on whole tiles.

transformers' ways to run a mixture of experts give an expert a product of as many rows as there are tokens for it. Here
an expert that some token of the tile needs runs on all tokens of the tile. Each token then takes its own experts'
results, in the order of its router.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

TILED_EXPERTS = "quire_tiled"


def tiled_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run a module of experts as transformers' experts functions do.

    hidden_states   [R, hidden size]    a tile
    top_k_index     [R, K]              the experts of each token; module.num_experts and more: none
    top_k_weights   [R, K]
    returns         [R, hidden size]
    """
    chosen = torch.zeros(*top_k_index.shape, hidden_states.shape[1], dtype=hidden_states.dtype)
    for expert in torch.unique(top_k_index).tolist():
        if expert < module.num_experts:
            result = _run_expert(module, expert, hidden_states)
            chosen = torch.where((top_k_index == expert)[..., None], result[:, None], chosen)
    total = torch.zeros_like(hidden_states, dtype=torch.promote_types(top_k_weights.dtype, hidden_states.dtype))
    for number in range(top_k_index.shape[1]):
        total += chosen[:, number] * top_k_weights[:, number, None]
    return total.to(hidden_states.dtype)


def _run_expert(module: Any, expert: int, hidden_states: Tensor) -> Tensor:
    name = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _linear(module, name, expert, hidden_states)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    result = _linear(module, "down_proj", expert, inner)
    return module.post_expert_norm(result) if module.has_post_expert_norm else result


def _linear(module: Any, name: str, expert: int, rows: Tensor) -> Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return F.linear(rows.to(weight.dtype), weight.t() if module.is_transposed else weight, bias)


ALL_EXPERTS_FUNCTIONS.register(TILED_EXPERTS, tiled_experts)
