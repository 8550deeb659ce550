"""The cachemgr process: its flags, checked."""

from __future__ import annotations

import quire.serving.polling  # noqa: F401 - before gRPC is imported

# isort: split
import os
import sys
from functools import partial
from pathlib import Path

import click

from quire.cache.v1.reasons import DOMAIN
from quire.cachemgr.flags import OWN_FLAGS
from quire.cachemgr.service.roles import ROLES
from quire.cachemgr.shares import watch_shares
from quire.serving.flags import add_flags, command_settings
from quire.serving.logs import configure_logging
from quire.serving.manual import ServerCommand
from quire.serving.options import ServerOptions, server_options
from quire.serving.runtime import collector_paused
from quire.serving.runtime_folder import default_listen


class CachemgrCommand(ServerCommand):
    files = (
        (default_listen("cachemgr").removeprefix("unix:"), "The default --listen address."),
        ("DIR of --state-dir", "The state for a restart. Best on a tmpfs, with 190 bytes a block and 64 MiB."),
        (
            "--token-file, --tenants, --tls-*",
            "Read again when they change. While a file can't be read, its last content is used.",
        ),
    )


def check_files(options: ServerOptions, tenants: Path | None) -> None:
    """Raises ValueError if a flag's file can't be used, or an address can't be served with these flags."""
    options.secure(roles=ROLES, domain=DOMAIN)
    if tenants is not None:
        watch_shares(tenants)


@click.command(name="cachemgr", cls=CachemgrCommand, context_settings=command_settings("QUIRE_CACHEMGR"))
@server_options(default_listen=default_listen("cachemgr"))
@add_flags(OWN_FLAGS)
def main(
    server: ServerOptions,
    eviction_policy: str,
    max_leases: int,
    tenants: Path | None,
    keep_share: float,
    keep_tokens: bool,
    state_dir: Path | None,
) -> None:
    """Serve the block manager, which assigns KV blocks to sequences.

    Workers attach their pools to it; clients create leases and plan steps. With --state-dir a restart continues from
    the state at the end of the process, unless the machine was rebooted. Set QUIRE_VERIFY=1 to check all invariants
    after every change (slow).

    \b
    Example:
      quire cachemgr --listen unix:/run/quire/cachemgr.sock --listen 127.0.0.1:7070
    """
    configure_logging(server.log_level, server.log_format)
    if server.only_check:
        server.end_check(lambda: check_files(server, tenants))
    # Only now: what serves takes tenths of a second to import, and --help and --check need none of it.
    with collector_paused():
        from quire.cachemgr.process import serve
        from quire.serving.server import run

    verify = os.environ.get("QUIRE_VERIFY") == "1"
    settings = partial(
        serve,
        policy=eviction_policy,
        max_leases=max_leases,
        tenants=tenants,
        keep_share=keep_share,
        keep_tokens=keep_tokens,
        state_dir=state_dir,
        verify=verify,
    )
    sys.exit(run(lambda signals: settings(server, signals)))


if __name__ == "__main__":
    main(prog_name="quire cachemgr")
