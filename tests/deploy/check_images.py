"""The images of deploy/containers: built, and started with a read-only root and as their user.

    python tests/deploy/check_images.py [--worker] [--pip-flags FLAGS] [--keep]

Needs root, cargo, a package index, a Debian mirror, and Debian's packages buildah, runc and debootstrap. No image is
pulled: the base images are made of Debian's packages and of this machine's Rust, under the names that the files have.
Without --worker the worker is the checkout's: its image has torch from PyPI, with gigabytes of CUDA's libraries.

All files are in build/images, which is deleted at the end; --keep leaves the images there, and the next run builds only
what has changed. The last line says how many checks passed; exit status 1 if one did not. Without one of the programs
nothing is checked: this is an error if QUIRE_REQUIRE_IMAGES is 1.

Not covered here: a GPU, an architecture other than this machine's, and the official base images.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in (".", "framework"))

# isort: split
from deadlines import DEADLINE_S
from deploy.check_packages import BUILD_TIMEOUT_S, CheckFailed, run
from deploy.tools import DEPLOY, MANIFESTS, ROOT, pod_of

FOLDER = ROOT / "build" / "images"
BUILDAH = ("buildah", f"--root={FOLDER}/storage", f"--runroot={FOLDER}/run")
PROGRAMS = ("buildah", "cargo", "runc", "debootstrap")
# Left out of Debian's slim images.
NOT_IN_SLIM = tuple(f"/usr/share/{name}/*" for name in ("doc", "info", "locale", "man"))
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
# Read by every pip in a build.
PIP_FOLDER = "/etc/xdg/pip"
BASES = {
    "debian:{debian}-slim": f"FROM scratch\nADD root.tar /\nENV PATH={PATH}\n",
    "rust:slim-{debian}": (
        "FROM debian:{debian}-slim\n"
        "RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev\n"
        f"ENV PATH=/usr/local/rust/bin:{PATH} CARGO_HTTP_CAINFO={PIP_FOLDER}/ca.pem\n"
    ),
}
# Needed by a build alone.
LEFTOVERS = ("build", "dist", "opt/quire/bin/pip", "root/.cache", "root/.cargo", "src", "usr/local/rust/bin")
COMPILER = "usr/bin/gcc"
MODEL = "/opt/quire/share/demo-model"
SOCKETS = "/run/quire"
LISTEN = {"cachemgr": "cachemgr.sock", "worker": "worker.sock", "gateway": "http.sock"}
TO_CACHEMGR = f"--cachemgr=unix:{SOCKETS}/{LISTEN['cachemgr']}"
WORKER_FLAGS = ("--device=cpu", "--num-blocks=64")
FLAGS = {
    "cachemgr": ("--state-dir=/run/quire-cachemgr/state",),
    "worker": (TO_CACHEMGR, f"--model={MODEL}", *WORKER_FLAGS),
    "gateway": (TO_CACHEMGR,),
}
NUM_TOKENS = 8


# -- images -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Image:
    """A built image: its configuration, and its files in a folder of this machine."""

    service: str
    root: Path
    config: dict[str, Any]

    @property
    def ids(self) -> tuple[int, int]:
        """Its user and group."""
        user, group = self.config["User"].split(":")
        return int(user), int(group)

    def size_mb(self, part: str = "") -> int:
        """Size of its files, or of those below a folder."""
        return int(
            run("du", "--summarize", "--one-file-system", "--apparent-size", "--block-size=MB", self.root / part).split(
                "MB"
            )[0]
        )


def file_of(service: str) -> Path:
    return DEPLOY / "containers" / f"{service}.Containerfile"


def make_bases(volumes: Sequence[str]) -> None:
    """The base images, under the names in the files."""
    (debian,) = {
        match for service in MANIFESTS for match in re.findall(r"ARG DEBIAN=(\w+)", file_of(service).read_text())
    }
    context = FOLDER / "context"
    if not (context / "root.tar").exists():
        make_root(debian, context / "root.tar")
    for name, text in BASES.items():
        (context / "Containerfile").write_text(text.format(debian=debian))
        build(name.format(debian=debian), context / "Containerfile", context, *volumes)


def make_root(debian: str, archive: Path) -> None:
    """Debian's packages as its slim image has them."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    root = FOLDER / "debian"
    run("debootstrap", "--variant=minbase", debian, root, timeout_s=BUILD_TIMEOUT_S)
    excluded = "".join(f"path-exclude {pattern}\n" for pattern in NOT_IN_SLIM)
    (root / "etc/dpkg/dpkg.cfg.d/slim").write_text(excluded)
    left_out = [
        f"--exclude=.{pattern}" for pattern in (*NOT_IN_SLIM, "/dev/*", "/var/cache/apt/*", "/var/lib/apt/lists/*")
    ]
    run("tar", "--create", "--numeric-owner", *left_out, f"--file={archive}", f"--directory={root}", ".")
    shutil.rmtree(root)


