"""POST /v1/completions by openai's client and by plain HTTP, against the engine in process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from deadlines import DEADLINE_S
from gateway.conftest import MODEL, Gateway

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cli.launch import LocalServices
from quire.client import CacheClient, Engine
from quire.client.engine.config import EngineConfig

PROMPT = "Once upon a time"


@pytest.fixture
def client(gateway: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=DEADLINE_S, max_retries=0)


def complete(http_client: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = http_client.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events_of(http_client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, [DONE] left out."""
    body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "stream": True, **fields}
    with http_client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"] if choice["index"] == index)


def test_text_is_that_of_the_engine(client: openai.OpenAI, services: LocalServices) -> None:
    async def generate() -> str:
        config = EngineConfig(max_running_sequences=8)
        async with Engine.connect(services.cachemgr_address, config=config) as engine:
            [completion] = await engine.complete(PROMPT, max_tokens=24, temperature=0)
            return completion.text

    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0)
    assert answer.choices[0].text == asyncio.run(generate())
    assert answer.choices[0].finish_reason == "length"
    assert (answer.object, answer.model) == ("text_completion", MODEL)


def test_stream_has_the_same_text_and_usage_in_its_last_chunk(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0)
    stream = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert all(chunk.usage is None for chunk in chunks)
    assert len(chunks) > 1
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 24


def test_usage_counts_cached_tokens(http_client: httpx.Client) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 10
    first = complete(http_client, prompt=prompt, max_tokens=1, cache_salt="cached")["usage"]
    second = complete(http_client, prompt=prompt, max_tokens=1, cache_salt="cached")["usage"]
    other = complete(http_client, prompt=prompt, max_tokens=1, cache_salt="other")["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < second["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens"]
    assert other["prompt_tokens_details"]["cached_tokens"] == 0
    last = events_of(
        http_client, prompt=prompt, max_tokens=1, cache_salt="cached", stream_options={"include_usage": True}
    )[-1]
    assert last["usage"] == second


def test_hints_to_the_cache_reach_the_blocks(http_client: httpx.Client, services: LocalServices) -> None:
    async def priorities() -> set[int]:
        cache = CacheClient(services.cachemgr_address)
        try:
            return {block.priority for block in await cache.list_blocks(state=pb.BLOCK_STATE_CACHED)}
        finally:
            await cache.close()

    assert 9 not in asyncio.run(priorities())
    hints = {"expected_in_s": 60, "retention": [{"num_tokens": 0, "priority": 9, "ttl_s": 600}]}
    complete(http_client, prompt="A hint is followed. " * 10, max_tokens=1, cache_salt="hints", cache_hints=hints)
    assert 9 in asyncio.run(priorities())
    complete(http_client, max_tokens=1, cache_hints={"not_expected": True})


def test_all_kinds_of_prompts(http_client: httpx.Client) -> None:
    token_ids = http_client.post("/tokenize", json={"model": MODEL, "prompt": PROMPT}).json()["tokens"]
    one = complete(http_client, max_tokens=8)["choices"][0]["text"]
    assert complete(http_client, prompt=token_ids, max_tokens=8)["choices"][0]["text"] == one
    for several in ([PROMPT, "Hello"], [token_ids, token_ids[:2]]):
        choices = complete(http_client, prompt=several, max_tokens=8, n=2)["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        assert choices[0]["text"] == choices[1]["text"] == one
        events = events_of(http_client, prompt=several, max_tokens=8, n=2)
        assert [text_of(events, index) for index in range(4)] == [choice["text"] for choice in choices]


def test_echo_scores_the_prompt_as_lm_eval_asks(http_client: httpx.Client) -> None:
    """lm-eval's local-completions takes token_logprobs[context:-1] with max_tokens 1, and compares with the top."""
    token_ids = http_client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    scored = complete(http_client, prompt=[token_ids], max_tokens=1, logprobs=1, echo=True, seed=1234)["choices"][0]
    logprobs = scored["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == len(token_ids) + 1
    assert logprobs["token_logprobs"][0] is None
    for logprob, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert logprob < 0
        assert logprob in top.values()
    only_prompt = complete(http_client, prompt=token_ids, max_tokens=0, logprobs=1, echo=True)
    choice = only_prompt["choices"][0]
    assert choice["text"] == PROMPT
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs["token_logprobs"][:-1], nan_ok=False)
    assert only_prompt["usage"]["completion_tokens"] == 0
    streamed = events_of(http_client, prompt=token_ids, max_tokens=4, logprobs=1, echo=True)
    assert text_of(streamed).startswith(PROMPT)


def test_sampling_parameters_reach_the_engine(http_client: httpx.Client) -> None:
    plain = complete(http_client, max_tokens=8, return_token_ids=True)["choices"][0]
    first = plain["token_ids"][0]
    assert plain["prompt_token_ids"]
    barred = complete(http_client, max_tokens=8, logit_bias={str(first): -100}, return_token_ids=True)["choices"][0]
    assert barred["token_ids"][0] != first
    ended = complete(http_client, max_tokens=8, stop_token_ids=[first])["choices"][0]
    assert (ended["text"], ended["finish_reason"]) == ("", "stop")
    stop = plain["text"][3:5]
    assert complete(http_client, max_tokens=8, stop=[stop])["choices"][0]["text"] == plain["text"].split(stop)[0]
    sampled = [complete(http_client, temperature=1, seed=7, max_tokens=8)["choices"][0]["text"] for _ in range(2)]
    assert sampled[0] == sampled[1]


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["yes", "no"]}}}},
        {"structured_outputs": {"choice": ['"yes"', '"no"']}},
        {"guided_regex": '"(yes|no)"'},
        {"guided_grammar": 'root ::= "\\"yes\\"" | "\\"no\\""'},
    ],
)
def test_structured_outputs(http_client: httpx.Client, asked: dict[str, Any]) -> None:
    text = complete(http_client, max_tokens=16, **asked)["choices"][0]["text"]
    assert json.loads(text) in ("yes", "no")


