"""A deterministic model with the worker's attention: each step runs in tiles.

A tile is a forward of TILE_ROWS tokens, and its output layer has as many rows. In a forward of one shape a token's
arithmetic does not depend on its row, nor on the other rows: products, norms and activations are computed alike for
each of them (quire.worker.model.row_check finds out). Attention is by position (RowAttentionStep), and experts take
whole tiles (tiled_experts.py).
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from quire.worker.device.transfer import indices
from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.step_batch import StepBatch
from quire.worker.model.hidden_states import HiddenStates, kept_hidden_states
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.tiles import TILE_ROWS, Tile, cut_tiles, padded_order, tile_batch


class TiledModel(PagedModel):
    """A PagedModel that gives a token the same logits, bit for bit, in any step."""

    is_deterministic = True

    def forward_unconverted(self, batch: StepBatch, pool: KVPool) -> Tensor:
        """See PagedModel.forward_unconverted. Cost: a forward of TILE_ROWS tokens for each tile."""
        tiles = cut_tiles(batch)
        with torch.inference_mode():
            results = [result for tile in tiles if (result := self._run_tile(batch, tile, pool)) is not None]
            order = [row for tile in tiles for row in tile.logits]
            logits = torch.cat(results)
            return logits.new_empty(logits.shape).index_copy_(0, indices(order, logits.device), logits)

    def _run_tile(self, batch: StepBatch, tile: Tile, pool: KVPool) -> Tensor | None:
        """Return the logits of the step that the tile has, in its order; None if there is none."""
        part = tile_batch(batch, tile)
        if not tile.logits and self.has_head:
            self.forward_base(part, self.attention_step(part, pool))
            return None
        logits = super().forward_unconverted(part, pool)
        return logits[: len(tile.logits)] if tile.logits else None

    def keeping_hidden_states(self, batch: StepBatch, pool: KVPool) -> AbstractContextManager[HiddenStates]:
        """See PagedModel.keeping_hidden_states."""
        order = padded_order((tile.tokens for tile in cut_tiles(batch)), batch.num_tokens)
        return kept_hidden_states(self._model, order=order, num_rows=TILE_ROWS)
