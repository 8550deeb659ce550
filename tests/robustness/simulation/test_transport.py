"""The simulated transport against real gRPC: each script of a client and a server sees the same on both."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from robustness.simulation.comparison import flow_scripts, stream_scripts, unary_scripts
from robustness.simulation.comparison.scripting import scripts_of
from robustness.simulation.comparison.stages import RealStage, Script, kept_worlds, play_real, play_simulated
from robustness.simulation.comparison.unary_scripts import meet_a_killed_server, server_restarts

SCRIPTS = scripts_of(unary_scripts, stream_scripts, flow_scripts)
NUM_SEEDS = 20
MOST_REAL_RUNS = 5
"""A busy machine can be late for a script that gives everything some time to happen."""


@pytest.fixture(autouse=True, scope="module")
def _kept() -> Iterator[None]:
    with kept_worlds():
        yield


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_script_sees_the_same_over_grpc_and_in_the_simulator(script: Script, tmp_path: Path) -> None:
    simulated = [play_simulated(script, seed) for seed in range(NUM_SEEDS)]
    assert simulated == [simulated[0]] * NUM_SEEDS
    for attempt in range(MOST_REAL_RUNS):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        real = asyncio.run(play_real(script, folder))
        if real == simulated[0]:
            return
    assert real == simulated[0]


def test_a_seed_has_one_story() -> None:
    stories: list[list[str]] = [[], [], []]
    for seed, story in zip((7, 7, 8), stories, strict=True):
        for script in SCRIPTS:
            play_simulated(script, seed, tells=story.append)
    assert stories[0] == stories[1]
    assert stories[0] != stories[2]


SERVER = """
import asyncio, pathlib, sys
from robustness.simulation.comparison.scripting import answer, echo
from robustness.simulation.comparison.stages import serve_forever
asyncio.run(serve_forever(pathlib.Path(sys.argv[1]), unary=answer, stream=echo))
"""


def test_clients_of_a_killed_process_see_what_they_see_on_the_real_stage(tmp_path: Path) -> None:
    """That stage kills no process: it breaks connections and stops listening."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SERVER, str(tmp_path / "address")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        seen = asyncio.run(_seen_by_client_of(server, RealStage(tmp_path)))
    on_stage, _ = asyncio.run(play_real(server_restarts, tmp_path))
    assert seen == on_stage[: len(seen)]


async def _seen_by_client_of(server: subprocess.Popen[bytes], stage: RealStage) -> list[str]:
    async with stage.channel() as channel:
        await meet_a_killed_server(stage, channel, server.kill)
    return stage.client
