"""The Python client: Engine and LLM for text, thin clients for everything else.

engine/            continuous batching over both services: prompts in, chunks out
cache_client.py    cachemgr's calls        -> cachemgr
worker_client.py   the worker's calls      -> worker
channel.py         connections, deadlines, retries, ordered streams
credentials.py     TLS and tokens
errors.py          the exceptions of all of them
block_kinds.py     the kinds in which blocks are drawn
"""

from quire.client.cache_client import CacheApi, CacheClient
from quire.client.credentials import Credentials
from quire.client.engine.caching import CacheParams, CacheUse, Retention
from quire.client.engine.config import EngineConfig
from quire.client.engine.connection import Outage
from quire.client.engine.engine import Engine, EngineStatistics
from quire.client.engine.grammar import Grammar
from quire.client.engine.llm import LLM
from quire.client.engine.outputs import Beam, BeamCompletion, Chunk, Completion, Sample
from quire.client.engine.prompt_logprobs import PromptLogprobs, TokenLogprobs
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.scheduling.beam_search import BeamSearchParams
from quire.client.engine.scheduling.policy import Policy, PoolView, PriorityPolicy, in_order
from quire.client.engine.scheduling.sequence import Delivered, FinishReason, Sequence
from quire.client.engine.tokenizer import Tokenizer
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
from quire.client.worker_client import StepAnswer, WorkerApi, WorkerClient

__all__ = [
    "LLM",
    "AccessDenied",
    "Beam",
    "BeamCompletion",
    "BeamSearchParams",
    "CacheApi",
    "CacheClient",
    "CacheParams",
    "CacheUse",
    "Chunk",
    "Completion",
    "Credentials",
    "CredentialsUnusable",
    "CursorExpired",
    "Delivered",
    "Engine",
    "EngineConfig",
    "EngineStatistics",
    "EngineStopped",
    "EpochChanged",
    "FinishReason",
    "Grammar",
    "InvalidRequest",
    "LeaseLost",
    "NotFound",
    "OutOfRoom",
    "Outage",
    "Policy",
    "PoolView",
    "PriorityPolicy",
    "PromptLogprobs",
    "ProtocolViolation",
    "QuireError",
    "RequestFailed",
    "Retention",
    "Sample",
    "SamplingParams",
    "Sequence",
    "StepAnswer",
    "StepFailed",
    "StepRefused",
    "TokenLogprobs",
    "Tokenizer",
    "Unavailable",
    "WorkerApi",
    "WorkerClient",
    "WorkerUnavailable",
    "in_order",
]
