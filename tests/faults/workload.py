"""What clients ask for: a fixed list of requests, so that what each must answer can be found out once."""

from __future__ import annotations

import random
from dataclasses import dataclass

from quire.client.engine.sampling import SamplingParams

VOCAB_SIZE = 96
BLOCK_SIZE = 4
NUM_BLOCKS = 41
"""160 tokens and the null block: two clients' requests do not fit all at once, each alone does."""
MAX_STEP_TOKENS = 48
NUM_REQUESTS = 48


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how it is sampled."""

    prompt: tuple[int, ...]
    params: SamplingParams


def make_requests() -> list[Request]:
    """The same every time: greedy and seeded, one sample and two, some beginning alike."""
    generator = random.Random(5)
    beginnings = [draw(generator, 36) for _ in range(4)]
    requests = []
    for index in range(NUM_REQUESTS):
        shared = generator.choice((0, 7, 16, 20, 36))
        prompt = generator.choice(beginnings)[:shared] + draw(generator, generator.choice((1, 2, 5, 8)))
        requests.append(Request(tuple(prompt), draw_params(generator, index)))
    return requests


def draw(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(VOCAB_SIZE) for _ in range(count)]


def draw_params(generator: random.Random, index: int) -> SamplingParams:
    max_tokens = generator.randint(6, 24)
    kind = index % 4
    if kind == 0:
        return SamplingParams(max_tokens=max_tokens, temperature=0)
    if kind == 1:
        return SamplingParams(max_tokens=max_tokens, temperature=0.9, top_p=0.9, seed=index)
    if kind == 2:
        return SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=index, n=2)
    return SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=index, repetition_penalty=1.3)
