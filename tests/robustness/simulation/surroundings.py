"""The clock, the randomness and the network of simulated processes, in place of the real ones while a world runs.

The code under test reads them as everybody does: `time.monotonic()`, `secrets.token_hex()`,
`grpc.aio.insecure_channel()`.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import grpc.aio
from robustness.simulation.world import World

EPOCH_S = 1_700_000_000.0
"""The wall clock's time at the beginning, by an exact machine."""


@contextlib.contextmanager
def surroundings(world: World, open_channel: Callable[[str, Any], Any]) -> Iterator[None]:
    """Give the code in this context the world's time, numbers from its seed, and channels of `open_channel`.

    open_channel takes a target and the options of a channel.
    """
    numbers = random.Random(world.random.getrandbits(64))

    def monotonic() -> float:
        return world.now

    def wall_clock() -> float:
        offset_s = 0.0 if world.running is None else world.running.clock_offset_s
        return EPOCH_S + world.now + offset_s

    def insecure_channel(target: str, options: Any = None, **_: Any) -> Any:
        return open_channel(target, options)

    changes: list[tuple[Any, str, Any]] = [
        (time, "monotonic", monotonic),
        (time, "perf_counter", monotonic),
        (time, "time", wall_clock),
        (time, "time_ns", lambda: int(wall_clock() * 1e9)),
        (random, "uniform", numbers.uniform),
        (random, "random", numbers.random),
        (random, "getrandbits", numbers.getrandbits),
        (secrets, "token_hex", lambda count=32: f"{numbers.getrandbits(8 * count):0{2 * count}x}"),
        (secrets, "token_bytes", numbers.randbytes),
        (secrets, "randbelow", numbers.randrange),
        (uuid, "uuid4", lambda: uuid.UUID(int=numbers.getrandbits(128), version=4)),
        (grpc.aio, "insecure_channel", insecure_channel),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
