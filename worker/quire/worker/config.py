"""The settings of a worker from its command line."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from quire.serving.addresses import Address
from quire.serving.dialing import DialOptions
from quire.serving.options import ServerOptions

DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPE_NAMES = ("auto", "bfloat16", "float16", "float8")
ATTENTION_NAMES = ("auto", "torch", "triton")
LAYER_GROUP_NAMES = ("auto", "one")
MAX_RANKS = 256
BYTE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """A worker's settings; `quire worker --help` describes the flags."""

    server: ServerOptions
    cachemgr: Address
    cachemgr_dial: DialOptions
    advertise: Address | None
    model: str
    pool: str
    dtype: str
    kv_dtype: str
    device: str
    attention: str
    layer_groups: Literal["auto", "one"]
    cuda_graphs: bool
    max_graph_tokens: int
    block_size: int
    num_blocks: int | None
    kv_cache_memory_bytes: int | None
    host_memory_bytes: int
    memory_share: float | None
    max_model_len: int | None
    max_num_seqs: int
    max_step_tokens: int
    threads: int
    step_timeout_s: float | None
    profile: Path | None
    profile_steps: tuple[int, int]
    revision: str | None
    trust_remote_code: bool
    fuse: bool | None
    tensor_parallel_size: int

    @property
    def has_ranks(self) -> bool:
        """True if the worker is a group of several ranks."""
        return self.tensor_parallel_size > 1

    @property
    def model_name(self) -> str:
        """The model's name for people: a folder's last part, or the hub id."""
        path = Path(self.model)
        return path.resolve().name if path.exists() else self.model

    @property
    def tokenizer(self) -> str:
        """The location of the tokenizer for clients: an absolute path, or the hub id."""
        path = Path(self.model)
        return str(path.resolve()) if path.exists() else self.model


class ByteSize(click.ParamType[int]):
    """A number of bytes: 4096, 512M, 1.5G (powers of 1,024)."""

    name = "bytes"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip().upper().removesuffix("IB").removesuffix("B")
        number, unit = (text[:-1], text[-1]) if text[-1:].isalpha() else (text, "")
        try:
            return int(float(number) * BYTE_UNITS[unit])
        except (KeyError, ValueError):
            self.fail(f"{value!r} is not a number of bytes, like 4096, 512M or 1.5G", param, ctx)


class NewFile(click.Path):
    """A file that can be written, in a folder that exists."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            self.fail(f"{path}: {str(path.parent)!r} is not a folder that can be written to", param, ctx)
        return path


class StepRange(click.ParamType[tuple[int, int]]):
    """FIRST:COUNT, both at least 1; FIRST alone is that one step."""

    name = "steps"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        first, _, count = str(value).partition(":")
        try:
            numbers = int(first), int(count or 1)
        except ValueError:
            numbers = (0, 0)
        if min(numbers) < 1:
            self.fail(f"{value!r} is not FIRST:COUNT, two numbers of at least 1, like 20:10", param, ctx)
        return numbers


def default_threads() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
