"""Making a transformers model in memory run on the block pool.

A model is used unchanged: no list of names, no code of our own per architecture. Checks make that safe:

    probe           finds if every layer calls the registered attention function, and with which mask
    pinned rope     a rope that would depend on the whole batch depends on positions alone
    self-check      compares the result with the model's own attention

A model in which some layers do not call that function keeps its own attention, with a cache that is the pool. A model
that fails a check is refused with UnsupportedModel, naming the class and the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

from quire.worker.attention.latent_attention import LATENT_NAME, keep_latents, latent_specs
from quire.worker.attention.row_attention import RowAttentionStep
from quire.worker.attention.torch_attention import ATTENTION_NAME, AttentionStep
from quire.worker.fusion.fuse import fuse_model, unfused
from quire.worker.fusion.modules import swap_back
from quire.worker.fusion.steps import FusedSteps
from quire.worker.memory.layer_groups import LayerGroupChoice
from quire.worker.memory.layer_spec import LayerSpec
from quire.worker.model.cache_layout import keeps_states, probe_cache
from quire.worker.model.cached_model import CachedModel
from quire.worker.model.modes import Modes, Part
from quire.worker.model.packed_linear import Packing, pack_linears
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.pinned_rope import pin_rope
from quire.worker.model.probe import probe
from quire.worker.model.row_check import check_rows, choose_threads
from quire.worker.model.self_check import CHECKED_SEQS, eager_reference
from quire.worker.model.sharding import ONE_PART, ModelRanks
from quire.worker.model.tiled_cached import TiledCachedModel
from quire.worker.model.tiled_experts import TILED_EXPERTS
from quire.worker.model.tiled_model import TiledModel
from quire.worker.model.tiles import TILE_ROWS
from quire.worker.model.token_ids import check_output_rows, end_token_ids
from quire.worker.quantization.experts import QuantizedExperts
from quire.worker.quantization.packed_linear import PackedLinear
from quire.worker.quantization.quantized_module import QuantizedModule, quantized_modules
from quire.worker.quantization.scaled_linear import ScaledLinear, Way, try_float8
from quire.worker.unsupported_model import OffTheInterface, UnsupportedModel, first_line

log = logging.getLogger(__name__)

EXPERTS: tuple[str, ...] = ("grouped_mm", "eager")
"""Ways to run a mixture of experts, the fastest first."""
TILED_DTYPES = (torch.bfloat16,)
"""Of the linear layers that are packed in a model that computes in tiles: packing changes the bits of its results."""


class Arithmetic(Enum):
    """The arithmetic of a token: any, or in one of two ways the same in each step. The values are for people."""

    ANY = "as it is fastest"
    TILES = f"{TILE_ROWS} tokens in each forward"
    KERNELS = "kernels with fixed tiles"

    @classmethod
    def of(cls, *, deterministic: bool, is_fused: bool) -> Arithmetic:
        """A deterministic model is fused where there are kernels for it."""
        if not deterministic:
            return cls.ANY
        return cls.KERNELS if is_fused else cls.TILES


def prepare_model(
    model: Any,
    *,
    max_model_len: int,
    step_kind: type[AttentionStep] = AttentionStep,
    fused_steps: FusedSteps | None = None,
    ranks: ModelRanks = ONE_PART,
    layer_groups: LayerGroupChoice = "auto",
    deterministic: bool = False,
) -> PagedModel:
    """Make a transformers model that is already in memory run on a block pool; it is changed in place.

    fused_steps as for load_model(); a model that fails the self-check when fused runs as it is. A model that is sharded
    over several ranks is neither fused nor packed, and keeps keys and values, not latents. A deterministic model is of
    one rank. Without fused_steps it is on a CPU, and may change the number of torch's threads; with them they are
    fixed_steps(), step_kind is in kernels, and use_fixed_tiles() was called.
    Raises UnsupportedModel as load_model() does.
    """
    model.set_attn_implementation("eager")
    if ranks.size == 1:  # else each has a part of the rows
        check_output_rows(model)
    pin_rope(model, max_model_len)
    arithmetic = Arithmetic.of(deterministic=deterministic, is_fused=fused_steps is not None)
    experts = _choose_experts_implementation(model, arithmetic)
    paged = _prepare(
        model,
        max_model_len=max_model_len,
        step_kind=step_kind,
        fused_steps=fused_steps,
        ranks=ranks,
        layer_groups=layer_groups,
        arithmetic=arithmetic,
    )
    if experts is not None:
        how, reason = experts
        paged.modes.note(Part.EXPERTS, how, degraded=reason if paged.device.type == "cuda" else "")
    if arithmetic is not Arithmetic.ANY:
        if arithmetic is Arithmetic.TILES:
            choose_threads(paged)
        check_rows(paged, model, in_kernels=arithmetic is Arithmetic.KERNELS)
        paged.fingerprint += ":deterministic"
        paged.modes.note(Part.ARITHMETIC, f"deterministic: {arithmetic.value}")
    return paged


def _choose_products(paged: PagedModel, model: Any, arithmetic: Arithmetic) -> None:
    """Let quantized layers multiply without a dequantized weight on a GPU that can, and note how weights are used.

    To be called when the model's fingerprint is there, which is of the weights as they were loaded.
    """
    modules = [module for _, module in quantized_modules(model)]
    if not modules:
        return
    reasons: list[str] = []
    if model.device.type == "cuda":
        reasons = _use_kernels(modules, model.dtype, arithmetic)
        if not all(each.multiplies_packed for each in modules):
            reasons.insert(0, "each product dequantizes its weight")
    formats = sorted({each.dequantizer for each in modules})
    paged.modes.note(Part.WEIGHTS, f"quantized, {', '.join(formats)}", degraded=": ".join(reasons))


def _use_kernels(modules: list[QuantizedModule], dtype: torch.dtype, arithmetic: Arithmetic) -> list[str]:
    """Let layers on a GPU multiply by packed weights, where products that were tried are right. Returns why not."""
    scaled = [each for each in modules if isinstance(each, ScaledLinear)]
    packed = [each for each in modules if isinstance(each, PackedLinear)]
    if arithmetic is not Arithmetic.ANY:
        return ["--deterministic"] if scaled or packed else []
    # Here and not above: they import Triton, which a CPU does not need.
    from quire.worker.quantization.int4_product import try_int4
    from quire.worker.quantization.scaled_product import try_scaled

    float8 = [each for each in scaled if each.way is Way.FLOAT8 and dtype == torch.bfloat16]
    without_float8 = try_float8(float8)
    others = [each for each in scaled if not each.multiplies_packed]
    reasons = [without_float8, try_scaled(others, dtype), try_int4(packed, dtype)]
    return [each for each in reasons if each is not None]


def _prepare(
    model: Any,
    *,
    max_model_len: int,
    step_kind: type[AttentionStep],
    fused_steps: FusedSteps | None,
    ranks: ModelRanks,
    layer_groups: LayerGroupChoice,
    arithmetic: Arithmetic,
) -> PagedModel:
    try:
        specs = probe(model)
    except OffTheInterface as off:
        if ranks.size > 1:
            reason = f"{off.reason}; its own attention is not sharded over {ranks.size} ranks"
            raise UnsupportedModel(off.model_class, reason) from off
        return _prepare_cached(model, off.reason, max_model_len=max_model_len, arithmetic=arithmetic)
    if ranks.size > 1:
        return _prepare_sharded(
            model, specs, ranks, max_model_len=max_model_len, step_kind=step_kind, layer_groups=layer_groups
        )
    latent, without_latents = latent_specs(model, specs), ""
    if latent is not None and arithmetic is Arithmetic.KERNELS:
        latent, without_latents = None, "--deterministic: attention over latents is in torch"
    if latent is not None:
        keep_latents(model)
        try:
            return _prepare_paged(
                model,
                latent,
                expanded=specs,
                implementation=LATENT_NAME,
                max_model_len=max_model_len,
                fused_steps=fused_steps,
                layer_groups=layer_groups,
                arithmetic=arithmetic,
            )
        except UnsupportedModel as refused:
            without_latents = refused.reason
    try:
        paged = _prepare_paged(
            model,
            specs,
            implementation=ATTENTION_NAME,
            max_model_len=max_model_len,
            step_kind=step_kind,
            fused_steps=fused_steps,
            layer_groups=layer_groups,
            arithmetic=arithmetic,
        )
    except UnsupportedModel as refused:
        model.set_attn_implementation("eager")
        if not keeps_states(model):
            raise
        cached = _prepare_cached(model, refused.reason, max_model_len=max_model_len, arithmetic=arithmetic)
        cached.modes.note(Part.CACHE, "the model's own attention over the pool", degraded=refused.reason)
        return cached
    if without_latents:
        paged.modes.note(Part.CACHE, "keys and values in place of latents", degraded=without_latents)
    return paged


def _prepare_paged(
    model: Any,
    specs: Mapping[int, LayerSpec],
    *,
    implementation: str,
    max_model_len: int,
    expanded: Mapping[int, LayerSpec] | None = None,
    step_kind: type[AttentionStep] = AttentionStep,
    fused_steps: FusedSteps | None = None,
    layer_groups: LayerGroupChoice,
    arithmetic: Arithmetic,
) -> PagedModel:
    """`expanded` are the specs of the layers' attention, if the pool's differ."""
    model.set_attn_implementation(implementation)
    is_tiled = arithmetic is Arithmetic.TILES
    paged = (TiledModel if is_tiled else PagedModel)(
        model,
        specs=specs,
        max_model_len=max_model_len,
        eos_token_ids=end_token_ids(model),
        step_kind=RowAttentionStep if is_tiled else step_kind,
        layer_groups=layer_groups,
    )
    if arithmetic is Arithmetic.KERNELS:
        _make_fixed(paged)
    _choose_products(paged, model, arithmetic)
    packing = Packing(0)
    if expanded is None and fused_steps is None:
        # After the fingerprint, which is of the weights as they were loaded.
        packing = pack_linears(model, dtypes=TILED_DTYPES) if is_tiled else pack_linears(model)
    _note_packing(paged.modes, packing)
    if fused_steps is None or not _fuse(paged, model, expanded or specs, fused_steps):
        _check_against_own_attention(paged)
    return paged


def _make_fixed(paged: PagedModel) -> None:
    """Have a model compute in kernels with fixed tiles alone. Raises UnsupportedModel if a layer has none."""
    if not paged.step_kind.reads_lengths_on_device(paged.attention_specs):
        raise UnsupportedModel(paged.architecture, f"--deterministic: attention is {paged.describe_attention()}")
    paged.is_deterministic = True


def _note_packing(modes: Modes, packing: Packing) -> None:
    how = f", {packing.num_packed} linear layers packed" if packing.num_packed else ""
    different = f"packed, {packing.num_different} linear layers gave other results" if packing.num_different else ""
    modes.note(Part.MODULES, f"the model's own{how}", degraded=different)


def _prepare_sharded(
    model: Any,
    specs: Mapping[int, LayerSpec],
    ranks: ModelRanks,
    *,
    max_model_len: int,
    step_kind: type[AttentionStep],
    layer_groups: LayerGroupChoice,
) -> PagedModel:
    """`specs` are of this rank's heads."""
    log.info("fused modules: off, %d ranks have a part of each weight", ranks.size)
    log.info("packed linear layers: off, %d ranks have a part of each weight", ranks.size)
    model.set_attn_implementation(ATTENTION_NAME)
    paged = PagedModel(
        model,
        specs=specs,
        max_model_len=max_model_len,
        eos_token_ids=end_token_ids(model),
        step_kind=step_kind,
        layer_groups=layer_groups,
    )
    paged.fingerprint = ranks.combined(paged.fingerprint)
    paged.modes.note(Part.MODULES, f"the model's own: {ranks.size} ranks have a part of each weight")
    _check_against_own_attention(paged)
    return paged


