"""The blocks of a sequence by layer group, against tables that are filled and passed token by token."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cache.v1 import attach_pb2 as pb
from quire.cache.v1.layer_spans import LayerGroupKind
from quire.client.engine.messages import limits_of
from quire.client.engine.scheduling.layer_groups import FULL, BlockTables, LayerGroup
from quire.client.engine.scheduling.plans import SchedulerLimits
from quire.client.engine.scheduling.scheduler import Scheduler
from quire.client.engine.scheduling.tier import HostCopyUse
from quire.client.errors import ProtocolViolation

SLIDING = LayerGroup(LayerGroupKind.SLIDING, 5)
CHUNKED = LayerGroup(LayerGroupKind.CHUNKED, 6)
GROUPS = st.lists(
    st.one_of(
        st.just(FULL),
        st.builds(
            LayerGroup,
            st.sampled_from((LayerGroupKind.SLIDING, LayerGroupKind.CHUNKED)),
            st.integers(min_value=1, max_value=40),
        ),
    ),
    min_size=1,
    max_size=5,
)


def seen_from(group: LayerGroup, position: int) -> set[int]:
    """The positions that a token at a position sees, by the contract."""
    before, size = range(position + 1), group.num_window_tokens
    match group.kind:
        case LayerGroupKind.FULL:
            return set(before)
        case LayerGroupKind.SLIDING:
            return {other for other in before if other > position - size}
        case LayerGroupKind.CHUNKED:
            return {other for other in before if other // size == position // size}


def held(group: LayerGroup, num_computed: int, block_size: int) -> int:
    """The blocks of a sequence of which all tokens are computed; the last one may be computed again."""
    if not num_computed:
        return 0
    positions = {num_computed - 1, *seen_from(group, num_computed - 1)}
    return len({position // block_size for position in positions})


def test_without_groups_a_sequence_has_one_table() -> None:
    tables = BlockTables(4)
    assert [tables.num_blocks(count, 0) for count in (1, 4, 5, 17)] == [1, 1, 2, 5]
    assert tables.num_blocks(17, 9, num_shared=9) == 3
    assert tables.num_slots(1000) == 1000
    assert not tables.has_windows
    assert [tables.max_tokens(10, at_most=most) for most in (64, 39, 9)] == [40, 40, 12]
    assert tables.max_tokens(20, at_most=64, num_shared=7, num_sequences=4) == 4 * (1 + 19 // 4)


@given(GROUPS, st.integers(1, 7), st.integers(1, 120))
def test_a_computed_sequence_holds_what_its_next_token_may_see(
    groups: list[LayerGroup], block_size: int, num_tokens: int
) -> None:
    tables = BlockTables(block_size, groups)
    expected = sum(held(group, num_tokens, block_size) for group in groups)
    assert tables.num_blocks(num_tokens, num_tokens) == expected


def most_held(group: LayerGroup, num_tokens: int, block_size: int) -> int:
    """While a token is computed, the token before it has not given up its blocks."""
    seen = ({position, *seen_from(group, max(0, position - 1))} for position in range(num_tokens))
    return max(len({other // block_size for other in positions}) for positions in seen)


@given(GROUPS, st.integers(1, 7), st.integers(1, 200))
def test_the_longest_sequence_is_the_longest_that_fits_token_by_token(
    groups: list[LayerGroup], block_size: int, num_blocks: int
) -> None:
    longest = BlockTables(block_size, groups).max_tokens(num_blocks, at_most=150)
    if longest:
        assert sum(most_held(group, longest, block_size) for group in groups) <= num_blocks
    if longest < 150:
        # A window that never begins at the worst place of a block holds one block less than is counted.
        num_windows = sum(group is not FULL for group in groups)
        most = sum(most_held(group, longest + block_size, block_size) for group in groups)
        assert most + num_windows > num_blocks


def test_a_sequence_in_windows_is_longer_than_the_pool() -> None:
    assert BlockTables(2, [FULL, LayerGroup(LayerGroupKind.SLIDING, 4)]).max_tokens(13, at_most=1000) == 20
    assert BlockTables(2, [LayerGroup(LayerGroupKind.CHUNKED, 4)]).max_tokens(3, at_most=1000) == 1000
    assert BlockTables(2, [LayerGroup(LayerGroupKind.CHUNKED, 4)]).max_tokens(2, at_most=1000) == 4
    assert BlockTables(2, [FULL, FULL]).max_tokens(7, at_most=1000) == 6


def test_a_prompt_holds_its_window_and_the_blocks_of_full_groups() -> None:
    tables = BlockTables(4, [FULL, SLIDING, SLIDING])
    assert tables.num_blocks(100, 0) == 25
    assert tables.num_blocks(100, 4) == 25 + 2 * 1
    assert tables.num_blocks(100, 48) == 25 + 2 * 2, "positions 43 to 47"


def test_shared_blocks_are_in_all_tables() -> None:
    tables = BlockTables(4, [FULL, SLIDING])
    assert tables.num_blocks(12, 12) == 3 + 2
    assert tables.num_blocks(12, 12, num_shared=8) == 1 + 1


def test_more_tokens_take_no_more_of_a_window_than_its_blocks() -> None:
    tables = BlockTables(4, [FULL, SLIDING, CHUNKED])
    assert tables.num_slots(2) == 6
    assert tables.num_slots(1000) == 1000 + 3 * 4 + 3 * 4


def geometry(*groups: pb.LayerGroup) -> pb.PoolGeometry:
    return pb.PoolGeometry(
        block_size_tokens=4,
        block_count=15,
        block_bytes=8,
        max_sequence_count=8,
        max_sequence_tokens=1000,
        vocabulary_size=7,
        layer_groups=groups,
    )


def read(*groups: pb.LayerGroup) -> SchedulerLimits:
    return limits_of(geometry(*groups), max_step_tokens=64, max_running_sequences=8)


@pytest.mark.parametrize(("groups", "use"), [((), HostCopyUse.THERE_AND_BACK), ((FULL, SLIDING), HostCopyUse.BACK)])
def test_copies_of_a_blocks_tokens_are_of_all_groups(groups: tuple[LayerGroup, ...], use: HostCopyUse) -> None:
    """A second computes 4 tokens, or copies 3 blocks."""
    limits = replace(read(), layer_groups=groups)
    scheduler = Scheduler(limits)
    scheduler.costs.prefill.observe(4, 1.0)
    scheduler.costs.copy.observe(3 * limits.block_bytes, 1.0)
    assert scheduler.schedule().host_copy_use is use


def test_the_groups_of_a_pool_are_read() -> None:
    limits = read(
        pb.LayerGroup(kind=pb.LAYER_GROUP_KIND_FULL, layer_count=2),
        pb.LayerGroup(kind=pb.LAYER_GROUP_KIND_SLIDING, window_token_count=5, layer_count=2),
        pb.LayerGroup(kind=pb.LAYER_GROUP_KIND_CHUNKED, window_token_count=6, layer_count=2),
    )
    assert limits.layer_groups == (FULL, SLIDING, CHUNKED)
    assert limits.max_tokens_per_sequence == (14 - 3 - 3) * 4
    assert read().max_tokens_per_sequence == 14 * 4
    assert replace(limits, num_blocks=20).max_tokens_per_sequence == 14 * 4


@pytest.mark.parametrize(("kind", "window"), [(0, 0), (4, 8), (pb.LAYER_GROUP_KIND_SLIDING, 0)])
def test_a_group_that_the_contract_does_not_have_is_a_violation(kind: pb.LayerGroupKind.ValueType, window: int) -> None:
    with pytest.raises(ProtocolViolation, match=f"kind {kind} with a window of {window}"):
        read(pb.LayerGroup(kind=kind, window_token_count=window, layer_count=1))
