"""The common parts of the drivers: rows of one subject for each pool size, printed as JSON on the last line."""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import platform
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from workload import Prompts, Rows, Subject, calibrate, fill


def metadata_per_block(make: Callable[[int], Subject], num_blocks: int) -> float:
    """Bytes of Python memory per block of a pool full of cached blocks, nothing held.

    A subject with `native_bytes()` adds its memory outside of Python's allocator.
    """
    gc.collect()
    tracemalloc.start()
    subject = make(num_blocks)
    fill(subject, Prompts(), num_blocks)
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (taken + getattr(subject, "native_bytes", int)()) / num_blocks


def drive(make: Callable[[int], Subject], *, package: str) -> None:
    """Runs the rows of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--memory", type=int, default=0, help="blocks of a pool to measure its metadata; 0: none")
    arguments = parser.parse_args()
    calibration = calibrate()
    samples: dict[str, Any] = {}
    for size in arguments.sizes:
        samples[str(size)] = Rows(make(size), size, repeats=arguments.repeats).all()
    versions = {package: importlib.metadata.version(package), "python": platform.python_version()}
    result: dict[str, Any] = {"versions": versions, "calibration": calibration, "samples_ns": samples}
    if arguments.memory:
        result["metadata_bytes_per_block"] = metadata_per_block(make, arguments.memory)
    print(json.dumps(result))
