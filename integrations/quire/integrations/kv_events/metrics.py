"""Metrics of `quire events`. docs/how-to/observability.md lists them."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from quire.integrations.kv_events.publisher import PublisherStatistics
from quire.integrations.kv_events.replica import ReplicaStatistics

_LABELS = ("pool",)
_BLOCKS = {
    "published": "they are in a prefix that a prompt can find",
    "stranded": "no prompt finds them, a block that they need is missing",
    "unknown": "they were stored while cachemgr kept no tokens",
    "unconnected": "a prompt may find them, the tokens before them are not known",
}


def families(pools: Mapping[str, tuple[PublisherStatistics, ReplicaStatistics]]) -> Iterable[Metric]:
    """Yield the metrics of all pools."""
    batches = CounterMetricFamily("quire_kv_events_batches", "Batches of events that were published.", labels=_LABELS)
    snapshots = CounterMetricFamily(
        "quire_kv_events_snapshots", "Times that all blocks were published for a consumer.", labels=_LABELS
    )
    replays = CounterMetricFamily("quire_kv_events_replays", "Requests at the replay socket.", labels=_LABELS)
    kept = GaugeMetricFamily("quire_kv_events_kept_batches", "Batches that are kept for replays.", labels=_LABELS)
    kept_bytes = GaugeMetricFamily("quire_kv_events_kept_bytes", "Bytes of these batches.", labels=_LABELS)
    told = "; ".join(f"{state}: {meaning}" for state, meaning in _BLOCKS.items())
    blocks = GaugeMetricFamily(
        "quire_kv_events_blocks", f"Blocks in the prefix cache. {told}.", labels=("pool", "state")
    )
    for name, (published, replica) in pools.items():
        batches.add_metric([name], published.num_batches)
        snapshots.add_metric([name], published.num_snapshots)
        replays.add_metric([name], published.num_replays)
        kept.add_metric([name], published.num_kept)
        kept_bytes.add_metric([name], published.num_kept_bytes)
        for state, number in _numbers(replica):
            blocks.add_metric([name, state], number)
    return batches, snapshots, replays, kept, kept_bytes, blocks


def _numbers(replica: ReplicaStatistics) -> Iterator[tuple[str, int]]:
    numbers = (replica.num_published, replica.num_stranded, replica.num_unknown, replica.num_unconnected)
    return zip(_BLOCKS, numbers, strict=True)
