"""Which of Triton's kernels compile while something runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of kernels that compile, or are loaded from Triton's cache, within the block."""
    names: list[str] = []

    def note(*, fn: Any, **_: Any) -> None:
        names.append(fn.name)

    runtime = triton.knobs.runtime
    before, runtime.jit_post_compile_hook = runtime.jit_post_compile_hook, note
    try:
        yield names
    finally:
        runtime.jit_post_compile_hook = before
