"""A worker of two ranks, through both services: the tokens of one rank, and no rank that survives another."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import torch
from deadlines import DEADLINE_S
from integration.conftest import assert_nothing_unexpected, await_all_blocks_back
from integration.protocol_client import FAULTY_WORKER, Hold, LeaseHolder, Pair, RefusedError, await_that, draw_tokens
from integration.test_equality import BLOCK_SIZE, MAX_STEP_TOKENS, NUM_BLOCKS, NUM_NEW, expected_tokens, make_prompts
from integration.test_metrics import page_of
from model_zoo import build, save
from samples import others_at_night
from sharded import BOUND, compare

from quire.cli.launch import LocalServices
from quire.cli.service_process import ServiceExitedError, ServiceProcess
from quire.client import Completion, Engine, EngineConfig, EngineStatistics, SamplingParams
from quire.worker.tensor_parallel.orders import HEADER_LENGTH

SIZE = 2
WORKER_ARGS = (
    *("--dtype", "float32", "--threads", "1", "--block-size", str(BLOCK_SIZE), "--max-num-seqs", "16"),
    *("--host-memory", "128K", "--tensor-parallel-size", str(SIZE)),
)
TORCHRUN_WORKER = str(Path(__file__).with_name("torchrun_worker.py"))
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "mixtral", "phi3", "gpt_oss", "one_kv_head")
FURTHER = ("deepseek_v3", "llama4", "qwen3_moe", "olmo2", "glm4", "smollm3", "odd_heads")
WITH_COPIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "mixtral", "glm4", "smollm3", "odd_heads")
"""Families with 2 kv heads, which 4 ranks can share."""
WHOLE_ATTENTION = {"phi3", "gpt_oss", "deepseek_v3", "olmo2"}
"""Families in which each rank has all heads."""
STEP_TIMEOUT_S = 4


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def services(model_dir: Path, folder: Path) -> Iterator[LocalServices]:
    with LocalServices.start(
        model=model_dir,
        num_blocks=NUM_BLOCKS,
        extra_worker_args=(*WORKER_ARGS, "--step-timeout", str(STEP_TIMEOUT_S), "--metrics-listen", "127.0.0.1:0"),
        runtime_dir=folder,
        worker_target=FAULTY_WORKER,
    ) as started:
        yield started


@pytest.fixture
def pair(services: LocalServices) -> Iterator[Pair]:
    """Both processes, attached. Afterwards every block of both tiers is back."""
    pair = Pair(services)
    pair.await_attached()
    yield pair
    await_all_blocks_back(pair)
    pool = pair.pool()
    assert pool.host_block_counts.free_count == pool.geometry.host_block_count > 0
    assert pair.violations() == []
    assert pair.worker_statistics().sequence_count == 0
    pair.close()


def ranks_of(services: LocalServices) -> list[psutil.Process]:
    """The processes of the ranks, the leader's first."""
    return ranks_of_process(services.worker)


def ranks_of_process(worker: ServiceProcess) -> list[psutil.Process]:
    """The same for a worker alone."""
    leader = psutil.Process(worker.pid)
    return [leader, *(each for each in leader.children() if is_follower(each))]


def is_follower(process: psutil.Process) -> bool:
    """True for a process that torch's spawn started."""
    return "spawn_main" in " ".join(process.cmdline())


async def generate(address: str, params: Sequence[SamplingParams]) -> tuple[list[Completion], EngineStatistics]:
    """make_prompts() twice: the second time finds prefixes in the cache."""
    async with Engine.connect(address, config=EngineConfig(max_step_tokens=MAX_STEP_TOKENS)) as engine:
        completions = await engine.complete(make_prompts(), params)
        completions += await engine.complete(make_prompts(), params)
        return completions, engine.statistics()


def greedy(*, num_samples: Callable[[int], int] = lambda index: 1, logprobs: int | None = None) -> list[SamplingParams]:
    """Greedy parameters for each of make_prompts()."""
    return [
        SamplingParams(max_tokens=NUM_NEW, temperature=0.0, n=num_samples(index), logprobs=logprobs)
        for index in range(len(make_prompts()))
    ]


def test_tokens_are_those_of_one_rank_with_everything_on_at_once(pair: Pair) -> None:
    params = greedy(num_samples=lambda index: 2 if index < 2 else 1)
    completions, statistics = asyncio.run(generate(pair.services.cachemgr_address, params))
    expected = expected_tokens(build("llama"), make_prompts())
    for number, completion in enumerate(completions):
        for sample in completion.samples:
            assert tuple(sample.token_ids) == expected[number % len(expected)], number
    scheduler = statistics.scheduler
    assert scheduler.preemptions > 0
    assert scheduler.offloads > 0
    assert scheduler.restores > 0
    assert scheduler.forks > 0
    assert scheduler.cached_tokens > 0
    assert statistics.copied_blocks > 0
    assert max(map(len, make_prompts())) > MAX_STEP_TOKENS, "prompts are cut into chunks"


