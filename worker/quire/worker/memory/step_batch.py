"""The tokens of one step as the device takes them: ragged, packed, each with its position and its slot.

The host knows every length; token ids that were sampled on the device never leave it. All integers of a step cross in
one transfer:

    part        length      content
    positions   T
    slots       G * T       in each layer group
    rows        B           the table row of each sequence
    last        B           the last token of each sequence in the packed batch
    seq_lens    B           int32, tokens in the pool after this step
    cu_seqlens  B + 1       int32, first token of each sequence in the packed batch, then T
    logits      L           the tokens with logits, in a step with drafts
    adapters    T           the adapter of each token, in a step with adapters in slots

and these of a step with tokens from the host:

    token_ids   T           0 where the token is on the device
    sampled_at  S           which tokens are the last sampled ones of their rows
    sampled_row S

Each part begins at a multiple of 16 bytes, for which kernels are compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from quire.worker.device.transfer import to_device
from quire.worker.memory.sequence_table import NO_TOKEN, HeldRows, Int64s, SequenceTable

_Ints = np.ndarray[tuple[int, ...], np.dtype[np.signedinteger[Any]]]
TokenIdsOfRuns = Sequence[Sequence[int] | _Ints | None]
"""Token ids of each run; None for the token sampled last."""
_ZERO: Int64s = np.zeros(1, dtype=np.int64)
LEAST_MAX_LOGITS = 256


def max_logits(max_num_seqs: int) -> int:
    """Tokens of a step that there is memory for logits for: of each sequence one, and of the others as drafts."""
    return max(max_num_seqs, LEAST_MAX_LOGITS)


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """The drafts of a step's runs, [B] int64 each: a run with some runs its row's last sampled token, and then these.

    given       drafts that are run; 0 for other runs
    verified    the first of them, behind which a token is sampled, too
    """

    given: Int64s
    verified: Int64s

    @classmethod
    def fit(cls, given: Int64s, *, most_logits: int) -> Self:
        """Verify as many drafts as a step of so many tokens with logits has room for: the same most of each run."""
        most, room = int(given.max(initial=0)), most_logits - len(given)
        while most > 0 and np.minimum(given, most).sum() > room:
            most -= 1
        return cls(given, np.minimum(given, most))

    @property
    def num_logits(self) -> Int64s:
        """Tokens of each run with logits, [B]: they are the run's first ones, if it has drafts."""
        return 1 + self.verified

    def logit_rows(self, runs: Sequence[int] | Int64s) -> Int64s:
        """Return the rows of the step's logits that belong to these runs, given by index."""
        counts, index = self.num_logits, np.asarray(runs)
        return count_on((counts.cumsum() - counts)[index], counts[index])


@dataclass(frozen=True, slots=True)
class AdapterTokens:
    """The tokens of a step that take an adapter: its number in the model, and their places in the packed batch.

    `tokens` is a slice if they lie together, else [n] int64.
    """

    adapter: int
    tokens: slice | Tensor


def tokens_of_adapters(adapters: Sequence[int | None], counts: Sequence[int]) -> tuple[AdapterTokens, ...]:
    """Return the tokens of each adapter in a step of runs with these adapters, None for none, and so many tokens."""
    places: dict[int, list[range]] = {}
    for adapter, (first, end) in zip(adapters, pairwise(accumulate(counts, initial=0)), strict=True):
        if adapter is None:
            continue
        ranges = places.setdefault(adapter, [])
        if ranges and ranges[-1].stop == first:
            ranges[-1] = range(ranges[-1].start, end)
        else:
            ranges.append(range(first, end))
    return tuple(AdapterTokens(adapter, _join(ranges)) for adapter, ranges in places.items())


