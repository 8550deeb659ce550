"""The network of the simulator: what each of its faults does to the calls of two processes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any

import grpc
import pytest
from robustness.simulation.comparison.scripting import (
    KIB,
    answer,
    echo,
    outcome,
    server_stream,
    stream,
    unary,
    until_answered,
)
from robustness.simulation.comparison.stages import SimulatedStage, kept_worlds
from robustness.simulation.network import Network
from robustness.simulation.surroundings import surroundings
from robustness.simulation.transport import open_channel
from robustness.simulation.world import World

from quire.client.channel import CHANNEL_OPTIONS, OrderedStream
from quire.client.errors import Unavailable

LIMIT_S = 300.0
WITHOUT_KEEPALIVE = (("grpc.min_reconnect_backoff_ms", 2_000), ("grpc.initial_reconnect_backoff_ms", 100))


class Play:
    """A world with a client and a server, and a network that a test disturbs."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.world = World(seed)
        self.network = Network(self.world, seed, **options)
        self.stage = SimulatedStage(self.world, self.network)

    async def restart(self, end: Callable[[], None]) -> None:
        """End the server, and start another one a little later."""
        end()
        await asyncio.sleep(self.network.random.random())
        await self.stage.serve(stream=echo, unary=answer)

    def run(self, script: Callable[[Play], Awaitable[None]]) -> None:
        with surroundings(self.world, partial(open_channel, self.network)):
            task = self.world.start("client").spawn(script(self))  # type: ignore[arg-type]
            assert self.world.run_until(task.done, limit_s=LIMIT_S), "the script has not ended"
            task.result()
        for process in list(self.world.processes):
            process.end()


@pytest.fixture(autouse=True, scope="module")
def _kept() -> Iterator[None]:
    with kept_worlds():
        yield


@pytest.fixture(params=range(5))
def play(request: pytest.FixtureRequest) -> Play:
    return Play(request.param)


@contextmanager
def lasting(play: Play, least_s: float, most_s: float) -> Iterator[None]:
    """The block takes so long in virtual time."""
    begun = play.world.now
    yield
    assert least_s <= play.world.now - begun <= most_s


def test_a_short_partition_delays_messages_and_keeps_their_order(play: Play) -> None:
    async def script(play: Play) -> None:
        await play.stage.serve(stream=echo)
        async with play.stage.channel(CHANNEL_OPTIONS) as channel:
            call = stream(channel)()
            await call.write(b"0")
            assert await call.read() == b"0"
            for number in range(1, 10):
                if number == 5:
                    play.network.partition("client", "server", 8.0)
                await call.write(b"%d" % number)
            with lasting(play, 7.9, 8.1):
                assert [await call.read() for _ in range(1, 10)] == [b"%d" % number for number in range(1, 10)]

    play.run(script)


def test_keepalive_notices_a_long_partition(play: Play) -> None:
    async def script(play: Play) -> None:
        await play.stage.serve(stream=echo, unary=answer)
        async with play.stage.channel(CHANNEL_OPTIONS) as channel:
            call = stream(channel)()
            await call.write(b"0")
            await call.read()
            play.network.partition("client", "server", 60.0)
            with lasting(play, 9.0, 31.0):
                assert await outcome(call.read()) == "AioRpcError UNAVAILABLE"
            with lasting(play, 9.9, 10.1):
                assert await outcome(unary(channel)(b"1", timeout=20)) == "AioRpcError UNAVAILABLE"
            with lasting(play, 9.0, 22.0):
                assert await until_answered(channel) == "answer to again"

    play.run(script)


def test_a_channel_without_keepalive_waits_for_the_end_of_a_partition(play: Play) -> None:
    async def script(play: Play) -> None:
        await play.stage.serve(stream=echo)
        async with play.stage.channel(WITHOUT_KEEPALIVE) as channel:
            call = stream(channel)()
            await call.write(b"0")
            await call.read()
            play.network.partition("client", "server", 25.0)  # the server's keepalive would break it after 30 s
            await call.write(b"1")
            with lasting(play, 24.0, 26.0):
                assert await outcome(call.read()) == "1"

    play.run(script)


