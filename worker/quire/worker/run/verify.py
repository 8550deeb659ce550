"""QUIRE_VERIFY=1: a second record of ownership, from the grants alone; every access of a step is checked against it.

A slot's content is recorded as a digest of the tokens from position 0 up to it, built from the slots that the step
read through its block tables. So a block that was given to another owner, or is shared by a sequence with other
tokens, is found by its content, whenever that happened. A sequence has a table per layer group, and a block is of one
group at a time.

    before a step's copies    a target is a block that the lease was given, and no published one; a host block
                              that is copied back was written for the lease, and not for another since, or is
                              a whole copy of an evicted block; both are of one layer group                   I3 I5
    before its forward        the device's tables and slots are those of the grants; tokens that are not
                              given are those sampled last, as is the one before drafts                       I5
                              a block that was handed to another lease since is not written                   I5
                              a published block, and a slot that another run writes, is not written           I3
                              every position that a group's window shows was not passed, is in a block of the
                              group, was computed, follows from the one before it, and is what the sequence
                              computed or found there before, in any group                               I4 I5 I6
    after it                  drafts are accepted only as far as they are the tokens sampled; the slots of the others
                              were not computed                                                               I6

A grant does not report that a sequence was trimmed, so a table here may end in blocks that another sequence has by
now. Hence a lost block is found when its holder reads it next, and not when it is overwritten. The worker has no
tenants and salts. The digests of a sequence with an adapter begin with that of the adapter.

Where a holder keeps the pool's memory, the records of blocks lie there, too: a slot's is void before a step writes the
slot, and there again when the step was computed. So a later worker checks the blocks that cachemgr carried over.

A block counts as published, until it is reused, if another lease computed the content that a sequence finds in it, or
if a sequence continues after it under a grant that was signed when the step that filled it was known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from torch import Tensor

from quire.cache.v1 import grant_pb2
from quire.worker.grant.decoding import AcceptedStep, adapter_of, num_drafts
from quire.worker.grant.gate import SHOWN_LEASE_ID_LENGTH
from quire.worker.memory.host_pool import HostPool
from quire.worker.memory.kept_pool import KeptPool
from quire.worker.memory.kv_pool import NULL_BLOCK, KVPool
from quire.worker.memory.layer_spec import Causal, Mask
from quire.worker.memory.step_batch import StepBatch
from quire.worker.model.paged_model import PagedModel
from quire.worker.run.executor import Executor, LeaseRows, Outcome, PoolDamagedError, StepResult
from quire.worker.run.graphs import StaticDecode
from quire.worker.run.prompt_graphs import StaticPrompts
from quire.worker.run.ranks import ONE_RANK, OneRank

Holder = tuple[str, int]
"""A lease and a sequence of it."""
NOBODY: Holder = ("", -1)
EARLIER_WORKER = ("", 0)
"""The step that computed content which this process found."""


class OwnershipViolation(Exception):
    """A step would access a block of another sequence. Names the invariant, the block, the lease, sequence and step."""


class SlotContent(NamedTuple):
    """The content of a slot's KV: digests of all tokens before its own, and of all with it."""

    before: bytes
    upto: bytes


BEGINNING = SlotContent(b"", b"")


DIGEST_BYTES = 16
SLOT_BYTES = 1 + 2 * DIGEST_BYTES
"""Of a slot's record in kept memory: 1 if there is one, and both digests."""
EvidenceBytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


