"""The model thread: order, what runs beside what, and how errors come back. No sleeps: each wait has its event."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine

import pytest

from quire.worker.run.model_thread import MAX_UNCOLLECTED, ModelThread

DEADLINE_S = 60


def on_a_loop(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 2 * DEADLINE_S))

    return run


class Device:
    """Work that is launched at once and ends when told."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.ends: dict[str, threading.Event] = {}
        self.launched: dict[str, threading.Event] = {}

    def launch(self, name: str) -> Callable[[], Callable[[], str]]:
        self.ends[name], self.launched[name] = threading.Event(), threading.Event()

        def launch() -> Callable[[], str]:
            self.events.append(f"launch {name}")
            self.launched[name].set()
            return lambda: self.collect(name)

        return launch

    def collect(self, name: str) -> str:
        assert self.ends[name].wait(DEADLINE_S)
        self.events.append(f"end {name}")
        return name

    def note(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.events.append(name)
            return name

        return work

    async def until_launched(self, name: str) -> None:
        assert await asyncio.to_thread(self.launched[name].wait, DEADLINE_S)


@on_a_loop
async def test_the_next_is_launched_before_one_has_ended_and_no_more_than_that() -> None:
    device, thread = Device(), ModelThread(asyncio.get_running_loop())
    futures = [thread.submit_ahead(device.launch(name)) for name in "abcde"]
    await device.until_launched("d")
    first = [f"launch {name}" for name in "abcd"]
    assert device.events == first
    assert len(first) == MAX_UNCOLLECTED
    assert thread.num_waiting == 5
    device.ends["a"].set()
    assert await futures[0] == "a"
    await device.until_launched("e")
    assert device.events == [*first, "end a", "launch e"]
    for name in "bcde":
        device.ends[name].set()
    assert await asyncio.gather(*futures) == list("abcde")
    await thread.idle()
    assert thread.num_waiting == 0
    thread.stop()


@on_a_loop
async def test_other_work_waits_for_all_that_was_launched_and_is_not_overtaken() -> None:
    device, thread = Device(), ModelThread(asyncio.get_running_loop())
    first = thread.submit_ahead(device.launch("a"))
    fence = thread.submit(device.note("fence"))
    last = thread.submit_ahead(device.launch("b"))
    await device.until_launched("a")
    assert not fence.done()
    device.ends["a"].set()
    device.ends["b"].set()
    assert await asyncio.gather(first, fence, last) == ["a", "fence", "b"]
    assert device.events == ["launch a", "end a", "fence", "launch b", "end b"]
    thread.stop()


@on_a_loop
async def test_results_and_errors_come_back_in_order() -> None:
    device, thread = Device(), ModelThread(asyncio.get_running_loop())
    settled: list[str] = []

    def cannot_launch() -> Callable[[], str]:
        raise ValueError("not launched")

    def cannot_end() -> Callable[[], str]:
        def collect() -> str:
            raise RuntimeError("did not end")

        return collect

    futures = [
        thread.submit_ahead(device.launch("a")),
        thread.submit_ahead(cannot_launch),
        thread.submit_ahead(cannot_end),
        thread.submit(device.note("b")),
    ]
    for name, future in zip(("a", "cannot launch", "cannot end", "b"), futures, strict=True):
        future.add_done_callback(lambda _, name=name: settled.append(name))
    await device.until_launched("a")
    assert settled == []
    device.ends["a"].set()
    assert await futures[3] == "b"
    assert settled == ["a", "cannot launch", "cannot end", "b"]
    with pytest.raises(ValueError, match="not launched"):
        await futures[1]
    with pytest.raises(RuntimeError, match="did not end"):
        await futures[2]
    thread.stop()


@on_a_loop
async def test_what_was_given_before_the_end_still_runs() -> None:
    device, thread = Device(), ModelThread(asyncio.get_running_loop())
    future = thread.submit_ahead(device.launch("a"))
    thread.stop()
    device.ends["a"].set()
    assert await future == "a"
