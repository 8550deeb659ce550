"""Profiles of a decode step in the engine, in cachemgr and in the worker: processor time by function.

    quire bench control-plane profiles

256 sequences decode and a model takes next to nothing. Each process is profiled by itself, with the program of another
part of this benchmark: the engine through both real services, cachemgr's servicer without gRPC, and a worker with a
model that computes nothing, without gRPC. cProfile makes calls of Python longer, so a listing says what is large, not
how large the whole is. Without a profile, `quire bench control-plane` and its part `worker` measure the whole.
"""

from __future__ import annotations

import asyncio
import cProfile
import pstats
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import uvloop
from engine_cost import NEW_TOKENS, PROMPT_TOKENS, draw_prompts
from engines import Setup, generate, two_processes, until
from models import tiny_llama
from processor import MeasuringWorker, Unread
from processor import Sizes as Calls
from report import Findings, benchmark, table
from rich.progress import Progress
from rich.table import Table

import worker
from quire.worker.run.executor import Executor
from quire.worker.service.steps import Steps

LISTED = 10


@dataclass(frozen=True, slots=True)
class Line:
    """A function: its own µs a step, without those of the functions that it calls, and its calls a step."""

    function: str
    own_us: float
    calls: float


@dataclass(frozen=True, slots=True)
class Profile:
    """The functions of a process with the most time of their own, and all of its time in the profile, µs a step."""

    process: str
    total_us: float
    lines: list[Line]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sequences that decode, and steps that are profiled."""

    running: int = 256
    steps: int = 200


QUICK = Sizes(running=8, steps=3)


def listing(process: str, profiles: Sequence[cProfile.Profile], num_steps: int) -> Profile:
    """Add the profiles of a process's threads."""
    stats: Any = pstats.Stats(profiles[0])
    for profile in profiles[1:]:
        stats.add(profile)
    found = sorted(stats.stats.items(), key=lambda item: -item[1][2])
    lines = [
        Line(named(*function), round(own / num_steps * 1e6, 1), round(calls / num_steps, 1))
        for function, (_, calls, own, _, _) in found[:LISTED]
    ]
    return Profile(process, round(stats.total_tt / num_steps * 1e6, 1), lines)


def named(path: str, line: int, function: str) -> str:
    """Return "folder/file.py::function", without the line: it moves; a function without a file as it is."""
    return function if path == "~" else f"{'/'.join(Path(path).parts[-2:])}::{function}"


async def profile_engine(sizes: Sizes) -> Profile:
    """Profile the engine's loop in this process, over both services."""
    num_tokens = PROMPT_TOKENS + NEW_TOKENS
    with tempfile.TemporaryDirectory() as name:
        model = Path(name)
        tiny_llama(model)
        blocks = sizes.running * -(-num_tokens // 16) + 17
        setup = Setup(model, blocks, max_num_seqs=sizes.running, max_running_sequences=sizes.running, threads=1)
        async with two_processes(setup) as running:
            prompts = draw_prompts(sizes.running, PROMPT_TOKENS, seed=0)
            work = asyncio.ensure_future(generate(running.engine, prompts, [NEW_TOKENS] * sizes.running))
            await until(lambda: running.engine.statistics().scheduler.sampled_tokens > 3 * sizes.running)
            num_steps = 0
            profile = cProfile.Profile(time.thread_time)
            before = running.engine.statistics().computed_steps
            profile.enable()
            while num_steps < sizes.steps:
                await asyncio.sleep(0.2)  # each look at the statistics is in the profile
                num_steps = running.engine.statistics().computed_steps - before
            profile.disable()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
    return listing("engine", [profile], num_steps)


async def profile_cachemgr(sizes: Sizes) -> Profile:
    """Profile plans and reports of 256 sequences in cachemgr's servicer."""
    profile = cProfile.Profile(time.thread_time)
    calls = Calls(windows=max(1, sizes.steps // 16), calls=16)
    client = DecodingClient(calls, None)
    client.profile = profile
    await client.servicer.AttachPool(client.messages(), Unread())
    return listing("cachemgr", [profile], calls.windows * calls.calls)


class DecodingClient(MeasuringWorker):
    """Plans decode steps alone, and has cachemgr's part of them profiled."""

    profile: cProfile.Profile

    def _rows(self) -> dict[str, Callable[[int], bytes]]:
        name = "decode step, 256 sequences"
        return {name: super()._rows()[name]}

    async def _plan(self, bodies: Sequence[bytes]) -> list[bytes]:
        if not self.used:  # the admissions before
            return await super()._plan(bodies)
        self.profile.enable()
        try:
            return await super()._plan(bodies)
        finally:
            self.profile.disable()


async def profile_worker(sizes: Sizes) -> Profile:
    """Profile a worker's two threads, each in a run of its own: the grant's check with the answer, and the launch."""
    profiles = []
    for calls in (((Steps, "accept"), (worker, "encode_ended")), ((Executor, "launch"),)):
        profiles.append(cProfile.Profile(time.thread_time))
        with ExitStack() as stack:
            for owner, name in calls:
                stack.enter_context(patch.object(owner, name, profiled(getattr(owner, name), profiles[-1])))
            await worker.measure_work(sizes.running, steps=sizes.steps, windows=1)
    return listing("worker", profiles, sizes.steps + worker.NUM_WARM_UP_STEPS + 1)


def profiled(call: Callable[..., Any], profile: cProfile.Profile) -> Callable[..., Any]:
    """Return the call with what runs in it profiled."""

    def run(*args: Any, **kwargs: Any) -> Any:
        profile.enable()
        try:
            return call(*args, **kwargs)
        finally:
            profile.disable()

    return run


def table_of(profile: Profile) -> Table:
    made = table(f"{profile.process}: {profile.total_us:.0f} us a step", "function", "own, us a step", "calls a step")
    for line in profile.lines:
        made.add_row(line.function, f"{line.own_us:.1f}", f"{line.calls:.1f}")
    return made


def measure(quick: bool, progress: Progress) -> Findings:
    torch.set_num_threads(1)
    sizes = QUICK if quick else Sizes()
    profiles = []
    for profile in progress.track((profile_engine, profile_cachemgr, profile_worker), description="profiles"):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            profiles.append(runner.run(profile(sizes)))
    figures = {"sizes": asdict(sizes), "profiles": [asdict(each) for each in profiles]}
    return Findings([table_of(each) for each in profiles], figures)


main = benchmark("control-plane profiles", measure, packages=("grpcio", "protobuf", "numpy", "torch", "uvloop"))

if __name__ == "__main__":
    main()
