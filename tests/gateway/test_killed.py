"""32 streams through `quire serve` processes; one of them is killed, or a service behind them: no token is lost.

Requests are greedy, or drawn at a temperature at which all tokens are nearly equally probable: then rounding decides
nothing, and a token says which random number was drawn for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from deadlines import DEADLINE_S
from gateway.conftest import MODEL, Gateway
from integration.fleet import POOLS, Fleet, started
from integration.protocol_client import await_that

pytestmark = pytest.mark.verify

ROLES = {"olga": "operator", "worker": "worker", "gate": "client,gateway"}
TENANTS = ("alice", "bob")
NUM_STREAMS, NUM_NEW = 32, 160
# Tokens of half of the streams before something is killed. On a busy machine the last ones begin long after the first.
KILLED_AFTER = 6
PROMPTS = ("A class is", "The function returns", "When the file", "Note that", "If the value", "Each thread")

Streams = dict[int, list[int]]


def write_tokens(path: Path, roles: dict[str, str]) -> Path:
    """Write a file of tokens; the token of a name is the name."""
    lines = [f"{name} {given} {hashlib.sha256(name.encode()).hexdigest()}" for name, given in roles.items()]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o600)
    return path


def write_token(path: Path) -> Path:
    path.write_text(path.name)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("killed")


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[Fleet]:
    tokens = write_tokens(folder / "tokens", ROLES)
    with started(
        cachemgr_args=("--token-file", str(tokens)),
        worker_args=("--cachemgr-token-file", str(write_token(folder / "worker"))),
        token="olga",
    ) as fleet:
        yield fleet


def serve(fleet: Fleet, folder: Path, name: str) -> Gateway:
    """Start a gateway that serves both pools."""
    keys = write_tokens(folder / "keys", dict.fromkeys(TENANTS, "client"))
    flags = ("--api-keys", str(keys), "--cachemgr-token-file", str(write_token(folder / "gate")))
    gateway = Gateway(fleet.address, *flags, log=folder / f"{name}.log")
    await_pools(gateway)
    return gateway


def await_pools(gateway: Gateway) -> None:
    def has_both() -> bool:
        with gateway.client(headers=headers_of(0)) as client:
            return sorted(client.get("/v1/models").json()["data"][0]["pools"]) == sorted(POOLS)

    await_that("the gateway has both pools", has_both, timeout_s=DEADLINE_S)


@pytest.fixture(scope="module")
def gateway(fleet: Fleet, folder: Path) -> Iterator[Gateway]:
    gateway = serve(fleet, folder, "survivor")
    yield gateway
    gateway.close()


def headers_of(number: int) -> dict[str, str]:
    return {"Authorization": f"Bearer {TENANTS[number % len(TENANTS)]}"}


def body_of(number: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": f"{PROMPTS[number % len(PROMPTS)]} {number}",
        "max_tokens": NUM_NEW,
        "temperature": 100.0 if number % 2 else 0.0,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


def run(gateways: Sequence[Gateway], kill: Callable[[], None] | None = None) -> tuple[Streams, set[int]]:
    """Run all streams at once, in turns through the gateways; kill when half of them have some tokens.

    Returns the tokens of each, and the streams that lost their connection.
    """
    streams: Streams = {number: [] for number in range(NUM_STREAMS)}
    broken: set[int] = set()

    async def main() -> None:
        are_begun = asyncio.Event()
        limits = httpx.Limits(max_connections=None)
        clients = [httpx.AsyncClient(base_url=each.url, timeout=DEADLINE_S, limits=limits) for each in gateways]

        async def stream(number: int) -> None:
            client, tokens = clients[number % len(clients)], streams[number]
            asking = client.stream("POST", "/v1/completions", json=body_of(number), headers=headers_of(number))
            try:
                async with asking as answer:
                    assert answer.status_code == 200
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            for choice in json.loads(line[6:])["choices"]:
                                tokens += choice["token_ids"]
                        if sum(len(each) >= KILLED_AFTER for each in streams.values()) >= NUM_STREAMS // 2:
                            are_begun.set()
            except httpx.TransportError:
                broken.add(number)

        async def kill_once(kill: Callable[[], None]) -> None:
            await are_begun.wait()
            assert max(map(len, streams.values())) < NUM_NEW, "a stream ended before the kill"
            await asyncio.to_thread(kill)

        async with asyncio.timeout(DEADLINE_S):
            killing = [] if kill is None else [kill_once(kill)]
            await asyncio.gather(*map(stream, range(NUM_STREAMS)), *killing)
        for client in clients:
            await client.aclose()

    asyncio.run(main())
    return streams, broken


@pytest.fixture(scope="module")
def undisturbed(gateway: Gateway) -> Streams:
    streams, broken = run([gateway])
    assert not broken
    assert all(len(tokens) == NUM_NEW for tokens in streams.values())
    return streams


@pytest.fixture
def whole(fleet: Fleet, gateway: Gateway) -> Iterator[Fleet]:
    """The fleet; after the test the pools have no block in use but those that are cached, and no broken invariant."""

    def is_whole() -> bool:
        if not all(pool.lease_count for pool in fleet.pools().values()):
            run([gateway])  # an engine that has lost its lease and its requests opens a lease with the next request
        return has_all_blocks(fleet)

    yield fleet
    fleet.heal()
    await_that("every block is back", is_whole, timeout_s=DEADLINE_S)
    assert fleet.violations() == []


def has_all_blocks(fleet: Fleet) -> bool:
    """Return whether no lease but the surviving gateway's is left, and no sequence holds a block."""
    pools = fleet.pools().values()
    return all(
        pool.attached and pool.lease_count == 1 and not pool.block_counts.active_count + pool.block_counts.retired_count
        for pool in pools
    )


