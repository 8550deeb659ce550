"""A worker's choices before it loads a model."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.worker.attention import AttentionStep
from quire.worker.process import make_watchdog, pick_attention, pick_kv_dtype

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
