"""The scheduler against a model of both servers in plain Python: every request ends with the tokens it should have.

The model of cachemgr counts references, copies on write, keeps released blocks retired until the steps in flight have
ended, and finds prefixes. The model of the worker keeps the tokens that each sequence has computed and refuses a run
that does not continue them, so a token scheduled twice, left out or taken from another sequence fails the test.
"""

import itertools
import random
import zlib
from collections import abc, deque
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cache.v1.layer_spans import LayerGroupKind
from quire.client.engine.caching import Breakpoint, CacheOutcome, CacheParams, CacheUse
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.scheduling.fairness import divide
from quire.client.engine.scheduling.layer_groups import FULL, BlockTables, LayerGroup
from quire.client.engine.scheduling.new_sequences import new_samples
from quire.client.engine.scheduling.planning import _MAX_WAITS_FOR_PREFIX
from quire.client.engine.scheduling.plans import (
    Admission,
    Blocks,
    GrantedStep,
    Plan,
    PlanItem,
    Refusal,
    SchedulerLimits,
    StepInFlight,
)
from quire.client.engine.scheduling.policy import Policy, PoolView, PriorityPolicy
from quire.client.engine.scheduling.room import Pressure as PressureNow
from quire.client.engine.scheduling.scheduler import Scheduler
from quire.client.engine.scheduling.sequence import FinishReason, Sequence, SequenceState
from quire.client.engine.speculative import SpeculativeConfig
from quire.client.errors import InvalidRequest, OutOfRoom, ProtocolViolation, QuireError, StepFailed, error_of_reason

VOCABULARY = 7
END_TOKEN = 6
COPYING = 100
SLIDING = LayerGroup(LayerGroupKind.SLIDING, 5)
CHUNKED = LayerGroup(LayerGroupKind.CHUNKED, 6)


def next_token(tokens: list[int], seed: int) -> int:
    """The model's next token: depends on every token and on the seed. From COPYING on a seed often copies."""
    drawn = zlib.crc32(bytes(tokens) + seed.to_bytes(8, "little"))
    if seed >= COPYING and len(tokens) > 3 and drawn % 8:
        return tokens[-3]
    return drawn % VOCABULARY


def expected_output(prompt: list[int], *, seed: int, max_tokens: int, ends: set[int]) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens, seed))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


@dataclass
class Held:
    """A sequence in the model of cachemgr; a token being sampled is None.

    tables    by layer group, blocks by their index
    sampled   position of the token that the worker has sampled last, and needs from no client
    is_busy   a step with drafts of it is not settled
    """

    tokens: list[int | None]
    tables: list[dict[int, int]]
    num_scheduled: int = 0
    num_computed: int = 0
    sampled: int | None = None
    is_busy: bool = False

    @property
    def num_known(self) -> int:
        return next((i for i, token in enumerate(self.tokens) if token is None), len(self.tokens))

    @property
    def blocks(self) -> list[int]:
        return [block for table in self.tables for block in table.values()]


@dataclass
class Pending:
    """A step planned and not ended: how to undo and settle it."""

    number: int
    settled: int
    runs: list[tuple[int, Held, int, int, bool]] = field(default_factory=list)
    forked: list[tuple[int, int, int]] = field(default_factory=list)
    admitted: dict[int, list[int]] = field(default_factory=dict)
    released: list[int] = field(default_factory=list)
    offloaded: list[int] = field(default_factory=list)
    restored: dict[int, int] = field(default_factory=dict)
    pinned: list[int] = field(default_factory=list)
    drafts: abc.Mapping[int, abc.Sequence[int]] = field(default_factory=dict)


