"""A worker's choices before it loads a model."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.cache.v1 import attach_pb2
from quire.worker.attention.torch_attention import AttentionStep
from quire.worker.memory.layer_groups import LayerGroup, LayerGroups
from quire.worker.memory.layer_spec import Causal, Chunked, Sliding
from quire.worker.run.loading import pick_attention, pick_kv_dtype
from quire.worker.run.pool_budget import MAX_BLOCKS, count_usable_blocks
from quire.worker.service.description import describe_layer_groups
from quire.worker.service.process import make_watchdog

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_attention_by_device_and_block_size() -> None:
    assert pick_attention("auto", CPU, block_size=16) is AttentionStep
    assert pick_attention("torch", GPU, block_size=16) is AttentionStep
    assert pick_attention("auto", GPU, block_size=48) is AttentionStep
    for name in ("auto", "triton"):
        assert pick_attention(name, GPU, block_size=64).__name__ == "TritonAttentionStep"


def test_triton_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="--attention triton: it needs a GPU, and the device is cpu"):
        pick_attention("triton", CPU, block_size=16)
    with pytest.raises(ValueError, match="--block-size 48 is not one of 16, 32, 64, 128"):
        pick_attention("triton", GPU, block_size=48)


def test_flashinfer_where_it_is_not_installed() -> None:
    with pytest.raises(ValueError, match=r"flashinfer is not installed; install 'quire-kv\[flashinfer\]'"):
        pick_attention("flashinfer", GPU, block_size=16)
    with pytest.raises(ValueError, match="--attention flashinfer: it needs a GPU, and the device is cpu"):
        pick_attention("flashinfer", CPU, block_size=16)


def test_triton_on_a_cpu_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert pick_attention("triton", CPU, block_size=16).__name__ == "TritonAttentionStep"
    assert pick_attention("auto", CPU, block_size=16) is AttentionStep


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("auto", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        ("float8", torch.float8_e4m3fn),
    ],
)
def test_kv_dtypes(name: str, dtype: torch.dtype) -> None:
    assert pick_kv_dtype(name, torch.float32) == dtype


@pytest.mark.parametrize(
    ("device", "step_timeout_s", "limit_s"), [(GPU, None, 120), (CPU, None, 0), (CPU, 7.0, 7), (GPU, 0.0, 0)]
)
def test_a_step_on_a_gpu_has_a_limit_unless_told_otherwise(
    device: torch.device, step_timeout_s: float | None, limit_s: float
) -> None:
    config: Any = SimpleNamespace(step_timeout_s=step_timeout_s)
    others: Any = SimpleNamespace(
        announce_not_serving=None, announce_serving=None, oldest=lambda: None, whereabouts=lambda: ""
    )
    watchdog = make_watchdog(config, others, others, others, device=device)
    assert (watchdog._limit_s if watchdog else 0) == limit_s
    of_ranks = make_watchdog(config, others, others, others, device=device, group=others)
    assert (of_ranks._limit_s if of_ranks else 0) == (120 if step_timeout_s is None else limit_s)


FULL = LayerGroup(Causal(), (0, 1))
WINDOW = LayerGroup(Sliding(32), (2, 3))


def test_one_group_without_a_window_is_not_registered() -> None:
    assert describe_layer_groups((FULL,)) == []
    assert describe_layer_groups((WINDOW,)) == [
        attach_pb2.LayerGroup(kind=attach_pb2.LAYER_GROUP_KIND_SLIDING, window_token_count=32, layer_count=2)
    ]
    chunked = LayerGroup(Chunked(8), (4,))
    assert describe_layer_groups((FULL, chunked)) == [
        attach_pb2.LayerGroup(kind=attach_pb2.LAYER_GROUP_KIND_FULL, layer_count=2),
        attach_pb2.LayerGroup(kind=attach_pb2.LAYER_GROUP_KIND_CHUNKED, window_token_count=8, layer_count=1),
    ]


@pytest.mark.parametrize(
    ("groups", "max_model_len", "num_blocks"),
    [
        ((FULL,), 640, 1 + 4 * 40),
        ((FULL, FULL), 640, 1 + 2 * 4 * 40),
        ((WINDOW,), 640, 1 + 4 * 4 + 2 * 128 // 16),  # a window of 32 tokens may begin and end inside of blocks
        ((FULL, WINDOW), 48, 1 + 2 * 4 * 3),
        ((FULL,), 2**30, MAX_BLOCKS),
    ],
)
def test_blocks_that_all_sequences_can_use(groups: LayerGroups, max_model_len: int, num_blocks: int) -> None:
    config: Any = SimpleNamespace(block_size=16, max_num_seqs=4, max_step_tokens=128)
    model: Any = SimpleNamespace(layer_groups=groups, max_model_len=max_model_len)
    assert count_usable_blocks(config, model) == num_blocks
