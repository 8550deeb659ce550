"""Compiles grammars in a process of its own, which may be killed: nothing bounds llguidance's time, memory and stack.

    python -m quire.worker.sampling.grammar_trial TOKENIZER VOCAB_SIZE END_TOKEN_IDS

TOKENIZER is a tokenizer.json, END_TOKEN_IDS a list of integers as JSON. The first line of the output is {}: the process
is ready. A line of the input is {"kind", "text"} as JSON. The line that answers it is {"grammar"}, as llguidance takes
it, or {"error"}. The process ends with its input.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

STACK_BYTES = 256 * 2**20
"""The stack of a compiling thread: a chain of as many rules as fit a grammar overflows the usual 8 MiB."""
MEMORY_BYTES = 2**30
"""The most memory that compiling may take, without the tokenizer."""

NUM_TRIED_TOKENS = 8
"""Tokens of a text that is generated to find out if one exists."""

# White space between tokens of JSON. A model that is unsure can fall into it, so there is none but a space by default.
COMPACT = {"whitespace_pattern": r"\x20?"}
INDENTED = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,32}"}


def load_tokenizer(path: Path, *, vocab_size: int, end_token_ids: list[int]) -> LLTokenizer:
    """Return llguidance's tokenizer for logits of this width. Raises OSError, ValueError."""
    return LLTokenizer(path.read_text(encoding="utf-8"), n_vocab=vocab_size, eos_token=end_token_ids)


def make_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher at the beginning of a text; it may be in its error state."""
    limits = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


@contextmanager
def large_stacks() -> Iterator[None]:
    """Threads that are started in the block have STACK_BYTES of stack."""
    usual = threading.stack_size(STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(usual)


def translate(kind: str, text: str) -> str:
    """Return a grammar as llguidance takes it. Raises ValueError."""
    match kind:
        case "json_schema":
            text = _object_of(text)
            return LLMatcher.grammar_from_json_schema(text, defaults=_defaults_of(text))  # type: ignore[arg-type]
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=COMPACT)  # type: ignore[arg-type]
        case "choice":
            texts = (json.dumps(each, ensure_ascii=False) for each in json.loads(text))
            return LLMatcher.grammar_from_lark("start: " + " | ".join(texts))
        case "ebnf":
            return grammar_from("ebnf", text)
        case "lark":
            return LLMatcher.grammar_from_lark(text)
        case _:
            return LLMatcher.grammar_from_regex(text)


def _object_of(schema: str) -> str:
    """Return a schema that is an object: `true` allows what an empty one allows. Raises ValueError."""
    parsed = json.loads(schema)  # its messages name a place in this text
    if parsed is True:
        return "{}"
    if not isinstance(parsed, dict):
        raise ValueError("nothing matches the schema false" if parsed is False else "a schema is an object, or true")
    return schema


def _defaults_of(schema: str) -> dict[str, str]:
    """Return the white space that a schema asks for; nothing if it allows none, which a pattern would win against."""
    options = json.loads(schema).get("x-guidance")
    is_flexible = options.get("whitespace_flexible") if isinstance(options, dict) else None
    if is_flexible is False:
        return {}
    return INDENTED if is_flexible else COMPACT


def find_error(tokenizer: LLTokenizer, grammar: str) -> str:
    """Return why a text can't be generated from a grammar, as far as its first tokens show; "" if nothing is found."""
    matcher = make_matcher(tokenizer, grammar)
    for _ in range(NUM_TRIED_TOKENS):
        if matcher.is_error():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error() or matcher.is_stopped():
            break
        for end_token_id in tokenizer.eos_tokens:
            mask &= ~(1 << end_token_id)
        if not mask:
            return "" if matcher.is_accepting() else "no token can continue the text"
        matcher.consume_token((mask & -mask).bit_length() - 1)
    return describe(matcher.get_error()) if matcher.is_error() else ""


def describe(error: str) -> str:
    """Return llguidance's message, at most 500 characters, for a caller to read."""
    if error.startswith("NoExtension"):
        return f"no token can continue the text ({error.split()[0]})"
    return error.replace("<non-verbose/>", "").strip()[:500]


def _answer(tokenizer: LLTokenizer, line: str) -> dict[str, str]:
    request = json.loads(line)
    try:
        grammar = translate(request["kind"], request["text"])
    except (ValueError, RecursionError) as error:
        return {"error": describe(str(error))}
    error_text = find_error(tokenizer, grammar)
    return {"error": error_text} if error_text else {"grammar": grammar}


def _bound_memory() -> None:
    used = (
        int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if sys.platform == "linux" else 0
    )
    limit = used + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    """Answer lines until the input ends, which is when the worker has ended."""
    path, vocab_size, end_token_ids = sys.argv[1:]
    tokenizer = load_tokenizer(Path(path), vocab_size=int(vocab_size), end_token_ids=json.loads(end_token_ids))
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def answer_all() -> None:
        while True:
            print(json.dumps(_answer(tokenizer, lines.get())), flush=True)

    with large_stacks():
        threading.Thread(target=answer_all, name="grammars", daemon=True).start()
    _bound_memory()
    print("{}", flush=True)
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
