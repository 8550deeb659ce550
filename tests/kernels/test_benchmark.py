"""The benchmark of the kernels runs to its end, and its measurements are right."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from quire.worker.fusion.product_table import read_table

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COMMAND = [sys.executable, str(BENCHMARKS / "harness/run.py"), str(BENCHMARKS / "kernels/gpu.py")]
PRODUCTS = [*COMMAND[:2], str(BENCHMARKS / "kernels/products.py")]
"""As `make gpu-bench-kernels` runs it, also where Quire is not installed."""
FAST = [sys.executable, str(Path(__file__).parents[1] / "framework/fast_interpreter.py")]
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(not INTERPRET, reason="the quick run is interpreted")
def test_a_quick_run_measures_every_row_and_writes_what_it_measured(tmp_path: Path) -> None:
    command = [*FAST, *COMMAND[1:], "--quick", "--output", str(tmp_path)]
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
    spread = {"runs of 128 keys", "sequences cost 64 keys", "sequences cost 128 keys", "tiles of 64 keys"}
    described = {"descriptors", "descriptors, products ahead"}
    expected = {"2x40": spread, "q20": {"products ahead"}, "q70": {"products ahead", *described}}
    assert {cell["name"]: set(cell["taken_us"]) - {"Quire"} for cell in results["variants"]} == expected
    for cell in results["variants"]:
        assert cell["errors"].keys() == cell["taken_us"].keys()
        assert all(error < 1e-5 for error in cell["errors"].values())
    kernels = {timing["kernel"] for timing in results["elementwise"]}
    some = {
        "add_rmsnorm",
        "copy_blocks",
        "qkv_prologue",
        "add_updates",
        "int4_linear",
        "scaled_linear",
        "argmax",
        "build_decode_plan",
    }
    assert some <= kernels
    everyone = {"Quire", "tutorial", "FlashInfer", "FlashInfer, CUDA cores", "vLLM Triton", "dense SDPA"}
    assert set(results["absent"]) <= everyone - {"Quire", "tutorial", "dense SDPA"}
    assert (tmp_path / "kernels_decode.svg").stat().st_size > 0


@pytest.mark.skipif(not INTERPRET, reason="the quick run is interpreted")
def test_a_quick_run_of_products_compares_each_and_writes_a_table_that_the_worker_reads(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    command = [*FAST, *PRODUCTS[1:], "--quick", "--output", str(tmp_path), "--write-table", str(table)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    results = json.loads((tmp_path / "products.json").read_text())
    assert results["dry"]
    kinds = {(each["kind"], each["num_rows"]) for each in results["products"]}
    assert kinds == set(product(("plain", "norm", "gated", "norm+gated", "residual"), (1, 16)))
    forms = {own["tiling"]["form"] for each in results["products"] for own in each["own"]}
    assert forms == {"gemv", "dot"}
    faster = [each for each in results["products"] if each["is_own_faster"]]
    assert all(min(own["taken_us"] for own in each["own"]) < 0.96 * each["library_us"] for each in faster)
    assert len(read_table("no GPU", table)) == len(faster)


def test_a_quick_run_does_not_write_into_the_workers_table() -> None:
    done = subprocess.run([*PRODUCTS, "--quick", "--write-table"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--quick measures nothing that the worker's table could have" in " ".join(done.stderr.split())


@pytest.mark.parametrize("command", [COMMAND, PRODUCTS], ids=["kernels", "products"])
def test_without_a_gpu_it_says_so(command: list[str]) -> None:
    done = subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no GPU" in done.stderr
