"""The unit files, by systemd's own tools and by our own parser. boot_systemd.py runs them under a real systemd."""

from __future__ import annotations

import shlex
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from deploy.tools import DEPLOY, find, parse_service

from quire.serving.addresses import parse_unix_address

UNITS = DEPLOY / "systemd"
CACHEMGR, WORKER = UNITS / "quire-cachemgr.service", UNITS / "quire-worker@.service"
GATEWAY, HOLDER = UNITS / "quire-gateway.service", UNITS / "quire-holder@.service"
SERVICES = {"cachemgr": CACHEMGR, "worker": WORKER, "gateway": GATEWAY}
COMMANDS = {"cachemgr": "cachemgr", "worker": "worker", "gateway": "serve"}
# Tenths of systemd's exposure level.
MOST_EXPOSED = 15
DRAIN_MARGIN_S = 5
INSTANCE = "default"
# Of a worker with a holder, and of one of several ranks: on one machine, and on several.
DROP_INS = {
    "holder": ["keep-cache"],
    "one machine": ["ranks"],
    "several machines": ["ranks", "network", "torchrun"],
}
TORCHRUN_END_S = 30
"""That torchrun gives its ranks to end after SIGTERM."""

Settings = dict[str, list[str]]


def tool(name: str) -> str:
    return find(name, required_by="QUIRE_REQUIRE_SYSTEMD", for_what="deploy/systemd")


def read_unit(path: Path) -> Settings:
    """Every value of every setting, in order; an empty one takes back those before it."""
    settings: Settings = defaultdict(list)
    for line in path.read_text().splitlines():
        name, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            settings[name] = [*settings[name], value] if value else []
    return settings


def read_environment(path: Path, *, commented: bool) -> dict[str, str]:
    """An environment file; `commented`: with its examples behind #."""
    lines = path.read_text().splitlines()
    if commented:
        lines = [line.removeprefix("#") for line in lines]
    pairs = [line.split("=", 1) for line in lines if "=" in line and line.split("=")[0].isidentifier()]
    return {name: "".join(shlex.split(value)) for name, value in pairs}


def environment_of(settings: Settings) -> dict[str, str]:
    words = [word for value in settings["Environment"] for word in shlex.split(value.replace("%i", INSTANCE))]
    return dict(word.split("=", 1) for word in words)