def test_connecting_through_a_partition_times_out_and_goes_on_behind_it(play: Play) -> None:
    async def script(play: Play) -> None:
        await play.stage.serve(unary=answer)
        play.network.partition("client", "server", 5.0)
        async with play.stage.channel(WITHOUT_KEEPALIVE) as channel:
            with lasting(play, 1.9, 2.1):
                assert await outcome(unary(channel)(b"1")) == "AioRpcError UNAVAILABLE"
            with lasting(play, 0.0, 0.1):
                assert await outcome(unary(channel)(b"1")) == "AioRpcError UNAVAILABLE"
            with lasting(play, 2.0, 7.0):
                assert await until_answered(channel) == "answer to again"

    play.run(script)


def test_one_direction_freezes(play: Play) -> None:
    heard = asyncio.Event()

    async def handle(request: bytes, context: Any) -> bytes:
        heard.set()
        return request

    async def script(play: Play) -> None:
        await play.stage.serve(unary=handle)
        async with play.stage.channel() as channel:
            await unary(channel)(b"1")
            heard.clear()
            play.network.freeze("server", "client", 3.0)
            call = unary(channel)(b"2")
            with lasting(play, 0.0, 0.1):
                await heard.wait()
            with lasting(play, 2.9, 3.1):
                assert await call == b"2"

    play.run(script)


def test_frames_that_are_held_twice_stay_in_order(play: Play) -> None:
    """Those that come during the second standstill stay behind those of the first one."""

    async def script(play: Play) -> None:
        await play.stage.serve(stream=echo)
        async with play.stage.channel() as channel:
            call = stream(channel)()
            await call.write(b"0")
            await call.read()
            play.network.freeze("client", "server", 1.0)
            await call.write(b"1")
            await asyncio.sleep(0.5)
            play.network.freeze("client", "server", 2.0)
            await call.write(b"2")
            with lasting(play, 1.9, 2.1):
                assert [await call.read(), await call.read()] == [b"1", b"2"]

    play.run(script)


def test_a_server_knows_the_deadline_of_a_client_that_it_does_not_hear(play: Play) -> None:
    cancelled = asyncio.Event()

    async def handle(request: bytes, context: Any) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def script(play: Play) -> None:
        await play.stage.serve(unary=handle)
        async with play.stage.channel() as channel:
            call = asyncio.create_task(outcome(unary(channel)(b"1", timeout=5.0)))
            await asyncio.sleep(0.1)
            play.network.partition("client", "server", 10.0)
            with lasting(play, 4.8, 5.0):
                await cancelled.wait()
            assert await call == "AioRpcError DEADLINE_EXCEEDED"

    play.run(script)


def test_requests_end_at_a_proxy(play: Play) -> None:
    async def handle(requests: Any, context: Any) -> Any:
        async for request in requests:
            yield request
        yield b"that was all"

    async def script(play: Play) -> None:
        await play.stage.serve(stream=handle)
        async with play.stage.channel() as channel:
            call = stream(channel)()
            await call.write(b"1")
            assert await call.read() == b"1"
            play.network.half_close("client", "server")
            assert [await outcome(call.read()) for _ in range(2)] == ["that was all", "EOF"]
            assert await outcome(call.write(b"2")) == "InvalidStateError"

    play.run(script)


def test_a_delayed_message_is_overtaken_by_other_streams(play: Play) -> None:
    async def script(play: Play) -> None:
        await play.stage.serve(stream=echo, unary=answer)
        async with play.stage.channel() as channel:
            call = stream(channel)()
            await call.write(b"1")
            await call.read()
            play.network.delay("client", "server", 2.0)
            await call.write(b"2")
            await call.write(b"3")
            with lasting(play, 0.0, 0.1):
                await unary(channel)(b"1")
            with lasting(play, 1.9, 2.1):
                assert [await call.read(), await call.read()] == [b"2", b"3"]

    play.run(script)


def test_streams_overtake_each_other_and_themselves_never() -> None:
    orders = set()

    async def script(play: Play) -> None:
        arrived: list[bytes] = []

        async def handle(requests: Any, context: Any) -> Any:
            async for request in requests:
                arrived.append(request)
            yield b""

        await play.stage.serve(stream=handle)
        async with play.stage.channel() as channel:
            calls = [stream(channel)() for _ in range(3)]
            for call in calls:
                await call.wait_for_connection()
            for number in range(3):
                for index, call in enumerate(calls):
                    await call.write(b"%d%d" % (index, number))
            for call in calls:
                await call.done_writing()
                await call.read()
        for index in range(3):
            own = [message for message in arrived if message.startswith(b"%d" % index)]
            assert own == sorted(own)
        orders.add(tuple(arrived))

    for seed in range(20):
        Play(seed).run(script)
    assert len(orders) > 15


