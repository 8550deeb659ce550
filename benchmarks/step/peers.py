"""Decode steps of peers on the same device: a compiled loop over a static cache, and nano-vllm with Triton kernels.

    quire bench step peers                      Qwen3 0.6B and Llama 3.1 8B on a GPU
    quire bench step peers --quick              tiny, on a CPU: both loops against transformers' own tokens

Random weights of the same shapes as `quire bench step`. The compiled loop is what a careful user of transformers has:
each decoder layer compiled by torch, keys and values in a cache of fixed size, and on a GPU the whole step as one CUDA
graph, with the next token chosen in it. nano-vllm-triton is read from the folder .peers/nano-vllm-triton, which git
ignores; benchmarks/harness/obtain_peers.py says how to fill it. A peer that is not there is a row that says so.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from report import Findings, benchmark, table
from rich.progress import Progress
from shapes import LLAMA_8B, QWEN3_06B, TINY, Shape
from torch import Tensor
from transformers import AutoModelForCausalLM, StaticCache

NANO_VLLM = Path(__file__).parents[2] / ".peers/nano-vllm-triton"
NUM_STEPS, QUICK_STEPS = 50, 6
CONTEXT, QUICK_CONTEXT = 1024, 20
BATCHES, QUICK_BATCHES = (1, 32), (1, 3)


@dataclass(frozen=True, slots=True)
class Row:
    """A peer's decode steps: milliseconds of each, or the reason why there are none."""

    peer: str
    model: str
    num_seqs: int
    context: int
    step_ms: list[float]
    absent: str = ""

    def describe(self) -> dict[str, Any]:
        return asdict(self) | {"median_ms": statistics.median(self.step_ms) if self.step_ms else None}


