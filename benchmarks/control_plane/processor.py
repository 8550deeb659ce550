"""The processor time of cachemgr for a plan and for a report, from the bytes of a message to those of its answer.

The servicer runs in this process, without gRPC: messages are decoded as the handlers have them decoded. Calls are
measured in windows of some, all of one kind; a row's figure is the median of its windows.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from plans import (
    LEASE_TTL_S,
    POOL,
    PROMPT_TOKENS,
    decode_admissions,
    decode_extends,
    draw_tokens,
    registration,
    report_of,
)
from report import spread, table
from rich.table import Table

from quire.cache.v1 import attach_pb2, cache_service_pb2, grant_pb2
from quire.cachemgr._core import PlanRequest, StepReport
from quire.cachemgr.catalog import Catalog
from quire.cachemgr.service import messages
from quire.cachemgr.service.servicer import CacheServicer
from quire.cachemgr.state import StateDirectory

LEASE = "0123456789abcdef" * 2
TO_REACH_US = {"decode step, 256 sequences": 45}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Windows of a row, and calls in a window: no more steps than a lease may have in flight."""

    windows: int = 100
    calls: int = 16


QUICK = Sizes(windows=3, calls=2)


@dataclass(frozen=True, slots=True)
class Used:
    """Processor time of a call in each window, µs: its plan, and the report of its step."""

    row: str
    plan_us: list[float]
    report_us: list[float]


def measure(sizes: Sizes) -> list[Used]:
    """Every row, without a state directory and with one."""
    gc.disable()
    try:
        return [*asyncio.run(_measure(sizes, None)), *asyncio.run(_measure(sizes, "with a state directory"))]
    finally:
        gc.enable()


async def _measure(sizes: Sizes, stored: str | None) -> list[Used]:
    with tempfile.TemporaryDirectory() if stored else nullcontext() as folder:
        worker = MeasuringWorker(sizes, None if folder is None else Path(folder))
        await worker.servicer.AttachPool(worker.messages(), Unread())
    return [Used(f"{row}, {stored}" if stored else row, *times) for row, times in worker.used.items()]


class Unread:
    """The context of a stream with answers that nobody reads."""

    async def write(self, message: attach_pb2.AttachPoolResponse) -> None:
        pass


class MeasuringWorker:
    """A worker's stream. Between its messages it plans steps, as their client."""

    def __init__(self, sizes: Sizes, folder: Path | None) -> None:
        self._sizes = sizes
        self._catalog = Catalog(1) if folder is None else Catalog(1, begin_state=StateDirectory(folder).begin)
        self.servicer = CacheServicer(self._catalog)
        self.used: dict[str, tuple[list[float], list[float]]] = {}
        self._generator = np.random.default_rng(0)
        self._num_plans = 0
        self._num_reports = 0

    async def messages(self) -> AsyncIterator[attach_pb2.AttachPoolRequest | StepReport]:
        yield attach_pb2.AttachPoolRequest(register_pool=registration())
        self._catalog.open_lease(self._catalog.pool(POOL), LEASE, ttl_s=LEASE_TTL_S, now=time.monotonic())
        running = [self._body(admissions=decode_admissions(self._generator))]
        for report in self._reports(await self._plan(running)):
            yield messages.decode_from_worker(report)
        for row, body in self._rows().items():
            self.used[row] = [], []
            gc.collect()
            for _ in range(self._sizes.windows):
                bodies = [body(number) for number in range(self._sizes.calls)]
                begun = time.thread_time()
                answers = await self._plan(bodies)
                planned = time.thread_time()
                reports = self._reports(answers)
                reporting = time.thread_time()
                for report in reports:
                    yield messages.decode_from_worker(report)
                reported = time.thread_time()
                for times, seconds in zip(self.used[row], (planned - begun, reported - reporting), strict=True):
                    times.append(round(seconds / self._sizes.calls * 1e6, 2))

    def _rows(self) -> dict[str, Callable[[int], bytes]]:
        def admit(number: int) -> bytes:
            prompt = draw_tokens(self._generator, PROMPT_TOKENS)
            admission = cache_service_pb2.Admission(sequence_id=1_000 + number, token_ids=prompt)
            return self._body(admissions=[admission], release_sequence_ids=[admission.sequence_id])

        return {
            "empty plan": lambda number: self._body(),
            "decode step, 256 sequences": lambda number: self._body(extends=decode_extends()),
            "admission, 4,096 fresh tokens": admit,
        }

    def _body(self, **items: Any) -> bytes:
        self._num_plans += 1
        request_id = f"plan-{self._num_plans:027d}"
        plan = cache_service_pb2.PlanStepRequest(lease_id=LEASE, epoch=1, request_id=request_id, **items)
        return cache_service_pb2.PlanStepsRequest(plan=plan).SerializeToString()

    async def _plan(self, bodies: Sequence[bytes]) -> list[bytes]:
        return [answer async for answer in self.servicer.PlanSteps(decoded(bodies), None)]

    def _reports(self, answers: Sequence[bytes]) -> list[bytes]:
        reports = []
        for answer in answers:
            plan = cache_service_pb2.PlanStepsResponse.FromString(answer).plan
            self._num_reports += 1
            report = report_of(grant_pb2.StepGrant.FromString(plan.grant.grant), self._num_reports)
            reports.append(attach_pb2.AttachPoolRequest(step_report=report).SerializeToString())
        return reports


async def decoded(bodies: Sequence[bytes]) -> AsyncIterator[PlanRequest]:
    for body in bodies:
        yield PlanRequest.on_stream(body)


def table_of(used: Sequence[Used]) -> Table:
    made = table("µs of processor time from a message to its answer, without gRPC", "row", "plan", "to reach", "report")
    for each in used:
        limit = TO_REACH_US.get(each.row)
        made.add_row(each.row, spread(each.plan_us, ".1f"), f"{limit or ''}", spread(each.report_us, ".1f"))
    return made
