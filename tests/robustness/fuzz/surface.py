"""Every method of all services, read from the protos' descriptors: a new RPC is among them by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor
from smg_grpc_proto.generated import vllm_engine_pb2

from quire.cache.v1 import cache_service_pb2, error_pb2
from quire.cache.v1 import reasons as cache_reasons
from quire.compute.v1 import reasons as worker_reasons
from quire.compute.v1 import worker_service_pb2
from quire.engine.v1 import engine_service_pb2
from quire.engine.v1 import reasons as engine_reasons

CACHEMGR, WORKER, GATEWAY, SHEPHERD = "cachemgr", "worker", "gateway", "shepherd"
FILES: Mapping[str, Any] = {
    CACHEMGR: cache_service_pb2.DESCRIPTOR,
    WORKER: worker_service_pb2.DESCRIPTOR,
    GATEWAY: engine_service_pb2.DESCRIPTOR,
    SHEPHERD: vllm_engine_pb2.DESCRIPTOR,
}
CODES: dict[str, Mapping[str, grpc.StatusCode]] = {
    process: {reason.value: grpc.StatusCode[reason.status_code] for reason in api.Reason}
    for process, api in (
        (CACHEMGR, cache_reasons),
        (WORKER, worker_reasons),
        (GATEWAY, engine_reasons),
    )
}
CODES[SHEPHERD] = {**CODES[GATEWAY], "UNIMPLEMENTED": grpc.StatusCode.UNIMPLEMENTED}
"""For each service: its reasons, and the status code of each. SHEPHERD has one more, for what is not served."""
UNEXPECTED = {
    "STEP_FAILED",
    "PRIOR_STEP_FAILED",
    "OVERLOADED",
    "SHUTTING_DOWN",
    "CREDENTIALS_MISSING",
    "TOKEN_REJECTED",
}
"""Reasons that no message may cause here: callers are not authenticated, a few dozen calls are open, no step is
skipped with another behind it, and every checked step can be computed."""


@dataclass(frozen=True)
class Method:
    """An RPC.

    process  the one that serves it, CACHEMGR, WORKER or GATEWAY; SHEPHERD: a gateway as a worker of that router
    path     as HTTP/2 has it ("/quire.cache.v1.CacheService/GetPool")
    """

    process: str
    path: str
    request: Descriptor = field(compare=False)
    response: Descriptor = field(compare=False)
    client_streaming: bool = field(compare=False)
    server_streaming: bool = field(compare=False)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def request_class(self) -> Any:
        return message_factory.GetMessageClass(self.request)

    @property
    def response_class(self) -> Any:
        return message_factory.GetMessageClass(self.response)


def methods(*processes: str) -> list[Method]:
    """All methods of all services of these processes."""
    return [
        Method(
            process=process,
            path=f"/{service.full_name}/{method.name}",
            request=method.input_type,
            response=method.output_type,
            client_streaming=method.client_streaming,
            server_streaming=method.server_streaming,
        )
        for process in processes
        for service in FILES[process].services_by_name.values()
        for method in service.methods
    ]


def errors_in(message: Any) -> list[error_pb2.Error]:
    """Every quire.cache.v1.Error within an answer."""
    if isinstance(message, error_pb2.Error):
        return [message]
    found: list[error_pb2.Error] = []
    for part_field, value in message.ListFields():
        if part_field.message_type is None or not holds_errors(part_field.message_type):
            continue
        for part in value if part_field.is_repeated else (value,):
            found += errors_in(part)
    return found


_HOLDS_ERRORS: dict[str, bool] = {error_pb2.Error.DESCRIPTOR.full_name: True}


def holds_errors(descriptor: Descriptor) -> bool:
    """True if a message of this type can have an Error in it. The contract's messages do not hold themselves."""
    known = _HOLDS_ERRORS.get(descriptor.full_name)
    if known is None:
        parts = [part.message_type for part in descriptor.fields if part.message_type is not None]
        known = _HOLDS_ERRORS[descriptor.full_name] = any(map(holds_errors, parts))
    return known
