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
from executor_driver import FORKED, MAX_MODEL_LEN, ExecutorDriver, make_prompts, run_mixed

from quire.cache.v1 import grant_pb2
from quire.worker.device.transfer import Moment, Readback, to_device
from quire.worker.grant.decoding import AcceptedStep, RowSampling
from quire.worker.memory.host_pool import HostCopies, make_host_pool
from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.layer_groups import LayerGroupChoice
from quire.worker.model.checkpoint import load_model
from quire.worker.model.model_source import find_tokenizer
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.preparing import prepare_model
from quire.worker.run.executor import DeviceLostError, Executor, Outcome, PoolDamagedError, StepResult
from quire.worker.run.verify import VerifyingExecutor
from quire.worker.sampling import sampler
from quire.worker.sampling.grammars import Grammar, Grammars, load_grammars
from quire.worker.sampling.parameters import SamplingParams

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
) -> AcceptedStep:
    tokens = {index: np.array(ids, dtype=np.int32) for index, ids in enumerate(given)}
    return AcceptedStep(step_grant, tokens, sampling or {})


def steps() -> list[AcceptedStep]:
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
    return replace(result, prepare_s=0.0, forward_s=0.0, sample_s=0.0, gap_s=None)


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
    without_tokens = AcceptedStep(first.grant, {}, first.sampling)
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


@pytest.mark.parametrize("choice", ["auto", "one"])
@pytest.mark.parametrize("family", ["gemma3", "mistral", "gpt_oss", "llama4"])
def test_models_with_windows_run_in_tables_by_layer_group(family: str, choice: LayerGroupChoice) -> None:
    """Passed blocks are full of NaN, and handed out again."""
    model = prepare_model(zoo.build(family), max_model_len=MAX_MODEL_LEN, layer_groups=choice)
    kinds = {group.is_windowed for group in model.layer_groups}
    assert kinds == ({False} if choice == "one" else {True} if family == "mistral" else {True, False})
    driver = ExecutorDriver(model)
    found, forked = run_mixed(model, 10, driver=driver)
    own = zoo.build(family)
    own.set_attn_implementation("eager")
    expected = [zoo.generate(own, prompt, 10) for prompt in make_prompts()]
    assert found == expected
    assert forked == [expected[i] for i in FORKED]
    assert (driver.num_passed > 0) == (choice == "auto")


@pytest.mark.parametrize("family", ["gemma3", "mistral", "llama4", "llama"])
def test_a_sequence_goes_on_with_the_blocks_of_all_groups_from_the_host_tier(family: str) -> None:
    model = prepare_model(zoo.build(family), max_model_len=MAX_MODEL_LEN)
    driver, prompts = ExecutorDriver(model), make_prompts()
    moved, other = driver.admit(prompts[1]), driver.admit(prompts[2])
    driver.step([(moved, len(prompts[1])), (other, len(prompts[2]))])
    driver.step([(moved, 1), (other, 1)])
    driver.offload(moved)
    driver.step([(other, 1)])
    driver.restore(moved)
    for _ in range(4):
        assert driver.step([(moved, 1), (other, 1)]) is Outcome.COMPUTED
    own = zoo.build(family)
    own.set_attn_implementation("eager")
    assert moved.tokens == zoo.generate(own, prompts[1], 6)
    assert other.tokens == zoo.generate(own, prompts[2], 7)


