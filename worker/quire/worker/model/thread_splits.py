"""The number of threads with which elementwise functions give the same bits to each row of a tile.

torch computes such a function in vectors of the processor, and the elements behind the last whole vector one by one,
with other rounding. Several threads divide a tensor of more than GRAIN elements into equal parts. If a border is not
between two vectors, the elements next to it, and so the row that holds them, get other bits than in another row.
Sums, products and roots are rounded correctly either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GRAIN = 1 << 15
"""Elements that torch leaves to one thread."""
VECTOR_BYTES = 128
"""Bytes of the widest vectors that torch uses, two at a time."""
# Rounded correctly: an element has one result.
_EXACT = (
    {"add", "sub", "rsub", "mul", "div", "neg", "abs", "sqrt", "relu", "sign", "floor", "ceil", "round", "threshold"}
    | {"where", "maximum", "minimum", "clamp", "clamp_min", "clamp_max"}
    | {"masked_fill", "fill", "zero", "copy", "clone", "_to_copy"}
)
# Two of these one after the other, which 16 bits round between them in one way and not in the other.
_EXACT_IN_32_BITS = frozenset(("rsqrt", "reciprocal"))
_EXACT_POWERS = (2, 0.5, -0.5, -1)


@dataclass(frozen=True, slots=True)
class Elementwise:
    """A call of an elementwise function that is not rounded correctly. inner: elements of a row that lies in one piece,
    None if all of them do."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    inner: int | None

    def is_even(self, threads: int) -> bool:
        """True if the elements of all rows are computed alike with so many threads."""
        size = torch.Size(self.shape).numel()
        vector = VECTOR_BYTES // self.itemsize
        parts = min(threads, -(-size // GRAIN))
        part = -(-size // parts) if parts else 0
        if self.inner is not None:
            return parts <= 1 or part % self.inner == 0
        return size < vector or (size % vector == 0 and (parts == 1 or part % vector == 0))

    def __str__(self) -> str:
        return f"{self.name} of {list(self.shape)}"


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: set[Elementwise] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        result = func(*args, **keywords)
        name = func.overloadpacket.__name__.rstrip("_") or func.overloadpacket.__name__
        is_elementwise = torch.Tag.pointwise in func.tags and isinstance(result, Tensor) and result.is_floating_point()
        if is_elementwise and not _is_exact(name, args, keywords, result.itemsize):
            tensors = [each for each in args if isinstance(each, Tensor) and each.dim()]
            is_one_piece = all(each.is_contiguous() and each.shape == result.shape for each in tensors)
            inner = None if is_one_piece else result.shape[-1]
            self.calls.add(Elementwise(name, tuple(result.shape), result.itemsize, inner))
        return result


def _is_exact(name: str, args: tuple[Any, ...], keywords: Mapping[str, Any], itemsize: int) -> bool:
    if name == "pow":
        is_known = isinstance(args[0], Tensor) and not isinstance(args[1], Tensor) and args[1] in _EXACT_POWERS
        return is_known and (itemsize >= 4 or args[1] == 2)
    is_rounded = name in _EXACT or (name in _EXACT_IN_32_BITS and itemsize >= 4)
    return is_rounded and keywords.get("alpha", 1) == 1


def record_elementwise(work: Callable[[], object]) -> set[Elementwise]:
    """Return the calls of elementwise functions in work() that are not rounded correctly."""
    recorder = _Recorder()
    with recorder:
        work()
    return recorder.calls


def most_threads(calls: Iterable[Elementwise], wanted: int) -> tuple[int, Elementwise | None]:
    """Return the most threads, up to `wanted`, with which all calls are even, and a call that allows no more.

    0 threads if a call is not even with one.
    """
    found, limit = wanted, None
    for call in sorted(calls, key=str):
        while found and not call.is_even(found):
            found, limit = found - 1, call
    return found, limit
