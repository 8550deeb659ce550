"""Prompts with breakpoints, one at a time at their times, through cachemgr's books."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from loads import BLOCK_SIZE, Breakpoints
from numpy.typing import NDArray

from quire.cache.v1 import attach_pb2, cache_service_pb2
from quire.cachemgr._core import DEFAULT_POLICY, Admission, Ledger, PlanRequest, StepReport, TenantUse
from quire.cachemgr.geometry import Geometry
from quire.cachemgr.shares import Share

LEASE, EPOCH = "lease", 1
MOST_TOKENS = 2**24


class Pool:
    """A pool of so many blocks, with the default limits of a tenant. Each prompt takes the place of the one before."""

    def __init__(self, num_blocks: int, *, policy: str = DEFAULT_POLICY, floors: dict[str, int] | None = None) -> None:
        geometry = Geometry(
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks + 1,
            block_bytes=1,
            max_sequences=2,
            max_sequence_tokens=MOST_TOKENS,
            vocab_size=2**31 - 1,
            model="prompt-cache",
            model_fingerprint="prompt-cache",
        )
        self.ledger = Ledger("prompt-cache", EPOCH, geometry, policy=policy)
        self.ledger.open_lease(LEASE, ttl_s=1.0, now=0.0)
        self.ledger.keep_contents(False)  # nothing here reads the tokens of blocks
        shares = {name: Share(floor=floor).resolve(num_blocks) for name, floor in (floors or {}).items()}
        self.ledger.set_shares(Share().resolve(num_blocks), shares)

    def serve(self, tokens: NDArray[np.int32], breakpoints: Breakpoints, now: float, *, tenant: str = "") -> int:
        """Returns the tokens that were found. Raises RuntimeError if there is no room."""
        return self.run(request_of(tokens, breakpoints, tenant), len(tokens), now)

    def run(self, body: bytes, num_tokens: int, now: float) -> int:
        """Plan and settle the step of a serialised request. Returns the tokens that were found."""
        plan = self.ledger.plan(PlanRequest(body), now=now, names_tenants=True)
        if plan.has_refusals:
            raise RuntimeError(f"a prompt of {num_tokens} tokens was refused: {plan.refusals[0]}")
        answer = cache_service_pb2.PlanStepResponse.FromString(plan.encode_answer())
        self.ledger.settle(StepReport(report_of(answer.step_number, num_tokens)))
        return answer.admitted_cached_token_counts[0]

    def use(self, tenant: str) -> TenantUse:
        """A tenant that was served."""
        use = self.ledger.inspector.tenant_use(tenant)
        if use is None:
            raise RuntimeError(f"{tenant!r} was not served")
        return use

    def has_room_for(self, num_blocks: int, tenant: str) -> bool:
        """True if a tenant's new prompt of so many blocks would be admitted now."""
        admission = cache_service_pb2.Admission(sequence_id=2, token_ids=[1] * (num_blocks * BLOCK_SIZE))
        return (
            self.ledger.check_admission(tenant, Admission(admission.SerializeToString(), MOST_TOKENS)).refusal is None
        )


def request_of(tokens: NDArray[np.int32], breakpoints: Breakpoints, tenant: str = "") -> bytes:
    """A serialised plan that admits a prompt in the place of the one before."""
    step = cache_service_pb2.PlanStepRequest(lease_id=LEASE, epoch=EPOCH, release_sequence_ids=[1])
    admission = step.admissions.add(sequence_id=1, token_ids=tokens.tolist())
    if tenant:
        admission.tenant = tenant
    for num_tokens, ttl_s in breakpoints:
        admission.breakpoints.add(token_count=num_tokens).ttl.FromNanoseconds(int(ttl_s * 1e9))
    return step.SerializeToString()


def report_of(step_number: int, num_tokens: int, seq_ids: Sequence[int] = (1,)) -> bytes:
    """A serialised report of a step in which the whole prompt was computed."""
    return attach_pb2.StepReport(
        lease_id=LEASE,
        step_number=step_number,
        outcome=attach_pb2.STEP_OUTCOME_COMPUTED,
        sequence_ids=seq_ids,
        computed_token_counts=[num_tokens],
        sampled_sequence_ids=seq_ids,
        sampled_token_ids=[0],
    ).SerializeToString()
