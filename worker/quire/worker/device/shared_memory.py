"""Memory of a GPU with a file descriptor: it is there as long as the descriptor is open in some process.

By CUDA's virtual memory management: physical memory is made, and exported as a descriptor. A process that has the
descriptor maps the same memory, also when the one that made it is dead. To hold the descriptor needs no GPU.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class SharedMemoryError(ValueError):
    """The driver refuses; the text is for people."""


@dataclass(frozen=True, slots=True)
class _Span:
    """A span of the device's addresses, as torch.as_tensor reads it."""

    address: int
    num_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def make_shared(num_bytes: int, device: torch.device) -> tuple[Tensor, int]:
    """Return new memory, [num_bytes] uint8 with zeros, and its descriptor. Raises SharedMemoryError."""
    driver = _driver()
    properties, size = _properties(driver, device), _size(driver, num_bytes, device)
    handle = _checked(driver, "cuMemCreate", size, properties, 0)
    descriptor = _checked(driver, "cuMemExportToShareableHandle", handle, properties.requestedHandleTypes, 0)
    return _map(driver, handle, num_bytes, device).zero_(), int(descriptor)


def open_shared(descriptor: int, num_bytes: int, device: torch.device) -> Tensor:
    """Return the memory of a descriptor, [num_bytes] uint8. Raises SharedMemoryError if it is of another size."""
    driver = _driver()
    kind = _properties(driver, device).requestedHandleTypes
    handle = _checked(driver, "cuMemImportFromShareableHandle", descriptor, kind)
    return _map(driver, handle, num_bytes, device)


def _map(driver: Any, handle: Any, num_bytes: int, device: torch.device) -> Tensor:
    """Map memory for the life of this process: the pool lies in it, and graphs have its addresses."""
    size, properties = _size(driver, num_bytes, device), _properties(driver, device)
    address = _checked(driver, "cuMemAddressReserve", size, 0, 0, 0)
    _checked(driver, "cuMemMap", address, size, 0, handle, 0)
    access = driver.CUmemAccessDesc()
    access.location = properties.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    _checked(driver, "cuMemSetAccess", address, size, [access], 1)
    _checked(driver, "cuMemRelease", handle)  # the mapping keeps it
    return tensor_at(int(address), num_bytes, device)


def tensor_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """Return the memory at an address of a device, [num_bytes] uint8; it is not freed with the tensor."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_Span(address, num_bytes), device=device)


def _properties(driver: Any, device: torch.device) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device.index or 0
    properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return properties


def _size(driver: Any, num_bytes: int, device: torch.device) -> int:
    """The bytes that the driver takes for so many: whole pages of the device."""
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    page = int(_checked(driver, "cuMemGetAllocationGranularity", _properties(driver, device), least))
    return -(-num_bytes // page) * page


def _driver() -> Any:
    """CUDA's driver, with the context that torch has made. Raises SharedMemoryError."""
    try:
        from cuda.bindings import driver  # type: ignore[import-untyped]
    except ImportError as error:
        raise SharedMemoryError(f"memory of a GPU with a descriptor needs the package cuda-bindings: {error}") from None
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return driver


def _checked(driver: Any, name: str, *arguments: Any) -> Any:
    """Call a function of the driver, and return what it returns behind the result."""
    result, *found = getattr(driver, name)(*arguments)
    if int(result) != 0:
        raise SharedMemoryError(f"{name} fails: {result.name}")
    return found[0] if found else None