class ModelCache:
    """cachemgr, slow and obvious."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        groups: abc.Sequence[LayerGroup] = (),
    ) -> None:
        self.block_size = block_size
        self.groups = groups or (FULL,)
        self.num_host_blocks = num_host_blocks
        self.host: dict[int, tuple[Held, int]] = {}
        self.refuses_offloads = False
        self.num_blocks = num_blocks
        self.references = dict.fromkeys(range(1, num_blocks + 1), 0)
        self.pins = dict.fromkeys(range(1, num_blocks + 1), 0)
        self.content: dict[int, tuple[int, tuple[int, ...]]] = {}  # a group, and all tokens up to the block's end
        self.held: dict[int, Held] = {}
        self.steps: deque[Pending] = deque()
        self.number = self.settled = 0
        self.hogged = 0
        self.promised = 0
        self.limit = num_blocks
        self.refuses_forks = False
        self.num_computed_elsewhere = 0
        self.num_busy = 0  # refusals of runs behind drafts

    def allocatable(self) -> list[int]:
        free = [b for b in self.references if not self.references[b] and not self.pins[b]]
        return sorted(free, key=lambda b: b in self.content)[: max(0, len(free) - self.hogged)]

    def blocks(self) -> Blocks:
        free = self.allocatable()
        cached = sum(b in self.content for b in free)
        active = sum(map(bool, self.references.values()))
        return Blocks(len(free) - cached, cached, active, self.num_blocks - len(free) - active - self.hogged)

    def room(self) -> int:
        """Blocks that the client could take: what others were promised and what its tenant may not hold are not."""
        num_held = sum(bool(self.references[b] or self.pins[b]) for b in self.references)
        return min(len(self.allocatable()) - self.promised, self.limit - num_held)

    def take(self, count: int) -> list[int]:
        taken = self.allocatable()[:count]
        for block in taken:
            self.content.pop(block, None)
            self.references[block] = 1
        return taken

    def let_go(self, blocks: list[int]) -> None:
        for block in blocks:
            self.references[block] -= 1
            if self.steps:
                self.pins[block] += 1
                self.steps[-1].pinned.append(block)

    def first_needed(self, group: LayerGroup, position: int) -> int:
        """The index of the first block that a token at a position sees."""
        return group.first_seen(position) // self.block_size

    def first_kept(self, group: LayerGroup, held: Held) -> int:
        """The same for the last computed token, which may be computed again."""
        return self.first_needed(group, max(0, held.num_computed - 1))

    def pass_windows(self) -> None:
        for held in self.held.values():
            for group, table in zip(self.groups, held.tables, strict=True):
                passed = [index for index in table if index < self.first_kept(group, held)]
                self.let_go([table.pop(index) for index in passed])

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def end_of(self, group: LayerGroup, num_tokens: int, num_scheduled: int) -> int:
        """The index after the last block of a table: a windowed one has none for tokens that wait."""
        return self.blocks_for(num_tokens if group is FULL else num_scheduled)

    def out_of_blocks(self, item: PlanItem, seq_id: int, needed: int, num_found: int = 0) -> Refusal:
        """num_found: cached blocks that it would hold besides."""
        if self.limit < self.num_blocks:
            numbers = {"needed": needed + num_found, "held": self.limit - self.room(), "limit": self.limit}
            metadata = {name: str(number) for name, number in numbers.items()}
            return Refusal(item, seq_id, OutOfRoom("full", reason="QUOTA_EXCEEDED", metadata=metadata))
        metadata = {"needed": str(needed), "free": str(self.room() - num_found), "retired": str(self.blocks().retired)}
        return Refusal(item, seq_id, OutOfRoom("full", metadata=metadata))

    def num_free_host_blocks(self) -> int:
        return self.num_host_blocks - sum(count for _, count in self.host.values())

    def offload(self, step: Pending, seq_id: int) -> Refusal | None:
        held = self.held[seq_id]
        tables = [range(self.first_kept(g, held), self.blocks_for(held.num_scheduled)) for g in self.groups]
        count = max(1, sum(map(len, tables)))
        if held.is_busy:
            return Refusal(PlanItem.OFFLOAD, seq_id, error_of_reason("SEQUENCE_BUSY", ""))
        if self.refuses_offloads or count > self.num_free_host_blocks():
            return Refusal(PlanItem.OFFLOAD, seq_id, error_of_reason("OUT_OF_HOST_BLOCKS", ""))
        self.host[seq_id] = self.held.pop(seq_id), count
        for block in held.blocks:
            self.references[block] -= 1
            self.pins[block] += 1
        step.pinned += held.blocks
        held.tables = [dict.fromkeys(indexes, 0) for indexes in tables]
        step.offloaded.append(seq_id)
        return None

    def restore(self, step: Pending, seq_id: int, reserve: int, budget: int) -> Refusal | None:
        held, _ = self.host[seq_id]
        count = min(budget, len(held.tokens) - held.num_scheduled)
        if None in held.tokens:
            return Refusal(PlanItem.RESTORE, seq_id, error_of_reason("SEQUENCE_BUSY", ""))
        ends = [self.end_of(group, len(held.tokens), held.num_scheduled + count) for group in self.groups]
        tables = [range(self.first_kept(g, held), end) for g, end in zip(self.groups, ends, strict=True)]
        fresh = sum(map(len, tables))
        needed = fresh + (reserve if self.limit == self.num_blocks else 0)
        if needed > self.room():
            return self.out_of_blocks(PlanItem.RESTORE, seq_id, needed)
        del self.host[seq_id]
        self.held[seq_id] = held
        held.sampled = None
        held.tables = [dict(zip(indexes, self.take(len(indexes)), strict=True)) for indexes in tables]
        step.restored[seq_id] = held.num_scheduled
        return None

    def plan(self, plan: Plan) -> GrantedStep:
        self.number += 1
        step = Pending(self.number, self.settled, drafts=plan.drafts)
        refusals: list[Refusal] = []
        given: list[int] = []
        for seq_id in plan.release_ids:
            if (held := self.held.pop(seq_id, None)) is not None:
                self.let_go(held.blocks)
                step.released.append(seq_id)
            elif self.host.pop(seq_id, None) is not None:
                step.released.append(seq_id)
        self.pass_windows()
        for seq_id in plan.offload_ids:
            refusal = self.offload(step, seq_id)
            refusals += [refusal] if refusal else []
        for seq_id, num_kept in plan.trims.items():
            held = self.held[seq_id]
            assert 1 <= num_kept <= len(held.tokens), "keeps what is not there"
            del held.tokens[num_kept:]
            held.sampled = None
            for table in held.tables:
                self.let_go([table.pop(index) for index in list(table) if index >= self.blocks_for(num_kept)])
        for fork in plan.forks:
            for child_id in fork.child_ids:
                if self.refuses_forks:
                    error = error_of_reason("TOO_MANY_SEQUENCES", "")
                    refusals.append(Refusal(PlanItem.FORK, child_id, error))
                    continue
                parent = self.held.get(fork.parent_id)
                if parent is None:
                    refusals.append(Refusal(PlanItem.FORK, child_id, error_of_reason("SEQUENCE_NOT_FOUND", "")))
                    continue
                if parent.is_busy:
                    refusals.append(Refusal(PlanItem.FORK, child_id, error_of_reason("SEQUENCE_BUSY", "")))
                    continue
                num_scheduled = min(fork.num_tokens - 1, parent.num_scheduled)
                child = Held(parent.tokens[: fork.num_tokens], [], num_scheduled)
                child.num_computed = min(num_scheduled, parent.num_computed)
                for group, table in zip(self.groups, parent.tables, strict=True):
                    first, end = self.first_needed(group, num_scheduled), self.blocks_for(fork.num_tokens)
                    child.tables.append({index: block for index, block in table.items() if first <= index < end})
                    if not child.tables[-1].keys() >= set(range(first, self.blocks_for(num_scheduled))):
                        error = error_of_reason("POSITION_OUT_OF_RANGE", "")
                        refusals.append(Refusal(PlanItem.FORK, child_id, error))
                        break
                else:
                    self.held[child_id] = child
                if child_id not in self.held:
                    continue
                for block in child.blocks:
                    self.references[block] += 1
                step.forked.append((fork.parent_id, child_id, fork.num_tokens))
        for seq_id, count in zip(plan.extend_ids, plan.extend_counts, strict=True):
            refusal = self.extend(step, seq_id, count, given, plan.appended.get(seq_id, ()))
            refusals += [refusal] if refusal else []
        budget = plan.admission_token_budget or 10**9
        for seq_id in plan.restore_ids:
            if budget <= 0:
                refusals.append(Refusal(PlanItem.RESTORE, seq_id, error_of_reason("TOKEN_BUDGET_SPENT", "")))
                continue
            refusal = self.restore(step, seq_id, plan.admission_reserve_blocks, budget)
            if refusal is not None:
                refusals.append(refusal)
                continue
            count = min(budget, len(self.held[seq_id].tokens) - step.restored[seq_id])
            budget -= count
            if count:
                self.extend(step, seq_id, count, given)
        outcomes: list[CacheOutcome] = []
        for admission in plan.admissions:
            if budget <= 0:
                error = error_of_reason("TOKEN_BUDGET_SPENT", "")
                refusals.append(Refusal(PlanItem.ADMISSION, admission.seq_id, error))
                continue
            if admission.waits_for_prefix and self.num_computed_elsewhere:
                self.num_computed_elsewhere -= 1
                error = error_of_reason("PREFIX_BEING_COMPUTED", "")
                refusals.append(Refusal(PlanItem.ADMISSION, admission.seq_id, error))
                continue
            tokens = list(admission.token_ids)
            cached, found = self.find(tokens)
            count = min(budget, len(tokens) - cached)
            ends = [self.end_of(group, len(tokens), cached + count) for group in self.groups]
            fresh = sum(ends) - len(ends) * (cached // self.block_size)
            reused = [block for table in found for block in table.values()]
            evictable = sum(not self.references[b] for b in reused)
            # A tenant's limit knows no reserve.
            needed = fresh + (plan.admission_reserve_blocks if self.limit == self.num_blocks else 0)
            if needed > self.room() - evictable:
                refusals.append(self.out_of_blocks(PlanItem.ADMISSION, admission.seq_id, needed, evictable))
                continue
            for block in reused:
                self.references[block] += 1
            for end, table in zip(ends, found, strict=True):
                indexes = range(cached // self.block_size, end)
                table.update(zip(indexes, self.take(len(indexes)), strict=True))
            self.held[admission.seq_id] = Held(list(tokens), found, cached, cached)
            step.admitted[admission.seq_id] = tokens[:cached]
            outcomes.append(CacheOutcome(cached))
            budget -= count
            self.extend(step, admission.seq_id, count, given)
        self.steps.append(step)
        return GrantedStep(
            step_number=step.number,
            run_ids=[run[0] for run in step.runs],
            run_starts=[run[2] for run in step.runs],
            run_counts=[run[3] for run in step.runs],
            given_run_indexes=given,
            refusals=refusals,
            admitted_ids=list(step.admitted),
            outcomes=outcomes,
            blocks=self.blocks(),
            restored_ids=list(step.restored),
            restored_counts=list(step.restored.values()),
            num_free_host_blocks=self.num_free_host_blocks(),
        )

    def find(self, tokens: list[int]) -> tuple[int, list[dict[int, int]]]:
        """The longest prefix of which each group has what the token after it sees, and its tables."""
        blocks = {key: block for block, key in self.content.items() if not self.pins[block]}
        for num_found in range((len(tokens) - 1) // self.block_size * self.block_size, 0, -self.block_size):
            tables: list[dict[int, int]] = []
            for number, group in enumerate(self.groups):
                indexes = range(self.first_needed(group, num_found), num_found // self.block_size)
                ends = {index: (index + 1) * self.block_size for index in indexes}
                found = {index: blocks.get((number, tuple(tokens[:end]))) for index, end in ends.items()}
                tables.append({index: block for index, block in found.items() if block is not None})
                if len(tables[-1]) < len(indexes):
                    break
            else:
                return num_found, tables
        return 0, [{} for _ in self.groups]

    def extend(
        self, step: Pending, seq_id: int, count: int, given: list[int], appended: abc.Sequence[int] = ()
    ) -> Refusal | None:
        held = self.held.get(seq_id)
        if held is None:
            return Refusal(PlanItem.EXTEND, seq_id, error_of_reason("SEQUENCE_NOT_FOUND", ""))
        if held.is_busy:
            self.num_busy += 1
            return Refusal(PlanItem.EXTEND, seq_id, error_of_reason("SEQUENCE_BUSY", ""))
        start, end = held.num_scheduled, held.num_scheduled + count
        if num_drafts := len(step.drafts.get(seq_id, ())):
            assert None not in held.tokens[:-1], "a token before the last one is not known"
            assert (held.num_scheduled, count) == (len(held.tokens) - 1, 1 + num_drafts)
            assert not appended
        num_tokens = len(held.tokens) + len(appended) + num_drafts
        assert not appended or None not in held.tokens, "appends to a token that is being sampled"
        assert end <= num_tokens, "computes what is neither known nor being sampled"
        if end > BlockTables(self.block_size, self.groups).max_tokens(self.num_blocks, at_most=end):
            return Refusal(PlanItem.EXTEND, seq_id, error_of_reason("SEQUENCE_TOO_LONG", ""))
        self.check_seen(held)
        writes: list[tuple[dict[int, int], int]] = []
        for group, table in zip(self.groups, held.tables, strict=True):
            stop = self.end_of(group, max(end, num_tokens if appended else 0), end)
            written = range(start // self.block_size, self.blocks_for(end))
            indexes = range(start // self.block_size, stop)
            writes += [
                (table, index)
                for index in indexes
                if index not in table or (index in written and self.is_foreign(table[index]))
            ]
        if len(writes) > self.room():
            return self.out_of_blocks(PlanItem.EXTEND, seq_id, len(writes))
        for table, index in writes:
            old = table.get(index)
            (table[index],) = self.take(1)
            self.let_go([] if old is None else [old])
        held.tokens += appended
        if num_drafts or (None not in held.tokens[start:end] and (start, count) != (held.sampled, 1)):
            given.append(len(step.runs))
        held.is_busy = bool(num_drafts)
        end -= num_drafts
        samples = end == len(held.tokens)
        step.runs.append((seq_id, held, start, count, samples))
        held.num_scheduled = end
        if samples:
            held.sampled = len(held.tokens)
            held.tokens.append(None)
        return None

    def check_seen(self, held: Held) -> None:
        for group, table in zip(self.groups, held.tables, strict=True):
            seen = range(self.first_needed(group, held.num_scheduled), self.blocks_for(held.num_scheduled))
            assert table.keys() >= set(seen), "a token sees a block that was let go"

    def is_foreign(self, block: int) -> bool:
        return self.references[block] > 1 or block in self.content

    def settle(self, sampled: dict[int, list[int]] | None, *, is_first_failure: bool) -> None:
        """The oldest step has ended, with these tokens or having computed nothing.

        A failure takes those in flight behind it along: their sequences are where they were before it.
        """
        step = self.steps.popleft()
        self.settled = step.number
        for failed in (step, *self.steps) if is_first_failure else ():
            for _, held, start, _, _ in failed.runs:
                held.num_scheduled = min(held.num_scheduled, start)
                del held.tokens[held.num_known :]
                held.sampled = None
                held.is_busy = False
        for block in step.pinned:
            self.pins[block] -= 1
        for seq_id, held, start, count, samples in step.runs:
            if sampled is None:
                continue
            if seq_id in step.drafts:
                count = len(sampled[seq_id])
                held.num_scheduled = start + count
                held.sampled = held.num_scheduled
                held.is_busy = False
            if samples:
                unknown = held.tokens.index(None)
                held.tokens[unknown : unknown + 1] = sampled[seq_id]
            held.num_computed = start + count
            if self.held.get(seq_id) is not held:
                continue
            for number, table in enumerate(held.tables):
                for index in [index for index in table if (index + 1) * self.block_size <= start + count]:
                    tokens = held.tokens[: (index + 1) * self.block_size]
                    key = number, tuple(token for token in tokens if token is not None)
                    if key not in self.content.values():
                        self.content[table[index]] = key


class ModelWorker:
    """The worker: what each sequence has computed, and the token it sampled last."""

    def __init__(self) -> None:
        self.computed: dict[int, list[int]] = {}
        self.host: dict[int, list[int]] = {}
        self.last: dict[int, int] = {}
        self.seeds: dict[int, int] = {}
        self.failed_step = 0

    def run(
        self, pending: Pending, step: StepInFlight, inputs: dict[int, list[int]], *, breaks: bool
    ) -> dict[int, list[int]] | None:
        """Return the sampled tokens, None if the step computed nothing. A void step is sent to be skipped."""
        for seq_id in pending.released:
            self.computed.pop(seq_id, None)
            self.host.pop(seq_id, None)
        for seq_id in pending.offloaded:
            self.host[seq_id] = self.computed.pop(seq_id)
            self.last.pop(seq_id, None)
        for seq_id, num_tokens in pending.restored.items():
            self.computed[seq_id] = self.host.pop(seq_id)[:num_tokens]
        for parent_id, child_id, num_tokens in pending.forked:
            self.computed[child_id] = self.computed.get(parent_id, [])[: num_tokens - 1]
        for seq_id, cached in pending.admitted.items():
            self.computed[seq_id] = list(cached)
        if not pending.runs:
            return {}
        if breaks or step.is_void or pending.settled < self.failed_step:
            self.failed_step = pending.number
            return None
        for index in step.introduced:
            self.seeds[step.seq_ids[index]] = step.sequences[index].seed
        sampled: dict[int, list[int]] = {}
        for seq_id, _, start, count, samples in pending.runs:
            computed = self.computed[seq_id]
            assert start == len(computed), "computed twice or left out"
            if seq_id in pending.drafts:
                sampled[seq_id] = self.verify(seq_id, pending.drafts[seq_id])
                continue
            tokens = inputs.get(seq_id, [self.last.get(seq_id, -1)])
            assert len(tokens) == count
            computed += tokens
            if samples:
                self.last[seq_id] = next_token(computed, self.seeds.get(seq_id, 0))
                sampled[seq_id] = [self.last[seq_id]]
        return sampled

    def verify(self, seq_id: int, drafts: abc.Sequence[int]) -> list[int]:
        computed, sampled = self.computed[seq_id], []
        for draft in (*drafts, None):
            computed.append(self.last[seq_id])
            self.last[seq_id] = next_token(computed, self.seeds[seq_id])
            sampled.append(self.last[seq_id])
            if self.last[seq_id] != draft:
                break
        return sampled


REQUEST_IDS = itertools.count()


def added(scheduler: Scheduler, prompt: list[int], params: SamplingParams, **more: Any) -> list[Sequence]:
    """The sequences of a new request, which the scheduler has taken."""
    sequences = new_samples(scheduler.limits, next(REQUEST_IDS), prompt, params, **more)
    scheduler.add(sequences)
    return sequences


class World:
    """A scheduler and both models, two steps in flight at most; `choose(n)` picks one of n possible events."""

    def __init__(
        self,
        limits: SchedulerLimits,
        policy: Policy | None = None,
        *,
        by_tenant: bool = False,
        speculative: SpeculativeConfig | None = None,
    ) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits, policy=policy, by_tenant=by_tenant, verify=True, speculative=speculative)
        self.is_late = False  # cachemgr hears of outcomes with drafts after the next plan
        self.fresh_pool()
        self.output: dict[tuple[int, int], list[int]] = {}
        self.ended: dict[tuple[int, int], FinishReason] = {}
        self.poison: dict[int, int] = {}
        self.largest_step = 0
        self.admitted: list[Admission] = []
        self.named: list[list[int]] = []  # the lengths of the prompts that a plan names as waiting

    def fresh_pool(self) -> None:
        limits = self.limits
        self.cache = ModelCache(limits.num_blocks, limits.block_size, limits.num_host_blocks, limits.layer_groups)
        self.worker = ModelWorker()
        self.flight: deque[tuple[StepInFlight, Pending, dict[int, list[int]]]] = deque()
        self.outcomes: deque[tuple[dict[int, list[int]] | None, bool]] = deque()
        self.unheard: deque[dict[int, list[int]]] = deque()

    def add(
        self, prompt: list[int], *, seed: int = 0, ends: tuple[int, ...] = (END_TOKEN,), **params: int | str
    ) -> list:
        sequences = added(self.scheduler, prompt, SamplingParams(**params), end_token_ids=ends, seed=seed)
        self.output.update({s.arrival: [] for s in sequences})
        return sequences

    def plan(self, between=lambda: None, after=lambda: None) -> bool:
        """One plan, if there is one; `between` happens on its way to cachemgr, `after` on its way back."""
        plan = self.scheduler.schedule()
        if plan.is_empty:
            return False
        self.check_expected(plan)
        self.check_decodes(plan)
        between()
        before = self.scheduler.statistics().preemptions
        outcome = self.cache.plan(plan)
        pending = self.cache.steps[-1]
        self.hear()
        after()
        self.admitted += [admission for admission in plan.admissions if admission.seq_id in outcome.admitted_ids]
        assert sum(outcome.run_counts) <= self.limits.max_step_tokens
        step = self.scheduler.on_planned(plan, outcome)
        if len({(sequence.priority, sequence.tenant) for sequence in everybody(self.scheduler)}) == 1:
            self.check_preemptions(outcome, self.scheduler.statistics().preemptions - before)
        for failed in step.failed:
            self.ended[failed.sequence.arrival] = FinishReason.FAILED
        runs = list(zip(step.seq_ids, step.sequences, step.starts, step.counts, strict=True))
        inputs = {runs[i][0]: runs[i][1].token_ids[runs[i][2] : runs[i][2] + runs[i][3]] for i in step.given}
        inputs |= step.drafts
        self.flight.append((step, pending, inputs))
        return True

    def check_expected(self, plan: Plan) -> None:
        for sequence, prompt in plan.expected.items():
            assert sequence.state is SequenceState.WAITING, "it does not wait"
            assert sequence not in plan.sequences.values(), "it is asked for in this plan"
            assert prompt.token_ids is sequence.token_ids
        assert len(plan.expected) <= self.limits.max_running_sequences
        if plan.expected:
            self.named.append([len(prompt.token_ids) for prompt in plan.expected.values()])

    def check_decodes(self, plan: Plan) -> None:
        """vLLM#49097: a sequence was left out when one before it in the list was preempted."""
        queues = self.scheduler._queues
        if queues.suspects or queues.groups:
            return  # one runs alone; beams may wait for room for the tokens that a plan appends
        ready = [sequence.seq_id for sequence in queues.running if sequence.num_schedulable_tokens == 1]
        decodes = [seq_id for seq_id in ready if seq_id not in plan.drafts]
        assert list(plan.extend_ids[: len(decodes)]) == decodes[: self.limits.max_step_tokens], "one is left out"
        assert plan.drafts.keys() <= set(ready), "one with drafts is not ready for them"
        assert not any(plan.sequences[seq_id].num_drafts for seq_id in plan.extend_ids), "its drafts are in flight"

    def check_preemptions(self, outcome: GrantedStep, count: int) -> None:
        if not count:
            return
        if any(refusal.error.reason == "TOO_MANY_SEQUENCES" for refusal in outcome.refusals):
            room = self.scheduler._room
            assert room.num_stalls >= room.limits.max_stalls, "places may become free"
            return
        blocks = outcome.blocks
        needed = sum(r.error.number("needed") for r in outcome.refusals if isinstance(r.error, OutOfRoom))
        assert needed > self.cache.room() + blocks.retired, "preempted though blocks were coming back"

    def report_step(self, *, breaks: bool = False) -> None:
        """The worker runs the oldest step that it has not run, and cachemgr hears of its outcome."""
        step, pending, inputs = self.flight[len(self.outcomes)]
        breaks = breaks or any(
            s.request_id in self.poison and start + count > self.poison[s.request_id]
            for s, start, count in zip(step.sequences, step.starts, step.counts, strict=True)
        )
        self.hear()
        prior = pending.settled < self.worker.failed_step
        sampled = self.worker.run(pending, step, inputs, breaks=breaks)
        if self.is_late and sampled is not None and step.drafts:
            self.unheard.append(sampled)
        else:
            self.cache.settle(sampled, is_first_failure=sampled is None and not prior)
        self.outcomes.append((sampled, prior or step.is_void))

    def hear(self) -> None:
        """cachemgr hears of the steps that it has not heard of."""
        while self.unheard:
            self.cache.settle(self.unheard.popleft(), is_first_failure=False)

    def end_step(
        self, *, breaks: bool = False, refused: QuireError | None = None, late_ids: abc.Collection[int] = ()
    ) -> None:
        """The scheduler hears of the oldest step's outcome, and cachemgr before it. A step that is refused breaks."""
        if not self.outcomes:
            self.report_step(breaks=breaks)
        step, _, _ = self.flight.popleft()
        sampled, is_behind = self.outcomes.popleft()
        if sampled is not None and not step.is_void:
            ids, tokens = list(sampled), [token for each in sampled.values() for token in each]
            counts = [len(each) for each in sampled.values()] if step.drafts else []
            accepted, _ = self.scheduler.on_step_done(step, ids, tokens, token_counts=counts, late_ids=late_ids)
            for seq_id, sequence in zip(accepted.seq_ids, accepted.sequences, strict=True):
                if sequence.group is None:
                    taken = sampled[seq_id][: accepted.counts.get(seq_id, 1)]
                    assert sequence.token_ids[-len(taken) :] == taken
                    for index, token in enumerate(taken, 1):
                        reason = accepted.ended.get(sequence) if index == len(taken) else None
                        self.take(sequence, token, reason)
            self.choose([sequence for sequence in accepted.sequences if sequence.group is not None])
        elif is_behind:
            self.scheduler.on_step_dropped(step)
        elif refused is not None:
            assert not self.scheduler.on_step_refused(step, refused)
        else:
            for failed in self.scheduler.on_step_failed(step, StepFailed("broken")):
                self.ended[failed.sequence.arrival] = FinishReason.FAILED

    def choose(self, beams: list[Sequence]) -> None:
        assert not beams, "nobody searches here"

    def take(self, sequence: Sequence, token: int, reason: FinishReason | None) -> None:
        assert sequence.arrival not in self.ended, "a token after the end"
        self.output[sequence.arrival].append(token)
        if reason:
            self.ended[sequence.arrival] = reason

    def turn(self) -> None:
        """As the engine does: plan if possible, keep two in flight, else wait for the oldest."""
        planned = len(self.flight) < 2 and self.plan()
        if not planned:
            assert self.flight, "work left, nothing to do and nothing to wait for"
            self.end_step()

    def step(self) -> None:
        """One more step in flight, of two at most."""
        if len(self.flight) == 2:
            self.end_step()
        assert self.plan()

    def run(self, max_turns: int = 5000) -> None:
        for _ in range(max_turns):
            if not self.scheduler.has_work:
                break
            self.turn()
        assert not self.scheduler.has_work, "it never ends"
        assert self.cache.blocks().active == 0, "blocks were not given back"
        assert not self.cache.host, "blocks of the host tier were not given back"


