import datetime

from google.protobuf import duration_pb2 as _duration_pb2
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

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_REASON_UNSPECIFIED: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_ARGUMENT: _ClassVar[ErrorReason]
    ERROR_REASON_TOKENS_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_BLOCK_OUT_OF_RANGE: _ClassVar[ErrorReason]
    ERROR_REASON_BAD_SIGNATURE: _ClassVar[ErrorReason]
    ERROR_REASON_LEASE_FENCED: _ClassVar[ErrorReason]
    ERROR_REASON_STEP_OUT_OF_ORDER: _ClassVar[ErrorReason]
    ERROR_REASON_EPOCH_CHANGED: _ClassVar[ErrorReason]
    ERROR_REASON_PRIOR_STEP_FAILED: _ClassVar[ErrorReason]
    ERROR_REASON_STEP_FAILED: _ClassVar[ErrorReason]
    ERROR_REASON_POOL_DETACHED: _ClassVar[ErrorReason]
    ERROR_REASON_SHUTTING_DOWN: _ClassVar[ErrorReason]
ERROR_REASON_UNSPECIFIED: ErrorReason
ERROR_REASON_INVALID_ARGUMENT: ErrorReason
ERROR_REASON_TOKENS_MISMATCH: ErrorReason
ERROR_REASON_BLOCK_OUT_OF_RANGE: ErrorReason
ERROR_REASON_BAD_SIGNATURE: ErrorReason
ERROR_REASON_LEASE_FENCED: ErrorReason
ERROR_REASON_STEP_OUT_OF_ORDER: ErrorReason
ERROR_REASON_EPOCH_CHANGED: ErrorReason
ERROR_REASON_PRIOR_STEP_FAILED: ErrorReason
ERROR_REASON_STEP_FAILED: ErrorReason
ERROR_REASON_POOL_DETACHED: ErrorReason
ERROR_REASON_SHUTTING_DOWN: ErrorReason

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model", "architecture", "tokenizer", "end_token_ids", "dtype", "kv_dtype", "device", "pool", "epoch", "geometry", "max_step_tokens", "max_logprob_count")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROB_COUNT_FIELD_NUMBER: _ClassVar[int]
    model: str
    architecture: str
    tokenizer: str
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    kv_dtype: str
    device: str
    pool: str
    epoch: int
    geometry: _attach_pb2.PoolGeometry
    max_step_tokens: int
    max_logprob_count: int
    def __init__(self, model: _Optional[str] = ..., architecture: _Optional[str] = ..., tokenizer: _Optional[str] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., device: _Optional[str] = ..., pool: _Optional[str] = ..., epoch: _Optional[int] = ..., geometry: _Optional[_Union[_attach_pb2.PoolGeometry, _Mapping]] = ..., max_step_tokens: _Optional[int] = ..., max_logprob_count: _Optional[int] = ...) -> None: ...

class SamplingParameters(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "seed", "logprob_count", "prompt_token_ids", "output_token_ids")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    seed: int
    logprob_count: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logprob_count: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SequenceInput(_message.Message):
    __slots__ = ("sequence_id", "token_ids", "sampling")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParameters
    def __init__(self, sequence_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParameters, _Mapping]] = ...) -> None: ...

class RunStepRequest(_message.Message):
    __slots__ = ("grant", "inputs", "skip")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    grant: _grant_pb2.SignedGrant
    inputs: _containers.RepeatedCompositeFieldContainer[SequenceInput]
    skip: bool
    def __init__(self, grant: _Optional[_Union[_grant_pb2.SignedGrant, _Mapping]] = ..., inputs: _Optional[_Iterable[_Union[SequenceInput, _Mapping]]] = ..., skip: _Optional[bool] = ...) -> None: ...

class RunStepResponse(_message.Message):
    __slots__ = ("step_number", "sequence_ids", "sampled_token_ids", "logprobs", "timings")
    STEP_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    step_number: int
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    sampled_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    timings: StepTimings
    def __init__(self, step_number: _Optional[int] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., sampled_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., timings: _Optional[_Union[StepTimings, _Mapping]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("sequence_id", "sampled_logprob", "top_token_ids", "top_logprobs")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    sampled_logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, sequence_id: _Optional[int] = ..., sampled_logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class StepTimings(_message.Message):
    __slots__ = ("queue", "prepare", "forward", "sample")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    queue: _duration_pb2.Duration
    prepare: _duration_pb2.Duration
    forward: _duration_pb2.Duration
    sample: _duration_pb2.Duration
    def __init__(self, queue: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prepare: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., forward: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., sample: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RunStepsRequest(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: RunStepRequest
    def __init__(self, step: _Optional[_Union[RunStepRequest, _Mapping]] = ...) -> None: ...

class RunStepsResponse(_message.Message):
    __slots__ = ("step", "error")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    step: RunStepResponse
    error: _error_pb2.Error
    def __init__(self, step: _Optional[_Union[RunStepResponse, _Mapping]] = ..., error: _Optional[_Union[_error_pb2.Error, _Mapping]] = ...) -> None: ...

class GetStatisticsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatisticsResponse(_message.Message):
    __slots__ = ("epoch", "term", "attached", "computed_step_count", "failed_step_count", "skipped_step_count", "refusal_counts", "computed_token_count", "sampled_token_count", "copied_block_count", "open_lease_count", "sequence_count", "step_in_flight_count", "unacknowledged_report_count", "forward_time")
    class RefusalCountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    FAILED_STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_COUNTS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    COPIED_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    OPEN_LEASE_COUNT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    STEP_IN_FLIGHT_COUNT_FIELD_NUMBER: _ClassVar[int]
    UNACKNOWLEDGED_REPORT_COUNT_FIELD_NUMBER: _ClassVar[int]
    FORWARD_TIME_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    term: int
    attached: bool
    computed_step_count: int
    failed_step_count: int
    skipped_step_count: int
    refusal_counts: _containers.ScalarMap[str, int]
    computed_token_count: int
    sampled_token_count: int
    copied_block_count: int
    open_lease_count: int
    sequence_count: int
    step_in_flight_count: int
    unacknowledged_report_count: int
    forward_time: _duration_pb2.Duration
    def __init__(self, epoch: _Optional[int] = ..., term: _Optional[int] = ..., attached: _Optional[bool] = ..., computed_step_count: _Optional[int] = ..., failed_step_count: _Optional[int] = ..., skipped_step_count: _Optional[int] = ..., refusal_counts: _Optional[_Mapping[str, int]] = ..., computed_token_count: _Optional[int] = ..., sampled_token_count: _Optional[int] = ..., copied_block_count: _Optional[int] = ..., open_lease_count: _Optional[int] = ..., sequence_count: _Optional[int] = ..., step_in_flight_count: _Optional[int] = ..., unacknowledged_report_count: _Optional[int] = ..., forward_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ChecksumBlocksRequest(_message.Message):
    __slots__ = ("block_ids",)
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChecksumBlocksResponse(_message.Message):
    __slots__ = ("checksums", "epoch")
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    epoch: int
    def __init__(self, checksums: _Optional[_Iterable[int]] = ..., epoch: _Optional[int] = ...) -> None: ...
