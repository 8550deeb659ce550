"""Peers of benchmarks on a GPU, without one: the compiled loop's tokens, and the folder of what is not Quire's."""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
CPU = torch.device("cpu")


def load(folder: str, name: str) -> Iterator[ModuleType]:
    """Import a module of a benchmark; other benchmarks have modules of the same name."""
    added = [str(BENCHMARKS / each) for each in (folder, "harness")]
    before = sys.modules.pop(name, None)
    sys.path[:0] = added
    try:
        yield importlib.import_module(name)
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
        for each in added:
            sys.path.remove(each)


@pytest.fixture(scope="module")
def step_peers() -> Iterator[ModuleType]:
    yield from load("step", "peers")


@pytest.fixture(scope="module")
def obtain_peers() -> Iterator[ModuleType]:
    yield from load("harness", "obtain_peers")


def test_the_compiled_loop_over_a_static_cache_gives_transformers_tokens(step_peers: ModuleType) -> None:
    """Traced layer by layer, as for a GPU, and run by torch without compiling them to machine code."""
    model = step_peers.load(step_peers.TINY, CPU)
    model.generation_config.eos_token_id = None
    prompts = step_peers.draw(step_peers.TINY, 3, 20, CPU)
    expected = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=9, do_sample=False)
    with torch.inference_mode():
        loop = step_peers.StaticLoop(model, num_seqs=3, max_len=32, backend="eager")
        tokens = [loop.prefill(prompts)]
        tokens += [loop.step().clone() for _ in range(8)]
    torch.compiler.reset()
    assert torch.cat(tokens, 1).tolist() == expected[:, 20:].tolist()


def test_a_peer_that_is_not_there_or_fails_is_a_row_that_says_so(step_peers: ModuleType) -> None:
    def fails(*_: object, **__: object) -> list[float]:
        raise RuntimeError("out of memory\nand more")

    rows = [
        step_peers.row(name, run, step_peers.TINY, 1, 20, quick=True, device=CPU)
        for name, run in (("nano-vllm in Triton", step_peers.nano_vllm), ("fails", fails))
    ]
    assert [each.step_ms for each in rows] == [[], []]
    assert rows[0].absent in ("not here: .peers/nano-vllm-triton/nanovllm", "it needs a GPU")
    assert rows[1].absent == "RuntimeError: out of memory"
    assert rows[1].describe()["median_ms"] is None


def test_the_kernel_and_what_it_imports_are_taken_out_of_a_wheel(obtain_peers: ModuleType, tmp_path: Path) -> None:
    wheel, folder = tmp_path / "vllm-0.0.0-py3-none-any.whl", tmp_path / "peers"
    ops = "vllm/v1/attention/ops/"
    with zipfile.ZipFile(wheel, "w") as packed:
        for name in ("triton_unified_attention.py", "triton_quant_kv/_helpers.py", "other.py", "triton_quant_kv/x.so"):
            packed.writestr(ops + name, name)
        packed.writestr("vllm/__init__.py", "")
    taken = obtain_peers.take_vllm(wheel, folder / "vllm")
    assert sorted(taken) == ["triton_quant_kv/_helpers.py", "triton_unified_attention.py"]
    assert (folder / "vllm/triton_quant_kv/_helpers.py").read_text() == "triton_quant_kv/_helpers.py"
    lines = [peer.describe(folder) for peer in obtain_peers.KNOWN]
    assert "vllm         here: peers/vllm/triton_unified_attention.py (for quire bench kernels gpu)" in lines
    assert "nano-vllm    not here: peers/nano-vllm-triton/nanovllm (for quire bench step peers)" in lines
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("vllm/__init__.py", "")
    with pytest.raises(ValueError, match=r"has no vllm/v1/attention/ops/triton_unified_attention\.py"):
        obtain_peers.take_vllm(wheel, folder / "vllm")


def test_without_names_it_lists_what_is_there(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "harness/obtain_peers.py"), "--folder", str(tmp_path / ".peers")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == (
        "flashinfer   not here: .peers/wheels/flashinfer_python-*.whl (for quire bench kernels gpu)"
    )
    assert not (tmp_path / ".peers").exists()
