"""`quire serve --shepherd`, called as Shepherd Model Gateway calls it. test_shepherd_gateway.py has that gateway."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from deadlines import DEADLINE_S
from gateway.conftest import MODEL, ROOT, Gateway
from integration.protocol_client import CHANNEL_OPTIONS, Pair, RefusedError, await_that
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from quire.cli.launch import LocalServices
from quire.client.engine.tokenizer import Tokenizer

FOLDER = ROOT / "deploy" / "demo" / "model"
POOL = "default"
PROMPT = "The default value of this parameter"
TOKENIZER = Tokenizer.load(str(FOLDER))
INVALID = grpc.StatusCode.INVALID_ARGUMENT


class Worker:
    """A gateway that is a worker, and a stub of it."""

    def __init__(self, gateway: Gateway, address: str, pair: Pair) -> None:
        self.gateway = gateway
        self.pair = pair
        self.channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self.stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(self.channel)

    def generate(self, prompt: str | list[int] = PROMPT, *, timeout_s: float = DEADLINE_S, **fields: Any) -> Any:
        """Return the call of a request; fields are those of its parameters, or of itself."""
        known = vllm_engine_pb2.GenerateRequest.DESCRIPTOR.fields_by_name
        of_request = {name: fields.pop(name) for name in list(fields) if name in known}
        token_ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
        request = vllm_engine_pb2.GenerateRequest(
            **{"request_id": "one", "tokenized": vllm_engine_pb2.TokenizedInput(input_ids=token_ids)} | of_request,
            sampling_params=vllm_engine_pb2.SamplingParams(**{"temperature": 0, "max_tokens": 8} | fields),
        )
        return self.stub.Generate(request, timeout=timeout_s)

    def completes(self, *arguments: Any, **fields: Any) -> list[Any]:
        """Return the ends of all samples, by index."""
        answers = list(self.generate(*arguments, **fields))
        return sorted((each.complete for each in answers if each.HasField("complete")), key=lambda each: each.index)

    def text(self, *arguments: Any, **fields: Any) -> str:
        (complete,) = self.completes(*arguments, **fields)
        return TOKENIZER.decode(list(complete.output_ids))

    def subscribe(self) -> Any:
        return self.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=DEADLINE_S)

    def call(self, method: str, request: Any) -> Any:
        return getattr(self.stub, method)(request, timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def worker(services: LocalServices, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    log = tmp_path_factory.mktemp("shepherd") / "log"
    gateway = Gateway(services.cachemgr_address, "--pool", POOL, "--shepherd", "127.0.0.1:0", log=log)
    pair = Pair(services)
    try:
        address = gateway.next_line().rpartition("grpc://")[2]
        started = Worker(gateway, address, pair)
        yield started
        started.channel.close()
    finally:
        pair.close()
        gateway.close()
    assert "handler failed" not in log.read_text()
    assert "was tested with" not in log.read_text()


class Index:
    """The blocks that a gateway knows from a stream of events: token ids by block hash."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, ...]] = {}
        self.parents: dict[int, int | None] = {}
        self.sequence_number = 0
        self.num_snapshots = 0
        self.samples: list[int] = []

    def apply(self, batch: Any) -> None:
        assert batch.sequence_number == self.sequence_number + (not batch.load.load_only)
        assert not (batch.load.load_only and batch.events)
        self.sequence_number = batch.sequence_number
        self.samples.append(batch.load.sample)
        if batch.HasField("snapshot") and not batch.snapshot.index:
            assert batch.events[0].HasField("cleared")
            self.num_snapshots += 1
        for event in batch.events:
            if event.HasField("cleared"):
                self.blocks.clear()
            for block_hash in event.removed.block_hashes:
                assert block_hash not in self.parents_of_all()
                del self.blocks[block_hash]
            self._store(event.stored)

    def parents_of_all(self) -> set[int | None]:
        return {self.parents[block_hash] for block_hash in self.blocks}

    def _store(self, stored: Any) -> None:
        parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
        for block in stored.blocks:
            assert block.block_hash not in self.blocks
            assert parent is None or parent in self.blocks
            assert block.block_size == len(block.token_ids)
            self.blocks[block.block_hash] = tuple(block.token_ids)
            self.parents[block.block_hash] = parent
            parent = block.block_hash

    def has(self, token_ids: list[int]) -> bool:
        """Return whether all full blocks of these tokens are known, each as the child of the one before."""
        parent: int | None = None
        for first in range(0, len(token_ids) - 15, 16):
            wanted = tuple(token_ids[first : first + 16])
            children = [each for each, ids in self.blocks.items() if ids == wanted and self.parents[each] == parent]
            if not children:
                return False
            (parent,) = children
        return True


