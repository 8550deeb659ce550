"""The worker process: flags, wiring, start to exit."""

from __future__ import annotations

import logging
import os
import sys

# Threads that spin while they wait take the cores that gRPC and other processes need. To be said before torch starts
# them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import click

from quire.serving.addresses import Address
from quire.serving.dialing import DialOptions
from quire.serving.flags import DIAL_ADDRESS, command_settings, option
from quire.serving.logs import configure_logging
from quire.serving.manual import ServerCommand
from quire.serving.options import ServerOptions, dial_options, server_options
from quire.serving.runtime_folder import default_cachemgr, default_listen
from quire.serving.server import run
from quire.worker.config import (
    ATTENTION_NAMES,
    DTYPE_NAMES,
    KV_DTYPE_NAMES,
    LAYER_GROUP_NAMES,
    MAX_RANKS,
    ByteSize,
    NewFile,
    StepRange,
    WorkerConfig,
    default_threads,
)
from quire.worker.grant.errors import DOMAIN
from quire.worker.model.model_source import ModelNotFound, check_hub, find_folder
from quire.worker.service.roles import ROLES

log = logging.getLogger("quire.worker")


def check(config: WorkerConfig, *, is_local: bool) -> None:
    """Raises ValueError if the hub has no such model, or a file, an address or a GPU can't be used as the flags say."""
    config.server.secure(roles=ROLES, domain=DOMAIN)
    if config.device not in ("auto", "cpu"):
        # Only then: torch takes seconds to import.
        from quire.worker.device.devices import pick_device

        pick_device(config.device)
    if not is_local:
        check_hub(config.model, revision=config.revision)


class WorkerCommand(ServerCommand):
    files = (
        (default_listen("worker").removeprefix("unix:"), "The default address."),
        (
            "--token-file, --tls-*",
            "Read again when they change. While a file can't be read, its last content is used.",
        ),
    )


