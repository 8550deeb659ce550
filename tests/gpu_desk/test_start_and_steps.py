"""The worker from its start to its steps on a fake GPU. fake_device.py lists the errors that this can find.

test_start.py has the part for `make test`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_desk.fake_device import FakeGPU, Seen
from gpu_desk.steps import make_executor, mixed_and_decode_steps, start
from model_zoo import FAMILIES, save
from samples import others_at_night

from quire.worker.attention import triton_attention
from quire.worker.grant.decoding import AcceptedStep
from quire.worker.grant.gate import Gate
from quire.worker.run import graphs
from quire.worker.run.executor import Executor, Outcome
from quire.worker.sampling.parameters import SamplingParams
from quire.worker.service.steps import CHECKSUM_BYTES, StepLimits, Steps

NO_LIMITS = StepLimits(0, 0, 0, 0, 0)
GREEDY = SamplingParams()
EVERYTHING = SamplingParams(
    temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.5, num_logprobs=3
)

LATENT = ["deepseek_v2", "deepseek_v3"]
# Attention in the kernels, decode steps as graphs: all that is packed, but latents.
CAPTURED = [name for name in FAMILIES if name not in LATENT]
# One of each way to compute attention, norms, positions and experts.
BY_DAY = ["gpt_oss", "phi3_longrope"]
DRAW_KERNELS = {"survey_kernel", "draw_kernel"}
ATTENTION_KERNELS = {
    "decode_plan_kernel",
    "paged_decode_kernel",
    "paged_prefill_kernel",
    "merge_states_kernel",
}
# Attention in torch, or the model's own.
NOT_CAPTURED = ["odd_heads", *LATENT, "falcon", "mamba2", "lfm2"]
# For other dtypes than bfloat16 torch multiplies one expert after the other, by sizes that it reads on the host.
EXPERTS = ["mixtral", "gpt_oss"]
# One of each way to compute: a norm with weights and one with biases, softcaps, temperatures, a rope that grows.
OTHER_DTYPES = [
    ("llama", "float16"),
    ("gemma2", "float32"),
    ("gpt2", "float16"),
    ("llama4_temperature", "float32"),
    ("llama_dynamic_rope", "float16"),
    ("stablelm", "float32"),
]
# The most of each, of steps with attention in torch or the model's own: transfers of a mixed step and of a decode step,
# and of the decode step also divisions of slots by the block size, and copies by index. 2 transfers of a decode step,
# and 4 of a mixed one, are not attention's; one more is for each kind of mask, and states need 2.
COUNTS = [
    ("odd_heads", (5, 3), 6, 8),
    ("deepseek_v2", (5, 3), 6, 11),
    ("falcon", (5, 3), 4, 2),
    ("mamba2", (7, 5), 2, 14),
]
PLAIN = {"cuda_graphs": False, "fuse": False}
"""A start for a test that looks at neither."""
DTYPES = [
    ("float32", "auto"),
    ("float16", "auto"),
    ("bfloat16", "float8"),
    ("bfloat16", "float16"),
    ("float32", "bfloat16"),
    ("float16", "bfloat16"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def run(gpu: FakeGPU, executor: Executor, steps: list[AcceptedStep]) -> Seen:
    """Launch the steps; all have to compute. Returns the result of the last one."""
    for step in steps:
        with gpu.watch() as seen:
            launched = executor.launch(step)
        assert launched.result.outcome is Outcome.COMPUTED
    return seen


def assert_nothing_waits(seen: Seen) -> None:
    assert seen.syncs == []
    assert seen.pageable == []


@pytest.mark.parametrize("family", others_at_night(CAPTURED, BY_DAY))
def test_a_model_in_the_kernels_starts_and_runs_and_its_decode_steps_are_graphs(family: str, folder: Path) -> None:
    with FakeGPU() as gpu:
        loaded = start(save(family, folder), dtype="bfloat16")
        assert loaded.decode is not None
        assert len(loaded.decode.buckets) > 2
        assert gpu.num_streams == 1, "one for all graphs"
        assert len(gpu.captures) > 0
        for captured in gpu.captures:
            assert (captured.syncs, captured.to_device, captured.to_host) == ([], 0, 0)
        assert loaded.decode.pieces is not None
        executor = make_executor(loaded)
        for params, copies, decode_copies in ((GREEDY, 4, 1), (EVERYTHING, 13, 3)):
            mixed, decodes = mixed_and_decode_steps(params, num_groups=len(loaded.pool.groups))
            seen = run(gpu, executor, mixed)
            assert_nothing_waits(seen)
            assert seen.to_device <= copies
            assert seen.replays == len(loaded.model.attention_specs) + 1
            draws = set() if params is GREEDY else DRAW_KERNELS
            assert draws <= set(seen.kernels) <= ATTENTION_KERNELS | draws, "all else is in the pieces"
            seen = run(gpu, executor, decodes)
            assert_nothing_waits(seen)
            assert seen.to_device <= decode_copies
            assert set(seen.kernels) == draws, "attention is in the graph"
            executor.begin_epoch()


def test_a_decode_step_is_one_copy_three_replays_and_the_tokens(folder: Path) -> None:
    """With penalties it is sampled outside of the graphs."""
    filters = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1)
    with FakeGPU() as gpu:
        executor = make_executor(start(save("qwen3", folder), dtype="bfloat16"))
        for params in (GREEDY, SamplingParams(temperature=0.7), filters):
            mixed, decodes = mixed_and_decode_steps(params)
            run(gpu, executor, mixed)
            seen = run(gpu, executor, decodes)
            assert_nothing_waits(seen)
            assert (seen.to_device, seen.replays, seen.to_host) == (1, 3, 1), params
            assert seen.num_launches == 5, params
            executor.begin_epoch()
        mixed, decodes = mixed_and_decode_steps(EVERYTHING)
        run(gpu, executor, mixed)
        seen = run(gpu, executor, decodes)
        assert seen.replays == 2
        assert seen.operations["logsumexp"] == 1


def test_a_model_that_does_not_sample_as_the_sampler_does_samples_outside_of_the_graphs(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differ(decode: graphs.StaticDecode) -> None:
        raise graphs.CannotCapture("it chose other tokens")

    monkeypatch.setattr(graphs, "_check_sampling", differ)
    with FakeGPU() as gpu, caplog.at_level(logging.WARNING):
        executor = make_executor(start(save("llama", folder)))
        mixed, decodes = mixed_and_decode_steps(GREEDY)
        run(gpu, executor, mixed)
        seen = run(gpu, executor, decodes)
        assert (seen.replays, seen.operations["argmax"]) == (2, 1)
    assert "their tokens are sampled without: it chose other tokens" in caplog.text


GRAPH_BYTES = 1 << 27


def test_the_memory_of_graphs_is_not_given_to_the_pool(folder: Path) -> None:
    sizes = {}
    for cuda_graphs in (False, True):
        with FakeGPU(graph_bytes=GRAPH_BYTES) as gpu:
            sizes_of_steps = {"max_step_tokens": 256, "cuda_graphs": cuda_graphs}
            loaded = start(save("llama", folder), memory_share=0.9, num_blocks=None, **sizes_of_steps)
            sizes[cuda_graphs] = loaded.pool.num_blocks * loaded.pool.bytes_per_block
            num_graphs = gpu.num_graphs
    assert num_graphs > 8
    missing = sizes[False] - sizes[True] - num_graphs * GRAPH_BYTES
    assert abs(missing) <= loaded.pool.bytes_per_block


def test_a_start_without_memory_for_static_steps_says_so_and_goes_on(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 148.00 MiB")

    monkeypatch.setattr(graphs.StaticDecode, "__init__", allocate)
    with FakeGPU() as gpu, caplog.at_level(logging.WARNING):
        loaded = start(save("llama", folder))
        assert loaded.decode is None
        executor = make_executor(loaded)
        for steps in mixed_and_decode_steps(GREEDY, num_groups=len(loaded.pool.groups)):
            run(gpu, executor, steps)
    assert "decode steps run without CUDA graphs: OutOfMemoryError: CUDA out of memory" in caplog.text


@pytest.mark.parametrize("family", others_at_night(NOT_CAPTURED, ["lfm2"]))
def test_a_model_that_does_not_run_in_the_kernels_starts_and_runs(family: str, folder: Path) -> None:
    with FakeGPU() as gpu:
        loaded = start(save(family, folder), dtype="bfloat16")
        assert loaded.decode is None
        executor = make_executor(loaded)
        for steps in mixed_and_decode_steps(EVERYTHING, num_groups=len(loaded.pool.groups)):
            seen = run(gpu, executor, steps)
            assert seen.syncs == []
            assert [place for place in seen.pageable if place.startswith(("worker/", "kernels/"))] == []


@pytest.mark.parametrize(
    ("family", "transfers", "divisions", "index_copies"),
    others_at_night(COUNTS, [count for count in COUNTS if count[0] == "mamba2"]),
)
def test_steps_of_torch_send_their_numbers_once_and_divide_their_slots_once(
    family: str, transfers: tuple[int, int], divisions: int, index_copies: int, folder: Path
) -> None:
    with FakeGPU() as gpu:
        loaded = start(save(family, folder), dtype="bfloat16")
        executor = make_executor(loaded)
        both = mixed_and_decode_steps(GREEDY, num_groups=len(loaded.pool.groups))
        for steps, most in zip(both, transfers, strict=True):
            seen = run(gpu, executor, steps)
            assert seen.syncs == []
            of_transformers = [place for place in seen.pageable if not place.startswith(("worker/", "kernels/"))]
            assert seen.to_device - len(of_transformers) <= most
        assert seen.operations["remainder"] <= divisions
        assert seen.operations["index_copy_"] <= index_copies


@pytest.mark.parametrize("fuse", [True, False])
def test_kernels_read_sinks_where_the_weights_are(fuse: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a copy in float32: one would cost a launch for each layer and step, or grow stale."""
    read = []

    def noted(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            read.append(options["sinks"])
            return kernel(*args, **options)

        return call

    for name in ("paged_decode", "paged_prefill"):
        monkeypatch.setattr(triton_attention, name, noted(getattr(triton_attention, name)))
    with FakeGPU() as gpu:
        loaded = start(save("gpt_oss", folder), dtype="bfloat16", fuse=fuse, cuda_graphs=False)
        executor = make_executor(loaded)
        read.clear()
        for steps in mixed_and_decode_steps(GREEDY, num_groups=len(loaded.pool.groups)):
            run(gpu, executor, steps)
        weights = [tensor for name, tensor in loaded.model._model.named_parameters() if name.endswith("sinks")]
        assert {tensor.untyped_storage()._cdata for tensor in read} == {
            tensor.untyped_storage()._cdata for tensor in weights
        }


@pytest.mark.parametrize("dtype", others_at_night(["bfloat16", "float32"], ["bfloat16"]))
def test_a_decode_graph_writes_its_logits_once(dtype: str, folder: Path) -> None:
    """Beside the output layer's result: logits are not converted first, and then copied."""
    with FakeGPU() as gpu:
        loaded = start(save("llama", folder), dtype=dtype)
        assert loaded.decode is not None
        forward = next(seen for seen in gpu.captures if seen.kernels["paged_decode_kernel"])
        of_layers = forward.operations["copy"]
        assert of_layers == 1


@pytest.mark.parametrize(
    ("family", "dtype"),
    others_at_night(itertools.product(EXPERTS, ["float16", "float32"]), [("mixtral", "float16")]),
)
def test_experts_that_wait_for_the_device_are_named_and_never_captured(
    family: str, dtype: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeGPU() as gpu, caplog.at_level(logging.WARNING):
        loaded = start(save(family, folder), dtype=dtype)
        assert loaded.decode is None
        assert gpu.captures == []
        executor = make_executor(loaded)
        for steps in mixed_and_decode_steps(EVERYTHING, num_groups=len(loaded.pool.groups)):
            seen = run(gpu, executor, steps)
            assert seen.syncs, "the model waits, and nothing else does"
            assert {place.rpartition(" ")[2] for place in seen.syncs} == {"_grouped_mm"}
            assert seen.pageable == []
    assert re.search(
        r"without CUDA graphs: its forward waits for the device at moe\.py:\d+ in _grouped_mm", caplog.text
    )


@pytest.mark.parametrize(("major", "minor"), others_at_night([(8, 0), (12, 0)], [(8, 0)]))
def test_experts_are_not_captured_where_torch_has_no_kernel_for_them(major: int, minor: int, folder: Path) -> None:
    with FakeGPU(capability=(major, minor)):
        assert start(save("mixtral", folder), dtype="bfloat16").decode is None


@pytest.mark.parametrize(("family", "dtype"), others_at_night(OTHER_DTYPES, OTHER_DTYPES[1:2]))
def test_other_dtypes_are_captured(family: str, dtype: str, folder: Path) -> None:
    with FakeGPU() as gpu:
        loaded = start(save(family, folder), dtype=dtype)
        assert loaded.decode is not None
        executor = make_executor(loaded)
        for steps in mixed_and_decode_steps(GREEDY, num_groups=len(loaded.pool.groups)):
            assert_nothing_waits(run(gpu, executor, steps))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "fuse"),
    others_at_night(
        [(*each, fuse) for each in DTYPES for fuse in (True, False) if fuse or each[0] == "bfloat16"],
        [("bfloat16", "float8", True)],
    ),
)
def test_a_pool_may_have_another_dtype_than_the_model(dtype: str, kv_dtype: str, fuse: bool, folder: Path) -> None:
    with FakeGPU() as gpu:
        loaded = start(save("qwen3", folder), dtype=dtype, kv_dtype=kv_dtype, fuse=fuse)
        assert loaded.decode is not None
        executor = make_executor(loaded)
        for steps in mixed_and_decode_steps(GREEDY, num_groups=len(loaded.pool.groups)):
            assert_nothing_waits(run(gpu, executor, steps))


