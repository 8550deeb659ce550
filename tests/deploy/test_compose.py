"""deploy/containers/compose.yaml without Docker: its flags are parsed, its services and probes run here."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from deadlines import DEADLINE_S
from deploy.test_containers import COMMANDS, of_kind, stages
from deploy.tools import DEPLOY, ROOT, SERVERS, parse_service
from integration.protocol_client import await_that
from ports import free_port

from quire.cli.service_process import ServiceProcess

COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "containers/compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
MODEL = "/opt/quire/share/demo-model"


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        yield Path(name)


def mounts_of(service: dict[str, Any]) -> dict[str, str]:
    """Return the named volumes of a service, by the path in its container."""
    return {path: name for name, path in (mount.split(":") for mount in service["volumes"])}


def test_the_services_are_the_images() -> None:
    assert SERVICES.keys() == COMMANDS.keys()
    for name, service in SERVICES.items():
        assert service["image"] == f"quire-{name}:{VERSION}"
        build = service["build"]
        assert (DEPLOY / "containers" / build["context"]).resolve() == ROOT
        assert (ROOT / build["dockerfile"]).name == f"{name}.Containerfile"
        *_, last = stages(name)
        assert of_kind(last, "USER") == [service["user"]]
        assert "entrypoint" not in service
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])


@pytest.mark.parametrize("name", SERVICES)
def test_our_parsers_take_every_flag(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = SERVICES[name]
    values = parse_service(COMMANDS[name], service["command"], {}, monkeypatch)
    assert values["drain_timeout"] + 10 <= int(service["stop_grace_period"].removesuffix("s"))


def test_the_command_line_is_held_against_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match="--lisen"):
        parse_service("cachemgr", ["--lisen=unix:/run/quire/cachemgr.sock"], {}, monkeypatch)


def test_what_a_service_writes_is_on_a_volume_of_its_user() -> None:
    used = set()
    for name, service in SERVICES.items():
        mounts = mounts_of(service)
        used |= set(mounts.values())
        for path in re.findall(r"/(?:run|var)/[\w./-]+", " ".join(service["command"])):
            assert any(path.startswith(f"{mount}/") for mount in mounts), path
        *_, last = stages(name)
        made = re.findall(r"install --directory --owner=64321 \S+ \S+ (\S+)", " ".join(of_kind(last, "RUN")))
        for path, volume in mounts.items():
            options = (COMPOSE["volumes"][volume] or {}).get("driver_opts", {}).get("o", "")
            assert "uid=64321,gid=64321" in options or path in made, (name, path)
    assert used == COMPOSE["volumes"].keys()


def test_one_port_is_open_on_this_machine_alone() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports == ["127.0.0.1:8000:8000"]


def test_the_services_meet_and_their_probes_succeed(folder: Path) -> None:
    """Without its peers a gateway is not healthy, and with them each service is."""
    port = free_port()
    (folder / "state").mkdir()

    def here(text: str) -> str:
        text = text.replace("/run/quire-cachemgr", f"{folder}/state").replace("/run/quire", str(folder))
        return (
            text.replace(MODEL, str(DEPLOY / "demo/model")).replace(":8000", f":{port}").replace("0.0.0.0", "127.0.0.1")
        )

    def is_healthy(name: str) -> bool:
        kind, program, *arguments = SERVICES[name]["healthcheck"]["test"]
        assert (kind, program) == ("CMD", "/opt/quire/bin/python")
        probe = [sys.executable, *(here(argument) for argument in arguments)]
        return subprocess.run(probe, capture_output=True, timeout=DEADLINE_S, check=False).returncode == 0

    started: list[ServiceProcess] = []
    try:
        for name in ("gateway", "worker", "cachemgr"):
            assert not is_healthy("gateway")
            target = SERVERS[COMMANDS[name]].removesuffix(".__main__")
            arguments = [here(flag) for flag in SERVICES[name]["command"]]
            process = ServiceProcess(
                name, target=target, arguments=arguments, address="", log_path=folder / f"{name}.log"
            )
            started.append(process)
            process.start()
        for name in ("cachemgr", "worker", "gateway"):
            await_that(f"{name} is healthy", lambda name=name: is_healthy(name))
        for process in started:
            assert process.is_running, process.log_tail()
            assert process.terminate() == 0
    finally:
        for process in started:
            process.kill()
