"""What a worker chooses before it loads a model."""

import pytest
import torch

from quire.worker.attention import AttentionStep
from quire.worker.process import pick_attention, pick_kv_dtype

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
