"""The requests of a configuration, for a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quire.lab.config import Load
from quire.lab.errors import ConfigError
from quire.lab.requests import Request
from quire.lab.sessions import make_sessions
from quire.lab.traces import read_trace


def make_requests(load: Load, seed: int) -> list[Request]:
    """All requests of a run. The same load and seed give the same requests. Raises ConfigError."""
    generator = np.random.default_rng(seed)
    if load.sessions is not None:
        requests = make_sessions(load.sessions, load.requests, generator)
    elif load.trace is not None:
        requests = _timed(load, read_trace(load.trace, most=load.requests or None), generator)
    if not requests:
        raise ConfigError(f"load.trace is {str(load.trace)!r}: the file has no request")
    return _with_tenants(load, requests, generator)


def _timed(load: Load, requests: list[Request], generator: np.random.Generator) -> list[Request]:
    has_times = all(request.after is None for request in requests) and any(request.at_s for request in requests)
    if not load.rate and not has_times and len(requests) > 1:
        raise ConfigError.of_field("load.rate", load.rate, "above 0, for a trace without times")
    if not load.rate:
        return [replace(request, at_s=request.at_s / load.speed) for request in requests]
    heads = sum(request.after is None for request in requests)
    arrivals = iter(np.cumsum(generator.exponential(1 / load.rate, heads)).tolist())
    return [replace(request, at_s=next(arrivals) if request.after is None else load.think_s) for request in requests]


def _with_tenants(load: Load, requests: Sequence[Request], generator: np.random.Generator) -> list[Request]:
    """Give each session a tenant."""
    names, parts = list(load.tenants), np.array(list(load.tenants.values()), dtype=float)
    if names == [""]:
        return list(requests)
    sessions = sorted({request.session for request in requests})
    drawn = generator.choice(len(names), len(sessions), p=parts / parts.sum()).tolist()
    tenant_of = {session: names[index] for session, index in zip(sessions, drawn, strict=True)}
    return [replace(request, tenant=tenant_of[request.session]) for request in requests]
