"""The token ids and the vocabulary of a checkpoint's configuration, which may not fit its weights."""

from __future__ import annotations

import logging
from typing import Any

from quire.worker.unsupported_model import UnsupportedModel

log = logging.getLogger(__name__)


def vocabulary_size(config: Any) -> int:
    """Return the number of logits that a configuration names."""
    return int(config.get_text_config(decoder=True).vocab_size)


def end_token_ids(model: Any) -> tuple[int, ...]:
    """Return every id that the generation configuration or the model's calls the end of a sequence.

    An id that is none of the vocabulary can't be sampled: it is left out, with a warning.
    """
    named: list[Any] = []
    for config in (model.generation_config, model.config.get_text_config(decoder=True)):
        value = getattr(config, "eos_token_id", None)
        named += value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    vocab_size = vocabulary_size(model.config)
    known = {token for token in named if _is_token(token, vocab_size)}
    unknown = sorted({str(token) for token in named if not _is_token(token, vocab_size)})
    if unknown:
        log.warning("end tokens that can't be sampled: %s; token ids are 0 to %d", ", ".join(unknown), vocab_size - 1)
    return tuple(sorted(known))


def drop_unknown_padding(config: Any) -> None:
    """Unset a padding id that is none of the vocabulary, with a warning: the model would not load, and needs none."""
    text_config = config.get_text_config(decoder=True)
    token, vocab_size = getattr(text_config, "pad_token_id", None), vocabulary_size(config)
    if token is not None and not _is_token(token, vocab_size):
        log.warning("pad_token_id is %s and is not used; token ids are 0 to %d", token, vocab_size - 1)
        text_config.pad_token_id = None


def check_output_rows(model: Any) -> None:
    """Raises UnsupportedModel if the output layer has not one row for each token of the vocabulary."""
    vocab_size = vocabulary_size(model.config)
    weight = getattr(model.get_output_embeddings(), "weight", None)
    if weight is not None and len(weight) != vocab_size:
        reason = f"its output layer has {len(weight)} rows, and its vocab_size is {vocab_size}"
        raise UnsupportedModel(type(model).__name__, reason)


def _is_token(token: Any, vocab_size: int) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size
