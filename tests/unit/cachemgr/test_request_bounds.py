"""Every list, every bytes and every string of every request has a bound, which is reached before its content is read.

A new field of this kind fails the first test until it is in one of the tables: with a request beyond its bound, or with
the reason for which a string needs none of its own.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from planning import decode_plan

from quire.cache.v1 import admission_bounds, attach_pb2, cache_service_pb2, grant_pb2
from quire.cachemgr import _core
from quire.cachemgr._core import Ledger, StepReport
from quire.cachemgr.errors import CallRefused
from quire.cachemgr.service import messages
from quire.compute.v1 import worker_service_pb2
from quire.compute.v1.sampling_ranges import MAX_CHOICES, MAX_GRAMMAR_BYTES
from quire.worker.grant.decoding import (
    decode_generated,
    decode_grammar,
    decode_step,
    max_grant_bytes,
    refuse_grammar,
)
from quire.worker.grant.errors import Refused
from quire.worker.grant.gate import MAX_UNSIGNED_BYTES, Gate
from quire.worker.sampling.grammars import GrammarRefused
from quire.worker.service.adapter_loading import MAX_PATH_LENGTH, check_name, check_path
from quire.worker.service.servicer import MAX_CHECKSUM_BLOCKS, check_block_ids

SERVICES = cache_service_pb2.DESCRIPTOR, worker_service_pb2.DESCRIPTOR
WIRE_GEOMETRY: dict[str, Any] = {
    "block_size_tokens": 4,
    "block_count": 9,
    "block_bytes": 1,
    "max_sequence_count": 6,
    "max_sequence_tokens": 24,
    "vocabulary_size": 100,
}
GEOMETRY = messages.decode_geometry(attach_pb2.PoolGeometry(**WIRE_GEOMETRY))
NUM_TOO_MANY = 7
"""Sequences."""
TOO_LONG = [1] * 25
"""A sequence."""
GRANT = grant_pb2.StepGrant(
    pool="p",
    epoch=1,
    run_sequence_ids=[1],
    run_starts=[0],
    run_token_counts=[2],
    given_run_indexes=[0],
    given_token_digests=bytes(16),
)

Beyond = tuple[Callable[[], object], str]
"""A reader of a request with one entry too many, and the field that the refusal names."""


# -- cachemgr -----------------------------------------------------------------------------------------------------


def plan(named: str = "", **fields: Any) -> Beyond:
    request = cache_service_pb2.PlanStepRequest(**fields)
    return lambda: decode_plan(request, GEOMETRY), named or next(iter(fields))


def extends(named: str, **fields: Any) -> Beyond:
    return plan(f"extends.{named}", extends=fields)


def admission(named: str, **fields: Any) -> Beyond:
    return plan(f"admissions.{named}", admissions=[fields])


def expected(named: str, **fields: Any) -> Beyond:
    return plan(f"expected_prompts.{named}", expected_prompts=[fields])


def prefix(**fields: Any) -> Beyond:
    values = {"token_ids": [1], "salt": b"", "adapter": b""} | fields
    return lambda: messages.decode_prefix(**values, pools=[GEOMETRY]), next(iter(fields))


def reset(**fields: Any) -> Beyond:
    request = cache_service_pb2.ResetPrefixCacheRequest(**fields)
    return lambda: messages.decode_reset_scope(request, GEOMETRY), next(iter(fields))


def registration(named: str, **fields: Any) -> Beyond:
    values = {"pool": "p", "epoch": 1, "geometry": WIRE_GEOMETRY} | fields
    request = attach_pb2.RegisterPool(**values)
    field = named if named.startswith("geometry.") else f"register_pool.{named}"
    return lambda: messages.decode_registration(request), field


def kept_memory(named: str, **fields: Any) -> Beyond:
    values = {"epoch": 2, "attached_term": 1} | fields
    return registration(f"kept_memory.{named}", memory_id="m", kept_memory=values)


def pool_adapters(named: str, *adapters: dict[str, Any]) -> Beyond:
    return registration(named, adapters={"adapters": adapters})


def report(named: str = "", **fields: Any) -> Beyond:
    request = attach_pb2.StepReport(outcome=attach_pb2.STEP_OUTCOME_COMPUTED, **fields)
    ledger, field = Ledger("p", 1, GEOMETRY), named or next(iter(fields))
    return lambda: ledger.settle(StepReport(request.SerializeToString())), f"step_report.{field}"


def disk_report(field: str) -> Beyond:
    request = attach_pb2.DiskReport(**{field: [1] * (messages.MAX_DISK_ORDERS + 1)})
    return lambda: messages.disk_report(request), f"disk_report.{field}"


def disk_content(named: str, **fields: Any) -> Beyond:
    """Of one copy, unless the fields say otherwise."""
    copy: dict[str, Any] = {"disk_block_ids": [0], "prefix_hashes": bytes(32), "tenants": [""], "tenant_indexes": [0]}
    request = attach_pb2.DiskContent(**copy | fields)
    sizes = attach_pb2.PoolGeometry(**WIRE_GEOMETRY, host_block_count=1, host_cached_block_limit=1, disk_block_count=1)
    ledger = Ledger("p", 1, messages.decode_geometry(sizes))
    return lambda: ledger.enter_disk_content(messages.disk_content(request)), f"disk_content.{named}"


# -- the worker ---------------------------------------------------------------------------------------------------


def step(named: str, *inputs: dict[str, Any]) -> Beyond:
    request = worker_service_pb2.RunStepRequest(inputs=inputs)
    limits = {"vocab_size": 100, "max_sequence_tokens": 24, "max_step_tokens": 8, "max_logprobs": 5}
    return lambda: decode_step(request, GRANT, **limits), named


def sampling(named: str, **fields: Any) -> Beyond:
    return step(f"sampling.{named}", {"sequence_id": 1, "sampling": fields})


def large_grant(size: int) -> Beyond:
    gate = Gate("p", 1)
    signed = grant_pb2.SignedGrant(grant=bytes(size))
    max_bytes = max_grant_bytes(attach_pb2.PoolGeometry(**WIRE_GEOMETRY))
    return lambda: gate.check_unread(signed, max_bytes=max_bytes), "grant.grant"


def generated(**fields: Any) -> Beyond:
    request = worker_service_pb2.CheckGrammarRequest(**fields)
    return lambda: decode_generated(request, vocab_size=100, max_sequence_tokens=24), "output_token_ids"


def grammar(**fields: Any) -> Beyond:
    message = worker_service_pb2.Grammar(**fields)

    def decode() -> None:
        try:
            decode_grammar(message).check()
        except GrammarRefused as error:
            raise refuse_grammar("grammar", message, error) from None

    return decode, "grammar"


IDS = range(NUM_TOO_MANY)
LONG_TEXT = "x" * (MAX_GRAMMAR_BYTES + 1)
LISTS: dict[str, Beyond] = {
    "PlanStepRequest.release_sequence_ids": plan(release_sequence_ids=IDS),
    "PlanStepRequest.return_hints": plan(return_hints=[{}] * NUM_TOO_MANY),
    "PlanStepRequest.offload_sequence_ids": plan(offload_sequence_ids=IDS),
    "PlanStepRequest.expected_prompts": plan(expected_prompts=[{}] * NUM_TOO_MANY),
    "PlanStepRequest.trim_sequence_ids": plan(trim_sequence_ids=IDS),
    "PlanStepRequest.trim_token_counts": plan("trim_token_counts", trim_sequence_ids=[1], trim_token_counts=[1, 1]),
    "PlanStepRequest.forks": plan(forks=[{}] * NUM_TOO_MANY),
    "PlanStepRequest.restores": plan(restores=[{}] * NUM_TOO_MANY),
    "PlanStepRequest.admissions": plan(admissions=[{}] * NUM_TOO_MANY),
    "Fork.child_sequence_ids": plan("forks.child_sequence_ids", forks=[{"child_sequence_ids": IDS}]),
    "Extends.sequence_ids": extends("sequence_ids", sequence_ids=IDS),
    "Extends.token_counts": extends("token_counts", token_counts=IDS),
    "Extends.append_token_counts": extends("append_token_counts", sequence_ids=[1], append_token_counts=[0, 0]),
    "Extends.append_token_ids": extends("append_token_ids", append_token_ids=[1] * (_core.MAX_PLAN_TOKENS + 1)),
    "Extends.draft_token_counts": extends("draft_token_counts", sequence_ids=[1], draft_token_counts=[0, 0]),
    "Extends.draft_token_ids": extends(
        "draft_token_counts", sequence_ids=[1], token_counts=[1], draft_token_counts=[0], draft_token_ids=[1]
    ),
    "Admission.token_ids": admission("token_ids", token_ids=[1] * (_core.MAX_PLAN_TOKENS + 1)),
    "Admission.salt": admission("salt", salt=bytes(65)),
    "Admission.adapter": admission("adapter", adapter=bytes(33)),
    "Admission.retention": admission("retention", retention=[{"token_count": 1, "priority": 1}] * 17),
    "Admission.breakpoints": admission("breakpoints", breakpoints=[{"token_count": 1, "ttl": {"seconds": 1}}] * 5),
    "ExpectedPrompt.token_ids": expected("token_ids", token_ids=[1] * (_core.MAX_PLAN_TOKENS + 1)),
    "ExpectedPrompt.salt": expected("salt", salt=bytes(65)),
    "ExpectedPrompt.adapter": expected("adapter", adapter=bytes(31)),
    "LookupPrefixRequest.token_ids": prefix(token_ids=TOO_LONG),
    "LookupPrefixRequest.salt": prefix(salt=bytes(65)),
    "LookupPrefixRequest.adapter": prefix(adapter=bytes(33)),
    "ExplainPrefixRequest.token_ids": prefix(token_ids=TOO_LONG),
    "ExplainPrefixRequest.salt": prefix(salt=bytes(65)),
    "ExplainPrefixRequest.adapter": prefix(adapter=bytes(33)),
    "PinPrefixRequest.token_ids": prefix(token_ids=TOO_LONG),
    "PinPrefixRequest.salt": prefix(salt=bytes(65)),
    "PinPrefixRequest.adapter": prefix(adapter=bytes(33)),
    "ResetPrefixCacheRequest.token_ids": reset(token_ids=TOO_LONG),
    "ResetPrefixCacheRequest.salt": reset(salt=bytes(65)),
    "ResetPrefixCacheRequest.adapter": reset(adapter=bytes(33)),
    "RegisterPool.open_leases": registration("open_leases", open_leases=[{}] * (messages.MAX_OPEN_LEASES + 1)),
    "PoolGeometry.layer_groups": registration(
        "geometry.layer_groups",
        geometry=WIRE_GEOMETRY | {"layer_groups": [{"kind": 1, "layer_count": 1}] * (_core.MAX_LAYER_GROUPS + 1)},
    ),
    "RegisterPool.pool": registration("pool", pool="x" * 129),
    "RegisterPool.memory_id": registration("memory_id", memory_id="x" * 65),
    "KeptMemory.whole_blocks": kept_memory("whole_blocks", whole_blocks=bytes(WIRE_GEOMETRY["block_count"] // 8 + 2)),
    "PoolAdapters.adapters": pool_adapters("adapters", *[{}] * (admission_bounds.MAX_ADAPTERS + 1)),
    "PoolAdapter.name": pool_adapters("adapters.name", {"name": "x" * 129, "identity": bytes(32)}),
    "PoolAdapter.identity": pool_adapters("adapters.identity", {"name": "x", "identity": bytes(33)}),
    "RegisterPool.worker_address": registration("worker_address", worker_address="x" * 1_025),
    "PoolGeometry.model": registration("geometry.model", geometry=WIRE_GEOMETRY | {"model": "x" * 1_025}),
    "PoolGeometry.model_fingerprint": registration(
        "geometry.model_fingerprint", geometry=WIRE_GEOMETRY | {"model_fingerprint": "x" * 1_025}
    ),
    "DiskReport.done_order_numbers": disk_report("done_order_numbers"),
    "DiskReport.failed_order_numbers": disk_report("failed_order_numbers"),
    "DiskContent.disk_block_ids": disk_content("disk_block_ids", disk_block_ids=range(8_193)),
    "DiskContent.prefix_hashes": disk_content("prefix_hashes", prefix_hashes=bytes(64)),
    "DiskContent.tenants": disk_content("tenants", tenants=["", "acme"]),
    "DiskContent.tenant_indexes": disk_content("tenant_indexes", tenant_indexes=[0, 0]),
    "DiskContent.layer_groups": disk_content("layer_groups", layer_groups=[0, 0]),
    "StepReport.sequence_ids": report(sequence_ids=range(2 * NUM_TOO_MANY)),
    "StepReport.computed_token_counts": report(computed_token_counts=[1]),
    "StepReport.sampled_sequence_ids": report(sampled_sequence_ids=range(2 * NUM_TOO_MANY)),
    "StepReport.sampled_token_ids": report(sampled_token_ids=[1]),
    "StepReport.sampled_token_counts": report(sampled_token_counts=[1]),
    "SignedGrant.grant": large_grant(MAX_UNSIGNED_BYTES + 1),
    "RunStepRequest.inputs": step("inputs.sequence_id", {"sequence_id": 1}, {"sequence_id": 1}),
    "SequenceInput.token_ids": step("inputs.token_ids", {"sequence_id": 1, "token_ids": [1, 2, 3]}),
    "SamplingParameters.prompt_token_ids": step(
        "sampling.prompt_token_ids", {"sequence_id": 1, "sampling": {"prompt_token_ids": TOO_LONG}}
    ),
    "SamplingParameters.output_token_ids": step(
        "sampling.prompt_token_ids", {"sequence_id": 1, "sampling": {"output_token_ids": TOO_LONG}}
    ),
    "SamplingParameters.logit_bias": sampling("logit_bias", logit_bias=dict.fromkeys(range(1_025), 1.0)),
    "SamplingParameters.allowed_token_ids": sampling("allowed_token_ids", allowed_token_ids=[1] * 101),
    "SamplingParameters.bad_words": sampling("bad_words", bad_words=[{"token_ids": [1]}] * 1_025),
    "TokenSequence.token_ids": sampling("bad_words", bad_words=[{"token_ids": [1] * 17}]),
    "SamplingParameters.last_token_ids": sampling("last_token_ids", last_token_ids=[1] * 16),
    "SamplingParameters.end_token_ids": sampling("end_token_ids", end_token_ids=[1] * 101),
    "SequenceInput.next_token_ids": step(
        "inputs.next_token_ids", {"sequence_id": 1, "prompt_logprob_count": 0, "next_token_ids": [1, 2, 3]}
    ),
    "CheckGrammarRequest.output_token_ids": generated(output_token_ids=TOO_LONG),
    "Grammar.json_schema": grammar(json_schema=LONG_TEXT),
    "Grammar.regex": grammar(regex=LONG_TEXT),
    "Grammar.lark": grammar(lark=LONG_TEXT),
    "Grammar.ebnf": grammar(ebnf=LONG_TEXT),
    "GrammarChoice.texts": grammar(choice={"texts": ["x"] * (MAX_CHOICES + 1)}),
    "ChecksumBlocksRequest.block_ids": (lambda: check_block_ids([1] * (MAX_CHECKSUM_BLOCKS + 1), 9), "block_ids"),
    "LoadAdapterRequest.name": (lambda: check_name("x" * 129), "name"),
    "LoadAdapterRequest.path": (lambda: check_path("x" * (MAX_PATH_LENGTH + 1)), "path"),
    "UnloadAdapterRequest.name": (lambda: check_name("x" * 129), "name"),
    "PlanStepRequest.request_id": plan(request_id="x" * 65),
    "WatchBlocksRequest.copy_media": (
        lambda: messages.decode_copy_media([cache_service_pb2.MEDIUM_HOST] * 3),
        "copy_media",
    ),
    "CreateLeaseRequest.request_id": (lambda: messages.check_request_id("x" * 65), "request_id"),
}
"""By message and field: a request that is beyond the bound."""

LOOKED_UP = "a key of a table, quoted up to 256 characters if it is not there"
COMPARED = "compared with names that are there"
OF_A_FORM = "has to match a form, and is quoted up to 128 characters if it does not"
STRINGS = {
    "pool": LOOKED_UP,
    "lease_id": LOOKED_UP,
    "tenant": COMPARED,
    "page_token": OF_A_FORM,
    "cursor": OF_A_FORM,
    "pin_id": OF_A_FORM,
    "signature": COMPARED,
}
"""By name: fields that need no bound of their own beside the size of their method's messages."""


