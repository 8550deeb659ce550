"""OpenTelemetry traces of a server: a span for each call that belongs to a sampled trace. Off unless configured.

Which traces are sampled is their clients' decision: a gRPC call without a sampled trace gets no span. An HTTP request
without a trace begins one, if the SDK's sampler (OTEL_TRACES_SAMPLER) takes it. Nothing of OpenTelemetry is imported
before `configure_tracing`, which needs the extra `otel`; the SDK's own variables (OTEL_…) hold beside it. Clients send
their spans as servers do, by `otlp_provider`.
"""

import importlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import grpc

_SCOPE = "quire.serving"
_TRACEPARENT = "traceparent"
_FLUSH_TIMEOUT_S = 2.0

Refused = tuple[grpc.StatusCode, str]
"""Code and reason."""


class TracingUnavailableError(Exception):
    """Traces are asked for, and OpenTelemetry is not installed."""


def otlp_provider(endpoint: str, *, service_name: str) -> Any:
    """A TracerProvider that sends every span to a collector, OTLP over gRPC. Raises ImportError."""
    sdk, export, resources, otlp = _import_all(
        *("sdk.trace", "sdk.trace.export", "sdk.resources"), "exporter.otlp.proto.grpc.trace_exporter"
    )
    provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": service_name}))
    provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter(endpoint=endpoint)))
    return provider


def _import_all(*names: str) -> list[Any]:
    return [importlib.import_module(f"opentelemetry.{name}") for name in names]


class Tracing:
    """Makes a server's spans and sends them to a collector, OTLP over gRPC. Raises TracingUnavailableError."""

    def __init__(self, endpoint: str, *, service_name: str) -> None:
        """endpoint is "http://host:port", or https with the system's authorities."""
        try:
            self.provider = otlp_provider(endpoint, service_name=service_name)
            self._trace, self._context, propagation = _import_all("trace", "context", "trace.propagation.tracecontext")
        except ImportError as error:
            raise TracingUnavailableError(f"{error}: pip install 'quire-kv[otel]'") from error
        self._tracer = self.provider.get_tracer(_SCOPE)
        self._propagator = propagation.TraceContextTextMapPropagator()

    def begin_call(self, metadata: Iterable[tuple[str, str | bytes]]) -> Any:
        """The span of a call that begins, still without a name; None if it belongs to no trace that is sampled.

        The task's own spans are its children from now on; those of a trace that is not sampled are not sampled.
        """
        carrier = {key: value for key, value in metadata if key == _TRACEPARENT and isinstance(value, str)}
        if not carrier:
            return None
        parent = self._propagator.extract(carrier)
        if not self._trace.get_current_span(parent).get_span_context().trace_flags.sampled:
            self._context.attach(parent)
            return None
        span = self._tracer.start_span("call", context=parent, kind=self._trace.SpanKind.SERVER)
        self._context.attach(self._trace.set_span_in_context(span, parent))
        return span

    def end_call(self, span: Any, method: str, refused: Refused | None) -> None:
        """The call has ended."""
        service, _, name = method.lstrip("/").partition("/")
        code = grpc.StatusCode.OK if refused is None else refused[0]
        span.update_name(f"{service}/{name}")
        span.set_attributes({"rpc.system": "grpc", "rpc.service": service, "rpc.method": name})
        span.set_attribute("rpc.grpc.status_code", code.value[0])
        if refused is not None:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, refused[1]))
        span.end()

    @contextmanager
    def http_request(self, method: str, headers: Mapping[str, str]) -> Iterator["HttpSpan"]:
        """Within the block the span of a request is the current one. Names of headers are in lower case."""
        parent = self._propagator.extract(headers)
        span = self._tracer.start_span(method, context=parent, kind=self._trace.SpanKind.SERVER)
        with self._trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            yield HttpSpan(self._trace, span, method)

    def flush(self) -> None:
        """Sends the remaining spans; returns after 2 s even if the SDK, which retries for longer, has not."""
        sending = threading.Thread(target=self.provider.force_flush, name="tracing", daemon=True)
        sending.start()
        sending.join(_FLUSH_TIMEOUT_S)


class HttpSpan:
    """The span of an HTTP request, by OpenTelemetry's conventions for HTTP servers; no span if there are no traces."""

    def __init__(self, trace: Any = None, span: Any = None, method: str = "") -> None:
        self._trace, self._span, self._method = trace, span, method

    def answered(self, route: str, status: int, request_id: str) -> None:
        """The request has been answered."""
        if self._span is None:
            return
        self._span.update_name(f"{self._method} {route}")
        self._span.set_attributes(
            {
                "http.request.method": self._method,
                "http.route": route,
                "http.response.status_code": status,
                "quire.request_id": request_id,
            }
        )
        if status >= 500:
            self._span.set_status(self._trace.Status(self._trace.StatusCode.ERROR))


_NO_SPAN = HttpSpan()
_tracing: Tracing | None = None
_span: ContextVar[Any] = ContextVar("span", default=None)


def configure_tracing(endpoint: str | None, *, service_name: str) -> None:
    """Trace the calls of this process from now on, if there is an endpoint. Raises TracingUnavailableError."""
    global _tracing
    _tracing = None if endpoint is None else Tracing(endpoint, service_name=service_name)


def provider() -> Any:
    """The TracerProvider of this process's traces; None if there are none."""
    return None if _tracing is None else _tracing.provider


@contextmanager
def http_request(method: str, headers: Mapping[str, str]) -> Iterator[HttpSpan]:
    """Within the block the span of an HTTP request is the current one. Names of headers are in lower case."""
    if _tracing is None:
        yield _NO_SPAN
        return
    with _tracing.http_request(method, headers) as span:
        yield span


def begin_call(metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """A call begins in this task; `end_call` has to follow."""
    if _tracing is not None:
        _span.set(_tracing.begin_call(metadata))


def end_call(method: str, refused: Refused | None) -> None:
    """The call of this task has ended."""
    if _tracing is not None and (span := _span.get()) is not None:
        _tracing.end_call(span, method, refused)


def flush() -> None:
    """Sends the remaining spans before the process ends."""
    if _tracing is not None:
        _tracing.flush()
