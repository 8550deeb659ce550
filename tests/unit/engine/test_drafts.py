"""Drafters, what they cost, how many drafts pay, and what the scheduler does with them."""

import random
from collections import abc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric
from unit.engine.test_scheduler import COPYING, World, drafting, expected_of, limits, next_token

from quire.client.engine.caching import CacheParams, CacheUse
from quire.client.engine.config import EngineConfig
from quire.client.engine.metrics import EngineLook, Measured, families
from quire.client.engine.scheduling import lookup
from quire.client.engine.scheduling.guessing import DrafterCounts, Guesses
from quire.client.engine.scheduling.lookup import AnswerLookup, PromptLookup, RecentAnswers
from quire.client.engine.scheduling.plans import SchedulerLimits, StepInFlight
from quire.client.engine.scheduling.request_limits import check_drafts
from quire.client.engine.scheduling.sequence import FinishReason, Sequence, SequenceState
from quire.client.engine.scheduling.speculation import Way, best_choice
from quire.client.engine.scheduling.step_costs import StepCosts
from quire.client.engine.speculative import SpeculativeConfig
from quire.client.errors import InvalidRequest, ProtocolViolation

CONFIG = SpeculativeConfig(num_speculative_tokens=8, prompt_lookup_min=3, prompt_lookup_max=6)


# Configuration.


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ('{"method": "eagle"}', "method is 'eagle', must be one of ngram, suffix"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens is 0, must be an integer from 1 to 64"),
        ('{"num_speculative_tokens": 65}', "from 1 to 64"),
        ('{"num_speculative_tokens": true}', "from 1 to 64"),
        ('{"prompt_lookup_min": 0}', "prompt_lookup_min is 0"),
        ('{"prompt_lookup_min": 5, "prompt_lookup_max": 4}', "prompt_lookup_max is 4, must be an integer from 5 to 32"),
        ('{"model": "small"}', "'model', must be a field of the configuration: method, num_speculative_tokens"),
        ("[]", "a JSON object"),
        ("ngram", "a JSON object"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name_value_and_limit(given: str, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named.replace("[", r"\[")):
        SpeculativeConfig.of_json(given)


def test_one_bound_of_the_lookup_gives_way_to_the_other() -> None:
    assert SpeculativeConfig.of_json('{"prompt_lookup_max": 2}').prompt_lookup_min == 2
    assert SpeculativeConfig.of_json('{"prompt_lookup_min": 12}').prompt_lookup_max == 12


def test_a_pool_without_drafts_or_with_fewer_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidRequest, match=r"pool one verifies no drafts \(max_draft_count is 0\)"):
        check_drafts(CONFIG, limits(), pool="one")
    with pytest.raises(InvalidRequest, match="num_speculative_tokens is 8, must be at most 4, the max_draft_count"):
        check_drafts(CONFIG, limits(max_draft_count=4), pool="one")
    check_drafts(CONFIG, limits(max_draft_count=8), pool="one")
    with pytest.raises(InvalidRequest, match="a SpeculativeConfig, or None"):
        EngineConfig(speculative={"method": "ngram"})  # type: ignore[arg-type]


# Drafters.


def prompt_lookup(size: int = 3, most: int = 6) -> PromptLookup:
    return PromptLookup(size=size, most=most, num_expected=100)


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 9, 1, 2, 3]
    assert prompt_lookup().propose(tokens, 3) == [4, 5, 6]
    assert prompt_lookup().propose(tokens[:-1], 3) == ()
    assert prompt_lookup().propose([1, 2], 3) == ()


def test_of_several_places_the_longest_is_taken() -> None:
    tokens = [7, 1, 2, 3, 40, 8, 1, 2, 3, 50, 7, 1, 2, 3]
    assert prompt_lookup().propose(tokens, 1) == [40]


def test_a_text_that_repeats_is_continued_beyond_its_end() -> None:
    assert prompt_lookup().propose([1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]


@settings(max_examples=200)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 4), st.lists(st.integers(1, 9)))
def test_a_proposal_is_what_followed_the_same_tokens(tokens: list[int], size: int, cuts: list[int]) -> None:
    """However many tokens come at once."""
    drafter, num_seen = prompt_lookup(size), 0
    for cut in (*cuts, 60):
        num_seen = min(len(tokens), num_seen + cut)
        seen = tokens[:num_seen]
        proposed = list(drafter.propose(seen, 4))
        followed = [place for place in range(size, num_seen) if seen[place - size : place] == seen[num_seen - size :]]
        assert bool(proposed) == bool(followed)
        assert not proposed or proposed[0] in {seen[place] for place in followed}


