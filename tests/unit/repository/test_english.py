"""Plain English: comments and pages begin with a verb or a noun, and relative clauses do not make things persons."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
import syntax
from pages import PAGES, ROOT

BEGINS_WITH_A_RIDDLE = re.compile(r"(?:What|Who(?:se|m|ever)?|Where|Whether)\b")
ABOUT_A_PERSON = re.compile(r"\bwho(?:se|m|ever)\b", re.IGNORECASE)
NAMES_OF_OTHERS = ("--kill-whom",)
"""systemd's flags."""
GENERATED = re.compile(r"_pb2(?:_grpc)?\.pyi?$|cachemgr/core/src/wire/quire\.cache\.v1\.rs$")
RUST_DOC, PROTO_COMMENT = re.compile(r"\s*//[/!] ?"), re.compile(r"\s*// ?")
FENCED_BLOCK = re.compile(r"^(?:```.*?^```|<!--.*?-->)", re.DOTALL | re.MULTILINE)


def sources(*suffixes: str) -> list[Path]:
    """The files of the checkout with these suffixes that are not generated."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *(f"*{suffix}" for suffix in suffixes)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return [ROOT / path for path in listed if not GENERATED.search(path) and (ROOT / path).is_file()]


def is_riddle(paragraph: str) -> bool:
    """True if a paragraph begins with a relative or interrogative word and is no question."""
    return BEGINS_WITH_A_RIDDLE.match(paragraph) is not None and not paragraph.rstrip().endswith("?")


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string of Python code that stands as a statement."""
    for node in ast.walk(syntax.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def comment_paragraphs(text: str, mark: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """First line and text of each paragraph of the comments that begin with this mark."""
    marked = [(number, mark.match(line), line) for number, line in enumerate(text.splitlines(), 1)]
    contents = [(number, line[found.end() :] if found else "") for number, found, line in marked]
    for is_text, lines in groupby(contents, key=lambda each: bool(each[1].strip())):
        if is_text:
            paragraph = list(lines)
            yield paragraph[0][0], " ".join(content for _, content in paragraph)


def page_paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """First line and text of each paragraph and item of a page, without titles, tables and blocks of code."""
    prose = FENCED_BLOCK.sub(lambda found: "\n" * found[0].count("\n"), text)
    for number, line, before in zip(range(1, 10**6), prose.splitlines(), ["", *prose.splitlines()], strict=False):
        begins = re.match(r"\s*(?:[-*] |\d+\. )", line)
        if (begins or not before.strip()) and not line.startswith("#"):
            yield number, line.lstrip(" -*0123456789.")


def riddles(paths: list[Path], mark: re.Pattern[str] | None = None) -> list[str]:
    """Places of docstrings, or of comments with this mark, that begin with a riddle."""
    found = []
    for path in paths:
        text = path.read_text()
        texts = docstrings(text) if mark is None else comment_paragraphs(text, mark)
        found += [f"{path.relative_to(ROOT)}:{line}: {each[:60]}" for line, each in texts if is_riddle(each.lstrip())]
    return found


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    assert riddles(sources(".py", ".pyi")) == []


def test_comments_of_the_core_begin_with_a_verb_or_a_noun() -> None:
    assert riddles(sources(".rs"), RUST_DOC) == []


def test_comments_of_the_protos_begin_with_a_verb_or_a_noun() -> None:
    assert riddles(sources(".proto"), PROTO_COMMENT) == []


@pytest.mark.parametrize("page", PAGES)
def test_paragraphs_of_a_page_begin_with_a_verb_or_a_noun(page: str) -> None:
    found = [(line, text[:60]) for line, text in page_paragraphs((ROOT / page).read_text()) if is_riddle(text)]
    assert found == []


def test_things_are_no_persons() -> None:
    found = []
    for path in sources(".py", ".pyi", ".rs", ".proto"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for name in NAMES_OF_OTHERS:
                line = line.replace(name, "")
            if ABOUT_A_PERSON.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert found == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What a worker sends.", True),
        ("Whether it is open, a flag.", True),
        ("What does a worker send?", False),
        ("Whatsoever", False),
        ("Return the blocks.", False),
    ],
)
def test_a_riddle_is_found(text: str, expected: bool) -> None:
    assert is_riddle(text) is expected


def test_each_kind_of_text_is_read() -> None:
    python = '"""Module."""\nlimit = 1\n"""What it is."""\ndef f():\n    """Where it is."""\n'
    assert [text for _, text in docstrings(python) if is_riddle(text)] == ["What it is.", "Where it is."]
    rust = "//! Module.\n//!\n//! Who holds it.\n\n/// A pool,\n/// what it is.\n\nfn f() {} // What\n"
    assert [text for _, text in comment_paragraphs(rust, RUST_DOC) if is_riddle(text)] == ["Who holds it."]
    page = "# What is it?\n\nWhat it is.\nWhat goes on.\n\n- Where it is\n\n```\n\nWhat runs.\n```\n"
    assert [line for line, text in page_paragraphs(page) if is_riddle(text)] == [3, 6]
