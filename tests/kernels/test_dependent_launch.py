"""Programmatic dependent launch: each kernel that may be launched so waits before it accesses what others write.

Compiled for Hopper, read, and not run.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from compiled_attention import META
from early_accesses import NoWait, early_accesses, machine_accesses
from kernel_batch import Batch, Shape
from machine_code import A100, B200, H100, MachineCode, compile_launch, recorded
from torch import Tensor

import quire.kernels
from quire.kernels import dependent_launch
from quire.kernels.dependent_launch import (
    IS_DEFAULT,
    dependent_options,
    prefetch,
    use_dependent_launches,
    wait_for_earlier_kernels,
)
from quire.kernels.fixed_linear import fixed_linear
from quire.kernels.int4_linear import int4_linear
from quire.kernels.ring_layout import RingLayout
from quire.kernels.scaled_linear import scaled_linear
from quire.kernels.skinny_linear import SkinnyWorkspace, skinny_linear
from quire.kernels.skinny_tiling import Form
from quire.kernels.step_ring import StepMemory, begin_step, end_step

CONSTANTS: dict[str, set[str]] = {
    "add_rmsnorm_kernel": {"%weight_ptr"},
    "qkv_prologue_kernel": {"%q_weight_ptr", "%k_weight_ptr"},
    "skinny_gemv_kernel": {"%weight_ptr", "%norm_ptr"},
    "skinny_dot_kernel": {"%weight_ptr"},
}
"""Pointers that a kernel may load or prefetch from before it waits: no kernel of a step writes there."""

NEVER_DEPENDENT = {
    "offload_kernel": "copies beside the steps, on a stream of its own",
}
"""Kernels that are launched when all before them have ended, and why."""


def multiply(batch: Batch, form: Form) -> None:
    """A product with what stands beside it, and one of gates and ups. Of the dot form, sums are split."""
    x, residual, norm_weight = batch.hidden
    norm_weight = norm_weight if form == "gemv" else None
    common: dict[str, Any] = {"form": form, "norm_weight": norm_weight, "workspace": large_workspace()}
    skinny_linear(x, x.new_empty(x.shape[1], x.shape[1]), residual=residual, **common)
    skinny_linear(x, x.new_empty(2048, x.shape[1]), gated=True, **common)


def multiply_4_bits(batch: Batch) -> None:
    x = batch.gate_up[:, : batch.shape.intermediate]
    int4_linear(x, batch.int4_weight(), workspace=large_workspace())


def multiply_8_bits(batch: Batch) -> None:
    x = batch.gate_up[:, : batch.shape.intermediate]
    scaled_linear(x, batch.scaled_weight(), workspace=large_workspace())


def large_workspace() -> SkinnyWorkspace:
    parts, tickets = (torch.empty(1 << 24, dtype=dtype, device=META) for dtype in (torch.float32, torch.int32))
    return SkinnyWorkspace(parts, tickets)


def multiply_in_fixed_tiles(batch: Batch) -> None:
    x, residual, _ = batch.hidden
    fixed_linear(x, x.new_empty(x.shape[1], x.shape[1]), residual=residual)
    fixed_linear(x, x.new_empty(2048, x.shape[1]), gated=True)


def take_turn() -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    layout = RingLayout(num_slots=4, max_num_seqs=8, num_inputs=6, temperature=4, first_slot=5, max_changes=64)
    memory = StepMemory(
        inputs=empty(6, 8),
        token_ids=empty(8),
        block_tables=empty(1, 8, 32, dtype=torch.int32),
        seq_lens=empty(8, dtype=torch.int32),
        temperature=empty(8, dtype=torch.float32),
        sampled=empty(8),
        tables=empty(1, 9, 32, dtype=torch.int32),
        last_token=empty(9),
        state=empty(2),
    )
    begin_step(empty(4, layout.slot_words), memory, layout=layout, num_seqs=8, block_size=16)
    end_step(empty(4, 8), memory, layout=layout, num_seqs=8)


SHAPE = replace(Shape(16, 8, 128, has_qk_norm=True), vocab_size=4096)
WORK: dict[str, Callable[[Batch], object]] = {
    "add_rmsnorm_kernel": Batch.norm,
    "silu_mul_kernel": Batch.activation,
    "qkv_prologue_kernel": Batch.prologue,
    "write_kv_kernel": Batch.write,
    "block_copy_kernel": lambda batch: batch.copy([1], [2]),
    "decode_plan_kernel": Batch.plan,
    "survey_kernel": Batch.sample,
    "bracket_kernel": Batch.sample,
    "collect_kernel": Batch.sample,
    "choose_kernel": Batch.sample,
    "pick_kernel": Batch.sample,
    "draw_kernel": Batch.draw,
    "paged_decode_kernel": lambda batch: batch.decode(batch.plan()),
    "paged_prefill_kernel": Batch.prefill,
    "merge_states_kernel": Batch.merge,
    "skinny_gemv_kernel": lambda batch: multiply(batch, "gemv"),
    "skinny_dot_kernel": lambda batch: multiply(batch, "dot"),
    "fixed_linear_kernel": multiply_in_fixed_tiles,
    "lora_shrink_kernel": Batch.update,
    "lora_expand_kernel": Batch.update,
    "int4_linear_kernel": multiply_4_bits,
    "int4_dequantize_kernel": Batch.int4_dequantized,
    "scaled_linear_kernel": multiply_8_bits,
    "scaled_dequantize_kernel": Batch.scaled_dequantized,
    "float8_rows_kernel": Batch.write_float8,
    "silu_mul_float8_kernel": Batch.write_float8,
    "begin_step_kernel": lambda _: take_turn(),
    "end_step_kernel": lambda _: take_turn(),
}


@pytest.fixture
def dependent() -> Iterator[None]:
    use_dependent_launches(True)
    yield
    use_dependent_launches(IS_DEFAULT)


def make_batch() -> Batch:
    return Batch(SHAPE, (1,) * 8, (1000,) * 8, META)


def kernels_of_the_package() -> dict[str, Any]:
    kernels = {}
    for module in pkgutil.iter_modules(quire.kernels.__path__):
        for name, value in vars(importlib.import_module(f"quire.kernels.{module.name}")).items():
            if name.endswith("_kernel") and hasattr(value, "arg_names"):
                kernels[name] = value
    return kernels


def check(code: MachineCode, constants: set[str]) -> None:
    accesses = early_accesses(code.ir)
    assert set(accesses) <= {"tt.load", "prefetch"}, f"it writes before it waits: {sorted(accesses)}"
    sources = set().union(*accesses.values())
    assert sources <= constants, f"it loads from {sorted(sources - constants)} before it waits"
    early = machine_accesses([each.opcode for each in code.instructions])
    assert all(opcode.startswith(("LDG", "CCTL.E.PF2")) for opcode in early), (
        f"the machine code has {early} in front of the wait"
    )
    assert bool(early) == bool(constants), f"the machine code has {early} in front of the wait"


def test_every_kernel_waits_or_is_declared_never_to_be_launched_so() -> None:
    kernels = kernels_of_the_package()
    waiting = {name for name, kernel in kernels.items() if "PDL" in kernel.arg_names}
    assert waiting == set(WORK), "each of these is compiled and read below"
    assert set(kernels) - waiting == set(NEVER_DEPENDENT)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.sample if "norm" in name else ()) for name in WORK]
)
def test_a_kernel_waits_before_it_accesses_what_others_write(name: str, dependent: None) -> None:
    batch = make_batch()
    launches = {launch.key: launch for launch in recorded(lambda: WORK[name](batch)) if launch.name == name}
    assert launches
    for launch in launches.values():
        assert launch.constant("PDL")
        assert launch.options["launch_pdl"]
        code = compile_launch(launch)
        print(name, code.summary())
        assert code.spills == 0
        check(code, CONSTANTS.get(name, set()))


def test_products_with_matrix_instructions_ask_for_the_weights_of_their_first_copies_early(dependent: None) -> None:
    """All bytes of the tiles that the loop's first copies are of, before the wait; the copies begin behind it."""
    launches = [each for each in recorded(lambda: multiply(make_batch(), "dot")) if each.name == "skinny_dot_kernel"]
    for launch in launches:
        code = compile_launch(launch)
        opcodes = [each.opcode for each in code.instructions]
        early = machine_accesses(opcodes)
        asked = len(early) * 32 * launch.options["num_warps"] * 128
        sizes = [launch.constant(name) for name in ("STAGES", "OUTPUTS", "INPUTS")]
        assert asked == math.prod(sizes) * SHAPE.dtype.itemsize * (1 + launch.constant("GATED"))
        assert "LDGSTS" not in "".join(early)


