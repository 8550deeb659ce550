"""The laboratory: virtual time over the real books and scheduler, its inputs, its errors and its report."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from quire.lab import ConfigError, LabConfig, StepTime, calibrate, compare, read_config, run, write_report
from quire.lab.config import config_of
from quire.lab.experiment import Estimate
from quire.lab.load import make_requests
from quire.lab.measures import jain
from quire.lab.requests import Request
from quire.lab.routers import ROUTERS
from quire.lab.simulation import Simulation
from quire.lab.step_times import PRESETS, read_steps
from quire.lab.tokens import UNUSED_TOKEN, Content
from quire.lab.traces import read_trace

ROOT = Path(__file__).parents[3]
TRACES = ROOT / "benchmarks" / "traces"
STEP = {"form": "additive", "base_s": 1.0, "token_s": 0.1}


def config(load: Mapping[str, Any] | None = None, folder: Path = Path(), **tables: Any) -> LabConfig:
    """Conversations on a small fleet, unless said otherwise."""
    table: dict[str, Any] = {
        "load": {"sessions": {"kind": "chat", "rate": 4.0, "system_tokens": 64, "most_tokens": 1024}, "requests": 60},
        "fleet": {"workers": 3, "blocks": 150, "step": {"form": "additive", "base_s": 0.01, "token_s": 1e-4}},
    }
    return config_of(table | ({} if load is None else {"load": load}) | tables, name="test", folder=folder)


def text(*spans: tuple[int, int, int], num_prompt: int, at_s: float = 0.0, after: int | None = None) -> Request:
    content = Content.of(spans)
    return Request(content, num_prompt, content.num_tokens - num_prompt, at_s, session=0, after=after)


ONE_WORKER = {"workers": 1, "blocks": 100, "block_size": 4, "step": STEP}


def test_two_requests_take_the_time_that_one_can_compute_by_hand() -> None:
    """A step takes 1 s and 0.1 s a token. The prompt of 5 tokens takes 1.5 s, each of 2 further tokens 1.1 s.

    The engine can't know that the third token ends the answer, so a step for a fourth one runs until 4.8. The second
    request arrives at 3.8, begins at 4.8, finds the block of 4 tokens that it shares, and computes one token.
    """
    requests = [text((1, 0, 8), num_prompt=5), text((1, 0, 5), (2, 0, 1), num_prompt=5, at_s=3.8)]
    simulation = Simulation(config(fleet=ONE_WORKER), 1, requests)
    outcome = simulation.run()
    first, second = simulation.records
    assert (first.first_token_s, first.latency_s) == pytest.approx((1.5, 3.7))
    assert first.token_s == pytest.approx(1.1)
    assert second.first_token_s == pytest.approx(2.1)
    assert (second.num_cached, second.num_generated) == (4, 1)
    assert second.token_s is None
    assert outcome.metrics["hit_ratio"] == pytest.approx(0.4)
    assert outcome.metrics["output_tokens_per_s"] == pytest.approx(4 / 5.9)
    assert outcome.metrics["busy_ratio"] == pytest.approx(1.0), "not the step that was sent ahead of the last end"
    assert outcome.pools[0]["busy_ratio"] == pytest.approx(1.0)


def test_an_answer_of_known_length_needs_no_step_too_many() -> None:
    requests = [text((1, 0, 8), num_prompt=5), text((1, 0, 5), (2, 0, 1), num_prompt=5, at_s=3.8)]
    known = config({"sessions": "chat", "requests": 2, "lengths": "known"}, fleet=ONE_WORKER)
    simulation = Simulation(known, 1, requests)
    outcome = simulation.run()
    assert simulation.records[1].first_token_s == pytest.approx(1.1)
    assert outcome.metrics["computed_tokens"] == 5 + 1 + 1 + 1


@pytest.mark.parametrize(("pause_s", "factor"), [(0.05, 1), (0.2, 3)])
def test_a_step_after_a_pause_takes_longer_if_the_fleet_says_so(pause_s: float, factor: int) -> None:
    alone_s = 1.0 + 0.1 * 5
    starts = 1.0, 1.0 + 3 * alone_s + pause_s
    requests = [text((number, 0, 6), num_prompt=5, at_s=at_s) for number, at_s in enumerate(starts)]
    load = {"sessions": "chat", "requests": 2, "lengths": "known"}
    simulation = Simulation(config(load, fleet=ONE_WORKER | {"step": STEP | {"idle_ratio": 3}}), 1, requests)
    simulation.run()
    first, second = simulation.records
    assert first.first_token_s == pytest.approx(3 * alone_s)
    assert second.first_token_s == pytest.approx(factor * alone_s)


def test_a_next_turn_is_sent_when_the_one_before_has_ended() -> None:
    requests = [text((1, 0, 8), num_prompt=5), text((1, 0, 12), num_prompt=10, at_s=2.0, after=0)]
    simulation = Simulation(config(fleet=ONE_WORKER), 1, requests)
    simulation.run()
    first, second = simulation.records
    assert second.arrived_at_s == pytest.approx(3.7 + 2.0)
    assert second.num_cached == 8, "the first answer is found, its end token included: a step ran with it"
    assert first.num_generated == 3


@pytest.mark.parametrize("lengths", ["known", "unknown"])
@pytest.mark.parametrize("eviction", ["lineage", "lru"])
def test_every_request_ends_once_with_its_tokens_in_a_pool_too_small_for_all(lengths: str, eviction: str) -> None:
    small = config(
        {
            "sessions": {"kind": "chat", "rate": 50.0, "most_tokens": 1024, "think_s": 1.0},
            "requests": 80,
            "lengths": lengths,
        },
        fleet={"workers": 2, "blocks": 80, "eviction": eviction, "step": STEP | {"base_s": 0.01, "token_s": 1e-4}},
    )
    simulation = Simulation(small, 3)
    outcome = simulation.run()
    assert outcome.metrics["preemptions"] > 0
    assert outcome.metrics["evicted_blocks"] > 0
    assert outcome.metrics["refused"] == 0
    for record in simulation.records:
        assert record.num_generated == record.num_output
        assert 0 <= record.num_cached < record.num_prompt
        assert record.first_token_s > 0
        assert record.latency_s >= record.first_token_s
    books = [pool.pool_statistics() for pool in simulation.pools]
    assert sum(record.num_cached for record in simulation.records) == sum(each.cached_token_count for each in books)
    assert all(each.sequence_count == 0 and each.block_counts.active_count == 0 for each in books)


def test_a_sequence_that_gives_way_in_the_plan_it_runs_in_gets_a_token_that_is_dropped() -> None:
    """Two tenants, and a pool so small that newcomers take blocks from the larger tenant at once."""
    load = {
        "sessions": {"kind": "chat", "rate": 40.0, "think_s": 1.0, "most_tokens": 2048},
        "requests": 120,
        "tenants": {"a": 3, "b": 1},
    }
    simulation = Simulation(config(load, fleet={"workers": 2, "blocks": 250, "step": "h100-8b"}), 1)
    outcome = simulation.run()
    assert outcome.metrics["preemptions"] > 0
    assert all(record.num_generated == record.num_output for record in simulation.records)


def test_the_same_seed_gives_the_same_results_and_another_one_others() -> None:
    given = config(policy={"router": "power-of-two"})
    first, again, other = (json.dumps(run(given, seed).describe()) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_run_in_another_process_has_the_same_results() -> None:
    given = config({"sessions": "rag", "requests": 40})
    assert compare([given], (1, 2)).describe() == compare([given], (1, 2), jobs=2).describe()


def test_the_gateways_router_finds_more_than_taking_turns() -> None:
    found = {router: run(config(policy={"router": router})).metrics["hit_ratio"] for router in ROUTERS}
    assert found["cost"] > found["round-robin"]
    assert found["prefix"] > found["round-robin"]
    assert found["consistent-hash"] > found["round-robin"]


def test_a_request_that_can_never_fit_is_refused_and_counted() -> None:
    requests = [text((1, 0, 500), num_prompt=450), text((2, 0, 8), num_prompt=5, at_s=1.0, after=0)]
    simulation = Simulation(config(fleet=ONE_WORKER), 1, requests)
    outcome = simulation.run()
    assert (outcome.metrics["requests"], outcome.metrics["refused"]) == (2, 1)
    assert simulation.records[1].num_generated == 3


def test_tenants_have_their_parts_and_may_have_their_own_prefixes() -> None:
    load = {"sessions": "rag", "requests": 100, "tenants": {"a": 3, "b": 1}}
    shared = run(config(load, fleet={"workers": 1, "blocks": 1000}))
    assert 50 < shared.tenants["a"]["requests"] < 95
    apart = run(config(load, fleet={"workers": 1, "blocks": 1000, "separate_tenants": True}))
    assert apart.metrics["hit_ratio"] < shared.metrics["hit_ratio"]


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"fleet": {"workers": 0}}, "fleet.workers is 0: must be 1 to 1000"),
        ({"fleet": {"workers": "two"}}, "fleet.workers is 'two': must be a whole number"),
        ({"fleet": {"wokers": 2}}, "fleet.wokers is unknown: must be one of step, blocks, workers"),
        ({"fleet": {"step": "h1000"}}, "fleet.step is 'h1000': must be one of h100-8b, h200-8b, h200-70b"),
        ({"fleet": {"step": {"form": "additive"}}}, "fleet.step.base_s is missing"),
        ({"fleet": {"step": STEP | {"token_s": -1}}}, "fleet.step.token_s is -1: must be seconds"),
        (
            {"fleet": {"step": STEP | {"token_s": "1"}}},
            "fleet.step.token_s is '1': must be seconds of each, 0 to 1e6; or",
        ),
        *(
            ({"fleet": {"step": STEP | {"sequence_s": curve}}}, f"fleet.step.sequence_s is {curve}: must be seconds of")
            for curve in (
                *([], [[1, 2]], [[1, 2], [1, 3]], [[2, 1], [1, 2]], [[2, 1], [3, 1]], [1, 2], [[1, 2, 3], [2, 3]]),
                *([[1, True], [2, 1]], [[1, -1], [2, 1]], [[1, 1], [2, 1e6]], [[1, 1], [1e9, 1]], [[1, 1], ["2", 1]]),
                *([[-1, 1], [2, 1]], [[float("nan"), 1], [2, 1]], [[1, float("nan")], [2, 1]]),
            )
        ),
        (
            {"fleet": {"step": STEP | {"base_s": [[0, 1], [1, 2]]}}},
            "fleet.step.base_s is [[0, 1], [1, 2]]: must be a num",
        ),
        *(
            ({"fleet": {"step": STEP | {"idle_ratio": ratio}}}, f"fleet.step.idle_ratio is {ratio}: must be 1 to 100")
            for ratio in (0.5, 101, float("nan"))
        ),
        ({"fleet": {"step": STEP}}, "fleet.blocks is 0: must be 1 to"),
        ({"load": {}}, "load has neither or both of trace and sessions"),
        (
            {"load": {"sessions": "chats", "requests": 1}},
            "load.sessions.kind is 'chats': must be one of chat, agents, rag",
        ),
        ({"load": {"sessions": {"kind": "rag", "rate": 0}, "requests": 1}}, "load.sessions.rate is 0: must be"),
        ({"load": {"sessions": "chat"}}, "load.requests is 0: must be 1 or more"),
        ({"load": {"sessions": "chat", "requests": 9, "lengths": "long"}}, "load.lengths is 'long'"),
        ({"load": {"sessions": "chat", "requests": 9, "tenants": {"a": 0}}}, "load.tenants.a is 0"),
        ({"limits": {"token_s": 0}}, "limits.token_s is 0: must be"),
        ({"limit": {}}, "limit is unknown: must be one of"),
        ({"policy": {"router": 3}}, "policy.router is 3: must be a text"),
    ],
)
def test_a_wrong_configuration_names_field_value_and_limit(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        config(**tables)


def test_a_file_that_is_no_configuration_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    with pytest.raises(ConfigError, match=r"lab.toml can't be read: No such file"):
        read_config(path)
    path.write_text("[load\n")
    with pytest.raises(ConfigError, match=r"lab.toml is no TOML"):
        read_config(path)
    path.write_text('[load]\ntrace = "missing.jsonl"\n')
    with pytest.raises(ConfigError, match=r"load.trace is '.*missing.jsonl': No such file"):
        run(read_config(path))


GOOD_ROUTER = """
class First:
    def place(self, request, pools):
        return pools[0]
