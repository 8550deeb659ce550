"""EngineService over real services: its results are the engine's; a caller that disconnects affects no other."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import sha256
from deadlines import DEADLINE_S
from integration.engine_gateway import LIMITED, MAX_UNREAD_TOKENS, MAX_WAITING
from integration.protocol_client import (
    CHANNEL_OPTIONS,
    FAULTY_WORKER,
    Pair,
    RefusedError,
    ask,
    await_that,
)

from quire.cache.v1 import cache_service_pb2 as cache_pb
from quire.cli.launch import LocalServices
from quire.cli.service_process import ServiceProcess
from quire.client import Engine, SamplingParams
from quire.engine.v1 import engine_service_pb2 as pb
from quire.engine.v1 import engine_service_pb2_grpc

MODEL = Path(__file__).parents[2] / "deploy" / "demo" / "model"
GATEWAY = str(Path(__file__).with_name("engine_gateway.py"))
WORKER_ARGS = ("--dtype", "float32", "--device", "cpu", "--threads", "1")
NUM_BLOCKS = 128
NAMES, OTHER = ("demo", "demo-alias"), "other"
MODELS = ("--name", NAMES[0], "--name", NAMES[1], "--other", OTHER)
PROMPT = "The default value of this parameter"
TOKENS = list(range(300, 340))


class Front:
    """The services, a gateway in front of them, and a stub of it."""

    def __init__(self, pair: Pair, gateway: ServiceProcess) -> None:
        self.pair = pair
        self.gateway = gateway
        self.channel = grpc.insecure_channel(gateway.address, options=CHANNEL_OPTIONS)
        self.stub: Any = engine_service_pb2_grpc.EngineServiceStub(self.channel)

    @classmethod
    @contextlib.contextmanager
    def started(cls, services: LocalServices, *arguments: str, name: str = "gateway") -> Iterator[Front]:
        folder = services.runtime_dir
        address = f"unix:{folder}/{name}.sock"
        flags = ("--cachemgr", services.cachemgr_address, "--listen", address, *MODELS, *arguments)
        gateway = ServiceProcess(
            name, target=GATEWAY, arguments=flags, address=address, log_path=folder / f"{name}.log"
        )
        gateway.start()
        pair = Pair(services)
        try:
            gateway.wait_serving(DEADLINE_S)
            front = cls(pair, gateway)
            yield front
            front.channel.close()
        finally:
            pair.close()
            gateway.terminate()
        log = (folder / f"{name}.log").read_text()
        assert not [line for line in log.splitlines() if "handler failed" in line or "Traceback" in line], log

    def generate(self, timeout_s: float = DEADLINE_S, **fields: Any) -> Any:
        """The call of a request, with the first model's name if it has none."""
        request = pb.GenerateRequest(**{"model": NAMES[0], "prompt": {"text": PROMPT}} | fields)
        return self.stub.Generate(request, timeout=timeout_s)

    def outcome(self, **fields: Any) -> Outcome:
        return Outcome(self.generate(**fields))

    def refused(self, **fields: Any) -> RefusedError:
        """The refusal of a request."""
        with pytest.raises(grpc.RpcError) as caught:
            list(self.generate(**fields))
        return RefusedError.of_call(caught.value)

    def await_nothing_held(self) -> None:
        """Returns when no sequence is left anywhere."""
        await_that("no sequence is left", lambda: not self.pair.pool().block_counts.active_count)


class Outcome:
    """All of a stream, put together."""

    def __init__(self, answers: Any) -> None:
        self.texts: dict[int, str] = {}
        self.token_ids: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.reasons: dict[int, int] = {}
        self.prompt_logprobs: list[Any] = []
        self.num_chunks = 0
        self.summary: Any = None
        for answer in answers:
            assert self.summary is None, "the summary is the last message"
            kind = answer.WhichOneof("message")
            if kind == "summary":
                self.summary = answer.summary
            elif kind == "prompt_logprobs":
                assert answer.prompt_logprobs.first_position == len(self.prompt_logprobs) + 1
                self.prompt_logprobs += answer.prompt_logprobs.tokens
            else:
                self._add(answer.chunk)

    def _add(self, chunk: Any) -> None:
        assert chunk.index not in self.reasons, "nothing follows a finish reason"
        self.num_chunks += 1
        self.texts[chunk.index] = self.texts.get(chunk.index, "") + chunk.text
        self.token_ids.setdefault(chunk.index, []).extend(chunk.token_ids)
        self.logprobs.setdefault(chunk.index, []).extend(chunk.logprobs)
        if chunk.finish_reason:
            self.reasons[chunk.index] = chunk.finish_reason


