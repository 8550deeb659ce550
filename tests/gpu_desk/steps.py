"""A worker started on the fake device, and steps for it: grants written by hand, as cachemgr would write them."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np

from quire.cache.v1 import grant_pb2
from quire.worker.config import WorkerConfig
from quire.worker.device.devices import pick_device, use_device
from quire.worker.grant.decoding import AcceptedStep, RowSampling
from quire.worker.run.executor import Executor
from quire.worker.run.loading import Loaded, load
from quire.worker.sampling.parameters import SamplingParams

BLOCK_SIZE = 16
MAX_NUM_SEQS = 8
MAX_MODEL_LEN = 64
BLOCKS_PER_SEQ = MAX_MODEL_LEN // BLOCK_SIZE
PROMPTS = (20, 1, 7, 33)
NUM_MIXED, NUM_DECODES = 4, 8


def start(model: Path, **settings: Any) -> Loaded:
    """Load as `quire worker` does, with the flags' defaults but for sizes."""
    config = make_config(model, **settings)
    use_device(pick_device(config.device))
    return load(config)


def make_config(model: Path, **settings: Any) -> WorkerConfig:
    """Return the flags' defaults, but for sizes and the settings given."""
    nothing = {each.name: None if each.default is MISSING else each.default for each in fields(WorkerConfig)}
    return WorkerConfig(
        **nothing
        | {
            "model": str(model),
            "pool": "default",
            "dtype": "auto",
            "kv_dtype": "auto",
            "device": "auto",
            "attention": "auto",
            "layer_groups": "auto",
            "cuda_graphs": True,
            "dependent_launch": None,
            "max_graph_tokens": 512,
            "deterministic": False,
            "products": "auto",
            "step_graph": "parts",
            "wait": "block",
            "max_whole_graph_tokens": 0,
            "block_size": BLOCK_SIZE,
            "num_blocks": 64,
            "host_memory_bytes": 0,
            "verify_kept_blocks": False,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_step_tokens": 64,
            "max_draft_tokens": 8,
            "threads": 1,
            "trust_remote_code": False,
            "tensor_parallel_size": 1,
        }
        | settings
    )


def make_executor(loaded: Loaded) -> Executor:
    """As quire.worker.run.loading makes it."""
    return Executor(
        loaded.model,
        loaded.pool,
        max_num_seqs=MAX_NUM_SEQS,
        decode=loaded.decode,
        prompts=loaded.prompts,
        host_pool=loaded.host_pool,
    )


def mixed_and_decode_steps(
    params: SamplingParams, *, num_groups: int = 1
) -> tuple[list[AcceptedStep], list[AcceptedStep]]:
    """NUM_MIXED steps in each of which one prompt begins and the others decode, then NUM_DECODES of one token each.

    num_groups are the layer groups of the pool, each with blocks of its own for a sequence.
    """
    lengths: list[int] = []
    steps = []
    for number in range(1, NUM_MIXED + NUM_DECODES + 1):
        grant = grant_pb2.StepGrant(lease_id="lease", step_number=number, known_step_number=number - 1)
        given, sampling = {}, {}
        if number <= NUM_MIXED:
            _admit(grant, number, num_groups)
            given[len(lengths)] = np.arange(PROMPTS[number - 1], dtype=np.int32)
            sampling[number] = RowSampling(params, prompt_token_ids=tuple(range(PROMPTS[number - 1])))
        for index, length in enumerate(lengths):
            _run(grant, index + 1, length, 1)
            lengths[index] = length + 1
        if number <= NUM_MIXED:
            _run(grant, number, 0, PROMPTS[number - 1])
            lengths.append(PROMPTS[number - 1])
        steps.append(AcceptedStep(grant, given, sampling))
    return steps[:NUM_MIXED], steps[NUM_MIXED:]


def take_adapter(steps: list[AcceptedStep], identity: bytes) -> None:
    """Have every second sequence of the steps, from the first one on, run with an adapter."""
    for step in steps:
        step.grant.adapters[:] = [identity]
        step.grant.run_adapters[:] = [seq_id % 2 for seq_id in step.grant.run_sequence_ids]


def verifying_step(num_drafts: int) -> AcceptedStep:
    """The step behind the mixed ones in which each sequence goes on with so many drafts."""
    number = NUM_MIXED + 1
    grant = grant_pb2.StepGrant(lease_id="lease", step_number=number, known_step_number=NUM_MIXED)
    for index, length in enumerate(PROMPTS):
        _run(grant, index + 1, length + NUM_MIXED - 1 - index, 1 + num_drafts)
    grant.run_draft_counts.extend([num_drafts] * NUM_MIXED)
    return AcceptedStep(grant, {run: np.zeros(num_drafts, dtype=np.int32) for run in range(NUM_MIXED)})


def _admit(grant: grant_pb2.StepGrant, seq_id: int, num_groups: int) -> None:
    for group in range(num_groups):
        first = 1 + ((seq_id - 1) * num_groups + group) * BLOCKS_PER_SEQ
        grant.write_sequence_ids.append(seq_id)
        grant.write_layer_groups.append(group)
        grant.write_first_indexes.append(0)
        grant.write_block_counts.append(BLOCKS_PER_SEQ)
        grant.write_block_ids.extend(range(first, first + BLOCKS_PER_SEQ))


def _run(grant: grant_pb2.StepGrant, seq_id: int, start: int, count: int) -> None:
    grant.run_sequence_ids.append(seq_id)
    grant.run_starts.append(start)
    grant.run_token_counts.append(count)
    grant.run_samples.append(True)