"""
SCHEDULER = """
from quire.client import PriorityPolicy

class Mine(PriorityPolicy):
    def rank(self, sequence, view):
        return (sequence.num_prompt_tokens, *super().rank(sequence, view))
"""


WRONG_POLICIES = {
    "router, no file": (None, r"policy.router is '.*mine.py': must be a file that is there"),
    "router, no Python": ("class First\n", r"mine.py:1: expected ':': expected Python"),
    "router, a failing import": ("import nothing_at_all\n", r"mine.py:1: the file can't be run: .*nothing_at_all"),
    "router, no class": ("class Second: pass\n", r"mine.py: has no class First: policy.router must name one of Second"),
    "router, no method": (
        "\nclass First: pass\n",
        r"mine.py:2: class First has no method place: expected def place\(self, request, pools\)",
    ),
    "router, other parameters": (
        "class First:\n    def place(self): pass\n",
        r"mine.py:2: First.place has other parameters .* expected def place",
    ),
    "router, a mistake": (
        "class First:\n    def place(self, request, pools):\n        return pools[7]\n",
        r"mine.py:3: the policy failed: IndexError",
    ),
    "router, no pool": (
        "class First:\n    def place(self, request, pools):\n        return 0\n",
        r"mine.py:2: place returned 0: must return one of the pools",
    ),
    "scheduler, no method": (
        "class First: pass\n",
        r"mine.py:1: class First has no method rank: expected def rank\(self, sequence, view\)",
    ),
    "scheduler, a mistake": (
        "from quire.client import PriorityPolicy\n"
        "class First(PriorityPolicy):\n"
        "    def rank(self, sequence, view):\n"
        "        return 1 / 0\n",
        r"mine.py:4: the policy failed: ZeroDivisionError",
    ),
}


@pytest.mark.parametrize("case", WRONG_POLICIES)
def test_a_policy_with_an_error_says_file_line_and_what_was_expected(case: str, tmp_path: Path) -> None:
    source, said = WRONG_POLICIES[case]
    field = case.partition(",")[0]
    if source is not None:
        (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ConfigError, match=said):
        run(config(policy={field: "mine.py:First"}, folder=tmp_path))


def test_policies_from_files_are_used(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD_ROUTER + SCHEDULER)
    outcome = run(config(policy={"router": "mine.py:First", "scheduler": "mine.py:Mine"}, folder=tmp_path))
    assert [pool["requests"] for pool in outcome.pools] == [60, 0, 0]
    assert outcome.metrics != run(config(policy={"router": "mine.py:First"}, folder=tmp_path)).metrics


def test_a_policy_file_imports_from_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "base_of_mine.py").write_text(GOOD_ROUTER)
    (tmp_path / "mine.py").write_text("from base_of_mine import First\n\nclass Mine(First):\n    pass\n")
    before = list(sys.path)
    outcome = run(config(policy={"router": "mine.py:Mine"}, folder=tmp_path))
    assert [pool["requests"] for pool in outcome.pools] == [60, 0, 0]
    assert sys.path == before


def test_a_choice_that_is_neither_name_nor_file_lists_the_names() -> None:
    with pytest.raises(
        ConfigError, match=r"policy.router is .best.: must be .FILE.py:CLASS., or one of cost, round-robin"
    ):
        run(config(policy={"router": "best"}))


# Traces.


def test_the_recorded_traces_are_read_as_they_are() -> None:
    expected = json.loads((TRACES / "expected.json").read_text())["files"]
    for name, file in expected.items():
        requests = read_trace(TRACES / name)
        assert len(requests) == file["requests"]
        assert sum(request.num_prompt for request in requests) == file["input_tokens"]
        assert all(request.content.num_tokens == request.num_prompt + request.num_output for request in requests)
    azure = read_trace(TRACES / "azure2023_conv.csv.gz")
    assert (len(azure), azure[0].num_prompt, azure[0].num_output) == (19_366, 374, 44)


def test_equal_block_ids_are_equal_tokens_and_others_are_not(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [(0, 1300, [5, 6, 7]), (1000, 1300, [5, 6, 8])]
    path.write_text(
        "".join(
            json.dumps({"timestamp": t, "input_length": n, "output_length": 4, "hash_ids": ids}) + "\n"
            for t, n, ids in rows
        )
    )
    first, second = (request.content.tokens()[:1300] for request in read_trace(path))
    assert (first[:1024] == second[:1024]).all()
    assert not (first[1024:] == second[1024:]).any()
    assert (first > UNUSED_TOKEN).all()


def test_an_answer_is_found_in_the_sessions_next_prompt(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    rows = [(0, 40, 30, [[0, 2]]), (5000, 100, 8, [[0, 6]])]
    with gzip.open(path, "wt") as file:
        for at, num_prompt, num_output, runs in rows:
            row = {
                "timestamp": at,
                "input_length": num_prompt,
                "output_length": num_output,
                "session": 0,
                "block_runs": runs,
            }
            file.write(json.dumps(row) + "\n")
    first, second = (request.content.tokens() for request in read_trace(path))
    assert (first == second[:70]).all()


def test_azures_own_table_and_sharegpt_are_read(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_trace(azure)
    assert (first.at_s, second.num_prompt) == (0.0, 396)
    assert second.at_s == pytest.approx(4.314579)
    talk = tmp_path / "talk.json"
    said = [("human", "a" * 40), ("gpt", "b" * 20), ("human", "c" * 8), ("gpt", "d" * 12), ("human", "never answered")]
    talk.write_text(json.dumps([{"id": "x", "conversations": [{"from": who, "value": what} for who, what in said]}]))
    asked, again = read_trace(talk)
    assert (asked.num_prompt, asked.num_output, again.num_prompt, again.num_output) == (10, 5, 17, 3)
    assert again.after == 0
    assert (asked.content.tokens() == again.content.tokens()[:15]).all()
    with pytest.raises(ConfigError, match=r"load.rate is 0.0: must be above 0, for a trace without times"):
        make_requests(config({"trace": str(talk)}).load, 1)
    timed = make_requests(config({"trace": str(talk), "rate": 2.0, "think_s": 3.0}).load, 1)
    assert (timed[0].at_s > 0, timed[1].at_s) == (True, 3.0)


@pytest.mark.parametrize("columns", ["", "Session ID,Elapsed time,"])
def test_burstgpt_is_read_without_the_requests_that_failed(columns: str, tmp_path: Path) -> None:
    """Both forms that are published: times in seconds, and of the later one two more columns."""
    path = tmp_path / "burst.csv"
    more = "7,1.5," if columns else ""
    rows = ["5,{}ChatGPT,472,18,490,Conversation log", "45,{}ChatGPT,1087,0,1087,Conversation log",
            "118,{}GPT-4,417,276,693,API log", "120,{}GPT-4,0,0,0,API log"]  # fmt: skip
    header = f"Timestamp,{columns}Model,Request tokens,Response tokens,Total tokens,Log Type"
    path.write_text("\n".join([header, *(row.format(more) for row in rows)]) + "\n")
    first, second = read_trace(path)
    assert (first.at_s, first.num_prompt, first.num_output) == (0.0, 472, 18)
    assert (second.at_s, second.num_prompt, second.num_output) == (113.0, 417, 276)
    assert first.session != second.session


def test_the_generators_of_other_benchmarks_can_be_asked_for() -> None:
    """SGLang's generated-shared-prefix: groups, a system prompt, a question and an answer of fixed lengths."""
    sessions = {
        "kind": "chat", "turns": 1, "spread": 0, "system_prompts": 4, "system_tokens": 128, "first_tokens": 32,
        "output_tokens": 16,
    }  # fmt: skip
    requests = make_requests(config({"sessions": sessions, "requests": 50}).load, 1)
    assert {(each.num_prompt, each.num_output) for each in requests} == {(160, 16)}
    prompts = [each.content.tokens()[:160] for each in requests]
    assert len({prompt[:128].tobytes() for prompt in prompts}) == 4
    assert len({prompt[128:].tobytes() for prompt in prompts}) == 50


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("hello\n", "begins like none of the known forms"),
        ('{"timestamp": 0}\n', "KeyError"),
        (
            '{"timestamp": 0, "input_length": 2000, "output_length": 1, "hash_ids": [1]}\n',
            "2000 tokens in 1 blocks of 512",
        ),
    ],
)
def test_a_trace_that_can_not_be_read_is_named(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"trace.jsonl: a record can't be read: .*{said}"):
        read_trace(path)


