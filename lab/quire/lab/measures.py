"""The results of a run: figures of all requests, figures over time, by tenant and by pool. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from quire.lab.config import Limits

_QUANTILES = tuple(range(101))
_MOST_SAMPLES = 256


@dataclass(slots=True)
class Record:
    """One request. Times in seconds from the beginning of the run; pool is an index.

    num_output is the length that the answer should have, num_generated the length that it had.
    """

    tenant: str
    num_prompt: int
    num_output: int
    pool: int = -1
    arrived_at_s: float = 0.0
    first_at_s: float | None = None
    ended_at_s: float | None = None
    num_cached: int = 0
    num_generated: int = 0
    was_refused: bool = False

    @property
    def first_token_s(self) -> float:
        """From the arrival to the first token."""
        return _known(self.first_at_s) - self.arrived_at_s

    @property
    def latency_s(self) -> float:
        """From the arrival to the last token."""
        return _known(self.ended_at_s) - self.arrived_at_s

    @property
    def token_s(self) -> float | None:
        """Mean time of each token after the first; None with one token."""
        if self.num_generated < 2:
            return None
        return (_known(self.ended_at_s) - _known(self.first_at_s)) / (self.num_generated - 1)

    def is_good(self, limits: Limits) -> bool:
        """True if its times keep the limits."""
        return self.first_token_s <= limits.first_token_s and (self.token_s or 0.0) <= limits.token_s


def _known(at_s: float | None) -> float:
    if at_s is None:
        raise AssertionError("a time is asked for that has not come")
    return at_s


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of the report: its name, its unit, and if more of it is better, worse, or neither.

    is_of_host_tier   it says something only about pools with a host tier
    is_of_disk        it says something only about pools with a disk
    """

    title: str
    unit: str
    better: str = ""
    digits: int = 0
    is_of_host_tier: bool = False
    is_of_disk: bool = False


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "requests": Metric("requests", ""),
        "refused": Metric("requests that can never fit, refused", "", "less"),
        "duration_s": Metric("from the first arrival to the last token", "s", digits=1),
        "first_token_p50_s": Metric("time to first token, median", "s", "less", 3),
        "first_token_p90_s": Metric("time to first token, 90 %", "s", "less", 3),
        "first_token_p99_s": Metric("time to first token, 99 %", "s", "less", 3),
        "token_p50_s": Metric("time per further token, median", "s", "less", 4),
        "token_p90_s": Metric("time per further token, 90 %", "s", "less", 4),
        "token_p99_s": Metric("time per further token, 99 %", "s", "less", 4),
        "latency_p50_s": Metric("time to last token, median", "s", "less", 2),
        "latency_p99_s": Metric("time to last token, 99 %", "s", "less", 2),
        "goodput_per_s": Metric("good requests a second", "", "more", 3),
        "good_ratio": Metric("requests that keep the limits", "%", "more", 1),
        "output_tokens_per_s": Metric("generated tokens a second", "", "more"),
        "hit_ratio": Metric("prompt tokens found in the cache", "%", "more", 2),
        "host_hit_ratio": Metric("prompt tokens found in the host tier", "%", "more", 2, is_of_host_tier=True),
        "disk_hit_ratio": Metric("of these, read from the disk", "%", "more", 2, is_of_disk=True),
        "evicted_blocks": Metric("evicted blocks", "", "less"),
        "preemptions": Metric("preemptions", "", "less"),
        "offloads": Metric("of these, kept in the host tier", "", is_of_host_tier=True),
        "restores": Metric("restored from the host tier", "", is_of_host_tier=True),
        "copied_blocks": Metric("blocks copied to the host tier and back", "", "less", is_of_host_tier=True),
        "copying_ratio": Metric("time in which a worker copies", "%", "less", 1, is_of_host_tier=True),
        "computed_tokens": Metric("computed tokens", "", "less"),
        "recomputed_tokens": Metric("of these, computed before and evicted since", "", "less"),
        "busy_ratio": Metric("time in which a worker computes", "%", digits=1),
        "used_ratio": Metric("blocks that sequences hold, mean", "%", digits=1),
        "batch_tokens": Metric("tokens of a step, mean", "", digits=1),
        "fairness": Metric("fairness between tenants, Jain's index", "", "more", 3),
    }
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of one run, as values for JSON. The same configuration and seed give the same results.

    metrics     by the names of METRICS
    series      parallel lists by name: `at_s`, present numbers, and counters since the beginning
    arrivals    parallel lists by name, over equal parts of the time: medians and ratios of the requests that arrived
    quantiles   0 to 100 %, of the times that the pictures show
    tenants     figures by tenant
    pools       figures by pool
    layer_groups    blocks by layer group, of all pools; empty with one group
    """

    name: str
    seed: int
    metrics: dict[str, float]
    series: dict[str, list[float]]
    arrivals: dict[str, list[float | None]]
    quantiles: dict[str, list[float]]
    tenants: dict[str, dict[str, float]]
    pools: list[dict[str, float]]
    layer_groups: dict[str, dict[str, float]]

    def describe(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)


@dataclass(slots=True)
class Series:
    """Samples at equal distances. When there are too many, every second one is dropped and the distance doubled."""

    every_s: float = 1.0
    next_s: float = 0.0
    samples: list[dict[str, float]] = field(default_factory=list)

    def add(self, sample: dict[str, float]) -> None:
        """Take the sample of next_s."""
        self.samples.append({"at_s": self.next_s} | sample)
        if len(self.samples) > _MOST_SAMPLES:
            self.samples = self.samples[::2]
            self.every_s *= 2
        self.next_s = self.samples[-1]["at_s"] + self.every_s

    def columns(self) -> dict[str, list[float]]:
        """A list for each name."""
        return {name: [sample[name] for sample in self.samples] for name in (self.samples[0] if self.samples else ())}


def summarise(records: Sequence[Record], limits: Limits, *, counters: Mapping[str, float]) -> dict[str, float]:
    """The metrics. counters are sums over the pools, and `seconds` of all workers together."""
    served = [record for record in records if not record.was_refused]
    first = [record.first_token_s for record in served]
    tokens = [record.token_s for record in served if record.token_s is not None]
    latency = [record.latency_s for record in served]
    begin = min((record.arrived_at_s for record in records), default=0.0)
    duration_s = max((record.latency_s + record.arrived_at_s for record in served), default=begin) - begin
    num_good = sum(record.is_good(limits) for record in served)
    num_prompt = sum(record.num_prompt for record in served)
    return {
        "requests": len(records),
        "refused": len(records) - len(served),
        "duration_s": duration_s,
        **{f"first_token_p{part}_s": quantile(first, part) for part in (50, 90, 99)},
        **{f"token_p{part}_s": quantile(tokens, part) for part in (50, 90, 99)},
        **{f"latency_p{part}_s": quantile(latency, part) for part in (50, 99)},
        "goodput_per_s": ratio(num_good, duration_s),
        "good_ratio": ratio(num_good, len(records)),
        "output_tokens_per_s": ratio(sum(record.num_generated for record in served), duration_s),
        "hit_ratio": ratio(sum(record.num_cached for record in served), num_prompt),
        "host_hit_ratio": ratio(counters["found_in_host_tokens"], num_prompt),
        "disk_hit_ratio": ratio(counters["read_from_disk_tokens"], num_prompt),
        "evicted_blocks": counters["evicted_blocks"],
        "preemptions": counters["preemptions"],
        "offloads": counters["offloads"],
        "restores": counters["restores"],
        "copied_blocks": counters["copied_blocks"],
        "copying_ratio": ratio(counters["copying_s"], duration_s * counters["workers"]),
        "computed_tokens": counters["computed_tokens"],
        "recomputed_tokens": counters["recomputed_tokens"],
        "busy_ratio": ratio(counters["busy_s"], duration_s * counters["workers"]),
        "used_ratio": counters["used_ratio"],
        "batch_tokens": ratio(counters["computed_tokens"], counters["steps"]),
        "fairness": jain(figures["speed"] for figures in by_tenant(served, limits).values()),
    }


def quantile(samples: Sequence[float], part: float) -> float:
    """A percentile; 0 without samples."""
    return float(np.percentile(samples, part)) if samples else 0.0


def ratio(part: float, whole: float) -> float:
    """The quotient; 0 if there is nothing to divide by."""
    return part / whole if whole else 0.0


def jain(values: Iterable[float]) -> float:
    """Jain's index: 1 if all are equal, 1 / n if one has everything."""
    each = list(values)
    squares = len(each) * sum(value**2 for value in each)
    return sum(each) ** 2 / squares if squares else 1.0


