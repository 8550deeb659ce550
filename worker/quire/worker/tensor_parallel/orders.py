"""Orders: what the leader of a group tells its followers, as packed integers.

An order is a header of HEADER_LENGTH int64 and a payload of bytes, which its parts make up, one after the other:

    header      kind, then the bytes of each part
    payload     parts

    kind          parts
    COMPUTE       grant, given runs, given tokens, scored runs, scored tokens
    APPLY         grant
    FENCE_LEASE   lease id, UTF-8
    BEGIN_EPOCH   -
    CHECKSUM      block ids
    END           -

A grant is the StepGrant as cachemgr encoded it; its lists are packed integers already. All others are int32. Given
runs are indexes of runs with tokens from the client: how many follows from the grant. Scored runs are threes: index of
the run, how many of the likeliest tokens to tell, tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from quire.cache.v1 import grant_pb2
from quire.worker.grant.decoding import AcceptedStep, num_given
from quire.worker.sampling.prompt_logprobs import ScoredTokens

MAX_PARTS = 5
HEADER_LENGTH = 1 + MAX_PARTS
"""Numbers of a header, int64."""

Header = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Payload = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


class OrderKind(IntEnum):
    """The work that an order is for. COMPUTE is a step that runs the model, APPLY one that only changes tables."""

    COMPUTE = 1
    APPLY = 2
    FENCE_LEASE = 3
    BEGIN_EPOCH = 4
    CHECKSUM = 5
    END = 6


@dataclass(frozen=True, slots=True)
class Order:
    """One order: its kind and its parts, as bytes."""

    kind: OrderKind
    parts: tuple[bytes, ...] = ()

    def header(self) -> Header:
        """[HEADER_LENGTH] int64."""
        sizes = [len(part) for part in self.parts]
        return np.array([self.kind, *sizes, *[0] * (MAX_PARTS - len(sizes))], dtype=np.int64)

    def payload(self) -> Payload:
        """[bytes of all parts] uint8."""
        return np.frombuffer(b"".join(self.parts), dtype=np.uint8)


def read_order(header: Header, payload: Payload) -> Order:
    """Return the order that has this header() and payload(). Raises ValueError for an unknown kind."""
    kind, *sizes = header.tolist()
    ends = accumulate(sizes, initial=0)
    return Order(OrderKind(kind), tuple(payload[start:end].tobytes() for start, end in pairwise(ends)))


def step_order(step: AcceptedStep, *, computes: bool) -> Order:
    """Return the order to run a step that the leader has accepted; computes False: only its changes of tables."""
    grant = step.grant.SerializeToString()
    if not computes:
        return Order(OrderKind.APPLY, (grant,))
    scored = [(run, each.num_top, len(each.next_token_ids)) for run, each in step.scored.items()]
    return Order(
        OrderKind.COMPUTE,
        (
            grant,
            _int32s(list(step.given_tokens)),
            b"".join(_int32s(ids) for ids in step.given_tokens.values()),
            _int32s(scored),
            b"".join(_int32s(each.next_token_ids) for each in step.scored.values()),
        ),
    )


def read_step(order: Order) -> AcceptedStep:
    """The step of a COMPUTE or an APPLY order: without sampling parameters, which only the leader needs."""
    grant = grant_pb2.StepGrant.FromString(order.parts[0])
    if order.kind is OrderKind.APPLY:
        return AcceptedStep(grant, skip=True)
    given_runs, given, scored_runs, scored = (np.frombuffer(part, dtype=np.int32) for part in order.parts[1:])
    counts = [num_given(grant, run) for run in given_runs.tolist()]
    threes = scored_runs.reshape(-1, 3).tolist()
    return AcceptedStep(
        grant,
        given_tokens=dict(zip(given_runs.tolist(), _cut(given, counts), strict=True)),
        scored={
            run: ScoredTokens(ids, num_top)
            for (run, num_top, _), ids in zip(threes, _cut(scored, [count for *_, count in threes]), strict=True)
        },
    )


def checksum_order(block_ids: list[int]) -> Order:
    """The order to send the checksums of these blocks."""
    return Order(OrderKind.CHECKSUM, (_int32s(block_ids),))


def read_block_ids(order: Order) -> list[int]:
    """The blocks of a CHECKSUM order."""
    block_ids: list[int] = np.frombuffer(order.parts[0], dtype=np.int32).tolist()
    return block_ids


def _int32s(values: Any) -> bytes:
    return np.asarray(values, dtype=np.int32).tobytes()


def _cut(
    tokens: np.ndarray[tuple[int, ...], np.dtype[np.int32]], counts: list[int]
) -> list[np.ndarray[tuple[int, ...], np.dtype[np.int32]]]:
    return [tokens[start:end] for start, end in pairwise(accumulate(counts, initial=0))]
