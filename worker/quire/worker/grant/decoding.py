"""A step as this worker runs it: the grant that cachemgr signed, and the client's additions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from types import MappingProxyType

import numpy as np
from google.protobuf.message import DecodeError

from quire.cache.v1 import attach_pb2, grant_pb2
from quire.compute.v1 import worker_service_pb2
from quire.compute.v1.sampling_ranges import (
    LOGIT_BIAS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    RANGES,
    leaves_token,
)
from quire.worker.grant.errors import Reason, Refused, invalid
from quire.worker.sampling.constraints import NUM_REMEMBERED, Constraints
from quire.worker.sampling.following import Following
from quire.worker.sampling.grammars import Grammar, GrammarRefused
from quire.worker.sampling.parameters import SamplingOutOfRange, SamplingParams, TokenArray, TokenIds
from quire.worker.sampling.prompt_logprobs import ScoredTokens

DIGEST_BYTES = 16
TOKEN_DTYPE = "<i4"
MAX_ID_BYTES = 5
"""The most bytes of an id or a count in a grant: none is negative."""
GRANT_HEAD_BYTES = 4_096
"""A limit that the names and numbers of a grant stay below."""
SEQUENCE_BYTES = 128
"""A limit that a grant's bytes for one sequence in one layer group stay below, its blocks aside."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """A sequence's sampling from a step on; the token ids are only for penalties, the last ones for bad words.

    following   the sequence's grammar, with the generated tokens that the client gave
    """

    params: SamplingParams
    prompt_token_ids: TokenIds = ()
    output_token_ids: TokenIds = ()
    last_token_ids: TokenIds = ()
    following: Following | None = None


@dataclass(frozen=True, slots=True)
class AcceptedStep:
    """A step as this worker runs it: its grant was accepted, and the client's additions are checked."""

    grant: grant_pb2.StepGrant
    given_tokens: Mapping[int, TokenArray] = field(default_factory=dict)
    """Token ids by index of the run they are for; the other runs go on from their last sampled token. Those of a run
    with drafts are the drafts: it goes on from its last sampled token, too."""
    sampling: Mapping[int, RowSampling] = field(default_factory=dict)
    """New sampling parameters, by sequence."""
    scored: Mapping[int, ScoredTokens] = field(default_factory=dict)
    """Tokens of a prompt with log-probabilities in the answer, by index of the run."""
    skip: bool = False


