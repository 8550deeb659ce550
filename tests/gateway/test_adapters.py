"""LoRA adapters over real services: by the engine, and over HTTP by the adapter's name."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import lora_zoo
import model_zoo as zoo
import pytest
import text_model
import transformers
from click.testing import CliRunner
from gateway.conftest import MODEL, Gateway, key_lines
from integration.protocol_client import LeaseHolder, Pair, RefusedError, ask, await_that

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cli.commands import quire
from quire.cli.launch import LocalServices
from quire.client import CacheClient, CacheParams, Engine, EngineConfig, InvalidRequest, SamplingParams
from quire.client.channel import RetryPolicy, retried
from quire.client.errors import OutOfRoom
from quire.compute.v1 import worker_service_pb2

PROMPT = [5, 9, 2, 11, 3, 8] * 6
NEW_TOKENS = 12
SEEDS = {"first": 1, "second": 2}
LATER = {"third": 3, "fourth": 4}
"""Adapters that are loaded while the services run; the worker has three at a time."""
KEYS = {"ops": "o-key", "alice": "a-key"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("adapted")
    model = load(text_model.save(folder / "model"))
    for name, seed in (SEEDS | LATER).items():
        lora_zoo.save(model, folder / name, seed=seed)
    return folder


@pytest.fixture(scope="module")
def services(folder: Path) -> Iterator[LocalServices]:
    adapters = ["--max-loras", "3"]
    adapters += [argument for name in SEEDS for argument in ("--lora", f"{name}={folder / name}")]
    with LocalServices.start(
        model=folder / "model",
        num_blocks=128,
        extra_worker_args=(*("--dtype", "float32", "--block-size", "4", "--host-memory", "1M"), *adapters),
    ) as services:
        yield services


@pytest.fixture(scope="module")
def adapted_gateway(services: LocalServices, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    keys = key_lines({"ops": KEYS["ops"]}, "client,operator") + key_lines({"alice": KEYS["alice"]})
    (folder / "keys").write_text(keys)
    (folder / "limits").write_text('[tenants.alice]\nadapters = ["first", "third"]\n')
    flags = ("--api-keys", str(folder / "keys"), "--tenant-limits", str(folder / "limits"))
    gateway = Gateway(services.cachemgr_address, *flags, log=folder / "log")
    yield gateway
    gateway.close()


def client_of(gateway: Gateway, name: str = "ops") -> httpx.Client:
    return gateway.client(headers={"Authorization": f"Bearer {KEYS[name]}"})


def load(folder: Path) -> Any:
    loader: Any = transformers.AutoModelForCausalLM
    return loader.from_pretrained(folder).eval().requires_grad_(False)


def expected_of(folder: Path) -> dict[str, list[int]]:
    """Return the new tokens of the base, under "", and of each adapter."""
    expected = {"": zoo.generate(load(folder / "model"), PROMPT, NEW_TOKENS)[len(PROMPT) :]}
    for name, seed in (SEEDS | LATER).items():
        model = load(folder / "model")
        merged = lora_zoo.merge(model, lora_zoo.draw_weights(model, seed=seed), scaling=2.0)
        expected[name] = zoo.generate(merged, PROMPT, NEW_TOKENS)[len(PROMPT) :]
    return expected


def test_requests_of_several_adapters_share_steps_and_no_blocks(services: LocalServices, folder: Path) -> None:
    """Few blocks, so that sequences are preempted; a second time each finds its own prefix alone."""
    expected = {name: tokens for name, tokens in expected_of(folder).items() if name not in LATER}
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
            other = await cache.explain_prefix([*PROMPT, 1, 2, 3, 4], adapter=identities["first"])
            assert other.reason == pb.MISS_REASON_NEVER_COMPUTED
            for look in (cache.lookup_prefix, cache.explain_prefix):
                with pytest.raises(InvalidRequest, match=r"adapter is 0{64}; must be one of the 2 adapters"):
                    await look(PROMPT, adapter=bytes(32))
            with pytest.raises(InvalidRequest, match=r"adapter is '0{64}', must be one of 2, like first \("):
                await engine.complete(PROMPT, params, cache=CacheParams(adapter=bytes(32)))
        await cache.close()

    asyncio.run(run())


def test_a_model_is_named_by_its_adapters(adapted_gateway: Gateway, folder: Path) -> None:
    expected = expected_of(folder)
    with client_of(adapted_gateway) as client:
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


def change(client: httpx.Client, verb: str, name: str, **fields: object) -> httpx.Response:
    return client.post(f"/v1/{verb}_lora_adapter", json={"lora_name": name, **fields})


def names_of(client: httpx.Client) -> list[str]:
    return [card["id"] for card in client.get("/v1/models").json()["data"]]


def test_a_tenant_has_its_adapters_and_others_do_not_exist_for_it(adapted_gateway: Gateway) -> None:
    with client_of(adapted_gateway, "alice") as client:
        assert names_of(client) == [MODEL, "first"]
        body = {"prompt": PROMPT, "max_tokens": 1}
        errors = []
        for name in ("second", "absent"):
            assert client.get(f"/v1/models/{name}").status_code == 404
            answer = client.post("/v1/completions", json={**body, "model": name})
            errors.append((answer.status_code, answer.json()["error"]["message"].replace(name, "NAME")))
        assert errors[0] == errors[1] == (404, f"model 'NAME' is not served here; '{MODEL}', 'first' is")
        assert client.post("/v1/completions", json={**body, "model": "first"}).status_code == 200


def test_commands_take_an_adapter_by_its_name(adapted_gateway: Gateway, services: LocalServices) -> None:
    with client_of(adapted_gateway) as client:
        complete(client, "first")

    def ask_quire(command: str, *arguments: str) -> dict[str, Any]:
        scope = ("--tenant", "ops", "--cachemgr", services.cachemgr_address, "--json")
        result = CliRunner().invoke(quire, [command, *arguments, *scope])
        assert result.exit_code == 0, result.output
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer

    prompt = ("--token-ids", ",".join(map(str, PROMPT)))
    assert ask_quire("explain", *prompt, "--adapter", "first")["cached_token_count"] == len(PROMPT) - 4
    assert ask_quire("pin", *prompt, "--adapter", "first")["pinned_token_count"] == len(PROMPT)
    assert ask_quire("lookup", *prompt, "--adapter", "first")["matches"][0]["cached_token_count"] == len(PROMPT) - 4
    assert int(ask_quire("reset", "--adapter", "first")["dropped_block_count"]) > 0
    assert ask_quire("explain", *prompt, "--adapter", "first")["reason"] == "MISS_REASON_RESET"
    unknown = CliRunner().invoke(quire, ["reset", "--adapter", "none", "--cachemgr", services.cachemgr_address])
    assert unknown.exit_code == 2
    assert "must be one of the worker's" in " ".join(unknown.output.split())


def test_what_can_not_be_loaded_is_refused_and_changes_nothing(
    adapted_gateway: Gateway, folder: Path, tmp_path: Path
) -> None:
    damaged = shutil.copytree(folder / "third", tmp_path / "damaged")
    weights = damaged / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    path = str(folder / "third")
    refusals = {
        400: [
            ({"name": "bad", "lora_path": str(damaged)}, "is damaged"),
            ({"name": "bad"}, "lora_path is missing"),
            ({"name": MODEL, "lora_path": path}, "a model has it here"),
            ({"name": "model", "lora_path": path}, "name is model; must be another name: this is the model's"),
            ({"name": "first", "lora_path": path}, "it has other content"),
            ({"name": "a b", "lora_path": path}, "must be 1 to 128 letters"),
        ]
    }
    with client_of(adapted_gateway) as client, client_of(adapted_gateway, "alice") as alice:
        before = names_of(client)
        for status, cases in refusals.items():
            for fields, message in cases:
                answer = change(client, "load", **fields)  # type: ignore[arg-type]
                assert (answer.status_code, message in answer.text) == (status, True), answer.text
        assert change(client, "unload", "absent").status_code == 404
        for verb, fields in (("load", {"lora_path": path}), ("unload", {})):
            denied = change(alice, verb, "first", **fields)
            assert (denied.status_code, denied.json()["error"]["code"]) == (403, "role_missing")
        assert names_of(client) == before


def load_third(pair: Pair, folder: Path) -> bytes:
    request = worker_service_pb2.LoadAdapterRequest(name="third", path=str(folder / "third"))
    identity: bytes = ask(pair.worker.LoadAdapter, request).adapter.identity
    await_that("cachemgr knows it", lambda: "third" in {each.name for each in pair.pool().adapters.adapters})
    return identity


def unload_third(pair: Pair) -> None:
    assert ask(pair.worker.UnloadAdapter, worker_service_pb2.UnloadAdapterRequest(name="third")).unloaded
    await_that("cachemgr knows it", lambda: "third" not in {each.name for each in pair.pool().adapters.adapters})


def end(lease: LeaseHolder) -> None:
    lease.delete()
    await_that("the lease is fenced", lambda: not lease.pair.has_lease(lease.lease_id))


def test_an_adapter_stays_for_a_sequence_in_the_host_tier(services: LocalServices, folder: Path) -> None:
    pair, expected = Pair(services), expected_of(folder)["third"]
    lease, third = LeaseHolder.create(pair), load_third(pair, folder)
    lease.run(lease.admit((1, PROMPT), adapter=third))
    lease.await_settled()
    lease.run(lease.accepted(lease.plan(offload_sequence_ids=[1])))
    lease.await_settled()
    assert (lease.sequence(1).offloaded, pair.worker_statistics().sequence_count) == (True, 0)
    with pytest.raises(RefusedError) as in_use:
        unload_third(pair)
    assert (in_use.value.reason, in_use.value.metadata["value"]) == ("ADAPTERS_IN_USE", "third")
    lease.run(lease.accepted(lease.plan(restores=[{"sequence_id": 1}])))
    lease.go_on(1, num_steps=NEW_TOKENS - len(lease.tokens[1]) + len(PROMPT))
    assert lease.tokens[1][len(PROMPT) :] == expected
    lease.run(lease.accepted(lease.plan(release_sequence_ids=[1])))
    unload_third(pair)
    end(lease)
    pair.close()


def test_a_sequence_that_was_planned_or_preempted_before_its_adapter_went_is_refused_alone(
    services: LocalServices, folder: Path
) -> None:
    """The error names the sequence, so its neighbours go on; the same adapter under its name again is no other."""
    pair, expected = Pair(services), expected_of(folder)
    lease, third = LeaseHolder.create(pair), load_third(pair, folder)
    neighbour = {"sequence_id": 2, "token_ids": PROMPT}
    lease.tokens = {1: list(PROMPT), 2: list(PROMPT)}
    both = [{"sequence_id": 1, "token_ids": PROMPT, "adapter": third}, neighbour]
    plan = lease.accepted(lease.plan(admissions=both))
    unload_third(pair)
    with pytest.raises(RefusedError) as planned:
        lease.run(plan)
    assert (planned.value.reason, planned.value.metadata["sequence_id"]) == ("INVALID_ARGUMENT", "1")
    lease.run(plan, skip=True)
    lease.run(lease.accepted(lease.plan(release_sequence_ids=[1, 2])))
    with pytest.raises(RefusedError) as again:
        lease.plan(admissions=both)
    assert (again.value.metadata["field"], again.value.metadata["sequence_id"]) == ("admissions.adapter", "1")
    lease.run(lease.accepted(lease.plan(admissions=[neighbour])))
    assert load_third(pair, folder) == third
    lease.run(lease.accepted(lease.plan(admissions=both[:1], extends={"sequence_ids": [2], "token_counts": [1]})))
    lease.go_on(1, num_steps=NEW_TOKENS - 1)
    lease.go_on(2, num_steps=NEW_TOKENS - 2)
    assert [lease.tokens[seq_id][len(PROMPT) :] for seq_id in (1, 2)] == [expected["third"], expected[""]]
    end(lease)
    unload_third(pair)
    pair.close()


def fill_host_tier(lease: LeaseHolder) -> None:
    """Offload sequences until no other one fits."""
    for seq_id in range(100, 200):
        num_blocks = min(lease.pair.pool().host_block_counts.free_count, 100)
        if not num_blocks:
            return
        lease.run(lease.admit((seq_id, [seq_id % 90] * (4 * num_blocks - 1))))
        lease.await_settled()
        lease.run(lease.accepted(lease.plan(offload_sequence_ids=[seq_id])))
        lease.await_settled()


def test_a_preempted_request_whose_adapter_goes_ends_with_an_error_and_others_go_on(
    services: LocalServices, folder: Path
) -> None:
    """A long request takes the blocks of one with the adapter. Nothing waits for an adapter that may never return."""
    pair = Pair(services)
    lease, third = LeaseHolder.create(pair), load_third(pair, folder)
    fill_host_tier(lease)
    lease.run(lease.admit((1, [3] * 300)))  # the pool has 52 blocks left
    long, short, num_tokens = [7, 5] * 20, [5, 7] * 70, 100
    expected = zoo.generate(load(folder / "model"), long, num_tokens)[len(long) :]

    async def run() -> None:
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        async with Engine.connect(services.cachemgr_address) as engine:
            asked = [
                asyncio.create_task(engine.complete(prompt, params, cache=CacheParams(adapter=adapter)))
                for prompt, adapter in ((long, b""), (short, third))
            ]
            while not engine.statistics().scheduler.preemptions:
                await asyncio.sleep(0)
            await retried(lambda: engine.unload_adapter("third"), RetryPolicy(max_attempts=50), after=OutOfRoom)
            with pytest.raises(InvalidRequest) as ended:
                await asked[1]
            assert ended.value.metadata["field"] == "admissions.adapter"
            [completion] = await asked[0]
            assert list(completion.samples[0].token_ids) == expected

    asyncio.run(run())
    end(lease)
    pair.close()


def test_adapters_come_and_go_while_others_are_used(
    adapted_gateway: Gateway, services: LocalServices, folder: Path
) -> None:
    """One that a sequence has is neither unloaded nor evicted; the one unused the longest goes for a fourth."""
    expected, pair = expected_of(folder), Pair(services)
    with client_of(adapted_gateway) as client:
        loaded = change(client, "load", "third", lora_path=str(folder / "third"))
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'third' added successfully.")
        assert complete(client, "third") == expected["third"]
        model = ask(pair.worker.GetModel, worker_service_pb2.GetModelRequest())
        adapters = {each.name: each.identity for each in model.adapters}
        await_that("cachemgr knows it", lambda: len(pair.pool().adapters.adapters) == 3)
        lease = LeaseHolder.create(pair)
        lease.run(lease.admit((1, PROMPT), adapter=adapters["first"]))
        in_use = change(client, "unload", "first")
        assert (in_use.status_code, in_use.json()["error"]["code"]) == (409, "adapters_in_use")
        complete(client, "third")  # so that second is the one unused the longest
        assert change(client, "load", "fourth", lora_path=str(folder / "fourth")).status_code == 200
        assert names_of(client) == [MODEL, "first", "fourth", "third"]
        assert complete(client, "fourth") == expected["fourth"]
        await_that("cachemgr knows it", lambda: "second" not in {each.name for each in pair.pool().adapters.adapters})
        with pytest.raises(RefusedError) as unknown:
            lease.admit((2, PROMPT), adapter=adapters["second"])
        assert unknown.value.metadata["field"] == "admissions.adapter"
        assert unknown.value.metadata["sequence_id"] == "2"
        lease.delete()
        await_that("the lease is fenced", lambda: not pair.has_lease(lease.lease_id))
        removed = change(client, "unload", "fourth")
        assert (removed.status_code, removed.text) == (200, "Success: LoRA adapter 'fourth' removed successfully.")
        assert client.post("/v1/completions", json={"model": "fourth", "prompt": PROMPT}).status_code == 404
        assert change(client, "load", "again", lora_path=str(folder / "fourth")).status_code == 200
        body = {"model": "again", "prompt": PROMPT, "max_tokens": 1}
        usage = client.post("/v1/completions", json=body).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0, "the same content finds its blocks under any name"
    pair.close()
