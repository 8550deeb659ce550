"""Answers in every format, cut everywhere, and the grammars of calls. No process is started."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.gateway.chat.tools import Arguments, CallBegan, Event, Reasoning, Text, Tool
from quire.gateway.chat.tools.answers import AnswerFormat
from quire.gateway.chat.tools.events import joined
from quire.gateway.chat.tools.formats import REASONING_FORMATS, TOOL_FORMATS
from quire.gateway.chat.tools.tool_format import UnwritableSchema

HERMES, LLAMA3, MISTRAL, ARGS, XML, GLM = "hermes", "llama3", "mistral", "mistral-args", "qwen3-coder", "glm"
V3, V31, KIMI, PYTHONIC, HARMONY = "deepseek-v3", "deepseek-v3.1", "kimi-k2", "pythonic", "harmony"
A = CallBegan("a"), Arguments('{"x": 1}')
B = CallBegan("b"), Arguments("{}")


def qwen(name: str, **arguments: str) -> str:
    """Return a call as Qwen3-Coder writes it."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def deepseek(*calls: str, between: str = "") -> str:
    """Return a section of calls as DeepSeek writes it."""
    written = between.join(f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def kimi(*calls: tuple[str, str]) -> str:
    """Return a section of calls, ids and arguments, as Kimi writes it."""
    written = "".join(
        f"<|tool_call_begin|>{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>" for id, arguments in calls
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def harmony(channel: str, text: str) -> str:
    """Return a message's channel and text."""
    return f"<|channel|>{channel}<|message|>{text}"


CASES: list[tuple[str, str, list[Event]]] = [
    # -- calls
    (HERMES, '<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>', [*A]),
    (
        HERMES,
        '<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>',
        [*A, *B],
    ),
    (HERMES, 'Let me see. \n<tool_call>{"name": "b", "arguments": {}}</tool_call>', [Text("Let me see."), *B]),
    (HERMES, '<tool_call>{"name": "b", "arguments": {}}</tool_call>done', [*B, Text("done")]),
    (
        HERMES,
        '<tool_call>{"name": "a", "arguments": {"q": "}</tool_call>\\"{"}}</tool_call>',
        [CallBegan("a"), Arguments('{"q": "}</tool_call>\\"{"}')],
    ),
    (HERMES, '<tool_call>{"arguments": {"x": 1}, "name": "a"}</tool_call>', [*A]),
    (HERMES, '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', [*A]),
    (HERMES, '<tool_call>{"name": "a", "arguments": {"x": 1}, "id": [3]}</tool_call>', [*A]),
    (HERMES, '<tool_call>{"name": "a", "arguments": {"x": 1}</tool_call>', [*A]),  # a bracket is missing
    (HERMES, '<tool_call>{"name": "a", "arguments": {"x": 1}}\n</tool_c', [*A]),  # cut by max_tokens
    (HERMES, '<tool_call>{"name": "a", "arguments": {"x": ', [CallBegan("a"), Arguments('{"x": ')]),
    (LLAMA3, '{"name": "a", "parameters": {"x": 1}}', [*A]),
    (LLAMA3, ' {"name": "a", "parameters": {"x": 1}}; {"name": "b", "parameters": {}}', [*A, *B]),
    (LLAMA3, '<|python_tag|>{"name": "a", "parameters": {"x": 1}}', [*A]),
    (MISTRAL, '[TOOL_CALLS][{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}]', [*A, *B]),
    (MISTRAL, 'Well [TOOL_CALLS] [{"name": "a", "arguments": {"x": 1}}] ok', [Text("Well"), *A, Text(" ok")]),
    (MISTRAL, '[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b{}', [*A, *B]),
    (MISTRAL, '[TOOL_CALLS]a[CALL_ID]abcdef123[ARGS]{"x": 1}', [*A]),
    (HERMES, '<tool_call>{"name": "b"}</tool_call>', [*B]),
    (HERMES, '<tool_call>{"name": "b", "arguments": null}</tool_call>', [*B]),
    (HERMES, '<tool_call>{"name": "b", "arguments": ""}</tool_call>', [*B]),
    (
        HERMES,
        '<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n{"name": "b", "arguments": {}}\n</tool_call>',
        [*A, *B],
    ),
    (HERMES, '<tool_call>[{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}]</tool_call>', [*A, *B]),
    (HERMES, '<tool_call>\n{"name": "a", "arguments": {"x": 1}}}\n</tool_call>', [*A]),  # a brace too many
    (HERMES, '<tool_call>\n{"name": "b", "arguments": null}}\n</tool_call> ok', [*B, Text(" ok")]),
    (HERMES, '<tool_call>{"name": "a", "arguments": {"x": 1}}}', [*A]),
    (LLAMA3, '{"name": "a", "parameters": {"x": 1}}\n{"name": "b", "parameters": {}}', [*A, *B]),
    (LLAMA3, '{"name": "b", "parameters": null}\n\n{"name": "a", "parameters": {"x": 1}}}', [*B, *A]),
    (LLAMA3, '<|python_tag|>{"name": "a", "parameters": {"x": 1}}; {"name": "b"}', [*A, *B]),
    (MISTRAL, '[TOOL_CALLS][{"name": "b", "arguments": null}]', [*B]),
    (ARGS, '[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b[ARGS]{}', [*A, *B]),
    (XML, qwen("a", x="1"), [*A]),
    (XML, f"Well.\n{qwen('a', x='1')}\n{qwen('b')}", [Text("Well."), *A, *B]),
    (XML, "<function=a><parameter=x>1</parameter></function>", [*A]),
    (XML, "<tool_call>\n<function=b>\n</function>\n</tool", [*B]),
    (XML, qwen("a", x="1").removesuffix("</parameter>\n</function>\n</tool_call>"), [CallBegan("a")]),
    (GLM, "<tool_call>a\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", [*A]),
    (GLM, "ok<tool_call>a<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>", [Text("ok"), *A]),
    (
        GLM,
        "<tool_call>a\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n<tool_call>b\n</tool_call>",
        [*A, *B],
    ),
    (GLM, "<tool_call>b</tool_call>", [*B]),
    (V3, deepseek('function<｜tool▁sep｜>a\n```json\n{"x": 1}\n```'), [*A]),
    (
        V3,
        deepseek(
            'function<｜tool▁sep｜>a\n```json\n{"x": 1}\n```', "function<｜tool▁sep｜>b\n```json\n{}\n```", between="\n"
        ),
        [*A, *B],
    ),
    (V3, deepseek("function<｜tool▁sep｜>b\n```json\n```"), [*B]),
    (V31, "Hm " + deepseek('a<｜tool▁sep｜>{"x": 1}'), [Text("Hm"), *A]),
    (V31, deepseek('a<｜tool▁sep｜>{"x": 1}', "b<｜tool▁sep｜>{}"), [*A, *B]),
    (V31, deepseek("b<｜tool▁sep｜>"), [*B]),
    (V31, deepseek('a<｜tool▁sep｜>{"x": 1}')[:-30], [*A]),
    (KIMI, kimi(("functions.a:0", '{"x": 1}')), [CallBegan("a", "functions.a:0"), A[1]]),
    (
        KIMI,
        "Hm " + kimi(("functions.a:0", '{"x": 1}'), ("functions.b:1", "{}")),
        [Text("Hm"), CallBegan("a", "functions.a:0"), A[1], CallBegan("b", "functions.b:1"), B[1]],
    ),
    (KIMI, kimi(("b", "")), [CallBegan("b", "b"), B[1]]),
    (PYTHONIC, "[a(x=1)]", [*A]),
    (PYTHONIC, "\n[ a( x = 1 ), b() ]", [*A, *B]),
    (PYTHONIC, "<|python_start|>[a(x=1), b()]<|python_end|>", [*A, *B]),
    (
        PYTHONIC,
        """[a(x='it\\'s, ")]"', y=[1, {'k': None}], z=True)]""",
        [CallBegan("a"), Arguments('{"x": "it\'s, \\")]\\"", "y": [1, {"k": null}], "z": true}')],
    ),
    (HARMONY, harmony("commentary to=functions.a <|constrain|>json", '{"x": 1}') + "<|call|>", [*A]),
    (HARMONY, harmony("commentary to=functions.a <|constrain|>json", '{"x": 1}'), [*A]),
    (HARMONY, ' to=functions.a<|channel|>commentary json<|message|>{"x": 1}<|call|>', [*A]),
    (HARMONY, harmony("commentary to=functions.b", "") + "<|call|>", [*B]),
    (
        HARMONY,
        f"{harmony('analysis', 'Hm. ')}<|end|><|start|>assistant{harmony('final', 'Yes {1}')}<|return|>",
        [Reasoning("Hm."), Text("Yes {1}")],
    ),
    (
        HARMONY,
        f"{harmony('analysis', 'Hm')}<|end|><|start|>assistant{harmony('commentary', 'I look.')}<|end|>"
        "<|start|>assistant" + harmony("commentary to=functions.a json", '{"x": 1}') + "<|call|>",
        [Reasoning("Hm"), Text("I look."), *A],
    ),
    (HARMONY, harmony("analysis", "cut"), [Reasoning("cut")]),
    (HARMONY, "<|channel|>comm", []),
]
# Texts that are no call of a tool on offer: they come out as they are.
TEXTS = [
    (HERMES, "no calls here "),
    (HERMES, " \n "),
    (HERMES, "<tool_call>"),
    (HERMES, "a <tool_cal"),
    (HERMES, "<tool_call> nothing </tool_call>\n"),
    (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "a", "arguments": 3}</tool_call>'),
    (HERMES, '<tool_call>{"name": "a", "arg'),
    (HERMES, "<tool_call>{not json}</tool_call>"),
    (HERMES, '{"name": "a", "arguments": {}}'),
    (LLAMA3, '{"answer": 42}'),
    (LLAMA3, 'I say {"name": "a", "parameters": {}}'),
    (LLAMA3, '{"name": "a", "parameters": '),
    (LLAMA3, "{ I like brackets"),
    (MISTRAL, "[TOOL_CALLS] []"),
    (MISTRAL, '[TOOL_CALLS][{"name": "unknown", "arguments": {}}]'),
    (MISTRAL, '[TOOL_CALLS]unknown[ARGS]{"x": 1}'),
    (MISTRAL, "[TOOL_CALLS]a lot of words"),
    (XML, "<tool_call>\n<function=unknown>\n</function>\n</tool_call>"),
    (XML, "<tool_call> no"),
    (XML, "an <function in words"),
    (GLM, "<tool_call>unknown\n</tool_call>"),
    (GLM, "<tool_call>a lot</tool_call>"),
    (V3, deepseek("function<｜tool▁sep｜>unknown\n```json\n{}\n```")),
    (V31, deepseek("unknown<｜tool▁sep｜>{}")),
    (V31, "<｜tool▁calls"),
    (KIMI, kimi(("functions.unknown:0", "{}"))),
    (PYTHONIC, "[a list, of things]"),
    (PYTHONIC, "[unknown(x=1)]"),
    (PYTHONIC, "[a(1)]"),
    (PYTHONIC, "I call [a(x=1)]"),
    (HARMONY, "no channels here"),
]


def parse(format: str, pieces: list[str], *, parallel: bool = True, tools: list[Tool] | None = None) -> list[Event]:
    """Return the found pieces, adjacent ones of one kind joined."""
    parser = AnswerFormat(TOOL_FORMATS[format]).parser(tools or [Tool("a", {}), Tool("b", {})], parallel=parallel)
    return joined([event for piece in pieces for event in parser.push(piece)] + parser.finish())


def cuts_of(text: str) -> list[list[str]]:
    """Return the text letter by letter, in all pairs of pieces, and if it is short in all triples."""
    places = range(len(text) + 1)
    ways = [(0, i, j, len(text)) for i in places for j in (places[i:] if len(text) < 120 else places[-1:])]
    return [list(text), *([text[i:j] for i, j in pairwise(way)] for way in ways)]


@pytest.mark.parametrize(("format", "text", "expected"), CASES)
def test_a_call_is_found_however_its_text_is_cut(format: str, text: str, expected: list[Event]) -> None:
    for pieces in cuts_of(text):
        assert parse(format, pieces) == expected, pieces


@pytest.mark.parametrize(("format", "text"), TEXTS)
def test_text_that_is_no_call_is_kept_to_the_last_letter(format: str, text: str) -> None:
    for pieces in cuts_of(text):
        assert parse(format, pieces) == [Text(text)], pieces


# Arguments with what could be taken for something else, as each format writes them.
HARD: dict[str, Any] = {
    "s": 'a "}</tool_call>" </arg_value> <｜tool▁call▁end｜> <|tool_call_end|> )] {\n\t\\',
    "n": -12,
    "o": {"k": ["}", "]", "</parameter>", "</tool_call>"], "z": None},
    "t": True,
    "e": "",
}
HARD_SCHEMA = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "n": {"type": "integer"},
        "o": {"type": "object"},
        "t": {"type": "boolean"},
        "e": {"$ref": "#/$defs/text"},
    },
    "required": list(HARD),
    "additionalProperties": False,
    "$defs": {"text": {"type": "string"}},
}
RAW = {key: value if isinstance(value, str) else json.dumps(value) for key, value in HARD.items()}
JSON = json.dumps(HARD)
WRITTEN = {
    HERMES: f'<tool_call>\n{{"name": "a", "arguments": {JSON}}}\n</tool_call>',
    LLAMA3: f'{{"name": "a", "parameters": {JSON}}}',
    MISTRAL: f'[TOOL_CALLS][{{"name": "a", "arguments": {JSON}}}]',
    ARGS: f"[TOOL_CALLS]a[ARGS]{JSON}",
    XML: qwen("a", **RAW),
    GLM: "<tool_call>a\n"
    + "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value.replace('</arg_value>', '')}</arg_value>\n"
        for key, value in RAW.items()
    )
    + "</tool_call>",
    V3: deepseek(f"function<｜tool▁sep｜>a\n```json\n{JSON}\n```"),
    V31: deepseek(f"a<｜tool▁sep｜>{JSON}"),
    KIMI: kimi(("functions.a:0", JSON)),
    PYTHONIC: f"[a({', '.join(f'{key}={value!r}' for key, value in HARD.items())})]",
    HARMONY: harmony("commentary to=functions.a <|constrain|>json", JSON),
}