class Counting(list[int]):
    """Counts the tokens that are read."""

    num_read = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
        found = super().__getitem__(index)
        type(self).num_read += len(found) if isinstance(index, slice) else 1
        return found


def test_a_token_costs_the_same_in_a_long_text() -> None:
    dice, read = random.Random(1), []
    for length in (2_000, 64_000):
        tokens = Counting(dice.randrange(50) for _ in range(length))
        drafter = prompt_lookup()
        for _ in range(20):
            drafter.propose(tokens, 8)
        Counting.num_read = 0
        for _ in range(200):
            tokens.append(dice.randrange(50))
            drafter.propose(tokens, 8)
        read.append(Counting.num_read / 200)
    assert max(read) < 100, "of 16 places at most, with the same hash"


def recent() -> RecentAnswers:
    return RecentAnswers(size=3, most=6)


def test_an_equal_prefix_is_continued_as_a_recent_answer_of_the_same_tenant_and_no_other() -> None:
    answers = recent()
    answers.of("gold", b"").add([5, 6, 7, 8, 21, 22, 23], num_prompt_tokens=4)
    same = AnswerLookup(answers.of("gold", b""))
    assert same.propose([1, 6, 7, 8], 8) == [21, 22, 23]
    assert same.propose([1, 6, 7, 8, 21, 22], 8) == [23]
    assert same.propose([1, 6, 7, 8, 21, 22, 23], 8) == ()
    for tenant, salt in (("", b""), ("silver", b""), ("gold", b"salt")):
        assert AnswerLookup(answers.of(tenant, salt)).propose([1, 6, 7, 8], 8) == ()


def test_recent_answers_are_bounded_in_tokens_and_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "MAX_ANSWER_TOKENS", 100)
    monkeypatch.setattr(lookup, "MAX_TENANTS", 2)
    answers = recent()
    first = AnswerLookup(answers.of("a", b""))
    for start in range(0, 1000, 10):
        answers.of("a", b"").add([*range(start, start + 10)], num_prompt_tokens=1)
        assert sum(len(part.tokens) for part in answers.of("a", b"").parts) <= 100
    assert first.propose([991, 992, 993], 2) == [994, 995]
    assert AnswerLookup(answers.of("a", b"")).propose([1, 2, 3], 2) == ()
    answers.of("a", b"").add([*range(5000, 7000)], num_prompt_tokens=1)
    assert sum(len(part.tokens) for part in answers.of("a", b"").parts) <= 100
    for tenant in "bc":
        answers.of(tenant, b"")
    assert AnswerLookup(answers.of("a", b"")).propose([991, 992, 993], 2) == (), "a tenant that came long ago"


# How many.


def guesses_after(tokens: list[int]) -> Guesses:
    guesses = Guesses([prompt_lookup()], {"ngram": DrafterCounts()})
    for end in range(1, len(tokens) + 1):
        guesses.take(tokens[:end])
    return guesses


def test_a_sequence_learns_from_tokens_that_had_no_drafts() -> None:
    dice = random.Random(2)
    copying = guesses_after([1, 2, 3, 4, 5] * 20)
    assert copying.next_chance > 0.95
    assert len(copying.chances(8)) == 8
    assert sorted(copying.chances(8), reverse=True) == copying.chances(8)
    loose = Guesses([prompt_lookup(1)], {"ngram": DrafterCounts()})
    tokens: list[int] = []
    for _ in range(200):
        tokens.append(dice.randrange(20))
        loose.take(tokens)
    assert loose.next_chance < 0.2


def costs_of(base_s: float, token_s: float, *, gap_s: float = 0.0) -> StepCosts:
    costs = StepCosts()
    for num_tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256) * 2:
        device_s = base_s + num_tokens * token_s
        costs.observe(num_tokens, device_s=device_s, period_s=device_s, is_ahead=True)
        costs.observe(num_tokens, device_s=device_s, period_s=device_s + gap_s, is_ahead=False)
    return costs


def test_the_time_of_a_step_is_that_of_the_nearest_ones_measured() -> None:
    costs = costs_of(1.0, 0.1)
    for num_tokens in (1, 3, 24, 100, 256):
        assert costs.device_s(num_tokens) == pytest.approx(1.0 + 0.1 * num_tokens, rel=0.02)
    assert costs.device_s(512) >= 2 * costs.device_s(256) - 1.0


