"""Steps in which many sequences need a block at once, and requests that end exactly where their room does."""

from __future__ import annotations

import itertools

import pytest
from unit.engine.test_scheduler import CHUNKED, SLIDING, World, limits

from quire.client.engine.caching import CacheParams
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.scheduling.layer_groups import FULL, LayerGroup
from quire.client.engine.scheduling.new_sequences import new_samples
from quire.client.engine.scheduling.policy import PoolView, PriorityPolicy
from quire.client.engine.scheduling.sequence import FinishReason, Sequence

BLOCK_SIZE = 4


class NoReserve(PriorityPolicy):
    """Admits as many as there are blocks for."""

    def reserve(self, newcomer: Sequence, *, num_beside: int, view: PoolView) -> int:
        return 0


@pytest.mark.parametrize("num_each", [1, 2, 3])
@pytest.mark.parametrize("num_spare", [0, 1, 5])
@pytest.mark.parametrize("num_sequences", [8, 31])
def test_a_victim_is_taken_for_blocks_that_are_missing_and_for_no_block_that_is_coming(
    num_sequences: int, num_spare: int, num_each: int
) -> None:
    """All cross a block's border in one step. Victims' blocks come back when the step in flight has ended.

    vLLM#49674: until then each further plan took further victims.
    """
    sizes = {"num_blocks": num_sequences * num_each + num_spare, "max_running_sequences": num_sequences}
    world = World(limits(**sizes, max_step_tokens=400, max_sequence_tokens=32), NoReserve())
    for number, digits in zip(range(num_sequences), itertools.product(range(6), repeat=3), strict=False):
        filler = [number % 5] * (num_each * BLOCK_SIZE - 4)
        world.add([*digits, *filler], max_tokens=5, ends=(), seed=number)
    world.run()
    num_missing = num_sequences - num_spare
    # Each victim gives its blocks, and needs none itself. The last one may wait for those that end in place of one.
    num_needed = -(-num_missing // (num_each + 1))
    assert num_needed - 1 <= world.scheduler.statistics().preemptions <= num_needed
    assert {len(output) for output in world.output.values()} == {5}


POOLS: dict[str, tuple[dict[str, int], tuple[LayerGroup, ...]]] = {
    "the model's context": ({"num_blocks": 32, "max_sequence_tokens": 24}, ()),
    "the model's context, within a block": ({"num_blocks": 32, "max_sequence_tokens": 23}, ()),
    "the pool": ({"num_blocks": 6, "max_sequence_tokens": 64}, ()),
    "both": ({"num_blocks": 6, "max_sequence_tokens": 24}, ()),
    "a window": ({"num_blocks": 9, "max_sequence_tokens": 24}, (FULL, SLIDING)),
    "chunks": ({"num_blocks": 9, "max_sequence_tokens": 24}, (FULL, CHUNKED)),
    "windows alone": ({"num_blocks": 4, "max_sequence_tokens": 23}, (SLIDING,)),
}


@pytest.mark.parametrize("reserve", [False, True])
@pytest.mark.parametrize("pool", POOLS)
def test_a_request_that_fills_its_room_gets_each_token(pool: str, reserve: bool) -> None:
    """SGLang#33814: of 16 tokens that fit exactly, 14 or 15 came."""
    sizes, groups = POOLS[pool]
    room = limits(**sizes, layer_groups=groups, max_step_tokens=8)
    for num_prompt in range(1, room.max_tokens_per_sequence):
        world, num_new = World(room), room.max_tokens_per_sequence - num_prompt
        params, prompt = SamplingParams(max_tokens=num_new), [1] * num_prompt
        cache = CacheParams(reserve=reserve)
        sequences = new_samples(room, num_prompt, prompt, params, end_token_ids=(), seed=3, cache=cache)
        world.output[sequences[0].arrival] = []
        world.scheduler.add(sequences)
        world.run()
        assert [len(output) for output in world.output.values()] == [num_new]
        assert list(world.ended.values()) == [FinishReason.LENGTH]
        assert world.scheduler.statistics().preemptions == 0
