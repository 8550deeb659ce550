"""Bad input: each field with a wrong type, out of range, or unknown is a 400 that names the field; nothing is a 500."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest
from gateway.conftest import MODEL

COMPLETIONS = "/v1/completions"
TEXT = ("prompt", "Hi")
BIG = 10**30

# Path, field, value, and the path that `param` names if it is not the field's own.
WRONG: list[tuple[str, str, Any, str | None]] = [
    *((COMPLETIONS, "prompt", value, None) for value in (7, True, {}, [])),
    (COMPLETIONS, "prompt", ["a", 3], "prompt[1]"),
    (COMPLETIONS, "prompt", [[1], ["a"]], "prompt[1]"),
    (COMPLETIONS, "prompt", [3, "a"], None),
    (COMPLETIONS, "prompt", [-1], None),
    (COMPLETIONS, "prompt", [10**9], None),
    (COMPLETIONS, "prompt", [BIG], None),
    (COMPLETIONS, "prompt", "", None),
    (COMPLETIONS, "prompt", ["a", ""], "prompt[1]"),
    (COMPLETIONS, "prompt", "a\ud800", None),
    (COMPLETIONS, "prompt", ["a"] * 300, None),
    (COMPLETIONS, "prompt", [1] * 100_000, None),
    *((COMPLETIONS, "model", value, None) for value in (7, [])),
    *((COMPLETIONS, "max_tokens", value, None) for value in ("9", -1, 1.5, True, BIG)),
    *((COMPLETIONS, "temperature", value, None) for value in ("1", -1, True, 1e39, 10**400, [1])),
    *((COMPLETIONS, "top_p", value, None) for value in ("1", 0, 1.5, {})),
    *((COMPLETIONS, "top_k", value, None) for value in ("1", -2, 1.5, BIG)),
    *((COMPLETIONS, "min_p", value, None) for value in ("1", -0.1, 1.5)),
    *((COMPLETIONS, "seed", value, None) for value in ("1", 1.5, 2**63, True)),
    *((COMPLETIONS, "n", value, None) for value in ("1", 0, 2000, 1.5)),
    *((COMPLETIONS, name, value, None) for name in ("presence_penalty", "frequency_penalty") for value in ("1", 3, -3)),
    *((COMPLETIONS, "repetition_penalty", value, None) for value in ("1", 0, -1)),
    *((COMPLETIONS, "stop", value, None) for value in (7, {"a": 1}, [""], ["a"] * 65)),
    (COMPLETIONS, "stop", ["a", 7], "stop[1]"),
    (COMPLETIONS, "stop", "\ud800", None),
    *((COMPLETIONS, "stop_token_ids", value, None) for value in (7, "a", [10**6])),
    (COMPLETIONS, "stop_token_ids", [1, "a"], "stop_token_ids[1]"),
    *((COMPLETIONS, "allowed_token_ids", value, None) for value in (7, [], [10**6])),
    *((COMPLETIONS, "bad_words", value, None) for value in (7, "a", [""])),
    (COMPLETIONS, "bad_words", [{}], "bad_words[0]"),
    *((COMPLETIONS, "logit_bias", value, None) for value in (7, [], {"a": 1}, {"1": "a"}, {"1": 101}, {"-1": 1})),
    (COMPLETIONS, "logit_bias", {"9999999": 1}, None),
    *((COMPLETIONS, "min_tokens", value, None) for value in ("1", -1, 99)),
    *((COMPLETIONS, "logprobs", value, None) for value in (True, -1, 10**6)),
    *((COMPLETIONS, "prompt_logprobs", value, None) for value in (True, -1, 10**6)),
    *(
        (COMPLETIONS, name, value, None)
        for name in ("echo", "stream", "ignore_eos", "skip_special_tokens", "return_token_ids")
        for value in ("true", 1, [])
    ),
    *((COMPLETIONS, "stream_options", value, None) for value in (7, {"include_usage": True})),
    *((COMPLETIONS, "priority", value, None) for value in ("1", 1.5, BIG)),
    *((COMPLETIONS, "cache_salt", value, None) for value in (7, "", "x" * 65)),
    *((COMPLETIONS, name, value, None) for name in ("cache_hints", "kv_hints") for value in (7, [], "x")),
    *(
        (COMPLETIONS, "kv_hints", {name: value}, f"kv_hints.{path}")
        for name, value, path in (
            ("actions", 7, "actions"),
            ("actions", [7], "actions[0]"),
            ("actions", [{}] * 1025, "actions"),
            ("protocol_version", 1, "protocol_version"),
            ("message_id", 1, "message_id"),
        )
    ),
    *((COMPLETIONS, name, value, None) for name in ("prompt_cache_key", "session_id") for value in (7, [])),
    *((COMPLETIONS, "prompt_cache_retention", value, None) for value in (7, "25h")),
    *((COMPLETIONS, "prompt_cache_options", value, None) for value in (7, [])),
    *(
        (COMPLETIONS, "prompt_cache_options", {name: value}, f"prompt_cache_options.{name}")
        for name, value in (("mode", "both"), ("ttl", "2m"), ("ttl", 60), ("prewarm", 1), ("comparison_response_id", 7))
    ),
    *(
        (COMPLETIONS, "cache_hints", value, f"cache_hints.{path}")
        for value, path in (
            *(({"expected_in_s": value}, "expected_in_s") for value in ("1", -1, 86_401, True, 10**400)),
            ({"not_expected": 1}, "not_expected"),
            ({"not_expected": True, "expected_in_s": 1}, "not_expected"),
            *(({"retention": value}, "retention") for value in (7, {}, [{"num_tokens": 1, "priority": 5}] * 17)),
            ({"retention": [7]}, "retention[0]"),
            ({"retention": [{"num_tokens": 0, "priority": 5}] * 2}, "retention"),
            *(
                ({"retention": [{"num_tokens": 1, "priority": 5}, {"num_tokens": 1, "priority": 5, **wrong}]}, path)
                for wrong, path in (
                    *(({"num_tokens": value}, "retention[1].num_tokens") for value in (None, -1, 1.5, BIG)),
                    *(({"priority": value}, "retention[1].priority") for value in (None, 0, 10, "5", True)),
                    *(({"ttl_s": value}, "retention[1].ttl_s") for value in (0, 86_401, "1", BIG)),
                    ({"unknown": 1}, "retention[1].unknown"),
                )
            ),
            ({"unknown": 1}, "unknown"),
        )
    ),
    (COMPLETIONS, "response_format", 7, None),
    (COMPLETIONS, "response_format", {}, "response_format.type"),
    (COMPLETIONS, "response_format", {"type": "xml"}, "response_format.type"),
    (COMPLETIONS, "response_format", {"type": "json_schema"}, "response_format.json_schema"),
    (COMPLETIONS, "response_format", {"type": "json_object", "a": 1}, "response_format.a"),
    (
        COMPLETIONS,
        "response_format",
        {"type": "json_schema", "json_schema": {"schema": 7}},
        "response_format.json_schema.schema",
    ),
    (COMPLETIONS, "structured_outputs", 7, None),
    (COMPLETIONS, "structured_outputs", {}, None),
    (COMPLETIONS, "structured_outputs", {"regex": "a", "choice": ["a"]}, None),
    (COMPLETIONS, "structured_outputs", {"choice": "a"}, "structured_outputs.choice"),
    (COMPLETIONS, "structured_outputs", {"regex": 7}, None),
    (COMPLETIONS, "structured_outputs", {"xml": 7}, "structured_outputs.xml"),
    (COMPLETIONS, "guided_choice", "abc", None),
    (COMPLETIONS, "guided_regex", "(", None),
    (COMPLETIONS, "guided_grammar", 7, None),
    (COMPLETIONS, "best_of", 2, None),
    (COMPLETIONS, "suffix", "x", None),
    (COMPLETIONS, "use_beam_search", True, None),
    (COMPLETIONS, "no_such_field", 1, None),
    ("/tokenize", "prompt", 7, None),
    ("/tokenize", "add_special_tokens", 7, None),
    ("/tokenize", "no_such_field", 7, None),
    ("/detokenize", "tokens", "a", None),
    ("/detokenize", "tokens", ["a"], None),
    ("/detokenize", "tokens", [-1], None),
    ("/detokenize", "no_such_field", 7, None),
]


def check_error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text[:500]
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"] == error["code"].lower()
    return error


def post(http_client: httpx.Client, path: str, body: Any) -> httpx.Response:
    return http_client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


def base_of(path: str) -> dict[str, Any]:
    return {COMPLETIONS: {"prompt": "Hi", "max_tokens": 8}, "/tokenize": {"prompt": "Hi"}}.get(path, {"tokens": [1]})


def test_each_field_is_checked(http_client: httpx.Client) -> None:
    missed = []
    for path, field, value, param in WRONG:
        answer = post(http_client, path, base_of(path) | {field: value})
        found = answer.json().get("error", {}).get("param") if answer.status_code == 400 else None
        if found != (param or field):
            missed.append((path, field, str(value)[:60], answer.status_code, answer.text[:200]))
    assert not missed, "\n".join(map(str, missed))


NO_OPS: dict[str, Any] = {
    "length_penalty": 1.0,
    "early_stopping": False,
    "return_tokens_as_token_ids": False,
    "truncate_prompt_tokens": None,
    "request_id": "mine",
    "include_reasoning": True,
    "spaces_between_special_tokens": True,
    "kv_transfer_params": {},
    "no_such_field": None,
}


@pytest.mark.parametrize("name", NO_OPS)
def test_a_field_that_changes_nothing_is_accepted(http_client: httpx.Client, name: str) -> None:
    answer = post(http_client, COMPLETIONS, base_of(COMPLETIONS) | {name: NO_OPS[name]})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("length_penalty", 2.0),
        ("early_stopping", True),
        ("return_tokens_as_token_ids", True),
        ("truncate_prompt_tokens", 5),
        ("request_id", 7),
        ("include_reasoning", "no"),
        ("kv_transfer_params", {"do_remote_decode": True}),
    ],
)
def test_a_value_that_would_change_something_is_refused(http_client: httpx.Client, name: str, value: Any) -> None:
    error = check_error(post(http_client, COMPLETIONS, base_of(COMPLETIONS) | {name: value}), 400)
    assert error["param"] == name


def test_null_is_as_if_not_given(http_client: httpx.Client) -> None:
    fields = {field for path, field, *_ in WRONG if path == COMPLETIONS and field not in ("prompt", "no_such_field")}
    assert post(http_client, COMPLETIONS, base_of(COMPLETIONS) | dict.fromkeys(fields)).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"7", b"null", b"\xff", b'{"prompt": NaN}', b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}"],
)
def test_a_body_that_is_no_object(http_client: httpx.Client, body: bytes) -> None:
    assert check_error(http_client.post(COMPLETIONS, content=body), 400)["code"] == "invalid_json"


def test_models_paths_and_methods(http_client: httpx.Client) -> None:
    wrong = check_error(post(http_client, COMPLETIONS, {"model": "other", "prompt": "Hi"}), 404)
    assert (wrong["code"], wrong["param"]) == ("model_not_found", "model")
    check_error(http_client.get("/v1/models/other"), 404)
    check_error(http_client.get("/nowhere"), 404)
    check_error(http_client.get(COMPLETIONS), 405)
    check_error(http_client.post("/health"), 405)


def test_a_body_and_headers_have_limits(http_client: httpx.Client) -> None:
    limit = 16 * 2**20
    check_error(http_client.post(COMPLETIONS, content=b" " * (limit + 1)), 413)
    chunked = (b" " * 2**20 for _ in range(17))
    check_error(http_client.post(COMPLETIONS, content=chunked), 413)
    assert http_client.get("/health", headers={"X-Long": "x" * 70_000}).status_code == 400
    assert http_client.get("/health").status_code == 200


# Values that are wrong for most fields, and right for some.
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 0.5, 1.5, -0.5, 1e-46, 1e39, 2**31, 2**63, -(2**63), BIG, 1e308),
    *("", "a", "stop", "\ud800", "\0", "x" * 100, "(", "text", "json_object", "1", "-1"),
    *([], [0], [1, 2], ["a"], ["a", 1], [[1]], [[]], [None], [[1], [2]], [{}], [True], [1.5], ["\ud800"]),
    *({}, {"a": 1}, {"1": 1}, {"1": 200}, {"type": "json_object"}, {"type": 1}, {"type": "text"}, {"regex": "a*"}),
    *({"include_usage": True}, {"include_usage": 1}, {"choice": ["a"]}, {"json": {"type": "integer"}}, {"json": "{"}),
    {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
    *({"expected_in_s": 3}, {"expected_in_s": 1e300}, {"retention": [{"num_tokens": 0, "priority": 1}]}),
    *({"retention": [{"num_tokens": 1, "priority": 9, "ttl_s": 1e-12}]}, {"not_expected": True}, {"retention": [[]]}),
]
FIELDS = sorted({field for path, field, *_ in WRONG if path == COMPLETIONS})


def fuzz(http_client: httpx.Client, count: int, *, seed: int) -> dict[int, int]:
    """Send so many requests, each with some fields of any value. Returns how many had which status."""
    rng = random.Random(seed)
    statuses: dict[int, int] = {}
    for number in range(count):
        body: dict[str, Any] = {"model": MODEL, "prompt": "Hi", "max_tokens": 2, "temperature": 0}
        body |= {rng.choice(FIELDS): rng.choice(VALUES) for _ in range(rng.choice((1, 1, 1, 2, 3)))}
        if body.get("max_tokens") != 2 or body.get("n", 1) != 1:
            body |= {"n": 1, "max_tokens": rng.choice((2, "a", -1))}
        answer = post(http_client, COMPLETIONS, body)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        assert answer.status_code in (200, 400, 404), (seed, number, body, answer.text[:500])
        if answer.status_code != 200:
            assert check_error(answer, answer.status_code)["message"]
    return statuses


def test_no_request_is_a_server_error(http_client: httpx.Client) -> None:
    statuses = fuzz(http_client, 300, seed=1)
    assert statuses[200] > 10
    assert statuses[400] > 100


@pytest.mark.verify
def test_no_request_of_20000_is_a_server_error(http_client: httpx.Client) -> None:
    fuzz(http_client, 20_000, seed=2)
