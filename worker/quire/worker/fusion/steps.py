"""The small steps between a fused model's matrix products, behind one interface: in Triton, or in torch.

TorchSteps runs on any device and is the same formulas in a few more launches; KernelSteps needs a GPU or Triton's
interpreter. Both compute in float32 and round once, at the end.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.worker.attention.torch_attention import Slots, write_kv
from quire.worker.fusion.activations import ACTIVATIONS, Activation
from quire.worker.fusion.product_table import ProductKind, read_table
from quire.worker.fusion.projection import Projection, Rows
from quire.worker.quantization.products import float8_product

if TYPE_CHECKING:  # it imports Triton
    from quire.worker.fusion.fixed_products import FixedProducts
    from quire.worker.fusion.products import OwnProducts

ProductSource = Literal["auto", "own", "library"]

# A product without and with a norm in front.
_PLAIN = ProductKind.PLAIN, ProductKind.NORM
_GATED = ProductKind.GATED, ProductKind.NORM_GATED

# As in quire.kernels.launching, which only a process with Triton can import.
KERNEL_BLOCK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm of rows: x / sqrt(mean(x^2) + eps) * weight. The weight [C] is float32 where it is stored as 1 + w."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Rope:
    """The dims of a head that are rotated, and their angles: see qkv_prologue() in quire.kernels.

    table           [P, R]  float32, of make_rope_table()
    interleaved             pairs are dims 2i and 2i + 1 instead of i and i + R / 2
    """

    table: Tensor
    interleaved: bool


class FusedSteps(Protocol):
    """Sizes: T tokens, C columns, I intermediate size, Hq query and H kv heads, D head dim."""

    name: str
    min_block_size: int
    """The least block size of a pool for it."""
    max_float8_columns: int
    """Most columns of a weight in float8 of which it runs the product; 0: it runs none."""
    takes_packed: bool
    """True if it runs products with packed weights."""

    def add_rmsnorm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        """x [T, C] is added to the residual [T, C], in place, if there is one; returns the norm of the sum."""

    def input_of(self, projection: Projection, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Rows:
        """The same as the product with a projection takes it, which alone reads the norm."""

    def linear(
        self, x: Rows, projection: Projection, norm: Norm | None = None, activation: Activation | None = None
    ) -> Tensor:
        """The product [T, N] of x [T, C], or of its norm, with a weight [N, C], and the bias; or its activation."""

    def gated(self, x: Rows, gate_up: Projection, down: Projection, norm: Norm | None, activation: Activation) -> Rows:
        """activation(gate) * up, [T, I], of such a product [T, 2 * I]: all of gate, then all of up.

        As the product with `down` takes it, which alone reads it.
        """

    def add_linear(self, residual: Tensor, x: Rows, projection: Projection) -> Tensor | None:
        """Add the product to the residual [T, N], in place, and return None; or return it, for the next norm to add."""

    def qkv_prologue(
        self,
        qkv: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        *,
        slot_mapping: Tensor,
        positions: Tensor,
        rope: Rope | None,
        norms: tuple[Norm, Norm] | None,
        kv_scales: Tensor | None,
    ) -> Tensor:
        """Norm of each head of queries and keys, rope, keys and values to their slots; returns queries [T, Hq, D].

        qkv             [T, (Hq + 2 * H) * D]
        k_pool, v_pool  [B, S, H, D]
        slot_mapping    [T]     int64       positions   [T]     int64
        norms           of queries and of keys, each over D, with one eps
        kv_scales       [2, H]  float32, of keys and values in a pool in float8, or None
        """


class LibraryProducts(ABC):
    """Matrix products by the library of the device, each in a launch of its own."""

    @abstractmethod
    def add_rmsnorm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        """See FusedSteps.add_rmsnorm."""

    @abstractmethod
    def apply_gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up, [T, I], of [T, 2 * I]: all of gate, then all of up."""

    def input_of(self, projection: Projection, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Rows:
        return self.add_rmsnorm(x, norm, residual)

    def linear(
        self, x: Rows, projection: Projection, norm: Norm | None = None, activation: Activation | None = None
    ) -> Tensor:
        if norm is not None:
            x = self.input_of(projection, as_tensor(x), norm)
        result = self.multiply(x, projection)
        return result if activation is None else ACTIVATIONS[activation](result)

    def multiply(self, x: Rows, projection: Projection) -> Tensor:
        """The product, and the bias."""
        return F.linear(as_tensor(x), projection.weight, projection.bias)

    def gated(self, x: Rows, gate_up: Projection, down: Projection, norm: Norm | None, activation: Activation) -> Rows:
        return self.apply_gate(self.linear(x, gate_up, norm), activation)

    def add_linear(self, residual: Tensor, x: Rows, projection: Projection) -> Tensor | None:
        return self.linear(x, projection)


def as_tensor(x: Rows) -> Tensor:
    """The rows of a product that is not in float8."""
    assert isinstance(x, Tensor), "rows in float8 are for a product in float8"
    return x


class TorchSteps(LibraryProducts):
    """The fused steps in torch, for devices without Triton."""

    name = "torch"
    min_block_size = 1
    max_float8_columns = 0
    takes_packed = False

    def add_rmsnorm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        return _rmsnorm(x if residual is None else residual.add_(x), norm)

    def apply_gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return ACTIVATIONS[activation](gate).mul_(up)

    def qkv_prologue(
        self,
        qkv: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        *,
        slot_mapping: Tensor,
        positions: Tensor,
        rope: Rope | None,
        norms: tuple[Norm, Norm] | None,
        kv_scales: Tensor | None,
    ) -> Tensor:
        num_kv_heads, head_dim = k_pool.shape[2:]
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        num_query_heads = heads.shape[1] - 2 * num_kv_heads
        v = heads[:, num_query_heads + num_kv_heads :]
        qk = heads[:, : num_query_heads + num_kv_heads]
        if norms is not None:
            parts = qk[:, :num_query_heads], qk[:, num_query_heads:]
            qk = torch.cat([_rmsnorm(part, norm) for part, norm in zip(parts, norms, strict=True)], dim=1)
        if rope is not None:
            qk = _rotate(qk, rope, positions)
        slots = Slots(slot_mapping, k_pool.shape[1])
        write_kv(qk[:, num_query_heads:], v, k_pool, v_pool, slots=slots, scales=kv_scales)
        return qk[:, :num_query_heads]


class KernelSteps(LibraryProducts):
    """The fused steps in Triton. Raises ValueError for heads or a block size that quire.kernels does not take."""

    min_block_size = KERNEL_BLOCK_SIZES[0]
    takes_packed = True

    def __init__(self, products: OwnProducts | FixedProducts | None = None) -> None:
        """products: those that run in kernels of our own; None for none."""
        # Here and not above: TRITON_INTERPRET is read when triton is imported, and a CPU needs no Triton.
        from quire.kernels.add_rmsnorm import add_rmsnorm, add_rmsnorm_float8
        from quire.kernels.float8_rows import MAX_COLUMNS, float8_rows
        from quire.kernels.qkv_prologue import qkv_prologue
        from quire.kernels.silu_mul import silu_mul, silu_mul_float8

        self.name = "kernels" if products is None else f"kernels, {products.name}"
        self._add_rmsnorm = add_rmsnorm
        self._add_rmsnorm_float8 = add_rmsnorm_float8
        self._float8_rows = float8_rows
        self.max_float8_columns = MAX_COLUMNS
        self._qkv_prologue = qkv_prologue
        self._silu_mul = silu_mul
        self._silu_mul_float8 = silu_mul_float8
        self._products = products

    def linear(
        self, x: Rows, projection: Projection, norm: Norm | None = None, activation: Activation | None = None
    ) -> Tensor:
        if not projection.is_plain:
            return super().linear(x, projection, norm, activation)
        done, x, norm = self._own(as_tensor(x), projection, norm, activation, _PLAIN)
        return super().linear(x, projection, norm, activation) if done is None else done

    def multiply(self, x: Rows, projection: Projection) -> Tensor:
        if projection.packed:
            return _multiply_packed(as_tensor(x), projection)
        if projection.weight_scale is None:
            return super().multiply(x, projection)
        numbers, scale = self._float8_rows(x) if isinstance(x, Tensor) else x
        result = float8_product(numbers, scale, projection.weight, projection.weight_scale)
        return result if projection.bias is None else result.add_(projection.bias)

    def gated(self, x: Rows, gate_up: Projection, down: Projection, norm: Norm | None, activation: Activation) -> Rows:
        if gate_up.is_plain:
            done, x, norm = self._own(as_tensor(x), gate_up, norm, activation, _GATED)
            if done is not None:
                return done
        product = super().linear(x, gate_up, norm)
        if down.weight_scale is None:
            return self.apply_gate(product, activation)
        return self._silu_mul_float8(*product.chunk(2, -1), activation=activation)

    def _own(
        self,
        x: Tensor,
        projection: Projection,
        norm: Norm | None,
        activation: Activation | None,
        kinds: tuple[ProductKind, ProductKind],
    ) -> tuple[Tensor | None, Tensor, Norm | None]:
        """The product in a kernel of our own, with the norm in it or behind it; or None, and what is left to do."""
        if self._products is None:
            return None, x, norm
        kind, kind_with_norm = kinds
        if norm is not None:
            weight, eps = norm.weight, norm.eps
            done = self._products.run(kind_with_norm, x, projection, norm_weight=weight, eps=eps, activation=activation)
            if done is not None:
                return done, x, None
            x = self.add_rmsnorm(x, norm)
        return self._products.run(kind, x, projection, activation=activation), x, None

    def add_linear(self, residual: Tensor, x: Rows, projection: Projection) -> Tensor | None:
        if self._products is not None and projection.is_plain:
            x = as_tensor(x)
            if self._products.run(ProductKind.RESIDUAL, x, projection, residual=residual) is not None:
                return None
        return self.linear(x, projection)

    def add_rmsnorm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        return self._add_rmsnorm(x, norm.weight, eps=norm.eps, residual=residual)

    def input_of(self, projection: Projection, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Rows:
        if projection.weight_scale is None:
            return self.add_rmsnorm(x, norm, residual)
        return self._add_rmsnorm_float8(x, norm.weight, eps=norm.eps, residual=residual)

    def apply_gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return self._silu_mul(*gate_up.chunk(2, -1), activation=activation)

    def qkv_prologue(
        self,
        qkv: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        *,
        slot_mapping: Tensor,
        positions: Tensor,
        rope: Rope | None,
        norms: tuple[Norm, Norm] | None,
        kv_scales: Tensor | None,
    ) -> Tensor:
        return self._qkv_prologue(
            qkv,
            k_pool,
            v_pool,
            slot_mapping=slot_mapping,
            positions=positions,
            rope_table=None if rope is None else rope.table,
            interleaved=rope is not None and rope.interleaved,
            q_norm_weight=None if norms is None else norms[0].weight,
            k_norm_weight=None if norms is None else norms[1].weight,
            eps=1e-6 if norms is None else norms[0].eps,
            kv_scales=kv_scales,
        )


def _multiply_packed(x: Tensor, projection: Projection) -> Tensor:
    """Return the products of x [T, C] with each packed weight side by side, [T, N]."""
    if len(projection.packed) == 1:
        return projection.packed[0](x)  # type: ignore[no-any-return]
    result = x.new_empty(len(x), projection.weight.shape[0])
    parts = torch.split(result, [linear.out_features for linear in projection.packed], 1)
    for linear, part in zip(projection.packed, parts, strict=True):
        linear.multiply_into(part, x)
    return result


def choose_steps(
    device: torch.device, *, block_size: int, wanted: bool | None, products: ProductSource = "auto"
) -> FusedSteps | None:
    """The steps to fuse a model with, on this device and a pool of this block size; None if it is not to be fused.

    Kernels where Triton compiles or is interpreted, if they take the block size; elsewhere torch. wanted None:
    kernels or nothing. products: own ones where the table of products has this GPU's ("auto"), wherever they run, or
    never. Raises ValueError if that table is malformed.
    """
    has_triton = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    kernels = has_triton and block_size in KERNEL_BLOCK_SIZES
    if not (kernels if wanted is None else wanted):
        return None
    return _kernel_steps(device, products) if kernels else TorchSteps()


def fixed_steps() -> KernelSteps:
    """The steps of a deterministic model: kernels, with products of one tile shape. Needs Triton."""
    from quire.worker.fusion.fixed_products import FixedProducts

    return KernelSteps(FixedProducts())


def _kernel_steps(device: torch.device, products: ProductSource) -> KernelSteps:
    table = read_table(torch.cuda.get_device_name(device)) if products == "auto" and device.type == "cuda" else {}
    if products != "own" and not table:
        return KernelSteps()
    from quire.worker.fusion.products import OwnEverywhere, OwnProducts, OwnWhereMeasured

    return KernelSteps(OwnProducts(OwnEverywhere() if products == "own" else OwnWhereMeasured(table)))


def _rmsnorm(x: Tensor, norm: Norm) -> Tensor:
    if norm.weight.dtype == x.dtype:
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
    return F.rms_norm(x.float(), norm.weight.shape, norm.weight.float(), norm.eps).to(x.dtype)


def _rotate(x: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    """x [T, H, D] with its first R dims rotated."""
    rotary_dim = rope.table.shape[1]
    cos, sin = rope.table.index_select(0, positions)[:, None].chunk(2, -1)
    rotated = x[..., :rotary_dim].float()
    if rope.interleaved:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, -1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pair, -1).flatten(-2) if rope.interleaved else torch.cat(pair, -1)
    if rotary_dim < x.shape[2]:
        turned = torch.cat([turned, x[..., rotary_dim:]], -1)  # promotes to float32
    return turned.to(x.dtype)
