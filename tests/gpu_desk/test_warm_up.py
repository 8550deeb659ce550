"""After the warm-up no step launches a kernel that was not compiled: by the keys that Triton compiles for."""

from __future__ import annotations

import contextlib
import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import triton
from gpu_desk.fake_device import FakeGPU
from gpu_desk.steps import make_config
from model_zoo import save
from samples import others_at_night
from torch._subclasses.fake_tensor import FakeTensor

from quire.cache.v1 import grant_pb2
from quire.worker.config import WorkerConfig
from quire.worker.grant.decoding import AcceptedStep, RowSampling
from quire.worker.memory.sequence_table import SequenceTable
from quire.worker.memory.step_batch import build_step_batch
from quire.worker.run.executor import Executor, Outcome
from quire.worker.run.loading import Loaded, load, load_warm
from quire.worker.sampling.parameters import SamplingParams

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
MAX_STEP_TOKENS = 2048
MAX_NUM_SEQS = 24
NUM_BLOCKS = 1 + MAX_MODEL_LEN // BLOCK_SIZE
NUM_STEPS = 40
MAX_DRAFTS = 8
EVERYTHING = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1, num_logprobs=3)

Key = tuple[Any, ...]

MODELS = {
    "llama": {"dtype": "bfloat16"},
    "qwen3": {"dtype": "bfloat16", "kv_dtype": "float8"},
    "gpt_oss": {"dtype": "bfloat16"},
    "gemma2": {"dtype": "float16", "fuse": False},
    "mistral": {"dtype": "float32", "kv_dtype": "bfloat16", "cuda_graphs": False, "host_memory_bytes": 8 << 20},
    "stablelm": {"dtype": "bfloat16", "host_memory_bytes": 8 << 20},
}


def specialization_of(param: Any, value: Any) -> Any:
    """The part of an argument that Triton specializes on: see create_function_from_signature in triton.runtime.jit."""
    if param.is_constexpr or value is None:
        return value
    if isinstance(value, torch.Tensor):
        is_aligned = not param.do_not_specialize_on_alignment and value.data_ptr() % 16 == 0
        return (value.dtype, is_aligned)
    if isinstance(value, float):
        return float
    width = 32 if -(2**31) <= value < 2**31 else 64
    if param.do_not_specialize:
        return width
    return (width, value == 1, not param.do_not_specialize_on_alignment and value % 16 == 0)


@contextlib.contextmanager
def launched_keys(gpu: FakeGPU) -> Iterator[set[Key]]:
    """The keys of all launches within the block."""
    keys: set[Key] = set()
    launch = gpu.launch

    def record(kernel: Any, *args: Any, **options: Any) -> None:
        names = [param.name for param in kernel.params]
        values = dict(zip(names, args, strict=False)) | options
        specialized = tuple(specialization_of(param, values.get(param.name)) for param in kernel.params)
        how = tuple((name, values.get(name)) for name in ("num_warps", "num_stages"))
        keys.add((kernel.fn.__name__, *specialized, *how))
        if kernel.fn.__name__ != "offload_kernel":  # its staging is memory of the host
            launch(kernel, *args, **options)

    def address(tensor: torch.Tensor) -> int:
        """Storage begins at a multiple of 512, as that of torch's allocator does."""
        return (1 << 20) + int(tensor.storage_offset()) * tensor.element_size()

    make_tensor = torch.tensor

    def unpinned(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make_tensor(*args, **options)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(gpu, "launch", record))
        stack.enter_context(mock.patch.object(FakeTensor, "data_ptr", address))
        stack.enter_context(mock.patch.object(FakeTensor, "is_pinned", return_value=True))  # pin() is recorded only
        stack.enter_context(mock.patch.object(torch, "tensor", unpinned))
        yield keys


def save_long(name: str, folder: Path) -> Path:
    """A checkpoint of a model that takes MAX_MODEL_LEN tokens."""
    path = save(name, folder) / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"max_position_embeddings": MAX_MODEL_LEN}))
    return path.parent


