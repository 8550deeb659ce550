"""Both units under a real systemd: a container made of Debian packages, booted, looked into, powered off.

    python tests/deploy/boot_systemd.py [--root FOLDER]

Needs root, debootstrap and systemd-nspawn (Debian: debootstrap systemd-container), a Debian mirror, and a Python of the
minor version of one of SUITES: the container uses its packages. Takes two minutes, of which one makes the root file
system; --root keeps it. The last line says how many checks passed; exit status 1 if one did not.

Not covered here: a GPU, and systemd's work at a real boot.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

# isort: split
from deadlines import DEADLINE_S

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "deploy" / "systemd"
# Which Debian has this Python: what was compiled for ours has to run there.
SUITES = {11: "bookworm", 13: "trixie"}
PACKAGES = ("systemd", "systemd-sysv", "dbus", "python3", "python3-venv", "iproute2", "gcc", "libc6-dev")
FOLDERS = ("cachemgr", "worker", "kernels", "client", "serving")
NOT_INSTALLED = shutil.ignore_patterns("core", "go", "__pycache__", "*.proto")
WORKER_ENV = "QUIRE_WORKER_MODEL=/srv/model\nQUIRE_WORKER_NUM_BLOCKS=64\nQUIRE_WORKER_DEVICE=cpu\n"
CACHEMGR, WORKER = "quire-cachemgr.service", "quire-worker@default.service"
# So that a check takes seconds; what the units say themselves is held by test_systemd.py.
SHORT_START_S = 15  # importing torch, before there is a loop, has to fit in
SHORT = {
    CACHEMGR: "[Service]\nWatchdogSec=2\n",
    WORKER: f"[Service]\nWatchdogSec=2\nTimeoutStartSec={SHORT_START_S}\n",
}
OUTSIDE = "192.0.2.1"  # an address of the container that is not loopback
# Outcomes of sandbox_probe.py in both units; what is not here must succeed.
REFUSED = {
    "write /etc": "EROFS",
    "see /root": "EACCES",
    "see other processes": "ENOENT",
    "open a device": "EPERM",
    "raw socket": "EPERM",
    "netlink socket": "EAFNOSUPPORT",
    "send to others": "EPERM",
    "new namespace": "EPERM",
}
SANDBOX = {
    CACHEMGR: {
        "writable and executable memory": "EPERM",
        "compile C": "EROFS",
        "compile a kernel": "EROFS",
        "write /run/quire-worker": "EACCES",
        "read worker's files": "EACCES",
    },
    WORKER: {"write /run/quire": "EACCES", "read cachemgr's files": "EACCES"},
}


class CheckFailed(Exception):
    """A check failed."""


def make_root(folder: Path) -> None:
    """A Debian with systemd and Python, if there is none yet."""
    if (folder / "usr/bin/python3").exists():
        return
    suite = SUITES.get(sys.version_info.minor)
    if suite is None:
        raise SystemExit(f"no Debian here has Python 3.{sys.version_info.minor}: run it with one of {list(SUITES)}")
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", suite, str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def install(root: Path) -> None:
    """Quire, its units and the demo's model, as docs/how-to/deployment.md says, but for pip."""
    venv = root / "opt/quire"
    shutil.rmtree(venv, ignore_errors=True)
    subprocess.run(["chroot", str(root), "python3", "-m", "venv", "--without-pip", "/opt/quire"], check=True)
    packages = next(venv.glob("lib/python3.*/site-packages"))
    (packages / "host.pth").write_text("/site\n")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, packages / "quire" / name, ignore=NOT_INSTALLED)
    for api in ("cache", "compute"):
        shutil.copytree(ROOT / "protos/quire" / api, packages / "quire" / api, ignore=NOT_INSTALLED)
    program = venv / "bin/quire"
    program.write_text("#!/opt/quire/bin/python -P\nfrom quire.client.cli import main\nmain()\n")
    program.chmod(0o755)
    shutil.copytree(ROOT / "deploy/demo/model", root / "srv/model", dirs_exist_ok=True)
    shutil.copy(ROOT / "tests/deploy/sandbox_probe.py", root / "srv")
    (root / "srv/fuse").unlink(missing_ok=True)
    os.mknod(root / "srv/fuse", 0o666 | stat.S_IFCHR, os.makedev(10, 229))
    (root / "srv/fuse").chmod(0o666)
    for source, target in (
        ("*.service", "etc/systemd/system"),
        ("sysusers.d/*", "etc/sysusers.d"),
        ("tmpfiles.d/*", "etc/tmpfiles.d"),
    ):
        (root / target).mkdir(parents=True, exist_ok=True)
        for path in UNITS.glob(source):
            shutil.copy(path, root / target)
    (root / "etc/quire").mkdir(exist_ok=True)
    shutil.copy(UNITS / "cachemgr.env", root / "etc/quire")
    (root / "etc/quire/worker-default.env").write_text(WORKER_ENV)
    for unit, text in SHORT.items():
        (root / f"etc/systemd/system/{unit}.d").mkdir(exist_ok=True)
        (root / f"etc/systemd/system/{unit}.d/short.conf").write_text(text)
    subprocess.run(["systemctl", f"--root={root}", "--quiet", "enable", CACHEMGR, WORKER], check=True)


