"""The simulated transport against real gRPC: each script of a client and a server sees the same on both."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from robustness.simulation.scripts import SCRIPTS
from robustness.simulation.stages import Script, kept_worlds, play_real, play_simulated

NUM_SEEDS = 20


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_script_sees_the_same_over_grpc_and_in_the_simulator(script: Script, tmp_path: Path) -> None:
    real = asyncio.run(play_real(script, tmp_path))
    with kept_worlds():
        seen = [play_simulated(script, seed) for seed in range(NUM_SEEDS)]
    assert seen == [real] * NUM_SEEDS


def test_a_seed_has_one_story() -> None:
    stories: list[list[str]] = [[], [], []]
    with kept_worlds():
        for seed, story in zip((7, 7, 8), stories, strict=True):
            for script in SCRIPTS:
                play_simulated(script, seed, tells=story.append)
    assert stories[0] == stories[1]
    assert stories[0] != stories[2]
