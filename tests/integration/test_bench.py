"""Every benchmark runs to its end, tiny, as `quire bench NAME --quick`, and finds known values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conformance.foreign import find

from quire.cli.bench import PARTS

TIMEOUT_S = 240
FILES = {
    "allocator": ("allocator_rows", "allocator"),
    "kernels": ("kernel", "kernel"),
    "prefix windows": ("eviction_windows", ""),
    "step": ("step_cpu", "step_cpu"),
}
"""JSON and plot where they are not called as the benchmark or its part."""
WITHOUT_PLOT = {
    *("step draws", "step grammars", "step prompts", "step slow-grammar", "prefix windows", "prefix queued-prompts"),
    *(
        "control-plane worker",
        "control-plane profiles",
        "control-plane kept-memory",
        "start",
        "serve-gpu",
        "pipeline",
        "drafts",
        "lora",
    ),
}
ELSEWHERE = {
    "control-plane kv-events": "tests/unit/integrations/test_kv_events.py",
    "kernels gpu": "tests/kernels/test_benchmark.py",
    "kernels products": "tests/kernels/test_benchmark.py",
    "step peers": "tests/unit/benchmarks/test_peers.py",
    "kernels rates": "tests/gpu_desk/test_ten_minutes.py",
    "kernels chains": "tests/gpu_desk/test_ten_minutes.py",
}
"""Tests of parts that do not run here."""


def run_quick(name: str, folder: Path, *flags: str) -> tuple[dict[str, Any], str]:
    """The files and the output of a benchmark; `name` may have a part behind a space."""
    command = [
        sys.executable,
        "-m",
        "quire.cli",
        "bench",
        *name.split(),
        *flags,
        "--quick",
        "--output",
        str(folder),
    ]
    environment = {key: value for key, value in os.environ.items() if key != "QUIRE_VERIFY"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert done.returncode == 0, done.stderr
    figures, plot = FILES.get(name, (name.split()[-1].replace("-", "_"),) * 2)
    assert name in WITHOUT_PLOT or "<svg" in (folder / f"{plot}.svg").read_text()
    written: dict[str, Any] = json.loads((folder / f"{figures}.json").read_text())
    assert {"processor", "cores", "python"} <= written["machine"].keys()
    assert written["command"].startswith(f"quire bench {name}")
    return written, done.stdout


def test_sharing_reads_the_known_counts_from_the_live_services(tmp_path: Path) -> None:
    written, _ = run_quick("utilization sharing", tmp_path)
    samples, requests = written["shared"]
    assert (samples["num_blocks"], samples["num_unshared"]) == (13, 130)
    assert samples["saved_bytes"] == 936 * 2**20
    assert (requests["num_blocks"], requests["num_unshared"]) == (22, 130)  # 12 shared, and a last one each
    assert written["divergence"] == {"num_copied": 1, "num_untouched": 9, "num_blocks": 14}
    assert written["blocks_by_length"] == [20, 3, 10, 6, 17]
    assert written["blocks_back_at_once"] == 3


def test_utilization_is_that_of_contiguous_buffers_and_of_blocks(tmp_path: Path) -> None:
    written, _ = run_quick("utilization", tmp_path)
    assert [batch["batch_size"] for batch in written["batches"]] == [10, 25, 50, 100, 200]
    last = written["batches"][-1]
    assert all(0.2 < ratio < 0.3 for ratio in last["contiguous"])
    assert all(ratio > 0.96 for ratio in last["paged"]["16"])
    assert written["azure"]["paged"]["16"] > 0.99 > written["azure"]["paged"]["128"]
    normal, *azure = written["fits"]
    assert all(3.5 < count / written["contiguous_buffers"] < 5 for count in normal["paged"]["16"])
    assert [fit["limit"] for fit in azure] == [2048, 4096, 16384]
    models = written["windows"]["models"]
    assert [len(model["layers_per_group"]) for model in models] == [7, 13, 2, 4, 1, 4]
    for model in models:
        long = model["held"][-1]
        assert long["least"] <= long["with_groups"] <= 1.05 * long["least"]
        assert 1 <= long["worst_ratio"] <= 1.05
        assert long["with_groups"] <= long["one_table"]
    fit = written["windows"]["fit"]
    assert fit["with_groups"] >= 3 * fit["one_table"]


def test_kernel_finds_both_attentions_equal(tmp_path: Path) -> None:
    written, _ = run_quick("kernels", tmp_path)
    assert max(written["equality"]["worst"].values()) < 4e-15
    assert len(written["cells"]) == 4
    for cell in written["cells"]:
        assert cell["difference"] < (1e-5 if cell["dtype"] == "float32" else 0.05)
        assert min(cell["paged_us"] + cell["gather_us"]) > 0


def test_pressure_compares_the_four_ways(tmp_path: Path) -> None:
    written, printed = run_quick("pressure", tmp_path)
    roomy, preempting, keeping, reserving = written["results"]
    assert roomy["num_preemptions"] == reserving["num_preemptions"] == 0
    assert keeping["num_offloads"] == keeping["num_preemptions"] > 0 == preempting["num_offloads"]
    assert 0 == keeping["num_wasted"] < preempting["num_wasted"]
    assert preempting["num_preemptions"] > 0
    assert preempting["num_computed"] - preempting["num_wasted"] == roomy["num_computed"] == reserving["num_computed"]
    assert "tokens restored from there" in printed


def test_tiers_finds_more_with_a_host_tier(tmp_path: Path) -> None:
    written, printed = run_quick("tiers", tmp_path)
    assert [row["window"] for row in written["served"][::4]] == [0, 64]
    for first in range(0, len(written["served"]), 4):
        alone, small, large, disk = written["served"][first : first + 4]
        assert (alone["host_blocks"], alone["host_hit_ratio"], alone["copied_blocks"]) == (0, 0, 0)
        assert 0 < small["host_hit_ratio"] <= large["host_hit_ratio"]
        assert large["computed_tokens"] < small["computed_tokens"] < alone["computed_tokens"]
        assert (disk["host_blocks"], small["disk_hit_ratio"]) == (small["host_blocks"], 0)
        assert disk["disk_blocks"] > 0
    assert written["steps"]["num_read"] == written["sizes"]["prompt_blocks"]
    assert min(written["steps"]["from_disk_s"] + written["steps"]["beside_reads_s"]) > 0
    assert written["steps"]["num_copied"] == written["sizes"]["prompt_blocks"]
    assert {len(steps) for steps in written["steps"]["steps_s"].values()} == {1}
    assert "copied from the host tier" in printed
    assert "beside reads from the disk" in printed


def test_prefix_skips_the_prefill_of_what_is_cached(tmp_path: Path) -> None:
    written, _ = run_quick("prefix", tmp_path)
    assert written["end_to_end"]["cached_tokens"] == [64, 64]
    assert len(written["end_to_end"]["cold_s"]) == 1
    for row in written["traces"]:
        assert 0 < row["default"] <= row["infinite"] < 1
        assert row["belady"] is None or row["lru"] <= row["belady"] <= row["infinite"]


def test_prefix_windows_counts_by_layer_group(tmp_path: Path) -> None:
    written, _ = run_quick("prefix windows", tmp_path)
    assert [each["policy"] for each in written["figures"]] == ["lru", written["default"]]
    for each in written["figures"]:
        assert each["one_table"]["num_hits"] > 0
        assert len(each["with_groups"]["num_found"]) == 2
        assert each["with_groups"]["most_stranded"] <= 1


@pytest.mark.night
def test_queued_prompts_has_each_load_with_and_without_them(tmp_path: Path) -> None:
    written, _ = run_quick("prefix queued-prompts", tmp_path)
    assert len(written["figures"]) == 12
    assert all(0 <= each[way]["hit_ratio"] <= 1 for each in written["figures"] for way in ("without", "with"))


@pytest.mark.night
def test_routing_compares_three_ways_on_both_loads(tmp_path: Path) -> None:
    written, _ = run_quick("routing", tmp_path)
    for load in ("conversations", "one long prefix"):
        ways = written[load]
        assert list(ways) == ["by cost", "by prefix", "in turn"]
        assert all(0 < way["first_token_s"]["p50"] <= way["first_token_s"]["p95"] for way in ways.values())
        assert len({sum(way["requests"].values()) for way in ways.values()}) == 1
    assert written["conversations"]["by cost"]["hits"] >= written["conversations"]["in turn"]["hits"]


def test_prompt_cache_counts_with_and_without_breakpoints_and_breaks_no_floor(tmp_path: Path) -> None:
    written, printed = run_quick("prompt-cache", tmp_path)
    ways = ["LRU", "no breakpoints", "system", "system and turns"]
    assert [row["way"] for row in written["loads"]] == 2 * 3 * ways
    assert all(0 < row["num_computed"] < row["num_tokens"] and row["first_token_s"] > 0 for row in written["loads"])
    floors = [row for row in written["shared"] if row["floor"]]
    assert [row["keeper"] for row in floors] == ["agents", "prompts that come once"]
    assert all((row["broken"], row["num_looks"] > 0) == (0, True) for row in floors)
    assert all(row["num_kept"] <= row["keep_limit"] for row in written["shared"])
    sizes = [(cost["num_tokens"], cost["is_found"]) for cost in written["costs"]]
    assert sizes == [(tokens, found) for found in (True, False) for tokens in (512, 2048, 8192)]
    assert all(min(cost["without_us"], cost["with_us"]) > 0 for cost in written["costs"])
    assert "to reach" in printed


def test_scale_drives_one_cachemgr_with_every_number_of_workers(tmp_path: Path) -> None:
    find("go", for_what="the load of many workers")
    written, printed = run_quick("scale", tmp_path)
    for by_count in written["found"].values():
        assert list(by_count) == ["1", "2"]
        for each in by_count.values():
            assert 0 < each["plan_us"]["median"] <= each["plan_us"]["p99"]
            assert each["plans_per_s"] > 0
    assert written["capacity"]["plans_per_s"] > 0
    assert "processor time" in printed


def test_serving_has_every_mode_with_both_attentions(tmp_path: Path) -> None:
    written, _ = run_quick("serving", tmp_path)
    rows = [(row["mode"], row["attention"]) for row in written["served"]]
    modes = ("one at a time", "offline batch", "online arrivals")
    assert rows == [(mode, attention) for mode in modes for attention in ("gathered and padded", "paged")]
    for row in written["served"]:
        assert row["num_new"] == 3 * row["num_requests"] == 3 * len(row["latencies_s"])
        # Every prompt token once, and every token generated but each request's last.
        assert sum(tokens for tokens, _, _ in row["forwards"]) >= row["num_new"] - row["num_requests"] + 16
    assert [step["num_seqs"] for step in written["decode_steps"]] == [4, 4]
    assert all(min(step["step_ms"]) > 0 for step in written["decode_steps"])


def test_lab_has_the_same_requests_in_the_real_processes_and_in_the_laboratory(tmp_path: Path) -> None:
    written, printed = run_quick("lab", tmp_path)
    assert len(written["requests"]) == 3
    assert written["requests_with_equal_hits"] == 3
    assert len(written["medians"]) == 3
    for way in written["medians"].values():
        assert way["first_token_s"] > 0
        assert way["tokens_per_s"] > 0
    assert [(step["num_seqs"], step["num_new"]) for step in written["steps"]] == [(2, 1), (1, 20)]
    assert all(step["taken_s"] > 0 and step["computed_s"] > 0 for step in written["steps"])
    assert "to reach: 15 %" in printed


def test_step_measures_every_step_and_workload_against_its_bound(tmp_path: Path) -> None:
    written, _ = run_quick("step", tmp_path)
    assert [step["cell"] for step in written["steps"]] == [
        "decode 2 x 20",
        "decode 2 x 20 mixed",
        "prompt 1 x 9",
        "prompt 1 x 5 on 8",
    ]
    for step in written["steps"]:
        assert len(step["step_ms"]) == len(step["lone_ms"]) == 2
        if step["cell"].startswith("decode"):
            assert step["gap_ms"] >= step["prepare_ms"]
        else:
            assert step["gap_ms"] is None
        assert step["mode"] == {
            "modules": "the model's own",
            "attention": "torch",
            **dict.fromkeys(("decode", "sampler", "prompts"), "without CUDA graphs: a CPU has none"),
        }
        assert 0 < step["of_bound"] < 1
        assert step["prepare_ms"] + step["forward_ms"] + step["sample_ms"] < 1.5 * step["median_ms"]
    rows = [(served["row"], served["num_generated"]) for served in written["workloads"]]
    assert [name for name, _ in rows] == ["Quire, in one process", "transformers, continuous batching"] * 2
    assert rows[0][1] == rows[1][1] == 6
    assert all(served["tokens_per_s"] < served["bound_tokens_per_s"] for served in written["workloads"])
    assert not written["left_out"] + written["errors"]


def test_single_steps_are_measured_and_written_at_once(tmp_path: Path) -> None:
    flags = ("--cells", "tiny 3x20, tiny prompt 7 on 8", "--seconds", "5", "--json", str(tmp_path / "cells.json"))
    written, _ = run_quick("step", tmp_path, *flags)
    assert [step["cell"] for step in written["steps"]] == ["decode 3 x 20", "prompt 1 x 7 on 8"]
    assert written["workloads"] == []
    assert json.loads((tmp_path / "cells.json").read_text())["steps"] == written["steps"]


def test_a_run_of_steps_without_time_says_what_it_left_out(tmp_path: Path) -> None:
    written, _ = run_quick("step", tmp_path, "--minutes", "1e-6", "--model", "tiny Llama")
    assert written["command"] == "quire bench step --quick --minutes 1e-6 --model 'tiny Llama'"
    assert written["steps"] == written["workloads"] == []
    assert len(written["left_out"]) == 5
    assert all(left.endswith(": time") for left in written["left_out"])


@pytest.mark.night
def test_both_services_are_measured_beside_one_process(tmp_path: Path) -> None:
    written, printed = run_quick("serve-gpu", tmp_path, "--json", str(tmp_path / "cells.json"))
    assert json.loads((tmp_path / "cells.json").read_text())["cells"] == written["cells"]
    assert written["left_out"] == written["errors"] == []
    assert [cell["num_streams"] for cell in written["cells"]] == [1, 4]
    for cell in written["cells"]:
        assert list(cell["ways"]) == list(cell["mode"]) == ["both services", "one process"]
        assert cell["ratio"] > 0
        for way in cell["ways"].values():
            assert min(way["tokens_per_s"]) > 0
            assert 0 < way["first_token_ms_p50"] <= way["first_token_ms_p99"]
            assert 0 <= way["between_tokens_ms_p50"] <= way["between_tokens_ms_p99"]
            assert way["step_gap"]["num"] >= 5  # a step for each token but the first
        assert all(mode["attention"] == "torch" for mode in cell["mode"].values())
    assert "to reach: 0.95" in printed


def test_draws_are_measured_beside_draws_by_inversion(tmp_path: Path) -> None:
    written, _ = run_quick("step draws", tmp_path)
    assert written["ms_by_rows"].keys() == {"1", "4"}
    for ways in written["ms_by_rows"].values():
        assert len(ways) == 5
        assert all(way["num_samples"] == 2 for way in ways.values())


def test_grammars_are_measured_beside_steps_without_them(tmp_path: Path) -> None:
    written, _ = run_quick("step grammars", tmp_path)
    assert (written["num_seqs"], written["num_bound"]) == (4, 2)
    assert all(written[kind]["num_samples"] == 3 for kind in ("without_ms", "with_grammars_ms"))


@pytest.mark.night
def test_steps_of_others_are_measured_beside_a_slow_grammar(tmp_path: Path) -> None:
    written, _ = run_quick("step slow-grammar", tmp_path)
    assert len(written["ways"]) == len(written["step_ratios"]) == 4
    assert all(way["step_ms"]["num_samples"] == 2 for way in written["ways"].values())


@pytest.mark.night
def test_peers_generate_the_same_tokens(tmp_path: Path) -> None:
    written, _ = run_quick("serving peers", tmp_path)
    rows = {(figure["workload"], figure["row"]): figure for figure in written["figures"]}
    names = {name for _, name in rows}
    assert {"transformers, static batch", "Quire, two services", "Quire, in one process"} <= names
    in_8_bits = {"Quire, in one process, int8", "Quire, in one process, int8 weights"}
    assert in_8_bits <= names
    for name in ("llama.cpp, 16 slots", "llama.cpp, 16 slots, Q8_0"):
        assert (name in names) != written["llama_cpp"].startswith("absent")
    in_8_bits.add("llama.cpp, 16 slots, Q8_0")
    plain = [figure for figure in rows.values() if figure["row"] not in in_8_bits]
    assert all(figure["equal_sequences"] == figure["num_sequences"] for figure in plain)
    for work in written["parts"]["workloads"]:
        assert min(work["seconds"].values()) > 0
        assert work["products_s"] > 0
        assert 0 < work["by_rates_s"] < sum(work["seconds"].values())


def test_allocator_measures_every_row_of_ours(tmp_path: Path) -> None:
    written, _ = run_quick("allocator", tmp_path)
    quantiles = written["quire"]["quantiles_ns"]["1000"]
    rows = {"fresh", "cached", "extend", "extend_and_publish", "release", "fork", "full", "empty_step"}
    assert quantiles.keys() >= rows
    assert all(each["num_samples"] and 0 < each["min"] <= each["median"] <= each["max"] for each in quantiles.values())
    assert 0 <= written["metadata_bytes_per_block"]["quire"] < 10_000  # of a tiny pool: whole pages
    mixed = json.loads((tmp_path / "allocator_mixed.json").read_text())
    assert mixed["kinds"]["all"]["calls"] > 0
    assert written["recorded_only"].keys() == {"vllm", "sglang", "transformers", "tokenspeed", "nano-vllm"}


@pytest.mark.night
def test_schedulers_step_ours_and_a_peer_in_one_run(tmp_path: Path) -> None:
    """The peer's environment is made once, by pip from the index that pip is configured with."""
    only = ("--only", "quire", "--only", "tokenspeed")
    written, printed = run_quick("allocator schedulers", tmp_path, "--peers", *only)
    assert written["unavailable"] == {}
    assert written["versions"].keys() == {"quire-kv", "tokenspeed-scheduler", "python"}
    loads = [(steps["scheduler"], steps["num_running"]) for steps in written["steps"]]
    assert loads == [("quire", 16), ("tokenspeed", 16), ("quire", 32), ("tokenspeed", 32)]
    ours = {"schedule", "request", "cachemgr", "answer", "step", "report", "tokens"}
    for steps in written["steps"]:
        parts = ours if steps["scheduler"] == "quire" else {"next_execution_plan", "advance"}
        assert steps["parts_cpu_us"].keys() == parts
        assert min(steps["parts_cpu_us"].values()) > 0
        assert len(steps["cpu_us"]) == len(steps["wall_us"]) == 2
    assert "TokenSpeed" in printed


