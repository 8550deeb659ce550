"""The time of one step of a worker, by its tokens: presets, and models fitted to `quire bench step`. Pure.

    additive   base + token * tokens + pair * pairs + context * keys + sequence * sequences
    roofline   overhead + max(base, token * tokens + pair * pairs) + context * keys + sequence * sequences

tokens are computed in the step; keys are the tokens that its sequences attend to, each sequence for itself; a pair is a
token and a key that it attends to. The roofline says that weights are read while products are computed: base is the
time to read them all, token and pair the time of the arithmetic. It has the form of a GPU's step. A small CPU is
described better by the additive form.

Some steps are not linear in their tokens or sequences: a product of 3 rows may take longer than one of 4. So token and
sequence may each be a curve instead of a number: the time of so many, by points.

A layer with a window reads fewer keys than one that sees all. keys and pairs are means over the model's layers.

A step that begins after IDLE_S without one takes idle_ratio times as long: caches may be cold, and clocks slow.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from operator import add, mul
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from quire.cache.v1.layer_spans import LayerGroupKind
from quire.client.engine.scheduling.layer_groups import FULL, LayerGroup
from quire.lab.errors import ConfigError

_FORMS = ("additive", "roofline")
_CURVES = ("token_s", "sequence_s")
IDLE_S = 0.1
_MOST_S = 1e6
_MOST_RATIO = 100
_MOST_COUNT = 1e9
_SECONDS_LIMIT = "seconds, 0 to 1e6"
_CURVE_LIMIT = (
    "seconds of each, 0 to 1e6; or at least 2 points [count, seconds]: counts that rise from 0 or 1 on, below 1e9, "
    "and seconds of 0 to 1e6"
)
_ALL_FULL: Mapping[LayerGroup, float] = MappingProxyType({FULL: 1.0})
_CELL = re.compile(
    r"(?:decode (?P<decodes>\d+) x (?P<cached>\d+)(?P<mixed> mixed)?"
    r"|prompt (?P<prompts>\d+) x (?P<new>\d+)(?: on (?P<on>\d+))?)$"
)

Curve = tuple[tuple[float, float], ...]
"""Points: a number of tokens or sequences, and the seconds of all of them. Linear between them and behind the last."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The coefficients, in seconds. copy_s is the time to copy a block to the host tier, or back; 0: unknown.

    read_s and write_s are the times to read a block from the disk and to write one; 0: unknown.
    token_s and sequence_s are the seconds of each, or a curve that begins with 0 or 1.
    """

    form: str
    base_s: float
    token_s: float | Curve
    context_s: float = 0.0
    pair_s: float = 0.0
    sequence_s: float | Curve = 0.0
    overhead_s: float = 0.0
    copy_s: float = 0.0
    read_s: float = 0.0
    write_s: float = 0.0
    idle_ratio: float = 1.0

    def __post_init__(self) -> None:
        if self.form not in _FORMS:
            raise ConfigError.of_field("fleet.step.form", self.form, f"one of {', '.join(_FORMS)}")
        if not _is_number(self.idle_ratio) or not 1 <= self.idle_ratio <= _MOST_RATIO:
            raise ConfigError.of_field("fleet.step.idle_ratio", self.idle_ratio, f"1 to {_MOST_RATIO}")
        for field in fields(self):
            name, value = f"fleet.step.{field.name}", getattr(self, field.name)
            if not field.name.endswith("_s"):
                continue
            if field.name in _CURVES and isinstance(value, list | tuple):
                object.__setattr__(self, field.name, _curve_of(name, value))
            elif not _is_number(value) or not 0 <= value < _MOST_S:
                raise ConfigError.of_field(name, value, _CURVE_LIMIT if field.name in _CURVES else _SECONDS_LIMIT)
        if self.base_s + self.overhead_s + _cost(self.token_s, 1) + _cost(self.sequence_s, 1) <= 0:
            raise ConfigError.of_field("fleet.step.base_s", self.base_s, "above 0, if no other part of a step is")

    def describe(self) -> list[str]:
        """Its lines in the table [fleet.step] of a configuration."""
        return [f"{field.name} = {_in_toml(getattr(self, field.name))}" for field in fields(self)]

    def seconds(
        self, starts: Sequence[int], counts: Sequence[int], parts: Mapping[LayerGroup, float] = _ALL_FULL
    ) -> float:
        """The time of a step that computes counts[i] tokens of a sequence after its first starts[i], without copies.

        parts: the part of the model's layers in each layer group; all together are 1.
        """
        num_keys, num_pairs = 0.0, 0.0
        for group, part in parts.items():
            keys, pairs = _seen(group, starts, counts)
            num_keys += part * keys
            num_pairs += part * pairs
        return self._seconds(sum(counts), num_keys, num_pairs, len(counts))

    def _seconds(self, num_tokens: int, num_keys: float, num_pairs: float, num_sequences: int) -> float:
        arithmetic = _cost(self.token_s, num_tokens) + self.pair_s * num_pairs
        products = self.base_s + arithmetic if self.form == "additive" else max(self.base_s, arithmetic)
        return self.overhead_s + products + self.context_s * num_keys + _cost(self.sequence_s, num_sequences)


def _in_toml(value: str | float | Curve) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(f"[{count:g}, {seconds:.6g}]" for count, seconds in value) + "]"
    return f'"{value}"' if isinstance(value, str) else f"{value:.6g}"


def _cost(time: float | Curve, count: int) -> float:
    """The seconds of so many tokens or sequences."""
    if not isinstance(time, tuple):
        return time * count
    after, share = _place([at for at, _ in time], count)
    (_, first_s), (_, last_s) = time[after - 1 : after + 1]
    return max(0.0, first_s + share * (last_s - first_s))


def _place(counts: Sequence[float], count: int) -> tuple[int, float]:
    """The index of the point at which the line through a count ends, and the part of that line before the count."""
    after = min(max(bisect_right(counts, count), 1), len(counts) - 1)
    return after, (count - counts[after - 1]) / (counts[after] - counts[after - 1])


def _curve_of(name: str, points: Sequence[Any]) -> Curve:
    """Raises ConfigError."""
    if not _is_curve(points):
        raise ConfigError.of_field(name, points, _CURVE_LIMIT)
    return tuple((float(count), float(seconds)) for count, seconds in points)


def _is_curve(points: Sequence[Any]) -> bool:
    for each in points:
        if not (isinstance(each, list | tuple) and len(each) == 2 and all(map(_is_number, each))):
            return False
    counts, seconds = [count for count, _ in points], [seconds for _, seconds in points]
    rises = len(points) > 1 and all(before < after for before, after in pairwise(counts))
    return rises and 0 <= counts[0] <= 1 and counts[-1] < _MOST_COUNT and all(0 <= each < _MOST_S for each in seconds)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _seen(group: LayerGroup, starts: Sequence[int], counts: Sequence[int]) -> tuple[float, float]:
    """The keys that a layer of a group reads for these runs, and the pairs.

    A run reads all that its first token sees, and its own tokens.
    """
    if group.kind is LayerGroupKind.FULL:
        return sum(starts) + sum(counts), sum(map(mul, starts, counts)) + sum(map(mul, counts, counts)) / 2
    ends = list(map(add, starts, counts))
    num_keys = sum(ends) - sum(map(group.first_seen, starts))
    return num_keys, sum(_pairs_before(group, end) for end in ends) - sum(_pairs_before(group, at) for at in starts)


def _pairs_before(group: LayerGroup, position: int) -> float:
    """The pairs of all tokens before a position in a layer with a window. A token with itself is half a pair."""
    window = group.num_window_tokens
    if group.kind is LayerGroupKind.SLIDING:
        begin = min(position, window)
        return begin * begin / 2 + (position - begin) * (window - 0.5)
    num_chunks, rest = divmod(position, window)
    return (num_chunks * window * window + rest * rest) / 2


@dataclass(frozen=True, slots=True)
class Preset:
    """A device with a model.

    kv_bytes_per_token   keys and values of all layers
    pool_tokens          tokens that the pool has room for beside the weights, with all layers in one group
    copy_bytes_per_s     between the pool and the host tier
    source               the derivation, for people
    """

    time: StepTime
    num_layers: int
    kv_bytes_per_token: int
    pool_tokens: int
    copy_bytes_per_s: float
    source: str

    def pool(self, block_size: int, layers_per_block: int) -> tuple[StepTime, int]:
        """The times of a pool with such blocks, and the number of blocks that there is room for."""
        block_bytes = block_size * layers_per_block * self.kv_bytes_per_token // self.num_layers
        time = replace(self.time, copy_s=block_bytes / self.copy_bytes_per_s)
        return time, self.pool_tokens * self.kv_bytes_per_token // block_bytes


@dataclass(frozen=True, slots=True)
class _Device:
    """By its maker's datasheet: bytes of memory and a second, and dense products a second."""

    name: str
    memory_bytes: float
    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class _Model:
    name: str
    num_weights: float
    num_embedding_weights: float
    num_layers: int
    hidden_size: int
    kv_size: int
    bytes_per_weight: int
    bytes_per_kv: int


