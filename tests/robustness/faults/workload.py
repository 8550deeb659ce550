"""The clients' requests: a fixed list, so that the correct answers can be found once."""

from __future__ import annotations

import random
from dataclasses import dataclass

from quire.client.engine.caching import NO_CACHE_PARAMS, Breakpoint, CacheParams, CacheUse
from quire.client.engine.grammar import Grammar
from quire.client.engine.sampling import SamplingParams

VOCAB_SIZE = 96
BLOCK_SIZE = 4
NUM_BLOCKS = 41
"""160 tokens and the null block: two clients' requests do not fit all at once, each alone does."""
MAX_STEP_TOKENS = 48
WINDOW = 10
"""Of the windowed layer, in models that have one: two and a half blocks."""
NUM_PLAIN = 48
"""Requests without a tenant and a grammar, the first ones of the list."""
NUM_FLEETING = 72
"""Requests without breakpoints, the first ones of the list."""
NUM_REQUESTS = 88
TENANTS = ("alice", "bob")
ADAPTERS = ("a", "b")
"""Of workers that have some."""
SHARES = """
[tenants.alice]
floor = 4
[tenants.bob]
limit = 20
keep_limit = 4
"""
"""Blocks: alice keeps some back, and bob's requests with two samples do not fit all at once. Breakpoints keep a quarter
of the pool for each tenant, but for bob."""
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9999}, "b": {"enum": ["ab", "the", None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, how it is sampled, and what it asks of the cache."""

    prompt: tuple[int, ...]
    params: SamplingParams
    cache: CacheParams = NO_CACHE_PARAMS


def make_requests() -> list[Request]:
    """The same every time: greedy and seeded, one sample and two, some beginning alike, also those of other tenants."""
    generator = random.Random(5)
    beginnings = [draw(generator, 36) for _ in range(4)]
    requests = []
    for index in range(NUM_REQUESTS):
        shared = generator.choice((0, 7, 16, 20, 36))
        prompt = generator.choice(beginnings)[:shared] + draw(generator, generator.choice((1, 2, 5, 8)))
        if index < NUM_PLAIN:
            requests.append(Request(tuple(prompt), draw_params(generator, index)))
        elif index < NUM_FLEETING:
            requests.append(Request(tuple(prompt), *draw_asking(generator, index)))
        else:
            requests.append(Request(tuple(prompt), *draw_keeping(generator, index, len(prompt))))
    return requests


def adapter_of(index: int) -> str | None:
    """Return the adapter of a request where workers have some: a third of the requests have none."""
    return (None, *ADAPTERS)[index % 3]


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


def draw_asking(generator: random.Random, index: int) -> tuple[SamplingParams, CacheParams]:
    """A request of a tenant that asks for more: a grammar, what it does with the cache, which tokens it may have."""
    common = {"tenant": generator.choice(TENANTS), "max_tokens": generator.randint(8, 24), "seed": index}
    text = "".join(generator.choice("0123456789") for _ in range(20))
    sampled = [
        SamplingParams(grammar=Grammar(regex=r"[0-9a-f]{6,18}(\n[a-c]+)?"), **common),
        SamplingParams(grammar=Grammar(choice=[text, text[:9] + "ab", "the" * 5]), temperature=0, **common),
        SamplingParams(grammar=Grammar(json_schema=SCHEMA), n=2, **common),
        SamplingParams(min_tokens=6, stop_token_ids=(3, 40, 65), logit_bias={40: 5.0, 7: -100.0}, **common),
        SamplingParams(prompt_logprobs=2, frequency_penalty=1.5, presence_penalty=-0.5, temperature=0, **common),
        SamplingParams(allowed_token_ids=tuple(range(20, 90)), bad_words=((21,), (30, 31)), n=2, **common),
    ][index % 6]
    return sampled, CacheParams(cache_use=generator.choice([*CacheUse]))


def draw_keeping(generator: random.Random, index: int, prompt_tokens: int) -> tuple[SamplingParams, CacheParams]:
    """A request with breakpoints, of a tenant or of none."""
    tenant, n = generator.choice(("", *TENANTS)), generator.choice((1, 1, 2))
    params = SamplingParams(max_tokens=generator.randint(4, 16), temperature=1.0, seed=index, n=n, tenant=tenant)
    ends = sorted(generator.sample(range(1, prompt_tokens + 1), min(prompt_tokens, generator.randint(1, 4))))
    return params, CacheParams(breakpoints=tuple(Breakpoint(end, generator.choice((1.0, 300.0))) for end in ends))
