"""Steps launched before earlier ones are collected: the same tokens as one after the other."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import model_zoo as zoo
import numpy as np
import pytest
import text_model
import torch

from quire.cache.v1 import grant_pb2
from quire.worker import sampler
from quire.worker.executor import DeviceLostError, Executor, Outcome, PoolDamagedError, StepResult
from quire.worker.grammars import Grammar, Grammars, load_grammars
from quire.worker.grants import RowSampling, Step
from quire.worker.host_pool import HostCopies, make_host_pool
from quire.worker.kv_pool import KVPool
from quire.worker.model import PagedModel, load_model, prepare_model
from quire.worker.model_source import find_tokenizer
from quire.worker.sampler import SamplingParams
from quire.worker.transfer import Moment, Readback, to_device

BLOCK_SIZE = 4
PROMPTS = {1: [5, 9, 2, 11, 3, 8], 2: [7, 1]}
CPU = torch.device("cpu")
END_ID = text_model.make_tokenizer().token_to_id(text_model.END)
VOCAB_SIZE = text_model.make_tokenizer().get_vocab_size() + 5


@pytest.fixture(scope="module")
def model() -> PagedModel:
    return prepare_model(zoo.build("llama"), max_model_len=64)


def executor(model: PagedModel, *, num_host_blocks: int = 0) -> Executor:
    pool = KVPool(model.specs, num_blocks=12, block_size=BLOCK_SIZE, dtype=model.dtype, device="cpu")
    host_pool = make_host_pool(pool, num_blocks=num_host_blocks)
    return Executor(model, pool, max_num_seqs=4, host_pool=host_pool)


def grant(number: int, **fields: object) -> grant_pb2.StepGrant:
    return grant_pb2.StepGrant(lease_id="lease", step_number=number, **fields)  # type: ignore[arg-type]


def make_step(
    step_grant: grant_pb2.StepGrant, *given: list[int], sampling: dict[int, RowSampling] | None = None
) -> Step:
    tokens = {index: np.array(ids, dtype=np.int32) for index, ids in enumerate(given)}
    return Step(step_grant, tokens, sampling or {})


def steps() -> list[Step]:
    """Two prompts, one of them in parts; then decodes, with tokens that stay on the device."""
    blocks = {
        "write_sequence_ids": [1, 2],
        "write_first_indexes": [0, 0],
        "write_block_counts": [3, 3],
        "write_block_ids": [3, 9, 1, 7, 2, 4],
    }
    runs = {"run_sequence_ids": [1, 2]}
    drawn = {2: RowSampling(SamplingParams(temperature=1.0, seed=3, num_logprobs=2))}
    first = grant(1, **blocks, **runs, run_starts=[0, 0], run_token_counts=[4, 2], run_samples=[False, True])
    second = grant(2, **runs, run_starts=[4, 2], run_token_counts=[2, 1], run_samples=[True, True])
    decodes = [
        grant(number, **runs, run_starts=[3 + number, number], run_token_counts=[1, 1], run_samples=[True, True])
        for number in (3, 4)
    ]
    return [
        make_step(first, PROMPTS[1][:4], PROMPTS[2], sampling=drawn),
        make_step(second, PROMPTS[1][4:]),
        *(make_step(decode) for decode in decodes),
    ]


def without_times(result: StepResult) -> StepResult:
    return replace(result, prepare_s=0.0, forward_s=0.0, sample_s=0.0)


def test_steps_launched_ahead_say_what_steps_one_by_one_say(model: PagedModel) -> None:
    one_by_one = executor(model)
    expected = [one_by_one.execute(step) for step in steps()]
    ahead = executor(model)
    launched = [ahead.launch(step) for step in steps()]
    results = [each.collect() for each in launched]
    assert list(map(without_times, results)) == list(map(without_times, expected))
    assert [result.sampled_ids for result in results] == [[2], [1, 2], [1, 2], [1, 2]]
    assert [len(each.top) for each in results[1].logprobs] == [2]
    assert all(result.forward_s > 0 for result in results)
    assert not ahead.runs_ahead


def test_a_step_behind_one_that_failed_is_known_to_fail_at_launch(model: PagedModel) -> None:
    broken = executor(model)
    first, second, *_ = steps()
    without_tokens = Step(first.grant, {}, first.sampling)
    failed, behind = broken.launch(without_tokens), broken.launch(second)
    assert failed.collect().outcome is Outcome.FAILED
    assert behind.collect() == StepResult(2, Outcome.PRIOR_FAILED, failed_step=1)


def test_parameters_that_cannot_be_set_fail_the_steps_that_need_them_and_nothing_else(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = executor(model)
    first = steps()[0]
    penalties = {2: RowSampling(SamplingParams(repetition_penalty=1.5), prompt_token_ids=PROMPTS[2])}

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(sampler, "send", fail)
        assert broken.execute(replace(first, sampling=penalties)).outcome is Outcome.FAILED

    def run(number: int, seq_id: int, sampling: dict[int, RowSampling] | None = None) -> Outcome:
        runs: dict[str, Any] = {"run_sequence_ids": [seq_id], "run_starts": [0], "run_samples": [True]}
        step_grant = grant(number, known_step_number=number - 1, run_token_counts=[len(PROMPTS[seq_id])], **runs)
        return broken.execute(make_step(step_grant, PROMPTS[seq_id], sampling=sampling)).outcome

    assert run(2, 1) is Outcome.COMPUTED
    assert run(3, 2) is Outcome.FAILED  # and not sampled with the parameters that it had before
    assert run(4, 2, penalties) is Outcome.COMPUTED


def test_a_grant_that_cannot_be_applied_damages_the_pool(model: PagedModel) -> None:
    damaged = executor(model)
    with pytest.raises(PoolDamagedError):
        damaged.launch(make_step(grant(1, released_sequence_ids=[7])))
    with pytest.raises(PoolDamagedError, match="an earlier step"):
        damaged.launch(steps()[0])


@pytest.mark.parametrize("way", ["offload", "restore"])
def test_a_copy_of_the_host_tier_that_fails_damages_the_pool(model: PagedModel, way: str) -> None:
    damaged = executor(model, num_host_blocks=2)
    damaged.launch(steps()[0])
    leaving = grant(2, offloaded_sequence_ids=[2])
    leaving.offload_source_block_ids.extend([7, 2])
    leaving.offload_target_host_block_ids.extend([0, 1])
    if way == "offload":
        leaving.offload_target_host_block_ids[1] = 2  # there are two
        refused = leaving
    else:
        assert damaged.launch(make_step(leaving)).collect().host.num_offloaded == 2
        refused = grant(3, write_sequence_ids=[2], write_first_indexes=[0], write_block_counts=[2])
        refused.write_block_ids.extend([5, 6])
        refused.offload_source_block_ids.append(1)
        refused.offload_target_host_block_ids.append(1)
        refused.restore_source_host_block_ids.extend([0, 2])
        refused.restore_target_block_ids.extend([5, 6])
    with pytest.raises(PoolDamagedError, match="host_block_id 2 is not in"):
        damaged.launch(make_step(refused))
    with pytest.raises(PoolDamagedError, match="an earlier step"):
        damaged.launch(steps()[1])
    damaged.begin_epoch()
    assert damaged.launch(steps()[0]).collect().host == HostCopies(), "what the step that failed copied is not told"


class LostModel:
    """A forward on a GPU that has failed."""

    def __init__(self, model: PagedModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *_: object) -> torch.Tensor:
        raise torch.AcceleratorError("an illegal memory access was encountered")


def test_a_lost_device_is_no_failed_step(model: PagedModel) -> None:
    pool = KVPool(model.specs, num_blocks=12, block_size=BLOCK_SIZE, dtype=model.dtype, device="cpu")
    lost = Executor(LostModel(model), pool, max_num_seqs=4)  # type: ignore[arg-type]
    with pytest.raises(DeviceLostError, match=r"step 1: .*illegal memory access"):
        lost.launch(steps()[0])


def test_transfers_on_a_cpu_are_there_at_once() -> None:
    values = torch.arange(3)
    assert to_device(values, CPU) is values
    read, none = Readback(CPU, values, None).wait()
    values[0] = 7  # as a later step does in memory that it shares with this one
    assert read is not None
    assert (read.tolist(), none) == ([0, 1, 2], None)
    assert Readback(CPU).wait() == ()
    begin = Moment(CPU)
    assert begin.seconds_until(Moment(CPU)) >= 0


def test_steps_launched_ahead_follow_grammars_as_steps_one_by_one_do(
    tmp_path: Path,
) -> None:
    """The mask of a step is of the token before it, which is collected only after the step was launched."""
    folder = text_model.save(tmp_path)
    grammars = load_grammars(find_tokenizer(str(folder)), vocab_size=VOCAB_SIZE, end_token_ids=[END_ID])
    assert isinstance(grammars, Grammars)
    model = load_model(str(folder), dtype=torch.float32, device=CPU, max_model_len=64)

    def run(*, ahead: bool) -> list[StepResult]:
        some = executor(model)
        following = asyncio.run(grammars.follow(Grammar("regex", "[a-c]{2}x"), begins_at=6, tokens=[]))
        bound = {1: RowSampling(SamplingParams(temperature=1.0, seed=1), following=following)}
        first, *others = steps()
        todo = [replace(first, sampling={**first.sampling, **bound}), *others]
        if not ahead:
            return [some.execute(step) for step in todo]
        launched = [some.launch(step) for step in todo]
        return [each.collect() for each in launched]

    results = run(ahead=True)
    assert list(map(without_times, results)) == list(map(without_times, run(ahead=False)))
    tokens = [dict(zip(each.sampled_ids, each.sampled_tokens, strict=True)) for each in results]
    text = text_model.make_tokenizer().decode([each[1] for each in tokens if 1 in each])
    assert re.fullmatch("[a-c]{2}x", text)
    assert not any(each.grammar_failures for each in results)
    grammars.close()