def test_longer_steps_than_those_measured_are_learned_by_one_for_each_doubling() -> None:
    costs = StepCosts()
    costs.observe(1000, device_s=4.0, period_s=4.0, is_ahead=False, has_prompts=True)
    assert not costs.is_known, "a token of a prompt costs less than others"
    for _ in range(2):
        costs.observe(64, device_s=1.0, period_s=1.0, is_ahead=True)
    assert costs.is_known
    assert costs.device_s(128) == pytest.approx(1.256), "no less than tokens of prompts"
    assert costs.device_s(256) == pytest.approx(2.512), "in proportion, until one of 128 was measured"
    costs.observe(128, device_s=3.0, period_s=3.0, is_ahead=False)
    assert costs.device_s(96) == pytest.approx(2.0)
    assert costs.device_s(256) == pytest.approx(7.0), "as from 64 to 128"
    assert costs.device_s(512) == pytest.approx(14.0)


def test_the_first_steps_of_a_worker_are_forgotten() -> None:
    costs = StepCosts()
    for seconds in (3.0, 0.01, 0.01):
        costs.observe(1, device_s=seconds, period_s=seconds, is_ahead=True)
    assert costs.device_s(1) == pytest.approx(0.01)


def test_a_first_step_that_took_long_says_nothing_of_larger_ones() -> None:
    costs = StepCosts()
    for num_tokens, device_s in ((1, 3.0), (64, 0.5), (66, 0.5)):
        costs.observe(num_tokens, device_s=device_s, period_s=device_s, is_ahead=True)
    assert costs.device_s(64) == pytest.approx(0.5)
    assert costs.device_s(32) == pytest.approx(0.5)


def best(
    chances: list[list[float]], costs: StepCosts, *, num_others: int = 0, budget: int = 100
) -> tuple[Way, list[int]]:
    choice = best_choice(chances, num_others, costs, budget=budget)
    return choice.way, list(choice.counts)


def test_drafts_are_as_many_as_pay() -> None:
    sure, unsure = [0.99**n for n in range(1, 9)], [0.5**n for n in range(1, 9)]
    cheap, dear = costs_of(1.0, 0.001), costs_of(0.01, 1.0)
    assert best([sure], cheap) == (Way.TOGETHER, [8])
    assert best([sure], dear) == (Way.AHEAD, [0]), "a token costs its time, wherever it is computed"
    way, [few] = best([unsure], costs_of(1.0, 0.2))
    assert way is Way.TOGETHER
    assert 1 <= few <= 3
    _, both = best([sure, unsure], costs_of(1.0, 0.1))
    assert both[0] > both[1] > 0
    assert best([sure, sure], cheap, budget=3) == (Way.TOGETHER, [2, 1])
    assert best([sure], costs_of(1.0, 0.001, gap_s=20.0))[0] is Way.AHEAD, "nothing runs ahead meanwhile"
    slow = costs_of(1.0, 0.001, gap_s=1.0)
    assert best([sure], slow, num_others=15) == (Way.BETWEEN, [8])
    assert best([unsure], slow, num_others=15)[0] is Way.AHEAD, "it would have fewer tokens than in every step"


# The scheduler.


def test_a_sequence_with_drafts_out_is_in_no_plan_and_others_run_ahead() -> None:
    world = drafting(limits(max_draft_count=4), gap_s=0.05)
    (copying,) = world.add([1, 2, 3, 4], max_tokens=40, seed=COPYING, ends=())
    others = [world.add([5, prompt], max_tokens=40, ends=(), speculative=False)[0] for prompt in range(3)]
    num_between = 0
    while world.scheduler.has_work:
        world.turn()
        drafted = [step for step, _, _ in world.flight if step.drafts]
        for step in drafted:
            (seq_id,) = step.drafts
            later = [each for each, _, _ in world.flight if each.step_number > step.step_number]
            if seq_id == copying.seq_id:
                assert not any(seq_id in each.seq_ids for each in later), "planned while its drafts are out"
                num_between += bool(later)
    assert num_between > 3
    for sequence in (copying, *others):
        assert world.output[sequence.arrival] == expected_of(sequence, ())


def test_what_is_behind_an_end_among_accepted_tokens_is_dropped() -> None:
    world = drafting(limits(max_draft_count=4))
    (first,) = world.add([1, 2, 3, 4], max_tokens=30, seed=COPYING, ends=())
    world.run()
    expected = expected_of(first, ())
    num_cut = 0
    for index, end in enumerate(expected):
        again = drafting(limits(max_draft_count=4))
        (sequence,) = again.add([1, 2, 3, 4], max_tokens=30, seed=COPYING, ends=(end,))
        again.run()
        assert again.output[sequence.arrival] == expected[: expected.index(end) + 1], index
        assert again.ended[sequence.arrival] is FinishReason.STOP
        num_cut += again.scheduler.statistics().discarded_tokens
    assert num_cut


