"""The parts of a capture of CUDA graphs that decode steps, the pieces of mixed steps, and small steps share."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch

Size = TypeVar("Size")

_TORCH = Path(torch.__file__).parent


class CannotCapture(Exception):
    """A model's step can't run as CUDA graphs; the message says why."""


@lru_cache(maxsize=1)
def capture_stream() -> torch.cuda.Stream:
    """The stream of all captures of this process: libraries keep a workspace for each stream they see."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


@contextmanager
def on_capture_stream() -> Iterator[None]:
    """Run the block on the capture stream, in order with the work before and behind it."""
    stream = capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


@contextmanager
def waits_refused() -> Iterator[None]:
    """Raise CannotCapture, naming the line, if the block waits for the device: a capture would break off there."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        raise CannotCapture(f"its forward waits for the device at {_line_of(error)}") from error
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def capture_each(
    sizes: Iterable[Size],
    *,
    largest: Size,
    prepare: Callable[[Size], object],
    run: Callable[[Size], object],
    capture: Callable[[Size], object],
    forget: Callable[[], object],
    is_warm: bool = False,
) -> None:
    """Capture the graphs of each size, in the order given: the largest first, so that the others find its memory.

    prepare     puts padding alone in place, which reads and writes no block
    run         does the work of a size, as it is
    capture     makes and keeps its graphs
    forget      drops all graphs that were kept
    is_warm     says that the work of each size has been done before

    Raises CannotCapture if the work waits for the device, or does anything else that a graph can't hold; then nothing
    is kept. Cost: two runs of the largest, and two of each size, or one if they are warm.
    """

    def warm_up(size: Size) -> None:
        """Compile, and let libraries allocate their memory."""
        prepare(size)
        with on_capture_stream():
            run(size)

    try:
        warm_up(largest)  # work that is done only once may wait
        with waits_refused():
            run(largest)
        for size in sizes:
            if not is_warm:
                warm_up(size)
            capture(size)
    except Exception as error:
        forget()
        raise cannot_capture(error) from error


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, with the allocator's reserve. Waits for the device."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def measured_capture(capture: Callable[[], None], device: torch.device) -> str:
    """Capture; return the time and the memory that it took, for the log. Waits for the device."""
    before, start = free_bytes(device), time.perf_counter()
    capture()
    mib = (before - free_bytes(device)) / 2**20
    return f"captured in {time.perf_counter() - start:.1f} s, {mib:,.0f} MiB"


def cannot_capture(error: Exception) -> CannotCapture:
    """Leave the state that a failed capture may have left behind; return its cause."""
    torch.cuda.set_stream(torch.cuda.default_stream())
    torch.cuda.synchronize()
    return CannotCapture(first_cause(error))


def first_cause(error: BaseException) -> str:
    """The first line of what went wrong first: a capture that breaks off raises again while it is closed."""
    while not isinstance(error, CannotCapture) and isinstance(error.__context__, Exception):
        error = error.__context__
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, CannotCapture) else f"{type(error).__name__}: {text}"


def _line_of(error: BaseException) -> str:
    """The innermost line of Python that raised it, "file.py:12 in forward": of the model's, if torch's is below it."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not Path(frame.filename).is_relative_to(_TORCH)]
    frame = (outside or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
