"""A router over two real workers: which pool a request goes to, and that no token is lost or doubled by a failure.

Requests are greedy, or drawn at a temperature at which all tokens are nearly equally probable: then rounding decides
nothing, and a token says which random number was drawn for it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from deadlines import DEADLINE_S
from integration.fleet import MODEL, Fleet, started
from integration.protocol_client import await_that

from quire.client import EngineConfig, Grammar, SamplingParams, Tokenizer
from quire.gateway.routing.members import RouterConfig
from quire.gateway.routing.router import Router

TOKENIZER = Tokenizer.load(str(MODEL))
HOT: dict[str, Any] = {"temperature": 100.0, "ignore_eos": True}
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
NUM_NEW = 60
# Of each stream, before something is broken.
DISTURBED_AFTER = 12
# One pool may be much faster than the other: it must have something left to do.
DISTURBED_AT_MOST_AFTER = NUM_NEW // 2

Request = tuple[str, SamplingParams]
Streams = dict[tuple[int, int], tuple[list[int], str]]
"""Tokens and text by request and sample."""

KINDS: list[Request] = [
    ("A class is", SamplingParams(max_tokens=NUM_NEW, **GREEDY)),
    ("The function returns", SamplingParams(max_tokens=NUM_NEW, seed=11, **HOT)),
    ("When the file", SamplingParams(max_tokens=NUM_NEW, seed=-3, n=2, **HOT)),
    ("Note that", SamplingParams(max_tokens=NUM_NEW, presence_penalty=1.5, **GREEDY)),
    ("If the value", SamplingParams(max_tokens=NUM_NEW, frequency_penalty=0.8, repetition_penalty=1.2, **GREEDY)),
    ("Answer:", SamplingParams(max_tokens=NUM_NEW, temperature=100.0, seed=5, grammar=Grammar(regex="[a-z ]{90,120}"))),
    ("Return the", SamplingParams(max_tokens=NUM_NEW, temperature=0.0, min_tokens=40)),
    ("Each thread", SamplingParams(max_tokens=NUM_NEW, seed=9, logprobs=1, **HOT)),
]
MANY: list[Request] = [
    (f"{prompt} {number}", SamplingParams(max_tokens=NUM_NEW, seed=number, **(HOT if number % 2 else GREEDY)))
    for number, prompt in enumerate(4 * [prompt for prompt, _ in KINDS])
]

Disturb = Callable[[Router], Awaitable[None]]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with started() as fleet:
        yield fleet


@pytest.fixture
def whole(fleet: Fleet) -> Iterator[Fleet]:
    """The fleet as at its start; after the test all blocks have to come back."""
    fleet.heal()
    yield fleet
    fleet.heal()
    await_that("every block is back", fleet.is_whole, timeout_s=DEADLINE_S)
    assert fleet.violations() == []


def router(fleet: Fleet, *, lease_ttl_s: float = 30.0, **config: Any) -> Router:
    return Router(
        fleet.address,
        config=RouterConfig(**{"refresh_s": 0.1, "failover_after_s": 0.2} | config),
        engine_config=EngineConfig(lease_ttl_s=lease_ttl_s),
        tokenizer=TOKENIZER,
    )


async def until_all_pools_are_ready(routing: Router) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while len(routing.pools) < 2:
            await asyncio.sleep(0.01)


async def run(routing: Router, requests: list[Request], disturb: Disturb | None = None) -> Streams:
    """All requests at once; something is broken when each has some tokens, or one has half of its tokens."""
    streams: Streams = {}
    begun, is_begun = set[int](), asyncio.Event()

    async def stream(number: int) -> None:
        prompt, params = requests[number]
        async for chunk in routing.generate(TOKENIZER.encode(prompt), params):
            tokens, text = streams.get((number, chunk.index), ([], ""))
            streams[number, chunk.index] = (tokens + list(chunk.token_ids), text + chunk.text)
            num_tokens = len(streams[number, chunk.index][0])
            if num_tokens >= DISTURBED_AFTER:
                begun.add(number)
            is_late = num_tokens >= DISTURBED_AT_MOST_AFTER or chunk.finish_reason is not None
            if len(begun) == len(requests) or is_late:
                is_begun.set()

    async def disturb_once(disturb: Disturb) -> None:
        await is_begun.wait()
        await disturb(routing)

    async with asyncio.timeout(DEADLINE_S):
        disturbing = [] if disturb is None else [disturb_once(disturb)]
        await asyncio.gather(*map(stream, range(len(requests))), *disturbing)
    return streams


def generate(
    fleet: Fleet, requests: list[Request], disturb: Disturb | None = None, **config: Any
) -> tuple[Streams, int]:
    """The streams' results, and the number of moved requests."""

    async def main() -> tuple[Streams, int]:
        async with router(fleet, **config) as routing:
            await until_all_pools_are_ready(routing)
            streams = await run(routing, requests, disturb)
            return streams, routing.router_statistics().moves

    return asyncio.run(main())


def kill(*processes: Any) -> Disturb:
    async def disturb(routing: Router) -> None:
        for process in processes:
            process.kill()

    return disturb


def kill_and_start(*processes: Any) -> Disturb:
    async def disturb(routing: Router) -> None:
        for process in processes:
            process.kill()
        for process in processes:
            await asyncio.to_thread(process.restart)

    return disturb


