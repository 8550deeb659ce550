"""Between the scheduler's values and the contract's messages. Per running sequence only packed integers."""

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from google.protobuf import duration_pb2

from quire.cache.v1 import attach_pb2, cache_service_pb2, grant_pb2
from quire.cache.v1.layer_spans import LayerGroupKind
from quire.client.channel import decode_error
from quire.client.engine.caching import (
    NO_CACHE_PARAMS,
    Breakpoint,
    CacheOutcome,
    CacheUse,
    Miss,
    MissReason,
    Retention,
)
from quire.client.engine.grammar import Grammar
from quire.client.engine.scheduling.faults import RequestFault
from quire.client.engine.scheduling.layer_groups import LayerGroup
from quire.client.engine.scheduling.plans import (
    DEFAULT_EXPECTED_PROMPTS,
    Admission,
    Blocks,
    ExpectedPrompt,
    GrantedStep,
    Plan,
    PlanItem,
    Refusal,
    SchedulerLimits,
    StepInFlight,
)
from quire.client.engine.scheduling.sequence import Sequence
from quire.client.engine.scheduling.tier import HostCopyUse
from quire.client.errors import ProtocolViolation
from quire.compute.v1 import worker_service_pb2
from quire.compute.v1.sampling_ranges import MAX_BAD_WORD_TOKENS

_ITEMS = {
    cache_service_pb2.PLAN_ITEM_OFFLOAD: PlanItem.OFFLOAD,
    cache_service_pb2.PLAN_ITEM_RESTORE: PlanItem.RESTORE,
    cache_service_pb2.PLAN_ITEM_TRIM: PlanItem.TRIM,
    cache_service_pb2.PLAN_ITEM_FORK: PlanItem.FORK,
    cache_service_pb2.PLAN_ITEM_EXTEND: PlanItem.EXTEND,
    cache_service_pb2.PLAN_ITEM_ADMISSION: PlanItem.ADMISSION,
}

_CACHE_USES = {
    CacheUse.READ_AND_WRITE: cache_service_pb2.CACHE_USE_READ_AND_WRITE,
    CacheUse.WRITE_ONLY: cache_service_pb2.CACHE_USE_WRITE_ONLY,
    CacheUse.NONE: cache_service_pb2.CACHE_USE_NONE,
}

_HOST_COPY_USES = {
    HostCopyUse.THERE_AND_BACK: cache_service_pb2.HOST_COPY_USE_UNSPECIFIED,  # the default, so that it takes no bytes
    HostCopyUse.BACK: cache_service_pb2.HOST_COPY_USE_BACK,
    HostCopyUse.NONE: cache_service_pb2.HOST_COPY_USE_NONE,
}

_MISS_REASONS = {
    cache_service_pb2.MISS_REASON_NEVER_COMPUTED: MissReason.NEVER_COMPUTED,
    cache_service_pb2.MISS_REASON_UNKNOWN: MissReason.UNKNOWN,
    cache_service_pb2.MISS_REASON_BEING_COMPUTED: MissReason.BEING_COMPUTED,
    cache_service_pb2.MISS_REASON_EVICTED: MissReason.EVICTED,
    cache_service_pb2.MISS_REASON_WINDOW_EVICTED: MissReason.WINDOW_EVICTED,
    cache_service_pb2.MISS_REASON_RESET: MissReason.RESET,
    cache_service_pb2.MISS_REASON_OTHER_SALT: MissReason.OTHER_SALT,
    cache_service_pb2.MISS_REASON_OTHER_ADAPTER: MissReason.OTHER_ADAPTER,
}

_LAYER_GROUP_KINDS = {
    attach_pb2.LAYER_GROUP_KIND_FULL: LayerGroupKind.FULL,
    attach_pb2.LAYER_GROUP_KIND_SLIDING: LayerGroupKind.SLIDING,
    attach_pb2.LAYER_GROUP_KIND_CHUNKED: LayerGroupKind.CHUNKED,
}


