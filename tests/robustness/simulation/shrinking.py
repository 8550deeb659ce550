"""The shortest part of a schedule that fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from robustness.simulation.running import run
from robustness.simulation.schedule import Features, Schedule

MAX_TRIES = 200


def shrink(schedule: Schedule, failure: str) -> Schedule:
    """Leave out faults, requests and features, one after the other, as long as it still fails alike."""
    kind, num_tries, is_smaller = kind_of(failure), 0, True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(schedule):
            num_tries += 1
            if num_tries > MAX_TRIES:
                return schedule
            found = run(candidate).failure
            if found is not None and kind_of(found) == kind:
                schedule, is_smaller = candidate, True
                break
    return schedule


def kind_of(failure: str) -> str:
    """A failure's text without its numbers."""
    return re.sub(r"[\d.]+", "N", failure)[:60]


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    for index in reversed(range(len(schedule.faults))):
        faults = schedule.faults[:index] + schedule.faults[index + 1 :]
        yield replace(schedule, faults=faults)
    for gateway, calls in enumerate(schedule.calls):
        for index in reversed(range(len(calls))):
            if len(calls) > 1:
                fewer = calls[:index] + calls[index + 1 :]
                yield replace(schedule, calls=(*schedule.calls[:gateway], fewer, *schedule.calls[gateway + 1 :]))
    usual, features = Features(), schedule.features
    memory = ("host_cache_share", "num_host_blocks") if features.disk is None else ("disk",)
    for name in ("has_watcher", "has_shares", *memory, "runs_ahead", "num_ranks", "policy", "keeps_state"):
        if getattr(features, name) != getattr(usual, name):
            yield replace(schedule, features=replace(features, **{name: getattr(usual, name)}))
