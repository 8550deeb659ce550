# ruff: noqa: N803
"""A kept kernel is the one that Triton's own binder chooses for the same arguments, whatever varies in them."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from quire.kernels import kept_kernels, launching
from quire.kernels.add_rmsnorm import add_rmsnorm
from quire.kernels.cache_write import write_kv
from quire.kernels.decode_plan import build_decode_plan
from quire.kernels.launching import Launch
from quire.kernels.merge_states import merge_states
from quire.kernels.paged_decode import paged_decode
from quire.kernels.paged_prefill import paged_prefill
from quire.kernels.qkv_prologue import qkv_prologue
from quire.kernels.silu_mul import silu_mul

NUM_SAMPLES = 40
NUM_ROUNDS = 3


@triton.jit(do_not_specialize=["wide"], do_not_specialize_on_alignment=["y_ptr", "count"])
def every_kind(
    x_ptr, y_ptr, z_ptr, wide, count, number, factor, stride_x, stride_y, FLAG: tl.constexpr, SIZE: tl.constexpr
):  # type: ignore[no-untyped-def]
    tl.store(x_ptr, count)


class Compiled(CompiledKernel):  # type: ignore[misc]
    """A compiled kernel that notes its launches in place of making them."""

    def __init__(self, key: Any, launches: list[Any]) -> None:
        self.key, self.src, self.name, self.module = key, None, "stub", object()
        self.function, self.packed_metadata = f"function of {key}", f"metadata of {key}"
        self._run = lambda *call: launches.append((self, call))


@dataclass
class Launches:
    """A launch: the compiled kernel, and the arguments of its call. `device` is the current one."""

    made: list[tuple[Compiled, tuple[Any, ...]]] = field(default_factory=list)
    num_bound: int = 0
    device: int = 0
    backend: str = "cuda"

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 100 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32) if self.backend == "cuda" else GPUTarget("hip", "gfx942", 64)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Triton on two GPUs that are not there. Each launch by a Launch is compared with the binder's choice."""
    found = Launches()
    caches: dict[tuple[int, str], Any] = {}
    bind, launch = JITFunction.run, kept_kernels.launch_kept

    def compiled(kernel: JITFunction[Any], key: Any, signature: Any, device: int, *_: Any) -> Compiled:
        cache = kernel.device_caches[device][0]
        cache[key] = Compiled((kernel.fn.__name__, device, key), found.made)
        return cache[key]  # type: ignore[no-any-return]

    def run(kernel: JITFunction[Any], *args: Any, **how: Any) -> Any:
        found.num_bound += 1
        kernel.device_caches = caches.setdefault((id(kernel), found.backend), defaultdict(kernel.create_binder))
        return bind(kernel, *args, **how)

    def checked(kept: Any, kernel: Any, args: Any, *, grid: Any, strides: Any, options: Any) -> None:
        launch(kept, kernel, args, grid=grid, strides=strides, options=options)
        num_bound = found.num_bound
        expected = kernel.run(*args, *strides, grid=grid, warmup=True, **options)
        found.num_bound = num_bound
        made, call = found.made[-1]
        assert made is expected, f"launched {made.key}, the binder's choice is {expected.key}"
        x, y, z, stream, function, metadata = call[:6]
        assert (x, y, z) == (*grid, 1, 1)[:3]
        assert (stream, function, metadata) == (100 + found.device, made.function, made.packed_metadata)
        constants = {name: value for name, value in options.items() if name in kernel.arg_names}
        bound = kernel.signature.bind(*args, *strides, **constants).arguments.values()
        assert all(have is want for have, want in zip(call[9:], bound, strict=True))

    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(launching, "launch_kept", checked)
    monkeypatch.setattr(triton.runtime.driver, "_active", found)
    return found


def tensor(dtype: torch.dtype, offset: int) -> Tensor:
    """Eight numbers, at a multiple of 64 bytes plus `offset` numbers."""
    return torch.zeros(16, dtype=dtype)[offset : offset + 8]


POINTERS = [tensor(dtype, offset) for dtype in (torch.float32, torch.bfloat16, torch.uint8) for offset in (0, 1)]
INTS = [0, 1, 2, 15, 16, 32, 2**31 - 1, 2**31, 2**33 + 1, 2**63, -1, -16, True, False]
NUMBERS = [*INTS, 1.0, 0.5, 0.0, 16.0, None]
PARAMETER = torch.nn.Parameter(tensor(torch.float32, 0), requires_grad=False)
# Of each argument of every_kind that a launch passes: the values that it may have.
VALUES: tuple[list[Any], ...] = (
    POINTERS,
    POINTERS,
    [None, PARAMETER, *POINTERS],
    [1, 16, 17, 2**31],
    INTS,
    NUMBERS,
    [0.5, 1.0, 1, True],
)


