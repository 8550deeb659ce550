"""Attention of prompts by FlashInfer, a package that users may install; decodes run in Quire's own kernels.

FlashInfer plans the work of a step on the host, by the lengths of its sequences. Steps of decodes are replayed as CUDA
graphs, in which the host can plan nothing, so sequences with one query run as in TritonAttentionStep. A step with
prompts calls attention between its graphs, or has none: there each kind of layer is planned once a step.

FlashInfer reads the pool where it is: its layout "HND" is [B, H, S, D] by strides, for keys and for values. Nothing of
it is imported before a step needs it. It builds its kernels with nvcc when it first meets a kind of layer.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.worker.attention.torch_attention import Workspace
from quire.worker.attention.triton_attention import Part, TritonAttentionStep
from quire.worker.device.transfer import indices
from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.layer_spec import Causal, LayerSpec, Sliding
from quire.worker.memory.step_batch import StepBatch

VERSION = "0.6.2"
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
LAYOUT = "HND"
WORKSPACE_BYTES = 128 << 20
# Plans of one kind of layer that can be in flight: more than the worker has steps in flight.
NUM_PLANS = 8


def check_installed() -> None:
    """Raises ValueError, with what to do, if the package or an NVIDIA GPU is not there."""
    if importlib.util.find_spec("flashinfer") is None:
        raise ValueError(
            "--attention flashinfer: the package flashinfer is not installed; install 'quire-kv[flashinfer]', which "
            f"has flashinfer-python {VERSION}"
        )
    if torch.version.hip is not None:
        raise ValueError("--attention flashinfer: it needs a GPU of NVIDIA, and this torch is for AMD's")


def why_not(spec: LayerSpec) -> str | None:
    """Return the reason why FlashInfer can't run this layer's attention here, None if it can."""
    if spec.k_head_dim != spec.v_head_dim or spec.values_in_keys:
        return f"values of {spec.v_head_dim} beside keys of {spec.k_head_dim}"
    if spec.k_head_dim not in HEAD_DIMS:
        return f"head dim {spec.k_head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if not isinstance(spec.mask, Causal | Sliding):
        return f"{spec.mask} is neither causal nor a sliding window"
    if spec.has_sinks:
        return "it has attention sinks"
    return None


class FlashInferAttentionStep(TritonAttentionStep):
    """A TritonAttentionStep that runs sequences with several queries in FlashInfer."""

    takes_any_kv_dtype = False

    def __init__(
        self, batch: StepBatch, pool: KVPool, *, specs: Mapping[int, LayerSpec], workspace: Workspace | None = None
    ) -> None:
        super().__init__(batch, pool, specs=specs, workspace=workspace)
        self._planned: dict[tuple[int, LayerSpec], Any] = {}

    @classmethod
    def check(cls, specs: Mapping[int, LayerSpec], *, dtype: torch.dtype) -> None:
        """See AttentionStep.check: every layer must run in FlashInfer."""
        if dtype not in DTYPES:
            name = str(dtype).removeprefix("torch.")
            raise ValueError(f"--attention flashinfer: it runs in float16 and bfloat16, and the model is in {name}")
        for layer_idx, spec in specs.items():
            if (why := why_not(spec)) is not None:
                raise ValueError(f"--attention flashinfer: layer {layer_idx} can't run in it: {why}")

    @classmethod
    def describe(cls, specs: Mapping[int, LayerSpec]) -> str:
        """See AttentionStep.describe."""
        return f"flashinfer for prompts; for decodes {super().describe(specs)}"

    def _attend_prompts(
        self,
        layer_idx: int,
        queries: Tensor,
        part: Part,
        *,
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        """See TritonAttentionStep._attend_prompts. The first layer of a kind plans for the others. No sync."""
        kind = replace(self.specs[layer_idx], layer_idx=0, scaling=scaling, softcap=softcap)
        key = (self.pool.group_of(layer_idx), kind)
        wrapper = self._planned.get(key)
        if wrapper is None:
            wrapper = self._planned[key] = self._plan(part, queries.dtype, *key)
        pools = (self.pool.k(layer_idx).transpose(1, 2), self.pool.v(layer_idx).transpose(1, 2))
        result: Tensor = wrapper.run(queries, pools, out=out)
        return result

    def _plan(self, part: Part, dtype: torch.dtype, group: int, kind: LayerSpec) -> Any:
        device = part.seq_lens.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("FlashInfer plans prompts on the host, so they can't be part of a CUDA graph")
        pages = pages_of(
            [(count, seq_len) for count, seq_len in self._lengths() if count > 1], block_size=self.pool.block_size
        )
        table = part.block_tables[group]
        places = indices(pages.places(table.shape[1]), device)
        window = kind.mask.window - 1 if isinstance(kind.mask, Sliding) else -1
        return plan_ring(device, kind).plan(
            pages.qo_indptr,
            pages.kv_indptr,
            table.reshape(-1).index_select(0, places),
            pages.last_page_lens,
            kind.num_query_heads,
            kind.num_kv_heads,
            kind.k_head_dim,
            self.pool.block_size,
            causal=True,
            sm_scale=kind.scaling,
            window_left=window,
            logits_soft_cap=kind.softcap,
            q_data_type=dtype,
            kv_data_type=self.pool.dtype,
        )

    def _lengths(self) -> list[tuple[int, int]]:
        return list(zip(self.batch.counts_host, self.batch.seq_lens_host, strict=True))


@dataclass(frozen=True, slots=True)
class Pages:
    """The lengths of n sequences as FlashInfer takes them, on the host, int32.

    qo_indptr       [n+1]   first query of each
    kv_indptr       [n+1]   first page of each
    last_page_lens  [n]     tokens in the last page, at least 1
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    last_page_lens: Tensor

    def places(self, width: int) -> np.ndarray[Any, Any]:
        """Return the places of all pages in block tables of that width, flat."""
        first = self.kv_indptr.numpy().astype(np.int64)
        counts = np.diff(first)
        rows: np.ndarray[Any, Any] = (np.arange(len(counts)) * width - first[:-1]).repeat(counts)
        return rows + np.arange(first[-1])


