"""The health of a service that starts: over gRPC, of the gateway over HTTP.

It imports gRPC, in the time in which a service starts: see ServiceProcess.watch_start.
"""

import http.client
import json
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

_ANSWER_TIMEOUT_S = 10.0
_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 100),
)
Cancelling = Callable[[Callable[[], None]], AbstractContextManager[None]]


def await_serving(address: str, timeout_s: float, cancelling: Cancelling) -> str | None:
    """Waits until the health at an address is SERVING. Returns None then, "" if the time is over, or a bad answer.

    cancelling   within it the function that it is given is called when there will be no answer any more
    """
    with grpc.insecure_channel(address, options=_CHANNEL_OPTIONS) as channel:
        call = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        watch: Any = call(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=timeout_s)
        with cancelling(watch.cancel):
            return _first_serving(watch)


def _first_serving(watch: Any) -> str | None:
    try:
        for answer in watch:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return None
    except grpc.RpcError:
        pass  # the code says how it ended
    finally:
        watch.cancel()
    # A stream that broke otherwise means that the process is about to end.
    return "" if watch.code() is grpc.StatusCode.DEADLINE_EXCEEDED else f"answered {watch.code()}"


def ask_ready(path: str) -> list[str] | None:
    """Return where the gateway with this unix socket serves; None if it does not yet."""
    connection = _UnixConnection(path)
    try:
        connection.request("GET", "/ready")
        answer = connection.getresponse()
        found: list[str] | None = json.loads(answer.read())["addresses"] if answer.status == 200 else None
        return found
    except (OSError, http.client.HTTPException, ValueError, KeyError):
        return None
    finally:
        connection.close()


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_ANSWER_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
