"""Make the next plan: decodes, forks, chunks of prompts and admissions, within one step's token budget. Pure."""

from collections import abc
from itertools import groupby
from types import MappingProxyType

from quire.client.engine.scheduling.plans import Admission, ExpectedPrompt, Fork, Plan, SchedulerLimits
from quire.client.engine.scheduling.policy import Policy, PoolView
from quire.client.engine.scheduling.queues import Queues, by_rank, id_of
from quire.client.engine.scheduling.room import Room
from quire.client.engine.scheduling.sequence import Sequence, SequenceState
from quire.client.engine.scheduling.speculation import Drafts
from quire.client.engine.scheduling.tier import HostCopyUse

# Tokens of all admissions of one plan, if there are two or more, and of its expected prompts (Admission.token_ids of
# the proto); and ids in the sampling parameters of its admitted or restored sequences.
_MAX_PLAN_TOKENS = 262_144
# Tokens that all children of one plan's forks begin with (Fork.child_sequence_ids of the proto), and ids in their
# sampling parameters.
_MAX_FORKED_TOKENS = 8_388_608
# Tokens that one plan appends to sequences (Extends.append_token_ids of the proto).
_MAX_APPENDED_TOKENS = 262_144
# Plans that may refuse a sequence for a block that another client computes; then it computes the block, too. A client
# that keeps its lease and never runs its step must not hold others up.
_MAX_WAITS_FOR_PREFIX = 256
# Long enough for the head of a queue; what nobody has found after twice this time is evicted as before.
_EXPECTED_IN_S = 60.0


