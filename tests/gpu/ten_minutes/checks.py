"""The checks that are no tests; `make gpu-ten-minutes ARGS="--call checks --only NAME"` runs one.

Each starts the services with the model that ships here and its flags' defaults, or a worker's inside in this process,
prints `report: …` lines, and fails with an AssertionError. All run on a CPU too where that makes sense, in small.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[3] / each) for each in ("tests", "tests/framework", "benchmarks/harness"))

import torch
import transformers
from gpu_desk.steps import make_executor, mixed_and_decode_steps, start
from gpu_desk.test_start_and_steps import CAPTURED
from model_zoo import save
from shapes import LLAMA_1B

from quire.cli.launch import LocalServices
from quire.cli.service_process import LaunchError
from quire.client import Engine, SamplingParams
from quire.client.cache_client import CacheClient
from quire.client.worker_client import WorkerClient
from quire.worker.run.executor import Outcome
from quire.worker.run.loading import Loaded
from quire.worker.sampling import parameters

HERE = Path(__file__).parent
MODEL = HERE.parents[2] / "deploy/demo/model"
OUTPUT = Path(os.environ.get("QUIRE_TEN_MINUTES", "build/ten-minutes"))
HAS_GPU = torch.cuda.is_available()
VOCAB_SIZE = 1000  # of any model here
NUM_NEW = 24
PAIRS = (
    ("bfloat16", "auto"),
    ("float16", "auto"),
    ("float32", "auto"),
    ("bfloat16", "float8"),
    ("bfloat16", "float16"),
    ("float16", "bfloat16"),
    ("float32", "bfloat16"),
)
PAIRS_ON_CPU = (("float32", "auto"), ("bfloat16", "float8"))


def say(line: object) -> None:
    print(f"report: {line}", flush=True)


def draw_prompts(counts: Sequence[int]) -> list[list[int]]:
    """Prompts of so many tokens; equal calls draw equal ones."""
    generator = random.Random(1)
    return [[generator.randrange(1, VOCAB_SIZE) for _ in range(count)] for count in counts]


PROMPTS = draw_prompts([3, 7, 40, 1, 200, 33, 64, 500])


@contextlib.contextmanager
def served(
    *worker_args: str, model: Path = MODEL, target: str = "quire.worker", keeps_memory: bool = False
) -> Iterator[LocalServices]:
    """Both services on the default device. Afterwards their logs lie in the output's folder."""
    with tempfile.TemporaryDirectory(prefix="q-") as folder:
        services = LocalServices(
            model=model,
            extra_worker_args=worker_args,
            runtime_dir=folder,
            worker_target=target,
            keeps_memory=keeps_memory,
        )
        started = time.monotonic()
        try:
            with services:
                print(f"serving after {time.monotonic() - started:.1f} s: {' '.join(worker_args)}", flush=True)
                yield services
        finally:
            print((Path(folder) / "worker.log").read_text(), flush=True)


def log_of(services: LocalServices) -> str:
    path = services.worker.log_path
    assert path is not None
    return path.read_text()


def said(services: LocalServices, *beginnings: str) -> None:
    """Report the lines of the worker's log that begin so."""
    for line in log_of(services).splitlines():
        message = line.split(" ", 3)[-1]
        if message.startswith(beginnings):
            say(message)


async def complete(
    services: LocalServices, prompts: Sequence[list[int]], meanwhile: Callable[[], None] | None = None, **params: object
) -> list[list[int]]:
    """The tokens that follow each prompt, greedy unless params say otherwise; `meanwhile` runs beside."""
    sampling = SamplingParams(**{"max_tokens": NUM_NEW, "temperature": 0.0, "ignore_eos": True, **params})  # type: ignore[arg-type]
    async with Engine.connect(services.cachemgr_address) as engine:
        generating = asyncio.create_task(engine.complete(prompts, sampling))
        if meanwhile is not None:
            await asyncio.to_thread(meanwhile)
        return [list(completion.samples[0].token_ids) for completion in await generating]


