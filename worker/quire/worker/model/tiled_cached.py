"""A deterministic model with its own attention: one token of each row of a tile, over keys padded to few lengths.

A forward has TILE_ROWS tokens, one in each row, and so many keys that their number follows from a token's position
alone. Several tokens of one sequence may be in a tile if the model keeps no states: their keys are written before any
are read. With states each token of a prompt needs the state behind the one before it, so prompts take a tile for each
token, which tokens of other sequences share.

Of the keys at least one is padding. Else transformers would leave out the mask, and with it a part of the arithmetic,
in a tile in which all rows happen to be full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from quire.worker.attention.row_attention import num_places
from quire.worker.attention.torch_attention import Slots, Workspace
from quire.worker.device.transfer import indices
from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.state_slots import StateKey
from quire.worker.memory.step_batch import StepBatch
from quire.worker.model.cache_layout import CacheLayout
from quire.worker.model.cached_model import Access, CachedModel, PagedCache
from quire.worker.model.hidden_states import HiddenStates, kept_hidden_states
from quire.worker.model.tiles import TILE_ROWS, padded, padded_order, rows_of_logits, runs_in_order


@dataclass(frozen=True, slots=True)
class _Token:
    """A token of a step: its sequence in the step, its index in the step, and its position."""

    seq: int
    index: int
    position: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class TokenTile:
    """Tokens of one forward, at most TILE_ROWS, and the number of keys with padding, 0 for a model without keys."""

    tokens: tuple[_Token, ...]
    num_keys: int


def cut_token_tiles(batch: StepBatch, layout: CacheLayout) -> list[TokenTile]:
    """Divide a step's tokens, in an order in which nothing is read before it is written.

    With states the last tokens of all sequences come behind all others.
    """
    runs = [
        [_Token(run.seq, run.first + i, run.start + i, is_last=i == run.count - 1) for i in range(run.count)]
        for run in runs_in_order(batch)
    ]
    if not layout.states:
        return list(_pack((token for run in runs for token in run), layout))
    tiles: list[TokenTile] = []
    for number in range(max(len(run) for run in runs) - 1):
        tiles += _pack([run[number] for run in runs if number < len(run) - 1], layout)
    return [*tiles, *_pack([run[-1] for run in runs], layout)]


def _pack(tokens: Iterable[_Token], layout: CacheLayout) -> Iterator[TokenTile]:
    def num_keys(token: _Token) -> int:
        return num_places(token.position + 2) if layout.layers else 0

    for keys, found in groupby(tokens, key=num_keys):
        together = tuple(found)
        for first in range(0, len(together), TILE_ROWS):
            yield TokenTile(together[first : first + TILE_ROWS], keys)


class TiledCachedModel(CachedModel):
    """A CachedModel that gives a token the same logits, bit for bit, in any step."""

    is_deterministic = True

    def describe_attention(self) -> str:
        """See PagedModel.describe_attention."""
        return f"{super().describe_attention()}, a token in each of {TILE_ROWS} rows"

    def forward_unconverted(self, batch: StepBatch, pool: KVPool) -> Tensor:
        """See CachedModel.forward_unconverted. Cost: a forward of TILE_ROWS tokens for each tile."""
        starts = [end - count for end, count in zip(batch.seq_lens_host, batch.counts_host, strict=True)]
        with torch.inference_mode():
            after = self.states.load(batch.rows_host, starts)
            before: dict[StateKey, Tensor] = {}
            logits: Tensor | None = None
            logit_rows = rows_of_logits(batch)
            for tile in cut_token_tiles(batch, self._layout):
                if tile.tokens[0].is_last and not before:
                    before = {key: state.clone() for key, state in after.items()}
                result = self._run_tile(tile, batch, pool, after)
                if logits is None:
                    logits = result.new_empty(len(logit_rows), result.shape[-1])
                for place, token in enumerate(tile.tokens):
                    if token.index in logit_rows:
                        logits[logit_rows[token.index]] = result[place]
            self.states.store(batch.rows_host, batch.seq_lens_host, before=before, after=after)
        assert logits is not None
        return logits

    def _run_tile(self, tile: TokenTile, batch: StepBatch, pool: KVPool, states: Mapping[StateKey, Tensor]) -> Tensor:
        """Return logits [TILE_ROWS, vocab_size] float32, and change the states of the tile's sequences."""
        device, num_real = batch.input_ids.device, len(tile.tokens)
        index = indices(padded([token.index for token in tile.tokens]), device)
        seqs = indices(padded([token.seq for token in tile.tokens]), device)
        own = {key: state.index_select(0, seqs) for key, state in states.items()}
        positions = batch.positions.index_select(0, index)
        access = _access(tile, batch, pool, self._workspace, index=index, seqs=seqs, positions=positions)
        arguments: dict[str, Any] = {self._layout.argument: PagedCache(self._layout, access, own)}
        if self._layout.takes_positions:
            arguments["position_ids"] = positions[:, None]
        if self._layout.takes_logits_to_keep:
            arguments["logits_to_keep"] = 1
        if access.mask is not None:
            arguments["attention_mask"] = access.mask
        output = self._model(input_ids=batch.input_ids.index_select(0, index)[:, None], use_cache=True, **arguments)
        for key, state in own.items():
            states[key].index_copy_(0, seqs[:num_real], state[:num_real])
        logits: Tensor = output.logits[:, -1].float()
        return logits

    def keeping_hidden_states(self, batch: StepBatch, pool: KVPool) -> AbstractContextManager[HiddenStates]:
        """See PagedModel.keeping_hidden_states."""
        tiles = ([token.index for token in tile.tokens] for tile in cut_token_tiles(batch, self._layout))
        order = padded_order(tiles, batch.num_tokens)
        return kept_hidden_states(self._model, order=order, num_rows=TILE_ROWS)


def _access(
    tile: TokenTile,
    batch: StepBatch,
    pool: KVPool,
    workspace: Workspace,
    *,
    index: Tensor,
    seqs: Tensor,
    positions: Tensor,
) -> Access:
    num_keys = max(1, tile.num_keys)
    places = torch.arange(1 - num_keys, 1, device=index.device) + positions[:, None]
    is_hidden = places < 0
    tables = batch.block_tables[0].index_select(0, seqs)
    columns = places.clamp_(min=0).div(pool.block_size, rounding_mode="floor")
    blocks = tables.gather(1, columns).to(torch.int64)
    slots = (blocks * pool.block_size + places.remainder(pool.block_size)).masked_fill_(is_hidden, 0).flatten()
    return Access(
        pool=pool,
        workspace=workspace,
        num_seqs=TILE_ROWS,
        num_keys=num_keys,
        num_past=num_keys - 1,
        written=Slots(batch.slot_mapping[0].index_select(0, index[: len(tile.tokens)]), pool.block_size),
        read=Slots(slots, pool.block_size),
        mask=(~is_hidden).to(torch.int64) if tile.num_keys else None,
    )
