"""SGLang's radix cache and page allocator on a CPU, pages of 16 tokens."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from typing import Any

import torch
from driving import drive
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from workload import BLOCK_SIZE

clock = time.perf_counter_ns
torch.set_num_threads(1)  # threads cost these small tensors more than they bring
MAX_TOKENS = 4096
NUM_ROWS = 512


@dataclass
class Held:
    """A request: its tokens, its row of token slots, and the node of the tree that it locks."""

    tokens: array[int]
    row: int
    node: Any = None
    output: list[int] = field(default_factory=list)
    num_in_tree: int = 0


class Sglang:
    """Does the work of the scheduler's prefill, decode and release, without the requests' own classes."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._rows = torch.zeros((NUM_ROWS, MAX_TOKENS), dtype=torch.int64)
        self.clear()

    def clear(self) -> None:
        self._allocator = PagedTokenToKVPoolAllocator(
            self._num_blocks * BLOCK_SIZE, BLOCK_SIZE, torch.float16, "cpu", None, False
        )
        self._tree = RadixCache(CacheInitParams(False, None, self._allocator, BLOCK_SIZE))
        self._held: dict[int, Held] = {}
        self._free_rows = list(range(NUM_ROWS))
        self._batch_rows = self._lengths = torch.empty(0, dtype=torch.int64)

    def prepare(self, seq_id: int, tokens: list[int]) -> tuple[int, array[int]]:
        return seq_id, array("q", tokens)

    def admit(self, prepared: tuple[int, array[int]]) -> int:
        """Timed: match the prefix and lock it, evict if needed, allocate, write the row of slots, insert into the
        tree and lock that."""
        seq_id, tokens = prepared
        tree, row = self._tree, self._free_rows.pop()
        held = self._held[seq_id] = Held(tokens, row)
        num_tokens = len(tokens)
        start = clock()
        match = tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens, limit=num_tokens - 1)))
        num_found, found_node = match.device_prefix_len, match.last_device_node
        tree.inc_lock_ref(found_node)
        found = tree.path_device_indices(found_node)
        num_new = num_tokens - num_found
        shortfall = num_new + BLOCK_SIZE - self._allocator.available_size()
        if shortfall > 0:
            tree.evict(EvictParams(num_tokens=shortfall))
        before, after = torch.tensor([num_found]), torch.tensor([num_tokens])
        last = found[-1:] if num_found else torch.tensor([-1])
        slots = self._allocator.alloc_extend(before, before, after, after, last, num_new)
        self._rows[row, :num_found] = found
        self._rows[row, num_found:num_tokens] = slots
        self._insert(held, tokens, num_found)
        tree.dec_lock_ref(found_node)
        return clock() - start

    def _insert(self, held: Held, tokens: array[int], num_found: int) -> None:
        """Puts the full pages into the tree, frees those it had already, and locks the path."""
        key = RadixKey(tokens).page_aligned(BLOCK_SIZE)
        slots = self._rows[held.row, : len(key)].clone()
        result = self._tree.insert(InsertParams(key=key, value=slots))
        self._allocator.free_segment(slots[num_found : result.prefix_len], start_pos=num_found)
        if result.prefix_len > num_found:
            node = self._tree.match_prefix(MatchPrefixParams(key=key)).last_device_node
            self._rows[held.row, : len(key)] = self._tree.path_device_indices(node)
        else:
            node = result.last_device_node
        self._tree.inc_lock_ref(node)
        held.node, held.num_in_tree = node, len(key)

    def release(self, seq_id: int) -> int:
        """Timed: the tokens inserted once more, as at the end of a request, the rest freed, the path unlocked."""
        held = self._held.pop(seq_id)
        start = clock()
        tokens = held.tokens + array("q", held.output)
        node, num_in_tree = held.node, held.num_in_tree
        self._insert(held, tokens, num_in_tree)
        if len(tokens) > held.num_in_tree:
            self._allocator.free(self._rows[held.row, held.num_in_tree : len(tokens)])
        self._tree.dec_lock_ref(node)
        self._tree.dec_lock_ref(held.node)
        self._free_rows.append(held.row)
        return clock() - start

    def begin_batch(self, seq_ids: list[int]) -> None:
        self._batch_rows = torch.tensor([self._held[seq_id].row for seq_id in seq_ids])
        self._lengths = torch.tensor([len(self._held[seq_id].tokens) for seq_id in seq_ids])

    def end_batch(self, seq_ids: list[int]) -> None:
        for seq_id, length in zip(seq_ids, self._lengths.tolist(), strict=True):
            held = self._held[seq_id]
            held.output = [7] * (length - len(held.tokens))
            self.release(seq_id)

    def extend(self, seq_ids: list[int]) -> int:
        """Timed: alloc_decode for the batch and its slots written to the rows."""
        start = clock()
        self._extend()
        return clock() - start

    def _extend(self) -> None:
        last = self._rows[self._batch_rows, self._lengths - 1]
        lengths = self._lengths + 1
        slots = self._allocator.alloc_decode(lengths, lengths, last)
        self._rows[self._batch_rows, self._lengths] = slots
        self._lengths = lengths

    def extend_and_publish(self, seq_ids: list[int]) -> int:
        """Timed: the same, and a token appended to each output. Nothing is published before a request ends."""
        batch = [self._held[seq_id] for seq_id in seq_ids]
        start = clock()
        self._extend()
        for held in batch:
            held.output.append(7)
        return clock() - start

    def fork(self, seq_id: int, child_ids: list[int]) -> int:
        """Timed: an admission for each child, which finds the prompt in the tree: there is no fork."""
        tokens = self._held[seq_id].tokens
        return sum(self.admit((child_id, tokens)) for child_id in child_ids)

    def num_free(self) -> int:
        return int(self._allocator.available_size()) // BLOCK_SIZE - 1

    def native_bytes(self) -> int:
        """Storage of the tree's tensors and of the free list."""
        nodes, taken = [self._tree.root_node], self._allocator.free_pages.nbytes
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            taken += node.value.nbytes if node.parent is not None else 0
        return int(taken)


if __name__ == "__main__":
    drive(Sglang, package="sglang")
