"""The benchmark of the kernels runs to its end, and its measurements are right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COMMAND = [sys.executable, str(BENCHMARKS / "harness/run.py"), str(BENCHMARKS / "kernels/gpu.py")]
"""As `make gpu-bench-kernels` runs it, also where Quire is not installed."""
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(not INTERPRET, reason="the quick run is interpreted")
def test_a_quick_run_measures_every_row_and_writes_what_it_measured(tmp_path: Path) -> None:
    command = [*COMMAND, "--quick", "--output", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    results = json.loads((tmp_path / "kernels.json").read_text())
    assert results["dry"]
    assert results["ceilings"].keys() == {"copy_gb_s", "read_gb_s"}
    for grid in ("decode", "prefill"):
        rows = [row for cell in results[grid] for row in cell["taken_us"]]
        assert rows.count("Quire") == len(results[grid])
        assert all(error < 1e-5 for cell in results[grid] for error in cell["errors"].values())
    assert {"Quire", "tutorial", "dense SDPA"} <= results["decode"][0]["taken_us"].keys()
    assert {"q20"} <= {cell["name"] for cell in results["prefill"]}
    for cell in results["variants"]:
        assert {"Quire", "runs of 128 keys", "tiles of 64 keys", "products ahead"} == cell["taken_us"].keys()
        assert all(error < 1e-5 for error in cell["errors"].values())
    kernels = {timing["kernel"] for timing in results["elementwise"]}
    assert {"add_rmsnorm", "copy_blocks", "qkv_prologue", "argmax", "build_decode_plan"} <= kernels
    everyone = {"Quire", "tutorial", "FlashInfer", "FlashInfer, CUDA cores", "vLLM Triton", "dense SDPA"}
    assert set(results["absent"]) <= everyone - {"Quire", "tutorial", "dense SDPA"}
    assert (tmp_path / "kernels_decode.svg").stat().st_size > 0


def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(COMMAND, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no GPU" in done.stderr
