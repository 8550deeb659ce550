"""Loading of one rank: the model, checked, its part of the pool, the host tier and the decode steps as CUDA graphs.

    load_model -> size_of_pool -> make_pool -> capture_decode -> load_grammars -> allocate_host_pool -> warm_up

Each rank of a group loads its own part. Where sizes must agree, ranks ask each other: see quire.worker.run.ranks.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
import transformers

from quire.worker.adapter_bounds import AdapterBounds
from quire.worker.adapters.adapter import UnsupportedAdapter
from quire.worker.adapters.adapter_table import AdapterTable, NoAdapterRoomError
from quire.worker.adapters.peft_checkpoint import read_adapter
from quire.worker.attention.torch_attention import AttentionStep
from quire.worker.config import NO_FUSED_UPDATES, WorkerConfig
from quire.worker.device.devices import pick_device
from quire.worker.device.reproducible import fix_product_order
from quire.worker.fusion.adapted_steps import AdaptedSteps
from quire.worker.fusion.steps import (
    KERNEL_BLOCK_SIZES,
    FusedSteps,
    KernelSteps,
    ProductSource,
    choose_steps,
    fixed_steps,
)
from quire.worker.holder.borrowing import Borrowed
from quire.worker.memory.host_pool import HostPool, count_host_blocks, make_host_pool
from quire.worker.memory.kept_pool import KeptPool, Overwritten, mark_of, size_of_memory, size_of_tensors
from quire.worker.memory.kv_pool import KVPool, bytes_per_block, kernels_run_on
from quire.worker.memory.layer_groups import describe_groups, registers_groups, specs_of_places
from quire.worker.model.adapter_check import check_adapter
from quire.worker.model.checkpoint import load_model
from quire.worker.model.kv_scales import KV_FLOAT8, set_kv_scales
from quire.worker.model.model_source import find_tokenizer
from quire.worker.model.modes import Modes, Part
from quire.worker.model.paged_model import PagedModel
from quire.worker.run.executor import Executor
from quire.worker.run.graph_limit import NO_GRAPHS
from quire.worker.run.graphs import StaticDecode, capture_decode
from quire.worker.run.pool_budget import choose_graphs, size_of_pool
from quire.worker.run.prompt_graphs import StaticPrompts, capture_prompts
from quire.worker.run.ranks import ONE_RANK, OneRank
from quire.worker.run.verify import VerifyingExecutor, evidence_bytes
from quire.worker.run.warm_up import StepSizes, warm_up
from quire.worker.sampling.grammars import Grammars, NoGrammars, load_grammars

if TYPE_CHECKING:  # it imports Triton, which a worker on a CPU does not need
    from quire.worker.device.compilations import Compilations

log = logging.getLogger("quire.worker")

# GPUs that convert float8 themselves, from this compute capability on: Ada and Hopper.
FLOAT8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The parts of a worker before it serves; `decode` and `prompts` are steps as graphs, if they are captured.

    block_bytes are those of a block over all ranks.
    """

    grammars: Grammars | NoGrammars
    model: PagedModel
    pool: KVPool
    host_pool: HostPool
    decode: StaticDecode | None
    block_bytes: int
    prompts: StaticPrompts | None = None
    kept: KeptPool | None = None
    """The memory of the pool, if a holder keeps it."""
    adapters: AdapterTable = field(default_factory=AdapterTable)


def load_warm(config: WorkerConfig, ranks: OneRank = ONE_RANK) -> Loaded:
    """Load, and on a GPU run steps of all kinds, so that none has to be compiled later. Raises what load raises."""
    if pick_device(config.device).type != "cuda":
        loaded = load(config, ranks)
        warn_of_degraded(loaded.model.modes)
        return loaded
    # A worker on a CPU needs no Triton, which this imports.
    from quire.worker.device.compilations import Compilations, check_cache_folder

    check_cache_folder()
    compilations = Compilations()
    compilations.watch()
    loaded = load(config, ranks)
    warm_up_loaded(config, loaded)
    watch_late_compilations(compilations, loaded.model.modes)
    log.info("kernels: %s", compilations.statistics())
    warn_of_degraded(loaded.model.modes)
    return loaded


