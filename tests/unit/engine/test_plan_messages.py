"""Plans as requests to cachemgr, and its answers."""

from __future__ import annotations

import pytest

from quire.cache.v1 import cache_service_pb2 as pb
from quire.client.engine.caching import Breakpoint, CacheParams, Miss, MissReason
from quire.client.engine.messages import decode_granted_step, encode_plan
from quire.client.engine.scheduling.plans import Admission, Plan


@pytest.mark.parametrize("resumed", [False, True])
def test_breakpoints_are_sent_with_every_admission_and_a_miss_is_explained_once(resumed: bool) -> None:
    cache = CacheParams(breakpoints=(Breakpoint(2, 1.5), Breakpoint(4, 300.0)), explain_miss=True)
    admission = Admission(1, [5, 6, 7, 8], resumed=resumed, waits_for_prefix=True, cache=cache)
    plan = Plan(admissions=(admission,))
    (sent,) = encode_plan(plan, lease_id="lease", epoch=1, request_id="request").admissions
    ends = [(each.token_count, each.ttl.ToNanoseconds() / 1e9) for each in sent.breakpoints]
    assert ends == [(2, 1.5), (4, 300.0)]
    assert (sent.resumed, sent.waits_for_prefix, sent.explains_miss) == (resumed, True, not resumed)


def test_every_reason_of_a_miss_is_read_and_one_of_a_newer_cachemgr_is_unknown() -> None:
    def read(reason: int) -> Miss | None:
        answer = pb.PlanStepResponse(admitted_sequence_ids=[1], admitted_cached_token_counts=[0])
        answer.admitted_misses.add(sequence_id=1, missing_block_index=2).reason = reason
        return decode_granted_step(answer).outcomes[0].miss

    values = [f"MISS_REASON_{reason.name}" for reason in MissReason]
    assert [read(pb.MissReason.Value(name)) for name in values] == [Miss(2, reason) for reason in MissReason]
    assert read(99) == Miss(2, MissReason.UNKNOWN)


def test_the_tenant_that_lost_a_block_is_read() -> None:
    answer = pb.PlanStepResponse(admitted_sequence_ids=[1, 2], admitted_cached_token_counts=[0, 0])
    for seq_id, reason, by in ((1, pb.MISS_REASON_EVICTED, "evicted_by_tenant"), (2, pb.MISS_REASON_RESET, "reset_by")):
        miss = answer.admitted_misses.add(sequence_id=seq_id, reason=reason, **{by: "alice"})
        miss.lost_time.FromMilliseconds(2_500)
    assert [outcome.miss for outcome in decode_granted_step(answer).outcomes] == [
        Miss(0, MissReason.EVICTED, lost_at_s=2.5, evicted_by_tenant="alice"),
        Miss(0, MissReason.RESET, lost_at_s=2.5, reset_by="alice"),
    ]
