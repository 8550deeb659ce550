"""`quire bench`: the list of benchmarks, running one, and their counts."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from prometheus_client import generate_latest
from prometheus_client.core import HistogramMetricFamily

from quire.cache.v1 import grant_pb2
from quire.cli import bench
from quire.kernels import reference
from quire.lab.replay import Outcome
from quire.lab.requests import Prompt
from quire.worker.attention.torch_attention import AttentionStep, attention_step, paged_attention
from quire.worker.fusion.fuse import FusionReport
from quire.worker.fusion.steps import Norm, TorchSteps
from quire.worker.grant.decoding import AcceptedStep
from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.layer_spec import Causal, LayerSpec, Sliding
from quire.worker.memory.sequence_table import SequenceTable
from quire.worker.memory.step_batch import build_step_batch
from quire.worker.model.modes import Modes
from quire.worker.run import executor as worker_executor
from quire.worker.run.executor import StepResult
from quire.worker.run.model_thread import MAX_UNCOLLECTED
from quire.worker.service.step_gaps import StepGaps

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS / "harness")]


def script(name: str, part: str = "") -> Any:
    """Import the script of a benchmark, or of a part of it, and the modules beside it."""
    path = bench.script_of(BENCHMARKS, name, part)
    spec = importlib.util.spec_from_file_location(f"bench {name} {part}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    sys.path.remove(str(path.parent))
    return module


books, lengths, padded, replay, report = map(
    importlib.import_module, ("books", "lengths", "padded", "replay", "report")
)
kernels, lab, prefix, pressure, serving, step, utilization = map(
    script, ("kernels", "lab", "prefix", "pressure", "serving", "step", "utilization")
)
serve_gpu = script("serve-gpu")
gaps, streams = map(importlib.import_module, ("gaps", "streams"))
windows_of_prefix, queued_prompts = script("prefix", "windows"), script("prefix", "queued-prompts")
schedulers = script("allocator", "schedulers")
step_drivers = importlib.import_module("step_drivers")
roofline, shapes, windows, workloads, running, modes = map(
    importlib.import_module, ("roofline", "shapes", "windows", "workloads", "running", "modes")
)


# -- the command ------------------------------------------------------------------------------------------------------


def test_every_name_is_a_script_with_a_line_that_says_what_it_measures() -> None:
    lines = bench.list_benches().splitlines()
    names = [(name, part) for name, parts in bench.PARTS.items() for part in ("", *parts)]
    for (name, part), line in zip(names, lines, strict=True):
        assert bench.script_of(BENCHMARKS, name, part).is_file()
        assert line.startswith(f"{name} {part}")
        assert len(line.split()) > 5, f"{name} {part} does not say what it measures"


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(click.BadParameter, match="utilization, serving"):
        bench.run_bench("report", (), quick=False, output=None)


def test_an_unknown_part_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(click.BadParameter, match="no part of serving, which has: peers, door"):
        bench.run_bench("serving", ("windows",), quick=False, output=None)


def test_outside_of_a_checkout_it_says_where_the_benchmarks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_CHECKOUT", tmp_path)
    monkeypatch.chdir(tmp_path)
    for call in (bench.list_benches, lambda: bench.run_bench("utilization", (), quick=True, output=None)):
        with pytest.raises(click.ClickException, match="checkout, not in the installed package"):
            call()


def test_without_what_they_need_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    with pytest.raises(click.ClickException, match=r"need matplotlib.*make venv"):
        bench.run_bench("utilization", (), quick=True, output=None)


@pytest.mark.parametrize(("output", "folder"), [(None, BENCHMARKS.parent / "build/bench"), (Path("/x"), Path("/x"))])
@pytest.mark.parametrize(
    ("name", "words", "script", "flags"),
    [
        ("tensor-parallel", ("--restarts", "2"), "tensor_parallel.py", ("--restarts", "2")),
        ("serving", (), "serving/__main__.py", ()),
        ("serving", ("door", "--peers"), "serving/door.py", ("--peers",)),
    ],
)
def test_it_becomes_the_script_with_the_flags_it_was_given(
    name: str,
    words: Sequence[str],
    script: str,
    flags: Sequence[str],
    output: Path | None,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    became: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda *command: became.append(command))
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    bench.run_bench(name, words, quick=True, output=output)
    run = [sys.executable, str(BENCHMARKS / "harness/run.py"), str(BENCHMARKS / script)]
    assert became == [(sys.executable, [*run, "--quick", *flags, "--output", str(folder)])]
    assert os.environ["OMP_WAIT_POLICY"] == "active"


# -- what they share --------------------------------------------------------------------------------------------------


def findings(quick: bool, progress: Any) -> Any:
    """A benchmark that returns its arguments."""
    made = report.table("a title", "what", "figure")
    made.add_row("quick", str(quick))
    return report.Findings([made], {"quick": quick, "samples": [1, 2, 3]}, draw, ["A note."])


def draw() -> Any:
    from matplotlib import pyplot

    return pyplot.subplots()[0]


def test_a_benchmark_shows_its_table_and_writes_figures_plot_and_where_they_are_from(tmp_path: Path) -> None:
    done = CliRunner().invoke(report.benchmark("a-name", findings, packages=["numpy"]), ["--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "a title" in done.output
    assert "A note." in done.output
    assert "quire bench a-name: processor" in done.output
    text = (tmp_path / "a_name.json").read_text()
    assert '"samples": [ 1, 2, 3 ]' in text
    written = json.loads(text)
    assert written["command"] == "quire bench a-name"
    assert written["quick"] is False
    assert written["notes"] == ["A note."]
    assert written["machine"]["numpy"] == np.__version__
    assert {"processor", "cores", "python"} <= written["machine"].keys()
    assert written["load_average_at_start"] >= 0
    assert "<svg" in (tmp_path / "a_name.svg").read_text()


def test_quick_is_handed_on_and_without_output_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(report.benchmark("a-name", findings), ["--quick"])
    assert done.exit_code == 0
    assert "True" in done.output
    assert "quire bench a-name --quick:" in done.output
    assert not list(tmp_path.iterdir())


def test_a_spread_is_the_median_and_its_range() -> None:
    assert report.spread([3.0, 1.0, 9.0]) == "3 (1 to 9)"
    assert report.spread([2.25], ".1f") == "2.2"
    assert report.percent(0.98765) == "98.8 %"


# -- queued prompts ---------------------------------------------------------------------------------------------------


def test_prompts_that_are_named_find_more() -> None:
    case = queued_prompts.recorded("sharegpt128_B16", 10, 4, 1_000)
    case = replace(case, load=case.load | {"requests": 100})
    without, named = (queued_prompts.measure_case(case, num_expected) for num_expected in (0, 8))
    assert named["hit_ratio"] > without["hit_ratio"] > 0


# -- utilization ------------------------------------------------------------------------------------------------------


def test_utilization_is_tokens_over_the_slots_of_blocks_taken() -> None:
    lengths = np.array([1, 16, 17, 40])
    assert utilization.paged_utilization(lengths, 16) == 74 / (16 + 16 + 32 + 48)
    assert utilization.contiguous_utilization(lengths, 20) == pytest.approx((1 + 16 + 17 + 20) / 80)


def test_requests_fit_until_the_blocks_of_the_same_memory_are_taken() -> None:
    slots = utilization.NUM_BUFFERS * 64
    fitting = utilization.num_fitting(np.full(slots, 17), 64, 16)
    assert fitting == slots // 32
    fit = utilization.measure_fit("all of 17", [np.full(slots, 17)], 64)
    assert fit.times(16) == 2.0
    with pytest.raises(RuntimeError, match="all requests fit"):
        utilization.num_fitting(np.full(3, 17), 64, 16)


def test_lengths_are_those_that_are_named() -> None:
    prompts, outputs = books.azure_lengths()
    assert len(prompts) == len(outputs) == 19_366
    assert (int(prompts[0]), int(outputs[0])) == (374, 44)
    assert (prompts + outputs).mean() == pytest.approx(1365.82, abs=0.01)
    drawn = books.normal_lengths(np.random.default_rng(0), 20_000)
    assert drawn.min() == 200
    assert drawn.max() <= 2048
    assert drawn.mean() == pytest.approx(504, abs=4)


# -- windows ----------------------------------------------------------------------------------------------------------


def shape_of(num_layers: int, window: int, full_every: int) -> Any:
    return windows.Shape("tiny", num_layers, Sliding(window), full_every, 2, 8)


def test_a_window_holds_its_blocks_and_those_of_the_tokens_in_flight() -> None:
    shape = shape_of(4, 64, 2)
    groups = shape.groups()
    assert [(str(group), group.layers) for group in groups] == [("full", (1, 3)), ("window 64", (0, 2))]
    held = windows.held_blocks(1_024, groups)
    assert held[-1] == 1_024 // 16 + 1 + 64 // 16 + 2  # from position 1,022 - 63 on to 1,024, the one in flight
    assert held[0] == 64 + 64 // 16 + 1
    assert windows.held_blocks(1_024, shape.groups("one"))[-1] == 1_024 // 16 + 1
    assert shape.block_bytes(groups) == 2 * shape.layer_bytes == 2 * 16 * 2 * 8 * 4
    assert shape.least_bytes(1_024) == (2 * 65 + 2 * 5) * shape.layer_bytes
    assert shape.least_bytes(10) == 4 * shape.layer_bytes


def test_bytes_that_no_layer_fills_are_held() -> None:
    padded_shape = windows.Shape("padded", 62, Sliding(1_024), 6, 16, 128)
    model = windows.measure_model(padded_shape, (2_048,))
    assert model.layers_per_group == [5] * 12 + [2]
    held = model.held[0]
    assert held.with_groups == (2 * 129 + 11 * 66) * 5 * padded_shape.layer_bytes
    assert held.one_table == 129 * 62 * padded_shape.layer_bytes
    assert held.worst_ratio == held.with_groups / held.least


def test_of_windows_more_sequences_fit_in_the_same_bytes() -> None:
    shape = shape_of(4, 64, 2)
    one, groups = shape.groups("one"), shape.groups()
    room = 1 + 10 * 64  # one table: ten sequences of 1,024 tokens
    num_bytes = (room + 1) * shape.block_bytes(one)
    assert windows.num_sequences(num_bytes, 1_024, shape, one) == 10
    assert 10 < windows.num_sequences(num_bytes, 1_024, shape, groups) <= 2 * room // (64 + 4)


def test_windowed_groups_find_as_much_and_leave_nothing_that_is_never_found() -> None:
    requests = [
        Prompt(64, [number % 7 * 100, *range(number % 7 * 100 + 1, number % 7 * 100 + 4)]) for number in range(60)
    ]
    pool = replay.GroupsReplay(12, block_size=16, policy="lru", layer_groups=windows_of_prefix.GROUPS)
    assert pool.num_stranded() == 0
    outcome = pool.run_groups([*requests, requests[-1]])
    assert (
        outcome.num_hits == 3
    )  # of seven prompts in turn only the repeated one is found; its last token is computed again
    assert outcome.num_found[0] == 4  # with the tail that the replay adds
    assert min(outcome.num_evicted) > 0
    assert outcome.most_stranded <= 1


# -- kernel -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
def test_the_online_softmax_is_the_softmax(length: int) -> None:
    worst = kernels.measure_equality((length,)).worst
    assert worst.keys() == {16, 32, 64, 128}
    assert max(worst.values()) < 4e-15


@pytest.mark.parametrize(
    ("starts", "counts"),
    [([30, 3, 88], [1, 1, 1]), ([0, 0], [21, 5]), ([7, 40], [9, 3]), ([30, 0, 13, 5], [1, 12, 7, 1])],
    ids=["decode", "prompts", "later parts", "mixed"],
)
@pytest.mark.parametrize("num_kv_heads", [2, 4])
def test_a_padded_batch_attends_as_the_reference_does(
    starts: Sequence[int], counts: Sequence[int], num_kv_heads: int
) -> None:
    spec = LayerSpec(0, 4, num_kv_heads, 8, 8, Causal(), 0.4, None, False)
    pool = KVPool({0: spec}, num_blocks=64, block_size=4, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(1)
    for tensor in pool.tensors():
        tensor[1:] = torch.randn(tensor[1:].shape, generator=generator)
    rows = SequenceTable(max_num_seqs=4, max_blocks_per_seq=24, device="cpu")
    free = iter(torch.randperm(63, generator=generator).add(1).tolist())
    for start, count in zip(starts, counts, strict=True):
        rows.stage_blocks(rows.add(), 0, [next(free) for _ in range(-(-(start + count) // 4))])
    tokens = [[1] * count for count in counts]
    order = range(len(counts))
    batch = build_step_batch(rows, block_size=4, rows=order, starts=starts, counts=counts, token_ids=tokens)
    q = torch.randn(1, 4, sum(counts), 8, generator=generator)
    k, v = (torch.randn(1, num_kv_heads, sum(counts), 8, generator=generator) for _ in range(2))
    with attention_step(AttentionStep(batch, pool, specs={0: spec})):
        out, _ = padded.padded_attention(SimpleNamespace(layer_idx=0), q, k, v, None)
        ours, _ = paged_attention(SimpleNamespace(layer_idx=0), q, k, v, None)  # type: ignore[arg-type]
    expected = reference.paged_attention(
        q[0].transpose(0, 1),
        *(pool.k(0), pool.v(0)),
        block_tables=batch.block_tables[0],
        seq_lens=batch.seq_lens,
        cu_seqlens_q=batch.cu_seqlens_q,
        scaling=0.4,
    )
    torch.testing.assert_close(out[0].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_mixed_lengths_go_from_an_eighth_to_all() -> None:
    assert kernels.lengths_of(3, 64, is_mixed=True) == [8, 36, 64]
    assert kernels.lengths_of(3, 64, is_mixed=False) == [64, 64, 64]


def test_lengths_around_a_mean_have_that_mean() -> None:
    assert lengths.lengths_around(1024, 1) == [1024]
    assert lengths.lengths_around(1024, 2) == [256, 1792]
    assert lengths.lengths_around(1024, 4) == [256, 768, 1280, 1792]


def test_each_target_of_a_step_is_of_one_that_a_gpu_measures() -> None:
    plan = step.gpu_plan()
    measured = [(shape.name, cell.name) for shape, cells in plan.steps for cell in cells]
    assert len(measured) == len(set(measured))
    assert step.TO_REACH_MS.keys() <= set(measured)
    assert len(step.TO_REACH_MS) == 10
    assert workloads.TO_REACH.keys() == {work.shape.name for work in plan.works}


# -- what is written --------------------------------------------------------------------------------------------------


def test_of_samples_their_number_and_quantiles_are_kept() -> None:
    kept = report.summary([float(number) for number in range(101)])
    assert kept == {"num_samples": 101, "min": 0, "p25": 25, "median": 50, "p75": 75, "p99": 99, "max": 100}


def test_a_figure_is_written_small_and_the_same_each_time(tmp_path: Path) -> None:
    figure, axes = pressure.pyplot.subplots()
    axes.plot([number**0.5 for number in range(300)], label="a curve")
    written = []
    for name in ("first.svg", "second.svg"):
        report.save_svg(figure, tmp_path / name)
        written.append((tmp_path / name).read_text())
    figure.savefig(tmp_path / "large.svg")
    assert written[0] == written[1]
    assert "<metadata>" not in written[0]
    assert len(written[0]) < (tmp_path / "large.svg").stat().st_size


def test_a_path_keeps_its_commands_and_a_tenth_of_a_point() -> None:
    svg = '<path d="M 80.811541 151.168729 \nL 81.463464 154.732552 \nL 82.04 1.96 \nQ 1 2 3.0 4 \nz\n"/>'
    assert report.compact_svg(svg) == '<path d="M 80.8 151.2 L 81.5 154.7 82 2 Q 1 2 3 4 z "/>'


def test_the_steps_that_are_not_drawn_are_not_written() -> None:
    result = under_pressure(2_000, reserves=False)
    written = pressure.as_json(result)
    assert len(written["blocks"]) < 2 * pressure.MOST_DRAWN
    assert written["blocks"] == result.blocks[:: written["drawn_every_steps"]]
    assert written["speeds"]["num_samples"] == 10


# -- pressure ---------------------------------------------------------------------------------------------------------


def under_pressure(num_blocks: int, *, reserves: bool, num_host_blocks: int = 0) -> Any:
    requests = pressure.draw_requests(10)
    ended: list[None] = []
    run = pressure.Run("a way", num_blocks, num_host_blocks=num_host_blocks, reserves=reserves)
    result = run.serve(requests, lambda: ended.append(None))
    assert len(ended) == len(requests)
    return result


def test_with_room_nothing_is_preempted_or_wasted() -> None:
    result = under_pressure(2_000, reserves=False)
    assert (result.num_preemptions, result.num_wasted) == (0, 0)
    assert result.num_computed == sum(each.num_prompt + each.num_new - 1 for each in pressure.draw_requests(10))


def test_without_room_the_last_arrived_are_computed_again_unless_the_longest_was_reserved() -> None:
    num_blocks = 2 * max(request.num_blocks for request in pressure.draw_requests(10))
    preempting, reserving = (under_pressure(num_blocks, reserves=reserves) for reserves in (False, True))
    assert preempting.num_preemptions > 0
    assert preempting.num_wasted > 0
    assert (reserving.num_preemptions, reserving.num_wasted) == (0, 0)
    assert preempting.num_computed == reserving.num_computed + preempting.num_wasted
    assert max(reserving.first_token_steps) > max(preempting.first_token_steps)


def test_what_the_host_tier_keeps_is_not_computed_again() -> None:
    num_blocks = 2 * max(request.num_blocks for request in pressure.draw_requests(10))
    keeping = under_pressure(num_blocks, reserves=False, num_host_blocks=2_000)
    assert keeping.num_offloads == keeping.num_preemptions > 0
    assert (keeping.num_wasted, keeping.num_restored > 0) == (0, True)


def test_blocks_add_up_in_every_step_and_two_runs_are_equal() -> None:
    num_blocks = 2 * max(request.num_blocks for request in pressure.draw_requests(10))
    result = under_pressure(num_blocks, reserves=False)
    assert result == under_pressure(num_blocks, reserves=False)
    assert len(result.blocks) > 100
    assert all(sum(counts) == num_blocks and min(counts) >= 0 for counts in result.blocks)
    full, partial, *_ = (statistics.mean(column) for column in zip(*result.blocks, strict=True))
    assert full > partial > 0


def test_a_block_is_partial_while_it_has_room_for_its_sequence() -> None:
    run = pressure.Run("a way", 10, reserves=False)
    for num_tokens in (16, 17):
        assert run._books.admit(num_tokens)
    assert run._count_blocks() == [2, 1, 0, 0, 7]


def test_fairness_is_one_for_equal_speeds_and_a_share_if_one_has_all() -> None:
    def fairness(speeds: list[float]) -> float:
        result = pressure.Result("", 1, 1, 1, 1, 0, 0, 0, 0, [], [], speeds)
        return float(result.fairness)

    assert fairness([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert fairness([0.0, 0.0, 0.0, 5.0]) == pytest.approx(0.25)


# -- step -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "num_seqs", "cached", "expected_ms"),
    [
        ("LLAMA_8B", 1, 1024, 3.522),
        ("LLAMA_8B", 256, 1024, 12.854),
        ("LLAMA_8B", 32, 8192, 11.481),
        ("LLAMA_1B", 128, 1024, 1.574),
        ("QWEN3_06B", 1, 1024, 0.305),
        ("QWEN3_17B", 32, 8192, 7.792),
    ],
)
def test_a_steps_bound_is_the_one_worked_out_by_hand(
    shape: str, num_seqs: int, cached: int, expected_ms: float
) -> None:
    """Weights once at 4.3 TB/s or their products at 790 TFLOP/s, and all keys and values once."""
    bound_s = roofline.step_bound_s(
        getattr(shapes, shape),
        torch.bfloat16,
        roofline.Ceilings(4.3e12, 790e12, [], []),
        num_tokens=num_seqs,
        num_sampled=num_seqs,
        num_keys=num_seqs * cached,
        num_scores=num_seqs * cached,
    )
    assert 1e3 * bound_s == pytest.approx(expected_ms, rel=2e-3)


def test_the_sizes_of_a_layer_are_those_worked_out_by_hand() -> None:
    """Of a layer 4.19 MB of keys and values at 1,024 tokens; 17.6 TFLOP of attention for 8,192 tokens of 8B."""
    llama, qwen = shapes.LLAMA_8B, shapes.QWEN3_06B
    for shape, num_layers in ((llama, 32), (qwen, 28)):
        layer_bytes = shape.kv_bytes_per_token(torch.bfloat16) * 1024 / num_layers
        assert layer_bytes / 1e6 == pytest.approx(4.19, rel=2e-3)
    layer = (qwen.num_matrix_weights - 151_936 * 1024) / 28
    assert 2 * layer / 1e6 == pytest.approx(8.4 + 4.2 + 12.6 + 6.3, rel=5e-3)
    assert llama.attention_flops_per_score * roofline.num_scores(0, 8192) / 1e12 == pytest.approx(17.6, rel=1e-3)
    assert roofline.num_scores(8192, 1024) == 1024 * 8192 + 1024 * 1025 // 2


@pytest.mark.parametrize(
    ("cell", "expected_ms"),
    [(step.Cell(1, 0, 8192), 167.0), (step.Cell(1, 0, 512), 9.15), (step.Cell(1, 8192, 1024), 24.0)],
)
def test_the_bound_of_a_prompt_has_the_products_of_attention(cell: Any, expected_ms: float) -> None:
    """14.3 TFLOP of products for 1,024 tokens of 8B; attention to 8,192 before takes 4.7 more, and takes longer than
    reading them."""
    bound_s = cell.bound_s(shapes.LLAMA_8B, torch.bfloat16, roofline.Ceilings(4.4e12, 790e12))
    assert 1e3 * bound_s == pytest.approx(expected_ms, rel=1e-2)


def test_a_workloads_bound_is_the_one_worked_out_by_hand() -> None:
    work = workloads.mixed_lengths(shapes.QWEN3_06B)
    assert sum(work.num_new) == 133_966
    bound_s = roofline.workload_bound_s(
        work.shape,
        torch.bfloat16,
        roofline.Ceilings(4.3e12, 790e12, [], []),
        prompts=[len(prompt) for prompt in work.prompts],
        outputs=work.num_new,
    )
    assert 133_966 / bound_s == pytest.approx(35_665, rel=1e-3)


class FakeExecutor:
    """Notes the order of its calls."""

    def __init__(self, *, runs_ahead: bool) -> None:
        self.runs_ahead = runs_ahead
        self.calls: list[str] = []

    def launch(self, step: AcceptedStep) -> Any:
        number = step.grant.step_number
        self.calls.append(f"launch {number}")

        def collect() -> StepResult:
            self.calls.append(f"collect {number}")
            return StepResult(number, worker_executor.Outcome.COMPUTED)

        return SimpleNamespace(collect=collect)


def numbered_steps(count: int) -> list[AcceptedStep]:
    return [AcceptedStep(grant_pb2.StepGrant(step_number=number)) for number in range(1, count + 1)]


def test_a_step_is_launched_before_the_one_in_front_of_it_is_collected() -> None:
    executor = FakeExecutor(runs_ahead=True)
    in_flight = running.steps_in_flight(executor)
    ended = running.run_steps(executor, numbered_steps(5), in_flight=in_flight)
    assert [each.result.step_number for each in ended] == [1, 2, 3, 4, 5]
    for number in range(1, 5):
        assert executor.calls.index(f"launch {number + 1}") < executor.calls.index(f"collect {number}")
    waiting = [
        sum(call.startswith("launch") for call in executor.calls[: i + 1])
        - sum(call.startswith("collect") for call in executor.calls[: i + 1])
        for i in range(len(executor.calls))
    ]
    assert max(waiting) == in_flight == MAX_UNCOLLECTED


def test_a_lone_step_is_collected_before_the_next_is_launched() -> None:
    executor = FakeExecutor(runs_ahead=False)
    assert running.steps_in_flight(executor) == 1
    running.run_steps(executor, numbered_steps(2), in_flight=1, synchronize=lambda: executor.calls.append("wait"))
    assert executor.calls == ["wait", "launch 1", "collect 1", "wait", "launch 2", "collect 2"]


def test_no_step_is_launched_after_the_time_and_all_that_were_are_collected() -> None:
    executor = FakeExecutor(runs_ahead=True)
    assert running.run_steps(executor, numbered_steps(3), in_flight=2, seconds=-1.0) == []
    assert executor.calls == []


def test_a_step_that_is_not_computed_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="step 7 ended failed"):
        running.computed(StepResult(7, worker_executor.Outcome.FAILED))


@pytest.mark.parametrize(
    ("sizes", "cell"),
    [
        ("1x1k", step.Cell(1, 1024)),
        ("128x8192 mixed", step.Cell(128, 8192, is_mixed=True)),
        ("prompt 512", step.Cell(1, 0, 512)),
        ("prompt 8x1k", step.Cell(8, 0, 1024)),
        ("prompt 1k on 8k", step.Cell(1, 8192, 1024)),
    ],
)
def test_cells_have_names(sizes: str, cell: Any) -> None:
    assert step.cell_of(sizes) == cell


def test_cells_of_a_model_beside_each_other_share_its_load() -> None:
    plan = step.chosen(step.gpu_plan(), "0.6B 1x1k, 0.6B prompt 2k,8B 32x1k, 0.6B 1x1k")
    assert [(shape.name, [cell.name for cell in cells]) for shape, cells in plan.steps] == [
        ("Qwen3-0.6B", ["decode 1 x 1024", "prompt 1 x 2048"]),
        ("Llama-3.1-8B", ["decode 32 x 1024"]),
        ("Qwen3-0.6B", ["decode 1 x 1024"]),
    ]
    assert plan.works == ()


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ("0.6B", "'0.6B' is not a model and its sizes"),
        ("7B 1x1k", "'7B' is not measured here: must be one of 8B, 1B, 0.6B"),
        ("8B 1y1", "'1y1' is neither like '32x1k' nor like"),
        ("8B 1x1m", "'1m' is not a number such as 512 or 8k"),
    ],
)
def test_a_cell_that_is_none_is_refused(cells: str, message: str) -> None:
    with pytest.raises(click.BadParameter, match=re.escape(message)):
        step.chosen(step.gpu_plan(), cells)


def test_on_a_gpu_transformers_is_no_row() -> None:
    assert workloads.rows_on(torch.device("cuda")) == ("Quire, in one process",)
    assert len(workloads.rows_on(torch.device("cpu"))) == 2


class WrongInSteps(TorchSteps):
    """Right for the 16 tokens of a trial."""

    def add_rmsnorm(self, x: torch.Tensor, norm: Norm, residual: torch.Tensor | None = None) -> torch.Tensor:
        result = super().add_rmsnorm(x, norm, residual)
        return result if x.shape[0] == 16 else result * 1.01


def test_a_degraded_model_is_an_error_unless_it_is_allowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shapes, "pick_steps", lambda *_, **__: WrongInSteps())
    flags = ["--quick", "--cells", "tiny 2x20", "--json", str(tmp_path / "so far.json")]
    done = CliRunner().invoke(step.main, flags)
    assert done.exit_code == 1
    assert "tiny Llama float32: degraded: modules: the model's own (degraded: fused, its logits over" in done.output
    written = json.loads((tmp_path / "so far.json").read_text())
    assert written["steps"] == []
    assert len(written["errors"]) == 1
    done = CliRunner().invoke(step.main, [*flags, "--allow-degraded"])
    assert done.exit_code == 0, done.output
    (timing,) = json.loads((tmp_path / "so far.json").read_text())["steps"]
    assert "degraded: fused, its logits" in timing["mode"]["modules"]


def test_a_kernel_compiled_in_measured_steps_is_an_error_beside_the_figure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counts = iter(range(100))
    monkeypatch.setattr(step, "CompilationCount", lambda device: lambda: next(counts))
    done = CliRunner().invoke(step.main, ["--quick", "--cells", "tiny 2x20", "--json", str(tmp_path / "so far.json")])
    assert done.exit_code == 1
    assert "degraded: kernels: 1 compiled while it was measured" in done.output
    (timing,) = json.loads((tmp_path / "so far.json").read_text())["steps"]
    assert timing["num_compiled"] == 1


@pytest.mark.parametrize("report_of_fusion", [None, FusionReport("kernels", {}, {("A", "is odd"): 1})])
def test_on_a_gpu_each_module_of_the_shapes_is_fused(report_of_fusion: FusionReport | None) -> None:
    model: Any = SimpleNamespace(modes=Modes(), device=torch.device("cuda"), fusion=report_of_fusion)
    with pytest.raises(modes.DegradedError, match="modules: "):
        modes.check_modes(model, allow_degraded=False)
    model.fusion = FusionReport("kernels", {"mlp": (1, 1)}, {})
    assert modes.check_modes(model, allow_degraded=False) == {}


# -- both services ----------------------------------------------------------------------------------------------------

EVENTS = b"""HTTP/1.1 200 OK\r
\r
data: {"choices": [{"text": "4"}], "usage": {"completion_tokens": 1}}\r
\r
data: {"choices": [{"text": " 5 6"}], "usage": {"completion_tokens": 3}}\r
\r
data: {"choices": [{"text": ""}], "usage": {"completion_tokens": 3}}\r
\r
data: [DONE]\r
"""


@pytest.mark.parametrize("cut", [len(EVENTS) - 1, 120, 60])
def test_a_streams_tokens_have_the_time_of_the_part_in_which_their_event_ended(cut: int) -> None:
    stream = streams.Stream()
    streams.read_answer(1.0, [(2.0, EVENTS[:cut]), (5.0, EVENTS[cut:])], stream)
    assert (stream.num_tokens, len(stream.times)) == (3, 2)
    ends = [found.end() for found in streams.EVENT.finditer(EVENTS)][:2]
    assert stream.times == [2.0 if end <= cut else 5.0 for end in ends]
    assert stream.first_token_s == stream.times[0] - 1.0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 503 Busy\r\n\r\n{}", "the server answered b'HTTP/1.1 503"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {"code": "x"}}\r\n', "a stream ended with"),
    ],
)
def test_an_answer_that_is_an_error_fails_the_stream(answer: bytes, message: str) -> None:
    with pytest.raises(streams.StreamFailed, match=re.escape(message)):
        streams.read_answer(0.0, [(1.0, answer)], streams.Stream())


def test_streams_that_are_open_when_the_time_is_over_count_with_the_tokens_that_they_have() -> None:
    async def ask(prompt: Sequence[int], num_new: int, stream: Any) -> None:
        count = num_new if prompt[0] else 1
        stream.times += [float(number) for number in range(count)]
        stream.num_tokens += count
        if not prompt[0]:
            await asyncio.Event().wait()

    def tokens(num_new: int, *firsts: int) -> list[int]:
        ran = asyncio.run(streams.run_streams(ask, [[first] for first in firsts], num_new, seconds=0.05))
        return [stream.num_tokens for stream in ran]

    assert tokens(3, 1, 0) == [3, 1]
    with pytest.raises(streams.StreamFailed, match="a stream had 0 of 0 tokens"):
        tokens(0, 1)


def test_gaps_are_those_since_the_last_look_and_their_quantiles_lie_within_buckets() -> None:
    counted = StepGaps()
    counted.add(5.0)
    before = gaps.gaps_of_buckets(counted.buckets(), counted.sum_s)
    for _ in range(98):
        counted.add(15e-6)
    for _ in range(2):
        counted.add(3.0)
    after = gaps.gaps_of_buckets(counted.buckets(), counted.sum_s)
    found = after.since(before).describe()
    assert found["num"] == 100
    assert found["mean_us"] == pytest.approx(60_014.7)
    assert 10 < found["p50_us"] < 20
    assert found["p99_us"] == 1e6  # of the last limit: it has none above
    assert after.since(after).describe() == {"num": 0}


def test_a_workers_page_has_its_gaps() -> None:
    counted = StepGaps()
    counted.add(15e-6)
    family = HistogramMetricFamily(gaps.NAME, "a text")
    family.add_metric([], counted.buckets(), counted.sum_s)
    registry = SimpleNamespace(collect=lambda: [family])
    page = generate_latest(registry).decode()  # type: ignore[arg-type]
    assert gaps.gaps_of_page(page) == gaps.gaps_of_buckets(counted.buckets(), counted.sum_s)


def test_a_degraded_worker_is_an_error_unless_it_is_allowed() -> None:
    fused = {"modules": ("fused (kernels): mlp 28 of 28", "")}
    slow = fused | {"decode": ("without CUDA graphs", "out of memory")}
    assert modes.check_parts(fused, device="cuda:0", allow_degraded=False) == {
        "modules": "fused (kernels): mlp 28 of 28"
    }
    with pytest.raises(modes.DegradedError, match="degraded: decode: without CUDA graphs"):
        modes.check_parts(slow, device="cuda:0", allow_degraded=False)
    assert "out of memory" in modes.check_parts(slow, device="cuda:0", allow_degraded=True)["decode"]
    for how in ("the model's own", "fused (kernels): mlp 27 of 28; not fused: 1 MLP: odd"):
        with pytest.raises(modes.DegradedError, match="degraded: modules: "):
            modes.check_parts({"modules": (how, "")}, device="cuda:0", allow_degraded=False)
        assert modes.check_parts({"modules": (how, "")}, device="cpu", allow_degraded=False)


def test_the_services_of_a_gpu_are_measured_with_every_number_of_streams() -> None:
    plan = serve_gpu.plan_for("cuda", quick=False)
    assert [(shape.short, count) for shape, count in plan.cells] == [
        (short, count) for short in ("0.6B", "8B") for count in (1, 32, 128, 256)
    ]
    few = serve_gpu.chosen(plan, "8B 1, 0.6B 256")
    assert [(shape.short, count) for shape, count in few.cells] == [("8B", 1), ("0.6B", 256)]
    setup = few.setup(Path("model"), few.cells[1][0], "cuda")
    assert setup.num_blocks >= 256 * (plan.longest // 16 + 1)


# -- lab --------------------------------------------------------------------------------------------------------------


def test_the_lab_fits_the_mean_of_what_was_measured_before_and_after(tmp_path: Path) -> None:
    results = []
    for number, medians in enumerate(([10.0, 30.0], [20.0, 50.0])):
        steps = [{"cell": f"decode {n} x 8", "median_ms": median} for n, median in enumerate(medians, 1)]
        results.append(tmp_path / f"{number}.json")
        results[-1].write_text(json.dumps({"steps": steps}))
    for count, expected in ((1, [10.0, 30.0]), (2, [15.0, 40.0])):
        mean = json.loads(lab.mean_of(results[:count], tmp_path).read_text())
        assert [step["median_ms"] for step in mean["steps"]] == expected


def test_the_lab_says_what_a_measured_step_would_take_by_the_fit() -> None:
    step = lab.StepTime("additive", 0.01, 1e-3, pair_s=1e-6)
    decode, prompt = lab.Measured(2, 100, 1, 0.02), lab.Measured(1, 0, 64, 0.1)
    assert (decode.name, prompt.name) == ("decode, 2 on 100", "prompt of 64, alone")
    assert decode.computed_s(step) == pytest.approx(0.012 + 201e-6)
    assert prompt.computed_s(step) == pytest.approx(0.074 + 2048e-6)


def test_the_lab_takes_the_processes_own_time_from_what_was_measured() -> None:
    step = lab.StepTime("additive", 0.01, 1e-3)
    decodes = [lab.Measured(1, 100, 1, 0.011 + own_s) for own_s in (-0.002, 0.004, 0.006)]
    alone = [lab.Measured(1, 0, 56, 0.070 * ratio) for ratio in (1.2, 1.5, 1.9)]
    own = lab.with_own_time(step, [*decodes, *alone])
    assert (own.overhead_s, own.idle_ratio) == pytest.approx((0.004, 1.5))
    faster = [lab.Measured(1, 0, 56, 0.05)]
    assert lab.with_own_time(step, [*decodes, *faster]).idle_ratio == 1.0


# -- prefix and serving -----------------------------------------------------------------------------------------------


def test_hit_ratios_are_of_tokens() -> None:
    name = prefix.QUICK_TRACE
    file = prefix.expectations()[name]
    capacity, known = next(iter(file["capacity"].items()))
    outcome = prefix.Measurement(
        *("lmcache", int(capacity), Outcome(100, 0), Outcome(150, 0)),
        *(known["opt_hit_blocks"], file["hit_blocks_infinite"]),
    )
    ratios = prefix.hit_ratios(name, outcome)
    assert ratios["lru"] == 100 * 16 / file["input_tokens"]
    assert ratios["default"] == 1.5 * ratios["lru"]
    assert ratios["belady"] == known["opt_hit_blocks"] * 16 / file["input_tokens"]
    assert ratios["infinite"] == file["hit_blocks_infinite"] * 16 / file["input_tokens"]
    unknown = prefix.Measurement("lmcache", 1, outcome.lru, outcome.default, None, 1)
    assert prefix.hit_ratios(name, unknown)["belady"] is None


def test_the_serving_workload_is_the_one_that_is_named() -> None:
    sizes = serving.Sizes()
    prompts = serving.draw_prompts(sizes, 50_257)
    assert len(prompts) == 64
    assert sum(map(len, prompts)) == 54_784
    assert max(map(len, prompts)) + sizes.new_tokens <= 1024
    assert [len(prompt) for prompt in prompts] != sorted(map(len, prompts))


def test_gathering_is_over_at_the_end_of_the_block() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with padded.gathering():
        assert ALL_ATTENTION_FUNCTIONS["quire_paged"] is padded.padded_attention
    assert ALL_ATTENTION_FUNCTIONS["quire_paged"] is paged_attention


# -- schedulers -------------------------------------------------------------------------------------------------------


def step_script(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this program in place of the driver of our own scheduler."""
    (folder / "quire_steps.py").write_text(body)
    monkeypatch.setattr(step_drivers, "FOLDER", folder)


