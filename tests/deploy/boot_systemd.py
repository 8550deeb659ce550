"""The units under a real systemd: a container made of Debian packages, booted, looked into, powered off.

    python tests/deploy/boot_systemd.py [--root FOLDER]

Needs root, debootstrap and systemd-nspawn (Debian: debootstrap systemd-container), a Debian mirror, and a Python of the
minor version of one of SUITES: the container uses its packages. Takes four minutes, of which one makes the root file
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
from typing import Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in (".", "framework"))

# isort: split
from deadlines import DEADLINE_S
from roots import ROOTS

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "deploy" / "systemd"
# Which Debian has this Python: what was compiled for ours has to run there.
SUITES = {11: "bookworm", 13: "trixie"}
PACKAGES = ("systemd", "systemd-sysv", "dbus", "python3", "python3-venv", "iproute2", "gcc", "libc6-dev")
NOT_INSTALLED = shutil.ignore_patterns("__pycache__", "*.proto")
WORKER_ENV = "QUIRE_WORKER_MODEL=/srv/model\nQUIRE_WORKER_NUM_BLOCKS=64\nQUIRE_WORKER_DEVICE=cpu\n"
CACHEMGR, WORKER = "quire-cachemgr.service", "quire-worker@default.service"
GATEWAY = "quire-gateway.service"
SERVICES = (CACHEMGR, WORKER, GATEWAY)
SOCKETS = ("/run/quire/cachemgr.sock", "/run/quire-worker/default.sock", "/run/quire-gateway/http.sock")
MOST_EXPOSED = 15  # tenths of systemd's exposure level, as in test_systemd.py
# So that a check takes seconds; what the units say themselves is held by test_systemd.py.
SHORT_START_S = 30  # importing torch, before there is a loop, has to fit in
SHORT = {
    CACHEMGR: "[Service]\nWatchdogSec=2\n",
    WORKER: f"[Service]\nWatchdogSec=2\nTimeoutStartSec={SHORT_START_S}\n",
    GATEWAY: f"[Service]\nWatchdogSec=2\nTimeoutStartSec={SHORT_START_S}\n",
}
OUTSIDE = "192.0.2.1"  # an address of the container that is not loopback
NUM_STREAMED = 150  # tokens: some seconds, and less than the drain's time on a slow machine
# Outcomes of sandbox_probe.py in all units; what is not here must succeed.
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
NO_CODE_OF_ITS_OWN = {
    "writable and executable memory": "EPERM",
    "compile C": "EROFS",
    "compile a kernel": "EROFS",
}
SANDBOX = {
    CACHEMGR: {
        **NO_CODE_OF_ITS_OWN,
        **dict.fromkeys(("write /run/quire-worker", "write /run/quire-gateway"), "EACCES"),
        **dict.fromkeys(("read worker's files", "read gateway's files"), "EACCES"),
    },
    WORKER: {
        **dict.fromkeys(("write /run/quire", "write /run/quire-gateway"), "EACCES"),
        **dict.fromkeys(("read cachemgr's files", "read gateway's files"), "EACCES"),
    },
    GATEWAY: {
        **NO_CODE_OF_ITS_OWN,
        **dict.fromkeys(("write /run/quire", "write /run/quire-worker"), "EACCES"),
        **dict.fromkeys(("read cachemgr's files", "read worker's files"), "EACCES"),
    },
}
# Run in the container: a completion through HTTP; prints the lines of the answer as they come.
ASK = """
import sys, urllib.request
request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", sys.argv[1].encode())
for line in urllib.request.urlopen(request, timeout=float(sys.argv[2])):
    print(line.decode(), end="", flush=True)
