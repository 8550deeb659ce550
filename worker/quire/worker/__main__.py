"""The worker process: flags, wiring, start to exit."""

from __future__ import annotations

import logging
import os
import sys

# Threads that spin while they wait take the cores that gRPC and other processes need. To be said before torch starts
# them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import quire.serving.polling  # noqa: F401 - before gRPC is imported

# isort: split
import click

from quire.serving.addresses import Address
from quire.serving.dialing import DialOptions
from quire.serving.flags import add_flags, command_settings
from quire.serving.logs import configure_logging
from quire.serving.manual import ServerCommand
from quire.serving.options import ServerOptions, dial_options, server_options
from quire.serving.runtime import collector_paused
from quire.serving.runtime_folder import default_listen
from quire.worker.config import WorkerConfig
from quire.worker.flags import OWN_FLAGS
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
@dial_options("cachemgr")
@add_flags(OWN_FLAGS)
@server_options(default_listen=default_listen("worker"))
def main(
    server: ServerOptions,
    cachemgr: Address,
    cachemgr_dial: DialOptions,
    model: str,
    kv_cache_memory: int | None,
    host_memory: int,
    disk_memory: int,
    disk_write_rate: int,
    lora_memory: int,
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
        disk_memory_bytes=disk_memory,
        disk_write_rate=disk_write_rate,
        lora_memory_bytes=lora_memory,
        **values,  # type: ignore[arg-type]
    )
    if config.conflict is not None:
        raise click.UsageError(config.conflict)
    try:
        folder = find_folder(model)
    except ModelNotFound as error:
        raise click.BadParameter(str(error), param_hint="'--model'") from error
    if server.only_check:
        server.end_check(lambda: check(config, is_local=folder is not None))
    # Only now: torch and transformers take seconds to import, and --help needs neither.
    with collector_paused():
        from quire.serving.server import run
        from quire.worker.service.process import serve
        from quire.worker.tensor_parallel.process import run_given_rank

    if config.tensor_parallel_size > 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        run_given_rank(config)
    sys.exit(run(lambda signals: serve(config, signals)))


if __name__ == "__main__":
    main(prog_name="quire worker")
