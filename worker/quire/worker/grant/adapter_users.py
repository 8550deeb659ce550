"""The sequences of accepted grants that have an adapter. An adapter in use is neither unloaded nor evicted. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from quire.cache.v1 import grant_pb2
from quire.worker.grant.decoding import adapter_of


class AdapterUsers:
    """The adapter of each sequence that has one, by lease.

    A sequence in the host tier counts, because it is restored without an admission that could be refused. One that is
    released or fenced counts no longer, though a step of it may run: the worker takes an adapter out of its layers
    behind all accepted steps. So a preempted sequence, which is released and admitted again, does not count.
    """

    def __init__(self) -> None:
        self._adapters: dict[str, dict[int, bytes]] = {}

    def accept(self, grant: grant_pb2.StepGrant) -> None:
        """Follow an accepted grant: releases, then forks, then runs."""
        sequences = self._adapters.get(grant.lease_id)
        if sequences is None:
            if not grant.adapters:
                return
            sequences = self._adapters[grant.lease_id] = {}
        for seq_id in grant.released_sequence_ids:
            sequences.pop(seq_id, None)
        for parent, child in zip(grant.fork_parent_ids, grant.fork_child_ids, strict=True):
            if parent in sequences:
                sequences[child] = sequences[parent]
        for run, seq_id in enumerate(grant.run_sequence_ids if grant.adapters else ()):
            if identity := adapter_of(grant, run):
                sequences[seq_id] = identity
        if not sequences:
            del self._adapters[grant.lease_id]

    def end_lease(self, lease_id: str) -> None:
        """Forget the sequences of a lease."""
        self._adapters.pop(lease_id, None)

    def begin_epoch(self) -> None:
        """Forget all sequences."""
        self._adapters.clear()

    def counts(self) -> Mapping[bytes, int]:
        """Return the number of sequences of each adapter in use. Cost: all sequences with an adapter."""
        counts: dict[bytes, int] = {}
        for sequences in self._adapters.values():
            for identity in sequences.values():
                counts[identity] = counts.get(identity, 0) + 1
        return counts
