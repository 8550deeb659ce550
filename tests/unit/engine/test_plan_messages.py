"""Plans as requests to cachemgr."""

from __future__ import annotations

import pytest

from quire.client.engine.caching import Breakpoint, CacheParams
from quire.client.engine.messages import encode_plan
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
