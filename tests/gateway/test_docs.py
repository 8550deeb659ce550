"""The examples of the README, the start and the HTTP pages; the shared gateway is in place of the one of `quire up`."""

from __future__ import annotations

import subprocess

import pages
import pytest
from deadlines import DEADLINE_S
from gateway.conftest import Gateway
from pages import SHELL, Block

THIS = "tests/gateway/test_docs.py"
DEFAULT = "http://127.0.0.1:8000"
PAGES = (
    "README.md",
    "docs/start/serve-a-model.md",
    "docs/start/first-client.md",
    "docs/how-to/use-your-client.md",
    "docs/reference/http.md",
)
BLOCKS = [block for page in PAGES for block in pages.blocks(page) if block.test == THIS]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_examples(block: Block, gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    assert DEFAULT in block.text
    text = block.text.replace(DEFAULT, gateway.url)
    if block.language in SHELL:
        for line in text.splitlines():
            said = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
            assert '"error"' not in said.stdout
            assert said.stdout
    else:
        exec(compile(text, block.place, "exec"), {})
        assert capsys.readouterr().out
