"""Write the layers of tests/unit/worker/quantized, each as a tool quantizes, saves and dequantizes it.

Usage: python tests/framework/quantize_by_tools.py

A file has the tensors of one linear layer as a checkpoint has them, beginning with `layer.`, and of the tool itself
`expected_weight`, and for quantized inputs `input` and `expected_output`. Its metadata are the quantization_config and
the tool's version. The tools are not needed to run the tests. AutoAWQ and AutoGPTQ are read from their wheels:
transformers has other versions of what they import.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import save_file
from torch import Tensor, nn

TARGET = Path(__file__).parents[1] / "unit" / "worker" / "quantized"
ROWS, COLUMNS, GROUP = 16, 64, 16


def layer(rows: int = ROWS, columns: int = COLUMNS) -> nn.Linear:
    linear = nn.Linear(columns, rows, bias=False).requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    linear.weight.copy_(torch.randn(rows, columns, generator=generator))
    return linear


def inputs() -> Tensor:
    return torch.randn(1, 5, COLUMNS, generator=torch.Generator().manual_seed(6))


def write(name: str, tool: str, config: dict[str, Any], tensors: dict[str, Tensor], results: dict[str, Tensor]) -> None:
    checkpoint = {f"layer.{key}": tensor.contiguous() for key, tensor in tensors.items()}
    kept = {key: tensor.detach().float().contiguous() for key, tensor in results.items()}
    metadata = {"quantization_config": json.dumps(config), "tool": tool}
    save_file(checkpoint | kept, TARGET / f"{name}.safetensors", metadata)


def compressed(name: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    model = nn.ModuleDict({"layer": layer()})
    module: Any = model["layer"]
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=None if activations is None else QuantizationArgs(**activations),
    )
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    _calibrate(module)
    zero_point = getattr(module, "weight_zero_point", None)
    expected = fake_quantize(module.weight.data, module.weight_scale, zero_point, scheme.weights)
    results = {"expected_weight": expected}
    if activations is not None:
        results |= {"input": inputs(), "expected_output": module(inputs())}
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    config = compressor.quantization_config.model_dump(mode="json", exclude_none=True)
    tool = f"compressed-tensors {version('compressed-tensors')}"
    write(
        name,
        tool,
        config | {"quant_method": "compressed-tensors", "ignore": ["lm_head"]},
        dict(module.state_dict()),
        results,
    )


def _calibrate(module: Any) -> None:
    """Set the scales and zero points of a compressed-tensors layer by its weight."""
    from compressed_tensors.quantization.utils import calculate_qparams

    weight, args = module.weight.data, module.quantization_scheme.weights
    if args.strategy == "group":
        parts, dims = weight.view(ROWS, -1, GROUP), (-1,)
    elif args.strategy == "block":
        rows, size = args.block_structure
        parts, dims = weight.view(ROWS // rows, rows, COLUMNS // size, size), (1, 3)
    else:
        parts, dims = weight, ((0, 1) if args.strategy == "tensor" else (1,))
    scale, zero = calculate_qparams(parts.amin(dims), parts.amax(dims), args)
    module.weight_scale.data = scale.view(module.weight_scale.shape)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data = zero.view(module.weight_scale.shape).to(module.weight_zero_point.dtype)
    if hasattr(module, "input_scale"):
        module.input_scale.data.fill_(0.02)


def bitsandbytes(name: str, kind: str, *, is_nested: bool) -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    source = layer(160, 128) if is_nested else layer()  # more than 256 scales
    packed, state = quantize_4bit(source.weight.data, blocksize=64, quant_type=kind, compress_statistics=is_nested)
    tensors = {"weight": packed} | {f"weight.{key}": each for key, each in state.as_dict(packed=True).items()}
    config = hf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=is_nested)
    tool = f"bitsandbytes {version('bitsandbytes')}"
    write(name, tool, config.to_dict(), tensors, {"expected_weight": dequantize_4bit(packed, state)})


def torchao(name: str, make: Callable[[], Any]) -> None:
    from torchao.quantization import quantize_

    model = nn.Sequential(layer())
    quantize_(model, make())
    weight: Any = model[0].weight
    tensors = {"_weight_qdata": weight.qdata, "_weight_scale": weight.scale}
    config = json.loads(hf.TorchAoConfig(make()).to_json_string())
    write(name, f"torchao {version('torchao')}", config, tensors, {"expected_weight": weight.dequantize()})


def finegrained(name: str) -> None:
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    rows, columns = 8, 16
    weight = layer().weight.data
    parts = weight.view(ROWS // rows, rows, COLUMNS // columns, columns)
    scale = parts.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    values = (parts / scale[:, None, :, None]).view(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    config = hf.FineGrainedFP8Config(weight_block_size=(rows, columns)).to_dict()
    expected = _dequantize_fp8_weight(values, scale, [rows, columns], torch.float32)
    tensors = {"weight": values, "weight_scale_inv": scale}
    write(name, f"transformers {hf.__version__}", config, tensors, {"expected_weight": expected})


def awq(name: str, package: Path) -> None:
    for module in ("awq", "awq.utils", "awq.modules", "awq.modules.linear"):
        sys.modules[module] = types.ModuleType(module)
        sys.modules[module].__path__ = [str(package.joinpath(*module.split(".")))]
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    source = layer(32, COLUMNS)
    parts = source.weight.data.view(32, -1, GROUP)
    scales = (parts.amax(-1) - parts.amin(-1)) / 15
    zeros = (-parts.amin(-1) / scales).round().clamp(0, 15)
    made = WQLinear_GEMM.from_linear(source.half(), 4, GROUP, scales=scales.t().half(), zeros=zeros.t())
    expected = dequantize_gemm(made.qweight, made.qzeros, made.scales.float(), 4, GROUP).t()
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    tensors = {"qweight": made.qweight, "qzeros": made.qzeros, "scales": made.scales}
    write(name, f"autoawq {version('autoawq')}", config, tensors, {"expected_weight": expected})


def gptq(name: str, package: Path, *, bits: int, is_reordered: bool) -> None:
    source = layer(32, COLUMNS)
    spec: Any = importlib.util.spec_from_file_location(
        "qlinear_cuda", package / "auto_gptq" / "nn_modules" / "qlinear" / "qlinear_cuda.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    groups = torch.arange(COLUMNS) // GROUP
    if is_reordered:
        groups = groups[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(7))]
    parts = source.weight.data[:, torch.argsort(groups, stable=True)].view(32, -1, GROUP)
    scales = ((parts.amax(-1) - parts.amin(-1)) / (2**bits - 1)).half()
    zeros = (-parts.amin(-1) / scales.float()).round().clamp(1, 2**bits - 1)
    made = module.QuantLinear(bits, GROUP, COLUMNS, 32, bias=False)
    made.pack(source, scales.float(), zeros, groups.to(torch.int32))
    expected = made(torch.eye(COLUMNS)).t()
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": is_reordered, "sym": False}
    tensors = {key: getattr(made, key) for key in ("qweight", "qzeros", "scales", "g_idx")}
    write(name, "auto-gptq 0.7.1", config, tensors, {"expected_weight": expected})


def main() -> None:
    packages = {name: Path(path) for name, path in (each.split("=") for each in sys.argv[1:])}
    channel = {"num_bits": 8, "symmetric": True, "strategy": "channel"}
    group = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    token = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
    compressed("compressed_fp8_dynamic", channel | {"type": "float"}, token | {"type": "float"})
    static = {"num_bits": 8, "symmetric": True, "strategy": "tensor", "type": "float"}
    compressed("compressed_fp8_static", static, static)
    compressed("compressed_int8", channel | {"type": "int"}, token | {"type": "int"})
    blocks = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [8, 16]}
    grouped = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": GROUP}
    compressed("compressed_fp8_block", blocks, grouped | {"dynamic": True})
    compressed("compressed_int4", group)
    compressed("compressed_int4_asymmetric", group | {"symmetric": False})
    bitsandbytes("bitsandbytes_nf4", "nf4", is_nested=False)
    bitsandbytes("bitsandbytes_nf4_nested", "nf4", is_nested=True)
    bitsandbytes("bitsandbytes_fp4", "fp4", is_nested=False)
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    torchao("torchao_int8", Int8WeightOnlyConfig)
    torchao("torchao_float8", Float8WeightOnlyConfig)
    finegrained("fp8_blocks")
    awq("awq", packages["awq"])
    gptq("gptq", packages["gptq"], bits=4, is_reordered=False)
    gptq("gptq_reordered", packages["gptq"], bits=4, is_reordered=True)
    gptq("gptq_8_bits", packages["gptq"], bits=8, is_reordered=True)


if __name__ == "__main__":
    main()
