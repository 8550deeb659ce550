"""torchao's weights of 8 bits, as transformers saves them in safetensors: inputs are not quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.worker.quantization.scaled_linear import ScaledFormat, ScaledLinear
from quire.worker.quantization.scheme import Fields, Scheme

KINDS = {"Int8WeightOnlyConfig": torch.int8, "Float8WeightOnlyConfig": torch.float8_e4m3fn}
WHOLE_ROW = -1


def read_torchao(config: Mapping[str, Any]) -> Scheme:
    """Read the format `torchao`."""
    fields = Fields("torchao", config)
    fields.one_of("include_input_output_embeddings", (False,), False)
    kinds = fields.get("quant_type", {})
    if not isinstance(kinds, Mapping) or list(kinds) != ["default"]:
        raise fields.unsupported("quant_type", kinds, "one configuration for all layers")
    kind = Fields("torchao quant_type", kinds["default"])
    name = kind.one_of("_type", tuple(KINDS))
    data = Fields(f"torchao {name}", kind.get("_data", {}))
    data.one_of("group_size", (None,))
    granularity = data.get("granularity", {}).get("_data", {}).get("dim", WHOLE_ROW)
    if granularity != WHOLE_ROW:
        raise data.unsupported("granularity", granularity, "a scale for each row")
    form = ScaledFormat(f"torchao {name}", KINDS[name], weight="_weight_qdata", scale="_weight_scale")
    return Scheme(form.name, lambda _, linear: ScaledLinear(linear, form), fields.get("modules_to_not_convert"))
