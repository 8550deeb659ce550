# ruff: noqa: N803
"""A Triton kernel that reads memory and writes next to nothing: the rate at which a GPU can read."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

NUM_PROGRAMS = 8 * 132
"""Eight for each multiprocessor of an H200."""


@triton.jit
def _read(
    words_ptr,  # [num_words] int32
    sums_ptr,  # [programs] int32
    num_words,
    WORDS: tl.constexpr,
):
    """Each program reads every so many words and adds them up, 16 bytes a load."""
    start = tl.program_id(0).to(tl.int64) * WORDS
    step = tl.num_programs(0).to(tl.int64) * WORDS
    total = tl.zeros([WORDS], tl.int32)
    for first in range(start, num_words, step):
        total += tl.load(words_ptr + first + tl.arange(0, WORDS))
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total, 0))


def read_stream(words: Tensor, sums: Tensor, *, words_per_program: int = 4096) -> None:
    """Read every word once, and write one sum per program.

    words   [n]     int32, n a multiple of words_per_program
    sums    [P]     int32, one per program
    """
    _read[(sums.shape[0],)](words, sums, words.shape[0], WORDS=words_per_program, num_warps=8)
