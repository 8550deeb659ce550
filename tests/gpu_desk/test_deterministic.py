"""A deterministic worker on a fake GPU: what it launches, and what it refuses. test_fixed_model.py has its bits."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from gpu_desk.fake_device import FakeGPU
from gpu_desk.steps import make_config, make_executor, mixed_and_decode_steps, start
from model_zoo import save

from quire.worker.device.capture import CannotCapture
from quire.worker.model import preparing
from quire.worker.model.modes import Part
from quire.worker.run import graphs, pieces, prompt_graphs
from quire.worker.run.executor import Outcome
from quire.worker.run.loading import Loaded, load_warm
from quire.worker.sampling.parameters import SamplingParams
from quire.worker.unsupported_model import UnsupportedModel

NUM_LAYERS = 3
FORWARD = {"add_rmsnorm_kernel", "fixed_linear_kernel", "paged_prefill_kernel", "qkv_prologue_kernel"}
DRAW = Counter(["survey_kernel", "bracket_kernel", "collect_kernel", "choose_kernel"])
FILTERED = SamplingParams(temperature=0.7, top_p=0.9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def begin(folder: Path, family: str = "qwen3", **settings: Any) -> Loaded:
    return start(save(family, folder), dtype="bfloat16", deterministic=True, **settings)


def modes_of(loaded: Loaded) -> dict[Part, str]:
    return {mode.part: mode.how for mode in loaded.model.modes.all()}


def test_all_products_have_fixed_tiles_and_all_attention_one_kernel(folder: Path) -> None:
    with FakeGPU() as gpu:
        loaded = load_warm(make_config(save("qwen3", folder), dtype="bfloat16", deterministic=True))
        assert loaded.model.fingerprint.endswith(":deterministic")
        assert modes_of(loaded)[Part.ARITHMETIC] == "deterministic: kernels with fixed tiles"
        assert modes_of(loaded)[Part.SAMPLER] == "CUDA graphs of greedy steps"
        assert not loaded.model.modes.degraded()
        forwards = [seen.kernels for seen in gpu.captures if seen.kernels["paged_prefill_kernel"]]
        assert len(forwards) > 2
        for kernels in forwards:
            assert set(kernels) == FORWARD
            assert kernels["fixed_linear_kernel"] == 4 * NUM_LAYERS + 1, "the output layer is one, too"
        executor = make_executor(loaded)
        for params, drawn in ((SamplingParams(), Counter[str]()), (FILTERED, DRAW)):
            mixed, decodes = mixed_and_decode_steps(params)
            for step in chain(mixed, decodes):
                with gpu.watch() as seen:
                    assert executor.launch(step).result.outcome is Outcome.COMPUTED
                assert (seen.syncs, seen.pageable) == ([], [])
            assert seen.replays == (2 if drawn else 3)
            assert seen.kernels == drawn
            executor.begin_epoch()


def test_a_worker_without_the_flag_has_its_tiles_by_the_batch_again(folder: Path) -> None:
    with FakeGPU():
        begin(folder)
    with FakeGPU() as gpu:
        start(save("qwen3", folder), dtype="bfloat16")
        assert any(seen.kernels["paged_decode_kernel"] for seen in gpu.captures)


def refuse(*_: object) -> None:
    raise CannotCapture("replayed, its logits have other bits")


def test_graphs_with_other_bits_are_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "require_same_bits", refuse)
    monkeypatch.setattr(prompt_graphs, "require_same_bits", refuse)
    with FakeGPU():
        loaded = begin(folder, max_whole_graph_tokens=64)
        assert loaded.decode is not None
        assert (loaded.decode.pieces, loaded.prompts) == (None, None)
    monkeypatch.setattr(graphs, "require_same_bits", refuse)
    with FakeGPU():
        assert begin(folder).decode is None


def test_a_product_of_the_library_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "_fix_linears", lambda model: None)
    reason = "--deterministic: torch's linear adds up in an order that depends on the number of rows"
    with FakeGPU(), pytest.raises(UnsupportedModel, match=reason):
        begin(folder)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mixtral", "there are no kernels for its experts"),
        ("mamba2", "there are no kernels for it: "),
        ("falcon", "there are no kernels for it: "),
        ("odd_heads", "attention is triton in 0 of 3 layers; .*head dim 12 is not a multiple of 8"),
    ],
)
def test_a_model_without_kernels_is_refused(family: str, reason: str, folder: Path) -> None:
    with FakeGPU(), pytest.raises(UnsupportedModel, match=f"--deterministic: {reason}"):
        begin(folder, family)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"fuse": False}, "--no-fuse on a GPU: norms and products are in fused modules"),
        ({"attention": "torch"}, "--attention torch on a GPU: attention has to be in kernels"),
        ({"block_size": 8}, "--block-size 8 on a GPU: attention has to be in kernels"),
    ],
)
def test_a_flag_that_is_not_deterministic_is_refused(settings: dict[str, Any], reason: str, folder: Path) -> None:
    with FakeGPU(), pytest.raises(ValueError, match=f"--deterministic excludes {reason}"):
        begin(folder, **settings)
