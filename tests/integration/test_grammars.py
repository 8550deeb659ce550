"""Grammars of requests, over real services: the text matches, with preemptions and failures meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from deadlines import DEADLINE_S

from quire.cli.launch import LocalServices
from quire.client import (
    CacheClient,
    Engine,
    EngineConfig,
    FinishReason,
    Grammar,
    InvalidRequest,
    OutOfRoom,
    SamplingParams,
    WorkerClient,
)
from quire.compute.v1 import worker_service_pb2
from quire.worker.sampling.grammars import MAX_WAITING, NUM_COMPILERS

NUM_SCHEMAS = 200
NUM_SAMPLED_SCHEMAS = 24
ARGUMENTS = ("--dtype", "float32", "--threads", "1", "--block-size", "4", "--max-num-seqs", "16")
# No white space: a random model puts it everywhere.
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
SLOW = {"allOf": [{"type": "string", "pattern": f"(.*{chr(97 + i)}.*){{{i + 1}}}"} for i in range(25)]}
PEOPLE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 12, "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "cd"]}, "minItems": 6, "maxItems": 8},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
} | COMPACT


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from text_model import save  # imports torch

    return save(tmp_path_factory.mktemp("text_model"))


@pytest.fixture(scope="module")
def services(text_model: Path) -> Iterator[LocalServices]:
    with LocalServices.start(model=text_model, num_blocks=2_000, extra_worker_args=ARGUMENTS) as services:
        yield services


def follow(grammar: Grammar, **fields: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 1_500, "seed": 5, "grammar": grammar} | fields))


async def one(engine: Engine, prompt: str, params: SamplingParams) -> tuple[str, FinishReason | None]:
    [completion] = await engine.complete(prompt, params)
    [sample] = completion.samples
    return sample.text, sample.finish_reason


# -- what is generated matches ------------------------------------------------------------------------------------


def draw_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema with short texts: every part of it has a bound."""
    leaves = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kind = rng.choice(leaves if depth >= 3 else [*leaves, "object", "object", "array", "array", "anyOf", "ref"])
    low = rng.randint(0, 4)
    match kind:
        case "string":
            return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 6)}
        case "integer":
            return {"type": "integer", "minimum": -rng.randint(0, 99), "maximum": rng.randint(0, 9_999)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": rng.randint(1, 99), "multipleOf": 0.5}
        case "enum":
            return {"enum": rng.sample(["x", 1, True, None, "yes", [1, 2], {"a": "b"}], rng.randint(1, 4))}
        case "const":
            return {"const": rng.choice(["c", 3, False, {"k": [1]}])}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", "^(on|off)$", r"^\d{3}-\d{2}$"])}
        case "object":
            names = rng.sample(["a", "b", "name", "x y", "é", 'q"'], rng.randint(0, 4))
            required = [name for name in names if rng.random() < 0.6]
            properties = {name: draw_schema(rng, depth + 1) for name in names}
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            items = draw_schema(rng, depth + 1)
            return {"type": "array", "items": items, "minItems": low % 3, "maxItems": low % 3 + rng.randint(0, 2)}
        case "anyOf":
            return {"anyOf": [draw_schema(rng, depth + 1) for _ in range(rng.randint(2, 3))]}
        case "ref" if depth == 0:
            return {"$defs": {"d": draw_schema(rng, 2)}, "type": "array", "items": {"$ref": "#/$defs/d"}, "maxItems": 3}
        case _:
            return {"type": ["boolean", "null"]} if kind == "ref" else {"type": kind}


def check_schemas(services: LocalServices, schemas: list[dict[str, Any]]) -> None:
    async def main() -> None:
        async with Engine.connect(services.cachemgr_address) as engine:
            params = [follow(Grammar(json_schema=schema | COMPACT), seed=i) for i, schema in enumerate(schemas)]
            completions = await engine.complete(["a JSON text:"] * len(schemas), params)
            for schema, completion in zip(schemas, completions, strict=True):
                [sample] = completion.samples
                assert sample.finish_reason is FinishReason.STOP, (schema, sample.text)
                jsonschema.validate(json.loads(sample.text), schema)
            assert engine.statistics().recoveries == 0

    asyncio.run(main())


def schemas_from(seed: int, count: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [draw_schema(rng) for _ in range(count)]


def test_generated_texts_are_valid_by_their_schemas(services: LocalServices) -> None:
    check_schemas(services, schemas_from(1, NUM_SAMPLED_SCHEMAS))


def test_a_batch_may_bring_more_grammars_than_wait_for_a_compiler(services: LocalServices) -> None:
    async def main() -> None:
        async with Engine.connect(services.cachemgr_address) as engine:
            grammars = [Grammar(choice=(f"number {i}",)) for i in range(2 * MAX_WAITING)]
            params = [follow(grammar, max_tokens=12) for grammar in grammars]
            completions = await engine.complete(["which?"] * len(params), params)
            assert [c.samples[0].text for c in completions] == [f"number {i}" for i in range(len(params))]

    asyncio.run(main())


@pytest.mark.night
def test_generated_texts_are_valid_by_200_schemas(services: LocalServices) -> None:
    check_schemas(services, schemas_from(2, NUM_SCHEMAS))


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar(regex="[a-z]{3,9}|[0-9]{4}"), "[a-z]{3,9}|[0-9]{4}"),
        (Grammar(lark='start: "x"{3,5} WORD\nWORD: /[a-f]{2}/'), "x{3,5}[a-f]{2}"),
        (Grammar(ebnf='root ::= ("yes" | "no") [0-9]{2}'), "(yes|no)[0-9]{2}"),
        (Grammar(choice=["left", "right", 'a "third"\n']), 'left|right|a "third"\n'),
    ],
    ids=["regex", "lark", "ebnf", "choice"],
)
def test_every_kind_of_grammar_is_followed(grammar: Grammar, pattern: str, services: LocalServices) -> None:
    async def main() -> None:
        async with Engine.connect(services.cachemgr_address) as engine:
            for params in (follow(grammar, temperature=0), follow(grammar, top_k=1), follow(grammar, min_p=1.0)):
                text, reason = await one(engine, "say", params)
                assert re.fullmatch(pattern, text), text
                assert reason is FinishReason.STOP

    asyncio.run(main())