class Traffic:
    """Steps of a lease, drawn at random: prompts, also behind a prefix, decodes, drafts, forks, copies, host tier."""

    def __init__(self, loaded: Loaded, *, seed: int) -> None:
        self.random = random.Random(seed)
        self.num_host_blocks = loaded.host_pool.num_blocks
        self.num_groups = len(loaded.pool.groups)
        self.executor = Executor(
            loaded.model, loaded.pool, max_num_seqs=MAX_NUM_SEQS, decode=loaded.decode, host_pool=loaded.host_pool
        )

    def run(self) -> None:
        """Run a step of new sequences, and one of theirs and of forks of theirs; then forget them."""
        counts = self.draw_counts()
        ends = [self.draw_end(count) for count in counts]
        first = grant_pb2.StepGrant(lease_id="traffic", step_number=1)
        for seq_id, (count, end) in enumerate(zip(counts, ends, strict=True)):
            write(first, seq_id, num_tokens=min(end + 1 + MAX_DRAFTS, MAX_MODEL_LEN), num_groups=self.num_groups)
            add_run(first, seq_id, end - count, count)
        self.move_blocks(first)
        given = {index: np.zeros(count, dtype=np.int32) for index, count in enumerate(counts)}
        params = self.random.choice([SamplingParams(), EVERYTHING])
        self.execute(AcceptedStep(first, given, {seq_id: RowSampling(params) for seq_id in range(len(counts))}))
        going_on = [seq_id for seq_id, end in enumerate(ends) if end < MAX_MODEL_LEN]
        second = grant_pb2.StepGrant(lease_id="traffic", step_number=2, known_step_number=1)
        drafts: dict[int, int] = {}
        for seq_id in going_on:
            most = min(self.random.choice([0, 0, 1, MAX_DRAFTS]), MAX_MODEL_LEN - ends[seq_id] - 1)
            drafts |= {len(second.run_sequence_ids): most} if most else {}
            add_run(second, seq_id, ends[seq_id], 1 + most)
        for child_id, parent_id in enumerate(going_on[: MAX_NUM_SEQS - len(counts)], start=len(counts)):
            second.fork_parent_ids.append(parent_id)
            second.fork_child_ids.append(child_id)
            write(second, child_id, num_tokens=ends[parent_id] + 1, num_groups=self.num_groups)
            add_run(second, child_id, ends[parent_id], 1)
        if drafts:
            second.run_draft_counts.extend(drafts.get(run, 0) for run in range(len(second.run_sequence_ids)))
        if second.run_sequence_ids:
            self.execute(AcceptedStep(second, {run: np.zeros(most, dtype=np.int32) for run, most in drafts.items()}))
        self.executor.fence_lease("traffic")

    def draw_counts(self) -> list[int]:
        """Tokens of each sequence: a few prompts of all sizes among decodes, in any order."""
        num_prompts = self.random.choice([0, 1, 1, 2, 5])
        prompts = [int(2 ** self.random.uniform(1, 11)) for _ in range(num_prompts)]
        counts = [*prompts, *[1] * self.random.choice([0 if prompts else 1, 1, 3, MAX_NUM_SEQS - num_prompts])]
        while sum(counts) > MAX_STEP_TOKENS:
            counts.remove(max(counts))
        self.random.shuffle(counts)
        return counts or [1]

    def draw_end(self, count: int) -> int:
        """Draw the length of a sequence that runs so many tokens, mostly behind a short prefix or none."""
        return self.random.choice([count, min(count + 40, MAX_MODEL_LEN), self.random.randint(count, MAX_MODEL_LEN)])

    def move_blocks(self, grant: grant_pb2.StepGrant) -> None:
        """Copies of blocks within the pool, and of some to the host tier and back."""
        blocks = self.random.sample(range(1, NUM_BLOCKS), 2 * self.random.choice([0, 1, 20]))
        grant.copy_source_block_ids.extend(blocks[::2])
        grant.copy_target_block_ids.extend(blocks[1::2])
        moved = self.random.sample(range(1, NUM_BLOCKS), min(self.num_host_blocks, self.random.choice([0, 1, 5, 40])))
        hosts = self.random.sample(range(self.num_host_blocks), len(moved))
        grant.offload_source_block_ids.extend(moved)
        grant.offload_target_host_block_ids.extend(hosts)
        grant.restore_source_host_block_ids.extend(hosts)
        grant.restore_target_block_ids.extend(moved)

    def execute(self, step: AcceptedStep) -> None:
        assert self.executor.execute(step).outcome is Outcome.COMPUTED


