"""The simulated worker by plain calls: order and time of its steps, its faults, its reports, and its second rank."""

from __future__ import annotations

import asyncio
import hmac
import random
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from robustness.simulation.digest_model import DigestFunction
from robustness.simulation.model_thread import SimulatedModelThread
from robustness.simulation.reports import Lie
from robustness.simulation.surroundings import surroundings
from robustness.simulation.worker import SimulatedWorker, WorkerSettings
from robustness.simulation.world import World, WorldFailed

from quire.cache.v1 import attach_pb2, grant_pb2
from quire.compute.v1 import worker_service_pb2
from quire.serving.addresses import TcpAddress
from quire.worker.grant.decoding import DIGEST_BYTES, TOKEN_DTYPE
from quire.worker.grant.errors import Reason, Refused
from quire.worker.run.model_thread import MAX_UNCOLLECTED
from quire.worker.service.servicer import refuse_failed

LEASE, KEY, SEQ_ID = "lease", b"key", 7
PROMPT = [5, 9, 2, 11, 3]
BOTH = pytest.mark.parametrize("runs_ahead", [False, True])


# -- the thread ------------------------------------------------------------------------------------------------------


class Bench:
    """A thread, and what has happened on it, in order."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.process = self.world.start("worker")
        self.thread = SimulatedModelThread(self.process, random.Random(seed), mean_step_s=0.01)
        self.happened: list[str] = []

    def launch(self, name: str) -> Callable[[], Callable[[], str]]:
        def launch() -> Callable[[], str]:
            self.happened.append(f"{name} launched")
            return lambda: self.happened.append(f"{name} collected") or name

        return launch

    def work(self, name: str) -> Callable[[], str]:
        return lambda: self.happened.append(f"{name} done") or name

    def run(self, work: Any) -> Any:
        task = self.process.spawn(work)
        assert self.world.run_until(task.done, limit_s=100.0)
        return task.result()


def fail() -> Any:
    raise ValueError("as asked")


@pytest.mark.parametrize("seed", range(20))
def test_work_is_done_in_its_order_and_no_more_launches_are_uncollected_than_may_be(seed: int) -> None:
    bench = Bench(seed)

    async def give() -> list[str]:
        futures = [bench.thread.submit_ahead(bench.launch(name)) for name in "abcdefg"]
        futures += [bench.thread.submit(bench.work("h")), bench.thread.submit_ahead(bench.launch("i"))]
        assert bench.thread.num_waiting == 9
        return await asyncio.gather(*futures)

    assert bench.run(give()) == list("abcdefghi")
    told = [each for each in bench.happened if "collected" not in each]
    assert told == [*(f"{name} launched" for name in "abcdefg"), "h done", "i launched"]
    assert bench.happened.index("g collected") < bench.happened.index("h done")
    uncollected = 0
    for each in bench.happened:
        uncollected += ("launched" in each) - ("collected" in each)
        assert 0 <= uncollected <= MAX_UNCOLLECTED
    assert bench.thread.num_waiting == 0


def test_an_exception_is_that_of_its_work_alone() -> None:
    bench = Bench(1)

    async def give() -> list[Any]:
        futures = [
            bench.thread.submit(fail),
            bench.thread.submit_ahead(fail),
            bench.thread.submit_ahead(lambda: fail),
            bench.thread.submit(bench.work("last")),
        ]
        results = await asyncio.gather(*futures, return_exceptions=True)
        await bench.thread.idle()
        return results

    *failed, last = bench.run(give())
    assert [str(error) for error in failed] == ["as asked"] * 3
    assert last == "last"


def test_work_hangs_for_as_long_as_it_is_told_to() -> None:
    bench = Bench(1)
    bench.thread.hang(50.0)
    before = bench.world.now

    async def give() -> str:
        return await bench.thread.submit(bench.work("a"))

    assert bench.run(give()) == "a"
    assert bench.world.now - before > 50.0


# -- the worker ------------------------------------------------------------------------------------------------------


def digest(tokens: list[int]) -> bytes:
    return sha256(np.asarray(tokens, dtype=TOKEN_DTYPE).tobytes()).digest()[:DIGEST_BYTES]


class Client:
    """A worker that is attached by hand, and a client of one sequence, which has all blocks that it will need."""

    def __init__(self, world: World, settings: WorkerSettings) -> None:
        self.world = world
        self.process = world.start("worker")
        self.worker = SimulatedWorker(self.process, settings, address="worker:1", cachemgr=TcpAddress("cachemgr", 1))
        self.sent: list[attach_pb2.StepReport] = []
        self.num_damaged = 0
        self.worker.steps.on_damage = self._count_damage
        self.attach()

    def attach(self) -> None:
        self.worker.reports.send = self.sent.append
        self.worker.steps.gate.attach(1, KEY, [LEASE])
        self.num_steps = self.num_computed = 0

    def _count_damage(self) -> None:
        self.num_damaged += 1

    def request(self, *, known: int | None = None) -> worker_service_pb2.RunStepRequest:
        """The next step: all of the prompt, then a token each. `known` None: the step before it."""
        is_first = not self.num_computed
        gate, count = self.worker.steps.gate, len(PROMPT) if is_first else 1
        self.num_steps += 1
        grant = grant_pb2.StepGrant(
            pool=gate.pool,
            epoch=gate.epoch,
            term=1,
            lease_id=LEASE,
            step_number=self.num_steps,
            known_step_number=self.num_steps - 1 if known is None else known,
            run_sequence_ids=[SEQ_ID],
            run_starts=[self.num_computed],
            run_token_counts=[count],
            run_samples=[True],
        )
        self.num_computed += count
        request = worker_service_pb2.RunStepRequest()
        if is_first:
            grant.write_sequence_ids[:], grant.write_first_indexes[:] = [SEQ_ID], [0]
            grant.write_block_counts[:], grant.write_block_ids[:] = [5], [9, 2, 7, 1, 5]
            grant.given_run_indexes[:], grant.given_token_digests = [0], digest(PROMPT)
            greedy = worker_service_pb2.SamplingParameters(temperature=0.0)
            request.inputs.add(sequence_id=SEQ_ID, token_ids=PROMPT, sampling=greedy)
        request.grant.grant = grant.SerializeToString()
        request.grant.signature = hmac.digest(KEY, request.grant.grant, "sha256")
        return request

    def run(self, *requests: worker_service_pb2.RunStepRequest) -> list[int | Reason]:
        """The tokens of requests that are accepted before the first one is answered, or the reasons why there is none.

        Ends early if the process does.
        """
        answers: list[int | Reason] = []

        async def send() -> None:
            for each in [self.worker.steps.accept(request) for request in requests]:
                try:
                    answers.extend((await each).result.sampled_tokens)
                    refuse_failed((await each).result)
                except Refused as refused:
                    answers.append(refused.reason)

        task = self.process.spawn(send())
        self.world.run_until(lambda: task.done() or not self.process.is_alive, limit_s=1000.0)
        if self.process.is_alive:
            task.result()
        return answers

    def wait(self, seconds: float) -> None:
        self.world.run_until(lambda: False, limit_s=seconds)


@pytest.fixture
def world() -> Iterator[World]:
    world = World(1)
    with surroundings(world, lambda *_: None):
        yield world


def expected(count: int) -> list[int]:
    return DigestFunction().expected_tokens(PROMPT, count)


@pytest.mark.parametrize("num_ranks", [1, 2])
@BOTH
def test_steps_that_are_accepted_together_give_the_tokens_and_reports_in_order(
    world: World, runs_ahead: bool, num_ranks: int
) -> None:
    client = Client(world, WorkerSettings(runs_ahead=runs_ahead, num_ranks=num_ranks))
    assert client.run(*[client.request() for _ in range(8)]) == expected(8)
    assert [report.report_number for report in client.sent] == list(range(1, 9))
    assert [token for report in client.sent for token in report.sampled_token_ids] == expected(8)
    client.worker.check_invariants()
    statistics = client.worker.executor.statistics()
    assert (statistics.num_sequences, statistics.ranks.num_ranks) == (1, num_ranks)


def test_each_start_has_an_epoch_of_its_own(world: World) -> None:
    assert len({Client(world, WorkerSettings()).worker.steps.gate.epoch for _ in range(4)}) == 4


@pytest.mark.parametrize("num_ranks", [1, 2])
@BOTH
def test_a_model_that_fails_fails_the_step_and_those_planned_on_it(
    world: World, runs_ahead: bool, num_ranks: int
) -> None:
    client = Client(world, WorkerSettings(runs_ahead=runs_ahead, num_ranks=num_ranks))
    client.run(client.request())
    client.worker.fail_next_step()
    answers = client.run(client.request(), client.request(known=1))
    assert answers == [Reason.STEP_FAILED, Reason.PRIOR_STEP_FAILED]
    assert [report.outcome for report in client.sent] == [
        attach_pb2.STEP_OUTCOME_COMPUTED,
        attach_pb2.STEP_OUTCOME_FAILED,
        attach_pb2.STEP_OUTCOME_FAILED,
    ]
    client.num_computed -= 2
    assert client.run(client.request()) == expected(2)[1:]


@BOTH
def test_a_grant_that_fails_half_applied_begins_an_epoch(world: World, runs_ahead: bool) -> None:
    client = Client(world, WorkerSettings(runs_ahead=runs_ahead))
    client.run(client.request())
    epoch = client.worker.steps.gate.epoch
    client.worker.damage_next()
    assert client.run(client.request(), client.request()) == [Reason.EPOCH_CHANGED] * 2
    assert client.worker.steps.gate.epoch != epoch
    assert client.num_damaged == 1
    client.attach()
    assert client.run(*[client.request() for _ in range(3)]) == expected(3)


def test_a_step_that_hangs_ends_the_process_if_there_is_a_watchdog(world: World) -> None:
    client = Client(world, WorkerSettings(step_timeout_s=10.0))
    client.process.spawn(client.worker.watch())
    client.worker.hang(15.0)
    assert client.run(client.request()) == expected(1)
    client.worker.hang(100.0)
    assert client.run(client.request()) == []
    assert not client.process.is_alive


@BOTH
def test_a_seed_gives_the_same_world_again(runs_ahead: bool) -> None:
    seen = []
    for seed in (5, 5, 6):
        world = World(seed)
        with surroundings(world, lambda *_: None):
            client = Client(world, WorkerSettings(runs_ahead=runs_ahead))
            client.run(*[client.request() for _ in range(4)])
            seen.append((client.worker.steps.gate.epoch, world.now, world.num_callbacks, client.sent))
    assert seen[0] == seen[1]
    assert seen[0] != seen[2]


# -- reports ---------------------------------------------------------------------------------------------------------


def test_late_reports_come_together_and_in_order(world: World) -> None:
    client = Client(world, WorkerSettings())
    client.worker.reports.late(5.0)
    client.run(*[client.request() for _ in range(3)])
    assert client.sent == []
    client.wait(6.0)
    assert [report.report_number for report in client.sent] == [1, 2, 3]
    client.run(client.request())
    assert [report.report_number for report in client.sent] == [1, 2, 3, 4]


def test_late_reports_are_those_of_their_stream(world: World) -> None:
    client, later = Client(world, WorkerSettings()), list[attach_pb2.StepReport]()
    client.worker.reports.late(5.0)
    client.run(client.request())
    client.worker.reports.send = later.append
    client.wait(6.0)
    assert (len(client.sent), len(later)) == (1, 0)


def test_a_report_can_come_twice(world: World) -> None:
    client = Client(world, WorkerSettings())
    client.worker.reports.twice()
    client.run(client.request(), client.request())
    assert [report.report_number for report in client.sent] == [1, 1, 2]
    assert client.worker.is_honest


@pytest.mark.parametrize("kind", Lie)
def test_a_lie_is_told_once_and_the_truth_is_kept(world: World, kind: Lie) -> None:
    told = []
    for lies in (False, True):
        client = Client(world, WorkerSettings())
        if lies:
            client.worker.reports.lie(kind)
        client.run(client.request(), client.request())
        told.append(client.sent)
        assert client.worker.is_honest is not lies
    truth, lie = told
    assert lie[0] != truth[0]
    assert lie[1] == truth[1]
    assert client.worker.reports.kept() == truth


# -- ranks and violations --------------------------------------------------------------------------------------------


def test_a_worker_that_has_lost_a_rank_ends_and_is_no_finding(world: World) -> None:
    client = Client(world, WorkerSettings(num_ranks=2))
    client.run(client.request())
    client.worker.lose_rank()
    assert client.run(client.request()) == []
    assert not client.process.is_alive


def test_tables_of_ranks_that_differ_are_a_finding(world: World) -> None:
    client = Client(world, WorkerSettings(num_ranks=2))
    client.run(client.request())
    follower = client.worker.ranks[0].executor
    follower._table.remove(follower._leases[LEASE].rows[SEQ_ID])
    follower._leases[LEASE].rows[SEQ_ID] = follower._table.add()
    follower._table.stage_blocks(follower._leases[LEASE].rows[SEQ_ID], 0, [9, 2, 7, 1, 6])
    with pytest.raises(WorldFailed, match="rank 1"):
        client.run(client.request())
    assert not client.process.is_alive


def test_a_broken_invariant_is_a_finding_unless_the_worker_has_lied(world: World) -> None:
    client = Client(world, WorkerSettings())
    client.run(client.request())
    client.worker.executor._table.stage_blocks(0, 0, [8])
    with pytest.raises(WorldFailed, match="I5 violated: block 8"):
        client.run(client.request())
    other = Client(world, WorkerSettings())
    world.failure = None
    other.worker.reports.lie(Lie.UNKNOWN_SEQUENCE)
    other.run(other.request())
    other.worker.executor._table.stage_blocks(0, 0, [8])
    assert other.run(other.request()) == []
    assert not other.process.is_alive
