"""The mode of a model that is measured: it is named beside each figure, and a degraded one is an error."""

from __future__ import annotations

from collections.abc import Mapping

import click
import torch

from quire.worker.model.paged_model import PagedModel

ALLOW_DEGRADED = click.Option(
    ["--allow-degraded"], is_flag=True, help="Measure also a model that runs slower than it could. Else it is an error."
)


class DegradedError(Exception):
    """Figures of this model would not be those of Quire; the message has the parts and the reasons."""


def check_modes(model: PagedModel, *, allow_degraded: bool) -> dict[str, str]:
    """Return how each part of the model's steps runs. Raises DegradedError if one is slower than it could be.

    The measured shapes are of kinds with a fused form for each module: on a GPU one that is not fused is an error, too.
    """
    reasons = [str(mode) for mode in model.modes.degraded()]
    if model.device.type == "cuda" and not reasons and (model.fusion is None or model.fusion.unmatched):
        reasons.append(f"modules: {model.fusion or 'not fused'}")
    if reasons and not allow_degraded:
        raise DegradedError("degraded: " + "; ".join(reasons))
    return {str(mode.part): str(mode).partition(": ")[2] for mode in model.modes.all()}


def check_parts(parts: Mapping[str, tuple[str, str]], *, device: str, allow_degraded: bool) -> dict[str, str]:
    """Do the same for a worker that has answered: by part how it runs, and the reason if it is degraded."""
    reasons = [f"{part}: {how} (degraded: {reason})" for part, (how, reason) in parts.items() if reason]
    modules, _ = parts.get("modules", ("", ""))
    if device.startswith("cuda") and not reasons and (not modules.startswith("fused (") or "not fused" in modules):
        reasons.append(f"modules: {modules or 'not known'}")
    if reasons and not allow_degraded:
        raise DegradedError("degraded: " + "; ".join(reasons))
    return {part: how + (f" (degraded: {reason})" if reason else "") for part, (how, reason) in parts.items()}


class CompilationCount:
    """Kernels that Triton has compiled in this process; none on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._compilations = None
        if device.type == "cuda":
            from quire.worker.device.compilations import Compilations  # imports Triton

            self._compilations = Compilations()
            self._compilations.watch()

    def __call__(self) -> int:
        return 0 if self._compilations is None else self._compilations.statistics().num_compiled
