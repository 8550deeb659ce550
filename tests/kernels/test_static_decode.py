"""Decode steps on static memory, without graphs, against the same steps without static memory: token for token."""

from __future__ import annotations

from dataclasses import replace

import model_zoo as zoo
import pytest
import torch
from gpu_desk.steps import BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS, mixed_and_decode_steps

from quire.worker.attention.triton_attention import TritonAttentionStep
from quire.worker.grant.decoding import AcceptedStep
from quire.worker.memory.kv_pool import KVPool
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.preparing import prepare_model
from quire.worker.run import graphs
from quire.worker.run.executor import Executor, Outcome, StepResult
from quire.worker.run.graphs import CannotCapture, Stage, StaticDecode, Whole
from quire.worker.run.verify import VerifyingExecutor
from quire.worker.sampling.parameters import SamplingParams
from quire.worker.sampling.sampler import Sampler, Way

pytestmark = pytest.mark.usefixtures("small_device")

NUM_DECODES = 4

GREEDY = SamplingParams()
PLAIN = SamplingParams(temperature=1.5)
FILTERS = SamplingParams(temperature=1.2, top_k=9, top_p=0.9, min_p=0.05)
PENALTIES = SamplingParams(temperature=0.9, repetition_penalty=1.2, presence_penalty=0.3)
LOGPROBS = SamplingParams(num_logprobs=2)
# One for each sequence, and how the static sampler chooses the tokens of decode steps, if it does.
BATCHES = {
    "greedy": ((GREEDY, GREEDY, GREEDY, GREEDY), Way.GREEDY),
    "drawn and greedy": ((FILTERS, GREEDY, PLAIN, replace(PLAIN, top_p=0.7)), Way.DRAWN),
    "penalties and log-probabilities": ((PENALTIES, LOGPROBS, PLAIN, GREEDY), None),
}


def make_pool(model: PagedModel) -> KVPool:
    return model.make_pool(num_blocks=1 + 16 * len(model.layer_groups), block_size=BLOCK_SIZE)


def make_static(model: PagedModel, pool: KVPool) -> StaticDecode:
    width = MAX_MODEL_LEN // BLOCK_SIZE
    return StaticDecode(model, pool, max_num_seqs=MAX_NUM_SEQS, max_blocks_per_seq=width)


def make_steps(params: tuple[SamplingParams, ...], *, num_groups: int = 1) -> list[AcceptedStep]:
    """Steps of four sequences; in the last two only of three, and in the last one the first does not sample."""
    mixed, decodes = mixed_and_decode_steps(GREEDY, num_groups=num_groups)
    decodes = decodes[:NUM_DECODES]
    for step in mixed:
        step.grant.given_run_indexes.extend(step.given_tokens)
        for seq_id, sampling in step.sampling.items():
            own = replace(params[seq_id - 1], seed=seq_id)
            step.sampling[seq_id] = replace(sampling, params=own)
    for step in decodes[-2:]:
        for field in ("run_sequence_ids", "run_starts", "run_token_counts", "run_samples"):
            del getattr(step.grant, field)[-1]
    decodes[-1].grant.run_samples[0] = False
    return [*mixed, *decodes]


