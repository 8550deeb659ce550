"""One trace from a request to the steps it ran in, across the client and both services, as a collector gets it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from integration.conftest import CreateLease
from integration.protocol_client import DEADLINE_S, Pair, await_that, draw_tokens

from quire.cache.v1 import cache_service_pb2, cache_service_pb2_grpc
from quire.cli.launch import LocalServices
from quire.client import Completion, Engine, SamplingParams
from quire.client.engine.tracing import otlp_tracing
from quire.compute.v1 import worker_service_pb2
from quire.engine.v1 import engine_service_pb2, engine_service_pb2_grpc

NUM_TOKENS = 6
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
PROMPT = draw_tokens(9, seed=1)
DEMO_MODEL = Path(__file__).parents[2] / "deploy" / "demo" / "model"
CACHE, WORKER = "quire.cache.v1.CacheService", "quire.compute.v1.WorkerService"
ERROR = 2
SAMPLED_BY_PARENTS = {"OTEL_TRACES_SAMPLER": "parentbased_always_on"}


def installed() -> None:
    """Without OpenTelemetry the test is skipped, or fails if QUIRE_REQUIRE_OTEL is 1."""
    if importlib.util.find_spec("opentelemetry") is None:
        if os.environ.get("QUIRE_REQUIRE_OTEL") == "1":
            pytest.fail("OpenTelemetry is missing, and this run requires it")
        pytest.skip("*** OpenTelemetry is missing: traces NOT tested ***")


@dataclass(frozen=True)
class Span:
    """A span as it was received; ids in hex."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    links: frozenset[str]
    error: str
    attributes: dict[str, Any]


class Collector:
    """Receives OTLP over gRPC."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

        self._response = trace_service_pb2.ExportTraceServiceResponse
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for resource in request.resource_spans:
            about = {each.key: each.value.string_value for each in resource.resource.attributes}
            spans = [decode(about["service.name"], span) for scope in resource.scope_spans for span in scope.spans]
            with self._lock:
                self._spans += spans
        return self._response()

    def spans(self, trace: str = "") -> list[Span]:
        """Those received, of one trace if it is given."""
        with self._lock:
            return [span for span in self._spans if trace in ("", span.trace)]

    def close(self) -> None:
        self._server.stop(None)


def decode(service: str, span: Any) -> Span:
    values = {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
    return Span(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        frozenset(link.span_id.hex() for link in span.links),
        span.status.message if span.status.code == ERROR else "",
        values,
    )


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    installed()
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def services(collector: Collector) -> Iterator[LocalServices]:
    flags = ("--otlp-endpoint", collector.endpoint)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # how often a process sends, in milliseconds
        patch.setenv("OTEL_TRACES_SAMPLER", "always_on")  # of traces that begin there: none do
        with LocalServices.start(
            model=DEMO_MODEL, num_blocks=64, extra_cachemgr_args=flags, extra_worker_args=flags
        ) as started:
            yield started


def generate(services: LocalServices, tracing: Any, *prompts: list[int]) -> list[Completion]:
    async def main() -> list[Completion]:
        async with Engine.connect(services.cachemgr_address, tracing=tracing) as engine:
            return await engine.complete(prompts, PARAMS)

    return asyncio.run(main())


def traced(services: LocalServices, collector: Collector, *prompts: list[int]) -> list[Span]:
    """The spans of a run with tracing: all of its traces'."""
    tracing, provider = otlp_tracing(collector.endpoint)
    before = {span.span for span in collector.spans()}
    generate(services, tracing, *prompts)
    provider.shutdown()
    return sent_since(before, collector)


def sent_since(before: set[str], collector: Collector) -> list[Span]:
    """All of the traces that a client has sent, and sends no more of, when the spans of both services have come."""
    ours = [span for span in collector.spans() if span.span not in before and span.service == "quire-client"]
    calls = {span.span for span in ours if span.name in ("quire.plan", "quire.step")}
    traces = {span.trace for span in ours}

    def all_there() -> bool:
        return calls <= {span.parent for span in collector.spans() if span.service != "quire-client"}

    await_that("every call has a span of its service", all_there)
    return [span for span in collector.spans() if span.trace in traces]


