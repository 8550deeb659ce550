"""Prometheus metrics, read from statistics at each scrape. docs/how-to/operations.md lists them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from quire.cache.v1.cache_service_pb2 import LayerGroupStatistics, PoolStatistics
from quire.cachemgr.blocks import BlockState
from quire.cachemgr.catalog import AttachedPool, Catalog
from quire.cachemgr.service import messages
from quire.cachemgr.service.servicer import ServicerStatistics
from quire.serving.interceptor import CallStatistics

Statistics = dict[str, PoolStatistics]
"""By pool."""

HOST_STATES = ("free", "held", "retired", "cached")
DISK_STATES = ("free", "retired", "cached")
COUNTERS: dict[str, tuple[str, Callable[[PoolStatistics], int]]] = {
    "quire_cache_steps_planned": ("Steps planned.", lambda pool: pool.planned_step_count),
    "quire_cache_admissions": ("Sequences admitted, those admitted again apart.", lambda pool: pool.admission_count),
    "quire_cache_prompt_tokens": (
        "Tokens of admitted prompts, which were looked up in the prefix cache.",
        lambda pool: pool.admitted_token_count,
    ),
    "quire_cache_prefix_hit_tokens": (
        "Tokens of admitted prompts that were found in the prefix cache.",
        lambda pool: pool.cached_token_count,
    ),
    "quire_cache_prefix_written_tokens": (
        "Tokens of admitted prompts that were computed in full blocks and published.",
        lambda pool: pool.written_token_count,
    ),
    "quire_cache_resumed_admissions": (
        "Sequences admitted again after they were released to make room.",
        lambda pool: pool.resumed_admission_count,
    ),
    "quire_cache_resumed_tokens": (
        "Tokens of sequences admitted again, which were looked up in the prefix cache.",
        lambda pool: pool.resumed_token_count,
    ),
    "quire_cache_resumed_hit_tokens": (
        "Tokens of sequences admitted again that were found in the prefix cache.",
        lambda pool: pool.resumed_cached_token_count,
    ),
    "quire_cache_recomputed_tokens": (
        "Tokens of admissions of both kinds that had been computed before: their blocks were evicted.",
        lambda pool: pool.recomputed_token_count,
    ),
    "quire_cache_drafted_tokens": ("Drafts that steps verified.", lambda pool: pool.drafted_token_count),
    "quire_cache_accepted_draft_tokens": (
        "Drafts that steps accepted: they are the tokens that would have been sampled one by one.",
        lambda pool: pool.accepted_draft_token_count,
    ),
    "quire_cache_forks": ("Sequences made by forks.", lambda pool: pool.fork_count),
    "quire_cache_blocks_copied": (
        "Blocks copied because a shared or published one was to be written.",
        lambda pool: pool.copied_block_count,
    ),
    "quire_cache_offloads": ("Sequences moved to the host tier.", lambda pool: pool.offload_count),
    "quire_cache_restores": ("Sequences brought back from the host tier.", lambda pool: pool.restore_count),
    "quire_cache_blocks_offloaded": ("Blocks copied to the host tier.", lambda pool: pool.offloaded_block_count),
    "quire_cache_blocks_restored": ("Blocks copied back from the host tier.", lambda pool: pool.restored_block_count),
    "quire_cache_blocks_kept_in_host": (
        "Evicted blocks copied to the host tier, so that they can be found there.",
        lambda pool: pool.kept_in_host_block_count,
    ),
    "quire_cache_blocks_evicted_from_host": (
        "Copies of evicted blocks that were evicted from the host tier.",
        lambda pool: pool.evicted_from_host_block_count,
    ),
    "quire_cache_host_hit_tokens": (
        "Tokens of admissions of both kinds that were found in the host tier.",
        lambda pool: pool.found_in_host_token_count,
    ),
    "quire_cache_blocks_written_to_disk": (
        "Copies of cached blocks written from the host tier to the disk.",
        lambda pool: pool.written_to_disk_block_count,
    ),
    "quire_cache_blocks_read_from_disk": (
        "Copies read from the disk to the host tier, for prompts that wait for them.",
        lambda pool: pool.read_from_disk_block_count,
    ),
    "quire_cache_blocks_lost_on_disk": (
        "Copies that could not be written to the disk, or read from there.",
        lambda pool: pool.lost_on_disk_block_count,
    ),
    "quire_cache_blocks_evicted_from_disk": (
        "Copies that were evicted from the disk.",
        lambda pool: pool.evicted_from_disk_block_count,
    ),
    "quire_cache_blocks_allocated": ("Blocks handed out.", lambda pool: pool.allocated_block_count),
    "quire_cache_blocks_evicted": (
        "Blocks that lost their content to make room.",
        lambda pool: pool.evicted_block_count,
    ),
    "quire_cache_kept_blocks_evicted": (
        "Blocks that breakpoints kept, evicted before their end because no other block could be.",
        lambda pool: pool.evicted_kept_block_count,
    ),
    "quire_cache_blocks_published": (
        "Blocks that could be found by content for the first time.",
        lambda pool: pool.published_block_count,
    ),
    "quire_cache_leases_expired": ("Leases that ended by expiry.", lambda pool: pool.expired_lease_count),
}
GAUGES: dict[str, tuple[str, Callable[[PoolStatistics], int]]] = {
    "quire_sequences": (
        "Sequences that hold blocks, of the pool or of the host tier.",
        lambda pool: pool.sequence_count,
    ),
    "quire_sequences_offloaded": ("Sequences in the host tier.", lambda pool: pool.offloaded_sequence_count),
    "quire_kv_held_tokens": ("Tokens in blocks that are held.", lambda pool: pool.held_token_count),
    "quire_kv_shared_blocks": ("Blocks that two or more sequences hold.", lambda pool: pool.shared_block_count),
    "quire_kv_reserved_blocks": (
        "Blocks guaranteed to sequences with a reservation, and not held yet.",
        lambda pool: pool.reserved_block_count,
    ),
    "quire_kv_pinned_blocks": ("Cached blocks that are pinned.", lambda pool: pool.pinned_block_count),
    "quire_kv_kept_blocks": ("Blocks that breakpoints of prompts keep.", lambda pool: pool.kept_block_count),
}
GROUP_GAUGES: dict[str, tuple[str, Callable[[LayerGroupStatistics], int]]] = {
    "quire_kv_layer_group_active_blocks": (
        "Blocks of a layer group that sequences hold. Of pools with several groups.",
        lambda group: group.active_block_count,
    ),
    "quire_kv_layer_group_findable_blocks": (
        "Blocks of a layer group in the prefix cache, with and without a holder.",
        lambda group: group.findable_block_count,
    ),
}
GROUP_COUNTERS: dict[str, tuple[str, Callable[[LayerGroupStatistics], int]]] = {
    "quire_cache_layer_group_blocks_found": (
        "Blocks of a layer group that admissions and restores found in the prefix cache.",
        lambda group: group.found_block_count,
    ),
    "quire_cache_layer_group_blocks_passed": (
        "Block table entries of a layer group that were let go because no later token sees them.",
        lambda group: group.passed_block_count,
    ),
    "quire_cache_layer_group_blocks_evicted": (
        "Blocks of a layer group that were evicted.",
        lambda group: group.evicted_block_count,
    ),
}


def metric_families(catalog: Catalog, servicer: ServicerStatistics, calls: CallStatistics) -> Iterator[Metric]:
    """All metrics: of each pool, labelled by its name, and of the process. Counters of pools start anew with an epoch.

    Cost: O(pools + leases + sequences).
    """
    statistics = {pool.ledger.pool: messages.statistics_of(pool.ledger) for pool in catalog.pools()}
    yield from pool_families(catalog.pools(), statistics)
    yield from block_families(statistics)
    for name, (text, value_of) in GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=["pool"])
        for pool, values in statistics.items():
            gauge.add_metric([pool], value_of(values))
        yield gauge
    for name, (text, value_of) in COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=["pool"])
        for pool, values in statistics.items():
            counter.add_metric([pool], value_of(values))
        yield counter
    yield from layer_group_families(statistics)
    yield from outcome_families(statistics)
    yield from process_families(catalog.term, servicer, calls)


def pool_families(pools: list[AttachedPool], statistics: Statistics) -> Iterator[Metric]:
    """The sizes of each pool, its leases and their steps."""
    info = InfoMetricFamily("quire_pool", "Sizes and identity of the pool.", labels=["pool"])
    attached = GaugeMetricFamily("quire_pool_attached", "Whether the pool's worker is attached.", labels=["pool"])
    leases = GaugeMetricFamily("quire_leases", "Leases by state.", labels=["pool", "state"])
    in_flight = GaugeMetricFamily("quire_cache_steps_in_flight", "Steps planned and not reported.", labels=["pool"])
    limited = GaugeMetricFamily(
        "quire_cache_tenants_at_keep_limit",
        "Tenants with breakpoints that keep as many blocks as they may.",
        labels=["pool"],
    )
    for pool in pools:
        ledger, geometry = pool.ledger, pool.ledger.geometry
        sizes = {"block_size_tokens": str(geometry.block_size), "block_bytes": str(geometry.block_bytes)}
        info.add_metric([ledger.pool], {"model": geometry.model, **sizes})
        attached.add_metric([ledger.pool], int(pool.is_attached))
        values = statistics[ledger.pool]
        leases.add_metric([ledger.pool, "open"], values.lease_count - values.fencing_lease_count)
        leases.add_metric([ledger.pool, "fencing"], values.fencing_lease_count)
        in_flight.add_metric([ledger.pool], values.step_in_flight_count)
        limited.add_metric([ledger.pool], ledger.inspector.num_tenants_at_keep_limit())
    yield from (info, attached, leases, in_flight, limited)


def block_families(statistics: Statistics) -> Iterator[Metric]:
    """Blocks by state, in the pool, in the host tier and on the disk."""
    blocks = GaugeMetricFamily("quire_kv_blocks", "Blocks by state.", labels=["pool", "state"])
    host = GaugeMetricFamily("quire_kv_host_blocks", "Blocks of the host tier by state.", labels=["pool", "state"])
    disk = GaugeMetricFamily("quire_kv_disk_blocks", "Blocks of the disk by state.", labels=["pool", "state"])
    for pool, values in statistics.items():
        for state in BlockState:
            blocks.add_metric([pool, state], getattr(values.block_counts, f"{state}_count"))
        for place in HOST_STATES:
            host.add_metric([pool, place], getattr(values.host_block_counts, f"{place}_count"))
        for place in DISK_STATES:
            disk.add_metric([pool, place], getattr(values.disk_block_counts, f"{place}_count"))
    yield from (blocks, host, disk)


def layer_group_families(statistics: Statistics) -> Iterator[Metric]:
    """Metrics of each layer group, labelled by its index. A pool with one group has none."""
    labels = ["pool", "layer_group"]
    for families, numbers in ((GaugeMetricFamily, GROUP_GAUGES), (CounterMetricFamily, GROUP_COUNTERS)):
        for name, (text, value_of) in numbers.items():
            family = families(name, text, labels=labels)
            for pool, values in statistics.items():
                for index, group in enumerate(values.layer_groups):
                    family.add_metric([pool, str(index)], value_of(group))
            yield family


def outcome_families(statistics: Statistics) -> Iterator[Metric]:
    """The outcomes of steps and items."""
    ended = CounterMetricFamily("quire_cache_steps_ended", "Steps reported.", labels=["pool", "outcome"])
    refused = CounterMetricFamily("quire_cache_refusals", "Items of plans refused.", labels=["pool", "reason"])
    for pool, values in statistics.items():
        ended.add_metric([pool, "computed"], values.computed_step_count)
        ended.add_metric([pool, "failed"], values.failed_step_count)
        ended.add_metric([pool, "skipped"], values.skipped_step_count)
        for reason, count in values.refusal_counts.items():
            refused.add_metric([pool, reason], count)
    yield from (ended, refused)


def process_families(term: int, servicer: ServicerStatistics, calls: CallStatistics) -> Iterator[Metric]:
    """Metrics of the process, not of one pool."""
    yield GaugeMetricFamily("quire_cache_term", "This cachemgr's incarnation.", value=term)
    yield GaugeMetricFamily("quire_cache_open_calls", "Calls that are open, streams included.", value=calls.num_open)
    yield GaugeMetricFamily(
        "quire_cache_waiting_admissions",
        "Plans with admissions that wait for their turn.",
        value=servicer.num_waiting_admissions,
    )
    yield GaugeMetricFamily(
        "quire_cache_watches", "WatchBlocks and WatchPools streams that are open.", value=servicer.num_watches
    )
    refused = CounterMetricFamily(
        "quire_cache_calls_refused",
        "Calls, and plans on streams, that were refused as a whole.",
        labels=["method", "reason"],
    )
    counts = Counter({(method.rpartition("/")[2], reason): count for (method, reason), count in calls.refused.items()})
    counts.update({("PlanSteps", reason.value): count for reason, count in servicer.refused_plans.items()})
    for (method, reason), count in sorted(counts.items()):
        refused.add_metric([method, reason], count)
    yield refused