def test_arrivals_are_the_traces_or_faster_or_at_random() -> None:
    load = {"trace": str(TRACES / "sharegpt128_B16.jsonl.gz"), "requests": 50}
    own, faster, random = (
        [request.at_s for request in make_requests(config(load | more).load, 1)]
        for more in ({}, {"speed": 2.0}, {"rate": 5.0})
    )
    assert faster == pytest.approx([at_s / 2 for at_s in own])
    assert random == sorted(random)
    assert 4 < random[-1] < 25


# Times of steps.


def test_a_step_takes_what_its_form_says() -> None:
    additive = StepTime("additive", base_s=1, token_s=0.1, context_s=0.01, pair_s=0.001, sequence_s=10)
    assert additive.seconds([3, 0], [1, 4]) == pytest.approx(1 + 0.1 * 5 + 0.01 * 8 + 0.001 * (3 + 0.5 + 8) + 20)
    roofline = replace(additive, form="roofline", sequence_s=0, pair_s=0, overhead_s=2)
    assert roofline.seconds([0], [4]) == pytest.approx(2 + 1 + 0.04)
    assert roofline.seconds([0], [40]) == pytest.approx(2 + 4 + 0.4)


def test_presets_are_near_what_their_devices_can_do() -> None:
    """A decode step of 8B reads 15 GB at 75 % of 3.35 TB/s: 6 ms."""
    assert PRESETS["h100-8b"].time.seconds([1000], [1]) == pytest.approx(6.5e-3, rel=0.03)
    assert 300_000 < PRESETS["h100-8b"].pool_tokens < 500_000
    assert PRESETS["h200-70b"].time.base_s == pytest.approx(69.5e9 / 3.6e12, rel=0.01)


