"""The definition of correct: the results that a kernel must compute, in float64 and in the simplest form.

Used by tests only. One query of one head at a time, so that nothing here shares a mistake with what is tested. Copies
and writes are exact, so for them the dtype is that of the pool.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def write_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, *, slot_mapping: Tensor) -> None:
    """Scatter one step's keys and values into the block pool, in place.

    Sizes: N tokens, H kv heads, Dk and Dv head dims, B blocks, S block size (tokens).
        k, v            [N, H, Dk], [N, H, Dv]          any dtype that the pool's can hold
        k_pool, v_pool  [B, S, H, Dk], [B, S, H, Dv]
        slot_mapping    [N]                             int64, slot = block_id * S + offset; -1 skips the token
    Slots other than -1 must be distinct. Raises ValueError if a shape or dtype differs, or a slot is out of range.
    """
    _check_write(k, v, k_pool, v_pool, slot_mapping)
    block_size = k_pool.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot == -1:
            continue
        block_id, offset = divmod(slot, block_size)
        k_pool[block_id, offset] = k[token]
        v_pool[block_id, offset] = v[token]


def _check_write(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor) -> None:
    for name, tokens, pool in (("k", k, k_pool), ("v", v, v_pool)):
        if tokens.shape != (slot_mapping.shape[0], *pool.shape[2:]) or tokens.dtype != pool.dtype:
            raise ValueError(f"{name} is {tokens.dtype} {list(tokens.shape)}, its pool {pool.dtype} {list(pool.shape)}")
    slots = [slot for slot in slot_mapping.tolist() if slot != -1]
    num_slots = k_pool.shape[0] * k_pool.shape[1]
    if any(not 0 <= slot < num_slots for slot in slots):
        raise ValueError(f"a slot is not in 0 .. {num_slots - 1}")
    if len(set(slots)) != len(slots):
        raise ValueError("two tokens have one slot")


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scaling: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention of ragged queries over keys and values that lie in blocks.

    Sizes: N query tokens of n sequences, Hq query heads, H kv heads, M blocks per table, B blocks, S block size.
        q               [N, Hq, Dk]             Hq a multiple of H; query head h reads kv head h // (Hq // H)
        k_pool, v_pool  [B, S, H, Dk], [B, S, H, Dv]
        block_tables    [n, M]                  int32; entries beyond a sequence's length are not read
        seq_lens        [n]                     int32, keys of each sequence, its new ones included
        cu_seqlens_q    [n+1]                   int32; sequence i has queries cu[i] .. cu[i+1] - 1, its last tokens
        sinks           [Hq]                    one more score per head, with no value, or None
        alibi_slopes    [Hq]                    or None
        returns         [N, Hq, Dv]             float64

    A query at position p sees keys at positions <= p, of those the last `window` if given, and only those with
    position // chunk == p // chunk if given; without `causal` it sees all keys of its sequence. Scores are
    q . k * scaling; softcap c makes them c * tanh(score / c); slopes add slope * (key's position - p); then comes the
    softmax over the visible keys and the sink. Keys that are not visible are not read. A query that sees none, as one
    of a sequence of length 0, gets zeros.
    """
    return paged_attention_states(
        q, k_pool, v_pool, block_tables=block_tables, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q, scaling=scaling,
        window=window, chunk=chunk, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, causal=causal,
    )[0]  # fmt: skip


