"""A sample of the attention kernels, compiled for five GPUs: gpu_desk/test_five_architectures.py has the others."""

import pytest
import torch
from compiled_attention import check_fast, compile_decode, compile_prefill
from kernel_batch import Shape
from machine_code import A100, B200, GPU, H100, L4, RTX_5090

from quire.kernels.paged_decode import RESIDENT


@pytest.mark.parametrize(
    ("gpu", "shape"),
    [(H100, Shape(32, 8, 128, kv_dtype=torch.float8_e4m3fn)), (B200, Shape(32, 8, 64)), (RTX_5090, Shape(32, 8, 120))],
    ids=["sm_90-fp8", "sm_100-d64", "sm_120-d120"],
)
def test_decode_is_fast(gpu: GPU, shape: Shape) -> None:
    launch, code = compile_decode(shape, gpu)
    check_fast(launch, code, shape)
    assert code.programs_per_multiprocessor >= RESIDENT, code.summary()


@pytest.mark.parametrize(
    ("gpu", "shape"), [(A100, Shape(32, 8, 72)), (L4, Shape(32, 8, 256))], ids=["sm_80-d72", "sm_89-d256"]
)
def test_prefill_is_fast(gpu: GPU, shape: Shape) -> None:
    check_fast(*compile_prefill(shape, gpu), shape)
