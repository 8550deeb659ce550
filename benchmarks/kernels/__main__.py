"""Paged attention: equal to attention over contiguous keys, and how long it takes beside gathering them first.

    quire bench kernels

On a CPU: the online softmax, block by block, against a softmax over the whole sequence, in float64; and the worker's
attention of a decode step against a gather into one padded batch and SDPA, in random block order. With a GPU also
`quire bench kernels gpu`: the Triton kernels beside others' and the card's bandwidth.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from batches import decode_batch
from lengths import evenly
from matplotlib import pyplot
from matplotlib.figure import Figure
from padded import padded_attention
from report import Findings, benchmark, plain, spread, table
from rich.progress import Progress
from torch import Tensor, nn

from quire.worker.attention.torch_attention import AttentionStep, Workspace, attention_step, paged_attention
from quire.worker.memory.kv_pool import KVPool
from quire.worker.model.probe import Causal, LayerSpec

BLOCK_SIZES = (16, 32, 64, 128)
QUERY_HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
"""Those of Qwen3-0.6B."""
SPEC = LayerSpec(
    layer_idx=0,
    num_query_heads=QUERY_HEADS,
    num_kv_heads=KV_HEADS,
    k_head_dim=HEAD_DIM,
    v_head_dim=HEAD_DIM,
    mask=Causal(),
    scaling=HEAD_DIM**-0.5,
    softcap=None,
    has_sinks=False,
)
BATCHES = (1, 8, 32)
CONTEXTS = (256, 1024, 4096)
DTYPES = (torch.float32, torch.bfloat16)
ROUNDS, QUICK_ROUNDS = 15, 2
MAX_CELL_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Equality:
    """The largest difference relative to the largest value of the result, by block size."""

    lengths: tuple[int, ...]
    worst: dict[int, float]


@dataclass(frozen=True, slots=True)
class Cell:
    """One decode step of one layer, µs of each round; and how far the two are apart."""

    num_seqs: int
    context: int
    is_mixed: bool
    dtype: str
    paged_us: list[float]
    gather_us: list[float]
    difference: float

    @property
    def speedup(self) -> float:
        return statistics.median(self.gather_us) / statistics.median(self.paged_us)


# -- equality ---------------------------------------------------------------------------------------------------------


def online_softmax(q: Tensor, k_blocks: Sequence[Tensor], v_blocks: Sequence[Tensor], scaling: float) -> Tensor:
    """One query [H, D] over blocks [S, H, D] one after the other, keeping only a maximum, a sum and a weighted sum."""
    maximum = q.new_full((q.shape[0],), -math.inf)
    total = q.new_zeros(q.shape[0])
    weighted = torch.zeros_like(q)
    for k, v in zip(k_blocks, v_blocks, strict=True):
        scores = torch.einsum("hd,shd->hs", q, k) * scaling
        raised = torch.maximum(maximum, scores.amax(1))
        weights, faded = torch.exp(scores - raised[:, None]), torch.exp(maximum - raised)
        total = total * faded + weights.sum(1)
        weighted = weighted * faded[:, None] + torch.einsum("hs,shd->hd", weights, v)
        maximum = raised
    return weighted / total[:, None]


def whole_softmax(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """Softmax over the concatenated sequence [m, H, D]."""
    return torch.einsum("hs,shd->hd", torch.softmax(torch.einsum("hd,shd->hs", q, k) * scaling, 1), v)


def measure_equality(lengths: tuple[int, ...]) -> Equality:
    generator = torch.Generator().manual_seed(0)
    worst = dict.fromkeys(BLOCK_SIZES, 0.0)
    for length in lengths:
        q = torch.randn(KV_HEADS, HEAD_DIM, generator=generator, dtype=torch.float64)
        # Large scores: a softmax without its running maximum would overflow.
        k = torch.randn(length, KV_HEADS, HEAD_DIM, generator=generator, dtype=torch.float64) * 8
        v = torch.randn(length, KV_HEADS, HEAD_DIM, generator=generator, dtype=torch.float64)
        whole = whole_softmax(q, k, v, 1.0)
        for size in BLOCK_SIZES:
            online = online_softmax(q, k.split(size), v.split(size), 1.0)
            worst[size] = max(worst[size], float((online - whole).abs().max() / whole.abs().max()))
    return Equality(lengths, worst)


# -- time -------------------------------------------------------------------------------------------------------------


class DecodeStep:
    """One token of each of several sequences, with blocks anywhere in a pool of one layer."""

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype, *, block_size: int = 16) -> None:
        generator = torch.Generator().manual_seed(len(lengths))
        self.batch, num_blocks = decode_batch(lengths, block_size=block_size, device="cpu", seed=len(lengths))
        self.pool = KVPool({0: SPEC}, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device="cpu")
        for tensor in self.pool.tensors():
            tensor[1:] = torch.randn(tensor[1:].shape, generator=generator).to(dtype)
        num = len(lengths)
        self._q = torch.randn(1, QUERY_HEADS, num, HEAD_DIM, generator=generator).to(dtype)
        self._k, self._v = (torch.randn(1, KV_HEADS, num, HEAD_DIM, generator=generator).to(dtype) for _ in range(2))
        self._module = nn.Module()
        self._module.layer_idx = 0
        self._workspace = Workspace()

    def attend(self, attention: Callable[..., tuple[Tensor, None]]) -> Tensor:
        step = AttentionStep(self.batch, self.pool, specs={0: SPEC}, workspace=self._workspace)
        with torch.inference_mode(), attention_step(step):
            return attention(self._module, self._q, self._k, self._v, None)[0]


def lengths_of(num_seqs: int, context: int, *, is_mixed: bool) -> list[int]:
    """All of the same length; or from an eighth of it to all of it, evenly."""
    return evenly(context // 8, context, num_seqs) if is_mixed else [context] * num_seqs


def measure_cell(num_seqs: int, context: int, *, is_mixed: bool, dtype: torch.dtype, rounds: int) -> Cell:
    """The two take turns; the first round does not count."""
    step = DecodeStep(lengths_of(num_seqs, context, is_mixed=is_mixed), dtype)
    samples: tuple[list[float], list[float]] = ([], [])
    results: list[Tensor] = []
    for _ in range(rounds + 1):
        results = []
        for taken, attention in zip(samples, (paged_attention, padded_attention), strict=True):
            start = time.perf_counter()
            results.append(step.attend(attention))
            taken.append(round((time.perf_counter() - start) * 1e6, 1))
    difference = float((results[0].double() - results[1].double()).abs().max())
    name = str(dtype).removeprefix("torch.")
    return Cell(num_seqs, context, is_mixed, name, samples[0][1:], samples[1][1:], difference)


def cells(*, quick: bool) -> list[tuple[int, int, bool, torch.dtype]]:
    """The cells with gathered keys and values that fit the memory."""
    if quick:
        return [(2, 64, is_mixed, dtype) for is_mixed in (False, True) for dtype in DTYPES]
    return [
        (num_seqs, context, is_mixed, dtype)
        for dtype in DTYPES
        for num_seqs in BATCHES
        for context in CONTEXTS
        for is_mixed in ((False, True) if num_seqs > 1 else (False,))
        if 2 * num_seqs * context * KV_HEADS * HEAD_DIM * dtype.itemsize <= MAX_CELL_BYTES
    ]


def measure_gpu() -> dict[str, Any]:
    """The grids of `quire bench kernels gpu`, in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "quire.cli", "bench", "kernels", "gpu", "--output", folder]
        subprocess.run(command, check=True)
        return {path.stem: json.loads(path.read_text()) for path in Path(folder).glob("*.json")}


