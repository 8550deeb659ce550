"""A Chrome trace of some steps: the phases of the model thread and the device.

Ranges are named by `phase`, which costs next to nothing while nothing is recorded:

    step N
      apply grant       block tables, copies
      prepare batch     the step's integers, sent to the device
      forward
        order           of several ranks: the step, to the others
        attention L     of layer L: keys and values to their slots, then attention
      sample            logits to tokens, on the device
      read tokens       the host waits for them
      await ranks       of several ranks: until the others are past the step
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

log = logging.getLogger("quire.worker")

_recording = False


def phase(name: str) -> AbstractContextManager[object]:
    """A named range of the trace; nothing while none is recorded."""
    return record_function(name) if _recording else nullcontext()


class StepProfiler:
    """Records some steps once, then writes them. Lives on the model thread, as torch's profiler has to."""

    def __init__(self, path: Path, first: int, count: int) -> None:
        """`count` steps from the `first` that this process runs, which is 1."""
        self._path = path
        self._first = first
        self._count = count
        self._num_seen = 0
        self._profile: Any = None

    @contextlib.contextmanager
    def step(self, step_number: int) -> Iterator[None]:
        """Record the step that runs in this context, if it is one of those to record."""
        self._num_seen += 1
        if self._num_seen == self._first:
            self._start()
        with phase(f"step {step_number}"):
            yield
        if self._num_seen == self._first + self._count - 1:
            self.stop()

    def stop(self) -> None:
        """Writes the recording; nothing if it is empty or written already."""
        global _recording
        if self._profile is None:
            return
        _recording = False
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the last step may only be launched
        self._profile.stop()
        num_recorded = self._num_seen - self._first + 1
        try:
            self._profile.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            log.error("no profile written path=%s error=%s", self._path, error)
        else:
            log.info("profile of %d steps written path=%s", num_recorded, self._path)
        self._profile = None

    def _start(self) -> None:
        global _recording
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()
        _recording = True
