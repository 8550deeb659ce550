"""Trials: compare a replacement's results with those of a module's own forward.

Both get the same random rows. Attention itself is not run: its calls are recorded and get fixed answers, so that
queries, keys and values can be compared, and the use of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from quire.worker.attention.torch_attention import AttentionStep, attention_step
from quire.worker.device.rounding import TOLERANCE
from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.layer_spec import LayerSpec
from quire.worker.memory.sequence_table import SequenceTable
from quire.worker.memory.step_batch import StepBatch, build_step_batch
from quire.worker.unsupported_model import UnsupportedModel

TRIAL_NAME = "quire_fusion_trial"

# Tokens of a trial: as many as a block of the pool has slots, which is one that kernels take.
TRIAL_TOKENS = 16

# The factor of every other row of a trial, for modules that clamp.
LARGE = 16.0

# transformers computes angles in float32, the tables are made in float64: they differ by so much per position.
ANGLE_ERROR = 2.0**-22

COMPARED = ("queries", "keys", "values", "results")


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A call of a module, and its result."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Any

    @property
    def hidden_states(self) -> Any:
        return self.arguments[0] if self.arguments else self.keywords.get("hidden_states")

    def repeat(self, module: nn.Module, rows: Tensor) -> Any:
        """Call the module once more, with other hidden states."""
        with torch.inference_mode():
            if self.arguments:
                return module(rows, *self.arguments[1:], **self.keywords)
            return module(**(self.keywords | {"hidden_states": rows}))


@dataclass(slots=True)
class Recording:
    """One forward of the unchanged model: the last call of each module, and the callers of attention, by layer."""

    calls: dict[nn.Module, ModuleCall] = field(default_factory=dict)
    attention: dict[int, nn.Module] = field(default_factory=dict)

    def readers(self, tensor: Tensor) -> list[nn.Module]:
        """Modules that were given this tensor as hidden states, without what lies within them."""
        found = [module for module, call in self.calls.items() if call.hidden_states is tensor]
        inner = {each for module in found for each in module.modules() if each is not module}
        return [module for module in found if module not in inner]


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A call of attention: q [T, Hq, D], k and v [T, H, D], and the rest."""

    q: Tensor
    k: Tensor
    v: Tensor
    scaling: float | None
    softcap: float | None
    sinks: Tensor | None