def test_log_probabilities_are_those_of_one_rank(pair: Pair) -> None:
    completions, _ = asyncio.run(generate(pair.services.cachemgr_address, greedy(logprobs=5)))
    model = build("llama")
    for completion, prompt in zip(completions, make_prompts() * 2, strict=True):
        (sample,) = completion.samples
        tokens = [*prompt, *sample.token_ids]
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0].double()
        scale = float(logits.abs().max())
        expected = logits.log_softmax(-1)
        assert sample.logprobs is not None
        for position, entry in enumerate(sample.logprobs, len(prompt) - 1):
            assert entry.logprob == pytest.approx(float(expected[position, tokens[position + 1]]), abs=BOUND * scale)


def test_sampled_tokens_are_the_same_on_all_ranks(pair: Pair) -> None:
    """The leader alone samples: a follower that went on from another token would give other logits afterwards."""
    sampling = {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.2}
    params = [SamplingParams(max_tokens=NUM_NEW, logprobs=0, prompt_logprobs=2, **sampling)]
    prompt = draw_tokens(19, seed=3)

    async def complete() -> Completion:
        async with Engine.connect(pair.services.cachemgr_address) as engine:
            (completion,) = await engine.complete([prompt], params)
            return completion

    completion = asyncio.run(complete())
    (sample,) = completion.samples
    with torch.inference_mode():
        logits = build("llama")(torch.tensor([[*prompt, *sample.token_ids]]), use_cache=False).logits[0].double()
    expected = logits.log_softmax(-1)
    bound = BOUND * float(logits.abs().max())
    assert sample.logprobs is not None
    for position, (token, entry) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True), len(prompt) - 1):
        assert entry.logprob == pytest.approx(float(expected[position, token]), abs=bound)
    assert completion.prompt_logprobs is not None
    for position, scored in enumerate(completion.prompt_logprobs[1:]):
        assert scored is not None
        assert scored.logprob == pytest.approx(float(expected[position, prompt[position + 1]]), abs=bound)


def test_a_block_has_the_bytes_of_all_ranks_and_cachemgr_one_geometry(pair: Pair) -> None:
    geometry = pair.pool().geometry
    layers, kv_heads, head_dim = 3, 2, 8
    assert geometry.block_bytes == layers * kv_heads * head_dim * 2 * 4 * BLOCK_SIZE
    assert geometry.host_block_count == 128 * 1024 // geometry.block_bytes


def test_checksums_are_read_between_steps(pair: Pair) -> None:
    holder = LeaseHolder.create(pair)
    holder.run(holder.admit((1, draw_tokens(8, seed=9))))
    before = pair.checksums()
    holder.go_on(1, num_steps=1)
    after = pair.checksums()
    assert sum(old != new for old, new in zip(before, after, strict=True)) == 1, "the block of the next token"
    holder.delete()


def test_orders_are_counted(pair: Pair) -> None:
    holder = LeaseHolder.create(pair)
    before = page_of(pair.services.worker)
    holder.run(holder.admit((1, draw_tokens(8, seed=10))))
    holder.go_on(1, num_steps=2)
    now = page_of(pair.services.worker)
    holder.delete()
    assert now["quire_worker_ranks{}"] == SIZE
    of_ranks = {name: now[name] - before[name] for name in now if name.startswith("quire_worker_rank_")}
    assert of_ranks.pop("quire_worker_rank_orders_total{}") == 3
    assert of_ranks.pop("quire_worker_rank_order_bytes_total{}") > 3 * HEADER_LENGTH * 8
    assert of_ranks.pop("quire_worker_rank_exchange_seconds_total{}") > 0
    assert of_ranks == {}


def test_sigterm_ends_all_ranks_with_status_0(pair: Pair) -> None:
    ranks = ranks_of(pair.services)
    assert len(ranks) == SIZE
    assert pair.services.worker.terminate() == 0
    assert_ended(ranks)
    assert_nothing_unexpected(pair.services)
    pair.services.worker.restart()
    pair.await_attached()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", others_at_night([0, 1], [1]))  # schedules of faults have the leader, too
