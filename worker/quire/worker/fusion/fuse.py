"""Finds the modules of a transformers model that can be fused, and fuses them.

There is no list of models. A module's parts suggest its function, and a trial decides (quire.worker.fusion.trial):
the replacement must give the results of the module's own forward.

    norm        one weight [C] and an eps; as it is, or 1 + w
    mlp         gate_proj, up_proj, down_proj or gate_up_proj, down_proj, or two projections without a gate; the
                activation is SiLU or GELU, exact or by tanh
    attention   q_proj, k_proj, v_proj or qkv_proj, and o_proj; q_norm and k_norm per head, or none; any of the model's
                ropes in either order of pairs, or none
    layer       attention and an MLP of any kind, each with an RMSNorm before it, after it, or both

Other modules stay unchanged, and the report has the reason. Interactions of modules (a layer that is called twice,
hidden states changed between layers) are checked by the self-check of the whole model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quire.kernels.rope_table import make_rope_table
from quire.worker.fusion.activations import ACTIVATIONS, Activation
from quire.worker.fusion.modules import (
    AttentionParts,
    FusedAttention,
    FusedLayer,
    FusedMLP,
    FusedNorm,
    Half,
    MLPParts,
    ResidualStream,
    SkippedRotary,
    has_own_forward,
    swap,
)
from quire.worker.fusion.projection import Linear, Projection
from quire.worker.fusion.steps import FusedSteps, Norm, Rope
from quire.worker.fusion.trial import COMPARED, LARGE, FusionTrial, Recording, own_attention_replaced, record
from quire.worker.memory.layer_spec import LayerSpec
from quire.worker.quantization.quantized_linear import QuantizedLinear
from quire.worker.quantization.scaled_linear import ScaledLinear

# Norms of a layer, by name: before and after attention, before and after the MLP.
LAYOUTS: Mapping[str, tuple[str | None, str | None, str | None, str | None]] = {
    "pre-norm": ("input_layernorm", None, "post_attention_layernorm", None),
    "post-norm": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "Gemma's": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "GLM's": ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
}
# Projections of an MLP, by name; the last one is the way back.
MLP_PROJECTIONS = (
    ("gate_up_proj", "down_proj"),
    ("gate_proj", "up_proj", "down_proj"),
    ("up_proj", "down_proj"),
    ("fc1", "fc2"),
    ("c_fc", "c_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
)
MLP_NAMES = ("mlp", "feed_forward", "block_sparse_moe")
_TRIAL_FAILED = "its trial failed with"


class Unmatched(Exception):
    """A module is left as it is; the message says why."""


@dataclass(frozen=True, slots=True)
class FusionReport:
    """The fused modules: per kind how many of how many, and per class and reason how many were not."""

    steps: str
    swapped: Mapping[str, tuple[int, int]]
    unmatched: Mapping[tuple[str, str], int]

    @property
    def failures(self) -> Sequence[str]:
        """The reasons of modules with a trial that broke off, which does not follow from their kind."""
        return [reason for _, reason in self.unmatched if reason.startswith(_TRIAL_FAILED)]

    def __str__(self) -> str:
        counts = ", ".join(f"{kind} {done} of {total}" for kind, (done, total) in self.swapped.items())
        reasons = "; ".join(f"{count} {name}: {reason}" for (name, reason), count in self.unmatched.items())
        is_any = any(done for done, _ in self.swapped.values())
        fused = f"fused ({self.steps}): {counts}" if is_any else "fused: nothing"
        return f"{fused}; not fused: {reasons}" if reasons else fused


def fuse_model(model: Any, specs: Mapping[int, LayerSpec], *, max_model_len: int, steps: FusedSteps) -> FusionReport:
    """Fuse the modules that can be fused, in place; swap_back() undoes it. A second call finds nothing to fuse.

    Numbers stay within rounding: a fused and an unfused worker of one checkpoint are equally close to the exact result,
    and their fingerprints, which are of parameters, are the same. Raises UnsupportedModel if the model does not run a
    few tokens with attention left out. Cost: that forward, two of each module that is tried, and a float32 table
    [max_model_len, R] per rope; weights are not held twice.
    """
    return _Fusion(model, specs, max_model_len=max_model_len, steps=steps).run()


def unfused(model: Any, reason: str) -> FusionReport:
    """The report of a model that is left as it is as a whole."""
    return FusionReport("", {}, {(type(model).__name__, reason): 1})


class _Fusion:
    """One call of fuse_model()."""

    def __init__(self, model: Any, specs: Mapping[int, LayerSpec], *, max_model_len: int, steps: FusedSteps) -> None:
        self._model = model
        self._specs = specs
        self._max_model_len = max_model_len
        self._steps = steps
        self._stream = ResidualStream()
        self._trial = FusionTrial(model, specs, max_model_len)
        self._tables: dict[tuple[nn.Module, str], Tensor] = {}
        self._norms: dict[nn.Module, Norm] = {}
        self._swapped: Counter[str] = Counter()
        self._total: Counter[str] = Counter()
        self._unmatched: Counter[tuple[str, str]] = Counter()

    def run(self) -> FusionReport:
        with own_attention_replaced(self._model, self._trial):
            recording = record(self._model, self._trial)
            self._swap_norms()
            attention = list(recording.attention.values())
            layers = [_parent(self._model, module) for module in attention]
            for layer_idx, module in recording.attention.items():
                self._try("attention", module, partial(self._attention, layer_idx, recording))
            for module in self._mlps(layers):
                self._try("mlp", module, self._mlp)
            for layer, module in zip(layers, attention, strict=True):
                self._try("layer", layer, partial(self._layer, module, recording))
            self._link(recording, layers)
            if self._swapped["attention"] == len(self._specs):
                self._skip_rotary()
        counts = {kind: (self._swapped[kind], total) for kind, total in self._total.items()}
        return FusionReport(self._steps.name, counts, dict(self._unmatched))

    def _try(self, kind: str, module: nn.Module, match: Callable[[Any], Any]) -> None:
        """Swap the module if match() finds its stand-in."""
        self._total[kind] += 1
        try:
            if not has_own_forward(module):
                raise Unmatched("its forward is not that of its class")
            if any(isinstance(each, QuantizedLinear) and not self._takes(each) for each in module.children()):
                raise Unmatched("its weights are quantized")
            swap(module, match(module))
            self._swapped[kind] += 1
            return
        except Unmatched as error:
            reason = str(error)
        except Exception as error:
            reason = f"{_TRIAL_FAILED} {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        self._unmatched[type(module).__name__, reason] += 1

    def _swap_norms(self) -> None:
        for module in list(self._model.modules()):
            eps = _eps(module)
            if eps is not None:
                self._try("norm", module, partial(self._norm, eps))

    def _norm(self, eps: float, module: Any) -> FusedNorm:
        rows = self._trial.rows(module.weight.shape[0])[0]
        rows[1::2] *= eps**0.5 / LARGE  # so small that eps is seen
        with torch.inference_mode():
            expected = module(rows)
        for weight in (module.weight, 1.0 + module.weight.float()):
            norm = Norm(weight.detach(), eps)
            if not self._trial.differ(self._steps.add_rmsnorm(rows, norm), expected):
                self._norms[module] = norm
                return FusedNorm(module, norm, stream=self._stream, steps=self._steps)
        raise Unmatched("it is no RMSNorm")

    def _mlps(self, layers: Sequence[nn.Module]) -> list[nn.Module]:
        """Candidates for a gated MLP, anywhere, and the modules in a layer's place for one."""
        found = [
            module for module in self._model.modules() if isinstance(getattr(module, "down_proj", None), nn.Module)
        ]
        return list(dict.fromkeys([*found, *(mlp for layer in layers if (mlp := _mlp_of(layer)) is not None)]))

    def _mlp(self, module: Any) -> FusedMLP:
        names = next((names for names in MLP_PROJECTIONS if self._linears(module, names)), None)
        if names is None:
            raise Unmatched("it has no gate_proj, up_proj and down_proj, and no two projections without a gate")
        activation = _activation(module)
        if activation is None:
            raise Unmatched(f"its activation is none of {', '.join(ACTIVATIONS)}")
        *up, down = self._linears(module, names)
        parts = MLPParts(Projection(up), Projection([down]), activation, is_gated=names[0].startswith("gate"))
        rows = self._trial.rows(parts.up.weight.shape[1])
        with torch.inference_mode():
            expected = module(rows)
        fused = FusedMLP(module, parts, steps=self._steps)
        if self._trial.differ(self._trial.run(fused, rows), expected):
            raise Unmatched(f"its result is another than {activation}{'(gate) * up' if parts.is_gated else ''} gives")
        return fused

    def _attention(self, layer_idx: int, recording: Recording, module: Any) -> FusedAttention:
        spec = self._specs[layer_idx]
        qkv = self._linears(module, ("qkv_proj",)) or self._linears(module, ("q_proj", "k_proj", "v_proj"))
        output = self._linears(module, ("o_proj",))
        if not qkv or not output:
            raise Unmatched("it has no q_proj, k_proj, v_proj and o_proj")
        if spec.k_head_dim != spec.v_head_dim:
            raise Unmatched(f"its keys have {spec.k_head_dim} dims, its values {spec.v_head_dim}")
        if getattr(module, "attn_temperature_tuning", False):
            raise Unmatched("it scales queries by position")
        norms = self._head_norms(module, spec)
        merged = Projection(qkv)
        rows = self._trial.rows(merged.weight.shape[1])
        expected = self._trial.ask(module, rows, recording.calls[module])
        asked = expected[0]
        parts = AttentionParts(
            layer_idx=layer_idx,
            qkv=merged,
            output=Projection(output),
            norms=norms,
            rope=None,
            scaling=spec.scaling if asked.scaling is None else asked.scaling,
            softcap=asked.softcap,
            sinks=None if asked.sinks is None else asked.sinks.detach().contiguous(),
        )
        reasons = []
        for rope in self._rope_candidates():
            fused = FusedAttention(module, replace(parts, rope=rope), steps=self._steps)
            different = self._trial.first_difference(self._trial.ask_stand_in(fused, rows), expected)
            if different is None:
                return fused
            reasons.append(different)
        raise Unmatched(f"its {max(reasons, key=COMPARED.index)} are other than projections, norms and a rope give")

    def _linears(self, module: nn.Module, names: Sequence[str]) -> list[Linear]:
        """The children of these names, if all are there and are linear layers: plain, or all quantized in one way."""
        found = [getattr(module, name, None) for name in names]
        plain: list[Linear] = [each for each in found if type(each) is nn.Linear or type(each) is Conv1D]
        plain = [each for each in plain if has_own_forward(each)]
        quantized = [each for each in found if isinstance(each, QuantizedLinear) and self._takes(each)]
        if len({each.product is None for each in quantized}) > 1:
            return []
        kinds: tuple[Sequence[Linear], ...] = (plain, quantized)
        return next((list(each) for each in kinds if len(each) == len(names)), [])

    def _takes(self, layer: QuantizedLinear) -> bool:
        """True if the steps run its product: by its packed weight, or in float8 with rows that kernels write."""
        if not has_own_forward(layer):
            return False
        if isinstance(layer, ScaledLinear) and layer.multiplies_float8:
            return layer.in_features <= self._steps.max_float8_columns
        return layer.product is not None and self._steps.takes_packed

    def _head_norms(self, module: Any, spec: LayerSpec) -> tuple[Norm, Norm] | None:
        modules = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
        if modules == [None, None]:
            return None
        norms = [self._norms[each] for each in modules if each in self._norms]
        if [norm.weight.shape[0] for norm in norms] != [spec.k_head_dim] * 2:
            raise Unmatched("its q_norm and k_norm are no RMSNorms of each head")
        if norms[0].eps != norms[1].eps:
            raise Unmatched("its q_norm and k_norm have different eps")
        return norms[0], norms[1]

    def _rope_candidates(self) -> Iterator[Rope | None]:
        """Each rope of the model, pairs in either order; at last none."""
        for module in self._model.modules():
            for name, inv_freq in module.named_buffers(recurse=False):
                if name.endswith("inv_freq") and not name.endswith("original_inv_freq"):
                    prefix = name.removesuffix("inv_freq")
                    yield self._rope(module, prefix, inv_freq, interleaved=False)
                    yield self._rope(module, prefix, inv_freq, interleaved=True)
        yield None

    def _rope(self, module: Any, prefix: str, inv_freq: Tensor, *, interleaved: bool) -> Rope:
        table = self._tables.get((module, prefix))
        if table is None:
            scaling = float(getattr(module, f"{prefix}attention_scaling", 1.0))
            table = make_rope_table(inv_freq, num_positions=self._max_model_len, attention_scaling=scaling)
            self._tables[module, prefix] = table
        return Rope(table, interleaved)

    def _layer(self, attention: nn.Module, recording: Recording, layer: Any) -> FusedLayer:
        mlp = _mlp_of(layer)
        if attention not in list(layer.children()) or mlp is None:
            raise Unmatched("it is not made of attention and an MLP")
        names = {name: self._norms[module] for name, module in layer.named_children() if module in self._norms}
        layout = next((each for each in LAYOUTS.values() if {name for name in each if name} == set(names)), None)
        if layout is None:
            raise Unmatched("its RMSNorms are in no known places" if names else "it has no RMSNorms")
        before_attention, after_attention, before_mlp, after_mlp = (names.get(name or "") for name in layout)
        fused = FusedLayer(
            layer,
            Half(attention, before_attention, after_attention),
            Half(mlp, before_mlp, after_mlp),
            stream=self._stream,
            steps=self._steps,
        )
        call = recording.calls[layer]
        if len(call.arguments) > 1:
            raise Unmatched("it takes more than hidden states by position")
        rows = self._trial.rows(call.hidden_states.shape[-1])
        expected = call.repeat(layer, rows)
        keywords = {name: value for name, value in call.keywords.items() if name != "hidden_states"}
        # Rounding may send a token to another expert, so below float32 the median token counts.
        if self._trial.differ(self._trial.run(fused, rows.clone(), **keywords), expected, median=True):
            raise Unmatched("its result is another than its halves, added up, give")
        return fused

    def _link(self, recording: Recording, layers: Sequence[nn.Module]) -> None:
        """Let a layer leave its last sum to the one stand-in that gets exactly its hidden states."""
        for layer in layers:
            stand_in = _stand_in(layer)
            if isinstance(stand_in, FusedLayer):
                takers = [_stand_in(module) for module in recording.readers(recording.calls[layer].output)]
                stand_in.leaves = len(takers) == 1 and isinstance(takers[0], (FusedLayer, FusedNorm))

    def _skip_rotary(self) -> None:
        for module, _ in self._tables:
            if has_own_forward(module):
                swap(module, SkippedRotary(module))


def _stand_in(module: nn.Module) -> Any:
    return vars(module).get("forward")


def _parent(model: nn.Module, module: nn.Module) -> nn.Module:
    name = next(name for name, each in model.named_modules() if each is module)
    return model.get_submodule(name.rpartition(".")[0])


def _mlp_of(layer: nn.Module) -> nn.Module | None:
    found = (getattr(layer, name, None) for name in MLP_NAMES)
    return next((each for each in found if isinstance(each, nn.Module)), None)


def _eps(module: nn.Module) -> float | None:
    """The eps of a candidate for an RMSNorm: a module of nothing but one weight, with an eps."""
    shapes = {name: parameter.dim() for name, parameter in module.named_parameters()}
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if shapes == {"weight": 1} and isinstance(eps, float) else None


def _activation(module: nn.Module) -> Activation | None:
    """The name of the module's activation, found by its values."""
    named = (getattr(module, name, None) for name in ("act_fn", "activation_fn", "act"))
    own = next((each for each in named if callable(each)), None)
    if own is None:
        return None
    grid = torch.linspace(-8, 8, 33)
    values = own(grid)
    return next((name for name, known in ACTIVATIONS.items() if torch.allclose(values, known(grid), atol=1e-6)), None)
