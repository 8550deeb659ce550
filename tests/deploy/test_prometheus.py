"""Rules, alerts and dashboards: every name in them is on a page of ours, and a real Prometheus does what they say."""

from __future__ import annotations

import asyncio
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from deadlines import DEADLINE_S
from deploy.prometheus_server import (
    DASHBOARDS,
    RULES,
    Server,
    dashboards,
    expressions,
    labels_in,
    metrics_in,
    panels,
    recorded,
    rules,
    running,
    scaled_by,
    tool,
)
from deploy.tools import DEPLOY, ROOT
from integration.protocol_client import await_that
from prometheus_client.metrics_core import Metric

from quire.cachemgr.catalog import Catalog
from quire.cachemgr.metrics import metric_families as cachemgr_families
from quire.cachemgr.service.servicer import CacheServicer
from quire.cli.launch import LocalServices
from quire.cli.service_process import ServiceProcess
from quire.client import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from quire.client.engine.metrics import EngineLook, Measured
from quire.client.engine.metrics import families as engine_families
from quire.client.engine.outputs import Chunk
from quire.client.engine.scheduling.plans import SchedulerLimits
from quire.client.engine.scheduling.scheduler import Scheduler
from quire.client.engine.scheduling.sequence import FinishReason
from quire.gateway.adapters import AdapterRequests
from quire.gateway.kept_responses import KeptResponses
from quire.gateway.metrics import GatewayMetrics, kept_families
from quire.gateway.routing.backend import BackendStatistics, PoolUse
from quire.serving.interceptor import CallStatistics
from quire.serving.metrics import ProcessCollector, build_family, certificate_family

OPERATIONS = ROOT / "docs" / "how-to" / "operations.md"
OBSERVABILITY = ROOT / "docs" / "how-to" / "observability.md"
RULES_TEST = Path(__file__).with_name("prometheus_rules_test.yml")
METRICS_FLAGS = ("--metrics-listen", "127.0.0.1:0")
# Of Prometheus itself.
MADE_BY_PROMETHEUS = {"up"}
COUNTER_SUFFIXES = ("_total", "_bucket", "_sum", "_count")
# For looking closer, when something else has shown that it is worth it.
UNSHOWN = {
    # Of drafts: the engine that sends them decides by its own counts.
    "quire_cache_accepted_draft_tokens_total",
    "quire_cache_drafted_tokens_total",
    # Of copies of evicted blocks, which are off by default: the hit ratio contains what they find.
    "quire_cache_blocks_evicted_from_host_total",
    "quire_cache_blocks_kept_in_host_total",
    "quire_cache_host_hit_tokens_total",
    # Of a disk for them, off by default too: `quire top` shows it, and the mode of a disk that fails is degraded.
    "quire_cache_blocks_evicted_from_disk_total",
    "quire_cache_blocks_lost_on_disk_total",
    "quire_cache_blocks_read_from_disk_total",
    "quire_cache_blocks_written_to_disk_total",
    "quire_kv_disk_blocks",
    "quire_worker_disk_blocks_total",
    "quire_worker_disk_failures_total",
    "quire_worker_disk_seconds_total",
    # Of kept prefixes: `quire top` and the alert on a tenant's limit show what there is to do.
    "quire_cache_kept_blocks_evicted_total",
    "quire_cache_prefix_written_tokens_total",
    "quire_gateway_prefix_cache_writes_total",
    "quire_gateway_tenant_cache_write_tokens_total",
    "quire_gateway_tenant_cached_tokens_total",
    "quire_kv_kept_blocks",
    "quire_gateway_kept_response_bytes",
    "quire_gateway_kept_responses",
    "quire_gateway_kept_responses_dropped_total",
    "quire_worker_attached",
    "quire_worker_copied_blocks_total",
    # Of drafts: the engine's figures show what they gain.
    "quire_worker_accepted_draft_tokens_total",
    "quire_worker_drafted_tokens_total",
    "quire_worker_open_leases",
    "quire_worker_rank_exchange_seconds_total",
    "quire_worker_rank_order_bytes_total",
    "quire_worker_rank_orders_total",
    "quire_worker_ranks",
    "quire_worker_sequences",
    "quire_worker_step_gap_seconds",
    # For routers, which read them of each gateway.
    "vllm:cache_config_info",
    "vllm:kv_cache_usage_perc",
    "vllm:lora_requests_info",
}
ALERTS = {rule["alert"]: rule for rule in rules("alerts.yml")}
BOARDS = dashboards()
Names = dict[str, set[str]]
"""Labels by the names of samples."""


