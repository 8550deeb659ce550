"""The cells of each grid, the most telling first: a run that is out of time leaves the last ones out."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from workload import FP8, LAYOUTS, Cell, Heads, uniform

LLAMA = Heads(32, 8, 128)
OTHER_HEADS = (Heads(16, 8, 128), Heads(32, 8, 64), Heads(32, 32, 128), Heads(64, 8, 128), Heads(16, 2, 128))
BATCHES = (1, 8, 16, 32, 64, 128, 256)
CONTEXTS = (1024, 4096, 8192, 16384, 32768)

TO_REACH_US = {
    (1, 1024): (11, 7),
    (1, 4096): (14, 10),
    (1, 16384): (27, 22),
    (1, 32768): (44, 38),
    (8, 1024): (17, 13),
    (8, 4096): (42, 37),
    (8, 16384): (139, 131),
    (8, 32768): (266, 255),
    (16, 1024): (24, 20),
    (16, 4096): (74, 68),
    (64, 4096): (284, 263),
    (128, 1024): (147, 136),
    (256, 4096): (1110, 1040),
}
"""Decode of LLAMA's heads, bf16, blocks of 16, on an H200, by batch and context: the bar, and the goal beyond it."""

MIXED = (
    ("32x128+32x4k", (128,) * 32 + (4096,) * 32),
    ("2x32k+30x4k", (32768,) * 2 + (4096,) * 30),
    ("1x64k+15x4k", (65536,) + (4096,) * 15),
    ("1x128k+31x4k", (131072,) + (4096,) * 31),
)
SWEEP = ((1, 32768), (8, 4096), (16, 1024), (64, 4096), (128, 1024))
"""Batches and contexts on which block sizes, dtypes, layouts and head shapes are compared."""


def decode_cells() -> Iterator[Cell]:
    for num_seqs, context in TO_REACH_US:
        yield uniform(LLAMA, num_seqs, context)
    for name, lens in MIXED:
        yield Cell(name, LLAMA, (1,) * len(lens), lens)
        yield uniform(LLAMA, len(lens), sum(lens) // len(lens), jitter=0.0)  # for comparison
    for num_seqs, context in SWEEP:
        yield uniform(LLAMA, num_seqs, context, block_size=64)
        yield uniform(LLAMA, num_seqs, context, kv_dtype=FP8)
        for layout in LAYOUTS[1:]:
            cell = uniform(LLAMA, num_seqs, context)
            yield Cell(cell.name, cell.heads, cell.query_lens, cell.seq_lens, layout=layout)
    for heads in OTHER_HEADS:
        for num_seqs, context in SWEEP:
            yield uniform(heads, num_seqs, context)
    for context in CONTEXTS:
        for num_seqs in BATCHES:
            if (num_seqs, context) not in TO_REACH_US:
                yield uniform(LLAMA, num_seqs, context)
    for heads in OTHER_HEADS:
        for block_size, kv_dtype in ((16, FP8), (64, torch.bfloat16), (64, FP8)):
            for num_seqs, context in SWEEP:
                yield uniform(heads, num_seqs, context, block_size=block_size, kv_dtype=kv_dtype)


def prefill_cells() -> Iterator[Cell]:
    for length in (8192, 2048, 512, 32768):
        yield Cell(f"q{length}", LLAMA, (length,), (length,))
    for prefix in (4096, 8192, 16384, 32768):
        yield Cell(f"q1024 on {prefix}", LLAMA, (1024,), (1024 + prefix,))
    for name, parts in (
        ("2q2k+8q1s1k", ((2, 2048, 2048), (8, 1, 1024))),
        ("4q1k+16q1s2k", ((4, 1024, 1024), (16, 1, 2048))),
        ("2q4k+32q1s1k", ((2, 4096, 4096), (32, 1, 1024))),
    ):
        queries = [query for times, query, _ in parts for _ in range(times)]
        lens = [length for times, _, length in parts for _ in range(times)]
        yield Cell(name, LLAMA, tuple(queries), tuple(lens))
    for heads in (Heads(16, 8, 128), Heads(32, 8, 64), Heads(32, 32, 128)):
        yield Cell("q8192", heads, (8192,), (8192,))
    yield Cell("q8192", LLAMA, (8192,), (8192,), block_size=64)
    yield Cell("q8192", LLAMA, (8192,), (8192,), kv_dtype=FP8)


def variant_cells() -> Iterator[Cell]:
    """Twelve decodes and six prompts, on which the choices of ours.VARIANTS are compared with the default."""
    for num_seqs, context in ((1, 1024), (1, 4096), (8, 1024), (16, 1024), (32, 1024), (128, 1024)):
        yield uniform(LLAMA, num_seqs, context)
    for num_seqs, context in ((1, 1024), (32, 1024), (128, 1024), (64, 4096)):
        yield uniform(Heads(32, 8, 64), num_seqs, context)
    name, lens = MIXED[0]
    yield Cell(name, LLAMA, (1,) * len(lens), lens)
    yield uniform(LLAMA, len(lens), sum(lens) // len(lens), jitter=0.0)  # for comparison
    for length, prefix in ((2048, 0), (8192, 0), (1024, 8192)):
        yield Cell(f"q{length} on {prefix}", LLAMA, (length,), (length + prefix,))
    for kv_dtype in (torch.bfloat16, FP8):
        yield Cell("q8192", LLAMA, (8192,), (8192,), block_size=64, kv_dtype=kv_dtype)
    yield Cell("q8192", LLAMA, (8192,), (8192,), kv_dtype=FP8)


DRY_HEADS = Heads(2, 1, 32)


def dry_cells(grid: str) -> Iterator[Cell]:
    """One cell of each kind, small enough for the interpreter."""
    fp32 = {"q_dtype": torch.float32, "kv_dtype": torch.float32}
    if grid == "variants":
        for each in ("decode", "prefill"):
            yield next(dry_cells(each))
        yield Cell("q70", DRY_HEADS, (70,), (70,), block_size=64, **fp32)
    elif grid == "decode":
        yield Cell("2x40", DRY_HEADS, (1, 1), (40, 40), **fp32)
        yield Cell("3 and 70", DRY_HEADS, (1, 1), (3, 70), layout=LAYOUTS[2], **fp32)
    else:
        yield Cell("q20", DRY_HEADS, (20,), (20,), layout=LAYOUTS[1], **fp32)
        yield Cell("q5 on 30, and 1 on 40", DRY_HEADS, (5, 1), (35, 41), **fp32)
