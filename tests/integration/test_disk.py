"""Copies of cached blocks on a disk, through both real processes: prompts find them there, also after a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from integration.protocol_client import (
    NUM_BLOCKS,
    WORKER_ARGS,
    LeaseHolder,
    Pair,
    RefusedError,
    ask,
    await_that,
    draw_tokens,
)
from integration.test_host_copies import end, found, run

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cli.launch import LocalServices
from quire.cli.service_process import ServiceExitedError

Generate = Callable[[list[int], int], list[int]]
PROMPT = draw_tokens(21, seed=1)


@pytest.fixture(scope="module")
def disk_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk") / "kv"


@pytest.fixture(scope="module")
def services(model_dir: Path, disk_dir: Path) -> Iterator[LocalServices]:
    with LocalServices.start(
        model=model_dir, num_blocks=NUM_BLOCKS, extra_worker_args=(*WORKER_ARGS, *disk_flags(disk_dir))
    ) as services:
        yield services


@pytest.fixture
def pair(services: LocalServices) -> Iterator[Pair]:
    """Both processes. Afterwards each block of all tiers is free or cached."""
    pair = Pair(services)
    pair.await_attached()
    yield pair
    await_that("all orders have ended", partial(has_no_orders, pair))
    statistics = pair.statistics()
    blocks, host, disk = statistics.block_counts, statistics.host_block_counts, statistics.disk_block_counts
    assert (blocks.free_count + blocks.cached_count, pair.violations()) == (NUM_BLOCKS - 1, [])
    assert (host.held_count, host.retired_count) == (0, 0)
    assert disk.free_count + disk.cached_count == pair.pool().geometry.disk_block_count
    pair.close()


def has_no_orders(pair: Pair) -> bool:
    return not pair.statistics().disk_block_counts.retired_count


def disk_flags(disk_dir: Path) -> tuple[str, ...]:
    host = ("--host-memory", "32K", "--host-cache-share", "1")
    return (*host, "--disk-dir", str(disk_dir), "--disk-memory", "4M")


def put_on_disk(pair: Pair, prompt: list[int] = PROMPT) -> None:
    """Computes a prompt, and then others until its blocks are on the disk alone."""
    end(run(pair, prompt))
    for seed in range(100, 140):
        if set(found(pair, prompt)) == {pb.MEDIUM_DISK}:
            return
        end(run(pair, draw_tokens(80, seed=seed)))
        await_that("what was evicted is written", partial(has_no_orders, pair))
    raise AssertionError(f"{found(pair, prompt)}")


def admit_waiting(holder: LeaseHolder, prompt: list[int], seq_id: int = 1) -> pb.PlanStepResponse:
    """Admits a prompt as soon as it does not wait any more."""

    def admit() -> pb.PlanStepResponse | None:
        holder.tokens[seq_id] = list(prompt)
        admission = pb.Admission(sequence_id=seq_id, token_ids=prompt, waits_for_prefix=True)
        plan = holder.plan(admissions=[admission])
        if not plan.refusals:
            return plan
        assert {RefusedError.of_message(each.error).reason for each in plan.refusals} == {"PREFIX_BEING_COMPUTED"}
        holder.run(plan, skip=True)
        return None

    return await_that("the prompt is admitted", admit)


def test_a_prompt_waits_for_its_prefix_on_the_disk_and_has_the_same_tokens(pair: Pair, generate: Generate) -> None:
    put_on_disk(pair)
    holder = LeaseHolder.create(pair)
    plan = admit_waiting(holder, PROMPT)
    assert plan.admitted_cached_token_counts == [20]
    answer = holder.run(plan)
    assert (answer.disk_read_block_count > 0) == (answer.disk_read_time.ToNanoseconds() > 0)
    holder.go_on(1, num_steps=4)
    told = pair.worker_statistics()
    assert (told.disk_read_block_count, told.disk_write_block_count >= 5) == (5, True)
    assert min(told.disk_read_time.ToNanoseconds(), told.disk_write_time.ToNanoseconds()) > 0
    assert holder.tokens[1] == PROMPT + generate(PROMPT, 5)
    statistics = pair.statistics()
    assert statistics.read_from_disk_block_count == 5
    assert statistics.written_to_disk_block_count >= 5
    assert statistics.lost_on_disk_block_count == 0
    end(holder)


def test_a_plan_that_skips_the_disk_computes_what_is_only_there(pair: Pair, generate: Generate) -> None:
    put_on_disk(pair)
    holder = LeaseHolder.create(pair)
    holder.tokens[1] = list(PROMPT)
    admission = pb.Admission(sequence_id=1, token_ids=PROMPT, waits_for_prefix=True)
    plan = holder.plan(admissions=[admission], skips_disk=True)
    assert (len(plan.refusals), plan.admitted_cached_token_counts) == (0, [0])
    holder.run(plan)
    assert holder.tokens[1] == PROMPT + generate(PROMPT, 1)
    end(holder)


@pytest.mark.parametrize("dies", ["worker", "cachemgr", "both"])
def test_what_is_on_the_disk_outlives_the_processes(pair: Pair, generate: Generate, dies: str) -> None:
    put_on_disk(pair)
    services = pair.services
    for service in (services.worker, services.cachemgr):
        if dies in (service.name, "both"):
            service.kill()
    for service in (services.cachemgr, services.worker):
        if not service.is_running:
            service.restart()
    pair.await_attached()
    await_that("the content is known", lambda: found(pair, PROMPT) == {pb.MEDIUM_DISK: 20})
    assert pair.statistics().found_on_disk_block_count >= 5
    holder = LeaseHolder.create(pair)
    plan = admit_waiting(holder, PROMPT)
    assert plan.admitted_cached_token_counts == [20]
    holder.run(plan)
    holder.go_on(1, num_steps=4)
    assert holder.tokens[1] == PROMPT + generate(PROMPT, 5)
    end(holder)


@pytest.mark.parametrize("scope", [{}, {"token_ids": PROMPT[:4]}])
def test_a_reset_removes_the_files_content(pair: Pair, disk_dir: Path, scope: dict[str, object]) -> None:
    put_on_disk(pair)
    before = b"".join(path.read_bytes() for path in disk_dir.glob("*.kv"))
    assert any(before)
    ask(pair.cache.ResetPrefixCache, pb.ResetPrefixCacheRequest(pool="default", **scope))  # type: ignore[arg-type]
    assert not any(b"".join(path.read_bytes() for path in disk_dir.glob("*.kv")))
    assert found(pair, PROMPT) == {}
    pair.services.worker.restart()
    pair.await_attached()
    assert (found(pair, PROMPT), pair.statistics().found_on_disk_block_count) == ({}, 0)


def test_a_copy_that_was_changed_is_computed_again(pair: Pair, disk_dir: Path, generate: Generate) -> None:
    put_on_disk(pair)
    for path in disk_dir.glob("*.kv"):
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    holder = LeaseHolder.create(pair)
    plan = admit_waiting(holder, PROMPT)
    assert plan.admitted_cached_token_counts == [0]
    holder.run(plan)
    holder.go_on(1, num_steps=4)
    assert holder.tokens[1] == PROMPT + generate(PROMPT, 5)
    assert pair.statistics().lost_on_disk_block_count >= 1
    end(holder)


def test_a_disk_that_fails_loses_copies_and_nothing_else(pair: Pair, disk_dir: Path, generate: Generate) -> None:
    """There are folders where its files should be."""
    ask(pair.cache.ResetPrefixCache, pb.ResetPrefixCacheRequest(pool="default"))
    (disk_dir / "blocks-000000.kv").mkdir()
    lost = pair.statistics().lost_on_disk_block_count
    for seed in range(200, 240):
        end(run(pair, draw_tokens(80, seed=seed)))
        if pair.statistics().lost_on_disk_block_count > lost:
            break
    holder = run(pair, PROMPT)
    holder.go_on(1, num_steps=3)
    assert holder.tokens[1] == PROMPT + generate(PROMPT, 5)
    told = {part.part: part.degraded_reason for part in pair.worker_statistics().step_parts}
    assert told["disk"] == "write failed: Is a directory"
    end(holder)
    (disk_dir / "blocks-000000.kv").rmdir()


def test_a_second_worker_does_not_get_the_directory(pair: Pair, disk_dir: Path, model_dir: Path) -> None:
    with pytest.raises(ServiceExitedError, match=r"--disk-dir: \S+ is in use by another process"):
        LocalServices.start(
            model=model_dir,
            num_blocks=NUM_BLOCKS,
            extra_worker_args=(*WORKER_ARGS, *disk_flags(disk_dir)),
        )
