"""An error as a value, and the two forms in which it travels.

ErrorStatus  --- to_grpc_status --->  gRPC status with one google.rpc.ErrorInfo in its details: the call failed
             --- to_message ------->  quire.cache.v1.Error inside an answer: one item or one request failed
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from quire.cache.v1 import error_pb2

Request = TypeVar("Request")
Response = TypeVar("Response")
Refused = TypeVar("Refused", bound=Exception)
Handler = Callable[[Any, Request, grpc.aio.ServicerContext[Any, Any]], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """Why a call, or one item of it, failed.

    code      gRPC status code, never OK
    reason    name of an ErrorReason without its prefix ("OUT_OF_BLOCKS"); clients branch on it
    message   for people, in English
    metadata  every number and name of the message
    domain    whose reasons these are ("cache.quire.dev")
    """

    code: grpc.StatusCode
    reason: str
    message: str
    domain: str
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.code is grpc.StatusCode.OK:
            raise ValueError("an error can't have the code OK")


def to_grpc_status(error: ErrorStatus) -> grpc.Status:
    """For `context.abort_with_status`."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=error.domain, metadata=error.metadata)
    details = any_pb2.Any()
    details.Pack(info)
    status = status_pb2.Status(code=_number(error.code), message=error.message, details=[details])
    return rpc_status.to_status(status)


def to_message(error: ErrorStatus) -> error_pb2.Error:
    """For an answer about many items or requests. The domain is not sent: it is the service's own."""
    return error_pb2.Error(
        code=_number(error.code), reason=error.reason, message=error.message, metadata=dict(error.metadata)
    )


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ErrorStatus) -> NoReturn:
    """Ends the call with the error. Never returns: gRPC unwinds the handler by an exception of its own."""
    await context.abort_with_status(to_grpc_status(error))
    raise AssertionError("abort_with_status returned")


def answering(
    refused: type[Refused], status_of: Callable[[Refused], ErrorStatus]
) -> Callable[[Handler[Request, Response]], Handler[Request, Response]]:
    """Decorates unary handlers (methods): an exception of type `refused` becomes the call's status."""

    def decorate(handler: Handler[Request, Response]) -> Handler[Request, Response]:
        async def handle(self: Any, request: Request, context: grpc.aio.ServicerContext[Any, Any]) -> Response:
            try:
                return await handler(self, request, context)
            except refused as error:
                await abort(context, status_of(error))

        return handle

    return decorate


def _number(code: grpc.StatusCode) -> int:
    number, _ = code.value
    return int(number)
