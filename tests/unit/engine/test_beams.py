"""Beam searches through the scheduler: its models of both servers, with forks, preemptions, failures and new epochs."""

from __future__ import annotations

import random
import zlib
from collections import abc
from dataclasses import replace
from typing import Any

import pytest
from unit.engine.test_scheduler import CHUNKED, END_TOKEN, REQUEST_IDS, SLIDING, VOCABULARY, World, expected_of, limits

from quire.cache.v1.layer_spans import LayerGroupKind
from quire.client.engine.caching import NO_CACHE_PARAMS
from quire.client.engine.scheduling.beam_search import BeamSearch, BeamSearchParams, Ended, Heir
from quire.client.engine.scheduling.layer_groups import FULL, LayerGroup
from quire.client.engine.scheduling.new_sequences import new_beam_group
from quire.client.engine.scheduling.plans import SchedulerLimits
from quire.client.engine.scheduling.sequence import BeamGroup, FinishReason, Sequence, SequenceState
from quire.client.errors import InvalidRequest

ENDS = frozenset({END_TOKEN})


def top_of(tokens: list[int]) -> list[tuple[int, float]]:
    """The model's scores of each next token, the most probable first; nearly all numbers differ."""
    values = {token: -(zlib.crc32(bytes([*tokens, token])) % 100_003) / 20_000 for token in range(VOCABULARY)}
    return sorted(values.items(), key=lambda item: -item[1])


def searched(prompt: list[int], params: BeamSearchParams) -> list[Ended]:
    search = BeamSearch(params, max_tokens=params.max_tokens or 1, end_token_ids=ENDS)
    outputs: list[list[int]] = [[]]
    while heirs := search.step([top_of([*prompt, *output]) for output in outputs], outputs):
        outputs = [[*outputs[heir.parent], heir.token_id] for heir in heirs]
    return search.best()


class BeamWorld(World):
    """Answers with the outcome of each beam, as the engine does."""

    def __init__(self, limits: SchedulerLimits) -> None:
        super().__init__(limits)
        self.searches: dict[BeamGroup, tuple[list[int], BeamSearchParams, BeamSearch]] = {}
        self.found: dict[BeamGroup, list[Ended]] = {}

    def search(self, prompt: list[int], **fields: Any) -> BeamGroup:
        params = BeamSearchParams(**({"n": fields.get("beam_width", 4)} | fields))
        group = new_beam_group(self.limits, next(REQUEST_IDS), prompt, params, end_token_ids=ENDS)
        self.scheduler.add(group.members)
        self.searches[group] = prompt, params, BeamSearch(params, max_tokens=group.max_tokens, end_token_ids=ENDS)
        return group

    def choose(self, beams: list[Sequence]) -> None:
        for beam in beams:
            self.scheduler.take_top(beam, top_of(beam.token_ids))
        for group in dict.fromkeys(beam.group for beam in beams):
            if group is None or not group.members or not group.is_ready:
                continue
            search = self.searches[group][2]
            tops = [beam.top or () for beam in group.members]
            if heirs := search.step(tops, [beam.output_token_ids for beam in group.members]):
                self.scheduler.branch(group, heirs)
            else:
                self.found[group] = search.best()
                self.scheduler.end(group.members, FinishReason.STOP)

    def reset(self) -> None:
        """The pool's new epoch."""
        self.fresh_pool()
        self.scheduler.reset_all()

    def check_found(self) -> None:
        for group, (prompt, params, _) in self.searches.items():
            assert self.found[group] == searched(prompt, params)


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "scores", "goes_on"),
    [
        (True, 1.0, [-1.0, -1.5], False),
        (False, 1.0, [-1.0, -1.5], False),
        ("never", 1.0, [-1.0, -1.5], True),
        ("never", 0.0, [-1.5, -2.0], False),
        (False, 2.0, [-0.5, -1.5], True),
        (True, 2.0, [-0.5, -1.5], False),
        (False, -1.0, [-1.5, -4.0], False),
    ],
)
def test_scores_and_the_end_of_a_search(
    early_stopping: Any, length_penalty: float, scores: list[float], goes_on: bool
) -> None:
    """One beam ends at its first token with a sum of -1.5, one at its second with -2; those that run have -4."""
    params = BeamSearchParams(beam_width=2, n=2, early_stopping=early_stopping, length_penalty=length_penalty)
    search = BeamSearch(params, max_tokens=10, end_token_ids=ENDS)
    heirs = search.step([[(0, -1.0), (END_TOKEN, -1.5), (1, -2.0)]], [[]])
    assert [(heir.parent, heir.token_id, heir.cumulative_logprob) for heir in heirs] == [(0, 0, -1.0), (0, 1, -2.0)]
    first, second = [(END_TOKEN, -1.0), (2, -3.0), (3, -4.0)], [(2, -2.0), (3, -3.0), (END_TOKEN, -9.0)]
    assert bool(search.step([first, second], [[0], [1]])) == goes_on
    assert [ended.score for ended in search.best()] == scores
    assert {ended.token_ids for ended in search.best()} == {(END_TOKEN,), (0, END_TOKEN)}


