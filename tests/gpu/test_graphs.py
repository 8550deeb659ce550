"""A step captured in a CUDA graph serves batches of other lengths, blocks and tokens than it was captured with."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from kernel_batch import Batch, Shape

Replay = Callable[[], object]

LLAMA = Shape(32, 8, 128, hidden=512, intermediate=1024, vocab_size=4096)
SHAPES = {
    "bf16": LLAMA,
    "fp8-kv": replace(LLAMA, kv_dtype=torch.float8_e4m3fn),
    "window": replace(LLAMA, window=100),
    "d256-softcap": replace(LLAMA, num_query_heads=8, num_kv_heads=4, head_dim=256, softcap=30.0),
    "d64-sinks": replace(LLAMA, head_dim=64, has_sinks=True),
}
MODELS = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
TOLERANCE = 2e-2
"""Absolute, of bfloat16 results of order 1; a row of another sequence is off by far more."""


def capture(work: Callable[[], object]) -> Replay:
    """Run the work once, so that it compiles, then capture it."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def batches(shape: Shape, device: torch.device, lens: list[tuple[int, ...]]) -> list[Batch]:
    """Decodes of as many sequences, which could be the contents of the same memory."""
    return [
        Batch(shape, (1,) * len(each), each, device, max_blocks=64, num_blocks=256, seed=seed)
        for seed, each in enumerate(lens)
    ]


@MODELS
def test_decode(shape: Shape, device: torch.device) -> None:
    lens = [(1,) * 6, (1, 16, 17, 300, 511, 64), (900, 1, 2, 3, 4, 5), (33,) * 6]
    first, *others = batches(shape, device, lens)
    plan = first.plan()
    out, workspace = torch.empty_like(first.q), first.workspace(plan)
    replay = capture(lambda: first.decode(first.plan(out=plan), out=out, workspace=workspace))
    for other in others:
        out.fill_(torch.nan)
        workspace.fill_(torch.nan)
        first.become(other)
        replay()
        eager = other.decode(other.plan())
        assert torch.equal(out, eager)
        torch.testing.assert_close(out.double().cpu(), other.exact_attention(), atol=TOLERANCE, rtol=TOLERANCE)


@MODELS
def test_prefill(shape: Shape, device: torch.device) -> None:
    queries = [((20, 20, 20), (20, 20, 20)), ((58, 1, 1), (58, 300, 1)), ((1, 1, 58), (17, 16, 200))]
    first, *others = (
        Batch(shape, counts, lens, device, max_blocks=64, num_blocks=256, seed=seed)
        for seed, (counts, lens) in enumerate(queries)
    )
    out = torch.empty_like(first.q)
    replay = capture(lambda: first.prefill(out=out))
    for other in others:
        out.fill_(torch.nan)
        first.become(other)
        replay()
        torch.testing.assert_close(out.double().cpu(), other.exact_attention(), atol=TOLERANCE, rtol=TOLERANCE)


def test_a_whole_layer(device: torch.device) -> None:
    """The kernels that write and read the cache, in one graph: the same bits as one kernel after the other."""
    first, other = batches(replace(LLAMA, has_qk_norm=False), device, [(2, 3, 4, 5), (100, 17, 16, 33)])
    plan = first.plan()

    def layer(batch: Batch) -> torch.Tensor:
        batch.q.copy_(batch.prologue())
        return batch.decode(batch.plan(out=plan))

    results: list[torch.Tensor] = []
    replay = capture(lambda: results.append(layer(first)))
    first.become(other)
    replay()
    replayed = results[-1].clone()
    assert torch.equal(replayed, layer(other))
    assert not replayed.isnan().any()


def test_the_sampler(device: torch.device) -> None:
    first, other = batches(LLAMA, device, [(1,) * 4, (1,) * 4])
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    replay = capture(lambda: results.append(first.sample()))
    greedy, drawn = (each.clone() for each in results[0])
    replay()
    assert torch.equal(results[-1][0], greedy)
    assert torch.equal(results[-1][1], drawn)
    assert greedy.unique().numel() > 1
    assert other.sample()[0].tolist() != greedy.tolist()
