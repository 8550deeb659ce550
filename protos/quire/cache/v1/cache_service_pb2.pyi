import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from quire.cache.v1 import attach_pb2 as _attach_pb2
from quire.cache.v1 import error_pb2 as _error_pb2
from quire.cache.v1 import grant_pb2 as _grant_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlanItem(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLAN_ITEM_UNSPECIFIED: _ClassVar[PlanItem]
    PLAN_ITEM_TRIM: _ClassVar[PlanItem]
    PLAN_ITEM_FORK: _ClassVar[PlanItem]
    PLAN_ITEM_EXTEND: _ClassVar[PlanItem]
    PLAN_ITEM_ADMISSION: _ClassVar[PlanItem]

class LeaseState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_STATE_UNSPECIFIED: _ClassVar[LeaseState]
    LEASE_STATE_OPEN: _ClassVar[LeaseState]
    LEASE_STATE_FENCING: _ClassVar[LeaseState]

class BlockState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_STATE_UNSPECIFIED: _ClassVar[BlockState]
    BLOCK_STATE_FREE: _ClassVar[BlockState]
    BLOCK_STATE_CACHED: _ClassVar[BlockState]
    BLOCK_STATE_ACTIVE: _ClassVar[BlockState]
    BLOCK_STATE_RETIRED: _ClassVar[BlockState]
PLAN_ITEM_UNSPECIFIED: PlanItem
PLAN_ITEM_TRIM: PlanItem
PLAN_ITEM_FORK: PlanItem
PLAN_ITEM_EXTEND: PlanItem
PLAN_ITEM_ADMISSION: PlanItem
LEASE_STATE_UNSPECIFIED: LeaseState
LEASE_STATE_OPEN: LeaseState
LEASE_STATE_FENCING: LeaseState
BLOCK_STATE_UNSPECIFIED: BlockState
BLOCK_STATE_FREE: BlockState
BLOCK_STATE_CACHED: BlockState
BLOCK_STATE_ACTIVE: BlockState
BLOCK_STATE_RETIRED: BlockState

class CreateLeaseRequest(_message.Message):
    __slots__ = ("pool", "ttl", "request_id")
    POOL_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    pool: str
    ttl: _duration_pb2.Duration
    request_id: str
    def __init__(self, pool: _Optional[str] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class CreateLeaseResponse(_message.Message):
    __slots__ = ("lease_id", "pool", "epoch", "term", "expire_time", "geometry", "worker_address")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    pool: str
    epoch: int
    term: int
    expire_time: _timestamp_pb2.Timestamp
    geometry: _attach_pb2.PoolGeometry
    worker_address: str
    def __init__(self, lease_id: _Optional[str] = ..., pool: _Optional[str] = ..., epoch: _Optional[int] = ..., term: _Optional[int] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., geometry: _Optional[_Union[_attach_pb2.PoolGeometry, _Mapping]] = ..., worker_address: _Optional[str] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class RenewLeaseResponse(_message.Message):
    __slots__ = ("expire_time",)
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    expire_time: _timestamp_pb2.Timestamp
    def __init__(self, expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class DeleteLeaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class DeleteLeaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PlanStepRequest(_message.Message):
    __slots__ = ("lease_id", "epoch", "request_id", "release_sequence_ids", "trim_sequence_ids", "trim_token_counts", "forks", "extends", "admissions", "admission_token_budget", "admission_reserve_block_count")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RELEASE_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    TRIM_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    TRIM_TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    FORKS_FIELD_NUMBER: _ClassVar[int]
    EXTENDS_FIELD_NUMBER: _ClassVar[int]
    ADMISSIONS_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_RESERVE_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    epoch: int
    request_id: str
    release_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    trim_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    trim_token_counts: _containers.RepeatedScalarFieldContainer[int]
    forks: _containers.RepeatedCompositeFieldContainer[Fork]
    extends: Extends
    admissions: _containers.RepeatedCompositeFieldContainer[Admission]
    admission_token_budget: int
    admission_reserve_block_count: int
    def __init__(self, lease_id: _Optional[str] = ..., epoch: _Optional[int] = ..., request_id: _Optional[str] = ..., release_sequence_ids: _Optional[_Iterable[int]] = ..., trim_sequence_ids: _Optional[_Iterable[int]] = ..., trim_token_counts: _Optional[_Iterable[int]] = ..., forks: _Optional[_Iterable[_Union[Fork, _Mapping]]] = ..., extends: _Optional[_Union[Extends, _Mapping]] = ..., admissions: _Optional[_Iterable[_Union[Admission, _Mapping]]] = ..., admission_token_budget: _Optional[int] = ..., admission_reserve_block_count: _Optional[int] = ...) -> None: ...

class Fork(_message.Message):
    __slots__ = ("parent_sequence_id", "child_sequence_ids", "token_count")
    PARENT_SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    CHILD_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    parent_sequence_id: int
    child_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    token_count: int
    def __init__(self, parent_sequence_id: _Optional[int] = ..., child_sequence_ids: _Optional[_Iterable[int]] = ..., token_count: _Optional[int] = ...) -> None: ...

class Extends(_message.Message):
    __slots__ = ("sequence_ids", "token_counts", "append_token_counts", "append_token_ids")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    APPEND_TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    APPEND_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    append_token_counts: _containers.RepeatedScalarFieldContainer[int]
    append_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., append_token_counts: _Optional[_Iterable[int]] = ..., append_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Admission(_message.Message):
    __slots__ = ("sequence_id", "token_ids", "max_compute_token_count", "salt")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_COMPUTE_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_compute_token_count: int
    salt: bytes
    def __init__(self, sequence_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., max_compute_token_count: _Optional[int] = ..., salt: _Optional[bytes] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("item", "sequence_id", "error")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    item: PlanItem
    sequence_id: int
    error: _error_pb2.Error
    def __init__(self, item: _Optional[_Union[PlanItem, str]] = ..., sequence_id: _Optional[int] = ..., error: _Optional[_Union[_error_pb2.Error, _Mapping]] = ...) -> None: ...

class PlanStepResponse(_message.Message):
    __slots__ = ("grant", "step_number", "refusals", "run_sequence_ids", "run_starts", "run_token_counts", "given_run_indexes", "admitted_sequence_ids", "admitted_cached_token_counts", "block_counts")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    STEP_NUMBER_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    RUN_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    RUN_STARTS_FIELD_NUMBER: _ClassVar[int]
    RUN_TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    GIVEN_RUN_INDEXES_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_CACHED_TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNTS_FIELD_NUMBER: _ClassVar[int]
    grant: _grant_pb2.SignedGrant
    step_number: int
    refusals: _containers.RepeatedCompositeFieldContainer[Refusal]
    run_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    run_starts: _containers.RepeatedScalarFieldContainer[int]
    run_token_counts: _containers.RepeatedScalarFieldContainer[int]
    given_run_indexes: _containers.RepeatedScalarFieldContainer[int]
    admitted_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    admitted_cached_token_counts: _containers.RepeatedScalarFieldContainer[int]
    block_counts: BlockCounts
    def __init__(self, grant: _Optional[_Union[_grant_pb2.SignedGrant, _Mapping]] = ..., step_number: _Optional[int] = ..., refusals: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ..., run_sequence_ids: _Optional[_Iterable[int]] = ..., run_starts: _Optional[_Iterable[int]] = ..., run_token_counts: _Optional[_Iterable[int]] = ..., given_run_indexes: _Optional[_Iterable[int]] = ..., admitted_sequence_ids: _Optional[_Iterable[int]] = ..., admitted_cached_token_counts: _Optional[_Iterable[int]] = ..., block_counts: _Optional[_Union[BlockCounts, _Mapping]] = ...) -> None: ...

class BlockCounts(_message.Message):
    __slots__ = ("free_count", "cached_count", "active_count", "retired_count")
    FREE_COUNT_FIELD_NUMBER: _ClassVar[int]
    CACHED_COUNT_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_COUNT_FIELD_NUMBER: _ClassVar[int]
    RETIRED_COUNT_FIELD_NUMBER: _ClassVar[int]
    free_count: int
    cached_count: int
    active_count: int
    retired_count: int
    def __init__(self, free_count: _Optional[int] = ..., cached_count: _Optional[int] = ..., active_count: _Optional[int] = ..., retired_count: _Optional[int] = ...) -> None: ...

class PlanStepsRequest(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: PlanStepRequest
    def __init__(self, plan: _Optional[_Union[PlanStepRequest, _Mapping]] = ...) -> None: ...

class PlanStepsResponse(_message.Message):
    __slots__ = ("plan", "error")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    plan: PlanStepResponse
    error: _error_pb2.Error
    def __init__(self, plan: _Optional[_Union[PlanStepResponse, _Mapping]] = ..., error: _Optional[_Union[_error_pb2.Error, _Mapping]] = ...) -> None: ...

class GetPoolRequest(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: str
    def __init__(self, pool: _Optional[str] = ...) -> None: ...

class GetPoolResponse(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: Pool
    def __init__(self, pool: _Optional[_Union[Pool, _Mapping]] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("name", "epoch", "term", "attached", "geometry", "worker_address", "block_counts", "lease_count", "sequence_count")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_COUNT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    epoch: int
    term: int
    attached: bool
    geometry: _attach_pb2.PoolGeometry
    worker_address: str
    block_counts: BlockCounts
    lease_count: int
    sequence_count: int
    def __init__(self, name: _Optional[str] = ..., epoch: _Optional[int] = ..., term: _Optional[int] = ..., attached: _Optional[bool] = ..., geometry: _Optional[_Union[_attach_pb2.PoolGeometry, _Mapping]] = ..., worker_address: _Optional[str] = ..., block_counts: _Optional[_Union[BlockCounts, _Mapping]] = ..., lease_count: _Optional[int] = ..., sequence_count: _Optional[int] = ...) -> None: ...

class ListPoolsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListPoolsResponse(_message.Message):
    __slots__ = ("pools", "next_page_token")
    POOLS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    next_page_token: str
    def __init__(self, pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListLeasesRequest(_message.Message):
    __slots__ = ("pool", "page_size", "page_token")
    POOL_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    pool: str
    page_size: int
    page_token: str
    def __init__(self, pool: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListLeasesResponse(_message.Message):
    __slots__ = ("leases", "next_page_token")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    next_page_token: str
    def __init__(self, leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease_id_prefix", "pool", "state", "ttl", "expire_time", "last_step_number", "step_in_flight_count", "sequence_count")
    LEASE_ID_PREFIX_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_IN_FLIGHT_COUNT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    lease_id_prefix: str
    pool: str
    state: LeaseState
    ttl: _duration_pb2.Duration
    expire_time: _timestamp_pb2.Timestamp
    last_step_number: int
    step_in_flight_count: int
    sequence_count: int
    def __init__(self, lease_id_prefix: _Optional[str] = ..., pool: _Optional[str] = ..., state: _Optional[_Union[LeaseState, str]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., last_step_number: _Optional[int] = ..., step_in_flight_count: _Optional[int] = ..., sequence_count: _Optional[int] = ...) -> None: ...

class GetSequenceRequest(_message.Message):
    __slots__ = ("lease_id", "sequence_id")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    sequence_id: int
    def __init__(self, lease_id: _Optional[str] = ..., sequence_id: _Optional[int] = ...) -> None: ...

class GetSequenceResponse(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: Sequence
    def __init__(self, sequence: _Optional[_Union[Sequence, _Mapping]] = ...) -> None: ...

class Sequence(_message.Message):
    __slots__ = ("lease_id_prefix", "sequence_id", "token_count", "computed_token_count", "scheduled_token_count", "cached_token_count", "block_ids", "block_count")
    LEASE_ID_PREFIX_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    lease_id_prefix: str
    sequence_id: int
    token_count: int
    computed_token_count: int
    scheduled_token_count: int
    cached_token_count: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    block_count: int
    def __init__(self, lease_id_prefix: _Optional[str] = ..., sequence_id: _Optional[int] = ..., token_count: _Optional[int] = ..., computed_token_count: _Optional[int] = ..., scheduled_token_count: _Optional[int] = ..., cached_token_count: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., block_count: _Optional[int] = ...) -> None: ...

class ListSequencesRequest(_message.Message):
    __slots__ = ("pool", "lease_id", "page_size", "page_token")
    POOL_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    pool: str
    lease_id: str
    page_size: int
    page_token: str
    def __init__(self, pool: _Optional[str] = ..., lease_id: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListSequencesResponse(_message.Message):
    __slots__ = ("sequences", "next_page_token")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[Sequence]
    next_page_token: str
    def __init__(self, sequences: _Optional[_Iterable[_Union[Sequence, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("block_id", "state", "reference_count", "pin_count", "prefix_hash")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PIN_COUNT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    block_id: int
    state: BlockState
    reference_count: int
    pin_count: int
    prefix_hash: bytes
    def __init__(self, block_id: _Optional[int] = ..., state: _Optional[_Union[BlockState, str]] = ..., reference_count: _Optional[int] = ..., pin_count: _Optional[int] = ..., prefix_hash: _Optional[bytes] = ...) -> None: ...

class ListBlocksRequest(_message.Message):
    __slots__ = ("pool", "state", "lease_id", "page_size", "page_token")
    POOL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    pool: str
    state: BlockState
    lease_id: str
    page_size: int
    page_token: str
    def __init__(self, pool: _Optional[str] = ..., state: _Optional[_Union[BlockState, str]] = ..., lease_id: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListBlocksResponse(_message.Message):
    __slots__ = ("blocks", "next_page_token")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    next_page_token: str
    def __init__(self, blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class LookupPrefixRequest(_message.Message):
    __slots__ = ("pool", "token_ids", "salt")
    POOL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    pool: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    salt: bytes
    def __init__(self, pool: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., salt: _Optional[bytes] = ...) -> None: ...

class LookupPrefixResponse(_message.Message):
    __slots__ = ("matches",)
    MATCHES_FIELD_NUMBER: _ClassVar[int]
    matches: _containers.RepeatedCompositeFieldContainer[PrefixMatch]
    def __init__(self, matches: _Optional[_Iterable[_Union[PrefixMatch, _Mapping]]] = ...) -> None: ...

class PrefixMatch(_message.Message):
    __slots__ = ("pool", "cached_token_count", "block_counts", "worker_address")
    POOL_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNTS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    cached_token_count: int
    block_counts: BlockCounts
    worker_address: str
    def __init__(self, pool: _Optional[str] = ..., cached_token_count: _Optional[int] = ..., block_counts: _Optional[_Union[BlockCounts, _Mapping]] = ..., worker_address: _Optional[str] = ...) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: str
    def __init__(self, pool: _Optional[str] = ...) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ("dropped_block_count",)
    DROPPED_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    dropped_block_count: int
    def __init__(self, dropped_block_count: _Optional[int] = ...) -> None: ...

class AuditPoolRequest(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: str
    def __init__(self, pool: _Optional[str] = ...) -> None: ...

class AuditPoolResponse(_message.Message):
    __slots__ = ("violations", "block_count", "sequence_count")
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    violations: _containers.RepeatedScalarFieldContainer[str]
    block_count: int
    sequence_count: int
    def __init__(self, violations: _Optional[_Iterable[str]] = ..., block_count: _Optional[int] = ..., sequence_count: _Optional[int] = ...) -> None: ...

class GetStatisticsRequest(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: str
    def __init__(self, pool: _Optional[str] = ...) -> None: ...

class GetStatisticsResponse(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatistics]
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolStatistics, _Mapping]]] = ...) -> None: ...

class PoolStatistics(_message.Message):
    __slots__ = ("pool", "epoch", "block_counts", "lease_count", "sequence_count", "held_token_count", "table_entry_count", "shared_block_count", "planned_step_count", "computed_step_count", "failed_step_count", "skipped_step_count", "admission_count", "admitted_token_count", "cached_token_count", "fork_count", "copied_block_count", "allocated_block_count", "evicted_block_count", "published_block_count", "refusal_counts", "expired_lease_count")
    class RefusalCountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    POOL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_COUNT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TABLE_ENTRY_COUNT_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    PLANNED_STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    FAILED_STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_COUNT_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    FORK_COUNT_FIELD_NUMBER: _ClassVar[int]
    COPIED_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_COUNTS_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_LEASE_COUNT_FIELD_NUMBER: _ClassVar[int]
    pool: str
    epoch: int
    block_counts: BlockCounts
    lease_count: int
    sequence_count: int
    held_token_count: int
    table_entry_count: int
    shared_block_count: int
    planned_step_count: int
    computed_step_count: int
    failed_step_count: int
    skipped_step_count: int
    admission_count: int
    admitted_token_count: int
    cached_token_count: int
    fork_count: int
    copied_block_count: int
    allocated_block_count: int
    evicted_block_count: int
    published_block_count: int
    refusal_counts: _containers.ScalarMap[str, int]
    expired_lease_count: int
    def __init__(self, pool: _Optional[str] = ..., epoch: _Optional[int] = ..., block_counts: _Optional[_Union[BlockCounts, _Mapping]] = ..., lease_count: _Optional[int] = ..., sequence_count: _Optional[int] = ..., held_token_count: _Optional[int] = ..., table_entry_count: _Optional[int] = ..., shared_block_count: _Optional[int] = ..., planned_step_count: _Optional[int] = ..., computed_step_count: _Optional[int] = ..., failed_step_count: _Optional[int] = ..., skipped_step_count: _Optional[int] = ..., admission_count: _Optional[int] = ..., admitted_token_count: _Optional[int] = ..., cached_token_count: _Optional[int] = ..., fork_count: _Optional[int] = ..., copied_block_count: _Optional[int] = ..., allocated_block_count: _Optional[int] = ..., evicted_block_count: _Optional[int] = ..., published_block_count: _Optional[int] = ..., refusal_counts: _Optional[_Mapping[str, int]] = ..., expired_lease_count: _Optional[int] = ...) -> None: ...
