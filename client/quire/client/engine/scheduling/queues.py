"""All unfinished sequences, in a collection for each state, and the ids to release or offload. Pure.

    WAITING     waiting      by rank
                apart        beams that are admitted on their own while their group runs
    RUNNING     running      by rank
                batch        of these, those that compute one token in every step
                unbatched    the others, by rank
    DRAINING    draining
    POSTPONED   postponed
    FOLLOWING   followers    by the sequence with their prompt

    releases    ids that the next plans release, and the time until their tokens are needed again, if known
    offloads    ids that the next plan moves to the host tier
    groups      of beams

A method moves a sequence and its id together, so an id is held, released or offloaded, and never lost. The scheduler
decides which sequence moves, and when.
"""

from bisect import bisect_right, insort
from collections import abc
from operator import attrgetter

from quire.client.engine.scheduling.decode_batch import DecodeBatch
from quire.client.engine.scheduling.faults import BrokenInvariantError
from quire.client.engine.scheduling.layer_groups import BlockTables
from quire.client.engine.scheduling.sequence import BeamGroup, FinishReason, Sequence, SequenceState

# The states in which a sequence may have blocks in the host tier.
_AWAY = frozenset({SequenceState.WAITING, SequenceState.DRAINING})

by_rank: abc.Callable[[Sequence], tuple[int, ...]] = attrgetter("rank")
"""Returns the key that orders sequences."""


def id_of(sequence: Sequence) -> int:
    """Return the id of a sequence that is in the pool."""
    if sequence.seq_id is None:
        raise AssertionError("a sequence without an id was taken for one in the pool")
    return sequence.seq_id


def require(holds: bool, what: str) -> None:
    """Raise BrokenInvariantError if an invariant does not hold."""
    if not holds:
        raise BrokenInvariantError(f"broken invariant: {what}")