def test_the_page_shows_a_tenant_its_blocks_through_a_gateway_that_is_no_operator(
    gateway: Gateway, undisturbed: Streams
) -> None:
    """In the pools together: a tenant's requests may all have been sent to one of them."""

    def seen(number: int, pool: str) -> tuple[set[tuple[str, int]], list[dict[str, Any]]]:
        """Return the blocks in use, or cached, and the pools, as a tenant's page has them."""
        names: dict[str, Any] = {}
        asked = {"params": {"pool": pool}, "headers": headers_of(number)}
        with gateway.client() as client, client.stream("GET", "/live", **asked) as answer:
            name = ""
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    names.setdefault(name, json.loads(line.removeprefix("data: ")))
                assert name != "away"
                if names.keys() >= {"pools", "blocks"}:
                    break
        return {(pool, block_id) for block_id, kind, _ in names["blocks"]["changes"] if kind}, names["pools"]

    with gateway.client() as client:
        for number in range(len(TENANTS)):  # so that the blocks that were used last are theirs, and stay cached
            asked = body_of(number) | {"stream": False}
            assert client.post("/v1/completions", json=asked, headers=headers_of(number)).status_code == 200
    blocks: list[set[tuple[str, int]]] = []
    for number in range(len(TENANTS)):
        looks = [seen(number, pool) for pool in POOLS]
        assert all([each["name"] for each in pools] == sorted(POOLS) for _, pools in looks)
        blocks.append(set().union(*(found for found, _ in looks)))
    alices, bobs = blocks
    assert alices
    assert bobs
    assert not alices & bobs


def test_streams_of_the_other_gateway_end_and_the_leases_of_the_killed_one_expire(
    whole: Fleet, gateway: Gateway, undisturbed: Streams, folder: Path
) -> None:
    other = serve(whole, folder, "killed")

    def kill() -> None:
        assert {pool.lease_count for pool in whole.pools().values()} == {2}
        other.process.kill()
        other.process.wait(DEADLINE_S)

    try:
        streams, broken = run([other, gateway], kill)
    finally:
        other.close()
    assert broken == set(range(0, NUM_STREAMS, 2))
    for number, tokens in streams.items():
        if number in broken:
            assert tokens == undisturbed[number][: len(tokens)]
            assert len(tokens) < NUM_NEW
        else:
            assert tokens == undisturbed[number]


@pytest.mark.parametrize(
    "killed", [("two",), pytest.param(("cachemgr",), marks=pytest.mark.night), ("cachemgr", "one")], ids="+".join
)
def test_killed_services_cost_no_token_of_a_stream(
    whole: Fleet, gateway: Gateway, undisturbed: Streams, killed: tuple[str, ...]
) -> None:
    processes = [whole.workers.get(name) or whole.services.cachemgr for name in killed]

    def kill() -> None:
        for process in processes:
            process.kill()
        for process in processes:
            process.restart()

    streams, broken = run([gateway], kill)
    assert not broken
    assert streams == undisturbed
    assert gateway.metric("quire_gateway_requests") == 0
