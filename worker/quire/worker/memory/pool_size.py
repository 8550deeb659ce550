"""The number of blocks of a pool, from the flags and the free memory."""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 2**20
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The number of blocks to allocate, and the arithmetic in a line or two."""

    num_blocks: int
    explanation: str


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes for a pool, and where they come from in a few words."""

    num_bytes: int
    origin: str


def size_pool(
    *,
    bytes_per_block: int,
    free_memory_bytes: int,
    num_blocks: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    memory_share: float = 0.9,
    default: Budget | None = None,
) -> PoolSize:
    """Choose the number of blocks to allocate: num_blocks, or those that fit the bytes given, or `default`.

    default None is the share memory_share (0 < share <= 1) of free_memory_bytes. num_blocks goes before
    kv_cache_memory_bytes. Raises ValueError, naming flag, value and limit, if the request exceeds the free memory, or
    if fewer than 2 blocks (one besides the null block) fit.
    """
    if default is None:
        default = share_of_free(memory_share, free_memory_bytes)
    if num_blocks is not None:
        return _size_by_count(num_blocks, bytes_per_block, free_memory_bytes)
    if kv_cache_memory_bytes is not None:
        budget = Budget(kv_cache_memory_bytes, "--kv-cache-memory")
        _check_fits("--kv-cache-memory", kv_cache_memory_bytes, free_memory_bytes)
    else:
        budget = default
    fitting = max(0, budget.num_bytes) // bytes_per_block
    if fitting < 2:
        raise ValueError(
            f"{budget.origin}: {budget.num_bytes} bytes hold {fitting} blocks of {bytes_per_block} bytes; "
            "at least 2 are needed"
        )
    return PoolSize(
        fitting,
        f"{budget.origin}: {_readable(budget.num_bytes)} // {bytes_per_block} bytes per block = {fitting} blocks",
    )


def share_of_free(memory_share: float, free_memory_bytes: int) -> Budget:
    """A share of the free memory: for a CPU, as other processes use its memory, too.

    Raises ValueError unless 0 < memory_share <= 1.
    """
    _check_share(memory_share)
    origin = f"--memory-share {memory_share:g} of {_readable(free_memory_bytes)} free"
    return Budget(int(free_memory_bytes * memory_share), origin)


def share_of_device(
    memory_share: float, *, total_bytes: int, used_bytes: int, step_bytes: int, graph_bytes: int = 0
) -> Budget:
    """The remainder of a share of a GPU's memory: for the worker, which has the GPU to itself.

    used_bytes is the memory in use by all processes once the model is loaded; step_bytes the memory of the largest
    step, and graph_bytes that of the CUDA graphs of decode steps, both measured. The result may be negative.
    Raises ValueError unless 0 < memory_share <= 1.
    """
    _check_share(memory_share)
    return Budget(
        int(total_bytes * memory_share) - used_bytes - step_bytes - graph_bytes,
        f"--memory-share {memory_share:g} of {_readable(total_bytes)}, less {_readable(used_bytes)} in use, "
        f"{_readable(graph_bytes)} for CUDA graphs and {_readable(step_bytes)} for the largest step",
    )


def _check_share(memory_share: float) -> None:
    if not 0 < memory_share <= 1:
        raise ValueError(f"--memory-share {memory_share} is not in 0 < share <= 1")


def _size_by_count(num_blocks: int, bytes_per_block: int, free_memory_bytes: int) -> PoolSize:
    if num_blocks < 2:
        raise ValueError(f"--num-blocks={num_blocks} is below 2")
    needed_bytes = num_blocks * bytes_per_block
    _check_fits(f"--num-blocks {num_blocks} * {bytes_per_block} bytes per block", needed_bytes, free_memory_bytes)
    return PoolSize(
        num_blocks,
        f"--num-blocks {num_blocks} * {bytes_per_block} bytes per block = {_readable(needed_bytes)} "
        f"of {_readable(free_memory_bytes)} free",
    )


def _check_fits(what: str, needed_bytes: int, free_memory_bytes: int) -> None:
    if needed_bytes > free_memory_bytes:
        raise ValueError(f"{what}: {needed_bytes} bytes asked for, {free_memory_bytes} bytes free")


def _readable(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.2f} MiB"
