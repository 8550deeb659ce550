"""Attention by other engines: FlashInfer, vLLM's Triton kernel, and torch's SDPA on dense keys.

Each is a row of the table. One that is missing, or can't do a cell, has a reason, which the report repeats.

    FlashInfer      pip install --no-deps flashinfer-python==0.6.2 apache-tvm-ffi==0.1.6; compiles its kernels with nvcc
    vLLM            triton_unified_attention.py of vllm/v1/attention/ops and what it imports from there, in the folder
                    .peers/vllm, which git ignores

benchmarks/harness/obtain_peers.py downloads both.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from timing import Call
from torch import Tensor
from workload import LAYOUTS, Tensors

VLLM_FOLDER = Path(__file__).parents[2] / ".peers" / "vllm"
WORKSPACE_BYTES = 256 << 20


class AbsentError(Exception):
    """The row can't run on this machine."""


class UnfitError(Exception):
    """The row can't do this cell."""


class Row(ABC):
    name: str
    layout: str | None = None
    """The layout of its memory, or None for the cell's."""

    def require(self) -> None:
        """Raises AbsentError if it can't run here at all."""
        return

    @abstractmethod
    def calls(self, tensors: Tensors) -> list[Call]:
        """One call per layer, each writes tensors.out. Raises UnfitError."""


class FlashInfer(Row):
    """use_tensor_cores: whether a decode runs the kernel made for prompts, which is what grouped heads want."""

    layout = LAYOUTS[1]

    def __init__(self, *, use_tensor_cores: bool) -> None:
        self.name = "FlashInfer" if use_tensor_cores else "FlashInfer, CUDA cores"
        self._use_tensor_cores = use_tensor_cores

    def require(self) -> None:
        if importlib.util.find_spec("flashinfer") is None:
            raise AbsentError("the package flashinfer is not installed")

    def calls(self, tensors: Tensors) -> list[Call]:
        cell = tensors.cell
        if not self._use_tensor_cores and not cell.is_decode:
            raise UnfitError("prompts always run on tensor cores")
        wrapper = self._plan_decode(tensors) if cell.is_decode else self._plan_prefill(tensors)
        # Heads first: a layer's pool is contiguous as [B, H, S, D].
        pools = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in tensors.pools]
        return [lambda pool=pool: wrapper.run(tensors.q, pool, out=tensors.out) for pool in pools]

    def _plan_decode(self, tensors: Tensors) -> Any:
        import flashinfer

        cell = tensors.cell
        indptr, indices, last = _pages(tensors)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(tensors.device),
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=self._use_tensor_cores,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last,
        )
        heads = (cell.heads.num_query_heads, cell.heads.num_kv_heads, cell.heads.head_dim)
        dtypes = {"q_data_type": cell.q_dtype, "kv_data_type": cell.kv_dtype}
        wrapper.plan(indptr, indices, last, *heads, cell.block_size, sm_scale=tensors.scaling, **dtypes)
        return wrapper

    @staticmethod
    def _plan_prefill(tensors: Tensors) -> Any:
        import flashinfer

        cell = tensors.cell
        indptr, indices, last = _pages(tensors)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(tensors.device), "HND")
        heads = (cell.heads.num_query_heads, cell.heads.num_kv_heads, cell.heads.head_dim)
        dtypes = {"q_data_type": cell.q_dtype, "kv_data_type": cell.kv_dtype}
        wrapper.plan(
            tensors.cu_seqlens_q,
            indptr,
            indices,
            last,
            *heads,
            cell.block_size,
            causal=True,
            sm_scale=tensors.scaling,
            **dtypes,
        )
        return wrapper


