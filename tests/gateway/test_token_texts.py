"""Log-probabilities show each token's text, bytes and position, with a SentencePiece vocabulary like Llama 2's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from gateway.chat_gateway import ARGUMENTS
from gateway.conftest import MODEL, Gateway
from vocabularies import END, START, sentence_piece

from quire.cli.launch import LocalServices

MAX_LEN = 48
RAW = sentence_piece()
VOCABULARY_SIZE = RAW.get_vocab_size()
EMOJI = [RAW.token_to_id(f"<0x{byte:02X}>") for byte in "😀".encode()]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def http_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    from text_model import save  # imports torch

    folder = save(tmp_path_factory.mktemp("model"), tokenizer=RAW, max_position_embeddings=MAX_LEN)
    config = {"bos_token": START, "eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with LocalServices.start(
        model=folder, num_blocks=500, extra_worker_args=(*ARGUMENTS, "--deterministic")
    ) as services:
        gateway = Gateway(services.cachemgr_address, log=folder / "gateway.log")
        try:
            with gateway.client() as client:
                yield client
        finally:
            gateway.close()


def ids_of(*tokens: str) -> list[int]:
    return [RAW.token_to_id(token) for token in tokens]


def answer_of(client: httpx.Client, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    answer = client.post(path, json={"model": MODEL, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def complete(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    choice: dict[str, Any] = answer_of(client, **fields)["choices"][0]
    return choice


def streamed(client: httpx.Client, **fields: Any) -> dict[int, dict[str, Any]]:
    """Return the choices of a stream, their parts put together."""
    body = {"model": MODEL, "temperature": 0, "stream": True, **fields}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    choices: dict[int, dict[str, Any]] = {}
    for part in (choice for line in lines[:-1] for choice in json.loads(line)["choices"]):
        whole = choices.setdefault(part["index"], part | {"text": "", "logprobs": {}})
        whole["text"] += part["text"]
        for name, values in part["logprobs"].items():
            whole["logprobs"].setdefault(name, []).extend(values)
        whole["finish_reason"] = part["finish_reason"]
    return choices


def check_places(choice: dict[str, Any]) -> None:
    """Check that each token is where its offset says, and that whole characters join to the text."""
    text, logprobs = choice["text"], choice["logprobs"]
    offsets = logprobs["text_offset"]
    for token, offset in zip(logprobs["tokens"], offsets, strict=True):
        is_part = token.startswith(("bytes:", "token_id:")) or token in (START, END)
        assert is_part or text[offset : offset + len(token)] == token
    assert all(first <= second for first, second in pairwise(offsets))
    assert all(0 <= offset <= len(text) for offset in offsets)


def test_tokens_of_a_prompt_join_to_its_text(http_client: httpx.Client) -> None:
    choice = complete(http_client, prompt="the model", echo=True, logprobs=3, max_tokens=0)
    assert choice["text"] == "the model"
    assert choice["logprobs"]["tokens"] == [START, "the", " model"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 3]
    token_ids = ids_of("▁the", "▁model")
    bare = complete(http_client, prompt=token_ids, echo=True, logprobs=3, max_tokens=0)
    assert (bare["text"], bare["logprobs"]["tokens"]) == ("the model", ["the", " model"])


@pytest.mark.parametrize(
    ("prompt", "tokens", "offsets"),
    [
        (" the", [START, "", " the"], [0, 0, 0]),
        ("the</s>the", [START, "the", END, "the"], [0, 0, 3, 7]),
        ("the</s> the", [START, "the", END, "", " the"], [0, 0, 3, 7, 7]),
        ("a😀a", [START, "a", *(f"bytes:\\x{byte:02x}" for byte in "😀".encode()), "a"], [0, 0, 1, 1, 1, 1, 2]),
        ("the\ufffd", [START, "the", "\ufffd"], [0, 0, 3]),
    ],
)
def test_prompts_with_spaces_special_tokens_and_parts_of_characters(
    http_client: httpx.Client, prompt: str, tokens: list[str], offsets: list[int]
) -> None:
    choice = complete(http_client, prompt=prompt, echo=True, logprobs=1, max_tokens=0)
    assert choice["text"] == prompt
    assert (choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]) == (tokens, offsets)


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_any_sample_has_its_tokens_in_their_places(http_client: httpx.Client, seed: int, echo: bool) -> None:
    asked = {"prompt": "the 😀 model", "echo": echo, "logprobs": 5, "max_tokens": 24, "ignore_eos": True}
    asked |= {"temperature": 1, "seed": seed}
    choice = complete(http_client, **asked)
    check_places(choice)
    for token, logprob, top in zip(
        *map(choice["logprobs"].get, ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert top is None or (5 <= len(top) <= 6 and top[token] == logprob)
    again = streamed(http_client, **asked)[0]
    assert again["text"] == choice["text"]
    assert again["logprobs"] == choice["logprobs"]


def test_a_character_of_four_tokens_is_at_one_position(http_client: httpx.Client) -> None:
    asked = {"prompt": "the", "structured_outputs": {"choice": ["a😀a"]}, "max_tokens": 8, "logprobs": 2, "echo": True}
    choice = complete(http_client, **asked)
    assert choice["text"] == "thea😀a"
    assert choice["logprobs"]["tokens"][3:] == [*(f"bytes:\\x{byte:02x}" for byte in "😀".encode()), "a", END]
    assert choice["logprobs"]["text_offset"] == [0, 0, 3, 4, 4, 4, 4, 5, 6]
    assert streamed(http_client, **asked)[0]["logprobs"] == choice["logprobs"]
    prompt = [*ids_of(START, "▁the"), *EMOJI]
    echoed = complete(http_client, prompt=prompt, echo=True, logprobs=2, max_tokens=0)
    assert (echoed["text"], echoed["logprobs"]["text_offset"]) == ("the😀", [0, 0, 3, 3, 3, 3])


def test_bytes_of_a_chat_join_to_its_text(http_client: httpx.Client) -> None:
    for seed in range(4):
        asked = {"messages": [{"role": "user", "content": "the model"}], "logprobs": True, "top_logprobs": 5}
        answer = answer_of(
            http_client, "/v1/chat/completions", **asked, max_tokens=24, temperature=1, seed=seed, ignore_eos=True
        )["choices"][0]
        entries = answer["logprobs"]["content"]
        joined = b"".join(bytes(entry["bytes"]) for entry in entries)
        text = answer["message"]["content"]
        assert text.replace("\ufffd", "") == joined.decode(errors="ignore").replace("\ufffd", "")
        for entry in (*entries, *(top for each in entries for top in each["top_logprobs"])):
            is_part = entry["token"].startswith(("bytes:", "token_id:")) or entry["token"] in (START, END)
            assert is_part or bytes(entry["bytes"]).decode() == entry["token"]


def test_an_emoji_of_a_chat_has_its_four_bytes(http_client: httpx.Client) -> None:
    choices = {"structured_outputs": {"choice": ["😀"]}, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    messages = [{"role": "user", "content": "the model"}]
    answer = answer_of(http_client, "/v1/chat/completions", messages=messages, **choices)["choices"][0]
    entries = answer["logprobs"]["content"]
    assert answer["message"]["content"].strip() == "😀"
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == answer["message"]["content"].encode()
    assert [entry["token"] for entry in entries[-5:]] == [*(f"bytes:\\x{byte:02x}" for byte in "😀".encode()), END]
    response = answer_of(
        http_client,
        "/v1/responses",
        input="the model",
        seed=1,
        structured_outputs={"choice": ["😀"]},
        max_output_tokens=8,
        include=["message.output_text.logprobs"],
    )
    [part] = response["output"][0]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]) == part["text"].encode()


def test_a_token_that_the_sample_stops_at_has_no_bytes(http_client: httpx.Client) -> None:
    a = ids_of("a")
    asked = {"messages": [{"role": "user", "content": "the model"}], "logprobs": True, "max_tokens": 4}
    asked |= {"allowed_token_ids": a}
    stopped = answer_of(http_client, "/v1/chat/completions", **asked, stop_token_ids=a)["choices"][0]
    assert (stopped["message"]["content"], stopped["logprobs"]["content"][0]["bytes"]) == ("", [])
    kept = answer_of(http_client, "/v1/chat/completions", **asked, stop_token_ids=a, include_stop_str_in_output=True)[
        "choices"
    ][0]
    assert (kept["message"]["content"], kept["logprobs"]["content"][0]["bytes"]) == ("a", [ord("a")])


@pytest.mark.parametrize("skips", [True, False])
def test_special_tokens_count_where_the_text_has_them(http_client: httpx.Client, skips: bool) -> None:
    asked = {"prompt": "the", "logprobs": 0, "skip_special_tokens": skips, "ignore_eos": True}
    choice = complete(http_client, **asked, allowed_token_ids=ids_of(END), max_tokens=3)
    assert choice["text"] == ("" if skips else END * 3)
    assert choice["logprobs"]["tokens"] == [END] * 3
    assert choice["logprobs"]["text_offset"] == ([0, 0, 0] if skips else [0, 4, 8])


def test_positions_end_with_the_text_of_a_sample_that_meets_a_stop_string(http_client: httpx.Client) -> None:
    asked = {"prompt": "the", "logprobs": 0, "allowed_token_ids": ids_of("▁model"), "max_tokens": 4, "echo": True}
    choice = complete(http_client, **asked, stop=["del mo"])
    assert (choice["text"], choice["finish_reason"]) == ("the mo", "stop")
    assert choice["logprobs"]["text_offset"] == [0, 0, 3, 6]
    crossing = complete(http_client, **asked, stop=["del mo"], min_tokens=1, include_stop_str_in_output=True)
    assert (crossing["text"], crossing["finish_reason"]) == ("the model mo", "stop")


def test_texts_that_are_equal_lose_no_entry(http_client: httpx.Client) -> None:
    """The vocabulary has 128 bytes that are also letters, and 128 that are parts of characters."""
    for seed in range(3):
        asked = {"prompt": "the", "logprobs": 20, "max_tokens": 8, "temperature": 1, "seed": seed, "ignore_eos": True}
        tops = complete(http_client, **asked)["logprobs"]["top_logprobs"]
        assert all(20 <= len(top) <= 21 for top in tops)
    prompt = complete(http_client, prompt=ids_of("▁the", "<0x61>"), echo=True, logprobs=20, max_tokens=0)
    assert prompt["logprobs"]["tokens"] == ["the", "a"]
    assert 20 <= len(prompt["logprobs"]["top_logprobs"][1]) <= 21


@pytest.mark.parametrize("asked", [{"echo": True, "logprobs": 2}, {"prompt_logprobs": 2, "logprobs": 2}])
def test_all_choices_have_the_prompts_values(http_client: httpx.Client, asked: dict[str, Any]) -> None:
    asked = {**asked, "prompt": ["the model", "a 😀"], "n": 3, "max_tokens": 6, "ignore_eos": True}
    asked |= {"temperature": 1, "seed": 5}
    choices = answer_of(http_client, **asked)["choices"]
    for first, *others in (choices[:3], choices[3:]):
        num_prompt = len(first["logprobs"]["tokens"]) - 6
        assert num_prompt == (0 if "prompt_logprobs" in asked else num_prompt)
        for other in others:
            assert other.get("prompt_logprobs") == first.get("prompt_logprobs")
            for name, values in other["logprobs"].items():
                assert values[:num_prompt] == first["logprobs"][name][:num_prompt]
            check_places(other)
            assert other["logprobs"]["text_offset"][num_prompt] == first["logprobs"]["text_offset"][num_prompt]
        if "prompt_logprobs" in asked:
            assert first["prompt_logprobs"][1]
    parts = streamed(http_client, **asked)
    for choice in choices:
        assert parts[choice["index"]]["text"] == choice["text"]
        assert parts[choice["index"]]["logprobs"] == choice["logprobs"]
        assert parts[choice["index"]].get("prompt_logprobs") == choice.get("prompt_logprobs")


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 2}, {"echo": True, "prompt_logprobs": 2, "logprobs": 1}])
def test_a_prompt_as_long_as_the_model_is_scored(http_client: httpx.Client, fields: dict[str, Any]) -> None:
    letters = [token_id for token_id in range(60, VOCABULARY_SIZE) if token_id not in ids_of(START, END)]
    full = letters[:MAX_LEN]
    asked = {**fields, "max_tokens": 0, "n": 2, "return_token_ids": True}
    answer = answer_of(http_client, prompt=full, **asked)
    assert answer["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": MAX_LEN,
        "completion_tokens": 0,
        "total_tokens": MAX_LEN,
        "prompt_tokens_details": None,
    }
    for choice in answer["choices"]:
        assert (choice["finish_reason"], choice["token_ids"], choice["prompt_token_ids"]) == ("length", [], full)
        assert len(choice["logprobs"]["token_logprobs"]) == MAX_LEN
        assert None not in choice["logprobs"]["token_logprobs"][1:]
        assert len(choice.get("prompt_logprobs", full)) == MAX_LEN
    shorter = complete(http_client, prompt=full[:-2], **{**asked, "max_tokens": 2, "n": 1, "ignore_eos": True})
    scored = complete(http_client, prompt=full[:-2], **asked)["logprobs"]
    for name, values in scored.items():
        expected = shorter["logprobs"][name][: MAX_LEN - 2]
        assert values == (pytest.approx(expected) if name == "token_logprobs" else values)
        assert len(values) == len(expected)
    parts = streamed(http_client, prompt=full, **asked)
    assert [parts[choice["index"]]["logprobs"] for choice in answer["choices"]] == [
        choice["logprobs"] for choice in answer["choices"]
    ]


def test_errors_of_a_prompt_that_is_scored_name_the_prompt(http_client: httpx.Client) -> None:
    scoring = {"model": MODEL, "echo": True, "logprobs": 1, "max_tokens": 0}
    for prompt, limit in (([70] * (MAX_LEN + 1), f"at most {MAX_LEN} tokens"), ([70, 10**6], "token ids from 0 to")):
        answer = http_client.post("/v1/completions", json={**scoring, "prompt": prompt})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "prompt")
        assert error["message"].startswith("prompt is ")
        assert limit in error["message"]
    assert complete(http_client, **scoring | {"prompt": [70]})["logprobs"]["token_logprobs"] == [None]