def max_grant_bytes(geometry: attach_pb2.PoolGeometry) -> int:
    """The size that no grant for a pool exceeds: every sequence is offloaded, and another one restored or admitted."""
    num_groups = max(1, len(geometry.layer_groups))
    blocks_per_sequence = num_groups * -(-geometry.max_sequence_tokens // geometry.block_size_tokens)
    num_entries = geometry.max_sequence_count * min(geometry.block_count, blocks_per_sequence)
    num_host_copies = min(geometry.host_block_count, num_entries)
    num_copies_back = num_entries if geometry.host_cached_block_limit else num_host_copies  # admissions share copies
    num_ids = num_entries + 2 * num_host_copies + 2 * num_copies_back  # table entries; sources and targets of copies
    num_tables = geometry.max_sequence_count * num_groups
    return GRANT_HEAD_BYTES + num_tables * SEQUENCE_BYTES * 2 + num_ids * MAX_ID_BYTES


def decode_grant(signed: grant_pb2.SignedGrant) -> grant_pb2.StepGrant:
    """The grant, not verified yet. Raises Refused (BAD_SIGNATURE) for bytes that are none."""
    try:
        grant = grant_pb2.StepGrant.FromString(signed.grant)
    except DecodeError:
        grant = grant_pb2.StepGrant()
    if not grant.epoch:  # which no epoch is
        raise Refused(Reason.BAD_SIGNATURE, "cachemgr has not signed this grant")
    return grant


def decode_step(
    request: worker_service_pb2.RunStepRequest,
    grant: grant_pb2.StepGrant,
    *,
    vocab_size: int,
    max_sequence_tokens: int,
    max_step_tokens: int,
    max_logprobs: int,
    max_drafts: int = 0,
    adapters: Mapping[str, bytes] = MappingProxyType({}),
    followed: Mapping[int, Following | Refused] = MappingProxyType({}),
) -> AcceptedStep:
    """Decode the client's additions, checked against the grant. Raises Refused (INVALID_ARGUMENT, TOKENS_MISMATCH).

    adapters are the identities of the adapters that the worker has, by name.
    followed has an entry for each sequence with a grammar: the refusal, if it is refused.
    """
    if request.skip:
        return AcceptedStep(grant, skip=True)
    num_tokens = sum(grant.run_token_counts)
    if num_tokens > max_step_tokens:
        raise invalid("grant.run_token_counts", f"{num_tokens} tokens", f"at most {max_step_tokens} per step")
    check_drafts(grant, max_drafts=max_drafts)
    check_adapters(grant, adapters)
    tokens: dict[int, Sequence[int]] = {}
    sampling: dict[int, RowSampling] = {}
    scored: dict[int, ScoredTokens] = {}
    runs = {seq_id: index for index, seq_id in enumerate(grant.run_sequence_ids)} if request.inputs else {}
    for entry in request.inputs:
        seq_id = entry.sequence_id
        if seq_id not in runs:
            limit = "a sequence that the grant runs, given once"
            raise invalid("inputs.sequence_id", seq_id, limit, sequence_id=seq_id)
        run = runs.pop(seq_id)
        if entry.token_ids:
            tokens[seq_id] = entry.token_ids
        if entry.HasField("sampling"):
            sampling[seq_id] = decode_sampling(
                entry, vocab_size=vocab_size, max_sequence_tokens=max_sequence_tokens, max_logprobs=max_logprobs
            )
            following = decode_following(entry, followed, max_sequence_tokens=max_sequence_tokens)
            sampling[seq_id] = replace(sampling[seq_id], following=following)
        if entry.next_token_ids or entry.HasField("prompt_logprob_count"):
            check = _InputCheck(seq_id, vocab_size)
            count = 0 if num_drafts(grant, run) else grant.run_token_counts[run]
            scored[run] = decode_scored(entry, check, count=count, max_logprobs=max_logprobs)
    check_generated(grant, sampling)
    given = match_given_tokens(grant, tokens)
    return AcceptedStep(grant, given, sampling, {run: each for run, each in scored.items() if each.next_token_ids.size})


def check_drafts(grant: grant_pb2.StepGrant, *, max_drafts: int) -> None:
    """Raises Refused (INVALID_ARGUMENT) for drafts that this worker can't verify."""
    counts, num_runs = grant.run_draft_counts, len(grant.run_sequence_ids)
    if counts and len(counts) != num_runs:
        raise invalid(
            "grant.run_draft_counts", f"{len(counts)} counts", f"empty, or {num_runs} counts as there are runs"
        )
    given = frozenset(grant.given_run_indexes)
    for run, (seq_id, count) in enumerate(zip(grant.run_sequence_ids, counts, strict=False)):
        of_sequence = f"for sequence {seq_id}"
        if not 0 <= count <= max_drafts:
            raise invalid("grant.run_draft_counts", f"{count} {of_sequence}", f"0 to {max_drafts}")
        if not count:
            continue
        if grant.run_token_counts[run] != count + 1:
            value = f"{grant.run_token_counts[run]} {of_sequence}"
            raise invalid("grant.run_token_counts", value, f"{count + 1}, the token sampled last and its drafts")
        if not grant.run_samples[run]:
            raise invalid("grant.run_samples", f"false {of_sequence}", "true, as it has drafts")
        if run not in given:
            raise invalid(
                "grant.given_run_indexes", f"without run {run} {of_sequence}", f"with run {run}: it has drafts"
            )


def num_drafts(grant: grant_pb2.StepGrant, run: int) -> int:
    """Return the number of drafts of a run."""
    return grant.run_draft_counts[run] if grant.run_draft_counts else 0


MAX_SHOWN_ADAPTERS = 8
"""Adapters that an error names."""


def check_adapters(grant: grant_pb2.StepGrant, adapters: Mapping[str, bytes]) -> None:
    """Raises Refused (INVALID_ARGUMENT) for a run with an adapter that this worker does not have."""
    numbers, num_runs = grant.run_adapters, len(grant.run_sequence_ids)
    if not numbers:
        return
    if len(numbers) != num_runs:
        raise invalid(
            "grant.run_adapters", f"{len(numbers)} numbers", f"empty, or {num_runs} numbers as there are runs"
        )
    known = frozenset(adapters.values())
    for run, (seq_id, number) in enumerate(zip(grant.run_sequence_ids, numbers, strict=True)):
        if not 0 <= number <= len(grant.adapters):
            raise invalid("grant.run_adapters", f"{number} for sequence {seq_id}", f"0 to {len(grant.adapters)}")
        if number and (identity := adapter_of(grant, run)) not in known:
            shown = sorted(adapters.items())[:MAX_SHOWN_ADAPTERS]
            names = ", ".join(f"{each.hex()} ({name})" for name, each in shown)
            limit = f"one of this worker's {len(adapters)} adapters, like {names}"
            if not names:
                limit = "empty: this worker has no adapters"
            raise invalid("adapter", identity.hex(), limit, sequence_id=seq_id)


def adapter_of(grant: grant_pb2.StepGrant, run: int) -> bytes:
    """Return the identity of a run's adapter; empty for none."""
    number = grant.run_adapters[run] if grant.run_adapters else 0
    return grant.adapters[number - 1] if number else b""


def num_given(grant: grant_pb2.StepGrant, run: int) -> int:
    """Return the number of tokens that the client gives for one of the given runs: its drafts alone, if it has some."""
    return num_drafts(grant, run) or grant.run_token_counts[run]


def match_given_tokens(grant: grant_pb2.StepGrant, tokens: dict[int, Sequence[int]]) -> dict[int, TokenArray]:
    """Token ids by run, exactly those of the plan. Raises Refused."""
    given = {}
    for position, run in enumerate(grant.given_run_indexes):
        seq_id, count = grant.run_sequence_ids[run], num_given(grant, run)
        given_ids = tokens.pop(seq_id, ())
        if len(given_ids) != count:
            value = f"{len(given_ids)} tokens for sequence {seq_id}"
            raise invalid("inputs.token_ids", value, f"{count} tokens", sequence_id=seq_id)
        ids = np.asarray(given_ids, dtype=np.int32)
        digest = sha256(ids.astype(TOKEN_DTYPE).tobytes()).digest()[:DIGEST_BYTES]
        if digest != grant.given_token_digests[position * DIGEST_BYTES : (position + 1) * DIGEST_BYTES]:
            message = f"the tokens given for sequence {seq_id} are not those of the plan"
            raise Refused(Reason.TOKENS_MISMATCH, message, sequence_id=seq_id)
        given[run] = ids
    if tokens:
        seq_id, given_ids = next(iter(tokens.items()))
        limit = "none: the run continues from the token sampled last"
        raise invalid("inputs.token_ids", f"{len(given_ids)} tokens for sequence {seq_id}", limit, sequence_id=seq_id)
    return given


def decode_sampling(
    entry: worker_service_pb2.SequenceInput, *, vocab_size: int, max_sequence_tokens: int, max_logprobs: int
) -> RowSampling:
    """Return the sampling parameters of one sequence. Raises Refused (INVALID_ARGUMENT), which names the sequence."""
    message = entry.sampling
    check = _InputCheck(entry.sequence_id, vocab_size)
    num_logprobs = message.logprob_count if message.HasField("logprob_count") else None
    if num_logprobs is not None:
        check.at_most("sampling.logprob_count", num_logprobs, max_logprobs)
    if not RANGES["min_sequence_token_count"].allows(message.min_sequence_token_count):
        limit = f"in {RANGES['min_sequence_token_count'].text}"
        raise check.refusal("sampling.min_sequence_token_count", message.min_sequence_token_count, limit)
    params = SamplingParams(
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        seed=message.seed % 2**63,
        num_logprobs=num_logprobs,
        constraints=_decode_constraints(message, check),
    )
    try:
        params.validate()
    except SamplingOutOfRange as error:
        raise check.refusal(f"sampling.{error.field}", error.value, error.limit) from None
    num_tokens = len(message.prompt_token_ids) + len(message.output_token_ids)
    if num_tokens > max_sequence_tokens:
        limit = f"at most {max_sequence_tokens} with output_token_ids, the longest sequence"
        raise check.refusal("sampling.prompt_token_ids", f"{num_tokens} tokens", limit)
    return RowSampling(
        params,
        prompt_token_ids=check.tokens("sampling.prompt_token_ids", message.prompt_token_ids),
        output_token_ids=check.tokens("sampling.output_token_ids", message.output_token_ids),
        last_token_ids=check.tokens("sampling.last_token_ids", message.last_token_ids, most=NUM_REMEMBERED),
    )


@dataclass(frozen=True, slots=True)
class _InputCheck:
    """Checks of one sequence's input; each refusal names the sequence."""

    seq_id: int
    vocab_size: int

    def refusal(self, field: str, value: object, limit: str) -> Refused:
        return invalid(field, value, limit, sequence_id=self.seq_id)

    def at_most(self, field: str, value: int, most: int, *, least: int = 0, unit: str = "") -> None:
        if not least <= value <= most:
            raise self.refusal(field, f"{value}{unit}", f"{least} to {most}{unit}")

    def tokens(self, field: str, token_ids: Sequence[int], *, most: int | None = None) -> TokenArray:
        """The token ids, all of them in the vocabulary; most None: as many as may come."""
        if most is not None:
            self.at_most(field, len(token_ids), most, unit=" tokens")
        ids = np.asarray(token_ids, dtype=np.int32)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise self.refusal(field, "a token out of range", f"0 to {self.vocab_size - 1}")
        return ids


def decode_scored(
    entry: worker_service_pb2.SequenceInput, check: _InputCheck, *, count: int, max_logprobs: int
) -> ScoredTokens:
    """Return the prompt tokens of a run of `count` tokens to score. Raises Refused (INVALID_ARGUMENT)."""
    check.at_most("inputs.prompt_logprob_count", entry.prompt_logprob_count, max_logprobs)
    most = count if entry.HasField("prompt_logprob_count") else 0
    next_token_ids = check.tokens("inputs.next_token_ids", entry.next_token_ids, most=most)
    return ScoredTokens(next_token_ids, entry.prompt_logprob_count)


def _decode_constraints(message: worker_service_pb2.SamplingParameters, check: _InputCheck) -> Constraints | None:
    """Return the forbidden tokens and biases of the parameters; None for none."""
    most = check.vocab_size
    allowed = check.tokens("sampling.allowed_token_ids", message.allowed_token_ids, most=most)
    ends = check.tokens("sampling.end_token_ids", message.end_token_ids, most=most)
    check.at_most("sampling.bad_words", len(message.bad_words), MAX_BAD_WORDS, unit=" sequences")
    for word in message.bad_words:
        check.at_most("sampling.bad_words", len(word.token_ids), MAX_BAD_WORD_TOKENS, least=1, unit=" tokens")
        check.tokens("sampling.bad_words", word.token_ids)
    words = [tuple(word.token_ids) for word in message.bad_words]
    constraints = Constraints(
        allowed_token_ids=allowed.astype(np.int64),
        bad_words=tuple(dict.fromkeys(words)),
        min_seq_tokens=message.min_sequence_token_count,
        end_token_ids=np.unique(ends.astype(np.int64)),
        logit_bias=_decode_bias(message.logit_bias, check),
    )
    if constraints.is_empty:
        return None
    is_left = leaves_token(
        check.vocab_size,
        allowed_token_ids=message.allowed_token_ids,
        bad_words=words,
        end_token_ids=message.end_token_ids if message.min_sequence_token_count else (),
    )
    if not is_left:
        field = next(name for name in ("allowed_token_ids", "bad_words", "end_token_ids") if getattr(message, name))
        raise check.refusal(f"sampling.{field}", "no token that can be chosen", "at least one that can")
    return constraints


def _decode_bias(bias: Mapping[int, float], check: _InputCheck) -> dict[int, float]:
    check.at_most("sampling.logit_bias", len(bias), MAX_LOGIT_BIASES, unit=" tokens")
    check.tokens("sampling.logit_bias", list(bias))
    for value in bias.values():
        if not LOGIT_BIAS.allows(value):
            raise check.refusal("sampling.logit_bias", value, f"in {LOGIT_BIAS.text}")
    return {token_id: value for token_id, value in bias.items() if value}


def decode_grammar(message: worker_service_pb2.Grammar) -> Grammar:
    """Return a grammar as it is compiled. Raises GrammarRefused if it is none."""
    kind = message.WhichOneof("grammar")
    if kind is None or (kind == "json_object" and not message.json_object):
        raise GrammarRefused("exactly one kind of grammar must be set")
    if kind == "json_object":
        return Grammar(kind, "")
    if kind != "choice":
        return Grammar(kind, getattr(message, kind))
    texts = list(message.choice.texts)
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise GrammarRefused(f"it has {len(texts)} texts, 1 to {MAX_CHOICES} are needed")
    return Grammar(kind, json.dumps(texts, ensure_ascii=False))


def decode_generated(
    request: worker_service_pb2.CheckGrammarRequest, *, vocab_size: int, max_sequence_tokens: int
) -> list[int]:
    """Return the generated tokens that a grammar is checked with. Raises Refused (INVALID_ARGUMENT)."""
    field, tokens = "output_token_ids", list(request.output_token_ids)
    if len(tokens) > max_sequence_tokens:
        raise invalid(field, f"{len(tokens)} tokens", f"at most {max_sequence_tokens} tokens, the longest sequence")
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise invalid(field, token, f"0 to {vocab_size - 1}")
    return tokens


def refuse_grammar(
    field: str, message: worker_service_pb2.Grammar, error: GrammarRefused, **metadata: object
) -> Refused:
    """Return the refusal of a grammar: INVALID_ARGUMENT, with the reason why it can't be used as the limit."""
    kind = message.WhichOneof("grammar") or "none"
    value = f"{kind} of {message.ByteSize()} bytes"
    text = f"{field} is a {kind} that can't be used: {error}"
    return Refused(Reason.INVALID_ARGUMENT, text, field=field, value=value, limit=str(error), **metadata)


def decode_following(
    entry: worker_service_pb2.SequenceInput,
    followed: Mapping[int, Following | Refused],
    *,
    max_sequence_tokens: int,
) -> Following | None:
    """Return the grammar that a sequence follows from now on, None if none. Raises Refused, naming the sequence."""
    message, seq_id = entry.sampling, entry.sequence_id
    least, most = (1, max_sequence_tokens) if message.HasField("grammar") else (0, 0)
    if not least <= message.output_begins_at <= most:
        limit = f"{least} to {most}" if most else "0 without a grammar"
        raise invalid("sampling.output_begins_at", message.output_begins_at, limit, sequence_id=seq_id)
    if not most:
        return None
    for name in ("allowed_token_ids", "bad_words", "min_sequence_token_count"):
        if getattr(message, name):
            limit = "unset with a grammar: together they could leave no token to choose"
            raise invalid(f"sampling.{name}", "set", limit, sequence_id=seq_id)
    following = followed[seq_id]
    if isinstance(following, Refused):
        raise following
    return following


def check_generated(grant: grant_pb2.StepGrant, sampling: Mapping[int, RowSampling]) -> None:
    """Raises Refused if a sequence with a grammar runs beyond the generated tokens that the worker has."""
    if not any(row.following for row in sampling.values()):
        return
    for seq_id, start in zip(grant.run_sequence_ids, grant.run_starts, strict=True):
        row = sampling.get(seq_id)
        if row is None or row.following is None:
            continue
        num_needed = start - row.following.begins_at
        if num_needed > len(row.following.tokens):
            value, limit = f"{len(row.following.tokens)} tokens", f"at least {num_needed}, all before the run"
            raise invalid("sampling.output_token_ids", value, limit, sequence_id=seq_id)
