"""A unary call by curl's HTTP/2 alone: the frame, the headers and the trailers as gRPC's wire format says."""

from __future__ import annotations

import base64
import struct
import subprocess
from pathlib import Path

import pytest
from conformance.foreign import CACHE, find
from deadlines import DEADLINE_S
from google.rpc import error_details_pb2, status_pb2

from quire.cache.v1 import cache_service_pb2
from quire.cli.launch import LocalServices

METHOD = f"{CACHE}/GetPool"


def framed(message: bytes) -> bytes:
    """A length-prefixed message that is not compressed."""
    return struct.pack(">BI", 0, len(message)) + message


def call(services: LocalServices, folder: Path, body: bytes) -> tuple[list[dict[str, str]], bytes]:
    """Headers, then trailers if there are any, and the body of the answer."""
    curl = find("curl", for_what="a call by hand over HTTP/2")
    (folder / "request").write_bytes(body)
    path = services.cachemgr_address.removeprefix("unix:")
    headers = ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    files = ["--data-binary", f"@{folder}/request", "--output", f"{folder}/body", "--dump-header", f"{folder}/headers"]
    command = [curl, "--silent", "--show-error", "--http2-prior-knowledge", "--unix-socket", path, *headers, *files]
    subprocess.run([*command, f"http://localhost/{METHOD}"], check=True, timeout=DEADLINE_S)
    first, *rest = (folder / "headers").read_text().splitlines()
    assert first.split() == ["HTTP/2", "200"]
    blocks = "\n".join(line.strip() for line in rest).strip().split("\n\n")
    fields = [
        dict(line.split(": ", 1) if ": " in line else (line.rstrip(":"), "") for line in block.splitlines())
        for block in blocks
    ]
    body = (folder / "body").read_bytes() if (folder / "body").exists() else b""
    return fields, body


def test_an_answer_is_one_frame_and_its_status_a_trailer(demo_services: LocalServices, tmp_path: Path) -> None:
    request = cache_service_pb2.GetPoolRequest(pool="default")
    (headers, trailers), body = call(demo_services, tmp_path, framed(request.SerializeToString()))
    assert headers["content-type"] == "application/grpc"
    assert "grpc-status" not in headers
    assert trailers["grpc-status"] == "0"
    compressed, length = struct.unpack(">BI", body[:5])
    assert (compressed, length) == (0, len(body) - 5)
    pool = cache_service_pb2.GetPoolResponse.FromString(body[5:]).pool
    assert (pool.name, pool.attached, pool.geometry.block_count) == ("default", True, 32)


def test_a_refusal_is_a_status_with_details(demo_services: LocalServices, tmp_path: Path) -> None:
    request = cache_service_pb2.GetPoolRequest(pool="nowhere")
    (trailers,), body = call(demo_services, tmp_path, framed(request.SerializeToString()))
    assert (trailers["grpc-status"], body) == ("5", b"")
    details = trailers["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(base64.b64decode(details + "=" * (-len(details) % 4)))
    info = error_details_pb2.ErrorInfo()
    assert status.code == 5
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain, dict(info.metadata)) == ("POOL_NOT_FOUND", "cache.quire.dev", {"pool": "nowhere"})


@pytest.mark.parametrize("message", [b"\xff", b"\x0a\x05default"], ids=["no-field", "too-short"])
def test_what_is_no_message_is_refused(demo_services: LocalServices, tmp_path: Path, message: bytes) -> None:
    fields, body = call(demo_services, tmp_path, framed(message))
    assert (fields[-1]["grpc-status"], body) != ("0", b"")
    assert fields[-1]["grpc-status"] in ("3", "13")