"""


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
    for name in ROOTS:
        shutil.copytree(ROOT / name / "quire", packages / "quire", ignore=NOT_INSTALLED, dirs_exist_ok=True)
    program = venv / "bin/quire"
    program.write_text("#!/opt/quire/bin/python -P\nfrom quire.cli import main\nmain()\n")
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
    for name in ("cachemgr.env", "gateway.env"):
        shutil.copy(UNITS / name, root / "etc/quire")
    (root / "etc/quire/worker-default.env").write_text(WORKER_ENV)
    for unit, text in SHORT.items():
        (root / f"etc/systemd/system/{unit}.d").mkdir(exist_ok=True)
        (root / f"etc/systemd/system/{unit}.d/short.conf").write_text(text)
    subprocess.run(["systemctl", f"--root={root}", "--quiet", "enable", *SERVICES], check=True)


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


def all_serve(box: Container) -> None:
    """The units come up by themselves, say where they serve, and have not been started twice."""
    for unit, path in zip(SERVICES, SOCKETS, strict=True):
        box.await_that(f"{unit} is active", lambda unit=unit: is_active(box, unit))  # type: ignore[misc]
        status, restarts = box.show(unit, "StatusText", "NRestarts")
        if not status.startswith("serving at ") or f"unix:{path}" not in status or restarts != "0":
            raise CheckFailed(f"{unit}: status {status!r}, {restarts} restarts")


def asking(**fields: Any) -> tuple[str, ...]:
    """The command of a completion through HTTP."""
    return ("python3", "-c", ASK, json.dumps({"prompt": "The", "ignore_eos": True, **fields}), str(DEADLINE_S))


def a_completion_comes_through_http(box: Container) -> None:
    """The gateway answers a completion on loopback, with all of its tokens."""
    answer = json.loads(box.run(*asking(max_tokens=8)))
    if answer["usage"]["completion_tokens"] != 8 or not answer["choices"][0]["text"]:
        raise CheckFailed(f"the gateway answered {answer}")


def little_is_exposed(box: Container) -> None:
    """systemd's own measure of what each unit may do is as good as docs/how-to/deployment.md says."""
    for unit in SERVICES:
        box.run("systemd-analyze", "security", "--no-pager", f"--threshold={MOST_EXPOSED}", unit)


def the_group_may_call_and_others_not(box: Container) -> None:
    """Sockets are for the group quire."""
    nobody = ("setpriv", "--reuid=12345", "--regid=12345")
    generate = ("/opt/quire/bin/quire", "generate", "The", "--max-tokens", "4")
    if not box.run(*nobody, "--groups=quire", *generate):
        raise CheckFailed("a user in the group got no text")
    for path in SOCKETS:
        connect = ("python3", "-c", f"import socket; socket.socket(socket.AF_UNIX).connect({path!r})")
        box.run(*nobody, "--groups=quire", *connect)
        if "PermissionError" not in box.attempt(*nobody, "--clear-groups", *connect).stderr:
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
    name = "quire-worker@probe" if unit == WORKER else unit.replace(".service", "-probe")
    source = UNITS / unit.replace("@default", "@")
    lines = [line for line in source.read_text().splitlines() if not line.startswith(("Exec", "Type=", "Watchdog"))]
    lines = [line.replace("EnvironmentFile=", "EnvironmentFile=-").replace("=--", "=-") for line in lines]
    command = f"/opt/quire/bin/python -P /srv/sandbox_probe.py {OUTSIDE}"
    more = f"Type=oneshot\nExecStart={command}\nStandardOutput=truncate:/run/probe.json"
    box.write(f"/run/systemd/system/{name}.service", "\n".join(lines).replace("[Service]", f"[Service]\n{more}"))
    box.run("systemctl", "daemon-reload")
    box.run("systemctl", "start", name)
    return box.run("cat", "/run/probe.json")


def a_start_takes_as_long_as_it_takes(box: Container) -> None:
    """Without a cachemgr a worker and a gateway are starting, not failed, beyond their starts' timeout; then active."""
    box.run("systemctl", "stop", *SERVICES)
    waiting = (WORKER, GATEWAY)
    box.run("systemctl", "start", "--no-block", "--job-mode=ignore-dependencies", *waiting)
    for unit in waiting:
        box.await_that(f"{unit} is starting", lambda unit=unit: box.show(unit, "StatusText") == ("starting",))  # type: ignore[misc]
    time.sleep(SHORT_START_S + 5)
    for unit in waiting:
        state, restarts = box.show(unit, "ActiveState", "NRestarts")
        if (state, restarts) != ("activating", "0"):
            raise CheckFailed(f"without a cachemgr {unit} is {state} after {restarts} restarts")
    box.run("systemctl", "start", CACHEMGR)
    all_serve(box)