# -- all of it --------------------------------------------------------------------------------------------------------


def measure(quick: bool, progress: Progress) -> Findings:
    chosen = cells(quick=quick)
    task = progress.add_task("equality in float64", total=len(chosen) + 1)
    equality = measure_equality((1, 17, 200) if quick else (1, 15, 16, 17, 200, 1000, 2048, 4096))
    progress.advance(task)
    measured = []
    for num_seqs, context, is_mixed, dtype in chosen:
        progress.update(task, description=f"{num_seqs} x {context} {dtype}")
        rounds = QUICK_ROUNDS if quick else ROUNDS
        measured.append(measure_cell(num_seqs, context, is_mixed=is_mixed, dtype=dtype, rounds=rounds))
        progress.advance(task)
    figures: dict[str, Any] = {
        "equality": asdict(equality),
        "heads": [QUERY_HEADS, KV_HEADS, HEAD_DIM],
        "threads": torch.get_num_threads(),
        "cells": [asdict(cell) | {"speedup": cell.speedup} for cell in measured],
    }
    if torch.cuda.is_available() and not quick:
        progress.update(task, description="the GPU's grids")
        figures["gpu"] = measure_gpu()
    notes = [] if torch.cuda.is_available() else ["There is no GPU here: `quire bench kernels gpu` was not run."]
    return Findings(tables(equality, measured), figures, lambda: plot(measured), notes, file_name="kernel")


def tables(equality: Equality, measured: Sequence[Cell]) -> list:
    shown = ", ".join(map(str, equality.lengths))
    first = table(
        f"online softmax over blocks against softmax over the sequence, float64, {shown} tokens",
        *("", *(f"blocks of {size}" for size in equality.worst)),
    )
    first.add_row("largest relative difference", *(f"{worst:.1e}" for worst in equality.worst.values()))
    second = table(
        f"attention of one layer, one token of each sequence, {QUERY_HEADS}/{KV_HEADS} heads of {HEAD_DIM}: ms",
        *("sequences", "tokens", "dtype", "paged", "gather + SDPA", "gather / paged", "difference"),
        words=3,
    )
    for cell in measured:
        tokens = f"{cell.context // 8} to {cell.context}" if cell.is_mixed else str(cell.context)
        second.add_row(
            *(str(cell.num_seqs), tokens, cell.dtype),
            *(spread([taken / 1e3 for taken in taken_us], ".2f") for taken_us in (cell.paged_us, cell.gather_us)),
            *(f"{cell.speedup:.2f}", f"{cell.difference:.0e}"),
        )
    return [first, second]


def plot(measured: Sequence[Cell]) -> Figure:
    """Gather over paged, a bar per cell."""
    figure, panels = pyplot.subplots(1, len(DTYPES), figsize=(10, 4), sharex=True)
    for axes, dtype in zip(panels, (str(dtype).removeprefix("torch.") for dtype in DTYPES), strict=True):
        chosen = [cell for cell in measured if cell.dtype == dtype]
        labels = [f"{cell.num_seqs} x {cell.context}{' mixed' if cell.is_mixed else ''}" for cell in chosen]
        bars = axes.barh(range(len(chosen)), [cell.speedup for cell in chosen], color="tab:blue")
        axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
        axes.set_yticks(range(len(chosen)), labels, fontsize=8)
        axes.invert_yaxis()
        axes.axvline(1, color="0.4", linewidth=0.8)
        axes.set_title(f"{dtype}, on a CPU", fontsize=10)
        axes.set_xlabel("time of gather + SDPA over paged")
        plain(axes)
    return figure


main = benchmark("kernels", measure, packages=("torch", "triton", "transformers"))

if __name__ == "__main__":
    main()
