"""Copies of evicted blocks in the host tier, through both real processes: prompts find them, with the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
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

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cli.launch import LocalServices

Generate = Callable[[list[int], int], list[int]]
PROMPT = draw_tokens(21, seed=1)
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def services(model_dir: Path) -> Iterator[LocalServices]:
    with LocalServices.start(
        model=model_dir,
        num_blocks=NUM_BLOCKS,
        extra_worker_args=(*WORKER_ARGS, "--host-memory", "128K", "--host-cache-share", "0.5"),
        worker_target=FAULTY_WORKER,
    ) as started:
        yield started


@pytest.fixture
def pair(services: LocalServices) -> Iterator[Pair]:
    """Both processes, attached. Afterwards each block of both tiers is free or cached."""
    pair = Pair(services)
    pair.await_attached()
    yield pair
    assert pair.leases() == []
    blocks, host_blocks = pair.pool().block_counts, pair.pool().host_block_counts
    assert (blocks.free_count + blocks.cached_count, pair.violations()) == (NUM_BLOCKS - 1, [])
    assert host_blocks.free_count + host_blocks.cached_count == pair.pool().geometry.host_block_count
    ask(pair.cache.ResetPrefixCache, pb.ResetPrefixCacheRequest(pool="default"))
    assert pair.pool().host_block_counts.free_count == pair.pool().geometry.host_block_count
    pair.close()


def run(pair: Pair, *prompts: list[int]) -> LeaseHolder:
    """A lease with these prompts, which are run, with two tokens more each."""
    holder = LeaseHolder.create(pair)
    for seq_id, prompt in enumerate(prompts, 1):
        holder.run(holder.accepted(holder.admit((seq_id, prompt))))
        holder.go_on(seq_id, num_steps=1)
    holder.await_settled()
    return holder


def end(holder: LeaseHolder) -> None:
    holder.delete()
    await_that("the lease is gone", lambda: not holder.pair.has_lease(holder.lease_id))


def evict(pair: Pair, prompt: list[int]) -> None:
    """Computes a prompt, and then others until all of its blocks were evicted."""
    end(run(pair, prompt))
    seed = 100
    while found(pair, prompt).get(pb.MEDIUM_DEVICE):
        end(run(pair, draw_tokens(80, seed=seed)))
        seed += 1


def found(pair: Pair, prompt: list[int]) -> dict[pb.Medium, int]:
    """The tokens that an admission would find, by medium: lookup and explanation agree."""
    (match,) = ask(pair.cache.LookupPrefix, pb.LookupPrefixRequest(pool="default", token_ids=prompt)).matches
    told = ask(pair.cache.ExplainPrefix, pb.ExplainPrefixRequest(pool="default", token_ids=prompt))
    assert (told.tokens_by_medium, told.cached_token_count) == (match.tokens_by_medium, match.cached_token_count)
    by_medium = {part.medium: part.token_count for part in match.tokens_by_medium}
    assert sum(by_medium.values()) == match.cached_token_count
    return by_medium


def test_a_prompt_finds_its_evicted_prefix_in_the_host_tier(pair: Pair, generate: Generate) -> None:
    evict(pair, PROMPT)
    assert found(pair, PROMPT) == {pb.MEDIUM_HOST: 20}
    before, did = pair.statistics(), pair.worker_statistics()
    holder = LeaseHolder.create(pair)
    plan = holder.admit((1, PROMPT), (2, PROMPT))
    assert plan.admitted_cached_token_counts == [20, 20]
    holder.run(plan)
    holder.go_on(1, 2, num_steps=4)
    assert holder.tokens[1] == holder.tokens[2] == PROMPT + generate(PROMPT, 5)
    after, done = pair.statistics(), pair.worker_statistics()
    assert after.found_in_host_token_count - before.found_in_host_token_count == 40
    assert done.restored_block_count - did.restored_block_count == 40 // BLOCK_SIZE
    assert after.kept_in_host_block_count >= 20 // BLOCK_SIZE
    assert found(pair, PROMPT) == {pb.MEDIUM_DEVICE: 20}
    end(holder)


def test_a_skipped_step_copies_all_the_same(pair: Pair, generate: Generate) -> None:
    evict(pair, PROMPT)
    holder = LeaseHolder.create(pair)
    holder.run(holder.accepted(holder.admit((1, PROMPT))), skip=True)
    holder.await_settled()
    holder.tokens[1] = list(PROMPT)
    holder.go_on(1, num_steps=2)
    assert holder.tokens[1] == PROMPT + generate(PROMPT, 2)
    end(holder)


def test_another_salt_or_a_reset_of_any_scope_finds_nothing(pair: Pair) -> None:
    for scope in ({"tenant": ""}, {"token_ids": PROMPT[:4]}):
        evict(pair, PROMPT)
        assert found(pair, PROMPT) == {pb.MEDIUM_HOST: 20}
        request = pb.LookupPrefixRequest(pool="default", token_ids=PROMPT, salt=b"another")
        assert not ask(pair.cache.LookupPrefix, request).matches[0].cached_token_count
        ask(pair.cache.ResetPrefixCache, pb.ResetPrefixCacheRequest(pool="default", **scope))
        assert found(pair, PROMPT) == {}
