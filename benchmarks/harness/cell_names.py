"""Cells by name: "0.6B 1x1k, 8B prompt 2k on 8k" is a model's short name and sizes, several behind commas."""

from __future__ import annotations

import re

import click


def split_cells(text: str) -> list[tuple[str, str]]:
    """Return the model and the sizes of each cell. Raises click.BadParameter."""
    cells = []
    for cell in text.split(","):
        model, _, sizes = cell.strip().partition(" ")
        if not sizes.strip():
            raise click.BadParameter(f"--cells: {cell.strip()!r} is not a model and its sizes, as in '0.6B 1x1k'")
        cells.append((model, " ".join(sizes.split())))
    return cells


def number(text: str) -> int:
    """Return 1024 for "1k", 512 for "512"."""
    found = re.fullmatch(r"(\d+)(k?)", text)
    if found is None:
        raise click.BadParameter(f"--cells: {text!r} is not a number such as 512 or 8k")
    return int(found[1]) * (1024 if found[2] else 1)