@pytest.mark.parametrize("format", TOOL_FORMATS)
def test_arguments_are_the_same_for_every_cut(format: str) -> None:
    text, tools = WRITTEN[format], [Tool("a", HARD_SCHEMA)]
    [call, arguments] = parse(format, [text], tools=tools)
    assert isinstance(call, CallBegan)
    assert isinstance(arguments, Arguments)
    expected = HARD if format != GLM else HARD | {"s": HARD["s"].replace("</arg_value>", "")}
    assert json.loads(arguments.text) == expected
    for pieces in ([*text], *([text[:at], text[at:]] for at in range(len(text)))):
        assert parse(format, pieces, tools=tools) == [call, arguments]


@pytest.mark.parametrize("format", TOOL_FORMATS)
def test_a_text_that_ends_within_a_call_gives_the_beginning_of_its_arguments(format: str) -> None:
    text, tools = WRITTEN[format], [Tool("a", HARD_SCHEMA)]
    whole = parse(format, [text], tools=tools)[1]
    assert isinstance(whole, Arguments)
    for end in range(len(text)):
        events = parse(format, [text[:end]], tools=tools)
        begun = [event for event in events if isinstance(event, Arguments)]
        assert all(whole.text.startswith(event.text) for event in begun), text[:end]
        assert not begun or not any(isinstance(event, Text) for event in events), text[:end]