@pytest.mark.night
def test_control_plane_measures_every_row_and_the_engine(tmp_path: Path) -> None:
    written, _ = run_quick("control-plane", tmp_path)
    figures = {figure["row"]: figure for figure in written["figures"]}
    assert len(figures) == len(written["figures"]) == 16
    expected = {"empty plan, unary", "decode step, 256 sequences, stream", "admission, 4,096 cached tokens, stream"}
    assert figures.keys() > expected
    for figure in figures.values():
        (sample,) = figure["samples"]
        assert sample["num_calls"] > 0
        assert sample["quantiles_us"] == sorted(sample["quantiles_us"])
        assert len(sample["quantiles_us"]) == len(written["quantiles_percent"])
    admitting = [figure for name, figure in figures.items() if " admit" in name]
    assert len(admitting) == 6
    assert all(figure["samples"][0]["admissions_per_s"] > 0 for figure in admitting)
    used = {each["row"]: each for each in written["processor"]}
    assert len(used) == 6
    assert {"empty plan", "decode step, 256 sequences, with a state directory"} < used.keys()
    assert all(min(each["plan_us"]) > 0 and min(each["report_us"]) > 0 for each in used.values())
    engine = written["engine"]
    assert engine["two_processes_over_one"]["ratio"] > 0
    assert [(work["num_running"], work["num_waiting"]) for work in engine["work_per_step"]] == [(8, 0), (8, 32)]
    assert all(min(work["engine_ms"]) > 0 for work in engine["work_per_step"])


