"""The check of a deterministic model at load: a token's bits must not depend on the step that it is in.

    threads     elementwise functions must divide a tile between vectors: see thread_splits.py
    places      a tile of tokens runs in other orders, half of it beside other tokens: each module has to give a token
                the same bits
    steps       a sequence runs alone and at once, and in chunks beside others that decode: its logits have to be equal
    attention   a token attends over long contexts alone, and beside others

A model in kernels with fixed tiles has no threads and no tiles of its own. It has instead:

    sums        no product and no sum may be torch's, which on a GPU divides them by the number of rows
    steps       the same with long prompts, too

A model that fails is refused, with the name of the module.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.worker.attention.row_attention import attend_rows
from quire.worker.memory.layer_spec import LayerSpec
from quire.worker.model.paged_model import PagedModel, RunsForward, run_at_once
from quire.worker.model.scratch import ScratchSequences
from quire.worker.model.thread_splits import most_threads, record_elementwise
from quire.worker.model.tiles import TILE_ROWS
from quire.worker.unsupported_model import UnsupportedModel

log = logging.getLogger(__name__)

ROLLS = (1, 3, 8, 13)
LENGTH = 24
SHORT = 4
CONTEXTS = (64, 320, 1024)
LONG = 600
"""Tokens of the long prompts: beyond each number at which a kernel or a library takes another tile."""

_PRODUCTS = (
    {"linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "mv", "dot", "convolution"}
    | {"_scaled_mm", "_grouped_mm", "_int_mm"}
)  # fmt: skip
_SUMS = (
    {"sum", "mean", "var", "std", "var_mean", "prod", "cumsum", "logsumexp", "index_add", "scatter_add"}
    | {"norm", "linalg_vector_norm", "rms_norm", "group_norm", "einsum", "scaled_dot_product_attention"}
)  # fmt: skip
"""Layer norms and softmax are not among them: a row is one program, whatever the number of rows."""


def choose_threads(model: PagedModel) -> None:
    """Have torch use fewer threads, if elementwise functions of the model would divide a tile unevenly; log that.

    Raises UnsupportedModel if they do with one thread. Cost: a tile, with each call recorded.
    """
    scratch = ScratchSequences.make(model, 1, length=LENGTH)
    wanted = torch.get_num_threads()
    threads, limit = most_threads(record_elementwise(lambda: scratch.run([0], [0], [1])), wanted)
    if not threads:
        raise UnsupportedModel(model.architecture, f"--deterministic: {limit} has rows that end within a vector")
    if threads < wanted:
        log.info("deterministic: %d threads and not %d, because of %s", threads, wanted, limit)
        torch.set_num_threads(threads)


def check_rows(model: PagedModel, module: nn.Module, *, in_kernels: bool = False) -> None:
    """Run the checks; `module` is what the model runs. in_kernels: those of a model in kernels with fixed tiles.

    Raises UnsupportedModel. Cost: about 16 tiles, and 64 for a model with states; in kernels about 25 forwards, one
    of them of LONG tokens.
    """
    try:
        reason = _find_library_sum(model) if in_kernels else None
        length = SHORT if in_kernels else LENGTH
        reason = reason or _find_varying_place(model, module, length) or find_varying_step(model)
        reason = reason or (find_varying_step(model, LONG) if in_kernels else _find_varying_attention(model))
    finally:
        model.allocate_states(0)
    if reason:
        raise UnsupportedModel(model.architecture, f"--deterministic: {reason}")


def _find_library_sum(model: PagedModel) -> str | None:
    scratch = ScratchSequences.make(model, 1, length=LENGTH)
    recorder = _SumRecorder()
    with recorder:
        scratch.run([0], [0], [len(scratch.tokens[0])])
    if not recorder.names:
        return None
    return f"torch's {', '.join(sorted(recorder.names))} adds up in an order that depends on the number of rows"


class _SumRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the names of torch's products and sums of numbers with rounding, but for products of one factor each."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, result = func.overloadpacket.__name__.rstrip("_"), func(*args, **(kwargs or {}))
        is_rounded = any(isinstance(each, Tensor) and each.is_floating_point() for each in tree_leaves(args))
        factors = args[1] if name in ("addmm", "baddbmm") else args[0]
        if is_rounded and (name in _SUMS or (name in _PRODUCTS and factors.shape[-1] != 1)):
            self.names.add(name)
        return result


def _find_varying_place(model: PagedModel, module: nn.Module, length: int) -> str | None:
    scratch = ScratchSequences.make(model, 2 * TILE_ROWS, length=length)
    length = len(scratch.tokens[0])
    everything = list(range(2 * TILE_ROWS))
    scratch.run(everything, [0] * len(everything), [length] * len(everything))

    def tile(rows: list[int]) -> list[tuple[str, Tensor]]:
        with _recorded(module) as outputs:
            logits = scratch.run(rows, [length - 1] * TILE_ROWS, [1] * TILE_ROWS)
        return [*outputs, ("the output layer", logits)]

    order = list(range(TILE_ROWS))
    expected = tile(order)
    for roll in ROLLS:
        rows = [(row + roll) % TILE_ROWS + (TILE_ROWS if row % 2 else 0) for row in order]
        kept = [place for place, row in enumerate(rows) if row < TILE_ROWS]
        for (name, before), (_, after) in zip(expected, tile(rows), strict=True):
            if not torch.equal(before[[rows[place] for place in kept]], after[kept]):
                return f"{name} gives a token other results in another row of a tile"
    return None


@contextmanager
def _recorded(module: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """Keep what each innermost module returns for the rows of a tile, rows first."""
    outputs: list[tuple[str, Tensor]] = []

    def hook(name: str) -> Any:
        def note(_module: nn.Module, _arguments: Any, output: Any) -> None:
            if isinstance(output, Tensor) and TILE_ROWS in output.shape[:2]:
                rows = output.movedim(list(output.shape).index(TILE_ROWS), 0)
                outputs.append((f"its module {name}", rows.clone()))

        return note

    with ExitStack() as hooks:
        for name, each in module.named_modules():
            if next(each.children(), None) is None:
                hooks.callback(each.register_forward_hook(hook(name)).remove)
        yield outputs


def find_varying_step(
    model: PagedModel, length: int = LENGTH, *, adapter: int | None = None, run: RunsForward = run_at_once
) -> str | None:
    """Return why a token's logits depend on its step, for people, or None: some sequences have this adapter.

    run runs each forward, of some ten tokens.
    """
    scratch = ScratchSequences.make(model, 5, length=length)
    scratch.adapter, scratch.submit = adapter, run
    length = len(scratch.tokens[0])
    scratch.tokens[1] = scratch.tokens[0]
    expected = [scratch.run([0], [0], [length - 1])[0], scratch.run([0], [length - 1], [1])[0]]
    scratch.run([2, 3], [0, 0], [length - 4, 2])
    third = (length - 1) // 3
    scratch.run([3, 1], [2, 0], [1, third])
    scratch.run([1, 4], [third, 0], [1, 3])
    found = scratch.run([2, 1, 4], [length - 4, third + 1, 3], [1, length - 2 - third, 2])[1]
    last = scratch.run([2, 4, 1], [length - 3, 5, length - 1], [1, 1, 1])[2]
    if torch.equal(expected[0], found) and torch.equal(expected[1], last):
        return None
    return "its logits depend on the other sequences of a step, or on the chunks of a prompt"


def _find_varying_attention(model: PagedModel) -> str | None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(model.dtype)

    kinds: dict[tuple[Any, ...], LayerSpec] = {}
    for spec in model.attention_specs.values():
        sizes = (spec.num_query_heads, spec.num_kv_heads, spec.k_head_dim, spec.v_head_dim)
        kinds.setdefault((*sizes, spec.softcap, spec.has_sinks), spec)
    for spec in kinds.values():
        for span in CONTEXTS:
            queries = draw(TILE_ROWS, spec.num_kv_heads, spec.num_query_heads // spec.num_kv_heads, spec.k_head_dim)
            keys = draw(TILE_ROWS, span, spec.num_kv_heads, spec.k_head_dim)
            values = draw(TILE_ROWS, span, spec.num_kv_heads, spec.v_head_dim)
            ends = torch.linspace(span / 2, span - 1, TILE_ROWS).long()
            hidden = (torch.arange(span) > ends[:, None])[:, None, None]
            if _attention_varies(spec, queries, keys, values, hidden, draw(spec.num_query_heads)):
                return f"attention of layer {spec.layer_idx} over {span} keys depends on other tokens"
    return None


def _attention_varies(
    spec: LayerSpec, queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, sinks: Tensor
) -> bool:
    options: Any = {
        "scaling": spec.scaling,
        "softcap": spec.softcap,
        "sinks": sinks if spec.has_sinks else None,
    }
    with torch.inference_mode():
        together = attend_rows(queries, keys, values, hidden=hidden, **options)
        for rows in ([0], [5], [3, 9], [15, 0, 7]):
            few = attend_rows(queries[rows], keys[rows], values[rows], hidden=hidden[rows], **options)
            if not torch.equal(few, together[rows]):
                return True
        shared = attend_rows(queries, keys[:1], values[:1], hidden=hidden, **options)
        alone = attend_rows(queries[4:5], keys[:1], values[:1], hidden=hidden[4:5], **options)
        return not torch.equal(shared[4:5], alone)