class StaticLoop:
    """Greedy decoding of sequences of one length, with a cache of fixed size and compiled layers.

    backend  of torch.compile: "inductor", or "eager" to trace without compiling
    """

    def __init__(self, model: Any, *, num_seqs: int, max_len: int, backend: str) -> None:
        self._model = model
        self._cache = StaticCache(config=model.config, max_cache_len=max_len)
        self._tokens = torch.zeros(num_seqs, 1, dtype=torch.int64, device=model.device)
        self._position = torch.zeros(1, dtype=torch.int64, device=model.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._backend = backend

    def prefill(self, prompts: Tensor) -> Tensor:
        """Compute prompts [B, L], then compile the layers. Returns the next tokens [B, 1]."""
        positions = torch.arange(prompts.shape[1], device=prompts.device)
        self._tokens.copy_(self._forward(prompts, positions))
        self._position.fill_(prompts.shape[1])
        for layer in self._model.model.layers:
            layer.compile(backend=self._backend, fullgraph=True, dynamic=False)
        return self._tokens.clone()

    def step(self) -> Tensor:
        """Compute one token of each sequence. Returns the loop's own tensor [B, 1]."""
        if self._graph is None:
            self._next()
        else:
            self._graph.replay()
        return self._tokens

    def capture(self) -> None:
        """Replay steps as one CUDA graph from now on. The steps until it is captured count."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles, allocates
                self._next()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._next()

    def _next(self) -> None:
        self._tokens.copy_(self._forward(self._tokens, self._position))
        self._position.add_(1)

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        done = self._model(
            input_ids=tokens,
            position_ids=positions[None].expand(len(tokens), -1),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return done.logits[:, -1].argmax(-1, keepdim=True)


def static_loop(shape: Shape, num_seqs: int, *, quick: bool, device: torch.device) -> list[float]:
    """Return the milliseconds of each step."""
    context, num_steps = (QUICK_CONTEXT, QUICK_STEPS) if quick else (CONTEXT, NUM_STEPS)
    model = load(shape, device)
    prompts = draw(shape, num_seqs, context, device)
    with torch.inference_mode():
        loop = StaticLoop(
            model, num_seqs=num_seqs, max_len=context + num_steps + 16, backend="eager" if quick else "inductor"
        )
        loop.prefill(prompts)
        if device.type == "cuda":
            loop.capture()
        return [timed(loop.step, device) for _ in range(num_steps)]


def load(shape: Shape, device: torch.device) -> Any:
    """The shape with random weights, with torch's own attention."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape.config, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def draw(shape: Shape, num_seqs: int, length: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, shape.config.vocab_size, (num_seqs, length), generator=generator).to(device)


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Return milliseconds, on a GPU the GPU's own."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    call()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended))


def nano_vllm(shape: Shape, num_seqs: int, *, quick: bool, device: torch.device) -> list[float]:
    """Return the milliseconds of each decode step of nano-vllm-triton, as its own engine runs them.

    Raises LookupError if it is not there or needs a GPU.
    """
    if not (NANO_VLLM / "nanovllm").is_dir():
        raise LookupError(f"not here: {NANO_VLLM.relative_to(NANO_VLLM.parents[1])}/nanovllm")
    if device.type != "cuda":
        raise LookupError("it needs a GPU")
    sys.path.insert(0, str(NANO_VLLM))
    engines = importlib.import_module("nanovllm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        load(shape, device).cpu().save_pretrained(folder)
        engine = engines.LLM(folder, enforce_eager=False, max_model_len=4096)
        params = engines.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=NUM_STEPS)
        for prompt in draw(shape, num_seqs, CONTEXT, torch.device("cpu")).tolist():
            engine.add_request(prompt, params)
        taken = []
        while not engine.is_finished():
            torch.cuda.synchronize()
            start = time.perf_counter()
            _, num_tokens = engine.step()
            torch.cuda.synchronize()
            if num_tokens < 0:  # of a decode: minus the number of sequences
                taken.append(1e3 * (time.perf_counter() - start))
        return taken[3:]


PEERS: dict[str, Callable[..., list[float]]] = {
    "compiled loop, static cache": static_loop,
    "nano-vllm in Triton": nano_vllm,
}


def measure(quick: bool, progress: Progress, *, model: Sequence[str]) -> Findings:
    device = torch.device("cuda" if torch.cuda.is_available() and not quick else "cpu")
    shapes = (QWEN3_06B, LLAMA_8B) if device.type == "cuda" else (TINY,)
    shapes = tuple(shape for shape in shapes if not model or shape.name in model)
    context, batches = (QUICK_CONTEXT, QUICK_BATCHES) if device.type == "cpu" else (CONTEXT, BATCHES)
    task = progress.add_task("", total=len(shapes) * len(batches) * len(PEERS))
    rows = []
    for shape in shapes:
        for num_seqs in batches:
            for name, run in PEERS.items():
                progress.update(task, description=f"{shape.name}, {num_seqs}: {name}")
                rows.append(row(name, run, shape, num_seqs, context, quick=device.type == "cpu", device=device))
                progress.advance(task)
    figures = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "rows": [each.describe() for each in rows],
    }
    return Findings([shown(rows)], figures, file_name="step_peers")


def row(
    name: str,
    run: Callable[..., list[float]],
    shape: Shape,
    num_seqs: int,
    context: int,
    *,
    quick: bool,
    device: torch.device,
) -> Row:
    """Measure a peer. One that is not there, or fails, is a row with the reason."""
    taken: list[float] = []
    absent = ""
    try:
        taken = [round(each, 4) for each in run(shape, num_seqs, quick=quick, device=device)]
    except LookupError as error:
        absent = str(error.args[0])
    except Exception as error:
        absent = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
    finally:
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return Row(name, shape.name, num_seqs, context, taken, absent)


def shown(rows: Sequence[Row]) -> Any:
    made = table("decode steps of peers, ms", "peer", "model", "sequences x tokens", "median", "", words=3)
    for each in rows:
        median = f"{statistics.median(each.step_ms):.3f}" if each.step_ms else "–"
        made.add_row(each.peer, each.model, f"{each.num_seqs} x {each.context}", median, each.absent)
    return made


MODEL = click.Option(["--model"], multiple=True, metavar="NAME", help="Only this model, or these.")
main = benchmark("step peers", measure, packages=("torch", "transformers", "triton"), options=[MODEL])

if __name__ == "__main__":
    main()
