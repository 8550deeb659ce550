"""Kernels a decode step launches, per layer and besides, with transformers' own modules and with fused ones.

    quire bench kernels launches

Attention over the pool is left out: it is the same for both, a decode kernel. On a GPU torch's profiler
counts; elsewhere this is an estimate from the operations that a step calls: see count_operations(). Besides, the time
of the host for the launch of each kernel: see host_time.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from batches import decode_batch
from host_time import HostTime, measure_host_times
from matplotlib import pyplot
from matplotlib.figure import Figure
from report import Findings, benchmark, plain, table
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.worker.attention.torch_attention import ATTENTION_NAME, AttentionStep, attention_step
from quire.worker.fusion.steps import FusedSteps, KernelSteps, TorchSteps
from quire.worker.memory.kv_pool import KVPool
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.preparing import prepare_model

transformers.logging.set_verbosity_error()

NUM_SEQS, CONTEXT, BLOCK_SIZE, MAX_MODEL_LEN = 4, 20, 16, 64
FEW_LAYERS, MORE_LAYERS = 2, 4
WITH_FUSION = 8
"""Launches of a layer outside of attention, if everything in it is fused."""

ALLOCATING = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::_unsafe_view"}

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Callable[..., Any]] = {
    "Llama": transformers.LlamaConfig,
    "Mistral": transformers.MistralConfig,
    "Phi-3": transformers.Phi3Config,
    "Qwen2": transformers.Qwen2Config,
    "Qwen3": lambda **sizes: transformers.Qwen3Config(head_dim=16, **sizes),
    "Gemma 2": lambda **sizes: transformers.Gemma2Config(head_dim=16, sliding_window=16, **sizes),
    "Gemma 3": lambda num_hidden_layers, **sizes: transformers.Gemma3TextConfig(
        head_dim=16,
        sliding_window=16,
        num_hidden_layers=num_hidden_layers,
        layer_types=["sliding_attention", "full_attention"] * (num_hidden_layers // 2),
        **sizes,
    ),
}
"""The number of launches does not depend on the shapes."""


@dataclass(frozen=True, slots=True)
class Launches:
    """Launches of one decode step: of each layer, and of all else; without attention and without sampling."""

    per_layer: float
    besides: float

    def of_step(self, num_layers: int) -> float:
        return self.per_layer * num_layers + self.besides


@dataclass(frozen=True, slots=True)
class Row:
    """A family with its own modules and fused, and the fusion's report of 4 layers."""

    family: str
    own: Launches
    fused: Launches
    report: str


