"""An exception at any place of the engine's work for one request fails that request, and no other.

The first run of a scenario lists each function of the engine that its loop calls with something of the victim: a
sequence, its request, a sampled token, its text. Further runs each raise an exception at the start of one of them.
"""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import pytest
from deadlines import DEADLINE_S
from unit.engine.test_engine import RECITED, TOKENIZER, Services, greedy, until

from quire.client import (
    CacheParams,
    Completion,
    Engine,
    EngineConfig,
    EngineStopped,
    FinishReason,
    QuireError,
    RequestFailed,
    SamplingParams,
)
from quire.client.engine.prompt_logprobs import PromptLogprobs
from quire.client.engine.request import Request
from quire.client.engine.scheduling.plans import Admission, ExpectedPrompt, Failed
from quire.client.engine.scheduling.sequence import Sequence

VICTIM, OTHER = "victim", "other"
NUM_TOKENS = 24
# Before the scheduler has looked at the sequences, no request is known to be at fault.
MAY_STOP = frozenset({"Scheduler.add"})


class SeededError(Exception):
    """The exception that a test raises."""


@dataclass
class Seed:
    """A place to raise at: the call of this number of a function with something of the victim. None: nowhere."""

    code: CodeType | None = None
    number: int = 0
    seen: dict[CodeType, int] = field(default_factory=dict)
    has_raised: bool = False

    def trace(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take a call; as Python's trace function."""
        code = frame.f_code
        if "/quire/client/engine/" not in code.co_filename or code.co_name.startswith("<") or not _is_in_loop():
            return
        if _is_check(frame):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if not any(_is_of_victim(frame.f_locals.get(name)) for name in names):
            return
        self.seen[code] = self.seen.get(code, 0) + 1
        if code is self.code and self.seen[code] == self.number and not self.has_raised:
            self.has_raised = True
            raise SeededError(code.co_qualname)


def _is_check(frame: FrameType | None) -> bool:
    """Return whether invariants are being checked, as in tests alone."""
    while frame is not None:
        if frame.f_code.co_name == "check_invariants":
            return True
        frame = frame.f_back
    return False


def _is_in_loop() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and task.get_name() == "quire-engine"


def _is_of_victim(value: Any) -> bool:
    match value:
        case Sequence():
            return value.tenant == VICTIM
        case Request():
            return value.first.tenant == VICTIM
        case Failed():
            return value.sequence.tenant == VICTIM
        case Admission() | ExpectedPrompt():
            return value.token_ids[0] == PROMPT[0]
        case SamplingParams():
            return value.tenant == VICTIM
        case PromptLogprobs():
            return True  # of the victim alone
        case list() | tuple():
            return bool(value) and all(_is_of_victim(each) for each in value)
    return False


@contextmanager
def traced(seed: Seed) -> Iterator[None]:
    """Within the block all calls pass the seed."""
    before = sys.gettrace()
    sys.settrace(seed.trace)
    try:
        yield
    finally:
        sys.settrace(before)


PROMPT = TOKENIZER.encode("v" * 70 + "\n")
SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {},
    "samples": {"n": 3, "logprobs": 1},
    "stop": {"stop": ("dark",), "min_tokens": 3, "presence_penalty": 0.5, "bad_words": ((9, 9),)},
    "prompt": {"prompt_logprobs": 1, "timeout_s": 3600.0},
}


async def _run(seed: Seed, fields: dict[str, Any]) -> tuple[Completion | QuireError, list[Any], EngineStopped | None]:
    """Run the victim between two others. Returns its outcome, those of the others, and the end of the loop."""
    services = Services()
    config = EngineConfig(verify=True, tenants=True)
    async with Engine(services, lambda _: services, config=config, tokenizer=TOKENIZER) as engine:
        with traced(seed):
            tasks = [
                asyncio.create_task(_complete(engine, "a\n", greedy(NUM_TOKENS, tenant=OTHER))),
                asyncio.create_task(
                    _complete(engine, PROMPT, greedy(NUM_TOKENS, tenant=VICTIM, **fields), salt=b"salt")
                ),
                asyncio.create_task(_complete(engine, "b\n", greedy(NUM_TOKENS, tenant=OTHER))),
            ]
            first, victim, last = await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE_S)
        died = asyncio.create_task(engine.failed())
        later = await _complete(engine, "c\n", greedy(NUM_TOKENS))
        await asyncio.sleep(0)
        if not died.done():
            await until(lambda: not engine.statistics().scheduler.num_running)
            scheduler = engine.statistics().scheduler
            assert (scheduler.num_waiting, scheduler.num_following, scheduler.num_draining) == (0, 0, 0)
            died.cancel()
            return victim, [first, last, later], None
        return victim, [first, last, later], died.result()


async def _complete(
    engine: Engine, prompt: Any, params: SamplingParams, *, salt: bytes = b""
) -> Completion | QuireError:
    try:
        return (await engine.complete([prompt], params, cache=CacheParams(salt=salt, expected_back_s=9.0)))[0]
    except QuireError as error:
        return error


def _is_whole(outcome: Completion | QuireError) -> bool:
    return isinstance(outcome, Completion) and all(
        sample.token_ids == tuple(RECITED[:NUM_TOKENS]) for sample in outcome.samples
    )


def _walk(fields: dict[str, Any]) -> Iterator[tuple[CodeType, int]]:
    """Yield each function that is called with something of the victim, with the first call's number and a later one."""
    seed = Seed()
    victim, others, stopped = asyncio.run(_run(seed, fields))
    assert isinstance(victim, Completion)
    assert all(map(_is_whole, others))
    assert stopped is None
    assert len(seed.seen) > 30, "the engine's functions are seen"
    for code, count in seed.seen.items():
        yield from ((code, number) for number in sorted({1, count // 2 + 1}))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_exception_anywhere_fails_one_request_and_no_other(scenario: str) -> None:
    stops = set()
    for code, number in _walk(SCENARIOS[scenario]):
        seed = Seed(code, number)
        victim, others, stopped = asyncio.run(_run(seed, SCENARIOS[scenario]))
        place = f"{code.co_qualname} call {number}"
        assert seed.has_raised, place
        if stopped is not None:
            stops.add(code.co_qualname)
            assert isinstance(others[-1], EngineStopped), place
            continue
        assert all(map(_is_whole, others)), (place, others)
        assert isinstance(victim, Completion | RequestFailed), (place, victim)
        if isinstance(victim, Completion):  # the exception came where the request had ended, or it was tried again
            reasons = {sample.finish_reason for sample in victim.samples}
            assert reasons <= {FinishReason.LENGTH, FinishReason.STOP}, place
            assert all(sample.token_ids == tuple(RECITED[: len(sample.token_ids)]) for sample in victim.samples), place
    assert stops <= MAY_STOP
