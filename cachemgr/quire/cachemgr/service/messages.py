"""Between messages and the core's values: decoding checks form (lengths, ranges), the core checks meaning.

The core decodes and checks plans and reports itself, and encodes answers to plans (core/src/wire).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set
from itertools import starmap

import numpy as np
from google.protobuf import duration_pb2
from google.protobuf.message import Message

from quire.cache.v1 import attach_pb2, cache_service_pb2, error_pb2
from quire.cache.v1.admission_bounds import ADAPTER_NAME, ADAPTER_NAME_LIMIT, MAX_ADAPTERS
from quire.cache.v1.layer_spans import LayerGroupKind
from quire.cachemgr._core import (
    ADAPTER_BYTES,
    MAX_LAYER_GROUPS,
    MAX_REQUEST_ID_BYTES,
    MAX_SALT_BYTES,
    Explanation,
    GrantedStep,
    Lease,
    Ledger,
    PinView,
    SequenceView,
    StepReport,
    TenantUse,
)
from quire.cachemgr.blocks import BlockState
from quire.cachemgr.catalog import AttachedPool, KeptMemory, Registration
from quire.cachemgr.errors import CallRefused, Reason, Refusal, invalid, refuse
from quire.cachemgr.geometry import Geometry, LayerGroup
from quire.cachemgr.service import statuses
from quire.serving.errors import to_message

MAX_BLOCKS = 2**24
"""The most blocks of a pool. Its books take about 100 bytes a block, allocated when it is attached."""
MAX_DRAFTS = 64
"""The most drafts of a sequence in a step, also if its worker could verify more."""
MAX_POOL_NAME_LENGTH = 128
MAX_TEXT_LENGTH = 1_024
"""The most characters of a worker's texts about its pool. They are kept, and shown to every client."""
MAX_MEMORY_ID_LENGTH = 64
MAX_DISK_ORDERS = 1_024
"""Of a report about the disk: fewer are open."""
MAX_OPEN_LEASES = 131_072
"""The most open leases in the registration of a worker."""
POOL_NAME = f"[A-Za-z0-9._-]{{1,{MAX_POOL_NAME_LENGTH}}}"
SHOWN_LEASE_ID_LENGTH = 8
PIN_ID = "[0-9a-f]{32}"

BLOCK_STATES = {
    BlockState.FREE: cache_service_pb2.BLOCK_STATE_FREE,
    BlockState.CACHED: cache_service_pb2.BLOCK_STATE_CACHED,
    BlockState.ACTIVE: cache_service_pb2.BLOCK_STATE_ACTIVE,
    BlockState.RETIRED: cache_service_pb2.BLOCK_STATE_RETIRED,
}
LAYER_GROUP_KINDS = {
    LayerGroupKind.FULL: attach_pb2.LAYER_GROUP_KIND_FULL,
    LayerGroupKind.SLIDING: attach_pb2.LAYER_GROUP_KIND_SLIDING,
    LayerGroupKind.CHUNKED: attach_pb2.LAYER_GROUP_KIND_CHUNKED,
}
COPY_MEDIA = {cache_service_pb2.MEDIUM_HOST: "host", cache_service_pb2.MEDIUM_DISK: "disk"}
"""The places of copies of evicted blocks, as the core names them."""
LEASE_STATES = {
    False: cache_service_pb2.LEASE_STATE_OPEN,
    True: cache_service_pb2.LEASE_STATE_FENCING,
}
"""The state of a lease by whether it has ended."""
MISS_REASONS = {
    "none": cache_service_pb2.MISS_REASON_NONE,
    "never_computed": cache_service_pb2.MISS_REASON_NEVER_COMPUTED,
    "unknown": cache_service_pb2.MISS_REASON_UNKNOWN,
    "evicted": cache_service_pb2.MISS_REASON_EVICTED,
    "reset": cache_service_pb2.MISS_REASON_RESET,
    "being_computed": cache_service_pb2.MISS_REASON_BEING_COMPUTED,
    "other_salt": cache_service_pb2.MISS_REASON_OTHER_SALT,
    "other_adapter": cache_service_pb2.MISS_REASON_OTHER_ADAPTER,
    "other_tenant": cache_service_pb2.MISS_REASON_OTHER_TENANT,
    "window_evicted": cache_service_pb2.MISS_REASON_WINDOW_EVICTED,
}


