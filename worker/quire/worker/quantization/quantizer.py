"""Loading of a quantized checkpoint by transformers, with the layers of a scheme in place of linear ones.

transformers finds files, names and missing tensors as for any model. It asks the quantizer that is registered here
before it loads anything; the configuration names this one in place of the checkpoint's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import WeightRenaming
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer, get_keys_to_not_convert
from transformers.utils.quantization_config import QuantizationConfigMixin

from quire.worker.quantization.bitsandbytes import STATE
from quire.worker.quantization.formats import read_scheme
from quire.worker.quantization.kv_cache import hold_kv_scales
from quire.worker.quantization.quantized_linear import quantized_linears
from quire.worker.quantization.scheme import Scheme, UnsupportedFormat

METHOD = "quire"
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
    checkpoint = find_quantization(config)
    if checkpoint is None:
        return None
    scheme = read_scheme(checkpoint)
    config.quantization_config = {"quant_method": METHOD, "checkpoint": dict(checkpoint)}
    return scheme


def find_fault(model: Any) -> str | None:
    """Return the first quantized layer with tensors that can't be right, and the reason; None if there is none."""
    for name, linear in quantized_linears(model):
        fault = linear.find_fault()
        if fault is not None:
            return f"{name}.{fault}"
    return None


def find_unused_scale(names: Iterable[str]) -> str | None:
    """Return the first name of a checkpoint's tensor that scales a weight, of tensors that no module has taken.

    Its weight would be loaded without it: experts, which transformers merges, are no linear layers.
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
        hold_kv_scales(model, checkpoint_files or ())

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