def test_prompt_logprobs_as_vllm_has_them(http_client: httpx.Client) -> None:
    choice = complete(http_client, max_tokens=1, prompt_logprobs=2)["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    for entry in choice["prompt_logprobs"][1:]:
        assert 2 <= len(entry) <= 3
        assert all(set(each) == {"logprob", "rank", "decoded_token"} for each in entry.values())


def test_models_tokenize_and_the_rest(http_client: httpx.Client, client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    tokens = http_client.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert http_client.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": PROMPT}
    for path in ("/health", "/ready", "/version"):
        assert http_client.get(path).status_code == 200
    complete(http_client, max_tokens=4)
    page = http_client.get("/metrics").text
    for name in ("vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count", "vllm:num_requests_running"):
        assert f'{name}{{model_name="{MODEL}"}}' in page


def test_request_id_comes_back(http_client: httpx.Client) -> None:
    own = http_client.get("/health", headers={"X-Request-Id": "mine-1"})
    assert own.headers["x-request-id"] == "mine-1"
    assert http_client.get("/health").headers["x-request-id"]
    answer = http_client.post(
        "/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}, headers={"X-Request-Id": "mine-2"}
    )
    assert answer.json()["id"] == "cmpl-mine-2"


@pytest.fixture(scope="module")
def strict(services: LocalServices, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    gateway = Gateway(services.cachemgr_address, "--strict-max-tokens", log=tmp_path_factory.mktemp("strict") / "log")
    yield gateway
    gateway.close()


def room_after(http_client: httpx.Client, num_tokens: int) -> int:
    limit: int = http_client.get("/v1/models").json()["data"][0]["max_model_len"]
    return limit - num_tokens


@pytest.mark.parametrize("beyond", [0, 1, 10**9])
def test_max_tokens_beyond_the_room_is_a_ceiling(http_client: httpx.Client, beyond: int) -> None:
    """Agents send the same max_tokens with each prompt; the answer ends where the model's room does."""
    room = 5
    prompt = [7] * room_after(http_client, room)
    body = complete(http_client, prompt=prompt, max_tokens=room + beyond, ignore_eos=True)
    assert body["usage"]["completion_tokens"] == room
    assert body["choices"][0]["finish_reason"] == "length"


def test_each_prompt_of_a_request_has_its_own_room(http_client: httpx.Client) -> None:
    prompts = [[7] * room_after(http_client, room) for room in (3, 6)]
    body = complete(http_client, prompt=prompts, max_tokens=2**31 - 1, ignore_eos=True, return_token_ids=True)
    assert [len(choice["token_ids"]) for choice in body["choices"]] == [3, 6]


def test_a_prompt_or_min_tokens_that_can_not_fit_is_refused(http_client: httpx.Client) -> None:
    prompt = [7] * room_after(http_client, 3)
    for fields, param in (
        ({"prompt": [*prompt, 7, 7, 7]}, "prompt"),
        ({"prompt": prompt, "min_tokens": 4, "max_tokens": 10}, "min_tokens"),
    ):
        answer = http_client.post("/v1/completions", json=fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_with_strict_max_tokens_more_than_the_room_is_refused(strict: Gateway) -> None:
    with strict.client() as client:
        prompt = [7] * room_after(client, 5)
        answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 6})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "sequence_too_long"
        assert client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 5}).status_code == 200


