"""A step's plan as bytes that only this pool's cachemgr can have made."""

from __future__ import annotations

import hmac

from quire.cache.v1 import grant_pb2
from quire.cachemgr._core import GrantedStep
from quire.cachemgr.catalog import AttachedPool


def sign_grant(plan: GrantedStep, signed: grant_pb2.SignedGrant, pool: AttachedPool, *, lease_id: str) -> None:
    """Fills `signed` with the grant for a planned step and its HMAC-SHA256 under the attachment's key."""
    signed.grant = plan.encode_grant(pool.ledger.pool, pool.ledger.epoch, pool.term, lease_id)
    signed.signature = hmac.digest(pool.signing_key, signed.grant, "sha256")
