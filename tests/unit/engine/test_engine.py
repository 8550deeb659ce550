"""The engine over two services in the test's process: its results for callers, with any failure of the services.

The model here recites SCRIPT: after a prompt of p tokens, the token at position p + i is SCRIPT[i]. So the expected
output is a slice, and a token that is lost, doubled or out of place shows.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy
import pytest
from deadlines import DEADLINE_S
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from quire.cache.v1 import attach_pb2, cache_service_pb2
from quire.client import (
    Chunk,
    Completion,
    Delivered,
    Engine,
    EngineConfig,
    EngineStopped,
    EpochChanged,
    FinishReason,
    InvalidRequest,
    LeaseLost,
    OutOfRoom,
    QuireError,
    RequestFailed,
    SamplingParams,
    StepFailed,
    StepRefused,
    Tokenizer,
    Unavailable,
)
from quire.client.engine.grammar import Grammar
from quire.client.engine.outputs import SampleText
from quire.client.engine.requests import MAX_COMPILING_PER_TENANT
from quire.client.engine.scheduling.faults import BrokenInvariantError
from quire.compute.v1 import worker_service_pb2

SCRIPT = "It was a dark – and stormy 😀 night; the rain fell in torrents. STOP here. " * 4
END_TOKEN = 256


def byte_tokenizer() -> Tokenizer:
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = RawTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<end>"])
    return Tokenizer(raw)


TOKENIZER = byte_tokenizer()
RECITED = TOKENIZER.encode(SCRIPT)


class Answer:
    def __init__(self, services: "Services", outcome: worker_service_pb2.RunStepResponse | QuireError) -> None:
        self._services = services
        self._outcome = outcome

    async def result(self) -> worker_service_pb2.RunStepResponse:
        await self._services.gate.wait()
        if self._services.result_errors:
            self._outcome = self._services.result_errors.popleft()
        if isinstance(self._outcome, QuireError):
            raise self._outcome
        return self._outcome


class Services:
    """CacheApi and WorkerApi with room for everything. A sequence is [prompt length, tokens, scheduled].

    plan_errors, result_errors and lease_errors are raised by the next calls; a step with the token `poison` fails.
    Plans are not answered while `plan_gate` is closed; the answers of the next num_lost_answers, which are applied, are
    lost; those of the next late_plan_answers and late_step_answers are about the step before. A plan repeated under its
    request_id gets the answer that it got. While plans raise errors a lease can't be
    renewed either, unless can_renew; leases are neither made nor given back while `lease_gate` is closed.
    """

    def __init__(self) -> None:
        self.plan_errors: deque[BaseException] = deque()
        self.result_errors: deque[QuireError] = deque()
        self.lease_errors: deque[QuireError] = deque()
        self.poison = -1
        self.gate = asyncio.Event()
        self.gate.set()
        self.plan_gate = asyncio.Event()
        self.plan_gate.set()
        self.lease_gate = asyncio.Event()
        self.lease_gate.set()
        self.can_renew = False
        self.num_lost_answers = 0
        self.late_plan_answers = 0
        self.late_step_answers = 0
        self.num_hang_ups = 0
        self.compiling: list[str] = []
        self.compiles = asyncio.Event()
        self.asked: list[bytes] = []
        self.plans: list[cache_service_pb2.PlanStepRequest] = []
        self.steps_sent = 0
        self.open_leases: list[str] = []
        self.num_leases = 0
        self.num_waiting_for_lease = 0
        self.closed = 0
        self.epoch = 1
        self.device = ""
        self.step_s = 0.0
        self.forget()

    def forget(self) -> None:
        self.sequences: dict[int, list[int]] = {}
        self.prompts: dict[int, int] = {}
        self.poisoned: set[int] = set()
        self.pending: deque[tuple[int, list[tuple[int, int, bool]]]] = deque()
        self.step_number = 0
        self.answers: dict[str, tuple[bytes, cache_service_pb2.PlanStepResponse]] = {}

    def new_epoch(self) -> EpochChanged:
        self.forget()
        self.epoch += 1
        return EpochChanged("new memory", metadata={"epoch": str(self.epoch)})

    # CacheApi.

    async def create_lease(self, pool: str, *, ttl_s: float) -> cache_service_pb2.CreateLeaseResponse:
        self.num_waiting_for_lease += 1
        await self.lease_gate.wait()
        self.num_waiting_for_lease -= 1
        if self.lease_errors:
            raise self.lease_errors.popleft()
        self.forget()
        self.num_leases += 1
        self.open_leases.append(f"lease{self.num_leases}")
        return cache_service_pb2.CreateLeaseResponse(
            lease_id=self.open_leases[-1], pool="p", epoch=self.epoch, geometry=geometry(), worker_address="w"
        )

    async def renew_lease(self, lease_id: str) -> None:
        if self.plan_errors and not self.can_renew:
            raise Unavailable("away")

    async def delete_lease(self, lease_id: str) -> None:
        await self.lease_gate.wait()
        self.open_leases = [open_id for open_id in self.open_leases if open_id != lease_id]

    async def get_pool(self, pool: str) -> cache_service_pb2.Pool:
        return cache_service_pb2.Pool(name="p", epoch=self.epoch, geometry=geometry(), worker_address="w")

    async def plan(self, request: cache_service_pb2.PlanStepRequest) -> cache_service_pb2.PlanStepResponse:
        await asyncio.sleep(0)
        body = request.SerializeToString(deterministic=True)
        self.asked.append(body)
        await self.plan_gate.wait()
        if self.plan_errors:
            raise self.plan_errors.popleft()
        assert request.lease_id in self.open_leases
        if request.epoch != self.epoch:
            raise EpochChanged("other memory", metadata={"epoch": str(self.epoch)})
        if request.request_id in self.answers:
            known, answer = self.answers[request.request_id]
            assert known == body, "a request_id stands for one plan"
            return answer
        response = self.apply(request)
        if self.late_plan_answers:
            self.late_plan_answers -= 1
            response.step_number -= 1
        self.answers[request.request_id] = (body, response)
        if self.num_lost_answers:
            self.num_lost_answers -= 1
            raise Unavailable("the answer is lost")
        return response

    def apply(self, request: cache_service_pb2.PlanStepRequest) -> cache_service_pb2.PlanStepResponse:
        self.plans.append(request)
        self.step_number += 1
        response = cache_service_pb2.PlanStepResponse(step_number=self.step_number)
        for seq_id in request.release_sequence_ids:
            self.sequences.pop(seq_id, None)
        for fork in request.forks:
            for child_id in fork.child_sequence_ids:
                self.sequences[child_id] = [*self.sequences[fork.parent_sequence_id][:2], fork.token_count - 1]
                self.sequences[child_id][1] = fork.token_count
                self.prompts[child_id] = self.prompts[fork.parent_sequence_id]
        runs: list[tuple[int, int, bool]] = []
        for seq_id, count in zip(request.extends.sequence_ids, request.extends.token_counts, strict=True):
            self.run_one(response, runs, seq_id, count)
        budget = request.admission_token_budget
        for admission in request.admissions:
            if budget <= 0:
                refusal = response.refusals.add(item=cache_service_pb2.PLAN_ITEM_ADMISSION)
                refusal.sequence_id = admission.sequence_id
                refusal.error.reason = "TOKEN_BUDGET_SPENT"
                continue
            tokens = list(admission.token_ids)
            self.sequences[admission.sequence_id] = [0, len(tokens), 0]
            self.prompts[admission.sequence_id] = recited_from(tokens)
            if self.poison in tokens:
                self.poisoned.add(admission.sequence_id)
            response.admitted_sequence_ids.append(admission.sequence_id)
            response.admitted_cached_token_counts.append(0)
            count = min(budget, len(tokens))
            budget -= count
            self.run_one(response, runs, admission.sequence_id, count)
        response.block_counts.free_count = 1000
        response.grant.grant = str(self.step_number).encode()
        self.pending.append((self.step_number, runs))
        return response

    def run_one(self, response: Any, runs: list[tuple[int, int, bool]], seq_id: int, count: int) -> None:
        held = self.sequences[seq_id]
        start = held[2]
        assert start + count <= held[1]
        held[2] += count
        samples = held[2] == held[1]
        if start + count <= self.prompts[seq_id] or count > 1:
            response.given_run_indexes.append(len(runs))
        response.run_sequence_ids.append(seq_id)
        response.run_starts.append(start)
        response.run_token_counts.append(count)
        runs.append((seq_id, held[1], samples))
        held[1] += samples

    # WorkerApi.

    async def get_model(self) -> worker_service_pb2.GetModelResponse:
        return worker_service_pb2.GetModelResponse(
            end_token_ids=[END_TOKEN], max_step_tokens=64, max_logprob_count=4, device=self.device
        )

    async def check_grammar(self, grammar: worker_service_pb2.Grammar, output_token_ids: Sequence[int] = ()) -> float:
        self.compiling.append(grammar.regex)
        if grammar.regex.startswith("slow"):
            await self.compiles.wait()
        return 0.0

    async def run(self, request: worker_service_pb2.RunStepRequest) -> Answer:
        self.steps_sent += 1
        number, runs = self.pending.popleft()
        assert request.grant.grant == str(number).encode(), "grants arrive in order and untouched"
        assert request.skip or runs
        if request.skip:
            return Answer(self, worker_service_pb2.RunStepResponse(step_number=number))
        if any(seq_id in self.poisoned for seq_id, _, _ in runs):
            return Answer(self, StepFailed("broken", metadata={"step_number": str(number)}))
        sampled = [(seq_id, RECITED[length - self.prompts[seq_id]]) for seq_id, length, samples in runs if samples]
        number -= self.late_step_answers
        self.late_step_answers = 0
        response = worker_service_pb2.RunStepResponse(step_number=number)
        response.timings.forward.FromNanoseconds(round(self.step_s * 1e9))
        response.sequence_ids.extend(seq_id for seq_id, _ in sampled)
        response.sampled_token_ids.extend(token for _, token in sampled)
        for each in request.inputs:
            count = len(each.next_token_ids)
            if count:
                entry = response.prompt_logprobs.add(sequence_id=each.sequence_id, top_count=each.prompt_logprob_count)
                entry.logprobs.extend([-1.0] * count)
                entry.top_token_ids.extend([0] * (count * each.prompt_logprob_count))
                entry.top_logprobs.extend([-1.0] * (count * each.prompt_logprob_count))
        for seq_id, token in sampled:
            response.logprobs.add(sequence_id=seq_id, sampled_logprob=-1.0, top_token_ids=[token], top_logprobs=[-1.0])
        return Answer(self, response)

    async def hang_up(self) -> None:
        self.num_hang_ups += 1

    async def close(self) -> None:
        self.closed += 1


PROMPT_END = TOKENIZER.encode("\n")[0]


def recited_from(tokens: list[int]) -> int:
    """The length of a prompt, with or without generated tokens: it ends in a line break, and SCRIPT has none."""
    return tokens.index(PROMPT_END) + 1


def geometry() -> attach_pb2.PoolGeometry:
    return attach_pb2.PoolGeometry(
        block_size_tokens=4,
        block_count=1001,
        max_sequence_count=8,
        max_sequence_tokens=400,
        vocabulary_size=257,
    )


def greedy(max_tokens: int | None = 20, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **more)


def with_engine(body: Callable[[Engine, Services], Awaitable[None]], **config: Any) -> Services:
    async def main() -> Services:
        services = Services()
        async with Engine(
            services, lambda _: services, config=EngineConfig(verify=True, **config), tokenizer=TOKENIZER
        ) as engine:
            await asyncio.wait_for(body(engine, services), DEADLINE_S)
        assert services.open_leases == []
        assert services.closed == 2
        return services

    return asyncio.run(main())


async def read_into(found: list[Chunk], chunks: Any) -> None:
    async for chunk in chunks:
        found.append(chunk)


async def read(chunks: Any) -> list[Chunk]:
    return [chunk async for chunk in chunks]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def text_of(num_tokens: int) -> str:
    return bytes(SCRIPT, "utf8")[:num_tokens].decode("utf8", "ignore")


def test_text_streams() -> None:
    async def body(engine: Engine, services: Services) -> None:
        chunks = await read(engine.generate("once\n", greedy(60)))
        assert "".join(chunk.text for chunk in chunks) == text_of(60)
        assert [token for chunk in chunks for token in chunk.token_ids] == RECITED[:60]
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [FinishReason.LENGTH]
        assert len(chunks) > 10
        assert chunks[0].logprobs is None

    with_engine(body)


def test_a_batch_completes_with_all_samples() -> None:
    async def body(engine: Engine, services: Services) -> None:
        prompts = ["a\n", TOKENIZER.encode("b" * 100 + "\n"), "ccc\n"] * 4
        completions = await engine.complete(prompts, [greedy(5 + i, n=1 + i % 3) for i in range(12)])
        for i, completion in enumerate(completions):
            assert len(completion.samples) == 1 + i % 3
            assert all(sample.token_ids == tuple(RECITED[: 5 + i]) for sample in completion.samples)
        assert engine.statistics().num_requests == 0

    services = with_engine(body)
    assert sum(len(plan.forks) for plan in services.plans) > 0


def test_the_next_step_is_sent_before_the_last_tokens_are_back() -> None:
    async def body(engine: Engine, services: Services) -> None:
        services.gate.clear()
        reading = asyncio.create_task(read(engine.generate("a\n", greedy(5))))
        await turns()
        assert services.steps_sent == 2
        services.gate.set()
        await reading
        assert services.steps_sent <= 6

    with_engine(body)


def test_without_work_nothing_is_sent() -> None:
    async def body(engine: Engine, services: Services) -> None:
        await engine.complete(["a\n"], greedy(5))
        await turns()
        sent = services.steps_sent
        await turns(500)
        assert services.steps_sent == sent
        assert services.sequences == {}

    with_engine(body)


def test_a_stop_string_ends_a_sample_and_is_not_shown() -> None:
    async def body(engine: Engine, services: Services) -> None:
        (completion,) = await engine.complete(["a\n"], greedy(None, stop=("STOP",)))
        assert completion.text == SCRIPT[: SCRIPT.index("STOP")]
        assert completion.samples[0].finish_reason is FinishReason.STOP
        await turns()
        assert services.sequences == {}

    with_engine(body)


@pytest.mark.parametrize("late_by", range(4))
def test_nothing_comes_after_a_stop_string(late_by: int) -> None:
    """Also if the next token is there already: steps are taken together while a plan is not answered."""

    async def body(engine: Engine, services: Services) -> None:
        num_tokens = len(SCRIPT[: SCRIPT.index("STOP") + len("STOP")].encode())
        reading = asyncio.create_task(read(engine.generate("a\n", greedy(num_tokens + 9, stop=("STOP",)))))
        services.can_renew = True
        while services.steps_sent < num_tokens + late_by:
            await asyncio.sleep(0)
        services.plan_errors.append(Unavailable("away"))
        chunks = await reading
        assert sum(len(chunk.token_ids) for chunk in chunks) == num_tokens
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [FinishReason.STOP]

    with_engine(body)


def test_a_sample_that_met_its_stop_string_does_not_end_the_others() -> None:
    async def body(engine: Engine, services: Services) -> None:
        (completion,) = await engine.complete(["a\n"], greedy(None, stop=("STOP",), n=3))
        assert [sample.text for sample in completion.samples] == [SCRIPT[: SCRIPT.index("STOP")]] * 3
        assert len({sample.token_ids for sample in completion.samples}) == 1

    with_engine(body)


def test_an_end_token_has_no_text() -> None:
    async def body(engine: Engine, services: Services) -> None:
        letter = RECITED[5]
        (completion,) = await engine.complete(["a\n"], greedy(50, stop_token_ids=(letter,)))
        first = RECITED.index(letter) + 1
        assert completion.token_ids == tuple(RECITED[:first])
        assert completion.text == text_of(first - 1)
        assert completion.samples[0].finish_reason is FinishReason.STOP

    with_engine(body)


def test_logprobs_are_parallel_to_tokens() -> None:
    async def body(engine: Engine, services: Services) -> None:
        (completion,) = await engine.complete(["a\n"], greedy(9, logprobs=1))
        logprobs = completion.samples[0].logprobs
        assert logprobs is not None
        assert [entry.token_id for entry in logprobs] == RECITED[:9]
        assert logprobs[0].top == ((RECITED[0], -1.0),)

    with_engine(body)


def test_closing_the_iterator_releases_in_the_next_plan() -> None:
    async def body(engine: Engine, services: Services) -> None:
        async with contextlib.aclosing(engine.generate("a\n", greedy(300, n=3))) as chunks:
            async for _ in chunks:
                break
        await turns()
        assert services.sequences == {}
        assert engine.statistics().num_requests == 0

    with_engine(body)


def test_cancelling_a_task_releases_and_leaves_others_alone() -> None:
    async def body(engine: Engine, services: Services) -> None:
        doomed = asyncio.create_task(engine.complete(["a\n", "b\n"], greedy(300)))
        other = asyncio.create_task(engine.complete(["c\n"], greedy(40)))
        await turns(30)
        doomed.cancel()
        (completion,) = await other
        assert completion.token_ids == tuple(RECITED[:40])
        await turns()
        assert services.sequences == {}

    with_engine(body)


def test_a_request_ends_at_its_timeout_with_what_it_has() -> None:
    async def body(engine: Engine, services: Services) -> None:
        async def last_steps_hang() -> None:
            async with contextlib.aclosing(engine.generate("b\n", greedy(300))) as chunks:
                async for _ in chunks:
                    services.gate.clear()

        async with asyncio.TaskGroup() as group:
            hanging = group.create_task(last_steps_hang())
            (completion,) = await engine.complete(["a\n"], greedy(300, n=2, timeout_s=0.2))
            hanging.cancel()
        assert {sample.finish_reason for sample in completion.samples} == {FinishReason.TIMEOUT}
        for sample in completion.samples:
            assert list(sample.token_ids) == RECITED[: len(sample.token_ids)]
            assert sample.text == TOKENIZER.decode(sample.token_ids)
        services.gate.set()
        (completion,) = await engine.complete(["c\n"], greedy(40))
        assert completion.token_ids == tuple(RECITED[:40]), "others go on"
        await turns()
        assert services.sequences == {}

    with_engine(body)


def test_a_request_that_ends_before_its_timeout_knows_nothing_of_it() -> None:
    async def body(engine: Engine, services: Services) -> None:
        (completion,) = await engine.complete(["a\n"], greedy(9, timeout_s=DEADLINE_S))
        assert completion.samples[0].finish_reason is FinishReason.LENGTH

    with_engine(body)


def test_the_slow_grammars_of_a_tenant_leave_compilers_to_others() -> None:
    """Eight of them took all places of the engine, and the grammars of others waited behind all that followed."""

    async def body(engine: Engine, services: Services) -> None:
        def ask(regex: str, tenant: str) -> asyncio.Task[list[Completion]]:
            params = greedy(3, grammar=Grammar(regex=regex), tenant=tenant)
            return asyncio.create_task(engine.complete("once\n", params))

        slow = [ask(f"slow {number}", "acme") for number in range(6)]
        await until(lambda: len(services.compiling) >= MAX_COMPILING_PER_TENANT)
        await ask("quick", "other")
        await turns()
        assert services.compiling == ["slow 0", "slow 1", "quick"]
        slow[2].cancel()
        services.compiles.set()
        results = await asyncio.gather(*slow, return_exceptions=True)
        assert [isinstance(each, asyncio.CancelledError) for each in results] == [number == 2 for number in range(6)]
        assert services.compiling[3:] == ["slow 3", "slow 4", "slow 5"]

    with_engine(body)


def test_a_caller_who_leaves_too_much_unread_loses_its_request_and_no_other() -> None:
    async def body(engine: Engine, services: Services) -> None:
        slow = engine.generate("a\n", greedy(40))
        first = await anext(slow)
        (completion,) = await engine.complete(["c\n"], greedy(40))
        assert completion.token_ids == tuple(RECITED[:40]), "others go on"
        unread: list[Chunk] = []
        with pytest.raises(RequestFailed) as caught:
            await read_into(unread, slow)
        assert caught.value.reason == "TOO_SLOW"
        assert sum(len(chunk.token_ids) for chunk in (first, *unread)) < 40, "it ended before its last token"
        await turns()
        assert services.sequences == {}

    with_engine(body, max_unread_tokens=10)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"max_waiting_requests": 2}, "max_waiting_requests"),
        ({"max_waiting_requests_per_tenant": 2}, "max_waiting_requests_per_tenant"),
        ({"max_waiting_tokens": 5}, "max_waiting_tokens"),
    ],
)
def test_a_full_queue_refuses_one_request_and_no_other(config: dict[str, int], field: str) -> None:
    async def body(engine: Engine, services: Services) -> None:
        services.plan_gate.clear()
        waiting = [asyncio.create_task(engine.complete(["a\n"], greedy(9))) for _ in range(2)]
        await turns()
        with pytest.raises(OutOfRoom) as caught:
            await engine.complete(["a\n"], greedy(9))
        assert (caught.value.reason, caught.value.metadata["limited_by"]) == ("QUEUE_FULL", field)
        if field == "max_waiting_requests_per_tenant":
            waiting.append(asyncio.create_task(engine.complete(["a\n"], greedy(9, tenant="another"))))
        services.plan_gate.set()
        for (completion,) in await asyncio.gather(*waiting):
            assert completion.token_ids == tuple(RECITED[:9])
        (completion,) = await engine.complete(["a\n"], greedy(9))
        assert completion.token_ids == tuple(RECITED[:9]), "a request with a token is not waiting"

    with_engine(body, **config)


@pytest.mark.parametrize("timeout_s", [0, -1.0, 604_801, float("nan"), True, "1"])
def test_a_timeout_has_a_range(timeout_s: Any) -> None:
    with pytest.raises(InvalidRequest, match="timeout_s"):
        SamplingParams(timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ("", greedy(), "prompt"),
        ([], greedy(), "prompt"),
        ([300], greedy(), "prompt"),
        (["a"], greedy(), "prompt"),
        ([1] * 500, greedy(), "prompt"),
        ("a\n", greedy(500), "max_tokens"),
        ("a\n", greedy(logprobs=5), "logprobs"),
        ("a\n", greedy(stop_token_ids=(257,)), "stop_token_ids"),
        (5, greedy(), "prompt"),
        (None, greedy(), "prompt"),
        (b"a\n", greedy(), "prompt"),
        ([True], greedy(), "prompt"),
        ([1.0], greedy(), "prompt"),
        ("a\ud800\n", greedy(), "prompt"),
        ("a\n", 3, "params"),
    ],
)
def test_what_can_not_be_served_is_refused_at_once(prompt: Any, params: SamplingParams, field: str) -> None:
    async def body(engine: Engine, services: Services) -> None:
        with pytest.raises(InvalidRequest) as caught:
            engine.generate(prompt, params)
        assert caught.value.metadata["field"] == field
        assert services.plans == []

    with_engine(body)


PROMPTS_THAT_ARE_ONE = [
    "a\n",
    ["a\n"],
    TOKENIZER.encode("a\n"),
    [TOKENIZER.encode("a\n")],
    tuple(TOKENIZER.encode("a\n")),
    numpy.array(TOKENIZER.encode("a\n")),
    [numpy.array(TOKENIZER.encode("a\n"), dtype=numpy.int32)],
]


@pytest.mark.parametrize("prompts", PROMPTS_THAT_ARE_ONE, ids=repr)
def test_a_string_is_one_prompt_and_so_are_token_ids(prompts: Any) -> None:
    async def body(engine: Engine, services: Services) -> None:
        (completion,) = await engine.complete(prompts, greedy(20))
        assert completion.prompt_token_ids == tuple(TOKENIZER.encode("a\n"))
        assert completion.token_ids == tuple(RECITED[:20])

    with_engine(body)


@pytest.mark.parametrize(
    ("prompts", "params", "field"),
    [
        (5, None, "prompts"),
        (b"a\n", None, "prompts"),
        ([["a"]], None, "prompt"),
        ([1, "a"], None, "prompt"),
        (["a\n"], [], "params"),
        (["a\n"], {"max_tokens": 3}, "params"),
        (["a\n"], 3, "params"),
        (["a\n", "b\ud800"], None, "prompt"),
    ],
)
def test_several_that_can_not_be_served_are_refused(prompts: Any, params: Any, field: str) -> None:
    async def body(engine: Engine, services: Services) -> None:
        with pytest.raises(InvalidRequest) as caught:
            await engine.complete(prompts, params)
        assert caught.value.metadata["field"] == field
        assert services.plans == []

    with_engine(body)


def test_fields_of_sampling_params_are_keywords() -> None:
    async def body(engine: Engine, services: Services) -> None:
        chunks = await read(engine.generate("a\n", max_tokens=3, temperature=0))
        assert [token for chunk in chunks for token in chunk.token_ids] == RECITED[:3]
        each = await engine.complete(["a\n", "b\n"], [greedy(9), greedy(9, n=2)], max_tokens=4)
        assert [len(sample.token_ids) for one in each for sample in one.samples] == [4, 4, 4]
        with pytest.raises(InvalidRequest, match="max_tokens"):
            engine.generate("a\n", max_tokens=0)
        with pytest.raises(TypeError, match="max_token"):
            engine.generate("a\n", max_token=3)

    with_engine(body)


# Failures.


def test_a_new_epoch_costs_no_token_and_doubles_none() -> None:
    async def body(engine: Engine, services: Services) -> None:
        reading = asyncio.create_task(read(engine.generate("a\n", greedy(60, n=2))))
        await turns(30)
        services.plan_errors.append(services.new_epoch())
        chunks = await reading
        for index in (0, 1):
            tokens = [token for chunk in chunks if chunk.index == index for token in chunk.token_ids]
            assert tokens == RECITED[:60]
        assert services.num_leases == 1
        assert engine.statistics().recoveries == 1

    with_engine(body)


@pytest.mark.parametrize(
    "error",
    [Unavailable("gone"), StepRefused("?"), LeaseLost("?", reason="LEASE_FENCED"), InvalidRequest("?")],
    ids=lambda error: error.reason,
)
def test_a_lost_step_is_computed_again_under_a_new_lease(error: QuireError) -> None:
    async def body(engine: Engine, services: Services) -> None:
        reading = asyncio.create_task(read(engine.generate("a\n", greedy(60))))
        await turns(30)
        services.result_errors.append(error)
        chunks = await reading
        assert [token for chunk in chunks for token in chunk.token_ids] == RECITED[:60]
        assert services.num_leases == 2

    with_engine(body)


def test_tokens_of_later_steps_do_not_count_when_an_answer_is_lost() -> None:
    async def body(engine: Engine, services: Services) -> None:
        services.gate.clear()
        reading = asyncio.create_task(read(engine.generate("a\n", greedy(30))))
        await turns()
        assert services.steps_sent == 2
        services.result_errors.append(Unavailable("the first answer is lost, the second would come"))
        services.gate.set()
        chunks = await reading
        assert [token for chunk in chunks for token in chunk.token_ids] == RECITED[:30]

    with_engine(body)


def test_services_that_come_back_in_time_are_waited_for() -> None:
    async def body(engine: Engine, services: Services) -> None:
        reading = asyncio.create_task(read(engine.generate("a\n", greedy(30))))
        await turns(20)
        services.lease_errors.extend([Unavailable("still away")] * 2)
        services.plan_errors.append(LeaseLost("away, and back without its books"))
        chunks = await reading
        assert [token for chunk in chunks for token in chunk.token_ids] == RECITED[:30]

    with_engine(body)


@pytest.mark.parametrize("of", ["plan", "step"])
def test_an_answer_that_is_about_another_step_is_not_taken(of: str) -> None:
    """A message that was lost or came twice shifts all answers behind it; and ids of sequences stay the same."""

    async def body(engine: Engine, services: Services) -> None:
        reading = asyncio.create_task(read(engine.generate("a\n", greedy(60))))
        await turns(30)
        setattr(services, f"late_{of}_answers", 1)
        chunks = await reading
        assert [token for chunk in chunks for token in chunk.token_ids] == RECITED[:60]
        assert engine.statistics().recoveries == 1
        assert services.num_hang_ups == 2, "of both streams: more that is on its way would be taken for later ones'"

    with_engine(body)


@pytest.mark.parametrize("is_applied", [True, False], ids=["the answer is lost", "the request is lost"])
def test_a_plan_without_an_answer_is_repeated_under_its_request_id(is_applied: bool) -> None:
    async def body(engine: Engine, services: Services) -> None:
        reading = asyncio.create_task(read(engine.generate("a\n", greedy(60, n=2))))
        await turns(30)
        if is_applied:
            services.num_lost_answers = 1
        services.plan_errors.extend([Unavailable("away")] * 3 * (not is_applied))
        services.plan_errors.append(Unavailable("not attached yet", reason="POOL_DETACHED", retry_after_s=0.001))
        chunks = await reading
        for index in (0, 1):
            tokens = [token for chunk in chunks if chunk.index == index for token in chunk.token_ids]
            assert tokens == RECITED[:60]
        await turns()
        assert len(services.plans) == len(set(services.asked)) < len(services.asked)
        assert (services.num_leases, engine.statistics().recoveries) == (1, 0)

    with_engine(body)


def on_a_gpu(body: Callable[[Engine, Services], Awaitable[None]], *, device: str = "cuda:0", step_s: float) -> None:
    """Run the body with a worker on this device, where a step takes so long."""

    async def main() -> None:
        services = Services()
        services.device, services.step_s = device, step_s
        async with Engine(services, lambda _: services, tokenizer=TOKENIZER) as engine:
            await asyncio.wait_for(body(engine, services), DEADLINE_S)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("device", "step_s", "most"),
    [("cuda:0", 0.001, 4), ("cuda:0", 0.002, 2), ("cuda:0", 0.0, 2), ("cpu", 0.001, 2)],
    ids=["short", "long", "untold", "cpu"],
)
def test_four_steps_are_in_flight_while_those_of_a_gpu_are_short(device: str, step_s: float, most: int) -> None:
    async def body(engine: Engine, services: Services) -> None:
        async def num_in_flight() -> int:
            services.gate.clear()
            await turns()
            number = engine.statistics().scheduler.num_steps_in_flight
            services.gate.set()
            return number

        chunks = engine.generate("a\n", greedy(60))
        tokens = list((await anext(chunks)).token_ids)
        assert await num_in_flight() == most
        services.step_s = 0.005
        while len(tokens) < 20:
            tokens += (await anext(chunks)).token_ids
        assert await num_in_flight() == 2
        tokens += [token for chunk in await read(chunks) for token in chunk.token_ids]
        assert tokens == RECITED[:60]

    on_a_gpu(body, device=device, step_s=step_s)


def test_with_four_steps_in_flight_nobody_gets_a_token_behind_the_end() -> None:
    """At max_tokens and at a stop string, alone and beside others, streamed or not."""

    async def body(engine: Engine, services: Services) -> None:
        stopped, short, long = await asyncio.gather(
            engine.complete(["a\n"], greedy(None, stop=("STOP",))),
            engine.complete(["bb\n"], greedy(7)),
            read(engine.generate("c\n", greedy(90))),
        )
        assert stopped[0].text == SCRIPT[: SCRIPT.index("STOP")]
        assert list(short[0].token_ids) == RECITED[:7]
        assert [token for chunk in long for token in chunk.token_ids] == RECITED[:90]
        assert engine.statistics().scheduler.num_steps_in_flight <= 4

    on_a_gpu(body, step_s=0.0005)


def test_a_failure_with_four_steps_in_flight_loses_no_token() -> None:
    async def body(engine: Engine, services: Services) -> None:
        chunks = engine.generate("a\n", greedy(60))
        tokens = list((await anext(chunks)).token_ids)
        services.gate.clear()
        await turns()
        assert engine.statistics().scheduler.num_steps_in_flight == 4
        services.result_errors.append(StepFailed("broken"))
        services.result_errors.extend([StepFailed("broken", reason="PRIOR_STEP_FAILED")] * 3)
        services.gate.set()
        tokens += [token for chunk in await read(chunks) for token in chunk.token_ids]
        assert tokens == RECITED[:60]

    on_a_gpu(body, step_s=0.001)


def test_steps_in_flight_are_taken_while_a_plan_is_not_answered() -> None:
    async def main() -> None:
        services = Services()
        async with Engine(services, lambda _: services, tokenizer=TOKENIZER) as engine:
            services.gate.clear()
            chunks = engine.generate("a\n", greedy(60))
            first = asyncio.create_task(anext(chunks))
            await turns()
            assert services.steps_sent == 2
            services.plan_gate.clear()
            services.gate.set()
            tokens = list((await first).token_ids)
            while len(tokens) < services.steps_sent:
                tokens += (await asyncio.wait_for(anext(chunks), DEADLINE_S)).token_ids
            assert tokens == RECITED[: services.steps_sent]
            services.plan_gate.set()
            tokens += [token for chunk in await read(chunks) for token in chunk.token_ids]
            assert tokens == RECITED[:60]
            assert services.num_leases == 1

    asyncio.run(main())


def test_a_step_that_fails_while_a_plan_is_not_answered_is_computed_again() -> None:
    async def body(engine: Engine, services: Services) -> None:
        services.gate.clear()
        reading = asyncio.create_task(read(engine.generate("a\n", greedy(60))))
        await turns()
        services.result_errors.append(StepFailed("broken"))
        services.result_errors.append(StepFailed("broken", reason="PRIOR_STEP_FAILED"))
        services.plan_errors.extend([Unavailable("away")] * 3)
        services.gate.set()
        chunks = await reading
        assert [token for chunk in chunks for token in chunk.token_ids] == RECITED[:60]
        assert services.num_leases == 1

    with_engine(body)


def test_a_failure_that_cachemgr_knows_before_the_engine_is_no_reason_to_recover() -> None:
    async def body(engine: Engine, services: Services) -> None:
        apply = services.apply

        def apply_after_a_failure(request: cache_service_pb2.PlanStepRequest) -> cache_service_pb2.PlanStepResponse:
            if len(services.plans) == 1:
                ((seq_id, held),) = services.sequences.items()
                held[1:] = services.prompts[seq_id], 0
                services.result_errors.append(StepFailed("broken"))
            return apply(request)

        services.apply = apply_after_a_failure  # type: ignore[method-assign]
        chunks = await read(engine.generate("a\n", greedy(60)))
        assert [token for chunk in chunks for token in chunk.token_ids] == RECITED[:60]
        statistics = engine.statistics()
        assert (statistics.recoveries, statistics.scheduler.failed_steps) == (0, 2)

    with_engine(body)


@pytest.mark.parametrize("what", ["lease", "epoch", "worker"])
def test_a_plan_is_not_repeated_any_more_when_it_is_known_to_be_in_vain(what: str) -> None:
    async def body(engine: Engine, services: Services) -> None:
        loop = asyncio.get_running_loop()
        services.gate.clear()
        reading = asyncio.create_task(read(engine.generate("a\n", greedy(60))))
        await turns()
        services.plan_errors.extend([Unavailable("away")] * 3)
        if what == "worker":
            services.plan_errors.extend([Unavailable("away")] * 4)
            services.result_errors.append(Unavailable("away too"))
        else:
            services.plan_errors.append(LeaseLost("gone") if what == "lease" else services.new_epoch())
        began = loop.time()
        services.gate.set()
        chunks = await reading
        assert [token for chunk in chunks for token in chunk.token_ids] == RECITED[:60]
        assert loop.time() - began < 20, "it did not wait for the lease to run out"
        assert services.num_leases == (1 if what == "epoch" else 2)

    with_engine(body, lease_ttl_s=600, recovery_timeout_s=600)


def test_a_plan_is_repeated_only_while_its_lease_can_be_alive() -> None:
    async def body(engine: Engine, services: Services) -> None:
        loop = asyncio.get_running_loop()
        services.plan_errors.extend([Unavailable("away")] * 1000)
        began = loop.time()
        reading = asyncio.create_task(read(engine.generate("a\n", greedy(20))))
        await until(lambda: services.num_leases == 2)
        assert 0.9 < loop.time() - began < 20
        services.plan_errors.clear()
        assert [token for chunk in await reading for token in chunk.token_ids] == RECITED[:20]

    with_engine(body, lease_ttl_s=1, recovery_timeout_s=600, max_recoveries=100)


def test_a_lease_that_is_renewed_is_alive() -> None:
    async def body(engine: Engine, services: Services) -> None:
        loop = asyncio.get_running_loop()
        services.can_renew = True
        services.plan_errors.extend([Unavailable("away")] * 1000)
        began = loop.time()
        reading = asyncio.create_task(read(engine.generate("a\n", greedy(20))))
        await until(lambda: loop.time() - began > 2.0)
        services.plan_errors.clear()
        assert [token for chunk in await reading for token in chunk.token_ids] == RECITED[:20]
        assert services.num_leases == 1

    with_engine(body, lease_ttl_s=1)


def test_an_outage_that_is_over_does_not_count_for_the_next_one() -> None:
    async def body(engine: Engine, services: Services) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        services.plan_errors.extend([Unavailable("away")] * 2)
        await engine.complete(["a\n"], greedy(5))
        await until(lambda: loop.time() - began > 3.0)
        services.plan_errors.extend([Unavailable("away")] * 2)
        await engine.complete(["a\n"], greedy(5))
        assert services.num_leases == 1

    with_engine(body, recovery_timeout_s=3.0)


def test_services_that_do_not_answer_at_all_fail_the_requests_in_time() -> None:
    async def body(engine: Engine, services: Services) -> None:
        services.plan_errors.append(LeaseLost("gone"))
        services.lease_gate.clear()
        with pytest.raises(Unavailable, match="in time"):
            await engine.complete(["a\n"], greedy(5))
        services.lease_gate.set()
        (completion,) = await engine.complete(["a\n"], greedy(5))
        assert completion.token_ids == tuple(RECITED[:5])

    async def main() -> None:
        services = Services()
        config = EngineConfig(recovery_timeout_s=0)
        async with Engine(services, lambda _: services, config=config, tokenizer=TOKENIZER) as engine:
            await body(engine, services)
            services.lease_gate.clear()  # closing does not wait for it either

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_closing_the_engine_ends_the_repetitions_at_once() -> None:
    async def main() -> None:
        services = Services()
        loop = asyncio.get_running_loop()
        config = EngineConfig(lease_ttl_s=600, recovery_timeout_s=600)
        async with Engine(services, lambda _: services, config=config, tokenizer=TOKENIZER) as engine:
            services.plan_errors.extend([Unavailable("away")] * 1000)
            waiting = asyncio.create_task(engine.complete(["a\n"], greedy(300)))
            await until(lambda: len(services.asked) >= 3)
            closing = loop.time()
        with pytest.raises(EngineStopped):
            await waiting
        assert loop.time() - closing < 5
        num_asked = len(services.asked)
        await turns()
        assert len(services.asked) == num_asked

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_an_error_says_what_was_delivered_and_the_rest_can_be_asked_for() -> None:
    async def body(engine: Engine, services: Services) -> None:
        got: dict[int, list[int]] = {0: [], 1: []}
        with pytest.raises(RequestFailed) as caught:  # noqa: PT012
            async for chunk in engine.generate("a\n", greedy(60, n=2)):
                got[chunk.index] += chunk.token_ids
                if len(got[1]) > 5 and not services.plan_errors:
                    services.plan_errors.extend([StepRefused("never")] * 4)
        counts = tuple(map(len, got.values()))
        assert caught.value.delivered_token_counts == counts
        assert caught.value.metadata["delivered_token_counts"] == "{},{}".format(*counts)
        assert str(caught.value).endswith("tokens delivered: {}, {}".format(*counts))
        services.plan_errors.clear()
        (rest,) = await engine.complete([TOKENIZER.encode("a\n") + got[1]], greedy(60 - counts[1]))
        assert len(rest.token_ids) == 60 - counts[1]

    with_engine(body, max_recoveries=3)


@pytest.mark.parametrize("gives_up", ["unreachable", "closed"])
def test_every_error_of_a_request_says_what_was_delivered(gives_up: str) -> None:
    async def main() -> None:
        services = Services()
        config = EngineConfig(recovery_timeout_s=0)
        async with Engine(services, lambda _: services, config=config, tokenizer=TOKENIZER) as engine:
            chunks = engine.generate("a\n", greedy(60))
            tokens = list((await anext(chunks)).token_ids)
            if gives_up == "unreachable":
                services.plan_errors.append(Unavailable("away"))
                services.lease_errors.append(Unavailable("still away"))
            else:
                await engine.close()
            with pytest.raises(Unavailable if gives_up == "unreachable" else EngineStopped) as caught:  # noqa: PT012
                async for chunk in chunks:
                    tokens += chunk.token_ids
            assert tokens == RECITED[: len(tokens)]
            assert caught.value.delivered_token_counts == (len(tokens),)

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


@pytest.mark.parametrize("num_delivered", [1, 14, 15, 16, 17, 40])
def test_a_request_goes_on_after_what_another_engine_delivered(num_delivered: int) -> None:
    # 14 to 17: the dash and the emoji are several tokens each, so the cut is in the midst of a character.
    async def body(engine: Engine, services: Services) -> None:
        params = greedy(60, stop=("; the rain",), logprobs=0)
        whole = await read(engine.generate("once\n", params))
        tokens = [token for chunk in whole for token in chunk.token_ids]
        text = SampleText(TOKENIZER.detokenizer(TOKENIZER.encode("once\n")), params.stop)
        before = "".join(text.push((token,), None) for token in tokens[:num_delivered])
        rest = await read(engine.generate("once\n", params, delivered=[Delivered(tuple(tokens[:num_delivered]))]))
        assert [token for chunk in rest for token in chunk.token_ids] == tokens[num_delivered:]
        assert before + "".join(chunk.text for chunk in rest) == "".join(chunk.text for chunk in whole)
        assert rest[-1].finish_reason is whole[-1].finish_reason is FinishReason.STOP
        assert all(chunk.logprobs is not None and len(chunk.logprobs) == len(chunk.token_ids) for chunk in rest)
        assert [chunk.num_cached_tokens is None for chunk in whole] == [False] + [True] * (len(whole) - 1)
        assert {chunk.num_cached_tokens for chunk in rest} == {None}, "the first engine has told of the prompt"

    with_engine(body)


def test_samples_that_have_ended_do_not_go_on() -> None:
    async def body(engine: Engine, services: Services) -> None:
        delivered = [Delivered(tuple(RECITED[:7])), Delivered(tuple(RECITED[:20]), has_ended=True), Delivered()]
        chunks = await read(engine.generate("a\n", greedy(20, n=3), delivered=delivered))
        got: dict[int, list[int]] = {}
        for chunk in chunks:
            got.setdefault(chunk.index, []).extend(chunk.token_ids)
        assert got == {0: RECITED[7:20], 2: RECITED[:20]}
        assert engine.statistics().num_requests == 0

    services = with_engine(body)
    assert [admission.resumed for plan in services.plans for admission in plan.admissions] == [True, True]


def test_an_error_counts_what_was_delivered_before() -> None:
    async def body(engine: Engine, services: Services) -> None:
        delivered = [Delivered(tuple(RECITED[:7])), Delivered(tuple(RECITED[:9]), has_ended=True)]
        chunks = engine.generate("a\n", greedy(60, n=2), delivered=delivered)
        num_tokens = len((await anext(chunks)).token_ids)
        engine.fail_all(Unavailable("moved"))
        with pytest.raises(Unavailable, match="moved") as caught:  # noqa: PT012
            async for chunk in chunks:
                num_tokens += len(chunk.token_ids)
        assert caught.value.delivered_token_counts == (7 + num_tokens, 9)

    with_engine(body)


def test_a_full_queue_refuses_no_request_that_goes_on() -> None:
    async def body(engine: Engine, services: Services) -> None:
        services.plan_gate.clear()
        first = asyncio.ensure_future(anext(engine.generate("a\n", greedy(20))))
        await until(lambda: bool(services.asked))
        with pytest.raises(OutOfRoom):
            await anext(engine.generate("b\n", greedy(20)))
        going_on = asyncio.ensure_future(read(engine.generate("b\n", greedy(20), delivered=[Delivered((RECITED[0],))])))
        await turns()
        services.plan_gate.set()
        assert [token for chunk in await going_on for token in chunk.token_ids] == RECITED[1:20]
        await first

    with_engine(body, max_waiting_requests=1)


@pytest.mark.parametrize(
    "delivered",
    [
        [],
        [Delivered(), Delivered()],
        [Delivered((1,), has_ended=True)],
        [Delivered(tuple(range(20)))],
        [Delivered((257,))],
        [Delivered((-1,))],
    ],
)
def test_what_no_engine_can_have_delivered_is_refused_at_once(delivered: list[Delivered]) -> None:
    async def body(engine: Engine, services: Services) -> None:
        with pytest.raises(InvalidRequest) as caught:
            engine.generate("a\n", greedy(20), delivered=delivered)
        assert caught.value.metadata["field"] == "delivered"

    with_engine(body)


def test_a_higher_priority_is_served_first() -> None:
    async def body(engine: Engine, services: Services) -> None:
        ended: list[int] = []

        async def one(priority: int) -> None:
            await engine.complete(["a\n"], greedy(20, priority=priority))
            ended.append(priority)

        await asyncio.gather(*(one(priority) for priority in (0, -1, 5, 3)))
        assert ended == [5, 3, 0, -1]

    with_engine(body, max_running_sequences=1)


def test_a_lease_that_can_not_be_had_yet_is_waited_for() -> None:
    async def body(engine: Engine, services: Services) -> None:
        loop = asyncio.get_running_loop()
        services.plan_errors.append(LeaseLost("gone"))
        services.lease_errors.append(OutOfRoom("too many", reason="TOO_MANY_LEASES", retry_after_s=0.2))
        asked = loop.time()
        (completion,) = await engine.complete(["a\n"], greedy(5))
        assert completion.token_ids == tuple(RECITED[:5])
        assert loop.time() - asked >= 0.2

    with_engine(body)


def test_requests_that_end_while_a_lease_is_waited_for_leave_the_engine_alive() -> None:
    async def body(engine: Engine, services: Services) -> None:
        services.result_errors.append(LeaseLost("gone"))
        services.lease_errors.append(Unavailable("away"))
        request = asyncio.ensure_future(engine.complete(["once\n"], greedy(20)))
        assert await engine.next_outage(None)
        services.lease_gate.clear()
        await until(lambda: services.num_waiting_for_lease == 1)
        engine.fail_all(Unavailable("moved"))
        services.lease_gate.set()
        with pytest.raises(Unavailable, match="moved"):
            await request
        await until(lambda: engine.outage is None)
        (again,) = await engine.complete(["once\n"], greedy(20))
        assert again.samples[0].token_ids == tuple(RECITED[:20])

    with_engine(body)


def test_services_that_stay_away_fail_the_requests_but_not_the_engine() -> None:
    async def body(engine: Engine, services: Services) -> None:
        services.plan_errors.append(Unavailable("away"))
        services.lease_errors.append(Unavailable("still away"))
        with pytest.raises(Unavailable, match="still away"):
            await engine.complete(["a\n"], greedy(5))
        (completion,) = await engine.complete(["a\n"], greedy(5))
        assert completion.token_ids == tuple(RECITED[:5])

    with_engine(body, recovery_timeout_s=0)


def test_too_many_steps_is_waited_out() -> None:
    async def body(engine: Engine, services: Services) -> None:
        services.plan_errors.extend([OutOfRoom("slow down", reason="TOO_MANY_STEPS")] * 3)
        (completion,) = await engine.complete(["a\n"], greedy(5))
        assert completion.token_ids == tuple(RECITED[:5])
        assert engine.statistics().recoveries == 0

    with_engine(body)


def test_recoveries_without_progress_end() -> None:
    async def body(engine: Engine, services: Services) -> None:
        services.plan_errors.extend([StepRefused("never")] * 4)
        with pytest.raises(RequestFailed, match="3 recoveries"):
            await engine.complete(["a\n"], greedy(5))
        (completion,) = await engine.complete(["a\n"], greedy(5))
        assert completion.token_ids == tuple(RECITED[:5])

    with_engine(body, max_recoveries=3)


def test_a_prompt_that_breaks_the_model_fails_alone() -> None:
    async def body(engine: Engine, services: Services) -> None:
        services.poison = TOKENIZER.encode("!")[0]
        good = [asyncio.create_task(engine.complete([f"{name}\n"], greedy(40))) for name in "abc"]
        with pytest.raises(RequestFailed) as caught:
            await engine.complete(["!\n"], greedy(10))
        assert isinstance(caught.value.__cause__, StepFailed)
        for task in good:
            (completion,) = await task
            assert completion.token_ids == tuple(RECITED[:40])

    with_engine(body)


class BrokenTokenizer(Tokenizer):
    """Can't make a text of the tokens after a prompt with "!", and can't begin one after a prompt with "?"."""

    def detokenizer(self, prompt_token_ids: Any = (), **options: Any) -> Any:
        prompt = self.decode(prompt_token_ids)
        if "?" in prompt:
            raise RuntimeError("no such text")
        whole = super().detokenizer(prompt_token_ids, **options)
        return BrokenDetokenizer() if "!" in prompt else whole


class BrokenDetokenizer:
    """Can't make a text."""

    tokens_per_ms = 1000

    def push(self, token_ids: Any) -> str:
        raise RuntimeError("no such text")

    def flush(self) -> str:
        return ""