class WithoutAttention(AttentionStep):
    """Answers with uninitialised memory."""

    def attend(self, layer_idx: int, q: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        return torch.empty_like(q, memory_format=torch.contiguous_format)


class OperationCounter(TorchDispatchMode):
    """Counts operations that launch something on a GPU: all but views and those that only allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._is_within_one = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if not self._is_within_one and not is_view and func._schema.name not in ALLOCATING:
            self.count += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Counts everything within as one launch."""
        self.count += 1
        self._is_within_one = True
        try:
            yield
        finally:
            self._is_within_one = False


class CountedSteps(TorchSteps):
    """The steps of KernelSteps, each as one launch, as with a kernel of quire.kernels."""

    def __init__(self) -> None:
        self.as_one: Callable[[], AbstractContextManager[None]] | None = None
        for name in ("add_rmsnorm", "apply_gate", "qkv_prologue"):
            setattr(self, name, self._counted(getattr(self, name)))

    def _counted(self, step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any, **kwargs: Any) -> Tensor:
            if self.as_one is None:
                return step(*args, **kwargs)
            with self.as_one():
                return step(*args, **kwargs)

        return run


def count_operations(forward: Callable[[], Any], steps: CountedSteps | None) -> int:
    """An estimate of the launches of a forward, from a run on a CPU.

    An operation counts as one launch if it neither returns a view nor only allocates. Not seen: that some are several
    kernels on a GPU (a split-K product), and that some need none there.
    """
    counter = OperationCounter()
    if steps is not None:
        steps.as_one = counter.as_one
    # Not in inference mode: there, operations made of others arrive whole.
    with torch.no_grad(), counter:
        forward()
    return counter.count


def count_kernels(forward: Callable[[], Any]) -> int:
    """The launches of a forward on a GPU: kernels, copies and fills."""
    from torch.profiler import ProfilerActivity, profile

    with torch.inference_mode():
        forward()  # compiles
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            forward()
            torch.cuda.synchronize()
    return sum(event.count for event in profiler.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA)


def build(family: str, num_layers: int, steps: FusedSteps | None, device: str) -> tuple[Any, PagedModel]:
    """A model in bfloat16 with the conversions to float32 and back of a served model."""
    torch.manual_seed(0)
    config = CONFIGS[family](num_hidden_layers=num_layers, **SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    model = model.to(torch.bfloat16).to(device)
    return model, prepare_model(model, max_model_len=MAX_MODEL_LEN, fused_steps=steps)


def count_step(family: str, num_layers: int, *, fused: bool) -> tuple[int, str]:
    """Launches of one decode step, and the fusion's report."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    counted = CountedSteps()
    steps = None if not fused else KernelSteps() if device == "cuda" else counted
    model, paged = build(family, num_layers, steps, device)
    batch, num_blocks = decode_batch([CONTEXT] * NUM_SEQS, block_size=BLOCK_SIZE, device=device)
    pool = KVPool(paged.specs, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=paged.dtype, device=paged.device)
    step = WithoutAttention(batch, pool, specs=paged.specs)
    model.set_attn_implementation(ATTENTION_NAME)

    def forward() -> None:
        with attention_step(step):
            model(
                input_ids=batch.input_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.last_indices,
            )

    count = count_kernels(forward) if device == "cuda" else count_operations(forward, counted)
    return count, str(paged.fusion or "")


def count_family(family: str) -> Row:
    """From two sizes: what four layers have more than two is that of two layers."""
    made: dict[bool, Launches] = {}
    report = ""
    for fused in (False, True):
        few, _ = count_step(family, FEW_LAYERS, fused=fused)
        more, report = count_step(family, MORE_LAYERS, fused=fused)
        per_layer = (more - few) / (MORE_LAYERS - FEW_LAYERS)
        made[fused] = Launches(per_layer, few - FEW_LAYERS * per_layer)
    return Row(family, own=made[False], fused=made[True], report=report)


# -- all of it --------------------------------------------------------------------------------------------------------


def measure(quick: bool, progress: Progress) -> Findings:
    families = list(CONFIGS)[:1] if quick else list(CONFIGS)
    task = progress.add_task("", total=len(families))
    rows = []
    for family in families:
        progress.update(task, description=family)
        rows.append(count_family(family))
        progress.advance(task)
    method = "torch's profiler" if torch.cuda.is_available() else "operations that would launch: an estimate"
    figures = {"counted": method, "rows": [asdict(row) for row in rows]}
    host_times = measure_host_times(num_launches=20 if quick else 300, num_windows=2 if quick else 15)
    figures["host_times"] = [asdict(row) for row in host_times]
    notes = [f"Counted: {method}. Attention over the pool, two launches a layer, and sampling are not in it."]
    return Findings([tabulate(rows), tabulate_host(host_times)], figures, lambda: plot(rows), notes)


def tabulate(rows: Sequence[Row]) -> Table:
    made = table(
        "launches of a decode step in bfloat16, without attention over the pool",
        *("", "own: a layer", "besides", "32 layers", "fused: a layer", "besides", "32 layers", "own / fused"),
    )
    for row in rows:
        cells = [value for each in (row.own, row.fused) for value in (each.per_layer, each.besides, each.of_step(32))]
        ratio = row.own.of_step(32) / row.fused.of_step(32)
        made.add_row(row.family, *(f"{value:,g}" for value in cells), f"{ratio:.1f}")
    return made


def tabulate_host(rows: Sequence[HostTime]) -> Table:
    title = "the host's processor time to launch a kernel, us: through Triton's binder, and with kept kernels"
    made = table(title, "", "binder", "kept", "binder / kept")
    for row in rows:
        made.add_row(row.kernel, f"{row.bound_us:.1f}", f"{row.kept_us:.1f}", f"{row.bound_us / row.kept_us:.1f}")
    return made


def plot(rows: Sequence[Row]) -> Figure:
    """Per layer, own beside fused."""
    figure, axes = pyplot.subplots(figsize=(8, 3.5))
    for offset, (label, counts) in zip(
        (-0.2, 0.2),
        {
            "transformers' own modules": [row.own.per_layer for row in rows],
            "fused": [row.fused.per_layer for row in rows],
        }.items(),
        strict=True,
    ):
        bars = axes.bar([index + offset for index in range(len(rows))], counts, width=0.4, label=label)
        axes.bar_label(bars, fmt="%g", fontsize=8)
    axes.axhline(WITH_FUSION, color="0.4", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [row.family for row in rows])
    axes.set_ylabel("launches of a layer, without attention")
    axes.legend(frameon=False)
    plain(axes)
    return figure


main = benchmark("kernels launches", measure, packages=("torch", "triton", "transformers"))

if __name__ == "__main__":
    main()
