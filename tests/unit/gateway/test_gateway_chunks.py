"""The chunks that Gateway.generate gives: admitted when the first one is asked for, counted, and ended once."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.gateway.test_gateway_routing import PROMPT, RECITED, LocalRouter, Pool, greedy, routing, run

from quire.client import RequestFailed
from quire.gateway.callers import Caller
from quire.gateway.errors import HttpError
from quire.gateway.gateway import Gateway
from quire.gateway.metrics import GatewayMetrics
from quire.gateway.tenant_limits import TenantRateLimiter

ALICE, BOB = Caller("alice", "alice"), Caller("bob", "bob")
LIMITS = "[tenants.alice]\ntokens_per_minute = 1000\n[tenants.bob]\nmax_requests = 1\n"


def gateway_over(router: LocalRouter, folder: Path) -> Gateway:
    limits = folder / "limits.toml"
    limits.write_text(LIMITS)
    limiter = TenantRateLimiter(limits, clock=lambda: 0.0)
    return Gateway({"m": router}, GatewayMetrics(), rate_limiter=limiter)


def outcomes(gateway: Gateway) -> dict[tuple[str, str], int]:
    return dict(gateway.metrics._models["m"].outcomes)


def test_a_request_is_admitted_with_its_first_chunk_and_ends_once(tmp_path: Path) -> None:
    async def body() -> None:
        async with routing(Pool("a")) as router:
            gateway = gateway_over(router, tmp_path)
            unread = gateway.generate(BOB, router, PROMPT, greedy(5))
            await unread.aclose()
            assert await anext(unread, None) is None, "it was closed before it began"
            chunks = gateway.generate(BOB, router, PROMPT, greedy(5))
            assert (await anext(chunks)).token_ids
            refused = gateway.generate(BOB, router, PROMPT, greedy(5))
            with pytest.raises(HttpError, match="max_requests"):
                await anext(refused)
            assert await anext(refused, None) is None
            await chunks.aclose()
            await chunks.aclose()
            assert await anext(chunks, None) is None
            assert [
                token async for chunk in gateway.generate(BOB, router, PROMPT, greedy(5)) for token in chunk.token_ids
            ]
            assert outcomes(gateway) == {("cancelled", ""): 1, ("completed", ""): 1}
            assert router.router_statistics().open == {"a": 0}

    run(body())


def test_an_error_is_raised_as_it_is_or_under_the_names_of_the_caller(tmp_path: Path) -> None:
    async def body() -> None:
        a = Pool("a")
        a.poison = PROMPT[-1]
        async with routing(a) as router:
            gateway = gateway_over(router, tmp_path)
            with pytest.raises(HttpError) as told:
                gateway.generate(BOB, router, [], greedy(5), names={"prompt": "messages"})
            assert (told.value.status, told.value.param) == (400, "messages")
            with pytest.raises(RequestFailed):
                await anext(gateway.generate(BOB, router, PROMPT, greedy(5)))
            with pytest.raises(HttpError) as failed:
                await anext(gateway.generate(BOB, router, PROMPT, greedy(5), names={}))
            assert failed.value.status == 500
            assert sum(outcomes(gateway).values()) == 2

    run(body())


def test_tokens_are_counted_as_they_come_where_a_tenant_has_a_limit_of_them(tmp_path: Path) -> None:
    async def body() -> None:
        async with routing(Pool("a")) as router:
            gateway = gateway_over(router, tmp_path)
            sizes = {}
            for caller in (ALICE, BOB):
                chunks = gateway.generate(caller, router, PROMPT, greedy(60), is_whole=True)
                sizes[caller.name] = [len(chunk.token_ids) async for chunk in chunks]
            assert sizes["bob"] == [1, 59]
            assert len(sizes["alice"]) > 2, "a request that is left would not say how many tokens it had"
            assert sum(sizes["alice"]) == len(RECITED[:60])

    run(body())
