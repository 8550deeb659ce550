"""transformers' continuous batching, a peer of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

ANSWER_TIMEOUT_S = 300


def generate(
    model: Any,
    prompts: Sequence[list[int]],
    num_new: Sequence[int],
    *,
    block_size: int,
    num_blocks: int,
    max_batch_tokens: int,
) -> list[list[int]]:
    """Return so many tokens of each prompt, greedy, all at once. Raises RuntimeError without an answer in time."""
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
    settings = ContinuousBatchingConfig(
        page_size=block_size, num_blocks=num_blocks, max_batch_tokens=max_batch_tokens, allow_block_sharing=False
    )
    tokens: dict[str, list[int]] = {}
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=settings
    ) as manager:
        try:
            for index, (prompt, count) in enumerate(zip(prompts, num_new, strict=True)):
                manager.add_request(prompt, request_id=str(index), max_new_tokens=count)
            while len(tokens) < len(prompts):
                result = manager.get_result(timeout=ANSWER_TIMEOUT_S)
                if result is None:
                    raise RuntimeError(f"continuous batching gave no result for {ANSWER_TIMEOUT_S} s")
                if result.is_finished():
                    tokens[result.request_id] = list(result.generated_tokens)
        except BaseException:
            manager.stop(hard_stop=True)  # the end of the block would wait for all requests, also after Ctrl-C
            raise
    return [tokens[str(index)] for index in range(len(prompts))]
