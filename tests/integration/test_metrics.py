"""The metrics pages of both servers: as docs/how-to/operations.md lists them, with the right numbers."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from integration.protocol_client import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    WORKER_ARGS,
    LeaseHolder,
    Pair,
    RefusedError,
    ask,
    await_that,
    draw_tokens,
)
from prometheus_client.parser import text_string_to_metric_families

from quire.cache.v1 import cache_service_pb2
from quire.cli.launch import LocalServices
from quire.cli.service_process import ServiceProcess

OPERATIONS = Path(__file__).parents[2] / "docs" / "how-to" / "operations.md"
METRICS_FLAGS = ("--metrics-listen", "127.0.0.1:0")
OF_BOTH = {"quire_build_info", "quire_tls_certificate_expiry_timestamp_seconds"}
Page = dict[str, float]
"""Values by "name{label=value,…}", labels by name."""


@pytest.fixture(scope="module")
def measured(model_dir: Path) -> Iterator[Pair]:
    """Both processes with metrics pages."""
    with LocalServices.start(
        model=model_dir,
        num_blocks=NUM_BLOCKS,
        extra_cachemgr_args=METRICS_FLAGS,
        extra_worker_args=(*WORKER_ARGS, *METRICS_FLAGS),
    ) as services:
        pair = Pair(services)
        yield pair
        pair.close()


def text_of(server: ServiceProcess) -> str:
    assert server.log_path is not None
    (address,) = re.findall(r" metrics address=(\S+)", server.log_path.read_text())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address}/metrics", timeout=DEADLINE_S) as page:
        return str(page.read().decode())


def page_of(server: ServiceProcess) -> Page:
    return {
        f"{sample.name}{{{','.join(f'{key}={value}' for key, value in sorted(sample.labels.items()))}}}": sample.value
        for family in text_string_to_metric_families(text_of(server))
        for sample in family.samples
        if sample.name.startswith("quire_")
    }


def documented() -> dict[str, set[str]]:
    """Labels by name, of the tables of metrics."""
    section = OPERATIONS.read_text().split("\n## Metrics\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = re.findall(r"`(quire_\w+)(?:\{([\w,]*)\})?`", " ".join(cells))
    assert len({name for name, _ in named}) == len(named), "each is said once"
    return {name: set(labels.split(",")) - {""} for name, labels in named}


def exposed(server: ServiceProcess) -> set[str]:
    """Names of families, with or without samples."""
    return {name for name in re.findall(r"^# TYPE (\S+) ", text_of(server), re.MULTILINE) if name.startswith("quire_")}


def test_the_pages_have_what_is_documented_and_nothing_else(measured: Pair) -> None:
    services = measured.services
    ours, theirs = exposed(services.cachemgr), exposed(services.worker)
    assert ours | theirs == documented().keys()
    assert ours & theirs == OF_BOTH
    assert {name for name in documented() if name.startswith("quire_worker_")} | OF_BOTH == theirs


def test_a_worker_says_what_it_serves(measured: Pair, model_dir: Path) -> None:
    page = page_of(measured.services.worker)
    assert page[f"quire_worker_info{{model={model_dir.resolve().name},pool=default}}"] == 1
    assert page[f"quire_build_info{{version={metadata.version('quire-kv')}}}"] == 1


def test_labels_are_those_documented(measured: Pair) -> None:
    with pytest.raises(RefusedError):
        measured.pool("nowhere")
    refused_item(measured)
    services = measured.services
    for name in (*page_of(services.cachemgr), *page_of(services.worker)):
        family, labels = name.rstrip("}").split("{", 1)
        if family not in documented():
            family = re.sub("_(bucket|count|sum)$", "", family)  # of a histogram, which adds its limit to the labels
        assert {pair.split("=")[0] for pair in labels.split(",")} - {"", "le"} == documented()[family]


def refused_item(pair: Pair) -> None:
    lease = LeaseHolder.create(pair)
    plan = lease.plan(admissions=[cache_service_pb2.Admission(sequence_id=1)])
    assert plan.refusals[0].error.reason == "EMPTY_PROMPT"
    lease.run(plan, skip=True)
    lease.delete()


def test_what_happens_is_counted(measured: Pair) -> None:
    cachemgr = measured.services.cachemgr
    await_that("no lease is left", lambda: not measured.leases())
    before = page_of(cachemgr)
    lease = LeaseHolder.create(measured)
    prompt = draw_tokens(3 * BLOCK_SIZE, seed=1)
    lease.run(lease.admit((1, prompt)))
    lease.await_settled()
    lease.run(lease.admit((2, prompt)))
    lease.await_settled()
    planned = lease.extend(1)
    now = page_of(cachemgr)
    lease.run(planned)
    lease.delete()
    hit = 2 * BLOCK_SIZE
    # Sequence 1 has taken a 4th block for what it computes next.
    expected = {
        "quire_cache_admissions_total{pool=default}": 2,
        "quire_cache_blocks_allocated_total{pool=default}": 5,
        "quire_cache_blocks_published_total{pool=default}": 3,
        "quire_cache_prefix_hit_tokens_total{pool=default}": hit,
        "quire_cache_prefix_written_tokens_total{pool=default}": 3 * BLOCK_SIZE,
        "quire_cache_prompt_tokens_total{pool=default}": 6 * BLOCK_SIZE,
        "quire_cache_steps_ended_total{outcome=computed,pool=default}": 2,
        "quire_cache_steps_in_flight{pool=default}": 1,
        "quire_cache_steps_planned_total{pool=default}": 3,
        "quire_kv_shared_blocks{pool=default}": 3,
        "quire_leases{pool=default,state=open}": 1,
        "quire_sequences{pool=default}": 2,
    }
    assert grown(before, now) == expected
    states = {state: now[f"quire_kv_blocks{{pool=default,state={state}}}"] for state in ("free", "cached", "active")}
    counts = measured.counts()
    assert sum(states.values()) + now["quire_kv_blocks{pool=default,state=retired}"] == NUM_BLOCKS - 1
    assert counts.free_count + counts.cached_count + counts.active_count + counts.retired_count == NUM_BLOCKS - 1


def grown(before: Page, now: Page) -> Page:
    """The changed values and their differences, without block and token counts by state."""
    ignored = ("quire_kv_blocks", "quire_kv_held_tokens")
    changes = {name: value - before.get(name, 0.0) for name, value in now.items() if not name.startswith(ignored)}
    return {name: change for name, change in changes.items() if change}


def test_what_comes_back_is_told_apart_from_what_is_new(measured: Pair) -> None:
    cachemgr = measured.services.cachemgr
    await_that("no lease is left", lambda: not measured.leases())
    lease = LeaseHolder.create(measured)
    pinned, evicted = draw_tokens(2 * BLOCK_SIZE, seed=2), draw_tokens(3 * BLOCK_SIZE, seed=3)
    lease.run(lease.admit((1, pinned), (2, evicted)))
    lease.await_settled()
    lease.run(lease.plan(release_sequence_ids=[1, 2]), skip=True)
    lease.await_settled()
    before = page_of(cachemgr)
    ask(measured.cache.PinPrefix, cache_service_pb2.PinPrefixRequest(pool="default", token_ids=pinned))
    large = draw_tokens((NUM_BLOCKS - 3) * BLOCK_SIZE, seed=4)
    lease.run(lease.admit((3, large), max_compute_token_count=1), skip=True)
    lease.run(lease.plan(release_sequence_ids=[3]), skip=True)
    lease.await_settled()
    lease.run(lease.admit((4, evicted), resumed=True))
    lease.run(lease.admit((5, pinned), resumed=True, reserved_token_count=5 * BLOCK_SIZE))
    lease.await_settled()
    changes = grown(before, page_of(cachemgr))
    lease.delete()
    # The last block of a prompt is computed in any case: that it is gone is no loss.
    expected = {
        "cache_admissions_total": 1,
        "cache_prompt_tokens_total": len(large),
        "cache_resumed_admissions_total": 2,
        "cache_resumed_tokens_total": 5 * BLOCK_SIZE,
        "cache_resumed_hit_tokens_total": BLOCK_SIZE,
        "cache_recomputed_tokens_total": 2 * BLOCK_SIZE,
        "kv_pinned_blocks": 2,
        "kv_reserved_blocks": 5 - 2,
    }
    assert {name: changes.get(f"quire_{name}{{pool=default}}") for name in expected} == expected


def test_refused_calls_and_plans_on_streams_are_counted(measured: Pair) -> None:
    cachemgr = measured.services.cachemgr
    name = "quire_cache_calls_refused_total"
    plan = f"{name}{{method=PlanSteps,reason=LEASE_NOT_FOUND}}"
    call = f"{name}{{method=RenewLease,reason=LEASE_NOT_FOUND}}"
    before = page_of(cachemgr)
    gone = LeaseHolder(measured, "gone", 1, 1)
    for _ in range(3):
        with pytest.raises(RefusedError):
            gone.renew()
    plans = [cache_service_pb2.PlanStepsRequest(plan=gone.plan_request())] * 2
    answers = list(measured.cache.PlanSteps(iter(plans), timeout=DEADLINE_S))
    assert [answer.error.reason for answer in answers] == ["LEASE_NOT_FOUND"] * 2
    # A call may end a moment after its answer.
    await_that("only the worker's stream is open", lambda: page_of(cachemgr)["quire_cache_open_calls{}"] == 1)
    after = page_of(cachemgr)
    assert (after[call] - before.get(call, 0), after[plan] - before.get(plan, 0)) == (3, 2)


def test_the_pool_and_the_server_say_who_they_are(measured: Pair) -> None:
    page, pool = page_of(measured.services.cachemgr), measured.pool()
    geometry = pool.geometry
    labels = f"block_bytes={geometry.block_bytes},block_size_tokens={BLOCK_SIZE},model={geometry.model},pool=default"
    assert page[f"quire_pool_info{{{labels}}}"] == 1
    assert page["quire_pool_attached{pool=default}"] == 1
    assert page["quire_cache_term{}"] == float(pool.term)
