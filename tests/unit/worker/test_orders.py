"""Orders of the leader of a group to its followers, packed and read again."""

from __future__ import annotations

import numpy as np
import pytest

from quire.cache.v1 import grant_pb2
from quire.worker.grant.decoding import AcceptedStep, RowSampling
from quire.worker.sampling.parameters import SamplingParams
from quire.worker.sampling.prompt_logprobs import ScoredTokens
from quire.worker.tensor_parallel.orders import (
    HEADER_LENGTH,
    Order,
    OrderKind,
    checksum_order,
    read_block_ids,
    read_order,
    read_step,
    step_order,
)

DECODE_SEQS = 256
MAX_DECODE_BYTES = 4096


def through_the_wire(order: Order) -> Order:
    header, payload = order.header(), order.payload()
    assert header.dtype == np.int64
    assert header.shape == (HEADER_LENGTH,)
    assert int(header[1:].sum()) == payload.nbytes
    return read_order(header, payload)


def ints(*values: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def make_step() -> AcceptedStep:
    grant = grant_pb2.StepGrant(
        epoch=7,
        step_number=3,
        lease_id="lease",
        run_sequence_ids=[5, 9, 11],
        run_starts=[0, 4, 0],
        run_token_counts=[3, 1, 2],
        run_samples=[True, True, False],
        given_run_indexes=[0, 2],
    )
    return AcceptedStep(
        grant,
        given_tokens={0: ints(10, 20, 30), 2: ints(40, 50)},
        sampling={5: RowSampling(SamplingParams(temperature=1.0))},
        scored={2: ScoredTokens(ints(50), 4), 0: ScoredTokens(ints(20, 30, 6), 0)},
    )


def test_a_follower_reads_the_step_without_its_sampling() -> None:
    step = make_step()
    found = read_step(through_the_wire(step_order(step, computes=True)))
    assert found.grant == step.grant
    assert {run: ids.tolist() for run, ids in found.given_tokens.items()} == {0: [10, 20, 30], 2: [40, 50]}
    scored = {run: (each.next_token_ids.tolist(), each.num_top) for run, each in found.scored.items()}
    assert scored == {2: ([50], 4), 0: ([20, 30, 6], 0)}
    assert (dict(found.sampling), found.skip) == ({}, False)


def test_a_step_that_computes_nothing_only_changes_tables() -> None:
    step = make_step()
    found = read_step(through_the_wire(step_order(step, computes=False)))
    assert found.grant == step.grant
    assert found.skip
    assert not found.given_tokens


def test_other_orders() -> None:
    assert read_block_ids(through_the_wire(checksum_order([3, 1, 2**24]))) == [3, 1, 2**24]
    assert through_the_wire(Order(OrderKind.FENCE_LEASE, (b"lease",))).parts[0] == b"lease"
    assert through_the_wire(Order(OrderKind.END)).kind is OrderKind.END


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="99"):
        read_order(np.array([99, 0, 0, 0, 0, 0]), np.zeros(0, dtype=np.uint8))


def test_a_decode_step_of_256_sequences_takes_at_most_4_kib() -> None:
    """Late in a lease's life: large ids, long sequences, and a new block for one in sixteen."""
    seq_ids = range(100_000, 100_000 + DECODE_SEQS)
    writers = list(seq_ids)[::16]
    grant = grant_pb2.StepGrant(
        epoch=2**63 - 1,
        step_number=2**31,
        lease_id="l" * 36,
        pool="default",
        run_sequence_ids=seq_ids,
        run_starts=[120_000] * DECODE_SEQS,
        run_token_counts=[1] * DECODE_SEQS,
        run_samples=[True] * DECODE_SEQS,
        write_sequence_ids=writers,
        write_first_indexes=[7_500] * len(writers),
        write_block_counts=[1] * len(writers),
        write_block_ids=[2**24 - 1] * len(writers),
    )
    order = step_order(AcceptedStep(grant), computes=True)
    assert order.header().nbytes + order.payload().nbytes <= MAX_DECODE_BYTES


def test_a_follower_gets_the_drafts_of_a_run() -> None:
    grant = grant_pb2.StepGrant(
        run_sequence_ids=[5, 9],
        run_starts=[4, 0],
        run_token_counts=[3, 2],
        run_samples=[True, True],
        given_run_indexes=[0, 1],
        run_draft_counts=[2, 0],
    )
    step = AcceptedStep(grant, given_tokens={0: ints(10, 20), 1: ints(40, 50)})
    found = read_step(through_the_wire(step_order(step, computes=True)))
    assert {run: ids.tolist() for run, ids in found.given_tokens.items()} == {0: [10, 20], 1: [40, 50]}
