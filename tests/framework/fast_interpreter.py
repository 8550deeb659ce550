"""Triton's interpreter without three pieces of work that were most of its time:

    patches      It puts functions of its own into triton.language at a launch, and takes them out behind it. It puts
                 them in again at each call of a function within the kernel. Each time it looks at all members of
                 triton.language. Here they stay: nothing else of the process uses triton.language.
    overflow     It computes each sum and product of integers a second time, for an assertion that it makes only in
                 debug mode.
    dtypes       It makes a table of NumPy's dtypes each time that it looks one up.

None of them changes a result.

    TRITON_INTERPRET=1 python tests/framework/fast_interpreter.py PROGRAM...     run a program so
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

MODULES = (tl, tl.core)
"""Those that the interpreter changes, where a function names them."""


def install() -> None:
    """Leave this work out from here on, in this process."""
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    interpreter._patch_lang = _once(interpreter._patch_lang)


def _remembered(look_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Look each dtype up once. Triton's types have no hash, but an element's type has a name."""
    found: dict[str, Any] = {}

    def dtype_of(of: Any) -> Any:
        name = of.scalar.name
        if name not in found:
            found[name] = look_up(of)
        return found[name]

    return dtype_of


def _once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Patch the modules that a function names, unless an earlier one has named them."""
    patched: set[Any] = set()
    nothing_to_restore = interpreter._LangPatchScope()

    @cache
    def patch_for(function: Any) -> Any:
        named = {value for value in function.__globals__.values() if any(value is module for module in MODULES)}
        if not named or not named <= patched:  # a function that names none is refused
            patch(function)
            patched.update(named)
        return nothing_to_restore

    return patch_for


if __name__ == "__main__":
    install()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