class Evidence:
    """The records of blocks in memory that outlives this process."""

    def __init__(self, memory: EvidenceBytes, *, block_size: int) -> None:
        """`memory` is [num_blocks, evidence_bytes(block_size)]."""
        self._groups = memory[:, 0]
        self._slots = memory[:, 1:].reshape(len(memory), block_size, SLOT_BYTES)

    def read(self, block_id: int) -> Block:
        """Return a block as the worker before has left it."""
        slots = [read_slot(record.tobytes()) for record in self._slots[block_id]]
        is_computed = any(slot is not None for slot in slots)
        return Block(slots, group=int(self._groups[block_id]), computed_by=EARLIER_WORKER if is_computed else None)

    def write(self, block_id: int, block: Block) -> None:
        """Keep a block's records."""
        self._groups[block_id] = block.group
        records = b"".join(map(write_slot, block.slots))
        self._slots[block_id] = np.frombuffer(records, np.uint8).reshape(-1, SLOT_BYTES)

    def clear(self) -> None:
        """Forget all blocks."""
        self._slots[:] = 0


def evidence_bytes(block_size: int) -> int:
    """Return the bytes of a block's records."""
    return 1 + block_size * SLOT_BYTES


def read_slot(record: bytes) -> SlotContent | None:
    if not record[0]:
        return None
    before = record[1 : 1 + DIGEST_BYTES]
    return SlotContent(before if any(before) else BEGINNING.upto, record[1 + DIGEST_BYTES :])


def write_slot(slot: SlotContent | None) -> bytes:
    return bytes(SLOT_BYTES) if slot is None else b"\1" + slot.before.ljust(DIGEST_BYTES, b"\0") + slot.upto


@dataclass(slots=True)
class HostBlock:
    """A block of the host tier: the content copied to it last, its layer group, and its lease.

    Any lease may read the copy of a block that was evicted.
    """

    slots: list[SlotContent | None] = field(default_factory=list)
    group: int = 0
    lease_id: str = ""
    was_evicted: bool = False


@dataclass(slots=True)
class Block:
    """A block as the grants and steps so far have left it."""

    slots: list[SlotContent | None]
    given_to: Holder = NOBODY
    """The last holder of the block."""
    group: int = 0
    """The layer group of the table that it was written to last."""
    computed_by: tuple[str, int] | None = None
    """Lease and number of the last step that computed something in it."""
    is_published: bool = False

    def hand_out_anew(self) -> None:
        self.slots = [None] * len(self.slots)
        self.computed_by = None
        self.is_published = False


@dataclass(slots=True)
class HeldSequence:
    """A sequence's blocks by layer group, and the content that it computed or found in them, by position.

    The content is None where no group showed it: before the windows at which a sequence began, found in the cache.
    """

    tables: list[list[int]]
    content: list[SlotContent | None] = field(default_factory=list)
    sampled: tuple[int, int] | None = None
    """Position and id of the token sampled last."""
    untouched: set[int] = field(default_factory=set)
    """Blocks given to it that no step of it has used: it is not known yet if their content is used."""


@dataclass(frozen=True, slots=True)
class GrantedRun:
    """One run of a grant. It computes positions start .. end - 1. Its tokens begin at `offset` of the step's."""

    holder: Holder
    sequence: HeldSequence
    index: int
    start: int
    end: int
    offset: int
    drafts: list[int] = field(default_factory=list)
    adapter: bytes = b""

    @property
    def beginning(self) -> SlotContent:
        """The content before position 0."""
        return SlotContent(b"", blake2b(self.adapter, digest_size=DIGEST_BYTES).digest()) if self.adapter else BEGINNING


def _tokens_by_sequence(result: StepResult) -> dict[int, list[int]]:
    """The tokens that each sequence got in a step."""
    ends = accumulate(result.sampled_counts or [1] * len(result.sampled_ids))
    return {
        seq_id: result.sampled_tokens[start:end]
        for seq_id, (start, end) in zip(result.sampled_ids, pairwise((0, *ends)), strict=True)
    }