def test_the_workers_own_work_is_measured_by_sequences_and_windows(tmp_path: Path) -> None:
    written, _ = run_quick("control-plane worker", tmp_path)
    assert [work["num_running"] for work in written["work_per_step"]] == [8, 16]
    for work in written["work_per_step"]:
        assert len(work["launched_ms"]) == len(work["answered_ms"]) == 2
        assert min(work["launched_ms"] + work["answered_ms"]) > 0


@pytest.mark.night
def test_each_process_is_profiled_by_function(tmp_path: Path) -> None:
    written, _ = run_quick("control-plane profiles", tmp_path)
    named = {each["process"]: {line["function"] for line in each["lines"]} for each in written["profiles"]}
    assert named.keys() == {"engine", "cachemgr", "worker"}
    assert any("Ledger" in function for function in named["cachemgr"])
    assert any(function.startswith("run/executor.py::") for function in named["worker"])
    assert all(each["lines"][0]["own_us"] > 0 for each in written["profiles"])


@pytest.mark.night
def test_a_worker_with_a_holder_computes_less_again(tmp_path: Path) -> None:
    written, _ = run_quick("control-plane kept-memory", tmp_path)
    rounds = {(row["lost"], row["way"]): row["rounds"] for row in written["outages"]}
    assert all(each["published"] >= 0.5 and each["until_all_go_on_s"] > 0 for row in rounds.values() for each in row)
    for lost in ("worker", "worker and cachemgr"):
        kept, on_disk, not_kept = (
            [each["computed_again"] for each in rounds[lost, way]] for way in ("kept", "on a disk", "not kept")
        )
        assert 0 < max(kept) < min(not_kept)
        assert 0 < max(on_disk) < min(not_kept)
    measured = written["records"]
    assert all(records > 0 for pairs in measured["costs_s"].values() for _, records in pairs)
    assert measured["starts_s"].keys() == {"worker", "cachemgr"}