def test_drafts_stay_within_max_tokens_and_the_share_of_prompts() -> None:
    world = drafting(limits(max_draft_count=4, max_step_tokens=8))
    sequences = [world.add([1, 2, 3, 4], max_tokens=n, seed=COPYING, ends=())[0] for n in (1, 2, 3, 7, 20)]
    while world.scheduler.has_work:
        world.turn()
        for step, _, _ in world.flight:
            decodes = sum(count for i, count in zip(step.seq_ids, step.counts, strict=True) if i in step.drafts)
            assert decodes <= 6, "a quarter of 8 tokens is for prompts"
    for sequence in sequences:
        assert world.output[sequence.arrival] == expected_of(sequence, ())


@pytest.mark.parametrize("adaptive", [True, False])
def test_no_step_has_more_drafts_than_the_worker_samples_tokens(adaptive: bool) -> None:
    """It would compute the others for nothing."""
    world = drafting(limits(max_draft_count=4, max_step_tokens=64, max_sampled_tokens=8))
    world.scheduler._speculation._config = replace(world.scheduler._speculation._config, adaptive=adaptive)
    sequences = [world.add([1, 2, 3, 4], max_tokens=30, seed=COPYING, ends=())[0] for _ in range(3)]
    most = 0
    while world.scheduler.has_work:
        world.turn()
        for step, _, _ in world.flight:
            assert len(step.seq_ids) + sum(map(len, step.drafts.values())) <= 8
            most = max(most, *map(len, step.drafts.values()), 0)
    assert most
    for sequence in sequences:
        assert world.output[sequence.arrival] == expected_of(sequence, ())


def test_a_plan_that_cachemgr_is_not_ready_for_is_made_again() -> None:
    """The outcome of drafts reaches cachemgr after the next plan: SEQUENCE_BUSY. Nothing is preempted or lost."""
    world = drafting(limits(max_draft_count=4))
    world.is_late = True
    (sequence,) = world.add([1, 2, 3, 4], max_tokens=40, seed=COPYING, ends=())
    world.run()
    assert world.cache.num_busy > 3
    assert world.scheduler.statistics().preemptions == 0
    assert world.scheduler.statistics().admissions == 1
    assert world.output[sequence.arrival] == expected_of(sequence, ())


def test_no_sequence_is_preempted_for_the_blocks_of_drafts() -> None:
    plain, world = World(limits(num_blocks=11, block_size=4)), drafting(limits(num_blocks=11, max_draft_count=4))
    for each in (plain, world):
        each.add([1, 2, 3, 4], max_tokens=16, seed=COPYING, ends=())
        each.add([1, 2, 3, 5], max_tokens=18, seed=COPYING, ends=())
        each.run()
    assert world.scheduler.statistics().preemptions <= plain.scheduler.statistics().preemptions


@pytest.mark.parametrize("changes", [{"num_host_blocks": 8}, {"num_host_blocks": 0}], ids=str)
def test_preempted_sequences_with_drafts_end_with_their_tokens(changes: dict[str, int]) -> None:
    world = drafting(limits(num_blocks=8, max_sequence_tokens=32, max_draft_count=4, **changes))
    sequences = [world.add([1, 2, 3] * 3, max_tokens=12, seed=COPYING + n, ends=())[0] for n in range(4)]
    world.run()
    assert world.scheduler.statistics().preemptions > 0
    for sequence in sequences:
        assert world.output[sequence.arrival] == expected_of(sequence, ())


def test_a_parent_of_samples_and_a_request_that_asks_for_none_have_no_drafts() -> None:
    world = drafting(limits(max_draft_count=4))
    (plain,) = world.add([1, 2, 3], max_tokens=9, seed=COPYING, speculative=False)
    samples = world.add([1, 2, 3, 4], max_tokens=30, seed=COPYING, n=3, ends=())
    assert plain.guesses is None
    assert all(sample.guesses is not None for sample in samples)
    while world.scheduler._queues.followers:
        world.turn()
        assert not any(step.drafts for step, _, _ in world.flight), "its followers are forked from it"
    world.run()
    for sample in samples:
        assert world.output[sample.arrival] == expected_of(sample, ())


