"""OpenTelemetry traces of an engine: a span per request, and one per plan and per step that it ran in.

    quire.generate          a request, from its beginning to its end; a child of its caller's current span
      quire.plan            a plan with one of its sequences, to cachemgr's answer
        …/PlanStep          the call in cachemgr (quire.serving.tracing)
      quire.step            the step, from the moment it is sent to its tokens
        …/RunSteps          the call in the worker

A plan and a step serve many requests: they are children of the first that is sampled, and linked to the others.

The context is in a call's metadata (traceparent), and a stream has that once. So with tracing each plan is a call,
and each step has its own stream; the worker confirms that a step is queued before the next one is sent.

Only this part of OpenTelemetry is used, and it is imported when a Tracing is made: extra `otel`.
"""

import asyncio
import functools
import importlib
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from quire.cache.v1 import cache_service_pb2
from quire.client.cache_client import CacheClient
from quire.client.channel import ONCE, RETRIES, decode_error, decode_rpc_error, unary
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.scheduling.sequence import FinishReason
from quire.client.errors import QuireError, Unavailable
from quire.client.worker_client import StepAnswer, WorkerClient
from quire.compute.v1 import worker_service_pb2
from quire.serving.tracing import otlp_provider

Span = Any  # opentelemetry.trace.Span
_SCOPE = "quire.client"
_STEP_TIMEOUT_S = 300.0


class Tracing:
    """Makes an engine's spans. Raises ImportError if OpenTelemetry is not installed."""

    def __init__(self, provider: Any = None) -> None:
        """provider is a TracerProvider; None: the program's own, as opentelemetry.trace has it."""
        self._trace = importlib.import_module("opentelemetry.trace")
        self._tracer = self._trace.get_tracer(_SCOPE, tracer_provider=provider)

    def request(self, *, num_prompt_tokens: int, params: SamplingParams) -> "RequestSpan":
        """The span of a request that begins now."""
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.usage.input_tokens": num_prompt_tokens,
            "gen_ai.request.choice.count": params.n,
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        return RequestSpan(self._trace, self._tracer.start_span("quire.generate", attributes=attributes))

    def step(self, name: str, requests: "Sequence[RequestSpan | None]") -> "StepSpan | NoSpan":
        """The span of work for these requests from now on; none if none of them is sampled."""
        spans = [request.span for request in requests if request is not None and request.span.is_recording()]
        if not spans:
            return NO_SPAN
        span = self._tracer.start_span(
            name,
            context=self._trace.set_span_in_context(spans[0]),
            kind=self._trace.SpanKind.CLIENT,
            links=[self._trace.Link(other.get_span_context()) for other in spans[1:]],
            attributes={"quire.requests": len(requests)},
        )
        return StepSpan(self._trace, span)


class RequestSpan:
    """The span of a request."""

    __slots__ = ("_trace", "span")

    def __init__(self, trace: Any, span: Span) -> None:
        self._trace = trace
        self.span = span

    def end(self, *, num_tokens: int, reasons: Iterable[FinishReason | None], error: QuireError | None) -> None:
        """The request has ended: with so many tokens, its samples for these reasons (None: given up)."""
        self.span.set_attribute("gen_ai.usage.output_tokens", num_tokens)
        finish_reasons = [(reason or FinishReason.CANCELLED).value for reason in reasons]
        self.span.set_attribute("gen_ai.response.finish_reasons", finish_reasons)
        if error is not None:
            _set_error(self._trace, self.span, error.reason)
        self.span.end()


class StepSpan:
    """The span of a plan or a step. Within its block it is the current one; an exception out of it ends it."""

    __slots__ = ("_current", "_span", "_trace")

    def __init__(self, trace: Any, span: Span) -> None:
        self._trace = trace
        self._span = span
        self._current: Any = None

    def __enter__(self) -> Self:
        self._current = self._trace.use_span(self._span, record_exception=False, set_status_on_exception=False)
        self._current.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._current.__exit__(None, None, None)
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Record an end without an answer. Further calls change nothing."""
        if self._span.is_recording():
            _set_error(self._trace, self._span, error.reason if isinstance(error, QuireError) else type(error).__name__)
            self._span.end()

    def end(self, **attributes: float) -> None:
        """Record the answer."""
        for key, value in attributes.items():
            self._span.set_attribute(f"quire.{key}", value)
        self._span.end()


class NoSpan:
    """Replaces a StepSpan if nothing is traced."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing."""

    def fail(self, error: BaseException) -> None:
        """Nothing."""

    def end(self, **attributes: float) -> None:
        """Nothing."""


NO_SPAN = NoSpan()


def _set_error(trace: Any, span: Span, reason: str) -> None:
    span.set_status(trace.Status(trace.StatusCode.ERROR, reason))


# The calls.


def _metadata() -> tuple[tuple[str, str], ...]:
    """The metadata with the current span."""
    carrier: dict[str, str] = {}
    propagation = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
    propagation.TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())


class TracedCacheClient(CacheClient):
    """A CacheClient that sends the current span with each plan, as a call."""

    async def plan(self, request: cache_service_pb2.PlanStepRequest) -> cache_service_pb2.PlanStepResponse:
        """See CacheService.PlanStep. Repeated if it has a request_id; raises what CacheClient.plan raises."""
        method = functools.partial(self._stub.PlanStep, metadata=_metadata())
        policy = RETRIES if request.request_id else ONCE
        return await unary(method, request, timeout_s=self._timeout_s, policy=policy)


class _Streamed:
    """StepAnswer of a step that has a stream to itself."""

    __slots__ = ("_answer",)

    def __init__(self, call: Any) -> None:
        self._answer = asyncio.ensure_future(_answer_of(call))
        self._answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())  # seen

    async def result(self) -> worker_service_pb2.RunStepResponse:
        return await asyncio.shield(self._answer)


async def _answer_of(call: Any) -> worker_service_pb2.RunStepResponse:
    try:
        answer = await call.read()
    except grpc.aio.AioRpcError as error:
        raise decode_rpc_error(error) from None
    if answer is grpc.aio.EOF:
        raise Unavailable("the server has ended the stream")
    if answer.WhichOneof("answer") == "error":
        raise decode_error(answer.error)
    step: worker_service_pb2.RunStepResponse = answer.step
    return step


class TracedWorkerClient(WorkerClient):
    """A WorkerClient that sends the current span with each step, as a stream of its own."""

    async def run(self, request: worker_service_pb2.RunStepRequest) -> StepAnswer:
        """See WorkerService.RunSteps; never repeated. Returns when the worker has queued the step, or refused it."""
        call = self._stub.RunSteps(timeout=_STEP_TIMEOUT_S, metadata=_metadata())
        try:
            await call.write(worker_service_pb2.RunStepsRequest(step=request))
            await call.done_writing()
            await call.initial_metadata()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # reading reports the error
        except asyncio.CancelledError:
            call.cancel()
            raise
        return _Streamed(call)


def otlp_tracing(endpoint: str) -> "tuple[Tracing, Any]":
    """A Tracing that sends every span to a collector (OTLP over gRPC, "http://localhost:4317"), and its provider.

    Shut the provider down at the end: it sends the remaining spans. Raises ImportError.
    """
    provider = otlp_provider(endpoint, service_name="quire-client")
    return Tracing(provider), provider