def _fuse(paged: PagedModel, model: Any, specs: Mapping[int, LayerSpec], steps: FusedSteps) -> bool:
    """Fuse, and keep it if the fused model passes the self-check: its reference is the model's own modules."""
    unfused_block_size = paged.min_block_size
    paged.min_block_size = max(unfused_block_size, steps.min_block_size)
    try:
        paged.fusion = fuse_model(model, specs, max_model_len=paged.max_model_len, steps=steps)
        _check_against_own_attention(paged)
    except UnsupportedModel as error:
        if paged.is_deterministic:
            raise UnsupportedModel(paged.architecture, f"--deterministic: fused, {error.reason}") from error
        swap_back(model)
        paged.min_block_size = unfused_block_size
        paged.fusion = unfused(model, error.reason)
        paged.modes.note(Part.MODULES, "the model's own", degraded=f"fused, {error.reason}")
        return False
    paged.modes.note(Part.MODULES, str(paged.fusion), degraded="; ".join(paged.fusion.failures))
    if paged.is_deterministic:
        _fix_linears(model)
    return True


def _fix_linears(model: Any) -> None:
    from quire.worker.fusion.fixed_products import fix_linears  # it imports Triton, which a CPU does not need

    fix_linears(model)


def _prepare_cached(model: Any, why: str, *, max_model_len: int, arithmetic: Arithmetic) -> CachedModel:
    """`why` it does not run on the registered attention function. Raises UnsupportedModel with both reasons."""
    if arithmetic is Arithmetic.KERNELS:
        raise UnsupportedModel(type(model).__name__, f"--deterministic: there are no kernels for it: {why}")
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        layout = probe_cache(model)
        kind = TiledCachedModel if arithmetic is Arithmetic.TILES else CachedModel
        cached = kind(model, layout=layout, max_model_len=max_model_len, eos_token_ids=end_token_ids(model))
        _choose_products(cached, model, arithmetic)
        cached.modes.note(Part.MODULES, "the model's own")
        _check_against_own_attention(cached)
    except UnsupportedModel as refused:
        reason = f"{why}; with its own attention over the pool, {refused.reason}"
        raise UnsupportedModel(refused.model_class, reason) from refused
    return cached