def test_a_stream_has_what_a_whole_answer_and_the_http_gateway_have(worker: Worker) -> None:
    asked: dict[str, Any] = {"n": 2, "logprobs": 2, "prompt_logprobs": 1}
    whole = worker.completes(**asked)
    streamed = [[], []]
    messages = list(worker.generate(stream=True, **asked))
    for chunk in (message.chunk for message in messages if message.HasField("chunk")):
        streamed[chunk.index] += chunk.token_ids
        assert chunk.completion_tokens == len(chunk.token_ids) == len(chunk.output_logprobs.token_logprobs)
    assert len(messages) > 6
    with worker.gateway.client() as client:
        asked_there = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "n": 2}
        choices = client.post("/v1/completions", json=asked_there).json()["choices"]
    prompt = TOKENIZER.encode(PROMPT)
    for index, complete in enumerate(whole):
        assert streamed[index] == list(complete.output_ids)
        assert TOKENIZER.decode(list(complete.output_ids)) == choices[index]["text"]
        assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == (
            "length",
            len(prompt),
            8,
        )
        logprobs = complete.output_logprobs
        assert list(logprobs.token_ids) == list(complete.output_ids)
        assert [top.token_ids[0] for top in logprobs.top_logprobs] == list(logprobs.token_ids)
        assert [top.values[0] for top in logprobs.top_logprobs] == list(logprobs.token_logprobs)
        assert {len(top.values) for top in logprobs.top_logprobs} == {2}
        of_prompt = complete.input_logprobs
        assert list(of_prompt.token_ids) == prompt
        assert [each.HasField("value") for each in of_prompt.token_logprobs] == [False] + [True] * (len(prompt) - 1)


def test_seeds_stops_and_texts(worker: Worker) -> None:
    drawn = [worker.text(temperature=1, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    plain = worker.text(max_tokens=24)
    (cut,) = worker.completes(max_tokens=24, stop=[plain[20:23]])
    assert cut.finish_reason == "stop"
    assert cut.completion_tokens < 24
    token_id = worker.completes()[0].output_ids[3]
    (ended,) = worker.completes(stop_token_ids=[token_id])
    assert (ended.finish_reason, ended.matched_token_id) == ("stop", token_id)
    assert worker.text(tokenized=None, text=PROMPT) == worker.text()


CONSTRAINTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "regex": ({"regex": "[01]{2}"}, ("00", "01", "10", "11")),
    "choice": ({"choice": vllm_engine_pb2.ChoiceConstraint(choices=["yes", "no"])}, ("yes", "no")),
    "ebnf": ({"grammar": 'root ::= "one" | "two"'}, ("one", "two")),
    "lark": ({"grammar": 'start: "three" | "four"'}, ("three", "four")),
    "json_schema": ({"json_schema": json.dumps({"enum": ["red", "blue"]})}, ('"red"', '"blue"')),
}


# The ids are fixed: each of pytest's processes must collect the same names.
@pytest.mark.parametrize(("constraint", "texts"), CONSTRAINTS.values(), ids=CONSTRAINTS)
def test_constraints_hold(worker: Worker, constraint: dict[str, Any], texts: tuple[str, ...]) -> None:
    assert worker.text(temperature=1, seed=3, max_tokens=64, **constraint) in texts


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -1}, "sampling_params.temperature", "-1"),
    ({"top_p": 1.5}, "sampling_params.top_p", "1.5"),
    ({"n": 2000}, "sampling_params.n", "2000"),
    ({"logprobs": -1}, "sampling_params.logprobs", "-1"),
    ({"max_tokens": 0}, "sampling_params.max_tokens", "0"),
    ({"stop": [""]}, "sampling_params.stop", ""),
    ({"stop_token_ids": [1] * 65_537}, "sampling_params.stop_token_ids", "65537"),
    ({"logit_bias": {-3: 1.0}}, "sampling_params.logit_bias", "-3"),
    ({"truncate_prompt_tokens": 5}, "sampling_params.truncate_prompt_tokens", "5"),
    ({"structural_tag": "{}"}, "sampling_params.structural_tag", "given"),
    ({"json_object": False}, "sampling_params.json_object", "False"),
    ({"choice": vllm_engine_pb2.ChoiceConstraint()}, "sampling_params.choice", "0"),
    ({"data_parallel_rank": 3}, "data_parallel_rank", "3"),
    ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json", "given"),
    ({"extra_mm_inputs": [vllm_engine_pb2.MultimodalInputs()]}, "extra_mm_inputs", "given"),
    ({"media_refs": vllm_engine_pb2.MediaRefs()}, "media_refs", "given"),
    ({"tokenized": None}, "input", "unset"),
]