@pytest.fixture(scope="module")
def services() -> Iterator[LocalServices]:
    with LocalServices.start(
        model=MODEL, num_blocks=NUM_BLOCKS, extra_worker_args=WORKER_ARGS, worker_target=FAULTY_WORKER
    ) as started:
        yield started


@pytest.fixture(scope="module")
def front(services: LocalServices) -> Iterator[Front]:
    with Front.started(services) as started:
        yield started


def by_engine(front: Front, prompt: Any, **fields: Any) -> Any:
    """The result of an engine in this process for a prompt."""

    async def run() -> Any:
        async with Engine.connect(front.pair.services.cachemgr_address) as engine:
            [completion] = await engine.complete([prompt], SamplingParams(**fields))
            return completion

    return asyncio.run(run())


@contextlib.contextmanager
def held(front: Front) -> Iterator[None]:
    """No forward begins within the block."""
    hold = front.pair.folder / "hold"
    os.mkfifo(hold)
    try:
        yield
    finally:
        hold.rename(hold.with_name("held"))
        # Opens for the forward that waits, if one does; it does not block if none does.
        with contextlib.suppress(OSError):
            os.close(os.open(hold.with_name("held"), os.O_WRONLY | os.O_NONBLOCK))
        hold.with_name("held").unlink()


# -- the same as the engine ---------------------------------------------------------------------------------------


def test_a_stream_has_what_the_engine_has(front: Front) -> None:
    asked = {"max_tokens": 24, "temperature": 0.8, "seed": 7, "logprobs": 3, "prompt_logprobs": 2, "n": 2}
    expected = by_engine(front, PROMPT, **asked)
    found = front.outcome(parameters=asked)
    for sample in expected.samples:
        assert found.texts[sample.index] == sample.text
        assert found.token_ids[sample.index] == list(sample.token_ids)
        assert found.reasons[sample.index] == pb.FINISH_REASON_LENGTH
        assert [entry.token_id for entry in found.logprobs[sample.index]] == list(sample.token_ids)
        assert [list(entry.top_token_ids) for entry in found.logprobs[sample.index]] == [
            [token_id for token_id, _ in entry.top] for entry in sample.logprobs
        ]
        for entry, other in zip(found.logprobs[sample.index], sample.logprobs, strict=True):
            assert math.isclose(entry.logprob, other.logprob, abs_tol=1e-4)
    assert [entry.token_id for entry in found.prompt_logprobs] == list(expected.prompt_token_ids[1:])
    assert found.num_chunks > 2 * 4, "chunks come as the tokens do"
    assert found.summary.prompt_token_count == len(expected.prompt_token_ids)
    assert found.summary.generated_token_count == 48
    assert 0 < found.summary.first_token_time.ToNanoseconds() <= found.summary.total_time.ToNanoseconds()


def test_the_summary_says_what_was_found_in_the_cache(front: Front) -> None:
    asked = {"prompt": {"token_ids": {"token_ids": TOKENS}}, "parameters": {"max_tokens": 2}, "cache": {"salt": b"own"}}
    assert front.outcome(**asked).summary.cached_token_count == 0
    assert front.outcome(**asked).summary.cached_token_count == 32
    for other in ({"salt": b"another"}, {"salt": b"own", "cache_use": 2}):
        assert front.outcome(**asked | {"cache": other}).summary.cached_token_count == 0


