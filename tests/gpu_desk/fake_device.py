"""A GPU that computes nothing: the worker's CUDA path runs on fake tensors, and everything it does is recorded.

torch's FakeTensorMode propagates shapes, dtypes and devices without data. Triton launches are recorded and skipped.
The functions of torch.cuda that the worker calls have stand-ins with the same checks of their arguments.

    with FakeGPU() as gpu:
        loaded = load(config)            # a model on a device "cuda", as on a machine with a GPU
        with gpu.watch() as seen:
            executor.execute(step)
        assert seen.syncs == []

What this finds: tensors on two devices, reads of device values by the host, copies from memory that is not pinned,
wrong dtypes and shapes, calls of torch.cuda with arguments that it refuses. What it can't find: wrong numbers, races,
what a real capture refuses, memory, time.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from unittest import mock

import torch
import triton.runtime.jit
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from quire.kernels import int4_linear, launching
from quire.kernels.ring_layout import TAGS
from quire.worker.device import capture
from quire.worker.fusion import trial as fusion_trial
from quire.worker.model import checkpoint, paged_model, probe, self_check
from quire.worker.quantization import product_trial, scaled_linear
from quire.worker.run import graphs

TOTAL_BYTES = 80 << 30
NUM_GPUS = 2
# Operations that make views: they launch nothing.
_VIEWS = frozenset(
    {
        "view",
        "slice",
        "select",
        "transpose",
        "t",
        "expand",
        "split",
        "split_with_sizes",
        "unsqueeze",
        "squeeze",
        "detach",
        "alias",
        "as_strided",
        "permute",
        "unbind",
        "_unsafe_view",
        "reshape",
        "lift_fresh",
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "chunk",
        "device",
        "flatten",
        "view_as",
    }
)
# Operations that wait for the device, because the host needs a value or a size.
_SYNCS = frozenset(["_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero"])
_COPIES = frozenset({"to", "_to_copy", "copy_"})
# Comparisons with a result that the host waits for: on fake tensors they hold.
_COMPARISONS = frozenset({"equal", "allclose"})


@dataclass
class Seen:
    """All operations of a block of code, in order of their first use.

    operations    launches of torch, by the name of the operation; views are not among them
    kernels       launches of Triton, by the name of the kernel
    syncs         places where the host waited for the device, as "file:line operation"
    to_device     copies from the host to the device
    pageable      those of them that came from memory that is not pinned, with their places
    to_host       copies from the device to the host
    replays       of graphs
    largest_bytes of the largest tensor that was made on the device, views aside
    arguments     of the last launch of each Triton kernel
    """

    operations: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    syncs: list[str] = field(default_factory=list)
    pageable: list[str] = field(default_factory=list)
    to_device: int = 0
    to_host: int = 0
    replays: int = 0
    largest_bytes: int = 0
    arguments: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def num_launches(self) -> int:
        """Launches of torch, of Triton and of graphs, and copies between host and device."""
        launches = sum(self.operations.values()) + sum(self.kernels.values())
        return launches + self.replays + self.to_device + self.to_host


class _Recorder(TorchDispatchMode):
    """Records operations on the fake device; values that the host reads are zeros."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        on_device = any(tensor.device.type == "cuda" for tensor in tensors)
        if name in ("item", "_local_scalar_dense") and isinstance(args[0], FakeTensor):
            if on_device:
                self._gpu.note_sync(name)
            return _zero_of(args[0].dtype)
        if name in _COMPARISONS and any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if on_device:
                self._gpu.note_sync(name)
            return True
        if name == "_grouped_mm" and isinstance(args[0], FakeTensor) and not self._gpu.groups_products(args[0].dtype):
            self._gpu.note_sync(name)  # it copies the offsets to the host, and multiplies one expert after the other
            return args[0].new_empty((args[0].shape[0], args[1].shape[-1]))
        if name == "nonzero" and isinstance(args[0], FakeTensor):
            if on_device:
                self._gpu.note_sync(name)
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)  # as if all were set
        if name in _COPIES:
            for tensor in tensors:
                if isinstance(tensor, FakeTensor):
                    tensor.constant = None  # else its value would be moved to a real device
        result = func(*args, **kwargs)
        self._note(name, tensors, result, on_device=on_device)
        return result

    def _note(self, name: str, tensors: list[torch.Tensor], result: Any, *, on_device: bool) -> None:
        made = result.device.type if isinstance(result, torch.Tensor) else ""
        if made == "cuda":
            self._gpu.contexts.add(result.device.index)
        if made == "cuda" and (name not in _VIEWS or name.startswith(("empty", "new_empty"))):
            self._gpu.seen.largest_bytes = max(self._gpu.seen.largest_bytes, result.nbytes)
        if name in _SYNCS and on_device:
            self._gpu.note_sync(name)
        elif name in _COPIES:
            source = tensors[-1] if name == "copy_" else tensors[0]
            if source is not result:
                self._gpu.note_copy(source, made)
        elif name not in _VIEWS and (on_device or made == "cuda"):
            self._gpu.seen.operations[name] += 1


