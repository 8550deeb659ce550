from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_REASON_UNSPECIFIED: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_ARGUMENT: _ClassVar[ErrorReason]
    ERROR_REASON_REQUEST_ID_REUSED: _ClassVar[ErrorReason]
    ERROR_REASON_EMPTY_PROMPT: _ClassVar[ErrorReason]
    ERROR_REASON_SEQUENCE_TOO_LONG: _ClassVar[ErrorReason]
    ERROR_REASON_TOKEN_OUT_OF_RANGE: _ClassVar[ErrorReason]
    ERROR_REASON_POSITION_OUT_OF_RANGE: _ClassVar[ErrorReason]
    ERROR_REASON_POOL_NOT_FOUND: _ClassVar[ErrorReason]
    ERROR_REASON_LEASE_NOT_FOUND: _ClassVar[ErrorReason]
    ERROR_REASON_SEQUENCE_NOT_FOUND: _ClassVar[ErrorReason]
    ERROR_REASON_SEQUENCE_EXISTS: _ClassVar[ErrorReason]
    ERROR_REASON_EPOCH_CHANGED: _ClassVar[ErrorReason]
    ERROR_REASON_NOTHING_TO_COMPUTE: _ClassVar[ErrorReason]
    ERROR_REASON_POOL_ALREADY_ATTACHED: _ClassVar[ErrorReason]
    ERROR_REASON_TERM_SUPERSEDED: _ClassVar[ErrorReason]
    ERROR_REASON_OUT_OF_BLOCKS: _ClassVar[ErrorReason]
    ERROR_REASON_TOO_MANY_SEQUENCES: _ClassVar[ErrorReason]
    ERROR_REASON_TOO_MANY_STEPS: _ClassVar[ErrorReason]
    ERROR_REASON_TOKEN_BUDGET_SPENT: _ClassVar[ErrorReason]
    ERROR_REASON_POOL_DETACHED: _ClassVar[ErrorReason]
    ERROR_REASON_SHUTTING_DOWN: _ClassVar[ErrorReason]
ERROR_REASON_UNSPECIFIED: ErrorReason
ERROR_REASON_INVALID_ARGUMENT: ErrorReason
ERROR_REASON_REQUEST_ID_REUSED: ErrorReason
ERROR_REASON_EMPTY_PROMPT: ErrorReason
ERROR_REASON_SEQUENCE_TOO_LONG: ErrorReason
ERROR_REASON_TOKEN_OUT_OF_RANGE: ErrorReason
ERROR_REASON_POSITION_OUT_OF_RANGE: ErrorReason
ERROR_REASON_POOL_NOT_FOUND: ErrorReason
ERROR_REASON_LEASE_NOT_FOUND: ErrorReason
ERROR_REASON_SEQUENCE_NOT_FOUND: ErrorReason
ERROR_REASON_SEQUENCE_EXISTS: ErrorReason
ERROR_REASON_EPOCH_CHANGED: ErrorReason
ERROR_REASON_NOTHING_TO_COMPUTE: ErrorReason
ERROR_REASON_POOL_ALREADY_ATTACHED: ErrorReason
ERROR_REASON_TERM_SUPERSEDED: ErrorReason
ERROR_REASON_OUT_OF_BLOCKS: ErrorReason
ERROR_REASON_TOO_MANY_SEQUENCES: ErrorReason
ERROR_REASON_TOO_MANY_STEPS: ErrorReason
ERROR_REASON_TOKEN_BUDGET_SPENT: ErrorReason
ERROR_REASON_POOL_DETACHED: ErrorReason
ERROR_REASON_SHUTTING_DOWN: ErrorReason

class Error(_message.Message):
    __slots__ = ("code", "reason", "message", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    message: str
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...
