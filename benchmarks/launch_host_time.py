"""Host time of the kernels' launchers, with the launch itself left out: for layouts seen before, and for new ones.

    python benchmarks/launch_host_time.py

A launcher checks its arguments and chooses a variant once for each set of layouts. The first layer of a step pays for
that; the others pay the time of known layouts. Needs no GPU: Triton's own part of a launch is replaced by nothing.
Microseconds of processor time, the least of many short rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from quire.kernels import add_rmsnorm, cache_write, paged_decode, paged_prefill, qkv_prologue, silu_mul
from quire.kernels.decode_plan import build_decode_plan

ROUNDS, CALLS = 200, 20
NUM_SEQS, NUM_TOKENS, BLOCK_SIZE = 8, 72, 16
QUERY_HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE = 16, 8, 128, 1024, 3072
"""Those of Qwen3-0.6B."""
MIXED_LAYER = {"prologue": 1, "decode + combine": 1, "prefill": 1, "norm": 2, "silu": 1}
"""Calls of a fused layer in a step of decodes beside one chunk of a prompt."""


def calls() -> dict[str, tuple[ModuleType, Callable[[], object]]]:
    """Each launcher as a mixed step of NUM_SEQS decodes and one chunk calls it, and its module."""

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    pools = {"k_pool": zeros(64, BLOCK_SIZE, KV_HEADS, HEAD_DIM), "v_pool": zeros(64, BLOCK_SIZE, KV_HEADS, HEAD_DIM)}
    slots, positions = zeros(NUM_TOKENS, dtype=torch.int64), zeros(NUM_TOKENS, dtype=torch.int64)
    tables, lens = zeros(NUM_SEQS, 40, dtype=torch.int32), zeros(NUM_SEQS, dtype=torch.int32)
    plan = build_decode_plan(lens, block_tables=tables, block_size=BLOCK_SIZE, num_programs=33)
    q, out = zeros(NUM_TOKENS, QUERY_HEADS, HEAD_DIM), zeros(NUM_TOKENS, QUERY_HEADS, HEAD_DIM)
    decodes = {"q": q[:NUM_SEQS], "out": out[:NUM_SEQS], "block_tables": tables, "seq_lens": lens, "plan": plan}
    chunk = {"q": q[NUM_SEQS:], "out": out[NUM_SEQS:], "block_tables": tables[:1], "seq_lens": lens[:1]}
    chunk["cu_seqlens_q"] = zeros(2, dtype=torch.int32)
    qkv = zeros(NUM_TOKENS, (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM)
    rope, head_norm = zeros(4096, HEAD_DIM, dtype=torch.float32), zeros(HEAD_DIM)
    x, norm, kv = zeros(NUM_TOKENS, HIDDEN), zeros(HIDDEN), zeros(NUM_TOKENS, KV_HEADS, HEAD_DIM)
    gate, up = zeros(NUM_TOKENS, 2 * INTERMEDIATE).chunk(2, -1)
    return {
        "prologue": (
            qkv_prologue,
            lambda: qkv_prologue.qkv_prologue(
                qkv, **pools, slot_mapping=slots, positions=positions, rope_table=rope,
                q_norm_weight=head_norm, k_norm_weight=head_norm,
            ),
        ),
        "decode + combine": (paged_decode, lambda: paged_decode.paged_decode(**decodes, **pools, scaling=0.1)),
        "prefill": (paged_prefill, lambda: paged_prefill.paged_prefill(**chunk, **pools, scaling=0.1)),
        "norm": (add_rmsnorm, lambda: add_rmsnorm.add_rmsnorm(x, norm, eps=1e-6, residual=x)),
        "silu": (silu_mul, lambda: silu_mul.silu_mul(gate, up)),
        "write": (cache_write, lambda: cache_write.write_kv(kv, kv, **pools, slot_mapping=slots)),
    }  # fmt: skip


def least_us(call: Callable[[], object]) -> float:
    """Processor time of one call."""
    rounds = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        for _ in range(CALLS):
            call()
        rounds.append(time.thread_time() - start)
    return min(rounds) / CALLS * 1e6


def main() -> None:
    known: dict[str, float] = {}
    new: dict[str, float] = {}
    with mock.patch.object(JITFunction, "run", return_value=None), torch.inference_mode():
        for name, (module, call) in calls().items():
            known[name] = least_us(call)

            def forget_and_call(module: ModuleType = module, call: Callable[[], object] = call) -> None:
                module._prepare.cache_clear()
                call()

            new[name] = least_us(forget_and_call)
    for each in (known, new):
        each["a fused mixed layer"] = sum(each[name] * count for name, count in MIXED_LAYER.items())
    print(f"{'us':22}{'known':>8}{'new':>8}{'new / known':>13}")
    for name in known:
        print(f"{name:22}{known[name]:8.1f}{new[name]:8.1f}{new[name] / known[name]:13.1f}")


if __name__ == "__main__":
    main()