def make_volumes() -> list[str]:
    """The folders of this machine that builds need: Rust, and pip's settings with the certificates that they name."""
    folder = FOLDER / "pip"
    folder.mkdir(parents=True, exist_ok=True)
    lines = run(sys.executable, "-m", "pip", "config", "list").splitlines()
    settings = {}
    for line in sorted(lines, key=lambda line: line.startswith(":env:")):  # these replace those of files
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = ast.literal_eval(value)
    certificates = settings.get("cert") or ssl.get_default_verify_paths().cafile or CERTIFICATES
    shutil.copy(certificates, folder / "ca.pem")
    settings["cert"] = f"{PIP_FOLDER}/ca.pem"
    settings.pop("find-links", None)  # folders of this machine
    (folder / "pip.conf").write_text(
        "\n".join(["[global]", *(f"{name} = {value}" for name, value in settings.items())])
    )
    rust = run("rustc", "--print", "sysroot").strip()
    return [f"--volume={folder}:{PIP_FOLDER}:ro", f"--volume={rust}:/usr/local/rust:ro"]


def build(name: str, file: Path, context: Path, *flags: str) -> None:
    """Build an image of a file. Raises CheckFailed."""
    options = ("--isolation=chroot", "--layers", "--pull=never", f"--file={file}", f"--tag={name}")
    run(*BUILDAH, "build", *options, *flags, context, timeout_s=BUILD_TIMEOUT_S)


def built(service: str, *flags: str) -> Image:
    """The image of a service. Raises CheckFailed."""
    name = f"quire-{service}"
    build(name, file_of(service), ROOT, *flags)
    config = json.loads(run(*BUILDAH, "inspect", "--type=image", name))["OCIv1"]["config"]
    container = run(*BUILDAH, "from", "--pull=never", name).strip()
    return Image(service, Path(run(*BUILDAH, "mount", container).strip()), config)


def remove() -> None:
    """Unmount and delete everything."""
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for path in sorted((path for path in mounted if path.startswith(f"{FOLDER}/")), reverse=True):
        run("umount", path)
    shutil.rmtree(FOLDER, ignore_errors=True)


# -- processes --------------------------------------------------------------------------------------------------------


