"""Replacements of the forward of transformers modules while a step runs: fewer launches, the same numbers.

A replacement is set as `module.forward` on the instance. The module, its name and its parameters stay: a merged
projection replaces them by views of itself. Outside of a step the replacement calls the module's own forward, so the
self-check compares with transformers' own model.

Launches of a Llama layer, one a line, attention apart. Behind them those where products of few rows are kernels of our
own, with the norm in front and the residual behind (quire.worker.fusion.products):

    add_rmsnorm     the last layer's MLP result to the residual, and the norm of the sum
    linear          merged QKV                                                              norm, merged QKV
    qkv_prologue    qk-norm, rope, keys and values to the pool                              the same
    linear          output projection                                                       and the residual
    add_rmsnorm     attention's result to the residual, and the norm of the sum
    linear          merged gate and up                                                      norm, gate and up, SiLU
    silu_mul        SiLU or GELU of the gate, times up
    linear          down projection; added by the next norm                                 and the residual

Where products are in float8, add_rmsnorm and silu_mul write their results so, with a scale for each row; only the
result of attention is rounded in a launch of its own.

So between layers there may be two tensors where transformers has one: see ResidualStream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from quire.worker.attention.torch_attention import running_step
from quire.worker.device.profiling import phase
from quire.worker.fusion.activations import Activation
from quire.worker.fusion.projection import Projection, Rows
from quire.worker.fusion.steps import FusedSteps, Norm, Rope


class ResidualStream:
    """A layer's output for the next norm: its last result, and the residual that it was not added to yet.

    The model passes on the first as the hidden states. A module that gets exactly this tensor takes the residual with
    it; any other tensor is a residual by itself.
    """

    def __init__(self) -> None:
        self._left: tuple[Tensor, Tensor] | None = None

    def leave(self, result: Tensor, residual: Tensor) -> Tensor:
        self._left = result, residual
        return result

    def take(self, hidden_states: Tensor) -> Tensor | None:
        """The residual to add these hidden states to, or None if they are one."""
        if self._left is None or self._left[0] is not hidden_states:
            return None
        residual = self._left[1]
        self._left = None
        return residual


class FusedNorm:
    """An RMSNorm of any rows; the one after the last layer adds that layer's result."""

    def __init__(self, module: nn.Module, norm: Norm, *, stream: ResidualStream, steps: FusedSteps) -> None:
        self.norm = norm
        self._own = module.forward
        self._stream = stream
        self._steps = steps

    def __call__(self, hidden_states: Tensor) -> Tensor:
        if running_step() is None:
            return self._own(hidden_states)  # type: ignore[no-any-return]
        residual = self._stream.take(hidden_states)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        if residual is not None:
            residual = residual.view(rows.shape)
        return self._steps.add_rmsnorm(rows, self.norm, residual).view(hidden_states.shape)


@dataclass(frozen=True, slots=True)
class MLPParts:
    """The parts of an MLP: `up` is gate and up, merged, or the first projection of one without a gate."""

    up: Projection
    down: Projection
    activation: Activation
    is_gated: bool