def watch_late_compilations(compilations: Compilations, modes: Modes) -> None:
    """Note the compilations so far, and each one from now on as a reason for a slow worker: all steps wait for it."""
    late: list[str] = []

    def note_late(name: str) -> None:
        late.append(name)
        modes.note(
            Part.KERNELS, str(compilations.statistics()), degraded=f"{len(late)} after the warm-up, the last is {name}"
        )

    modes.note(Part.KERNELS, str(compilations.statistics()))
    compilations.on_late = note_late
    compilations.expect_no_more()


def warn_of_degraded(modes: Modes) -> None:
    """Write a line to the log if a part of the steps runs slower than it could."""
    if modes.degraded():
        log.warning("DEGRADED: steps of this worker are slower than they could be: %s", modes.describe_degraded())


def warm_up_loaded(config: WorkerConfig, loaded: Loaded) -> None:
    """Run the steps of warm_up on the loaded parts. Raises ValueError if one fails.

    Steps that have a graph of their own run in pieces here: the kernels of pieces have to be compiled, and those of the
    graphs are.
    """
    model, pool, host_pool = loaded.model, loaded.pool, loaded.host_pool
    executor = Executor(
        model,
        pool,
        max_num_seqs=config.max_num_seqs,
        decode=loaded.decode,
        host_pool=host_pool,
        kept=None if loaded.kept is None else Overwritten(loaded.kept),
    )
    sizes = StepSizes(
        config.max_step_tokens,
        config.max_num_seqs,
        model.max_model_len,
        can_go_on=not model.has_recurrent_state,
        max_drafts=0 if model.has_recurrent_state else config.max_draft_tokens,
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
    step_kind = pick_attention(config.attention, device, block_size=config.block_size)
    check_deterministic(config, device, step_kind)
    if device.type == "cpu":
        torch.set_num_threads(config.threads)
    if config.deterministic:
        fix_product_order()
    choose_launches(config.dependent_launch, device)
    choose_tiles(device, are_fixed=config.deterministic)
    model = load_model(
        config.model,
        dtype=None if config.dtype == "auto" else getattr(torch, config.dtype),
        device=device,
        max_model_len=config.max_model_len,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        step_kind=step_kind,
        fused_steps=pick_steps(
            device,
            step_kind,
            block_size=config.block_size,
            wanted=config.fuse,
            products=config.products,
            deterministic=config.deterministic,
            adapted=config.wants_adapters,
        ),
        ranks=ranks,
        layer_groups=config.layer_groups,
        deterministic=config.deterministic,
        quantization=config.quantization,
    )
    adapters = load_adapters(config, model)
    if model.fusion is not None:
        log.info("%s", model.fusion)
    note_choices(config, model)
    kv_dtype = pick_kv_dtype(config.kv_dtype, model.dtype)
    check_kv_dtype(kv_dtype, device)
    if kv_dtype != model.dtype and not model.takes_any_kv_dtype:
        has = f"its own attention, and reads keys and values of {dtype_name(model.dtype)}"
        raise ValueError(f"--kv-dtype {config.kv_dtype}: {model.architecture} keeps {has}")
    if kv_dtype != model.dtype and not model.step_kind.takes_any_kv_dtype:
        reads = f"it reads keys and values of the model's dtype, {dtype_name(model.dtype)}"
        raise ValueError(f"--kv-dtype {config.kv_dtype} with --attention {config.attention}: {reads}")
    if kv_dtype == KV_FLOAT8:
        set_kv_scales(model, ranks=ranks)
    model.allocate_states(config.max_num_seqs)
    has_graphs = device.type == "cuda" and uses_graphs(config)
    graphs = choose_graphs(config, model, kv_dtype) if has_graphs else NO_GRAPHS
    kept = None
    if config.holder is not None and config.num_blocks is not None:
        kept = borrow(config, model, kv_dtype, num_blocks=config.num_blocks)
    held_bytes = 0 if kept is None else kept.held_bytes
    size = size_of_pool(config, model, kv_dtype, ranks, graphs=graphs, held_bytes=held_bytes)
    log.info("model %s (%s), %s on %s", config.model_name, model.architecture, dtype_name(model.dtype), device)
    log.info("attention: %s", model.describe_attention())
    log.info("pool: %s", size.explanation)
    if registers_groups(model.layer_groups):
        bytes_of_one = layer_bytes(config, model, kv_dtype)
        log.info("layer groups: %s", describe_groups(model.layer_groups, layer_bytes=bytes_of_one))
    if model.has_recurrent_state:
        log.info("states: %d bytes for %d sequences", model.states.statistics().num_bytes, config.max_num_seqs)
    if config.holder is not None and kept is None:
        kept = borrow(config, model, kv_dtype, num_blocks=size.num_blocks)
    pool = model.make_pool(
        num_blocks=size.num_blocks,
        block_size=config.block_size,
        dtype=kv_dtype,
        allocate=None if kept is None else kept.allocate,
    )
    if kept is not None:
        kept.bind(pool)
        pool.check_invariants()
    note_copies(model.modes, pool)
    decode = None
    if has_graphs:
        log.info("CUDA graphs of mixed steps: up to %d tokens, by %s", graphs.num_tokens, graphs.reason)
        decode = capture_decode(
            model,
            pool,
            max_num_seqs=config.max_num_seqs,
            max_graph_tokens=graphs.num_tokens,
            whole=config.step_graph == "one",
        )
    prompts = None
    if decode is not None and config.max_whole_graph_tokens:
        max_tokens = min(config.max_whole_graph_tokens, config.max_step_tokens)
        prompts = capture_prompts(model, pool, max_tokens=max_tokens, memory=decode.memory)
    grammars = load_grammars(
        find_tokenizer(config.model, revision=config.revision),
        vocab_size=model.vocab_size,
        end_token_ids=model.eos_token_ids,
    )
    if isinstance(grammars, NoGrammars):
        log.info("no grammars: %s", grammars.reason)
    host_pool = allocate_host_pool(config, model, pool, ranks)
    return Loaded(grammars, model, pool, host_pool, decode, ranks.total(pool.bytes_per_block), prompts, kept, adapters)


def load_adapters(config: WorkerConfig, model: PagedModel) -> AdapterTable:
    """Return the adapters of --lora, in the model. Raises ValueError if it takes none, or one is not supported."""
    bounds = AdapterBounds(config.max_loras, config.max_lora_rank, config.lora_memory_bytes)
    if config.wants_adapters and (why := why_no_adapters(config, model)) is not None:
        raise ValueError(f"--lora: {why}")
    if config.wants_adapters and model.device.type == "cuda":
        bounds = take_adapter_slots(bounds, model)
        if len(config.lora) > bounds.max_adapters:
            room = f"{bounds.count_limit} has room for {bounds.max_adapters} of rank up to {bounds.max_rank}"
            raise ValueError(f"--lora is given {len(config.lora)} times; {room}")
    table = AdapterTable(bounds)
    for name, path in config.lora:
        adapter = model.adapters.prepare(read_adapter(name, path, bounds), bounds)
        try:
            table.find_room(adapter.identity, adapter.num_bytes, is_used=lambda identity: True)
        except NoAdapterRoomError as error:
            raise UnsupportedAdapter(name, str(error)) from None
        model.adapters.add(adapter)
        check_adapter(model, adapter)
        table.add(name, adapter.identity, adapter.num_bytes)
        log.info("adapter %s: %s", name, adapter.identity.hex())
    return table


def take_adapter_slots(wanted: AdapterBounds, model: PagedModel) -> AdapterBounds:
    """Take memory for adapters on a GPU; return the bounds that it has room for, and log them."""
    bounds = model.make_adapter_slots(wanted)
    log.info(
        "adapters: memory for %d of rank up to %d, by %s", bounds.max_adapters, bounds.max_rank, bounds.count_limit
    )
    return bounds


def why_no_adapters(config: WorkerConfig, model: PagedModel) -> str | None:
    """Return why this worker takes no adapters, for people; None if it does."""
    if config.adapter_conflict is not None:
        return config.adapter_conflict
    if config.fuse and model.device.type == "cpu":
        return NO_FUSED_UPDATES
    if model.device.type != "cpu" and not config.wants_adapters:
        return "it has taken no memory for them on its GPU: start it with --enable-lora"
    if not model.takes_adapters:
        return f"{model.architecture} keeps its own attention, which takes a step in parts"
    return None


def borrow(config: WorkerConfig, model: PagedModel, kv_dtype: torch.dtype, *, num_blocks: int) -> KeptPool:
    """Have the pool's memory from the holder. Raises ValueError if it can't be had."""
    assert config.holder is not None, "the caller has looked"
    if model.device.type != "cpu" and config.num_blocks is None:
        reason = "on a GPU the number of blocks follows from what is free, and the next worker would have another one"
        raise ValueError(f"--holder needs --num-blocks: {reason}")
    places = specs_of_places(model.specs, model.layer_groups)
    num_bytes = bytes_per_block(places, config.block_size, kv_dtype)
    evidence = evidence_bytes(config.block_size) if verifies() else 0
    how = (config.deterministic, evidence, num_blocks, config.block_size, kv_dtype, num_bytes)
    mark = mark_of(model.fingerprint, *how, sorted(places.items()), [group.mask for group in model.layer_groups])
    tensor_bytes = size_of_tensors(num_blocks=num_blocks, bytes_per_block=num_bytes, num_tensors=2 * len(places))
    beside = tensor_bytes if model.device.type == "cpu" else 0
    kept = KeptPool(
        Borrowed(Path(config.holder.path), size_of_memory(num_blocks=num_blocks, evidence_bytes=evidence) + beside),
        mark=mark,
        num_blocks=num_blocks,
        evidence_bytes=evidence,
        device=model.device,
        tensor_bytes=tensor_bytes,
        deposits=model.device.type != "cpu",
    )
    if kept.is_foreign:
        log.warning("memory not kept: it is of another model, dtype, pool or layout; the pool begins empty")
    return kept


def check_deterministic(config: WorkerConfig, device: torch.device, step_kind: type[AttentionStep]) -> None:
    """Raises ValueError if the worker is to be deterministic, and a flag excludes it on this device.

    Each part runs in kernels, or none does: in torch on a GPU tiles and splits follow from the batch.
    """
    if not config.deterministic:
        return
    if step_kind is not AttentionStep:
        if config.fuse is False:
            raise ValueError("--deterministic excludes --no-fuse on a GPU: norms and products are in fused modules")
    elif device.type != "cpu":
        flag = "--attention torch" if config.attention == "torch" else f"--block-size {config.block_size}"
        raise ValueError(f"--deterministic excludes {flag} on a GPU: attention has to be in kernels")
    elif config.fuse:
        raise ValueError("--deterministic excludes --fuse on a CPU: fused modules are not made for it")


def pick_steps(
    device: torch.device,
    step_kind: type[AttentionStep],
    *,
    block_size: int,
    wanted: bool | None,
    products: ProductSource,
    deterministic: bool,
    adapted: bool = False,
) -> FusedSteps | None:
    """The steps to fuse a model with: see choose_steps(). A deterministic one is fused if its attention is in kernels.

    adapted: with updates of adapters, if they run in kernels. Raises what choose_steps() raises.
    """
    if deterministic:
        steps: FusedSteps | None = None if step_kind is AttentionStep else fixed_steps()
    else:
        steps = choose_steps(device, block_size=block_size, wanted=wanted, products=products)
    return AdaptedSteps(steps) if adapted and isinstance(steps, KernelSteps) else steps


def choose_tiles(device: torch.device, *, are_fixed: bool) -> None:
    """Have kernels take tiles that do not depend on the batch, or those that are fastest, where kernels run."""
    if not kernels_run_on(device):
        return
    from quire.kernels.fixed_tiles import use_fixed_tiles

    use_fixed_tiles(are_fixed)


def choose_launches(is_wanted: bool | None, device: torch.device) -> None:
    """Launch kernels before those in front of them have ended, or not; None: as the kernels' own default says."""
    if device.type != "cuda":
        return
    from quire.kernels.dependent_launch import IS_DEFAULT, can_launch_dependents, use_dependent_launches

    is_used = IS_DEFAULT if is_wanted is None else is_wanted
    use_dependent_launches(is_used)
    if is_used:
        log.info("dependent launch: %s", "on" if can_launch_dependents(device) else f"off, not on {device}")


def make_executor(config: WorkerConfig, loaded: Loaded, ranks: OneRank) -> Executor:
    """Return what runs the steps on what was loaded; with QUIRE_VERIFY=1 it checks each of them."""
    kind = VerifyingExecutor if verifies() else Executor
    return kind(
        loaded.model,
        loaded.pool,
        max_num_seqs=config.max_num_seqs,
        decode=loaded.decode,
        prompts=loaded.prompts,
        host_pool=loaded.host_pool,
        ranks=ranks,
        spins=config.wait == "spin",
        kept=loaded.kept,
    )


def verifies() -> bool:
    """True if each step is to be checked."""
    return os.environ.get("QUIRE_VERIFY") == "1"


def note_choices(config: WorkerConfig, model: PagedModel) -> None:
    """Note the modes that follow from flags and the device."""
    modes, is_gpu = model.modes, model.device.type == "cuda"
    model.note_attention(is_chosen=config.attention == "torch")
    has_kernels = config.block_size in KERNEL_BLOCK_SIZES
    if is_gpu and not has_kernels and config.fuse is not False and not config.has_ranks:
        allowed = ", ".join(map(str, KERNEL_BLOCK_SIZES))
        reason = f"--block-size {config.block_size} is not one of {allowed}"
        modes.note(Part.MODULES, "without kernels of fused modules", degraded=reason)
    if is_gpu and config.cuda_graphs and not config.has_ranks:
        return  # capture_decode() notes what comes of it
    why = f"{config.tensor_parallel_size} ranks" if config.has_ranks else "--no-cuda-graphs"
    modes.note_without_graphs(why if is_gpu else "a CPU has none")


def note_copies(modes: Modes, pool: KVPool) -> None:
    """Note how blocks are copied, if the pool is on a GPU and has any bytes."""
    if pool.device.type != "cuda" or not pool.bytes_per_block:
        return
    if pool.copies_by_kernel:
        modes.note(Part.COPIES, "by a kernel")
    else:
        modes.note(Part.COPIES, "tensor by tensor", degraded="the kernel does not take blocks of such sizes")


def uses_graphs(config: WorkerConfig) -> bool:
    """True if decode steps are to be CUDA graphs."""
    if config.cuda_graphs and config.has_ranks:
        log.info("CUDA graphs: off, %d ranks compute each step together", config.tensor_parallel_size)
    return config.cuda_graphs and not config.has_ranks


def layer_bytes(config: WorkerConfig, model: PagedModel, kv_dtype: torch.dtype) -> int:
    """Bytes of one layer of a block; all layers of a model with several groups have the same."""
    return bytes_per_block({0: next(iter(model.specs.values()))}, config.block_size, kv_dtype)


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
    """The attention kernels. Raises ValueError if those that are named can't run here, or not with this block size."""
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        return AttentionStep
    if not kernels_run_on(device):
        raise ValueError(
            f"--attention {name}: it needs a GPU, and the device is {device.type} (for tests it runs in Triton's "
            "interpreter, with TRITON_INTERPRET=1)"
        )
    from quire.kernels.launching import BLOCK_SIZES
    from quire.worker.attention.flashinfer_attention import FlashInferAttentionStep, check_installed
    from quire.worker.attention.triton_attention import TritonAttentionStep

    if name == "flashinfer":
        check_installed()
    if block_size in BLOCK_SIZES:
        return FlashInferAttentionStep if name == "flashinfer" else TritonAttentionStep
    allowed = ", ".join(map(str, BLOCK_SIZES))
    if name != "auto":
        raise ValueError(f"--attention {name}: --block-size {block_size} is not one of {allowed}")
    log.warning(
        "attention runs in torch, which is slow on a GPU: --block-size %d is not one of %s", block_size, allowed
    )
    return AttentionStep


def pick_kv_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """The pool's dtype; "auto" is the model's."""
    if name == "auto":
        return model_dtype
    dtype: torch.dtype = KV_FLOAT8 if name == "float8" else getattr(torch, name)
    return dtype


def check_kv_dtype(kv_dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError if the GPU can't convert the pool's dtype."""
    if device.type != "cuda" or kv_dtype != KV_FLOAT8:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FLOAT8_CAPABILITY:
        needed, found = (".".join(map(str, pair)) for pair in (FLOAT8_CAPABILITY, capability))
        raise ValueError(f"--kv-dtype float8: it needs a GPU of compute capability {needed}; this one has {found}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
