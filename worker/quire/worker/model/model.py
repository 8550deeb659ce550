"""Loading a transformers model so that it runs on the block pool, and running it.

A model is used unchanged: no list of names, no code of our own per architecture. Checks at load make that safe: the
probe finds if every layer calls the registered attention function and with which mask, a rope that would depend on
the whole batch is pinned to positions alone, and a numeric self-check compares the result with the model's own
attention. A model in which some layers do not call that function keeps its own attention, with a cache that is the
pool. A model that fails a check is refused with UnsupportedModel, naming the class and the reason.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.worker.attention.latent_attention import LATENT_NAME, keep_latents, latent_specs
from quire.worker.attention.torch_attention import ATTENTION_NAME, AttentionStep, Workspace, attention_step
from quire.worker.device.rounding import TOLERANCE
from quire.worker.fusion.fuse import FusionReport, fuse_model, unfused
from quire.worker.fusion.modules import has_own_forward, swap_back
from quire.worker.fusion.steps import FusedSteps
from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.layer_groups import LayerGroupChoice, group_layers
from quire.worker.memory.layer_spec import KeptPerToken, LayerSpec
from quire.worker.memory.state_slots import StateKey, StateSlots, StateSpec
from quire.worker.memory.step_batch import StepBatch
from quire.worker.model.base_model import answering, base_of
from quire.worker.model.cached_model import CacheLayout, cut_step, keeps_states, packed_order, probe_cache, run_cached
from quire.worker.model.hidden_states import HiddenStates, kept_hidden_states
from quire.worker.model.model_source import ModelNotFound, check_hub, find_folder
from quire.worker.model.packed_linear import pack_linears
from quire.worker.model.past_positions import PastPositions
from quire.worker.model.probe import probe
from quire.worker.model.self_check import (
    CHECKED_SEQS,
    SHORTEST_TOKENS,
    Disagreement,
    eager_reference,
    find_disagreement,
    rounded_otherwise,
)
from quire.worker.model.sharding import ONE_PART, ModelRanks, Sharding, plan_sharding
from quire.worker.unsupported_model import OffTheInterface, UnsupportedModel

log = logging.getLogger(__name__)

DTYPES = tuple(TOLERANCE)
# A configuration's longest length; transformers gives GPT-2's and GPT-J's n_positions the first name too.
LENGTH_NAMES = ("max_position_embeddings", "max_seq_len")


class PagedModel:
    """A causal language model with its keys and values in a KVPool."""

    state_specs: Mapping[StateKey, StateSpec] = MappingProxyType({})
    """The state that the model keeps per sequence, besides keys and values."""
    takes_any_kv_dtype = True
    """True if a pool may have another dtype than the model."""

    def __init__(
        self,
        model: Any,
        *,
        specs: Mapping[int, KeptPerToken],
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        step_kind: type[AttentionStep] = AttentionStep,
        layer_groups: LayerGroupChoice = "auto",
    ) -> None:
        """`specs` are the pool's, by layer: LayerSpecs if `model` has ATTENTION_NAME or LATENT_NAME set as its
        attention implementation; load_model() sees to that.

        step_kind runs the attention of its steps, and limits the block sizes of a pool. layer_groups as in
        group_layers().
        """
        self.specs = dict(specs)
        self.layer_groups = group_layers(self.specs, max_model_len=max_model_len, choice=layer_groups)
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.architecture = type(model).__name__
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
        # The same model fills a block differently when it keeps latents.
        self.fingerprint = fingerprint(model) + (":latent" if any(s.values_in_keys for s in specs.values()) else "")
        self.step_kind = step_kind
        self.min_block_size = step_kind.min_block_size
        self.fusion: FusionReport | None = None
        self._model = model
        self._base = base_of(model)
        self.attention_specs = {i: spec for i, spec in specs.items() if isinstance(spec, LayerSpec)}
        self._counts_on = _counts_on_from_cache(model.config.get_text_config(decoder=True))
        self._workspace = Workspace()
        self.allocate_states(0)

    @property
    def has_recurrent_state(self) -> bool:
        """True if a sequence can continue only from its last position: blocks shared with others have no state for
        it."""
        return bool(self.state_specs)

    def make_pool(self, *, num_blocks: int, block_size: int, dtype: torch.dtype | None = None) -> KVPool:
        """Make a pool for the model, on its device; dtype None: the model's. Raises what KVPool raises."""
        return KVPool(
            self.specs,
            groups=self.layer_groups,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype or self.dtype,
            device=self.device,
        )

    def describe_attention(self) -> str:
        """The attention kernels, for people."""
        return self.step_kind.describe(self.attention_specs)

    def allocate_states(self, max_num_seqs: int) -> None:
        """Make room for the states of so many rows of a sequence table; none of them holds anything then."""
        self.states = StateSlots(self.state_specs, max_num_seqs=max_num_seqs, device=self.device)

    def forward(self, batch: StepBatch, pool: KVPool, *, out: Tensor | None = None) -> Tensor:
        """Run one step: write the batch's keys and values to the pool, return logits of each sequence's last token.

        Returns [B, vocab_size] float32, on the model's device, not normalised: `out`, if given. Cost: one forward of
        the model over T packed tokens; the output layer runs on B of them. No sync, except in models that make one.
        """
        with torch.inference_mode(), attention_step(self.attention_step(batch, pool)):
            output = self._model(**self._arguments(batch), logits_to_keep=batch.last_indices)
            logits: Tensor = output.logits[0]
            return logits.float() if out is None else out.copy_(logits)

    def attention_step(self, batch: StepBatch, pool: KVPool) -> AttentionStep:
        """Return the attention of one step."""
        return self.step_kind(batch, pool, specs=self.attention_specs, workspace=self._workspace)

    def forward_base(self, batch: StepBatch, step: AttentionStep) -> Any:
        """Run the model below the output layer, with this attention; return its ModelOutput.

        Its last_hidden_state is [1, T, hidden size]. Reads input_ids, positions and slot_mapping of the batch.
        """
        with torch.inference_mode(), attention_step(step):
            return self._base(**self._arguments(batch))

    def forward_head(self, batch: StepBatch, output: Any) -> Tensor:
        """Return logits as forward(), of what forward_base() gave for the batch. Cost: the output layer on B tokens."""
        with torch.inference_mode(), answering(self._base, output):
            logits: Tensor = self._model(**self._arguments(batch), logits_to_keep=batch.last_indices).logits[0].float()
        return logits

    @property
    def has_head(self) -> bool:
        """True if forward_base() and forward_head() are there: the output layer is not a part of the base model."""
        return self._base is not None and has_own_forward(self._base)

    def _arguments(self, batch: StepBatch) -> dict[str, Any]:
        return {
            "input_ids": batch.input_ids[None],
            "position_ids": batch.positions[None],
            "past_key_values": PastPositions(batch.positions) if self._counts_on else None,
            "use_cache": False,
        }

    def keeping_hidden_states(self, batch: StepBatch, pool: KVPool) -> AbstractContextManager[HiddenStates]:
        """Keep the hidden states of the forward of this batch that runs within, to make logits of all of its tokens."""
        return kept_hidden_states(self._model)

    def find_disagreement(self, forward: Callable[[StepBatch, KVPool], Tensor]) -> Disagreement | None:
        """Compare forward(batch, pool) -> [B, vocab_size] with the model's own attention; see
        quire.worker.model.self_check.

        Raises the exceptions of both.
        """
        own_attention = eager_reference(self._model)
        implementation = self._model.config._attn_implementation

        def reference(token_ids: Tensor) -> Tensor:
            self._model.set_attn_implementation("eager")
            try:
                return own_attention(token_ids)
            finally:
                self._model.set_attn_implementation(implementation)

        def rounded_reference(token_ids: Tensor) -> Tensor:
            with rounded_otherwise(self._model):
                return reference(token_ids)

        return find_disagreement(
            forward,
            reference,
            rounded_reference=rounded_reference,
            specs=self.specs,
            groups=self.layer_groups,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            dtype=self.dtype,
            device=self.device,
            min_block_size=self.min_block_size,
        )