def test_tokens_and_sequences_may_each_have_a_curve() -> None:
    flat = {"base_s": 1, "token_s": 0}
    step = {
        "form": "additive",
        "base_s": 1,
        "token_s": [[1, 2], [3, 6], [5, 6.5]],
        "sequence_s": [[1, 0], [2, 9], [4, 1]],
    }
    made = config(fleet={"step": step, "blocks": 10}).fleet.step
    by_tokens, by_sequences = replace(made, sequence_s=0.0), replace(made, **flat)
    times = [by_tokens.seconds([0], [count]) for count in (1, 2, 3, 4, 5, 9)]
    assert times == pytest.approx([3, 5, 7, 7.25, 7.5, 8.5])
    times = [by_sequences.seconds([0] * count, [1] * count) for count in (1, 2, 3, 4, 5)]
    assert times == pytest.approx([1, 10, 6, 2, 1]), "never below 0"
    assert made.seconds([0, 0], [2, 1]) == pytest.approx(7 + 9)
    roofline = replace(by_tokens, form="roofline", base_s=4)
    assert [roofline.seconds([0], [count]) for count in (1, 3)] == pytest.approx([4, 6])


CELLS = [
    *(("decode", n, 1, cached) for n in (1, 2, 3, 16) for cached in (128, 1024)),
    *(("prompt", 1, 32, 0), ("prompt", 1, 128, 0), ("prompt", 1, 1024, 0), ("prompt", 1, 256, 1024)),
    ("prompt", 2, 64, 0),
]