def everybody(scheduler: Scheduler) -> list[Sequence]:
    """Unfinished sequences, and those of steps in flight."""
    stepping = [sequence for step in scheduler._flight for sequence in step.sequences]
    followers = [child for children in scheduler._queues.followers.values() for child in children]
    return [*scheduler._queues.waiting, *scheduler._queues.running, *scheduler._queues.draining, *followers, *stepping]


def limits(**changes: Any) -> SchedulerLimits:
    values = {
        "max_step_tokens": 16,
        "max_running_sequences": 8,
        "block_size": 4,
        "num_blocks": 64,
        "max_sequence_tokens": 64,
        "vocabulary_size": VOCABULARY,
    }
    return SchedulerLimits(**(values | changes))


def expected_of(sequence: Sequence, ends: tuple[int, ...] = (END_TOKEN,)) -> list[int]:
    prompt = sequence.token_ids[: sequence.num_prompt_tokens]
    return expected_output(prompt, seed=sequence.seed, max_tokens=sequence.max_tokens, ends=set(ends))


# Examples.


def test_one_request_runs_one_step_ahead() -> None:
    world = World(limits())
    (sequence,) = world.add([1, 2, 3], max_tokens=4, ends=())
    assert world.plan()
    assert world.plan(), "the next step is planned before the first one's token is back"
    assert world.flight[1][0].starts == [3]
    assert world.flight[1][2] == {}, "nobody knows the token yet, so nobody sends it"
    world.run()
    assert world.output[sequence.arrival] == expected_of(sequence, ())
    assert world.ended[sequence.arrival] is FinishReason.LENGTH


def test_nothing_is_scheduled_beyond_max_tokens() -> None:
    world = World(limits())
    world.add([1, 2, 3], max_tokens=2, ends=())
    world.plan()
    world.plan()
    assert world.scheduler.schedule().is_empty
    world.run()
    assert world.scheduler.statistics().discarded_tokens == 0


def test_an_end_token_is_found_one_step_late_and_the_extra_token_is_dropped() -> None:
    world = World(limits())
    (sequence,) = world.add([1, 2, 3], max_tokens=50, ends=())
    sequence.end_token_ids = frozenset([next_token([1, 2, 3], 0)])
    world.run()
    assert world.output[sequence.arrival] == [next_token([1, 2, 3], 0)]
    assert world.ended[sequence.arrival] is FinishReason.STOP
    assert world.scheduler.statistics().discarded_tokens == 1


def test_prompts_are_cut_into_chunks_and_decodes_go_first() -> None:
    world = World(limits(max_step_tokens=8))
    world.add([1], max_tokens=20, ends=())
    world.plan()
    world.add([2] * 30, max_tokens=1, ends=())
    world.plan()
    assert list(world.flight[-1][0].counts) == [1, 7]
    world.end_step()
    world.plan()
    assert list(world.flight[-1][0].counts) == [1, 7]
    world.run()


def test_prompts_get_a_quarter_of_every_step_however_many_decode() -> None:
    world = World(limits(max_step_tokens=8, max_running_sequences=8, num_blocks=200))
    for i in range(8):
        world.add([i % 6], max_tokens=60, ends=())
    while len(world.scheduler._queues.running) < 6:
        world.turn()
    assert world.scheduler.statistics().num_waiting == 2, "the other places are a prompt's"
    (decode, *_) = world.scheduler._queues.running
    world.scheduler.end([world.scheduler._queues.running[-1]], FinishReason.CANCELLED)
    (prompt,) = world.add([5] * 60, max_tokens=2, priority=1, ends=())
    steps = 0
    while not world.output[prompt.arrival]:
        num_tokens = decode.num_tokens
        world.step()
        counts = world.flight[-1][0].counts
        steps += 1
        if steps > 2:
            assert decode.num_tokens == num_tokens + 1, "no decode waits longer than this step for the prompt"
            assert sum(counts) - sum(count == 1 for count in counts) >= 2 or prompt.num_schedulable_tokens <= 1
    assert steps <= 60 // 2 + 4
    world.run()


def test_what_decodes_is_in_every_step() -> None:
    world = World(limits(max_step_tokens=8, num_blocks=400, max_sequence_tokens=400))
    decoding = [world.add([i], max_tokens=30, ends=())[0] for i in range(5)]
    while not all(world.output[sequence.arrival] for sequence in decoding):
        world.turn()
    for i in range(12):
        world.add([i % 6] * 40, max_tokens=1, ends=())
    while all(sequence.num_schedulable_tokens for sequence in decoding):
        known = [sequence.num_tokens for sequence in decoding]
        world.step()
        assert [sequence.num_tokens for sequence in decoding] == [num_tokens + 1 for num_tokens in known]
    world.run()


def test_admissions_are_first_come_first_served() -> None:
    world = World(limits(max_running_sequences=2))
    order = [world.add([i], max_tokens=2, ends=())[0] for i in range(6)]
    finished = []
    for _ in range(100):
        if world.scheduler.has_work:
            world.turn()
            finished += [s for s in order if s.state is SequenceState.FINISHED and s not in finished]
    assert finished == order


