"""A module in FlashInfer's place: the prefill wrapper of flashinfer-python 0.6.2, by its names and layouts, on a CPU.

Parameters have the names and the order of that version, as far as Quire gives them; others are an error. `run` computes
in float64 from what `plan` was given, page by page.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor


class BatchPrefillWithPagedKVCacheWrapper:
    """See flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper."""

    num_plans = 0

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        for host in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len):
            assert host.device.type == "cpu", "the real one would wait for the device"
            assert host.dtype == torch.int32
        assert paged_kv_indices.dtype == torch.int32
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert causal
        assert q_data_type == kv_data_type
        type(self).num_plans += 1
        self._queries, self._pages = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self._indices, self._last = paged_kv_indices.long(), paged_kv_last_page_len.tolist()
        self._sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._scale, self._window, self._cap = sm_scale or 0.0, window_left, logits_soft_cap

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor | None = None) -> Tensor:
        num_heads, num_kv_heads, head_dim, page_size = self._sizes
        k_cache, v_cache = paged_kv_cache
        assert k_cache.shape[1:] == (num_kv_heads, page_size, head_dim)
        assert k_cache.stride() == v_cache.stride()
        assert k_cache.stride(-1) == q.stride(-1) == 1
        assert q.shape == (self._queries[-1], num_heads, head_dim)
        out = torch.empty_like(q) if out is None else out
        for seq, last in enumerate(self._last):
            pages = self._indices[self._pages[seq] : self._pages[seq + 1]]
            num_keys = (len(pages) - 1) * page_size + last
            keys, values = (
                cache[pages].transpose(1, 2).flatten(0, 1)[:num_keys].double() for cache in (k_cache, v_cache)
            )
            rows = slice(self._queries[seq], self._queries[seq + 1])
            out[rows] = self._attend(q[rows].double(), keys, values).to(out.dtype)
        return out

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        group = q.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q, keys) * self._scale
        if self._cap:
            scores = self._cap * torch.tanh(scores / self._cap)
        at = torch.arange(len(q))[:, None] + len(keys) - len(q)
        key = torch.arange(len(keys))
        hidden = (key > at) | ((key < at - self._window) if self._window >= 0 else False)
        values = values.nan_to_num(0.0)  # pages behind a window may hold anything
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), values)


@contextmanager
def installed() -> Iterator[type[BatchPrefillWithPagedKVCacheWrapper]]:
    """Within the block `import flashinfer` finds the stand-in."""
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    module.__spec__ = mock.Mock()
    with mock.patch.dict(sys.modules, {"flashinfer": module}):
        BatchPrefillWithPagedKVCacheWrapper.num_plans = 0
        yield BatchPrefillWithPagedKVCacheWrapper
