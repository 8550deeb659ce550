"""The part of a causal language model below its output layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def base_of(model: Any) -> Any:
    """Return the module with the output that the model's forward gives to its output layer; None if there is none."""
    decoder = model.get_decoder()
    return decoder if decoder is not model else getattr(model, "model", None)


@contextmanager
def answering(module: Any, output: Any) -> Iterator[None]:
    """Make a module's forward return this for any input."""
    own = module.__dict__.get("forward")
    module.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
