"""Prometheus beside the services: the programs, the names in its files, a server of a test's own."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from deadlines import DEADLINE_S
from deploy.tools import DEPLOY, find
from integration.protocol_client import await_that
from ports import free_port

RULES = DEPLOY / "prometheus"
DASHBOARDS = DEPLOY / "grafana"
_KEYWORDS = {"and", "or", "unless", "bool", "offset", "on", "ignoring", "by", "without", "group_left", "group_right"}


def tool(name: str) -> str:
    """The path of a Prometheus program; without it the test is skipped, or fails if QUIRE_REQUIRE_PROMETHEUS is 1."""
    return find(name, required_by="QUIRE_REQUIRE_PROMETHEUS", for_what="Prometheus' rules and scraping")


def rules(file: str) -> list[dict[str, Any]]:
    """All rules of a file of deploy/prometheus."""
    content = yaml.safe_load((RULES / file).read_text())
    return [rule for group in content["groups"] for rule in group["rules"]]


def recorded() -> dict[str, str]:
    """Expressions of the recording rules by name."""
    return {rule["record"]: rule["expr"] for rule in rules("recording.yml")}


def scaled_by() -> dict[str, str]:
    """Return the queries of the autoscalers' metrics by name, as prometheus-adapter sends them."""
    content = yaml.safe_load((RULES / "adapter.yml").read_text())
    return {
        rule["name"]["as"]: rule["metricsQuery"].replace("<<.LabelMatchers>>", "") for rule in content["externalRules"]
    }


def dashboards() -> dict[str, dict[str, Any]]:
    """The dashboards by their file's name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))}


def panels(board: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The panels of a dashboard, without its rows' titles."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions(board: Mapping[str, Any]) -> list[str]:
    """The queries of a dashboard, as Prometheus would read them: with its variables filled in."""
    asked = [target["expr"] for panel in panels(board) for target in panel["targets"]]
    return [re.sub(r"\$\w+", "main", expr.replace("$__rate_interval", "5m")) for expr in asked]


def metrics_in(expr: str) -> set[str]:
    """The names of the metrics in an expression."""
    bare = re.sub(r'"(?:\\.|[^"\\])*"', "", expr)
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]", " ", bare)
    bare = re.sub(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    names = re.findall(r"(?<![\w:.])([A-Za-z_:][\w:]*)(?!\w|:|\s*\()", bare)
    return {name for name in names if name not in _KEYWORDS}


def labels_in(expr: str) -> dict[str, set[str]]:
    """Labels that an expression chooses metrics by, by metric."""
    chosen = re.findall(r"([A-Za-z_:][\w:]*)\{([^}]*)\}", expr)
    return {name: set(re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', inner)) for name, inner in chosen}


class Server:
    """A running Prometheus; queries go over HTTP."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def is_ready(self) -> bool:
        """True if it answers questions."""
        try:
            with self._open(f"{self._base}/-/ready", timeout=DEADLINE_S) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its API."""
        url = f"{self._base}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with self._open(url, timeout=DEADLINE_S) as answer:
            return json.load(answer)["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series that an expression has now."""
        result: list[dict[str, Any]] = self.ask("query", query=expr)["result"]
        return result


@contextlib.contextmanager
def running(folder: Path, targets: Mapping[str, str]) -> Iterator[Server]:
    """A Prometheus with the shipped configuration that scrapes these addresses, by job, every second."""
    config = yaml.safe_load((RULES / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "500ms"}
    config["rule_files"] = [str(RULES / name) for name in config["rule_files"]]
    assert {job["job_name"] for job in config["scrape_configs"]} == targets.keys()
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()  # it does not say which port it took for 0
    command = [
        *(tool("prometheus"), f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"),
        *(f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"),
    ]
    with (folder / "prometheus.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            server = Server(port)
            await_that("Prometheus is ready", lambda: server.is_ready() or process.poll() is not None)
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            yield server
        finally:
            process.terminate()
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
