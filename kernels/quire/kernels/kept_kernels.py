# mypy: disable-error-code="import-untyped"
"""Compiled kernels, kept so that a launch skips the part of Triton that chooses one by its arguments.

For each launch Triton's binder sorts the arguments into what a kernel is compiled for, and makes a key of it and of the
options. That takes longer than the launch itself. Here the first launch goes through the binder, and its compiled
kernel is kept under a key that is at least as fine as the binder's:

    device      the index of the current one
    tensors     type, dtype, and whether the address is divisible by 16
    others      type and value: None, numbers, booleans

Strides and options are those of one Launch. So arguments of equal keys have equal compiled kernels. What has no such
key goes through the binder each time: an unknown type, another GPU than NVIDIA's, and each launch while Triton has
hooks around launches (profilers set them). Triton's settings from the environment are those of the first launch.

The call of a compiled kernel is the same in Triton 3.6 and 3.7: see JITFunction.run in triton/runtime/jit.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

MAX_KEPT = 64
"""Keys of one launch, more than it has: its tensors' layouts are fixed, so the keys differ in addresses."""

_VALUES = frozenset({type(None), int, float, bool})
_TENSORS = frozenset({Tensor, Parameter})


class KeptKernel(NamedTuple):
    """A compiled kernel with what its call takes besides the stream and the varying arguments."""

    run: Callable[..., None]
    grid: tuple[int, int, int]
    function: Any
    metadata: Any
    fixed: tuple[Any, ...]
    """The arguments behind the varying ones: strides and constants, in the kernel's order."""


def launch_kept(
    kept: dict[Any, KeptKernel | None],
    kernel: Any,
    args: tuple[Any, ...],
    *,
    grid: tuple[int, ...],
    strides: tuple[int, ...],
    options: Mapping[str, Any],
) -> None:
    """Launch the kernel as kernel[grid](*args, *strides, **options) does; `kept` is of one grid, strides and options.

    Cost: about 4 us on the host where the binder takes 15, from the second launch of a key on.
    """
    active, runtime = driver.active, knobs.runtime
    device = active.get_current_device()
    key = (device, *map(type, args), *[_kind(x) if isinstance(x, Tensor) else x for x in args])
    found = kept.get(key)
    hooks = (_hooks(runtime.launch_enter_hook), _hooks(runtime.launch_exit_hook), kernel.pre_run_hooks)
    if found is None or any(hooks):
        compiled = kernel.run(*args, *strides, grid=grid, warmup=False, **options)
        if key not in kept:
            _keep(kept, key, kernel, compiled, args, grid=grid, strides=strides, options=options)
        return
    found.run(
        *found.grid, active.get_current_stream(device), found.function, found.metadata, None, None, None,
        *args, *found.fixed,
    )  # fmt: skip


def _hooks(hook: Any) -> Any:
    """The functions of a chain of hooks; the hook itself where it is a function, or None."""
    return getattr(hook, "calls", hook)


def _kind(tensor: Tensor) -> Any:
    """The dtype, in a tuple if the address is not divisible by 16."""
    return (tensor.dtype,) if tensor.data_ptr() & 15 else tensor.dtype


def _keep(
    kept: dict[Any, KeptKernel | None],
    key: Any,
    kernel: Any,
    compiled: Any,
    args: tuple[Any, ...],
    *,
    grid: tuple[int, ...],
    strides: tuple[int, ...],
    options: Mapping[str, Any],
) -> None:
    """Keep what the binder launched; None stands for a kernel that can't be launched without it."""
    if len(kept) >= MAX_KEPT:
        kept.clear()
    names = kernel.arg_names[len(args) + len(strides) :]
    is_known = (
        isinstance(compiled, CompiledKernel)
        and all(type(x) in _VALUES or type(x) in _TENSORS for x in args)
        and all(name in options for name in names)
        and driver.active.get_current_target().backend == "cuda"
    )
    if not is_known:
        kept[key] = None
        return
    x, y, z = (*grid, 1, 1)[:3]
    fixed = (*strides, *(options[name] for name in names))
    kept[key] = KeptKernel(compiled.run, (x, y, z), compiled.function, compiled.packed_metadata, fixed)
