"""Measurements of the gateway, and its metrics: under vLLM's names where vLLM has the same one.

docs/how-to/observability.md lists them.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from quire.client.engine.caching import CacheOutcome
from quire.client.engine.metrics import FIRST_TOKEN_S, INTER_TOKEN_S, REQUEST_S, REQUEST_TOKENS, Histogram
from quire.client.engine.outputs import Chunk
from quire.client.errors import QuireError
from quire.gateway.errors import HttpError, http_error_of
from quire.gateway.kept_responses import KeptStatistics
from quire.gateway.routing.backend import Backend

_usage = logging.getLogger("quire.gateway.usage")
"""One line for each request that has ended."""


@dataclass(slots=True)
class ModelMeasured:
    """Measurements of one model's requests, since the start. Times in seconds.

    first_token   from the request to its first token
    inter_token   from a chunk of a sample to its next, divided by the tokens of the latter
    request       from the request to its last token
    finished      samples by why they ended
    outcomes      requests that ended, by outcome and the error's code, which is "" without an error
    """

    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    inter_token: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_S))
    request: Histogram = field(default_factory=lambda: Histogram(REQUEST_S))
    prompt: Histogram = field(default_factory=lambda: Histogram(REQUEST_TOKENS))
    generated: Histogram = field(default_factory=lambda: Histogram(REQUEST_TOKENS))
    finished: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_open: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_written_tokens: int = 0
    num_generated_tokens: int = 0


@dataclass(slots=True)
class TenantMeasured:
    """Measurements of one tenant's requests to one model, since the start.

    first_token_s   sum of the times from a request to its first token; num_first_tokens requests have one
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_written_tokens: int = 0
    num_generated_tokens: int = 0
    num_first_tokens: int = 0
    first_token_s: float = 0.0


class RequestMeasure:
    """Measures one request while it runs, for its model and its tenant."""

    __slots__ = ("_began_s", "_last_s", "_measured", "_tenant", "cache_outcome", "num_generated_tokens")

    def __init__(self, measured: ModelMeasured, tenant: TenantMeasured, began_s: float) -> None:
        self._measured = measured
        self._tenant = tenant
        self._began_s = began_s
        self._last_s: dict[int, float] = {}
        self.cache_outcome = CacheOutcome()
        self.num_generated_tokens = 0

    def chunk(self, chunk: Chunk, at_s: float) -> None:
        """Count a chunk that came at this time of time.perf_counter()."""
        measured, num_tokens = self._measured, len(chunk.token_ids)
        if num_tokens:
            last_s = self._last_s.get(chunk.index)
            if last_s is not None:
                measured.inter_token.observe((at_s - last_s) / num_tokens, num_tokens)
            elif not self._last_s:
                measured.first_token.observe(at_s - self._began_s)
                self._tenant.num_first_tokens += 1
                self._tenant.first_token_s += at_s - self._began_s
            self._last_s[chunk.index] = at_s
            self.num_generated_tokens += num_tokens
            measured.num_generated_tokens += num_tokens
            self._tenant.num_generated_tokens += num_tokens
        if (outcome := chunk.cache_outcome) is not None:
            self.cache_outcome = outcome
            for each in (measured, self._tenant):
                each.num_cached_tokens += outcome.num_cached_tokens
                each.num_written_tokens += outcome.num_written_tokens
        if chunk.finish_reason is not None:
            measured.finished[chunk.finish_reason.value] += 1


class GatewayMetrics:
    """All measures of a gateway process."""

    def __init__(self) -> None:
        self._models: dict[str, ModelMeasured] = {}
        self._tenants: dict[tuple[str, str], TenantMeasured] = {}
        self._answers: Counter[tuple[str, int]] = Counter()

    def answered(self, path: str, status: int) -> None:
        """Count an HTTP answer; path is a route's, never the caller's own text."""
        self._answers[path, status] += 1

    @contextmanager
    def request(self, model: str, num_prompt_tokens: int, *, tenant: str = "") -> Iterator[RequestMeasure]:
        """Measure a request from here to the end of the block."""
        measured = self._models.setdefault(model, ModelMeasured())
        began_s = time.perf_counter()
        of_tenant = self._tenants.setdefault((model, tenant), TenantMeasured())
        request = RequestMeasure(measured, of_tenant, began_s)
        measured.num_open += 1
        measured.num_prompt_tokens += num_prompt_tokens
        of_tenant.num_requests += 1
        of_tenant.num_prompt_tokens += num_prompt_tokens
        try:
            yield request
            measured.request.observe(time.perf_counter() - began_s)
            measured.prompt.observe(num_prompt_tokens)
            measured.generated.observe(request.num_generated_tokens)
            measured.outcomes["completed", ""] += 1
        except BaseException as error:
            measured.outcomes[_outcome_of(error, has_tokens=request.num_generated_tokens > 0)] += 1
            raise
        finally:
            measured.num_open -= 1
            _log_usage(tenant, model, num_prompt_tokens, request)

    def families(self, backends: Iterable[Backend], *, tenant: str | None = None) -> Iterator[Metric]:
        """All metrics, as they are now. With a tenant: of tenants those of this one alone."""
        each = list(backends)
        for backend in each:
            self._models.setdefault(backend.model_names[0], ModelMeasured())
        is_ready = bool(each) and all(backend.is_ready for backend in each)
        yield GaugeMetricFamily(
            "quire_gateway_ready", "Whether a request for any served model would be computed now.", value=int(is_ready)
        )
        yield from _of_backends(each)
        yield from _of_pools(each)
        yield from _of_models(self._models)
        shown = {key: each for key, each in self._tenants.items() if tenant is None or key[1] == tenant}
        yield from _of_tenants(shown)
        answers = CounterMetricFamily(
            "quire_gateway_http_answers", "HTTP answers by route and status.", labels=("path", "status")
        )
        for (path, status), count in self._answers.items():
            answers.add_metric((path, str(status)), count)
        yield answers


