"""ExplainPrefix: each reason for a miss once through a real process, and its disclosure by caller."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from integration.lone_cachemgr import BLOCK_SIZE, Bookkeeper, LoneCachemgr, Tenant
from integration.protocol_client import RefusedError, ask, draw_tokens

from quire.cache.v1 import cache_service_pb2
from quire.cache.v1.cache_service_pb2 import (
    MISS_REASON_BEING_COMPUTED,
    MISS_REASON_EVICTED,
    MISS_REASON_NEVER_COMPUTED,
    MISS_REASON_NONE,
    MISS_REASON_OTHER_SALT,
    MISS_REASON_OTHER_TENANT,
    MISS_REASON_RESET,
)

NUM_USABLE = 8
POOL = "explained"
PROMPT = draw_tokens(2 * BLOCK_SIZE + 1, seed=1)


@pytest.fixture(scope="module")
def cachemgr() -> Iterator[LoneCachemgr]:
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        cachemgr = LoneCachemgr(Path(name)).start()
        yield cachemgr
        cachemgr.close()
        assert "handler failed" not in cachemgr.log()
        assert str(PROMPT[:3])[1:-1] not in cachemgr.log()


class Scene:
    """A pool with a lease of alice's and one of bob's, and the answers for olga, an operator."""

    def __init__(self, cachemgr: LoneCachemgr, epoch: int) -> None:
        self._cachemgr = cachemgr
        self.worker = Bookkeeper(cachemgr, POOL, epoch=epoch, block_count=NUM_USABLE + 1, max_sequence_tokens=1_000)
        self.alice, self.bob = self.begin("alice"), self.begin("bob")
        self.olga = cachemgr.stub("olga")

    def begin(self, caller: str) -> Tenant:
        return Tenant.begin(self._cachemgr, self.worker, caller)

    def end(self) -> None:
        for tenant in (self.alice, self.bob):
            tenant.settle()
        self.worker.detach()

    def explain(
        self, tokens: Sequence[int], *, caller: str = "alice", **fields: Any
    ) -> cache_service_pb2.ExplainPrefixResponse:
        request = cache_service_pb2.ExplainPrefixRequest(pool=POOL, token_ids=tokens, **fields)
        answer = ask(self._cachemgr.stub(caller).ExplainPrefix, request)
        assert answer.pool == POOL
        return answer

    def reset(self) -> None:
        ask(self.olga.ResetPrefixCache, cache_service_pb2.ResetPrefixCacheRequest(pool=POOL))

    def evict_all(self, tenant: Tenant) -> None:
        """Takes every block there is."""
        tenant.admit(99, [3] * (NUM_USABLE * BLOCK_SIZE))
        tenant.settle()

    def blocks(self) -> list[cache_service_pb2.Block]:
        return list(ask(self.olga.ListBlocks, cache_service_pb2.ListBlocksRequest(pool=POOL)).blocks)

    def statistics(self) -> cache_service_pb2.PoolStatistics:
        (statistics,) = ask(self.olga.GetStatistics, cache_service_pb2.GetStatisticsRequest(pool=POOL)).pools
        return statistics


@pytest.fixture
def scene(cachemgr: LoneCachemgr) -> Iterator[Scene]:
    scene = Scene(cachemgr, time.time_ns())
    yield scene
    scene.end()


def test_all_that_can_be_found_is(scene: Scene) -> None:
    scene.alice.cache(1, PROMPT)
    before = scene.blocks()
    answer = scene.explain(PROMPT)
    assert (answer.reason, answer.cached_token_count) == (MISS_REASON_NONE, 2 * BLOCK_SIZE)
    assert (answer.block_count, answer.missing_block_index, answer.missing_prefix_hash) == (2, 2, b"")
    short = scene.explain(PROMPT[: 2 * BLOCK_SIZE])
    assert (short.reason, short.block_count, short.cached_token_count) == (MISS_REASON_NONE, 2, BLOCK_SIZE)
    partial = scene.explain(PROMPT[:3])
    assert (partial.reason, partial.block_count, partial.missing_block_index) == (MISS_REASON_NONE, 0, 0)
    assert scene.blocks() == before


def test_what_nobody_computed(scene: Scene) -> None:
    scene.alice.cache(1, PROMPT)
    answer = scene.explain([*PROMPT[: BLOCK_SIZE + 1], *draw_tokens(2 * BLOCK_SIZE, seed=2)])
    assert (answer.reason, answer.block_count) == (MISS_REASON_NEVER_COMPUTED, 3)
    assert (answer.cached_token_count, answer.missing_block_index, answer.stranded_block_count) == (BLOCK_SIZE, 1, 0)
    assert len(answer.missing_prefix_hash) == 32
    assert not answer.HasField("lost_time")
    assert not answer.HasField("evicted_by_tenant")


def test_what_was_evicted_for_ones_own_tenant(scene: Scene) -> None:
    other = scene.begin("alice")
    scene.alice.cache(1, PROMPT)
    hashes = [block.prefix_hash for block in scene.blocks()[:2]]
    scene.evict_all(other)
    answer = scene.explain(PROMPT)
    assert (answer.reason, answer.missing_block_index, answer.missing_prefix_hash) == (
        MISS_REASON_EVICTED,
        0,
        hashes[0],
    )
    assert (answer.evicted_by_tenant, answer.evicted_by_lease_id_prefix) == ("alice", other.lease_id[:8])
    assert abs(answer.lost_time.ToNanoseconds() / 1e9 - time.time()) < 60
    other.delete()


def test_who_evicted_it_is_told_to_operators_only(scene: Scene) -> None:
    scene.alice.cache(1, PROMPT)
    scene.evict_all(scene.bob)
    answer = scene.explain(PROMPT)
    assert (answer.reason, answer.HasField("lost_time")) == (MISS_REASON_EVICTED, True)
    assert (answer.HasField("evicted_by_tenant"), answer.evicted_by_lease_id_prefix) == (False, "")
    told = scene.explain(PROMPT, caller="olga", tenant="alice")
    assert (told.reason, told.evicted_by_tenant) == (MISS_REASON_EVICTED, "bob")
    assert told.evicted_by_lease_id_prefix == scene.bob.lease_id[:8]
    assert told.lost_time.ToNanoseconds() == pytest.approx(answer.lost_time.ToNanoseconds(), abs=1e9)


def test_what_came_back_is_found_and_lost_anew(scene: Scene) -> None:
    scene.alice.cache(1, PROMPT)
    scene.evict_all(scene.bob)
    scene.bob.release(99)
    scene.alice.cache(1, PROMPT)
    assert scene.explain(PROMPT).reason == MISS_REASON_NONE
    scene.reset()
    assert scene.explain(PROMPT).reason == MISS_REASON_RESET


def test_what_was_dropped_by_a_reset_and_what_is_behind_it(scene: Scene) -> None:
    scene.alice.admit(1, PROMPT)
    scene.alice.settle()
    scene.reset()
    answer = scene.explain(PROMPT)
    assert (answer.reason, answer.missing_block_index, answer.stranded_block_count) == (MISS_REASON_RESET, 0, 0)
    assert abs(answer.lost_time.ToNanoseconds() / 1e9 - time.time()) < 60
    assert not answer.HasField("evicted_by_tenant")
    more = draw_tokens(2 * BLOCK_SIZE - 1, seed=3)
    scene.alice.plan(trim_sequence_ids=[1], trim_token_counts=[len(PROMPT)])
    extends = {"sequence_ids": [1], "token_counts": [len(more)], "append_token_counts": [len(more)]}
    scene.alice.plan(extends={**extends, "append_token_ids": more})
    scene.alice.settle()
    stranded = scene.explain([*PROMPT, *more])
    assert (stranded.reason, stranded.missing_block_index, stranded.stranded_block_count) == (MISS_REASON_RESET, 0, 2)
    assert stranded.cached_token_count == 0


def test_what_a_step_in_flight_computes(scene: Scene) -> None:
    other = scene.begin("alice")
    scene.alice.admit(1, PROMPT)
    for tokens, index in ((PROMPT, 0), (PROMPT[:BLOCK_SIZE], 0)):
        answer = scene.explain(tokens)
        assert (answer.reason, answer.missing_block_index) == (MISS_REASON_BEING_COMPUTED, index)
    assert scene.explain(PROMPT, caller="bob").reason == MISS_REASON_NEVER_COMPUTED
    assert scene.explain(PROMPT, salt=b"s").reason == MISS_REASON_NEVER_COMPUTED
    assert scene.explain(draw_tokens(9, seed=2)).reason == MISS_REASON_NEVER_COMPUTED
    scene.alice.plan(release_sequence_ids=[1])
    assert scene.explain(PROMPT).reason == MISS_REASON_BEING_COMPUTED
    scene.alice.settle()
    assert scene.explain(PROMPT).reason == MISS_REASON_NONE
    other.admit(1, [*PROMPT[: 2 * BLOCK_SIZE], 1, 2, 3, 4])
    answer = scene.explain([*PROMPT[: 2 * BLOCK_SIZE], 1, 2, 3, 4])
    assert (answer.reason, answer.missing_block_index) == (MISS_REASON_BEING_COMPUTED, 2)
    other.settle()
    other.delete()


def test_what_is_there_under_another_salt(scene: Scene) -> None:
    scene.alice.cache(1, PROMPT, salt=b"pepper")
    answer = scene.explain(PROMPT)
    assert (answer.reason, answer.missing_block_index) == (MISS_REASON_OTHER_SALT, 0)
    assert scene.explain(PROMPT, salt=b"pepper").reason == MISS_REASON_NONE
    assert scene.explain(PROMPT, salt=b"salt").reason == MISS_REASON_OTHER_SALT
    assert scene.explain(PROMPT, caller="bob", salt=b"pepper").reason == MISS_REASON_NEVER_COMPUTED
    longer = [*PROMPT[: 2 * BLOCK_SIZE], *draw_tokens(BLOCK_SIZE, seed=2)]
    scene.alice.cache(2, PROMPT)
    assert scene.explain(longer).reason == MISS_REASON_NEVER_COMPUTED


def test_what_another_tenant_has_is_told_to_operators_only(scene: Scene) -> None:
    scene.bob.cache(1, PROMPT, salt=b"pepper")
    assert scene.explain(PROMPT).reason == MISS_REASON_NEVER_COMPUTED
    told = scene.explain(PROMPT, caller="olga", tenant="alice")
    assert (told.reason, told.other_tenant) == (MISS_REASON_OTHER_TENANT, "bob")
    scene.alice.cache(1, PROMPT, salt=b"pepper")
    assert scene.explain(PROMPT, caller="olga", tenant="alice").reason == MISS_REASON_OTHER_SALT
    assert scene.explain(PROMPT, caller="olga", tenant="bob", salt=b"pepper").reason == MISS_REASON_NONE
    assert scene.explain(PROMPT, caller="olga").reason == MISS_REASON_OTHER_TENANT


def test_a_new_epoch_remembers_nothing(scene: Scene, cachemgr: LoneCachemgr) -> None:
    scene.alice.cache(1, PROMPT)
    scene.reset()
    assert scene.explain(PROMPT).reason == MISS_REASON_RESET
    scene.end()
    again = Scene(cachemgr, time.time_ns())
    assert again.explain(PROMPT).reason == MISS_REASON_NEVER_COMPUTED
    again.end()


def test_prefixes_of_others_are_for_operators(scene: Scene, cachemgr: LoneCachemgr) -> None:
    scene.bob.cache(1, PROMPT)
    for method, message in (
        ("LookupPrefix", cache_service_pb2.LookupPrefixRequest),
        ("ExplainPrefix", cache_service_pb2.ExplainPrefixRequest),
        ("ResetPrefixCache", cache_service_pb2.ResetPrefixCacheRequest),
    ):
        with pytest.raises(RefusedError) as raised:
            ask(getattr(cachemgr.stub("alice"), method), message(pool=POOL, token_ids=PROMPT, tenant="bob"))
        refused = raised.value
        assert (refused.code, refused.reason) == (grpc.StatusCode.PERMISSION_DENIED, "ROLE_MISSING")
        assert refused.metadata == {
            "method": f"/quire.cache.v1.CacheService/{method}",
            "roles": "gateway,operator",
            "name": "alice",
        }
    for caller, tenant, count in (("olga", "bob", 8), ("olga", "alice", 0), ("bob", "bob", 8)):
        request = cache_service_pb2.LookupPrefixRequest(pool=POOL, token_ids=PROMPT, tenant=tenant)
        (match,) = ask(cachemgr.stub(caller).LookupPrefix, request).matches
        assert match.cached_token_count == count


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"pool": POOL}, "EMPTY_PROMPT"),
        ({"pool": "none", "token_ids": [1]}, "POOL_NOT_FOUND"),
        ({"pool": POOL, "token_ids": [1], "salt": bytes(65)}, "INVALID_ARGUMENT"),
    ],
)
def test_what_can_not_be_explained(cachemgr: LoneCachemgr, scene: Scene, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        ask(cachemgr.stub("alice").ExplainPrefix, cache_service_pb2.ExplainPrefixRequest(**fields))


def test_tokens_computed_again_because_they_were_evicted_are_counted(scene: Scene) -> None:
    scene.alice.cache(1, PROMPT)
    assert scene.statistics().recomputed_token_count == 0
    scene.evict_all(scene.bob)
    scene.bob.release(99)
    scene.alice.cache(2, draw_tokens(2 * BLOCK_SIZE, seed=2))
    assert scene.statistics().recomputed_token_count == 0
    scene.alice.cache(3, PROMPT)
    assert scene.statistics().recomputed_token_count == 2 * BLOCK_SIZE
    scene.alice.cache(4, PROMPT)
    scene.reset()
    scene.alice.cache(5, PROMPT)
    assert scene.statistics().recomputed_token_count == 2 * BLOCK_SIZE
