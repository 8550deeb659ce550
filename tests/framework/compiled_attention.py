"""The attention kernels compiled as launchers would on a given GPU, and the checks of those meant to be fast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from kernel_batch import Batch, Shape
from machine_code import GPU, Launch, MachineCode, compile_launch, recorded

META = torch.device("meta")
LONG, SHORT = 2048, 20
"""Tokens of prompts that fill tiles of 128 and of 64 rows."""


def compile_decode(shape: Shape, gpu: GPU) -> tuple[Launch, MachineCode]:
    batch = Batch(shape, (1,) * 8, (1000,) * 8, META)
    return _compile_one(lambda: batch.decode(batch.plan()), "paged_decode_kernel", gpu)


def compile_prefill(shape: Shape, gpu: GPU, *, num_tokens: int = LONG) -> tuple[Launch, MachineCode]:
    return _compile_one(Batch(shape, (num_tokens,), (num_tokens,), META).prefill, "paged_prefill_kernel", gpu)


def _compile_one(work: Callable[[], object], kernel: str, gpu: GPU) -> tuple[Launch, MachineCode]:
    (launch,) = {launch.key: launch for launch in recorded(work, gpu) if launch.name == kernel}.values()
    code = compile_launch(launch)
    print(kernel, code.summary())
    return launch, code


def check_fits(code: MachineCode) -> None:
    """A program can have its shared memory on the GPU it is compiled for."""
    assert code.shared_bytes <= code.gpu.limits.shared_memory_bytes, code.summary()


def check_fast(launch: Launch, code: MachineCode, shape: Shape) -> None:
    """It fits, nothing is spilled, and a tile or more is in flight, in copies of 16 bytes (of fp8 8 elements)."""
    check_fits(code)
    assert code.spills == 0, code.summary()
    assert code.count(r"LDG\..*(U8|U16|S8|S16)") == 0, f"loads of single elements: {code.summary()}"
    assert code.copy_loops, f"no loop copies keys asynchronously: {code.summary()}"
    if launch.options["num_stages"] > 2:
        assert all(loop.copies_outstanding for loop in code.copy_loops), code.summary()
    if (shape.kv_dtype or shape.dtype).itemsize > 1:
        assert code.count(r"LDGSTS") == code.count(r"LDGSTS.*\.128"), f"copies below 16 bytes: {code.summary()}"


def instructions_per_cycle(launch: Launch, code: MachineCode, shape: Shape) -> float:
    """Instructions of decode's loop over keys, per cycle of each of a multiprocessor's 4 schedulers, on an H200.

    Memory: 4.3 TB/s, the rate of a copy there; 1.755 GHz is its clock under load; a scheduler issues one a cycle at
    most. The instructions of masks are counted, though most tiles skip them.
    """
    (loop,) = code.copy_loops
    row_bytes = 2 * shape.head_dim * (shape.kv_dtype or shape.dtype).itemsize  # of a key and a value
    bytes_per_cycle = 4.3e12 / 132 / 1.755e9
    cycles = launch.constant("BLOCK_N") * row_bytes / bytes_per_cycle
    return len(loop.instructions) * code.num_warps / 4 / cycles
