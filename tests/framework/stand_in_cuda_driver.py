"""Stands in for CUDA's driver where there is none: memory with a descriptor is an anonymous file on the host.

Types and numbers are those of cuda-bindings. Memory is not there before it may be read: an access before cuMemSetAccess
ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass, field
from typing import Any

from cuda.bindings import driver  # type: ignore[import-untyped]

PAGE_BYTES = 2 << 20
PROT_NONE, PROT_READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
MAP_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

Result = driver.CUresult


@dataclass
class StandInDriver:
    """The functions that quire.worker.device.shared_memory calls. `free_bytes` are those of the device."""

    free_bytes: int = 1 << 30
    calls: list[str] = field(default_factory=list)
    """The names of the functions that were called."""

    def __getattr__(self, name: str) -> Any:
        return getattr(driver, name)

    def cuMemGetAllocationGranularity(self, properties: Any, option: Any) -> Any:  # noqa: N802
        assert option == driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return Result.CUDA_SUCCESS, PAGE_BYTES

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> Any:  # noqa: N802
        self.calls.append("cuMemCreate")
        if size % PAGE_BYTES or properties.requestedHandleTypes != 1 or flags:
            return Result.CUDA_ERROR_INVALID_VALUE, None
        if size > self.free_bytes:
            return Result.CUDA_ERROR_OUT_OF_MEMORY, None
        descriptor = os.memfd_create("device")
        os.ftruncate(descriptor, size)
        return Result.CUDA_SUCCESS, driver.CUmemGenericAllocationHandle(descriptor)

    def cuMemExportToShareableHandle(self, handle: Any, kind: Any, flags: int) -> Any:  # noqa: N802
        return Result.CUDA_SUCCESS, os.dup(int(handle))

    def cuMemImportFromShareableHandle(self, descriptor: int, kind: Any) -> Any:  # noqa: N802
        self.calls.append("cuMemImportFromShareableHandle")
        return Result.CUDA_SUCCESS, driver.CUmemGenericAllocationHandle(os.dup(descriptor))

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> Any:  # noqa: N802
        return Result.CUDA_SUCCESS, driver.CUdeviceptr(_mmap(0, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1))

    def cuMemMap(self, address: Any, size: int, offset: int, handle: Any, flags: int) -> Any:  # noqa: N802
        if os.fstat(int(handle)).st_size != size:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        _mmap(int(address), size, mmap.MAP_SHARED | MAP_FIXED, int(handle))
        return (Result.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address: Any, size: int, descriptions: list[Any], count: int) -> Any:  # noqa: N802
        (description,) = descriptions
        assert (description.flags, count) == (driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE, 1)
        assert not _libc.mprotect(int(address), size, PROT_READ_WRITE)
        return (Result.CUDA_SUCCESS,)

    def cuMemRelease(self, handle: Any) -> Any:  # noqa: N802
        os.close(int(handle))
        return (Result.CUDA_SUCCESS,)


def _mmap(address: int, size: int, flags: int, descriptor: int) -> int:
    found = int(_libc.mmap(address, size, PROT_NONE, flags, descriptor, 0))
    assert not address or found == address
    return found
