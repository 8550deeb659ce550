"""`quire holder`: flags, start to exit."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from pathlib import Path

import click

from quire.serving.addresses import AddressError, UnixAddress
from quire.serving.flags import UNIX_ADDRESS, command_settings, option
from quire.serving.logs import configure_logging
from quire.serving.runtime_folder import default_listen
from quire.worker.holder.holder import Holder, listen_at

log = logging.getLogger("quire.holder")


@click.command(name="holder", context_settings=command_settings("QUIRE_HOLDER"))
@option(
    "--listen",
    type=UNIX_ADDRESS,
    default=default_listen("holder"),
    metavar="unix:PATH",
    help="Address at which a worker asks for its memory; for this user only.",
)
def main(listen: UnixAddress) -> None:
    """Keep the pool of a worker beyond the worker's death (Linux).

    Start it before the worker, and the worker with --holder. One worker at a time has the memory. A worker that comes
    after it finds what was published, unless its model or pool is another one: then it begins with an empty pool. The
    memory ends with the holder.

    \b
    Example:
      quire holder --listen unix:/run/quire/holder.sock
      quire worker --holder unix:/run/quire/holder.sock --model deploy/demo/model
    """
    configure_logging("info", "text")
    if sys.platform != "linux":
        raise click.ClickException("a holder needs Linux: it keeps memory in an anonymous file")
    stop_read, stop_write = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.write(stop_write, b"."))
    try:
        listener = listen_at(Path(listen.path))
    except AddressError as error:
        raise click.ClickException(str(error)) from error
    log.info("serving addresses=%s", listen)
    Holder(listener).serve(stop_read)
    with contextlib.suppress(OSError):
        os.unlink(listen.path)


if __name__ == "__main__":
    main(prog_name="quire holder")
