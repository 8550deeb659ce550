"""Triton's interpreter without work that was most of its time:

    patches      It puts functions of its own into triton.language at a launch, and takes them out behind it. It puts
                 them in again at each call of a function within the kernel. Each time it looks at all members of
                 triton.language. Here they stay: nothing else of the process uses triton.language.
    overflow     It computes each sum and product of integers a second time, for an assertion that it makes only in
                 debug mode.
    dtypes       It makes a table of NumPy's dtypes each time that it looks one up.
    shapes       It makes and checks the shape of each tensor again, as a tuple of constants with a type each. Here
                 tensors of equal shapes share one. Operands of one dtype and shape are not looked at further.
    constants    It makes a tensor of each number again. Here equal numbers of one dtype share one, which is read-only.

None of them changes a result.

    TRITON_INTERPRET=1 python tests/framework/fast_interpreter.py PROGRAM...     run a program so
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

MODULES = (tl, tl.core)
"""Those that the interpreter changes, where a function names them."""


def install() -> None:
    """Leave this work out from here on, in this process."""
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    interpreter._patch_lang = _once(interpreter._patch_lang)
    interpreter._patch_attr = _patch_attr
    _share_shapes()
    TritonSemantic.scalar_constant = _shared_constants(TritonSemantic.scalar_constant)
    TritonSemantic.binary_op_type_checking_impl = _unless_alike(TritonSemantic.binary_op_type_checking_impl)
    core.dtype.is_int = lambda dtype: dtype.name in INTEGERS
    equal = core.dtype.__eq__
    core.dtype.__eq__ = lambda dtype, other: (
        dtype.name == other.name if type(other) is core.dtype else equal(dtype, other)
    )


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


INTEGERS = frozenset(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)
LENGTH_WITH_DIVISION = 4
"""Of the arguments behind the operands, if the last one says that it is a division."""
_CHECKED = tl.add.__code__
"""The code of all that `builtin` wraps: it only requires `_semantic`."""


def _patch_attr(of: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Let a function of the language run in the interpreter, without a call for the check of `_semantic`."""
    function = member.__wrapped__ if getattr(member, "__code__", None) is _CHECKED else member
    semantic = interpreter.interpreter_semantic

    def call(*args: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return function(*args, **options)

    scope.set_attr(of, name, call)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The forms in which types and tensors have a shape."""

    of_type: Any
    of_tensor: Any
    num_elements: Any


_SCALAR = _Shape((), core.tuple([]), core.constexpr(1))
_shapes: dict[tuple[int, ...], _Shape] = {}


def _share_shapes() -> None:
    """Make and check each shape of types and tensors once."""
    first_of_shape = core.block_type.__init__

    def begin_type(this: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        found = _shapes.get(sizes)
        if found is None:
            first_of_shape(this, element_ty, shape)
            constants = core.tuple([core.constexpr(size) for size in sizes])
            found = _shapes[sizes] = _Shape(this.shape, constants, core.constexpr(this.numel))
        this.element_ty, this.shape, this.numel, this.shared = (
            element_ty,
            found.of_type,
            found.num_elements.value,
            found,
        )
        this.name = f"<{sizes}, {element_ty}>"

    def begin_tensor(this: Any, handle: Any, type: Any) -> None:
        shape = type.shared if type.is_block() else _SCALAR
        this.handle, this.type, this.dtype = handle, type, type.scalar
        this.shape, this.numel = shape.of_tensor, shape.num_elements

    core.block_type.__init__ = begin_type
    core.tensor.__init__ = begin_tensor


def _shared_constants(make: Callable[..., Any]) -> Callable[..., Any]:
    """Make the tensor of each number once."""
    found: dict[tuple[type, Any, str], Any] = {}

    def constant(this: Any, value: Any, dtype: Any) -> Any:
        if not isinstance(value, int | float) or value != value:
            return make(this, value, dtype)
        key = type(value), value, dtype.name
        if key not in found:
            found[key] = make(this, value, dtype)
            found[key].handle.data.flags.writeable = False
        return found[key]

    return constant


def _unless_alike(check: Callable[..., Any]) -> Callable[..., Any]:
    """Return operands of one dtype and shape as they are, and make the tensor of a number for each of them once."""
    found: dict[tuple[Any, ...], Any] = {}

    def operands(this: Any, lhs: Any, rhs: Any, *how: Any) -> Any:
        if type(lhs) is type(rhs) is core.tensor:
            if (
                lhs.shape is rhs.shape
                and lhs.dtype.name == rhs.dtype.name
                and len(how) < LENGTH_WITH_DIVISION  # a quotient may have another dtype
                and not lhs.dtype.is_ptr()
            ):
                return lhs, rhs
            return check(this, lhs, rhs, *how)
        is_left = type(rhs) is core.tensor
        tensor, number = (rhs, lhs) if is_left else (lhs, rhs)
        if type(tensor) is not core.tensor or type(number) not in (int, float) or number != number:
            return check(this, lhs, rhs, *how)
        key = is_left, type(number), number, tensor.dtype.name, id(tensor.shape), how
        if key in found:
            return (found[key], rhs) if is_left else (lhs, found[key])
        left, right = check(this, lhs, rhs, *how)
        if tensor is (right if is_left else left):  # its dtype and shape stay
            found[key] = made = left if is_left else right
            made.handle.data = np.broadcast_to(made.handle.data.flat[0], made.handle.data.shape)
        return left, right

    return operands


if __name__ == "__main__":
    install()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
