"""The GPU's rates: reading, a copy by a kernel and by the driver, and a large matrix product, short and for seconds.

    quire bench kernels rates

The bounds of all other figures follow from these. The product runs in a burst, and then for three seconds, with the
clocks that nvidia-smi tells before and after: a GPU that gets slower under load has a lower bound for whole workloads.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from typing import Any

if "--quick" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch
import triton
import triton.language as tl
from report import Findings, benchmark, summary, table
from rich.progress import Progress
from timing import Clock, DryClock, GraphClock, read_stream
from torch import Tensor

COPY_BYTES, QUICK_BYTES = 4 << 30, 1 << 14
PRODUCT_SIZE, QUICK_SIZE = 8192, 32
SUSTAINED_S, QUICK_S = 3.0, 0.01
CLOCKS = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"


@triton.jit
def _copy(
    source_ptr,  # [num_words] int32
    target_ptr,  # [num_words] int32
    WORDS: tl.constexpr,  # noqa: N803
):
    """Each program copies one piece."""
    at = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    tl.store(target_ptr + at, tl.load(source_ptr + at))


def copy_stream(source: Tensor, target: Tensor, *, words_per_program: int = 4096) -> None:
    """Copy every word by a kernel.

    source, target  [n]   int32, n a multiple of words_per_program
    """
    _copy[(source.shape[0] // words_per_program,)](source, target, WORDS=words_per_program, num_warps=8)


def memory_rates(clock: Clock, device: torch.device, *, num_bytes: int, words_per_program: int) -> dict[str, Any]:
    """GB/s of reading, of a copy by a kernel, and of torch's copy: a memcpy in a graph. Both directions count."""
    source = torch.ones(num_bytes // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    sums = torch.empty(8 * 132, dtype=torch.int32, device=device)
    calls = {
        "read_gb_s": (1, lambda: read_stream(source, sums, words_per_program=words_per_program)),
        "copy_gb_s": (2, lambda: copy_stream(source, target, words_per_program=words_per_program)),
        "memcpy_gb_s": (2, lambda: target.copy_(source)),
    }
    return {
        name: summary([times * source.nbytes / each / 1e3 for each in clock.measure([call])])
        for name, (times, call) in calls.items()
    }


def product_rates(device: torch.device, dtype: torch.dtype, *, size: int, seconds: float) -> dict[str, Any]:
    """TFLOP/s of a product of two [size, size] matrices: each of a burst, then each tenth of `seconds`."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    one = timed(lambda: torch.mm(a, b, out=out), device, times=3)
    burst = [timed(lambda: torch.mm(a, b, out=out), device, times=1) for _ in range(10)]
    times = max(1, round(seconds / 10 / max(one, 1e-6)))
    sustained = [timed(lambda: torch.mm(a, b, out=out), device, times=times) for _ in range(10)]
    flops = 2 * size**3 / 1e12
    return {
        "product_burst_tflop_s": summary([flops / each for each in burst]),
        "product_sustained_tflop_s": summary([flops / each for each in sustained]),
        "sustained_over_burst": round(statistics.median(burst) / statistics.median(sustained), 4),
    }


def timed(call: Any, device: torch.device, *, times: int) -> float:
    """Return seconds a call."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / times


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clocks() -> str:
    """Return what nvidia-smi tells of the clocks, or why it tells nothing."""
    command = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"


def measure(quick: bool, progress: Progress) -> Findings:
    device = torch.device("cuda" if torch.cuda.is_available() and not quick else "cpu")
    on_gpu = device.type == "cuda"
    clock: Clock = GraphClock() if on_gpu else DryClock()
    task = progress.add_task("memory", total=2)
    before = clocks() if on_gpu else ""
    memory: dict[str, Any] = {}
    if on_gpu or quick:
        num_bytes, words = (COPY_BYTES, 4096) if on_gpu else (QUICK_BYTES, 64)
        memory = memory_rates(clock, device, num_bytes=num_bytes, words_per_program=words)
    progress.update(task, advance=1, description="products")
    size, seconds = (PRODUCT_SIZE, SUSTAINED_S) if on_gpu else (QUICK_SIZE, QUICK_S)
    products = product_rates(device, torch.bfloat16, size=size, seconds=seconds)
    progress.advance(task)
    found = memory | products
    figures = {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        **found,
        "clocks": {"before": before, "after": clocks() if on_gpu else ""},
    }
    return Findings([shown(found)], figures, notes=[f"nvidia-smi's {CLOCKS}: {figures['clocks']}."])


def shown(found: dict[str, Any]) -> Any:
    made = table("rates", "", "median", "least", "most")
    for name, each in found.items():
        if isinstance(each, dict):
            made.add_row(name, *(f"{each[key]:,.4g}" for key in ("median", "min", "max")))
    return made


main = benchmark("kernels rates", measure, packages=("torch", "triton"))

if __name__ == "__main__":
    main()
