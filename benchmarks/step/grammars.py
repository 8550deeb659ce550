"""The cost of grammars: steps of 64 sequences of which 16 follow a JSON schema, in turns with steps without a grammar.

quire bench step grammars
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

import click
import numpy as np
import torch
from engines import NUM_CORES
from llguidance import LLTokenizer, TokenizerWrapper
from models import llama_56m
from report import Findings, benchmark, summary, table
from rich.progress import Progress

from quire.cache.v1 import grant_pb2
from quire.worker.grant.decoding import AcceptedStep, RowSampling
from quire.worker.memory.kv_pool import KVPool
from quire.worker.model.checkpoint import load_model
from quire.worker.run.executor import Executor, Outcome
from quire.worker.sampling.following import Compiled, Following
from quire.worker.sampling.grammar_trial import make_matcher, translate
from quire.worker.sampling.parameters import SamplingParams

END_ID, VOCAB_SIZE = 0, 32_000
BLOCK_SIZE, PROMPT_TOKENS = 16, 32
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"enum": ["a", "b", "c"]}},
        "required": ["name", "age", "tags"],
    },
    "minItems": 100,
}


class Tokens:
    """A vocabulary of all bytes and of words of three letters; token 0 is the end."""

    eos_token_id, bos_token_id, special_token_ids = END_ID, None, (END_ID,)
    letters = tuple(bytes((97 + i % 26, 97 + i // 26 % 26, 97 + i // 676 % 26)) for i in range(VOCAB_SIZE - 257))
    tokens = (b"</s>", *(bytes([byte]) for byte in range(256)), *letters)

    def __call__(self, text: bytes) -> list[int]:
        return [byte + 1 for byte in text]


class Batch:
    """Sequences that decode, step by step."""

    def __init__(
        self, folder: Path, *, num_seqs: int, num_steps: int, grammar: Compiled | None, num_bound: int
    ) -> None:
        model = load_model(folder, dtype=torch.float32, max_model_len=PROMPT_TOKENS + num_steps + 1)
        blocks = -(-(PROMPT_TOKENS + num_steps + 1) // BLOCK_SIZE)
        pool = KVPool(
            model.specs, num_blocks=1 + num_seqs * blocks, block_size=BLOCK_SIZE, dtype=model.dtype, device="cpu"
        )
        self._executor = Executor(model, pool, max_num_seqs=num_seqs)
        self._ids = list(range(1, num_seqs + 1))
        self._number, self._length = 1, PROMPT_TOKENS
        writes = {
            "write_sequence_ids": self._ids,
            "write_first_indexes": [0] * num_seqs,
            "write_block_counts": [blocks] * num_seqs,
            "write_block_ids": list(range(1, 1 + num_seqs * blocks)),
        }
        prompt = np.arange(1, 1 + PROMPT_TOKENS, dtype=np.int32)
        sampling = {}
        for seq_id in self._ids:
            following = None
            if grammar is not None and seq_id <= num_bound:
                following = Following(grammar, grammar.matcher.deep_copy(), PROMPT_TOKENS)
            sampling[seq_id] = RowSampling(SamplingParams(temperature=1.0, seed=seq_id), following=following)
        grant = self._grant(0, PROMPT_TOKENS, **writes)
        assert (
            self._executor.execute(AcceptedStep(grant, dict.fromkeys(range(num_seqs), prompt), sampling)).outcome
            is Outcome.COMPUTED
        )

    def _grant(self, start: int, count: int, **fields: object) -> grant_pb2.StepGrant:
        num = len(self._ids)
        runs = {"run_sequence_ids": self._ids, "run_starts": [start] * num, "run_token_counts": [count] * num}
        return grant_pb2.StepGrant(
            lease_id="one",
            step_number=self._number,
            known_step_number=self._number - 1,
            run_samples=[True] * num,
            **runs,
            **fields,  # type: ignore[arg-type]
        )

    def step_s(self) -> float:
        """Run one step; return its time in seconds."""
        self._number += 1
        grant = self._grant(self._length, 1)
        self._length += 1
        started = time.perf_counter()
        result = self._executor.execute(AcceptedStep(grant))
        elapsed = time.perf_counter() - started
        assert result.outcome is Outcome.COMPUTED
        assert not result.grammar_failures, result.grammar_failures[0]
        return elapsed


def measure(quick: bool, progress: Progress, *, num_seqs: int, num_grammars: int, steps: int, threads: int) -> Findings:
    torch.set_num_threads(threads)
    if quick:
        num_seqs, num_grammars, steps = 4, 2, 3
    tokenizer = LLTokenizer(TokenizerWrapper(Tokens()), n_vocab=VOCAB_SIZE)
    compiled = Compiled(make_matcher(tokenizer, translate("json_schema", json.dumps(SCHEMA))), frozenset({END_ID}))
    with tempfile.TemporaryDirectory() as directory:
        llama_56m(Path(directory))
        sizes = {"num_seqs": num_seqs, "num_steps": steps, "num_bound": num_grammars}
        free, bound = (Batch(Path(directory), grammar=grammar, **sizes) for grammar in (None, compiled))
        turns = progress.track(range(steps), description="steps")
        times = [(1e3 * free.step_s(), 1e3 * bound.step_s()) for _ in turns]
    columns = [*zip(*times, strict=True)]
    added = statistics.median((b - a) / a for a, b in times)
    figures = {
        **sizes,
        "threads": threads,
        "without_ms": summary(columns[0]),
        "with_grammars_ms": summary(columns[1]),
        "added_ratio": added,
    }
    made = table(f"ms a step of {num_seqs} sequences", "without", f"{num_grammars} with grammars", "added", words=0)
    made.add_row(*(f"{statistics.median(column):.2f}" for column in columns), f"{added:+.1%}")
    return Findings([made], figures)


OPTIONS = [
    click.Option([flag], default=default, show_default=True, type=click.IntRange(min=1), help=text)
    for flag, default, text in (
        ("--num-seqs", 64, "Sequences of a step."),
        ("--num-grammars", 16, "Of these, sequences with a grammar."),
        ("--steps", 100, "Measured steps of each kind."),
        ("--threads", NUM_CORES, "Of torch."),
    )
]
main = benchmark("step grammars", measure, packages=("torch", "transformers", "llguidance"), options=OPTIONS)

if __name__ == "__main__":
    main()
