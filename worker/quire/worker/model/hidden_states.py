"""The base model's output of one forward, kept so that the output layer can run on any of its tokens.

Logits of every token of a step would take step tokens * vocabulary * 4 bytes. So the hidden states that the base model
gives are kept, and the rest of the model's own forward, from the output layer on, runs on some of them at a time.
Nothing is kept beyond the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.worker.device.transfer import indices
from quire.worker.model.base_model import answering, base_of


class HiddenStates:
    """The output of a causal language model's base model in one step."""

    def __init__(self, model: Any, base: Any, order: Sequence[int] | None, num_rows: int | None) -> None:
        """See kept_hidden_states()."""
        self._model = model
        self._base = base
        self._order = order
        self._num_rows = num_rows
        self._parts: list[Tensor] = []
        self._output_kind: type[Any] = tuple

    def note(self, module: Any, arguments: Any, output: Any) -> None:
        """A forward hook of the base model."""
        self._parts.append(output[0].flatten(0, 1))
        self._output_kind = type(output)

    def reader(self) -> Callable[[Tensor], Tensor]:
        """Return what makes logits [n, vocab_size] float32 of n tokens of the step, given by index [n] int64.

        Raises ValueError if the model has not run its base model.
        """
        if not self._parts:
            raise ValueError(f"{type(self._model).__name__} does not run its {type(self._base).__name__}")
        hidden = self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)
        if self._order is not None:
            hidden = hidden.index_select(0, indices(np.argsort(self._order).tolist(), hidden.device))

        def logits_of(tokens: Tensor) -> Tensor:
            output = self._output_kind(last_hidden_state=hidden.index_select(0, tokens)[None])
            with answering(self._base, output):
                logits: Tensor = self._model(input_ids=tokens[None], use_cache=False).logits[0].float()
            return logits

        return logits_of if self._num_rows is None else _in_tiles(logits_of, self._num_rows)


def _in_tiles(logits_of: Callable[[Tensor], Tensor], num_rows: int) -> Callable[[Tensor], Tensor]:
    """Return the same function, run on so many tokens at a time; the last ones are padded."""

    def tiled(tokens: Tensor) -> Tensor:
        tiles = torch.split(tokens, num_rows)
        padding = tokens.new_zeros(num_rows - len(tiles[-1]))
        whole = [*tiles[:-1], torch.cat((tiles[-1], padding))]
        return torch.cat([logits_of(tile) for tile in whole])[: len(tokens)]

    return tiled


@contextmanager
def kept_hidden_states(
    model: Any, order: Sequence[int] | None = None, *, num_rows: int | None = None
) -> Iterator[HiddenStates]:
    """Keep the base model's output of the forwards in this context.

    `order` are indexes in the step, of the tokens in the order in which forwards have them; None: that of the step.
    Indexes beyond those of the step are padding. With num_rows the output layer runs on so many tokens at a time.
    """
    base = base_of(model)
    kept = HiddenStates(model, base, order, num_rows)
    handle = base.register_forward_hook(kept.note)
    try:
        yield kept
    finally:
        handle.remove()