@pytest.mark.parametrize(("fields", "field", "value"), REFUSALS, ids=lambda each: each if isinstance(each, str) else "")
def test_bad_input_names_field_value_and_limit(worker: Worker, fields: dict[str, Any], field: str, value: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(worker.generate(**fields))
    refused = RefusedError.of_call(caught.value)
    assert (refused.code, refused.metadata["field"]) == (INVALID, field)
    assert refused.metadata["value"].startswith(value)
    assert refused.message.startswith(field)
    assert refused.metadata["limit"] in refused.message


def test_prompts_that_can_not_be_computed_are_refused_alone(worker: Worker) -> None:
    before = worker.generate("It is", max_tokens=100, ignore_eos=True)
    for prompt, reason in (([], "EMPTY_PROMPT"), ([10**9], "TOKEN_OUT_OF_RANGE"), ([5] * 5000, "SEQUENCE_TOO_LONG")):
        with pytest.raises(grpc.RpcError) as caught:
            list(worker.generate(prompt))
        refused = RefusedError.of_call(caught.value)
        assert (refused.code, refused.reason) == (INVALID, reason)
    assert [each.complete.completion_tokens for each in before] == [100]


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_abort_ends_a_request_and_frees_its_blocks(worker: Worker, is_stream: bool) -> None:
    other = worker.generate(request_id="other", max_tokens=64, ignore_eos=True)
    aborted = worker.generate(request_id="aborted", stream=is_stream, max_tokens=1900, n=2, ignore_eos=True)
    if is_stream:
        next(aborted)
    await_that("three samples run", lambda: loads(worker).num_running_reqs == 3)
    worker.call("Abort", vllm_engine_pb2.AbortRequest(request_ids=["aborted", "never seen"]))
    ends = [each.complete for each in aborted if each.HasField("complete")]
    assert sorted((end.index, end.finish_reason) for end in ends) == [(0, "abort"), (1, "abort")]
    assert all(end.completion_tokens < 1900 for end in ends)
    assert [each.complete.completion_tokens for each in other] == [64]
    await_that("no block is held", lambda: not worker.pair.counts(POOL).active_count)


def test_an_abort_ends_the_request_with_this_id_and_no_other(worker: Worker) -> None:
    """Ids that begin or end alike are others, and an empty one is nobody's."""
    fields: dict[str, Any] = {"stream": True, "ignore_eos": True}
    others = [worker.generate(request_id=each, max_tokens=64, **fields) for each in ("req-10", "req-1-0", "eq-1", "")]
    aborted = worker.generate(request_id="req-1", max_tokens=1900, **fields)
    next(aborted)
    worker.call("Abort", vllm_engine_pb2.AbortRequest(request_ids=["req-1", "", "req", "req-"]))
    *_, end = aborted
    assert end.complete.finish_reason == "abort"
    for other in others:
        *_, end = other
        assert (end.complete.finish_reason, end.complete.completion_tokens) == ("length", 64)


def test_a_caller_that_goes_frees_its_blocks(worker: Worker) -> None:
    call = worker.generate(stream=True, max_tokens=1900, ignore_eos=True)
    next(call)
    call.cancel()
    await_that("no block is held", lambda: not worker.pair.counts(POOL).active_count)


def loads(worker: Worker) -> Any:
    (load,) = worker.call("GetLoads", vllm_engine_pb2.GetLoadsRequest()).loads
    return load


def test_events_follow_the_pool_and_records_go_on(worker: Worker) -> None:
    """An index that is made from the first batch on, or late, has what the pool has; one of a flushed pool is empty."""
    worker.call("FlushCache", common_pb2.FlushCacheRequest())
    prompts = [
        TOKENIZER.encode(f"{start} is the value that the function returns to its caller. " * 4) for start in "abc"
    ]
    early, index = worker.subscribe(), Index()
    for prompt in prompts:
        worker.completes(prompt, max_tokens=1)
        while not index.has(prompt):
            index.apply(next(early))
    assert index.num_snapshots == 1
    late, other = worker.subscribe(), Index()
    other.apply(next(late))
    assert all(map(other.has, prompts))
    assert other.blocks == index.blocks
    assert worker.completes(prompts[0], max_tokens=1)[0].cached_tokens == (len(prompts[0]) - 1) // 16 * 16
    num_records = len(index.samples)
    for _ in range(2):  # without any change
        index.apply(next(early))
    assert index.samples == list(range(1, num_records + 3))
    flushed = worker.call("FlushCache", common_pb2.FlushCacheRequest())
    assert flushed.success, flushed.message
    while index.blocks:
        index.apply(next(early))
    assert worker.completes(prompts[0], max_tokens=1)[0].cached_tokens == 0
    early.cancel()
    late.cancel()


def test_a_load_record_has_the_numbers_of_the_pool(worker: Worker) -> None:
    call = worker.generate(stream=True, max_tokens=1900, ignore_eos=True, n=3)
    next(call)
    await_that("three samples run", lambda: loads(worker).num_running_reqs == 3)
    load = await_that("blocks are counted", lambda: (found := loads(worker)).num_used_tokens and found)
    assert load.max_total_num_tokens == 511 * 16
    assert load.token_usage == pytest.approx(load.num_used_tokens / load.max_total_num_tokens)
    call.cancel()


def test_calls_that_describe(worker: Worker) -> None:
    assert worker.call("HealthCheck", vllm_engine_pb2.HealthCheckRequest()).healthy
    model = worker.call("GetModelInfo", vllm_engine_pb2.GetModelInfoRequest())
    assert (model.served_model_name, model.tokenizer_path) == (MODEL, str(FOLDER))
    assert (model.max_context_length, model.vocab_size) == (2048, TOKENIZER.vocabulary_size)
    assert list(model.architectures) == ["LlamaForCausalLM"]
    server = worker.call("GetServerInfo", vllm_engine_pb2.GetServerInfoRequest())
    assert (server.block_size, server.data_parallel_size, server.max_num_seqs) == (16, 1, 256)
    chunks = list(worker.call("GetTokenizer", common_pb2.GetTokenizerRequest()))
    archive = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(archive).hexdigest()
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        assert files.read("tokenizer.json") == (FOLDER / "tokenizer.json").read_bytes()
    with pytest.raises(grpc.RpcError) as caught:
        worker.call("Embed", vllm_engine_pb2.EmbedRequest())
    assert RefusedError.of_call(caught.value).code == grpc.StatusCode.UNIMPLEMENTED