def test_any_json_object_is_one(services: LocalServices) -> None:
    async def main() -> None:
        async with Engine.connect(services.cachemgr_address) as engine:
            for seed in range(2):
                text, reason = await one(engine, "say", follow(Grammar(json_object=True), seed=seed, max_tokens=150))
                if reason is FinishReason.STOP:
                    assert isinstance(json.loads(text), dict)
                assert text.startswith("{")

    asyncio.run(main())


def test_a_text_that_is_cut_by_max_tokens_says_so(services: LocalServices) -> None:
    async def main() -> None:
        async with Engine.connect(services.cachemgr_address) as engine:
            text, reason = await one(engine, "say", follow(Grammar(regex="x{50}"), max_tokens=7))
            assert (text, reason) == ("xxxxxxx", FinishReason.LENGTH)

    asyncio.run(main())


# -- beside others, and again --------------------------------------------------------------------------------------


def mixed_requests() -> list[tuple[str, SamplingParams]]:
    free = SamplingParams(max_tokens=40, temperature=0.9, seed=7, ignore_eos=True)
    return [
        ("free one", free),
        ("bound one", follow(Grammar(json_schema=PEOPLE), temperature=0.9, seed=8)),
        ("free two", SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=1)),
        ("bound two", follow(Grammar(regex="[a-d]{20,30}"), presence_penalty=0.5)),
    ]


