"""The requests of all schedules: a fixed list for each kind of model, so that the right answers are found once."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from robustness.simulation.digest_model import DigestFunction

from quire.client.engine.caching import NO_CACHE_PARAMS, CacheParams, CacheUse, Retention
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.scheduling.beam_search import BeamSearchParams
from quire.worker.memory.layer_spec import Causal, Chunked, Mask, Sliding

VOCAB_SIZE = 64
MAX_MODEL_LEN = 72
"""No prompt has more tokens with those of its answer."""
MOST_BEGINNING, MOST_OWN, MOST_GENERATED = 40, 8, 16
NUM_REQUESTS = 96
TENANTS = ("", "alice", "bob")


class ModelKind(Enum):
    """The layers of the model: each kind has other answers."""

    FULL = "full"
    WINDOW = "window"
    BOTH = "full and window"
    CHUNKS = "full and chunks"


WINDOW_TOKENS, CHUNK_TOKENS = 10, 16
_MASKS: dict[ModelKind, tuple[Mask, ...]] = {
    ModelKind.FULL: (Causal(), Causal()),
    ModelKind.WINDOW: (Sliding(WINDOW_TOKENS), Sliding(WINDOW_TOKENS)),
    ModelKind.BOTH: (Causal(), Sliding(WINDOW_TOKENS)),
    ModelKind.CHUNKS: (Causal(), Chunked(CHUNK_TOKENS)),
}
FUNCTIONS = {
    kind: DigestFunction(masks=masks, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)
    for kind, masks in _MASKS.items()
}


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, how it is sampled or searched, and what it asks of the cache."""

    prompt: tuple[int, ...]
    params: SamplingParams | BeamSearchParams
    cache: CacheParams = NO_CACHE_PARAMS

    @property
    def is_greedy(self) -> bool:
        """True if its tokens can be computed without a worker."""
        params = self.params
        return isinstance(params, SamplingParams) and params == SamplingParams(
            max_tokens=params.max_tokens, temperature=0, ignore_eos=params.ignore_eos, tenant=params.tenant
        )


@functools.cache
def requests() -> tuple[Request, ...]:
    """The same every time. Some begin alike, also those of other tenants and with another use of the cache."""
    generator = random.Random(5)
    beginnings = [_draw(generator, MOST_BEGINNING) for _ in range(5)]
    found = []
    for index in range(NUM_REQUESTS):
        shared = generator.choice((0, 3, 8, 16, 24, 32, MOST_BEGINNING))
        prompt = generator.choice(beginnings)[:shared] + _draw(generator, generator.randint(1, MOST_OWN))
        kind = _KINDS[index % len(_KINDS)]
        tenant = generator.choice(TENANTS)
        params, cache = kind(generator, index, tenant), _draw_cache(generator)
        if isinstance(params, BeamSearchParams):
            cache = replace(cache, reserve=False)  # beams are best effort
        found.append(Request(tuple(prompt), params, cache))
    return tuple(found)


def _draw(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(VOCAB_SIZE) for _ in range(count)]


def _draw_cache(generator: random.Random) -> CacheParams:
    if generator.random() < 0.6:
        return NO_CACHE_PARAMS
    return CacheParams(
        salt=generator.choice((b"", b"", b"salt")),
        cache_use=generator.choice(tuple(CacheUse)),
        retention=generator.choice(((), (Retention(0, 9, 1.0),), (Retention(8, 1), Retention(0, 7)))),
        expected_back_s=generator.choice((None, 0.5)),
        reserve=generator.random() < 0.2,
    )


def _greedy(generator: random.Random, index: int, tenant: str) -> SamplingParams:
    return SamplingParams(max_tokens=_length(generator), temperature=0, tenant=tenant)


def _seeded(generator: random.Random, index: int, tenant: str) -> SamplingParams:
    return SamplingParams(max_tokens=_length(generator), temperature=0.9, top_p=0.9, seed=index, tenant=tenant)


def _forked(generator: random.Random, index: int, tenant: str) -> SamplingParams:
    n = generator.choice((2, 2, 3))
    return SamplingParams(max_tokens=_length(generator), temperature=1.0, seed=index, n=n, tenant=tenant)


def _penalised(generator: random.Random, index: int, tenant: str) -> SamplingParams:
    return SamplingParams(
        max_tokens=_length(generator), temperature=0, repetition_penalty=1.4, frequency_penalty=0.5, tenant=tenant
    )


def _constrained(generator: random.Random, index: int, tenant: str) -> SamplingParams:
    return SamplingParams(
        max_tokens=10,
        temperature=0,
        min_tokens=4,
        stop_token_ids=(3, 40, 61),
        logit_bias={40: 2.0, 7: -100.0},
        bad_words=((21,), (30, 31)),
        tenant=tenant,
    )


def _measured(generator: random.Random, index: int, tenant: str) -> SamplingParams:
    return SamplingParams(max_tokens=_length(generator), temperature=0, logprobs=2, tenant=tenant)


def _best(generator: random.Random, index: int, tenant: str) -> SamplingParams:
    return SamplingParams(max_tokens=_length(generator), seed=index, n=1, best_of=3, tenant=tenant)


def _searched(generator: random.Random, index: int, tenant: str) -> BeamSearchParams:
    return BeamSearchParams(max_tokens=generator.randint(2, 4), beam_width=3, n=2, tenant=tenant)


def _length(generator: random.Random) -> int:
    return generator.choice((1, 2, 3, 4, 4, 6, 8, MOST_GENERATED))


_Kind = Callable[[random.Random, int, str], SamplingParams | BeamSearchParams]
_KINDS: tuple[_Kind, ...] = (
    *(_greedy, _forked, _greedy, _seeded, _searched, _greedy),
    *(_penalised, _constrained, _greedy, _measured, _best, _seeded),
)
