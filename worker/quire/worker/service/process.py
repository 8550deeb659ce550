"""A worker from its settings to its end: load, allocate, attach, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import sys
from dataclasses import dataclass
from functools import partial

import psutil
import torch
import transformers

from quire.cache.v1 import attach_pb2
from quire.compute.v1 import worker_service_pb2_grpc
from quire.serving.dialing import Dialer
from quire.serving.metrics import MetricsPage
from quire.serving.server import CannotStartError, Server, StopSignals
from quire.worker.attention.torch_attention import AttentionStep
from quire.worker.config import WorkerConfig
from quire.worker.device.devices import pick_device, use_device
from quire.worker.device.profiling import StepProfiler
from quire.worker.fusion.steps import choose_steps
from quire.worker.grant.errors import DOMAIN
from quire.worker.grant.gate import Gate
from quire.worker.memory.host_pool import HostPool, count_host_blocks, make_host_pool
from quire.worker.memory.kv_pool import (
    Budget,
    KVPool,
    PoolSize,
    bytes_per_block,
    kernels_run_on,
    share_of_device,
    share_of_free,
    size_pool,
)
from quire.worker.memory.layer_groups import LayerGroup, LayerGroups, describe_groups, specs_of_places
from quire.worker.memory.layer_spec import Causal, Sliding
from quire.worker.model.checkpoint import check_sharding, load_model
from quire.worker.model.model_source import find_tokenizer
from quire.worker.model.paged_model import PagedModel
from quire.worker.run.executor import Executor
from quire.worker.run.graphs import StaticDecode, capture_decode, measure_graphs
from quire.worker.run.model_thread import ModelThread
from quire.worker.run.peak_step import peak_memory_bytes, run_largest_step
from quire.worker.run.ranks import ONE_RANK, OneRank
from quire.worker.run.verify import VerifyingExecutor
from quire.worker.run.warm_up import StepSizes, warm_up
from quire.worker.run.watchdog import DEFAULT_LIMIT_S, GROUP_LIMIT_S, Watchdog, WatchdogActions
from quire.worker.sampling.grammars import Grammars, NoGrammars, load_grammars
from quire.worker.sampling.sampler import MAX_LOGPROBS
from quire.worker.service.attachment import Attachment
from quire.worker.service.metrics import metric_families
from quire.worker.service.roles import MESSAGE_LIMITS, ROLES
from quire.worker.service.servicer import ModelDescription, WorkerServicer
from quire.worker.service.steps import StepLimits, Steps, new_epoch
from quire.worker.tensor_parallel.group import given_place
from quire.worker.tensor_parallel.process import Group, rank_config

log = logging.getLogger("quire.worker")

SERVICE_NAME = "quire.compute.v1.WorkerService"
MAX_BLOCKS = 2**24  # that a pool can be registered with

# From which GPUs convert float8 themselves: Ada and Hopper.
FLOAT8_CAPABILITY = (8, 9)

# Default shares: of the free memory on a CPU, and of all memory on a GPU.
MEMORY_SHARE = {"cpu": 0.5, "cuda": 0.9}


async def serve(config: WorkerConfig, signals: StopSignals) -> None:
    """Serves WorkerService until a signal. SERVING once the pool has been attached for the first time."""
    security = config.server.secure(roles=ROLES, domain=DOMAIN)
    dialer = Dialer(config.cachemgr, config.cachemgr_dial)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            Server(service_names=[SERVICE_NAME], domain=DOMAIN, security=security, message_limits=MESSAGE_LIMITS)
        )
        thread = ModelThread(asyncio.get_running_loop())
        stack.callback(thread.stop)
        try:
            group = await stack.enter_async_context(await lead(config, thread)) if has_ranks(config) else None
            config = config if group is None else rank_config(config, group.place)
            await thread.submit_ahead(lambda: use_device(pick_device(config.device)))
            if group is None:
                ranks, loaded = ONE_RANK, await thread.submit(lambda: load_warm(config))
            else:
                ranks = await group.unless_lost(thread.submit(partial(group.join, pick_device(config.device))))
                loaded = await group.unless_lost(thread.submit(lambda: load_warm(config, ranks)))
        except ValueError as error:  # ModelNotFound and UnsupportedModel among them
            raise CannotStartError(str(error)) from error
        gate = Gate(config.pool, new_epoch())
        model, pool = loaded.model, loaded.pool
        executor = make_executor(config, loaded, ranks)
        if config.profile is not None:
            executor.profiler = StepProfiler(config.profile, *config.profile_steps)
        geometry = describe_pool(config, loaded)
        limits = StepLimits.of(geometry, max_step_tokens=config.max_step_tokens, max_logprobs=MAX_LOGPROBS)
        steps = Steps(gate, executor, thread, limits, loaded.grammars)
        if isinstance(loaded.grammars, Grammars):
            stack.callback(loaded.grammars.close)
        steps.on_violation = server.fail
        if executor.profiler is not None:
            stack.push_async_callback(write_profile, executor.profiler, steps, thread)
        attachment = Attachment(
            dialer,
            steps,
            geometry=geometry,
            worker_address=lambda: str(config.advertise or server.addresses[0]),
        )
        if config.server.metrics_listen is not None:
            read = partial(metric_families, steps, attachment, pool=config.pool, model=config.model_name)
            stack.enter_context(MetricsPage(config.server.metrics_listen, read, security=security))
        servicer = WorkerServicer(steps, attachment, describe_model(config, model, pool), geometry)
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.grpc)
        await server.start(config.server.listen)
        server.run_alongside(attachment.run())
        if group is not None:
            server.run_alongside(group.await_loss())
        if watchdog := make_watchdog(config, server, steps, thread, device=model.device, group=group):
            server.run_alongside(watchdog.run())
        gc.freeze()
        announcing = asyncio.create_task(announce_when_attached(server, attachment))
        stack.callback(announcing.cancel)
        await server.serve_until_signal(signals, drain=servicer.drain, drain_timeout_s=config.server.drain_timeout_s)


def has_ranks(config: WorkerConfig) -> bool:
    """True if the worker is a group of several ranks."""
    return config.tensor_parallel_size > 1


async def lead(config: WorkerConfig, thread: ModelThread) -> Group:
    """Return the group that this process is to lead. Raises what check_sharding and rank_config raise."""
    group = Group(config, given_place(), thread)
    rank_config(config, group.place)
    await thread.submit(
        partial(
            check_sharding,
            config.model,
            num_ranks=config.tensor_parallel_size,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
        )
    )
    return group


def make_executor(config: WorkerConfig, loaded: Loaded, ranks: OneRank) -> Executor:
    """Return what runs the steps on what was loaded; with QUIRE_VERIFY=1 it checks each of them."""
    kind = VerifyingExecutor if os.environ.get("QUIRE_VERIFY") == "1" else Executor
    return kind(
        loaded.model,
        loaded.pool,
        max_num_seqs=config.max_num_seqs,
        decode=loaded.decode,
        host_pool=loaded.host_pool,
        ranks=ranks,
    )


def make_watchdog(
    config: WorkerConfig,
    server: Server,
    steps: Steps,
    thread: ModelThread,
    *,
    device: torch.device,
    group: Group | None = None,
) -> Watchdog | None:
    """Return a watchdog of the steps, None if --step-timeout, or its default, is 0."""
    default_s = DEFAULT_LIMIT_S[device.type] if group is None else GROUP_LIMIT_S
    limit_s = default_s if config.step_timeout_s is None else config.step_timeout_s
    if limit_s == 0:
        return None
    actions = WatchdogActions(
        on_stuck=server.announce_not_serving,
        on_moves_again=server.announce_serving,
        whereabouts=thread.whereabouts if group is None else lambda: thread.whereabouts() + group.whereabouts(),
    )
    return Watchdog(steps.oldest, actions, limit_s=limit_s)


async def write_profile(profiler: StepProfiler, steps: Steps, thread: ModelThread) -> None:
    """Write the recorded steps, if the process ends before all of them have run; do not wait for a stuck step."""
    if steps.oldest() is None:
        await thread.submit(profiler.stop)


async def announce_when_attached(server: Server, attachment: Attachment) -> None:
    """Health: SERVING once there is a pool that clients can lease."""
    await attachment.attached_once()
    await server.announce_serving()
    log.info("serving addresses=%s", ",".join(map(str, server.addresses)))


@dataclass(frozen=True, slots=True)
class Loaded:
    """The parts of a worker before it serves; `decode` are its decode steps as graphs, if they are captured.

    block_bytes are those of a block over all ranks.
    """

    grammars: Grammars | NoGrammars

    model: PagedModel
    pool: KVPool
    host_pool: HostPool
    decode: StaticDecode | None
    block_bytes: int


def load_warm(config: WorkerConfig, ranks: OneRank = ONE_RANK) -> Loaded:
    """Load, and on a GPU run steps of all kinds, so that none has to be compiled later. Raises what load raises."""
    if pick_device(config.device).type != "cuda":
        return load(config, ranks)
    # A worker on a CPU needs no Triton, which this imports.
    from quire.worker.device.compilations import Compilations, check_cache_folder

    check_cache_folder()
    compilations = Compilations()
    compilations.watch()
    loaded = load(config, ranks)
    warm_up_loaded(config, loaded)
    compilations.expect_no_more()
    log.info("kernels: %s", compilations.statistics())
    return loaded


def warm_up_loaded(config: WorkerConfig, loaded: Loaded) -> None:
    """Run the steps of warm_up on the loaded parts. Raises ValueError if one fails."""
    model, pool, host_pool = loaded.model, loaded.pool, loaded.host_pool
    executor = Executor(model, pool, max_num_seqs=config.max_num_seqs, decode=loaded.decode, host_pool=host_pool)
    sizes = StepSizes(
        config.max_step_tokens, config.max_num_seqs, model.max_model_len, can_go_on=not model.has_recurrent_state
    )
    warm_up(
        executor,
        sizes,
        block_size=pool.block_size,
        num_blocks=pool.num_blocks,
        num_groups=len(pool.groups),
        num_host_blocks=host_pool.num_blocks,
    )


def load(config: WorkerConfig, ranks: OneRank = ONE_RANK) -> Loaded:
    """The model, checked, and its memory: this rank's part of both.

    Raises what load_model, size_pool and count_host_blocks raise.
    """
    quiet_transformers()
    device = pick_device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(config.threads)
    model = load_model(
        config.model,
        dtype=None if config.dtype == "auto" else getattr(torch, config.dtype),
        device=device,
        max_model_len=config.max_model_len,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        step_kind=pick_attention(config.attention, device, block_size=config.block_size),
        fused_steps=choose_steps(device, block_size=config.block_size, wanted=config.fuse),
        ranks=ranks,
        layer_groups=config.layer_groups,
    )
    if model.fusion is not None:
        log.info("%s", model.fusion)
    model.allocate_states(config.max_num_seqs)
    kv_dtype = pick_kv_dtype(config.kv_dtype, model.dtype)
    check_kv_dtype(kv_dtype, device)
    if kv_dtype != model.dtype and not model.takes_any_kv_dtype:
        has = f"its own attention, and reads keys and values of {dtype_name(model.dtype)}"
        raise ValueError(f"--kv-dtype {config.kv_dtype}: {model.architecture} keeps {has}")
    size = size_of_pool(config, model, kv_dtype, ranks)
    log.info("model %s (%s), %s on %s", config.model_name, model.architecture, dtype_name(model.dtype), device)
    log.info("attention: %s", model.describe_attention())
    log.info("pool: %s", size.explanation)
    if registers_groups(model.layer_groups):
        bytes_of_one = layer_bytes(config, model, kv_dtype)
        log.info("layer groups: %s", describe_groups(model.layer_groups, layer_bytes=bytes_of_one))
    if model.has_recurrent_state:
        log.info("states: %d bytes for %d sequences", model.states.statistics().num_bytes, config.max_num_seqs)
    pool = model.make_pool(num_blocks=size.num_blocks, block_size=config.block_size, dtype=kv_dtype)
    decode = None
    if device.type == "cuda" and uses_graphs(config):
        decode = capture_decode(
            model, pool, max_num_seqs=config.max_num_seqs, max_graph_tokens=most_graph_tokens(config)
        )
    grammars = load_grammars(
        find_tokenizer(config.model, revision=config.revision),
        vocab_size=model.vocab_size,
        end_token_ids=model.eos_token_ids,
    )
    if isinstance(grammars, NoGrammars):
        log.info("no grammars: %s", grammars.reason)
    host_pool = allocate_host_pool(config, model, pool, ranks)
    return Loaded(grammars, model, pool, host_pool, decode, ranks.total(pool.bytes_per_block))


def uses_graphs(config: WorkerConfig) -> bool:
    """True if decode steps are to be CUDA graphs."""
    if config.cuda_graphs and has_ranks(config):
        log.info("CUDA graphs: off, %d ranks compute each step together", config.tensor_parallel_size)
    return config.cuda_graphs and not has_ranks(config)


def size_of_pool(config: WorkerConfig, model: PagedModel, kv_dtype: torch.dtype, ranks: OneRank) -> PoolSize:
    """The size that all ranks have room for. Raises what size_pool raises."""
    size = size_own_pool(config, model, kv_dtype, ranks)
    num_blocks = ranks.least(size.num_blocks)
    if num_blocks == size.num_blocks:
        return size
    return PoolSize(num_blocks, f"{num_blocks} blocks, which another rank has room for; here {size.explanation}")


def size_own_pool(config: WorkerConfig, model: PagedModel, kv_dtype: torch.dtype, ranks: OneRank) -> PoolSize:
    """The size that this rank has room for; flags that give bytes give them for all ranks together."""
    block_bytes = bytes_per_block(specs_of_places(model.specs, model.layer_groups), config.block_size, kv_dtype)
    if not block_bytes:
        return size_empty_pool(config, model)
    budget, free_bytes = pool_budget(config, model, kv_dtype, ranks)
    given_bytes = config.kv_cache_memory_bytes
    if config.memory_share is None:
        budget = limit_budget(budget, config, model, block_bytes)
    return size_pool(
        bytes_per_block=block_bytes,
        free_memory_bytes=free_bytes,
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


def layer_bytes(config: WorkerConfig, model: PagedModel, kv_dtype: torch.dtype) -> int:
    """Bytes of one layer of a block; all layers of a model with several groups have the same."""
    return bytes_per_block({0: next(iter(model.specs.values()))}, config.block_size, kv_dtype)


def size_empty_pool(config: WorkerConfig, model: PagedModel) -> PoolSize:
    """Blocks of a model that keeps nothing per token: they only count, and there are enough for every sequence."""
    num_blocks = config.num_blocks or count_usable_blocks(config, model)
    return PoolSize(num_blocks, f"{num_blocks} blocks of 0 bytes: the model keeps states per sequence and nothing else")


def allocate_host_pool(config: WorkerConfig, model: PagedModel, pool: KVPool, ranks: OneRank) -> HostPool:
    """Raises ValueError if there is no room for as much as was asked for, or the model keeps more than blocks."""
    if config.host_memory_bytes and model.has_recurrent_state:
        raise ValueError(f"--host-memory: {model.architecture} keeps states per sequence, which are not offloaded")
    if not config.host_memory_bytes:
        return make_host_pool(pool, num_blocks=0)
    free_bytes = int(psutil.virtual_memory().available) // ranks.local_size
    if pool.device.type == "cpu":
        free_bytes -= pool.statistics().num_bytes  # not touched yet
    num_blocks = count_host_blocks(
        config.host_memory_bytes // ranks.size,
        bytes_per_block=pool.bytes_per_block,
        free_memory_bytes=max(0, free_bytes),
    )
    num_blocks = ranks.least(num_blocks)
    log.info("host tier: %d blocks of %d bytes", num_blocks, ranks.total(pool.bytes_per_block))
    return make_host_pool(pool, num_blocks=num_blocks)


def quiet_transformers() -> None:
    """Turn off warnings, which are about other uses, and progress bars, which are for terminals."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def pick_attention(name: str, device: torch.device, *, block_size: int) -> type[AttentionStep]:
    """The attention kernels. Raises ValueError if Triton is requested and can't run, or not with this block size."""
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        return AttentionStep
    if not kernels_run_on(device):
        raise ValueError(
            f"--attention triton: it needs a GPU, and the device is {device.type} (for tests it runs in Triton's "
            "interpreter, with TRITON_INTERPRET=1)"
        )
    from quire.kernels.launching import BLOCK_SIZES
    from quire.worker.attention.triton_attention import TritonAttentionStep

    if block_size in BLOCK_SIZES:
        return TritonAttentionStep
    allowed = ", ".join(map(str, BLOCK_SIZES))
    if name == "triton":
        raise ValueError(f"--attention triton: --block-size {block_size} is not one of {allowed}")
    log.warning(
        "attention runs in torch, which is slow on a GPU: --block-size %d is not one of %s", block_size, allowed
    )
    return AttentionStep


