"""The worker's flags that a benchmark compares, as flags of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import click

from quire.worker.flags import (
    DEFAULT_MAX_WHOLE_GRAPH_TOKENS,
    DEFAULT_STEP_GRAPH,
    PRODUCT_NAMES,
    QUANTIZATION_NAMES,
    STEP_GRAPH_NAMES,
    WAIT_NAMES,
)
from quire.worker.fusion.steps import ProductSource


@dataclass(frozen=True, slots=True)
class WorkerFlags:
    """Flags with the names, the meaning and the defaults of the worker's own."""

    products: ProductSource = "auto"
    dependent_launch: bool | None = None
    step_graph: str = DEFAULT_STEP_GRAPH
    wait: str = "block"
    max_graph_tokens: int | None = None
    max_whole_graph_tokens: int = DEFAULT_MAX_WHOLE_GRAPH_TOKENS
    deterministic: bool = False
    quantization: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> WorkerFlags:
        """Return the flags of a command's parameters; those that are None were not given."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in given.items() if name in names and value is not None})

    def __str__(self) -> str:
        """The flags that differ from the defaults, as on a command line; empty if none does."""
        return " ".join(
            _shown(field.name, value)
            for field in fields(self)
            if (value := getattr(self, field.name)) != getattr(DEFAULTS, field.name)
        )


def _shown(name: str, value: object) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value}"


DEFAULTS = WorkerFlags()


def each_alone(given: WorkerFlags) -> list[WorkerFlags]:
    """Return the given flags, then each of those that a GPU must judge in addition, by itself, then all of these."""
    changes: list[dict[str, Any]] = [
        {"products": "own"},
        {"dependent_launch": True},
        {"step_graph": "one"},
        {"step_graph": "one", "wait": "spin"},
    ]
    together = {name: value for change in changes for name, value in change.items()}
    return [given, *(replace(given, **change) for change in (*changes, together))]


def in_turns(given: WorkerFlags) -> list[WorkerFlags]:
    """Return the given flags, with --deterministic and with --quantization int8, each twice: one after the other, so
    that a machine that gets slower slows all."""
    return 2 * [given, replace(given, deterministic=True), replace(given, quantization="int8")]


OPTIONS = [
    click.Option(["--products"], type=click.Choice(PRODUCT_NAMES), help="As the worker's flag."),
    click.Option(["--dependent-launch/--no-dependent-launch"], default=None, help="As the worker's flag."),
    click.Option(["--step-graph"], type=click.Choice(STEP_GRAPH_NAMES), help="As the worker's flag."),
    click.Option(["--wait"], type=click.Choice(WAIT_NAMES), help="As the worker's flag."),
    click.Option(["--deterministic"], is_flag=True, default=None, help="As the worker's flag."),
    click.Option(["--quantization"], type=click.Choice(QUANTIZATION_NAMES), help="As the worker's flag."),
    click.Option(["--max-graph-tokens"], type=click.IntRange(min=0), help="As the worker's flag."),
    click.Option(["--max-whole-graph-tokens"], type=click.IntRange(min=0), help="As the worker's flag."),
]
