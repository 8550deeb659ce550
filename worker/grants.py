"""A step as this worker runs it: the grant as cachemgr signed it, with what the client adds to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np
from google.protobuf.message import DecodeError

from quire.cache.v1 import attach_pb2, grant_pb2
from quire.compute.v1 import worker_service_pb2
from quire.worker.errors import Reason, Refused, invalid
from quire.worker.sampler import SamplingOutOfRange, SamplingParams, TokenArray, TokenIds

DIGEST_BYTES = 16
TOKEN_DTYPE = "<i4"
MAX_ID_BYTES = 5
"""Of an id or a count in a grant: none is negative."""
GRANT_HEAD_BYTES = 4_096
"""More than names and numbers of a grant take."""
SEQUENCE_BYTES = 128
"""More than a grant says of one sequence, but for its blocks."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How a sequence is sampled from a step on; the token ids are only for penalties."""

    params: SamplingParams
    prompt_token_ids: TokenIds = ()
    output_token_ids: TokenIds = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One step, checked."""

    grant: grant_pb2.StepGrant
    given_tokens: Mapping[int, TokenArray] = field(default_factory=dict)
    """Token ids by index of the run they are for; the other runs go on from their last sampled token."""
    sampling: Mapping[int, RowSampling] = field(default_factory=dict)
    """New sampling parameters, by sequence."""
    skip: bool = False


def max_grant_bytes(geometry: attach_pb2.PoolGeometry) -> int:
    """The size that no grant for a pool exceeds: every sequence leaves for the host tier and another one comes back."""
    blocks_per_sequence = -(-geometry.max_sequence_tokens // geometry.block_size_tokens)
    num_entries = geometry.max_sequence_count * min(geometry.block_count, blocks_per_sequence)
    num_host_copies = min(geometry.host_block_count, num_entries)
    num_ids = num_entries + 4 * num_host_copies  # a table entry; source and target of a copy there, and of one back
    return GRANT_HEAD_BYTES + geometry.max_sequence_count * SEQUENCE_BYTES * 2 + num_ids * MAX_ID_BYTES


def decode_grant(signed: grant_pb2.SignedGrant) -> grant_pb2.StepGrant:
    """The grant, not verified yet. Raises Refused (BAD_SIGNATURE) for bytes that are none."""
    try:
        grant = grant_pb2.StepGrant.FromString(signed.grant)
    except DecodeError:
        grant = grant_pb2.StepGrant()
    if not grant.epoch:  # which no epoch is
        raise Refused(Reason.BAD_SIGNATURE, "the grant is not one that cachemgr signed")
    return grant


def decode_step(
    request: worker_service_pb2.RunStepRequest,
    grant: grant_pb2.StepGrant,
    *,
    vocab_size: int,
    max_sequence_tokens: int,
    max_step_tokens: int,
    max_logprobs: int,
) -> Step:
    """What the client adds, checked against the grant. Raises Refused (INVALID_ARGUMENT, TOKENS_MISMATCH)."""
    if request.skip:
        return Step(grant, skip=True)
    num_tokens = sum(grant.run_token_counts)
    if num_tokens > max_step_tokens:
        raise invalid("grant.run_token_counts", f"{num_tokens} tokens", f"at most {max_step_tokens} per step")
    tokens: dict[int, Sequence[int]] = {}
    sampling: dict[int, RowSampling] = {}
    runs = set(grant.run_sequence_ids)
    for entry in request.inputs:
        seq_id = entry.sequence_id
        if seq_id not in runs:
            limit = "a sequence that the grant runs, given once"
            raise invalid("inputs.sequence_id", seq_id, limit, sequence_id=seq_id)
        runs.remove(seq_id)
        if entry.token_ids:
            tokens[seq_id] = entry.token_ids
        if entry.HasField("sampling"):
            sampling[seq_id] = decode_sampling(
                entry, vocab_size=vocab_size, max_sequence_tokens=max_sequence_tokens, max_logprobs=max_logprobs
            )
    return Step(grant, match_given_tokens(grant, tokens), sampling)


def match_given_tokens(grant: grant_pb2.StepGrant, tokens: dict[int, Sequence[int]]) -> dict[int, TokenArray]:
    """Token ids by run, exactly those that cachemgr was told. Raises Refused."""
    given = {}
    for position, run in enumerate(grant.given_run_indexes):
        seq_id, count = grant.run_sequence_ids[run], grant.run_token_counts[run]
        given_ids = tokens.pop(seq_id, ())
        if len(given_ids) != count:
            value = f"{len(given_ids)} tokens for sequence {seq_id}"
            raise invalid("inputs.token_ids", value, f"{count} tokens", sequence_id=seq_id)
        ids = np.asarray(given_ids, dtype=np.int32)
        digest = sha256(ids.astype(TOKEN_DTYPE).tobytes()).digest()[:DIGEST_BYTES]
        if digest != grant.given_token_digests[position * DIGEST_BYTES : (position + 1) * DIGEST_BYTES]:
            message = f"the tokens given for sequence {seq_id} are not those that cachemgr was told"
            raise Refused(Reason.TOKENS_MISMATCH, message, sequence_id=seq_id)
        given[run] = ids
    if tokens:
        seq_id, given_ids = next(iter(tokens.items()))
        limit = "none: the run goes on from the token sampled last"
        raise invalid("inputs.token_ids", f"{len(given_ids)} tokens for sequence {seq_id}", limit, sequence_id=seq_id)
    return given


def decode_sampling(
    entry: worker_service_pb2.SequenceInput, *, vocab_size: int, max_sequence_tokens: int, max_logprobs: int
) -> RowSampling:
    """Return the sampling parameters of one sequence. Raises Refused (INVALID_ARGUMENT), which names the sequence."""
    message, seq_id = entry.sampling, entry.sequence_id
    num_logprobs = message.logprob_count if message.HasField("logprob_count") else None
    if num_logprobs is not None and not 0 <= num_logprobs <= max_logprobs:
        raise invalid("sampling.logprob_count", num_logprobs, f"0 to {max_logprobs}", sequence_id=seq_id)
    params = SamplingParams(
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        seed=message.seed % 2**63,
        num_logprobs=num_logprobs,
    )
    try:
        params.validate()
    except SamplingOutOfRange as error:
        raise invalid(f"sampling.{error.field}", error.value, error.limit, sequence_id=seq_id) from None
    num_tokens = len(message.prompt_token_ids) + len(message.output_token_ids)
    if num_tokens > max_sequence_tokens:
        limit = f"at most {max_sequence_tokens} with output_token_ids, the longest sequence"
        raise invalid("sampling.prompt_token_ids", f"{num_tokens} tokens", limit, sequence_id=seq_id)
    history: dict[str, TokenArray] = {
        "prompt_token_ids": np.asarray(message.prompt_token_ids, dtype=np.int32),
        "output_token_ids": np.asarray(message.output_token_ids, dtype=np.int32),
    }
    for name, token_ids in history.items():
        if token_ids.size and not 0 <= token_ids.min() <= token_ids.max() < vocab_size:
            limit = f"0 to {vocab_size - 1}"
            raise invalid(f"sampling.{name}", "a token out of range", limit, sequence_id=seq_id)
    return RowSampling(params, **history)