class CachedModel(PagedModel):
    """A model that runs with its own attention, over a cache that is the pool."""

    takes_any_kv_dtype = False

    def __init__(self, model: Any, *, layout: CacheLayout, max_model_len: int, eos_token_ids: tuple[int, ...]) -> None:
        self.state_specs = layout.states
        self._layout = layout
        super().__init__(model, specs=layout.layers, max_model_len=max_model_len, eos_token_ids=eos_token_ids)

    def describe_attention(self) -> str:
        """See PagedModel.describe_attention."""
        return "the model's own, over the pool as its cache"

    def keeping_hidden_states(self, batch: StepBatch, pool: KVPool) -> AbstractContextManager[HiddenStates]:
        """See PagedModel.keeping_hidden_states."""
        return kept_hidden_states(
            self._model, order=packed_order(cut_step(batch, self._layout, block_size=pool.block_size))
        )

    def forward(self, batch: StepBatch, pool: KVPool, *, out: Tensor | None = None) -> Tensor:
        """See PagedModel.forward and run_cached(). Needs states allocated for the batch's rows, if there are any."""
        with torch.inference_mode():
            logits = run_cached(
                self._model, batch, pool, layout=self._layout, states=self.states, workspace=self._workspace
            )
            return logits if out is None else out.copy_(logits)


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
) -> PagedModel:
    """Load a model from a folder or the Hub, and make sure that it runs correctly on a block pool.

    dtype None takes the checkpoint's. max_model_len (tokens) None takes what the model was made for; a rope with
    frequencies that depend on the length (dynamic NTK, longrope) is pinned to max_model_len's; see pin_rope(). With
    fused_steps modules are fused (quire.worker.fusion.fuse), and a pool has at least their block size. With several
    ranks each loads its part, at the same time. layer_groups as in quire.worker.memory.layer_groups.

    Raises ModelNotFound if there is none at `source`, UnsupportedModel if it cannot run correctly, ValueError for a
    dtype or a max_model_len out of range. Cost beside reading the weights: some forwards of a few tokens each.
    """
    source, local_only = _find(source, revision)
    config = _load_config(source, revision=revision, trust_remote_code=trust_remote_code, local_files_only=local_only)
    _check_is_causal_lm(config)
    dtype = dtype or _checkpoint_dtype(config)
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype} is not one of {', '.join(map(str, DTYPES))}")
    max_model_len = _model_len(config, max_model_len)
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
    model = model.eval().requires_grad_(False).to(device)
    return prepare_model(
        model,
        max_model_len=max_model_len,
        step_kind=step_kind,
        fused_steps=fused_steps,
        ranks=ranks,
        layer_groups=layer_groups,
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


def prepare_model(
    model: Any,
    *,
    max_model_len: int,
    step_kind: type[AttentionStep] = AttentionStep,
    fused_steps: FusedSteps | None = None,
    ranks: ModelRanks = ONE_PART,
    layer_groups: LayerGroupChoice = "auto",
) -> PagedModel:
    """Make a transformers model that is already in memory run on a block pool; it is changed in place.

    fused_steps as for load_model(); a model that fails the self-check when fused runs as it is. A model that is sharded
    over several ranks is neither fused nor packed, and keeps keys and values, not latents.
    Raises UnsupportedModel as load_model() does.
    """
    model.set_attn_implementation("eager")
    pin_rope(model, max_model_len)
    _choose_experts_implementation(model)
    try:
        specs = probe(model)
    except OffTheInterface as off:
        if ranks.size > 1:
            reason = f"{off.reason}; its own attention is not sharded over {ranks.size} ranks"
            raise UnsupportedModel(off.model_class, reason) from off
        return _prepare_cached(model, off.reason, max_model_len=max_model_len)
    if ranks.size > 1:
        return _prepare_sharded(
            model, specs, ranks, max_model_len=max_model_len, step_kind=step_kind, layer_groups=layer_groups
        )
    latent = latent_specs(model, specs)
    if latent is not None:
        keep_latents(model)
        with suppress(UnsupportedModel):
            return _prepare_paged(
                model,
                latent,
                expanded=specs,
                implementation=LATENT_NAME,
                max_model_len=max_model_len,
                fused_steps=fused_steps,
                layer_groups=layer_groups,
            )
    try:
        return _prepare_paged(
            model,
            specs,
            implementation=ATTENTION_NAME,
            max_model_len=max_model_len,
            step_kind=step_kind,
            fused_steps=fused_steps,
            layer_groups=layer_groups,
        )
    except UnsupportedModel as refused:
        model.set_attn_implementation("eager")
        if not keeps_states(model):
            raise
        return _prepare_cached(model, refused.reason, max_model_len=max_model_len)


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
) -> PagedModel:
    """`expanded` are the specs of the layers' attention, if the pool's differ."""
    model.set_attn_implementation(implementation)
    paged = PagedModel(
        model,
        specs=specs,
        max_model_len=max_model_len,
        eos_token_ids=_eos_token_ids(model),
        step_kind=step_kind,
        layer_groups=layer_groups,
    )
    if expanded is None and fused_steps is None:
        pack_linears(model)  # after the fingerprint, which is of the weights as they were loaded
    if fused_steps is None or not _fuse(paged, model, expanded or specs, fused_steps):
        _check_against_own_attention(paged)
    return paged


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
        eos_token_ids=_eos_token_ids(model),
        step_kind=step_kind,
        layer_groups=layer_groups,
    )
    paged.fingerprint = ranks.combined(paged.fingerprint)
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
        swap_back(model)
        paged.min_block_size = unfused_block_size
        paged.fusion = unfused(model, error.reason)
        return False
    return True


