"""Shows a bug of ours on the commit before its mend, and that the mend ended it.

    python tests/robustness/track_record.py                  lists the entries of track_record.csv
    python tests/robustness/track_record.py show NAME        runs the tests of an entry before its mend and on it
    python tests/robustness/track_record.py show NAME --record      also writes into track_record.csv what was seen
    python tests/robustness/track_record.py page             writes the tables of docs/reference/track-record.md

`show` exits with 0 if the tests fail before the mend and pass on it. See old_commits.py for what it builds.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

# isort: split
import old_commits
from old_commits import ROOT, Result

ENTRIES = Path(__file__).with_suffix(".csv")
BUGS = ROOT / "tests/README.md"
PAGE = ROOT / "docs/reference/track-record.md"
BEGIN = "<!-- `python tests/robustness/track_record.py page` writes these tables -->\n\n"
END = "\n<!-- the tables end here -->\n"

SHOWS = "shows"
PASSES = "does not show"
NEEDS_MEND = "can't tell"
FAILS = "can't run"
NO_COMMAND = "no command"
NOT_RUN = "not run"
OUTCOMES = {
    SHOWS: "the test fails before the mend, as the last column quotes, and passes on it",
    PASSES: "the test passes before the mend as well",
    NEEDS_MEND: "the test fails before the mend, but by another cause: mostly it uses a name that the mend added",
    FAILS: "the test does not run on one of the two commits today",
    NOT_RUN: "there is a command, and nobody has run it yet",
    NO_COMMAND: "there is nothing to run, for the reason given",
}

# What a test says that uses a name, an argument or a file of the mend.
OTHER_SHAPE = re.compile(
    r"AttributeError|ImportError|ModuleNotFoundError|NameError|FileNotFoundError|No such option|no such test"
    r"|TypeError: \S+ (got an unexpected keyword|missing|takes)|TypeError: expected exception must be"
    r"|has no len\(\)|should be called on dataclass instances|ended with status [12] at start|fixture '\w+' not found"
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A bug, the commit that mended it, and tests as of that commit."""

    name: str
    bug: str
    """The first words of the bug's row in tests/README.md."""
    mend: str
    tests_of: str
    """A later commit that has the tests, if the mend has none."""
    tests: str
    """Parted by spaces: node ids of pytest, or file::test of the crate."""
    outcome: str
    seen: str
    """The words of the test before the mend; for an entry without a mend, the reason."""


def read_entries() -> list[Entry]:
    """Return all entries, in the order of the table in tests/README.md."""
    with ENTRIES.open(newline="") as file:
        return [Entry(**row) for row in csv.DictReader(file)]


def write_entries(entries: list[Entry]) -> None:
    """Replace the file of entries."""
    with ENTRIES.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields(Entry)])
        writer.writerows(astuple(entry) for entry in entries)


def read_bugs() -> list[str]:
    """Return the first cell of each row of the table of bugs."""
    _, _, table = BUGS.read_text().partition("\n## Bugs found\n")
    return re.findall(r"^\| (.+?) \| ", table, re.M)[2:]


def show(entry: Entry) -> Entry:
    """Run the tests of an entry on both commits. Returns the entry with what was seen."""
    before, behind = (
        old_commits.run_on(commit, entry.tests.split(), tests_of=entry.tests_of or entry.mend)
        for commit in (f"{entry.mend}^", entry.mend)
    )
    print(f"before the mend: {describe(before)}\non the mend {entry.mend}: {describe(behind)}")
    return replace(entry, **dict(zip(("outcome", "seen"), judge(before, behind), strict=True)))


def describe(result: Result) -> str:
    verdict = {True: "passes", False: "fails", None: "does not run"}[result.passed]
    return f"{verdict}: {result.said}" if result.said else verdict


def judge(before: Result, behind: Result) -> tuple[str, str]:
    """Return the outcome of both runs, and its reason."""
    if not behind.passed:
        return FAILS, f"on the mend: {behind.said}"
    if before.passed is None:
        return (NEEDS_MEND if OTHER_SHAPE.search(before.said) else FAILS), before.said
    if before.passed:
        return PASSES, ""
    return (NEEDS_MEND if OTHER_SHAPE.search(before.said) else SHOWS), before.said


def tables(entries: list[Entry]) -> str:
    """Return the tables of the page: how many entries have which outcome, those with a command, those without."""
    bugs = read_bugs()
    counts = [f"| {name} | {sum(entry.outcome == name for entry in entries)} | {OUTCOMES[name]} |" for name in OUTCOMES]
    shown = [
        f"| {entry.name} | {row_of(entry, bugs)} | `{entry.mend}` | {entry.outcome} | {quoted(entry.seen)} |"
        for entry in entries
        if entry.mend
    ]
    others = [f"| {row_of(entry, bugs)} | {entry.seen} |" for entry in entries if not entry.mend]
    return "\n".join(
        [
            *("| outcome | bugs | meaning |", "| --- | --- | --- |", *counts, ""),
            *("| name | bug | mend | outcome | the test's words |", "| --- | --- | --- | --- | --- |", *shown, ""),
            *("| bug without a command | reason |", "| --- | --- |", *others, ""),
        ]
    )


def row_of(entry: Entry, bugs: list[str]) -> str:
    """Return the words of tests/README.md about a bug."""
    return next(bug for bug in bugs if bug.startswith(entry.bug))


def quoted(said: str) -> str:
    """Return a text as code in a cell of a table."""
    return f"`{said.replace('`', '').replace('|', chr(92) + '|')}`" if said else ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Shows bugs of ours on the commits before their mends.")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("page", help="write the tables of the page")
    show_parser = commands.add_parser("show", help="run the tests of entries before their mends and on them")
    show_parser.add_argument("names", nargs="+", metavar="NAME")
    show_parser.add_argument("--record", action="store_true", help="write into track_record.csv what was seen")
    arguments = parser.parse_args()
    if arguments.command == "show":
        return show_all(arguments.names, is_recorded=arguments.record)
    if arguments.command == "page":
        write_page()
        return 0
    for entry in read_entries():
        print(f"{entry.name:32} {entry.mend:8} {entry.outcome:14} {entry.bug} …")
    return 0


def write_page() -> None:
    """Put the tables between the two marks of the page."""
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, behind = rest.partition(END)
    PAGE.write_text(f"{before}{begin}{tables(read_entries())}{end}{behind}")


def show_all(names: list[str], *, is_recorded: bool) -> int:
    """Show entries by their names. Returns 1 if a bug does not show."""
    known = {entry.name: entry for entry in read_entries() if entry.mend}
    if unknown := [name for name in names if name not in known]:
        print(f"no entry has the name {', '.join(unknown)}: without arguments all are listed", file=sys.stderr)
        return 2
    outcomes = []
    for name in names:
        print(f"{name}: {known[name].bug} …")
        seen = show(known[name])
        outcomes.append(seen.outcome)
        print(seen.outcome, flush=True)
        if is_recorded:
            write_entries([seen if entry.name == name else entry for entry in read_entries()])
    return int(set(outcomes) != {SHOWS})


if __name__ == "__main__":
    sys.exit(main())
