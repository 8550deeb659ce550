"""The division of a model over ranks, decided before its weights are loaded.

transformers shards a model by its own plan: which projections are cut by columns, so that a rank has some of the heads,
and which by rows. There are three cases in which a rank has other heads:

    case                                          a rank's key/value heads
    the plan cuts projections and gathers again   all (Phi-3)
    the plan shards experts alone                 all (DeepSeek, gpt-oss)
    more ranks than key/value heads               one, which several ranks have: see OwnHead

A model asks ModelRanks about its ranks. The executor asks them more: quire.worker.run.ranks.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

from quire.worker.quantization.quantizer import find_quantization
from quire.worker.unsupported_model import UnsupportedModel

ACCELERATE = "accelerate"
QUERY, KEY, VALUE, OUTPUT = "q_proj", "k_proj", "v_proj", "o_proj"
EXPERTS = "grouped_gemm"
"""The rule of parameters that have an expert in each row."""


class ModelRanks:
    """The ranks that have a part of the model each: one, which has the whole model."""

    size = 1
    """Ranks of the worker."""

    def combined(self, fingerprint: str) -> str:
        """Return one fingerprint for those of all ranks."""
        return fingerprint


ONE_PART = ModelRanks()


@dataclass(frozen=True, slots=True)
class OwnHead:
    """One key/value head for each rank, in a model that has fewer of them than ranks.

    All ranks load the projections of keys and values whole, and keep the rows of one head: the head of the rank's query
    heads. transformers shards everything else. Each rank computes with plain weights, so this needs no collective.

    attentions      the attention modules, with * in place of the layer's number
    num_kv_heads    of the whole model; num_query_heads too
    """

    attentions: tuple[str, ...]
    num_kv_heads: int
    num_query_heads: int

    def rules(self) -> dict[str, str]:
        """Return the rules that replace those of the model's plan."""
        return {f"{attention}.{name}": "replicate" for attention in self.attentions for name in (KEY, VALUE)}

    def keep(self, model: Any, *, rank: int, size: int) -> None:
        """Cut the projections of a loaded model, in place."""
        head = rank * self.num_kv_heads // size
        for attention in _modules(model, self.attentions):
            for projection in (attention.get_submodule(KEY), attention.get_submodule(VALUE)):
                _keep_rows(projection, head * attention.head_dim, attention.head_dim)
            attention.num_key_value_groups = self.num_query_heads // size


@dataclass(frozen=True, slots=True)
class Sharding:
    """The division of a model over `size` ranks.

    own_head        set if each rank has one key/value head, which others have too
    by_experts      True if experts are all that is sharded
    """

    size: int
    own_head: OwnHead | None = None
    by_experts: bool = False

    def loading_arguments(self) -> dict[str, Any]:
        """Return the arguments of from_pretrained() that shard the model."""
        rules = None if self.own_head is None else self.own_head.rules()
        ep_size = self.size if self.by_experts else 1
        return {"distributed_config": DistributedConfig(tp_size=self.size, tp_plan=rules, ep_size=ep_size)}

    def finish(self, model: Any) -> None:
        """Do the rest for a model that was loaded with these arguments, in place; on all ranks."""
        if self.own_head is not None:
            self.own_head.keep(model, rank=dist.get_rank(), size=self.size)

    def __str__(self) -> str:
        if self.own_head is not None:
            copies = self.size // self.own_head.num_kv_heads
            return f"each of {self.own_head.num_kv_heads} kv heads is on {copies} of {self.size} ranks"
        return f"experts alone, over {self.size} ranks" if self.by_experts else f"over {self.size} ranks"


