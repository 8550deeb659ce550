"""The benchmark of steps on a fake GPU: the next step is launched before one is collected, as graphs, without waits."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_desk.fake_device import FakeGPU
from gpu_desk.steps import make_executor, start
from model_zoo import save

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS / "step"), str(BENCHMARKS / "harness")]
cells, modes, roofline, shapes = map(importlib.import_module, ("cells", "modes", "roofline", "shapes"))


@pytest.mark.parametrize("cell", [cells.Cell(3, 20), cells.Cell(1, 0, 9)], ids=lambda cell: str(cell.name))
def test_a_cell_is_measured_ahead_and_alone(tmp_path: Path, cell: Any) -> None:
    with FakeGPU() as gpu:
        loaded = start(save("llama", tmp_path), dtype="bfloat16", max_model_len=128)
        executor = make_executor(loaded)
        assert executor.runs_ahead
        mode = modes.check_modes(loaded.model, allow_degraded=False)
        with gpu.watch() as seen:
            timing = cells.measure(
                *(shapes.TINY, loaded.model, executor, cell, roofline.Ceilings(4.4e12, 790e12)),
                num_steps=2,
                seconds=60.0,
                mode=mode,
                num_compiled=lambda: 0,
            )
    assert len(timing.step_ms) == len(timing.lone_ms) == 2
    assert (timing.gap_ms is None) == (cell.new > 1)
    assert seen.pageable == []
    assert seen.replays > 0
    assert {"decode", "sampler", "prompts", "modules", "attention", "copies"} <= timing.mode.keys()
    assert torch.device("cuda", 0) == loaded.model.device
