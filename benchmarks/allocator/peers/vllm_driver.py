"""vLLM's KVCacheManager with one full-attention group, prefix caching on, hash sha256 (its default)."""

from __future__ import annotations

import time
from typing import Any

import torch
from driving import drive
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from workload import BLOCK_SIZE

clock = time.perf_counter_ns


class Vllm:
    """A request is made without its hashes, which belong to the timed part of an admission."""

    def __init__(self, num_blocks: int) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._params = SamplingParams(max_tokens=1 << 15)
        self._num_blocks = num_blocks
        self.clear()

    def clear(self) -> None:
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float16)
        config = KVCacheConfig(
            num_blocks=self._num_blocks + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self._manager = KVCacheManager(
            config, max_model_len=1 << 15, scheduler_block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE
        )
        self._requests: dict[int, Request] = {}

    def prepare(self, seq_id: int, tokens: list[int]) -> Request:
        request = Request(str(seq_id), tokens, self._params, None)
        self._requests[seq_id] = request
        return request

    def admit(self, request: Request) -> int:
        """Timed: hashes of the request, get_computed_blocks, allocate_slots (which publishes)."""
        manager = self._manager
        start = clock()
        request._block_hasher = self._hasher
        request.update_block_hashes()
        blocks, num_computed, _ = manager.get_computed_blocks(request)
        taken = manager.allocate_slots(request, request.num_tokens - num_computed, num_computed, blocks)
        elapsed = clock() - start
        assert taken is not None
        request.num_computed_tokens = request.num_tokens
        return elapsed

    def release(self, seq_id: int) -> int:
        """Timed: free."""
        request = self._requests.pop(seq_id)
        start = clock()
        self._manager.free(request)
        return clock() - start

    def begin_batch(self, seq_ids: list[int]) -> None:
        pass

    def end_batch(self, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            self.release(seq_id)

    def extend(self, seq_ids: list[int]) -> int:
        """Timed: allocate_slots of one token per request. The token was appended before."""
        requests = [self._requests[seq_id] for seq_id in seq_ids]
        for request in requests:
            request.append_output_token_ids(7)
        start = clock()
        for request in requests:
            self._manager.allocate_slots(request, 1)
            request.num_computed_tokens += 1
        return clock() - start

    def extend_and_publish(self, seq_ids: list[int]) -> int:
        """Timed: the token appended (which hashes a block that is full now) and allocate_slots (which publishes it)."""
        requests = [self._requests[seq_id] for seq_id in seq_ids]
        start = clock()
        for request in requests:
            request.append_output_token_ids(7)
            self._manager.allocate_slots(request, 1)
            request.num_computed_tokens += 1
        return clock() - start

    def fork(self, seq_id: int, child_ids: list[int]) -> int:
        """Timed: an admission for each child, which finds the prompt in the cache: there is no fork."""
        tokens = list(self._requests[seq_id].prompt_token_ids)
        return sum(self.admit(self.prepare(child_id, tokens)) for child_id in child_ids)

    def num_free(self) -> int:
        pool: Any = self._manager.block_pool
        return pool.get_num_free_blocks() - len(pool.cached_block_hash_to_block)


if __name__ == "__main__":
    drive(Vllm, package="vllm")
