# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""Programmatic dependent launch: a kernel is started while the kernel in front of it still runs.

Such a kernel may load weights at once. It must wait before its first access to memory that an earlier kernel reads or
writes, in each of its programs. Then the kernel in front has ended, and so have all before it, as each of them waited.
A kernel without a wait must not be launched so: it would race with the kernel in front.

A kernel takes part in two places:

    in the kernel       a last parameter `PDL: tl.constexpr`, and the line `wait_for_earlier_kernels(PDL)`: at the top
                        level, behind loads of weights and in front of all other loads and stores
    in its launcher     **dependent_options(kernel, device) among the options of the launch

Nothing else passes launch_pdl to Triton, and dependent_options refuses a kernel without that line.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.launching import INTERPRET, device_limits, forget_prepared, prepared_once

IS_DEFAULT = False
"""Off until it is measured on a GPU."""

LEAST_CAPABILITY = (9, 0)
WAIT = "wait_for_earlier_kernels(PDL)"

_is_used = IS_DEFAULT


@triton.jit
def wait_for_earlier_kernels(PDL: tl.constexpr):
    """Wait until all that earlier kernels wrote can be read, and all that they read be written; then let the next
    kernel start. Without PDL it is nothing.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """Ask for the 128 bytes at each of the addresses into the second-level cache. Not in the interpreter.

    No thread waits for them, and no register holds them. In front of the wait the same holds of them as of loads.
    """
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def use_dependent_launches(is_used: bool) -> None:
    """Launch so from now on, or no longer, where the device can. Graphs that were captured before stay as they are."""
    global _is_used
    _is_used = is_used
    forget_prepared()


def dependent_options(kernel: Any, device: torch.device) -> dict[str, bool]:
    """Return the options of a kernel's launch: its constant PDL, and launch_pdl with it or not at all.

    Raises TypeError for a kernel that does not wait.
    """
    return _options(kernel, device)


@prepared_once
def _options(kernel: Any, device: torch.device) -> dict[str, bool]:
    if not _is_used or not can_launch_dependents(device):
        return {"PDL": False}
    if WAIT not in kernel.src:
        raise TypeError(f"{kernel.__name__} has no {WAIT}: it can't start before the kernel in front of it has ended")
    return {"PDL": True, "launch_pdl": True}


def can_launch_dependents(device: torch.device) -> bool:
    """True on NVIDIA GPUs from Hopper on. Without a GPU it is the one that launchers choose for. No sync."""
    return not INTERPRET and torch.version.hip is None and device_limits(device).capability >= LEAST_CAPABILITY