def test_samples_are_forked_from_one_prompt() -> None:
    world = World(limits())
    sequences = world.add([1, 2, 3, 4, 5, 1], max_tokens=5, n=4, seed=9, ends=())
    world.run()
    assert [world.output[s.arrival] for s in sequences] == [expected_of(s, ()) for s in sequences]
    assert [s.seed for s in sequences] == [9, 10, 11, 12]
    statistics = world.scheduler.statistics()
    assert (statistics.forks, statistics.admissions) == (3, 1)


def test_a_plan_brings_no_more_tokens_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt may have more: it goes alone."""
    monkeypatch.setattr("quire.client.engine.scheduling.planning._MAX_PLAN_TOKENS", 8)
    world = World(limits(max_step_tokens=64))
    lengths = [4, 4, 1, 12, 3]
    sequences = [world.add([number + 1] * length, max_tokens=3, ends=())[0] for number, length in enumerate(lengths)]
    given = []
    while world.scheduler.has_work:
        given.append([len(admission.token_ids) for admission in world.scheduler.schedule().admissions])
        world.turn()
    assert given[0] == [4, 4]
    assert [each for each in given if sum(each) > 8] == [[12]] * sum(12 in each for each in given)
    assert [12] in given
    assert [world.output[s.arrival] for s in sequences] == [expected_of(s, ()) for s in sequences]


def test_cachemgr_knows_the_head_of_the_queue() -> None:
    """Each prompt is named once, when it has come far enough; none that is admitted at once."""
    world = World(limits(max_running_sequences=3, max_step_tokens=64))
    for length in range(1, 15):
        world.add([1] * length, max_tokens=length, ends=())
    world.run()
    assert world.named == [[4, 5, 6], [7, 8, 9], [10, 11, 12], [13], [14]]


def test_a_prompt_that_waits_is_named_as_it_will_be_admitted() -> None:
    world = World(limits(max_running_sequences=1), by_tenant=True)
    world.add([1] * 40, max_tokens=9)
    world.plan()
    for token, cache_use in enumerate(CacheUse):
        cache, params = CacheParams(salt=b"s", cache_use=cache_use), SamplingParams(max_tokens=9, tenant="t")
        (sequence,) = added(world.scheduler, [token] * 20, params, end_token_ids=(), seed=0, cache=cache)
        world.output[sequence.arrival] = []
    (named,) = world.scheduler.schedule().expected.values()
    world.run()
    (admission,) = (each for each in world.admitted if each.token_ids is named.token_ids)
    assert admission.cache.cache_use is CacheUse.READ_AND_WRITE
    assert (named.salt, named.tenant) == (admission.cache.salt, admission.tenant) == (b"s", "t")


def test_who_is_preempted_is_named_again_and_so_is_who_lost_the_pool() -> None:
    world = World(limits(num_blocks=16))
    for number in range(4):
        world.add([number] * 9, max_tokens=20, ends=())
    world.run()
    assert world.scheduler.statistics().preemptions > 0
    assert max(map(max, world.named)) > 9, "with what it had generated"
    world = World(limits(max_running_sequences=1))
    for _ in range(2):
        world.add([1], max_tokens=9)
    for _ in range(2):
        assert len(world.scheduler.schedule().expected) == 1
        world.plan()
        assert not world.scheduler.schedule().expected
        world.scheduler.reset_all()
        world.fresh_pool()


def test_prompts_that_wait_are_named_as_far_as_a_plan_has_room_for_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.client.engine.scheduling.planning._MAX_PLAN_TOKENS", 8)
    world = World(limits(max_running_sequences=2, max_step_tokens=64))
    for length in (3, 2, 3, 4, 12, 2):
        world.add([1] * length, max_tokens=5, ends=())
    world.run()
    assert world.named == [[3], [4, 2]], "12 never fit"


def test_the_forks_of_a_plan_begin_with_no_more_tokens_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as one sequence can have in any case: 64."""
    monkeypatch.setattr("quire.client.engine.scheduling.planning._MAX_FORKED_TOKENS", 1)
    world = World(limits(max_step_tokens=64))
    sequences = world.add([1, 2, 3, 4] * 5, max_tokens=9, n=6, ends=())
    forked = []
    while world.scheduler.has_work:
        forked.append([len(fork.child_ids) for fork in world.scheduler.schedule().forks])
        world.turn()
    assert max(map(sum, forked)) == 3
    assert [world.output[s.arrival] for s in sequences] == [expected_of(s, ()) for s in sequences]


def test_a_plan_releases_no_more_sequences_than_the_pool_has_room_for() -> None:
    """Those in the host tier end, too."""
    scheduler = World(limits(max_running_sequences=3)).scheduler
    scheduler._queues.releases.update(dict.fromkeys(range(8), 1))
    assert scheduler.schedule().release_ids == (0, 1, 2)


def test_samples_whose_fork_is_refused_are_admitted() -> None:
    world = World(limits())
    world.cache.refuses_forks = True
    sequences = world.add([1, 2, 3, 4, 5, 1], max_tokens=5, n=3, ends=())
    world.run()
    assert [world.output[s.arrival] for s in sequences] == [expected_of(s, ()) for s in sequences]
    assert world.scheduler.statistics().admissions == 3


def test_cancelling_while_a_fork_is_under_way_gives_the_blocks_back() -> None:
    world = World(limits())
    sequences = world.add([1, 2, 3], max_tokens=50, n=3)
    world.plan()
    world.plan(between=lambda: world.scheduler.end(sequences, FinishReason.CANCELLED))
    assert len(world.scheduler.schedule().release_ids) == 3
    world.run()


def test_a_fork_that_could_not_run_shares_the_fate_of_what_it_was_forked_from() -> None:
    world = World(limits())
    sequences = world.add([1, 2, 3, 4], max_tokens=5, n=2, ends=())
    others = world.add([5] * 12, max_tokens=5)
    world.plan()
    world.scheduler.end(others, FinishReason.CANCELLED)
    world.cache.hogged = 60
    world.plan()
    assert not world.flight[-1][0].seq_ids
    assert sequences[1].state is SequenceState.RUNNING, "it waits for the blocks that are coming back"
    world.cache.hogged = 0
    world.end_step(breaks=True)
    assert sequences[1].state is SequenceState.WAITING
    world.run()
    assert [world.output[s.arrival] for s in sequences] == [expected_of(s, ()) for s in sequences]


def test_a_roomy_pool_preempts_nobody() -> None:
    world = World(limits(num_blocks=64))
    for i in range(8):
        world.add([i % 6] * 5, max_tokens=10, ends=())
    world.run()
    assert world.scheduler.statistics().preemptions == 0


def test_the_last_arrived_is_preempted_and_waits_first_in_line() -> None:
    world = World(limits(num_blocks=5, max_running_sequences=3, max_step_tokens=32))
    sequences = [world.add([i] * 4, max_tokens=12, ends=())[0] for i in (1, 2, 3)]
    while not world.scheduler.statistics().preemptions:
        world.turn()
    assert sequences[0].state is SequenceState.RUNNING
    assert sequences[-1].state is not SequenceState.RUNNING
    world.run()
    assert [world.output[s.arrival] for s in sequences] == [expected_of(s, ()) for s in sequences]


def finish_order(world: World, sequences: list[Sequence], max_turns: int = 2000) -> list[Sequence]:
    finished: list[Sequence] = []
    for _ in range(max_turns):
        if world.scheduler.has_work:
            world.turn()
            finished += [s for s in sequences if s.state is SequenceState.FINISHED and s not in finished]
    assert not world.scheduler.has_work
    return finished


def test_a_higher_priority_is_admitted_first() -> None:
    world = World(limits(max_running_sequences=1))
    sequences = [world.add([1], max_tokens=2, priority=priority, ends=())[0] for priority in (0, -3, 2, 2, 5)]
    assert [sequence.priority for sequence in finish_order(world, sequences)] == [5, 2, 2, 0, -3]
    assert sequences[2].finish_reason is FinishReason.LENGTH


def test_a_higher_priority_takes_the_place_of_a_lower_one_and_never_of_an_equal_one() -> None:
    world = World(limits(max_running_sequences=2))
    low, high = (world.add([1], max_tokens=30, priority=priority, ends=())[0] for priority in (0, 1))
    for _ in range(4):
        world.turn()
    equal, urgent = (world.add([2], max_tokens=4, priority=priority, ends=())[0] for priority in (1, 2))
    for _ in range(8):
        world.turn()
    assert high.state is urgent.state is SequenceState.RUNNING, "the lowest gave way to the highest"
    assert finish_order(world, [low, high, equal, urgent]) == [urgent, equal, high, low]
    assert world.scheduler.statistics().preemptions == 1
    assert world.output[low.arrival] == expected_of(low, ())


def test_a_higher_priority_takes_the_blocks_of_lower_ones() -> None:
    world = World(limits(num_blocks=6))
    low, high = (world.add([i] * 7, max_tokens=9, priority=i, ends=())[0] for i in (0, 3))
    for _ in range(4):
        world.turn()
    (equal,) = world.add([2] * 12, max_tokens=2, priority=0, ends=())
    (urgent,) = world.add([1] * 12, max_tokens=2, priority=3, ends=())
    while urgent.state is not SequenceState.RUNNING:
        world.turn()
        assert high.state is not SequenceState.WAITING, "not of one that is as high"
    assert low.state is not SequenceState.RUNNING
    finish_order(world, [])
    for sequence in (low, high, equal, urgent):
        assert world.output[sequence.arrival] == expected_of(sequence, ())


def test_a_higher_priority_is_let_in_though_lower_ones_lack_blocks() -> None:
    world = World(limits(num_blocks=6))
    (low,) = world.add([1] * 12, max_tokens=8, ends=())
    world.plan()
    world.cache.hogged = 3
    while not world.scheduler.statistics().refusals:
        world.turn()
    (urgent,) = world.add([2] * 8, max_tokens=2, priority=1, ends=())
    for _ in range(12):
        world.turn()
    assert urgent.state is SequenceState.FINISHED
    assert low.state is not SequenceState.FINISHED
    world.cache.hogged = 0
    world.run()
    assert world.output[low.arrival] == expected_of(low, ())


def test_of_equals_the_one_that_loses_least_gives_way() -> None:
    world = World(limits(num_blocks=17, max_step_tokens=64))
    first, long, short, other = (
        world.add([i] * count, max_tokens=12, ends=())[0] for i, count in ((0, 7), (1, 23), (2, 3), (3, 18))
    )
    while not world.scheduler.statistics().preemptions:
        world.turn()
    assert short.state is not SequenceState.RUNNING, "not the last in rank, which would lose more"
    assert first.state is long.state is other.state is SequenceState.RUNNING
    world.run()


def starve(world: World, first: Sequence) -> None:
    """No block is free from the third step on, when the first in rank needs one: a sequence has to be preempted."""
    world.plan()
    world.plan()
    assert first.num_scheduled_tokens == 8
    world.cache.hogged = len(world.cache.allocatable())
    while not world.scheduler.statistics().preemptions:
        world.turn()
    assert first.state is SequenceState.RUNNING


def test_the_lowest_priority_gives_way_though_it_loses_most() -> None:
    world = World(limits(max_step_tokens=64))
    (first,) = world.add([0] * 7, max_tokens=9, priority=1, ends=())
    (low,) = world.add([1] * 21, max_tokens=9, priority=0, ends=())
    (short,) = world.add([2] * 2, max_tokens=9, priority=1, ends=())
    starve(world, first)
    assert (low.state, short.state) == (SequenceState.DRAINING, SequenceState.RUNNING)
    world.cache.hogged = 0
    world.run()


def test_what_is_shared_is_not_lost() -> None:
    world = World(limits(max_step_tokens=64))
    (first,) = world.add([0] * 7, max_tokens=9, ends=())
    (fresh,) = world.add([1] * 9, max_tokens=9, ends=())
    samples = world.add([2] * 33, max_tokens=9, n=3, ends=())
    starve(world, first)
    assert fresh.state is SequenceState.RUNNING
    assert [sample.state for sample in samples].count(SequenceState.RUNNING) == 2, "its prompt stays with the others"
    world.cache.hogged = 0
    world.run()


