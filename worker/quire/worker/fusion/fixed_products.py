"""Every product of a model in quire.kernels.fixed_linear: a token has the same bits in any step.

Fused layers run their products by KernelSteps, with FixedProducts. All other nn.Linear, the output layer among them,
get another forward. To be used with use_fixed_tiles(True) of quire.kernels.fixed_tiles, which attention follows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.kernels.fixed_linear import fixed_linear
from quire.worker.fusion.activations import Activation
from quire.worker.fusion.product_table import ProductKind
from quire.worker.fusion.projection import Projection
from quire.worker.unsupported_model import UnsupportedModel

NUM_TRIED = 3


class FixedProducts:
    """Runs all products but those with a norm in front: that is a launch of its own."""

    name = "fixed tiles"

    def run(
        self,
        kind: ProductKind,
        x: Tensor,
        projection: Projection,
        *,
        norm_weight: Tensor | None = None,
        eps: float = 1e-6,
        residual: Tensor | None = None,
        activation: Activation | None = None,
    ) -> Tensor | None:
        """Return the product of x [T, C], or None with a norm. A residual [T, N] becomes the sum, in place."""
        if norm_weight is not None:
            return None
        return fixed_linear(
            x,
            projection.weight,
            bias=projection.bias,
            residual=residual,
            gated=kind.is_gated,
            activation=activation,
            out=residual,
        )


def fix_linears(model: nn.Module) -> None:
    """Have each nn.Linear of a model compute in fixed_linear, in place of the library.

    Raises UnsupportedModel if one gives other results, rounding apart. Cost: two products of NUM_TRIED rows of each.
    """
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            _try(model, name, module)
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _try(model: nn.Module, name: str, linear: nn.Linear) -> None:
    weight = linear.weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_TRIED, linear.in_features, generator=generator).to(weight)
    expected, found = F.linear(x, weight, linear.bias), _forward(linear, x)
    error = 8 * torch.finfo(weight.dtype).eps
    if not torch.allclose(found, expected, rtol=error, atol=error * float(expected.abs().max())):
        raise UnsupportedModel(type(model).__name__, f"--deterministic: {name} gives other results in fixed tiles")


def _forward(linear: nn.Linear, x: Tensor, *_: Any) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return fixed_linear(rows, linear.weight, bias=linear.bias).view(*x.shape[:-1], linear.out_features)
