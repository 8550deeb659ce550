"""The kernels compiled for an A100, L4, H100, B200 and RTX 5090, with the tiles that launchers choose for each.

Whatever is compiled has to fit the GPU's shared memory; keys of 16 bits and fp8 are meant to be fast. Head dims that
share a tile differ only in masks and strides: three GPUs stand for the others. float16 differs from bfloat16 by a few
conversions: one GPU stands for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from compiled_attention import LONG, META, SHORT, check_fast, check_fits, compile_decode, compile_prefill
from kernel_batch import Batch, Shape
from machine_code import A100, B200, GPU, GPUS, H100, L4, RTX_5090, compile_launch, recorded
from samples import others_at_night

from quire.kernels.decode_plan import RESIDENT

FP8 = torch.float8_e4m3fn
LLAMA = Shape(32, 8, 128)


def attention_matrix() -> Iterator[tuple[GPU, Shape]]:
    """Shapes on each GPU, without what another one of them stands for."""
    for gpu in GPUS:
        for head_dim in (64, 128, 256):
            yield gpu, replace(LLAMA, head_dim=head_dim)
    for gpu, head_dims in ((L4, (128,)), (H100, (128,)), (B200, (128, 256)), (RTX_5090, (128, 256))):
        for head_dim in head_dims:
            yield gpu, replace(LLAMA, head_dim=head_dim, kv_dtype=FP8)
    for gpu, head_dims in ((RTX_5090, (72, 120, 192)), (H100, (72,)), (A100, (120,))):
        for head_dim in head_dims:
            yield gpu, replace(LLAMA, head_dim=head_dim)
    yield RTX_5090, replace(LLAMA, dtype=torch.float16)
    yield RTX_5090, replace(LLAMA, head_dim=120, kv_dtype=FP8)


def name(value: object) -> str:
    if isinstance(value, GPU):
        return value.arch
    if isinstance(value, bool):
        return "reordered" if value else "in-order"
    if isinstance(value, int):
        return f"d{value}"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    assert isinstance(value, Shape)
    dtypes = [str(dtype).removeprefix("torch.") for dtype in (value.dtype, value.kv_dtype) if dtype is not None]
    return "-".join([f"d{value.head_dim}", *dtypes])


def is_by_day(gpu: GPU, shape: Shape) -> bool:
    """Every head dim on one GPU, in each dtype, and every GPU with one head dim."""
    return gpu is RTX_5090 or shape == LLAMA


MATRIX = list(attention_matrix())
ATTENTION = pytest.mark.parametrize(
    ("gpu", "shape"), others_at_night(MATRIX, [each for each in MATRIX if is_by_day(*each)]), ids=name
)


@ATTENTION
def test_decode_is_fast(gpu: GPU, shape: Shape) -> None:
    """And as many programs as a plan has for each multiprocessor run on it at once."""
    launch, code = compile_decode(shape, gpu)
    check_fast(launch, code, shape)
    assert code.programs_per_multiprocessor >= RESIDENT, code.summary()


@ATTENTION
def test_prefill_is_fast(gpu: GPU, shape: Shape) -> None:
    check_fast(*compile_prefill(shape, gpu, num_tokens=LONG), shape)


@pytest.mark.parametrize("gpu", [A100, L4, RTX_5090], ids=name)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_prefill_of_short_prompts_is_fast(gpu: GPU, head_dim: int) -> None:
    """Tiles of 64 rows; those of 256 dims are the ones of long prompts too, but for Hopper and B200."""
    shape = replace(LLAMA, head_dim=head_dim)
    check_fast(*compile_prefill(shape, gpu, num_tokens=SHORT), shape)


@pytest.mark.parametrize(("gpu", "head_dim"), [(L4, 256), (H100, 128), (H100, 256)], ids=name)
def test_attention_in_float32_fits(gpu: GPU, head_dim: int) -> None:
    """With the least and the most shared memory. It has no tensor cores, so it is slow anyway."""
    shape = replace(LLAMA, head_dim=head_dim, dtype=torch.float32)
    for _, code in (compile_decode(shape, gpu), compile_prefill(shape, gpu)):
        check_fits(code)
        assert code.count(r"LDGSTS") == code.count(r"LDGSTS.*\.128") > 0, code.summary()


SMALL: dict[str, Callable[[Batch], object]] = {
    "plan": Batch.plan,
    "merge": Batch.merge,
    "write": Batch.write,
    "prologue": Batch.prologue,
    "norm": Batch.norm,
    "activation": Batch.activation,
    "update": Batch.update,
    "sample": Batch.sample,
    "draw": Batch.draw,
    "copy": lambda batch: batch.copy([1], [2]),
    "offload": lambda batch: batch.offload([1, 2, 3, 4]),
}
MOVES_ROWS = ("write_kv_kernel", "qkv_prologue_kernel", "merge_states_kernel")


def check_small(work: Callable[[], object], gpu: GPU) -> None:
    for launch in {launch.key: launch for launch in recorded(work, gpu)}.values():
        if launch.name in ("paged_decode_kernel", "paged_prefill_kernel"):
            continue
        code = compile_launch(launch)
        check_fits(code)
        assert code.spills == 0, f"{launch.name}: {code.summary()}"
        if launch.name in MOVES_ROWS:
            assert code.count(r"(LDG|STG)\..*(U8|U16)") == 0, f"{launch.name} moves single elements"


@pytest.mark.parametrize("gpu", [A100, RTX_5090], ids=name)
@pytest.mark.parametrize("kernels", SMALL)
def test_small_kernels_do_not_spill(kernels: str, gpu: GPU) -> None:
    """For the first and last architecture; kernels/test_machine_code.py does it for the H100."""
    batch = Batch(replace(LLAMA, has_qk_norm=True, num_layers=4), (1,) * 8, (1000,) * 8, META)
    check_small(lambda: SMALL[kernels](batch), gpu)


@pytest.mark.parametrize("kernels", ["merge", "write", "prologue"])
def test_rows_of_a_head_dim_that_16_does_not_divide_are_moved_in_pieces_of_16_bytes(kernels: str) -> None:
    batch = Batch(replace(LLAMA, head_dim=120), (1,) * 8, (1000,) * 8, META)
    check_small(lambda: SMALL[kernels](batch), H100)


def check_packed_product(multiply: Callable[[], object], gpu: GPU) -> None:
    """The sum is split, weights are in flight, and matrix instructions multiply."""
    (launch,) = recorded(multiply, gpu)
    assert launch.constant("SPLIT") > 1
    code = compile_launch(launch)
    check_fits(code)
    assert code.spills <= 2, code.summary()
    assert code.count("HMMA") > 0, code.summary()
    (loop,) = code.copy_loops
    assert (loop.copies_outstanding or 0) >= 4, code.summary()
    assert code.count(r"LDGSTS.*\.128") > 0, code.summary()


INT4 = [(gpu, num_rows, is_reordered) for gpu in GPUS for num_rows in (1, 32) for is_reordered in (False, True)]


@pytest.mark.parametrize(
    ("gpu", "num_rows", "is_reordered"),
    others_at_night(INT4, [(RTX_5090, 1, False), (H100, 32, False), (A100, 1, True)]),
    ids=name,
)
def test_products_of_4_bits_keep_weights_in_flight_and_use_matrix_instructions(
    gpu: GPU, num_rows: int, is_reordered: bool
) -> None:
    batch = Batch(replace(LLAMA, hidden=1024, intermediate=4096), (1,) * num_rows, (100,) * num_rows, META)
    check_packed_product(lambda: batch.int4_product(is_reordered=is_reordered), gpu)


@pytest.mark.parametrize("gpu", others_at_night(GPUS, [A100]), ids=name)
def test_a_weight_of_4_bits_is_dequantized_without_spills(gpu: GPU) -> None:
    batch = Batch(replace(LLAMA, hidden=1024, intermediate=4096), (1,), (100,), META)
    check_small(batch.int4_dequantized, gpu)


SCALED = [(gpu, num_rows, FP8) for gpu in (L4, H100, B200, RTX_5090) for num_rows in (1, 32)]
SCALED += [(gpu, num_rows, torch.int8) for gpu in GPUS for num_rows in (1, 32)]
SCALED_BY_DAY = [(L4, 1, FP8), (H100, 32, FP8), (A100, 1, torch.int8)]


@pytest.mark.parametrize(("gpu", "num_rows", "dtype"), others_at_night(SCALED, SCALED_BY_DAY), ids=name)
def test_products_of_8_bits_keep_weights_in_flight_and_use_matrix_instructions(
    gpu: GPU, num_rows: int, dtype: torch.dtype
) -> None:
    batch = Batch(replace(LLAMA, hidden=1024, intermediate=4096), (1,) * num_rows, (100,) * num_rows, META)
    check_packed_product(lambda: batch.scaled_product(dtype), gpu)
    check_small(lambda: batch.scaled_dequantized(dtype), gpu)


@pytest.mark.parametrize("gpu", others_at_night([L4, H100, B200, RTX_5090], [L4]), ids=name)
def test_rows_in_float8_are_written_without_spills(gpu: GPU) -> None:
    """An A100 has neither the type nor products of it."""
    batch = Batch(LLAMA, (1,) * 8, (1000,) * 8, META)
    assert len(recorded(batch.write_float8, gpu)) == 3
    check_small(batch.write_float8, gpu)