@triton.jit
def late_kernel(x_ptr, weight_ptr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    x = tl.load(x_ptr + tl.program_id(0))
    wait_for_earlier_kernels(PDL)
    tl.store(x_ptr + tl.program_id(0), x + tl.load(weight_ptr))


@triton.jit
def storing_kernel(x_ptr, weight_ptr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    tl.store(x_ptr + tl.program_id(0), 0)
    wait_for_earlier_kernels(PDL)
    tl.store(x_ptr + tl.program_id(0), tl.load(weight_ptr))


@triton.jit
def indirect_kernel(x_ptr, weight_ptr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    begin = 0
    if tl.program_id(0) > 3:
        begin = tl.load(x_ptr)
    weight = tl.load(weight_ptr + begin)
    wait_for_earlier_kernels(PDL)
    tl.store(x_ptr + tl.program_id(0), weight)


@triton.jit
def prefetching_kernel(x_ptr, weight_ptr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    prefetch(x_ptr + tl.arange(0, 32))
    weight = tl.load(weight_ptr)
    wait_for_earlier_kernels(PDL)
    tl.store(x_ptr + tl.program_id(0), weight)


@triton.jit
def branching_kernel(x_ptr, weight_ptr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    if tl.program_id(0) > 3:
        wait_for_earlier_kernels(PDL)
    tl.store(x_ptr + tl.program_id(0), tl.load(weight_ptr))


@triton.jit
def returning_kernel(x_ptr, weight_ptr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    if tl.program_id(0) > 3:
        return
    wait_for_earlier_kernels(PDL)
    tl.store(x_ptr + tl.program_id(0), tl.load(weight_ptr))


@triton.jit
def waitless_kernel(x_ptr, weight_ptr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    tl.store(x_ptr + tl.program_id(0), tl.load(weight_ptr))


@pytest.mark.parametrize(
    ("kernel", "complaint"),
    [
        (late_kernel, "it loads from .*%x_ptr"),
        (storing_kernel, "it writes before it waits"),
        (indirect_kernel, "it loads from .*%x_ptr"),
        (prefetching_kernel, "it loads from .*%x_ptr"),
        (branching_kernel, "branch"),
        (returning_kernel, "before it waits"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_kernels_are_found(kernel: Any, complaint: str, dependent: None) -> None:
    x, weight = (torch.empty(64, dtype=torch.int32, device="meta") for _ in range(2))
    options = dependent_options(kernel, x.device)
    (launch,) = recorded(lambda: kernel[(8,)](x, weight, **options))
    with pytest.raises((AssertionError, NoWait), match=complaint):
        check(compile_launch(launch), {"%weight_ptr"})


def test_a_kernel_without_a_wait_can_not_be_launched_so(dependent: None) -> None:
    with pytest.raises(TypeError, match="waitless_kernel has no wait_for_earlier_kernels"):
        dependent_options(waitless_kernel, torch.device("meta"))


def test_nothing_else_launches_so() -> None:
    sources = Path(dependent_launch.__file__).parents[3].glob("*/quire/**/*.py")
    users = [path.name for path in sources if "launch_pdl" in path.read_text()]
    assert users == ["dependent_launch.py"]


def test_it_is_off_by_default_and_where_the_architecture_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch()

    def is_dependent(gpu: Any) -> bool:
        (launch,) = recorded(batch.norm, gpu)
        assert launch.constant("PDL") == launch.options["launch_pdl"]
        return bool(launch.options["launch_pdl"])

    assert not is_dependent(H100)
    use_dependent_launches(True)
    try:
        assert [is_dependent(gpu) for gpu in (A100, H100, B200)] == [False, True, True]
        with monkeypatch.context() as patch:
            patch.setattr(torch.version, "hip", "7.0")
            assert not is_dependent(H100)
            dependent_launch.forget_prepared()
    finally:
        use_dependent_launches(IS_DEFAULT)
