"""Traces of three decode steps of each model, for chrome://tracing: python tracing.py SHAPE...

Shapes are names of benchmarks/harness/shapes.py. Each trace is a file trace-SHAPE.json.gz in the folder of the results,
written at once. One that is larger than MAX_BYTES is removed, and the report says so.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from parts import ROOT

sys.path.insert(0, str(ROOT / "benchmarks/harness"))  # in front: this folder has a running.py too
sys.path.insert(0, str(ROOT / "benchmarks/step"))

from cells import Cell, executor_for, make_steps
from shapes import BLOCK_SIZE, shape_of
from torch.profiler import ProfilerActivity, profile

OUTPUT = Path(os.environ.get("QUIRE_TEN_MINUTES") or ROOT / "build/ten-minutes")
NUM_STEPS = 3
NUM_WARM_UP = 3
MAX_BYTES = 4_000_000
SHOWN_KERNELS = 8
CELL = Cell(32, 1024)
TINY_CELL = Cell(2, 16)


def say(line: str) -> None:
    print(f"report: {line}", flush=True)


def trace(short: str) -> None:
    """Run decode steps of a model, and write the trace of the last NUM_STEPS."""
    has_gpu = torch.cuda.is_available()
    shape, cell = shape_of(short), CELL if has_gpu else TINY_CELL
    device, dtype = (torch.device("cuda", 0), torch.bfloat16) if has_gpu else (torch.device("cpu"), torch.float32)
    model = shape.load(dtype=dtype, device=device, max_model_len=cell.num_blocks // cell.num_seqs * BLOCK_SIZE)
    executor = executor_for(model, [cell])
    steps = make_steps(cell, NUM_WARM_UP + NUM_STEPS, vocab_size=shape.config.vocab_size)
    for step in steps[:NUM_WARM_UP]:
        executor.execute(step)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])]
    with profile(activities=activities) as recorded:
        for step in steps[NUM_WARM_UP:]:
            executor.execute(step)
    path = OUTPUT / f"trace-{short}.json.gz"
    recorded.export_chrome_trace(str(path))
    say_kernels(f"{short}, {cell.name}", json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
    num_bytes = path.stat().st_size
    if num_bytes > MAX_BYTES:
        path.unlink()
        say(f"{path.name}: removed, {num_bytes / 1e6:.1f} MB are more than {MAX_BYTES / 1e6:.0f}")
    else:
        say(f"{path.name}: {NUM_STEPS} steps, {num_bytes / 1e6:.2f} MB")


def say_kernels(name: str, events: list[dict[str, Any]]) -> None:
    """Say how long the GPU was busy in a step, and with what."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if not kernels:
        say(f"{name}: no kernels, {len(events)} events")
        return
    begin, end = min(each["ts"] for each in kernels), max(each["ts"] + each["dur"] for each in kernels)
    busy = sum(each["dur"] for each in kernels)
    say(
        f"{name}: {len(kernels) / NUM_STEPS:.0f} kernels a step, busy for {busy / NUM_STEPS / 1e3:.3f} ms of it, "
        f"{busy / (end - begin):.0%} of the time"
    )
    times: Counter[str] = Counter()
    for each in kernels:
        times[each["name"][:60]] += each["dur"]
    for kernel, taken in times.most_common(SHOWN_KERNELS):
        count = sum(each["name"][:60] == kernel for each in kernels)
        say(f"{name}: {taken / NUM_STEPS:.0f} us a step in {count / NUM_STEPS:.0f} × {kernel}")


def main() -> int:
    OUTPUT.mkdir(parents=True, exist_ok=True)
    os.environ["QUIRE_VERIFY"] = "0"  # which waits for each step
    for short in sys.argv[1:]:
        trace(short)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
