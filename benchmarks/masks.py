"""Measure grammars: steps of 64 sequences of which 16 follow a JSON schema, in turns with steps without a grammar."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from llguidance import LLTokenizer, TokenizerWrapper
from models import llama_56m

from quire.cache.v1 import grant_pb2
from quire.worker.grant.decoding import RowSampling, Step
from quire.worker.memory.kv_pool import KVPool
from quire.worker.model.model import load_model
from quire.worker.run.executor import Executor, Outcome
from quire.worker.sampling.grammar_trial import make_matcher, translate
from quire.worker.sampling.grammars import Compiled, Following
from quire.worker.sampling.sampler import SamplingParams

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
            self._executor.execute(Step(grant, dict.fromkeys(range(num_seqs), prompt), sampling)).outcome
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
        result = self._executor.execute(Step(grant))
        elapsed = time.perf_counter() - started
        assert result.outcome is Outcome.COMPUTED
        assert not result.grammar_failures, result.grammar_failures[0]
        return elapsed


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-seqs", type=int, default=64)
    parser.add_argument("--num-grammars", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    tokenizer = LLTokenizer(TokenizerWrapper(Tokens()), n_vocab=VOCAB_SIZE)
    compiled = Compiled(make_matcher(tokenizer, translate("json_schema", json.dumps(SCHEMA))), frozenset({END_ID}))
    with tempfile.TemporaryDirectory() as directory:
        llama_56m(Path(directory))
        sizes = {"num_seqs": flags.num_seqs, "num_steps": flags.steps, "num_bound": flags.num_grammars}
        free, bound = (Batch(Path(directory), grammar=grammar, **sizes) for grammar in (None, compiled))
        times = [(free.step_s(), bound.step_s()) for _ in range(flags.steps)]
    without, with_grammars = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    share = statistics.median((b - a) / a for a, b in times)
    print(f"ms a step: {without:.2f} without, {with_grammars:.2f} with {flags.num_grammars} grammars; {share:+.1%}")


if __name__ == "__main__":
    main()
