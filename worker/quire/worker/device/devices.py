"""The device that a worker computes on. The file imports torch, and nothing that takes longer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.serving.runtime import keep_freed_memory

DEVICE_TYPES = ("cpu", "cuda")


def pick_device(name: str) -> torch.device:
    """Return the device of a --device flag; a GPU always has its index. "auto" is the first GPU, or the CPU.

    Raises ValueError, naming the flag, for a GPU that is not there and for a device of another kind.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in DEVICE_TYPES:
        raise ValueError(f"--device {name}: it must be auto, cpu, cuda or cuda:INDEX")
    if device.type == "cpu":
        return device
    if torch.version.hip is not None:
        raise ValueError(f"--device {name}: this torch is built for AMD GPUs, and the kernels run on NVIDIA's only")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if index >= num_gpus:
        raise ValueError(f"--device {name}: torch finds {num_gpus} GPUs on this machine")
    return torch.device("cuda", index)


def use_device(device: torch.device) -> Callable[[], None]:
    """Make a GPU the current one of this thread. Returns a function that does the same on another thread.

    A thread without a current GPU would open a context on the first one, which may belong to another process. On a
    CPU the process keeps what a step frees for the next one.
    """

    def use() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)

    if device.type == "cpu":
        keep_freed_memory()
    use()
    return use