def test_restart_measures_both_ways_and_the_way_back(tmp_path: Path) -> None:
    written, _ = run_quick("control-plane restart", tmp_path)
    for samples in (written["through_grpc_us"], written["books_us"]):
        names = {name.removesuffix(", True").removesuffix(", False") for name in samples}
        assert samples.keys() == {f"{name}, {kept}" for name in names for kept in (True, False)}
        assert all(min(times) > 0 for times in samples.values())
    assert [row["num_blocks"] for row in written["recovery"]] == [1_000, 10_000]
    assert all(min(row["seconds"]) > 0 and row["mib"] > 0 for row in written["recovery"])


def test_launches_of_a_llama_layer_are_eight_when_fused(tmp_path: Path) -> None:
    written, _ = run_quick("kernels launches", tmp_path)
    (row,) = written["rows"]
    assert row["family"] == "Llama"
    assert row["report"].startswith("fused (")
    assert "not fused" not in row["report"]
    if written["counted"].endswith("an estimate"):  # on a GPU a product may be several kernels
        assert row["fused"] == {"per_layer": 8, "besides": 4}
        assert row["own"] == {"per_layer": 39, "besides": 21}
    kernels = {row["kernel"]: (row["bound_us"], row["kept_us"]) for row in written["host_times"]}
    assert kernels.keys() == {"add_rmsnorm", "qkv_prologue", "paged_prefill", "paged_decode", "silu_mul"}
    assert all(min(times) > 0 for times in kernels.values())