def _log_usage(tenant: str, model: str, num_prompt_tokens: int, request: RequestMeasure) -> None:
    """Write a line for the bill of a tenant; without tenants at the level of debugging."""
    outcome = request.cache_outcome
    _usage.log(
        logging.INFO if tenant else logging.DEBUG,
        "usage tenant=%s model=%s prompt_tokens=%d cached_tokens=%d cache_write_tokens=%d kept_tokens=%d "
        "generated_tokens=%d",
        *(tenant, model, num_prompt_tokens, outcome.num_cached_tokens, outcome.num_written_tokens),
        *(outcome.num_kept_tokens, request.num_generated_tokens),
    )


def kept_families(kept: KeptStatistics) -> Iterator[Metric]:
    """Metrics of the responses that are kept for their callers."""
    yield GaugeMetricFamily("quire_gateway_kept_responses", "Responses kept for their callers.", kept.num_responses)
    yield GaugeMetricFamily("quire_gateway_kept_response_bytes", "Bytes of these, with their inputs.", kept.num_bytes)
    dropped = CounterMetricFamily(
        "quire_gateway_kept_responses_dropped", "Kept responses that were dropped.", labels=("reason",)
    )
    dropped.add_metric(("expired",), kept.num_expired)
    dropped.add_metric(("evicted",), kept.num_evicted)
    yield dropped


def _outcome_of(error: BaseException, *, has_tokens: bool) -> tuple[str, str]:
    """Return how a request ended that this error ended, and the error's code."""
    if not isinstance(error, Exception):
        return "cancelled", ""  # its generator was closed, or its task cancelled
    found = http_error_of(error) if isinstance(error, QuireError) else error
    if not isinstance(found, HttpError):
        return "interrupted" if has_tokens else "failed", "internal_error"
    if has_tokens:
        return "interrupted", found.code
    return "refused" if found.status < 500 else "failed", found.code


def _of_backends(backends: Sequence[Backend]) -> Iterator[Metric]:
    statistics = {backend.model_names[0]: backend.statistics() for backend in backends}
    gauges = (
        ("vllm:num_requests_running", "Sequences that hold blocks.", "num_running"),
        ("vllm:num_requests_waiting", "Sequences that wait for blocks.", "num_waiting"),
    )
    for name, text, attribute in gauges:
        gauge = GaugeMetricFamily(name, text, labels=("model_name",))
        for model, each in statistics.items():
            gauge.add_metric((model,), getattr(each, attribute))
        yield gauge
    counters = (
        ("vllm:num_preemptions", "Running sequences that gave their blocks back for others.", "preemptions"),
        ("vllm:spec_decode_num_drafts", "Runs of sequences with drafts.", "drafts"),
        ("vllm:spec_decode_num_draft_tokens", "Tokens guessed in these.", "drafted_tokens"),
        ("vllm:spec_decode_num_accepted_tokens", "Of these, tokens that were the sampled ones.", "accepted_tokens"),
    )
    for name, text, attribute in counters:
        counter = CounterMetricFamily(name, text, labels=("model_name",))
        for model, each in statistics.items():
            counter.add_metric((model,), getattr(each, attribute))
        yield counter


