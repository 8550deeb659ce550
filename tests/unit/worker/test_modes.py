"""How the parts of a step run, and why one of them is slower than it could be."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import model_zoo as zoo
import pytest
import torch
from paged_run import MAX_LEN
from torch import Tensor

from quire.worker.attention.torch_attention import AttentionStep
from quire.worker.device.compilations import Compilations
from quire.worker.fusion.activations import Activation
from quire.worker.fusion.steps import Norm, TorchSteps
from quire.worker.model import preparing
from quire.worker.model.modes import Modes, Part
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.preparing import prepare_model
from quire.worker.run.loading import warn_of_degraded, watch_late_compilations
from quire.worker.service.step_gaps import BOUNDS_S, StepGaps
from quire.worker.unsupported_model import UnsupportedModel


class WrongInSteps(TorchSteps):
    """Right for the 16 tokens of a trial."""

    def add_rmsnorm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        result = super().add_rmsnorm(x, norm, residual)
        return result if x.shape[0] == 16 else result * 1.01


class BrokenSteps(TorchSteps):
    """Breaks off in each trial of an MLP."""

    def apply_gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        raise RuntimeError("no kernel image")


def degraded_parts(model: PagedModel) -> dict[Part, str]:
    return {mode.part: mode.degraded for mode in model.modes.degraded()}


def test_a_model_that_runs_as_it_should_is_not_degraded() -> None:
    fused = prepare_model(zoo.build("llama"), max_model_len=MAX_LEN, fused_steps=TorchSteps())
    assert degraded_parts(fused) == {}
    assert str(fused.modes.all()[0]).startswith("modules: fused (torch): norm 7 of 7")
    as_it_is = prepare_model(zoo.build("llama"), max_model_len=MAX_LEN)
    assert [str(mode) for mode in as_it_is.modes.all()] == ["modules: the model's own"]


def test_a_kind_of_module_without_a_fused_form_is_not_degraded() -> None:
    assert degraded_parts(prepare_model(zoo.build("gpt2"), max_model_len=MAX_LEN, fused_steps=TorchSteps())) == {}


def test_fused_modules_that_fail_the_self_check_are() -> None:
    model = prepare_model(zoo.build("llama"), max_model_len=MAX_LEN, fused_steps=WrongInSteps())
    (reason,) = degraded_parts(model).values()
    assert reason.startswith("fused, its logits over a block pool")


def test_a_trial_that_breaks_off_is() -> None:
    model = prepare_model(zoo.build("llama"), max_model_len=MAX_LEN, fused_steps=BrokenSteps())
    assert degraded_parts(model) == {Part.MODULES: "its trial failed with RuntimeError: no kernel image"}


def test_latents_that_fail_the_self_check_are(monkeypatch: pytest.MonkeyPatch) -> None:
    check = preparing._check_against_own_attention

    def refuse_latents(paged: PagedModel) -> None:
        if paged.fingerprint.endswith(":latent"):
            raise UnsupportedModel(paged.architecture, "its latents differ")
        check(paged)

    monkeypatch.setattr(preparing, "_check_against_own_attention", refuse_latents)
    model = prepare_model(zoo.build("deepseek_v3"), max_model_len=MAX_LEN)
    assert degraded_parts(model) == {Part.CACHE: "its latents differ"}


def test_experts_without_their_product_are_degraded_on_a_gpu_alone() -> None:
    model = prepare_model(zoo.build("mixtral"), max_model_len=MAX_LEN)
    assert Part.EXPERTS in {mode.part for mode in model.modes.all()}
    assert degraded_parts(model) == {}


@pytest.mark.parametrize(
    ("device", "is_chosen", "is_degraded"), [("cuda", False, True), ("cuda", True, False), ("cpu", False, False)]
)
def test_attention_in_torch_is_degraded_on_a_gpu_unless_it_was_chosen(
    device: str, is_chosen: bool, is_degraded: bool
) -> None:
    model: Any = SimpleNamespace(
        describe_attention=lambda: "torch",
        step_kind=AttentionStep,
        attention_specs={},
        device=torch.device(device),
        modes=Modes(),
    )
    PagedModel.note_attention(model, is_chosen=is_chosen)
    assert bool(model.modes.degraded()) is is_degraded


def test_degraded_parts_are_one_line_of_the_log_and_others_none(caplog: pytest.LogCaptureFixture) -> None:
    modes = Modes()
    modes.note(Part.PROMPTS, "without CUDA graphs", degraded="out of memory")
    modes.note(Part.MODULES, "fused")
    modes.note(Part.DECODE, "CUDA graphs")
    with caplog.at_level(logging.WARNING):
        warn_of_degraded(modes)
        modes.note(Part.PROMPTS, "CUDA graphs")
        warn_of_degraded(modes)
    (line,) = caplog.messages
    assert line.startswith("DEGRADED: ")
    assert line.endswith(": prompts: without CUDA graphs (degraded: out of memory)")


def test_a_compilation_after_the_warm_up_is_degraded() -> None:
    modes, compilations = Modes(), Compilations()
    times = SimpleNamespace(total=2e6)
    compilations._note(src=SimpleNamespace(name="early"), times=times, cache_hit=False)
    watch_late_compilations(compilations, modes)
    assert modes.degraded() == []
    for name in ("first", "second"):
        compilations._note(src=SimpleNamespace(name=name), times=times, cache_hit=False)
    (mode,) = modes.degraded()
    assert (mode.part, mode.degraded) == (Part.KERNELS, "2 after the warm-up, the last is second")
    assert mode.how.startswith("3 compiled in 6.0 s")


def test_gaps_are_counted_in_the_first_bucket_that_has_room() -> None:
    gaps = StepGaps()
    for gap_s in (0.0, 1e-5, 1.5e-5, 0.4, 1.0, 1.01, 60.0):
        gaps.add(gap_s)
    buckets = dict(gaps.buckets())
    assert (buckets["1e-05"], buckets["2e-05"], buckets["0.2"], buckets["0.5"], buckets["1.0"]) == (2, 3, 3, 4, 5)
    assert buckets["+Inf"] == 7
    assert gaps.sum_s == pytest.approx(62.410025)
    assert len(buckets) == len(BOUNDS_S) + 1
