"""Loading a model from a folder or the Hub, as transformers saves it: configuration, length, dtype, weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.worker.attention.torch_attention import AttentionStep
from quire.worker.device.rounding import TOLERANCE
from quire.worker.fusion.steps import FusedSteps
from quire.worker.memory.layer_groups import LayerGroupChoice
from quire.worker.model.model_source import ModelNotFound, check_hub, find_folder
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.preparing import prepare_model
from quire.worker.model.self_check import SHORTEST_TOKENS
from quire.worker.model.sharding import ONE_PART, ModelRanks, Sharding, plan_sharding
from quire.worker.model.token_ids import drop_unknown_padding
from quire.worker.quantization.at_load import quantize_at_load
from quire.worker.quantization.quantizer import find_fault, find_unlike_experts, find_unused_scale, use_scheme
from quire.worker.quantization.scheme import UnsupportedFormat
from quire.worker.unsupported_model import UnsupportedModel, first_line

log = logging.getLogger(__name__)

DTYPES = tuple(TOLERANCE)
# A configuration's longest length; transformers gives GPT-2's and GPT-J's n_positions the first name too.
LENGTH_NAMES = ("max_position_embeddings", "max_seq_len")


def load_model(
    source: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    step_kind: type[AttentionStep] = AttentionStep,
    fused_steps: FusedSteps | None = None,
    ranks: ModelRanks = ONE_PART,
    layer_groups: LayerGroupChoice = "auto",
    deterministic: bool = False,
    quantization: str | None = None,
) -> PagedModel:
    """Load a model from a folder or the Hub, and make sure that it runs correctly on a block pool.

    dtype None takes the checkpoint's. max_model_len (tokens) None takes what the model was made for; a rope with
    frequencies that depend on the length (dynamic NTK, longrope) is pinned to max_model_len's; see pin_rope(). With
    fused_steps modules are fused (quire.worker.fusion.fuse), and a pool has at least their block size. With several
    ranks each loads its part, at the same time. layer_groups as in quire.worker.memory.layer_groups. deterministic as
    for prepare_model(). quantization, a kind of quire.worker.quantization.at_load, quantizes plain weights.

    Raises ModelNotFound if there is none at `source`, UnsupportedModel if it cannot run correctly, ValueError for a
    dtype or a max_model_len out of range. Cost beside reading the weights: some forwards of a few tokens each.
    """
    source, local_only = _find(source, revision)
    config = _load_config(source, revision=revision, trust_remote_code=trust_remote_code, local_files_only=local_only)
    _check_is_causal_lm(config)
    drop_unknown_padding(config)
    dtype = dtype or _checkpoint_dtype(config)
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype} is not one of {', '.join(map(str, DTYPES))}")
    max_model_len = _model_len(config, max_model_len)
    _use_quantization(config, quantization)
    sharding = None
    if ranks.size > 1:
        sharding = plan_sharding(_outline(config, trust_remote_code=trust_remote_code), ranks.size)
        log.info("weights: %s", sharding)
    model = _load_weights(
        source,
        config,
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        local_files_only=local_only,
        sharding=sharding,
    )
    if quantization is not None:
        _quantize(model, quantization)
    fault = find_fault(model)
    if fault is not None:
        raise UnsupportedModel(type(model).__name__, f"its weight {fault}")
    model = model.eval().requires_grad_(False).to(device)
    return prepare_model(
        model,
        max_model_len=max_model_len,
        step_kind=step_kind,
        fused_steps=fused_steps,
        ranks=ranks,
        layer_groups=layer_groups,
        deterministic=deterministic,
    )


def check_sharding(
    source: str | Path, *, num_ranks: int, revision: str | None = None, trust_remote_code: bool = False
) -> None:
    """Make sure that a model can be sharded over so many ranks, before its weights are loaded.

    Raises ModelNotFound if there is none at `source`, UnsupportedModel if it can't, with the numbers.
    """
    source, local_only = _find(source, revision)
    config = _load_config(source, revision=revision, trust_remote_code=trust_remote_code, local_files_only=local_only)
    _check_is_causal_lm(config)
    plan_sharding(_outline(config, trust_remote_code=trust_remote_code), num_ranks)


def _use_quantization(config: Any, wanted: str | None) -> None:
    """Prepare the configuration for a checkpoint with quantized weights.

    Raises UnsupportedModel for a format that the worker does not have, and if another one is wanted at load.
    """
    try:
        scheme = use_scheme(config)
    except UnsupportedFormat as error:
        raise UnsupportedModel(_architecture(config), f"its weights are quantized; {error}") from error
    if scheme is not None:
        if wanted is not None:
            raise UnsupportedModel(
                _architecture(config), f"its weights are quantized ({scheme.name}): --quantization is for plain weights"
            )
        log.info("weights: quantized, %s", scheme.name)


def _quantize(model: Any, kind: str) -> None:
    try:
        quantize_at_load(model, kind)
    except UnsupportedFormat as error:
        raise UnsupportedModel(type(model).__name__, f"--quantization {kind}: {error}") from error
    log.info("weights: quantized, %s at load", kind)


def _architecture(config: Any) -> str:
    return str((getattr(config, "architectures", None) or [type(config).__name__])[0])


def _outline(config: Any, *, trust_remote_code: bool) -> Any:
    """Return the model without weights: its parameters are on the meta device."""
    loader: Any = AutoModelForCausalLM
    with torch.device("meta"):
        return loader.from_config(config, attn_implementation="eager", trust_remote_code=trust_remote_code).eval()


def _find(source: str | Path, revision: str | None) -> tuple[str, bool]:
    """Return where transformers finds the model, and True if only in its cache. Raises ModelNotFound."""
    folder = find_folder(str(source))
    local_only = folder is None and check_hub(str(source), revision=revision)
    return str(folder or source), local_only


def _load_config(source: str, *, revision: str | None, trust_remote_code: bool, local_files_only: bool) -> Any:
    try:
        return AutoConfig.from_pretrained(
            source, revision=revision, trust_remote_code=trust_remote_code, local_files_only=local_files_only
        )
    except OSError as error:
        raise ModelNotFound(source, first_line(error)) from error
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(source, first_line(error)) from error


def _check_is_causal_lm(config: Any) -> None:
    architecture = _architecture(config)
    if config.is_encoder_decoder:
        raise UnsupportedModel(architecture, "it is an encoder-decoder; only decoder-only models run")
    remote_classes = getattr(config, "auto_map", None) or {}
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and "AutoModelForCausalLM" not in remote_classes:
        raise UnsupportedModel(
            architecture, f"transformers has no causal language model for model_type {config.model_type!r}"
        )


def _checkpoint_dtype(config: Any) -> torch.dtype:
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(decoder=True), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _model_len(config: Any, wanted: int | None) -> int:
    """The wanted length if the model can take it, else the longest it can."""
    limit = longest_model_len(config.get_text_config(decoder=True))
    if wanted is None and limit is None:
        raise ValueError("--max-model-len must be given: the model's configuration names no longest length")
    length = limit if wanted is None else wanted
    assert length is not None
    if length < SHORTEST_TOKENS:
        raise ValueError(f"--max-model-len {length} is below {SHORTEST_TOKENS}")
    if limit is not None and length > limit:
        raise ValueError(f"--max-model-len {length} is above {limit}, the longest the model takes")
    return length


def longest_model_len(text_config: Any) -> int | None:
    """Return the most tokens of a sequence that the model is made for; None if its configuration names no limit."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    if "dynamic" in str(rope.get("rope_type")):
        return None
    lengths = (getattr(text_config, name, None) for name in LENGTH_NAMES)
    return next((length for length in lengths if length is not None), None)