def test_prompt_steps_are_timed_in_each_way(tmp_path: Path) -> None:
    written, _ = run_quick("step prompts", tmp_path, "--way", "whole", "--way", "none")
    rows = written["rows"]
    assert {(row["way"], row["cell"]) for row in rows} == {
        (way, cell) for way in ("whole", "none") for cell in ("prompt 1 x 9", "prompt 2 x 5")
    }
    assert all(len(row["step_ms"]) == 3 and min(row["step_ms"]) > 0 for row in rows)


def test_door_gives_the_same_tokens_in_both_ways(tmp_path: Path) -> None:
    written, _ = run_quick("serving door", tmp_path)
    assert written["streams"].keys() == {"1", "4"}
    assert all(min(each["engine"], each["HTTP"], each["ratio"]) > 0 for each in written["streams"].values())
    assert written["first_byte_s"]["HTTP"] > 0
    assert written["processor_us_per_token"].keys() == {"1", "4"}
    assert all(each.keys() == {"engine", "HTTP"} for each in written["processor_us_per_token"].values())
    assert "peer" not in written


@pytest.mark.night
def test_door_gives_the_same_tokens_through_transformers_serve(tmp_path: Path) -> None:
    """Its environment is made once, by pip from the index that pip is configured with."""
    written, printed = run_quick("serving door", tmp_path, "--peers")
    assert written["peer"] == {"name": "transformers serve", "absent": "", "failed": {}}
    assert all(min(each["transformers serve"], each["peer_ratio"]) > 0 for each in written["streams"].values())
    assert written["first_byte_s"]["transformers serve"] > 0
    assert "HTTP / transformers serve" in printed


