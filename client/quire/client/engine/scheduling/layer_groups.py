"""The blocks that a sequence has in its block tables: one table for each layer group of the model. Pure.

    group       blocks of its table
    full        for all tokens
    windowed    for the computed tokens and those being computed, from the first one on that the next token sees

A windowed group, sliding or chunked, releases blocks while its sequence grows. A sequence can then be longer than the
pool has slots. All blocks of a pool have the same size, whatever their group.
"""

from bisect import bisect_right
from collections import Counter, abc
from dataclasses import dataclass

from quire.cache.v1.layer_spans import LayerGroupKind, first_seen


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of the model that see the same positions. num_window_tokens is the size of the window or chunk."""

    kind: LayerGroupKind = LayerGroupKind.FULL
    num_window_tokens: int = 0

    def first_seen(self, position: int) -> int:
        """Return the first position that a token at a position sees."""
        return first_seen(self.kind, self.num_window_tokens, position)


FULL = LayerGroup()


class BlockTables:
    """The number of blocks in a sequence's tables. Cost of a method: the number of different groups."""

    __slots__ = ("_num_full", "_windowed", "block_size")

    def __init__(self, block_size: int, groups: abc.Collection[LayerGroup] = ()) -> None:
        """Without groups there is one full group."""
        numbers = Counter(groups or (FULL,))
        self.block_size = block_size
        self._num_full = numbers.pop(FULL, 0)
        # The most blocks of a window belong to two neighbouring tokens, of which the first may be computed again.
        self._windowed = [
            (number, group, (group.num_window_tokens - 1) // block_size + 2) for group, number in numbers.items()
        ]

    @property
    def has_windows(self) -> bool:
        """True if a group releases blocks while a sequence grows."""
        return bool(self._windowed)

    def num_blocks(self, num_tokens: int, num_scheduled: int, *, num_shared: int = 0) -> int:
        """Return the blocks of a sequence with so many tokens, without those of its first num_shared tokens.

        The blocks that steps in flight release are not counted.
        """
        first = num_shared // self.block_size
        num_blocks = self._num_full * (-(-num_tokens // self.block_size) - first)
        for number, group, _ in self._windowed:
            start = group.first_seen(max(0, num_scheduled - 1)) // self.block_size
            num_blocks += number * max(0, -(-num_scheduled // self.block_size) - max(start, first))
        return num_blocks

    def num_slots(self, num_tokens: int) -> int:
        """Return the slots that a sequence takes for so many more tokens. A window takes no more than its blocks."""
        slots = self._num_full * num_tokens
        return slots + sum(number * min(num_tokens, most * self.block_size) for number, _, most in self._windowed)

    def num_chunk_blocks(self, num_tokens: int) -> int:
        """Return the blocks that a step of so many tokens of a prompt takes in windowed groups, until it has ended."""
        return sum(number for number, _, _ in self._windowed) * (-(-num_tokens // self.block_size) + 1)

    def max_tokens(self, num_blocks: int, *, at_most: int, num_shared: int = 0, num_sequences: int = 1) -> int:
        """Return the most tokens of each of some sequences in so many blocks, if their tokens are computed one by one.

        The sequences share the blocks of their first num_shared tokens. The limit at_most is rounded up to a block.
        Cost: the logarithm of at_most.
        """
        shared = num_shared // self.block_size
        lengths = range(shared, -(-at_most // self.block_size) + 1)
        fitting = bisect_right(lengths, num_blocks, key=lambda length: self._least(length, shared, num_sequences))
        return (shared + fitting - 1) * self.block_size

    def _least(self, length: int, shared: int, num_sequences: int) -> int:
        """Return the most blocks that sequences of this length hold at a time. length and shared are in blocks."""
        least = self._num_full * (shared + num_sequences * (length - shared))
        for number, _, most in self._windowed:
            own = min(length - shared, most)
            least += number * (num_sequences * own + min(shared, most - own))
        return least