def pick_kv_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """The pool's dtype; "auto" is the model's."""
    if name == "auto":
        return model_dtype
    dtype: torch.dtype = torch.float8_e4m3fn if name == "float8" else getattr(torch, name)
    return dtype


def check_kv_dtype(kv_dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError if the GPU can't convert the pool's dtype."""
    if device.type != "cuda" or kv_dtype != torch.float8_e4m3fn:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FLOAT8_CAPABILITY:
        needed, found = (".".join(map(str, pair)) for pair in (FLOAT8_CAPABILITY, capability))
        raise ValueError(f"--kv-dtype float8: it needs a GPU of compute capability {needed}; this one has {found}")


def pool_budget(config: WorkerConfig, model: PagedModel, kv_dtype: torch.dtype, ranks: OneRank) -> tuple[Budget, int]:
    """Bytes for the pool by --memory-share, and bytes that it could take at most.

    On a GPU runs the largest step, and captures some decode steps, to measure their memory.
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
        ),
    )
    graph_bytes = 0
    if config.cuda_graphs and not has_ranks(config):
        graph_bytes = measure_graphs(
            model,
            max_num_seqs=config.max_num_seqs,
            max_graph_tokens=most_graph_tokens(config),
            block_size=config.block_size,
            kv_dtype=kv_dtype,
        )
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    budget = share_of_device(
        share,
        total_bytes=total_bytes,
        used_bytes=total_bytes - free_bytes,
        step_bytes=step_bytes,
        graph_bytes=graph_bytes,
    )
    return budget, free_bytes - step_bytes - graph_bytes