def test_an_answer_is_lost_behind_its_handler(play: Play) -> None:
    handled: list[bytes] = []

    async def handle(request: bytes, context: Any) -> bytes:
        handled.append(request)
        return request

    async def script(play: Play) -> None:
        await play.stage.serve(unary=handle)
        async with play.stage.channel() as channel:
            assert await outcome(unary(channel)(b"1")) == "1"
            play.network.lose_answer("client", "server")
            assert await outcome(unary(channel)(b"2")) == "AioRpcError UNAVAILABLE"
            assert await outcome(unary(channel)(b"3")) == "3"

    play.run(script)
    assert handled == [b"1", b"2", b"3"]


def test_a_call_arrives_twice(play: Play) -> None:
    handled: list[bytes] = []

    async def handle(request: bytes, context: Any) -> bytes:
        handled.append(request)
        return b"%d" % len(handled)

    async def script(play: Play) -> None:
        await play.stage.serve(unary=handle, stream=echo)
        async with play.stage.channel() as channel:
            play.network.double_next_unary("client", "server")
            call = stream(channel)()
            await call.write(b"0")
            await call.read()
            assert await outcome(unary(channel)(b"1")) == "1"
            await asyncio.sleep(0.1)
            assert await outcome(unary(channel)(b"2")) == "3"

    play.run(script)
    assert handled == [b"1", b"1", b"2"]


def test_a_slow_reader_makes_its_peer_wait(play: Play) -> None:
    async def script(play: Play) -> None:
        await play.stage.serve(stream=echo)
        async with play.stage.channel() as channel:
            call = stream(channel)()
            await call.write(b"1")
            await call.read()
            play.network.slow_reader("server", "client", 4.0)

            async def write_all() -> None:
                for _ in range(10):
                    await call.write(b"x" * 20 * KIB)

            writer = asyncio.create_task(write_all())
            with lasting(play, 3.9, 4.1):
                for _ in range(10):
                    assert len(await call.read()) == 20 * KIB
            await writer

    play.run(script)


@pytest.mark.parametrize("window_bytes", [1, 16, 100, KIB])
def test_messages_pass_a_small_window(window_bytes: int) -> None:
    async def script(play: Play) -> None:
        await play.stage.serve(stream=echo, server_stream=repeat, unary=answer)
        async with play.stage.channel() as channel:
            call = stream(channel)()
            for size in (0, 1, 10, 100, 1000, 10):
                await call.write(b"x" * size)
                assert await call.read() == b"x" * size
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            sizes = [len(message) async for message in server_stream(channel)(b"y" * 50)]
            assert sizes == [50] * 20
            assert len(await unary(channel)(b"z" * 200)) == 210

    async def repeat(request: bytes, context: Any) -> Any:
        for _ in range(20):
            yield request

    for seed in range(5):
        Play(seed, window_bytes=window_bytes).run(script)


def test_a_large_message_does_not_widen_the_window() -> None:
    async def script(play: Play) -> None:
        gate, read = asyncio.Event(), asyncio.Event()

        async def handle(requests: Any, context: Any) -> None:
            assert len(await context.read()) == 5_000
            read.set()
            await gate.wait()
            while await context.read() is not grpc.aio.EOF:
                pass

        await play.stage.serve(stream=handle)
        async with play.stage.channel() as channel:
            call = stream(channel)()
            await call.write(b"x" * 5_000)
            await read.wait()
            written = 0

            async def write_all() -> None:
                nonlocal written
                for _ in range(100):
                    await call.write(b"x" * 95)
                    written += 1
                await call.done_writing()

            writer = asyncio.create_task(write_all())
            await asyncio.sleep(1.0)
            assert 0 < written <= 10
            gate.set()
            await writer
            assert await call.read() is grpc.aio.EOF

    Play(0, window_bytes=1_000).run(script)


