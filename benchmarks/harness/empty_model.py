"""A model that computes nothing: what a step takes with it is what everything but the model takes."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.layer_groups import group_layers
from quire.worker.memory.layer_spec import Causal, LayerSpec
from quire.worker.memory.step_batch import StepBatch
from quire.worker.model.modes import Modes
from quire.worker.model.paged_model import PagedModel

VOCABULARY = 64


class EmptyModel(PagedModel):
    """A layer with keys that are never written, on a CPU. All logits are zero."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int) -> None:
        layer = LayerSpec(
            layer_idx=0,
            num_query_heads=1,
            num_kv_heads=1,
            k_head_dim=1,
            v_head_dim=1,
            mask=Causal(),
            scaling=1.0,
            softcap=None,
            has_sinks=False,
            values_in_keys=True,
        )
        self.specs = {0: layer}
        self.layer_groups = group_layers(self.specs, max_model_len=max_model_len, choice="auto")
        self.max_model_len = max_model_len
        self.eos_token_ids = ()
        self.architecture = "EmptyModel"
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self.vocab_size = VOCABULARY
        self.fingerprint = "empty"
        self.min_block_size = 1
        self.fusion = None
        self.modes = Modes()
        self.allocate_states(0)
        self._logits = torch.zeros(max_num_seqs, VOCABULARY)

    def forward(self, batch: StepBatch, pool: KVPool, *, out: Tensor | None = None) -> Tensor:
        """See PagedModel.forward."""
        logits = self._logits[: batch.num_seqs]
        return logits if out is None else out.copy_(logits)