def prepare_launches() -> list[Launch]:
    return [
        Launch(grid, strides, {"FLAG": flag, "SIZE": 16, "num_warps": num_warps})
        for grid, strides, flag, num_warps in (
            ((3,), (16, 1), True, 4),
            ((4, 5), (17, 48), True, 4),
            ((4, 5), (16, 1), False, 4),
            ((1, 2, 3), (16, 1), True, 8),
        )
    ]


def test_each_kind_of_argument_launches_what_the_binder_chooses(launches: Launches) -> None:
    """Each argument takes all of its values while the others stay, then all of them vary; twice on each device."""
    generator = random.Random(5)
    first = tuple(values[0] for values in VALUES)
    samples = [(*first[:index], value, *first[index + 1 :]) for index, values in enumerate(VALUES) for value in values]
    samples += [tuple(map(generator.choice, VALUES)) for _ in range(NUM_SAMPLES)]
    prepared = prepare_launches()
    for device in (0, 1, 0, 1):
        launches.device = device
        for launch in prepared:
            for args in samples:
                launch.run(every_kind, *args)
    assert len({made.key for made, _ in launches.made}) > 100
    assert all(len(launch.kept) <= kept_kernels.MAX_KEPT for launch in prepared)


def attention(dtype: torch.dtype, offset: int) -> dict[str, Any]:
    """Arguments for both kernels; every tensor of numbers begins `offset` numbers behind a multiple of 64 bytes."""

    def zeros(*shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        return torch.zeros(size + 8, dtype=dtype)[offset : offset + size].view(shape)

    return {
        "q": zeros(4, 4, 16),
        "k_pool": zeros(3, 16, 2, 16),
        "v_pool": zeros(3, 16, 2, 16),
        "block_tables": torch.ones(4, 1, dtype=torch.int32),
        "seq_lens": torch.ones(4, dtype=torch.int32),
        "scaling": 1.0,
        "sinks": zeros(4) if offset else None,
    }


def launch_all(dtype: torch.dtype, offset: int) -> None:
    given = attention(dtype, offset)
    q, pools = given["q"], {name: given[name] for name in ("k_pool", "v_pool")}
    rows = q.reshape(4, 64)
    add_rmsnorm(rows, rows[0], eps=1e-6, residual=rows if offset else None)
    silu_mul(rows, rows)
    slots = torch.arange(5)[offset : 4 + offset]
    write_kv(q[:, :2], q[:, 2:], **pools, slot_mapping=slots)
    merge_states(torch.zeros(2, 4, 4, 16), torch.zeros(2, 4, 4))
    plan = build_decode_plan(
        given["seq_lens"], block_tables=given["block_tables"], block_size=16, num_programs=2 + offset
    )
    paged_decode(**given, plan=plan)
    paged_prefill(**given, cu_seqlens_q=torch.arange(5, dtype=torch.int32), window=3 if offset else None)
    qkv = torch.zeros(4, 8 * 16 + offset, dtype=dtype)[:, offset:]
    table = None if offset else torch.zeros(8, 16)
    qkv_prologue(qkv, **pools, slot_mapping=slots, positions=torch.arange(4), rope_table=table)


def test_every_launcher_launches_what_the_binder_chooses_and_asks_it_once(launches: Launches) -> None:
    """Addresses that are divisible by 16 and others, tensors that are there and not, dtypes, both devices."""
    cases = [(dtype, offset) for dtype in (torch.float32, torch.bfloat16) for offset in (0, 1)]
    for device in (0, 1):
        launches.device = device
        for case in cases:
            launch_all(*case)
        num_bound, num_made = launches.num_bound, len(launches.made)
        for _ in range(NUM_ROUNDS):
            for case in cases:
                launch_all(*case)
        num_plans = NUM_ROUNDS * len(cases)
        assert launches.num_bound - num_bound == num_plans, "the plan's kernel alone has no Launch"
        assert len(launches.made) - num_made >= 8 * num_plans


def test_hooks_and_other_gpus_go_through_the_binder(launches: Launches) -> None:
    launch, other = prepare_launches()[:2]
    args = tuple(values[0] for values in VALUES)
    for _ in range(3):
        launch.run(every_kind, *args)
    assert launches.num_bound == 1
    seen: list[Any] = []
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        launch.run(every_kind, *args)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert launches.num_bound == 2
    assert launches.made[-1][1][7] is knobs.runtime.launch_enter_hook, "the call has the hook, which Triton runs"
    for hook in (None, lambda _: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(knobs.runtime, "launch_enter_hook", hook)
            launch.run(every_kind, *args)
    assert launches.num_bound == 3, "None is no hook"
    launches.backend = "hip"
    for _ in range(3):
        other.run(every_kind, *args)
    assert launches.num_bound == 6