def test_the_record_of_penalties_is_there_before_the_first_request(folder: Path) -> None:
    with FakeGPU() as gpu:
        executor = make_executor(start(save("llama", folder), cuda_graphs=False))
        mixed, _ = mixed_and_decode_steps(EVERYTHING)
        seen = run(gpu, executor, mixed)
        assert seen.operations["zeros"] == 0


class InlineThread:
    """Stands in for the model thread: fake tensors are fake on their own thread only."""

    def submit(self, work: Callable[[], list[int]]) -> asyncio.Future[list[int]]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(work())
        return future


def test_checksums_of_many_blocks_take_the_memory_of_a_few(folder: Path) -> None:
    with FakeGPU() as gpu:
        loaded = start(save("llama", folder), num_blocks=4096, **PLAIN)
        steps = Steps(Gate("default", 1), make_executor(loaded), InlineThread(), NO_LIMITS)  # type: ignore[arg-type]
        with gpu.watch() as seen:
            ids = list(range(1, 4096))
            checksums = steps.checksum_blocks(ids, block_bytes=loaded.pool.bytes_per_block)
            assert len(asyncio.run(checksums)) == len(ids)
    piece = CHECKSUM_BYTES // loaded.pool.bytes_per_block * loaded.pool.bytes_per_block
    assert 0 < piece < 4096 * loaded.pool.bytes_per_block / 4
    assert 0 < seen.largest_bytes <= 8 * piece  # a byte becomes an int64


def test_the_host_tier_is_pinned(folder: Path) -> None:
    with FakeGPU() as gpu:
        loaded = start(save("llama", folder), host_memory_bytes=1 << 20, **PLAIN)
        assert sum(gpu.driver.registered.values()) == loaded.host_pool.num_blocks * loaded.pool.bytes_per_block > 0