class Service:
    """A started service of this machine."""

    def __init__(self, name: str, command: Sequence[str], folder: Path) -> None:
        self.name = name
        self.socket = folder / LISTEN[name]
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as output:
            # The services in the images have another user, and connect to this one's socket.
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, umask=0)

    def await_that(self, what: str, holds: Callable[[], bool]) -> None:
        """Ask until it is so. Raises CheckFailed when that takes too long, or if the process has ended."""
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise CheckFailed(f"{self.name} is not {what}: {self._log.read_text()[-3000:]}")
            time.sleep(0.2)

    def signal(self) -> None:
        """Ask it to stop."""
        self.process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """Stop it, in order. Raises CheckFailed if it does not end with status 0, or leaves its socket."""
        self.signal()
        status = self.process.wait(DEADLINE_S)
        if status or self.socket.exists():
            raise CheckFailed(f"{self.name} ended with {status}: {self._log.read_text()[-3000:]}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Container(Service):
    """A started service of an image."""

    def __init__(self, image: Image, arguments: Sequence[str], folder: Path) -> None:
        self._image = image
        bundle = FOLDER / "bundles" / image.service
        bundle.mkdir(parents=True, exist_ok=True)
        (bundle / "config.json").write_text(json.dumps(runtime_config(image, arguments, folder)))
        self._runc = ("runc", f"--root={FOLDER}/runc")
        super().__init__(image.service, (*self._runc, "run", f"--bundle={bundle}", image.service), folder)

    def signal(self) -> None:
        run(*self._runc, "kill", self.name, self._image.config["StopSignal"])

    def kill(self) -> None:
        subprocess.run([*self._runc, "delete", "--force", self.name], capture_output=True, timeout=DEADLINE_S)
        super().kill()


def runtime_config(image: Image, arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """A container as the manifests have it: what they mount is writable, and there is no network."""
    user, group = image.ids
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]},
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["mode=1777", "size=64m"]},
        {"destination": SOCKETS, "type": "bind", "source": str(folder), "options": ["bind"]},
    ]
    for path in writable_paths(image.service):
        volume = folder / f"{image.service}-volumes" / path.strip("/").replace("/", "-")
        volume.mkdir(parents=True)
        os.chown(volume, 0, group)
        volume.chmod(0o2770)
        options = ["bind", "nosuid", "nodev"]
        mounts.append({"destination": path, "type": "bind", "source": str(volume), "options": options})
    return {
        "ociVersion": "1.0.2",
        "root": {"path": str(image.root), "readonly": True},
        "process": {
            "user": {"uid": user, "gid": group},
            "args": [*image.config["Entrypoint"], *arguments],
            "env": image.config["Env"],
            "cwd": image.config.get("WorkingDir") or "/",
            "capabilities": {},
            "noNewPrivileges": True,
        },
        "mounts": mounts,
        "linux": {"namespaces": [{"type": name} for name in ("ipc", "mount", "network", "pid", "uts")]},
    }


def writable_paths(service: str) -> list[str]:
    """Folders that a service's manifest mounts for it to write."""
    pod = pod_of(service)
    volumes = {volume["name"] for volume in pod.get("volumes", ()) if "emptyDir" in volume}
    (container,) = pod["containers"]
    return [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in volumes]


def is_healthy(service: Service, name: str) -> bool:
    """True if a server says by grpc.health.v1 that it serves."""
    with grpc.insecure_channel(f"unix:{service.socket}", options=(("grpc.enable_http_proxy", 0),)) as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=DEADLINE_S)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def http(service: Service) -> httpx.Client:
    transport = httpx.HTTPTransport(uds=str(service.socket))
    return httpx.Client(transport=transport, base_url="http://gateway", timeout=DEADLINE_S)


def answers(service: Service, path: str) -> bool:
    """True if a gateway answers 200 here."""
    try:
        with http(service) as client:
            return client.get(path).status_code == 200
    except httpx.TransportError:
        return False


# -- checks -----------------------------------------------------------------------------------------------------------


def they_have_their_user(images: dict[str, Image]) -> None:
    """Each image's user is the one that its manifest runs it as."""
    for service, image in images.items():
        context = pod_of(service)["securityContext"]
        if image.ids != (context["runAsUser"], context["runAsGroup"]):
            raise CheckFailed(f"{service}'s image runs as {image.config['User']}, its manifest says {context}")


def they_have_no_leftovers(images: dict[str, Image]) -> None:
    """No image has sources, pip, its cache or Rust; only the worker's has a C compiler."""
    for service, image in images.items():
        left = [name for name in LEFTOVERS if (image.root / name).exists()]
        if (image.root / COMPILER).exists() != (service == "worker"):
            left.append(COMPILER)
        if left:
            raise CheckFailed(f"{service}'s image: {left}")


