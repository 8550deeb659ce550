"""The gaps between a worker's steps, from the buckets of its metric: the mean, and quantiles within a bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isinf

from prometheus_client.parser import text_string_to_metric_families

NAME = "quire_worker_step_gap_seconds"


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps up to some time: how many were at most so many seconds long, by limit, rising; and their sum."""

    counts: Mapping[float, float]
    sum_s: float

    def since(self, before: Gaps) -> Gaps:
        """Return the gaps after the others."""
        counts = {limit: count - before.counts[limit] for limit, count in self.counts.items()}
        return Gaps(counts, self.sum_s - before.sum_s)

    def describe(self) -> dict[str, float]:
        """Return their number, mean, median and 99th percentile, in µs; no more than the number if there are none."""
        number = max(self.counts.values())
        if not number:
            return {"num": 0}
        quantiles = {f"p{percent}_us": round(1e6 * self._quantile(percent / 100), 1) for percent in (50, 99)}
        return {"num": int(number), "mean_us": round(1e6 * self.sum_s / number, 1), **quantiles}

    def _quantile(self, part: float) -> float:
        wanted, low, below = part * max(self.counts.values()), 0.0, 0.0
        for limit, count in sorted(self.counts.items()):
            if count >= wanted:
                if isinf(limit):
                    break
                return low + (limit - low) * (wanted - below) / (count - below)
            low, below = limit, count
        return low


def gaps_of_page(text: str) -> Gaps:
    """Read the gaps from a worker's page of metrics."""
    (family,) = [each for each in text_string_to_metric_families(text) if each.name == NAME]
    (total,) = [sample.value for sample in family.samples if sample.name == f"{NAME}_sum"]
    buckets = [(sample.labels["le"], sample.value) for sample in family.samples if sample.name == f"{NAME}_bucket"]
    return gaps_of_buckets(buckets, total)


def gaps_of_buckets(buckets: Sequence[tuple[str, float]], sum_s: float) -> Gaps:
    """Make the gaps of buckets as Prometheus has them."""
    return Gaps({float(limit): count for limit, count in buckets}, sum_s)
