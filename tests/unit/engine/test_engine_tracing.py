"""The spans of an engine over services that live in the test."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from deadlines import DEADLINE_S
from unit.engine.test_engine import PROMPT_END, TOKENIZER, Services, greedy, read, turns

from quire.client import Engine, EngineConfig, QuireError, RequestFailed, Unavailable
from quire.client.engine.tracing import TracedWorkerClient, Tracing
from quire.compute.v1 import worker_service_pb2, worker_service_pb2_grpc

PROMPT = "once\n"
Body = Callable[[Engine, Services], Awaitable[None]]


@pytest.fixture(autouse=True)
def installed() -> None:
    """Without OpenTelemetry the tests are skipped, or fail if QUIRE_REQUIRE_OTEL is 1."""
    if importlib.util.find_spec("opentelemetry") is None:
        if os.environ.get("QUIRE_REQUIRE_OTEL") == "1":
            pytest.fail("OpenTelemetry is missing, and this run requires it")
        pytest.skip("*** OpenTelemetry is missing: traces NOT tested ***")


@contextlib.contextmanager
def kept() -> Iterator[tuple[Any, Any]]:
    """A provider, and the exporter that keeps its spans."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider, exporter
    provider.shutdown()


def spans_of(body: Body) -> dict[str, list[Any]]:
    """All spans by name, when everything has ended."""

    async def main(provider: Any) -> None:
        services = Services()
        tracing = Tracing(provider)
        async with Engine(
            services, lambda _: services, config=EngineConfig(verify=True), tokenizer=TOKENIZER, tracing=tracing
        ) as engine:
            await asyncio.wait_for(body(engine, services), DEADLINE_S)

    with kept() as (provider, exporter):
        asyncio.run(main(provider))
        found: dict[str, list[Any]] = {}
        for span in exporter.get_finished_spans():
            found.setdefault(span.name, []).append(span)
        return found


def error_of(span: Any) -> str:
    return span.status.description or "" if span.status.status_code.name == "ERROR" else ""


def test_a_request_has_a_plan_and_a_step_for_each_of_its_tokens() -> None:
    async def body(engine: Engine, services: Services) -> None:
        await read(engine.generate(PROMPT, greedy(5, n=2)))

    spans = spans_of(body)
    (request,) = spans["quire.generate"]
    assert request.attributes["gen_ai.usage.output_tokens"] == 10
    assert request.attributes["gen_ai.request.max_tokens"] == 5
    assert request.attributes["gen_ai.request.choice.count"] == 2
    assert request.attributes["gen_ai.response.finish_reasons"] == ("length", "length")
    assert error_of(request) == ""
    for name in ("quire.plan", "quire.step"):
        assert len(spans[name]) >= 5
        assert {span.parent.span_id for span in spans[name]} == {request.context.span_id}
        assert {span.attributes["quire.requests"] for span in spans[name]} == {1}
        assert all(request.start_time <= span.start_time <= span.end_time <= request.end_time for span in spans[name])


def test_steps_for_nobody_have_no_span() -> None:
    async def body(engine: Engine, services: Services) -> None:
        await read(engine.generate(PROMPT, greedy(5)))
        while services.sequences:  # released by a plan of its own
            await asyncio.sleep(0)
        assert len(services.plans) > 5

    spans = spans_of(body)
    assert len(spans["quire.plan"]) == len(spans["quire.step"]) == 5


def test_who_goes_away_is_cancelled() -> None:
    async def body(engine: Engine, services: Services) -> None:
        stream = engine.generate(PROMPT, greedy(300))
        await anext(stream)
        await stream.aclose()

    (request,) = spans_of(body)["quire.generate"]
    assert request.attributes["gen_ai.response.finish_reasons"] == ("cancelled",)


def test_a_request_that_fails_and_its_steps_say_why() -> None:
    async def body(engine: Engine, services: Services) -> None:
        services.poison = PROMPT_END
        with pytest.raises(RequestFailed):
            await read(engine.generate(PROMPT, greedy(5)))

    spans = spans_of(body)
    assert [error_of(span) for span in spans["quire.generate"]] == ["REQUEST_FAILED"]
    assert {error_of(span) for span in spans["quire.step"]} == {"STEP_FAILED"}


@pytest.mark.parametrize(("where", "name"), [("plan_errors", "quire.plan"), ("result_errors", "quire.step")])
def test_what_a_failure_of_a_service_cut_off_has_ended_too(
    where: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(engine: Engine, services: Services) -> None:
        getattr(services, where).append(QuireError("gone", reason="GONE"))
        await read(engine.generate(PROMPT, greedy(5)))

    spans = spans_of(body)
    assert "GONE" in {error_of(span) for span in spans[name]}
    assert len(spans["quire.step"]) == len([span for span in spans["quire.plan"] if not error_of(span)])
    assert "ended span" not in caplog.text
    assert [error_of(span) for span in spans["quire.generate"]] == [""]


def test_a_step_is_the_childs_of_the_first_and_linked_to_the_others() -> None:
    async def body(engine: Engine, services: Services) -> None:
        await engine.complete([PROMPT, "twice\n"], greedy(5))

    spans = spans_of(body)
    first, second = sorted(spans["quire.generate"], key=lambda span: span.start_time)
    both = [span for span in spans["quire.step"] if span.attributes["quire.requests"] == 2]
    assert both
    for span in both:
        assert span.parent.span_id == first.context.span_id
        assert [link.context.span_id for link in span.links] == [second.context.span_id]


def test_nothing_said_in_a_trace_is_text() -> None:
    async def body(engine: Engine, services: Services) -> None:
        await read(engine.generate(PROMPT, greedy(20)))

    for spans in spans_of(body).values():
        for span in spans:
            assert not {"once", "dark", "stormy"} & set(str(dict(span.attributes)).split())
            assert all(name.startswith(("gen_ai.", "quire.")) for name in span.attributes)


class SlowWorker(worker_service_pb2_grpc.WorkerServiceServicer):
    """Delays the queueing of a step, and ends it when the test says so."""

    def __init__(self) -> None:
        self.is_in_line = False
        self.may_end = asyncio.Event()

    async def RunSteps(self, requests: Any, context: Any) -> Any:  # noqa: N802
        async for _ in requests:
            await turns(3000)
            self.is_in_line = True
            await context.send_initial_metadata(())
            await self.may_end.wait()
            yield worker_service_pb2.RunStepsResponse(step=worker_service_pb2.RunStepResponse(step_number=1))


def test_a_step_is_sent_once_it_is_in_line_and_before_it_has_ended(tmp_path: Path) -> None:
    async def main() -> None:
        server, servicer = grpc.aio.server(), SlowWorker()
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
        server.add_insecure_port(f"unix:{tmp_path}/w.sock")
        await server.start()
        worker = TracedWorkerClient(f"unix:{tmp_path}/w.sock")
        answer = await worker.run(worker_service_pb2.RunStepRequest())
        assert servicer.is_in_line
        servicer.may_end.set()
        assert (await answer.result()).step_number == (await answer.result()).step_number == 1
        await server.stop(None)
        with pytest.raises(Unavailable):
            await (await worker.run(worker_service_pb2.RunStepRequest())).result()
        await worker.close()

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