@pytest.mark.night
def test_tensor_parallel_gives_the_same_tokens_with_two_ranks(tmp_path: Path) -> None:
    written, _ = run_quick("tensor-parallel", tmp_path)
    same, count = written["equal_sequences"]
    assert same == count > 0
    one, two = written["ranks"]
    assert (one["num_ranks"], one["collective_ms"], one["order_bytes"]) == (1, 0.0, 0.0)
    assert two["num_ranks"] == 2
    assert two["collective_ms"] > 0
    assert 0 < two["order_bytes"] <= 4096


@pytest.mark.night
def test_start_measures_all_three_until_they_are_ready(tmp_path: Path) -> None:
    written, printed = run_quick("start", tmp_path)
    for name in ("help", "cachemgr", "up"):
        assert written[name]["processor_s"]["median"] > 0
        assert written[name]["wall_s"]["median"] > 0
    assert "quire up until the first token over HTTP" in printed


def test_the_pipeline_runs_ahead_of_a_device_that_sleeps(tmp_path: Path) -> None:
    """The figures of --quick on a loaded machine say no more than that steps ran, and none sooner than the device."""
    written, _ = run_quick("pipeline", tmp_path)
    rows = written["rows"]
    assert [(each["row"]["in_flight"], each["row"]["step_graph"]) for each in rows] == [(4, "parts"), (4, "one")]
    for each in rows:
        assert each["num_steps"] >= 20
        assert each["period_ms"] >= 0.9 * each["row"]["step_ms"]
        assert each["launch_ms"] > 0
        assert each["host_ms"] > 0