def command_of(settings: Settings) -> list[str]:
    (command,) = settings["ExecStart"]
    return command.replace("%i", INSTANCE).split()


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A root with the files of the units, as docs/how-to/deployment.md installs them."""
    folder = tmp_path / "etc/systemd/system"
    folder.mkdir(parents=True)
    for path in (*SERVICES.values(), HOLDER):
        (folder / path.name).write_text(path.read_text())
    for name in ("quire", "torchrun"):
        program = tmp_path / "opt/quire/bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    return tmp_path


def instance_of(template: Path) -> str:
    return template.name.replace("@", f"@{INSTANCE}")


@pytest.mark.parametrize("unit", [CACHEMGR.name, GATEWAY.name, instance_of(WORKER), instance_of(HOLDER)])
def test_systemd_finds_nothing_wrong(installed: Path, unit: str) -> None:
    """systemd would log nothing about the file: no unknown settings, no ignored values."""
    for path in (installed / "etc/systemd/system").iterdir():
        text = path.read_text().replace("\n#MemoryMax=", "\nMemoryMax=")
        assert text.count("\nMemoryMax=") == 1
        path.write_text(text)
    assert faults_of(unit, installed) == []


@pytest.mark.parametrize("names", DROP_INS.values(), ids=DROP_INS)
def test_systemd_finds_nothing_wrong_with_drop_ins(installed: Path, names: list[str]) -> None:
    folder = installed / "etc/systemd/system" / f"{WORKER.name}.d"
    folder.mkdir()
    for name in names:
        (folder / f"{name}.conf").write_text((UNITS / f"{name}.conf").read_text())
    unit = instance_of(WORKER)
    assert faults_of(unit, installed) == []
    (folder / "wrong.conf").write_text("[Service]\nExecStarts=/bin/true\n")
    (fault,) = faults_of(unit, installed)
    assert "ExecStarts" in fault, "it reads what is beside the unit"


def faults_of(unit: str, installed: Path) -> list[str]:
    """Lines that systemd would log about our files."""
    folder = installed / "etc/systemd/system"
    for path in folder.glob("**/*.*"):
        if path.is_file():
            path.write_text(path.read_text().replace("ExecStart=/opt/", f"ExecStart={installed}/opt/"))
    for template in (WORKER, HOLDER):
        instance = folder / instance_of(template)
        if not instance.is_symlink():
            instance.symlink_to(template.name)
    command = [tool("systemd-analyze"), "verify", "--man=no", str(folder / unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    faults = [line for line in done.stderr.splitlines() if "quire" in line or str(installed) in line]
    assert done.returncode == 0 or faults
    return faults


@pytest.mark.parametrize("drop_ins", [[], ["network"], *DROP_INS.values()], ids=["this machine", "network", *DROP_INS])
@pytest.mark.parametrize("path", [*SERVICES.values(), HOLDER], ids=[*SERVICES, "holder"])
def test_little_is_exposed(installed: Path, path: Path, drop_ins: list[str]) -> None:
    unit = installed / "etc/systemd/system" / path.name
    for name in drop_ins:
        more = (UNITS / f"{name}.conf").read_text().partition("[Service]\n")[2]
        unit.write_text(unit.read_text().replace("\n\n[Install]", f"\n{more}\n[Install]"))
    command = [tool("systemd-analyze"), "security", "--offline=yes", f"--threshold={MOST_EXPOSED}", str(unit)]
    done = subprocess.run([*command, "--no-pager"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout[-200:]


def test_a_worker_is_confined_like_cachemgr_but_for_what_is_said() -> None:
    """The exceptions of docs/how-to/deployment.md, in their words."""
    cachemgr, worker = read_unit(CACHEMGR), read_unit(WORKER)
    own = {"ExecStart", "Environment", "EnvironmentFile", "Description", "User", "Group", "ReadWritePaths"}
    own |= {"StartLimitIntervalSec", "StartLimitBurst", "WatchdogSec", "TimeoutStartSec", "RestartSec", "After"}
    own |= {"RuntimeDirectory", "RuntimeDirectoryMode", "RuntimeDirectoryPreserve"}
    differing = {name for name in cachemgr if worker.get(name) != cachemgr[name]} - own
    assert differing == {"MemoryDenyWriteExecute", "PrivateDevices", "SystemCallFilter"}
    assert cachemgr["SystemCallFilter"] == ["@system-service", "~@privileged @resources"]
    assert worker["SystemCallFilter"] == ["@system-service", "~@privileged"]
    assert worker["DeviceAllow"] == ["char-nvidia* rw"]


@pytest.mark.parametrize(("path", "own"), [(GATEWAY, set()), (HOLDER, {"RestrictAddressFamilies"})])
def test_gateway_and_holder_are_confined_like_cachemgr(path: Path, own: set[str]) -> None:
    cachemgr, other = read_unit(CACHEMGR), read_unit(path)
    alike = ("Private", "Protect", "Restrict", "Lock", "MemoryDeny", "System")
    same = [name for name in cachemgr if name.startswith(alike) and name not in own]
    same += ["NoNewPrivileges", "CapabilityBoundingSet", "AmbientCapabilities", "DevicePolicy", "IPAddressDeny"]
    assert {name: other[name] for name in same} == {name: cachemgr[name] for name in same}


def test_a_holder_is_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same user and address; and the worker does not end with it."""
    holder, worker, drop_in = read_unit(HOLDER), read_unit(WORKER), read_unit(UNITS / "keep-cache.conf")
    program, name, *flags = command_of(holder)
    assert (program, name) == ("/opt/quire/bin/quire", "holder")
    (address,) = environment_of(drop_in).values()
    assert parse_service("holder", flags, environment_of(holder), monkeypatch)["listen"] == parse_unix_address(address)
    environment = environment_of(worker) | environment_of(drop_in) | {"QUIRE_WORKER_MODEL": "some"}
    assert parse_service("worker", [], environment, monkeypatch)["holder"] == parse_unix_address(address)
    assert address.startswith(f"unix:{holder['ReadWritePaths'][0]}/")
    assert (holder["User"], holder["ReadWritePaths"]) == (worker["User"], worker["ReadWritePaths"])
    assert drop_in["Wants"] == drop_in["After"] == [HOLDER.name.replace("@", "@%i")]
    assert not {"Requires", "BindsTo", "PartOf"} & (set(drop_in) | set(holder))