# Reached parts of the datasheet's figures. Assumptions, not measurements: a decode step that reads weights at 75 % of
# the bandwidth, products at 60 % of the peak, attention at 40 %.
_BANDWIDTH_PART, _PRODUCT_PART, _ATTENTION_PART = 0.75, 0.60, 0.40
_OVERHEAD_S, _SEQUENCE_S = 0.5e-3, 2e-6
_BUS_BYTES_PER_S = 64e9
"""PCIe 5.0 with 16 lanes, each way: half of the 128 GB/s in NVIDIA's datasheets. Assumed to reach the memory's part."""
_MEMORY_PART = 0.9
"""Of the memory, for weights and pool."""


def _preset(device: _Device, model: _Model) -> Preset:
    """The roofline of a model on a device."""
    read = model.num_weights - model.num_embedding_weights  # an embedding is looked up, not read whole
    kv_bytes = 2 * model.num_layers * model.kv_size * model.bytes_per_kv
    bandwidth = _BANDWIDTH_PART * device.bytes_per_s
    products = _PRODUCT_PART * device.flops_per_s
    attention = _ATTENTION_PART * device.flops_per_s
    time = StepTime(
        "roofline",
        base_s=read * model.bytes_per_weight / bandwidth,
        token_s=2 * read / products,
        context_s=kv_bytes / bandwidth,
        pair_s=4 * model.num_layers * model.hidden_size / attention,
        sequence_s=_SEQUENCE_S,
        overhead_s=_OVERHEAD_S,
    )
    room = _MEMORY_PART * device.memory_bytes - model.num_weights * model.bytes_per_weight
    source = (
        f"{model.name} on {device.name}: {read / 1e9:.2f} G weights of {model.bytes_per_weight} B read per step at "
        f"{_BANDWIDTH_PART:.0%} of {device.bytes_per_s / 1e12:.2f} TB/s, {kv_bytes} B of keys and values a token at "
        f"the same rate, products at {_PRODUCT_PART:.0%} and attention at {_ATTENTION_PART:.0%} of "
        f"{device.flops_per_s / 1e12:.0f} TFLOP/s, {_OVERHEAD_S * 1e3:g} ms a step, copies to a host tier and back at "
        f"{_BANDWIDTH_PART:.0%} of {_BUS_BYTES_PER_S / 1e9:.0f} GB/s. The parts are assumptions."
    )
    return Preset(
        time=time,
        num_layers=model.num_layers,
        kv_bytes_per_token=kv_bytes,
        pool_tokens=int(room / kv_bytes),
        copy_bytes_per_s=_BANDWIDTH_PART * _BUS_BYTES_PER_S,
        source=source,
    )


