"""Keys and limits of tenants, at a gateway with a cachemgr that has the tenants, too."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from deadlines import DEADLINE_S
from gateway.conftest import MODEL, Gateway, key_lines
from integration.protocol_client import await_that
from ports import free_port

from quire.cli.launch import LocalServices
from quire.client import CacheClient
from quire.gateway.http.page import MAX_VIEWERS

PROMPT = "A model is a module that takes a tensor as input and returns a tensor as output."
KEYS = {"alice": "key-of-alice", "bob": "key-of-bob", "dora": "key-of-dora"}
LIMITS = """
[tenants.bob]
tokens_per_minute = 100
"""


def write_keys(folder: Path) -> Path:
    """Write the file of the callers' keys, with one that has not the role client."""
    path = folder / "keys"
    path.write_text(key_lines(KEYS) + key_lines({"watcher": "w"}, "worker"))
    return path


@pytest.fixture(scope="module")
def keyed(services: LocalServices, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("keys")
    keys = write_keys(folder)
    (folder / "limits").write_text(LIMITS)
    flags = ("--api-keys", str(keys), "--tenant-limits", str(folder / "limits"))
    gateway = Gateway(services.cachemgr_address, *flags, log=folder / "log")
    yield gateway
    gateway.close()


def ask(gateway: Gateway, key: str | None, **fields: object) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with gateway.client(headers=headers) as client:
        return client.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, "max_tokens": 4, **fields})


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("key-of-carol", 401), ("w", 403), ("key-of-alice", 200)])
def test_a_key_decides_who_may_call(keyed: Gateway, key: str | None, status: int) -> None:
    assert ask(keyed, key).status_code == status
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with keyed.client(headers=headers) as client:
        assert client.get("/v1/models").status_code == status
        assert client.get("/live/sequence", params={"id": "x"}).status_code == (400 if status == 200 else status)
        assert client.get("/health").status_code == 200


def test_a_tenant_that_follows_the_cache_as_often_as_it_may_keeps_out_no_other(keyed: Gateway) -> None:
    def follow(name: str) -> httpx.Response:
        asked = client.build_request("GET", "/live", headers={"Authorization": f"Bearer {KEYS[name]}"})
        return opened.enter_context(contextlib.closing(client.send(asked, stream=True)))

    limits = httpx.Limits(max_connections=None)
    with contextlib.ExitStack() as opened, keyed.client(limits=limits) as client:
        for _ in range(MAX_VIEWERS):
            assert follow("alice").status_code == 200
        assert follow("alice").status_code == 429
        assert follow("bob").status_code == 200


def test_metrics_name_no_tenant_without_a_key_and_with_one_this_tenant_alone(
    services: LocalServices, tmp_path: Path
) -> None:
    own_port = free_port()
    flags = ("--api-keys", str(write_keys(tmp_path)), "--metrics-listen", f"127.0.0.1:{own_port}")
    gateway = Gateway(services.cachemgr_address, *flags, log=tmp_path / "log")
    try:
        for name in ("alice", "bob"):
            assert ask(gateway, KEYS[name], prompt="Metrics are").status_code == 200
        with gateway.client() as client:
            public = client.get("/metrics").text
            of_alice = client.get("/metrics", headers={"Authorization": f"Bearer {KEYS['alice']}"}).text
            assert client.get("/metrics", headers={"Authorization": "Bearer no-key"}).status_code == 401
        accepted = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}  # as Prometheus
        of_all = httpx.get(f"http://127.0.0.1:{own_port}/metrics", headers=accepted, timeout=DEADLINE_S).text
    finally:
        gateway.close()
    assert "vllm:num_requests_running" in public
    assert [name in public for name in ("alice", "bob")] == [False, False]
    assert [name in of_alice for name in ("alice", "bob")] == [True, False]
    assert "vllm:num_requests_running{" in of_all
    assert [name in of_all for name in ("alice", "bob")] == [True, True]