async def tokens_of(engine: Engine, prompt: str, params: SamplingParams) -> tuple[int, ...]:
    [completion] = await engine.complete(prompt, params)
    return completion.samples[0].token_ids


def test_beside_each_other_they_get_the_tokens_that_they_get_alone(services: LocalServices) -> None:
    async def main() -> None:
        async with Engine.connect(services.cachemgr_address) as engine:
            alone = [await tokens_of(engine, *request) for request in mixed_requests()]
            together = await asyncio.gather(*(tokens_of(engine, *request) for request in mixed_requests()))
            assert together == alone

    asyncio.run(main())


def test_samples_of_one_prompt_each_follow_the_grammar_by_themselves(services: LocalServices) -> None:
    async def main() -> None:
        async with Engine.connect(services.cachemgr_address) as engine:
            params = follow(Grammar(json_schema=PEOPLE))
            alone = [
                await tokens_of(engine, "two of these", follow(Grammar(json_schema=PEOPLE), seed=5 + i))
                for i in range(2)
            ]
            [completion] = await engine.complete("two of these", params, n=2)
            assert [sample.token_ids for sample in completion.samples] == alone
            for sample in completion.samples:
                jsonschema.validate(json.loads(sample.text), PEOPLE)

    asyncio.run(main())


def test_preempted_sequences_go_on_where_they_were(text_model: Path) -> None:
    async def main(address: str) -> None:
        async with Engine.connect(address) as engine:
            requests = [(f"number {i}", follow(Grammar(json_schema=PEOPLE), seed=i, max_tokens=120)) for i in range(3)]
            alone = [await tokens_of(engine, *request) for request in requests]
            assert engine.statistics().scheduler.preemptions == 0
            together = await asyncio.gather(*(tokens_of(engine, *request) for request in requests))
            assert together == alone
            assert engine.statistics().scheduler.preemptions > 0

    with LocalServices.start(model=text_model, num_blocks=40, extra_worker_args=ARGUMENTS) as services:
        asyncio.run(main(services.cachemgr_address))


def test_after_a_new_epoch_they_go_on_where_they_were(text_model: Path) -> None:
    async def main(services: LocalServices) -> None:
        async with Engine.connect(services.cachemgr_address) as engine:
            params = follow(Grammar(json_schema=PEOPLE))
            alone = await tokens_of(engine, "once", params)
            tokens: list[int] = []
            async for chunk in engine.generate("once", params):
                if len(tokens) < 8 <= len(tokens) + len(chunk.token_ids):
                    await asyncio.to_thread(services.worker.kill)
                    await asyncio.to_thread(services.worker.restart, DEADLINE_S)
                tokens += chunk.token_ids
            assert tuple(tokens) == alone
            assert engine.statistics().recoveries > 0

    with LocalServices.start(model=text_model, num_blocks=400, extra_worker_args=ARGUMENTS) as services:
        asyncio.run(main(services))


class FirstUnchecked(WorkerClient):
    """Brings its first grammar to a step that the worker does not know it from: as after a new epoch."""

    is_first = True

    async def check_grammar(self, grammar: worker_service_pb2.Grammar, output_token_ids: Sequence[int] = ()) -> float:
        """Ask the worker, from the second time on."""
        mask_s = 0.0 if self.is_first else await super().check_grammar(grammar, output_token_ids)
        self.is_first = False
        return mask_s


