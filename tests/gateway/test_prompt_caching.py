"""Prompt caching over HTTP: what is kept, what is counted, and what is said of a miss."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from deadlines import DEADLINE_S
from gateway.chat_gateway import save_chat_model, start_chats
from gateway.chat_templates import CHATML
from gateway.conftest import MODEL, ROOT, Gateway, key_lines
from gateway.test_messages import ANTHROPIC
from package_environments import environment

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cli.launch import LocalServices
from quire.client.cache_client import CacheClient

BLOCK = 4
KEYS = {"alice": "key-of-alice", "bob": "key-of-bob"}
EPHEMERAL = {"type": "ephemeral"}
EXPLICIT = {"mode": "explicit"}


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServices]:
    """Services with nothing in the cache: these tests count what is found."""
    model = save_chat_model(tmp_path_factory.mktemp("chat_model"), CHATML)
    with start_chats(model, num_blocks=600) as services:
        yield services


@pytest.fixture(scope="module")
def gateway(services: LocalServices, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    (folder / "keys").write_text(key_lines(KEYS))
    gateway = Gateway(services.cachemgr_address, "--api-keys", str(folder / "keys"), log=folder / "log")
    yield gateway
    gateway.close()


@pytest.fixture
def alice(gateway: Gateway) -> Iterator[openai.OpenAI]:
    options: dict[str, Any] = {"max_retries": 0, "timeout": DEADLINE_S}
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=KEYS["alice"], **options) as client:
        yield client


@pytest.fixture
def messages(gateway: Gateway) -> Iterator[httpx.Client]:
    """Anthropic's API, as alice."""
    with gateway.client(headers={"x-api-key": KEYS["alice"]}) as client:
        yield client


def text_of(name: str) -> str:
    """Return a text of some blocks that no other test has."""
    return f"{name} " * 12


def sent(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/messages", json={"model": MODEL, "max_tokens": 2, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def question(text: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": text, **fields}]}]


def statistics(services: LocalServices) -> pb.PoolStatistics:
    async def body() -> pb.PoolStatistics:
        cache = CacheClient(services.cachemgr_address)
        try:
            [found] = await cache.get_statistics()
            return found
        finally:
            await cache.close()

    return asyncio.run(body())