def test_tokens_that_no_drafts_allow_are_noticed() -> None:
    for tokens, counts in (([1, 1, 1], [3]), ([0] * 9, [9]), ([1, 1], [1])):
        world = drafting(limits(max_draft_count=4))
        world.add([1, 2, 3, 4], max_tokens=40, seed=COPYING, ends=())
        while not any(step.drafts for step, _, _ in world.flight):
            world.turn()
        step = world.flight[0][0]
        with pytest.raises(ProtocolViolation):
            world.scheduler.on_step_done(step, step.seq_ids, tokens, token_counts=counts)


def test_answers_of_a_tenant_are_drafts_of_its_next_equal_request() -> None:
    """The same question again: the second answer takes fewer steps. Another tenant's takes as many as the first."""
    world = drafting(limits(max_draft_count=4), "suffix")
    steps = {}
    for name, tenant in (("first", "a"), ("second", "a"), ("other", "b")):
        before = world.scheduler.statistics().planned_steps
        (sequence,) = world.add([1, 2, 5, 4, 3], max_tokens=30, ends=(), tenant=tenant)
        world.run()
        assert world.output[sequence.arrival] == expected_of(sequence, ())
        steps[name] = world.scheduler.statistics().planned_steps - before
    assert steps["second"] < 0.6 * steps["first"]
    assert steps["other"] > 0.8 * steps["first"]


def test_a_request_that_shares_nothing_neither_gives_nor_takes_answers() -> None:
    world = drafting(limits(max_draft_count=4), "suffix")
    private = CacheParams(cache_use=CacheUse.NONE)
    (sequence,) = world.add([1, 2, 5, 4, 3], max_tokens=30, ends=())
    sequence.cache = private
    world.run()
    assert not world.scheduler._speculation._recent.of("", b"").parts[0].tokens


# Time.

MANY = 64


class Timed(World):
    """A world with a clock: a step takes its device base_s and token_s for each decode or draft, a plan takes plan_s.

    A token of a prompt takes prompt_s.
    """

    def __init__(
        self, shape: SchedulerLimits, speculative: SpeculativeConfig | None, *, token_s: float, prompt_s: float
    ) -> None:
        super().__init__(shape, speculative=speculative)
        self.scheduler._verify = False
        self.base_s, self.token_s, self.prompt_s, self.plan_s = 0.010, token_s, prompt_s, 0.001
        self.now = self.device_free_at = self.last_end = 0.0
        self.times: dict[int, tuple[float, float, bool]] = {}

    def device_s(self, step: StepInFlight) -> float:
        num_decodes = len(step.seq_ids) + sum(map(len, step.drafts.values()))
        return self.base_s + self.token_s * num_decodes + self.prompt_s * (sum(step.counts) - num_decodes)

    def plan(self, *happenings: abc.Callable[[], None]) -> bool:
        began, is_ahead = self.now, bool(self.flight)
        if not super().plan(*happenings):
            return False
        self.now += self.plan_s
        step = self.flight[-1][0]
        if self.scheduler.step_costs is not None:
            self.scheduler.step_costs.observe_plan(self.plan_s)
        took = self.device_s(step) if step.seq_ids else 0.0
        self.device_free_at = max(self.now, self.device_free_at) + took
        self.times[step.step_number] = began, self.device_free_at, is_ahead
        return True

    def end_step(self, **more) -> None:  # type: ignore[no-untyped-def]
        step: StepInFlight = self.flight[0][0]
        began, ended, is_ahead = self.times[step.step_number]
        self.now = max(self.now, ended)
        if step.seq_ids and self.scheduler.step_costs is not None:
            since = max(began, self.last_end) if is_ahead else began
            self.scheduler.step_costs.observe(
                step.num_tokens,
                device_s=self.device_s(step),
                period_s=self.now - since,
                is_ahead=is_ahead,
                has_prompts=step.has_prompts,
            )
        self.last_end = self.now
        super().end_step(**more)