def test_only_an_end_token_among_the_best_ends_a_beam() -> None:
    params = BeamSearchParams(beam_width=2, n=2, early_stopping=True)
    search = BeamSearch(params, max_tokens=10, end_token_ids=ENDS)
    assert search.step([[(0, -1.0), (1, -1.5), (END_TOKEN, -2.0)]], [[]])
    assert not search.best()
    assert search.step(
        [[(END_TOKEN, -0.1), (2, -1.0), (3, -2.0)], [(END_TOKEN, -9.0), (2, -9.5), (3, -9.9)]], [[0], [1]]
    )
    assert [ended.token_ids for ended in search.best()] == [(0, END_TOKEN)]


def test_a_search_alone_forks_and_copies_no_more_than_it_must() -> None:
    world = BeamWorld(limits())
    group = world.search([1, 2, 3, 4, 5], beam_width=3, max_tokens=9)
    world.run()
    world.check_found()
    statistics = world.scheduler.statistics()
    assert (statistics.admissions, statistics.preemptions) == (1, 0)
    assert group.num_begun - 1 == statistics.forks > 2
    assert statistics.scheduled_tokens == 5 + sum(2 for _ in range(statistics.forks)) + statistics.sampled_tokens - (
        statistics.forks + 1
    )


def test_others_run_ahead_of_a_search() -> None:
    world = BeamWorld(limits())
    world.search([1, 2, 3], beam_width=2, max_tokens=8)
    (sample,) = world.add([4, 5], max_tokens=9, ends=())
    world.plan()
    world.plan()
    assert [sequence is sample for sequence in world.flight[1][0].sequences] == [True]
    world.run()
    world.check_found()
    assert world.output[sample.arrival] == expected_of(sample, ())


def test_the_heirs_of_a_beam_go_on_in_its_table_or_in_forks_of_it() -> None:
    world = BeamWorld(limits())
    group = world.search([1, 2, 3, 4, 5], beam_width=2, max_tokens=5)
    world.plan()
    world.end_step()
    first, second = group.members
    assert (first.state, second.state) == (SequenceState.RUNNING, SequenceState.FOLLOWING)
    plan = world.scheduler.schedule()
    assert plan.trims == {first.seq_id: 5}
    assert [(fork.parent_id, fork.num_tokens) for fork in plan.forks] == [(first.seq_id, 5)]
    assert list(plan.extend_counts) == [1, 2]
    assert list(plan.appended.values()) == [first.token_ids[5:], second.token_ids[5:]]
    world.run()
    world.check_found()


def test_a_loser_is_released_with_the_next_plan() -> None:
    world = BeamWorld(limits())
    group = world.search([2, 1, 3, 4], beam_width=3, max_tokens=12)
    while world.scheduler.has_work:
        before = {beam: beam.seq_id for beam in group.members if beam.state is SequenceState.RUNNING}
        world.turn()
        lost = {seq_id for beam, seq_id in before.items() if beam.state is SequenceState.FINISHED}
        assert lost <= set(world.scheduler.schedule().release_ids)
    world.check_found()
    assert world.cache.blocks().active == 0


