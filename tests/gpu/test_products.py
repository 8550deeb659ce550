"""Products of few rows on a GPU: replays of a graph, again and again, have the bits of the first run."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.skinny_linear import SkinnyWorkspace, skinny_linear
from quire.kernels.skinny_tiling import MAX_ROWS, Form

NUM_REPLAYS = 200
# Outputs and inputs: of one program's tile, of split sums, and of more tiles than there are multiprocessors.
SIZES = [(64, 512), (1024, 3072), (4096, 14336)]


@pytest.mark.parametrize(("num_outputs", "num_inputs"), SIZES)
@pytest.mark.parametrize(
    ("form", "num_rows"), [("gemv", 1), ("gemv", 8), ("dot", 3), ("dot", 16), ("dot", 32), ("dot", 64), ("dot", 128)]
)
def test_replays_have_equal_bits_and_leave_no_ticket(
    form: Form, num_rows: int, num_outputs: int, num_inputs: int, device: torch.device
) -> None:
    assert num_rows <= MAX_ROWS[form]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, num_inputs, generator=generator).to(device, torch.bfloat16)
    weight = (torch.randn(num_outputs, num_inputs, generator=generator) * num_inputs**-0.5).to(device, torch.bfloat16)
    residual = torch.randn(num_rows, num_outputs, generator=generator).to(device, torch.bfloat16)
    workspace = SkinnyWorkspace.allocate(device)

    def run() -> torch.Tensor:
        return skinny_linear(x, weight, form=form, residual=residual, workspace=workspace)

    first = run()
    exact = x.double() @ weight.double().T + residual.double()
    assert (first.double() - exact).abs().max() <= 2e-2 * exact.abs().max()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        outs = [run() for _ in range(4)]
    for _ in range(NUM_REPLAYS):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, first) for out in outs)
        assert not workspace.tickets.any()