def write_steps(path: Path, made: StepTime, cells: list[tuple[str, int, int, int]]) -> Path:
    """The result of a benchmark on a machine on which steps take exactly these times."""
    steps = []
    for kind, n, new, cached in cells:
        on = f" on {cached}" if cached else ""
        name = f"decode {n} x {cached}" if kind == "decode" else f"prompt {n} x {new}{on}"
        seconds = made.seconds([cached] * n, [new] * n)
        steps.append({"model": "m", "dtype": "d", "cell": name, "median_ms": 1e3 * seconds})
    path.write_text(json.dumps({"steps": steps}))
    return path


def test_a_step_is_described_as_a_configuration_has_it() -> None:
    made = StepTime("additive", 0.0, ((1, 0.02), (128, 0.07)), context_s=3e-6, sequence_s=1e-3)
    assert config(fleet={"step": tomllib.loads("\n".join(made.describe())), "blocks": 10}).fleet.step == made


def test_a_calibration_finds_the_times_that_made_the_steps(tmp_path: Path) -> None:
    by_tokens = ((1, 0.01), (32, 0.015), (128, 0.03), (1024, 0.3))
    by_sequences = ((1, 0.0), (2, 0.01), (3, 0.02), (16, 0.012))
    made = StepTime("additive", 0.0, by_tokens, context_s=3e-6, pair_s=1e-7, sequence_s=by_sequences)
    path = write_steps(tmp_path / "step.json", made, CELLS)
    found, worst = calibrate(path)
    assert worst < 1e-6
    for runs in ([1], [1, 1, 1], [64, 1], [700]):
        starts = [50] * len(runs)
        assert found.seconds(starts, runs) == pytest.approx(made.seconds(starts, runs), rel=1e-4)
    assert config(fleet={"step": str(path), "blocks": 10}).fleet.step == found


