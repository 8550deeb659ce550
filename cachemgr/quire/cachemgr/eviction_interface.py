"""The interface of an eviction policy that is a Python object, for `quire lab`: `Ledger(..., policy=...)`.

No policy is here. Those that cachemgr runs are in core/src/cache/eviction/, and have names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class EvictionPolicy(Protocol):
    """Chooses the cached blocks to evict. It gets the same calls as the crate's policies.

    A block is parked while it is cached and no sequence holds it: it can be evicted then. Block ids begin at 1. A
    policy belongs to one pool, and must not call the ledger. An error that a method raises is raised by the ledger's
    call, which is finished: LRU decides instead of the policy, from then on.
    """

    def admit(self, found: Sequence[int], fresh: Sequence[int], hashes: Sequence[bytes]) -> None:
        """A sequence begins. found: its blocks with known content, in order; fresh: those that continue them.

        hashes are the prefix hashes of its full blocks, from the first one on. They identify content beyond eviction.
        """
        ...

    def park(self, blocks: Sequence[int]) -> None:
        """These have no holder any more, and can be evicted from now on. Children come before their parents."""
        ...

    def unpark(self, blocks: Sequence[int]) -> None:
        """These are in use again, or were dropped from the cache: they are not parked any more."""
        ...

    def forget(self, blocks: Sequence[int]) -> None:
        """These are free and have no content: they will be other content when they are parked again."""
        ...

    def evict(self, count: int) -> Sequence[int]:
        """Return `count` different parked blocks. They are evicted: not parked any more, and without content.

        Children come before their parents: a block behind an evicted one is not found. There are `count` blocks.
        """
        ...
