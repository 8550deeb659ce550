"""A sequence: its tokens, its block table, and how far both have come.

    0            num_cached      num_computed     num_scheduled     num_known        num_tokens
    |-- found ------|-- reported -----|-- planned -----|-- waiting -----|-- promised -----|
      in the cache     by the worker     in steps         known tokens     being sampled
                                         in flight        not run yet      by steps in flight

Each bound is at most the next, but for num_scheduled and num_known: a promised token may be scheduled too.
The table has blocks for all of them, but perhaps for the token sampled last, which gets its slot when it is scheduled.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.cachemgr.prefix import TOKEN_BYTES


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens whose KV lives in the pool; owned by one lease."""

    seq_id: int
    root: bytes
    """Root of its prefix hashes: tenant, salt and model."""
    tokens: bytearray
    """Known tokens, TOKEN_BYTES each."""
    block_table: list[int]
    hashes: list[bytes]
    """Prefix hashes of the full blocks of known tokens, as far as they were needed."""
    num_cached: int = 0
    num_computed: int = 0
    num_scheduled: int = 0
    num_promised: int = 0
    """Tokens after the known ones that steps in flight are sampling."""
    num_published: int = 0
    """Leading blocks whose hash the index has seen."""
    sampled_position: int | None = None
    """Where the token stands that the worker sampled last, or is sampling: it can be run without being named."""
    released: bool = False

    @property
    def num_known(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def num_tokens(self) -> int:
        """Known tokens and those being sampled."""
        return self.num_known + self.num_promised

    def token_bytes(self, start: int, end: int) -> bytes:
        """The known tokens from position start to end, TOKEN_BYTES each."""
        return bytes(self.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES])

    def forget_uncomputed(self) -> None:
        """What steps in flight were to compute and sample will not come: back to what was reported."""
        self.num_scheduled = self.num_computed
        self.num_promised = 0
        if self.sampled_position is not None and self.sampled_position >= self.num_known:
            self.sampled_position = None