def int32_bytes(values: Iterable[int]) -> bytes:
    """A repeated int32 field as the core takes it: 4 bytes each, little-endian."""
    return np.asarray(values, dtype="<i4").tobytes()


# -- plans --------------------------------------------------------------------------------------------------------


def known_bytes(message: Message) -> bytes:
    """The bytes of a message for the core, without its unknown fields.

    A known field of another wire type is an unknown field to protobuf. The core's decoder would refuse it.
    """
    message.DiscardUnknownFields()
    return message.SerializeToString(deterministic=True)


def encode_plan(plan: GrantedStep, pool: AttachedPool, *, lease_id: str, wall_clock_offset_s: float = 0.0) -> bytes:
    """A serialised PlanStepResponse. Only this pool's cachemgr can have made its grant."""
    ledger = pool.ledger
    answer = plan.encode_signed(
        ledger.pool,
        ledger.epoch,
        pool.term,
        lease_id,
        pool.signing_key,
        wall_clock_offset_s=wall_clock_offset_s,
    )
    return answer + encode_refusals(plan)


def encode_refusals(plan: GrantedStep) -> bytes:
    """The refusals of a plan, to append to its serialised PlanStepResponse."""
    if not plan.has_refusals:
        return b""
    refusals = starmap(encode_refused, plan.refusals)
    return cache_service_pb2.PlanStepResponse(refusals=refusals).SerializeToString()


def encode_refused(
    item: cache_service_pb2.PlanItem.ValueType, seq_id: int, refusal: Refusal
) -> cache_service_pb2.Refusal:
    return cache_service_pb2.Refusal(item=item, sequence_id=seq_id, error=encode_refusal(refusal))


def encode_plan_error(refusal: Refusal) -> bytes:
    """A serialised PlanStepsResponse."""
    return cache_service_pb2.PlanStepsResponse(error=encode_refusal(refusal)).SerializeToString()


def encode_refusal(refusal: Refusal) -> error_pb2.Error:
    return to_message(statuses.to_error_status(refusal))


# -- attachments --------------------------------------------------------------------------------------------------


def decode_from_worker(body: bytes) -> attach_pb2.AttachPoolRequest | StepReport:
    """A serialised AttachPoolRequest, or the report in it. Raises ValueError or DecodeError if it is no message."""
    return StepReport.on_stream(body) or attach_pb2.AttachPoolRequest.FromString(body)


def decode_registration(message: attach_pb2.RegisterPool) -> Registration:
    """Raises CallRefused (INVALID_ARGUMENT)."""
    name = message.pool
    if len(name) > MAX_POOL_NAME_LENGTH or not re.fullmatch(POOL_NAME, name):
        limit = f"1 to {MAX_POOL_NAME_LENGTH} letters, digits, '.', '_' and '-'"
        raise CallRefused(invalid("register_pool.pool", repr(name[: MAX_POOL_NAME_LENGTH + 1]), limit))
    if message.epoch == 0:
        raise CallRefused(invalid("register_pool.epoch", 0, "not 0"))
    for number in ("highest_term", "attached_term", "acknowledged_report_number", "last_disk_order_number"):
        require_not_negative(f"register_pool.{number}", getattr(message, number))
    check_count("register_pool.open_leases", len(message.open_leases), MAX_OPEN_LEASES)
    check_text("register_pool.worker_address", message.worker_address)
    check_count("register_pool.memory_id", len(message.memory_id), MAX_MEMORY_ID_LENGTH)
    geometry = decode_geometry(message.geometry)
    return Registration(
        pool=name,
        epoch=message.epoch,
        highest_term=message.highest_term,
        attached_term=message.attached_term,
        geometry=geometry,
        worker_address=message.worker_address,
        next_steps={lease.lease_id: lease.next_step_number for lease in message.open_leases},
        acknowledged_report=message.acknowledged_report_number,
        last_disk_order=message.last_disk_order_number,
        highest_term_age_s=seconds_of(message.highest_term_age),
        memory_id=message.memory_id,
        kept_memory=decode_kept_memory(message, geometry) if message.HasField("kept_memory") else None,
        adapters=decode_adapters("register_pool", message.adapters) if message.HasField("adapters") else None,
    )


