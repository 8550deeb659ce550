"""A worker from its settings to its end: load, allocate, attach, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
from functools import partial

import torch

from quire.compute.v1 import worker_service_pb2_grpc
from quire.serving.dialing import Dialer
from quire.serving.metrics import MetricsPage
from quire.serving.server import CannotStartError, Server, StopSignals
from quire.worker.config import WorkerConfig
from quire.worker.device.devices import pick_device, use_device
from quire.worker.device.profiling import StepProfiler
from quire.worker.disk.disk_tier import DiskTier
from quire.worker.disk.store import Store
from quire.worker.grant.errors import DOMAIN
from quire.worker.grant.gate import Gate
from quire.worker.memory.kept_pool import KeptContent, KeptPool, mark_of
from quire.worker.memory.layer_groups import registers_groups
from quire.worker.model.paged_model import PagedModel
from quire.worker.run.executor import Executor
from quire.worker.run.loading import Loaded, dtype_name, load_warm, make_executor, verifies, why_no_adapters
from quire.worker.run.model_thread import ModelThread
from quire.worker.run.ranks import ONE_RANK
from quire.worker.run.watchdog import DEFAULT_LIMIT_S, GROUP_LIMIT_S, Watchdog, WatchdogActions
from quire.worker.sampling.grammars import Grammars
from quire.worker.sampling.parameters import MAX_LOGPROBS
from quire.worker.service.adapter_loading import AdapterLoader
from quire.worker.service.attachment import Attachment
from quire.worker.service.description import count_host_copies, describe_model, describe_pool
from quire.worker.service.metrics import metric_families
from quire.worker.service.roles import MESSAGE_LIMITS, ROLES
from quire.worker.service.servicer import WorkerServicer
from quire.worker.service.steps import StepLimits, Steps, new_epoch
from quire.worker.tensor_parallel.process import Group, lead, rank_config

log = logging.getLogger("quire.worker")

SERVICE_NAME = "quire.compute.v1.WorkerService"


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
            group = await stack.enter_async_context(await lead(config, thread)) if config.has_ranks else None
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
        disk = await thread.submit(partial(open_disk, config, loaded, executor, asyncio.get_running_loop()))
        geometry = describe_pool(config, loaded, num_disk_blocks=0 if disk is None else disk.num_blocks)
        limits = StepLimits.of(
            geometry,
            max_step_tokens=config.max_step_tokens,
            max_logprobs=MAX_LOGPROBS,
        )
        steps = Steps(gate, executor, thread, limits, loaded.grammars, loaded.kept, loaded.adapters)
        if isinstance(loaded.grammars, Grammars):
            stack.callback(loaded.grammars.close)
        steps.on_violation = server.fail
        if disk is not None:
            stack.callback(disk.close)
            steps.on_new_epoch = disk.begin_epoch
        if executor.profiler is not None:
            stack.push_async_callback(write_profile, executor.profiler, steps, thread)
        attachment = Attachment(
            dialer,
            steps,
            geometry=geometry,
            worker_address=lambda: str(config.advertise or server.addresses[0]),
            kept=loaded.kept,
            content=find_content(config, loaded.kept),
            disk=disk,
        )
        if config.server.metrics_listen is not None:
            read = partial(
                metric_families, steps, attachment, model.modes, disk, pool=config.pool, model=config.model_name
            )
            health = partial(health_lines, model)
            stack.enter_context(MetricsPage(config.server.metrics_listen, read, security=security, health=health))
        loader = AdapterLoader(
            model, steps, thread, model_name=config.model_name, excluded=why_no_adapters(config, model)
        )
        servicer = WorkerServicer(steps, attachment, describe_model(config, model, pool), geometry, loader, disk)
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


def open_disk(
    config: WorkerConfig, loaded: Loaded, executor: Executor, loop: asyncio.AbstractEventLoop
) -> DiskTier | None:
    """Return the disk below the host tier, if there is one; say in the log what was found there.

    Raises CannotStartError.
    """
    if config.disk_dir is None:
        return None
    if not count_host_copies(config, loaded):
        num_blocks, share = loaded.host_pool.num_blocks, config.host_cache_share
        raise CannotStartError(
            f"--disk-dir: the host tier has no room for a copy: --host-cache-share {share} of its {num_blocks} blocks"
        )
    pool, model = loaded.pool, loaded.model
    fingerprint = f"{model.fingerprint}:{dtype_name(pool.dtype)}"
    shapes = [(tuple(tensor.shape[1:]), str(tensor.dtype)) for tensor in pool.tensors()]
    groups = [pool.groups] if registers_groups(pool.groups) else []
    try:
        store = Store(
            config.disk_dir,
            content_bytes=executor.host_block_bytes,
            memory_bytes=config.disk_memory_bytes,
            mark=mark_of(fingerprint, pool.block_size, shapes, sys.byteorder, verifies(), *groups),
        )
    except (OSError, ValueError) as error:
        raise CannotStartError(f"--disk-dir: {error}" if isinstance(error, OSError) else str(error)) from error
    log.info("disk: %d blocks of %d bytes, %d found", store.num_blocks, store.content_bytes, len(store.records))
    if store.refused:
        log.warning("disk: copies are not used, and removed %s", store.refused)
    return DiskTier(
        store, executor, model.modes, call_soon=loop.call_soon_threadsafe, write_rate=config.disk_write_rate
    )


def find_content(config: WorkerConfig, kept: KeptPool | None) -> KeptContent | None:
    """Return what an earlier worker has left in the pool's memory, None if there is none; say so in the log."""
    if kept is None or not kept.is_kept:
        return None
    content, changed = kept.find_content(verify_all=config.verify_kept_blocks)
    if changed:
        log.error("kept blocks dropped, their bytes were changed blocks=%s", ",".join(map(str, changed[:20])))
    log.info("memory found epoch=%d dropped=%d", content.epoch, len(changed))
    return content


def health_lines(model: PagedModel) -> list[str]:
    """Return the lines of /healthz: the mode of each part of a step, and the reason if it is degraded."""
    return [str(mode) for mode in model.modes.all()]


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
