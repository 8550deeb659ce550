"""A worker that can't serve with its flags reports that in one line and exits with 1."""

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


def last_line(done: subprocess.CompletedProcess[str], *, status: int = 1) -> str:
    assert done.returncode == status, done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(("family", "named"), [("bert", "BertLMHeadModel"), ("t5", "T5ForConditionalGeneration")])
def test_a_model_it_can_not_run_is_refused(family: str, named: str, tmp_path: Path) -> None:
    line = last_line(start(tmp_path, "--model", str(save(family, tmp_path)), "--max-model-len", "64"))
    assert re.search(rf"can't start: .*{named}", line)
    assert "Traceback" not in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", str(DEMO_MODEL), "--num-blocks", "99999999"), "--num-blocks 99999999"),
        (("--model", str(DEMO_MODEL), "--num-blocks", "8", "--max-model-len", "9999999"), "--max-model-len"),
        (
            ("--model", str(DEMO_MODEL), "--device", "cpu", "--attention", "triton"),
            "--attention triton: it needs a GPU",
        ),
    ],
    ids=["too many blocks", "too long", "no GPU"],
)
def test_settings_that_can_not_be_are_refused(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert message in last_line(start(tmp_path, *arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "/nowhere/at/all"), "no model at '/nowhere/at/all': there is no such folder in /"),
        (("--model", str(DEMO_MODEL), "--num-blocks", "8", "--kv-cache-memory", "1M"), "exclude each other"),
    ],
    ids=["no folder", "blocks and bytes"],
)
@pytest.mark.parametrize("check", [(), ("--check",)], ids=["start", "check"])
def test_wrong_flags_are_refused_before_anything_is_loaded(
    check: tuple[str, ...], arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    done = start(tmp_path, *arguments, *check)
    assert message in last_line(done, status=2)
    assert "INFO" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        (("--max-num-seqs", "4"), "--max-num-seqs 4 of 2048 tokens: .* = 513 blocks"),
        (("--max-num-seqs", "4", "--max-model-len", "100"), "--max-num-seqs 4 of 100 tokens: .* = 29 blocks"),
        (
            ("--max-num-seqs", "4", "--memory-share", "0.001"),
            r"--memory-share 0.001 of .* free: .* = (?!513)\d+ blocks",
        ),
        (("--max-num-seqs", "4", "--kv-cache-memory", "64M"), "--kv-cache-memory: 64.00 MiB .* = 3640 blocks"),
    ],
    ids=["default", "shorter", "share", "bytes"],
)
def test_the_pool_is_as_large_as_sequences_can_use_unless_more_is_asked_for(
    arguments: tuple[str, ...], limit: str, tmp_path: Path
) -> None:
    done = start(tmp_path, "--model", str(DEMO_MODEL), "--device", "cpu", *arguments, "--host-memory", "1000T")
    assert "--host-memory: " in last_line(done)  # so it ends, behind the line that is looked at
    assert re.search(limit, done.stderr), done.stderr


@pytest.mark.parametrize(("arguments", "says"), [(("--fuse",), True), (("--no-fuse",), False), ((), False)])
def test_a_cpu_fuses_for_who_asks_for_it(arguments: tuple[str, ...], says: bool, tmp_path: Path) -> None:
    """Seen in the log before the pool is found not to fit."""
    done = start(tmp_path, "--model", str(DEMO_MODEL), "--num-blocks", "99999999", *arguments)
    assert "--num-blocks 99999999" in last_line(done)
    assert bool(re.search(r"fused \(torch\): norm \d+ of \d+, attention", done.stderr)) == says