def _join(ranges: Sequence[range]) -> slice | Tensor:
    if len(ranges) == 1:
        return slice(ranges[0].start, ranges[0].stop)
    return torch.tensor([place for each in ranges for place in each])


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The batch of one forward. Sizes: T tokens, B sequences, G layer groups, M the most blocks one of them needs.

        input_ids       [T]     int64
        positions       [T]     int64, absolute
        slot_mapping    [G, T]  int64, slot = block_id * block_size + offset, distinct
        block_tables    [G, B, M]   int32, the null block where a row holds none
        seq_lens        [B]     int32, tokens in the pool after this step
        cu_seqlens_q    [B+1]   int32
        last_indices    [B]     int64, index of each sequence's last token in this batch
        rows            [B]     int64, the sequences' rows of the table

    seq_lens_host and counts_host (B each; counts are tokens run in this step) are the same numbers without a sync;
    rows_host are the rows.

    In a step with drafts, drafts are their numbers, and there is

        draft_logits    [L]     int64, the tokens with logits: of a sequence with drafts its first one, and the drafts
                                that are verified; of another sequence its last one
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    last_indices: Tensor
    rows: Tensor
    seq_lens_host: tuple[int, ...]
    counts_host: tuple[int, ...]
    rows_host: tuple[int, ...]
    keeps_hidden_states: bool = False
    """The batch needs the model's own forward, because hidden states are read."""
    drafts: DraftCounts | None = None
    draft_logits: Tensor | None = None
    adapters: tuple[int | None, ...] = ()
    """The adapter of each sequence, by its number in the model; None: it has none. Empty if none has one."""
    adapter_slots: Tensor | None = None
    """The adapter of each token, [T] int64, in a model with slots for adapters: 1 + its slot, 0 for none."""

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        return len(self.counts_host)

    @property
    def logit_indices(self) -> Tensor:
        """The tokens with logits, [L] int64: L = B in a step without drafts."""
        return self.last_indices if self.draft_logits is None else self.draft_logits

    @property
    def logit_indices_host(self) -> Int64s:
        """The same without a sync."""
        return tokens_with_logits(np.asarray(self.counts_host), self.drafts)


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of one step in columns, [B] int64: run i is of the tokens before ends[i] from starts[i] on.

    given has the token ids of some runs by index; the others run their rows' last sampled tokens, and so do those with
    drafts, before the drafts that are given.
    """

    rows: Int64s
    starts: Int64s
    counts: Int64s
    ends: Int64s
    given: Mapping[int, Sequence[int] | _Ints]
    drafts: DraftCounts | None = None

    def begins_given(self, run: int) -> bool:
        """True if the run's first token is given."""
        return run in self.given and (self.drafts is None or not self.drafts.given[run])


def count_on(firsts: Int64s, counts: Int64s) -> Int64s:
    """Return first .. first + count - 1 for each first and its count, one after the other."""
    before: Int64s = counts.cumsum() - counts
    numbers: Int64s = np.arange(counts.sum()) + (firsts - before).repeat(counts)
    return numbers


def tokens_with_logits(counts: Int64s, drafts: DraftCounts | None) -> Int64s:
    """Return the places in the packed batch of the tokens with logits, [L], of runs of so many tokens, [B]."""
    lasts = counts.cumsum() - 1
    if drafts is None:
        return lasts
    return count_on(lasts - drafts.given, drafts.num_logits)


