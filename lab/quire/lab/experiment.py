"""Runs of one configuration or several, with seeds, and their comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from quire.lab.config import LabConfig
from quire.lab.measures import METRICS, Metric, Outcome
from quire.lab.processes import run_in_processes
from quire.lab.requests import Request
from quire.lab.simulation import OnEnd, Simulation

# Quantiles of Student's t for a two-sided 95 % interval, by degrees of freedom from 1 on.
_T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_NORMAL_95 = 1.960


def run(
    config: LabConfig, seed: int = 1, *, requests: Sequence[Request] | None = None, on_end: OnEnd | None = None
) -> Outcome:
    """One run, of these requests or of the configuration's load. Raises ConfigError.

    on_end gets the number of requests that have ended since its last call.
    """
    return Simulation(config, seed, requests).run(on_end)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, and the half width of its 95 % interval by Student's t; None with one seed."""

    mean: float
    margin: float | None

    @classmethod
    def of(cls, samples: Sequence[float]) -> Estimate:
        """The estimate from a sample for each seed."""
        if len(samples) < 2:
            return cls(fmean(samples), None)
        t = _T_95[len(samples) - 2] if len(samples) - 2 < len(_T_95) else _NORMAL_95
        return cls(fmean(samples), t * stdev(samples) / math.sqrt(len(samples)))

    @property
    def is_clear(self) -> bool:
        """True if 0 is outside the interval."""
        return self.margin is not None and abs(self.mean) > self.margin


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs of several configurations with the same seeds, the first being the one that others are compared with."""

    configs: tuple[LabConfig, ...]
    outcomes: tuple[tuple[Outcome, ...], ...]
    """By configuration, then by seed."""

    @property
    def seeds(self) -> list[int]:
        """The seeds."""
        return [outcome.seed for outcome in self.outcomes[0]]

    @property
    def metrics(self) -> dict[str, Metric]:
        """The figures to show: those of the host tier and of the disk if a configuration has one."""
        has_host_tier = any(config.fleet.host_blocks for config in self.configs)
        has_disk = any(config.fleet.disk_blocks for config in self.configs)
        return {
            name: metric
            for name, metric in METRICS.items()
            if (has_host_tier or not metric.is_of_host_tier) and (has_disk or not metric.is_of_disk)
        }

    def estimate(self, index: int, metric: str) -> Estimate:
        """A metric of a configuration."""
        return Estimate.of([outcome.metrics[metric] for outcome in self.outcomes[index]])

    def change(self, index: int, metric: str) -> Estimate:
        """The difference from the first configuration, in pairs of the same seed."""
        pairs = zip(self.outcomes[index], self.outcomes[0], strict=True)
        return Estimate.of([own.metrics[metric] - first.metrics[metric] for own, first in pairs])

    def describe(self) -> dict[str, Any]:
        """Everything, as values for JSON."""
        metrics = self.metrics
        return {
            "seeds": self.seeds,
            "configurations": [
                {
                    "name": config.name,
                    "estimates": {metric: _as_json(self.estimate(index, metric)) for metric in metrics},
                    "changes": {metric: _as_json(self.change(index, metric)) for metric in metrics} if index else {},
                    "runs": [outcome.describe() for outcome in outcomes],
                }
                for index, (config, outcomes) in enumerate(zip(self.configs, self.outcomes, strict=True))
            ],
        }


def _as_json(estimate: Estimate) -> Mapping[str, float | None]:
    return {"mean": estimate.mean, "margin": estimate.margin}


def compare(
    configs: Sequence[LabConfig],
    seeds: Sequence[int] = (1,),
    *,
    jobs: int = 1,
    on_end: Callable[[int], None] | None = None,
) -> Comparison:
    """Run each configuration with each seed, in `jobs` processes. Raises ConfigError.

    With several processes on_end is called when a run has ended, with all of its requests.
    """
    told = on_end or (lambda _: None)
    tasks = [(config, seed) for config in configs for seed in seeds]
    if jobs == 1 or len(tasks) == 1:
        outcomes = [run(config, seed, on_end=told) for config, seed in tasks]
    else:
        outcomes = run_in_processes(run, tasks, jobs, lambda outcome: told(int(outcome.metrics["requests"])))
    rows = [tuple(outcomes[at : at + len(seeds)]) for at in range(0, len(outcomes), len(seeds))]
    return Comparison(tuple(configs), tuple(rows))
