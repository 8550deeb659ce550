"""Commands on a page of docs/, and their expected output.

    ```console
    $ a command
    what it says
    ```

A line that begins with "$ " is a command; the lines after it, up to the next one or the end of the block, are its
output, stdout and stderr in order. "…" stands for any text within a line.
"""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from deadlines import DEADLINE_S

_MARK = "--- the end of a command ---"
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Command:
    """A command and its output as the page has it, without the last newline."""

    text: str
    output: str

    @property
    def only_looks(self) -> bool:
        """True if it may be run again: it only calls methods that change nothing."""
        return re.search(r"\b(Get|List|Lookup)[A-Z]\w+", self.text) is not None

    def agrees_with(self, said: str) -> bool:
        """True if this is the output on the page."""
        pattern = ".*".join(re.escape(part) for part in self.output.split("…"))
        return re.fullmatch(pattern, said) is not None


def commands(page: str) -> list[Command]:
    """All of a page, in order."""
    return [command for block in _BLOCK.findall(page) for command in _commands_of(block)]


def _commands_of(block: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        text, _, output = part.partition("\n")
        yield Command(text, output.rstrip())


class Shell:
    """One bash for all commands of a page, so that variables and functions stay."""

    def __init__(self, *, environment: Mapping[str, str], folder: Path) -> None:
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: str) -> str:
        """The command's output, without the last newline.

        Raises AssertionError if the shell has ended afterwards, or the command has not after DEADLINE_S.
        """
        limit = threading.Timer(DEADLINE_S, self._process.kill)
        limit.start()
        try:
            return self._run(command)
        finally:
            limit.cancel()

    def _run(self, command: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{{ {command}\n}} < /dev/null 2>&1\necho '{_MARK}'\n")
        self._process.stdin.flush()
        said = []
        for line in self._process.stdout:
            if line == f"{_MARK}\n":
                return "".join(said).rstrip()
            said.append(line)
        raise AssertionError(f"the shell has ended with {self._process.wait()} at: {command}\n{''.join(said)}")

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.communicate()