def _prepare_cached(model: Any, why: str, *, max_model_len: int) -> CachedModel:
    """`why` it does not run on the registered attention function. Raises UnsupportedModel with both reasons."""
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        layout = probe_cache(model)
        cached = CachedModel(model, layout=layout, max_model_len=max_model_len, eos_token_ids=_eos_token_ids(model))
        _check_against_own_attention(cached)
    except UnsupportedModel as refused:
        reason = f"{why}; with its own attention over the pool, {refused.reason}"
        raise UnsupportedModel(refused.model_class, reason) from refused
    return cached


def _load_config(source: str, *, revision: str | None, trust_remote_code: bool, local_files_only: bool) -> Any:
    try:
        return AutoConfig.from_pretrained(
            source, revision=revision, trust_remote_code=trust_remote_code, local_files_only=local_files_only
        )
    except OSError as error:
        raise ModelNotFound(source, _first_line(error)) from error
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(source, _first_line(error)) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _check_is_causal_lm(config: Any) -> None:
    architectures = getattr(config, "architectures", None) or [type(config).__name__]
    if config.is_encoder_decoder:
        raise UnsupportedModel(architectures[0], "it is an encoder-decoder; only decoder-only models run")
    remote_classes = getattr(config, "auto_map", None) or {}
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and "AutoModelForCausalLM" not in remote_classes:
        raise UnsupportedModel(
            architectures[0], f"transformers has no causal language model for model_type {config.model_type!r}"
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


def _counts_on_from_cache(text_config: Any) -> bool:
    """Llama 4 scales queries by the index in the batch after the cached tokens, and not by position_ids."""
    return bool(getattr(text_config, "attn_temperature_tuning", False))


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
            **({} if sharding is None else sharding.loading_arguments()),
        )
    except OSError as error:
        raise ModelNotFound(source, _first_line(error)) from error
    except Exception as error:
        reason = f"its weights do not load: {type(error).__name__}: {_first_line(error)}"
        raise UnsupportedModel(type(config).__name__, reason) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise UnsupportedModel(
            type(model).__name__, f"the checkpoint lacks {len(missing)} of its weights, the first is {missing[0]}"
        )
    if sharding is not None:
        sharding.finish(model)
    return model


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    """Every id that the generation configuration or the model's calls the end of a sequence."""
    ids: set[int] = set()
    for config in (model.generation_config, model.config.get_text_config(decoder=True)):
        value = getattr(config, "eos_token_id", None)
        ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return tuple(sorted(ids))


