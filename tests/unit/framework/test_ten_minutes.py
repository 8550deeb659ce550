"""The runner of `make gpu-ten-minutes`: verdicts, limits, report and results, with parts made here; and its parts."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "gpu/ten_minutes"
NAMES = ("parts", "cache", "clocks", "running", "reporting", "command", "deciding", "json_shapes")
ENDLESS_S = 600


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """The script's modules: their names are also those of benchmarks, so they are not left in sys.modules."""
    sys.path.insert(0, str(FOLDER))
    before = {name: sys.modules.pop(name, None) for name in NAMES}
    yield {name: importlib.import_module(name) for name in NAMES}
    for name, module in before.items():
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module
    sys.path.remove(str(FOLDER))


def says(text: str, *, status: int = 0) -> tuple[str, ...]:
    return ("-c", f"import sys; print({text!r}); sys.exit({status})")


class Script:
    """The script with parts made here."""

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self.parts, self.running, self.reporting = (modules[name] for name in ("parts", "running", "reporting"))
        self.main, self.deciding, self.shapes = (modules[name] for name in ("command", "deciding", "json_shapes"))
        self.gpu, self.core = self.parts.GPU, self.parts.CORE

    def part(self, name: str, command: tuple[str, ...], **options: Any) -> Any:
        return self.parts.Part(name, "1", options.pop("limit_s", 60), command, f"the figures of {name}", **options)

    def machine(self, gpu: str, *absent: str) -> Any:
        return self.reporting.Machine(gpu, is_predicted="H200" in gpu, absent=frozenset(absent))

    def run(self, parts: Sequence[Any], folder: Path, machine: Any, *, seconds: float = 600, name: str = "1") -> int:
        call = self.parts.Call(name, "a call", seconds, tuple(parts))
        status: int = self.main.run_parts(call, parts, folder, machine, dry=False)
        return status


@pytest.fixture
def script(modules: dict[str, ModuleType]) -> Script:
    return Script(modules)


def test_every_part_gets_its_verdict_and_the_report_says_why(script: Script, tmp_path: Path) -> None:
    gpu, core = script.gpu, script.core
    parts = [
        script.part("good", says("noise\nreport: 3 of 3\nmore noise"), needs=()),
        script.part("bad", says("it broke here", status=3), needs=()),
        script.part("real", says("unused", status=1)),
        script.part("both", says("unused", status=1), needs=(gpu, core)),
        script.part("small", says("unused", status=1), without_gpu=says("report: interpreted")),
    ]
    assert script.run(parts, tmp_path, script.machine("none", gpu, core)) == 1
    report = (tmp_path / "ten_minutes_none_1.md").read_text()
    assert "2 parts are ok, 1 are not, 2 were not run." in report
    assert "There is no GPU here" in report
    plain = re.sub(r" +", " ", re.sub(r"\| \d+ +\| 60 +\| \d+", "|", report))
    for line in (
        "| good | ok | | on the CPU |",
        "| bad | FAILED | | on the CPU: status 3 |",
        f"| real | not run | | there is no {gpu} |",
        f"| both | not run | | there is no {gpu} and no {core} |",
        "| small | ok | | on the CPU |",
        "Look at: the figures of good",
        "- 3 of 3",
        "- interpreted",
    ):
        assert line in plain, line
    assert "noise" not in report
    assert "```text\nit broke here\n```" in report
    assert "==== good\nnoise\nreport: 3 of 3\nmore noise\n" in (tmp_path / "ten_minutes_none_1.log").read_text()


def test_where_there_is_a_gpu_the_whole_part_runs(script: Script, tmp_path: Path) -> None:
    part = script.part("x", says("report: compiled"), without_gpu=says("", status=1))
    assert script.run([part], tmp_path, script.machine("NVIDIA H100 80GB HBM3")) == 0
    report = (tmp_path / "ten_minutes_nvidia_h100_80gb_hbm3_1.md").read_text()
    assert "- compiled" in report
    assert "no GPU" not in report
    assert "Predictions are of another GPU" in report


