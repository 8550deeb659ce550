# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""The common parts of all launchers: Triton's mode, checks of arguments, a few sizes.

Triton either compiles a kernel for the GPU or, with TRITON_INTERPRET=1, runs it in NumPy. It decides when a kernel is
decorated, so the variable must be set before the first import of triton.

A file of kernels opens with the line above, as a function under @triton.jit has no types that mypy could check, and
with `# ruff: noqa: N803` if it has compile-time constants, which are written in capitals.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.kept_kernels import KeptKernel, launch_kept

Prepared = TypeVar("Prepared")

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"

# The interpreter multiplies the raw bits of bfloat16 and of fp8, so operands go through float32 there.
UPCAST = tl.constexpr(INTERPRET)

BLOCK_SIZES = (16, 32, 64, 128)
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KV_DTYPES = (*FLOAT_DTYPES, torch.float8_e4m3fn)
MAX_HEAD_DIM = 256

# exp2 is one instruction where exp is two: scores are multiplied by this once, with the scaling.
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The limits of a GPU that a launcher's choice of tile depends on.

    capability              (major, minor): (9, 0) is an H100 or an H200
    num_multiprocessors     streaming multiprocessors
    shared_memory_bytes     the most that one program can have; a multiprocessor has 1 KiB more, and takes 1 KiB more
                            for each program
    """

    capability: tuple[int, int]
    num_multiprocessors: int
    shared_memory_bytes: int

    @property
    def shared_memory_of_two(self) -> int:
        """The most bytes that each of two programs on one multiprocessor can have."""
        return (self.shared_memory_bytes + 1024) // 2 - 1024

    @property
    def has_warpgroups(self) -> bool:
        """True if matrix instructions read their operands from shared memory or tensor memory: Hopper, B200."""
        return self.capability[0] in (9, 10)


# Limits of an H100 and an H200. Plans and tiles are chosen for it where there is no GPU.
DEFAULT_LIMITS = DeviceLimits(capability=(9, 0), num_multiprocessors=132, shared_memory_bytes=227 << 10)


# Launches that a launcher remembers: those of some mixed steps, each with a number of tokens of its own.
MAX_PREPARED = 256
_REMEMBERED: list[Any] = []


class Variant(NamedTuple):
    """A compilation of a kernel, besides the types of its arguments: a launcher's choice, pure."""

    constants: Mapping[str, int | bool]
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int | bool]:
        """The keyword arguments of a launch."""
        return {**self.constants, "num_warps": self.num_warps, "num_stages": self.num_stages}


class Layout(NamedTuple):
    """The description of a tensor without its memory: the part that checks and choices of a launcher depend on."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def dim(self) -> int:
        """Return what Tensor.dim returns."""
        return len(self.shape)

    def stride(self, dim: int | None = None) -> Any:
        """Return what Tensor.stride returns."""
        return self.strides if dim is None else self.strides[dim]

    def is_contiguous(self) -> bool:
        """Return what Tensor.is_contiguous returns."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return 0 in self.shape
            expected *= size
        return True


def contiguous(shape: Sequence[int], like: Layout) -> Layout:
    """Return the layout of a new tensor of this shape beside another."""
    strides = tuple(accumulate((max(1, size) for size in reversed(shape[1:])), mul, initial=1))
    return Layout(tuple(shape), strides[::-1], like.dtype, like.device)


def layouts(*tensors: Tensor | None) -> list[Any]:
    """Return each tensor's Layout, and None for None."""
    return [None if x is None else Layout(x.shape, x.stride(), x.dtype, x.device) for x in tensors]