@click.command(name="worker", cls=WorkerCommand, context_settings=command_settings("QUIRE_WORKER"))
@option("--model", required=True, metavar="PATH_OR_HUB_ID", help="The model: a folder, or a hub id.")
@option(
    "--cachemgr",
    type=DIAL_ADDRESS,
    default=default_cachemgr(),
    metavar="ADDRESS",
    help="Address of the cachemgr that manages the pool: host:port or unix:/path.",
)
@dial_options("cachemgr")
@option(
    "--advertise",
    type=DIAL_ADDRESS,
    metavar="ADDRESS",
    help="Address at which clients reach this worker, if it is not the first --listen address (such as 0.0.0.0).",
)
@option("--pool", default="default", metavar="NAME", help="The pool's name at the cachemgr.")
@option(
    "--num-blocks", type=click.IntRange(min=2), metavar="BLOCKS", help="Blocks in the pool, the null block included."
)
@option("--kv-cache-memory", type=ByteSize(), metavar="BYTES", help="Memory for the pool, like 512M or 1.5G.")
@option(
    "--host-memory",
    type=ByteSize(),
    default=0,
    show_default="no host tier",
    metavar="BYTES",
    help="Memory of this machine for the blocks of preempted sequences, like 16G; pinned on a GPU.",
)
@option(
    "--memory-share",
    type=click.FloatRange(0, 1, min_open=True),
    show_default="0.5 on a CPU, 0.9 on a GPU, but no more blocks than --max-num-seqs sequences can use",
    metavar="FRACTION",
    help="If neither blocks nor bytes are given: on a CPU, part of the free memory for the pool; on a GPU, part of all "
    "memory for the model, its largest step and the pool.",
)
@option("--block-size", type=click.IntRange(1, 1024), default=16, metavar="TOKENS", help="Tokens per block.")
@option("--dtype", type=click.Choice(DTYPE_NAMES), default="auto", help="Weights and activations; auto: as saved.")
@option(
    "--kv-dtype",
    type=click.Choice(KV_DTYPE_NAMES),
    default="auto",
    help="Keys and values; auto: as activations. float8 (e4m3) takes half the memory of 16 bits and is less exact.",
)
@option(
    "--device",
    default="auto",
    metavar="DEVICE",
    help="Device for the model: cpu, cuda, cuda:1; auto: a GPU if there is one.",
)
@option(
    "--attention",
    type=click.Choice(ATTENTION_NAMES),
    default="auto",
    help="Attention over the pool; auto: triton on a GPU if the block size is 16, 32, 64 or 128, else torch.",
)
@option(
    "--layer-groups",
    type=click.Choice(LAYER_GROUP_NAMES),
    default="auto",
    help="auto: layers with a sliding window or chunks have block tables of their own, and give up the blocks behind "
    "it. one: one block table for all layers, which keeps all blocks.",
)
@option(
    "--cuda-graphs/--no-cuda-graphs",
    default=True,
    help="On a GPU, replay steps of one token per sequence as CUDA graphs, if the model allows it.",
)
@option(
    "--max-graph-tokens",
    type=click.IntRange(min=0),
    default=512,
    metavar="TOKENS",
    help="With --cuda-graphs, steps with prompts of up to so many tokens in all are replayed as CUDA graphs too, but "
    "for their attention; 0: none are.",
)
@option("--max-model-len", type=click.IntRange(min=1), metavar="TOKENS", help="Longest sequence; default: the model's.")
@option(
    "--max-num-seqs",
    type=click.IntRange(min=1),
    default=256,
    metavar="SEQUENCES",
    help="Sequences that may hold blocks at a time.",
)
@option(
    "--max-step-tokens",
    type=click.IntRange(min=1),
    default=8192,
    metavar="TOKENS",
    help="Tokens one step may compute.",
)
@option(
    "--threads",
    type=click.IntRange(min=1),
    default=default_threads,
    show_default="as many as cores",
    metavar="THREADS",
    help="CPU threads for the model.",
)
@option(
    "--step-timeout",
    "step_timeout_s",
    type=click.FloatRange(min=0),
    show_default="120 on a GPU, no limit on a CPU",
    metavar="SECONDS",
    help="Time limit of one step. After it health is NOT_SERVING; after twice the time the process ends with status 1. "
    "0: no limit.",
)
@option(
    "--profile",
    type=NewFile(),
    metavar="FILE",
    help="Write a Chrome trace of some steps to this file, once they have run.",
)
@option(
    "--profile-steps",
    type=StepRange(),
    default="20:10",
    metavar="FIRST:COUNT",
    help="The steps that --profile records, counted from the first step of this process.",
)
@option("--revision", metavar="REVISION", help="The model's revision on the hub.")
@option("--trust-remote-code", is_flag=True, help="Run code that comes with the model. Trust its author first.")
@option(
    "--fuse/--no-fuse",
    default=None,
    show_default="where there is a GPU",
    help="Run the layers of a model in fewer, fused operations, if their kind is known.",
)
@option(
    "--tensor-parallel-size",
    type=click.IntRange(1, MAX_RANKS),
    default=1,
    metavar="RANKS",
    help="Processes, with a device each, that the model and the pool are divided among. They are started on this "
    "machine, unless torchrun has started this one as one of them.",
)
@server_options(default_listen=default_listen("worker"))
def main(
    server: ServerOptions,
    cachemgr: Address,
    cachemgr_dial: DialOptions,
    model: str,
    kv_cache_memory: int | None,
    host_memory: int,
    **values: object,
) -> None:
    """Serve the KV pool and the model: run the steps that a cachemgr has granted.

    Loads the model, checks that it computes the same on the pool as by itself, allocates the pool once, attaches it to
    the cachemgr and serves. A model that can't be run correctly is refused at start. Set QUIRE_VERIFY=1 to check every
    access of every step and to stop rather than touch a block that is not its sequence's (slow).

    \b
    Examples:
      quire worker --model deploy/demo/model --num-blocks 512
      quire worker --model Qwen/Qwen3-0.6B --kv-cache-memory 4G --cachemgr cachemgr.internal:7070 \\
        --cachemgr-tls-ca ca.pem --listen 0.0.0.0:7071 --tls-cert worker.pem --tls-key worker.key
    """
    configure_logging(server.log_level, server.log_format)
    config = WorkerConfig(
        server=server,
        cachemgr=cachemgr,
        cachemgr_dial=cachemgr_dial,
        model=model,
        kv_cache_memory_bytes=kv_cache_memory,
        host_memory_bytes=host_memory,
        **values,  # type: ignore[arg-type]
    )
    if config.num_blocks is not None and config.kv_cache_memory_bytes is not None:
        raise click.UsageError("--num-blocks and --kv-cache-memory exclude each other.")
    try:
        folder = find_folder(model)
    except ModelNotFound as error:
        raise click.BadParameter(str(error), param_hint="'--model'") from error
    if server.only_check:
        server.end_check(lambda: check(config, is_local=folder is not None))
    # Only now: torch and transformers take seconds to import, and --help needs neither.
    if config.tensor_parallel_size > 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from quire.worker.tensor_parallel.process import run_given_rank

        run_given_rank(config)
    from quire.worker.service.process import serve

    sys.exit(run(lambda signals: serve(config, signals)))


if __name__ == "__main__":
    main(prog_name="quire worker")