def test_a_calibration_takes_decodes_of_mixed_lengths_where_it_has_them(tmp_path: Path) -> None:
    """A load's sequences are at different points, where a step can take longer."""
    made = StepTime("additive", 0.0, ((1, 0.01), (128, 0.03), (1024, 0.3)), context_s=3e-6, sequence_s=1e-3)
    path = write_steps(tmp_path / "step.json", made, CELLS)
    result = json.loads(path.read_text())
    slower = [
        step | {"cell": f"{step['cell']} mixed", "median_ms": step["median_ms"] + 5}
        for step in result["steps"]
        if step["cell"].startswith(("decode 3 ", "decode 16 "))
    ]
    path.write_text(json.dumps({"steps": result["steps"] + slower}))
    found, worst = calibrate(path)
    assert worst < 1e-6
    for count, more in ((1, 0.0), (2, 0.0), (3, 5e-3), (16, 5e-3)):
        starts, runs = [200] * count, [1] * count
        assert found.seconds(starts, runs) == pytest.approx(made.seconds(starts, runs) + more, rel=1e-4)


def test_the_curve_of_tokens_does_not_fall(tmp_path: Path) -> None:
    by_tokens = ((1, 0.03), (32, 0.02), (128, 0.03), (1024, 0.3))
    made = StepTime("additive", 0.0, by_tokens, sequence_s=((1, 0.0), (16, 0.01)))
    found, worst = calibrate(write_steps(tmp_path / "step.json", made, CELLS))
    assert isinstance(found.token_s, tuple)
    assert [seconds for _, seconds in found.token_s] == sorted(seconds for _, seconds in found.token_s)
    assert worst > 0.05


