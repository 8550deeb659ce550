"""Scheduling policies of the engine's users, over real services."""

from __future__ import annotations

import asyncio
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli.launch import LocalServices
from quire.client import PriorityPolicy

EXAMPLE = Path(__file__).parents[2] / "client" / "examples" / "first_come_first_served.py"


def test_the_example_serves_first_come_first_served() -> None:
    done = subprocess.run([sys.executable, "-P", str(EXAMPLE)], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["first", "second"], done.stdout + done.stderr


def test_by_default_the_higher_priority_of_the_same_requests_ends_first(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLE))
    with LocalServices.start(model=example["MODEL"], num_blocks=16) as services:
        asyncio.run(example["show_order"](services.cachemgr_address, PriorityPolicy()))
    assert capsys.readouterr().out.split() == ["second", "first"]