# What there is.


def engine_names() -> Names:
    """On the page of an engine that has done nothing."""
    limits = SchedulerLimits(
        max_step_tokens=1,
        max_running_sequences=1,
        block_size=1,
        num_blocks=1,
        max_sequence_tokens=1,
        vocabulary_size=1,
    )
    scheduler = Scheduler(limits, speculative=SpeculativeConfig("suffix"))
    host_bytes = {"offload": 0, "restore": 0}
    look = EngineLook("p", "m", scheduler.statistics(), 0, 0, 0, host_bytes, Measured(), scheduler.drafters)
    return {sample.name: set(sample.labels) for family in engine_families(look) for sample in family.samples}


class OneModel:
    """A backend as the gateway's metrics see it."""

    model_names = ("m",)
    is_ready = True
    max_adapters = 0
    pool_uses = (PoolUse(block_size=16, num_blocks=8, num_used=2),)

    def statistics(self) -> BackendStatistics:
        return BackendStatistics(num_running=0, num_waiting=0, preemptions=0, prompt_tokens=0, cached_tokens=0)


def gateway_families() -> list[Metric]:
    """The metric families of a gateway that has answered one request."""
    measures = GatewayMetrics()
    measures.answered("/v1/completions", 200)
    with measures.request("m", 3, tenant="t") as request:
        request.chunk(Chunk(0, "a", (1,), finish_reason=FinishReason.LENGTH), 0.0)
    kept = KeptResponses(keep_s=1.0, max_tenant_bytes=1, clock=time.monotonic).statistics()
    models: Any = [OneModel()]
    adapters = AdapterRequests().families(models)
    return [*measures.families(models), *adapters, *kept_families(kept), build_family()]


def gateway_names() -> Names:
    return {sample.name: set(sample.labels) for family in gateway_families() for sample in family.samples}


def cachemgr_names() -> set[str]:
    """On the page of a cachemgr that has no pool."""
    catalog = Catalog(term=1)

    async def read() -> set[str]:
        servicer = CacheServicer(catalog).statistics()
        families = (
            *cachemgr_families(catalog, servicer, CallStatistics(0, {})),
            certificate_family(None),
            build_family(),
        )
        return {sample_name(family) for family in families}

    return asyncio.run(read())


def sample_name(family: Any) -> str:
    return str(family.name) + {"counter": "_total", "info": "_info"}.get(family.type, "")


def documented() -> Names:
    """The tables of docs/how-to/operations.md, which test_metrics holds against the pages of both services."""
    section = OPERATIONS.read_text().split("\n## Metrics\n")[1].split("\n## ")[0]
    cells = " ".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    return {
        name: set(labels.split(",")) - {""} for name, labels in re.findall(r"`(quire_\w+)(?:\{([\w,]*)\})?`", cells)
    }


def process_names() -> set[str]:
    return {sample_name(family) for family in ProcessCollector(registry=None).collect()}


def known() -> Names:
    """Every name that a rule may use, with its labels; those that Prometheus adds are on all."""
    services = documented()
    names: Names = {**services, **engine_names(), **gateway_names()}
    names |= {name: set() for name in process_names() | MADE_BY_PROMETHEUS}
    for name in recorded():
        names[name] = names.get(name, set()) | {"pool", "model", "model_name", "finished_reason", "le"}
    return {name: labels | {"job", "instance"} for name, labels in names.items()}


KNOWN = known()
USED = {
    **{f"recording rule {name}": expr for name, expr in recorded().items()},
    **{f"alert {name}": rule["expr"] for name, rule in ALERTS.items()},
    **{f"metric of an autoscaler {name}": expr for name, expr in scaled_by().items()},
    **{f"{file} {i}": expr for file, board in BOARDS.items() for i, expr in enumerate(expressions(board))},
}