def test_breakpoints_keep_a_prefix_and_a_miss_is_explained(front: Front) -> None:
    def summary(token_ids: list[int], **cache: Any) -> Any:
        prompt = {"token_ids": {"token_ids": token_ids}}
        return front.outcome(
            prompt=prompt, parameters={"max_tokens": 2, "n": 2}, cache={"salt": b"kept"} | cache
        ).summary

    tokens = list(range(500, 540))
    ends = [{"token_count": count, "ttl": {"seconds": 60}} for count in (16, 33)]
    first = summary(tokens, breakpoints=ends, explains_miss=True)
    assert (first.cached_token_count, first.written_token_count, first.kept_token_count) == (0, 32, 32)
    assert (first.miss.block_index, first.miss.reason) == (0, cache_pb.MISS_REASON_NEVER_COMPUTED)
    assert front.pair.statistics().kept_block_count == 2
    again = summary([*tokens[:20], *tokens], explains_miss=True)
    assert (again.cached_token_count, again.written_token_count, again.kept_token_count) == (16, 32, 0)
    assert (again.miss.block_index, again.miss.reason) == (1, cache_pb.MISS_REASON_NEVER_COMPUTED)
    assert not summary(tokens).HasField("miss"), "nothing was asked for"
    ask(front.pair.cache.ResetPrefixCache, cache_pb.ResetPrefixCacheRequest(pool="default"))
    lost = summary(tokens, explains_miss=True).miss
    assert (lost.block_index, lost.reason, lost.lost_time.seconds > 0) == (0, cache_pb.MISS_REASON_RESET, True)
    assert (lost.HasField("reset_by"), lost.reset_by) == (True, ""), "the same caller, which has no name"