def quantiles_of(records: Sequence[Record]) -> dict[str, list[float]]:
    """The times of requests, at each percent."""
    served = [record for record in records if not record.was_refused]
    samples = {
        "first_token_s": [record.first_token_s for record in served],
        "token_s": [record.token_s for record in served if record.token_s is not None],
    }
    return {name: np.percentile(each, _QUANTILES).tolist() if each else [] for name, each in samples.items()}


def by_tenant(served: Sequence[Record], limits: Limits) -> dict[str, dict[str, float]]:
    """Figures of each tenant. speed: the mean of a request's generated tokens a second, from its arrival on."""
    tenants: dict[str, list[Record]] = {}
    for record in served:
        tenants.setdefault(record.tenant, []).append(record)
    return {
        tenant: {
            "requests": len(each),
            "first_token_p50_s": quantile([record.first_token_s for record in each], 50),
            "first_token_p99_s": quantile([record.first_token_s for record in each], 99),
            "good_ratio": ratio(sum(record.is_good(limits) for record in each), len(each)),
            "hit_ratio": ratio(sum(r.num_cached for r in each), sum(r.num_prompt for r in each)),
            "speed": float(np.mean([ratio(record.num_generated, record.latency_s) for record in each])),
        }
        for tenant, each in sorted(tenants.items())
    }


def over_arrivals(records: Sequence[Record], limits: Limits, *, num_parts: int = 60) -> dict[str, list[float | None]]:
    """Figures of the requests that arrived in each of equal parts of the time; None for a part without arrivals."""
    served = [record for record in records if not record.was_refused]
    if not served:
        return {}
    low, high = (pick(record.arrived_at_s for record in served) for pick in (min, max))
    width = (high - low) / num_parts or 1.0
    parts: list[list[Record]] = [[] for _ in range(num_parts)]
    for record in served:
        parts[min(num_parts - 1, int((record.arrived_at_s - low) / width))].append(record)

    def column(of: Any) -> list[float | None]:
        return [of(part) if part else None for part in parts]

    return {
        "at_s": [low + (index + 0.5) * width for index in range(num_parts)],
        "first_token_p50_s": column(lambda part: quantile([r.first_token_s for r in part], 50)),
        "first_token_p99_s": column(lambda part: quantile([r.first_token_s for r in part], 99)),
        "token_p50_s": column(lambda part: quantile([r.token_s for r in part if r.token_s is not None], 50)),
        "good_ratio": column(lambda part: ratio(sum(r.is_good(limits) for r in part), len(part))),
        "hit_ratio": column(lambda part: ratio(sum(r.num_cached for r in part), sum(r.num_prompt for r in part))),
        "requests_per_s": [len(part) / width for part in parts],
    }
