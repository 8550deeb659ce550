# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""Products x W^T of few rows with what stands beside them in a layer: norm in front, activation or residual behind.

A decode step's products read each weight once, so a few microseconds of a launch or of a slow start count. There are
two forms (skinny_tiling.py): gemv of up to 8 rows without matrix instructions, dot of up to 128 rows with them. In the
dot form several programs may share the sum of a tile. Each leaves its part in a workspace and takes a ticket. The last
one adds all parts in their order, so that the bits do not depend on who was last, and sets the ticket back to zero:
a graph can be replayed.

Weights and the norm's weight do not depend on the kernel in front. In the gemv form the first tile of the weight is
loaded before the wait for that kernel (dependent_launch.py). In the dot form copies begin behind it, as they take rows
and weights alike. So there, the weights of all tiles that the first copies are of are asked into the second-level cache
before the wait.

Numbers are rounded where the single operations round: the norm's result, the product with its bias, the gate and the
up, and the sum with the residual. Only the order of the additions within a product is another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.dependent_launch import dependent_options, prefetch, wait_for_earlier_kernels
from quire.kernels.launching import (
    FLOAT_DTYPES,
    Launch,
    Layout,
    ceil_div,
    contiguous,
    device_limits,
    dot,
    in_units,
    layouts,
    prepared_once,
    require_in,
    require_same_device,
    round_to,
)
from quire.kernels.product_parts import check_product, load_inputs, require_vector, write_out
from quire.kernels.skinny_tiling import (
    FORMS,
    LOAD_BYTES,
    MAX_ROWS,
    MOST_PARTS,
    MOST_STAGES,
    MOST_SUMS,
    SPLITS,
    Form,
    Tiling,
    default_tiling,
    padded_rows,
)

# What the second-level cache reads at once.
_LINE_BITS = tl.constexpr(8 * 128)

# Tiles of weights that the first copies are of: the most stages of a tiling.
_TILES_AHEAD = tl.constexpr(MOST_STAGES)

# Tiles of one product with a split sum.
_MAX_TICKETS = 4096


@triton.jit
def _load_once(pointers, k, num_inputs, EVEN: tl.constexpr):
    """The same of weights: they are read once a step, and leave the cache first."""
    if EVEN:
        return tl.load(pointers, eviction_policy="evict_first")
    return tl.load(pointers, mask=k < num_inputs, other=0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["num_rows", "num_outputs"])
def skinny_gemv_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]; with a gate [2 * N, K]
    bias_ptr,  # [N]; with a gate [2 * N]
    norm_ptr,  # [K]
    residual_ptr,  # [M, N]
    out_ptr,  # [M, N]
    num_rows,
    num_outputs,
    num_inputs,
    eps,
    stride_x,
    stride_residual,
    stride_out,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ONE_STEP: tl.constexpr,
    EVEN: tl.constexpr,
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    num_inputs = in_units(num_inputs, UNIT)
    stride_x = in_units(stride_x, UNIT)
    # All tiles have three dimensions, [ROWS, OUTPUTS, INPUTS], so that no operand has to move between threads.
    m = tl.arange(0, ROWS)[:, None, None]
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[None, :, None]
    k = tl.arange(0, INPUTS)[None, None, :]
    # Rows and outputs beyond the last one repeat it: they need no mask, and are not stored.
    weights = weight_ptr + tl.minimum(n, num_outputs - 1).to(tl.int64) * num_inputs + k
    ups = weights + num_outputs.to(tl.int64) * num_inputs
    weight = _load_once(weights, k, num_inputs, EVEN)
    up = weight
    if GATED:
        up = _load_once(ups, k, num_inputs, EVEN)
    if HAS_NORM:
        gain = load_inputs(norm_ptr + k, k, num_inputs, EVEN)
    wait_for_earlier_kernels(PDL)
    rows = x_ptr + tl.minimum(m, num_rows - 1) * stride_x.to(tl.int64) + k
    x = load_inputs(rows, k, num_inputs, EVEN).to(tl.float32)
    scale = 1.0
    if HAS_NORM:
        squares = x * x
        if not ONE_STEP:
            for start in tl.range(INPUTS, num_inputs, INPUTS, num_stages=1):
                later = load_inputs(rows + start, start + k, num_inputs, EVEN).to(tl.float32)
                squares += later * later
        scale = tl.rsqrt(tl.sum(squares, 2, keep_dims=True) / num_inputs + eps)
    if ONE_STEP:
        if HAS_NORM:
            x = _normed(x, scale, gain, x_ptr.dtype.element_ty)
        sums = x * weight.to(tl.float32)
        up_sums = sums
        if GATED:
            up_sums = x * up.to(tl.float32)
    else:
        sums = tl.zeros([ROWS, OUTPUTS, INPUTS], tl.float32)
        up_sums = sums
        for start in tl.range(0, num_inputs, INPUTS, num_stages=1):
            # The next tile is on its way while this one is added.
            following = start + INPUTS
            next_weight = _load_once(weights + following, following + k, num_inputs, False)
            next_up = next_weight
            if GATED:
                next_up = _load_once(ups + following, following + k, num_inputs, False)
            x = load_inputs(rows + start, start + k, num_inputs, EVEN).to(tl.float32)
            if HAS_NORM:
                gain = load_inputs(norm_ptr + start + k, start + k, num_inputs, EVEN)
                x = _normed(x, scale, gain, x_ptr.dtype.element_ty)
            sums += x * weight.to(tl.float32)
            if GATED:
                up_sums += x * up.to(tl.float32)
            weight = next_weight
            up = next_up
    total = tl.sum(sums, 2)
    up_total = total
    if GATED:
        up_total = tl.sum(up_sums, 2)
    m = tl.arange(0, ROWS)[:, None]
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    write_out(
        total, up_total, m, n, num_rows, num_outputs, bias_ptr, residual_ptr, out_ptr,
        stride_residual, stride_out, HAS_BIAS, HAS_RESIDUAL, GATED, ACTIVATION,
    )  # fmt: skip