@pytest.mark.parametrize("left", [CELLS[:8], CELLS[:8:3], [cell for cell in CELLS if cell[1] == 1]])
def test_a_calibration_needs_enough_steps(left: list[tuple[str, int, int, int]], tmp_path: Path) -> None:
    path = write_steps(tmp_path / "step.json", StepTime("additive", 0.01, 1e-4), left)
    with pytest.raises(
        ConfigError, match=rf"has {len(left)} steps of m in d: a fit needs \d+, with a whole prompt and "
    ):
        calibrate(path)


def test_a_recorded_result_of_the_benchmark_can_be_used() -> None:
    found, worst = calibrate(ROOT / "benchmarks" / "results" / "step_cpu.json")
    assert found.seconds([128] * 16, [1] * 16) > found.seconds([128], [1]) > 0
    assert 0 < worst < 1
    with pytest.raises(ConfigError, match="has 0 steps of GPT in float32"):
        calibrate(ROOT / "benchmarks" / "results" / "step_cpu.json", model="GPT")


def test_the_presets_assumptions_are_near_what_an_h200_took() -> None:
    measured = read_steps(ROOT / "benchmarks" / "results" / "step_llama_8b.json")
    assert len(measured) == 13
    time = PRESETS["h200-8b"].time
    errors = [
        abs(time.seconds([each.cached] * each.num_sequences, [each.new] * each.num_sequences) / each.seconds - 1)
        for each in measured
    ]
    assert max(errors) < 0.17
    assert median(errors) < 0.1