# NVIDIA's datasheets of H100 SXM and H200 SXM: dense products, without sparsity. Shapes: the models' config.json.
_H100 = _Device("H100 SXM", memory_bytes=80e9, bytes_per_s=3.35e12, flops_per_s=989e12)
_H200 = _Device("H200 SXM", memory_bytes=141e9, bytes_per_s=4.8e12, flops_per_s=989e12)
_H200_FP8 = _Device("H200 SXM, FP8", memory_bytes=141e9, bytes_per_s=4.8e12, flops_per_s=1979e12)
_LLAMA_8B = _Model(
    "Llama 3.1 8B, BF16", 8.03e9, 128256 * 4096, 32, 4096, kv_size=8 * 128, bytes_per_weight=2, bytes_per_kv=2
)
_LLAMA_70B = _Model(
    "Llama 3.1 70B, FP8 weights and BF16 keys",
    70.6e9,
    128256 * 8192,
    80,
    8192,
    kv_size=8 * 128,
    bytes_per_weight=1,
    bytes_per_kv=2,
)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "h100-8b": _preset(_H100, _LLAMA_8B),
        "h200-8b": _preset(_H200, _LLAMA_8B),
        "h200-70b": _preset(_H200_FP8, _LLAMA_70B),
    }
)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured kind of step: num_sequences with `cached` tokens each compute `new` ones in `seconds`.

    Mixed sequences have `cached` tokens on average.
    """

    num_sequences: int
    cached: int
    new: int
    seconds: float
    model: str
    dtype: str
    is_mixed: bool = False

    @property
    def size(self) -> tuple[int, int, int]:
        """Equal for sequences of one length and for mixed ones."""
        return self.num_sequences, self.cached, self.new

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.new


def read_steps(path: Path, *, model: str | None = None, dtype: str | None = None) -> list[MeasuredStep]:
    """Read a model's steps of a result of `quire bench step`. None: those of the first one. Raises ConfigError."""
    try:
        steps = json.loads(path.read_text())["steps"]
        chosen = model or steps[0]["model"], dtype or steps[0]["dtype"]
        measured = [_measured(step) for step in steps if (step["model"], step["dtype"]) == chosen]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{path} is no result of `quire bench step`: {error!r}") from None
    if not measured:
        raise ConfigError(f"{path} has 0 steps of {' in '.join(chosen)}")
    return measured