class _Event:
    """torch.cuda.Event: past when it is asked for, and until then the device has not run."""

    def __init__(self, gpu: FakeGPU, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self._gpu = gpu
        self._blocking = blocking
        self._at = 0

    def record(self, *_: Any) -> None:
        self._at = self._gpu.ring_steps.num_replayed

    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None:
        self._gpu.waits.append("block" if self._blocking else "spin")
        self._gpu.ring_steps.run(self._at)

    def query(self) -> bool:
        self._gpu.ring_steps.run(self._at)
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0


class _Stream:
    """torch.cuda.Stream."""

    num_made = 0

    def __init__(self, device: Any = None, **_: Any) -> None:
        type(self).num_made += 1

    def wait_stream(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...
    def synchronize(self) -> None: ...


class _Graph:
    """torch.cuda.CUDAGraph: a replay launches nothing else."""

    def __init__(self, gpu: FakeGPU) -> None:
        self._gpu = gpu
        self._capture = contextlib.ExitStack()
        self.captured = Seen()

    def capture_begin(self, pool: Any = None) -> None:
        self._capture.enter_context(self._gpu.graph(self))

    def capture_end(self) -> None:
        self._capture.close()

    def replay(self) -> None:
        self._gpu.seen.replays += 1
        self._gpu.ring_steps.replay(self.captured)

    def reset(self) -> None: ...


class RingSteps:
    """The steps that are one graph each, run when their end is waited for: as late as a device may run them.

    Each reads its slot of the ring then, as step_ring.py does, and writes the tag of its turn beside its tokens, which
    are 0. So a slot that was written again before that is found.
    """

    def __init__(self) -> None:
        self.num_replayed = 0
        self._replayed: deque[tuple[int, Any, Any, Any]] = deque()
        self._last_turn = 0

    def replay(self, captured: Seen) -> None:
        """Queue the step that a graph holds, if it holds one."""
        if "begin_step_kernel" not in captured.arguments:
            return
        slots = captured.arguments["begin_step_kernel"][0]._array
        turn = int(slots[:, 0].max())
        assert turn > self._last_turn, f"turn {turn} was launched before"
        self.num_replayed += 1
        self._last_turn = turn
        words = captured.arguments["end_step_kernel"][0]._array
        self._replayed.append((turn, slots, slots[turn % len(slots)].copy(), words))

    def run(self, number: int) -> None:
        """Run the first steps of those replayed. Raises AssertionError for a slot that has changed since."""
        while self._replayed and self.num_replayed - len(self._replayed) < number:
            turn, slots, launched, words = self._replayed.popleft()
            slot = turn % len(slots)
            assert (slots[slot] == launched).all(), f"slot {slot} was written again before turn {turn} had read it"
            words[slot, : launched[1]] = (turn % TAGS + 1) << 32


class _Driver:
    """torch.cuda.cudart(): memory of the host that was registered, by address."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


@dataclass(frozen=True)
class _Properties:
    name: str
    major: int
    minor: int
    multi_processor_count: int
    shared_memory_per_block_optin: int = 227 << 10
    L2_cache_size: int = 50 << 20
    total_memory: int = TOTAL_BYTES


class FakeGPU:
    """Two fake GPUs, "cuda:0" and "cuda:1", within a `with` block.

    capability    of both: (9, 0) is an H100
    graph_bytes   memory that each captured graph takes until it is dropped
    """

    def __init__(self, capability: tuple[int, int] = (9, 0), *, graph_bytes: int = 0) -> None:
        self.capability = capability
        self.graph_bytes = graph_bytes
        self.num_graphs = 0
        """Captured graphs that are not dropped."""
        self.current = 0
        self.seen = Seen()
        self.contexts: set[int] = set()
        """Devices on which a tensor was made: there a context would be open."""
        self.captures: list[Seen] = []
        """The records of each torch.cuda.graph block."""
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._stack = contextlib.ExitStack()
        self.driver = _Driver()
        self.ring_steps = RingSteps()
        self.waits: list[str] = []
        """Of each event that was waited for: if its thread left its core to others meanwhile."""
        self._is_on = False
        self._sync_debug_mode: int | str = 0

    def __enter__(self) -> FakeGPU:
        _Stream.num_made = 0
        graphs.capture_stream.cache_clear()
        for target, name, stand_in in self._stand_ins():
            self._stack.enter_context(mock.patch.object(target, name, stand_in))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def watch(self) -> Iterator[Seen]:
        """Record the block's own operations."""
        before, self.seen = self.seen, Seen()
        try:
            yield self.seen
        finally:
            self.seen = before

    @property
    def num_streams(self) -> int:
        """Streams made so far."""
        return _Stream.num_made

    def groups_products(self, dtype: torch.dtype) -> bool:
        """True if torch has a kernel for grouped products of this dtype, which reads the offsets on the device."""
        return dtype == torch.bfloat16 and self.capability[0] in (9, 10)

    def note_sync(self, name: str) -> None:
        """Record that the host waits for the device."""
        if self._sync_debug_mode in (2, "error"):
            raise RuntimeError("called a synchronizing CUDA operation")
        self.seen.syncs.append(f"{_place()} {name}")

    def note_copy(self, source: torch.Tensor, target: str) -> None:
        """Record a copy by the devices of its ends."""
        ends = (source.device.type, target)
        if ends == ("cpu", "cuda"):
            self.seen.to_device += 1
            if source.numel() and not getattr(source, "_is_pinned", False):
                self.seen.pageable.append(_place())
        elif ends == ("cuda", "cpu"):
            self.seen.to_host += 1
        elif ends == ("cuda", "cuda"):
            self.seen.operations["copy"] += 1

    def move(self, module: torch.nn.Module, device: Any) -> torch.nn.Module:
        """Stand in for Module.to: from here on tensors are fake."""
        target = torch.device(device)
        if target.type != "cuda":
            return module
        if not self._is_on:
            self._is_on = True
            self._masks = _masks_of(module)
            self._stack.enter_context(self._mode)
            self._stack.enter_context(_Recorder(self))
        target = torch.device("cuda", self.current if target.index is None else target.index)
        for part in module.modules():
            for name, parameter in list(part._parameters.items()):
                if parameter is not None:
                    part._parameters[name] = torch.nn.Parameter(_moved(parameter, target), requires_grad=False)
            for name, buffer in list(part._buffers.items()):
                if buffer is not None:
                    part._buffers[name] = _moved(buffer, target)
        return module

    def set_device(self, device: Any) -> None:
        """Take what torch.cuda.set_device takes: a number, or a device with its index."""
        index = torch.cuda._utils._get_device_index(device)
        if not 0 <= index < NUM_GPUS:
            raise RuntimeError(f"CUDA error: invalid device ordinal {index}")
        self.current = index

    def launch(self, kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **options: Any) -> None:
        """Record a launch of Triton. Raises AssertionError for a tensor that is not on the current device."""
        name = kernel.fn.__name__
        for value in (*args, *options.values()):
            if isinstance(value, torch.Tensor):
                where = value.device
                if where.type == "cpu" and value.data_ptr() in self.driver.registered:
                    continue
                assert where.type == "cuda", f"{name}: a tensor is on {where}"
                assert where.index == self.current, (
                    f"{name}: a tensor is on {where}, the current device is {self.current}"
                )
        self.seen.kernels[name] += 1
        self.seen.arguments[name] = args

    def _launch_kept(self, _: Any, kernel: Any, args: Any, *, grid: Any, strides: Any, options: Any) -> None:
        """Stand in for launch_kept, which asks Triton's driver for the device; there is no compiled kernel to keep."""
        kernel.run(*args, *strides, grid=grid, warmup=False, **options)

    def _classify_mask(self, function: Any, *, device: Any) -> Any:
        """Call the mask function on the fake device; its answer is that of the CPU."""
        keys = torch.arange(4, device=device)
        function(keys[0], keys[0], keys[3], keys)
        return self._masks.pop(0)

    @contextlib.contextmanager
    def graph(self, graph: Any, **_: Any) -> Iterator[None]:
        """Stand in for torch.cuda.graph."""
        with self.watch() as seen:
            yield
        if isinstance(graph, _Graph):
            graph.captured = seen
        self.captures.append(seen)
        self.num_graphs += 1
        weakref.finalize(graph, self._drop_graph)

    def _drop_graph(self) -> None:
        self.num_graphs -= 1

    def _mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return TOTAL_BYTES - (1 << 30) - self.num_graphs * self.graph_bytes, TOTAL_BYTES

    def _set_sync_debug_mode(self, mode: int | str) -> None:
        self._sync_debug_mode = mode

    def properties(self, device: Any = None) -> _Properties:
        return _Properties("fake", *self.capability, multi_processor_count=132)

    def _stand_ins(self) -> Iterator[tuple[Any, str, Any]]:
        cuda = torch.cuda
        yield FakeTensorMode, "avoid_device_init", True  # it asks is_available(), and would then want a real device
        yield fake_tensor, "init_gpu_context", lambda device: None  # torch 2.11 asks the same here
        yield cuda, "is_available", lambda: True
        yield cuda, "device_count", lambda: NUM_GPUS
        yield cuda, "current_device", lambda: self.current
        yield cuda, "set_device", self.set_device
        yield cuda, "get_device_capability", lambda device=None: self.capability
        yield cuda, "get_device_properties", self.properties
        yield cuda, "get_device_name", lambda device=None: "fake"
        yield cuda, "mem_get_info", self._mem_get_info
        for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
            yield cuda, name, lambda device=None: 1 << 30
        for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "set_stream"):
            yield cuda, name, lambda *_: None
        for name in ("current_stream", "default_stream"):
            yield cuda, name, lambda device=None: _Stream.__new__(_Stream)
        yield cuda, "cudart", lambda: self.driver
        yield cuda, "Stream", _Stream
        yield cuda, "stream", lambda stream: contextlib.nullcontext()
        yield cuda, "Event", functools.partial(_Event, self)
        yield cuda, "CUDAGraph", lambda: _Graph(self)
        yield cuda, "graph", self.graph
        yield cuda, "graph_pool_handle", lambda: (0, 0)
        yield cuda, "get_sync_debug_mode", lambda: self._sync_debug_mode
        yield cuda, "set_sync_debug_mode", self._set_sync_debug_mode
        yield torch.nn.Module, "to", lambda module, device: self.move(module, device)
        yield torch.Tensor, "pin_memory", _pinned
        yield torch.Tensor, "tolist", _tolist
        yield torch, "from_numpy", _from_numpy
        yield FakeTensor, "data_ptr", _address
        yield FakeTensor, "__deepcopy__", lambda tensor, memo: tensor.clone()  # not by the memory at this address
        yield triton.runtime.jit.JITFunction, "run", lambda kernel, *a, **k: self.launch(kernel, *a, **k)
        yield launching, "launch_kept", self._launch_kept
        # Questions about numbers: their answer is what it is on a machine where all is well.
        yield torch, "randint", _really(torch.randint)  # numbers of the host
        yield torch, "randperm", _really(torch.randperm)
        yield paged_model, "fingerprint", lambda module: "0" * 64
        yield probe, "classify_mask", self._classify_mask
        yield masking_utils, "find_packed_sequence_indices", lambda position_ids: None  # tokens of one sequence
        yield self_check, "_relative_error", _difference_of_kind
        yield self_check, "STEPS_ALONE", 1  # more of the same step are for the median of errors
        yield capture, "_line_of", _line_outside
        yield checkpoint, "find_fault", lambda model: None
        yield scaled_linear, "agree", _agree_in_kind
        yield product_trial, "agree", _agree_in_kind
        yield int4_linear, "has_equal_groups", lambda groups, num_groups: True
        yield int4_linear, "is_reordered", lambda groups: True
        yield fusion_trial.FusionTrial, "differ", _differ_in_kind


def _masks_of(module: torch.nn.Module) -> list[Any]:
    """Return the masks that the probe finds in a model on the CPU, in the order of its questions."""
    found: list[Any] = []
    real = probe.classify_mask

    def classify(function: Any, *, device: Any) -> Any:
        found.append(_REAL_CLASSIFY_MASK(function, device=device))
        return found[-1]

    with mock.patch.object(probe, "classify_mask", classify), contextlib.suppress(ValueError):
        probe.probe(copy.deepcopy(module))
    assert probe.classify_mask is real
    return found


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _zero_of(dtype: torch.dtype) -> Any:
    return False if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0


_real_tolist = torch.Tensor.tolist


def _agree_in_kind(found: torch.Tensor, expected: torch.Tensor, *, tolerance: float) -> bool:
    return (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)


_REAL_CLASSIFY_MASK = probe.classify_mask
_REAL_LINE_OF = capture._line_of


def _tolist(tensor: torch.Tensor) -> Any:
    if not isinstance(tensor, FakeTensor):
        return _real_tolist(tensor)
    if tensor.dim():
        return [_tolist(part) for part in tensor.unbind(0)]
    return tensor.item()


_REAL_FROM_NUMPY = torch.from_numpy


def _from_numpy(array: Any) -> torch.Tensor:
    """torch.from_numpy, with a way back to the memory."""
    tensor = _REAL_FROM_NUMPY(array)
    tensor._array = array  # type: ignore[attr-defined]
    return tensor


def _address(tensor: torch.Tensor) -> int:
    """The address of memory that came from NumPy, and one for all other tensors."""
    array = getattr(tensor, "_array", None)
    return 1 << 20 if array is None else int(array.ctypes.data)


def _pinned(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    assert tensor.device.type == "cpu", f"only memory of the host can be pinned, not {tensor.device}"
    tensor._is_pinned = True  # type: ignore[attr-defined]
    return tensor


def _really(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run the function with real tensors: it has nothing to do with the device."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def _line_outside(error: BaseException) -> str:
    """The line that graphs names, if this file's were torch's C++."""
    calls = [call for call in traceback.walk_tb(error.__traceback__) if call[0].f_code.co_filename != __file__]
    without = None
    for frame, line in reversed(calls):
        without = TracebackType(without, frame, frame.f_lasti, line)
    return _REAL_LINE_OF(error.with_traceback(without))


def _difference_of_kind(actual: torch.Tensor, expected: torch.Tensor) -> float:
    same = (actual.shape, actual.device) == (expected.shape, expected.device)
    return 0.0 if same else float("inf")


def _differ_in_kind(trial: Any, actual: Any, expected: Any, **_: Any) -> bool:
    return not isinstance(actual, torch.Tensor) or actual.shape != expected.shape


def _place() -> str:
    """The innermost line of Quire's, or of transformers', that is running."""
    for frame in reversed(traceback.extract_stack()):
        if "/worker/" in frame.filename or "/kernels/" in frame.filename or "/transformers/" in frame.filename:
            return f"{frame.filename.rsplit('/', 2)[-2]}/{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
    return "elsewhere"
