"""The model of digests on the worker's executor, with plans of the real books: right content gives the expected tokens,
any wrong one gives others."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import planning
import pytest
import torch
from executor_driver import FORKED, MAX_MODEL_LEN, VOCAB_SIZE, ExecutorDriver, make_prompts, run_mixed
from planning import Admission, Fork, Planned, Restore, StepRequest, Trim
from robustness.simulation.digest_model import TWO_FULL_LAYERS, DigestFunction, DigestModel
from robustness.simulation.ranks import SimulatedFollower, SimulatedLeader
from robustness.simulation.worker import Rank, WorkerSettings, make_config, make_rank

from quire.cache.v1 import grant_pb2
from quire.cachemgr._core import Ledger, SequenceView, StepReport
from quire.cachemgr.service.messages import decode_geometry
from quire.serving.addresses import TcpAddress
from quire.worker.grant.decoding import AcceptedStep, RowSampling
from quire.worker.memory.kv_pool import NULL_BLOCK
from quire.worker.memory.layer_spec import Causal, Chunked, Mask, Sliding
from quire.worker.run.executor import Outcome, StepResult
from quire.worker.run.ranks import ONE_RANK
from quire.worker.sampling.constraints import Constraints
from quire.worker.sampling.parameters import SamplingParams
from quire.worker.sampling.prompt_logprobs import ScoredTokens
from quire.worker.service.description import describe_pool
from quire.worker.service.steps import make_report

LEASE = "lease"
KINDS: dict[str, tuple[Mask, ...]] = {
    "full": TWO_FULL_LAYERS,
    "windowed": (Sliding(5), Sliding(5)),
    "full and windowed": (Causal(), Sliding(6)),
    "chunked": (Chunked(8), Causal()),
    "three groups": (Sliding(5), Chunked(8), Causal()),
}


class Desk:
    """One lease of the books of a worker's pool. A step is planned, run and reported before the next is planned."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.rank = make_rank(settings, ONE_RANK)
        self.function = settings.function
        config = make_config(settings, TcpAddress("cachemgr", 1))
        geometry = decode_geometry(describe_pool(config, self.rank.loaded))
        self.ledger = Ledger(settings.pool, 1, geometry, verify=True)
        self.ledger.open_lease(LEASE, ttl_s=1e6, now=0.0)
        self.num_right = self.num_wrong = 0
        """Sampled tokens that are those of the function, and others."""

    def sequences(self) -> list[SequenceView]:
        return planning.sequences_of(self.ledger, LEASE)

    def tokens(self, seq_id: int) -> list[int]:
        """All known tokens of a sequence."""
        return np.frombuffer(self.ledger.probe.tokens(LEASE, seq_id) or b"", "<i4").tolist()

    def step(self, request: StepRequest, *, change: Callable[[grant_pb2.StepGrant], None] | None = None) -> Planned:
        """Plan, run and report a step. `change` makes the worker run another grant."""
        plan = planning.plan_step(self.ledger, LEASE, request, now=1.0)
        given = {}
        for index in plan.given_run_indexes:
            start, count = plan.run_starts[index], plan.run_token_counts[index]
            tokens = self.tokens(plan.run_seq_ids[index])[start : start + count]
            given[index] = np.array(tokens, dtype=np.int32)
        grant = plan.grant
        if change is not None:
            change(grant)
        result = self.rank.executor.execute(AcceptedStep(grant, given))
        assert result.outcome is Outcome.COMPUTED
        self.ledger.settle(StepReport(make_report(plan.grant, result).SerializeToString()))
        self._check(result)
        return plan

    def _check(self, result: StepResult) -> None:
        for seq_id, token in zip(result.sampled_ids, result.sampled_tokens, strict=True):
            is_right = self.function.expected_tokens(self.tokens(seq_id)[:-1], 1) == [token]
            self.num_right += is_right
            self.num_wrong += not is_right


