"""Loading of a quantized checkpoint by transformers, with the layers of a scheme in place of linear ones.

transformers finds files, names and missing tensors as for any model. It asks the quantizer that is registered here
before it loads anything; the configuration names this one in place of the checkpoint's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer, get_keys_to_not_convert
from transformers.utils.quantization_config import QuantizationConfigMixin

from quire.worker.quantization.bitsandbytes import STATE
from quire.worker.quantization.experts import ExpertSizes, QuantizedExperts, expert_projections
from quire.worker.quantization.formats import read_scheme
from quire.worker.quantization.kv_cache import hold_kv_scales
from quire.worker.quantization.quantized_module import quantized_modules
from quire.worker.quantization.scheme import Scheme, UnsupportedFormat

METHOD = "quire"
_WEIGHT = ".weight"
_SCALE = re.compile(r"weight_scale|(scale_inv|scales|qzeros|absmax|SCB)$")


def find_quantization(config: Any) -> Mapping[str, Any] | None:
    """Return the quantization_config of a model's configuration; None if its weights are plain."""
    text_config = config.get_text_config(decoder=True)
    found = getattr(config, "quantization_config", None) or getattr(text_config, "quantization_config", None)
    return found if found is None or isinstance(found, Mapping) else found.to_dict()


def use_scheme(config: Any) -> Scheme | None:
    """Let transformers load a checkpoint with the layers of its scheme; None if its weights are plain.

    Changes the configuration. Raises UnsupportedFormat if the worker does not have the format.
    """
    _RequireAlike.faults.clear()
    checkpoint = find_quantization(config)
    if checkpoint is None:
        return None
    scheme = read_scheme(checkpoint)
    config.quantization_config = {"quant_method": METHOD, "checkpoint": dict(checkpoint)}
    return scheme


def find_fault(model: Any) -> str | None:
    """Return the first quantized module with tensors that can't be right, and the reason; None if there is none."""
    for name, module in quantized_modules(model):
        fault = module.find_fault()
        if fault is not None:
            return f"{name}.{fault}"
    return None


def find_unlike_experts() -> str | None:
    """Return a tensor that could not be merged in the last loading, because experts differ in theirs; None if none."""
    return min(_RequireAlike.faults, default=None)


def find_unused_scale(names: Iterable[str]) -> str | None:
    """Return the first name of a checkpoint's tensor that scales a weight, of tensors that no module has taken.

    Its weight would be loaded without it, as experts that transformers merges and a scheme leaves out.
    """
    return next((name for name in sorted(names) if _SCALE.search(name)), None)


@register_quantization_config(METHOD)
class _Config(QuantizationConfigMixin):
    """`checkpoint` is the checkpoint's own quantization_config."""

    def __init__(self, checkpoint: dict[str, Any], **_: Any) -> None:
        self.quant_method: Any = METHOD
        self.checkpoint = checkpoint


@register_quantizer(METHOD)
class _Quantizer(HfQuantizer):
    requires_calibration = True

    def __init__(self, quantization_config: _Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._scheme = read_scheme(quantization_config.checkpoint)

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        replace_linears(model, self._scheme)
        _replace_experts(model, self._scheme)
        hold_kv_scales(model, checkpoint_files or ())

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Let what merges the experts' weights into one tensor merge each buffer of the module in its place."""
        experts = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedExperts)}
        updated = []
        for conversion in weight_conversions:
            buffers = _buffers_of_target(conversion, experts) if isinstance(conversion, WeightConverter) else ()
            updated += [_for_buffer(conversion, each) for each in buffers] or [conversion]
        return updated + self.get_weight_conversions()

    def get_weight_conversions(self) -> list[WeightRenaming]:
        return [WeightRenaming(pattern, name) for pattern, name in self._scheme.renamed.items()]

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Convert floats of 16 bits and more, as for plain weights; the packed weight stays as the file has it."""
        is_packed = dtype is not None and (dtype.itemsize == 1 or not dtype.is_floating_point)
        return None if is_packed else super().get_new_dtype(converter, param, dtype)

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """True for tensors with a length that is known when they are loaded."""
        return param_name.endswith(STATE)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def _buffers_of_target(conversion: WeightConverter, experts: Mapping[str, QuantizedExperts]) -> Iterable[str]:
    """The buffers of the experts that a conversion makes the weights of; none if it makes others."""
    if not all(source.endswith(_WEIGHT) for source in conversion.source_patterns):
        return ()
    (target, *others) = conversion.target_patterns
    if others:
        return ()
    found = next((module for name, module in experts.items() if f".{name}".endswith(f".{target.lstrip('.')}")), None)
    return () if found is None else [name for name, _ in found.named_buffers()]


def _for_buffer(conversion: WeightConverter, buffer: str) -> Any:
    """The same conversion of another tensor of each layer."""
    sources = [f"{source.removesuffix(_WEIGHT)}.{buffer}" for source in conversion.source_patterns]
    targets = [f"{target}.{buffer}" for target in conversion.target_patterns]
    return conversion.copy(sources, targets, operations=[_RequireAlike(), *conversion.operations])


class _RequireAlike(ConversionOps):
    """Finds tensors of experts that can't be merged. transformers' own error has no name, so it is kept here."""

    faults: ClassVar[list[str]] = []

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, list[Tensor]]:
        counts = {len(tensors) for tensors in input_dict.values()}
        kinds = [{(tuple(tensor.shape), tensor.dtype) for tensor in tensors} for tensors in input_dict.values()]
        if len(counts) > 1 or any(len(each) > 1 for each in kinds):
            name = str(kwargs["full_layer_name"])
            self.faults.append(name)
            raise ValueError(name)
        return {  # a scalar has nothing along which it could be merged
            name: [tensor.reshape(tensor.shape or (1,)) for tensor in tensors] for name, tensors in input_dict.items()
        }


def _replace_experts(model: Any, scheme: Scheme) -> None:
    """Put the scheme's modules in place of tensors of all experts, without weights. Raises UnsupportedFormat."""
    kept = get_keys_to_not_convert(model)
    for path, experts, name in list(expert_projections(model)):
        layer = f"{path}.0.{name.replace('gate_up', 'gate')}"
        try:
            with torch.device("meta"):
                replacement = scheme.expert_replacement(layer, ExpertSizes.of(experts, name), kept)
        except ValueError as error:
            raise UnsupportedFormat(f"{scheme.name}: {path}.{name}: {error}") from error
        if replacement is not None:
            del experts._parameters[name]
            setattr(experts, name, replacement)


def replace_linears(model: Any, scheme: Scheme) -> None:
    """Put the scheme's layers in place of linear ones, without weights. Raises UnsupportedFormat."""
    kept = get_keys_to_not_convert(model)
    for name in [name for name, module in model.named_modules() if type(module) is nn.Linear]:
        try:
            with torch.device("meta"):
                replacement = scheme.replacement(name, model.get_submodule(name), kept)
        except ValueError as error:
            raise UnsupportedFormat(f"{scheme.name}: {name}: {error}") from error
        if replacement is not None:
            model.set_submodule(name, replacement)
