"""Quire's rows: its kernels as a step runs them, and the decode of a tutorial."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from naive import MAX_BLOCKS, naive_decode
from peers import Row, UnfitError
from timing import Call
from workload import Tensors

from quire.kernels import paged_decode as paged_decode_module
from quire.kernels.decode_plan import MIN_SPREAD, SEQUENCE_COST, DecodePlan, build_decode_plan
from quire.kernels.launching import forget_prepared
from quire.kernels.paged_decode import num_decode_programs, paged_decode, workspace_size
from quire.kernels.paged_prefill import MAX_TILE, paged_prefill


class Quire(Row):
    """Sequences with one query by paged_decode, with a plan made before, as once a step; the others, which come
    first, by paged_prefill.

    A variant differs in one choice, and runs on those cells that it is a choice of: `decode` has arguments of the plan,
    `prompt` has those of paged_prefill; long_tiles is False for tiles of 64 keys for those of up to 128 bytes.
    """

    def __init__(
        self,
        name: str = "Quire",
        *,
        decode: Mapping[str, int] | None = None,
        prompt: Mapping[str, bool] | None = None,
        long_tiles: bool = True,
    ) -> None:
        self.name = name
        self._decode = decode or {}
        self._prompt = prompt or {}
        self._long_tiles = long_tiles

    def calls(self, tensors: Tensors) -> list[Call]:
        if self._prompt and tensors.cell.is_decode:
            raise UnfitError("a choice of prompts")
        if (self._decode or not self._long_tiles) and not tensors.cell.is_decode:
            raise UnfitError("a choice of decodes")
        num_prompts = sum(count > 1 for count in tensors.cell.query_lens)
        if any(count > 1 for count in tensors.cell.query_lens[num_prompts:]):
            raise UnfitError("sequences with one query must come last")
        parts = []
        if num_prompts:
            parts.append(self._prefill_calls(tensors, num_prompts))
        if num_prompts < len(tensors.cell.query_lens):
            parts.append(self._decode_calls(tensors, num_prompts))
        return [lambda together=together: [call() for call in together] for together in zip(*parts, strict=True)]

    def _prefill_calls(self, tensors: Tensors, num_prompts: int) -> list[Call]:
        if self._prompt.get("descriptors") and tensors.cell.block_size < MAX_TILE:
            raise UnfitError(f"blocks of fewer than {MAX_TILE} tokens")
        num_tokens = sum(tensors.cell.query_lens[:num_prompts])
        batch = {
            "block_tables": tensors.block_tables[:num_prompts],
            "seq_lens": tensors.seq_lens[:num_prompts],
            "cu_seqlens_q": tensors.cu_seqlens_q[: num_prompts + 1],
            "scaling": tensors.scaling,
            "out": tensors.out[:num_tokens],
            **self._prompt,
        }
        return [lambda k=k, v=v: paged_prefill(tensors.q[:num_tokens], k, v, **batch) for k, v in tensors.pools]

    def _decode_calls(self, tensors: Tensors, first: int) -> list[Call]:
        plan = decode_plan(tensors, first, **self._decode)
        first_token = sum(tensors.cell.query_lens[:first])
        heads = tensors.cell.heads
        size = workspace_size(plan, num_query_heads=heads.num_query_heads, head_dim=heads.head_dim)
        batch = {
            "block_tables": tensors.block_tables[first:],
            "seq_lens": tensors.seq_lens[first:],
            "plan": plan,
            "scaling": tensors.scaling,
            "out": tensors.out[first_token:],
            "workspace": torch.empty(size, dtype=torch.float32, device=tensors.device),
        }
        q = tensors.q[first_token:]
        calls: list[Call] = [lambda k=k, v=v: paged_decode(q, k, v, **batch) for k, v in tensors.pools]
        return calls if self._long_tiles else [lambda call=call: _with_short_tiles(call) for call in calls]


def _with_short_tiles(call: Call) -> None:
    """Choose tiles as if there were no long ones; on a GPU at the capture of the graph, not at its replays."""
    kept = paged_decode_module._LONG_TILES.copy()
    paged_decode_module._LONG_TILES.clear()
    forget_prepared()
    try:
        call()
    finally:
        paged_decode_module._LONG_TILES.update(kept)
        forget_prepared()


VARIANTS = (
    Quire(),
    Quire("runs of 128 keys", decode={"min_spread": 128}),
    Quire("sequences cost 64 keys", decode={"sequence_cost": 64}),
    Quire("sequences cost 128 keys", decode={"sequence_cost": 128}),
    Quire("tiles of 64 keys", long_tiles=False),
    Quire("products ahead", prompt={"qk_ahead": True}),
    Quire("descriptors", prompt={"descriptors": True}),
    Quire("descriptors, products ahead", prompt={"descriptors": True, "qk_ahead": True}),
)
"""Choices that only a GPU can judge, each beside the default."""


def decode_plan(
    tensors: Tensors,
    first: int = 0,
    *,
    min_spread: int = MIN_SPREAD,
    sequence_cost: int = SEQUENCE_COST,
    out: DecodePlan | None = None,
) -> DecodePlan:
    """For the sequences from `first` on, one query each."""
    heads = tensors.cell.heads
    return build_decode_plan(
        tensors.seq_lens[first:],
        block_tables=tensors.block_tables[first:],
        block_size=tensors.cell.block_size,
        num_programs=num_decode_programs(
            num_query_heads=heads.num_query_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            kv_itemsize=tensors.cell.kv_dtype.itemsize,
            device=tensors.device,
        ),
        min_spread=min_spread,
        sequence_cost=sequence_cost,
        out=out,
    )


class Naive(Row):
    name = "tutorial"

    def calls(self, tensors: Tensors) -> list[Call]:
        cell = tensors.cell
        width = tensors.block_tables.shape[1]
        if not cell.is_decode or cell.kv_dtype.itemsize == 1:
            raise UnfitError("decodes only, and no fp8")
        if width > MAX_BLOCKS:
            raise UnfitError(f"its loop over {width} blocks would be unrolled")
        batch = {"block_tables": tensors.block_tables, "seq_lens": tensors.seq_lens, "scaling": tensors.scaling}
        return [lambda k=k, v=v: naive_decode(tensors.q, k, v, tensors.out, **batch) for k, v in tensors.pools]
