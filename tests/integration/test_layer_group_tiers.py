"""Copies of evicted blocks of layer groups in the host tier and on the disk, through both real processes.

A prompt finds its prefix there if its next token sees nothing else: all blocks of the full groups, and the last ones of
those with a window. Every token is as generate() has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from framework.model_zoo import save
from integration.protocol_client import LeaseHolder, Pair, ask, await_that, draw_tokens
from integration.test_disk import admit_waiting, has_no_orders
from integration.test_host_copies import end, found, run
from integration.test_layer_groups import KINDS, Model, parameter

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cli.launch import LocalServices

BLOCK_SIZE = 4
NUM_BLOCKS = 56
PROMPT = draw_tokens(45, seed=3)
NUM_FOUND = 44


@pytest.fixture(scope="module")
def disk_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk") / "kv"


@pytest.fixture(scope="module", params=[parameter(family, BLOCK_SIZE) for family in KINDS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, disk_dir: Path) -> Iterator[Model]:
    family, _ = request.param
    arguments = ("--dtype", "float32", "--threads", "1", "--block-size", str(BLOCK_SIZE), "--max-num-seqs", "8")
    tiers = ("--host-memory", "64K", "--host-cache-share", "1", "--disk-dir", str(disk_dir), "--disk-memory", "8M")
    with LocalServices.start(
        model=save(family, tmp_path_factory.mktemp("model") / family),
        num_blocks=NUM_BLOCKS,
        extra_worker_args=(*arguments, "--max-model-len", "96", *tiers),
    ) as services:
        pair = Pair(services)
        pair.await_attached()
        yield Model(family, BLOCK_SIZE, pair)
        pair.close()


@pytest.fixture
def pair(model: Model) -> Iterator[Pair]:
    """Both processes with nothing cached. Afterwards each block of all tiers is free or cached."""
    pair = model.pair
    pair.await_attached()
    ask(pair.cache.ResetPrefixCache, pb.ResetPrefixCacheRequest(pool="default"))
    await_that("the disk is erased", lambda: not found(pair, PROMPT))
    yield pair
    await_that("all orders have ended", partial(has_no_orders, pair))
    statistics = pair.statistics()
    blocks, host, disk = statistics.block_counts, statistics.host_block_counts, statistics.disk_block_counts
    assert (blocks.free_count + blocks.cached_count, pair.violations()) == (NUM_BLOCKS - 1, [])
    assert (host.held_count, host.retired_count, disk.held_count) == (0, 0, 0)


def evict(pair: Pair, prompt: list[int], *media: pb.Medium) -> None:
    """Computes a prompt, and then others until it is found in these places alone."""
    end(run(pair, prompt))
    for seed in range(100, 180):
        if set(found(pair, prompt)) == set(media):
            return
        end(run(pair, draw_tokens(60, seed=seed)))
        await_that("what was evicted is written", partial(has_no_orders, pair))
    raise AssertionError(f"{found(pair, prompt)}")


def check_tokens(model: Model, holder: LeaseHolder, plan: pb.PlanStepResponse, prompt: list[int]) -> None:
    """The prompt was admitted by this plan as sequence 1: it goes on as generate() does."""
    holder.run(plan)
    holder.go_on(1, num_steps=4)
    assert holder.tokens[1] == prompt + model.following(prompt, 5)
    end(holder)


@pytest.mark.parametrize("kept", [len(PROMPT), 21])
def test_a_prompt_finds_its_evicted_prefix_in_the_host_tier(model: Model, pair: Pair, kept: int) -> None:
    """The same prompt, or one that is the same up to a place in the middle, before its window."""
    prompt = PROMPT[:kept] + draw_tokens(len(PROMPT) - kept, seed=4)
    evict(pair, PROMPT[:kept], pb.MEDIUM_HOST)
    expected = found(pair, prompt)[pb.MEDIUM_HOST]
    assert expected == kept // BLOCK_SIZE * BLOCK_SIZE
    before = pair.worker_statistics().restored_block_count
    holder = LeaseHolder.create(pair)
    plan = holder.admit((1, prompt))
    assert plan.admitted_cached_token_counts == [expected]
    check_tokens(model, holder, plan, prompt)
    assert pair.worker_statistics().restored_block_count > before


def test_a_prompt_finds_its_prefix_on_the_disk_after_both_processes_were_killed(model: Model, pair: Pair) -> None:
    evict(pair, PROMPT, pb.MEDIUM_DISK)
    services = pair.services
    for service in (services.worker, services.cachemgr):
        service.kill()
    for service in (services.cachemgr, services.worker):
        service.restart()
    pair.await_attached()
    await_that("the content is known", lambda: found(pair, PROMPT) == {pb.MEDIUM_DISK: NUM_FOUND})
    holder = LeaseHolder.create(pair)
    plan = admit_waiting(holder, PROMPT)
    assert plan.admitted_cached_token_counts == [NUM_FOUND]
    check_tokens(model, holder, plan, PROMPT)


def test_a_copy_that_was_changed_is_computed_again(model: Model, pair: Pair, disk_dir: Path) -> None:
    evict(pair, PROMPT, pb.MEDIUM_DISK)
    for path in disk_dir.glob("*.kv"):
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    holder = LeaseHolder.create(pair)
    plan = admit_waiting(holder, PROMPT)
    assert plan.admitted_cached_token_counts == [0]
    check_tokens(model, holder, plan, PROMPT)


def test_a_reset_removes_the_copies_of_all_groups(pair: Pair, disk_dir: Path) -> None:
    evict(pair, PROMPT, pb.MEDIUM_DISK)
    assert any(b"".join(path.read_bytes() for path in disk_dir.glob("*.kv")))
    ask(pair.cache.ResetPrefixCache, pb.ResetPrefixCacheRequest(pool="default", tenant=""))
    assert found(pair, PROMPT) == {}
    assert not any(b"".join(path.read_bytes() for path in disk_dir.glob("*.kv")))
    holder = run(pair, PROMPT)
    assert holder.plan().refusals == []
    end(holder)