def unbounded(descriptor: Any, seen: set[str]) -> Iterator[tuple[str, str]]:
    """Message and field of all values without a bound."""
    if descriptor.full_name in seen or descriptor.full_name.startswith("google."):
        return
    seen.add(descriptor.full_name)
    for field in descriptor.fields:
        if field.is_repeated or field.type in (field.TYPE_STRING, field.TYPE_BYTES):
            yield descriptor.name, field.name
        if field.message_type is not None:
            yield from unbounded(field.message_type, seen)


def test_every_field_that_can_be_large_has_a_bound() -> None:
    seen: set[str] = set()
    services = [service for file in SERVICES for service in file.services_by_name.values()]
    requests = [method.input_type for service in services for method in service.methods]
    found = {pair for request in requests for pair in unbounded(request, seen)}
    bounded = {tuple(name.split(".")) for name in LISTS}
    assert {".".join(pair) for pair in found - bounded if pair[1] not in STRINGS} == set()
    assert bounded <= found, "a field that is gone"
    assert set(STRINGS) <= {field for _, field in found - bounded}


@pytest.mark.parametrize("name", LISTS)
def test_a_request_beyond_a_bound_is_refused_with_the_fields_name(name: str) -> None:
    read, field = LISTS[name]
    with pytest.raises((CallRefused, Refused)) as caught:
        read()
    refusal: Any = caught.value.refusal if isinstance(caught.value, CallRefused) else caught.value
    assert (refusal.reason, refusal.metadata["field"]) == ("INVALID_ARGUMENT", field)
    assert {"value", "limit"} <= set(refusal.metadata)


