"""Measurements of an engine's requests and steps, and the Prometheus page with them.

docs/how-to/observability.md lists its metrics.
"""

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from quire.client.engine.scheduling.guessing import DrafterCounts
from quire.client.engine.scheduling.sequence import FinishReason, Sequence
from quire.client.engine.scheduling.statistics import SchedulerStatistics
from quire.client.errors import InvalidRequest
from quire.serving.addresses import AddressError, UnixAddress, parse_listen_address
from quire.serving.loop_collector import LoopCollector
from quire.serving.metrics_server import MetricsServer

FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)
REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
ROUND_TRIP_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
REQUEST_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)

Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]
Labels = Mapping[str, str]


class Histogram:
    """Values in buckets by their upper bounds, a bound being inside."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Take a value, so many times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.total += value * count

    @property
    def count(self) -> int:
        """Values taken."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, int]]:
        """For each bound, and infinity, how many values are not above it."""
        bounds = map(floatToGoString, (*self._bounds, inf))
        return list(zip(bounds, accumulate(self._counts), strict=True))


@dataclass(slots=True)
class Measured:
    """Measurements since the engine started. Times in seconds.

    first_token    from a request to its first token
    inter_token    from a token to the next one of the same sample, as steps bring them
    request        from a request to its last token; of those that ended with all samples
    plan, step     a plan's and a step's round trip; a step's begins when it is sent, after the one before it
    prompt, generated  tokens of such a request
    finished           samples by their finish reason
    num_prompt_tokens  of requests that have got a first token
    """

    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    inter_token: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_S))
    request: Histogram = field(default_factory=lambda: Histogram(REQUEST_S))
    plan: Histogram = field(default_factory=lambda: Histogram(ROUND_TRIP_S))
    step: Histogram = field(default_factory=lambda: Histogram(ROUND_TRIP_S))
    prompt: Histogram = field(default_factory=lambda: Histogram(REQUEST_TOKENS))
    generated: Histogram = field(default_factory=lambda: Histogram(REQUEST_TOKENS))
    finished: Counter[FinishReason] = field(default_factory=Counter)
    num_prompt_tokens: int = 0

    def tokens(self, sequences: Iterable[Sequence], at_s: float) -> None:
        """Take the times since the last tokens of sequences that got another one at this time.

        Most of a step got their last ones together: they are counted together.
        """
        last_s, count = 0.0, 0
        for sequence in sequences:
            if sequence.last_token_s != last_s:
                if count:
                    self.inter_token.observe(at_s - last_s, count)
                last_s, count = sequence.last_token_s, 0
            if last_s:
                count += 1
            sequence.last_token_s = at_s
        if count:
            self.inter_token.observe(at_s - last_s, count)

    def further_tokens(self, count: int) -> None:
        """Take so many tokens that came with one before them, in the same step."""
        self.inter_token.observe(0.0, count)


class RequestTimes:
    """A request's begin and progress, for Measured."""

    __slots__ = ("_began_s", "_has_begun", "_measured", "_num_open", "_num_prompt")

    def __init__(self, measured: Measured, *, began_s: float, num_prompt_tokens: int, num_samples: int) -> None:
        """Times by the same clock throughout."""
        self._measured = measured
        self._began_s = began_s
        self._has_begun = False
        self._num_prompt = num_prompt_tokens
        self._num_open = num_samples

    def begin(self, at_s: float) -> None:
        """The request got a token: its first one, if this is the first call."""
        if not self._has_begun:
            self._has_begun = True
            self._measured.first_token.observe(at_s - self._began_s)
            self._measured.num_prompt_tokens += self._num_prompt

    def finish_one(self, reason: FinishReason, at_s: float, *, num_generated: int) -> None:
        """A sample has ended; the request has so many tokens by now, of all samples."""
        self._measured.finished[reason] += 1
        self._num_open -= 1
        if not self._num_open:
            self._measured.request.observe(at_s - self._began_s)
            self._measured.prompt.observe(self._num_prompt)
            self._measured.generated.observe(num_generated)

    def close(self, reason: FinishReason) -> None:
        """The request ends now; samples that have not ended end for this reason."""
        self._measured.finished[reason] += self._num_open
        self._num_open = 0


# The page.


@dataclass(frozen=True, slots=True)
class EngineLook:
    """The content of a page: the engine's state, its numbers, its measurements."""

    pool: str
    model: str
    scheduler: SchedulerStatistics
    num_requests: int
    computed_steps: int
    recoveries: int
    host_bytes: Mapping[str, int]
    """Copied to the pool's host tier and back, by "offload" and "restore"."""
    measured: Measured
    drafters: Mapping[str, DrafterCounts] = field(default_factory=dict)