def test_figures_stand_beside_their_predictions(script: Script, tmp_path: Path) -> None:
    figure = script.parts.Figure
    figures = (
        figure("fast", "rows/kind=a&size=1/us", predicted=5.0, target=6.0, goal=4.0),
        figure("faster", "rows/kind=a&size=2/us", predicted=3.0, target=6.0, goal=4.0),
        figure("slow", "rows/kind=b&size=1/us", predicted=3.0, target=8.0),
        figure("rate", "rate", predicted=900.0, target=1000.0, better="more"),
        figure("absent", "rows/kind=c/us", predicted=1.0, estimate=True),
    )
    rows = [{"kind": kind, "size": size, "us": us} for kind, size, us in (("a", 1, 5.5), ("a", 2, 3.5), ("b", 1, 9.0))]
    part = script.part("p", says(""), json="p.json", figures=figures)
    content = {"rows": rows, "rate": 1234.0}
    outcome = script.running.Outcome(part, "ok", "", content=content)

    def lines(gpu: str) -> list[list[str]]:
        made = script.reporting.tables([outcome], script.machine(gpu))
        return [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in made[-5:]]

    assert lines("NVIDIA H200") == [
        ["fast", "5.5", "6", "4", "5", "1.10", "target reached"],
        ["faster", "3.5", "6", "4", "3", "1.17", "goal reached"],
        ["slow", "9", "8", "", "3", "3.00", "MISSED, far from what was predicted"],
        ["rate", "1,234", "1,000", "", "900", "1.37", "target reached, far from what was predicted"],
        ["absent", "-", "", "", "~1", "", "not measured"],
    ]
    heading = "\n".join(
        script.reporting.heading(script.parts.Call("1", "", 9, (part,)), [outcome], script.machine("x"))
    )
    assert "A prediction with ~ is an estimate" in heading
    assert [line[-1] for line in lines("NVIDIA H100")][:3] == ["", "", "far from what was predicted"]
    assert outcome.as_json()["figures"] == {"fast": 5.5, "faster": 3.5, "slow": 9.0, "rate": 1234.0, "absent": None}


def test_results_are_written_after_each_part(script: Script, tmp_path: Path) -> None:
    """The second part reads what was written before it began."""
    reads = f"print(open({str(tmp_path / 'ten_minutes_nvidia_h200_1.json')!r}).read())"
    parts = [script.part("first", says("x")), script.part("second", ("-c", reads))]
    assert script.run(parts, tmp_path, script.machine("NVIDIA H200")) == 0
    written = json.loads((tmp_path / "ten_minutes_nvidia_h200_1.json").read_text())
    assert written["gpu"] == "NVIDIA H200"
    assert [(name, part["verdict"]) for name, part in written["parts"].items()] == [("first", "ok"), ("second", "ok")]
    before = (tmp_path / "ten_minutes_nvidia_h200_1.log").read_text().partition("==== second\n")[2]
    assert json.loads(before)["parts"].keys() == {"first"}
    assert len(list(tmp_path.iterdir())) == 3, "a device machine gives back eight files at most"


def test_a_part_that_does_not_end_is_killed_with_its_children(script: Script, tmp_path: Path) -> None:
    endless = (
        "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; "
        f"time.sleep({ENDLESS_S})']); print(child.pid, flush=True); time.sleep({ENDLESS_S})"
    )
    part = script.part("endless", ("-c", endless), limit_s=5)
    started = time.monotonic()
    outcome = script.running.run(part, tmp_path, dry=False, absent=set())
    assert (outcome.verdict, outcome.detail) == ("TIMED OUT", "not over after 5 s")
    assert time.monotonic() - started < ENDLESS_S / 2
    while _runs(int(outcome.log)):
        assert time.monotonic() - started < ENDLESS_S / 2


