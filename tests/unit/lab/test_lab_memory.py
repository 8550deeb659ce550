"""The laboratory's host tier and layer groups: the real books and scheduler, with times of copies and of windows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from planning import Admission, StepRequest, plan_step, report_of

from quire.cache.v1.layer_spans import LayerGroupKind
from quire.cachemgr._core import Ledger
from quire.cachemgr.service import messages
from quire.client.engine.scheduling.layer_groups import FULL, LayerGroup
from quire.lab import ConfigError, LabConfig, StepTime, compare, run, write_report
from quire.lab.config import config_of
from quire.lab.pool import prompt_bytes
from quire.lab.requests import Request
from quire.lab.simulation import Simulation
from quire.lab.step_times import PRESETS
from quire.lab.tokens import Content

STEP = {"form": "additive", "base_s": 0.01, "token_s": 1e-4, "copy_s": 1e-4}
SESSIONS = {
    "kind": "chat", "rate": 50.0, "think_s": 1.0, "most_tokens": 512, "system_tokens": 64, "first_tokens": 80,
    "turn_tokens": 40, "output_tokens": 60,
}  # fmt: skip
PRESSURE = {"sessions": SESSIONS, "requests": 50}
FULL_LAYERS = {"kind": "full", "layers": 2}
WINDOW = {"kind": "sliding", "window": 32, "layers": 2}


def config(load: Mapping[str, Any], **fleet: Any) -> LabConfig:
    """Two small pools, unless said otherwise."""
    table = {"load": load, "fleet": {"workers": 2, "blocks": 40, "step": STEP} | fleet}
    return config_of(table, name="test")


# The host tier.


def test_a_host_tier_keeps_what_would_be_computed_again() -> None:
    alone, beside = (Simulation(config(PRESSURE, host_blocks=count), 3) for count in (0, 1000))
    without, with_tier = alone.run().metrics, beside.run().metrics
    assert without["preemptions"] > 0
    assert without["offloads"] == without["copied_blocks"] == without["copying_ratio"] == 0
    assert with_tier["offloads"] == with_tier["restores"] > 0
    assert with_tier["computed_tokens"] < without["computed_tokens"]
    assert with_tier["recomputed_tokens"] < without["recomputed_tokens"]
    for simulation in (alone, beside):
        assert all(record.num_generated == record.num_output for record in simulation.records)
    for pool in beside.pools:
        books = pool.pool_statistics()
        assert books.host_block_counts.free_count == 1000, "nothing is left there"
        assert books.offload_count == pool.scheduler_statistics().offloads


def test_a_copy_takes_its_time_in_its_step() -> None:
    """All requests are there from the beginning, so one worker computes and copies until the end."""
    load = {"sessions": SESSIONS | {"turns": 1.0, "rate": 1e6}, "requests": 30, "lengths": "known"}
    simulation = Simulation(config(load, workers=1, host_blocks=1000), 1)
    metrics = simulation.run().metrics
    (pool,) = simulation.pools
    assert metrics["copied_blocks"] > 0
    assert pool.copying_s == pytest.approx(metrics["copied_blocks"] * STEP["copy_s"])
    assert metrics["copying_ratio"] == pytest.approx(pool.copying_s / metrics["duration_s"])
    assert metrics["duration_s"] == pytest.approx(pool.busy_s + pool.copying_s, rel=1e-4)


@pytest.mark.parametrize("fleet", [{"step": STEP | {"copy_s": 1.0}, "host_blocks": 1000}, {"host_blocks": 1}])
def test_a_host_tier_that_is_slow_or_full_is_not_used(fleet: dict[str, Any]) -> None:
    metrics = run(config(PRESSURE, **fleet), 3).metrics
    assert metrics["offloads"] == 0
    assert metrics == run(config(PRESSURE), 3).metrics


def test_an_engine_learns_the_costs_of_its_copies() -> None:
    simulation = Simulation(config(PRESSURE, workers=1, host_blocks=1000), 3)
    simulation.run()
    costs = simulation.pools[0].scheduler_costs
    assert costs.copy.per_s * STEP["copy_s"] == pytest.approx(simulation.config.fleet.geometry.block_bytes)
    slowest, fastest = 1 / (STEP["base_s"] + STEP["token_s"]), 1 / STEP["token_s"]
    assert slowest < costs.prefill.per_s < fastest
    assert costs.prefill.per_s != 2000, "measured, not assumed"


def test_evicted_prompts_are_found_in_the_host_tier() -> None:
    """Prompts of two documents in turn, and a pool with room for one of them."""
    contents = [Content.of([(1 + turn % 2, 0, 400), (9 + turn, 0, 2)]) for turn in range(6)]
    prompts = [Request(content, 401, 1, 60.0 * turn, 0) for turn, content in enumerate(contents)]
    load = PRESSURE | {"lengths": "known"}
    alone, beside = (
        Simulation(config(load, workers=1, host_blocks=100, host_cache_share=share), 1, prompts) for share in (0, 0.5)
    )
    without, with_copies = alone.run().metrics, beside.run().metrics
    assert without["host_hit_ratio"] == without["copied_blocks"] == 0
    assert with_copies["host_hit_ratio"] > 0.25
    assert with_copies["hit_ratio"] > without["hit_ratio"] + 0.25
    assert with_copies["computed_tokens"] < 0.7 * without["computed_tokens"]
    assert beside.pools[0].copying_s == pytest.approx(with_copies["copied_blocks"] * STEP["copy_s"])
    assert 0 < beside.pools[0].pool_statistics().host_block_counts.cached_count <= 50


@pytest.mark.parametrize(("copy_s", "num_copied"), [(0.001, 66), (0.02, 0)])
def test_copies_that_take_longer_than_computing_are_not_made(copy_s: float, num_copied: int) -> None:
    """A block of 16 tokens takes 16 ms to compute here."""
    step = STEP | {"token_s": 0.001, "copy_s": copy_s}
    contents = [Content.of([(1 + turn % 2, 0, 400), (9 + turn, 0, 2)]) for turn in range(6)]
    prompts = [Request(content, 401, 1, 60.0 * turn, 0) for turn, content in enumerate(contents)]
    fleet = {"workers": 1, "step": step, "host_blocks": 100, "host_cache_share": 0.5}
    metrics = Simulation(config(PRESSURE | {"lengths": "known"}, **fleet), 1, prompts).run().metrics
    assert metrics["copied_blocks"] == num_copied


@pytest.mark.parametrize(("read_s", "is_read"), [(0.001, True), (0.02, False)])
def test_prompts_that_left_the_host_tier_are_read_from_the_disk_if_that_is_faster(read_s: float, is_read: bool) -> None:
    """Prompts of four documents in turn; pool and host tier have room for one each. A block takes 16 ms to compute."""
    step = STEP | {"token_s": 0.001, "read_s": read_s, "write_s": 0.001}
    contents = [Content.of([(1 + turn % 4, 0, 400), (9 + turn, 0, 2)]) for turn in range(24)]
    prompts = [Request(content, 401, 1, 60.0 * turn, 0) for turn, content in enumerate(contents)]
    fleet = {"workers": 1, "step": step, "host_blocks": 40, "host_cache_share": 1.0}
    load = PRESSURE | {"lengths": "known"}
    without, disk = (
        Simulation(config(load, **fleet, disk_blocks=count), 1, prompts).run().metrics for count in (0, 400)
    )
    assert without["disk_hit_ratio"] == 0
    if is_read:
        assert disk["disk_hit_ratio"] > without["hit_ratio"] + 0.5
        assert disk["computed_tokens"] < 0.4 * without["computed_tokens"]
        assert disk["first_token_p50_s"] < 0.4 * without["first_token_p50_s"]
    else:
        assert disk["disk_hit_ratio"] < 0.2, "the first reads show what a read takes"


# Layer groups.


def prompts_of(*lengths: int) -> list[Request]:
    """Prompts that begin alike, one a minute, with an answer of one token."""
    return [
        Request(Content.of([(1, 0, length // 2), (2 + index, 0, length - length // 2 + 1)]), length, 1, 60.0 * index, 0)
        for index, length in enumerate(lengths)
    ]


def test_windows_serve_a_prompt_that_is_longer_than_the_pool() -> None:
    requests = prompts_of(3000)
    load = PRESSURE | {"lengths": "known"}
    windowed = Simulation(config(load, workers=1, layer_groups=[WINDOW, WINDOW]), 1, requests)
    full = Simulation(config(load, workers=1, layer_groups=[FULL_LAYERS, FULL_LAYERS]), 1, requests)
    assert requests[0].num_prompt > windowed.config.fleet.blocks * windowed.config.fleet.block_size
    assert windowed.run().metrics["refused"] == 0
    assert windowed.records[0].num_generated == 1
    assert full.run().metrics["refused"] == 1


GROUPS = {
    "full": [FULL_LAYERS],
    "two full": [FULL_LAYERS, FULL_LAYERS],
    "a window": [WINDOW],
    "full and windows": [FULL_LAYERS, WINDOW, WINDOW],
    "full and chunks": [FULL_LAYERS, {"kind": "chunked", "window": 64, "layers": 2}],
}


@pytest.mark.parametrize("groups", GROUPS)
def test_hits_are_those_of_the_books(groups: str) -> None:
    """The same prompts at a ledger that is driven by hand, each computed in one step."""
    requests = prompts_of(300, 200, 260, 310, 300, 90, 200, 310)
    requests += [replace(request, at_s=request.at_s + 600) for request in requests]
    pool = {"blocks": 45 * len(GROUPS[groups]), "layer_groups": GROUPS[groups], "eviction": "lru"}
    given = config(PRESSURE | {"lengths": "known"}, workers=1, **pool)
    simulation = Simulation(given, 1, requests)
    outcome = simulation.run()

    ledger = Ledger("pool", 1, messages.decode_geometry(given.fleet.geometry), policy="lru")
    ledger.open_lease("lease", ttl_s=1.0, now=0.0)
    found = []
    for number, request in enumerate(requests, start=1):
        tokens = request.content.tokens()
        admission = Admission(number, prompt_bytes(tokens[: request.num_prompt]))
        plan = plan_step(ledger, "lease", StepRequest(admissions=[admission]), now=0.0)
        found += plan.admitted_cached_counts
        report = report_of(
            *("lease", plan.step_number),
            seq_ids=[number],
            token_counts=[request.num_prompt],
            sampled_ids=[number],
            sampled_tokens=[int(tokens[-1])],
        )
        ledger.settle(report)
        plan = plan_step(ledger, "lease", StepRequest(releases=[number]), now=0.0)
        ledger.settle(report_of("lease", plan.step_number))
    assert [record.num_cached for record in simulation.records] == found
    assert 0 < sum(found) < sum(request.num_prompt for request in requests)
    books = messages.statistics_of(ledger)
    assert outcome.metrics["evicted_blocks"] == books.evicted_block_count > 0
    by_group = [
        {"found_blocks": each.found_block_count, "passed_blocks": each.passed_block_count,
         "evicted_blocks": each.evicted_block_count}
        for each in books.layer_groups
    ]  # fmt: skip
    assert list(outcome.layer_groups.values()) == by_group
    assert len(by_group) == (len(GROUPS[groups]) if len(GROUPS[groups]) > 1 else 0)


@pytest.mark.parametrize("lengths", ["known", "unknown"])
def test_every_request_ends_with_its_tokens_with_windows_and_a_host_tier(lengths: str) -> None:
    fleet = {"blocks": 60, "host_blocks": 200, "layer_groups": GROUPS["full and windows"]}
    simulation = Simulation(config(PRESSURE | {"lengths": lengths}, **fleet), 3)
    outcome = simulation.run()
    assert outcome.metrics["offloads"] > 0
    assert outcome.metrics["refused"] == 0
    assert all(record.num_generated == record.num_output for record in simulation.records)
    assert all(figures["found_blocks"] > 0 for figures in outcome.layer_groups.values())
    passed = [figures["passed_blocks"] for figures in outcome.layer_groups.values()]
    assert passed[0] == 0 < min(passed[1:])
    again = run(simulation.config, 3)
    assert json.dumps(again.describe()) == json.dumps(outcome.describe())


# Times of steps.


KINDS = {
    "full": FULL,
    "sliding": LayerGroup(LayerGroupKind.SLIDING, 5),
    "chunked": LayerGroup(LayerGroupKind.CHUNKED, 6),
    "wide": LayerGroup(LayerGroupKind.SLIDING, 1000),
}


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_pairs_are_those_that_the_tokens_see(kind: str) -> None:
    group = KINDS[kind]
    runs = [(0, 1), (0, 4), (3, 9), (11, 1), (12, 1), (17, 30)]
    seen = [[range(group.first_seen(p), p + 1) for p in range(start, start + count)] for start, count in runs]
    num_keys = sum(len(set().union(*each)) for each in seen)
    num_pairs = sum(len(keys) - 0.5 for each in seen for keys in each)
    starts, counts = zip(*runs, strict=True)
    of_keys = StepTime("additive", base_s=1, token_s=0, context_s=1).seconds(starts, counts, {group: 1.0})
    of_pairs = StepTime("additive", base_s=1, token_s=0, pair_s=1).seconds(starts, counts, {group: 1.0})
    assert of_keys == pytest.approx(1 + num_keys)
    assert of_pairs == pytest.approx(1 + num_pairs)


def test_a_step_reads_the_mean_of_the_layers() -> None:
    groups = [{"kind": "full", "layers": 10}, {"kind": "sliding", "window": 16, "layers": 10},
              {"kind": "sliding", "window": 16, "layers": 5}]  # fmt: skip
    parts = config(PRESSURE, layer_groups=groups).fleet.layer_parts
    assert parts == {FULL: 0.4, LayerGroup(LayerGroupKind.SLIDING, 16): 0.6}
    step = StepTime("additive", base_s=1, token_s=0, context_s=1)
    assert step.seconds([99], [1], parts) == pytest.approx(1 + 0.4 * 100 + 0.6 * 16)
    assert config(PRESSURE).fleet.layer_parts == {FULL: 1.0}


def test_the_steps_of_a_pool_take_the_time_of_its_groups() -> None:
    requests = prompts_of(200)
    step = {"form": "additive", "base_s": 0.01, "token_s": 1e-4, "context_s": 1e-3, "pair_s": 1e-5}
    given = config(PRESSURE | {"lengths": "known"}, workers=1, step=step, layer_groups=[FULL_LAYERS, WINDOW])
    simulation = Simulation(given, 1, requests)
    simulation.run()
    num_pairs = (200 * 200 / 2 + 32 * 32 / 2 + (200 - 32) * 31.5) / 2
    assert simulation.pools[0].busy_s == pytest.approx(0.01 + 200 * 1e-4 + 200 * 1e-3 + num_pairs * 1e-5)


def test_a_preset_has_room_and_copies_by_its_groups() -> None:
    one = config(PRESSURE, step="h100-8b", blocks=0, host_blocks=10).fleet
    halves = [{"kind": "full", "layers": 16}, {"kind": "sliding", "window": 512, "layers": 16}]
    two = config(PRESSURE, step="h100-8b", blocks=0, layer_groups=halves).fleet
    assert one.blocks == PRESETS["h100-8b"].pool_tokens // 16
    assert two.blocks in (2 * one.blocks, 2 * one.blocks + 1), "blocks of half the layers"
    assert one.step.copy_s == pytest.approx(16 * 131_072 / 48e9)
    assert two.step.copy_s == pytest.approx(one.step.copy_s / 2)


# Errors.


@pytest.mark.parametrize(
    ("fleet", "said"),
    [
        ({"host_blocks": -1}, "fleet.host_blocks is -1: must be 0 to"),
        ({"host_blocks": 2**24 + 1}, "fleet.host_blocks is 16777217: must be 0 to 16777216"),
        ({"host_blocks": 0.5}, "fleet.host_blocks is 0.5: must be a whole number"),
        (
            {"host_blocks": 1, "step": STEP | {"copy_s": 0}},
            "fleet.step.copy_s is 0: must be above 0, with fleet.host_blocks",
        ),
        ({"host_cache_share": 2, "host_blocks": 1}, "fleet.host_cache_share is 2: must be 0 to 1"),
        ({"host_cache_share": 1}, "fleet.host_cache_share is 1: must be 0, without fleet.host_blocks"),
        ({"disk_blocks": 1, "host_blocks": 1}, "fleet.disk_blocks is 1: must be 0 to 0"),
        (
            {"disk_blocks": 1, "host_blocks": 1, "host_cache_share": 1},
            "fleet.step.read_s is 0: must be above 0, with fleet.disk_blocks",
        ),
        ({"step": STEP | {"copy_s": -1}}, "fleet.step.copy_s is -1: must be seconds"),
        ({"layer_groups": 2}, "fleet.layer_groups is 2: must be a list of tables with kind, layers and window"),
        ({"layer_groups": [1]}, "fleet.layer_groups is [1]: must be a list of tables"),
        ({"layer_groups": [{"kind": "full"}]}, "fleet.layer_groups[0].layers is missing"),
        (
            {"layer_groups": [FULL_LAYERS | {"size": 3}]},
            "fleet.layer_groups[0].size is unknown: must be one of kind, layers, window",
        ),
        (
            {"layer_groups": [FULL_LAYERS | {"kind": "wide"}]},
            "fleet.layer_groups[0].kind is 'wide': must be one of full, sliding, chunked",
        ),
        (
            {"layer_groups": [FULL_LAYERS | {"layers": 1.5}]},
            "fleet.layer_groups[0].layers is 1.5: must be a whole number",
        ),
        ({"layer_groups": [FULL_LAYERS | {"layers": 0}]}, "fleet.layer_groups[0].layers is 0: must be 1 to"),
        ({"layer_groups": [FULL_LAYERS, WINDOW | {"window": 0}]}, "fleet.layer_groups[1].window is 0: must be 1 to"),
        ({"layer_groups": [WINDOW | {"window": 2**40}]}, "fleet.layer_groups[0].window is 1099511627776: must be 0 to"),
        ({"layer_groups": [FULL_LAYERS | {"window": 9}]}, "fleet.layer_groups[0].window is 9: must be 0 to 0 for FULL"),
        (
            {"layer_groups": [WINDOW, FULL_LAYERS]},
            "fleet.layer_groups[1].kind is FULL: must be SLIDING or CHUNKED, after a group of these kinds",
        ),
        ({"layer_groups": [FULL_LAYERS] * 65}, "fleet.layer_groups is 65 entries: must be at most 64 entries"),
        (
            {"layer_groups": [FULL_LAYERS], "step": "h100-8b"},
            "fleet.layer_groups has 2 layers: must have 32, those of h100-8b",
        ),
    ],
)
def test_a_wrong_pool_names_field_value_and_limit(fleet: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        config(PRESSURE, **fleet)


# The report.


def test_a_report_shows_the_host_tier_and_the_groups_where_they_are(tmp_path: Path) -> None:
    def report(*configs: LabConfig) -> tuple[str, dict[str, Any]]:
        page, data = write_report(compare(configs), tmp_path)
        return page.read_text(), json.loads(data.read_text())

    load, slow = PRESSURE | {"requests": 20}, STEP | {"base_s": 0.1}
    plain = config(load, step=slow)
    tier = replace(config(load, step=slow, host_blocks=500), name="tier")
    groups = replace(config(load, step=slow, layer_groups=[FULL_LAYERS, WINDOW]), name="groups")
    page, data = report(plain)
    assert "host tier" not in page
    assert "Layer groups" not in page
    assert "copied_blocks" not in data["configurations"][0]["estimates"]
    assert "eviction lineage" in page
    page, data = report(plain, tier, groups)
    assert "blocks copied to the host tier and back" in page
    assert page.count("<svg") == 4
    assert page.count("eviction lineage") == 2, "in a pool with windows, it is another one"
    assert page.count("eviction lru") == 1
    assert "<td>0: full, 2 layers</td><td>groups</td>" in page
    assert "<td>1: sliding 32, 2 layers</td><td>groups</td>" in page
    assert [each["estimates"]["offloads"]["mean"] > 0 for each in data["configurations"]] == [False, True, False]
    series = data["configurations"][1]["runs"][0]["series"]
    assert max(series["host_blocks"]) > 0
    assert all(before <= after for before, after in pairwise(series["copied_blocks"]))
    by_group = data["configurations"][2]["runs"][0]["layer_groups"]
    assert list(by_group) == ["0: full, 2 layers", "1: sliding 32, 2 layers"]