class OwnershipVerifier:
    """Follows grants and steps in their order. Methods raise OwnershipViolation; from then on nothing may run.

    Knows no tensors. Cost per step: O(tokens of its sequences).
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        masks: Sequence[Mask] = (Causal(),),
        evidence: Evidence | None = None,
    ) -> None:
        """masks are those of the layer groups. `evidence` has an earlier process's records, and gets the new ones."""
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._num_host_blocks = num_host_blocks
        self._masks = tuple(masks)
        self._evidence = evidence
        self.violation: OwnershipViolation | None = None
        self._begin([evidence.read(block_id) for block_id in range(num_blocks)] if evidence is not None else None)

    def begin_epoch(self) -> None:
        """Drops all records: no block has a holder."""
        if self._evidence is not None:
            self._evidence.clear()
        self._begin(None)

    def _begin(self, blocks: list[Block] | None) -> None:
        self._blocks = blocks or [Block([None] * self._block_size) for _ in range(self._num_blocks)]
        self._host_blocks = [HostBlock() for _ in range(self._num_host_blocks)]
        self._sequences: dict[Holder, HeldSequence] = {}
        self._offloaded: dict[Holder, HeldSequence] = {}
        self._running: list[GrantedRun] = []

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
            content = self._sequences.pop((lease_id, seq_id)).content
            self._offloaded[lease_id, seq_id] = HeldSequence(self._no_tables(), content)
        for parent_id, child_id in zip(grant.fork_parent_ids, grant.fork_child_ids, strict=True):
            parent = self._sequences[lease_id, parent_id]
            self._sequences[lease_id, child_id] = HeldSequence(self._no_tables(), parent.content, parent.sampled)
        for seq_id, group, count in zip(
            grant.passed_sequence_ids, grant.passed_layer_groups, grant.passed_block_counts, strict=True
        ):
            table = self._sequences[lease_id, seq_id].tables[group]
            table[:count] = [NULL_BLOCK] * min(count, len(table))
        self._offload_blocks(grant)
        ids = iter(grant.write_block_ids)
        for index, (seq_id, first, count) in enumerate(
            zip(grant.write_sequence_ids, grant.write_first_indexes, grant.write_block_counts, strict=True)
        ):
            group = grant.write_layer_groups[index] if grant.write_layer_groups else 0
            self._give(grant, (lease_id, seq_id), group, first, [next(ids) for _ in range(count)])
        self._copy_blocks(grant)
        self._keep([*grant.copy_target_block_ids, *grant.restore_target_block_ids])

    def begin_step(
        self,
        grant: grant_pb2.StepGrant,
        *,
        tokens: Sequence[int],
        slots: Sequence[Sequence[int]],
        tables: Sequence[Sequence[list[int]]],
    ) -> None:
        """Checks a step before it runs: `tokens` of all runs, and for each layer group their slots, and a block table
        per run.
        """
        runs = self._runs(grant, tokens)
        groups = range(len(self._masks))
        for run in runs:
            for group in groups:
                self._check_batch(grant, run, group, slots[group], tables[group][run.index])
            self._check_token(grant, run, tokens)
            for group in groups:
                self._note_published(grant, run, group)
                self._check_writable(grant, run, group)
        self._running = runs
        self._forget_written(runs)
        written: set[int] = set()
        for run in sorted(runs, key=lambda run: run.start):  # a run that reads another's content begins after it
            self._write(grant, run, tokens[run.offset : run.offset + run.end - run.start], written)
        for run in runs:
            run.sequence.content = self._read(grant, run)

    def end_step(self, grant: grant_pb2.StepGrant, result: StepResult) -> None:
        """Takes over how the step ended. One that did not compute leaves nothing that counts where it wrote."""
        runs, self._running = self._running, []
        sampled = _tokens_by_sequence(result)
        for run in runs:
            if result.outcome is Outcome.COMPUTED:
                self._note_computed(grant, run)
                self._forget_rejected(grant, run, sampled.get(run.holder[1], []))
            else:
                for position in range(run.start, run.end):
                    self._put(run.sequence, position, None)
        for seq_id, tokens in sampled.items():
            sequence = self._sequences[grant.lease_id, seq_id]
            sequence.sampled = (len(sequence.content), tokens[-1])
        self._keep(self._blocks_written(runs))

    # -- records that outlive this process

    def _keep(self, block_ids: Iterable[int]) -> None:
        if self._evidence is not None:
            for block_id in block_ids:
                self._evidence.write(block_id, self._blocks[block_id])

    def _forget_written(self, runs: list[GrantedRun]) -> None:
        """Void the kept records of the slots that these runs write."""
        if self._evidence is None:
            return
        for run in runs:
            for position in range(run.start, run.end):
                self._put(run.sequence, position, None)
        self._keep(self._blocks_written(runs))

    def _blocks_written(self, runs: list[GrantedRun]) -> set[int]:
        groups = range(len(self._masks))
        return {block_id for run in runs for group in groups for block_id in self._written(run, group)}

    # -- holders

    def _no_tables(self) -> list[list[int]]:
        return [[] for _ in self._masks]

    def _give(self, grant: grant_pb2.StepGrant, holder: Holder, group: int, first: int, block_ids: list[int]) -> None:
        if holder in self._offloaded:
            self._sequences[holder] = self._offloaded.pop(holder)
        sequence = self._sequences.setdefault(holder, HeldSequence(self._no_tables()))
        table = sequence.tables[group]
        table += [NULL_BLOCK] * (first - len(table))  # a windowed group may begin late
        table[first : first + len(block_ids)] = block_ids
        sequence.untouched.update(block_ids)
        for block_id in block_ids:
            if not NULL_BLOCK < block_id < self._num_blocks:
                raise self._violated("I5", grant, holder, block_id, "is not one that can be owned")
            block = self._blocks[block_id]
            block.given_to = holder
            if block.group != group:
                block.hand_out_anew()
                block.group = group

    def _offload_blocks(self, grant: grant_pb2.StepGrant) -> None:
        """Before tables are written: the same grant may hand out an evicted block to another layer group."""
        handed_out = set(grant.write_block_ids)
        for source, host_id in zip(grant.offload_source_block_ids, grant.offload_target_host_block_ids, strict=True):
            host_block = self._host_block(grant, host_id)
            block = self._blocks[source]
            host_block.slots, host_block.group, host_block.lease_id = list(block.slots), block.group, grant.lease_id
            host_block.was_evicted = source in handed_out

    def _copy_blocks(self, grant: grant_pb2.StepGrant) -> None:
        for source, target in zip(grant.copy_source_block_ids, grant.copy_target_block_ids, strict=True):
            self._copy(grant, self._blocks[source], target)
        for host_id, target in zip(grant.restore_source_host_block_ids, grant.restore_target_block_ids, strict=True):
            host_block = self._host_block(grant, host_id)
            is_shared = host_block.was_evicted and None not in host_block.slots
            if host_block.lease_id != grant.lease_id and not is_shared:
                what = f"would be copied from host block {host_id}, which is not this lease's"
                raise self._violated("I5", grant, self._blocks[target].given_to, target, what)
            self._copy(grant, host_block, target)

    def records_of_host_block(self, host_id: int) -> bytes:
        """Return what is known of a host block with a copy of a cached block: see evidence_bytes."""
        host_block = self._host_blocks[host_id]
        return bytes([host_block.group]) + b"".join(map(write_slot, host_block.slots))

    def enter_host_block(self, host_id: int, records: bytes) -> None:
        """A copy of a cached block was read from the disk to a host block, with what was known of it."""
        slots = [read_slot(records[first : first + SLOT_BYTES]) for first in range(1, len(records), SLOT_BYTES)]
        self._host_blocks[host_id] = HostBlock(slots, group=records[0], was_evicted=True)

    def _host_block(self, grant: grant_pb2.StepGrant, host_id: int) -> HostBlock:
        if not 0 <= host_id < self._num_host_blocks:
            raise self._violated("I5", grant, (grant.lease_id, -1), host_id, "is not one of the host tier")
        return self._host_blocks[host_id]

    def _copy(self, grant: grant_pb2.StepGrant, source: Block | HostBlock, target: int) -> None:
        block = self._blocks[target]
        holder = self._sequences.get(block.given_to)
        if holder is None or block.given_to[0] != grant.lease_id:
            raise self._violated("I5", grant, block.given_to, target, "is the target of a copy, and not this lease's")
        if block.is_published and target not in holder.untouched:
            raise self._violated("I3", grant, block.given_to, target, "is the target of a copy, and published")
        if source.group != block.group:
            what = f"is the target of a copy from layer group {source.group}, and one of group {block.group}"
            raise self._violated("I5", grant, block.given_to, target, what)
        holder.untouched.discard(target)
        block.hand_out_anew()
        block.slots = list(source.slots)

    # -- one step

    def _runs(self, grant: grant_pb2.StepGrant, tokens: Sequence[int]) -> list[GrantedRun]:
        runs, offset = [], 0
        for index, (seq_id, start, count) in enumerate(
            zip(grant.run_sequence_ids, grant.run_starts, grant.run_token_counts, strict=True)
        ):
            holder, end = (grant.lease_id, seq_id), offset + count
            drafts = list(tokens[end - num_drafts(grant, index) : end])
            adapter = adapter_of(grant, index)
            run = GrantedRun(holder, self._sequences[holder], index, start, start + count, offset, drafts, adapter)
            runs.append(run)
            offset = end
        return runs

    def _check_token(self, grant: grant_pb2.StepGrant, run: GrantedRun, tokens: Sequence[int]) -> None:
        """Checks that a token which is not given is the one sampled last."""
        is_given = run.index in grant.given_run_indexes and not run.drafts
        if not is_given and run.sequence.sampled != (run.start, tokens[run.offset]):
            block_id = run.sequence.tables[0][run.start // self._block_size]
            raise self._violated("I5", grant, run.holder, block_id, "would get a token that was not sampled last")

    def _check_batch(
        self, grant: grant_pb2.StepGrant, run: GrantedRun, group: int, slots: Sequence[int], table: list[int]
    ) -> None:
        """Checks that the device's inputs for a layer group are those of the grants, and reach over what is read."""
        size, own = self._block_size, run.sequence.tables[group]
        num_blocks = -(-run.end // size)
        for index, (granted, found) in enumerate(zip(own[:num_blocks], table, strict=False)):
            if granted != found:
                raise self._violated("I5", grant, run.holder, found, f"is read as block {index}, which is {granted}")
        if len(own) < num_blocks or len(table) < num_blocks:
            raise self._violated("I5", grant, run.holder, NULL_BLOCK, f"is read beyond the {len(own)} blocks granted")
        for index in range(self._first_read(run, group) // size, num_blocks):
            if own[index] == NULL_BLOCK:
                what = f"is read as block {index} of layer group {group}, which was passed"
                raise self._violated("I5", grant, run.holder, NULL_BLOCK, what)
        for position, slot in zip(range(run.start, run.end), slots[run.offset :], strict=False):
            if slot != own[position // size] * size + position % size:
                raise self._violated("I5", grant, run.holder, slot // size, f"is written for position {position}")

    def _first_read(self, run: GrantedRun, group: int) -> int:
        """The first position that the run's first token sees in a layer group."""
        return self._masks[group].first_visible(run.start)

    def _note_published(self, grant: grant_pb2.StepGrant, run: GrantedRun, group: int) -> None:
        """Records blocks that the run reads and cachemgr has certainly published."""
        size = self._block_size
        for index in range(self._first_read(run, group) // size, -(-run.start // size)):
            block_id = run.sequence.tables[group][index]
            block = self._blocks[block_id]
            run.sequence.untouched.discard(block_id)
            if block.computed_by is None:
                continue
            lease_id, step_number = block.computed_by
            is_behind = run.start >= (index + 1) * size
            is_known = is_behind and step_number <= grant.known_step_number
            block.is_published |= is_known or lease_id != grant.lease_id

    def _check_writable(self, grant: grant_pb2.StepGrant, run: GrantedRun, group: int) -> None:
        for block_id in self._written(run, group):
            block = self._blocks[block_id]
            if block.given_to[0] != grant.lease_id:
                shown = f"{block.given_to[0][:SHOWN_LEASE_ID_LENGTH]} sequence {block.given_to[1]}"
                what = f"was handed to lease {shown} since, and would be written"
                raise self._violated("I5", grant, run.holder, block_id, what)
            if block.group != group:
                what = f"was given to layer group {block.group} since, and would be written in group {group}"
                raise self._violated("I5", grant, run.holder, block_id, what)
            if block_id in run.sequence.untouched:
                run.sequence.untouched.discard(block_id)
                block.hand_out_anew()
            elif block.is_published:
                raise self._violated("I3", grant, run.holder, block_id, "is published, and would be written")

    def _written(self, run: GrantedRun, group: int) -> list[int]:
        """The blocks of a layer group that the run writes."""
        return run.sequence.tables[group][run.start // self._block_size : -(-run.end // self._block_size)]

    def _write(self, grant: grant_pb2.StepGrant, run: GrantedRun, tokens: Sequence[int], written: set[int]) -> None:
        size = self._block_size
        before = self._before(grant, run)
        for position, token in zip(range(run.start, run.end), tokens, strict=True):
            digest = blake2b(before.upto + token.to_bytes(4, "little"), digest_size=16)
            before = SlotContent(before.upto, digest.digest())
            for table in run.sequence.tables:
                slot = table[position // size] * size + position % size
                if slot in written:
                    raise self._violated("I3", grant, run.holder, slot // size, "would be written by two runs")
                written.add(slot)
            self._put(run.sequence, position, before)

    def _before(self, grant: grant_pb2.StepGrant, run: GrantedRun) -> SlotContent:
        """The content of the position before the run, in a group that still has it."""
        if not run.start:
            return run.beginning
        index, offset = divmod(run.start - 1, self._block_size)
        block_ids = [table[index] for table in run.sequence.tables if table[index] != NULL_BLOCK]
        for block_id in block_ids:
            if (slot := self._blocks[block_id].slots[offset]) is not None:
                return slot
        if block_ids:
            raise self._violated("I6", grant, run.holder, block_ids[0], "is read, and was not computed")
        known = run.sequence.content[run.start - 1 : run.start]
        return known[0] or BEGINNING if known else BEGINNING  # no layer sees it

    def _read(self, grant: grant_pb2.StepGrant, run: GrantedRun) -> list[SlotContent | None]:
        """The content that the run attends to in all groups, its own positions included."""
        content = run.sequence.content[: run.start]
        content += [None] * (run.end - len(content))
        for group in range(len(self._masks)):
            first = self._first_read(run, group)
            found = self._slots(grant, run, group, first)
            for position, slot in enumerate(found, first):
                if slot != content[position] and content[position] is not None:
                    raise self._misread("I5", grant, run, group, position, "does not have the content of the sequence")
            for position, slot in enumerate(found, first):
                if slot is None:
                    raise self._misread("I6", grant, run, group, position, "is read, and was not computed")
                before = content[position - 1] if position else run.beginning
                if before is not None and slot.before != before.upto:
                    raise self._misread("I4", grant, run, group, position, "was computed behind other tokens")
                content[position] = slot
        return content

    def _note_computed(self, grant: grant_pb2.StepGrant, run: GrantedRun) -> None:
        for group in range(len(self._masks)):
            for block_id in self._written(run, group):
                self._blocks[block_id].computed_by = (grant.lease_id, grant.step_number)

    def _forget_rejected(self, grant: grant_pb2.StepGrant, run: GrantedRun, sampled: Sequence[int]) -> None:
        """Checks the tokens of a run with drafts, and forgets what it has computed for those that were not accepted."""
        if not run.drafts:
            return
        accepted = list(sampled[:-1])
        if not sampled or accepted != run.drafts[: len(accepted)]:
            block_id = run.sequence.tables[0][run.start // self._block_size]
            raise self._violated(
                "I6", grant, run.holder, block_id, "has drafts accepted that are not the tokens sampled"
            )
        end = run.start + len(sampled)
        for position in range(end, run.end):
            self._put(run.sequence, position, None)
        del run.sequence.content[end:]

    # -- slots

    def _slots(self, grant: grant_pb2.StepGrant, run: GrantedRun, group: int, first: int) -> list[SlotContent | None]:
        """The content of positions first .. run.end - 1 in a layer group."""
        size, found = self._block_size, []
        for position in range(first, run.end):
            block = self._blocks[run.sequence.tables[group][position // size]]
            if block.group != group:
                what = f"was given to layer group {block.group} since, and is read in group {group}"
                raise self._misread("I5", grant, run, group, position, what)
            found.append(block.slots[position % size])
        return found

    def _put(self, sequence: HeldSequence, position: int, content: SlotContent | None) -> None:
        for table in sequence.tables:
            self._blocks[table[position // self._block_size]].slots[position % self._block_size] = content

    # -- violations

    def _misread(
        self, invariant: str, grant: grant_pb2.StepGrant, run: GrantedRun, group: int, position: int, what: str
    ) -> OwnershipViolation:
        block_id = run.sequence.tables[group][position // self._block_size]
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
        prompts: StaticPrompts | None = None,
        host_pool: HostPool | None = None,
        ranks: OneRank = ONE_RANK,
        spins: bool = False,
        kept: KeptPool | None = None,
    ) -> None:
        super().__init__(
            model,
            pool,
            max_num_seqs=max_num_seqs,
            decode=decode,
            prompts=prompts,
            host_pool=host_pool,
            ranks=ranks,
            spins=spins,
            kept=kept,
        )
        self.runs_ahead = False
        self._verifier = OwnershipVerifier(
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            num_host_blocks=self._host_pool.num_blocks,
            masks=[group.mask for group in pool.groups],
            evidence=None if kept is None else Evidence(kept.evidence, block_size=pool.block_size),
        )

    def execute(self, step: AcceptedStep) -> StepResult:
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

    @property
    def host_block_bytes(self) -> int:
        """With the records of the content behind it."""
        return super().host_block_bytes + evidence_bytes(self._pool.block_size)

    def read_host_block(self, block_id: int) -> bytes:
        return super().read_host_block(block_id) + self._verifier.records_of_host_block(block_id)

    def write_host_block(self, block_id: int, content: bytes) -> None:
        size = super().host_block_bytes
        super().write_host_block(block_id, content[:size])
        self._verifier.enter_host_block(block_id, content[size:])

    def _apply(self, lease: LeaseRows, grant: grant_pb2.StepGrant) -> None:
        self._verifier.apply(grant)
        super()._apply(lease, grant)

    def _forward(self, grant: grant_pb2.StepGrant, batch: StepBatch) -> Tensor:
        self._begin_step(grant, batch)
        return super()._forward(grant, batch)

    def _check_whole(self, grant: grant_pb2.StepGrant, decode: StaticDecode) -> None:
        """See Executor._check_whole: of what the device has read and written, because it has made the batch itself."""
        self._begin_step(grant, decode.whole_batch())

    def _begin_step(self, grant: grant_pb2.StepGrant, batch: StepBatch) -> None:
        self._verifier.begin_step(
            grant,
            tokens=batch.input_ids.tolist(),
            slots=batch.slot_mapping.tolist(),
            tables=batch.block_tables.tolist(),
        )

    def _table_digest(self) -> int:
        """Return that of the block tables."""
        return self._table.digest()

    def _raise_violation(self) -> None:
        if self._verifier.violation is not None:
            raise self._verifier.violation