class Planning:
    """A plan while it is being made. Changes no sequence."""

    def __init__(
        self,
        limits: SchedulerLimits,
        queues: Queues,
        room: Room,
        policy: Policy,
        view: PoolView,
        *,
        fresh_id: abc.Callable[[], int],
        by_tenant: bool = False,
        drafts: abc.Mapping[int, Drafts] = MappingProxyType({}),
    ) -> None:
        """by_tenant: admissions name their tenants. drafts: of running sequences, by id."""
        self._limits = limits
        self._queues = queues
        self._room = room
        self._policy = policy
        self._view = view
        self._fresh_id = fresh_id
        self._by_tenant = by_tenant
        self._drafts = drafts
        self._drafted: dict[int, abc.Sequence[int]] = {}
        self.line = room.line(queues.waiting)
        self._budget = limits.max_step_tokens
        self._running: abc.Sequence[Sequence] = queues.running
        self._unbatched: abc.Sequence[Sequence] = queues.unbatched
        self._num_batched = 0
        self._apart: abc.Sequence[Sequence] = queues.apart
        self._places = limits.num_places - queues.num_places_taken
        self._trims: dict[int, int] = {}
        self._appended: dict[int, list[int]] = {}
        self._num_appended = 0
        self._ids: list[int] = []
        self._counts: list[int] = []
        self._forks: list[Fork] = []
        self._restores: list[int] = []
        self._admissions: list[Admission] = []
        self._num_offered = 0  # of the line
        self._expected: dict[Sequence, ExpectedPrompt] = {}
        self._sequences: dict[int, Sequence] = {}

    def add_running(self, newcomer: Sequence | None) -> None:
        """Ask for tokens of running sequences that fit the budget, and fork samples from them.

        newcomer is the first sequence in the queue; None if none is admitted now.
        """
        self._add_decodes()
        self._add_drafts()
        self._add_forks()
        self._shorten()
        self._add_chunks(self._apart[0] if self._apart else newcomer)
        self._add_apart()

    def add_alone(self, suspect: Sequence) -> None:
        """Ask for one sequence, or the beams of one group, and nothing else."""
        if suspect.state is SequenceState.WAITING:
            self._shorten()
            self._add_newcomer(suspect)
        elif suspect.group is not None:
            self._running = self._unbatched = suspect.group.running
            self._apart = [beam for beam in self._apart if beam.group is suspect.group]
            self.add_running(None)
        elif suspect.seq_id is not None:
            self._shorten()
            self._extend(suspect.seq_id, suspect, min(suspect.num_schedulable_tokens, self._budget))

    def plan(
        self,
        *,
        release_ids: abc.Iterable[int],
        offload_ids: abc.Iterable[int],
        host_copy_use: HostCopyUse,
        skips_disk: bool,
    ) -> Plan:
        """Return the plan that was made."""
        released, hints = tuple(release_ids), self._queues.expected_back_s
        newcomers = [*self._restores, *(admission.seq_id for admission in self._admissions)]
        return Plan(
            release_ids=released,
            expected_back_s={seq_id: hints[seq_id] for seq_id in released if seq_id in hints} if hints else {},
            offload_ids=tuple(offload_ids),
            expected=self._expected,
            trims=self._trims,
            forks=tuple(self._forks),
            extend_ids=tuple(self._ids),
            extend_counts=tuple(self._counts),
            appended=self._appended,
            drafts=self._drafted,
            num_batched=self._num_batched,
            host_copy_use=host_copy_use,
            skips_disk=skips_disk,
            restore_ids=tuple(self._restores),
            admissions=tuple(self._admissions),
            admission_token_budget=self._budget if newcomers else 0,
            admission_reserve_blocks=self._reserve_of(newcomers),
            sequences=self._sequences,
            gives_way=self._room.gives_way,
        )

    def _reserve_of(self, newcomers: list[int]) -> int:
        if not newcomers or self._apart or self._queues.suspects:
            return 0
        sequences = [self._sequences[seq_id] for seq_id in newcomers]
        num_copies = sum(sequence.num_places - 1 for sequence in sequences)
        return num_copies + self._policy.reserve(sequences[-1], num_beside=len(sequences) - 1, view=self._view)

    def _extend(self, seq_id: int, sequence: Sequence, count: int) -> None:
        self._ids.append(seq_id)
        self._counts.append(count)
        self._sequences[seq_id] = sequence
        self._budget -= count

    def _append(self, seq_id: int, token_ids: list[int]) -> bool:
        """Append tokens to a sequence that is to be extended. False if the plan has no room for so many."""
        limit = max(_MAX_APPENDED_TOKENS, self._limits.max_sequence_tokens)
        if self._num_appended + len(token_ids) > limit:
            return False
        if token_ids:
            self._num_appended += len(token_ids)
            self._appended[seq_id] = token_ids
        return True

    def _tell(self, sequence: Sequence) -> bool:
        """Put the tokens that were chosen of a running sequence in place of the one that it sampled."""
        count = sequence.num_untold_tokens
        if not count:
            return True
        seq_id, num_kept = id_of(sequence), len(sequence.token_ids) - count
        if not self._append(seq_id, sequence.token_ids[num_kept:]):
            return False
        self._trims[seq_id] = num_kept
        return True

    def _add_decodes(self) -> None:
        batch = self._queues.batch
        ready = [sequence for sequence in self._unbatched if sequence.num_schedulable_tokens == 1]
        if self._drafts:
            self._cut_drafts(len(batch.members) + len(ready))
            ready = [sequence for sequence in ready if sequence.seq_id not in self._drafted]
        if self._running is self._queues.running and not ready:
            ready = batch.members
            self._num_batched = len(ready)
        elif self._running is self._queues.running:
            ready = sorted((*batch.members, *ready), key=by_rank)
        ready = ready[: self._budget]
        if self._queues.groups:
            ready = [sequence for sequence in ready if self._tell(sequence)]
        self._ids = batch.ids.copy() if self._num_batched else [id_of(sequence) for sequence in ready]
        self._counts = [1] * len(ready)
        self._sequences.update(zip(self._ids, ready, strict=True))
        self._budget -= len(ready)

    def _cut_drafts(self, num_decodes: int) -> None:
        """Keep as many drafts as leave prompts their share of the step, the same most of each sequence."""
        left = self._limits.max_decode_tokens - num_decodes
        counts = [len(drafts.token_ids) for drafts in self._drafts.values()]
        most = max(counts)
        while most and sum(min(most, count) for count in counts) > left:
            most -= 1
        if most:
            self._drafted = {seq_id: drafts.token_ids[:most] for seq_id, drafts in self._drafts.items()}

    def _add_drafts(self) -> None:
        """Ask for the last tokens of sequences with drafts, and for the drafts."""
        for seq_id, token_ids in self._drafted.items():
            self._extend(seq_id, self._drafts[seq_id].sequence, 1 + len(token_ids))

    def _shorten(self) -> None:
        """Leave no more of the budget than the pool has blocks for."""
        if self._room.max_chunk_tokens is not None:
            self._budget = min(self._budget, self._room.max_chunk_tokens)

    def _add_chunks(self, newcomer: Sequence | None) -> None:
        prompts = [sequence for sequence in self._unbatched if sequence.num_schedulable_tokens > 1]
        if not prompts or not self._budget:
            return
        counts = self._policy.divide(prompts, newcomer, budget=self._budget)
        for index, (sequence, count) in enumerate(zip(prompts, counts, strict=True)):
            least = 0 if index else 1  # the first in rank progresses, with any policy
            count = min(max(count, least), sequence.num_schedulable_tokens, self._budget)
            if count and self._tell(sequence):
                self._extend(id_of(sequence), sequence, count)

    def _add_forks(self) -> None:
        if not self._queues.followers:
            return
        num_left = max(_MAX_FORKED_TOKENS, self._limits.max_sequence_tokens)
        for parent in self._running:
            for num_tokens, children in groupby(self._queues.followers.get(parent, ()), key=_fork_point):
                if parent.num_scheduled_tokens < num_tokens:
                    continue
                siblings = list(children)
                num_each = num_tokens + siblings[0].num_sent_ids
                num_most = num_left // num_each
                siblings = siblings[: num_most if self._forks else max(1, num_most)]
                if siblings and not self._may_fork(siblings[0]):
                    return
                num_left -= num_each * self._fork(parent, siblings, num_tokens)

    def _may_fork(self, child: Sequence) -> bool:
        return child.group is not None or self._policy.admits(child, self._view)

    def _fork(self, parent: Sequence, children: abc.Iterable[Sequence], num_tokens: int) -> int:
        """Fork children and run them, as far as places and budget go; returns how many."""
        child_ids = []
        for child in children:
            place = 1 if child.group is None else 0  # beams have places that are kept for them
            if self._places < place or not self._budget:
                break
            child_id = self._fresh_id()
            if not self._append(child_id, child.token_ids[num_tokens:]):
                break
            self._places -= place
            child_ids.append(child_id)
            self._extend(child_id, child, min(self._budget, len(child.token_ids) - num_tokens + 1))
        if child_ids:
            self._forks.append(Fork(id_of(parent), tuple(child_ids), num_tokens))
        return len(child_ids)

    def _add_apart(self) -> None:
        """Offer beams of groups that run, in order of rank, as far as the budget goes. They have places already."""
        budget, num_given = float(self._budget), 0
        for beam in self._apart:
            num_given += beam.num_sent_ids + len(beam.token_ids)
            if budget <= 0 or (num_given > _MAX_PLAN_TOKENS and self._admissions):
                return
            self._add_newcomer(beam)
            budget -= max(1.0, self._expected_run_of(beam))

    def add_newcomers(self) -> None:
        """Offer sequences that wait, in order of rank, as far as budget and places go."""
        # Prompts are offered until the tokens that they will probably compute fill the budget; cachemgr, which knows
        # the cached blocks, cuts the last one.
        budget, num_given = float(self._budget), 0
        places = self._places
        for sequence in self.line[: max(0, places)]:
            places -= sequence.num_places
            if places < 0:
                return
            num_given += sequence.num_sent_ids + (len(sequence.token_ids) if sequence.host_id is None else 0)
            if num_given > _MAX_PLAN_TOKENS and (self._admissions or self._restores):
                return
            if budget <= 0 or not self._admits(sequence) or not self._add_newcomer(sequence):
                return
            self._num_offered += 1
            if sequence.tenant not in self._room.short_tenants:  # it will probably be refused again
                budget -= max(1.0, self._expected_run_of(sequence))
            if self._room.blocks_awaited_by(self.line[0]):
                return  # a sequence was refused blocks: none may overtake the first in the queue

    def expect_line(self) -> None:
        """Name the prompts that stay at the head of the queue, each once: what they would find is evicted last."""
        num_given = sum(len(admission.token_ids) for admission in self._admissions)
        for sequence in self.line[self._num_offered : self._num_offered + self._limits.max_expected_prompts]:
            if sequence.is_expected or sequence.host_id is not None or not sequence.cache_params.reads_cache:
                continue
            if len(self._expected) == self._limits.max_running_sequences:
                return
            if num_given + len(sequence.token_ids) > _MAX_PLAN_TOKENS:
                continue
            num_given += len(sequence.token_ids)
            tenant = sequence.tenant if self._by_tenant else ""
            cache = sequence.cache_params
            prompt = ExpectedPrompt(sequence.token_ids, cache.salt, cache.adapter, tenant, _EXPECTED_IN_S)
            self._expected[sequence] = prompt

    def _admits(self, newcomer: Sequence) -> bool:
        is_first = newcomer is self.line[0]
        is_alone = is_first and not self._queues.running and self._room.starved is None
        return is_alone or self._policy.admits(newcomer, self._view)

    def _add_newcomer(self, sequence: Sequence) -> bool:
        """Offer one that waits; False if it has to wait for the next plan."""
        if sequence.host_id is None:
            seq_id = self._fresh_id()
            self._admissions.append(
                Admission(
                    seq_id,
                    sequence.token_ids,
                    resumed=sequence.was_admitted or sequence.index > 0,
                    waits_for_prefix=sequence.num_waits_for_prefix < _MAX_WAITS_FOR_PREFIX,
                    cache=sequence.cache_params,
                    reserved_tokens=sequence.num_reserved_tokens,
                    tenant=sequence.tenant if self._by_tenant else "",
                )
            )
        elif sequence.host_id in self._queues.offloads or self._admissions:
            return False  # it is on its way there; or it would be let in before those above it in rank
        else:
            seq_id = sequence.host_id
            self._restores.append(seq_id)
        self._sequences[seq_id] = sequence
        return True

    def _expected_run_of(self, newcomer: Sequence) -> float:
        num_tokens = len(newcomer.token_ids)
        if newcomer.host_id is not None:
            return num_tokens - newcomer.num_host_tokens
        return num_tokens * (1.0 - self._room.cached_ratio) if newcomer.cache_params.reads_cache else num_tokens


def _fork_point(child: Sequence) -> int:
    return child.num_forked_tokens