def generate_on_cpu(prompts: Sequence[list[int]]) -> list[list[int]]:
    """Generates by transformers alone, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        output = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False)
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def share_of_equal(one: Sequence[list[int]], other: Sequence[list[int]]) -> float:
    """The tokens of each answer before the first that differs."""
    equal = 0
    for left, right in zip(one, other, strict=True):
        for a, b in zip(left, right, strict=True):
            if a != b:
                break
            equal += 1
    return equal / sum(len(answer) for answer in other)


def run_gpu_tests(file: str, *arguments: str) -> None:
    """Run tests of tests/gpu, if there is a GPU. Raises CalledProcessError if one fails."""
    if HAS_GPU:
        subprocess.run([sys.executable, "-m", "pytest", "-q", str(HERE.parent / file), *arguments], check=True)


def check_start() -> None:
    """All defaults."""
    started = time.monotonic()
    with served() as services:
        say(f"serving after {time.monotonic() - started:.1f} s")
        said(services, "model ", "attention:", "pool:", "fused", "decode steps", "mixed steps", "kernels:")
        first = asyncio.run(complete(services, PROMPTS))
        again = asyncio.run(complete(services, PROMPTS))
        share = share_of_equal(first, generate_on_cpu(PROMPTS))
        say(f"{share:.0%} of the tokens are those of transformers on a CPU in float32, before the first that differs")
        say(f"{share_of_equal(again, first):.0%} are the same when asked again with a warm prefix cache")
        for steps in ("decode steps", "mixed steps of up to 512 tokens"):
            assert not HAS_GPU or f"{steps} run as CUDA graphs" in log_of(services)
    run_gpu_tests("test_step.py", "-k", "services")
    assert share > 0.3, "the tokens have little in common with the model's"


def check_sync() -> None:
    """Start a model of each family in this process, and print which decode and mixed steps are captured."""
    not_captured = []
    with tempfile.TemporaryDirectory() as folder:
        for family in CAPTURED:
            loaded = start(save(family, Path(folder)), dtype="bfloat16")
            has_pieces = loaded.decode is not None and loaded.decode.pieces is not None
            for kind, captured in (("decode", loaded.decode is not None), ("mixed", has_pieces)):
                say(f"{family}, {kind} steps: {'captured' if captured else 'NOT captured, the log says why'}")
                not_captured += [] if captured else [f"{family}, {kind} steps"]
            run_steps(loaded)
    assert not not_captured, not_captured


def run_steps(loaded: Loaded) -> None:
    executor = make_executor(loaded)
    for steps in mixed_and_decode_steps(parameters.SamplingParams(), num_groups=len(loaded.pool.groups)):
        for step in steps:
            assert executor.execute(step).outcome is Outcome.COMPUTED


def check_capture_failure() -> None:
    """Models with a forward that can't be captured; after each of them one that can."""
    from transformers.models.llama.modeling_llama import LlamaModel

    forward = LlamaModel.forward
    breaks = {
        "waits for a number": lambda self: self.embed_tokens.weight.sum().item(),
        "waits for the device": lambda self: torch.cuda.synchronize(),
    }
    with tempfile.TemporaryDirectory() as folder:
        model = save("llama", Path(folder))
        for name, wait in breaks.items():

            def broken(self: LlamaModel, *args: object, _wait: Callable = wait, **options: object) -> object:
                _wait(self)
                return forward(self, *args, **options)

            LlamaModel.forward = broken  # type: ignore[method-assign]
            loaded = start(model, dtype="bfloat16")
            assert loaded.decode is None, f"a forward that {name} was captured"
            run_steps(loaded)
            LlamaModel.forward = forward  # type: ignore[method-assign]
            loaded = start(model, dtype="bfloat16")
            assert loaded.decode is not None, f"nothing can be captured behind a forward that {name}"
            run_steps(loaded)
            say(f"a forward that {name}: runs without graphs, and the next model is captured")


