"""Launchers check and choose once for each layout of their arguments, and refuse a wrong one behind any number of right
ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels import add_rmsnorm, cache_write, merge_states, paged_decode, paged_prefill, qkv_prologue, silu_mul
from quire.kernels.decode_plan import build_decode_plan
from quire.kernels.launching import Layout, contiguous, layouts, require_contiguous

N, H, D, S = 2, 2, 16, 16

MODULES = {
    "add_rmsnorm": add_rmsnorm,
    "silu_mul": silu_mul,
    "write_kv": cache_write,
    "merge_states": merge_states,
    "paged_decode": paged_decode,
    "paged_prefill": paged_prefill,
    "qkv_prologue": qkv_prologue,
}


def arguments_of(name: str, device: torch.device) -> dict[str, Any]:
    """Arguments that the launcher takes, all tensors new."""

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    pools = {"k_pool": zeros(3, S, H, D), "v_pool": zeros(3, S, H, D)}
    slots = torch.tensor([16, 17], device=device)
    block_tables = torch.ones(N, 1, dtype=torch.int32, device=device)
    seq_lens = torch.ones(N, dtype=torch.int32, device=device)
    read = {"q": zeros(N, H, D), **pools, "block_tables": block_tables, "seq_lens": seq_lens, "scaling": 1.0}
    if name == "add_rmsnorm":
        return {"x": zeros(N, D), "weight": zeros(D), "residual": zeros(N, D), "eps": 1e-6}
    if name == "silu_mul":
        return {"gate": zeros(N, D), "up": zeros(N, D)}
    if name == "write_kv":
        return {"k": zeros(N, H, D), "v": zeros(N, H, D), **pools, "slot_mapping": slots}
    if name == "merge_states":
        return {"outs": zeros(2, N, H, D), "lses": zeros(2, N, H)}
    if name == "paged_decode":
        plan = build_decode_plan(seq_lens, block_tables=block_tables, block_size=S, num_programs=2)
        return {**read, "plan": plan, "sinks": zeros(H), "out": zeros(N, H, D)}
    if name == "paged_prefill":
        return {**read, "cu_seqlens_q": torch.arange(N + 1, dtype=torch.int32, device=device), "sinks": zeros(H)}
    rope = {"rope_table": zeros(4, D), "positions": zeros(N, dtype=torch.int64)}
    weights = {"q_norm_weight": zeros(D), "k_norm_weight": zeros(D)}
    return {"qkv": zeros(N, 3 * H * D), **pools, "slot_mapping": slots, **rope, **weights}


def launcher(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(MODULES[name], name)
    return function


@pytest.mark.parametrize("name", MODULES)
def test_equal_layouts_are_checked_once(device: torch.device, name: str) -> None:
    prepare: Any = MODULES[name]._prepare  # type: ignore[attr-defined]
    prepare.cache_clear()
    for _ in range(3):
        launcher(name)(**arguments_of(name, device))
    assert (prepare.cache_info().misses, prepare.cache_info().hits) == (1, 2)


@pytest.mark.parametrize("name", MODULES)
def test_a_wrong_argument_is_refused_after_a_right_one(device: torch.device, name: str) -> None:
    good = arguments_of(name, device)
    launcher(name)(**good)
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.to(torch.complex64),
        lambda x: x.unsqueeze(0),
        lambda x: x.repeat_interleave(2, dim=-1)[..., ::2] if x.shape[-1] > 1 else x[None],
        lambda x: torch.empty_like(x, device="meta"),
    ]
    for argument, value in good.items():
        for change in changes if isinstance(value, Tensor) else ():
            with pytest.raises(ValueError, match=r" has (shape|stride|\d+ columns)| is (torch\.|on )"):
                launcher(name)(**good | {argument: change(value)})
    launcher(name)(**good)


@pytest.mark.parametrize(
    ("make", "is_contiguous"),
    [
        (lambda x: x, True),
        (lambda x: x[:, :1], False),
        (lambda x: x[:1, :1], True),
        (lambda x: x.transpose(0, 1), False),
        (lambda x: x[:0, :1], True),
    ],
)
def test_a_layout_is_contiguous_where_its_tensor_is(make: Callable[[Tensor], Tensor], is_contiguous: bool) -> None:
    tensor = make(torch.zeros(3, 2, 4))
    (layout,) = layouts(tensor)
    assert layout.is_contiguous() == tensor.is_contiguous() == is_contiguous
    assert layout == Layout(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    new = contiguous(tensor.shape, layout)
    assert new.strides == torch.empty(tensor.shape).stride()
    require_contiguous("new", new)
