"""The formats of quantized checkpoints that the worker has, by the quant_method of their configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.worker.quantization.awq import read_awq
from quire.worker.quantization.bitsandbytes import read_bitsandbytes
from quire.worker.quantization.compressed_tensors import read_compressed_tensors
from quire.worker.quantization.float8 import read_fbgemm, read_finegrained
from quire.worker.quantization.gptq import read_gptq
from quire.worker.quantization.mxfp4 import read_mxfp4
from quire.worker.quantization.scheme import Scheme, UnsupportedFormat
from quire.worker.quantization.torchao import read_torchao

READERS: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed_tensors,
    "fbgemm_fp8": read_fbgemm,
    "fp8": read_finegrained,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
    "torchao": read_torchao,
}


def read_scheme(config: Mapping[str, Any]) -> Scheme:
    """Read a checkpoint's quantization_config.

    Raises UnsupportedFormat, which names the format and the field, if the worker does not have it.
    """
    method = str(config.get("quant_method"))
    reader = READERS.get(method)
    if reader is None:
        raise UnsupportedFormat(f"{method} is not one of {', '.join(READERS)}")
    return reader(config)