def test_stop_texts_grammars_and_bad_words_reach_the_engine(front: Front) -> None:
    plain = by_engine(front, PROMPT, max_tokens=24, temperature=0)
    stop = plain.text[len(plain.text) // 2 :][:3]
    found = front.outcome(parameters={"max_tokens": 24, "temperature": 0, "stop": [stop]})
    assert found.texts[0] == plain.text.split(stop)[0]
    assert found.reasons[0] == pb.FINISH_REASON_STOP
    chosen = front.outcome(parameters={"max_tokens": 24, "grammar": {"choice": {"texts": ["red", "green"]}}})
    assert chosen.texts[0] in ("red", "green")
    bad = {"max_tokens": 1, "temperature": 0, "bad_words": [{"token_ids": {"token_ids": plain.token_ids[:1]}}]}
    assert front.outcome(parameters=bad).token_ids[0] != list(plain.token_ids[:1])


def test_without_max_tokens_a_sample_may_be_as_long_as_the_model_allows(front: Front) -> None:
    long = list(range(1, 2041))
    found = front.outcome(prompt={"token_ids": {"token_ids": long[:2030]}}, parameters={"ignore_eos": True})
    assert found.summary.generated_token_count == by_model(front).max_sequence_tokens - 2030
    assert found.reasons[0] == pb.FINISH_REASON_LENGTH


def by_model(front: Front) -> Any:
    [first, _] = ask(front.stub.ListModels, pb.ListModelsRequest()).models
    return first


def test_models_have_names_and_pages(front: Front) -> None:
    models = ask(front.stub.ListModels, pb.ListModelsRequest()).models
    assert [(model.name, list(model.aliases)) for model in models] == [(NAMES[0], [NAMES[1]]), (OTHER, [])]
    assert (list(models[0].pools), models[0].has_tokenizer, models[0].ready) == (["default"], True, True)
    page = ask(front.stub.ListModels, pb.ListModelsRequest(page_size=1))
    assert [model.name for model in page.models] == [NAMES[0]]
    rest = ask(front.stub.ListModels, pb.ListModelsRequest(page_size=1, page_token=page.next_page_token))
    assert ([model.name for model in rest.models], rest.next_page_token) == ([OTHER], "")
    texts = {
        front.outcome(model=name, parameters={"max_tokens": 4, "temperature": 0}).texts[0] for name in (*NAMES, OTHER)
    }
    assert len(texts) == 1


def test_a_text_becomes_tokens_and_tokens_a_text(front: Front) -> None:
    found = ask(front.stub.Tokenize, pb.TokenizeRequest(model=OTHER, text=PROMPT))
    assert list(found.token_ids) == list(by_engine(front, PROMPT, max_tokens=1).prompt_token_ids)
    again = ask(front.stub.Detokenize, pb.DetokenizeRequest(model=OTHER, token_ids=found.token_ids))
    assert again.text == PROMPT
    long = PROMPT * 200
    tokens = ask(front.stub.Tokenize, pb.TokenizeRequest(model=OTHER, text=long)).token_ids
    assert ask(front.stub.Detokenize, pb.DetokenizeRequest(model=OTHER, token_ids=tokens)).text == long
    assert not ask(front.stub.Tokenize, pb.TokenizeRequest(model=OTHER)).token_ids
    for token_id in (-1, 2**31 - 1):
        with pytest.raises(RefusedError) as caught:
            ask(front.stub.Detokenize, pb.DetokenizeRequest(model=OTHER, token_ids=[1, token_id]))
        assert (caught.value.reason, caught.value.metadata["field"]) == ("TOKEN_OUT_OF_RANGE", "token_ids")


# -- batches ------------------------------------------------------------------------------------------------------


def batch(front: Front, *requests: dict[str, Any]) -> Any:
    full = [{"model": NAMES[0], "prompt": {"text": PROMPT}} | each for each in requests]
    return ask(front.stub.GenerateBatch, pb.GenerateBatchRequest(requests=full)).results


def test_a_batch_answers_each_request_in_its_place(front: Front) -> None:
    greedy = {"max_tokens": 6, "temperature": 0}
    results = batch(
        front,
        {"parameters": greedy | {"n": 2, "prompt_logprobs": 0}},
        {"parameters": greedy | {"top_p": 2}},
        {"prompt": {"token_ids": {"token_ids": TOKENS}}, "parameters": greedy},
        {"model": "nobody's"},
    )
    expected = by_engine(front, PROMPT, **greedy)
    first, second, third, fourth = results
    assert [sample.text for sample in first.completion.samples] == 2 * [expected.text]
    assert len(first.completion.prompt_logprobs) == len(expected.prompt_token_ids) - 1
    assert first.completion.summary.generated_token_count == 12
    assert (second.error.reason, second.error.metadata["field"]) == ("INVALID_ARGUMENT", "parameters.top_p")
    assert list(third.completion.samples[0].token_ids) == list(by_engine(front, TOKENS, **greedy).token_ids)
    assert (fourth.error.code, fourth.error.reason) == (grpc.StatusCode.NOT_FOUND.value[0], "MODEL_NOT_FOUND")


@pytest.mark.parametrize(
    ("requests", "value"),
    [
        ([], "0 entries"),
        ([{}] * 257, "257 entries"),
        ([{"parameters": {"n": 600, "max_tokens": 1}}] * 2, "1200 samples together"),
        ([{"parameters": {"n": 100}}], "tokens together"),
    ],
)
def test_a_batch_beyond_its_bounds_is_refused(front: Front, requests: list[dict[str, Any]], value: str) -> None:
    with pytest.raises(RefusedError) as caught:
        batch(front, *requests)
    assert (caught.value.reason, caught.value.metadata["field"]) == ("INVALID_ARGUMENT", "requests")
    assert value in caught.value.metadata["value"]


# -- what is refused ----------------------------------------------------------------------------------------------

MANY = 70_000
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({"prompt": {}}, "prompt"),
    "no tokens": ({"prompt": {"token_ids": {}}}, "prompt"),
    "max_tokens": ({"parameters": {"max_tokens": 0}}, "parameters.max_tokens"),
    "max_tokens below 0": ({"parameters": {"max_tokens": -(2**31)}}, "parameters.max_tokens"),
    "temperature": ({"parameters": {"temperature": -0.5}}, "parameters.temperature"),
    "temperature NaN": ({"parameters": {"temperature": math.nan}}, "parameters.temperature"),
    "top_k": ({"parameters": {"top_k": -1}}, "parameters.top_k"),
    "top_p": ({"parameters": {"top_p": 0.0}}, "parameters.top_p"),
    "min_p": ({"parameters": {"min_p": 1.5}}, "parameters.min_p"),
    "repetition_penalty": ({"parameters": {"repetition_penalty": 0.0}}, "parameters.repetition_penalty"),
    "presence_penalty": ({"parameters": {"presence_penalty": 3.0}}, "parameters.presence_penalty"),
    "frequency_penalty": ({"parameters": {"frequency_penalty": -3.0}}, "parameters.frequency_penalty"),
    "logit_bias": ({"parameters": {"logit_bias": {1: 101.0}}}, "parameters.logit_bias"),
    "logit_bias of many": ({"parameters": {"logit_bias": dict.fromkeys(range(1025), 1.0)}}, "parameters.logit_bias"),
    "allowed_token_ids": ({"parameters": {"allowed_token_ids": [1] * MANY}}, "parameters.allowed_token_ids"),
    "allowed_token_ids below 0": ({"parameters": {"allowed_token_ids": [-1]}}, "parameters.allowed_token_ids"),
    "bad_words": ({"parameters": {"bad_words": [{}]}}, "parameters.bad_words"),
    "many bad_words": ({"parameters": {"bad_words": [{"text": "a"}] * 1025}}, "parameters.bad_words"),
    "long bad_words": ({"parameters": {"bad_words": [{"token_ids": {"token_ids": [1] * 17}}]}}, "parameters.bad_words"),
    "min_tokens": ({"parameters": {"min_tokens": 3, "max_tokens": 2}}, "parameters.min_tokens"),
    "stop": ({"parameters": {"stop": [""]}}, "parameters.stop"),
    "many stop": ({"parameters": {"stop": ["a"] * 65}}, "parameters.stop"),
    "stop_token_ids": ({"parameters": {"stop_token_ids": [1] * MANY}}, "parameters.stop_token_ids"),
    "logprobs": ({"parameters": {"logprobs": 21}}, "parameters.logprobs"),
    "logprobs below 0": ({"parameters": {"logprobs": -1}}, "parameters.logprobs"),
    "prompt_logprobs": ({"parameters": {"prompt_logprobs": 21}}, "parameters.prompt_logprobs"),
    "grammar": ({"parameters": {"grammar": {}}}, "parameters.grammar"),
    "json_object": ({"parameters": {"grammar": {"json_object": False}}}, "parameters.grammar.json_object"),
    "choice": ({"parameters": {"grammar": {"choice": {}}}}, "parameters.grammar.choice"),
    "regex": ({"parameters": {"grammar": {"regex": "("}}}, "parameters.grammar"),
    "grammar and ignore_eos": (
        {"parameters": {"ignore_eos": True, "grammar": {"regex": "a"}}},
        "parameters.ignore_eos",
    ),
    "n": ({"parameters": {"n": 0}}, "parameters.n"),
    "many n": ({"parameters": {"n": 1025}}, "parameters.n"),
    "timeout": ({"parameters": {"timeout": {}}}, "parameters.timeout"),
    "long timeout": ({"parameters": {"timeout": {"seconds": 604801}}}, "parameters.timeout"),
    "salt": ({"cache": {"salt": bytes(65)}}, "cache.salt"),
    "cache_use": ({"cache": {"cache_use": 9}}, "cache.cache_use"),
    "retention": ({"cache": {"retention": [{"token_count": 1, "priority": 5}] * 17}}, "cache.retention"),
    "priority": ({"cache": {"retention": [{"token_count": 1, "priority": 10}]}}, "cache.retention.priority"),
    "token_count": ({"cache": {"retention": [{"token_count": -1, "priority": 1}]}}, "cache.retention.token_count"),
    "ttl": ({"cache": {"retention": [{"priority": 1, "ttl": {"seconds": 90000}}]}}, "cache.retention.ttl"),
    "breakpoints": ({"cache": {"breakpoints": [{"token_count": 1, "ttl": {"seconds": 9}}] * 5}}, "cache.breakpoints"),
    "breakpoint without ttl": ({"cache": {"breakpoints": [{"token_count": 1}]}}, "cache.breakpoints.ttl"),
    "breakpoint behind the prompt": (
        {"cache": {"breakpoints": [{"token_count": 2000, "ttl": {"seconds": 9}}]}},
        "cache.breakpoints.token_count",
    ),
    "expected_in": ({"cache": {"expected_in": {"seconds": -1}}}, "cache.expected_in"),
    "not_expected": ({"cache": {"expected_in": {"seconds": 1}, "not_expected": True}}, "cache.not_expected"),
    "model": ({"model": ""}, "model"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_refused_with_the_fields_path(front: Front, name: str) -> None:
    fields, path = BAD[name]
    refused = front.refused(**fields)
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT, refused
    assert refused.domain == "engine.quire.dev"
    assert refused.reason == ("EMPTY_PROMPT" if name == "no tokens" else "INVALID_ARGUMENT"), refused
    assert refused.metadata["field"] == path
    assert refused.metadata["limit"] in refused.message


def test_what_does_not_fit_the_model_is_refused(front: Front) -> None:
    tokens = {"token_ids": {"token_ids": [1] * 3000}}
    for fields, reason, path in (
        ({"prompt": tokens}, "SEQUENCE_TOO_LONG", "prompt"),
        ({"parameters": {"max_tokens": 2048}}, "SEQUENCE_TOO_LONG", "parameters.max_tokens"),
        ({"prompt": {"token_ids": {"token_ids": [2048]}}}, "TOKEN_OUT_OF_RANGE", "prompt"),
        ({"parameters": {"stop_token_ids": [2048]}}, "TOKEN_OUT_OF_RANGE", "parameters.stop_token_ids"),
    ):
        refused = front.refused(**fields)
        assert (refused.code, refused.reason, refused.metadata["field"]) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            reason,
            path,
        )
    refused = front.refused(model="nobody's")
    assert (refused.code, refused.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    assert refused.metadata == {"model": "nobody's"}
    refused = front.refused(prompt={"text": "a" * (4 * 2**20)})
    assert (refused.reason, refused.metadata["field"]) == ("INVALID_ARGUMENT", "request")


# -- callers that disconnect -------------------------------------------------------------------------------------


def test_a_call_that_is_cancelled_frees_its_blocks(front: Front) -> None:
    call = front.generate(parameters={"max_tokens": 1000, "ignore_eos": True})
    next(iter(call))
    assert front.pair.pool().block_counts.active_count
    call.cancel()
    front.await_nothing_held()


def test_a_deadline_ends_the_call_and_a_timeout_gives_what_there_is(front: Front) -> None:
    with held(front):
        refused = front.refused(timeout_s=0.5, parameters={"max_tokens": 4})
        assert refused.code is grpc.StatusCode.DEADLINE_EXCEEDED
        found = front.outcome(parameters={"max_tokens": 4, "timeout": {"nanos": 200_000_000}})
        assert found.reasons == {0: pb.FINISH_REASON_TIMEOUT}
        assert found.summary.generated_token_count == 0
        assert not found.summary.HasField("first_token_time")
    front.await_nothing_held()


def test_a_batch_that_is_cancelled_frees_its_blocks(front: Front) -> None:
    request = {"model": NAMES[0], "prompt": {"text": PROMPT}, "parameters": {"max_tokens": 1000, "ignore_eos": True}}
    call = front.stub.GenerateBatch.future(pb.GenerateBatchRequest(requests=[request] * 3), timeout=DEADLINE_S)
    await_that("it runs", lambda: front.pair.pool().block_counts.active_count)
    call.cancel()
    front.await_nothing_held()


def test_a_slow_reader_delays_nobody_and_is_ended_when_it_leaves_too_much(front: Front) -> None:
    asked = {"max_tokens": 300, "ignore_eos": True, "logprobs": 20, "n": 4, "seed": 1, "temperature": 0.0}
    # Little is on the way to a reader that does not read.
    options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024), *CHANNEL_OPTIONS)

    async def read() -> RefusedError:
        async with grpc.aio.insecure_channel(front.gateway.address, options=options) as channel:
            stub: Any = engine_service_pb2_grpc.EngineServiceStub(channel)
            request = pb.GenerateRequest(model=OTHER, prompt={"text": PROMPT}, parameters=asked)
            call = stub.Generate(request, timeout=DEADLINE_S)
            answers = aiter(call)
            await anext(answers)
            other = await asyncio.to_thread(front.outcome, parameters={"max_tokens": 30, "ignore_eos": True})
            assert other.summary.generated_token_count == 30
            await asyncio.to_thread(front.await_nothing_held)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_all(answers)
            return RefusedError.of_call(caught.value)

    refused = asyncio.run(read())
    assert (refused.code, refused.reason) == (grpc.StatusCode.ABORTED, "TOO_SLOW")
    assert int(refused.metadata["unread"]) > int(refused.metadata["limit"]) == MAX_UNREAD_TOKENS
    assert len(refused.metadata["delivered_token_counts"].split(",")) == 4


