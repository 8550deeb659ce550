"""The cache manager of transformers' continuous batching, one full-attention layer, pages of 16 tokens."""

from __future__ import annotations

import time
from typing import Any

import torch
from driving import drive
from transformers import ContinuousBatchingConfig, LlamaConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from workload import BLOCK_SIZE

clock = time.perf_counter_ns


class NotDistributed:
    """One process."""

    tp_size = 1


class Transformers:
    """Keys and values are two numbers a token: the tensor is there, and small."""

    def __init__(self, num_blocks: int) -> None:
        model = LlamaConfig(
            vocab_size=8, hidden_size=2, intermediate_size=2, num_hidden_layers=1, num_attention_heads=1, head_dim=2
        )
        model._attn_implementation = "flash_attention_2"
        settings = ContinuousBatchingConfig(
            page_size=BLOCK_SIZE, num_blocks=num_blocks, max_batch_tokens=16, max_memory_percent=1.0
        )
        distributed: Any = NotDistributed()
        self._cache = PagedAttentionCache(model, settings, "cpu", distributed, dtype=torch.float16)
        assert self._cache.use_prefix_sharing
        self._states: dict[int, RequestState] = {}

    def clear(self) -> None:
        self._cache.reset()
        self._states.clear()

    def prepare(self, seq_id: int, tokens: list[int]) -> RequestState:
        state = RequestState(str(seq_id), tokens, max_new_tokens=None)
        state._status = RequestStatus.DECODING
        self._states[seq_id] = state
        return state

    def admit(self, state: RequestState) -> int:
        """Timed: search_prefix_match, can_store_request_tokens (which allocates), mark_complete_blocks (which
        publishes); if there is no room, evict_cached_blocks and a retry, as in the scheduler."""
        cache, num_tokens = self._cache, len(state.initial_tokens)
        start = clock()
        num_found = cache.search_prefix_match(state.request_id, state.initial_tokens)
        state.position_offset = num_found
        num_new = num_tokens - num_found
        if not cache.can_store_request_tokens(state, num_new):
            cache.evict_cached_blocks()
            fits = cache.can_store_request_tokens(state, num_new)
            assert fits
        cache.mark_complete_blocks(state, cache.count_new_complete_blocks(state, num_new))
        elapsed = clock() - start
        state.position_offset = num_tokens
        return elapsed

    def release(self, seq_id: int) -> int:
        """Timed: free_blocks."""
        state = self._states.pop(seq_id)
        start = clock()
        self._cache.free_blocks(state.request_id)
        return clock() - start

    def begin_batch(self, seq_ids: list[int]) -> None:
        pass

    def end_batch(self, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            self.release(seq_id)

    def extend(self, seq_ids: list[int]) -> int:
        """Timed: can_store_request_tokens of one token per request. The token was appended before."""
        states = [self._states[seq_id] for seq_id in seq_ids]
        for state in states:
            state.generated_tokens.append(7)
        start = clock()
        for state in states:
            self._cache.can_store_request_tokens(state, 1)
            state.position_offset += 1
        return clock() - start

    def extend_and_publish(self, seq_ids: list[int]) -> int:
        """Timed: the token appended, can_store_request_tokens, mark_complete_blocks."""
        cache, states = self._cache, [self._states[seq_id] for seq_id in seq_ids]
        start = clock()
        for state in states:
            state.update_and_check_completion(7, None)
            cache.can_store_request_tokens(state, 1)
            cache.mark_complete_blocks(state, cache.count_new_complete_blocks(state, 1))
            state.position_offset += 1
        return clock() - start

    def fork(self, seq_id: int, child_ids: list[int]) -> int:
        """Timed: prepare_fork_request for all children: full blocks shared, the half-full one in blocks of their own
        (the copy of its content is not timed)."""
        parent, names = self._states[seq_id], [str(child_id) for child_id in child_ids]
        copies: dict[str, tuple[list[int], list[int]]] = {name: ([], []) for name in self._cache.cache_allocators}
        start = clock()
        forked = self._cache.prepare_fork_request(parent, names, copies)
        elapsed = clock() - start
        assert forked == names
        for child_id in child_ids:
            self._states[child_id] = RequestState(str(child_id), parent.initial_tokens)
        return elapsed

    def num_free(self) -> int:
        cache = self._cache
        [allocator] = cache.cache_allocators.values()
        return int(
            cache.pool.count_free_blocks(allocator.index) + cache.pool.num_free_sectors * allocator.blocks_per_sector
        )


if __name__ == "__main__":
    drive(Transformers, package="transformers")