def build_step_batch(
    table: SequenceTable,
    *,
    block_size: int,
    rows: Sequence[int],
    starts: Sequence[int] | Int64s,
    counts: Sequence[int] | Int64s,
    token_ids: TokenIdsOfRuns,
    drafts: DraftCounts | None = None,
    adapter_slots: Sequence[int] | None = None,
) -> StepBatch:
    """Pack one step: sequence i runs counts[i] tokens from position starts[i]; None stands for its last sampled token.
    The token ids of a run with drafts are the drafts: its last sampled token is before them. adapter_slots are the
    numbers of the sequences' adapters, as StepBatch has them.

    Flushes the table first. Raises ValueError, before anything is sent, if the lists differ in length, a row occurs
    twice, a count is not positive or not the number of tokens, a sequence does not hold the blocks of all its tokens in
    some group, or None is given for a row with its last sampled token at another position than starts[i].
    Cost: O(T) on the host, one transfer, no sync.
    """
    runs = check_runs(table, block_size, rows, starts, counts, token_ids, drafts)
    table.flush()
    cu_seqlens = np.concatenate((_ZERO, runs.counts.cumsum()))
    firsts = cu_seqlens[:-1]
    positions = np.arange(cu_seqlens[-1]) + (runs.starts - firsts).repeat(runs.counts)
    slots = table.slots(runs.rows.repeat(runs.counts), positions, block_size=block_size)
    from_host = _tokens_from_host(runs, cu_seqlens) if runs.given else ()
    logits = () if drafts is None else (tokens_with_logits(runs.counts, drafts),)
    adapters = () if adapter_slots is None else (np.array(adapter_slots, dtype=np.int64).repeat(runs.counts),)
    device_positions, device_slots, device_rows, last_indices, seq_lens, device_cu_seqlens, *others = _to_device(
        [
            positions,
            slots.reshape(-1),
            runs.rows,
            cu_seqlens[1:] - 1,
            _int32s(runs.ends),
            _int32s(cu_seqlens),
            *logits,
            *adapters,
            *from_host,
        ],
        table.device,
    )
    given = others[len(logits) + len(adapters) :]
    input_ids = _merge(*given, last_token=table.last_token) if given else table.last_token.index_select(0, device_rows)
    max_blocks = -(-int(runs.ends.max()) // block_size)
    return StepBatch(
        input_ids=input_ids,
        positions=device_positions,
        slot_mapping=device_slots.view(slots.shape),
        block_tables=table.block_tables.narrow(2, 0, max_blocks).index_select(1, device_rows),
        seq_lens=seq_lens.view(torch.int32).narrow(0, 0, len(rows)),
        cu_seqlens_q=device_cu_seqlens.view(torch.int32).narrow(0, 0, len(cu_seqlens)),
        last_indices=last_indices,
        rows=device_rows,
        seq_lens_host=tuple(runs.ends.tolist()),
        counts_host=tuple(runs.counts.tolist()),
        rows_host=tuple(rows),
        drafts=drafts,
        draft_logits=others[0] if logits else None,
        adapter_slots=others[len(logits)] if adapters else None,
    )


def _tokens_from_host(runs: Runs, cu_seqlens: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """The token ids of a step that the host has, the places of the others, and their rows."""
    tokens = np.zeros(cu_seqlens[-1], dtype=np.int64)
    is_sampled = np.ones(len(runs.rows), dtype=np.bool_)
    for run, ids in runs.given.items():
        tokens[cu_seqlens[run + 1] - len(ids) : cu_seqlens[run + 1]] = ids
        is_sampled[run] = not runs.begins_given(run)
    return tokens, cu_seqlens[:-1][is_sampled], runs.rows[is_sampled]


def _merge(tokens: Tensor, sampled_at: Tensor, sampled_rows: Tensor, *, last_token: Tensor) -> Tensor:
    """Write the rows' last sampled tokens into their places among the tokens."""
    return tokens.index_copy_(0, sampled_at, last_token.index_select(0, sampled_rows)) if len(sampled_at) else tokens


def check_runs(
    table: SequenceTable,
    block_size: int,
    rows: Sequence[int],
    starts: Sequence[int] | Int64s,
    counts: Sequence[int] | Int64s,
    token_ids: TokenIdsOfRuns,
    drafts: DraftCounts | None = None,
) -> Runs:
    """Return the runs in columns. Raise what build_step_batch raises of these arguments."""
    if not len(rows) or not len(rows) == len(starts) == len(counts) == len(token_ids):
        lengths = [len(rows), len(starts), len(counts), len(token_ids)]
        raise ValueError(f"rows, starts, counts and token_ids have {lengths} items; equal and at least 1 are needed")
    distinct = set(rows)
    table.check_rows(distinct)
    if len(distinct) != len(rows):
        raise ValueError("a row occurs twice in one step")
    row_column, first, count = (np.asarray(values, dtype=np.int64) for values in (rows, starts, counts))
    given = {run: ids for run, ids in enumerate(token_ids) if ids is not None}
    runs = Runs(row_column, first, count, first + count, given, drafts)
    held = table.held(row_column)
    _check_tokens(runs, held.last_token_positions)
    _check_blocks(runs, held, block_size)
    return runs


def _check_tokens(runs: Runs, last_positions: Int64s) -> None:
    """Raise ValueError if a run does not have the tokens of its positions."""
    num_ids, positions = np.ones(len(runs.rows), dtype=np.int64), last_positions
    if runs.given:
        given, positions = [run for run in runs.given if runs.begins_given(run)], last_positions.copy()
        num_ids[list(runs.given)] = [len(ids) + (not runs.begins_given(run)) for run, ids in runs.given.items()]
        positions[given] = np.where((runs.starts >= 0) & (runs.counts > 0), runs.starts, NO_TOKEN)[given]
    is_right = (runs.counts == num_ids) & (runs.starts == positions)
    if is_right.all():
        return
    run = int(is_right.argmin())
    where = f"row {runs.rows[run]}: start={runs.starts[run]}"
    if runs.begins_given(run) or runs.starts[run] < 0 or runs.counts[run] != num_ids[run]:
        raise ValueError(f"{where}, count={runs.counts[run]} with {num_ids[run]} tokens")
    expected = None if positions[run] == NO_TOKEN else positions[run]
    raise ValueError(f"{where}, but its last sampled token takes position {expected}")


def _check_blocks(runs: Runs, held: HeldRows, block_size: int) -> None:
    """Raise ValueError if a token's slot would be in a block that its row does not hold."""
    firsts, ends = held.begins * block_size, held.ends * block_size
    is_outside = (ends < runs.ends) | (firsts > runs.starts)
    if not is_outside.any():
        return
    for group, i in np.argwhere(is_outside):
        where = f"row {runs.rows[i]}: its blocks of layer group {group}"
        positions = f"positions {firsts[group, i]} .. {ends[group, i] - 1}"
        raise ValueError(f"{where} hold {positions}, and the tokens take {runs.starts[i]} .. {runs.ends[i] - 1}")


def _to_device(parts: Sequence[_Ints], device: torch.device) -> tuple[Tensor, ...]:
    """Send columns of integers as one int64 buffer; return a view of each on the device, at a multiple of 16 bytes."""
    sizes = [len(part) + len(part) % 2 for part in parts]
    packed, start = np.zeros(sum(sizes), dtype=np.int64), 0
    for part, size in zip(parts, sizes, strict=True):
        packed[start : start + len(part)] = part
        start += size
    sent = torch.split_with_sizes(to_device(torch.from_numpy(packed), device), sizes)
    return tuple(
        tensor if size == len(part) else tensor.narrow(0, 0, len(part))
        for tensor, part, size in zip(sent, parts, sizes, strict=True)
    )


def _int32s(values: Int64s) -> _Ints:
    """The values as int32, two of them in an int64."""
    packed = np.zeros(len(values) + len(values) % 2, dtype=np.int32)
    packed[: len(values)] = values
    return packed.view(np.int64)
