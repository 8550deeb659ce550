"""The start on a fake GPU: its device, its refusals, the report of a failed capture. The part for `make test`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import stand_in_flashinfer
import torch
from gpu_desk.fake_device import FakeGPU
from gpu_desk.steps import make_config, make_executor, mixed_and_decode_steps, start
from model_zoo import save
from transformers.models.llama.modeling_llama import LlamaModel

from quire.serving.addresses import UnixAddress
from quire.serving.dialing import DialOptions
from quire.serving.options import ServerOptions
from quire.serving.server import CannotStartError, StopSignals
from quire.worker.attention import flashinfer_attention
from quire.worker.attention.triton_attention import TritonAttentionStep
from quire.worker.device.devices import pick_device
from quire.worker.run.executor import Outcome
from quire.worker.run.loading import load_warm
from quire.worker.sampling.parameters import SamplingParams
from quire.worker.service import process
from quire.worker.service.process import serve


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(("flag", "index"), [("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_every_way_to_name_a_gpu_is_that_gpu(flag: str, index: int) -> None:
    with FakeGPU():
        assert pick_device(flag) == torch.device("cuda", index)


def test_the_second_gpu_is_the_only_one_that_is_used(folder: Path) -> None:
    """A launch on a tensor that is not on the current device fails, and so does a mixture of devices."""
    with FakeGPU() as gpu:
        loaded = start(save("llama", folder), device="cuda:1", max_graph_tokens=0)
        assert gpu.current == 1
        assert {tensor.device for tensor in loaded.pool.block_tensors} == {torch.device("cuda", 1)}
        executor = make_executor(loaded)
        mixed, decodes = mixed_and_decode_steps(SamplingParams(), num_groups=len(loaded.pool.groups))
        for step in [*mixed, decodes[0]]:
            assert executor.launch(step).result.outcome is Outcome.COMPUTED
        assert gpu.contexts == {1}


def test_both_threads_of_the_model_use_the_gpu_of_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector too: it waits for events, and without a device of its own it would open a context on the first."""
    used: dict[str, object] = {}
    before_loading: set[str] = set()

    def stop_here(_: object) -> None:
        before_loading.update(used)
        raise ValueError("far enough")

    monkeypatch.setattr(process, "load_warm", stop_here)
    config = make_config(
        Path("no-model"),
        device="cuda:1",
        server=ServerOptions((), None, "info", "text", drain_timeout_s=1.0),
        cachemgr=UnixAddress("/no-such-socket"),
        cachemgr_dial=DialOptions(),
    )
    with FakeGPU():
        monkeypatch.setattr(
            torch.cuda, "set_device", lambda device: used.update({threading.current_thread().name: device})
        )
        with pytest.raises(CannotStartError, match="far enough"):
            asyncio.run(serve(config, StopSignals()))
    assert used == {"model": torch.device("cuda:1"), "collector": torch.device("cuda:1")}
    assert before_loading == {"model", "collector"}


@pytest.mark.parametrize("flag", ["cuda:2", "meta", "no such device"])
def test_a_device_that_is_not_there_is_refused_with_its_flag(flag: str) -> None:
    with FakeGPU(), pytest.raises(ValueError, match=f"--device {flag}"):
        pick_device(flag)


def test_without_a_gpu_cuda_is_refused_and_auto_is_the_cpu() -> None:
    with pytest.raises(ValueError, match="--device cuda: torch finds 0 GPUs"):
        pick_device("cuda")
    assert pick_device("auto") == torch.device("cpu")


def test_a_torch_for_amd_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    with FakeGPU(), pytest.raises(ValueError, match=r"^--device cuda: this torch is built for AMD GPUs, [^\n]*$"):
        pick_device("cuda")


def test_float8_is_refused_on_a_gpu_that_does_not_have_it(folder: Path) -> None:
    with FakeGPU(capability=(8, 0)), pytest.raises(ValueError, match=r"--kv-dtype float8: .* 8\.9; .* 8\.0"):
        start(save("llama", folder), dtype="bfloat16", kv_dtype="float8")


def test_what_flashinfer_cannot_run_is_refused_at_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save("llama", folder)
    with stand_in_flashinfer.installed():
        with (
            FakeGPU(),
            pytest.raises(ValueError, match="flashinfer: layer 0 can't run in it: head dim 8 is not one of"),
        ):
            start(model, dtype="bfloat16", attention="flashinfer")
        monkeypatch.setattr(flashinfer_attention, "HEAD_DIMS", (8,))
        with FakeGPU(), pytest.raises(ValueError, match="and the model is in float32"):
            start(model, dtype="float32", attention="flashinfer")
        kind = flashinfer_attention.FlashInferAttentionStep
        monkeypatch.setattr(kind, "_attend_prompts", TritonAttentionStep._attend_prompts)  # it needs numbers
        with FakeGPU(), pytest.raises(ValueError, match="float8 with --attention flashinfer: it reads keys and values"):
            start(model, dtype="bfloat16", kv_dtype="float8", attention="flashinfer", cuda_graphs=False)


def test_a_folder_of_compiled_kernels_that_is_not_writable_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with FakeGPU(), pytest.raises(ValueError, match=r"/file/cache, .* can't be written to"):
        load_warm(make_config(tmp_path / "no-model"))


def test_a_forward_that_waits_is_named_and_no_capture_begins(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = LlamaModel.forward

    def wait_and_forward(self: LlamaModel, *args: object, **kwargs: object) -> object:
        if torch.cuda.is_available():
            self.embed_tokens.weight.sum().item()
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", wait_and_forward)
    with FakeGPU() as gpu, caplog.at_level(logging.WARNING):
        assert start(save("llama", folder), dtype="bfloat16").decode is None
        assert gpu.captures == []
    assert "its forward waits for the device at " in caplog.text


def test_a_capture_that_fails_says_its_cause_and_not_what_it_leads_to(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch does: the block that captures raises again, about a capture that was broken off."""
    forward = LlamaModel.forward
    capturing: list[object] = []

    @contextlib.contextmanager
    def capture(graph: object, **_: object) -> Iterator[None]:
        capturing.append(graph)
        try:
            yield
        except RuntimeError as error:
            raise torch.AcceleratorError("CUDA error: failed due to a previous error during capture") from error
        finally:
            capturing.clear()

    def fail_while_captured(self: LlamaModel, *args: object, **kwargs: object) -> object:
        if capturing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", fail_while_captured)
    with FakeGPU(), caplog.at_level(logging.WARNING):
        monkeypatch.setattr(torch.cuda, "graph", capture)
        assert start(save("llama", folder), dtype="bfloat16").decode is None
    assert "run without CUDA graphs: OutOfMemoryError: CUDA out of memory. Tried to allocate" in caplog.text
    assert "previous error" not in caplog.text