# Results.


def test_an_interval_is_students() -> None:
    estimate = Estimate.of([1.0, 2.0, 3.0])
    assert estimate.mean == 2.0
    assert estimate.margin == pytest.approx(4.303 / 3**0.5)
    assert not estimate.is_clear
    assert Estimate.of([1.0, 1.1, 0.9]).is_clear
    assert Estimate.of([5.0]).margin is None


def test_jain_is_one_for_equals_and_a_part_for_one_that_has_all() -> None:
    assert jain([2, 2, 2]) == pytest.approx(1)
    assert jain([6, 0, 0]) == pytest.approx(1 / 3)
    assert jain([]) == 1


def test_a_report_has_everything_in_one_file(tmp_path: Path) -> None:
    load = {"sessions": "rag", "requests": 20, "tenants": {"<a>": 1, "b": 1}}
    one, two = config(load), replace(config(load, policy={"router": "round-robin"}), name="turns & more")
    comparison = compare([one, two], (1, 2))
    page, data = write_report(comparison, tmp_path / "out")
    text = page.read_text()
    assert text.count("<svg") == 4
    assert not re.search(r"""(src|href)=["'](?!#)""", text), "nothing is loaded from elsewhere"
    assert "&lt;a&gt;" in text
    assert "turns &amp; more" in text
    assert "<a>" not in text
    described = json.loads(data.read_text())
    assert [each["name"] for each in described["configurations"]] == ["test", "turns & more"]
    assert described["seeds"] == [1, 2]
    again, _ = write_report(comparison, tmp_path / "again")
    assert again.read_text() == text


def test_the_command_runs_and_an_error_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text('[load]\nsessions = "chat"\nrequests = 10\n[fleet]\nworkers = 2\nblocks = 200\n')
    command = [
        sys.executable,
        "-m",
        "quire.lab",
        "run",
        str(path),
        "--output",
        str(tmp_path / "out"),
        "--seeds",
        "2",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "prompt tokens found in the cache" in ran.stdout
    assert (tmp_path / "out" / "report.html").is_file()
    path.write_text("[load]\nsession = 1\n")
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert failed.stderr.startswith(f"Error: {path}: load.session is unknown: must be one of trace, sessions")
    assert len(failed.stderr.splitlines()) == 1
