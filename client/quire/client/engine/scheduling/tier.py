"""Decides between computing again and copies in the host tier and on the disk, of preempted sequences and of evicted
blocks. Pure.

The costs are learned from recent steps. Before the first measurement the defaults apply; those for copies are the best
rates of a bus of 16 lanes and of a fast disk, so that the first copies are made, and measured, wherever they might pay.
"""

from collections import abc
from enum import Enum

from quire.client.errors import InvalidRequest

DEFAULT_PREFILL_TOKENS_PER_S = 2_000.0
DEFAULT_COPY_BYTES_PER_S = 16e9
DEFAULT_READ_BYTES_PER_S = 8e9
TRIAL_EVERY = 256
"""Of so many plans that would skip the disk one reads all the same: a disk that was slow may be fast again."""
# The weight of an observation, relative to the one after it.
_MEMORY = 0.9


class HostCopyUse(Enum):
    """The copies of evicted blocks that a plan may make: to the host tier and back from there, back only, or none."""

    THERE_AND_BACK = "there and back"
    BACK = "back"
    NONE = "none"


class Rate:
    """An amount per second, of late."""

    __slots__ = ("_amount", "_default", "_seconds")

    def __init__(self, default: float) -> None:
        """default applies before the first observation."""
        if default <= 0:
            raise InvalidRequest.of_field("default", default, "above 0")
        self._default = default
        self._amount = 0.0
        self._seconds = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        """Something took so long; what took no time says nothing."""
        if amount > 0 and seconds > 0:
            self._amount = _MEMORY * self._amount + amount
            self._seconds = _MEMORY * self._seconds + seconds

    @property
    def per_s(self) -> float:
        """The present rate."""
        return self._amount / self._seconds if self._seconds else self._default


class TierCosts:
    """The costs of computing and copying.

    prefill     tokens per second, in steps that are mostly prompts
    copy        bytes per second, to the host tier and back
    read        bytes per second, from the disk to the host tier
    """

    __slots__ = ("_num_skips", "copy", "prefill", "read")

    def __init__(self) -> None:
        self.prefill = Rate(DEFAULT_PREFILL_TOKENS_PER_S)
        self.copy = Rate(DEFAULT_COPY_BYTES_PER_S)
        self.read = Rate(DEFAULT_READ_BYTES_PER_S)
        self._num_skips = 0

    def observe_step(
        self,
        counts: abc.Sequence[int],
        *,
        compute_s: float,
        num_copied_bytes: int,
        copy_s: float,
        num_read_bytes: int = 0,
        read_s: float = 0.0,
    ) -> None:
        """Learn from a step of runs with so many tokens: what computing costs, if most are of prompts, and copying.

        So many bytes were read from the disk beside it.
        """
        num_tokens = sum(counts)
        if 2 * (num_tokens - counts.count(1)) > num_tokens:
            self.prefill.observe(num_tokens, compute_s)
        self.copy.observe(num_copied_bytes, copy_s)
        self.read.observe(num_read_bytes, read_s)

    def prefers_offload(self, *, num_lost_tokens: int, num_bytes: int) -> bool:
        """True if copying so many bytes there and back takes less than computing so many tokens again."""
        return self._prefers_copies(2 * num_bytes, num_lost_tokens)

    def host_copy_use(self, *, block_size: int, num_bytes: int) -> HostCopyUse:
        """Return the copies of evicted blocks that take less than computing their tokens again.

        num_bytes are those of block_size tokens in all layers. A block that is evicted is worth both copies, as a
        preempted sequence is. One that is in the host tier needs only the copy back.
        """
        if self.prefers_offload(num_lost_tokens=block_size, num_bytes=num_bytes):
            return HostCopyUse.THERE_AND_BACK
        return HostCopyUse.BACK if self._prefers_copies(num_bytes, block_size) else HostCopyUse.NONE

    def skips_disk(self, *, block_size: int, num_bytes: int) -> bool:
        """True if a plan is to read nothing from the disk: so many bytes take more time than so many tokens."""
        reading_s = num_bytes / self.read.per_s + num_bytes / self.copy.per_s
        if reading_s < block_size / self.prefill.per_s:
            return False
        self._num_skips += 1
        return self._num_skips % TRIAL_EVERY != 0

    def _prefers_copies(self, num_bytes: int, num_tokens: int) -> bool:
        """True if copying so many bytes takes less than computing so many tokens."""
        return num_bytes / self.copy.per_s < num_tokens / self.prefill.per_s
