"""The host's time to launch each kernel: checks, choices and arguments, through Triton's binder and with kept kernels.

Without a GPU Triton's driver has a stand-in, no kernel is compiled, and the call of a compiled kernel does nothing: the
times are those of Python alone. On a GPU the call is real, and the device works beside the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from quire.kernels import launching
from quire.kernels.add_rmsnorm import add_rmsnorm
from quire.kernels.decode_plan import build_decode_plan
from quire.kernels.paged_decode import paged_decode
from quire.kernels.paged_prefill import paged_prefill
from quire.kernels.qkv_prologue import qkv_prologue
from quire.kernels.silu_mul import silu_mul

NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE = 16, 16, 8, 128, 1024, 3072
NUM_BLOCKS, BLOCK_SIZE = 8, 16


@dataclass(frozen=True, slots=True)
class HostTime:
    """Microseconds of the host's processor for one launch of a kernel, the least of several windows."""

    kernel: str
    bound_us: float
    kept_us: float


class StandInDriver:
    """A driver of Triton for one H100 that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]

        return GPUTarget("cuda", 90, 32)


@contextmanager
def nothing_launched() -> Iterator[None]:
    """Let Triton take a kernel that does nothing for the compilation of each one, if there is no GPU."""
    if torch.cuda.is_available():
        yield
        return
    import triton  # type: ignore[import-untyped]
    from triton.compiler import CompiledKernel  # type: ignore[import-untyped]
    from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

    class Nothing(CompiledKernel):  # type: ignore[misc]
        def __init__(self) -> None:
            self.src, self.name, self.module, self.function, self.packed_metadata = None, "", object(), 0, ()
            self._run = lambda *_: None

    def compiled(kernel: Any, key: Any, signature: Any, device: int, *_: Any) -> Nothing:
        return kernel.device_caches[device][0].setdefault(key, Nothing())  # type: ignore[no-any-return]

    with (
        mock.patch.object(triton.runtime.driver, "_active", StandInDriver()),
        mock.patch.object(JITFunction, "_do_compile", compiled),
    ):
        yield


def through_the_binder(_: Any, kernel: Any, args: Any, *, grid: Any, strides: Any, options: Any) -> None:
    """Launch as before there were kept kernels."""
    kernel[grid](*args, *strides, **options)


def make_launches(device: torch.device) -> dict[str, Callable[[], object]]:
    """The launches of a mixed step's layer in the sizes of Qwen3 0.6B; paged_decode is two."""

    def numbers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)

    x, residual, weight = numbers(NUM_TOKENS, HIDDEN), numbers(NUM_TOKENS, HIDDEN), numbers(HIDDEN)
    gate, up = numbers(NUM_TOKENS, 2 * INTERMEDIATE).chunk(2, -1)
    pools = {name: numbers(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM) for name in ("k_pool", "v_pool")}
    qkv = numbers(NUM_TOKENS, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    per_token = {
        "slot_mapping": torch.arange(BLOCK_SIZE, BLOCK_SIZE + NUM_TOKENS, device=device),
        "positions": torch.arange(NUM_TOKENS, device=device),
    }
    norms = {"q_norm_weight": numbers(HEAD_DIM), "k_norm_weight": numbers(HEAD_DIM)}
    rope = torch.zeros(64, HEAD_DIM, device=device)
    q, out = numbers(NUM_TOKENS, NUM_HEADS, HEAD_DIM), numbers(NUM_TOKENS, NUM_HEADS, HEAD_DIM)

    def sequences(count: int) -> dict[str, Tensor]:
        return {
            "block_tables": torch.ones(count, 4, dtype=torch.int32, device=device),
            "seq_lens": torch.full((count,), 17, dtype=torch.int32, device=device),
        }

    prompt, decodes = sequences(1), sequences(NUM_TOKENS)
    starts = torch.tensor([0, NUM_TOKENS], dtype=torch.int32, device=device)
    plan = build_decode_plan(
        decodes["seq_lens"], block_tables=decodes["block_tables"], block_size=BLOCK_SIZE, num_programs=264
    )
    return {
        "add_rmsnorm": lambda: add_rmsnorm(x, weight, eps=1e-6, residual=residual),
        "qkv_prologue": lambda: qkv_prologue(qkv, **pools, **per_token, **norms, rope_table=rope, eps=1e-6),
        "paged_prefill": lambda: paged_prefill(q, **pools, **prompt, cu_seqlens_q=starts, scaling=1.0, out=out),
        "paged_decode": lambda: paged_decode(q, **pools, **decodes, plan=plan, scaling=1.0, out=out),
        "silu_mul": lambda: silu_mul(gate, up),
    }


def measure_host_times(*, num_launches: int, num_windows: int) -> list[HostTime]:
    """Measure both ways in turns; nothing in Triton's interpreter, which has no binder."""
    if launching.INTERPRET:
        return []
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    times = []
    with nothing_launched():
        for name, launch in make_launches(device).items():
            bound, kept = [], []
            for _ in range(num_windows):
                with mock.patch.object(launching, "launch_kept", through_the_binder):
                    bound.append(_us_of_one(launch, num_launches))
                kept.append(_us_of_one(launch, num_launches))
            times.append(HostTime(name, round(min(bound), 2), round(min(kept), 2)))
    return times


def _us_of_one(launch: Callable[[], object], count: int) -> float:
    launch()
    start = time.thread_time()
    for _ in range(count):
        launch()
    taken = time.thread_time() - start
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1e6 * taken / count