def _of_pools(backends: Sequence[Backend]) -> Iterator[Metric]:
    """The blocks of a model's pools together, as routers read them of an engine."""
    usage = GaugeMetricFamily(
        "vllm:kv_cache_usage_perc",
        "Part of the blocks that is in use, 0 to 1; cached ones are not.",
        labels=("model_name",),
    )
    labels = ("model_name", "block_size", "num_gpu_blocks")
    config = GaugeMetricFamily("vllm:cache_config_info", "Size and number of blocks, as labels; 1.", labels=labels)
    for backend in backends:
        uses, model = backend.pool_uses, backend.model_names[0]
        if num_blocks := sum(use.num_blocks for use in uses):
            usage.add_metric((model,), sum(use.num_used for use in uses) / num_blocks)
            config.add_metric((model, str(min(use.block_size for use in uses)), str(num_blocks)), 1)
    yield usage
    yield config


_COUNTERS = (
    ("vllm:prompt_tokens", "Tokens of prompts.", "num_prompt_tokens"),
    ("vllm:generation_tokens", "Tokens generated.", "num_generated_tokens"),
    ("vllm:prefix_cache_queries", "Tokens of prompts that were looked up in the prefix cache.", "num_prompt_tokens"),
    ("vllm:prefix_cache_hits", "Of these, tokens that were found.", "num_cached_tokens"),
    (
        "quire_gateway_prefix_cache_writes",
        "Tokens of prompts that were computed in full blocks, which later requests find.",
        "num_written_tokens",
    ),
)
_HISTOGRAMS = (
    ("vllm:time_to_first_token_seconds", "From a request to its first token.", "first_token"),
    ("vllm:inter_token_latency_seconds", "From a sample's token to its next.", "inter_token"),
    ("vllm:e2e_request_latency_seconds", "From a request to its last token.", "request"),
    ("vllm:request_prompt_tokens", "Prompt tokens of requests that ended.", "prompt"),
    ("vllm:request_generation_tokens", "Generated tokens of requests that ended.", "generated"),
)


def _of_models(models: dict[str, ModelMeasured]) -> Iterator[Metric]:
    requests = GaugeMetricFamily("quire_gateway_requests", "Prompts that are generated for.", labels=("model_name",))
    for model, measured in models.items():
        requests.add_metric((model,), measured.num_open)
    yield requests
    for name, text, attribute in _COUNTERS:
        counter = CounterMetricFamily(name, text, labels=("model_name",))
        for model, measured in models.items():
            counter.add_metric((model,), getattr(measured, attribute))
        yield counter
    finished = CounterMetricFamily(
        "vllm:request_success", "Samples that ended, by reason.", labels=("model_name", "finished_reason")
    )
    for model, measured in models.items():
        for reason, count in measured.finished.items():
            finished.add_metric((model, reason), count)
    yield finished
    outcomes = CounterMetricFamily(
        "quire_gateway_requests_ended",
        "Requests that ended, by prompts: completed, cancelled by the caller, refused (4xx) or failed (5xx) before "
        "the first token, interrupted by an error after it.",
        labels=("model_name", "outcome", "code"),
    )
    for model, measured in models.items():
        for (outcome, code), count in measured.outcomes.items():
            outcomes.add_metric((model, outcome, code), count)
    yield outcomes
    for name, text, attribute in _HISTOGRAMS:
        histogram = HistogramMetricFamily(name, text, labels=("model_name",))
        for model, measured in models.items():
            values = getattr(measured, attribute)
            histogram.add_metric((model,), values.buckets(), values.total)
        yield histogram


_OF_TENANTS = (
    ("quire_gateway_tenant_requests", "Requests of a tenant, by prompts.", "num_requests"),
    ("quire_gateway_tenant_prompt_tokens", "Tokens of a tenant's prompts.", "num_prompt_tokens"),
    (
        "quire_gateway_tenant_cached_tokens",
        "Of these, tokens that the prefix cache had.",
        "num_cached_tokens",
    ),
    (
        "quire_gateway_tenant_cache_write_tokens",
        "Tokens of a tenant's prompts that were computed in full blocks, which its later requests find.",
        "num_written_tokens",
    ),
    ("quire_gateway_tenant_generation_tokens", "Tokens generated for a tenant.", "num_generated_tokens"),
)


def _of_tenants(tenants: dict[tuple[str, str], TenantMeasured]) -> Iterator[Metric]:
    """Tenants have names in the file of keys, so there are few; without keys there is one, named ""."""
    labels = ("model_name", "tenant")
    for name, text, attribute in _OF_TENANTS:
        counter = CounterMetricFamily(name, text, labels=labels)
        for key, measured in tenants.items():
            counter.add_metric(key, getattr(measured, attribute))
        yield counter
    first_token = SummaryMetricFamily(
        "quire_gateway_tenant_time_to_first_token_seconds", "From a tenant's request to its first token.", labels=labels
    )
    for key, measured in tenants.items():
        first_token.add_metric(key, measured.num_first_tokens, measured.first_token_s)
    yield first_token