def run(executor: Executor, steps: list[AcceptedStep]) -> list[StepResult]:
    results = [executor.execute(step) for step in steps]
    assert all(result.outcome is Outcome.COMPUTED for result in results)
    return results


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stages that are replayed from here on."""
    noted: list[str] = []
    replay = StaticDecode._replay

    def note(self: StaticDecode, stage: Stage | Way | Whole, bucket: int) -> None:
        noted.append(stage)
        replay(self, stage, bucket)

    monkeypatch.setattr(StaticDecode, "_replay", note)
    return noted


@pytest.mark.parametrize("step_graph", ["parts", "one"])
@pytest.mark.parametrize("batch", BATCHES)
def test_static_steps_sample_what_ordinary_steps_sample(
    batch: str, step_graph: str, model: PagedModel, replays: list[str]
) -> None:
    params, way = BATCHES[batch]
    pools = [make_pool(model) for _ in range(2)]
    ordinary = run(Executor(model, pools[0], max_num_seqs=MAX_NUM_SEQS), make_steps(params))

    decode = make_static(model, pools[1])
    if step_graph == "one":
        decode.make_ring()
    static = run(VerifyingExecutor(model, pools[1], max_num_seqs=MAX_NUM_SEQS, decode=decode), make_steps(params))

    for result, expected in zip(static, ordinary, strict=True):
        assert result.sampled_ids == expected.sampled_ids
        assert result.sampled_tokens == expected.sampled_tokens
        assert [given.top_token_ids for given in result.logprobs] == [
            given.top_token_ids for given in expected.logprobs
        ]
    num_static = 1 + NUM_DECODES  # the second prompt has one token
    if step_graph == "one" and way is not None:  # but for the last step, in which one sequence does not sample
        assert replays.count(Whole[way.name]) == num_static - 1
        num_static, replays = 1, [stage for stage in replays if stage not in list(Whole)]
        assert decode.ring is not None
        assert decode.ring.has_room
    assert replays.count(Stage.FORWARD) == replays.count(Stage.PREPARE) == num_static
    assert len(replays) == 2 * num_static + (0 if way is None else num_static - 1)
    assert way is None or step_graph == "one" or way in replays
    decode.table.check_invariants()
    for written, expected_blocks in zip(pools[1].tensors(), pools[0].tensors(), strict=True):
        torch.testing.assert_close(written, expected_blocks, atol=1e-5, rtol=1e-5)


def test_steps_beyond_the_ring_are_run_in_parts_and_later_ones_whole_again(
    model: PagedModel, replays: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launched without being collected: no slot is free, and no step waits for one."""
    monkeypatch.setattr(graphs, "MAX_UNCOLLECTED", 2)
    pools = [make_pool(model) for _ in range(2)]
    decode = make_static(model, pools[1])
    decode.make_ring()
    executor = Executor(model, pools[1], max_num_seqs=MAX_NUM_SEQS, decode=decode)
    steps = make_steps((SamplingParams(),) * 4)[:-1]
    *_, a, b, c = steps
    for step in steps[:-3]:
        executor.execute(step)
    replays.clear()
    launched = [executor.launch(step) for step in (a, b)]
    assert replays == [Whole.GREEDY, Whole.GREEDY]
    replays.clear()
    launched.append(executor.launch(c))
    assert replays == [Stage.PREPARE, Stage.FORWARD, Way.GREEDY]
    expected = run(Executor(model, pools[0], max_num_seqs=MAX_NUM_SEQS), make_steps((SamplingParams(),) * 4)[:-1])
    assert [each.collect().sampled_tokens for each in launched] == [each.sampled_tokens for each in expected[-3:]]
    assert decode.ring is not None
    assert decode.ring.has_room


def test_static_steps_read_the_tables_of_each_layer_group(device: torch.device) -> None:
    model = prepare_model(zoo.build("gemma2").to(device), max_model_len=MAX_MODEL_LEN, step_kind=TritonAttentionStep)
    num_groups = len(model.layer_groups)
    assert num_groups == 3
    pools = [make_pool(model) for _ in range(2)]
    steps = [make_steps((GREEDY,) * 4, num_groups=num_groups) for _ in pools]
    ordinary = run(Executor(model, pools[0], max_num_seqs=MAX_NUM_SEQS), steps[0])
    decode = make_static(model, pools[1])
    static = run(VerifyingExecutor(model, pools[1], max_num_seqs=MAX_NUM_SEQS, decode=decode), steps[1])
    assert [result.sampled_tokens for result in static] == [result.sampled_tokens for result in ordinary]
    for written, expected in zip(pools[1].tensors(), pools[0].tensors(), strict=True):
        torch.testing.assert_close(written, expected, atol=1e-5, rtol=1e-5)


def test_logits_are_kept_in_the_dtype_of_the_output_layer(device: torch.device) -> None:
    own = zoo.build("llama").to(device, torch.bfloat16)
    model = prepare_model(own, max_model_len=MAX_MODEL_LEN, step_kind=TritonAttentionStep)
    for dtype in (torch.bfloat16, torch.float32):
        pool = make_pool(model)
        decode = make_static(model, pool)
        row = decode.table.add()
        decode.table.stage_blocks(row, 0, [3])
        batch = decode.prepare([row], [0], [[5]], draws=None)
        logits = decode.forward(batch)
        assert logits.dtype == dtype
        assert torch.equal(logits.float(), model.forward(batch, pool))
        own.get_output_embeddings().register_forward_hook(lambda module, args, output: output.float())


def test_a_prepared_step_is_refused_as_an_ordinary_one(model: PagedModel) -> None:
    decode = make_static(model, make_pool(model))
    row = decode.table.add()
    decode.table.stage_blocks(row, 0, [3])
    with pytest.raises(ValueError, match=r"hold positions 0 \.\. 15, and the tokens take 16 \.\. 16"):
        decode.prepare([row], [16], [[5]], draws=None)
    with pytest.raises(ValueError, match="its last sampled token takes position None"):
        decode.prepare([row], [4], [None], draws=None)
    batch = decode.prepare([row], [4], [[5]], draws=None)
    decode.prepare([row], [4], [[6]], draws=None)
    with pytest.raises(ValueError, match="prepared last"):
        decode.sample(batch, Way.GREEDY)


def test_the_check_at_start_holds_the_static_sampler_against_the_sampler(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "NUM_CHECKED_POSITIONS", 1)
    decode = make_static(model, make_pool(model))
    graphs._check_sampling(decode)
    sample = Sampler.sample

    def sample_others(self: Sampler, logits: torch.Tensor, *args: object) -> object:
        return sample(self, -logits, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Sampler, "sample", sample_others)
    with pytest.raises(CannotCapture, match=r"replayed, the sampler chose \d+ other tokens of 8"):
        graphs._check_sampling(decode)