def test_no_benchmark_is_left_out() -> None:
    source = Path(__file__).read_text()
    names = [f"{name} {part}".strip() for name, parts in PARTS.items() for part in ("", *parts)]
    assert not [name for name in names if f'"{name}"' not in source and name not in ELSEWHERE]


@pytest.mark.night
def test_drafts_come_true_where_a_text_is_written_again(tmp_path: Path) -> None:
    written, printed = run_quick("drafts", tmp_path)
    rows = {(row["cell"]["model"], row["cell"]["load"]): row for row in written["rows"]}
    assert len(rows) == 8
    assert all(row["processor_gain"] > 0 and row["without"] > 0 and row["with_drafts"] > 0 for row in rows.values())
    assert all(0 <= row["accepted"] <= 1 <= row["tokens_a_step"] <= 9 for row in rows.values())
    assert rows["tiny", "quoted text"]["accepted"] > 0.5, "each byte is a token, and the grammar allows one text"
    assert "asked again" in printed


@pytest.mark.night
def test_adapters_are_measured_beside_their_base(tmp_path: Path) -> None:
    written, printed = run_quick("lora", tmp_path)
    [row] = written["rows"]
    assert row["rank"] == 8
    assert min(row["base"], row["adapted"], row["processor_part"], *row["parts"]) > 0
    assert "bytes of the adapters" in printed