def families(look: EngineLook) -> list[Metric]:
    """All metrics of an engine."""
    scheduler, measured = look.scheduler, look.measured
    states = {
        "running": scheduler.num_running,
        "waiting": scheduler.num_waiting,
        "following": scheduler.num_following,
        "draining": scheduler.num_draining,
    }
    reasons = {reason.value: measured.finished[reason] for reason in FinishReason}
    common = {"pool": look.pool, "model": look.model}
    made: list[Metric] = [
        _by_label(GaugeMetricFamily, "sequences", "Sequences by state.", common, "state", states),
        _single(
            GaugeMetricFamily,
            "offloaded_sequences",
            "Of those that wait or drain, those that the host tier keeps.",
            common,
            scheduler.num_offloaded,
        ),
        _single(GaugeMetricFamily, "requests", "Requests that have not ended.", common, look.num_requests),
        _single(
            GaugeMetricFamily, "steps_in_flight", "Steps sent and not ended.", common, scheduler.num_steps_in_flight
        ),
        _by_label(
            CounterMetricFamily,
            "host_copied_bytes",
            "Copied to the pool's host tier and back.",
            common,
            "direction",
            look.host_bytes,
        ),
        _by_label(CounterMetricFamily, "samples_finished", "Samples that ended, by reason.", common, "reason", reasons),
    ]
    for name, text, attribute in _DRAFTS:
        values = {drafter: getattr(counts, attribute) for drafter, counts in look.drafters.items()}
        made.append(_by_label(CounterMetricFamily, name, text, common, "drafter", values))
    made += [_single(CounterMetricFamily, name, text, common, value) for name, text, value in _totals(look)]
    made += [_histogram(name, text, common, values) for name, text, values in _histograms(measured)]
    return made


_DRAFTS = (
    ("drafts", "Runs of sequences with drafts.", "runs"),
    ("drafted_tokens", "Tokens guessed in these.", "drafted"),
    ("accepted_tokens", "Of these, tokens that were the sampled ones.", "accepted"),
)


def _totals(look: EngineLook) -> Iterable[tuple[str, str, int]]:
    scheduler = look.scheduler
    return (
        ("prompt_tokens", "Tokens of prompts that were processed.", look.measured.num_prompt_tokens),
        ("admitted_tokens", "Tokens admitted, those of sequences admitted again too.", scheduler.admitted_tokens),
        ("cached_tokens", "Tokens admitted that were found in the cache.", scheduler.cached_tokens),
        ("generation_tokens", "Tokens generated.", scheduler.sampled_tokens),
        ("preemptions", "Running sequences that were preempted for others.", scheduler.preemptions),
        ("offloads", "Preemptions that moved computed blocks to the host tier.", scheduler.offloads),
        ("restores", "Sequences that came back from the host tier.", scheduler.restores),
        ("restored_tokens", "Tokens of these that were not computed again.", scheduler.restored_tokens),
        ("refusals", "Items of plans that cachemgr refused.", scheduler.refusals),
        ("steps_planned", "Steps planned.", scheduler.planned_steps),
        ("steps_computed", "Steps computed.", look.computed_steps),
        ("steps_failed", "Steps that computed nothing.", scheduler.failed_steps),
        ("recoveries", "Times the engine began anew after a failure of a service.", look.recoveries),
    )


def _histograms(measured: Measured) -> Iterable[tuple[str, str, Histogram]]:
    return (
        ("time_to_first_token_seconds", "From a request to its first token.", measured.first_token),
        ("inter_token_latency_seconds", "From a sample's token to its next.", measured.inter_token),
        ("request_latency_seconds", "From a request to its last token.", measured.request),
        ("plan_seconds", "Round trips of plans to cachemgr.", measured.plan),
        ("step_seconds", "Round trips of steps to the worker.", measured.step),
        ("request_prompt_tokens", "Prompt tokens of requests that ended.", measured.prompt),
        ("request_generation_tokens", "Generated tokens of requests that ended.", measured.generated),
    )


def _single(kind: Kind, name: str, text: str, common: Labels, value: float) -> Metric:
    family = kind(f"quire_engine_{name}", text, labels=tuple(common))
    family.add_metric(tuple(common.values()), value)
    return family


def _by_label(kind: Kind, name: str, text: str, common: Labels, label: str, values: Mapping[str, float]) -> Metric:
    family = kind(f"quire_engine_{name}", text, labels=(*common, label))
    for each, value in values.items():
        family.add_metric((*common.values(), each), value)
    return family


def _histogram(name: str, text: str, common: Labels, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(f"quire_engine_{name}", text, labels=tuple(common))
    family.add_metric(tuple(common.values()), histogram.buckets(), histogram.total)
    return family


class EnginePage:
    """Serves the page over HTTP, in plain text, on threads of its own; the numbers are read on the running loop.

    Raises InvalidRequest if it can't listen. A page is a 500 if the loop does not get to it within 5 s.
    """

    def __init__(self, address: str, read: Callable[[], EngineLook]) -> None:
        """address is "host:port", with port 0 a free one; `address` of the page has the real one."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(LoopCollector(lambda: families(read()), loop=asyncio.get_running_loop()))
        try:
            parsed = parse_listen_address(address)
            if isinstance(parsed, UnixAddress):
                raise AddressError("not a unix socket")
            self._server = MetricsServer(parsed, registry)
        except (OSError, ValueError, AddressError) as error:
            raise InvalidRequest.of_field("metrics_listen", address, f"an address to listen on ({error})") from error
        self.address = str(self._server.address)

    def close(self) -> None:
        """Stops serving and frees the port."""
        self._server.close()