def pack(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<i4").tobytes()


class Walk:
    """Random plans: prompts that share beginnings, in chunks; forks, trims, ends, moves to the host tier and back."""

    def __init__(self, desk: Desk, seed: int) -> None:
        self._desk = desk
        self._random = random.Random(seed)
        self._num_ids = 0
        self.used: set[str] = set()
        """The kinds of items that were planned and not refused."""

    def step(self) -> None:
        draw, free = self._random, {each.seq_id: each for each in self._desk.sequences()}
        offloaded = [seq_id for seq_id, each in free.items() if each.is_offloaded]
        running = {seq_id: each for seq_id, each in free.items() if not each.is_offloaded}
        release = self._take(running, 0.15)
        offload = self._take(running, 0.1) if self._has_host_tier else []
        trims, forks = [], []
        for seq_id in self._take(dict(running), 0.15):
            num_tokens = draw.randint(1, running[seq_id].num_tokens)
            trims.append(Trim(seq_id, num_tokens))
            del running[seq_id]
        for seq_id in self._take(dict(running), 0.15):
            forks.append(Fork(seq_id, [self._new_id()], draw.randint(1, running[seq_id].num_tokens)))
        extends = {seq_id: each for seq_id, each in running.items() if draw.random() < 0.9}
        appends = {
            seq_id: pack([draw.randrange(64) for _ in range(draw.randint(1, 3))])
            for seq_id, each in extends.items()
            if each.num_tokens == each.num_computed or draw.random() < 0.05
        }
        plan = self._desk.step(
            StepRequest(
                releases=release,
                offloads=offload,
                trims=trims,
                forks=forks,
                extend_ids=list(extends),
                extend_token_counts=[draw.choice((1, 2, 7, 64)) for _ in extends],
                appends=appends,
                restores=[Restore(seq_id) for seq_id in offloaded if draw.random() < 0.3],
                admissions=[self._admission() for _ in range(draw.choice((0, 0, 1, 2)))],
            )
        )
        refused = {(each.item, each.seq_id) for each in plan.refusals}
        self.used.update(
            kind
            for kind, is_there in (
                ("copy", plan.copy_sources),
                ("offload", plan.offload_sources),
                ("restore", plan.restore_sources),
                ("fork", plan.fork_child_ids),
                ("pass", plan.passed_seq_ids),
                ("cached", any(plan.admitted_cached_counts)),
                ("trim", any((planning.PlanItem.TRIM, trim.seq_id) not in refused for trim in trims)),
            )
            if is_there
        )

    @property
    def _has_host_tier(self) -> bool:
        return planning.host_counts_of(self._desk.ledger) is not None

    def _take(self, sequences: dict[int, Any], share: float) -> list[int]:
        """Take some of them out."""
        taken = [seq_id for seq_id in sequences if self._random.random() < share]
        for seq_id in taken:
            del sequences[seq_id]
        return taken

    def _admission(self) -> Admission:
        """A prompt of two letters, so that many begin alike."""
        prompt = [self._random.choice((1, 2)) for _ in range(self._random.randint(1, 24))]
        max_compute = self._random.choice((0, 0, 3, 8))
        return Admission(self._new_id(), pack([3] * 8 + prompt), max_compute=max_compute)

    def _new_id(self) -> int:
        self._num_ids += 1
        return self._num_ids


def settings_of(kind: str, *, has_states: bool = False, **fields: Any) -> WorkerSettings:
    function = DigestFunction(KINDS[kind], has_states=has_states)
    return WorkerSettings(function=function, num_blocks=24 * len(set(KINDS[kind])), **fields)


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_forks_and_preemptions_in_a_pool_of_other_content_change_no_token(kind: str, has_states: bool) -> None:
    """The driver fills what is free with NaN."""
    function = DigestFunction(KINDS[kind], VOCAB_SIZE, MAX_MODEL_LEN, has_states)
    found, forked = run_mixed(DigestModel(function), 10)
    expected = [prompt + function.expected_tokens(prompt, 10) for prompt in make_prompts()]
    assert found == expected
    assert forked == [expected[i] for i in FORKED]


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_agrees_with_its_own_logits(kind: str) -> None:
    function, prompt = DigestFunction(KINDS[kind]), [5, 9, 2, 11]
    tokens = function.expected_tokens(prompt, 30)
    logits = function.expected_logits([*prompt, *tokens])
    assert logits.argmax(1)[len(prompt) - 1 : -1].tolist() == tokens
    assert len(set(tokens)) > 10
    assert all(len(set(row)) == function.vocab_size for row in logits.tolist())


PARAMETERS = {
    "drawn": SamplingParams(temperature=1.0, seed=3),
    "filtered": SamplingParams(temperature=2.0, seed=4, top_k=3, top_p=0.9),
    "penalized": SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0),
    "biased": SamplingParams(constraints=Constraints(logit_bias={7: 20.0})),
    "without bad words": SamplingParams(constraints=Constraints(bad_words=((33, 23), (28,)))),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_tokens_by_other_parameters_are_those_of_the_reference(name: str) -> None:
    """Beside another row, in chunks, and with tokens that stay on the device."""
    function, prompt, params = DigestFunction(), [5, 9, 2, 11, 3], PARAMETERS[name]
    rank = make_rank(WorkerSettings(function=function, runs_ahead=True), ONE_RANK)
    expected = function.expected_tokens(prompt, 8, params)
    assert expected != function.expected_tokens(prompt, 8)
    sampled: dict[int, list[int]] = {1: [], 2: []}
    for number, (start, count) in enumerate([(0, 2), (2, 3), *((start, 1) for start in range(5, 12))], start=1):
        grant = grant_pb2.StepGrant(
            lease_id=LEASE,
            step_number=number,
            run_sequence_ids=[2, 1],
            run_starts=[start] * 2,
            run_token_counts=[count] * 2,
            run_samples=[number > 1] * 2,
        )
        step = AcceptedStep(grant)
        if number < 3:
            given = np.array(prompt[start : start + count], dtype=np.int32)
            step = AcceptedStep(grant, {0: given, 1: given})
        if number == 1:
            grant.write_sequence_ids[:], grant.write_first_indexes[:] = [1, 2], [0, 0]
            grant.write_block_counts[:], grant.write_block_ids[:] = [3, 3], [3, 1, 9, 2, 8, 4]
            row = RowSampling(params, prompt_token_ids=prompt, last_token_ids=prompt)
            step = replace(step, sampling={1: row})
        result = rank.executor.execute(step)
        for seq_id, token in zip(result.sampled_ids, result.sampled_tokens, strict=True):
            sampled[seq_id].append(token)
    assert sampled == {1: expected, 2: function.expected_tokens(prompt, 8)}


def test_log_probabilities_of_a_prompt_are_those_of_the_reference() -> None:
    function, prompt = DigestFunction(), [5, 9, 2, 11, 3]
    rank = make_rank(WorkerSettings(function=function), ONE_RANK)
    grant = grant_pb2.StepGrant(lease_id=LEASE, step_number=1, given_run_indexes=[0])
    grant.write_sequence_ids[:], grant.write_first_indexes[:], grant.write_block_counts[:] = [1], [0], [2]
    grant.write_block_ids[:] = [3, 1]
    grant.run_sequence_ids[:], grant.run_starts[:] = [1], [0]
    grant.run_token_counts[:], grant.run_samples[:] = [5], [True]
    scored = {0: ScoredTokens(np.array(prompt[1:], dtype=np.int32), num_top=2)}
    sampling = {1: RowSampling(SamplingParams(temperature=1.0, seed=3, num_logprobs=3))}
    result = rank.executor.execute(AcceptedStep(grant, {0: np.array(prompt, dtype=np.int32)}, sampling, scored))
    expected = torch.from_numpy(function.expected_logits(prompt)).log_softmax(-1)
    [found] = result.prompt_logprobs
    assert found.logprobs == pytest.approx(expected[range(4), prompt[1:]].tolist())
    assert found.top == pytest.approx(expected[:4].topk(2).values.flatten().tolist())
    assert result.logprobs[0].top == pytest.approx(expected[4].topk(3).values.tolist())


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_all_plans_of_the_books_give_the_tokens_of_a_model_without_a_pool(kind: str, runs_ahead: bool) -> None:
    used: set[str] = set()
    num_right = 0
    for seed in range(5):
        desk = Desk(settings_of(kind, num_host_blocks=24, block_size=2 + seed % 3, runs_ahead=runs_ahead))
        walk = Walk(desk, seed)
        for _ in range(40):
            walk.step()
        assert desk.num_wrong == 0
        num_right += desk.num_right
        used |= walk.used
    assert num_right > 150
    expected = {"copy", "offload", "restore", "fork", "trim", "cached", "pass"}
    assert used == expected - ({"pass"} if kind == "full" else set())


def test_a_model_with_states_gives_the_tokens_of_one_without_a_pool() -> None:
    num_right = 0
    for seed in range(5):
        desk = Desk(settings_of("full", has_states=True))
        walk = Walk(desk, seed)
        for _ in range(40):
            walk.step()
        assert desk.num_wrong == 0
        num_right += desk.num_right
    assert num_right > 80


# -- drafts ----------------------------------------------------------------------------------------------------------


def make_ranks(settings: WorkerSettings) -> Rank:
    """The rank that serves, with its follower if there are two."""
    if settings.num_ranks == 1:
        return make_rank(settings, ONE_RANK)
    follower = SimulatedFollower()
    return make_rank(settings, SimulatedLeader(follower, make_rank(settings, follower).executor))


@pytest.mark.parametrize("kind", KINDS)
def test_rejected_drafts_in_blocks_of_all_groups_are_written_again(kind: str) -> None:
    """The driver fills what is free with NaN, and the verifier checks what is read."""
    function = DigestFunction(KINDS[kind], VOCAB_SIZE, MAX_MODEL_LEN)
    driver, draw = ExecutorDriver(DigestModel(function)), random.Random(7)
    streams = [driver.admit(prompt) for prompt in make_prompts()]
    expected = [stream.tokens + function.expected_tokens(stream.tokens, 24) for stream in streams]
    driver.step([(stream, len(stream.tokens)) for stream in streams])
    num_steps = 0
    while missing := [index for index, stream in enumerate(streams) if len(stream.tokens) + 8 < len(expected[index])]:
        drafts = {}
        for index in missing:
            known = expected[index][len(streams[index].tokens) :][: draw.randint(0, 7)]
            num_right = draw.randint(0, len(known))
            drafts[streams[index].seq_id] = known[:num_right] + [token ^ 1 for token in known[num_right:]]
        assert driver.step([(streams[index], 1) for index in missing], drafts=drafts) is Outcome.COMPUTED
        num_steps += 1
    assert num_steps < 14
    for stream, tokens in zip(streams, expected, strict=True):
        assert stream.tokens == tokens[: len(stream.tokens)]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", ["greedy", *PARAMETERS])
def test_verified_drafts_are_those_of_the_reference(name: str, num_ranks: int) -> None:
    """Beside a sequence without drafts, with right ones, wrong ones and both. The ranks agree on what is accepted."""
    function, prompt = DigestFunction(), [5, 9, 2, 11, 3]
    params = PARAMETERS.get(name, SamplingParams())
    rank = make_ranks(WorkerSettings(function=function, num_ranks=num_ranks, num_blocks=40))
    expected = {1: function.expected_tokens(prompt, 40, params), 2: function.expected_tokens(prompt, 40)}
    sampled: dict[int, list[int]] = {1: [], 2: []}
    draw = random.Random(len(name))
    accepted: set[int] = set()
    for number in range(1, 40):
        grant = grant_pb2.StepGrant(lease_id=LEASE, step_number=number, known_step_number=number - 1)
        given: dict[int, Any] = {}
        sampling = {}
        if number == 1:
            grant.write_sequence_ids[:], grant.write_first_indexes[:] = [1, 2], [0, 0]
            grant.write_block_counts[:], grant.write_block_ids[:] = [16, 16], range(1, 33)
            sampling = {1: RowSampling(params, prompt_token_ids=prompt, last_token_ids=prompt)}
        for seq_id in (2, 1):
            num_known, num_drafts = len(sampled[seq_id]), draw.choice((0, 1, 4, 8)) if number > 1 else 0
            if seq_id == 2 and number > 6:
                num_drafts = 0
            known = expected[seq_id][num_known : num_known + num_drafts]
            num_right = draw.randint(0, len(known))
            drafts = known[:num_right] + [token ^ 1 for token in known[num_right:]]
            start = len(prompt) + num_known - 1 if number > 1 else 0
            grant.run_sequence_ids.append(seq_id)
            grant.run_starts.append(start)
            grant.run_token_counts.append(1 + len(drafts) if number > 1 else len(prompt))
            grant.run_draft_counts.append(len(drafts))
            grant.run_samples.append(True)
            if drafts or number == 1:
                grant.given_run_indexes.append(len(grant.run_starts) - 1)
                given[len(grant.run_starts) - 1] = np.array(drafts or prompt, dtype=np.int32)
        result = rank.executor.execute(AcceptedStep(grant, given, sampling))
        assert result.outcome is Outcome.COMPUTED
        tokens = iter(result.sampled_tokens)
        for seq_id, count in zip(result.sampled_ids, result.sampled_counts or [1, 1], strict=True):
            sampled[seq_id] += islice(tokens, count)
            accepted.add(count - 1)
        if min(map(len, sampled.values())) >= 20 or max(map(len, sampled.values())) > 35:
            break
    assert max(map(len, sampled.values())) > 20
    assert len(accepted) > 3
    for seq_id, found in sampled.items():
        assert found == expected[seq_id][: len(found)]


# -- wrong content ---------------------------------------------------------------------------------------------------

Fault = Callable[[Rank, grant_pb2.StepGrant], None]


def run(settings: WorkerSettings, fault: Fault | None = None, *, at: int = -1) -> Desk:
    """A prompt and its fork, which copies a block; another prompt's way to the host tier and back; a fault."""
    desk = Desk(settings)
    requests = [
        StepRequest(admissions=[Admission(1, pack([5, 9, 2, 11, 3, 8])), Admission(3, pack([7] * 9))]),
        StepRequest(extend_ids=[1], extend_token_counts=[1]),
        StepRequest(forks=[Fork(1, [2], 7)], extend_ids=[1], extend_token_counts=[1]),
        StepRequest(extend_ids=[2], extend_token_counts=[1]),
        StepRequest(offloads=[3], extend_ids=[1, 2], extend_token_counts=[1, 1]),
        StepRequest(admissions=[Admission(4, pack([6] * 33))]),
        StepRequest(releases=[4], restores=[Restore(3)]),
        StepRequest(extend_ids=[1, 2, 3], extend_token_counts=[1, 1, 1]),
    ]
    for number, request in enumerate(requests):
        plan = desk.step(request, change=fault and partial(fault, desk.rank) if number == at else None)
        assert plan.refusals == []
    assert desk.num_right + desk.num_wrong == 12, (desk.num_right, desk.num_wrong)
    return desk


def row_of(rank: Rank, seq_id: int) -> int:
    return rank.executor._leases[LEASE].rows[seq_id]


def swap_entries(rank: Rank, grant: grant_pb2.StepGrant) -> None:
    table, row = rank.executor._table, row_of(rank, 1)
    table.stage_blocks(row, 0, table.block_ids(row)[1::-1])


def read_a_free_block(rank: Rank, grant: grant_pb2.StepGrant) -> None:
    rank.executor._table.stage_blocks(row_of(rank, 1), 0, [rank.pool.num_blocks - 1])


def read_a_block_of_another(rank: Rank, grant: grant_pb2.StepGrant) -> None:
    table = rank.executor._table
    table.stage_blocks(row_of(rank, 1), 0, table.block_ids(row_of(rank, 3))[:1])


def read_the_null_block(rank: Rank, grant: grant_pb2.StepGrant) -> None:
    rank.executor._table.block_tables[:, row_of(rank, 1), 0] = NULL_BLOCK


def flip_a_bit(rank: Rank, grant: grant_pb2.StepGrant) -> None:
    block = rank.executor._table.block_ids(row_of(rank, 1))[0]
    rank.pool.k(0).view(torch.int64)[block, 1] ^= 1


def lose_a_slot_of_the_last_layer(rank: Rank, grant: grant_pb2.StepGrant) -> None:
    rank.pool.k(1)[rank.executor._table.block_ids(row_of(rank, 1))[0], 1] = 0


def lose_copies(rank: Rank, grant: grant_pb2.StepGrant) -> None:
    assert grant.copy_source_block_ids
    del grant.copy_source_block_ids[:], grant.copy_target_block_ids[:]


def lose_offloads(rank: Rank, grant: grant_pb2.StepGrant) -> None:
    assert grant.offload_source_block_ids
    del grant.offload_source_block_ids[:], grant.offload_target_host_block_ids[:]


def lose_restores(rank: Rank, grant: grant_pb2.StepGrant) -> None:
    assert grant.restore_target_block_ids
    del grant.restore_target_block_ids[:], grant.restore_source_host_block_ids[:]


def take_another_token(rank: Rank, grant: grant_pb2.StepGrant) -> None:
    rank.executor._table.last_token[row_of(rank, 1)] ^= 1


FAULTS: dict[Fault, int] = {
    swap_entries: 1,
    read_a_free_block: 1,
    read_a_block_of_another: 1,
    read_the_null_block: 1,
    flip_a_bit: 1,
    lose_a_slot_of_the_last_layer: 1,
    take_another_token: 1,
    lose_copies: 2,
    lose_offloads: 4,
    lose_restores: 6,
}
"""Each fault, and the step that has it."""
SMALL = WorkerSettings(num_blocks=14, num_host_blocks=4, runs_ahead=True)


def test_the_steps_of_the_faults_are_right_without_one() -> None:
    assert run(SMALL).num_wrong == 0


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_slot_with_other_content_changes_the_tokens(fault: Fault) -> None:
    assert run(SMALL, fault, at=FAULTS[fault]).num_wrong > 0


def test_a_stale_state_changes_the_tokens() -> None:
    desk = Desk(settings_of("full", has_states=True))
    desk.step(StepRequest(admissions=[Admission(1, pack([5, 9, 2]))]))
    desk.rank.model.states.tensors()[0].view(torch.int64)[:, row_of(desk.rank, 1)] ^= 1
    desk.step(StepRequest(extend_ids=[1], extend_token_counts=[1]))
    assert (desk.num_right, desk.num_wrong) == (1, 1)


def test_all_bits_of_a_slot_are_copied() -> None:
    """Numbers that no arithmetic keeps: NaNs of both kinds, with any payload, and both zeros."""
    rank = make_rank(replace(SMALL, num_host_blocks=4), ONE_RANK)
    words = [0x7FF0_0000_0000_0001, -0x8000_0000_0000_0000, 0x7FF8_0000_DEAD_BEEF, -1]
    for layer in (0, 1):
        rank.pool.k(layer).view(torch.int64)[1, :, 0, 0] = torch.tensor(words)
    rank.pool.copy_blocks([(1, 2)])
    rank.loaded.host_pool.offload([(2, 3)])
    rank.loaded.host_pool.restore([(3, 5)])
    assert [rank.pool.k(layer).view(torch.int64)[5, :, 0, 0].tolist() for layer in (0, 1)] == [words, words]
