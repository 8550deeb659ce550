"""Prometheus metrics, read from statistics at the moment they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric

from quire.worker.disk.disk_tier import DiskCounters, DiskTier
from quire.worker.model.modes import Modes, Part
from quire.worker.service.attachment import Attachment
from quire.worker.service.steps import Steps


def metric_families(
    steps: Steps, attachment: Attachment, modes: Modes, disk: DiskTier | None = None, *, pool: str, model: str
) -> Iterator[Metric]:
    """Return all metrics of a worker. Counters are since the process started."""
    # Not labels of every sample: they would change each name's identity in rules and dashboards that exist.
    yield InfoMetricFamily("quire_worker", "The worker's pool and model.", value={"pool": pool, "model": model})
    counters = steps.counters
    outcomes = CounterMetricFamily("quire_worker_steps", "Steps that ended, by outcome.", labels=["outcome"])
    outcomes.add_metric(["computed"], counters.computed)
    outcomes.add_metric(["failed"], counters.failed)
    outcomes.add_metric(["skipped"], counters.skipped)
    yield outcomes
    refused = CounterMetricFamily("quire_worker_refusals", "Steps refused before running.", labels=["reason"])
    for reason, count in counters.refusals.items():
        refused.add_metric([reason.value], count)
    yield refused
    ranks = steps.rank_statistics()
    totals = {
        "quire_worker_computed_tokens": ("Tokens with KV computed.", counters.computed_tokens),
        "quire_worker_sampled_tokens": ("Tokens sampled.", counters.sampled_tokens),
        "quire_worker_drafted_tokens": ("Drafts verified.", counters.drafts),
        "quire_worker_accepted_draft_tokens": ("Drafts that were the tokens sampled.", counters.accepted_drafts),
        "quire_worker_copied_blocks": ("Blocks copied.", counters.copied_blocks),
        "quire_worker_offloaded_blocks": ("Blocks copied to the host tier.", counters.offloaded_blocks),
        "quire_worker_restored_blocks": ("Blocks copied back from the host tier.", counters.restored_blocks),
        "quire_worker_host_copy_seconds": ("Time in copies to the host tier and back.", counters.host_copy_s),
        "quire_worker_forward_seconds": ("Time in the model.", counters.forward_s),
        "quire_worker_rank_orders": ("Orders that rank 0 sent to the other ranks.", ranks.num_orders),
        "quire_worker_rank_order_bytes": ("Bytes of these orders, headers included.", ranks.order_bytes),
        "quire_worker_rank_exchange_seconds": (
            "Time in which rank 0 sent orders and tokens or waited for answers; not the model's own collectives.",
            ranks.exchange_s,
        ),
    }
    for name, (text, value) in totals.items():
        yield CounterMetricFamily(name, text, value=value)
    yield from disk_families(DiskCounters() if disk is None else disk.counters)
    text = "From the end of a step to the forward of the next one that continues a sequence, on the device."
    gaps = HistogramMetricFamily("quire_worker_step_gap_seconds", text)
    gaps.add_metric([], counters.gaps.buckets(), counters.gaps.sum_s)
    yield gaps
    text = "1 if a part of the steps runs slower than it could: the log and /healthz have the reason."
    degraded = GaugeMetricFamily("quire_worker_degraded", text, labels=["part"])
    slow = {mode.part for mode in modes.degraded()}
    for part in Part:
        degraded.add_metric([part], int(part in slow))
    yield degraded
    present = {
        "quire_worker_ranks": ("Ranks of the worker.", ranks.num_ranks),
        "quire_worker_attached": ("Whether cachemgr's stream is open.", int(attachment.is_attached)),
        "quire_worker_open_leases": ("Leases with accepted steps.", steps.gate.statistics().num_open_leases),
        "quire_worker_sequences": ("Sequences with a block table.", steps.num_sequences()),
        "quire_worker_steps_in_flight": ("Steps accepted and not ended.", steps.num_in_flight),
        "quire_worker_unacknowledged_reports": ("Reports not acknowledged.", len(steps.reports)),
    }
    for name, (text, value) in present.items():
        yield GaugeMetricFamily(name, text, value=value)


def disk_families(counters: DiskCounters) -> Iterator[Metric]:
    """The disk's metrics; all 0 without one."""
    copies = CounterMetricFamily("quire_worker_disk_blocks", "Copies that were written, read, erased.", labels=["call"])
    failures = CounterMetricFamily("quire_worker_disk_failures", "Copies that were not.", labels=["call"])
    seconds = CounterMetricFamily("quire_worker_disk_seconds", "Time in these calls.", labels=["call"])
    for family, numbers in (
        (copies, {"write": counters.written, "read": counters.read, "erase": counters.erased}),
        (failures, {"write": counters.failed_writes, "read": counters.failed_reads}),
        (seconds, {"write": counters.write_s, "read": counters.read_s}),
    ):
        for call, number in numbers.items():
            family.add_metric([call], number)
        yield family