def test_a_fresh_cachemgr_has_what_is_documented_of_it() -> None:
    assert cachemgr_names() == {name for name in documented() if not name.startswith("quire_worker_")}


@pytest.mark.parametrize("where", USED)
def test_every_name_that_is_used_is_there(where: str) -> None:
    names = metrics_in(USED[where])
    assert names
    assert names - KNOWN.keys() == set()


@pytest.mark.parametrize("where", USED)
def test_every_label_that_is_chosen_by_is_there(where: str) -> None:
    for name, labels in labels_in(USED[where]).items():
        assert labels <= KNOWN[name], name


def test_every_metric_is_shown_somewhere_but_for_few() -> None:
    shown = set().union(*(metrics_in(expr) for expr in USED.values()))
    ours = {name for name in documented() | engine_names() | gateway_names() if not name.endswith("_created")}
    assert ours - shown == UNSHOWN


@pytest.mark.parametrize("where", [where for where in USED if not where.startswith("recording rule vllm")])
def test_counters_are_only_used_by_their_rates(where: str) -> None:
    expr = re.sub(r"\b(?:rate|increase)\(\s*[\w:]+(?:\{[^}]*\})?\[[^]]+\]\s*\)", " ", USED[where])
    assert not [name for name in metrics_in(expr) if name.endswith(COUNTER_SUFFIXES) and where != "alert QuireDefect"]


@pytest.mark.parametrize("where", USED)
def test_rates_are_of_counters(where: str) -> None:
    for name in re.findall(r"\b(?:rate|increase)\(\s*([\w:]+)", USED[where]):
        assert name.endswith(COUNTER_SUFFIXES)


@pytest.mark.parametrize(
    ("expr", "names"),
    [
        ('sum by (pool) (rate(a_total{state="b"}[5m])) / on (x) group_left (y) c:d', {"a_total", "c:d"}),
        ("a unless b offset 10m > 0.5e3", {"a", "b"}),
        ('label_replace(a, "b", "$1", "c", "(d)")', {"a"}),
        ("histogram_quantile(0.5, sum by (le) (rate(a_bucket[$__rate_interval])))", {"a_bucket"}),
    ],
)
def test_names_are_found_in_expressions(expr: str, names: set[str]) -> None:
    assert metrics_in(expr) == names


# Alerts.


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_to_do(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["runbook"] == f"docs/how-to/observability.md#{name.lower()}"
    section = OBSERVABILITY.read_text().split(f"\n### {name}\n")[1].split("\n#")[0]
    assert len(section.split()) > 15


def test_no_runbook_is_left_over() -> None:
    assert set(re.findall(r"^### (Quire\w+)$", OBSERVABILITY.read_text(), re.MULTILINE)) == ALERTS.keys()


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_has_a_test_that_it_fires_and_one_that_it_does_not(name: str) -> None:
    tests = yaml.safe_load(RULES_TEST.read_text())["tests"]
    ours = [each for test in tests for each in test.get("alert_rule_test", []) if each["alertname"] == name]
    assert [each for each in ours if each.get("exp_alerts")]
    assert [each for each in ours if not each.get("exp_alerts")]


# The gateway.


def test_the_gateway_has_what_is_documented_of_it() -> None:
    section = OBSERVABILITY.read_text().split("\n## The gateway\n")[1].split("\n## ")[0]
    cells = " ".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    named = re.findall(r"`([\w:]+)(?:\{([\w,]*)\})?`", cells)
    assert Counter(name for name, _ in named) == Counter(sample_name(family) for family in gateway_families())
    there = gateway_names()
    for name, labels in named:
        assert set(labels.split(",")) - {""} <= there.get(name, there.get(f"{name}_sum", set())), name


# Names that vLLM gives.


def test_vllm_names_and_what_they_stand_for_are_documented() -> None:
    section = OBSERVABILITY.read_text().split("\n## Dashboards made for vLLM\n")[1].split("\n## ")[0]
    table = section.split("Quire does not have")[0]
    named = set(re.findall(r"`(vllm:\w+)`", table))
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in recorded() if name.startswith("vllm:")}
    assert named == families


