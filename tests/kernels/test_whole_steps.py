"""Decode steps as one graph each, run here without graphs: the tokens are those of steps in parts, and of the model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import model_zoo as zoo
import pytest
import torch
from executor_driver import MAX_NUM_SEQS, ExecutorDriver, Stream
from gpu_desk.steps import BLOCK_SIZE, MAX_MODEL_LEN

from quire.worker.attention.triton_attention import TritonAttentionStep
from quire.worker.memory.kv_pool import KVPool
from quire.worker.memory.step_ring import StepRing
from quire.worker.model.paged_model import PagedModel
from quire.worker.model.preparing import prepare_model
from quire.worker.run import graphs
from quire.worker.run.executor import Outcome
from quire.worker.run.graphs import CannotCapture, Stage, StaticDecode, Whole
from quire.worker.sampling.parameters import SamplingParams
from quire.worker.sampling.sampler import Way

pytestmark = pytest.mark.usefixtures("small_device")

Replays = list[tuple[Stage | Way | Whole, int]]


def make_whole(model: PagedModel, pool: KVPool, *, max_num_seqs: int = MAX_NUM_SEQS) -> StaticDecode:
    decode = StaticDecode(
        model, pool, max_num_seqs=max_num_seqs, max_blocks_per_seq=-(-model.max_model_len // pool.block_size)
    )
    decode.make_ring()
    return decode


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    """The stages that are replayed from here on."""
    noted: Replays = []
    replay = StaticDecode._replay

    def note(self: StaticDecode, stage: Stage | Way | Whole, bucket: int) -> None:
        noted.append((stage, bucket))
        replay(self, stage, bucket)

    monkeypatch.setattr(StaticDecode, "_replay", note)
    return noted


class Schedule:
    """Sequences that begin with one token, grow, fork, move to the host tier and back, and end, at random."""

    def __init__(self, driver: ExecutorDriver, seed: int) -> None:
        self.driver = driver
        self.random = random.Random(seed)
        self.running: list[Stream] = []
        self.away: list[Stream] = []
        self.ended: list[list[int]] = []

    def turn(self, *, most: int) -> None:
        """Some of the changes, then one step of one token for each sequence that runs."""
        draw = self.random.random
        forked = None
        if len(self.running) < most and draw() < 0.5:
            self.running.append(self.driver.admit([self.random.randrange(zoo.VOCAB_SIZE)]))
        elif 0 < len(self.running) < most and self.running[0].num_computed > 1 and draw() < 0.4:
            forked = self.driver.fork(self.running[0])
        elif self.away and draw() < 0.5:
            self.driver.restore(self.away[0])
            self.running.append(self.away.pop())
        elif len(self.running) > 2 and draw() < 0.2:
            self.driver.offload(self.running[1])
            self.away.append(self.running.pop(1))
        elif len(self.running) > 1 and draw() < 0.2:
            self.ended.append(self.running[-1].tokens)
            self.driver.end(self.running.pop())
        self.running += [] if forked is None else [forked]
        self.random.shuffle(self.running)
        if self.running:
            assert self.driver.step([(stream, 1) for stream in self.running]) is Outcome.COMPUTED

    def tokens(self) -> list[list[int]]:
        return [*self.ended, *(stream.tokens for stream in (*self.running, *self.away))]


def run_schedule(model: PagedModel, own: Any, replays: Replays, *, num_turns: int, most: int, seed: int) -> None:
    driver = ExecutorDriver(model, block_size=BLOCK_SIZE, make_decode=make_whole)
    schedule = Schedule(driver, seed)
    for _ in range(num_turns):
        schedule.turn(most=most)
    found = schedule.tokens()
    assert found == [zoo.generate(own, tokens[:1], len(tokens) - 1) for tokens in found]
    assert max(map(len, found)) > BLOCK_SIZE + 1, "a sequence has grown over the border of a block"
    assert len(replays) > num_turns / 2
    assert {stage for stage, _ in replays} == {Whole.GREEDY}, "no step ran in parts"
    assert len({bucket for _, bucket in replays}) > 1


@pytest.mark.sample
def test_a_random_schedule_gives_the_tokens_of_the_model(device: torch.device, replays: Replays) -> None:
    def build() -> Any:
        return zoo.one_layer_llama(max_position_embeddings=MAX_MODEL_LEN)

    own = build()
    own.set_attn_implementation("eager")
    model = prepare_model(build().to(device), max_model_len=MAX_MODEL_LEN, step_kind=TritonAttentionStep)
    run_schedule(model, own, replays, num_turns=20, most=3, seed=1)


@pytest.mark.verify
def test_a_random_schedule_over_layer_groups_gives_the_tokens_of_the_model(
    device: torch.device, replays: Replays
) -> None:
    own = zoo.build("gemma2")
    own.set_attn_implementation("eager")
    model = prepare_model(zoo.build("gemma2").to(device), max_model_len=MAX_MODEL_LEN, step_kind=TritonAttentionStep)
    assert len(model.layer_groups) == 3
    run_schedule(model, own, replays, num_turns=26, most=4, seed=0)


def test_a_whole_step_that_fails_fails_alone_and_leaves_its_slot(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table's changes of the step that failed reach the device with the next one."""
    driver = ExecutorDriver(model, block_size=BLOCK_SIZE, make_decode=make_whole)
    stream = driver.admit([5])
    with monkeypatch.context() as patch:
        patch.setattr(StaticDecode, "_run_forward", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
        assert driver.step([(stream, 1)]) is Outcome.FAILED
    for _ in range(2 * graphs.MAX_UNCOLLECTED):
        assert driver.step([(stream, 1)]) is Outcome.COMPUTED
    decode = driver.executor._decode
    assert decode is not None
    decode.table.check_invariants()


def check(model: PagedModel) -> None:
    decode = make_whole(model, model.make_pool(num_blocks=5, block_size=BLOCK_SIZE), max_num_seqs=2)
    graphs._check_whole(decode)
    assert decode.table.statistics().num_seqs == 0


def broken(function: Callable[..., Any], change: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        change(options)
        return function(*args, **options)

    return call


@pytest.mark.parametrize("sampled", [False, True], ids=["tables", "tokens"])
def test_the_check_at_start_finds_steps_that_differ(
    sampled: bool, model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes of the table that do not reach the device, tokens that are not those of the sampler."""
    monkeypatch.setattr(graphs, "_CHECKED_PARAMS", (SamplingParams(),) * 2)
    if sampled:
        fill = StepRing.read
        monkeypatch.setattr(StepRing, "read", lambda *args: fill(*args) + 1)
    else:
        monkeypatch.setattr("quire.worker.memory.step_ring._changes_by_sequence", no_changes)
    with pytest.raises(CannotCapture, match="other tokens of" if sampled else "other block tables"):
        check(model)


def no_changes(table: object, rows: list[int]) -> tuple[Any, Any, Any]:
    nothing = torch.zeros(len(rows) + 1, dtype=torch.int64).numpy()
    return nothing, nothing, nothing[:0]


@pytest.mark.verify
def test_the_check_at_start_passes(model: PagedModel) -> None:
    check(model)
