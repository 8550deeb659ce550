"""The measured costs of computing and copying, and the choice between them for a preempted sequence."""

import pytest

from quire.client.engine.scheduling.tier import (
    DEFAULT_COPY_BYTES_PER_S,
    DEFAULT_PREFILL_TOKENS_PER_S,
    TRIAL_EVERY,
    HostCopyUse,
    Rate,
    TierCosts,
)
from quire.client.errors import InvalidRequest


def test_a_rate_is_its_default_until_something_was_observed() -> None:
    rate = Rate(5.0)
    rate.observe(0, 1.0)
    rate.observe(10, 0.0)
    assert rate.per_s == 5.0
    rate.observe(10, 4.0)
    assert rate.per_s == 2.5
    with pytest.raises(InvalidRequest):
        Rate(0.0)


def test_a_rate_is_that_of_late() -> None:
    rate = Rate(1.0)
    for _ in range(20):
        rate.observe(100, 1.0)
    assert rate.per_s == pytest.approx(100)
    for _ in range(50):
        rate.observe(10, 1.0)
    assert 10 < rate.per_s < 11


def test_a_rate_weighs_by_time() -> None:
    rate = Rate(1.0)
    rate.observe(1, 1.0)
    rate.observe(1000, 1.0)
    assert rate.per_s == pytest.approx(1000.9 / 1.9)


def test_a_copy_is_taken_if_there_and_back_is_faster_than_computing() -> None:
    costs = TierCosts()
    costs.prefill.observe(1000, 1.0)
    costs.copy.observe(2e6, 1.0)
    assert costs.prefers_offload(num_lost_tokens=101, num_bytes=100_000)
    assert not costs.prefers_offload(num_lost_tokens=100, num_bytes=100_000)
    assert not costs.prefers_offload(num_lost_tokens=0, num_bytes=1)
    costs.copy.observe(1e9, 1.0)
    assert costs.prefers_offload(num_lost_tokens=2, num_bytes=100_000)


@pytest.mark.parametrize(
    ("num_bytes", "use"),
    [
        (15_999, HostCopyUse.THERE_AND_BACK),
        (16_000, HostCopyUse.BACK),
        (31_999, HostCopyUse.BACK),
        (32_000, HostCopyUse.NONE),
    ],
)
def test_evicted_blocks_are_copied_as_far_as_that_is_faster_than_computing(num_bytes: int, use: HostCopyUse) -> None:
    """16 tokens take 16 ms to compute, and 32,000 bytes take 16 ms to copy once."""
    costs = TierCosts()
    costs.prefill.observe(1000, 1.0)
    costs.copy.observe(2e6, 1.0)
    assert costs.host_copy_use(block_size=16, num_bytes=num_bytes) is use


@pytest.mark.parametrize(("read_rate", "skips"), [(0.99e6, True), (1.01e6, False)])
def test_the_disk_is_skipped_if_reading_and_copying_takes_longer_than_computing(read_rate: float, skips: bool) -> None:
    """16 tokens take 16 ms to compute. 8,000 bytes take 8 ms to copy, and 8 ms to read at 1 MB/s."""
    costs = TierCosts()
    costs.prefill.observe(1000, 1.0)
    costs.observe_step(
        [1], compute_s=1.0, num_copied_bytes=1_000_000, copy_s=1.0, num_read_bytes=1, read_s=1 / read_rate
    )
    plans = [costs.skips_disk(block_size=16, num_bytes=8_000) for _ in range(2 * TRIAL_EVERY)]
    assert plans == ([*[True] * (TRIAL_EVERY - 1), False] * 2 if skips else [False] * 2 * TRIAL_EVERY)


def test_a_step_shows_what_prompts_and_copies_cost_but_decodes_do_not_count_as_prompts() -> None:
    costs = TierCosts()
    costs.observe_step([1] * 8 + [8], compute_s=1.0, num_copied_bytes=0, copy_s=0.0)
    assert costs.prefill.per_s == DEFAULT_PREFILL_TOKENS_PER_S
    assert costs.copy.per_s == DEFAULT_COPY_BYTES_PER_S
    costs.observe_step([1] * 8 + [92], compute_s=0.5, num_copied_bytes=300, copy_s=2.0)
    assert (costs.prefill.per_s, costs.copy.per_s) == (200, 150)


def test_before_anything_was_measured_the_defaults_stand() -> None:
    costs = TierCosts()
    num_tokens = 100
    num_bytes = int(DEFAULT_COPY_BYTES_PER_S / 2 * num_tokens / DEFAULT_PREFILL_TOKENS_PER_S)
    assert costs.prefers_offload(num_lost_tokens=num_tokens, num_bytes=num_bytes - 1)
    assert not costs.prefers_offload(num_lost_tokens=num_tokens, num_bytes=num_bytes)