def measured_schedulers(*only: str) -> Any:
    return schedulers.measure(True, report.progress_bar(), peers=False, only=only)


def test_a_scheduler_that_is_not_installed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("environments"), "ENVIRONMENTS", tmp_path)
    findings = measured_schedulers("sglang", "vllm")
    missing = "not installed; --peers installs it"
    assert findings.figures["unavailable"] == {"sglang": missing, "vllm": missing}
    assert findings.figures["steps"] == []
    assert f"SGLang: not run: {missing}" in findings.notes
    assert findings.draw().axes


def test_a_scheduler_that_fails_is_reported_with_what_it_said_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_script(tmp_path, "import no_such_scheduler", monkeypatch)
    findings = measured_schedulers("quire")
    assert "No module named 'no_such_scheduler'" in findings.figures["unavailable"]["quire"]
    assert findings.figures["steps"] == []


def test_the_windows_of_a_scheduler_that_fails_between_them_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = (
        'print("a line of a package")\nfor answer in ({"versions": {}}, {"cpu_us": {"a": 1}, "wall_us": {"a": 1}}):'
    )
    body = f"import json\n{answers}\n    input()\n    print(json.dumps(answer), flush=True)\nraise SystemExit('full')"
    step_script(tmp_path, body, monkeypatch)
    findings = measured_schedulers("quire")
    assert findings.figures["unavailable"] == {"quire": "full"}
    assert findings.figures["steps"] == []