def test_what_was_found_in_the_cache_is_not_lost() -> None:
    world = World(limits(max_step_tokens=64))
    world.add([2] * 33, max_tokens=1, ends=())
    world.run()
    (first,) = world.add([0] * 7, max_tokens=9, ends=())
    (finder,) = world.add([2] * 33, max_tokens=9, ends=())
    (fresh,) = world.add([1] * 9, max_tokens=9, ends=())
    starve(world, first)
    assert (finder.state, fresh.state) == (SequenceState.DRAINING, SequenceState.RUNNING)
    world.cache.hogged = 0
    world.run()


@pytest.mark.parametrize(
    ("num_blocks", "num_requests", "quota", "bound"),
    [
        (11, 10, 0, 16),  # with a reserve that does not grow 23
        (25, 30, 0, 32),  # 38
        (60, 10, 11, 24),  # a quota
    ],
)
def test_plans_that_preempt_are_few(num_blocks: int, num_requests: int, quota: int, bound: float) -> None:
    world = World(limits(num_blocks=num_blocks, max_step_tokens=32))
    world.scheduler._verify = False
    world.cache.limit = quota or num_blocks
    for i in range(num_requests):
        world.add([i % 7] * 4, max_tokens=36, ends=(), seed=i)
    num_preempting = 0
    while world.scheduler.has_work:
        before = world.scheduler.statistics().preemptions
        world.turn()
        num_preempting += world.scheduler.statistics().preemptions > before
    assert 0 < num_preempting <= bound


def test_what_is_about_to_be_released_is_waited_for() -> None:
    world = World(limits(max_step_tokens=64))
    first, below, leaving = (world.add([i] * count, max_tokens=9, ends=())[0] for i, count in enumerate((7, 9, 9)))
    world.plan()
    world.plan()
    world.cache.hogged = len(world.cache.allocatable())
    world.plan(between=lambda: world.scheduler.end([leaving], FinishReason.CANCELLED))
    assert world.scheduler.statistics().refusals == 1
    assert first.state is below.state is SequenceState.RUNNING
    world.cache.hogged = 0
    world.run()
    assert world.scheduler.statistics().preemptions == 0


def test_a_higher_priority_needs_no_reserve_for_lower_ones() -> None:
    world = World(limits(block_size=1, num_blocks=40, max_step_tokens=64))
    for i in range(3):
        world.add([i] * 7, max_tokens=20, ends=())
    world.plan()
    world.add([4] * 7, max_tokens=20, ends=())
    (urgent,) = world.add([5] * 10, max_tokens=3, priority=1, ends=())
    while urgent.state is not SequenceState.RUNNING:
        world.turn()
    assert world.scheduler.statistics().preemptions == 0, "there was room for it"
    world.run()


def test_who_lacks_blocks_with_nobody_below_keeps_what_it_has() -> None:
    world = World(limits())
    first, last = (world.add([0] * count, max_tokens=12, ends=())[0] for count in (5, 7))
    world.plan()
    world.plan()
    world.cache.hogged = len(world.cache.allocatable())
    while first.num_scheduled_tokens < 8:
        world.turn()
        assert last.state is SequenceState.RUNNING
    assert world.scheduler.statistics().refusals > 0
    while not world.scheduler.statistics().preemptions:
        world.turn()
    assert first.state is SequenceState.RUNNING, "the last gives way to the first"
    world.cache.hogged = 0
    world.run()
    assert [world.output[s.arrival] for s in (first, last)] == [expected_of(s, ()) for s in (first, last)]


@pytest.mark.parametrize("share", [{"promised": 7}, {"limit": 5}])
def test_a_part_of_a_pool_is_like_a_small_pool(share: dict[str, int]) -> None:
    world = World(limits(num_blocks=12, max_running_sequences=3, max_step_tokens=32))
    for name, value in share.items():
        setattr(world.cache, name, value)
    sequences = [world.add([i] * 4, max_tokens=12, ends=())[0] for i in (1, 2, 3)]
    world.run()
    assert [world.output[s.arrival] for s in sequences] == [expected_of(s, ()) for s in sequences]
    statistics = world.scheduler.statistics()
    assert statistics.preemptions > 0
    assert sum(admission.resumed for admission in world.admitted) == statistics.admissions - 3 > 0


def test_a_refused_admission_is_not_asked_again_before_blocks_come_back() -> None:
    world = World(limits(num_blocks=4, max_step_tokens=64))
    world.add([1] * 12, max_tokens=4, ends=())
    world.plan()
    world.add([2] * 12, max_tokens=4, ends=())
    world.plan()
    assert world.scheduler.statistics().refusals == 1
    world.end_step()
    assert not world.scheduler.schedule().admissions
    world.run()


def test_nobody_overtakes_the_one_who_was_refused_blocks() -> None:
    world = World(limits(num_blocks=4))
    (first,) = world.add([1] * 8, max_tokens=2, ends=())
    world.plan()
    (refused,) = world.add([2] * 12, max_tokens=2, ends=())
    world.plan()
    world.add([3], max_tokens=2, ends=())
    while first.state is not SequenceState.FINISHED:
        assert not world.scheduler.schedule().admissions
        world.end_step()
    (admission,) = world.scheduler.schedule().admissions
    assert admission.token_ids is refused.token_ids
    world.run()


def test_who_was_refused_for_a_reserve_asks_again_when_that_is_small_again() -> None:
    """Under pressure admissions leave more to running sequences; the pressure ends with the end of one of them."""
    world = World(limits(num_blocks=16))
    (ending,), (staying,) = (world.add([number], max_tokens=count, ends=()) for number, count in ((1, 3), (2, 20)))
    world.plan()
    world.scheduler._room.pressure = PressureNow(num_plans=4)  # 16 blocks for each
    (newcomer,) = world.add([3] * 8, max_tokens=2, ends=())
    world.plan()
    assert world.scheduler.statistics().refusals == 1
    assert not world.scheduler.schedule().admissions
    while ending.state is not SequenceState.FINISHED:
        assert newcomer.state is SequenceState.WAITING
        if len(world.flight) < 2:
            world.plan()
        world.end_step()
    assert staying.state is SequenceState.RUNNING
    assert [admission.token_ids for admission in world.scheduler.schedule().admissions] == [newcomer.token_ids]
    world.run()


def test_who_runs_alone_asks_for_blocks_again() -> None:
    world = World(limits())
    (sequence,) = world.add([1] * 12, max_tokens=2, ends=())
    world.cache.hogged = 62
    world.turn()
    world.turn()
    world.cache.hogged = 0
    world.run()
    assert world.output[sequence.arrival] == expected_of(sequence, ())


def test_whoever_is_paused_gives_way_to_a_suspect() -> None:
    world = World(limits(num_blocks=6))
    pair = [world.add([i], max_tokens=3, ends=())[0] for i in (0, 1)]
    (paused,) = world.add([2] * 12, max_tokens=3, ends=())
    world.plan()
    world.cache.hogged = 1
    world.plan()
    assert paused not in world.flight[-1][0].sequences
    world.end_step()
    world.end_step(breaks=True)
    world.cache.hogged = 3
    while any(sequence.state is not SequenceState.FINISHED for sequence in pair):
        world.turn()
    world.cache.hogged = 0
    world.run()
    for sequence in (*pair, paused):
        assert world.output[sequence.arrival] == expected_of(sequence, ())


def test_waits_for_another_client_of_the_pool_and_gives_way_in_the_end() -> None:
    world = World(limits(num_blocks=4, max_stalls=3))
    (sequence,) = world.add([1] * 4, max_tokens=8, ends=())
    world.plan()
    world.cache.hogged = 3
    while world.scheduler.statistics().refusals < 3:
        world.turn()
        assert sequence.state is SequenceState.RUNNING, "it holds what it has while others may give back"
    for _ in range(40):
        world.turn()
    assert sequence.state is SequenceState.WAITING
    assert world.scheduler.statistics().preemptions == 1
    world.cache.hogged = 0
    world.run()
    assert world.output[sequence.arrival] == expected_of(sequence, ())


def test_cancelling_releases_in_the_next_plan() -> None:
    world = World(limits())
    sequences = world.add([1, 2, 3], max_tokens=50, n=2, ends=())
    for _ in range(6):
        world.turn()
    world.scheduler.end(sequences, FinishReason.CANCELLED)
    plan = world.scheduler.schedule()
    assert len(plan.release_ids) == 2
    assert not plan.asks_to_compute
    world.run()


def test_cancelling_while_the_admission_is_under_way_gives_the_blocks_back() -> None:
    world = World(limits())
    sequences = world.add([1, 2, 3], max_tokens=50)
    world.plan(between=lambda: world.scheduler.end(sequences, FinishReason.CANCELLED))
    assert len(world.scheduler.schedule().release_ids) == 1
    world.run()
    assert world.output[sequences[0].arrival] == []


@pytest.mark.parametrize("max_step_failures", [1, 3])
def test_a_request_that_breaks_the_model_fails_alone(max_step_failures: int) -> None:
    world = World(limits(max_step_failures=max_step_failures))
    good = [world.add([i, i, 1], max_tokens=12, ends=())[0] for i in range(3)]
    (bad,) = world.add([5, 5, 5], max_tokens=12, ends=())
    world.poison[bad.request_id] = 7
    world.run()
    assert world.ended[bad.arrival] is FinishReason.FAILED
    assert world.output[bad.arrival] == expected_of(bad, ())[: len(world.output[bad.arrival])]
    assert [world.output[s.arrival] for s in good] == [expected_of(s, ()) for s in good]


def test_a_step_that_fails_once_costs_nobody_anything() -> None:
    world = World(limits())
    sequences = [s for i in range(3) for s in world.add([i, 2, 1], max_tokens=9, n=2, ends=())]
    for _ in range(5):
        world.turn()
    world.end_step(breaks=True)
    world.run()
    assert [world.output[s.arrival] for s in sequences] == [expected_of(s, ()) for s in sequences]


@pytest.mark.parametrize("is_suspect", [False, True])
def test_a_sequence_that_is_refused_for_now_is_in_no_plan_before_it_is_resumed(is_suspect: bool) -> None:
    world = World(limits())
    sequences = [world.add([i, 2, 1], max_tokens=9, ends=())[0] for i in range(3)]
    for _ in range(5):
        world.turn()
    if is_suspect:
        world.end_step(breaks=True)
        world.plan()
    (first,) = (s for s in sequences if s.seq_id == world.flight[0][0].seq_ids[0])
    full = OutOfRoom("full", reason="OVERLOADED", metadata={"sequence_id": str(first.seq_id)})
    world.end_step(breaks=True, refused=full)
    assert list(world.scheduler.postponed) == [first]
    assert world.scheduler.statistics().num_waiting >= 1
    world.run()
    others = [s for s in sequences if s is not first]
    assert [world.output[s.arrival] for s in others] == [expected_of(s, ()) for s in others]
    assert first.arrival not in world.ended
    world.scheduler.resume(first)
    world.run()
    assert world.output[first.arrival] == expected_of(first, ())
    world.scheduler.resume(first)
    assert not world.scheduler.has_work


def test_a_sequence_with_a_late_mask_gets_no_token_and_is_in_no_plan_before_it_is_resumed() -> None:
    world = World(limits())
    sequences = [world.add([i, 2, 1], max_tokens=9, ends=())[0] for i in range(3)]
    for _ in range(5):
        world.turn()
    world.step()
    late, num_before = sequences[1], len(world.output[sequences[1].arrival])
    assert len(world.flight) == 2, "a step behind it was planned with its token"
    assert late.seq_id is not None
    world.end_step(late_ids=[late.seq_id])
    assert list(world.scheduler.postponed) == [late]
    world.run()
    assert len(world.output[late.arrival]) == num_before
    assert [world.output[s.arrival] for s in sequences if s is not late] == [
        expected_of(s, ()) for s in sequences if s is not late
    ]
    world.scheduler.resume(late)
    world.run()
    assert world.output[late.arrival] == expected_of(late, ())