class FusionTrial:
    """The common state of the trials of one model.

    batch   TRIAL_TOKENS tokens of a sequence, at early positions and a few late ones
    asked   the calls of attention, in order; modules: their callers
    """

    def __init__(self, model: Any, specs: Mapping[int, LayerSpec], max_model_len: int) -> None:
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.asked: list[AttentionCall] = []
        self.modules: list[nn.Module] = []
        self._specs = specs
        self._generator = torch.Generator().manual_seed(0)
        self.batch = _trial_batch(self.device, max_model_len)

    def rows(self, width: int) -> Tensor:
        """Random hidden states [1, T, width], every other row large enough to be clamped where something is."""
        scale = torch.tensor([1.0, LARGE]).repeat(TRIAL_TOKENS // 2)[:, None]
        rows = torch.randn(TRIAL_TOKENS, width, generator=self._generator) * scale
        return rows.to(self.dtype).to(self.device)[None]

    def answer(self, spec: LayerSpec) -> Tensor:
        """Attention's result in a layer, [T, Hq, Dv]."""
        generator = torch.Generator().manual_seed(spec.layer_idx)
        shape = (TRIAL_TOKENS, spec.num_query_heads, spec.v_head_dim)
        return torch.randn(shape, generator=generator).to(self.dtype).to(self.device)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """The replacement of attention during a trial."""
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        self.asked.append(AttentionCall(q, k, v, scaling, softcap, s_aux))
        self.modules.append(module)
        layer_idx: Any = module.layer_idx
        return self.answer(self._specs[layer_idx])[None], None

    def run(self, forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """A stand-in's forward, or a module's with stand-ins in it."""
        with torch.inference_mode(), attention_step(_TrialStep(self, self._specs)):
            return forward(*arguments, **keywords)

    def ask(self, module: nn.Module, rows: Tensor, call: ModuleCall) -> tuple[AttentionCall, Tensor]:
        """An attention module's call of attention for rows, and its use of the answer."""
        self.asked.clear()
        result = call.repeat(module, rows)[0]
        return self.asked[-1], result

    def ask_stand_in(self, stand_in: Callable[..., Any], rows: Tensor) -> tuple[AttentionCall, Tensor]:
        self.asked.clear()
        result = self.run(stand_in, rows)[0]
        return self.asked[-1], result

    def first_difference(
        self, actual: tuple[AttentionCall, Tensor], expected: tuple[AttentionCall, Tensor]
    ) -> str | None:
        """The first of COMPARED that differs."""
        pairs = [(getattr(actual[0], name), getattr(expected[0], name)) for name in ("q", "k", "v")]
        pairs.append((actual[1], expected[1]))
        return next((part for part, pair in zip(COMPARED, pairs, strict=True) if self.differ(*pair)), None)

    def differ(self, actual: Any, expected: Any, *, median: bool = False) -> bool:
        """True if rows [.., T, ..] differ by more than rounding and, at late positions, angles."""
        if not isinstance(actual, Tensor) or not isinstance(expected, Tensor) or actual.shape != expected.shape:
            return True
        rows = [x.float().reshape(TRIAL_TOKENS, -1) for x in (actual, expected)]
        error = (rows[0] - rows[1]).abs().amax(1) / rows[1].abs().amax(1).clamp_min(1e-20)
        allowed = TOLERANCE[self.dtype] + self.batch.positions * ANGLE_ERROR
        fits = error <= allowed
        if median and self.dtype != torch.float32:
            return int(fits.sum()) <= TRIAL_TOKENS // 2
        return not bool(fits.all())


class _TrialStep(AttentionStep):
    def __init__(self, trial: FusionTrial, specs: Mapping[int, LayerSpec]) -> None:
        pool = KVPool(specs, num_blocks=2, block_size=TRIAL_TOKENS, dtype=trial.dtype, device=trial.device)
        super().__init__(trial.batch, pool, specs=specs)
        self._trial = trial

    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        *,
        scaling: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        new_kv: tuple[Tensor, Tensor] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        k, v = self.pool.k(layer_idx)[1], self.pool.v(layer_idx)[1]
        self._trial.asked.append(AttentionCall(q, k, v, scaling, softcap, sinks))
        return self._trial.answer(self.specs[layer_idx])


def _trial_batch(device: torch.device, max_model_len: int) -> StepBatch:
    """Block 1 in full, at early positions and a few late ones."""
    table = SequenceTable(max_num_seqs=1, max_blocks_per_seq=1, device=device)
    row = table.add()
    table.stage_blocks(row, 0, [1])
    batch = build_step_batch(
        table,
        block_size=TRIAL_TOKENS,
        rows=[row],
        starts=[0],
        counts=[TRIAL_TOKENS],
        token_ids=[list(range(TRIAL_TOKENS))],
    )
    late = [max_model_len - 1, max_model_len // 2, max_model_len // 7, max_model_len // 3]
    positions = [*range(TRIAL_TOKENS - len(late)), *late]
    return replace(batch, positions=torch.tensor([p % max_model_len for p in positions], device=device))


@contextmanager
def own_attention_replaced(model: Any, trial: FusionTrial) -> Iterator[None]:
    """transformers calls the trial instead of attention."""
    AttentionInterface.register(TRIAL_NAME, trial.attend)
    previous = model.config._attn_implementation
    model.set_attn_implementation(TRIAL_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)


def record(model: Any, trial: FusionTrial) -> Recording:
    """Run and record one forward of the model as it is. Raises UnsupportedModel if it fails."""
    recording = Recording()

    def keep(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        recording.calls[module] = ModuleCall(arguments, keywords, output)

    hooks = [module.register_forward_hook(keep, with_kwargs=True) for module in model.modules()]
    try:
        with torch.inference_mode():
            model(input_ids=trial.batch.input_ids[None], position_ids=trial.batch.positions[None], use_cache=False)
    except Exception as error:
        reason = f"a forward of {TRIAL_TOKENS} tokens failed with {type(error).__name__}: {error}"
        raise UnsupportedModel(type(model).__name__, reason) from error
    finally:
        for hook in hooks:
            hook.remove()
    for module in trial.modules:
        layer_idx: Any = module.layer_idx
        recording.attention[layer_idx] = module
    return recording
