"""A worker that can't serve what it is told to says so in one line and exits with 1."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from model_zoo import save

DEMO_MODEL = Path(__file__).parents[2] / "deploy/demo/model"


def start(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire.worker", "--listen", f"unix:{folder}/w.sock", *arguments]
    command += ["--cachemgr", f"unix:{folder}/c.sock"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(("family", "named"), [("bert", "BertLMHeadModel"), ("t5", "T5ForConditionalGeneration")])
def test_a_model_it_can_not_run_is_refused(family: str, named: str, tmp_path: Path) -> None:
    line = last_line(start(tmp_path, "--model", str(save(family, tmp_path)), "--max-model-len", "64"))
    assert re.search(rf"can't start: .*{named}", line)
    assert "Traceback" not in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "/nowhere/at/all"), "no model at '/nowhere/at/all': there is no such folder"),
        (("--model", str(DEMO_MODEL), "--num-blocks", "99999999"), "num_blocks=99999999"),
        (("--model", str(DEMO_MODEL), "--num-blocks", "8", "--kv-cache-memory", "1M"), "give one of them"),
        (("--model", str(DEMO_MODEL), "--num-blocks", "8", "--max-model-len", "9999999"), "max_model_len"),
        (
            ("--model", str(DEMO_MODEL), "--device", "cpu", "--attention", "triton"),
            "--attention triton: it needs a GPU",
        ),
    ],
    ids=["no folder", "too many blocks", "blocks and bytes", "too long", "no GPU"],
)
def test_settings_that_can_not_be_are_refused(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert message in last_line(start(tmp_path, *arguments))


@pytest.mark.parametrize(("arguments", "says"), [(("--fuse",), True), (("--no-fuse",), False), ((), False)])
def test_a_cpu_fuses_for_who_asks_for_it(arguments: tuple[str, ...], says: bool, tmp_path: Path) -> None:
    """Seen in what it logs before it finds that the pool does not fit."""
    done = start(tmp_path, "--model", str(DEMO_MODEL), "--num-blocks", "99999999", *arguments)
    assert "num_blocks=99999999" in last_line(done)
    assert bool(re.search(r"fused \(torch\): norm \d+ of \d+, attention", done.stderr)) == says
