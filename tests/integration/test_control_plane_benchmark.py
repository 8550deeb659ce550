"""The control plane's benchmark runs: every row once and small, against the real cachemgr."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "control_plane.py"
ROWS = {"empty plan, unary", "decode step, 256 sequences, stream", "admission, 4,096 cached tokens, stream"}


def test_smoke_run_measures_every_row(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARK), "--smoke", "--output", str(output)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    content = json.loads(output.read_text())
    figures = {figure["row"]: figure for figure in content["figures"]}
    assert len(figures) == len(content["figures"]) == 16
    assert figures.keys() > ROWS
    for figure in figures.values():
        (sample,) = figure["samples"]
        assert sample["num_calls"] > 0
        assert sample["quantiles_us"] == sorted(sample["quantiles_us"])
        assert len(sample["quantiles_us"]) == len(content["quantiles_percent"])
    admitting = [figure for name, figure in figures.items() if " admit" in name]
    assert len(admitting) == 6
    assert all(figure["samples"][0]["admissions_per_s"] > 0 for figure in admitting)
    assert output.with_suffix(".svg").read_text().lstrip().startswith("<?xml")
