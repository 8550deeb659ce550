"""A request's mistake affects no other: whatever refuses it, the requests beside it get the tokens that they get
alone.

The client checks a request before it sends it. So that the services have to refuse, the clients here change the
messages of requests, marked by their seeds and their prompt, on the way.
"""

from __future__ import annotations

import asyncio
import logging
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from integration.protocol_client import VOCAB_SIZE, draw_tokens

from quire.cache.v1 import cache_service_pb2
from quire.cli.launch import LocalServices
from quire.client import CacheClient, Engine, EngineConfig, InvalidRequest, RequestFailed, SamplingParams, WorkerClient
from quire.client.engine.sampling import MAX_SAMPLES
from quire.client.worker_client import StepAnswer
from quire.compute.v1 import worker_service_pb2
from quire.compute.v1.sampling_ranges import RANGES

NUM_NEW = 24
INNOCENTS = [
    (draw_tokens(11, seed=1), SamplingParams(max_tokens=NUM_NEW, temperature=0, ignore_eos=True)),
    (draw_tokens(6, seed=2), SamplingParams(max_tokens=NUM_NEW, ignore_eos=True, seed=7, presence_penalty=0.5)),
    (draw_tokens(9, seed=3), SamplingParams(max_tokens=NUM_NEW, temperature=0, ignore_eos=True, logprobs=2)),
]
MARK = 424_242
MARKS = range(MARK, MARK + 32)
"""Seeds of marked requests, of which several may run at once."""
BAD_PROMPT = draw_tokens(7, seed=4)


def bad_params(mark: int = MARK) -> SamplingParams:
    return SamplingParams(max_tokens=3, seed=mark, presence_penalty=0.5)


ChangeInput = Callable[[worker_service_pb2.SequenceInput], None]
ChangePlan = Callable[[cache_service_pb2.PlanStepRequest, cache_service_pb2.Admission], None]


@pytest.fixture(scope="module")
def services(model_dir: Path) -> Iterator[LocalServices]:
    arguments = ("--dtype", "float32", "--threads", "1", "--block-size", "4", "--max-num-seqs", "8")
    with LocalServices.start(model=model_dir, num_blocks=120, extra_worker_args=arguments) as services:
        yield services


def leave_input(entry: worker_service_pb2.SequenceInput) -> None:
    """Nothing."""


def leave_plan(request: cache_service_pb2.PlanStepRequest, admission: cache_service_pb2.Admission) -> None:
    """Nothing."""


@pytest.fixture(autouse=True)
def said(caplog: pytest.LogCaptureFixture) -> None:
    """Keep the engine's warnings at any level of an earlier test: they name the causes of recoveries."""
    caplog.set_level(logging.WARNING, logger="quire.client.engine")


@dataclass
class Changes:
    """Changes of the marked requests' messages: of each of their entries, of each of their admissions."""

    to_input: ChangeInput = leave_input
    to_plan: ChangePlan = leave_plan
    changed: set[int] = field(default_factory=set)
    """The seeds of requests with changed entries."""


class ChangedWorker(WorkerClient):
    changes: Changes

    async def run(self, request: worker_service_pb2.RunStepRequest) -> StepAnswer:
        for entry in request.inputs:
            if (seed := entry.sampling.seed) in MARKS:
                self.changes.to_input(entry)
                self.changes.changed.add(seed)
        return await super().run(request)


class ChangedCache(CacheClient):
    changes: Changes

    async def plan(self, request: cache_service_pb2.PlanStepRequest) -> cache_service_pb2.PlanStepResponse:
        for admission in request.admissions:
            if list(admission.token_ids) == BAD_PROMPT:
                self.changes.to_plan(request, admission)
        return await super().plan(request)


def connect(services: LocalServices, changes: Changes) -> Engine:
    cache = ChangedCache(services.cachemgr_address)
    cache.changes = changes

    def connect_worker(address: str) -> ChangedWorker:
        worker = ChangedWorker(address)
        worker.changes = changes
        return worker

    return Engine(cache, connect_worker, config=EngineConfig(max_recoveries=1))


