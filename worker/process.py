"""A worker from its settings to its end: load, allocate, attach, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import sys

import psutil
import torch
import transformers

from quire.cache.v1 import attach_pb2
from quire.compute.v1 import worker_service_pb2_grpc
from quire.serving.dialing import Dialer
from quire.serving.metrics import MetricsPage
from quire.serving.server import CannotStartError, Server, StopSignals
from quire.worker.attachment import Attachment
from quire.worker.config import WorkerConfig
from quire.worker.errors import DOMAIN
from quire.worker.executor import Executor
from quire.worker.gate import Gate
from quire.worker.kv_pool import KVPool, bytes_per_block, size_pool
from quire.worker.metrics import metric_families
from quire.worker.model import PagedModel, load_model
from quire.worker.profiling import StepProfiler
from quire.worker.roles import ROLES
from quire.worker.runner import ModelThread
from quire.worker.sampler import MAX_LOGPROBS
from quire.worker.servicer import ModelDescription, WorkerServicer
from quire.worker.steps import StepLimits, Steps, new_epoch
from quire.worker.verify import VerifyingExecutor

log = logging.getLogger("quire.worker")

SERVICE_NAME = "quire.compute.v1.WorkerService"


async def serve(config: WorkerConfig, signals: StopSignals) -> None:
    """Serves WorkerService until a signal. SERVING once the pool has been attached for the first time."""
    security = config.server.secure(roles=ROLES, domain=DOMAIN)
    dialer = Dialer(config.cachemgr, config.cachemgr_dial)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(Server(service_names=[SERVICE_NAME], domain=DOMAIN, security=security))
        thread = ModelThread(asyncio.get_running_loop())
        stack.callback(thread.stop)
        try:
            model, pool = await thread.submit(lambda: load(config))
        except ValueError as error:  # ModelNotFound and UnsupportedModel among them
            raise CannotStartError(str(error)) from error
        gate = Gate(config.pool, new_epoch())
        executor_kind = VerifyingExecutor if os.environ.get("QUIRE_VERIFY") == "1" else Executor
        executor = executor_kind(model, pool, max_num_seqs=config.max_num_seqs)
        if config.profile is not None:
            executor.profiler = StepProfiler(config.profile, *config.profile_steps)
            stack.push_async_callback(thread.submit, executor.profiler.stop)  # if it ends before they have run
        limits = StepLimits(model.vocab_size, config.max_step_tokens, MAX_LOGPROBS)
        steps = Steps(gate, executor, thread, limits)
        steps.on_violation = server.fail
        geometry = describe_pool(config, model, pool)
        attachment = Attachment(
            dialer,
            steps,
            geometry=geometry,
            worker_address=lambda: str(config.advertise or server.addresses[0]),
        )
        if config.server.metrics_listen is not None:
            stack.enter_context(
                MetricsPage(config.server.metrics_listen, lambda: metric_families(steps, attachment), security=security)
            )
        servicer = WorkerServicer(steps, attachment, describe_model(config, model), geometry)
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.grpc)
        await server.start(config.server.listen)
        server.run_alongside(attachment.run())
        gc.freeze()
        announcing = asyncio.create_task(announce_when_attached(server, attachment))
        stack.callback(announcing.cancel)
        await server.serve_until_signal(signals, drain=servicer.drain, drain_timeout_s=config.server.drain_timeout_s)


async def announce_when_attached(server: Server, attachment: Attachment) -> None:
    """Health: SERVING once there is a pool that clients can lease."""
    await attachment.attached_once()
    await server.announce_serving()
    log.info("serving addresses=%s", ",".join(map(str, server.addresses)))


def load(config: WorkerConfig) -> tuple[PagedModel, KVPool]:
    """The model, checked, and its pool. Raises what load_model and size_pool raise."""
    quiet_transformers()
    device = torch.device(pick_device(config.device))
    if device.type == "cpu":
        torch.set_num_threads(config.threads)
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    model = load_model(
        config.model,
        dtype=dtype,
        device=device,
        max_model_len=config.max_model_len,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
    )
    size = size_pool(
        bytes_per_block=bytes_per_block(model.specs, config.block_size, model.dtype),
        free_memory_bytes=free_memory_bytes(device),
        num_blocks=config.num_blocks,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        memory_share=config.memory_share,
    )
    log.info("model %s (%s), %s on %s", config.model_name, model.architecture, dtype_name(model.dtype), device)
    log.info("pool: %s", size.explanation)
    pool = KVPool(
        model.specs, num_blocks=size.num_blocks, block_size=config.block_size, dtype=model.dtype, device=device
    )
    return model, pool


def quiet_transformers() -> None:
    """Its warnings are about uses that this is not; its progress bars are for terminals."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def pick_device(name: str) -> str:
    """ "auto" is a GPU if there is one."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def free_memory_bytes(device: torch.device) -> int:
    """Memory that a pool on this device could take now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe_model(config: WorkerConfig, model: PagedModel) -> ModelDescription:
    return ModelDescription(
        name=config.model_name,
        architecture=model.architecture,
        tokenizer=config.tokenizer,
        end_token_ids=model.eos_token_ids,
        dtype=dtype_name(model.dtype),
        kv_dtype=dtype_name(model.dtype),
        device=str(model.device),
    )


def describe_pool(config: WorkerConfig, model: PagedModel, pool: KVPool) -> attach_pb2.PoolGeometry:
    return attach_pb2.PoolGeometry(
        block_size_tokens=pool.block_size,
        block_count=pool.num_blocks,
        block_bytes=pool.bytes_per_block,
        max_sequence_count=config.max_num_seqs,
        max_sequence_tokens=model.max_model_len,
        vocabulary_size=model.vocab_size,
        model=config.model_name,
        model_fingerprint=f"{model.fingerprint}:{dtype_name(model.dtype)}",
    )