@pytest.mark.parametrize("step_number", [-1, -(2**63)])
def test_a_report_of_a_negative_step_is_refused(step_number: int) -> None:
    read, field = report("step_number", step_number=step_number)
    with pytest.raises(CallRefused) as caught:
        read()
    assert caught.value.refusal.metadata["field"] == field


# -- grants -------------------------------------------------------------------------------------------------------


def test_a_large_grant_is_read_only_if_it_is_signed() -> None:
    """A smaller one is read first, so that a client hears of a new epoch."""
    key = bytes(32)
    gate = Gate("p", 1)
    large = grant_pb2.SignedGrant(grant=bytes(MAX_UNSIGNED_BYTES + 1))
    for reason, sign in (("POOL_DETACHED", b""), ("BAD_SIGNATURE", b"x" * 32)):
        large.signature = sign
        with pytest.raises(Refused) as caught:
            gate.check_unread(large, max_bytes=2 * MAX_UNSIGNED_BYTES)
        assert caught.value.reason == reason
        gate.attach(1, key, [])
    large.signature = hmac.digest(key, large.grant, "sha256")
    gate.check_unread(large, max_bytes=2 * MAX_UNSIGNED_BYTES)
    gate.check_unread(grant_pb2.SignedGrant(grant=bytes(MAX_UNSIGNED_BYTES)), max_bytes=10)


