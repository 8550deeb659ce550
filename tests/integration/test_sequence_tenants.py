"""Requests of several tenants in one engine, each in the share of its own tenant, over real services."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import sha256

from quire.cli.launch import LocalServices
from quire.client import CacheClient, Credentials, Engine, EngineConfig, InvalidRequest, QuireError, SamplingParams

MODEL = Path(__file__).parents[2] / "deploy" / "demo" / "model"
CALLERS = {"gate": "client,gateway", "front": "client", "olga": "operator", "worker": "worker"}
"""Names, which are their tokens, and their roles."""
NUM_NEW = 40
NUM_EACH = 4
SHARES = """
[tenants.small]
limit = 8
"""
FITS = [[number, *range(100, 140)] for number in range(NUM_EACH)]
"""Each takes 6 blocks of 16 tokens in the end, so that two of them are more than the share of `small`."""
NEVER_FITS = list(range(100, 100 + 8 * 16 + 1))


@pytest.fixture(scope="module")
def cachemgr(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("shares")
    (folder / "tenants.toml").write_text(SHARES)
    (folder / "tokens").write_text("".join(f"{name} {roles} {sha256(name)}\n" for name, roles in CALLERS.items()))
    (folder / "worker-token").write_text("worker")
    (folder / "worker-token").chmod(0o600)
    with LocalServices.start(
        model=MODEL,
        num_blocks=64,
        extra_cachemgr_args=("--tenants", str(folder / "tenants.toml"), "--token-file", str(folder / "tokens")),
        extra_worker_args=("--dtype", "float32", "--cachemgr-token-file", str(folder / "worker-token")),
    ) as services:
        yield services.cachemgr_address


def params_of(tenant: str) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, tenant=tenant)


def connect(cachemgr: str, caller: str) -> Engine:
    return Engine.connect(cachemgr, credentials=Credentials(token=caller), config=EngineConfig(tenants=True))


async def complete(engine: Engine, prompt: list[int], tenant: str) -> list[int]:
    (completion,) = await engine.complete([prompt], [params_of(tenant)])
    return completion.samples[0].token_ids


def test_a_tenant_over_its_share_waits_alone_and_all_tokens_are_those_of_a_request_alone(cachemgr: str) -> None:
    ended: list[str] = []

    async def ask(engine: Engine, prompt: list[int], tenant: str) -> list[int]:
        try:
            return await complete(engine, prompt, tenant)
        finally:
            ended.append(tenant)

    async def run() -> None:
        async with connect(cachemgr, "gate") as engine:
            alone = [await complete(engine, prompt, "other") for prompt in FITS]
            asked = [(prompt, tenant) for tenant in ("small", "big") for prompt in FITS]
            never = asyncio.create_task(complete(engine, NEVER_FITS, "small"))
            together = await asyncio.gather(*(ask(engine, *each) for each in asked))
            assert together == [*alone, *alone]
            with pytest.raises(InvalidRequest) as refused:
                await never
            assert (refused.value.reason, refused.value.metadata["limited_by"]) == ("SEQUENCE_TOO_LONG", "tenant")
            assert engine.statistics().scheduler.refusals > 0, "the share was short"
        assert "big" not in ended[-2:], "they did not wait for the share of the other tenant"

    asyncio.run(run())

    async def look() -> None:
        cache = CacheClient(cachemgr, credentials=Credentials(token="olga"))
        try:
            tenants = {each.name: each for each in await cache.list_tenants()}
            assert {"small", "big", "other"} <= tenants.keys()
            assert all(each.held_block_count == 0 for each in tenants.values())
            assert tenants["big"].cached_block_count >= NUM_EACH * 2
            assert tenants["small"].cached_block_count > 0, "nothing of it was found in what others have"
            assert not (await cache.audit_pool()).violations
        finally:
            await cache.close()

    asyncio.run(look())


def test_without_the_role_requests_of_other_tenants_fail_alone(cachemgr: str) -> None:
    async def run() -> None:
        async with connect(cachemgr, "front") as engine:
            own = asyncio.create_task(complete(engine, FITS[0], ""))
            with pytest.raises(QuireError) as refused:
                await complete(engine, FITS[1], "small")
            assert refused.value.reason == "ROLE_MISSING"
            assert len(await own) == NUM_NEW

    asyncio.run(run())
