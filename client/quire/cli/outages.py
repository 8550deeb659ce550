"""Lines on standard error while requests wait: the unavailable service, and how long the engine waits at most."""

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator

from quire.cli.render import printable
from quire.cli.snapshot import cause_of
from quire.client.engine.connection import Outage
from quire.client.engine.engine import Engine

_ERASE_LINE = "\r\x1b[K"


@contextlib.asynccontextmanager
async def outages_shown(engine: Engine, *, in_place: bool) -> AsyncIterator[None]:
    """Report every outage within the block: a line for each, or, in place, one that counts down and is then removed.

    sys.stderr is looked up for each line: a live display replaces it. The engine's own warnings, which Python prints
    if no handler takes them, are not printed in addition.
    """
    logging.getLogger("quire.client").addHandler(logging.NullHandler())
    showing = asyncio.create_task(_count_down(engine) if in_place else _say_each(engine))
    try:
        yield
    finally:
        showing.cancel()
        await asyncio.wait([showing])


async def _say_each(engine: Engine) -> None:
    said = None
    while True:
        outage = await engine.next_outage(said)
        if outage is None:
            _write("the services are back\n")
        elif said is None or outage.waiting_for != said.waiting_for:
            _write(f"{_text_of(outage)}\n")
        said = outage


async def _count_down(engine: Engine) -> None:
    while True:
        outage = await engine.next_outage(None)
        _write("\n")  # the text generated so far stays in the line above
        try:
            while outage is not None:
                _write(f"{_ERASE_LINE}{_text_of(outage)}")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await engine.next_outage(outage)
                outage = engine.outage
        finally:
            _write(_ERASE_LINE)


def _text_of(outage: Outage) -> str:
    left_s = max(0.0, outage.gives_up_s - asyncio.get_running_loop().time())
    return f"waiting for {outage.waiting_for}, {left_s:.0f} s at most ({printable(cause_of(outage.error))})"


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
