"""Self-check at load: compares the model's results over a block pool with those of its own attention.

It finds silent failures: a model that ignores the registered attention function runs without a causal mask, a
bias outside the mask is dropped, a rope that looks at the whole batch shifts every sequence. Three ragged sequences
run over shuffled blocks of a pool full of NaN, one of them in chunks while the others decode:

    step        long            short   one
    1           first half      5
    2           but for 3 to 9  1       1
    3, 4        1               1       1
    5 to 9      1                           (below float32)

So below float32, where the median counts, most positions that are compared are of the long one, behind any window.

Each layer group has blocks of its own. Before a step, blocks behind the window of a sequence are passed.

A deep model can make much of rounding: a Llama of 8 billion random weights in bfloat16 moves its logits by 5.5 % from
one order of additions to another. What a model makes of it is measured if it may decide: the reference once more, with
each module's result rounded otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.worker.device.rounding import TOLERANCE
from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.layer_groups import LayerGroups
from quire.worker.memory.layer_spec import Chunked, KeptPerToken, LayerSpec, Sliding
from quire.worker.memory.sequence_table import SequenceTable
from quire.worker.memory.step_batch import StepBatch, build_step_batch

BLOCK_SIZE = 4

# The long sequence outgrows every window, up to a length that a big model still runs at once on a CPU or a GPU.
LONGEST_TOKENS = {"cpu": 64, "cuda": 512}
SHORTEST_TOKENS = 8
CHECKED_SEQS = 3
STEPS_ALONE = 5

# The same where rounding was measured to do more. A wrong mask in all layers makes a difference of 0.7 or more.
LARGEST_TOLERANCE = 0.2


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Relative error of the positions compared, its limit, and where it is worst."""

    error: float
    limit: float
    seq: int
    position: int

    def __str__(self) -> str:
        return (
            f"its logits over a block pool differ from those of its own attention by {self.error:.1e} of their size; "
            f"{self.limit:.0e} is allowed (worst: sequence {self.seq}, position {self.position})"
        )


