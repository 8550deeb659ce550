"""Request k of a seed to the gateway's HTTP endpoints: a function of both alone.

A body has fields that its endpoint knows, most of them as a client sends them. Some values are at the edges of int32,
int64 and float32, or make a sum or a product of fields reach such an edge. Some are of another type, null, deep or
long. Headers and the length of a body may be wrong, and a client may leave before its answer ends.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

Draw = Callable[[random.Random], Any]

SLOW_GRAMMAR = 'start: s\ns: s s s | s s | "a" | " a" | "z0" | ""'
"""Each mask of it takes longer than the one before."""
INT32, INT64, FLOAT32 = 2**31 - 1, 2**63 - 1, 3.4028234663852886e38
CONTEXT = 2048
"""The tokens of the demo model's context."""
EDGES = (
    *(0, 1, -1, 2, 5, 64, 256, 257, 1024, 1025, CONTEXT - 1, CONTEXT, CONTEXT + 1),
    *(
        limit + more
        for limit in (INT32, -INT32 - 1, 2**32, 2**53, INT64, -INT64 - 1, 2**64)
        for more in (-1024, -1, 0, 1)
    ),
    *(10**18, 10**400, 1.0, 0.5, -0.0, 1e-46, 1e-45, FLOAT32, 1e39, 1e308, -1e308),
)
ODD = (
    None,
    True,
    False,
    "",
    "1",
    "\0",
    "\ud800",
    [],
    {},
    [[]],
    [None],
    {"": None},
    [1, "a"],
    {"type": "none"},
    "a" * 70_000,
)
PATHS = (
    *["/v1/completions"] * 5,
    *["/v1/chat/completions"] * 5,
    *["/v1/responses"] * 3,
    *["/v1/messages"] * 3,
    *("/v1/messages/count_tokens", "/tokenize", "/detokenize", "/detokenize"),
)
WRONG_HEADERS = (
    ("Host", "example.org"),
    ("Host", ""),
    ("Origin", "https://example.org"),
    ("Origin", "null"),
    ("Upgrade", "h2c"),
    ("Upgrade", "websocket"),
    ("Expect", "100-continue"),
    ("Content-Type", "text/plain"),
    ("Content-Type", "application/json; charset=utf-16"),
    ("Content-Encoding", "gzip"),
    ("Content-Length", "-1"),
    ("Content-Length", "0"),
    ("Content-Length", "1e3"),
    ("Content-Length", str(2**64)),
    ("Transfer-Encoding", "chunked"),
    ("Transfer-Encoding", "gzip"),
    ("Authorization", "Bearer none"),
    ("X-Request-Id", "r" * 5_000),
    ("traceparent", "00-0-0-0"),
    ("anthropic-version", "2000-01-01"),
    ("Last-Event-ID", str(INT64)),
)


class Ending(Enum):
    """A client's behaviour after the begin of its request."""

    READS = "reads the whole answer"
    LEAVES = "leaves after the first bytes of the answer"
    LEAVES_AT_ONCE = "leaves before the answer"
    CUTS = "leaves in the middle of its body"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request to send."""

    number: int
    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...]
    ending: Ending


def http_request(seed: int, number: int) -> HttpRequest:
    """Draw request `number` of a seed."""
    rng = random.Random(seed << 40 | number)
    path = rng.choice(PATHS)
    body = _encoded(rng, _body(rng, path))
    headers = (rng.choice(WRONG_HEADERS),) if rng.random() < 0.08 else ()
    ending = rng.choices(list(Ending), (80, 10, 5, 5))[0]
    return HttpRequest(number, path, body, headers, ending)


def _encoded(rng: random.Random, body: Any) -> bytes:
    """Return JSON. Rarely it is cut, changed, of another encoding, or has NaN or a field twice."""
    data = json.dumps(body, ensure_ascii=rng.random() < 0.9).encode(errors="surrogatepass")
    match rng.randrange(60):
        case 0:
            return data[: rng.randrange(len(data) + 1)]
        case 1:
            at = rng.randrange(len(data))
            return data[:at] + rng.randbytes(2) + data[at:]
        case 2:
            return data.replace(b": ", b": NaN, ", 1)
        case 3:
            return data.decode(errors="replace").encode("utf-16")
        case 4:
            return data[:-1] + b', "model": "demo", "model": null}'
        case 5:
            return b"[" * rng.choice((500, 100_000)) + b"]"
    return data


def _body(rng: random.Random, path: str) -> dict[str, Any]:
    required, optional = FIELDS[path]
    body = {name: draw(rng) for name, draw in required.items()}
    for name in rng.sample(list(optional), min(len(optional), rng.choice((0, 1, 1, 2, 3, 6)))):
        body[name] = optional[name](rng)
    if rng.random() < 0.25:
        spoil(rng, body)
    if rng.random() < 0.1:
        _reach_edges(rng, body)
    if rng.random() < 0.003:  # near the most bytes of a body, and beyond
        body["user"] = "a" * (2**24 + rng.choice((-400, 0, 2**20)))
    if rng.random() < 0.02:
        body[rng.choice(("unknown", "model", "stream", "\ud800"))] = rng.choice((*ODD, *EDGES))
    return body


def spoil(rng: random.Random, value: Any) -> None:
    """Replace one value within an object or a list, at some depth, by an edge or by something odd."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    if not keys:
        return
    key = rng.choice(keys)
    if isinstance(value[key], dict | list) and value[key] and rng.random() < 0.7:
        spoil(rng, value[key])
        return
    value[key] = rng.choice(EDGES if rng.random() < 0.6 else ODD) if rng.random() < 0.97 else nested(rng)


