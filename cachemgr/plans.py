"""What a client asks of its next step, and what of it can be refused: plain values, the core's side of PlanStep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from quire.cachemgr.errors import Refusal

TOKEN_BYTES = 4
"""A token id is kept as a little-endian int32."""


class PlanItem(Enum):
    """The kinds of items that are answered one by one."""

    OFFLOAD = "offload"
    TRIM = "trim"
    FORK = "fork"
    EXTEND = "extend"
    RESTORE = "restore"
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
class Restore:
    seq_id: int
    max_compute: int = 0
    """The most tokens to compute in this step; 0: no limit of its own."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How much a range of a sequence is worth keeping."""

    num_tokens: int
    """From the end of the range before it on; 0: all that follow."""
    priority: int
    """LEAST_WORTH to MOST_WORTH of the core."""
    ttl_s: float | None = None
    """How long this stands; None: as long as the content."""


@dataclass(frozen=True, slots=True)
class ReturnHint:
    """What is known of the future of a sequence that is released."""

    seq_id: int
    expected_in_s: float | None
    """It will be asked for again in about so many seconds; None: never."""


@dataclass(frozen=True, slots=True)
class Admission:
    seq_id: int
    tokens: bytes
    """TOKEN_BYTES each."""
    max_compute: int = 0
    """The most tokens to compute in this step; 0: no limit of its own."""
    salt: bytes = b""
    reserved_tokens: int = 0
    """The most tokens the sequence will ever have, guaranteed; 0: best effort."""
    retention: Sequence[Retention] = ()
    """What is worth keeping, from the first token on."""
    resumed: bool = False
    """It was here before, and was released to make room."""


@dataclass(frozen=True, slots=True)
class StepRequest:
    """Everything a client wants of one step."""

    releases: Sequence[int] = ()
    return_hints: Sequence[ReturnHint] = ()
    """About sequences that are released."""
    offloads: Sequence[int] = ()
    """Sequences to move to the host tier."""
    trims: Sequence[Trim] = ()
    forks: Sequence[Fork] = ()
    extend_ids: Sequence[int] | bytes = ()
    """Sequences to run; as bytes, a little-endian int32 each."""
    extend_token_counts: Sequence[int] | bytes = ()
    """Tokens to compute, parallel to extend_ids."""
    appends: Mapping[int, bytes] = field(default_factory=dict)
    """Tokens to append before computing, by sequence, TOKEN_BYTES each."""
    restores: Sequence[Restore] = ()
    admissions: Sequence[Admission] = ()
    admission_token_budget: int = 0
    """The most tokens restores and admissions may compute together; 0: no limit."""
    admission_reserve: int = 0
    """Blocks that restores and admissions leave allocatable."""


@dataclass(frozen=True, slots=True)
class RefusedItem:
    item: PlanItem
    seq_id: int
    refusal: Refusal