def check_dtypes() -> None:
    """Pairs of the model's dtype and the pool's."""
    expected, failed = generate_on_cpu(PROMPTS), []
    for dtype, kv_dtype in PAIRS if HAS_GPU else PAIRS_ON_CPU:
        try:
            with served("--dtype", dtype, "--kv-dtype", kv_dtype) as services:
                share = share_of_equal(asyncio.run(complete(services, PROMPTS)), expected)
                has_graphs = "decode steps run as CUDA graphs" in log_of(services)
                say(f"{dtype}, pool {kv_dtype}: {share:.0%} equal tokens, {'graphs' if has_graphs else 'no graphs'}")
        except LaunchError as error:
            last = str(error).strip().splitlines()[-1]
            say(f"{dtype}, pool {kv_dtype}: does not start: {last}")
            if "can't start" not in last:
                failed.append((dtype, kv_dtype))
    assert not failed, failed


def check_traces() -> None:
    """A trace of decode steps and one of steps with prompts, and checks of both."""
    for name, first in (("prompts", 1), ("decodes", 10)):
        path = OUTPUT / f"trace-{name}.json"
        path.unlink(missing_ok=True)
        with served("--profile", str(path), "--profile-steps", f"{first}:8") as services:
            asyncio.run(complete(services, PROMPTS))
        events = json.loads(path.read_text())["traceEvents"]
        steps = {event["name"] for event in events if re.fullmatch(r"step \d+", str(event.get("name")))}
        kernels = [event for event in events if event.get("cat") == "kernel"]
        say(f"{path.name}: {len(events)} events, {len(steps)} steps, {len(kernels)} kernels")
        if kernels:
            begin = min(event["ts"] for event in kernels)
            end = max(event["ts"] + event["dur"] for event in kernels)
            busy = sum(event["dur"] for event in kernels)
            say(f"{name}: {len(kernels) / 8:.0f} kernels a step, the GPU is busy for {busy / (end - begin):.0%} of it")
            for kernel, count in Counter(event["name"][:60] for event in kernels).most_common(8):
                say(f"{name}: {count} × {kernel}")
        assert events


def check_compilations() -> None:
    """Prompts of all lengths, alone and many at a time; no kernel may be compiled meanwhile."""
    run_gpu_tests("test_compilations.py")
    generator = random.Random(2)
    rounds = 20 if HAS_GPU else 2
    with served() as services:
        started = time.monotonic()
        for number in range(rounds):
            counts = [int(2 ** generator.uniform(0, 10.9)) for _ in range(generator.choice([1, 2, 8, 64]))]
            shared = draw_prompts([generator.choice([0, 900])])[0]
            prompts = [(shared + prompt)[:2000] for prompt in draw_prompts(counts)]
            params = {"temperature": 0.8, "top_p": 0.9, "seed": number} if number % 2 else {}
            asyncio.run(complete(services, prompts, max_tokens=generator.choice([1, 8, 40]), **params))
        seconds = time.monotonic() - started
        late = [line for line in log_of(services).splitlines() if "after the warm-up" in line]
        said(services, "kernels:")
    say(f"{len(late)} compilations in {seconds:.0f} s of traffic")
    assert not late, late


def check_memory() -> None:
    """A model of a billion parameters with the largest step, pool and batch that the defaults allow."""
    config = LLAMA_1B.make_config()
    config.max_position_embeddings = 32768
    with tempfile.TemporaryDirectory() as folder:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        del model
        with served(model=Path(folder)) as services:
            say_free_memory("once it serves")
            said(services, "pool:", "decode steps", "mixed steps", "kernels:")
            prompts = draw_prompts([30000, *[2000] * 255])
            asyncio.run(complete(services, prompts, max_tokens=64, temperature=1.0, top_p=0.9, repetition_penalty=1.1))
            say_free_memory("after 256 requests")
            failed = [line for line in log_of(services).splitlines() if "step failed" in line]
    say(f"{len(failed)} steps failed")
    assert not failed, failed[:3]


