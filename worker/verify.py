"""QUIRE_VERIFY=1: a second record of ownership, from the grants alone; every access of a step is checked against it.

A slot's content is recorded as a digest of the tokens from position 0 up to it, built from the slots that the step
read through its block table. So a block that was given to another owner, or is shared by a sequence with other
tokens, is found by its content, whenever that happened.

    before a step's copies    a target is a block that the lease was given, and no published one; a host block
                              that is copied back was written for the lease, and not for another since          I3 I5
    before its forward        the device's tables and slots are those of the grants; tokens that are not
                              given are those sampled last                                                    I5
                              a block that was handed to another lease since is not written                   I5
                              a published block, and a slot that another run writes, is not written           I3
                              every position read was computed, follows from the one before it, and is what
                              the sequence computed or found there before                                I4 I5 I6

A grant does not report that a sequence was trimmed, so a table here may end in blocks that another sequence has by
now. Hence a lost block is found when its holder reads it next, and not when it is overwritten. The worker has no
tenants and salts.

A block counts as published, until it is reused, if another lease computed the content that a sequence finds in it, or
if a sequence continues after it under a grant that was signed when the step that filled it was known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from quire.cache.v1 import grant_pb2
from quire.worker.executor import Executor, LeaseRows, Outcome, PoolDamagedError, StepResult
from quire.worker.gate import SHOWN_LEASE_ID_LENGTH
from quire.worker.grants import Step
from quire.worker.graphs import StaticDecode
from quire.worker.host_pool import HostPool
from quire.worker.kv_pool import NULL_BLOCK, KVPool
from quire.worker.model import PagedModel
from quire.worker.ranks import ONE_RANK, OneRank
from quire.worker.step_batch import StepBatch

Holder = tuple[str, int]
"""A lease and a sequence of it."""
NOBODY: Holder = ("", -1)


class OwnershipViolation(Exception):
    """A step would access a block of another sequence. Names the invariant, the block, the lease, sequence and step."""


class Content(NamedTuple):
    """The content of a slot's KV: digests of all tokens before its own, and of all with it."""

    before: bytes
    upto: bytes


BEGINNING = Content(b"", b"")


@dataclass(slots=True)
class HostBlock:
    """A block of the host tier: the content copied to it last, and its lease."""

    slots: list[Content | None] = field(default_factory=list)
    lease_id: str = ""


@dataclass(slots=True)
class Block:
    """A block as the grants and steps so far have left it."""

    slots: list[Content | None]
    given_to: Holder = NOBODY
    """The last holder of the block."""
    computed_by: tuple[str, int] | None = None
    """Lease and number of the last step that computed something in it."""
    is_published: bool = False

    def hand_out_anew(self) -> None:
        self.slots = [None] * len(self.slots)
        self.computed_by = None
        self.is_published = False


@dataclass(slots=True)
class HeldSequence:
    """A sequence's blocks, and the content that it computed or found in them, by position."""

    table: list[int] = field(default_factory=list)
    content: list[Content] = field(default_factory=list)
    sampled: tuple[int, int] | None = None
    """Position and id of the token sampled last."""
    untouched: set[int] = field(default_factory=set)
    """Blocks given to it that no step of it has used: it is not known yet if their content is used."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a grant. It computes positions start .. end - 1. Its tokens begin at `offset` of the step's."""

    holder: Holder
    sequence: HeldSequence
    index: int
    start: int
    end: int
    offset: int