def test_a_scheduler_that_does_not_answer_is_ended_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_script(tmp_path, "import threading\nthreading.Event().wait()", monkeypatch)
    monkeypatch.setattr(step_drivers, "ANSWER_TIMEOUT_S", 0.2)
    assert measured_schedulers("quire").figures["unavailable"] == {"quire": "no answer within 0.2 s"}


def stepping_script(tokens: str) -> str:
    """A driver of a scheduler with this many tokens in each step, and one part."""
    return f"""
import sys
sys.path.insert(0, {str(BENCHMARKS / "allocator" / "peers")!r})
from stepping import drive

class Made:
    def __init__(self, load):
        self.load = load
        assert min(map(len, load.prompts())) == load.prompt_tokens

    def step(self, watch):
        watch.start()
        watch.lap("only part")
        return {tokens}

drive(Made, package="click")
"""


def test_each_window_has_the_time_of_each_part_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step_script(tmp_path, stepping_script("self.load.num_running"), monkeypatch)
    figures = measured_schedulers("quire").figures
    assert figures["unavailable"] == {}
    assert figures["versions"].keys() == {"click", "python"}
    assert [(steps["scheduler"], steps["num_running"]) for steps in figures["steps"]] == [("quire", 16), ("quire", 32)]
    assert all(steps["parts_cpu_us"].keys() == {"only part"} for steps in figures["steps"])
    assert all(len(steps["wall_us"]) == schedulers.QUICK.windows for steps in figures["steps"])


def test_a_step_without_a_token_of_each_sequence_is_no_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step_script(tmp_path, stepping_script("self.load.num_running - 1"), monkeypatch)
    figures = measured_schedulers("quire").figures
    assert figures["unavailable"] == {"quire": "RuntimeError: a step of 16 sequences had 15 tokens"}
    assert figures["steps"] == []
