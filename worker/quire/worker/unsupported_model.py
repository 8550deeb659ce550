"""The refusal of a model that the worker cannot run correctly."""

from __future__ import annotations


class UnsupportedModel(ValueError):
    """The worker cannot run this model correctly. The message names the model class and the reason."""

    def __init__(self, model_class: str, reason: str) -> None:
        super().__init__(f"{model_class} is not supported: {reason}")
        self.model_class = model_class
        self.reason = reason


class OffTheInterface(UnsupportedModel):
    """A layer does not call attention through transformers' AttentionInterface."""


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
