"""The pages that users read, and the code blocks on them.

A line before a block says what becomes of it:

    <!-- tests/integration/test_docs.py runs this -->        this test executes the block
    <!-- not run: it needs root -->                          nothing does, and why

Or a line before the first block of a page, for all of them:

    <!-- tests/conformance/test_grpcurl.py runs every block -->
    <!-- no block is run: each takes minutes -->

Blocks of the language `text` are for the eye: a diagram, a log line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    *("README.md", "CONTRIBUTING.md", "client/go/README.md"),
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))),
)
SHELL = ("", "bash", "console")
_FENCE = re.compile(r"^```(\w*)$")
_RUNS, _NOT_RUN = re.compile(r"<!-- (\S+) runs this -->"), re.compile(r"<!-- not run: (.+) -->")
_RUNS_ALL, _NONE_RUN = re.compile(r"<!-- (\S+) runs every block -->"), re.compile(r"<!-- no block is run: (.+) -->")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its first line's number on the page, its language, "" if it names none."""

    page: str
    line: int
    language: str
    text: str
    test: str | None
    """The file that runs it."""
    reason: str | None
    """Why nothing runs it."""

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """The commands of a shell block without comments, joined where a backslash ends a line."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [command for line in lines if (command := re.sub(r"(^|\s)#.*", "", line).strip())]


def read(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str) -> list[Block]:
    """All of a page, in order. Raises ValueError if one is not closed, or begins otherwise."""
    return list(_blocks(page, read(page).splitlines()))


def block(page: str, *, test: str, language: str | None = None, containing: str = "") -> Block:
    """The one block of a page that this test runs. Raises ValueError if there is none, or more."""
    (found,) = [
        each
        for each in blocks(page)
        if each.test == test and language in (None, each.language) and containing in each.text
    ]
    return found


def _blocks(page: str, lines: list[str]) -> Iterator[Block]:
    of_page, begin, language = "", None, ""
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if line.lstrip().startswith(("```", "~~~")) and fence is None:
            raise ValueError(f"{page}:{number}: a fence is three backticks at the line's beginning, and a language")
        if begin is None and fence is None:
            of_page = line if _RUNS_ALL.fullmatch(line) or _NONE_RUN.fullmatch(line) else of_page
        elif begin is None and fence is not None:
            begin, language = number, fence[1]
        elif begin is not None and line == "```":
            before = lines[begin - 2] if begin >= 2 else ""
            test = _RUNS.fullmatch(before) or _RUNS_ALL.fullmatch(of_page)
            reason = _NOT_RUN.fullmatch(before) or _NONE_RUN.fullmatch(of_page)
            text = "".join(f"{each}\n" for each in lines[begin : number - 1])
            yield Block(page, begin, language, text, test and test[1], reason and reason[1])
            begin = None
    if begin is not None:
        raise ValueError(f"{page}:{begin}: the block is not closed")