class OnDevice(Protocol):
    """A tensor, its layout, or another object with memory on one device."""

    @property
    def device(self) -> torch.device: ...


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch as it was checked and chosen for the layouts of its arguments.

    A launcher makes it once for each set of layouts (see prepared_once) and uses it for all layers of a step that have
    the same. It holds no tensor. strides are the kernel's arguments of that kind, in its order. kept are its compiled
    kernels, see kept_kernels.
    """

    grid: tuple[int, ...]
    strides: tuple[int, ...]
    options: Mapping[str, int | bool | str]
    kept: dict[Any, KeptKernel | None] = field(default_factory=dict, compare=False, repr=False)

    def run(self, kernel: Any, *args: Any) -> None:
        """Launch the kernel on arguments of the layouts that this was prepared for; strides and options follow them."""
        if INTERPRET:
            kernel[self.grid](*args, *self.strides, **self.options)
        else:
            launch_kept(self.kept, kernel, args, grid=self.grid, strides=self.strides, options=self.options)


def prepared_once(prepare: Callable[..., Prepared]) -> Callable[..., Prepared]:
    """Remember results of a function of layouts and numbers; one that raises is asked again.

    A function of layouts can't depend on a tensor's memory, so a remembered result is as good as a new one. Cost of a
    remembered result: about 1 us per layout, where checks and choices take 10 to 50.
    """
    remembered = lru_cache(maxsize=MAX_PREPARED)(prepare)
    _REMEMBERED.append(remembered)
    return remembered


@contextmanager
def chosen_for(limits: DeviceLimits) -> Iterator[None]:
    """Choose for a GPU of these limits where there is none: for tests of a launcher's choices."""
    global DEFAULT_LIMITS
    before, DEFAULT_LIMITS = DEFAULT_LIMITS, limits
    forget_prepared()
    try:
        yield
    finally:
        DEFAULT_LIMITS = before
        forget_prepared()


def forget_prepared() -> None:
    """Choose all launches again: what the choices depend on has changed."""
    for remembered in _REMEMBERED:
        remembered.cache_clear()


@triton.jit
def dot(a, b):
    """a [M, K] @ b [K, N] in float32; float32 operands are not rounded to tf32."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """x, float32, as the nearest number of another dtype, of two the even one."""
    if UPCAST and tl.bfloat16 == DTYPE:
        # Casting to bfloat16, the interpreter cuts off what does not fit.
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def halves_of_rows(q):
    """q [M, D] of any float dtype as float16 rows with elements below 2, and their factors [M].

    A power of two each, so nothing is rounded but what is below 2**-24 of its row's greatest.
    """
    q = q.to(tl.float32)
    exponents = tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) & 0x7F800000
    units = tl.where(exponents == 0, 1.0, exponents.to(tl.float32, bitcast=True))
    return (q * (1.0 / units)[:, None]).to(tl.float16), units


@triton.jit
def in_units(stride, UNIT: tl.constexpr):
    """The stride, in a form from which Triton derives that it is a multiple of UNIT.

    For an argument Triton only finds out if it is divisible by 16. With head dims like 72 and 120 the strides of rows
    are not divisible by 16, and Triton would load elements one by one, and copy none of them asynchronously.
    """
    return stride // UNIT * UNIT


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is at least `value`, which is at least 1."""
    return 1 << (value - 1).bit_length()


def ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def stride_unit(*tensors: Layout) -> int:
    """8 if it divides all strides of the tensors but the last, else 1; the STRIDE_UNIT of their kernel."""
    return 1 if any(stride % 8 for tensor in tensors for stride in tensor.strides[:-1]) else 8


def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of the device. No sync."""
    return device_limits(device).num_multiprocessors


def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of the device, or DEFAULT_LIMITS where it is no GPU. No sync."""
    if device.type != "cuda":
        return DEFAULT_LIMITS
    return _device_limits(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache
def _device_limits(index: int) -> DeviceLimits:
    properties = torch.cuda.get_device_properties(index)
    return DeviceLimits(
        capability=(properties.major, properties.minor),
        num_multiprocessors=properties.multi_processor_count,
        shared_memory_bytes=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
    )


def require_shape(name: str, tensor: Tensor | Layout, shape: Sequence[int | None]) -> None:
    """Raises ValueError if the tensor has another shape; None stands for any size."""
    if tensor.dim() != len(shape) or any(
        want is not None and have != want for have, want in zip(tensor.shape, shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)}, not [{wanted}]")


def require_dtype(name: str, tensor: Tensor | Layout, dtypes: torch.dtype | Collection[torch.dtype]) -> None:
    """Raises ValueError if the tensor's dtype is not the one, or none of those, given."""
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} is {tensor.dtype}, not {' or '.join(str(dtype) for dtype in allowed)}")


