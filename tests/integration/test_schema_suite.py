"""Schemas of the official JSON-Schema-Test-Suite as grammars, over a real worker, and by its matcher.

The suite is in the source archive of the package `jsonschema`, at the version that is installed here; pip fetches it
once. What a grammar allows is held against that package: no generated text, and none of the suite's instances that a
schema forbids, may pass.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib.metadata
import json
import random
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from deploy.tools import ROOT, missing
from llguidance import LLMatcher, LLTokenizer
from text_model import END, make_tokenizer, save

from quire.cli.launch import LocalServices
from quire.client import Engine, FinishReason, Grammar, InvalidRequest, SamplingParams, WorkerClient
from quire.compute.v1 import worker_service_pb2
from quire.worker.sampling.grammar_trial import find_error, load_tokenizer, make_matcher, translate

pytestmark = pytest.mark.verify

SUITES = ROOT / ".tools"
DIALECTS: dict[str, tuple[str, Any]] = {
    "draft2020-12": ("https://json-schema.org/draft/2020-12/schema", jsonschema.Draft202012Validator),
    "draft2019-09": ("https://json-schema.org/draft/2019-09/schema", jsonschema.Draft201909Validator),
    "draft7": ("http://json-schema.org/draft-07/schema#", jsonschema.Draft7Validator),
}
LEAST_ACCEPTED = 450
"""Schemas of all dialects that llguidance 1.9 can follow: 495 of 983."""
NUM_TEXTS = 4
NUM_FREE_TOKENS = 40
"""After so many tokens a text is brought to its end."""
MAX_TOKENS = 600
SAMPLE = slice(None, None, 12)
"""The accepted schemas for which a model generates texts."""
TOKENIZER = make_tokenizer()
END_ID = TOKENIZER.token_to_id(END)
CLOSING = [TOKENIZER.token_to_id(letter) for letter in ('"', "}", "]", "0", "e", "l")]


@dataclass(frozen=True, slots=True)
class Case:
    """A schema of the suite, as text, and its instances, each with its validity."""

    name: str
    text: str
    instances: tuple[tuple[str, bool], ...]
    validator: Any

    def find_mistake(self, text: str) -> str:
        """Return why a text does not match the schema; "" if it does."""
        error = next(self.validator.iter_errors(json.loads(text)), None)
        return "" if error is None else f"{self.name}: {text!r}: {error.message}"


def fetch_suite() -> Path:
    """Return the folder of the suite's tests; pip fetches it the first time."""
    version = importlib.metadata.version("jsonschema")
    folder = SUITES / f"jsonschema-{version}" / "json" / "tests"
    SUITES.mkdir(exist_ok=True)
    with (SUITES / "json-schema-suite.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of the processes that run tests, one fetches it
        if folder.is_dir():
            return folder
        package = f"jsonschema=={version}"
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-binary", "jsonschema"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(SUITES), package]
        fetched = subprocess.run(command, capture_output=True, text=True)
        if fetched.returncode:
            missing(
                f"the source archive of {package}", required_by="QUIRE_REQUIRE_FOREIGN", for_what="the suite of schemas"
            )
        with tarfile.open(SUITES / f"jsonschema-{version}.tar.gz") as archive:
            archive.extractall(SUITES, filter="data")
    return folder


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    suite, found = fetch_suite(), []
    for dialect, (uri, validator) in DIALECTS.items():
        for path in sorted((suite / dialect).glob("*.json")):
            for group in json.loads(path.read_text(encoding="utf-8")):
                schema = group["schema"]
                if isinstance(schema, dict):
                    schema = {"$schema": uri} | schema
                instances = tuple(
                    (json.dumps(test["data"], ensure_ascii=False), test["valid"]) for test in group["tests"]
                )
                name = f"{dialect}/{path.stem}: {group['description']}"
                found.append(Case(name, json.dumps(schema), instances, validator(schema)))
    return found


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    TOKENIZER.save(str(path))
    return load_tokenizer(path, vocab_size=TOKENIZER.get_vocab_size(), end_token_ids=[END_ID])


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServices]:
    model = save(tmp_path_factory.mktemp("text_model"))
    arguments = ("--dtype", "float32", "--threads", "1", "--block-size", "4", "--max-num-seqs", "16")
    with LocalServices.start(model=model, num_blocks=2_000, extra_worker_args=arguments) as services:
        yield services


