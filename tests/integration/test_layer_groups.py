"""Layers with windows through both real processes: their blocks come back, and every token is as generate() has it.

Windows and chunks of 8 tokens, in blocks of 4 (shorter than the window) and of 16 (longer).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.protocol_client import LeaseHolder, Pair, ask, await_that, draw_tokens
from model_zoo import WINDOWED, build, save

from quire.cache.v1 import attach_pb2, cache_service_pb2
from quire.cli.launch import LocalServices
from quire.client import Engine, EngineConfig, SamplingParams

# Window layers beside full ones, chunks beside full ones, and windows alone: with both block sizes.
KINDS = ("gemma3", "llama4", "mistral")
# Every other family with windows and groups; gemma4 has one group, because the heads of its full layers are larger.
OTHERS = ("gemma2", "phi3", "gpt_oss", "llama4_temperature", *(family for family in WINDOWED if family != "gemma4"))
CASES = [*((family, size) for family in KINDS for size in (4, 16)), *((family, 4) for family in OTHERS)]
# In `make test`; the other kinds with these blocks are in `make verify`.
SAMPLE = ("gemma3", 4)
WINDOW = 8
NUM_SLOTS = 480
PROMPT = draw_tokens(45, seed=3)


class Model:
    """A model of the zoo with its two services; its greedy continuations by its own attention."""

    def __init__(self, family: str, block_size: int, pair: Pair) -> None:
        self.block_size, self.pair = block_size, pair
        self._model = build(family)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def following(self, tokens: Sequence[int], count: int) -> list[int]:
        key = tuple(tokens)
        if len(self._known.get(key, ())) < count:
            output = self._model.generate(
                torch.tensor([list(key)]),
                attention_mask=torch.ones(1, len(key)),
                max_new_tokens=count,
                do_sample=False,
            )
            self._known[key] = output[0, len(key) :].tolist()
        return self._known[key][:count]

    @property
    def groups(self) -> Any:
        return self.pair.pool().geometry.layer_groups

    def num_cached(self, tokens: Sequence[int]) -> int:
        return self.pair.cached_tokens(tokens)


def parameter(family: str, block_size: int) -> Any:
    others = pytest.mark.verify if family in KINDS and block_size == SAMPLE[1] else pytest.mark.night
    marks = () if (family, block_size) == SAMPLE else others
    return pytest.param((family, block_size), id=f"{family}-{block_size}", marks=marks)


@pytest.fixture(scope="module", params=[parameter(family, size) for family, size in CASES])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    family, block_size = request.param
    arguments = ("--dtype", "float32", "--threads", "1", "--block-size", str(block_size), "--max-num-seqs", "8")
    with LocalServices.start(
        model=save(family, tmp_path_factory.mktemp("model") / family),
        num_blocks=NUM_SLOTS // block_size,
        extra_worker_args=(*arguments, "--max-model-len", "96", "--host-memory", "1M"),
    ) as services:
        pair = Pair(services)
        pair.await_attached()
        yield Model(family, block_size, pair)
        pair.close()


@pytest.fixture
def holder(model: Model) -> Iterator[LeaseHolder]:
    """A lease on an empty prefix cache. Afterwards every block is back."""
    ask(model.pair.cache.ResetPrefixCache, cache_service_pb2.ResetPrefixCacheRequest(pool="default"))
    holder = LeaseHolder.create(model.pair)
    yield holder
    holder.delete()
    await_that("the lease is gone", lambda: not model.pair.has_lease(holder.lease_id))
    counts = model.pair.counts()
    assert counts.free_count + counts.cached_count == NUM_SLOTS // model.block_size - 1
    assert model.pair.violations() == []


def settled(holder: LeaseHolder, *seq_ids: int, num_steps: int) -> None:
    """So many more tokens, one step after the other."""
    for _ in range(num_steps):
        holder.run(holder.extend(*seq_ids))
        holder.await_settled()


def release(holder: LeaseHolder, *seq_ids: int) -> None:
    holder.run(holder.plan(release_sequence_ids=seq_ids))
    holder.await_settled()


def test_blocks_behind_the_window_are_given_back(model: Model, holder: LeaseHolder) -> None:
    holder.run(holder.admit((1, PROMPT[:21])))
    holder.await_settled()
    settled(holder, 1, num_steps=40)
    assert holder.tokens[1] == PROMPT[:21] + model.following(PROMPT[:21], 41)
    tables = holder.sequence(1).group_block_tables
    assert len(tables) == len(model.groups)
    for group, table in zip(model.groups, tables, strict=True):
        is_full = group.kind == attach_pb2.LAYER_GROUP_KIND_FULL
        assert is_full == (table.passed_block_count == 0)
        most = 61 // model.block_size + 1 if is_full else (WINDOW - 1) // model.block_size + 2
        assert table.block_count <= most
    assert sum(table.block_count for table in tables) == len(holder.sequence(1).block_ids)


def test_a_prefix_is_found_at_every_offset_around_the_windows_edge(model: Model, holder: LeaseHolder) -> None:
    """Before and after the blocks that the sequence passed are lost: found or not, the tokens are right."""
    holder.run(holder.admit((1, PROMPT)))
    holder.await_settled()
    settled(holder, 1, num_steps=3)
    passed = [table.passed_block_count for table in holder.sequence(1).group_block_tables]
    assert max(passed) > 0
    found: dict[bool, set[int]] = {}
    for is_evicted in (False, True):
        if is_evicted:
            evict_what_nobody_holds(model, holder)
        for length in range(1, len(PROMPT) + 1):
            tokens = [*PROMPT[:length], 1]
            expected = model.num_cached(tokens)
            plan = holder.admit((2, tokens), cache_use=cache_service_pb2.CACHE_USE_READ_AND_WRITE)
            assert list(plan.admitted_cached_token_counts) == [expected]
            found.setdefault(is_evicted, set()).add(expected)
            holder.run(plan)
            holder.await_settled()
            settled(holder, 2, num_steps=2)
            assert holder.tokens[2] == tokens + model.following(tokens, 3), (is_evicted, length)
            release(holder, 2)
            if is_evicted:
                evict_what_nobody_holds(model, holder)
    multiples = {length // model.block_size * model.block_size for length in range(1, len(PROMPT) + 1)}
    assert found[False] == multiples
    assert 0 in found[True], "a prefix with a lost window is not found"
    assert len(found[True]) > 1, "the prefix that the sequence itself goes on from is"


def evict_what_nobody_holds(model: Model, holder: LeaseHolder) -> None:
    """Fills the pool with other content, which is dropped."""
    before = model.pair.statistics().evicted_block_count
    cached = model.pair.counts().cached_count
    seq_id = 5
    while model.pair.statistics().evicted_block_count - before < cached:
        tokens = draw_tokens(90, seed=100 + seq_id)
        admission = cache_service_pb2.Admission(
            sequence_id=seq_id, token_ids=tokens, cache_use=cache_service_pb2.CACHE_USE_NONE
        )
        plan = holder.plan(admissions=[admission])
        holder.run(plan, skip=True)
        if plan.refusals:
            break
        seq_id += 1
    release(holder, *range(5, seq_id + 1))


def test_a_fork_to_a_lost_position_is_refused_with_the_least_that_works(model: Model, holder: LeaseHolder) -> None:
    holder.run(holder.admit((1, PROMPT)))
    holder.await_settled()
    settled(holder, 1, num_steps=2)

    def fork(num_tokens: int) -> dict[str, Any]:
        return {"forks": [{"parent_sequence_id": 1, "child_sequence_ids": [2], "token_count": num_tokens}]}

    def trim(num_tokens: int) -> dict[str, Any]:
        return {"trim_sequence_ids": [1], "trim_token_counts": [num_tokens]}

    refusal = holder.refused(**fork(1))
    assert refusal.reason == "POSITION_OUT_OF_RANGE"
    least = int(refusal.metadata["least"])
    assert 1 < least <= len(PROMPT)
    assert int(holder.refused(**fork(least - 1)).metadata["least"]) == least
    assert int(holder.refused(**trim(1)).metadata["least"]) == least - 1
    for seq_id, num_tokens in ((2, least), (3, len(PROMPT))):
        tokens = holder.tokens[1][:num_tokens]
        holder.tokens[seq_id] = list(tokens)
        request = {"parent_sequence_id": 1, "child_sequence_ids": [seq_id], "token_count": num_tokens}
        extends = {"sequence_ids": [seq_id], "token_counts": [1]}
        holder.run(holder.accepted(holder.plan(forks=[request], extends=extends)))
        holder.await_settled()
        settled(holder, seq_id, num_steps=6)
        assert holder.tokens[seq_id] == tokens + model.following(tokens, 7)
    plan = holder.accepted(holder.plan(**trim(least - 1)))
    holder.run(plan)
    holder.tokens[1] = [*holder.tokens[1][: least - 1], 7]
    appended = {"sequence_ids": [1], "token_counts": [1], "append_token_counts": [1], "append_token_ids": [7]}
    tokens = list(holder.tokens[1])
    holder.run(holder.accepted(holder.plan(extends=appended)))
    settled(holder, 1, num_steps=6)
    assert holder.tokens[1] == tokens + model.following(tokens, 7)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 7])
def test_the_host_tier_keeps_what_later_tokens_see(model: Model, holder: LeaseHolder, num_steps: int) -> None:
    prompt = PROMPT[:21]
    holder.run(holder.admit((1, prompt), cache_use=cache_service_pb2.CACHE_USE_NONE))
    holder.await_settled()
    settled(holder, 1, num_steps=num_steps)
    holder.run(holder.plan(offload_sequence_ids=[1]))
    holder.await_settled()
    held = holder.sequence(1)
    assert held.offloaded
    assert sum(table.block_count for table in held.group_block_tables) == held.host_block_count
    evict_what_nobody_holds(model, holder)
    holder.run(holder.accepted(holder.plan(restores=[{"sequence_id": 1}])))
    holder.await_settled()
    settled(holder, 1, num_steps=10)
    tokens = holder.tokens[1]
    assert tokens == prompt + model.following(prompt, len(tokens) - len(prompt))


def test_a_prompt_longer_than_the_pool_is_served(tmp_path: Path) -> None:
    """All layers have windows: 80 tokens in a pool with slots for 44."""
    prompts = [draw_tokens(count, seed=count) for count in (80, 70, 9)]
    reference = build("mistral")
    arguments = ("--dtype", "float32", "--threads", "1", "--block-size", "4", "--max-model-len", "96")
    with LocalServices.start(
        model=save("mistral", tmp_path / "mistral"), num_blocks=12, extra_worker_args=arguments
    ) as services:

        async def main() -> list[tuple[int, ...]]:
            config = EngineConfig(max_step_tokens=64)
            async with Engine.connect(services.cachemgr_address, config=config) as engine:
                done = await engine.complete(prompts, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
                return [completion.samples[0].token_ids for completion in done]

        answers = asyncio.run(main())
    for prompt, answer in zip(prompts, answers, strict=True):
        output = reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=12, do_sample=False
        )
        assert list(answer) == output[0, len(prompt) :].tolist()