def require_last_contiguous(name: str, tensor: Tensor | Layout) -> None:
    """Raises ValueError if neighbours in the last dimension are not neighbours in memory."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension, not 1")


def require_contiguous(name: str, tensor: Tensor | Layout) -> None:
    """Raises ValueError if the tensor is not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {list(tensor.stride())}, not those of a contiguous tensor")


def require_same_device(**tensors: OnDevice | None) -> None:
    """Raises ValueError if the tensors, by the names of their arguments, lie on several devices; None is skipped."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    first = next(iter(devices))
    for name, device in devices.items():
        if device != devices[first]:
            raise ValueError(f"{name} is on {device}, {first} on {devices[first]}")


def require_in(name: str, value: object, allowed: Collection[object]) -> None:
    """Raises ValueError if the value is none of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name}={value} is not one of {', '.join(str(each) for each in allowed)}")


def require_at_least(name: str, value: float, limit: float) -> None:
    """Raises ValueError if the value is below the limit."""
    if not value >= limit:
        raise ValueError(f"{name}={value} is below {limit}")


def require_pool(k_pool: Layout, v_pool: Layout) -> None:
    """Raises ValueError unless both are [B, S, H, D] with D contiguous, of one dtype, and of sizes kernels support.

    S is one of BLOCK_SIZES, D at most MAX_HEAD_DIM and a multiple of 8, the dtype one of KV_DTYPES. D may differ.
    """
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        require_shape(name, pool, (*k_pool.shape[:3], None))
        require_dtype(name, pool, KV_DTYPES)
        require_last_contiguous(name, pool)
        if not 0 < pool.shape[3] <= MAX_HEAD_DIM or pool.shape[3] % 8:
            raise ValueError(f"{name} has head dim {pool.shape[3]}, not a multiple of 8 in 8 .. {MAX_HEAD_DIM}")
    if k_pool.dtype != v_pool.dtype:
        raise ValueError(f"v_pool is {v_pool.dtype}, k_pool {k_pool.dtype}")
    require_in("block size", k_pool.shape[1], BLOCK_SIZES)


def require_kv_scales(kv_scales: Layout | None, k_pool: Layout) -> None:
    """Raises ValueError if there are scales and they are not [2, H] float32, of the keys and values of an fp8 pool."""
    if kv_scales is None:
        return
    require_dtype("k_pool, with kv_scales,", k_pool, torch.float8_e4m3fn)
    require_shape("kv_scales", kv_scales, (2, k_pool.shape[2]))
    require_dtype("kv_scales", kv_scales, torch.float32)
    require_contiguous("kv_scales", kv_scales)
    require_same_device(k_pool=k_pool, kv_scales=kv_scales)


def require_per_head(q: Layout, *, sinks: Layout | None, alibi_slopes: Layout | None) -> None:
    """Raises ValueError if a tensor is there and is not one number per query head, beside q [N, Hq, D].

    Slopes are float32. Sinks have the dtype of the model's weights: they are read from there, without a copy.
    """
    for name, tensor, dtypes in (("sinks", sinks, FLOAT_DTYPES), ("alibi_slopes", alibi_slopes, (torch.float32,))):
        if tensor is not None:
            require_shape(name, tensor, (q.shape[1],))
            require_dtype(name, tensor, dtypes)
            require_contiguous(name, tensor)
    require_same_device(q=q, sinks=sinks, alibi_slopes=alibi_slopes)
