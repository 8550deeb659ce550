"""Fused steps that add the updates of adapters to their products.

An update is added behind its product, and needs the product's own input. So in a step in which tokens may have adapters
a product has no norm, gate or activation in its kernel: these are launches of their own.
"""

from __future__ import annotations

from torch import Tensor

from quire.worker.fusion.activations import ACTIVATIONS, Activation
from quire.worker.fusion.projection import Projection, Rows
from quire.worker.fusion.steps import KernelSteps, Norm, as_tensor


class AdaptedSteps:
    """FusedSteps; see there. An update needs its input in the model's dtype, so no product is in float8.

    Layers with packed weights have their updates themselves.
    """

    max_float8_columns = 0
    takes_packed = False

    def __init__(self, steps: KernelSteps) -> None:
        self.name = f"{steps.name}, updates of adapters"
        self.min_block_size = steps.min_block_size
        self._steps = steps
        self.qkv_prologue = steps.qkv_prologue

    def add_rmsnorm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        return self._steps.add_rmsnorm(x, norm, residual)

    def input_of(self, projection: Projection, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Rows:
        return self._steps.input_of(projection, x, norm, residual)

    def linear(
        self, x: Rows, projection: Projection, norm: Norm | None = None, activation: Activation | None = None
    ) -> Tensor:
        if projection.updates is None or not projection.updates.is_active:
            return self._steps.linear(x, projection, norm, activation)
        result = self._updated(x, projection, norm)
        return result if activation is None else ACTIVATIONS[activation](result)

    def gated(self, x: Rows, gate_up: Projection, down: Projection, norm: Norm | None, activation: Activation) -> Rows:
        if gate_up.updates is None or not gate_up.updates.is_active:
            return self._steps.gated(x, gate_up, down, norm, activation)
        return self._steps.apply_gate(self._updated(x, gate_up, norm), activation)

    def add_linear(self, residual: Tensor, x: Rows, projection: Projection) -> Tensor | None:
        result = self._steps.add_linear(residual, x, projection)
        if projection.updates is not None and projection.updates.is_active:
            projection.updates.add_to(residual if result is None else result, as_tensor(x))
        return result

    def _updated(self, rows: Rows, projection: Projection, norm: Norm | None) -> Tensor:
        assert projection.updates is not None, "the caller has looked"
        x = as_tensor(rows)
        x = x if norm is None else self._steps.add_rmsnorm(x, norm)
        result = self._steps.linear(x, projection)
        projection.updates.add_to(result, x)
        return result