def test_a_postponed_sequence_can_be_cancelled() -> None:
    world = World(limits())
    (sequence,) = world.add([1, 2, 1], max_tokens=9, ends=())
    world.plan()
    full = OutOfRoom("full", reason="OVERLOADED", metadata={"sequence_id": str(sequence.seq_id)})
    world.end_step(breaks=True, refused=full)
    world.scheduler.reset_all()
    world.fresh_pool()
    world.scheduler.end([sequence], FinishReason.CANCELLED)
    assert not world.scheduler.postponed
    world.run()


def test_a_failure_is_not_handed_on_from_step_to_step() -> None:
    world = World(limits(max_running_sequences=1))
    (short,) = world.add([1, 2, 3], max_tokens=50, ends=())
    short.end_token_ids = frozenset([next_token([1, 2, 3], 0)])
    (other,) = world.add([2], max_tokens=5, ends=())
    world.plan()
    world.plan()
    world.end_step()
    world.plan()
    world.end_step(breaks=True)  # the extra step of one that has ended; the other one's step was planned before
    world.run(max_turns=100)
    assert world.output[other.arrival] == expected_of(other, ())


def test_after_a_failure_while_a_plan_was_under_way_the_steps_in_flight_end_first() -> None:
    world = World(limits())
    sequences = [world.add([i, 2, 1], max_tokens=9, ends=())[0] for i in range(3)]
    world.plan()
    world.plan(after=lambda: world.end_step(breaks=True))
    assert world.flight
    assert world.scheduler.schedule().is_empty, "it would fail too"
    world.run()
    assert [world.output[s.arrival] for s in sequences] == [expected_of(s, ()) for s in sequences]


def test_a_failure_that_cachemgr_knows_first_costs_a_step_and_nothing_else() -> None:
    world = World(limits())
    sequences = [s for i in range(3) for s in world.add([i, 2, 1], max_tokens=9, n=2, ends=())]
    for _ in range(5):
        world.turn()
    world.report_step(breaks=True)
    world.plan()
    assert world.flight[-1][0].is_void
    assert world.scheduler.schedule().is_empty, "what failed is not known yet"
    world.run()
    assert [world.output[s.arrival] for s in sequences] == [expected_of(s, ()) for s in sequences]
    assert world.scheduler.statistics().resets == 0


def test_a_void_step_behind_steps_that_did_not_fail_is_noticed() -> None:
    world = World(limits())
    world.add([1, 2, 3], max_tokens=9, ends=())
    world.step()
    plan = world.scheduler.schedule()
    step = world.scheduler.on_planned(plan, GrantedStep(2, [1], [0], [1], [], [], [], [], Blocks(9, 0, 1, 0)))
    world.end_step()
    with pytest.raises(ProtocolViolation):
        world.scheduler.on_step_dropped(step)


def test_nobody_is_let_in_while_those_who_run_lack_blocks() -> None:
    world = World(limits(num_blocks=4))
    (first,) = world.add([1] * 4, max_tokens=9, ends=())
    world.plan()
    world.cache.hogged = 3
    while not world.scheduler.statistics().refusals:
        world.turn()
    world.add([2], max_tokens=2, ends=())
    assert first.state is SequenceState.RUNNING
    plan = world.scheduler.schedule()
    assert (len(plan.extend_ids), len(plan.admissions)) == (1, 0)
    world.cache.hogged = 0
    world.run()


def test_a_reset_admits_everybody_again_with_the_tokens_known() -> None:
    world = World(limits())
    sequences = [s for i in range(3) for s in world.add([i, 2, 1], max_tokens=9, n=2, ends=())]
    for _ in range(7):
        world.turn()
    world.scheduler.reset_all()
    world.fresh_pool()
    world.run()
    assert [world.output[s.arrival] for s in sequences] == [expected_of(s, ()) for s in sequences]


def test_a_refusal_for_good_fails_one_request() -> None:
    scheduler = Scheduler(limits(), verify=True)
    (bad,) = added(scheduler, [1], SamplingParams(max_tokens=4), end_token_ids=(), seed=0)
    plan = scheduler.schedule()
    error = error_of_reason("SEQUENCE_TOO_LONG", "no")
    refusal = Refusal(PlanItem.ADMISSION, plan.admissions[0].seq_id, error)
    step = scheduler.on_planned(plan, GrantedStep(1, [], [], [], [], [refusal], [], [], Blocks(9, 0, 0, 0)))
    assert [(failed.sequence, failed.error) for failed in step.failed] == [(bad, error)]
    assert bad.finish_reason is FinishReason.FAILED


@pytest.mark.parametrize(
    ("run", "given_run_indexes"),
    [((99, 0, 3), [0]), ((1, 1, 2), [0]), ((1, 0, 9), [0]), ((1, 0, 0), [0])],
)
def test_an_answer_that_does_not_fit_the_plan_is_noticed(run, given_run_indexes) -> None:
    scheduler = Scheduler(limits(), verify=True)
    added(scheduler, [1, 2, 3], SamplingParams(max_tokens=4), end_token_ids=(), seed=0)
    plan = scheduler.schedule()
    seq_id, start, count = run
    admitted = [1], [CacheOutcome()]
    outcome = GrantedStep(1, [seq_id], [start], [count], given_run_indexes, [], *admitted, Blocks(9, 0, 1, 0))
    with pytest.raises(ProtocolViolation):
        scheduler.on_planned(plan, outcome)
    scheduler.reset_all()


def test_a_step_without_its_token_is_noticed() -> None:
    world = World(limits())
    world.add([1, 2, 3], max_tokens=4)
    world.plan()
    with pytest.raises(ProtocolViolation):
        world.scheduler.on_step_done(world.flight[0][0], [], [])


@pytest.mark.parametrize(
    ("prompt", "params", "reason"),
    [
        ([], {}, "EMPTY_PROMPT"),
        ([0, VOCABULARY], {}, "TOKEN_OUT_OF_RANGE"),
        ([-1], {}, "TOKEN_OUT_OF_RANGE"),
        ([1] * 64, {}, "SEQUENCE_TOO_LONG"),
        ([1] * 60, {"max_tokens": 5}, "SEQUENCE_TOO_LONG"),
        ([1] * 60, {"max_tokens": None, "min_tokens": 5}, "SEQUENCE_TOO_LONG"),
        ([1], {"max_tokens": None, "min_tokens": 2**31 - 1}, "SEQUENCE_TOO_LONG"),
    ],
)
def test_what_never_fits_is_refused_at_once(prompt, params, reason) -> None:
    scheduler = Scheduler(limits(), verify=True)
    with pytest.raises(InvalidRequest) as caught:
        added(scheduler, prompt, SamplingParams(**params), end_token_ids=(), seed=0)
    assert caught.value.reason == reason
    assert {"field", "value", "limit"} <= caught.value.metadata.keys()
    assert not scheduler.has_work


def test_a_breakpoint_behind_the_prompt_is_refused_at_once() -> None:
    """cachemgr refused the plan with all that was planned beside it, and the engine had to find the request."""
    cache = CacheParams(breakpoints=(Breakpoint(2, 9.0), Breakpoint(4, 9.0)))
    [sequence] = new_samples(limits(), 1, [1] * 4, SamplingParams(max_tokens=1), cache=cache, end_token_ids=(), seed=0)
    assert sequence.cache is cache
    with pytest.raises(
        InvalidRequest, match=r"breakpoints.num_tokens is 4, must be at most 3, the tokens of the prompt"
    ):
        new_samples(limits(), 1, [1] * 3, SamplingParams(max_tokens=1), cache=cache, end_token_ids=(), seed=0)


def test_no_max_tokens_means_as_many_as_fit() -> None:
    world = World(limits(num_blocks=4))
    (sequence,) = world.add([1] * 3, max_tokens=None, ends=())
    world.run()
    assert len(world.output[sequence.arrival]) == 13


# Drafts.


def drafting(shape: SchedulerLimits, method: str = "ngram", *, gap_s: float = 0.0) -> World:
    """With a device on which drafts cost nothing; it waits gap_s for a step that is planned while none runs."""
    config = SpeculativeConfig(method, num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=4)
    world = World(shape, speculative=config)
    assert world.scheduler.step_costs is not None
    for num_tokens in (1, 64) * 2:
        for gap, is_ahead in ((0.0, True), (gap_s, False)):
            world.scheduler.step_costs.observe(num_tokens, device_s=0.01, period_s=0.01 + gap, is_ahead=is_ahead)
    return world


def test_drafts_that_come_true_save_steps() -> None:
    plain, world = World(limits()), drafting(limits(max_draft_count=8))
    steps = []
    for each in (plain, world):
        (sequence,) = each.add([1, 2, 3], max_tokens=40, seed=COPYING, ends=())
        each.run()
        assert each.output[sequence.arrival] == expected_of(sequence, ())
        steps.append(each.scheduler.statistics().planned_steps)
    assert steps[1] < 0.7 * steps[0]


# The host tier.


def crowded(**changes: int) -> World:
    """Two that do not fit beside each other, with room in the host tier."""
    world = World(limits(**({"num_blocks": 8, "num_host_blocks": 8, "max_sequence_tokens": 32} | changes)))
    world.add([1] * 9, max_tokens=12, ends=())
    world.add([0] * 9, max_tokens=12, ends=())
    return world


def test_a_request_has_the_hits_of_its_first_admission() -> None:
    """vLLM#25780: a preempted request found its own blocks, and these were counted as hits of the prompt."""
    world = crowded(num_host_blocks=0)
    requests = world.scheduler._queues.living()
    world.run()
    statistics = world.scheduler.statistics()
    assert statistics.preemptions > 0
    assert statistics.cached_tokens > 0, "of an admission after a preemption"
    assert [sequence.cache_outcome for sequence in requests] == [CacheOutcome()] * 2


def test_an_admission_waits_for_what_another_client_computes_but_not_for_ever() -> None:
    world = World(limits())
    [sequence] = world.add([1] * 9, max_tokens=4)
    [other] = world.add([0] * 9, max_tokens=4)
    world.cache.num_computed_elsewhere = 3
    world.turn()
    assert (sequence.state, other.state) == (SequenceState.WAITING,) * 2, "both were refused"
    assert sequence.num_waits_for_prefix == 1
    world.cache.num_computed_elsewhere = 10_000
    world.run()
    assert sequence.num_waits_for_prefix == other.num_waits_for_prefix == _MAX_WAITS_FOR_PREFIX
    assert world.output[sequence.arrival] == expected_of(sequence, (END_TOKEN,))


def test_the_prompt_of_several_samples_counts_once() -> None:
    world = World(limits())
    world.cache.refuses_forks = True  # so that each sample is admitted
    world.add([1] * 9, n=3, max_tokens=4)
    world.run()
    assert [admission.resumed for admission in world.admitted] == [False, True, True]


def test_samples_that_wait_for_their_prompt_share_its_tokens() -> None:
    scheduler = Scheduler(SchedulerLimits(64, 8, 4, 100, 100, VOCABULARY))
    first, *others = added(scheduler, [1, 2, 3], SamplingParams(n=1024, max_tokens=9), end_token_ids=(), seed=0)
    assert len({id(sequence.token_ids) for sequence in others}) == 1
    assert first.token_ids is not others[0].token_ids


def test_who_is_preempted_comes_back_from_the_host_tier() -> None:
    world = crowded()
    world.run()
    statistics = world.scheduler.statistics()
    assert statistics.preemptions == statistics.offloads == statistics.restores > 0
    assert (statistics.admissions, statistics.scheduled_tokens) == (2, 2 * 20), "nothing was computed twice"
    assert all(len(tokens) == 12 for tokens in world.output.values())


def test_what_is_copied_faster_than_computed_is_copied() -> None:
    for block_bytes, is_offloaded in ((10**6, True), (10**8, False)):
        world = crowded(block_bytes=block_bytes)
        world.scheduler.costs.prefill.observe(1000, 1.0)
        world.scheduler.costs.copy.observe(1e9, 1.0)
        world.run()
        statistics = world.scheduler.statistics()
        assert statistics.preemptions > 0
        assert (statistics.offloads > 0) == is_offloaded
        assert (statistics.admissions > 2) != is_offloaded