def seconds(
    speculative: SpeculativeConfig | None,
    num_requests: int,
    *,
    seed: int,
    token_s: float,
    prompt_s: float | None = None,
) -> float:
    """Return the time until all requests have ended. A prompt's tokens take as long as others, or prompt_s.

    Many requests are short ones: what is tried for too long costs most there.
    """
    shape = limits(max_draft_count=8, max_step_tokens=1024, num_blocks=4000, max_sequence_tokens=1000)
    world = Timed(
        replace(shape, max_running_sequences=MANY),
        speculative,
        token_s=token_s,
        prompt_s=token_s if prompt_s is None else prompt_s,
    )
    dice = random.Random(seed)
    sequences: list[Sequence] = []
    max_tokens = 100 if num_requests < MANY else 24
    for index in range(num_requests):
        prompt = [dice.randrange(7) for _ in range(30)]
        sequences += world.add(prompt, max_tokens=max_tokens, seed=seed + index, ends=())
    world.run()
    assert all(world.output[each.arrival] == expected_of(each, ()) for each in sequences)
    assert all(each.state is SequenceState.FINISHED for each in sequences)
    return world.now


@pytest.mark.parametrize(
    ("num_requests", "token_s"), [(1, 0.0001), (1, 0.005), (8, 0.0001), (8, 0.005), (MANY, 0.0001)]
)
def test_where_nothing_comes_true_next_to_nothing_is_lost(num_requests: int, token_s: float) -> None:
    plain, drafted = (seconds(config, num_requests, seed=0, token_s=token_s) for config in (None, CONFIG))
    assert drafted <= 1.03 * plain


@pytest.mark.parametrize("num_requests", [1, 8])
def test_where_much_comes_true_much_is_won(num_requests: int) -> None:
    plain, drafted = (seconds(config, num_requests, seed=COPYING, token_s=0.0001) for config in (None, CONFIG))
    assert plain >= 1.5 * drafted


@pytest.mark.parametrize(("num_requests", "prompt_s"), [(1, 0.02), (8, 0.02), (8, 0.0002), (MANY, 0.0002)])
def test_where_tokens_cost_as_much_as_steps_nothing_is_lost(num_requests: int, prompt_s: float) -> None:
    """Though a prompt's may cost a hundredth."""
    plain, drafted = (
        seconds(config, num_requests, seed=COPYING, token_s=0.02, prompt_s=prompt_s) for config in (None, CONFIG)
    )
    assert drafted <= 1.03 * plain


def test_a_step_without_drafts_is_measured_now_and_then() -> None:
    """Its time on a busy machine must not make drafts seem to pay for ever."""
    world = drafting(limits(max_draft_count=1, num_blocks=400, max_sequence_tokens=1000))
    world.add([1, 2, 3] * 8, max_tokens=400, seed=COPYING, ends=())
    in_row, runs = 0, []
    while world.scheduler.has_work:
        world.turn()
        for step, _, _ in world.flight:
            if step.drafts:
                in_row += 1
            elif in_row:
                runs.append(in_row)
                in_row = 0
    assert max(runs) <= 128


def test_copies_are_copies() -> None:
    assert next_token([1, 2, 3, 4], COPYING) == 2


def test_metrics_count_drafts_by_drafter() -> None:
    world = drafting(limits(max_draft_count=4), "suffix")
    for _ in range(2):
        world.add([1, 2, 5, 4, 3], max_tokens=30, ends=())
        world.run()
    statistics, drafters = world.scheduler.statistics(), world.scheduler.drafters
    look = EngineLook("pool", "model", statistics, 0, 0, 0, {}, Measured(), drafters)
    found = {
        each.name: {sample.labels["drafter"]: sample.value for sample in each.samples} for each in draft_metrics(look)
    }
    assert found["quire_engine_accepted_tokens"]["suffix"] == drafters["suffix"].accepted > 20
    assert found["quire_engine_drafted_tokens"]["suffix"] >= drafters["suffix"].accepted
    assert sum(found["quire_engine_drafts"].values()) == statistics.drafts
    assert sum(found["quire_engine_drafted_tokens"].values()) == statistics.drafted_tokens
    assert sum(found["quire_engine_accepted_tokens"].values()) == statistics.accepted_tokens


def draft_metrics(look: EngineLook) -> list[Metric]:
    return [each for each in families(look) if each.samples and "drafter" in each.samples[0].labels]


@pytest.mark.parametrize("max_step_tokens", range(2, 10))
def test_guesses_of_sequences_that_left_the_pool_are_no_candidates(max_step_tokens: int) -> None:
    """All were admitted again after a failed step: none decodes, and gains were divided by their number."""
    for num_turns in range(1, 8):
        world = drafting(limits(num_blocks=5, max_step_tokens=max_step_tokens, max_draft_count=4))
        for max_tokens in (3, 1):
            world.add([0] * 4, max_tokens=max_tokens, seed=COPYING)
        for _ in range(num_turns):
            if world.scheduler.has_work:
                world.turn()
        if world.flight:
            world.end_step(breaks=True)
        world.run()