def test_tenants_share_no_cache_and_cachemgr_knows_whose_each_block_is(keyed: Gateway, services: LocalServices) -> None:
    def cached(key: str) -> int:
        return int(ask(keyed, key).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached(KEYS["alice"])
    assert cached(KEYS["alice"]) > 0
    assert cached(KEYS["bob"]) == 0

    async def tenants() -> set[str]:
        cache = CacheClient(services.cachemgr_address)
        try:
            return {tenant.name for tenant in await cache.list_tenants()}
        finally:
            await cache.close()

    assert {"alice", "bob"} <= asyncio.run(tenants())


def test_a_tenants_prefix_is_found_by_its_tokens_alone(keyed: Gateway, services: LocalServices) -> None:
    prompt = "A prefix is found by its tokens and its tenant, and by nothing else. " * 4
    assert ask(keyed, KEYS["alice"], prompt=prompt).status_code == 200
    with keyed.client(headers={"Authorization": f"Bearer {KEYS['alice']}"}) as client:
        token_ids = client.post("/tokenize", json={"model": MODEL, "prompt": prompt}).json()["tokens"]

    async def found(tenant: str) -> int:
        cache = CacheClient(services.cachemgr_address)
        try:
            return (await cache.lookup_prefix(token_ids, tenant=tenant)).matches[0].cached_token_count
        finally:
            await cache.close()

    assert asyncio.run(found("alice")) > 0
    assert asyncio.run(found("bob")) == 0


def test_a_tenant_with_a_long_queue_does_not_delay_another_ones_request(keyed: Gateway) -> None:
    """Alice's requests fill the pool several times over; one request of Dora ends while most of them still wait."""
    num_requests = 240

    async def run() -> int:
        limits = httpx.Limits(max_connections=num_requests + 1)
        async with httpx.AsyncClient(base_url=keyed.url, timeout=DEADLINE_S, limits=limits) as client:

            async def ask_as(name: str, prompt: list[int]) -> None:
                body = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "ignore_eos": True}
                answer = await client.post(
                    "/v1/completions", json=body, headers={"Authorization": f"Bearer {KEYS[name]}"}
                )
                assert answer.status_code == 200, answer.text

            own = [asyncio.create_task(ask_as("alice", [5 + index % 200, *[7] * 300])) for index in range(num_requests)]
            while keyed.metric("vllm:num_requests_waiting") < num_requests / 2:
                await asyncio.sleep(0)
            await ask_as("dora", [9] * 60)
            num_left = sum(not each.done() for each in own)
            await asyncio.gather(*own)
            return num_left

    assert asyncio.run(run()) > num_requests / 2


def test_a_callers_open_bodies_have_a_limit_and_keep_nobody_else_out(services: LocalServices, tmp_path: Path) -> None:
    """Bodies that do not end count as their bytes come; those of a caller that has gone do not count."""
    flags = ("--api-keys", str(write_keys(tmp_path)), "--max-body-bytes", "100000", "--max-open-body-bytes", "150000")
    gateway = Gateway(services.cachemgr_address, *flags, log=tmp_path / "log")
    host, _, port = gateway.url.removeprefix("http://").rpartition(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEYS['alice']}\r\n"
    try:
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as unfinished:
            unfinished.sendall(f"{head}Content-Length: 99000\r\n\r\n".encode() + b" " * 98_000)
            await_that("alice's bodies are too many", lambda: long_body(gateway, "alice").status_code == 429)
            refusal = long_body(gateway, "alice").json()["error"]
            assert (refusal["code"], "150000 bytes" in refusal["message"]) == ("too_many_open_bodies", True)
            assert ask(gateway, KEYS["alice"]).status_code == 200  # there is room for a small one
            assert long_body(gateway, "bob").status_code == 200
        await_that("alice's body is gone", lambda: long_body(gateway, "alice").status_code == 200)
    finally:
        gateway.close()


def long_body(gateway: Gateway, name: str) -> httpx.Response:
    """The answer to a completion with a body of 60,000 bytes."""
    return ask(gateway, KEYS[name], user="u" * 60_000)


def test_more_tokens_than_a_tenants_limit_are_refused_until_later(keyed: Gateway) -> None:
    answers = [ask(keyed, KEYS["bob"], max_tokens=60, ignore_eos=True) for _ in range(3)]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert {answer.status_code for answer in refused} == {429}
    assert int(refused[0].headers["Retry-After"]) >= 1
    assert ask(keyed, KEYS["alice"]).status_code == 200
