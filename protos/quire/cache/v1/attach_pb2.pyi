from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StepOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_OUTCOME_UNSPECIFIED: _ClassVar[StepOutcome]
    STEP_OUTCOME_COMPUTED: _ClassVar[StepOutcome]
    STEP_OUTCOME_FAILED: _ClassVar[StepOutcome]
    STEP_OUTCOME_SKIPPED: _ClassVar[StepOutcome]
STEP_OUTCOME_UNSPECIFIED: StepOutcome
STEP_OUTCOME_COMPUTED: StepOutcome
STEP_OUTCOME_FAILED: StepOutcome
STEP_OUTCOME_SKIPPED: StepOutcome

class AttachPoolRequest(_message.Message):
    __slots__ = ("register_pool", "step_report", "lease_opened", "lease_fenced")
    REGISTER_POOL_FIELD_NUMBER: _ClassVar[int]
    STEP_REPORT_FIELD_NUMBER: _ClassVar[int]
    LEASE_OPENED_FIELD_NUMBER: _ClassVar[int]
    LEASE_FENCED_FIELD_NUMBER: _ClassVar[int]
    register_pool: RegisterPool
    step_report: StepReport
    lease_opened: LeaseOpened
    lease_fenced: LeaseFenced
    def __init__(self, register_pool: _Optional[_Union[RegisterPool, _Mapping]] = ..., step_report: _Optional[_Union[StepReport, _Mapping]] = ..., lease_opened: _Optional[_Union[LeaseOpened, _Mapping]] = ..., lease_fenced: _Optional[_Union[LeaseFenced, _Mapping]] = ...) -> None: ...

class AttachPoolResponse(_message.Message):
    __slots__ = ("attached", "new_epoch_required", "open_lease", "fence_lease", "reports_acknowledged")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    NEW_EPOCH_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    OPEN_LEASE_FIELD_NUMBER: _ClassVar[int]
    FENCE_LEASE_FIELD_NUMBER: _ClassVar[int]
    REPORTS_ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    attached: Attached
    new_epoch_required: NewEpochRequired
    open_lease: OpenLease
    fence_lease: FenceLease
    reports_acknowledged: ReportsAcknowledged
    def __init__(self, attached: _Optional[_Union[Attached, _Mapping]] = ..., new_epoch_required: _Optional[_Union[NewEpochRequired, _Mapping]] = ..., open_lease: _Optional[_Union[OpenLease, _Mapping]] = ..., fence_lease: _Optional[_Union[FenceLease, _Mapping]] = ..., reports_acknowledged: _Optional[_Union[ReportsAcknowledged, _Mapping]] = ...) -> None: ...

class RegisterPool(_message.Message):
    __slots__ = ("pool", "epoch", "highest_term", "attached_term", "geometry", "worker_address")
    POOL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_TERM_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_TERM_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    epoch: int
    highest_term: int
    attached_term: int
    geometry: PoolGeometry
    worker_address: str
    def __init__(self, pool: _Optional[str] = ..., epoch: _Optional[int] = ..., highest_term: _Optional[int] = ..., attached_term: _Optional[int] = ..., geometry: _Optional[_Union[PoolGeometry, _Mapping]] = ..., worker_address: _Optional[str] = ...) -> None: ...

class PoolGeometry(_message.Message):
    __slots__ = ("block_size_tokens", "block_count", "block_bytes", "max_sequence_count", "max_sequence_tokens", "vocabulary_size", "model", "model_fingerprint")
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    block_size_tokens: int
    block_count: int
    block_bytes: int
    max_sequence_count: int
    max_sequence_tokens: int
    vocabulary_size: int
    model: str
    model_fingerprint: str
    def __init__(self, block_size_tokens: _Optional[int] = ..., block_count: _Optional[int] = ..., block_bytes: _Optional[int] = ..., max_sequence_count: _Optional[int] = ..., max_sequence_tokens: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("term", "signing_key", "open_lease_ids", "acknowledged_report_number")
    TERM_FIELD_NUMBER: _ClassVar[int]
    SIGNING_KEY_FIELD_NUMBER: _ClassVar[int]
    OPEN_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_REPORT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    term: int
    signing_key: bytes
    open_lease_ids: _containers.RepeatedScalarFieldContainer[str]
    acknowledged_report_number: int
    def __init__(self, term: _Optional[int] = ..., signing_key: _Optional[bytes] = ..., open_lease_ids: _Optional[_Iterable[str]] = ..., acknowledged_report_number: _Optional[int] = ...) -> None: ...

class NewEpochRequired(_message.Message):
    __slots__ = ("term",)
    TERM_FIELD_NUMBER: _ClassVar[int]
    term: int
    def __init__(self, term: _Optional[int] = ...) -> None: ...

class OpenLease(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class FenceLease(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class ReportsAcknowledged(_message.Message):
    __slots__ = ("report_number",)
    REPORT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    report_number: int
    def __init__(self, report_number: _Optional[int] = ...) -> None: ...

class LeaseOpened(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class LeaseFenced(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("report_number", "lease_id", "step_number", "outcome", "sequence_ids", "computed_token_counts", "sampled_sequence_ids", "sampled_token_ids")
    REPORT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_NUMBER_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    report_number: int
    lease_id: str
    step_number: int
    outcome: StepOutcome
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    computed_token_counts: _containers.RepeatedScalarFieldContainer[int]
    sampled_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    sampled_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, report_number: _Optional[int] = ..., lease_id: _Optional[str] = ..., step_number: _Optional[int] = ..., outcome: _Optional[_Union[StepOutcome, str]] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., computed_token_counts: _Optional[_Iterable[int]] = ..., sampled_sequence_ids: _Optional[_Iterable[int]] = ..., sampled_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...