class FusedMLP:
    """down(act(gate(x)) * up(x)), or down(act(up(x)))."""

    def __init__(self, module: nn.Module, parts: MLPParts, *, steps: FusedSteps) -> None:
        self._own = module.forward
        self._parts = parts
        self._steps = steps

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Its products."""
        return self._parts.up, self._parts.down

    def __call__(self, hidden_states: Tensor) -> Tensor:
        if running_step() is None:
            return self._own(hidden_states)  # type: ignore[no-any-return]
        result = self.apply(_rows(hidden_states), None)
        return result.view(*hidden_states.shape[:-1], -1)

    def apply(self, rows: Rows, norm: Norm | None) -> Tensor:
        """The result [T, C] of rows [T, C], or of their norm."""
        return self._steps.linear(self._middle(rows, norm), self._parts.down)

    def add_to(self, residual: Tensor, rows: Rows, norm: Norm | None) -> Tensor | None:
        """Add apply() to the residual [T, C], in place, and return None; or return it, for the next norm to add."""
        return self._steps.add_linear(residual, self._middle(rows, norm), self._parts.down)

    def _middle(self, rows: Rows, norm: Norm | None) -> Rows:
        parts = self._parts
        if parts.is_gated:
            return self._steps.gated(rows, parts.up, parts.down, norm, parts.activation)
        return self._steps.linear(rows, parts.up, norm, parts.activation)


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """The parts of an attention module. norms are those of queries and of keys, per head."""

    layer_idx: int
    qkv: Projection
    output: Projection
    norms: tuple[Norm, Norm] | None
    rope: Rope | None
    scaling: float
    softcap: float | None
    sinks: Tensor | None


class FusedAttention:
    """A fused attention module: merged projection, prologue, attention over the pool, output projection."""

    def __init__(self, module: nn.Module, parts: AttentionParts, *, steps: FusedSteps) -> None:
        self._own = module.forward
        self._parts = parts
        self._steps = steps

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Its products."""
        return self._parts.qkv, self._parts.output

    def __call__(self, hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Any:
        if running_step() is None:
            return self._own(hidden_states, *arguments, **keywords)
        return self.apply(_rows(hidden_states), None).view(*hidden_states.shape[:-1], -1), None

    def apply(self, rows: Rows, norm: Norm | None) -> Tensor:
        """The result [T, C] of rows [T, C], or of their norm; within a step."""
        with phase(f"attention {self._parts.layer_idx}"):
            return self._steps.linear(self._attend(rows, norm), self._parts.output)

    def add_to(self, residual: Tensor, rows: Rows, norm: Norm | None) -> Tensor | None:
        """Add apply() to the residual [T, C], in place, and return None; or return it, for the next norm to add."""
        with phase(f"attention {self._parts.layer_idx}"):
            return self._steps.add_linear(residual, self._attend(rows, norm), self._parts.output)

    def _attend(self, rows: Rows, norm: Norm | None) -> Tensor:
        step = running_step()
        if step is None:
            raise RuntimeError("fused attention runs within a step alone")
        parts, pool = self._parts, step.pool
        q = self._steps.qkv_prologue(
            self._steps.linear(rows, parts.qkv, norm),
            pool.k(parts.layer_idx),
            pool.v(parts.layer_idx),
            slot_mapping=step.slot_mapping(parts.layer_idx),
            positions=step.batch.positions,
            rope=parts.rope,
            norms=parts.norms,
            kv_scales=pool.scales(parts.layer_idx),
        )
        result = step.attend(parts.layer_idx, q, scaling=parts.scaling, softcap=parts.softcap, sinks=parts.sinks)
        return result.flatten(1)


@dataclass(frozen=True, slots=True)
class Half:
    """Attention or MLP of a layer, with the norms before and after it, if there are any."""

    block: nn.Module
    before: Norm | None
    after: Norm | None


class FusedLayer:
    """A decoder layer of two halves, each x + after(block(before(x))).

    `leaves` says that the next norm adds this layer's last result: FusedLayer or FusedNorm, and nothing in between.
    The hidden states of the first layer are changed in place.
    """

    def __init__(
        self, module: nn.Module, attention: Half, mlp: Half, *, stream: ResidualStream, steps: FusedSteps
    ) -> None:
        self.leaves = False
        self._own = module.forward
        self._attention = attention
        self._mlp = mlp
        self._stream = stream
        self._steps = steps

    def __call__(self, hidden_states: Tensor, **keywords: Any) -> Any:
        if running_step() is None:
            return self._own(hidden_states, **keywords)
        residual = self._stream.take(hidden_states)
        left: Tensor | None = hidden_states
        if residual is None:
            residual, left = hidden_states, None

        def attend(x: Tensor) -> Any:
            return self._attention.block(hidden_states=x, **keywords)

        left = self._run_half(self._attention, residual, left, attend)
        left = self._run_half(self._mlp, residual, left, self._mlp.block)
        if left is None:
            return residual
        return self._stream.leave(left, residual) if self.leaves else residual.add_(left)

    def _run_half(
        self, half: Half, residual: Tensor, left: Tensor | None, call: Callable[[Tensor], Any]
    ) -> Tensor | None:
        """Add `left`, the result before this half, to the residual, and run the half on it; `call` if it is not fused.

        Returns the half's own result, in the residual's shape, or None if it is in the residual already.
        """
        fused = vars(half.block).get("forward")
        if not isinstance(fused, (FusedAttention, FusedMLP)):
            result = call(self._enter(half, left, residual))
            if isinstance(result, tuple):  # attention weights; experts, and how tokens were sent to them
                result = result[0]
            return self._leave(half, result.view(residual.shape))
        norm = half.before if left is None else None  # in front of the product, where nothing has to be added
        if half.before is not None and left is not None:
            product = fused.projections[0]
            rows = self._steps.input_of(product, _rows(left), half.before, _rows(residual))
        else:
            rows = _rows(residual if norm is not None else self._enter(half, left, residual))
        if half.after is None:
            own = fused.add_to(_rows(residual), rows, norm)
        else:
            own = fused.apply(rows, norm)
        return None if own is None else self._leave(half, own.view(residual.shape))

    def _enter(self, half: Half, result: Tensor | None, residual: Tensor) -> Tensor:
        """Add the result before this half, if there is one, to the residual; return the half's input."""
        if half.before is not None:
            return self._norm(half.before, residual) if result is None else self._norm(half.before, result, residual)
        return residual if result is None else residual.add_(result)

    def _leave(self, half: Half, result: Tensor) -> Tensor:
        return result if half.after is None else self._norm(half.after, result)

    def _norm(self, norm: Norm, x: Tensor, residual: Tensor | None = None) -> Tensor:
        width = x.shape[-1]
        rows = None if residual is None else residual.view(-1, width)
        return self._steps.add_rmsnorm(x.view(-1, width), norm, rows).view(x.shape)


class SkippedRotary:
    """No cosines and sines: every attention reads its own table."""

    def __init__(self, module: nn.Module) -> None:
        self._own = module.forward

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._own(*arguments, **keywords) if running_step() is None else (None, None)


def fused_projections(model: nn.Module) -> Iterator[Projection]:
    """Yield the products of all stand-ins."""
    for module in model.modules():
        fused = vars(module).get("forward")
        if isinstance(fused, (FusedAttention, FusedMLP)):
            yield from fused.projections


def _rows(hidden_states: Tensor) -> Tensor:
    """[T, C], a view: what is added to it is added to the hidden states."""
    return hidden_states.view(-1, hidden_states.shape[-1])


STAND_INS = (FusedNorm, FusedMLP, FusedAttention, FusedLayer, SkippedRotary)


def swap(module: nn.Module, stand_in: FusedNorm | FusedMLP | FusedAttention | FusedLayer | SkippedRotary) -> None:
    """Replace the module's forward by the stand-in."""
    module.forward = stand_in


def has_own_forward(module: nn.Module) -> bool:
    """True if the module's forward is that of its class, and no hook changes its inputs or outputs."""
    return "forward" not in vars(module) and not module._forward_hooks and not module._forward_pre_hooks


def swap_back(model: nn.Module) -> None:
    """Take every stand-in away again. Merged projections stay: their parts are the modules' parameters."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), STAND_INS):
            del module.forward