def say_free_memory(when: str) -> None:
    command = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader"]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    say(f"{when}, memory used and in all: {asked.stdout.strip()}")


def check_host_tier() -> None:
    """A pool that is too small for its requests, without a host tier and with one."""
    run_gpu_tests("test_host_pool.py")
    prompts = draw_prompts([400] * 12)
    answers = []
    for host_memory in ((), ("--host-memory", "256M")):
        with served("--dtype", "float32", "--num-blocks", "128", *host_memory) as services:
            answers.append(asyncio.run(complete(services, prompts, max_tokens=120)))
            found = asyncio.run(statistics(services))
            seconds = found.host_copy_time.ToNanoseconds() / 1e9
            moved = found.offloaded_block_count + found.restored_block_count
            say(f"{' '.join(host_memory) or 'no host tier'}: {moved} blocks moved in {seconds:.4f} s of copies")
    share = share_of_equal(*answers)
    say(f"{share:.0%} of the tokens are the same with a host tier as without one")
    assert share > (0.9 if HAS_GPU else 0.99)


async def cached_tokens(services: LocalServices) -> int:
    """Tokens that prompts of this epoch have found."""
    cache = CacheClient(services.cachemgr_address)
    try:
        return (await cache.get_statistics())[0].cached_token_count
    finally:
        await cache.close()


async def statistics(services: LocalServices) -> object:
    client = WorkerClient(services.worker_address)
    try:
        return await client.get_statistics()
    finally:
        await client.close()


def check_device_loss() -> None:
    """A device that fails, and one that does not answer: the process ends, requests finish on the next."""
    limit_s = 5
    target = str(HERE / "failing_worker.py")
    with served("--step-timeout", str(limit_s), "--dtype", "float32", target=target) as services:
        expected = asyncio.run(complete(services, PROMPTS))
        for fault in ("lose", "hang"):
            path, worker = services.runtime_dir / fault, services.worker

            def restart(worker=worker, path=path) -> None:
                assert worker.wait_exited(120), "the worker lives on"
                assert worker.returncode == 1, worker.returncode
                path.unlink()
                worker.start()
                worker.wait_serving(180)

            path.touch()
            started = time.monotonic()
            answers = asyncio.run(complete(services, PROMPTS, restart))
            say(
                f"{fault}: status 1, requests finished after {time.monotonic() - started:.0f} s on the next process, "
                f"{share_of_equal(answers, expected):.0%} of the tokens as before"
            )
        for line in log_of(services).splitlines():
            if "does not end" in line or " failed: " in line:
                say(line.split(" ", 3)[-1])


def check_kept_memory() -> None:
    """A worker that is killed, and finds its prefixes again when it is started."""
    run_gpu_tests("test_kept_pool.py")
    prompts = draw_prompts([400] * 4)
    with served("--dtype", "float32", "--num-blocks", "512", keeps_memory=True) as services:
        before = asyncio.run(complete(services, prompts))
        services.worker.kill()
        services.worker.restart()
        share = share_of_equal(asyncio.run(complete(services, prompts)), before)
        num_found = asyncio.run(cached_tokens(services))
    say(f"{num_found} of {sum(map(len, prompts))} tokens found after the kill; {share:.1%} of tokens equal")
    assert num_found > 0.8 * sum(map(len, prompts)), num_found
    assert share > 0.9, share


CHECKS = {
    "start": check_start,
    "sync": check_sync,
    "capture-failure": check_capture_failure,
    "dtypes": check_dtypes,
    "traces": check_traces,
    "compilations": check_compilations,
    "memory": check_memory,
    "host-tier": check_host_tier,
    "kept-memory": check_kept_memory,
    "device-loss": check_device_loss,
}

if __name__ == "__main__":
    OUTPUT.mkdir(parents=True, exist_ok=True)
    os.environ["QUIRE_VERIFY"] = "0"  # which waits for each step
    CHECKS[sys.argv[1]]()
