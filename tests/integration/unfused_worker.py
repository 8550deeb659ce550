"""The worker, with fused modules that are right in their trials and wrong in steps; test_modes.py runs it."""

from __future__ import annotations

from quire.worker.__main__ import main  # sets what torch must find in the environment

# isort: split
from torch import Tensor

from quire.worker.fusion.steps import Norm, TorchSteps

TRIAL_TOKENS = 16

add_rmsnorm = TorchSteps.add_rmsnorm


def wrong_in_steps(steps: TorchSteps, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
    result = add_rmsnorm(steps, x, norm, residual)
    return result if x.shape[0] == TRIAL_TOKENS else result * 1.01


if __name__ == "__main__":
    TorchSteps.add_rmsnorm = wrong_in_steps  # type: ignore[method-assign]
    main()
