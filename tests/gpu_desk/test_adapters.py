"""A worker with adapters on the fake device: its graphs have their updates, and a load captures nothing anew."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from gpu_desk.fake_device import FakeGPU, Seen
from gpu_desk.steps import make_config, make_executor, mixed_and_decode_steps, start, take_adapter
from model_zoo import save
from samples import others_at_night

from quire.worker.adapters.adapted_model import PreparedAdapter
from quire.worker.adapters.slotted_model import SlottedModel
from quire.worker.run.executor import Outcome
from quire.worker.run.loading import Loaded, why_no_adapters
from quire.worker.sampling.parameters import SamplingParams

NUM_LAYERS = 3
BOTH = {"lora_shrink_kernel", "lora_expand_kernel"}
IDENTITY = b"x" * 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def slotted(loaded: Loaded) -> SlottedModel:
    assert isinstance(loaded.model.adapters, SlottedModel)
    return loaded.model.adapters


def put(loaded: Loaded, identity: bytes = IDENTITY) -> None:
    """Add an adapter of all layers, as if it had been read: fake tensors have no content to hash."""
    model = slotted(loaded)
    model.add(PreparedAdapter("x", identity, model._trial.weights))


def run(gpu: FakeGPU, loaded: Loaded, *, adapted: bool = True) -> list[Seen]:
    """Launch mixed steps and decode steps; what the last one of each did."""
    both, found = mixed_and_decode_steps(SamplingParams(), num_groups=len(loaded.pool.groups)), []
    executor = make_executor(loaded)
    for steps in both:
        if adapted:
            take_adapter(steps, IDENTITY)
        for step in steps:
            with gpu.watch() as seen:
                assert executor.launch(step).result.outcome is Outcome.COMPUTED
        assert (seen.syncs, seen.pageable) == ([], [])
        found.append(seen)
    executor.begin_epoch()
    return found


@pytest.mark.parametrize("how", others_at_night(["parts", "one", "no graphs", "unfused"], ["parts"]))
def test_steps_with_adapters_launch_as_many_graphs_as_others(how: str, folder: Path) -> None:
    settings: dict[str, Any] = {
        "parts": {},
        "one": {"step_graph": "one"},
        "no graphs": {"cuda_graphs": False},
        "unfused": {"fuse": False},
    }[how]
    with FakeGPU() as gpu:
        loaded = start(
            save("qwen3", folder), dtype="bfloat16", enable_lora=True, max_lora_rank=16, max_graph_tokens=64, **settings
        )
        put(loaded)
        if how == "no graphs":
            for seen in run(gpu, loaded):
                assert {seen.kernels[name] for name in BOTH} == {4 * NUM_LAYERS}, "QKV, O, gate and up, down"
            assert not any(BOTH & seen.kernels.keys() for seen in run(gpu, loaded, adapted=False))
            return
        num_products = {"unfused": 7}.get(how, 4) * NUM_LAYERS
        forwards = [seen for seen in gpu.captures if seen.kernels["paged_decode_kernel"]]
        assert forwards
        assert {seen.kernels[name] for seen in forwards for name in BOTH} == {num_products}
        adapted, plain = run(gpu, loaded), run(gpu, loaded, adapted=False)
        num_captures = len(gpu.captures)
        for seen, other in zip(adapted, plain, strict=True):
            assert (seen.replays, seen.to_device, seen.to_host) == (other.replays, other.to_device, other.to_host)
            assert not BOTH & seen.kernels.keys(), "they are in the graphs"
        slotted(loaded).remove(IDENTITY)
        put(loaded)
        run(gpu, loaded)
        assert len(gpu.captures) == num_captures


def test_a_load_is_copies_that_wait_for_nothing(folder: Path) -> None:
    with FakeGPU() as gpu:
        loaded = start(save("llama", folder), dtype="bfloat16", enable_lora=True, max_loras=2, cuda_graphs=False)
        with gpu.watch() as seen:
            for number in range(3):
                put(loaded, bytes([number]) * 32)
        assert (seen.syncs, seen.pageable) == ([], [])
        assert seen.to_device == 3 * 3 * 7 * NUM_LAYERS, "A, B and the rank of each layer"
        assert sorted(slotted(loaded).numbers.values()) == [0, 1, 2], "one more than are served: it is being checked"
        with gpu.watch() as seen:
            slotted(loaded).remove(bytes(32))
        assert (seen.syncs, seen.pageable, seen.to_device) == ([], [], 0)


@pytest.mark.night
@pytest.mark.parametrize("family", ["phi3", "gemma2", "mixtral", "gpt2"])
def test_models_of_every_kind_start_with_adapters(family: str, folder: Path) -> None:
    with FakeGPU() as gpu:
        loaded = start(save(family, folder), dtype="bfloat16", enable_lora=True, max_lora_rank=8, max_graph_tokens=64)
        assert loaded.decode is not None
        put(loaded)
        run(gpu, loaded)


@pytest.mark.night
def test_the_memory_limits_the_number_of_adapters_and_the_log_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save("llama", folder)

    def start_with(**settings: Any) -> Loaded:
        with FakeGPU():
            return start(model, cuda_graphs=False, dtype="bfloat16", **settings)

    slot_bytes = slotted(start_with(enable_lora=True)).slot_bytes
    with caplog.at_level(logging.INFO):
        loaded = start_with(enable_lora=True, lora_memory_bytes=4 * slot_bytes - 1)
    assert loaded.adapters.bounds.max_adapters == 2
    assert f"memory for 2 of rank up to 128, by --lora-memory {4 * slot_bytes - 1}" in caplog.text
    with pytest.raises(ValueError, match=f"two adapters of --max-lora-rank 128 take {2 * slot_bytes} bytes"):
        start_with(enable_lora=True, lora_memory_bytes=2 * slot_bytes - 1)
    lora = tuple((name, folder) for name in ("a", "b", "c"))
    with pytest.raises(ValueError, match=r"--lora is given 3 times; --lora-memory \d+ has room for 2 of rank"):
        start_with(lora=lora, lora_memory_bytes=4 * slot_bytes - 1)


def test_a_worker_that_took_no_memory_for_adapters_says_how_to_start_it(folder: Path) -> None:
    model = save("llama", folder)
    with FakeGPU():
        loaded = start(model, cuda_graphs=False)
        assert not loaded.model.adapters.has_slots
        assert "start it with --enable-lora" in (why_no_adapters(make_config(model), loaded.model) or "")
        assert why_no_adapters(make_config(model, enable_lora=True), loaded.model) is None