def is_accepted(case: Case, tokenizer: LLTokenizer) -> bool:
    try:
        grammar = translate("json_schema", case.text)
    except ValueError:
        return False
    return not find_error(tokenizer, grammar)


def matcher_of(case: Case, tokenizer: LLTokenizer) -> LLMatcher:
    return make_matcher(tokenizer, translate("json_schema", case.text))


def allows(matcher: LLMatcher, text: str) -> bool:
    token_ids = TOKENIZER.encode(text).ids
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


def generate(matcher: LLMatcher, rng: random.Random) -> str:
    """Return a text of allowed tokens, drawn at random, and at its end chosen so that it ends."""
    token_ids: list[int] = []
    while len(token_ids) < MAX_TOKENS:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        assert not matcher.is_error(), matcher.get_error()
        can_end = mask >> END_ID & 1
        if can_end and (mask == 1 << END_ID or len(token_ids) > NUM_FREE_TOKENS or rng.random() < 0.5):
            return str(TOKENIZER.decode(token_ids))
        closing = [token for token in CLOSING if mask >> token & 1]
        if closing and len(token_ids) > NUM_FREE_TOKENS and rng.random() < 0.8:
            token = closing[0]
        else:
            token = rng.choice([token for token in range(END_ID) if mask >> token & 1])
        matcher.consume_token(token)
        token_ids.append(token)
    raise AssertionError(f"no end after {MAX_TOKENS} tokens: {TOKENIZER.decode(token_ids)!r}")


def test_what_a_schema_allows_is_valid(cases: list[Case], tokenizer: LLTokenizer) -> None:
    accepted = [case for case in cases if is_accepted(case, tokenizer)]
    counts: Counter[str] = Counter()
    mistakes = []
    for case in accepted:
        matcher = matcher_of(case, tokenizer)
        for text, is_valid in case.instances:
            is_allowed = allows(matcher.deep_copy(), text)
            counts[f"{'valid' if is_valid else 'invalid'}, {'allowed' if is_allowed else 'not allowed'}"] += 1
            if is_allowed and not is_valid:
                mistakes.append(f"{case.name}: {text} is allowed")
        texts = [generate(matcher.deep_copy(), random.Random(seed)) for seed in range(NUM_TEXTS)]
        mistakes += filter(None, map(case.find_mistake, texts))
    print(f"{len(accepted)} of {len(cases)} schemas accepted, {NUM_TEXTS} texts each; instances: {dict(counts)}")
    assert not mistakes
    assert len(accepted) >= LEAST_ACCEPTED
    assert counts["valid, allowed"] > 0.9 * (counts["valid, allowed"] + counts["valid, not allowed"])


def test_the_worker_accepts_a_schema_or_says_why_not(
    cases: list[Case], tokenizer: LLTokenizer, services: LocalServices
) -> None:
    async def main() -> None:
        worker = WorkerClient(services.worker_address)
        refusals: Counter[str] = Counter()
        for case in cases:
            message = worker_service_pb2.Grammar(json_schema=case.text)
            if is_accepted(case, tokenizer):
                await worker.check_grammar(message)
                continue
            with pytest.raises(InvalidRequest) as caught:
                await worker.check_grammar(message)
            assert caught.value.metadata["field"] == "grammar"
            assert caught.value.metadata["limit"]
            refusals[caught.value.metadata["limit"].partition(":")[0]] += 1
        print(f"{refusals.total()} of {len(cases)} schemas refused: {refusals.most_common()}")
        await worker.close()

    asyncio.run(main())


def test_a_model_generates_valid_texts(cases: list[Case], tokenizer: LLTokenizer, services: LocalServices) -> None:
    sample = [case for case in cases if is_accepted(case, tokenizer)][SAMPLE]

    async def main() -> None:
        async with Engine.connect(services.cachemgr_address) as engine:
            params = [
                SamplingParams(max_tokens=1_000, seed=seed, grammar=Grammar(json_schema=case.text))
                for seed, case in enumerate(sample)
            ]
            completions = await engine.complete(["a JSON text:"] * len(sample), params)
        samples = [completion.samples[0] for completion in completions]
        ended = [
            (case, s.text) for case, s in zip(sample, samples, strict=True) if s.finish_reason is FinishReason.STOP
        ]
        print(f"{len(ended)} of {len(sample)} texts ended before max_tokens")
        assert len(ended) > 0.5 * len(sample)
        assert not list(filter(None, (case.find_mistake(text) for case, text in ended)))

    asyncio.run(main())
