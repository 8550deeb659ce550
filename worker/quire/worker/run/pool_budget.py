"""The memory that a pool can take on this machine, and the blocks that its sequences can use."""

from __future__ import annotations

import psutil
import torch

from quire.worker.config import WorkerConfig
from quire.worker.memory.kv_pool import bytes_per_block
from quire.worker.memory.layer_groups import specs_of_places
from quire.worker.memory.pool_size import Budget, PoolSize, share_of_device, share_of_free, size_pool
from quire.worker.model.paged_model import PagedModel
from quire.worker.run.graph_limit import NO_GRAPHS, GraphLimit, limit_by_memory, limit_by_model
from quire.worker.run.graphs import measure_graphs
from quire.worker.run.peak_step import peak_memory_bytes, run_largest_step
from quire.worker.run.prompt_graphs import measure_prompt_graphs
from quire.worker.run.ranks import OneRank

MAX_BLOCKS = 2**24  # that a pool can be registered with

# Default shares: of the free memory on a CPU, and of all memory on a GPU.
MEMORY_SHARE = {"cpu": 0.5, "cuda": 0.9}


def size_of_pool(
    config: WorkerConfig,
    model: PagedModel,
    kv_dtype: torch.dtype,
    ranks: OneRank,
    *,
    graphs: GraphLimit = NO_GRAPHS,
    held_bytes: int = 0,
) -> PoolSize:
    """The size that all ranks have room for, beside the graphs. Raises what size_pool raises.

    held_bytes are in use for the pool already.
    """
    size = size_own_pool(config, model, kv_dtype, ranks, graphs=graphs, held_bytes=held_bytes)
    num_blocks = ranks.least(size.num_blocks)
    if num_blocks == size.num_blocks:
        return size
    return PoolSize(num_blocks, f"{num_blocks} blocks, which another rank has room for; here {size.explanation}")


def size_own_pool(
    config: WorkerConfig,
    model: PagedModel,
    kv_dtype: torch.dtype,
    ranks: OneRank,
    *,
    graphs: GraphLimit,
    held_bytes: int = 0,
) -> PoolSize:
    """The size that this rank has room for; flags that give bytes give them for all ranks together."""
    block_bytes = bytes_per_block(specs_of_places(model.specs, model.layer_groups), config.block_size, kv_dtype)
    if not block_bytes:
        return size_empty_pool(config, model)
    budget, free_bytes = pool_budget(config, model, kv_dtype, ranks, graphs=graphs)
    given_bytes = config.kv_cache_memory_bytes
    if config.memory_share is None:
        budget = limit_budget(budget, config, model, block_bytes)
    return size_pool(
        bytes_per_block=block_bytes,
        free_memory_bytes=free_bytes + held_bytes,
        num_blocks=config.num_blocks,
        kv_cache_memory_bytes=None if given_bytes is None else given_bytes // ranks.size,
        default=budget,
    )


def limit_budget(budget: Budget, config: WorkerConfig, model: PagedModel, block_bytes: int) -> Budget:
    """Return the budget, or what all sequences can use, if that is less: more memory is taken only when asked for."""
    usable_bytes = count_usable_blocks(config, model) * block_bytes
    if budget.num_bytes <= usable_bytes:
        return budget
    return Budget(usable_bytes, f"--max-num-seqs {config.max_num_seqs} of {model.max_model_len} tokens")


def count_usable_blocks(config: WorkerConfig, model: PagedModel) -> int:
    """Blocks that max_num_seqs sequences of max_model_len tokens hold, without a shared block; and the null block.

    In a windowed group each holds those of its window and its next token, and all together those of the tokens of two
    steps, the most that are in flight.
    """
    blocks_per_seq = -(-model.max_model_len // config.block_size)
    num_blocks = 1
    for group in model.layer_groups:
        held = config.max_num_seqs * blocks_per_seq
        if group.window is not None:
            window_blocks = -(-group.window // config.block_size) + 2  # it may begin inside of a block
            in_flight = 2 * config.max_step_tokens // config.block_size
            held = min(held, config.max_num_seqs * window_blocks + in_flight)
        num_blocks += held
    return min(num_blocks, MAX_BLOCKS)


def size_empty_pool(config: WorkerConfig, model: PagedModel) -> PoolSize:
    """Blocks of a model that keeps nothing per token: they only count, and there are enough for every sequence."""
    num_blocks = config.num_blocks or count_usable_blocks(config, model)
    return PoolSize(num_blocks, f"{num_blocks} blocks of 0 bytes: the model keeps states per sequence and nothing else")


def pool_budget(
    config: WorkerConfig, model: PagedModel, kv_dtype: torch.dtype, ranks: OneRank, *, graphs: GraphLimit
) -> tuple[Budget, int]:
    """Bytes for the pool by --memory-share, and bytes that it could take at most.

    On a GPU runs the largest step, to measure its memory.
    """
    device = model.device
    share = MEMORY_SHARE.get(device.type, MEMORY_SHARE["cpu"]) if config.memory_share is None else config.memory_share
    if device.type != "cuda":
        free_bytes = int(psutil.virtual_memory().available) // ranks.local_size
        return share_of_free(share, free_bytes), free_bytes
    step_bytes = peak_memory_bytes(
        device,
        lambda: run_largest_step(
            model,
            max_step_tokens=config.max_step_tokens,
            max_num_seqs=config.max_num_seqs,
            block_size=config.block_size,
            kv_dtype=kv_dtype,
            max_drafts=config.max_draft_tokens,
        ),
    )
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    budget = share_of_device(
        share,
        total_bytes=total_bytes,
        used_bytes=total_bytes - free_bytes,
        step_bytes=step_bytes,
        graph_bytes=graphs.num_bytes,
    )
    return budget, free_bytes - step_bytes - graphs.num_bytes


def choose_graphs(config: WorkerConfig, model: PagedModel, kv_dtype: torch.dtype) -> GraphLimit:
    """Return the largest step that is to be replayed as CUDA graphs: as the flag says, or by the model and the memory.

    No step has more than --max-step-tokens. On a GPU captures some graphs, to measure their memory.
    """
    total_bytes = torch.cuda.mem_get_info(model.device)[1]

    whole = min(config.max_whole_graph_tokens, config.max_step_tokens)
    whole_bytes = 0
    if whole:
        whole_bytes = measure_prompt_graphs(model, max_tokens=whole, block_size=config.block_size, kv_dtype=kv_dtype)

    def measure_bytes(num_tokens: int) -> int:
        return whole_bytes + measure_graphs(
            model,
            max_num_seqs=config.max_num_seqs,
            max_graph_tokens=num_tokens,
            block_size=config.block_size,
            kv_dtype=kv_dtype,
            whole=config.step_graph == "one",
        )

    if config.max_graph_tokens is not None:
        num_tokens = min(config.max_graph_tokens, config.max_step_tokens)
        return GraphLimit(num_tokens, "--max-graph-tokens", measure_bytes(num_tokens))
    limit = limit_by_model(
        num_layers=model.num_layers,
        num_parameters=model.num_layer_parameters,
        max_step_tokens=config.max_step_tokens,
    )
    return limit_by_memory(limit, measure_bytes, total_bytes=total_bytes)
