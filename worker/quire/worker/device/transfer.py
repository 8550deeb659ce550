"""Transfers between host and device: integers of a step there, sampled tokens back, and times of the device.

On a GPU the host waits for neither: memory on the host is pinned, and a result is there once an event has happened.
On a CPU everything has happened by the time a call returns.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Flags of cudaHostRegister.
_PORTABLE, _MAPPED = 1, 2


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return host values on the device. No sync: from memory that is not pinned, a copy would wait for its turn."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def send(values: Tensor, target: Tensor) -> None:
    """Copy host values to a tensor of the device. No sync; the values may be changed afterwards."""
    target.copy_(values if target.device.type != "cuda" else values.pin_memory(), non_blocking=True)


def indices(values: Sequence[Any] | np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Return integers of the host, nested or not, as an int64 tensor on the device. No sync."""
    return to_device(torch.from_numpy(np.array(values, dtype=np.int64)), device)


def pin(owner: object, memory: Tensor) -> None:
    """Lock memory of the host for the GPU, as long as its owner lives, and let kernels read and write it.

    torch's own pinned memory has sizes of powers of two only. Raises RuntimeError.
    """
    driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(driver.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE | _MAPPED))
    weakref.finalize(owner, driver.cudaHostUnregister, memory.data_ptr())


class Arrival:
    """The moment at which the device has done all work submitted so far, to wait for."""

    def __init__(self, device: torch.device, *, spins: bool = False) -> None:
        """No sync. A thread that waits leaves its core to others, or, if it spins, keeps it and goes on sooner.

        Spinning is CUDA's: it needs no interpreter, so other threads of Python run meanwhile.
        """
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(blocking=not spins)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        """Return when it is there. Raises the device's error until then."""
        if self._event is not None:
            self._event.synchronize()


class Readback:
    """Tensors on their way to the host: their content when the device has done all work submitted before."""

    def __init__(self, device: torch.device, *tensors: Tensor | None, spins: bool = False) -> None:
        """Cost: a copy each into pinned memory; no sync. Without tensors there is still the device to wait for.

        spins is that of Arrival.
        """
        self._tensors = tuple(None if tensor is None else _to_host(tensor) for tensor in tensors)
        self._arrival = Arrival(device, spins=spins)

    def wait(self) -> tuple[Tensor | None, ...]:
        """The tensors, on the CPU. Raises the device's error since the copies were queued."""
        self._arrival.wait()
        return self._tensors


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor.clone()  # a later step may write its memory
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class Moment:
    """The time at which the device is done with all work given to it so far."""

    def __init__(self, device: torch.device) -> None:
        self._host_s = time.perf_counter()
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def seconds_until(self, later: Moment) -> float:
        """Return the seconds to a later moment of the same device, which must be in the past."""
        if later is self:
            return 0.0
        if self._event is None or later._event is None:
            return later._host_s - self._host_s
        return float(self._event.elapsed_time(later._event)) / 1000
