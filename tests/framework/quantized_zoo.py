"""Tiny quantized checkpoints, written in plain torch, and the plain model that each of them stands for.

The formats' details are pinned by layers that the tools wrote; see quantize_by_tools.py. Here is one way of writing
each family, for whole models.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_zoo as zoo
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

GROUP = 16
COLUMNS = 32
"""Columns of a group of packed integers, or of a block in float8: the fewest that have a kernel on a GPU."""
Packed = tuple[dict[str, Tensor], Tensor]
"""The tensors of a layer in the checkpoint, and the weight that they stand for."""


def _float8_blocks(weight: Tensor, block_columns: int = COLUMNS) -> Packed:
    rows, columns = weight.shape
    parts = weight.view(rows // GROUP, GROUP, columns // block_columns, block_columns)
    scale = parts.abs().amax((1, 3)) / 448
    values = (parts / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    expected = (values.float() * scale[:, None, :, None]).view(rows, columns)
    return {"weight": values.view(rows, columns), "weight_scale_inv": scale}, expected


def _float8_tensor(weight: Tensor) -> Packed:
    scale = weight.abs().amax() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scale}, values.float() * scale


def _rows_of_8_bits(dtype: torch.dtype) -> Callable[[Tensor], Packed]:
    def pack(weight: Tensor) -> Packed:
        scale = weight.abs().amax(1, keepdim=True) / (127 if dtype == torch.int8 else 448)
        scaled = weight / scale
        values = (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
        return {"weight": values, "weight_scale": scale}, values.float() * scale

    return pack


def _groups(weight: Tensor, order: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers [N, K] of 4 bits, scales and zero points [N, G], and the weight that they stand for."""
    parts = weight[:, order.argsort(stable=True)].view(weight.shape[0], int(order.max()) + 1, -1)
    scale = ((parts.amax(-1) - parts.amin(-1)) / 14).clamp_min(1e-4)
    zero = (-parts.amin(-1) / scale).round().clamp(1, 15)
    numbers = (weight / scale[:, order] + zero[:, order]).round().clamp(0, 15)
    expected = (numbers - zero[:, order]) * scale[:, order]
    return numbers.to(torch.int32), scale, zero.to(torch.int32), expected


def _words(numbers: Tensor) -> Tensor:
    """[R, C] as [R, C / 8], the first number in the lowest bits."""
    eights = numbers.to(torch.int64).view(numbers.shape[0], -1, 8)
    words = (eights << torch.arange(0, 32, 4)).sum(-1)
    return (words - ((words >> 31) << 32)).to(torch.int32)


def _gptq(weight: Tensor, columns: int = COLUMNS) -> Packed:
    order = torch.arange(weight.shape[1]) // columns
    order = order[torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3))]
    numbers, scale, zero, expected = _groups(weight, order)
    tensors = {
        "qweight": _words(numbers).t(),
        "qzeros": _words((zero - 1).t()),
        "scales": scale.t(),
        "g_idx": order.to(torch.int32),
    }
    return tensors, expected


def _awq(weight: Tensor, columns: int = COLUMNS) -> Packed:
    numbers, scale, zero, expected = _groups(weight, torch.arange(weight.shape[1]) // columns)

    def words(rows: Tensor) -> Tensor:
        return _words(rows.reshape(rows.shape[0], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1))

    return {"qweight": words(numbers.t()), "qzeros": words(zero.t()), "scales": scale.t()}, expected


def _compressed_int4(weight: Tensor, columns: int = COLUMNS) -> Packed:
    parts = weight.view(weight.shape[0], -1, columns)
    scale = parts.abs().amax(-1) / 7.5
    numbers = (parts / scale[..., None]).round().clamp(-8, 7)
    expected = (numbers * scale[..., None]).view(weight.shape)
    packed = _words((numbers + 8).to(torch.int32).view(weight.shape))
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}, expected


def _nf4(weight: Tensor) -> Packed:
    table = torch.linspace(-1, 1, 16) ** 3
    parts = weight.view(-1, 64)
    scale = parts.abs().amax(-1)
    numbers = ((parts / scale[:, None])[..., None] - table).abs().argmin(-1)
    state = json.dumps({"blocksize": 64, "shape": list(weight.shape)}).encode()
    pairs = numbers.view(-1, 2)
    tensors = {
        "weight": (pairs[:, 0] * 16 + pairs[:, 1]).to(torch.uint8)[:, None],
        "weight.absmax": scale,
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state), dtype=torch.uint8),
    }
    return tensors, (table[numbers] * scale[:, None]).view(weight.shape)


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "format": form, "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


_EIGHT_BITS: dict[str, Any] = {"num_bits": 8, "symmetric": True}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Packed]]] = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [GROUP, COLUMNS]}, _float8_blocks),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8"}, _rows_of_8_bits(torch.float8_e4m3fn)),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": COLUMNS, "desc_act": True}, _gptq),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": COLUMNS, "version": "gemm"}, _awq),
    "compressed_int4": (
        _compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": COLUMNS}),
        _compressed_int4,
    ),
    "compressed_int8": (
        _compressed("int-quantized", _EIGHT_BITS | {"type": "int", "strategy": "channel"}),
        _rows_of_8_bits(torch.int8),
    ),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, _nf4),
}
# Inputs are rounded too, so the model stands for no plain one.
ROUNDED = {
    "compressed_int8_inputs": (
        _compressed(
            "int-quantized",
            _EIGHT_BITS | {"type": "int", "strategy": "channel"},
            _EIGHT_BITS | {"type": "int", "strategy": "token", "dynamic": True},
        ),
        _rows_of_8_bits(torch.int8),
    )
}


