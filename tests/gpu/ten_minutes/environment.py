"""Check what a worker with a GPU needs of this machine. Each need gets a line in the report, missing or not."""

from __future__ import annotations

import importlib
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# As quire.worker.device.compilations has it; Triton may be missing here.
CACHE_FOLDER = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton/cache")
MIN_FREE_GB = 20


def say(line: str, *, is_there: bool = True) -> None:
    print(f"report: {line if is_there else f'MISSING: {line}'}", flush=True)


def say_version(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except Exception as error:
        say(f"{name}: {error!r}", is_there=False)
    else:
        say(f"{name} {getattr(module, '__version__', f'from {module.__file__}')}")


def say_gpus() -> None:
    try:
        import torch
    except ImportError:
        return
    say(f"torch is built for CUDA {torch.version.cuda}, AMD {torch.version.hip}")
    if not torch.cuda.is_available():
        say("GPU that torch finds", is_there=False)
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        say(
            f"cuda:{index} {found.name}, capability {found.major}.{found.minor}, {found.multi_processor_count} "
            f"multiprocessors, {found.total_memory / 2**30:.1f} GiB, "
            f"{getattr(found, 'shared_memory_per_block_optin', 0) / 2**10:.0f} KiB of shared memory"
        )


def say_driver() -> None:
    fields = "name,driver_version,memory.used,persistence_mode,compute_mode,mig.mode.current"
    try:
        asked = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv"], capture_output=True, text=True, timeout=60
        )
    except OSError:
        say("nvidia-smi", is_there=False)
        return
    for line in asked.stdout.splitlines():
        say(f"nvidia-smi: {line}")


def main() -> None:
    say(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores")
    say_driver()
    for name in ("torch", "triton", "transformers", "numpy", "grpc", "pytest"):
        say_version(name)
    say_gpus()
    for name in ("quire.worker", "quire.cachemgr._core"):
        say_version(name)
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    say(f"C compiler for Triton: {compiler}", is_there=compiler is not None)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    say(f"Python's headers: {header}", is_there=header.exists())
    nearest = next(folder for folder in (CACHE_FOLDER, *CACHE_FOLDER.parents) if folder.exists())
    say(f"the cache of compiled kernels can be written: {CACHE_FOLDER}", is_there=os.access(nearest, os.W_OK))
    free_gb = shutil.disk_usage(nearest).free / 1e9
    say(f"{free_gb:.0f} GB free there; {MIN_FREE_GB} are enough", is_there=free_gb >= MIN_FREE_GB)
    say(f"compute-sanitizer: {shutil.which('compute-sanitizer') or 'not on PATH, its tests are skipped'}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    say(f"memory that may be locked: {'no limit' if locked == resource.RLIM_INFINITY else f'{locked} bytes'}")


if __name__ == "__main__":
    main()