@pytest.mark.parametrize("num_groups", [0, 1, 64])
def test_no_grant_is_larger_than_the_largest(num_groups: int) -> None:
    """Six sequences with all blocks leave for the host tier, six others come back from there, and six pass blocks."""
    group = attach_pb2.LayerGroup(kind=attach_pb2.LAYER_GROUP_KIND_FULL, layer_count=1)
    sizes = {"block_count": 2**24, "host_block_count": 2**24, "layer_groups": [group] * num_groups}
    geometry = attach_pb2.PoolGeometry(**WIRE_GEOMETRY | sizes)
    tables = [2**31 - 1] * 6 * max(1, num_groups)
    ids, entries = [2**31 - 1] * 6, [2**24 - 1] * 36 * max(1, num_groups)
    grant = grant_pb2.StepGrant(
        pool="p" * 128,
        epoch=2**63 - 1,
        term=2**63 - 1,
        lease_id="l" * 32,
        step_number=2**63 - 1,
        known_step_number=2**63 - 1,
        released_sequence_ids=ids,
        offloaded_sequence_ids=ids,
        fork_parent_ids=ids,
        fork_child_ids=ids,
        passed_sequence_ids=tables,
        passed_layer_groups=tables,
        passed_block_counts=tables,
        write_sequence_ids=tables,
        write_layer_groups=tables,
        write_first_indexes=tables,
        write_block_counts=tables,
        write_block_ids=entries,
        copy_source_block_ids=[2**24 - 1] * 6,
        copy_target_block_ids=[2**24 - 1] * 6,
        offload_source_block_ids=entries,
        offload_target_host_block_ids=entries,
        restore_source_host_block_ids=entries,
        restore_target_block_ids=entries,
        run_sequence_ids=ids,
        run_starts=ids,
        run_token_counts=ids,
        run_samples=[True] * 6,
        given_run_indexes=ids,
        given_token_digests=bytes(16 * 6),
        run_draft_counts=[64] * 6,
        adapters=[bytes(32)] * 6,
        run_adapters=[2**20] * 6,
    )
    assert len(grant.SerializeToString()) <= max_grant_bytes(geometry)