def test_what_others_have_too_is_no_reason_for_a_copy() -> None:
    world = World(limits(num_blocks=8, num_host_blocks=8, max_sequence_tokens=32))
    world.add([1] * 13, max_tokens=3, ends=())
    world.run()
    sharers = [*world.add([1] * 13, max_tokens=16, ends=()), *world.add([1] * 13, max_tokens=16, ends=())]
    while world.scheduler.statistics().preemptions == 0:
        world.turn()
    assert sharers[1].num_shared_tokens == 12
    assert world.scheduler.statistics().offloads <= 1
    world.scheduler.costs.copy.observe(1.0, 1e6)
    world.run()


def test_without_room_in_the_host_tier_the_tokens_are_computed_again() -> None:
    for changes in ({"num_host_blocks": 0}, {"num_host_blocks": 2}):
        world = crowded(**changes)
        world.run()
        statistics = world.scheduler.statistics()
        assert (statistics.offloads, statistics.restores) == (0, 0)
        assert statistics.admissions > 2


def test_a_refused_offload_is_a_release() -> None:
    world = crowded()
    world.cache.refuses_offloads = True
    world.run()
    statistics = world.scheduler.statistics()
    assert statistics.preemptions > 0
    assert (statistics.offloads, statistics.restores) == (0, 0)
    assert all(len(tokens) == 12 for tokens in world.output.values())


def until_offloaded(world: World) -> Sequence:
    while world.scheduler.statistics().offloads == 0:
        world.turn()
    return next(s for s in everybody(world.scheduler) if s.host_id is not None)


def test_who_is_cancelled_leaves_the_host_tier_with_the_next_plan() -> None:
    world = crowded()
    offloaded = until_offloaded(world)
    host_id = offloaded.host_id
    world.scheduler.end([offloaded], FinishReason.CANCELLED)
    assert host_id in world.scheduler.schedule().release_ids
    world.run()


def test_who_is_cancelled_before_it_left_is_released_instead() -> None:
    world = crowded()
    while world.scheduler.statistics().preemptions == 0:
        world.turn()
    (sequence,) = world.scheduler._queues.offloads.values()
    host_id = sequence.host_id
    world.scheduler.end([sequence], FinishReason.CANCELLED)
    plan = world.scheduler.schedule()
    assert (plan.offload_ids, plan.release_ids) == ((), (host_id,))
    world.run()


def test_after_a_reset_everybody_is_admitted_again() -> None:
    world = crowded()
    until_offloaded(world)
    world.scheduler.reset_all()
    world.fresh_pool()
    assert world.scheduler.statistics().num_offloaded == 0
    world.run()
    assert all(len(tokens) == 12 for tokens in world.output.values())


def test_a_restore_that_can_never_be_is_an_admission() -> None:
    world = crowded()
    offloaded = until_offloaded(world)
    lost = world.cache.host.pop(offloaded.host_id)  # as if it had never been there
    refuse = Refusal(PlanItem.RESTORE, offloaded.host_id, error_of_reason("SEQUENCE_NOT_FOUND", ""))
    world.cache.restore = lambda step, seq_id, reserve, budget: refuse  # type: ignore[method-assign]
    world.run()
    assert lost[0].tokens[0] == offloaded.token_ids[0]
    assert all(len(tokens) == 12 for tokens in world.output.values())
    assert world.scheduler.statistics().restores == 0


# Layer groups.


def test_a_prompt_is_longer_than_a_pool_whose_groups_have_windows() -> None:
    """3 windows of 5 tokens hold 2 or 3 blocks each: 9 of 10. A whole step would need 4 blocks of each window."""
    world = World(limits(num_blocks=10, max_sequence_tokens=1000, layer_groups=(SLIDING,) * 3))
    (sequence,) = world.add([index % 6 for index in range(300)], max_tokens=30, ends=())
    world.run()
    assert world.output[sequence.arrival] == expected_of(sequence, ())
    statistics = world.scheduler.statistics()
    assert (statistics.preemptions, statistics.admissions) == (0, 1)


def test_a_step_that_lacks_blocks_is_shortened_and_lengthened_again() -> None:
    world = World(limits(num_blocks=40, max_sequence_tokens=1000, layer_groups=(SLIDING,) * 4))
    world.cache.hogged = 24  # another client's
    (sequence,) = world.add([index % 6 for index in range(200)], max_tokens=2, ends=())
    sizes: list[list[int]] = [[], []]
    while world.scheduler.has_work:
        if sequence.num_scheduled_tokens > 100:
            world.cache.hogged = 0
        if len(world.flight) < 2 and world.plan():
            sizes[world.cache.hogged == 0].append(sum(world.flight[-1][0].counts))
        else:
            world.end_step()
    assert world.output[sequence.arrival] == expected_of(sequence, ())
    assert sizes[0][0] == 16, "the first step fits, and no second one beside it"
    assert max(sizes[0][1:]) < 16 == max(sizes[1])
    statistics = world.scheduler.statistics()
    assert statistics.refusals <= 6
    assert statistics.planned_steps <= 70


def test_a_step_that_lacks_quota_is_shortened_for_each_request_of_the_tenant() -> None:
    """The second request is refused beside the first one, and again after it: then no other one gives it blocks."""
    world = World(limits(num_blocks=40, max_sequence_tokens=1000, layer_groups=(SLIDING,) * 4), by_tenant=True)
    world.cache.limit = 14  # a step of 16 tokens needs 16 blocks
    prompts = [[first] + [index % 6 for index in range(40)] for first in (1, 2)]
    sequences = [world.add(prompt, max_tokens=4, ends=())[0] for prompt in prompts]
    world.run()
    assert [world.output[s.arrival] for s in sequences] == [expected_of(s, ()) for s in sequences]


def test_a_step_is_not_shortened_without_windows() -> None:
    world = World(limits(num_blocks=20, max_stalls=3))
    world.cache.hogged = 17
    world.add([1] * 16, max_tokens=2, ends=())
    for _ in range(3):
        world.turn()
        world.turn()
    assert world.scheduler.schedule().admission_token_budget == 16
    world.cache.hogged = 0
    world.run()


def test_a_sample_whose_fork_is_refused_is_admitted() -> None:
    """Its parent generates while there is no place for it, and the window of the prompt's end has gone."""
    world = World(limits(max_running_sequences=2, layer_groups=(FULL, SLIDING)))
    samples = world.add([1, 2, 3, 4, 5, 1], max_tokens=20, n=3, ends=())
    world.run()
    assert [world.output[s.arrival] for s in samples] == [expected_of(s, ()) for s in samples]
    statistics = world.scheduler.statistics()
    assert (statistics.admissions, statistics.forks) == (2, 1)
    assert statistics.planned_steps <= 3 * 20 + 10


# Everything at once.

requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=9),
        st.integers(1, 8),
        st.sampled_from([1, 1, 1, 2, 3]),
        st.integers(0, 3),
        st.sampled_from([0, 0, 0, 1, -2]),
    ),
    min_size=1,
    max_size=6,
)
# With a host tier that holds a few sequences, or all; and one with copies that take too long.
host_tiers = {"num_host_blocks": st.sampled_from([0, 4, 20]), "block_bytes": st.sampled_from([1, 1, 10**9])}
worlds = st.builds(
    limits,
    max_step_tokens=st.integers(1, 9),
    max_running_sequences=st.integers(1, 5),
    block_size=st.integers(1, 4),
    num_blocks=st.integers(17, 20),
    **host_tiers,
)
tiny_worlds = st.builds(
    limits,
    max_step_tokens=st.integers(1, 9),
    max_running_sequences=st.integers(1, 5),
    block_size=st.just(4),
    num_blocks=st.integers(5, 7),
    **host_tiers,
)

LAYER_GROUPS = [
    (SLIDING,),
    (CHUNKED,),
    (FULL, SLIDING),
    (FULL, FULL, SLIDING, replace(SLIDING, num_window_tokens=1), CHUNKED),
]


@st.composite
def windowed_worlds(draw: st.DrawFn) -> SchedulerLimits:
    """Pools in which the longest request, of 17 tokens, just fits, or a little more."""
    groups, block_size = draw(st.sampled_from(LAYER_GROUPS)), draw(st.integers(1, 4))
    tables = BlockTables(block_size, groups)
    least = next(count for count in range(1, 200) if tables.max_tokens(count, at_most=17) >= 17)
    return limits(
        max_step_tokens=draw(st.integers(1, 9)),
        max_running_sequences=draw(st.integers(1, 5)),
        block_size=block_size,
        num_blocks=least + draw(st.integers(0, 12)),
        layer_groups=groups,
        num_host_blocks=draw(host_tiers["num_host_blocks"]),
        block_bytes=draw(host_tiers["block_bytes"]),
    )


@settings(max_examples=300)
@given(st.one_of(worlds, tiny_worlds, windowed_worlds()), requests, st.data())
def test_every_request_ends_with_its_tokens(shape: SchedulerLimits, wanted: list, data: st.DataObject) -> None:
    everything(World(shape), wanted, data)


@settings(max_examples=300)
@given(st.one_of(worlds, tiny_worlds, windowed_worlds()), requests, st.data(), st.booleans())
def test_every_request_ends_with_its_tokens_with_drafts(
    shape: SchedulerLimits, wanted: list, data: st.DataObject, is_late: bool
) -> None:
    world = drafting(replace(shape, max_draft_count=4))
    world.is_late = is_late
    everything(world, [(prompt, length, n, seed + COPYING, rank) for prompt, length, n, seed, rank in wanted], data)


def everything(world: World, wanted: list, data: st.DataObject) -> None:
    """Requests come, end, are cancelled, and steps break, at any time; each request ends with its tokens."""
    shape = world.limits
    left = list(wanted)
    sequences: list[Sequence] = []
    cancelled: set[int] = set()
    num_breaks = 0

    def arrive() -> None:
        prompt, max_tokens, n, seed, priority = left.pop()
        sequences.extend(world.add(prompt, max_tokens=max_tokens, n=n, seed=seed, priority=priority))

    def cancel() -> None:
        alive = sorted({s.request_id for s in sequences if s.state is not SequenceState.FINISHED})
        if alive:
            request_id = data.draw(st.sampled_from(alive), label="cancel")
            cancelled.add(request_id)
            world.scheduler.end([s for s in sequences if s.request_id == request_id], FinishReason.CANCELLED)

    def end_one() -> None:
        nonlocal num_breaks
        if world.flight:
            breaks = data.draw(st.sampled_from([False, False, True]), label="breaks")
            num_breaks += breaks
            world.end_step(breaks=breaks and num_breaks < shape.max_step_failures)

    happenings = ["turn"] * 8 + ["arrive"] * 4 + ["end", "plan", "cancel", "cancel under way", "break", "reset"]
    happenings += ["end under way", "end before the answer", "report"]
    for happening in data.draw(st.lists(st.sampled_from(happenings), max_size=40), label="happenings"):
        if happening == "arrive" and left:
            arrive()
        elif happening == "turn" and world.scheduler.has_work:
            world.turn()
        elif happening in ("end", "break") and world.flight:
            num_breaks += happening == "break"
            world.end_step(breaks=happening == "break" and num_breaks < shape.max_step_failures)
        elif happening == "plan" and len(world.flight) < 4:
            world.plan()
        elif happening == "cancel":
            cancel()
        elif happening == "cancel under way" and len(world.flight) < 4:
            world.plan(between=cancel)
        elif happening == "end under way" and len(world.flight) < 4:
            world.plan(between=end_one)
        elif happening == "report" and len(world.outcomes) < len(world.flight):
            num_breaks += (breaks := data.draw(st.booleans(), label="breaks"))
            world.report_step(breaks=breaks and num_breaks < shape.max_step_failures)
        elif happening == "end before the answer" and len(world.flight) < 4:
            world.plan(after=end_one)
        elif happening == "reset":
            world.scheduler.reset_all()
            world.fresh_pool()
    while left:
        arrive()
    world.run()
    for sequence in sequences:
        expected, got = expected_of(sequence), world.output[sequence.arrival]
        if sequence.request_id in cancelled:
            assert got == expected[: len(got)]
        else:
            assert got == expected
            assert world.ended[sequence.arrival] in (FinishReason.STOP, FinishReason.LENGTH)


