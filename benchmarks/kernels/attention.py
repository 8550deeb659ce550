"""Attention cells: every row on every cell, timed, and checked against float64 on a few of its tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from peers import AbsentError, Row, UnfitError
from report import summary
from timing import Clock
from workload import Cell, Tensors

CACHES_TO_OUTRUN = 3
"""Layers take turns until their keys and values are so many times the GPU's L2 cache."""
MEMORY_SHARE = 0.45
"""The part of the GPU's memory for a cell's keys and values; a row may make a copy of them."""
CHECKED_TOKENS = 4


@dataclass(slots=True)
class Measured:
    """One cell. Times are microseconds a layer."""

    cell: Cell
    samples_us: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    """Difference from float64 relative to it, in the Euclidean norm, over a few tokens of one layer."""
    unfit: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        taken_us = {row: summary(samples) for row, samples in self.samples_us.items()}
        errors = {row: float(f"{error:.2g}") for row, error in self.errors.items()}
        return self.cell.describe() | {"taken_us": taken_us, "errors": errors, "unfit": self.unfit}


def present(rows: Iterable[Row], absent: dict[str, str]) -> list[Row]:
    """Those that can run here; the others go to `absent` with the reason."""
    found = []
    for row in rows:
        try:
            row.require()
        except AbsentError as error:
            absent[row.name] = str(error)
        else:
            found.append(row)
    return found


def fits(cell: Cell, device: torch.device) -> bool:
    """True if one layer of it may be measured on this device."""
    return device.type == "cpu" or cell.pool_bytes <= MEMORY_SHARE * _memory_bytes(device)


def measure(cell: Cell, rows: list[Row], clock: Clock, device: torch.device) -> Measured:
    """Every row on the cell. A row's failure is noted and does not end the run."""
    measured = Measured(cell)
    num_layers = _num_layers(cell, device)
    for layout, group in _by_layout(rows, cell):
        tensors = Tensors(replace(cell, layout=layout), device, num_layers=num_layers)
        for row in group:
            tensors.out.fill_(math.nan)
            try:
                calls = row.calls(tensors)
                calls[0]()
                measured.errors[row.name] = error_of(tensors)
                measured.samples_us[row.name] = clock.measure(calls)
            except UnfitError as error:
                measured.unfit[row.name] = str(error)
            except Exception as error:
                measured.unfit[row.name] = f"{type(error).__name__}: {str(error)[:300]}"
        del tensors
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return measured


def _by_layout(rows: list[Row], cell: Cell) -> Iterator[tuple[str, list[Row]]]:
    def layout_of(row: Row) -> str:
        return row.layout or cell.layout

    for layout, group in groupby(sorted(rows, key=layout_of), key=layout_of):
        yield layout, list(group)


def _num_layers(cell: Cell, device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    affordable = int(MEMORY_SHARE * _memory_bytes(device)) // cell.pool_bytes
    return max(1, min(affordable, math.ceil(CACHES_TO_OUTRUN * cache / cell.pool_bytes)))


def _memory_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def error_of(tensors: Tensors) -> float:
    """The error of tensors.out against attention over the first layer in float64."""
    k_pool, v_pool = tensors.pools[0]
    heads, size = tensors.cell.heads, tensors.cell.block_size
    difference = size_of_exact = 0.0
    for token, seq, visible in _checked_tokens(tensors.cell):
        positions = torch.arange(visible, device=tensors.device)
        blocks = tensors.block_tables[seq].long()[positions // size]
        keys, values = (pool[blocks, positions % size].double() for pool in (k_pool, v_pool))
        q = tensors.q[token].double().view(heads.num_kv_heads, -1, heads.head_dim)
        weights = torch.softmax(torch.einsum("hgd,nhd->hgn", q, keys) * tensors.scaling, -1)
        exact = torch.einsum("hgn,nhd->hgd", weights, values).flatten(0, 1)
        difference += float((tensors.out[token].double() - exact).square().nan_to_num(math.inf).sum())
        size_of_exact += float(exact.square().sum())
    return math.sqrt(difference / size_of_exact)


def _checked_tokens(cell: Cell) -> Iterator[tuple[int, int, int]]:
    """(index, sequence, keys it sees) of the last tokens of sequences spread over the batch, and of the middle one."""
    ends = list(torch.tensor(cell.query_lens).cumsum(0).tolist())
    for seq in sorted({round(i * (len(ends) - 1) / (CHECKED_TOKENS - 1)) for i in range(CHECKED_TOKENS)}):
        yield ends[seq] - 1, seq, cell.seq_lens[seq]
    seq = max(range(len(ends)), key=lambda i: cell.query_lens[i])
    behind = cell.query_lens[seq] // 2
    yield ends[seq] - 1 - behind, seq, cell.seq_lens[seq] - behind