def test_a_rank_that_ends_or_hangs_ends_all_and_requests_finish_on_the_next_epoch(
    pair: Pair, victim: int, number: signal.Signals
) -> None:
    worker, ranks, epoch = pair.services.worker, ranks_of(pair.services), pair.pool().epoch
    log_size = log_of(pair).stat().st_size

    async def complete() -> list[Completion]:
        async with Engine.connect(pair.services.cachemgr_address) as engine:
            generating = asyncio.create_task(engine.complete(make_prompts(), greedy()))
            while pair.worker_statistics().computed_step_count == 0 and not generating.done():
                await asyncio.sleep(0)
            os.kill(ranks[victim].pid, number)
            await asyncio.to_thread(end_and_start_again)
            return await generating

    def end_and_start_again() -> None:
        if victim == 0 and number == signal.SIGSTOP:
            os.kill(ranks[0].pid, signal.SIGCONT)  # a worker that was stopped goes on, as one of one rank does
            return
        assert worker.wait_exited(DEADLINE_S)
        assert_ended(ranks)
        worker.start()
        worker.wait_serving(DEADLINE_S)

    completions = asyncio.run(complete())
    assert [tuple(each.samples[0].token_ids) for each in completions] == expected_tokens(build("llama"), make_prompts())
    logged = log_of(pair).read_bytes()[log_size:].decode()
    if victim == 0:
        assert (pair.pool().epoch == epoch) == (number == signal.SIGSTOP)
        return
    assert pair.pool().epoch != epoch
    if number == signal.SIGKILL:
        (line,) = [line for line in logged.splitlines() if "ended by SIGKILL" in line]
        assert f"rank 1 (pid {ranks[1].pid}) was ended by SIGKILL" in line
    else:
        (line,) = [line for line in logged.splitlines() if "the worker stops" in line]
        assert "rank 1:stopped" in line


def test_a_forward_that_fails_on_all_ranks_fails_its_step_alone(pair: Pair) -> None:
    ranks, epoch, prompt = ranks_of(pair.services), pair.pool().epoch, draw_tokens(9, seed=4)
    holder = LeaseHolder.create(pair)
    plan = holder.admit((1, prompt))
    with pair.fault("fail"), pytest.raises(RefusedError) as caught:
        holder.run(plan)
    assert caught.value.reason == "STEP_FAILED"
    holder.await_settled()
    holder.run(holder.extend(1, counts=[len(prompt)]))
    holder.go_on(1, num_steps=2)
    assert tuple(holder.tokens[1][len(prompt) :]) == expected_tokens(build("llama"), [prompt])[0][:3]
    holder.delete()
    assert (ranks_of(pair.services), pair.pool().epoch) == (ranks, epoch)


def test_block_tables_that_differ_end_the_worker(pair: Pair) -> None:
    """A follower with another order than the leader's has right accesses by its own grants: only the digests differ."""
    ranks, log_size = ranks_of(pair.services), log_of(pair).stat().st_size
    holder = LeaseHolder.create(pair)
    plan = holder.admit((1, draw_tokens(3 * BLOCK_SIZE, seed=5)))
    with pair.fault("other-blocks"), pytest.raises(RefusedError):
        holder.run(plan)
    assert pair.services.worker.wait_exited(DEADLINE_S)
    assert pair.services.worker.returncode == 1
    assert_ended(ranks)
    logged = log_of(pair).read_bytes()[log_size:].decode()
    assert f"the block tables of rank 1 are not rank 0's after step {plan.step_number}" in logged
    holder.delete()
    pair.services.worker.start()
    pair.services.worker.wait_serving(DEADLINE_S)
    pair.await_attached()


