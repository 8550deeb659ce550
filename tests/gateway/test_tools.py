"""Tool calls in text, cut everywhere, and the grammars of calls. No process is started."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from gateway.chat_templates import BY_NAME

from quire.gateway.chat.tools import (
    Arguments,
    CallBegan,
    CallParser,
    Event,
    Text,
    Tool,
    ToolFormat,
    find_format,
    lark_of_calls,
)

HERMES, LLAMA3, MISTRAL = ToolFormat.HERMES, ToolFormat.LLAMA3, ToolFormat.MISTRAL
A = CallBegan("a"), Arguments('{"x": 1}')
B = CallBegan("b"), Arguments("{}")

CASES: list[tuple[ToolFormat, str, list[Event]]] = [
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
]
# Texts that are no call of a tool on offer: they come out as they are.
TEXTS = [
    (HERMES, "no calls here "),
    (HERMES, " \n "),
    (HERMES, "<tool_call>"),
    (HERMES, "a <tool_cal"),
    (HERMES, "<tool_call> nothing </tool_call>\n"),
    (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "a"}</tool_call>'),
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
]


def parse(format: ToolFormat, pieces: list[str], *, parallel: bool = True) -> list[Event]:
    """Return the found pieces, adjacent ones of one kind joined."""
    parser = CallParser(format, {"a", "b"}, parallel=parallel)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Text | Arguments) and isinstance(last, type(event)):
            joined[-1] = type(event)(last.text + event.text)
        else:
            joined.append(event)
    return joined


def cuts_of(text: str) -> list[list[str]]:
    """Return the text letter by letter, and in all pairs and triples of pieces."""
    places = range(len(text) + 1)
    ways = [(0, i, j, len(text)) for i in places for j in places[i:]]
    return [list(text), *([text[i:j] for i, j in pairwise(way)] for way in ways)]


@pytest.mark.parametrize(("format", "text", "expected"), CASES)
def test_a_call_is_found_however_its_text_is_cut(format: ToolFormat, text: str, expected: list[Event]) -> None:
    for pieces in cuts_of(text):
        assert parse(format, pieces) == expected, pieces


@pytest.mark.parametrize(("format", "text"), TEXTS)
def test_text_that_is_no_call_is_kept_to_the_last_letter(format: ToolFormat, text: str) -> None:
    for pieces in cuts_of(text):
        assert parse(format, pieces) == [Text(text)], pieces


def test_arguments_come_while_they_are_written() -> None:
    parser = CallParser(HERMES, {"a"})
    assert parser.push('<tool_call>{"name": "a", "arguments": ') == []
    assert parser.push('{"x": [1') == [CallBegan("a"), Arguments('{"x": [1')]
    assert parser.push(", 2]") == [Arguments(", 2]")]


def test_text_comes_while_it_can_be_no_call() -> None:
    parser = CallParser(HERMES, {"a"})
    assert parser.push("one two<to") == [Text("one two")]
    assert parser.push("ken> ") == [Text("<token>")]


@pytest.mark.parametrize("format", ToolFormat)
def test_without_parallel_calls_the_first_one_counts(format: ToolFormat) -> None:
    text = next(text for each, text, events in CASES if each is format and events == [*A, *B])
    assert parse(format, [text], parallel=False) == [*A]


@pytest.mark.parametrize(
    ("name", "format"), [("chatml", HERMES), ("llama3", LLAMA3), ("mistral", MISTRAL), ("gemma", HERMES)]
)
def test_the_format_is_found_in_the_template(name: str, format: ToolFormat) -> None:
    assert find_format(BY_NAME[name]) is format


# -- grammars -----------------------------------------------------------------------------------------------------

TOOLS = [
    Tool("a", {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}),
    Tool("b", {"type": "object", "properties": {}, "additionalProperties": False}),
]
CALLS = {
    HERMES: (
        '<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>',
        '\n<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>',
    ),
    LLAMA3: ('{"name": "a", "parameters": {"x": 1}}', '; {"name": "b", "parameters": {}}'),
    MISTRAL: ('[TOOL_CALLS][{"name": "a", "arguments": {"x": 1}}', ', {"name": "b", "arguments": {}}'),
}


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer to which the markers of Mistral and Llama are special tokens."""
    from text_model import make_tokenizer
    from tokenizers import AddedToken

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in ("[TOOL_CALLS]", "<|python_tag|>")])
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
    token_ids = raw.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize("format", ToolFormat)
def test_a_grammar_lets_through_calls_that_match_and_no_others(format: ToolFormat, tokenizer_file: Path) -> None:
    from tokenizers import Tokenizer

    raw = Tokenizer.from_file(str(tokenizer_file))
    special = {each: raw.token_to_id(each) for each in format.markers if raw.token_to_id(each) is not None}
    first, second = CALLS[format]
    end = "]" if format is MISTRAL else ""
    several = lark_of_calls(format, TOOLS, special_ids=special, parallel=True)
    one = lark_of_calls(format, TOOLS, special_ids=special, parallel=False)
    assert matches(tokenizer_file, several, first + end)
    assert matches(tokenizer_file, several, first + second + end)
    assert matches(tokenizer_file, one, first + end)
    assert not matches(tokenizer_file, one, first + second + end)
    assert not matches(tokenizer_file, several, (first + end).replace("1", "true"))
    assert not matches(tokenizer_file, several, (first + end).replace('"a"', '"c"'))
    assert not matches(tokenizer_file, several, "text " + first + end)
    assert parse(format, [first + second + end]) == [*A, *B]


def test_a_schema_that_refers_to_its_own_definitions_is_taken(tokenizer_file: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/small"}},
        "required": ["x"],
        "$defs": {"small": {"enum": [1, 2]}},
    }
    lark = lark_of_calls(HERMES, [Tool("a", schema), TOOLS[1]], special_ids={}, parallel=False)
    assert matches(tokenizer_file, lark, CALLS[HERMES][0])
    assert not matches(tokenizer_file, lark, CALLS[HERMES][0].replace("1", "3"))


def test_a_name_that_needs_escapes_can_not_leave_its_place() -> None:
    lark = lark_of_calls(HERMES, [Tool('a"\n', {})], special_ids={}, parallel=False)
    assert json.dumps(json.dumps('a"\n'))[1:-1] in lark
