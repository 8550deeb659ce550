"""The division of a product of few rows among programs: a form, its tile, and the parts of the sum. Pure.

    gemv    up to 8 rows, no matrix instructions: a program reads a few rows of the weight as a whole
    dot     up to 128 rows, matrix instructions: a program has a tile of outputs and all rows, or a part of its sum

`default_tiling` is a guess by sizes; which one is fastest is a matter of measurement (`quire bench kernels products`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from quire.kernels.launching import DeviceLimits, ceil_div, next_power_of_2

Form = Literal["gemv", "dot"]
FORMS: tuple[Form, ...] = get_args(Form)

MAX_ROWS = {"gemv": 8, "dot": 128}
SPLITS = (1, 2, 4, 8, 16)
# Programs with a part of a split sum for each multiprocessor, at most: SkinnyWorkspace has memory for so many.
MOST_PARTS = 4
# Copies in flight of the dot form, at most.
MOST_STAGES = 4
# Outputs times rows, and kinds of sums, of a tile of the dot form at most.
MOST_SUMS = 64 * 128
# Bytes of one load of a thread. Rows of a weight have to begin at multiples of it.
LOAD_BYTES = 16

# A program of the gemv form adds up in registers: so many float32 for each thread, all rows and outputs together.
_GEMV_SUMS = 64
_MAX_WARPS = 8
# Steps of K that a part of a split sum has at least: fewer do not fill the stages.
_MIN_STEPS = 4


class Tiling(NamedTuple):
    """How a product runs.

    block_outputs   outputs of a program, columns of the result; with a gate so many gates and so many ups
    block_inputs    inputs of one step of its loop
    split           programs that share the sum of one tile; 1 for gemv
    num_stages      of copies in flight, dot only
    """

    form: Form
    block_outputs: int
    block_inputs: int
    num_warps: int
    num_stages: int = 1
    split: int = 1


def default_tiling(
    form: Form,
    *,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    itemsize: int,
    gated: bool = False,
    limits: DeviceLimits,
) -> Tiling:
    """A tiling that fits registers and shared memory, with a program or more for each multiprocessor if there can be.

    num_outputs are the columns of the result, so half of the weight's rows with a gate.
    """
    if form == "gemv":
        return _gemv(num_rows, num_outputs, num_inputs, itemsize, gated=gated, limits=limits)
    return _dot(num_rows, num_outputs, num_inputs, itemsize, gated=gated, limits=limits)


def padded_rows(form: Form, num_rows: int) -> int:
    """Rows of the tile that so many rows run in: a power of two, in the dot form at least 16."""
    return max(16 if form == "dot" else 1, next_power_of_2(num_rows))


def _gemv(
    num_rows: int, num_outputs: int, num_inputs: int, itemsize: int, *, gated: bool, limits: DeviceLimits
) -> Tiling:
    per_thread = LOAD_BYTES // itemsize
    rows, kinds = padded_rows("gemv", num_rows), 2 if gated else 1
    block_inputs = _gemv_inputs(num_inputs, itemsize, few_rows=rows * kinds <= 2)
    num_warps = min(_MAX_WARPS, max(1, block_inputs // (32 * per_thread)))
    lanes = max(1, block_inputs // (32 * num_warps))
    block_outputs = max(1, min(4, _GEMV_SUMS // (lanes * rows * kinds)))
    while block_outputs > 1 and ceil_div(num_outputs, block_outputs) < limits.num_multiprocessors:
        block_outputs //= 2
    return Tiling("gemv", block_outputs, block_inputs, num_warps)


def _gemv_inputs(num_inputs: int, itemsize: int, *, few_rows: bool) -> int:
    """One step where registers hold it, else the widest that leaves at most an eighth of its lanes without an input."""
    per_thread = LOAD_BYTES // itemsize
    whole = next_power_of_2(num_inputs)
    if few_rows and whole <= 32 * _MAX_WARPS * 2 * per_thread and 8 * num_inputs >= 7 * whole:
        return whole
    block_inputs = min(whole, 32 * _MAX_WARPS * per_thread)
    narrowest = min(whole, 32 * 4 * per_thread)
    while block_inputs > narrowest and 8 * num_inputs < 7 * block_inputs * ceil_div(num_inputs, block_inputs):
        block_inputs //= 2
    return block_inputs


def _dot(
    num_rows: int, num_outputs: int, num_inputs: int, itemsize: int, *, gated: bool, limits: DeviceLimits
) -> Tiling:
    rows = padded_rows("dot", num_rows)
    block_outputs = 32 if rows <= 32 or gated else 64
    block_inputs = (128 if rows < 128 else 64) * 2 // max(2, itemsize)
    block_inputs = min(block_inputs, max(16, next_power_of_2(num_inputs)))
    num_stages = MOST_STAGES
    while num_stages > 1 and _shared_bytes(rows, block_outputs, block_inputs, num_stages, itemsize, gated) > (
        limits.shared_memory_bytes
    ):
        num_stages -= 1
    tiles, steps = ceil_div(num_outputs, block_outputs), ceil_div(num_inputs, block_inputs)
    split = 1
    while tiles * split < limits.num_multiprocessors and split < SPLITS[-1] and steps >= 2 * split * _MIN_STEPS:
        split *= 2
    return Tiling("dot", block_outputs, block_inputs, 8 if rows == 128 else 4, num_stages, split)


def _shared_bytes(rows: int, block_outputs: int, block_inputs: int, num_stages: int, itemsize: int, gated: bool) -> int:
    weights = block_outputs * (2 if gated else 1)
    return (rows + weights) * block_inputs * num_stages * itemsize


def candidates(
    *, num_rows: int, num_outputs: int, num_inputs: int, itemsize: int, gated: bool = False, limits: DeviceLimits
) -> Iterator[Tiling]:
    """Tilings worth a measurement: each form that takes the rows, as guessed, with smaller tiles or another split."""
    sizes = {"num_rows": num_rows, "num_outputs": num_outputs, "num_inputs": num_inputs, "itemsize": itemsize}
    found: list[Tiling] = []
    for form in FORMS:
        if num_rows > MAX_ROWS[form]:
            continue
        guess = default_tiling(form, **sizes, gated=gated, limits=limits)
        found.append(guess)
        if form == "gemv":
            found += [guess._replace(block_outputs=count) for count in (1, 2) if count < guess.block_outputs]
            continue
        tiles, steps = ceil_div(num_outputs, guess.block_outputs), ceil_div(num_inputs, guess.block_inputs)
        for split in (guess.split // 2, guess.split * 2):
            if split in SPLITS and split <= steps and tiles * split <= MOST_PARTS * limits.num_multiprocessors:
                found.append(guess._replace(split=split))
    yield from dict.fromkeys(found)