@triton.jit
def _normed(x, scale, gain, DTYPE: tl.constexpr):
    """As add_rmsnorm rounds it, and then as the product reads it."""
    return round_to(x * scale * gain.to(tl.float32), DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "steps_per_part"])
def skinny_dot_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]; with a gate [2 * N, K]
    bias_ptr,  # [N]; with a gate [2 * N]
    residual_ptr,  # [M, N]
    out_ptr,  # [M, N]
    parts_ptr,  # [tiles, SPLIT, 1 or 2, ROWS, OUTPUTS] float32
    tickets_ptr,  # [tiles] int32, zero before and after
    num_rows,
    num_outputs,
    num_inputs,
    steps_per_part,
    stride_x,
    stride_residual,
    stride_out,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    num_inputs = in_units(num_inputs, UNIT)
    stride_x = in_units(stride_x, UNIT)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    m = tl.arange(0, ROWS)[:, None]
    n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, INPUTS)[None, :]
    first = part * steps_per_part * INPUTS
    last = tl.minimum(first + steps_per_part * INPUTS, num_inputs)
    weights = weight_ptr + tl.minimum(n, num_outputs - 1)[:, None].to(tl.int64) * num_inputs + k
    ups = weights + num_outputs.to(tl.int64) * num_inputs
    rows = x_ptr + tl.minimum(m, num_rows - 1) * stride_x.to(tl.int64) + k
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    up_total = total
    if PDL:
        line: tl.constexpr = _LINE_BITS // weight_ptr.dtype.element_ty.primitive_bitwidth
        lines = tl.arange(0, max(1, _TILES_AHEAD * INPUTS // line))[None, :] * line
        begins = weight_ptr + tl.minimum(n, num_outputs - 1)[:, None].to(tl.int64) * num_inputs
        ahead = tl.maximum(tl.minimum(first + lines, last - 1), 0)
        prefetch(begins + ahead)
        if GATED:
            prefetch(begins + num_outputs.to(tl.int64) * num_inputs + ahead)
    wait_for_earlier_kernels(PDL)
    for start in tl.range(first, last, INPUTS, num_stages=STAGES):
        x = load_inputs(rows + start, start + k, num_inputs, EVEN)
        total += dot(x, tl.trans(_load_once(weights + start, start + k, num_inputs, EVEN)))
        if GATED:
            up_total += dot(x, tl.trans(_load_once(ups + start, start + k, num_inputs, EVEN)))
    if SPLIT == 1:
        write_out(
            total, up_total, m, n[None, :], num_rows, num_outputs, bias_ptr, residual_ptr, out_ptr,
            stride_residual, stride_out, HAS_BIAS, HAS_RESIDUAL, GATED, ACTIVATION,
        )  # fmt: skip
    else:
        size: tl.constexpr = ROWS * OUTPUTS
        kinds: tl.constexpr = 2 if GATED else 1
        elements = m * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
        parts = parts_ptr + tile.to(tl.int64) * (SPLIT * kinds * size) + elements
        tl.store(parts + part * (kinds * size), total)
        if GATED:
            tl.store(parts + part * (kinds * size) + size, up_total)
        tl.debug_barrier()  # all of this part is written when its ticket is taken
        if tl.atomic_add(tickets_ptr + tile, 1, sem="acq_rel") == SPLIT - 1:
            total = tl.zeros([ROWS, OUTPUTS], tl.float32)
            up_total = total
            together: tl.constexpr = min(4, SPLIT)
            for group in tl.range(0, SPLIT, together, num_stages=1):
                for each in tl.static_range(together):
                    # Past the first cache, which could hold what lay there before.
                    source = parts + (group + each) * (kinds * size)
                    total += tl.load(source, cache_modifier=".cg")
                    if GATED:
                        up_total += tl.load(source + size, cache_modifier=".cg")
            tl.store(tickets_ptr + tile, 0)
            write_out(
                total, up_total, m, n[None, :], num_rows, num_outputs, bias_ptr, residual_ptr, out_ptr,
                stride_residual, stride_out, HAS_BIAS, HAS_RESIDUAL, GATED, ACTIVATION,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SkinnyWorkspace:
    """Memory for split sums, which the products of one stream share, one after the other.

    parts       [P]     float32
    tickets     [T]     int32, zero whenever no product runs
    """

    parts: Tensor
    tickets: Tensor

    @classmethod
    def allocate(cls, device: torch.device) -> SkinnyWorkspace:
        """Memory for every product that default_tiling() splits: 17 MB on an H200."""
        num_parts = device_limits(device).num_multiprocessors * MOST_PARTS * MOST_SUMS
        return cls(
            torch.empty(num_parts, dtype=torch.float32, device=device),
            torch.zeros(_MAX_TICKETS, dtype=torch.int32, device=device),
        )


def takes(x: Tensor | Layout, weight: Tensor | Layout, *, form: Form) -> bool:
    """True if the form can run a product of these rows and this weight: of one dtype, aligned, rows that it has.

    A row of the weight and of x has to be a multiple of 16 bytes long. With fewer no load would be whole.
    """
    return (
        0 < x.shape[0] <= MAX_ROWS[form]
        and x.dtype == weight.dtype
        and x.dtype in FLOAT_DTYPES
        and min(weight.shape) > 0
        and weight.shape[1] * weight.dtype.itemsize % LOAD_BYTES == 0
        and x.stride(0) * x.dtype.itemsize % LOAD_BYTES == 0
        and x.stride(-1) == 1
        and weight.is_contiguous()
    )


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    *,
    form: Form,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    gated: bool = False,
    activation: Activation | None = None,
    tiling: Tiling | None = None,
    workspace: SkinnyWorkspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return norm(x) weight^T + bias, or an activation of it, or silu(gate) * up; with a residual, their sum.

    Sizes: M rows, at most MAX_ROWS[form]; K inputs; N outputs.
        x               [M, K]  fp32/fp16/bf16, K contiguous, rows at any stride of a multiple of 16 bytes
        weight          [N, K]  dtype of x, contiguous, K * itemsize a multiple of 16; gated: [2 * N, K], gates first
        bias            [N]     fp32/fp16/bf16, contiguous; gated: [2 * N]
        norm_weight     [K]     fp32/fp16/bf16, contiguous: RMSNorm of the rows in front, gemv only
        residual        [M, N]  dtype of x, N contiguous; not together with gated or an activation
        activation              of ACTIVATIONS, of the result, gated of the gate: there None is silu
        tiling                  of the form; None chooses by sizes
        workspace               needed if the tiling splits sums
        out, returns    [M, N]  dtype of x, N contiguous; may be the residual. None allocates

    All arithmetic is float32, rounded where single operations round. Equal bits for equal arguments and tiling.
    Raises ValueError if a shape, stride, dtype, device or the activation is another, or a workspace is missing or too
    small. No sync.
    Cost: one launch; reads the weight once, and x once per program.
    """
    if activation is None and gated:
        activation = "silu"
    launch = _prepare(form, gated, activation, tiling, *layouts(x, weight, bias, norm_weight, residual, out))
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty(x.shape[0], num_outputs) if out is None else out
    optional = [x if each is None else each for each in (bias, norm_weight, residual)]
    if form == "gemv":
        skinny_gemv_kernel[launch.grid](
            x, weight, *optional, out, x.shape[0], num_outputs, weight.shape[1], float(eps),
            *launch.strides, **launch.options,
        )  # fmt: skip
        return out
    parts, tickets = _shared_memory(launch, workspace, out)
    steps_per_part, *strides = launch.strides
    skinny_dot_kernel[launch.grid](
        x, weight, optional[0], optional[2], out, parts, tickets, x.shape[0], num_outputs, weight.shape[1],
        steps_per_part, *strides, **launch.options,
    )  # fmt: skip
    return out


def _shared_memory(launch: Launch, workspace: SkinnyWorkspace | None, out: Tensor) -> tuple[Tensor, Tensor]:
    """The workspace's tensors; any where no sum is split."""
    tiles, split = launch.grid
    if split == 1:
        return out, out
    if workspace is None:
        raise ValueError(f"a sum in {split} parts needs a workspace")
    rows, outputs, gated = (int(launch.options[name]) for name in ("ROWS", "OUTPUTS", "GATED"))
    needed = tiles * split * rows * outputs * (1 + gated)
    for name, have, want in (
        ("parts", workspace.parts.shape[0], needed),
        ("tickets", workspace.tickets.shape[0], tiles),
    ):
        if have < want:
            raise ValueError(f"the workspace has {have} {name}, not {want}")
    return workspace.parts, workspace.tickets


@prepared_once
def _prepare(
    form: Form,
    gated: bool,
    activation: Activation | None,
    tiling: Tiling | None,
    x: Layout,
    weight: Layout,
    bias: Layout | None,
    norm: Layout | None,
    residual: Layout | None,
    out: Layout | None,
) -> Launch:
    require_in("form", form, FORMS)
    num_outputs = _check(form, gated, activation, x, weight, bias, norm, residual, out)
    num_rows, num_inputs = x.shape
    out = out or contiguous((num_rows, num_outputs), x)
    tiling = tiling or default_tiling(
        form,
        num_rows=num_rows,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        itemsize=x.dtype.itemsize,
        gated=gated,
        limits=device_limits(x.device),
    )
    if tiling.form != form:
        raise ValueError(f"the tiling is of form {tiling.form}, not {form}")
    strides = (x.stride(0), num_outputs if residual is None else residual.stride(0), out.stride(0))
    constants: dict[str, int | bool | str] = {
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "GATED": gated,
        "ACTIVATION": activation or "none",
        "ROWS": padded_rows(form, num_rows),
        "OUTPUTS": tiling.block_outputs,
        "INPUTS": tiling.block_inputs,
        "EVEN": num_inputs % tiling.block_inputs == 0,
        "UNIT": LOAD_BYTES // x.dtype.itemsize,
        "num_warps": tiling.num_warps,
        **dependent_options(skinny_gemv_kernel if form == "gemv" else skinny_dot_kernel, x.device),
    }
    tiles = ceil_div(num_outputs, tiling.block_outputs)
    if form == "gemv":
        constants |= {"HAS_NORM": norm is not None, "ONE_STEP": num_inputs <= tiling.block_inputs, "num_stages": 1}
        return Launch((tiles,), strides, constants)
    require_in("split", tiling.split, SPLITS)
    steps = ceil_div(num_inputs, tiling.block_inputs)
    constants |= {"SPLIT": tiling.split, "STAGES": tiling.num_stages, "num_stages": tiling.num_stages}
    return Launch((tiles, tiling.split), (ceil_div(steps, tiling.split), *strides), constants)


def _check(
    form: Form,
    gated: bool,
    activation: Activation | None,
    x: Layout,
    weight: Layout,
    bias: Layout | None,
    norm: Layout | None,
    residual: Layout | None,
    out: Layout | None,
) -> int:
    """Return the number of outputs."""
    num_outputs = check_product(gated, activation, x, weight, bias, residual, out)
    if not 0 < x.shape[0] <= MAX_ROWS[form]:
        raise ValueError(f"x has {x.shape[0]} rows, not 1 .. {MAX_ROWS[form]} as form {form} takes")
    if gated and weight.shape[0] % 2:
        raise ValueError(f"weight has {weight.shape[0]} rows, which are not as many gates as ups")
    if not takes(x, weight, form=form):
        strides = f"x has row stride {x.stride(0)}, weight {list(weight.shape)}"
        raise ValueError(f"{strides}: rows have to be multiples of {LOAD_BYTES} bytes, and not empty")
    if norm is None:
        return num_outputs
    require_vector("norm_weight", norm, x.shape[1])
    require_same_device(x=x, norm_weight=norm)
    if form == "dot":
        raise ValueError("norm_weight is taken by form gemv alone")
    return num_outputs