def calibrate(path: Path, *, model: str | None = None, dtype: str | None = None) -> tuple[StepTime, float]:
    """Fit the additive form to measured steps, as read_steps() reads them; return it with its largest relative error.

    Tokens have a point for 1 and for the length of each prompt that was computed alone and whole; their curve does not
    fall. Sequences have a point for each number of them. Where decodes were measured with sequences of one length and
    with mixed ones, the mixed ones count: those of a load are at different points. Raises ConfigError.
    """
    measured = read_steps(path, model=model, dtype=dtype)
    mixed = {each.size for each in measured if each.is_mixed}
    cells = [each for each in measured if each.is_mixed or each.size not in mixed]
    alone = [cell for cell in cells if cell.num_sequences == 1]
    tokens = sorted({1, *(cell.new for cell in alone if not cell.cached)})
    sequences = sorted({1, *(cell.num_sequences for cell in cells)})
    num_parts = len(tokens) + len(sequences) - 1 + 2  # one sequence is no part: its time is in that of its tokens
    if len(cells) < num_parts or len(tokens) < 2 or len(sequences) < 2:
        raise ConfigError(
            f"{path} has {len(cells)} steps of {cells[0].model} in {cells[0].dtype}: a fit needs {max(num_parts, 5)}, "
            "with a whole prompt and several sequences among them"
        )
    rows = np.array([_row(cell, tokens, sequences) for cell in cells])
    seconds = np.array([cell.seconds for cell in cells])
    parts = _least_squares(rows / seconds[:, None])
    worst = float(np.abs(rows @ parts / seconds - 1).max())
    rises, by_sequences, (context_s, pair_s) = np.split(parts, [len(tokens), num_parts - 2])
    fitted = StepTime(
        "additive",
        base_s=0.0,
        token_s=tuple(zip(tokens, np.cumsum(rises).tolist(), strict=True)),
        context_s=float(context_s),
        pair_s=float(pair_s),
        sequence_s=tuple(zip(sequences, [0.0, *by_sequences.tolist()], strict=True)),
    )
    return fitted, worst


def _measured(step: Mapping[str, Any]) -> MeasuredStep:
    found = _CELL.match(step["cell"])
    if found is None:
        raise ValueError(f"an unknown step: {step['cell']!r}")
    measured = {"seconds": step["median_ms"] / 1e3, "model": step["model"], "dtype": step["dtype"]}
    if found["decodes"]:
        return MeasuredStep(int(found["decodes"]), int(found["cached"]), 1, is_mixed=bool(found["mixed"]), **measured)
    return MeasuredStep(int(found["prompts"]), int(found["on"] or 0), int(found["new"]), **measured)


def _row(cell: MeasuredStep, tokens: Sequence[int], sequences: Sequence[int]) -> list[float]:
    """The parts of a cell's time: rises of the curve of tokens, points of that of sequences, keys and pairs."""
    weights = _weights(tokens, cell.num_tokens)
    rises = [sum(weights[number:]) for number in range(len(tokens))]  # a point is the sum of the rises up to it
    num_keys = cell.num_sequences * (cell.cached + cell.new)
    num_pairs = cell.num_tokens * (cell.cached + cell.new / 2)
    return [*rises, *_weights(sequences, cell.num_sequences)[1:], num_keys, num_pairs]


def _weights(counts: Sequence[int], count: int) -> list[float]:
    """The weight of each point of a curve in its value at a count."""
    after, share = _place(counts, count)
    weights = [0.0] * len(counts)
    weights[after - 1 : after + 1] = 1 - share, share
    return weights


def _least_squares(rows: Any) -> Any:
    """Coefficients of at least 0 with rows @ coefficients nearest to 1: the most negative one is left out in turn."""
    kept = list(range(rows.shape[1]))
    while True:
        found = np.linalg.lstsq(rows[:, kept], np.ones(len(rows)), rcond=None)[0]
        if found.min() >= 0:
            break
        del kept[int(found.argmin())]
    parts = np.zeros(rows.shape[1])
    parts[kept] = found
    return parts


def describe_presets() -> Iterator[str]:
    """A line for each preset."""
    for name, preset in PRESETS.items():
        yield f"{name}: {preset.source} Room for {preset.pool_tokens:,} tokens."
