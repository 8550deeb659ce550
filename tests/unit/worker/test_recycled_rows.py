"""A row of the sequence table that is used again: its next sequence has no token, mask or count of the one before it.

vLLM's CVE-2026-114049 and its kind: a mask stayed in a row that another request had moved to.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import model_zoo as zoo
import numpy as np
import pytest
import text_model
import torch
from executor_driver import MAX_MODEL_LEN, ExecutorDriver, Stream
from model_zoo import VOCAB_SIZE

from quire.cache.v1 import grant_pb2
from quire.worker.grant.decoding import AcceptedStep, RowSampling
from quire.worker.memory.kv_pool import KVPool
from quire.worker.model.checkpoint import load_model
from quire.worker.model.model_source import find_tokenizer
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.preparing import prepare_model
from quire.worker.run.executor import Executor, Outcome
from quire.worker.sampling.constraints import Constraints
from quire.worker.sampling.following import Following
from quire.worker.sampling.grammars import Grammar, Grammars, load_grammars
from quire.worker.sampling.parameters import SamplingParams

MAX_NUM_SEQS = 8
NUM_REQUESTS = 64
EVERY_OTHER = np.arange(0, VOCAB_SIZE, 2)
BAD_WORDS = tuple((first, last) for first in range(0, VOCAB_SIZE, 2) for last in range(40))
PARAMETERS: tuple[SamplingParams | None, ...] = (
    None,  # none are sent: greedy
    SamplingParams(),
    SamplingParams(constraints=Constraints(allowed_token_ids=EVERY_OTHER[:9])),
    SamplingParams(constraints=Constraints(bad_words=tuple((token,) for token in EVERY_OTHER.tolist()))),
    SamplingParams(constraints=Constraints(bad_words=BAD_WORDS[:1000])),
    SamplingParams(constraints=Constraints(logit_bias=dict.fromkeys(range(9), 8.0))),
    SamplingParams(constraints=Constraints(min_seq_tokens=12, end_token_ids=EVERY_OTHER)),
    SamplingParams(frequency_penalty=2.0, presence_penalty=1.0),
    SamplingParams(repetition_penalty=1e6),
    SamplingParams(temperature=1.5, seed=4, num_logprobs=2),
)


@dataclass(frozen=True, slots=True)
class Request:
    prompt: list[int]
    num_new: int
    params: SamplingParams | None

    def sampling(self, stream: Stream) -> dict[int, RowSampling]:
        """The parameters for a worker, by sequence."""
        if self.params is None:
            return {}
        last = self.prompt[-15:]
        return {stream.seq_id: RowSampling(self.params, prompt_token_ids=self.prompt, last_token_ids=last)}


def draw_requests(seed: int) -> list[Request]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 9))] for _ in range(NUM_REQUESTS)]
    return [Request(prompt, rng.randint(1, 8), rng.choice(PARAMETERS)) for prompt in prompts]


def prepare(family: str) -> PagedModel:
    return prepare_model(zoo.build(family), max_model_len=MAX_MODEL_LEN)


def serve(model: PagedModel, requests: list[Request], *, places: int) -> list[list[int]]:
    """Return the generated tokens of each request; the next one takes a place, and its row, when one has ended."""
    driver, waiting = ExecutorDriver(model), list(enumerate(requests))
    running: dict[int, tuple[int, Stream]] = {}
    generated: dict[int, list[int]] = {}
    while waiting or running:
        sampling: dict[int, RowSampling] = {}
        for place in range(places):
            if place not in running and waiting:
                number, request = waiting.pop(0)
                running[place] = number, driver.admit(request.prompt)
                sampling |= request.sampling(running[place][1])
        streams = [running[place][1] for place in sorted(running)]
        counts = [(stream, len(stream.tokens) - stream.num_computed) for stream in streams]
        assert driver.step(counts, sampling) is Outcome.COMPUTED
        for place, (number, stream) in list(running.items()):
            tokens = stream.tokens[len(requests[number].prompt) :]
            if len(tokens) == requests[number].num_new:
                generated[number] = tokens
                driver.end(stream)
                del running[place]
    return [generated[number] for number in range(len(requests))]


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_requests_in_rows_of_others_get_the_tokens_that_they_get_alone(family: str) -> None:
    model, requests = prepare(family), draw_requests(1)
    together = serve(model, requests, places=MAX_NUM_SEQS)
    alone = [serve(model, [request], places=1)[0] for request in requests]
    assert together == alone
    assert {request.params for request in requests} == set(PARAMETERS)


def test_a_row_follows_no_grammar_of_the_sequence_before(tmp_path: Path) -> None:
    """The second sequence has no parameters, as a client of the RPCs may leave them out."""
    folder, end_id = text_model.save(tmp_path), text_model.make_tokenizer().token_to_id(text_model.END)
    model = load_model(str(folder), dtype=torch.float32, device=torch.device("cpu"), max_model_len=MAX_MODEL_LEN)
    grammars = load_grammars(find_tokenizer(str(folder)), vocab_size=model.vocab_size, end_token_ids=[end_id])
    assert isinstance(grammars, Grammars)

    def run(driver: ExecutorDriver, following: Following | None) -> list[int]:
        stream = driver.admit([5, 6, 7])
        sampling = {} if following is None else {stream.seq_id: RowSampling(SamplingParams(), following=following)}
        for count in (3, 1, 1):
            assert driver.step([(stream, count)], sampling) is Outcome.COMPUTED
            sampling = {}
        driver.end(stream)
        return stream.tokens[3:]

    driver = ExecutorDriver(model)
    following = asyncio.run(grammars.follow(Grammar("regex", "[a-c]{3}"), begins_at=3, tokens=[]))
    grammars.close()
    bound, free = run(driver, following), run(driver, None)
    assert set(text_model.make_tokenizer().decode(bound)) <= set("abc")
    assert free == run(ExecutorDriver(model), None) != bound


def test_a_row_has_no_last_token_of_the_sequence_before() -> None:
    """A run that needs the token sampled last fails, if the sequence before it sampled one for the same position."""
    model = prepare("llama")
    pool = KVPool(model.specs, num_blocks=4, block_size=4, dtype=model.dtype, device="cpu")
    executor = Executor(model, pool, max_num_seqs=1)
    blocks = {"write_first_indexes": [0], "write_block_counts": [1], "write_block_ids": [1]}
    prompt = {"run_starts": [0], "run_token_counts": [2], "run_samples": [True], "given_run_indexes": [0]}
    first = grant_pb2.StepGrant(
        lease_id="one", step_number=1, write_sequence_ids=[1], run_sequence_ids=[1], **blocks, **prompt
    )
    assert executor.execute(AcceptedStep(first, {0: np.array([5, 6], np.int32)})).outcome is Outcome.COMPUTED
    decode = {"run_starts": [2], "run_token_counts": [1], "run_samples": [True]}
    fields = {"write_sequence_ids": [2], "run_sequence_ids": [2], **blocks, **decode}
    second = grant_pb2.StepGrant(
        lease_id="one", step_number=2, known_step_number=1, released_sequence_ids=[1], **fields
    )
    assert executor.execute(AcceptedStep(second)).outcome is Outcome.FAILED