def a_cachemgr_that_dies_takes_none_along(box: Container) -> None:
    """cachemgr killed: started again; the worker's and the gateway's processes stay, and callers get text."""
    others = (WORKER, GATEWAY)
    before = [box.show(unit, "MainPID", "NRestarts") for unit in others]
    box.run("systemctl", "kill", "--signal=KILL", CACHEMGR)
    box.await_that("cachemgr is back", lambda: box.show(CACHEMGR, "NRestarts", "ActiveState") == ("1", "active"))
    box.run(*asking(max_tokens=8))
    if [box.show(unit, "MainPID", "NRestarts") for unit in others] != before:
        raise CheckFailed("the worker or the gateway was started again")


def a_stuck_loop_is_ended(box: Container) -> None:
    """A process that is stopped feeds no watchdog: each service is ended for it and started again."""
    for unit in SERVICES:
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


def a_gateways_stop_drains(box: Container) -> None:
    """A gateway that is stopped while a stream runs: the stream has all of its tokens, then the process ends."""
    client = box.spawn(*asking(max_tokens=NUM_STREAMED, n=4, stream=True, stream_options={"include_usage": True}))
    assert client.stdout is not None
    begun = client.stdout.readline()
    box.run("systemctl", "stop", GATEWAY)
    events = [begun, *client.communicate(timeout=DEADLINE_S)[0].splitlines()]
    lines = [line.removeprefix(b"data: ").strip() for line in events if line.strip()]
    if lines[-1] != b"[DONE]" or json.loads(lines[-2])["usage"]["completion_tokens"] != 4 * NUM_STREAMED:
        raise CheckFailed(f"the stream ended with {lines[-2:]}")
    check_ended(box, GATEWAY)


def a_stop_drains(box: Container) -> None:
    """Stopped while a client generates: both end in order, with status 0, and leave no socket."""
    client = box.spawn("/opt/quire/bin/quire", "generate", "The", "--n", "32", "--max-tokens", "400")
    box.await_that("blocks are held", lambda: num_active_blocks(box) > 0)
    box.run("systemctl", "stop", WORKER, CACHEMGR)
    client.wait(DEADLINE_S)
    check_ended(box, WORKER, CACHEMGR)


def check_ended(box: Container, *units: str) -> None:
    """Raises CheckFailed if a unit has not ended in order, or has left a socket."""
    for unit in units:
        ended = box.show(unit, "Result", "ExecMainStatus", "ActiveState")
        if ended != ("success", "0", "inactive"):
            raise CheckFailed(f"{unit} ended as {ended}")
        path = SOCKETS[SERVICES.index(unit)]
        if not box.attempt("test", "-e", path).returncode:
            raise CheckFailed(f"left behind: {path}")


def a_worker_of_several_ranks_serves(box: Container) -> None:
    """With ranks.conf and a line in its environment a worker of three ranks serves; its stop ends all of them."""
    box.write(f"/etc/systemd/system/{WORKER}.d/ranks.conf", (UNITS / "ranks.conf").read_text())
    box.write("/etc/quire/worker-default.env", f"{WORKER_ENV}QUIRE_WORKER_TENSOR_PARALLEL_SIZE=3\n")
    box.run("systemctl", "daemon-reload")
    box.run("systemctl", "start", CACHEMGR)
    box.run("systemctl", "start", WORKER)
    if not box.run("/opt/quire/bin/quire", "generate", "The", "--max-tokens", "4"):
        raise CheckFailed("three ranks gave no text")
    box.run("systemctl", "stop", WORKER, CACHEMGR)
    check_ended(box, WORKER, CACHEMGR)


CHECKS: tuple[Callable[[Container], None], ...] = (
    all_serve,
    a_completion_comes_through_http,
    little_is_exposed,
    the_group_may_call_and_others_not,
    the_sandbox_holds,
    a_start_takes_as_long_as_it_takes,
    a_cachemgr_that_dies_takes_none_along,
    a_stuck_loop_is_ended,
    a_gateways_stop_drains,
    a_stop_drains,
    a_worker_of_several_ranks_serves,
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