def test_users_and_folders_are_what_the_units_need(tmp_path: Path) -> None:
    tools = tool("systemd-sysusers"), tool("systemd-tmpfiles")
    (tmp_path / "etc").mkdir()
    for name, program in zip(("sysusers.d", "tmpfiles.d"), tools, strict=True):
        flags = ("--create",) if name == "tmpfiles.d" else ()
        command = [program, *flags, f"--root={tmp_path}", str(UNITS / name / "quire.conf")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        if "Operation not permitted" in done.stderr:
            pytest.skip("*** only root may make folders of other users: tmpfiles.d NOT tested ***")
        assert done.returncode == 0, done.stderr
    users = {line.split(":")[0]: line.split(":")[2] for line in (tmp_path / "etc/passwd").read_text().splitlines()}
    groups = {line.split(":")[0]: line.split(":")[2] for line in (tmp_path / "etc/group").read_text().splitlines()}
    for service, path in SERVICES.items():
        settings = read_unit(path)
        assert settings["User"] == settings["Group"] == [f"quire-{service}"]
        (runtime,) = settings["ReadWritePaths"]
        found = (tmp_path / runtime.lstrip("/")).stat()
        # Sockets get the folder's group, and others of the group may use them, not put others in their place.
        assert (found.st_uid, found.st_gid) == (int(users[f"quire-{service}"]), int(groups["quire"]))
        assert found.st_mode & 0o7777 == 0o2750
        assert int(settings["UMask"][0], 8) == 0o007
        secrets = (tmp_path / "etc/quire" / service).stat()
        assert (secrets.st_uid, secrets.st_gid) == (0, int(groups[f"quire-{service}"]))
        assert secrets.st_mode & 0o7777 == 0o750
    assert set(read_unit(WORKER)["SupplementaryGroups"]) <= set(groups)


@pytest.mark.parametrize("commented", [False, True], ids=["as shipped", "with what is commented out"])
@pytest.mark.parametrize("service", SERVICES)
def test_our_parser_takes_what_a_unit_says(service: str, commented: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read_unit(SERVICES[service])
    program, name, *flags = command_of(settings)
    assert (program, name) == ("/opt/quire/bin/quire", COMMANDS[service])
    environment = environment_of(settings) | read_environment(UNITS / f"{service}.env", commented=commented)
    values = parse_service(name, flags, environment, monkeypatch)
    (runtime,) = settings["ReadWritePaths"]
    assert str(values["listen"][0]).startswith(f"unix:{runtime}/")
    assert values["metrics_listen"] is not None


def test_torchrun_takes_what_a_group_of_machines_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import get_args_parser

    settings, drop_in = read_unit(WORKER), read_unit(UNITS / "torchrun.conf")
    program, *flags = command_of(drop_in)
    assert program == "/opt/quire/bin/torchrun"
    environment = environment_of(settings) | environment_of(drop_in)
    environment |= read_environment(UNITS / "worker.env", commented=True)
    for name, value in environment.items():
        if name.startswith("PET_"):
            monkeypatch.setenv(name, value)
    torchrun = get_args_parser().parse_args(flags)
    assert (torchrun.module, torchrun.training_script) == (True, "quire.worker")
    values = parse_service("worker", torchrun.training_script_args, environment, monkeypatch)
    assert values["tensor_parallel_size"] == int(torchrun.nnodes) * int(torchrun.nproc_per_node) == 4
    assert environment["CUDA_VISIBLE_DEVICES"].count(",") + 1 == int(torchrun.nproc_per_node)
    assert (torchrun.node_rank, torchrun.rdzv_backend, torchrun.master_port) == (0, "static", 29500)
    assert values["drain_timeout"] < TORCHRUN_END_S <= float(settings["TimeoutStopSec"][0]) - DRAIN_MARGIN_S


@pytest.mark.parametrize("path", SERVICES.values(), ids=SERVICES)
def test_a_stop_leaves_time_to_drain(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read_unit(path)
    assert settings["KillMode"] == ["mixed"]
    assert "KillSignal" not in settings  # SIGTERM
    service = command_of(settings)[1]
    environment = environment_of(settings) | {"QUIRE_WORKER_MODEL": "some"}
    environment = {name: value for name, value in environment.items() if name.startswith(f"QUIRE_{service.upper()}_")}
    drain_s = parse_service(service, [], environment, monkeypatch)["drain_timeout"]
    assert float(settings["TimeoutStopSec"][0]) >= drain_s + DRAIN_MARGIN_S


@pytest.mark.parametrize("path", SERVICES.values(), ids=SERVICES)
def test_readiness_and_watchdog_are_asked_for(path: Path) -> None:
    settings = read_unit(path)
    assert settings["Type"] == ["notify"]
    assert settings["NotifyAccess"] == ["main"]
    assert float(settings["WatchdogSec"][0]) >= 10  # AuditPool holds up the loop for as long as the pool is large
    assert settings["Restart"] == ["on-failure"]


@pytest.mark.parametrize("path", [WORKER, GATEWAY], ids=["worker", "gateway"])
def test_none_needs_the_cachemgr_of_its_machine(path: Path) -> None:
    settings = read_unit(path)
    tying = {"Requires", "BindsTo", "PartOf", "Requisite", "Upholds"}
    assert not tying & set(settings)
    assert settings["Wants"] == [CACHEMGR.name]


def test_the_address_of_the_unit_is_one_where_clients_look() -> None:
    from quire.serving.runtime_folder import SYSTEM_FOLDER

    listen = environment_of(read_unit(CACHEMGR))["QUIRE_CACHEMGR_LISTEN"]
    assert listen == environment_of(read_unit(WORKER))["QUIRE_WORKER_CACHEMGR"] == f"unix:{SYSTEM_FOLDER}/cachemgr.sock"