async def read_all(answers: Any) -> None:
    async for _ in answers:
        pass


def test_a_full_queue_refuses(front: Front) -> None:
    with held(front):
        calls = [front.generate(parameters={"max_tokens": 2}) for _ in range(MAX_WAITING + 1)]
        refused = RefusedError.of_call(first_error(calls))
        assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert refused.metadata["limited_by"] == "max_waiting_requests"
        assert refused.retry_delay_s is not None
        for call in calls:
            call.cancel()
    front.await_nothing_held()


def first_error(calls: list[Any]) -> Any:
    """The call that has ended; there is one."""
    return await_that("one is refused", lambda: next((call for call in calls if call.done()), None))


def test_a_step_that_fails_again_and_again_ends_the_request(front: Front) -> None:
    (front.pair.folder / "fail").touch()
    try:
        refused = front.refused(parameters={"max_tokens": 3})
    finally:
        (front.pair.folder / "fail").unlink()
    assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "GENERATION_FAILED")
    assert refused.metadata["delivered_token_counts"] == "0"
    assert front.outcome(parameters={"max_tokens": 3, "ignore_eos": True}).summary.generated_token_count == 3


# -- authorization -----------------------------------------------------------------------------------------------


def test_callers_without_a_role_are_refused_and_tenants_share_no_prefix(services: LocalServices) -> None:
    tokens = services.runtime_dir / "gateway-tokens"
    lines = (
        f"{name} {role} {sha256(name)}"
        for name, role in (("ada", "client"), ("bob", "client"), ("eve", "worker"), (LIMITED, "client"))
    )
    tokens.write_text("\n".join(lines))
    with Front.started(services, "--token-file", str(tokens), name="guarded") as front:

        def as_caller(name: str | None) -> Any:
            metadata = () if name is None else (("authorization", f"Bearer {name}"),)
            request = pb.GenerateRequest(
                model=OTHER, prompt={"token_ids": {"token_ids": TOKENS}}, parameters={"max_tokens": 1}
            )
            return front.stub.Generate(request, timeout=DEADLINE_S, metadata=metadata)

        for name, code, reason in (
            (None, grpc.StatusCode.UNAUTHENTICATED, "CREDENTIALS_MISSING"),
            ("mallory", grpc.StatusCode.UNAUTHENTICATED, "TOKEN_REJECTED"),
            ("eve", grpc.StatusCode.PERMISSION_DENIED, "ROLE_MISSING"),
            (LIMITED, grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                list(as_caller(name))
            refused = RefusedError.of_call(caught.value)
            assert (refused.code, refused.reason, refused.domain) == (code, reason, "engine.quire.dev")
        counts = [Outcome(as_caller(name)).summary.cached_token_count for name in ("ada", "bob", "ada")]
        assert counts == [0, 0, 32]


# -- when a service goes away -------------------------------------------------------------------------------------


def test_a_worker_that_is_killed_changes_no_token(services: LocalServices, front: Front) -> None:
    asked = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.8, "seed": 3}
    undisturbed = front.outcome(parameters=asked)
    answers = iter(front.generate(parameters=asked))
    received = [next(answers) for _ in range(5)]
    services.worker.kill()
    services.worker.restart()
    found = Outcome([*received, *answers])
    assert found.token_ids == undisturbed.token_ids
    assert found.texts == undisturbed.texts
    assert found.summary.generated_token_count == 60


def test_a_service_that_stays_away_and_a_door_that_ends_say_so(services: LocalServices) -> None:
    patience = ("--recovery-timeout", "1", "--drain-timeout", f"{DEADLINE_S:g}")
    with Front.started(services, *patience, name="impatient") as front:
        answers = iter(front.generate(parameters={"max_tokens": 1500, "ignore_eos": True}))
        next(answers)
        services.worker.kill()
        with pytest.raises(grpc.RpcError) as caught:
            list(answers)
        refused = RefusedError.of_call(caught.value)
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "SERVICE_AWAY")
        assert int(refused.metadata["delivered_token_counts"]) >= 1
        assert refused.retry_delay_s is not None
        services.worker.restart()
        answers = iter(front.generate(parameters={"max_tokens": 1000, "ignore_eos": True}))
        next(answers)
        os.kill(front.gateway.pid or 0, signal.SIGTERM)
        refused = await_that("new requests are refused", lambda: shutting_down(front))
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
        assert Outcome(answers).summary.generated_token_count == 1000, "what has begun is finished"


def shutting_down(front: Front) -> RefusedError | None:
    """The refusal of a request, None if it is accepted."""
    try:
        front.outcome(parameters={"max_tokens": 1})
    except grpc.RpcError as error:
        return RefusedError.of_call(error)
    return None
