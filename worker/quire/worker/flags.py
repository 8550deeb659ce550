"""The worker's own flags, and the types of their values. `quire up` has them, too: nothing heavy is imported here."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import click

from quire.cache.v1.admission_bounds import ADAPTER_NAME, ADAPTER_NAME_LIMIT, MAX_ADAPTERS
from quire.serving.flags import DIAL_ADDRESS, UNIX_ADDRESS, Flag, option
from quire.serving.runtime_folder import default_cachemgr
from quire.worker.adapter_bounds import DEFAULT_BOUNDS

DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPE_NAMES = ("auto", "bfloat16", "float16", "float8")
QUANTIZATION_NAMES = ("int8", "fp8")
ATTENTION_NAMES = ("auto", "torch", "triton", "flashinfer")
LAYER_GROUP_NAMES = ("auto", "one")
PRODUCT_NAMES = ("auto", "own", "library")
STEP_GRAPH_NAMES = ("parts", "one")
WAIT_NAMES = ("block", "spin")
# Defaults that `make gpu-ten-minutes ARGS="--decide ..."` writes.
DEFAULT_STEP_GRAPH = "parts"
DEFAULT_MAX_WHOLE_GRAPH_TOKENS = 0
MAX_RANKS = 256
BYTE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


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


class NamedFolder(click.ParamType[tuple[str, Path]]):
    """NAME=PATH: a name for clients, and a folder."""

    name = "adapter"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Path]:
        if isinstance(value, tuple):
            return value
        name, separator, path = str(value).partition("=")
        if not separator or not re.fullmatch(ADAPTER_NAME, name):
            self.fail(f"{value!r} is not NAME=PATH with a name of {ADAPTER_NAME_LIMIT}", param, ctx)
        return name, Path(path)


def default_threads() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


OWN_FLAGS: list[Flag] = [
    option("--model", required=True, metavar="PATH_OR_HUB_ID", help="The model: a folder, or a hub id."),
    option(
        "--cachemgr",
        type=DIAL_ADDRESS,
        default=default_cachemgr(),
        metavar="ADDRESS",
        help="Address of the cachemgr that manages the pool: host:port or unix:/path.",
    ),
    option(
        "--advertise",
        type=DIAL_ADDRESS,
        metavar="ADDRESS",
        help="Address at which clients reach this worker, if it is not the first --listen address (such as 0.0.0.0).",
    ),
    option("--pool", default="default", metavar="NAME", help="The pool's name at the cachemgr."),
    option(
        "--num-blocks",
        type=click.IntRange(min=2),
        metavar="BLOCKS",
        help="Blocks in the pool, the null block included.",
    ),
    option("--kv-cache-memory", type=ByteSize(), metavar="BYTES", help="Memory for the pool, like 512M or 1.5G."),
    option(
        "--host-memory",
        type=ByteSize(),
        default=0,
        show_default="no host tier",
        metavar="BYTES",
        help="Memory of this machine for the blocks of preempted sequences, like 16G; pinned on a GPU.",
    ),
    option(
        "--host-cache-share",
        type=click.FloatRange(0, 1),
        default=0.0,
        show_default="0: none",
        metavar="FRACTION",
        help="The part of --host-memory that copies of evicted blocks may have: prompts find them there. Preempted "
        "sequences come first.",
    ),
    option(
        "--disk-dir",
        type=click.Path(file_okay=False, path_type=Path),
        show_default="no disk",
        metavar="PATH",
        help="Directory for copies of cached blocks, which outlive the worker. They are keys and values of prompts: "
        "the directory is made for this user alone. Needs --disk-memory and --host-cache-share.",
    ),
    option(
        "--disk-memory",
        type=ByteSize(),
        default=0,
        show_default="no disk",
        metavar="BYTES",
        help="The most bytes of files in --disk-dir, like 200G.",
    ),
    option(
        "--disk-write-rate",
        type=ByteSize(),
        default="200M",
        metavar="BYTES",
        help="The limit of bytes written to --disk-dir per second. What is evicted faster is not written.",
    ),
    option(
        "--holder",
        type=UNIX_ADDRESS,
        show_default="the pool ends with the worker",
        metavar="unix:PATH",
        help="Keep the pool beyond this process: the address of a running `quire holder`. On a GPU needs --num-blocks.",
    ),
    option(
        "--verify-kept-blocks",
        is_flag=True,
        help="Compare all kept blocks with their checksums at start, not only a sample.",
    ),
    option(
        "--memory-share",
        type=click.FloatRange(0, 1, min_open=True),
        show_default="0.5 on a CPU, 0.9 on a GPU, but no more blocks than --max-num-seqs sequences can use",
        metavar="FRACTION",
        help="If neither blocks nor bytes are given: on a CPU, part of the free memory for the pool; on a GPU, part of "
        "all memory for the model, its largest step and the pool.",
    ),
    option("--block-size", type=click.IntRange(1, 1024), default=16, metavar="TOKENS", help="Tokens per block."),
    option("--dtype", type=click.Choice(DTYPE_NAMES), default="auto", help="Weights and activations; auto: as saved."),
    option(
        "--quantization",
        type=click.Choice(QUANTIZATION_NAMES),
        show_default="weights as the checkpoint has them",
        help="Quantize the linear layers of a checkpoint with plain weights at load, weights and inputs to 8 bits, "
        "half of 16, and less exact. int8 is for a CPU, fp8 for a GPU that multiplies it.",
    ),
    option(
        "--kv-dtype",
        type=click.Choice(KV_DTYPE_NAMES),
        default="auto",
        help="Keys and values; auto: as activations. float8 (e4m3) takes half the memory of 16 bits and is less exact. "
        "Each head and layer has a scale: the checkpoint's, else one calibrated at start.",
    ),
    option(
        "--device",
        default="auto",
        metavar="DEVICE",
        help="Device for the model: cpu, cuda, cuda:1; auto: a GPU if there is one.",
    ),
    option(
        "--attention",
        type=click.Choice(ATTENTION_NAMES),
        default="auto",
        help="Attention over the pool; auto: triton on a GPU if the block size is 16, 32, 64 or 128, else torch. "
        "flashinfer: triton for decodes and FlashInfer, if it is installed, for prompts.",
    ),
    option(
        "--layer-groups",
        type=click.Choice(LAYER_GROUP_NAMES),
        default="auto",
        help="auto: layers with a sliding window or chunks have block tables of their own, and give up the blocks "
        "behind it. one: one block table for all layers, which keeps all blocks.",
    ),
    option(
        "--cuda-graphs/--no-cuda-graphs",
        default=True,
        help="On a GPU, replay steps of one token per sequence as CUDA graphs, if the model allows it.",
    ),
    option(
        "--max-graph-tokens",
        type=click.IntRange(min=0),
        show_default="by the model's layers and parameters: as many as the device computes while the host launches "
        "them; about 1,100 for 8B, --max-step-tokens up to 1.7B",
        metavar="TOKENS",
        help="With --cuda-graphs, steps with prompts of up to so many tokens in all are replayed as CUDA graphs too, "
        "but for their attention; 0: none are.",
    ),
    option(
        "--max-whole-graph-tokens",
        type=click.IntRange(min=0),
        default=DEFAULT_MAX_WHOLE_GRAPH_TOKENS,
        metavar="TOKENS",
        help="With --cuda-graphs, steps with prompts of up to so many tokens in all, at most 1,024, of up to 16 "
        "sequences of at most 2,048 tokens are replayed as one CUDA graph, attention included; 0: none are.",
    ),
    option(
        "--dependent-launch/--no-dependent-launch",
        default=None,
        show_default="off until it is measured",
        help="On a Hopper GPU or a later one, start each of Quire's kernels while the one in front of it still runs.",
    ),
    option(
        "--step-graph",
        type=click.Choice(STEP_GRAPH_NAMES),
        default=DEFAULT_STEP_GRAPH,
        help="With --cuda-graphs, a step of one token per sequence is parts: three graphs, with copies before and "
        "behind. Or one: a single graph, which reads its inputs from this machine's memory and writes its tokens "
        "there. Steps with more to do than to sample have parts.",
    ),
    option(
        "--wait",
        type=click.Choice(WAIT_NAMES),
        default="block",
        help="For the end of a step of one token per sequence on a GPU, if it takes less than 2 ms: block leaves the "
        "core to others until the GPU interrupts it, spin keeps a core busy, which this process must have to spare.",
    ),
    option(
        "--max-model-len", type=click.IntRange(min=1), metavar="TOKENS", help="Longest sequence; default: the model's."
    ),
    option(
        "--max-num-seqs",
        type=click.IntRange(min=1),
        default=256,
        metavar="SEQUENCES",
        help="Sequences that may hold blocks at a time.",
    ),
    option(
        "--max-step-tokens",
        type=click.IntRange(min=1),
        default=8192,
        metavar="TOKENS",
        help="Tokens one step may compute.",
    ),
    option(
        "--max-draft-tokens",
        type=click.IntRange(0, 64),
        default=8,
        metavar="TOKENS",
        help="Drafts of one sequence that a step may verify. A model that keeps states verifies none.",
    ),
    option(
        "--threads",
        type=click.IntRange(min=1),
        default=default_threads,
        show_default="as many as cores",
        metavar="THREADS",
        help="CPU threads for the model.",
    ),
    option(
        "--step-timeout",
        "step_timeout_s",
        type=click.FloatRange(min=0),
        show_default="120 on a GPU, no limit on a CPU",
        metavar="SECONDS",
        help="Time limit of one step. After it health is NOT_SERVING; after twice the time the process ends with "
        "status 1. 0: no limit.",
    ),
    option(
        "--profile",
        type=NewFile(),
        metavar="FILE",
        help="Write a Chrome trace of some steps to this file, once they have run.",
    ),
    option(
        "--profile-steps",
        type=StepRange(),
        default="20:10",
        metavar="FIRST:COUNT",
        help="The steps that --profile records, counted from the first step of this process.",
    ),
    option("--revision", metavar="REVISION", help="The model's revision on the hub."),
    option("--trust-remote-code", is_flag=True, help="Run code that comes with the model. Trust its author first."),
    option(
        "--fuse/--no-fuse",
        default=None,
        show_default="where there is a GPU",
        help="Run the layers of a model in fewer, fused operations, if their kind is known.",
    ),
    option(
        "--deterministic",
        is_flag=True,
        help="Give a sequence the same tokens and log-probabilities, bit for bit, in any step, and after each "
        "preemption and restart. Steps are slower, those of few sequences and of prompts most.",
    ),
    option(
        "--lora",
        type=NamedFolder(),
        multiple=True,
        metavar="NAME=PATH",
        help="A LoRA adapter as PEFT saves it: requests for the model NAME take it. May be given several times; in the "
        "environment, separated by spaces.",
    ),
    option(
        "--enable-lora",
        is_flag=True,
        help="On a GPU, take memory for --max-loras adapters at start, to load them later; --lora does so, too. On a "
        "CPU adapters can be loaded in any case.",
    ),
    option(
        "--max-loras",
        type=click.IntRange(1, MAX_ADAPTERS),
        default=DEFAULT_BOUNDS.max_adapters,
        metavar="COUNT",
        help="Most LoRA adapters at a time. One more takes the place of the one that was unused the longest.",
    ),
    option(
        "--max-lora-rank",
        type=click.IntRange(1, DEFAULT_BOUNDS.max_rank),
        default=DEFAULT_BOUNDS.max_rank,
        metavar="RANK",
        help="Largest rank of an adapter's updates.",
    ),
    option(
        "--lora-memory",
        type=ByteSize(),
        default=DEFAULT_BOUNDS.max_bytes,
        show_default="4G",
        metavar="BYTES",
        help="Most memory for the weights of all adapters, like 512M. On a GPU it is taken at start, as far as "
        "--max-loras adapters of --max-lora-rank need it; if it is too little, there are fewer adapters at a time.",
    ),
    option(
        "--products",
        type=click.Choice(PRODUCT_NAMES),
        default="auto",
        help="Matrix products of up to 128 tokens in fused layers on a GPU. auto: Quire's own kernels where they were "
        "measured to be faster on this GPU, else cuBLAS. own: own kernels wherever they run. library: cuBLAS.",
    ),
    option(
        "--tensor-parallel-size",
        type=click.IntRange(1, MAX_RANKS),
        default=1,
        metavar="RANKS",
        help="Processes, with a device each, that the model and the pool are divided among. They are started on this "
        "machine, unless torchrun has started this one as one of them.",
    ),
]