def _choose_experts_implementation(model: Any, arithmetic: Arithmetic) -> tuple[str, str] | None:
    """Take the first way of running a mixture of experts that runs on this device; nothing for other models.

    Returns its name, and why not the ways before it. Raises UnsupportedModel if there is none.
    """
    can_set = getattr(model, "_can_set_experts_implementation", None)
    if can_set is None or not can_set():
        return None
    if arithmetic is Arithmetic.KERNELS:
        raise UnsupportedModel(type(model).__name__, "--deterministic: there are no kernels for its experts")
    implementations, errors = EXPERTS, []
    if arithmetic is Arithmetic.TILES:
        implementations = (TILED_EXPERTS,)
    elif any(isinstance(module, QuantizedExperts) for module in model.modules()):
        implementations, errors = ("eager",), ["grouped_mm: quantized experts are dequantized one by one"]
    token_ids = torch.zeros(1, 8, dtype=torch.int64, device=model.device)
    for implementation in implementations:
        try:
            model.set_experts_implementation(implementation)
            eager_reference(model)(token_ids[0])
        except Exception as error:
            errors.append(f"{implementation}: {first_line(error)}")
        else:
            return implementation, "; ".join(errors)
    raise UnsupportedModel(type(model).__name__, f"its experts do not run on {model.device.type} ({'; '.join(errors)})")


def _check_against_own_attention(paged: PagedModel) -> None:
    paged.allocate_states(CHECKED_SEQS)
    try:
        disagreement = paged.find_disagreement(paged.forward)
    except Exception as error:
        reason = f"the self-check failed with {type(error).__name__}: {first_line(error)}"
        raise UnsupportedModel(paged.architecture, reason) from error
    if disagreement is not None:
        raise UnsupportedModel(paged.architecture, str(disagreement))