def stopped_compilers(worker_pid: int) -> list[int]:
    """Stop the processes of a worker that compile grammars; return their pids."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            if parent == worker_pid and b"grammar_trial" in status.with_name("cmdline").read_bytes():
                pid = int(status.parent.name)
                os.kill(pid, signal.SIGSTOP)
                found.append(pid)
    return found


async def fill_compilers(asker: WorkerClient, worker_pid: int, checks: list[asyncio.Future[float]]) -> list[int]:
    """Let so many grammars wait that the worker refuses another one; returns the pids of compilers, stopped."""
    for number in itertools.count():
        stopped = stopped_compilers(worker_pid)  # each for 5 s, after which the worker starts another one
        message = worker_service_pb2.Grammar(regex=f"waits{number}")
        waiting = asyncio.ensure_future(asker.check_grammar(message))
        checks.append(waiting)
        done, _ = await asyncio.wait([waiting], timeout=0.02)
        if done and isinstance(waiting.exception(), OutOfRoom) and len(stopped) == NUM_COMPILERS:
            return stopped
    raise AssertionError("not reached")


def test_a_step_whose_grammar_finds_no_free_compiler_costs_no_request(services: LocalServices) -> None:
    async def main() -> None:
        cache, asker = CacheClient(services.cachemgr_address), WorkerClient(services.worker_address)
        request = ("a person", follow(Grammar(json_schema=PEOPLE | {"title": "not compiled yet"})))
        async with Engine(cache, FirstUnchecked, config=EngineConfig(max_recoveries=1)) as engine:
            beside = ("beside", SamplingParams(max_tokens=200, seed=3))
            alone = await tokens_of(engine, *beside)
            assert services.worker.pid is not None
            checks: list[asyncio.Future[float]] = []
            stopped = await fill_compilers(asker, services.worker.pid, checks)
            try:
                postponed = asyncio.create_task(tokens_of(engine, *request))
                while not engine.statistics().scheduler.failed_steps:
                    await asyncio.sleep(0.01)
                assert await tokens_of(engine, *beside) == alone
            finally:
                for pid in stopped:
                    with contextlib.suppress(ProcessLookupError):  # the worker ends a compiler after 5 s
                        os.kill(pid, signal.SIGCONT)
            assert await postponed == await tokens_of(engine, *request)
            assert engine.statistics().recoveries == 0
        await asyncio.gather(*checks, return_exceptions=True)
        await asker.close()

    asyncio.run(main())


# -- masks that take long ----------------------------------------------------------------------------------------------

# Any letters, in very many ways: the time of a mask grows with the text, 10 ms at 35 tokens, 200 ms at 100.
AMBIGUOUS = Grammar(lark='start: s\ns: s s s s s s | s s s | s s | /[a-z]/ | ""')
SAME_TEXTS = Grammar(regex="[a-z]*")


def letters(grammar: Grammar, num_tokens: int, *, end_token_id: int) -> SamplingParams:
    """So many tokens of a grammar: the end token is as good as impossible."""
    return SamplingParams(
        grammar=grammar, max_tokens=num_tokens, temperature=1.0, seed=5, logit_bias={end_token_id: -100.0}
    )


def end_of(engine: Engine) -> int:
    return engine.model.end_token_ids[0]


def test_a_sequence_with_late_masks_gets_the_tokens_that_it_gets_without(services: LocalServices) -> None:
    async def main() -> None:
        async with Engine.connect(services.cachemgr_address) as engine:
            params = [letters(grammar, 60, end_token_id=end_of(engine)) for grammar in (AMBIGUOUS, SAME_TEXTS)]
            slow, fast = await asyncio.gather(*(tokens_of(engine, "Once", each) for each in params))
            assert len(fast) == 60
            assert slow == fast
            assert engine.statistics().scheduler.discarded_tokens > 0, "no mask was late"

    asyncio.run(main())


def test_others_go_on_while_the_masks_of_one_take_long(services: LocalServices) -> None:
    """Each step would wait for the mask otherwise, and the neighbour would get one token for each of the slow one's."""

    async def main() -> None:
        async with Engine.connect(services.cachemgr_address) as engine:
            num_slow, num_others, begun_at = 0, 0, []

            async def run_slow() -> None:
                nonlocal num_slow
                async for chunk in engine.generate("a", letters(AMBIGUOUS, 60, end_token_id=end_of(engine))):
                    num_slow += len(chunk.token_ids)
                    if num_slow == 40:
                        begun_at.append(num_others)

            async def run_neighbour() -> None:
                nonlocal num_others
                params = SamplingParams(max_tokens=1900, temperature=1.0, seed=3, ignore_eos=True)
                async for chunk in engine.generate("b", params):
                    num_others += len(chunk.token_ids)

            neighbour = asyncio.create_task(run_neighbour())
            await run_slow()
            assert num_slow == 60
            assert neighbour.done() or num_others - begun_at[0] > 2 * 20
            neighbour.cancel()

    asyncio.run(main())