def build() -> Any:
    """A plain Llama with the sizes that all formats divide."""
    return zoo._llama(hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=16)


def save(name: str, directory: Path) -> tuple[Path, Any]:
    """Write a checkpoint of a format. Returns its folder, and the plain model with the weights that it stands for."""
    config, pack = (FORMATS | ROUNDED)[name]
    model, folder = build(), Path(directory, name)
    tensors: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if type(module) is nn.Linear and path != "lm_head":
            packed, expected = pack(module.weight.data)
            tensors |= {f"{path}.{key}": tensor.contiguous() for key, tensor in packed.items()}
            module.weight.copy_(expected)
    plain = {
        key: tensor
        for key, tensor in model.state_dict().items()
        if f"{key.rpartition('.')[0]}." not in _layers(tensors)
    }
    model.config.quantization_config = config
    model.config.save_pretrained(folder)
    save_file(plain | tensors, folder / "model.safetensors", {"format": "pt"})
    del model.config.quantization_config
    return folder, model


def _layers(tensors: dict[str, Tensor]) -> set[str]:
    return {key[: key.index("proj.") + len("proj.")] for key in tensors}


# -- mixtures of experts

_PLAIN = {"modules_to_not_convert": ["lm_head", r".*self_attn"]}
_FLOAT8_EXPERTS = FORMATS["fp8"][0] | {"weight_block_size": [GROUP, GROUP]} | _PLAIN
EXPERTS: dict[str, tuple[str, dict[str, Any], Callable[[Tensor], Packed]]] = {
    "qwen3_moe fp8": ("qwen3_moe", _FLOAT8_EXPERTS, lambda weight: _float8_blocks(weight, GROUP)),
    "deepseek_v3 fp8": ("deepseek_v3", _FLOAT8_EXPERTS, lambda weight: _float8_blocks(weight, GROUP)),
    "mixtral int8": ("mixtral", FORMATS["compressed_int8"][0], _rows_of_8_bits(torch.int8)),
    "mixtral float8": ("mixtral", {"quant_method": "fp8"} | _PLAIN, _float8_tensor),
    "mixtral fbgemm": ("mixtral", FORMATS["fbgemm_fp8"][0] | _PLAIN, _rows_of_8_bits(torch.float8_e4m3fn)),
    "qwen3_moe gptq": (
        "qwen3_moe",
        FORMATS["gptq"][0] | {"group_size": GROUP} | _PLAIN,
        lambda weight: _gptq(weight, GROUP),
    ),
    "qwen3_moe awq": (
        "qwen3_moe",
        FORMATS["awq"][0] | {"group_size": GROUP} | _PLAIN,
        lambda weight: _awq(weight, GROUP),
    ),
    "deepseek_v3 int4": (
        "deepseek_v3",
        _compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}),
        lambda weight: _compressed_int4(weight, GROUP),
    ),
    "qwen3_moe float8": (
        "qwen3_moe",
        _compressed("float-quantized", _EIGHT_BITS | {"type": "float", "strategy": "channel"}),
        _rows_of_8_bits(torch.float8_e4m3fn),
    ),
}


def save_experts(name: str, directory: Path) -> tuple[Path, Path]:
    """Write a checkpoint of a mixture with quantized experts and MLPs, as on the hub: one tensor for each expert.

    Returns its folder, and that of the plain checkpoint that it stands for.
    """
    family, config, pack = EXPERTS[name]
    plain, folder = zoo.save(family, directory / "plain"), directory / "quantized"
    tensors, packed = load_file(plain / "model.safetensors"), {}
    for key in [key for key in tensors if re.search(r"(mlp|experts)\..*(_proj|w[123])\.weight$", key)]:
        parts, tensors[key] = pack(tensors[key])
        packed |= {f"{key.removesuffix('weight')}{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    if config["quant_method"] == "compressed-tensors":
        config = config | {"ignore": ["lm_head", r"re:.*self_attn", r"re:.*gate$"]}
    _write(folder, plain, {key: value for key, value in tensors.items() if key not in packed} | packed, config)
    return folder, plain


def save_mxfp4(directory: Path) -> tuple[Path, Path]:
    """Write a gpt-oss as on the hub. Returns its folder, and that of the plain checkpoint that it stands for."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = zoo.build_gpt_oss(hidden_size=64, intermediate_size=32)
    plain, folder = directory / "plain", directory / "quantized"
    generator, packed = torch.Generator().manual_seed(5), {}
    for path, module in model.named_modules():
        for name in ("gate_up_proj", "down_proj") if path.endswith(".experts") else ():
            num_experts, columns, rows = getattr(module, name).shape
            shape = (num_experts, rows, columns // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)
            getattr(module, name).data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            packed |= {f"{path}.{name}_blocks": blocks, f"{path}.{name}_scales": scales}
    model.save_pretrained(plain)
    kept = {
        key: tensor for key, tensor in load_file(plain / "model.safetensors").items() if f"{key}_blocks" not in packed
    }
    _write(folder, plain, kept | packed, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return folder, plain


def _write(folder: Path, plain: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    folder.mkdir()
    values = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(values))
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


if __name__ == "__main__":  # a format and the folder to save it in
    hf.logging.set_verbosity_error()
    save(sys.argv[1], Path(sys.argv[2]))
