"""An event loop in virtual time ends what would never end."""

from __future__ import annotations

import asyncio

import pytest
from virtual_time import run_in_virtual_time


def test_a_task_that_never_waits_is_an_error() -> None:
    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="a task never waits"):
        run_in_virtual_time(spin())


def test_a_task_that_waits_for_nothing_is_an_error() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="every task waits"):
        run_in_virtual_time(wait())


def test_time_passes_at_once() -> None:
    async def wait() -> None:
        await asyncio.sleep(1e6)
        assert asyncio.get_running_loop().time() == 1e6

    run_in_virtual_time(wait())