def pin_rope(model: Any, max_model_len: int) -> int:
    """Make every rope a function of position alone, in place; return how many were changed.

    Dynamic NTK and longrope choose frequencies by the greatest position of the whole batch, so that one long sequence
    would change all the others. They are fixed to what they are for a sequence of max_model_len tokens. If these are
    not the frequencies of a short sequence, a log line says so: transformers' generate() takes other ones then.
    """
    num_pinned = 0
    stretched: set[str] = set()
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str) and _depends_on_batch(rope_type):
            if _pin(module, rope_type, max_model_len, prefix="", arguments={}):
                stretched.add(rope_type)
            module.rope_type = "default"
            num_pinned += 1
        elif isinstance(rope_type, dict):
            for layer_type in [key for key, value in rope_type.items() if _depends_on_batch(value)]:
                arguments = {"layer_type": layer_type}
                if _pin(module, rope_type[layer_type], max_model_len, prefix=f"{layer_type}_", arguments=arguments):
                    stretched.add(rope_type[layer_type])
                rope_type[layer_type] = "default"
                num_pinned += 1
    if stretched:
        log.info(
            "rope (%s) pinned to max_model_len=%d: shorter sequences can get other tokens than "
            "transformers' generate gives",
            ", ".join(sorted(stretched)),
            max_model_len,
        )
    return num_pinned