def _pages(tensors: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's form of a block table: offsets [n+1], block ids in a row, filled slots of each last block [n]."""
    size = tensors.cell.block_size
    counts = (tensors.seq_lens + size - 1) // size
    indptr = F.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    rows = [row[:count] for row, count in zip(tensors.block_tables, counts.tolist(), strict=True)]
    return indptr, torch.cat(rows), (tensors.seq_lens - 1) % size + 1


@cache
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class VllmTriton(Row):
    name = "vLLM Triton"
    layout = LAYOUTS[2]
    NUM_SEGMENTS = 16
    SPLIT_UP_TO_SEQS_X_HEADS = 128
    """Above it vLLM does not split keys."""

    def require(self) -> None:
        if not (VLLM_FOLDER / "triton_unified_attention.py").is_file():
            raise AbsentError("no .peers/vllm/triton_unified_attention.py")

    def calls(self, tensors: Tensors) -> list[Call]:
        cell = tensors.cell
        if cell.q_dtype != cell.kv_dtype:
            raise UnfitError("measured on keys and values of the queries' dtype only")
        attend = load_vllm()
        fixed = {
            "q": tensors.q,
            "out": tensors.out,
            "cu_seqlens_q": tensors.cu_seqlens_q,
            "max_seqlen_q": max(cell.query_lens),
            "seqused_k": tensors.seq_lens,
            "max_seqlen_k": max(cell.seq_lens),
            "softmax_scale": tensors.scaling,
            "causal": True,
            "window_size": (-1, -1),
            "block_table": tensors.block_tables,
            "softcap": 0.0,
            "q_descale": None,
            "k_descale": None,
            "v_descale": None,
            **self._segments(tensors),
        }
        known = inspect.signature(attend).parameters
        arguments = {name: value for name, value in fixed.items() if name in known}
        return [lambda k=k, v=v: attend(k=k, v=v, **arguments) for k, v in tensors.pools]

    def _segments(self, tensors: Tensors) -> dict[str, Any]:
        """The buffers of its split over keys, padded as it needs."""
        heads = tensors.cell.heads
        shape = (tensors.q.shape[0], heads.num_query_heads, self.NUM_SEGMENTS)
        padded = triton.next_power_of_2(heads.head_dim)
        empty = {"dtype": torch.float32, "device": tensors.device}
        return {
            "seq_threshold_3D": self.SPLIT_UP_TO_SEQS_X_HEADS // heads.num_kv_heads,
            "num_par_softmax_segments": self.NUM_SEGMENTS,
            "softmax_segm_output": torch.empty(*shape, padded, **empty),
            "softmax_segm_max": torch.empty(shape, **empty),
            "softmax_segm_expsum": torch.empty(shape, **empty),
        }


@cache
def load_vllm() -> Callable[..., Any]:
    """unified_attention of VLLM_FOLDER, with modules in place of its imports from vLLM."""
    platform = _Platform()
    modules = {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": _KVQuantMode},
        "vllm.model_executor.layers.batch_invariant": {"vllm_is_batch_invariant": lambda: False},
    }
    for name, attributes in modules.items():
        _add_module(name).__dict__.update(attributes)
    _add_module("vllm.v1.attention.ops").__path__ = [str(VLLM_FOLDER)]
    module = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention")
    attend: Callable[..., Any] = module.unified_attention
    return attend


def _add_module(name: str) -> ModuleType:
    """An empty module of that name in sys.modules, and one for each of its packages."""
    parent, _, leaf = name.rpartition(".")
    module = sys.modules.setdefault(name, ModuleType(name))
    if parent:
        setattr(_add_module(parent), leaf, module)
    module.__path__ = getattr(module, "__path__", [])
    return module


class _KVQuantMode(IntEnum):
    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3


class _Platform(SimpleNamespace):
    """An NVIDIA GPU: every other question is answered with no."""

    @staticmethod
    def fp8_dtype() -> torch.dtype:
        return torch.float8_e4m3fn

    @staticmethod
    def is_cuda() -> bool:
        return True

    def __getattr__(self, name: str) -> Callable[[], bool]:
        return lambda: False


class DenseSdpa(Row):
    """torch's own attention on keys without blocks: no indirection to pay for, and only batches of equal lengths."""

    name = "dense SDPA"

    def calls(self, tensors: Tensors) -> list[Call]:
        cell = tensors.cell
        if len(set(cell.seq_lens)) > 1 or (cell.seq_lens != cell.query_lens and not cell.is_decode):
            raise UnfitError("takes equal lengths without a prefix only")
        if cell.q_dtype != cell.kv_dtype:
            raise UnfitError("takes keys of the queries' dtype only")
        num_seqs, heads = len(cell.seq_lens), cell.heads
        q = tensors.q.view(num_seqs, -1, heads.num_query_heads, heads.head_dim).transpose(1, 2)
        shape = (num_seqs, heads.num_kv_heads, cell.seq_lens[0], heads.head_dim)

        def dense(pool: Tensor) -> Tensor:
            blocks = pool[tensors.block_tables.long()].flatten(1, 2)[:, : cell.seq_lens[0]]
            return blocks.transpose(1, 2).contiguous().view(shape)

        layers = [(dense(k), dense(v)) for k, v in tensors.pools]
        out = tensors.out.view(num_seqs, -1, heads.num_query_heads, heads.head_dim)
        causal = not cell.is_decode

        def attend(k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=causal, scale=tensors.scaling, enable_gqa=heads.num_query_heads != heads.num_kv_heads
            )

        out.copy_(attend(*layers[0]).transpose(1, 2))  # its calls allocate their results
        return [lambda k=k, v=v: attend(k, v) for k, v in layers]
