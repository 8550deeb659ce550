"""The Python client: Engine for text, thin clients for everything else."""

from quire.client.cache_client import CacheApi, CacheClient
from quire.client.credentials import Credentials
from quire.client.engine import Engine, EngineConfig, EngineStatistics, Outage
from quire.client.errors import (
    AccessDenied,
    CredentialsUnusable,
    CursorExpired,
    EngineStopped,
    EpochChanged,
    InvalidRequest,
    LeaseLost,
    NotFound,
    OutOfRoom,
    ProtocolViolation,
    QuireError,
    RequestFailed,
    StepFailed,
    StepRefused,
    Unavailable,
    WorkerUnavailable,
)
from quire.client.outputs import Chunk, Completion, Sample, TokenLogprobs
from quire.client.sampling import SamplingParams
from quire.client.sequence import FinishReason
from quire.client.tokenizer import Tokenizer
from quire.client.worker_client import StepAnswer, WorkerApi, WorkerClient

__all__ = [
    "AccessDenied",
    "CacheApi",
    "CacheClient",
    "Chunk",
    "Completion",
    "Credentials",
    "CredentialsUnusable",
    "CursorExpired",
    "Engine",
    "EngineConfig",
    "EngineStatistics",
    "EngineStopped",
    "EpochChanged",
    "FinishReason",
    "InvalidRequest",
    "LeaseLost",
    "NotFound",
    "OutOfRoom",
    "Outage",
    "ProtocolViolation",
    "QuireError",
    "RequestFailed",
    "Sample",
    "SamplingParams",
    "StepAnswer",
    "StepFailed",
    "StepRefused",
    "TokenLogprobs",
    "Tokenizer",
    "Unavailable",
    "WorkerApi",
    "WorkerClient",
    "WorkerUnavailable",
]
