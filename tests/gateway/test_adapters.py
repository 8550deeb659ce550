"""LoRA adapters over real services: by the engine, and over HTTP by the adapter's name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import lora_zoo
import model_zoo as zoo
import pytest
import text_model
import transformers
from gateway.conftest import MODEL, Gateway

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cli.launch import LocalServices
from quire.client import CacheClient, CacheParams, Engine, EngineConfig, InvalidRequest, SamplingParams

PROMPT = [5, 9, 2, 11, 3, 8] * 6
NEW_TOKENS = 12
SEEDS = {"first": 1, "second": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("adapted")
    model = load(text_model.save(folder / "model"))
    for name, seed in SEEDS.items():
        lora_zoo.save(model, folder / name, seed=seed)
    return folder


@pytest.fixture(scope="module")
def services(folder: Path) -> Iterator[LocalServices]:
    adapters = [argument for name in SEEDS for argument in ("--lora", f"{name}={folder / name}")]
    with LocalServices.start(
        model=folder / "model",
        num_blocks=64,
        extra_worker_args=("--dtype", "float32", "--block-size", "4", "--host-memory", "1M", *adapters),
    ) as services:
        yield services


@pytest.fixture(scope="module")
def adapted_gateway(services: LocalServices, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    gateway = Gateway(services.cachemgr_address, log=tmp_path_factory.mktemp("gateway") / "log")
    yield gateway
    gateway.close()


def load(folder: Path) -> Any:
    loader: Any = transformers.AutoModelForCausalLM
    return loader.from_pretrained(folder).eval().requires_grad_(False)


def expected_of(folder: Path) -> dict[str, list[int]]:
    """Return the new tokens of the base, under "", and of each adapter."""
    expected = {"": zoo.generate(load(folder / "model"), PROMPT, NEW_TOKENS)[len(PROMPT) :]}
    for name, seed in SEEDS.items():
        model = load(folder / "model")
        merged = lora_zoo.merge(model, lora_zoo.draw_weights(model, seed=seed), scaling=2.0)
        expected[name] = zoo.generate(merged, PROMPT, NEW_TOKENS)[len(PROMPT) :]
    return expected


def test_requests_of_several_adapters_share_steps_and_no_blocks(services: LocalServices, folder: Path) -> None:
    """Few blocks, so that sequences are preempted; a second time each finds its own prefix alone."""
    expected = expected_of(folder)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, n=2)

    async def run() -> None:
        config = EngineConfig(max_running_sequences=8, max_step_tokens=24)
        cache = CacheClient(services.cachemgr_address)
        async with Engine.connect(services.cachemgr_address, config=config) as engine:
            identities = {"": b"", **engine.adapters}
            assert list(identities) == ["", *SEEDS]
            for is_again in (False, True):
                asked = [
                    engine.complete(PROMPT, params, cache=CacheParams(adapter=identities[name])) for name in expected
                ]
                for name, [completion] in zip(expected, await asyncio.gather(*asked), strict=True):
                    assert [list(sample.token_ids) for sample in completion.samples] == [expected[name]] * 2
                    assert (completion.num_cached_tokens > 0) is is_again, name
            for identity in identities.values():
                found = await cache.lookup_prefix(PROMPT, adapter=identity)
                assert found.matches[0].cached_token_count == len(PROMPT) - 4
            unknown = await cache.explain_prefix(PROMPT, adapter=bytes(32))
            assert (unknown.cached_token_count, unknown.reason) == (0, pb.MISS_REASON_OTHER_ADAPTER)
            with pytest.raises(InvalidRequest, match=r"adapter is '0{64}', must be one of 2, like first \("):
                await engine.complete(PROMPT, params, cache=CacheParams(adapter=bytes(32)))
        await cache.close()

    asyncio.run(run())


def test_a_model_is_named_by_its_adapters(adapted_gateway: Gateway, folder: Path) -> None:
    expected = expected_of(folder)
    with adapted_gateway.client() as client:
        cards = client.get("/v1/models").json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [(MODEL, None), ("first", MODEL), ("second", MODEL)]
        assert client.get("/v1/models/second").json()["parent"] == MODEL
        assert (complete(client, MODEL), complete(client, "second")) == (expected[""], expected["second"])
        missing = client.post("/v1/completions", json={"model": "third", "prompt": PROMPT})
        assert missing.status_code == 404
        assert missing.json()["error"]["message"].endswith("; 'demo', 'first', 'second' is")


def complete(client: httpx.Client, model: str) -> list[int]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json={**body, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found