def test_a_text_that_can_not_be_made_fails_its_own_request() -> None:
    async def main() -> None:
        services = Services()
        tokenizer = BrokenTokenizer(byte_tokenizer()._raw)
        async with Engine(
            services, lambda _: services, config=EngineConfig(verify=True), tokenizer=tokenizer
        ) as engine:
            good = asyncio.create_task(engine.complete(["a\n", "b\n"], greedy(40)))
            with pytest.raises(RequestFailed, match="no such text"):
                await engine.complete("!\n", greedy(10))
            with pytest.raises(RuntimeError, match="no such text"):
                await engine.complete("?\n", greedy(10))
            assert [one.token_ids for one in await good] == [tuple(RECITED[:40])] * 2
            await until(lambda: not services.sequences)  # nothing goes on for the requests that failed
            scheduler = engine.statistics().scheduler
            assert (scheduler.num_waiting, scheduler.num_running) == (0, 0)

    asyncio.run(main())


@pytest.mark.parametrize("error", [BrokenInvariantError("a bug"), asyncio.CancelledError("a bug")], ids=type)
def test_a_loop_that_dies_tells_everybody(error: BaseException) -> None:
    async def body(engine: Engine, services: Services) -> None:
        services.plan_errors.append(error)
        both = [asyncio.create_task(engine.complete([name], greedy(5))) for name in ("a\n", "b\n")]
        for task in both:
            with pytest.raises(EngineStopped, match="a bug"):
                await task
        with pytest.raises(EngineStopped):
            engine.generate("c\n")
        assert "a bug" in str(await engine.failed())

    with_engine(body)