def test_requests_of_a_killed_worker_go_on_in_the_other_pool(whole: Fleet) -> None:
    expected, _ = generate(whole, KINDS)
    (stopped,) = [text for (number, _), (_, text) in expected.items() if number == 0]
    # A stop string that spans many tokens before it is met, and one that is half there when the worker dies.
    stops = [
        (KINDS[0][0], SamplingParams(max_tokens=NUM_NEW, stop=(stopped[60:75],), **GREEDY)),
        (KINDS[0][0], SamplingParams(max_tokens=NUM_NEW, stop=(stopped[20:] + "never",), **GREEDY)),
    ]
    with_stops, _ = generate(whole, stops)
    expected |= {(number + len(KINDS), index): each for (number, index), each in with_stops.items()}
    got, moves = generate(whole, KINDS + stops, kill(whole.workers["two"]))
    assert moves > 0
    assert got == expected


def test_the_next_turn_goes_to_the_pool_that_holds_the_conversation(whole: Fleet) -> None:
    async def main() -> None:
        async with router(whole) as routing:
            await until_all_pools_are_ready(routing)
            for number in range(4):
                tokens = TOKENIZER.encode(f"{number}. " + "The argument is passed by keyword and not by place. " * 8)
                pools = set()
                for _ in range(3):
                    before = dict(routing.router_statistics().placed)
                    async for chunk in routing.generate(tokens, SamplingParams(max_tokens=8, **GREEDY)):
                        tokens += chunk.token_ids
                    after = routing.router_statistics().placed
                    pools |= {pool for pool in after if after[pool] != before.get(pool, 0)}
                assert len(pools) == 1
            assert routing.statistics().cached_tokens > 0.5 * routing.statistics().prompt_tokens

    asyncio.run(main())


def test_a_pool_that_leaves_and_comes_back_is_used_again(whole: Fleet) -> None:
    async def main() -> None:
        async with router(whole) as routing:
            await until_all_pools_are_ready(routing)
            await asyncio.to_thread(whole.workers["two"].terminate)
            async with asyncio.timeout(DEADLINE_S):
                while routing.pools != ["one"]:
                    await asyncio.sleep(0.01)
            placed = dict(routing.router_statistics().placed)
            await run(routing, KINDS)
            assert routing.router_statistics().placed.get("two") == placed.get("two")
            await asyncio.to_thread(whole.workers["two"].restart)
            await until_all_pools_are_ready(routing)
            await run(routing, KINDS)
            assert routing.router_statistics().placed["two"] > placed.get("two", 0)

    asyncio.run(main())


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet) -> Streams:
    return generate(fleet, MANY)[0]


@pytest.mark.verify
@pytest.mark.parametrize(
    ("killed", "config", "is_moved"),
    [
        (("two",), {}, True),
        (("two",), {"failover_after_s": 600.0}, False),
        (("cachemgr", "one"), {}, None),
        (("one", "two"), {}, None),
    ],
    ids=["other pool", "same pool", "both", "all workers"],
)
def test_killed_processes_cost_no_token_of_32_streams(
    whole: Fleet, undisturbed: Streams, killed: tuple[str, ...], config: dict[str, float], is_moved: bool | None
) -> None:
    processes = [whole.workers.get(name) or whole.services.cachemgr for name in killed]
    disturb = kill(*processes) if is_moved else kill_and_start(*processes)
    streams, moves = generate(whole, MANY, disturb, **config)
    assert streams == undisturbed
    assert is_moved is None or bool(moves) == is_moved


@pytest.mark.verify
def test_a_request_stays_in_its_pool_while_cachemgr_is_away(whole: Fleet, undisturbed: Streams) -> None:
    """The other pool's engine is idle and notices nothing, so the request could move there."""
    failover_after_s, moves = 0.2, []

    async def disturb(routing: Router) -> None:
        whole.services.cachemgr.kill()
        await asyncio.sleep(3 * failover_after_s)  # nothing may happen in this time
        moves.append(routing.router_statistics().moves)
        await asyncio.to_thread(whole.services.cachemgr.restart)

    streams, _ = generate(whole, MANY[:1], disturb, failover_after_s=failover_after_s)
    assert moves == [0]
    assert streams == {(0, 0): undisturbed[0, 0]}


GATEWAY = """
import asyncio, sys
from integration.test_routing import MANY, run, until_all_pools_are_ready, router
from types import SimpleNamespace

async def main():
    async with router(SimpleNamespace(address=sys.argv[1]), lease_ttl_s=1.0) as routing:
        await until_all_pools_are_ready(routing)
        print("ready", flush=True)
        sys.stdin.readline()
        async def say(routing):
            print("begun", flush=True)
        while True:
            await run(routing, MANY, say)

asyncio.run(main())
"""


@pytest.mark.verify
def test_of_two_gateways_one_goes_on_when_the_other_is_killed(whole: Fleet, undisturbed: Streams) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", GATEWAY, whole.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as other:
        try:
            assert other.stdin is not None and other.stdout is not None  # noqa: PT018
            assert other.stdout.readline() == "ready\n"

            async def kill_other(routing: Router) -> None:
                assert await asyncio.to_thread(other.stdout.readline) == "begun\n"
                assert all(pool.lease_count == 2 for pool in whole.pools().values())
                other.kill()

            other.stdin.write("go\n")
            other.stdin.flush()
            streams, _ = generate(whole, MANY, kill_other)
        finally:
            other.kill()
    assert streams == undisturbed