def test_a_request_whose_masks_take_too_long_together_ends_with_the_reason(services: LocalServices) -> None:
    async def main() -> None:
        async with Engine.connect(services.cachemgr_address, config=EngineConfig(max_mask_s=0.2)) as engine:
            with pytest.raises(InvalidRequest, match=r"its masks took 0\.\d s, at most 0\.2 s") as caught:
                await engine.complete("a", letters(AMBIGUOUS, 200, end_token_id=end_of(engine)))
            assert caught.value.metadata["field"] == "grammar"
            assert len(await tokens_of(engine, "a", letters(SAME_TEXTS, 50, end_token_id=end_of(engine)))) == 50

    asyncio.run(main())


# -- what can't be used ------------------------------------------------------------------------------------------------


class Unchecking(WorkerClient):
    """Sends grammars with steps without a check before."""

    async def check_grammar(self, grammar: worker_service_pb2.Grammar, output_token_ids: Sequence[int] = ()) -> float:
        """Answer without the worker."""
        return 0.0


WRONG = [
    Grammar(json_schema={"type": "strng"}),
    Grammar(json_schema="{"),
    Grammar(regex="(["),
    Grammar(regex=r"a[^\s\S]"),
    Grammar(lark="x" * 65_537),
    Grammar(ebnf="root ::= other"),
]


@pytest.mark.parametrize("worker", [WorkerClient, Unchecking], ids=["checked", "by the step"])
def test_a_wrong_grammar_fails_its_own_request(worker: type[WorkerClient], services: LocalServices) -> None:
    async def main() -> None:
        cache = CacheClient(services.cachemgr_address)
        async with Engine(cache, worker, config=EngineConfig(max_recoveries=1)) as engine:
            alone = [await tokens_of(engine, *request) for request in mixed_requests()]
            beside = asyncio.gather(*(tokens_of(engine, *request) for request in mixed_requests()))
            for grammar in WRONG:
                with pytest.raises(InvalidRequest) as caught:
                    await engine.complete("wrong", follow(grammar, max_tokens=3))
                assert caught.value.metadata["field"].endswith("grammar")
                assert caught.value.metadata["limit"]
            assert await beside == alone
            assert engine.statistics().recoveries == 0

    asyncio.run(main())


def test_a_grammar_that_compiles_for_too_long_is_refused_and_steps_go_on_meanwhile(services: LocalServices) -> None:
    async def main() -> None:
        async with Engine.connect(services.cachemgr_address) as engine:
            slow = asyncio.create_task(tokens_of(engine, "slow", follow(Grammar(json_schema=SLOW))))
            num_meanwhile = 0
            for request in mixed_requests():
                await tokens_of(engine, *request)
                num_meanwhile += not slow.done()
            assert num_meanwhile > 0
            with pytest.raises(InvalidRequest, match="more than 5 s"):
                await slow

    asyncio.run(main())


def test_a_model_without_a_tokenizer_refuses_grammars_with_the_reason(model_dir: Path) -> None:
    async def main(address: str) -> None:
        async with Engine.connect(address) as engine:
            with pytest.raises(InvalidRequest, match="no tokenizer"):
                await engine.complete([[1, 2]], follow(Grammar(regex="a"), max_tokens=3))

    with LocalServices.start(model=model_dir, num_blocks=40, extra_worker_args=ARGUMENTS) as services:
        asyncio.run(main(services.cachemgr_address))