def _load_weights(
    source: str,
    config: Any,
    *,
    dtype: torch.dtype,
    revision: str | None,
    trust_remote_code: bool,
    local_files_only: bool,
    sharding: Sharding | None,
) -> Any:
    loader: Any = AutoModelForCausalLM
    try:
        model, info = loader.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
            local_files_only=local_files_only,
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **({} if sharding is None else sharding.loading_arguments()),
        )
    except OSError as error:
        raise ModelNotFound(source, first_line(error)) from error
    except Exception as error:
        unlike = find_unlike_experts()
        reason = f"its weights do not load: {type(error).__name__}: {first_line(error)}"
        if unlike is not None:
            reason = f"its weight {unlike} does not load: experts lack a tensor, or theirs differ in shape or dtype"
        raise UnsupportedModel(type(config).__name__, reason) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise UnsupportedModel(
            type(model).__name__, f"the checkpoint lacks {len(missing)} of its weights, the first is {missing[0]}"
        )
    for name, found, expected in sorted(info["mismatched_keys"]):
        raise UnsupportedModel(
            type(model).__name__, f"its weight {name} has the shape {tuple(found)} and not {tuple(expected)}"
        )
    unused = find_unused_scale(info["unexpected_keys"])
    if unused is not None:
        raise UnsupportedModel(type(model).__name__, f"its weight {unused} is the scale of no quantized linear layer")
    if sharding is not None:
        sharding.finish(model)
    return model
