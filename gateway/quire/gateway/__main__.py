"""The gateway process: its flags, checked."""

from __future__ import annotations

import quire.serving.polling  # noqa: F401 - before gRPC is imported

# isort: split
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import click

from quire.client.credentials import Credentials
from quire.gateway.config import NO_FLAGS_OF_GATEWAY, OWN_FLAGS, GatewayOptions
from quire.gateway.security import secure
from quire.serving.addresses import DEFAULT_HTTP_LISTEN
from quire.serving.dialing import DialOptions
from quire.serving.flags import DIAL_FLAGS, add_flags, command_settings, http_addresses
from quire.serving.logs import configure_logging
from quire.serving.manual import ServerCommand
from quire.serving.options import ServerOptions, dial_options, server_options
from quire.serving.runtime import collector_paused


@click.command(name="serve", cls=ServerCommand, context_settings=command_settings("QUIRE_SERVE"))
@server_options(default_listen=DEFAULT_HTTP_LISTEN, without=NO_FLAGS_OF_GATEWAY)
@dial_options("cachemgr")
@add_flags(OWN_FLAGS)
def main(server: ServerOptions, cachemgr_dial: DialOptions, host: str | None, port: int | None, **own: Any) -> None:
    """Serve text over HTTP, with OpenAI's API.

    It is a client of cachemgr and of the worker. It waits for them if they do not serve yet, and prints a line when it
    serves. See docs/reference/http.md for the endpoints.

    \b
    Example:
      quire serve --cachemgr unix:/run/quire/cachemgr.sock --served-model-name llama --listen 127.0.0.1:8000
    """
    configure_logging(server.log_level, server.log_format)
    server = replace(server, listen=http_addresses("--listen", server.listen, host=host, port=port))
    flags = GatewayOptions(**own)
    if flags.shepherd is not None and not flags.pool:
        raise click.UsageError("--shepherd needs --pool: one worker of Shepherd Model Gateway is one pool.")
    if flags.shepherd is not None and flags.has_keys:
        raise click.UsageError("--shepherd and API keys exclude each other: that gateway shows its workers no key.")
    credentials = Credentials(**{name: getattr(cachemgr_dial, name) for name in DIAL_FLAGS})
    if server.only_check:
        server.end_check(lambda: secure(server, flags))
    # Only now: what serves takes tenths of a second to import, and --help and --check need none of it.
    with collector_paused():
        from quire.gateway.process import serve
        from quire.serving.server import run

    settings = partial(serve, flags=flags, credentials=credentials)
    sys.exit(run(lambda signals: settings(server, signals)))


if __name__ == "__main__":
    main(prog_name="quire serve")
