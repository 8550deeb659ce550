"""Requests near the bounds of what a method takes: as much as may be, or one less or more, of one list or of all.

They are valid but for that. So most of them cost the servers as much as a request of their method can.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from robustness.fuzz import names
from robustness.fuzz.surface import Method

from quire.cache.v1 import attach_pb2, cache_service_pb2
from quire.cachemgr import _core
from quire.cachemgr.service import messages
from quire.compute.v1 import worker_service_pb2
from quire.worker.grant.gate import MAX_UNSIGNED_BYTES
from quire.worker.service.servicer import MAX_CHECKSUM_BLOCKS

MAX_SEQUENCES, MAX_TOKENS, BLOCK_SIZE = 24, 64, 4
"""The geometry of the pool that messages may change: OWN_GEOMETRY."""
_POOLED = {"pool": names.OWN_POOL}


def near(rng: random.Random, bound: int) -> int:
    """The bound, or a number beside it."""
    return max(0, bound + rng.choice((-1, 0, 0, 0, 1)))


def ids(rng: random.Random) -> list[int]:
    """Sequences, as many as a plan may name."""
    first = rng.choice((0, 1, 100))
    return list(range(first, first + near(rng, MAX_SEQUENCES)))


def tokens(rng: random.Random, bound: int = MAX_TOKENS) -> list[int]:
    """A prompt of the greatest length; many are equal at the beginning."""
    return [rng.choice((1, 1, 1, 5))] * near(rng, bound)


def admission(rng: random.Random, seq_id: int, bound: int = MAX_TOKENS) -> dict[str, Any]:
    ranges = [{"token_count": BLOCK_SIZE, "priority": 1 + number % 9} for number in range(near(rng, 16))]
    salt = bytes(near(rng, _core.MAX_SALT_BYTES)) if rng.random() < 0.3 else b""
    return {"sequence_id": seq_id, "token_ids": tokens(rng, bound), "salt": salt, "retention": ranges}


def _admissions(rng: random.Random) -> dict[str, Any]:
    return {"admissions": [admission(rng, seq_id) for seq_id in ids(rng)]}


def _long_admissions(rng: random.Random) -> dict[str, Any]:
    """As many tokens as a plan may bring, in prompts of which each is too long."""
    return {"admissions": [admission(rng, seq_id, _core.MAX_PLAN_TOKENS // MAX_SEQUENCES) for seq_id in ids(rng)]}


def _expected(rng: random.Random) -> dict[str, Any]:
    """Prompts that find the blocks of admissions; or as many tokens as a plan may bring."""
    bound = rng.choice((MAX_TOKENS, _core.MAX_PLAN_TOKENS // MAX_SEQUENCES))
    prompts = [
        {"token_ids": tokens(rng, bound), "expected_in": {"seconds": rng.choice((0, 9, 3_600))}} for _ in ids(rng)
    ]
    return {"expected_prompts": prompts}


def _extends(rng: random.Random) -> dict[str, Any]:
    seq_ids = ids(rng)
    extends: dict[str, Any] = {"sequence_ids": seq_ids, "token_counts": [1] * len(seq_ids)}
    if rng.random() < 0.3:
        extends |= {"append_token_counts": [1] * len(seq_ids), "append_token_ids": [7] * len(seq_ids)}
    return {"extends": extends}


def _forks(rng: random.Random) -> dict[str, Any]:
    count = rng.choice((1, MAX_TOKENS, _core.MAX_FORKED_TOKENS // MAX_SEQUENCES))
    return {"forks": [{"parent_sequence_id": 1, "child_sequence_ids": ids(rng), "token_count": count}]}


def _leaving(rng: random.Random) -> dict[str, Any]:
    seq_ids = ids(rng)
    return {
        "release_sequence_ids": seq_ids,
        "return_hints": [{"sequence_id": seq_id, "not_expected": True} for seq_id in seq_ids],
    }


def _trims(rng: random.Random) -> dict[str, Any]:
    seq_ids = ids(rng)
    return {"trim_sequence_ids": seq_ids, "trim_token_counts": [rng.choice((1, 4, 64))] * len(seq_ids)}


def _host(rng: random.Random) -> dict[str, Any]:
    return {"offload_sequence_ids": ids(rng), "restores": [{"sequence_id": seq_id} for seq_id in ids(rng)]}


PLAN_PARTS = (_admissions, _long_admissions, _expected, _extends, _forks, _leaving, _trims, _host)


def plan(rng: random.Random) -> cache_service_pb2.PlanStepRequest:
    fields: dict[str, Any] = {"lease_id": rng.choice(names.OWN_LEASES), "epoch": names.OWN_EPOCH}
    for part in rng.sample(PLAN_PARTS, rng.choice((1, 1, 2, len(PLAN_PARTS)))):
        fields |= part(rng)
    if rng.random() < 0.3:
        fields["request_id"] = "r" * near(rng, _core.MAX_REQUEST_ID_BYTES)
    return cache_service_pb2.PlanStepRequest(**fields)


def attachment(rng: random.Random) -> attach_pb2.AttachPoolRequest:
    if rng.random() < 0.5:
        seq_ids = list(range(near(rng, 2 * MAX_SEQUENCES)))
        report = {
            "report_number": 1,
            "lease_id": names.OWN_LEASES[0],
            "step_number": 1,
            "outcome": attach_pb2.STEP_OUTCOME_COMPUTED,
            "sequence_ids": seq_ids,
            "computed_token_counts": seq_ids,
            "sampled_sequence_ids": seq_ids,
            "sampled_token_ids": seq_ids,
        }
        return attach_pb2.AttachPoolRequest(step_report=report)
    text = "x" * near(rng, messages.MAX_TEXT_LENGTH)
    geometry = {
        "block_size_tokens": 4,
        "block_count": names.MAX_OWN_BLOCKS,
        "block_bytes": 1,
        "max_sequence_count": 2**31 - 1,
        "max_sequence_tokens": 2**31 - 1,
        "vocabulary_size": 2**31 - 1,
        "model": text,
        "model_fingerprint": text,
    }
    leases = [{"lease_id": lease_id, "next_step_number": 1} for lease_id in names.LEASES] * rng.choice((1, 1_000))
    registration = {
        "pool": rng.choice((*names.ATTACHED_POOLS, "x" * near(rng, messages.MAX_POOL_NAME_LENGTH))),
        "epoch": rng.randrange(1, 4),
        "geometry": geometry,
        "worker_address": text,
        "open_leases": leases,
    }
    return attach_pb2.AttachPoolRequest(register_pool=registration)


def step(rng: random.Random) -> worker_service_pb2.RunStepRequest:
    if rng.random() < 0.3:
        grant = rng.randbytes(8) * (near(rng, MAX_UNSIGNED_BYTES) // 8)
        return worker_service_pb2.RunStepRequest(grant={"grant": grant, "signature": bytes(names.SIGNATURE_BYTES)})
    history = [1] * near(rng, 2_048)
    sampling = {"repetition_penalty": 1.1, "prompt_token_ids": history, "output_token_ids": history}
    inputs = [{"sequence_id": seq_id, "token_ids": history, "sampling": sampling} for seq_id in range(near(rng, 8))]
    return worker_service_pb2.RunStepRequest(inputs=inputs)


def prefix(rng: random.Random) -> dict[str, Any]:
    return _POOLED | {"token_ids": tokens(rng), "salt": bytes(near(rng, _core.MAX_SALT_BYTES))}


LARGE: Mapping[str, Callable[[random.Random], Any]] = {
    "PlanStep": plan,
    "PlanSteps": lambda rng: cache_service_pb2.PlanStepsRequest(plan=plan(rng)),
    "AttachPool": attachment,
    "LookupPrefix": lambda rng: cache_service_pb2.LookupPrefixRequest(**prefix(rng)),
    "ExplainPrefix": lambda rng: cache_service_pb2.ExplainPrefixRequest(**prefix(rng)),
    "PinPrefix": lambda rng: cache_service_pb2.PinPrefixRequest(**prefix(rng)),
    "CheckAdmission": lambda rng: cache_service_pb2.CheckAdmissionRequest(
        **_POOLED, admission=admission(rng, 1, rng.choice((MAX_TOKENS, _core.MAX_PLAN_TOKENS)))
    ),
    "ListBlocks": lambda rng: cache_service_pb2.ListBlocksRequest(**_POOLED, page_size=near(rng, 10_000)),
    "ListSequences": lambda rng: cache_service_pb2.ListSequencesRequest(**_POOLED, page_size=near(rng, 1_000)),
    "RunStep": step,
    "RunSteps": lambda rng: worker_service_pb2.RunStepsRequest(step=step(rng)),
    "ChecksumBlocks": lambda rng: worker_service_pb2.ChecksumBlocksRequest(
        block_ids=[rng.randrange(4)] * near(rng, MAX_CHECKSUM_BLOCKS)
    ),
}
"""By method. Others have nothing in their requests that can be large."""


def request(method: Method, rng: random.Random) -> bytes:
    """A request near the bounds of a method of LARGE."""
    data: bytes = LARGE[method.name](rng).SerializeToString()
    return data
