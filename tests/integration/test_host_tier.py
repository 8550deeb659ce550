"""The host tier through both real processes: offloaded content is restored, and in the end both tiers are free."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from integration.protocol_client import (
    FAULTY_WORKER,
    NUM_BLOCKS,
    WORKER_ARGS,
    LeaseHolder,
    Pair,
    ask,
    await_that,
    draw_tokens,
)

from quire.cache.v1 import cache_service_pb2
from quire.cli.launch import LocalServices
from quire.client import Completion, Engine, EngineConfig, EngineStatistics, SamplingParams

Generate = Callable[[list[int], int], list[int]]
HOST_MEMORY = ("--host-memory", "128K")
PROMPT = draw_tokens(21, seed=1)
NUM_NEW = 10


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="quire-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def services(model_dir: Path, folder: Path) -> Iterator[LocalServices]:
    with LocalServices.start(
        model=model_dir,
        num_blocks=NUM_BLOCKS,
        extra_cachemgr_args=("--state-dir", str(folder / "state")),
        extra_worker_args=(*WORKER_ARGS, *HOST_MEMORY),
        runtime_dir=folder,
        worker_target=FAULTY_WORKER,
    ) as started:
        yield started


@pytest.fixture
def pair(services: LocalServices) -> Iterator[Pair]:
    """Both processes, attached, without a lease. Afterwards every block of both tiers is back (I8)."""
    pair = Pair(services)
    pair.await_attached()
    yield pair
    assert pair.leases() == []
    assert_all_is_back(pair)
    pair.close()


def assert_all_is_back(pair: Pair) -> None:
    pool = pair.pool()
    blocks, host_blocks = pool.block_counts, pool.host_block_counts
    assert (blocks.free_count + blocks.cached_count, pair.violations()) == (NUM_BLOCKS - 1, [])
    assert host_blocks.free_count == pool.geometry.host_block_count > 0
    assert pair.worker_statistics().sequence_count == 0


def end(holder: LeaseHolder) -> None:
    holder.delete()
    await_that("the lease is gone", lambda: not holder.pair.has_lease(holder.lease_id))


def begin(pair: Pair) -> LeaseHolder:
    """A lease with sequence 1, which has run its prompt and two steps."""
    holder = LeaseHolder.create(pair)
    holder.run(holder.admit((1, PROMPT)))
    holder.go_on(1, num_steps=2)
    holder.await_settled()
    return holder


def overwrite(pair: Pair) -> None:
    """Removes all unheld content from the pool."""
    request = cache_service_pb2.ResetPrefixCacheRequest(pool="default")
    ask(pair.cache.ResetPrefixCache, request)
    holder = LeaseHolder.create(pair)
    holder.run(holder.admit((9, draw_tokens(80, seed=9))))
    end(holder)
    ask(pair.cache.ResetPrefixCache, request)


def restore(holder: LeaseHolder, seq_id: int) -> cache_service_pb2.PlanStepResponse:
    return holder.accepted(holder.plan(restores=[{"sequence_id": seq_id}]))


# -- one sequence by hand -----------------------------------------------------------------------------------------


def test_a_sequence_goes_on_with_what_it_had(pair: Pair, generate: Generate) -> None:
    holder, before, did = begin(pair), pair.statistics(), pair.worker_statistics()
    holder.run(holder.accepted(holder.plan(offload_sequence_ids=[1])))
    holder.await_settled()
    sequence = holder.sequence(1)
    assert (sequence.offloaded, len(sequence.host_block_ids), sequence.block_count) == (True, 6, 0)
    assert pair.worker_statistics().sequence_count == 0
    overwrite(pair)
    holder.run(restore(holder, 1))
    assert not holder.sequence(1).offloaded
    holder.go_on(1, num_steps=NUM_NEW - 4)
    assert holder.tokens[1] == PROMPT + generate(PROMPT, NUM_NEW)
    after, done = pair.statistics(), pair.worker_statistics()
    assert (after.offload_count, after.restore_count) == (before.offload_count + 1, before.restore_count + 1)
    assert after.offloaded_block_count - before.offloaded_block_count == 6
    assert after.restored_block_count - before.restored_block_count == 6
    assert done.offloaded_block_count - did.offloaded_block_count == 6
    assert done.restored_block_count - did.restored_block_count == 6
    assert done.host_copy_time.ToNanoseconds() > did.host_copy_time.ToNanoseconds()
    end(holder)


def test_what_the_cache_still_has_is_not_copied(pair: Pair, generate: Generate) -> None:
    holder, before = begin(pair), pair.statistics()
    holder.run(holder.plan(offload_sequence_ids=[1]))
    answer = holder.run(restore(holder, 1))
    assert (answer.offloaded_block_count, answer.restored_block_count) == (0, 1), "the block that is not full"
    assert answer.timings.restore.ToNanoseconds() > 0
    assert pair.statistics().restored_block_count - before.restored_block_count == 1
    assert holder.tokens[1] == PROMPT + generate(PROMPT, 4)
    end(holder)


def test_a_sequence_leaves_while_a_step_still_writes_it(pair: Pair, generate: Generate) -> None:
    holder = begin(pair)
    with pair.held() as hold:
        running = holder.start(holder.extend(1))
        hold.await_running()
        leaving = holder.start(holder.accepted(holder.plan(offload_sequence_ids=[1])))
        early = holder.plan(restores=[{"sequence_id": 1}])
        (refusal,) = early.refusals
        assert refusal.error.reason == "SEQUENCE_BUSY"
        assert pair.violations() == []
    holder.finish(running)
    holder.finish(leaving)
    holder.run(early, skip=True)
    holder.await_settled()
    overwrite(pair)
    holder.run(restore(holder, 1))
    assert holder.tokens[1] == PROMPT + generate(PROMPT, 5)
    end(holder)


def test_a_step_that_is_skipped_moves_a_sequence_all_the_same(pair: Pair, generate: Generate) -> None:
    holder = begin(pair)
    holder.run(holder.plan(offload_sequence_ids=[1]), skip=True)
    holder.await_settled()
    overwrite(pair)
    plan = restore(holder, 1)
    holder.run(plan, skip=True)
    holder.await_settled()
    holder.go_on(1, num_steps=2)
    assert holder.tokens[1] == PROMPT + generate(PROMPT, 5)
    end(holder)


def test_a_fork_writes_on_in_what_its_parent_left(pair: Pair, generate: Generate) -> None:
    holder = begin(pair)
    holder.tokens[2] = list(holder.tokens[1])
    fork = {"parent_sequence_id": 1, "child_sequence_ids": [2], "token_count": len(holder.tokens[1])}
    holder.run(holder.accepted(holder.plan(forks=[fork])))
    leaving = holder.extend(2, offload_sequence_ids=[1])
    holder.run(leaving)
    holder.go_on(2, num_steps=2)
    overwrite(pair)
    holder.run(restore(holder, 1))
    holder.go_on(1, num_steps=2)
    assert holder.tokens[1] == holder.tokens[2] == PROMPT + generate(PROMPT, 6)
    end(holder)


def test_what_can_not_be_done_is_refused_and_changes_nothing(pair: Pair, generate: Generate) -> None:
    holder = begin(pair)
    holder.run(holder.plan(offload_sequence_ids=[1]))
    extends = {"sequence_ids": [1], "token_counts": [1]}
    refused = holder.plan(extends=extends)
    assert [refusal.error.reason for refusal in refused.refusals] == ["SEQUENCE_OFFLOADED"]
    holder.run(refused, skip=True)
    for seq_id in itertools.count(2):
        holder.run(holder.admit((seq_id, draw_tokens(80, seed=seq_id))))
        host_blocks = pair.pool().host_block_counts
        plan = holder.plan(offload_sequence_ids=[seq_id])
        holder.run(plan, skip=True)
        holder.await_settled()  # until then the blocks that it left are retired, and the next one may find no room
        if plan.refusals:
            break
    (refusal,) = plan.refusals
    assert refusal.error.reason == "OUT_OF_HOST_BLOCKS"
    assert int(refusal.error.metadata["needed"]) == 20 > int(refusal.error.metadata["free"]) == host_blocks.free_count
    assert pair.pool().host_block_counts == host_blocks
    holder.run(holder.plan(release_sequence_ids=range(2, seq_id + 1)), skip=True)
    holder.await_settled()
    holder.run(restore(holder, 1))
    holder.go_on(1, num_steps=1)
    assert holder.tokens[1] == PROMPT + generate(PROMPT, 5)
    end(holder)


def test_a_lease_that_ends_leaves_nothing_in_the_host_tier(pair: Pair) -> None:
    holder = begin(pair)
    holder.run(holder.plan(offload_sequence_ids=[1]))
    assert pair.pool().host_block_counts.held_count == 6
    end(holder)
    assert pair.pool().host_block_counts.held_count == 0


def test_a_cachemgr_that_comes_back_knows_who_is_in_the_host_tier(pair: Pair, generate: Generate) -> None:
    holder = begin(pair)
    holder.run(holder.plan(offload_sequence_ids=[1]))
    holder.await_settled()
    before = holder.sequence(1)
    pair.services.cachemgr.kill()
    pair.services.cachemgr.start()
    pair.services.cachemgr.wait_serving(DEADLINE_S)
    pair.await_attached()
    assert holder.sequence(1) == before
    overwrite(pair)
    holder.run(restore(holder, 1))
    holder.go_on(1, num_steps=2)
    assert holder.tokens[1] == PROMPT + generate(PROMPT, 6)
    end(holder)


# -- the engine under pressure ------------------------------------------------------------------------------------

PROMPTS = [draw_tokens(count, seed=count) for count in (24, 11, 30, 5, 23, 18, 9)]
NUM_NEW_UNDER_PRESSURE = 40


async def complete(address: str) -> tuple[list[Completion], EngineStatistics]:
    async with Engine.connect(address, config=EngineConfig(max_step_tokens=30)) as engine:
        completions = await engine.complete(PROMPTS, SamplingParams(max_tokens=NUM_NEW_UNDER_PRESSURE, temperature=0.0))
        return completions, engine.statistics()


def test_under_pressure_everybody_gets_the_same_tokens(pair: Pair, generate: Generate) -> None:
    completions, statistics = asyncio.run(complete(pair.services.cachemgr_address))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert list(completion.samples[0].token_ids) == generate(prompt, NUM_NEW_UNDER_PRESSURE)
    scheduler = statistics.scheduler
    assert scheduler.offloads == scheduler.restores > 0
    assert scheduler.admissions == len(PROMPTS) + scheduler.preemptions - scheduler.offloads
    assert statistics.offloaded_bytes >= statistics.restored_bytes > 0
    assert (scheduler.failed_steps, statistics.recoveries) == (0, 0)
    await_that("the lease is gone", lambda: not pair.leases())