def most_graph_tokens(config: WorkerConfig) -> int:
    """Tokens of the largest step with pieces as graphs: no step has more than --max-step-tokens."""
    return min(config.max_graph_tokens, config.max_step_tokens)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe_model(config: WorkerConfig, model: PagedModel, pool: KVPool) -> ModelDescription:
    return ModelDescription(
        name=config.model_name,
        architecture=model.architecture,
        tokenizer=config.tokenizer,
        end_token_ids=model.eos_token_ids,
        dtype=dtype_name(model.dtype),
        kv_dtype=dtype_name(pool.dtype),
        device=str(model.device),
    )


def describe_pool(config: WorkerConfig, loaded: Loaded) -> attach_pb2.PoolGeometry:
    model, pool = loaded.model, loaded.pool
    return attach_pb2.PoolGeometry(
        block_size_tokens=pool.block_size,
        block_count=pool.num_blocks,
        block_bytes=loaded.block_bytes,
        max_sequence_count=config.max_num_seqs,
        max_sequence_tokens=model.max_model_len,
        vocabulary_size=model.vocab_size,
        model=config.model_name,
        model_fingerprint=f"{model.fingerprint}:{dtype_name(pool.dtype)}",
        has_recurrent_state=model.has_recurrent_state,
        host_block_count=loaded.host_pool.num_blocks,
        layer_groups=describe_layer_groups(pool.groups),
    )


def describe_layer_groups(groups: LayerGroups) -> list[attach_pb2.LayerGroup]:
    """The groups for cachemgr; none for one group without a window, which is the default."""
    if not registers_groups(groups):
        return []
    return [
        attach_pb2.LayerGroup(
            kind=layer_group_kind(group), window_token_count=group.window or 0, layer_count=len(group.layers)
        )
        for group in groups
    ]


def registers_groups(groups: LayerGroups) -> bool:
    """True if there are several groups, or one with a window."""
    return len(groups) > 1 or groups[0].is_windowed


def layer_group_kind(group: LayerGroup) -> attach_pb2.LayerGroupKind.ValueType:
    """The kind of a group as cachemgr knows it."""
    match group.mask:
        case Causal():
            return attach_pb2.LAYER_GROUP_KIND_FULL
        case Sliding():
            return attach_pb2.LAYER_GROUP_KIND_SLIDING
        case _:
            return attach_pb2.LAYER_GROUP_KIND_CHUNKED
