"""Programs that are not grpcio: where they are, and grpcurl as a function. What is missing is a skip that says so, or a
failure if QUIRE_REQUIRE_FOREIGN is 1."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
from deadlines import DEADLINE_S
from google.rpc import error_details_pb2

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".tools"
CACHE, WORKER = "quire.cache.v1.CacheService", "quire.compute.v1.WorkerService"
BUILD_TIMEOUT_S = 1200  # with nothing in Go's caches


def find(program: str, *, for_what: str) -> str:
    """The path of a program; without it the test is skipped, or fails."""
    path = shutil.which(program)
    return path if path is not None else missing(program, for_what=for_what)


def missing(program: str, *, for_what: str) -> NoReturn:
    """Skips the test, loudly, or fails it."""
    if os.environ.get("QUIRE_REQUIRE_FOREIGN") == "1":
        pytest.fail(f"{program} is missing, and this run requires it for {for_what}")
    pytest.skip(f"*** {program} is missing: {for_what} NOT tested ***")


def build_grpcurl() -> Path:
    """grpcurl at the version of client/go/tools/go.mod; takes minutes the first time, a second when it is there."""
    go = find("go", for_what="grpcurl")
    target = TOOLS / "grpcurl"
    package = "github.com/fullstorydev/grpcurl/cmd/grpcurl"
    command = [go, "build", "-C", str(ROOT / "client/go/tools"), "-o", str(target), package]
    TOOLS.mkdir(exist_ok=True)
    with (TOOLS / "grpcurl.lock").open("w") as lock:  # processes of tests would build it side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    assert built.returncode == 0, built.stderr
    return target


@dataclass(frozen=True)
class Refused(Exception):
    """The content of an error status, or of an Error inside an answer."""

    code: int
    reason: str
    domain: str = ""
    metadata: Mapping[str, str] | None = None

    @classmethod
    def of_error(cls, error: Mapping[str, Any]) -> Refused:
        """From an Error as JSON."""
        return cls(error["code"], error["reason"], metadata=error.get("metadata", {}))


@dataclass(frozen=True)
class Grpcurl:
    """grpcurl with the flags that lead to one server."""

    program: Path
    flags: tuple[str, ...]
    address: str

    @classmethod
    def on_socket(cls, program: Path, address: str, *flags: str) -> Grpcurl:
        """For "unix:/path"."""
        return cls(program, ("-plaintext", "-unix", *flags), address.removeprefix("unix:"))

    def command(self, method: str, *flags: str) -> list[str]:
        """The command for a call with its requests on standard input."""
        return [str(self.program), "-format-error", *self.flags, *flags, "-d", "@", self.address, method]

    def call(self, method: str, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One call; {} if the answer is empty. Raises Refused."""
        (answer,) = self.stream(method, [request or {}])
        return answer

    def stream(self, method: str, requests: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """All requests, then the end of the stream; all answers. Raises Refused if it ends with a status."""
        spoken = "".join(map(json.dumps, requests))
        done = subprocess.run(self.command(method), input=spoken, capture_output=True, text=True, timeout=DEADLINE_S)
        if done.returncode:
            raise status_of(done.stderr)
        return documents(done.stdout)


def status_of(text: str) -> Refused:
    """grpcurl's report of a call that failed, with -format-error."""
    status = json.loads(text)
    info, *_ = status.get("details") or [{}]
    if "@value" in info:  # the server was gone before grpcurl asked it what the bytes mean
        bare = error_details_pb2.ErrorInfo.FromString(base64.b64decode(info["@value"]))
        return Refused(status["code"], bare.reason, bare.domain, dict(bare.metadata))
    return Refused(status["code"], info.get("reason", ""), info.get("domain", ""), info.get("metadata", {}))


def documents(text: str) -> list[dict[str, Any]]:
    """JSON objects, one after the other."""
    decoder, found, text = json.JSONDecoder(), [], text.strip()
    while text:
        document, end = decoder.raw_decode(text)
        found.append(document)
        text = text[end:].lstrip()
    return found
