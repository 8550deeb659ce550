"""The text of --help of the servers."""

from __future__ import annotations

import re

import click
import pytest
from click.testing import CliRunner

from quire.cachemgr.__main__ import main as cachemgr
from quire.serving.manual import OWN, SECTIONS, section_of
from quire.worker.__main__ import main as worker


@pytest.mark.parametrize("command", [cachemgr, worker], ids=["cachemgr", "worker"])
def test_every_flag_is_there_once_and_in_its_section(command: click.Command) -> None:
    name = f"quire {command.name}"
    text = CliRunner().invoke(command, ["--help"], prog_name=name, env={"COLUMNS": "100"}).output
    assert text.startswith(f"Usage: {name} [OPTIONS]")
    sections = dict(re.findall(r"^([A-Z][A-Za-z ]+):\n((?:  .*\n|\n)+)", text, re.M))
    assert list(sections)[-4:] == ["Signals", "Exit status", "Environment", "Files"]
    for parameter in command.params:
        (flag,) = parameter.opts
        listed = [title for title, body in sections.items() if re.search(rf"^  {flag}\b(?!-)", body, re.M)]
        assert [title for title in listed if title != "Files"] == [section_of([flag])], flag
    assert not re.search(r"RANGE|\b(TEXT|INTEGER)\b", text), "a value has a name that says what it is"
    assert max(map(len, text.splitlines())) <= 100


def test_what_is_like_nothing_else_is_the_servers_own() -> None:
    assert section_of(["--model"]) == OWN
    assert {section_of([flag]) for _, beginnings in SECTIONS for flag in beginnings} == {title for title, _ in SECTIONS}
