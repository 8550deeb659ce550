"""The number of tokens up to which a step with prompts is worth CUDA graphs, by the size of the model.

A step without graphs lasts as long as the host launches it, or as long as the device computes it. Graphs shorten the
first time alone. They pad a step by up to a quarter, which lengthens the second. So steps are captured up to the number
of tokens at which the matrix products of the layers take as long as the launches of the layers. The whole forward then
takes the device 1.2 to 1.3 times as long as the host: the products are four fifths of the forward of an 8B model.

    tokens = HOST_S_PER_LAYER * layers * PRODUCTS_PER_S / (2 * parameters of the layers)

That is 1,107 for Llama 3.1 8B, 3,971 for Llama 3.2 1B, 4,798 for Qwen3 1.7B and 15,354 for Qwen3 0.6B. From 2/5 of
--max-step-tokens on all steps are captured: a step that is filled up to --max-step-tokens, as those of long prompts
are, has no padding. The experts of a mixture all count, so the limit of such a model is low.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

HOST_S_PER_LAYER = 0.7e-3
"""Launches of a fused layer without graphs: 0.68 to 0.78 ms, measured on the host of an H200."""

PRODUCTS_PER_S = 690e12
"""Floating-point operations of the matrix products of an 8B prompt, bfloat16: 670 to 690e12 on an H200."""

MIN_TOKENS = 512
"""The limit is never lower: at so many tokens graphs shortened the steps of each model that was measured."""

SHARE_FOR_ALL = 2 / 5
"""Of --max-step-tokens: a limit of this share or more becomes --max-step-tokens."""

MAX_MEMORY_SHARE = 1 / 32
"""Of the memory of the device, for all captured sizes together: 4.4 GiB of an H200, 0.75 GiB of 24 GiB."""


@dataclass(frozen=True, slots=True)
class GraphLimit:
    """The most tokens of a step with prompts that is replayed, 0 for none, and the reason in a few words.

    num_bytes is the memory of all CUDA graphs, those of decode steps included, where it was measured.
    """

    num_tokens: int
    reason: str
    num_bytes: int = 0


NO_GRAPHS = GraphLimit(0, "none")


def limit_by_model(*, num_layers: int, num_parameters: int, max_step_tokens: int) -> GraphLimit:
    """Return the limit for a model by the rule above; num_parameters are those of its layers."""
    tokens = int(HOST_S_PER_LAYER * num_layers * PRODUCTS_PER_S / (2 * max(1, num_parameters)))
    size = f"{num_layers} layers of {num_parameters / 1e9:.2f}e9 parameters"
    if tokens >= SHARE_FOR_ALL * max_step_tokens:
        return GraphLimit(max_step_tokens, f"{size}, and --max-step-tokens")
    return GraphLimit(min(max(tokens, MIN_TOKENS), max_step_tokens), size)


def limit_by_memory(limit: GraphLimit, measure_bytes: Callable[[int], int], *, total_bytes: int) -> GraphLimit:
    """Return the limit with the measured memory of its graphs, lowered until that is MAX_MEMORY_SHARE of total_bytes.

    measure_bytes(tokens) captures graphs of up to so many tokens and gives them back. A limit of up to MIN_TOKENS is
    not lowered. Cost: a measurement, and one more for each time that the limit is halved.
    """
    num_tokens, reason = limit.num_tokens, limit.reason
    num_bytes = measure_bytes(num_tokens)
    while num_bytes > total_bytes * MAX_MEMORY_SHARE and num_tokens > MIN_TOKENS:
        num_tokens = max(MIN_TOKENS, num_tokens // 2)
        reason = f"{limit.reason}; graphs of up to {limit.num_tokens} tokens take too much memory"
        num_bytes = measure_bytes(num_tokens)
    return GraphLimit(num_tokens, reason, num_bytes)