def nested(rng: random.Random) -> Any:
    """Return lists or objects within one another."""
    value: Any = rng.choice(ODD)
    for _ in range(rng.choice((5, 60, 300))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def _reach_edges(rng: random.Random, body: dict[str, Any]) -> None:
    """Set fields with a sum or product at an edge, while each of them is in its range."""
    near = rng.choice((-1, 0, 1))
    match rng.randrange(6):
        case 0:  # prompt + min_tokens
            body |= {"min_tokens": INT32 - len(str(body.get("prompt", ""))) + near}
            body.pop("max_tokens", None)
        case 1:  # prompt + max_tokens
            body |= {"max_tokens": CONTEXT - 1 + near, "stream": True, "ignore_eos": True}
        case 2:  # seed + n - 1
            body |= {"seed": INT64 - 3 + near, "n": 4, "max_tokens": 2}
        case 3:  # prompts x n
            count = rng.choice((256, 257, 32, 4))
            body |= {"prompt": ["a"] * count, "n": 1024 // count + near, "max_tokens": 1}
        case 4:  # tokens x retention
            body["cache_hints"] = {
                "retention": [{"num_tokens": INT32, "priority": 9, "ttl_s": FLOAT32}] * rng.choice((1, 2, 9))
            }
        case _:
            body |= {"min_tokens": INT32, "max_tokens": INT32, "n": 2}


# Values as clients send them.


def one_of(*values: Any) -> Draw:
    return lambda rng: rng.choice(values)


def edge(*likely: Any) -> Draw:
    """Draw a likely value, or an edge."""
    return lambda rng: rng.choice(likely) if rng.random() < 0.7 else rng.choice(EDGES)


def lists_of(draw: Draw, *lengths: int) -> Draw:
    return lambda rng: [draw(rng) for _ in range(rng.choice(lengths))]


def objects(required: Mapping[str, Draw], optional: Mapping[str, Draw] | None = None) -> Draw:
    def draw(rng: random.Random) -> dict[str, Any]:
        found = {name: value(rng) for name, value in required.items()}
        return found | {name: value(rng) for name, value in (optional or {}).items() if rng.random() < 0.4}

    return draw


def either(*draws: Draw) -> Draw:
    return lambda rng: rng.choice(draws)(rng)


_flag = one_of(True, False)
_text = one_of(
    "The",
    "Once upon a time",
    "a b c",
    "",
    " ",
    "\0",
    "ä²\u202e\U0001f600",
    "\ud83d",
    "<|im_end|>",
    "the " * 400,
    "a" * 9_000,
)
_name = one_of("get", "get", "find_it", "", "a b", "n" * 65, "ä")
_token = edge(3, 5, 7, 60)
_stop = either(one_of(".", "a", "", ["a", "b"], ["a"] * 65), lists_of(_text, 0, 1, 4))
_schema = one_of(
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
    {"$ref": "#"},
    {"type": "integer", "minimum": 2**63, "maximum": 2**64},
    {"type": "string", "pattern": "(a+)+$"},
    {"type": "string", "minLength": INT32},
    {"type": "array", "minItems": INT64},
    {"enum": ["a", 1, None, {"b": []}]},
    {"allOf": [{"pattern": f"a.*{letter}"} for letter in "abcdefgh"]},
    {"type": "none"},
    {"unevaluatedProperties": False},
    True,
)
_regex = one_of("[a-c]{1,4}", "a{1000000}", "(a|a)*b", "(?=a)a", "(", "[^\\x00-\\uffff]", "\\p{L}+", "")
_grammar_text = one_of(
    SLOW_GRAMMAR,
    'start: "a" | "b"',
    'root ::= "a" | "b"',
    "start: start",
    "start:",
    "root ::=",
    "start: /(a|a)*b/",
    "{}",
)
_choice = one_of(["the", "a"], [], [""], ["a"] * 1_025, ["\ud800"], [1], "a")
_structured = either(
    objects({"json": _schema}, {"disable_any_whitespace": _flag, "whitespace_pattern": _regex}),
    objects({"json_object": _flag}),
    objects({"regex": _regex}),
    objects({"choice": _choice}),
    objects({"grammar": _grammar_text}),
    objects({"grammar": one_of(SLOW_GRAMMAR)}),
    objects({"structural_tag": one_of("{}")}),
)
_format = either(
    one_of({"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}, {}),
    objects(
        {"type": one_of("json_schema"), "json_schema": objects({"name": _name, "schema": _schema}, {"strict": _flag})}
    ),
)
_hints = objects(
    {},
    {
        "expected_in_s": edge(1, 60.5),
        "not_expected": _flag,
        "retention": lists_of(
            objects({"num_tokens": edge(4, 16), "priority": edge(1, 9)}, {"ttl_s": edge(1, 60)}), 0, 1, 3
        ),
        "actions": lists_of(one_of({"type": "keep"}, 1), 0, 2),
    },
)
_image = one_of(
    {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
    {"type": "input_image", "image_url": "file:///dev/zero"},
)
_part = either(objects({"type": one_of("text", "input_text", "output_text"), "text": _text}), _image)
_content = either(_text, _text, _text, lists_of(_part, 0, 1, 2))
_function = objects({"name": _name}, {"description": _text, "parameters": _schema, "strict": _flag})
_call = objects(
    {
        "id": _name,
        "type": one_of("function"),
        "function": objects({"name": _name, "arguments": one_of("{}", "{", "null", "[1]", "")}),
    }
)
_message = either(
    objects({"role": one_of("user", "user", "assistant", "system", "developer"), "content": _content}),
    objects({"role": one_of("assistant"), "tool_calls": lists_of(_call, 0, 1, 2)}, {"content": _content}),
    objects({"role": one_of("tool"), "tool_call_id": _name, "content": _content}),
)
_user = objects({"role": one_of("user"), "content": _content})
_messages: Draw = lambda rng: [_message(rng) for _ in range(rng.choice((0, 0, 0, 1, 3, 20)))] + [_user(rng)]  # noqa: E731
_tool = objects({"type": one_of("function"), "function": _function})
_tool_choice = one_of("auto", "none", "required", "get", {"type": "function", "function": {"name": "get"}})
_count = edge(1, 1, 2, 3, 8)

SAMPLING: Mapping[str, Draw] = {
    "model": one_of(*["demo"] * 12, "none", ""),
    "temperature": edge(0, 0.7, 1),
    "top_p": edge(0.5, 1),
    "top_k": edge(-1, 1, 5),
    "min_p": edge(0, 0.1),
    "n": edge(1, 1, 2, 4),
    "best_of": edge(1, 2),
    "seed": edge(1, 7),
    "stop": _stop,
    "stop_token_ids": lists_of(_token, 0, 1, 3),
    "allowed_token_ids": lists_of(_token, 0, 1, 3),
    "bad_words": lists_of(either(_text, lists_of(_token, 1, 2, 17)), 1, 2),
    "logit_bias": one_of({"5": -100}, {"5": 1e39}, {"-1": 1}, {str(2**31): 1}, {"9" * 10: 0}, {"a": 1}, {"5": 101}),
    "min_tokens": edge(0, 1, 2),
    "ignore_eos": _flag,
    "presence_penalty": edge(0, 2),
    "frequency_penalty": edge(0, -2),
    "repetition_penalty": edge(1, 1.5),
    "skip_special_tokens": _flag,
    "include_stop_str_in_output": _flag,
    "speculative": _flag,
    "priority": edge(0, 1, -1),
    "response_format": _format,
    "structured_outputs": _structured,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar_text,
    "cache_salt": _text,
    "cache_hints": _hints,
    "truncate_prompt_tokens": edge(-1),
    "prompt_logprobs": edge(0, 1),
    "stream": _flag,
    "stream_options": objects(
        {}, {"include_usage": _flag, "continuous_usage_stats": _flag, "include_obfuscation": _flag}
    ),
    "return_token_ids": _flag,
    "user": _text,
    "metadata": one_of({}, {"a": "b"}, []),
}
_CHAT: Mapping[str, Draw] = {
    **SAMPLING,
    "max_tokens": _count,
    "max_completion_tokens": _count,
    "logprobs": _flag,
    "top_logprobs": edge(0, 1, 5),
    "tools": lists_of(_tool, 0, 1, 2),
    "tool_choice": _tool_choice,
    "parallel_tool_calls": _flag,
    "add_generation_prompt": _flag,
    "continue_final_message": _flag,
    "chat_template_kwargs": one_of({}, {"enable_thinking": True}, {"messages": []}),
    "reasoning_effort": one_of("low", "none", 1),
}
_ANTHROPIC: Mapping[str, Draw] = {
    "system": _content,
    "tools": lists_of(objects({"name": _name, "input_schema": _schema}, {"description": _text}), 0, 1, 2),
    "tool_choice": one_of({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "get"}, {"type": "none"}),
    "thinking": one_of({"type": "enabled", "budget_tokens": INT64}, {"type": "disabled"}),
}
_TOKENIZED: Mapping[str, Draw] = {"add_special_tokens": _flag, "return_token_strs": _flag, "model": SAMPLING["model"]}
# The fields that a body of each endpoint always has, and others.
FIELDS: Mapping[str, tuple[Mapping[str, Draw], Mapping[str, Draw]]] = {
    "/v1/completions": (
        {"prompt": either(_text, _text, lists_of(_token, 1, 9), lists_of(_text, 0, 1, 2)), "max_tokens": edge(1, 2, 8)},
        {**SAMPLING, "logprobs": edge(0, 1, 5), "echo": _flag, "suffix": _text, "add_special_tokens": _flag},
    ),
    "/v1/chat/completions": ({"messages": _messages}, _CHAT),
    "/v1/responses": (
        {"input": either(_text, _messages), "max_output_tokens": _count},
        {
            **SAMPLING,
            "instructions": _text,
            "tools": lists_of(either(_function, objects({"type": one_of("function"), "name": _name})), 0, 1, 2),
            "tool_choice": _tool_choice,
            "text": objects({"format": _format}),
            "previous_response_id": one_of("resp_none", "", INT64),
            "store": _flag,
            "include": lists_of(one_of("message.output_text.logprobs", "none"), 0, 1),
            "top_logprobs": edge(0, 1),
            "truncation": one_of("auto", "disabled"),
            "reasoning": one_of({"effort": "low"}, {}),
        },
    ),
    "/v1/messages": (
        {"messages": _messages, "max_tokens": edge(1, 2, 8), "model": one_of("demo")},
        {
            **_ANTHROPIC,
            "temperature": edge(0, 1),
            "top_p": edge(1),
            "top_k": edge(1),
            "stop_sequences": _stop,
            "stream": _flag,
            "metadata": one_of({}, {"user_id": "a"}),
        },
    ),
    "/v1/messages/count_tokens": ({"messages": _messages, "model": one_of("demo")}, _ANTHROPIC),
    "/tokenize": ({"prompt": _text}, {**_TOKENIZED, "messages": _messages}),
    "/detokenize": ({"tokens": lists_of(_token, 0, 1, 9)}, {**_TOKENIZED, "skip_special_tokens": _flag}),
}