def test_a_group_is_preempted_as_a_whole_and_waits_once_in_line() -> None:
    world = BeamWorld(limits())
    group = world.search([1, 2, 3, 4, 5, 1], beam_width=4, max_tokens=12)
    while len(group.running) < 4 or len(group.members[0].token_ids) < 10:
        world.turn()
    world.scheduler._preemption.preempt(group.members[2])
    assert sorted(beam.state.value for beam in group.members) == ["following"] * 3 + ["waiting"]
    assert world.scheduler.statistics().preemptions == 4
    world.run()
    world.check_found()
    statistics = world.scheduler.statistics()
    assert statistics.admissions == 2


def test_places_are_kept_for_the_beams_to_come() -> None:
    """Two searches that could each take the places that the other one needs run one after the other."""
    world = BeamWorld(limits(max_running_sequences=6))
    first, second = (world.search([number, 3], beam_width=4, max_tokens=6) for number in (1, 2))
    samples = world.add([4, 4], max_tokens=4, n=4, ends=())
    while second.members[0].state is SequenceState.WAITING:
        world.turn()
        assert len(world.scheduler._queues.running) <= 6
    assert first in world.found
    world.run()
    world.check_found()
    assert [world.output[s.arrival] for s in samples] == [expected_of(s, ()) for s in samples]


def test_a_group_is_suspected_as_a_whole() -> None:
    world = BeamWorld(limits(max_step_failures=3))
    beside = world.add([5, 5, 5], max_tokens=9, ends=())
    world.search([1, 2, 3, 4, 5], beam_width=3, max_tokens=7)
    bad = world.search([3, 2, 1], beam_width=3, max_tokens=7)
    world.poison[bad.members[0].request_id] = 5
    for _ in range(2000):
        if world.scheduler.has_work:
            world.turn()
    assert not world.scheduler.has_work
    assert bad not in world.found
    assert not bad.members
    del world.searches[bad]
    world.check_found()
    assert world.output[beside[0].arrival] == expected_of(beside[0], ())


class ApartWorld(BeamWorld):
    """Its beams part with the first token, and each continues with its own best one."""

    def __init__(self, **changes: Any) -> None:
        narrow = LayerGroup(LayerGroupKind.SLIDING, 2)
        wide = {"max_step_tokens": 128, "block_size": 2, "num_blocks": 140, "layer_groups": (FULL, narrow)}
        super().__init__(limits(**(wide | changes)))
        self.outputs: dict[BeamGroup, list[list[int]]] = {}

    def choose(self, beams: list[Sequence]) -> None:
        for beam in beams:
            self.scheduler.take_top(beam, top_of(beam.token_ids))
        for group in dict.fromkeys(beam.group for beam in beams):
            if group is None or not group.members or not group.is_ready:
                continue
            heirs = [Heir(index, (beam.top or ())[0][0], 0.0) for index, beam in enumerate(group.members)]
            if len(heirs) < group.width:
                heirs = [Heir(0, token, 0.0) for token, _ in (group.members[0].top or ())[: group.width]]
            if len(group.members[0].output_token_ids) < group.max_tokens:
                self.scheduler.branch(group, heirs)
            else:
                self.outputs[group] = [beam.output_token_ids for beam in group.members]
                self.scheduler.end(group.members, FinishReason.STOP)

    def check_found(self) -> None:
        for group, (prompt, _, _) in self.searches.items():
            expected = [[token] for token, _ in top_of(prompt)[: group.width]]
            while len(expected[0]) < group.max_tokens:
                expected = [[*output, top_of([*prompt, *output])[0][0]] for output in expected]
            assert self.outputs[group] == expected

    def part(self, prompt: abc.Sequence[int] = (1, 2, 3, 4, 5, 1)) -> BeamGroup:
        """A search that was preempted and runs again, with beams apart.

        Its first beam finds its tokens in the cache. There the window behind the prompt is gone.
        """
        group = self.search(list(prompt), beam_width=4, max_tokens=24)
        while len(group.running) < 4 or len(group.members[0].token_ids) < 20:
            self.turn()
        self.scheduler._preemption.preempt(group.members[0])
        hogged, self.cache.hogged = self.cache.hogged, self.cache.num_blocks
        self.plan()
        while self.flight:  # until its blocks are no longer retired
            self.end_step()
        self.cache.hogged = hogged
        before = self.scheduler.statistics().planned_steps
        while not self.scheduler._queues.apart:
            assert self.scheduler.statistics().planned_steps < before + 20
            self.turn()
        return group