def decode_adapters(field: str, message: attach_pb2.PoolAdapters) -> dict[str, bytes]:
    """Return the identities of adapters by name. Raises CallRefused (INVALID_ARGUMENT)."""
    check_count(f"{field}.adapters", len(message.adapters), MAX_ADAPTERS)
    adapters = {}
    for adapter in message.adapters:
        if not re.fullmatch(ADAPTER_NAME, adapter.name) or adapter.name in adapters:
            limit = f"{ADAPTER_NAME_LIMIT}, each name once"
            raise CallRefused(invalid(f"{field}.adapters.name", repr(adapter.name[:129]), limit))
        if len(adapter.identity) != ADAPTER_BYTES:
            raise CallRefused(
                invalid(f"{field}.adapters.identity", f"{len(adapter.identity)} bytes", f"{ADAPTER_BYTES} bytes")
            )
        adapters[adapter.name] = adapter.identity
    return adapters


def disk_report(message: attach_pb2.DiskReport) -> bytes:
    """Return the message for the books, which check the rest. Raises CallRefused (INVALID_ARGUMENT)."""
    for field in ("done_order_numbers", "failed_order_numbers"):
        check_count(f"disk_report.{field}", len(getattr(message, field)), MAX_DISK_ORDERS)
    return message.SerializeToString()


def disk_content(message: attach_pb2.DiskContent) -> bytes:
    """Return the message for the books, which check the rest. Raises CallRefused (INVALID_ARGUMENT)."""
    check_count("disk_content.tenants", len(message.tenants), len(message.disk_block_ids))
    return message.SerializeToString()