def plan_sharding(model: Any, size: int) -> Sharding:
    """Return the division of a model over `size` ranks.

    The model is as transformers makes it, its parameters on the meta device. Raises UnsupportedModel, with the numbers,
    if it can't be divided, and ValueError if a package is missing that transformers shards with.
    """
    if importlib.util.find_spec(ACCELERATE) is None:
        raise ValueError(f"--tensor-parallel-size {size}: transformers needs the package {ACCELERATE} to shard a model")
    name, plan = type(model).__name__, model.tp_plan or {}
    if find_quantization(model.config) is not None:
        raise UnsupportedModel(name, f"its weights are quantized, and are not sharded over {size} ranks")
    if model._is_stateful:
        raise UnsupportedModel(name, f"it keeps states per sequence, which are not sharded over {size} ranks")
    if not _has_layers(plan):
        return _plan_experts(model, size)
    config = model.config.get_text_config(decoder=True)
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    has_copies = isinstance(num_kv_heads, int) and size % num_kv_heads == 0
    for count, kind, may_have_copies in (
        (num_kv_heads, "kv heads", has_copies),
        (config.num_attention_heads, "query heads", False),
    ):
        if get_kv_heads_per_rank(plan, count, size) is None and not may_have_copies:
            raise UnsupportedModel(name, f"its {count} {kind} can't be divided over {size} ranks")
    if get_kv_heads_per_rank(plan, num_kv_heads, size) is not None:
        return Sharding(size)
    own_head = OwnHead(_attentions(plan), num_kv_heads, config.num_attention_heads)
    if (why := _find_obstacle(model, own_head)) is not None:
        raise UnsupportedModel(name, f"its {num_kv_heads} kv heads can't be copied to {size} ranks: {why}")
    return Sharding(size, own_head)


def _has_layers(plan: Mapping[str, str]) -> bool:
    return any("*" in rule for rule in plan)


def _plan_experts(model: Any, size: int) -> Sharding:
    plan, name = model.ep_plan or {}, type(model).__name__
    if not _has_layers(plan):
        raise UnsupportedModel(name, f"transformers has no plan to shard its layers over {size} ranks")
    for parameter_name, parameter in model.named_parameters():
        is_sharded = plan.get(replace_layer_number_by_wildcard(parameter_name)) == EXPERTS
        if is_sharded and parameter.shape[0] % size:
            raise UnsupportedModel(name, f"its {parameter.shape[0]} experts can't be divided over {size} ranks")
    return Sharding(size, by_experts=True)


def _attentions(plan: Mapping[str, str]) -> tuple[str, ...]:
    """Return the modules with keys that the plan cuts by columns."""
    keys = (rule for rule, style in plan.items() if rule.endswith(f".{KEY}") and style == "colwise")
    return tuple(rule.removesuffix(f".{KEY}") for rule in keys)


def _modules(model: Any, names: tuple[str, ...]) -> Iterator[Any]:
    return (module for name, module in model.named_modules() if replace_layer_number_by_wildcard(name) in names)


def _find_obstacle(model: Any, own_head: OwnHead) -> str | None:
    """Return the reason why a rank can't have one head only; None if it can.

    Each attention module has to consist of four linear layers and of parameters that are the same for all heads.
    """
    found = list(_modules(model, own_head.attentions))
    if not found:
        return "its keys and values are not separate projections"
    for attention in found:
        head_dim = getattr(attention, "head_dim", 0)
        for name in (KEY, VALUE):
            projection = getattr(attention, name, None)
            if type(projection) is not nn.Linear or projection.out_features != own_head.num_kv_heads * head_dim:
                return f"{name} is not a linear layer of {own_head.num_kv_heads} heads"
        for name, parameter in attention.named_parameters():
            if name.split(".")[0] not in (QUERY, KEY, VALUE, OUTPUT) and parameter.shape != (head_dim,):
                return f"{name} differs from head to head"
    return None


def _keep_rows(projection: nn.Linear, first: int, count: int) -> None:
    for name, parameter in list(projection.named_parameters()):
        setattr(projection, name, nn.Parameter(parameter[first : first + count].clone(), requires_grad=False))
    projection.out_features = count