def paged_attention_states(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scaling: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """The result of paged_attention(), and the log-sum-exp of each row's scores, the sink among them, base 2: [N,
    Hq].

    That is log2 of the sum of exp(score), -inf for a query that sees no key.
    """
    num_tokens, num_query_heads, _ = q.shape
    heads_per_kv = num_query_heads // k_pool.shape[2]
    block_size = k_pool.shape[1]
    out = torch.zeros(num_tokens, num_query_heads, v_pool.shape[3], dtype=torch.float64, device=q.device)
    lse = torch.full((num_tokens, num_query_heads), -math.inf, dtype=torch.float64, device=q.device)
    bounds = cu_seqlens_q.tolist()
    for seq, seq_len in enumerate(seq_lens.tolist()):
        start = seq_len - (bounds[seq + 1] - bounds[seq])
        for token in range(bounds[seq], bounds[seq + 1]):
            position = start + token - bounds[seq]
            visible = visible_keys(position if causal else seq_len - 1, window=window, chunk=chunk)
            if not visible:
                continue
            block_ids = block_tables[seq, torch.tensor([p // block_size for p in visible])].long()
            offsets = torch.tensor([p % block_size for p in visible])
            for head in range(num_query_heads):
                keys = k_pool[block_ids, offsets, head // heads_per_kv].double()
                values = v_pool[block_ids, offsets, head // heads_per_kv].double()
                scores = keys @ q[token, head].double() * scaling
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if alibi_slopes is not None:
                    scores += alibi_slopes[head].double() * (torch.tensor(visible, device=q.device) - position)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head].double().view(1)])
                out[token, head] = torch.softmax(scores, 0)[: len(visible)] @ values
                lse[token, head] = torch.logsumexp(scores, 0) / math.log(2)
    return out, lse


def visible_keys(position: int, *, window: int | None = None, chunk: int | None = None) -> list[int]:
    """The positions of the keys that a causal query at `position` sees, rising."""
    return [
        key
        for key in range(position + 1)
        if (window is None or key > position - window) and (chunk is None or key // chunk == position // chunk)
    ]


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of K disjoint sets of keys, from that over each.

    Sizes: K sets, N tokens, H heads, D head dim.
        outs        [K, N, H, D]    anything for a set without keys
        lses        [K, N, H]       log-sum-exp of the scores, base 2; -inf for a set without keys
        returns     [N, H, D] and [N, H], float64; zeros and -inf for a row without keys
    """
    num_sets, num_tokens, num_heads, head_dim = outs.shape
    out = torch.zeros(num_tokens, num_heads, head_dim, dtype=torch.float64, device=outs.device)
    lse = torch.full((num_tokens, num_heads), -math.inf, dtype=torch.float64, device=outs.device)
    for token in range(num_tokens):
        for head in range(num_heads):
            present = [each for each in range(num_sets) if lses[each, token, head] > -math.inf]
            if not present:
                continue
            exponents = lses[present, token, head].double() * math.log(2)
            out[token, head] = torch.softmax(exponents, 0) @ outs[present, token, head].double()
            lse[token, head] = torch.logsumexp(exponents, 0) / math.log(2)
    return out, lse


def check_decode_plan(
    programs: list[list[int]],
    splits: list[list[int]],
    *,
    seq_lens: list[int],
    q_lens: list[int],
    tile: int,
    window: int | None = None,
    chunk: int | None = None,
) -> None:
    """Raises AssertionError unless the splits hold each sequence's keys once and each program's are a run of them.

    Both are rows of decode_plan.RECORD. Splits begin at multiples of `tile`, a sequence's first one at the tile of the
    first key that its first query sees, and its last ends at its length. Program p has splits from its own up to the
    next program's, and its record is that of its first split.
    """
    bounds = [row[3] for row in programs] + [programs[-1][6]]
    assert bounds[0] == 0
    assert bounds == sorted(bounds)
    for row, end in zip(programs, bounds[1:], strict=True):
        assert row[6] == end
        assert row[3] == end or row[:6] == splits[row[3]][:6]
    first = 0
    for seq, seq_len in enumerate(seq_lens):
        mine = [row for row in splits[first : bounds[-1]] if row[0] == seq]
        begin = visible_keys(max(seq_len - q_lens[seq], 0), window=window, chunk=chunk)[0] // tile * tile
        for number, row in enumerate(mine, start=first):
            assert row[1] == begin
            assert row[1] % tile == 0
            assert row[2] > row[1]
            assert row[3:6] == [number, first, len(mine)]
            begin = row[2]
        assert begin == seq_len if seq_len else not mine
        first += len(mine)
    assert first == bounds[-1]


def copy_blocks(pool: Tensor, *, sources: Tensor, targets: Tensor) -> None:
    """Copy whole blocks within one pool tensor, in place: block sources[i] to block targets[i].

    Sizes: B blocks, P pairs.
        pool                [B, ...]    any dtype
        sources, targets    [P]         int64, with no block in both and no target twice
    Raises ValueError if they overlap, a target repeats or a block is out of range.
    """
    pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))
    written = {target for _, target in pairs}
    if len(written) != len(pairs) or written & {source for source, _ in pairs}:
        raise ValueError("a block is the target of two copies, or both source and target")
    if any(not 0 <= block_id < pool.shape[0] for pair in pairs for block_id in pair):
        raise ValueError(f"a block is not in 0 .. {pool.shape[0] - 1}")
    for source, target in pairs:
        pool[target] = pool[source]
