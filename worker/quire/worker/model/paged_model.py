"""A transformers model that runs on the block pool, with the worker's attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from quire.worker.adapter_bounds import AdapterBounds
from quire.worker.adapters.adapted_model import AdaptedModel
from quire.worker.attention.torch_attention import AttentionStep, Workspace, attention_step
from quire.worker.fusion.fuse import FusionReport
from quire.worker.fusion.modules import fused_projections, has_own_forward
from quire.worker.memory.kv_pool import Allocate, KVPool
from quire.worker.memory.layer_groups import LayerGroupChoice, group_layers
from quire.worker.memory.layer_spec import KeptPerToken, LayerSpec
from quire.worker.memory.state_slots import StateKey, StateSlots, StateSpec
from quire.worker.memory.step_batch import StepBatch
from quire.worker.model.base_model import answering, base_of
from quire.worker.model.fingerprint import fingerprint
from quire.worker.model.hidden_states import HiddenStates, kept_hidden_states
from quire.worker.model.modes import Modes, Part
from quire.worker.model.past_positions import PastPositions
from quire.worker.model.self_check import Disagreement, eager_reference, find_disagreement, rounded_otherwise
from quire.worker.quantization.kv_cache import find_kv_scales
from quire.worker.quantization.quantized_linear import dequantizing, quantized_linears
from quire.worker.quantization.quantized_module import count_layer_weights
from quire.worker.unsupported_model import UnsupportedModel

Reference = Callable[[Tensor], Tensor]
"""Runs the model with its own attention: token_ids [L] -> logits [L, vocab_size]."""
RunsForward = Callable[[Callable[[], Tensor]], Tensor]
"""Runs a forward between two steps."""


def run_at_once(forward: Callable[[], Tensor]) -> Tensor:
    """Run a forward while there are no steps."""
    return forward()


class PagedModel:
    """A causal language model with its keys and values in a KVPool."""

    state_specs: Mapping[StateKey, StateSpec] = MappingProxyType({})
    """The state that the model keeps per sequence, besides keys and values."""
    takes_any_kv_dtype = True
    """True if a pool may have another dtype than the model."""
    takes_adapters = True
    """True if its linear layers have all tokens of a step, in their order."""
    is_deterministic = False
    """True if a token gets the same logits, bit for bit, in any step."""

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
        text_config = model.config.get_text_config(decoder=True)
        self.vocab_size = int(text_config.vocab_size)
        self.num_layers = int(text_config.num_hidden_layers)
        # The same model fills a block differently when it keeps latents.
        self.fingerprint = fingerprint(model) + (":latent" if any(s.values_in_keys for s in specs.values()) else "")
        self.step_kind = step_kind
        self.min_block_size = step_kind.min_block_size
        self.fusion: FusionReport | None = None
        self.kv_scales: Mapping[int, Tensor] = {}
        """Of its pools in float8: see quire.worker.model.kv_scales."""
        self.modes = Modes()
        """How the parts of its steps run: code that leaves a fast path notes it here."""
        self.adapters = AdaptedModel(model, by_tile=self.is_deterministic)
        self._model = model
        self._base = base_of(model)
        self.attention_specs = {i: spec for i, spec in specs.items() if isinstance(spec, LayerSpec)}
        step_kind.check(self.attention_specs, dtype=self.dtype)
        self._counts_on = _counts_on_from_cache(text_config)
        self._workspace = Workspace()
        self.allocate_states(0)

    @property
    def has_recurrent_state(self) -> bool:
        """True if a sequence can continue only from its last position: blocks shared with others have no state for
        it."""
        return bool(self.state_specs)

    @property
    def num_layer_parameters(self) -> int:
        """The parameters that each token of a step is computed with: all but the embedding's and the output layer's."""
        return sum(count_layer_weights(self._model))

    def make_pool(
        self,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype | None = None,
        allocate: Allocate | None = None,
    ) -> KVPool:
        """Make a pool for the model, on its device; dtype None: the model's. Takes and raises what KVPool does."""
        dtype = dtype or self.dtype
        return KVPool(
            self.specs,
            scales=self.kv_scales if dtype == torch.float8_e4m3fn else None,
            groups=self.layer_groups,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype,
            device=self.device,
            allocate=allocate,
        )

    def checkpoint_kv_scales(self) -> Mapping[tuple[int, str], Tensor]:
        """Return the scales of keys and values that the checkpoint has; see find_kv_scales()."""
        return find_kv_scales(self._model)

    def describe_attention(self) -> str:
        """The attention kernels, for people."""
        return self.step_kind.describe(self.attention_specs)

    def note_attention(self, *, is_chosen: bool = False) -> None:
        """Note the mode of attention. On a GPU each layer should have its kernel, unless its form was chosen."""
        how = self.describe_attention()
        has_kernels = self.step_kind.reads_lengths_on_device(self.attention_specs)
        is_fast = is_chosen or self.device.type != "cuda" or has_kernels
        self.modes.note(Part.ATTENTION, how, degraded="" if is_fast else "not all layers have a kernel for it")

    def allocate_states(self, max_num_seqs: int) -> None:
        """Make room for the states of so many rows of a sequence table; none of them holds anything then."""
        self.states = StateSlots(self.state_specs, max_num_seqs=max_num_seqs, device=self.device)

    def forward(self, batch: StepBatch, pool: KVPool) -> Tensor:
        """Run one step: write the batch's keys and values to the pool, return logits of its logit_indices: of each
        sequence's last token, in a step without drafts.

        Returns [L, vocab_size] float32, on the model's device, not normalised. Cost: one forward of the model over T
        packed tokens; the output layer runs on L of them. No sync, except in models that make one.
        """
        with torch.inference_mode():
            return self.forward_unconverted(batch, pool).float()

    def forward_unconverted(self, batch: StepBatch, pool: KVPool) -> Tensor:
        """Return the logits of forward() in the dtype in which the model's output layer gives them."""
        with torch.inference_mode(), self.adapters.routed(batch), attention_step(self.attention_step(batch, pool)):
            output = self._model(**self._arguments(batch), logits_to_keep=batch.logit_indices)
            logits: Tensor = output.logits[0]
            return logits

    def find_adapter_disagreement(
        self, identity: bytes, forward: Callable[[StepBatch, KVPool], Tensor], *, run: RunsForward = run_at_once
    ) -> Disagreement | None:
        """find_disagreement() with an adapter that is in the layers, for all tokens.

        run runs each forward of the comparison, of some ten tokens.
        """

        def adapted_forward(batch: StepBatch, pool: KVPool) -> Tensor:
            adapters = [self.adapters.numbers[identity]] * batch.num_seqs
            return run(lambda: forward(self.adapters.assign(batch, adapters), pool))

        def with_adapter(reference: Reference) -> Reference:
            def adapted(token_ids: Tensor) -> Tensor:
                with self.adapters.everywhere(identity):
                    return reference(token_ids)

            return lambda token_ids: run(lambda: adapted(token_ids))

        return self.find_disagreement(adapted_forward, wrap_reference=with_adapter)

    def make_adapter_slots(self, bounds: AdapterBounds) -> AdapterBounds:
        """Take memory for adapters, to be used by kernels; return the bounds that it has room for.

        Steps with a random adapter are compared with the model's own attention. Raises UnsupportedModel if they differ,
        ValueError if there is too little memory. Call it before anything is captured.
        """
        from quire.worker.adapters.slotted_model import SlottedModel  # it imports Triton

        self.adapters = slotted = SlottedModel(self._model, bounds, fused_projections(self._model))
        if (disagreement := self.find_replay_disagreement(self.forward)) is not None:
            raise UnsupportedModel(self.architecture, f"with an adapter, {disagreement}")
        return slotted.bounds

    def find_replay_disagreement(self, forward: Callable[[StepBatch, KVPool], Tensor]) -> Disagreement | None:
        """find_disagreement(); in a model with slots for adapters, again with an adapter for all tokens."""
        disagreement = self.find_disagreement(forward)
        if disagreement is not None:
            return disagreement
        with self.adapters.trial() as identity:
            return None if identity is None else self.find_adapter_disagreement(identity, forward)

    def attention_step(self, batch: StepBatch, pool: KVPool) -> AttentionStep:
        """Return the attention of one step."""
        return self.step_kind(batch, pool, specs=self.attention_specs, workspace=self._workspace)

    def forward_base(self, batch: StepBatch, step: AttentionStep) -> Any:
        """Run the model below the output layer, with this attention; return its ModelOutput.

        Its last_hidden_state is [1, T, hidden size]. Reads input_ids, positions and slot_mapping of the batch.
        """
        with torch.inference_mode(), self.adapters.routed(batch), attention_step(step):
            return self._base(**self._arguments(batch))

    def forward_head(self, batch: StepBatch, output: Any) -> Tensor:
        """Return logits as forward(), of what forward_base() gave for the batch. Cost: the output layer on L tokens."""
        with torch.inference_mode(), answering(self._base, output):
            logits: Tensor = self._model(**self._arguments(batch), logits_to_keep=batch.logit_indices).logits[0].float()
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

    def find_disagreement(
        self,
        forward: Callable[[StepBatch, KVPool], Tensor],
        *,
        wrap_reference: Callable[[Reference], Reference] = lambda reference: reference,
    ) -> Disagreement | None:
        """Compare forward(batch, pool) -> [B, vocab_size] with the model's own attention; see
        quire.worker.model.self_check.

        wrap_reference returns a function that is called in place of the model with its own attention. Raises the
        exceptions of both.
        """
        own_attention = eager_reference(self._model)
        implementation = self._model.config._attn_implementation

        def reference(token_ids: Tensor) -> Tensor:
            self._model.set_attn_implementation("eager")
            try:
                with dequantizing():
                    return own_attention(token_ids)
            finally:
                self._model.set_attn_implementation(implementation)

        def rounded_reference(token_ids: Tensor) -> Tensor:
            with rounded_otherwise(self._model):
                return reference(token_ids)

        return find_disagreement(
            forward,
            wrap_reference(reference),
            rounded_reference=wrap_reference(rounded_reference),
            specs=self.specs,
            groups=self.layer_groups,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            dtype=self.dtype,
            rounds_inputs=any(linear.inputs.dtype for _, linear in quantized_linears(self._model)),
            device=self.device,
            min_block_size=self.min_block_size,
        )


def _counts_on_from_cache(text_config: Any) -> bool:
    """Llama 4 scales queries by the index in the batch after the cached tokens, and not by position_ids."""
    return bool(getattr(text_config, "attn_temperature_tuning", False))
