"""Prometheus metrics, read from statistics at the moment they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from quire.cachemgr.catalog import Catalog
from quire.cachemgr.ledger import LedgerStatistics

COUNTERS = {
    "quire_cache_steps_planned": "Steps planned.",
    "quire_cache_admissions": "Sequences admitted.",
    "quire_cache_prompt_tokens": "Tokens of admitted prompts.",
    "quire_cache_prefix_hit_tokens": "Tokens of admitted prompts that were found in the prefix cache.",
    "quire_cache_forks": "Sequences made by forks.",
    "quire_cache_blocks_copied": "Blocks copied because a shared or published one was to be written.",
    "quire_cache_blocks_allocated": "Blocks handed out.",
    "quire_cache_blocks_evicted": "Blocks that lost their content to make room.",
    "quire_cache_leases_expired": "Leases that ended by expiry.",
}


def counter_values(statistics: LedgerStatistics) -> list[int]:
    """In the order of COUNTERS."""
    return [
        statistics.planned_steps,
        statistics.admissions,
        statistics.admitted_tokens,
        statistics.cached_tokens,
        statistics.forks,
        statistics.copied_blocks,
        statistics.num_allocated,
        statistics.num_evicted,
        statistics.expired_leases,
    ]


def metric_families(catalog: Catalog) -> Iterator[Metric]:
    """All metrics of all pools, labelled by pool. Counters start anew with a pool's epoch."""
    statistics = {pool.ledger.pool: pool.ledger.statistics() for pool in catalog.pools()}
    yield from gauges(catalog, statistics)
    for index, (name, text) in enumerate(COUNTERS.items()):
        family = CounterMetricFamily(name, text, labels=["pool"])
        for pool, values in statistics.items():
            family.add_metric([pool], counter_values(values)[index])
        yield family
    ended = CounterMetricFamily("quire_cache_steps_ended", "Steps reported.", labels=["pool", "outcome"])
    refused = CounterMetricFamily("quire_cache_refusals", "Items of plans refused.", labels=["pool", "reason"])
    for pool, values in statistics.items():
        ended.add_metric([pool, "computed"], values.computed_steps)
        ended.add_metric([pool, "failed"], values.failed_steps)
        ended.add_metric([pool, "skipped"], values.skipped_steps)
        for reason, count in values.refusals.items():
            refused.add_metric([pool, reason.value], count)
    yield ended
    yield refused


def gauges(catalog: Catalog, statistics: dict[str, LedgerStatistics]) -> Iterator[Metric]:
    """The present state of each pool."""
    attached = GaugeMetricFamily("quire_pool_attached", "Whether the pool's worker is attached.", labels=["pool"])
    for pool in catalog.pools():
        attached.add_metric([pool.ledger.pool], int(pool.is_attached))
    yield attached
    blocks = GaugeMetricFamily("quire_kv_blocks", "Blocks by state.", labels=["pool", "state"])
    leases = GaugeMetricFamily("quire_leases", "Leases, those being fenced included.", labels=["pool"])
    sequences = GaugeMetricFamily("quire_sequences", "Sequences that hold blocks.", labels=["pool"])
    tokens = GaugeMetricFamily("quire_kv_held_tokens", "Tokens in blocks that are held.", labels=["pool"])
    for name, values in statistics.items():
        counts = values.counts
        for state in ("free", "cached", "active", "retired"):
            blocks.add_metric([name, state], getattr(counts, state))
        leases.add_metric([name], values.num_leases)
        sequences.add_metric([name], values.num_sequences)
        tokens.add_metric([name], values.num_held_tokens)
    yield from (blocks, leases, sequences, tokens)
