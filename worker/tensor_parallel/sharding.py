"""Which models can be sharded over ranks, decided before anything is loaded.

transformers shards a model by its own plan: which projections are cut by columns, so that a rank has some of the heads,
and which by rows. A layer with projections that are cut and gathered again (Phi-3) has all heads on each rank: its
keys and values are in every rank's pool.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

from quire.worker.probe import UnsupportedModel

ACCELERATE = "accelerate"


def loading_arguments(size: int) -> dict[str, Any]:
    """Return the arguments of from_pretrained() that shard a model over `size` ranks; none for one rank."""
    return {} if size == 1 else {"distributed_config": DistributedConfig(tp_size=size)}


def check_can_shard(model: Any, size: int) -> None:
    """Raise UnsupportedModel, with the numbers, if a model can't be sharded over `size` ranks.

    The model is as transformers makes it, its parameters on the meta device. Raises ValueError if a package is missing
    that transformers shards with.
    """
    if importlib.util.find_spec(ACCELERATE) is None:
        raise ValueError(f"--tensor-parallel-size {size}: transformers needs the package {ACCELERATE} to shard a model")
    name, plan = type(model).__name__, model.tp_plan or {}
    if not any("*" in rule for rule in plan):
        raise UnsupportedModel(name, f"transformers has no plan to shard its layers over {size} ranks")
    if model._is_stateful:
        raise UnsupportedModel(name, f"it keeps states per sequence, which are not sharded over {size} ranks")
    config = model.config.get_text_config(decoder=True)
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for count, kind in ((kv_heads, "kv heads"), (config.num_attention_heads, "query heads")):
        if get_kv_heads_per_rank(plan, count, size) is None:
            has_copies = isinstance(count, int) and size % count == 0
            reason = f"its {count} {kind} can't be divided over {size} ranks"
            raise UnsupportedModel(name, reason + ("; transformers does not replicate them" if has_copies else ""))