def test_beams_whose_fork_is_refused_are_admitted() -> None:
    world = ApartWorld()
    group = world.part()
    apart = list(world.scheduler._queues.apart)
    before = world.scheduler.statistics()
    while world.scheduler._queues.apart:
        assert world.scheduler.statistics().planned_steps <= before.planned_steps + 4
        world.turn()
    assert all(beam.state is SequenceState.RUNNING for beam in group.members)
    after = world.scheduler.statistics()
    assert after.admissions - before.admissions == len(apart)
    assert after.refusals == before.refusals, "no such fork is planned again"
    world.run()
    world.check_found()


def test_nothing_is_admitted_before_a_beam_whose_group_runs() -> None:
    world = ApartWorld()
    world.part()
    (other,) = world.add([5] * 30, max_tokens=30, priority=1, ends=())
    beams = list(world.scheduler._queues.apart)
    plan = world.scheduler.schedule()
    admitted = [plan.sequences[admission.seq_id] for admission in plan.admissions]
    assert admitted == beams[: len(admitted)] != []
    assert all(admission.resumed for admission in plan.admissions)
    assert plan.admission_reserve_blocks == 0
    world.run()
    world.check_found()
    assert world.output[other.arrival] == expected_of(other, ())


def test_a_beam_apart_gets_the_blocks_of_a_sequence_below_it() -> None:
    world = ApartWorld()
    samples = world.add([5] * 8, max_tokens=40, n=2, priority=-1, ends=())
    while not all(sample.state is SequenceState.RUNNING for sample in samples):
        world.turn()
    group = world.part()
    world.cache.hogged = len(world.cache.allocatable()) - 15  # for one of three beams
    before = world.scheduler.statistics()
    while world.scheduler._queues.apart:
        assert world.scheduler.statistics().planned_steps <= before.planned_steps + 8
        world.turn()
    assert world.scheduler.statistics().preemptions > before.preemptions
    assert group.running
    world.cache.hogged = 0
    world.run()
    world.check_found()


def test_a_group_that_waits_for_blocks_of_another_client_is_preempted_in_the_end() -> None:
    world = ApartWorld(max_stalls=3)
    group = world.part()
    world.cache.hogged = 140
    before = world.scheduler.statistics()
    while group.running:
        assert world.scheduler.statistics().planned_steps <= before.planned_steps + 12
        world.turn()
    world.cache.hogged = 0
    world.run()
    world.check_found()


def test_a_group_that_waits_for_places_of_another_client_is_preempted_in_the_end() -> None:
    world = BeamWorld(limits(max_stalls=3))
    group = world.search([1, 2, 3], beam_width=3, max_tokens=6)
    world.cache.refuses_forks = True  # TOO_MANY_SEQUENCES: the other client waits for the place of this one's beam
    while not group.running:
        world.turn()
    before = world.scheduler.statistics()
    while group.running:
        assert world.scheduler.statistics().planned_steps <= before.planned_steps + 12
        world.turn()
    world.cache.refuses_forks = False
    world.run()
    world.check_found()


def test_a_beam_apart_ends_with_its_group() -> None:
    world = ApartWorld()
    group = world.part()
    world.plan(between=lambda: world.scheduler.end(group.members, FinishReason.CANCELLED))
    world.searches.pop(group)
    world.run()


def test_a_group_that_is_preempted_while_its_beam_is_admitted_gives_the_blocks_back() -> None:
    world = ApartWorld()
    group = world.part()
    world.plan(between=lambda: world.scheduler._preemption.preempt(group.leader))
    world.run()
    world.check_found()


def test_a_suspected_group_admits_its_beams_apart() -> None:
    world = ApartWorld()
    beside = world.add([5, 5, 5], max_tokens=40, ends=())
    group = world.part()
    world.scheduler._queues.suspect(group.leader)
    world.run()
    world.check_found()
    assert world.output[beside[0].arrival] == expected_of(beside[0], ())