def test_histograms_are_recorded_whole() -> None:
    names = recorded().keys()
    for stem in {name.removesuffix("_bucket") for name in names if name.endswith("_bucket")}:
        assert {f"{stem}_bucket", f"{stem}_sum", f"{stem}_count"} <= names


# Dashboards.


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_is_in_order(name: str) -> None:
    board = BOARDS[name]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    cells = [
        (x, y)
        for position in (panel["gridPos"] for panel in board["panels"])
        for x in range(position["x"], position["x"] + position["w"])
        for y in range(position["y"], position["y"] + position["h"])
    ]
    assert len(set(cells)) == len(cells), "panels lie on each other"
    assert max(x for x, _ in cells) < 24
    for panel in panels(board):
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGH"[: len(panel["targets"])])
        for each in (panel, *panel["targets"]):
            assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_uses_the_variables_it_has(name: str) -> None:
    board = BOARDS[name]
    variables = {each["name"] for each in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", " ".join(target["expr"] for p in panels(board) for target in p["targets"])))
    assert used - {"__rate_interval"} == variables - {"datasource"}
    for each in board["templating"]["list"]:
        if each["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", each["definition"]).groups()  # type: ignore[union-attr]
            assert label in KNOWN[metric]


def test_dashboards_have_names_of_their_own() -> None:
    assert len(BOARDS) == len({board["uid"] for board in BOARDS.values()}) == len(list(DASHBOARDS.glob("*"))) == 3


# promtool.


def promtool(*arguments: str) -> str:
    done = subprocess.run(
        [tool("promtool"), *arguments], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_the_configuration_and_its_rules() -> None:
    assert "SUCCESS" in promtool("check", "config", str(RULES / "prometheus.yml"))
    assert "32 rules found" in promtool("check", "rules", str(RULES / "recording.yml"))
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", str(RULES / "alerts.yml"))


def test_the_rules_do_what_they_are_for() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(RULES_TEST))


def test_autoscalers_get_the_queue_and_the_pressure(tmp_path: Path) -> None:
    """Two pools, of which one is full, and two gateways."""
    blocks = {("one", "active"): 80, ("one", "free"): 20, ("two", "active"): 100, ("two", "free"): 0}
    series = {
        f'quire_kv_blocks{{job="quire-cachemgr",instance="i",pool="{pool}",state="{state}"}}': count
        for (pool, state), count in blocks.items()
    }
    series |= {f'vllm:num_requests_waiting{{job="quire-gateway",instance="{i}",model_name="m"}}': i for i in (5, 7)}
    expected = {"quire_waiting_sequences": 12, "quire_pressure_ratio": 0.9}
    assert scaled_by().keys() == expected.keys()
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": f"{value}x8"} for name, value in series.items()],
        "promql_expr_test": [
            {"expr": expr, "eval_time": "1m", "exp_samples": [{"labels": "{}", "value": expected[name]}]}
            for name, expr in scaled_by().items()
        ],
    }
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES / "recording.yml")], "tests": [test]}))
    assert "SUCCESS" in promtool("test", "rules", str(path))


def test_promtool_accepts_what_the_dashboards_ask(tmp_path: Path) -> None:
    every = [expr for board in BOARDS.values() for expr in expressions(board)]
    asked = [{"record": f"asked_{i}", "expr": expr} for i, expr in enumerate(every)]
    (tmp_path / "asked.yml").write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": asked}]}))
    assert f"{len(asked)} rules found" in promtool("check", "rules", str(tmp_path / "asked.yml"))


# A real one.


@dataclass(frozen=True)
class Scraped:
    """A Prometheus that has scraped both services, a gateway and an engine while requests ran."""

    server: Server
    services: LocalServices


def metrics_address(service: ServiceProcess) -> str:
    assert service.log_path is not None
    (address,) = re.findall(r" metrics address=(\S+)", service.log_path.read_text())
    return str(address)


