"""Products with a weight of 8 bits and a scale for each row, without writing its dequantized form.

numbers, scale      [M, K] and [M, 1] or [1]: an input as InputRounding.quantize() gives it
weight              [N, K], int8 or float8_e4m3fn
weight_scale        [N, 1] or [1], float32
result              [M, N] of the scale's dtype
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_INTEGER_COLUMNS = 2**31 // 128**2
"""Columns of which the products' sum fits 32 bits."""
MAX_FEW_ROWS = 16
"""Rows up to which few_rows_product() is used. With N and K 4,096, 16 take 10 ms on an Intel Xeon with AMX, and 140 if
the weight is dequantized."""
FEW_ROWS_MULTIPLE = 32
"""K of few_rows_product() is a multiple of it: torch 2.13 reads behind the end of other rows."""
FLOAT8_MULTIPLE = 16
"""N and K of float8_product() are multiples of it."""


def integer_product(numbers: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Both in int8, on a CPU; sums are exact. K is at most MAX_INTEGER_COLUMNS."""
    sums = torch._int_mm(numbers, weight.t())
    return (sums.float() * (scale.float() * weight_scale.t())).to(scale.dtype)


def few_rows_product(rows: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """rows [M, K] in 16 bits, with a weight in int8 that has a scale for each row, on a CPU.

    The scales are rounded to 16 bits. K is a multiple of FEW_ROWS_MULTIPLE.
    """
    return torch._weight_int8pack_mm(rows, weight, weight_scale.flatten().to(rows.dtype))


def float8_product(numbers: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Both in e4m3 with a scale for each row. The result is bfloat16.

    N and K are multiples of FLOAT8_MULTIPLE. Raises RuntimeError on a device that has no such product.
    """
    column_scales = weight_scale.t().contiguous()
    return torch._scaled_mm(numbers, weight.t(), scale_a=scale.float(), scale_b=column_scales, out_dtype=torch.bfloat16)