def test_attempts_to_connect_go_on_with_backoff(play: Play) -> None:
    times: list[float] = []

    async def script(play: Play) -> None:
        async with play.stage.channel(CHANNEL_OPTIONS) as channel:
            await outcome(unary(channel)(b"1"))
            await asyncio.sleep(20.0)

    play.network.tells = True
    play.world.tell = lambda line: times.append(play.world.now) if "knock" in line else None
    play.run(script)
    waits = [later - earlier for earlier, later in pairwise(times)]
    expected = [0.1, 0.16, 0.256, 0.41, 0.655] + [1.0] * (len(waits) - 5)
    assert all(0.79 * mean_s <= wait <= 1.21 * mean_s for wait, mean_s in zip(waits, expected, strict=True))
    assert len({round(wait, 6) for wait in waits}) == len(waits)


def test_a_server_that_is_killed_before_it_accepts_refuses(play: Play) -> None:
    async def script(play: Play) -> None:
        await play.stage.serve(unary=answer)
        play.stage.pause()
        async with play.stage.channel(CHANNEL_OPTIONS) as channel:
            call = asyncio.create_task(outcome(unary(channel)(b"1")))
            await asyncio.sleep(1.0)
            play.stage.kill()
            with lasting(play, 0.0, 0.01):
                assert await call == "AioRpcError UNAVAILABLE"

    play.run(script)


def test_connecting_is_tried_again_when_no_answer_comes_back(play: Play) -> None:
    async def script(play: Play) -> None:
        await play.stage.serve(unary=answer)
        play.network.freeze("server", "client", 2.5)
        async with play.stage.channel(CHANNEL_OPTIONS) as channel:
            with lasting(play, 2.9, 3.1):
                assert await outcome(unary(channel)(b"1")) == "answer to 1"

    play.run(script)


def test_a_lost_machine_says_nothing(play: Play) -> None:
    async def script(play: Play) -> None:
        await play.stage.serve(stream=echo, unary=answer)
        async with play.stage.channel(CHANNEL_OPTIONS) as channel:
            call = stream(channel)()
            await call.write(b"0")
            await call.read()
            play.network.lose_machine(play.stage.process)
            with lasting(play, 9.0, 31.0):
                assert await outcome(call.read()) == "AioRpcError UNAVAILABLE"
            with lasting(play, 9.9, 10.1):
                assert await outcome(unary(channel)(b"1", timeout=20)) == "AioRpcError UNAVAILABLE"
            await play.stage.serve(unary=answer)
            with lasting(play, 0.0, 11.0):
                assert await until_answered(channel) == "answer to again"

    play.run(script)


def test_a_killed_process_breaks_its_connections_at_once(play: Play) -> None:
    async def script(play: Play) -> None:
        await play.stage.serve(stream=echo, unary=answer)
        async with play.stage.channel(CHANNEL_OPTIONS) as channel:
            call = stream(channel)()
            await call.write(b"0")
            await call.read()
            play.stage.kill()
            with lasting(play, 0.0, 0.01):
                assert await outcome(call.read()) == "AioRpcError UNAVAILABLE"
                assert await outcome(unary(channel)(b"1", timeout=20)) == "AioRpcError UNAVAILABLE"

    play.run(script)


def test_a_call_that_meets_a_stopping_server_goes_to_its_successor(play: Play) -> None:
    gate = asyncio.Event()

    async def slow(request: bytes, context: Any) -> bytes:
        await gate.wait()
        return b"slow"

    async def script(play: Play) -> None:
        await play.stage.serve(unary=slow)
        async with play.stage.channel() as channel:
            first = asyncio.create_task(outcome(unary(channel)(b"1")))
            await asyncio.sleep(0.1)
            stopping = asyncio.create_task(play.stage.stop(10.0))
            await asyncio.sleep(0.0001)  # the server has stopped to listen, and the client does not know
            await play.stage.serve(unary=answer)
            assert await outcome(unary(channel)(b"2")) == "answer to 2"
            gate.set()
            assert await first == "slow"
            await stopping

    play.run(script)


def test_a_paused_server_answers_when_it_goes_on(play: Play) -> None:
    async def script(play: Play) -> None:
        await play.stage.serve(stream=echo, unary=answer)
        async with play.stage.channel(CHANNEL_OPTIONS) as channel, play.stage.channel(CHANNEL_OPTIONS) as other:
            call = stream(channel)()
            await call.write(b"0")
            await call.read()
            play.stage.process.paused_until = play.world.now + 5.0
            waiter = asyncio.create_task(unary(other)(b"1").code())  # of a new connection
            with lasting(play, 4.9, 5.1):
                await call.write(b"1")
                assert await call.read() == b"1"
                assert await waiter is grpc.StatusCode.OK

    play.run(script)