PIECES = (
    *"ab sn\"\\{}[]()=,;:1<'\n",
    *("null", '{"name": "a", "arguments": {', '"name"', '"arguments"', "```json", "functions.a:0", "to=functions.a"),
    *("<function=a>", "</function>", "<parameter=s>", "</parameter>", "<think>", "</think>", "analysis", "final"),
)


@given(st.data(), st.sampled_from(list(TOOL_FORMATS)), st.sampled_from([None, "think"]))
def test_any_text_is_read_the_same_for_every_cut(data: st.DataObject, format: str, reasoning: str | None) -> None:
    answers = AnswerFormat(TOOL_FORMATS[format], None if reasoning is None else REASONING_FORMATS[reasoning])
    alphabet = st.sampled_from([*PIECES, *TOOL_FORMATS[format].markers * 3])
    pieces = data.draw(st.lists(alphabet, max_size=25))

    def read(pieces: list[str]) -> list[Event]:
        parser = answers.parser([Tool("a", HARD_SCHEMA), Tool("b", {})])
        return joined([event for piece in pieces for event in parser.push(piece)] + parser.finish())

    assert read(pieces) == read(["".join(pieces)]) == read([*"".join(pieces)])


def test_values_are_read_by_the_types_of_their_schema() -> None:
    properties = {
        "text": {"type": "string"},
        "maybe": {"type": ["string", "null"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "number": {"type": "number"},
        "flag": {"type": "boolean"},
        "one_of": {"enum": ["1", "2"]},
    }
    given = {"text": "12", "maybe": "null", "either": "7", "number": "2", "flag": "True", "one_of": "1", "other": "[1]"}
    expected = {"text": "12", "maybe": None, "either": 7, "number": 2, "flag": True, "one_of": "1", "other": [1]}
    tools = [Tool("a", {"type": "object", "properties": properties})]
    [_, arguments] = parse(XML, [qwen("a", **given)], tools=tools)
    assert isinstance(arguments, Arguments)
    assert json.loads(arguments.text) == expected
    [_, arguments] = parse(XML, [qwen("a", number="about 3", maybe="nothing")], tools=tools)
    assert isinstance(arguments, Arguments)
    assert json.loads(arguments.text) == {"number": "about 3", "maybe": "nothing"}


def test_arguments_come_while_they_are_written() -> None:
    parser = AnswerFormat(TOOL_FORMATS[HERMES]).parser([Tool("a", {})])
    assert parser.push('<tool_call>{"name": "a", "arguments": ') == []
    assert parser.push('{"x": [1') == [CallBegan("a"), Arguments('{"x": [1')]
    assert parser.push(", 2]") == [Arguments(", 2]")]


def test_a_text_of_tags_comes_while_it_is_written() -> None:
    parser = AnswerFormat(TOOL_FORMATS[XML]).parser([Tool("a", HARD_SCHEMA)])
    assert parser.push("<tool_call><function=a><parameter=s>\none") == [CallBegan("a"), Arguments('{"s": "one')]
    assert parser.push(' "two"\n</para') == [Arguments(' \\"two\\"')]


def test_text_comes_while_it_can_be_no_call() -> None:
    parser = AnswerFormat(TOOL_FORMATS[HERMES]).parser([Tool("a", {})])
    assert parser.push("one two<to") == [Text("one two")]
    assert parser.push("ken> ") == [Text("<token>")]


@pytest.mark.parametrize("format", [each for each in TOOL_FORMATS if each not in (HARMONY, KIMI)])
def test_without_parallel_calls_the_first_one_counts(format: str) -> None:
    text = next(text for each, text, events in CASES if each == format and events[-4:] == [*A, *B])
    assert parse(format, [text], parallel=False)[-2:] == [*A]


def test_markers_that_are_special_tokens_never_come_out() -> None:
    parser = AnswerFormat(TOOL_FORMATS[KIMI]).parser(
        [Tool("a", {})], hidden={"<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>"}
    )
    text = f"{kimi(('functions.unknown:0', '{}'))} ok <|tool_call_end|>"
    events = [event for letter in text for event in parser.push(letter)] + parser.finish()
    left = "functions.unknown:0<|tool_call_argument_begin|>{}<|tool_calls_section_end|> ok "
    assert joined(events) == [Text(left)]


# -- reasoning ----------------------------------------------------------------------------------------------------

THOUGHTS: list[tuple[str, bool, list[Event]]] = [
    ("<think>\nHm.\n</think>\n\nYes.", False, [Reasoning("Hm."), Text("Yes.")]),
    ("\nHm.\n</think>\n\nYes.", True, [Reasoning("Hm."), Text("Yes.")]),
    ("<think>Hm.</think>Yes", True, [Reasoning("Hm."), Text("Yes")]),
    ("<think>Hm. And </thin", False, [Reasoning("Hm. And </thin")]),
    ("Hm. And", True, [Reasoning("Hm. And")]),
    ("<think></think>Yes", False, [Text("Yes")]),
    (" Yes <think>no</think>", False, [Text(" Yes <think>no</think>")]),
    ("<thin", False, [Text("<thin")]),
    (
        'Hm <tool_call>{"name": "a", "arguments": {}}</tool_call> ok</think>\n'
        '<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call>',
        True,
        [Reasoning('Hm <tool_call>{"name": "a", "arguments": {}}</tool_call> ok'), *A],
    ),
]


@pytest.mark.parametrize(("text", "is_open", "expected"), THOUGHTS)
@pytest.mark.parametrize("name", ["think", "mistral"])
def test_reasoning_is_found_however_its_text_is_cut(name: str, text: str, is_open: bool, expected: list[Event]) -> None:
    def named(text: str) -> str:
        return text if name == "think" else text.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")

    wanted = [type(event)(named(event.text)) if isinstance(event, Text | Reasoning) else event for event in expected]
    format = AnswerFormat(TOOL_FORMATS[HERMES], REASONING_FORMATS[name])
    for pieces in cuts_of(named(text)):
        parser = format.parser([Tool("a", {})], begins_in_reasoning=is_open)
        assert joined([event for piece in pieces for event in parser.push(piece)] + parser.finish()) == wanted, pieces


# -- grammars -----------------------------------------------------------------------------------------------------

TOOLS = [
    Tool("a", {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}),
    Tool("b", {"type": "object", "properties": {}, "additionalProperties": False}),
]
# A call of "a", what a call of "b" adds to it, and what ends both.
CALLS = {
    HERMES: (
        '<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>',
        '\n<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>',
        "",
    ),
    LLAMA3: ('{"name": "a", "parameters": {"x": 1}}', '; {"name": "b", "parameters": {}}', ""),
    MISTRAL: ('[TOOL_CALLS][{"name": "a", "arguments": {"x": 1}}', ', {"name": "b", "arguments": {}}', "]"),
    ARGS: ('[TOOL_CALLS]a[ARGS]{"x": 1}', "[TOOL_CALLS]b[ARGS]{}", ""),
    XML: (qwen("a", x="1"), f"\n{qwen('b')}", ""),
    GLM: (
        "<tool_call>a\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "\n<tool_call>b\n</tool_call>",
        "",
    ),
    V3: (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{"x": 1}\n```<｜tool▁call▁end｜>',
        "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>b\n```json\n{}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    V31: (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>',
        "<｜tool▁call▁begin｜>b<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    KIMI: (
        "<|tool_calls_section_begin|>"
        '<|tool_call_begin|>functions.a:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>',
        "<|tool_call_begin|>functions.b:1<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    PYTHONIC: ("[a(x=1)", ", b()", "]"),
    HARMONY: (harmony("commentary to=functions.a <|constrain|>json", '{"x": 1}'), "", ""),
}
SPECIAL = sorted(
    {marker for name in (MISTRAL, ARGS, LLAMA3, V3, KIMI, HARMONY) for marker in TOOL_FORMATS[name].markers}
)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer to which the markers of some formats are special tokens."""
    from text_model import make_tokenizer
    from tokenizers import AddedToken

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in (*SPECIAL, "[/THINK]")])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def matches(tokenizer_file: Path, lark: str, text: str) -> bool:
    """Return whether the worker's compiler lets a whole text be generated."""
    from tokenizers import Tokenizer

    from quire.worker.sampling.grammar_trial import load_tokenizer, make_matcher, translate

    raw = Tokenizer.from_file(str(tokenizer_file))
    compiler = load_tokenizer(tokenizer_file, vocab_size=raw.get_vocab_size(), end_token_ids=[raw.token_to_id("</s>")])
    matcher = make_matcher(compiler, translate("lark", lark))
    assert not matcher.is_error(), matcher.get_error()
    token_ids = raw.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def lark_of(tokenizer_file: Path, format: str, tools: list[Tool], *, parallel: bool, thinks: str | None = None) -> str:
    """Return the grammar of calls; thinks: the format of the reasoning that the prompt began."""
    from tokenizers import Tokenizer

    raw = Tokenizer.from_file(str(tokenizer_file))
    answers = AnswerFormat(TOOL_FORMATS[format], None if thinks is None else REASONING_FORMATS[thinks])
    special = {each: raw.token_to_id(each) for each in answers.markers if raw.token_to_id(each) is not None}
    return answers.lark(tools, special_ids=special, parallel=parallel, begins_in_reasoning=thinks is not None)


@pytest.mark.parametrize("format", TOOL_FORMATS)
def test_a_grammar_lets_through_calls_that_match_and_no_others(format: str, tokenizer_file: Path) -> None:
    first, second, end = CALLS[format]
    several = lark_of(tokenizer_file, format, TOOLS, parallel=True)
    one = lark_of(tokenizer_file, format, TOOLS, parallel=False)
    assert matches(tokenizer_file, several, first + end)
    assert matches(tokenizer_file, several, first + second + end)
    assert matches(tokenizer_file, one, first + end)
    assert not second or not matches(tokenizer_file, one, first + second + end)
    wrong_value = "json<|message|>{}" if format == HARMONY else None
    assert not matches(tokenizer_file, several, (first + end).replace("1", "true"))
    assert not matches(tokenizer_file, several, first.partition("a")[0] + "c" + first.partition("a")[2] + end)
    assert not matches(tokenizer_file, several, "text " + first + end)
    assert wrong_value is None or not matches(
        tokenizer_file, several, first.replace('json<|message|>{"x": 1}', wrong_value)
    )
    found = [event for event in parse(format, [first + second + end]) if isinstance(event, Arguments)]
    assert found == [A[1], B[1]][: 1 + bool(second)]


@pytest.mark.parametrize("format", TOOL_FORMATS)
def test_a_grammar_writes_arguments_that_the_parser_reads(format: str, tokenizer_file: Path) -> None:
    properties = {
        "city": {"type": "string", "enum": ["Rome", "Oslo"]},
        "note": {"type": "string", "minLength": 2, "maxLength": 30},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "flag": {"type": "boolean"},
        "where": {"$ref": "#/$defs/place"},
    }
    place = {
        "type": "object",
        "properties": {"x": {"type": "number"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["city", "where", "note"],
        "additionalProperties": False,
        "$defs": {"place": place},
    }
    lark = lark_of(tokenizer_file, format, [Tool("a", schema)], parallel=False)
    for seed in range(3):
        text = generate(tokenizer_file, lark, seed)
        [call, arguments] = parse(format, [text], tools=[Tool("a", schema)])
        assert isinstance(call, CallBegan)
        assert isinstance(arguments, Arguments)
        jsonschema.validate(json.loads(arguments.text), schema)


def generate(tokenizer_file: Path, lark: str, seed: int) -> str:
    """Return a text of random tokens that a grammar allows, ended as soon as it may end."""
    import random

    from tokenizers import Tokenizer

    from quire.worker.sampling.grammar_trial import load_tokenizer, make_matcher, translate

    raw, chance = Tokenizer.from_file(str(tokenizer_file)), random.Random(seed)
    end = raw.token_to_id("</s>")
    compiler = load_tokenizer(tokenizer_file, vocab_size=raw.get_vocab_size(), end_token_ids=[end])
    matcher = make_matcher(compiler, translate("lark", lark))
    token_ids: list[int] = []
    for _ in range(5_000):
        if matcher.is_accepting():
            return raw.decode(token_ids, skip_special_tokens=False)
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [each for each in range(raw.get_vocab_size()) if mask >> each & 1 and each != end]
        token_ids.append(chance.choice(allowed))
        assert matcher.consume_token(token_ids[-1])
    raise AssertionError("the text does not end")


@pytest.mark.parametrize("thinks", ["think", "mistral"])
def test_reasoning_that_the_prompt_began_comes_before_a_forced_call(thinks: str, tokenizer_file: Path) -> None:
    call, closing = CALLS[HERMES][0], "</think>" if thinks == "think" else "[/THINK]"
    lark = lark_of(tokenizer_file, HERMES, TOOLS, parallel=False, thinks=thinks)
    assert matches(tokenizer_file, lark, f"Let me see. <tool_call>\n{closing}\n\n{call}")
    assert matches(tokenizer_file, lark, f"{closing}{call}")
    assert not matches(tokenizer_file, lark, call)
    assert not matches(tokenizer_file, lark, f"Let me see.{closing} no")


def test_a_schema_that_refers_to_its_own_definitions_is_taken(tokenizer_file: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/small"}},
        "required": ["x"],
        "$defs": {"small": {"enum": [1, 2]}},
    }
    lark = lark_of(tokenizer_file, HERMES, [Tool("a", schema), TOOLS[1]], parallel=False)
    assert matches(tokenizer_file, lark, CALLS[HERMES][0])
    assert not matches(tokenizer_file, lark, CALLS[HERMES][0].replace("1", "3"))


@pytest.mark.parametrize("format", [XML, GLM, PYTHONIC])
@pytest.mark.parametrize("schema", [{"type": "object", "anyOf": [{}]}, {"$ref": "#/$defs/a"}])
def test_a_schema_without_names_of_arguments_is_refused_where_they_are_needed(
    format: str, schema: dict[str, Any], tokenizer_file: Path
) -> None:
    with pytest.raises(UnwritableSchema, match="'a'"):
        lark_of(tokenizer_file, format, [Tool("a", schema)], parallel=False)


def test_a_pattern_of_a_text_that_is_written_as_it_is_is_refused(tokenizer_file: Path) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "a+"}}}
    with pytest.raises(UnwritableSchema, match="pattern"):
        lark_of(tokenizer_file, XML, [Tool("a", schema)], parallel=False)


def test_a_name_that_needs_escapes_can_not_leave_its_place(tokenizer_file: Path) -> None:
    lark = lark_of(tokenizer_file, HERMES, [Tool('a"\n', {})], parallel=False)
    assert json.dumps(json.dumps('a"\n'))[1:-1] in lark