def pages_of(lengths: Sequence[tuple[int, int]], *, block_size: int) -> Pages:
    """Return the pages of sequences, each of (queries, tokens in the pool)."""
    counts = [-(-seq_len // block_size) for _, seq_len in lengths]
    return Pages(
        torch.tensor([0, *accumulate(count for count, _ in lengths)], dtype=torch.int32),
        torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
        torch.tensor([(seq_len - 1) % block_size + 1 for _, seq_len in lengths], dtype=torch.int32),
    )


class PlanRing:
    """FlashInfer's wrappers for one kind of layer, which take turns.

    A plan is copied to the device from pinned memory of its wrapper, after the work before it. The next plan in the
    same wrapper would change that memory, so it waits for the copy; of NUM_PLANS wrappers the next one has made it.
    """

    def __init__(self, device: torch.device) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper  # type: ignore[import-not-found]

        workspace = _workspace(device)
        self._device = device
        self._wrappers = [BatchPrefillWithPagedKVCacheWrapper(workspace, LAYOUT) for _ in range(NUM_PLANS)]
        self._copied: list[torch.cuda.Event | None] = [None] * NUM_PLANS
        self._next = 0

    def plan(self, *arguments: Any, **options: Any) -> Any:
        """Plan in the next wrapper, and return it."""
        number, self._next = self._next, (self._next + 1) % NUM_PLANS
        if (copied := self._copied[number]) is not None:
            copied.synchronize()
        wrapper = self._wrappers[number]
        wrapper.plan(*arguments, **options)
        if self._device.type == "cuda":
            copied = copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            self._copied[number] = copied
        return wrapper


@lru_cache(maxsize=64)
def plan_ring(device: torch.device, kind: LayerSpec) -> PlanRing:
    """Return the wrappers for a kind of layer, made once."""
    return PlanRing(device)


@lru_cache(maxsize=8)
def _workspace(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
