"""`quire chat`, against a gateway for a model with a chat template."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from gateway.chat_templates import GLM
from gateway.conftest import ROOT, Gateway

from quire.cli.launch import LocalServices

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def chatty(services: LocalServices, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("chat")
    (folder / "template").write_text(TEMPLATE)
    flags = ("--chat-template", str(folder / "template"))
    gateway = Gateway(services.cachemgr_address, *flags, log=folder / "log")
    yield gateway
    gateway.close()


def chat(url: str, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "quire.cli", "chat", "--url", url, *flags]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_each_line_is_answered_in_one_conversation(chatty: Gateway) -> None:
    flags = ("--max-tokens", "12", "--temperature", "0")
    done = chat(chatty.url, "What is a tensor?\n/clear\nWhat is a tensor?\n\n", *flags)
    assert done.returncode == 0, done.stderr
    once = chat(chatty.url, "What is a tensor?\n", *flags).stdout
    assert once.strip()
    assert done.stdout == 2 * once


def test_what_is_wrong_is_one_line(chatty: Gateway, services: LocalServices, tmp_path: Path) -> None:
    bare = tmp_path / "tokenizer.json"
    bare.write_bytes((ROOT / "deploy/demo/model/tokenizer.json").read_bytes())
    gateway = Gateway(services.cachemgr_address, "--tokenizer", str(bare), log=tmp_path / "log")
    try:
        said = chat(gateway.url, "hello\n")
    finally:
        gateway.close()
    assert said.returncode == 1
    assert "--chat-template" in said.stderr
    said = chat(chatty.url, "hello\n", "--model", "another")
    assert said.returncode == 1
    assert "'another' is not served here" in said.stderr
    said = chat("http://127.0.0.1:1", "hello\n")
    assert said.returncode == 1
    assert "no gateway answers at http://127.0.0.1:1" in said.stderr
    assert said.stderr.count("\n") <= 2


def test_reasoning_goes_to_stderr_and_is_no_answer(services: LocalServices, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(GLM)
    gateway = Gateway(services.cachemgr_address, "--chat-template", str(template), log=tmp_path / "log")
    try:
        done = chat(gateway.url, "hello\n", "--max-tokens", "8", "--temperature", "0")
        assert done.returncode == 0
        assert done.stderr.strip()
        assert done.stdout.strip() == ""
    finally:
        gateway.close()
