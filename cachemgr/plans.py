"""What a client asks of its next step, and what it gets: plain values, the core's side of PlanStep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from quire.cachemgr.errors import Refusal
from quire.cachemgr.pool import BlockCounts


class PlanItem(Enum):
    """The kinds of items that are answered one by one."""

    TRIM = "trim"
    FORK = "fork"
    EXTEND = "extend"
    ADMISSION = "admission"


@dataclass(frozen=True, slots=True)
class Trim:
    seq_id: int
    num_tokens: int
    """Tokens to keep."""


@dataclass(frozen=True, slots=True)
class Fork:
    parent_id: int
    child_ids: Sequence[int]
    num_tokens: int
    """Tokens each child begins with."""


@dataclass(frozen=True, slots=True)
class Admission:
    seq_id: int
    tokens: bytes
    """TOKEN_BYTES each."""
    max_compute: int = 0
    """The most tokens to compute in this step; 0: no limit of its own."""
    salt: bytes = b""

    def parts(self) -> tuple[bytes, ...]:
        """All that it consists of."""
        return repr((self.seq_id, self.max_compute)).encode(), self.salt, self.tokens


@dataclass(frozen=True, slots=True)
class StepRequest:
    """Everything a client wants of one step."""

    releases: Sequence[int] = ()
    trims: Sequence[Trim] = ()
    forks: Sequence[Fork] = ()
    extend_ids: Sequence[int] | npt.NDArray[np.int32] = ()
    extend_token_counts: Sequence[int] | npt.NDArray[np.int32] = ()
    """Tokens to compute, parallel to extend_ids."""
    appends: Mapping[int, bytes] = field(default_factory=dict)
    """Tokens to append before computing, by sequence, TOKEN_BYTES each."""
    admissions: Sequence[Admission] = ()
    admission_token_budget: int = 0
    """The most tokens admissions may compute together; 0: no limit."""
    admission_reserve: int = 0
    """Blocks that admissions leave allocatable."""

    def digest(self) -> bytes:
        """Tells this request from any other one."""
        extends = np.asarray(self.extend_ids, np.int32), np.asarray(self.extend_token_counts, np.int32)
        parts = (
            repr((list(self.releases), self.trims, self.admission_token_budget, self.admission_reserve)).encode(),
            repr([(fork.parent_id, list(fork.child_ids), fork.num_tokens) for fork in self.forks]).encode(),
            *(array.tobytes() for array in extends),
            repr(self.appends).encode() if self.appends else b"",
            *(part for item in self.admissions for part in item.parts()),
        )
        digest = sha256(repr([len(part) for part in parts]).encode())
        for part in parts:
            digest.update(part)
        return digest.digest()


@dataclass(frozen=True, slots=True)
class RefusedItem:
    item: PlanItem
    seq_id: int
    refusal: Refusal


@dataclass(slots=True)
class StepPlan:
    """What one step may touch and is to compute; grows while it is planned, constant afterwards.

    Lists named alike belong together by index, as in quire.cache.v1.StepGrant.
    """

    step_number: int
    known_step: int
    released_ids: list[int] = field(default_factory=list)
    fork_parent_ids: list[int] = field(default_factory=list)
    fork_child_ids: list[int] = field(default_factory=list)
    write_seq_ids: list[int] = field(default_factory=list)
    write_first_indexes: list[int] = field(default_factory=list)
    write_block_counts: list[int] = field(default_factory=list)
    write_block_ids: list[int] = field(default_factory=list)
    copy_sources: list[int] = field(default_factory=list)
    copy_targets: list[int] = field(default_factory=list)
    run_seq_ids: list[int] = field(default_factory=list)
    run_starts: list[int] = field(default_factory=list)
    run_token_counts: list[int] = field(default_factory=list)
    run_samples: list[bool] = field(default_factory=list)
    given_run_indexes: list[int] = field(default_factory=list)
    given_digests: bytearray = field(default_factory=bytearray)
    refusals: list[RefusedItem] = field(default_factory=list)
    admitted_ids: list[int] = field(default_factory=list)
    admitted_cached_counts: list[int] = field(default_factory=list)
    counts: BlockCounts = field(default_factory=lambda: BlockCounts(0, 0, 0, 0))

    def write_each(self, seq_ids: list[int], indexes: list[int], block_ids: list[int]) -> None:
        """Adds block table writes of one entry each."""
        self.write_seq_ids += seq_ids
        self.write_first_indexes += indexes
        self.write_block_counts += [1] * len(seq_ids)
        self.write_block_ids += block_ids

    def write(self, seq_id: int, first_index: int, block_ids: Sequence[int]) -> None:
        """Adds a block table write."""
        self.write_seq_ids.append(seq_id)
        self.write_first_indexes.append(first_index)
        self.write_block_counts.append(len(block_ids))
        self.write_block_ids.extend(block_ids)