def limits_of(
    geometry: attach_pb2.PoolGeometry,
    *,
    max_step_tokens: int,
    max_running_sequences: int,
    max_sampled_tokens: int | None = None,
    max_expected_prompts: int = DEFAULT_EXPECTED_PROMPTS,
) -> SchedulerLimits:
    """The limits of a pool, within those of the configuration.

    Raises ProtocolViolation if a layer group has a kind that the contract does not have.
    """
    return SchedulerLimits(
        max_step_tokens=max_step_tokens,
        max_running_sequences=min(max_running_sequences, geometry.max_sequence_count),
        max_expected_prompts=max_expected_prompts,
        block_size=geometry.block_size_tokens,
        num_blocks=geometry.block_count - 1,
        max_sequence_tokens=geometry.max_sequence_tokens,
        vocabulary_size=geometry.vocabulary_size,
        num_host_blocks=geometry.host_block_count,
        block_bytes=geometry.block_bytes,
        max_draft_count=geometry.max_draft_count,
        max_sampled_tokens=max_sampled_tokens,
        has_recurrent_state=geometry.has_recurrent_state,
        layer_groups=tuple(map(_decode_layer_group, geometry.layer_groups)),
    )


def _decode_layer_group(group: attach_pb2.LayerGroup) -> LayerGroup:
    kind = _LAYER_GROUP_KINDS.get(group.kind)
    if kind is None or (kind is not LayerGroupKind.FULL and group.window_token_count < 1):
        raise ProtocolViolation(f"a layer group of kind {group.kind} with a window of {group.window_token_count}")
    return LayerGroup(kind, group.window_token_count if kind is not LayerGroupKind.FULL else 0)


def encode_plan(plan: Plan, *, lease_id: str, epoch: int, request_id: str) -> cache_service_pb2.PlanStepRequest:
    """A plan as a request. Raises RequestFault for a sequence with a value that the contract can't carry."""
    return cache_service_pb2.PlanStepRequest(
        lease_id=lease_id,
        epoch=epoch,
        request_id=request_id,
        release_sequence_ids=plan.release_ids,
        return_hints=[_encode_hint(seq_id, seconds) for seq_id, seconds in plan.expected_back_s.items()],
        offload_sequence_ids=plan.offload_ids,
        expected_prompts=_encode_expected(plan),
        trim_sequence_ids=plan.trims.keys(),
        trim_token_counts=plan.trims.values(),
        forks=[
            cache_service_pb2.Fork(
                parent_sequence_id=fork.parent_id, child_sequence_ids=fork.child_ids, token_count=fork.num_tokens
            )
            for fork in plan.forks
        ],
        extends=_encode_extends(plan),
        restores=[cache_service_pb2.Restore(sequence_id=seq_id) for seq_id in plan.restore_ids],
        admissions=_encode_admissions(plan),
        admission_token_budget=plan.admission_token_budget,
        admission_reserve_block_count=plan.admission_reserve_blocks,
        host_copy_use=_HOST_COPY_USES[plan.host_copy_use],
        skips_disk=plan.skips_disk,
    )


def _encode_extends(plan: Plan) -> cache_service_pb2.Extends:
    message = cache_service_pb2.Extends(sequence_ids=plan.extend_ids, token_counts=plan.extend_counts)
    if plan.appended:
        for seq_id in plan.extend_ids:
            token_ids = plan.appended.get(seq_id, ())
            message.append_token_counts.append(len(token_ids))
            message.append_token_ids.extend(token_ids)
    if plan.drafts:
        for seq_id in plan.extend_ids:
            drafts = plan.drafts.get(seq_id, ())
            message.draft_token_counts.append(len(drafts))
            message.draft_token_ids.extend(drafts)
    return message


def _encode_admissions(plan: Plan) -> Iterator[cache_service_pb2.Admission]:
    for admission in plan.admissions:
        try:
            yield _encode_admission(admission)
        except Exception as error:
            raise RequestFault(plan.sequences[admission.seq_id]) from error


def _encode_expected(plan: Plan) -> Iterator[cache_service_pb2.ExpectedPrompt]:
    for sequence, prompt in plan.expected.items():
        try:
            yield _encode_expected_prompt(prompt)
        except Exception as error:
            raise RequestFault(sequence) from error


def _encode_admission(admission: Admission) -> cache_service_pb2.Admission:
    message = cache_service_pb2.Admission(
        sequence_id=admission.seq_id,
        token_ids=admission.token_ids,
        resumed=admission.resumed,
        waits_for_prefix=admission.waits_for_prefix,
    )
    if admission.tenant:
        message.tenant = admission.tenant
    cache = admission.cache
    if cache is not NO_CACHE_PARAMS:
        message.salt = cache.salt
        message.adapter = cache.adapter
        message.cache_use = _CACHE_USES[cache.cache_use]
        message.reserved_token_count = admission.reserved_tokens
        message.retention.extend(map(_encode_retention, cache.retention))
        message.breakpoints.extend(map(_encode_breakpoint, cache.breakpoints))
        message.explains_miss = cache.explain_miss and not admission.resumed
    return message