def test_a_pause_longer_than_keepalive_breaks_the_connection(play: Play) -> None:
    async def script(play: Play) -> None:
        await play.stage.serve(stream=echo, unary=answer)
        async with play.stage.channel(CHANNEL_OPTIONS) as channel:
            call = stream(channel)()
            await call.write(b"0")
            await call.read()
            play.stage.process.paused_until = play.world.now + 45.0
            with lasting(play, 9.0, 31.0):
                assert await outcome(call.read()) == "AioRpcError UNAVAILABLE"
            assert await until_answered(channel) == "answer to again"

    play.run(script)


def test_an_idle_connection_lives_for_hours(play: Play) -> None:
    async def script(play: Play) -> None:
        await play.stage.serve(stream=echo)
        async with play.stage.channel(CHANNEL_OPTIONS) as channel:
            call = stream(channel)()
            await call.write(b"0")
            await call.read()
            await asyncio.sleep(200.0)
            await call.write(b"1")
            assert await call.read() == b"1"

    play.run(script)


@pytest.mark.parametrize("first_seed", range(0, 200, 50))
def test_clients_get_through_every_mixture_of_faults(first_seed: int) -> None:
    """Answers come in order or not at all, no call hangs, and calls succeed again when the faults are over."""
    for seed in range(first_seed, first_seed + 50):
        window_bytes = random.Random(seed).choice([16, 200, 65_535])
        Play(seed, window_bytes=window_bytes).run(_through_faults)


async def _through_faults(play: Play) -> None:
    numbers = random.Random(play.world.random.getrandbits(32))
    await play.stage.serve(stream=echo, unary=answer)
    async with play.stage.channel(CHANNEL_OPTIONS) as channel:
        steps = OrderedStream[bytes, bytes](stream(channel), timeout_s=40.0)
        workers = [_send_steps(steps, numbers), _make_calls(channel, numbers), _make_calls(channel, numbers)]
        tasks = [asyncio.create_task(worker) for worker in workers]
        for _ in range(5):
            await asyncio.sleep(numbers.random() * 0.1)
            await _disturb(play, numbers)
        await asyncio.wait_for(asyncio.gather(*tasks), 250.0)
        await asyncio.sleep(60.0)
        assert await until_answered(channel) == "answer to again"
        await steps.close()


async def _disturb(play: Play, numbers: random.Random) -> None:
    network, seconds = play.network, numbers.choice([0.01, 1.0, 35.0])
    sides = numbers.choice([("client", "server"), ("server", "client")])
    faults: list[Callable[[], Any]] = [
        lambda: network.cut(*sides),
        lambda: network.partition(*sides, seconds),
        lambda: network.freeze(*sides, seconds),
        lambda: network.slow_reader(*sides, seconds),
        lambda: network.delay(*sides, seconds),
        lambda: network.half_close("client", "server"),
        lambda: network.lose_answer("client", "server"),
        lambda: network.double_next_unary("client", "server"),
        lambda: setattr(play.stage.process, "paused_until", play.world.now + seconds),
        lambda: play.restart(play.stage.kill),
        lambda: play.restart(lambda: network.lose_machine(play.stage.process)),
    ]
    outcome = numbers.choice(faults)()
    if outcome is not None:
        await outcome


async def _send_steps(steps: OrderedStream[bytes, bytes], numbers: random.Random) -> None:
    for number in range(30):
        answers = [await steps.send(b"%d.%d" % (number, index)) for index in range(numbers.randrange(3))]
        for index, each in enumerate(answers):
            with suppress(Unavailable):
                assert await each == b"%d.%d" % (number, index)
        await asyncio.sleep(numbers.random() * 0.02)


async def _make_calls(channel: grpc.aio.Channel, numbers: random.Random) -> None:
    for number in range(20):
        seen = await outcome(unary(channel)(b"%d" % number, timeout=numbers.choice([0.01, 1.0, 20.0])))
        assert seen in (f"answer to {number}", "AioRpcError UNAVAILABLE", "AioRpcError DEADLINE_EXCEEDED")
        await asyncio.sleep(numbers.random() * 0.02)
