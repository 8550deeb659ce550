"""An error as a value, and the two forms in which it travels.

ErrorStatus  --- to_grpc_status --->  gRPC status with one google.rpc.ErrorInfo in its details, and a RetryInfo beside
                                      it where asking again may help: the call failed
             --- to_message ------->  quire.cache.v1.Error inside an answer: one item or one request failed
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from quire.cache.v1 import error_pb2
from quire.cache.v1.error_reason import ErrorReason
from quire.serving.logs import REQUEST_ID_KEY, current_call

Request = TypeVar("Request")
Response = TypeVar("Response")
Refused = TypeVar("Refused", bound=Exception)
Handler = Callable[[Any, Request, grpc.aio.ServicerContext[Any, Any]], Awaitable[Response]]

MAX_TEXT = 256
"""The most characters of a message, and of a value of its metadata. They may quote the caller, and a status with more
than 8 KiB of trailers does not arrive: each character may take 12 bytes in the message and 6 in the details."""


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """The error of a call, or of one item of it.

    code           gRPC status code, never OK
    reason         name of an ErrorReason without its prefix ("OUT_OF_BLOCKS"); clients branch on it
    message        for people, in English
    metadata       every number and name of the message
    domain         the domain of the reason ("cache.quire.dev")
    retry_delay_s  the time after which a retry may succeed; None: unknown
    """

    code: grpc.StatusCode
    reason: str
    message: str
    domain: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry_delay_s: float | None = None

    def __post_init__(self) -> None:
        if self.code is grpc.StatusCode.OK:
            raise ValueError("an error can't have the code OK")

    @classmethod
    def of(
        cls,
        reason: ErrorReason,
        message: str,
        domain: str,
        metadata: Mapping[str, str] | None = None,
        *,
        retry_delay_s: float | None = None,
    ) -> "ErrorStatus":
        """Return the status of a reason: its code, and its retry delay if `retry_delay_s` is None."""
        delay_s = reason.retry_delay_s if retry_delay_s is None else retry_delay_s
        return cls(grpc.StatusCode[reason.status_code], reason.value, message, domain, metadata or {}, delay_s)


class CallEnded(Exception):
    """Raised by a handler to end its call with an error."""

    def __init__(self, error: ErrorStatus) -> None:
        super().__init__(error.message)
        self.error = error


def to_grpc_status(error: ErrorStatus) -> grpc.Status:
    """Return the error for `context.abort_with_status`."""
    message = _shortened(error.message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=error.domain, metadata=_shown(error.metadata))
    details = [_packed(info)]
    if error.retry_delay_s is not None:
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=_duration(error.retry_delay_s))))
    status = status_pb2.Status(code=_number(error.code), message=message, details=details)
    return rpc_status.to_status(status)


def to_message(error: ErrorStatus) -> error_pb2.Error:
    """Return the error for an answer about many items or requests. The domain is not sent: it is the service's own."""
    return error_pb2.Error(
        code=_number(error.code),
        reason=error.reason,
        message=_shortened(error.message),
        metadata=_shown(error.metadata),
        retry_delay=None if error.retry_delay_s is None else _duration(error.retry_delay_s),
    )


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ErrorStatus) -> NoReturn:
    """Ends the call with the error. Never returns: gRPC unwinds the handler by an exception of its own.

    For the interceptor. A handler raises CallEnded: gRPC keeps its own exception in the call, which the exception's
    traceback refers to. With both it would keep the contents of the handlers' frames until the garbage collector
    runs.
    """
    status, call = to_grpc_status(error), current_call()
    metadata = status.trailing_metadata
    if call is not None:
        call.refused = error.code, error.reason
        metadata = (*metadata, (REQUEST_ID_KEY, call.request_id))
    await context.abort(status.code, status.details, metadata)
    raise AssertionError("abort returned")


def answering(
    refused: type[Refused], status_of: Callable[[Refused], ErrorStatus]
) -> Callable[[Handler[Request, Response]], Handler[Request, Response]]:
    """Decorates unary handlers (methods): an exception of type `refused` becomes the call's status."""

    def decorate(handler: Handler[Request, Response]) -> Handler[Request, Response]:
        async def handle(self: Any, request: Request, context: grpc.aio.ServicerContext[Any, Any]) -> Response:
            try:
                return await handler(self, request, context)
            except refused as error:
                raise CallEnded(status_of(error)) from None

        return handle

    return decorate


def _shown(metadata: Mapping[str, str]) -> dict[str, str]:
    return {name: _shortened(value) for name, value in metadata.items()}


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def _number(code: grpc.StatusCode) -> int:
    number, _ = code.value
    return int(number)
