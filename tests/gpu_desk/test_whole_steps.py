"""Decode steps as one graph on the fake device: one replay each, no copy, and no slot of the ring written too early."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from gpu_desk.fake_device import FakeGPU, Seen
from gpu_desk.steps import MAX_NUM_SEQS, make_executor, mixed_and_decode_steps, start
from model_zoo import save
from samples import others_at_night

from quire.worker.memory.step_ring import RingOutOfStep, StepRing
from quire.worker.run.executor import Executor, Outcome
from quire.worker.run.loading import Loaded
from quire.worker.run.model_thread import MAX_UNCOLLECTED
from quire.worker.sampling.parameters import SamplingParams

DRAWN = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1)
PENALTIES = SamplingParams(temperature=0.7, presence_penalty=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def start_whole(folder: Path, family: str = "qwen3") -> Loaded:
    return start(save(family, folder), dtype="bfloat16", step_graph="one", max_graph_tokens=0)


def run(gpu: FakeGPU, executor: Executor, step: object) -> Seen:
    """Launch a step and collect it."""
    with gpu.watch() as seen:
        launched = executor.launch(step)  # type: ignore[arg-type]
        assert launched.collect().outcome is Outcome.COMPUTED
    return seen


@pytest.mark.parametrize("family", others_at_night(["qwen3", "gemma2"], ["qwen3"]))
def test_a_decode_step_is_one_replay_and_nothing_else(family: str, folder: Path) -> None:
    with FakeGPU() as gpu:
        loaded = start_whole(folder, family)
        executor = make_executor(loaded)
        gpu.waits.clear()
        for params in (SamplingParams(), DRAWN):
            mixed, decodes = mixed_and_decode_steps(params, num_groups=len(loaded.pool.groups))
            for step in mixed:
                run(gpu, executor, step)
            for step in decodes:
                seen = run(gpu, executor, step)
                assert (seen.replays, seen.num_launches) == (1, 1)
                assert (seen.syncs, seen.to_device, seen.to_host) == ([], 0, 0)
            executor.begin_epoch()
        assert set(gpu.waits) == {"block"}


def test_who_may_spin_does_so_for_decode_steps_while_they_are_short(folder: Path) -> None:
    """All times of the fake device are 1 ms: a step as one graph has one of them, one in parts has three."""
    with FakeGPU() as gpu:
        loaded = start_whole(folder)
        for ring, expected in ((loaded.decode.ring, "spin"), (None, "block")):  # type: ignore[union-attr]
            loaded.decode.ring = ring  # type: ignore[union-attr]
            executor = Executor(loaded.model, loaded.pool, max_num_seqs=MAX_NUM_SEQS, decode=loaded.decode, spins=True)
            waits = []
            for steps in mixed_and_decode_steps(SamplingParams()):
                for step in steps:
                    gpu.waits.clear()
                    run(gpu, executor, step)
                    waits += gpu.waits
            # The second step is of two sequences with one token each: the first one that is known.
            assert waits == ["block"] * 4 + [expected] * 8
            executor.begin_epoch()


def test_a_block_table_that_grew_costs_no_copy(folder: Path) -> None:
    """Nor does a sequence that ended: its entries are sent with the next step."""
    with FakeGPU() as gpu:
        executor = make_executor(start_whole(folder))
        mixed, decodes = mixed_and_decode_steps(SamplingParams())
        for step in mixed:
            grant = step.grant  # of the four blocks of a sequence, the last one comes later
            for index in range(len(grant.write_block_counts)):
                grant.write_block_counts[index] -= 1
                del grant.write_block_ids[-1]
            run(gpu, executor, step)
        growing = decodes[0].grant
        growing.write_sequence_ids.append(1)
        growing.write_layer_groups.append(0)
        growing.write_first_indexes.append(3)
        growing.write_block_counts.append(1)
        growing.write_block_ids.append(40)
        seen = run(gpu, executor, decodes[0])
        assert (seen.replays, seen.num_launches) == (1, 1)
        assert executor._table.statistics().num_staged == 0


@pytest.mark.verify
def test_steps_with_penalties_run_in_parts_and_behind_them_whole_ones_do(folder: Path) -> None:
    with FakeGPU() as gpu:
        executor = make_executor(start_whole(folder))
        mixed, decodes = mixed_and_decode_steps(PENALTIES)
        for step in [*mixed, *decodes]:
            seen = run(gpu, executor, step)
        assert (seen.replays, seen.to_device, seen.to_host) == (2, 2, 1)
        executor.begin_epoch()
        mixed, decodes = mixed_and_decode_steps(SamplingParams())
        for step in [*mixed, *decodes]:
            seen = run(gpu, executor, step)
        assert (seen.replays, seen.num_launches) == (1, 1)


def test_steps_in_flight_have_slots_of_their_own_and_one_too_many_runs_in_parts(folder: Path) -> None:
    with FakeGPU() as gpu:
        executor = make_executor(start_whole(folder))
        mixed, decodes = mixed_and_decode_steps(SamplingParams())
        for step in mixed:
            run(gpu, executor, step)
        with gpu.watch() as seen:
            launched = [executor.launch(step) for step in decodes[:MAX_UNCOLLECTED]]
        assert seen.num_launches == MAX_UNCOLLECTED
        with gpu.watch() as seen:
            launched.append(executor.launch(decodes[MAX_UNCOLLECTED]))
        assert (seen.replays, seen.to_device, seen.to_host) == (3, 1, 1)
        assert all(each.collect().outcome is Outcome.COMPUTED for each in launched)
        assert run(gpu, executor, decodes[MAX_UNCOLLECTED + 1]).num_launches == 1


@pytest.mark.verify
def test_the_fake_device_finds_a_slot_that_was_written_too_early(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeGPU() as gpu:
        executor = make_executor(start_whole(folder))
        mixed, decodes = mixed_and_decode_steps(SamplingParams())
        for step in mixed:
            run(gpu, executor, step)
        monkeypatch.setattr(StepRing, "has_room", True)
        launched = [executor.launch(step) for step in decodes[: MAX_UNCOLLECTED + 1]]
        with pytest.raises(AssertionError, match=r"slot \d was written again before turn \d+ had read it"):
            launched[0].collect()


@pytest.mark.verify
def test_memory_that_cannot_be_pinned_and_a_check_that_fails_leave_the_steps_in_parts(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: object) -> None:
        raise RingOutOfStep("slot 2 of the ring does not have the tokens of turn 7")

    for name, message in (("read", "slot 2 of the ring"), ("__init__", "the memory of the ring can't be pinned: no")):
        caplog.clear()
        with FakeGPU() as gpu, caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
            patch.setattr(StepRing, name, lose if name == "read" else _refuse)
            loaded = start_whole(folder)
            assert loaded.decode is not None
            assert loaded.decode.ring is None
            executor = make_executor(loaded)
            mixed, decodes = mixed_and_decode_steps(SamplingParams())
            for step in [*mixed, *decodes]:
                seen = run(gpu, executor, step)
            assert seen.replays == 3
        assert "--step-graph one: decode steps run in parts: " in caplog.text
        assert message in caplog.text


def _refuse(*_: object, **__: object) -> None:
    raise RuntimeError("no")


GRAPH_BYTES = 1 << 27


@pytest.mark.verify
def test_the_memory_of_whole_steps_is_not_given_to_the_pool(folder: Path) -> None:
    missing = {}
    for step_graph in ("parts", "one"):
        with FakeGPU(graph_bytes=GRAPH_BYTES) as gpu:
            loaded = start(
                save("llama", folder),
                memory_share=0.9,
                num_blocks=None,
                max_step_tokens=256,
                max_graph_tokens=0,
                step_graph=step_graph,
            )
            missing[step_graph] = loaded.pool.num_blocks * loaded.pool.bytes_per_block, gpu.num_graphs
    (parts_bytes, num_parts), (one_bytes, num_one) = missing["parts"], missing["one"]
    assert num_one * 2 == num_parts * 3  # two more for each bucket
    assert abs(parts_bytes - one_bytes - (num_one - num_parts) * GRAPH_BYTES) <= loaded.pool.bytes_per_block
