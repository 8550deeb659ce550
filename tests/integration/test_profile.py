"""`quire worker --profile`: a Chrome trace of the steps that were asked for."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from quire.cli.launch import LocalServices
from quire.client import Engine, SamplingParams
from quire.worker.__main__ import main
from quire.worker.flags import StepRange

PHASES = ["apply grant", "prepare batch", "forward", "sample", "read tokens"]


async def run(model: Path, *flags: str) -> None:
    """Eight tokens of one prompt, and the end of both services."""
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    async with (
        LocalServices(model=model, num_blocks=64, extra_worker_args=flags) as services,
        Engine.connect(services.cachemgr_address) as engine,
    ):
        await engine.complete([[5, 6, 7]], params)


def ranges(path: Path) -> list[dict[str, Any]]:
    """The trace's named ranges, by their begin."""
    events = json.loads(path.read_text())["traceEvents"]
    return sorted((event for event in events if event.get("cat") == "user_annotation"), key=lambda event: event["ts"])


def steps_in(path: Path) -> list[str]:
    return [event["name"] for event in ranges(path) if event["name"].startswith("step ")]


def inside(found: list[dict[str, Any]], outer: dict[str, Any]) -> list[str]:
    """Names of the ranges within another, itself left out."""
    end = outer["ts"] + outer["dur"]
    return [
        event["name"]
        for event in found
        if event is not outer and outer["ts"] <= event["ts"] and event["ts"] + event["dur"] <= end
    ]


def test_a_trace_has_the_steps_that_were_asked_for_with_their_phases(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    asyncio.run(run(model_dir, "--profile", str(path), "--profile-steps", "3:2"))
    found = ranges(path)
    assert steps_in(path) == ["step 3", "step 4"]
    for step in (event for event in found if event["name"].startswith("step ")):
        names = inside(found, step)
        assert [name for name in names if name in PHASES] == PHASES
        layers = [name for name in names if name.startswith("attention")]
        assert layers == [f"attention {index}" for index in range(len(layers))] != []


def test_a_worker_that_ends_before_writes_what_it_has(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    asyncio.run(run(model_dir, "--profile", str(path), "--profile-steps", "5:1000"))
    assert steps_in(path)[0] == "step 5"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--profile", "{folder}/none/trace.json"), "none' is not a folder that can be written to"),
        (("--profile", "{folder}"), "is a directory"),
        (("--profile", "{folder}/trace.json", "--profile-steps", "0:5"), "'0:5' is not FIRST:COUNT"),
        (("--profile", "{folder}/trace.json", "--profile-steps", "a:b"), "'a:b' is not FIRST:COUNT"),
    ],
)
def test_flags_are_checked_at_the_start(flags: tuple[str, ...], said: str, tmp_path: Path) -> None:
    given = [flag.format(folder=tmp_path) for flag in flags]
    done = CliRunner().invoke(main, ["--model", str(tmp_path / "no-model"), *given])
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_steps_are_a_first_and_a_count() -> None:
    assert StepRange().convert("20:10", None, None) == (20, 10)
    assert StepRange().convert("7", None, None) == (7, 1)
