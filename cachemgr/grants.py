"""A step's plan as bytes that only this pool's cachemgr can have made."""

from __future__ import annotations

import hmac

from quire.cache.v1 import grant_pb2
from quire.cachemgr.catalog import AttachedPool
from quire.cachemgr.plans import StepPlan


def encode_grant(plan: StepPlan, pool: AttachedPool, *, lease_id: str, term: int) -> grant_pb2.StepGrant:
    """The grant for a planned step, unsigned."""
    return grant_pb2.StepGrant(
        pool=pool.ledger.pool,
        epoch=pool.ledger.epoch,
        term=term,
        lease_id=lease_id,
        step_number=plan.step_number,
        known_step_number=plan.known_step,
        released_sequence_ids=plan.released_ids,
        fork_parent_ids=plan.fork_parent_ids,
        fork_child_ids=plan.fork_child_ids,
        write_sequence_ids=plan.write_seq_ids,
        write_first_indexes=plan.write_first_indexes,
        write_block_counts=plan.write_block_counts,
        write_block_ids=plan.write_block_ids,
        copy_source_block_ids=plan.copy_sources,
        copy_target_block_ids=plan.copy_targets,
        run_sequence_ids=plan.run_seq_ids,
        run_starts=plan.run_starts,
        run_token_counts=plan.run_token_counts,
        run_samples=plan.run_samples,
        given_run_indexes=plan.given_run_indexes,
        given_token_digests=bytes(plan.given_digests),
    )


def sign(grant: grant_pb2.StepGrant, signed: grant_pb2.SignedGrant, *, key: bytes) -> None:
    """Fills `signed` with the grant's bytes and their HMAC-SHA256 under the attachment's key."""
    signed.grant = grant.SerializeToString()
    signed.signature = hmac.digest(key, signed.grant, "sha256")