def test_a_client_checks_with_the_numbers_of_the_core() -> None:
    names = (
        "MAX_SALT_BYTES",
        "ADAPTER_BYTES",
        "MAX_RANGES",
        "LEAST_PRIORITY",
        "MOST_PRIORITY",
        "MAX_RETENTION_S",
        "MAX_EXPECTED_S",
    )
    names += ("MAX_BREAKPOINTS", "LEAST_KEEP_S", "MAX_KEEP_S")
    assert [getattr(admission_bounds, name) for name in names] == [getattr(_core, name) for name in names]


@pytest.mark.parametrize(
    "beyond",
    [
        registration("attached_term", attached_term=1, kept_memory={"epoch": 2}),
        kept_memory("epoch", epoch=0),
        kept_memory("epoch", epoch=1),
        kept_memory("attached_term", attached_term=-1),
        kept_memory("accepted_step_count", accepted_step_count=-1),
    ],
)
def test_kept_memory_that_can_not_be_is_refused(beyond: Beyond) -> None:
    call, field = beyond
    with pytest.raises(CallRefused) as refused:
        call()
    assert refused.value.refusal.metadata["field"] == field


@pytest.mark.parametrize("group", [1, -1])
def test_a_copy_of_a_layer_group_that_the_pool_does_not_have_is_refused(group: int) -> None:
    call, _ = disk_content("layer_groups", layer_groups=[group])
    with pytest.raises(CallRefused) as refused:
        call()
    assert refused.value.refusal.message == f"disk_content.layer_groups is {group}; must be 0 to 0"