def test_a_request_is_one_trace_across_three_processes(services: LocalServices, collector: Collector) -> None:
    spans = traced(services, collector, PROMPT)
    assert len({span.trace for span in spans}) == 1
    assert {span.service for span in spans} == {"quire-client", "quire-cachemgr", "quire-worker"}
    (request,) = [span for span in spans if span.name == "quire.generate"]
    assert request.parent == ""
    assert request.attributes["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert request.attributes["gen_ai.usage.output_tokens"] == NUM_TOKENS
    assert [value.string_value for value in request.attributes["gen_ai.response.finish_reasons"].values] == ["length"]
    for name, server in (("quire.plan", f"{CACHE}/PlanStep"), ("quire.step", f"{WORKER}/RunSteps")):
        calls = [span for span in spans if span.name == name]
        assert len(calls) >= NUM_TOKENS
        assert {span.parent for span in calls} == {request.span}
        answered = [span for span in spans if span.name == server]
        assert sorted(span.parent for span in answered) == sorted(span.span for span in calls)
        assert all(span.attributes["rpc.grpc.status_code"] == 0 for span in answered)
    assert len(spans) == 1 + 2 * sum(span.name in ("quire.plan", "quire.step") for span in spans)
    assert not [span for span in spans if span.error]


def test_steps_say_what_they_did(services: LocalServices, collector: Collector) -> None:
    steps = [span for span in traced(services, collector, PROMPT) if span.name == "quire.step"]
    numbers = sorted(span.attributes["quire.step_number"] for span in steps)
    assert numbers == list(range(1, len(steps) + 1))
    assert sum(span.attributes["quire.tokens"] for span in steps) == len(PROMPT) + NUM_TOKENS - 1
    assert all(span.attributes["quire.forward_s"] > 0 for span in steps)


def test_a_step_for_several_requests_is_linked_to_all(services: LocalServices, collector: Collector) -> None:
    prompts = [draw_tokens(9, seed=seed) for seed in (2, 3, 4)]
    spans = traced(services, collector, *prompts)
    requests = {span.span for span in spans if span.name == "quire.generate"}
    assert len(requests) == len({span.trace for span in spans if span.span in requests}) == 3
    shared = [span for span in spans if span.name == "quire.step" and span.attributes["quire.requests"] == 3]
    assert shared
    for span in shared:
        assert {span.parent} | span.links == requests


def test_a_request_belongs_to_what_its_caller_is_in(services: LocalServices, collector: Collector) -> None:
    tracing, provider = otlp_tracing(collector.endpoint)
    with provider.get_tracer("app").start_as_current_span("work") as work:
        generate(services, tracing, PROMPT)
    provider.shutdown()
    trace = f"{work.get_span_context().trace_id:032x}"
    (request,) = [span for span in collector.spans(trace) if span.name == "quire.generate"]
    assert request.parent == f"{work.get_span_context().span_id:016x}"


def test_what_is_not_sampled_is_not_told(services: LocalServices, collector: Collector) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

    from quire.client.engine.tracing import Tracing

    before = {span.trace for span in collector.spans()}
    generate(services, Tracing(TracerProvider(sampler=ALWAYS_OFF)), PROMPT)
    (trace,) = {span.trace for span in traced(services, collector, PROMPT)}
    assert {span.trace for span in collector.spans()} - before == {trace}


def test_tracing_changes_no_token(services: LocalServices, collector: Collector) -> None:
    prompts = [draw_tokens(20, seed=seed) for seed in range(5, 9)]
    tracing, provider = otlp_tracing(collector.endpoint)
    with_tracing = generate(services, tracing, *prompts)
    provider.shutdown()
    without = generate(services, None, *prompts)
    assert [each.samples for each in with_tracing] == [each.samples for each in without]


@pytest.mark.parametrize("flags", ["01", "00"])
def test_a_refused_call_says_why_and_an_unsampled_one_nothing(
    services: LocalServices, collector: Collector, flags: str
) -> None:
    trace, parent = f"{int(flags) + 1:032x}", "00000000000000ab"
    metadata = (("traceparent", f"00-{trace}-{parent}-{flags}"),)
    with grpc.insecure_channel(services.cachemgr_address) as channel:
        stub = cache_service_pb2_grpc.CacheServiceStub(channel)
        with pytest.raises(grpc.RpcError):
            stub.RenewLease(cache_service_pb2.RenewLeaseRequest(lease_id="gone"), timeout=DEADLINE_S, metadata=metadata)
    traced(services, collector, PROMPT)  # earlier spans have arrived
    found = [(span.name, span.parent, span.error) for span in collector.spans(trace)]
    assert found == ([(f"{CACHE}/RenewLease", parent, "LEASE_NOT_FOUND")] if flags == "01" else [])


@pytest.mark.parametrize("context", ["", "nonsense", "00-00000000000000000000000000000000-0000000000000000-01"])
def test_a_context_that_is_none_does_no_harm(services: LocalServices, collector: Collector, context: str) -> None:
    with grpc.insecure_channel(services.cachemgr_address) as channel:
        stub = cache_service_pb2_grpc.CacheServiceStub(channel)
        request = cache_service_pb2.ListPoolsRequest()
        assert len(stub.ListPools(request, timeout=DEADLINE_S, metadata=(("traceparent", context),)).pools) == 1


def test_what_is_left_is_sent_at_the_end(collector: Collector, model_dir: Path) -> None:
    flags = ("--otlp-endpoint", collector.endpoint)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
        with LocalServices.start(
            model=model_dir, num_blocks=64, extra_cachemgr_args=flags, extra_worker_args=flags
        ) as services:
            tracing, provider = otlp_tracing(collector.endpoint)
            generate(services, tracing, PROMPT)
            provider.shutdown()
            trace = [span for span in collector.spans() if span.name == "quire.generate"][-1].trace
            assert {span.service for span in collector.spans(trace)} == {"quire-client"}
    assert {span.service for span in collector.spans(trace)} == {"quire-client", "quire-cachemgr", "quire-worker"}


# The gateway.


@dataclass(frozen=True)
class Gateway:
    """A gateway that sends its spans, and begins a trace for each HTTP request without one."""

    url: str
    grpc: str

    def complete(self, traceparent: str = "", *, model: str = "demo") -> httpx.Response:
        body = {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        headers = {"traceparent": traceparent, "x-request-id": "one-request"}
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def gateway(
    services: LocalServices, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    address = f"unix:{tmp_path_factory.mktemp('gateway')}/grpc.sock"
    flags = ("--listen", "127.0.0.1:0", "--grpc-listen", address, "--served-model-name", "demo")
    process = subprocess.Popen(
        [sys.executable, "-m", "quire.gateway", "--cachemgr", services.cachemgr_address, *flags],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ
        | {"QUIRE_SERVE_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50", **SAMPLED_BY_PARENTS},
    )
    try:
        assert process.stdout is not None
        yield Gateway(process.stdout.readline().split()[-1], address)
    finally:
        process.kill()
        process.wait(DEADLINE_S)


def of_trace(collector: Collector, trace: str, name: str) -> list[Span]:
    """All spans of a trace, once there is one with this name."""
    await_that(f"a span {name} has come", lambda: name in {span.name for span in collector.spans(trace)})
    return collector.spans(trace)


def test_an_http_request_is_one_trace_across_four_processes(gateway: Gateway, collector: Collector) -> None:
    trace, parent = f"{77:032x}", "00000000000000cd"
    assert gateway.complete(f"00-{trace}-{parent}-01").status_code == 200
    spans = of_trace(collector, trace, "POST /v1/completions")
    assert {span.service for span in spans} == {"quire-serve", "quire-cachemgr", "quire-worker"}
    (request,) = [span for span in spans if span.name == "POST /v1/completions"]
    assert request.parent == parent
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["quire.request_id"] == "one-request"
    (generated,) = [span for span in spans if span.name == "quire.generate"]
    assert generated.parent == request.span
    assert generated.attributes["gen_ai.usage.output_tokens"] == NUM_TOKENS


def test_an_http_request_without_a_trace_begins_one(gateway: Gateway, collector: Collector) -> None:
    before = {span.trace for span in collector.spans()}
    assert gateway.complete(model="another").status_code == 404
    httpx.get(f"{gateway.url}/metrics", timeout=DEADLINE_S)
    assert gateway.complete().status_code == 200

    def begun() -> list[Span]:
        return [span for span in collector.spans() if span.trace not in before and not span.parent]

    await_that("both traces have come", lambda: len(begun()) >= 2)
    assert [(span.name, span.attributes["http.response.status_code"]) for span in begun()] == [
        ("POST /v1/completions", 404),
        ("POST /v1/completions", 200),
    ]


def test_an_http_request_of_a_trace_that_is_not_sampled_has_no_span(gateway: Gateway, collector: Collector) -> None:
    trace = f"{78:032x}"
    assert gateway.complete(f"00-{trace}-00000000000000cd-00").status_code == 200
    assert gateway.complete(f"00-{79:032x}-00000000000000cd-01").status_code == 200
    of_trace(collector, f"{79:032x}", "POST /v1/completions")  # earlier spans have arrived
    assert collector.spans(trace) == []


@pytest.mark.parametrize("flags", ["01", "00"])
def test_a_call_of_the_engine_service_has_its_requests_as_children(
    gateway: Gateway, collector: Collector, flags: str
) -> None:
    trace = f"{80 + int(flags):032x}"
    request = engine_service_pb2.GenerateRequest()
    request.prompt.token_ids.token_ids.extend(PROMPT)
    request.parameters.max_tokens = NUM_TOKENS
    with grpc.insecure_channel(gateway.grpc) as channel:
        stub = engine_service_pb2_grpc.EngineServiceStub(channel)
        metadata = (("traceparent", f"00-{trace}-00000000000000cd-{flags}"),)
        assert list(stub.Generate(request, timeout=DEADLINE_S, metadata=metadata))
    assert gateway.complete(f"00-{90 + int(flags):032x}-00000000000000cd-01").status_code == 200
    of_trace(collector, f"{90 + int(flags):032x}", "POST /v1/completions")  # earlier spans have arrived
    found = {span.name: span for span in collector.spans(trace)}
    if flags == "00":
        assert found == {}
    else:
        assert found["quire.generate"].parent == found["quire.engine.v1.EngineService/Generate"].span


# The command line.


def quire_generate(services: LocalServices, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = (sys.executable, "-m", "quire.cli", "generate", "The default value is", "--temperature", "0")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    return subprocess.Popen(
        [*command, "--max-tokens", str(NUM_TOKENS), "--cachemgr", services.cachemgr_address, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=kept | environment,
    )


@pytest.mark.parametrize("way", ["flag", "environment"])
def test_the_command_line_sends_a_trace(services: LocalServices, collector: Collector, way: str) -> None:
    before = {span.span for span in collector.spans()}
    flags = ("--otlp-endpoint", collector.endpoint) if way == "flag" else ()
    environment = {"QUIRE_GENERATE_OTLP_ENDPOINT": collector.endpoint} if way == "environment" else {}
    with quire_generate(services, "--json", *flags, **environment) as process:
        said, complaints = process.communicate(timeout=120)
    assert (process.returncode, complaints) == (0, "")
    completion = json.loads(said)
    spans = sent_since(before, collector)
    assert {span.service for span in spans} == {"quire-client", "quire-cachemgr", "quire-worker"}
    (request,) = [span for span in spans if span.name == "quire.generate"]
    assert request.attributes["gen_ai.usage.input_tokens"] == len(completion["prompt_token_ids"])
    assert request.attributes["gen_ai.usage.output_tokens"] == len(completion["samples"][0]["token_ids"])


def test_without_being_asked_the_command_line_sends_none(services: LocalServices, collector: Collector) -> None:
    before = len(collector.spans())
    with quire_generate(services) as process:
        process.communicate(timeout=120)
    assert process.returncode == 0
    traced(services, collector, PROMPT)
    assert len([span for span in collector.spans()[before:] if span.name == "quire.generate"]) == 1


def test_a_collector_that_is_away_holds_up_the_end_for_a_moment_only(services: LocalServices) -> None:
    flags = ("--otlp-endpoint", "http://127.0.0.1:1")
    with quire_generate(services, *flags, OTEL_EXPORTER_OTLP_TIMEOUT="300") as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip()
        text_s = time.monotonic()
        process.communicate(timeout=120)
        assert time.monotonic() - text_s < 25  # the SDK's own patience is 30 s
    assert process.returncode == 0


# What everybody has.


def test_a_stream_begins_to_be_answered_when_its_first_step_is_in_line(pair: Pair, create_lease: CreateLease) -> None:
    lease = create_lease()
    with pair.held() as hold:
        running = lease.start(lease.admit((1, draw_tokens(9, seed=1))))
        hold.await_running()
        plan = lease.extend(1)
        requests = [worker_service_pb2.RunStepsRequest(step=lease.step(plan))]
        following = pair.worker.RunSteps(iter(requests), timeout=DEADLINE_S)
        following.initial_metadata()
        assert not running.done()
        assert following.is_active()
    lease.finish(running)
    (answer,) = following
    assert answer.step.step_number == 2
    lease.await_settled()


def test_nothing_is_imported_unless_it_is_asked_for() -> None:
    program = (
        "import sys, quire.client.engine.engine, quire.cachemgr.__main__, quire.worker.service.servicer\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (("quire.cachemgr",), 2),
        (("quire.worker", "--model", "none"), 2),
        (("quire.cli", "generate", "Once"), 1),
    ],
)
def test_a_missing_extra_is_said_at_the_start(tmp_path: Path, command: tuple[str, ...], status: int) -> None:
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry" / "__init__.py").write_text("raise ImportError('none here')")
    done = subprocess.run(
        [sys.executable, "-P", "-m", *command, "--otlp-endpoint", "http://127.0.0.1:4317"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == status
    assert "quire-kv[otel]" in done.stderr
    assert "Traceback" not in done.stderr