DROPPED = """
import asyncio, contextlib
from unit.engine.test_engine import *

class Away(Services):
    async def get_model(self):
        if self.num_leases > 1:
            waits.set()
            await asyncio.Event().wait()
        return await super().get_model()

async def main():
    services = Away()
    config = EngineConfig(max_recoveries=1_000_000)
    engine = await Engine(services, lambda _: services, config=config, tokenizer=TOKENIZER).__aenter__()
    services.result_errors.append(LeaseLost("gone"))
    asyncio.ensure_future(engine.complete(["once\\n"], greedy(20)))
    await waits.wait()
    (task,) = [task for task in asyncio.all_tasks() if task.get_coro().__qualname__ == "Engine._run"]
    return task.get_coro()

waits = asyncio.Event()
loop = asyncio.new_event_loop()
running = loop.run_until_complete(main())
loop.close()
with contextlib.suppress(RuntimeError):  # it is not done yet
    running.close()  # as the collector of garbage does
print("ended")
"""


def test_an_engine_ends_when_its_event_loop_has_gone() -> None:
    """While it connects again: the task gives its new lease back, for which it needs the loop that has gone."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", DROPPED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.stdout == "ended\n", done.stderr
    assert done.stderr.count("an unexpected error") <= 1, "it has not gone on"


def test_closing_the_engine_tells_who_waits() -> None:
    async def main() -> None:
        services = Services()
        engine = Engine(services, lambda _: services, tokenizer=TOKENIZER)
        with pytest.raises(EngineStopped, match="async with"):
            engine.generate("a\n")
        async with engine:
            waiting = asyncio.create_task(engine.complete(["a\n"], greedy(300)))
            await turns(20)
        with pytest.raises(EngineStopped, match="closed"):
            await waiting
        assert services.open_leases == []

    asyncio.run(main())


def test_without_a_tokenizer_prompts_are_token_ids() -> None:
    async def main() -> None:
        services = Services()
        async with Engine(services, lambda _: services) as engine:
            assert engine.tokenizer is None
            with pytest.raises(InvalidRequest):
                engine.generate("a\n")
            with pytest.raises(InvalidRequest):
                engine.generate([1], greedy(stop=("x",)))
            (completion,) = await engine.complete([[1, PROMPT_END]], greedy(5))
            assert (completion.text, completion.token_ids) == ("", tuple(RECITED[:5]))

    asyncio.run(main())