def find_disagreement(
    forward: Callable[[StepBatch, KVPool], Tensor],
    reference: Callable[[Tensor], Tensor],
    *,
    rounded_reference: Callable[[Tensor], Tensor],
    specs: Mapping[int, KeptPerToken],
    groups: LayerGroups,
    vocab_size: int,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    min_block_size: int = 1,
    rounds_inputs: bool = False,
) -> Disagreement | None:
    """Compare forward(batch, pool) -> [B, vocab] with reference(token_ids [L]) -> [L, vocab]; None if they agree.

    rounded_reference is the reference, rounded otherwise; it is asked once if a difference may be due to rounding.
    With rounds_inputs linear layers round their inputs to 8 bits, which makes much of a last bit. Then the limit is
    that of bfloat16. Needs max_model_len >= SHORTEST_TOKENS. Blocks are of BLOCK_SIZE tokens, or of min_block_size if
    that is more. Cost: two forwards of some hundred tokens at most, a third if rounded_reference is asked, and a pool.
    """
    lengths = _lengths(specs, max_model_len, device)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, vocab_size, (length,), generator=generator).to(device) for length in lengths]
    expected = [reference(tokens).float() for tokens in sequences]
    block_size = max(BLOCK_SIZE, min_block_size)
    table, pool = _scratch(
        lengths,
        specs=specs,
        groups=groups,
        block_size=block_size,
        dtype=dtype,
        device=device,
        generator=generator,
    )
    errors: list[tuple[float, int, int]] = []
    judged = torch.bfloat16 if rounds_inputs else dtype
    done = [0] * len(sequences)
    for counts in _steps(lengths[0], num_alone=0 if judged == torch.float32 else STEPS_ALONE):
        seqs = [seq for seq, count in enumerate(counts) if count]
        _pass_blocks(table, pool, done)
        batch = build_step_batch(
            table,
            block_size=block_size,
            rows=seqs,
            starts=[done[seq] for seq in seqs],
            counts=[counts[seq] for seq in seqs],
            token_ids=[sequences[seq][done[seq] : done[seq] + counts[seq]].tolist() for seq in seqs],
        )
        logits = forward(batch, pool)
        for i, seq in enumerate(seqs):
            done[seq] += counts[seq]
            position = done[seq] - 1
            errors.append((_relative_error(logits[i], expected[seq][position]), seq, position))
    found = _judge(errors, judged, TOLERANCE[judged])
    if found is None or judged == torch.float32 or found.error > LARGEST_TOLERANCE:
        return found
    rounded = rounded_reference(sequences[0]).float()
    rounding = sorted(map(_relative_error, rounded, expected[0]))[len(rounded) // 2]
    return _judge(errors, judged, min(max(rounding, found.limit), LARGEST_TOLERANCE))


def _lengths(specs: Mapping[int, KeptPerToken], max_model_len: int, device: torch.device) -> list[int]:
    masks = [spec.mask for spec in specs.values() if isinstance(spec, LayerSpec)]
    sizes = [mask.window for mask in masks if isinstance(mask, Sliding)]
    sizes += [mask.chunk for mask in masks if isinstance(mask, Chunked)]
    longest = LONGEST_TOKENS.get(device.type, LONGEST_TOKENS["cpu"])
    wanted = max([24, *(size + 3 * BLOCK_SIZE for size in sizes)])
    return [min(wanted, longest, max_model_len), SHORTEST_TOKENS, 3]


def _steps(longest: int, *, num_alone: int) -> list[tuple[int, int, int]]:
    half = longest // 2
    num_alone = min(num_alone, longest - half - 3)
    together = [(half, 5, 0), (longest - half - 2 - num_alone, 1, 1), (1, 1, 1), (1, 1, 1)]
    return together + [(1, 0, 0)] * num_alone


def _scratch(
    lengths: Sequence[int],
    *,
    specs: Mapping[int, KeptPerToken],
    groups: LayerGroups,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> tuple[SequenceTable, KVPool]:
    """A pool full of NaN but for its null block, and a table with a shuffled block list per sequence and group."""
    needed = [-(-length // block_size) for length in lengths]
    total = sum(needed) * len(groups)
    pool = KVPool(specs, groups=groups, num_blocks=total + 1, block_size=block_size, dtype=dtype, device=device)
    for tensor in pool.tensors():
        tensor[1:].fill_(float("nan"))
    table = SequenceTable(
        max_num_seqs=CHECKED_SEQS, max_blocks_per_seq=max(needed), device=device, windowed=pool.windowed
    )
    block_ids = [number + 1 for number in torch.randperm(total, generator=generator).tolist()]
    for count in needed:
        row = table.add()
        for group in range(len(groups)):
            table.stage_blocks(row, 0, [block_ids.pop() for _ in range(count)], group=group)
    return table, pool


def _pass_blocks(table: SequenceTable, pool: KVPool, done: Sequence[int]) -> None:
    """Pass what lies behind the windows of rows with so many computed tokens."""
    for row, num_computed in enumerate(done):
        for number, group in enumerate(pool.groups):
            num_blocks = group.count_passed(num_computed, pool.block_size)
            if num_blocks > table.num_passed(row, group=number):
                table.pass_blocks(row, num_blocks, group=number)


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    """Infinite if the shapes differ or a logit is not a number."""
    if actual.shape != expected.shape:
        return float("inf")
    error = float((actual.float() - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
    return error if error == error else float("inf")


def _judge(errors: list[tuple[float, int, int]], dtype: torch.dtype, limit: float) -> Disagreement | None:
    ordered = sorted(errors)
    worst, seq, position = ordered[-1]
    error = worst if dtype == torch.float32 or worst == float("inf") else ordered[len(ordered) // 2][0]
    return Disagreement(error, limit, seq, position) if error > limit else None


def eager_reference(model: Any) -> Callable[[Tensor], Tensor]:
    """The model with its own attention: one whole sequence, no cache. The caller sets the attention implementation."""

    takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def reference(token_ids: Tensor) -> Tensor:
        positions = torch.arange(token_ids.shape[0], device=token_ids.device)[None]
        arguments = {"position_ids": positions} if takes_positions else {}
        with torch.inference_mode():
            logits: Tensor = model(input_ids=token_ids[None], use_cache=False, **arguments).logits[0]
        return logits

    return reference


@contextmanager
def rounded_otherwise(model: torch.nn.Module) -> Iterator[None]:
    """Move what each innermost module returns by half of the dtype's step, up or down by fixed draws."""
    draws: dict[torch.device, torch.Generator] = {}

    def move(_module: torch.nn.Module, _arguments: Any, output: Any) -> Tensor | None:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        device, dtype = output.device, output.dtype
        generator = draws.setdefault(device, torch.Generator(device).manual_seed(0))
        signs = 2 * torch.randint(0, 2, output.shape, generator=generator, device=device) - 1
        moved: Tensor = output.float() * (1 + signs * torch.finfo(dtype).eps / 2)
        return moved.to(dtype)

    with ExitStack() as hooks:
        for module in model.modules():
            if next(module.children(), None) is None:
                hooks.callback(module.register_forward_hook(move).remove)
        yield