def _depends_on_batch(rope_type: str) -> bool:
    return rope_type == "longrope" or "dynamic" in rope_type


def _pin(module: Any, rope_type: str, max_model_len: int, *, prefix: str, arguments: dict[str, str]) -> bool:
    """Pin one rope; return True if this changes its frequencies, which are those of a short sequence at load."""
    inv_freq = getattr(module, f"{prefix}inv_freq")
    computed, scaling = ROPE_INIT_FUNCTIONS[rope_type](
        module.config, inv_freq.device, seq_len=max_model_len, **arguments
    )
    pinned = computed.to(inv_freq.dtype)
    setattr(module, f"{prefix}inv_freq", pinned)
    setattr(module, f"{prefix}attention_scaling", scaling)
    return not torch.equal(pinned, inv_freq)


def _choose_experts_implementation(model: Any) -> None:
    """Take the first way of running a mixture of experts that runs on this device; nothing for other models."""
    can_set = getattr(model, "_can_set_experts_implementation", None)
    if can_set is None or not can_set():
        return
    token_ids = torch.zeros(1, 8, dtype=torch.int64, device=model.device)
    errors = []
    for implementation in ("grouped_mm", "eager"):
        try:
            model.set_experts_implementation(implementation)
            eager_reference(model)(token_ids[0])
        except Exception as error:
            errors.append(f"{implementation}: {_first_line(error)}")
        else:
            return
    raise UnsupportedModel(type(model).__name__, f"its experts do not run on {model.device.type} ({'; '.join(errors)})")


def _check_against_own_attention(paged: PagedModel) -> None:
    paged.allocate_states(CHECKED_SEQS)
    try:
        disagreement = paged.find_disagreement(paged.forward)
    except Exception as error:
        reason = f"the self-check failed with {type(error).__name__}: {_first_line(error)}"
        raise UnsupportedModel(paged.architecture, reason) from error
    if disagreement is not None:
        raise UnsupportedModel(paged.architecture, str(disagreement))


def fingerprint(model: Any) -> str:
    """Identify the content of a KV block by configuration, dtype and weights. Hex SHA-256, 64 characters.

    Of each weight it takes name, shape, dtype and one element of every row, at a column that changes from row to row;
    a buffer counts as a weight, so a pinned rope is part of it. Equal weights give equal fingerprints however they are
    cut into files; a checkpoint that differs only in elements not taken is not told apart. Reads about one element in
    a thousand, and waits for the device once per weight.
    """
    digest = hashlib.sha256(json.dumps(_lasting(model.config.to_dict()), sort_keys=True, default=str).encode())
    digest.update(f"{type(model).__name__} {model.dtype}".encode())
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(_sample(tensor))
    return digest.hexdigest()


def _lasting(config: Any) -> Any:
    """The configuration without its origin, and without fields that the digest takes from the model itself."""
    if not isinstance(config, dict):
        return config
    passing = {"architectures", "transformers_version", "dtype", "torch_dtype", "use_cache"}
    return {str(k): _lasting(v) for k, v in config.items() if not str(k).startswith("_") and k not in passing}


def _sample(tensor: Tensor) -> bytes:
    """Return bytes of a tensor; of a sharded weight, bytes of this rank's part."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if tensor.numel() == 0:
        return b""
    rows = tensor.detach().reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.detach().reshape(-1, 1)
    columns = torch.arange(rows.shape[0], device=rows.device) * 2654435761 % rows.shape[1]
    taken = rows.gather(1, columns[:, None]).contiguous()
    return taken.view(torch.uint8).cpu().numpy().tobytes()