def _encode_breakpoint(end: Breakpoint) -> cache_service_pb2.Breakpoint:
    return cache_service_pb2.Breakpoint(token_count=end.num_tokens, ttl=_duration_of(end.ttl_s))


def _encode_retention(part: Retention) -> cache_service_pb2.Retention:
    ttl = None if part.ttl_s is None else _duration_of(part.ttl_s)
    return cache_service_pb2.Retention(token_count=part.num_tokens, priority=part.priority, ttl=ttl)


def _encode_hint(seq_id: int, expected_back_s: float) -> cache_service_pb2.ReturnHint:
    if expected_back_s == math.inf:
        return cache_service_pb2.ReturnHint(sequence_id=seq_id, not_expected=True)
    return cache_service_pb2.ReturnHint(sequence_id=seq_id, expected_in=_duration_of(expected_back_s))


def _encode_expected_prompt(prompt: ExpectedPrompt) -> cache_service_pb2.ExpectedPrompt:
    return cache_service_pb2.ExpectedPrompt(
        token_ids=prompt.token_ids,
        salt=prompt.salt,
        adapter=prompt.adapter,
        tenant=prompt.tenant or None,
        expected_in=_duration_of(prompt.expected_in_s),
    )


def _duration_of(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def decode_granted_step(response: cache_service_pb2.PlanStepResponse, *, pool: str = "", epoch: int = 0) -> GrantedStep:
    """The answer of a pool to a plan. Raises ProtocolViolation if lists that belong together differ in length."""
    counts = response.block_counts
    granted = GrantedStep(
        step_number=response.step_number,
        run_ids=list(response.run_sequence_ids),
        run_starts=list(response.run_starts),
        run_counts=list(response.run_token_counts),
        given_run_indexes=list(response.given_run_indexes),
        refusals=[_decode_refusal(refusal) for refusal in response.refusals],
        admitted_ids=list(response.admitted_sequence_ids),
        outcomes=_decode_outcomes(response, pool, epoch) if response.admitted_sequence_ids else (),
        blocks=Blocks(
            free=counts.free_count,
            cached=counts.cached_count,
            active=counts.active_count,
            retired=counts.retired_count,
        ),
        restored_ids=list(response.restored_sequence_ids),
        restored_counts=list(response.restored_token_counts),
        num_free_host_blocks=response.host_block_counts.free_count + response.host_block_counts.cached_count,
    )
    if not len(granted.run_ids) == len(granted.run_starts) == len(granted.run_counts):
        raise ProtocolViolation("the runs of a plan differ in length")
    if len(granted.restored_ids) != len(granted.restored_counts):
        raise ProtocolViolation("the restores of a plan differ in length")
    return granted


def _decode_outcomes(response: cache_service_pb2.PlanStepResponse, pool: str, epoch: int) -> list[CacheOutcome]:
    ids, cached = response.admitted_sequence_ids, response.admitted_cached_token_counts
    # An older cachemgr does not tell of tokens that are written, and keeps none.
    written = response.admitted_written_token_counts or [0] * len(ids)
    kept = response.admitted_kept_token_counts or [0] * len(ids)
    if not len(ids) == len(cached) == len(written) == len(kept):
        raise ProtocolViolation("the admissions of a plan differ in length")
    misses = {miss.sequence_id: _decode_miss(miss) for miss in response.admitted_misses}
    return [
        CacheOutcome(num_cached, num_written, num_kept, misses.get(seq_id), pool, epoch)
        for seq_id, num_cached, num_written, num_kept in zip(ids, cached, written, kept, strict=True)
    ]


def _decode_miss(miss: cache_service_pb2.AdmissionMiss) -> Miss:
    reason = _MISS_REASONS.get(miss.reason, MissReason.UNKNOWN)  # a newer cachemgr may have more reasons
    lost_at_s = miss.lost_time.ToNanoseconds() / 1e9 if miss.HasField("lost_time") else None
    evicted_by = miss.evicted_by_tenant if miss.HasField("evicted_by_tenant") else None
    reset_by = miss.reset_by if miss.HasField("reset_by") else None
    return Miss(miss.missing_block_index, reason, lost_at_s, evicted_by, reset_by)


def _decode_refusal(refusal: cache_service_pb2.Refusal) -> Refusal:
    item = _ITEMS.get(refusal.item)
    if item is None:
        raise ProtocolViolation("an item was refused that was not asked for")
    return Refusal(item, refusal.sequence_id, decode_error(refusal.error))


def encode_step(
    step: StepInFlight, grant: grant_pb2.SignedGrant, *, skip: bool = False
) -> worker_service_pb2.RunStepRequest:
    """A step as a request: the grant untouched, tokens and parameters only of those that need them.

    A step without runs, or one to skip, is sent to be skipped, so that step numbers have no holes. Raises RequestFault
    for a sequence with a value that the contract can't carry.
    """
    if skip or not step.seq_ids:
        return worker_service_pb2.RunStepRequest(grant=grant, skip=True)
    inputs = {index: worker_service_pb2.SequenceInput(sequence_id=step.seq_ids[index]) for index in step.given}
    for index in step.introduced:
        if index not in inputs:
            inputs[index] = worker_service_pb2.SequenceInput(sequence_id=step.seq_ids[index])
    introduced = frozenset(step.introduced)
    given = frozenset(step.given)
    for index, message in inputs.items():
        sequence = step.sequences[index]
        try:
            if (drafts := step.drafts.get(step.seq_ids[index])) is not None:
                message.token_ids.extend(drafts)
            elif index in given:
                _put_tokens(message, sequence, step.starts[index], step.counts[index])
            if index in introduced:
                message.sampling.CopyFrom(_encode_sampling(sequence))
        except Exception as error:
            raise RequestFault(sequence) from error
    return worker_service_pb2.RunStepRequest(grant=grant, inputs=inputs.values())


def _put_tokens(message: worker_service_pb2.SequenceInput, sequence: Sequence, start: int, count: int) -> None:
    message.token_ids.extend(sequence.token_ids[start : start + count])
    logprobs = sequence.prompt_logprobs
    if logprobs is not None and (next_token_ids := logprobs.missing_after(start, count)):
        message.prompt_logprob_count = logprobs.num_top
        message.next_token_ids.extend(next_token_ids)


def _encode_sampling(sequence: Sequence) -> worker_service_pb2.SamplingParameters:
    params = sequence.params
    message = worker_service_pb2.SamplingParameters(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=sequence.seed,
        logprob_count=params.logprobs,
        logit_bias=dict(params.logit_bias),
        allowed_token_ids=params.allowed_token_ids,
    )
    if params.has_penalty:  # it needs only whether a token occurred, or how often it was generated
        outputs = sequence.output_token_ids
        message.prompt_token_ids.extend(sorted(set(sequence.token_ids[: sequence.num_prompt_tokens])))
        is_exact = params.frequency_penalty or params.grammar is not None
        message.output_token_ids.extend(outputs if is_exact else sorted(set(outputs)))
    if params.bad_words:
        words = (worker_service_pb2.TokenSequence(token_ids=word) for word in params.bad_word_ids)
        message.bad_words.extend(words)
        message.last_token_ids.extend(sequence.token_ids[1 - MAX_BAD_WORD_TOKENS :])
    if params.min_tokens and sequence.end_token_ids:
        message.min_sequence_token_count = sequence.num_prompt_tokens + params.min_tokens
        message.end_token_ids.extend(sorted(sequence.end_token_ids))
    if params.grammar is not None:
        message.grammar.CopyFrom(encode_grammar(params.grammar))
        message.output_begins_at = sequence.num_prompt_tokens
        if not params.has_penalty:
            message.output_token_ids.extend(sequence.output_token_ids)
    return message


def encode_grammar(grammar: Grammar) -> worker_service_pb2.Grammar:
    """A grammar as a message."""
    if grammar.choice is not None:
        return worker_service_pb2.Grammar(choice=worker_service_pb2.GrammarChoice(texts=grammar.choice))
    given: dict[str, Any] = {field.name: getattr(grammar, field.name) for field in fields(grammar)}
    return worker_service_pb2.Grammar(**{name: value for name, value in given.items() if value is not None})
