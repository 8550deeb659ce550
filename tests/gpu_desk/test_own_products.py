"""Launches of a decode step with own products of few rows, counted on the fake device."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
import torch
from gpu_desk.fake_device import FakeGPU
from gpu_desk.steps import make_executor, mixed_and_decode_steps, start
from model_zoo import save

from quire.worker.fusion import product_table
from quire.worker.fusion.product_table import ProductKey, ProductKind, TableEntry, read_table, write_table
from quire.worker.fusion.steps import choose_steps
from quire.worker.run.executor import Outcome
from quire.worker.sampling.parameters import SamplingParams

NUM_LAYERS = 3
ATTENTION = {"decode_plan_kernel", "paged_decode_kernel"}
HEAD = "linear"
"""The output layer stays the library's."""


def layer_launches(captured: Counter[str]) -> Counter[str]:
    """Launches of the layers of a captured forward by kernel, attention apart, and of the norm behind the last one."""
    return Counter({name: count for name, count in captured.items() if name not in ATTENTION})


def forwards(gpu: FakeGPU) -> list[tuple[Counter[str], int]]:
    """Kernels and library products of each captured forward of decode steps, the largest bucket first."""
    return [(seen.kernels, seen.operations[HEAD]) for seen in gpu.captures if seen.kernels["paged_decode_kernel"]]


def test_own_products_make_a_layer_five_launches_beside_attention(tmp_path: Path) -> None:
    """Of eight: norms and SiLU are in the products. So a layer is 6, with attention's one, where it was 9."""
    with FakeGPU() as gpu:
        loaded = start(save("qwen2", tmp_path), dtype="bfloat16", products="own", max_num_seqs=16)
        assert str(loaded.model.fusion).startswith("fused (kernels, own products): ")
        assert {products for _, products in forwards(gpu)} == {1}
        found = [layer_launches(kernels) for kernels, _ in forwards(gpu)]
        of_few_rows = {
            "skinny_gemv_kernel": 4 * NUM_LAYERS,
            "qkv_prologue_kernel": NUM_LAYERS,
            "add_rmsnorm_kernel": 1,
        }
        of_16_rows = {
            "skinny_dot_kernel": 4 * NUM_LAYERS,
            "qkv_prologue_kernel": NUM_LAYERS,
            "add_rmsnorm_kernel": 2 * NUM_LAYERS + 1,
        }
        assert found.count(of_few_rows) >= 4, "of 8, 4, 2 and 1 sequences"
        assert found.count(of_16_rows) >= 1
        assert found.count(of_few_rows) + found.count(of_16_rows) == len(found)
        executor = make_executor(loaded)
        for step in chain(*mixed_and_decode_steps(SamplingParams())):
            with gpu.watch() as seen:
                assert executor.launch(step).result.outcome is Outcome.COMPUTED
            assert (seen.syncs, seen.pageable) == ([], [])


def test_without_a_measurement_products_are_the_librarys() -> None:
    with FakeGPU():
        for products in ("auto", "library"):
            steps = choose_steps(torch.device("cuda", 0), block_size=16, wanted=None, products=products)  # type: ignore[arg-type]
            assert steps is not None
            assert steps.name == "kernels"


def test_a_measured_product_is_our_own_and_all_others_the_librarys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output projection of one row, by a table of the device that the fake one says it is."""
    path = tmp_path / "products.json"
    tiling = {"form": "dot", "block_outputs": 32, "block_inputs": 32, "num_warps": 4, "num_stages": 3, "split": 2}
    key = ProductKey(ProductKind.RESIDUAL, 32, 64, "bfloat16", 1)
    write_table("fake", [TableEntry(key, tiling, own_us=3.0, library_us=7.0)], path)
    write_table("another", [], path)
    assert json.loads(path.read_text()).keys() == {"another", "fake"}
    monkeypatch.setattr(product_table, "TABLE_FILE", path)
    monkeypatch.setattr("quire.worker.fusion.steps.read_table", lambda name: read_table(name, path))
    with FakeGPU() as gpu:
        start(save("qwen3", tmp_path), dtype="bfloat16")
        (kernels, products) = forwards(gpu)[-1]  # of one row
        assert (kernels["skinny_dot_kernel"], products) == (NUM_LAYERS, 3 * NUM_LAYERS + 1)
        (kernels, products) = forwards(gpu)[0]
        assert (kernels["skinny_dot_kernel"], products) == (0, 4 * NUM_LAYERS + 1)
