"""LoRA adapters of tiny models, written as PEFT writes them, and the same weights merged into the base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
GAIN = 0.6


def save(
    model: Any,
    folder: Path,
    *,
    seed: int,
    targets: tuple[str, ...] = ALL,
    rank: int = 4,
    alpha: float = 8,
    **fields: Any,
) -> Path:
    """Write an adapter with random weights for the layers of a model with these names; return its folder.

    Weights are wide enough that tokens change. `fields` are further ones of adapter_config.json.
    """
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
        "use_rslora": False,
        **fields,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(draw_weights(model, seed=seed, targets=targets, rank=rank), folder / "adapter_model.safetensors")
    return folder


def draw_weights(model: Any, *, seed: int, targets: tuple[str, ...] = ALL, rank: int = 4) -> dict[str, Tensor]:
    """Return weights by the names that PEFT gives them."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] not in targets:
            continue
        num_outputs, num_inputs = module.weight.t().shape if isinstance(module, Conv1D) else module.weight.shape
        a = torch.randn(rank, num_inputs, generator=generator) * num_inputs**-0.5
        b = torch.randn(num_outputs, rank, generator=generator) * GAIN * rank**-0.5
        weights[f"base_model.model.{name}.lora_A.weight"] = a
        weights[f"base_model.model.{name}.lora_B.weight"] = b
    return weights


def merge(model: Any, weights: dict[str, Tensor], *, scaling: float) -> Any:
    """Add an adapter's update to the weights of a model, in place; return the model."""
    for name, a in weights.items():
        if name.endswith("lora_A.weight"):
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = weights[name.replace("lora_A", "lora_B")]
            module, update = model.get_submodule(layer), scaling * b @ a
            module.weight += update.t() if isinstance(module, Conv1D) else update
    return model