@settings(max_examples=100)
@given(st.one_of(worlds, tiny_worlds, windowed_worlds()), requests, st.data())
def test_only_a_request_that_breaks_the_model_fails(shape: SchedulerLimits, wanted: list, data: st.DataObject) -> None:
    world = World(shape)
    sequences = []
    for prompt, max_tokens, n, seed, priority in wanted:
        sequences += world.add(prompt, max_tokens=max_tokens, n=n, seed=seed, priority=priority)
    bad = data.draw(st.sampled_from(sequences)).request_id
    world.poison[bad] = data.draw(st.integers(0, 12))
    world.run()
    for sequence in sequences:
        if sequence.request_id != bad:
            assert world.output[sequence.arrival] == expected_of(sequence)


@dataclass(frozen=True)
class Pressure:
    """Requests of up to `longest` tokens each on a pool of `num_blocks` blocks of 4, some of them later than others."""

    num_blocks: int
    longest: int
    num_requests: int = 12
    priorities: tuple[int, ...] = (0,)
    quota: int = 0
    tenants: tuple[str, ...] = ("",)

    def run(self, seed: int) -> tuple[World, list[Sequence]]:
        """Runs it to its end; no plan preempts a sequence that it must not."""
        dice = random.Random(seed)
        world = World(limits(num_blocks=self.num_blocks, max_step_tokens=32, max_sequence_tokens=self.longest))
        world.scheduler._verify = False  # everything else here holds it
        if self.quota:
            world.cache.limit = self.quota
        sequences: list[Sequence] = []
        for turn in range(20_000):
            if len(sequences) < self.num_requests and (turn % 7 == 0 or not world.scheduler.has_work):
                prompt = [dice.randrange(VOCABULARY) for _ in range(dice.randint(1, self.longest // 2))]
                num_new = self.longest - len(prompt)
                priority = dice.choice(self.priorities)
                asked = {"priority": priority, "tenant": dice.choice(self.tenants)}
                sequences += world.add(prompt, max_tokens=num_new, ends=(), seed=turn, **asked)
            if not world.scheduler.has_work:
                return world, sequences
            self.turn(world)
        raise AssertionError("it never ends")

    @staticmethod
    def turn(world: World) -> None:
        first = min(world.scheduler._queues.running, key=lambda sequence: sequence.rank, default=None)
        world.turn()
        if first is not None and first.state in (SequenceState.WAITING, SequenceState.DRAINING):
            running = world.scheduler._queues.running
            waiting = [*world.scheduler._queues.waiting, *running]
            assert any(other.priority > first.priority for other in waiting), "the first in rank gave way"


PRESSURES = [
    Pressure(num_blocks=11, longest=40),  # 1.1 sequences
    Pressure(num_blocks=11, longest=40, priorities=(0, 1, 2, 3)),
    Pressure(num_blocks=25, longest=40, num_requests=30),
    Pressure(num_blocks=25, longest=40, num_requests=30, priorities=(-5, 0, 0, 0, 7)),
    Pressure(num_blocks=60, longest=40, quota=11),
]


@pytest.mark.parametrize("pressure", PRESSURES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_pressure_ends_and_wastes_little(pressure: Pressure, seed: int) -> None:
    world, sequences = pressure.run(seed)
    for sequence in sequences:
        assert world.output[sequence.arrival] == expected_of(sequence, ())
    statistics = world.scheduler.statistics()
    num_tokens = sum(len(sequence.token_ids) for sequence in sequences)
    assert statistics.preemptions <= 3 * len(sequences)
    assert statistics.scheduled_tokens <= 2 * num_tokens
    assert statistics.planned_steps <= num_tokens


class Stubborn:
    """A policy that says no to everything, and yes when it must not matter."""

    def rank(self, sequence: Sequence, view: PoolView) -> tuple[int, ...]:
        return (sequence.priority,)

    def ended(self, sequence: Sequence) -> None:
        pass

    def victim(self, needy: Sequence, candidates: list[Sequence], *, missing_blocks: int, view: PoolView) -> None:
        return None

    def reserve(self, newcomer: Sequence, *, num_beside: int, view: PoolView) -> int:
        return 0

    def admits(self, newcomer: Sequence, view: PoolView) -> bool:
        return False

    def divide(self, prompts: list[Sequence], newcomer: Sequence | None, *, budget: int) -> list[int]:
        return [0] * len(prompts)


def test_with_a_policy_that_refuses_everything_all_requests_end_in_its_order() -> None:
    world = World(limits(), Stubborn())
    high, middle, low = (world.add([i], max_tokens=3, priority=i, ends=())[0] for i in (2, 1, 0))
    assert finish_order(world, [high, middle, low]) == [low, middle, high]
    for sequence in (high, middle, low):
        assert world.output[sequence.arrival] == expected_of(sequence, ())


class Eager(Stubborn):
    """Preempts and admits whenever it is asked."""

    def victim(self, needy: Sequence, candidates: list[Sequence], *, missing_blocks: int, view: PoolView):
        return candidates[0]  # it is not asked where there is nothing to choose

    def admits(self, newcomer: Sequence, view: PoolView) -> bool:
        return True


@pytest.mark.parametrize("policy", [Stubborn, Eager])
@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_with_any_policy(policy: type[Stubborn], seed: int) -> None:
    dice = random.Random(seed)
    world = World(limits(num_blocks=11, max_step_tokens=32, max_sequence_tokens=40), policy())
    sequences = []
    for _ in range(8):
        length, priority = dice.randint(1, 20), dice.randrange(3)
        sequences += world.add([dice.randrange(VOCABULARY)] * length, max_tokens=20, priority=priority, ends=())
    world.run()
    for sequence in sequences:
        assert world.output[sequence.arrival] == expected_of(sequence, ())


# Tenants.


def busy(num_requests: int, prompt: int, max_tokens: int = 40, **changes: int) -> World:
    """A world in which one tenant has so many requests, and some of them run."""
    world = World(limits(**({"num_blocks": 4096, "max_sequence_tokens": 2048} | changes)))
    world.scheduler._verify = False  # everything else here holds it
    for index in range(num_requests):
        world.add([index % VOCABULARY] * prompt, max_tokens=max_tokens, tenant="many", ends=(), seed=index)
    for _ in range(100):
        world.turn()
    return world


def steps_until_first_token(world: World, sequence: Sequence) -> int:
    before = world.scheduler.statistics().planned_steps
    while not world.output[sequence.arrival]:
        world.turn()
    return world.scheduler.statistics().planned_steps - before


@pytest.mark.parametrize(
    ("prompt", "changes"),
    [
        (24, {"max_running_sequences": 4}),  # all places are taken
        (1500, {}),  # a prompt of a hundred steps is being computed
        (24, {"num_blocks": 40}),  # all blocks are taken
    ],
)
def test_a_thousand_requests_of_a_tenant_hardly_delay_another_ones(prompt: int, changes: dict[str, int]) -> None:
    own = list(range(6)) * 6
    world = busy(1000, prompt, **changes)
    (single,) = world.add(own, max_tokens=4, tenant="single", ends=())
    # It gets half of what at most 8 decodes leave of a step of 16 tokens; and the steps in flight go first.
    assert steps_until_first_token(world, single) <= 36 // 4 + 3


def test_tenants_get_prompts_by_weight() -> None:
    world = World(limits(num_blocks=4096, max_sequence_tokens=2048), PriorityPolicy({"gold": 3.0}))
    gold, plain = (world.add([i] * 1000, max_tokens=1, tenant=t, ends=())[0] for i, t in enumerate(("gold", "plain")))
    for _ in range(40):
        world.turn()
    assert gold.num_scheduled_tokens == pytest.approx(3 * plain.num_scheduled_tokens, rel=0.1)


def test_weights_that_change_count_from_then_on() -> None:
    policy = PriorityPolicy()
    world = World(limits(num_blocks=4096, max_sequence_tokens=2048), policy)
    policy.set_weights({"gold": 3.0})
    with pytest.raises(InvalidRequest, match="weights"):
        policy.set_weights({"gold": 1.0, "plain": 0.0})
    gold, plain = (world.add([i] * 1000, max_tokens=1, tenant=t, ends=())[0] for i, t in enumerate(("gold", "plain")))
    for _ in range(40):
        world.turn()
    assert gold.num_scheduled_tokens == pytest.approx(3 * plain.num_scheduled_tokens, rel=0.1)


def test_tenants_with_equal_lines_end_alternately() -> None:
    world = World(limits(num_blocks=4096, max_running_sequences=2))
    many = [world.add([1] * 8, max_tokens=8, tenant="many", ends=())[0] for _ in range(20)]
    few = [world.add([2] * 8, max_tokens=8, tenant="few", ends=())[0] for _ in range(10)]
    order = finish_order(world, [*many, *few])
    assert {sequence.tenant for sequence in order[-9:]} == {"many"}, "the shorter line ends in the middle"
    assert sum(sequence.tenant == "few" for sequence in order[:10]) in (4, 5, 6)


def test_a_tenant_that_asked_for_nothing_has_saved_nothing() -> None:
    world = World(limits(num_blocks=4096, max_running_sequences=2))
    for _ in range(30):
        (one,) = world.add([1] * 8, max_tokens=8, tenant="early", ends=())
        finish_order(world, [one])
    early = [world.add([1] * 8, max_tokens=8, tenant="early", ends=())[0] for _ in range(10)]
    late = [world.add([2] * 8, max_tokens=8, tenant="late", ends=())[0] for _ in range(10)]
    order = finish_order(world, [*early, *late])
    assert sum(sequence.tenant == "early" for sequence in order[:10]) in (4, 5, 6)


def test_a_tenant_that_comes_late_has_saved_nothing_while_another_was_served() -> None:
    world = World(limits(num_blocks=4096, max_running_sequences=2))
    early = [world.add([1] * 8, max_tokens=8, tenant="early", ends=())[0] for _ in range(30)]
    while early[19].state is not SequenceState.FINISHED:
        world.turn()
    late = [world.add([2] * 8, max_tokens=8, tenant="late", ends=())[0] for _ in range(10)]
    order = finish_order(world, [*early[20:], *late])
    assert sum(sequence.tenant == "early" for sequence in order[:10]) in (4, 5, 6)


def test_what_a_tenant_leaves_of_a_step_is_for_the_others() -> None:
    weights = {"short": 1.0, "long": 1.0, "gold": 3.0}
    demands = {"short": 3, "long": 1000, "gold": 1000}
    assert divide(demands, weights.__getitem__, 103) == {"short": 3, "long": 25, "gold": 75}
    assert divide(demands | {"gold": 30}, weights.__getitem__, 103) == {"short": 3, "long": 70, "gold": 30}


@pytest.mark.parametrize("pressure", [PRESSURES[0], PRESSURES[2], PRESSURES[4]], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_pressure_of_several_tenants_ends_and_wastes_little(pressure: Pressure, seed: int) -> None:
    world, sequences = replace(pressure, tenants=("a", "a", "a", "b", "c")).run(seed)
    for sequence in sequences:
        assert world.output[sequence.arrival] == expected_of(sequence, ())
    statistics = world.scheduler.statistics()
    assert statistics.scheduled_tokens <= 3 * sum(len(sequence.token_ids) for sequence in sequences)
    assert not world.scheduler._policy._shares._accounts, "nothing is kept of tenants without requests"


@pytest.mark.parametrize("weight", [0.0, -1.0, 1001.0, float("nan")])
def test_weights_have_a_range(weight: float) -> None:
    with pytest.raises(InvalidRequest, match="weights"):
        PriorityPolicy({"gold": weight})


def test_quire_errors_know_their_numbers() -> None:
    error: QuireError = OutOfRoom("full", metadata={"needed": "3", "free": "x"})
    assert (error.number("needed"), error.number("free"), error.number("gone", 5)) == (3, 0, 5)
