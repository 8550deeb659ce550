"""Fills a cache of Triton with the kernels of an H100 or H200 that the parts will launch, without a GPU.

    python compiling.py FOLDER [--only PART...]

The benchmarks of the parts run on the fake GPU of tests/gpu_desk: each launch compiles its kernel, and the module in C
that launches it, and launches nothing. The kernels of whole steps are those that a worker's warm-up and the benchmark's
steps launch. Triton finds a kernel by a hash of its own files, the kernel's source and arguments, the options, ptxas's
version and some variables TRITON_*: so compile with the Triton of the machine with the GPU, and with its Python: its
name is in that of the modules. The script's --cache takes the folder: see cache.py.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

from cache import described, leave_out_texts
from parts import ROOT, Part, read_plan

sys.path.extend(str(ROOT / "tests" / folder) for folder in (".", "framework"))

STEPS = "benchmarks/step/__main__.py"
KERNELS = "benchmarks/kernels/"


def compiled_parts() -> list[Part]:
    """Return the parts with kernels that can be compiled here: whole steps, and the benchmark of kernels."""
    calls = read_plan().calls
    return [part for name in ("1", "2") for part in calls[name].parts if part.command[0].startswith((STEPS, KERNELS))]


@contextmanager
def compiling() -> Iterator[None]:
    """Within the block there is a fake GPU, and each launch of Triton compiles, or reads its kernel from the cache."""
    import torch
    import triton
    from gpu_desk.fake_device import FakeGPU
    from machine_code import H100, StandInDriver
    from model_zoo import build
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

    run, generator = triton.runtime.jit.JITFunction.run, torch.Generator()
    launchers: set[str] = set()
    with (
        FakeGPU() as gpu,
        stand_in_for_libcuda(),
        mock.patch.object(torch.cuda, "_sleep"),
        mock.patch.object(torch, "Generator", return_value=generator),
        mock.patch.object(torch.Tensor, "is_pinned", lambda tensor: tensor.device.type == "cpu"),
    ):
        driver = StandInDriver(H100)
        driver.utils = mock.MagicMock()  # type: ignore[attr-defined]
        triton.runtime.driver.set_active(driver)

        def launch(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **options: Any) -> None:
            compiled = run(kernel, *args, grid=grid, warmup=True, **options)
            if compiled.hash not in launchers:
                launchers.add(compiled.hash)
                CudaLauncher(compiled.src, compiled.metadata)

        gpu.launch = launch  # type: ignore[method-assign]
        gpu.move(build("llama"), "cuda")
        gpu._masks = _Always(gpu._masks)
        CudaUtils()
        yield


@contextmanager
def stand_in_for_libcuda() -> Iterator[None]:
    """Within the block Triton's modules in C are built against an empty library of NVIDIA's name, and not loaded."""
    import triton.runtime.build
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder, knobs.nvidia.scope():
        source = Path(folder, "empty.c")
        source.write_text("")
        command = ["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so.1", str(source)]
        subprocess.run(command, check=True)
        knobs.nvidia.libcuda_path = folder
        with mock.patch.object(triton.runtime.build, "_load_module_from_path"):
            yield


class _Always(list[Any]):
    """The first mask, as often as it is asked for: all models of the parts are causal."""

    def pop(self, _: Any = 0) -> Any:
        return self[0]


def compile_part(part: Part) -> None:
    """Compile what the part launches, and print how many kernels that are."""
    from quire.worker.device.compilations import Compilations

    found = Compilations()
    found.watch()
    script = ROOT / part.command[0]
    sys.path[:0] = [str(script.parent), str(ROOT / "benchmarks/harness")]
    with compiling(), tempfile.TemporaryDirectory() as output, redirect_stdout(io.StringIO()):
        sys.argv = [str(script), *unhurried(part.command[1:]), "--output", output]
        if part.command[0] == STEPS:
            run_steps(script, part.command[1:])
        else:
            try:
                runpy.run_path(str(script), run_name="__main__")
            except SystemExit as ended:
                if ended.code:
                    raise
    counted = found.statistics()
    print(f"{part.name}: {counted}", flush=True)
    if not counted.num_compiled + counted.num_read:
        raise RuntimeError(f"{part.name} launched no kernel")


def unhurried(flags: Sequence[str]) -> list[str]:
    """Return the flags, without a limit of minutes: to compile takes longer than to measure."""
    given = list(flags)
    if "--minutes" in given:
        given[given.index("--minutes") + 1] = "100000"
    return given


def run_steps(script: Path, flags: Sequence[str]) -> None:
    """Run the cells of the benchmark of steps, each for two steps, with the models that the flags name."""
    benchmark = runpy.run_path(str(script), run_name="compiled")
    context = benchmark["main"].make_context(script.name, list(flags))
    plan = benchmark["planned"](benchmark["gpu_plan"](), context.params)
    works = [(work.shape, [*benchmark["GRID"], *benchmark["PROMPTS"]]) for work in plan.works]
    for (shape, chosen), flags in itertools.product((*plan.steps, *works), plan.flags):
        run_shape(shape, chosen, flags)


def run_shape(shape: Any, chosen: Sequence[Any], flags: Any) -> None:
    """Load a model on the fake GPU as a worker with these flags does, and run its steps."""
    import cells
    import torch

    longest = max(max(cell.starts) + cell.new for cell in chosen)
    model = shape.load(dtype=torch.bfloat16, device=torch.device("cuda", 0), max_model_len=longest + 64, flags=flags)
    executor = cells.executor_for(model, chosen, flags)
    for cell in chosen:
        for step in cells.make_steps(cell, 2, vocab_size=shape.config.vocab_size):
            executor.execute(step)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    names = [part.name for part in compiled_parts()]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help="only these parts")
    given = parser.parse_args()
    os.environ["TRITON_CACHE_DIR"] = str(given.folder.resolve())  # read when Triton is imported
    os.environ["QUIRE_VERIFY"] = "0"
    import transformers  # noqa: F401
    import triton
    from forks import succeeds

    parts = [part for part in compiled_parts() if not given.only or part.name in given.only]
    failed = [part.name for part in parts if not succeeds(part.name, lambda part=part: compile_part(part))]
    leave_out_texts(given.folder)
    print(f"{described(given.folder)}, for Triton {triton.__version__}")
    if failed:
        print("failed:", *failed)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
