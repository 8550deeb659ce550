"""The Python client: Engine and LLM for text, thin clients for everything else.

engine/            continuous batching over both services: prompts in, chunks out
cache_client.py    cachemgr's calls        -> cachemgr
worker_client.py   the worker's calls      -> worker
channel.py         connections, deadlines, retries, ordered streams
credentials.py     TLS and tokens
errors.py          the exceptions of all of them
block_kinds.py     the kinds in which blocks are drawn

A name below is imported when it is used for the first time: a program that takes an error or a parameter from its own
module starts without the engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from quire.client.engine.speculative import SpeculativeConfig
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
    "SpeculativeConfig",
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

_NAMES = {
    "cache_client": ("CacheApi", "CacheClient"),
    "credentials": ("Credentials",),
    "engine.caching": ("CacheParams", "CacheUse", "Retention"),
    "engine.config": ("EngineConfig",),
    "engine.connection": ("Outage",),
    "engine.engine": ("Engine", "EngineStatistics"),
    "engine.grammar": ("Grammar",),
    "engine.llm": ("LLM",),
    "engine.outputs": ("Beam", "BeamCompletion", "Chunk", "Completion", "Sample"),
    "engine.prompt_logprobs": ("PromptLogprobs", "TokenLogprobs"),
    "engine.sampling": ("SamplingParams",),
    "engine.scheduling.beam_search": ("BeamSearchParams",),
    "engine.scheduling.policy": ("Policy", "PoolView", "PriorityPolicy", "in_order"),
    "engine.scheduling.sequence": ("Delivered", "FinishReason", "Sequence"),
    "engine.speculative": ("SpeculativeConfig",),
    "engine.tokenizer": ("Tokenizer",),
    "errors": (
        "AccessDenied",
        "CredentialsUnusable",
        "CursorExpired",
        "EngineStopped",
        "EpochChanged",
        "InvalidRequest",
        "LeaseLost",
        "NotFound",
        "OutOfRoom",
        "ProtocolViolation",
        "QuireError",
        "RequestFailed",
        "StepFailed",
        "StepRefused",
        "Unavailable",
        "WorkerUnavailable",
    ),
    "worker_client": ("StepAnswer", "WorkerApi", "WorkerClient"),
}
_MODULES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}


if not TYPE_CHECKING:  # a type checker would take every name for a public one

    def __getattr__(name: str) -> object:
        """Import the public name (PEP 562)."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