def test_a_sequence_longer_than_the_pool_runs_if_its_windows_fit() -> None:
    """60 tokens through 5 blocks of 4: the window of 8 needs 3 of them."""
    model = prepare_model(zoo.build("mistral"), max_model_len=64)
    pool = model.make_pool(num_blocks=6, block_size=BLOCK_SIZE)
    some = VerifyingExecutor(model, pool, max_num_seqs=1)
    free, table, tokens = [1, 2, 3, 4, 5], list[int](), [7]
    for position in range(60):
        number = position + 1
        step_grant = grant(number, known_step_number=position, run_sequence_ids=[1], run_samples=[True])
        step_grant.run_starts.append(position)
        step_grant.run_token_counts.append(1)
        passed = pool.groups[0].count_passed(position, BLOCK_SIZE)
        if any(table[:passed]):
            step_grant.passed_sequence_ids.append(1)
            step_grant.passed_layer_groups.append(0)
            step_grant.passed_block_counts.append(passed)
            free += [block_id for block_id in table[:passed] if block_id]
            table[:passed] = [0] * passed
        if position % BLOCK_SIZE == 0:
            step_grant.write_sequence_ids.append(1)
            step_grant.write_first_indexes.append(len(table))
            step_grant.write_block_counts.append(1)
            step_grant.write_block_ids.append(free.pop(0))
            table.append(step_grant.write_block_ids[0])
        given = [[7]] if position == 0 else []
        step_grant.given_run_indexes.extend(range(len(given)))
        tokens += some.execute(make_step(step_grant, *given)).sampled_tokens
    own = zoo.build("mistral")
    own.set_attn_implementation("eager")
    assert tokens == zoo.generate(own, [7], 60)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"passed_layer_groups": [1], "passed_block_counts": [4]}, r"num_blocks=4 to pass is not in 1 \.\. 3"),
        ({"passed_layer_groups": [0], "passed_block_counts": [1]}, "layer group 0 has no window"),
        ({"passed_layer_groups": [3], "passed_block_counts": [1]}, r"layer group 3 is not in 0 \.\. 2"),
        ({"passed_layer_groups": [1]}, "shorter"),
    ],
)
def test_a_grant_that_passes_what_it_can_not_damages_the_pool(fields: dict[str, list[int]], message: str) -> None:
    model = prepare_model(zoo.build("gemma3"), max_model_len=64)
    some = Executor(model, model.make_pool(num_blocks=12, block_size=BLOCK_SIZE), max_num_seqs=4)
    tables = grant(1, write_sequence_ids=[1] * 3, write_layer_groups=[0, 1, 2], write_first_indexes=[0] * 3)
    tables.write_block_counts.extend([3] * 3)
    tables.write_block_ids.extend(range(1, 10))
    assert some.execute(make_step(tables)).outcome is Outcome.COMPUTED
    with pytest.raises(PoolDamagedError, match=message):
        some.execute(make_step(grant(2, passed_sequence_ids=[1], **fields)))


def test_blocks_that_are_passed_and_then_written_are_those_of_the_grant() -> None:
    """A table is passed before it is written: the order in the grant's fields does not matter."""
    model = prepare_model(zoo.build("gemma3"), max_model_len=64)
    some = Executor(model, model.make_pool(num_blocks=12, block_size=BLOCK_SIZE), max_num_seqs=4)
    tables = grant(1, write_sequence_ids=[1, 1], write_layer_groups=[0, 2], write_first_indexes=[0, 0])
    tables.write_block_counts.extend([1, 2])
    tables.write_block_ids.extend([1, 2, 3])
    some.execute(make_step(tables))
    both = grant(2, write_sequence_ids=[1], write_layer_groups=[2], write_first_indexes=[2], write_block_counts=[1])
    both.write_block_ids.append(2)
    both.passed_sequence_ids.append(1)
    both.passed_layer_groups.append(2)
    both.passed_block_counts.append(1)
    some.execute(make_step(both))
    assert [some._table.block_ids(0, group=group) for group in range(3)] == [[1], [], [0, 3, 2]]


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


def test_the_gap_in_front_of_a_step_begins_when_the_one_before_has_ended(model: PagedModel) -> None:
    """Steps that bring all of their tokens have none: there may have been no request before them."""
    one_by_one = executor(model)
    prompts_alone, *others = [(step, one_by_one.execute(step)) for step in steps()]
    assert prompts_alone[1].gap_s is None
    gaps = [(result.gap_s, result.prepare_s) for step, result in others if len(step.given_tokens) < 2]
    assert gaps
    assert all(gap_s is not None and gap_s >= prepare_s for gap_s, prepare_s in gaps)
    again = executor(model)
    again.execute(steps()[0])
    again.fence_lease("lease")
    assert again.execute(steps()[0]).gap_s is None