def they_serve(images: dict[str, Image]) -> None:
    """Started with a read-only root they serve, a completion comes through HTTP, and their signal stops them."""
    with tempfile.TemporaryDirectory(prefix="q-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        os.chown(folder, *images["cachemgr"].ids)
        started = {}
        for service in ("cachemgr", "worker", "gateway"):
            started[service] = start(service, images, folder)
            stack.callback(started[service].kill)
            await_ready(started[service])
        complete(started["gateway"])
        for service in reversed(started.values()):
            service.stop()


def start(service: str, images: dict[str, Image], folder: Path) -> Service:
    """Start a service from its image; a worker without an image from the checkout."""
    if service in images:
        flags = (f"--listen=unix:{SOCKETS}/{LISTEN[service]}", *FLAGS[service])
        if service == "gateway" and "worker" not in images:
            flags += (f"--tokenizer={MODEL}",)  # the checkout's has another path
        return Container(images[service], flags, folder)
    listen = f"--listen=unix:{folder}/{LISTEN[service]}", f"--advertise=unix:{SOCKETS}/{LISTEN[service]}"
    flags = (f"--cachemgr=unix:{folder}/{LISTEN['cachemgr']}", f"--model={DEPLOY}/demo/model", *WORKER_FLAGS)
    return Service(service, (f"{Path(sys.executable).parent}/quire", service, *listen, *flags), folder)


def await_ready(service: Service) -> None:
    """Wait until a service says that it is alive, and then that it is ready. Raises CheckFailed."""
    for state, path, name in (("alive", "/health", "liveness"), ("ready", "/ready", "")):
        if service.name == "gateway":
            service.await_that(state, partial(answers, service, path))
        else:
            service.await_that(state, partial(is_healthy, service, name))


def complete(gateway: Service) -> None:
    """Ask for a completion. Raises CheckFailed if it is not whole."""
    request = {"prompt": "The default value is", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    with http(gateway) as client:
        answer = client.post("/v1/completions", json=request)
    if answer.status_code != 200 or answer.json()["usage"]["completion_tokens"] != NUM_TOKENS:
        raise CheckFailed(f"the gateway answered {answer.status_code}: {answer.text}")
    print(f"    {request['prompt']}{answer.json()['choices'][0]['text']}", flush=True)


CHECKS: tuple[Callable[[dict[str, Image]], None], ...] = (they_have_their_user, they_have_no_leftovers, they_serve)


def build_all(services: Sequence[str], pip_flags: str) -> dict[str, Image]:
    """Build the images of these services, and print their sizes. Raises CheckFailed."""
    volumes = make_volumes()
    run(*BUILDAH, "rm", "--all")  # of a run before that kept its images
    make_bases(volumes)
    images = {}
    for service in services:
        begun = time.monotonic()
        flags = (f"--build-arg=PIP_FLAGS={pip_flags}",) if service == "worker" else ()
        image = images[service] = built(service, *volumes, *flags)
        parts = f"{image.size_mb()} MB, its environment {image.size_mb('opt/quire')} MB"
        print(f"ok  quire-{service} is built in {time.monotonic() - begun:.0f} s: {parts}", flush=True)
    return images


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--worker", action="store_true", help="Build and start the worker's image, too.")
    parser.add_argument("--pip-flags", default="", help="For the worker's torch: an index without CUDA, for example.")
    parser.add_argument("--keep", action="store_true", help="Leave build/images for the next run.")
    given = parser.parse_args()
    lacking = [name for name in PROGRAMS if shutil.which(name) is None] + ["root"] * (os.geteuid() != 0)
    if lacking:
        print(f"*** images SKIPPED, they were NOT built: there is no {', '.join(lacking)} ***", file=sys.stderr)
        return int(os.environ.get("QUIRE_REQUIRE_IMAGES") == "1")
    try:
        images = build_all(["cachemgr", "gateway", *(["worker"] if given.worker else [])], given.pip_flags)
        for check in CHECKS:
            check(images)
            print(f"ok  {(check.__doc__ or '').partition(chr(10))[0]}", flush=True)
    except CheckFailed as error:
        print(f"FAILED  {error}", file=sys.stderr)
        return 1
    finally:
        if not given.keep:
            remove()
    print(f"images: {len(images) + len(CHECKS)} checks passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