@pytest.fixture(scope="module")
def scraped() -> Iterator[Scraped]:
    tool("prometheus")
    with (
        tempfile.TemporaryDirectory(prefix="q-") as name,
        LocalServices.start(
            model=DEPLOY / "demo/model",
            num_blocks=64,
            extra_cachemgr_args=METRICS_FLAGS,
            extra_worker_args=METRICS_FLAGS,
            http_listen=(),
            extra_gateway_args=METRICS_FLAGS,
        ) as services,
        asyncio.Runner() as runner,
    ):
        yield from scrape_while_generating(runner, services, Path(name))


def scrape_while_generating(runner: asyncio.Runner, services: LocalServices, folder: Path) -> Iterator[Scraped]:
    config = EngineConfig(metrics_listen="127.0.0.1:0", speculative=SpeculativeConfig("suffix"))
    engine = Engine.connect(services.cachemgr_address, config=config)
    runner.run(engine.__aenter__())
    gateway = services.gateway
    try:
        assert engine.metrics_address is not None
        assert gateway is not None
        targets = {
            "quire-cachemgr": metrics_address(services.cachemgr),
            "quire-worker": metrics_address(services.worker),
            "quire-engine": engine.metrics_address,
            "quire-gateway": metrics_address(gateway),
        }
        with running(folder, targets) as server:
            generate_over_http(gateway)
            runner.run(generate_until(engine, lambda: is_recorded(server)))
            yield Scraped(server, services)
    finally:
        runner.run(engine.close())


def generate_over_http(gateway: ServiceProcess) -> None:
    transport = httpx.HTTPTransport(uds=gateway.address.removeprefix("unix:"))
    with httpx.Client(transport=transport, base_url="http://gateway", timeout=DEADLINE_S) as client:
        client.post("/v1/completions", json={"prompt": "The default value is", "max_tokens": 4}).raise_for_status()


def is_recorded(server: Server) -> bool:
    """True if every recording rule has a series."""
    return all(server.query(name) for name in recorded())


async def generate_until(engine: Engine, is_enough: Any) -> None:
    """Requests, one after the other, until they are enough: what is asked in a thread, so that pages are answered."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            await engine.complete(["The default value is"] * 2, SamplingParams(max_tokens=8, temperature=0))
            if await asyncio.to_thread(is_enough):
                return


def test_everything_is_scraped(scraped: Scraped) -> None:
    def jobs_that_are_up() -> set[str]:
        return {series["metric"]["job"] for series in scraped.server.query("up == 1")}

    jobs = {"quire-cachemgr", "quire-worker", "quire-engine", "quire-gateway"}
    await_that("all are scraped", lambda: jobs_that_are_up() == jobs)
    names = set(scraped.server.ask("label/__name__/values"))
    assert {name for name in engine_names() | gateway_names() if not name.endswith("_created")} <= names


@pytest.mark.parametrize("name", recorded())
def test_a_recording_rule_has_a_series(scraped: Scraped, name: str) -> None:
    series = await_that(name, lambda: scraped.server.query(name))
    if name.startswith("vllm:"):
        assert all(each["metric"]["model_name"] == "model" for each in series)


def test_no_alert_is_broken_and_none_fires(scraped: Scraped) -> None:
    groups = scraped.server.ask("rules")["groups"]
    every = [rule for group in groups for rule in group["rules"]]
    assert len(every) == len(recorded()) + len(ALERTS)
    assert {rule["name"]: rule.get("lastError", "") for rule in every if rule["health"] != "ok"} == {}
    assert [rule["name"] for rule in every if rule.get("state") == "firing"] == []


@pytest.mark.parametrize(("board", "asked"), [(name, expr) for name in BOARDS for expr in expressions(BOARDS[name])])
def test_a_panel_asks_what_prometheus_can_answer(scraped: Scraped, board: str, asked: str) -> None:
    for series in scraped.server.query(asked.replace('="main"', '=".*"').replace("[5m]", "[30s]")):
        assert re.fullmatch(r"-?[\d.e+-]+|NaN|\+Inf", series["value"][1])


def test_a_worker_that_dies_is_an_alert_within_its_time(scraped: Scraped) -> None:
    scraped.services.worker.kill()
    await_that(
        "the alerts are pending",
        lambda: (
            {"QuireWorkerDown", "QuirePoolDetached"}
            <= {alert["labels"]["alertname"] for alert in scraped.server.ask("alerts")["alerts"]}
        ),
    )