def decode_kept_memory(message: attach_pb2.RegisterPool, geometry: Geometry) -> KeptMemory:
    """Raises CallRefused (INVALID_ARGUMENT)."""
    kept, field = message.kept_memory, "register_pool.kept_memory"
    if message.attached_term:
        raise CallRefused(invalid("register_pool.attached_term", message.attached_term, "0 with kept memory"))
    if kept.epoch in (0, message.epoch):
        raise CallRefused(invalid(f"{field}.epoch", kept.epoch, "that of an earlier epoch"))
    for number in ("attached_term", "accepted_step_count"):
        require_not_negative(f"{field}.{number}", getattr(kept, number))
    check_count(f"{field}.whole_blocks", len(kept.whole_blocks), -(-geometry.num_blocks // 8))
    return KeptMemory(kept.epoch, kept.attached_term, kept.accepted_step_count, kept.whole_blocks)


def require_same_geometry(message: attach_pb2.PoolGeometry, known: Geometry) -> None:
    """Raises CallRefused (INVALID_ARGUMENT) if the epoch was registered with another geometry."""
    registered = encode_geometry(known)
    for field in registered.DESCRIPTOR.fields:
        value, before = getattr(message, field.name), getattr(registered, field.name)
        if value != before:
            raise CallRefused(invalid(f"geometry.{field.name}", value, f"{before}, as this epoch was registered"))


def decode_geometry(message: attach_pb2.PoolGeometry) -> Geometry:
    """Raises CallRefused (INVALID_ARGUMENT)."""
    limits = {
        "block_size_tokens": (message.block_size_tokens, 1, 1024),
        "block_count": (message.block_count, 2, MAX_BLOCKS),
        "block_bytes": (message.block_bytes, 0 if message.has_recurrent_state else 1, 2**63 - 1),
        "max_sequence_count": (message.max_sequence_count, 1, 2**31 - 1),
        "max_sequence_tokens": (message.max_sequence_tokens, 1, 2**31 - 1),
        "vocabulary_size": (message.vocabulary_size, 1, 2**31 - 1),
        "host_block_count": (message.host_block_count, 0, 0 if message.has_recurrent_state else MAX_BLOCKS),
        "max_draft_count": (message.max_draft_count, 0, 0 if message.has_recurrent_state else MAX_DRAFTS),
        "host_cached_block_limit": (message.host_cached_block_limit, 0, message.host_block_count),
        "disk_block_count": (message.disk_block_count, 0, MAX_BLOCKS if message.host_cached_block_limit else 0),
    }
    for name, (value, least, most) in limits.items():
        if not least <= value <= most:
            raise CallRefused(invalid(f"geometry.{name}", value, f"{least} to {most}"))
    check_text("geometry.model", message.model)
    check_text("geometry.model_fingerprint", message.model_fingerprint)
    return Geometry(
        block_size=message.block_size_tokens,
        num_blocks=message.block_count,
        block_bytes=message.block_bytes,
        max_sequences=message.max_sequence_count,
        max_sequence_tokens=message.max_sequence_tokens,
        vocab_size=message.vocabulary_size,
        model=message.model,
        model_fingerprint=message.model_fingerprint,
        has_recurrent_state=message.has_recurrent_state,
        num_host_blocks=message.host_block_count,
        layer_groups=decode_layer_groups(message),
        max_drafts=message.max_draft_count,
        host_cached_limit=message.host_cached_block_limit,
        num_disk_blocks=message.disk_block_count,
    )


def decode_layer_groups(message: attach_pb2.PoolGeometry) -> tuple[LayerGroup, ...]:
    """Raises CallRefused (INVALID_ARGUMENT)."""
    check_count("geometry.layer_groups", len(message.layer_groups), MAX_LAYER_GROUPS)
    kinds = {number: kind for kind, number in LAYER_GROUP_KINDS.items()}
    groups: list[LayerGroup] = []
    for index, group in enumerate(message.layer_groups):
        name = f"geometry.layer_groups[{index}]"
        kind = kinds.get(group.kind)
        if kind is None:
            raise CallRefused(invalid(f"{name}.kind", group.kind, "FULL, SLIDING or CHUNKED"))
        if kind is not LayerGroupKind.FULL and message.has_recurrent_state:
            raise CallRefused(invalid(f"{name}.kind", kind.upper(), "FULL in a model with has_recurrent_state"))
        if kind is LayerGroupKind.FULL and groups and groups[-1].kind is not LayerGroupKind.FULL:
            raise CallRefused(invalid(f"{name}.kind", "FULL", "SLIDING or CHUNKED, after a group of these kinds"))
        least, most = (0, 0) if kind is LayerGroupKind.FULL else (1, 2**31 - 1)
        if not least <= group.window_token_count <= most:
            limit = f"{least} to {most} for {kind.upper()}"
            raise CallRefused(invalid(f"{name}.window_token_count", group.window_token_count, limit))
        if group.layer_count < 1:
            raise CallRefused(invalid(f"{name}.layer_count", group.layer_count, "at least 1"))
        groups.append(LayerGroup(kind, group.window_token_count, group.layer_count))
    return tuple(groups)


def encode_geometry(geometry: Geometry) -> attach_pb2.PoolGeometry:
    return attach_pb2.PoolGeometry(
        block_size_tokens=geometry.block_size,
        block_count=geometry.num_blocks,
        block_bytes=geometry.block_bytes,
        max_sequence_count=geometry.max_sequences,
        max_sequence_tokens=geometry.max_sequence_tokens,
        vocabulary_size=geometry.vocab_size,
        model=geometry.model,
        model_fingerprint=geometry.model_fingerprint,
        has_recurrent_state=geometry.has_recurrent_state,
        host_block_count=geometry.num_host_blocks,
        layer_groups=[
            attach_pb2.LayerGroup(
                kind=LAYER_GROUP_KINDS[group.kind], window_token_count=group.window, layer_count=group.num_layers
            )
            for group in geometry.layer_groups
        ],
        max_draft_count=geometry.max_drafts,
        host_cached_block_limit=geometry.host_cached_limit,
        disk_block_count=geometry.num_disk_blocks,
    )


# -- inspection ---------------------------------------------------------------------------------------------------


def counts_of(ledger: Ledger) -> cache_service_pb2.BlockCounts:
    return cache_service_pb2.BlockCounts.FromString(ledger.inspector.counts())


def statistics_of(ledger: Ledger) -> cache_service_pb2.PoolStatistics:
    """The present state of a pool, and the counters of its epoch. Cost: O(leases + sequences)."""
    return cache_service_pb2.PoolStatistics.FromString(ledger.inspector.statistics())


def encode_pool(pool: AttachedPool, *, shown_adapters: Set[str] | None = None) -> cache_service_pb2.Pool:
    statistics, message = statistics_of(pool.ledger), encode_pool_without_counts(pool, shown_adapters=shown_adapters)
    message.block_counts.CopyFrom(statistics.block_counts)
    message.lease_count = statistics.lease_count
    message.sequence_count = statistics.sequence_count
    if statistics.HasField("host_block_counts"):
        message.host_block_counts.CopyFrom(statistics.host_block_counts)
    return message


def encode_pool_without_counts(pool: AttachedPool, *, shown_adapters: Set[str] | None = None) -> cache_service_pb2.Pool:
    """All of a pool that no step changes, with the adapters of these names. None: all."""
    message = cache_service_pb2.Pool(
        name=pool.ledger.pool,
        epoch=pool.ledger.epoch,
        term=pool.term,
        attached=pool.is_attached,
        geometry=encode_geometry(pool.ledger.geometry),
        worker_address=pool.worker_address,
    )
    if pool.adapters is not None:
        adapters = [
            attach_pb2.PoolAdapter(name=name, identity=identity)
            for name, identity in sorted(pool.adapters.items())
            if shown_adapters is None or name in shown_adapters
        ]
        message.adapters.CopyFrom(attach_pb2.PoolAdapters(adapters=adapters))
    return message


def encode_lease(lease: Lease, *, wall_clock_offset_s: float) -> cache_service_pb2.Lease:
    message = cache_service_pb2.Lease(
        lease_id_prefix=lease.lease_id[:SHOWN_LEASE_ID_LENGTH],
        pool=lease.pool,
        tenant=lease.tenant,
        state=LEASE_STATES[lease.is_ending],
        last_step_number=lease.next_step - 1,
        step_in_flight_count=lease.num_in_flight,
        sequence_count=lease.num_sequences,
    )
    message.ttl.FromNanoseconds(int(lease.ttl_s * 1e9))
    message.expire_time.FromNanoseconds(int((lease.expires_at + wall_clock_offset_s) * 1e9))
    return message


def encode_sequence(sequence: SequenceView, lease_id: str, *, with_blocks: bool) -> cache_service_pb2.Sequence:
    return cache_service_pb2.Sequence(
        lease_id_prefix=lease_id[:SHOWN_LEASE_ID_LENGTH],
        sequence_id=sequence.seq_id,
        token_count=sequence.num_tokens,
        computed_token_count=sequence.num_computed,
        scheduled_token_count=sequence.num_scheduled,
        cached_token_count=sequence.num_cached,
        block_ids=sequence.block_table if with_blocks else (),
        block_count=sequence.num_blocks,
        reserved_token_count=sequence.reserved_tokens,
        offloaded=sequence.is_offloaded,
        host_block_ids=sequence.host_blocks if with_blocks else (),
        host_block_count=len(sequence.host_blocks),
        cache_use=cache_service_pb2.CacheUse.ValueType(sequence.cache_use),
        tenant=sequence.tenant,
        draft_token_count=sequence.num_drafts,
        group_block_tables=[
            cache_service_pb2.GroupBlockTable(passed_block_count=num_passed, block_count=num_blocks)
            for num_passed, num_blocks in (sequence.tables if with_blocks and sequence.has_groups else ())
        ],
    )


def encode_tenant(use: TenantUse, num_leases: int, *, wall_clock_offset_s: float) -> cache_service_pb2.Tenant:
    message = cache_service_pb2.Tenant(
        name=use.name,
        held_block_count=use.num_held,
        cached_block_count=use.num_cached,
        reserved_block_count=use.num_reserved,
        pinned_block_count=use.num_pinned,
        floor_block_count=use.floor,
        quota_block_count=use.quota,
        limit_block_count=use.limit,
        pin_budget_block_count=use.pin_budget,
        lease_count=num_leases,
        kept_block_count=use.num_kept,
        keep_limit_block_count=use.keep_limit,
        cached_token_count=use.num_cached_tokens,
        written_token_count=use.num_written_tokens,
        admitted_token_count=use.num_admitted_tokens,
    )
    if use.next_keep_end_s is not None:
        message.next_keep_end_time.FromNanoseconds(int((use.next_keep_end_s + wall_clock_offset_s) * 1e9))
    return message


def encode_pin(pin: PinView, *, wall_clock_offset_s: float) -> cache_service_pb2.Pin:
    message = cache_service_pb2.Pin(pin_id=pin.pin_id.hex(), tenant=pin.tenant, pinned_token_count=pin.num_tokens)
    message.expire_time.FromNanoseconds(int((pin.until + wall_clock_offset_s) * 1e9))
    return message


def encode_media(num_in_pool: int, num_in_host: int, num_on_disk: int) -> list[cache_service_pb2.MediumTokens]:
    """The tokens of a prefix by the place of their content, without places that have none."""
    by_medium = {
        cache_service_pb2.MEDIUM_DEVICE: num_in_pool,
        cache_service_pb2.MEDIUM_HOST: num_in_host,
        cache_service_pb2.MEDIUM_DISK: num_on_disk,
    }
    return [
        cache_service_pb2.MediumTokens(medium=medium, token_count=count) for medium, count in by_medium.items() if count
    ]


def encode_explanation(
    explanation: Explanation, ledger: Ledger, *, offset_s: float
) -> cache_service_pb2.ExplainPrefixResponse:
    """Without the evicting tenant and lease and the caller of a reset, which not every caller may see. `offset_s` makes
    wall clock times."""
    block_size = ledger.geometry.block_size
    num_in_host, num_on_disk = explanation.num_in_host, explanation.num_on_disk
    num_in_pool = explanation.num_found - num_in_host - num_on_disk
    index, group, prefix_hash = explanation.missing or (explanation.num_blocks, 0, b"")
    response = cache_service_pb2.ExplainPrefixResponse(
        pool=ledger.pool,
        epoch=ledger.epoch,
        cached_token_count=explanation.num_found * block_size,
        tokens_by_medium=encode_media(*(count * block_size for count in (num_in_pool, num_in_host, num_on_disk))),
        block_count=explanation.num_blocks,
        missing_block_index=index,
        missing_prefix_hash=prefix_hash,
        missing_layer_group=group,
        reason=MISS_REASONS[explanation.reason],
        stranded_block_count=explanation.num_stranded,
        other_tenant=explanation.other_tenant or "",
    )
    response.epoch_time.FromNanoseconds(int((ledger.began_at + offset_s) * 1e9))
    if explanation.lost_at is not None:
        response.lost_time.FromNanoseconds(int((explanation.lost_at + offset_s) * 1e9))
    return response


# -- form ---------------------------------------------------------------------------------------------------------


def decode_block_state(name: str, value: int) -> BlockState | None:
    """A filter; None lets everything through. Raises CallRefused (INVALID_ARGUMENT)."""
    if value == cache_service_pb2.BLOCK_STATE_UNSPECIFIED:
        return None
    for state, number in BLOCK_STATES.items():
        if number == value:
            return state
    raise CallRefused(invalid(name, value, "a BlockState"))


def decode_lease_state(name: str, value: int) -> bool | None:
    """A filter for leases that have ended (True) or not; None: no filter. Raises CallRefused (INVALID_ARGUMENT)."""
    if value == cache_service_pb2.LEASE_STATE_UNSPECIFIED:
        return None
    for is_ending, number in LEASE_STATES.items():
        if number == value:
            return is_ending
    raise CallRefused(invalid(name, value, "a LeaseState"))


def decode_copy_media(numbers: Sequence[cache_service_pb2.Medium.ValueType]) -> list[str]:
    """The media of copies, the host tier first. Raises CallRefused (INVALID_ARGUMENT)."""
    check_count("copy_media", len(numbers), len(COPY_MEDIA))
    for number in numbers:
        if number not in COPY_MEDIA:
            raise CallRefused(invalid("copy_media", number, "MEDIUM_HOST or MEDIUM_DISK"))
    return [medium for number, medium in COPY_MEDIA.items() if number in numbers]


def check_count(name: str, size: int, most: int) -> None:
    """Raises CallRefused (INVALID_ARGUMENT) if a list has more entries than it may have."""
    if size > most:
        raise CallRefused(invalid(name, f"{size} entries", f"at most {most} entries"))


def check_request_id(request_id: str) -> None:
    length = len(request_id.encode())
    if length > MAX_REQUEST_ID_BYTES:
        raise CallRefused(invalid("request_id", f"{length} bytes", f"at most {MAX_REQUEST_ID_BYTES} bytes"))


def check_text(name: str, text: str) -> None:
    if len(text) > MAX_TEXT_LENGTH:
        raise CallRefused(invalid(name, f"{len(text)} characters", f"at most {MAX_TEXT_LENGTH} characters"))


def check_salt(name: str, salt: bytes) -> None:
    if len(salt) > MAX_SALT_BYTES:
        raise CallRefused(invalid(name, f"{len(salt)} bytes", f"at most {MAX_SALT_BYTES} bytes"))


def check_adapter(adapter: bytes) -> None:
    if adapter and len(adapter) != ADAPTER_BYTES:
        raise CallRefused(invalid("adapter", f"{len(adapter)} bytes", f"empty, or {ADAPTER_BYTES} bytes"))


def require_not_negative(name: str, value: int) -> None:
    if value < 0:
        raise CallRefused(invalid(name, value, "at least 0"))


def check_page_token(token: str, form: str) -> None:
    """A page_token is empty or matches `form`, a regular expression. Raises CallRefused (INVALID_ARGUMENT)."""
    if token and not re.fullmatch(form, token):
        raise CallRefused(invalid("page_token", repr(token[:MAX_POOL_NAME_LENGTH]), "one from an earlier answer"))


def decode_prefix(token_ids: Sequence[int], salt: bytes, adapter: bytes, pools: Sequence[Geometry]) -> bytes:
    """The tokens of a prefix in a request; at least one of the pools could have a sequence of them.

    Raises CallRefused (INVALID_ARGUMENT, EMPTY_PROMPT, TOKEN_OUT_OF_RANGE).
    """
    check_salt("salt", salt)
    check_adapter(adapter)
    if not token_ids:
        raise CallRefused(refuse(Reason.EMPTY_PROMPT, "token_ids is empty; at least 1 is needed"))
    if not pools:
        return b""
    check_count("token_ids", len(token_ids), max(geometry.max_tokens for geometry in pools))
    tokens = int32_bytes(token_ids)
    check_vocabulary(tokens, max(geometry.vocab_size for geometry in pools))
    return tokens


def decode_reset_scope(
    request: cache_service_pb2.ResetPrefixCacheRequest, geometry: Geometry
) -> tuple[bytes | None, bytes]:
    """The salt and tokens of a reset: no salt means any; tokens, if there are any, fill at least one block.

    With an adapter, a salt that is not given is the empty one.

    Raises CallRefused (INVALID_ARGUMENT, TOKEN_OUT_OF_RANGE).
    """
    salt = request.salt if request.HasField("salt") or request.token_ids or request.adapter else None
    check_salt("salt", salt or b"")
    check_adapter(request.adapter)
    if not request.token_ids:
        return salt, b""
    if len(request.token_ids) < geometry.block_size:
        limit = f"none, or at least {geometry.block_size} tokens, a full block"
        raise CallRefused(invalid("token_ids", f"{len(request.token_ids)} tokens", limit))
    return salt, decode_prefix(request.token_ids, request.salt, request.adapter, [geometry])


def check_vocabulary(tokens: bytes, vocab_size: int) -> None:
    """Raises CallRefused (TOKEN_OUT_OF_RANGE) if one of the tokens is not below `vocab_size`."""
    foreign = np.frombuffer(tokens, "<u4") >= vocab_size  # negative ones are large
    index = int(foreign.argmax())
    if foreign[index]:
        value, limit = np.frombuffer(tokens, "<i4")[index], vocab_size - 1
        message = f"token {value} at index {index} of token_ids is not in the vocabulary, 0 to {limit}"
        raise CallRefused(refuse(Reason.TOKEN_OUT_OF_RANGE, message, index=index, value=value, limit=limit))


def seconds_of(duration: duration_pb2.Duration) -> float:
    return float(duration.seconds + duration.nanos / 1e9)


def encode_name_token(name: str) -> str:
    """The page_token after an entry of this name."""
    return f"n{name.encode().hex()}"


def decode_name_token(token: str) -> str | None:
    """The name after which a page begins; None at the beginning. Raises CallRefused (INVALID_ARGUMENT)."""
    if not token:
        return None
    check_page_token(token, "n([0-9a-f]{2})*")
    try:
        return bytes.fromhex(token[1:]).decode()
    except UnicodeDecodeError:
        raise CallRefused(invalid("page_token", repr(token[:64]), "one from an earlier answer")) from None


def decode_pin_id(name: str, pin_id: str) -> bytes:
    """Raises CallRefused (INVALID_ARGUMENT)."""
    if not re.fullmatch(PIN_ID, pin_id):
        raise CallRefused(invalid(name, repr(pin_id[:64]), "32 hexadecimal digits, as PinPrefix answers"))
    return bytes.fromhex(pin_id)


def page_limit(page_size: int, *, default: int, most: int) -> int:
    """How many entries a page has. Raises CallRefused (INVALID_ARGUMENT)."""
    if not 0 <= page_size <= most:
        raise CallRefused(invalid("page_size", page_size, f"0 to {most}"))
    return page_size or default
