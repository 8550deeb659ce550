from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class SignedGrant(_message.Message):
    __slots__ = ("grant", "signature")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    grant: bytes
    signature: bytes
    def __init__(self, grant: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class StepGrant(_message.Message):
    __slots__ = ("pool", "epoch", "term", "lease_id", "step_number", "settled_step_number", "released_sequence_ids", "fork_parent_ids", "fork_child_ids", "write_sequence_ids", "write_first_indexes", "write_block_counts", "write_block_ids", "copy_source_block_ids", "copy_target_block_ids", "run_sequence_ids", "run_starts", "run_token_counts", "run_samples", "given_run_indexes", "given_token_digests")
    POOL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SETTLED_STEP_NUMBER_FIELD_NUMBER: _ClassVar[int]
    RELEASED_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    FORK_PARENT_IDS_FIELD_NUMBER: _ClassVar[int]
    FORK_CHILD_IDS_FIELD_NUMBER: _ClassVar[int]
    WRITE_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    WRITE_FIRST_INDEXES_FIELD_NUMBER: _ClassVar[int]
    WRITE_BLOCK_COUNTS_FIELD_NUMBER: _ClassVar[int]
    WRITE_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    COPY_SOURCE_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    COPY_TARGET_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    RUN_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    RUN_STARTS_FIELD_NUMBER: _ClassVar[int]
    RUN_TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    RUN_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    GIVEN_RUN_INDEXES_FIELD_NUMBER: _ClassVar[int]
    GIVEN_TOKEN_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    epoch: int
    term: int
    lease_id: str
    step_number: int
    settled_step_number: int
    released_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    fork_parent_ids: _containers.RepeatedScalarFieldContainer[int]
    fork_child_ids: _containers.RepeatedScalarFieldContainer[int]
    write_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    write_first_indexes: _containers.RepeatedScalarFieldContainer[int]
    write_block_counts: _containers.RepeatedScalarFieldContainer[int]
    write_block_ids: _containers.RepeatedScalarFieldContainer[int]
    copy_source_block_ids: _containers.RepeatedScalarFieldContainer[int]
    copy_target_block_ids: _containers.RepeatedScalarFieldContainer[int]
    run_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    run_starts: _containers.RepeatedScalarFieldContainer[int]
    run_token_counts: _containers.RepeatedScalarFieldContainer[int]
    run_samples: _containers.RepeatedScalarFieldContainer[bool]
    given_run_indexes: _containers.RepeatedScalarFieldContainer[int]
    given_token_digests: bytes
    def __init__(self, pool: _Optional[str] = ..., epoch: _Optional[int] = ..., term: _Optional[int] = ..., lease_id: _Optional[str] = ..., step_number: _Optional[int] = ..., settled_step_number: _Optional[int] = ..., released_sequence_ids: _Optional[_Iterable[int]] = ..., fork_parent_ids: _Optional[_Iterable[int]] = ..., fork_child_ids: _Optional[_Iterable[int]] = ..., write_sequence_ids: _Optional[_Iterable[int]] = ..., write_first_indexes: _Optional[_Iterable[int]] = ..., write_block_counts: _Optional[_Iterable[int]] = ..., write_block_ids: _Optional[_Iterable[int]] = ..., copy_source_block_ids: _Optional[_Iterable[int]] = ..., copy_target_block_ids: _Optional[_Iterable[int]] = ..., run_sequence_ids: _Optional[_Iterable[int]] = ..., run_starts: _Optional[_Iterable[int]] = ..., run_token_counts: _Optional[_Iterable[int]] = ..., run_samples: _Optional[_Iterable[bool]] = ..., given_run_indexes: _Optional[_Iterable[int]] = ..., given_token_digests: _Optional[bytes] = ...) -> None: ...
