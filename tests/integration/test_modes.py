"""A worker that has left a fast path says so: in its log, /healthz, metrics and statistics, and in `quire stats`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from integration.protocol_client import NUM_BLOCKS, WORKER_ARGS, Pair

from quire.cli.launch import LocalServices

UNFUSED = str(Path(__file__).with_name("unfused_worker.py"))
REASON = "fused, its logits over a block pool"


@pytest.fixture(scope="module")
def services(model_dir: Path) -> Iterator[LocalServices]:
    flags = (*WORKER_ARGS, "--fuse", "--metrics-listen", "127.0.0.1:0")
    with LocalServices.start(
        model=model_dir, num_blocks=NUM_BLOCKS, extra_worker_args=flags, worker_target=UNFUSED
    ) as services:
        yield services


def log_of(services: LocalServices) -> str:
    assert services.worker.log_path is not None
    return services.worker.log_path.read_text()


def page(services: LocalServices, path: str) -> str:
    (address,) = re.findall(r" metrics address=(\S+)", log_of(services))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address}{path}", timeout=DEADLINE_S) as answer:
        assert answer.status == 200
        return str(answer.read().decode())


def stats(services: LocalServices, *flags: str) -> str:
    command = [sys.executable, "-m", "quire.cli", "stats", "--cachemgr", services.cachemgr_address, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout


def test_the_log_has_one_loud_line(services: LocalServices) -> None:
    lines = [line for line in log_of(services).splitlines() if "DEGRADED" in line]
    assert len(lines) == 1
    assert "WARNING" in lines[0]
    assert f"modules: the model's own (degraded: {REASON}" in lines[0]


def test_health_is_ok_and_names_the_parts(services: LocalServices) -> None:
    ok, *parts = page(services, "/healthz").splitlines()
    assert ok == "ok"
    assert [part.partition(":")[0] for part in parts] == ["modules", "attention", "decode", "sampler", "prompts"]
    assert [part for part in parts if "degraded" in part] == [parts[0]]
    assert REASON in parts[0]


def test_the_metric_is_one_for_the_part(services: LocalServices) -> None:
    found = dict(re.findall(r'^quire_worker_degraded\{part="(\w+)"\} (\S+)', page(services, "/metrics"), re.MULTILINE))
    assert {part for part, value in found.items() if float(value)} == {"modules"}
    assert len(found) == 12


def test_statistics_and_quire_stats_have_the_reason(services: LocalServices) -> None:
    pair = Pair(services)
    parts = {part.part: part.degraded_reason for part in pair.worker_statistics().step_parts}
    pair.close()
    assert {part for part, reason in parts.items() if reason} == {"modules"}
    (pool,) = json.loads(stats(services, "--json"))["pools"]
    assert {part["part"]: part["degraded_reason"] for part in pool["step_parts"]} == parts
    shown = " ".join(stats(services).split())
    assert f"DEGRADED modules: the model's own: {REASON}" in shown
