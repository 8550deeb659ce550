"""The worker's description of its model for clients, and of its pool for cachemgr."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from quire.cache.v1 import attach_pb2
from quire.worker.config import WorkerConfig
from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.layer_groups import LayerGroup, LayerGroups, registers_groups
from quire.worker.memory.layer_spec import Causal, Sliding
from quire.worker.model.modes import Modes
from quire.worker.model.paged_model import PagedModel
from quire.worker.run.loading import Loaded, dtype_name

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The fields of GetModel beside the pool's geometry."""

    name: str
    architecture: str
    tokenizer: str
    end_token_ids: tuple[int, ...]
    dtype: str
    kv_dtype: str
    device: str
    modes: Modes = field(default_factory=Modes)
    """For GetStatistics."""


def describe_model(config: WorkerConfig, model: PagedModel, pool: KVPool) -> ModelDescription:
    return ModelDescription(
        name=config.model_name,
        architecture=model.architecture,
        tokenizer=config.tokenizer,
        end_token_ids=model.eos_token_ids,
        dtype=dtype_name(model.dtype),
        kv_dtype=dtype_name(pool.dtype),
        device=str(model.device),
        modes=model.modes,
    )


def describe_pool(config: WorkerConfig, loaded: Loaded, *, num_disk_blocks: int = 0) -> attach_pb2.PoolGeometry:
    model, pool = loaded.model, loaded.pool
    return attach_pb2.PoolGeometry(
        block_size_tokens=pool.block_size,
        block_count=pool.num_blocks,
        block_bytes=loaded.block_bytes,
        max_sequence_count=config.max_num_seqs,
        max_sequence_tokens=model.max_model_len,
        vocabulary_size=model.vocab_size,
        model=config.model_name,
        model_fingerprint=f"{model.fingerprint}:{dtype_name(pool.dtype)}",
        has_recurrent_state=model.has_recurrent_state,
        host_block_count=loaded.host_pool.num_blocks,
        layer_groups=describe_layer_groups(pool.groups),
        max_draft_count=count_drafts(config, model),
        host_cached_block_limit=count_host_copies(config, loaded),
        disk_block_count=num_disk_blocks,
    )


def count_host_copies(config: WorkerConfig, loaded: Loaded) -> int:
    """Return the limit of host blocks with copies of evicted blocks."""
    return int(config.host_cache_share * loaded.host_pool.num_blocks)


def count_drafts(config: WorkerConfig, model: PagedModel) -> int:
    """Return how many drafts of a sequence a step verifies at most. A state can't be taken back to before a draft."""
    if not model.has_recurrent_state:
        return min(config.max_draft_tokens, config.max_step_tokens - 1)
    log.info("no drafts are verified: the model keeps states, and a state behind a draft can't be taken back")
    return 0


def describe_layer_groups(groups: LayerGroups) -> list[attach_pb2.LayerGroup]:
    """The groups for cachemgr; none for one group without a window, which is the default."""
    if not registers_groups(groups):
        return []
    return [
        attach_pb2.LayerGroup(
            kind=layer_group_kind(group), window_token_count=group.window or 0, layer_count=len(group.layers)
        )
        for group in groups
    ]


def layer_group_kind(group: LayerGroup) -> attach_pb2.LayerGroupKind.ValueType:
    """The kind of a group as cachemgr knows it."""
    match group.mask:
        case Causal():
            return attach_pb2.LAYER_GROUP_KIND_FULL
        case Sliding():
            return attach_pb2.LAYER_GROUP_KIND_SLIDING
        case _:
            return attach_pb2.LAYER_GROUP_KIND_CHUNKED
