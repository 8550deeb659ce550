"""Steps with FlashInfer for prompts, with a stand-in that has its names and layouts, against torch's attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import model_zoo as zoo
import pytest
import stand_in_flashinfer
import torch
from kernels.test_attention_step import BATCHES, CAUSAL, make_case

from quire.worker.attention import flashinfer_attention
from quire.worker.attention.flashinfer_attention import FlashInferAttentionStep, pages_of, plan_ring, why_not
from quire.worker.attention.torch_attention import AttentionStep
from quire.worker.memory.layer_spec import Chunked, LayerSpec, Sliding
from quire.worker.model.preparing import prepare_model
from quire.worker.run.loading import pick_attention

pytestmark = pytest.mark.usefixtures("small_device")

WIDE = replace(CAUSAL, k_head_dim=64, v_head_dim=64, scaling=0.1)
SPECS = {
    "causal": WIDE,
    "sliding": replace(WIDE, mask=Sliding(9)),
    "softcap": replace(WIDE, softcap=1.5),
    "sliding with softcap, no groups": replace(WIDE, mask=Sliding(9), softcap=1.5, num_query_heads=2),
}


@pytest.fixture(autouse=True)
def flashinfer() -> Iterator[type[stand_in_flashinfer.BatchPrefillWithPagedKVCacheWrapper]]:
    plan_ring.cache_clear()
    with stand_in_flashinfer.installed() as wrapper:
        yield wrapper
    plan_ring.cache_clear()


@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("in_one_tensor", [True, False])
def test_batches(sequences: list[tuple[int, int]], in_one_tensor: bool, device: torch.device) -> None:
    expected = make_case(WIDE, sequences, device, in_one_tensor=in_one_tensor).run(AttentionStep)
    out = make_case(WIDE, sequences, device, in_one_tensor=in_one_tensor).run(FlashInferAttentionStep)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_layers(spec: LayerSpec, device: torch.device) -> None:
    expected = make_case(spec, BATCHES["all in between"], device).run(AttentionStep)
    out = make_case(spec, BATCHES["all in between"], device).run(FlashInferAttentionStep)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_layers_of_one_kind_are_planned_once_a_step(flashinfer: type, device: torch.device) -> None:
    case = make_case(WIDE, BATCHES["prompts"], device)
    step = FlashInferAttentionStep(case.batch, case.pool, specs={0: WIDE})
    step.write(0, case.k, case.v)
    for _ in range(3):
        step.attend(0, case.q, scaling=WIDE.scaling)
    assert flashinfer.num_plans == 1  # type: ignore[attr-defined]
    step.attend(0, case.q, scaling=0.2)
    assert flashinfer.num_plans == 2  # type: ignore[attr-defined]
    decodes = make_case(WIDE, BATCHES["decodes"], device)
    decodes.run(FlashInferAttentionStep)
    assert flashinfer.num_plans == 2  # type: ignore[attr-defined]


def test_plans_in_flight_have_wrappers_of_their_own(device: torch.device) -> None:
    case = make_case(WIDE, BATCHES["prompts"], device)
    wrappers = []
    for _ in range(flashinfer_attention.NUM_PLANS + 1):
        step = FlashInferAttentionStep(case.batch, case.pool, specs={0: WIDE})
        step.write(0, case.k, case.v)
        step.attend(0, case.q, scaling=WIDE.scaling)
        wrappers.extend(step._planned.values())
    assert len(set(map(id, wrappers[:-1]))) == flashinfer_attention.NUM_PLANS
    assert wrappers[-1] is wrappers[0]


def test_pages_are_the_filled_blocks_of_each_sequence() -> None:
    pages = pages_of([(5, 5), (3, 32), (2, 33)], block_size=16)
    assert pages.qo_indptr.tolist() == [0, 5, 8, 10]
    assert pages.kv_indptr.tolist() == [0, 1, 3, 6]
    assert pages.last_page_lens.tolist() == [5, 16, 1]
    assert pages.places(10).tolist() == [0, 10, 11, 20, 21, 22]


def test_what_it_cannot_run_is_refused_by_layer_and_reason() -> None:
    check = FlashInferAttentionStep.check
    check({0: WIDE, 1: SPECS["sliding"]}, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="it runs in float16 and bfloat16, and the model is in float32"):
        check({0: WIDE}, dtype=torch.float32)
    reasons = {
        "head dim 80 is not one of 64, 128, 256": replace(WIDE, k_head_dim=80, v_head_dim=80),
        "values of 128 beside keys of 64": replace(WIDE, v_head_dim=128),
        "Chunked(chunk=8) is neither causal nor a sliding window": replace(WIDE, mask=Chunked(8)),
        "it has attention sinks": replace(WIDE, has_sinks=True),
    }
    for reason, spec in reasons.items():
        assert why_not(spec) == reason
        with pytest.raises(ValueError, match="--attention flashinfer: layer 3 can't run in it: "):
            check({0: WIDE, 3: spec}, dtype=torch.float16)
    assert FlashInferAttentionStep.describe({0: WIDE}) == "flashinfer for prompts; for decodes triton in 1 of 1 layers"


def test_a_model_it_cannot_run_is_refused_before_it_runs() -> None:
    """The small models here have heads of 8."""
    model = zoo.build("llama").to(torch.bfloat16)
    with pytest.raises(ValueError, match="--attention flashinfer: layer 0 can't run in it: head dim 8 is not one of"):
        prepare_model(model.eval(), max_model_len=64, step_kind=FlashInferAttentionStep)


def test_it_is_picked_only_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    assert pick_attention("flashinfer", gpu, block_size=16) is FlashInferAttentionStep
    with pytest.raises(ValueError, match="--attention flashinfer: --block-size 48 is not one of"):
        pick_attention("flashinfer", gpu, block_size=48)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ValueError, match="it needs a GPU of NVIDIA"):
        pick_attention("flashinfer", gpu, block_size=16)
