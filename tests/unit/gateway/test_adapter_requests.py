"""The open requests of each adapter: what is unloaded waits for them, and routers read their names."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from quire.gateway.adapters import AdapterRequests

BACKENDS: Any = [SimpleNamespace(max_adapters=4)]


def labels_of(requests: AdapterRequests, **shown: Any) -> tuple[str, str, str, float]:
    [family] = requests.families(BACKENDS, **shown)
    [sample] = family.samples
    names = sample.labels
    return names["running_lora_adapters"], names["waiting_lora_adapters"], names["max_lora"], sample.value


def test_routers_read_the_adapters_of_requests_with_and_without_a_token() -> None:
    times = iter(range(1, 100))
    requests = AdapterRequests(clock=lambda: next(times))
    assert labels_of(requests) == ("", "", "4", 1)
    with requests.open("b"), requests.open("a") as first, requests.open("a") as second:
        assert labels_of(requests)[:2] == ("", "a,b")
        first.generated()
        first.generated()
        assert labels_of(requests)[:2] == ("a", "a,b")
        second.generated()
        assert labels_of(requests) == ("a", "b", "4", 8)
        assert labels_of(requests, shown=["b"])[:2] == ("", "b")
    assert labels_of(requests)[:2] == ("", "")


def test_the_end_of_an_adapters_requests_is_awaited_and_not_that_of_others() -> None:
    async def run() -> None:
        requests = AdapterRequests()
        await requests.ended("a")
        with requests.open("other"):
            with requests.open("a"):
                with requests.open("a") as running:
                    running.generated()
                    waiting = asyncio.create_task(requests.ended("a"))
                    await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert not waiting.done()
            await waiting

    asyncio.run(run())
