"""Streams that wait: their headers come at once, and a comment whenever they were silent; errors come as they did."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from gateway.conftest import ROOT, Gateway
from gateway.test_bad_input import check_error

from quire.cli.launch import LocalServices
from quire.gateway.http.streams import primed

BODY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}
PING = ": ping"


@pytest.fixture(scope="module")
def own_services() -> Iterator[LocalServices]:
    with LocalServices.start(model=ROOT / "deploy/demo/model", num_blocks=64) as services:
        yield services


@pytest.fixture(scope="module")
def waiting(own_services: LocalServices, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    log = tmp_path_factory.mktemp("silent") / "log"
    gateway = Gateway(own_services.cachemgr_address, "--stream-ping", "0.1", log=log)
    yield gateway
    gateway.close()


def read_pings(lines: Iterator[str], count: int) -> None:
    """Read lines up to so many comments."""
    for _ in range(count):
        next(line for line in lines if line == PING)


@pytest.mark.parametrize("has_begun", [False, True], ids=["before the first token", "after it"])
def test_a_stream_without_a_worker_is_not_silent_and_goes_on(
    own_services: LocalServices, waiting: Gateway, has_begun: bool
) -> None:
    if not has_begun:
        own_services.worker.kill()
    with waiting.client() as client, client.stream("POST", "/v1/completions", json=BODY) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        if has_begun:
            assert next(line for line in lines if line).startswith("data: ")
            own_services.worker.kill()
        read_pings(lines, 3)
        own_services.worker.restart()
        *_, last = [line for line in lines if line and line != PING]
    assert last == "data: [DONE]"


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"prompt": [7] * 5000}, {"guided_regex": "("}])
def test_a_request_that_is_refused_has_a_status(waiting: Gateway, wrong: dict[str, Any]) -> None:
    with waiting.client() as client:
        check_error(client.post("/v1/completions", json=BODY | wrong), 400)


async def items(gate: asyncio.Event, ended: list[str], error: Exception | None = None) -> AsyncGenerator[int, None]:
    try:
        await gate.wait()
        if error is not None:
            raise error
        yield 1
        yield 2
    finally:
        ended.append("ended")


def test_items_are_begun_without_the_first_one_and_end_when_they_are_closed_unread() -> None:
    async def run() -> None:
        gate, ended = asyncio.Event(), list[str]()
        late = await primed(items(gate, ended), within_s=0)
        gate.set()
        assert [item async for item in late] == [1, 2]
        unread = await primed(items(asyncio.Event(), ended), within_s=0)
        await unread.aclose()
        assert ended == ["ended"] * 2
        with pytest.raises(ValueError, match="early"):
            await primed(items(gate, ended, ValueError("early")))
        failing = await primed(items(asyncio.Event(), ended, ValueError("late")), within_s=0)
        await failing.aclose()
        assert ended == ["ended"] * 4

    asyncio.run(run())