class Container:
    """A booted root file system."""

    def __init__(self, root: Path, log: Path) -> None:
        site = sysconfig.get_path("purelib")
        command = ["systemd-nspawn", "--boot", "--register=no", "--keep-unit", "--console=pipe"]
        command += ["--capability=all", "--system-call-filter=bpf"]
        command += ["--private-network", f"--bind-ro={site}:/site", "--machine=quire-check", f"--directory={root}"]
        # One hierarchy and bpf are what DeviceAllow= and IPAddressDeny= are made of; without, they are not enforced.
        environment = os.environ | {"SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"}
        with log.open("wb") as output:
            self._nspawn = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
            )
        self._log = log

    def run(self, *command: str) -> str:
        """The output of a command in the container. Raises CheckFailed if it fails."""
        done = self.attempt(*command)
        if done.returncode:
            raise CheckFailed(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def attempt(self, *command: str) -> subprocess.CompletedProcess[str]:
        """The same, however it ends."""
        return subprocess.run([*self._entering(), *command], capture_output=True, text=True, timeout=DEADLINE_S)

    def spawn(self, *command: str) -> subprocess.Popen[bytes]:
        """A command in the container that runs on."""
        return subprocess.Popen([*self._entering(), *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def write(self, path: str, text: str) -> None:
        """A file in the container."""
        command = [*self._entering(), "sh", "-c", f"mkdir -p $(dirname '{path}') && cat > '{path}'"]
        subprocess.run(command, input=text, text=True, check=True, timeout=DEADLINE_S)

    def show(self, unit: str, *names: str) -> tuple[str, ...]:
        """Properties of a unit."""
        return tuple(self.run("systemctl", "show", "--value", "--property", name, unit) for name in names)

    def await_that(self, what: str, holds: Callable[[], bool]) -> None:
        """Asks until it is so. Raises CheckFailed when that takes too long."""
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            if time.monotonic() > deadline or self._nspawn.poll() is not None:
                raise CheckFailed(f"not so in time: {what}\n{self._log.read_text()[-2000:]}{self._journal()}")
            time.sleep(0.2)

    def is_booted(self) -> bool:
        """True if its systemd has come so far that services are started."""
        try:
            return self.attempt("systemctl", "is-active", "basic.target").returncode == 0
        except IndexError:  # nspawn has not started it yet
            return False

    def close(self) -> None:
        """Powers off."""
        with contextlib.suppress(IndexError, subprocess.TimeoutExpired):
            self.attempt("systemctl", "poweroff")
            self._nspawn.wait(DEADLINE_S)
        self._nspawn.kill()
        self._nspawn.wait()

    def _journal(self) -> str:
        """The last log lines of our services, and of systemd about them."""
        return self.attempt("journalctl", "--no-pager", "--lines=20", "--unit=quire*").stdout

    def _entering(self) -> list[str]:
        leader = Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children").read_text().split()[0]
        return ["nsenter", f"--target={leader}", "--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup"]


def is_active(box: Container, unit: str) -> bool:
    return box.show(unit, "ActiveState") == ("active",)


def both_serve(box: Container) -> None:
    """Both units come up by themselves, say where they serve, and have not been started twice."""
    for unit in (CACHEMGR, WORKER):
        box.await_that(f"{unit} is active", lambda unit=unit: is_active(box, unit))  # type: ignore[misc]
        status, restarts = box.show(unit, "StatusText", "NRestarts")
        if not status.startswith("serving at unix:/run/quire") or restarts != "0":
            raise CheckFailed(f"{unit}: status {status!r}, {restarts} restarts")


def the_group_may_call_and_others_not(box: Container) -> None:
    """Sockets are for the group quire."""
    nobody = ("setpriv", "--reuid=12345", "--regid=12345")
    generate = ("/opt/quire/bin/quire", "generate", "The", "--max-tokens", "4")
    if not box.run(*nobody, "--groups=quire", *generate):
        raise CheckFailed("a user in the group got no text")
    for path in ("/run/quire/cachemgr.sock", "/run/quire-worker/default.sock"):
        connect = f"import socket; socket.socket(socket.AF_UNIX).connect({path!r})"
        if "PermissionError" not in box.attempt(*nobody, "--clear-groups", "python3", "-c", connect).stderr:
            raise CheckFailed(f"a user outside of the group reaches {path}")


def the_sandbox_holds(box: Container) -> None:
    """In each unit's sandbox its service has the access that it needs, and no other."""
    for unit, expected in SANDBOX.items():
        found = json.loads(probe(box, unit))
        wrong = {name: said for name, said in found.items() if said != expected.get(name, REFUSED.get(name, "ok"))}
        if wrong:
            raise CheckFailed(f"{unit}: {wrong}")


def probe(box: Container, unit: str) -> str:
    """The output of sandbox_probe.py, run once as the unit would be."""
    name = "quire-worker@probe" if unit == WORKER else "quire-probe"
    source = UNITS / ("quire-worker@.service" if unit == WORKER else CACHEMGR)
    lines = [line for line in source.read_text().splitlines() if not line.startswith(("Exec", "Type=", "Watchdog"))]
    lines = [line.replace("EnvironmentFile=", "EnvironmentFile=-").replace("=--", "=-") for line in lines]
    command = f"/opt/quire/bin/python -P /srv/sandbox_probe.py {OUTSIDE}"
    more = f"Type=oneshot\nExecStart={command}\nStandardOutput=truncate:/run/probe.json"
    box.write(f"/run/systemd/system/{name}.service", "\n".join(lines).replace("[Service]", f"[Service]\n{more}"))
    box.run("systemctl", "daemon-reload")
    box.run("systemctl", "start", name)
    return box.run("cat", "/run/probe.json")


def a_worker_starts_as_long_as_it_takes(box: Container) -> None:
    """A worker without a cachemgr is starting, not failed, beyond its start's timeout; then it is active."""
    box.run("systemctl", "stop", CACHEMGR, WORKER)
    box.run("systemctl", "start", "--no-block", "--job-mode=ignore-dependencies", WORKER)
    box.await_that("the worker says that it is starting", lambda: box.show(WORKER, "StatusText") == ("starting",))
    time.sleep(SHORT_START_S + 5)
    state, restarts = box.show(WORKER, "ActiveState", "NRestarts")
    if (state, restarts) != ("activating", "0"):
        raise CheckFailed(f"without a cachemgr the worker is {state} after {restarts} restarts")
    box.run("systemctl", "start", CACHEMGR)
    both_serve(box)


def a_cachemgr_that_dies_takes_no_worker_along(box: Container) -> None:
    """cachemgr killed: started again, and the worker's process stays."""
    before = box.show(WORKER, "MainPID", "NRestarts")
    box.run("systemctl", "kill", "--signal=KILL", CACHEMGR)
    box.await_that("cachemgr is back", lambda: box.show(CACHEMGR, "NRestarts", "ActiveState") == ("1", "active"))
    if box.show(WORKER, "MainPID", "NRestarts") != before:
        raise CheckFailed("the worker was started again")


def a_stuck_loop_is_ended(box: Container) -> None:
    """A process that is stopped feeds no watchdog: each service is ended for it and started again."""
    for unit in (CACHEMGR, WORKER):
        restarts, pid = box.show(unit, "NRestarts", "MainPID")
        box.run("systemctl", "kill", "--signal=STOP", "--kill-whom=main", unit)
        again = (str(int(restarts) + 1), "active")
        box.await_that(f"{unit} is back", lambda u=unit, a=again: box.show(u, "NRestarts", "ActiveState") == a)  # type: ignore[misc]
        if (
            "watchdog"
            not in box.run("journalctl", "--unit", unit, f"_PID={pid}", "+", "_PID=1", f"UNIT={unit}").lower()
        ):
            raise CheckFailed(f"{unit} was not ended by its watchdog")


def num_active_blocks(box: Container) -> int:
    (pool,) = json.loads(box.run("/opt/quire/bin/quire", "stats", "--json"))["pools"]
    return int(pool["statistics"]["block_counts"].get("active_count", 0))


def a_stop_drains(box: Container) -> None:
    """Stopped while a client generates: both end in order, with status 0, and leave no socket."""
    client = box.spawn("/opt/quire/bin/quire", "generate", "The", "--n", "32", "--max-tokens", "400")
    box.await_that("blocks are held", lambda: num_active_blocks(box) > 0)
    box.run("systemctl", "stop", WORKER, CACHEMGR)
    client.wait(DEADLINE_S)
    for unit in (WORKER, CACHEMGR):
        ended = box.show(unit, "Result", "ExecMainStatus", "ActiveState")
        if ended != ("success", "0", "inactive"):
            raise CheckFailed(f"{unit} ended as {ended}")
    if left := box.run("find", "/run/quire", "/run/quire-worker", "-name", "*.sock"):
        raise CheckFailed(f"left behind: {left}")


CHECKS: tuple[Callable[[Container], None], ...] = (
    both_serve,
    the_group_may_call_and_others_not,
    the_sandbox_holds,
    a_worker_starts_as_long_as_it_takes,
    a_cachemgr_that_dies_takes_no_worker_along,
    a_stuck_loop_is_ended,
    a_stop_drains,
)


@contextlib.contextmanager
def booted(root: Path) -> Iterator[Container]:
    """A container, powered off at the end."""
    with tempfile.TemporaryDirectory(prefix="q-") as folder:
        box = Container(root, Path(folder) / "console.log")
        try:
            box.await_that("systemd is up", box.is_booted)
            box.run("ip", "address", "add", f"{OUTSIDE}/32", "dev", "lo")
            yield box
        finally:
            box.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--root", type=Path, help="Where the root file system is made, and kept.")
    given: Path | None = parser.parse_args().root
    with tempfile.TemporaryDirectory(prefix="quire-root-") as made:
        root = given or Path(made)
        make_root(root)
        install(root)
        with booted(root) as box:
            for check in CHECKS:
                try:
                    check(box)
                except CheckFailed as error:
                    print(f"FAILED  {(check.__doc__ or '').strip()}\n{error}", file=sys.stderr)
                    return 1
                print(f"ok  {(check.__doc__ or '').strip()}", flush=True)
            print(box.run("systemctl", "--version").splitlines()[0])
    print(f"systemd: {len(CHECKS)} checks passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