def _runs(pid: int) -> bool:
    """True if the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it ended before it was opened, or before it was read
        return False


def test_what_a_call_has_no_time_for_is_not_run(script: Script, tmp_path: Path) -> None:
    parts = [script.part("late", says("x"))]
    assert script.run(parts, tmp_path, script.machine("NVIDIA H200"), seconds=1) == 1
    report = (tmp_path / "ten_minutes_nvidia_h200_1.md").read_text()
    assert "the 1 s of the call are over" in report
    assert "0 parts are ok, 0 are not, 1 were not run." in report


def test_a_part_also_has_the_time_that_those_before_it_have_left(script: Script, tmp_path: Path) -> None:
    """The first part ends at once; the second would be killed after its own second."""
    parts = [
        script.part("short", says("done"), limit_s=60),
        script.part("long", ("-c", "import time; time.sleep(2); print('report: to its end')"), limit_s=1),
    ]
    assert script.run(parts, tmp_path, script.machine("NVIDIA H200")) == 0
    assert "- to its end" in (tmp_path / "ten_minutes_nvidia_h200_1.md").read_text()


def put_tool(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A program nvidia-smi, in front of all others."""
    folder.mkdir()
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!{sys.executable}\n{body}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_clocks_and_power_are_sampled_beside_each_part(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool samples until it is ended; a line without numbers, or cut off, does not count."""
    ready = tmp_path / "ready"
    body = (
        "import pathlib, sys, time\n"
        "assert sys.argv[1] == '--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu', sys.argv\n"
        "for line in ('1980, 3201, 410.5, 44', '[N/A], 3201, 1, 1', '1755, 3201, 690.0, 61', '19'):\n"
        "    print(line, flush=True)\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        f"time.sleep({ENDLESS_S})"
    )
    put_tool(tmp_path / "bin", monkeypatch, body)
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(ready)!r}).exists(): time.sleep(0.01)"
    results = tmp_path / "results"
    results.mkdir()
    assert script.run([script.part("x", ("-c", waits))], results, script.machine("NVIDIA H200")) == 0
    written = json.loads((results / "ten_minutes_nvidia_h200_1.json").read_text())["parts"]["x"]["clocks"]
    assert written["sm_mhz"] == {"min": 1755, "median": 1867.5, "max": 1980}
    assert written["power_w"]["max"] == 690
    report = (results / "ten_minutes_nvidia_h200_1.md").read_text()
    assert "| clock, power" in report
    assert "| 1868 MHz (1755 at least), 690 W |" in report
    assert "No clocks" not in report


def test_without_clocks_the_report_says_so(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_tool(tmp_path / "bin", monkeypatch, "raise SystemExit(9)")
    assert script.run([script.part("x", says("x"))], tmp_path, script.machine("NVIDIA H200")) == 0
    report = (tmp_path / "ten_minutes_nvidia_h200_1.md").read_text()
    assert "No clocks and no power: nvidia-smi is not there, or answers nothing." in report
    assert json.loads((tmp_path / "ten_minutes_nvidia_h200_1.json").read_text())["parts"]["x"]["clocks"] is None
    assert script.run([script.part("x", says("x"), needs=())], tmp_path, script.machine("none", script.gpu)) == 0
    assert "No clocks" not in (tmp_path / "ten_minutes_none_1.md").read_text()


def test_the_parts_fit_their_calls_and_name_files_that_exist(script: Script) -> None:
    plan = script.parts.read_plan()
    assert [(call.name, call.seconds) for call in plan.calls.values()] == [("1", 360), ("2", 240), ("checks", 4500)]
    names = [part.name for call in plan.calls.values() for part in call.parts]
    assert len(set(names)) == len(names)
    for call in plan.calls.values():
        assert sum(part.limit_s for part in call.parts) <= call.seconds, call.name
        for part in call.parts:
            assert re.fullmatch(r"[\w.-]+", part.name)
            assert part.decides
            assert bool(part.json) == part.is_benchmark
            assert not part.figures or part.json
            for argument in (*part.command, *part.without_gpu):
                is_path = argument.startswith(("tests/", "benchmarks/"))
                assert not is_path or (script.parts.ROOT / argument).exists(), argument
            for figure in part.figures:
                assert figure.predicted is not None, f"{part.name}: {figure.name} has no prediction"
                assert figure.better in ("less", "more")
    assert os.access(FOLDER / "checks.py", os.R_OK)


def test_a_figure_is_missing_where_the_json_of_its_part_has_no_such_keys(script: Script) -> None:
    item = {"kind": "a", "heads": "32/8/128", "us": [1.0, 2.0, 9.0], "own": {"median": 3.0}}
    content = {"rows": [{"kind": "b"}, item], "machine": {"x": 1}, "taken_us": {"ours": {"median": 1.0}}}
    shape = script.shapes.shape_of(content, ("theirs",))
    read = {
        "rows/kind=a&heads=32/8/128/us": ("", 2.0),
        "rows/kind=a/own/median": ("", 3.0),
        "taken_us/theirs/median": ("", None),
        "rows/kin=a/us": ("kin=a", None),
        "rows/kind=a/ms": ("ms", None),
        "rows/kind=a/own": ("rows/kind=a/own is no number", None),
        "machine/x": ("machine", 1.0),
    }
    figures = {at: script.parts.Figure("x", at) for at in read}
    assert {at: (script.shapes.lacking(each, shape), each.read(content)) for at, each in figures.items()} == read


def test_every_figure_is_in_the_json_of_its_part(script: Script) -> None:
    shapes = script.shapes.read_shapes()
    for part in script.shapes.with_figures():
        if part.is_only_read:
            lacking = [figure.at for figure in part.figures if script.shapes.lacking(figure, shapes[part.command[0]])]
            assert lacking == [], part.name


def test_a_part_of_no_call_is_refused(script: Script, tmp_path: Path) -> None:
    path = tmp_path / "parts.toml"
    path.write_text(
        'gpu = ""\n[calls]\n1 = { seconds = 1, title = "" }\n'
        '[[parts]]\nname = "x"\ncall = "3"\nlimit_s = 1\ncommand = []\ndecides = ""\n'
    )
    with pytest.raises(ValueError, match="x is of a call that is none of 1"):
        script.parts.read_plan(path)


# -- decisions --------------------------------------------------------------------------------------------------------

SOURCE = """LIMIT = 690e12  # of an H200
DEPENDENT = False
EARLY = False
LATE = False
"""
DECISIONS = """
[[decisions]]
name = "dependent"
pairs = [["chains: new", "chains: old"], ["steps: new", "steps: old"]]
margin = 0.04
then = true
constant = { path = "source.py", name = "DEPENDENT" }

[[decisions]]
name = "early"
pairs = [["chains: new", "chains: old"], ["steps: new", "steps: slightly more"]]
margin = 0.04
at_least = 1
then = true
constant = { path = "source.py", name = "EARLY" }

[[decisions]]
name = "late"
pairs = [["chains: new", "chains: old"], ["steps: old", "steps: new"]]
margin = 0.04
at_least = 1
then = true
constant = { path = "source.py", name = "LATE" }

[[decisions]]
name = "not measured"
pairs = [["chains: new", "chains: none"]]
margin = 0.04
then = true
constant = { path = "source.py", name = "DEPENDENT" }

[[decisions]]
name = "limit"
measured = { figure = "rates: product", times = 1e12, margin = 0.1 }
constant = { path = "source.py", name = "LIMIT" }

[[decisions]]
name = "products"
winners = "products: products"
table = { path = "products.json" }
"""


def product(num_rows: int) -> dict[str, Any]:
    return {"kind": "plain", "num_outputs": 48, "num_inputs": 32, "dtype": "bfloat16", "num_rows": num_rows}


def entry(num_rows: int, form: str, own_us: float) -> dict[str, Any]:
    return product(num_rows) | {"tiling": {"form": form}, "own_us": own_us, "library_us": 10.0}


def results_of(gpu: str) -> dict[str, Any]:
    rows = [
        product(num_rows)
        | {
            "own": [{"tiling": {"form": form}, "taken_us": us} for form, us in own],
            "library_us": 10.0,
            "is_own_faster": is_faster,
        }
        for num_rows, own, is_faster in (
            (1, (("a", 9.5), ("b", 9.0)), True),
            (2, (("a", 9.7),), False),
            (4, (), False),
        )
    ]
    return {
        "gpu": gpu,
        "parts": {
            "chains": {"figures": {"new": 0.6, "old": 1.25, "none": None}},
            "steps": {"figures": {"new": 0.9, "old": 1.1, "slightly more": 0.92}},
            "rates": {"figures": {"product": 500.0}},
            "products": {"content": {"products": rows}},
        },
    }


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A folder with decisions, the files that they write, and results."""
    (tmp_path / "decisions.toml").write_text(DECISIONS)
    (tmp_path / "source.py").write_text(SOURCE)
    table = {"NVIDIA H100": [entry(8, "a", 5.0)], "NVIDIA H200": [entry(2, "a", 5.0), entry(16, "c", 5.0)]}
    (tmp_path / "products.json").write_text(json.dumps(table))
    for name in ("NVIDIA H200", "NVIDIA H100", "none"):
        (tmp_path / f"{name}.json").write_text(json.dumps(results_of(name)))
    return tmp_path


def test_results_decide_by_their_rules_and_write_their_places(script: Script, places: Path, capsys: Any) -> None:
    deciding = script.deciding
    decisions = deciding.read_decisions(places / "decisions.toml", places)
    results = deciding.read_results([places / "NVIDIA H200.json"])
    deciding.decide(decisions, results, dry=True)
    assert (places / "source.py").read_text() == SOURCE
    capsys.readouterr()
    deciding.decide(decisions, results, dry=False)
    assert capsys.readouterr().out.splitlines() == [
        "dependent: -> True (2 of 2 better by 4%: 0.6 against 1.25, 0.9 against 1.1)",
        "early: -> True (1 of 2 better by 4%: 0.6 against 1.25, 0.9 against 0.92)",
        "late: unchanged (1 of 2 better by 4%: 0.6 against 1.25, 1.1 against 0.9)",
        "not measured: unchanged (not decided, not measured: 0.6 against not measured)",
        "limit: -> 500000000000000.0 (measured 5e+14, present 6.9e+14)",
        "products: -> 2 products (own kernels are faster for 1 of 3 products)",
    ]
    expected = SOURCE.replace("690e12", "500000000000000.0").replace("DEPENDENT = False", "DEPENDENT = True")
    assert (places / "source.py").read_text() == expected.replace("EARLY = False", "EARLY = True")
    assert json.loads((places / "products.json").read_text()) == {
        "NVIDIA H100": [entry(8, "a", 5.0)],
        "NVIDIA H200": [entry(1, "b", 9.0), entry(16, "c", 5.0)],  # 2 was measured, and lost; 16 was not
    }


def test_results_of_two_gpus_or_of_none_decide_nothing(script: Script, places: Path) -> None:
    paths = [places / f"{name}.json" for name in ("NVIDIA H200", "NVIDIA H100")]
    with pytest.raises(ValueError, match="of NVIDIA H100 and of NVIDIA H200: one GPU decides"):
        script.deciding.read_results(paths)
    with pytest.raises(ValueError, match="of none: one GPU decides"):
        script.deciding.read_results([places / "none.json"])


def test_a_place_that_is_not_one_line_is_refused_before_anything_is_written(script: Script, places: Path) -> None:
    (places / "source.py").write_text(SOURCE + "LIMIT = 1\n")
    decisions = script.deciding.read_decisions(places / "decisions.toml", places)
    results = script.deciding.read_results([places / "NVIDIA H200.json"])
    with pytest.raises(ValueError, match="LIMIT is not assigned in one line"):
        script.deciding.decide(decisions, results, dry=False)
    assert (places / "source.py").read_text() == SOURCE + "LIMIT = 1\n"


def test_every_decision_reads_figures_of_parts_and_writes_a_place_that_is_there(script: Script) -> None:
    calls = script.parts.read_plan().calls.values()
    figures = {f"{part.name}: {figure.name}" for call in calls for part in call.parts for figure in part.figures}
    for decision in script.deciding.read_decisions():
        decision.place.read("NVIDIA H200")
        named = getattr(decision.rule, "pairs", ()) or [(getattr(decision.rule, "figure", None),)]
        assert {name for pair in named for name in pair if name} <= figures, decision.name
