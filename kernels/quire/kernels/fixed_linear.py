# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""Products x W^T in one tile shape: a row has the same bits alone and among any others.

A library chooses tiles, and parts of the sum, by the number of rows. Here a program has a tile of ROWS rows and some
outputs, and adds up all inputs in steps of one size. The tile depends on the weight's shape, its dtype and the GPU.
Rows beyond the last one repeat it. Tiles of rows with the same outputs run beside one another, so most of them read the
weight from the L2 cache.

Numbers are rounded where the single operations round, as in skinny_linear.py: the product with its bias, the gate and
the up, and the sum with the residual.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.dependent_launch import dependent_options, wait_for_earlier_kernels
from quire.kernels.launching import (
    DeviceLimits,
    Launch,
    Layout,
    Variant,
    ceil_div,
    contiguous,
    device_limits,
    dot,
    layouts,
    prepared_once,
)
from quire.kernels.product_parts import check_product, load_inputs, write_out

ROWS = 64
_STAGES = 4


def fixed_linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    activation: Activation | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return x weight^T + bias, or an activation of it, or silu(gate) * up; with a residual, their sum.

    Sizes: M rows, K inputs, N outputs.
        x               [M, K]  fp32/fp16/bf16, K contiguous
        weight          [N, K]  dtype of x, contiguous; gated: [2 * N, K], gates first
        bias            [N]     fp32/fp16/bf16, contiguous; gated: [2 * N]
        residual        [M, N]  dtype of x, N contiguous; not together with gated or an activation
        activation              of ACTIVATIONS, of the result, gated of the gate: there None is silu
        out, returns    [M, N]  dtype of x, N contiguous; may be the residual. None allocates

    All arithmetic is float32, rounded where single operations round. The bits of a row depend on this row, the weight,
    the bias and the GPU alone. Raises ValueError if a shape, stride, dtype, device or the activation is another.
    No sync. Cost: one launch; reads the weight once for each ROWS rows, mostly from the L2 cache.
    """
    if activation is None and gated:
        activation = "silu"
    launch = _prepare(gated, activation, *layouts(x, weight, bias, residual, out))
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty(x.shape[0], num_outputs) if out is None else out
    if x.shape[0] == 0:
        return out
    optional = [x if each is None else each for each in (bias, residual)]
    launch.run(fixed_linear_kernel, x, weight, *optional, out, x.shape[0], num_outputs, weight.shape[1])
    return out


@prepared_once
def _prepare(
    gated: bool,
    activation: Activation | None,
    x: Layout,
    weight: Layout,
    bias: Layout | None,
    residual: Layout | None,
    out: Layout | None,
) -> Launch:
    """The launch of fixed_linear_kernel; its grid is [tiles of rows, tiles of outputs]."""
    num_outputs = check_product(gated, activation, x, weight, bias, residual, out)
    if min(weight.shape) == 0 or (gated and weight.shape[0] % 2):
        raise ValueError(f"weight is {list(weight.shape)}: it is empty, or has not as many gates as ups")
    out = out or contiguous((x.shape[0], num_outputs), x)
    variant = choose_tile(
        num_outputs=num_outputs,
        num_inputs=x.shape[1],
        itemsize=x.dtype.itemsize,
        gated=gated,
        limits=device_limits(x.device),
    )
    options: dict[str, int | bool | str] = {
        **variant.options,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "GATED": gated,
        "ACTIVATION": activation or "none",
        **dependent_options(fixed_linear_kernel, x.device),
    }
    return Launch(
        grid=(ceil_div(x.shape[0], ROWS), ceil_div(num_outputs, variant.constants["OUTPUTS"])),
        strides=(x.stride(0), num_outputs if residual is None else residual.stride(0), out.stride(0)),
        options=options,
    )


def choose_tile(*, num_outputs: int, num_inputs: int, itemsize: int, gated: bool, limits: DeviceLimits) -> Variant:
    """Choose the tile by everything but the number of rows.

    64 outputs, or 32 where these give a program to more multiprocessors; half of them with a gate, which doubles the
    sums. As compiled, not timed.
    """
    outputs = 64 if ceil_div(num_outputs, 64) >= limits.num_multiprocessors else 32
    if gated or itemsize == 4:
        outputs = 32
    inputs = 128 // itemsize
    per_stage = (ROWS + outputs * (2 if gated else 1)) * inputs * itemsize
    constants: dict[str, int | bool] = {
        "ROWS": ROWS,
        "OUTPUTS": outputs,
        "INPUTS": inputs,
        "STAGES": _STAGES,
        "EVEN": num_inputs % inputs == 0,
    }
    assert per_stage * _STAGES <= limits.shared_memory_bytes
    return Variant(constants, num_warps=4, num_stages=_STAGES)


@triton.jit(do_not_specialize=["num_rows"])
def fixed_linear_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]; with a gate [2 * N, K]
    bias_ptr,  # [N]; with a gate [2 * N]
    residual_ptr,  # [M, N]
    out_ptr,  # [M, N]
    num_rows,
    num_outputs,
    num_inputs,
    stride_x,
    stride_residual,
    stride_out,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    # Programs that follow one another read the same part of the weight.
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, INPUTS)[None, :]
    weights = weight_ptr + tl.minimum(n, num_outputs - 1)[:, None].to(tl.int64) * num_inputs + k
    ups = weights + num_outputs.to(tl.int64) * num_inputs
    rows = x_ptr + tl.minimum(m, num_rows - 1).to(tl.int64) * stride_x + k
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    up_total = total
    wait_for_earlier_kernels(PDL)
    for start in tl.range(0, num_inputs, INPUTS, num_stages=STAGES):
        x = load_inputs(rows + start, start + k, num_inputs, EVEN)
        total += dot(x, tl.trans(load_inputs(weights + start, start + k, num_inputs, EVEN)))
        if GATED:
            up_total += dot(x, tl.trans(load_inputs(ups + start, start + k, num_inputs, EVEN)))
    write_out(
        total, up_total, m.to(tl.int64), n[None, :], num_rows, num_outputs, bias_ptr, residual_ptr, out_ptr,
        stride_residual, stride_out, HAS_BIAS, HAS_RESIDUAL, GATED, ACTIVATION,
    )  # fmt: skip