def test_what_anthropic_counts(messages: httpx.Client) -> None:
    system = [{"type": "text", "text": text_of("system"), "cache_control": {**EPHEMERAL, "ttl": "1h"}}]
    first = sent(messages, system=system, messages=question(text_of("first"), cache_control=EPHEMERAL))["usage"]
    created = first["cache_creation"]
    assert (first["cache_read_input_tokens"], created["ephemeral_1h_input_tokens"] > 0) == (0, True)
    assert created["ephemeral_5m_input_tokens"] > 0
    assert sum(created.values()) == first["cache_creation_input_tokens"] == first["cache_kept_tokens"]
    assert first["cache_kept_tokens"] % BLOCK == 0
    again = sent(messages, system=system, messages=question(text_of("first"), cache_control=EPHEMERAL))["usage"]
    assert (again["cache_creation_input_tokens"], again["cache_kept_tokens"]) == (0, first["cache_kept_tokens"])
    assert again["cache_read_input_tokens"] >= first["cache_kept_tokens"]
    whole = sum(first[name] for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"))
    assert whole == sum(again[n] for n in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"))
    other = sent(messages, system=system, messages=question(text_of("second")))["usage"]
    assert other["cache_read_input_tokens"] >= created["ephemeral_1h_input_tokens"]
    assert "cache_kept_tokens" in other, "of the system's breakpoint"


def test_without_breakpoints_nothing_is_kept(messages: httpx.Client, services: LocalServices) -> None:
    before = statistics(services).kept_block_count
    usage = sent(messages, messages=question(text_of("plain")))["usage"]
    assert "cache_kept_tokens" not in usage
    assert usage["cache_creation_input_tokens"] == 0
    assert statistics(services).kept_block_count == before


def test_tools_and_the_whole_body_are_breakpoints(messages: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"name": name, "input_schema": schema} for name in ("weather", "news")]
    tools[1]["cache_control"] = EPHEMERAL
    kept = sent(messages, tools=tools, messages=question(text_of("tools")))["usage"]["cache_kept_tokens"]
    assert kept > 0
    whole = sent(messages, tools=tools, messages=question(text_of("tools")), cache_control=EPHEMERAL)["usage"]
    assert whole["cache_kept_tokens"] > kept


def test_a_breakpoint_too_many_is_refused_by_its_path(messages: httpx.Client) -> None:
    parts = [{"type": "text", "text": f"part {index}", "cache_control": EPHEMERAL} for index in range(5)]
    body = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": parts}]}
    answer = messages.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert "messages[0].content[4].cache_control" in answer.json()["error"]["message"]
    body["messages"] = question("x", cache_control={"type": "ephemeral", "ttl": "2m"})
    assert "cache_control.ttl" in messages.post("/v1/messages", json=body).json()["error"]["message"]


def test_no_token_is_generated_to_warm_a_prefix(messages: httpx.Client) -> None:
    asked: dict[str, Any] = {"system": [{"type": "text", "text": text_of("warmed"), "cache_control": EPHEMERAL}]}
    warmed = sent(messages, **asked, messages=question("one"), max_tokens=0)
    assert (warmed["content"], warmed["stop_reason"], warmed["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    assert warmed["usage"]["cache_creation_input_tokens"] > 0
    used = sent(messages, **asked, messages=question("two"))["usage"]
    assert used["cache_read_input_tokens"] >= warmed["usage"]["cache_kept_tokens"]


def test_what_openai_counts_is_what_the_books_count(alice: openai.OpenAI, services: LocalServices) -> None:
    before = statistics(services)
    total_cached = total_written = 0
    for number, stream, n in ((0, False, 1), (0, False, 3), (1, True, 2), (1, True, 1)):
        content = [{"type": "text", "text": text_of(f"openai {number}"), "prompt_cache_breakpoint": EXPLICIT}]
        asked: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": 3,
            "n": n,
            "messages": [{"role": "user", "content": content}],
        }
        if stream:
            events = list(alice.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
            usage = events[-1].usage
        else:
            usage = alice.chat.completions.create(**asked).usage
        details = usage.prompt_tokens_details
        total_cached += details.cached_tokens
        total_written += details.cache_write_tokens
        assert details.cache_kept_tokens > 0
    after = statistics(services)
    assert after.cached_token_count - before.cached_token_count == total_cached > 0
    assert after.written_token_count - before.written_token_count == total_written > 0


def test_the_whole_prompt_is_kept_if_a_time_is_given(alice: openai.OpenAI) -> None:
    def kept(**fields: Any) -> int | None:
        usage = alice.completions.create(model=MODEL, prompt=text_of("whole"), max_tokens=2, extra_body=fields).usage
        return getattr(usage.prompt_tokens_details, "cache_kept_tokens", None)

    assert kept() is None
    assert kept(prompt_cache_retention="in_memory") is None
    assert kept(prompt_cache_options={"ttl": "30m"})
    assert kept(prompt_cache_retention="24h")
    assert kept(prompt_cache_retention="24h", prompt_cache_options={"mode": "implicit"}), "the options have no time"
    nothing = kept(prompt_cache_options={"mode": "explicit"})
    assert nothing is None


def test_a_request_with_explicit_breakpoints_and_none_uses_no_cache(alice: openai.OpenAI) -> None:
    def cached(mode: str) -> tuple[int, int]:
        fields = {"prompt_cache_options": {"mode": mode}}
        usage = alice.completions.create(model=MODEL, prompt=text_of("explicit"), max_tokens=2, extra_body=fields).usage
        return usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens_details.cache_write_tokens

    assert cached("explicit") == (0, 0)
    assert cached("implicit")[1] > 0
    assert cached("explicit") == (0, 0)
    assert cached("implicit")[0] > 0


def test_a_diagnosis_names_the_part_that_has_changed(messages: httpx.Client, gateway: Gateway) -> None:
    system = text_of("diagnosed")
    asked: dict[str, Any] = {
        "system": system,
        "messages": question(text_of("a")),
        "diagnostics": {"previous_message_id": None},
    }
    first = sent(messages, **asked)
    assert first["diagnostics"] is None
    asked["diagnostics"] = {"previous_message_id": first["id"]}
    assert sent(messages, **asked)["diagnostics"] is None, "all was found"
    cases = {
        "system_changed": {"system": f"Now {system}"},
        "tools_changed": {"tools": [{"name": "news", "input_schema": {"type": "object"}}]},
        "messages_changed": {"messages": question(text_of("b"))},
    }
    for kind, changes in cases.items():
        told = sent(messages, **{**asked, **changes})["diagnostics"]
        assert told["cache_miss_reason"]["type"] == kind
        assert told["cache_miss_reason"]["cache_missed_input_tokens"] > 0
        assert told["quire"]["reason"] == kind
    with gateway.client(headers={"x-api-key": KEYS["bob"]}) as bob:
        told = sent(bob, **asked)["diagnostics"]
    assert told == {"cache_miss_reason": {"type": "previous_message_not_found"}}


def test_a_diagnosis_says_what_only_the_cache_knows(alice: openai.OpenAI, services: LocalServices) -> None:
    def ask(**options: Any) -> Any:
        body = {"prompt_cache_options": options} if options else {}
        return alice.responses.create(model=MODEL, input=text_of("lost"), max_output_tokens=16, extra_body=body)

    async def reset() -> None:
        cache = CacheClient(services.cachemgr_address)
        try:
            await cache.reset_prefix_cache()
        finally:
            await cache.close()

    asyncio.run(reset())  # what is lost later is all that is lost: the memory of losses is bounded
    first = ask()
    second = ask(comparison_response_id=first.id)
    assert second.prompt_cache_diagnostics.type == "cache_hit"
    assert second.prompt_cache_options.comparison_response_id == first.id
    told = ask(comparison_response_id="resp_other").prompt_cache_diagnostics
    assert told.type == "comparison_response_not_found"

    asyncio.run(reset())
    told = ask(comparison_response_id=first.id).prompt_cache_diagnostics
    assert (told.type, told.quire["reason"], told.quire["missing_block"]) == ("unavailable", "reset", 0)
    assert told.quire["lost_at"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_told_too(alice: openai.OpenAI, stream: bool) -> None:
    def ask(text: str, **options: Any) -> Any:
        return alice.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": text}],
            max_tokens=2,
            stream=stream,
            extra_body={"prompt_cache_options": options},
        )

    first = ask(text_of(f"chat {stream}"))
    first_id = next(iter(first)).id if stream else first.id
    if stream:
        list(first)
    second = ask(text_of(f"chats {stream}"), comparison_response_id=first_id)
    told = (
        next(each.prompt_cache_diagnostics for each in second if not each.choices)
        if stream
        else second.prompt_cache_diagnostics
    )
    assert (told["type"], told["reason"], told["quire"]["reason"]) == (
        "cache_miss",
        "input_changed",
        "messages_changed",
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_is_told_too(alice: openai.OpenAI, stream: bool) -> None:
    """Its diagnosis was computed, and not shown."""

    def ask(text: str | list[str], **options: Any) -> Any:
        fields = {"prompt_cache_options": options} if options else {}
        return alice.completions.create(model=MODEL, prompt=text, max_tokens=2, stream=stream, extra_body=fields)

    text = text_of(f"completion {stream}")
    first = ask(text)
    first_id = list(first)[-1].id if stream else first.id
    told = []
    for compared_with in (first_id, "cmpl-other"):
        second = ask(f"Now {text}", comparison_response_id=compared_with)
        answers = list(second) if stream else [second]
        told += [found for each in answers if (found := getattr(each, "prompt_cache_diagnostics", None))]
    assert [each["type"] for each in told] == ["cache_miss", "comparison_response_not_found"]
    assert (told[0]["reason"], told[0]["quire"]["reason"]) == ("input_changed", "other_changed")
    assert told[0]["quire"]["first_changed_token"] < BLOCK
    with pytest.raises(openai.BadRequestError, match=r"comparison_response_id is .*, must be left out with several"):
        ask([text, text], comparison_response_id=first_id)


def test_the_prompts_of_a_completion_are_counted_together(alice: openai.OpenAI) -> None:
    options = {"prompt_cache_options": {"ttl": "30m"}}
    prompts = [text_of("together"), text_of("and apart")]
    usages = [
        alice.completions.create(model=MODEL, prompt=prompt, max_tokens=2, extra_body=options).usage
        for prompt in ([*prompts], prompts[0], prompts[1])
    ]
    both, *alone = [usage.prompt_tokens_details for usage in usages if usage]
    assert both.cache_write_tokens == both.cache_kept_tokens == sum(each.cache_kept_tokens for each in alone) > 0


@pytest.mark.verify
def test_the_package_of_anthropic_reads_all_of_it(gateway: Gateway) -> None:
    program = ROOT / "tests/gateway/prompt_caching_program.py"
    command = [environment("anthropic", ANTHROPIC) / "python", program, gateway.url, MODEL, KEYS["alice"]]
    said = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (said.returncode, said.stdout) == (0, "done\n"), said.stderr


def test_the_log_has_a_line_for_the_bill_of_each_request(messages: httpx.Client, gateway: Gateway) -> None:
    usage = sent(messages, messages=question(text_of("billed"), cache_control=EPHEMERAL))["usage"]
    num_prompt = sum(usage[n] for n in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"))
    assert f"tenant=alice model={MODEL} prompt_tokens={num_prompt} " in gateway.log.read_text()


def test_two_gateways_compute_a_new_prefix_once(services: LocalServices, tmp_path: Path) -> None:
    """They computed it twice, 1.75 to 2.0 times its tokens: neither saw what the other one was computing."""
    gateways = [Gateway(services.cachemgr_address, log=tmp_path / f"log{index}") for index in range(2)]
    try:
        before = statistics(services)
        with ThreadPoolExecutor(max_workers=2) as threads:
            for number in range(6):
                body = {"model": MODEL, "prompt": f"Number {number}: " + "once again " * 40, "max_tokens": 1}

                def post(gateway: Gateway, body: dict[str, Any] = body) -> httpx.Response:
                    with gateway.client() as client:
                        return client.post("/v1/completions", json=body)

                answers = [answer.json() for answer in threads.map(post, gateways)]
                usages = [answer["usage"]["prompt_tokens_details"] for answer in answers]
                full = (answers[0]["usage"]["prompt_tokens"] - 1) // BLOCK * BLOCK
                assert sorted(usage["cached_tokens"] for usage in usages)[1] >= full - BLOCK
        written = statistics(services).written_token_count - before.written_token_count
        prompts = 6 * answers[0]["usage"]["prompt_tokens"]
        assert written <= 1.05 * prompts
    finally:
        for gateway in gateways:
            gateway.close()