@pytest.mark.parametrize("victim", others_at_night([0, 1], [1]))
def test_a_rank_that_is_lost_while_the_model_loads_ends_all(
    victim: int, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as name:
        hold = Hold(Path(name, "hold-loading"))
        worker = lone_worker(Path(name), model_dir)
        worker.start()
        try:
            hold.await_running()
            ranks = ranks_of_process(worker)
            assert len(ranks) == SIZE
            os.kill(ranks[victim].pid, signal.SIGKILL)
            assert worker.wait_exited(DEADLINE_S)
            assert_ended(ranks)
        finally:
            hold.release()
            worker.kill()
        assert worker.log_path is not None
        errors = [line for line in worker.log_path.read_text().splitlines() if " ERROR " in line or "Traceback" in line]
    assert list(tmp_path.iterdir()) == [], "the ranks leave no file"
    if victim == 0:
        assert errors == []
        return
    assert worker.returncode == 1
    (line,) = errors
    assert f"can't start: rank 1 (pid {ranks[1].pid}) was ended by SIGKILL" in line


def lone_worker(folder: Path, model: Path) -> ServiceProcess:
    """A worker without a cachemgr, which it does not need while it loads."""
    listen = f"unix:{folder}/worker.sock"
    arguments = ("--listen", listen, "--cachemgr", f"unix:{folder}/cachemgr.sock", "--model", str(model), *WORKER_ARGS)
    return ServiceProcess(
        "worker",
        target=FAULTY_WORKER,
        arguments=(*arguments, "--num-blocks", str(NUM_BLOCKS)),
        address=listen,
        log_path=folder / "worker.log",
    )


def log_of(pair: Pair) -> Path:
    path = pair.services.worker.log_path
    assert path is not None
    return path


def assert_ended(ranks: list[psutil.Process]) -> None:
    await_that("no rank is left", lambda: not any(each.is_running() for each in ranks))


def test_logits_and_tokens_are_those_of_one_rank() -> None:
    check_logits(FAMILIES)


@pytest.mark.night
def test_logits_and_tokens_of_further_families_are_those_of_one_rank() -> None:
    check_logits(FURTHER)


@pytest.mark.night
def test_logits_and_tokens_are_those_of_one_rank_if_ranks_share_kv_heads() -> None:
    check_logits(WITH_COPIES, size=4)


def check_logits(families: tuple[str, ...], *, size: int = SIZE) -> None:
    found = compare(families, size)
    before, after = found.pop("")
    assert before[0] == after[0]
    assert before[1] != after[1], "the other ranks' parts of a block count"
    assert set(found) == set(families)
    for family, values in found.items():
        assert values["error"] < BOUND, family
        num_decided, num_tokens = values["decided"]
        assert num_decided > 0.9 * num_tokens, family
        assert values["other_tokens"] == 0, family
        whole, own = values["kv_heads"]
        assert own == (whole if family in WHOLE_ATTENTION else max(1, whole // size)), family
        assert len(set(values["fingerprints"])) == 2, family


@pytest.mark.verify
def test_a_worker_that_torchrun_starts_serves_the_same_tokens_and_ends_in_order(model_dir: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="q-") as name,
        LocalServices.start(
            model=model_dir,
            num_blocks=NUM_BLOCKS,
            extra_worker_args=WORKER_ARGS,
            runtime_dir=name,
            worker_target=TORCHRUN_WORKER,
        ) as services,
    ):
        completions, _ = asyncio.run(generate(services.cachemgr_address, greedy()))
        expected = expected_tokens(build("llama"), make_prompts())
        assert [tuple(each.samples[0].token_ids) for each in completions] == expected * 2
        ranks = psutil.Process(services.worker.pid).children()
        assert len(ranks) == SIZE
        services.worker.terminate()
        assert_ended(ranks)
        assert services.worker.log_path is not None
        assert "stopped" in services.worker.log_path.read_text()


@pytest.mark.verify
def test_quire_up_starts_a_worker_of_two_ranks(model_dir: Path) -> None:
    quire = str(Path(sysconfig.get_path("scripts")) / "quire")
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        flags = ["--runtime-dir", name, "--no-http", "--num-blocks", str(NUM_BLOCKS), *WORKER_ARGS]
        up = subprocess.Popen([quire, "up", "--model", str(model_dir), *flags], stdout=subprocess.PIPE, text=True)
        try:
            assert up.stdout is not None
            assert any("services are ready" in line for line in up.stdout)
            completions, _ = asyncio.run(generate(f"unix:{name}/cachemgr.sock", greedy()))
            ranks = [each for each in psutil.Process(up.pid).children(recursive=True) if is_follower(each)]
            assert len(ranks) == SIZE - 1
        finally:
            up.send_signal(signal.SIGTERM)
            up.communicate(timeout=DEADLINE_S)
    expected = expected_tokens(build("llama"), make_prompts())
    assert [tuple(each.samples[0].token_ids) for each in completions] == expected * 2
    assert_ended(ranks)


@pytest.mark.parametrize(
    ("family", "size", "reason"),
    [
        ("bloom", 2, "transformers has no plan to shard its layers over 2 ranks"),
        ("gpt2", 2, "transformers has no plan to shard its layers over 2 ranks"),
        ("llama", 3, "its 2 kv heads can't be divided over 3 ranks"),
        ("llama", 8, "its 4 query heads can't be divided over 8 ranks"),
        ("gpt_oss", 3, "its 4 experts can't be divided over 3 ranks"),
        ("qwen3_next", 2, "it keeps states per sequence, which are not sharded over 2 ranks"),
    ],
)
def test_what_cannot_be_sharded_is_refused_with_the_numbers(
    family: str, size: int, reason: str, tmp_path: Path
) -> None:
    from quire.worker.model.checkpoint import check_sharding
    from quire.worker.unsupported_model import UnsupportedModel

    with pytest.raises(UnsupportedModel, match=reason):
        check_sharding(save(family, tmp_path), num_ranks=size)


def test_a_refusal_ends_the_worker_before_its_pool_is_attached(model_dir: Path) -> None:
    with (
        pytest.raises(ServiceExitedError, match="its 2 kv heads can't be divided over 3 ranks") as error,
        LocalServices.start(model=model_dir, num_blocks=NUM_BLOCKS, extra_worker_args=("--tensor-parallel-size", "3")),
    ):
        pass
    assert "attached" not in str(error.value)
