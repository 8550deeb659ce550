"""CUDA graphs on a CPU: a capture records operations of torch and launches of Triton, a replay runs them again.

As on a GPU, a replay runs no Python of the model: it reads and writes the memory of the capture. What a piece computed
during its capture is overwritten by NaN, since a real capture computes nothing. What this can't find: memory that the
allocator gives to two tensors, and what a real capture refuses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from quire.worker.device.capture import capture_stream

_launch = InterpretedFunction.run


class RecordedGraph:
    """torch.cuda.CUDAGraph. `current` is the one that is captured now."""

    current: RecordedGraph | None = None

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []
        self._made: list[Tensor] = []
        self._recorder = _Recorder(self)

    def capture_begin(self, pool: Any = None) -> None:
        assert RecordedGraph.current is None, "a capture within a capture"
        RecordedGraph.current = self
        self._recorder.__enter__()

    def capture_end(self) -> None:
        assert RecordedGraph.current is self
        self._recorder.__exit__(None, None, None)
        RecordedGraph.current = None
        with torch.inference_mode():
            for tensor in self._made:
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)

    def replay(self) -> None:
        assert RecordedGraph.current is None, "a replay within a capture"
        for call in self._calls:
            call()

    def note_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record an operation that has run. Raises AssertionError if the host reads a value."""
        assert func._schema.name != "aten::_local_scalar_dense", "a capture waits for the device"
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        results = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        made = [x for x in results if x.untyped_storage().data_ptr() not in given]
        self._made += made
        if made or func._schema.is_mutable:
            self._calls.append(partial(_run_again, func, args, kwargs, results, made))

    def note_launch(self, kernel: Any, args: Any, kwargs: Any) -> None:
        """Record a launch, without running it."""
        self._calls.append(partial(_launch, kernel, *args, **kwargs))


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._graph.note_operation(func, args, kwargs or {}, result)
        return result


def _run_again(func: Any, args: Any, kwargs: Any, results: list[Tensor], made: list[Tensor]) -> None:
    """Run an operation on the same memory; its result goes to the place of the capture's."""
    again = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
    for old, new in zip(results, again, strict=True):
        if any(old is each for each in made):
            old.copy_(new)


def _run(kernel: Any, *args: Any, **kwargs: Any) -> None:
    if RecordedGraph.current is None:
        _launch(kernel, *args, **kwargs)
    else:
        RecordedGraph.current.note_launch(kernel, args, kwargs)


class _Stream:
    def wait_stream(self, _: Any) -> None: ...


@contextlib.contextmanager
def recorded_graphs() -> Iterator[None]:
    """Let captures on the CPU, under Triton's interpreter, make a RecordedGraph."""
    cuda = torch.cuda
    stand_ins: dict[str, Any] = {
        "CUDAGraph": RecordedGraph,
        "Stream": _Stream,
        "current_stream": _Stream,
        "default_stream": _Stream,
        "stream": lambda _: contextlib.nullcontext(),
        "graph_pool_handle": lambda: (0, 0),
        "get_sync_debug_mode": lambda: 0,
        **dict.fromkeys(["synchronize", "empty_cache", "set_stream", "set_sync_debug_mode"], lambda *_: None),
    }
    with contextlib.ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(cuda, name, stand_in))
        stack.enter_context(mock.patch.object(InterpretedFunction, "run", _run))
        capture_stream.cache_clear()
        stack.callback(capture_stream.cache_clear)
        yield