@pytest.mark.parametrize("groups", [(), (FULL, SLIDING), (CHUNKED,)], ids=["full", "full and sliding", "chunked"])
@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_every_search_finds_what_it_should(seed: int, groups: tuple[LayerGroup, ...]) -> None:
    """Tight pools and steps, other requests, priorities, failed steps, refused forks, cancellations and new epochs."""
    chance = random.Random(seed)
    world = BeamWorld(
        limits(
            max_step_tokens=chance.choice((8, 12, 30)),
            max_running_sequences=chance.choice((6, 9)),
            num_blocks=chance.choice((18, 24, 40)) * (1 + len(groups)),
            layer_groups=groups,
            num_host_blocks=chance.choice((0, 10)),
            max_step_failures=100,
        )
    )
    cancelled: list[BeamGroup] = []
    samples = []
    for _ in range(8):
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 11))]
        priority = chance.choice((0, 0, 1))
        if chance.random() < 0.5:
            width = chance.choice((1, 2, 3, 4))
            stopping = chance.choice((True, False, "never"))
            most = chance.randint(1, 12)
            world.search(prompt, beam_width=width, max_tokens=most, early_stopping=stopping, priority=priority)
        else:
            samples += world.add(prompt, max_tokens=chance.randint(1, 16), n=chance.choice((1, 3)), priority=priority)
        for _ in range(chance.randint(0, 12)):
            if world.scheduler.has_work:
                world.turn()
    for _ in range(4000):
        if not world.scheduler.has_work:
            break
        event = chance.random()
        if event < 0.02 and world.flight:
            world.end_step(breaks=True)
        elif event < 0.025:
            world.reset()
        elif event < 0.03 and (living := [group for group in world.searches if group.members]):
            cancelled.append(chance.choice(living))
            world.scheduler.end(cancelled[-1].members, FinishReason.CANCELLED)
        elif event < 0.05:
            world.cache.refuses_forks = not world.cache.refuses_forks
        else:
            world.turn()
    world.cache.refuses_forks = False
    world.run()
    for group in cancelled:
        world.searches.pop(group, None)
    failed = [group for group in world.searches if group not in world.found]
    assert not failed
    world.check_found()
    assert all(sample.finish_reason is not FinishReason.FAILED for sample in samples)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 17}, "beam_width"),
        ({"beam_width": 2.0}, "beam_width"),
        ({"beam_width": 3, "n": 4}, "n"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"length_penalty": 10.5}, "length_penalty"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": "1"}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"priority": 2**31}, "priority"),
        ({"tenant": "x" * 129}, "tenant"),
        ({"timeout_s": 0}, "timeout_s"),
    ],
)
def test_values_out_of_range_are_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        BeamSearchParams(**fields)
    assert refused.value.metadata["field"] == field
    assert refused.value.metadata["limit"]


def test_a_search_has_to_fit_the_pool_with_all_of_its_beams() -> None:
    world = BeamWorld(limits(num_blocks=20, max_running_sequences=6))
    fields = {"beam_width": 4, "max_tokens": 11}
    # 8 tokens are a block that all share, and one that each beam has a copy of; 19 blocks for 4 beams are 4 each.
    world.search([1, 2, 3, 4, 5, 1, 2, 3], **{**fields, "max_tokens": 12})
    with pytest.raises(InvalidRequest, match=r"max_tokens is 13, must be at most 12 with 4 beams after 8 tokens"):
        world.search([1, 2, 3, 4, 5, 1, 2, 3], **{**fields, "max_tokens": 13})
    unlimited = world.search([1, 2, 3, 4, 5, 1, 2, 3], beam_width=4, max_tokens=None)
    assert unlimited.max_tokens == 12
    world.scheduler.end(unlimited.members, FinishReason.CANCELLED)
    world.searches.pop(unlimited)
    world.run()
    world.check_found()


def test_a_model_with_a_state_per_sequence_has_no_beam_search() -> None:
    world = BeamWorld(replace(limits(), has_recurrent_state=True))
    with pytest.raises(InvalidRequest, match="state per sequence"):
        new_beam_group(world.limits, 0, [1], BeamSearchParams(max_tokens=3), end_token_ids=ENDS, cache=NO_CACHE_PARAMS)