class Queues:
    """The collections; read them freely, change them through the methods."""

    def __init__(self, tables: BlockTables) -> None:
        """Set the tables anew with the limits."""
        self.tables = tables
        self.waiting: list[Sequence] = []
        self.apart: list[Sequence] = []
        self.running: list[Sequence] = []
        self.batch = DecodeBatch()
        self.unbatched: list[Sequence] = []
        self.draining: set[Sequence] = set()
        self.postponed: list[Sequence] = []
        self.followers: dict[Sequence, list[Sequence]] = {}
        self.suspects: list[Sequence] = []  # by rank; of any state
        self.releases: dict[int, int] = {}  # id -> blocks that are released, at most
        self.offloads: dict[int, Sequence] = {}
        self.groups: set[BeamGroup] = set()
        self.expected_back_s: dict[int, float] = {}  # of ids to release, for ended sequences

    @property
    def are_empty(self) -> bool:
        """True if no sequence lives but postponed ones, and no id has to be released."""
        return not (self.waiting or self.apart or self.running or self.draining or self.releases or self.offloads)

    @property
    def num_releasing_blocks(self) -> int:
        """Blocks that the next plans release, at most."""
        return sum(self.releases.values()) + sum(map(self.blocks_of, self.offloads.values()))

    @property
    def num_places_taken(self) -> int:
        """Places of running sequences, and places kept for further beams of running groups."""
        return len(self.running) + sum(group.num_places_kept for group in self.groups)

    def blocks_of(self, sequence: Sequence) -> int:
        """Blocks that a sequence's release frees, at most."""
        return sequence.num_blocks(self.tables)

    def below(self, needy: Sequence) -> list[Sequence]:
        """Running sequences below this one in rank. For a beam, without those of its own group."""
        lower = self.running[bisect_right(self.running, needy.rank, key=by_rank) :]
        return lower if needy.group is None else [other for other in lower if other.group is not needy.group]

    # Moves.

    def add(self, samples: abc.Sequence[Sequence]) -> None:
        """Take a request: its first sample waits, the others follow it."""
        first, *others = samples
        self.queue(first)
        if others:
            self.followers[first] = others
        if first.group is not None:
            self.groups.add(first.group)

    def forget(self, samples: abc.Sequence[Sequence]) -> None:
        """Take a request back that was added just now, wholly or in part."""
        first = samples[0]
        self.waiting[:] = [sequence for sequence in self.waiting if sequence.request_id != first.request_id]
        self.followers.pop(first, None)
        if first.group is not None:
            self.groups.discard(first.group)

    def queue(self, sequence: Sequence) -> None:
        """Put a sequence, in state WAITING, in the queue."""
        sequence.seq_id = None
        insort(self.waiting, sequence, key=by_rank)

    def begin(self, sequence: Sequence, seq_id: int, *, num_tokens: int, num_shared_tokens: int | None = None) -> None:
        """Move a waiting or following sequence into the pool, with this many tokens that need not be computed."""
        if sequence.state is SequenceState.WAITING:
            self._stop_waiting(sequence)
        sequence.begin(seq_id, num_scheduled_tokens=num_tokens, num_shared_tokens=num_shared_tokens)
        insort(self.running, sequence, key=by_rank)
        insort(self.unbatched, sequence, key=by_rank)

    def batch_up(self, sequences: abc.Collection[Sequence]) -> None:
        """Add running sequences to the batch. The next run of each has one token."""
        for sequence in sequences:
            self.batch.add(sequence)
        if sequences:
            self.unbatched = [sequence for sequence in self.unbatched if sequence.batch is None]

    def advance_batch(self) -> None:
        """Count a run of every sequence of the batch as planned."""
        for sequence in self.batch.advance():
            insort(self.unbatched, sequence, key=by_rank)

    def hold(self, sequence: Sequence) -> None:
        """Take a sequence out of the batch: it is in no plan before its last token is known."""
        self.batch.remove(sequence)
        insort(self.unbatched, sequence, key=by_rank)
        sequence.is_held = True

    def let_go(self, sequence: Sequence) -> None:
        """Let a sequence that was held back, with a known last token, run with the others again."""
        sequence.is_held = False
        if not self.groups:
            self.batch_up([sequence])

    def disband(self) -> None:
        """Take all sequences out of the batch: they run in different steps."""
        self.batch.clear()
        self.unbatched = self.running.copy()

    def stop_following(self, child: Sequence) -> Sequence:
        """Take a sample from the one that it follows; returns that one."""
        parent = next(parent for parent, followers in self.followers.items() if child in followers)
        self.followers[parent].remove(child)
        if not self.followers[parent]:
            del self.followers[parent]
        return parent

    def wait_alone(self, follower: Sequence) -> None:
        """Put a sample that follows no other one any more in the queue."""
        follower.move(SequenceState.WAITING)
        self.queue(follower)

    def wait_apart(self, beam: Sequence) -> None:
        """Let a following beam of a running group, which cannot be forked, wait for an admission of its own."""
        self.stop_following(beam)
        beam.move(SequenceState.WAITING)
        beam.was_admitted = True  # with the beam that it followed
        insort(self.apart, beam, key=by_rank)

    def _stop_waiting(self, sequence: Sequence) -> None:
        (self.apart if sequence in self.apart else self.waiting).remove(sequence)

    def follow(self, child: Sequence, parent: Sequence) -> None:
        """Let a new beam, in state FOLLOWING, follow its parent, the beam that it is forked from."""
        self.followers.setdefault(parent, []).append(child)

    def regroup(self, group: BeamGroup) -> None:
        """Take all beams of a group out of the pool. The first in rank waits; the others follow it.

        So a group has one place in the queue, and its beams share blocks again on their return.
        """
        leader = group.leader
        for beam in group.members:
            self._release(beam)
            beam.reset()
        self.queue(leader)
        for beam in group.members:
            if beam is not leader:
                beam.follow(leader)
                self.follow(beam, leader)

    def preempt(self, sequence: Sequence, *, is_offloaded: bool) -> None:
        """Take a running sequence out of the pool; its blocks are released, or kept in the host tier."""
        if sequence.group is not None:
            self.regroup(sequence.group)
            return
        seq_id = id_of(sequence)
        self._release(sequence)
        sequence.preempt(is_offloaded=is_offloaded)
        if is_offloaded:
            del self.releases[seq_id]
            self.offloads[seq_id] = sequence
        if sequence.state is SequenceState.DRAINING:
            self.draining.add(sequence)
        else:
            self.queue(sequence)

    def drain(self, sequence: Sequence) -> None:
        """Queue a draining sequence that has got a token, if it waits for no further one."""
        if not sequence.num_sampling:
            self.draining.discard(sequence)
            sequence.move(SequenceState.WAITING)
            self.queue(sequence)

    def readmit(self, sequence: Sequence) -> None:
        """Discard the computed tokens of a sequence, or of its group; it waits with its known tokens."""
        if sequence.group is not None:
            self.regroup(sequence.group)
            return
        self._release(sequence)
        self.release_host(sequence)
        sequence.reset()
        self.queue(sequence)

    def postpone(self, sequence: Sequence) -> None:
        """Discard a sequence's computed tokens; it is in no plan before resume()."""
        self.readmit(sequence)
        self.waiting.remove(sequence)
        sequence.move(SequenceState.POSTPONED)
        self.postponed.append(sequence)
        if sequence in self.suspects:
            self.suspects.remove(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Queue a postponed sequence again."""
        self.postponed.remove(sequence)
        sequence.move(SequenceState.WAITING)
        self.queue(sequence)
        if sequence.is_suspect:
            insort(self.suspects, sequence, key=by_rank)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a living sequence; samples that followed it wait for admissions of their own."""
        self.hint_return(sequence, sequence.seq_id if sequence.state is SequenceState.RUNNING else sequence.host_id)
        self._release(sequence)
        self.release_host(sequence)
        sequence.finish(reason)
        self._leave_group(sequence)
        if sequence in self.suspects:
            self.suspects.remove(sequence)
        for follower in self.followers.pop(sequence, ()):
            self.wait_alone(follower)

    def _leave_group(self, beam: Sequence) -> None:
        if beam.group is None:
            return
        beam.group.members.remove(beam)
        if not beam.group.members:
            self.groups.discard(beam.group)

    def hint_return(self, sequence: Sequence, seq_id: int | None) -> None:
        """Say with the release of an ended sequence's id when its tokens will be asked for again, if that is known."""
        if seq_id is not None and sequence.cache.expected_back_s is not None:
            self.expected_back_s[seq_id] = sequence.cache.expected_back_s

    def reset_pool(self) -> None:
        """Let all running sequences wait with their known tokens: all ids are invalid."""
        for group in self.groups:
            self.regroup(group)
        self.releases.clear()
        self.expected_back_s.clear()
        self.offloads.clear()
        for sequence in self.waiting:
            sequence.host_id, sequence.is_expected = None, False
        for sequence in (*self.running, *self.draining):
            sequence.reset()
            insort(self.waiting, sequence, key=by_rank)
        self.running.clear()
        self.batch.clear()
        self.unbatched.clear()
        self.draining.clear()

    def release_host(self, sequence: Sequence) -> None:
        """Release a sequence's host blocks, present or planned, with the next plan."""
        if sequence.host_id is None:
            return
        leaving = self.offloads.pop(sequence.host_id, None)
        self.releases[sequence.host_id] = 0 if leaving is None else self.blocks_of(sequence)
        sequence.host_id = None

    def suspect(self, sequence: Sequence) -> None:
        """Let a sequence, or its group, run alone until it is past its present place."""
        if sequence.group is not None:
            sequence = sequence.group.leader
        until = max(sequence.num_scheduled_tokens, len(sequence.token_ids))
        sequence.suspect_until = max(until, sequence.suspect_until or 0)
        self.readmit(sequence)
        if sequence not in self.suspects:
            insort(self.suspects, sequence, key=by_rank)

    def clear(self, sequence: Sequence) -> None:
        """Suspect a sequence no longer."""
        sequence.suspect_until = None
        sequence.num_failures = 0
        if sequence in self.suspects:
            self.suspects.remove(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Take a sequence out of the collection of its state; the next plan releases its blocks, if any."""
        match sequence.state:
            case SequenceState.WAITING:
                self._stop_waiting(sequence)
            case SequenceState.RUNNING:
                self.running.remove(sequence)
                if sequence.batch is None:
                    self.unbatched.remove(sequence)
                else:
                    self.batch.remove(sequence)
                self.releases[id_of(sequence)] = self.blocks_of(sequence)
            case SequenceState.DRAINING:
                self.draining.discard(sequence)
            case SequenceState.FOLLOWING:
                self.stop_following(sequence)
            case SequenceState.POSTPONED:
                self.postponed.remove(sequence)
            case SequenceState.FINISHED:
                pass

    # Invariants.

    def living(self) -> list[Sequence]:
        """All sequences in the collections."""
        following = [child for children in self.followers.values() for child in children]
        return [*self.waiting, *self.apart, *self.running, *self.draining, *self.postponed, *following]

    def check_invariants(self) -> None:
        """Raise BrokenInvariantError if the collections and the sequences disagree. Cost: all sequences."""
        homes = [
            (SequenceState.WAITING, self.waiting),
            (SequenceState.WAITING, self.apart),
            (SequenceState.RUNNING, self.running),
            (SequenceState.DRAINING, self.draining),
            (SequenceState.POSTPONED, self.postponed),
            (SequenceState.FOLLOWING, [child for children in self.followers.values() for child in children]),
        ]
        living = self.living()
        alive = set(living)
        require(len(alive) == len(living), "a sequence is in one place")
        for state, members in homes:
            require(all(s.state is state for s in members), "a sequence is in the collection of its state")
        for ordered in (self.waiting, self.apart, self.running, self.batch.members, self.unbatched, self.suspects):
            if len(ordered) > 1:
                require(ordered == sorted(ordered, key=by_rank), "queues are in order of rank")
        self._check_batch(living)
        suspects = {s for s in living if s.is_suspect and s.state is not SequenceState.POSTPONED}
        require(set(self.suspects) == suspects, "each suspect is alive and in line")
        require(all(parent in alive for parent in self.followers), "a parent of followers is alive")
        beams = [beam for group in self.groups for beam in group.members]
        require(set(beams) == {s for s in living if s.group is not None}, "unfinished ones of a group are its beams")
        for group in self.groups:
            require(len(group.members) <= group.width, "a group has no more beams than its width")
            require(sum(s in self.waiting for s in group.members) <= 1, "one of a group is in line")
        require(all(s.group is not None and s.group.running for s in self.apart), "a beam is apart from running ones")
        ids = {id_of(sequence) for sequence in self.running}
        require(len(ids) == len(self.running), "an id belongs to one sequence")
        require(not ids & self.releases.keys(), "a running sequence is not released")
        require(self.expected_back_s.keys() <= self.releases.keys(), "hints are for released sequences")
        require(not ids & self.offloads.keys(), "a running sequence is not offloaded")
        require(not self.offloads.keys() & self.releases.keys(), "an offloaded sequence is not released")
        require(all(s.host_id == i for i, s in self.offloads.items()), "an offloaded sequence has its id")
        for sequence in living:
            self._check_sequence(sequence)

    def _check_batch(self, living: list[Sequence]) -> None:
        batch = self.batch
        members = set(batch.members)
        require(
            sorted((*batch.members, *self.unbatched), key=by_rank) == self.running, "a running one is batched or not"
        )
        require([s.seq_id for s in batch.members] == batch.ids, "the batch has its members' ids")
        scheduled = [base + batch.steps.count for base in batch.bases]
        require([s.num_scheduled_tokens for s in batch.members] == scheduled, "the batch has its members' tokens")
        require(all(s.batch is batch.steps and s.num_left > 0 for s in batch.members), "a member of the batch decodes")
        require(all(s.num_sampling >= 0 for s in batch.members), "a member of the batch has no token too many")
        require(not any(s.is_held for s in batch.members), "a member of the batch is not held back")
        require(all(s.batch is None for s in living if s not in members), "others are in no batch")

    def _check_sequence(self, sequence: Sequence) -> None:
        require(sequence.num_scheduled_tokens <= sequence.num_tokens, "nothing is scheduled that does not exist")
        num_output = sequence.num_tokens - sequence.num_prompt_tokens
        require(num_output + sequence.num_drafts <= sequence.max_tokens, "nothing is sampled beyond max_tokens")
        require(not sequence.num_drafts or sequence.num_sampling == 1, "a sequence with drafts waits for their outcome")
        require(sequence.host_id is None or sequence.state in _AWAY, "a sequence in the host tier is not in the pool")
        held = sequence.state in (SequenceState.RUNNING, SequenceState.DRAINING)
        require(held == (sequence.seq_id is not None), "a sequence with an id is in the pool")
        if sequence.state is SequenceState.DRAINING:
            require(sequence.num_sampling > 0, "a draining sequence waits for a token")