COPIES = {"write_kv_kernel"}
"""Kernels that compute nothing: their tiles may follow from the batch."""


def test_a_deterministic_step_has_the_same_compiled_kernels_whatever_its_size(tmp_path: Path) -> None:
    """Another tile, or another number of threads, adds up in another order."""
    with FakeGPU() as gpu:
        loaded = load(make_long_config(save_long("qwen3", tmp_path), dtype="bfloat16", deterministic=True))
        pool, model = loaded.pool, loaded.model
        table = SequenceTable(
            max_num_seqs=MAX_NUM_SEQS, max_blocks_per_seq=MAX_MODEL_LEN // BLOCK_SIZE, device=model.device
        )
        for _ in range(MAX_NUM_SEQS):
            table.stage_blocks(table.add(), 0, [1] * (MAX_MODEL_LEN // BLOCK_SIZE))
        found: dict[tuple[int, ...], set[Key]] = {}
        for counts in ((1,), (1,) * MAX_NUM_SEQS, (2,), (65, 1), (500,), (2000, 1, 400)):
            batch = build_step_batch(
                table,
                block_size=BLOCK_SIZE,
                rows=range(len(counts)),
                starts=[40] * len(counts),
                counts=counts,
                token_ids=[[0] * count for count in counts],
            )
            with launched_keys(gpu) as keys:
                model.forward(batch, pool)
            found[counts] = {key for key in keys if key[0] not in COPIES}
        for counts, keys in found.items():
            assert keys == found[1,], counts


def write(grant: grant_pb2.StepGrant, seq_id: int, *, num_tokens: int, num_groups: int) -> None:
    """Write the same blocks to the tables of all layer groups."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    for group in range(num_groups):
        grant.write_sequence_ids.append(seq_id)
        grant.write_layer_groups.append(group)
        grant.write_first_indexes.append(0)
        grant.write_block_counts.append(num_blocks)
        grant.write_block_ids.extend(range(1, num_blocks + 1))


def add_run(grant: grant_pb2.StepGrant, seq_id: int, start: int, count: int) -> None:
    grant.run_sequence_ids.append(seq_id)
    grant.run_starts.append(start)
    grant.run_token_counts.append(count)
    grant.run_samples.append(True)


def make_long_config(model: Path, **settings: Any) -> WorkerConfig:
    sizes = {"num_blocks": NUM_BLOCKS, "max_model_len": MAX_MODEL_LEN, "max_step_tokens": MAX_STEP_TOKENS}
    return make_config(model, **sizes, max_num_seqs=MAX_NUM_SEQS, **settings)


@pytest.mark.parametrize("family", others_at_night(MODELS, ["gpt_oss"]))
def test_no_step_launches_a_kernel_that_the_start_has_not(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    model = save_long(family, tmp_path)
    with FakeGPU() as gpu, launched_keys(gpu) as known, caplog.at_level(logging.INFO):
        loaded = load_warm(make_long_config(model, **MODELS[family]))
        assert f"kernels: 0 compiled in 0.0 s, 0 read from {tmp_path}" in caplog.messages
        assert {key[0] for key in known} >= {"paged_prefill_kernel", "paged_decode_kernel", "merge_states_kernel"}
        before = set(known)
        traffic = Traffic(loaded, seed=1)
        for _ in range(NUM_STEPS):
            traffic.run()
        assert sorted(known - before, key=str) == []
        late = SimpleNamespace(name="late_kernel")
        triton.knobs.compilation.listener(src=late, times=SimpleNamespace(total=2_000_000), cache_hit=False)
    assert "a kernel was compiled after the warm-up kernel=late_kernel seconds=2.00" in caplog.messages


@pytest.mark.night
def test_the_start_alone_does_not_launch_all_kernels(tmp_path: Path) -> None:
    """The test above would notice if there were no warm-up."""
    with FakeGPU() as gpu, launched_keys(gpu) as known:
        loaded = load(make_long_config(save_long("llama", tmp_path), dtype="bfloat16"))
        before = set(known)
        traffic = Traffic(loaded, seed=1)
        for _ in range(NUM_STEPS):
            traffic.run()
        assert {"block_copy_kernel", "paged_prefill_kernel"} <= {key[0] for key in known - before}
