"""The gateway's metrics, by model and tenant."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest
from deadlines import DEADLINE_S
from gateway.conftest import Gateway
from integration.protocol_client import await_that
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from quire.client.engine.outputs import Chunk
from quire.client.errors import InvalidRequest, OutOfRoom, WorkerUnavailable
from quire.gateway.errors import HttpError
from quire.gateway.metrics import GatewayMetrics


def samples(metrics: GatewayMetrics) -> dict[tuple[str, ...], float]:
    """Values by name and labels' values."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in metrics.families([])
        for sample in family.samples
        if sample.name.startswith("quire_gateway")
    }


def test_tenants_are_counted_apart() -> None:
    metrics = GatewayMetrics()
    with metrics.request("m", 7, tenant="alice") as first, metrics.request("m", 5, tenant="bob"):
        first.chunk(Chunk(0, "", (1,)), 1e9)
        first.chunk(Chunk(0, "", (2, 3)), 1e9)
        found = samples(metrics)
    for tenant, values in {"alice": (1, 7, 3, 1), "bob": (1, 5, 0, 0)}.items():
        named = (
            "requests_total",
            "prompt_tokens_total",
            "generation_tokens_total",
            "time_to_first_token_seconds_count",
        )
        assert tuple(found[f"quire_gateway_tenant_{name}", "m", tenant] for name in named) == values
    assert found["quire_gateway_requests", "m"] == 2
    assert found["quire_gateway_tenant_time_to_first_token_seconds_sum", "m", "alice"] > 0


def test_a_gateway_without_a_model_is_not_ready() -> None:
    assert samples(GatewayMetrics())[("quire_gateway_ready",)] == 0


@pytest.mark.parametrize("has_token", [False, True])
@pytest.mark.parametrize(
    ("error", "before", "after"),
    [
        (None, ("completed", ""), ("completed", "")),
        (GeneratorExit(), ("cancelled", ""), ("cancelled", "")),
        (asyncio.CancelledError(), ("cancelled", ""), ("cancelled", "")),
        (InvalidRequest("x", reason="A"), ("refused", "a"), ("interrupted", "a")),
        (OutOfRoom("x", reason="FULL"), ("refused", "full"), ("interrupted", "full")),
        (WorkerUnavailable("x", reason="B"), ("failed", "b"), ("interrupted", "b")),
        (HttpError(503, "x", code="c"), ("failed", "c"), ("interrupted", "c")),
        (RuntimeError("x"), ("failed", "internal_error"), ("interrupted", "internal_error")),
    ],
)
def test_requests_are_counted_by_their_outcome(
    error: BaseException | None, before: tuple[str, str], after: tuple[str, str], has_token: bool
) -> None:
    metrics = GatewayMetrics()
    ends = contextlib.nullcontext() if error is None else pytest.raises(type(error))
    with ends, metrics.request("m", 7) as request:
        if has_token:
            request.chunk(Chunk(0, "", (1,)), 1e9)
        if error is not None:
            raise error
    found = {key: value for key, value in samples(metrics).items() if key[0] == "quire_gateway_requests_ended_total"}
    assert found == {("quire_gateway_requests_ended_total", "m", *(after if has_token else before)): 1}
    assert samples(metrics)["quire_gateway_requests", "m"] == 0


def test_routers_read_the_use_the_size_and_the_number_of_blocks(gateway: Gateway) -> None:
    """All four metrics that routers need are on the gateway's page; a sequence that holds blocks shows in the use."""

    def page() -> dict[str, Sample]:
        text = httpx.get(f"{gateway.url}/metrics", timeout=DEADLINE_S).text
        return {sample.name: sample for each in text_string_to_metric_families(text) for sample in each.samples}

    await_that("the pool was seen", lambda: "vllm:cache_config_info" in page())
    found = page()
    assert found["vllm:cache_config_info"].value == 1
    assert found["vllm:cache_config_info"].labels == {"model_name": "demo", "block_size": "16", "num_gpu_blocks": "511"}
    assert {"vllm:num_requests_waiting", "vllm:num_requests_running"} <= found.keys()
    body = {"prompt": [7] * 1000, "max_tokens": 900, "ignore_eos": True, "n": 4, "stream": True}
    with gateway.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        await_that("blocks are in use", lambda: 62 / 511 <= page()["vllm:kv_cache_usage_perc"].value <= 1)
    await_that("no block is in use", lambda: page()["vllm:kv_cache_usage_perc"].value == 0)
