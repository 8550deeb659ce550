"""Matrix products of few rows in Quire's own kernels, where a table says that they are faster, or everywhere they run.

With norm, gate and residual in the products a layer is 7 launches in a decode step of up to 8 rows, attention's two
among them, and 9 with up to 128 rows: then the two norms are launches of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.launching import device_limits
from quire.kernels.skinny_linear import SkinnyWorkspace, skinny_linear, takes
from quire.kernels.skinny_tiling import MAX_ROWS, Form, Tiling, default_tiling
from quire.worker.fusion.product_table import ROW_COUNTS, ProductKey, ProductKind, TableEntry
from quire.worker.fusion.projection import Projection

MOST_ROWS = max(MAX_ROWS.values())


class ProductChoice(Protocol):
    """Chooses for products that some form can run."""

    def tiling(self, kind: ProductKind, x: Tensor, weight: Tensor) -> Tiling | None:
        """The tiling to run in, or None for the library. x has 1 .. MOST_ROWS rows."""


class OwnEverywhere:
    """Own kernels wherever they run: gemv as long as it takes the rows, then dot. A norm in front is gemv's alone."""

    def tiling(self, kind: ProductKind, x: Tensor, weight: Tensor) -> Tiling | None:
        form: Form = "gemv" if x.shape[0] <= MAX_ROWS["gemv"] else "dot"
        if form == "dot" and kind.has_norm:
            return None
        num_outputs = weight.shape[0] // 2 if kind.is_gated else weight.shape[0]
        return _guess(form, kind.is_gated, x.shape[0], num_outputs, x.shape[1], x.dtype, x.device)


@lru_cache(maxsize=1024)
def _guess(
    form: Form,
    gated: bool,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tiling:
    return default_tiling(
        form,
        num_rows=num_rows,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        itemsize=dtype.itemsize,
        gated=gated,
        limits=device_limits(device),
    )


class OwnWhereMeasured:
    """Own kernels for the products of a table; it has those that a measurement found faster."""

    def __init__(self, table: Mapping[ProductKey, TableEntry]) -> None:
        """Raises ValueError, naming the product, if a tiling of the table has other fields than Tiling."""
        self._tilings = {key: _tiling(entry) for key, entry in table.items()}

    def tiling(self, kind: ProductKind, x: Tensor, weight: Tensor) -> Tiling | None:
        num_rows = next(count for count in ROW_COUNTS if count >= x.shape[0])
        num_outputs = weight.shape[0] // 2 if kind.is_gated else weight.shape[0]
        dtype = str(x.dtype).removeprefix("torch.")
        return self._tilings.get(ProductKey(kind, num_outputs, x.shape[1], dtype, num_rows))


def _tiling(entry: TableEntry) -> Tiling:
    try:
        return Tiling(**entry.tiling)
    except TypeError as error:
        raise ValueError(f"the tiling of product {entry.key} in the table of products: {error}") from error


class OwnProducts:
    """Runs the products of few rows that its choice does not leave to the library."""

    name = "own products"

    def __init__(self, choice: ProductChoice) -> None:
        self._choice = choice
        self._workspace: SkinnyWorkspace | None = None

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
        """The product of x [T, C], or None if it is the library's. See skinny_linear().

        An activation does not count in the choice. A residual [T, N] becomes the sum, in place.
        """
        weight = projection.weight
        if not 0 < x.shape[0] <= MOST_ROWS:
            return None
        tiling = self._choice.tiling(kind, x, weight)
        if tiling is None or not takes(x, weight, form=tiling.form):
            return None
        if tiling.split > 1 and self._workspace is None:
            # Kept from the first use on, which is before any capture: a graph of this size is captured after it ran.
            with torch.inference_mode(False):
                self._workspace = SkinnyWorkspace.allocate(x.device)
        return skinny_linear(
            x,
            weight,
            form=tiling.form,
            bias=projection.bias,
            norm_weight=norm_weight,
            eps=eps,
            residual=residual,
            gated=kind.is_gated,
            activation=activation,
            tiling=tiling,
            workspace=self._workspace,
            out=residual,
        )
