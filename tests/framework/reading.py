"""Measure how hard the pages are to read.

    .venv/bin/python tests/framework/reading.py          the grade of each page, then the ten worst sentences
    .venv/bin/python tests/framework/reading.py PAGE…    the same for these pages alone

The grade is Flesch-Kincaid's, by textstat: 0.39 × words per sentence + 11.8 × syllables per word - 15.59. Only prose
counts. Code blocks, tables, headings, comments and the targets of links are left out. A word in backticks counts as
one short word, because the formula would take an identifier for a word of many syllables.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

import pages
from textstat import textstat

# Without sentences of its own: their text is the comments of the protos, or the result of a run.
GENERATED = ("docs/reference/api.md", "docs/reference/models.md")
MIN_WORDS = 5
"""A shorter piece is a label, not a sentence."""


@dataclass(frozen=True, slots=True)
class Sentence:
    page: str
    text: str
    grade: float


def prose(text: str) -> list[str]:
    """Return the paragraphs and list items of a page, without what is no sentence."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"^(\||#|    ).*$", "", text, flags=re.M)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]+`", "code", text)
    text = re.sub(r"^>\s?", "", text, flags=re.M)
    text = re.sub(r"^\s*([-*]|\d+\.) ", "\n\n", text, flags=re.M)
    text = re.sub(r"[*_]{1,2}(\S.*?)[*_]{1,2}", r"\1", text)
    return [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


def sentences(page: str) -> list[Sentence]:
    """Return the sentences of a page that have at least `MIN_WORDS` words."""
    found = []
    for paragraph in prose(pages.read(page)):
        for text in re.split(r"(?<=[.!?:])\s+(?=[A-Z\"(0-9])", paragraph):
            if len(text.split()) >= MIN_WORDS:
                found.append(Sentence(page, text, textstat.flesch_kincaid_grade(text)))
    return found


def grade(page: str) -> float:
    """Return the Flesch-Kincaid grade of a page: 0 for a page without a sentence."""
    text = "\n".join(f"{each.text.rstrip('.:!?')}." for each in sentences(page))
    return float(textstat.flesch_kincaid_grade(text)) if text else 0.0


def main() -> None:
    chosen = sys.argv[1:] or [page for page in pages.PAGES if page not in GENERATED]
    for page in sorted(chosen, key=grade, reverse=True):
        print(f"{grade(page):5.1f}  {page}")
    print("\nthe ten worst sentences")
    worst = sorted((each for page in chosen for each in sentences(page)), key=lambda each: each.grade, reverse=True)
    for each in worst[:10]:
        print(f"{each.grade:5.1f}  {each.page}: {each.text}")


if __name__ == "__main__":
    main()