class OwnershipVerifier:
    """Follows grants and steps in their order. Methods raise OwnershipViolation; from then on nothing may run.

    Knows no tensors. Cost per step: O(tokens of its sequences).
    """

    def __init__(self, *, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._num_host_blocks = num_host_blocks
        self.violation: OwnershipViolation | None = None
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Drops all records: no block has a holder."""
        self._blocks = [Block([None] * self._block_size) for _ in range(self._num_blocks)]
        self._host_blocks = [HostBlock() for _ in range(self._num_host_blocks)]
        self._sequences: dict[Holder, HeldSequence] = {}
        self._offloaded: dict[Holder, HeldSequence] = {}
        self._running: list[Run] = []

    def fence_lease(self, lease_id: str) -> None:
        """Forgets a lease's sequences."""
        for sequences in (self._sequences, self._offloaded):
            for holder in [holder for holder in sequences if holder[0] == lease_id]:
                del sequences[holder]

    def apply(self, grant: grant_pb2.StepGrant) -> None:
        """Applies a grant's ownership changes. Raises KeyError for an unknown sequence."""
        if self.violation is not None:
            raise self.violation
        lease_id = grant.lease_id
        for seq_id in grant.released_sequence_ids:
            holder = (lease_id, seq_id)
            del (self._offloaded if holder in self._offloaded else self._sequences)[holder]
        for seq_id in grant.offloaded_sequence_ids:
            self._offloaded[lease_id, seq_id] = HeldSequence(content=self._sequences.pop((lease_id, seq_id)).content)
        for parent_id, child_id in zip(grant.fork_parent_ids, grant.fork_child_ids, strict=True):
            parent = self._sequences[lease_id, parent_id]
            self._sequences[lease_id, child_id] = HeldSequence(content=parent.content, sampled=parent.sampled)
        ids = iter(grant.write_block_ids)
        for seq_id, first, count in zip(
            grant.write_sequence_ids, grant.write_first_indexes, grant.write_block_counts, strict=True
        ):
            self._give(grant, (lease_id, seq_id), first, [next(ids) for _ in range(count)])
        self._copy_blocks(grant)

    def begin_step(
        self, grant: grant_pb2.StepGrant, *, tokens: Sequence[int], slots: Sequence[int], tables: Sequence[list[int]]
    ) -> None:
        """Checks a step before it runs: `tokens` and `slots` of all runs, and a block table per run."""
        runs = self._runs(grant)
        for run in runs:
            self._check_batch(grant, run, tokens, slots, tables[run.index])
            self._note_published(grant, run)
            self._check_writable(grant, run)
        self._running = runs
        written: set[int] = set()
        for run in sorted(runs, key=lambda run: run.start):  # a run that reads another's content begins after it
            self._write(grant, run, tokens[run.offset : run.offset + run.end - run.start], written)
        for run in runs:
            run.sequence.content = self._read(grant, run)

    def end_step(self, grant: grant_pb2.StepGrant, result: StepResult) -> None:
        """Takes over how the step ended. One that did not compute leaves nothing that counts where it wrote."""
        runs, self._running = self._running, []
        for run in runs:
            if result.outcome is Outcome.COMPUTED:
                self._note_computed(grant, run)
            else:
                for position in range(run.start, run.end):
                    self._put(run.sequence, position, None)
        for seq_id, token in zip(result.sampled_ids, result.sampled_tokens, strict=True):
            sequence = self._sequences[grant.lease_id, seq_id]
            sequence.sampled = (len(sequence.content), token)

    # -- holders

    def _give(self, grant: grant_pb2.StepGrant, holder: Holder, first: int, block_ids: list[int]) -> None:
        if holder in self._offloaded:
            self._sequences[holder] = self._offloaded.pop(holder)
        sequence = self._sequences.setdefault(holder, HeldSequence())
        sequence.table[first : first + len(block_ids)] = block_ids
        sequence.untouched.update(block_ids)
        for block_id in block_ids:
            if not NULL_BLOCK < block_id < self._num_blocks:
                raise self._violated("I5", grant, holder, block_id, "is not one that can be owned")
            self._blocks[block_id].given_to = holder

    def _copy_blocks(self, grant: grant_pb2.StepGrant) -> None:
        for source, host_id in zip(grant.offload_source_block_ids, grant.offload_target_host_block_ids, strict=True):
            host_block = self._host_block(grant, host_id)
            host_block.slots, host_block.lease_id = list(self._blocks[source].slots), grant.lease_id
        for source, target in zip(grant.copy_source_block_ids, grant.copy_target_block_ids, strict=True):
            self._copy(grant, self._blocks[source].slots, target)
        for host_id, target in zip(grant.restore_source_host_block_ids, grant.restore_target_block_ids, strict=True):
            host_block = self._host_block(grant, host_id)
            if host_block.lease_id != grant.lease_id:
                what = f"would be copied from host block {host_id}, which is not this lease's"
                raise self._violated("I5", grant, self._blocks[target].given_to, target, what)
            self._copy(grant, host_block.slots, target)

    def _host_block(self, grant: grant_pb2.StepGrant, host_id: int) -> HostBlock:
        if not 0 <= host_id < self._num_host_blocks:
            raise self._violated("I5", grant, (grant.lease_id, -1), host_id, "is not one of the host tier")
        return self._host_blocks[host_id]

    def _copy(self, grant: grant_pb2.StepGrant, slots: list[Content | None], target: int) -> None:
        block = self._blocks[target]
        holder = self._sequences.get(block.given_to)
        if holder is None or block.given_to[0] != grant.lease_id:
            raise self._violated("I5", grant, block.given_to, target, "is the target of a copy, and not this lease's")
        if block.is_published and target not in holder.untouched:
            raise self._violated("I3", grant, block.given_to, target, "is the target of a copy, and published")
        holder.untouched.discard(target)
        block.hand_out_anew()
        block.slots = list(slots)

    # -- one step

    def _runs(self, grant: grant_pb2.StepGrant) -> list[Run]:
        runs, offset = [], 0
        for index, (seq_id, start, count) in enumerate(
            zip(grant.run_sequence_ids, grant.run_starts, grant.run_token_counts, strict=True)
        ):
            holder = (grant.lease_id, seq_id)
            runs.append(Run(holder, self._sequences[holder], index, start, start + count, offset))
            offset += count
        return runs

    def _check_batch(
        self, grant: grant_pb2.StepGrant, run: Run, tokens: Sequence[int], slots: Sequence[int], table: list[int]
    ) -> None:
        """Checks that the device's inputs are those of the grants."""
        size, own = self._block_size, run.sequence.table
        num_blocks = -(-run.end // size)
        for index, (granted, found) in enumerate(zip(own[:num_blocks], table, strict=False)):
            if granted != found:
                raise self._violated("I5", grant, run.holder, found, f"is read as block {index}, which is {granted}")
        if len(own) < num_blocks or len(table) < num_blocks:
            raise self._violated("I5", grant, run.holder, NULL_BLOCK, f"is read beyond the {len(own)} blocks granted")
        for position, slot in zip(range(run.start, run.end), slots[run.offset :], strict=False):
            if slot != own[position // size] * size + position % size:
                raise self._violated("I5", grant, run.holder, slot // size, f"is written for position {position}")
        if run.index not in grant.given_run_indexes and run.sequence.sampled != (run.start, tokens[run.offset]):
            block_id = own[run.start // size]
            raise self._violated("I5", grant, run.holder, block_id, "would get a token that was not sampled last")

    def _note_published(self, grant: grant_pb2.StepGrant, run: Run) -> None:
        """Records blocks that the run reads and cachemgr has certainly published."""
        for index, block_id in enumerate(run.sequence.table[: -(-run.start // self._block_size)]):
            block = self._blocks[block_id]
            run.sequence.untouched.discard(block_id)
            if block.computed_by is None:
                continue
            lease_id, step_number = block.computed_by
            is_behind = run.start >= (index + 1) * self._block_size
            is_known = is_behind and step_number <= grant.known_step_number
            block.is_published |= is_known or lease_id != grant.lease_id

    def _check_writable(self, grant: grant_pb2.StepGrant, run: Run) -> None:
        size = self._block_size
        for block_id in run.sequence.table[run.start // size : -(-run.end // size)]:
            block = self._blocks[block_id]
            if block.given_to[0] != grant.lease_id:
                shown = f"{block.given_to[0][:SHOWN_LEASE_ID_LENGTH]} sequence {block.given_to[1]}"
                what = f"was handed to lease {shown} since, and would be written"
                raise self._violated("I5", grant, run.holder, block_id, what)
            if block_id in run.sequence.untouched:
                run.sequence.untouched.discard(block_id)
                block.hand_out_anew()
            elif block.is_published:
                raise self._violated("I3", grant, run.holder, block_id, "is published, and would be written")

    def _write(self, grant: grant_pb2.StepGrant, run: Run, tokens: Sequence[int], written: set[int]) -> None:
        size, table = self._block_size, run.sequence.table
        before = self._slot(run.sequence, run.start - 1) if run.start else BEGINNING
        if before is None:
            block_id = table[(run.start - 1) // size]
            raise self._violated("I6", grant, run.holder, block_id, "is read, and was not computed")
        for position, token in zip(range(run.start, run.end), tokens, strict=True):
            slot = table[position // size] * size + position % size
            if slot in written:
                raise self._violated("I3", grant, run.holder, slot // size, "would be written by two runs")
            written.add(slot)
            digest = blake2b(before.upto + token.to_bytes(4, "little"), digest_size=16)
            before = Content(before.upto, digest.digest())
            self._put(run.sequence, position, before)

    def _read(self, grant: grant_pb2.StepGrant, run: Run) -> list[Content]:
        """The content that the run attends to, its own positions included."""
        found = list(self._slots(run.sequence, run.end))
        content = run.sequence.content[: run.start]
        for position, (slot, expected) in enumerate(zip(found, content, strict=False)):
            if slot != expected:
                raise self._misread("I5", grant, run, position, "does not have the content of the sequence")
        read = []
        for position, slot in enumerate(found):
            if slot is None:
                raise self._misread("I6", grant, run, position, "is read, and was not computed")
            read.append(slot)
        for position, (before, slot) in enumerate(pairwise([BEGINNING, *read])):
            if slot.before != before.upto:
                raise self._misread("I4", grant, run, position, "was computed behind other tokens")
        return read

    def _note_computed(self, grant: grant_pb2.StepGrant, run: Run) -> None:
        size = self._block_size
        for block_id in run.sequence.table[run.start // size : -(-run.end // size)]:
            self._blocks[block_id].computed_by = (grant.lease_id, grant.step_number)

    # -- slots

    def _slots(self, sequence: HeldSequence, end: int) -> Iterator[Content | None]:
        for block_id in sequence.table[: -(-end // self._block_size)]:
            yield from self._blocks[block_id].slots[:end]
            end -= self._block_size

    def _slot(self, sequence: HeldSequence, position: int) -> Content | None:
        return self._blocks[sequence.table[position // self._block_size]].slots[position % self._block_size]

    def _put(self, sequence: HeldSequence, position: int, content: Content | None) -> None:
        block = self._blocks[sequence.table[position // self._block_size]]
        block.slots[position % self._block_size] = content

    # -- violations

    def _misread(
        self, invariant: str, grant: grant_pb2.StepGrant, run: Run, position: int, what: str
    ) -> OwnershipViolation:
        block_id = run.sequence.table[position // self._block_size]
        return self._violated(invariant, grant, run.holder, block_id, f"{what} (position {position})")

    def _violated(
        self, invariant: str, grant: grant_pb2.StepGrant, holder: Holder, block_id: int, what: str
    ) -> OwnershipViolation:
        lease_id = grant.lease_id[:SHOWN_LEASE_ID_LENGTH]
        message = (
            f"{invariant} violated: block {block_id} {what}; "
            f"lease {lease_id} sequence {holder[1]} step {grant.step_number}"
        )
        self.violation = OwnershipViolation(message)
        return self.violation


class VerifyingExecutor(Executor):
    """An Executor that refuses a step with OwnershipViolation before it accesses blocks of other sequences, and each
    step after it. Waits for the device in every step: the sampled tokens are compared with the next step's."""

    def __init__(
        self,
        model: PagedModel,
        pool: KVPool,
        *,
        max_num_seqs: int,
        decode: StaticDecode | None = None,
        host_pool: HostPool | None = None,
        ranks: OneRank = ONE_RANK,
    ) -> None:
        super().__init__(model, pool, max_num_seqs=max_num_seqs, decode=decode, host_pool=host_pool, ranks=ranks)
        self.runs_ahead = False
        self._verifier = OwnershipVerifier(
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            num_host_blocks=self._host_pool.num_blocks,
        )

    def execute(self, step: Step) -> StepResult:
        """See Executor.execute. Raises OwnershipViolation."""
        try:
            result = super().execute(step)
        except PoolDamagedError:
            self._raise_violation()
            raise
        self._raise_violation()
        self._verifier.end_step(step.grant, result)
        return result

    def fence_lease(self, lease_id: str) -> None:
        super().fence_lease(lease_id)
        self._verifier.fence_lease(lease_id)

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self._verifier.begin_epoch()

    def _apply(self, lease: LeaseRows, grant: grant_pb2.StepGrant) -> None:
        self._verifier.apply(grant)
        super()._apply(lease, grant)

    def _forward(self, grant: grant_pb2.StepGrant, batch: StepBatch) -> Tensor:
        self._verifier.begin_step(
            grant,
            tokens=batch.input_ids.tolist(),
            slots=batch.slot_mapping.tolist(),
            tables=batch.block_tables.tolist(),
        )
        return super()._forward(grant, batch)

    def _table_digest(self) -> int:
        """Return that of the block tables."""
        return self._table.digest()

    def _raise_violation(self) -> None:
        if self._verifier.violation is not None:
            raise self._verifier.violation