@pytest.mark.parametrize("at_end", [False, True])
def test_usage_in_each_event_counts_the_prompt_once(http_client: httpx.Client, at_end: bool) -> None:
    """guidellm asks for it always."""
    options = {"continuous_usage_stats": True, "include_usage": at_end}
    events = events_of(http_client, n=2, max_tokens=6, ignore_eos=True, stream_options=options)
    num_prompt = complete(http_client)["usage"]["prompt_tokens"]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert {event["usage"]["prompt_tokens"] for event in events} == {num_prompt}
    assert counts == sorted(counts)
    assert (counts[0] < 12, counts[-1]) == (True, 12)
    assert (events[-1]["choices"] == []) == at_end


def test_known_actions_of_routers_hints_are_advice_and_others_are_named(http_client: httpx.Client) -> None:
    def sent(**hints: Any) -> httpx.Response:
        return http_client.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "kv_hints": hints},
        )

    plain = complete(http_client, max_tokens=4)["choices"][0]["text"]
    unknown = {"action_id": "a", "action_type": "kv.warm", "action_version": "1", "payload": {"x": [1]}}
    fetch = {"action_id": "f", "action_type": "kv.fetch", "action_version": "1", "payload": {"source": "other"}}
    later = {"action_id": "b", "action_type": "kv.keep", "action_version": "7", "payload": {"priority": "?"}}
    keep = {"action_id": "c", "action_type": "kv.keep", "action_version": "1", "payload": {"ttl_s": 60, "new": 1}}
    expect = {"action_id": "d", "action_type": "kv.expect", "action_version": 1, "payload": {"in_s": 20}}
    drop = {"action_id": "e", "action_type": "kv.drop", "action_version": "1"}
    answer = sent(protocol_version="0.1", message_id="m", actions=[unknown, keep, later, expect, fetch], later=1)
    assert answer.json()["choices"][0]["text"] == plain
    assert answer.headers["X-Quire-Ignored-Fields"].split(", ") == [
        "kv_hints.actions%5B0%5D;reason=unknown_type",
        "kv_hints.actions%5B2%5D;reason=unknown_version",
        "kv_hints.actions%5B4%5D;reason=nothing_to_fetch_from",
    ]
    for actions in ([], None, [drop], [keep, drop]):
        answer = sent(message_id=None, actions=actions)
        assert answer.json()["choices"][0]["text"] == plain
        assert "X-Quire-Ignored-Fields" not in answer.headers
    for wrong, path in (
        ({**keep, "payload": {"priority": 10}}, "actions[0].payload.priority"),
        ({**keep, "payload": {"ttl_s": 0}}, "actions[0].payload.ttl_s"),
        ({**expect, "payload": {}}, "actions[0].payload.in_s"),
        ({**keep, "payload": 7}, "actions[0].payload"),
        (7, "actions[0]"),
    ):
        answer = sent(actions=[wrong])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"kv_hints.{path}")