async def tokens_of(engine: Engine, prompt: list[int], params: SamplingParams, begun: asyncio.Event) -> list[int]:
    tokens: list[int] = []
    async for chunk in engine.generate(prompt, params):
        tokens += chunk.token_ids
        begun.set()
    return tokens


async def run_innocents(engine: Engine, beside: Callable[[], Any]) -> list[list[int]]:
    """Their tokens; `beside` is awaited once all of them have begun."""
    begun = [asyncio.Event() for _ in INNOCENTS]
    tasks = [
        asyncio.create_task(tokens_of(engine, *request, event)) for request, event in zip(INNOCENTS, begun, strict=True)
    ]
    for event in begun:
        await event.wait()
    await beside()
    return [await task for task in tasks]


def assert_no_recovery(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """The engine has not recovered; if it has, the log says from what."""
    said = [record.getMessage() for record in caplog.records if record.name == "quire.client.engine.engine"]
    assert (engine.statistics().recoveries, [line for line in said if line.startswith("recovering")]) == (0, [])


@pytest.fixture(scope="module")
def alone(services: LocalServices) -> list[list[int]]:
    """The tokens of each innocent request, with nothing beside it."""

    async def main() -> list[list[int]]:
        async with connect(services, Changes()) as engine:
            return [await tokens_of(engine, *request, asyncio.Event()) for request in INNOCENTS]

    return asyncio.run(main())


# -- the worker refuses -------------------------------------------------------------------------------------------

SAMPLING_FIELDS = list(worker_service_pb2.SamplingParameters.DESCRIPTOR.fields)
# No value of these is refused.
WITHOUT_LIMIT = {"seed"}
# Every value of these is refused: this model has no tokenizer.
ALWAYS_REFUSED = {"grammar"}
MOST_FLOAT = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
LEAST_FLOAT = struct.unpack("<f", b"\x01\x00\x00\x00")[0]
ABOVE_1, ABOVE_2 = 1 + 2**-23, 2 + 2**-22
VALUES: dict[int, list[Any]] = {
    FieldDescriptor.CPPTYPE_FLOAT: [
        *(0.0, 1e-46, LEAST_FLOAT, 0.5, 1.0, ABOVE_1, 2.0, ABOVE_2, MOST_FLOAT),
        *(-LEAST_FLOAT, -1.0, -2.0, -ABOVE_2, -MOST_FLOAT, 50.0, math.nan, math.inf, -math.inf),
    ],
    FieldDescriptor.CPPTYPE_INT32: [-(2**31), -1, 0, 1, 20, 21, VOCAB_SIZE - 1, VOCAB_SIZE, 2**31 - 1],
    FieldDescriptor.CPPTYPE_INT64: [-(2**63), -1, 0, 1, 2**63 - 1],
    FieldDescriptor.CPPTYPE_MESSAGE: [
        worker_service_pb2.Grammar(),
        worker_service_pb2.Grammar(regex="a"),
        worker_service_pb2.Grammar(json_object=False),
        worker_service_pb2.Grammar(lark="x" * 65_537),
    ],
}


VALUES_BY_NAME: dict[str, list[Any]] = {
    "logit_bias": [
        *({0: value} for value in (0.0, 1.0, 100.0, -100.0, 101.0, -101.0, math.nan, math.inf)),
        *({-1: 1.0}, {VOCAB_SIZE - 1: 1.0}, {VOCAB_SIZE: 1.0}, dict.fromkeys(range(1_025), 1.0)),
    ],
    "bad_words": [[0], [0, VOCAB_SIZE - 1], [], [-1], [VOCAB_SIZE], [1] * 16, [1] * 17],
}
"""The fields that hold messages."""


def values_of(field: FieldDescriptor) -> list[Any]:
    """Values at the bounds of a field and beyond."""
    kind = VALUES.get(field.cpp_type, [])
    assert kind or field.name in VALUES_BY_NAME, f"{field.name} is of a new kind: say which values to try"
    return VALUES_BY_NAME.get(field.name, kind)


def put(entry: worker_service_pb2.SequenceInput, field: FieldDescriptor, value: Any) -> None:
    if field.name == "logit_bias":
        entry.sampling.logit_bias.update(value)
    elif field.name == "bad_words":
        entry.sampling.bad_words.add(token_ids=value)
    elif field.is_repeated:
        getattr(entry.sampling, field.name).append(value)
    elif field.name == "grammar":
        entry.sampling.grammar.CopyFrom(value)
        entry.sampling.output_begins_at = len(BAD_PROMPT)
    else:
        setattr(entry.sampling, field.name, value)


async def outcome_of(engine: Engine, changes: Changes, mark: int) -> str:
    """The field for which the request with this mark was refused, "" if it was served."""
    (outcome,) = await asyncio.gather(engine.complete([BAD_PROMPT], bad_params(mark)), return_exceptions=True)
    assert mark in changes.changed
    if isinstance(outcome, list):
        return ""
    assert isinstance(outcome, InvalidRequest), outcome
    assert outcome.metadata["sequence_id"]
    assert outcome.metadata["limit"]
    return outcome.metadata["field"]


@pytest.mark.parametrize("parameter", SAMPLING_FIELDS, ids=lambda parameter: parameter.name)
def test_a_value_that_the_worker_refuses_fails_its_own_request(
    parameter: FieldDescriptor, services: LocalServices, alone: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """Each value has a request, and all of these run beside each other and the innocent ones."""
    values = values_of(parameter)
    outcomes: list[str] = []

    async def main() -> None:
        changes = Changes(to_input=lambda entry: put(entry, parameter, values[MARKS.index(entry.sampling.seed)]))
        async with connect(services, changes) as engine:

            async def beside() -> None:
                marks = MARKS[: len(values)]
                outcomes.extend(await asyncio.gather(*(outcome_of(engine, changes, mark) for mark in marks)))

            assert await run_innocents(engine, beside) == alone
            assert_no_recovery(engine, caplog)

    asyncio.run(main())
    assert set(outcomes) <= {"", f"sampling.{parameter.name}"}
    refused = [outcome != "" for outcome in outcomes]
    if parameter.name in RANGES:
        assert refused == [not RANGES[parameter.name].allows(value) for value in values], values
    assert any(refused) == (parameter.name not in WITHOUT_LIMIT)
    assert all(refused) == (parameter.name in ALWAYS_REFUSED)


def other_tokens(entry: worker_service_pb2.SequenceInput) -> None:
    entry.token_ids[0] ^= 1


def more_tokens(entry: worker_service_pb2.SequenceInput) -> None:
    entry.token_ids.append(1)


def unknown_sequence(entry: worker_service_pb2.SequenceInput) -> None:
    entry.sequence_id = 2**31 - 1


def more_next_tokens(entry: worker_service_pb2.SequenceInput) -> None:
    entry.prompt_logprob_count = 1
    entry.next_token_ids.extend([1] * (len(entry.token_ids) + 1))


def unasked_next_tokens(entry: worker_service_pb2.SequenceInput) -> None:
    entry.next_token_ids.append(1)


def unknown_next_token(entry: worker_service_pb2.SequenceInput) -> None:
    entry.prompt_logprob_count = 1
    entry.next_token_ids.append(VOCAB_SIZE)


def too_many_prompt_logprobs(entry: worker_service_pb2.SequenceInput) -> None:
    entry.prompt_logprob_count = 21


def no_token_left(entry: worker_service_pb2.SequenceInput) -> None:
    entry.sampling.allowed_token_ids.append(5)
    entry.sampling.bad_words.add(token_ids=[5])


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        *((change, InvalidRequest) for change in (more_next_tokens, unasked_next_tokens, unknown_next_token)),
        *((change, InvalidRequest) for change in (too_many_prompt_logprobs, no_token_left)),
        (other_tokens, RequestFailed),
        (more_tokens, InvalidRequest),
        (unknown_sequence, InvalidRequest),
    ],
    ids=lambda value: value.__name__,
)
def test_tokens_that_the_worker_refuses_fail_their_own_request(
    change: ChangeInput,
    kind: type[Exception],
    services: LocalServices,
    alone: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with connect(services, Changes(to_input=change)) as engine:

            async def beside() -> None:
                with pytest.raises(kind):
                    await engine.complete([BAD_PROMPT], bad_params())

            assert await run_innocents(engine, beside) == alone
            assert_no_recovery(engine, caplog)

    asyncio.run(main())


# -- cachemgr refuses ---------------------------------------------------------------------------------------------


def long_salt(request: cache_service_pb2.PlanStepRequest, admission: cache_service_pb2.Admission) -> None:
    admission.salt = bytes(65)


def negative_limit(request: cache_service_pb2.PlanStepRequest, admission: cache_service_pb2.Admission) -> None:
    admission.max_compute_token_count = -1


def negative_token(request: cache_service_pb2.PlanStepRequest, admission: cache_service_pb2.Admission) -> None:
    admission.token_ids[0] = -1


def no_tokens(request: cache_service_pb2.PlanStepRequest, admission: cache_service_pb2.Admission) -> None:
    del admission.token_ids[:]


@pytest.mark.parametrize(
    "change", [long_salt, negative_limit, negative_token, no_tokens], ids=lambda change: change.__name__
)
def test_what_cachemgr_refuses_fails_its_own_request(
    change: ChangePlan, services: LocalServices, alone: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with connect(services, Changes(to_plan=change)) as engine:

            async def beside() -> None:
                with pytest.raises(InvalidRequest):
                    await engine.complete([BAD_PROMPT], bad_params())

            assert await run_innocents(engine, beside) == alone
            assert_no_recovery(engine, caplog)

    asyncio.run(main())


# -- what the client allows ---------------------------------------------------------------------------------------


def bounds_of(name: str) -> list[float]:
    """The least and the greatest value that the range of a float field has."""
    candidates = [-MOST_FLOAT, -2.0, -1.0, 0.0, LEAST_FLOAT, 1.0, 2.0, MOST_FLOAT]
    allowed = [value for value in candidates if RANGES[name].allows(value)]
    return [min(allowed), max(allowed)]


AT_BOUNDS: dict[str, list[Any]] = {
    "max_tokens": [1, 128 - len(BAD_PROMPT), None],
    **{name: bounds_of(name) for name, allowed in RANGES.items() if allowed.is_float},
    "logit_bias": [{}, {0: -100, VOCAB_SIZE - 1: 100}, dict.fromkeys(range(VOCAB_SIZE), 1.0)],
    "allowed_token_ids": [None, (0,), tuple(range(VOCAB_SIZE))],
    "bad_words": [(), ((0,),), ((VOCAB_SIZE - 1,) * 16,), tuple((a, b) for a in range(32) for b in range(32))],
    "min_tokens": [0, 2],
    "include_stop_str_in_output": [False, True],
    "skip_special_tokens": [False, True],
    "kept_special_tokens": [(), (0,)],
    "prompt_logprobs": [0, 20, None],
    "top_k": [0, 2**31 - 1],
    "seed": [-(2**63), 2**63 - 1, None],
    "stop": [()],  # there is no tokenizer here
    "stop_token_ids": [(), (0,), (VOCAB_SIZE - 1,)],
    "ignore_eos": [False, True],
    "speculative": [False, True],
    "logprobs": [0, 20, None],
    "grammar": [None],  # there is no tokenizer here
    "n": [1, MAX_SAMPLES],
    "best_of": [1, MAX_SAMPLES, None],
    "priority": [-(2**31), 2**31 - 1],
    "tenant": ["", "x" * 128],
    "timeout_s": [1e-9, 604_800, None],
}


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_what_the_client_allows_the_worker_accepts(name: str, services: LocalServices) -> None:
    assert name in AT_BOUNDS, f"{name} is new: say what its bounds are"

    async def main() -> None:
        async with connect(services, Changes()) as engine:
            given = [SamplingParams(**({"max_tokens": 2, "seed": 3} | {name: value})) for value in AT_BOUNDS[name]]
            for params, completion in zip(given, await engine.complete([BAD_PROMPT] * len(given), given), strict=True):
                assert len(completion.samples) == params.n
            statistics = engine.statistics()
            assert (statistics.recoveries, statistics.scheduler.failed_steps) == (0, 0)

    asyncio.run(main())
